"""What Flax lacks for a decoder, as pure functions: rotary embeddings, causal attention, SwiGLU, a sharded lookup.

Shape suffixes: B batch, T query positions, S key positions, H query heads, K key/value heads, G = H/K query heads for
each of them, D head width, F = D/2, W width of a head's value (D unless said otherwise), E embedding width, M hidden
width of the MLP, V vocabulary.
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
from jaxtyping import Array, Float, Int, Integer

from meshpar.collectives import blockwise_attention, cudnn, flash
from meshpar.collectives.attention import capped
from meshpar.layers.precision import dot_general
from meshpar.layers.remat import ATTENTION
from meshpar.models import context_attention as context
from meshpar.models.config import Attention, RopeScaling, YarnScaling
from meshpar.models.embedding_lookup import GATHERED, exchanged_rows, lookup_of
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import ambient, constrain, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes
from meshpar.sharding.types import axes_of_spec, problem, spec_axes

# ---- The layout of activations ---------------------------------------------------------------------------------------


def residual(x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Lay x out as the residual stream lies between blocks.

    On what a row-parallel matmul has just made, this is where the partial sums are reduced: an all-reduce, or with the
    sequence split between blocks a reduce-scatter.
    """
    return constrain(x_BTE, "batch", "norm_seq", "act_embed")


def added(y_BTE: Float[Array, "B T E"], name: str) -> Float[Array, "B T E"]:
    """What a block adds to the residual stream, in its layout, marked for remat policies."""
    return checkpoint_name(residual(y_BTE), name)


