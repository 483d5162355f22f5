"""Blockwise attention on a device, and ring attention over a sharded sequence.

A tile pairs a block of consecutive queries with a block of consecutive keys. Tiles that a mask excludes are not
computed. The softmax is online, in float32 or higher precision. The backward pass recomputes tiles from the saved
log-sum-exp of each query. In the ring, queries stay on their rank, while keys and values, and then their gradients, are
passed around. A tile is computed with plain matmuls or with the kernel of a library, whose results are combined by
their log-sum-exps.

Shape suffixes: B batch, t local positions (n tiles of s positions each), K key/value heads, G query heads per key/value
head, H = K G query heads, D head width, N ranks.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Dao et al.
2022, "FlashAttention", for the online softmax and its backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.collectives.wire import put, send_on_ring, take, varying, varying_alike
from meshpar.collectives.zigzag_order import check_two_chunks
from meshpar.sharding.errors import (
    check_bool,
    check_cases,
    check_choice,
    check_divides,
    check_number,
    check_positive_int,
)

ORDERS = ("zigzag", "contiguous")

Tiles: TypeAlias = Int[Array, "P 2"]
"""Indices (block of queries, block of keys) of P tiles."""
_Half: TypeAlias = Literal["all", "first", "second"]
_Segments: TypeAlias = tuple[Int[Array, "n B s"], Int[Array, "N n B s"]]
"""Segments of the local tiles, and of the tiles of all ranks."""
Carry = TypeVar("Carry")
WINDOWS = "windows_"
"""Prefix of the named scope of `WindowChoice.select`. The frequencies follow."""
_WINDOWS = re.compile(rf"{WINDOWS}([0-9_]+)\)*(/cond)?\Z")
TILE = 512
"""Default tile size of plain matmuls, in positions. The scores of a tile have `B H 512²` elements."""


class TileKernel(NamedTuple):
    """A library's attention kernel for a tile, with queries `[B, H, s, D]` and keys and values `[B, K, s, D]`.

    Both functions receive the keyword arguments `scale` and `causal`. With `causal`, queries and keys have the same
    positions.
    """

    forward: Callable[..., tuple[Array, Array]]
    """(q, k, v) -> (o, log-sum-exp of the scaled scores of each query, `[B, H, s]`)."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(q, k, v, o, lse, do) -> contributions of the tile to (dq, dk, dv). `o` and `lse` are computed over all keys, so
    exp(scores - lse) are the weights of the full softmax."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowChoice:
    """Sliding windows of attention, for a scan over layers of several windows. `index` selects a window at run time."""

    sizes: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    frequencies: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Number of layers with each window, for counts of FLOPs and messages."""
    index: Int[Array, ""]

    def select(self, branches: Sequence[Callable[..., Any]], *operands: jax.Array) -> Any:
        """Run the branch of the selected window."""
        with jax.named_scope(WINDOWS + "_".join(map(str, self.frequencies))):
            return lax.switch(self.index, branches, *operands)


def window_shares(scopes: str) -> tuple[Fraction, ...] | None:
    """Return the share of layers that run each branch of `WindowChoice.select`, parsed from the scopes of an operation.

    `None` if the operation is not such a choice.
    """
    match = _WINDOWS.search(scopes)
    counts = [int(count) for count in match[1].split("_")] if match else []
    return tuple(Fraction(count, sum(counts)) for count in counts) or None


def ring_attention(
    q: Float[Array, "B t H D"],
    k: Float[Array, "B t K D"],
    v: Float[Array, "B t K D"],
    *,
    axis: Axis,
    causal: bool = True,
    order: Literal["zigzag", "contiguous"] = "zigzag",
    scale: float | None = None,
    window: int | WindowChoice | None = None,
    cap: float | None = None,
    segments: Int[Array, "B t"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    tile: int | None = None,
    kernel: TileKernel | None = None,
) -> Float[Array, "B t H D"]:
    """Softmax attention over a sequence that is sharded over ranks; the reference is `reference.ring_attention`.

        [B, T_X, H, D], 2 x [B, T_X, K, D] -> [B, T_X, H, D];  per device with t = T/N instead of T
        forward   N-1 steps, (N-1) n bytes sent, n the local keys and values
        backward  2(N-1) messages, (N-1) (n + m) bytes sent, m their gradients in float32 (float64 for float64)

    The next block of keys and values is received while the current block is used. With a causal mask in zigzag order
    every rank computes half a block in each step but the first, without branches: `2 B H D t² (N + s/t)` FLOPs in
    total, compared with `4 B H D t² N` without the mask. The backward pass needs 2.5 times as many.

    In addition to its arguments, its result and two blocks of keys and values, a rank needs memory for the result in
    float32 and the scores of a tile, `B H s²`. The backward pass needs gradients in float32 and twice the scores of a
    tile. Arguments, result and `B H t` log-sum-exps are saved for it. Forward-mode and second derivatives are not
    supported.

    Args:
      q, k, v: local queries, keys and values. Query heads `[i G, (i+1) G)`, G = H/K, share key/value head i.
      axis: mesh axis, or a tuple of axes that act as a single axis.
      causal: whether a position attends only to itself and earlier positions.
      order: the positions of a rank. With "zigzag" rank i has chunks i and 2N-1-i of 2N (see `zigzag`). With
        "contiguous" it has part i of N, and under a causal mask early ranks wait for late ones.
      scale, window, cap: see `blockwise_attention`. A window requires `causal`, and tiles outside of it are skipped.
      segments: see `blockwise_attention`. Each rank receives the segments of all ranks, `4 (N-1) B t` bytes, and skips
        tiles without a common segment.
      sinks: see `blockwise_attention`. All ranks have the same.
      tile: number of positions of a tile. The nearest divisor of t (of t/2 in zigzag order) is used. The default is 512
        for plain matmuls, and the largest possible tile with a `kernel`.
      kernel: computes the attention of a tile, such as `meshpar.collectives.cudnn.TILES`; plain matmuls by default. Its
        results are rounded to the dtype of q before they are added in float32. It does not support a window, a cap or
        segments.

    Raises:
      MeshparError: the axis is unknown, shapes or dtypes do not match, t is odd in zigzag order, or the kernel does not
        support the options.

    Sources: Liu et al. 2023, "Ring Attention"; Brandon et al. 2023, "Striped Attention", for the balanced order.

    Example:
      >>> def attend(q, k, v):
      ...     return mp.collectives.ring_attention(q, k, v, axis="fsdp", order="contiguous")
      >>> f = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp"), check_vma=False)
      >>> q = jnp.ones((1, 16, 2, 8))
      >>> jax.jit(f)(q, q, q).shape
      (1, 16, 2, 8)
    """
    where = "ring_attention"
    num_ranks = ranks_of(where, axis)
    _check_arrays(where, q, k, v, window, cap, segments, sinks)
    _check_ring_options(q.shape[1], order, causal, scale, tile, kernel, window=window, cap=cap, segments=segments)
    length = q.shape[1] // 2 if order == "zigzag" else q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ring = _Ring(axis, num_ranks, causal, order, scale, None, cap, kernel)
    tile = tile or (TILE if kernel is None else length)
    q, k, v = varying_alike(axis, q, k, v)
    with jax.named_scope("ring_attention"):
        return _attend(ring, q, k, v, window, segments, sinks, _nearest_divisor(length, tile))


def blockwise_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    scale: float | None = None,
    window: int | WindowChoice | None = None,
    cap: float | None = None,
    segments: Int[Array, "B T"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    tile: int = TILE,
) -> Float[Array, "B T H D"]:
    """Causal softmax attention in memory linear in T; the reference is `reference.blockwise_attention`.

        [B, T, H, D], 2 x [B, T, K, D] -> [B, T, H, D] on a device

    Tiles outside the causal mask or the window are not computed: `2 B H D T (T + s)` FLOPs without a window, and 2.5
    times as many in the backward pass. Memory and derivatives are as in `ring_attention` with a single rank.

    Args:
      q, k, v: queries, keys and values. Query heads `[i G, (i+1) G)`, G = H/K, share key/value head i.
      scale: factor of the scores before the softmax, by default `D ** -0.5`.
      window: number of positions, up to and including itself, that a position attends to. None: no limit. A
        `WindowChoice` selects a number at run time.
      cap: scores s become `cap tanh(s / cap)` before the mask. None: no cap.
      segments: integers; positions attend only to positions with the same integer, as for packed sequences.
      sinks: a logit for each query head, which is part of the softmax but has no value (GPT-OSS): the weights of a
        query sum to less than 1.
      tile: number of positions of a tile. The sequence is padded to a multiple of `tile`.

    Raises:
      MeshparError: shapes or dtypes do not match, or an option is out of range.

    Sources: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory"; Dao et al. 2022, "FlashAttention";
    Gemma Team 2024, "Gemma 2", for the cap; Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks", for the sinks.
    """
    where = "blockwise_attention"
    _check_arrays(where, q, k, v, window, cap, segments, sinks)
    check_positive_int(where, "a number of positions", tile=tile)
    ring = _Ring((), 1, True, "contiguous", q.shape[-1] ** -0.5 if scale is None else scale, None, cap)
    with jax.named_scope("blockwise_attention"):
        return _attend(ring, q, k, v, window, segments, sinks, min(tile, q.shape[1]))


def _attend(
    ring: _Ring, q: Array, k: Array, v: Array, window: int | WindowChoice | None, segments: Array | None,
    sinks: Array | None, size: int,
) -> Array:  # fmt: skip
    """Split the arrays into tiles of `size` positions, run the ring, and join the tiles of the output."""
    padding = -q.shape[1] % size

    def tiles(x: Array) -> Array:
        """`[B, t, ..., D] -> [n, B, ..., s, D]`: each tile is contiguous, in the layout of a batched matmul."""
        # The padding comes after all positions, so the causal mask hides it.
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) if padding else x
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 2), (0, -2))

    q_nBKGsD = tiles(q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]))
    tiled_segments = None
    if segments is not None:
        local_nBs = tiles(segments[..., None])[..., 0]
        all_NnBs = lax.all_gather(local_nBs, ring.axis) if ring.num_ranks > 1 else local_nBs[None]
        tiled_segments = local_nBs, all_NnBs
    if sinks is not None:  # their gradient is summed in float32 over the examples and ranks
        sinks_KG = sinks.astype(_at_least_float32(q.dtype)).reshape(k.shape[2], -1)
        q_nBKGsD, sinks = varying_alike((), q_nBKGsD, sinks_KG)
    arrays = q_nBKGsD, jnp.stack([tiles(k), tiles(v)], axis=1), tiled_segments, sinks
    if isinstance(window, WindowChoice):
        o_nBKGsD = _attention(ring, *arrays, window)
    else:
        o_nBKGsD = _attention(ring._replace(window=window), *arrays, None)
    o = jnp.moveaxis(o_nBKGsD, (0, 4), (1, 2)).reshape(q.shape[0], -1, *q.shape[2:])
    return o[:, : q.shape[1]] if padding else o


class _Ring(NamedTuple):
    """Static arguments of the attention kernels. Without a ring, `num_ranks` is 1."""

    axis: Axis
    num_ranks: int
    causal: bool
    order: str
    scale: float
    window: int | None = None
    cap: float | None = None
    kernel: TileKernel | None = None

    def next(self, x: Array) -> Array:
        """Send `x` to the next rank and return the array received from the previous rank."""
        return send_on_ring(x, self.axis, 1, self.num_ranks)

    def starts(self, rank: Any, n: int, size: int) -> Int[Array, " n"]:
        """Return the global position at which each of the n tiles of a rank starts."""
        index = jnp.arange(n)
        if self.order == "contiguous":
            return (rank * n + index) * size
        half = n // 2
        is_early, early = index < half, rank * half + index
        late = (2 * self.num_ranks - 1 - rank) * half + index - half
        return jnp.where(is_early, early, late) * size


class _Visibility(NamedTuple):
    """Restrictions in addition to the causal mask, for the local queries and the current block of keys."""

    starts: tuple[Array, Array] | None
    """Global start positions of the query tiles and the key tiles. None without a window or with a single rank."""
    segments: tuple[Array, Array] | None
    """Segments of queries and keys, `[n, B, s]`."""


def _visibility(ring: _Ring, q: Array, segments: _Segments | None, s: Any) -> _Visibility:
    """Return the restrictions for the keys of the rank `s` places back on the ring."""
    if ring.num_ranks == 1:
        return _Visibility(None, None if segments is None else segments[:1] * 2)
    rank = lax.axis_index(ring.axis)
    key_rank = (rank - s) % ring.num_ranks
    starts = None
    if ring.window is not None:
        starts = (ring.starts(rank, len(q), q.shape[-2]), ring.starts(key_rank, len(q), q.shape[-2]))
    return _Visibility(starts, None if segments is None else (segments[0], take(segments[1], key_rank)))


# ---- Forward and backward pass around the ring. kv is [n, 2, B, K, s, D], sent in a single message. ------------------


class _Softmax(NamedTuple):
    """State of the online softmax after the tiles so far."""

    values_nBKGsD: Array
    """Sum of the values, weighted with exp(score - max)."""
    max_nBKGs: Array
    sum_nBKGs: Array
    """Sum of the weights exp(score - max)."""


class _Gradients(NamedTuple):
    """Gradients of the local queries and of a block of keys and values, accumulated over tiles."""

    q_nBKGsD: Array
    kv_n2BKsD: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    ring: _Ring, q: Array, kv: Array, segments: _Segments | None, sinks_KG: Array | None, windows: WindowChoice | None
) -> Array:
    return _attention_forward(ring, q, kv, segments, sinks_KG, windows)[0]


def _attention_forward(
    ring: _Ring, q: Array, kv: Array, segments: _Segments | None, sinks_KG: Array | None, windows: WindowChoice | None
) -> tuple[Array, tuple[Any, ...]]:
    o, lse = _in_window(ring, windows, _forward, q, kv, segments, sinks_KG)
    # With these names a remat policy can save the results, so that the tiles are not computed a second time.
    o, lse = (checkpoint_name(x, "attention") for x in (o, lse))
    return o, (q, kv, o, lse, segments, sinks_KG, windows)


def _attention_backward(ring: _Ring, saved: tuple[Any, ...], do: Array) -> tuple[Any, ...]:
    *arrays, sinks_KG, windows = saved
    dq, dkv = _in_window(ring, windows, _backward, arrays, do)
    if sinks_KG is None:
        return dq, dkv, None, None, None
    _, _, o, lse, _ = arrays
    # As for a key with weight exp(sink - lse) and a value of 0.
    slope_nBKGs = jnp.exp(sinks_KG[..., None] - lse) * jnp.sum(do.astype(lse.dtype) * o.astype(lse.dtype), axis=-1)
    return dq, dkv, None, -slope_nBKGs.sum((0, 1, 4)), None


def _in_window(ring: _Ring, windows: WindowChoice | None, run: Callable[..., Any], *args: Any) -> Any:
    """Call `run(ring, *args)` with the window that is selected at run time.

    The switch is inside `_attention`, which has a custom gradient. The gradient of a plain `switch` would save the
    arrays of all branches.
    """
    if windows is None:
        return run(ring, *args)
    return windows.select([functools.partial(run, ring._replace(window=size)) for size in windows.sizes], *args)


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(
    ring: _Ring, q: Array, kv: Array, segments: _Segments | None, sinks_KG: Array | None
) -> tuple[Array, Array]:
    """Return the attention output and the log-sum-exp of each query's scores and sink."""
    N, dtype = ring.num_ranks, _at_least_float32(q.dtype)
    visible = functools.partial(_visibility, ring, q, segments)

    def step(s: Any, carry: tuple[Array, _Softmax], *, is_last: bool = False) -> tuple[Array, _Softmax]:
        kv, softmax = carry
        next_kv = kv if is_last else ring.next(kv)
        return next_kv, _remote_tiles(ring, s, q, visible(s), functools.partial(_tile_forward, ring, q, kv), softmax)

    next_kv = ring.next(kv) if N > 1 else kv
    softmax = _Softmax(
        _full_like(q, q.shape, 0, dtype),
        _full_like(q, q.shape[:-1], -np.inf, dtype),
        _full_like(q, q.shape[:-1], 0, dtype),
    )
    if sinks_KG is not None:  # as if each query had seen a key with this score and a value of 0
        maximum = jnp.broadcast_to(sinks_KG[..., None], q.shape[:-1])
        softmax = softmax._replace(max_nBKGs=maximum, sum_nBKGs=jnp.ones_like(maximum))
    softmax = _local_tiles(ring, q, functools.partial(_tile_forward, ring, q, kv, visible(0)), softmax)
    if N > 1:
        carry = _loop(1, N - 1, step, (next_kv, softmax))
        _, softmax = step(N - 1, carry, is_last=True)
    o = (softmax.values_nBKGsD / softmax.sum_nBKGs[..., None]).astype(q.dtype)
    return o, softmax.max_nBKGs + jnp.log(softmax.sum_nBKGs)


