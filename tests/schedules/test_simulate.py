"""Schedules on the clock: with unequal costs, too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshpar.schedules import SCHEDULES, Schedule, make
from meshpar.sharding.types import MeshparError


def costs(seed: int) -> tuple[float, float, float]:
    """Random costs with W ≤ F ≤ B, as those of a matmul-bound layer are."""
    w, f, b = np.sort(np.random.default_rng(seed).uniform(0.5, 1.5, 3))
    return f, b, w


# Span bubbles, as the literature prints them.
CLOSED = {
    "gpipe": lambda p, f, b, w, pair: (p - 1) * (f + b + w),
    "1f1b": lambda p, f, b, w, pair: (p - 1) * (f + b + w),
    "interleaved-1f1b": lambda p, f, b, w, pair: (p - 1) * (f + b + w) / 2,
    "eager-1f1b": lambda p, f, b, w, pair: (p - 1) * (f + b + w),
    "zb-h1": lambda p, f, b, w, pair: (p - 1) * (f + b - w),
    "zb-h2": lambda p, f, b, w, pair: (p - 1) * (f + b - 2 * w),
    "dualpipe": lambda p, f, b, w, pair: (p / 2 - 1) * (pair + (b + w) - 3 * w),
    "dualpipe-v": lambda p, f, b, w, pair: (p - 1) * (pair + (b + w) - 3 * w) / 2,
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (6, 12), (8, 24)])
def test_no_worse_than_the_closed_form_for_any_costs(name, p, m):
    schedule = make(name, p, m)
    for seed in range(8):
        f, b, w = costs(seed)
        pair = f + b + w - 0.4 * f * (seed % 2)  # nothing hidden, or a part of F
        span = schedule.simulate(f=f, b=b, w=w, pair=pair).free.span_bubble.max()
        bound = CLOSED[name](p, f, b, w, pair)
        assert span <= bound + 1e-9, (seed, span, bound)
        if not name.startswith("dualpipe") and (name != "eager-1f1b" or pair == f + b + w):
            assert span == pytest.approx(bound)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_two_streams_attain_their_closed_form_when_f_is_b(name, p):
    for w in (0.4, 0.7, 1.0):
        span = make(name, p, 2 * p).simulate(w=w).free.span_bubble.max()
        assert span == pytest.approx(CLOSED[name](p, 1, 1, w, 2 + w))


def test_what_a_pair_hides_is_gained():
    schedule = make("dualpipe", 4, 16)
    plain, hiding = schedule.simulate(), schedule.simulate(pair=2.0)
    assert hiding.free.makespan < plain.free.makespan - 8
    assert hiding.lockstep.makespan < plain.lockstep.makespan - 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_faster_no_step_slower(name):
    """Costs of its own for each stage: never worse than all at the dearest, never better than the dearest's work."""
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(0)
    for _ in range(5):
        f, b, w = rng.uniform(0.5, 1.5, (3, 4))
        own, dearest = schedule.simulate(f=f, b=b, w=w), schedule.simulate(f=f.max(), b=b.max(), w=w.max())
        assert own.free.makespan <= dearest.free.makespan + 1e-9
        assert own.lockstep.makespan <= dearest.lockstep.makespan + 1e-9
        np.testing.assert_allclose(own.free.busy, 8 * (f + b + w))
        assert own.free.makespan >= own.free.busy.max()


@pytest.mark.parametrize("name", SCHEDULES)
def test_lockstep_never_gains(name):
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(1)
    for _ in range(5):
        f, b, w = rng.uniform(0.5, 1.5, 3)
        one = schedule.simulate(f=f, b=b, w=w, comm=rng.uniform(0, 0.3))
        assert one.lockstep.makespan >= one.free.makespan - 1e-9
    unit = schedule.simulate()
    assert unit.lockstep.makespan == pytest.approx(unit.free.makespan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_timeline_respects_every_dependency(name):
    """Checked op by op, against what the words say, with messages that take time."""
    schedule = make(name, 4, 8)
    f, b, w, comm = 1.0, 1.3, 0.6, 0.25
    times = schedule.simulate(f=f, b=b, w=w, comm=comm)
    for line, exact in ((times.free, True), (times.lockstep, False)):
        done = {}
        for tick in range(schedule.ticks):
            for stage in range(schedule.stages):
                for op in schedule.cell(tick, stage):
                    at = line.start[tick, stage, op.number], line.end[tick, stage, op.number]
                    done[op.kind, op.microbatch, int(schedule.parts[stage, op.chunk])] = (*at, stage)
        for (kind, i, part), (start, _, stage) in done.items():
            for needed in {"F": [("F", i, part - 1)], "B": [("F", i, part), ("B", i, part + 1)], "W": []}[kind]:
                if needed in done:
                    wait = comm if done[needed][2] != stage else 0.0
                    assert start >= done[needed][1] + (wait if exact else 0.0) - 1e-9
        for stage in range(schedule.stages):
            spans = sorted({(s, e) for s, e, at in done.values() if at == stage})
            assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))


