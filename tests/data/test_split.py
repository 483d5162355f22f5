"""Tests of the split into a training set and a validation set."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.split import DocumentSplit, split_examples
from meshpar.data.text import Document
from tests.errors import raises

NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=40, unique=True)
FRACTIONS = st.floats(0.01, 0.99)


def documents(names, text="text"):
    return [Document(name=name, text=text) for name in names]


def split(documents, fraction):
    """Return the training documents, the validation documents and the description of the split."""
    document_split = DocumentSplit(fraction)
    while not document_split.settled:
        sets = [[], []]
        for document, is_held_out in document_split(iter(documents)):
            sets[is_held_out].append(document)
    return *sets, document_split.held_out


def held_out(documents, fraction):
    return {document.name for document in split(documents, fraction)[1]}


@given(NAMES, FRACTIONS)
def test_split_keeps_all_documents_and_their_order(names, fraction):
    train, valid, how = split(documents(names), fraction)
    assert train
    assert valid
    in_train = {d.name for d in train}
    assert [d.name for d in train] == [name for name in names if name in in_train]
    assert [d.name for d in valid] == [name for name in names if name not in in_train]
    # The validation set has the documents with the lowest hashes.
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    assert {d.name for d in valid} == set(ranked[: len(valid)])
    assert how.startswith(f"{len(valid)} of {len(names)} documents")


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_split_moves_the_document_nearest_to_the_threshold(fraction):
    names = [f"{i}.txt" for i in range(7)]
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    assert held_out(documents(names), fraction) == set(ranked[:1] if fraction < 0.5 else ranked[:-1])


@given(NAMES, FRACTIONS, st.randoms(use_true_random=False))
def test_split_ignores_order_and_text(names, fraction, random):
    expected = held_out(documents(names), fraction)
    shuffled = random.sample(names, len(names))
    assert held_out(documents(shuffled, text="something else"), fraction) == expected


def test_split_is_stable_when_documents_are_added():
    names = [f"folder/file{i}.txt" for i in range(300)]
    for count in (200, 250, 299):
        assert held_out(documents(names[:count]), 0.1) == held_out(documents(names), 0.1) & set(names[:count])


def test_split_matches_recorded_values():
    # A different split would move validation data of existing runs into training.
    names = [f"{i}.txt" for i in range(40)]
    assert held_out(documents(names), 0.2) == {f"{i}.txt" for i in (1, 7, 13, 14, 23, 26, 30)}
    assert split_examples(20, 0.25)[1].tolist() == [2, 4, 6, 8, 18]


def test_split_cuts_the_end_of_a_single_document():
    train, valid, how = split(documents(["only.txt"], text="abcdefghij"), 0.3)
    assert [d.text for d in train] == ["abcdefg"]
    assert [d.text for d in valid] == ["hij"]
    assert "only document" in how
    assert "30.0%" in how


@pytest.mark.parametrize(("text", "fraction"), [("a", 0.5), ("abc", 0.01), ("abc", 0.99)])
def test_split_rejects_a_document_too_short_to_cut(text, fraction):
    with raises("out-of-range", "valid_fraction"):
        split(documents(["only.txt"], text=text), fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_split_rejects_fractions_outside_0_and_1(fraction):
    with raises("out-of-range"):
        split(documents(["a", "b"]), fraction)
    with raises("out-of-range"):
        split_examples(10, fraction)


@given(st.integers(2, 2000), FRACTIONS)
def test_split_examples_keeps_all_examples(num_rows, fraction):
    train, valid = split_examples(num_rows, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, valid])), np.arange(num_rows))
    assert len(valid) == min(max(round(num_rows * fraction), 1), num_rows - 1)
