"""The list of kernels: each implementation is recognized in planted programs, and findings follow from it."""

from __future__ import annotations

import json
import typing

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.cli.explain_command import Explained
from meshpar.collectives import cudnn
from meshpar.hardware.clusters import parse_cluster
from meshpar.hardware.compile_options import NO_GRAPHS
from meshpar.hardware.compile_target import KernelChoice
from meshpar.inspect import explain as explain_module
from meshpar.inspect import kernels
from meshpar.inspect.hlo import parser as hlo
from meshpar.parallel.execution import Execution
from meshpar.runs.recipe import Allowed
from tests.errors import raises
from tests.inspect.saved import Compiled

CLUSTER = parse_cluster("h100:1x1")
LAYER = "jit(_step)/gradients/jvp(layers)/while/body"
NUMBERS = 'lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="%s"}'
BATCHED = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}"


def dot(op_name, dtype="bf16", size=512):
    return f"""
      a = {dtype}[{size},{size}] parameter(0)
      ROOT k = {dtype}[{size},{size}] dot(a, a), {NUMBERS % op_name}"""


def call(target, config="", dtype="bf16", results="bf16[512,512]", op_name=f"{LAYER}/mlp/dot_general"):
    return f"""
      a = {dtype}[512,512] parameter(0)
      ROOT k = {results} custom-call(a, a), custom_call_target="{target}", metadata={{op_name="{op_name}"}}{config}"""


def gemm(target, dtype="bf16"):
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    config = f', backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{numbers}}}}}'
    return call(target, config, dtype, "(bf16[512,512], s8[99])")


def fusion(inside, kind="kLoop", fused="", op_name=f"{LAYER}/mlp/mul", dtype="bf16"):
    """A fusion of a parameter [8, 512, 512]; `inside` reads `p` and has the root."""
    config = f'{{"fusion_backend_config":{{"kind":"{fused}"}}}}'
    parameter = f"{dtype}[8,512,512] parameter(0)"
    return f"""
      a = {parameter}
      ROOT k = bf16[8,512,512] fusion(a), kind={kind}, calls=inner, metadata={{op_name="{op_name}"}}, \
backend_config={config}
    """, f"inner {{\n  p = {parameter}\n{inside}\n}}\n"  # fmt: skip


def batched(op_name, exponential=""):
    """A batched matmul, next to an exponential with the op name `exponential`."""
    text = f"""
      a = bf16[8,512,512] parameter(0)
      k = bf16[8,512,512] dot(a, a), {BATCHED}, metadata={{op_name="{op_name}"}}
      ROOT e = bf16[8,512,512] exponential(k), metadata={{op_name="{exponential}"}}"""
    return text if exponential else text.replace("exponential(k)", "negate(k)")


def attention(target, operands="q, q, q", op_name=f"{LAYER}/attention/tokamax_attention_1000000000/x"):
    config = '"intermediate_tensor_shape":{"dimensions":["2","8","512","512"]},"mask_type":"CAUSAL"'
    return f"""
      q = bf16[2,512,8,64] parameter(0)
      ROOT k = bf16[2,512,8,64] custom-call({operands}), custom_call_target="{target}", metadata={{op_name="{op_name}"}}, backend_config={{"cudnn_fmha_backend_config":{{{config}}}}}
    """  # noqa: E501


