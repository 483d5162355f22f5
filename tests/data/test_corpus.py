"""Tests of `TextData`, from files to batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import data
from meshpar.data import DataSource, Source, TextData
from meshpar.runs.report import data_line
from tests.errors import raises

DOCUMENTS = 40


@pytest.fixture
def folder(tmp_path):
    """Write 40 files, each with a different letter."""
    for i in range(DOCUMENTS):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i}: " + chr(ord("A") + i) * (100 + i))
    return tmp_path


def opened(folder, *, batch_size=4, seed=0, **options):
    options = {"seq_len": 16, "valid_fraction": 0.2, "valid_batches": 3} | options
    return TextData(files=(str(folder),), **options).open(batch_size=batch_size, seed=seed)


def test_text_data_satisfies_the_protocols(folder):
    assert isinstance(TextData(), DataSource)
    assert isinstance(opened(folder), Source)


def test_training_batches_cover_the_training_stream(folder):
    source = opened(folder)
    windows = len(source.train_rows)
    with source.train() as batches:
        assert {name: (x.shape, str(x.dtype)) for name, x in batches.spec.items()} == {
            "inputs": ((4, 16), "int32"),
            "targets": ((4, 16), "int32"),
        }
        epoch = [next(batches) for _ in range(windows)]  # four epochs
    inputs, targets = (np.concatenate([batch[name] for batch in epoch]) for name in ("inputs", "targets"))
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    expected = [tuple(source.train_tokens[i * 16 + 1 : i * 16 + 17].tolist()) for i in range(windows)]
    served = sorted(tuple(row) for row in targets.tolist())
    assert served == sorted(expected * 4)


def test_validation_batches_are_spread_over_the_stream(folder):
    source = opened(folder)
    valid = source.valid()
    first, second = list(valid), list(valid)
    assert len(valid) == len(first) == 3
    assert all(np.array_equal(a["targets"], b["targets"]) for a, b in zip(first, second, strict=True))
    starts = source.served * 16
    assert starts[0] == 0
    assert starts[-1] > 0.9 * len(source.valid_tokens) - 2 * 16
    assert np.concatenate([batch["inputs"] for batch in first])[:, 0].tolist() == source.valid_tokens[starts].tolist()
    assert len(opened(folder, valid_batches=1000).valid()) == len(source.valid_rows) // 4


def test_baseline_scores_the_served_tokens(folder):
    source = opened(folder)
    served = source.baseline()
    targets = np.concatenate([batch["targets"].ravel() for batch in source.valid()])
    assert served.num_tokens == len(targets) == 3 * 4 * 16
    full = source.baseline("all")
    assert full.num_tokens == len(source.valid_tokens) - 1
    # Validation letters do not occur in training, so the fitted model has a high loss and the oracle a low loss.
    for baseline in (served, full):
        assert baseline.fitted.bits_per_byte > 3
        assert baseline.oracle.bits_per_byte < 1
        assert baseline.fitted.bytes_per_token == 1  # includes separators


def test_separate_documents_are_not_predicted_from_each_other(folder):
    source = opened(folder, seq_len=64, separate_documents=True)
    assert "attend to each other" not in data_line(source.describe())
    assert "attend to each other" in data_line(opened(folder, seq_len=200).describe())
    shapes = {name: (4, *x.shape[1:]) for name, x in source.data.batch_shapes(4).items()}
    with source.train() as batches:
        assert {name: x.shape for name, x in batches.spec.items()} == shapes
    served = [batch["weights"] for batch in source.valid()]
    assert source.baseline().num_tokens == np.sum(served) < np.size(served)
    assert source.baseline("all").num_tokens == len(source.valid_tokens) - source.describe()["valid"]["documents"]
    with raises("conflict", "TextData.separate_documents"):
        TextData(separate_documents=True, separator="")


@pytest.mark.parametrize(
    "change",
    [
        {"separate_documents": True},
        {"seq_len": 8},
        {"valid_fraction": 0.3},
        {"max_bytes": 2000},
        {"batch_size": 8},
        {"seed": 1},
    ],
)
def test_set_state_rejects_other_data(folder, change):
    state = opened(folder).train().get_state()
    with raises("conflict", "set_state"):
        opened(folder, **change).train().set_state(state)


def test_describe_counts_documents_tokens_and_windows(folder):
    (folder / "bad.txt").write_bytes(b"\xff")
    source = opened(folder)
    description = source.describe()
    assert description == json.loads(json.dumps(description))
    train, valid = description["train"], description["valid"]
    assert description["skipped"] == 1
    assert train["documents"] + valid["documents"] == DOCUMENTS
    assert description["held_out"] == f"{valid['documents']} of {DOCUMENTS} documents, by the hash of their names"
    for side in (train, valid):
        assert side["tokens"] == side["bytes"] + side["documents"]
        assert side["windows"] == (side["tokens"] - 1) // 16
    assert (valid["batches"], valid["served_tokens"]) == (3, 3 * 4 * 16)
    assert description["fingerprint"] == source.fingerprint


def test_jsonl_and_a_tokenizer_file_on_a_mesh(tmp_path, mesh8):
    import tokenizers

    words = [f"w{i}" for i in range(400)]
    vocab = {"[SEP]": 0} | {word: i + 1 for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"body": " ".join(words[i : i + 100])}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = opened(
        tmp_path / "a.jsonl",
        batch_size=8,
        tokenizer=str(tmp_path),
        text_field="body",
        cache=str(tmp_path / "cache"),
    )
    assert source.vocab_size == 401
    assert source.train_tokens.dtype == np.uint16
    assert source.describe()["train"]["documents"] + source.describe()["valid"]["documents"] == 300
    assert source.decode(source.encode("w3 w7")) == "w3 w7"
    held_out = source.describe()["valid"]
    assert source.bytes_per_token == (held_out["bytes"] + held_out["documents"]) / held_out["tokens"] > 4
    baseline = source.baseline("all")
    assert baseline.fitted.bits_per_byte == pytest.approx(baseline.fitted.bits_per_token / source.bytes_per_token)
    sharding = NamedSharding(mesh8, P("fsdp"))
    with source.train(sharding) as on_mesh, source.train() as on_host:
        np.testing.assert_array_equal(next(on_mesh)["targets"], next(on_host)["targets"])
    for on_mesh, on_host in zip(source.valid(sharding), source.valid(), strict=True):
        assert on_mesh["inputs"].sharding == sharding
        np.testing.assert_array_equal(on_mesh["inputs"], on_host["inputs"])


@pytest.mark.parametrize(("options", "code", "where"), [
    ({"seq_len": 100_000}, "out-of-range", "seq_len"),
    ({"batch_size": 100}, "out-of-range", "batch_size"),
    ({"batch_size": 400}, "out-of-range", "batch_size"),
    ({"tokenizer": "no/such.json"}, "missing-file", "tokenizer"),
    ({"separator": "x"}, "conflict", "separator"),
    ({"seq_len": 0}, "not-an-int", "TextData"),
    ({"valid_batches": 0}, "not-an-int", "TextData"),
    ({"max_bytes": 0}, "not-an-int", "TextData"),
    ({"prefetch": -1}, "not-an-int", "TextData"),
    ({"valid_fraction": 0.0}, "out-of-range", "TextData"),
])  # fmt: skip
def test_text_data_rejects_small_data_and_wrong_fields(folder, options, code, where):
    with raises(code, where):
        opened(folder, **options)


@pytest.mark.parametrize("files", ["notes.txt", (), (3,)])
def test_files_must_be_strings(files):
    with raises("wrong-type", "TextData.files"):
        TextData(files=files)
    assert TextData(files=["a", "b"]) == TextData(files=("a", "b"))


def test_public_names_can_be_imported():
    assert all(getattr(data, name) for name in data.__all__)
    with pytest.raises(AttributeError, match="TextData"):
        data.TextDatum  # noqa: B018
