"""Tests of `ArrayData`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshpar.data import ArrayData, DataSource, Source
from tests.errors import raises


def digits(count=50, first=0):
    """Return images filled with their label, in float64 and int64 as most libraries return them."""
    label = np.arange(first, first + count)
    return {"image": np.ones((count, 4, 4)) * label[:, None, None], "label": label}


def test_array_data_splits_examples_consistently():
    source = ArrayData(arrays=digits(), valid_fraction=0.2).open(batch_size=5, seed=0)
    with source.train() as batches:
        assert {name: (x.shape, str(x.dtype)) for name, x in batches.spec.items()} == {
            "image": ((5, 4, 4), "float32"),
            "label": ((5,), "int32"),
        }
        epoch = [next(batches) for _ in range(8)]
    for batch in epoch:
        assert batch["image"].dtype == np.float32
        np.testing.assert_array_equal(batch["image"][:, 0, 0], batch["label"])
    train = {int(label) for batch in epoch for label in batch["label"]}
    valid = {int(label) for batch in source.valid() for label in batch["label"]}
    assert len(train) == 40
    assert train | valid == set(range(50))


def test_array_data_uses_the_given_validation_examples():
    source = ArrayData(arrays=digits(), valid=digits(7, first=1000), valid_batches=None).open(batch_size=3, seed=0)
    assert [batch["label"].tolist() for batch in source.valid()] == [[1000, 1001, 1002], [1003, 1004, 1005]]
    assert len(source.train_rows) == 50
    assert source.describe()["held_out"] == "7 examples given as `valid`"


def test_array_data_calls_a_loader_once_at_open():
    calls = []

    def load():
        calls.append(1)
        return digits()

    data = ArrayData(arrays=load)
    assert calls == []
    opened, expected = (x.open(batch_size=5, seed=0) for x in (data, ArrayData(arrays=digits())))
    assert opened.fingerprint == expected.fingerprint
    assert calls == [1]
    assert isinstance(data, DataSource)
    assert isinstance(opened, Source)


def test_array_source_resumes_and_describes_itself():
    source = ArrayData(arrays=digits(), valid_fraction=0.2, valid_batches=1).open(batch_size=5, seed=0)
    with source.train() as first, source.train() as second:
        expected = [next(first)["label"].tolist() for _ in range(12)]
        second.set_state(json.loads(json.dumps({**first.get_state(), "step": 7})))
        assert [next(second)["label"].tolist() for _ in range(5)] == expected[7:]
    description = source.describe()
    assert description == json.loads(json.dumps(description))
    assert description["arrays"] == {
        "image": {"shape": [4, 4], "dtype": "float32"},
        "label": {"shape": [], "dtype": "int32"},
    }
    assert description["train"] == {"examples": 40}
    assert description["valid"] == {"examples": 10, "batches": 1}


def test_fingerprint_depends_on_data_and_split():
    def fingerprint(arrays, **options):
        return ArrayData(arrays=arrays, **options).open(batch_size=2, seed=0).fingerprint

    changed = digits()
    changed["label"][3] = 99
    fingerprints = [
        fingerprint(digits()),
        fingerprint(changed),
        fingerprint({"image": digits()["image"]}),
        fingerprint({"picture": digits()["image"], "label": digits()["label"]}),
        fingerprint(digits(), valid_fraction=0.3),
        fingerprint(digits(49)),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprint(dict(reversed(digits().items()))) == fingerprints[0]


@pytest.mark.parametrize(
    ("options", "code", "where"),
    [
        ({"arrays": {}}, "not-found", "arrays"),
        ({"arrays": {"x": np.zeros((0, 3))}}, "not-found", "arrays"),
        ({"arrays": {"x": np.zeros(5), "y": np.zeros(6)}}, "wrong-shape", "arrays"),
        ({"arrays": {"x": np.zeros(5), "y": np.float32(1)}}, "wrong-shape", "arrays"),
        ({"arrays": {"x": np.zeros(1)}}, "out-of-range", "the data"),
        ({"arrays": digits(), "valid": {"image": digits()["image"]}}, "wrong-shape", "valid"),
        ({"arrays": {"x": np.zeros((9, 2))}, "valid": {"x": np.zeros((9, 3))}}, "wrong-shape", "valid"),
        ({"arrays": digits(), "valid": {}}, "not-found", "valid"),
        ({"arrays": digits(5)}, "out-of-range", "batch_size"),
        ({"arrays": digits(), "prefetch": -1}, "not-an-int", "ArrayData"),
    ],
)
def test_array_data_rejects_mismatched_arrays_and_options(options, code, where):
    with raises(code, where):
        ArrayData(**options).open(batch_size=2, seed=0)
