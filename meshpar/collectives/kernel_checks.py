"""Checks of the arguments of collective kernels, before jax traces them.

`kernel` is the name of the public function, with which the error begins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.sharding.errors import MeshparError, check_cases, check_choice, check_divides, is_int, near, problem

Axis: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or a tuple of axes that act as a single axis. The first axis varies slowest."""

OPS = ("sum", "mean", "max", "min")


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def ranks_of(kernel: str, axis: Axis) -> int:
    """Return the number of ranks along an axis that the surrounding `shard_map` is manual over."""
    names, requested = (axis,) if isinstance(axis, str) else axis, f"run over axis={axis!r}"
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        reason, fix = "an axis is a name or a tuple of names", 'write axis="data", for example'
        raise problem(kernel, requested, reason, fix, "wrong-type")
    if len(set(names)) < len(names):
        raise problem(kernel, requested, "an axis occurs twice", "name each axis once", "axis-used-twice")
    try:
        return math.prod(lax.axis_size(name) for name in names)
    except NameError:
        mesh = jax.sharding.get_abstract_mesh()
    unknown = next(name for name in names if name not in mesh.manual_axes)
    reason = f"the `shard_map` around the kernel is manual over {', '.join(f'`{name}`' for name in mesh.manual_axes)}"
    if not mesh.manual_axes:
        reason = "the kernel is not inside a `jax.shard_map`, so there are no ranks"
        fix = f"call the kernel in a function that `jax.shard_map` runs on a mesh with the axis `{unknown}`"
    else:
        add_axis = f"add `{unknown}` to the axis_names of the `shard_map`"
        fix = add_axis if unknown in mesh.axis_names else near(unknown, mesh.manual_axes)
    raise problem(kernel, f"run over mesh axis `{unknown}`", reason, fix, "unknown-axis")


def ranks_of_levels(kernel: str, inner: Axis, outer: Axis) -> tuple[int, int]:
    """Return the number of ranks per node and the number of nodes."""
    sizes = ranks_of(kernel, inner), ranks_of(kernel, outer)
    ranks_of(kernel, (*axis_names(outer), *axis_names(inner)))  # raises if an axis is on both levels
    return sizes


def check_only(kernel: str, algorithm: str, option: str, value: int, algorithms: tuple[str, ...]) -> None:
    """Check that an option with default 1 is only set for algorithms that support it."""
    if value != 1 and algorithm not in algorithms:
        requested = f"use {option}={value!r} with algorithm={algorithm!r}"
        fix = f"leave out {option}, or use {' or '.join(map(repr, algorithms))}"
        raise problem(kernel, requested, f"that algorithm has no {option}", fix, "conflict")


def check_op(kernel: str, op: str, dtype: jnp.dtype) -> None:
    """Check that a reduction exists, and supports a dtype."""
    check_choice(kernel, "the reduction", OPS, op=op)
    is_inexact, is_complex = (jnp.issubdtype(dtype, kind) for kind in (jnp.inexact, jnp.complexfloating))
    to_float = 'cast to a floating dtype first, or use op="sum" and divide'
    check_cases(
        kernel, f"take the {op} of {dtype}", "wrong-dtype",
        (not jnp.issubdtype(dtype, jnp.number), "reductions need numbers", "cast the array, for example to int32"),
        (op == "mean" and not is_inexact, f"the mean of {dtype} values need not be {dtype}", to_float),
        (op in ("max", "min") and is_complex, "complex numbers have no order", "reduce absolute values"),
    )  # fmt: skip


def check_index(kernel: str, requested: str, index: object, valid: Sequence[int], reason: str) -> None:
    """Check that an index is among the valid ones."""
    if not is_int(index) or index not in valid:
        fix = f"use {valid[0]} to {valid[-1]}" if valid else "use an array with more dims"
        raise problem(kernel, requested, reason, fix, "out-of-range")


def check_root(kernel: str, root: int, num_ranks: int) -> None:
    """Check that a root rank exists."""
    check_index(kernel, f"use root={root!r}", root, range(num_ranks), f"there are {num_ranks} ranks")


def checked_dim(kernel: str, dim: int, num_dims: int) -> int:
    """Check that an array has a dim, and return it as a nonnegative index."""
    check_index(kernel, f"use dim {dim!r}", dim, range(-num_dims, num_dims), f"the array has {num_dims} dims")
    return dim % num_dims


def check_parts(kernel: str, size: int, dim: int, num_ranks: int, tiled: bool) -> None:
    """Check that a dim can be divided equally among the ranks."""
    if tiled:
        check_divides(kernel, f"divide dim {dim} of size {size} into {num_ranks} equal parts", size, num_ranks)
    elif size != num_ranks:
        requested = f"give an entry of dim {dim} (size {size}) to each of {num_ranks} ranks"
        reason = "with tiled=False the size of the dim must equal the number of ranks"
        raise problem(kernel, requested, reason, "use tiled=True, or stack an entry per rank", "wrong-shape")


@contextlib.contextmanager
def library_errors(where: str, operation: str, fix: str, *arrays: jax.Array) -> Iterator[None]:
    """Raise a `MeshparError` if an optional library is missing or does not support the arrays."""
    try:
        yield
    except (NotImplementedError, ExceptionGroup, RuntimeError, ValueError) as error:
        if isinstance(error, MeshparError):
            raise
        errors: Iterable[Exception] = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        reason = "; ".join(str(e).partition("\n")[0].rstrip(".") for e in errors)
        shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
        requested = f"{operation} {shapes} on a device"
        raise problem(where, requested, reason, fix, "unsupported-feature") from error


def attention_errors(library: str, install: str, *arrays: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Return `library_errors` for an attention kernel, with blockwise attention as the alternative."""
    fix = f"{install}; for unsupported arrays, use --set model.attention=blockwise or "
    fix += 'TransformerConfig(attention="blockwise"), which runs anywhere'
    return library_errors(f'attention="{library}"', "attend with", fix, *arrays)
