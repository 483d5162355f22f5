"""Flax NNX decoder with annotated parameters, constrained activations and scanned layers.

Shape suffixes as in `meshpar.models.layers`. To use the decoder in Linen, wrap it with `flax.nnx.bridge`, which keeps
the logical names:

    module = bridge.to_linen(Transformer, cfg)
    model = mp.from_linen(module, jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int, Integer

from meshpar.collectives.attention import capped
from meshpar.layers.auxiliary import is_listening
from meshpar.layers.scan import Aux, is_outside_loop, scan_layers, step_selects_residuals, with_aux
from meshpar.layers.token_mask import current_mask
from meshpar.models import attention, layers
from meshpar.models import context_attention as context
from meshpar.models import overlapped_matmul as overlap
from meshpar.models.annotated import Initializer, add_bias, bare, into_residual, nnx_linear, nnx_norm
from meshpar.models.architecture import Architecture
from meshpar.models.attention import KVCache, LayerCache
from meshpar.models.chunked_cross_entropy import Unembedding
from meshpar.models.latent_attention import NNXLatentAttention
from meshpar.models.layers import Rope
from meshpar.moe.layer import report_layers
from meshpar.moe.nnx import MoE
from meshpar.sharding.context import constrain
from meshpar.sharding.errors import problem


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, cfg: Architecture, *, rngs: nnx.Rngs) -> None:
        linear, heads, kv_heads = nnx_linear(cfg, rngs), (cfg.num_heads, cfg.head_dim), (cfg.num_kv_heads, cfg.head_dim)
        bias, kv_names = cfg.qkv_bias, ("embed", "kv_heads", "head_dim")
        self.query = linear(cfg.embed_dim, heads, names=("embed", "heads", "head_dim"), bias=bias)
        self.key = linear(cfg.embed_dim, kv_heads, names=kv_names, bias=bias)
        self.value = linear(cfg.embed_dim, kv_heads, names=kv_names, bias=bias)
        names, into = ("heads", "head_dim", "embed"), into_residual(cfg)
        self.out = linear(heads, cfg.embed_dim, axis=(-2, -1), names=names, init=into, bias=cfg.out_bias)
        if cfg.attention_sinks:
            init_fn = nnx.with_partitioning(nnx.initializers.zeros_init(), ("heads",))
            self.sinks = nnx.Param(init_fn(rngs.params(), (cfg.num_heads,), jnp.dtype(cfg.param_dtype)))
        if cfg.qk_norm:
            widths = cfg.qk_norm_widths
            norm_names = ("heads", "kv_heads") if cfg.qk_norm == "all_heads" else ("head_dim", "head_dim")
            self.query_norm = nnx_norm(cfg, rngs, width=widths[0], name=norm_names[0])
            self.key_norm = nnx_norm(cfg, rngs, width=widths[1], name=norm_names[1])
        self.cfg = cfg

    def __call__(
        self, h_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None, *, overlapped: bool = False
    ) -> tuple[Array, LayerCache | None]:
        """Return the output projection of the attention and the updated cache."""
        h_BTE = layers.residual(h_BTE) if overlapped else layers.block_input(h_BTE)
        projections = (self.query, self.key, self.value)
        if overlapped:
            names = ("act_heads", "act_kv_heads", "act_kv_heads")
            products = overlap.gathered_matmul(h_BTE, [bare(layer) for layer in projections], names)
            q_BTHD, k_BTKD, v_BTKD = map(add_bias, projections, products)
        else:
            q_BTHD, k_BTKD, v_BTKD = (layer(h_BTE) for layer in projections)
        if self.cfg.qk_norm:
            q_BTHD, k_BTKD = (
                norm(x.reshape(*x.shape[:2], -1, width)).reshape(x.shape)
                for norm, x, width in zip(
                    (self.query_norm, self.key_norm), (q_BTHD, k_BTKD), self.cfg.qk_norm_widths, strict=True
                )
            )
        sinks_H = None
        if self.cfg.attention_sinks:  # in float32 or wider, like the sum of their gradients over tokens and devices
            sinks_H = self.sinks[...].astype(jnp.promote_types(h_BTE.dtype, jnp.float32))
        options: dict[str, Any] = {"cache": cache, "length": length, "sinks_H": sinks_H}
        o_BTHD, cache = attention.attend(self.cfg, q_BTHD, k_BTKD, v_BTKD, angles, **options)
        if overlapped:
            return add_bias(self.out, overlap.matmul_scattered(o_BTHD, bare(self.out), "act_heads")), cache
        return self.out(o_BTHD), cache


class MLP(nnx.Module):
    """SwiGLU feed-forward network (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, cfg: Architecture, *, rngs: nnx.Rngs) -> None:
        linear = nnx_linear(cfg, rngs)
        self.activation = cfg.activation
        self.gate = linear(cfg.embed_dim, cfg.mlp_dim, names=("embed", "mlp"))
        self.up = linear(cfg.embed_dim, cfg.mlp_dim, names=("embed", "mlp"))
        self.down = linear(cfg.mlp_dim, cfg.embed_dim, names=("mlp", "embed"), init=into_residual(cfg))

    def __call__(self, h_BTE: Array, *, overlapped: bool = False) -> Array:
        def down(gate_BTM: Array, up_BTM: Array) -> Array:
            hidden_BTM = layers.swiglu(gate_BTM, up_BTM, self.activation)
            if overlapped:
                return overlap.matmul_scattered(hidden_BTM, bare(self.down), "act_mlp")
            return self.down(hidden_BTM)

        if overlapped:
            h_BTE = layers.residual(h_BTE)
            both = overlap.gathered_matmul(h_BTE, [bare(self.gate), bare(self.up)], ("act_mlp", "act_mlp"))
        else:
            h_BTE = layers.block_input(h_BTE)
            both = [self.gate(h_BTE), self.up(h_BTE)]
        run = down
        if not step_selects_residuals():
            run = jax.checkpoint(down, prevent_cse=is_outside_loop(), policy=layers.MATMULS)
        return run(*(checkpoint_name(x_BTM, name) for x_BTM, name in zip(both, ("gate", "up"), strict=True)))


