"""The decoder as a Flax Linen module: the same parameters under the same paths as the NNX one, and the same functions.

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Int, Integer

from meshpar.layers.precision import dot_general
from meshpar.layers.scan import Aux, keeps_are_others
from meshpar.models import context_attention as context
from meshpar.models import layers
from meshpar.models import overlapped_matmul as overlap
from meshpar.models.annotated import into_residual, linen_kernel, linen_linear, linen_norm
from meshpar.models.config import TransformerConfig
from meshpar.models.latent_attention import LinenLatentAttention
from meshpar.models.layers import KVCache, LayerCache, Rope
from meshpar.models.transformer import (
    advanced,
    embedding_init,
    joined_caches,
    laid_logits,
    rope_of,
    run_layers,
    split_cache,
    tied_logits,
    unembedding,
)
from meshpar.moe.layer import report_layers
from meshpar.moe.linen import BALANCE, LinenMoE, moved
from meshpar.sharding.activations import below
from meshpar.sharding.types import PyTree


class LinenAttention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    cfg: TransformerConfig

    @nn.compact
    def __call__(
        self, h_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None, *, overlapped: bool = False
    ) -> tuple[Array, LayerCache | None]:
        """The heads' output, projected back to the residual stream, and the cache with these positions in it."""
        cfg, dot = self.cfg, linen_kernel if overlapped else dot_general
        h_BTE = overlap.block_input(h_BTE, overlapped=overlapped)
        heads, kv_heads = (cfg.num_heads, cfg.head_dim), (cfg.num_kv_heads, cfg.head_dim)
        q_BTHD = linen_linear(cfg, "query", heads, ("embed", "heads", "head_dim"), dot=dot)(h_BTE)
        k_BTKD = linen_linear(cfg, "key", kv_heads, ("embed", "kv_heads", "head_dim"), dot=dot)(h_BTE)
        v_BTKD = linen_linear(cfg, "value", kv_heads, ("embed", "kv_heads", "head_dim"), dot=dot)(h_BTE)
        if overlapped:
            names = ("act_heads", "act_kv_heads", "act_kv_heads")
            q_BTHD, k_BTKD, v_BTKD = overlap.gathered_matmul(h_BTE, (q_BTHD, k_BTKD, v_BTKD), names)
        if cfg.qk_norm:
            q_BTHD = linen_norm(cfg, "query_norm", dim="head_dim")(q_BTHD)
            k_BTKD = linen_norm(cfg, "key_norm", dim="head_dim")(k_BTKD)
        o_BTHD, cache = layers.attend(
            q_BTHD,
            k_BTKD,
            v_BTKD,
            angles,
            implementation=cfg.attention,
            cache=cache,
            length=length,
            **cfg.attention_limits,
        )
        out = ("heads", "head_dim", "embed")
        a_BTE = linen_linear(cfg, "out", cfg.embed_dim, out, axis=(-2, -1), init=into_residual(cfg), dot=dot)(o_BTHD)
        return overlap.matmul_scattered(o_BTHD, a_BTE, "act_heads") if overlapped else a_BTE, cache


class LinenMLP(nn.Module):
    """SwiGLU."""

    cfg: TransformerConfig

    @nn.compact
    def __call__(self, h_BTE: Array, *, overlapped: bool = False) -> Array:
        """[B T E] -> [B T E]."""
        cfg, dot = self.cfg, linen_kernel if overlapped else dot_general
        gate_BTM = linen_linear(cfg, "gate", cfg.mlp_dim, ("embed", "mlp"), dot=dot)(h_BTE)
        up_BTM = linen_linear(cfg, "up", cfg.mlp_dim, ("embed", "mlp"), dot=dot)(h_BTE)
        if overlapped:
            gate_BTM, up_BTM = overlap.gathered_matmul(h_BTE, (gate_BTM, up_BTM), ("act_mlp", "act_mlp"))

        def down(mlp: LinenMLP, gate_BTM: Array, up_BTM: Array) -> Array:
            hidden_BTM = layers.swiglu(gate_BTM, up_BTM)
            matrix = linen_linear(cfg, "down", cfg.embed_dim, ("mlp", "embed"), init=into_residual(cfg), dot=dot)
            y_BTE = matrix(hidden_BTM)
            return overlap.matmul_scattered(hidden_BTM, y_BTE, "act_mlp") if overlapped else y_BTE

        run = down if keeps_are_others() else nn.checkpoint(down, prevent_cse=False, policy=layers.MATMULS)
        return run(self, *layers.gated(gate_BTM, up_BTM))


class LinenBlock(nn.Module):
    """One layer: attention and an MLP or experts, each behind a norm and added to the residual stream."""

    cfg: TransformerConfig
    has_experts: bool = False

    @nn.compact
    def __call__(
        self, x_BTE: Array, cache: LayerCache | None, angles: Rope, length: Array | None
    ) -> tuple[Array, tuple[LayerCache | None, Aux | None]]:
        """The residual stream behind this layer, the cache with these positions in it, and the router's statistics."""
        is_whole = cache is None
        overlapped = overlap.overlaps(self.cfg, x_BTE, has_cache=not is_whole)
        h_BTE = linen_norm(self.cfg, "attention_norm")(x_BTE)
        kind = LinenAttention if self.cfg.latent is None else LinenLatentAttention
        a_BTE, cache = kind(self.cfg, name="attention")(h_BTE, angles, cache, length, overlapped=overlapped)
        x_BTE = x_BTE + layers.added(a_BTE, "attention_out")
        h_BTE, aux = linen_norm(self.cfg, "mlp_norm")(x_BTE), None
        if self.has_experts:
            assert self.cfg.moe is not None
            down = into_residual(self.cfg)
            experts = LinenMoE(self.cfg.embed_dim, self.cfg.moe, self.cfg.param_dtype, down, name="mlp")
            m_BTE, stats = experts(layers.block_input(h_BTE), drops=is_whole)
            aux = stats.aux
        else:
            h_BTE = overlap.block_input(h_BTE, overlapped=overlapped)
            m_BTE = LinenMLP(self.cfg, name="mlp")(h_BTE, overlapped=overlapped)
        return layers.residual(x_BTE + layers.added(m_BTE, "mlp_out")), (cache, aux)


