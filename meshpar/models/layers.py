"""Pure functions of a decoder: sharded embedding lookup, rotary embeddings, attention and SwiGLU.

Shape suffixes: B batch, T query positions, S key positions, H query heads, K key/value heads, G = H/K query heads per
key/value head, D head dimension, F = D/2, W dimension of a value head (D by default), E embedding dimension, M hidden
dimension of the MLP, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from meshpar.collectives import blockwise_attention, cudnn, flash
from meshpar.collectives.attention import WindowChoice, capped
from meshpar.layers.precision import dot_general
from meshpar.layers.remat import ATTENTION
from meshpar.models import context_attention as context
from meshpar.models.architecture import Activation, Architecture, Attention, LayerKind, RopeScaling, YarnScaling
from meshpar.models.embedding_lookup import GATHERED, exchanged_rows, lookup_of
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import ambient, constrain, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes
from meshpar.sharding.types import axes_of_spec, problem, spec_axes

# ---- The layout of activations ---------------------------------------------------------------------------------------


def residual(x_BTE: Array) -> Array:
    """Constrain the residual stream, or an update of it, to its sharding.

    After a row-parallel matmul, this constraint reduces the partial sums: with an all-reduce, or with a reduce-scatter
    under sequence parallelism.
    """
    return constrain(x_BTE, "batch", "norm_seq", "act_embed")


def block_output(y_BTE: Array, name: str) -> Array:
    """Constrain the output of a block to the sharding of the residual stream, and name it for remat policies."""
    return checkpoint_name(residual(y_BTE), name)


def block_input(h_BTE: Array) -> Array:
    """Constrain the output of a norm to the input sharding of column-parallel matmuls.

    Under sequence parallelism this constraint is the all-gather, which must follow the norm. In the backward pass it is
    the reduce-scatter of the input gradients.
    """
    return constrain(residual(h_BTE), "batch", "seq", "act_embed")


# ---- Embedding -------------------------------------------------------------------------------------------------------


def embed(table_VE: Array, tokens_BT: Array, *, is_tied: bool = False) -> Array:
    """Look up token embeddings, sharded as the residual stream.

    There are two algorithms:

    * If the width of the table is sharded over batch axes and a device has fewer tokens than table rows, devices
      exchange the embeddings of their tokens (`meshpar.models.embedding_lookup`).
    * Otherwise, and for tied tables, which the output layer gathers anyway, the width of the table is all-gathered.
      Each device looks up the tokens in its vocabulary shard, and an all-reduce combines the results.

    With an unconstrained `take`, XLA would emit permutes and all-to-alls of indices and embeddings. A one-hot matmul
    would cost as many FLOPs as the output layer.
    """
    context.check_lookup(table_VE, tokens_BT)
    lookup = None if is_tied else lookup_of(table_VE, tokens_BT)
    if lookup is not None:
        # Local row indices of tokens in other vocabulary shards can be negative.
        signed = jax.dtypes.canonicalize_dtype(jnp.promote_types(tokens_BT.dtype, jnp.int32))
        return residual(exchanged_rows(lookup, table_VE, tokens_BT.astype(signed)))
    with jax.named_scope(GATHERED):
        x_BTE = _take(table_VE.shape[0], table_VE, tokens_BT)
    # Without this constraint XLA would gather the full table if `norm_seq` and `vocab` are sharded over the same axis.
    return residual(constrain(x_BTE, "batch", "seq", "act_embed"))


@jax.custom_vjp
def gathered_table(table_VE: Array) -> Array:
    """Return the embedding table sharded over the vocabulary only, as lookups and logits need it.

    The gradient is not constrained, so that its reduction can be a reduce-scatter to the sharding of the parameter.
    """
    return constrain(table_VE, "act_vocab", "act_embed")


gathered_table.defvjp(lambda table_VE: (gathered_table(table_VE), None), lambda _, d_table_VE: (d_table_VE,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(vocab_size: int, table_VE: Array, tokens_BT: Array) -> Array:
    return jnp.take(gathered_table(table_VE), tokens_BT, axis=0)


def _take_backward(vocab_size: int, tokens_BT: Array, g_BTE: Array) -> tuple[Array, None]:
    # A frequent token accumulates thousands of gradients, so they are summed in float32 or higher precision, over
    # tokens and devices. With the constraint before the cast, the reduction can be a reduce-scatter.
    dtype = jnp.promote_types(g_BTE.dtype, jnp.float32)
    d_table_VE = jnp.zeros((vocab_size, g_BTE.shape[-1]), dtype).at[tokens_BT].add(g_BTE.astype(dtype))
    return gathered_table(d_table_VE).astype(g_BTE.dtype), None


_take.defvjp(lambda size, table_VE, tokens_BT: (_take(size, table_VE, tokens_BT), tokens_BT), _take_backward)


# ---- Head ------------------------------------------------------------------------------------------------------------


def reduced_first(x_BTE: Array, kernel_EV: Array) -> tuple[Array, Array]:
    """Return both arguments unchanged, but reduce the kernel gradient before the backward pass of the layers.

    This gradient is the largest message of a step. By default XLA reduces it after the loop over layers, with no
    computation to overlap. Here the reduction overlaps with the matmul of the other gradient, and the unreduced
    gradient is freed before the loop.
    """
    current = ambient()
    if current is None or outer_axes():
        return x_BTE, kernel_EV
    spec = param_spec(kernel_EV, "embed", "vocab")
    if not set(axes_of_spec(spec)) & set(spec_axes(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[0])):
        return x_BTE, kernel_EV
    return _reduced_first(NamedSharding(current.mesh, spec), x_BTE, kernel_EV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced_first(shards: NamedSharding, x_BTE: Array, kernel_EV: Array) -> tuple[Array, Array]:
    return x_BTE, kernel_EV


_reduced_first.defvjp(
    lambda _, *arrays: (arrays, None),
    lambda shards, _, grads: jax.lax.optimization_barrier((grads[0], with_layout(grads[1], shards))),
)


def logits(h_BTE: Array, matrix: Array, vocab_dim: int) -> Array:
    """Return logits computed with the kernel of the output layer, or with the embedding table if `vocab_dim` is 0.

    The table is all-gathered over its width, as in `embed`. A kernel promotes the dtype as in Flax's layers.
    """
    if vocab_dim == 0:
        matrix, dtype = gathered_table(matrix), h_BTE.dtype
    else:
        dtype = jnp.promote_types(h_BTE.dtype, matrix.dtype)
    dims = (((2,), (1 - vocab_dim,)), ((), ()))
    return dot_general(h_BTE.astype(dtype), matrix.astype(dtype), dims, narrow=False)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles for each position and pair of dimensions."""

    cos_BTF: Float[Array, "B T F"]
    sin_BTF: Float[Array, "B T F"]
    segments_BT: Int[Array, "B T"] | None = None
    """Segment ids of packed sequences. Positions attend only within their segment. `None` means no packing."""
    kind: Int[Array, ""] | None = None
    """Index of the layer's kind in `TransformerConfig.kinds`, if there are several."""
    query_scale_BT: Float[Array, "B T"] | None = None
    """Factor of the queries in layers without rotary embeddings."""
    chunk_BT: Int[Array, "B T"] | None = None
    """Index of the chunk of each position, for layers with chunks. `None` if there is a single chunk."""
    mask_BT: Bool[Array, "B T"] | None = None
    """False for padding, which MoE layers do not route. `None`: all tokens count."""


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None = None) -> np.ndarray:
    """Return the rotary frequency of each pair of dimensions, in radians per position: `theta ** (-2 i / head_dim)`.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    frequencies_F = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies_F
    if isinstance(scaling, YarnScaling):
        # The ramp starts at the pair with `beta_fast` rotations and ends at the pair with `beta_slow`. As in the
        # official code, it is clipped at twice the number of pairs.
        pairs, turns = len(frequencies_F), (scaling.beta_fast, scaling.beta_slow)
        at = [pairs * np.log(scaling.original_seq_len / (beta * 2 * np.pi)) / np.log(theta) for beta in turns]
        at = [np.floor(at[0]), np.ceil(at[1])] if scaling.truncate else at
        low, high = max(at[0], 0), min(at[1], 2 * pairs - 1)
        stretched_F = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
        return frequencies_F * (1 - stretched_F) + frequencies_F / scaling.factor * stretched_F
    wavelengths_F, low, high = 2 * np.pi / frequencies_F, scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 has equal factors, and therefore no transition.
    kept_F = np.clip((scaling.original_seq_len / wavelengths_F - low) / (high - low or 1e-9), 0, 1)
    return kept_F * frequencies_F + (1 - kept_F) * frequencies_F / scaling.factor


def rope(positions_BT: Array, frequencies_F: np.ndarray, dtype: jax.typing.DTypeLike) -> Rope:
    """Return the rotary cosines and sines of positions, in float32 or higher precision."""
    angles_BTF = positions_BT[..., None] * jnp.asarray(frequencies_F, jnp.promote_types(dtype, jnp.float32))
    return Rope(jnp.cos(angles_BTF), jnp.sin(angles_BTF))


def of_kind(cfg: Architecture, angles_BTRF: Rope, kind: Array) -> Rope:
    """Select the angles of a layer of this kind. Dim R of the angles is the index in `rope_tables`."""
    tables = rope_tables(cfg)
    if len(tables) == 1:
        return angles_BTRF._replace(kind=kind)
    index = jnp.asarray([tables.index((each.has_rope, each.rope_theta)) for each in cfg.kinds])[kind]
    cos_BTF, sin_BTF = (jax.lax.dynamic_index_in_dim(x, index, 2, keepdims=False) for x in angles_BTRF[:2])
    return angles_BTRF._replace(cos_BTF=cos_BTF, sin_BTF=sin_BTF, kind=kind)


def rope_tables(cfg: Architecture) -> list[tuple[bool, float | None]]:
    """Return the distinct values of (has_rope, rope_theta) among the kinds of layers."""
    return list(dict.fromkeys((kind.has_rope, kind.rope_theta) for kind in cfg.kinds))


def rotate(x_BTHD: Array, angles: Rope) -> Array:
    """Rotate the pairs of dimensions (i, i + F) of each head by the angles of its position.

    If D > 2 F, the dimensions after the first 2 F are unchanged.
    """
    num_rotated = 2 * angles.cos_BTF.shape[-1]
    if num_rotated < x_BTHD.shape[-1]:
        turned_BTHD = rotate(x_BTHD[..., :num_rotated], angles)
        return jnp.concatenate([turned_BTHD, x_BTHD[..., num_rotated:]], axis=-1)
    cos_BT1F, sin_BT1F = angles.cos_BTF[:, :, None], angles.sin_BTF[:, :, None]
    a_BTHF, b_BTHF = jnp.split(x_BTHD.astype(cos_BT1F.dtype), 2, axis=-1)
    turned = (a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHD.dtype)


# ---- Attention -------------------------------------------------------------------------------------------------------


def causal_attention(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKW: Array,
    segments_BT: Array | None = None,
    *,
    implementation: Attention = "xla",
    scale: float | None = None,
    window: int | WindowChoice | None = None,
    cap: float | None = None,
    sinks_H: Array | None = None,
) -> Array:
    """Compute causal softmax attention.

    Args:
      q_BTHD: queries. H is a multiple of K, and query heads `[i G, (i+1) G)` share key/value head i (Ainslie et al.
        2023, "GQA").
      k_BTKD: keys.
      v_BTKW: values.
      segments_BT: segment ids of packed sequences. Positions attend only within their segment. For "cudnn" they become
        a mask of `2 T²` bytes per example, and T must be even.
      implementation: "xla", "blockwise", "cudnn" or "tokamax". The last two raise an error if the library is missing or
        does not support these shapes and dtypes. All but "xla" need equal dimensions of keys and values, so the smaller
        is padded.
      scale: factor of the scores, by default `D ** -0.5`.
      window: a position attends to itself and the `window - 1` positions before it.
      cap: scores s become `cap tanh(s / cap)`.
      sinks_H: as in `blockwise_attention`. Not supported by "cudnn" and "tokamax".

    Raises:
      ValueError: the implementation does not support an option.
    """
    if implementation == "xla":
        limits: dict[str, Any] = {"scale": scale, "window": window, "cap": cap, "sinks_H": sinks_H}
        return cached_attention(q_BTHD, k_BTKD, v_BTKW, segments_BT, first_position=0, **limits)
    if implementation == "blockwise":
        options: dict[str, Any] = {"window": window, "cap": cap, "segments": segments_BT, "sinks": sinks_H}
        blockwise: Callable[..., Array] = functools.partial(blockwise_attention, **options)
        return _in_one_width(blockwise, q_BTHD, k_BTKD, v_BTKW, scale)
    kernel: Callable[..., Array] = functools.partial(_by_cudnn, segments_BT=segments_BT)
    if implementation == "tokamax":
        kernel = functools.partial(flash.flash_attention, segments_BT=segments_BT, cap=cap)
    else:
        _refuse("cuDNN's attention does", cap=cap, sinks=sinks_H)

    def with_window(size: int | None) -> Callable[..., Array]:
        return functools.partial(_in_one_width, functools.partial(kernel, window=size), scale=scale)

    if not isinstance(window, WindowChoice):
        return with_window(window)(q_BTHD, k_BTKD, v_BTKW)
    # The kernels need a static window, so the gradient of this choice saves the arrays of all branches.
    return window.select([with_window(size) for size in window.sizes], q_BTHD, k_BTKD, v_BTKW)


def _refuse(subject: str, **options: object) -> None:
    """Raise an error if any of these options, which cuDNN does not support, is set."""
    names = {"segments": "packed sequences", "cap": "attention_cap", "window": "attention_window"}
    names["sinks"] = "attention_sinks"
    requested = [names[name] for name, value in options.items() if value is not None]
    if requested:
        where, reason = 'TransformerConfig(attention="cudnn")', f"{subject} not support this"
        fix = 'use attention="blockwise"'
        raise problem(where, f"use {' and '.join(requested)}", reason, fix, code="unsupported-feature")


def cached_attention(
    q_BTHD: Array,
    k_BSKD: Array,
    v_BSKW: Array,
    segments_BT: Array | None = None,
    *,
    first_position: Array | int,
    scale: float | None = None,
    window: int | WindowChoice | None = None,
    cap: float | None = None,
    sinks_H: Array | None = None,
    chunk: int | Array | None = None,
) -> Array:
    """Compute causal attention of T queries at consecutive positions over the keys at positions 0 to S - 1.

    Scores and softmax are computed in float32, or in float64 for float64 inputs (`jax.nn.dot_product_attention` always
    computes the softmax in float32).
    """
    batch, num_queries, num_heads, head_dim = q_BTHD.shape
    num_keys, num_kv_heads = k_BSKD.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    q_BTKGD = q_BTHD.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    dtype = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    scores_BKGTS = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=dtype) * scale
    scores_BKGTS, _ = capped(scores_BKGTS, cap)
    ahead_TS = first_position + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    width: Array | int | None = window if not isinstance(window, WindowChoice) else _selected_width(window)
    seen_TS = ahead_TS >= 0 if width is None else (ahead_TS >= 0) & (ahead_TS < width)
    if chunk is not None:
        queries_T1 = first_position + jnp.arange(num_queries)[:, None]
        seen_TS &= queries_T1 // chunk == jnp.arange(num_keys) // chunk
    if segments_BT is not None:
        seen_TS = seen_TS & (segments_BT[:, None, None, :, None] == segments_BT[:, None, None, None])
    scores_BKGTS = jnp.where(seen_TS, scores_BKGTS, jnp.finfo(dtype).min)
    if sinks_H is None:
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    else:
        sinks_KG11 = sinks_H.astype(dtype).reshape(num_kv_heads, -1, 1, 1)
        max_BKGT1 = jax.lax.stop_gradient(jnp.maximum(scores_BKGTS.max(-1, keepdims=True), sinks_KG11))
        powers_BKGTS = jnp.exp(scores_BKGTS - max_BKGT1)
        weights_BKGTS = powers_BKGTS / (powers_BKGTS.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - max_BKGT1))
    weights_BKGTS = weights_BKGTS.astype(v_BSKW.dtype)
    o_BTKGW = jnp.einsum("BKGTS,BSKW->BTKGW", weights_BKGTS, v_BSKW)
    return o_BTKGW.reshape(batch, num_queries, num_heads, v_BSKW.shape[-1])


def _selected_width(window: WindowChoice) -> Array:
    return jnp.asarray([_NO_LIMIT if size is None else size for size in window.sizes])[window.index]


_NO_LIMIT = np.iinfo(np.int32).max


def by_kind(cfg: Architecture, kind: Array | None, value_of: Callable[[LayerKind], Any]) -> Any:
    """Return a value of the layer's kind: static if all kinds have it, otherwise an array."""
    values = [value_of(each) for each in cfg.kinds]
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[kind]


