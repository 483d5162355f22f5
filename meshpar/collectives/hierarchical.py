"""Collectives in two levels: inside a node over its fast links, then between nodes with little or few messages.

K ranks inside (axis `inner`), M nodes (axis `outer`); rank (o, i) counts as o K + i.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped

from meshpar.collectives.exchange import exchanged
from meshpar.collectives.kernel_checks import Axis, check_op, ranks_of_levels
from meshpar.collectives.ring import gathered, ring_all_reduce, ring_sum, scattered
from meshpar.collectives.wire import Combine, cut, flat_parts, join, reduced, unflat, varying

_ONE_RING = (1,)


def hierarchical_all_reduce(
    x: Num[Array, "*dims"], *, inner: Axis, outer: Axis, op: str = "sum"
) -> Num[Array, "*dims"]:
    """All-reduce over both axes: reduce-scatter inside, all-reduce of a K-th across, all-gather inside (all rings).

        [A] {partial over inner and outer} -> [A];  per device [A] -> [A], any shape
        2(K-1) steps, 2(K-1)/K n bytes inside;  2(M-1) steps, 2(M-1)/M n/K bytes across

    Source: Mikami et al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash".

    Args:
      inner: the axis of the fast links.
      outer: the axis across nodes.
      op: `sum`, `mean`, `max` or `min`.

    Raises:
      ValueError: no such axis here, or the same one twice; no such op, or none for this dtype.
    """
    num_inner, num_outer = ranks_of_levels("hierarchical_all_reduce", inner, outer)
    x = varying(varying(x, inner), outer)
    check_op("hierarchical_all_reduce", op, x.dtype)

    def two_levels(x: jax.Array, combine: Combine, across: Callable[[jax.Array], jax.Array]) -> jax.Array:
        mine = across(scattered(flat_parts(x, num_inner), inner, combine, _ONE_RING))
        return unflat(gathered(mine, inner, num_inner, _ONE_RING), x)

    def kernel(x: jax.Array, combine: Combine) -> jax.Array:
        return two_levels(x, combine, lambda mine: ring_all_reduce(mine, outer, combine, num_outer, _ONE_RING))

    def linear(x: jax.Array) -> jax.Array:
        return two_levels(x, lax.add, lambda mine: ring_sum(mine, outer, num_outer, _ONE_RING))

    return reduced(kernel, x, op, num_inner * num_outer, linear=linear)


def hierarchical_all_to_all(
    x: Shaped[Array, "*dims"], *, inner: Axis, outer: Axis, split_dim: int = 0, concat_dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """All-to-all over both axes: what goes to place i of any node goes to rank i inside, then out as one message.

        per device [A/KM, B] -> [A, B/KM]  (split_dim=1, concat_dim=0), as `all_to_all` over (outer, inner)
        K-1 steps, (K-1)/K n bytes inside;  M-1 steps, (M-1)/M n bytes across

    A rank sends M-1 messages between nodes instead of (M-1) K.

    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE".

    Args:
      inner: the axis of the fast links.
      outer: the axis across nodes.
      split_dim, concat_dim, tiled: as for `all_to_all`.

    Raises:
      ValueError: no such axis here, or the same one twice; no such dim, or one that does not divide by K M.
    """
    num_inner, num_outer = ranks_of_levels("hierarchical_all_to_all", inner, outer)
    x = varying(varying(x, inner), outer)
    parts = cut("hierarchical_all_to_all", x, split_dim, num_outer * num_inner, tiled)
    by_place = jnp.swapaxes(parts.reshape(num_outer, num_inner, *parts.shape[1:]), 0, 1)  # [place to, node to, ...]
    by_node = jnp.swapaxes(exchanged(by_place, inner), 0, 1)  # [node to, place from, ...]
    parts = exchanged(by_node, outer).reshape(parts.shape)  # [node from, place from, ...]
    return join("hierarchical_all_to_all", parts, concat_dim, tiled)
