"""Checks that a schedule can be run."""

from __future__ import annotations

import numpy as np

from meshpar.schedules.ops import KINDS, LONG, B, F, W
from meshpar.schedules.table import ScheduleTable
from meshpar.sharding.errors import MeshparError, is_int, problem


def check(schedule: ScheduleTable) -> None:
    """Raise a `MeshparError` for the first violation; see `Schedule.validate`."""
    _check_numbers(schedule)
    ticks, stages, kinds = np.nonzero(schedule.table[..., 0] >= 0)
    microbatches, chunks = schedule.table[ticks, stages, kinds].T
    op_index = kinds, microbatches, schedule.parts[stages, chunks]
    # Arrays `[kind, microbatch, part]`.
    count = np.zeros((len(KINDS), schedule.microbatches, schedule.num_parts), int)
    np.add.at(count, op_index, 1)
    tick, stage, chunk = (np.full(count.shape, -1) for _ in range(3))
    tick[op_index], stage[op_index], chunk[op_index] = ticks, stages, chunks

    def error(op: tuple[int, ...], requested: str, reason: str, fix: str, code: str) -> MeshparError:
        text = f"{KINDS[op[0]]} of microbatch {op[1]}" + f", chunk {chunk[op]}" * (schedule.chunks > 1)
        where = f"schedule `{schedule.name}`, tick {tick[op]}, stage {stage[op]}: {text}"
        return problem(where, requested, reason, fix, code=code)

    for op in map(tuple, np.argwhere(count > 1)):
        reason = (
            f"{count[op]} ticks contain it, and the first is tick {ticks[(np.transpose(op_index) == op).all(1)][0]}"
        )
        raise error(op, f"run it again for part {op[2]} of the model", reason, "remove it", "duplicate-op")
    for kind, microbatch, part in np.argwhere(count == 0):
        on = " or ".join(map(str, np.flatnonzero((schedule.parts == part).any(1))))
        where = f"schedule `{schedule.name}`, stage {on}, microbatch {microbatch}"
        reason = f"its {KINDS[kind]} ({LONG[KINDS[kind]]}) is not in the table"
        raise problem(where, f"train part {part} of the model", reason, "add the op to a tick", code="missing-op")
    for op in map(tuple, np.argwhere(stage != stage[F])):
        reason = f"its F saved the activations on stage {stage[F][op[1:]]}"
        fix = "run F, B and W of a microbatch on the same stage"
        raise error(op, f"run it for part {op[2]} of the model", reason, fix, "wrong-stage")
    hop = (stage[F, :, 1:] - stage[F, :, :-1]) % schedule.stages
    for microbatch, part in np.argwhere((hop > 1) & (hop < schedule.stages - 1)):
        requested = f"receive the output of part {part} from stage {stage[F, microbatch, part]}"
        reason = f"the stages are not neighbors on a ring of {schedule.stages} stages"
        fix = "place consecutive parts on the same stage or on neighboring stages"
        raise error((F, microbatch, part + 1), requested, reason, fix, "wrong-stage")
    # A block needs all its inputs when it starts, and its results are available when it ends.
    begins, ends = _block_ticks(schedule)
    begin, end = begins[tick, stage], ends[tick, stage]
    # (kind and part offset of the consumer and of the producer, whether the result is available in time)
    for (kind, shift), (source_kind, source_shift), is_in_time in (
        ((F, 1), (F, 0), end[F, :, :-1] < begin[F, :, 1:]),
        ((B, 0), (B, 1), end[B, :, 1:] < begin[B, :, :-1]),
        ((B, 0), (F, 0), tick[F] < tick[B]),
        ((W, 0), (B, 0), tick[B] <= tick[W]),
    ):
        for microbatch, part in np.argwhere(~is_in_time):
            source = source_kind, microbatch, part + source_shift
            requested = f"use the result of {KINDS[source_kind]} on part {source[2]} of the model"
            reason = f"it is available after tick {end[source]}, in which its block ends on stage {stage[source]}"
            fix = "move this op, and the block that contains it, to a later tick"
            raise error((kind, microbatch, part + shift), requested, reason, fix, "wrong-order")


def _check_numbers(schedule: ScheduleTable) -> None:
    where, parts = f"`parts` of schedule `{schedule.name}`", np.unique(schedule.parts)
    if not np.array_equal(parts, np.arange(len(parts))):
        requested, fix = f"divide the model into parts {parts.tolist()}", f"number them 0 to {len(parts) - 1}"
        raise problem(where, requested, "part numbers have gaps", fix, code="out-of-range")
    for stage, row in enumerate(schedule.parts):
        if len(np.unique(row)) < len(row):
            requested, fix = f"use parts {row.tolist()} on stage {stage}", "assign different parts to the chunks"
            raise problem(where, requested, "a part occurs twice on the same stage", fix, code="conflict")
    # Checked before any array of this size is allocated.
    where, count = f"schedule `{schedule.name}`", schedule.microbatches
    if not is_int(count, 1) or count > max(schedule.table.size, 1):
        reason = f"it must be an integer from 1 to {max(schedule.table.size, 1)} in {schedule.ticks} ticks"
        fix = "correct the number of microbatches, or add their ops to the table"
        raise problem(where, f"train on {count!r} microbatches", reason, fix, code="out-of-range")
    microbatch, chunk = schedule.table[..., 0], schedule.table[..., 1]
    is_wrong = (microbatch >= count) | ((microbatch >= 0) & ((chunk < 0) | (chunk >= schedule.chunks)))
    for op in map(tuple, np.argwhere(is_wrong)):
        reason = f"the schedule has microbatches 0 to {count - 1} and chunks 0 to {schedule.chunks - 1}"
        requested, fix = (
            f"run microbatch {microbatch[op]}, chunk {chunk[op]}",
            "correct the op, `microbatches` or `parts`",
        )
        raise problem(f"{where}, tick {op[0]}, stage {op[1]}", requested, reason, fix, code="out-of-range")
    next_busy = np.vstack([schedule.busy[1:], np.zeros_like(schedule.busy[:1])])
    for tick, stage in np.argwhere(schedule.joined & ~(schedule.busy & next_busy)):
        requested, fix = "join this tick and the next into a block", "join only consecutive ticks with ops"
        raise problem(
            f"{where}, tick {tick}, stage {stage}",
            requested,
            "the stage is idle in one of the two",
            fix,
            code="conflict",
        )


def _block_ticks(schedule: ScheduleTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last tick of the block that contains each tick slot, both `[tick, stage]`."""
    ticks = np.arange(schedule.ticks)[:, None] + np.zeros(schedule.joined.shape, int)
    continues = np.vstack([np.zeros_like(schedule.joined[:1]), schedule.joined[:-1]])
    first = np.maximum.accumulate(np.where(continues, 0, ticks), axis=0)
    last = np.minimum.accumulate(np.where(schedule.joined, schedule.ticks, ticks)[::-1], axis=0)[::-1]
    return first, last
