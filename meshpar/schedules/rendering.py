"""Plain-text rendering of a schedule."""

from __future__ import annotations

from meshpar.schedules.table import ScheduleTable

IDLE = "·"


def grid(schedule: ScheduleTable) -> list[list[str]]:
    """Return the text of every tick slot, `[stage][tick]`: `F3`, `F3.1` for chunk 1, `F3B1` for a pair."""
    is_chunked = schedule.chunks > 1
    return [
        [
            "".join(op.text(chunked=is_chunked) for op in schedule.cell(tick, stage)) or IDLE
            for tick in range(schedule.ticks)
        ]
        for stage in range(schedule.stages)
    ]


def bands_of(widths: list[int], room: int) -> list[range]:
    """Group columns into bands of at most `room` characters."""
    bands, begin, used = [], 0, 0
    for column, width in enumerate(widths):
        if used and used + 1 + width > room:
            bands.append(range(begin, column))
            begin, used = column, 0
        used += width + (1 if used else 0)
    return [*bands, range(begin, len(widths))]
