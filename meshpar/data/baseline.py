"""Bigram baselines: cross-entropy with one token of context, to compare with a trained model.

*fitted*: a smoothed bigram model of the training stream, evaluated on the validation pairs. *oracle*: the conditional
entropy H(next | previous) of the validation pairs, which is a lower bound for all bigram models.

A model whose mean loss is below *oracle* uses more than one token of context. With a large vocabulary and few scored
tokens, most pairs occur once and *oracle* approaches 0, so a loss above *oracle* does not imply the opposite.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Float64, Int64, Integer

from meshpar.sharding.errors import problem

_CHUNK, _DENSE_CHUNK = 4_000_000, 1 << 18
"""Number of pairs to count per step. Bounds the memory usage. With a table, the pairs stay in the cache of a core."""


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
        self._vocab_size = vocab_size
        self._pairs, self._counts = _count_pairs(tokens[:-1], tokens[1:], vocab_size)
        before, after = np.divmod(self._pairs, vocab_size)
        self._counts_before = np.bincount(before, self._counts, minlength=vocab_size)
        self._num_distinct_after = np.bincount(before, minlength=vocab_size)
        unigrams = np.bincount(after, self._counts, minlength=vocab_size)
        unigrams[tokens[0]] += 1
        num_distinct = np.count_nonzero(unigrams)
        self._unigram = (unigrams + num_distinct / vocab_size) / (unigrams.sum() + num_distinct)

    def probability(
        self, before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return P(after | before) of each pair."""
        counts = np.zeros(len(before))
        if len(self._pairs):
            pairs = before.astype(np.int64) * self._vocab_size + after.astype(np.int64)
            index = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
            counts = np.where(self._pairs[index] == pairs, self._counts[index], 0)
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
    pairs, counts = _count_pairs(before, after, vocab_size)
    first, second = np.divmod(pairs, vocab_size)
    totals = np.bincount(first, counts)[first]
    fitted, oracle = (
        CrossEntropy(nats_per_token=float(-(counts * np.log(p)).sum() / counts.sum()), bytes_per_token=bytes_per_token)
        for p in (Bigram(train, vocab_size).probability(first, second), counts / totals)
    )
    return Baseline(fitted=fitted, oracle=oracle, num_tokens=int(counts.sum()))


def _count_pairs(
    before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"], vocab_size: int
) -> tuple[Int64[np.ndarray, " distinct"], Int64[np.ndarray, " distinct"]]:
    """Return the distinct pairs as `before * vocab_size + after`, in ascending order, and their counts."""
    is_dense = vocab_size**2 <= _CHUNK  # a table is nine times as fast
    size = _DENSE_CHUNK if is_dense else _CHUNK
    chunks = ((before[start : start + size], after[start : start + size]) for start in range(0, len(before), size))
    if is_dense:
        table = np.zeros(vocab_size**2, np.int64)
        for first, second in chunks:
            pairs = first.astype(np.int64) * vocab_size + second.astype(np.int64)
            table += np.bincount(pairs, minlength=len(table))
        distinct = np.flatnonzero(table)
        return distinct, table[distinct]
    from scipy import sparse  # takes 0.3 s to import

    counts = sparse.csr_array((vocab_size, vocab_size), dtype=np.int64)
    for chunk in chunks:
        counts += sparse.coo_array((np.ones(len(chunk[0]), np.int64), chunk), shape=counts.shape).tocsr()
    counts.sort_indices()
    rows, columns = counts.tocoo().coords
    return rows.astype(np.int64) * vocab_size + columns, counts.data
