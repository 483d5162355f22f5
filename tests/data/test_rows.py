"""Rows: windows of a stream, examples of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.rows import ArrayRows, Windows
from meshpar.sharding.types import MeshparError


@given(st.integers(1, 20), st.integers(2, 200))
def test_every_token_is_a_target_at_most_once(seq_len, num_tokens):
    if num_tokens <= seq_len:
        return
    rows = Windows(np.arange(num_tokens, dtype=np.uint8), seq_len, what="training set")
    read = rows.read(np.arange(len(rows)))
    assert read["inputs"].shape == read["targets"].shape == (len(rows), seq_len)
    assert read["inputs"].dtype == read["targets"].dtype == np.int32
    # In order, without gap: all tokens but the first and less than a window at the end.
    assert read["targets"].ravel().tolist() == list(range(1, len(rows) * seq_len + 1))
    assert np.array_equal(read["inputs"], read["targets"] - 1)
    assert num_tokens - 1 - len(rows) * seq_len < seq_len


def test_windows_are_read_in_the_order_asked():
    rows = Windows(np.arange(9, dtype=np.uint16), 2, what="training set")
    assert rows.read(np.array([3, 0, 3]))["inputs"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert rows.read(np.array([], dtype=np.int64))["inputs"].shape == (0, 2)


def test_a_stream_shorter_than_a_window_is_an_error():
    with pytest.raises(MeshparError, match="cut the held-out set into windows of 8") as error:
        Windows(np.zeros(8, dtype=np.uint8), 8, what="held-out set")
    assert "seq_len to 7 or less" in error.value.fix
    assert len(Windows(np.zeros(9, dtype=np.uint8), 8, what="held-out set")) == 1


def test_array_rows_pick_examples():
    rows = ArrayRows({"x": np.arange(10) * 10, "y": np.arange(20).reshape(10, 2)}, np.array([7, 2, 5]))
    read = rows.read(np.array([2, 0]))
    assert len(rows) == 3
    assert read["x"].tolist() == [50, 70]
    assert read["y"].tolist() == [[10, 11], [14, 15]]
