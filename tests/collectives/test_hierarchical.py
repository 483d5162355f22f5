"""Steps and bytes of hierarchical kernels on both levels."""

from __future__ import annotations

import functools

import pytest

from meshpar import collectives as mc
from meshpar.hardware import cost_model as cost
from tests.grid import cases

ELEMENTS = 840
BYTES = 4 * ELEMENTS
REDUCE = functools.partial(mc.hierarchical_all_reduce, inner="inner", outer="outer")
EXCHANGE = functools.partial(mc.hierarchical_all_to_all, inner="inner", outer="outer")


def by_axis(collectives):
    """Return {axes: (permutes, bytes)}."""
    return {
        axes: (
            sum(c.count_per_step for c in collectives if c.axes == axes),
            sum(c.bytes_sent_per_step for c in collectives if c.axes == axes),
        )
        for axes in {c.axes for c in collectives}
    }


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
