"""From the order of every stage's ops to ticks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshpar.schedules.ops import KINDS, LONG, B, Block, F, StageOp, W
from meshpar.sharding.errors import problem

Event = tuple[str, int, int]
"""(kind, microbatch, part of the model): done once in a step, wherever that is."""


def needs(kind: str, microbatch: int, part: int, num_parts: int) -> Event | None:
    """What an op waits for; None for the first forward."""
    if kind == "F":
        return ("F", microbatch, part - 1) if part else None
    if kind == "B":
        return ("B", microbatch, part + 1) if part < num_parts - 1 else ("F", microbatch, part)
    return "B", microbatch, part


def starts(
    name: str, rows: Sequence[Sequence[Block]], parts: np.ndarray, *, lengths: Sequence[Sequence[float]] | None = None,
    comm: Sequence[float] | None = None,
) -> list[list[Any]]:  # fmt: skip
    """When each block begins if every stage starts each as soon as it can; whole numbers where lengths are.

    Args:
      name: of the schedule, for errors.
      rows: of each stage, its blocks in order.
      parts: `[stage, chunk]`.
      lengths: of the same blocks; None: each op takes one tick.
      comm: what each stage waits for a message; None: nothing.

    Raises:
      ValueError: an op waits for one that is in no row, or later in its own, or the stages wait for each other.
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
            outside = list(_inputs(block, parts[stage], num_parts))
            missing = [event for event in outside if event not in done]
            if missing:
                waiting[missing[0]].append(stage)
                break
            begin = free[stage]
            for origin, end in (done[event] for event in outside):
                begin = max(begin, end + (comm[stage] if comm and origin != stage else 0))
            free[stage] = begin + (lengths[stage][len(begun[stage])] if lengths else len(block))
            begun[stage].append(begin)
            for op in block:
                event = (op.kind, op.microbatch, int(parts[stage, op.chunk]))
                done[event] = stage, free[stage]
                ready += waiting.pop(event, [])
    if any(len(at) < len(row) for at, row in zip(begun, rows, strict=True)):
        raise _stuck(name, begun, rows, parts)
    return begun


def _inputs(block: Block, parts: np.ndarray, num_parts: int) -> Iterator[Event]:
    """What the block waits for and does not make itself."""
    own = {(op.kind, op.microbatch, int(parts[op.chunk])) for op in block}
    for op in block:
        event = needs(op.kind, op.microbatch, int(parts[op.chunk]), num_parts)
        if event is not None and event not in own:
            yield event


def _stuck(name: str, begun: Sequence[Sequence[int]], rows: Sequence[Sequence[Block]], parts: np.ndarray) -> Exception:
    """Why some stages never get to the end of their rows: an op that is nowhere, or too late in its row, or a cycle."""
    num_parts = int(parts.max()) + 1
    at = {
        (op.kind, op.microbatch, int(parts[stage, op.chunk])): (stage, number)
        for stage, row in enumerate(rows)
        for number, block in enumerate(row)
        for op in block
    }

    def where(stage: int, number: int) -> str:
        return f"schedule `{name}`, stage {stage}, block {number} ({'&'.join(op.text() for op in rows[stage][number])})"

    waiting = [
        (stage, number, event)
        for stage, row in enumerate(rows)
        for number, block in enumerate(row[len(begun[stage]) :], len(begun[stage]))
        for event in _inputs(block, parts[stage], num_parts)
    ]
    for stage, number, event in waiting:
        if event not in at:
            fix = f"add {event[0]} of microbatch {event[1]} to the row of the stage that holds part {event[2]}"
            return problem(where(stage, number), f"use what {_words(event)} makes", "no stage runs that op", fix)
    for (kind, microbatch, part), (stage, number) in at.items():
        before = {"F": None, "B": "F", "W": "B"}[kind]
        source = at.get((before, microbatch, part)) if before else None
        if before and source and source[0] == stage and source[1] > number:
            return problem(
                where(stage, number),
                f"run {_words((kind, microbatch, part))} before {_words((before, microbatch, part))}",
                f"{kind} uses what {before} of the same microbatch leaves, and block {source[1]} of that row runs it",
                f"move {before} of microbatch {microbatch} in front of its {kind}",
            )
    # Each stage that is stuck waits for another that is: following them ends in a cycle.
    first = {stage: (number, event) for stage, number, event in reversed(waiting) if number == len(begun[stage])}
    stage, seen = next(iter(first)), set[int]()
    while stage not in seen:
        seen.add(stage)
        stage = at[first[stage][1]][0]
    number, event = first[stage]
    exists = f"stage {at[event][0]}, which runs it, waits in the end for this one: a deadlock"
    return problem(where(stage, number), f"wait for {_words(event)}", exists, "change the order of one of their rows")


