"""The table of strategies in the README is what compiled programs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpar.inspect import strategy_table as reference
from meshpar.sharding.types import axis_sizes

pytestmark = pytest.mark.pod
README = Path(__file__).parents[2] / "README.md"
NAMES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "sequence", "fsdp_tensor", "context", "heads", "quantized")
"""The reference decoder's programs, compiled once for all tests, in the order of the table."""


class Compiled:
    """Stands for a compiling process: gives the programs in their order."""

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


def test_the_readme_has_the_table(table):
    assert table.markdown in README.read_text(), "put the output of `meshpar explain --table` there"


def test_a_layer_sends_what_the_literature_says(table):
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
        # Keys and values round a ring of 8, forward and backward, and backward their gradients.
        {"context": {"all-reduce": weights, "collective-permute": 3 * 7}},
        # Queries, keys, values and the heads' output, forward and backward.
        {"context": {"all-reduce": weights, "all-to-all": 2 * 4}},
        # The gradients of the norms' scales, whose stacks are gathered whole, are scattered layer by layer.
        {"fsdp": {"all-gather": 2 * weights, "all-to-all": weights}},
    ]


def test_every_strategy_keeps_its_promise(table):
    assert all(report.is_as_promised and not report.promise.missing for report in table.reports)
