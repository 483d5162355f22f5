"""Execution counts per stage of a pipelined program, from the schedule's table.

All stages run the same program, a loop over ticks with conditionals that select the work of the stage in this tick.
The compiled program does not show how often a branch runs. These counts are derived from the schedule.

    conditional in scope        condition                                 count on a stage
    cell                        the ops in the tick slot of the stage     ticks with these ops
    cell/.../if_first           the ops are for the first chunk           ticks with ops of the first chunk
    cell/.../if_last            the ops are for the last chunk            ticks with ops of the last chunk
    send_up, send_down          any stage sends a message                 ticks with a message, same on all stages

All other conditionals belong to the model and count as if they were always taken.
"""

from __future__ import annotations

import math
import re

import numpy as np

from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.module import Module
from meshpar.inspect.hlo.walk import Branch, Visit, executed
from meshpar.pipeline.executor import CELL, IF_FIRST, IF_LAST, SENDS, TickPlan
from meshpar.pipeline.traffic import makespan
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F

_LANE = re.compile(rf"({'|'.join(SENDS)})(?:_([0-9]+))?\Z")


class ScheduleCounts:
    """How often each pipeline stage runs the branches of a program, according to its schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._plan = TickPlan.of(schedule)

    def counts(self, visit: Visit) -> tuple[int, ...] | None:
        """Return how often each stage runs a computation per step, or None outside the schedule's conditionals.

        A loop of unknown length counts once.
        """
        if (selected := self.executions(visit)) is None:
            return None
        ticks, mask = selected
        trips = (loop.trip_count for index, loop in enumerate(visit.loops) if index != ticks)
        times = math.prod(1 if trip is None else trip for trip in trips)
        return tuple(round(int(count) * times * visit.share) for count in mask.sum(0))

    def choices(self, module: Module, loop: str) -> dict[str, np.ndarray] | None:
        """Return the branch of each conditional in the tick loop: int `[tick, stage]`, −1 if it is not reached.

        Returns None if `loop` is not the tick loop.
        """
        choices: dict[str, np.ndarray] = {}
        for visit in executed(module):
            selected = self.executions(visit)
            branch = visit.branches[-1] if visit.branches else None
            if selected is None or branch is None or self.mask(branch) is None:
                continue
            ticks, mask = selected
            if visit.loops[ticks].name == loop and branch.depth - 1 == ticks:
                default = np.full(mask.shape, -1)
                choices[branch.name] = np.where(mask, branch.index, choices.get(branch.name, default))
        return choices or None

    def makespan(self, lengths: np.ndarray) -> float:
        """Return when the last stage leaves the tick loop. Stages wait for the messages of other stages.

        `lengths` are the durations of the tick slots, `[tick, stage]`. The result has the same unit.
        """
        return makespan(self.schedule, lengths)

    def executions(self, visit: Visit) -> tuple[int, np.ndarray] | None:
        """Return (index of the tick loop in `visit.loops`, mask `[tick, stage]` of the slots that run the computation).

        Returns None outside the schedule's conditionals.
        """
        selected = None
        for branch in visit.branches:
            mask = self.mask(branch)
            if mask is None or not branch.depth or visit.loops[branch.depth - 1].trip_count != self.schedule.ticks:
                continue
            selected = (branch.depth - 1, mask if selected is None else selected[1] & mask)
        return selected

    def mask(self, branch: Branch) -> np.ndarray | None:
        """Return the mask `[tick, stage]` of the slots that take a branch; None for a conditional of the model."""
        columns = self._plan.columns
        scope, last = ["", "", *scopes.components(branch.op_name)[:-1]][-2:]  # the two innermost scopes
        if last == CELL and branch.of == len(self._plan.op_sets):
            return columns.branch == branch.index
        if branch.of != 2:
            return None
        if last in (IF_FIRST, IF_LAST):
            kind = F if scope == "forward" else B
            chunk = 0 if last == IF_FIRST else self.schedule.num_parts - 1
            is_true = columns.part[..., kind] == chunk
        elif lane := _LANE.match(last):
            sent = self._plan.moves[:, SENDS.index(lane.group(1)), int(lane.group(2) or 0)] > 0
            is_true = np.repeat(sent[:, None], self.schedule.stages, axis=1)
        else:
            return None
        return is_true if branch.index else ~is_true
