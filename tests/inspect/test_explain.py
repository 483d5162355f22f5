"""explain: reports agree with the compiled program, and invalid arguments are refused before compilation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect import explain as explain_module
from meshpar.inspect import target
from meshpar.inspect.census import census
from meshpar.inspect.program import compile_here
from meshpar.models import llama3_8b, next_token_loss
from meshpar.parallel.execution import Execution
from tests.errors import raises
from tests.inspect.saved import Compiled


@pytest.fixture
def report(compiled, monkeypatch):
    """Return a function (name, target, cluster) -> report, plant, program that reuses compiled programs."""

    def explained(name, target="cpu", cluster=None, **options):
        plant, program = compiled(name, target, **options)
        monkeypatch.setattr(explain_module, "compile_here", lambda traced: program)
        pod = None if target == "cpu" else Compiled(program)
        return mp.explain(plant.step, plant.state, plant.batch, cluster, pod=pod), plant, program

    return explained


def test_notes_mention_missing_autotuning(report):
    for_pod, _, _ = report("fsdp_tensor", "pod", "h100:1x8")
    assert any("without autotuning" in note for note in for_pod.notes)
    local, _, _ = report("fsdp_tensor")
    assert not any("autotuning" in note for note in local.notes)


def test_explain_compiles_for_the_local_devices():
    mesh = mp.MeshSpec(fsdp=8).build()
    model = mp.from_functions(
        lambda key: {"w": jax.random.normal(key, (64, 64))}, lambda p, x: x @ p["w"], names={"w": ("embed", None)}
    )
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(), key=0)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    batch = {"x": np.ones((16, 64), np.float32)}
    report = mp.explain(step, state, batch)
    assert (report.devices, report.target, report.strategy) == (8, "cpu", "fsdp()")
    assert report.is_as_expected
    assert {(line.role, line.kind) for line in report.matching.matched} == {
        ("weights before use", "all-gather"),
        ("gradients", "reduce-scatter"),
    }
    assert report.compute.model_flops_per_device == 3 * 2 * 16 * 64 * 64 / 8
    assert report.compile_s > 0
    assert any("reduce-scatter" in note for note in report.notes)
    state, metrics = step(state, batch)  # the state and the step are unchanged
    assert np.isfinite(metrics["loss"])


@pytest.mark.matrix
def test_cpu_reports_have_no_times(report):
    found, _, _ = report("hsdp")
    assert found.overlap.hidden_fraction is None
    assert "cluster" in found.overlap.reason
    assert found.compute.predicted_step_s is None
    assert found.compute.bound is None
    assert {one.hidden_fraction for one in found.collectives} == {None}
    assert {one.crosses_node for one in found.collectives} == {None}


@pytest.mark.matrix
def test_axes_across_nodes_make_the_step_longer(report):
    (inside, _, _), (across, _, _) = (report("fsdp_tensor", "pod", cluster) for cluster in ("h100:1x8", "h100:2x4"))
    for found, crossing in ((inside, False), (across, True)):
        crosses = {one.collective.axes_label: one.crosses_node for one in found.collectives}
        assert crosses == {"fsdp": crossing, "tensor": False, "fsdp*tensor": crossing}
    assert across.compute.predicted_step_s > inside.compute.predicted_step_s
    for one in (inside, across):
        assert 0 <= one.overlap.hidden_fraction <= 1
        assert one.compute.bound


@pytest.mark.pod
@pytest.mark.matrix
def test_steps_that_do_not_fit_have_remedies(planted, pod):
    plant = planted.reference("ddp")
    gpu = dataclasses.replace(parse_cluster("h100:1x8").gpu, memory_bytes=0.05e9)
    cluster = dataclasses.replace(parse_cluster("h100:1x8"), gpu=gpu)
    found = mp.explain(plant.step, plant.state, plant.batch, cluster, pod=pod)
    assert found.memory.fits is False
    remedies = found.memory.remedies
    assert remedies
    assert all(one.peak_bytes is not None or one.reason for one in remedies)
    assert {one.peak_bytes for one in remedies} != {found.memory.peak_bytes}
    unadvised = mp.explain(plant.step, plant.state, plant.batch, cluster, pod=pod, advise=False)
    assert unadvised.memory.remedies == ()


def test_missing_aot_extra_is_an_error(planted, monkeypatch):
    monkeypatch.setattr(target, "missing_aot", lambda: "jax-cuda12-plugin is not installed")
    plant = planted.reference("zero3")
    with pytest.raises(mp.MeshparError, match="aot"):
        mp.explain(plant.step, plant.state, plant.batch, "h100:1x8")


def test_explain_refuses_invalid_arguments(planted, monkeypatch):
    monkeypatch.setattr(explain_module, "require_aot", lambda cluster: None)
    plant = planted.reference("zero3")
    odd = {name: np.zeros((9, 64), np.int32) for name in plant.batch}
    for code, where, args in (
        ("conflict", "h100:8x8", (plant.step, plant.state, plant.batch, "h100:8x8")),  # of another size than the mesh
        ("conflict", "explain", (plant.step, plant.state, plant.batch)),  # an abstract mesh without a cluster
        ("wrong-type", "explain", (lambda state, batch: state, plant.state, plant.batch)),
        ("wrong-type", "explain", (mp.eval_step(next_token_loss), plant.state, plant.batch)),
        ("wrong-type", "explain", (plant.step, {}, plant.batch)),
        ("indivisible", "batch leaf", (plant.step, plant.on_cpu.state, odd)),
    ):
        with raises(code, where):
            mp.explain(*args)


@pytest.mark.pod
@pytest.mark.matrix
def test_llama_8b_on_64_gpus_has_the_expected_collectives(pod):
    mesh = mp.MeshSpec(fsdp=64).abstract()
    model = llama3_8b(attention="xla")
    state = mp.abstract_state(model.build(), optax.adamw(1e-4), mesh=mesh, strategy=mp.fsdp())
    batch = {name: jax.ShapeDtypeStruct((64, 4096), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="full")
    found = mp.explain(step, state, batch, "h100:8x8", pod=pod)
    assert found.is_as_expected
    assert not found.matching.missing
    num_params, table = state.num_params, model.vocab_size * model.embed_dim
    sent = {kind: total.bytes_sent_per_device for kind, total in found.totals["fsdp"].items()}
    # The embedding is not gathered: its rows are exchanged, forward and backward.
    assert sent["reduce-scatter"] == pytest.approx(63 / 64 * 4 * (num_params - table), rel=0.01)
    # Twice for the layers, once for the head. Rematerialized layers may gather again.
    minimum = 63 / 64 * 2 * (2 * (num_params - 2 * table) + table)
    assert 0.99 * minimum <= sent["all-gather"] <= 1.5 * minimum
    assert found.memory.state_bytes == pytest.approx(12 * num_params / 64, rel=0.001)


def test_report_of_a_single_device():
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    model = mp.from_functions(lambda key: {"w": jax.random.normal(key, (8, 8))}, lambda p, x: x @ p["w"])
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp())
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    found = mp.explain(step, state, {"x": np.ones((4, 8), np.float32)})
    assert found.collectives == ()
    assert found.totals == {}
    assert found.is_as_expected


def test_explain_reads_the_program_that_training_compiles(planted):
    plant = planted.nothing().on_cpu
    found = mp.explain(plant.step, plant.state, plant.batch)
    program = compile_here(plant.step.lower(plant.state, plant.batch))
    counted = census(program.module, plant.mesh)
    assert [one.collective.kind for one in found.collectives] == [one.kind for one in counted]


@pytest.mark.parametrize(
    ("strategy", "accumulate", "metrics", "note"),
    [
        (mp.fsdp(), 4, ["moe/aux_loss"], "means over 4 micro-steps"),
        (mp.pipeline_parallel(stages=2, microbatches=8), 1, ["moe/aux_loss"], "means over 8 microbatches"),
        (mp.fsdp(), 1, ["moe/aux_loss"], None),
        (mp.fsdp(), 4, ["accuracy"], None),
    ],
)
def test_note_on_router_losses_of_parts(strategy, accumulate, metrics, note):
    execution = Execution(sizes={}, micro_steps=accumulate, pipeline=strategy.pipeline)
    notes = list(explain_module._router_losses_note(execution, dict.fromkeys(metrics)))
    assert [note in text for text in notes] == [True] * (note is not None)
