"""Uniform schedules: all stages run the same ops in a tick, so that no conditional is needed.

A stage without an op in a tick computes an unused result. This takes no additional time if another stage has the same
ops in this tick, because stages exchange messages in each tick and therefore wait for each other.

    warm-up     F
    steady      F, B and W
    cool-down      B and W

A group has as many microbatches as there are stages. The stages share the embedding and the head of a group: each
computes them for a single microbatch, in an event between two ticks, and a collective distributes the results. The
event of a group is before its first B.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import colored
from meshpar.schedules.table import ScheduleTable

MAX_SEGMENTS = 8
"""Each segment is a loop of the program. Schedules such as GPipe alternate between B and W."""


class Ops(NamedTuple):
    """The ops of a tick."""

    forward: bool
    backward: bool
    weights: bool
    is_full_backward: bool
    """Whether B and W of all stages are for the same microbatch, so that they are computed together."""


class TickSegment(NamedTuple):
    """Consecutive ticks with the same ops, repeated `repeats` times."""

    ops: Ops
    begin: int
    ticks: int
    """Number of ticks per repetition."""
    repeats: int
    first_event: int | None
    """The group whose event precedes the first repetition, or None. Each further repetition begins with the event of
    the next group."""


class Uniform(NamedTuple):
    """A schedule as segments of ticks with the same ops on all stages."""

    segments: tuple[TickSegment, ...]
    groups: int
    """Number of groups of microbatches."""
    ahead: int
    """Number of groups whose embeddings are computed before the first tick. The event of group g computes the
    embeddings of group g + ahead."""
    behind: int
    """The event of group g computes the gradients of the embeddings of group g − behind."""
    held: int
    """Number of groups with outputs of the last chunk that wait for their event."""

    def embedded(self) -> Iterator[int]:
        """Yield the groups whose embeddings are computed, including some that do not exist, in repeated events.

        The same number of gradients of embeddings is computed if `ahead` equals `behind`.
        """
        yield from range(min(self.ahead, self.groups))
        for segment in self.segments:
            if segment.first_event is not None:
                groups = range(segment.first_event, segment.first_event + segment.repeats)
                yield from (g + self.ahead for g in groups if segment.repeats > 1 or g + self.ahead < self.groups)


@functools.lru_cache(maxsize=256)
def uniform(schedule: ScheduleTable) -> Uniform | None:
    """Return a valid schedule as segments, or None if its stages run different ops in a tick.

    Further conditions: results of F are sent to the next stage and results of B to the previous stage, and all F of a
    group end before its first B starts.
    """
    ops, events = _ops_of_ticks(schedule), _events(schedule)
    if ops is None or events is None:
        return None
    event_of = {tick: group for group, tick in enumerate(events)}
    starts = sorted({0, *events, *(tick for tick in range(1, len(ops)) if ops[tick] != ops[tick - 1])})
    segments: list[TickSegment] = []
    for begin, end in itertools.pairwise([*starts, len(ops)]):
        segment = TickSegment(ops[begin], begin, end - begin, 1, event_of.get(begin))
        last = segments[-1] if segments else segment
        is_repeated = (last.ops, last.ticks) == (segment.ops, segment.ticks) and last.first_event is not None
        if segments and is_repeated and segment.first_event is not None:
            segments[-1] = last._replace(repeats=last.repeats + 1)
        else:
            segments.append(segment)
    if len(segments) > MAX_SEGMENTS:
        return None
    members = _groups(schedule)
    enters = [int(schedule.done_in[F][group, 0].min()) for group in members]
    leaves = [int(schedule.done_in[B][group, 0].max()) for group in members]
    arrives = [int(schedule.done_in[F][group, -1].min()) for group in members]
    count = len(members)
    ahead = next(n for n in range(1, count + 1) if all(events[g] <= enters[g + n] for g in range(count - n)))
    behind = next(n for n in range(1, count + 1) if all(leaves[g - n] < events[g] for g in range(n, count)))
    held = next(n for n in range(1, count + 1) if all(events[g] <= arrives[g + n] for g in range(count - n)))
    return Uniform(tuple(segments), count, ahead, behind, held)


def _groups(schedule: ScheduleTable) -> list[slice]:
    """Return the microbatches of each group. The last group may be smaller."""
    return [slice(begin, begin + schedule.stages) for begin in range(0, schedule.microbatches, schedule.stages)]


def _ops_of_ticks(schedule: ScheduleTable) -> list[Ops] | None:
    """Return the ops of each tick, or None if no stage runs all ops of a tick."""
    has_op = schedule.table[..., 0] >= 0
    is_same = np.all(schedule.table[..., B, :] == schedule.table[..., W, :], -1)
    result = []
    for row, same in zip(has_op, is_same, strict=True):
        union, is_full = row.any(0), bool(np.all(same) and row[:, B].any())
        if not union.any() or not np.any(np.all(row == union, -1)):
            return None
        result.append(Ops(bool(union[F]), bool(union[B]), bool(union[W]), is_full))
    return result


def _events(schedule: ScheduleTable) -> list[int] | None:
    """Return the tick of the first B of each group, before which its event is.

    Returns None if an F of the group or a B of the previous group is later, or if the stages do not take the parts of
    the model in turn.
    """
    stages, on = schedule.stages, schedule.done_on
    if stages == 1 or not np.all(on == np.arange(schedule.num_parts) % stages):
        return None
    forward, backward = schedule.done_in[F][:, -1], schedule.done_in[B][:, -1]
    groups = _groups(schedule)
    events = [int(backward[group].min()) for group in groups]
    is_late = any(forward[group].max() >= event for group, event in zip(groups, events, strict=True))
    # An event replaces the gradients of the outputs of the group before.
    is_mixed = any(backward[group].max() >= event for group, event in zip(groups, events[1:], strict=False))
    return None if is_late or is_mixed else events


class Received(NamedTuple):
    """Slots of the messages of an op kind, int32 `[tick, stage]`; −1 if there is no message."""

    arrives: np.ndarray
    """Slot of the message that was sent in this tick."""
    reads: np.ndarray
    """Slot that the op of this tick reads."""


def received(schedule: ScheduleTable, kind: int) -> Received:
    """Return the slots of the messages of F or B. All messages of a kind have the same direction."""
    done, on = schedule.done_in[kind], schedule.done_on
    source, target = (np.s_[:, :-1], np.s_[:, 1:]) if kind == F else (np.s_[:, 1:], np.s_[:, :-1])
    sent, used, stage = (x.ravel() for x in (done[source], done[target], on[target]))
    slot = colored(stage, sent + 1, used)
    arrives, reads = (np.full((schedule.ticks, schedule.stages), -1, np.int32) for _ in range(2))
    arrives[sent, stage], reads[used, stage] = slot, slot
    return Received(arrives, reads)
