"""Command `meshpar plan`: search the layouts of a recipe for a cluster, without its devices."""

from __future__ import annotations

import contextlib
import json
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
)
from meshpar.sharding.errors import problem
from meshpar.sharding.units import parse_count

if TYPE_CHECKING:
    from meshpar.planner.plan import Plans

_CHOSEN = ("mesh", "strategy", "step.remat", "step.accumulate", "step.batch_slices")
"""Fields of a recipe that the planner chooses."""


@click.command()
@click.argument("recipe", type=click.Path())
@field_options
@hf_option
@click.option(
    "--cluster", metavar="GPUS", required=True, help="Cluster: h100:8x8 (GPU:NODESxGPUS), or a saved profile: my.json."
)
@click.option("--top", metavar="N", default=5, show_default=True, type=click.IntRange(min=1), help="Number of plans.")
@click.option(
    "--verify", metavar="K", default=0, type=click.IntRange(min=0), help="Compile the best K plans for the cluster."
)
@click.option("--save", metavar="FILE", type=click.Path(dir_okay=False), help="Save the plans for train --plan FILE.")
@click.option("--why-not", metavar="AXES", help="Explain why a mesh is not in the plans: fsdp=8,tensor=8.")
@click.option("--strategy", metavar="STRATEGY", help="Strategy for --why-not.")
@click.option("--growth", is_flag=True, help="Show the fastest layout of each kind for up to 16,384 GPUs.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False), help="With --growth: write a plot.")
@click.option("--tokens", metavar="N", help="Print days and GPU-hours of training on N tokens: 15T or 15e12.")
@click.option("--price", metavar="P", type=float, help="With --tokens: print the cost at P per GPU-hour.")
def plan(
    recipe: str, assignments: tuple[str, ...], as_json: bool, from_hf: str | None, cluster: str, top: int,
    verify: int, save: str | None, why_not: str | None, strategy: str | None, growth: bool, plot: str | None,
    tokens: str | None, price: float | None,
) -> None:  # fmt: skip
    """Find the fastest layouts: `meshpar plan recipes/llama3_8b.py --cluster h100:8x8 --verify 1`.

    The search covers meshes, strategies, rematerialization, micro-steps and slices for the recipe's model, global batch
    and optimizer. The layouts that fit in memory are sorted by predicted step time. The model is not run.
    """
    prepare_devices(None, use_host=True)
    for path, suffixes in ((save, ()), (plot, PLOT_SUFFIXES)):
        if path:
            check_output_file(path, suffixes)
    num_tokens = None if tokens is None else parse_count(tokens, "--tokens")
    is_top_set = click.get_current_context().get_parameter_source("top") is ParameterSource.COMMANDLINE
    others = verify or save or why_not is not None or is_top_set or tokens is not None
    together = "it cannot be combined with --top, --verify, --save, --why-not or --tokens"
    for option, is_wrong, reason, fix in (
        ("--plot", plot and not growth, "--growth is not set", "add --growth, or remove --plot"),
        ("--growth", growth and others, together, "remove the other options"),
        ("--price", price is not None and tokens is None, "--tokens is not set", "add --tokens, or remove --price"),
        ("--strategy", strategy and why_not is None, "--why-not is not set", "add --why-not, or remove --strategy"),
        ("--why-not", why_not is not None and not why_not.strip(), "mesh axes are required", "name mesh axes"),
    ):
        if is_wrong:
            raise problem(option, "use it", reason, fix, code="bad-syntax" if option == "--why-not" else "conflict")
    with contextlib.redirect_stdout(sys.stderr):  # recipes may print, but stdout is for the report
        top, verify = (1, 0) if growth else (top, verify)
        plans = plans_for(recipe, cluster, assignments, from_hf, top=top, verify=verify)
    if growth:
        from meshpar.planner.scaling import grow

        assert plans.search is not None
        growth_report = grow(plans.search.workload, plans.search.cluster)
        print_report(growth_report, as_json=as_json)
        if plot:
            from meshpar import plots

            plots.growth(growth_report).savefig(plot)
        return
    if num_tokens is not None:
        plans = plans.for_tokens(num_tokens, price)
    if save:
        plans.save(save)
    if why_not is not None:
        answer = plans.why_not(mesh=why_not, strategy=strategy)
        click.echo(json.dumps({"mesh": why_not, "strategy": strategy, "why_not": answer}) if as_json else answer)
        return
    print_report(plans, as_json=as_json)


def plans_for(
    path: str, cluster: str, assignments: tuple[str, ...], from_hf: str | None = None, *, top: int, verify: int
) -> Plans:
    """Return the plans for the recipe in a file.

    Raises:
      MeshparError: see `load_recipe` and `planner.plan.plan`, or an assignment sets a field that the planner chooses.
    """
    from meshpar.cli.explain_command import batch_of
    from meshpar.hardware.clusters import parse_cluster
    from meshpar.runs.memory_changes import plan_recipe
    from meshpar.runs.recipe_file import load_recipe

    pod = parse_cluster(cluster)
    for assignment in assignments:
        field = assignment.partition("=")[0].strip()
        if field in _CHOSEN or field.startswith("mesh."):
            reason, fix = f"the planner chooses {', '.join(_CHOSEN)}", "remove it, or check a mesh with --why-not"
            raise problem(f"--set {assignment}", f"set `{field}`", reason, fix, code="conflict")
    # The batch size from --set may not be divisible by the recipe's micro-steps, which the planner replaces.
    recipe = load_recipe(path, devices=pod.num_devices).override(*assignments, "step.accumulate=1")
    recipe = with_model(recipe, from_hf, assignments)
    return plan_recipe(recipe, dict(batch_of(recipe, None)), pod, top=top, verify=verify)
