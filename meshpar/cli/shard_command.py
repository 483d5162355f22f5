"""Command `meshpar shard`: show how the model of a recipe is sharded."""

from __future__ import annotations

import click

from meshpar.cli.main import (
    hf_option,
    layout_fields,
    layout_options,
    prepare_devices,
    print_report,
    recipe_options,
    with_model,
)
from meshpar.sharding.errors import problem


@click.command()
@recipe_options
@layout_options
@hf_option
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Number of devices of the mesh.")
def shard(
    recipe: str, assignments: tuple[str, ...], as_json: bool, mesh: str | None, devices: int | None,
    strategy: str | None, from_hf: str | None,
) -> None:  # fmt: skip
    """Show how the model of a recipe is sharded. Needs no devices.

    Lists the shape, logical names, matching rule and bytes per device of each array, and the totals.
    """
    prepare_devices(None, use_host=True)
    from meshpar.hardware.compile_options import check_options
    from meshpar.runs.recipe import build_model, build_optimizer
    from meshpar.runs.recipe_file import load_recipe
    from meshpar.training.sharding_table import shardings

    config = load_recipe(recipe, devices=devices).override(*layout_fields(mesh, strategy), *assignments)
    config = with_model(config, from_hf, assignments)
    if devices is None and -1 in config.mesh.values():
        where = f"mesh {', '.join(f'{axis}={size}' for axis, size in config.mesh.items() if size != 1)}"
        reason = "the size -1 depends on the number of devices"
        raise problem(where, "compute shardings", reason, "set the number: --devices 4096", code="missing-argument")
    check_options(config.step.xla)  # they change no sharding, but an error is more useful now than during training
    abstract_mesh = config.mesh.abstract(devices)
    model = build_model(config)
    tx = build_optimizer(config, model, abstract_mesh)
    report = shardings(model, abstract_mesh, config.strategy, tx=tx, precision=config.step.precision)
    print_report(report, as_json=as_json)
