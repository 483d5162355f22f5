"""Rows: what batches are made of, read by index. A row is a window of a token stream, or one example of some arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int64, Shaped, UInt

from meshpar.data.token_file import TokenFile
from meshpar.sharding.types import problem


class Rows(Protocol):
    """Anything that can be read a few rows at a time, at random, by any thread."""

    def __len__(self) -> int: ...

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        """The rows of these indices: arrays whose first dim runs over them."""
        ...


class Windows:
    """A token stream cut into windows of `seq_len` predictions: inputs and targets, both int32 `[rows, seq_len]`.

    Window `i` starts at token `i * seq_len` and has `seq_len + 1` tokens: neighbours share one, the last target of the
    one and the first input of the other. So every token of the stream, but for its first one and less than a window at
    its end, is a target in exactly one window.

    Args:
      tokens: the stream.
      seq_len: predictions per window.
      what: names the stream in errors, as "training set".

    Raises:
      ValueError: not even one window fits.
    """

    def __init__(self, tokens: UInt[np.ndarray, " tokens"] | TokenFile, seq_len: int, *, what: str) -> None:
        if len(tokens) <= seq_len:
            raise problem(
                "`seq_len`",
                f"cut the {what} into windows of {seq_len} + 1 tokens",
                f"it has {len(tokens)} tokens",
                f"set seq_len to {max(len(tokens) - 1, 1)} or less, give more text, or choose another `valid_fraction`",
            )
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        if isinstance(self._tokens, TokenFile):
            windows = self._tokens.windows(indices * self._seq_len, self._seq_len + 1)
        else:
            view = np.lib.stride_tricks.sliding_window_view(self._tokens, self._seq_len + 1)
            windows = view[indices * self._seq_len]
        return {"inputs": windows[:, :-1].astype(np.int32), "targets": windows[:, 1:].astype(np.int32)}


class ArrayRows:
    """The examples of arrays with the same first dim, or of some of them.

    Args:
      arrays: name to array.
      which: the examples that are rows here, by their place in the arrays.
    """

    def __init__(
        self, arrays: Mapping[str, Shaped[np.ndarray, "examples ..."]], which: Int64[np.ndarray, " rows"]
    ) -> None:
        self._arrays = dict(arrays)
        self._which = which

    def __len__(self) -> int:
        return len(self._which)

    def read(self, indices: Int64[np.ndarray, " rows"]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        which = self._which[indices]
        return {name: array[which] for name, array in self._arrays.items()}
