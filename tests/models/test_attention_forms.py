"""Rows of several sequences, windows and caps in the decoder: the same by every form of attention and strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import get_args

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.collectives import cudnn
from meshpar.data.rows import Windows
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.models.architecture import Attention
from meshpar.models.attention import KERNELS, KVCache
from meshpar.models.sampling import empty_cache
from meshpar.models.transformer import rope_of
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.models.by_hand import random_params

ROWS, SEQ = 16, 12
LATENT = LatentAttention(q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=6)
STAGES = mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-h1")
KEYS_WHOLE = mp.Rules(kv_heads=None, act_kv_heads=None, attn_kv_heads=None)
MESHES = {
    "one": (mp.MeshSpec(), mp.ddp(), {}),
    "fsdp|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    "keys whole": (mp.MeshSpec(fsdp=2, tensor=4), mp.fsdp() | mp.tensor_parallel() | KEYS_WHOLE, {}),
    "stages": (mp.MeshSpec(stage=2, fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel() | STAGES, {}),
    "once": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(),
             {"accumulate": 2, "reduce_gradients": "once"}),
    "ring": (mp.MeshSpec(fsdp=2, context=2, tensor=2),
             mp.fsdp() | mp.context_parallel() | mp.tensor_parallel(), {}),
    "by heads": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel(kind="all-to-all"), {}),
    "remat": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {"remat": "all_dots"}),
}  # fmt: skip


def config(**changes):
    sizes = {"vocab_size": 32, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**{**sizes, "mlp_dim": 16, "attention_window": 5, "attention_cap": 3.0, **changes})


def packed():
    """Rows of one to three sequences."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (ROWS, SEQ + 1), dtype=np.int32)
    segments = np.sort(rng.integers(0, 3, (ROWS, SEQ)), axis=1).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}


def after_a_step(cfg, case, batch):
    spec, strategy, options = case
    state = mp.init_state(cfg.build(), optax.sgd(1.0), mesh=mesh_of(spec), strategy=strategy, key=0)
    state, metrics = mp.train_step(next_token_loss, **options)(state, batch)
    return float(metrics["loss"]), jax.device_get(state.params)


def assert_decodes_like_full_sequence(cfg, *, prompt_len):
    """Decode a prompt and then token by token, and compare the logits with those of the full sequence."""
    model, params, tokens = cfg.build(), random_params(cfg), packed()["inputs"][:2]
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        full = jax.jit(lambda tokens: model.bind(params, {})(tokens))(tokens)
        step = jax.jit(lambda tokens, cache: model.bind(params, {})(tokens, cache=cache))
        cache = empty_cache(cfg, 2, tokens.shape[1], np.float32)
        for part in (slice(0, prompt_len), *(slice(i, i + 1) for i in range(prompt_len, tokens.shape[1]))):
            logits, cache = step(tokens[:, part], cache)
            np.testing.assert_allclose(logits, full[:, part], atol=1e-5)  # float32, sums in another order


