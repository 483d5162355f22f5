"""Rates of a trace in a profile: a prediction with the profile equals the measured times."""

from __future__ import annotations

import dataclasses

import pytest

from meshpar.bench.trace_profile import profile_of_trace
from meshpar.hardware.clusters import Link, Links, parse_cluster, parse_profile
from meshpar.inspect import trace
from tests.errors import raises
from tests.inspect.test_trace import CLUSTER, HOST, KERNELS, NUMBERS, PROGRAM, gpus, programs, written

# A second all-reduce of the quarter of the bytes, and the backward pass of attention.
ALL_REDUCE = next(line for line in PROGRAM.splitlines() if "all-reduce.4 =" in line)
SMALL = (
    ALL_REDUCE.replace("all-reduce.4", "all-reduce.5").replace("bf16[512,512]", "bf16[256,256]").replace("%g)", "%h)")
)
ATTENTION = next(line for line in PROGRAM.splitlines() if "%fmha.2 =" in line)
BACKWARD = ATTENTION.replace("%fmha.2", "%fmha.6").replace("fmhaSoftmax", "fmhaSoftmaxBackward")
SLICE = "  %h = bf16[256,256] slice(%g), slice={[0:256], [0:256]}"
LONGER = PROGRAM.replace(ALL_REDUCE, "\n".join((ALL_REDUCE, SLICE, SMALL, BACKWARD)))
# Proportional to the bytes, so that ring and tree take the same time.
ALL_REDUCES = [
    ("ncclDevKernel_AllReduce", f"all-reduce.{at}", begin, length) for at, begin, length in ((4, 60, 24), (5, 95, 6))
]
OTHERS = [kernel for kernel in KERNELS if "all-reduce" not in kernel[1]]
TIMES = [*OTHERS, *ALL_REDUCES, ("cudnn_fmha_bprop", "fmha.6", 105, 50)]


@pytest.fixture
def file(tmp_path):
    return written(tmp_path, HOST, programs(LONGER), *gpus([*TIMES, *((n, op, b + 200, t) for n, op, b, t in TIMES)]))


def test_saved_rates_predict_the_measured_times(file, tmp_path):
    path = tmp_path / "my.json"
    found = trace.read(file, mesh={"data": 2}, cluster=CLUSTER)
    assert max(abs(kernel.ratio - 1) for kernel in found.kernels if kernel.flops) > 0.5
    profile_of_trace(found, path, CLUSTER).save(path)
    saved = parse_cluster(str(path))
    assert saved.products == {512: pytest.approx(2 * 512**3 / 40e-6)}
    forward = 2 * 2 * 8 * 512 * 512 * 64 / 2
    assert saved.shapes == {"16 bits 512x512x512": pytest.approx(2 * 512**3 / 40e-6)}
    rates = {"forward": forward / 20e-6, "backward": 2.5 * forward / 50e-6}
    assert saved.attention == {
        f"cudnn {direction} causal 64": {512: pytest.approx(rate)} for direction, rate in rates.items()
    }
    assert saved.axes["data"].bytes_per_s == pytest.approx(2**19 / 24e-6)  # two devices send all bytes once
    again = trace.read(file, mesh={"data": 2}, cluster=saved)
    for measured in (*(kernel for kernel in again.kernels if kernel.flops), *again.collectives):
        assert measured.ratio == pytest.approx(1, rel=1e-3)


def test_other_values_of_the_profile_are_kept(file, tmp_path):
    path = tmp_path / "my.json"
    axes = {"tensor": Link(alpha_s=1e-6, bytes_per_s=1e11)}
    dataclasses.replace(CLUSTER, products={64: 1e12}, launch_s=2e-6, axes=axes, source="bench").save(path)
    found = trace.read(file, mesh={"data": 2}, cluster=CLUSTER)
    saved = profile_of_trace(found, path, CLUSTER)
    assert ({*saved.products}, {*saved.axes}, saved.launch_s) == ({64, 512}, {"tensor", "data"}, 2e-6)
    assert saved.source.startswith("bench; meshpar trace, 2 steps on 2 devices")
    with raises("conflict", "profile"):
        profile_of_trace(found, path, parse_cluster("a100-80:1x2"))


