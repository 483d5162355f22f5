"""The decoder as a Flax NNX module: annotated parameters, constrained activations, layers under one scan.

Shape suffixes as in `meshpar.models.layers`. For a decoder in Linen, wrap it with `flax.nnx.bridge`; the logical names
stay:

    module = bridge.to_linen(Transformer, cfg)
    model = mp.from_linen(module, jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from meshpar.collectives.attention import capped
from meshpar.layers.auxiliary import is_listening
from meshpar.layers.precision import dot_general
from meshpar.layers.scan import Aux, keeps_are_others, scan_layers, with_aux
from meshpar.models import context_attention as context
from meshpar.models import layers
from meshpar.models import overlapped_matmul as overlap
from meshpar.models.annotated import Initializer, bare, into_residual, nnx_linear, nnx_norm
from meshpar.models.chunked_cross_entropy import Unembedding
from meshpar.models.config import TransformerConfig
from meshpar.models.latent_attention import NNXLatentAttention
from meshpar.models.layers import KVCache, LayerCache, Rope
from meshpar.moe.layer import report_layers
from meshpar.moe.nnx import MoE
from meshpar.sharding.context import constrain
from meshpar.sharding.types import PyTree, problem


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, cfg: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        linear = nnx_linear(cfg, rngs)
        self.query = linear(cfg.embed_dim, (cfg.num_heads, cfg.head_dim), names=("embed", "heads", "head_dim"))
        self.key = linear(cfg.embed_dim, (cfg.num_kv_heads, cfg.head_dim), names=("embed", "kv_heads", "head_dim"))
        self.value = linear(cfg.embed_dim, (cfg.num_kv_heads, cfg.head_dim), names=("embed", "kv_heads", "head_dim"))
        self.out = linear(
            (cfg.num_heads, cfg.head_dim),
            cfg.embed_dim,
            axis=(-2, -1),
            names=("heads", "head_dim", "embed"),
            init=into_residual(cfg),
        )
        if cfg.qk_norm:
            self.query_norm = nnx_norm(cfg, rngs, width=cfg.head_dim, name="head_dim")
            self.key_norm = nnx_norm(cfg, rngs, width=cfg.head_dim, name="head_dim")
        self.cfg = cfg

    def __call__(
        self, h_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None, *, overlapped: bool = False
    ) -> tuple[Array, LayerCache | None]:
        """The heads' output, projected back to the residual stream, and the cache with these positions in it."""
        h_BTE = overlap.block_input(h_BTE, overlapped=overlapped)
        inward = (self.query, self.key, self.value)
        if overlapped:
            names = ("act_heads", "act_kv_heads", "act_kv_heads")
            q_BTHD, k_BTKD, v_BTKD = overlap.gathered_matmul(h_BTE, [bare(one) for one in inward], names)
        else:
            q_BTHD, k_BTKD, v_BTKD = (one(h_BTE) for one in inward)
        if self.cfg.qk_norm:
            q_BTHD, k_BTKD = self.query_norm(q_BTHD), self.key_norm(k_BTKD)
        o_BTHD, cache = layers.attend(
            q_BTHD,
            k_BTKD,
            v_BTKD,
            angles,
            implementation=self.cfg.attention,
            cache=cache,
            length=length,
            **self.cfg.attention_limits,
        )
        if overlapped:
            return overlap.matmul_scattered(o_BTHD, bare(self.out), "act_heads"), cache
        return self.out(o_BTHD), cache


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, cfg: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        linear = nnx_linear(cfg, rngs)
        self.gate = linear(cfg.embed_dim, cfg.mlp_dim, names=("embed", "mlp"))
        self.up = linear(cfg.embed_dim, cfg.mlp_dim, names=("embed", "mlp"))
        self.down = linear(cfg.mlp_dim, cfg.embed_dim, names=("mlp", "embed"), init=into_residual(cfg))

    def __call__(self, h_BTE: Array, *, overlapped: bool = False) -> Array:
        """[B T E] -> [B T E]."""

        def down(gate_BTM: Array, up_BTM: Array) -> Array:
            hidden_BTM = layers.swiglu(gate_BTM, up_BTM)
            if overlapped:
                return overlap.matmul_scattered(hidden_BTM, bare(self.down), "act_mlp")
            return self.down(hidden_BTM)

        if overlapped:
            inward = [bare(self.gate), bare(self.up)]
            both = overlap.gathered_matmul(h_BTE, inward, ("act_mlp", "act_mlp"))
        else:
            both = [self.gate(h_BTE), self.up(h_BTE)]
        run = down if keeps_are_others() else jax.checkpoint(down, prevent_cse=False, policy=layers.MATMULS)
        return run(*layers.gated(*both))


