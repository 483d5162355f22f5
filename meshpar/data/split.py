"""Who is held out: a split into training and validation set that depends on names alone.

A document is held out when the hash of its name says so. Neither its text, nor the order of the documents, nor the
seed of a run moves it to the other side, and a new document moves no other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from meshpar.data.text import Document
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Documents to train on and documents held out."""

    train: tuple[Document, ...]
    valid: tuple[Document, ...]
    how: str
    """What was held out, and by what rule, in words."""


def check_fraction(where: str, fraction: float) -> None:
    """Raises ValueError unless the fraction leaves something on both sides."""
    if not 0 < fraction < 1:
        raise problem(
            where, f"hold out a fraction of {fraction}", "both sides need data", "choose between 0 and 1, as 0.05"
        )


def split_documents(documents: Sequence[Document], valid_fraction: float) -> Split:
    """Holds out about `valid_fraction` of the documents, at least one; of a single document, its tail.

    Raises:
      ValueError: a fraction outside (0, 1), or one document too short to be cut in two.
    """
    check_fraction("`TextData.valid_fraction`", valid_fraction)
    if len(documents) == 1:
        return _cut_tail(documents[0], valid_fraction)
    ranked = sorted(documents, key=lambda document: (_rank(document.name), document.name))
    count = sum(_rank(document.name) < valid_fraction for document in ranked)
    # Few documents may all fall on one side: the one that was nearest to the other goes there.
    count = min(max(count, 1), len(ranked) - 1)
    held = {document.name for document in ranked[:count]}
    return Split(
        train=tuple(document for document in documents if document.name not in held),
        valid=tuple(document for document in documents if document.name in held),
        how=f"{count} of {len(documents)} documents, by the hash of their names",
    )


def split_rows(num_rows: int, valid_fraction: float) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " valid"]]:
    """Indices of the rows to train on and of `valid_fraction` of the rows, held out by the hash of their number.

    Raises:
      ValueError: a fraction outside (0, 1), or fewer than two rows.
    """
    check_fraction("`ArrayData.valid_fraction`", valid_fraction)
    if num_rows < 2:
        exists = f"there is {num_rows} row"
        raise problem("`ArrayData.arrays`", "hold out some rows", exists, "give at least two rows, or `valid`")
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


def _cut_tail(document: Document, valid_fraction: float) -> Split:
    at = round(len(document.text) * (1 - valid_fraction))
    head, tail = (
        Document(name=f"{document.name}#{part}", text=text, num_bytes=len(text.encode()))
        for part, text in (("head", document.text[:at]), ("tail", document.text[at:]))
    )
    if not (head.text and tail.text):
        raise problem(
            "`TextData.valid_fraction`",
            f"hold out {valid_fraction} of `{document.name}`, the only document",
            f"it has {len(document.text)} characters, so one side would be empty",
            "give more text, or a fraction nearer to 0.5",
        )
    how = f"the last {valid_fraction:.1%} of `{document.name}`, the only document"
    return Split(train=(head,), valid=(tail,), how=how)
