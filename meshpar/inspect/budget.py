"""Budgets: saved communication and memory of a step, compared with later programs.

A step is over its budget when some kind of collective over some axes sends more bytes or runs more often, or when the
peak of memory is higher. Growth within the tolerance passes, and so does growth below `SLACK_BYTES` or `SLACK_COUNT`,
because a new metric is no regression.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshpar.inspect.report import Report
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.printing import Plain, flat, human_mesh
from meshpar.sharding.types import problem
from meshpar.sharding.units import human_bytes

TOLERANCE = 0.01
"""Relative growth that passes."""
SLACK_BYTES = 4096
"""Growth by at most this many bytes passes, whatever the size was before."""
SLACK_COUNT = 2
"""Growth by at most this many collectives a step passes, whatever the count was before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Plain):
    """A difference between a report and a budget."""

    text: str
    is_over: bool
    """True if the difference exceeds the budget."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Plain):
    """Communication and memory of a step at the time of saving."""

    name: str
    """Name of the recipe."""
    target: str
    """The cluster (`h100:8x8`), or the platform of the local devices (`cpu`)."""
    mesh: Mapping[str, int]
    strategy: str
    totals: Mapping[str, Mapping[str, Mapping[str, float]]]
    """axes -> kind -> `count_per_step` and `bytes_sent_per_device`, as in a report's JSON."""
    peak_bytes: int
    jax_version: str
    """Version of jax. Another version may compile another program."""
    tolerance: float = TOLERANCE

    @staticmethod
    def of(report: Report, name: str) -> Budget:
        """Return the budget that a report meets exactly."""
        return Budget(
            name=name,
            target=report.target,
            mesh=dict(report.mesh),
            strategy=report.strategy,
            totals=report.to_json()["totals"],
            peak_bytes=report.memory.peak_bytes,
            jax_version=importlib.metadata.version("jax"),
        )

    def save(self, path: str | Path) -> None:
        """Write the budget as JSON, to read with `load`. Raise `MeshparError` if the file cannot be written."""
        write_json(path, self.to_json(), "budget")

    @staticmethod
    def load(path: str | Path) -> Budget:
        """Read a budget from a JSON file. Raise `MeshparError` if the file is missing or not a budget."""
        found = read_json(path, f"budget {path}", "write one with --save-budget")
        fields = {field.name for field in dataclasses.fields(Budget)}
        missing = (fields - {"tolerance"}) - set(found) if isinstance(found, dict) else fields
        if missing or set(found) - fields:
            what = f"it lacks {', '.join(sorted(missing))}" if missing else f"it has {', '.join(set(found) - fields)}"
            raise _unusable(path, "take it as a budget", what)
        for field in sorted(fields & set(found)):
            if not _is_sound(field, found[field]):
                raise _unusable(path, "take it as a budget", f"its `{field}` is garbled: {found[field]!r:.60}")
        return Budget(**found)

    def check_comparable(self, where: str, *, name: str, target: str, mesh: Mapping[str, int]) -> None:
        """See that a step is what the budget is about.

        Raises:
          ValueError: it was saved for another recipe, target or mesh.
        """
        mine = {"recipe": self.name, "target": self.target, "mesh": human_mesh(self.mesh)}
        theirs = {"recipe": name, "target": target, "mesh": human_mesh(mesh)}
        for what, saved in mine.items():
            if saved != theirs[what]:
                asked = f"hold {what} `{theirs[what]}` to it"
                fix = "name that budget's own, or save a new one with --save-budget"
                raise problem(f"budget {where}", asked, f"it was saved for {what} `{saved}`", fix)

    def differences(self, report: Report) -> tuple[Difference, ...]:
        """Return the differences between a report and the budget, exceeded limits first."""
        found = [*self._sent(report), *self._held(report), *self._made_by(report)]
        return tuple(sorted(found, key=lambda one: not one.is_over))

    def _sent(self, report: Report) -> Iterator[Difference]:
        saved, now = flat(self.totals), flat(report.to_json()["totals"])
        for axes, kind in {**saved, **now}:
            before, after = (totals.get((axes, kind), _NOTHING) for totals in (saved, now))
            old, new = before["bytes_sent_per_device"], after["bytes_sent_per_device"]
            counts = before["count_per_step"], after["count_per_step"]
            is_more = self._is_over(*counts, slack=SLACK_COUNT)
            times = f"{counts[0]:,} → {counts[1]:,} a step"
            if self._is_over(old, new) or self._is_over(new, old):
                grew = "sends more" if new > old else "sends less"
                text = f"{kind} over {axes} {grew}: {human_bytes(old)} → {human_bytes(new)} by each device ({times})"
                yield Difference(text=text, is_over=new > old or is_more)
            elif counts[0] != counts[1]:
                often = f"{kind} over {axes} runs {'more' if counts[1] > counts[0] else 'less'} often"
                yield Difference(text=f"{often}: {times}, of {human_bytes(new)} as before", is_over=is_more)

    def _held(self, report: Report) -> Iterator[Difference]:
        old, new = self.peak_bytes, report.memory.peak_bytes
        if self._is_over(old, new) or self._is_over(new, old):
            grew = "higher" if new > old else "lower"
            text = f"peak memory is {grew}: {human_bytes(old)} → {human_bytes(new)}"
            yield Difference(text=text, is_over=new > old)

    def _made_by(self, report: Report) -> Iterator[Difference]:
        version = importlib.metadata.version("jax")
        for what, old, new in (("strategy", self.strategy, report.strategy), ("jax", self.jax_version, version)):
            if old != new:
                yield Difference(text=f"{what} was {old} and is {new}", is_over=False)

    def _is_over(self, limit: float, value: float, slack: float = SLACK_BYTES) -> bool:
        return value > limit * (1 + self.tolerance) and value - limit > slack


_NOTHING: Mapping[str, float] = {"count_per_step": 0, "bytes_sent_per_device": 0.0}


def _is_sound(field: str, value: Any) -> bool:
    if field in ("peak_bytes", "tolerance"):
        return _is_amount(value)
    if field == "mesh":
        return isinstance(value, dict) and {type(size) for size in value.values()} <= {int}
    if field == "totals":
        kinds: list[Any] = list(value.values()) if isinstance(value, dict) else [None]
        totals: list[Any] = []
        for kind in kinds:
            totals += kind.values() if isinstance(kind, dict) else [None]
        return all(isinstance(total, dict) and set(total) == set(_NOTHING) for total in totals) and all(
            _is_amount(number) for total in totals for number in total.values()
        )
    return isinstance(value, str)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _unusable(path: str | Path, asked: str, exists: str) -> Exception:
    return problem(f"budget {path}", asked, exists, "save one with meshpar explain ... --save-budget FILE")
