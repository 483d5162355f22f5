"""What kernels cost: FLOPs by element type, and the bytes that are really touched."""

from __future__ import annotations

import dataclasses

import pytest

from meshpar.hardware.catalogue import GPUS
from meshpar.hardware.clusters import Rates, shape_key
from meshpar.hardware.kernel_rates import interpolated
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.roofline import Roofline

GPU = dataclasses.replace(
    GPUS["h100"],
    bf16_flops_per_s=1e9,
    fp32_flops_per_s=1e8,
    memory_bytes_per_s=1e6,
    memory_efficiency=1.0,
    attention_rates=(5e8, 4e8),
)
"""Slow and round: a megabyte takes a second."""
PEAK = Rates(gpu=GPU, efficiency=1.0)
FAST_MEMORY = dataclasses.replace(PEAK, gpu=dataclasses.replace(GPU, memory_bytes_per_s=1e12))


def kernel(body: str, name: str, before: str = "", rates: Rates = PEAK):
    module = hlo.parse(f"HloModule m, is_scheduled=true\n{before}\nENTRY e {{\n{body}\n}}\n")
    return Roofline(module, rates).kernel(module.entry, module.entry[name])


def fused(inside: str, operands: str, result: str, opcode: str = "fusion"):
    """A fusion of `inside`, called on parameters of the shapes listed in `operands`."""
    shapes = operands.split(" ")
    parameters = "\n".join(f"  p{at} = {shape} parameter({at})" for at, shape in enumerate(shapes))
    names = ", ".join(f"p{at}" for at in range(len(shapes)))
    body = f"{parameters}\n  ROOT k = {result} {opcode}({names}), kind=kLoop, calls=inner"
    return kernel(body, "k", f"inner {{\n{parameters}\n{inside}\n}}")


def test_elementwise_kernel_reads_and_writes_once():
    found = kernel("  p = f32[1000] parameter(0)\n  ROOT k = f32[1000] negate(p)", "k")
    assert (found.flops, found.moved_bytes, found.time_s) == (0, 8000, 8e-3)
    assert not found.is_compute_bound


def test_repeated_operand_is_read_once():
    assert kernel("  p = f32[1000] parameter(0)\n  ROOT k = f32[1000] multiply(p, p)", "k").moved_bytes == 8000


@pytest.mark.parametrize("name", ["p", "v", "t", "g"])
def test_views_are_not_kernels(name):
    body = """
      p = f32[1000] parameter(0)
      v = f32[10,100] bitcast(p)
      t = (f32[10,100], f32[1000]) tuple(v, p)
      ROOT g = f32[1000] get-tuple-element(t), index=1
    """
    assert kernel(body, name) is None


