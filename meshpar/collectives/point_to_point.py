"""Messages between single ranks: shift, and the collectives with a root (broadcast, reduce, scatter, gather).

N ranks, n bytes; off the root, results that only the root gets are zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped

from meshpar.collectives.kernel_checks import Axis, check_op, checked_distance, checked_root, ranks_of
from meshpar.collectives.wire import Combine, cut, doublings, join, pass_on, reduced, send, varying


def shift(x: Shaped[Array, "*dims"], *, axis: Axis, by: int = 1, wrap: bool = True) -> Shaped[Array, "*dims"]:
    """Every rank gets the array of the rank `by` places before it: send to the one, receive from the other.

        per device [A] -> [A];  1 step, n bytes

    Args:
      axis: mesh axis, or several as one.
      by: how many ranks further; negative for backwards.
      wrap: whether the last is followed by the first; if not, ranks with none before them get zeros.

    Raises:
      ValueError: no such axis here, or a `by` that is no whole number.
    """
    num_ranks, by = ranks_of("shift", axis), checked_distance("shift", by)
    x = varying(x, axis)
    if wrap:
        return pass_on(x, axis, by, num_ranks) if by % num_ranks else x
    if by == 0:
        return x
    with jax.named_scope("shift"):
        return send(x, axis, [(rank, rank + by) for rank in range(num_ranks) if 0 <= rank + by < num_ranks])


def broadcast(x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0) -> Shaped[Array, "*dims"]:
    """Every rank gets the root's array, down a binomial tree: those who have it double with each step.

        per device [A] -> [A], the root's;  ceil(log2 N) steps, n bytes each

    Source: Thakur, Rabenseifner, Gropp 2005.

    Raises:
      ValueError: no such axis here, or no such root.
    """
    num_ranks = ranks_of("broadcast", axis)
    checked_root("broadcast", root, num_ranks)
    return tree_down(varying(x, axis), axis, num_ranks, root)


def reduce(x: Num[Array, "*dims"], *, axis: Axis, op: str = "sum", root: int = 0) -> Num[Array, "*dims"]:
    """The root gets the reduction over all ranks, up a binomial tree; the others get zeros.

        per device [A] -> [A], zeros off the root;  ceil(log2 N) steps, n bytes each

    Source: Thakur, Rabenseifner, Gropp 2005.

    Args:
      op: `sum`, `mean`, `max` or `min`.

    Raises:
      ValueError: no such axis here, root or op; an op that the dtype does not have.
    """
    num_ranks = ranks_of("reduce", axis)
    checked_root("reduce", root, num_ranks)
    x = varying(x, axis)
    check_op("reduce", op, x.dtype)

    def kernel(x: jax.Array, combine: Combine) -> jax.Array:
        y = tree_up(x, axis, combine, num_ranks, root)
        return jnp.where(lax.axis_index(axis) == root, y, jnp.zeros_like(y))

    return reduced(kernel, x, op, num_ranks, spread=lambda y: tree_down(y, axis, num_ranks, root))


def scatter(
    x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0, dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """Every rank gets its part of the root's array, straight from the root.

        per device [A, B], the root's -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps; the root sends (N-1)/N n bytes

    Args:
      dim: the dim that is cut.
      tiled: whether parts are runs of the dim; if not, the dim has one entry for each rank and goes away.

    Raises:
      ValueError: no such axis here, root or dim; a dim that does not divide by N.
    """
    num_ranks = ranks_of("scatter", axis)
    checked_root("scatter", root, num_ranks)
    parts = cut("scatter", varying(x, axis), dim, num_ranks, tiled)
    rank, mine = lax.axis_index(axis), parts[root]
    with jax.named_scope("scatter"):
        for target in _others(root, num_ranks):
            mine = jnp.where(rank == target, send(parts[target], axis, [(root, target)]), mine)
    return mine


def gather(
    x: Shaped[Array, "*dims"], *, axis: Axis, root: int = 0, dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """The root gets the arrays of all ranks in order of their ranks; the others get zeros.

        per device [A, B] -> [N A, B], zeros off the root  (dim 0; [N, A, B] with tiled=False)
        N-1 steps; n bytes from each rank but the root

    Args:
      dim: where the parts stand in the result.
      tiled: whether they are laid end to end; if not, they are stacked along a new dim.

    Raises:
      ValueError: no such axis here, root or dim.
    """
    num_ranks = ranks_of("gather", axis)
    checked_root("gather", root, num_ranks)
    x = varying(x, axis)
    parts = [jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))] * num_ranks
    with jax.named_scope("gather"):
        for source in _others(root, num_ranks):
            parts[source] = send(x, axis, [(source, root)])
    return join("gather", jnp.stack(parts), dim, tiled)


def tree_down(x: jax.Array, axis: Axis, num_ranks: int, root: int) -> jax.Array:
    """The root's array for all, `ceil(log2 N)` messages one after the other."""
    place = (lax.axis_index(axis) - root) % num_ranks
    with jax.named_scope("tree_down"):
        for reach in doublings(num_ranks):
            arrived = send(x, axis, _edges(reach, num_ranks, root))
            x = jnp.where((reach <= place) & (place < 2 * reach), arrived, x)
    return x


def tree_up(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, root: int) -> jax.Array:
    """The reduction at the root, `ceil(log2 N)` messages one after the other; partial ones elsewhere."""
    place = (lax.axis_index(axis) - root) % num_ranks
    with jax.named_scope("tree_up"):
        for reach in reversed(doublings(num_ranks)):
            arrived = send(x, axis, [(child, parent) for parent, child in _edges(reach, num_ranks, root)])
            is_parent = (place < reach) & (place + reach < num_ranks)
            x = jnp.where(is_parent, combine(arrived, x), x)
    return x


def _edges(reach: int, num_ranks: int, root: int) -> list[tuple[int, int]]:
    """(parent, child) of one level of the tree: `reach` places apart, counted from the root."""
    parents = range(min(reach, num_ranks - reach))
    return [((root + place) % num_ranks, (root + place + reach) % num_ranks) for place in parents]


def _others(root: int, num_ranks: int) -> list[int]:
    return [(root + step) % num_ranks for step in range(1, num_ranks)]
