"""Buffer slots and messages of schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshpar.schedules import SCHEDULES, make
from meshpar.schedules.slots import DOWN, STAY, UP
from tests.grid import cases
from tests.pipeline.replay import Stale, replay

NAMES = [*SCHEDULES]


@pytest.mark.parametrize("name", NAMES)
def test_slots_replay_without_stale_values(name):
    for p, m in [(2, 2), (2, 7), (3, 5), (4, 8), (4, 16), (6, 13), (8, 32)]:
        if name == "dualpipe" and p % 2:
            continue
        schedule = make(name, p, m)
        counts = replay(schedule).counts()
        assert np.array_equal(counts["saved_activations"], schedule.peak_activations)
        assert (counts["deferred_weight_grads"] <= schedule.peak_activations).all()
        assert (counts["receive_buffer"] <= schedule.peak_activations).all()


@pytest.mark.parametrize(
    ("name", "up", "down", "stay"),
    [
        ("gpipe", 1, 1, 0), ("1f1b", 1, 1, 0), ("interleaved-1f1b", 1, 1, 0), ("zb-h1", 1, 1, 0), ("zb-h2", 1, 1, 0),
        ("zb-v", 1, 1, 1), ("dualpipe", 2, 2, 0), ("dualpipe-v", 2, 2, 2), ("eager-1f1b", 1, 1, 0),
    ],
)  # fmt: skip
def test_slots_messages_per_tick(name, up, down, stay):
    """A tick has a permute up and a permute down, or two if both results of a pair go the same way."""
    lanes = (make(name, 4, 16).slots().sends >= 0).any((0, 1)).sum(1)
    assert (lanes[UP], lanes[DOWN], lanes[STAY]) == (up, down, stay)


def test_slots_have_one_message_per_hop():
    for name in NAMES:
        schedule = make(name, 4, 8)
        slots = schedule.slots()
        hops = 2 * schedule.microbatches * (schedule.num_parts - 1)
        assert (slots.sends >= 0).sum() == (slots.arrives >= 0).sum() == (slots.receive_buffer >= 0).sum() == hops


def test_full_backward_needs_one_deferred_slot():
    """W follows its B immediately, so a single slot is enough."""
    for name in ("gpipe", "1f1b", "interleaved-1f1b"):
        assert make(name, 4, 8).slots().counts()["deferred_weight_grads"].tolist() == [1] * 4


@pytest.mark.parametrize("name", cases("eager-1f1b", "zb-v", "dualpipe", grid=NAMES))
@pytest.mark.parametrize("buffer", ["saved_activations", "deferred_weight_grads", "receive_buffer", "arrives"])
def test_replay_detects_a_wrong_slot(name, buffer):
    """If a single use of a slot is changed, an op reads the wrong value."""
    schedule = make(name, 4, 8)
    slots = schedule.slots()
    array = getattr(slots, buffer)
    used = np.argwhere(array >= 0)
    sizes = slots.counts()["receive_buffer" if buffer == "arrives" else buffer]
    checked = 0
    for at in used[:: max(1, len(used) // 12)]:
        stale = array.copy()
        stale[tuple(at)] = (stale[tuple(at)] + 1) % max(2, sizes[at[1]])
        with pytest.raises(Stale, match=r"tick \d+, stage \d, .*: expected [FB] of microbatch"):
            replay(schedule, dataclasses.replace(slots, **{buffer: stale}))
        checked += 1
    assert checked or (name, buffer) == ("eager-1f1b", "deferred_weight_grads")  # W runs in the same tick as B.
