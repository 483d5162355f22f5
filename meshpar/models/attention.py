"""Attention of the decoders: a table of implementations, caches, and attention over full sequences.

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshpar.collectives import blockwise_attention, cudnn, flash
from meshpar.collectives.attention import TileKernel, WindowChoice, capped
from meshpar.hardware.compile_target import GPUS, KernelChoice, target
from meshpar.layers.precision import record_kernel
from meshpar.layers.remat import ATTENTION
from meshpar.models import context_attention as context
from meshpar.models.architecture import Architecture
from meshpar.models.layers import Rope, by_kind, rotate
from meshpar.sharding.context import constrain
from meshpar.sharding.errors import problem


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


class AttentionQuery(NamedTuple):
    """What a call of attention needs: options, dtype and sizes."""

    segments: bool = False
    window: bool = False
    cap: bool = False
    sinks: bool = False
    ring: bool = False
    """True if the sequence is sharded inside attention."""
    dtype: str = "bfloat16"
    head_dim: int = 128
    """The larger of the dimensions of keys and values."""
    seq_len: int = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """An implementation of causal attention over full sequences.

    `meshpar.inspect.model_flops` counts its FLOPs in the traced program.
    """

    attend: Callable[..., Array]
    """`(q, k, v, *, segments_BT, scale, window, cap, sinks_H) -> o`, for the heads of a device."""
    supports: Callable[[AttentionQuery], str | None] = lambda query: None
    """Return the reason why the options of a call are not supported, or None."""
    runs: Callable[[AttentionQuery, str, tuple[int, int]], str | None] = lambda query, platform, capability: None
    """Return the reason why a call does not run on devices of a platform and compute capability, or None."""
    tiles: TileKernel | None = None
    """Kernel of the tiles of ring attention. None: plain matmuls."""
    needs_equal_widths: bool = True
    """Whether keys and values need the same number of dimensions."""
    has_static_window: bool = False
    """Whether the size of the window must be known at compile time."""
    is_partitioned: bool = False
    """Whether XLA partitions it over the devices. Otherwise it runs in a `shard_map`, and names its own residuals."""
    check_vma: bool = True
    """Whether it supports JAX's check of varying mesh axes."""


def _blockwise(
    q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, *, segments_BT: Array | None, sinks_H: Array | None, **options: Any
) -> Array:
    return blockwise_attention(q_BTHD, k_BTKD, v_BTKD, segments=segments_BT, sinks=sinks_H, **options)


def _cudnn(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    *,
    segments_BT: Array | None,
    scale: float | None,
    window: int | None,
    cap: None,
    sinks_H: None,
) -> Array:
    local = None if window is None else (window - 1, 0)
    # `jax.nn.dot_product_attention` has no segment ids.
    mask = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None]
    options: dict[str, Any] = {"scale": scale, "is_causal": True, "local_window_size": local, "mask": mask}
    with cudnn.cudnn_errors(q_BTHD, k_BTKD, v_BTKD):
        return jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, **options, implementation="cudnn")


def _cudnn_supports(query: AttentionQuery) -> str | None:
    names = {"segments": "packed sequences", "window": "attention_window", "cap": "attention_cap"}
    if not query.ring:
        names = {"cap": "attention_cap", "sinks": "attention_sinks"}
    requested = [text for name, text in names.items() if getattr(query, name)]
    subject = "ring attention with cuDNN" if query.ring else "cuDNN's attention"
    return f"{subject} does not support {' and '.join(requested)}" if requested else None


def _cudnn_runs(query: AttentionQuery, platform: str, capability: tuple[int, int]) -> str | None:
    """Check the limits of jax's cuDNN attention, so that "auto" never chooses a kernel that raises an error."""
    max_head_dim = 256 if capability >= (9, 0) else 128
    for is_wrong, reason in (
        (platform not in ("gpu", "cuda"), f"cuDNN needs an NVIDIA GPU, and the devices are {platform}"),
        (capability < (8, 0), "cuDNN's flash attention needs compute capability 8.0"),
        (query.dtype not in ("bfloat16", "float16"), f"cuDNN computes in 16 bits, and queries are {query.dtype}"),
        (query.head_dim % 8 or query.head_dim > max_head_dim,
         f"heads must be a multiple of 8, at most {max_head_dim}, for cuDNN, and have {query.head_dim} dimensions"),
        (cudnn.missing_cudnn(), cudnn.missing_cudnn()),
        (query.segments and query.seq_len % 2, "cuDNN needs an even length for packed sequences"),
    ):  # fmt: skip
        if is_wrong:
            return reason
    return None


