"""Command `meshpar trace`: compare a profile of training steps with the predictions for its program."""

from __future__ import annotations

import math
from typing import Any

import click

from meshpar.cli.main import check_output_file, output_options, prepare_devices, print_report


@click.command()
@click.argument("file", metavar="TRACE", type=click.Path())
@click.option(
    "--cluster", metavar="GPUS",
    help="GPUs of the trace: h100:1x8, or a saved profile: my.json.  [default: from the run folder]",
)  # fmt: skip
@click.option(
    "--mesh", metavar="SIZES", help="Mesh of the trace, such as fsdp=4,tensor=2.  [default: from the run folder]"
)
@click.option(
    "--top", metavar="N", default=3, show_default=True, type=click.IntRange(min=1), help="Number of largest costs."
)
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Add the measured rates of kernels and links to a cluster profile.",
)  # fmt: skip
@output_options
def trace(file: str, cluster: str | None, mesh: str | None, top: int, save: str | None, as_json: bool) -> None:
    """Compare a profile with its prediction: `meshpar trace runs/gpt_stdlib`.

    TRACE is an .xplane.pb file, or the folder of a run that was trained with --profile 10:15. The trace contains the
    compiled program, and the run folder the mesh and the devices, so no recipe is needed. The report has the measured
    time of each kernel and collective next to its predicted time, and totals by phase and by cause. A profile written
    by --save is a value of --cluster for `explain`, `plan` and `trace`.
    """
    if save:
        check_output_file(save, (".json",))
    prepare_devices(None, start="jax", use_host=True)
    from meshpar.hardware.clusters import Links, parse_profile
    from meshpar.inspect import trace as reader
    from meshpar.inspect.trace_file import find
    from meshpar.runs.traced_run import traced_run
    from meshpar.sharding.errors import problem
    from meshpar.sharding.mesh import MeshSpec

    options: dict[str, Any] = traced_run(find(file))
    if mesh is not None:
        spec = MeshSpec.parse(mesh)
        options["mesh"] = spec.resolve(math.prod(spec.values()))
    if cluster is not None:
        profile = parse_profile(cluster)
        traced = options.get("cluster")
        if traced is not None and (isinstance(profile, Links) or profile.gpu != traced.gpu):
            reason, fix = f"the run used {traced.gpu.name}", "pass a profile of these GPUs, or remove --cluster"
            raise problem(f"--cluster {cluster}", "predict the traced steps", reason, fix, code="conflict")
        options["links" if isinstance(profile, Links) else "cluster"] = profile
    report = reader.read(file, top=top, **options)
    if save:
        from meshpar.bench.trace_profile import profile_of_trace

        profile_of_trace(report, save, options.get("cluster")).save(save)
    print_report(report, as_json=as_json)
