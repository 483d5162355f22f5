"""Sharded equals single-device: five Adam steps of a decoder under every strategy, for NNX, Linen and functions.

Float64 shows that the mathematics is the same: losses and every parameter to 1e-9, though sums over devices are taken
in another order. Float32 is what people run: losses to 1e-5.
"""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from tests.equal import VOCAB, assert_same, mesh_of, model_of, token_batches, train
from tests.grid import cases

ROWS, SEQ = 16, 8

CASES = {
    "ddp": (mp.MeshSpec(data=8), mp.ddp(), {}),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(), {}),
    "zero2": (mp.MeshSpec(fsdp=8), mp.zero2(), {}),
    "zero3": (mp.MeshSpec(fsdp=8), mp.zero3(), {}),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), {}),
    "tensor": (mp.MeshSpec(data=4, tensor=2), mp.tensor_parallel(), {}),
    "tensor+sequence": (mp.MeshSpec(data=4, tensor=2), mp.tensor_parallel(sequence=True), {}),
    "fsdp|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {}),
    "fsdp|tensor+sequence": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    "hsdp|tensor": (mp.MeshSpec(data=2, fsdp=2, tensor=2), mp.hsdp() | mp.tensor_parallel(), {}),
    "zero1|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.zero1() | mp.tensor_parallel(), {}),
    "fsdp|tensor|accumulate": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {"accumulate": 2}),
    "fsdp|tensor|accumulate once": (
        mp.MeshSpec(fsdp=4, tensor=2),
        mp.fsdp() | mp.tensor_parallel(),
        {"accumulate": 2, "reduce_gradients": "once"},
    ),
    "zero2|accumulate": (mp.MeshSpec(fsdp=8), mp.zero2(), {"accumulate": 2}),
    # Keys have two heads, for four ranks.
    "fsdp|context by heads": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel(kind="all-to-all"), {}),
    "fsdp|remat": (mp.MeshSpec(fsdp=8), mp.fsdp(), {"remat": "full"}),
}


SIZES = {
    "vocab_size": VOCAB, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "mlp_dim": 32,
}  # fmt: skip


def five_steps(framework, dtype, spec, strategy, options, start=None, **fields):
    cfg = TransformerConfig(**SIZES, param_dtype=dtype, **fields)
    return train(
        model_of(framework, cfg, ROWS, SEQ), token_batches(ROWS, SEQ, 5), spec, strategy, start=start, **options
    )


@functools.cache
def single_device(framework, dtype):
    return five_steps(framework, dtype, mp.MeshSpec(), mp.ddp(), {})


SPARED = ("zero2", "tensor", "tensor+sequence", "fsdp|tensor", "hsdp", "zero2|accumulate")
"""Run with NNX alone: the other decoders differ from it in their leaves, not in the step."""
ROWS_OF = [
    (framework, case) for framework in ("nnx", "linen", "functions") for case in CASES
    if framework == "nnx" or case not in SPARED
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "case"),
    cases(
        ("nnx", "fsdp|tensor|accumulate once"),
        grid=ROWS_OF,
    ),
)
def test_float64_losses_and_parameters(framework, case):
    with jax.enable_x64(True):
        expected = single_device(framework, "float64")
        found = five_steps(framework, "float64", *CASES[case], start=expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    assert_same(found.params, expected.params, atol=1e-9)
    assert {x.dtype for x in found.params.values()} == {np.dtype(np.float64)}


CONTEXTS = {
    "set_mesh(own)": lambda spec: jax.set_mesh(mesh_of(spec)),
    "set_mesh(foreign)": lambda spec: jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))),
    "explicit": lambda spec: jax.set_mesh(mesh_of(spec)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("framework", "case"), ROWS_OF)
def test_float64_in_contexts_of_jax_and_on_explicit_axes(framework, case, context):
    spec, strategy, options = CASES[case]
    spec = spec.replace(axis_types="explicit" if context == "explicit" else "auto")
    with jax.enable_x64(True):
        expected = single_device(framework, "float64")
        with CONTEXTS[context](spec):
            found = five_steps(framework, "float64", spec, strategy, options, start=expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    assert_same(found.params, expected.params, atol=1e-9)


STAGES = mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-h1")
CHUNKED = {
    **CASES,
    "context ring": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel(), {}),
    "stages": (mp.MeshSpec(stage=2, fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel() | STAGES, {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.parametrize(("framework", "tied"), [("nnx", True), ("linen", False)])
def test_float64_with_logits_in_chunks(framework, tied, case):
    """Against whole logits on one device. A rank's part is filled up: six of 32, or of 16, are no divisor."""
    with jax.enable_x64(True):
        expected = five_steps(framework, "float64", mp.MeshSpec(), mp.ddp(), {}, tied_embeddings=tied)
        spec, strategy, options = CHUNKED[case]
        found = five_steps(
            framework, "float64", spec, strategy, options, expected.start, tied_embeddings=tied, vocab_chunk=6
        )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    assert_same(found.params, expected.params, atol=1e-9)
    accuracies = ([one["accuracy"] for one in run.metrics] for run in (found, expected))
    np.testing.assert_allclose(*accuracies, rtol=1e-12)


EXPERTS = {"moe": MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=32)}
ON_TYPES = {
    **{name: (*row, {}) for name, row in CHUNKED.items()},
    "experts": (mp.MeshSpec(fsdp=2, expert=4), mp.fsdp() | mp.expert_parallel(), {}, EXPERTS),
    "chunked": (*CASES["fsdp|tensor"], {"vocab_chunk": 6}),
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "types"), cases(("context ring", "all"), grid=itertools.product(ON_TYPES, ("all", "fsdp alone")))
)
def test_explicit_axes_run_the_program_of_auto_ones(case, types):
    """So they send the same, promise the same, and give the same numbers."""
    spec, strategy, options, fields = ON_TYPES[case]
    texts = []
    for one in (spec, spec.replace(axis_types="explicit" if types == "all" else {"fsdp": "explicit"})):
        model = TransformerConfig(**SIZES, **fields).build()
        state = mp.abstract_state(model, optax.adam(1e-2), mesh=mesh_of(one), strategy=strategy)
        lowered = mp.train_step(next_token_loss, **options).lower(state, token_batches(ROWS, SEQ, 1)[0])
        texts.append(lowered.as_text())
        kinds = {x.sharding.mesh.axis_types for x in jax.tree.leaves((state, lowered.out_info))}
        assert kinds == {one.axis_types}
    assert texts[0] == texts[1]


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_bfloat16_compute_follows_float32(framework):
    """The whole run in bfloat16 compute: 8 bits of mantissa, five steps; the losses agree to a percent."""
    precision = mp.Precision(params="float32", compute="bfloat16")
    spec, strategy, _ = CASES["fsdp|tensor+sequence"]
    found = five_steps(framework, "float32", spec, strategy, {"precision": precision})
    np.testing.assert_allclose(found.losses, single_device(framework, "float32").losses, rtol=1e-2)
    assert {x.dtype for x in found.params.values()} == {np.dtype(np.float32)}
