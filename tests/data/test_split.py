"""Who is held out."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.split import DocumentSplit, split_rows
from meshpar.data.text import Document
from meshpar.sharding.types import MeshparError

NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=40, unique=True)
FRACTIONS = st.floats(0.01, 0.99)


def documents(names, text="text"):
    return [Document(name=name, text=text, num_bytes=len(text)) for name in names]


def split(documents, fraction):
    """The documents of each side in order, and the words."""
    how = DocumentSplit(fraction)
    while not how.settled:
        sides = [[], []]
        for document, is_held_out in how(iter(documents)):
            sides[is_held_out].append(document)
    return *sides, how.how


def held(documents, fraction):
    return {document.name for document in split(documents, fraction)[1]}


@given(NAMES, FRACTIONS)
def test_both_sides_have_documents_and_none_is_lost(names, fraction):
    train, valid, how = split(documents(names), fraction)
    assert train
    assert valid
    # Each side keeps the order of the documents.
    in_train = {d.name for d in train}
    assert [d.name for d in train] == [name for name in names if name in in_train]
    assert [d.name for d in valid] == [name for name in names if name not in in_train]
    # By the ranks of all names together, of which none needs to be known beforehand.
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    assert {d.name for d in valid} == set(ranked[: len(valid)])
    assert how.startswith(f"{len(valid)} of {len(names)} documents")


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_the_document_nearest_to_the_other_side_goes_there(fraction):
    names = [f"{i}.txt" for i in range(7)]
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    assert held(documents(names), fraction) == set(ranked[:1] if fraction < 0.5 else ranked[:-1])


@given(NAMES, FRACTIONS, st.randoms(use_true_random=False))
def test_neither_order_nor_text_matters(names, fraction, random):
    expected = held(documents(names), fraction)
    shuffled = random.sample(names, len(names))
    assert held(documents(shuffled, text="something else"), fraction) == expected


def test_a_new_document_moves_no_other():
    names = [f"folder/file{i}.txt" for i in range(300)]
    for count in (200, 250, 299):
        assert held(documents(names[:count]), 0.1) == held(documents(names), 0.1) & set(names[:count])


def test_a_larger_fraction_holds_out_more_of_the_same():
    names = [str(i) for i in range(1000)]
    few, many = held(documents(names), 0.1), held(documents(names), 0.2)
    assert few < many
    assert 70 < len(few) < 130


def test_the_split_is_the_same_everywhere():
    # Fixed for good: a change here would move held-out data of people's running experiments into training.
    names = [f"{i}.txt" for i in range(40)]
    assert held(documents(names), 0.2) == {f"{i}.txt" for i in (1, 7, 13, 14, 23, 26, 30)}
    assert split_rows(20, 0.25)[1].tolist() == [2, 4, 6, 8, 18]


def test_the_tail_of_a_single_document_is_held_out():
    train, valid, how = split(documents(["only.txt"], text="abcdefghij"), 0.3)
    assert [d.text for d in train] == ["abcdefg"]
    assert [d.text for d in valid] == ["hij"]
    assert "only document" in how
    assert "30.0%" in how


@pytest.mark.parametrize(("text", "fraction"), [("a", 0.5), ("abc", 0.01), ("abc", 0.99)])
def test_a_document_too_short_to_cut_is_an_error(text, fraction):
    with pytest.raises(MeshparError, match="one side would be empty"):
        split(documents(["only.txt"], text=text), fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_a_fraction_must_leave_something_on_both_sides(fraction):
    with pytest.raises(MeshparError, match="both sides need data"):
        split(documents(["a", "b"]), fraction)
    with pytest.raises(MeshparError, match="both sides need data"):
        split_rows(10, fraction)


@given(st.integers(2, 2000), FRACTIONS)
def test_rows_are_split_without_loss(num_rows, fraction):
    train, valid = split_rows(num_rows, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, valid])), np.arange(num_rows))
    assert len(valid) == min(max(round(num_rows * fraction), 1), num_rows - 1)


def test_held_out_rows_are_spread_over_all():
    _, valid = split_rows(1000, 0.2)
    per_tenth = np.bincount(valid // 100, minlength=10)
    assert per_tenth.min() >= 10


def test_one_row_cannot_be_split():
    with pytest.raises(MeshparError, match="at least two rows"):
        split_rows(1, 0.5)
