"""Which choice stands where: choices sorted by expert, or in buffers, and rows moved from one order to another.

    T tokens, k choices each; choice (t, j) counts as t k + j: token by token, and a token's own in their order
    places[t, j]   where choice (t, j) stands in the new order, -1 if nowhere
    choices[s]     which choice stands at s, -1 if none

The two maps undo each other, so what moves rows by one of them is differentiated by moving rows by the other. Rows that
stay together on the way are moved as `Runs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.wire import varying_alike
from meshpar.moe.routing import kept


class Order(NamedTuple):
    """Choices in a new order."""

    places: jax.Array
    """int32 [T, k]."""
    choices: jax.Array
    """int32 [S]."""

    @property
    def tokens(self) -> jax.Array:
        """int32 [S]: whose choice stands at s, -1 if none."""
        return jnp.where(self.choices < 0, -1, self.choices // self.places.shape[1])

    @property
    def is_sparse(self) -> bool:
        """Whether most choices stand nowhere: experts that choose have a column each for every token."""
        return self.choices.size < self.places.size


def by_expert(experts: jax.Array, num_experts: int) -> Order:
    """Choices `[T, k]` sorted by expert, those of one expert as they were; unassigned ones (E) have no place."""
    choices = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    stands = jnp.arange(experts.size, dtype=jnp.int32)
    places = jnp.zeros_like(choices).at[choices].set(stands, unique_indices=True).reshape(experts.shape)
    is_chosen = experts < num_experts
    num_chosen = jnp.sum(is_chosen, dtype=jnp.int32)
    return Order(jnp.where(is_chosen, places, -1), jnp.where(stands < num_chosen, choices, -1))


def in_buffers(experts: jax.Array, num_experts: int, room: int) -> Order:
    """A buffer of `room` places for each expert, filled with its first choices: `num_experts * room` places in all."""
    slot, has_room = kept(experts, room, num_experts)
    size = num_experts * room
    places = jnp.where(has_room, experts * room + slot, size)
    stands = jnp.arange(experts.size, dtype=jnp.int32)
    choices = jnp.full(size, -1, jnp.int32).at[places.reshape(-1)].set(stands, mode="drop")
    return Order(jnp.where(has_room, places, -1), choices)


# ---- Rows ------------------------------------------------------------------------------------------------------------


def taken(rows: jax.Array, at: jax.Array) -> jax.Array:
    """`rows[at]`, zeros where `at` is -1."""
    return rows.at[jnp.where(at < 0, rows.shape[0], at)].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x: jax.Array, order: Order) -> jax.Array:
    """[T, d] -> [S, d]: each token's row at the places of its choices."""
    return taken(x, order.tokens)


spread.defvjp(
    lambda x, order: (spread(x, order), order), lambda order, grad: (_sum_of_choices(grad, None, order), None)
)


@jax.custom_vjp
def summed(rows: jax.Array, order: Order) -> jax.Array:
    """[S, d] -> [T, d]: each token's sum over its choices, in float32 at the least; the transpose of `spread`."""
    return _sum_of_choices(rows, None, order)


summed.defvjp(lambda rows, order: (summed(rows, order), order), lambda order, grad: (taken(grad, order.tokens), None))


