"""Attention tile by tile, over a sequence of one device or split over ranks: keys go round a ring, queries stay.

Work is done tile by tile: a tile is a run of queries against a run of keys, and what a mask rules out is on no list of
tiles. Softmax is taken online, in float32 at the least. The backward pass makes the tiles again from the saved
log-sum-exp of every query, and gradients of keys and values travel with them until they are home. A tile is plain
matmuls, or the kernel of a library, of which results are joined by their log-sum-exps.

Shape suffixes: n tiles of s positions each make up a rank's t positions; B batch, K key/value heads, G query heads for
each of them, D head width.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Dao et al.
2022, "FlashAttention", for the online softmax and its backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import Axis, check_choice, checked_count, ranks_of
from meshpar.collectives.wire import pass_on, put, take, varying, varying_alike
from meshpar.collectives.zigzag_order import check_two_chunks
from meshpar.sharding.types import problem

ORDERS = ("zigzag", "contiguous")

Tiles: TypeAlias = Int[Array, "P 2"]
"""(tile of queries, tile of keys) of P tiles."""
_Part: TypeAlias = Literal["all", "first", "second"]
"""Of a list: the whole of it, or one half."""
Carry = TypeVar("Carry")
TILE = 512
"""Positions in a tile of plain matmuls: scores of `B H 512²` are all that a device holds of them."""


class TileKernel(NamedTuple):
    """Attention of a run of queries to a run of keys, `[B, H, s, D]` and `[B, K, s, D]`, as a library's kernel does it.

    Both functions are given `scale` and `causal` by name; with `causal` both runs are of the same positions.
    """

    forward: Callable[..., tuple[Array, Array]]
    """(q, k, v) -> (o, the log-sum-exp of every query's scaled scores `[B, H, s]`)."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(q, k, v, o, lse, do) -> what the tile adds to (dq, dk, dv), where o and lse are of all keys, not of the tile's:
    scores less lse are then the logarithms of the weights that the whole row of the softmax has."""


def ring_attention(
    q: Float[Array, "B t H D"],
    k: Float[Array, "B t K D"],
    v: Float[Array, "B t K D"],
    *,
    axis: Axis,
    causal: bool = True,
    order: Literal["zigzag", "contiguous"] = "zigzag",
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    segments: Int[Array, "B t"] | None = None,
    tile: int | None = None,
    kernel: TileKernel | None = None,
) -> Float[Array, "B t H D"]:
    """Softmax attention of all queries to all keys of a sequence whose positions are split over the ranks.

        [B, T_X, H, D], 2 x [B, T_X, K, D] -> [B, T_X, H, D];  per device t = T/N for T
        forward   N-1 steps, (N-1) n bytes sent, n the keys and values of one rank
        backward  2(N-1) messages, (N-1) (n + m) bytes sent, m their gradients in float32 (float64 for float64)

    While one block of keys and values is worked on the next is under way. Under a causal mask in zigzag order every
    rank does half a block's work in every step but the first, with no branch: `2 B H D t² (N + s/t)` FLOPs in all (s
    positions in a tile), of `4 B H D t² N` without the mask; 2.5 times that backward.
    Beyond its arguments, result and two blocks of keys and values on their way, a rank holds the result in float32 and
    the scores of one tile, `B H s²` of them; backward, gradients in float32 and the scores of one tile twice. It keeps
    arguments, result and `B H t` log-sum-exps for the backward pass. It has no forward-mode or second derivative.

    Args:
      q, k, v: H is a multiple of K; query heads `[i G, (i+1) G)`, G = H/K, share key/value head i.
      axis: mesh axis, or several as one.
      causal: a position sees itself and those before it.
      order: which positions a rank has. "zigzag": chunks i and 2N-1-i of 2N (`zigzag` brings a sequence there). With
        "contiguous" rank i has the i-th of N parts; under a causal mask early ranks then wait for late ones.
      scale: of the scores before softmax; None: `D ** -0.5`.
      window, cap, segments: as for `blockwise_attention`, a window under a causal mask only. Every rank is sent the
        segments of all, `4 (N-1) B t` bytes. Tiles of other ranks that these hide are passed over.
      tile: positions in a tile: the divisor of a rank's t (of t/2 in zigzag order) that is nearest to this; None: 512,
        with a `kernel` as many as can be.
      kernel: what attends within a tile, as `meshpar.collectives.cudnn.TILES`; None: plain matmuls. Its results are
        added up in float32, each rounded to the dtype of q before. Not with a window, a cap or segments.

    Raises:
      ValueError: no such axis here, shapes that do not go together, an odd t in zigzag order, what a kernel cannot do.

    Sources: Liu et al. 2023, "Ring Attention"; Brandon et al. 2023, "Striped Attention", for the balance.
    """
    num_ranks = ranks_of("ring_attention", axis)
    _check("ring_attention", q, k, v)
    _check_limits("ring_attention", q, window, cap, segments)
    _check_ring(q.shape[1], order=order, causal=causal, scale=scale, tile=tile)
    _check_together(causal, kernel, window=window, cap=cap, segments=segments)
    length = q.shape[1] // 2 if order == "zigzag" else q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ring = _Ring(axis, num_ranks, causal, order, scale, window, cap, kernel)
    tile = tile or (TILE if kernel is None else length)
    q, k, v = varying_alike(axis, q, k, v)
    with jax.named_scope("ring_attention"):
        return _by_tiles(ring, q, k, v, segments, _nearest_divisor(length, tile))


def blockwise_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    segments: Int[Array, "B T"] | None = None,
    tile: int = TILE,
) -> Float[Array, "B T H D"]:
    """Causal softmax attention in memory that grows with T and not with its square: the ring's tiles, on one rank.

    Tiles that the causal mask or the window rules out are not worked on: `2 B H D T (T + s)` FLOPs without a window, s
    positions in a tile, and 2.5 times that backward. Beyond its arguments and results it holds the result in float32
    and the scores of one tile, as `ring_attention`, whose derivatives it has.

    Args:
      q, k, v, scale: as for `ring_attention`.
      window: a position sees itself and the `window - 1` before it; None: all before it.
      cap: scores s become `cap tanh(s / cap)` before the mask; None: they stay.
      segments: whole numbers; positions see those of the same number only. Sequences packed into one row, say.
      tile: positions in a tile; a last tile is filled up.

    Raises:
      ValueError: shapes that do not go together.

    Sources: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory"; Dao et al. 2022, "FlashAttention";
    Gemma Team 2024, "Gemma 2", for the cap.
    """
    _check("blockwise_attention", q, k, v)
    _check_limits("blockwise_attention", q, window, cap, segments)
    size = min(checked_count("blockwise_attention", "tile", tile), q.shape[1])
    ring = _Ring((), 1, True, "contiguous", q.shape[-1] ** -0.5 if scale is None else scale, window, cap)
    with jax.named_scope("blockwise_attention"):
        return _by_tiles(ring, q, k, v, segments, size)


def _by_tiles(ring: _Ring, q: Array, k: Array, v: Array, segments: Array | None, size: int) -> Array:
    beyond = -q.shape[1] % size

    def cut(x: Array) -> Array:
        # What fills up stands behind all positions, so none sees it.
        return _cut(jnp.pad(x, [(0, 0), (0, beyond)] + [(0, 0)] * (x.ndim - 2)) if beyond else x, size)

    q_nBKGsD = cut(q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]))
    numbers = None
    if segments is not None:
        mine_nBs = cut(segments[..., None])[..., 0]
        numbers = _Segments(mine_nBs, lax.all_gather(mine_nBs, ring.axis) if ring.num_ranks > 1 else mine_nBs[None])
    o_nBKGsD = _attention(ring, q_nBKGsD, jnp.stack([cut(k), cut(v)], axis=1), numbers)
    o = jnp.moveaxis(o_nBKGsD, (0, 4), (1, 2)).reshape(q.shape[0], -1, *q.shape[2:])
    return o[:, : q.shape[1]] if beyond else o


def _check_limits(where: str, q: Array, window: int | None, cap: float | None, segments: Array | None) -> None:
    if window is not None:
        checked_count(where, "window", window)
    if cap is not None and not cap > 0:
        raise problem(f"{where}(cap={cap!r})", "bend scores by it", "it is above 0", "use 50.0, say, or None")
    if segments is not None and (
        jnp.shape(segments) != q.shape[:2] or not jnp.issubdtype(jnp.result_type(segments), jnp.integer)
    ):
        given = f"{jnp.result_type(segments)}{list(jnp.shape(segments))}"
        exists = f"they are whole numbers, {list(q.shape[:2])}"
        raise problem(f"{where}(segments=...)", f"take {given}", exists, "give one number for every position")


class _Ring(NamedTuple):
    """What does not depend on arrays."""

    axis: Axis
    num_ranks: int
    causal: bool
    order: str
    scale: float
    window: int | None = None
    cap: float | None = None
    kernel: TileKernel | None = None

    def next(self, x: Array) -> Array:
        """Of the rank before: after s steps the block here is that of rank i - s."""
        return pass_on(x, self.axis, 1, self.num_ranks)

    def starts(self, rank: Any, n: int, size: int) -> Int[Array, " n"]:
        """Where in the whole sequence each of a rank's n tiles begins."""
        at = jnp.arange(n)
        if self.order == "contiguous":
            return (rank * n + at) * size
        half = n // 2
        return jnp.where(at < half, rank * half + at, (2 * self.num_ranks - 1 - rank) * half + at - half) * size


