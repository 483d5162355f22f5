"""Mesh, GPUs and pipeline schedule of a traced run, from its recipe.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshpar.hardware.clusters import cluster_of, gpu_of_kind
from meshpar.parallel.strategy import parse_strategy
from meshpar.sharding.errors import check_cases, is_int
from meshpar.sharding.host_resources import read_json
from meshpar.sharding.mesh import MeshSpec

RECIPE = "recipe.json"
_FIX = "restore the file, or copy the .xplane.pb out of the run folder and pass --mesh and --cluster"
GPUS_PER_NODE = 8
"""Assumed number of GPUs per node, if each process has one GPU."""


def traced_run(trace: Path) -> dict[str, Any]:
    """Return the options `mesh`, `cluster` and `schedule` of `inspect.trace.read` for a trace in a run folder.

    Options that the run does not determine are left out: all for a file outside a run folder, and `cluster` for devices
    that are not in the catalogue.
    """
    folder = next((folder for folder in trace.absolute().parents if (folder / RECIPE).is_file()), None)
    saved = {} if folder is None else read_json(folder / RECIPE, f"run {folder}: {RECIPE}", _FIX)
    if not isinstance(saved, dict) or not isinstance(program := saved.get("program"), dict):
        return {}
    processes, sizes = program.get("processes", 1), saved.get("mesh", {})
    check_cases(
        f"run {folder}: {RECIPE}", "read its mesh", "damaged-file",
        (not is_int(processes, 1), f"the number of processes is {processes!r:.50}", _FIX),
        (not isinstance(sizes, dict), f"the mesh is {sizes!r:.50}", _FIX),
    )  # fmt: skip
    options: dict[str, Any] = {}
    # written by `StepProgram.to_json`: `8 × NVIDIA H100 80GB HBM3`
    devices = re.fullmatch(r"([0-9]+) × (.*)", str(program.get("devices", "")))
    if devices is not None:
        num_devices = int(devices[1])
        axes = (f"{axis}={size}" for axis, size in sizes.items() if isinstance(size, int))
        options["mesh"] = MeshSpec.parse(",".join(axes)).resolve(num_devices)
        if (gpu := gpu_of_kind(devices[2])) is not None:
            # If each process has one GPU, the nodes are unknown. Nodes of eight GPUs are the most frequent.
            per_node = num_devices // processes if processes < num_devices else min(num_devices, GPUS_PER_NODE)
            options["cluster"] = cluster_of(gpu, nodes=-(-num_devices // per_node), gpus_per_node=per_node)
    if "pipeline_parallel" in str(saved.get("strategy")):
        pipeline = parse_strategy(str(saved["strategy"])).pipeline
        options["schedule"] = None if pipeline is None else pipeline.table()
    return options
