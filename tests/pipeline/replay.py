"""Replay of a schedule with its buffers, which checks that each op reads the value that was saved for it."""

from __future__ import annotations

import numpy as np

from meshpar.schedules import KINDS, Schedule, Slots
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import SHIFTS

Value = tuple[int, int, int]
"""Result of an op: kind, microbatch, model part."""


class Stale(Exception):
    """A slot is empty or contains a different value."""


def replay(schedule: Schedule, slots: Slots | None = None) -> Slots:
    """Replay a schedule with `slots` or its own slots, and return them.

    Raises:
      Stale: an op reads the wrong value; the message contains tick, stage and microbatch.
    """
    slots = slots or schedule.slots()
    buffers: dict[tuple[str, int, int], Value] = {}
    for tick in range(schedule.ticks):
        results = [_run_cell(slots, schedule, buffers, tick, stage) for stage in range(schedule.stages)]
        for stage, direction, lane in np.argwhere(slots.arrives[tick] >= 0).tolist():
            origin = (stage - SHIFTS[direction]) % schedule.stages
            kind = int(slots.sends[tick, origin, direction, lane])
            if kind in results[origin]:
                slot = int(slots.arrives[tick, stage, direction, lane])
                buffers["receive_buffer", stage, slot] = results[origin][kind]
    return slots


def _run_cell(slots: Slots, schedule: Schedule, buffers: dict, tick: int, stage: int) -> dict[int, Value]:
    """Run the ops of a stage in a tick, and return their results by kind."""
    results: dict[int, Value] = {}

    def slot_of(buffer: str, kind: int) -> tuple[str, int, int]:
        return buffer, stage, int(getattr(slots, buffer)[tick, stage, kind])

    def read(buffer: str, kind: int, expected: Value) -> None:
        value = buffers.get(slot_of(buffer, kind))
        if value != expected:
            raise Stale(f"tick {tick}, stage {stage}, {buffer}: expected {_text(expected)}, got {_text(value)}")

    for op in schedule.cell(tick, stage):
        kind, part = op.number, int(schedule.parts[stage, op.chunk])
        source = part - 1 if kind == F else part + 1
        if kind != W and 0 <= source < schedule.num_parts:
            read("receive_buffer", kind, (kind, op.microbatch, source))
        if kind != F:
            read("saved_activations", kind, (F, op.microbatch, part))
        is_deferred = slots.deferred_weight_grads[tick, stage, W] >= 0
        if kind == W and (is_deferred or results.get(B) != (B, op.microbatch, part)):
            read("deferred_weight_grads", W, (B, op.microbatch, part))
        results[kind] = (kind, op.microbatch, part)
        for buffer, writer in (("saved_activations", F), ("deferred_weight_grads", B)):
            if kind == writer:
                buffers[slot_of(buffer, kind)] = results[kind]
    return results


def _text(value: Value | None) -> str:
    return "nothing" if value is None else f"{KINDS[value[0]]} of microbatch {value[1]} on part {value[2]}"
