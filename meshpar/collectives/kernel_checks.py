"""A kernel's arguments, checked where it is called: four-part errors instead of a trace of jax's insides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.sharding.types import is_whole, near, near_or, problem

Axis: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or several that count as one, the first varying slowest."""

OPS = ("sum", "mean", "max", "min")


def ranks_of(kernel: str, axis: Axis) -> int:
    """Number of ranks along a mesh axis that the surrounding `shard_map` is manual over.

    Raises:
      ValueError: there is no such axis, or no `shard_map` around.
    """
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise problem(
            kernel, f"run over axis={axis!r}", "an axis is a name, or a tuple of names", 'write axis="data", say'
        )
    if len(set(names)) < len(names):
        raise problem(kernel, f"run over axis={axis!r}", "it names an axis twice", "name every axis once")
    return math.prod(_size_of(kernel, name) for name in names)


def ranks_of_levels(kernel: str, inner: Axis, outer: Axis) -> tuple[int, int]:
    """(ranks in a node, nodes).

    Raises:
      ValueError: as `ranks_of`; or an axis that is both inside the nodes and across them.
    """
    sizes = ranks_of(kernel, inner), ranks_of(kernel, outer)
    inside, across = ({axis} if isinstance(axis, str) else set(axis) for axis in (inner, outer))
    if inside & across:
        exists = "an axis is either inside the nodes or across them"
        raise problem(kernel, f"run over {inner!r} inside and {outer!r} across", exists, "name two different axes")
    return sizes


def _size_of(kernel: str, name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        pass
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    asked = f"run over mesh axis `{name}`"
    if not manual:
        fix = f"call it in a function that `jax.shard_map` runs on a mesh with the axis `{name}`"
        raise problem(kernel, asked, "it is not inside a `jax.shard_map`, so there are no ranks to speak of", fix)
    shown = ", ".join(f"`{one}`" for one in manual)
    if name in mesh.axis_names:
        exists = f"the `shard_map` around it is manual over {shown} only"
        raise problem(kernel, asked, exists, f"add `{name}` to its axis_names")
    raise problem(kernel, asked, f"the `shard_map` around it is manual over {shown}", near(name, manual))


def check_choice(kernel: str, what: str, asked: object, options: Iterable[object]) -> None:
    """Raises `ValueError` when a value is not among the options."""
    known = tuple(options)
    if asked not in known:
        shown = ", ".join(f"`{one}`" for one in known)
        fix = near_or(str(asked), map(str, known), "use one of them")
        raise problem(kernel, f"use {what}={asked!r}", f"there are {shown}", fix)


def check_only(kernel: str, algorithm: str, option: str, given: int, having: tuple[str, ...]) -> None:
    """Raises `ValueError` when an option is set for an algorithm that has none of the kind."""
    if given != 1 and algorithm not in having:
        fix = f"leave it out, or take {' or '.join(repr(one) for one in having)}"
        raise problem(kernel, f"use {option}={given!r} with algorithm={algorithm!r}", f"that one has no {option}", fix)


def check_op(kernel: str, op: str, dtype: jnp.dtype) -> None:
    """Raises `ValueError` when there is no such reduction, or none for this dtype."""
    check_choice(kernel, "op", op, OPS)
    is_number = jnp.issubdtype(dtype, jnp.number)
    if not is_number:
        raise problem(kernel, f"take the {op} of {dtype}", "reductions are of numbers", "cast it, to int32 say")
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        fix = 'cast to a floating dtype first, or take op="sum" and divide'
        raise problem(kernel, f"take the mean of {dtype}", f"a mean of {dtype} is not {dtype}", fix)
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        exists = "complex numbers have no order"
        raise problem(kernel, f"take the {op} of {dtype}", exists, "reduce their absolute values")


def checked_root(kernel: str, root: int, num_ranks: int) -> int:
    """The root, when there is such a rank; raises `ValueError` otherwise."""
    if not is_whole(root, 0) or root >= num_ranks:
        raise problem(kernel, f"have root={root!r}", f"there are {num_ranks} ranks", f"use 0 to {num_ranks - 1}")
    return root


def checked_count(kernel: str, what: str, asked: int, *, most: int | None = None) -> int:
    """A count of at least one, and at most `most`; raises `ValueError` otherwise."""
    if not is_whole(asked, 1) or (most is not None and asked > most):
        fix = "give 1 or more" if most is None else f"give 1 to {most}"
        exists = "it is a whole number from 1" + ("" if most is None else f" to {most}")
        raise problem(kernel, f"use {what}={asked!r}", exists, fix)
    return asked


def checked_dim(kernel: str, dim: int, num_dims: int) -> int:
    """The dim counted from the front; raises `ValueError` when the array has no such dim."""
    if not is_whole(dim) or not -num_dims <= dim < num_dims:
        exists = f"the array has {num_dims} dims" if num_dims else "the array is a scalar"
        fix = f"give {-num_dims} to {num_dims - 1}" if num_dims else "reshape it"
        raise problem(kernel, f"work along dim {dim!r}", exists, fix)
    return dim % num_dims


def checked_distance(kernel: str, by: int) -> int:
    """A number of ranks to go, either way; raises `ValueError` for anything but a whole number."""
    if not is_whole(by):
        raise problem(
            kernel, f"go by={by!r} ranks", "it is a whole number, negative for backwards", "give 1 or -1, say"
        )
    return by


def check_tiled(kernel: str, tiled: bool) -> None:
    """Raises `ValueError` for anything but True and False."""
    if not isinstance(tiled, bool):
        exists = "parts are laid end to end, or stacked along a dim of their own"
        raise problem(kernel, f"use tiled={tiled!r}", exists, "write True or False")


def check_cut(kernel: str, size: int, dim: int, num_ranks: int, tiled: bool) -> None:
    """Raises `ValueError` when a dim cannot be cut into one equal part for each rank."""
    if tiled and size % num_ranks:
        exists, fix = f"{size} is not a multiple of {num_ranks}", f"pad it to {-(-size // num_ranks) * num_ranks}"
        raise problem(kernel, f"cut dim {dim} of size {size} into {num_ranks} equal parts", exists, fix)
    if not tiled and size != num_ranks:
        asked = f"give one entry of dim {dim} (size {size}) to each of {num_ranks} ranks"
        exists = "with tiled=False the dim is as long as there are ranks"
        raise problem(kernel, asked, exists, "use tiled=True, or stack one entry for each rank")
