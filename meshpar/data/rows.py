"""Random access to examples (rows): windows of a token stream, or entries of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int64, Shaped, UInt

from meshpar.sharding.errors import problem

PACKED_FIELDS = ("inputs", "targets", "segments", "positions", "weights")
"""Arrays of a row with several documents or conversations, int32 `[rows, seq_len]`, for `next_token_loss`: segment ids
from 1 (0 for padding), positions from 0 in each segment, and weights of the targets, 0 or 1."""


class Rows(Protocol):
    """Examples with random access. Threads may read at the same time."""

    def __len__(self) -> int: ...

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        """Return the rows with these indices as arrays whose first dim is the row."""
        ...


class Windows:
    """Windows of a token stream, as `inputs` and `targets`, both int32 `[rows, seq_len]`, or as `PACKED_FIELDS`.

    Window `i` starts at token `i * seq_len` and has `seq_len + 1` tokens. The last target of a window is the first
    input of the next. So every token is a target exactly once, except the first token and an incomplete last window.

    Args:
      tokens: the token stream.
      seq_len: number of predictions per window.
      name: name of the stream in errors, such as "training set".
      separator_id: token that ends a document. If given, windows have segments, and positions restart in each document.
        A separator does not predict the first token of the next document: that target has weight 0.
    """

    def __init__(
        self, tokens: UInt[np.ndarray, " tokens"], seq_len: int, *, name: str, separator_id: int | None = None
    ) -> None:
        if len(tokens) <= seq_len:
            requested = f"split the {name} into windows of {seq_len} + 1 tokens"
            fix = f"set seq_len to {max(len(tokens) - 1, 1)} or less, add text, or change `valid_fraction`"
            raise problem("`seq_len`", requested, f"the {name} has {len(tokens)} tokens", fix, "out-of-range")
        self._tokens, self._seq_len, self._separator_id = tokens, seq_len, separator_id

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        view = np.lib.stride_tricks.sliding_window_view(self._tokens, self._seq_len + 1)
        windows = view[indices * self._seq_len]
        rows = {"inputs": windows[:, :-1].astype(np.int32), "targets": windows[:, 1:].astype(np.int32)}
        if self._separator_id is None:
            return rows
        is_end, index = rows["inputs"] == self._separator_id, np.arange(self._seq_len, dtype=np.int32)
        is_first = np.pad(is_end[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        segments = np.cumsum(is_first, axis=1, dtype=np.int32)
        positions = index - np.maximum.accumulate(np.where(is_first, index, 0), axis=1)
        return {**rows, "segments": segments, "positions": positions, "weights": 1 - is_end.astype(np.int32)}


class ArrayRows:
    """Entries of arrays, selected by their indices in the first dim."""

    def __init__(
        self, arrays: Mapping[str, Shaped[np.ndarray, "examples ..."]], selection: Int64[np.ndarray, " rows"]
    ) -> None:
        self._arrays, self._selection = dict(arrays), selection

    def __len__(self) -> int:
        return len(self._selection)

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        return {name: array[self._selection[indices]] for name, array in self._arrays.items()}


class JoinedRows:
    """Concatenation of row sets with the same arrays.

    Attributes:
      starts: index of the first row of each set.
    """

    def __init__(self, sets: Sequence[Rows]) -> None:
        self._sets = sets
        ends = np.cumsum([len(rows) for rows in sets])
        self.starts, self._num_rows = [0, *ends[:-1].tolist()], int(ends[-1])

    def __len__(self) -> int:
        return self._num_rows

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        set_of_row = np.searchsorted(self.starts, indices, side="right") - 1
        joined: dict[str, np.ndarray] = {}
        for number in np.unique(set_of_row) if len(indices) else [0]:
            is_in_set = set_of_row == number
            for name, array in self._sets[number].read(indices[is_in_set] - self.starts[number]).items():
                joined.setdefault(name, np.empty((len(indices), *array.shape[1:]), array.dtype))[is_in_set] = array
        return joined
