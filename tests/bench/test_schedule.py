"""`meshpar bench schedule`: what sleeps how often, what the report holds; no time is asserted."""

from __future__ import annotations

import json
import math
import os

import jax
import numpy as np
import pytest

from meshpar import bench, cli
from meshpar.bench import pipeline
from meshpar.bench.pipeline import Row, Schedules, Sleeper
from meshpar.pipeline import SCHEDULES, make, split_vjp
from meshpar.types import MeshparError

P, M = 2, 4


# A stage that sleeps -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    return Sleeper(0.0)


def on_rank(sleeper, rank):
    """A stage function as it is on one device, outside of a pipeline."""
    stage = sleeper.stage(1.0)
    mesh = pipeline._mesh(rank + 1)

    def run(w, x):
        mapped = jax.shard_map(
            lambda w, x: stage(w, x, None),
            mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False,
        )  # fmt: skip
        return mapped(w, x)

    return run


def test_a_stage_sleeps_once_in_f_in_b_and_in_w(sleeper):
    w, x = np.arange(1, 5, dtype=np.float32), np.full((1, 4), 2, np.float32)
    y, vjp = jax.vjp(on_rank(sleeper, 0), w, x)
    np.testing.assert_array_equal(y, w * x)
    assert sleeper.naps == {(0, "F"): 1}
    dw, dx = vjp(np.ones_like(x))
    jax.block_until_ready((dw, dx))
    np.testing.assert_array_equal(dx, w[None])
    np.testing.assert_array_equal(dw, x[0])
    assert sleeper.naps == {(0, op): 1 for op in "FBW"}


