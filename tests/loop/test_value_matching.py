"""Values of a reference are recognized in parts and in partial sums, and rounding is not a difference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.loop.value_matching import CapturedValue, Tolerance, compare, from_rows, rows_of, unit_of

X = np.random.default_rng(0).normal(size=(4, 6, 5))
EXACT = Tolerance(1e-12, 1e-12)


def moved(x: np.ndarray, parts: int, dim: int) -> np.ndarray:
    """Split a dim into parts, which become the first dim."""
    return np.stack(np.split(x, parts, dim))


@pytest.mark.parametrize(
    ("layout", "is_equal"),
    [
        (CapturedValue(X), True),
        (CapturedValue(X + 1e-6), False),
        (CapturedValue(X[::-1]), False),  # the order of global rows matters
        (CapturedValue(np.stack([X, X]), ("data",)), True),  # replicated
        (CapturedValue(moved(X, 2, 0), ("data",)), True),
        (CapturedValue(moved(moved(X, 3, 1), 2, 1), (None, "data")), True),
        (CapturedValue(moved(X, 2, 0)[[0, 0]], ("data",)), False),  # half of the rows is missing
        (CapturedValue(np.stack([X / 4, 3 * X / 4]), ("data",)), True),  # partial sums
        (CapturedValue(np.stack([X, X]) / 2, ("data",)), False),  # a mean in place of a sum
        (CapturedValue(X[:, :5]), None),
    ],
)
def test_compare(layout, is_equal):
    match = compare(CapturedValue(X), [layout], EXACT)
    assert (None if match is None else match.is_equal) is is_equal
    if is_equal is False:
        assert match.wrong.any()


def test_compare_marks_wrong_elements():
    other = X.copy()
    other[2, 3] += 1
    wrong = compare(CapturedValue(X), [CapturedValue(other)], EXACT).wrong
    assert wrong.sum() == 5
    assert wrong[0, 2, 3].all()


def test_rows_are_restored():
    unit = unit_of((4, 6, 5), (2, 6, 5))
    assert unit == (1, 6, 5)
    assert unit_of((4, 6), (2, 2)) == (1, 2)
    assert unit_of((4, 6), (3, 6)) is None
    stacked = X[None]
    np.testing.assert_array_equal(from_rows(rows_of(stacked, (2, 3, 5)), stacked.shape, (2, 3, 5)), stacked)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tolerance_grows_with_the_measured_rounding_error(dtype):
    exact = jnp.asarray(X, dtype)
    x, eps = np.asarray(exact), float(jnp.finfo(exact.dtype).eps)
    small, large = (Tolerance.of(x, [np.asarray(x * (1 + n * eps))]).largest for n in (0, 100))
    assert 0 < small < 20 * eps
    assert large > 100 * small / 8


def test_integers_differ_unless_rounding_changes_them():
    x = np.arange(10)
    y = x.copy()
    y[3] = 7
    assert compare(CapturedValue(x), [CapturedValue(y)], Tolerance.of(x, [x])).is_equal is False
    assert compare(CapturedValue(x), [CapturedValue(y)], Tolerance.of(x, [y])).is_equal is True
