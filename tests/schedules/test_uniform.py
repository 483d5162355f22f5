"""Uniform schedules: segments of ticks in which all stages run the same ops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshpar.pipeline.traffic import executed, traffic
from meshpar.pipeline.uniform_executor import UniformPlan
from meshpar.schedules import SCHEDULES, interleaved_1f1b, make
from meshpar.schedules.ops import B, F
from meshpar.schedules.uniform import received, uniform
from tests.errors import raises
from tests.pipeline.replay import replay

SPREAD = ("eager-1f1b", "interleaved-1f1b")
SIZES = [(p, v, m) for p in (2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 3, 5, 8, 9)]
MORE = [(p, v, m) for p in (2, 3, 4, 5, 8) for v in (1, 2, 3, 5) for m in range(1, 36)]
sizes = pytest.mark.parametrize("sizes", [SIZES, pytest.param(MORE, marks=pytest.mark.matrix)], ids=["few", "all"])


@sizes
@pytest.mark.parametrize("name", SPREAD)
def test_spread_head_keeps_the_bubble_and_needs_no_conditional(name, sizes):
    for p, v, m in sizes:
        schedule, plain = (make(name, p, m, chunks=v, spread_head=spread) for spread in (True, False))
        replay(schedule)
        where = f"{p} stages, {v} chunks, {m} microbatches"
        assert uniform(schedule) is not None, where
        assert schedule.simulate().lockstep.makespan == pytest.approx(plain.simulate().lockstep.makespan), where


@pytest.mark.parametrize(
    ("chunks", "ticks", "bubble", "activations"), [(1, 86, 21, 23), (2, 158, 10.5, 15.5), (5, 374, 4.2, 11)]
)
def test_ticks_bubble_and_activations_of_eight_stages(chunks, ticks, bubble, activations):
    """In units of F = B = W and of the activations of a microbatch on a stage."""
    schedule = make("interleaved-1f1b", 8, 64, chunks=chunks, spread_head=True)
    segments = uniform(schedule)
    assert [segment.ops[:2] for segment in segments.segments] == [(True, False), (True, True), (False, True)]
    ran = executed(schedule)[:, 0].sum(0)  # ticks with each op
    assert (ran[F] + ran[B] * 2 - 3 * 64 * chunks) / chunks == pytest.approx(bubble)
    assert schedule.peak_activations.max() / chunks == pytest.approx(activations)
    assert schedule.ticks == ticks


@sizes
def test_segments_cover_all_ticks_in_order(sizes):
    for p, v, m in sizes:
        schedule = make("interleaved-1f1b", p, m, chunks=v, spread_head=True)
        found = uniform(schedule)
        ends = [s.begin + s.ticks * s.repeats for s in found.segments]
        assert [0, *ends[:-1]] == [s.begin for s in found.segments]
        assert ends[-1] == schedule.ticks
        has_op = (schedule.table[..., 0] >= 0).any(1)
        for segment, end in zip(found.segments, ends, strict=True):
            assert (has_op[segment.begin : end] == segment.ops[:3]).all()
        groups = [s.first_event + n for s in found.segments if s.first_event is not None for n in range(s.repeats)]
        assert groups == list(range(-(-m // p)))


@sizes
def test_results_of_a_group_are_complete_at_its_event(sizes):
    """Outputs of a group and its embeddings are complete before they are used, and no slot is overwritten too early."""
    for p, v, m in sizes:
        schedule = make("interleaved-1f1b", p, m, chunks=v, spread_head=True)
        found, done = uniform(schedule), schedule.done_in
        begins = (
            (s.first_event + n, s.begin + n * s.ticks)
            for s in found.segments
            if s.first_event is not None
            for n in range(s.repeats)
        )
        for group, tick in begins:
            rows = slice(group * p, group * p + p)
            assert done[F][rows, -1].max() < tick <= done[B][rows, -1].min()
            if (later := group + found.ahead) * p < m:  # its embeddings replace those of this group
                assert tick <= done[F][later * p : later * p + p, 0].min()
                assert done[F][rows, 0].max() < tick
            if (later := group + found.held) * p < m:  # its outputs replace those of this group
                assert tick <= done[F][later * p : later * p + p, -1].min()
            if group:  # the event replaces the gradients of the outputs
                assert done[B][group * p - p : group * p, -1].max() < tick
            if group >= found.behind:
                earlier = (group - found.behind) * p
                assert done[B][earlier : earlier + p, 0].max() < tick


@pytest.mark.parametrize(("chunks", "bubble"), [(1, 14), (2, 7), (5, 2.8)])
def test_split_backward_shortens_the_bubble(chunks, bubble):
    schedule = make("interleaved-1f1b", 8, 64, chunks=chunks, spread_head=True, split_backward=True)
    replay(schedule)
    assert uniform(schedule) is not None
    assert (executed(schedule)[:, 0].sum() - 3 * 64 * chunks) / chunks == pytest.approx(bubble)
    with raises("conflict", "schedule `eager-1f1b`"):
        make("eager-1f1b", 4, 8, split_backward=True)


def test_messages_are_in_their_slot_until_they_are_read():
    for p, v, m in ((2, 2, 5), (4, 2, 7), (4, 3, 9), (3, 1, 7)):
        schedule = make("interleaved-1f1b", p, m, chunks=v, spread_head=True)
        for kind in (F, B):
            slots, done, on = received(schedule, kind), schedule.done_in[kind], schedule.done_on
            for i, part in itertools.product(range(m), range(p * v - 1)):
                source, target = (part, part + 1) if kind == F else (part + 1, part)
                sent, used, stage = done[i, source], done[i, target], on[i, target]
                slot = slots.arrives[sent, stage]
                assert slot == slots.reads[used, stage] >= 0
                assert slot not in slots.arrives[sent + 1 : used, stage]


@pytest.mark.parametrize("name", SCHEDULES)
def test_other_schedules_need_a_conditional(name):
    assert uniform(make(name, 4, 8)) is None
    if name in SPREAD:
        assert uniform(make(name, 1, 4)) is None  # a single stage sends no messages


def test_counts_of_a_uniform_schedule():
    """All stages compute in each tick, and share embeddings and losses."""
    counts = traffic(make("interleaved-1f1b", 4, 8, chunks=2, spread_head=True))
    ticks = 2 * 8 + 3
    assert counts.ops.tolist() == [[ticks] * 3] * 4
    assert (counts.up, counts.down) == ((ticks,), (ticks,))
    assert counts.first.tolist() == counts.last.tolist() == [2] * 4
    assert counts.first_stages == counts.last_stages == {0, 1, 2, 3}


@pytest.mark.parametrize(("name", "rounds"), [("eager-1f1b", 0), ("interleaved-1f1b", 2), ("dualpipe", 1)])
def test_rounds_send_chunks(name, rounds):
    """A round in which all chunks stay on their stage has no permute."""
    assert traffic(make(name, 4, 8)).rounds == rounds


def test_stages_without_an_op_use_scratch_slots():
    plan = UniformPlan.of(make("eager-1f1b", 4, 8, spread_head=True))
    idle = plan.columns.runs[..., F] == 0
    assert idle.any()
    scratch = plan.slots["saved_activations"] - 1
    np.testing.assert_array_equal(plan.columns.saved_activations[..., F] == scratch, idle)
    assert plan.columns.of_group[..., 1].max() == plan.slots["outputs"] - 1 == 4


def test_spread_head_must_be_true_or_false():
    with raises("wrong-type", "schedule `eager-1f1b`"):
        make("eager-1f1b", 2, 4, spread_head=2)
    with raises("wrong-type", "schedule `interleaved-1f1b`"):
        interleaved_1f1b(2, 4, spread_head=None)
