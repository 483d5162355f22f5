"""Split into a training set and a validation set by hashes of names.

A document belongs to the validation set if the hash of the document's name is below `valid_fraction`. The split does
not depend on texts, the order of documents or the seed of a run, and new documents do not move existing ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int64

from meshpar.data.text import Document
from meshpar.sharding.errors import problem


def check_fraction(where: str, fraction: float) -> None:
    """Check `0 < valid_fraction < 1`."""
    if not 0 < fraction < 1:
        reason = "the training set and the validation set must not be empty"
        raise problem(where, f"set valid_fraction={fraction}", reason, "use valid_fraction=0.05", "out-of-range")


class DocumentSplit:
    """Split of a stream of documents, with about a fraction `valid_fraction` for validation.

        while not split.settled:
            for document, is_held_out in split(documents): ...

    Documents are not stored, and may arrive in parts. If all documents of the first pass are in the same set, a second
    pass moves the document whose hash is nearest to the threshold. A single document is split in two.
    """

    def __init__(self, valid_fraction: float) -> None:
        check_fraction("`valid_fraction`", valid_fraction)
        self.settled = False
        """True if the last pass split the documents."""
        self.held_out = ""
        """Description of the validation set."""
        self._fraction, self._is_single, self._num_chars = valid_fraction, False, 0
        self._moved: str | None = None

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """Yield each document, and True if it belongs to the validation set."""
        if self._is_single:
            yield from self._cut(documents)
            return
        total = num_held_out = self._num_chars = 0
        lowest, highest = (2.0, ""), (-1.0, "")
        for document in documents:
            name_hash = hashlib.blake2b(document.name.encode(), digest_size=8).digest()
            rank = int.from_bytes(name_hash, "big") / 2**64, document.name
            is_held_out = (rank[0] < self._fraction) != (document.name == self._moved)
            lowest, highest = min(lowest, rank), max(highest, rank)
            if not document.goes_on:
                total, num_held_out = total + 1, num_held_out + is_held_out
            self._num_chars += len(document.text)
            yield document, is_held_out
        self.held_out = f"{num_held_out} of {total} documents, by the hash of their names"
        self.settled = 0 < num_held_out < total or self._moved is not None
        self._is_single = total == 1
        self._moved = (highest if num_held_out else lowest)[1]

    def _cut(self, parts: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        remaining = round(self._num_chars * (1 - self._fraction))
        for part in parts:
            if not 0 < remaining < self._num_chars and not self.settled:
                requested = f"move {self._fraction} of `{part.name}`, the only document, to the validation set"
                reason = f"it has {self._num_chars} characters, so a set would be empty"
                fix = "add text, or choose a fraction closer to 0.5"
                raise problem("`valid_fraction`", requested, reason, fix, "out-of-range")
            self.settled = True
            self.held_out = f"the last {self._fraction:.1%} of `{part.name}`, the only document"
            head, tail = part.text[: max(remaining, 0)], part.text[max(remaining, 0) :]
            remaining -= len(part.text)
            if head:
                yield part.part(head, goes_on=remaining > 0), False
            if tail or not part.goes_on:
                yield part.part(tail, goes_on=part.goes_on), True


def split_examples(
    num_examples: int, valid_fraction: float
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " valid"]]:
    """Return the sorted indices of the training rows and of the validation rows, chosen by the hash of the index."""
    check_fraction("`valid_fraction`", valid_fraction)
    if num_examples < 2:
        reason = f"the number of examples is {num_examples}"
        raise problem("the data", "hold out examples", reason, "use at least two examples", "out-of-range")
    count = min(max(round(num_examples * valid_fraction), 1), num_examples - 1)
    # The finalizer of SplitMix64 returns the same order with all NumPy versions; NumPy's generators do not.
    x = (np.arange(num_examples, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    order = np.argsort(x ^ (x >> np.uint64(31)), kind="stable").astype(np.int64)
    return np.sort(order[count:]), np.sort(order[:count])