def assert_equal(found, expected):
    """Single precision, sums in another order."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), found[1], expected[1])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("form", "case"), cases(("blockwise", "keys whole"), grid=itertools.product(("xla", "blockwise"), MESHES))
)
def test_step_equals_plain_attention_on_a_single_device(form, case):
    expected = after_a_step(config(), MESHES["one"], packed())
    assert_equal(after_a_step(config(attention=form), MESHES[case], packed()), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["fsdp|tensor", "ring"])
def test_latent_heads(case):
    changes = {"latent": LATENT, "num_kv_heads": 4, "head_dim": 8}
    expected = after_a_step(config(**changes), MESHES["one"], packed())
    assert_equal(after_a_step(config(attention="blockwise", **changes), MESHES[case], packed()), expected)


@pytest.mark.parametrize("case", cases(grid=[*MESHES]))
def test_sinks_match_a_single_device(case):
    """The gradients of the sinks are summed over examples, positions and devices."""
    expected = after_a_step(config(attention="xla", attention_sinks=True), MESHES["one"], packed())
    assert np.abs(expected[1]["layers"]["attention"]["sinks"]).min() > 1e-5
    assert_equal(after_a_step(config(attention_sinks=True), MESHES[case], packed()), expected)


def test_packed_sequences_have_the_logits_they_have_alone():
    """Positions restart in each sequence, and attention does not cross sequences."""
    cfg = config(attention="blockwise", attention_window=None)
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        model, tokens = cfg.build(), packed()["inputs"][:1]
        params = model.init(np.uint32([0, 1])).params
        decode = jax.jit(lambda tokens, segments=None: model.bind(params, {})(tokens, segments=segments))
        both = decode(tokens, np.int32([[7] * 5 + [3] * 7]))
        np.testing.assert_allclose(both[:, :5], decode(tokens)[:, :5], atol=2e-6)
        behind = np.concatenate([tokens[:, 5:], tokens[:, :5]], axis=1)
        np.testing.assert_allclose(both[:, 5:], decode(behind)[:, :7], atol=2e-6)


def test_rows_of_documents_have_the_loss_and_gradient_of_the_documents(monkeypatch):
    """`TextData` rows of several documents, and each document in its own row, without meshpar's segments.

    Plain attention with the mask of cuDNN's call replaces its kernel, which needs a GPU.
    """
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, implementation, **options: plain(*args, **options)
    )
    monkeypatch.setattr(cudnn, "cudnn_errors", lambda *arrays: contextlib.nullcontext())
    cfg = config(attention="xla", attention_cap=None, num_layers=1)
    tokens = np.r_[3, 9, 4, 0, 8, 7, 6, 5, 0, 2, 0, 11, 12].astype(np.uint8)
    row = Windows(tokens, SEQ, name="training set", separator_id=0).read(np.array([0]))
    alone = {name: np.zeros((4, SEQ), np.int32) for name in ("inputs", "targets", "weights")}
    for line, document in enumerate(([3, 9, 4, 0], [8, 7, 6, 5, 0], [2, 0], [11, 12])):
        length = len(document) - 1
        alone["inputs"][line, :length], alone["targets"][line, :length] = document[:-1], document[1:]
        alone["weights"][line, :length] = 1
    params = cfg.build().init(np.uint32([0, 1])).params

    def loss_and_gradient(attention, batch):
        def mean(params):
            model = dataclasses.replace(cfg, attention=attention).build().bind(params, {})
            loss, _ = next_token_loss(model, batch, None)
            return loss.total / loss.weight

        return jax.jit(jax.value_and_grad(mean))(params)

    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        expected = loss_and_gradient("xla", alone)
        for attention in ("xla", "blockwise", "cudnn"):
            found = loss_and_gradient(attention, row)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@functools.cache
def documents():
    """Return `TextData` rows of documents, and the loss and parameters after a step on a single device."""
    tokens = np.random.default_rng(0).integers(0, 5, ROWS * SEQ + 1).astype(np.uint8)
    rows = Windows(tokens, SEQ, name="training set", separator_id=0).read(np.arange(ROWS))
    return rows, after_a_step(config(attention="xla"), MESHES["one"], rows)


@pytest.mark.matrix
@pytest.mark.parametrize("case", cases("fsdp|tensor", grid=MESHES))
def test_rows_of_documents_match_a_single_device(case):
    rows, expected = documents()
    assert rows["segments"].max() > 1
    assert_equal(after_a_step(config(attention="blockwise"), MESHES[case], rows), expected)


@pytest.mark.parametrize(
    ("case", "options"), [("ring", "packed sequences and attention_window and attention_cap"), ("one", "attention_cap")]
)
def test_cudnn_rejects_options(case, options):
    batch = packed()
    if case == "one":
        del batch["segments"]
    with raises("unsupported-feature", 'TransformerConfig(attention="cudnn")') as error:
        after_a_step(config(attention="cudnn"), MESHES[case], batch)
    assert error.value.reason.endswith(f"does not support {options}")


def test_cudnn_rejects_sinks():
    batch = packed()
    del batch["segments"]
    with raises("unsupported-feature", 'TransformerConfig(attention="cudnn")'):
        after_a_step(config(attention="cudnn", attention_cap=None, attention_sinks=True), MESHES["one"], batch)


def test_cache_has_a_single_sequence():
    tokens, none = np.zeros((1, 2), np.int32), np.zeros((1, 1, 1, 1, 1), np.float32)
    with raises("conflict", "Transformer(segments=..., cache=...)"):
        rope_of(config(), tokens, None, KVCache(none, none, np.int32(0)), np.float32, tokens)


def test_every_implementation_has_a_table_entry():
    assert ("auto", *KERNELS) == get_args(Attention)
