"""Collectives of an MoE layer with custom gradients.

    partial [T, d] ─► all_reduce ─► y           shard [E/N, d/F, f] ─► gather_weight ─► [E/N, d, f]
    dx ◄─ all_reduce ◄─ sum_gradient ◄─ dx parts     d shard ◄─ reduce-scatter in float32 ◄─┘

F is the size of the axes that shard dim d of a weight.
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
"""Mesh axes for each dim of an array."""


def all_reduce(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sum over the ranks of mesh axes."""
    return _in_safe_dtype(lambda x: lax.psum(x, tuple(axes)), x) if axes else x


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Sum over the ranks of a mesh axis and return the local shard along a dim."""
    return _in_safe_dtype(lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), x)


def _in_safe_dtype(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Reduce in the dtype of `x`, but in float32 on CPUs, where XLA aborts on some reductions of bfloat16."""
    if jnp.dtype(x.dtype).itemsize >= 4:
        return collective(x)

    def in_float32(x: jax.Array) -> jax.Array:
        return collective(x.astype(jnp.float32)).astype(x.dtype)

    return lax.platform_dependent(x, cpu=in_float32, default=collective)


def extra_varying_axes(x: jax.Array, y: jax.Array) -> tuple[str, ...]:
    """Return the mesh axes over which `x` may vary and `y` does not."""
    x_axes, y_axes = (jax.typeof(array).manual_axis_type.varying for array in (x, y))
    return tuple(sorted(x_axes - y_axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_gradient(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Cast a value that is replicated over `axes` to a varying one, and sum its gradient over `axes`."""
    return varying(x, axes)


sum_gradient.defvjp(lambda axes, x: (varying(x, axes), None), lambda axes, _, g: (all_reduce(g, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_weight(dims: Dims, dtype: jax.typing.DTypeLike, shard: jax.Array) -> jax.Array:
    """Cast the shard of a weight to `dtype` and all-gather each dim over the mesh axes in `dims`.

    The gradient is reduce-scattered in the dtype of the shard.
    """
    return _gather(dims, shard.astype(dtype))


def _gather(dims: Dims, x: jax.Array) -> jax.Array:
    for dim, axes in enumerate(dims):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def use_gathered(dims: Dims, dtype: jax.typing.DTypeLike, shard: jax.Array, gathered: jax.Array) -> jax.Array:
    """Return an already gathered weight in `dtype`, and reduce-scatter its gradient to `shard`.

    It replaces `gather_weight` for weights that were gathered before the layer.
    """
    return _as_shard(dtype, shard, gathered)


def _as_shard(dtype: Any, shard: jax.Array, gathered: jax.Array) -> jax.Array:
    """Return the weight in `dtype`, varying over the same axes as the shard."""
    return varying(gathered.astype(dtype), tuple(jax.typeof(shard).manual_axis_type.varying))


def _gather_backward(dims: Dims, dtype: Any, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    g = g.astype(like.dtype)
    for dim, axes in enumerate(dims):
        g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True) if axes else g
    return (g,)


gather_weight.defvjp(lambda dims, dtype, x: (_gather(dims, x.astype(dtype)), jnp.zeros((), x.dtype)), _gather_backward)
use_gathered.defvjp(
    # A call of `use_gathered` would be an operation whose result is saved for the backward pass.
    lambda dims, dtype, x, y: (_as_shard(dtype, x, y), jnp.zeros((), x.dtype)),
    lambda dims, dtype, like, g: (*_gather_backward(dims, dtype, like, g), None),
)