class _Segments(NamedTuple):
    """To which sequence of a row positions belong."""

    mine_nBs: Int[Array, "n B s"]
    all_NnBs: Int[Array, "N n B s"]


class _Sight(NamedTuple):
    """What limits who sees whom, of a rank's queries and the keys at hand, beside the causal mask."""

    starts: tuple[Array, Array] | None
    """Where tiles of queries and of keys begin; None: as among a rank's own, or not asked for."""
    segments: tuple[Array, Array] | None
    """Of queries and keys `[n, B, s]`."""


def _sight(ring: _Ring, q: Array, segments: _Segments | None, s: Any) -> _Sight:
    """Of the keys of the rank s before this one."""
    if ring.num_ranks == 1:
        return _Sight(None, None if segments is None else (segments.mine_nBs,) * 2)
    rank = lax.axis_index(ring.axis)
    whose = (rank - s) % ring.num_ranks
    starts = None
    if ring.window is not None:
        starts = (ring.starts(rank, len(q), q.shape[-2]), ring.starts(whose, len(q), q.shape[-2]))
    return _Sight(starts, None if segments is None else (segments.mine_nBs, take(segments.all_NnBs, whose)))


# ---- Forward and backward: one walk round the ring each. kv is [n, 2, B, K, s, D]: one message for both. -------------


