"""Conversion of the op order of each stage into ticks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshpar.schedules.ops import KINDS, LONG, B, Block, F, StageOp, W
from meshpar.sharding.errors import problem

Event = tuple[str, int, int]
"""(kind, microbatch, model part): an op that runs once per step, on whichever stage."""


def needs(kind: str, microbatch: int, part: int, num_parts: int) -> Event | None:
    """Return the op whose result an op needs; None for the first forward."""
    if kind == "F":
        return ("F", microbatch, part - 1) if part else None
    if kind == "B":
        return ("B", microbatch, part + 1) if part < num_parts - 1 else ("F", microbatch, part)
    return "B", microbatch, part


def starts(
    name: str, rows: Sequence[Sequence[Block]], parts: np.ndarray, *, lengths: Sequence[Sequence[float]] | None = None,
    comm: Sequence[float] | None = None,
) -> list[list[Any]]:  # fmt: skip
    """Return the start time of each block if stages run their blocks in order and as soon as possible.

    `parts[stage, chunk]` is the position of a chunk in the model, `lengths` are the durations of the blocks (default: a
    tick per op), and `comm` is the latency of a message received by each stage (default: 0).
    """
    num_parts = int(parts.max()) + 1
    done: dict[Event, tuple[int, Any]] = {}
    begun: list[list[Any]] = [[] for _ in rows]
    free: list[Any] = [0] * len(rows)
    waiting: dict[Event, list[int]] = defaultdict(list)
    ready = list(range(len(rows)))
    while ready:
        stage = ready.pop()
        while len(begun[stage]) < len(rows[stage]):
            block = rows[stage][len(begun[stage])]
            inputs = list(_inputs(block, parts[stage], num_parts))
            missing = [event for event in inputs if event not in done]
            if missing:
                waiting[missing[0]].append(stage)
                break
            begin = free[stage]
            for origin, end in (done[event] for event in inputs):
                begin = max(begin, end + (comm[stage] if comm and origin != stage else 0))
            free[stage] = begin + (lengths[stage][len(begun[stage])] if lengths else len(block))
            begun[stage].append(begin)
            for op in block:
                event = (op.kind, op.microbatch, int(parts[stage, op.chunk]))
                done[event] = stage, free[stage]
                ready += waiting.pop(event, [])
    if any(len(times) < len(row) for times, row in zip(begun, rows, strict=True)):
        raise _stuck(name, begun, rows, parts)
    return begun


def _inputs(block: Block, parts: np.ndarray, num_parts: int) -> Iterator[Event]:
    """Yield the results that a block needs from other blocks."""
    outputs = {(op.kind, op.microbatch, int(parts[op.chunk])) for op in block}
    for op in block:
        event = needs(op.kind, op.microbatch, int(parts[op.chunk]), num_parts)
        if event is not None and event not in outputs:
            yield event


def _stuck(name: str, begun: Sequence[Sequence[int]], rows: Sequence[Sequence[Block]], parts: np.ndarray) -> Exception:
    """Return the error for rows that cannot be completed: an op is missing or too late in its row, or a deadlock."""
    num_parts = int(parts.max()) + 1
    blocks = [(stage, number, block) for stage, row in enumerate(rows) for number, block in enumerate(row)]
    place = {
        (op.kind, op.microbatch, int(parts[stage, op.chunk])): (stage, number)
        for stage, number, block in blocks
        for op in block
    }

    def error(stage: int, number: int, event: Event, reason: str, fix: str, code: str) -> Exception:
        where = (
            f"schedule `{name}`, stage {stage}, block {number} ({'&'.join(op.text() for op in rows[stage][number])})"
        )
        kind, microbatch, part = event
        requested = f"use the result of {kind} ({LONG[kind]}) of microbatch {microbatch} on part {part} of the model"
        return problem(where, requested, reason, fix, code=code)

    waiting = [
        (stage, number, event)
        for stage, number, block in blocks
        for event in _inputs(block, parts[stage], num_parts)
        if number >= len(begun[stage])
    ]
    for stage, number, event in waiting:
        if event not in place:
            fix = f"add it to the row of the stage that runs part {event[2]}"
            return error(stage, number, event, "no stage runs that op", fix, "missing-op")
    for (kind, microbatch, part), (stage, number) in place.items():
        event = {"F": "F", "B": "F", "W": "B"}[kind], microbatch, part
        source_stage, source_number = place.get(event, (stage, number))
        if source_stage == stage and source_number > number:
            reason = f"{event[0]} of this microbatch is later in the row, in block {source_number}"
            return error(stage, number, event, reason, f"move {event[0]} before {kind}", "wrong-order")
    # All blocked stages depend on blocked stages, so following the dependencies ends in a cycle.
    first = {stage: (number, event) for stage, number, event in reversed(waiting) if number == len(begun[stage])}
    stage, seen = next(iter(first)), set[int]()
    while stage not in seen:
        seen.add(stage)
        stage = place[first[stage][1]][0]
    number, event = first[stage]
    reason = f"stage {place[event][0]}, which runs it, needs results of this stage: a deadlock"
    return error(stage, number, event, reason, "reorder the ops of either stage", "deadlock")


def placed(rows: Sequence[Sequence[Block]], begun: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the table `[tick, stage, kind, (microbatch, chunk)]` with an op per tick, and `joined[tick, stage]`."""
    num_ticks = max((times[-1] + len(row[-1]) for row, times in zip(rows, begun, strict=True) if row), default=0)
    table = np.full((num_ticks, len(rows), len(KINDS), 2), -1, np.int32)
    joined = np.zeros((num_ticks, len(rows)), bool)
    for stage, (row, times) in enumerate(zip(rows, begun, strict=True)):
        for block, time in zip(row, times, strict=True):
            for tick, op in enumerate(block, time):
                table[tick, stage, op.number] = op.microbatch, op.chunk
            joined[time : time + len(block) - 1, stage] = True
    return table, joined