class Block(nnx.Module):
    """Transformer layer: attention, then a dense MLP or an MoE layer, each with norms and a residual connection."""

    def __init__(self, cfg: Architecture, *, has_experts: bool = False, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        has_input_norms, has_output_norms = cfg.norm_placement != "after", cfg.norm_placement != "before"
        self.attention_norm = nnx_norm(cfg, rngs) if has_input_norms else None
        self.attention_out_norm = nnx_norm(cfg, rngs) if has_output_norms else None
        self.attention = (Attention if cfg.latent is None else NNXLatentAttention)(cfg, rngs=rngs)
        self.mlp_norm = nnx_norm(cfg, rngs) if has_input_norms else None
        self.mlp_out_norm = nnx_norm(cfg, rngs) if has_output_norms else None
        if has_experts:
            assert cfg.moe is not None
            down = into_residual(cfg)
            self.mlp: Any = MoE(cfg.embed_dim, cfg.moe, param_dtype=cfg.param_dtype, down_init=down, rngs=rngs)
        else:
            self.mlp = MLP(cfg, rngs=rngs)

    def __call__(
        self, x_BTE: Array, angles: Rope, cache: LayerCache | None, length: Array | None
    ) -> tuple[Array, LayerCache | None, Aux | None]:
        """Return the residual stream after this layer, the updated cache, and the router statistics."""
        overlapped = overlap.overlaps(self.cfg, x_BTE, has_cache=cache is not None)
        with jax.named_scope("attention"):
            h_BTE = x_BTE if self.attention_norm is None else self.attention_norm(x_BTE)
            a_BTE, cache = self.attention(h_BTE, angles, cache, length, overlapped=overlapped)
            x_BTE = self._added(x_BTE, layers.block_output(a_BTE, "attention_out"), self.attention_out_norm)
        aux = None
        with jax.named_scope("mlp"):
            h_BTE = x_BTE if self.mlp_norm is None else self.mlp_norm(x_BTE)
            if isinstance(self.mlp, MoE):
                m_BTE, stats = self.mlp(layers.block_input(h_BTE), mask=angles.mask_BT, drops=cache is None)
                aux = stats.aux
            else:
                m_BTE = self.mlp(h_BTE, overlapped=overlapped)
            x_BTE = self._added(x_BTE, layers.block_output(m_BTE, "mlp_out"), self.mlp_out_norm)
        return layers.residual(x_BTE), cache, aux

    def _added(self, x_BTE: Array, y_BTE: Array, norm: Any) -> Array:
        """Return the sum of the residual stream and the normed, scaled output of a block."""
        y_BTE, scale = y_BTE if norm is None else norm(y_BTE), self.cfg.residual_scale
        return x_BTE + (y_BTE if scale == 1 else scale * y_BTE)


class Transformer(nnx.Module):
    """Decoder-only transformer.

    Args:
      cfg: sizes and options of the model.
      rngs: random keys for the initial parameters. Under `nnx.eval_shape` no arrays are allocated.
    """

    def __init__(self, cfg: Architecture, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        # meshpar's rules shard the parameters when they are initialized, so NNX must not shard them eagerly.
        with nnx.use_eager_sharding(False):
            self.embed = nnx.Embed(
                cfg.vocab_size,
                cfg.embed_dim,
                param_dtype=jnp.dtype(cfg.param_dtype),
                embedding_init=nnx.with_partitioning(embedding_init(), ("vocab", "embed")),
                rngs=rngs,
            )
            if cfg.num_dense_layers:
                # The dense layers have a different structure than the MoE layers, so they are a separate stack. It does
                # not have the name `layers`, so it is not distributed over pipeline stages: the first stage runs it.
                self.dense_layers = _stacked_blocks(cfg, cfg.num_dense_layers, False, "dense_layers", rngs)
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
        mask: Bool[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Return next-token logits for each position.

        Args:
          tokens: token ids.
          positions: positions of the tokens, for rotary embeddings. `None` means consecutive positions, which start
            at 0 or after the cached positions.
          segments: segment ids of packed sequences. Tokens attend only within their segment, and positions must
            restart in each segment. Padding has its own segment. Not supported with a cache.
          mask: False for padding, which MoE layers do not route or count. `None`: the mask of `moe.masking`, which
            `next_token_loss` sets. Without any mask, and with a cache, all tokens count.
          cache: keys and values of earlier positions, with free slots for the new ones. With `rope_long`, a sequence
            that grows beyond `original_seq_len` needs a new cache, as in `generate`.

        Returns:
          Logits `[B, T, V]`, sharded over the vocabulary if the strategy does so. With `vocab_chunk`, an `Unembedding`
          that computes them in chunks. With a cache, a tuple of the logits and the updated cache.
        """
        table_VE, last_BT = self.embed.embedding[...], None
        with jax.named_scope("embed"):
            if cache is None:
                if self.cfg.rope_long is not None and segments is not None:
                    last_BT = context.last_positions(positions, segments)
                tokens, positions, segments = context.prepare(tokens, positions, segments)
                if self.cfg.moe is not None:
                    mask = context.reordered(current_mask() if mask is None else mask)
            x_BTE = layers.embed(table_VE, tokens, is_tied=self.cfg.tied_embeddings)
            x_BTE = x_BTE if self.cfg.embed_scale == 1 else self.cfg.embed_scale * x_BTE
        angles = rope_of(self.cfg, tokens, positions, cache, x_BTE.dtype, segments, last_BT)
        angles = angles if self.cfg.moe is None or cache is not None else angles._replace(mask_BT=mask)
        x_BTE, cache = self._scanned(x_BTE, angles, cache)
        with jax.named_scope("head"):
            matrix, vocab_dim, cap = table_VE, 0, self.cfg.logits_cap
            if not self.cfg.tied_embeddings:
                (x_BTE, matrix), vocab_dim = layers.reduced_first(x_BTE, bare(self.head)), 1
            h_BTE = layers.block_input(self.final_norm(x_BTE))
            h_BTE = h_BTE if self.cfg.logits_divisor == 1 else h_BTE / self.cfg.logits_divisor
            h_BTE = context.natural_order(h_BTE) if cache is None else h_BTE
            if self.cfg.vocab_chunk is not None and cache is None:
                return Unembedding(h_BTE, matrix, vocab_dim, self.cfg.vocab_chunk, cap)
            logits_BTV = constrain(layers.logits(h_BTE, matrix, vocab_dim), "batch", "seq", "act_vocab")
            if cap is not None:
                logits_BTV, _ = capped(logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32)), cap)
        return logits_BTV if cache is None else (logits_BTV, cache)

    def _scanned(self, x_BTE: Array, angles: Rope, cache: KVCache | None) -> tuple[Array, KVCache | None]:
        """Run the layers under `scan`, so that trace and compile time do not grow with depth."""
        dense, of_dense, of_rest, kv_dense = self.cfg.num_dense_layers, None, None, None
        if cache is not None:
            of_dense, of_rest = ((cache[0][part], cache[1][part]) for part in (slice(dense), slice(dense, None)))
        if dense:
            x_BTE, kv_dense, _ = _run(self.dense_layers, slice(dense), x_BTE, angles, of_dense, cache)
        x_BTE, kv, aux = _run(self.layers, slice(dense, None), x_BTE, angles, of_rest, cache)
        if aux is not None and cache is None and is_listening():
            assert self.cfg.moe is not None
            report_layers(aux, self.cfg.moe)
            if self.cfg.moe.is_biased:
                self.layers.mlp.load[...] = self.layers.mlp.load[...] + aux.metrics["load"]
        if cache is None or kv is None:
            return x_BTE, None
        if kv_dense is not None:
            kv = (jnp.concatenate([kv_dense[0], kv[0]]), jnp.concatenate([kv_dense[1], kv[1]]))
        return x_BTE, KVCache(*kv, cache.length + angles.cos_BTF.shape[1])


def _run(
    stacked: Block, part: slice, x_BTE: Array, angles: Rope, caches: LayerCache | None, cache: KVCache | None
) -> tuple[Array, LayerCache | None, Aux | None]:
    """Run a part of the layers with `scan_layers`. Only the last part is distributed over pipeline stages."""
    graph, params, *variables = nnx.split(stacked, nnx.Param, ...)
    cfg, length = stacked.cfg, None if cache is None else cache.length
    kinds, path = None, "layers" if part.stop is None else "dense_layers"
    if len(cfg.kinds) > 1:
        kinds = jnp.asarray([cfg.kinds.index(kind) for kind in cfg.kind_of_layer[part]])

    def layer(x_BTE: Array, params: Any, extra: Any, *cache_and_angles: Any) -> Any:
        *layer_cache, angles = cache_and_angles
        variables, kind = extra
        block = nnx.merge(graph, params, *variables)
        angles = angles if kind is None else layers.of_kind(cfg, angles, kind)
        x_BTE, new_cache, aux = block(x_BTE, angles, layer_cache[0] if layer_cache else None, length)
        out = x_BTE if new_cache is None else (x_BTE, new_cache)
        return out if aux is None else (out, aux)

    extra, staged = (variables, kinds), part.stop is None
    out = scan_layers(
        layer, x_BTE, params,
        extra=extra, caches=caches, per_example=angles, path=path, staged=staged, unroll=cfg.unroll,
    )  # fmt: skip
    out, aux = with_aux(out)
    return (out, None, aux) if caches is None else (*out, aux)


def rope_of(
    cfg: Architecture,
    tokens_BT: Array,
    positions_BT: Array | None,
    cache: KVCache | None,
    dtype: jax.typing.DTypeLike,
    segments_BT: Array | None = None,
    last_BT: Array | None = None,
) -> Rope:
    """Return the rotary cosines and sines of the tokens, which all layers share.

    `last_BT` is the last position of the segment of each token, which selects the factors of LongRoPE. By default it is
    the last position of the row. If the layers have different angles, dim 2 contains the angles of each table of
    `layers.rope_tables`.
    """
    if segments_BT is not None and cache is not None:
        where, requested = "Transformer(segments=..., cache=...)", "continue packed sequences"
        fix = "use a separate batch row for each sequence"
        raise problem(where, requested, "a cache has a single sequence for each batch row", fix, code="conflict")
    is_one_chunk = cfg.chunk is None or (positions_BT is None and tokens_BT.shape[1] <= cfg.chunk)
    if positions_BT is None:
        first = 0 if cache is None else cache.length
        positions_BT = first + jnp.arange(tokens_BT.shape[1])[None]
    rotated, scaling = cfg.num_rotated, cfg.rope_scaling or cfg.rope_yarn

    def table(has_rope: bool, theta: float | None) -> Rope:
        if not has_rope:
            return layers.rope(positions_BT, np.zeros(rotated // 2), dtype)
        if theta is not None:
            return layers.rope(positions_BT, layers.rope_frequencies(rotated, theta), dtype)
        frequencies_F = layers.rope_frequencies(rotated, cfg.rope_theta, scaling) / cfg.rope_linear
        if (long := cfg.rope_long) is not None:
            longest_BT = positions_BT.max(axis=1, keepdims=True) if last_BT is None else last_BT
            is_long_BT1 = longest_BT[..., None] >= long.original_seq_len
            factors_BTF = jnp.where(is_long_BT1, np.asarray(long.long_factor), np.asarray(long.short_factor))
            frequencies_F = frequencies_F / factors_BTF
        angles, stretched = layers.rope(positions_BT, frequencies_F, dtype), cfg.rope_yarn or long
        if stretched is not None and stretched.rotated_factor != 1:
            angles = Rope(*(x * stretched.rotated_factor for x in angles[:2]))
        return angles

    angles, *others = (table(*key) for key in layers.rope_tables(cfg))
    if others:
        cos, sin = (jnp.stack(arrays, 2) for arrays in zip(*(each[:2] for each in (angles, *others)), strict=True))
        angles = Rope(cos, sin)
    scale_BT = chunk_BT = None
    if cfg.query_scaling is not None:
        steps_BT = jnp.floor_divide(positions_BT + 1, cfg.query_scaling.interval).astype(angles.cos_BTF.dtype)
        scale_BT = 1 + cfg.query_scaling.factor * jnp.log1p(steps_BT)
    if cfg.chunk is not None and not is_one_chunk:
        chunk_BT = positions_BT // cfg.chunk
    return angles._replace(segments_BT=segments_BT, query_scale_BT=scale_BT, chunk_BT=chunk_BT)


def embedding_init() -> Initializer:
    """Return an initializer with rows of unit norm, so that tied logits start with variance 1."""
    return nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


def _stacked_blocks(cfg: Architecture, num_layers: int, has_experts: bool, name: str, rngs: nnx.Rngs) -> Block:
    """Return a block whose parameters have a leading layer dim with this logical name."""
    stacked = nnx.vmap(
        lambda rngs: Block(cfg, has_experts=has_experts, rngs=rngs), transform_metadata={nnx.PARTITION_NAME: name}
    )
    return nnx.split_rngs(splits=num_layers)(stacked)(rngs)
