"""Movements of rows between orders, and their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.moe.assignment_order import by_expert, move, weighted_sum
from meshpar.moe.token_exchange import to_expert_order


def test_rows_are_moved_to_the_order_of_experts_and_back():
    counts, pair_rows = np.asarray([[3, 0, 2], [0, 0, 1], [4, 1, 0]], np.int32), 6
    rows = np.zeros((3 * pair_rows, 2), np.float32)
    by_rank = []
    for rank, line in enumerate(counts):  # missing rows are zero
        filled = rows[rank * pair_rows :][: line.sum()]
        filled[:] = np.random.default_rng(rank).normal(size=filled.shape)
        by_rank.append(np.split(filled, np.cumsum(line)[:-1]))
    expected = np.zeros_like(rows)
    expected[: counts.sum()] = np.concatenate([lines[expert] for expert in range(3) for lines in by_rank])

    @jax.jit
    def run(rows):
        movement = to_expert_order(jnp.asarray(counts), pair_rows)
        moved, pull = jax.vjp(lambda rows: move(rows, movement), rows)
        return moved, pull(moved)[0], move(moved, movement.inverse)

    moved, *returned = run(rows)
    np.testing.assert_array_equal(moved, expected)
    for back in returned:
        np.testing.assert_array_equal(back, rows)


def test_gates_are_not_rounded():
    """With rows in bfloat16 and gates in float32, results are rounded once, and gradients of gates are not."""
    draw = np.random.default_rng(0)
    rows, grad = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((24, 16), (12, 16)))
    experts = jnp.asarray(np.stack([draw.permutation(4)[:2] for _ in range(12)]), jnp.int32)
    gates, order = jnp.asarray(draw.uniform(size=(12, 2)), jnp.float32), by_expert(experts, 4)

    def run():
        y, pull = jax.vjp(lambda rows, gates: weighted_sum(rows, gates, order), rows, gates)
        return y, pull(grad)

    y, (actual, d_gates) = jax.jit(run)()
    token, assignment = np.asarray(order.tokens), np.asarray(order.assignments)
    row_grads, exact_rows = np.asarray(grad, np.float32)[token], np.asarray(rows, np.float32)
    expected = jnp.asarray(np.asarray(gates).reshape(-1)[assignment][:, None] * row_grads).astype(jnp.bfloat16)
    assert y.dtype == actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected)
    terms = np.asarray(gates)[:, :, None] * exact_rows[np.asarray(order.positions)]
    np.testing.assert_array_equal(y, jnp.asarray(terms[:, 0] + terms[:, 1]).astype(jnp.bfloat16))
    assert d_gates.dtype == jnp.float32
    np.testing.assert_allclose(d_gates.reshape(-1)[assignment], (row_grads * exact_rows).sum(1), rtol=1e-5, atol=1e-5)
