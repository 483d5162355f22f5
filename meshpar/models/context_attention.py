"""Context parallelism of the decoders: the order of the sequence, ring attention, and scattered heads.

If the rules shard the sequence inside attention (`attn_seq`), the layers process it in zigzag order:

    tokens ─► zigzag order ─► layers ─► final norm ─► natural order ─► logits, loss
                                └─ attention: keys and values circulate in a ring

Tokens are replicated over the context axes, so reordering them needs no communication. Reordering the hidden states
takes two messages per step. Only attention depends on the order of the positions.

If the rules shard the sequence only outside attention, it stays in natural order, and attention shards its heads over
the same axes:

    tokens ─► layers ─► final norm ─► logits, loss
                └─ attention: XLA scatters the heads and gathers the sequence, and the reverse afterwards

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from meshpar.collectives import from_zigzag, ring_attention, zigzag
from meshpar.collectives.attention import TileKernel, WindowChoice
from meshpar.parallel.context_parallelism import repeats
from meshpar.sharding.context import ambient, constrain, spec_of
from meshpar.sharding.errors import check_divides, problem
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.types import axis_sizes, num_shards, spec_axes


def sequence_axes(x: Array, name: str = "attn_seq") -> tuple[str, ...]:
    """Return the mesh axes with more than one device that shard the sequence of x under the current rules.

    `name` is "attn_seq" for the sequence inside attention, where the axes form the ring, or "seq" outside.
    """
    context = ambient()
    if context is None or context.mesh.size == 1:
        return ()
    return _axes(spec_of(x, None, name, *[None] * (x.ndim - 2))[1])


def prepare(
    tokens_BT: Array, positions_BT: Array | None, segments_BT: Array | None
) -> tuple[Array, Array | None, Array | None]:
    """Return tokens, positions and segment ids in the order in which the layers process a full sequence.

    By default, positions restart at each change of the segment id.
    """
    if positions_BT is None and segments_BT is not None:
        positions_BT = _restarted_positions(segments_BT)
    axes = sequence_axes(tokens_BT)
    if not axes:
        return tokens_BT, positions_BT, segments_BT
    num_ranks = _num_ranks(axes)
    length, unit = tokens_BT.shape[1], 2 * num_ranks
    requested = f"shard it over {axes} ({num_ranks} devices) in zigzag order, with two chunks on each device"
    fix = f"use sequences of length {-(-length // unit) * unit}"
    check_divides(f"tokens of shape {tokens_BT.shape}, dim 1 (`seq`)", requested, length, unit, fix)
    batch, positions = ("batch", positions_BT) if positions_BT is not None else (None, jnp.arange(length)[None])
    positions_BT = constrain(zigzag(positions, num_ranks), batch, "seq")
    segments_BT = reordered(segments_BT)
    return constrain(zigzag(tokens_BT, num_ranks), "batch", "seq"), positions_BT, segments_BT


def reordered(x_BT: Array | None) -> Array | None:
    """Return values of positions, such as segment ids, in the order in which the layers process a full sequence."""
    if x_BT is None or not (axes := sequence_axes(x_BT)):
        return x_BT
    # With axes inside and outside of a shard_map, XLA aborts if it may shard the positions before they are reordered.
    return constrain(zigzag(constrain(x_BT, "batch", None), _num_ranks(axes)), "batch", "seq")


def last_positions(positions_BT: Array | None, segments_BT: Array) -> Array | None:
    """Return the last position of the segment of each token, `[B, T]`, in the order of `prepare`."""
    positions_BT = _restarted_positions(segments_BT) if positions_BT is None else positions_BT
    index_T = jnp.arange(segments_BT.shape[1])
    is_last_BT = jnp.diff(segments_BT, axis=1, append=segments_BT[:, -1:] - 1) != 0
    end_BT = jax.lax.cummin(jnp.where(is_last_BT, index_T, index_T[-1]), axis=1, reverse=True)
    return reordered(jnp.take_along_axis(positions_BT, end_BT, axis=1))


def _restarted_positions(segments_BT: Array) -> Array:
    """Return positions that restart at each change of the segment id."""
    index_T = jnp.arange(segments_BT.shape[1])
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return index_T - jax.lax.cummax(jnp.where(is_first_BT, index_T, 0), axis=1)


def natural_order(h_BTE: Array) -> Array:
    """Restore the natural order of the hidden states of a full sequence."""
    axes = sequence_axes(h_BTE)
    if not axes:
        return h_BTE
    spec = spec_of(h_BTE, "batch", "seq", "act_embed")
    return per_device(functools.partial(from_zigzag, axis=axes, dim=1), (spec,), spec)(h_BTE)


def ring(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    segments_BT: Array | None = None,
    *,
    scale: float | None = None,
    window: int | WindowChoice | None = None,
    cap: float | None = None,
    sinks_H: Array | None = None,
    kernel: TileKernel | None = None,
) -> Array:
    """Compute causal ring attention over a sequence in zigzag order, sharded over `sequence_axes`.

    The `shard_map` is also manual over the axes that shard the batch and the heads. If query and key heads are sharded
    differently, the compiler partitions the heads, except with a library kernel.
    """
    axes = sequence_axes(q_BTHD)
    extra = (segments_BT, window if isinstance(window, WindowChoice) else None, sinks_H)

    def attention(
        q: Array, k: Array, v: Array, segments: Array | None, windows: WindowChoice | None, sinks: Any
    ) -> Array:
        options: dict[str, Any] = {"scale": scale, "window": windows or window, "cap": cap, "segments": segments}
        return ring_attention(q, k, v, axis=axes, sinks=sinks, kernel=kernel, **options)

    if kernel is not None:
        return by_device(attention, q_BTHD, k_BTKD, kv_heads="attn_kv_heads")(q_BTHD, k_BTKD, v_BTKD, *extra)
    q = spec_of(q_BTHD, "batch", "attn_seq", "attn_heads", None)
    kv = spec_of(k_BTKD, "batch", "attn_seq", "attn_kv_heads", None)
    if q[2] != kv[2]:
        q = kv = PartitionSpec(*q[:2])
    return per_device(attention, (q, kv, kv, *_extra_specs(q)), q)(q_BTHD, k_BTKD, v_BTKD, *extra)


def _extra_specs(q: PartitionSpec) -> tuple[PartitionSpec, ...]:
    """Return the specs of segments, windows and sinks."""
    return PartitionSpec(*q[:2]), PartitionSpec(), PartitionSpec(*q[2:3])


def by_device(
    kernel: Callable[..., Array], q_BTHD: Array, k_BTKD: Array, *, kv_heads: str, check_vma: bool = True
) -> Callable[..., Array]:
    """Wrap an attention kernel in a `shard_map` over all mesh axes, because XLA cannot partition library kernels.

    The arguments of the kernel are queries, keys and values `[B, T, H or K, D]`, segments `[B, T]` or None, a
    `WindowChoice` or None, and sinks `[H]` or None. If the key heads have fewer shards than the query heads, each
    device receives all key heads and selects the heads of the local queries.
    """
    if ambient() is None:
        return kernel
    q = spec_of(q_BTHD, "batch", "attn_seq", "attn_heads", None)
    kv = spec_of(k_BTKD, "batch", "attn_seq", kv_heads, None)

    def sharded(kernel: Callable[..., Array], kv: PartitionSpec) -> Callable[..., Array]:
        options = {"all_axes": True, "check_vma": check_vma}
        return lambda *arrays: per_device(kernel, (q, kv, kv, *_extra_specs(q)), q, **options)(*arrays)

    if q[2] == kv[2]:
        return sharded(kernel, q)
    axes = _axes(q[2])
    shared = q_BTHD.shape[2] // k_BTKD.shape[2]

    def with_local_heads(q_BTHD: Array, k_BTKD: Array, v_BTKW: Array, *extra: Any) -> Array:
        num_heads = q_BTHD.shape[2]
        heads = (jax.lax.axis_index(axes) * num_heads + jnp.arange(num_heads)) // shared
        if num_heads % shared == 0 or shared % num_heads == 0:  # each local key head serves equally many query heads
            heads = heads[:: min(shared, num_heads)]
        return kernel(q_BTHD, *(jnp.take(x, heads, axis=2) for x in (k_BTKD, v_BTKW)), *extra)

    return sharded(with_local_heads, PartitionSpec(*q[:2]))


def shared_heads(q_BTHD: Array, k_BTKD: Array, v_BTKW: Array) -> tuple[Array, Array, str]:
    """Return keys and values for attention on gathered sequences, and the logical name of their heads.

    If attention gathers the sequence and the key heads have fewer shards than the query heads, the key and value heads
    are repeated so that each device has at least one. Their name is then `heads` instead of `kv_heads`.
    """
    axes = _scattered_axes(q_BTHD)
    if not axes or _axes(spec_of(k_BTKD, "batch", "attn_seq", "attn_kv_heads", "act_head_dim")[2]) == axes:
        return k_BTKD, v_BTKW, "kv_heads"
    times = repeats(q_BTHD.shape[2], k_BTKD.shape[2], _num_ranks(axes))
    return jnp.repeat(k_BTKD, times, axis=2), jnp.repeat(v_BTKW, times, axis=2), "heads"


def _scattered_axes(q_BTHD: Array) -> tuple[str, ...]:
    """Return the mesh axes that shard query heads inside attention, or () if the sequence is not gathered."""
    context = ambient()
    if context is None or not sequence_axes(q_BTHD, "seq"):
        return ()
    batch, seq, num_heads, width = q_BTHD.shape
    like = jax.ShapeDtypeStruct((batch, seq, num_heads * context.mesh.size, width), q_BTHD.dtype)
    axes = _axes(spec_of(like, "batch", "attn_seq", "attn_heads", "act_head_dim")[2])
    num_ranks = _num_ranks(axes)
    if num_heads % num_ranks:
        divisors = [str(ranks) for ranks in range(1, num_heads + 1) if num_heads % ranks == 0]
        where, reason = f"attention with {num_heads} query heads", f"{num_heads} is not a multiple of {num_ranks}"
        requested = f"scatter the heads over {' × '.join(f'`{axis}` ({_num_ranks((axis,))})' for axis in axes)}"
        fix = f"use {', '.join(divisors)} devices, or context_parallel(), which supports any number of heads"
        raise problem(where, requested, reason, fix, code="indivisible")
    return axes


def check_lookup(table_VE: Array, tokens_BT: Array) -> None:
    """Refuse embedding lookups that crash XLA in jax 0.12: sharded tables and positions in a nested `shard_map`."""
    outer, axes = outer_axes(), sequence_axes(tokens_BT, "seq")
    if not outer or not axes or jax.__version_info__ < (0, 12):
        return
    rows = _axes(spec_of(table_VE, "act_vocab", "act_embed")[0])
    if rows:
        where = f"embedding of shape {table_VE.shape} inside a shard_map (reduce_gradients='once' or quantize=...)"
        requested = f"shard it over {', '.join(rows)} and the positions over {', '.join(axes)}"
        reason = f"the compiler of jax {jax.__version__} crashes on this lookup"
        fix = "replicate the table with mp.Rules(vocab=None, act_vocab=None), or use reduce_gradients='each_microbatch'"
        raise problem(where, requested, reason, fix, code="unsupported-feature")


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a spec that have more than one device."""
    return tuple(axis for axis in spec_axes(entry) if _num_ranks((axis,)) > 1)


def _num_ranks(axes: tuple[str, ...]) -> int:
    context = ambient()
    assert context is not None
    return num_shards(axes, axis_sizes(context.mesh))