def _tokamax(q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, *, sinks_H: None, **options: Any) -> Array:
    return flash.flash_attention(q_BTHD, k_BTKD, v_BTKD, **options)


def _tokamax_supports(query: AttentionQuery) -> str | None:
    if query.ring:
        return "ring attention needs the log-sum-exp of the scores, which tokamax does not return"
    return "tokamax does not support attention_sinks" if query.sinks else None


def _tokamax_runs(query: AttentionQuery, platform: str, capability: tuple[int, int]) -> str | None:
    for is_wrong, reason in (
        (platform not in ("gpu", "cuda"), f"tokamax has kernels for NVIDIA GPUs, and the devices are {platform}"),
        (importlib.util.find_spec("tokamax") is None, "tokamax is not installed"),
        (capability < (8, 0), "tokamax's kernels need compute capability 8.0"),
        (query.dtype not in ("bfloat16", "float16"), f"tokamax computes in 16 bits, and queries are {query.dtype}"),
        (query.head_dim not in (64, 128, 256), f"heads have {query.head_dim} dimensions instead of 64, 128 or 256"),
    ):
        if is_wrong:
            return reason
    return None


KERNELS: Mapping[str, AttentionKernel] = {
    "xla": AttentionKernel(
        attend=functools.partial(cached_attention, first_position=0), needs_equal_widths=False, is_partitioned=True
    ),
    "blockwise": AttentionKernel(attend=_blockwise),
    "cudnn": AttentionKernel(
        attend=_cudnn, supports=_cudnn_supports, runs=_cudnn_runs, tiles=cudnn.TILES, has_static_window=True
    ),
    "tokamax": AttentionKernel(
        attend=_tokamax, supports=_tokamax_supports, runs=_tokamax_runs, has_static_window=True, check_vma=False
    ),
}
"""The implementations of attention, by the value of `TransformerConfig.attention`."""


def choose_attention(
    query: AttentionQuery, platform: str | None = None, capability: tuple[int, int] | None = None
) -> KernelChoice:
    """Return the implementation that `attention="auto"` uses.

    Args:
      query: the options, dtype and sizes of the call.
      platform: `cpu`, `gpu`, ...; None for the devices that the program is traced for.
      capability: compute capability of GPUs, such as (9, 0).
    """
    if platform is None:
        platform, capability = target()
    reasons: list[str] = []
    for name in ("cudnn", "tokamax"):
        kernel = KERNELS[name]
        reason = kernel.runs(query, platform, capability or (0, 0)) or kernel.supports(query)
        if reason is None:
            why = "; ".join([f"a fused kernel for {platform}", *reasons])
            return KernelChoice(implementation=name, why=why)
        reasons.append(reason)
        if platform not in GPUS:
            break
    return KernelChoice(implementation="blockwise", why="; ".join(reasons))


def checked_kernel(implementation: str, query: AttentionQuery) -> AttentionKernel:
    """Return an implementation, or raise an error if it does not support the query."""
    kernel = KERNELS[implementation]
    if (reason := kernel.supports(query)) is not None:
        where = f'TransformerConfig(attention="{implementation}")'
        requested = "use ring attention" if query.ring else "use this implementation"
        raise problem(where, requested, reason, 'use attention="blockwise"', code="unsupported-feature")
    return kernel


