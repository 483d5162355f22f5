"""Point-to-point kernels: shift, all-to-all, and kernels with a root rank.

N is the number of ranks along the axis and n the number of bytes of the array. Results that only the root receives are
zeros on the other ranks. Each function has a global-view reference of the same name in `reference.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped

from meshpar.collectives.kernel_checks import Axis, check_op, check_root, ranks_of
from meshpar.collectives.wire import (
    Combine,
    doublings,
    join_parts,
    permute_parts,
    reduce_by_op,
    send,
    send_on_ring,
    split_parts,
    varying,
)
from meshpar.sharding.errors import is_int, problem


def shift(x: Shaped[Array, "*dims"], *, axis: Axis, by: int = 1, wrap: bool = True) -> Shaped[Array, "*dims"]:
    """Send each rank's array to the rank `by` places ahead; the reference is `reference.shift`.

        per device [A] -> [A] of rank r - by;  1 step, n bytes

    Args:
      axis: mesh axis, or a tuple of axes that act as a single axis.
      by: distance in ranks, negative for backwards.
      wrap: whether the first rank follows the last. If not, ranks without a sender receive zeros.

    Raises:
      MeshparError: the axis is unknown, or `by` is not an integer.
    """
    num_ranks = ranks_of("shift", axis)
    if not is_int(by):
        raise problem("shift", f"use by={by!r}", "`by` must be an integer", "use 1, or -1 for backwards", "not-an-int")
    x = varying(x, axis)
    if by == 0 or (wrap and by % num_ranks == 0):
        return x
    if wrap:
        return send_on_ring(x, axis, by, num_ranks)
    with jax.named_scope("shift"):
        return send(x, axis, [(rank, rank + by) for rank in range(num_ranks) if 0 <= rank + by < num_ranks])


def broadcast(x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0) -> Shaped[Array, "*dims"]:
    """Send the root's array to all ranks along a binomial tree; the reference is `reference.broadcast`.

        per device [A] -> [A] of the root;  ceil(log2 N) steps, n bytes each

    Source: Thakur, Rabenseifner, Gropp 2005.

    Args:
      x: the local array. Only the root's array is used.
      axis: see `shift`.
      root: the rank whose array is sent.

    Raises:
      MeshparError: the axis or the root is unknown.
    """
    num_ranks = ranks_of("broadcast", axis)
    check_root("broadcast", root, num_ranks)
    return tree_down(varying(x, axis), axis, num_ranks, root)


def reduce(x: Num[Array, "*dims"], *, axis: Axis, op: str = "sum", root: int = 0) -> Num[Array, "*dims"]:
    """Reduce over all ranks to the root along a binomial tree; the reference is `reference.reduce`.

        [A] {unreduced over X} -> [A] on the root;  per device [A] -> [A], zeros off the root
        ceil(log2 N) steps, n bytes each

    Source: Thakur, Rabenseifner, Gropp 2005.

    Args:
      axis: see `shift`.
      op: `sum`, `mean`, `max` or `min`.
      root: the rank that receives the result.

    Raises:
      MeshparError: the axis, root or op is unknown, or the dtype does not support the op.
    """
    num_ranks = ranks_of("reduce", axis)
    check_root("reduce", root, num_ranks)
    x = varying(x, axis)
    check_op("reduce", op, x.dtype)

    def kernel(x: jax.Array, combine: Combine) -> jax.Array:
        y = tree_up(x, axis, combine, num_ranks, root)
        return jnp.where(lax.axis_index(axis) == root, y, jnp.zeros_like(y))

    return reduce_by_op(kernel, x, op, num_ranks, spread=lambda y: tree_down(y, axis, num_ranks, root))


def scatter(
    x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0, dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """Send each rank its part of the root's array, directly from the root; the reference is `reference.scatter`.

        [A, B] on the root -> [A_X, B];  per device [A, B] -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps; the root sends (N-1)/N n bytes

    Args:
      x: the local array. Only the root's array is used.
      axis: see `shift`.
      root: the rank that sends.
      dim: the dim that is divided among the ranks.
      tiled: whether each rank receives a slice of the dim. If not, the dim has one entry per rank and is removed.

    Raises:
      MeshparError: the axis, root or dim is unknown, or the dim is not divisible by N.
    """
    num_ranks = ranks_of("scatter", axis)
    check_root("scatter", root, num_ranks)
    parts = split_parts("scatter", varying(x, axis), dim, num_ranks, tiled)
    rank, part = lax.axis_index(axis), parts[root]
    with jax.named_scope("scatter"):
        for target in _ranks_after(root, num_ranks):
            part = jnp.where(rank == target, send(parts[target], axis, [(root, target)]), part)
    return part


def gather(
    x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0, dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """Send the arrays of all ranks to the root, in the order of the ranks; the reference is `reference.gather`.

        [A_X, B] -> [A, B] on the root
        per device [A, B] -> [N A, B], zeros off the root  (dim 0; [N, A, B] with tiled=False)
        N-1 steps; n bytes from each rank except the root

    Args:
      axis, root: see `reduce`.
      dim: the dim of the result along which the arrays are concatenated or stacked.
      tiled: whether arrays are concatenated. If not, they are stacked along a new dim.

    Raises:
      MeshparError: the axis, root or dim is unknown.
    """
    num_ranks = ranks_of("gather", axis)
    check_root("gather", root, num_ranks)
    x = varying(x, axis)
    parts = [jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))] * num_ranks
    with jax.named_scope("gather"):
        for source in _ranks_after(root, num_ranks):
            parts[source] = send(x, axis, [(source, root)])
    return join_parts("gather", jnp.stack(parts), dim, tiled)


def all_to_all(
    x: Shaped[Array, "*dims"], *, axis: Axis, split_dim: int = 0, concat_dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """Send part r of each rank's array directly to rank r; the reference is `reference.all_to_all`.

        [A_X, B] -> [A, B_X]  (split_dim=1, concat_dim=0)
        per device [A/N, B] -> [A, B/N];  [N, B] -> [N, B] with tiled=False and both dims 0
        N-1 independent steps; (N-1)/N n bytes sent, n the array

    Source: Thakur, Rabenseifner, Gropp 2005 (the long-message algorithm).

    Args:
      axis: see `shift`.
      split_dim: the dim that is divided among the ranks.
      concat_dim: the dim of the result along which the received parts are ordered by their rank.
      tiled: whether parts are slices of the dims. If not, `split_dim` has one entry per rank and is removed, and
        `concat_dim` is a new dim.

    Raises:
      MeshparError: the axis or a dim is unknown, or the size of `split_dim` is not divisible by N.
    """
    num_ranks = ranks_of("all_to_all", axis)
    parts = split_parts("all_to_all", varying(x, axis), split_dim, num_ranks, tiled)
    return join_parts("all_to_all", exchange_parts(parts, axis), concat_dim, tiled)


def exchange_parts(parts: jax.Array, axis: Axis) -> jax.Array:
    """`[N, ...] -> [N, ...]`: send entry r to rank r, and return the entry received from rank r at index r."""
    num_ranks, rank = len(parts), lax.axis_index(axis)
    distance = jnp.arange(num_ranks)
    with jax.named_scope("all_to_all"):
        outgoing = permute_parts(parts, (rank + distance) % num_ranks)  # entry d is sent d ranks ahead
        arrived = [send_on_ring(outgoing[by], axis, by, num_ranks) for by in range(1, num_ranks)]
        return permute_parts(jnp.stack([outgoing[0], *arrived]), (rank - distance) % num_ranks)


def tree_down(x: jax.Array, axis: Axis, num_ranks: int, root: int) -> jax.Array:
    """Broadcast in `ceil(log2 N)` sequential messages."""
    place = (lax.axis_index(axis) - root) % num_ranks
    with jax.named_scope("tree_down"):
        for reach in doublings(num_ranks):
            arrived = send(x, axis, _edges(reach, num_ranks, root))
            x = jnp.where((reach <= place) & (place < 2 * reach), arrived, x)
    return x


def tree_up(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, root: int) -> jax.Array:
    """Reduce to the root in `ceil(log2 N)` sequential messages. Other ranks return partial results."""
    place = (lax.axis_index(axis) - root) % num_ranks
    with jax.named_scope("tree_up"):
        for reach in reversed(doublings(num_ranks)):
            arrived = send(x, axis, [(child, parent) for parent, child in _edges(reach, num_ranks, root)])
            is_parent = (place < reach) & (place + reach < num_ranks)
            x = jnp.where(is_parent, combine(arrived, x), x)
    return x


def _edges(reach: int, num_ranks: int, root: int) -> list[tuple[int, int]]:
    """Return the (parent, child) pairs of a level of the tree, which are `reach` ranks apart."""
    parents = range(min(reach, num_ranks - reach))
    return [((root + place) % num_ranks, (root + place + reach) % num_ranks) for place in parents]


def _ranks_after(root: int, num_ranks: int) -> list[int]:
    return [(root + step) % num_ranks for step in range(1, num_ranks)]
