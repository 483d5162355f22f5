"""The literature's numbers: state of ZeRO stages (FACTS 3), bubbles (5), experts (6), accumulation and remat (7)."""

from __future__ import annotations

import inspect
import json
import math

import pytest

from meshpar.hardware.calculators import (
    CALCULATORS,
    accumulate,
    bubble,
    bucket,
    calculate,
    memory,
    moe,
    remat,
    tp,
    train,
    zero,
    zero_bytes_per_param,
)
from meshpar.hardware.clusters import parse_cluster
from meshpar.hardware.cost_breakdown import breakdown
from meshpar.sharding.units import parse_count
from tests.errors import raises

STAGES = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize(
    ("params", "gigabytes"), [(7e9, (112, 29.31, 15.53, 1.75)), (70e9, (1120, 293.1, 155.3, 17.5))]
)
def test_zero_calculator_matches_the_zero_paper(params, gigabytes):
    found = zero(params=params, ranks=64)
    assert [float(f"{found[stage] / 1e9:.4g}") for stage in STAGES] == pytest.approx(gigabytes)
    assert [found[f"{stage} per parameter"] for stage in STAGES] == [16, 4.1875, 2.21875, 0.25]
    assert found["zero3 sent"] == pytest.approx(1.5 * found["ddp sent"])


def test_memory_calculator_matches_published_figures():
    found = memory(params=70e9)
    assert [found[part] / 1e9 for part in ("weights", "gradients", "Adam and master copy")] == [140, 140, 840]
    found = memory(params=530e9, tensor=8, stages=12, ranks=21)
    assert round(found["parameters per stage"] / 1e9, 1) == 44.2
    assert round(found["parameters per GPU"] / 1e9, 2) == 5.52
    assert round(found["ZeRO-1 over N"] / 1e9, 1) == 25.2
    # 13B on eight GPUs of 40 GB: about 200 GB of state become about 25 GB each.
    assert zero(params=13e9, ranks=8)["zero3"] == pytest.approx(26e9)


@pytest.mark.parametrize(("p", "m", "percent"), [(4, 1, 75.0), (4, 8, 27.3), (4, 16, 15.8), (8, 32, 17.9)])
def test_bubble_calculator_matches_closed_forms(p, m, percent):
    found = bubble(stages=p, microbatches=m)
    assert round(100 * found["gpipe, 1f1b"], 1) == percent
    if (p, m) == (4, 8):
        assert round(found["interleaved-1f1b"], 4) == 0.1579
        assert round(bubble(stages=4, microbatches=8, chunks=4)["interleaved-1f1b"], 4) == 0.0857
        assert round(found["zb-h1"], 4) == 0.1111
    # Closed forms have no bubble of zb-h2 for fewer microbatches than it needs.
    assert found["minimum m without bubble, zb-h2, zb-v" if m < 2 * p - 1 else "zb-h2, zb-v"] == (7 if m == 1 else 0)


def test_moe_calculator_matches_published_figures():
    found = moe()
    assert round(found["elements per rank and direction"] / 1e6, 2) == 3.67
    assert round(found["dispatch and combine of all layers"] / 1e6, 1) == 425.7


def test_remat_and_accumulate_calculators():
    assert round(remat()["compute"] - 1, 2) == 0.33
    assert remat(layers=64)["saved at the optimum"] == 16
    found = accumulate(params=7e9, ranks=64, steps=8)
    assert found["each micro-step: sent"] == 8 * found["once: sent"]
    assert found["once: stored"] == 64 * found["each micro-step: stored"] == 14e9


def test_tp_calculator_payload_and_matmul_time():
    found = tp(cluster=parse_cluster("a100:1x8"))
    assert found["payload"] == 32 * 2**20
    assert round(found["matmul at peak"] / 3 * 1e3, 3) == round(2 * 4096**3 / 312e12 / 3 * 1e3, 3)


def test_tp_calculator_uses_network_links_across_nodes():
    inside, between = (tp(cluster=parse_cluster("h100:16x4"), ranks=ranks) for ranks in (4, 64))
    assert between["all-reduce"] > 4 * inside["all-reduce"]
    assert "between nodes" in str(between)


@pytest.mark.parametrize(
    ("text", "number"), [("64", 64), ("70B", 70e9), ("7.5b", 7.5e9), ("8M", 8e6), ("4k", 4e3), ("70e9", 70e9), (8.0, 8)]
)
def test_parse_count_accepts_suffixes(text, number):
    assert parse_count(text, "here") == number


@pytest.mark.parametrize("text", ["0.5", "0", "-1", "1e300", "nan", "inf", "", "8x", "7.0000001", True])
def test_calculate_rejects_invalid_counts(text):
    with raises("not-an-int"):
        calculate("zero", {"ranks": text})