def causal_attention(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKW: Array,
    segments_BT: Array | None = None,
    *,
    implementation: str = "xla",
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
      implementation: "auto" (see `choose_attention`), "xla", "blockwise", "cudnn" or "tokamax". The last two raise an
        error if the library is missing or does not support these shapes and dtypes. All but "xla" need equal dimensions
        of keys and values, so the smaller is padded.
      scale: factor of the scores, by default `D ** -0.5`.
      window: a position attends to itself and the `window - 1` positions before it.
      cap: scores s become `cap tanh(s / cap)`.
      sinks_H: as in `blockwise_attention`. Not supported by "cudnn" and "tokamax".

    Raises:
      ValueError: the implementation does not support an option.
    """
    query = _query(q_BTHD, v_BTKW, segments_BT, window=window, cap=cap, sinks_H=sinks_H)
    implementation = choose_attention(query).implementation if implementation == "auto" else implementation
    kernel = checked_kernel(implementation, query)

    def with_window(size: int | WindowChoice | None) -> Callable[..., Array]:
        options: dict[str, Any] = {"segments_BT": segments_BT, "window": size, "cap": cap, "sinks_H": sinks_H}
        attend: Callable[..., Array] = functools.partial(kernel.attend, **options)
        return functools.partial(_in_one_width, attend) if kernel.needs_equal_widths else attend

    if isinstance(window, WindowChoice) and kernel.has_static_window:
        # The gradient of this choice saves the arrays of all branches.
        branches = [functools.partial(with_window(size), scale=scale) for size in window.sizes]
        return window.select(branches, q_BTHD, k_BTKD, v_BTKW)
    return with_window(window)(q_BTHD, k_BTKD, v_BTKW, scale=scale)


def _query(
    q_BTHD: Array,
    v_BTKW: Array,
    segments_BT: Array | None,
    *,
    window: int | WindowChoice | None,
    cap: float | None,
    sinks_H: Array | None,
    ring: bool = False,
) -> AttentionQuery:
    is_set = {"segments": segments_BT, "window": window, "cap": cap, "sinks": sinks_H}
    return AttentionQuery(
        **{name: value is not None for name, value in is_set.items()},
        ring=ring,
        dtype=q_BTHD.dtype.name,
        head_dim=max(q_BTHD.shape[-1], v_BTKW.shape[-1]),
        seq_len=q_BTHD.shape[1],
    )


def _in_one_width(
    attention: Callable[..., Array], q_BTHD: Array, k_BTKD: Array, v_BTKW: Array, *, scale: float | None
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
    """Normalize queries and keys in layers with rotary embeddings, and scale queries in the other"""
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
    limits = limits_of(cfg, angles.kind)
    segments_BT = _segments_of(cfg, angles, q_BTHD.shape[:2])
    options = {"window": limits["window"], "cap": limits["cap"], "sinks_H": sinks_H}
    query = _query(q_BTHD, v_BTKW, segments_BT, ring=bool(context.sequence_axes(q_BTHD)), **options)
    choice = KernelChoice(implementation=cfg.attention, why=f'attention="{cfg.attention}" in the model', is_named=True)
    if cfg.attention == "auto":
        choice = choose_attention(query)
    record_kernel("attention", choice)
    implementation = choice.implementation
    if not query.ring:
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

        kernel, run = KERNELS[implementation], cast(Callable[..., Array], attention)
        if not kernel.is_partitioned:
            heads = f"attn_{kv_heads}"
            run = context.by_device(attention, q_BTHD, k_BTKD, kv_heads=heads, check_vma=kernel.check_vma)
        o_BTHW = run(q_BTHD, k_BTKD, v_BTKW, *extra)
        # The other kernels name their outputs and residuals themselves. A second name would save the output twice.
        o_BTHW = checkpoint_name(o_BTHW, ATTENTION) if kernel.is_partitioned else o_BTHW
        return heads_layout(o_BTHW, "attn_heads", "attn_seq")
    tiles, scale = checked_kernel(implementation, query).tiles, limits.pop("scale")
    ring = functools.partial(context.ring, segments_BT=segments_BT, sinks_H=sinks_H, kernel=tiles, **limits)
    return _in_one_width(ring, q_BTHD, k_BTKD, v_BTKW, scale=scale)
