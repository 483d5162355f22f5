"""FLOPs and temporaries of programs, the walk over what they execute, and scopes from op names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.program import compile_here
from meshpar.inspect.timeline import program_work as work

VERSIONS = ("jax0.10", "jax0.12")


def with_shape(computation, dims, dtype=None):
    """Return the instructions with an array of these dims, alone or in a tuple."""
    return [
        ins
        for ins in computation
        if any(leaf.dims == tuple(dims) and dtype in (None, leaf.dtype) for leaf in ins.shape.leaves())
    ]


def compiled(function, *shapes):
    return compile_here(jax.jit(function).trace(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("version", VERSIONS)
def test_scanned_model_flops_equal_closed_form(saved, programs, platform, version):
    module = saved["scan", platform, version]
    # Each layer has two matmuls in the forward pass and four in the backward pass, sharded over eight devices.
    expected = programs.LAYERS * 6 * 2 * programs.BATCH * programs.EMBED * programs.HIDDEN // 8
    assert work.flops_per_step(module) == expected
    found = work.matmuls(module)
    assert sum(matmul.flops_per_step for matmul in found) == expected
    assert {matmul.count_per_step for matmul in found} == {programs.LAYERS}
    backward = sum(matmul.flops_per_step for matmul in found if scopes.is_backward(matmul.ins.metadata.op_name))
    assert backward == expected * 2 // 3
    assert {scopes.module_path(matmul.ins.metadata.op_name) for matmul in found} == {"decoder/mlp"}
    assert all("/programs.py:" in scopes.source(module, matmul.ins) for matmul in found)


def test_batched_matmul_flops():
    program = compiled(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, 4, 50), (3, 50, 70))
    assert work.flops_per_step(program.module) == 2 * 3 * 4 * 50 * 70


def test_convolution_flops():
    program = compiled(lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), (2, 3, 8, 8), (5, 3, 3, 3))
    assert work.flops_per_step(program.module) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_conditional_counts_most_expensive_branch():
    def function(x, y):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: (x @ y) @ (y.T @ y))

    program = compiled(function, (64, 64), (64, 64))
    assert work.flops_per_step(program.module) == 3 * 2 * 64**3
    assert all(matmul.in_branch for matmul in work.matmuls(program.module))


GEMM = """HloModule m
ENTRY e {
  a = bf16[16,32] parameter(0)
  b = bf16[32,8] parameter(1)
  g = (bf16[16,8], s8[1024]) custom-call(a, b), custom_call_target="%s", backend_config=%s
  c = bf16[16,8] custom-call(a), custom_call_target="attention"
  ROOT r = bf16[16,8] get-tuple-element(g), index=0
}
"""
NUMBERS = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas_call_flops(target):
    module = hlo.parse(GEMM % (target, NUMBERS))
    assert work.flops_per_step(module) == 2 * 16 * 8 * 32
    assert work.custom_calls(module) == {"attention": 1}
    assert work.custom_calls(module, seen=True) == {target: 1}


def test_opaque_kernels_are_reported():
    assert work.custom_calls(hlo.parse(GEMM % ("flash", "{}"))) == {"flash": 1, "attention": 1}
    assert work.flops_per_step(hlo.parse(GEMM % ("flash", "{}"))) == 0


def test_damaged_dimension_numbers_count_zero_flops():
    numbers = NUMBERS.replace('"1"', '"7"')
    assert work.matmuls(hlo.parse(GEMM % ("__cublas$gemm", numbers))) == ()


def test_repeated_flops_counts_recomputed_matmuls():
    body = """HloModule m, is_scheduled=true
