"""Every schedule can be run, and its bubbles and memory are those of the literature's closed forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshpar import schedules
from meshpar.schedules import SCHEDULES, Schedule, StageOp, make
from meshpar.sharding.types import MeshparError
from tests.grid import cases
from tests.pipeline.replay import replay

SIZES = [(p, m) for p in range(2, 9) for m in range(p, 33)]
FEW = [(p, m) for p in (2, 3, 4, 6) for m in (p, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p)]
sizes = pytest.mark.parametrize("sizes", [FEW, pytest.param(SIZES, marks=pytest.mark.matrix)], ids=["few", "all"])


def largest_group(p: int, m: int) -> int:
    """Microbatches that go through a chunk together in interleaved 1F1B."""
    return -(-m // (m // p))


# With F = B = W = 1: the span bubble of the worst stage in units of one stage's F, and the peak activations of the
# worst stage in chunks. Few microbatches (m < 2p − 1) cannot fill the round trip of ZB-H2 and ZB-V; that costs what it
# says here, and no order of ops can do better.
CLOSED = {
    "gpipe": (lambda p, m: 3 * (p - 1), lambda p, m: m),
    "1f1b": (lambda p, m: 3 * (p - 1), lambda p, m: p),
    "interleaved-1f1b": (
        lambda p, m: 3 * (p - 1) / 2,
        lambda p, m: min(2 * m, 2 * p + p - 1 + largest_group(p, m) - p),
    ),
    "eager-1f1b": (lambda p, m: 3 * (p - 1), lambda p, m: min(2 * p, m)),
    "zb-h1": (lambda p, m: p - 1, lambda p, m: p),
    "zb-h2": (lambda p, m: max(0, 2 * p - 1 - m), lambda p, m: min(m, 2 * p - 1)),
    "zb-v": (lambda p, m: max(0, 2 * p - 1 - m) / 2, lambda p, m: 2 * min(p, m)),
    "dualpipe": (lambda p, m: p - 2, lambda p, m: p + 1),
    "dualpipe-v": (lambda p, m: p - 1, lambda p, m: 2 * p + 1),
}
MAKESPAN_BUBBLE = {
    "gpipe": 0.2727, "1f1b": 0.2727, "interleaved-1f1b": 0.1579, "zb-h1": 0.1111, "zb-h2": 0.1111, "zb-v": 0.0588,
    "dualpipe-v": 0.1111, "eager-1f1b": 0.2727,
}  # fmt: skip
"""At p = 4, m = 8 (FACTS 5)."""


def begins_last(name: str, p: int) -> float:
    """When the last stage to begin begins, at the least, in units of one stage's F."""
    return {"zb-v": (p - 1) / 2, "dualpipe-v": (p - 1) / 2, "dualpipe": p / 2 - 1}.get(name, p - 1)


@sizes
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_memory_are_the_closed_forms(name, sizes):
    bubble, peak = CLOSED[name]
    uneven = 0
    for p, m in sizes:
        if name == "dualpipe" and p % 2:
            continue
        schedule = make(name, p, m).validate()
        one = schedule.simulate()
        where = f"{name}, {p} stages, {m} microbatches"
        np.testing.assert_allclose(one.lockstep.makespan, one.free.makespan, err_msg=where)
        np.testing.assert_allclose(one.free.busy, 3 * m, err_msg=where)
        # Two streams need 2p microbatches to fill both ends, and as many of one as of the other.
        if name.startswith("dualpipe") and (m < 2 * p or (name == "dualpipe" and m % 2)):
            uneven += 1
            assert schedule.peak_activations.max() <= peak(p, m), where
            continue
        np.testing.assert_allclose(one.free.span_bubble.max(), bubble(p, m), atol=1e-9, err_msg=where)
        assert schedule.peak_activations.max() == peak(p, m), where
        # A step alone ends no earlier than the last stage to begin has done its work.
        makespan = 3 * m + max(bubble(p, m), begins_last(name, p))
        np.testing.assert_allclose(one.free.makespan, makespan, err_msg=where)
        np.testing.assert_allclose(schedule.bubble_fraction, 1 - 3 * m / makespan, atol=1e-9, err_msg=where)
    assert (uneven > 0) == name.startswith("dualpipe")