class _Softmax(NamedTuple):
    """An online softmax: what the tiles so far add up to."""

    sum_nBKGsD: Array
    """Of values, weighed by `exp(score - top)`."""
    top_nBKGs: Array
    """The highest score."""
    total_nBKGs: Array
    """Of the weights."""


class _Gradients(NamedTuple):
    """What the tiles so far add to the gradients of a rank's queries, and of a block of keys and values."""

    q_nBKGsD: Array
    kv_n2BKsD: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, q: Array, kv: Array, segments: _Segments | None) -> Array:
    return _forward(ring, q, kv, segments)[0]


def _forward(ring: _Ring, q: Array, kv: Array, segments: _Segments | None) -> tuple[Array, tuple[Any, ...]]:
    N, wide = ring.num_ranks, _at_least_float32(q.dtype)
    sight = functools.partial(_sight, ring, q, segments)

    def step(s: Any, held: tuple[Array, _Softmax], *, is_last: bool = False) -> tuple[Array, _Softmax]:
        kv, softmax = held
        coming = kv if is_last else ring.next(kv)
        return coming, _in_step(ring, s, q, sight(s), functools.partial(_tile_forward, ring, q, kv), softmax)

    coming = ring.next(kv) if N > 1 else kv
    softmax = _Softmax(
        _full_like(q, q.shape, 0, wide),
        _full_like(q, q.shape[:-1], -np.inf, wide),
        _full_like(q, q.shape[:-1], 0, wide),
    )
    softmax = _own(ring, q, functools.partial(_tile_forward, ring, q, kv, sight(0)), softmax)
    if N > 1:
        held = _loop(1, N - 1, step, (coming, softmax))
        _, softmax = step(N - 1, held, is_last=True)
    o = (softmax.sum_nBKGsD / softmax.total_nBKGs[..., None]).astype(q.dtype)
    # Named, so that a policy can keep what the backward pass would run the tiles again for.
    o, lse = (checkpoint_name(x, "attention") for x in (o, softmax.top_nBKGs + jnp.log(softmax.total_nBKGs)))
    return o, (q, kv, o, lse, segments)


