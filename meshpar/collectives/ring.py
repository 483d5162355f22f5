"""All-gather and reduce-scatter with several algorithms, and the ring loops used by all-reduce.

In a ring of stride s (coprime with the number of ranks N), rank r sends to rank r + s (mod N) in each step. If several
rings run at the same time, each chunk is split into lanes, one for each ring. Recursive doubling and halving
(`tree.py`) send the same bytes in fewer steps if N is a power of two.

Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped

from meshpar.collectives import tree
from meshpar.collectives.kernel_checks import Axis, axis_names, check_only, check_op, ranks_of
from meshpar.collectives.wire import (
    Combine,
    flat_parts,
    join_parts,
    permute_parts,
    put,
    reduce_by_op,
    send_on_ring,
    split_parts,
    take,
    unflat,
    varying,
    xla_reduced,
)
from meshpar.hardware.algorithm_choice import XLA, choose
from meshpar.hardware.clusters import Profile
from meshpar.sharding.errors import check_cases, check_choice, check_positive_int
from meshpar.sharding.types import axis_sizes

AUTO = "auto"
RINGS = ("ring", "bidirectional")
GATHERS = (*RINGS, "recursive_doubling", XLA)
SCATTERS = (*RINGS, "recursive_halving", XLA)


def all_gather(
    x: Shaped[Array, "*dims"],
    *,
    axis: Axis,
    dim: int = 0,
    tiled: bool = True,
    algorithm: str = "ring",
    channels: int = 1,
    cluster: str | Profile | None = None,
) -> Shaped[Array, "*dims"]:
    """Gather the arrays of all ranks on every rank; the reference is `reference.all_gather`.

        [A_X, B] -> [A, B]
        per device [A/N, B] -> [A, B]  (dim 0; [B] -> [N, B] with tiled=False)
        N-1 steps, (N-1)/N n bytes sent, n the gathered array; log2 N steps and the same bytes with recursive doubling

    Args:
      axis: see `shift`.
      dim: the dim of the result along which the arrays are ordered by rank.
      tiled: whether arrays are concatenated. If not, they are stacked along a new dim.
      algorithm: `ring`; `bidirectional`, which sends half of the data each way round; `recursive_doubling`, if N is a
        power of two; `xla`, XLA's own collective; or `auto`, the algorithm that `choose` returns.
      channels: number of concurrent rings, or of pairs for "bidirectional". They use different links if N allows.
      cluster: for "auto", the interconnect, such as `h100:8x8`, or the path of a profile.

    Raises:
      MeshparError: the axis, dim or algorithm is unknown, N is not a power of two for recursive doubling, or the
        cluster for "auto" is unknown.
    """
    num_ranks = ranks_of("all_gather", axis)
    x = varying(x, axis)
    check_choice("all_gather", "the algorithm", (*GATHERS, AUTO), algorithm=algorithm)
    check_only("all_gather", algorithm, "channels", channels, RINGS)
    algorithm = resolve_algorithm("all_gather", algorithm, num_ranks * x.nbytes, axis, num_ranks, cluster)
    parts = _gather_by(algorithm, axis, num_ranks, channels)(x.reshape(-1))
    return join_parts("all_gather", parts.reshape(num_ranks, *x.shape), dim, tiled)


def reduce_scatter(
    x: Num[Array, "*dims"],
    *,
    axis: Axis,
    dim: int = 0,
    tiled: bool = True,
    op: str = "sum",
    algorithm: str = "ring",
    channels: int = 1,
    cluster: str | Profile | None = None,
) -> Num[Array, "*dims"]:
    """Reduce over all ranks and return a part of the result on each rank; the reference is `reference.reduce_scatter`.

        [A, B] {unreduced over X} -> [A_X, B]
        per device [A, B] -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps, (N-1)/N n bytes sent, n the input; log2 N steps and the same bytes with recursive halving

    Sums use the dtype of the array. Cast the array first if its precision is too low for the sum.

    Args:
      axis, channels, cluster: see `all_gather`.
      dim: the dim that is divided among the ranks.
      tiled: whether each rank receives a slice of the dim. If not, the dim has one entry per rank and is removed.
      op: `sum`, `mean`, `max` or `min`.
      algorithm: see `all_gather`, with `recursive_halving` in place of recursive doubling. XLA has no reduce-scatter
        for `max` and `min`, so "xla" all-reduces them.

    Raises:
      MeshparError: the axis, dim, op or algorithm is unknown, the dim is not divisible by N, the dtype does not support
        the op, N is not a power of two for recursive halving, or the cluster for "auto" is unknown.
    """
    num_ranks = ranks_of("reduce_scatter", axis)
    x = varying(x, axis)
    check_choice("reduce_scatter", "the algorithm", (*SCATTERS, AUTO), algorithm=algorithm)
    check_only("reduce_scatter", algorithm, "channels", channels, RINGS)
    check_op("reduce_scatter", op, x.dtype)
    parts = split_parts("reduce_scatter", x, dim, num_ranks, tiled)

    algorithm = resolve_algorithm("reduce_scatter", algorithm, x.nbytes, axis, num_ranks, cluster)

    def kernel(parts: jax.Array, combine: Combine) -> jax.Array:
        if algorithm == "recursive_halving":
            return tree.halving_reduce_scatter(parts, axis, combine)
        if algorithm != XLA:
            strides = ring_strides("reduce_scatter", algorithm, channels, num_ranks)
            return ring_reduce_scatter(parts, axis, combine, strides)
        if combine is lax.add:
            return lax.psum_scatter(parts, axis)
        return take(xla_reduced(parts, axis, combine), lax.axis_index(axis))

    gather = _gather_by(algorithm, axis, num_ranks, channels, kernel="reduce_scatter")
    flat = parts.reshape(num_ranks, math.prod(parts.shape[1:]))
    return reduce_by_op(kernel, flat, op, num_ranks, spread=gather).reshape(parts.shape[1:])


def resolve_algorithm(
    kernel: str, algorithm: str, payload_bytes: float, axis: Axis, num_ranks: int, cluster: str | Profile | None
) -> str:
    """Return `algorithm`, or for "auto" the algorithm that `choose` returns for the interconnect.

    `cluster` or the environment variable MESHPAR_CLUSTER names the interconnect. Without either, GPUs in the catalogue
    use their data sheets and CPU devices a measured default; other devices are an error. A context manager cannot set
    the interconnect, because jax's cache of compiled programs would ignore it.
    """
    if algorithm != AUTO:
        case = cluster is not None, "only the choice of 'auto' depends on the cluster", "leave out cluster"
        check_cases(kernel, f"use cluster with algorithm={algorithm!r}", "conflict", case)
        return algorithm
    if num_ranks == 1:
        return "ring"  # nothing is sent
    mesh = axis_sizes(jax.sharding.get_abstract_mesh())
    return choose(kernel, payload_bytes, num_ranks, cluster=cluster, axes=axis_names(axis), mesh=mesh).algorithm


def _gather_by(
    algorithm: str, axis: Axis, num_ranks: int, channels: int, *, kernel: str = "all_gather"
) -> Callable[[jax.Array], jax.Array]:
    """Return the all-gather `[c] -> [N, c]` of an algorithm."""
    if algorithm == XLA:
        return functools.partial(lax.all_gather, axis_name=axis)
    if algorithm in RINGS:
        strides = ring_strides(kernel, algorithm, channels, num_ranks)
        return functools.partial(ring_all_gather, axis=axis, num_ranks=num_ranks, strides=strides)
    reason, fix = "the number of ranks must be a power of two", "use a ring, or algorithm='auto'"
    requested, case = f"use algorithm={algorithm!r} on {num_ranks} ranks", (num_ranks & (num_ranks - 1), reason, fix)
    check_cases(kernel, requested, "unsupported-feature", case)
    return functools.partial(tree.doubling_all_gather, axis=axis, num_ranks=num_ranks)


def ring_all_reduce(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """All-reduce as a reduce-scatter and an all-gather in the same buffer; the reference is `reference.all_reduce`.

        [A] {unreduced over X} -> [A];  per device [A] -> [A], any shape
        2(N-1) steps, 2(N-1)/N n bytes sent

    The chunks are N equal slices of the flattened and padded array. A received chunk replaces a chunk that was sent.
    """

    def step(T: jax.Array | int, lanes: list[jax.Array], *, merge: Combine) -> list[jax.Array]:
        return [_all_reduce_step(lane, axis, stride, T, merge) for lane, stride in zip(lanes, strides, strict=False)]

    with jax.named_scope("ring_all_reduce"):
        lanes = _lanes(flat_parts(x, num_ranks), strides)
        lanes = lax.fori_loop(1, num_ranks, functools.partial(step, merge=combine), lanes)
        lanes = lax.fori_loop(num_ranks, 2 * num_ranks - 1, functools.partial(step, merge=_received), lanes)
        return unflat(jnp.concatenate(lanes, axis=-1), x)


def ring_sum(x: jax.Array, axis: Axis, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """All-reduce a sum as a reduce-scatter and an all-gather, each with its own buffer, for a cheap transpose.

    The transpose of `ring_all_reduce`, which has a single buffer, would add n elements in each step.
    """
    chunk = ring_reduce_scatter(flat_parts(x, num_ranks), axis, lax.add, strides)
    return unflat(ring_all_gather(chunk, axis, num_ranks, strides), x)


# ---------------------------------------------------------------------------------------------------------------------
# The loops. `parts` is [N, c] and `chunk` is [c]. In step T, rank r of a ring of stride s sends the chunk of rank
# r - s T. All rings share a loop, because separate loops would run sequentially.
# ---------------------------------------------------------------------------------------------------------------------


def ring_all_gather(chunk: jax.Array, axis: Axis, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """`[c] -> [N, c]`: gather the chunks of all ranks."""
    rank = lax.axis_index(axis)

    def pass_lane(slots: jax.Array, passing: jax.Array, stride: int, T: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrived = send_on_ring(passing, axis, stride, num_ranks)
        return put(slots, arrived, (rank - stride * (T + 1)) % num_ranks), arrived

    def step(T: jax.Array, lanes: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
        return [pass_lane(*lane, stride, T) for lane, stride in zip(lanes, strides, strict=False)]

    with jax.named_scope("ring_all_gather"):
        lanes = [(jnp.broadcast_to(lane, (num_ranks, *lane.shape)), lane) for lane in _lanes(chunk, strides)]
        lanes = lax.fori_loop(0, num_ranks - 1, step, lanes)
        return jnp.concatenate([slots for slots, _ in lanes], axis=-1)


def ring_reduce_scatter(parts: jax.Array, axis: Axis, combine: Combine, strides: Sequence[int]) -> jax.Array:
    """`[N, c] -> [c]`: reduce over ranks and return the local chunk."""
    num_ranks, rank = len(parts), lax.axis_index(axis)

    def in_order_of_use(lane: jax.Array, stride: int) -> jax.Array:
        return permute_parts(lane, (rank - stride * jnp.arange(1, num_ranks + 1)) % num_ranks)

    def step(partial: list[jax.Array], local: list[jax.Array]) -> tuple[list[jax.Array], None]:
        arrived = [send_on_ring(lane, axis, stride, num_ranks) for lane, stride in zip(partial, strides, strict=False)]
        return list(map(combine, arrived, local)), None

    with jax.named_scope("ring_reduce_scatter"):
        lanes = [in_order_of_use(lane, stride) for lane, stride in zip(_lanes(parts, strides), strides, strict=False)]
        chunk, _ = lax.scan(step, [lane[0] for lane in lanes], [lane[1:] for lane in lanes])
        return jnp.concatenate(chunk, axis=-1)


def _all_reduce_step(slots: jax.Array, axis: Axis, stride: int, T: jax.Array | int, merge: Combine) -> jax.Array:
    """Run step T of an all-reduce in the buffer `[N, c]`: send a chunk, and `merge` the received with the local one."""
    num_ranks, rank = len(slots), lax.axis_index(axis)
    outgoing, incoming = (rank - stride * T) % num_ranks, (rank - stride * (T + 1)) % num_ranks
    arrived = send_on_ring(take(slots, outgoing), axis, stride, num_ranks)
    return put(slots, merge(arrived, take(slots, incoming)), incoming)


def _received(arrived: jax.Array, local: jax.Array) -> jax.Array:
    return arrived


def ring_states(x: Num[Array, "*dims"], *, axis: Axis) -> Num[Array, "T N c"]:
    """Return the buffer of a ring all-reduce before its first step and after each of its 2(N-1) steps, to display it.

    per device [A] -> [2N-1, N, A/N], any shape
    """
    num_ranks = ranks_of("ring_states", axis)
    states = [flat_parts(varying(x, axis), num_ranks)]
    for step in range(1, 2 * num_ranks - 1):
        states.append(_all_reduce_step(states[-1], axis, 1, step, lax.add if step < num_ranks else _received))
    return jnp.stack(states)


def _lanes(x: jax.Array, strides: Sequence[int]) -> list[jax.Array]:
    """Split the last dim into a nearly equal, nonempty part for each ring."""
    return jnp.array_split(x, min(len(strides), max(x.shape[-1], 1)), axis=-1)


def ring_strides(kernel: str, algorithm: str, channels: int, num_ranks: int) -> tuple[int, ...]:
    """Return the strides of the rings of an algorithm. Rings of different strides share no link."""
    check_positive_int(kernel, "the number of rings", channels=channels)
    one_way = [stride for stride in range(1, num_ranks // 2 + 1) if math.gcd(stride, num_ranks) == 1] or [1]
    chosen = [one_way[channel % len(one_way)] for channel in range(channels)]
    return tuple(chosen) if algorithm == "ring" else tuple(s for stride in chosen for s in (stride, -stride))
