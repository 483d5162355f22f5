"""Tests of `TokenFile`: reading, and errors for damaged files."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from meshpar.data.rows import Windows
from meshpar.data.token_file import TokenFile
from tests.errors import raises

VOCAB_SIZE = 300
NUM_TOKENS = 500


@pytest.fixture
def path(tmp_path):
    (np.arange(NUM_TOKENS) % VOCAB_SIZE).astype(np.uint16).tofile(tmp_path / "train.tokens")
    return tmp_path / "train.tokens"


def opened(path, num_tokens=NUM_TOKENS):
    return TokenFile(path, np.dtype(np.uint16), num_tokens=num_tokens, vocab_size=VOCAB_SIZE, fix="delete it")


def test_token_file_reads_like_an_array(path):
    tokens, expected = opened(path), np.fromfile(path, np.uint16)
    assert len(tokens) == NUM_TOKENS
    assert np.array_equal(np.asarray(tokens), expected)
    for part in (slice(None), slice(3, 40), slice(-5, None), slice(7, 2), slice(0, 90, 7), slice(490, 900)):
        assert np.array_equal(tokens[part], expected[part]), part


def test_empty_token_file_is_an_empty_array(tmp_path):
    (tmp_path / "x.tokens").touch()
    tokens = opened(tmp_path / "x.tokens", num_tokens=0)
    assert len(tokens) == len(tokens[:]) == 0


@pytest.mark.parametrize("seq_len", [1, 10, 249, 499])
def test_windows_of_a_file_match_those_of_an_array(path, seq_len):
    file_rows, array_rows = (
        Windows(tokens, seq_len, name="set") for tokens in (opened(path), np.asarray(opened(path)))
    )
    assert len(file_rows) == len(array_rows) == (NUM_TOKENS - 1) // seq_len
    for numbers in ([], [0], range(len(file_rows))[::-1]):
        actual, expected = (rows.read(np.array(numbers, np.int64)) for rows in (file_rows, array_rows))
        for name, rows in expected.items():
            assert rows.shape == (len(numbers), seq_len)
            assert np.array_equal(actual[name], rows)
            assert actual[name].dtype == rows.dtype == np.int32


def test_ids_outside_the_vocabulary_are_errors(path):
    with path.open("r+b") as file:
        file.seek(64)
        file.write(np.array([VOCAB_SIZE], np.uint16).tobytes())
    rows = Windows(opened(path), 10, name="training set")
    with raises("damaged-file", "TextData.cache"):
        rows.read(np.array([0, 3]))
    assert rows.read(np.array([0, 1]))["inputs"].shape == (2, 10)


@pytest.mark.parametrize("size", [0, 998, 1002])
def test_changed_length_is_an_error(path, size):
    tokens = opened(path)
    rows = Windows(tokens, 10, name="training set")
    os.truncate(path, size)
    with raises("damaged-file", "TextData.cache"):
        rows.read(np.array([0]))
    if size < 1000:
        with raises("damaged-file", "TextData.cache"):
            tokens[:]
    with raises("damaged-file", "TextData.cache"):
        opened(path)


def test_changed_contents_are_an_error(path):
    rows = Windows(opened(path), 10, name="training set")
    rows.read(np.array([0]))
    os.utime(path, ns=(0, 0))  # a write may not change the time if the clock is coarse
    with raises("damaged-file", "TextData.cache"):
        rows.read(np.array([0]))


def test_truncation_after_the_size_check_is_an_error(path):
    """Run in a separate process, because a mapping of the file would raise SIGBUS."""
    code = """
        import os, sys
        import numpy as np
        from meshpar.data.token_file import TokenFile
        from meshpar.sharding.types import MeshparError

        path = sys.argv[1]
        tokens = TokenFile(path, np.dtype(np.uint16), num_tokens=500, vocab_size=300, fix="delete it")
        check = tokens._check_unchanged
        tokens._check_unchanged = lambda: (check(), os.truncate(path, 0))
        try:
            tokens.windows(np.array([0, 10]), 11)
        except MeshparError as error:
            print(error)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "it ends at byte 0 and should have 1,000 bytes" in process.stdout


@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir])
def test_token_file_must_be_a_regular_file(path, replace):
    path.unlink()
    replace(path)
    with raises("wrong-type", "TextData.cache"):
        opened(path)
