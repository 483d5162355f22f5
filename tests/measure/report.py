"""Tables of measured figures, and timing of several programs in turn.

Machines are shared and noisy, so programs run in turn, A B A B …, and the median of the repeats is kept with its
quartiles.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from meshpar.bench.timing import seconds_of
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


def in_turn(programs: Mapping[_Key, Callable[[], object]], repeats: int) -> dict[_Key, list[float]]:
    """Return the seconds of each program by round, after one round of warm-up."""
    for program in programs.values():
        program()
    found: dict[_Key, list[float]] = {key: [] for key in programs}
    for _ in range(repeats):
        for key, program in programs.items():
            found[key].append(seconds_of(program))
    return found


def load() -> float:
    """Return the load average of the last minute, or NaN if the platform has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
