"""Folders that lie: an error in four parts, before anything is made, and nothing half written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jax
import pytest

import meshpar as mp
from meshpar.interop import from_hf, to_hf
from meshpar.interop.hf import check_weights, described
from meshpar.interop.runs import keep_source_files
from meshpar.sharding.types import MeshparError
from tests.grid import cases
from tests.interop.folders import KINDS, folder_of, golden, read_header, write_header
from tests.interop.test_block_fp8 import folders


def looked_at(folder: Path) -> None:
    """What `from_hf` does before it makes arrays."""
    check_weights(folder)


def edited(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
FIRST = "model-00001-of-00002.safetensors"
NAME = "model.embed_tokens.weight"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def moved(to: str) -> Any:
    return lambda document: document["weight_map"].update({NAME: to})


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (INDEX, moved("../other/model.safetensors"), "may only refer to safetensors files in its folder"),
        (INDEX, moved("/etc/passwd"), "may only refer to safetensors files in its folder"),
        (INDEX, moved("weights.bin"), "may only refer to safetensors files in its folder"),
        (INDEX, moved("missing.safetensors"), "there is no such file"),
        (INDEX, lambda d: d["weight_map"].update({"more": FIRST}), "`more`.*no file has it"),
        (INDEX, lambda d: d.update(weight_map=[1]), "it must be an object"),
        (CONFIG, lambda d: d.update(model_type="gemma3"), "the families are llama, .*no layer_types, rope_local"),
        (CONFIG, lambda d: d.update(attention_bias=True), "`attention_bias`.*the decoders support False only"),
        (CONFIG, lambda d: d.update(quantization_config={"quant_method": "awq"}), "dequantize the weights"),
        (CONFIG, lambda d: d.update(partial_rotary_factor=0.5), "`partial_rotary_factor`.*1.0 only.*Use a different"),
        (CONFIG, lambda d: d.update(num_local_experts=4), "`num_local_experts`.*no such field.*remove it only if"),
        (CONFIG, lambda d: d["rope_scaling"].update(partial_rotary_factor=0.5), "0.5.*1.0 only.*Use a different"),
        (CONFIG, lambda d: d.update(rope_scaling={**YARN, "truncate": False}), "truncate`.*support True only"),
        (CONFIG, lambda d: d.update(rope_scaling={"rope_type": "longrope"}), "the supported types are default"),
        (CONFIG, lambda d: d.update(hidden_size=32), r"shape \[24, 16\].*by config.json the shape is \[24, 32\]"),
        (CONFIG, lambda d: d.update(hidden_size="16"), "`hidden_size`.*must be an integer"),
        (CONFIG, lambda d: d.pop("hidden_size"), "`hidden_size`.*it is missing"),
        (CONFIG, lambda d: d.update(num_hidden_layers=3), "layers.2.input_layernorm.weight.*have no such name"),
        (CONFIG, lambda d: d.update(num_hidden_layers=10**6), "by config.json there are 1,000,000"),
        (CONFIG, lambda d: d.update(num_hidden_layers=1), "has no such tensor"),
        (CONFIG, lambda d: d.update(num_attention_heads=3), "not a multiple"),
        (CONFIG, lambda d: d.update(tie_word_embeddings=True), "`lm_head.weight`.*which has different values"),
        (CONFIG, lambda d: d.update(eos_token_id="x"), "`eos_token_id`: cannot be 'x': it must be a token id"),
        (CONFIG, lambda d: d.update(bos_token_id=[1, True]), "`bos_token_id`"),
        (CONFIG, lambda d: d.update(torch_dtype="float3"), "`torch_dtype`: cannot be 'float3'"),
        (CONFIG, lambda d: d.update(dtype=32), "`dtype`: cannot be 32"),
        (CONFIG, lambda d: d.update(rms_norm_eps=1e12), "norm_eps=.*added to a mean square"),
    ],
)  # fmt: skip
def test_an_index_or_config_that_lies(file, change, says, tmp_path):
    folder = folder_of("llama", tmp_path / "source", files=2)
    looked_at(folder)
    edited(folder / file, change)
    with pytest.raises(MeshparError, match=says):
        looked_at(folder)


def test_fields_of_rotary_embeddings_with_their_default_are_read(tmp_path):
    document, *_ = golden("llama")
    expected = described(document | {"rope_scaling": YARN}).config
    more = {"partial_rotary_factor": 1.0, "truncate": True, "mscale": None, "short_factor": None}
    assert described(document | {"rope_scaling": YARN | more, "partial_rotary_factor": 1.0}).config == expected
    assert described(document | {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1}}).config


def offsets_past_the_end(header: dict[str, Any]) -> None:
    begin, end = header[NAME]["data_offsets"]
    header[NAME]["data_offsets"] = [begin, end + 2**40]


def other_dtype(header: dict[str, Any]) -> None:
    header[NAME]["dtype"] = "I16"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (offsets_past_the_end, "not a valid safetensors file"),
        (lambda h: h[NAME].update(shape=[24, 17]), "not a valid safetensors file"),
        (lambda h: h[NAME].update(dtype="Q4"), "not a valid safetensors file"),
        (other_dtype, "weights must be F64, F32, F16, BF16, or F8_E4M3 with"),
        (lambda h: h[NAME].update(shape=[16, 24]), r"use shape \[16, 24\]"),
        (lambda h: h.pop(NAME), "not a valid safetensors file"),
    ],
)
def test_a_header_that_lies(change, says, tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    header, rest = read_header(folder / "model.safetensors")
    change(header)
    write_header(folder / "model.safetensors", header, rest)
    with pytest.raises(MeshparError, match=says):
        looked_at(folder)


def test_pickled_files_are_not_read(tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(MeshparError, match="pickled files are never read"):
        from_hf(folder, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp())


def test_too_large_for_the_dtype(tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    header, rest = read_header(folder / "model.safetensors")
    begin, _ = header[NAME]["data_offsets"]
    large = rest[:begin] + b"\x7f\x7f" + rest[begin + 2 :]  # the largest bfloat16
    write_header(folder / "model.safetensors", header, large)
    with pytest.raises(MeshparError, match="overflows float16"):
        from_hf(folder, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp(), dtype="float16")


@pytest.mark.parametrize("wrong", [b"\xc0\x7f", b"\x80\xff"], ids=["nan", "-inf"])
def test_weights_that_are_not_finite(wrong, tmp_path):
    folder = folder_of("llama", tmp_path / "source")
    header, rest = read_header(folder / "model.safetensors")
    begin, _ = header[NAME]["data_offsets"]
    write_header(folder / "model.safetensors", header, rest[:begin] + wrong + rest[begin + 2 :])
    with pytest.raises(MeshparError, match=f"`{NAME}`.*1 of its values are nan or infinite"):
        from_hf(folder, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp())


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_not_copied(name, tmp_path):
    folder, secret = folder_of("llama", tmp_path / "source"), tmp_path / "secret"
    secret.write_text((folder / name).read_text() if (folder / name).exists() else "{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(MeshparError, match=f"{name}: cannot copy it: it is a link to {secret}, outside"):
        keep_source_files(folder, tmp_path / "run")


def test_the_links_of_the_hub_s_cache_are_followed(tmp_path):
    blobs, folder = tmp_path / "blobs", folder_of("llama", tmp_path / "snapshots" / "abc")
    blobs.mkdir()
    for path in list(folder.iterdir()):
        (folder / path.name).replace(blobs / path.name)
        (folder / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    kept = keep_source_files(folder, tmp_path / "run")
    assert {path.name for path in kept.iterdir()} >= {"config.json", "tokenizer.json"}


def test_nothing_half_written(tmp_path, monkeypatch):
    source = folder_of("llama", tmp_path / "source")
    config, state = from_hf(source, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp())

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("meshpar.interop.hf.write_json", full)
    with pytest.raises(OSError, match="no space"):
        to_hf(state, config, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# ---- Thousands of broken ones ----------------------------------------------------------------------------------------

STRANGE: list[Any] = [
    None, -1, 0, 1, 3, 2**22, 2**31, 2**63, 1e400, float("nan"), 0.5, "", "x", "../x", "\0", [], [[]], {}, {"a": []},
    True, False, [1] * 9, "9" * 200, -0.0,
]  # fmt: skip


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something strange somewhere in it."""
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
    """Bytes changed, cut off or nested deep."""
    kind, at = rng.random(), rng.randrange(len(text))
    if kind < 0.5:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    return text[:at] if kind < 0.9 else b"[" * 100_000 + text


def check_parts(error: MeshparError) -> None:
    """Four parts, and no more than a screen."""
    assert all((error.where, error.requested, error.reason, error.fix))
    assert len(str(error)) < 2000


@pytest.mark.parametrize("num", cases(100, grid=[100, 2000]))
def test_broken_folders_are_an_error_in_four_parts_or_fine(num, tmp_path):
    rng, fine = random.Random(num), 0
    sources = {kind: folder_of(kind, tmp_path / kind, files=2) for kind in ("llama", "deepseek_v3")}
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
            looked_at(folder)
            fine += 1
        except MeshparError as error:
            check_parts(error)
        finally:
            target.write_bytes(content)
    assert 0 < fine < num / 2


@pytest.mark.parametrize("num", cases(20, grid=[20, 300]))
def test_broken_configs_of_every_family(num):
    rng = random.Random(num)
    for kind in KINDS:
        document, *_ = golden(kind)
        for _ in range(num):
            try:
                described(mutated(rng, document))
            except MeshparError as error:
                check_parts(error)
