"""train checks the data before the first step."""

from __future__ import annotations

import numpy as np
import pytest

from meshpar.cli.train_command import check_ids
from meshpar.data import ArrayData
from tests.cli.test_recipe import small
from tests.errors import raises

EXAMPLES, SEQ = 200, 4


def checked(**changes):
    tokens = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SEQ), dtype=np.int32)
    arrays = {"inputs": tokens.copy(), "targets": tokens.copy()}
    for name, (example, value) in changes.items():
        arrays[name][example, 1] = value
    recipe = small(data=ArrayData(arrays=lambda: arrays))
    check_ids(recipe, recipe.data.open(batch_size=8, seed=0))


def test_check_ids_accepts_the_vocabulary_and_ignored_targets():
    checked()
    checked(targets=(3, -100))


@pytest.mark.parametrize(
    ("name", "value"), [("targets", 256), ("targets", -1), ("inputs", 300), ("inputs", -100)], ids=str
)
def test_check_ids_names_the_array_and_the_id(name, value):
    with raises("out-of-range", f"data array `{name}`"):
        checked(**{name: (7, value)})
