"""`meshpar bench schedule`: what sleeps how often, what the report holds; no time is asserted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os

import jax
import numpy as np
import pytest

from meshpar import bench
from meshpar.bench import pipeline
from meshpar.bench import sleeper as sleepers
from meshpar.bench.pipeline import Row, Schedules
from meshpar.bench.sleeper import Sleeper
from meshpar.commands import cli
from meshpar.pipeline import SCHEDULES, make, split_vjp
from meshpar.sharding.types import MeshparError

P, M = 2, 4


# A stage that sleeps -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "python"])
def sleeper(request):
    made = Sleeper(0.0, native=request.param == "native")
    if request.param == "native" and made.why_python:
        pytest.skip(made.why_python)
    return made


@pytest.fixture
def quick():
    """What the machine at hand has."""
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
    assert sleeper.counts() == {(0, "F"): 1}
    dw, dx = vjp(np.ones_like(x))
    jax.block_until_ready((dw, dx))
    np.testing.assert_array_equal(dx, w[None])
    np.testing.assert_array_equal(dw, x[0])
    assert sleeper.counts() == {(0, op): 1 for op in "FBW"}


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
            text = str(jax.make_jaxpr(run)())
            found[op] = text.count("pure_callback[") + text.count("ffi_call[")
        return dx, split.weights(shared, stash, backlog)

    mesh = pipeline._mesh(1)
    mapped = jax.shard_map(ops, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    jax.block_until_ready(jax.jit(mapped)(w, x))
    assert found == {"F": 1, "B": 1, "W": 1}
    assert sleeper.counts() == {(0, op): 1 for op in "FBW"}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_stage_sleeps_for_its_own_ops(quick, name):
    schedule = make(name, P, M)
    pipeline.pipeline_program(schedule, quick.stage(1.0))()
    ops = (schedule.table[..., 0] >= 0).sum(0)  # [stage, op]
    assert quick.counts() == {(stage, op): ops[stage, at] for stage in range(P) for at, op in enumerate("FBW")}
    assert quick.counts().total() == 3 * M * schedule.num_parts


def test_steps_that_do_not_meet_each_run_whole(quick):
    pipeline.pipeline_program(make("zb-h2", P, M), quick.stage(1.0), 3)()
    assert quick.counts() == {(stage, op): 3 * M for stage in range(P) for op in "FBW"}


def test_a_chunk_sleeps_its_share_one_op_of_a_device_after_another(sleeper):
    schedule = make("zb-v", P, M)
    assert pipeline._share(schedule) == 0.5
    program = pipeline.pipeline_program(schedule, sleeper.stage(pipeline._share(schedule)))
    sleeper.op_s = 0.004  # known only now: programs that are there follow
    program()
    assert [nap.asked_s for nap in sleeper.naps] == [0.002] * (3 * M * 2 * P)
    assert all(nap.end_s - nap.start_s >= nap.asked_s for nap in sleeper.naps)
    for device in range(P):
        own = [nap for nap in sleeper.naps if nap.device == device]
        assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(own))


def test_a_device_sleeps_one_op_after_another(sleeper):
    """Two ops that the host is free to run at once."""
    sleeper.op_s = 0.005
    mesh = pipeline._mesh(2)

    def local(x):
        rank = jax.lax.axis_index("stage").astype(x.dtype)
        return x + sleeper.nap("F", 1.0, rank, x) + sleeper.nap("B", 1.0, rank, 2 * x)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=jax.P("stage"), out_specs=jax.P("stage"), check_vma=False))
    run(np.zeros(2, np.float32)).block_until_ready()
    for device in range(2):
        one, two = (nap for nap in sleeper.naps if nap.device == device)
        assert {one.op, two.op} == {"F", "B"}
        assert one.end_s <= two.start_s


def test_sleepers_keep_apart_and_forget(sleeper):
    other = Sleeper(0.0, native=sleeper.why_python is None)
    w, x = np.ones(4, np.float32), np.ones((1, 4), np.float32)
    for sleeping, times in ((sleeper, 1), (other, 2)):
        for _ in range(times):
            jax.block_until_ready(jax.jit(on_rank(sleeping, 0))(w, x))
    assert (len(sleeper.naps), len(other.naps)) == (1, 2)
    sleeper.forget()
    assert (sleeper.naps, len(other.naps)) == ([], 2)


def test_naps_make_a_timeline(quick):
    schedule = make("zb-v", P, M)
    program = pipeline.pipeline_program(schedule, quick.stage(pipeline._share(schedule)))
    quick.op_s = 0.004
    program()
    found = sleepers.timeline(schedule, quick.naps, unit_s=1e-3)
    wanted = schedule.simulate(f=4.0, b=4.0, w=4.0).free
    np.testing.assert_array_equal(np.isnan(found.start), np.isnan(wanted.start))
    assert np.nanmin(found.start) == 0
    assert (found.busy >= wanted.busy).all()
    assert found.makespan >= wanted.makespan
    # What a stage's first op gives is there before the next stage's begins.
    first = [schedule.done_in[0, 0, part] for part in range(P)]
    assert found.end[first[0], 0, 0] <= found.start[first[1], 1, 0]
    program()
    with pytest.raises(MeshparError, match=r"stage 0.*forget\(\)"):
        sleepers.timeline(schedule, quick.naps)


@pytest.fixture
def fresh(monkeypatch):
    """As a new process finds it: nothing is compiled yet."""
    monkeypatch.setattr(sleepers, "_compiled", sleepers._compiled.__wrapped__)


def test_without_a_compiler_python_sleeps_and_the_report_says_so(fresh, monkeypatch):
    monkeypatch.setattr(sleepers.shutil, "which", lambda name: None)
    sleeper = Sleeper(0.0)
    w, x = np.ones(4, np.float32), np.ones((1, 4), np.float32)
    jax.block_until_ready(on_rank(sleeper, 0)(w, x))
    assert sleeper.counts() == {(0, "F"): 1}
    assert "there is no C++ compiler (c++, g++, clang++)" in pipeline._sleeps(sleeper)
    assert "Python" in pipeline._sleeps(sleeper)


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch, tmp_path):
    if sleepers.shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler to fail")
    broken = tmp_path / "broken.cc"
    broken.write_text("#error no such machine\n")
    monkeypatch.setattr(sleepers, "SOURCE", broken)
    assert "no such machine" in pipeline._sleeps(Sleeper(0.0))


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
        # However busy the machine, no sleep is shorter than asked; but a B's result need not wait for its W.
        apart = dataclasses.replace(schedule, joined=np.zeros_like(schedule.joined))
        assert row.time_s >= apart.simulate().free.makespan * 0.001
        assert row.bubble_in_theory == pytest.approx(schedule.bubble_fraction)


def test_its_measures(measured):
    names = [measure.name for measure in measured.measures]
    for wanted in ("zb-v ÷ zb-h1", "zb-h2, 4 steps without a meeting point",
                   "1f1b, 4 steps without a meeting point", "autodiff", "sleeping op", "the worst",
                   "empty stages, zb-v", "compile time of 1f1b"):  # fmt: skip
        assert sum(wanted in name for name in names) == 1, wanted
    assert all(measure.value > 0 and math.isfinite(measure.value) for measure in measured.measures)


def test_steps_alone_are_measured_alone():
    found = bench.schedules(names=("1f1b",), cases=((P, M),), op_s=0.001, repeats=1, alone=True)
    assert [measure.name for measure in found.measures] == ["measured ÷ simulated, the worst"]
    assert len(found.rows) == 1


def test_it_prints_and_is_plain_data(measured, capsys):
    cli.print_report(measured, as_json=False)
    text = capsys.readouterr().out
    for wanted in ("zb-v", "in theory", "load of the machine", "sleeps: "):
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
        rows = (row("1f1b", 1.0),)
        return Schedules(op_s=options["op_s"], repeats=2, load=(0.0, 0.0), rows=rows, measures=(), sleeps="")

    monkeypatch.setattr(pipeline, "schedules", measure)
    options = ["--sleep-ms", "5", "--repeats", "2", "--schedule", "1f1b", "--devices", "4", "--json"]
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "schedule", *options])
    assert not end.value.code
    assert (found["op_s"], found["repeats"], found["names"], found["cases"]) == (0.005, 2, ("1f1b",), [(4, 8), (4, 16)])
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == 1.0
