"""Hugging Face folders with the golden models, for tests."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.sharding.types import tree_leaves_with_paths

pytest.importorskip("safetensors", reason="reads and writes its files: pip install meshpar[hf]")
GOLDEN = Path(__file__).parent / "golden"
KINDS = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
ODD_KINDS = sorted(f"odd/{path.stem}" for path in GOLDEN.glob("odd/*.safetensors"))
"""Models with odd sizes, which have gradients."""
DTYPES = {"BF16": "bfloat16", "F32": "float32", "I64": "int64"}


def read_single(folder: Path, **options: Any) -> Any:
    """Return the config and the state of a folder on a single device."""
    from meshpar.interop import from_hf

    return from_hf(folder, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp(), **options)


def assert_same_params(state: Any, expected: Any, atol: float = 0.0) -> None:
    """Compare the parameters of two states."""
    params = dict(tree_leaves_with_paths(expected.params))
    for path, x in tree_leaves_with_paths(state.params):
        np.testing.assert_allclose(np.asarray(x), np.asarray(params.pop(path)), rtol=0, atol=atol, err_msg=path)
    assert not params


def edit_json(path: Path, change: Any) -> None:
    """Update a JSON object with the items of a dict, or by a function of the object."""
    document = json.loads(path.read_text())
    change(document) if callable(change) else document.update(change)
    path.write_text(json.dumps(document))


def golden(kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the config.json, weights, tokens and logits of a family's golden model."""
    from safetensors import safe_open

    with safe_open(str(GOLDEN / f"{kind}.safetensors"), framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    arrays = {name: x for name, x in arrays.items() if not name.startswith("gradient.")}
    return config, arrays, arrays.pop("golden.tokens"), arrays.pop("golden.logits")


def gradients_of(kind: str) -> dict[str, np.ndarray]:
    """Return the gradients of a model of `ODD_KINDS`, by tensor name."""
    from safetensors import safe_open

    with safe_open(str(GOLDEN / f"{kind}.safetensors"), framework="np") as file:
        names = [name for name in file.keys() if name.startswith("gradient.")]  # noqa: SIM118
        return {name.removeprefix("gradient."): file.get_tensor(name) for name in names}


def folder_of(kind: str, path: Path, *, files: int = 1) -> Path:
    """Write a family's golden model as a folder with this number of weight files."""
    from safetensors.numpy import save_file

    config, weights, _, _ = golden(kind)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "tokenizer.json").write_text("{}")
    names = sorted(weights)
    if files == 1:
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
        return path
    index = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        tensors = {name: weights[name] for name in names if index[name] == file}
        save_file(tensors, str(path / file), metadata={"format": "pt"})
    metadata = {"total_size": sum(x.nbytes for x in weights.values())}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": index}))
    return path


ROUTER_CASES = [(kind, layers) for kind in ("mixtral", "qwen3_moe") for layers in (2, 6, 32)]
"""Families and numbers of layers in `router_loss.json`."""


def router_tokens() -> np.ndarray:
    """Return the tokens with which the losses in `router_loss.json` were computed."""
    return np.random.default_rng(0).integers(0, 24, (4, 16))


def router_folder(kind: str, layers: int, path: Path, **fields: Any) -> Path:
    """Write a model with random weights, seeded by their names, and changed fields of config.json."""
    from safetensors.numpy import save_file

    from meshpar.interop.hf import described

    config, *_ = golden(kind)
    config |= {"num_hidden_layers": layers, "output_router_logits": True, "router_aux_loss_coef": 0.02, **fields}
    model = described(config)
    shapes = {name: row.file_shape for row in model.family.tensors(model.config) for name, _ in row.tensors()}
    weights = {
        name: (0.1 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(path: Path, header: Any, data: bytes) -> None:
    """Write a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