def limits_of(cfg: Architecture, kind: Array | None) -> dict[str, Any]:
    """Return the keyword arguments `scale`, `window` and `cap` of attention in a layer of this kind."""
    windows = tuple(dict.fromkeys(each.window for each in cfg.kinds))
    limits = {"scale": cfg.attention_scale, "window": windows[0], "cap": cfg.attention_cap}
    if len(windows) == 1:
        return limits
    assert kind is not None
    index = jnp.asarray([windows.index(each.window) for each in cfg.kinds])[kind]
    of_layers = [each.window for each in cfg.kind_of_layer]
    return limits | {"window": WindowChoice(windows, tuple(map(of_layers.count, windows)), index)}


def _by_cudnn(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    *,
    segments_BT: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Array:
    near = None if window is None else (window - 1, 0)
    # `jax.nn.dot_product_attention` has no segment ids.
    mask = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None]
    options: dict[str, Any] = {"scale": scale, "is_causal": True, "local_window_size": near, "mask": mask}
    with cudnn.cudnn_errors(q_BTHD, k_BTKD, v_BTKD):
        return jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, **options, implementation="cudnn")


def _in_one_width(
    attention: Callable[..., Array], q_BTHD: Array, k_BTKD: Array, v_BTKW: Array, scale: float | None
) -> Array:
    """Run an attention kernel that needs equal dimensions of keys and values, with zero padding of the smaller."""
    head_dim, v_dim = k_BTKD.shape[-1], v_BTKW.shape[-1]
    if head_dim == v_dim:
        return attention(q_BTHD, k_BTKD, v_BTKW, scale=scale)

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, max(head_dim, v_dim) - x.shape[-1])])

    scale = head_dim**-0.5 if scale is None else scale
    o_BTHD = attention(padded(q_BTHD), padded(k_BTKD), padded(v_BTKW), scale=scale)
    return o_BTHD[..., :v_dim]


