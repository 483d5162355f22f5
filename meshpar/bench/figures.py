"""Figures of a benchmark, and ratios of two programs taken in turn.

Machines are shared and noisy, so the two sides of a ratio run in turn, A B A B …, and the median of the pairs is kept
with its spread.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from meshpar.sharding.printing import Plain, table

_Key = TypeVar("_Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure(Plain):
    """One figure, and what it should stay under."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    low: float | None = None
    """Quartiles of the pairs it is the median of."""
    high: float | None = None
    detail: str = ""
    derived = ("holds",)

    @property
    def holds(self) -> bool:
        """Whether it is within its limit."""
        return self.limit is None or self.value <= self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures(Plain):
    """The figures of one benchmark. Prints as a table."""

    title: str
    measures: tuple[Measure, ...]

    def __rich__(self) -> Any:
        columns = ("measure", "median", "quartiles", "limit", "", "how")
        return table(self.title, columns, map(_cells, self.measures), left=("measure", "", "how"))


def _cells(m: Measure) -> tuple[str, ...]:
    spread = "" if m.low is None or m.high is None else f"{m.low:.3g} – {m.high:.3g}"
    limit = "" if m.limit is None else f"{m.limit:g} {m.unit}"
    verdict = "" if m.limit is None else "[green]holds[/]" if m.holds else "[red]over[/]"
    return m.name, f"{m.value:.4g} {m.unit}", spread, limit, verdict, m.detail


def paired_ratios(a: Callable[[], None], b: Callable[[], None], pairs: int) -> list[float]:
    """Time of a over time of b, pair by pair, the order within a pair alternating; one pair of warm-up."""
    a()
    b()
    ratios = []
    for index in range(pairs):
        first, second = (a, b) if index % 2 == 0 else (b, a)
        one, two = seconds_of(first), seconds_of(second)
        ratios.append(one / two if first is a else two / one)
    return ratios


def in_turn(programs: Mapping[_Key, Callable[[], object]], repeats: int) -> dict[_Key, list[float]]:
    """Seconds of each, round by round, after one of warm-up."""
    for program in programs.values():
        program()
    found: dict[_Key, list[float]] = {key: [] for key in programs}
    for _ in range(repeats):
        for key, program in programs.items():
            found[key].append(seconds_of(program))
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The second is the median."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, median, high


def load() -> float:
    """The machine's, over the last minute; NaN where it is unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def seconds_of(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