def _backward(ring: _Ring, saved: tuple[Any, ...], do: Array) -> tuple[Array, Array]:
    """Return the gradients of q and kv. Key blocks travel around the ring; their gradients follow one step later."""
    q, kv, o, lse, segments = saved
    N, dtype = ring.num_ranks, _at_least_float32(q.dtype)
    of_queries = (q, do, lse, jnp.sum(do.astype(dtype) * o.astype(dtype), axis=-1) if ring.kernel is None else o)
    zeros = _full_like(kv, kv.shape, 0, dtype)
    visible = functools.partial(_visibility, ring, q, segments)

    def add(s: Any, kv: Array, gradients: _Gradients, half: _Half) -> _Gradients:
        tile = functools.partial(_tile_backward, ring, of_queries, kv)
        return _remote_tiles(ring, s, q, visible(s), tile, gradients, half)

    def step(s: Any, carry: tuple[Array, Array, Array], *, is_last: bool = False) -> tuple[Array, Array, Array]:
        # Gradients are received during the first half of the tiles and the next block during the second half, because
        # XLA runs one permute at a time on GPUs. Without the barriers XLA would merge the two permutes, or run one of
        # them without computation to overlap with.
        kv, dq, dkv_out = carry
        kv, dkv_out = lax.optimization_barrier((kv, dkv_out))
        dkv_in = ring.next(dkv_out)
        dq, dkv = add(s, kv, _Gradients(dq, zeros), "first")
        kv, dq, dkv = lax.optimization_barrier((kv, dq, dkv + dkv_in))
        next_kv = kv if is_last else ring.next(kv)
        return next_kv, *add(s, kv, _Gradients(dq, dkv), "second")

    # The first half of the local tiles overlaps with receiving the first block, the second half with receiving the
    # final gradients.
    local = functools.partial(_tile_backward, ring, of_queries, kv, visible(0))
    next_kv = ring.next(kv) if N > 1 else kv
    dq, local_dkv = _local_tiles(ring, q, local, _Gradients(_full_like(q, q.shape, 0, dtype), zeros), "first")
    remote_dkv = zeros
    if N > 1:
        after_next_kv = ring.next(next_kv) if N > 2 else next_kv
        carry = (after_next_kv, *add(1, next_kv, _Gradients(dq, zeros), "all"))
        carry = _loop(2, N - 1, step, carry)
        _, dq, dkv_out = step(N - 1, carry, is_last=True) if N > 2 else carry
        remote_dkv = ring.next(dkv_out)
    dq, local_dkv = _local_tiles(ring, q, local, _Gradients(dq, local_dkv), "second")
    return dq.astype(q.dtype), (remote_dkv + local_dkv).astype(kv.dtype)