class KVCache(NamedTuple):
    """Keys and values of earlier positions for all layers (leading dim L).

    With latent attention K is 1: the cache contains the rotary keys, which all heads share, and the latents.
    """

    k_LBSKD: Float[Array, "L B S K D"]
    v_LBSKW: Float[Array, "L B S K W"]
    length: Int[Array, ""]
    """The number of valid positions."""


LayerCache = tuple[Float[Array, "B S K D"], Float[Array, "B S K W"]]
"""Cached keys and values of a layer."""


def extend(
    cache: LayerCache, length: Array, k_BTKD: Array, v_BTKW: Array, *, heads: str | None = "act_kv_heads"
) -> LayerCache:
    """Append the keys and values of T new positions to a cache."""
    k_BSKD, v_BSKW = (
        jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), length, axis=1)
        for old, new in zip(cache, (k_BTKD, v_BTKW), strict=True)
    )
    return heads_layout(k_BSKD, heads), heads_layout(v_BSKW, heads)


def heads_layout(x_BTHD: Array, heads: str | None, seq: str = "seq") -> Array:
    """Constrain the sharding of queries, keys, values or the attention output."""
    return constrain(x_BTHD, "batch", seq, heads, "act_head_dim")


def attend(
    cfg: Architecture,
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    angles: Rope,
    *,
    cache: LayerCache | None = None,
    length: Array | None = None,
    sinks_H: Array | None = None,
) -> tuple[Array, LayerCache | None]:
    """Apply rotary embeddings, update the cache, and compute causal attention. Return the output and the cache.

    Under context parallelism, full sequences are in the order of `meshpar.models.context_attention`, and keys and
    values circulate in a ring. With a cache the sequence is in natural order, and the implementation is always "xla".
    """
    q_BTHD, k_BTKD = (
        rotate(heads_layout(x, heads), angles) for x, heads in ((q_BTHD, "act_heads"), (k_BTKD, "act_kv_heads"))
    )
    if cfg.qk_l2_norm or angles.query_scale_BT is not None:
        q_BTHD, k_BTKD = _scaled(cfg, q_BTHD, k_BTKD, angles)
    q_BTHD, k_BTKD = checkpoint_name(q_BTHD, "query"), checkpoint_name(k_BTKD, "key")
    v_BTKD = checkpoint_name(heads_layout(v_BTKD, "act_kv_heads"), "value")
    if cache is None:
        o_BTHD = full_attention(cfg, q_BTHD, k_BTKD, v_BTKD, angles, sinks_H)
    else:
        assert length is not None
        cache = extend(cache, length, k_BTKD, v_BTKD)
        chunk = None if cfg.chunk is None else by_kind(cfg, angles.kind, lambda kind: kind.chunk or _NO_LIMIT)
        limits = limits_of(cfg, angles.kind) | {"sinks_H": sinks_H, "chunk": chunk}
        o_BTHD = cached_attention(q_BTHD, *cache, first_position=length, **limits)
    return heads_layout(o_BTHD, "act_heads"), cache


