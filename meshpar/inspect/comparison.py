"""Comparison of two reports: memory, communication per axis and predicted step time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from meshpar.inspect.census import Total
from meshpar.inspect.render import Cell, Section, Table, headline, rich_of
from meshpar.inspect.report import Report
from meshpar.sharding.printing import Plain, flat, human_mesh, plain
from meshpar.sharding.units import human_bytes, human_flops, human_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Plain):
    """A row of the comparison: the values of both reports. None marks a value that a report lacks."""

    quantity: str
    unit: str
    """`bytes`, `s`, `FLOP`, `count`, `fraction`, or empty for text."""
    first: Any
    second: Any
    derived = ("difference",)

    @property
    def difference(self) -> float | None:
        """The second number minus the first; None for text."""
        if self.first is None or self.second is None or not self.unit:
            return None
        return self.second - self.first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two reports, value by value. Prints as a table."""

    first: Report
    second: Report
    labels: tuple[str, str]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(_rows(self.first, self.second))

    def to_json(self) -> dict[str, Any]:
        return plain({"labels": self.labels, "report": self.second, "differences": self.rows})

    @property
    def sections(self) -> tuple[Section, ...]:
        """Return the comparison as titled tables, which `render` prints."""
        rows = tuple(
            (
                Cell(row.quantity),
                Cell(_text(row.first, row.unit)),
                Cell(_text(row.second, row.unit)),
                Cell(_changed(row), "" if row.difference else "faint"),
            )
            for row in self.rows
        )
        columns = ("", *(f"{label}>" for label in self.labels), "difference>")
        table = Table(columns=columns, rows=rows, most=len(rows))
        verdicts = [
            Cell(f"{label}: {cell.text}", cell.style)
            for label, report in zip(self.labels, (self.first, self.second), strict=True)
            for cell in headline(report)[1:3]
        ]
        return (Section(title="Side by side", parts=(*verdicts, table)),)

    def __rich__(self) -> Any:
        return rich_of(self.sections)


def _rows(first: Report, second: Report) -> Iterator[Row]:
    both = (first, second)

    def row(quantity: str, unit: str, of: Callable[[Report], Any]) -> Row:
        return Row(quantity=quantity, unit=unit, first=of(first), second=of(second))

    yield row("mesh", "", lambda report: human_mesh(report.mesh))
    yield row("strategy", "", lambda report: report.strategy)
    yield row("target", "", lambda report: report.target)
    yield row("peak memory", "bytes", lambda report: report.memory.peak_bytes)
    yield row("  state", "bytes", lambda report: report.memory.state_bytes)
    yield row("  temporaries", "bytes", lambda report: report.memory.temporaries_bytes)
    totals = [flat(report.totals) for report in both]
    for axes, kind in {**totals[0], **totals[1]}:
        old, new = (by_kind.get((axes, kind), Total(0, 0.0)) for by_kind in totals)
        sent = old.bytes_sent_per_device, new.bytes_sent_per_device
        yield Row(quantity=f"{kind} over {axes}", unit="bytes", first=sent[0], second=sent[1])
        runs = f"  {kind} over {axes}, runs per step"  # unique, for readers of the JSON
        yield Row(quantity=runs, unit="count", first=old.count_per_step, second=new.count_per_step)
    yield row("total sent", "bytes", lambda report: sum(s.collective.bytes_sent_per_step for s in report.collectives))
    if any(report.stages is not None for report in both):
        yield row("bubble of the schedule", "fraction", lambda report: report.stages and report.stages.bubble_fraction)
    yield row("unexpected", "count", lambda report: len(report.matching.unexpected))
    yield row("FLOPs per device", "FLOP", lambda report: report.compute.flops_per_device)
    if any(report.compute.predicted_step_s is not None for report in both):
        yield row("predicted step", "s", lambda report: report.compute.predicted_step_s)
        yield row("  bound by", "", lambda report: report.compute.bound)
        yield row("  model FLOP utilisation", "fraction", lambda report: report.compute.utilisation)
        yield row("  communication hidden", "fraction", lambda report: report.overlap.hidden_fraction)


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    formats: dict[str, Callable[[float], str]] = {
        "bytes": human_bytes,
        "s": human_time,
        "FLOP": human_flops,
        "count": lambda number: f"{number:,}",
        "fraction": lambda number: f"{number:.0%}",
    }
    return formats[unit](value) if unit else str(value)


def _changed(row: Row) -> str:
    change = row.difference
    if change is None:
        return "" if row.first == row.second else "differs"
    if not change:
        return "same"
    sign = "+" if change > 0 else "−"
    if row.unit == "fraction":
        points = round(100 * abs(change))
        return f"{sign}{points} points" if points else "less than a point"
    share = f" ({row.second / row.first:.2f}×)" if row.first and row.second else ""
    return f"{sign}{_text(abs(change), row.unit)}{share}"
