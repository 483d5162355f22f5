"""Overlap and compute as a report shows them: numbers where there is a timeline, a reason where there is none."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from meshpar.hardware.clusters import Link, parse_cluster
from meshpar.inspect import render
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.model_flops import ModelFlops
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline import step_prediction as prediction
from meshpar.inspect.timeline.simulator import timeline
from meshpar.inspect.timeline.step_prediction import bracket

CLUSTER = parse_cluster("h100:1x8")
BOUND_BY_FLOPS = dataclasses.replace(CLUSTER, gpu=dataclasses.replace(CLUSTER.gpu, memory_bytes_per_s=1e18))
"""The saved programs are so small that their bytes would bound every kernel."""
ASKED = ModelFlops(forward=8000, step=24000, notes=("a note of the model",))


@pytest.fixture(params=["0.10", "0.12"])
def scan(saved, programs, request):
    return saved["scan", "cuda", f"jax{request.param}"], programs.MESHES["scan"]


@pytest.fixture
def timed(scan):
    module, mesh = scan
    return timeline(module, census(module, mesh), CLUSTER)


def test_overlap_sums_over_axes(timed):
    found = prediction.overlap(timed)
    assert set(found.per_axis) == {"fsdp", "tensor"}
    sent = timed.network_s
    total = sum(found.per_axis[label] * sent[label] for label in sent)
    assert found.hidden_fraction == pytest.approx(total / sum(sent.values()))
    assert 0 <= found.hidden_fraction <= 1
    assert found.reason == ""


def test_overlap_lists_longest_exposed_first(timed):
    found = prediction.overlap(timed)
    waits = [one.exposed_s for one in found.exposed]
    assert waits == sorted(waits, reverse=True)
    assert len(waits) > 0
    gathers = [one.collective for one in found.exposed if one.collective.kind == "all-gather"]
    assert [one.is_backward for one in gathers] == [False]  # the backward one spans a product


def test_overlap_and_compute_without_timeline(scan):
    module, _ = scan
    reason = prediction.why_not_timed("cpu", None)
    assert "pass a cluster" in reason
    found = prediction.overlap(None, reason)
    assert (found.hidden_fraction, found.per_axis, found.exposed, found.reason) == (None, {}, (), reason)
    computed = prediction.compute(module, num_devices=8, model_flops=ASKED, reason=reason)
    assert computed.predicted_step_s is computed.utilisation is computed.bound is None
    assert computed.compute_s is computed.memory_s is None
    assert (computed.network_s, computed.exposed_s) == ({}, {})
    assert computed.notes == (reason, "a note of the model")
    assert computed.flops_per_device == work.flops_per_step(module)


def test_why_not_timed():
    assert prediction.why_not_timed("h100:1x8", CLUSTER) == ""
    assert "GPU compiler's schedule" in prediction.why_not_timed("cpu", CLUSTER)
    assert "`gpu`" in prediction.why_not_timed("gpu", None)


def test_overlap_without_communication(scan):
    module, _ = scan
    found = prediction.overlap(timeline(module, (), CLUSTER))
    assert (found.hidden_fraction, found.reason) == (None, "no communication")


def test_compute_against_the_model(scan, timed):
    module, _ = scan
    found = prediction.compute(module, num_devices=8, model_flops=ASKED, times=timed)
    assert found.model_flops_per_device == 3000
    assert found.ratio == found.flops_per_device / 3000
    assert found.predicted_step_s == timed.step_s
    assert found.utilisation == pytest.approx(3000 / (timed.step_s * 989.4e12))
    assert found.bound == timed.bound == "network:fsdp"
    assert found.exposed_s == timed.exposed_s
    assert found.notes == ASKED.notes


def test_compute_without_model_flops(scan, timed):
    found = prediction.compute(scan[0], num_devices=8, times=timed)
    assert found.model_flops_per_device is found.ratio is found.utilisation is None
    assert found.predicted_step_s == timed.step_s


def test_overlap_and_compute_to_json(scan, timed):
    found = prediction.compute(scan[0], num_devices=8, model_flops=ASKED, times=timed).to_json()
    assert json.loads(json.dumps(found)) == found
    assert {"flops_per_device", "model_flops_per_device", "predicted_step_s", "bound"} <= found.keys()
    hidden = prediction.overlap(timed).to_json()
    assert json.loads(json.dumps(hidden)) == hidden
    assert hidden["exposed"][0]["time_s"] > 0


def test_bracket_contains_step_and_names_rates(scan):
    """`low` has full overlap and matmuls at the data sheet's peak, `high` has no overlap."""
    timed = timeline(scan[0], census(*scan), BOUND_BY_FLOPS)
    found = prediction.compute(scan[0], num_devices=8, times=timed, cluster=BOUND_BY_FLOPS).bracket
    assert timed.compute_s == pytest.approx(work.flops_per_step(scan[0]) / (0.65 * 989.4e12))
    assert found.low_s == pytest.approx(0.65 * timed.compute_s + timed.memory_s, rel=1e-3)
    assert found.low_s <= timed.step_s <= found.high_s
    kernels_s = timed.compute_s + timed.memory_s + timed.bubble_s
    assert found.high_s == pytest.approx(kernels_s + sum(timed.network_s.values()))
    assert found.sources[0] == (
        "matmuls at an assumed 65% of the data sheet's peak, attention at 629 TFLOP/s forward and 465 backward "
        "(8,192 positions, head size 128, causal), memory at 896000.00 TB/s; "
        "at best, matmuls at h100's data sheet peak"
    )
    assert prediction.compute(scan[0], num_devices=8, times=timed).bracket is None


