"""TokenFile: the tokens in a file of the token cache, with checks that find damage before training does."""

from __future__ import annotations

import os
import random
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer, Shaped, UInt

from meshpar.sharding.host_resources import check_file
from meshpar.sharding.types import problem

BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers."""
SAMPLED_BLOCKS = 64
"""Blocks that are verified when a file is opened. A file with no more blocks is verified completely."""


class TokenFile:
    """A one-dimensional, read-only array of tokens in a file.

    A slice is a copy, made with `pread`: if the file has become shorter, that is an error. Reading a mapping of such a
    file would end the process with SIGBUS.

    Args:
      path: the file.
      dtype: the dtype of the tokens.
      num_tokens: the length that the file must have.
      checksums: the CRC-32 of each block, as `block_checksums` returns them.
      vocab_size: every id must be below it.
      fix: what errors tell the user to do.

    Raises:
      ValueError: the file is missing, cannot be read, or has another length.
    """

    def __init__(
        self, path: Path, dtype: np.dtype, *, num_tokens: int, checksums: Sequence[int], vocab_size: int, fix: str
    ) -> None:
        self.path, self.dtype = path, dtype
        self._num_bytes, self._checksums = num_tokens * dtype.itemsize, checksums
        self._vocab_size, self._fix = vocab_size, fix
        check_file(path, f"`TextData.cache`: {path}", fix, most_bytes=None)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            self.check_size()
            # An empty file cannot be mapped.
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                mapping = np.memmap(file, dtype, "r", shape=(num_tokens,)) if num_tokens else np.zeros(0, dtype)
            self.mapping: UInt[np.ndarray, " tokens"] = mapping
            """All tokens. Call `check_size` right before each read."""
        except OSError as error:
            raise self._damaged(f"opening it failed ({error.strerror})") from error
        if len(checksums) != -(-self._num_bytes // BLOCK_BYTES):
            raise self._damaged(f"it has {len(checksums)} checksums, which do not cover its {self._num_bytes} bytes")

    def __len__(self) -> int:
        return len(self.mapping)

    def __getitem__(self, where: slice) -> UInt[np.ndarray, " tokens"]:
        start, stop, step = where.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(self._read(start * size, max(stop - start, 0) * size), self.dtype)[::step]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> Shaped[np.ndarray, " tokens"]:
        return np.array(self[:], dtype=dtype)

    def verify(self, *, all_blocks: bool) -> None:
        """Compare blocks with their checksums and their ids with the vocabulary.

        Args:
          all_blocks: verify every block. Otherwise verify `SAMPLED_BLOCKS` random ones.

        Raises:
          ValueError: a block is damaged.
        """
        num = len(self._checksums)
        is_sampled = num > SAMPLED_BLOCKS and not all_blocks
        for block in sorted(random.SystemRandom().sample(range(num), SAMPLED_BLOCKS)) if is_sampled else range(num):
            start = block * BLOCK_BYTES
            data = self._read(start, min(BLOCK_BYTES, self._num_bytes - start))
            if zlib.crc32(data) != self._checksums[block]:
                raise self._damaged(f"bytes {start:,} to {start + len(data):,} do not match their checksum")
            self.check_ids(np.frombuffer(data, self.dtype))

    def check_size(self) -> None:
        """Raise `ValueError` if the file has not the length that it must have."""
        if (found := os.fstat(self._descriptor).st_size) != self._num_bytes:
            raise self._damaged(f"it has {found:,} bytes and should have {self._num_bytes:,}")

    def check_ids(self, tokens: Integer[np.ndarray, " ..."]) -> None:
        """Raise `ValueError` if an id is outside the vocabulary."""
        if tokens.size and (largest := int(tokens.max())) >= self._vocab_size:
            raise self._damaged(f"it contains token {largest}, and the vocabulary has {self._vocab_size} tokens")

    def _read(self, start: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            try:
                got = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise self._damaged(f"reading it failed ({error.strerror})") from error
            if not got:
                raise self._damaged(f"it ends at byte {start + done:,} and should have {self._num_bytes:,} bytes")
            done += got
        return data

    def _damaged(self, why: str) -> ValueError:
        return problem("`TextData.cache`", f"read the tokens in {self.path}", f"it is damaged: {why}", self._fix)


def pieces(tokens: UInt[np.ndarray, " tokens"] | TokenFile, length: int) -> Iterator[UInt[np.ndarray, " piece"]]:
    """Yield the tokens in pieces of `length`, so that a long stream needs little memory."""
    for start in range(0, len(tokens), length):
        yield tokens[start : start + length]


def block_checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each block of a file."""
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