def _backward(ring: _Ring, saved: tuple[Any, ...], do: Array) -> tuple[Array, Array, None]:
    """The gradients of a block travel one step behind it, and take in those of every rank on their way."""
    q, kv, o, lse, segments = saved
    N, wide = ring.num_ranks, _at_least_float32(q.dtype)
    rows = (q, do, lse, jnp.sum(do.astype(wide) * o.astype(wide), axis=-1) if ring.kernel is None else o)
    none = _full_like(kv, kv.shape, 0, wide)
    sight = functools.partial(_sight, ring, q, segments)

    def visit(s: Any, kv: Array, gradients: _Gradients, part: _Part) -> _Gradients:
        return _in_step(ring, s, q, sight(s), functools.partial(_tile_backward, ring, rows, kv), gradients, part)

    def step(s: Any, held: tuple[Array, Array, Array], *, is_last: bool = False) -> tuple[Array, Array, Array]:
        # Gradients arrive during the first half of the work and the next block during the second: XLA has one permute
        # under way at a time on GPUs. Without the barriers it would send both as one, or one while nothing else runs.
        kv, dq, leaving = held
        kv, leaving = lax.optimization_barrier((kv, leaving))
        arriving = ring.next(leaving)
        dq, dkv = visit(s, kv, _Gradients(dq, none), "first")
        kv, dq, dkv = lax.optimization_barrier((kv, dq, dkv + arriving))
        coming = kv if is_last else ring.next(kv)
        return coming, *visit(s, kv, _Gradients(dq, dkv), "second")

    # The rank's own tiles in two parts: one while the first block arrives, one while the last gradients come home.
    own = functools.partial(_tile_backward, ring, rows, kv, sight(0))
    coming = ring.next(kv) if N > 1 else kv
    dq, mine = _own(ring, q, own, _Gradients(_full_like(q, q.shape, 0, wide), none), "first")
    home = none
    if N > 1:
        after = ring.next(coming) if N > 2 else coming
        held = (after, *visit(1, coming, _Gradients(dq, none), "all"))
        held = _loop(2, N - 1, step, held)
        _, dq, leaving = step(N - 1, held, is_last=True) if N > 2 else held
        home = ring.next(leaving)
    dq, mine = _own(ring, q, own, _Gradients(dq, mine), "second")
    return dq.astype(q.dtype), (home + mine).astype(kv.dtype), None


_attention.defvjp(_forward, _backward)


