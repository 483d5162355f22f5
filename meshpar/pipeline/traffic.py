"""What a schedule sends over the stages, in closed form: which ticks have a message, which parts move, who does what.

    up, down      one permute for every lane and tick in which some stage has a result for the next, or the one before;
                  all stages take part in it, and those with no result send what is not read
    parts         a permute for every round of their placement: weights before the first tick, gradients after the last
    ends          embedding and head run on the stages that hold the first and the last part

Counts follow from the table alone; bytes are those of what the model hands on.
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
    """Counts of one step."""

    ticks: int
    ops: np.ndarray
    """int `[stage, kind]`: Fs, Bs and Ws of each stage."""
    first: np.ndarray
    """int `[stage]`: Fs (and as many Bs) of the first part, which the embedding stands before."""
    last: np.ndarray
    """int `[stage]`: Bs of the last part, which the head and the loss stand behind."""
    up: tuple[int, ...]
    """Of each lane, ticks in which some stage sends to the next one."""
    down: tuple[int, ...]
    """Of each lane, ticks in which some stage sends to the one before."""
    messages: int
    """Results that are used on another stage than the one that made them, all stages together."""
    rounds: int
    """Permutes that bring the weights of a part to the stages where the schedule has them, and as many back."""

    @property
    def first_stages(self) -> frozenset[int]:
        """Stages that hold the first part."""
        return frozenset(np.flatnonzero(self.first).tolist())

    @property
    def last_stages(self) -> frozenset[int]:
        """Stages that hold the last part."""
        return frozenset(np.flatnonzero(self.last).tolist())


def traffic(schedule: Schedule) -> StageTraffic:
    """What a schedule sends."""
    has = schedule.table[..., 0] >= 0
    held = schedule.parts[np.arange(schedule.stages)[:, None], schedule.table[..., 1]]
    sends = schedule.slots().sends

    def lanes(direction: int) -> tuple[int, ...]:
        ticks = (sends[:, :, direction] >= 0).any(1).sum(0)
        return tuple(int(count) for count in ticks if count)

    return StageTraffic(
        ticks=schedule.ticks,
        ops=has.sum(0),
        first=(has[..., F] & (held[..., F] == 0)).sum(0),
        last=(has[..., B] & (held[..., B] == schedule.num_parts - 1)).sum(0),
        up=lanes(UP),
        down=lanes(DOWN),
        messages=int((sends[:, :, [UP, DOWN]] >= 0).sum()),
        rounds=sum(bool(one.pairs) for one in WeightPlacement.of(schedule, "stage").rounds),
    )


def makespan(slots: Slots, lengths: np.ndarray) -> float:
    """When the executor's last stage is done: who takes part in a permute waits for what comes by it.

    Args:
      slots: of the schedule.
      lengths: `[tick, stage]`, of its cells.
    """
    sends = slots.sends >= 0
    at = np.zeros(lengths.shape[1])
    moved: np.ndarray = np.any(sends, axis=(1, 3))
    for length, moves in zip(lengths, moved, strict=True):
        at = at + length
        for direction in (UP, DOWN):
            if moves[direction]:
                by = SHIFTS[direction]
                first, last = (0, -1) if by > 0 else (-1, 0)
                other = np.roll(at, by)
                if not sends[:, last, direction].any():  # a line and no ring: nothing comes to its first stage
                    other[first] = 0
                at = np.maximum(at, other)
    return float(at.max())


def gathers_in_cells(schedule: Schedule, reads: Sequence[bool]) -> np.ndarray:
    """How often a step gathers a weight that every cell gathers for itself: int `[stage]`.

    The ops of a cell that are of one part share it: all of them where a stage holds one part, else a B and its own W.

    Args:
      schedule: the table.
      reads: whether F, B and W read the weight; `SplitVjp.reads`.
    """
    reading = (schedule.table[..., 0] >= 0) & np.asarray(reads)
    if schedule.chunks == 1:
        return reading.any(2).sum(0)
    shares = reading[..., B] & reading[..., W] & (schedule.slots().backlog[..., W] < 0)
    return reading.sum((0, 2)) - shares.sum(0)
