"""Bubbles and memory of all schedules, compared with published formulas."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshpar import schedules
from meshpar.schedules import SCHEDULES, Schedule, StageOp, make
from tests.errors import raises
from tests.grid import cases
from tests.pipeline.replay import replay

SIZES = [(p, m) for p in range(2, 9) for m in range(p, 33)]
FEW = [(p, m) for p in (2, 3, 4, 6) for m in (p, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p)]
sizes = pytest.mark.parametrize("sizes", [FEW, pytest.param(SIZES, marks=pytest.mark.matrix)], ids=["few", "all"])


def largest_group(p: int, m: int) -> int:
    """Return the size of the largest group of microbatches in interleaved 1F1B."""
    return -(-m // (m // p))


# For F = B = W = 1: the largest span bubble of a stage in units of F, and the largest number of saved activations of a
# chunk. With m < 2p − 1, ZB-H2 and ZB-V have a bubble in any order of ops.
CLOSED = {
    "gpipe": (lambda p, m: 3 * (p - 1), lambda p, m: m),
    "1f1b": (lambda p, m: 3 * (p - 1), lambda p, m: p),
    "interleaved-1f1b": (lambda p, m: 3 * (p - 1) / 2, lambda p, m: min(2 * m, 2 * p - 1 + largest_group(p, m))),
    "eager-1f1b": (lambda p, m: 3 * (p - 1), lambda p, m: min(2 * p, m)),
    "zb-h1": (lambda p, m: p - 1, lambda p, m: p),
    "zb-h2": (lambda p, m: max(0, 2 * p - 1 - m), lambda p, m: min(m, 2 * p - 1)),
    "zb-v": (lambda p, m: max(0, 2 * p - 1 - m) / 2, lambda p, m: 2 * min(p, m)),
    "dualpipe": (lambda p, m: p - 2, lambda p, m: p + 1),
    "dualpipe-v": (lambda p, m: p - 1, lambda p, m: 2 * p + 1),
}


def begins_last(name: str, p: int) -> float:
    """Return a lower bound for the latest start of a stage, in units of F."""
    return {"zb-v": (p - 1) / 2, "dualpipe-v": (p - 1) / 2, "dualpipe": p / 2 - 1}.get(name, p - 1)


@sizes
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_bubble_and_memory_match_formulas(name, sizes):
    bubble, peak = CLOSED[name]
    uneven = 0
    for p, m in sizes:
        if name == "dualpipe" and p % 2:
            continue
        schedule = make(name, p, m).validate()
        simulation = schedule.simulate()
        where = f"{name}, {p} stages, {m} microbatches"
        np.testing.assert_allclose(simulation.lockstep.makespan, simulation.free.makespan, err_msg=where)
        np.testing.assert_allclose(simulation.free.busy, 3 * m, err_msg=where)
        # Two streams need at least 2p microbatches, and DualPipe needs an even number.
        if name.startswith("dualpipe") and (m < 2 * p or (name == "dualpipe" and m % 2)):
            uneven += 1
            assert schedule.peak_activations.max() <= peak(p, m), where
            continue
        np.testing.assert_allclose(simulation.free.span_bubble.max(), bubble(p, m), atol=1e-9, err_msg=where)
        assert schedule.peak_activations.max() == peak(p, m), where
        # A single step cannot end before the stage that starts last has run all its ops.
        makespan = 3 * m + max(bubble(p, m), begins_last(name, p))
        np.testing.assert_allclose(simulation.free.makespan, makespan, err_msg=where)
        np.testing.assert_allclose(schedule.bubble_fraction, 1 - 3 * m / makespan, atol=1e-9, err_msg=where)
    assert (uneven > 0) == name.startswith("dualpipe")


# Phrases of the docstrings and the span bubbles that they state; None if the formula does not apply.
STATED = {
    "gpipe": (["(p−1)(F+B+W)"], lambda p, m, f, b, w: (p - 1) * (f + b + w)),
    "1f1b": (["(p−1)(F+B+W)"], lambda p, m, f, b, w: (p - 1) * (f + b + w)),
    "interleaved-1f1b": (
        ["(p−1)(F+B+W)/v", "If m < p, it is longer by (p−m)(v−1)(F+B+W)/v"],
        lambda p, m, f, b, w: (p - 1 + max(0, p - m)) * (f + b + w) / 2,
    ),
    "eager-1f1b": (["(p−1)(F+B+W)/v, for any op durations"], lambda p, m, f, b, w: (p - 1) * (f + b + w)),
    "zb-h1": (
        ["(p−1)(F+B−W) if W ≤ F", "If m < p, it is longer by (p−m)W"],
        lambda p, m, f, b, w: (p - 1) * (f + b - w) + max(0, p - m) * w if w <= f else None,
    ),
    "zb-h2": (
        ["(p−1)(F+B−2W)", "for W ≤ F, W ≤ B and m ≥ 2p−1", "longer by (2p−1−k)W"],
        lambda p, m, f, b, w: (p - 1) * (f + b - 2 * w) + max(0, 2 * p - 1 - m) * w if w <= min(f, b) else None,
    ),
    "zb-v": (
        ["0 if m ≥ 2p−1, (2p−1−m)·F/2 with fewer microbatches, and (4p−1−4m)·F/2 with fewer than 2p/3"],
        lambda p, m, f, b, w: (
            (max(0, 2 * p - 1 - m) if 3 * m >= 2 * p else 4 * p - 1 - 4 * m) * f / 2 if f == b == w else None
        ),
    ),
    "dualpipe": (
        ["(p/2−1)(F&B + B − 3W)", "for even m ≥ 2p", "longer by F + B for odd m ≥ 2p"],
        lambda p, m, f, b, w: (
            (p / 2 - 1) * (f + 2 * (b + w) - 3 * w) + (m % 2) * (f + b + w) if f == b >= w and m >= 2 * p else None
        ),
    ),
    "dualpipe-v": (
        ["(p−1)(F&B + B − 3W)/2 for any m ≥ 2p"],
        lambda p, m, f, b, w: (p - 1) * (f + 2 * (b + w) - 3 * w) / 2 if f == b >= w and m >= 2 * p else None,
    ),
}


@pytest.mark.parametrize("name", cases("zb-h1", "zb-v", "dualpipe", grid=SCHEDULES))
def test_bubble_formulas_of_docstrings(name):
    words, form = STATED[name]
    said = " ".join(SCHEDULES[name].__doc__.split())
    assert all(word in said for word in words)
    compared = 0
    for p in (1, 2, 3, 4, 6, 8):
        if name == "dualpipe" and p % 2:
            continue
        for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p} - {0}):
            schedule = make(name, p, m)
            for costs in ((1, 1, 1), (1, 1.2, 0.8), (1, 1, 0.5), (2, 1, 1), (1, 0.5, 1), (1, 1, 2)):
                stated = form(p, m, *costs)
                if stated is not None:
                    found = schedule.simulate(**dict(zip("fbw", costs, strict=True))).free.span_bubble.max()
                    assert found == pytest.approx(stated, abs=1e-9), (p, m, costs)
                    compared += 1
    assert compared > 20


@sizes
@pytest.mark.parametrize("chunks", cases(2, grid=[1, 2, 3, 4]))
def test_interleaved_bubble_is_divided_by_chunks(chunks, sizes):
    for p, m in sizes:
        schedule = schedules.interleaved_1f1b(p, m, chunks=chunks)
        np.testing.assert_allclose(schedule.simulate().free.span_bubble.max(), 3 * (p - 1) / chunks)
        group = largest_group(p, m)
        if chunks > 1:
            assert schedule.peak_activations.max() == min(m * chunks, chunks * p + p - 1 + (chunks - 1) * (group - p))
        if m % p == 0 and m > p and chunks > 1:  # The published formula applies.
            assert schedule.peak_activations.max() / chunks == pytest.approx(p * (1 + (p - 1) / (p * chunks)))


def test_interleaved_with_one_chunk_is_1f1b():
    assert np.array_equal(schedules.interleaved_1f1b(4, 8, chunks=1).table, schedules.one_f_one_b(4, 8).table)


@pytest.mark.parametrize("limit", range(1, 12))
def test_zb_h2_trades_memory_for_bubble(limit):
    p = 6
    for m in (6, 9, 11, 24):
        schedule = schedules.zb_h2(p, m, limit=limit)
        assert schedule.peak_activations.max() <= limit
        if limit >= p:
            assert schedule.simulate().free.span_bubble.max() == 2 * p - 1 - min(limit, m)
    assert np.array_equal(schedules.zb_h2(p, 24, limit=p).table, schedules.zb_h1(p, 24).table)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (4, 1), (4, 2), (4, 3), (6, 5), (8, 9)])
def test_make_with_few_microbatches_or_stages(name, p, m):
    if name == "dualpipe" and p == 1:
        return
    schedule = make(name, p, m)
    assert (schedule.stages, schedule.microbatches) == (p, m)
    replay(schedule)


def test_dualpipe_with_odd_number_of_microbatches():
    schedule = schedules.dualpipe(4, 9)
    assert schedule.done_on[:, 0].tolist() == [0] * 5 + [3] * 4
    assert schedule.done_on[:, 3].tolist() == [3] * 5 + [0] * 4


def test_dualpipe_pairs_share_a_tick():
    """Nearly all pairs share a tick; the remaining pairs would delay a neighbor."""
    schedule = schedules.dualpipe(4, 32)
    pairs = (schedule.table[:, :, :2, 0] >= 0).all(2)
    assert pairs.sum(0).tolist() == [26, 27, 27, 26]
    planned = [sum([op.kind for op in block] == ["F", "B", "W"] for block in row) for row in schedule.order()]
    assert planned == [27, 27, 27, 27]
    forward, backward = np.moveaxis(schedule.table[pairs][:, :2], 1, 0)
    assert (forward[:, 1] != backward[:, 1]).all()  # A microbatch of each stream.


@pytest.mark.parametrize(("name", "copies"), [("1f1b", 1), ("zb-v", 1), ("dualpipe-v", 1), ("dualpipe", 2)])
def test_copies_of_parameters(name, copies):
    schedule = make(name, 4, 8)
    assert schedule.copies == copies
    assert sorted(set(schedule.parts.flat)) == list(range(schedule.num_parts))


def test_repeated_steps_cost_the_span_bubble():
    """Without synchronization, a step costs the span bubble: 0 for ZB-H2, and the full bubble for 1F1B."""
    work = 3 * 8

    def repeated(schedule, steps):
        rows = [[] for _ in range(schedule.stages)]
        for step, (row, blocks) in itertools.product(range(steps), list(zip(rows, schedule.order(), strict=True))):
            row += [tuple(op._replace(microbatch=op.microbatch + 8 * step) for op in block) for block in blocks]
        return Schedule.from_order("repeated", rows, parts=schedule.parts)

    for name, per_step in (("zb-h2", work), ("zb-v", work), ("zb-h1", work + 3), ("1f1b", work + 9)):
        times = [repeated(make(name, 4, 8), steps).simulate() for steps in (2, 4)]
        assert times[1].free.makespan - times[0].free.makespan == pytest.approx(2 * per_step)
        assert times[1].lockstep.makespan == pytest.approx(times[1].free.makespan)
    assert repeated(make("1f1b", 4, 8), 4).peak_activations.max() == 4


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "code"),
    [
        ("zb-h3", 4, 8, {}, "unknown-name"),
        ("gpipe", 0, 8, {}, "not-an-int"),
        ("zb-v", 4, "8", {}, "not-an-int"),
        ("interleaved-1f1b", 4, 8, {"chunks": 2.5}, "not-an-int"),
        ("1f1b", 10**6, 1, {}, "out-of-range"),
        ("interleaved-1f1b", 2, 4, {"chunks": 10**9}, "out-of-range"),
        ("zb-h2", 4, 8, {"limit": 2.5}, "not-an-int"),
        ("dualpipe", 5, 8, {}, "indivisible"),
        ("1f1b", 2, 4, {"chunks": 2}, "unknown-name"),
        ("zb-h2", 2, 4, {"chunks": 2}, "unknown-name"),
    ],
)
def test_make_rejects_invalid_arguments(name, p, m, options, code):
    with raises(code, f"schedule `{name}`"):
        make(name, p, m, **options)


def test_schedule_equality_hash_and_repr():
    first, same, other = (schedules.zb_h1(4, m) for m in (8, 8, 9))
    assert first == same
    assert hash(first) == hash(same)
    assert first != other
    pairs = make("dualpipe", 2, 4)
    split = dataclasses.replace(pairs, joined=np.zeros_like(pairs.joined))
    assert (split.table == pairs.table).all()
    assert split != pairs
    assert Schedule.from_order("zb-h1", first.order()) == first
    with pytest.raises(ValueError, match="read-only"):
        first.table[0, 0, 0, 0] = 3
    assert repr(first) == "Schedule('zb-h1', stages=4, microbatches=8, ticks=27)"
    assert first.cell(0, 0) == (StageOp("F", 0, 0),)
    assert first.cell(0, 1) == ()


def test_schedules_do_not_import_jax():
    code = (
        "import sys, meshpar.pipeline as p\n"
        "s = p.make('zb-v', 2, 4); s.simulate(); s.slots(); str(s); s.to_json()\n"
        "print([name for name in ('jax', 'flax', 'rich', 'matplotlib') if name in sys.modules])"
    )
    root = Path(schedules.__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "stages"), [("dualpipe", 4), ("dualpipe-v", 2)])
def test_dualpipe_pair_and_weight_gradient_share_a_tick(name, stages):
    table = make(name, stages, 16).table
    has_op = table[..., 0] >= 0
    has_all = has_op.all(-1)
    assert has_all.sum() >= 0.8 * (has_op[..., 0] & has_op[..., 1]).sum()
    assert np.array_equal(table[has_all][:, 1], table[has_all][:, 2])
