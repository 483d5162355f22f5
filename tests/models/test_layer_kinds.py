"""Layers with different windows and rotary embeddings: equal on any mesh, with a cache, and in counts of FLOPs."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect.model_flops import model_flops
from meshpar.models import LayerKind, TransformerConfig, next_token_loss
from meshpar.models.sampling import empty_cache
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.models.test_attention_forms import MESHES, after_a_step, assert_equal, packed
from tests.models.test_transformer import random_params

KINDS = (LayerKind(window=3), LayerKind(window=3, rope_theta=50.0), LayerKind(has_rope=False))
SWITCHES = {"layer_pattern": KINDS, "qkv_bias": True, "out_bias": True, "attention_scale": 0.4}


def config(**changes):
    sizes = {"vocab_size": 32, "num_layers": 4, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**{**sizes, "mlp_dim": 16, **changes})


@pytest.fixture(scope="module")
def expected():
    """Loss and parameters after a step on a single device."""
    return after_a_step(config(**SWITCHES, attention="xla"), MESHES["one"], packed())


@pytest.mark.parametrize(
    ("form", "case"),
    cases(
        ("blockwise", "stages"), ("blockwise", "ring"),
        grid=itertools.product(("xla", "blockwise"), MESHES),
    ),
)  # fmt: skip
def test_a_step_equals_a_single_device(form, case, expected):
    assert_equal(after_a_step(config(**SWITCHES, attention=form), MESHES[case], packed()), expected)


def test_decoding_with_a_cache_equals_the_full_sequence():
    cfg = config(**SWITCHES)
    model, params, tokens = cfg.build(), random_params(cfg), packed()["inputs"][:2]
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        full = jax.jit(lambda tokens: model.bind(params, {})(tokens))(tokens)
        step = jax.jit(lambda tokens, cache: model.bind(params, {})(tokens, cache=cache))
        cache = empty_cache(cfg, 2, tokens.shape[1], np.float32)
        for part in (slice(0, 5), *(slice(i, i + 1) for i in range(5, tokens.shape[1]))):
            logits, cache = step(tokens[:, part], cache)
            np.testing.assert_allclose(logits, full[:, part], atol=1e-5)  # float32, sums in another order


def traced(cfg):
    """Return the jaxpr of a step, without addresses."""
    state = mp.abstract_state(cfg.build(), optax.sgd(1.0), mesh=mesh_of(mp.MeshSpec()), strategy=mp.ddp())
    batch = {key: jax.ShapeDtypeStruct((2, 8), np.int32) for key in ("inputs", "targets")}
    return re.sub(r"0x\w+", "", str(jax.make_jaxpr(mp.train_step(next_token_loss))(state, batch)))


def test_equal_kinds_have_the_program_of_a_single_window():
    assert traced(config(layer_pattern=(LayerKind(window=3),) * 2)) == traced(config(attention_window=3))


def test_a_choice_of_windows_saves_no_arrays_of_other_branches():
    def saved(cfg):
        model, params = cfg.build(), random_params(cfg)
        with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
            backward = jax.eval_shape(lambda p: jax.vjp(lambda p: model.bind(p, {})(packed()["inputs"]), p)[1], params)
        return sorted(x.shape for x in jax.tree.leaves(backward) if x.size > 4 * 2)

    assert saved(config(layer_pattern=(LayerKind(window=3), LayerKind()))) == saved(config(attention_window=3))


def flops_of(**changes):
    state = mp.abstract_state(config(**changes).build(), optax.sgd(1.0), mesh=mesh_of(mp.MeshSpec()), strategy=mp.ddp())
    batch = {key: jax.ShapeDtypeStruct((1, 2048), np.int32) for key in ("inputs", "targets")}
    return model_flops(mp.train_step(next_token_loss), state, batch).step


def test_flops_of_mixed_windows_are_the_mean_over_layers():
    pattern = (LayerKind(window=512), LayerKind(window=512), LayerKind(window=512), LayerKind())
    mean = (3 * flops_of(attention_window=512) + flops_of()) / 4
    assert flops_of(layer_pattern=pattern) == mean < flops_of()


@pytest.mark.parametrize("case", cases("fsdp|tensor", grid=("fsdp|tensor", "stages", "ring", "by heads", "remat")))
def test_expected_collectives_match(case):
    spec, strategy, options = MESHES[case]
    state = mp.abstract_state(config(**SWITCHES).build(), optax.sgd(1.0), mesh=mesh_of(spec), strategy=strategy)
    batch = {key: jax.ShapeDtypeStruct((16, 16), np.int32) for key in ("inputs", "targets")}
    report = mp.explain(mp.train_step(next_token_loss, **options), state, batch)
    assert report.is_as_expected, str(report)
    assert not report.matching.missing


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"layer_pattern": [LayerKind()]}, "wrong-type", "layer_pattern"),
        ({"layer_pattern": KINDS, "attention_window": 3}, "conflict", "attention_window"),
        ({"attention_scale": 0.0}, "out-of-range", ""),
        ({"qkv_bias": 1}, "not-a-bool", ""),
    ],
)
def test_config_rejects(change, code, where):
    with raises(code, f"TransformerConfig({where}" if where else "TransformerConfig"):
        config(**change)