TRITON_DOT = "  ROOT d = bf16[8,512,512] dot(p, p), " + BATCHED
RSQRT = "  r = bf16[8,512,512] rsqrt(p)\n  ROOT m = bf16[8,512,512] multiply(p, r)"
NEGATE = "  ROOT m = bf16[8,512,512] negate(p)"
SCORES, PLAIN = f"{LAYER}/attention/bqhd,bkhd->bhqk/dot_general", f"{LAYER}/attention/exp"
GROUPED = f"{LAYER}/moe/tokamax_rows_64/x"
PROGRAMS = {
    # HLO of a program whose instruction `k` is a kernel; its kind, implementation and operand dtypes.
    "cublas": (gemm("__cublas$gemm"), "matmul", "cuBLAS", "bf16"),
    "cublaslt": (gemm("__cublas$lt$matmul"), "matmul", "cuBLASLt", "bf16"),
    "fp8": (gemm("__cublas$lt$matmul$f8", "f8e4m3fn"), "matmul", "cuBLASLt fp8", "f8e4m3fn"),
    "triton": (fusion(TRITON_DOT, "kCustom", "__triton_nested_gemm_fusion"), "matmul", "Triton", "bf16"),
    "cudnn_gemm": (fusion(TRITON_DOT, "kCustom", "__cudnn$fusion"), "matmul", "cuDNN", "bf16"),
    "loop": (fusion(TRITON_DOT), "matmul", "XLA loop", "bf16"),
    "float32": (dot(f"{LAYER}/mlp/dot_general", "f32"), "matmul", "XLA loop", "f32"),
    "cudnn": (attention("__cudnn$fmhaSoftmax"), "attention", "cuDNN", "bf16"),
    "cudnn_backward": (attention("__cudnn$fmhaSoftmaxBackward"), "attention", "cuDNN", "bf16"),
    "tokamax_triton": (attention("x.triton"), "attention", "tokamax Triton", "bf16"),
    "tokamax_mosaic": (attention("mosaic_gpu_v2", "q, q, q, q"), "attention", "tokamax Mosaic", "bf16"),
    "blockwise": (dot(f"{LAYER}/attention/blockwise_attention/while/dot_general"), "attention", "XLA loop", "bf16"),
    "ring": (dot(f"{LAYER}/attention/shard_map/ring_attention/dot_general"), "attention", "XLA loop", "bf16"),
    "einsum": (batched(SCORES, PLAIN), "attention", "XLA matmuls", "bf16"),
    "matmul": (batched(f"{LAYER}/self_attn/dot_general", f"{LAYER}/self_attn/exp"), "attention", "XLA matmuls", "bf16"),
    # "split-K": XLA's batch dim is a part of the contracted dim, and the formula of the einsum has none
    "projection": (batched(f"{LAYER}/attention/bqe,ehd->bqhd/dot_general", PLAIN), "matmul", "XLA loop", "bf16"),
    "experts": (batched(f"{LAYER}/moe/ecd,edf->ecf/dot_general", f"{LAYER}/moe/exp"), "matmul", "XLA loop", "bf16"),
    "no_softmax": (batched(SCORES), "matmul", "XLA loop", "bf16"),
    "grouped": (call("mosaic_gpu_v2", op_name=GROUPED), "grouped matmul", "tokamax Mosaic", "bf16"),
    "grouped_triton": (call("x.triton", op_name=GROUPED), "grouped matmul", "tokamax Triton", "bf16"),
    "blocked": (dot(f"{LAYER}/moe/grouped_matmul/while/body/dot_general"), "grouped matmul", "XLA loop", "bf16"),
    "swiglu": (dot(f"{LAYER}/moe/transpose(jvp(grouped_swiglu))/while/body/x"), "grouped matmul", "XLA loop", "bf16"),
    "even": (
        fusion(TRITON_DOT, "kCustom", "__triton", f"{LAYER}/moe/grouped_matmul/gcd,gdf->gcf/dot_general"),
        "grouped matmul", "Triton", "bf16",
    ),
    "fp8_triton": (fusion(TRITON_DOT, "kCustom", "__triton", dtype="f8e4m3fn"), "matmul", "Triton", "f8e4m3fn"),
    "norm": (fusion(RSQRT), "norm", "XLA fusion", "bf16"),
    "triton_norm": (fusion(RSQRT, "kCustom", "__triton"), "norm", "Triton fusion", "bf16"),
    "update": (fusion(RSQRT, op_name="jit(_step)/update/mul"), "optimizer update", "XLA fusion", "bf16"),
    "muon": (dot("jit(_step)/update/orthogonalized/dot_general", "f32"), "matmul", "XLA loop", "f32"),
    "elementwise": (fusion(NEGATE), "other", "XLA fusion", "bf16"),
    "opaque": (call("my_kernel"), "other", "my_kernel", "bf16"),
}  # fmt: skip