def _scaled(cfg: Architecture, q_BTHD: Array, k_BTKD: Array, angles: Rope) -> tuple[Array, Array]:
    """Normalize queries and keys in layers with rotary embeddings, and scale queries in the other layers."""
    has_rope = by_kind(cfg, angles.kind, lambda kind: kind.has_rope)

    def normalized(x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + cfg.norm_eps)
        return (wide * jnp.where(has_rope, inverse, 1)).astype(x.dtype)

    if cfg.qk_l2_norm:
        q_BTHD, k_BTKD = normalized(q_BTHD), normalized(k_BTKD)
    if angles.query_scale_BT is not None:
        scale_BT = jnp.where(has_rope, 1, angles.query_scale_BT)
        q_BTHD = (q_BTHD * scale_BT[:, :, None, None]).astype(q_BTHD.dtype)
    return q_BTHD, k_BTKD


def _segments_of(cfg: Architecture, angles: Rope, shape_BT: tuple[int, ...]) -> Array | None:
    """Return the segments within which positions attend. In layers with chunks, each chunk is a segment."""
    segments_BT, chunk_BT = angles.segments_BT, angles.chunk_BT
    if chunk_BT is None:
        return segments_BT
    chunk_BT = jnp.where(by_kind(cfg, angles.kind, lambda kind: kind.chunk is not None), chunk_BT, 0)
    if segments_BT is None:
        return jnp.broadcast_to(chunk_BT, shape_BT)
    # Products may overflow: two segments of an example then coincide only if their difference is a multiple of 65536.
    return segments_BT * 65_536 + chunk_BT.astype(segments_BT.dtype)