@pytest.mark.parametrize(
    ("dtype", "bytes_each", "seconds"),
    [("f8e4m3fn", 1, 1e-3), ("bf16", 2, 2e-3), ("f16", 2, 2e-3), ("f32", 4, 2e-2)],
)
def test_matmul_rate_depends_on_operand_type(dtype, bytes_each, seconds):
    text = f"""HloModule m, is_scheduled=true
ENTRY e {{
  a = {dtype}[100,100] parameter(0)
  b = {dtype}[100,100] parameter(1)
  ROOT k = f32[100,100] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
    module = hlo.parse(text)
    roofline = Roofline(module, FAST_MEMORY)
    found = roofline.kernel(module.entry, module.entry.root)
    assert found.flops == 2 * 100**3
    assert found.moved_bytes == 2 * 100 * 100 * bytes_each + 100 * 100 * 4
    assert found.time_s == pytest.approx(seconds)
    assert found.is_compute_bound
    assert roofline.main_peak_flops_per_s == (GPU.fp32_flops_per_s if dtype == "f32" else GPU.bf16_flops_per_s)


def test_matmul_rate_is_assumed_share_or_measured():
    body = """
      a = bf16[100,100] parameter(0)
      b = bf16[100,100] parameter(1)
      ROOT k = f32[100,100] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """
    assumed = dataclasses.replace(FAST_MEMORY, efficiency=0.65)
    assert kernel(body, "k", rates=assumed).time_s == pytest.approx(2 * 100**3 / 0.65e9)
    measured = dataclasses.replace(assumed, products={10: 1e8, 1000: 3e8})  # 100 is halfway between on a log scale
    assert kernel(body, "k", rates=measured).time_s == pytest.approx(2 * 100**3 / 2e8)


def test_matmuls_in_nested_fusions_count():
    product = "  ROOT d = f32[8,8] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    parameters = "  a = bf16[8,4] parameter(0)\n  b = bf16[4,8] parameter(1)\n"
    nested = f"nested {{\n{parameters}{product}\n}}\n"
    inner = f"inner {{\n{parameters}  ROOT f = f32[8,8] fusion(a, b), kind=kCustom, calls=nested\n}}\n"
    body = f"{parameters}  ROOT k = f32[8,8] fusion(a, b), kind=kCustom, calls=inner"
    found = kernel(body, "k", nested + inner)
    assert (found.flops, found.moved_bytes) == (2 * 8 * 4 * 8, 64 + 64 + 256)


def test_fused_matmuls_of_two_types_have_separate_rates():
    inside = """
      a = f32[8,8] dot(p0, p0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      b = f32[8,8] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT s = f32[8,8] add(a, b)
    """
    shape = "p0 = bf16[8,8] parameter(0)"
    text = f"HloModule m\ninner {{\n{shape}\n{inside}\n}}\nENTRY e {{\n{shape}\n"
    module = hlo.parse(text + "ROOT k = f32[8,8] fusion(p0), kind=kLoop, calls=inner\n}\n")
    found = Roofline(module, FAST_MEMORY).kernel(module.entry, module.entry.root)
    assert found.flops == 2 * 2 * 8**3
    assert found.time_s == pytest.approx(2 * 8**3 * (1 / GPU.bf16_flops_per_s + 1 / GPU.fp32_flops_per_s))


def test_library_matmul_excludes_scratch_space():
    body = """
      a = bf16[100,100] parameter(0)
      b = bf16[100,100] parameter(1)
      ROOT k = (bf16[100,100], s8[4194304]) custom-call(a, b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
    """  # noqa: E501
    found = kernel(body, "k")
    assert (found.flops, found.moved_bytes) == (2 * 100**3, 3 * 20000)


@pytest.mark.parametrize(("direction", "products"), [("", 2), ("Backward", 5)])
@pytest.mark.parametrize(
    ("mask", "window", "share"), [("CAUSAL", 0, 1 / 2), ("NO_MASK", 0, 1), ("CAUSAL", 128, 7 / 32)]
)
def test_cudnn_attention_flops(direction, products, mask, window, share):
    """Head width 64, 2 examples, 8 heads, 256 queries, 512 keys; a causal mask halves FLOPs, scratch space is free."""
    scores = '"intermediate_tensor_shape": {"dimensions": ["2", "8", "256", "512"]}'
    masks = f'"mask_type": "{mask}", "sliding_window_length": {window}'
    config = f'backend_config={{"cudnn_fmha_backend_config": {{{scores}, {masks}}}}}'
    body = f"""
      q = bf16[2,256,8,64] parameter(0)
      k = bf16[2,512,2,64] parameter(1)
      ROOT k1 = (bf16[2,8,256,64], f32[2,8,256], u8[99999]) custom-call(q, k, k), custom_call_target="__cudnn$fmhaSoftmax{direction}", {config}
    """  # noqa: E501
    found = kernel(body, "k1", rates=FAST_MEMORY)
    whole = products * 2 * (2 * 8) * 256 * 512 * 64
    assert found.flops == whole * share
    # The catalogue's rates of attention, whatever share of the peak matmuls reach.
    rate = 4e8 if direction else 5e8
    assert found.time_s == pytest.approx(whole * share / rate)
    assert kernel(body, "k1", rates=dataclasses.replace(FAST_MEMORY, efficiency=0.65)).time_s == found.time_s
    assert found.moved_bytes == 2 * (2 * 8 * 256 * 64) * 2 + 2 * (2 * 512 * 2 * 64) + 4 * (2 * 8 * 256)


@pytest.mark.parametrize(("target", "rates"), [("mosaic_gpu_v2", (6e8, 3e8)), ("x.triton", (2e8, 1e8))])
def test_kernels_of_tokamax_have_their_own_rates(target, rates):
    gpu = dataclasses.replace(FAST_MEMORY.gpu, mosaic_rates=(6e8, 3e8), triton_rates=(2e8, 1e8))
    # The rate of the backward pass is for five matmuls. The two backward kernels have seven, and take as long.
    for operands, products, rate in (("q, k, k", 2, rates[0]), ("q, k, k, q", 2 + 1, rates[1] * 7 / 5)):
        body = f"""
          q = bf16[64,8,16] parameter(0)
          k = bf16[64,2,16] parameter(1)
          ROOT k1 = bf16[64,8,16] custom-call({operands}), custom_call_target="{target}", metadata={{op_name="a/jvp(tokamax_attention_1000000)/b"}}
        """  # noqa: E501
        found = kernel(body, "k1", rates=dataclasses.replace(FAST_MEMORY, gpu=gpu))
        assert found.flops == products * 10**6
        assert found.time_s == pytest.approx(products * 1e6 / rate)


@pytest.mark.parametrize("operand", ["product", "rows", "weights"])
@pytest.mark.parametrize(("target", "kernel_name"), [("mosaic_gpu_v2", "mosaic"), ("triton_kernel_call_ffi", "triton")])
def test_grouped_matmuls_of_tokamax_have_their_own_rates(operand, target, kernel_name):
    shapes = {
        "product": ("bf16[4096,64]", "bf16[8,64,32]", "bf16[4096,32]"),
        "rows": ("bf16[4096,32]", "bf16[8,64,32]", "bf16[4096,64]"),
        "weights": ("bf16[4096,64]", "bf16[4096,32]", "bf16[8,64,32]"),
    }
    x, y, out = shapes[operand]
    body = f"""
      x = {x} parameter(0)
      y = {y} parameter(1)
      ROOT k1 = {out} custom-call(x, y), custom_call_target="{target}", metadata={{op_name="a/tokamax_rows_4000_{operand}/b"}}
    """  # noqa: E501
    flops = 2 * 4000 * 64 * 32
    measured = {f"{kernel_name} {operand}": {64: 1e8, 256: 3e8}}  # n of a group: the cube root of 1,024,000 is 101
    found = kernel(body, "k1", rates=dataclasses.replace(FAST_MEMORY, grouped=measured))
    n = (flops / 2 / 8) ** (1 / 3)
    assert (found.flops, found.time_s) == (
        flops,
        pytest.approx(flops / interpolated(measured[f"{kernel_name} {operand}"], n)),
    )
    catalogue = GPUS["h100"].grouped_flops_per_s(kernel_name, operand, n)
    rates = dataclasses.replace(FAST_MEMORY, copy_bytes_per_s=1e18)
    assert kernel(body, "k1", rates=rates).time_s == pytest.approx(flops / catalogue)


def test_matmul_shapes_that_were_measured_have_their_own_rates():
    """The key has the dtype size, and the shape in the order of the matmul."""
    body = """
      x = bf16[64,32] parameter(0)
      y = bf16[32,16] parameter(1)
      ROOT k = bf16[64,16] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """
    rates = dataclasses.replace(FAST_MEMORY, shapes={shape_key(16, 64, 32, 16): 1e7, shape_key(8, 64, 32, 16): 1.0})
    flops = 2 * 64 * 32 * 16
    assert kernel(body, "k", rates=rates).time_s == pytest.approx(flops / 1e7)
    assert kernel(body, "k", rates=FAST_MEMORY).time_s == pytest.approx(flops / 1e9)


def test_opaque_kernel_costs_its_bytes():
    body = '  p = f32[1000] parameter(0)\n  ROOT k = f32[500] custom-call(p), custom_call_target="__triton$kernel"'
    found = kernel(body, "k")
    assert (found.flops, found.moved_bytes) == (0, 6000)


UPDATE = "d = f32[32,100] dynamic-update-slice(p0, %s, p1, p1)"
IN_PLACE = f"u = f32[1,100] bitcast(p2)\n{UPDATE % 'u'}\nROOT r = f32[32,100] bitcast(d)"
BUFFERS = "((f32[32,100], s32[], f32[100]), f32[32,100], u32[])"
FUSIONS = {
    # Instructions, operands, result, and the bytes that the fusion moves.
    "a slice of the layers reads the slice": (
        "ROOT s = f32[1,100] dynamic-slice(p0, p1, p1), dynamic_slice_sizes={1,100}",
        "f32[32,100] s32[]", "f32[1,100]", 400 + 4 + 400,
    ),
    "a slice of a view counts the stored type": (
        "c = f32[32,100] convert(p0)\nb = f32[3200] bitcast(c)\nROOT s = f32[100] slice(b), slice={[0:100]}",
        "bf16[32,100]", "f32[100]", 200 + 400,
    ),
    "both slices are read": (
        "a = f32[100] slice(p0), slice={[0:100]}\nb = f32[100] slice(p0), slice={[100:200]}\n"
        "ROOT s = f32[100] add(a, b)",
        "f32[3200]", "f32[100]", 800 + 400,
    ),
    "an operand that is sliced and used is read fully": (
        "a = f32[1,100] slice(p0), slice={[0:1], [0:100]}\nb = f32[32,100] negate(p0)\n"
        "ROOT s = (f32[1,100], f32[32,100]) tuple(a, b)",
        "f32[32,100]", "(f32[1,100], f32[32,100])", 12800 + 400 + 12800,
    ),
    "an unused operand is not read": ("ROOT s = f32[10] negate(p1)", "f32[32,100] f32[10]", "f32[10]", 80),
    "an update in place writes the update": (IN_PLACE, "f32[32,100] s32[] f32[100]", "f32[32,100]", 4 + 400 + 400),
    "an asynchronous update in place": (IN_PLACE, "f32[32,100] s32[] f32[100]", BUFFERS, 4 + 400 + 400),
    "an update with further uses is a full copy": (
        f"{UPDATE % 'p2'}\nROOT r = f32[32,100] negate(d)",
        "f32[32,100] s32[] f32[1,100]", "f32[32,100]", 12800 + 4 + 400 + 12800,
    ),
    "an update in place among several results": (
        f"{UPDATE % 'p2'}\nn = f32[1,100] negate(p2)\nROOT r = (f32[32,100], f32[1,100]) tuple(d, n)",
        "f32[32,100] s32[] f32[1,100]", "(f32[32,100], f32[1,100])", 4 + 400 + 400 + 400,
    ),
    "a forwarded operand": ("ROOT b = f32[10,10] bitcast(p0)", "f32[100]", "f32[10,10]", 800),
    "a forwarded tuple": ("ROOT b = (f32[100]) tuple(p0)", "f32[100]", "(f32[100])", 800),
}  # fmt: skip


@pytest.mark.parametrize(("inside", "operands", "result", "moved_bytes"), FUSIONS.values(), ids=FUSIONS)
def test_fusion_moves_the_bytes_that_it_uses(inside, operands, result, moved_bytes):
    opcode = "fusion-start" if result == BUFFERS else "fusion"
    assert fused(inside, operands, result, opcode).moved_bytes == moved_bytes


def test_gather_reads_selected_rows():
    attributes = (
        "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,64}"
    )
    body = f"""
      p = f32[50000,64] parameter(0)
      i = s32[10,1] parameter(1)
      ROOT k = f32[10,64] gather(p, i), {attributes}
    """
    assert kernel(body, "k").moved_bytes == 2560 + 40 + 2560


def test_scatter_touches_changed_rows():
    body = """
      p = f32[50000,64] parameter(0)
      i = s32[10,1] parameter(1)
      u = f32[10,64] parameter(2)
      ROOT k = f32[50000,64] scatter(p, i, u), update_window_dims={1}, inserted_window_dims={0}, to_apply=add
    """
    add = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
    assert kernel(body, "k", add).moved_bytes == 2560 + 40 + 2560 + 2560


def test_copies_outside_fusions():
    body = """
      p = f32[32,100] parameter(0)
      i = s32[] parameter(1)
      d = f32[1,100] dynamic-slice(p, i, i), dynamic_slice_sizes={1,100}
      u = f32[32,100] dynamic-update-slice(p, d, i, i)
      c = (f32[32,100], f32[32,100], u32[]) copy-start(u)
      ROOT e = f32[32,100] copy-done(c)
    """
    assert kernel(body, "d").moved_bytes == 400 + 4 + 400
    assert kernel(body, "u").moved_bytes == 400 + 4 + 400
    assert kernel(body, "c").moved_bytes == 2 * 12800
    assert kernel(body, "e") is None


def test_all_flops_of_saved_programs_are_in_kernels(saved):
    for (name, platform, version), module in saved.items():
        roofline = Roofline(module, PEAK)
        total = 0
        for visit in executed(module):
            if not visit.in_fusion and visit.wrapper is None:
                found = (roofline.kernel(visit.computation, ins) for ins in visit.computation if ins.opcode != "while")
                total += visit.times * sum(one.flops for one in found if one is not None)
        assert total == work.flops_per_step(module), (name, platform, version)
