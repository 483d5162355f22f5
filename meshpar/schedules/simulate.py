"""A schedule simulated: with any costs, in lockstep ticks or each stage as soon as it can."""

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
"""A number, or one for each stage."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTimeline:
    """When each stage does what, in the unit of the costs."""

    start: np.ndarray
    """`[tick, stage, kind]`: when that op begins; NaN where there is none."""
    end: np.ndarray
    """`[tick, stage, kind]`: when it is done. F and B of an overlapped pair begin and end together."""
    busy: np.ndarray
    """`[stage]`: time spent on ops."""

    @property
    def makespan(self) -> float:
        """From the first op of all to the last."""
        return float(np.nanmax(self.end) - np.nanmin(self.start))

    @property
    def bubble_fraction(self) -> float:
        """Makespan bubble: the idle share when all stages begin and end together, one step alone."""
        return float(_share(len(self.busy) * self.makespan - self.busy.sum(), len(self.busy) * self.makespan))

    @cached_property
    def span(self) -> np.ndarray:
        """`[stage]`: from a stage's first op to its last."""
        return np.nanmax(self.end, axis=(0, 2)) - np.nanmin(self.start, axis=(0, 2))

    @property
    def span_bubble(self) -> np.ndarray:
        """`[stage]`: idle time between a stage's first op and its last; the worst one is what a run of steps pays."""
        return self.span - self.busy

    @property
    def span_bubble_fraction(self) -> float:
        """The idle share of the span, of the worst stage."""
        return float(_share(self.span_bubble, self.span).max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One schedule, both ways."""

    free: ScheduleTimeline
    """Each stage begins a block as soon as it can."""
    lockstep: ScheduleTimeline
    """All stages begin a tick together: each pays the tick's longest cell, and the messages after it."""


def simulate(schedule: Schedule, *, f: Costs, b: Costs, w: Costs, comm: Costs, pair: Costs | None) -> Simulation:
    """See `Schedule.simulate`."""
    cost = np.stack([_per_stage(schedule, name, value) for name, value in (("f", f), ("b", b), ("w", w))], axis=1)
    messages = _per_stage(schedule, "comm", comm)
    together = cost.sum(1) if pair is None else _per_stage(schedule, "pair", pair)
    share = schedule.stages / schedule.num_parts
    lengths = _lengths(schedule, cost * share, (cost.sum(1) - together) * share)
    return Simulation(free=_free(schedule, lengths, messages), lockstep=_lockstep(schedule, lengths, messages))


def _share(part: ArrayLike, whole: ArrayLike) -> np.ndarray:
    """Of nothing: 0."""
    return np.divide(part, np.where(np.equal(whole, 0), 1, whole))


MOST = 1e100
"""What an op may cost, so that sums stay finite."""


def _per_stage(schedule: Schedule, name: str, value: Costs) -> np.ndarray:
    given = np.asarray(value)
    found = given.astype(float) if given.dtype.kind in "iuf" else np.full(given.shape, np.nan)
    if found.shape not in ((), (schedule.stages,)) or not np.all((found >= 0) & (found <= MOST)):
        exists = f"it takes a number from 0 to {MOST:g}, or one for each of {schedule.stages} stages"
        fix = f"give {name}=1.0, or {schedule.stages} of them"
        raise problem(f"`{name}` of schedule `{schedule.name}`", f"simulate with costs {given.tolist()!r}", exists, fix)
    return np.broadcast_to(found, (schedule.stages,))


def _lengths(schedule: Schedule, cost: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """How long each cell takes, `[tick, stage]`.

    Args:
      cost: `[stage, kind]`.
      hidden: `[stage]`, what an overlapped pair saves; taken from the cell that holds both its F and its B, or else
        from its B's.
    """
    ops = schedule.table[..., 0] >= 0
    pairs = ops[..., F] & ops[..., B]
    pairs[1:] |= schedule.joined[:-1] & ops[:-1, :, F] & ops[1:, :, B]
    return np.maximum((ops * cost).sum(2) - pairs * hidden, 0.0)


def _free(schedule: Schedule, lengths: np.ndarray, comm: np.ndarray) -> ScheduleTimeline:
    own = [np.flatnonzero(begins) for begins in schedule.begins.T]
    blocks = [np.add.reduceat(cells, ticks).tolist() for cells, ticks in zip(lengths.T, own, strict=True)]
    begun = starts(schedule.name, schedule.order(), schedule.parts, lengths=blocks, comm=comm.tolist())
    start = np.zeros(lengths.shape)
    for stage, ticks in enumerate(own):
        start[ticks, stage] = begun[stage]
    for tick, stage in np.argwhere(schedule.joined):
        start[tick + 1, stage] = start[tick, stage] + lengths[tick, stage]
    nothing = np.where(schedule.table[..., 0] >= 0, 0.0, np.nan)
    return ScheduleTimeline(
        start=start[..., None] + nothing, end=(start + lengths)[..., None] + nothing, busy=lengths.sum(0)
    )  # fmt: skip


def _lockstep(schedule: Schedule, lengths: np.ndarray, comm: np.ndarray) -> ScheduleTimeline:
    ops = schedule.table[..., 0] >= 0
    after = _sends(schedule) * comm.max()
    ends = (lengths.max(1) + after).cumsum()
    start = (ends - after - lengths.max(1))[:, None, None] + np.zeros(ops.shape)
    end = start + lengths[..., None]
    nothing = np.where(ops, 0.0, np.nan)
    return ScheduleTimeline(start=start + nothing, end=end + nothing, busy=lengths.sum(0))


def _sends(schedule: Schedule) -> np.ndarray:
    """Whether anything leaves a stage at the end of a tick: bool `[tick]`."""
    on = schedule.done_on
    crosses = on[:, 1:] != on[:, :-1]
    found = np.zeros(schedule.ticks, bool)
    found[schedule.done_in[F, :, :-1][crosses]] = True
    found[schedule.done_in[B, :, 1:][crosses]] = True
    return found
