"""Tests of windows of token streams and of array entries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.rows import ArrayRows, Windows
from tests.errors import raises


@given(st.integers(1, 20), st.integers(2, 200))
def test_windows_cover_each_target_once(seq_len, num_tokens):
    if num_tokens <= seq_len:
        return
    rows = Windows(np.arange(num_tokens, dtype=np.uint8), seq_len, name="training set")
    read = rows.read(np.arange(len(rows)))
    assert read["inputs"].shape == read["targets"].shape == (len(rows), seq_len)
    assert read["inputs"].dtype == read["targets"].dtype == np.int32
    # All tokens in order, except the first token and an incomplete last window.
    assert read["targets"].ravel().tolist() == list(range(1, len(rows) * seq_len + 1))
    assert np.array_equal(read["inputs"], read["targets"] - 1)
    assert num_tokens - 1 - len(rows) * seq_len < seq_len


def test_separate_documents_have_segments_positions_and_weights():
    tokens = np.array([5, 0, 0, 6, 7, 8, 0, 9, 4], dtype=np.uint8)
    rows = Windows(tokens, 4, name="training set", separator_id=0).read(np.array([0, 1]))
    assert {name: x.tolist() for name, x in rows.items()} == {
        "inputs": [[5, 0, 0, 6], [7, 8, 0, 9]],
        "targets": [[0, 0, 6, 7], [8, 0, 9, 4]],
        "segments": [[1, 1, 2, 3], [1, 1, 1, 2]],
        "positions": [[0, 1, 0, 0], [0, 1, 2, 0]],
        "weights": [[1, 0, 0, 1], [1, 1, 0, 1]],
    }
    assert {x.dtype for x in rows.values()} == {np.dtype(np.int32)}


def test_windows_are_read_in_the_requested_order():
    rows = Windows(np.arange(9, dtype=np.uint16), 2, name="training set")
    assert rows.read(np.array([3, 0, 3]))["inputs"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert rows.read(np.array([], dtype=np.int64))["inputs"].shape == (0, 2)


def test_windows_reject_a_stream_shorter_than_a_window():
    with raises("out-of-range", "seq_len") as error:
        Windows(np.zeros(8, dtype=np.uint8), 8, name="validation set")
    assert "seq_len to 7 or less" in error.value.fix
    assert len(Windows(np.zeros(9, dtype=np.uint8), 8, name="validation set")) == 1


def test_array_rows_select_examples():
    rows = ArrayRows({"x": np.arange(10) * 10, "y": np.arange(20).reshape(10, 2)}, np.array([7, 2, 5]))
    read = rows.read(np.array([2, 0]))
    assert len(rows) == 3
    assert read["x"].tolist() == [50, 70]
    assert read["y"].tolist() == [[10, 11], [14, 15]]
