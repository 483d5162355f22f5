"""Five Adam steps of a decoder under each strategy equal a single device, for NNX, Linen and functions.

In float64, losses and parameters agree to 1e-9 although sums over devices have a different order. In float32, losses
agree to 1e-5.
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
from tests.errors import raises
from tests.grid import cases

ROWS, SEQ = 16, 8
TP, TP_SEQUENCE = mp.tensor_parallel(), mp.tensor_parallel(sequence=True)
CP, HEADS, BOTH = mp.context_parallel(), mp.context_parallel(kind="all-to-all"), ("fsdp", "context")
REPLICATED_KEYS = mp.Rules(kv_heads=None, act_kv_heads=None)
TENSOR_FIRST = mp.Rules(seq=("tensor", "context"), norm_seq=("tensor", "context"))
REMAT, ONCE = {"remat": "full"}, {"accumulate": 2, "reduce_gradients": "once"}
ONCE_DOTS = {**ONCE, "remat": "all_dots"}
CASES = {
    "ddp": (mp.MeshSpec(data=8), mp.ddp(), {}),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(), {}),
    "zero2": (mp.MeshSpec(fsdp=8), mp.zero2(), {}),
    "zero3": (mp.MeshSpec(fsdp=8), mp.zero3(), {}),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), {}),
    "tensor": (mp.MeshSpec(data=4, tensor=2), TP, {}),
    "tensor+sequence": (mp.MeshSpec(data=4, tensor=2), TP_SEQUENCE, {}),
    "fsdp|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | TP, {}),
    "fsdp|tensor+sequence": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | TP_SEQUENCE, {}),
    "hsdp|tensor": (mp.MeshSpec(data=2, fsdp=2, tensor=2), mp.hsdp() | TP, {}),
    "zero1|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.zero1() | TP, {}),
    "fsdp|tensor|accumulate": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | TP, {"accumulate": 2}),
    "fsdp|tensor|accumulate once": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | TP, ONCE),
    "zero2|accumulate": (mp.MeshSpec(fsdp=8), mp.zero2(), {"accumulate": 2}),
    "fsdp|remat": (mp.MeshSpec(fsdp=8), mp.fsdp(), {"remat": "full"}),
    "context 2": (mp.MeshSpec(context=2), mp.ddp() | CP, {}),
    "context 4": (mp.MeshSpec(context=4), mp.ddp() | CP, {}),
    "fsdp|context": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | CP, {}),
    "fsdp over both": (mp.MeshSpec(fsdp=2, context=2), mp.fsdp(axis=BOTH) | CP, {}),
    "context|tensor": (mp.MeshSpec(context=2, tensor=2), mp.ddp() | CP | TP, {}),
    "context|tensor+sequence": (mp.MeshSpec(context=2, tensor=2), mp.ddp() | TP_SEQUENCE | CP, {}),
    "tensor before context": (mp.MeshSpec(context=2, tensor=2), mp.ddp() | CP | TENSOR_FIRST, {}),
    "all|context": (mp.MeshSpec(fsdp=2, context=2, tensor=2), mp.fsdp(axis=BOTH) | CP | TP_SEQUENCE, REMAT),
    "context|replicated keys": (mp.MeshSpec(context=2, tensor=4), mp.ddp() | CP | TP | REPLICATED_KEYS, {}),
    "context|accumulate": (mp.MeshSpec(fsdp=2, context=2), mp.fsdp() | CP, {"accumulate": 2}),
    "context|accumulate once": (mp.MeshSpec(fsdp=2, context=2), mp.fsdp(axis=BOTH) | CP, ONCE_DOTS),
    "heads 2": (mp.MeshSpec(context=2), mp.ddp() | HEADS, {}),
    "heads|repeated keys": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | HEADS, {}),  # two key heads, four ranks
    "heads|replicated keys": (mp.MeshSpec(context=2, tensor=2), mp.ddp() | TP | HEADS | REPLICATED_KEYS, {}),
    "heads|tensor": (mp.MeshSpec(tensor=2, context=2), mp.ddp() | HEADS | TP, {}),
    "all|heads": (mp.MeshSpec(fsdp=2, context=2, tensor=2), mp.fsdp(axis=BOTH) | HEADS | TP_SEQUENCE, REMAT),
    "heads|accumulate": (mp.MeshSpec(fsdp=2, context=2), mp.fsdp() | HEADS, {"accumulate": 2}),
    "heads|accumulate once": (mp.MeshSpec(fsdp=2, context=2), mp.fsdp(axis=BOTH) | HEADS, ONCE_DOTS),
}
NNX_ONLY = {
    "zero2", "tensor", "tensor+sequence", "fsdp|tensor", "hsdp", "zero2|accumulate", "context 2", "context 4",
    "fsdp|context", "context|tensor", "context|tensor+sequence", "tensor before context", "context|replicated keys",
    "context|accumulate", *(name for name in CASES if "heads" in name),
}  # fmt: skip
"""The other decoders differ in their leaves, not in the step."""
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


@pytest.mark.parametrize(
    ("framework", "case"),
    cases(
        ("nnx", "heads|accumulate once"),
        grid=[(f, case) for f in ("nnx", "linen", "functions") for case in CASES if f == "nnx" or case not in NNX_ONLY],
    ),
)
def test_float64_losses_and_parameters(framework, case):
    with jax.enable_x64(True):
        expected = single_device(framework, "float64")
        found = five_steps(framework, "float64", *CASES[case], start=expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    assert_same(found.params, expected.params, atol=1e-9)
    assert {x.dtype for x in found.params.values()} == {np.dtype(np.float64)}


STAGES = mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-h1")
CHUNKED = {
    **CASES,
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
    ("case", "types"), cases(("fsdp|context", "all"), grid=itertools.product(ON_TYPES, ("all", "fsdp alone")))
)
def test_explicit_axes_run_the_program_of_auto_ones(case, types):
    """They have the same collectives, expected collectives and results."""
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


@pytest.mark.matrix
def test_reduce_once_with_sharded_vocabulary_and_context():
    """The compiler of jax 0.12 would abort, so this is an error there."""
    spec, strategy = mp.MeshSpec(fsdp=2, context=2, tensor=2), mp.fsdp() | CP | TP
    if jax.__version_info__ >= (0, 12):
        with raises("unsupported-feature"):
            five_steps("nnx", "float32", spec, strategy, ONCE)
        strategy |= mp.Rules(vocab=None, act_vocab=None)
    found = five_steps("nnx", "float32", spec, strategy, ONCE)
    np.testing.assert_allclose(found.losses, single_device("nnx", "float32").losses, rtol=1e-5)
