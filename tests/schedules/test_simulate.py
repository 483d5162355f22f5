"""Simulation of schedules, with equal and unequal costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshpar.schedules import SCHEDULES, make
from tests.errors import raises


def costs(seed: int) -> tuple[float, float, float]:
    """Return random costs with W ≤ F ≤ B, as in a layer dominated by matmuls."""
    w, f, b = np.sort(np.random.default_rng(seed).uniform(0.5, 1.5, 3))
    return f, b, w


# Published span bubbles.
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
def test_span_bubble_is_at_most_the_formula(name, p, m):
    schedule = make(name, p, m)
    for seed in range(8):
        f, b, w = costs(seed)
        pair = f + b + w - 0.4 * f * (seed % 2)  # No overlap, or 40 % of F.
        span = schedule.simulate(f=f, b=b, w=w, pair=pair).free.span_bubble.max()
        bound = CLOSED[name](p, f, b, w, pair)
        assert span <= bound + 1e-9, (seed, span, bound)
        if not name.startswith("dualpipe") and (name != "eager-1f1b" or pair == f + b + w):
            assert span == pytest.approx(bound)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (2, 5)])
def test_each_overlapped_pair_saves_time(name, stages, microbatches):
    """Also a pair whose F and B are in consecutive ticks."""
    schedule, f, b, w, pair = make(name, stages, microbatches), 1.0, 1.3, 0.7, 2.4
    num_pairs = [sum({"F", "B"} <= {op.kind for op in block} for block in row) for row in schedule.order()]
    saved = np.array(num_pairs) * (f + b + w - pair) * schedule.stages / schedule.num_parts
    times = schedule.simulate(f=f, b=b, w=w, pair=pair)
    np.testing.assert_allclose(times.free.busy, microbatches * (f + b + w) - saved)


def test_faster_pair_shortens_the_step():
    schedule = make("dualpipe", 4, 16)
    plain, hiding = schedule.simulate(), schedule.simulate(pair=2.0)
    assert hiding.free.makespan < plain.free.makespan - 8
    assert hiding.lockstep.makespan < plain.lockstep.makespan - 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_per_stage_bound_the_makespan(name):
    """With costs per stage, the makespan is between the work of the slowest stage and the uniform maximum."""
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(0)
    for _ in range(5):
        f, b, w = rng.uniform(0.5, 1.5, (3, 4))
        times, slowest = schedule.simulate(f=f, b=b, w=w), schedule.simulate(f=f.max(), b=b.max(), w=w.max())
        assert times.free.makespan <= slowest.free.makespan + 1e-9
        assert times.lockstep.makespan <= slowest.lockstep.makespan + 1e-9
        np.testing.assert_allclose(times.free.busy, 8 * (f + b + w))
        assert times.free.makespan >= times.free.busy.max()


@pytest.mark.parametrize("name", SCHEDULES)
def test_lockstep_is_never_faster(name):
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(1)
    for _ in range(5):
        f, b, w = rng.uniform(0.5, 1.5, 3)
        times = schedule.simulate(f=f, b=b, w=w, comm=rng.uniform(0, 0.3))
        assert times.lockstep.makespan >= times.free.makespan - 1e-9
    unit = schedule.simulate()
    assert unit.lockstep.makespan == pytest.approx(unit.free.makespan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline_respects_dependencies(name):
    """Each op starts after its inputs, including message latency, which depends on the stage that receives."""
    schedule = make(name, 4, 8)
    f, b, w, comm = 1.0, 1.3, 0.6, [0.1, 0.4, 0.25, 0.3]
    simulation = schedule.simulate(f=f, b=b, w=w, comm=comm)
    for line in (simulation.free, simulation.lockstep):
        done = {}
        for tick in range(schedule.ticks):
            for stage in range(schedule.stages):
                for op in schedule.cell(tick, stage):
                    times = line.start[tick, stage, op.number], line.end[tick, stage, op.number]
                    done[op.kind, op.microbatch, int(schedule.parts[stage, op.chunk])] = (*times, stage)
        for (kind, i, part), (start, _, stage) in done.items():
            for needed in {"F": [("F", i, part - 1)], "B": [("F", i, part), ("B", i, part + 1)], "W": []}[kind]:
                if needed in done:
                    wait = comm[stage] if done[needed][2] != stage else 0.0
                    assert start >= done[needed][1] + wait - 1e-9
        for stage in range(schedule.stages):
            spans = sorted({(s, e) for s, e, s_stage in done.values() if s_stage == stage})
            assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))


def test_messages_on_the_critical_path_add_latency():
    """In 1F1B, each hop of the first microbatch, down and back up, adds a message."""
    schedule = make("1f1b", 4, 1)
    assert schedule.simulate(comm=0.5).free.makespan == pytest.approx(3 * 4 + 6 * 0.5)
    # In lockstep, each tick with a message adds latency.
    assert schedule.simulate(comm=0.5).lockstep.makespan == pytest.approx(3 * 4 + 6 * 0.5)


@pytest.mark.parametrize(
    "costs",
    [
        {"f": -1}, {"b": [1, 2]}, {"w": float("nan")}, {"comm": [[1.0]]}, {"pair": -2.0}, {"f": "1"}, {"b": 1j},
        {"w": 1e308}, {"comm": True},
    ],
)  # fmt: skip
def test_simulate_rejects_invalid_costs(costs):
    with raises("out-of-range", f"`{next(iter(costs))}` of schedule `zb-h1`"):
        make("zb-h1", 4, 8).simulate(**costs)


def test_zero_costs_have_no_bubble():
    times = make("zb-h1", 4, 8).simulate(f=0, b=0, w=0)
    assert (times.free.bubble_fraction, times.free.span_bubble_fraction) == (0, 0)


def test_plot_shows_each_op_at_its_time():
    """The plot has a box per op, from its start to its end."""
    from meshpar import plots

    plotted = [make("zb-h1", 4, 8), make("dualpipe", 4, 8)]
    figure = plots.schedule(*plotted, f=2.0, b=1.0, w=1.0)
    assert len(figure.axes) == 2
    for axes, schedule in zip(figure.axes, plotted, strict=True):
        line = schedule.simulate(f=2.0).free
        extents = [box.get_paths()[0].get_extents() for box in axes.collections]
        assert len(extents) == 3 * 4 * 8
        assert max(box.x1 for box in extents) == pytest.approx(line.makespan)
        boxes = sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in extents)
        expected = sorted(
            (stage, line.start[tick, stage, kind], line.end[tick, stage, kind])
            for tick, stage, kind in np.argwhere(schedule.table[..., 0] >= 0).tolist()
        )
        np.testing.assert_allclose(boxes, expected)
        assert axes.get_title(loc="left").startswith(f"{schedule.name}   makespan {line.makespan:.4g}")
