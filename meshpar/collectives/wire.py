"""The few motions that kernels are made of: send to a neighbour, cut into parts, join, reduce with a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.kernel_checks import Axis, check_cut, check_tiled, checked_dim

Combine: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(what arrived, what is here) -> what is here next."""

COMBINE: dict[str, Combine] = {"sum": lax.add, "max": lax.max, "min": lax.min}


def varying(x: jax.Array, axis: Axis) -> jax.Array:
    """`x` as a value that may differ between ranks: what a permute gives back, and what loops must start with."""
    x = jnp.asarray(x)
    known = jax.typeof(x).manual_axis_type.varying
    new = tuple(name for name in ((axis,) if isinstance(axis, str) else axis) if name not in known)
    return lax.pcast(x, new, to="varying") if new else x


def varying_alike(axis: Axis, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays as values that vary over the axis, and over every other one that any of them varies over.

    So the gradient of one that is the same at ranks of another axis is summed over that axis, by jax.
    """
    each = [varying(x, axis) for x in arrays]
    everywhere = tuple(sorted({name for x in each for name in jax.typeof(x).manual_axis_type.varying}))
    return [varying(x, everywhere) for x in each]


def send(x: jax.Array, axis: Axis, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """`x` of the source, at the target of each (source, target) pair; zeros at ranks that are no target.

    Ranks count as `axis` names its axes, the first varying slowest: as for `axis_index`, XLA's own collectives and a
    PartitionSpec. `lax.ppermute` counts in the order of the mesh, or refuses any other.
    """
    names = (axis,) if isinstance(axis, str) else axis
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    sizes = [lax.axis_size(name) for name in ordered]
    in_mesh = np.arange(math.prod(sizes)).reshape(sizes).transpose([ordered.index(name) for name in names]).reshape(-1)
    return lax.ppermute(x, ordered, in_mesh[np.array(list(pairs), int).reshape(-1, 2)].tolist())


def pass_on(x: jax.Array, axis: Axis, by: int, num_ranks: int) -> jax.Array:
    """`x` of the rank `by` places back on the ring."""
    return send(x, axis, [(rank, (rank + by) % num_ranks) for rank in range(num_ranks)])


def doublings(num_ranks: int) -> list[int]:
    """1, 2, 4, ... below the number of ranks: how far apart partners are in the steps of a recursive algorithm."""
    return [2**level for level in range((num_ranks - 1).bit_length())]


def reordered(parts: jax.Array, order: jax.Array) -> jax.Array:
    """All parts `[N, ...]` in another order."""
    return parts.at[order].get(mode="promise_in_bounds", unique_indices=True)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def cut(kernel: str, x: jax.Array, dim: int, num_ranks: int, tiled: bool) -> jax.Array:
    """One part for each rank, in front: `[A, B] -> [N, A/N, B]` tiled, `[N, B] -> [N, B]` otherwise (dim 0)."""
    check_tiled(kernel, tiled)
    dim = checked_dim(kernel, dim, x.ndim)
    check_cut(kernel, x.shape[dim], dim, num_ranks, tiled)
    if tiled:
        x = x.reshape(*x.shape[:dim], num_ranks, x.shape[dim] // num_ranks, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def join(kernel: str, parts: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """The parts `[N, ...]` end to end along a dim, or stacked along a new one: `cut` undone."""
    check_tiled(kernel, tiled)
    dim = checked_dim(kernel, dim, parts.ndim - tiled)
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]) if tiled else x


def flat_parts(x: jax.Array, num_parts: int) -> jax.Array:
    """Any array as `[num_parts, c]`, with zeros at the end where it does not divide."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % num_parts)).reshape(num_parts, -1)


def take(parts: jax.Array, index: jax.Array) -> jax.Array:
    """One part of `[N, ...]`."""
    return lax.dynamic_index_in_dim(parts, index, keepdims=False)


def put(parts: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """The parts `[N, ...]` with one replaced, in place where the compiler can."""
    return lax.dynamic_update_index_in_dim(parts, part, index, 0)


def unflat(parts: jax.Array, like: jax.Array) -> jax.Array:
    """`flat_parts` undone."""
    return parts.reshape(-1)[: like.size].reshape(like.shape)


# ---- Reductions ------------------------------------------------------------------------------------------------------


def xla_reduced(x: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
    """XLA's own all-reduce, with a result that varies over the axis as those of the kernels do."""
    reductions: dict[Any, Any] = {lax.add: lax.psum, lax.max: lax.pmax, lax.min: lax.pmin}
    return varying(reductions[combine](x, axis), axis)


def reduced(
    kernel: Callable[[jax.Array, Combine], jax.Array],
    x: jax.Array,
    op: str,
    num_ranks: int,
    *,
    linear: Callable[[jax.Array], jax.Array] | None = None,
    spread: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> jax.Array:
    """A reduction by any of `OPS`, with the derivative of the reference whatever the kernel does inside.

    A sum's derivative is the kernel itself. That of max and min goes to the ranks that hold the extremum, in equal
    shares, as `jnp.max` has it; pair by pair it would come out in unequal ones.

    Args:
      kernel: reduces by a given combination of two.
      linear: the sum in a form that transposes well, when that is not the kernel's own.
      spread: the result, brought to where its terms are.
    """
    if op == "mean":
        return reduced(kernel, x, "sum", num_ranks, linear=linear) / num_ranks
    if not jnp.issubdtype(x.dtype, jnp.inexact) or (op == "sum" and linear is None):
        return kernel(x, COMBINE[op])
    total = linear or (lambda t: kernel(t, lax.add))

    @jax.custom_jvp
    def run(x: jax.Array) -> jax.Array:
        return kernel(x, COMBINE[op])

    @run.defjvp
    def derivative(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        y = run(x)
        if op == "sum":
            return y, total(dx)
        holds = (x == spread(y)).astype(x.dtype)
        # Where nothing is received (off the root of a `reduce`) no rank holds anything.
        return y, total(holds * dx) / jnp.maximum(total(holds), 1)

    return run(x)
