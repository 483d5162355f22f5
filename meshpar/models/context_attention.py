"""The decoders with their sequence split over devices: its order on the way in and out, and attention round the ring.

    tokens ─► zigzag order ─► layers, each position beside its own ─► final norm ─► natural order ─► logits, loss
                                └─ attention: keys and values round the ring

Tokens are replicated over the axes that split the sequence, so they are put into zigzag order where they are; hidden
states go back in two messages a step. In between only attention looks across positions, and knows which rank has which.

All of this is for rules that split the sequence inside attention (`attn_seq`). Where they keep it whole there, it stays
in its natural order everywhere, and heads are split over its axes instead:

    tokens ─► layers, each position beside its own ─► final norm ─► logits, loss
                └─ attention: heads scattered and the sequence gathered by XLA, and back

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from meshpar.collectives import from_zigzag, ring_attention, zigzag
from meshpar.collectives.attention import TileKernel
from meshpar.parallel.context_parallelism import repeats
from meshpar.sharding.context import ambient, constrain, spec_of
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.types import axis_sizes, problem, spec_axes


def sequence_axes(x: Array, name: str = "attn_seq") -> tuple[str, ...]:
    """Mesh axes of more than one rank over which the rules in force split the sequence of x `[B, T, ...]`.

    That is inside attention, where keys and values then go round a ring; for `name="seq"` around it.
    """
    here = ambient()
    if here is None or here.mesh.size == 1:
        return ()
    spec = spec_of(x, None, name, *[None] * (x.ndim - 2))
    return tuple(axis for axis in spec_axes(spec[1]) if axis_sizes(here.mesh)[axis] > 1)


def entered(
    tokens_BT: Integer[Array, "B T"], positions_BT: Int[Array, "B T"] | None, segments_BT: Int[Array, "B T"] | None
) -> tuple[Integer[Array, "B T"], Int[Array, "B T"] | None, Int[Array, "B T"] | None]:
    """Tokens, their positions and segments in the order in which the layers take a whole sequence.

    Positions that are not given begin anew in every segment.

    Raises:
      ValueError: T is not a multiple of two chunks for every rank of the axes that split it.
    """
    if positions_BT is None and segments_BT is not None:
        positions_BT = positions_in(segments_BT)
    axes = sequence_axes(tokens_BT)
    if not axes:
        return tokens_BT, positions_BT, segments_BT
    num_ranks = _check_length(tokens_BT, axes)
    if positions_BT is None:
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions_BT = constrain(zigzag(positions_1T, num_ranks), None, "seq")
    else:
        positions_BT = constrain(zigzag(positions_BT, num_ranks), "batch", "seq")
    if segments_BT is not None:
        segments_BT = constrain(zigzag(segments_BT, num_ranks), "batch", "seq")
    return constrain(zigzag(tokens_BT, num_ranks), "batch", "seq"), positions_BT, segments_BT


def positions_in(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that begin anew wherever the number of the segment changes along a row."""
    at_T = jnp.arange(segments_BT.shape[1])
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return at_T - jax.lax.cummax(jnp.where(is_first_BT, at_T, 0), axis=1)


