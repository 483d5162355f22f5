"""Command `meshpar diff`: find the first value in which two layouts of a recipe differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.main import HOST_DEVICES, prepare_devices, print_report, recipe_options
from meshpar.cli.verify_command import QUICKLY, batch_of, shrunk

if TYPE_CHECKING:
    from meshpar.loop.verify import Case
    from meshpar.runs.recipe import Recipe

ONE_DEVICE = "data=1; ddp()"


@click.command()
@recipe_options
@click.option(
    "--case", metavar="NAME", help="The layout: 'fsdp=4; fsdp(min_bytes=0); accumulate=2'. Default: as in the recipe."
)
@click.option("--against", metavar="NAME", default=ONE_DEVICE, show_default=True, help="The layout to compare with.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32", "float64"]), default="float32", show_default=True,
    help="Dtype of the computation. bfloat16 has float32 parameters.",
)  # fmt: skip
@click.option(
    "--steps", metavar="N", default=1, show_default=True, type=click.IntRange(1, 100), help="Steps to compare."
)
@click.option("--seed", metavar="N", default=0, show_default=True, type=click.IntRange(0, 2**31), help="Random seed.")
@click.option("--devices", metavar="N", type=click.IntRange(1, 64), default=HOST_DEVICES, help="XLA host devices.")
def diff(
    recipe: str, assignments: tuple[str, ...], as_json: bool, case: str | None, against: str, dtype: str, steps: int,
    seed: int, devices: int,
) -> None:  # fmt: skip
    """Find the first value that differs: `meshpar diff recipes/gpt_stdlib.py --case 'fsdp=8; fsdp()'`.

    Both layouts run the same step on host devices. Loss, gradients, optimizer state and parameters are compared, and if
    one differs, the values of all equations. The report names the module, the source line, the devices, the kind of the
    difference and its usual cause. Rounding is measured and not reported. As for `meshpar verify`, a model of
    meshpar.models is reduced to a few thousand parameters. The exit code is 1 if the layouts differ.
    """
    os.environ["XLA_FLAGS"] = " ".join([*QUICKLY, os.environ.get("XLA_FLAGS", "")])  # the last value of a flag wins
    prepare_devices(devices)
    import jax

    from meshpar.layers.precision import Precision
    from meshpar.loop.diff import diff as run
    from meshpar.loop.verify import named
    from meshpar.runs.recipe import build_model, build_optimizer
    from meshpar.runs.recipe_file import explain_recipe_errors, load_recipe
    from meshpar.training.options import StepOptions
    from meshpar.training.state import init_state
    from meshpar.training.step import TrainStep

    # Recipes and losses may print, but stdout is for the report.
    with contextlib.redirect_stdout(sys.stderr), explain_recipe_errors([recipe], "run its training step"):
        full = load_recipe(recipe, devices=devices).override(*assignments)
        params = "float32" if dtype == "bfloat16" else dtype
        precision = Precision(params=params, compute=None if dtype == params else dtype)
        with jax.enable_x64(dtype == "float64"):
            small = shrunk(full, params)
            layouts = [named(against), named(case) if case is not None else _layout(small, devices)]
            model = build_model(small)
            meshes = [layout.mesh.build(jax.devices()[: _size(layout)]) for layout in layouts]
            training = [
                TrainStep(
                    small.loss, StepOptions(**{"loss_is": small.step.loss_is, **layout.options, "precision": precision})
                )
                for layout in layouts
            ]
            tx = build_optimizer(small, model, meshes[0])
            state = init_state(
                model, tx, mesh=meshes[0], strategy=layouts[0].strategy, precision=precision, key=jax.random.key(seed)
            )
            for number in range(steps):
                batch = batch_of(small, seed + number)
                report = run(training[0], state, batch, training[1], mesh=meshes[1], strategy=layouts[1].strategy)
                if report:
                    break
                state, _ = training[0](state, batch)
    print_report(report, as_json=as_json)
    sys.exit(1 if report else 0)


def _layout(recipe: Recipe, devices: int) -> Case:
    """Return the layout of a recipe."""
    from meshpar.loop.verify import Case
    from meshpar.parallel import as_strategy
    from meshpar.sharding.mesh import MeshSpec

    sizes: Any = recipe.mesh.resolve(devices)
    options = {field.name: getattr(recipe.step, field.name) for field in dataclasses.fields(recipe.step)}
    return Case(mesh=MeshSpec(**sizes), strategy=as_strategy(recipe.strategy), options=options)


def _size(layout: Case) -> int:
    return math.prod(layout.mesh.values())