def listed(body, cluster=CLUSTER):
    text, before = body if isinstance(body, tuple) else (body, "")
    module = hlo.parse(f"HloModule m, is_scheduled=true\n{before}\nENTRY e {{{text}\n}}\n")
    return kernels.program_kernels(module, cluster)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernel_is_recognized(name):
    body, kind, implementation, dtypes = PROGRAMS[name]
    kernel = next(kernel for kernel in listed(body) if kernel.name == "k")
    assert (kernel.kind, kernel.implementation, kernels.dtype_text(kernel.dtypes)) == (kind, implementation, dtypes)
    assert kernel.time_s > 0
    assert kernel.phase == ("optimizer" if "update" in kernel.module else "backward" if name == "swiglu" else "forward")
    attention = None if kernel.product is None else kernel.product.attention
    assert (attention is not None and attention.is_backward) == (name in ("cudnn_backward", "tokamax_mosaic"))


def test_split_projections_are_not_attention():
    """XLA divides the contracted dim of a projection, next to the einsum of the scores in the same module."""
    projection = f'p = bf16[8,512,512] dot(a, a), {BATCHED}, metadata={{op_name="{LAYER}/attention/dot_general"}}\n'
    scores, _, split = listed(batched(SCORES, PLAIN).replace("ROOT e", "e") + "\n  ROOT " + projection)
    assert (scores.kind, split.kind) == ("attention", "matmul")


def test_softmax_belongs_to_attention():
    softmax = listed(batched(SCORES, PLAIN))[-1]
    assert (softmax.kind, softmax.implementation, softmax.flops) == ("attention", kernels.SOFTMAX, 0)


def test_kernels_of_a_loop_count_its_iterations():
    loop = f"""
    body {{
      s = (s32[], bf16[512,512]) parameter(0)
      i = s32[] get-tuple-element(s), index=0
      a = bf16[512,512] get-tuple-element(s), index=1
      k = bf16[512,512] dot(a, a), {NUMBERS % f"{LAYER}/mlp/dot_general"}
      ROOT t = (s32[], bf16[512,512]) tuple(i, k)
    }}
    cond {{
      s = (s32[], bf16[512,512]) parameter(0)
      ROOT c = pred[] constant(true)
    }}
    """
    entry = """
      s = (s32[], bf16[512,512]) parameter(0)
      ROOT w = (s32[], bf16[512,512]) while(s), body=body, condition=cond, backend_config={"known_trip_count":{"n":"7"}}
    """
    (once,), (kernel,) = listed(dot(f"{LAYER}/mlp/dot_general")), listed((entry, loop))
    assert (kernel.name, kernel.count, kernel.flops) == ("k", 7, 7 * 2 * 512**3)
    assert kernel.time_s == pytest.approx(7 * once.time_s)
    (row,) = kernels.kernel_rows([kernel, once], 2 * kernel.time_s, lambda kernel: "why")
    assert (row.count, row.modules, row.reason) == (8, ("gradients/layers/mlp",), "why")
    assert row.share == pytest.approx(8 / 14)


