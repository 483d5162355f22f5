"""Rounds of latencies: each program is compiled by the schedule before it, the quickest is kept, and it is said."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.cli.train_command import Screen, _Rounds
from meshpar.hardware.clusters import parse_cluster
from meshpar.hardware.compile_options import LATENCIES, PROFILE, profile
from meshpar.inspect import latencies
from meshpar.inspect.latencies import Candidate, in_rounds
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.target import missing_aot
from meshpar.inspect.timeline.simulator import Op, Segment, Timeline
from meshpar.loop.coordination import Pod
from meshpar.models import TransformerConfig, next_token_loss
from tests.loop.test_coordination import Store


def simulation(time_s: float, step_s: float, scheduled_as: str = "") -> Timeline:
    gather = Op(
        name="gather", stream="communication", start_s=2.0, end_s=2.0 + time_s, kind="all-gather", label="fsdp",
        module="", queued_s=1.0, scheduled_as=scheduled_as,
    )  # fmt: skip
    whole = Segment(name="", module="", is_backward=False, trip_count=1, duration_s=step_s, ops=(gather,))
    return Timeline(
        cluster="h100:1x8", peak_flops_per_s=1.0, step_s=step_s, compute_s=0.0, memory_s=0.0, network_s={}, hidden_s={},
        collectives=(), segments=(whole,),
    )  # fmt: skip


def made(number, timeline, peak_bytes=1) -> Candidate:
    program = SimpleNamespace(peak_bytes=peak_bytes, target="h100:1x8")
    return Candidate(what=number, program=program, collectives=(), timeline=timeline)


def costs(options) -> list:
    return re.findall(r'name: "([\w-]+)" cost_us: ([\d.]+)', options.get(PROFILE, b"").decode())


def test_each_round_is_compiled_by_the_mean_of_those_before():
    programs = [simulation(3.0, 9.0), simulation(7.0, 5.0), simulation(1.0, 8.0), simulation(2.0, 6.0)]
    seen = []

    def compiled(options):
        seen.append(costs(options))
        return made(len(seen) - 1, programs[len(seen) - 1])

    best, found = in_rounds(compiled, 3)
    # Twice a time on the wire of 3 s behind a queue of 1 s; then halfway to 7 + 1, and halfway from there to 1 + 1.
    assert seen == [[], *([("gather", f"{time_s}000000.000")] for time_s in (8, 12, 8))]
    assert (best.what, found.kept) == (1, 1)
    assert [one.step_s for one in found.schedules] == [9.0, 5.0, 8.0, 6.0]
    assert "round 1: 5 s a step" in str(found)


@pytest.mark.parametrize(
    ("steps", "peaks", "kept"), [([2, 3], [1, 1], 0), ([2, 2], [1, 1], 0), ([2, 1], [1, 9], 0), ([2, 1], [9, 9], 1)]
)
def test_what_is_slower_or_does_not_fit_is_not_kept(steps, peaks, kept):
    made_of = iter(zip(steps, peaks, strict=True))

    def compiled(options):
        step_s, peak = next(made_of)
        return made(step_s, simulation(1.0, step_s), peak)

    best, found = in_rounds(compiled, 1, limit_bytes=5)
    assert (found.kept, best.what) == (kept, steps[kept])
    assert ("(does not fit)" in str(found)) == (9 in peaks)


def test_a_collective_goes_by_the_name_that_the_scheduler_knows():
    """One that nothing hides is synchronous in the program, and has another name there."""
    assert simulation(1.0, 1.0, "all-gather-start.3").latencies == {"all-gather-start.3": 4.0}


def test_without_a_clock_there_are_no_rounds():
    best, found = in_rounds(lambda options: made(0, None), 2)
    assert (best.what, found.schedules) == (0, ())
    assert "no clock has times for `h100:1x8`" in str(found)


def test_processes_whose_clocks_differ_compile_by_one_text():
    """Planted: each simulates something else, and only process 1, the first of these devices, says what holds."""
    store, seen = Store(), {1: [], 2: []}
    times = {1: [simulation(3.0, 9.0), simulation(7.0, 5.0)], 2: [simulation(30.0, 9.0), simulation(7.0, 11.0)]}

    def process(number):
        pod = Pod(store, process_id=number, num_processes=3)

        def compiled(options):
            seen[number].append(costs(options))
            return made(len(seen[number]) - 1, times[number][len(seen[number]) - 1])

        return in_rounds(compiled, 1, shared=lambda about, mine: pod.of_first(about, mine, first=1))[1].kept

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(process, [1, 2])) == [1, 1]
    assert seen[1] == seen[2] == [[], [("gather", "8000000.000")]]


def test_a_process_that_does_not_speak_is_named():
    pod = Pod(Store(), process_id=1, num_processes=2)
    with pytest.raises(mp.MeshparError, match="process 0 of 2.*latencies"):
        pod.of_first("latencies", "text", timeout_s=0.05)


# ---- A step ----------------------------------------------------------------------------------------------------------


def loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2), {}


def step_and_state(mesh, **options):
    model = mp.from_functions(
        lambda key: {"w": jax.random.normal(key, (8, 4))}, lambda params, x: x @ params["w"],
        names={"w": ("embed", "mlp")},
    )  # fmt: skip
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(min_bytes=0), key=0)
    return mp.train_step(loss, **options), state


@pytest.fixture
def timed(monkeypatch):
    """Host devices with a clock: what is compiled, and the steps that the clock gives by the profile's presence."""
    found = SimpleNamespace(compiled=[], steps=[3.0, 2.0, 3.0, 2.0])
    monkeypatch.setattr("meshpar.training.step.why_no_rounds", lambda mesh: "")
    monkeypatch.setattr(latencies, "cluster_here", lambda devices: parse_cluster("h100:1x8"))

    def clock(what, program, setup, cluster, options, cells):
        time_s = found.steps[min(len(found.compiled), len(found.steps) - 1)]
        found.compiled.append(program)
        times = dataclasses.replace(simulation(1.0, time_s), cluster=cluster.name)
        return Candidate(what=what, program=program, collectives=(), timeline=times)

    monkeypatch.setattr(latencies, "simulated", clock)
    return found


