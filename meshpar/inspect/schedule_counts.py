"""How often a pipelined program runs what: the choices of a tick counted by the schedule's table, stage by stage.

All stages run one program, a loop over ticks in which conditionals pick what this stage does in this tick. The program
does not tell how often each is picked; the table it was made from does.

    conditional in scope        picked by                                 counted on stage s
    cell                        the kind of the table's cell              ticks with such a cell
    cell/.../if_first           whether the cell's part is the first      of those, ticks of the first part
    cell/.../if_last            whether it is the last                    of those, ticks of the last part
    send_up, send_down          whether some stage has a message          ticks with one, the same on all stages

Any other conditional is the model's own, and counts as if it were picked.
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
    """Counts of a schedule's choices."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._plan = Plan.of(schedule)

    def counts(self, visit: Visit) -> tuple[int, ...] | None:
        """How often each stage runs a computation in a step; None: all stages as often as its loops say.

        A loop of unknown length counts once.
        """
        picked = self.picked(visit)
        if picked is None:
            return None
        ticks, mask = picked
        trips = (loop.trip_count for at, loop in enumerate(visit.loops) if at != ticks)
        times = math.prod(1 if trip is None else trip for trip in trips)
        return tuple(int(count) * times for count in mask.sum(0))

    def choices(self, module: Module, loop: str) -> dict[str, np.ndarray] | None:
        """What each conditional in the loop over ticks picks: int `[tick, stage]`, −1 where it is not reached.

        None when the loop is not the one over ticks.
        """
        found: dict[str, np.ndarray] = {}
        for visit in executed(module):
            picked = self.picked(visit)
            branch = visit.branches[-1] if visit.branches else None
            if picked is None or branch is None or visit.loops[picked[0]].name != loop or self.mask(branch) is None:
                continue
            if branch.depth - 1 == picked[0]:
                default = np.full(picked[1].shape, -1)
                found[branch.name] = np.where(picked[1], branch.index, found.get(branch.name, default))
        return found or None

    def makespan(self, lengths: np.ndarray) -> float:
        """When the last stage is done with the loop; who takes part in a permute waits for what comes by it.

        Args:
          lengths: `[tick, stage]`, of ticks.
        """
        return makespan(self._plan.slots, lengths)

    def picked(self, visit: Visit) -> tuple[int, np.ndarray] | None:
        """Which of a computation's loops is the one over ticks, and bool `[tick, stage]`: where it runs."""
        found = None
        for branch in visit.branches:
            mask = self.mask(branch)
            if mask is None or not branch.depth or visit.loops[branch.depth - 1].trip_count != self.schedule.ticks:
                continue
            found = (branch.depth - 1, mask if found is None else found[1] & mask)
        return found

    def mask(self, branch: Branch) -> np.ndarray | None:
        """Bool `[tick, stage]`: where the table picks a choice; None for a conditional that is not the table's."""
        columns = self._plan.columns
        scope, last = ["", "", *scopes.components(branch.op_name)[:-1]][-2:]  # right around it
        if last == CELL and branch.of == len(self._plan.cells):
            return columns.branch == branch.index
        if branch.of != 2:
            return None
        if last in (IF_FIRST, IF_LAST):
            kind = F if scope == "forward" else B
            part = 0 if last == IF_FIRST else self.schedule.num_parts - 1
            is_so = columns.part[..., kind] == part
        elif lane := _LANE.match(last):
            sent = self._plan.moves[:, SENDS.index(lane.group(1)), int(lane.group(2) or 0)] > 0
            is_so = np.repeat(sent[:, None], self.schedule.stages, axis=1)
        else:
            return None
        return is_so if branch.index else ~is_so
