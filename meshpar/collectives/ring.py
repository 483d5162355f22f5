"""Ring algorithms: every rank sends to the next one at every step. Bandwidth-optimal.

All-gather and reduce-scatter also go by recursive doubling and halving (`tree.py`): the same bytes in fewer steps, for
a power of two of ranks.

N ranks. A ring of stride s goes from rank r to rank r + s (mod N), s coprime with N. Several rings at once cut every
chunk into as many lanes, each of which goes round its own ring.

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
from meshpar.collectives.auto import AUTO, XLA, picked
from meshpar.collectives.kernel_checks import Axis, check_choice, check_only, check_op, checked_count, ranks_of
from meshpar.collectives.wire import (
    Combine,
    cut,
    flat_parts,
    join,
    pass_on,
    put,
    reduced,
    reordered,
    take,
    unflat,
    varying,
    xla_reduced,
)
from meshpar.hardware.clusters import Profile
from meshpar.sharding.types import problem

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
    """Every rank gets the arrays of all ranks: each passes on what it has just received.

        [A_X, B] -> [A, B]
        per device [A/N, B] -> [A, B]  (dim 0; [B] -> [N, B] with tiled=False)
        N-1 steps, (N-1)/N n bytes sent, n the gathered array; log2 N steps, as many bytes by recursive doubling

    Args:
      axis: mesh axis, or several as one.
      dim: where the parts stand in the result, in the order of their ranks.
      tiled: whether they are laid end to end; if not, they are stacked along a new dim.
      algorithm: `ring`; `bidirectional`: half goes round one way and half the other, at the same time;
        `recursive_doubling`, for a power of two of ranks; `xla`, XLA's own collective; or `auto`, that of `choose`.
      channels: so many rings at once (pairs of rings when bidirectional), over different links where N allows.
      cluster: for `auto`: what the ranks are linked by, as `h100:8x8` or a profile's file (see `auto.py`).

    Raises:
      ValueError: no such axis here, dim or algorithm; an algorithm that N does not allow; `auto` with links unknown.
    """
    num_ranks = ranks_of("all_gather", axis)
    x = varying(x, axis)
    check_choice("all_gather", "algorithm", algorithm, (*GATHERS, AUTO))
    check_only("all_gather", algorithm, "channels", channels, RINGS)
    algorithm = picked("all_gather", algorithm, num_ranks * x.nbytes, axis, num_ranks, cluster)
    parts = _gather_by(algorithm, axis, num_ranks, channels)(x.reshape(-1))
    return join("all_gather", parts.reshape(num_ranks, *x.shape), dim, tiled)


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
    """Every rank gets its part of the reduction: a part gathers its terms on its way round to its owner.

        [A, B] {partial over X} -> [A_X, B]
        per device [A, B] -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps, (N-1)/N n bytes sent, n the array before; log2 N steps, as many bytes by recursive halving

    Sums are taken in the array's own dtype; cast it first where that is too coarse.

    Args:
      dim: the dim that is cut.
      tiled: whether parts are runs of the dim; if not, the dim has one entry for each rank and goes away.
      op: `sum`, `mean`, `max` or `min`.
      axis, channels, cluster: as for `all_gather`.
      algorithm: likewise, with `recursive_halving` for a power of two of ranks. XLA's own has no form for `max` and
        `min`, which it reduces at all ranks.

    Raises:
      ValueError: no such axis here, dim, op or algorithm; a dim that does not divide by N; an op the dtype has not; an
        algorithm that N does not allow; `auto` with links unknown.
    """
    num_ranks = ranks_of("reduce_scatter", axis)
    x = varying(x, axis)
    check_choice("reduce_scatter", "algorithm", algorithm, (*SCATTERS, AUTO))
    check_only("reduce_scatter", algorithm, "channels", channels, RINGS)
    check_op("reduce_scatter", op, x.dtype)
    parts = cut("reduce_scatter", x, dim, num_ranks, tiled)

    algorithm = picked("reduce_scatter", algorithm, x.nbytes, axis, num_ranks, cluster)
    kernel = _scatter_by(algorithm, axis, num_ranks, channels)
    back = "recursive_doubling" if algorithm == "recursive_halving" else algorithm
    flat = parts.reshape(num_ranks, math.prod(parts.shape[1:]))
    mine = reduced(kernel, flat, op, num_ranks, spread=_gather_by(back, axis, num_ranks, channels))
    return mine.reshape(parts.shape[1:])


def _gather_by(algorithm: str, axis: Axis, num_ranks: int, channels: int) -> Callable[[jax.Array], jax.Array]:
    if algorithm == XLA:
        return functools.partial(lax.all_gather, axis_name=axis)
    if algorithm == "recursive_doubling":
        _check_power_of_two("all_gather", algorithm, num_ranks)
        return functools.partial(tree.doubled, axis=axis, num_ranks=num_ranks)
    strides = ring_strides("all_gather", algorithm, channels, num_ranks)
    return functools.partial(gathered, axis=axis, num_ranks=num_ranks, strides=strides)


def _scatter_by(algorithm: str, axis: Axis, num_ranks: int, channels: int) -> Callable[[jax.Array, Combine], jax.Array]:
    if algorithm == XLA:
        return functools.partial(_xla_scattered, axis=axis)
    if algorithm == "recursive_halving":
        _check_power_of_two("reduce_scatter", algorithm, num_ranks)
        return lambda parts, combine: tree.halved(parts, axis, combine)
    strides = ring_strides("reduce_scatter", algorithm, channels, num_ranks)
    return lambda parts, combine: scattered(parts, axis, combine, strides)


def _xla_scattered(parts: jax.Array, combine: Combine, *, axis: Axis) -> jax.Array:
    """`[N, c] -> [c]`: XLA's own reduce-scatter of a sum. It has none of an extremum, which is reduced at all ranks."""
    if combine is lax.add:
        return lax.psum_scatter(parts, axis)
    return take(xla_reduced(parts, axis, combine), lax.axis_index(axis))


