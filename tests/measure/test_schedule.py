"""What the measurement of schedules rests on: every op sleeps once, and no step is shorter than its table allows."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from meshpar.pipeline import SCHEDULES, make
from tests.measure.schedule import measured, naps, program, sleeping

P, M = 2, 4
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_stages_sleep_once_for_each_local_op(name):
    schedule = make(name, P, M)
    run = program(schedule, sleeping(0.0))
    naps(P)
    run()
    assert naps(P) == (schedule.table[..., 0] >= 0).sum(0).tolist()


@pytest.mark.matrix
def test_report_has_a_ratio_for_each_schedule():
    found = measured(("zb-h1", "zb-v"), ((P, M),), op_s=0.001, repeats=2)
    assert [one.name for one in found.measures] == ["zb-h1, p=2 m=4", "zb-v, p=2 m=4"]
    for one in found.measures:
        # However busy the machine, no sleep is shorter than asked, and B and W of these are blocks of their own.
        assert 1 <= one.low <= one.value <= one.high < np.inf
        assert "simulated" in one.detail
