"""The decoder of `meshpar.models` as a person writes it in Flax NNX, with nothing of meshpar: what a step is held to.

Parameters have the same paths and shapes, and Flax's own initial values; layers run under one scan, with what matmuls
with weights give kept for the backward pass; logits are whole. Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from meshpar.models import TransformerConfig
from meshpar.sharding.types import PyTree


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, by `jax.nn.dot_product_attention`."""

    def __init__(self, cfg: TransformerConfig, linear: Callable[..., Any]) -> None:
        heads, kv_heads = (cfg.num_heads, cfg.head_dim), (cfg.num_kv_heads, cfg.head_dim)
        self.query, self.key, self.value = (linear(cfg.embed_dim, out) for out in (heads, kv_heads, kv_heads))
        self.out = linear(heads, cfg.embed_dim, axis=(-2, -1))
        self.by: Any = "cudnn" if cfg.attention == "cudnn" else "xla"

    def __call__(self, h_BTE: jax.Array, angles_TF: jax.Array) -> jax.Array:
        q_BTHD, k_BTKD = (_rotated(one(h_BTE), angles_TF) for one in (self.query, self.key))
        how: dict[str, Any] = {"is_causal": True, "implementation": self.by}
        return self.out(jax.nn.dot_product_attention(q_BTHD, k_BTKD, self.value(h_BTE), **how))


class Block(nnx.Module):
    """Attention and a SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, cfg.embed_dim, epsilon=cfg.norm_eps, dtype=dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(cfg, linear)
        self.mlp = nnx.Dict(
            gate=linear(cfg.embed_dim, cfg.mlp_dim),
            up=linear(cfg.embed_dim, cfg.mlp_dim),
            down=linear(cfg.mlp_dim, cfg.embed_dim),
        )

    def __call__(self, x_BTE: jax.Array, angles_TF: jax.Array) -> jax.Array:
        x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), angles_TF)
        h_BTE = self.mlp_norm(x_BTE)
        return x_BTE + self.mlp.down(nnx.silu(self.mlp.gate(h_BTE)) * self.mlp.up(h_BTE))


class Decoder(nnx.Module):
    """A dense decoder with an output layer of its own.

    Args:
      cfg: its sizes, and whether attention is cuDNN's; what else `TransformerConfig` offers is not looked at.
      dtype: of the computation; parameters are float32.
      rngs: draws the parameters.
    """

    def __init__(self, cfg: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.embed = nnx.Embed(cfg.vocab_size, cfg.embed_dim, dtype=dtype, rngs=rngs)
        stacked = nnx.vmap(lambda rngs: Block(cfg, dtype, rngs=rngs), in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=cfg.num_layers)(stacked)(rngs)
        self.final_norm = nnx.RMSNorm(cfg.embed_dim, epsilon=cfg.norm_eps, dtype=dtype, rngs=rngs)
        self.head = nnx.LinearGeneral(cfg.embed_dim, cfg.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits `[B, T, V]`."""
        half = self.cfg.head_dim // 2
        angles_TF = jnp.arange(tokens_BT.shape[1])[:, None] * self.cfg.rope_theta ** (-jnp.arange(half) / half)
        graph, stack = nnx.split(self.layers)

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def layer(x_BTE: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, params)(x_BTE, angles_TF), None

        x_BTE, _ = jax.lax.scan(layer, self.embed(tokens_BT), stack)
        return self.head(self.final_norm(x_BTE))


def loss(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of the next token, in nats."""
    logits_BTV = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()


def begin(cfg: TransformerConfig, tx: optax.GradientTransformation, dtype: Any) -> tuple[Any, PyTree, PyTree]:
    """The jitted step `(params, opt_state, batch) -> (params, opt_state, loss)`, which donates both, and both."""

    def make() -> Decoder:
        return Decoder(cfg, dtype, rngs=nnx.Rngs(0))

    graph, _ = nnx.split(nnx.eval_shape(make))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: PyTree, opt_state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.jit(lambda: nnx.state(make()))()
    return step, params, jax.jit(tx.init)(params)


def _rotated(x_BTHD: jax.Array, angles_TF: jax.Array) -> jax.Array:
    """Pairs (i, i + D/2) turned."""
    cos_T1F, sin_T1F = jnp.cos(angles_TF)[:, None], jnp.sin(angles_TF)[:, None]
    a_BTHF, b_BTHF = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    turned = (a_BTHF * cos_T1F - b_BTHF * sin_T1F, b_BTHF * cos_T1F + a_BTHF * sin_T1F)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHD.dtype)