def _loop(first: int, end: int, step: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """`lax.fori_loop`, out of reach of `jax.checkpoint`: a policy that keeps matmuls keeps every tile's in a scan."""

    def body(held: tuple[Array, Carry]) -> tuple[Array, Carry]:
        at, carry = held
        return at + 1, step(at, carry)

    return lax.while_loop(lambda held: held[0] < end, body, (jnp.int32(first), carry))[1] if end > first else carry


# ---- Lists of tiles --------------------------------------------------------------------------------------------------


def _own(ring: _Ring, q: Array, tile: Callable[..., Carry], carry: Carry, part: _Part = "all") -> Carry:
    """Work on a rank's queries and its own keys. Its positions rise in either order: a causal mask is a triangle."""
    n, size = len(q), q.shape[-2]
    window = n * size if ring.window is None else ring.window
    near = (window + size - 2) // size  # the first query of a tile sees so many tiles back
    pairs = [(i, j) for i in range(n) for j in range(n) if i - near <= j <= i or not ring.causal]
    pairs = {"all": pairs, "first": pairs[: len(pairs) // 2], "second": pairs[len(pairs) // 2 :]}[part]
    if ring.kernel is None or not ring.causal:
        return _each(_pairs(pairs), functools.partial(tile, ring.causal), carry)
    for mask in (True, False):  # of a kernel the mask is one or none: it runs through the tiles on the diagonal
        carry = _each(_pairs((i, j) for i, j in pairs if (i == j) is mask), functools.partial(tile, mask), carry)
    return carry


def _in_step(
    ring: _Ring, s: Any, q: Array, sight: _Sight, work: Callable[..., Carry], carry: Carry, part: _Part = "all"
) -> Carry:
    """Work on the tiles of a rank's queries and the keys of the rank s before it. No causal mask runs through them."""
    n, size = len(q), q.shape[-2]

    def tile(carry: Carry, at: Array) -> Carry:
        seen = functools.partial(work, sight, False)
        if sight == (None, None):
            return seen(carry, at)
        return lax.cond(_may_see(ring, size, sight, at), seen, lambda carry, at: carry, carry, at)

    everything = _part(_pairs(itertools.product(range(n), range(n))), part)
    if not ring.causal:
        return _each(everything, tile, carry)
    rank = lax.axis_index(ring.axis)
    is_earlier = (rank - s) % ring.num_ranks < rank
    if ring.order == "contiguous":
        return lax.cond(is_earlier, functools.partial(_each, everything, tile), lambda carry: carry, carry)
    # Late queries see the early keys of every rank. Of a rank before this one the early queries see the early keys
    # too, and of one behind it the late queries see the late keys: as many either way.
    early, late = range(n // 2), range(n // 2, n)
    always = _pairs(itertools.product(late, early))
    either = _pairs(itertools.product(early, early)) + jnp.where(is_earlier, 0, n // 2)
    return _each(_part(jnp.concatenate(varying_alike(ring.axis, always, either)), part), tile, carry)


def _pairs(pairs: Iterable[tuple[int, int]]) -> Tiles:
    return jnp.asarray(list(pairs), "int32").reshape(-1, 2)


def _part(tiles: Tiles, part: _Part) -> Tiles:
    half = len(tiles) // 2
    return {"all": tiles, "first": tiles[:half], "second": tiles[half:]}[part]


def _each(tiles: Tiles, tile: Callable[[Carry, Array], Carry], carry: Carry) -> Carry:
    """Tile after tile, so that the scores of one are all there is of scores."""
    return _loop(0, len(tiles), lambda p, carry: tile(carry, take(tiles, p)), carry)


# ---- One tile --------------------------------------------------------------------------------------------------------


def _tile_forward(
    ring: _Ring, q: Array, kv: Array, sight: _Sight, mask: bool, softmax: _Softmax, at: Array
) -> _Softmax:
    i, j = at
    k, v = take(kv, j)
    before = _Softmax(*(take(x, i) for x in softmax))
    if ring.kernel is None:
        # Where a tile shows a query nothing, its weights are those of a top that the next one lowers to nothing.
        scores, _ = _scores(ring, take(q, i), k, _seen(ring, q.shape[-2], sight, at, mask))
        top = jnp.maximum(before.top_nBKGs, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        total, values = weights.sum(-1), _einsum("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v, top.dtype)
    else:
        o, lse = ring.kernel.forward(_heads(take(q, i)), k, v, scale=ring.scale, causal=mask)
        o, lse = (_groups(x, k.shape[1]).astype(before.top_nBKGs.dtype) for x in (o, lse))
        top = jnp.maximum(before.top_nBKGs, lse)
        total = jnp.exp(lse - top)
        values = o * total[..., None]
    kept = jnp.exp(before.top_nBKGs - top)
    after = _Softmax(before.sum_nBKGsD * kept[..., None] + values, top, before.total_nBKGs * kept + total)
    return _Softmax(*(put(x, new, i) for x, new in zip(softmax, after, strict=True)))


def _tile_backward(
    ring: _Ring, rows: tuple[Array, ...], kv: Array, sight: _Sight, mask: bool, gradients: _Gradients, at: Array
) -> _Gradients:
    i, j = at
    q, do, lse, o = (take(x, i) for x in rows)
    k, v = take(kv, j)
    if ring.kernel is None:
        dq, dk, dv = _plain_backward(ring, q, k, v, o, lse, do, _seen(ring, q.shape[-2], sight, at, mask))
    else:
        given = (_heads(q), k, v, _heads(o), _heads(lse), _heads(do))
        dq, dk, dv = ring.kernel.backward(*given, scale=ring.scale, causal=mask)
        dq = _groups(dq, k.shape[1])
    return _Gradients(_added(gradients.q_nBKGsD, dq, i), _added(gradients.kv_n2BKsD, jnp.stack([dk, dv]), j))


def _plain_backward(
    ring: _Ring, q: Array, k: Array, v: Array, do_o: Array, lse: Array, do: Array, seen: Array | None
) -> tuple[Array, Array, Array]:
    """Of a kernel's arguments, but instead of o the sum of `do * o`, all that is needed of it."""
    scores, slope = _scores(ring, q, k, seen)
    weights = jnp.exp(scores - lse[..., None])
    d_weights = _einsum("bkgqd,bksd->bkgqs", do, v, lse.dtype)
    d_scores = (weights * (d_weights - do_o[..., None]) * slope * ring.scale).astype(q.dtype)
    dq = _einsum("bkgqs,bksd->bkgqd", d_scores, k, lse.dtype)
    dk = _einsum("bkgqs,bkgqd->bksd", d_scores, q, lse.dtype)
    dv = _einsum("bkgqs,bkgqd->bksd", weights.astype(do.dtype), do, lse.dtype)
    return dq, dk, dv


def _heads(x_BKGs: Array) -> Array:
    return x_BKGs.reshape(x_BKGs.shape[0], -1, *x_BKGs.shape[3:])


def _groups(x_BHs: Array, num_kv_heads: int) -> Array:
    return x_BHs.reshape(x_BHs.shape[0], num_kv_heads, -1, *x_BHs.shape[2:])


def _scores(ring: _Ring, q: Array, k: Array, seen: Array | None) -> tuple[Array, Array | float]:
    """Scaled scores of what is seen, and by what their gradients are to be multiplied for the cap's sake."""
    scores, slope = capped(_einsum("bkgqd,bksd->bkgqs", q, k, _at_least_float32(q.dtype)) * ring.scale, ring.cap)
    return scores if seen is None else jnp.where(seen, scores, jnp.finfo(scores.dtype).min), slope


def capped(logits: Array, cap: float | None) -> tuple[Array, Array | float]:
    """`cap tanh(logits / cap)` and its derivative. Gemma Team 2024, "Gemma 2"."""
    if cap is None:
        return logits, 1.0
    bent = jnp.tanh(logits / cap)
    return cap * bent, 1 - bent**2


def _seen(ring: _Ring, size: int, sight: _Sight, at: Array, mask: bool) -> Array | None:
    """Which keys of a tile its queries see; None: all. `mask`: the causal one runs through the tile."""
    seen = None
    if mask or sight.starts is not None:
        ahead = _first_ahead(sight, size, at) + jnp.arange(size)[:, None] - jnp.arange(size)
        seen = ahead >= 0 if ring.window is None else (ahead >= 0) & (ahead < ring.window)
    if sight.segments is None:
        return seen
    queries_Bs, keys_Bs = (take(x, tile) for x, tile in zip(sight.segments, at, strict=True))
    same_B11ss = (queries_Bs[:, :, None] == keys_Bs[:, None])[:, None, None]
    return same_B11ss if seen is None else seen & same_B11ss


def _may_see(ring: _Ring, size: int, sight: _Sight, at: Array) -> Array:
    """Whether any query of a tile may see any key, by the window and by the lowest and highest numbers of segments."""
    may = jnp.array(True)
    if sight.starts is not None:
        assert ring.window is not None
        may &= _first_ahead(sight, size, at) - (size - 1) < ring.window
    if sight.segments is not None:
        queries_Bs, keys_Bs = (take(x, tile) for x, tile in zip(sight.segments, at, strict=True))
        may &= ((queries_Bs.min(1) <= keys_Bs.max(1)) & (keys_Bs.min(1) <= queries_Bs.max(1))).any()
    return may


def _first_ahead(sight: _Sight, size: int, at: Array) -> Array:
    """By how much the first query of a tile is behind the first key in the sequence."""
    i, j = at
    if sight.starts is None:
        return (i - j) * size
    return take(sight.starts[0], i) - take(sight.starts[1], j)


def _einsum(formula: str, a: Array, b: Array, wide: jnp.dtype) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=wide)


def _added(tiles: Array, new: Array, at: Array) -> Array:
    return put(tiles, take(tiles, at) + new.astype(tiles.dtype), at)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _cut(x: Array, size: int) -> Array:
    """`[B, t, ..., D] -> [n, B, ..., s, D]`: a tile is one run of memory, laid out as a batch of matmuls takes it."""
    tiles = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(tiles, (1, 2), (0, -2))


def _nearest_divisor(length: int, wanted: int) -> int:
    divisors = [size for size in range(1, length + 1) if length % size == 0]
    return min(divisors, key=lambda size: max(size / wanted, wanted / size))


def _at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _full_like(x: Array, shape: tuple[int, ...], value: float, dtype: jnp.dtype) -> Array:
    """A constant that varies over the axes over which x does, as what a loop carries must."""
    return varying(jnp.full(shape, value, dtype), tuple(sorted(jax.typeof(x).manual_axis_type.varying)))


def _check_ring(length: int, *, order: str, causal: Any, scale: Any, tile: Any) -> None:
    check_choice("ring_attention", "order", order, ORDERS)
    if tile is not None:
        checked_count("ring_attention", "tile", tile)
    if not isinstance(causal, bool):
        raise problem("ring_attention", f"use causal={causal!r}", "it is True or False", "give one of them")
    if scale is not None and not isinstance(scale, int | float):
        exists = "it is a number that is known while tracing"
        raise problem("ring_attention", f"use scale={scale!r}", exists, "give one, or scale the queries")
    if order == "zigzag":
        check_two_chunks("ring_attention", length, 1)


def _check_together(causal: bool, kernel: Any, *, window: Any, cap: Any, segments: Any) -> None:
    asked = [name for name, value in (("window", window), ("cap", cap), ("segments", segments)) if value is not None]
    if kernel is not None and asked:
        exists = "a kernel for tiles takes none"
        raise problem(
            "ring_attention(kernel=...)", f"attend with {' and '.join(asked)}", exists, "leave out the kernel"
        )
    if window is not None and not causal:
        exists = "a window is of positions before a query, as a causal mask leaves them"
        raise problem(f"ring_attention(window={window!r})", "use causal=False", exists, "leave out one of them")


def _check(where: str, q: Array, k: Array, v: Array) -> None:
    def bad(exists: str, fix: str) -> Exception:
        shapes = f"q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}, v {v.dtype}{list(v.shape)}"
        return problem(where, f"attend with {shapes}", exists, fix)

    if not q.ndim == k.ndim == v.ndim == 4:
        raise bad("each has four dims, [batch, positions, heads, head width]", "reshape them")
    if k.shape != v.shape:
        raise bad("keys and values travel as one array, so they have one shape", "pad the narrower heads with zeros")
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        raise bad("batch, positions and head width of queries and keys are the same", "split both the same way")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise bad(
            f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads", "give every group as many"
        )
    if 0 in q.shape:
        raise bad("there is nothing in them", "give every dim one entry at least")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise bad("they are of one floating dtype", "cast them, to bfloat16 say")
