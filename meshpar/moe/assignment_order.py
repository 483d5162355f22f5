"""Token-expert assignments in a new order, and differentiable movements of rows between orders.

    T tokens with k assignments each; assignment (t, j) has the index t k + j
    positions[t, j]  position of assignment (t, j) in the new order, or -1
    assignments[s]   index of the assignment at position s, or -1

The two maps are inverse, so the transpose of a gather by one is a gather by the other. Consecutive rows that stay
together are moved as `Runs`.
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
    """An order of the assignments."""

    positions: jax.Array
    """int32 [T, k]."""
    assignments: jax.Array
    """int32 [S]."""

    @property
    def tokens(self) -> jax.Array:
        """Return the token at each position, int32 [S], or -1."""
        return jnp.where(self.assignments < 0, -1, self.assignments // self.positions.shape[1])

    @property
    def is_sparse(self) -> bool:
        """Return whether most assignments have no position. With expert choice, k is E."""
        return self.assignments.size < self.positions.size


def by_expert(experts: jax.Array, num_experts: int) -> Order:
    """Sort assignments `[T, k]` by expert, stably. Unassigned elements (E) get no position."""
    assignments = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    index = jnp.arange(experts.size, dtype=jnp.int32)
    positions = jnp.zeros_like(assignments).at[assignments].set(index, unique_indices=True).reshape(experts.shape)
    is_assigned = experts < num_experts
    num_assigned = jnp.sum(is_assigned, dtype=jnp.int32)
    return Order(jnp.where(is_assigned, positions, -1), jnp.where(index < num_assigned, assignments, -1))


def in_buffers(experts: jax.Array, num_experts: int, capacity: int) -> Order:
    """Put the first `capacity` assignments of each expert into its buffer; there are E · capacity positions."""
    slot, is_kept = kept(experts, capacity, num_experts)
    size = num_experts * capacity
    positions = jnp.where(is_kept, experts * capacity + slot, size)
    index = jnp.arange(experts.size, dtype=jnp.int32)
    assignments = jnp.full(size, -1, jnp.int32).at[positions.reshape(-1)].set(index, mode="drop")
    return Order(jnp.where(is_kept, positions, -1), assignments)


# ---- Rows of tokens and of assignments -------------------------------------------------------------------------------


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return `rows[index]`, with zeros where the index is -1."""
    return rows.at[jnp.where(index < 0, rows.shape[0], index)].get(mode="fill", fill_value=0)


@jax.custom_vjp
def expand(x: jax.Array, order: Order) -> jax.Array:
    """[T, d] -> [S, d]: copy each token's row to the positions of the token's assignments."""
    return take(x, order.tokens)


expand.defvjp(lambda x, order: (expand(x, order), order), lambda order, grad: (_combine(grad, None, order), None))


@jax.custom_vjp
def combine(rows: jax.Array, order: Order) -> jax.Array:
    """[S, d] -> [T, d]: sum the rows of each token, in float32 or wider. The transpose of `expand`."""
    return _combine(rows, None, order)


combine.defvjp(lambda rows, order: (combine(rows, order), order), lambda order, grad: (take(grad, order.tokens), None))


