"""Command `meshpar adopt`: write a recipe for a model without logical names."""

from __future__ import annotations

import contextlib
import os
import sys

import click

from meshpar.cli.main import check_output_file, cluster_help, output_options, prepare_devices, print_report
from meshpar.sharding.errors import problem


@click.command()
@click.argument("target", metavar="MODULE:CLASS")
@click.option(
    "--inputs", metavar="INPUTS", required=True,
    help="Example inputs, passed by keyword: 'ids=int32[8,128],deterministic=True'. The first dim of each array is the "
    "global batch. Or a Python file that defines a dict `inputs`.",
)  # fmt: skip
@click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True,
    help="Argument of the class (num_layers=2). config=MODULE:CLASS and config.num_layers=2 create an "
    "object. Repeatable.",
)  # fmt: skip
@click.option(
    "--cluster", metavar="GPUS", help=f"Compile layouts for this cluster: {cluster_help} Default: host devices."
)
@click.option(
    "--loss", type=click.Choice(["cross-entropy", "squared-error"]),
    help="Loss of the recipe. Default: cross entropy for logits, and squared error for other outputs.",
)  # fmt: skip
@click.option(
    "--layouts", metavar="N", default=6, show_default=True, type=click.IntRange(min=1), help="Layouts to compile."
)
@click.option(
    "--small", metavar="NAME=VALUE", multiple=True,
    help="Argument of the class for a small version of the model, which is verified. Repeatable.",
)  # fmt: skip
@click.option("--verify/--no-verify", "verified", default=True, help="Compare the best layout with a single device.")
@click.option("--output", metavar="FILE", type=click.Path(dir_okay=False), help="Write the recipe to this new file.")
@output_options
def adopt(
    target: str, inputs: str, settings: tuple[str, ...], cluster: str | None, loss: str | None, layouts: int,
    small: tuple[str, ...], verified: bool, output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a recipe for a model of another package: `meshpar adopt flax.nnx:Linear --set in_features=64 ...`.

    The model is a class of Flax or Equinox, or a function that returns a module. It is traced without weights. The
    command proposes names for the dims of parameters, compiles layouts for the cluster, ranks them by simulated step
    time, and compares the gradients of the best layout with a single device. The recipe contains the rules as code. If
    the gradients differ, the exit code is 1.
    """
    if output:
        check_output_file(output, (".py",))
        if os.path.exists(output):
            reason, fix = "it exists already, perhaps with your changes", "name a new file, or remove it"
            raise problem(output, "write the recipe", reason, fix, code="already-exists")
    prepare_devices(None, use_host=True)
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that modules of the current folder can be imported
    from meshpar.runs.adoption import adopt as run

    with contextlib.redirect_stdout(sys.stderr):  # the model may print, but stdout is for the report
        adoption = run(
            target, inputs, settings=settings, cluster=cluster, loss=loss, num_layouts=layouts, small=small,  # type: ignore[arg-type]
            verified=verified,
        )  # fmt: skip
    print_report(adoption, as_json=as_json)
    if output:
        adoption.save(output)
        if not as_json:
            click.echo(f"wrote {output}: meshpar train {output}")
    sys.exit(0 if adoption.verified is None or adoption.verified.ok else 1)