# What the docstrings say of the span bubble and where, from one microbatch on; None where they say nothing.
STATED = {
    "gpipe": (["(p−1)(F+B+W)"], lambda p, m, f, b, w: (p - 1) * (f + b + w)),
    "1f1b": (["(p−1)(F+B+W)"], lambda p, m, f, b, w: (p - 1) * (f + b + w)),
    "interleaved-1f1b": (
        ["(p−1)(F+B+W)/v, and (p−m)(v−1)(F+B+W)/v more where m < p"],
        lambda p, m, f, b, w: (p - 1 + max(0, p - m)) * (f + b + w) / 2,
    ),
    "eager-1f1b": (
        ["(p−1)(F+B+W)/v, whatever an op takes"],
        lambda p, m, f, b, w: (p - 1) * (f + b + w),
    ),
    "zb-h1": (
        ["(p−1)(F+B−W) where W ≤ F, and (p−m)W more where m < p"],
        lambda p, m, f, b, w: (p - 1) * (f + b - w) + max(0, p - m) * w if w <= f else None,
    ),
    "zb-h2": (
        ["(p−1)(F+B−2W)", "where W ≤ F, W ≤ B and m ≥ 2p−1", "(2p−1−k)W more"],
        lambda p, m, f, b, w: (p - 1) * (f + b - 2 * w) + max(0, 2 * p - 1 - m) * w if w <= min(f, b) else None,
    ),
    "zb-v": (
        ["0 where m ≥ 2p−1, (2p−1−m)·F/2 with fewer microbatches and (4p−1−4m)·F/2 with fewer than 2p/3"],
        lambda p, m, f, b, w: (
            (max(0, 2 * p - 1 - m) if 3 * m >= 2 * p else 4 * p - 1 - 4 * m) * f / 2 if f == b == w else None
        ),
    ),
    "dualpipe": (
        ["(p/2−1)(F&B + B − 3W)", "for even m ≥ 2p", "F + B more for odd m ≥ 2p"],
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
def test_the_docstrings_closed_forms_hold_where_they_say(name):
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


@pytest.mark.parametrize(
    ("name", "p", "m", "costs", "bubble"),
    [
        ("zb-v", 4, 1, (1, 1, 1), 5.5), ("zb-v", 4, 2, (1, 1, 1), 3.5), ("zb-v", 8, 3, (1, 1, 1), 9.5),
        ("dualpipe", 2, 5, (1, 1, 1), 3.0), ("dualpipe", 4, 9, (1, 1, 1), 5.0), ("dualpipe", 4, 8, (1, 1.2, 0.8), 2.4),
    ],
)  # fmt: skip
def test_bubbles_beside_the_literatures_forms(name, p, m, costs, bubble):
    """FACTS 5: with fewer microbatches than the closed forms hold for."""
    found = make(name, p, m).simulate(**dict(zip("fbw", costs, strict=True))).free.span_bubble.max()
    assert found == pytest.approx(bubble)


@pytest.mark.parametrize(("name", "fraction"), MAKESPAN_BUBBLE.items())
def test_makespan_bubbles_of_four_stages_and_eight_microbatches(name, fraction):
    assert round(make(name, 4, 8).bubble_fraction, 4) == fraction


def test_four_chunks_divide_the_bubble_by_four():
    """FACTS 5."""
    assert round(make("interleaved-1f1b", 4, 8, chunks=4).bubble_fraction, 4) == 0.0857


@pytest.mark.parametrize(("p", "m", "percent"), [(4, 1, 75.0), (4, 8, 27.3), (4, 16, 15.8), (8, 32, 17.9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_textbook_bubble(name, p, m, percent):
    """FACTS 5: (p-1)/(m+p-1)."""
    assert round(100 * make(name, p, m).bubble_fraction, 1) == percent


@sizes
@pytest.mark.parametrize("chunks", cases(2, grid=[1, 2, 3, 4]))
def test_interleaving_divides_the_bubble_for_any_number_of_microbatches(chunks, sizes):
    for p, m in sizes:
        schedule = schedules.interleaved_1f1b(p, m, chunks=chunks)
        np.testing.assert_allclose(schedule.simulate().free.span_bubble.max(), 3 * (p - 1) / chunks)
        group = largest_group(p, m)
        if chunks > 1:
            assert schedule.peak_activations.max() == min(m * chunks, chunks * p + p - 1 + (chunks - 1) * (group - p))
        if m % p == 0 and m > p and chunks > 1:  # as the literature prints it
            assert schedule.peak_activations.max() / chunks == pytest.approx(p * (1 + (p - 1) / (p * chunks)))


def test_one_chunk_is_1f1b():
    assert np.array_equal(schedules.interleaved_1f1b(4, 8, chunks=1).table, schedules.one_f_one_b(4, 8).table)


@pytest.mark.parametrize("limit", range(1, 12))
def test_memory_buys_the_bubble_off(limit):
    p = 6
    for m in (6, 9, 11, 24):
        schedule = schedules.zb_h2(p, m, limit=limit)
        assert schedule.peak_activations.max() <= limit
        if limit >= p:
            assert schedule.simulate().free.span_bubble.max() == 2 * p - 1 - min(limit, m)
    assert np.array_equal(schedules.zb_h2(p, 24, limit=p).table, schedules.zb_h1(p, 24).table)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (4, 1), (4, 2), (4, 3), (6, 5), (8, 9)])
def test_few_microbatches_and_few_stages(name, p, m):
    if name == "dualpipe" and p == 1:
        return
    schedule = make(name, p, m)
    assert (schedule.stages, schedule.microbatches) == (p, m)
    replay(schedule)


def test_odd_microbatches_go_through_two_streams_too():
    schedule = schedules.dualpipe(4, 9)
    assert schedule.done_on[:, 0].tolist() == [0] * 5 + [3] * 4
    assert schedule.done_on[:, 3].tolist() == [3] * 5 + [0] * 4


def test_overlapped_pairs_share_a_tick():
    """Nearly all of DualPipe's do; two of stage 0's would make a neighbour wait."""
    schedule = schedules.dualpipe(4, 32)
    pairs = (schedule.table[:, :, :2, 0] >= 0).all(2)
    assert pairs.sum(0).tolist() == [26, 27, 27, 26]
    meant = [sum([op.kind for op in block] == ["F", "B", "W"] for block in row) for row in schedule.order()]
    assert meant == [27, 27, 27, 27]
    forward, backward = np.moveaxis(schedule.table[pairs][:, :2], 1, 0)
    assert (forward[:, 1] != backward[:, 1]).all()  # one of each stream


@pytest.mark.parametrize(("name", "copies"), [("1f1b", 1), ("zb-v", 1), ("dualpipe-v", 1), ("dualpipe", 2)])
def test_parameters_held(name, copies):
    schedule = make(name, 4, 8)
    assert schedule.copies == copies
    assert sorted(set(schedule.parts.flat)) == list(range(schedule.num_parts))


def test_steps_without_a_meeting_point():
    """What a run of steps pays is the span bubble: none with ZB-H2, all of it with 1F1B."""
    work = 3 * 8
    for name, per_step in (("zb-h2", work), ("zb-v", work), ("zb-h1", work + 3), ("1f1b", work + 9)):
        times = [make(name, 4, 8).repeated(steps).simulate() for steps in (2, 4)]
        assert times[1].free.makespan - times[0].free.makespan == pytest.approx(2 * per_step)
        assert times[1].lockstep.makespan == pytest.approx(times[1].free.makespan)
    assert make("1f1b", 4, 8).repeated(4).peak_activations.max() == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("zb-h3", 4, 8), "schedule `zb-h3`.*did you mean `zb-h2` or `zb-h1`"),
        (lambda: make("gpipe", 0, 8), "schedule `gpipe`: asked to run with 0 stages.*at least 1"),
        (lambda: make("gpipe", 2.0, 8), "asked to run with 2.0 stages, but it takes a whole number"),
        (lambda: make("zb-v", 4, "8"), "asked to run with '8' microbatches"),
        (lambda: make("interleaved-1f1b", 4, 8, chunks=2.5), "asked to run with 2.5 chunks"),
        (lambda: make("1f1b", 10**6, 1), "lay out 1 microbatches on 1000000 stages"),
        (lambda: make("interleaved-1f1b", 2, 4, chunks=10**9), "up to 1,000,000"),
        (lambda: make("zb-h2", 4, 8, limit=2.5), "hold 2.5 microbatches' activations"),
        (lambda: make("1f1b", 2, 0), "0 microbatches"),
        (lambda: make("dualpipe", 5, 8), "take 4 or 6 stages, or `dualpipe-v`"),
        (lambda: make("1f1b", 2, 4, chunks=2), "`1f1b`: asked to set `chunks`, but it has no options"),
        (lambda: make("zb-h2", 2, 4, chunks=2), "its options are `limit`"),
        (lambda: make("zb-h2", 2, 4, limit=0), "give a limit of 1 to 3"),
        (lambda: make("interleaved-1f1b", 2, 4, chunks=0), "0 chunks"),
    ],
)
def test_what_cannot_be_made_says_why(call, message):
    with pytest.raises(MeshparError, match=message):
        call()


