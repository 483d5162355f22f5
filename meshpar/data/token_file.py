"""Random access to the tokens in a file of the cache."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped, UInt

from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import check_file


class TokenFile:
    """A read-only vector of tokens in a file.

    Each read is a copy (`pread`). If the file is truncated, a read raises an error. If the file were mapped into
    memory, the kernel would kill the process with SIGBUS.

    Args:
      path: the file.
      dtype: the dtype of the tokens.
      num_tokens: the expected length of the file.
      vocab_size: the upper bound of the ids.
      fix: the advice at the end of error messages.

    Raises:
      MeshparError: the file is missing, cannot be read, or has the wrong length.
    """

    def __init__(self, path: Path, dtype: np.dtype, *, num_tokens: int, vocab_size: int, fix: str) -> None:
        self.path, self.dtype = path, dtype
        self._num_tokens, self._num_bytes = num_tokens, num_tokens * dtype.itemsize
        self._vocab_size, self._fix = vocab_size, fix
        check_file(path, f"`TextData.cache`: {path}", fix, max_bytes=None)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.damaged(f"opening it failed ({error.strerror})") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._modified_ns = os.fstat(self._descriptor).st_mtime_ns
        self._check_unchanged()

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, where: slice) -> UInt[np.ndarray, " tokens"]:
        start, stop, step = where.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(self._read(start * size, max(stop - start, 0) * size), self.dtype)[::step]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> Shaped[np.ndarray, " tokens"]:
        return np.array(self[:], dtype=dtype)

    def windows(self, starts: Int64[np.ndarray, " windows"], length: int) -> UInt[np.ndarray, "windows length"]:
        """Return `length` tokens from each start.

        Raises:
          MeshparError: the file was written to after it was opened, or an id is outside the vocabulary.
        """
        self._check_unchanged()
        size = self.dtype.itemsize
        data = b"".join([self._read(start, length * size) for start in (starts * size).tolist()])
        tokens = np.frombuffer(data, self.dtype).reshape(len(starts), length)
        if tokens.size and (largest := int(tokens.max())) >= self._vocab_size:
            raise self.damaged(f"it contains token {largest}, and the vocabulary has {self._vocab_size} tokens")
        return tokens

    def damaged(self, reason: str) -> MeshparError:
        """Return the error for a damaged file."""
        requested = f"read the tokens in {self.path}"
        return problem("`TextData.cache`", requested, f"it is damaged: {reason}", self._fix, "damaged-file")

    def _check_unchanged(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_size != self._num_bytes:
            raise self.damaged(f"it has {status.st_size:,} bytes and should have {self._num_bytes:,}")
        if status.st_mtime_ns != self._modified_ns:
            raise self.damaged("it was written to while it was read")

    def _read(self, start: int, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:  # the kernel returns at most 2 GiB per call
            try:
                more = os.pread(self._descriptor, num_bytes - len(data), start + len(data))
            except OSError as error:
                raise self.damaged(f"reading it failed ({error.strerror})") from error
            if not more:
                raise self.damaged(f"it ends at byte {start + len(data):,} and should have {self._num_bytes:,} bytes")
            data = data + more if data else more
        return data


def pieces(tokens: UInt[np.ndarray, " tokens"] | TokenFile, length: int) -> Iterator[UInt[np.ndarray, " piece"]]:
    """Yield the tokens in pieces of `length`, so that a long stream needs little memory."""
    for start in range(0, len(tokens), length):
        yield tokens[start : start + length]
