"""Errors for invalid folders, which are raised before arrays are created or files are written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from meshpar.interop import to_hf
from meshpar.interop.hf import check_weights, described
from meshpar.runs.saved_run import keep_source_files
from meshpar.sharding.errors import MeshparError
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import KINDS, edit_json, folder_of, golden, read_header, read_single, write_header
from tests.interop.test_block_fp8 import folders

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
FIRST = "model-00001-of-00002.safetensors"
NAME = "model.embed_tokens.weight"
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 3.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def moved(to: str) -> Any:
    return lambda document: document["weight_map"].update({NAME: to})


@pytest.mark.parametrize(
    ("file", "change", "code", "where"),
    [
        (INDEX, moved("../other/model.safetensors"), "damaged-file", "`weight_map`"),
        (INDEX, moved("/etc/passwd"), "damaged-file", "`weight_map`"),
        (INDEX, moved("weights.bin"), "damaged-file", "`weight_map`"),
        (INDEX, {"weight_map": [1]}, "damaged-file", "`weight_map`"),
        (INDEX, moved("missing.safetensors"), "missing-file", "missing.safetensors"),
        (INDEX, lambda d: d["weight_map"].update({"more": FIRST}), "not-found", "`more`"),
        (CONFIG, {"model_type": "gemma3"}, "unsupported-feature", "`model_type`"),
        (CONFIG, {"mlp_bias": True}, "unsupported-feature", "`mlp_bias`"),
        (CONFIG, {"quantization_config": {"quant_method": "awq"}}, "unsupported-feature", "`quant_method`"),
        (CONFIG, {"partial_rotary_factor": 0.5}, "unsupported-feature", "`partial_rotary_factor`"),
        (CONFIG, {"num_local_experts": 4}, "unknown-name", "`num_local_experts`"),
        (CONFIG, lambda d: d["rope_scaling"].update(partial_rotary_factor=0.5), "unsupported-feature", "rotary_factor"),
        (CONFIG, {"rope_scaling": {**YARN, "truncate": 0}}, "wrong-type", "`rope_scaling.truncate`"),
        (CONFIG, {"rope_scaling": {"rope_type": "dynamic"}}, "unsupported-feature", "`rope_scaling.rope_type`"),
        (CONFIG, {"rope_scaling": {"rope_type": "longrope"}}, "wrong-type", "`rope_scaling.short_factor`"),
        (
            CONFIG,
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": ["x"]}},
            "wrong-type",
            "`rope_scaling.long_factor`",
        ),
        (CONFIG, {"rope_scaling": {**LONG, "factor": 0}}, "unsupported-feature", "`rope_scaling.factor`"),
        (CONFIG, {"rope_scaling": {**LONG, "factor": -4.0}}, "unsupported-feature", "`rope_scaling.factor`"),
        (
            CONFIG,
            {"rope_scaling": LONG, "max_position_embeddings": -8},
            "unsupported-feature",
            "`max_position_embeddings`",
        ),
        (CONFIG, {"hidden_size": 32}, "wrong-shape", "weight`"),
        (CONFIG, {"hidden_size": "16"}, "wrong-type", "`hidden_size`"),
        (CONFIG, {"hidden_size": -1}, "unsupported-feature", "`hidden_size`"),
        (CONFIG, {"head_dim": 0}, "unsupported-feature", "`head_dim`"),
        (CONFIG, {"hidden_size": None}, "not-found", "`hidden_size`"),
        (CONFIG, {"num_hidden_layers": 3}, "not-found", "layers.2.input_layernorm.weight"),
        (CONFIG, {"num_hidden_layers": 10**6}, "not-found", "input_layernorm.weight"),
        (CONFIG, {"num_hidden_layers": 1}, "unknown-name", "layers.1"),
        (CONFIG, {"num_attention_heads": 3}, "out-of-range", CONFIG),
        (CONFIG, {"tie_word_embeddings": True}, "conflict", "`lm_head.weight`"),
        (CONFIG, {"eos_token_id": "x"}, "unsupported-feature", "`eos_token_id`"),
        (CONFIG, {"bos_token_id": [1, True]}, "unsupported-feature", "`bos_token_id`"),
        (CONFIG, {"torch_dtype": "float3"}, "unsupported-feature", "`torch_dtype`"),
        (CONFIG, {"dtype": 32}, "unsupported-feature", "`dtype`"),
        (CONFIG, {"rms_norm_eps": 1e12}, "out-of-range", CONFIG),
    ],
)
def test_invalid_index_or_config(file, change, code, where, tmp_path):
    folder = folder_of("llama", tmp_path / "source", files=2)
    check_weights(folder)
    edit_json(folder / file, change)
    with raises(code, where):
        check_weights(folder)


def test_rotary_fields_with_their_default_are_read():
    document, *_ = golden("llama")
    expected = described(document | {"rope_scaling": YARN}).config
    more = {"partial_rotary_factor": 1.0, "truncate": True, "mscale": None, "short_factor": None}
    assert described(document | {"rope_scaling": YARN | more, "partial_rotary_factor": 1.0}).config == expected
    assert described(document | {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1}}).config
    for truncate in (True, False):
        config = described(document | {"rope_scaling": {**YARN, "truncate": truncate}}).config
        assert config.rope_yarn.truncate is truncate


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda h: h[NAME].update(data_offsets=[h[NAME]["data_offsets"][0], 2**40]), "damaged-file"),
        (lambda h: h[NAME].update(shape=[24, 17]), "damaged-file"),
        (lambda h: h[NAME].update(dtype="Q4"), "damaged-file"),
        (lambda h: h.pop(NAME), "damaged-file"),
        (lambda h: h[NAME].update(dtype="I16"), "wrong-dtype"),
        (lambda h: h[NAME].update(shape=[16, 24]), "wrong-shape"),
    ],
)
def test_invalid_header(change, code, tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    header, rest = read_header(folder / "model.safetensors")
    change(header)
    write_header(folder / "model.safetensors", header, rest)
    with raises(code, str(folder)):
        check_weights(folder)


def test_pickled_files_are_not_read(tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with raises("missing-file", "folder") as error:
        check_weights(folder)
    assert "pickled files are never read" in error.value.reason


@pytest.mark.parametrize(
    ("value", "code"),
    [(b"\x7f\x7f", "wrong-dtype"), (b"\xc0\x7f", "damaged-file"), (b"\x80\xff", "damaged-file")],
    ids=["overflow", "nan", "-inf"],
)
def test_weights_outside_the_range_of_the_dtype(value, code, tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    header, rest = read_header(folder / "model.safetensors")
    begin, _ = header[NAME]["data_offsets"]
    write_header(folder / "model.safetensors", header, rest[:begin] + value + rest[begin + 2 :])
    with raises(code, f"`{NAME}`"):
        read_single(folder, dtype="float16")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "config.json"])
def test_links_out_of_the_folder_are_not_copied(name, tmp_path):
    folder, secret = folder_of("llama", tmp_path / "source"), tmp_path / "secret"
    secret.write_text((folder / name).read_text() if (folder / name).exists() else "{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with raises("unsupported-feature", name):
        keep_source_files(folder, tmp_path / "run")


def test_links_of_the_hub_cache_are_followed(tmp_path):
    blobs, folder = tmp_path / "blobs", folder_of("llama", tmp_path / "snapshots" / "abc")
    blobs.mkdir()
    for path in list(folder.iterdir()):
        (folder / path.name).replace(blobs / path.name)
        (folder / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    kept = keep_source_files(folder, tmp_path / "run")
    assert {path.name for path in kept.iterdir()} >= {"config.json", "tokenizer.json"}


def test_failed_write_leaves_no_folder(tmp_path, monkeypatch):
    source = folder_of("llama", tmp_path / "source")
    config, state = read_single(source)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("meshpar.interop.hf.write_json", full)
    with pytest.raises(OSError, match="no space"):
        to_hf(state, config, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# ---- Mutations -------------------------------------------------------------------------------------------------------

STRANGE: list[Any] = [
    None, -1, 0, 1, 3, 2**22, 2**31, 2**63, 1e400, float("nan"), 0.5, "", "x", "../x", "\0", [], [[]], {}, {"a": []},
    True, False, [1] * 9, "9" * 200, -0.0,
]  # fmt: skip


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Replace a random part of a value."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.8):
        key = rng.choice(list(value))
        change = rng.random()
        if change < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if change < 0.2:
            return {**value, str(rng.choice(STRANGE)): rng.choice(STRANGE)}
        return {**value, key: mutated(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at], depth + 1), *value[at + 1 :]]
    return rng.choice(STRANGE)


def broken(rng: random.Random, text: bytes) -> bytes:
    """Change, truncate or nest bytes."""
    kind, at = rng.random(), rng.randrange(len(text))
    if kind < 0.5:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    return text[:at] if kind < 0.9 else b"[" * 100_000 + text


def check_parts(error: MeshparError) -> None:
    """Check that an error has all parts and fits on a screen."""
    assert all((error.where, error.reason, error.fix))
    assert len(str(error)) < 2000


@pytest.mark.parametrize("num", cases(100, grid=[100, 2000]))
def test_mutated_folders_raise_or_are_read(num, tmp_path):
    rng, fine = random.Random(num), 0
    sources = {kind: folder_of(kind, tmp_path / kind, files=2) for kind in KINDS}
    sources["8 bits"], _ = folders("qwen3", tmp_path, files=2)
    for _ in range(num):
        folder = sources[rng.choice(list(sources))]
        target = folder / rng.choice([CONFIG, CONFIG, INDEX, FIRST])
        content = target.read_bytes()
        if target.name == FIRST:
            header, rest = read_header(target)
            whole = json.dumps(header).encode()
            new = json.dumps(mutated(rng, header)).encode() if rng.random() < 0.7 else broken(rng, whole)
            target.unlink()
            write_header(target, new, rest)
        else:
            new = json.dumps(mutated(rng, json.loads(content))).encode()
            target.write_bytes(new if rng.random() < 0.8 else broken(rng, content))
        try:
            check_weights(folder)
            fine += 1
        except MeshparError as error:
            check_parts(error)
        finally:
            target.write_bytes(content)
    assert 0 < fine < num / 2
