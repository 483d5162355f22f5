"""Runs of rows: moved block by block and at once to the same places, and back again by the derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from meshpar.moe.assignment_order import Runs, by_expert, moved, moved_at_once, moved_in_blocks, weighted_sum
from meshpar.moe.dispatch_paths import _places_by_expert, _runs_by_expert

RUNS = {
    "in another order, one empty": ([0, 5, 5, 140], [100, 3, 3, 0], [5, 70, 0, 3]),
    "the last rows": ([199, 0], [0, 147], [1, 3]),
    "all": ([0], [0], [150]),
    "none": ([0, 7], [0, 7], [0, 0]),
}


def by_hand(rows, runs, size):
    out = np.zeros((size, rows.shape[1]))
    for begin, place, count in zip(*(np.asarray(one) for one in runs), strict=True):
        out[place : place + count] = rows[begin : begin + count]
    return out


def of(name):
    return Runs(*(np.asarray(one, np.int32) for one in RUNS[name]))


@pytest.mark.parametrize("form", [moved_in_blocks, moved_at_once])
@pytest.mark.parametrize("name", RUNS)
def test_runs_stand_at_their_places_and_zeros_elsewhere(name, form):
    rows = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
    found = jax.jit(form, static_argnums=0)(150, rows, of(name))
    np.testing.assert_array_equal(found, by_hand(rows, RUNS[name], 150).astype("float32"))


@jax.jit
def there_and_back(rows, runs, grad):
    found, pull = jax.vjp(lambda rows: moved(rows, runs, len(grad)), rows)
    return found, pull(grad)[0]


@pytest.mark.parametrize("name", RUNS)
def test_the_derivative_moves_them_back(name):
    draw = np.random.default_rng(0).standard_normal
    rows, grad = draw((200, 3)).astype("float32"), draw((150, 3)).astype("float32")
    found, pulled = there_and_back(rows, of(name), grad)
    np.testing.assert_array_equal(found, by_hand(rows, RUNS[name], 150).astype("float32"))
    begins, places, sizes = RUNS[name]
    np.testing.assert_array_equal(pulled, by_hand(grad, (places, begins, sizes), 200).astype("float32"))


def test_room_is_made_when_rows_are_there_and_never_copied():
    """Four moves in a row hold two arrays at a time; zeros made at the start would be held beside them."""

    def four_times(rows, runs):
        for _ in range(4):
            rows = jnp.sin(moved(rows, runs, 4096))
        return rows

    like = jax.ShapeDtypeStruct((4096, 64), jnp.float32), Runs(*(jax.ShapeDtypeStruct((8,), jnp.int32),) * 3)
    program = jax.jit(four_times).lower(*like).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2.5 * 4 * 4096 * 64
    assert all(one.nbytes <= 4 * 4096 * 64 for one in work.largest_temporaries(hlo.parse(program.as_text())))


def test_rows_that_go_each_their_own_way_arrive_where_runs_do():
    counts = np.asarray([[3, 0, 2], [0, 0, 1], [4, 1, 0]], np.int32)
    pair_rows = 6
    rows = np.random.default_rng(0).normal(size=(3 * pair_rows, 2)).astype(np.float32)
    for rank, line in enumerate(counts):  # what no rank sent is zeros
        rows[rank * pair_rows + line.sum() : (rank + 1) * pair_rows] = 0
    runs, places = (jax.jit(of, static_argnums=1)(counts, pair_rows) for of in (_runs_by_expert, _places_by_expert))
    (arrived, pulled), (by_place, back) = (there_and_back(rows, way, rows) for way in (runs, places))
    np.testing.assert_array_equal(by_place, arrived)
    assert np.asarray(arrived)[: counts.sum()].any(1).all()
    np.testing.assert_array_equal(jax.jit(moved, static_argnums=2)(by_place, places.undone, len(rows)), rows)
    np.testing.assert_array_equal(back, pulled)


def test_gates_are_not_rounded():
    """Rows in bfloat16, gates in float32: sums and products are rounded once, and gradients of gates not at all."""
    draw = np.random.default_rng(0)
    rows, grad = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((24, 16), (12, 16)))
    experts = jnp.asarray(np.stack([draw.permutation(4)[:2] for _ in range(12)]), jnp.int32)
    gates, order = jnp.asarray(draw.uniform(size=(12, 2)), jnp.float32), by_expert(experts, 4)

    def run():
        y, pull = jax.vjp(lambda rows, gates: weighted_sum(rows, gates, order), rows, gates)
        return y, pull(grad)

    y, (found, d_gates) = jax.jit(run)()
    token, choice = np.asarray(order.tokens), np.asarray(order.choices)
    of_row, wide = np.asarray(grad, np.float32)[token], np.asarray(rows, np.float32)
    expected = jnp.asarray(np.asarray(gates).reshape(-1)[choice][:, None] * of_row).astype(jnp.bfloat16)
    assert y.dtype == found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, expected)
    each = np.asarray(gates)[:, :, None] * wide[np.asarray(order.places)]
    np.testing.assert_array_equal(y, jnp.asarray(each[:, 0] + each[:, 1]).astype(jnp.bfloat16))
    assert d_gates.dtype == jnp.float32
    np.testing.assert_allclose(d_gates.reshape(-1)[choice], (of_row * wide).sum(1), rtol=1e-5, atol=1e-5)
