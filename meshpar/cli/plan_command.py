"""`meshpar plan`: the best layouts for a recipe on a cluster, before it is rented."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from meshpar.cli.main import (
    PLOT_SUFFIXES,
    check_output_file,
    field_options,
    hf_option,
    prepare_devices,
    print_report,
    with_model,
    writing,
)
from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from meshpar.planner.plan import Plans

_OF_MOE = ("bound_factor", "nodes_visited", "row_bytes")
"""What the planner asks of a model's MoE layers."""


@click.command()
@click.argument("recipe", type=click.Path())
@field_options
@hf_option
@click.option("--cluster", metavar="GPUS", required=True, help="h100:8x8 (GPU:NODESxGPUS), or a profile's my.json.")
@click.option("--top", metavar="N", default=5, show_default=True, type=click.IntRange(min=1), help="How many plans.")
@click.option(
    "--verify", metavar="K", default=0, type=click.IntRange(min=0), help="Compile the best K for the cluster."
)
@click.option("--save", metavar="FILE", type=click.Path(dir_okay=False), help="Write the plans, for train --plan FILE.")
@click.option("--why-not", metavar="AXES", help="Instead: why a mesh is not the plan, as fsdp=8,tensor=8.")
@click.option("--strategy", metavar="STRATEGY", help="With --why-not: the strategy on it.")
@click.option("--growth", is_flag=True, help="Instead: the model on one node to 16,384 GPUs, by kind of layout.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False), help="With --growth: draw it.")
def plan(
    recipe: str,
    assignments: tuple[str, ...],
    as_json: bool,
    from_hf: str | None,
    cluster: str,
    top: int,
    verify: int,
    save: str | None,
    why_not: str | None,
    strategy: str | None,
    growth: bool,
    plot: str | None,
) -> None:
    """The best layouts for a recipe: `meshpar plan recipes/llama3_8b.py --cluster h100:8x8 --verify 1`.

    Meshes, strategies, recomputation, micro-steps and slices for the recipe's model, global batch and optimizer: those
    that fit, the quickest first. Nothing is run.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed: starting an accelerator would only take time
    prepare_devices(None)
    for path in (save, plot):
        if path:
            check_output_file(path)
    if plot and growth:
        check_output_file(plot, PLOT_SUFFIXES)
    if plot and not growth:
        raise problem("--plot", f"draw {plot}", "it goes with --growth", "leave it out, or ask for the growth")
    if growth and (verify or save or why_not is not None or _is_given("top")):
        exists, fix = "it goes with none of --top, --verify, --save, --why-not", "ask for one of them"
        raise problem("--growth", "tell how layouts grow", exists, fix)
    if strategy is not None and why_not is None:
        raise problem("--strategy", f"use {strategy}", "it goes with --why-not", "leave it out, or name a mesh")
    if why_not is not None and not why_not.strip():
        raise problem("--why-not", "look at no mesh", "it names the axes of one", "write --why-not fsdp=8,tensor=8")
    if growth:
        _grow(recipe, cluster, assignments, from_hf, plot=plot, as_json=as_json)
        return
    with contextlib.redirect_stdout(sys.stderr):  # a recipe may print; the report has standard output for itself
        found = plans_for(recipe, cluster, assignments, from_hf, top=top, verify=verify)
    if save:
        with writing(save):
            found.save(save)
    if why_not is not None:
        answer = found.why_not(mesh=why_not, strategy=strategy)
        click.echo(json.dumps({"mesh": why_not, "strategy": strategy, "why_not": answer}) if as_json else answer)
        return
    print_report(found, as_json=as_json)


def _is_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _grow(
    recipe: str, cluster: str, assignments: tuple[str, ...], from_hf: str | None, *, plot: str | None, as_json: bool
) -> None:
    from meshpar.planner.scaling import grow

    with contextlib.redirect_stdout(sys.stderr):
        search = plans_for(recipe, cluster, assignments, from_hf, top=1, verify=0).search
    assert search is not None
    found = grow(search.workload, search.cluster)
    print_report(found, as_json=as_json)
    if plot:
        from meshpar.cli import plots

        with writing(plot):
            plots.growth(found).savefig(plot)


def plans_for(
    path: str, cluster: str, assignments: tuple[str, ...], from_hf: str | None = None, *, top: int, verify: int
) -> Plans:
    """The plans of a recipe; errors are those of `load_recipe` and `planner.plan.plan`, and for what plans set."""
    from meshpar.cli.explain_command import batch_of
    from meshpar.cli.recipe import build_model, build_optimizer, load_recipe
    from meshpar.hardware.clusters import parse_cluster
    from meshpar.planner.layout import Layout
    from meshpar.planner.plan import plan as plan_for
    from meshpar.sharding.mesh import MeshSpec

    pod = parse_cluster(cluster)
    for one in assignments:
        if (field := one.partition("=")[0].split(".")[0].strip()) in (known := [*Layout.__dataclass_fields__]):
            exists, fix = f"{', '.join(known)} are what is looked for", "leave it out; or name a mesh to --why-not"
            raise problem(f"--set {one}", f"plan with your own `{field}`", exists, fix)
    # The recipe's own micro-steps need not divide a batch that is given here: others are looked for.
    recipe = load_recipe(path, devices=pod.num_devices).override(*assignments, "accumulate=1")
    recipe = with_model(recipe, from_hf, assignments)
    model = build_model(recipe)
    return plan_for(
        model,
        dict(batch_of(recipe, None)),
        pod,
        top=top,
        verify=verify,
        loss=recipe.loss,
        loss_is=recipe.loss_is,
        tx=build_optimizer(recipe, model, MeshSpec().abstract(1)),
        precision=recipe.precision,
        xla=recipe.xla,
        remat=recipe.remat,
        **{name: getattr(getattr(recipe.model, "moe", None), name, None) for name in _OF_MOE},
    )