def left(h_BTE: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Hidden states of a whole sequence, from the order of the layers back to the natural one."""
    axes = sequence_axes(h_BTE)
    if not axes:
        return h_BTE
    spec = spec_of(h_BTE, "batch", "seq", "act_embed")
    return per_device(functools.partial(from_zigzag, axis=axes, dim=1), (spec,), spec)(h_BTE)


def ring(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKD: Float[Array, "B T K D"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    kernel: TileKernel | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention over a sequence in zigzag order, split over `sequence_axes`; the rest as in `ring_attention`.

    Per device where rows and heads are split too: both are apart from each other, so nothing is left to the compiler.
    Where rules split query heads and not key heads, heads stay the compiler's, unless the tiles are a library's kernel.
    """
    axes, more = sequence_axes(q_BTHD), () if segments_BT is None else (segments_BT,)

    def attention(q: Array, k: Array, v: Array, segments: Array | None = None) -> Array:
        return ring_attention(q, k, v, axis=axes, scale=scale, window=window, cap=cap, segments=segments, kernel=kernel)

    if kernel is not None:
        return by_device(attention, q_BTHD, k_BTKD, kv_heads="attn_kv_heads")(q_BTHD, k_BTKD, v_BTKD)
    q = spec_of(q_BTHD, "batch", "attn_seq", "attn_heads", None)
    kv = spec_of(k_BTKD, "batch", "attn_seq", "attn_kv_heads", None)
    if q[2] != kv[2]:
        q = kv = PartitionSpec(*q[:2])
    rows = [PartitionSpec(*q[:2])] * len(more)
    return per_device(attention, (q, kv, kv, *rows), q)(q_BTHD, k_BTKD, v_BTKD, *more)


def by_device(
    kernel: Callable[..., Array],
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    *,
    kv_heads: str,
    check_vma: bool = True,
) -> Callable[..., Array]:
    """A kernel for attention, given each device's own rows, heads, and positions where they are split.

    The compiler cannot split a library's kernel, so nothing is left to it: the region is manual over the whole mesh.

    Args:
      kernel: of queries, keys and values `[B, T, H or K, width]`, and of more arrays `[B, T]` where it is given some.
      q_BTHD, k_BTKD: as they are laid out.
      kv_heads: logical name of the heads of keys. Where the rules keep them in fewer parts than those of queries, every
        device has all and takes those of its queries.
      check_vma: as in `jax.shard_map`.
    """
    if ambient() is None:
        return kernel
    q = spec_of(q_BTHD, "batch", "attn_seq", "attn_heads", None)
    kv = spec_of(k_BTKD, "batch", "attn_seq", kv_heads, None)
    rows = PartitionSpec(*q[:2])

    def split(kernel: Callable[..., Array], kv: PartitionSpec) -> Callable[..., Array]:
        how = {"all_axes": True, "check_vma": check_vma}
        return lambda *given: per_device(kernel, (q, kv, kv, *[rows] * len(given[3:])), q, **how)(*given)

    if q[2] == kv[2]:
        return split(kernel, q)
    axes = tuple(axis for axis in spec_axes(q[2]) if _size_of(axis) > 1)
    shared = q_BTHD.shape[2] // k_BTKD.shape[2]

    def with_own_heads(q_BTHD: Array, k_BTKD: Array, v_BTKW: Array, *more: Array) -> Array:
        num_heads = q_BTHD.shape[2]
        heads = (jax.lax.axis_index(axes) * num_heads + jnp.arange(num_heads)) // shared
        if num_heads % shared == 0 or shared % num_heads == 0:  # groups are not cut: one key/value head for each
            heads = heads[:: min(shared, num_heads)]
        return kernel(q_BTHD, *(jnp.take(x, heads, axis=2) for x in (k_BTKD, v_BTKW)), *more)

    return split(with_own_heads, rows)


def shared_heads(
    q_BTHD: Float[Array, "B T H D"], k_BTKD: Float[Array, "B T K D"], v_BTKW: Float[Array, "B T K W"]
) -> tuple[Array, Array, str]:
    """Keys and values for attention on whole sequences, and whose heads they go with: `heads` or `kv_heads`.

    Where attention gathers the sequence and the rules keep heads of keys in fewer parts than those of queries, each is
    repeated until there is one for every rank.

    Raises:
      ValueError: query heads that cannot be scattered.
    """
    axes = _scattered_axes(q_BTHD)
    if not axes or _heads_spec(k_BTKD, "attn_kv_heads") == axes:
        return k_BTKD, v_BTKW, "kv_heads"
    times = repeats(q_BTHD.shape[2], k_BTKD.shape[2], math.prod(map(_size_of, axes)))
    return jnp.repeat(k_BTKD, times, axis=2), jnp.repeat(v_BTKW, times, axis=2), "heads"


def _scattered_axes(q_BTHD: Array) -> tuple[str, ...]:
    """Mesh axes over which attention splits query heads, where it gathers the sequence; none where it does not."""
    here = ambient()
    if here is None or not sequence_axes(q_BTHD, "seq"):
        return ()
    batch, seq, num_heads, width = q_BTHD.shape
    like = jax.ShapeDtypeStruct((batch, seq, num_heads * here.mesh.size, width), q_BTHD.dtype)
    axes = _heads_spec(like, "attn_heads")
    num_ranks = math.prod(map(_size_of, axes))
    if num_heads % num_ranks:
        fit = [str(ranks) for ranks in range(1, num_heads + 1) if num_heads % ranks == 0]
        where = f"attention of {num_heads} query heads"
        asked = f"scatter them over {' × '.join(f'`{axis}` ({_size_of(axis)})' for axis in axes)}"
        fix = f"let it be {', '.join(fit)} ranks, or use context_parallel(), whose ring takes any number"
        raise problem(where, asked, f"{num_heads} is not a multiple of {num_ranks}", fix)
    return axes


def _heads_spec(x_BTHD: Array | jax.ShapeDtypeStruct, heads: str) -> tuple[str, ...]:
    entry = spec_of(x_BTHD, "batch", "attn_seq", heads, "act_head_dim")[2]
    return tuple(axis for axis in spec_axes(entry) if _size_of(axis) > 1)


def check_lookup(table_VE: Float[Array, "V E"], tokens_BT: Integer[Array, "B T"]) -> None:
    """Raises `ValueError` for the lookup that XLA of jax 0.12 aborts on: split rows at split positions, when nested."""
    outer, axes = outer_axes(), sequence_axes(tokens_BT, "seq")
    if not outer or not axes or jax.__version_info__ < (0, 12):
        return
    rows = [axis for axis in spec_axes(spec_of(table_VE, "act_vocab", "act_embed")[0]) if _size_of(axis) > 1]
    if rows:
        raise problem(
            f"the embedding of shape {table_VE.shape} inside a shard_map (reduce_gradients='once' or quantize=...)",
            f"be split over {', '.join(rows)} and looked up at positions split over {', '.join(axes)}",
            f"the compiler of jax {jax.__version__} aborts on it",
            "use reduce_gradients='each_microbatch' and no quantize, keep it whole with "
            "mp.Rules(vocab=None, act_vocab=None), or use jax 0.10",
        )


def _size_of(axis: str) -> int:
    here = ambient()
    assert here is not None
    return axis_sizes(here.mesh)[axis]


def _check_length(tokens_BT: Array, axes: tuple[str, ...]) -> int:
    here = ambient()
    assert here is not None
    num_ranks = math.prod(axis_sizes(here.mesh)[axis] for axis in axes)
    length, unit = tokens_BT.shape[1], 2 * num_ranks
    if length % unit:
        raise problem(
            f"tokens of shape {tokens_BT.shape} dim 1 (`seq`)",
            f"split over {' × '.join(f'`{axis}`' for axis in axes)} ({num_ranks}) in zigzag order, two chunks a rank",
            f"{length} positions are not a multiple of {unit}",
            f"use sequences of {-(-length // unit) * unit}",
        )
    return num_ranks
