"""Execution counts per stage of a pipelined program, from the schedule's table.

All stages run the same program, a loop over ticks with conditionals that select the work of the stage in this tick.
The program does not contain the counts of the branches, so they are derived from its schedule.

    conditional in scope        selected by                               count on stage s
    cell                        the kind of the tick slot                 ticks with such a slot
    cell/.../if_first           the slot's chunk is the first             those with the first chunk
    cell/.../if_last            the slot's chunk is the last              those with the last chunk
    send_up, send_down          some stage has a message                  ticks with a message, same on all stages

Any other conditional belongs to the model and counts as if it were taken.
"""

from __future__ import annotations

import math
import re

import numpy as np

from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.module import Module
from meshpar.inspect.hlo.walk import Branch, Visit, executed
from meshpar.pipeline.executor import CELL, IF_FIRST, IF_LAST, SENDS, Plan
from meshpar.pipeline.traffic import makespan
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F

_LANE = re.compile(rf"({'|'.join(SENDS)})(?:_([0-9]+))?\Z")


class ScheduleCounts:
    """Counts of the branches that a schedule selects."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._plan = Plan.of(schedule)

    def counts(self, visit: Visit) -> tuple[int, ...] | None:
        """Return how often each stage runs a computation per step, or None if its loops determine the count.

        A loop of unknown length counts once.
        """
        if (selected := self.picked(visit)) is None:
            return None
        ticks, mask = selected
        trips = (loop.trip_count for index, loop in enumerate(visit.loops) if index != ticks)
        times = math.prod(1 if trip is None else trip for trip in trips)
        return tuple(int(count) * times for count in mask.sum(0))

    def choices(self, module: Module, loop: str) -> dict[str, np.ndarray] | None:
        """Return the branch of each conditional in the tick loop: int `[tick, stage]`, −1 if it is not reached.

        Returns None if `loop` is not the tick loop.
        """
        choices: dict[str, np.ndarray] = {}
        for visit in executed(module):
            selected = self.picked(visit)
            branch = visit.branches[-1] if visit.branches else None
            if selected is None or branch is None or self.mask(branch) is None:
                continue
            ticks, mask = selected
            if visit.loops[ticks].name == loop and branch.depth - 1 == ticks:
                default = np.full(mask.shape, -1)
                choices[branch.name] = np.where(mask, branch.index, choices.get(branch.name, default))
        return choices or None

    def makespan(self, lengths: np.ndarray) -> float:
        """Return when the last stage leaves the loop. Participants of a permute wait for their message."""
        return makespan(self._plan.slots, lengths)

    def picked(self, visit: Visit) -> tuple[int, np.ndarray] | None:
        """Return the index of the tick loop among a computation's loops, and a mask `[tick, stage]` of executions."""
        selected = None
        for branch in visit.branches:
            mask = self.mask(branch)
            if mask is None or not branch.depth or visit.loops[branch.depth - 1].trip_count != self.schedule.ticks:
                continue
            selected = (branch.depth - 1, mask if selected is None else selected[1] & mask)
        return selected

    def mask(self, branch: Branch) -> np.ndarray | None:
        """Return bool `[tick, stage]`: where the table selects a branch; None for a conditional of the model."""
        columns = self._plan.columns
        scope, last = ["", "", *scopes.components(branch.op_name)[:-1]][-2:]  # the two innermost scopes
        if last == CELL and branch.of == len(self._plan.cells):
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
