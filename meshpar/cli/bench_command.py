"""`meshpar bench`: measurements, each in its own subcommand."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from meshpar.cli.main import (
    PICTURES,
    check_file,
    devices_option,
    field_options,
    layout_options,
    output_options,
    prepare_devices,
    print_report,
    writing,
)
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_local


@click.group()
def bench() -> None:
    """Measure what meshpar promises about its own speed."""


@bench.command("step", short_help="A training step against bare jax.jit.")
@click.option("--pairs", default=20, show_default=True, type=click.IntRange(min=2), help="How often both run in turn.")
@click.option("--devices", default=8, show_default=True, type=click.IntRange(min=1), help="XLA host devices.")
@output_options
def step(pairs: int, devices: int, as_json: bool) -> None:
    """A training step against the same model in bare jax.jit with hand-written shardings."""
    prepare_devices(devices)
    from meshpar.bench.training import step as measure

    print_report(measure(pairs=pairs), as_json=as_json)


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
        options |= {"names": names or tuple(kernels.COLLECTIVES), "algorithms": algorithms or kernels.USUAL}
        options |= {"min_bytes": parse_bytes(min_bytes), "max_bytes": parse_bytes(largest)}
        found = kernels.collectives(mesh, **options, progress=progress)
    print_report(found, as_json=as_json)
    if save:
        _save(found, save)
    if plot:  # last: a picture that cannot be written must not cost the profile
        from meshpar.cli import plots

        with writing(plot):
            plots.collectives(found).savefig(plot)


@bench.command("gpu", short_help="What a GPU reaches: products by size, and whole training steps of a decoder.")
@click.option(
    "--size", "sizes", metavar="N", multiple=True, type=click.IntRange(min=1),
    help="n of n × n matrices; may be repeated.  [default: 512 to 16384, on CPUs 64 to 512]",
)  # fmt: skip
@click.option("--dtype", metavar="TYPE", default="bfloat16", show_default=True, help="bfloat16, float16, float32.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Runs; the median is kept.")
@click.option("--step/--no-step", "has_step", default=True, show_default=True, help="Measure whole steps, too.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Of each kind; the median.")
@click.option("--rows", metavar="N", type=click.IntRange(min=1), help="Of a batch.  [default: by the GPU's memory]")
@click.option(
    "--seq-len", metavar="T", type=click.IntRange(min=2), help="Tokens of a row.  [default: 4096, on CPUs 64]"
)
@click.option("--trace", metavar="DIR", type=click.Path(file_okay=False), help="Keep the profile there, for XProf.")
@click.option(
    "--save", metavar="FILE", type=click.Path(dir_okay=False),
    help="Write a profile for `plan --cluster FILE`, or add what was measured to the one that is there.",
)  # fmt: skip
@output_options
def gpu(
    dtype: str, has_step: bool, steps: int, rows: int | None, seq_len: int | None, trace: str | None,
    save: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """What the first device reaches: square products by size, a copy, and whole training steps of a decoder.

    The decoder has 1.6e9 parameters on GPUs of 80 GB and rows of 4,096 tokens, on CPUs next to none. Its step runs in
    bfloat16, with matmuls in 8 bits (fp8, fp8-rowwise), and as plain Flax under jax.jit: time, utilisation of the data
    sheet's peak and of the best product, the kernels of one profiled step, and the step that explain's clock predicts.
    What the device cannot run is told in a line. Under eight minutes: nothing is begun behind seven.

    With --save all stand in a profile beside links (`meshpar bench collectives --save`): `plan` and `explain` take the
    products in place of the assumed share of the data sheet's peak.
    """
    began_s = time.perf_counter()
    prepare_devices(None)
    from meshpar.bench.gpu import products, profile_of, whole

    if save:
        check_file(save, (".json",))
        import jax

        profile_of(jax.devices()[0].device_kind, save)  # what cannot be kept is not measured
    if trace:
        check_local(trace, f"--trace {trace}", "name a local folder")
    if dtype != "bfloat16" and (save or has_step):
        exists, fix = "steps, profiles and plans are of bfloat16", "leave out --dtype, or --save and give --no-step"
        raise problem(f"--dtype {dtype}", "keep its products, or hold steps to them", exists, fix)
    with _live() as progress:
        progress("measuring products")
        found = products(dtype=dtype, **options)
        if has_step:
            batch = {"rows": rows, "seq_len": seq_len}
            found = whole(found, **batch, repeats=steps, folder=trace, began_s=began_s, progress=progress)
    print_report(found, as_json=as_json)
    if save:
        profile = found.profile(save)
        profile.save(save)
        click.echo(f"saved {save}: {profile.name}", err=True)


@bench.command("moe", short_help="MoE layers against one-hot einsums.")
@click.option(
    "--experts", "num_experts", metavar="E", multiple=True, type=click.IntRange(min=1),
    help="How many; may be repeated.  [default: 8, 16, 64]",
)  # fmt: skip
@click.option("--tokens", default=1024, show_default=True, type=click.IntRange(min=1), help="Of one device.")
@click.option("--top-k", default=2, show_default=True, type=click.IntRange(min=1), help="Experts of a token.")
@click.option("--width", default=64, show_default=True, type=click.IntRange(min=1), help="Of a token.")
@click.option("--hidden", default=128, show_default=True, type=click.IntRange(min=1), help="Hidden width of an expert.")
@click.option("--form", "forms", metavar="NAME", multiple=True, help="Only this one; may be repeated.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds; the median is kept.")
@click.option("--devices", default=8, show_default=True, type=click.IntRange(min=1), help="XLA host devices.")
@output_options
def moe(num_experts: tuple[int, ...], forms: tuple[str, ...], devices: int, as_json: bool, **options: Any) -> None:
    """An MoE layer in every form, against the one-hot einsums that most JAX code sends tokens with.

    Columns: time forward, and forward and backward, and ÷ = time over that of one-hot einsums in the same round; FLOPs
    of matrix products, temporaries and the largest of them, all of one device; the share of choices that was dropped.
    """
    prepare_devices(devices)
    from meshpar.bench import moe as measured

    with _live() as progress:
        options |= {"forms": forms or measured.FORMS, "num_experts": num_experts or measured.NUM_EXPERTS}
        found = measured.layers(**options, progress=progress)
    print_report(found, as_json=as_json)


@bench.command("overlap", short_help="What compile options hide of a step's communication.")
@click.argument("recipes", metavar="RECIPE...", nargs=-1, required=True, type=click.Path())
@field_options
@click.option("--cluster", metavar="GPUS", required=True, help="Compile for this pod: h100:8x8 (GPU:NODESxGPUS).")
@layout_options
@click.option(
    "--options", "names", metavar="SET", multiple=True,
    help="Only this set of options, by the name it has in the table; may be repeated.",
)  # fmt: skip
def overlap(
    recipes: tuple[str, ...],
    assignments: tuple[str, ...],
    as_json: bool,
    cluster: str,
    mesh: str | None,
    strategy: str | None,
    names: tuple[str, ...],
) -> None:
    """What sets of compile options hide of the communication of recipes' training steps, compiled for a cluster.

    \b
    meshpar bench overlap recipes/llama3_8b.py --cluster h100:8x8 --set remat=full
    meshpar bench overlap recipes/llama3_8b.py --cluster h100:8x8 --options default --xla xla_gpu_async_dot=true

    What --xla sets joins and overrides every set. Columns: bytes of temporaries; gathers and scatters of a layer that
    have a matmul between start and done, of all; the share of the time of all collectives that compute hides, by the
    simulated schedule, and what it does not.
    """  # noqa: D301 (click knows a paragraph that it must not fold by its \b)
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed
    prepare_devices(None)
    from meshpar.bench import overlap as measured
    from meshpar.cli.explain_command import Subject
    from meshpar.hardware.clusters import parse_cluster

    pod = parse_cluster(cluster)
    sets = measured.sets_of(names)
    layout = [f"{field}={value}" for field, value in (("mesh", mesh), ("strategy", strategy)) if value]
    found: list[measured.OverlapRow] = []
    with contextlib.redirect_stdout(sys.stderr), _live() as progress:
        for path in recipes:
            subject = Subject.of(path, pod, layout=layout, assignments=assignments, shapes=None)
            step, state = subject.step_and_state()
            found += measured.rows(subject.recipe.name, step, state, subject.batch, pod, sets=sets, progress=progress)
    print_report(measured.Overlaps(pod.name, tuple(found)), as_json=as_json)


@bench.command("run", short_help="What a run costs beside its steps: saves, restores, input, memory.")
@click.argument("recipe", type=click.Path())
@field_options
@click.option(
    "--part", "parts", metavar="NAME", multiple=True,
    type=click.Choice(["saves", "restore", "input", "memory"]),
    help="Only this one: saves, restore, input, memory; may be repeated.",
)  # fmt: skip
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(min=1), help="How often both run in turn.")
@click.option("--restored-bytes", metavar="BYTES", default="2GB", show_default=True, help="Of the restored state (SI).")
@click.option("--steps", default=2000, show_default=True, type=click.IntRange(min=20), help="Memory is watched for.")
@click.option("--folder", metavar="DIR", type=click.Path(file_okay=False, exists=True), help="On the disk to measure.")
@devices_option
def run(
    recipe: str,
    assignments: tuple[str, ...],
    as_json: bool,
    parts: tuple[str, ...],
    pairs: int,
    restored_bytes: str,
    steps: int,
    folder: str | None,
    devices: int | None,
) -> None:
    """What a run costs beside its steps, each in turn with what it is to be small beside.

    \b
    meshpar bench run recipes/gpt_stdlib.py
    meshpar bench run recipes/gpt_stdlib.py --part restore --folder /mnt/disk --restored-bytes 2GB

    Twenty steps with an asynchronous save over twenty without; restore over reading the same files; batches over steps
    on as many tokens; memory of a run late over early.
    """  # noqa: D301 (click knows a paragraph that it must not fold by its \b)
    prepare_devices(devices)
    import jax

    from meshpar.bench import run as measured
    from meshpar.cli.recipe import load_recipe
    from meshpar.sharding.units import parse_bytes

    found = load_recipe(recipe, devices=jax.device_count()).override(*assignments)
    more: dict[str, Any] = {"parts": parts or measured.PARTS, "restored_bytes": parse_bytes(restored_bytes, least=1)}
    with _live() as progress:
        figures = measured.run(found, pairs=pairs, steps=steps, folder=folder, progress=progress, **more)
    print_report(figures, as_json=as_json)


@bench.command("watch", short_help="What watchdog and agreement add to a step of two processes.")
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(min=1), help="How often both run in turn.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=10), help="Of each.")
@click.option("--processes", metavar="N", default=2, show_default=True, type=click.IntRange(min=2), help="Local ones.")
@output_options
def watch(pairs: int, steps: int, processes: int, as_json: bool) -> None:
    """Steps that do next to nothing, with and without the watch over other processes, in turn."""
    from meshpar.cli.local_processes import PARENT, follow_parent
    from meshpar.cli.local_processes import run as start

    if PARENT not in os.environ:
        prepare_devices(None, start="nothing")
        sys.exit(start(click.get_current_context().find_root().obj, processes=processes))
    follow_parent()
    prepare_devices(None, start="jax")
    from meshpar.cli import launch

    launch.join()
    import jax

    from meshpar.bench import run as measured
    from meshpar.loop.coordination import this_pod

    pod = this_pod()
    assert pod is not None
    figures = measured.watch(pod, pairs=pairs, steps=steps)
    if jax.process_index() == 0:
        print_report(figures, as_json=as_json)


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