def test_messages_on_the_critical_path_are_paid():
    """1F1B: a message for each hop of the first microbatch down and back up."""
    schedule = make("1f1b", 4, 1)
    assert schedule.simulate(comm=0.5).free.makespan == pytest.approx(3 * 4 + 6 * 0.5)
    # In lockstep each tick at whose end something leaves.
    assert schedule.simulate(comm=0.5).lockstep.makespan == pytest.approx(3 * 4 + 6 * 0.5)


def test_a_fused_backward_would_cost_lockstep_a_third():
    """Why tables hold B and W apart: with a whole backward in one cell, a tick takes as long as that."""
    table = []
    split = make("1f1b", 4, 8)
    fused = Schedule.from_table(table or list(as_fused(split)), name="fused")
    assert fused.simulate().free.makespan == split.simulate().free.makespan == 33
    assert fused.simulate().lockstep.makespan > 1.2 * split.simulate().lockstep.makespan


def as_fused(schedule: Schedule):
    """The same order, each block in one cell, each in the earliest tick that it can have."""
    done, free, at = {}, [0] * schedule.stages, [0] * schedule.stages
    rows, cells = schedule.order(), {}
    while any(here < len(row) for here, row in zip(at, rows, strict=True)):
        for stage, row in enumerate(rows):
            if at[stage] == len(row):
                continue
            op = row[at[stage]][0]
            needed = ("F", op.microbatch, stage - 1) if op.kind == "F" else ("B", op.microbatch, stage + 1)
            if 0 <= needed[2] < schedule.stages and needed not in done:
                continue
            tick = max(free[stage], done.get(needed, -1) + 1)
            cells[tick, stage] = [tuple(each) for each in row[at[stage]]]
            done[op.kind, op.microbatch, stage] = tick
            free[stage], at[stage] = tick + 1, at[stage] + 1
    for tick in range(max(tick for tick, _ in cells) + 1):
        yield [cells.get((tick, stage)) for stage in range(schedule.stages)]


@pytest.mark.parametrize(
    "given",
    [
        {"f": -1}, {"b": [1, 2]}, {"w": float("nan")}, {"comm": [[1.0]]}, {"pair": -2.0}, {"f": "1"}, {"b": 1j},
        {"w": 1e308}, {"comm": True},
    ],
)  # fmt: skip
def test_costs_that_cannot_be(given):
    with pytest.raises(MeshparError, match=f"`{next(iter(given))}` of schedule `zb-h1`: asked to simulate with costs"):
        make("zb-h1", 4, 8).simulate(**given)


def test_a_step_that_takes_no_time_has_no_bubble():
    times = make("zb-h1", 4, 8).simulate(f=0, b=0, w=0)
    assert (times.free.bubble_fraction, times.free.span_bubble_fraction) == (0, 0)


def test_the_picture_shows_every_op_where_it_is():
    """A box for each op, as long as it takes, numbered by its microbatch."""
    from meshpar.cli import plots

    shown = [make("zb-h1", 4, 8), make("dualpipe", 4, 8)]
    figure = plots.schedule(*shown, f=2.0, b=1.0, w=1.0)
    assert len(figure.axes) == 2
    for axes, schedule in zip(figure.axes, shown, strict=True):
        line = schedule.simulate(f=2.0).free
        extents = [box.get_paths()[0].get_extents() for box in axes.collections]
        assert len(extents) == 3 * 4 * 8
        assert max(box.x1 for box in extents) == pytest.approx(line.makespan)
        boxes = sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in extents)
        meant = sorted(
            (stage, line.start[tick, stage, kind], line.end[tick, stage, kind])
            for tick, stage, kind in np.argwhere(schedule.table[..., 0] >= 0).tolist()
        )
        np.testing.assert_allclose(boxes, meant)
        assert axes.get_title(loc="left").startswith(f"{schedule.name}   makespan {line.makespan:.4g}")
