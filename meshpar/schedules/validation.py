"""Whether a schedule can be run, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshpar.schedules.ops import KINDS, LONG, B, Block, F, W
from meshpar.sharding.errors import is_whole, problem

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule


def check(schedule: Schedule) -> None:
    """Raise for the first thing that is wrong with it.

    Raises:
      ValueError: see `Schedule.validate`.
    """
    _check_numbers(schedule)
    _check_blocks(schedule)
    ops = _Ops(schedule)
    _check_once(schedule, ops)
    _check_places(schedule, ops)
    _check_times(schedule, ops)


def check_rows(name: str, rows: Sequence[Sequence[Block]], parts: np.ndarray) -> None:
    """Raise for rows of blocks that no table can hold.

    Raises:
      ValueError: an op of no known kind, microbatch or chunk, or not one row of parts for each stage.
    """
    if parts.ndim != 2 or len(parts) != len(rows):
        asked, fix = f"run {len(rows)} rows of blocks", "give [stage][chunk], one row for each stage"
        raise problem(f"schedule `{name}`", asked, f"there are {len(parts)} rows of `parts`", fix)
    for stage, row in enumerate(rows):
        for number, block in enumerate(row):
            for op in block:
                if op.kind not in tuple(KINDS) or op.microbatch < 0 or not 0 <= op.chunk < parts.shape[1]:
                    raise problem(
                        f"schedule `{name}`, stage {stage}, block {number}",
                        f"run {op.text()}",
                        f"an op is F, B or W of a microbatch from 0 on and of a chunk from 0 to {parts.shape[1] - 1}",
                        "correct it, or give `parts` with a column for each chunk",
                    )


class _Ops:
    """Every op of a table, flat: arrays of one length."""

    def __init__(self, schedule: Schedule) -> None:
        self.tick, self.stage, self.kind = np.nonzero(schedule.table[..., 0] >= 0)
        found = schedule.table[self.tick, self.stage, self.kind]
        self.microbatch, self.chunk = found[:, 0], found[:, 1]
        self.part = schedule.parts[self.stage, self.chunk]
        shape = (len(KINDS), schedule.microbatches, schedule.num_parts)
        self.key = np.ravel_multi_index((self.kind, self.microbatch, self.part), shape)
        self.at = np.full(shape, -1)
        """Which op does it: `[kind, microbatch, part]`."""
        self.at.flat[self.key] = np.arange(len(self.key))

    def where(self, schedule: Schedule, op: int) -> str:
        return f"schedule `{schedule.name}`, tick {self.tick[op]}, stage {self.stage[op]}: {self.text(schedule, op)}"

    def text(self, schedule: Schedule, op: int) -> str:
        chunk = f", chunk {self.chunk[op]}" if schedule.chunks > 1 else ""
        return f"{KINDS[self.kind[op]]} of microbatch {self.microbatch[op]}{chunk}"


def _check_numbers(schedule: Schedule) -> None:
    parts = np.unique(schedule.parts)
    if not np.array_equal(parts, np.arange(len(parts))):
        asked, exists = f"cut the model into parts {parts.tolist()}", "they are not numbered from 0 without a gap"
        raise problem(f"`parts` of schedule `{schedule.name}`", asked, exists, f"number them 0 to {len(parts) - 1}")
    for stage, held in enumerate(schedule.parts):
        if len(np.unique(held)) < len(held):
            where, exists = f"`parts` of schedule `{schedule.name}`, stage {stage}", "one of them stands there twice"
            raise problem(where, f"hold parts {held.tolist()}", exists, "give each chunk of a stage a part of its own")
    # Of a number that no table of this size can hold, nothing is counted up.
    if not is_whole(schedule.microbatches, 1) or schedule.microbatches > max(schedule.table.size, 1):
        exists = f"a step has at least 1, and the table {schedule.ticks} ticks"
        fix = "give a whole number of microbatches, and the table cells for each"
        raise problem(f"schedule `{schedule.name}`", f"train on {schedule.microbatches!r} microbatches", exists, fix)
    microbatch, chunk = schedule.table[..., 0], schedule.table[..., 1]
    wrong = (microbatch >= schedule.microbatches) | ((microbatch >= 0) & ((chunk < 0) | (chunk >= schedule.chunks)))
    for tick, stage, kind in np.argwhere(wrong):
        raise problem(
            f"schedule `{schedule.name}`, tick {tick}, stage {stage}",
            f"run {KINDS[kind]} of microbatch {microbatch[tick, stage, kind]}, chunk {chunk[tick, stage, kind]}",
            f"there are microbatches 0 to {schedule.microbatches - 1} and chunks 0 to {schedule.chunks - 1}",
            "correct the cell, or give `microbatches` and `parts`",
        )


def _check_blocks(schedule: Schedule) -> None:
    after = np.vstack([schedule.busy[1:], np.zeros_like(schedule.busy[:1])])
    for tick, stage in np.argwhere(schedule.joined & ~(schedule.busy & after)):
        asked, fix = "join this cell and the next into one block", "join only cells that follow each other"
        raise problem(f"schedule `{schedule.name}`, tick {tick}, stage {stage}", asked, "one of the two is idle", fix)


def _check_once(schedule: Schedule, ops: _Ops) -> None:
    count = np.bincount(ops.key, minlength=ops.at.size).reshape(ops.at.shape)
    for kind, microbatch, part in np.argwhere(count > 1):
        first, second, *_ = np.flatnonzero(ops.key == ops.key[ops.at[kind, microbatch, part]]).tolist()
        exists, fix = f"stage {ops.stage[first]} has run it in tick {ops.tick[first]}", "keep one of the two"
        raise problem(ops.where(schedule, second), f"run it for part {part} of the model", exists, fix)
    for kind, microbatch, part in np.argwhere(count == 0):
        holders = np.flatnonzero((schedule.parts == part).any(1))
        raise problem(
            f"schedule `{schedule.name}`, stage {' or '.join(map(str, holders))}, microbatch {microbatch}",
            f"train part {part} of the model on microbatch {microbatch}",
            f"no tick runs {KINDS[kind]} ({LONG[KINDS[kind]]}) of it",
            f"add {KINDS[kind]} of microbatch {microbatch} to a tick of that stage",
        )


def _check_places(schedule: Schedule, ops: _Ops) -> None:
    stage = ops.stage[ops.at]
    for kind in (B, W):
        for microbatch, part in np.argwhere(stage[kind] != stage[F]):
            where = ops.where(schedule, ops.at[kind, microbatch, part])
            asked, fix = f"run it where part {part} of the model is", "run F, B and W of a microbatch on the same stage"
            raise problem(where, asked, f"what its F left lies on stage {stage[F, microbatch, part]}", fix)
    hop = (stage[F, :, 1:] - stage[F, :, :-1]) % schedule.stages
    far = (hop > 1) & (hop < schedule.stages - 1)
    for microbatch, part in np.argwhere(far):
        raise problem(
            ops.where(schedule, ops.at[F, microbatch, part + 1]),
            f"take part {part}'s output from stage {stage[F, microbatch, part]}",
            f"stage {stage[F, microbatch, part + 1]} is no neighbour of it on a ring of {schedule.stages}",
            "place parts that follow each other on one stage or on neighbours",
        )


def _check_times(schedule: Schedule, ops: _Ops) -> None:
    begins, ends = block_ticks(schedule)
    begin, end = begins[ops.tick, ops.stage][ops.at], ends[ops.tick, ops.stage][ops.at]
    tick = ops.tick[ops.at]
    last = schedule.num_parts - 1
    # Of each op: what it needs, when that is there, and when it would be used.
    _in_time(schedule, ops, ops.at[F, :, 1:], ops.at[F, :, :-1], end[F, :, :-1] < begin[F, :, 1:])
    _in_time(schedule, ops, ops.at[B, :, :last], ops.at[B, :, 1:], end[B, :, 1:] < begin[B, :, :last])
    _in_time(schedule, ops, ops.at[B], ops.at[F], tick[F] < tick[B])
    _in_time(schedule, ops, ops.at[W], ops.at[B], tick[B] <= tick[W])


def block_ticks(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """First and last tick of the block that a cell belongs to: two arrays `[tick, stage]`."""
    ticks = np.arange(schedule.ticks)[:, None] + np.zeros(schedule.joined.shape, int)
    goes_on = np.vstack([np.zeros_like(schedule.joined[:1]), schedule.joined[:-1]])
    first = np.maximum.accumulate(np.where(goes_on, 0, ticks), axis=0)
    never = schedule.ticks
    last = np.minimum.accumulate(np.where(schedule.joined, never, ticks)[::-1], axis=0)[::-1]
    return first, last


def _in_time(schedule: Schedule, ops: _Ops, users: np.ndarray, makers: np.ndarray, good: np.ndarray) -> None:
    for at in np.argwhere(~good)[:1]:
        user, maker = users[tuple(at)], makers[tuple(at)]
        there = f"in tick {ops.tick[maker]} on stage {ops.stage[maker]}"
        part_of_block = schedule.joined[:, [ops.stage[user], ops.stage[maker]]].any()
        blocks = " (a block uses what it needs at its start, and gives when it ends)" if part_of_block else ""
        asked = f"use what {ops.text(schedule, maker)} on part {ops.part[maker]} of the model makes"
        exists = f"that is made {there}, and can be used from the next tick on{blocks}"
        raise problem(ops.where(schedule, user), asked, exists, f"move it behind tick {ops.tick[maker]}")
