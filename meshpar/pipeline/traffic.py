"""Counts of the messages and ops of a schedule, derived from its table.

up, down              a permute per lane and tick in which some stage has a result for the next or previous stage;
                      all stages take part, and stages without a result send data that is not read
chunks                a permute per round of their placement: weights before the first tick, gradients after the last
embedding and head    run on the stages with the first and the last chunk
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import DOWN, SHIFTS, UP, Slots


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageTraffic:
    """Counts of ops and messages of a schedule, per step."""

    ticks: int
    ops: np.ndarray
    """int `[stage, kind]`: number of Fs, Bs and Ws."""
    first: np.ndarray
    """int `[stage]`: number of Fs (and Bs) of the first chunk, which include the embedding."""
    last: np.ndarray
    """int `[stage]`: number of Bs of the last chunk, which include the head and the loss."""
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
        """Stages with the first chunk."""
        return frozenset(np.flatnonzero(self.first).tolist())

    @property
    def last_stages(self) -> frozenset[int]:
        """Stages with the last chunk."""
        return frozenset(np.flatnonzero(self.last).tolist())


def traffic(schedule: Schedule) -> StageTraffic:
    """Count the operations and messages of each stage in a schedule."""
    has_op = schedule.table[..., 0] >= 0
    part = schedule.parts[np.arange(schedule.stages)[:, None], schedule.table[..., 1]]
    sends = schedule.slots().sends

    def lanes(direction: int) -> tuple[int, ...]:
        ticks = (sends[:, :, direction] >= 0).any(1).sum(0)
        return tuple(int(count) for count in ticks if count)

    return StageTraffic(
        ticks=schedule.ticks,
        ops=has_op.sum(0),
        first=(has_op[..., F] & (part[..., F] == 0)).sum(0),
        last=(has_op[..., B] & (part[..., B] == schedule.num_parts - 1)).sum(0),
        up=lanes(UP),
        down=lanes(DOWN),
        messages=int((sends[:, :, [UP, DOWN]] >= 0).sum()),
        rounds=sum(bool(r.pairs) for r in WeightPlacement.of(schedule, "stage").rounds),
    )


def makespan(slots: Slots, lengths: np.ndarray) -> float:
    """Return the time at which the last stage ends if each permute synchronizes neighboring stages, as in the executor.

    `lengths` are the durations of the ops, `[tick, stage]`. `slots` determines the ticks with permutes.
    """
    sends = slots.sends >= 0
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
    reading = (schedule.table[..., 0] >= 0) & np.asarray(reads)
    if schedule.chunks == 1:
        return reading.any(2).sum(0)
    is_shared = reading[..., B] & reading[..., W] & (schedule.slots().deferred_weight_grads[..., W] < 0)
    return reading.sum((0, 2)) - is_shared.sum(0)
