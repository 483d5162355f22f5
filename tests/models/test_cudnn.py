"""cuDNN attention on the local examples and heads of each device.

Values are tested on host devices with plain attention in place of the library. Programs are compiled for GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.collectives import cudnn
from meshpar.data.rows import PACKED_FIELDS
from meshpar.inspect.timeline import program_work as work
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.models.attention import KERNELS, cached_attention, causal_attention
from meshpar.models.published_configs import llama3_8b
from tests.collectives.tiles import STAND_IN
from tests.grid import cases
from tests.models.test_attention_forms import KEYS_WHOLE, MESHES, after_a_step, assert_equal

ROWS, SEQ = 16, 32
FSDP_TP = (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {})
GRID = {
    **{name: MESHES[name] for name in ("keys whole", "fsdp|tensor", "stages", "once", "by heads")},
    "each": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), {"accumulate": 2}),
    "quantized": (mp.MeshSpec(fsdp=8), mp.fsdp(quantize="int8"), {}),
}
EACH = [pytest.param(FSDP_TP, id="fsdp, tensor")]
EACH += [pytest.param(case, id=name, marks=pytest.mark.matrix) for name, case in GRID.items()]
# Without the second case: if a rule replicates keys, XLA shards the gradient of their weight over `tensor`.
COMPILED = [EACH[0], *EACH[2:]]
LATENT = LatentAttention(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8)

RINGS = {
    "context, tensor": (mp.MeshSpec(context=4, tensor=2), mp.ddp() | mp.context_parallel() | mp.tensor_parallel(), {}),
    "keys whole": (
        mp.MeshSpec(context=2, tensor=4), mp.ddp() | mp.context_parallel() | mp.tensor_parallel() | KEYS_WHOLE, {}
    ),
    "latent": (mp.MeshSpec(fsdp=4, context=2), mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel(), {}),
    "once": (
        mp.MeshSpec(fsdp=4, context=2), mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel(),
        {"accumulate": 2, "reduce_gradients": "once"},
    ),
}  # fmt: skip


def config(attention, **changes):
    sizes = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 8, "num_kv_heads": 2, "mlp_dim": 64}
    return TransformerConfig(**{**sizes, "head_dim": 8, "attention": attention, **changes})


def batch():
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, SEQ + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize("case", EACH)
def test_given_own_rows_and_heads_it_is_the_same(monkeypatch, case):
    given = set()

    def attention(q, k, v, *, scale=None, **options):
        assert set(options.values()) == {None}
        given.add((q.shape[2], k.shape[2]))
        return cached_attention(q, k, v, first_position=0, scale=scale)

    monkeypatch.setitem(KERNELS, "cudnn", dataclasses.replace(KERNELS["cudnn"], attend=attention))
    (loss, params), (expected_loss, expected) = (after_a_step(config(name), case, batch()) for name in ("cudnn", "xla"))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # Rounding of weights to a byte may fall the other way for a sum in another order.
    atol = 3e-3 if "quantize" in str(case[1]) else 2e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), params, expected)
    sizes = case[0]
    ranks = sizes["tensor"] * sizes.get("context", 1)
    assert given == {(8 // ranks, max(2 // ranks, 1))}


@pytest.mark.parametrize("case", [FSDP_TP, RINGS["once"]], ids=["all positions", "ring"])
def test_cudnn_rejects_cpu_devices(case):
    with pytest.raises(mp.MeshparError, match="mesh has CPU devices.*meshpar\\[cuda12\\].*model.attention=blockwise"):
        after_a_step(config("cudnn"), case, batch())


@pytest.mark.parametrize(("window", "is_packed"), [(3, False), (None, True)])
def test_windows_and_documents_with_another_implementation_of_the_library(monkeypatch, window, is_packed):
    def attention(*args, implementation, **options):
        assert implementation == "cudnn"
        return library(*args, implementation="xla", **options)

    library = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4)).astype(np.float32)
    segments = np.arange(8)[None] // 3 if is_packed else None
    attend = functools.partial(causal_attention, segments_BT=segments, window=window)
    found, expected = jax.jit(lambda *x: [attend(*x, implementation=name) for name in ("cudnn", "xla")])(q, k, v)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_unsupported_cudnn_shapes_are_errors_with_a_fix(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("The head dim must be <= 128 and a multiple of 8, but got 7.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    q = np.ones((1, 4, 2, 7), np.float32)
    with pytest.raises(mp.MeshparError, match=r"float32\[1, 4, 2, 7\].*multiple of 8.*attention=\"blockwise\""):
        causal_attention(q, q, q, implementation="cudnn")


@pytest.mark.parametrize("case", cases(grid=RINGS))
def test_its_tiles_go_round_the_ring(monkeypatch, case):
    """A stand-in of the kernel's signature, and plain attention on one device."""
    given = set()

    def forward(q, k, v, **how):
        given.add((q.shape[1:3], k.shape[1]))
        return STAND_IN.forward(q, k, v, **how)

    monkeypatch.setattr(cudnn, "TILES", STAND_IN._replace(forward=forward))
    changes = {"num_kv_heads": 8, "head_dim": 16, "latent": LATENT} if case == "latent" else {}
    spec, _, _ = RINGS[case]
    found = after_a_step(config("cudnn", **changes), RINGS[case], batch())
    assert_equal(found, after_a_step(config("xla", **changes), MESHES["one"], batch()))
    tensor, ranks = spec.get("tensor", 1), spec["context"]
    assert given == {((8 // tensor, SEQ // ranks // 2), max((8 if changes else 2) // tensor, 1))}


# Compiled for GPUs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pod_with_cudnn(pod):
    if importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip("compiles cuDNN's attention for GPUs, which needs `pip install meshpar[cudnn]`")
    return pod


def explained(pod, cfg, spec, strategy, options, shape=(16, 256), cluster="h100:1x8", arrays=("inputs", "targets")):
    precision = mp.Precision(compute="bfloat16")
    state = mp.abstract_state(
        cfg.build(), optax.adam(1e-3), mesh=spec.abstract(math.prod(spec.values())), strategy=strategy
    )
    step = mp.train_step(next_token_loss, precision=precision, remat="full", **options)
    programs = []

    class Kept:
        def compile(self, *args, **kwargs):
            programs.append(pod.compile(*args, **kwargs))
            return programs[-1]

    tokens = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in arrays}
    return mp.explain(step, state, tokens, cluster, pod=Kept(), advise=False), programs[0]


@pytest.mark.pod
@pytest.mark.parametrize("case", COMPILED)
def test_cudnn_program_has_the_kernel_and_expected_collectives(pod_with_cudnn, case):
    report, program = explained(pod_with_cudnn, config("cudnn"), *case)
    targets = re.findall(r'custom_call_target="__cudnn\$(\w+)"', program.text)
    assert set(targets) == {"fmhaSoftmax", "fmhaSoftmaxBackward"}
    scores = [one.shape for one in work.largest_temporaries(program.module, 1000) if "256,256]" in one.shape]
    assert not scores
    assert not report.matching.unexpected
    assert not report.matching.missing
    assert not work.custom_calls(program.module)


@pytest.mark.pod
def test_documents_are_a_mask_of_the_kernel(pod_with_cudnn):
    report, program = explained(pod_with_cudnn, config("cudnn"), *FSDP_TP, arrays=PACKED_FIELDS)
    targets = re.findall(r'custom_call_target="__cudnn\$(\w+)"', program.text)
    assert set(targets) == {"fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"}
    assert not report.matching.unexpected
    assert not report.matching.missing


@pytest.mark.pod
def test_ring_of_cudnn_tiles_is_compute_bound(pod_with_cudnn):
    """Two layers of Llama 3.1 8B, 131,072 tokens on 64 H100: both kernels, no array of scores, messages hidden."""
    cfg = dataclasses.replace(llama3_8b(attention="cudnn"), num_layers=2)
    strategy = mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel()
    spec = mp.MeshSpec(fsdp=8, context=8)
    report, program = explained(pod_with_cudnn, cfg, spec, strategy, {}, (8, 131072), "h100:8x8")
    # A rank has 3 tiles of local keys and 2 of each of 7 other ranks, in two layers.
    tiles = 2 * (3 + 2 * 7)
    assert report.compute.library_calls == {"__cudnn$fmhaSoftmax": 2 * tiles, "__cudnn$fmhaSoftmaxBackward": tiles}
    assert not [one for one in work.largest_temporaries(program.module, 1000) if "8192,8192]" in one.shape]
    assert report.compute.bound == "compute"
    assert report.overlap.per_axis["context"] > 0.9
    assert not report.matching.unexpected
    assert not report.matching.missing


@pytest.mark.pod
def test_latent_heads_are_padded_to_one_width(pod_with_cudnn):
    _, program = explained(pod_with_cudnn, config("cudnn", num_kv_heads=8, head_dim=16, latent=LATENT), *FSDP_TP)
    calls = re.findall(r'= \(bf16\[(\d+),(\d+),(\d+),(\d+)\].*__cudnn\$fmhaSoftmax"', program.text)
    assert {call[1:] for call in calls} == {("4", "256", "16")}
