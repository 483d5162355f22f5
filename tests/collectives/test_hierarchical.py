"""Hierarchical kernels against their references, and their steps and bytes on both levels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.hardware import cost_model as cost
from tests.collectives.gradients import with_gradient
from tests.errors import raises
from tests.grid import cases

GROUPS = [(1, 3), (2, 3), (4, 2), (2, 1)]
ELEMENTS = 840
BYTES = 4 * ELEMENTS
OPS = ("sum", "mean", "max")
REDUCE = functools.partial(mc.hierarchical_all_reduce, inner="inner", outer="outer")
EXCHANGE = functools.partial(mc.hierarchical_all_to_all, inner="inner", outer="outer")


def rows(count, *shape):
    return jnp.asarray(np.random.default_rng(0).integers(-40, 40, (count, *shape)), "float32")


def by_axis(collectives):
    """Return {axes: (permutes, bytes)}."""
    return {
        axes: (
            sum(c.count_per_step for c in collectives if c.axes == axes),
            sum(c.bytes_sent_per_step for c in collectives if c.axes == axes),
        )
        for axes in {c.axes for c in collectives}
    }


@pytest.fixture(scope="module")
def outcomes(ranks):
    """Return a function from mesh sizes to value and gradient of all cases, of kernels and references."""

    @functools.cache
    def run(outer, inner):
        count = outer * inner
        reduce_in, exchange_in = rows(count, 5, 3), rows(count, 2, count)
        cases = {op: (functools.partial(REDUCE, op=op), functools.partial(reference.all_reduce, op=op)) for op in OPS}
        for name, tiled in (("all to all", True), ("stacked", False)):
            options = {"split_dim": 1, "concat_dim": 0, "tiled": tiled}
            cases[name] = functools.partial(EXCHANGE, **options), functools.partial(reference.all_to_all, **options)
        arrays = {name: reduce_in if name in OPS else exchange_in for name in cases}
        row = ranks(outer=outer, inner=inner)
        return (
            jax.jit(lambda: {name: with_gradient(row.view(cases[name][0]), x) for name, x in arrays.items()})(),
            jax.jit(lambda: {name: with_gradient(cases[name][1], x) for name, x in arrays.items()})(),
        )

    return run


@pytest.mark.parametrize("groups", [pytest.param(g, marks=[pytest.mark.matrix] * (g != (2, 3))) for g in GROUPS])
@pytest.mark.parametrize("name", [*OPS, "all to all", "stacked"])
def test_matches_reference(outcomes, groups, name):
    actual, expected = (side[name] for side in outcomes(*groups))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6 if name == "mean" else 0)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [1, 2])
@pytest.mark.parametrize("order", ["cba", *(pytest.param(o, marks=pytest.mark.matrix) for o in ("acb", "bca", "cab"))])
def test_several_axes_per_level_in_any_order(ranks, order, inside):
    """Ranks are numbered by the outer axes and then the inner axes, in the order in which they are named."""
    row = ranks(order=tuple(order), a=2, b=2, c=2)
    levels = {"outer": row.axis[:-inside], "inner": row.axis[-inside:]}
    reduce_in, exchange_in = rows(8, 5, 3), rows(8, 2, 8)
    dims = {"split_dim": 1, "concat_dim": 0}

    def both(reduce, exchange):
        return jax.jit(lambda: (with_gradient(reduce, reduce_in), with_gradient(exchange, exchange_in)))()

    actual = both(
        row.view(functools.partial(mc.hierarchical_all_reduce, **levels)),
        row.view(functools.partial(mc.hierarchical_all_to_all, **levels, **dims)),
    )
    expected = both(reference.all_reduce, functools.partial(reference.all_to_all, **dims))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize(("outer", "inner"), cases((3, 2), grid=[(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]))
def test_all_reduce_bytes_match_closed_forms(ranks, outer, inner):
    actual = by_axis(ranks(outer=outer, inner=inner).sent(REDUCE, (ELEMENTS,)))
    expected = cost.hierarchical_all_reduce(BYTES, outer * inner, inner=inner)
    assert actual == {
        ("inner",): (expected.inside.steps, expected.inside.bytes_sent),
        ("outer",): (expected.across.steps, expected.across.bytes_sent),
    }


@pytest.mark.parametrize(("outer", "inner"), cases((3, 2), grid=[(2, 2), (3, 2), (2, 4)]))
def test_all_to_all_bytes_match_closed_forms(ranks, outer, inner):
    elements = 24 * 10
    actual = by_axis(ranks(outer=outer, inner=inner).sent(EXCHANGE, (elements,)))
    inside, across = cost.all_to_all(4 * elements, inner), cost.all_to_all(4 * elements, outer)
    assert actual == {("inner",): (inside.steps, inside.bytes_sent), ("outer",): (across.steps, across.bytes_sent)}


@pytest.mark.parametrize("name", ["hierarchical_all_reduce", "hierarchical_all_to_all"])
def test_levels_need_different_axes(ranks, name):
    kernel = functools.partial(getattr(mc, name), inner="x", outer="x")
    with raises("axis-used-twice", name):
        jax.eval_shape(ranks(2).view(kernel), jnp.zeros((2, 4)))
