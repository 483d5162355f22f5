"""Llama 4: the text model of multimodal releases, and unsupported configs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshpar.interop import to_hf
from meshpar.interop.hf import described
from tests.errors import raises
from tests.interop.folders import assert_same_params, folder_of, golden, read_single

KIND = "odd/llama4_text"
DOCUMENT = golden(KIND)[0]


def test_multimodal_releases_have_the_text_model(tmp_path):
    from safetensors.numpy import load_file, save_file

    plain, wrapped = folder_of(KIND, tmp_path / "plain"), folder_of(KIND, tmp_path / "wrapped")
    weights = load_file(wrapped / "model.safetensors")
    text = {f"language_model.{name}": x for name, x in weights.items()}
    save_file(text | {"vision_model.class_embedding": np.zeros(3, np.float32)}, wrapped / "model.safetensors")
    document = {"model_type": "llama4", "text_config": DOCUMENT, "vision_config": {}, "image_token_index": 3}
    (wrapped / "config.json").write_text(json.dumps(document))
    config, state = read_single(wrapped)
    expected_config, expected = read_single(plain)
    assert config == expected_config
    assert_same_params(state, expected)
    back = to_hf(state, config, tmp_path / "back", like=wrapped)
    assert json.loads((back / "config.json").read_text()) == DOCUMENT
    assert load_file(back / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"moe_layers": [1, 3]}, "unsupported-feature", "moe_layers"),
        ({"moe_layers": None, "interleave_moe_layer_step": 2}, "unsupported-feature", "interleave_moe_layer_step"),
        ({"num_experts_per_tok": 2}, "out-of-range", "config.json"),
        ({"layer_types": ["full_attention"] * 4}, "unsupported-feature", "layer_types"),
        ({"no_rope_layers": [1, 2, 1, 0]}, "unsupported-feature", "no_rope_layers"),
        ({"attn_temperature_tuning": "yes"}, "wrong-type", "attn_temperature_tuning"),
    ],
)
def test_unsupported_configs_are_refused(change, code, where):
    with raises(code) as error:
        described({**DOCUMENT, **change})
    assert where in error.value.where


def test_config_fields_of_releases():
    """The releases have numbers for booleans, no chunks if the size is null, and equal factors of the rotary ramp."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    changes = {"attn_temperature_tuning": 4, "attention_chunk_size": None, "layer_types": None, "use_qk_norm": False}
    config = described({**DOCUMENT, **changes, "rope_parameters": scaling}).config
    assert config.query_scaling is not None
    assert config.chunk is None
    assert not config.qk_l2_norm
    assert described({**DOCUMENT, "attn_temperature_tuning": False}).config.query_scaling is None


def test_text_config_must_be_an_object():
    with raises("wrong-type"):
        described({"model_type": "llama4", "text_config": None})
    with raises("unsupported-feature"):
        described({"model_type": ["llama4"]})