def test_schedules_are_values():
    one, same, other = (schedules.zb_h1(4, m) for m in (8, 8, 9))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert Schedule.from_order("zb-h1", one.order()) == one
    with pytest.raises(ValueError, match="read-only"):
        one.table[0, 0, 0, 0] = 3
    assert repr(one) == "Schedule('zb-h1', stages=4, microbatches=8, ticks=27)"
    assert one.cell(0, 0) == (StageOp("F", 0, 0),)
    assert one.cell(0, 1) == ()


def test_schedules_need_no_jax():
    code = (
        "import sys, meshpar.pipeline as p\n"
        "s = p.make('zb-v', 2, 4); s.simulate(); s.slots(); str(s); s.to_json(); s.repeated(2)\n"
        "print([name for name in ('jax', 'flax', 'rich', 'matplotlib') if name in sys.modules])"
    )
    root = Path(schedules.__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "stages"), [("dualpipe", 4), ("dualpipe-v", 2)])
def test_an_overlapped_pair_and_its_weight_gradients_share_a_tick(name, stages):
    table = make(name, stages, 16)
    has = table.table[..., 0] >= 0
    whole = has.all(-1)
    assert whole.sum() >= 0.8 * (has[..., 0] & has[..., 1]).sum()
    own = np.all(table.table[..., 1, :] == table.table[..., 2, :], -1)
    assert own[whole].all()
