"""A table played through, buffers and all: whether every op finds in its slot what is meant for it."""

from __future__ import annotations

import numpy as np

from meshpar.schedules import KINDS, Schedule, Slots
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import SHIFTS

What = tuple[int, int, int]
"""Result of an op: kind, microbatch, part."""


class Stale(Exception):
    """A slot is empty, or holds something else."""


def replay(schedule: Schedule, slots: Slots | None = None) -> Slots:
    """The schedule's slots, or these.

    Raises:
      Stale: an op reads from a slot what was not meant for it; names tick, stage and microbatch.
    """
    slots = slots or schedule.slots()
    held: dict[tuple[str, int, int], What] = {}
    for tick in range(schedule.ticks):
        results = [_run_cell(slots, schedule, held, tick, stage) for stage in range(schedule.stages)]
        for stage, direction, lane in np.argwhere(slots.arrives[tick] >= 0).tolist():
            origin = (stage - SHIFTS[direction]) % schedule.stages
            kind = int(slots.sends[tick, origin, direction, lane])
            if kind in results[origin]:
                held["inbox", stage, int(slots.arrives[tick, stage, direction, lane])] = results[origin][kind]
    return slots


def _run_cell(slots: Slots, schedule: Schedule, held: dict, tick: int, stage: int) -> dict[int, What]:
    """Reads and writes of one cell; gives its results by kind."""
    results: dict[int, What] = {}

    def read(buffer: str, kind: int, wanted: What) -> None:
        found = held.get((buffer, stage, int(getattr(slots, buffer)[tick, stage, kind])))
        if found != wanted:
            raise Stale(f"tick {tick}, stage {stage}, {buffer}: wants what {_text(wanted)} left, finds {_text(found)}")

    for op in schedule.cell(tick, stage):
        kind, part = op.number, int(schedule.parts[stage, op.chunk])
        before = part - 1 if kind == F else part + 1
        if kind != W and 0 <= before < schedule.num_parts:
            read("inbox", kind, (kind, op.microbatch, before))
        if kind != F:
            read("stash", kind, (F, op.microbatch, part))
        if kind == W and (slots.backlog[tick, stage, W] >= 0 or results.get(B) != (B, op.microbatch, part)):
            read("backlog", W, (B, op.microbatch, part))
        results[kind] = (kind, op.microbatch, part)
        for buffer, writer in (("stash", F), ("backlog", B)):
            if kind == writer:
                held[buffer, stage, int(getattr(slots, buffer)[tick, stage, kind])] = results[kind]
    return results


def _text(what: What | None) -> str:
    return "nothing" if what is None else f"{KINDS[what[0]]} of microbatch {what[1]} on part {what[2]}"
