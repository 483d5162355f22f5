"""Helpers of `ranks.py`: Kendall's τ, and estimated and measured times of all layouts."""

from __future__ import annotations

import pytest

from meshpar.hardware.clusters import parse_cluster
from tests.measure.ranks import SUBJECTS, kendall, ranked, told


def test_rank_correlation_compares_pairs():
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SUBJECTS)
def test_ranks_report_includes_every_layout(name):
    times = told(parse_cluster("h100:1x8"), SUBJECTS[name])
    assert len({one.step_s for one in times}) == len(SUBJECTS[name].layouts) == 10


@pytest.mark.matrix
def test_ranks_table_has_a_row_for_each_layout():
    small = SUBJECTS["small"]
    title, rows = ranked(small._replace(layouts=small.layouts[1:3]), parse_cluster("h100:1x8"), repeats=1)
    assert [name for name, *_ in rows] == ["fsdp=8 · zero1()", "fsdp=8 · fsdp()"]
    assert "Kendall" in title