def test_a_step_is_compiled_in_rounds_once_for_each_shape(mesh8, timed):
    """Nothing is compiled again by the call: XLA is asked twice, without a profile and with one."""
    asked = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: asked.append(name))
    plain, state = step_and_state(mesh8)
    batch = {"x": np.ones((8, 8), np.float32)}
    wanted, _ = plain(state, batch)
    step, state = step_and_state(mesh8, latency_rounds=1)
    asked.clear()
    found, _ = step(state, batch)
    assert sum("backend_compile" in name for name in asked) == 2
    np.testing.assert_array_equal(found.params["w"], wanted.params["w"])
    asked.clear()
    found, _ = step(found, batch)
    assert not any("backend_compile" in name for name in asked)
    assert (step.rounds.kept, len(timed.compiled)) == (1, 2)
    step(found, {"x": np.ones((16, 8), np.float32)})
    assert len(timed.compiled) == 4


def test_train_says_once_what_rounds_gave(mesh8, timed):
    step, state = step_and_state(mesh8, latency_rounds=1)
    shown = io.StringIO()
    hook = _Rounds(step, Screen(shown))
    batches = [{"x": np.ones((8, 8), np.float32)}] * 2
    mp.fit(step, state, batches, steps=2, hooks=[hook])
    assert re.fullmatch(r"latency rounds: without latencies: 3 s .*; round 1: 2 s .*, kept\n", shown.getvalue())


def test_a_round_that_is_slower_is_told(mesh8, timed):
    timed.steps = [2.0, 3.0]
    step, state = step_and_state(mesh8, latency_rounds=1)
    with pytest.warns(UserWarning, match="latency_rounds=1 is no gain.*without latencies: 2 s a step.*, kept; round 1"):
        step(state, {"x": np.ones((8, 8), np.float32)})
    assert step.rounds.kept == 0


def test_a_gpu_that_the_clock_does_not_know_is_told(mesh8, timed, monkeypatch):
    monkeypatch.setattr(latencies, "cluster_here", lambda devices: None)
    step, state = step_and_state(mesh8, latency_rounds=1)
    with pytest.warns(UserWarning, match="latency_rounds=1: the clock does not know GPU `cpu`"):
        step(state, {"x": np.ones((8, 8), np.float32)})
    assert timed.compiled == []