def test_a_split_backward_has_bs_sleep_in_b_and_ws_in_w(sleeper):
    w, x = np.ones(4, np.float32), np.ones((1, 4), np.float32)
    found = {}

    def ops(w, x):
        split = split_vjp(lambda w, x: sleeper.stage(1.0)(w, x, None), w, x)
        shared = split.shared(w)
        y, stash = split.forward(w, x)
        dx, backlog = split.backward(shared, stash, y)
        for op, run in (
            ("F", lambda: split.forward(w, x)),
            ("B", lambda: split.backward(shared, stash, y)),
            ("W", lambda: split.weights(shared, stash, backlog)),
        ):
            found[op] = str(jax.make_jaxpr(run)()).count("pure_callback[")
        return dx, split.weights(shared, stash, backlog)

    mesh = pipeline._mesh(1)
    mapped = jax.shard_map(ops, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    jax.block_until_ready(jax.jit(mapped)(w, x))
    assert found == {"F": 1, "B": 1, "W": 1}
    assert sleeper.naps == {(0, op): 1 for op in "FBW"}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_stage_sleeps_for_its_own_ops(sleeper, name):
    schedule = make(name, P, M)
    pipeline.pipeline_program(schedule, sleeper.stage(1.0))()
    ops = (schedule.table[..., 0] >= 0).sum(0)  # [stage, op]
    assert sleeper.naps == {(stage, op): ops[stage, at] for stage in range(P) for at, op in enumerate("FBW")}
    assert sum(sleeper.naps.values()) == 3 * M * schedule.num_parts


def test_steps_that_do_not_meet_each_run_whole(sleeper):
    pipeline.pipeline_program(make("zb-h2", P, M), sleeper.stage(1.0), 3)()
    assert sleeper.naps == {(stage, op): 3 * M for stage in range(P) for op in "FBW"}


def test_a_chunk_sleeps_its_share(sleeper, monkeypatch):
    slept = []
    monkeypatch.setattr(pipeline.time, "sleep", slept.append)
    sleeper.op_s = 1.0
    schedule = make("zb-v", P, M)
    assert pipeline._share(schedule) == 0.5
    pipeline.pipeline_program(schedule, sleeper.stage(pipeline._share(schedule)))()
    assert slept == [0.5] * (3 * M * 2 * P)


def test_the_scan_by_hand_gives_what_the_executor_gives():
    def stage(w, x, micro):
        return w * x

    result, grads = pipeline.pipeline_program(make("gpipe", P, M), stage)()
    loss, by_hand = pipeline.scan_program(P, M, stage)()
    assert abs(float(by_hand[0, 0])) > 1e-3
    np.testing.assert_allclose(loss, result.loss, rtol=1e-5, atol=1e-7)  # float32, another order of sums
    np.testing.assert_allclose(by_hand, grads.parts, rtol=1e-5, atol=1e-7)


# The report ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    return bench.schedules(names=("1f1b", "zb-v", "zb-h1"), cases=((P, M),), op_s=0.001, repeats=1)


def test_a_row_for_each_schedule(measured):
    assert [(row.schedule, row.stages, row.microbatches) for row in measured.rows] == [
        (name, P, M) for name in ("1f1b", "zb-v", "zb-h1")
    ]
    for row in measured.rows:
        schedule = make(row.schedule, P, M)
        assert row.ticks == schedule.ticks
        assert row.naps == dict.fromkeys("FBW", M * schedule.num_parts)
        assert row.free_s == pytest.approx(schedule.simulate().free.makespan * 0.001)
        assert row.busy_s == pytest.approx(3 * M * 0.001)
        assert 0 < row.low_s <= row.time_s <= row.high_s
        assert row.ratio >= 1  # sleeps are never shorter than asked, however busy the machine
        assert row.bubble_in_theory == pytest.approx(schedule.bubble_fraction)


def test_its_measures(measured):
    names = [measure.name for measure in measured.measures]
    for wanted in ("zb-v ÷ zb-h1", "zb-h2, 4 steps", "1f1b, 4 steps", "autodiff", "sleeping op", "the worst",
                   "empty stages, zb-v", "compile time of 1f1b"):  # fmt: skip
        assert sum(wanted in name for name in names) == 1, wanted
    assert all(measure.value > 0 and math.isfinite(measure.value) for measure in measured.measures)


def test_it_prints_and_is_plain_data(measured, capsys):
    cli.print_report(measured, as_json=False)
    text = capsys.readouterr().out
    for wanted in ("zb-v", "in theory", "load of the machine"):
        assert wanted in text
    document = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    assert [row["schedule"] for row in document["rows"]] == ["1f1b", "zb-v", "zb-h1"]
    assert document["repeats"] == 1


def row(name, time_s, free_s=1.0):
    return Row(
        schedule=name, stages=4, microbatches=8, ticks=33, time_s=time_s, low_s=time_s, high_s=time_s, free_s=free_s,
        lockstep_s=free_s, busy_s=0.75, naps={},
    )  # fmt: skip


def test_a_row_knows_its_bubble():
    found = row("1f1b", 1.5)
    assert (found.ratio, found.bubble_fraction, found.bubble_in_theory) == (1.5, 0.5, 0.25)
    assert row("1f1b", 1.5, free_s=0.0).to_json()["ratio"] is None


def test_an_order_that_is_not_the_theorys_is_told():
    rows = [row("zb-v", 2.0), row("zb-h1", 1.0), row("interleaved-1f1b", 3.0), row("1f1b", 4.0), row("gpipe", 4.1)]
    found = list(pipeline._orders(list(SCHEDULES), rows))
    assert [measure.holds for measure in found] == [False, True, True, True]
    assert [measure.value for measure in found] == pytest.approx([2.0, 1 / 3, 0.75, 1.025])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ((16, 16),)}, "--devices 16"),
        ({"names": ("zb-h3",)}, "zb-h1"),
        ({"op_s": -1.0}, "--sleep-ms 20"),
        ({"repeats": 0}, "--repeats 3"),
    ],
)
def test_what_cannot_be_measured_is_said_first(options, message):
    with pytest.raises(MeshparError, match=message):
        bench.schedules(**options)


def test_the_command_hands_its_options_on(monkeypatch, capsys):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    found = {}

    def measure(**options):
        found.update(options)
        return Schedules(op_s=options["op_s"], repeats=2, load=(0.0, 0.0), rows=(row("1f1b", 1.0),), measures=())

    monkeypatch.setattr(pipeline, "schedules", measure)
    options = ["--sleep-ms", "5", "--repeats", "2", "--schedule", "1f1b", "--devices", "4", "--json"]
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "schedule", *options])
    assert not end.value.code
    assert (found["op_s"], found["repeats"], found["names"], found["cases"]) == (0.005, 2, ("1f1b",), [(4, 8), (4, 16)])
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == 1.0