class LinenTransformer(nn.Module):
    """A decoder; called as `meshpar.models.Transformer` is."""

    cfg: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Logits of the token that follows each position; see `Transformer.__call__`."""
        cfg = self.cfg
        init = nn.with_logical_partitioning(embedding_init(), ("vocab", "embed"))
        dtype = jnp.dtype(cfg.param_dtype)
        table_VE = nn.Embed(
            cfg.vocab_size, cfg.embed_dim, param_dtype=dtype, embedding_init=init, name="embed"
        ).embedding
        with jax.named_scope("embed"):
            if cache is None:
                tokens, positions, segments = context.entered(tokens, positions, segments)
            x_BTE = layers.embed(table_VE, tokens, is_tied=cfg.tied_embeddings)
        angles = rope_of(cfg, tokens, positions, cache, x_BTE.dtype, segments)
        x_BTE, kv, aux = self._layers(x_BTE, cache, angles)
        if aux is not None and cache is None:
            assert cfg.moe is not None
            report_layers(aux, cfg.moe)
        cache = advanced(cache, kv, angles)
        with jax.named_scope("head"):
            kernel_EV = None
            if not cfg.tied_embeddings:
                kernel_EV = linen_linear(cfg, "head", cfg.vocab_size, ("embed", "vocab"), dot=linen_kernel)(x_BTE)
                x_BTE, kernel_EV = layers.reduced_first(x_BTE, kernel_EV)
            h_BTE = layers.block_input(linen_norm(cfg, "final_norm", in_layers=False)(x_BTE))
            h_BTE = context.left(h_BTE) if cache is None else h_BTE
            if cfg.vocab_chunk is not None and cache is None:
                return unembedding(cfg, h_BTE, table_VE if kernel_EV is None else kernel_EV)
            logits_BTV = tied_logits(table_VE, h_BTE) if kernel_EV is None else layers.logits(h_BTE, kernel_EV)
            logits_BTV = laid_logits(cfg, logits_BTV)
        return logits_BTV if cache is None else (logits_BTV, cache)

    @nn.nowrap
    def _layers(self, x_BTE: Array, cache: KVCache | None, angles: Rope) -> tuple[Array, LayerCache | None, Aux | None]:
        """The layers, one after the other under scans, or by stages."""
        cfg, dense = self.cfg, self.cfg.num_dense_layers
        of_dense, of_rest = split_cache(cache, dense)
        length, kv_dense = None if cache is None else cache.length, None
        if dense:
            x_BTE, kv_dense, _ = self._run("dense_layers", dense, False, x_BTE, angles, of_dense, length)
        has_experts = cfg.moe is not None
        x_BTE, kv, aux = self._run("layers", cfg.num_layers - dense, has_experts, x_BTE, angles, of_rest, length)
        counts = self.is_mutable_collection(BALANCE) and not self.is_initializing()
        if aux is not None and BALANCE in self.variables and counts:
            before = self.variables[BALANCE]["layers"]["mlp"]
            counted = {**before, "load": before["load"] + aux.metrics["load"]}
            self.put_variable(BALANCE, "layers", {"mlp": counted})
        return x_BTE, joined_caches(kv_dense, kv), aux

    @nn.nowrap
    def _run(
        self,
        at: str,
        num_layers: int,
        has_experts: bool,
        x_BTE: Array,
        angles: Rope,
        caches: LayerCache | None,
        length: Array | None,
    ) -> tuple[Array, LayerCache | None, Aux | None]:
        """A stack of layers; see `run_layers`. Outside of Linen's own scan, which only makes their variables."""
        if self.is_initializing():
            _stacked_block(num_layers, at)(self.cfg, has_experts, name=at)(x_BTE, None, angles, None)
        made = {name: nn.meta.unbox(of[at]) for name, of in self.variables.items() if at in of}
        one = LinenBlock(self.cfg, has_experts, parent=None)

        def block(x_BTE: Array, params: PyTree, variables: PyTree, angles: Rope, cache: LayerCache | None) -> Any:
            with below(at):
                x_BTE, (kv, aux) = one.apply({"params": params, **variables}, x_BTE, cache, angles, length)
            return x_BTE, kv, aux

        return run_layers(block, x_BTE, made.pop("params"), made, angles, caches, at)

    @nn.nowrap
    def after_update(self, extra: PyTree) -> PyTree:
        """Collections with the balancing bias of all layers moved; see `LinenMoE.after_update`."""
        if self.cfg.moe is None or not self.cfg.moe.is_biased:
            return extra
        balance = moved(extra[BALANCE]["layers"]["mlp"], self.cfg.moe)
        return {**extra, BALANCE: {"layers": {"mlp": balance}}}


def _stacked_block(num_layers: int, at: str) -> Any:
    """The block whose every parameter has a leading dim; only `layers`, which stages share, has that for its name."""
    return nn.scan(
        LinenBlock,
        variable_axes={"params": 0, BALANCE: 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers" if at == "layers" else None},
    )
