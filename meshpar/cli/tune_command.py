"""Command `meshpar tune`: search for faster options of a recipe by measurement."""

from __future__ import annotations

import sys

import click

from meshpar.cli.main import (
    check_output_file,
    devices_option,
    hf_option,
    prepare_devices,
    print_report,
    recipe_options,
    select_devices,
    with_model,
)


@click.command()
@recipe_options
@click.option(
    "--seconds", metavar="S", default=300.0, show_default=True, type=click.FloatRange(1, 86_400),
    help="Time limit. No compilation and no measurement starts that would exceed it.",
)  # fmt: skip
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False), help="Save the result for `meshpar train --tuned FILE`."
)
@click.option(
    "--compile-cache", metavar="DIR",
    help="Folder or URL for compiled programs, which `train` loads, or none. Default: none on CPUs, otherwise "
    "~/.cache/meshpar/programs.",
)  # fmt: skip
@hf_option
@devices_option
def tune(
    recipe: str, assignments: tuple[str, ...], as_json: bool, seconds: float, save: str | None,
    compile_cache: str | None, from_hf: str | None, devices: int | None,
) -> None:  # fmt: skip
    """Search for faster options of a recipe: `meshpar tune recipes/gpt_stdlib.py --save tuned.json`.

    The options are the implementation of attention, rematerialization, micro-steps at the same global batch, layers per
    loop iteration and, on GPUs, matmuls of experts, matmuls by Triton, CUDA graphs and autotuning. Alternatives are
    compiled in threads. Programs that exceed the memory, or that `explain` predicts to be much slower, are left out.
    All remaining programs run in alternate blocks with the recipe. A change is chosen if it is faster by more than the
    noise.

    The file is valid for the same program, devices and versions: `meshpar train recipes/gpt_stdlib.py --tuned
    tuned.json --name tuned`.
    """
    prepare_devices(devices)
    from meshpar.bench.tuning import tune as search
    from meshpar.runs.recipe_file import load_recipe

    if save:
        check_output_file(save, (".json",))
    selected = select_devices(devices)
    config = load_recipe(recipe, devices=len(selected)).override(*assignments)
    config = with_model(config, from_hf, assignments)

    def show(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(line, err=True)

    tuning = search(config, seconds=seconds, devices=selected, compile_cache=compile_cache, progress=show)
    if save:
        tuning.tuned().save(save)
        click.echo(f"saved {save}: {tuning.tuned()}", err=True)
    print_report(tuning, as_json=as_json)