class Block(nnx.Module):
    """One layer: attention and an MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: TransformerConfig, *, has_experts: bool = False, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.attention_norm = nnx_norm(cfg, rngs)
        self.attention = (Attention if cfg.latent is None else NNXLatentAttention)(cfg, rngs=rngs)
        self.mlp_norm = nnx_norm(cfg, rngs)
        if has_experts:
            assert cfg.moe is not None
            down = into_residual(cfg)
            self.mlp: Any = MoE(cfg.embed_dim, cfg.moe, param_dtype=cfg.param_dtype, down_init=down, rngs=rngs)
        else:
            self.mlp = MLP(cfg, rngs=rngs)

    def __call__(
        self, x_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None
    ) -> tuple[Array, LayerCache | None, Aux | None]:
        """The residual stream behind this layer, the cache with these positions in it, and the router's statistics."""
        overlapped = overlap.overlaps(self.cfg, x_BTE, has_cache=cache is not None)
        with jax.named_scope("attention"):
            h_BTE = self.attention_norm(x_BTE)
            a_BTE, cache = self.attention(h_BTE, angles, cache, length, overlapped=overlapped)
            x_BTE = x_BTE + layers.added(a_BTE, "attention_out")
        aux = None
        with jax.named_scope("mlp"):
            if isinstance(self.mlp, MoE):
                m_BTE, stats = self.mlp(layers.block_input(self.mlp_norm(x_BTE)), drops=cache is None)
                aux = stats.aux
            else:
                h_BTE = overlap.block_input(self.mlp_norm(x_BTE), overlapped=overlapped)
                m_BTE = self.mlp(h_BTE, overlapped=overlapped)
            x_BTE = x_BTE + layers.added(m_BTE, "mlp_out")
        return layers.residual(x_BTE), cache, aux


