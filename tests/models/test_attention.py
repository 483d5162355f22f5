"""The choice of an implementation of attention by `attention="auto"`."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.hardware.compile_target import compiled_for
from meshpar.models import attention
from meshpar.models.attention import KERNELS, AttentionQuery, cached_attention, causal_attention, choose_attention

HOPPER, AMPERE = (9, 0), (8, 0)
CASES = {
    "bfloat16": ({}, HOPPER, "cudnn", "a fused kernel"),
    "window": ({"window": True}, AMPERE, "cudnn", ""),
    "packed": ({"segments": True}, HOPPER, "cudnn", ""),
    "packed, odd": ({"segments": True, "seq_len": 33}, HOPPER, "tokamax", "even length"),
    "float32": ({"dtype": "float32"}, HOPPER, "blockwise", "queries are float32"),
    "large heads": ({"head_dim": 256}, HOPPER, "cudnn", ""),
    "large heads on Ampere": ({"head_dim": 256}, AMPERE, "tokamax", "at most 128"),
    "odd heads": ({"head_dim": 100}, HOPPER, "blockwise", "100 dimensions"),
    "cap": ({"cap": True}, HOPPER, "tokamax", "attention_cap"),
    "sinks": ({"sinks": True}, HOPPER, "blockwise", "attention_sinks"),
    "ring": ({"ring": True}, HOPPER, "cudnn", ""),
    "ring with sinks": ({"ring": True, "sinks": True}, HOPPER, "cudnn", ""),
    "ring with a window": ({"ring": True, "window": True}, HOPPER, "blockwise", "log-sum-exp"),
    "Volta": ({}, (7, 0), "blockwise", "compute capability 8.0"),
}


@pytest.fixture
def has_libraries(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(attention.cudnn, "missing_cudnn", lambda: "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "tokamax" else find_spec(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("has_libraries")
def test_auto_takes_the_first_kernel_that_supports_the_call(name):
    options, capability, expected, reason = CASES[name]
    choice = choose_attention(AttentionQuery(**options), "cuda", capability)
    assert choice.implementation == expected
    assert reason in choice.why


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_auto_is_blockwise_without_an_nvidia_gpu(platform):
    choice = choose_attention(AttentionQuery(), platform, HOPPER)
    assert choice.implementation == "blockwise"
    assert platform in choice.why


def test_auto_is_blockwise_if_the_libraries_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(attention.cudnn, "missing_cudnn", lambda: "cuDNN is not installed: pip install it")
    choice = choose_attention(AttentionQuery(), "cuda", HOPPER)
    assert choice.implementation == "blockwise"
    assert "cuDNN is not installed: pip install it; tokamax is not installed" in choice.why


def test_auto_uses_the_devices_of_the_trace(monkeypatch):
    """A stand-in for cuDNN's kernel, which a CPU cannot trace."""
    kernel = dataclasses.replace(KERNELS["cudnn"], attend=lambda q, k, v, **_: q + 1)
    monkeypatch.setattr(attention.cudnn, "missing_cudnn", lambda: "")
    monkeypatch.setattr(attention, "KERNELS", {**KERNELS, "cudnn": kernel})
    q = jnp.ones((1, 8, 2, 64), jnp.bfloat16)

    def traced(**options):
        return str(jax.make_jaxpr(lambda q: causal_attention(q, q, q, **options))(q))

    with compiled_for("cuda", HOPPER):
        assert traced(implementation="auto") == traced(implementation="cudnn")
    assert traced(implementation="auto") == traced(implementation="blockwise") != traced(implementation="cudnn")


def test_step_and_report_name_the_choice(mesh8):
    config = mp.models.TransformerConfig(
        vocab_size=64, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
    )
    batch = {name: jax.ShapeDtypeStruct((8, 8), jnp.int32) for name in ("inputs", "targets")}
    state = mp.abstract_state(config.build(), mp.optim.muon(1e-3), mesh=mesh8, strategy=mp.fsdp())
    step = mp.train_step(mp.models.next_token_loss)
    assert step.kernels(state, batch)["attention"].implementation == "blockwise"
    named = mp.abstract_state(
        dataclasses.replace(config, attention="blockwise").build(), mp.optim.muon(1e-3), mesh=mesh8, strategy=mp.fsdp()
    )
    assert step.kernels(named, batch)["attention"].is_named
    assert step.lower(state, batch).as_text() == step.lower(named, batch).as_text()
    report = mp.explain(step, state, batch)
    assert report.to_json()["kernels"]["attention"]["implementation"] == "blockwise"
    assert "attention: blockwise (cuDNN needs an NVIDIA GPU" in str(report)


def test_reference_has_the_values_of_the_default():
    q = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
    expected = cached_attention(q, q, q, first_position=0)
    assert jnp.allclose(causal_attention(q, q, q, implementation="auto"), expected, atol=1e-5)
