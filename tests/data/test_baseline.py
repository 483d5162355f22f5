"""Bigram baselines against brute force and closed forms."""

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
from meshpar.sharding.types import MeshparError

VOCAB = 5
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(np.array)
STREAMS = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40).map(np.array)


def score(train, valid, vocab_size=VOCAB, **options):
    return bigram_baseline(train, valid[:-1], valid[1:], vocab_size=vocab_size, **options)


def naive_probability(train: list[int], a: int, b: int) -> float:
    """The definition, word for word."""
    single = collections.Counter(train)
    shorter = (single[b] + len(single) / VOCAB) / (len(train) + len(single))
    after = [y for x, y in itertools.pairwise(train) if x == a]
    if not after:
        return shorter
    return (after.count(b) + len(set(after)) * shorter) / (len(after) + len(set(after)))


@given(TOKENS)
def test_probabilities_are_the_definition_and_sum_to_one(train):
    before, after = (x.ravel() for x in np.meshgrid(range(VOCAB), range(VOCAB), indexing="ij"))
    got = Bigram(train, VOCAB).probability(before, after)
    expected = [naive_probability(train.tolist(), a, b) for a, b in zip(before, after, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    np.testing.assert_allclose(got.reshape(VOCAB, VOCAB).sum(1), 1, rtol=1e-12)
    assert got.min() > 0


@given(TOKENS, STREAMS)
def test_the_cross_entropy_is_the_mean_over_the_scored_tokens(train, valid):
    baseline = score(train, valid)
    pairs = list(itertools.pairwise(valid.tolist()))
    expected = -sum(math.log(naive_probability(train.tolist(), a, b)) for a, b in pairs) / len(pairs)
    assert baseline.fitted.nats_per_token == pytest.approx(expected, rel=1e-12)
    assert baseline.num_tokens == len(pairs)


@given(TOKENS, STREAMS)
def test_no_bigram_model_beats_the_oracle(train, valid):
    baseline = score(train, valid)
    assert -1e-12 <= baseline.oracle.nats_per_token <= baseline.fitted.nats_per_token + 1e-12


def test_the_oracle_is_the_conditional_entropy():
    # After 0 comes 1 or 2 with even odds, after those always 0: half the tokens are worth one bit, the others nothing.
    valid = np.array([0, 1, 0, 2] * 50 + [0])
    assert score(valid, valid).oracle.bits_per_token == pytest.approx(0.5, rel=1e-12)


def test_a_long_training_stream_of_the_same_source_closes_the_gap():
    draw = np.random.default_rng(0).integers
    train, valid = draw(0, 4, 200_000), draw(0, 4, 200_000)
    baseline = score(train, valid)
    assert baseline.fitted.bits_per_token == pytest.approx(2, abs=1e-3)
    assert baseline.oracle.bits_per_token == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("chunk", [7, 59, 10**6])
def test_counting_in_pieces_changes_nothing(monkeypatch, chunk):
    draw = np.random.default_rng(1).integers
    train, valid = draw(0, VOCAB, 100).astype(np.uint8), draw(0, VOCAB, 60).astype(np.uint8)
    expected = score(train, valid)
    monkeypatch.setattr(meshpar.data.baseline, "_CHUNK", chunk)
    assert score(train, valid) == expected


def test_a_big_vocabulary_takes_no_square_of_memory():
    vocab_size = 200_000  # its square, in float64, would take 320 GB
    draw = np.random.default_rng(2).integers
    train, valid = draw(0, vocab_size, 20_000).astype(np.uint32), draw(0, vocab_size, 2_000).astype(np.uint32)
    baseline = score(train, valid, vocab_size)
    # Nothing can be learnt: the fitted model is near the uniform one, and never better than it by much.
    assert baseline.fitted.nats_per_token == pytest.approx(math.log(vocab_size), rel=0.05)
    assert baseline.oracle.nats_per_token < 0.1


def test_units():
    entropy = CrossEntropy(nats_per_token=math.log(2) * 6, bytes_per_token=3.0)
    assert entropy.bits_per_token == pytest.approx(6)
    assert entropy.bits_per_byte == pytest.approx(2)
    baseline = score(np.array([0, 1, 0]), np.array([0, 1]), bytes_per_token=3.0)
    assert baseline.of(math.log(2) * 6) == entropy


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        ([], [0, 1], "training tokens.*there are none"),
        ([0, 1], [0], "preceding tokens.*there are none"),
        ([0, 5], [0, 1], "vocab_size to 6"),
        ([0, 1], [0, 9], "scored tokens.*vocab_size to 10"),
        ([0, -1], [0, 1], "from -1 to 0"),
    ],
)
def test_tokens_that_cannot_be_counted(train, valid, said):
    with pytest.raises(MeshparError, match=said):
        score(np.array(train, dtype=int), np.array(valid, dtype=int))
