"""Bigram baselines: the cross-entropy that a model of neighbouring tokens reaches on held-out tokens.

Two numbers bound what looking at one token can do. *fitted*: counts of the training stream, smoothed, scored on the
held-out pairs: an honest bigram model. *oracle*: the conditional entropy H(next | previous) of the scored pairs
themselves, which is a bigram model fitted to the answer: no bigram model scores lower on them.

A model whose mean loss is below *oracle* uses more than one token of context. The converse needs care: with a large
vocabulary and few scored tokens most pairs occur once, and *oracle* falls towards 0 by knowing them by heart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float64, Int64, Integer
from scipy import sparse

from meshpar.data.token_file import TokenFile, pieces
from meshpar.sharding.types import problem

_CHUNK = 4_000_000
"""Pairs counted at once: bounds the memory, whatever the length of the stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """A mean cross-entropy in the units people quote."""

    nats_per_token: float
    bytes_per_token: float
    """UTF-8 bytes that one of the tokens stands for, on average."""

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits_per_token / self.bytes_per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """What bigram models reach on some held-out tokens."""

    fitted: CrossEntropy
    """Of the bigram model fitted to the training stream, with interpolated Witten-Bell smoothing."""
    oracle: CrossEntropy
    """The conditional entropy of the scored pairs themselves."""
    num_tokens: int
    """Tokens scored."""

    def of(self, nats_per_token: float) -> CrossEntropy:
        """A model's mean loss on the same tokens, to compare in the same units."""
        return dataclasses.replace(self.fitted, nats_per_token=nats_per_token)


class Bigram:
    """A bigram model: counts of neighbouring tokens, interpolated with single-token counts by Witten and Bell's rule.

        P(b | a) = (c(a, b) + d(a) P(b)) / (c(a) + d(a))      d(a): different tokens seen after a
        P(b)     = (c(b) + d / V) / (c + d)                   d: different tokens seen; V: the vocabulary

    The weight of the shorter context grows with how many different tokens followed, so there is nothing to tune, and
    every probability is above 0. Source: Witten & Bell 1991; Chen & Goodman 1998, section 2.4.

    Memory grows with the pairs that occur, not with the square of the vocabulary.
    """

    def __init__(self, tokens: Integer[np.ndarray, " tokens"] | TokenFile, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        chunks = (tokens[start : start + _CHUNK + 1] for start in range(0, len(tokens), _CHUNK))
        self._keys, self._counts = _count_pairs(((chunk[:-1], chunk[1:]) for chunk in chunks), vocab_size)
        before = self._keys // vocab_size
        self._times_before = np.bincount(before, weights=self._counts, minlength=vocab_size)
        self._kinds_after = np.bincount(before, minlength=vocab_size).astype(np.float64)
        # In pieces: bincount makes eight bytes of each token.
        single = np.zeros(vocab_size)
        for chunk in pieces(tokens, _CHUNK):
            single += np.bincount(chunk, minlength=vocab_size)
        kinds = np.count_nonzero(single)
        self._single = (single + kinds / vocab_size) / (single.sum() + kinds)

    def probability(
        self, before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """P(after | before) of each pair."""
        keys = before.astype(np.int64) * self._vocab_size + after
        shorter = self._single[after]
        kinds, times = self._kinds_after[before], self._times_before[before]
        seen = times > 0
        return np.where(seen, (self._times(keys) + kinds * shorter) / np.where(seen, times + kinds, 1), shorter)

    def _times(self, keys: Int64[np.ndarray, " pairs"]) -> Int64[np.ndarray, " pairs"]:
        """How often each pair occurred."""
        if not len(self._keys):
            return np.zeros_like(keys)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._counts[place], 0)


def bigram_baseline(
    train: Integer[np.ndarray, " tokens"] | TokenFile,
    before: Integer[np.ndarray, " pairs"],
    after: Integer[np.ndarray, " pairs"],
    *,
    vocab_size: int,
    bytes_per_token: float = 1.0,
) -> Baseline:
    """Scores the tokens `after`, each given the token `before` it.

    Args:
      train: the stream the fitted model counts.
      before: the token before each scored token.
      after: the scored tokens.
      vocab_size: every id is below it.
      bytes_per_token: UTF-8 bytes one scored token stands for, on average.

    Raises:
      ValueError: nothing to score, or ids outside the vocabulary.
    """
    for tokens, what in ((train, "training"), (before, "preceding"), (after, "scored")):
        _check_tokens(tokens, vocab_size, what)
    pairs = zip(pieces(before, _CHUNK), pieces(after, _CHUNK), strict=True)
    keys, counts = _count_pairs(pairs, vocab_size)
    first, second = np.divmod(keys, vocab_size)
    model = Bigram(train, vocab_size)
    given = np.bincount(first, weights=counts, minlength=vocab_size)[first]
    fitted, oracle = (
        CrossEntropy(nats_per_token=float(-(counts * np.log(p)).sum() / counts.sum()), bytes_per_token=bytes_per_token)
        for p in (model.probability(first, second), counts / given)
    )
    return Baseline(fitted=fitted, oracle=oracle, num_tokens=int(counts.sum()))


def _count_pairs(
    chunks: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int
) -> tuple[Int64[np.ndarray, " kinds"], Int64[np.ndarray, " kinds"]]:
    """The different pairs, as `before * vocab_size + after` in rising order, and how often each occurs."""
    shape = (vocab_size, vocab_size)
    counts = sparse.csr_array(shape, dtype=np.int64)
    for pairs in chunks:
        counts = counts + sparse.coo_array((np.ones(len(pairs[0]), np.int64), pairs), shape=shape).tocsr()
    counts.sort_indices()
    found = counts.tocoo()
    return found.row.astype(np.int64) * vocab_size + found.col, found.data


def _check_tokens(tokens: np.ndarray | TokenFile, vocab_size: int, what: str) -> None:
    if not len(tokens):
        raise problem("bigram_baseline", f"use the {what} tokens", "there are none", "give at least one")
    least, most = zip(*((int(chunk.min()), int(chunk.max())) for chunk in pieces(tokens, _CHUNK)), strict=True)
    if max(most) >= vocab_size or min(least) < 0:
        exists = f"they go from {min(least)} to {max(most)}"
        fix = f"set vocab_size to {max(most) + 1} or more"
        raise problem("bigram_baseline", f"use the {what} tokens with a vocabulary of {vocab_size}", exists, fix)
