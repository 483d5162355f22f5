"""Bigram baselines: cross-entropy with one token of context, to compare with a trained model.

*fitted*: a smoothed bigram model of the training stream, evaluated on the validation pairs. *oracle*: the conditional
entropy H(next | previous) of the validation pairs, which is a lower bound for all bigram models.

A model whose mean loss is below *oracle* uses more than one token of context. With a large vocabulary and few scored
tokens, most pairs occur once and *oracle* approaches 0, so a loss above *oracle* does not imply the opposite.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Integer

from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from scipy import sparse

_CHUNK = 4_000_000
"""Number of pairs to count per step. Bounds the memory usage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """A mean cross-entropy in common units."""

    nats_per_token: float
    bytes_per_token: float
    """Average number of UTF-8 bytes per token."""

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits_per_token / self.bytes_per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """Cross-entropies of bigram models on validation tokens."""

    fitted: CrossEntropy
    """Bigram model of the training stream, with interpolated Witten-Bell smoothing."""
    oracle: CrossEntropy
    """Conditional entropy of the scored pairs."""
    num_tokens: int
    """Number of scored tokens."""

    def of(self, nats_per_token: float) -> CrossEntropy:
        """Return the mean loss of another model on the same tokens, in the same units."""
        return dataclasses.replace(self.fitted, nats_per_token=nats_per_token)


class Bigram:
    """Bigram model that interpolates bigram and unigram counts (Witten & Bell 1991; Chen & Goodman 1998, section 2.4).

        P(b | a) = (c(a, b) + d(a) P(b)) / (c(a) + d(a))      d(a): number of distinct tokens after a
        P(b)     = (c(b) + d / V) / (c + d)                   d: number of distinct tokens; V: vocabulary size

    c(a, b), c(a) and c are the counts of a pair, of a token and of all tokens.

    The method has no hyperparameters, and all probabilities are positive. The memory usage is proportional to the
    number of distinct pairs.
    """

    def __init__(self, tokens: Integer[np.ndarray, " tokens"], vocab_size: int) -> None:
        self._counts = _count_pairs(tokens[:-1], tokens[1:], vocab_size)
        self._counts_before = self._counts.sum(axis=1)
        self._num_distinct_after = np.diff(self._counts.indptr)
        unigrams = self._counts.sum(axis=0)
        unigrams[tokens[0]] += 1
        num_distinct = np.count_nonzero(unigrams)
        self._unigram = (unigrams + num_distinct / vocab_size) / (unigrams.sum() + num_distinct)

    def probability(
        self, before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return P(after | before) of each pair."""
        counts = self._counts[before, after]
        unigram = self._unigram[after]
        num_distinct, total = self._num_distinct_after[before], self._counts_before[before]
        bigram = (counts + num_distinct * unigram) / np.maximum(total + num_distinct, 1)
        return np.where(total > 0, bigram, unigram)


def bigram_baseline(
    train: Integer[np.ndarray, " tokens"],
    before: Integer[np.ndarray, " pairs"],
    after: Integer[np.ndarray, " pairs"],
    *,
    vocab_size: int,
    bytes_per_token: float = 1.0,
) -> Baseline:
    """Evaluate bigram models on the tokens `after`, with the tokens `before` as context.

    Args:
      train: training stream of the fitted model.
      before: the token before each scored token.
      after: the scored tokens.
      vocab_size: upper bound of the ids.
      bytes_per_token: average number of UTF-8 bytes per scored token.

    Raises:
      MeshparError: an argument has no tokens, or ids outside the vocabulary.
    """
    for name, tokens in (("train", train), ("before", before), ("after", after)):
        lowest, highest = (tokens.min(), tokens.max()) if len(tokens) else (0, -1)
        if not 0 <= lowest <= highest < vocab_size:
            reason = f"the ids are from {lowest} to {highest}" if len(tokens) else "it is empty"
            fix = "pass at least one token, and set vocab_size to more than the largest id"
            code = "out-of-range" if len(tokens) else "wrong-shape"
            raise problem(f"bigram_baseline, `{name}`", f"use vocab_size={vocab_size}", reason, fix, code)
    pairs = _count_pairs(before, after, vocab_size)
    counts, totals = pairs.data, np.repeat(pairs.sum(axis=1), np.diff(pairs.indptr))
    first, second = pairs.tocoo().coords
    fitted, oracle = (
        CrossEntropy(nats_per_token=float(-(counts * np.log(p)).sum() / counts.sum()), bytes_per_token=bytes_per_token)
        for p in (Bigram(train, vocab_size).probability(first, second), counts / totals)
    )
    return Baseline(fitted=fitted, oracle=oracle, num_tokens=int(counts.sum()))


def _count_pairs(
    before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"], vocab_size: int
) -> sparse.csr_array:
    from scipy import sparse  # takes 0.2 s to import, and is needed only after training

    chunks = (
        (before[start : start + _CHUNK], after[start : start + _CHUNK]) for start in range(0, len(before), _CHUNK)
    )
    if (num_pairs := vocab_size**2) <= _CHUNK:  # a dense table is nine times as fast
        table = np.zeros(num_pairs, np.int64)
        for first, second in chunks:
            table += np.bincount(first.astype(np.int64) * vocab_size + second.astype(np.int64), minlength=num_pairs)
        return sparse.csr_array(table.reshape(vocab_size, vocab_size))
    counts = sparse.csr_array((vocab_size, vocab_size), dtype=np.int64)
    for pairs in chunks:
        counts += sparse.coo_array((np.ones(len(pairs[0]), np.int64), pairs), shape=counts.shape).tocsr()
    counts.sort_indices()
    return counts
