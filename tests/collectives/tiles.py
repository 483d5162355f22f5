"""A `TileKernel` in plain jax.numpy, for tests of the attention ring without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar import collectives as mc


def tile_forward(q, k, v, *, scale, causal):
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, "float32")) * scale
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", jnp.exp(scores - lse[..., None]).astype(v.dtype), v), lse


def tile_backward(q, k, v, o, lse, do, *, scale, causal):
    """Return the gradients of `sum(weights @ v * do)` through the scores, with the weights of the full softmax."""

    def loss(q, k, v):
        tile_o, tile_lse = (x.astype(lse.dtype) for x in tile_forward(q, k, v, scale=scale, causal=causal))
        share = jnp.exp(tile_lse - lse)[..., None] * do
        return jnp.sum(tile_o * share) - jnp.sum(jax.lax.stop_gradient(jnp.sum(o * do, -1)) * jnp.exp(tile_lse - lse))

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


STAND_IN = mc.TileKernel(tile_forward, tile_backward)
