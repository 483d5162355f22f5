"""Orders of token-expert assignments, such as by expert, and differentiable moves of their rows.

    T tokens with k assignments each; assignment (t, j) has the index t k + j
    positions[t, j]  position of assignment (t, j) in the new order, or -1
    assignments[s]   index of the assignment at position s, or -1

`positions` and `assignments` are inverse maps: the transpose of a gather with one is a gather with the other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives.wire import varying_alike
from meshpar.layers.remat import MATMUL
from meshpar.moe.routing import assign_slots


class Order(NamedTuple):
    """An order of the assignments in an array with S positions."""

    positions: jax.Array
    """int32 [T, k]: position of each assignment, or -1."""
    assignments: jax.Array
    """int32 [S]: assignment at each position, or -1."""

    @property
    def tokens(self) -> jax.Array:
        """Return the token at each position, int32 [S], or -1."""
        return jnp.where(self.assignments < 0, -1, self.assignments // self.positions.shape[1])

    @property
    def is_sparse(self) -> bool:
        """Return whether some assignments have no position because S < T k, as with expert choice, where k is E."""
        return self.assignments.size < self.positions.size


def by_expert(experts: jax.Array, num_experts: int) -> Order:
    """Return the stable order of the assignments `[T, k]` by expert. Elements with expert index E get no position."""
    assignments = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    index = jnp.arange(experts.size, dtype=jnp.int32)
    positions = jnp.zeros_like(assignments).at[assignments].set(index, unique_indices=True).reshape(experts.shape)
    is_assigned = experts < num_experts
    num_assigned = jnp.sum(is_assigned, dtype=jnp.int32)
    return Order(jnp.where(is_assigned, positions, -1), jnp.where(index < num_assigned, assignments, -1))


def in_buffers(experts: jax.Array, num_experts: int, capacity: int) -> Order:
    """Return the order with a buffer of `capacity` positions per expert. Assignments over capacity get no position."""
    slot, is_kept = assign_slots(experts, capacity, num_experts)
    positions = jnp.where(is_kept, experts * capacity + slot, -1)
    return Order(positions, inverse_of(positions, num_experts * capacity))


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
    # The gradient of the weights needs the rows. Without them, the backward pass would run the experts again.
    return _weighted_sum(checkpoint_name(rows, MATMUL), weights, order)


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
    """Sum the rows of each token with k gathers, one per assignment. If the order is sparse, use a scatter."""
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


# ---- Movements of rows -----------------------------------------------------------------------------------------------


class Permutation(NamedTuple):
    """A permutation of rows, some of which may be missing."""

    sources: jax.Array
    """For each row of the result, the index of the row that moves there, or -1 for a row of zeros."""
    targets: jax.Array
    """The inverse map: for each row of the operand, its index in the result, or -1."""

    @staticmethod
    def of(sources: jax.Array, size: int) -> Permutation:
        """Return the permutation of `size` rows with these sources."""
        return Permutation(sources, inverse_of(sources, size))

    @property
    def inverse(self) -> Permutation:
        return Permutation(self.targets, self.sources)


def inverse_of(index: jax.Array, size: int) -> jax.Array:
    """Invert an index without duplicates: entry i of the result is the position of i in `index`, or -1."""
    index = index.reshape(-1)
    position = jnp.arange(len(index), dtype=jnp.int32)
    return jnp.full(size, -1, jnp.int32).at[jnp.where(index < 0, size, index)].set(position, mode="drop")


def move(rows: jax.Array, movement: Permutation) -> jax.Array:
    """Move rows by a gather. The backward pass is a gather by the inverse permutation."""
    return _move(*varying_alike((), rows, *movement))


@jax.custom_vjp
def _move(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    return take(rows, sources)


_move.defvjp(
    lambda rows, sources, targets: (_move(rows, sources, targets), targets),
    lambda targets, grad: (take(grad, targets), None, None),
)


def late_zeros(shape: tuple[int, ...], like: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return zeros in the dtype of `like` that XLA allocates when `like` is available. `like` must not be empty.

    XLA would create constant zeros once at the start of the program and copy them for each loop, which occupies memory
    twice. The `where` has a condition that is never true, but XLA does not know that sizes are not negative.
    """
    zero = jnp.where(jnp.sum(sizes) < 0, like[(0,) * like.ndim], jnp.zeros((), like.dtype))
    return varying_alike((), jnp.broadcast_to(zero, shape), like)[0]


def segment_of(starts: jax.Array, size: int) -> jax.Array:
    """Return the segment of each position, int32 [lines, size], given the `starts` of segments, [lines, segments].

    In each line, starts are sorted and the first is 0. A running sum avoids an array [segments, size].
    """
    if starts.shape[1] == 1:  # otherwise XLA would evaluate the constant sums at compile time
        return jnp.zeros((len(starts), size), jnp.int32)
    line = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
    marks = jnp.zeros((len(starts), size), jnp.int32).at[line, starts].add(1, mode="drop")
    return jnp.cumsum(marks, axis=1) - 1
