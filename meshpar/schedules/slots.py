"""Assignment of buffer slots and messages to the ops of a schedule."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from meshpar.schedules.ops import KINDS, B, F, W
from meshpar.schedules.table import ScheduleTable

UP, DOWN, STAY = range(3)
"""Direction of a result: to stage + 1, to stage − 1 (both on a ring), or to a different chunk of the same stage."""
SHIFTS = (1, -1, 0)
"""Change of the stage index for `UP`, `DOWN` and `STAY`."""
BUFFERS = ("saved_activations", "deferred_weight_grads", "receive_buffer", "pending_outputs")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Buffer slots that each op reads and writes, and the messages between stages; −1 means none.

    In a tick, a stage first runs its ops, which read all buffers and write all but the receive buffer. Then messages
    are exchanged and written to the receive buffer. A slot of the receive buffer can be overwritten at the end of
    the tick of its last read, and all other slots in the next tick.
    """

    saved_activations: np.ndarray
    """int32 `[tick, stage, kind]`: residuals that F saves for B and W. Needs `Schedule.peak_activations` slots."""
    deferred_weight_grads: np.ndarray
    """int32 `[tick, stage, kind]`: intermediate values that B saves for W; −1 if both run in the same tick."""
    receive_buffer: np.ndarray
    """int32 `[tick, stage, kind]`: slot of the input of an F, or of the output gradient of a B.

    −1 for F of the first chunk, which reads the batch, and for B of the last chunk, which starts from the loss."""
    pending_outputs: np.ndarray
    """int32 `[tick, stage, kind]`: output of the last chunk, from its F until its B computes the loss."""
    sends: np.ndarray
    """int32 `[tick, stage, direction, lane]`: kind (F or B) whose result is sent in this direction."""
    arrives: np.ndarray
    """int32 `[tick, stage, direction, lane]`: slot of the receive buffer for the message that arrives in this tick.

    A message in direction `UP` was sent by stage − 1, a message in direction `DOWN` by stage + 1."""

    def counts(self) -> dict[str, np.ndarray]:
        """Return the number of slots that each stage needs, `[stage]`, for each of `BUFFERS`."""
        return {name: getattr(self, name).max((0, 2), initial=-1) + 1 for name in BUFFERS}


def assign(schedule: ScheduleTable) -> Slots:
    """Return the slots of a valid schedule; see `Schedule.slots`."""
    shape = schedule.table.shape[:3]
    saved, deferred, received, pending = (np.full(shape, -1, np.int32) for _ in BUFFERS)
    done, stage = schedule.done_in, schedule.done_on

    slot = colored(stage, done[F], done[W])
    for kind in (F, B, W):
        saved[done[kind], stage, kind] = slot
    is_deferred = done[B] < done[W]
    slot = colored(stage[is_deferred], done[B][is_deferred], done[W][is_deferred])
    for kind in (B, W):
        deferred[done[kind][is_deferred], stage[is_deferred], kind] = slot

    stage, forward, backward = stage[:, -1], done[F][:, -1], done[B][:, -1]
    pending[forward, stage, F] = pending[backward, stage, B] = colored(stage, forward, backward)

    sends, arrives = _messages(schedule, received)
    return Slots(
        saved_activations=saved, deferred_weight_grads=deferred, receive_buffer=received, pending_outputs=pending,
        sends=sends, arrives=arrives,
    )  # fmt: skip


def colored(stage: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Assign each interval of ticks, `first` to `last` inclusive, the lowest free slot of its stage."""
    slots = np.full(stage.shape, -1)
    free: dict[int, list[int]] = {}
    used: dict[int, list[tuple[int, int]]] = {}
    size: dict[int, int] = {}
    for index in np.argsort(first, axis=None, kind="stable").tolist():
        s = int(stage.flat[index])
        used_s, free_s = used.setdefault(s, []), free.setdefault(s, [])
        while used_s and used_s[0][0] < first.flat[index]:
            heapq.heappush(free_s, heapq.heappop(used_s)[1])
        if not free_s:
            heapq.heappush(free_s, size.setdefault(s, 0))
            size[s] += 1
        slots.flat[index] = heapq.heappop(free_s)
        heapq.heappush(used_s, (int(last.flat[index]), int(slots.flat[index])))
    return slots


def _messages(schedule: ScheduleTable, receive_buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `Slots.sends` and `Slots.arrives`, and write the slots of received results to `receive_buffer`."""
    done, stage = schedule.done_in, schedule.done_on
    # F sends to the next chunk of the model, B to the previous one.
    all_but_first, all_but_last = np.s_[:, 1:], np.s_[:, :-1]
    hops = ((F, all_but_last, all_but_first), (B, all_but_first, all_but_last))
    sent, used, origin, target = (
        np.concatenate([array.ravel() for array in arrays])
        for arrays in zip(*((done[k][src], done[k][dst], stage[src], stage[dst]) for k, src, dst in hops), strict=True)
    )
    kind = np.repeat([F, B], len(sent) // 2)
    slot = colored(target, sent + 1, used)
    receive_buffer[used, target, kind] = slot
    direction = np.select([target == origin, (target - origin) % schedule.stages == 1], [STAY, UP], DOWN)
    # If a stage sends two results in the same direction in a tick, F uses lane 0 and B uses lane 1.
    is_sent = np.zeros((*receive_buffer.shape[:2], len(SHIFTS), len(KINDS)), bool)
    is_sent[sent, origin, direction, kind] = True
    lane = (is_sent.cumsum(3) - 1)[sent, origin, direction, kind]
    shape = (*receive_buffer.shape[:2], len(SHIFTS), int(lane.max(initial=0)) + 1)
    sends, arrives = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    sends[sent, origin, direction, lane] = kind
    arrives[sent, target, direction, lane] = slot
    return sends, arrives
