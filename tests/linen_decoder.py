"""A dense decoder written in Linen, with the parameters and paths of `meshpar.models.Transformer`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import meshpar as mp
from meshpar.layers.precision import NamedDot
from meshpar.models import TransformerConfig, layers
from meshpar.models.attention import attend
from meshpar.models.transformer import embedding_init, rope_of
from meshpar.sharding.activations import module_prefix
from meshpar.sharding.adapters.model import Model


def linear(cfg: TransformerConfig, name: str, outputs: Any, names: tuple[str, ...], axis: Any = -1) -> nn.DenseGeneral:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    dtype = jnp.dtype(cfg.param_dtype)
    return nn.DenseGeneral(
        outputs, axis=axis, use_bias=False, param_dtype=dtype, kernel_init=init, dot_general=NamedDot(names), name=name
    )


def norm(cfg: TransformerConfig, name: str) -> nn.RMSNorm:
    init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",))
    return nn.RMSNorm(epsilon=cfg.norm_eps, param_dtype=jnp.dtype(cfg.param_dtype), scale_init=init, name=name)


class Attention(nn.Module):
    cfg: TransformerConfig

    @nn.compact
    def __call__(self, h_BTE: jax.Array, angles: layers.Rope) -> jax.Array:
        cfg = self.cfg
        heads, kv_heads = (cfg.num_heads, cfg.head_dim), (cfg.num_kv_heads, cfg.head_dim)
        h_BTE = layers.block_input(h_BTE)
        q_BTHD = linear(cfg, "query", heads, ("embed", "heads", "head_dim"))(h_BTE)
        k_BTKD = linear(cfg, "key", kv_heads, ("embed", "kv_heads", "head_dim"))(h_BTE)
        v_BTKD = linear(cfg, "value", kv_heads, ("embed", "kv_heads", "head_dim"))(h_BTE)
        o_BTHD, _ = attend(cfg, q_BTHD, k_BTKD, v_BTKD, angles)
        return linear(cfg, "out", cfg.embed_dim, ("heads", "head_dim", "embed"), axis=(-2, -1))(o_BTHD)


class MLP(nn.Module):
    cfg: TransformerConfig

    @nn.compact
    def __call__(self, h_BTE: jax.Array) -> jax.Array:
        cfg, h_BTE = self.cfg, layers.block_input(h_BTE)
        both = [linear(cfg, name, cfg.mlp_dim, ("embed", "mlp"))(h_BTE) for name in ("gate", "up")]
        named = (checkpoint_name(x_BTM, name) for x_BTM, name in zip(both, ("gate", "up"), strict=True))
        return linear(cfg, "down", cfg.embed_dim, ("mlp", "embed"))(layers.swiglu(*named))


class Block(nn.Module):
    cfg: TransformerConfig

    @nn.compact
    def __call__(self, x_BTE: jax.Array, angles: layers.Rope) -> tuple[jax.Array, None]:
        h_BTE = norm(self.cfg, "attention_norm")(x_BTE)
        x_BTE = x_BTE + layers.block_output(Attention(self.cfg, name="attention")(h_BTE, angles), "attention_out")
        h_BTE = norm(self.cfg, "mlp_norm")(x_BTE)
        return layers.residual(x_BTE + layers.block_output(MLP(self.cfg, name="mlp")(h_BTE), "mlp_out")), None


class Decoder(nn.Module):
    """Logits of the next token, [B T] -> [B T V]."""

    cfg: TransformerConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.cfg
        init = nn.with_logical_partitioning(embedding_init(), ("vocab", "embed"))
        dtype = jnp.dtype(cfg.param_dtype)
        embed = nn.Embed(cfg.vocab_size, cfg.embed_dim, param_dtype=dtype, embedding_init=init, name="embed")
        x_BTE = layers.embed(embed.embedding, tokens, is_tied=False)
        angles = rope_of(cfg, tokens, None, None, x_BTE.dtype, None)
        if self.is_initializing():
            stacked = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=cfg.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            stacked(cfg, name="layers")(x_BTE, angles)
        params = nn.meta.unbox(self.variables["params"]["layers"])
        one = Block(cfg, parent=None)

        def layer(x_BTE: jax.Array, params: Any, angles: layers.Rope) -> jax.Array:
            with module_prefix("layers"):
                return one.apply({"params": params}, x_BTE, angles)[0]

        x_BTE = mp.scan_layers(layer, x_BTE, params, per_example=angles)
        h_BTE = layers.block_input(norm(cfg, "final_norm")(x_BTE))
        return linear(cfg, "head", cfg.vocab_size, ("embed", "vocab"))(h_BTE)


def linen_model(cfg: TransformerConfig, batch_size: int, seq_len: int) -> Model:
    return mp.from_linen(Decoder(cfg), jax.ShapeDtypeStruct((batch_size, seq_len), np.int32))
