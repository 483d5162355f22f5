"""Tests of tokenizers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.tokens import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer, token_dtype
from tests.errors import raises

TEXT = "the quick brown fox, the lazy dog: Füße über Straßen. " * 20
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """Write a byte-level BPE tokenizer with up to 300 tokens that truncates, pads and adds a special token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[CLS]", "<|endoftext|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]"))]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(TEXTS)
def test_byte_tokenizer_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.astype(np.int32)) == text


def test_byte_tokenizer_decodes_invalid_utf8():
    assert ByteTokenizer().decode(np.array([104, 105, 0xFF])) == "hi\ufffd"


def test_hugging_face_tokenizer_round_trip(tokenizer_json):
    tokenizer = HuggingFaceTokenizer(tokenizer_json)
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint16
    # The text is not truncated or padded, and no special tokens are added.
    assert 5 < len(ids) < len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert [x.tolist() for x in tokenizer.encode_many([TEXT, "fox"])] == [
        ids.tolist(),
        tokenizer.encode("fox").tolist(),
    ]
    assert 256 < tokenizer.vocab_size <= 300
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(np.array([tokenizer.separator_id])) == "<|endoftext|>"


def test_tokenizers_satisfy_the_protocol(tokenizer_json):
    assert isinstance(load_tokenizer("bytes"), Tokenizer)
    assert isinstance(load_tokenizer(str(tokenizer_json)), Tokenizer)
    assert load_tokenizer(str(tokenizer_json.parent)).name == load_tokenizer(str(tokenizer_json)).name


def test_separator_is_detected_or_given(tokenizer_json, tmp_path):
    assert HuggingFaceTokenizer(tokenizer_json, separator="[CLS]").separator_id == 0
    assert HuggingFaceTokenizer(tokenizer_json, separator="").separator_id is None
    with raises("unknown-name", "separator"):
        HuggingFaceTokenizer(tokenizer_json, separator="[CLZ]")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    plain.save(str(tmp_path / "plain.json"))
    with raises("not-found", "separator"):
        HuggingFaceTokenizer(tmp_path / "plain.json")
    assert HuggingFaceTokenizer(tmp_path / "plain.json", separator="b").vocab_size == 8  # the ids have gaps


def test_byte_tokenizer_rejects_a_separator():
    with raises("conflict", "separator"):
        load_tokenizer("bytes", separator="\n")


def test_load_tokenizer_rejects_missing_and_damaged_files(tmp_path):
    with raises("missing-file", "tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with raises("missing-file", "tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises("damaged-file", "tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("vocab", "reason"), [({}, "its vocabulary is empty"), ({"a": 0, "b": 0, "</s>": 1}, "have the same id 0")]
)
def test_load_tokenizer_rejects_empty_and_duplicate_ids(vocab, reason, tmp_path):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with raises("damaged-file", "tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert reason in error.value.reason


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_is_the_smallest(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