class Transformer(nnx.Module):
    """A decoder.

    Args:
      cfg: its sizes.
      rngs: draws the parameters. Under `nnx.eval_shape` nothing is allocated.
    """

    def __init__(self, cfg: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        # NNX would place annotated parameters on a mesh of its own; meshpar's rules place them when they are born.
        with nnx.use_eager_sharding(False):
            self.embed = nnx.Embed(
                cfg.vocab_size,
                cfg.embed_dim,
                param_dtype=jnp.dtype(cfg.param_dtype),
                embedding_init=nnx.with_partitioning(embedding_init(), ("vocab", "embed")),
                rngs=rngs,
            )
            if cfg.num_dense_layers:
                # Of another structure than those behind them, so a stack of their own. Under stages they are the first
                # one's: what is named `layers` is what stages share.
                self.dense_layers = _stacked_blocks(cfg, cfg.num_dense_layers, False, None, rngs)
            rest = cfg.num_layers - cfg.num_dense_layers
            self.layers = _stacked_blocks(cfg, rest, cfg.moe is not None, "layers", rngs)
            self.final_norm = nnx_norm(cfg, rngs, in_layers=False)
            if not cfg.tied_embeddings:
                self.head = nnx_linear(cfg, rngs)(cfg.embed_dim, cfg.vocab_size, names=("embed", "vocab"))

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Logits of the token that follows each position.

        Args:
          tokens: ids.
          positions: of the tokens, for rotary embeddings; None: one after the other, behind the cache when there is
            one.
          segments: numbers of the sequences in a row, where there are several: none sees another, and positions begin
            anew in each. Not with a cache.
          cache: keys and values of the positions before these, with room for them.

        Returns:
          logits `[B, T, V]`, split over the vocabulary where the strategy says so; with `vocab_chunk` an `Unembedding`,
          which makes them in chunks; with a cache (logits, new cache).
        """
        table_VE = self.embed.embedding[...]
        with jax.named_scope("embed"):
            if cache is None:
                tokens, positions, segments = context.entered(tokens, positions, segments)
            x_BTE = layers.embed(table_VE, tokens, is_tied=self.cfg.tied_embeddings)
        angles = rope_of(self.cfg, tokens, positions, cache, x_BTE.dtype, segments)
        x_BTE, cache = self._scanned(x_BTE, angles, cache)
        with jax.named_scope("head"):
            kernel_EV = None if self.cfg.tied_embeddings else bare(self.head)
            x_BTE, kernel_EV = (x_BTE, None) if kernel_EV is None else layers.reduced_first(x_BTE, kernel_EV)
            h_BTE = layers.block_input(self.final_norm(x_BTE))
            h_BTE = context.left(h_BTE) if cache is None else h_BTE
            if self.cfg.vocab_chunk is not None and cache is None:
                return unembedding(self.cfg, h_BTE, table_VE if kernel_EV is None else kernel_EV)
            logits_BTV = tied_logits(table_VE, h_BTE) if kernel_EV is None else layers.logits(h_BTE, kernel_EV)
            logits_BTV = laid_logits(self.cfg, logits_BTV)
        return logits_BTV if cache is None else (logits_BTV, cache)

    def _scanned(self, x_BTE: Array, angles: Rope, cache: KVCache | None) -> tuple[Array, KVCache | None]:
        """The layers, one after the other under scans: trace and compile time do not grow with depth."""
        dense = self.cfg.num_dense_layers
        of_dense, of_rest = split_cache(cache, dense)
        kv_dense = None
        if dense:
            x_BTE, kv_dense, _ = _run(self.dense_layers, "dense_layers", x_BTE, angles, of_dense, cache)
        x_BTE, kv, aux = _run(self.layers, "layers", x_BTE, angles, of_rest, cache)
        if aux is not None and cache is None and is_listening():
            assert self.cfg.moe is not None
            report_layers(aux, self.cfg.moe)
            if self.cfg.moe.is_biased:
                self.layers.mlp.load[...] = self.layers.mlp.load[...] + aux.metrics["load"]
        return x_BTE, advanced(cache, joined_caches(kv_dense, kv), angles)


def _run(
    stacked: Block, at: str, x_BTE: Array, angles: Rope, caches: LayerCache | None, cache: KVCache | None
) -> tuple[Array, LayerCache | None, Aux | None]:
    """A stack of layers; see `run_layers`."""
    graph, params, *variables = nnx.split(stacked, nnx.Param, ...)
    length = None if cache is None else cache.length

    def block(x_BTE: Array, params: Any, variables: Any, angles: Rope, cache: LayerCache | None) -> Any:
        return nnx.merge(graph, params, *variables)(x_BTE, angles, cache, length)

    return run_layers(block, x_BTE, params, variables, angles, caches, at)


# ---- What the NNX and the Linen module share -------------------------------------------------------------------------


def run_layers(
    block: Callable[..., Any],
    x_BTE: Array,
    params: PyTree,
    variables: PyTree,
    angles: Rope,
    caches: LayerCache | None,
    at: str,
) -> tuple[Array, LayerCache | None, Aux | None]:
    """Stacked layers by the step's hook; those named `layers` are what stages share.

    Args:
      block: (x, parameters, variables, angles, cache or None) -> (x, cache or None, Aux or None), of one layer.
    """

    def layer(x_BTE: Array, params: PyTree, variables: PyTree, *cache_and_angles: Any) -> Any:
        *cache, angles = cache_and_angles
        x_BTE, cache, aux = block(x_BTE, params, variables, angles, cache[0] if cache else None)
        out = x_BTE if cache is None else (x_BTE, cache)
        return out if aux is None else (out, aux)

    staged = at == "layers"
    out = scan_layers(layer, x_BTE, params, extra=variables, caches=caches, per_example=angles, at=at, staged=staged)
    out, aux = with_aux(out)
    return (out, None, aux) if caches is None else (*out, aux)


def rope_of(
    cfg: TransformerConfig,
    tokens_BT: Integer[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None,
    cache: KVCache | None,
    dtype: jax.typing.DTypeLike,
    segments_BT: Int[Array, "B T"] | None = None,
) -> Rope:
    """Cosines and sines of the tokens' positions, made once for all layers."""
    if segments_BT is not None and cache is not None:
        where, asked = "Transformer(segments=..., cache=...)", "go on with several sequences in a row"
        raise problem(where, asked, "a cache holds one sequence a row", "give each a row of its own")
    if positions_BT is None:
        first = 0 if cache is None else cache.length
        positions_BT = first + jnp.arange(tokens_BT.shape[1])[None]
    rotated = cfg.head_dim if cfg.latent is None else cfg.latent.rope_dim
    frequencies_F = layers.rope_frequencies(rotated, cfg.rope_theta, cfg.rope_scaling or cfg.rope_yarn)
    angles = layers.rope(positions_BT, frequencies_F, dtype)
    if cfg.rope_yarn is not None and cfg.rope_yarn.rotated_factor != 1:
        angles = Rope(*(x * cfg.rope_yarn.rotated_factor for x in angles[:2]))
    return angles._replace(segments_BT=segments_BT)


def split_cache(cache: KVCache | None, dense: int) -> tuple[LayerCache | None, LayerCache | None]:
    """Keys and values of the first `dense` layers, and of the others."""
    if cache is None:
        return None, None
    return (cache[0][:dense], cache[1][:dense]), (cache[0][dense:], cache[1][dense:])


def joined_caches(dense: LayerCache | None, rest: LayerCache | None) -> LayerCache | None:
    """`split_cache` undone; `dense` is None where there are no such layers."""
    if dense is None or rest is None:
        return rest
    return jnp.concatenate([dense[0], rest[0]]), jnp.concatenate([dense[1], rest[1]])


def advanced(cache: KVCache | None, kv: Any, angles: Rope) -> KVCache | None:
    """The cache with the layers' new keys and values, longer by the positions that were just seen."""
    return None if cache is None else KVCache(kv[0], kv[1], cache.length + angles.cos_BTF.shape[1])


def tied_logits(table_VE: Float[Array, "V E"], h_BTE: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
    """Logits by the embedding table, gathered over its width as for the lookup."""
    table_VE = layers.gathered_table(table_VE)
    return dot_general(h_BTE, table_VE.astype(h_BTE.dtype), (((2,), (1,)), ((), ())), narrow=False)


def laid_logits(cfg: TransformerConfig, logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Logits split over the vocabulary, and capped."""
    logits_BTV = constrain(logits_BTV, "batch", "seq", "act_vocab")
    if cfg.logits_cap is None:
        return logits_BTV
    return capped(logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32)), cfg.logits_cap)[0]


def unembedding(cfg: TransformerConfig, h_BTE: Float[Array, "B T E"], matrix: Float[Array, ...]) -> Unembedding:
    """Logits for a loss to make, by the embedding table or by the head's matrix."""
    assert cfg.vocab_chunk is not None
    dim = 0 if cfg.tied_embeddings else 1
    return Unembedding(h_BTE, matrix, vocab_dim=dim, chunk_size=cfg.vocab_chunk, cap=cfg.logits_cap)


def embedding_init() -> Initializer:
    """Rows of length one, so that tied logits start with a variance of one."""
    return nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


def _stacked_blocks(
    cfg: TransformerConfig, num_layers: int, has_experts: bool, name: str | None, rngs: nnx.Rngs
) -> Block:
    """One block whose every parameter has a leading dim of that name."""

    def make(rngs: nnx.Rngs) -> Block:
        return Block(cfg, has_experts=has_experts, rngs=rngs)

    stacked = nnx.vmap(make, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: name})
    return nnx.split_rngs(splits=num_layers)(stacked)(rngs)
