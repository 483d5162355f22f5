"""`meshpar bench`: measure collectives and a GPU for the profiles that `plan` and `explain` read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from meshpar.cli.main import (
    PICTURES,
    check_file,
    devices_option,
    output_options,
    prepare_devices,
    print_report,
    writing,
)
from meshpar.sharding.errors import problem


@click.group()
def bench() -> None:
    """Measure collectives and a GPU, as profiles for `plan` and `explain`."""


@bench.command("collectives", short_help="Every algorithm against XLA's own collective.")
@click.option("--mesh", metavar="AXES", help="Whose axes: data=2,tensor=4; -1 takes what is left.  [default: data=-1]")
@click.option(
    "--axis", "axes", metavar="AXIS", multiple=True, help="Only this axis, or a product, data*tensor; may be repeated."
)
@click.option(
    "--collective", "names", metavar="NAME", multiple=True,
    help="Only this one: all_reduce, all_gather, reduce_scatter, all_to_all; may be repeated.",
)  # fmt: skip
@click.option(
    "--algorithm", "algorithms", metavar="NAME", multiple=True,
    help="Only this one: ring, bidirectional, recursive_doubling, recursive_halving, halving_doubling, tree; or root "
    "or parameter_server, which are left out otherwise; may be repeated.",
)  # fmt: skip
@click.option("--min-bytes", metavar="BYTES", default="1kB", show_default=True, help="The smallest payload (SI).")
@click.option(
    "--max-bytes", metavar="BYTES", help="The largest.  [default: 1MB on host devices, 100MB on accelerators]"
)
@click.option("--factor", metavar="F", default=10.0, show_default=True, help="Each payload is F times the one before.")
@click.option(
    "--dtype", metavar="TYPE", default="float32", show_default=True, help="float32, bfloat16, float16, int32."
)
@click.option("--op", metavar="OP", default="sum", show_default=True, help="Of reductions: sum, mean, max, min.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds; the median is kept.")
@devices_option
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Write the fitted links as a profile: for explain, cost and algorithm=\"auto\".",
)  # fmt: skip
@click.option(
    "--plot", metavar="FILE", type=click.Path(dir_okay=False), help="Draw time against size, and the model's lines."
)
@output_options
def collectives(
    mesh: str | None, names: tuple[str, ...], algorithms: tuple[str, ...], min_bytes: str, max_bytes: str | None,
    devices: int | None, save: str | None, plot: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Every algorithm against XLA's own collective, as nccl-tests does; and α and β of each mesh axis.

    \b
    meshpar bench collectives                                     all devices along one axis
    meshpar bench collectives --mesh data=2,tensor=4 --save my.json --plot bench.png
    meshpar bench collectives --collective all_reduce --algorithm ring --min-bytes 1MB --max-bytes 64MB --factor 2

    Columns: time and its quartiles; algbw = size / time; busbw = algbw × 2(N−1)/N for an all-reduce, (N−1)/N for the
    others; ÷ XLA = time over that of XLA's own in the same round; #wrong and the largest error against the reference;
    what the fitted model predicts, and by how much it is off.
    """  # noqa: D301 (click knows a paragraph that it must not fold by its \b)
    prepare_devices(devices)
    import jax

    from meshpar.bench import collective_timing as kernels
    from meshpar.sharding.units import parse_bytes

    for path, suffixes in ((save, (".json",)), (plot, PICTURES)):
        if path:
            check_file(path, suffixes)
    largest = max_bytes or ("1MB" if jax.default_backend() == "cpu" else "100MB")
    with _live() as progress:
        options |= {"names": names or tuple(kernels.COLLECTIVES), "algorithms": algorithms or kernels.DEFAULT}
        options |= {"min_bytes": parse_bytes(min_bytes), "max_bytes": parse_bytes(largest)}
        found = kernels.collectives(mesh, **options, progress=progress)
    print_report(found, as_json=as_json)
    if save:
        _save(found, save)
    if plot:  # last: a picture that cannot be written must not cost the profile
        from meshpar.cli import plots

        with writing(plot):
            plots.collectives(found).savefig(plot)


@bench.command("gpu", short_help="What a GPU reaches: matrix products by size, copies, launches.")
@click.option(
    "--size", "sizes", metavar="N", multiple=True, type=click.IntRange(min=1),
    help="n of n × n matrices; may be repeated.  [default: 512 to 16384, on CPUs 64 to 512]",
)  # fmt: skip
@click.option("--dtype", metavar="TYPE", default="bfloat16", show_default=True, help="bfloat16, float16, float32.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Runs; the median is kept.")
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Write a profile for `plan --cluster FILE`, or add what was measured to the one that is there.",
)  # fmt: skip
@output_options
def gpu(dtype: str, save: str | None, as_json: bool, **options: Any) -> None:
    """Measure the first device: square matrix products by size, a copy and a kernel launch.

    With --save, a profile keeps the results next to its links (`meshpar bench collectives --save`): `plan` and
    `explain` then use the measured products instead of the assumed share of the data sheet's peak.
    """
    prepare_devices(None)
    from meshpar.bench.gpu import products, profile_of

    if save:
        check_file(save, (".json",))
        import jax

        profile_of(jax.devices()[0].device_kind, save)  # refuse before measuring
        if dtype != "bfloat16":
            fix = "leave out --dtype, or --save"
            raise problem(f"--dtype {dtype}", "save its products", "profiles hold products in bfloat16", fix)
    with _live() as progress:
        progress("measuring products")
        found = products(dtype=dtype, **options)
    print_report(found, as_json=as_json)
    if save:
        profile = found.profile(save)
        profile.save(save)
        click.echo(f"saved {save}: {profile.name}", err=True)


@contextlib.contextmanager
def _live() -> Iterator[Callable[[str], None]]:
    """A function that shows one line in a terminal, each in place of the one before; the last is taken away."""
    is_terminal = sys.stderr.isatty()
    yield _progress if is_terminal else lambda line: None
    if is_terminal:
        _progress("")


def _progress(line: str) -> None:
    click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def _save(found: Any, path: str) -> None:
    profile = found.profile()
    profile.save(path)
    click.echo(f"saved {path}: {profile.name}", err=True)
    if found.poor:
        click.secho(f"meshpar: {found.poor}", fg="yellow", err=True)
