"""Tests of tokenizers."""

from __future__ import annotations

import json
import os

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
    assert tokenizer.decode([*ids, 0xFF]) == f"{text}\ufffd"


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
    assert HuggingFaceTokenizer(tokenizer_json, separator="[CLS]").separator_id == 0
    assert HuggingFaceTokenizer(tokenizer_json, separator="").separator_id is None
    assert isinstance(load_tokenizer("bytes"), Tokenizer)
    assert load_tokenizer(str(tokenizer_json.parent)).name == load_tokenizer(str(tokenizer_json)).name


@pytest.mark.parametrize(("vocab", "separator", "code", "where"), [
    (None, None, "missing-file", "tokenizer"),
    ({}, None, "damaged-file", "tokenizer"),
    ({"a": 0, "b": 0, "</s>": 1}, None, "damaged-file", "tokenizer"),
    ({"a": 0, "b": 7}, None, "not-found", "separator"),
    ({"a": 0, "</s>": 7}, "<s>", "unknown-name", "separator"),
])  # fmt: skip
def test_load_tokenizer_rejects_unusable_files(vocab, separator, code, where, tmp_path):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    if vocab is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with raises(code, where):
            load_tokenizer(str(path), separator=separator)
    os.mkfifo(tmp_path / "pipe")
    with raises("wrong-type", "tokenizer"):
        load_tokenizer(str(tmp_path / "pipe"))
    with raises("conflict", "separator"):
        load_tokenizer("bytes", separator="\n")


def test_vocab_size_counts_gaps_between_ids(tmp_path):
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    plain.save(str(tmp_path / "plain.json"))
    assert HuggingFaceTokenizer(tmp_path / "plain.json", separator="b").vocab_size == 8


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_is_the_smallest(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
