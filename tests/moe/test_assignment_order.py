"""Movements of rows between orders, their derivatives, and their memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from meshpar.moe.assignment_order import Runs, by_expert, move, move_in_blocks, move_in_one_gather, weighted_sum
from meshpar.moe.dispatch_paths import _permutation_by_expert, _runs_by_expert

RUNS = {
    "permuted, with an empty run": ([0, 5, 5, 140], [100, 3, 3, 0], [5, 70, 0, 3]),
    "last rows": ([199, 0], [0, 147], [1, 3]),
    "all": ([0], [0], [150]),
    "none": ([0, 7], [0, 7], [0, 0]),
}


def by_hand(rows, runs, size):
    out = np.zeros((size, rows.shape[1]))
    for source, target, count in zip(*runs, strict=True):
        out[target : target + count] = rows[source : source + count]
    return out


def runs_of(name):
    return Runs(*(np.asarray(column, np.int32) for column in RUNS[name]))


@pytest.mark.parametrize("implementation", [move_in_blocks, move_in_one_gather])
@pytest.mark.parametrize("name", RUNS)
def test_runs_are_moved_and_other_rows_are_zero(name, implementation):
    rows = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
    actual = jax.jit(implementation, static_argnums=0)(150, rows, runs_of(name))
    np.testing.assert_array_equal(actual, by_hand(rows, RUNS[name], 150).astype("float32"))


@jax.jit
def move_and_vjp(rows, movement, grad):
    actual, pull = jax.vjp(lambda rows: move(rows, movement, len(grad)), rows)
    return actual, pull(grad)[0]


@pytest.mark.parametrize("name", RUNS)
def test_derivative_moves_runs_back(name):
    draw = np.random.default_rng(0).standard_normal
    rows, grad = draw((200, 3)).astype("float32"), draw((150, 3)).astype("float32")
    actual, pulled = move_and_vjp(rows, runs_of(name), grad)
    np.testing.assert_array_equal(actual, by_hand(rows, RUNS[name], 150).astype("float32"))
    sources, targets, sizes = RUNS[name]
    np.testing.assert_array_equal(pulled, by_hand(grad, (targets, sources, sizes), 200).astype("float32"))


def test_zeros_are_allocated_late_and_not_copied():
    """Four consecutive moves need two arrays at a time. Zeros created at the start would need more memory."""

    def four_times(rows, runs):
        for _ in range(4):
            rows = jnp.sin(move(rows, runs, 4096))
        return rows

    like = jax.ShapeDtypeStruct((4096, 64), jnp.float32), Runs(*(jax.ShapeDtypeStruct((8,), jnp.int32),) * 3)
    program = jax.jit(four_times).lower(*like).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2.5 * 4 * 4096 * 64
    assert all(array.nbytes <= 4 * 4096 * 64 for array in work.largest_temporaries(hlo.parse(program.as_text())))


def test_permutation_matches_runs():
    counts = np.asarray([[3, 0, 2], [0, 0, 1], [4, 1, 0]], np.int32)
    pair_rows = 6
    rows = np.random.default_rng(0).normal(size=(3 * pair_rows, 2)).astype(np.float32)
    for rank, line in enumerate(counts):  # missing rows are zero
        rows[rank * pair_rows + line.sum() : (rank + 1) * pair_rows] = 0
    runs, permutation = (
        jax.jit(function, static_argnums=1)(counts, pair_rows) for function in (_runs_by_expert, _permutation_by_expert)
    )
    (expected, expected_grad), (permuted, grad) = (move_and_vjp(rows, way, rows) for way in (runs, permutation))
    np.testing.assert_array_equal(permuted, expected)
    assert np.asarray(expected)[: counts.sum()].any(1).all()
    np.testing.assert_array_equal(jax.jit(move, static_argnums=2)(permuted, permutation.inverse, len(rows)), rows)
    np.testing.assert_array_equal(grad, expected_grad)


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
