"""XLA's compile options of a step, for `train` and `explain`, and the fingerprint of a program."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
from jax.sharding import Mesh

from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import read_text
from meshpar.sharding.types import AnyMesh

Value = bool | int | float | str
Options = Mapping[str, Value]
"""Name of an XLA flag, without dashes -> value."""

GPU_OPTIONS: Options = MappingProxyType({"xla_gpu_enable_latency_hiding_scheduler": True})
"""Defaults for GPUs. Newer versions of XLA enable the scheduler by default; the version in jax 0.10 does not."""


IN_PLACE: Options = MappingProxyType(
    {f"xla_{platform}_copy_insertion_use_region_analysis": True for platform in ("cpu", "gpu")}
)
"""Options for pipelines. Without the region analysis, XLA copies all buffers in each tick."""


OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""Name of the option for the maximum number of concurrent collectives."""

APART: Options = MappingProxyType({OVERLAP_LIMIT: 4, "xla_disable_hlo_passes": "multi_output_fusion"})
"""Options for batch slices (`batch_slices`): run collectives concurrently, and do not fuse operations of different
slices. A fused operation, such as the norms of two slices, would wait for the messages of both."""


NO_GRAPHS: Options = MappingProxyType({"xla_gpu_enable_command_buffer": ""})
"""Options for profiled steps: launch each kernel separately instead of in CUDA graphs. The profiler reports all kernels
of a graph with the name of its launch."""


LATENCIES = "xla_gpu_pgle_profile_file_or_directory_path"
"""Name of the option for a file with measured times of kernels and collectives, for XLA's scheduler. Without a file,
the scheduler assumes the same latency for all collectives."""


def overlap_limit(options: Options) -> int:
    """Return the maximum number of concurrent collectives."""
    return int(options.get(OVERLAP_LIMIT, 1))


def pipelined(kind: str) -> dict[str, Value]:
    """Return the option to overlap collectives of a loop with its next iteration. `kind` is `all_gather`, ..."""
    if jax.__version_info__ >= (0, 12):
        return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}  # in XLA_FLAGS the value is "on"
    return {f"xla_gpu_enable_pipelined_{kind}": True}


def options_for(mesh: AnyMesh, user: Options, strategy: Options = MappingProxyType({})) -> dict[str, Value]:
    """Return the options for the devices of a mesh. An abstract mesh stands for GPUs.

    Args:
      mesh: the mesh of the step.
      user: options of the user, which override all others.
      strategy: options of the strategy. Options for other platforms are left out.
    """
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    for_platform = {name: value for name, value in strategy.items() if name.startswith("xla_cpu_") == on_cpu}
    return {**({} if on_cpu else GPU_OPTIONS), **for_platform, **user}


def check_kind(options: object) -> None:
    """Check that the options are a dict from names that begin with `xla_` to values of a valid type."""
    for name, value in options.items() if isinstance(options, Mapping) else [(None, options)]:
        if not isinstance(name, str) or not name.startswith("xla_") or not isinstance(value, Value):
            reason = "names of XLA's options begin with xla_, and values are numbers, bools or strings"
            fix = "write xla={'xla_gpu_all_gather_combine_threshold_bytes': 1073741824}, a dict without dashes"
            raise problem(f"xla={options!r}", "compile with it", reason, fix, code="wrong-type")


def check_options(options: Options) -> Options:
    """Return the options after checking that XLA accepts them."""
    check_kind(options)
    where = f"xla={dict(options)}"
    for name, value in options.items():
        if name == LATENCIES:  # XLA would silently ignore an invalid file
            requested, fix = f"use the latencies of {value}", "use a file written by a profiler, with the suffix .pbtxt"
            if not str(value).endswith(".pbtxt"):
                raise problem(where, requested, "XLA reads only *.pbtxt files as text", fix, code="wrong-type")
            if not read_text(str(value), where, fix, requested=requested).startswith("costs {"):
                raise problem(where, requested, "the file does not begin with `costs {`", fix, code="damaged-file")
        # A new function for each option, because jax's cache does not distinguish 1 from True.
        program = jax.jit(lambda: 0, compiler_options={name: value})
        try:  # XLA checks options before it compiles
            program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition(": ")[2].partition("\n")[0].rstrip(".")
            near = difflib.get_close_matches(name, GPU_OPTIONS, 1)
            fix = "see XLA's flags for this version of jax; switches are True or False"
            if near and name not in near:
                fix = f"did you mean {near[0]}?"
            raise problem(where, f"set {name} to {value!r}", reason, fix, code="unknown-name") from error
    return options


def fingerprint(lowered: jax.stages.Lowered, options: Options) -> str:
    """Return twelve hexadecimal digits that are equal for equal lowered programs and compile options.

    The content of a latency file is included. Device numbers are part of the lowered program.
    """
    if LATENCIES in options:
        content = Path(str(options[LATENCIES])).read_bytes()
        options = {**options, LATENCIES: hashlib.sha256(content).hexdigest()}
    text = json.dumps([jax.__version__, sorted(options.items()), lowered.as_text()])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
