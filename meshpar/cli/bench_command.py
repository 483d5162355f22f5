"""Commands `meshpar bench`: measure collectives, a GPU and training steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from meshpar.cli.main import (
    PLOT_SUFFIXES,
    check_output_file,
    devices_option,
    field_options,
    hf_option,
    output_options,
    prepare_devices,
    print_report,
    recipe_options,
    select_devices,
    with_model,
)
from meshpar.sharding.errors import problem


@click.group()
def bench() -> None:
    """Measure collectives, a GPU and training steps. Saved profiles are used by `plan` and `explain`."""


@bench.command("collectives", short_help="Compare collective algorithms with XLA.")
@click.option(
    "--mesh", metavar="AXES", help="Mesh axes: data=2,tensor=4; -1 uses all remaining devices.  [default: data=-1]"
)
@click.option(
    "--axis", "axes", metavar="AXIS", multiple=True,
    help="Measure only this axis or product of axes (data*tensor); can be repeated.",
)  # fmt: skip
@click.option(
    "--collective", "names", metavar="NAME", multiple=True,
    help="Measure only all_reduce, all_gather, reduce_scatter or all_to_all; can be repeated.",
)  # fmt: skip
@click.option(
    "--algorithm", "algorithms", metavar="NAME", multiple=True,
    help="Measure only ring, bidirectional, recursive_doubling, recursive_halving, halving_doubling or tree, or the "
    "non-default root or parameter_server; can be repeated.",
)  # fmt: skip
@click.option("--min-bytes", metavar="BYTES", default="1kB", show_default=True, help="Smallest payload (SI).")
@click.option(
    "--max-bytes", metavar="BYTES", help="Largest payload.  [default: 1MB on host devices, 100MB on accelerators]"
)
@click.option("--factor", metavar="F", default=10.0, show_default=True, help="Ratio of successive payloads.")
@click.option(
    "--dtype", metavar="TYPE", default="float32", show_default=True, help="float32, bfloat16, float16, int32."
)
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(min=1),
    help="Number of rounds; the median is reported.",
)  # fmt: skip
@devices_option
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Save the fitted links as a profile for explain, cost and algorithm=\"auto\".",
)  # fmt: skip
@click.option(
    "--plot", metavar="FILE", type=click.Path(dir_okay=False),
    help="Write a plot of time over size, with the fitted model.",
)  # fmt: skip
@output_options
def collectives(
    mesh: str | None, names: tuple[str, ...], algorithms: tuple[str, ...], min_bytes: str, max_bytes: str | None,
    devices: int | None, save: str | None, plot: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Compare collective algorithms with XLA, as in nccl-tests, and fit α and β of each mesh axis.

    \b
    meshpar bench collectives                                     all devices along one axis
    meshpar bench collectives --mesh data=2,tensor=4 --save my.json --plot bench.png
    meshpar bench collectives --collective all_reduce --algorithm ring --min-bytes 1MB --max-bytes 64MB --factor 2

    The columns are: time (median) and quartiles; algbw = size / time; busbw = algbw × 2(N−1)/N for an all-reduce and
    algbw × (N−1)/N for other collectives; ÷ XLA, the time relative to XLA's collective in the same round; #wrong, the
    number of elements with an error above rounding; max error; model, the time predicted with the fitted link; off, the
    error of this prediction.
    """  # noqa: D301 (click does not wrap paragraphs that start with \b)
    prepare_devices(devices)
    import jax

    from meshpar.bench import collective_timing as kernels
    from meshpar.sharding.units import parse_bytes

    for path, suffixes in ((save, (".json",)), (plot, PLOT_SUFFIXES)):
        if path:
            check_output_file(path, suffixes)
    largest = max_bytes or ("1MB" if jax.default_backend() == "cpu" else "100MB")
    with _live() as progress:
        options |= {"names": names or tuple(kernels.COLLECTIVES), "algorithms": algorithms or kernels.DEFAULT}
        options |= {"min_bytes": parse_bytes(min_bytes), "max_bytes": parse_bytes(largest)}
        timings = kernels.collectives(mesh, **options, progress=progress)
    print_report(timings, as_json=as_json)
    if save:
        _save(timings.profile(), save)
        if timings.poor:
            click.secho(f"meshpar: {timings.poor}", fg="yellow", err=True)
    if plot:  # after the profile, which must be saved even if plotting fails
        from meshpar import plots

        plots.collectives(timings).savefig(plot)


