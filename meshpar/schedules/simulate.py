"""Simulation of a schedule with given op costs."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshpar.schedules.ops import B, F
from meshpar.schedules.ticks import starts
from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule

Costs: TypeAlias = ArrayLike
"""A number, or a number per stage."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTimeline:
    """Start and end times of all ops, in the unit of the costs."""

    start: np.ndarray
    """`[tick, stage, kind]`: start time of the op; NaN if there is none."""
    end: np.ndarray
    """`[tick, stage, kind]`: end time of the op. F and B of an overlapped pair start and end together."""
    busy: np.ndarray
    """`[stage]`: time spent on ops."""

    @property
    def makespan(self) -> float:
        """Time from the first op of any stage to the last."""
        return float(np.nanmax(self.end) - np.nanmin(self.start))

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the makespan, averaged over stages: the makespan bubble of a single step."""
        return float(_ratio(len(self.busy) * self.makespan - self.busy.sum(), len(self.busy) * self.makespan))

    @cached_property
    def span(self) -> np.ndarray:
        """`[stage]`: time from the first op of a stage to its last."""
        return np.nanmax(self.end, axis=(0, 2)) - np.nanmin(self.start, axis=(0, 2))

    @property
    def span_bubble(self) -> np.ndarray:
        """`[stage]`: idle time between the first op of a stage and its last.

        The maximum over stages is the cost per step if consecutive steps are not synchronized.
        """
        return self.span - self.busy

    @property
    def span_bubble_fraction(self) -> float:
        """Largest idle fraction of a stage's span."""
        return float(_ratio(self.span_bubble, self.span).max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """Timelines of a schedule, with and without synchronized ticks."""

    free: ScheduleTimeline
    """Each stage starts a block as soon as its inputs are available."""
    lockstep: ScheduleTimeline
    """All stages start a tick together, after the longest ops and the messages of the previous tick."""


def simulate(schedule: Schedule, *, f: Costs, b: Costs, w: Costs, comm: Costs, pair: Costs | None) -> Simulation:
    """See `Schedule.simulate`."""
    cost = np.stack([_per_stage(schedule, name, value) for name, value in (("f", f), ("b", b), ("w", w))], axis=1)
    messages = _per_stage(schedule, "comm", comm)
    pair_cost = cost.sum(1) if pair is None else _per_stage(schedule, "pair", pair)
    share = schedule.stages / schedule.num_parts
    lengths = _lengths(schedule, cost * share, (cost.sum(1) - pair_cost) * share)
    return Simulation(free=_free(schedule, lengths, messages), lockstep=_lockstep(schedule, lengths, messages))


def _ratio(numerator: ArrayLike, denominator: ArrayLike) -> np.ndarray:
    """Divide; 0 / 0 is 0."""
    return np.divide(numerator, np.where(np.equal(denominator, 0), 1, denominator))


MAX_COST = 1e100
"""Upper limit of a cost, so that sums remain finite."""


def _per_stage(schedule: Schedule, name: str, value: Costs) -> np.ndarray:
    array = np.asarray(value)
    costs = array.astype(float) if array.dtype.kind in "iuf" else np.full(array.shape, np.nan)
    if costs.shape not in ((), (schedule.stages,)) or not np.all((costs >= 0) & (costs <= MAX_COST)):
        raise problem(
            f"`{name}` of schedule `{schedule.name}`",
            f"simulate with costs {array.tolist()!r}",
            f"it must be a number from 0 to {MAX_COST:g}, or a list of {schedule.stages} numbers, for each stage",
            f"use {name}=1.0, or a list of {schedule.stages} numbers",
            code="out-of-range",
        )
    return np.broadcast_to(costs, (schedule.stages,))


def _lengths(schedule: Schedule, cost: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Return the duration of each tick slot, `[tick, stage]`.

    Args:
      schedule: the schedule.
      cost: `[stage, kind]`.
      hidden: `[stage]`, time saved by overlapping a pair. It is subtracted from the tick of the pair, or from the tick
        of B if F and B run in consecutive ticks.
    """
    ops = schedule.table[..., 0] >= 0
    pairs = ops[..., F] & ops[..., B]
    pairs[1:] |= schedule.joined[:-1] & ops[:-1, :, F] & ops[1:, :, B]
    return np.maximum((ops * cost).sum(2) - pairs * hidden, 0.0)


def _timeline(schedule: Schedule, start: np.ndarray, lengths: np.ndarray) -> ScheduleTimeline:
    """Return the timeline for start times `[tick, stage]`."""
    no_op = np.where(schedule.table[..., 0] >= 0, 0.0, np.nan)
    return ScheduleTimeline(
        start=start[..., None] + no_op, end=(start + lengths)[..., None] + no_op, busy=lengths.sum(0)
    )  # fmt: skip


def _free(schedule: Schedule, lengths: np.ndarray, comm: np.ndarray) -> ScheduleTimeline:
    first_ticks = [np.flatnonzero(begins) for begins in schedule.begins.T]
    blocks = [np.add.reduceat(row, ticks).tolist() for row, ticks in zip(lengths.T, first_ticks, strict=True)]
    block_starts = starts(schedule.name, schedule.order(), schedule.parts, lengths=blocks, comm=comm.tolist())
    start = np.zeros(lengths.shape)
    for stage, ticks in enumerate(first_ticks):
        start[ticks, stage] = block_starts[stage]
    for tick, stage in np.argwhere(schedule.joined):
        start[tick + 1, stage] = start[tick, stage] + lengths[tick, stage]
    return _timeline(schedule, start, lengths)


def _lockstep(schedule: Schedule, lengths: np.ndarray, comm: np.ndarray) -> ScheduleTimeline:
    stage_of = schedule.done_on
    is_sent = stage_of[:, 1:] != stage_of[:, :-1]
    has_message = np.zeros(schedule.ticks, bool)
    has_message[schedule.done_in[F, :, :-1][is_sent]] = True
    has_message[schedule.done_in[B, :, 1:][is_sent]] = True
    compute, messages = lengths.max(1), has_message * comm.max()
    start = (compute + messages).cumsum() - messages - compute
    return _timeline(schedule, start[:, None] + np.zeros(lengths.shape), lengths)
