"""Comparison of the host times of all processes of a pod.

    step time = host time + time in which the process waits for its devices

All processes have the same step time, because they wait for the slowest process in the collectives of a step. So
processes are compared by host time: reading data, hooks, and dispatching the step. It is the time from the end of the
last wait until the process is ready for the next one, measured by the clock of the process. Slow devices are not
visible in it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

WINDOW_STEPS = 50
"""Number of steps in a comparison. A single slow step does not change the median of a window."""
SLOW_RATIO = 1.2
"""A process is slow if its host time is longer than this many times the median of all processes."""
_MIN_SHARE = 0.8
"""Minimum host time of a slow process as a fraction of the step time. Otherwise the devices hide the difference."""
_MIN_EXCESS_S = 0.02
"""Minimum difference from the median. Shorter differences are noise."""
_NUM_WINDOWS = 16
"""Number of windows in a heartbeat. Processes send heartbeats at different times, so their newest windows differ."""

Window: TypeAlias = Sequence[float]
"""Last step of a window, and medians of host time and step time over its steps, in seconds."""


class Pace:
    """The times of the local process, by window of `WINDOW_STEPS` steps."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        """The last complete windows."""
        self._times: list[tuple[float, float]] = []

    def add(self, step: int, *, host_s: float, step_s: float) -> None:
        """Add the times of a step. Steps start at 1."""
        self._times.append((host_s, step_s))
        if step % WINDOW_STEPS == 0:
            if len(self._times) >= WINDOW_STEPS - 1:  # the first step of a run, which compiles, has no times
                medians = (statistics.median(times) for times in zip(*self._times, strict=True))
                self.windows = [*self.windows[1 - _NUM_WINDOWS :], (step, *medians)]
            self._times = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTimes:
    """The times of all processes in a window."""

    last_step: int
    step_s: float
    """Median step time."""
    median_host_s: float
    """Median host time of all processes."""
    slow: Mapping[int, float]
    """Host times of the slow processes, by process."""


def compare(windows: Mapping[int, Sequence[Window]]) -> HostTimes | None:
    """Compare the newest window that all processes have, or return None if there is none."""
    by_process = {number: {int(step): (host_s, step_s) for step, host_s, step_s in x} for number, x in windows.items()}
    common = set.intersection(*({*x} for x in by_process.values())) if by_process else set()
    if not common:
        return None
    last_step = max(common)
    host_s = {number: x[last_step][0] for number, x in by_process.items()}
    step_s = statistics.median(x[last_step][1] for x in by_process.values())
    median_s = statistics.median(host_s.values())
    limit_s = max(SLOW_RATIO * median_s, median_s + _MIN_EXCESS_S, _MIN_SHARE * step_s)
    slow = {number: seconds for number, seconds in host_s.items() if seconds > limit_s}
    return HostTimes(last_step=last_step, step_s=step_s, median_host_s=median_s, slow=slow)
