"""Compilation for remote GPUs. It needs the aot extra, and errors name missing parts of it."""

from __future__ import annotations

import os
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.hardware.catalogue import GPUS
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect import target
from meshpar.inspect.census import census
from meshpar.inspect.pod import PodError, PodProcess
from meshpar.inspect.target import stablehlo_of, target_config, topology
from meshpar.inspect.timeline import program_work as work
from tests.errors import raises

pytestmark = pytest.mark.pod


@pytest.fixture(scope="session")
def scan_on(programs, pod):
    """cluster -> the compiled scan program, cached."""
    done = {}

    def compiled(cluster):
        if cluster not in done:
            done[cluster] = pod.compile(programs.scan(programs.abstract_mesh("scan")), cluster)
        return done[cluster]

    return compiled


def test_scanned_model_on_8_gpus(programs, scan_on):
    program = scan_on("h100:1x8")
    assert program.target == "h100:1x8"
    assert program.module.is_scheduled
    assert program.module.num_partitions == 8
    assert work.flops_per_step(program.module) == programs.LAYERS * 6 * 2 * 64 * 32 * 64 // 8


def test_memory_equals_closed_form(programs, scan_on):
    program = scan_on("h100:1x8")
    weights = 2 * programs.LAYERS * programs.EMBED * programs.HIDDEN * 2 // 8
    batch = programs.BATCH * programs.EMBED * 2 // 4
    assert program.argument_bytes == weights + batch
    assert program.alias_bytes == weights
    assert program.output_bytes >= weights
    assert program.temporary_bytes > 0
    held = program.argument_bytes + program.output_bytes - program.alias_bytes
    assert program.peak_bytes == held + program.temporary_bytes
    assert program.compile_s > 0
    assert program.warnings == ()


def test_saved_program_is_current(programs, saved, scan_on):
    """The saved program of this jax version equals a new compilation, except for names and schedule."""
    version = "jax" + ".".join(jax.__version__.split(".")[:2])
    if ("scan", "cuda", version) not in saved:
        pytest.skip(f"no program is saved for {version}; `python tests/inspect/programs.py` saves one")
    here, kept = (
        Counter((c.kind, c.axes, c.payload_bytes, c.count_per_step) for c in census(module, programs.MESHES["scan"]))
        for module in (scan_on("h100:1x8").module, saved["scan", "cuda", version])
    )
    assert here == kept


def test_two_nodes_of_8_gpus(pod):
    mesh = AbstractMesh((2, 8), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "tensor")))
    w = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("tensor", None)))

    def loss(w, x):
        return jnp.mean((x @ w).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss), out_shardings=w.sharding).trace(w, x)
    cluster = parse_cluster("h100:2x8")
    program = pod.compile(traced, cluster)
    assert program.module.num_partitions == 16
    (found,) = census(program.module, mesh)  # the averaged gradient; the loss is unused
    assert (found.kind, found.axes, found.group_size, found.dtype) == ("all-reduce", ("data",), 2, "bf16")
    assert cluster.crosses_node(found.axes, mesh)
    assert cluster.groups_cross_node(found.groups)


def test_step_on_cpu_devices_compiles(pod, mesh8):
    """The step is neither importable nor abstract: it closes over arrays on this process's eight CPU devices."""
    x = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh8, P("fsdp", "tensor")))
    scale = 3.0
    step = jax.jit(lambda x: (x * scale) @ x.T, out_shardings=NamedSharding(mesh8, P("fsdp", None)))
    program = pod.compile(step.trace(x), "h100:1x8")
    found = census(program.module, mesh8)
    assert {c.axes for c in found} == {("fsdp",), ("tensor",)}
    assert all(c.source.startswith(__file__) for c in found)
    assert float(step(x)[0, 0]) == 3.0 * 32  # it still runs locally


def test_compiler_chooses_unspecified_shardings(pod, mesh8):
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh8, P("fsdp", "tensor")))
    program = pod.compile(jax.jit(lambda x: x * 2).trace(x), "h100:1x8")
    assert program.output_bytes == 64 * 32 * 4 // 8
    assert not census(program.module, mesh8)