def weighted_sum(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    """[S, d], [T, k] -> [T, d]: sum the rows of each token with its gate weights, in float32 or wider.

    Weights of assignments without a position are ignored, even if they are NaN.
    """
    rows, weights = varying_alike((), rows, weights)
    return _weighted_sum(rows, weights, order)


@jax.custom_vjp
def _weighted_sum(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    return _combine(rows, weights, order)


def _weighted_sum_backward(saved: tuple[jax.Array, jax.Array, Order], grad: jax.Array) -> tuple:
    rows, weights, order = saved
    dtype = _sum_dtype(rows, weights)
    weight = take(weights.reshape(-1), order.assignments).astype(dtype)[:, None]
    grads = take(grad, order.tokens).astype(dtype)
    d_weights = take(jnp.sum(grads * rows.astype(dtype), axis=1), order.positions)
    return (weight * grads).astype(rows.dtype), d_weights.astype(weights.dtype), None


_weighted_sum.defvjp(lambda *args: (_weighted_sum(*args), args), _weighted_sum_backward)


def _combine(rows: jax.Array, weights: jax.Array | None, order: Order) -> jax.Array:
    """Sum with a gather per assignment of a token, or with a scatter if most assignments have no position."""
    dtype = _sum_dtype(rows, rows if weights is None else weights)
    num_tokens = order.positions.shape[0]
    if order.is_sparse:
        terms = rows.astype(dtype)
        if weights is not None:
            terms = take(weights.reshape(-1), order.assignments).astype(dtype)[:, None] * terms
        index = jnp.where(order.assignments < 0, num_tokens, order.tokens)
        zeros = varying_alike((), jnp.zeros((num_tokens, rows.shape[1]), dtype), terms)[0]
        return zeros.at[index].add(terms, mode="drop").astype(rows.dtype)
    terms = take(rows, order.positions).astype(dtype)
    if weights is not None:
        terms = jnp.where(order.positions < 0, 0, weights.astype(dtype))[:, :, None] * terms
    return jnp.sum(terms, axis=1).astype(rows.dtype)


def _sum_dtype(*arrays: jax.Array) -> jnp.dtype:
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


# ---- Runs of rows ----------------------------------------------------------------------------------------------------

_BLOCK = 64
"""Rows per loop iteration."""


class Runs(NamedTuple):
    """Runs of consecutive rows: run i moves `sizes[i]` rows from `sources[i]` to `targets[i]`. int32 [S] each.

    Runs do not overlap, before or after the move.
    """

    sources: jax.Array
    targets: jax.Array
    sizes: jax.Array

    @property
    def inverse(self) -> Runs:
        return Runs(self.targets, self.sources, self.sizes)


class Permutation(NamedTuple):
    """Movement of single rows: row `sources[r]` moves to r, and row s moves to `targets[s]`; -1 for none."""

    sources: jax.Array
    targets: jax.Array

    @property
    def inverse(self) -> Permutation:
        return Permutation(self.targets, self.sources)


def move(rows: jax.Array, movement: Runs | Permutation, size: int) -> jax.Array:
    """[R, d] -> [size, d]: move rows to their targets; the other rows of the result are zero.

    On CPUs, `Runs` are moved by a loop over blocks of existing rows. On other platforms, and for a `Permutation`, it is
    a gather of the full result.
    """
    if isinstance(movement, Permutation):
        return _permute(rows, *movement)
    rows, *runs = varying_alike((), rows, *movement)
    return _move(len(rows), size, rows, Runs(*runs))


@jax.custom_vjp
def _permute(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    return take(rows, sources)


_permute.defvjp(
    lambda rows, sources, targets: (_permute(rows, sources, targets), targets),
    lambda targets, grad: (take(grad, targets), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(_: int, size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    in_blocks, in_one_gather = functools.partial(move_in_blocks, size), functools.partial(move_in_one_gather, size)
    return lax.platform_dependent(rows, runs, cpu=in_blocks, default=in_one_gather)


_move.defvjp(
    lambda num_rows, size, rows, runs: (_move(num_rows, size, rows, runs), runs),
    lambda num_rows, size, runs, grad: (_move(size, num_rows, grad, runs.inverse), None),
)


def move_in_blocks(size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    """Move runs block by block, so that only existing rows cost time."""
    block = min(_BLOCK, size)
    num_blocks, block_at = blocks_of(runs.sizes, block)

    def move_block(index: jax.Array, out: jax.Array) -> jax.Array:
        run, offset = block_at(index)
        begin = runs.targets[run] + offset
        # A block at the end starts earlier and masks the rows before `begin`.
        first = jnp.minimum(begin, size - block)
        target = first + jnp.arange(block, dtype=jnp.int32)
        mask = (target >= begin) & (target < runs.targets[run] + runs.sizes[run])
        source = jnp.clip(target + (runs.sources[run] - runs.targets[run]), 0, len(rows) - 1)
        new = rows.at[source].get(mode="promise_in_bounds")
        old = lax.dynamic_slice_in_dim(out, first, block)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mask[:, None], new, old), first, 0)

    return lax.fori_loop(0, num_blocks, move_block, late_zeros((size, rows.shape[1]), rows, runs.sizes))


def move_in_one_gather(size: int, rows: jax.Array, runs: Runs) -> jax.Array:
    """Move runs with a single gather. A running maximum finds the run of each row without an array [runs, size]."""
    index = jnp.arange(size, dtype=jnp.int32)
    begins = jnp.where(runs.sizes > 0, runs.targets, size)
    marks = jnp.full_like(index, -1).at[begins].set(jnp.arange(len(begins), dtype=jnp.int32), mode="drop")
    run = marks[lax.cummax(jnp.where(marks < 0, 0, index))]  # the last run with a start at or before the row
    offset = index - runs.targets[run]
    return take(rows, jnp.where((run >= 0) & (offset < runs.sizes[run]), runs.sources[run] + offset, -1))


def segment_of(starts: jax.Array, size: int) -> jax.Array:
    """[lines, segments] -> int32 [lines, size]: return the last segment with a start at or before each position.

    Starts are sorted, and the first is 0. A running sum avoids an array [segments, size].
    """
    if starts.shape[1] == 1:  # otherwise XLA would evaluate the constant sums at compile time
        return jnp.zeros((len(starts), size), jnp.int32)
    line = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
    marks = jnp.zeros((len(starts), size), jnp.int32).at[line, starts].add(1, mode="drop")
    return jnp.cumsum(marks, axis=1) - 1


def late_zeros(shape: tuple[int, ...], like: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return zeros in the dtype of `like` that XLA allocates when `like` is available. `like` must not be empty.

    XLA would create constant zeros once at the start of the program and copy them for each loop, which occupies memory
    twice. The condition below is never true, but XLA does not know that sizes are not negative.
    """
    zero = jnp.where(jnp.sum(sizes) < 0, like[(0,) * like.ndim], jnp.zeros((), like.dtype))
    return varying_alike((), jnp.broadcast_to(zero, shape), like)[0]


def blocks_of(sizes: jax.Array, block: int) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Divide runs of rows into blocks.

    Returns:
      The number of blocks, and a function from the index of a block to (its run, its offset in the run). Blocks past
      the end belong to the last run and begin at or after its end.
    """
    num_blocks = -(-sizes // block)
    ends = jnp.cumsum(num_blocks)

    def block_at(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = jnp.minimum(jnp.sum(ends <= index, dtype=jnp.int32), len(sizes) - 1)
        return run, (index - (ends[run] - num_blocks[run])) * block

    return ends[-1], block_at