inner {
  a = f32[8,8] parameter(0)
  ROOT d = f32[8,8] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY e {
  a = f32[8,8] parameter(0)
  f.1 = f32[8,8] fusion(a), kind=kCustom, calls=inner
  dot.2.remat = f32[8,8] dot(f.1, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  f.1%s = f32[8,8] fusion(a), kind=kCustom, calls=inner
  ROOT dot.3 = f32[8,8] dot(dot.2.remat, f.1%s), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    for copy, again in ((".remat4", 1), ("5", 0)):
        assert work.repeated_flops(hlo.parse(body % (copy, copy))) == again * 2 * 8**3


def test_largest_temporary_has_source_line():
    def function(x, y):
        with jax.named_scope("big"):
            wide = x @ y  # [128, 512]
        return jnp.sin(wide) @ y.T

    found = work.largest_temporaries(compiled(function, (128, 16), (16, 512)).module, most=2)
    assert found[0].nbytes == 128 * 512 * 4
    assert found[0].shape == "f32[128,512]"
    assert found[0].module == "big"
    assert found[0].source.startswith(__file__)
    assert len(found) == 2
    assert found[0].nbytes >= found[1].nbytes


def test_values_without_memory_are_not_listed(saved):
    for module in saved.values():
        opcodes = {one.opcode for one in work.largest_temporaries(module, most=1000)}
        assert not opcodes & {"parameter", "tuple", "get-tuple-element", "bitcast", "while"}
        fused = {visit.computation.name for visit in executed(module) if visit.in_fusion}
        assert not fused & {one.computation for one in work.largest_temporaries(module, most=1000)}


LOOP = """HloModule m

%body (p: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %p = (s32[], f32[4,100]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = f32[4,100] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[1,100] broadcast(%one), dimensions={}
  %filled = f32[4,100] dynamic-update-slice(%kept, %row, %i, %i), metadata={op_name="jit(f)/layers/while/body/mlp/mul"}
  ROOT %out = (s32[], f32[4,100]) tuple(%next, %filled)
}

%condition (q: (s32[], f32[4,100])) -> pred[] {
  %q = (s32[], f32[4,100]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %four), direction=LT
}

%fused (z: f32[]) -> (f32[4,100], f32[4,50]) {
  %z = f32[] parameter(0)
  %b1 = f32[4,100] broadcast(%z), dimensions={}
  %b2 = f32[4,50] broadcast(%z), dimensions={}
  ROOT %both = (f32[4,100], f32[4,50]) tuple(%b1, %b2)
}

ENTRY %main (a: f32[]) -> (f32[4,100], f32[4,70]) {
  %a = f32[] parameter(0)
  %pair = (f32[4,100], f32[4,50]) fusion(%a), kind=kLoop, calls=%fused
  %empty = f32[4,100] get-tuple-element(%pair), index=0
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,100]) tuple(%zero, %empty)
  %loop = (s32[], f32[4,100]) while(%start), condition=%condition, body=%body
  %result = f32[4,100] get-tuple-element(%loop), index=1
  %given = f32[4,70] broadcast(%a), dimensions={}
  ROOT %all = (f32[4,100], f32[4,70]) tuple(%result, %given)
}
"""


def test_buffer_is_listed_once_with_its_writer():
    """Arrays of a tuple are separate; an in-place update is its operand, and results of the program are outputs."""
    found = work.largest_temporaries(hlo.parse(LOOP))
    big = [(one.name, one.shape, one.nbytes, one.module) for one in found if one.nbytes > 400]
    assert big == [("pair", "f32[4,100]", 1600, "layers/mlp"), ("pair", "f32[4,50]", 800, "")]


@pytest.mark.parametrize("version", VERSIONS)
def test_shapes_in_loop_body(saved, programs, version):
    module = saved["scan", "cuda", version]
    forward, backward = (v.computation for v in executed(module) if v.loops and v.loops[-1].body == v.computation.name)
    local = programs.HIDDEN // 2
    gathered = with_shape(forward, (programs.EMBED, local), "bf16")
    assert {"all-gather", "all-gather-start", "all-gather-done"} & {ins.opcode for ins in gathered}
    # No device has a full weight, [32, 64], in a loop, or a gathered weight in float32.
    for body in (forward, backward):
        assert not with_shape(body, (programs.EMBED, programs.HIDDEN))
        assert not with_shape(body, (programs.EMBED, local), "f32")


def test_executed_tracks_loops_branches_and_fusions(saved):
    for (program, _, _), module in saved.items():
        visits = list(executed(module))
        assert visits[0].computation is module.entry
        assert (visits[0].times, visits[0].in_branch, visits[0].in_fusion) == (1, False, False)
        assert {visit.times for visit in visits} == ({1, 4} if program == "scan" else {1, 5})
        assert all(visit.times_known for visit in visits)
        assert any(visit.in_branch for visit in visits) == (program == "kernels")
        assert any(visit.in_fusion for visit in visits)


ASYNC = """HloModule m
product {
  x = f32[4,8] parameter(0)
  ROOT d = f32[4,4] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
ENTRY e {
  p = f32[4,8] parameter(0)
  s = ((f32[4,8]), f32[4,4], u32[]) %s-start(p), calls=product
  ROOT d = f32[4,4] %s-done(s), calls=product
}
"""


@pytest.mark.parametrize("kind", ["async", "fusion", "call"])
def test_async_work_counts_once(kind):
    module = hlo.parse(ASYNC % (kind, kind))
    assert work.flops_per_step(module) == 2 * 4 * 4 * 8
    assert [matmul.flops for matmul in work.matmuls(module)] == [2 * 4 * 4 * 8]
    visit = list(executed(module))[1]
    assert (visit.computation.name, visit.wrapper.name, visit.in_fusion) == ("product", "s", kind == "fusion")


def test_executed_skips_reducers():
    program = compiled(lambda x: jnp.sort(x).sum(), (64,))
    called = {name for computation in program.module for ins in computation for name in ins.called_as("to_apply")}
    assert called
    assert not called & {visit.computation.name for visit in executed(program.module)}


@pytest.mark.parametrize(
    ("op_name", "module", "primitive", "backward"),
    [
        ("jit(step)/jvp(decoder)/while/body/closed_call/mlp/dot_general", "decoder/mlp", "dot_general", False),
        ("jit(step)/transpose(jvp(decoder))/while/body/eval_jaxpr/mlp/dot_general", "decoder/mlp", "dot_general", True),
        ("jit(f)/jvp(net/attn)/checkpoint/rematted_computation/bsd,dhk->bshk/mul", "net/attn", "mul", False),
        ("jit(step)/decoder/jit(silu)/mul", "decoder", "mul", False),
        ("jit(f)/vmap(outer)/shard_map/cond/branch_0_fun/psum_invariant", "outer", "psum_invariant", False),
        ("jit(f)/grads/transpose(grads)/jvp(embed)/scatter-add", "grads/embed", "scatter-add", True),
        ("jit(f)/block/block/add", "block/block", "add", False),
        ("jit(f)/add", "", "add", False),
        ("", "", "", False),
        ("jit(f)/g/transpose(jvp(h/0))/g/jvp(h/0)/checkpoint/rematted_computation/up/mul", "g/h/0/up", "mul", True),
        ("jit(f)/g/transpose(jvp(N))/h_0/g/jvp(N)/h_0/checkpoint/up/mul", "g/N/h_0/up", "mul", True),
        ("jit(f)/g/transpose(jvp(h/0))/g/jvp(h/0)/remat2", "g/h/0", "remat2", True),
    ],
)  # fmt: skip
def test_op_names(op_name, module, primitive, backward):
    assert scopes.module_path(op_name) == module
    assert scopes.primitive(op_name) == primitive
    assert scopes.is_backward(op_name) is backward


def test_source_is_user_line():
    text = """HloModule m
ENTRY e {
  ROOT p = s32[] parameter(0), metadata={op_name="x" stack_frame_id=4}
}

FileNames
1 "/home/u/train.py"
2 "/usr/lib/python3.12/site-packages/flax/nnx/nn/linear.py"
3 "/home/u/meshpar/meshpar/sharding/rules.py"
4 "/usr/lib/python3.12/site-packages/meshpar/models/transformer.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10}
2 {file_name_id=2 function_name_id=1 line=20}
3 {file_name_id=3 function_name_id=1 line=30}
4 {file_name_id=4 function_name_id=1 line=40}

StackFrames
1 {file_location_id=1 parent_frame_id=0}
2 {file_location_id=4 parent_frame_id=1}
3 {file_location_id=2 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=3}
"""
    module = hlo.parse(text)
    assert [frame.line for frame in module.stack(module.entry.root)] == [30, 20, 40, 10]
    assert scopes.source(module, module.entry.root).endswith("transformer.py:40")
    only_libraries = hlo.parse(text.replace("/home/u/train.py", "/x/site-packages/a.py").replace("models/", "../"))
    assert scopes.source(only_libraries, only_libraries.entry.root)
