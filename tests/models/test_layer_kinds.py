"""Options of the layers of other families: equal on any mesh, with a cache, and in counts of FLOPs."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect.model_flops import model_flops
from meshpar.models import (
    LayerKind,
    LongRope,
    QueryScaling,
    RopeScaling,
    TransformerConfig,
    generate,
    next_token_loss,
)
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

KINDS = (LayerKind(window=3), LayerKind(window=3, rope_theta=50.0), LayerKind(has_rope=False))
SWITCHES = {
    "kinds": {"layer_pattern": KINDS, "qkv_bias": True, "out_bias": True, "attention_scale": 0.4},
    "gemma": {
        "layer_pattern": (LayerKind(window=3, rope_theta=50.0), LayerKind()), "norm_placement": "both",
        "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 4.0, "rope_linear": 2.0, "qk_norm": True,
        "tied_embeddings": True, "attention_cap": 2.0, "logits_cap": 3.0,
    },
    "olmo": {"norm_placement": "after", "qk_norm": "all_heads", "residual_scale": 0.5, "logits_divisor": 2.0},
    "phi": {
        "head_dim": 8, "rotary_dim": 4, "rope_long": LongRope(
            short_factor=(1.0, 2.0), long_factor=(2.0, 3.0), original_seq_len=8, rotated_factor=1.2),
    },
}  # fmt: skip


def config(**changes):
    sizes = {"vocab_size": 32, "num_layers": 4, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**{**sizes, "mlp_dim": 16, **changes})


@functools.cache
def expected(name):
    """Return the loss and the parameters after a step on a single device."""
    return after_a_step(config(**SWITCHES[name], attention="xla"), MESHES["one"], packed())


@pytest.mark.parametrize(
    ("name", "form", "case"),
    cases(grid=itertools.product(SWITCHES, ("xla", "blockwise"), MESHES)),
)
def test_a_step_equals_a_single_device(name, form, case):
    assert_equal(after_a_step(config(**SWITCHES[name], attention=form), MESHES[case], packed()), expected(name))


@pytest.mark.parametrize("name", cases("kinds", grid=SWITCHES))
def test_decoding_with_a_cache_equals_the_full_sequence(name):
    switches = {key: value for key, value in SWITCHES[name].items() if key != "rope_long"}  # depends on the length
    assert_decodes_like_full_sequence(config(**switches), prompt_len=5)


def test_long_factors_depend_on_the_segment_only():
    """A document of 5 tokens alone, in a padded row, and in a row with a document of 20, for `original_seq_len=10`."""
    long = LongRope(short_factor=(1.0, 2.0), long_factor=(2.0, 9.0), original_seq_len=10)
    cfg = config(rope_long=long, rope_theta=10.0, attention="xla", num_layers=1)
    tokens, params = np.arange(25, dtype=np.int32)[None], random_params(cfg)
    segments = np.repeat([1, 2], [5, 20])[None].astype(np.int32)
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        logits = jax.jit(lambda tokens, **options: cfg.build().bind(params, {})(tokens, **options))
        short, longer, together = logits(tokens[:, :5]), logits(tokens[:, 5:]), logits(tokens, segments=segments)
        padded = logits(np.pad(tokens[:, :5], [(0, 0), (0, 20)]), segments=np.where(segments == 1, 1, 0))
    np.testing.assert_allclose(padded[:, :5], short, atol=2e-6)
    np.testing.assert_allclose(together, np.concatenate([short, longer], axis=1), atol=2e-6)


@pytest.mark.parametrize("prompt_len", cases(7, grid=[7, 10, 11]))
def test_greedy_tokens_equal_full_passes_across_the_switch_of_factors(prompt_len):
    long = LongRope(short_factor=(1.0, 1.0), long_factor=(4.0, 40.0), original_seq_len=10)
    cfg = config(rope_long=long, rope_theta=10.0, attention="xla", num_layers=2)
    params, num_tokens = random_params(cfg), 8
    prompt = np.random.default_rng(0).integers(0, 32, (8, prompt_len), dtype=np.int32)
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        model = cfg.build().bind(params, {})
        options = {"config": cfg, "num_tokens": num_tokens, "temperature": 0, "key": jax.random.key(0)}
        tokens = np.asarray(jax.jit(lambda prompt: generate(model, prompt, **options))(prompt))
        short, longer = (np.asarray(jax.jit(model)(tokens[:, :length])).argmax(-1) for length in (10, prompt_len + 7))
    expected = np.concatenate([short, longer[:, 10:]], axis=1)[:, prompt_len - 1 :]
    np.testing.assert_array_equal(tokens[:, prompt_len:], expected)


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


@pytest.mark.call_stacks
@pytest.mark.parametrize(
    ("name", "case"),
    cases(
        grid=itertools.product(SWITCHES, ("fsdp|tensor", "stages", "ring", "by heads", "remat")),
    ),
)  # fmt: skip
def test_expected_collectives_match(name, case):
    spec, strategy, options = MESHES[case]
    state = mp.abstract_state(config(**SWITCHES[name]).build(), optax.sgd(1.0), mesh=mesh_of(spec), strategy=strategy)
    batch = {key: jax.ShapeDtypeStruct((16, 1024), np.int32) for key in ("inputs", "targets")}
    report = mp.explain(mp.train_step(next_token_loss, **options), state, batch)
    assert report.is_as_expected, str(report)
    assert not report.matching.missing


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"layer_pattern": [LayerKind()]}, "wrong-type", "layer_pattern"),
        ({"layer_pattern": KINDS, "attention_window": 3}, "conflict", "attention_window"),
        ({"query_scaling": QueryScaling()}, "conflict", "query_scaling"),
        ({"qk_l2_norm": True, "layer_pattern": (LayerKind(has_rope=False),)}, "conflict", "qk_l2_norm"),
        ({"attention_scale": 0.0}, "out-of-range", ""),
        ({"rotary_dim": 6}, "out-of-range", "rotary_dim"),
        ({"rope_long": LongRope(short_factor=(1.0,), long_factor=(1.0,), original_seq_len=8)}, "wrong-shape", "rope_l"),
        ({"rope_linear": 2.0, "rope_scaling": RopeScaling()}, "conflict", "rope_linear"),
        ({"qk_norm": "heads"}, "not-a-bool", ""),
        ({"norm_placement": "none"}, "unknown-choice", ""),
        ({"activation": "gelu"}, "unknown-choice", ""),
        ({"logits_divisor": 0.0}, "out-of-range", ""),
        ({"qkv_bias": 1}, "not-a-bool", ""),
    ],
)
def test_config_rejects(change, code, where):
    with raises(code, f"TransformerConfig({where}" if where else "TransformerConfig"):
        config(**change)