@pytest.mark.parametrize("name", CALCULATORS)
def test_calculate_does_not_overflow(name):
    known = [one for one in inspect.signature(CALCULATORS[name]).parameters if one not in ("cluster", "mfu")]
    assert all(math.isfinite(row[1]) for row in calculate(name, dict.fromkeys(known, "1e18")).rows)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: calculate("zero", {"parms": 1e9}), "unknown-name"),
        (lambda: calculate("remat", {}, parse_cluster("h100:1x8")), "unsupported-feature"),
        (lambda: train(mfu=101), "out-of-range"),
        (lambda: tp(cluster=8), "wrong-type"),
        (lambda: tp(cluster=parse_cluster("h100:1x4"), ranks=64), "out-of-range"),
        (lambda: calculate("zer", {}), "unknown-choice"),
        (lambda: zero(params=-1), "not-an-int"),
        (lambda: zero_bytes_per_param(3, 8), "unknown-choice"),
        (lambda: zero_bytes_per_param("zero1", 0), "not-an-int"),
        (lambda: zero_bytes_per_param("zero1", "8"), "not-an-int"),
    ],
)
def test_calculators_reject_invalid_arguments(call, code):
    with raises(code):
        call()


def test_cost_command_runs_calculators(meshpar):
    code, out, _ = meshpar("cost", "zero", "params=70e9", "ranks=64", "--json")
    assert code == 0
    assert {row[0]: row[1] for row in json.loads(out)["rows"]}["zero3"] == 17.5e9
    code, _, error = meshpar("cost", "ring", "params=70e9")
    assert code == 2
    assert "only zero, memory" in error


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("zero", "--ranks", "8"), "use --ranks"),
        (("tp", "--alpha", "1e-6", "--bandwidth", "1e9"), "use --alpha"),
        (("moe", "--servers", "2"), "use --servers"),
        (("zero", "ranks"), "the format is NUMBER=VALUE"),
        (("zero", "ranks=8", "ranks=9"), "without duplicates"),
    ],
)
def test_cost_command_rejects_options_without_effect(meshpar, words, wanted):
    code, _, error = meshpar("cost", *words)
    assert code == 2
    assert wanted in error


def test_times_of_a_cluster_follow_the_links():
    cluster = parse_cluster("h100:8x8")
    passes = breakdown("all-gather", 14e9, 64, cluster).time_s
    sheet = zero(params=7e9, ranks=64, cluster=cluster)
    assert [sheet[f"{stage} communication"] / passes for stage in STAGES] == pytest.approx([2, 2, 2, 3])
    assert [sheet[f"{stage} sent"] / (63 / 64 * 14e9) for stage in STAGES] == pytest.approx([2, 2, 2, 3])
    latency_s = breakdown("reduce-scatter", 0, 64, cluster).time_s
    assert accumulate(steps=8, arrays=100, cluster=cluster)["each micro-step: latency"] == pytest.approx(
        800 * latency_s
    )
    assert "each micro-step: latency" not in {name for name, *_ in accumulate().rows}


def test_crossovers_have_equal_latency_and_bandwidth_terms():
    cluster = parse_cluster("h100:8x8")
    size = bucket(ranks=64, cluster=cluster)["crossover"]
    times = [breakdown("ring", n, 64, cluster).time_s for n in (0, size)]
    assert times[1] == pytest.approx(2 * times[0])
    tokens = moe(ranks=64, k=8, width=1024, cluster=cluster)["crossover, tokens"]
    times = [breakdown("all-to-all", n, 64, cluster).time_s for n in (0, 2 * tokens * 8 * 1024 / 64)]
    assert times[1] == pytest.approx(2 * times[0])


def test_buckets_add_up_to_all_gradients():
    sheet = bucket(params=1e9, ranks=8, size=25e6, cluster="h100:1x8")
    assert sheet["buckets"] == 80
    assert sheet["buckets"] * sheet["sent per bucket"] == pytest.approx(sheet["sent in total"])
    assert sheet["all buckets"] == pytest.approx(80 * sheet["a bucket"])
    assert sheet["all buckets"] > sheet["a single message"]


def test_training_time_follows_from_six_flops_per_parameter():
    sheet = train(params=8e9, tokens=15e12, mfu=40, cluster="h100:16x8")
    hours = 6 * 8e9 * 15e12 / (0.4 * 989.4e12) / 3600
    assert sheet["GPU-hours"] == pytest.approx(hours)
    assert sheet["days"] == pytest.approx(hours / 128 / 24)
    assert sheet["tokens per second and GPU"] * 3600 * hours == pytest.approx(15e12)