def _loop(first: int, end: int, step: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """Run a `lax.fori_loop` as a while loop, inside which `jax.checkpoint` saves nothing.

    In a scan, a remat policy that saves matmuls would save the scores of all tiles.
    """

    def body(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, carry = state
        return i + 1, step(i, carry)

    return lax.while_loop(lambda state: state[0] < end, body, (jnp.int32(first), carry))[1] if end > first else carry


# ---- Lists of tiles --------------------------------------------------------------------------------------------------


def _local_tiles(ring: _Ring, q: Array, tile: Callable[..., Carry], carry: Carry, half: _Half = "all") -> Carry:
    """Compute the tiles of the local queries with the local keys, whose positions increase in both orders."""
    n, size = len(q), q.shape[-2]
    window = n * size if ring.window is None else ring.window
    reach = (window + size - 2) // size  # number of earlier tiles that the first query of a tile sees
    pairs = [(i, j) for i in range(n) for j in range(n) if i - reach <= j <= i or not ring.causal]
    pairs = _take_half(pairs, half)
    if ring.kernel is None or not ring.causal:
        return _for_tiles(_tile_list(pairs), functools.partial(tile, ring.causal), carry)
    for masked in (True, False):  # a library's kernel applies a causal mask, which diagonal tiles need, or no mask
        tiles = _tile_list((i, j) for i, j in pairs if (i == j) is masked)
        carry = _for_tiles(tiles, functools.partial(tile, masked), carry)
    return carry


def _remote_tiles(
    ring: _Ring, s: Any, q: Array, visible: _Visibility, work: Callable[..., Carry], carry: Carry, half: _Half = "all"
) -> Carry:
    """Compute the tiles of the local queries with the keys of the rank `s` places back on the ring.

    The causal mask includes or excludes each of these tiles as a whole, so no mask is applied within a tile.
    """
    n, size = len(q), q.shape[-2]

    def tile(carry: Carry, index: Array) -> Carry:
        compute, may_see = functools.partial(work, visible, False), jnp.array(True)
        if visible == (None, None):
            return compute(carry, index)
        if ring.window is not None:
            may_see &= _tile_distance(visible, size, index) - (size - 1) < ring.window
        if visible.segments is not None:  # compare the ranges of the segment numbers
            queries_Bs, keys_Bs = (take(x, tile) for x, tile in zip(visible.segments, index, strict=True))
            may_see &= ((queries_Bs.min(1) <= keys_Bs.max(1)) & (keys_Bs.min(1) <= queries_Bs.max(1))).any()
        return lax.cond(may_see, compute, lambda carry, index: carry, carry, index)

    all_tiles = _take_half(_tile_list(itertools.product(range(n), range(n))), half)
    if not ring.causal:
        return _for_tiles(all_tiles, tile, carry)
    rank = lax.axis_index(ring.axis)
    is_earlier = (rank - s) % ring.num_ranks < rank
    if ring.order == "contiguous":
        return lax.cond(is_earlier, functools.partial(_for_tiles, all_tiles, tile), lambda carry: carry, carry)
    # Late queries see the early keys of all ranks. In addition, early queries see the early keys of earlier ranks, and
    # late queries the late keys of later ranks. The number of tiles is the same in both cases.
    early, late = range(n // 2), range(n // 2, n)
    common = _tile_list(itertools.product(late, early))
    other = _tile_list(itertools.product(early, early)) + jnp.where(is_earlier, 0, n // 2)
    tiles = jnp.concatenate(varying_alike(ring.axis, common, other))
    return _for_tiles(_take_half(tiles, half), tile, carry)


def _tile_list(pairs: Iterable[tuple[int, int]]) -> Tiles:
    return jnp.asarray(list(pairs), "int32").reshape(-1, 2)


def _take_half(tiles: Any, half: _Half) -> Any:
    middle = len(tiles) // 2
    return {"all": tiles, "first": tiles[:middle], "second": tiles[middle:]}[half]


def _for_tiles(tiles: Tiles, tile: Callable[[Carry, Array], Carry], carry: Carry) -> Carry:
    """Compute tiles sequentially, so that only the scores of a single tile are in memory."""
    return _loop(0, len(tiles), lambda p, carry: tile(carry, take(tiles, p)), carry)


# ---- A tile. Its index is (i, j): block of queries, block of keys. ---------------------------------------------------


def _tile_forward(
    ring: _Ring, q: Array, kv: Array, visible: _Visibility, masked: bool, softmax: _Softmax, index: Array
) -> _Softmax:
    i, j = index
    k, v = take(kv, j)
    before = _Softmax(*(take(x, i) for x in softmax))
    if ring.kernel is None:
        # If a query sees no key of the tile, its weights here are wrong, but a later tile with a higher maximum scales
        # them to zero.
        scores, _ = _scores(ring, take(q, i), k, _tile_mask(ring, q.shape[-2], visible, index, masked))
        maximum = jnp.maximum(before.max_nBKGs, scores.max(-1))
        weights = jnp.exp(scores - maximum[..., None])
        total, values = weights.sum(-1), _einsum("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v, maximum.dtype)
    else:
        o, lse = ring.kernel.forward(_merge_heads(take(q, i)), k, v, scale=ring.scale, causal=masked)
        o, lse = (_group_heads(x, k.shape[1]).astype(before.max_nBKGs.dtype) for x in (o, lse))
        maximum = jnp.maximum(before.max_nBKGs, lse)
        total = jnp.exp(lse - maximum)
        values = o * total[..., None]
    decay = jnp.exp(before.max_nBKGs - maximum)
    after = _Softmax(before.values_nBKGsD * decay[..., None] + values, maximum, before.sum_nBKGs * decay + total)
    return _Softmax(*(put(x, new, i) for x, new in zip(softmax, after, strict=True)))


def _tile_backward(
    ring: _Ring, of_queries: tuple[Array, ...], kv: Array, visible: _Visibility, masked: bool, gradients: _Gradients,
    index: Array,
) -> _Gradients:  # fmt: skip
    i, j = index
    q, do, lse, o = (take(x, i) for x in of_queries)
    k, v = take(kv, j)
    if ring.kernel is None:  # `o` is the sum of `do * o` over the head width
        scores, slope = _scores(ring, q, k, _tile_mask(ring, q.shape[-2], visible, index, masked))
        weights = jnp.exp(scores - lse[..., None])
        d_weights = _einsum("bkgqd,bksd->bkgqs", do, v, lse.dtype)
        d_scores = (weights * (d_weights - o[..., None]) * slope * ring.scale).astype(q.dtype)
        dq = _einsum("bkgqs,bksd->bkgqd", d_scores, k, lse.dtype)
        dk = _einsum("bkgqs,bkgqd->bksd", d_scores, q, lse.dtype)
        dv = _einsum("bkgqs,bkgqd->bksd", weights.astype(do.dtype), do, lse.dtype)
    else:
        args = (_merge_heads(q), k, v, _merge_heads(o), _merge_heads(lse), _merge_heads(do))
        dq, dk, dv = ring.kernel.backward(*args, scale=ring.scale, causal=masked)
        dq = _group_heads(dq, k.shape[1])
    return _Gradients(_add(gradients.q_nBKGsD, dq, i), _add(gradients.kv_n2BKsD, jnp.stack([dk, dv]), j))


def _merge_heads(x_BKGs: Array) -> Array:
    return x_BKGs.reshape(x_BKGs.shape[0], -1, *x_BKGs.shape[3:])


def _group_heads(x_BHs: Array, num_kv_heads: int) -> Array:
    return x_BHs.reshape(x_BHs.shape[0], num_kv_heads, -1, *x_BHs.shape[2:])


def _scores(ring: _Ring, q: Array, k: Array, mask: Array | None) -> tuple[Array, Array | float]:
    """Return the scaled, capped and masked scores, and the derivative of the cap."""
    scores, slope = capped(_einsum("bkgqd,bksd->bkgqs", q, k, _at_least_float32(q.dtype)) * ring.scale, ring.cap)
    return scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min), slope


def capped(logits: Array, cap: float | None) -> tuple[Array, Array | float]:
    """Return `cap tanh(logits / cap)` and its derivative. Source: Gemma Team 2024, "Gemma 2"."""
    if cap is None:
        return logits, 1.0
    tanh = jnp.tanh(logits / cap)
    return cap * tanh, 1 - tanh**2


def _tile_mask(ring: _Ring, size: int, visible: _Visibility, index: Array, masked: bool) -> Array | None:
    """Return the mask of a tile, or None if all queries see all keys. `masked` tiles are crossed by the causal mask."""
    mask = None
    if masked or visible.starts is not None:
        distance = _tile_distance(visible, size, index) + jnp.arange(size)[:, None] - jnp.arange(size)
        mask = distance >= 0 if ring.window is None else (distance >= 0) & (distance < ring.window)
    if visible.segments is None:
        return mask
    queries_Bs, keys_Bs = (take(x, tile) for x, tile in zip(visible.segments, index, strict=True))
    same_B11ss = (queries_Bs[:, :, None] == keys_Bs[:, None])[:, None, None]
    return same_B11ss if mask is None else mask & same_B11ss


def _tile_distance(visible: _Visibility, size: int, index: Array) -> Array:
    """Return the position of the first query of a tile, minus the position of its first key."""
    i, j = index
    if visible.starts is None:
        return (i - j) * size
    return take(visible.starts[0], i) - take(visible.starts[1], j)


def _einsum(formula: str, a: Array, b: Array, dtype: jnp.dtype) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=dtype)


def _add(tiles: Array, new: Array, index: Array) -> Array:
    return put(tiles, take(tiles, index) + new.astype(tiles.dtype), index)


# ---- Helpers and checks ----------------------------------------------------------------------------------------------


def _nearest_divisor(length: int, target: int) -> int:
    divisors = [size for size in range(1, length + 1) if length % size == 0]
    return min(divisors, key=lambda size: max(size / target, target / size))


def _at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _full_like(x: Array, shape: tuple[int, ...], value: float, dtype: jnp.dtype) -> Array:
    """Return a constant that varies over the same mesh axes as x, as loop carries must."""
    return varying(jnp.full(shape, value, dtype), tuple(sorted(jax.typeof(x).manual_axis_type.varying)))


def _check_ring_options(
    length: int, order: str, causal: Any, scale: Any, tile: Any, kernel: Any, **limits: Any
) -> None:
    where, used = "ring_attention", " and ".join(name for name, value in limits.items() if value is not None)
    check_choice(where, "the order of positions", ORDERS, order=order)
    check_bool(where, "the causal mask is applied", causal=causal)
    if tile is not None:
        check_positive_int(where, "a number of positions", tile=tile)
    is_wrong, reason = scale is not None and not isinstance(scale, int | float), "`scale` must be known during tracing"
    check_cases(where, f"use scale={scale!r}", "wrong-type", (is_wrong, reason, "use a number, or scale the queries"))
    if order == "zigzag":
        check_two_chunks(where, length, 1)
    case = kernel is not None and used, "tile kernels do not support these options", "leave out the kernel"
    check_cases(where, f"use a kernel with {used}", "unsupported-feature", case)
    is_wrong, reason = "window" in used and not causal, "a window ends at the query's position, like the causal mask"
    check_cases(where, "use a window with causal=False", "conflict", (is_wrong, reason, "leave out one of them"))


def _check_arrays(where: str, q: Array, k: Array, v: Array, window: Any, cap: Any, segments: Any, sinks: Any) -> None:
    shapes = f"attend with q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}, v {v.dtype}{list(v.shape)}"
    differ = (*q.shape[:2], *q.shape[3:]) != (*k.shape[:2], *k.shape[3:])
    check_cases(
        where, shapes, "wrong-shape",
        (not q.ndim == k.ndim == v.ndim == 4, "the dims must be [batch, positions, heads, head width]", "reshape them"),
        (k.shape != v.shape, "keys and values must have the same shape", "pad the narrower heads with zeros"),
        (differ, "queries and keys must have equal batch, positions and head width", "shard them in the same way"),
        (0 in (*q.shape, *k.shape), "a dim is empty", "use sizes of at least 1"),
    )  # fmt: skip
    check_divides(where, shapes, q.shape[2], k.shape[2], "use a multiple of the key/value heads as query heads")
    is_floating = q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)
    check_cases(where, shapes, "wrong-dtype", (not is_floating, "the dtypes must be equal and floating", "cast them"))
    for size in window.sizes if isinstance(window, WindowChoice) else (window,):
        if size is not None:
            check_positive_int(where, "a number of positions", window=size)
    if cap is not None:
        check_number(where, "50.0", cap=cap)
    if sinks is not None:
        case = jnp.shape(sinks) != q.shape[2:3], f"q has {q.shape[2]} heads", "use a number for each query head"
        check_cases(where, f"use sinks {list(jnp.shape(sinks))}", "wrong-shape", case)
    if segments is not None:
        dtype, shape, fix = jnp.result_type(segments), jnp.shape(segments), "use one integer per position"
        requested, reason = f"use segments {dtype}{list(shape)}", f"q has batch and positions {list(q.shape[:2])}"
        case = not jnp.issubdtype(dtype, jnp.integer), "segments must be integers", fix
        check_cases(where, requested, "wrong-dtype", case)
        check_cases(where, requested, "wrong-shape", (shape != q.shape[:2], reason, fix))
