"""Bigram baselines: cross-entropy with one token of context, to compare with a trained model.

*fitted*: a smoothed bigram model of the training stream, evaluated on the validation pairs. *oracle*: the conditional
entropy H(next | previous) of the validation pairs, which is a lower bound for all bigram models.

A model whose mean loss is below *oracle* uses more than one token of context. With a large vocabulary and few scored
tokens, most pairs occur once and *oracle* approaches 0, so a loss above *oracle* does not imply the opposite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float64, Int64, Integer
from scipy import sparse

from meshpar.data.token_file import TokenFile, pieces
from meshpar.sharding.errors import problem

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

    The method has no hyperparameters, and all probabilities are positive. The memory usage is proportional to the
    number of distinct pairs.
    """

    def __init__(self, tokens: Integer[np.ndarray, " tokens"] | TokenFile, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        chunks = (tokens[start : start + _CHUNK + 1] for start in range(0, len(tokens), _CHUNK))
        self._keys, self._counts = _count_pairs(((chunk[:-1], chunk[1:]) for chunk in chunks), vocab_size)
        before = self._keys // vocab_size
        self._counts_before = np.bincount(before, weights=self._counts, minlength=vocab_size)
        self._num_distinct_after = np.bincount(before, minlength=vocab_size).astype(np.float64)
        # In pieces, because bincount converts tokens to int64.
        unigrams = np.zeros(vocab_size)
        for chunk in pieces(tokens, _CHUNK):
            unigrams += np.bincount(chunk, minlength=vocab_size)
        num_distinct = np.count_nonzero(unigrams)
        self._unigram = (unigrams + num_distinct / vocab_size) / (unigrams.sum() + num_distinct)

    def probability(
        self, before: Integer[np.ndarray, " pairs"], after: Integer[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return P(after | before) of each pair."""
        keys = before.astype(np.int64) * self._vocab_size + after
        counts = np.zeros_like(keys)
        if len(self._keys):
            index = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            counts = np.where(self._keys[index] == keys, self._counts[index], 0)
        unigram = self._unigram[after]
        num_distinct, total = self._num_distinct_after[before], self._counts_before[before]
        seen = total > 0
        return np.where(seen, (counts + num_distinct * unigram) / np.where(seen, total + num_distinct, 1), unigram)


def bigram_baseline(
    train: Integer[np.ndarray, " tokens"] | TokenFile,
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
        _check_tokens(name, tokens, vocab_size)
    pairs = zip(pieces(before, _CHUNK), pieces(after, _CHUNK), strict=True)
    keys, counts = _count_pairs(pairs, vocab_size)
    first, second = np.divmod(keys, vocab_size)
    model = Bigram(train, vocab_size)
    totals = np.bincount(first, weights=counts, minlength=vocab_size)[first]
    fitted, oracle = (
        CrossEntropy(nats_per_token=float(-(counts * np.log(p)).sum() / counts.sum()), bytes_per_token=bytes_per_token)
        for p in (model.probability(first, second), counts / totals)
    )
    return Baseline(fitted=fitted, oracle=oracle, num_tokens=int(counts.sum()))


def _count_pairs(
    chunks: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int
) -> tuple[Int64[np.ndarray, " kinds"], Int64[np.ndarray, " kinds"]]:
    """Return the distinct pairs, as sorted keys `before * vocab_size + after`, and their counts."""
    shape = (vocab_size, vocab_size)
    counts = sparse.csr_array(shape, dtype=np.int64)
    for chunk in chunks:
        counts = counts + sparse.coo_array((np.ones(len(chunk[0]), np.int64), chunk), shape=shape).tocsr()
    counts.sort_indices()
    pairs = counts.tocoo()
    return pairs.row.astype(np.int64) * vocab_size + pairs.col, pairs.data


def _check_tokens(name: str, tokens: np.ndarray | TokenFile, vocab_size: int) -> None:
    where = f"bigram_baseline, `{name}`"
    if not len(tokens):
        raise problem(where, "count tokens", "it is empty", "pass at least one token", "wrong-shape")
    minima, maxima = zip(*((int(chunk.min()), int(chunk.max())) for chunk in pieces(tokens, _CHUNK)), strict=True)
    if max(maxima) >= vocab_size or min(minima) < 0:
        requested, reason = f"use vocab_size={vocab_size}", f"the ids are from {min(minima)} to {max(maxima)}"
        raise problem(where, requested, reason, f"set vocab_size to {max(maxima) + 1} or more", "out-of-range")
