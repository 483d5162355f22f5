"""Building blocks of collective kernels: sends, array splitting, and reductions with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.kernel_checks import Axis, axis_names, check_parts, checked_dim
from meshpar.sharding.errors import check_bool

Combine: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(received array, local array) -> new local array."""

TILED = "the parts are concatenated along the dim, instead of stacked"

COMBINE: dict[str, Combine] = {"sum": lax.add, "max": lax.max, "min": lax.min}


def varying(x: jax.Array, axis: Axis) -> jax.Array:
    """Mark `x` as varying over `axis`, as jax requires for the carry of a loop with permutes."""
    x = jnp.asarray(x)
    missing = tuple(name for name in axis_names(axis) if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_alike(axis: Axis, *arrays: jax.Array) -> list[jax.Array]:
    """Mark all arrays as varying over `axis`, and over all axes over which any of the arrays varies.

    If an array was replicated over one of these axes, jax sums its gradient over that axis.
    """
    marked = [varying(x, axis) for x in arrays]
    all_axes = tuple(sorted({name for x in marked for name in jax.typeof(x).manual_axis_type.varying}))
    return [varying(x, all_axes) for x in marked]


def send(x: jax.Array, axis: Axis, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Send `x` from the source to the target of each (source, target) pair. Other ranks receive zeros.

    Ranks are numbered in the order of `axis`, the first axis varying slowest, as in `axis_index`, XLA's collectives and
    a PartitionSpec. `lax.ppermute` only accepts the order of the mesh.
    """
    names = axis_names(axis)
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    sizes = [lax.axis_size(name) for name in ordered]
    in_mesh = np.arange(math.prod(sizes)).reshape(sizes).transpose([ordered.index(name) for name in names]).reshape(-1)
    return lax.ppermute(x, ordered, in_mesh[np.array(list(pairs), int).reshape(-1, 2)].tolist())


def send_on_ring(x: jax.Array, axis: Axis, by: int, num_ranks: int) -> jax.Array:
    """Send `x` to the rank `by` places ahead on the ring, and return the array received from `by` places back."""
    return send(x, axis, [(rank, (rank + by) % num_ranks) for rank in range(num_ranks)])


def doublings(num_ranks: int) -> list[int]:
    """Return the distances 1, 2, 4, ... < num_ranks between partners in the steps of a recursive algorithm."""
    return [2**level for level in range((num_ranks - 1).bit_length())]


def permute_parts(parts: jax.Array, order: jax.Array) -> jax.Array:
    """Return `parts[order]` for parts `[N, ...]` and a permutation."""
    return parts.at[order].get(mode="promise_in_bounds", unique_indices=True)


# ---- Splitting and joining -------------------------------------------------------------------------------------------


def split_parts(kernel: str, x: jax.Array, dim: int, num_ranks: int, tiled: bool) -> jax.Array:
    """Split a dim over ranks: `[A, B] -> [N, A/N, B]` if tiled, or `[N, B] -> [N, B]` if not (for dim 0)."""
    check_bool(kernel, TILED, tiled=tiled)
    dim = checked_dim(kernel, dim, x.ndim)
    check_parts(kernel, x.shape[dim], dim, num_ranks, tiled)
    if tiled:
        x = x.reshape(*x.shape[:dim], num_ranks, x.shape[dim] // num_ranks, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def join_parts(kernel: str, parts: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """Invert `split_parts`: concatenate parts `[N, ...]` along a dim if tiled, or stack them."""
    check_bool(kernel, TILED, tiled=tiled)
    dim = checked_dim(kernel, dim, parts.ndim - tiled)
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]) if tiled else x


def flat_parts(x: jax.Array, num_parts: int) -> jax.Array:
    """Reshape an array to `[num_parts, c]`, padded with zeros at the end."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % num_parts)).reshape(num_parts, -1)


def take(parts: jax.Array, index: jax.Array) -> jax.Array:
    """Return `parts[index]`."""
    return lax.dynamic_index_in_dim(parts, index, keepdims=False)


def put(parts: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Return the parts with `parts[index]` replaced."""
    return lax.dynamic_update_index_in_dim(parts, part, index, 0)


def unflat(parts: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape the parts `[N, c]` of `flat_parts` to the shape of `like`, without the padding."""
    return parts.reshape(-1)[: like.size].reshape(like.shape)


# ---- Reductions ------------------------------------------------------------------------------------------------------


def xla_reduced(x: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
    """All-reduce with XLA's collective. The result is marked as varying over the axis, as for the other kernels."""
    reductions: dict[Any, Any] = {lax.add: lax.psum, lax.max: lax.pmax, lax.min: lax.pmin}
    return varying(reductions[combine](x, axis), axis)


def reduce_by_op(
    kernel: Callable[[jax.Array, Combine], jax.Array],
    x: jax.Array,
    op: str,
    num_ranks: int,
    *,
    linear: Callable[[jax.Array], jax.Array] | None = None,
    spread: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> jax.Array:
    """Reduce by one of `OPS`, with the derivative of the reference.

    The derivative of a sum is the kernel itself, or `linear`, if the transpose of the kernel is inefficient. The
    derivative of max and min is divided equally among the ranks with the extremum, as in `jnp.max`; the derivative of
    the pairwise steps would be unequal. `spread` sends the extremum to all ranks, which compare it with x.
    """
    if op == "mean":
        return reduce_by_op(kernel, x, "sum", num_ranks, linear=linear) / num_ranks
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
        is_extremum = (x == spread(y)).astype(x.dtype)
        # The count is 0 on ranks that receive zeros: all but the root of a `reduce`.
        return y, total(is_extremum * dx) / jnp.maximum(total(is_extremum), 1)

    return run(x)