def test_bracket_low_uses_same_attention_rate():
    """The catalogue has no faster attention rate, so the best case uses the same rate."""
    scores = '"intermediate_tensor_shape": {"dimensions": ["2", "32", "8192", "8192"]}'
    module = hlo.parse(f"""HloModule m, is_scheduled=true, num_partitions=8
ENTRY e {{
  q = bf16[2,8192,32,128] parameter(0)
  ROOT k = (bf16[2,32,8192,128], f32[2,32,8192]) custom-call(q, q, q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={{"cudnn_fmha_backend_config": {{{scores}, "mask_type": "CAUSAL"}}}}
}}
""")  # noqa: E501
    times = timeline(module, (), CLUSTER)
    flops = 2 * 2 * (2 * 32) * 8192**2 * 128 / 2
    assert times.step_s == pytest.approx(flops / CLUSTER.gpu.attention_flops_per_s("cudnn")[0])
    assert bracket(module, times, CLUSTER).low_s == times.step_s


def test_measured_launch_is_in_step_bracket_and_table(scan):
    slow = dataclasses.replace(CLUSTER, launch_s=1e-5, source="measured here")
    found = timeline(scan[0], census(*scan), slow)
    computed = prediction.compute(scan[0], num_devices=8, times=found, cluster=slow)
    assert computed.launch_s == found.launch_s > 0
    best = timeline(scan[0], (), slow, rates=slow.best_rates)
    assert computed.bracket.low_s == pytest.approx(best.compute_s + best.memory_s + best.launch_s)
    assert best.launch_s > 0
    assert "launches of 10 µs, measured (measured here)" in computed.bracket.sources
    assert computed.to_json()["launch_s"] == found.launch_s


def test_measured_rates_replace_assumed_rates(scan, timed):
    peak = CLUSTER.gpu.bf16_flops_per_s
    rates = {1: 0.5 * peak, 1 << 20: 0.5 * peak}
    link = Link(alpha_s=1e-6, bytes_per_s=1e11)
    axes = dict.fromkeys(timed.network_s, link)
    measured = dataclasses.replace(BOUND_BY_FLOPS, products=rates, axes=axes, source="measured here")
    times = timeline(scan[0], census(*scan), measured)
    assert times.compute_s == pytest.approx(work.flops_per_step(scan[0]) / (0.5 * peak))
    found = bracket(scan[0], times, measured)
    assert found.low_s == pytest.approx(times.compute_s + times.memory_s + times.bubble_s)
    assert found.high_s == pytest.approx(found.low_s + sum(times.network_s.values()))
    assert all("measured here" in source for source in found.sources)


def test_headline_names_rates_of_utilisation(scan, timed):
    computed = prediction.compute(scan[0], num_devices=8, model_flops=ASKED, times=timed, cluster=CLUSTER)
    assert computed.rates == str(CLUSTER.rates)
    report = SimpleNamespace(compute=computed, overlap=prediction.overlap(timed), findings=(), unit="step")
    (said,) = (cell.text for cell in render._speed(report))
    assert f"model FLOP utilisation with {CLUSTER.rates}" in said
    assert "at best" not in said
