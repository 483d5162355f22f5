"""Commands `meshpar checkpoint`: list, inspect, verify and export the checkpoints of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import click

from meshpar.cli.main import output_options, prepare_devices, print_report, traceback_option
from meshpar.sharding import remote
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import is_url
from meshpar.sharding.printing import Plain

run_argument = click.argument("run", type=click.Path())
step_option = click.option("--step", metavar="N", type=int, help="Step of the checkpoint.  [default: latest]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing(Plain):
    """Table of rows, printed as text or JSON."""

    title: str
    rows: tuple[dict[str, Any], ...]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(*(self.rows[0] if self.rows else ()), box=None)
        for row in self.rows:
            table.add_row(*(str(value) for value in row.values()))
        return Group(self.title, table)  # rich wraps a title of Table to the width of the table


@click.group(no_args_is_help=True)
def checkpoint() -> None:
    """Read the checkpoints of a run: `meshpar checkpoint verify runs/gpt_stdlib`. No command modifies the run.

    RUN is the folder of a run, or its checkpoints folder.
    """


@checkpoint.command("ls", short_help="List the checkpoints of a run.")
@run_argument
@output_options
def ls(run: str, as_json: bool) -> None:
    """List the complete checkpoints of a run with their size on disk, oldest first."""
    from meshpar.loop.checkpoint import bytes_of

    folder, steps = _saved_steps(run)
    rows = tuple({"step": step, "bytes": f"{bytes_of(folder / str(step)):,}"} for step in steps)
    print_report(Listing(title=str(folder), rows=rows), as_json=as_json)


@checkpoint.command("inspect", short_help="List the arrays of a checkpoint.")
@run_argument
@step_option
@output_options
def inspect(run: str, step: int | None, as_json: bool) -> None:
    """List the path, shape, dtype and fingerprint of each array. Only the index of the checkpoint is read."""
    from meshpar.loop.checkpoint_index import read_index

    folder, steps = _saved_steps(run, step)
    index = read_index(folder, steps[-1])
    rows = tuple(
        {"path": path, "shape": leaf["shape"], "dtype": leaf["dtype"], "fingerprint": leaf.get("fingerprint", "")}
        for path, leaf in index["leaves"].items()
    )
    title = f"step {steps[-1]}, written by meshpar {index['meshpar']}"
    print_report(Listing(title=title, rows=rows), as_json=as_json)


@checkpoint.command("verify", short_help="Check each array against its fingerprint.")
@run_argument
@click.option("--step", metavar="N", type=int, help="Verify only this step.  [default: all]")
@output_options
def verify(run: str, step: int | None, as_json: bool) -> None:
    """Check each array against the fingerprint that was computed when it was saved.

    The exit code is 1 if a checkpoint is damaged. No recipe or mesh is needed, but the arrays of one checkpoint must
    fit in host memory.
    """
    prepare_devices(1)
    from meshpar.loop.checkpoint_index import damage_of

    folder, steps = _saved_steps(run, step)
    damages = {step: damage_of(folder, step) for step in steps}
    rows = tuple({"step": step, "is": "whole" if why is None else f"damaged: {why}"} for step, why in damages.items())
    print_report(Listing(title=str(folder), rows=rows), as_json=as_json)
    raise SystemExit(1 if any(damages.values()) else 0)


@checkpoint.command("export", short_help="Write the parameters to safetensors files.")
@run_argument
@click.argument("out", metavar="DIR", type=click.Path())
@step_option
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Cast floating-point parameters to this dtype.",
)  # fmt: skip
@click.option("--max-bytes", metavar="BYTES", default="5GB", show_default=True, help="Maximum size of a file (SI).")
@traceback_option
def export(run: str, out: str, step: int | None, dtype: str | None, max_bytes: str) -> None:
    """Write the parameters of any model to safetensors files in a new folder DIR, named by their paths.

    For example: `meshpar checkpoint export runs/gpt_stdlib exported --dtype bfloat16`. No recipe or mesh is needed.
    The optimizer state is not exported, but its averages replace the parameters, as in `mp.eval_params`. Each array is
    checked against its fingerprint. To load a model in transformers, use `meshpar convert to-hf`.
    """
    prepare_devices(1)
    import jax.numpy as jnp

    from meshpar.interop.files import assigned, library, new_folder, whole_folder, write
    from meshpar.loop.checkpoint_index import read_index, read_leaf
    from meshpar.sharding.units import parse_bytes

    library()
    max_file_bytes = int(parse_bytes(max_bytes, minimum=1))
    new_folder(out)  # check it before arrays are read, which can take minutes
    folder, steps = _saved_steps(run, step)
    index = read_index(folder, steps[-1])
    leaves = {path: leaf for path, leaf in index["leaves"].items() if path.startswith("params/")}

    def export_dtype(path: str) -> Any:
        saved = jnp.dtype(leaves[path]["dtype"])
        return saved if dtype is None or not jnp.issubdtype(saved, jnp.floating) else jnp.dtype(dtype)

    sizes = {path: math.prod(leaf["shape"]) * export_dtype(path).itemsize for path, leaf in leaves.items()}
    named = {path.removeprefix("params/"): path for path in leaves}
    files = assigned(((name, sizes[path]) for name, path in named.items()), max_file_bytes)

    def make(name: str) -> Any:
        return read_leaf(folder, index, named[name]).astype(export_dtype(named[name]))

    with whole_folder(out) as fresh:
        write(fresh, files, make, sum(sizes.values()))
    count = sum(math.prod(leaf["shape"]) for leaf in leaves.values())
    click.echo(f"{out}: {count:,} parameters of step {steps[-1]}, {sum(sizes.values()):,} bytes")


def _saved_steps(run: str, step: int | None = None) -> tuple[Any, list[int]]:
    """Return the folder of checkpoints and the saved steps. With `step`, the list has only this step."""
    from etils import epath

    from meshpar.loop.checkpoint import Checkpoints

    path, where = epath.Path(remote.join(run) if is_url(run) else run), f"run {run[:200]}"
    if is_url(run):
        remote.check_url(str(path), where)
    with remote.accessing(str(path), where, "read its checkpoints") if is_url(run) else contextlib.nullcontext():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        is_folder = folder.is_dir()
    steps = Checkpoints(folder).steps() if is_folder else []
    if not steps or step not in (None, *steps):
        code = "not-found" if is_folder else "missing-file"
        reason = f"the saved steps are {steps}" if steps else "it has no checkpoints"
        reason = reason if is_folder else "the folder does not exist"
        fix = "name a saved step of a run, such as runs/NAME"
        raise problem(where, "read its checkpoints", reason, fix, code=code)
    return folder, steps if step is None else [step]
