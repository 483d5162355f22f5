"""Counts of the messages and ops of a schedule, derived from its table.

up, down              a permute per lane and tick in which some stage has a result for the next or previous stage;
                      all stages take part, and stages without a result send data that is not read
chunks                a permute per round of their placement: weights before the first tick, gradients after the last
embedding and head    run on the stages with the first and the last chunk

If all stages run the same ops in a tick (`meshpar.schedules.uniform`), they send in each tick, and the counts of ops
include those without a microbatch. The stages then share embedding and head, once for a group of microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import DOWN, SHIFTS, UP
from meshpar.schedules.uniform import uniform


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageTraffic:
    """Counts of ops and messages of a schedule, per step."""

    ticks: int
    ops: np.ndarray
    """int `[stage, kind]`: number of Fs, Bs and Ws."""
    first: np.ndarray
    """int `[stage]`: number of embeddings: one for each F (and B) of the first chunk."""
    last: np.ndarray
    """int `[stage]`: number of losses: one for each B of the last chunk."""
    up: tuple[int, ...]
    """For each lane, the number of ticks in which some stage sends to the next stage."""
    down: tuple[int, ...]
    """For each lane, the number of ticks in which some stage sends to the previous stage."""
    messages: int
    """Number of results that a different stage uses, summed over stages."""
    rounds: int
    """Number of permutes that move weights to the stages of the schedule. Gradients need the same number."""

    @property
    def first_stages(self) -> frozenset[int]:
        """Stages that compute embeddings."""
        return frozenset(np.flatnonzero(self.first).tolist())

    @property
    def last_stages(self) -> frozenset[int]:
        """Stages that compute the loss."""
        return frozenset(np.flatnonzero(self.last).tolist())


def executed(schedule: Schedule) -> np.ndarray:
    """Return whether a stage computes an op in a tick, bool `[tick, stage, kind]`.

    If the stages of a schedule run the same ops in a tick, so do stages without an op, whose results are not used.
    """
    has_op = schedule.table[..., 0] >= 0
    return has_op if uniform(schedule) is None else np.broadcast_to(has_op.any(1, keepdims=True), has_op.shape)


def traffic(schedule: Schedule) -> StageTraffic:
    """Count the operations and messages of each stage in a schedule."""
    has_op, ops = schedule.table[..., 0] >= 0, executed(schedule).sum(0)
    part = schedule.parts[np.arange(schedule.stages)[:, None], schedule.table[..., 1]]
    sends = schedule.slots().sends
    first = (has_op[..., F] & (part[..., F] == 0)).sum(0)
    last = (has_op[..., B] & (part[..., B] == schedule.num_parts - 1)).sum(0)
    up, down = (
        tuple(int(count) for count in (sends[:, :, direction] >= 0).any(1).sum(0) if count) for direction in (UP, DOWN)
    )
    if (segments := uniform(schedule)) is not None:
        up, down = ((int(ops[0, kind]),) for kind in (F, B))
        first, last = (np.full(schedule.stages, count) for count in (len(list(segments.embedded())), segments.groups))
    return StageTraffic(
        ticks=schedule.ticks,
        ops=ops,
        first=first,
        last=last,
        up=up,
        down=down,
        messages=int((sends[:, :, [UP, DOWN]] >= 0).sum()),
        rounds=sum(bool(r.pairs) for r in WeightPlacement.of(schedule, "stage").rounds),
    )


def makespan(schedule: Schedule, lengths: np.ndarray) -> float:
    """Return the time at which the last stage ends if each permute synchronizes neighboring stages, as in the executor.

    `lengths` are the durations of the ops, `[tick, stage]`.
    """
    if uniform(schedule) is not None:
        return float(lengths.max(1).sum())
    sends = schedule.slots().sends >= 0
    time = np.zeros(lengths.shape[1])
    has_message: np.ndarray = np.any(sends, axis=(1, 3))
    for length, directions in zip(lengths, has_message, strict=True):
        time = time + length
        for direction in (UP, DOWN):
            if directions[direction]:
                shift = SHIFTS[direction]
                first, last = (0, -1) if shift > 0 else (-1, 0)
                sender = np.roll(time, shift)
                if not sends[:, last, direction].any():  # Without a ring, the first stage has no sender.
                    sender[first] = 0
                time = np.maximum(time, sender)
    return float(time.max())


def gathers_in_cells(schedule: Schedule, reads: Sequence[bool]) -> np.ndarray:
    """Return how often each stage gathers a weight per step, int `[stage]`, if each tick gathers what it uses.

    Ops of the same chunk in a tick share a gather: all ops if a stage has a single chunk, otherwise B and W of a
    microbatch. `reads` contains whether F, B and W read the weight; see `SplitVjp.reads`.
    """
    reading = executed(schedule) & np.asarray(reads)
    if schedule.chunks == 1:
        return reading.any(2).sum(0)
    is_shared = reading[..., B] & reading[..., W] & (schedule.slots().deferred_weight_grads[..., W] < 0)
    return reading.sum((0, 2)) - is_shared.sum(0)
