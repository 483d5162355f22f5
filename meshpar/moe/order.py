"""Which choice stands where: choices sorted by expert, or in buffers, and rows moved from one order to another.

    T tokens, k choices each; choice (t, j) counts as t k + j: token by token, and a token's own in their order
    places[t, j]   where choice (t, j) stands in the new order, -1 if nowhere
    choices[s]     which choice stands at s, -1 if none

The two maps undo each other, so what moves rows by one of them is differentiated by moving rows by the other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
    """Choices `[T, k]` sorted by expert, those of one expert as they were; those of nobody (E) have no place."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def taken(rows: jax.Array, at: jax.Array) -> jax.Array:
    """`rows[at]`, zeros where `at` is -1."""
    return rows.at[jnp.where(at < 0, rows.shape[0], at)].get(mode="fill", fill_value=0)


@jax.custom_vjp
def moved(rows: jax.Array, to: jax.Array, back: jax.Array) -> jax.Array:
    """[S, d] -> [R, d]: row `to[r]` at place r; `back[s]` is where row s stands afterwards, -1 if nowhere."""
    return taken(rows, to)


moved.defvjp(lambda rows, to, back: (moved(rows, to, back), back), lambda back, grad: (taken(grad, back), None, None))


@jax.custom_vjp
def spread(x: jax.Array, order: Order) -> jax.Array:
    """[T, d] -> [S, d]: each token's row at the places of its choices."""
    return taken(x, order.tokens)


spread.defvjp(
    lambda x, order: (spread(x, order), order), lambda order, grad: (_sum_of_choices(grad, None, order), None)
)


def weighted_sum(rows: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
    """[S, d], [T, k] -> [T, d]: each token's sum over its choices, in float32 at the least."""
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


_weighted_sum.defvjp(
    lambda rows, weights, order: (_weighted_sum(rows, weights, order), (rows, weights, order)), _weighted_sum_backward
)


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
        each = weights.astype(wide)[:, :, None] * each
    return jnp.sum(each, axis=1).astype(rows.dtype)


def _wide(*arrays: jax.Array) -> jnp.dtype:
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))
