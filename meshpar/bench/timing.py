"""Timing helpers of the benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, median, high


def seconds_of(run: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