AUTO = {"attention": KernelChoice(implementation="blockwise", why="heads have 80 dimensions")}
NAMED = {"attention": KernelChoice(implementation="blockwise", why='attention="blockwise"', is_named=True)}
CUDNN = {"attention": KernelChoice(implementation="cudnn", why="a fused kernel for cuda; window")}
REASONS = [
    ("cudnn", {}, ""), ("tokamax_triton", CUDNN, "a fused kernel for cuda; window"), ("tokamax_triton", {}, ""),
    ("blockwise", AUTO, "heads have 80 dimensions"), ("blockwise", NAMED, 'attention="blockwise"'),
    ("einsum", {}, "the model computes scores and softmax"), ("blocked", {}, "not installed"), ("grouped", {}, ""),
    ("float32", {}, "f32 operands: tensor cores need 16 or 8 bits"), ("triton", {}, "not autotuned"),
    ("fp8_triton", {}, "not autotuned"), ("swiglu", {}, "not installed"),
    ("even", {}, "not autotuned"), ("fp8", {}, ""),
    ("loop", {}, "XLA fused it with element-wise operations"), ("cublas", {}, ""), ("norm", {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "choices", "why"), REASONS)
def test_reason_for_a_slower_implementation(name, choices, why):
    reason = kernels.reasons(choices, grouped_why="tokamax is not installed", is_autotuned=False)
    found = reason(next(kernel for kernel in listed(PROGRAMS[name][0]) if kernel.name == "k"))
    assert (why in found) if why else found == ""


def test_reason_on_a_gpu_names_the_missing_fp8_kernel():
    (kernel,) = listed(PROGRAMS["fp8_triton"][0])
    assert "cuBLASLt's fp8" in kernels.reasons({})(kernel)


ROUTER = mp.Rules(precision={r".*/mlp": "float32"})
BF16, F32 = Execution(sizes={}, compute="bfloat16"), Execution(sizes={}, compute="float32")
FINDINGS = [
    ("blockwise", BF16, AUTO, {}, "unfused-attention"), ("blockwise", BF16, NAMED, {}, ""),
    ("blockwise", F32, AUTO, {}, ""), ("blockwise", Execution(sizes={}), AUTO, {}, "unfused-attention"),
    ("ring", BF16, AUTO, {}, "unfused-attention"), ("einsum", BF16, {}, {}, "unfused-attention"),
    ("matmul", BF16, {}, {}, "unfused-attention"), ("cudnn", BF16, CUDNN, {}, ""),
    ("tokamax_mosaic", BF16, CUDNN, {}, ""), ("float32", Execution(sizes={}), {}, {}, ""),
    ("projection", BF16, {}, {}, ""), ("experts", BF16, {}, {}, ""),
    ("float32", BF16, {}, {}, "float32-matmul"), ("float32", F32, {}, {}, ""),
    ("float32", BF16, {}, {"activations": mp.Rules(precision={r".*/mlp": "bfloat16"})}, "float32-matmul"),
    ("float32", BF16, {}, {"activations": ROUTER}, ""), ("muon", BF16, {}, {}, ""), ("cublas", BF16, {}, {}, ""),
    ("fp8", BF16, {}, {}, ""), ("blocked", BF16, {}, {}, ""), ("update", BF16, {}, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "execution", "choices", "options", "rule"), FINDINGS)
def test_planted_kernel_gives_its_finding(name, execution, choices, options, rule):
    rules = options.get("activations", mp.Rules())
    found = list(kernels.kernel_findings(listed(PROGRAMS[name][0]), execution, choices, rules))
    assert [finding.rule for finding in found] == ([rule] if rule else [])
    for finding in found:
        assert finding.module.startswith("gradients/layers/")
        assert finding.rule in kernels.CHECKED_RULES
        assert "--set" in finding.fix


def test_small_float32_matmuls_are_not_reported():
    router = listed(dot(f"{LAYER}/moe/router/dot_general", "f32", size=64))
    large = listed(dot(f"{LAYER}/mlp/dot_general", size=512))
    assert not list(kernels.kernel_findings([*router, *large], BF16, {}, mp.Rules()))
    assert list(kernels.kernel_findings([*router * 6, *large], BF16, {}, mp.Rules()))  # 6 / 8³ is more than 1 %


@pytest.fixture
def report(compiled, monkeypatch):
    plant, program = compiled("whole_heads")
    monkeypatch.setattr(explain_module, "compile_here", lambda traced: program)
    return mp.explain(plant.step, plant.state, plant.batch, plant.cluster, pod=Compiled(program))


def test_explain_lists_kernels_and_checks_them(report):
    rows = json.loads(json.dumps(report.to_json()))["kernel_list"]
    assert [row["time_s"] for row in rows] == sorted((row["time_s"] for row in rows), reverse=True)
    assert {row["kind"] for row in rows} == {"attention", "matmul", "optimizer update", "other"}
    compute = report.compute
    assert sum(row["time_s"] for row in rows) == pytest.approx(compute.compute_s + compute.memory_s)
    assert rows[0]["share"] == pytest.approx(rows[0]["time_s"] / compute.predicted_step_s)
    assert sum(row["flops"] for row in rows) == pytest.approx(report.compute.flops_per_device)
    text = str(report)
    for words in ("KERNELS", "XLA matmuls", "not autotuned without a GPU"):
        assert words in text
    (reason,) = (text for text in Explained(report=report).reasons if text.startswith("unfused-attention"))
    assert "gradients/layers/attention" in reason
    allowed = Explained(report=report, allow=("unfused-attention",)).reasons
    assert len(allowed) == len(Explained(report=report).reasons) - 1


def test_recipe_declares_the_checked_rules():
    assert typing.get_args(Allowed) == kernels.CHECKED_RULES
    with raises("out-of-range", "Recipe.allow"):
        mp.Recipe(
            name="x", mesh=mp.MeshSpec(), model=mp.models.llama3_8b(num_layers=1), loss=mp.models.next_token_loss,
            data=mp.data.ArrayData(arrays={}), steps=1, batch_size=1, allow=("attention",),
        )  # fmt: skip


def with_heads(head_dim, xla=None, **options):
    """A decoder with a layer, compiled for an H100: its report."""
    config = mp.models.TransformerConfig(
        vocab_size=512,
        num_layers=1,
        embed_dim=256,
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        mlp_dim=512,
        **options,
    )
    step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"), xla=xla or {})
    mesh = mp.MeshSpec(data=1).abstract(devices=1)
    state = mp.abstract_state(config.build(), mp.optim.muon(1e-3), mesh=mesh, strategy=mp.ddp())
    batch = {name: jax.ShapeDtypeStruct((2, 512), np.int32) for name in ("inputs", "targets")}
    return mp.explain(step, state, batch, CLUSTER)


@pytest.mark.pod
@pytest.mark.parametrize(
    ("head_dim", "options", "implementation", "rules"),
    [
        (128, {}, "cuDNN", []),
        (264, {}, "XLA loop", ["unfused-attention"]),
        (264, {"attention": "blockwise"}, "XLA loop", []),
        (64, {"attention": "xla"}, "XLA matmuls", []),
        (64, {"attention_sinks": True}, "XLA loop", ["unfused-attention"]),
    ],
)
def test_compiled_decoder_lists_its_attention(head_dim, options, implementation, rules):
    if implementation == "cuDNN" and (missing := cudnn.missing_cudnn()):
        pytest.skip(missing)
    report = with_heads(head_dim, **options)
    found = [row for row in report.kernel_list if row.kind == "attention" and row.flops]
    assert {row.implementation for row in found} == {implementation}
    assert [finding.rule for finding in report.findings if finding.rule in kernels.CHECKED_RULES] == rules
    assert all(row.reason for row in found) == (implementation != "cuDNN")
    assert any(row.kind == "matmul" and row.dtypes == "bf16" for row in report.kernel_list)


@pytest.mark.pod
def test_program_without_cuda_graphs_has_the_same_kernels():
    usual, graphless = (with_heads(128, xla, attention="blockwise") for xla in ({}, NO_GRAPHS))
    assert graphless.compile_options["xla_gpu_enable_command_buffer"] == ""
    assert graphless.kernel_list == usual.kernel_list
    assert graphless.fingerprint != usual.fingerprint