@pytest.mark.parametrize(
    "cluster",
    ["a100-40:1x8", "b200:1x8", *(pytest.param(more, marks=pytest.mark.matrix) for more in ("h200:2x4", "l40s:4x2"))],
)
def test_every_gpu_of_the_catalogue_compiles(programs, scan_on, cluster):
    found = census(scan_on(cluster).module, programs.MESHES["scan"])
    assert {c.kind for c in found} == {"all-reduce", "all-gather", "reduce-scatter"}
    assert scan_on(cluster).argument_bytes == scan_on("h100:1x8").argument_bytes


def test_options_reach_the_compiler(programs, pod):
    traced = programs.scan(programs.abstract_mesh("scan"))
    combined = pod.compile(traced, "h100:1x8")
    clear_context_mesh = pod.compile(traced, "h100:1x8", options={"xla_gpu_all_gather_combine_threshold_bytes": 0})

    def largest(program):
        found = census(program.module, programs.MESHES["scan"])
        return max(len(c.arrays) for c in found if c.kind == "all-gather")

    assert largest(combined) == 2
    assert largest(clear_context_mesh) == 1
    with pytest.raises(PodError, match="xla_no_such_flag"):
        pod.compile(traced, "h100:1x8", options={"xla_no_such_flag": 1})


def test_partitioner_warnings_are_captured(pod):
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def function(a, b):
        with jax.named_scope("block"):
            doubled = jax.lax.with_sharding_constraint(a + a, after)
        return b + doubled

    args = (jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=s) for s in (before, after))
    program = pod.compile(jax.jit(function, out_shardings=after).trace(*args), "h100:1x8")
    (found,) = program.rematerializations
    assert found.module == "block"


def test_topology(pod):
    """It is also available in this process, with a CPU backend."""
    devices = topology("h100:2x4")
    assert [device.id for device in devices] == list(range(8))
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {device.device_kind for device in devices} == {"NVIDIA H100 80GB HBM3"}
    assert jax.default_backend() == "cpu"


def test_process_is_separate_and_ignores_local_devices(pod):
    child = pod.call(os.getpid)
    assert child != os.getpid()
    assert pod.call(os.getenv, "JAX_PLATFORMS") == ""
    assert pod.call(os.getenv, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == "1"
    assert pod.call(os.getenv, key="CUDA_VISIBLE_DEVICES") == ""
    with pytest.raises(PodError, match="TypeError"):
        pod.call(os.getenv, kye="HOME")
    with raises("unknown-name"):
        pod.call(parse_cluster, "h1000:1x8")
    assert pod.call(os.getpid) == child  # the process still answers


def test_process_end_raises_with_its_last_output():
    with PodProcess() as process, pytest.raises(PodError, match=r"(?s)status 1.*out of luck"):
        process.call(sys.exit, "out of luck")


def test_wrong_number_of_gpus_raises(pod, programs):
    with raises("conflict", "cluster"):
        pod.compile(programs.scan(programs.abstract_mesh("scan")), "h100:2x8")


def test_missing_aot_extra_raises(monkeypatch):
    monkeypatch.setattr(target, "_spec", lambda name: None)
    with raises("missing-package", "cluster"):
        topology("h100:1x8")
    with raises("missing-package", "cluster"):
        target.require_aot("h100:1x8")


def test_missing_ptxas_raises(monkeypatch):
    monkeypatch.setattr(target, "_spec", lambda name: object() if name.startswith("jax_plugins") else None)
    monkeypatch.setattr(target.shutil, "which", lambda name: None)
    with raises("missing-package", "cluster"):
        target.require_aot("h100:1x8")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_target_configs_are_well_formed(gpu):
    text = target_config(gpu)
    assert text.count("{") == text.count("}")
    assert f"core_count: {gpu.chip.num_cores} " in text
    assert f"memory_bandwidth: {int(gpu.memory_bytes_per_s)} " in text
    assert f'"{gpu.device_kinds[0]}"' in text
    assert ("ACCELERATED_FEATURES" in text) == (gpu.chip.compute_capability[0] >= 9)


def test_stablehlo_of_step(programs):
    module = stablehlo_of(programs.scan(programs.abstract_mesh("scan")), parse_cluster("h100:1x8"))
    assert isinstance(module, bytes)
    assert module.startswith(b"ML\xefR")
