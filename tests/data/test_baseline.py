"""Tests of bigram baselines against a direct implementation and closed forms."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshpar.data.baseline
from meshpar.data.baseline import Bigram, CrossEntropy, bigram_baseline
from tests.errors import raises

VOCAB = 5
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(np.array)
STREAMS = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40).map(np.array)


def score(train, valid, vocab_size=VOCAB, **options):
    return bigram_baseline(train, valid[:-1], valid[1:], vocab_size=vocab_size, **options)


def naive_probability(train: list[int], a: int, b: int) -> float:
    """Return the probability according to the definition."""
    single = collections.Counter(train)
    shorter = (single[b] + len(single) / VOCAB) / (len(train) + len(single))
    after = [y for x, y in itertools.pairwise(train) if x == a]
    if not after:
        return shorter
    return (after.count(b) + len(set(after)) * shorter) / (len(after) + len(set(after)))


@given(TOKENS)
def test_probabilities_match_the_definition_and_sum_to_1(train):
    before, after = (x.ravel() for x in np.meshgrid(range(VOCAB), range(VOCAB), indexing="ij"))
    actual = Bigram(train, VOCAB).probability(before, after)
    expected = [naive_probability(train.tolist(), a, b) for a, b in zip(before, after, strict=True)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    np.testing.assert_allclose(actual.reshape(VOCAB, VOCAB).sum(1), 1, rtol=1e-12)
    assert actual.min() > 0


@given(TOKENS, STREAMS)
def test_fitted_is_the_mean_over_the_scored_tokens(train, valid):
    baseline = score(train, valid)
    pairs = list(itertools.pairwise(valid.tolist()))
    expected = -sum(math.log(naive_probability(train.tolist(), a, b)) for a, b in pairs) / len(pairs)
    assert baseline.fitted.nats_per_token == pytest.approx(expected, rel=1e-12)
    assert baseline.num_tokens == len(pairs)


@given(TOKENS, STREAMS)
def test_oracle_is_a_lower_bound_of_fitted(train, valid):
    baseline = score(train, valid)
    assert -1e-12 <= baseline.oracle.nats_per_token <= baseline.fitted.nats_per_token + 1e-12


def test_oracle_is_the_conditional_entropy():
    # 1 or 2 follows 0 with equal probability, and 0 follows 1 and 2: 1 bit for half of the tokens.
    valid = np.array([0, 1, 0, 2] * 50 + [0])
    assert score(valid, valid).oracle.bits_per_token == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint64])
def test_baseline_does_not_depend_on_the_dtype(dtype):
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60)
    assert score(tokens.astype(dtype), tokens.astype(dtype)) == score(tokens, tokens)


@pytest.mark.parametrize(("chunk", "dense_chunk"), [(7, 7), (59, 7), (10**6, 59)])  # the first uses a sparse matrix
def test_baseline_does_not_depend_on_the_chunk_size(monkeypatch, chunk, dense_chunk):
    draw = np.random.default_rng(1).integers
    train, valid = draw(0, VOCAB, 100).astype(np.uint8), draw(0, VOCAB, 60).astype(np.uint8)
    expected = score(train, valid)
    monkeypatch.setattr(meshpar.data.baseline, "_CHUNK", chunk)
    monkeypatch.setattr(meshpar.data.baseline, "_DENSE_CHUNK", dense_chunk)
    assert score(train, valid) == expected


def test_large_vocabulary_needs_little_memory():
    vocab_size = 200_000  # a dense float64 matrix would need 320 GB
    draw = np.random.default_rng(2).integers
    train, valid = draw(0, vocab_size, 20_000).astype(np.uint32), draw(0, vocab_size, 2_000).astype(np.uint32)
    baseline = score(train, valid, vocab_size)
    # The tokens are random, so the fitted model is close to a uniform distribution.
    assert baseline.fitted.nats_per_token == pytest.approx(math.log(vocab_size), rel=0.05)
    assert baseline.oracle.nats_per_token < 0.1


def test_cross_entropy_converts_units():
    entropy = CrossEntropy(nats_per_token=math.log(2) * 6, bytes_per_token=3.0)
    assert entropy.bits_per_token == pytest.approx(6)
    assert entropy.bits_per_byte == pytest.approx(2)
    baseline = score(np.array([0, 1, 0]), np.array([0, 1]), bytes_per_token=3.0)
    assert baseline.of(math.log(2) * 6) == entropy


@pytest.mark.parametrize(
    ("train", "valid", "code", "where"),
    [
        ([], [0, 1], "wrong-shape", "train"),
        ([0, 1], [0], "wrong-shape", "before"),
        ([0, 5], [0, 1], "out-of-range", "train"),
        ([0, 1], [0, 9], "out-of-range", "after"),
        ([0, -1], [0, 1], "out-of-range", "train"),
    ],
)
def test_baseline_rejects_empty_streams_and_invalid_ids(train, valid, code, where):
    with raises(code, where):
        score(np.array(train, dtype=int), np.array(valid, dtype=int))
