"""Budgets: saved communication and memory of a step, compared with later programs.

A step exceeds its budget if the collectives of a kind and axes send more bytes or run more often, or if the peak memory
is higher. Small growth passes: up to a relative tolerance, or up to `SLACK_BYTES` or `SLACK_COUNT`, so that adding a
metric does not exceed the budget.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshpar.inspect.report import Report
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.printing import Plain, flat, human_mesh, parsed
from meshpar.sharding.units import human_bytes

TOLERANCE = 0.01
"""Growth up to this fraction of the saved value does not exceed the budget."""
SLACK_BYTES = 4096
"""Growth up to this many bytes does not exceed the budget, independent of the saved size."""
SLACK_COUNT = 2
"""Growth up to this many collectives per step does not exceed the budget, independent of the saved count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Plain):
    """A difference between the communication or memory of a program and its budget."""

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
    """Version of jax. The compiled program depends on it."""
    tolerance: float = TOLERANCE

    @staticmethod
    def of(report: Report, name: str) -> Budget:
        """Return a budget with the communication and memory of a report."""
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
        where, fix = f"budget {path}", "save a budget with meshpar explain ... --save-budget FILE"
        data = read_json(path, where, fix)
        budget = parsed(Budget, {"tolerance": TOLERANCE, **data} if isinstance(data, dict) else {}, where, fix)
        if any(total.keys() != _NOTHING.keys() for total in flat(budget.totals).values()):
            reason = f"each of its `totals` must have {' and '.join(_NOTHING)}"
            raise problem(where, "read it", reason, fix, code="damaged-file")
        return budget

    def check_comparable(self, where: str, *, name: str, target: str, mesh: Mapping[str, int]) -> None:
        """Check that the budget was saved for this recipe, target and mesh. Raise `MeshparError` if it was not."""
        for field, saved, actual in (
            ("recipe", self.name, name),
            ("target", self.target, target),
            ("mesh", human_mesh(self.mesh), human_mesh(mesh)),
        ):
            if saved != actual:
                requested, reason = f"apply it to {field} `{actual}`", f"it was saved for {field} `{saved}`"
                fix = f"use that {field}, or save a new budget with --save-budget"
                raise problem(f"budget {where}", requested, reason, fix, code="conflict")

    def differences(self, report: Report) -> tuple[Difference, ...]:
        """Return the differences between a report and the budget, exceeded limits first."""
        differences = [*self._communication(report), *self._other(report)]
        return tuple(sorted(differences, key=lambda difference: not difference.is_over))

    def _communication(self, report: Report) -> Iterator[Difference]:
        saved, now = flat(self.totals), flat(report.to_json()["totals"])
        for axes, kind in {**saved, **now}:
            before, after = (totals.get((axes, kind), _NOTHING) for totals in (saved, now))
            old, new = before["bytes_sent_per_device"], after["bytes_sent_per_device"]
            counts = before["count_per_step"], after["count_per_step"]
            is_more = self._is_over(*counts, slack=SLACK_COUNT)
            times = f"{counts[0]:,} → {counts[1]:,} per step"
            if self._is_over(old, new) or self._is_over(new, old):
                change = "sends more" if new > old else "sends less"
                text = f"{kind} over {axes} {change}: {human_bytes(old)} → {human_bytes(new)} per device ({times})"
                yield Difference(text=text, is_over=new > old or is_more)
            elif counts[0] != counts[1]:
                change = f"runs {'more' if counts[1] > counts[0] else 'less'} often"
                text = f"{kind} over {axes} {change}: {times}, with unchanged {human_bytes(new)}"
                yield Difference(text=text, is_over=is_more)

    def _other(self, report: Report) -> Iterator[Difference]:
        peak, new_peak = self.peak_bytes, report.memory.peak_bytes
        if self._is_over(peak, new_peak) or self._is_over(new_peak, peak):
            change = "higher" if new_peak > peak else "lower"
            text = f"peak memory is {change}: {human_bytes(peak)} → {human_bytes(new_peak)}"
            yield Difference(text=text, is_over=new_peak > peak)
        version = importlib.metadata.version("jax")
        for name, old, new in (("strategy", self.strategy, report.strategy), ("jax", self.jax_version, version)):
            if old != new:
                yield Difference(text=f"{name} was {old} and is {new}", is_over=False)

    def _is_over(self, limit: float, value: float, slack: float = SLACK_BYTES) -> bool:
        return value > limit * (1 + self.tolerance) and value - limit > slack


_NOTHING: Mapping[str, float] = {"count_per_step": 0, "bytes_sent_per_device": 0.0}