@bench.command("gpu", short_help="Measure matmuls, attention, grouped matmuls, copies and kernel launches.")
@click.option(
    "--size", "sizes", metavar="N", multiple=True, type=click.IntRange(min=1),
    help="Measure only square matrices of this size, copies and launches; can be repeated.",
)  # fmt: skip
@click.option(
    "--dtype", metavar="TYPE", default="bfloat16", show_default=True,
    help="Dtype of square matrices: bfloat16, float16 or float32.",
)  # fmt: skip
@click.option("--recipe", metavar="FILE", type=click.Path(), help="Measure also the matmuls of a recipe.")
@field_options
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(min=1),
    help="Number of runs; the median is reported.",
)  # fmt: skip
@click.option(
    "--seconds", metavar="S", default=30.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="Time limit. The least important measurements are dropped and listed.",
)  # fmt: skip
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Save a profile for `plan --cluster FILE`, or add the results to an existing profile.",
)  # fmt: skip
def gpu(
    dtype: str, recipe: str | None, assignments: tuple[str, ...], save: str | None, as_json: bool, **options: Any
) -> None:
    """Measure the rates of kernels on the first device.

    \b
    meshpar bench gpu --save my.json
    meshpar bench gpu --recipe recipes/llama3_8b.py --set batch_size=8 --save my.json

    Measures square matmuls in bfloat16 and fp8, causal attention forward and backward with each implementation by
    length and head size, grouped matmuls and their gradients, a copy and kernel launches. Kernels that the device does
    not support are left out. With --save, the results are added to a profile, which can also contain the links from
    `meshpar bench collectives --save`. With this profile, `plan` and `explain` use the measured rates.
    """  # noqa: D301 (click does not wrap paragraphs that start with \b)
    prepare_devices(None)
    import jax

    from meshpar.bench.gpu import gpu_rates, profile_of
    from meshpar.runs.recipe_file import load_recipe

    if save:
        check_output_file(save, (".json",))
        profile_of(jax.devices()[0].device_kind, save)  # check the existing profile before measuring
        if dtype != "bfloat16":
            reason, fix = "profiles contain only bfloat16 products", "remove --dtype or --save"
            raise problem(f"--dtype {dtype}", "save the results", reason, fix, code="unsupported-feature")
    if assignments and recipe is None:
        fix = "pass --recipe FILE, or remove --set"
        raise problem("meshpar bench gpu --set", "change a recipe", "there is no --recipe", fix, code="conflict")
    config = None if recipe is None else load_recipe(recipe).override(*assignments)
    with _live() as progress:
        rates = gpu_rates(dtype=dtype, recipe=config, progress=progress, **options)
    print_report(rates, as_json=as_json)
    if save:
        _save(rates.profile(save), save)


@bench.command("step", short_help="Measure the training step of a recipe.")
@recipe_options
@click.option(
    "--steps", "count", metavar="N", default=12, show_default=True, type=click.IntRange(1, 100_000),
    help="Number of measured steps of each configuration.",
)  # fmt: skip
@click.option(
    "--against", metavar="FIELD=VALUE", multiple=True,
    help="Measure a second configuration alternately: the recipe with this field changed. Repeatable, for several "
    "fields of the second configuration.",
)  # fmt: skip
@hf_option
@devices_option
def step(
    recipe: str, assignments: tuple[str, ...], as_json: bool, count: int, against: tuple[str, ...], from_hf: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Measure training steps on synthetic tokens, without checkpoints, next to the prediction of `explain`.

    \b
    meshpar bench step recipes/gpt_stdlib.py
    meshpar bench step recipes/gpt_stdlib.py --against step.remat=minimal --against step.accumulate=2

    Prints the median and the minimum of the steps, tokens/s, FLOP/s, utilization, peak memory and the time of the first
    step. Model FLOPs per token are 6 N + 6 L H D T with causal attention. The rows "full attention" count
    6 N + 12 L H D T, as torchtitan and older versions of NeMo do. N is the number of matmul parameters per token,
    without the input embedding.

    With --against, blocks of both configurations alternate. The ratio of the times is the median over the rounds, and
    its noise is half of the 95 % interval of this median.
    """  # noqa: D301 (click does not wrap paragraphs that start with \b)
    prepare_devices(devices)
    from meshpar.bench.step_timing import steps
    from meshpar.runs.recipe_file import load_recipe

    selected = select_devices(devices)
    config = with_model(load_recipe(recipe, devices=len(selected)).override(*assignments), from_hf, assignments)
    print_report(steps(config, steps=count, against=against, devices=selected), as_json=as_json)


@contextlib.contextmanager
def _live() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on a single line of the terminal, which is cleared at the end."""

    def show(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)

    yield show
    show("")


def _save(profile: Any, path: str) -> None:
    profile.save(path)
    click.echo(f"saved {path}: {profile.name}", err=True)
