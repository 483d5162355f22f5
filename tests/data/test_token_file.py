"""TokenFile: damage is found when a file is opened, and a file that changes later is an error."""

from __future__ import annotations

import os

import numpy as np
import pytest

from meshpar.data import token_file
from meshpar.data.rows import Windows
from meshpar.data.token_file import TokenFile, block_checksums
from meshpar.sharding.types import MeshparError

VOCAB_SIZE = 300
NUM_TOKENS = 500


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "BLOCK_BYTES", 16)  # 63 blocks
    (np.arange(NUM_TOKENS) % VOCAB_SIZE).astype(np.uint16).tofile(tmp_path / "train.tokens")
    return tmp_path / "train.tokens"


def opened(path, **changes):
    if "checksums" not in changes:
        changes["checksums"] = block_checksums(path)
    options = {"num_tokens": NUM_TOKENS, "vocab_size": VOCAB_SIZE} | changes
    return TokenFile(path, np.dtype(np.uint16), fix="delete it", **options)


def overwrite(path, start, data):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def test_it_reads_like_an_array(path):
    tokens, expected = opened(path), np.fromfile(path, np.uint16)
    tokens.verify(all_blocks=True)
    assert len(tokens) == NUM_TOKENS
    assert np.array_equal(np.asarray(tokens), expected)
    for where in (slice(None), slice(3, 40), slice(-5, None), slice(7, 2), slice(0, 90, 7), slice(490, 900)):
        assert np.array_equal(tokens[where], expected[where]), where


def test_an_empty_file_is_an_empty_array(tmp_path):
    (tmp_path / "x.tokens").touch()
    tokens = opened(tmp_path / "x.tokens", num_tokens=0)
    tokens.verify(all_blocks=True)
    assert len(tokens) == len(tokens[:]) == 0


@pytest.mark.parametrize("start", [0, 500, 999])
def test_one_changed_byte_is_found(path, start):
    checksums = block_checksums(path)
    overwrite(path, start, bytes([path.read_bytes()[start] ^ 1]))
    first = start // 16 * 16
    with pytest.raises(MeshparError, match=rf"train.tokens.*bytes {first} to {min(first + 16, 1000):,} .*delete it"):
        opened(path, checksums=checksums).verify(all_blocks=False)


def test_a_sample_reads_some_blocks_and_finds_zeros(path, monkeypatch):
    monkeypatch.setattr(token_file, "SAMPLED_BLOCKS", 5)
    tokens, read = opened(path), []
    monkeypatch.setattr(token_file.os, "preadv", lambda *args, real=os.preadv: read.append(args[2]) or real(*args))
    tokens.verify(all_blocks=False)
    assert len(set(read)) == 5
    tokens.verify(all_blocks=True)
    assert len(read) == 5 + 63
    overwrite(path, 0, bytes(1000))
    with pytest.raises(MeshparError, match="checksum"):
        tokens.verify(all_blocks=False)


def test_ids_outside_the_vocabulary_are_found(path):
    overwrite(path, 64, np.array([VOCAB_SIZE], np.uint16).tobytes())
    tokens = opened(path)  # the checksums are those of the damaged file
    with pytest.raises(MeshparError, match="token 300, and the vocabulary has 300"):
        tokens.verify(all_blocks=True)
    rows = Windows(tokens, 10, what="training set")
    with pytest.raises(MeshparError, match="token 300"):
        rows.read(np.array([0, 3]))
    assert rows.read(np.array([0, 1]))["inputs"].shape == (2, 10)


@pytest.mark.parametrize("size", [0, 998, 1002])
def test_a_file_whose_length_changes_while_it_is_read_is_an_error(path, size):
    tokens = opened(path)
    rows = Windows(tokens, 10, what="training set")
    os.truncate(path, size)
    with pytest.raises(MeshparError, match=f"has {size:,} bytes and should have 1,000"):
        rows.read(np.array([0]))
    if size < 1000:
        with pytest.raises(MeshparError, match=f"ends at byte {size} "):
            tokens[:]
    with pytest.raises(MeshparError, match="should have 1,000"):
        opened(path)


@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir])
def test_another_kind_of_file_is_an_error(path, replace):
    checksums = block_checksums(path)
    path.unlink()
    replace(path)
    with pytest.raises(MeshparError, match="a pipe|a folder"):
        opened(path, checksums=checksums)
