"""Checks that a schedule can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshpar.schedules.ops import KINDS, LONG, B, Block, F, W
from meshpar.sharding.errors import is_int, problem

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule


def check(schedule: Schedule) -> None:
    """Raise a `MeshparError` for the first violation; see `Schedule.validate`."""
    _check_numbers(schedule)
    _check_blocks(schedule)
    ops = _Ops(schedule)
    _check_once(schedule, ops)
    _check_places(schedule, ops)
    _check_times(schedule, ops)


def check_rows(name: str, rows: Sequence[Sequence[Block]], parts: np.ndarray) -> None:
    """Check that `parts` has a row per stage, and that ops have a valid kind, microbatch and chunk."""
    if parts.ndim != 2 or len(parts) != len(rows):
        raise problem(
            f"schedule `{name}`", f"run {len(rows)} rows of blocks", f"`parts` has {len(parts)} rows",
            "pass `parts` as [stage][chunk], with a row per stage", code="wrong-shape",
        )  # fmt: skip
    for stage, row in enumerate(rows):
        for number, block in enumerate(row):
            for op in block:
                if op.kind not in tuple(KINDS) or op.microbatch < 0 or not 0 <= op.chunk < parts.shape[1]:
                    raise problem(
                        f"schedule `{name}`, stage {stage}, block {number}",
                        f"run {op.text()}",
                        f"an op is F, B or W of a microbatch (at least 0) and a chunk from 0 to {parts.shape[1] - 1}",
                        "correct the op, or pass `parts` with a column for each chunk",
                        code="bad-op",
                    )


class _Ops:
    """All ops of a table as flat arrays of equal length."""

    def __init__(self, schedule: Schedule) -> None:
        self.tick, self.stage, self.kind = np.nonzero(schedule.table[..., 0] >= 0)
        self.microbatch, self.chunk = schedule.table[self.tick, self.stage, self.kind].T
        self.part = schedule.parts[self.stage, self.chunk]
        shape = (len(KINDS), schedule.microbatches, schedule.num_parts)
        self.key = np.ravel_multi_index((self.kind, self.microbatch, self.part), shape)
        self.index = np.full(shape, -1)
        """Index of the op for `[kind, microbatch, part]`."""
        self.index.flat[self.key] = np.arange(len(self.key))

    def where(self, schedule: Schedule, op: int) -> str:
        return f"schedule `{schedule.name}`, tick {self.tick[op]}, stage {self.stage[op]}: {self.text(schedule, op)}"

    def text(self, schedule: Schedule, op: int) -> str:
        chunk = f", chunk {self.chunk[op]}" if schedule.chunks > 1 else ""
        return f"{KINDS[self.kind[op]]} of microbatch {self.microbatch[op]}{chunk}"


def _check_numbers(schedule: Schedule) -> None:
    where = f"`parts` of schedule `{schedule.name}`"
    parts = np.unique(schedule.parts)
    if not np.array_equal(parts, np.arange(len(parts))):
        requested, reason = (
            f"divide the model into parts {parts.tolist()}",
            "part numbers must be 0, 1, 2, ... without gaps",
        )
        raise problem(where, requested, reason, f"number them 0 to {len(parts) - 1}", code="out-of-range")
    for stage, row in enumerate(schedule.parts):
        if len(np.unique(row)) < len(row):
            requested, reason = f"use parts {row.tolist()}", "a part occurs twice on the same stage"
            raise problem(
                f"{where}, stage {stage}", requested, reason, "assign different parts to the chunks", code="conflict"
            )
    # Checked before any array of this size is allocated.
    if not is_int(schedule.microbatches, 1) or schedule.microbatches > max(schedule.table.size, 1):
        raise problem(
            f"schedule `{schedule.name}`",
            f"train on {schedule.microbatches!r} microbatches",
            f"it must be an integer of at least 1, and the table has {schedule.ticks} ticks",
            "correct the number of microbatches, or add their ops to the table",
            code="out-of-range",
        )
    microbatch, chunk = schedule.table[..., 0], schedule.table[..., 1]
    is_wrong = (microbatch >= schedule.microbatches) | ((microbatch >= 0) & ((chunk < 0) | (chunk >= schedule.chunks)))
    for tick, stage, kind in np.argwhere(is_wrong):
        raise problem(
            f"schedule `{schedule.name}`, tick {tick}, stage {stage}",
            f"run {KINDS[kind]} of microbatch {microbatch[tick, stage, kind]}, chunk {chunk[tick, stage, kind]}",
            f"the schedule has microbatches 0 to {schedule.microbatches - 1} and chunks 0 to {schedule.chunks - 1}",
            "correct the op, or pass `microbatches` and `parts`",
            code="out-of-range",
        )


def _check_blocks(schedule: Schedule) -> None:
    next_busy = np.vstack([schedule.busy[1:], np.zeros_like(schedule.busy[:1])])
    for tick, stage in np.argwhere(schedule.joined & ~(schedule.busy & next_busy)):
        raise problem(
            f"schedule `{schedule.name}`, tick {tick}, stage {stage}", "join this tick and the next into a block",
            "the stage is idle in either tick", "join only consecutive ticks with ops", code="conflict",
        )  # fmt: skip


def _check_once(schedule: Schedule, ops: _Ops) -> None:
    count = np.bincount(ops.key, minlength=ops.index.size).reshape(ops.index.shape)
    for kind, microbatch, part in np.argwhere(count > 1):
        first, second, *_ = np.flatnonzero(ops.key == ops.key[ops.index[kind, microbatch, part]]).tolist()
        reason = f"stage {ops.stage[first]} already runs it in tick {ops.tick[first]}"
        where, requested = ops.where(schedule, second), f"run it for part {part} of the model"
        raise problem(where, requested, reason, "remove either op", code="duplicate-op")
    for kind, microbatch, part in np.argwhere(count == 0):
        stages = np.flatnonzero((schedule.parts == part).any(1))
        raise problem(
            f"schedule `{schedule.name}`, stage {' or '.join(map(str, stages))}, microbatch {microbatch}",
            f"train part {part} of the model on microbatch {microbatch}",
            f"its {KINDS[kind]} ({LONG[KINDS[kind]]}) is not in the table",
            f"add {KINDS[kind]} of microbatch {microbatch} to a tick of that stage",
            code="missing-op",
        )


def _check_places(schedule: Schedule, ops: _Ops) -> None:
    stage = ops.stage[ops.index]
    for kind in (B, W):
        for microbatch, part in np.argwhere(stage[kind] != stage[F]):
            raise problem(
                ops.where(schedule, ops.index[kind, microbatch, part]),
                f"run it for part {part} of the model",
                f"its F saved the activations on stage {stage[F, microbatch, part]}",
                "run F, B and W of a microbatch on the same stage",
                code="wrong-stage",
            )
    hop = (stage[F, :, 1:] - stage[F, :, :-1]) % schedule.stages
    for microbatch, part in np.argwhere((hop > 1) & (hop < schedule.stages - 1)):
        raise problem(
            ops.where(schedule, ops.index[F, microbatch, part + 1]),
            f"receive the output of part {part} from stage {stage[F, microbatch, part]}",
            f"stage {stage[F, microbatch, part + 1]} is not its neighbor on a ring of {schedule.stages} stages",
            "place consecutive parts on the same stage or on neighboring stages",
            code="wrong-stage",
        )


def _check_times(schedule: Schedule, ops: _Ops) -> None:
    begins, ends = block_ticks(schedule)
    begin, end = begins[ops.tick, ops.stage][ops.index], ends[ops.tick, ops.stage][ops.index]
    tick = ops.tick[ops.index]
    last = schedule.num_parts - 1
    # (consumer, producer, whether the result is available in time)
    for consumers, producers, is_in_time in (
        (ops.index[F, :, 1:], ops.index[F, :, :-1], end[F, :, :-1] < begin[F, :, 1:]),
        (ops.index[B, :, :last], ops.index[B, :, 1:], end[B, :, 1:] < begin[B, :, :last]),
        (ops.index[B], ops.index[F], tick[F] < tick[B]),
        (ops.index[W], ops.index[B], tick[B] <= tick[W]),
    ):
        for place in np.argwhere(~is_in_time)[:1]:
            user, source = consumers[tuple(place)], producers[tuple(place)]
            has_blocks = schedule.joined[:, [ops.stage[user], ops.stage[source]]].any()
            blocks = " (a block needs all its inputs when it starts, and its results are available when it ends)"
            raise problem(
                ops.where(schedule, user),
                f"use the result of {ops.text(schedule, source)} on part {ops.part[source]} of the model",
                f"it is computed in tick {ops.tick[source]} on stage {ops.stage[source]} and available from the next "
                f"tick on{blocks if has_blocks else ''}",
                f"move this op to a tick after tick {ops.tick[source]}",
                code="wrong-order",
            )


def block_ticks(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last tick of the block that contains each tick slot, both `[tick, stage]`."""
    ticks = np.arange(schedule.ticks)[:, None] + np.zeros(schedule.joined.shape, int)
    continues = np.vstack([np.zeros_like(schedule.joined[:1]), schedule.joined[:-1]])
    first = np.maximum.accumulate(np.where(continues, 0, ticks), axis=0)
    last = np.minimum.accumulate(np.where(schedule.joined, schedule.ticks, ticks)[::-1], axis=0)[::-1]
    return first, last
