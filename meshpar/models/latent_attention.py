"""Multi-head latent attention with low-rank queries, keys and values and a cache of latent vectors.

    h ─► query_down ─► norm ─► query_up ─────────────────────► H heads of [nope | rope] ─┐
    h ─► latent_down ─► norm ─┬─► key_up ──► H heads of [nope] ─┐                        ├─► attention ─► out
    h ─► key_rope ────────────│─► rotated, shared by all heads ─┴─► H heads of keys ─────┤
                              └─► value_up ──► H heads of values ────────────────────────┘

The latent vectors are replicated over the tensor axis, and the heads are sharded. The input dim of an up-projection has
the logical name `embed`. With sequence parallelism the latent vectors are all-gathered instead of the residual stream.

DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1 and
appendix C.

Shape suffixes as in `meshpar.models.layers`, and: Q rank of the query latent, C rank of the key/value latent, N
dimensions of a key without rotary embedding, R dimensions with it; D = N + R.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from meshpar.models import attention, layers
from meshpar.models.annotated import bare, into_residual, nnx_linear, nnx_norm
from meshpar.models.architecture import Architecture
from meshpar.models.attention import LayerCache
from meshpar.models.layers import Rope


class NNXLatentAttention(nnx.Module):
    """Multi-head latent attention in NNX, with the call signature of `meshpar.models.transformer.Attention`."""

    def __init__(self, cfg: Architecture, *, rngs: nnx.Rngs) -> None:
        latent, heads, width = cfg.latent, cfg.num_heads, cfg.embed_dim
        assert latent is not None
        linear = nnx_linear(cfg, rngs)
        down, up_query, up_key = ("embed", None), ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        query = (heads, latent.head_dim)
        if latent.q_rank is None:
            self.query = linear(width, query, names=up_query)
        else:
            self.query_down = linear(width, latent.q_rank, names=down)
            self.query_norm = nnx_norm(cfg, rngs, width=latent.q_rank)
            self.query_up = linear(latent.q_rank, query, names=up_query)
        self.latent_down = linear(width, latent.kv_rank, names=down)
        self.latent_norm = nnx_norm(cfg, rngs, width=latent.kv_rank)
        self.key_rope = linear(width, latent.rope_dim, names=down)
        self.key_up = linear(latent.kv_rank, (heads, latent.nope_dim), names=up_key)
        self.value_up = linear(latent.kv_rank, (heads, latent.v_dim), names=up_key)
        value, into = (heads, latent.v_dim), into_residual(cfg)
        self.out = linear(value, width, axis=(-2, -1), names=("heads", "head_dim", "embed"), init=into)
        self.cfg = cfg

    def __call__(
        self, h_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None, *, overlapped: bool = False
    ) -> tuple[Array, LayerCache | None]:
        """Return the output projection of the attention and the updated cache."""
        assert not overlapped, "TransformerConfig rejects this combination"
        assert self.cfg.latent is not None
        if self.cfg.latent.q_rank is None:
            q_BTHD = self.query(layers.block_input(h_BTE))
        else:
            q_BTHD = self.query_up(layers.block_input(self.query_norm(self.query_down(layers.residual(h_BTE)))))
        h_BTE = layers.residual(h_BTE)
        c_BTC = layers.block_input(self.latent_norm(self.latent_down(h_BTE)))
        r_BTR = layers.block_input(self.key_rope(h_BTE))
        if cache is None:
            o_BTHW = attend(self.cfg, q_BTHD, self.key_up(c_BTC), r_BTR, self.value_up(c_BTC), angles)
        else:
            up = (bare(self.key_up), bare(self.value_up))
            o_BTHW, cache = attend_to_latents(self.cfg, q_BTHD, c_BTC, r_BTR, *up, angles, cache, length)
        return self.out(o_BTHW), cache


def attend(cfg: Architecture, q_BTHD: Array, k_BTHN: Array, r_BTR: Array, v_BTHW: Array, angles: Rope) -> Array:
    """Return the attention over a full sequence, with per-head keys and values.

    The rotary embedding is applied here: to the last R dimensions of the queries, and to the keys `r_BTR`, which all
    heads share.
    """
    k_BTHN = attention.heads_layout(k_BTHN, "act_kv_heads")
    r_BT1R = layers.rotate(r_BTR[:, :, None], angles)
    r_BTHR = jnp.broadcast_to(r_BT1R, (*k_BTHN.shape[:3], r_BTR.shape[-1]))
    k_BTHD = attention.heads_layout(jnp.concatenate([k_BTHN, r_BTHR], axis=-1), "act_kv_heads")
    v_BTHW = attention.heads_layout(v_BTHW, "act_kv_heads")
    q_BTHD = _rotated_end(cfg, attention.heads_layout(q_BTHD, "act_heads"), k_BTHN.shape[-1], angles)
    marked = zip((q_BTHD, k_BTHD, v_BTHW), ("query", "key", "value"), strict=True)
    q_BTHD, k_BTHD, v_BTHW = (checkpoint_name(x, name) for x, name in marked)
    o_BTHW = attention.full_attention(cfg, q_BTHD, k_BTHD, v_BTHW, angles)
    return attention.heads_layout(o_BTHW, "act_heads")


def attend_to_latents(
    cfg: Architecture,
    q_BTHD: Array,
    c_BTC: Array,
    r_BTR: Array,
    key_up_CHN: Array,
    value_up_CHW: Array,
    angles: Rope,
    cache: LayerCache,
    length: Array | None,
) -> tuple[Array, LayerCache]:
    """Return the attention over cached latents (C + R numbers per position) without expanding keys and values.

    The up-projections are absorbed: the queries are projected to the latent space, `(U c) · q = c · (Uᵀ q)`, and the
    weighted sums of latents are projected to head outputs.
    """
    assert length is not None
    nope_dim = key_up_CHN.shape[-1]
    q_BTHD = _rotated_end(cfg, attention.heads_layout(q_BTHD, "act_heads"), nope_dim, angles)
    r_BT1R = layers.rotate(r_BTR[:, :, None], angles)
    cache = attention.extend(cache, length, r_BT1R, c_BTC[:, :, None], heads=None)
    r_BS1R, c_BS1C = cache
    q_BTHC = jnp.einsum("BTHN,CHN->BTHC", q_BTHD[..., :nope_dim], key_up_CHN.astype(q_BTHD.dtype))
    q_BTHCR = jnp.concatenate([q_BTHC, q_BTHD[..., nope_dim:]], axis=-1)
    k_BS1CR = jnp.concatenate([c_BS1C, r_BS1R], axis=-1)
    limits = attention.limits_of(cfg, angles.kind) | {"scale": q_BTHD.shape[-1] ** -0.5}
    o_BTHC = attention.cached_attention(q_BTHCR, k_BS1CR, c_BS1C, first_position=length, **limits)
    o_BTHW = jnp.einsum("BTHC,CHW->BTHW", o_BTHC, value_up_CHW.astype(o_BTHC.dtype))
    return attention.heads_layout(o_BTHW, "act_heads"), cache


def _rotated_end(cfg: Architecture, q_BTHD: Array, nope_dim: int, angles: Rope) -> Array:
    """Apply rotary embeddings to all but the first `nope_dim` dimensions of each head, and YaRN's score factor."""
    if cfg.rope_yarn is not None and cfg.rope_yarn.score_factor != 1:
        q_BTHD = q_BTHD * cfg.rope_yarn.score_factor
    turned_BTHR = layers.rotate(q_BTHD[..., nope_dim:], angles)
    return jnp.concatenate([q_BTHD[..., :nope_dim], turned_BTHR], axis=-1)
