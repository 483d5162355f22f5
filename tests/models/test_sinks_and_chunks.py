"""The decoders of GPT-OSS and Llama 4: equal results on any mesh and with a cache, and the expected collectives."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import LatentAttention, LayerKind, QueryScaling, TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.models.test_attention_forms import (
    MESHES,
    after_a_step,
    assert_decodes_like_full_sequence,
    assert_equal,
    packed,
)
from tests.models.test_transformer import random_params

GPT_OSS: dict[str, Any] = {
    "layer_pattern": (LayerKind(window=3), LayerKind()), "qkv_bias": True, "out_bias": True, "attention_sinks": True,
    "moe": MoEConfig(
        routing=Routing(num_experts=4, top_k=2), mlp_dim=16, has_biases=True, activation="clamped_swiglu"
    ),
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "layer_pattern": (LayerKind(chunk=5), LayerKind(chunk=5), LayerKind(has_rope=False)), "qk_l2_norm": True,
    "query_scaling": QueryScaling(interval=3, factor=0.5),
    "moe": MoEConfig(
        routing=Routing(num_experts=4, top_k=1, score="sigmoid", normalize=False), mlp_dim=16, shared_experts=1,
        gates_inputs=True,
    ),
}  # fmt: skip
MODELS = {"gpt-oss": GPT_OSS, "llama 4": LLAMA4}
ON_EXPERTS = {
    "experts": (mp.MeshSpec(fsdp=2, expert=2, tensor=2), mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel(), {}),
    **MESHES,
}


def config(**changes):
    sizes = {"vocab_size": 32, "num_layers": 3, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**{**sizes, "mlp_dim": 16, **changes})


@pytest.mark.parametrize(
    ("model", "case"),
    cases(grid=itertools.product(MODELS, ON_EXPERTS)),
)
def test_a_step_equals_a_single_device(model, case):
    kinds = {"num_layers": 2, "layer_pattern": MODELS[model]["layer_pattern"][-2:]}
    expected = after_a_step(config(**MODELS[model] | kinds, attention="xla"), MESHES["one"], packed())
    assert_equal(after_a_step(config(**MODELS[model] | kinds), ON_EXPERTS[case], packed()), expected)


@pytest.mark.parametrize("model", cases("llama 4", grid=MODELS))
def test_decoding_with_a_cache_equals_the_full_sequence(model):
    assert_decodes_like_full_sequence(config(**MODELS[model]), prompt_len=6)


@pytest.mark.parametrize("kinds", [(LayerKind(chunk=5),), (LayerKind(chunk=5), LayerKind(chunk=5, has_rope=False))])
def test_chunks_equal_separate_sequences(kinds):
    """Without rotary embeddings or with relative ones, a chunk has the logits of a sequence of its own."""
    cfg = config(layer_pattern=kinds)
    model, params, tokens = cfg.build(), random_params(cfg), packed()["inputs"][:2, :10]
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        logits = jax.jit(lambda tokens: model.bind(params, {})(tokens))
        both = logits(tokens)
        for part in (slice(0, 5), slice(5, 10)):
            np.testing.assert_allclose(both[:, part], logits(tokens[:, part]), atol=1e-5)


@pytest.mark.call_stacks
@pytest.mark.parametrize(
    ("model", "case"),
    cases(
        grid=itertools.product(MODELS, ("experts", "fsdp|tensor", "stages", "ring", "by heads", "remat")),
    ),
)
def test_expected_collectives_match(model, case):
    spec, strategy, options = ON_EXPERTS[case]
    state = mp.abstract_state(config(**MODELS[model]).build(), optax.sgd(1.0), mesh=mesh_of(spec), strategy=strategy)
    batch = {key: jax.ShapeDtypeStruct((16, 16), np.int32) for key in ("inputs", "targets")}
    report = mp.explain(mp.train_step(next_token_loss, **options), state, batch)
    # XLA merges some messages of this small model, which are then missing.
    assert report.is_as_expected, report.matching.unexpected


LATENT = LatentAttention(q_rank=None, kv_rank=8, nope_dim=2, rope_dim=2, v_dim=4)


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"layer_pattern": (LayerKind(chunk=2), LayerKind(chunk=3))}, "unsupported-feature", "layer_pattern"),
        ({"attention_sinks": True, "attention": "tokamax"}, "unsupported-feature", "attention_sinks"),
        ({"attention_sinks": True, "latent": LATENT, "num_kv_heads": 4}, "unsupported-feature", "attention_sinks"),
        ({"qk_l2_norm": True, "latent": LATENT, "num_kv_heads": 4}, "unsupported-feature", "latent"),
        ({"query_scaling": 0.1}, "wrong-type", "query_scaling"),
    ],
)
def test_config_rejects(change, code, where):
    with raises(code, f"TransformerConfig({where}="):
        config(**change)