def paired(table: np.ndarray, joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the F, B and W of overlapped pairs into a single tick wherever that delays no other stage.

    Consecutive ticks of a pair are merged if no stage has ops of different blocks in them. A result of the
    first tick is never needed in a later tick of the pair, because a block needs all inputs when it starts.
    """
    busy = table[..., 0] >= 0
    begins_pair = np.any(joined[:-1] & busy[:-1, :, F] & busy[1:, :, B], axis=1)
    extends_pair = np.any(joined[:-1] & busy[:-1, :, B] & busy[1:, :, W], axis=1)
    # A stage that starts a new block in the second tick may need a result of the first.
    fits = ~np.any(busy[1:].any(2) & ~joined[:-1], axis=1)
    keep = np.ones(len(table), bool)
    first = 0
    while first < len(table) - 1:
        tick = first
        while tick < len(table) - 1 and fits[tick] and (begins_pair if tick == first else extends_pair)[tick]:
            tick += 1
            table[first] = np.maximum(table[first], table[tick])
            joined[first] = joined[tick]
            keep[tick] = False
        first = tick + 1
    return table[keep], joined[keep]


def filled(rows: Sequence[Sequence[StageOp]], parts: np.ndarray, limit: int) -> list[list[Block]]:
    """Run F and B in the given order, each as soon as possible, and W whenever a stage would otherwise be idle.

    F is delayed while a stage has `limit` saved activations, each kept from F through W. `parts[stage, chunk]` is the
    position of a chunk in the model.
    """
    num_parts = int(parts.max()) + 1
    done: dict[Event, int] = {}
    pending: list[list[StageOp]] = [[] for _ in rows]
    num_saved, position = [0] * len(rows), [0] * len(rows)
    order: list[list[Block]] = [[] for _ in rows]
    tick = 0

    def can_run(op: StageOp, stage: int) -> bool:
        event = needs(op.kind, op.microbatch, int(parts[stage, op.chunk]), num_parts)
        return (event is None or done.get(event, tick) < tick) and (num_saved[stage] < limit or op.kind != "F")

    while any(pending) or any(index < len(row) for index, row in zip(position, rows, strict=True)):
        picked: list[tuple[int, StageOp]] = []
        for stage, row in enumerate(rows):
            op = row[position[stage]] if position[stage] < len(row) else None
            if op is not None and can_run(op, stage):
                picked.append((stage, op))
                position[stage] += 1
            elif pending[stage]:
                picked.append((stage, pending[stage].pop(0)))
        for stage, op in picked:
            order[stage].append((op,))
            done[op.kind, op.microbatch, int(parts[stage, op.chunk])] = tick
            num_saved[stage] += (op.kind == "F") - (op.kind == "W")
            if op.kind == "B":
                pending[stage].append(op._replace(kind="W"))
        tick += 1
        assert picked, f"deadlock at positions {position}"
    return order