def weighted_sum(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    """[S, d], [T, k] -> [T, d]: each token's sum over its choices, in float32 at the least.

    Weights of choices that stand nowhere count nothing, whatever they are: no number times zero would be none.
    """
    rows, weights = varying_alike((), rows, weights)
    return _weighted_sum(rows, weights, order)


@jax.custom_vjp
def _weighted_sum(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    return _sum_of_choices(rows, weights, order)


def _weighted_sum_backward(saved: tuple[jax.Array, jax.Array, Order], grad: jax.Array) -> tuple:
    rows, weights, order = saved
    wide = _wide(rows, weights)
    weight = taken(weights.reshape(-1), order.choices).astype(wide)[:, None]
    grads = taken(grad, order.tokens).astype(wide)
    d_weights = taken(jnp.sum(grads * rows.astype(wide), axis=1), order.places)
    return (weight * grads).astype(rows.dtype), d_weights.astype(weights.dtype), None


_weighted_sum.defvjp(lambda *args: (_weighted_sum(*args), args), _weighted_sum_backward)


def _sum_of_choices(rows: jax.Array, weights: jax.Array | None, order: Order) -> jax.Array:
    """A gather for each choice; where most stand nowhere, a scatter of those that do: T k rows would be too many."""
    wide = _wide(rows, rows if weights is None else weights)
    num_tokens = order.places.shape[0]
    if order.is_sparse:
        wide_rows = rows.astype(wide)
        if weights is not None:
            wide_rows = taken(weights.reshape(-1), order.choices).astype(wide)[:, None] * wide_rows
        at = jnp.where(order.choices < 0, num_tokens, order.tokens)
        room = varying_alike((), jnp.zeros((num_tokens, rows.shape[1]), wide), wide_rows)[0]
        return room.at[at].add(wide_rows, mode="drop").astype(rows.dtype)
    each = taken(rows, order.places).astype(wide)
    if weights is not None:
        each = jnp.where(order.places < 0, 0, weights.astype(wide))[:, :, None] * each
    return jnp.sum(each, axis=1).astype(rows.dtype)


def _wide(*arrays: jax.Array) -> jnp.dtype:
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


# ---- Runs of rows ----------------------------------------------------------------------------------------------------

_BLOCK = 64
"""Rows that a loop moves at once."""


class Runs(NamedTuple):
    """Rows that stay together: `sizes[i]` of them from `begins[i]` on are to stand from `places[i]` on. int32 [S].

    They do not overlap, neither where they stand nor where they are to stand.
    """

    begins: jax.Array
    places: jax.Array
    sizes: jax.Array

    @property
    def undone(self) -> Runs:
        return Runs(self.places, self.begins, self.sizes)


class Places(NamedTuple):
    """Rows that go each its own way: row `to[r]` is to stand at r, and row s stands at `back[s]` then; -1 if none."""

    to: jax.Array
    back: jax.Array

    @property
    def undone(self) -> Places:
        return Places(self.back, self.to)


def moved(rows: jax.Array, runs: Runs | Places, size: int) -> jax.Array:
    """[R, d] -> [size, d]: the runs at their places, zeros elsewhere. Differentiated by moving them back.

    Runs are moved on CPUs by a loop over blocks of rows there are, on other platforms by one gather, over all the room
    there is; so are `Places` everywhere.
    """
    if isinstance(runs, Places):
        return _gathered(rows, *runs)
    rows, *each = varying_alike((), rows, *runs)
    return _moved(len(rows), size, rows, Runs(*each))


@jax.custom_vjp
def _gathered(rows: jax.Array, to: jax.Array, back: jax.Array) -> jax.Array:
    return taken(rows, to)


_gathered.defvjp(
    lambda rows, to, back: (_gathered(rows, to, back), back), lambda back, grad: (taken(grad, back), None, None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(_: int, size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    looped, gathered = functools.partial(moved_in_blocks, size), functools.partial(moved_at_once, size)
    return lax.platform_dependent(rows, runs, cpu=looped, default=gathered)


_moved.defvjp(
    lambda before, size, rows, runs: (_moved(before, size, rows, runs), runs),
    lambda before, size, runs, grad: (_moved(size, before, grad, runs.undone), None),
)


def moved_in_blocks(size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    """`moved`, block by block: what is not there costs zeros and nothing else."""
    block = min(_BLOCK, size)
    used, block_at = blocks_of(runs.sizes, block)

    def turn(at: jax.Array, out: jax.Array) -> jax.Array:
        run, into = block_at(at)
        begin = runs.places[run] + into
        # The last rows may be fewer than a block: it then begins earlier, and leaves alone what it does not own.
        first = jnp.minimum(begin, size - block)
        place = first + jnp.arange(block, dtype=jnp.int32)
        mask = (place >= begin) & (place < runs.places[run] + runs.sizes[run])
        stands = jnp.clip(place + (runs.begins[run] - runs.places[run]), 0, len(rows) - 1)
        new = rows.at[stands].get(mode="promise_in_bounds")
        before = lax.dynamic_slice_in_dim(out, first, block)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mask[:, None], new, before), first, 0)

    return lax.fori_loop(0, used, turn, room_for((size, rows.shape[1]), rows, runs.sizes))


def moved_at_once(size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    """`moved`, as one gather. Marks and a running maximum say of which run a place is: no array of runs x places."""
    at = jnp.arange(size, dtype=jnp.int32)
    begun = jnp.where(runs.sizes > 0, runs.places, size)
    marks = jnp.full_like(at, -1).at[begun].set(jnp.arange(len(begun), dtype=jnp.int32), mode="drop")
    run = marks[lax.cummax(jnp.where(marks < 0, 0, at))]  # of the last that began
    within = at - runs.places[run]
    return taken(rows, jnp.where((run >= 0) & (within < runs.sizes[run]), runs.begins[run] + within, -1))


def part_of(begins: jax.Array, size: int) -> jax.Array:
    """[lines, parts] -> int32 [lines, size]: the last part that begins at or before each place.

    Parts begin at 0 and in order. Marks and a running sum: no array of parts x places.
    """
    if begins.shape[1] == 1:  # known when it is traced; XLA would work out the sums of marks that are constant
        return jnp.zeros((len(begins), size), jnp.int32)
    line = jnp.arange(len(begins), dtype=jnp.int32)[:, None]
    marks = jnp.zeros((len(begins), size), jnp.int32).at[line, begins].add(1, mode="drop")
    return jnp.cumsum(marks, axis=1) - 1


def room_for(shape: tuple[int, ...], like: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeros of the dtype of `like`, to be written into; made when `like` is there, which has a number at least.

    Those that a compiler knows to be zeros it makes at the start, once for all loops of a shape, and copies: memory
    that is held all the time, twice. No size is below zero, which it does not know.
    """
    zero = jnp.where(jnp.sum(sizes) < 0, like[(0,) * like.ndim], jnp.zeros((), like.dtype))
    return varying_alike((), jnp.broadcast_to(zero, shape), like)[0]


def blocks_of(sizes: jax.Array, block: int) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Runs of rows cut into blocks, in order: (how many there are, block -> (its run, rows of the run before it)).

    Blocks behind the last one are the last run's, and begin behind it.
    """
    blocks = -(-sizes // block)
    ends = jnp.cumsum(blocks)

    def block_at(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = jnp.minimum(jnp.sum(ends <= at, dtype=jnp.int32), len(sizes) - 1)
        return run, (at - (ends[run] - blocks[run])) * block

    return ends[-1], block_at
