"""Where each stage keeps what: the smallest buffers with which a table can be run."""

from __future__ import annotations

import dataclasses
import heapq
from typing import TYPE_CHECKING

import numpy as np

from meshpar.schedules.ops import KINDS, B, F, W

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule

UP, DOWN, STAY = range(3)
"""Where a result goes: to stage + 1, to stage − 1 (both on a ring), or to another chunk of the same stage."""
SHIFTS = (1, -1, 0)
"""Of `UP`, `DOWN` and `STAY`."""
BUFFERS = ("stash", "backlog", "inbox", "turn")
"""Of which each has slots."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Which buffer slot each op of a table reads and writes, and where its messages go; −1: none.

    In a tick a stage runs its cell, which reads slots and writes the first two kinds; then messages move, and what
    arrives is written into the inbox. A slot can be written anew in the tick after its last reader's, one of the inbox
    at the end of that tick.
    """

    stash: np.ndarray
    """int32 `[tick, stage, kind]`: what F leaves for B and W. As many slots as `Schedule.peak_activations` says."""
    backlog: np.ndarray
    """int32 `[tick, stage, kind]`: what B leaves for W; none when both are in one cell."""
    inbox: np.ndarray
    """int32 `[tick, stage, kind]`: the slot that holds an F's input or a B's output gradient.

    None for F of part 0, which begins with the batch, and for B of the last part, which begins with the loss."""
    turn: np.ndarray
    """int32 `[tick, stage, kind]`: where the last part's F puts its output, and its B finds it."""
    sends: np.ndarray
    """int32 `[tick, stage, direction, lane]`: which kind's result (F or B) leaves the cell that way."""
    arrives: np.ndarray
    """int32 `[tick, stage, direction, lane]`: the inbox slot for what comes by that way at the end of the tick.

    What comes `UP` was sent by stage − 1, what comes `DOWN` by stage + 1."""

    def counts(self) -> dict[str, np.ndarray]:
        """How many slots of `stash`, `backlog`, `inbox` and `turn` each stage needs, `[stage]`."""
        return {name: getattr(self, name).max((0, 2), initial=-1) + 1 for name in BUFFERS}


def assign(schedule: Schedule) -> Slots:
    """See `Schedule.slots`. Only for a schedule that validates."""
    shape = schedule.table.shape[:3]
    stash, backlog, inbox, turn = (np.full(shape, -1, np.int32) for _ in BUFFERS)
    done, on = schedule.done_in, schedule.done_on

    slot = colored(on, done[F], done[W])
    for kind in (F, B, W):
        stash[done[kind], on, kind] = slot
    apart = done[B] < done[W]
    slot = colored(on[apart], done[B][apart], done[W][apart])
    for kind in (B, W):
        backlog[done[kind][apart], on[apart], kind] = slot

    on, first, last = on[:, -1], done[F][:, -1], done[B][:, -1]
    turn[first, on, F] = turn[last, on, B] = colored(on, first, last)

    sends, arrives = _messages(schedule, inbox)
    return Slots(stash=stash, backlog=backlog, inbox=inbox, turn=turn, sends=sends, arrives=arrives)


def colored(stage: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """A slot for each interval of ticks, both ends included: the lowest that is free on its stage."""
    slots = np.full(stage.shape, -1)
    free: dict[int, list[int]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    size: dict[int, int] = {}
    for index in np.argsort(first, axis=None, kind="stable").tolist():
        here = int(stage.flat[index])
        ending, spare = held.setdefault(here, []), free.setdefault(here, [])
        while ending and ending[0][0] < first.flat[index]:
            heapq.heappush(spare, heapq.heappop(ending)[1])
        if not spare:
            heapq.heappush(spare, size.setdefault(here, 0))
            size[here] += 1
        slots.flat[index] = heapq.heappop(spare)
        heapq.heappush(ending, (int(last.flat[index]), int(slots.flat[index])))
    return slots


def _messages(schedule: Schedule, inbox: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`sends` and `arrives`; fills `inbox`."""
    done, on = schedule.done_in, schedule.done_on
    # Every message: who makes it, in which tick, and who uses it. Forward goes up the parts, backward down them.
    ways = ((F, np.s_[:, :-1], np.s_[:, 1:]), (B, np.s_[:, 1:], np.s_[:, :-1]))
    made, used, origin, goal = (
        np.concatenate([array(kind, source, target).ravel() for kind, source, target in ways])
        for array in (
            lambda kind, source, target: done[kind][source],
            lambda kind, source, target: done[kind][target],
            lambda kind, source, target: on[source],
            lambda kind, source, target: on[target],
        )
    )
    kind = np.repeat([F, B], len(made) // 2)
    slot = colored(goal, made + 1, used)
    inbox[used, goal, kind] = slot
    direction = np.select([goal == origin, (goal - origin) % schedule.stages == 1], [STAY, UP], DOWN)
    # A cell that sends two results the same way, F's first, gives each a lane of its own.
    taken = np.zeros((*inbox.shape[:2], len(SHIFTS), len(KINDS)), bool)
    taken[made, origin, direction, kind] = True
    lane = (taken.cumsum(3) - 1)[made, origin, direction, kind]
    shape = (*inbox.shape[:2], len(SHIFTS), int(lane.max(initial=0)) + 1)
    sends, arrives = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    sends[made, origin, direction, lane] = kind
    arrives[made, goal, direction, lane] = slot
    return sends, arrives
