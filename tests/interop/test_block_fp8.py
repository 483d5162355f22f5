"""Reading block-scaled FP8 weights, compared with NumPy, and errors for damaged or unsupported releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.interop import files as hf_files
from meshpar.interop import from_hf, to_hf
from meshpar.interop.block_fp8 import SCALE
from meshpar.interop.hf import check_weights
from meshpar.runs.saved_run import keep_source_files
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import assert_same_params, edit_json, folder_of, golden

BLOCK = (6, 5)
"""Does not divide any dim of the golden models."""
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK),
}  # fmt: skip
CONFIG, FILE = "config.json", "model.safetensors"


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the float8 weights, the factors and the dequantized weights of a matrix."""
    rows, columns = BLOCK
    weights, dequantized = np.zeros(x.shape, jnp.float8_e4m3fn), np.zeros(x.shape, np.float32)
    scale = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        part = x[block].astype(np.float32)
        scale[i, j] = np.abs(part).max() / 448
        weights[block] = (part / scale[i, j]).astype(weights.dtype)
        dequantized[block] = weights[block].astype(np.float32) * scale[i, j]
    return weights, scale, dequantized


def folders(kind: str, path: Path, change: Any = lambda tensors: None, files: int = 3) -> tuple[Path, Path]:
    """Write a golden model as an FP8 release with several files, and its dequantized weights as float32."""
    from safetensors.numpy import save_file

    small, plain = folder_of(kind, path / "small", files=files), folder_of(kind, path / "plain")
    _, weights, *_ = golden(kind)
    quantized, dequantized = dict(weights), dict(weights)
    for name, x in weights.items():
        if x.ndim == 2 and "proj" in name:  # as in the releases: all matrices of the layers except for routers
            quantized[name], quantized[name + SCALE], dequantized[name] = quantize(x)
    change(quantized)
    save_file(dequantized, str(plain / FILE))
    names = enumerate(sorted(quantized))  # a weight and its factors are in different files
    index = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in names}
    for file in set(index.values()):
        save_file({name: x for name, x in quantized.items() if index[name] == file}, str(small / file))
    (small / hf_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    edit_json(small / CONFIG, {"quantization_config": QUANTIZATION})
    return small, plain


def assert_same_weights(folder: Path, plain: Path) -> set[str]:
    """Compare two folders in the dtypes of the first, and return the names of its tensors."""
    with hf_files.Folder(folder) as actual, hf_files.Folder(plain) as expected:
        for name, entry in actual.entries.items():
            assert entry.dtype in ("bfloat16", "float32")
            value = expected.read_full(name).astype(entry.dtype)
            np.testing.assert_array_equal(actual.read_full(name), value, err_msg=name)
        return set(actual.entries)


LAYOUTS = {
    "experts": (mp.MeshSpec(fsdp=2, expert=4), mp.fsdp() | mp.expert_parallel()),
    "tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()),
    "one": (mp.MeshSpec(), mp.ddp()),
}


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    cases(
        ("qwen3_moe", "one", None),
        grid=[
            (kind, layout, dtype)
            for kind, layout in (("deepseek_v3", "experts"), ("qwen3", "tensor"), ("qwen3_moe", "one"))
            for dtype in (None, "float32")
        ],
    ),
)
def test_from_hf_dequantizes_blocks(kind, layout, dtype, tmp_path, monkeypatch):
    small, plain = folders(kind, tmp_path)
    spec, strategy = LAYOUTS[layout]
    calls = []
    dequantize = hf_files.dequantize
    monkeypatch.setattr(hf_files, "dequantize", lambda *args: calls.append(args[:2]) or dequantize(*args))
    config, state = from_hf(small, mesh=mesh_of(spec), strategy=strategy, dtype=dtype)
    # Only the factors of the slice are read: per dim at most one block more than the slice could fill.
    for x, scale in calls:
        assert all(n <= -(-size // block) + 1 for n, size, block in zip(scale.shape, x.shape, BLOCK, strict=True))
    assert config.param_dtype == (dtype or "bfloat16")
    _, expected = from_hf(plain, mesh=mesh_of(spec), strategy=strategy, dtype=config.param_dtype)
    assert_same_params(state, expected)

    with pytest.warns(UserWarning, match="without `quantization_config`"):
        back = to_hf(state, config, tmp_path / "back", like=small)
    assert "quantization_config" not in json.loads((back / CONFIG).read_text())
    with hf_files.Folder(plain) as folder:
        assert assert_same_weights(back, plain) == set(folder.entries)  # with the tensors that the decoder does not use


def test_run_keeps_dequantized_passthrough_tensors(tmp_path):
    small, plain = folders("deepseek_v3", tmp_path)
    assert "model.layers.2.eh_proj.weight" in assert_same_weights(keep_source_files(small, tmp_path / "run"), plain)


NAME, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda d: d.pop(NAME + SCALE), "not-found", "q_proj.weight_scale_inv`"),
        (lambda d: d.update({NORM + SCALE: d[NAME + SCALE]}), "unknown-name", "model.norm.weight_scale_inv`"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE][1:]}), "wrong-shape", "q_proj.weight_scale_inv`"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE].astype(np.float16)}), "wrong-dtype", "_scale_inv`"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE].astype(jnp.float8_e4m3fn)}), "wrong-dtype", "_scale_inv`"),
        ({"quantization_config": None}, "wrong-dtype", "proj.weight`"),
        ({"quantization_config": {**QUANTIZATION, "quant_method": "gptq"}}, "unsupported-feature", "`quant_method`"),
        ({"quantization_config": {**QUANTIZATION, "activation_scheme": "static"}}, "unsupported-feature",
         "`activation_scheme`"),
        ({"quantization_config": {**QUANTIZATION, "bits": 4}}, "unsupported-feature", "`bits`"),
        ({"quantization_config": {**QUANTIZATION, "weight_block_size": [128]}}, "unsupported-feature",
         "`weight_block_size`"),
        ({"quantization_config": {**QUANTIZATION, "weight_block_size": [7, 5]}}, "wrong-shape", "_scale_inv`"),
    ],
)  # fmt: skip
def test_damaged_or_unsupported_fp8_releases(change, code, where, tmp_path):
    small, _ = folders("qwen3", tmp_path, *([] if isinstance(change, dict) else [change]))
    if isinstance(change, dict):
        edit_json(small / CONFIG, change)
    with raises(code, where):
        check_weights(small)
