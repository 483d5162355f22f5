"""Matmul rates measured by size, and cluster profiles with these rates."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.bench import gpu
from meshpar.bench.gpu import Products, products
from meshpar.hardware.clusters import Link, cluster_of, gpu_by_name, parse_cluster
from meshpar.models import next_token_loss
from meshpar.planner.layout import Layout, Placer
from meshpar.planner.search import Search
from meshpar.planner.time_estimate import matmul_size
from meshpar.planner.workload import describe
from tests.errors import raises
from tests.inspect.planted import CONFIG

MEASURED = Products(
    device=gpu_by_name("h100").device_kinds[0], dtype="bfloat16", flops_per_s={16: 1e12, 1024: 3e14, 8192: 7e14},
    bytes_per_s=2.9e12, source="meshpar bench gpu, here", launch_s=2.5e-6,
)  # fmt: skip


def test_bench_gpu_measures_this_device(meshpar):
    code, out, _ = meshpar("bench", "gpu", "--size", "8", "--size", "16", "--repeats", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found["flops_per_s"]) == ["8", "16"]
    assert all(rate > 0 for rate in (*found["flops_per_s"].values(), found["bytes_per_s"]))
    assert "8" in str(products(sizes=(8,), repeats=1))


def test_bench_gpu_checks_the_device_before_measuring(meshpar, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "products", lambda **_: pytest.fail("measured"))
    code, _, error = meshpar("bench", "gpu", "--size", "8", "--save", tmp_path / "my.json")
    assert code != 0
    assert "it is not in the catalogue" in error


def test_profile_adds_matmul_rates_to_its_links(tmp_path):
    file = tmp_path / "my.json"
    MEASURED.profile(file).save(file)
    found = parse_cluster(str(file))
    assert (found.products, found.launch_s) == (MEASURED.flops_per_s, 2.5e-6)
    usual = cluster_of(gpu_by_name("h100"), nodes=4, gpus_per_node=8)
    link = Link(alpha_s=1e-5, bytes_per_s=1e11)
    dataclasses.replace(usual, axes={"fsdp": link}, source="links").save(file)
    both = MEASURED.profile(file)
    assert (both.nodes, both.axes, both.source) == (4, {"fsdp": link}, "links; meshpar bench gpu, here")


def test_launch_time_is_the_cost_of_one_more_kernel(monkeypatch):
    """With a fake clock: 2 µs for each kernel and 5 µs for each loop iteration."""

    def clock(run, x, repeats):
        kernels = str(jax.make_jaxpr(run)(x)).count("optimization_barrier")
        return 5e-6 + 2e-6 * kernels

    monkeypatch.setattr(gpu, "_time_s", clock)
    assert gpu._launch_s(1) == pytest.approx(2e-6)


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
        (lambda: products(sizes=(0,)), "not-an-int"),
        (lambda: products(dtype="int8"), "unknown-choice"),
        (lambda: products(sizes=(8,), repeats=1).profile("my.json"), "unknown-name"),
    ],
)
def test_products_rejects_invalid_arguments(make, code):
    with raises(code):
        make()


def test_profile_rejects_products_of_another_gpu(tmp_path):
    file = tmp_path / "other.json"
    cluster_of(gpu_by_name("a100"), nodes=1, gpus_per_node=8).save(file)
    with raises("conflict"):
        MEASURED.profile(file)
