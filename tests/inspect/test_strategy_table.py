"""The strategy table of the README matches compiled programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpar.inspect import strategy_table as reference
from meshpar.sharding.types import axis_sizes

pytestmark = pytest.mark.pod
README = Path(__file__).parents[2] / "README.md"
NAMES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "sequence", "fsdp_tensor", "context", "heads", "quantized")
"""Compiled programs of the decoder in the order of the table, shared by all tests."""


class Compiled:
    """A fake compiler process that returns compiled programs in order."""

    def __init__(self, programs):
        self._programs = iter(programs)

    def compile(self, traced, cluster, options=None):
        return next(self._programs)


@pytest.fixture(scope="module")
def table(compiled):
    plants, programs = zip(*(compiled(name) for name in NAMES), strict=True)
    for case, plant in zip(reference.CASES, plants, strict=True):
        state = case.state()
        assert state.setup.strategy == plant.state.setup.strategy
        assert axis_sizes(state.setup.mesh) == axis_sizes(plant.mesh)
        assert reference.step().options == plant.step.options
        assert plant.batch == reference.BATCH
    return reference.strategy_table(pod=Compiled(programs))


def test_readme_contains_the_table(table):
    assert table.markdown in README.read_text(), "put the output of `meshpar explain --table` there"


def test_collectives_per_layer_match_the_literature(table):
    layers = [row["layer"] for row in table.to_json()["rows"]]
    weights, leaves = 7, 9
    assert layers == [
        {"data": {"all-reduce": weights}},
        {"fsdp": {"reduce-scatter": leaves}},
        {"fsdp": {"reduce-scatter": leaves}},
        {"fsdp": {"all-gather": 2 * leaves, "reduce-scatter": leaves}},
        {"data": {"all-reduce": weights}, "fsdp": {"all-gather": 2 * leaves, "reduce-scatter": leaves}},
        {"tensor": {"all-reduce": 4}},
        {"tensor": {"all-gather": 4, "reduce-scatter": 4}},
        {"fsdp": {"all-gather": 2 * leaves, "reduce-scatter": leaves}, "tensor": {"all-reduce": 4}},
        # Keys and values travel around a ring of 8 in both passes, and their gradients in the backward pass.
        {"context": {"all-reduce": weights, "collective-permute": 3 * 7}},
        # Queries, keys, values and the attention output, in both passes.
        {"context": {"all-reduce": weights, "all-to-all": 2 * 4}},
        # The stacked norm scales are gathered once, outside the loop over layers.
        {"fsdp": {"all-gather": 2 * weights, "all-to-all": weights}},
    ]


def test_collectives_match_every_strategy(table):
    assert all(report.is_as_expected and not report.matching.missing for report in table.reports)
