"""Collectives in two levels, over the fast links within a node and between nodes.

K is the number of ranks in a node (axis `inner`) and M the number of nodes (axis `outer`). Rank (o, i) has the number
o K + i.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped

from meshpar.collectives.kernel_checks import Axis, check_op, ranks_of_levels
from meshpar.collectives.point_to_point import exchange_parts
from meshpar.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter, ring_sum
from meshpar.collectives.wire import Combine, flat_parts, join_parts, reduce_by_op, split_parts, unflat, varying

_ONE_RING = (1,)


def hierarchical_all_reduce(
    x: Num[Array, "*dims"], *, inner: Axis, outer: Axis, op: str = "sum"
) -> Num[Array, "*dims"]:
    """All-reduce over two axes, as a reduce-scatter in the node, an all-reduce across nodes, and an all-gather.

        [A] {unreduced over inner and outer} -> [A];  per device [A] -> [A], any shape
        2(K-1) steps, 2(K-1)/K n bytes in a node;  2(M-1) steps, 2(M-1)/M n/K bytes across nodes

    All three use rings. The reference is `reference.all_reduce` over (outer, inner).

    Source: Mikami et al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash".

    Args:
      inner: the axis within nodes.
      outer: the axis across nodes.
      op: `sum`, `mean`, `max` or `min`.

    Raises:
      MeshparError: an axis is unknown or used twice, the op is unknown, or the dtype does not support it.
    """
    num_inner, num_outer = ranks_of_levels("hierarchical_all_reduce", inner, outer)
    x = varying(varying(x, inner), outer)
    check_op("hierarchical_all_reduce", op, x.dtype)

    def two_levels(x: jax.Array, combine: Combine, across: Callable[[jax.Array], jax.Array]) -> jax.Array:
        chunk = across(ring_reduce_scatter(flat_parts(x, num_inner), inner, combine, _ONE_RING))
        return unflat(ring_all_gather(chunk, inner, num_inner, _ONE_RING), x)

    def kernel(x: jax.Array, combine: Combine) -> jax.Array:
        return two_levels(x, combine, lambda chunk: ring_all_reduce(chunk, outer, combine, num_outer, _ONE_RING))

    def linear(x: jax.Array) -> jax.Array:
        return two_levels(x, lax.add, lambda chunk: ring_sum(chunk, outer, num_outer, _ONE_RING))

    return reduce_by_op(kernel, x, op, num_inner * num_outer, linear=linear)


def hierarchical_all_to_all(
    x: Shaped[Array, "*dims"], *, inner: Axis, outer: Axis, split_dim: int = 0, concat_dim: int = 0, tiled: bool = True
) -> Shaped[Array, "*dims"]:
    """All-to-all over two axes, first within each node and then across nodes.

        [A_(outer, inner), B] -> [A, B_(outer, inner)]  (split_dim=1, concat_dim=0)
        per device [A/KM, B] -> [A, B/KM]
        K-1 steps, (K-1)/K n bytes in a node;  M-1 steps, (M-1)/M n bytes across nodes

    The parts for rank i of any node are first collected on rank i of the local node. A rank then sends M-1 messages
    across nodes instead of (M-1) K. The reference is `reference.all_to_all` over (outer, inner).

    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE".

    Args:
      inner: the axis within nodes.
      outer: the axis across nodes.
      split_dim, concat_dim, tiled: see `all_to_all`.

    Raises:
      MeshparError: an axis is unknown or used twice, or a dim is unknown or not divisible by K M.
    """
    num_inner, num_outer = ranks_of_levels("hierarchical_all_to_all", inner, outer)
    x = varying(varying(x, inner), outer)
    parts = split_parts("hierarchical_all_to_all", x, split_dim, num_outer * num_inner, tiled)
    parts = parts.reshape(num_outer, num_inner, *parts.shape[1:])  # [target node, target rank, ...]
    parts = jnp.swapaxes(exchange_parts(jnp.swapaxes(parts, 0, 1), inner), 0, 1)  # [target node, source rank, ...]
    parts = exchange_parts(parts, outer)  # [source node, source rank, ...]
    parts = parts.reshape(num_outer * num_inner, *parts.shape[2:])
    return join_parts("hierarchical_all_to_all", parts, concat_dim, tiled)
