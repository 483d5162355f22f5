"""Matmul rates measured by size, and cluster profiles with these rates."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import types
from concurrent.futures import wait

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.bench import gpu
from meshpar.bench.gpu import GpuRates, gpu_rates
from meshpar.bench.gpu_programs import Measurement
from meshpar.collectives import cudnn
from meshpar.hardware.clusters import Link, cluster_of, gpu_by_name, parse_cluster, shape_key
from meshpar.hardware.grouped_kernels import KERNELS, OPERANDS
from meshpar.models import next_token_loss
from meshpar.planner.layout import Layout, Placer
from meshpar.planner.search import Search
from meshpar.planner.time_estimate import matmul_size
from meshpar.planner.workload import describe
from meshpar.runs.recipe_file import load_recipe
from tests.errors import raises
from tests.inspect.planted import CONFIG

H100 = gpu_by_name("h100")
MEASURED = GpuRates(
    device=H100.device_kinds[0], dtype="bfloat16", matmuls={16: 1e12, 1024: 3e14, 8192: 7e14}, bytes_per_s=2.9e12,
    source="meshpar bench gpu, here", launch_s=2.5e-6,
)  # fmt: skip
LIKE = jax.ShapeDtypeStruct((4, 4), np.float32)


def job(name, priority=0, **fields):
    fields = {"kind": "shapes", "function": lambda x: x + 1, "args": (LIKE,), "work": 1.0, **fields}
    return Measurement(key=name, size=0, priority=priority, **fields)


def test_bench_gpu_measures_this_device(meshpar):
    code, out, _ = meshpar("bench", "gpu", "--size", "8", "--size", "16", "--repeats", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found["matmuls"]) == ["8", "16"]
    assert all(rate > 0 for rate in (*found["matmuls"].values(), found["bytes_per_s"]))
    assert found["dropped"] == []
    assert found["failed"] == {}


@pytest.mark.matrix
def test_bench_gpu_measures_all_kernels_of_this_device(tmp_path):
    found = gpu_rates(recipe=load_recipe("gpt_stdlib", devices=1), seconds=120)
    assert not found.failed
    assert not found.dropped
    assert {key.split()[1] for key in found.attention} == {"forward", "backward"}
    assert set(found.grouped) == {"blocked product", "blocked rows", "blocked weights"}
    assert len(found.shapes) >= 6
    assert set(found.matmuls) == set(gpu.SMALL.matmuls)
    assert "attention blockwise forward causal 16, 128" in str(found)


def test_bench_gpu_checks_the_device_before_measuring(meshpar, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "gpu_rates", lambda **_: pytest.fail("measured"))
    code, _, error = meshpar("bench", "gpu", "--size", "8", "--save", tmp_path / "my.json")
    assert code != 0
    assert "it is not in the catalogue" in error
    code, _, error = meshpar("bench", "gpu", "--set", "batch_size=2")
    assert code != 0
    assert "there is no --recipe" in error


def measured_jobs(monkeypatch, jobs, **options):
    monkeypatch.setattr(gpu.programs, "measurements", lambda *_: jobs)
    return gpu_rates(repeats=1, **options)


def test_programs_beyond_the_time_limit_are_dropped_and_listed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now[0])

    def time_s(*_):
        now[0] += 8
        return 1.0

    def compiled(*args, compile_all=gpu._compile):
        programs = compile_all(*args)
        wait(future for futures in programs.values() for future in futures)
        return programs

    monkeypatch.setattr(gpu, "_compile", compiled)
    monkeypatch.setattr(gpu, "_time_s", time_s)
    found = measured_jobs(monkeypatch, [job(name) for name in "abcdef"], seconds=30)
    assert list(found.shapes) == ["a", "b", "c", "d"]
    assert found.dropped == ("shapes e", "shapes f")
    assert "no time for: shapes e, shapes f" in str(dataclasses.replace(MEASURED, dropped=found.dropped))


def test_failed_program_is_reported(monkeypatch):
    def fail(x):
        raise NotImplementedError("no kernel")

    found = measured_jobs(monkeypatch, [job("a", function=fail), job("b")])
    assert (list(found.shapes), found.failed) == (["b"], {"shapes a": "NotImplementedError: no kernel"})


def test_time_of_the_forward_pass_is_subtracted(monkeypatch):
    """A call with both passes takes 3 s and the forward pass 1 s. A program that does its work 4 times takes 3 s."""
    both = lambda x: (x, x)  # noqa: E731
    jobs = [job("a", work=6.0), job("b", function=both, work=8.0, minus="shapes a")]
    jobs += [job("c", function=both, work=6.0, calls=4), job("d", function=both, minus="missing")]
    monkeypatch.setattr(gpu, "_time_s", lambda program, args, *_: 3.0 if isinstance(program(*args), tuple) else 1.0)
    assert measured_jobs(monkeypatch, jobs).shapes == {"a": 6.0, "b": 4.0, "c": 8.0}


@pytest.mark.parametrize(("capability", "kernels", "has_fp8"), [
    ("9.0", {"cudnn", "mosaic", "blockwise", "xla"}, True), ("8.0", {"cudnn", "triton", "blockwise", "xla"}, False),
])  # fmt: skip
def test_measured_kernels_are_those_of_the_gpu(monkeypatch, capability, kernels, has_fp8):
    find_spec = importlib.util.find_spec
    installed = {"tokamax", "triton", "jax_triton"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else find_spec(name))
    monkeypatch.setattr(cudnn, "missing_cudnn", lambda: None)
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    jobs = gpu.programs.measurements(gpu.LARGE, "bfloat16", device)
    assert [each.priority for each in jobs] == sorted(each.priority for each in jobs)
    assert len({each.name for each in jobs}) == len(jobs)
    assert {each.key.split()[0] for each in jobs if each.kind == "attention"} == kernels
    assert any(each.kind == "matmuls_fp8" for each in jobs) is has_fp8
    grouped = {each.key for each in jobs if each.kind == "grouped"}
    on_hopper = {f"{kernel} {operand}" for kernel in KERNELS for operand in OPERANDS}
    assert grouped == (on_hopper if has_fp8 else {f"blocked {operand}" for operand in OPERANDS})
    assert {each.name for each in jobs if each.priority == 0} >= {"matmuls 8,192", "copy", "launch 64"}


def test_shapes_of_a_recipe_are_the_matmuls_of_its_weights():
    """The head has most FLOPs. Tokens are those of a device."""
    recipe = load_recipe("gpt_stdlib", devices=1)
    shapes, model = gpu.programs.shapes_of(recipe), recipe.model
    num_tokens = recipe.batch_size * recipe.data.seq_len
    assert (num_tokens, model.embed_dim, model.mlp_dim) in shapes
    assert (num_tokens, model.embed_dim, model.vocab_size) in shapes
    assert [2 * math.prod(shape) > 0 for shape in shapes]


def test_profile_adds_matmul_rates_to_its_links(tmp_path):
    file = tmp_path / "my.json"
    MEASURED.profile(file).save(file)
    found = parse_cluster(str(file))
    assert (found.products, found.launch_s) == (MEASURED.matmuls, 2.5e-6)
    usual = cluster_of(H100, nodes=4, gpus_per_node=8)
    link = Link(alpha_s=1e-5, bytes_per_s=1e11)
    dataclasses.replace(usual, axes={"fsdp": link}, source="links").save(file)
    both = MEASURED.profile(file)
    assert (both.nodes, both.axes, both.source) == (4, {"fsdp": link}, "links; meshpar bench gpu, here")


def test_saved_rates_replace_those_of_the_catalogue(tmp_path):
    file = tmp_path / "my.json"
    rates = dataclasses.replace(
        MEASURED, matmuls_fp8={8192: 1.2e15}, shapes={shape_key(16, 64, 128, 32): 5e14},
        attention={"cudnn forward causal 128": {8192: 1e14}}, grouped={"triton weights": {1024: 3e14}},
    )  # fmt: skip
    rates.profile(file).save(file)
    found, usual = parse_cluster(str(file)).rates, cluster_of(H100, nodes=1, gpus_per_node=1).rates
    flops = 2.0 * 8192**3
    assert found.product_flops_per_s(8, flops) == pytest.approx(1.2e15)
    assert found.product_flops_per_s(16, flops) == pytest.approx(7e14)
    assert found.product_flops_per_s(16, flops, (32, 128, 64)) == 5e14
    assert found.attention_flops_per_s("cudnn") == (pytest.approx(1e14), usual.attention_flops_per_s("cudnn")[1])
    assert found.grouped_flops_per_s("triton", "weights", 99) == pytest.approx(3e14)
    assert found.grouped_flops_per_s("mosaic", "rows", 2048) == usual.grouped_flops_per_s("mosaic", "rows", 2048)
    assert found.memory_bytes_per_s == 2.9e12
    # A second measurement keeps the rates that it does not have.
    again = MEASURED.profile(file)
    assert again.grouped == rates.grouped
    assert parse_cluster(str(file)).best_rates.memory_bytes_per_s == 2.9e12


def test_launch_time_is_the_cost_of_one_more_kernel(monkeypatch):
    """With a fake clock: 2 µs for each kernel and 5 µs for each program."""

    def time_s(program, *_):
        return 5e-6 + 2e-6 * (64 if calls.append(0) or len(calls) == 2 else 32)

    calls = []
    monkeypatch.setattr(gpu, "_time_s", time_s)
    jobs = [each for each in gpu.programs._memory(gpu.SMALL) if each.kind == "launch"]
    assert measured_jobs(monkeypatch, jobs).launch_s == pytest.approx(2e-6)


@pytest.mark.matrix
def test_plans_use_the_measured_rate_of_their_matmul_sizes(tmp_path):
    batch = {name: jax.ShapeDtypeStruct((64, 64), np.int32) for name in ("inputs", "targets")}
    how = {"tx": optax.adamw(1e-3), "precision": mp.Precision(compute="bfloat16")}
    work = describe(CONFIG.build(), batch, next_token_loss, **how)
    cluster = MEASURED.profile(tmp_path / "none.json")
    strategy, sizes = mp.fsdp(), dict(mp.MeshSpec(fsdp=cluster.num_devices))
    placed, search = Placer(work).place(sizes, strategy), Search(work, cluster)
    times, of_size = [], []
    for count in (1, 2, 8):
        layout = Layout(mesh=mp.MeshSpec(fsdp=cluster.num_devices), strategy=strategy, accumulate=count)
        times.append(search.estimate(layout).time.compute_s)
        of_size.append(matmul_size(placed.execution(layout)))
    assert times == sorted(times)  # smaller matmuls are less efficient
    assert times[2] > 1.2 * times[0]
    # Eight times fewer tokens halve the equivalent matrix size n (the cube root of m * n * k).
    assert of_size[0] == pytest.approx(2 * of_size[2])
    assert "the rates measured for sizes 16 to 8,192 (meshpar bench gpu, here)" in search.rates


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: gpu_rates(sizes=(0,)), "not-an-int"),
        (lambda: gpu_rates(dtype="int8"), "unknown-choice"),
        (lambda: gpu_rates(seconds=0), "out-of-range"),
        (lambda: dataclasses.replace(MEASURED, device="cpu").profile("my.json"), "unknown-name"),
    ],
)
def test_gpu_rates_rejects_invalid_arguments(make, code):
    with raises(code):
        make()


def test_rates_that_were_not_measured_are_not_printed():
    assert "a launch takes 2.5 µs" in str(MEASURED)
    text = str(dataclasses.replace(MEASURED, launch_s=0.0, bytes_per_s=0.0))
    assert "a launch takes" not in text
    assert "copies move" not in text


def test_profile_rejects_rates_of_another_gpu(tmp_path):
    file = tmp_path / "other.json"
    cluster_of(gpu_by_name("a100"), nodes=1, gpus_per_node=8).save(file)
    with raises("conflict"):
        MEASURED.profile(file)
