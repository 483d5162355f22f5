"""Sums over the ranks of an MoE layer: of partial results, and of the gradients of weights gathered from shards.

partial [T, d] ─► total ─► y          shard [E/N, d/F, f] ─► whole ─► [E/N, d, f]
dx ◄─ total ◄── alike ◄── dx's parts       shard's gradient ◄─ reduce-scatter in float32 ◄┘
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.wire import varying

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""Of each dim of an array, mesh axes."""


def total(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over ranks of mesh axes, the same at all of them."""
    return _summed(lambda x: lax.psum(x, tuple(axes)), x) if axes else x


def scattered(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This rank's part, along a dim, of the sum over the ranks of a mesh axis."""
    return _summed(lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), x)


def _summed(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """On the wire in the dtype that it has; for CPUs, whose compiler aborts on such sums of bfloat16, in float32."""
    if jnp.dtype(x.dtype).itemsize >= 4:
        return collective(x)

    def widened(x: jax.Array) -> jax.Array:
        return collective(x.astype(jnp.float32)).astype(x.dtype)

    return lax.platform_dependent(x, cpu=widened, default=collective)


def varies_beside(x: jax.Array, other: jax.Array) -> tuple[str, ...]:
    """Mesh axes over which `x` may differ and `other` does not."""
    of_x, of_other = (jax.typeof(y).manual_axis_type.varying for y in (x, other))
    return tuple(sorted(of_x - of_other))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def alike(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """What is the same at all ranks of mesh axes, as a value that may differ there; its gradient is the sum of all."""
    return varying(x, axes)


alike.defvjp(lambda axes, x: (varying(x, axes), None), lambda axes, _, g: (total(g, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def whole(dims: Dims, dtype: Any, shard: jax.Array) -> jax.Array:
    """A weight, gathered over the axes that split its dims; its gradient comes back as this rank's part of the sum.

    Args:
      dims: of each dim, the axes to gather.
      dtype: on the wire, and of the result.
      shard: in the dtype that gradients are summed in.
    """
    return _gathered(dims, shard.astype(dtype))


def _gathered(dims: Dims, x: jax.Array) -> jax.Array:
    for dim, axes in enumerate(dims):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ahead(dims: Dims, dtype: Any, shard: jax.Array, gathered: jax.Array) -> jax.Array:
    """`whole(dims, dtype, shard)` where that has been gathered already, outside of the layer."""
    return varying(gathered.astype(dtype), tuple(jax.typeof(shard).manual_axis_type.varying))


def _whole_backward(dims: Dims, dtype: Any, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    g = g.astype(like.dtype)
    for dim, axes in enumerate(dims):
        g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True) if axes else g
    return (g,)


whole.defvjp(lambda dims, dtype, x: (_gathered(dims, x.astype(dtype)), jnp.zeros((), x.dtype)), _whole_backward)
ahead.defvjp(
    lambda dims, dtype, x, y: (ahead(dims, dtype, x, y), jnp.zeros((), x.dtype)),
    lambda dims, dtype, like, g: (*_whole_backward(dims, dtype, like, g), None),
)
