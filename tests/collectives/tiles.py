"""A stand-in for a library's kernel that attends within a tile: of its signature, with all scores, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar import collectives as mc


def tile_forward(q, k, v, *, scale, causal):
    """What a library's kernel for one tile does, with all its scores."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    wide = jnp.promote_types(q.dtype, "float32")
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=wide) * scale
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", jnp.exp(scores - lse[..., None]).astype(v.dtype), v), lse


def tile_backward(q, k, v, o, lse, do, *, scale, causal):
    """The derivative of `sum(weights @ v * do)` by what the scores are, with weights and output of the whole row."""

    def weighted(q, k, v):
        given = tile_forward(q, k, v, scale=scale, causal=causal)
        part, tile_lse = (x.astype(lse.dtype) for x in given)
        share = jnp.exp(tile_lse - lse)[..., None] * do
        return jnp.sum(part * share) - jnp.sum(jax.lax.stop_gradient(jnp.sum(o * do, -1)) * jnp.exp(tile_lse - lse))

    return jax.grad(weighted, argnums=(0, 1, 2))(q, k, v)


STAND_IN = mc.TileKernel(tile_forward, tile_backward)