OTHER_KERNELS = f"""HloModule jit__step, is_scheduled=true

%inner (p: f32[4096,4096]) -> f32[4096,4096] {{
  %p = f32[4096,4096] parameter(0)
  ROOT %m = f32[4096,4096] negate(%p)
}}

ENTRY %main (a: f8e4m3fn[512,512], r: bf16[1024,512], w: bf16[8,512,512], l: f32[4096,4096], q: bf16[1,512,8,64]) -> f32[4096,4096] {{
  %a = f8e4m3fn[512,512] parameter(0)
  %r = bf16[1024,512] parameter(1)
  %w = bf16[8,512,512] parameter(2)
  %l = f32[4096,4096] parameter(3)
  %q = bf16[1,512,8,64] parameter(4)
  %flash.4 = bf16[1,512,8,64] custom-call(%q, %q, %q, %q), custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(_step)/gradients/attention/tokamax_attention_1000000000/x"}}
  %fp8.1 = (bf16[512,512], s8[99]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul$f8", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{{NUMBERS}}}}}}}
  %grouped.2 = bf16[1024,512] custom-call(%r, %w), custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(_step)/gradients/moe/tokamax_rows_1024_product/x"}}
  ROOT %loop_negate_fusion.3 = f32[4096,4096] fusion(%l), kind=kLoop, calls=%inner
}}
"""  # noqa: E501


def test_rates_of_fp8_grouped_matmuls_and_copies(tmp_path):
    names = ("fp8.1", "grouped.2", "loop_negate_fusion.3", "flash.4")
    times = [("kernel", name, 200 * at, 100) for at, name in enumerate(names)]
    file = written(tmp_path, HOST.replace("meshpar:step", "python"), programs(OTHER_KERNELS), *gpus(times))
    saved = profile_of_trace(trace.read(file, mesh={"data": 2}, cluster=CLUSTER), tmp_path / "my.json", CLUSTER)
    assert saved.products_fp8 == {512: pytest.approx(2 * 512**3 / 1e-4)}
    assert saved.grouped == {"mosaic product": {323: pytest.approx(2 * 1024 * 512**2 / 1e-4)}}  # 2 · 323³ per group
    # The kernel for the gradient of the queries has 3 products; with the kernel for keys and values they are 7 for 5.
    ((_, rates),) = saved.attention.items()
    assert [*rates.values()] == [pytest.approx(3e9 / 1.4 / 1e-4)]
    assert saved.copy_bytes_per_s == pytest.approx(2 * 4 * 4096**2 / 1e-4)
    assert {*saved.shapes} == {"8 bits 512x512x512"}
    again = trace.read(file, mesh={"data": 2}, cluster=saved)
    assert [kernel.ratio for kernel in again.kernels] == pytest.approx([1, 1, 1, 1], rel=1e-3)


def test_kernels_with_several_matmuls_give_no_rates(file, tmp_path):
    found = trace.read(file, mesh={"data": 2}, cluster=CLUSTER)
    several = tuple(dataclasses.replace(kernel, flops=2 * kernel.flops) for kernel in found.kernels)
    saved = profile_of_trace(dataclasses.replace(found, kernels=several), tmp_path / "my.json", CLUSTER)
    assert (saved.products, saved.shapes, saved.attention) == ({}, {}, {})
    assert saved.axes


def test_traces_of_other_devices_give_links(file, tmp_path):
    found = trace.read(file, mesh={"data": 2}, cluster=CLUSTER)
    path = tmp_path / "cpu.json"
    profile_of_trace(found, path).save(path)
    assert isinstance(saved := parse_profile(str(path)), Links)
    assert {*saved.axes} == {"data"}
    unknown = trace.read(file)
    with raises("not-found", "trace"):
        profile_of_trace(unknown, tmp_path / "none.json")
