"""Command `meshpar trace`: summarize a profile of training steps and compare it with `explain`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from meshpar.cli.main import field_options, layout_fields, layout_options, prepare_devices, print_report


@click.command()
@click.argument("file", metavar="TRACE", type=click.Path())
@click.argument("recipe", type=click.Path(), required=False)
@field_options
@click.option(
    "--cluster", metavar="GPUS",
    help="Cluster of the trace: h100:1x8, or a saved profile: my.json.  [default: local devices]",
)  # fmt: skip
@layout_options
@click.option(
    "--top", metavar="N", default=3, show_default=True, type=click.IntRange(min=1), help="Number of largest costs."
)
def trace(
    file: str, recipe: str | None, assignments: tuple[str, ...], as_json: bool, cluster: str | None, mesh: str | None,
    strategy: str | None, top: int,
) -> None:  # fmt: skip
    """Compare a profile with its prediction: `meshpar trace runs/gpt_stdlib recipes/gpt_stdlib.py`.

    TRACE is an .xplane.pb file, or the folder of a run that was trained with --profile 10:15. If RECIPE is set, its
    step is compiled as in `explain`; use the same --set, --xla and --mesh as in the run. The report then shows the
    axes, bytes and predicted time of collectives, and the device time of the forward pass, backward pass and optimizer.
    """
    use_host = cluster is not None and not cluster.endswith(".json")
    prepare_devices(None, start="jax" if recipe is None else "devices", use_host=use_host)
    from meshpar.inspect import trace as reader

    reader.find(file)  # raise errors before compiling
    more: dict[str, Any] = {}
    if recipe is not None:
        from meshpar.cli.explain_command import Subject
        from meshpar.hardware.clusters import Links, parse_profile
        from meshpar.inspect.pod import PodProcess

        profile = None if cluster is None else parse_profile(cluster)
        links = profile if isinstance(profile, Links) else None
        pod = None if isinstance(profile, Links) else profile
        layout = layout_fields(mesh, strategy)
        with contextlib.redirect_stdout(sys.stderr):
            subject = Subject.of(recipe, pod, layout=layout, assignments=assignments, shapes=None)
            with contextlib.nullcontext() if pod is None else PodProcess() as process:
                more = {"report": subject.explained(process), "links": links}
    print_report(reader.read(file, top=top, **more), as_json=as_json)
