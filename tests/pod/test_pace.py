"""Tests that a process with slow host work is named, and no other."""

from __future__ import annotations

import pytest

from meshpar.pod import pace
from meshpar.pod.pace import WINDOW_STEPS, Pace, compare


def paces(host_s: list[float], step_s: float, *, steps: int = 2 * WINDOW_STEPS) -> list[Pace]:
    """Return the times of processes with constant host times. The first step has no time."""
    processes = [Pace() for _ in host_s]
    for process, seconds in zip(processes, host_s, strict=True):
        for step in range(2, steps + 1):
            process.add(step, host_s=seconds, step_s=step_s)
    return processes


def compared(processes: list[Pace]):
    return compare({number: process.windows for number, process in enumerate(processes)})


@pytest.mark.parametrize(("host_s", "step_s", "slow"), [
    ([0.1, 0.1, 0.1], 1.0, set()),
    ([0.1, 0.1, 1.0], 1.0, {2}),
    ([1.0, 1.0, 1.1], 1.1, set()),  # 10 % slower
    ([1.0, 1.0, 1.3], 1.3, {2}),
    ([0.1, 0.1, 0.5], 1.0, set()),  # hidden by the devices
    ([0.001, 0.001, 0.004], 0.004, set()),  # a difference of milliseconds
    ([0.1, 1.0], 1.0, {1}),
    ([0.1, 0.1, 0.1, 0.9, 1.0], 1.0, {3, 4}),
])  # fmt: skip
def test_slow_processes_exceed_the_median(host_s, step_s, slow):
    result = compared(paces(host_s, step_s))
    assert result is not None
    assert result.slow.keys() == slow
    assert (result.last_step, result.step_s) == (2 * WINDOW_STEPS, step_s)


def test_one_slow_step_is_not_reported():
    processes = paces([0.1, 0.1, 0.1], 0.2, steps=WINDOW_STEPS - 1)
    for number, process in enumerate(processes):
        process.add(WINDOW_STEPS, host_s=30.0 if number == 2 else 0.1, step_s=30.0)
    result = compared(processes)
    assert result is not None
    assert not result.slow


def test_slow_steps_must_fill_most_of_a_window():
    for num_slow, slow in ((10, set()), (40, {1})):
        processes = [Pace() for _ in range(3)]
        for number, process in enumerate(processes):
            for step in range(1, WINDOW_STEPS + 1):
                is_slow = step <= num_slow
                process.add(step, host_s=1.0 if is_slow and number == 1 else 0.1, step_s=1.0 if is_slow else 0.2)
        result = compared(processes)
        assert result is not None
        assert result.slow.keys() == slow


def test_windows_are_compared_at_the_same_step():
    fast, slow = paces([0.1, 1.0], 1.0, steps=3 * WINDOW_STEPS)
    slow.windows = slow.windows[:2]  # the heartbeat of this process is older
    result = compared([fast, slow])
    assert result is not None
    assert result.last_step == 2 * WINDOW_STEPS
    assert compared([fast, Pace()]) is None
    assert compare({}) is None


def test_incomplete_windows_are_skipped_and_old_windows_dropped():
    resumed = Pace()
    for step in range(WINDOW_STEPS // 2, WINDOW_STEPS + 1):
        resumed.add(step, host_s=0.1, step_s=0.1)
    assert resumed.windows == []
    (process,) = paces([0.1], 0.1, steps=20 * WINDOW_STEPS)
    assert len(process.windows) == pace._NUM_WINDOWS
    assert process.windows[-1] == (20 * WINDOW_STEPS, 0.1, 0.1)