def block_input(h_BTE: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Lay a norm's output out as a block's column-parallel matmuls take it.

    With the sequence split between blocks this is the all-gather, here and not before the norm. Its transpose
    is the reduction of those matmuls' gradients.
    """
    return constrain(residual(h_BTE), "batch", "seq", "act_embed")


# ---- Embedding -------------------------------------------------------------------------------------------------------


def embed(
    table_VE: Float[Array, "V E"], tokens_BT: Integer[Array, "B T"], *, is_tied: bool = False
) -> Float[Array, "B T E"]:
    """Rows of the table, in the layout of the residual stream.

    Where a device has fewer tokens than rows of a table whose width is split over axes of the batch, the rows travel
    (`meshpar.models.embedding_lookup`), unless the table `is_tied`: then logits gather it anyway. Else it is gathered
    over the axes that split its width and stays split over the vocabulary: every device looks up the rows it has and an
    all-reduce fills in the rest. A bare `take` leaves XLA to move indices and rows about with permutes and all-to-alls,
    and a one-hot matmul costs as many FLOPs as the output layer. The constraint before `residual`'s is there because a
    lookup whose positions are split over the same axis as the vocabulary would gather the whole table.
    """
    context.check_lookup(table_VE, tokens_BT)
    how = None if is_tied else lookup_of(table_VE, tokens_BT)
    if how is not None:
        signed = jax.dtypes.canonicalize_dtype(jnp.promote_types(tokens_BT.dtype, jnp.int32))  # numbers of rows below 0
        return residual(exchanged_rows(how, table_VE, tokens_BT.astype(signed)))
    with jax.named_scope(GATHERED):
        x_BTE = _take(table_VE.shape[0], table_VE, tokens_BT)
    return residual(constrain(x_BTE, "batch", "seq", "act_embed"))


@jax.custom_vjp
def gathered_table(table_VE: Float[Array, "V E"]) -> Float[Array, "V E"]:
    """The table as lookups and logits take it: split over the vocabulary only.

    Its gradient is not held to that layout, so that its reduction can scatter straight into shards.
    """
    return constrain(table_VE, "act_vocab", "act_embed")


gathered_table.defvjp(lambda table_VE: (gathered_table(table_VE), None), lambda _, d_table_VE: (d_table_VE,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(vocab_size: int, table_VE: Array, tokens_BT: Array) -> Array:
    return jnp.take(gathered_table(table_VE), tokens_BT, axis=0)


def _take_forward(vocab_size: int, table_VE: Array, tokens_BT: Array) -> tuple[Array, Array]:
    return _take(vocab_size, table_VE, tokens_BT), tokens_BT


def _take_backward(vocab_size: int, tokens_BT: Array, g_BTE: Array) -> tuple[Array, None]:
    # A frequent token adds thousands of rows into one, so the sum is kept in float32 at the least, over tokens and then
    # over devices. The constraint stands before the cast, which lets the reduction scatter straight into shards.
    wide = _at_least_float32(g_BTE.dtype)
    d_table_VE = jnp.zeros((vocab_size, g_BTE.shape[-1]), wide).at[tokens_BT].add(g_BTE.astype(wide))
    return gathered_table(d_table_VE).astype(g_BTE.dtype), None


_take.defvjp(_take_forward, _take_backward)


# ---- Head ------------------------------------------------------------------------------------------------------------


def reduced_first(
    x_BTE: Float[Array, "B T E"], kernel_EV: Float[Array, "E V"]
) -> tuple[Float[Array, "B T E"], Float[Array, "E V"]]:
    """The last layer's output and the head's matrix, whose gradient is reduced before the layers' backward pass begins.

    It is the largest message of a step. Left to itself XLA sends it when the loop over layers is through, with nothing
    to hide it behind; here it has the matmul that makes the other gradient, and the whole gradient is held no longer.
    """
    here = ambient()
    if here is None or outer_axes():
        return x_BTE, kernel_EV
    spec = param_spec(kernel_EV, "embed", "vocab")
    if not set(axes_of_spec(spec)) & set(spec_axes(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[0])):
        return x_BTE, kernel_EV
    return _reduced_first(NamedSharding(here.mesh, spec), x_BTE, kernel_EV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced_first(shards: NamedSharding, x_BTE: Array, kernel_EV: Array) -> tuple[Array, Array]:
    return x_BTE, kernel_EV


def _barrier(shards: NamedSharding, _: None, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    d_x_BTE, d_kernel_EV = gradients
    return jax.lax.optimization_barrier((d_x_BTE, with_layout(d_kernel_EV, shards)))


_reduced_first.defvjp(lambda _, *given: (given, None), _barrier)


def logits(h_BTE: Float[Array, "B T E"], kernel_EV: Float[Array, "E V"]) -> Float[Array, "B T V"]:
    """Of hidden states, by the head's matrix; in the wider of their dtypes, as Flax's layers."""
    dtype = jnp.promote_types(h_BTE.dtype, kernel_EV.dtype)
    return dot_general(h_BTE.astype(dtype), kernel_EV.astype(dtype), (((2,), (0,)), ((), ())), narrow=False)


def _at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------


class Rope(NamedTuple):
    """Cosines and sines of the angles by which positions turn the pairs of a head."""

    cos_BTF: Float[Array, "B T F"]
    sin_BTF: Float[Array, "B T F"]
    segments_BT: Int[Array, "B T"] | None = None
    """The sequence, of several in one row, that each position belongs to, which sees no other; None: one a row."""


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None = None
) -> Float[np.ndarray, " F"]:
    """Angle per token of each pair of a head, in radians: `theta ** (-2 i / head_dim)`, stretched as `scaling` says.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    frequencies_F = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies_F
    if isinstance(scaling, YarnScaling):
        return _by_yarn(frequencies_F, theta, scaling)
    wavelengths_F = 2 * np.pi / frequencies_F
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = np.clip((scaling.original_seq_len / wavelengths_F - low) / (high - low), 0, 1)
    return kept_F * frequencies_F + (1 - kept_F) * frequencies_F / scaling.factor


def _by_yarn(frequencies_F: Float[np.ndarray, " F"], theta: float, scaling: YarnScaling) -> Float[np.ndarray, " F"]:
    """Stretched by a ramp over the pairs, from the one that turns `beta_fast` times to the one of `beta_slow` times."""
    pairs, turns = len(frequencies_F), (scaling.beta_fast, scaling.beta_slow)
    at = [pairs * np.log(scaling.original_seq_len / (beta * 2 * np.pi)) / np.log(theta) for beta in turns]
    # Both ends as in the paper's own code, which cuts at twice the pairs.
    low, high = max(np.floor(at[0]), 0), min(np.ceil(at[1]), 2 * pairs - 1)
    stretched_F = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    return frequencies_F * (1 - stretched_F) + frequencies_F / scaling.factor * stretched_F


def rope(positions_BT: Int[Array, "B T"], frequencies_F: Float[np.ndarray, " F"], dtype: jax.typing.DTypeLike) -> Rope:
    """Cosines and sines for these positions, in `dtype` and float32 at the least."""
    angles_BTF = positions_BT[..., None] * jnp.asarray(frequencies_F, _at_least_float32(dtype))
    return Rope(jnp.cos(angles_BTF), jnp.sin(angles_BTF))


def rotate(x_BTHD: Float[Array, "B T H D"], angles: Rope) -> Float[Array, "B T H D"]:
    """Turn the pairs (i, i + D/2) of every head by the angles of its position; the dtype stays."""
    cos_BT1F, sin_BT1F = angles.cos_BTF[:, :, None], angles.sin_BTF[:, :, None]
    a_BTHF, b_BTHF = jnp.split(x_BTHD.astype(cos_BT1F.dtype), 2, axis=-1)
    turned = (a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHD.dtype)


# ---- Attention -------------------------------------------------------------------------------------------------------


def causal_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKW: Float[Array, "B T K W"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    implementation: Attention = "xla",
    window: int | None = None,
    cap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Softmax attention in which a position sees itself and those before it.

    Args:
      q_BTHD, k_BTKD, v_BTKW: H is a multiple of K; query heads `[i G, (i+1) G)` share key/value head i (Ainslie et al.
        2023, "GQA").
      segments_BT: positions of one number see each other only.
      implementation: "xla", "blockwise", or "cudnn" or "tokamax", which raise where the library is missing or does not
        take these shapes and dtypes. All but the first take one width only: of keys and values the narrower is padded.
      window: a position sees itself and the `window - 1` before it.
      cap: scores s become `cap tanh(s / cap)`.

    Raises:
      ValueError: what the implementation does not do.
    """
    if implementation == "xla":
        return cached_attention(q_BTHD, k_BTKD, v_BTKW, segments_BT, first_position=0, window=window, cap=cap)
    if implementation == "blockwise":
        kernel = functools.partial(blockwise_attention, window=window, cap=cap, segments=segments_BT)
        return _in_one_width(kernel, q_BTHD, k_BTKD, v_BTKW)
    if implementation == "tokamax":
        kernel = functools.partial(flash.flash_attention, segments_BT=segments_BT, window=window, cap=cap)
        return _in_one_width(kernel, q_BTHD, k_BTKD, v_BTKW)
    _refuse('attention="cudnn"', "be cuDNN's", segments=segments_BT, cap=cap)
    return _in_one_width(functools.partial(_by_cudnn, window=window), q_BTHD, k_BTKD, v_BTKW)


def _refuse(where: str, wanted: str, **given: object) -> None:
    """Raise for what is given of the things that a form of attention does not do."""
    named = {"segments": "rows of several sequences", "cap": "attention_cap", "window": "attention_window"}
    asked = [named[name] for name, value in given.items() if value is not None]
    if asked:
        exists, fix = f"no attention that can {wanted} does that here", 'use attention="blockwise"'
        raise problem(f"TransformerConfig({where})", f"attend with {' and '.join(asked)}", exists, fix)


def cached_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKW: Float[Array, "B S K W"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    first_position: Int[Array, ""] | int,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Causal attention of T queries, the first of which stands at `first_position`, over S keys from position 0 on.

    Scores and softmax are kept in float32 at the least, and in float64 for float64 (`jax.nn.dot_product_attention`
    takes its softmax in float32 whatever it is given). `scale` is that of the scores, `D ** -0.5` by default. `window`,
    `cap` and, where S is T, `segments_BT` are as in `causal_attention`.
    """
    batch, num_queries, num_heads, head_dim = q_BTHD.shape
    num_keys, num_kv_heads = k_BSKD.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    q_BTKGD = q_BTHD.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    wide = _at_least_float32(q_BTHD.dtype)
    scores_BKGTS = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=wide) * scale
    scores_BKGTS, _ = capped(scores_BKGTS, cap)
    ahead_TS = first_position + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    seen_TS = ahead_TS >= 0 if window is None else (ahead_TS >= 0) & (ahead_TS < window)
    if segments_BT is not None:
        seen_TS = seen_TS & (segments_BT[:, None, None, :, None] == segments_BT[:, None, None, None])
    scores_BKGTS = jnp.where(seen_TS, scores_BKGTS, jnp.finfo(wide).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKW.dtype)
    o_BTKGW = jnp.einsum("BKGTS,BSKW->BTKGW", weights_BKGTS, v_BSKW)
    return o_BTKGW.reshape(batch, num_queries, num_heads, v_BSKW.shape[-1])


def _by_cudnn(
    q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, *, scale: float | None = None, window: int | None = None
) -> Array:
    near = None if window is None else (window - 1, 0)
    attention = functools.partial(
        jax.nn.dot_product_attention, scale=scale, is_causal=True, local_window_size=near, implementation="cudnn"
    )
    with cudnn.refusals_told(q_BTHD, k_BTKD, v_BTKD):
        return attention(q_BTHD, k_BTKD, v_BTKD)


def _in_one_width(attention: Callable[..., Array], q_BTHD: Array, k_BTKD: Array, v_BTKW: Array) -> Array:
    """Attention by a kernel for keys and values of one width: zeros add nothing to scores, and are cut off results."""
    head_dim, v_dim = k_BTKD.shape[-1], v_BTKW.shape[-1]
    if head_dim == v_dim:
        return attention(q_BTHD, k_BTKD, v_BTKW)

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, max(head_dim, v_dim) - x.shape[-1])])

    o_BTHD = attention(padded(q_BTHD), padded(k_BTKD), padded(v_BTKW), scale=head_dim**-0.5)
    return o_BTHD[..., :v_dim]


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, for every layer (leading dim L).

    Of latent attention the rotated key that all heads share, and the vector that the rest is made of: K is 1.
    """

    k_LBSKD: Float[Array, "L B S K D"]
    v_LBSKW: Float[Array, "L B S K W"]
    length: Int[Array, ""]
    """Positions filled; the rest are not looked at."""


LayerCache = tuple[Float[Array, "B S K D"], Float[Array, "B S K W"]]
"""One layer's keys and values."""


