"""All-to-all: rank r sends part s of its array to rank s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.collectives.wire import join_parts, permute_parts, send_on_ring, split_parts, varying


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
