"""`meshpar checkpoint`: what a run has saved, what a checkpoint holds, whether it is whole; its parameters as files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import click

from meshpar.cli.main import output_options, prepare_devices, print_report, traceback_option
from meshpar.sharding.errors import problem
from meshpar.sharding.printing import Plain

run_argument = click.argument("run", type=click.Path())
step_option = click.option("--step", metavar="N", type=int, help="Which; by default the newest.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing(Plain):
    """Rows to print, in JSON a list of them."""

    title: str
    rows: tuple[dict[str, Any], ...]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(*(self.rows[0] if self.rows else ()), box=None)
        for row in self.rows:
            table.add_row(*(str(value) for value in row.values()))
        return Group(self.title, table)  # a table's own title is broken to the table's width


@click.group(no_args_is_help=True)
def checkpoint() -> None:
    """Checkpoints of a run: `meshpar checkpoint verify runs/gpt_stdlib`. Nothing of it is changed.

    RUN is a run's folder, or that of its checkpoints.
    """


@checkpoint.command("ls")
@run_argument
@output_options
def ls(run: str, as_json: bool) -> None:
    """The complete checkpoints of a run, oldest first, with their bytes on disk."""
    from meshpar.loop.checkpoint import bytes_of

    folder, steps = _found(run)
    rows = tuple({"step": step, "bytes": f"{bytes_of(folder / str(step)):,}"} for step in steps)
    print_report(Listing(title=str(folder), rows=rows), as_json=as_json)


@checkpoint.command("inspect")
@run_argument
@step_option
@output_options
def inspect(run: str, step: int | None, as_json: bool) -> None:
    """Every array of a checkpoint: path, shape, dtype, fingerprint; read from its index, not from the arrays."""
    from meshpar.loop.checkpoint import read_index

    folder, step = _chosen(run, step)
    index = read_index(folder, step)
    rows = tuple(
        {"path": path, "shape": leaf["shape"], "dtype": leaf["dtype"], "fingerprint": leaf.get("fingerprint", "")}
        for path, leaf in index["leaves"].items()
    )
    print_report(Listing(title=f"step {step}, written by meshpar {index['meshpar']}", rows=rows), as_json=as_json)


@checkpoint.command("verify")
@run_argument
@click.option("--step", metavar="N", type=int, help="Only this one; by default all.")
@output_options
def verify(run: str, step: int | None, as_json: bool) -> None:
    """Read checkpoints and hold every array to the fingerprint that was taken before writing.

    Exits 1 where one is damaged. It needs no recipe and no mesh; the arrays of one checkpoint fit the host's memory.
    """
    prepare_devices(1)
    from meshpar.loop.checkpoint import damage_of

    folder, steps = _found(run)
    if step is not None:
        steps = [_chosen(run, step)[1]]
    found = {one: damage_of(folder, one) for one in steps}
    rows = tuple({"step": one, "is": "whole" if why is None else f"damaged: {why}"} for one, why in found.items())
    print_report(Listing(title=str(folder), rows=rows), as_json=as_json)
    raise SystemExit(1 if any(found.values()) else 0)


@checkpoint.command("export")
@run_argument
@click.argument("out", metavar="DIR", type=click.Path())
@step_option
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of floating-point parameters; else as is."
)
@click.option("--max-bytes", metavar="BYTES", default="5GB", show_default=True, help="The most of one file (SI).")
@traceback_option
def export(run: str, out: str, step: int | None, dtype: str | None, max_bytes: str) -> None:
    """The parameters of any model, by their paths, as safetensors files in the new folder DIR.

    As in `meshpar checkpoint export runs/gpt_stdlib exported --dtype bfloat16`. Without optimizer state, recipe or
    mesh; every array is held to its fingerprint. What transformers is to load is `meshpar convert to-hf`'s.
    """
    prepare_devices(1)
    import jax.numpy as jnp

    from meshpar.interop.files import assigned, library, new_folder, whole_folder, write
    from meshpar.loop.checkpoint import read_index, read_leaf
    from meshpar.sharding.units import parse_bytes

    library()
    most_bytes = int(parse_bytes(max_bytes, minimum=1))
    new_folder(out)  # minutes before it is written
    folder, step = _chosen(run, step)
    index = read_index(folder, step)
    leaves = {path: leaf for path, leaf in index["leaves"].items() if path.startswith("params/")}

    def dtype_now(path: str) -> Any:
        own = jnp.dtype(leaves[path]["dtype"])
        return own if dtype is None or not jnp.issubdtype(own, jnp.floating) else jnp.dtype(dtype)

    sizes = {path: math.prod(leaf["shape"]) * dtype_now(path).itemsize for path, leaf in leaves.items()}
    named = {path.removeprefix("params/"): path for path in leaves}
    files = assigned(((name, sizes[path]) for name, path in named.items()), most_bytes)

    def make(name: str) -> Any:
        return read_leaf(folder, index, named[name]).astype(dtype_now(named[name]))

    with whole_folder(out) as fresh:
        write(fresh, files, make, sum(sizes.values()))
    count = sum(math.prod(leaf["shape"]) for leaf in leaves.values())
    click.echo(f"{out}: {count:,} parameters of step {step}, {sum(sizes.values()):,} bytes")


def _found(run: str) -> tuple[Path, list[int]]:
    from meshpar.loop.checkpoint import Checkpoints

    folder = Path(run)
    if (folder / "checkpoints").is_dir():
        folder /= "checkpoints"
    if not folder.is_dir():
        raise problem(
            f"run {run[:200]}", "look at its checkpoints", "there is no such folder", "name one, as runs/NAME"
        )
    steps = Checkpoints(folder).steps()
    if not steps:
        raise problem(
            f"run {run[:200]}", "look at its checkpoints", f"{folder} holds none", "name a run that has saved"
        )
    return folder, steps


def _chosen(run: str, step: int | None) -> tuple[Path, int]:
    folder, steps = _found(run)
    if step is not None and step not in steps:
        raise problem(f"run {run}", f"look at step {step}", f"there are steps {steps}", "ask for one of them")
    return folder, steps[-1] if step is None else step
