"""Plain-text rendering of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule

IDLE = "·"


def grid(schedule: Schedule) -> list[list[str]]:
    """Return the text of every tick slot, `[stage][tick]`: `F3`, `F3.1` for chunk 1, `F3B1` for a pair."""
    is_chunked = schedule.chunks > 1
    return [
        [
            "".join(op.text(chunked=is_chunked) for op in schedule.cell(tick, stage)) or IDLE
            for tick in range(schedule.ticks)
        ]
        for stage in range(schedule.stages)
    ]


def picture(schedule: Schedule, *, width: int | None = None) -> str:
    """Return the schedule as text, with a line per stage and a column per tick."""
    cells = grid(schedule)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    label_width = len(f"stage {schedule.stages - 1}")
    bands = [
        "\n".join(
            f"stage {stage}".ljust(label_width) + "  " + " ".join(row[t].ljust(widths[t]) for t in band).rstrip()
            for stage, row in enumerate(cells)
        )
        for band in bands_of(widths, None if width is None else width - label_width - 2)
    ]
    return "\n\n".join(bands)


def bands_of(widths: list[int], room: int | None) -> list[range]:
    """Group columns into bands of at most `room` characters."""
    if room is None:
        return [range(len(widths))]
    bands, begin, used = [], 0, 0
    for column, width in enumerate(widths):
        if used and used + 1 + width > room:
            bands.append(range(begin, column))
            begin, used = column, 0
        used += width + (1 if used else 0)
    return [*bands, range(begin, len(widths))]