def _words(event: Event) -> str:
    kind, microbatch, part = event
    return f"{kind} ({LONG[kind]}) of microbatch {microbatch} on part {part} of the model"


def placed(rows: Sequence[Sequence[Block]], begun: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The table `[tick, stage, kind, (microbatch, chunk)]` and its mask `joined[tick, stage]`, one op to a cell."""
    ends = (ats[-1] + len(row[-1]) for row, ats in zip(rows, begun, strict=True) if row)
    ticks = max(ends, default=0)
    table = np.full((ticks, len(rows), len(KINDS), 2), -1, np.int32)
    joined = np.zeros((ticks, len(rows)), bool)
    for stage, (row, ats) in enumerate(zip(rows, begun, strict=True)):
        for block, at in zip(row, ats, strict=True):
            for tick, op in enumerate(block, at):
                table[tick, stage, op.number] = op.microbatch, op.chunk
            joined[at : at + len(block) - 1, stage] = True
    return table, joined


def paired(table: np.ndarray, joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same with an overlapped pair's F, B and its W in one tick, wherever no other stage loses by that.

    Ticks become one, as long as all of them, if each stage has in them one op, several of one block, or none; and
    nothing that ends in the first is awaited in a later one. That last holds by itself: a block awaits everything at
    its start.
    """
    busy = table[..., 0] >= 0
    pair = np.any(joined[:-1] & busy[:-1, :, F] & busy[1:, :, B], axis=1)
    whole = np.any(joined[:-1] & busy[:-1, :, B] & busy[1:, :, W], axis=1)
    # A stage that begins something new in the second tick may be waiting for what another ends in the first.
    fits = ~np.any(busy[1:].any(2) & ~joined[:-1], axis=1)
    keep = np.ones(len(table), bool)
    first = 0
    while first < len(table) - 1:
        tick = first
        while tick < len(table) - 1 and fits[tick] and (pair if tick == first else whole)[tick]:
            tick += 1
            table[first] = np.maximum(table[first], table[tick])
            joined[first] = joined[tick]
            keep[tick] = False
        first = tick + 1
    return table[keep], joined[keep]


def filled(rows: Sequence[Sequence[StageOp]], parts: np.ndarray, limit: int) -> list[list[Block]]:
    """F and B in the order given, each as soon as it can, and W wherever a stage would otherwise idle.

    Args:
      limit: chunks' activations a stage may hold, each from its F through its W; F waits when that many are held.
    """
    num_parts = int(parts.max()) + 1
    done: dict[Event, int] = {}
    pending: list[list[StageOp]] = [[] for _ in rows]
    held, at = [0] * len(rows), [0] * len(rows)
    order: list[list[Block]] = [[] for _ in rows]
    now = 0
    while any(pending) or any(here < len(row) for here, row in zip(at, rows, strict=True)):
        picked: list[tuple[int, StageOp]] = []
        for stage, row in enumerate(rows):
            op = row[at[stage]] if at[stage] < len(row) else None
            if op is not None and _can(op, done, int(parts[stage, op.chunk]), num_parts, now, held[stage] < limit):
                picked.append((stage, op))
                at[stage] += 1
            elif pending[stage]:
                picked.append((stage, pending[stage].pop(0)))
        for stage, op in picked:
            order[stage].append((op,))
            done[op.kind, op.microbatch, int(parts[stage, op.chunk])] = now
            held[stage] += (op.kind == "F") - (op.kind == "W")
            if op.kind == "B":
                pending[stage].append(op._replace(kind="W"))
        now += 1
        assert picked, (
            f"the stages wait for each other at {[row[here:][:1] for row, here in zip(rows, at, strict=True)]}"
        )
    return order


def _can(op: StageOp, done: dict[Event, int], part: int, num_parts: int, now: int, room: bool) -> bool:
    event = needs(op.kind, op.microbatch, part, num_parts)
    return (event is None or done.get(event, now) < now) and (room or op.kind != "F")
