"""Reading MXFP4 weights, compared with the definition of the format, and errors for damaged releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.interop import files as hf_files
from meshpar.interop import from_hf, mxfp4, to_hf
from meshpar.interop.hf import check_weights
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import assert_same_params, edit_json, router_folder

CONFIG, FILE = "config.json", "model.safetensors"
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def value_of(code: int) -> float:
    """Return the value of four bits: sign, two bits of exponent with bias 1, and a bit of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    value = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -value if sign else value


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of `[E, outputs, n, 16]` bytes as `[E, inputs, outputs]`, number by number."""
    values = np.zeros((*blocks.shape[:2], blocks.shape[2] * 32), np.float32)
    for expert, output, block, byte in np.ndindex(blocks.shape):
        for half, code in enumerate(
            (blocks[expert, output, block, byte] & 15, blocks[expert, output, block, byte] >> 4)
        ):
            factor = 2.0 ** (int(scales[expert, output, block]) - 127)
            values[expert, output, 32 * block + 2 * byte + half] = value_of(int(code)) * factor
    return values.swapaxes(1, 2)


def folders(path: Path, change: Any = lambda tensors: None) -> tuple[Path, Path]:
    """Write a small model as an MXFP4 release, and with the same weights in bfloat16."""
    from safetensors.numpy import load_file, save_file

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    small, plain = (router_folder("odd/gpt_oss", 3, path / name, **sizes) for name in ("small", "plain"))
    weights, rng = load_file(plain / FILE), np.random.default_rng(0)
    quantized, weights = ({name: x.astype(jnp.bfloat16) for name, x in weights.items()} for _ in range(2))
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        num_experts, inputs, outputs = weights[name].shape
        blocks = rng.integers(0, 256, (num_experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(115, 124, blocks.shape[:3], dtype=np.uint8)
        del quantized[name]
        quantized |= {name + "_blocks": blocks, name + "_scales": scales}
        weights[name] = np.ascontiguousarray(dequantized(blocks, scales).astype(jnp.bfloat16))
    change(quantized)
    save_file(quantized, small / FILE)
    save_file(weights, plain / FILE)
    edit_json(small / CONFIG, {"quantization_config": QUANTIZATION})
    return small, plain


LAYOUTS = {
    "experts": (mp.MeshSpec(fsdp=2, expert=2, tensor=2), mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel()),
    "one": (mp.MeshSpec(), mp.ddp()),
}


def all_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Return every byte with several scales."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 4, 4, 16)
    return blocks, np.uint8([[[0, 1, 127, 128], [120, 121, 122, 123], [3, 250, 251, 252], [60, 61, 200, 201]]])


def test_dequantize_matches_the_format():
    blocks, scales = all_bytes()
    values = mxfp4.dequantize(blocks, scales)
    np.testing.assert_array_equal(values, dequantized(blocks, scales).swapaxes(1, 2))
    np.testing.assert_array_equal(values.astype(jnp.bfloat16).astype(np.float32), values)
    assert not np.isfinite(mxfp4.dequantize(blocks, np.full_like(scales, 255))).any()


@pytest.mark.parametrize("inputs", [(0, 128), (5, 37), (32, 64), (63, 65)])
def test_slices_read_only_their_blocks(inputs):
    blocks, scales = all_bytes()
    read: list[tuple[int, ...]] = []
    slices = slice(0, 1), slice(*inputs), slice(1, 3)
    part = mxfp4.read(lambda index: read.append(blocks[index].shape) or blocks[index], scales.__getitem__, slices)
    np.testing.assert_array_equal(part.astype(np.float32), dequantized(blocks, scales)[slices])
    assert read == [(1, 2, -(-inputs[1] // 32) - inputs[0] // 32, 16)]


@pytest.mark.parametrize("layout", cases("experts", grid=LAYOUTS))
def test_from_hf_dequantizes_experts(layout, tmp_path):
    small, plain = folders(tmp_path)
    spec, strategy = LAYOUTS[layout]
    config, state = from_hf(small, mesh=mesh_of(spec), strategy=strategy)
    assert config.param_dtype == "bfloat16"
    assert_same_params(state, from_hf(plain, mesh=mesh_of(spec), strategy=strategy)[1])
    with pytest.warns(UserWarning, match="without `quantization_config`"):
        back = to_hf(state, config, tmp_path / "back", like=small)
    assert "quantization_config" not in json.loads((back / CONFIG).read_text())
    with hf_files.Folder(plain) as expected, hf_files.Folder(back) as actual:
        assert actual.entries.keys() == expected.entries.keys()
        for name in expected.entries:
            np.testing.assert_array_equal(actual.read_full(name), expected.read_full(name), err_msg=name)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x: x.pop(GATE_UP + "_scales"), "not-found"),
        (lambda x: x.pop(DOWN + "_blocks"), "not-found"),
        (lambda x: x.update({DOWN + "_scales": x[DOWN + "_scales"][:, 1:]}), "wrong-shape"),
        (lambda x: x.update({DOWN + "_blocks": x[DOWN + "_blocks"][..., 1:].copy()}), "wrong-shape"),
        (lambda x: x.update({DOWN + "_blocks": x[DOWN + "_blocks"][0]}), "wrong-shape"),
        (lambda x: x.update({DOWN: np.zeros((2, 2), np.float32)}), "wrong-shape"),
        (lambda x: x.update({"other": np.zeros(3, np.uint8)}), "not-found"),
    ],
)
def test_damaged_blocks_are_refused(change, code, tmp_path):
    small, _ = folders(tmp_path, change)
    with raises(code):
        check_weights(small)


def test_nan_and_missing_configs_are_refused(tmp_path):
    small, _ = folders(tmp_path, lambda x: x[GATE_UP + "_scales"].fill(255))
    with raises("damaged-file"):
        from_hf(small, mesh=mesh_of(mp.MeshSpec()), strategy=mp.ddp())
    edit_json(small / CONFIG, {"quantization_config": None})
    with raises("wrong-dtype"):
        check_weights(small)
    edit_json(small / CONFIG, {"quantization_config": QUANTIZATION | {"group_size": 16}})
    with raises("unsupported-feature"):
        check_weights(small)