def _check_power_of_two(kernel: str, algorithm: str, num_ranks: int) -> None:
    if num_ranks & (num_ranks - 1):
        asked, fix = f"use algorithm={algorithm!r} on {num_ranks} ranks", "use a ring, or algorithm='auto'"
        raise problem(kernel, asked, f"ranks pair up anew at each step, and {num_ranks} is no power of two", fix)


def ring_all_reduce(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """A reduce-scatter, then an all-gather, both in the one buffer that holds the result in the end.

        [A] {partial over X} -> [A];  per device [A] -> [A]
        2(N-1) steps, 2(N-1)/N n bytes sent

    Any shape: chunks are runs of the flattened array, padded to N equal ones.
    """
    return unflat(_in_place(flat_parts(x, num_ranks), axis, combine, strides), x)


def ring_sum(x: jax.Array, axis: Axis, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """The same sum in two buffers, which is the one to transpose: in one, every step would add up n elements."""
    mine = scattered(flat_parts(x, num_ranks), axis, lax.add, strides)
    return unflat(gathered(mine, axis, num_ranks, strides), x)


# ---------------------------------------------------------------------------------------------------------------------
# The loops. `parts` is [N, c], `mine` is [c]. T counts steps; the chunk that is sent at step T is that of rank r - s T.
# All rings turn in one loop: loops of their own would run one after the other.
# ---------------------------------------------------------------------------------------------------------------------


def gathered(mine: jax.Array, axis: Axis, num_ranks: int, strides: Sequence[int]) -> jax.Array:
    """`[c] -> [N, c]`: the chunks of all ranks."""
    rank = lax.axis_index(axis)

    def turn(slots: jax.Array, passing: jax.Array, stride: int, T: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrived = pass_on(passing, axis, stride, num_ranks)
        return put(slots, arrived, (rank - stride * (T + 1)) % num_ranks), arrived

    def step(T: jax.Array, held: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
        return [turn(*lane, stride, T) for lane, stride in zip(held, strides, strict=False)]

    with jax.named_scope("ring_all_gather"):
        held = [(jnp.broadcast_to(lane, (num_ranks, *lane.shape)), lane) for lane in _lanes(mine, strides)]
        held = lax.fori_loop(0, num_ranks - 1, step, held)
        return jnp.concatenate([slots for slots, _ in held], axis=-1)


def scattered(parts: jax.Array, axis: Axis, combine: Combine, strides: Sequence[int]) -> jax.Array:
    """`[N, c] -> [c]`: this rank's chunk, reduced."""
    num_ranks, rank = len(parts), lax.axis_index(axis)

    def in_turn(lane: jax.Array, stride: int) -> jax.Array:
        return reordered(lane, (rank - stride * jnp.arange(1, num_ranks + 1)) % num_ranks)

    def step(passing: list[jax.Array], here: list[jax.Array]) -> tuple[list[jax.Array], None]:
        arrived = [pass_on(lane, axis, stride, num_ranks) for lane, stride in zip(passing, strides, strict=False)]
        return list(map(combine, arrived, here)), None

    with jax.named_scope("ring_reduce_scatter"):
        lanes = [in_turn(lane, stride) for lane, stride in zip(_lanes(parts, strides), strides, strict=False)]
        mine, _ = lax.scan(step, [lane[0] for lane in lanes], [lane[1:] for lane in lanes])
        return jnp.concatenate(mine, axis=-1)


def _in_place(parts: jax.Array, axis: Axis, combine: Combine, strides: Sequence[int]) -> jax.Array:
    """`[N, c] -> [N, c]`: all chunks reduced; each arriving chunk takes a slot that has been sent on already."""
    num_ranks = len(parts)

    def step(T: jax.Array | int, lanes: list[jax.Array], *, merge: Combine) -> list[jax.Array]:
        return [_turned(lane, axis, stride, T, merge) for lane, stride in zip(lanes, strides, strict=False)]

    with jax.named_scope("ring_all_reduce"):
        lanes = lax.fori_loop(1, num_ranks, functools.partial(step, merge=combine), _lanes(parts, strides))
        lanes = lax.fori_loop(num_ranks, 2 * num_ranks - 1, functools.partial(step, merge=_replaced), lanes)
        return jnp.concatenate(lanes, axis=-1)


def _turned(slots: jax.Array, axis: Axis, stride: int, T: jax.Array | int, merge: Combine) -> jax.Array:
    """`[N, c] -> [N, c]`: step T of an all-reduce."""
    num_ranks, rank = len(slots), lax.axis_index(axis)
    outgoing, incoming = (rank - stride * T) % num_ranks, (rank - stride * (T + 1)) % num_ranks
    arrived = pass_on(take(slots, outgoing), axis, stride, num_ranks)
    return put(slots, merge(arrived, take(slots, incoming)), incoming)


def _replaced(arrived: jax.Array, here: jax.Array) -> jax.Array:
    return arrived


def ring_states(x: Num[Array, "*dims"], *, axis: Axis) -> Num[Array, "T N c"]:
    """The slots of a ring all-reduce before its first step and after each of its 2(N-1): to look at, not to use.

    per device [A] -> [2N-1, N, A/N], any shape
    """
    num_ranks = ranks_of("ring_states", axis)
    states = [flat_parts(varying(x, axis), num_ranks)]
    for step in range(1, 2 * num_ranks - 1):
        states.append(_turned(states[-1], axis, 1, step, lax.add if step < num_ranks else _replaced))
    return jnp.stack(states)


def _lanes(x: jax.Array, strides: Sequence[int]) -> list[jax.Array]:
    """The last dim in one piece for each ring, as equal as can be; no more rings than elements."""
    return jnp.array_split(x, min(len(strides), max(x.shape[-1], 1)), axis=-1)


def ring_strides(kernel: str, algorithm: str, channels: int, num_ranks: int) -> tuple[int, ...]:
    """The strides of the rings of an algorithm; different ones share no link.

    Raises:
      ValueError: no such algorithm, or fewer than one channel.
    """
    check_choice(kernel, "algorithm", algorithm, RINGS)
    checked_count(kernel, "channels", channels)
    one_way = [stride for stride in range(1, num_ranks // 2 + 1) if math.gcd(stride, num_ranks) == 1] or [1]
    chosen = [one_way[channel % len(one_way)] for channel in range(channels)]
    return tuple(chosen) if algorithm == "ring" else tuple(s for stride in chosen for s in (stride, -stride))