def extend(
    cache: LayerCache,
    length: Int[Array, ""],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKW: Float[Array, "B T K W"],
    *,
    heads: str | None = "act_kv_heads",
) -> LayerCache:
    """Write the keys and values of T new positions behind the `length` that are there; `heads` is their heads' name."""
    k_BSKD, v_BSKW = (
        jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), length, axis=1)
        for old, new in zip(cache, (k_BTKD, v_BTKW), strict=True)
    )
    return heads_layout(k_BSKD, heads), heads_layout(v_BSKW, heads)


def heads_layout(x_BTHD: Float[Array, "B T H D"], heads: str | None, seq: str = "seq") -> Float[Array, "B T H D"]:
    """Lay queries, keys, values or attention's output out by heads, whose logical name is given."""
    return constrain(x_BTHD, "batch", seq, heads, "act_head_dim")


def attend(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKD: Float[Array, "B T K D"],
    angles: Rope,
    *,
    implementation: Attention,
    window: int | None = None,
    cap: float | None = None,
    cache: LayerCache | None = None,
    length: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T H D"], LayerCache | None]:
    """Attention between its projections: layout, rotation, the cache where there is one, and the attention itself.

    Where the rules in force split the sequence inside attention, a whole one is in the order of
    `meshpar.models.context_attention` and keys and values go round a ring. With a cache the sequence is in its own
    order and attention is the plain form's.

    Args:
      q_BTHD, k_BTKD, v_BTKD: as the projections make them.
      angles: of the T positions.
      implementation: for whole sequences; with a cache it is always the plain form, cuDNN's takes none.
      window, cap: as for `causal_attention`.
      cache: keys and values of this layer so far, or None for a whole sequence.
      length: positions in the cache.

    Returns:
      the heads' output, and the cache with the T new positions in it.
    """
    q_BTHD = checkpoint_name(rotate(heads_layout(q_BTHD, "act_heads"), angles), "query")
    k_BTKD = checkpoint_name(rotate(heads_layout(k_BTKD, "act_kv_heads"), angles), "key")
    v_BTKD = checkpoint_name(heads_layout(v_BTKD, "act_kv_heads"), "value")
    if cache is None:
        o_BTHD = whole_attention(
            q_BTHD, k_BTKD, v_BTKD, angles.segments_BT, implementation=implementation, window=window, cap=cap
        )
    else:
        assert length is not None
        cache = extend(cache, length, k_BTKD, v_BTKD)
        o_BTHD = cached_attention(q_BTHD, *cache, first_position=length, window=window, cap=cap)
    return heads_layout(o_BTHD, "act_heads"), cache


def whole_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKW: Float[Array, "B T K W"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    implementation: Attention,
    window: int | None = None,
    cap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Causal attention of a whole sequence: where the rules split it inside attention, round a ring, in its order.

    Round the ring "xla" and "blockwise" are the same, plain tiles, and with "cudnn" the tiles are its kernel.
    Where they split it around attention only, heads are scattered and the sequence is gathered here, and the other way
    round behind it.
    """
    if not context.sequence_axes(q_BTHD):
        k_BTKD, v_BTKW, kv_heads = context.shared_heads(q_BTHD, k_BTKD, v_BTKW)
        q_BTHD, k_BTKD, v_BTKW = _scattered(q_BTHD, "heads"), _scattered(k_BTKD, kv_heads), _scattered(v_BTKW, kv_heads)
        attention: Callable[..., Array] = functools.partial(
            causal_attention, implementation=implementation, window=window, cap=cap
        )
        if implementation != "xla":
            varies = implementation != "tokamax"  # whose kernels cannot be traced where jax follows that
            attention = context.by_device(attention, q_BTHD, k_BTKD, kv_heads=f"attn_{kv_heads}", check_vma=varies)
        o_BTHW = attention(q_BTHD, k_BTKD, v_BTKW, *(() if segments_BT is None else (segments_BT,)))
        # Kernels mark what they give themselves, with what else their backward pass needs: marked twice, it is kept so.
        o_BTHW = checkpoint_name(o_BTHW, ATTENTION) if implementation == "xla" else o_BTHW
        return heads_layout(o_BTHW, "attn_heads", "attn_seq")
    kernel = None
    if implementation == "tokamax":
        exists, fix = "its log-sum-exps stay inside the package", 'use "cudnn", or "blockwise" for windows and segments'
        raise problem('TransformerConfig(attention="tokamax")', "go round a ring of ranks", exists, fix)
    if implementation == "cudnn":
        _refuse('attention="cudnn"', "go round a ring as cuDNN's tiles", segments=segments_BT, window=window, cap=cap)
        kernel = cudnn.TILES

    def ring(q: Array, k: Array, v: Array, **options: Any) -> Array:
        return context.ring(q, k, v, segments_BT, window=window, cap=cap, kernel=kernel, **options)

    return _in_one_width(ring, q_BTHD, k_BTKD, v_BTKW)


def _scattered(x_BTHD: Float[Array, "B T H D"], heads: str) -> Float[Array, "B T H D"]:
    """From the layout around attention to that inside, in one step: XLA would cut a rotation or repetition apart."""
    return heads_layout(heads_layout(x_BTHD, f"act_{heads}"), f"attn_{heads}", "attn_seq")


# ---- MLP -------------------------------------------------------------------------------------------------------------


MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""Of the matmul behind `swiglu` nothing is needed backward; adapters beside it need what their first one gives."""


def gated(
    gate_BTM: Float[Array, "B T M"], up_BTM: Float[Array, "B T M"]
) -> tuple[Float[Array, "B T M"], Float[Array, "B T M"]]:
    """Both as given, marked for remat policies."""
    return checkpoint_name(gate_BTM, "gate"), checkpoint_name(up_BTM, "up")


def swiglu(gate_BTM: Float[Array, "B T M"], up_BTM: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """`silu(gate) * up`. Shazeer 2020, "GLU Variants Improve Transformer".

    Call it with the matmul behind it under `jax.checkpoint`, which keeps the two arrays given; else the backward pass
    is left six of this width.
    """
    return constrain(jax.nn.silu(gate_BTM) * up_BTM, "batch", "seq", "act_mlp")
