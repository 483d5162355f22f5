"""Simulation of a schedule with given op costs."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshpar.schedules.ops import B, F
from meshpar.schedules.table import ScheduleTable
from meshpar.schedules.ticks import starts
from meshpar.sharding.errors import problem

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
        total = len(self.busy) * self.makespan
        return float((total - self.busy.sum()) / (total or 1))

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
        return float((self.span_bubble / np.where(self.span == 0, 1, self.span)).max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """Timelines of a schedule, with and without synchronized ticks."""

    free: ScheduleTimeline
    """Each stage starts a block as soon as its inputs are available."""
    lockstep: ScheduleTimeline
    """All stages start a tick together, after the longest ops and the messages of the previous tick."""


def simulate(schedule: ScheduleTable, *, f: Costs, b: Costs, w: Costs, comm: Costs, pair: Costs | None) -> Simulation:
    """Return the simulation of a step. `Schedule.simulate` documents the arguments."""
    cost = np.stack([_per_stage(schedule, name, value) for name, value in (("f", f), ("b", b), ("w", w))], axis=1)
    latency = _per_stage(schedule, "comm", comm)
    pair_cost = cost.sum(1) if pair is None else _per_stage(schedule, "pair", pair)
    share = schedule.stages / schedule.num_parts
    ops = schedule.table[..., 0] >= 0
    # The time saved by overlapping a pair is subtracted from the tick of its B.
    pairs = ops[..., F] & ops[..., B]
    pairs[1:] |= schedule.joined[:-1] & ops[:-1, :, F] & ops[1:, :, B]
    lengths = np.maximum((ops * (cost * share)).sum(2) - pairs * ((cost.sum(1) - pair_cost) * share), 0.0)

    first_ticks = [np.flatnonzero(begins) for begins in schedule.begins.T]
    blocks = [np.add.reduceat(row, ticks).tolist() for row, ticks in zip(lengths.T, first_ticks, strict=True)]
    block_starts = starts(schedule.name, schedule.order(), schedule.parts, lengths=blocks, comm=latency.tolist())
    free = np.zeros(lengths.shape)
    for stage, ticks in enumerate(first_ticks):
        free[ticks, stage] = block_starts[stage]
    for tick, stage in np.argwhere(schedule.joined):
        free[tick + 1, stage] = free[tick, stage] + lengths[tick, stage]

    is_sent = schedule.done_on[:, 1:] != schedule.done_on[:, :-1]
    has_message = np.zeros(schedule.ticks, bool)
    has_message[schedule.done_in[F, :, :-1][is_sent]] = True
    has_message[schedule.done_in[B, :, 1:][is_sent]] = True
    compute, messages = lengths.max(1), has_message * latency.max()
    lockstep = ((compute + messages).cumsum() - messages - compute)[:, None] + np.zeros(lengths.shape)

    no_op = np.where(ops, 0.0, np.nan)
    free_line, lockstep_line = (
        ScheduleTimeline(start=s[..., None] + no_op, end=(s + lengths)[..., None] + no_op, busy=lengths.sum(0))
        for s in (free, lockstep)
    )
    return Simulation(free=free_line, lockstep=lockstep_line)


MAX_COST = 1e100
"""Upper limit of a cost, so that sums remain finite."""


def _per_stage(schedule: ScheduleTable, name: str, value: Costs) -> np.ndarray:
    array = np.asarray(value)
    costs = array.astype(float) if array.dtype.kind in "iuf" else np.full(array.shape, np.nan)
    if costs.shape not in ((), (schedule.stages,)) or not np.all((costs >= 0) & (costs <= MAX_COST)):
        where, requested = f"`{name}` of schedule `{schedule.name}`", f"simulate with costs {array.tolist()!r}"
        reason = f"it must be a number from 0 to {MAX_COST:g}, or a number for each of {schedule.stages} stages"
        raise problem(where, requested, reason, f"use {name}=1.0", code="out-of-range")
    return np.broadcast_to(costs, (schedule.stages,))
