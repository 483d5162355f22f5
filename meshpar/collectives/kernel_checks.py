"""Checks of the arguments of collective kernels, before jax traces them.

`kernel` is always the name of the public function, which is the `where` of the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.sharding import errors
from meshpar.sharding.errors import check_divides, check_positive_int, is_int, near, problem

Axis: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or a tuple of axes that act as a single axis. The first axis varies slowest."""

OPS = ("sum", "mean", "max", "min")


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def ranks_of(kernel: str, axis: Axis) -> int:
    """Return the number of ranks along an axis of the surrounding `shard_map`.

    Raises:
      MeshparError: the axis is unknown, or the code does not run inside a `shard_map` that is manual over it.
    """
    names = (axis,) if isinstance(axis, str) else axis
    requested = f"run over axis={axis!r}"
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        reason, fix = "an axis is a name or a tuple of names", 'write axis="data", for example'
        raise problem(kernel, requested, reason, fix, "wrong-type")
    if len(set(names)) < len(names):
        raise problem(kernel, requested, "an axis occurs twice", "name each axis once", "axis-used-twice")
    return math.prod(_size_of(kernel, name) for name in names)


def ranks_of_levels(kernel: str, inner: Axis, outer: Axis) -> tuple[int, int]:
    """Return the number of ranks per node and the number of nodes. Raises errors as `ranks_of` does."""
    sizes = ranks_of(kernel, inner), ranks_of(kernel, outer)
    if set(axis_names(inner)) & set(axis_names(outer)):
        requested, reason = f"use inner={inner!r} and outer={outer!r}", "an axis is either within nodes or across nodes"
        raise problem(kernel, requested, reason, "name two different axes", "axis-used-twice")
    return sizes


def _size_of(kernel: str, name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        pass
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    requested = f"run over mesh axis `{name}`"
    if not manual:
        fix = f"call it in a function that `jax.shard_map` runs on a mesh with the axis `{name}`"
        raise problem(kernel, requested, "it is not inside a `jax.shard_map`, so it has no ranks", fix, "unknown-axis")
    axes = ", ".join(f"`{axis}`" for axis in manual)
    if name in mesh.axis_names:
        reason = f"the `shard_map` around it is manual over {axes} only"
        raise problem(kernel, requested, reason, f"add `{name}` to its axis_names", "unknown-axis")
    reason = f"the `shard_map` around it is manual over {axes}"
    raise problem(kernel, requested, reason, near(name, manual), "unknown-axis")


def check_choice(kernel: str, name: str, value: object, choices: Iterable[object]) -> None:
    """Check that an argument is among the choices."""
    errors.check_choice(kernel, f"the {name}", tuple(choices), **{name: value})


def check_only(kernel: str, algorithm: str, option: str, value: int, algorithms: tuple[str, ...]) -> None:
    """Check that an option with default 1 is only set for algorithms that support it."""
    if value != 1 and algorithm not in algorithms:
        requested = f"use {option}={value!r} with algorithm={algorithm!r}"
        fix = f"leave it out, or use {' or '.join(map(repr, algorithms))}"
        raise problem(kernel, requested, f"that algorithm has no {option}", fix, "conflict")


def check_op(kernel: str, op: str, dtype: jnp.dtype) -> None:
    """Check that a reduction exists, and supports a dtype."""
    check_choice(kernel, "op", op, OPS)
    requested = f"take the {op} of {dtype}"
    if not jnp.issubdtype(dtype, jnp.number):
        raise problem(kernel, requested, "reductions need numbers", "cast it, for example to int32", "wrong-dtype")
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        fix = 'cast to a floating dtype first, or use op="sum" and divide'
        raise problem(kernel, requested, f"the mean is not of dtype {dtype}", fix, "wrong-dtype")
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise problem(kernel, requested, "complex numbers have no order", "reduce absolute values", "wrong-dtype")


def check_root(kernel: str, root: int, num_ranks: int) -> None:
    """Check that a root rank exists."""
    if not is_int(root, 0) or root >= num_ranks:
        fix = f"use 0 to {num_ranks - 1}"
        raise problem(kernel, f"use root={root!r}", f"there are {num_ranks} ranks", fix, "out-of-range")


def checked_count(kernel: str, name: str, value: int, *, most: int | None = None) -> int:
    """Return an argument after checking that it is an integer from 1 to `most`."""
    check_positive_int(kernel, "a count", **{name: value})
    if most is not None and value > most:
        raise problem(kernel, f"use {name}={value!r}", f"it is at most {most}", f"use 1 to {most}", "out-of-range")
    return value


def checked_dim(kernel: str, dim: int, num_dims: int) -> int:
    """Check that an array has a dim, and return it as a nonnegative index."""
    if not is_int(dim) or not -num_dims <= dim < num_dims:
        reason = f"the array has {num_dims} dims" if num_dims else "the array is a scalar"
        fix = f"use {-num_dims} to {num_dims - 1}" if num_dims else "reshape it"
        raise problem(kernel, f"use dim {dim!r}", reason, fix, "out-of-range")
    return dim % num_dims


def check_parts(kernel: str, size: int, dim: int, num_ranks: int, tiled: bool) -> None:
    """Check that a dim can be divided equally among the ranks."""
    if tiled:
        check_divides(kernel, f"divide dim {dim} of size {size} into {num_ranks} equal parts", size, num_ranks)
    elif size != num_ranks:
        requested = f"give an entry of dim {dim} (size {size}) to each of {num_ranks} ranks"
        reason = "with tiled=False the size of the dim must equal the number of ranks"
        raise problem(kernel, requested, reason, "use tiled=True, or stack an entry per rank", "wrong-shape")


def unsupported_attention(library: str, arrays: Iterable[jax.Array], reason: str, install: str) -> Exception:
    """Return the error for a library that is missing, or that does not support the arrays."""
    shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
    fix = f"{install}; for unsupported arrays, use --set model.attention=blockwise or "
    fix += 'TransformerConfig(attention="blockwise"), which runs anywhere'
    requested = f"attend with {shapes} on a device"
    return problem(f'attention="{library}"', requested, reason, fix, "unsupported-feature")
