"""all_to_all: every rank hands one part of its array to each other rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.collectives.wire import cut, join, pass_on, reordered, varying


def all_to_all(
    x: Shaped[Array, "*dims"], *, axis: Axis, split_dim: int = 0, concat_dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """Part r of every rank's array goes to rank r, each straight to its destination.

        [A_X, B] -> [A, B_X]  (split_dim=1, concat_dim=0)
        per device [A/N, B] -> [A, B/N];  [N, B] -> [N, B] with tiled=False and both dims 0
        N-1 steps, none of which waits for another; (N-1)/N n bytes sent, n the array

    Source: Thakur, Rabenseifner, Gropp 2005 (the long-message algorithm).

    Args:
      axis: mesh axis, or several as one.
      split_dim: the dim that is cut.
      concat_dim: where the parts stand in the result, in the order of the ranks they come from.
      tiled: whether parts are runs of the dims; if not, split_dim has one entry for each rank and goes away, and the
        result has a new dim.

    Raises:
      ValueError: no such axis here, or dim; a split_dim that does not divide by N.
    """
    num_ranks = ranks_of("all_to_all", axis)
    parts = cut("all_to_all", varying(x, axis), split_dim, num_ranks, tiled)
    return join("all_to_all", exchanged(parts, axis), concat_dim, tiled)


def exchanged(parts: jax.Array, axis: Axis) -> jax.Array:
    """`[N, ...] -> [N, ...]`: entry r is for rank r before, from rank r after."""
    num_ranks, rank = len(parts), lax.axis_index(axis)
    distance = jnp.arange(num_ranks)
    with jax.named_scope("all_to_all"):
        outgoing = reordered(parts, (rank + distance) % num_ranks)  # entry d is for the rank d places on
        arrived = [pass_on(outgoing[by], axis, by, num_ranks) for by in range(1, num_ranks)]
        return reordered(jnp.stack([outgoing[0], *arrived]), (rank - distance) % num_ranks)
