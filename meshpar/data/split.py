"""Who is held out: a split into training and validation set that depends on names alone.

A document is held out when the hash of its name says so. Neither its text, nor the order of the documents, nor the
seed of a run moves it to the other side, and a new document moves no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int64

from meshpar.data.text import Document
from meshpar.sharding.types import problem


def check_fraction(where: str, fraction: float) -> None:
    """Raises ValueError unless the fraction leaves something on both sides."""
    if not 0 < fraction < 1:
        raise problem(
            where, f"hold out a fraction of {fraction}", "both sides need data", "choose between 0 and 1, as 0.05"
        )


class DocumentSplit:
    """Holds out about `valid_fraction` of the documents, at least one; of a single document, its tail.

        while not split.settled:
            for document, is_held_out in split(documents): ...

    Documents come one at a time, long ones in parts, and none is kept. Whether all of them are on one side is known
    after the last only: then they come once more, and one of them goes to the other side.

    Raises:
      ValueError: a fraction outside (0, 1), or, while documents come, one too short to be cut in two.
    """

    def __init__(self, valid_fraction: float) -> None:
        check_fraction("`valid_fraction`", valid_fraction)
        self.settled = False
        """Whether the documents that came were split for good."""
        self.how = ""
        """What was held out, and by what rule, in words."""
        self._fraction = valid_fraction
        self._moved: str | None = None
        self._is_single = False
        self._num_chars = 0

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """Each document and whether it is held out, in their order."""
        if self._is_single:
            yield from self._cut(documents)
            return
        total = held = self._num_chars = 0
        lowest, highest = (2.0, ""), (-1.0, "")
        for document in documents:
            rank = _rank(document.name), document.name
            is_held_out = (rank[0] < self._fraction) != (document.name == self._moved)
            lowest, highest = min(lowest, rank), max(highest, rank)
            total, held = total + (not document.goes_on), held + (is_held_out and not document.goes_on)
            self._num_chars += len(document.text)
            yield document, is_held_out
        self.how = f"{held} of {total} documents, by the hash of their names"
        self.settled = 0 < held < total or self._moved is not None
        self._is_single = total == 1
        # Few documents may all fall on one side: the one that was nearest to the other goes there.
        self._moved = (highest if held else lowest)[1]

    def _cut(self, parts: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """The only document, with its tail held out."""
        left = round(self._num_chars * (1 - self._fraction))
        for part in parts:
            if not 0 < left < self._num_chars and not self.settled:
                asked = f"hold out {self._fraction} of `{part.name}`, the only document"
                exists = f"it has {self._num_chars} characters, so one side would be empty"
                raise problem("`valid_fraction`", asked, exists, "give more text, or a fraction nearer to 0.5")
            self.settled = True
            self.how = f"the last {self._fraction:.1%} of `{part.name}`, the only document"
            head, tail = part.text[: max(left, 0)], part.text[max(left, 0) :]
            left -= len(part.text)
            if head:
                yield part.part(head, goes_on=left > 0), False
            if tail or not part.goes_on:
                yield part.part(tail, goes_on=part.goes_on), True


def split_rows(num_rows: int, valid_fraction: float) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " valid"]]:
    """Indices of the rows to train on and of `valid_fraction` of the rows, held out by the hash of their number.

    Raises:
      ValueError: a fraction outside (0, 1), or fewer than two rows.
    """
    check_fraction("`valid_fraction`", valid_fraction)
    if num_rows < 2:
        exists = f"there is {num_rows} row"
        raise problem("the data", "hold out some rows", exists, "give at least two rows")
    count = min(max(round(num_rows * valid_fraction), 1), num_rows - 1)
    order = np.argsort(_scramble(np.arange(num_rows, dtype=np.uint64)), kind="stable").astype(np.int64)
    return np.sort(order[count:]), np.sort(order[:count])


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the name only and is spread evenly over names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64


def _scramble(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: the same on every machine and with every NumPy, which its generators do not promise."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
