"""Releases in 8-bit floats by blocks: what numpy makes of them, over any mesh, or an error in four parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.interop import files as files_of
from meshpar.interop import from_hf, to_hf
from meshpar.interop.blocks import SCALE
from meshpar.interop.hf import check_weights
from meshpar.interop.runs import keep_beside
from meshpar.sharding.types import MeshparError, tree_leaves_with_paths
from tests.equal import mesh_of
from tests.grid import cases
from tests.interop.folders import folder_of, golden

BLOCK = (6, 5)
"""Divides none of the golden models' dims."""
SAID = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK)}
CONFIG, FILE = "config.json", "model.safetensors"


def is_quantized(name: str, x: np.ndarray) -> bool:
    """As the releases have it: the matrices of layers, but for the router's."""
    return x.ndim == 2 and "proj" in name


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(8-bit floats, factors of the blocks, the numbers they stand for) of a matrix, block by block."""
    rows, columns = BLOCK
    small, wide = np.zeros(x.shape, jnp.float8_e4m3fn), np.zeros(x.shape, np.float32)
    scale = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        part = x[block].astype(np.float32)
        scale[i, j] = np.abs(part).max() / 448
        small[block] = (part / scale[i, j]).astype(small.dtype)
        wide[block] = small[block].astype(np.float32) * scale[i, j]
    return small, scale, wide


def folders(kind: str, path: Path, change: Any = lambda eight: None, files: int = 3) -> tuple[Path, Path]:
    """A family's golden model in 8 bits over several files, with a change; and what that stands for, in float32."""
    from safetensors.numpy import save_file

    small, plain = folder_of(kind, path / "small", files=files), folder_of(kind, path / "plain")
    _, weights, *_ = golden(kind)
    eight, wide = dict(weights), dict(weights)
    for name, x in weights.items():
        if is_quantized(name, x):
            eight[name], eight[name + SCALE], wide[name] = quantized(x)
    change(eight)
    save_file(wide, str(plain / FILE))
    spread = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(sorted(eight))}
    for file in set(spread.values()):  # so factors lie in other files than what they are of
        save_file({name: x for name, x in eight.items() if spread[name] == file}, str(small / file))
    (small / files_of.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": spread}))
    edit(small, quantization_config=SAID)
    return small, plain


def edit(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(document | changes))


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
def test_blocks_are_the_numbers_they_stand_for(kind, layout, dtype, tmp_path, monkeypatch):
    small, plain = folders(kind, tmp_path)
    spec, strategy = LAYOUTS[layout]
    factors = []
    plainly = files_of.dequantized
    monkeypatch.setattr(files_of, "dequantized", lambda *args: factors.append(args[:2]) or plainly(*args))
    config, state = from_hf(small, mesh=mesh_of(spec), strategy=strategy, dtype=dtype)
    # A part and no more: at most one more block a dim than its rows and columns fill.
    assert all(
        n <= -(-size // of) + 1 for x, scale in factors for n, size, of in zip(scale.shape, x.shape, BLOCK, strict=True)
    )
    assert config.param_dtype == (dtype or "bfloat16")
    _, expected = from_hf(plain, mesh=mesh_of(spec), strategy=strategy, dtype=config.param_dtype)
    found = dict(tree_leaves_with_paths(state.params))
    for path, x in tree_leaves_with_paths(expected.params):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(found[path]), err_msg=path)

    with pytest.warns(UserWarning, match="without `quantization_config`"):
        back = to_hf(state, config, tmp_path / "back", like=small)
    assert "quantization_config" not in json.loads((back / CONFIG).read_text())
    with files_of.Folder(back) as written, files_of.Folder(plain) as wide:
        assert written.entries.keys() == wide.entries.keys()  # modules that are carried along, too
        for name, entry in written.entries.items():
            assert entry.dtype in ("bfloat16", "float32")
            np.testing.assert_array_equal(written.whole(name), wide.whole(name).astype(entry.dtype), err_msg=name)


def test_a_run_keeps_what_its_kept_tensors_stand_for(tmp_path):
    small, plain = folders("deepseek_v3", tmp_path)
    kept = keep_beside(small, tmp_path / "run")
    with files_of.Folder(kept) as found, files_of.Folder(plain) as wide:
        assert "model.layers.2.eh_proj.weight" in found.entries
        for name, entry in found.entries.items():
            np.testing.assert_array_equal(found.whole(name), wide.whole(name).astype(entry.dtype), err_msg=name)


NAME, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop(NAME + SCALE), "scale_inv`.*read the factors.*there is no such tensor"),
        (lambda d: d.update({NORM + SCALE: d[NAME + SCALE]}), "model.norm.weight_scale_inv`.*no such tensor"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE][1:]}), r"\[2, 4\].*of \[16, 16\] in blocks of \[6, 5\]"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE].astype(np.float16)}), "float16.*float32 or bfloat16"),
        (lambda d: d.update({NAME + SCALE: d[NAME + SCALE].astype(jnp.float8_e4m3fn)}), "F8_E4M3.*float32 or bfloat16"),
        ({"quantization_config": None}, "F8_E4M3 by `quantization_config`"),
        ({"quantization_config": {**SAID, "quant_method": "gptq"}}, "`quant_method`.*'gptq'.*read are 8-bit floats by"),
        ({"quantization_config": {**SAID, "activation_scheme": "static"}}, "`activation_scheme`.*'static'"),
        ({"quantization_config": {**SAID, "bits": 4}}, "`bits`.*quantized by 4"),
        ({"quantization_config": {**SAID, "weight_block_size": [128]}}, r"`weight_block_size`.*\[128\]"),
        ({"quantization_config": {**SAID, "weight_block_size": [7, 5]}}, r"in blocks of \[7, 5\]"),
    ],
)  # fmt: skip
def test_blocks_that_lie(change, says, tmp_path):
    small, _ = folders("qwen3", tmp_path, *([] if isinstance(change, dict) else [change]))
    if isinstance(change, dict):
        edit(small, **change)
    with pytest.raises(MeshparError, match=says) as error:
        check_weights(small)
    assert all((error.value.where, error.value.requested, error.value.reason, error.value.fix))
