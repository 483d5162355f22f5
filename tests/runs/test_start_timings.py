"""Phases of a run until its first step."""

from __future__ import annotations

import io
import re
import time

import pytest

import meshpar as mp
from meshpar.runs.start_timings import Phases, StartTimings
from tests.errors import raises
from tests.runs.test_training_run import recipe

PHASES = ["mesh", "data", "shardings", "trace", "lower", "run folder", "init", "compile", "first step"]


class Clock(mp.hooks.Hook):
    """Record the time when the first step is dispatched."""

    def __init__(self, order: int) -> None:
        self.order, self.first_step_at = order, None

    def on_dispatched(self, run) -> None:
        self.first_step_at = self.first_step_at or time.perf_counter()


def printed(text: str) -> dict[str, float]:
    return {name: float(seconds) for name, seconds in re.findall(r"^(\w.*): (\d+\.\d\d) s$", text, re.MULTILINE)}


def test_the_phases_of_a_run_sum_to_the_elapsed_time(tmp_path):
    text, before, after = io.StringIO(), Clock(StartTimings.order - 1), Clock(StartTimings.order + 1)
    earliest, phases, latest = time.perf_counter(), Phases(), time.perf_counter()
    mp.run(recipe(), out=tmp_path, hooks=[before, after], timings=phases, stream=text)
    assert list(phases.seconds) == PHASES
    assert min(phases.seconds.values()) > 0
    elapsed = sum(phases.seconds.values())
    assert before.first_step_at - latest <= elapsed <= after.first_step_at - earliest
    seconds = printed(text.getvalue())
    assert [*seconds] == [*PHASES, "until the first step", "compilation of the step in a thread"]
    assert seconds["until the first step"] == pytest.approx(sum(phases.seconds.values()), abs=0.01)


def test_a_resumed_run_restores(tmp_path):
    for steps, phase in ((1, "init"), (2, "restore")):
        text = io.StringIO()
        mp.run(recipe(steps=steps), out=tmp_path, timings=True, stream=text)
        assert phase in printed(text.getvalue())
    mp.run(recipe(steps=2), out=tmp_path, timings=True, stream=(text := io.StringIO()))  # no step is left
    assert not printed(text.getvalue())


def test_phases_have_no_gaps(monkeypatch):
    times = iter([1.0, 3.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    phases = Phases(0.0)
    for name in ("imports", "devices", "imports"):
        phases.end(name)
    assert phases.seconds == {"imports": 2.0, "devices": 2.0}


def test_timings_must_be_a_bool(tmp_path):
    with raises("not-a-bool", "mp.run"):
        mp.run(recipe(), out=tmp_path, timings=1)