def test_jaxs_own_profiles_are_not_mixed_with_these(mesh8, timed):
    step, state = step_and_state(mesh8, latency_rounds=1)
    jax.config.update("jax_enable_pgle", True)
    try:
        with pytest.raises(mp.MeshparError, match=r"jax_enable_pgle is on"):
            step(state, {"x": np.ones((8, 8), np.float32)})
    finally:
        jax.config.update("jax_enable_pgle", False)


def test_on_cpus_nothing_happens_and_explain_says_so(mesh8):
    step, state = step_and_state(mesh8, latency_rounds=1)
    batch = {"x": np.ones((8, 8), np.float32)}
    report = mp.explain(step, state, batch)
    assert "no clock has times for `cpu`" in str(report)
    assert json.loads(json.dumps(report.to_json()))["rounds"]["kept"] == 0
    step(state, batch)
    assert step.rounds is None


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "one"])
def test_rounds_are_a_number(wrong):
    with pytest.raises(mp.MeshparError, match="latency_rounds=.*no whole number"):
        mp.train_step(loss, latency_rounds=wrong)


def test_latencies_come_from_one_place():
    with pytest.raises(mp.MeshparError, match="XLA goes by one of the two"):
        mp.train_step(loss, latency_rounds=1, xla={LATENCIES: "of.pbtxt"})


# ---- Compiled for GPUs -----------------------------------------------------------------------------------------------


@pytest.mark.pod
@pytest.mark.skipif(bool(missing_aot()), reason=f"compiles for GPUs, which needs meshpar[aot]: {missing_aot()}")
def test_the_profile_of_a_round_reaches_xla(tmp_path):
    """As bytes it does what a file of the same text does, and the quicker program is kept."""
    cluster = parse_cluster("h100:1x8")
    config = TransformerConfig(
        vocab_size=2048, num_layers=4, embed_dim=2048, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=8192,
        attention="xla",
    )  # fmt: skip
    mesh = mp.MeshSpec(fsdp=8).abstract(8)
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp(prefetch=1))
    batch = {name: jax.ShapeDtypeStruct((8, 1024), jnp.int32) for name in ("inputs", "targets")}
    options = {"precision": mp.Precision(compute="bfloat16")}
    with PodProcess() as pod:
        step = mp.train_step(next_token_loss, latency_rounds=1, **options)
        report = mp.explain(step, state, batch, cluster, pod=pod)
        before, after = report.rounds.schedules
        # So small a program a round may make slower, by the version of XLA.
        assert before.step_s != after.step_s
        assert report.rounds.kept == (after.step_s < before.step_s)
        assert report.timeline.step_s == min(before.step_s, after.step_s)
        assert ("✔ round 1 is the quickest" in str(report)) == bool(report.rounds.kept)
        plain = mp.explain(mp.train_step(next_token_loss, **options), state, batch, cluster, pod=pod)
        assert plain.timeline.step_s == before.step_s
        assert plain.fingerprint != report.fingerprint
        file = tmp_path / "of.pbtxt"
        file.write_text(profile(plain.timeline.latencies))
        named = mp.train_step(next_token_loss, xla={LATENCIES: str(file)}, **options)
        again = mp.explain(named, state, batch, cluster, pod=pod)
        assert (again.timeline.step_s, again.memory.peak_bytes) == (after.step_s, after.peak_bytes)


@pytest.mark.matrix
def test_two_processes_with_clocks_of_their_own_run_one_program():
    """Over jax's own service: process 1 would go by other latencies, and keep the program without."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    command = [sys.executable, str(Path(__file__).with_name("rounds_of_processes.py"))]
    both = [
        subprocess.Popen([*command, str(number), str(port)], stdout=subprocess.PIPE, text=True, env=env, cwd=root)
        for number in range(2)
    ]
    said = [json.loads(one.communicate(timeout=600)[0].splitlines()[-1]) for one in both]
    assert said[0] == said[1]
    assert said[0]["kept"] == 1
    assert [costs({PROFILE: text.encode()}) for text in said[0]["profiles"]] == [[], [("gather", "2000000.000")]]