def full_attention(
    cfg: Architecture, q_BTHD: Array, k_BTKD: Array, v_BTKW: Array, angles: Rope, sinks_H: Array | None = None
) -> Array:
    """Compute causal attention over a full sequence, with the parallelism of the current rules.

    If the rules shard `attn_seq`, this is ring attention on a sequence in zigzag order. "xla" and "blockwise" then both
    use plain matmuls for each tile, and "cudnn" uses cuDNN's kernel. If the rules shard the sequence only outside
    attention, the heads are scattered and the sequence is gathered before attention, and the reverse after it.
    """
    implementation, limits = cfg.attention, limits_of(cfg, angles.kind)
    segments_BT = _segments_of(cfg, angles, q_BTHD.shape[:2])
    if not context.sequence_axes(q_BTHD):
        k_BTKD, v_BTKW, kv_heads = context.shared_heads(q_BTHD, k_BTKD, v_BTKW)
        # Reshard from the layout outside attention to the layout inside. Both constraints are needed: XLA would
        # otherwise reshard in the middle of the rotation or repetition of heads.
        q_BTHD, k_BTKD, v_BTKW = (
            heads_layout(heads_layout(x, f"act_{heads}"), f"attn_{heads}", "attn_seq")
            for x, heads in ((q_BTHD, "heads"), (k_BTKD, kv_heads), (v_BTKW, kv_heads))
        )
        # A nested `shard_map` cannot close over traced arrays, so `WindowChoice` are an argument.
        window = limits.pop("window")
        extra = (segments_BT, window if isinstance(window, WindowChoice) else None, sinks_H)

        def attention(
            q: Array, k: Array, v: Array, segments: Array | None, windows: WindowChoice | None, sinks: Any
        ) -> Array:
            options = {"implementation": implementation, "window": windows or window, "sinks_H": sinks, **limits}
            return causal_attention(q, k, v, segments, **options)

        run: Callable[..., Array] = attention
        if implementation != "xla":
            varies = implementation != "tokamax"  # its kernels do not support JAX's check of varying mesh axes
            run = context.by_device(attention, q_BTHD, k_BTKD, kv_heads=f"attn_{kv_heads}", check_vma=varies)
        o_BTHW = run(q_BTHD, k_BTKD, v_BTKW, *extra)
        # The kernels name their outputs and residuals themselves. A second name would save the output twice.
        o_BTHW = checkpoint_name(o_BTHW, ATTENTION) if implementation == "xla" else o_BTHW
        return heads_layout(o_BTHW, "attn_heads", "attn_seq")
    if implementation == "tokamax":
        reason = "tokamax does not return the log-sum-exp of the scores"
        where, fix = 'TransformerConfig(attention="tokamax")', 'use "cudnn", or "blockwise" for windows and segments'
        raise problem(where, "use ring attention", reason, fix, code="unsupported-feature")
    if implementation == "cudnn":
        _refuse("ring attention with cuDNN does", segments=segments_BT, window=limits["window"], cap=limits["cap"])
    kernel, scale = cudnn.TILES if implementation == "cudnn" else None, limits.pop("scale")
    ring = functools.partial(context.ring, segments_BT=segments_BT, sinks_H=sinks_H, kernel=kernel, **limits)
    return _in_one_width(ring, q_BTHD, k_BTKD, v_BTKW, scale)


# ---- MLP -------------------------------------------------------------------------------------------------------------


MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""Remat policy for `swiglu` and the next matmul. It saves only the input times `a` of a LoRA pair `a b`, if any."""


def swiglu(gate_BTM: Array, up_BTM: Array, activation: Activation = "silu") -> Array:
    """Return `activation(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer").

    Call this function and the next matmul under `jax.checkpoint`, which saves only the two inputs. Without it, six
    arrays of this size are saved for the backward pass.
    """
    activate = jax.nn.silu if activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)
    return constrain(activate(gate_BTM) * up_BTM, "batch", "seq", "act_mlp")
