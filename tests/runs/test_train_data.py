"""train checks the data before the first step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshpar.data import ArrayData
from meshpar.runs.recipe_sources import check_ids
from tests.cli.test_main import write_recipe
from tests.errors import raises
from tests.runs.test_recipe import small

EXAMPLES, SEQ = 200, 4


def checked(side="arrays", **changes):
    """Check a training set and a validation set (`side="valid"`), one of them with changes."""
    tokens = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SEQ), dtype=np.int32)
    sets = {name: {"inputs": tokens.copy(), "targets": tokens.copy()} for name in ("arrays", "valid")}
    for name, (example, value) in changes.items():
        sets[side][name][example, 1] = value
    recipe = small(data=ArrayData(**sets))
    check_ids(recipe, recipe.data.open(batch_size=8, seed=0))


def test_check_ids_accepts_the_vocabulary_and_ignored_targets():
    checked()
    checked(targets=(3, -100))


@pytest.mark.parametrize(
    ("side", "name", "value"),
    [
        ("arrays", "targets", 256),
        ("arrays", "targets", -1),
        ("arrays", "inputs", 300),
        ("arrays", "inputs", -100),
        ("valid", "targets", 256),
    ],
    ids=str,
)
def test_check_ids_names_the_array_and_the_id(side, name, value):
    with raises("out-of-range", f"data array `{name}`"):
        checked(side, **{name: (7, value)})


@pytest.mark.matrix
def test_mixture_from_the_command_line_reports_its_sources(meshpar, tmp_path):
    recipe, text = write_recipe(tmp_path), tmp_path / "text"
    files = {"web": f"{text}/[0-4].txt", "code": f"{text}/[5-7].txt"}
    options = [
        "--out",
        tmp_path,
        "--set",
        "sample=none",
        "--set",
        "data.valid_batches=1",
        "--set",
        f"data.files={files}",
    ]
    code, text, _ = meshpar("train", recipe, *options, "--set", 'data.sources={"web": 3, "code": 0.5}', "--steps", 2)
    assert code == 0, text
    assert "85.7% from web" in text
    lines = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [line["data/web/share"] for line in lines if "loss" in line] == [6 / 8, 13 / 16]
    (valid,) = (line for line in lines if "val_loss" in line)
    assert valid["val_loss"] == pytest.approx((6 * valid["val_loss/web"] + valid["val_loss/code"]) / 7)
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["sources"]["code"]["examples"] == 3
    assert lines[-2]["data/code/epochs"] == summary["sources"]["code"]["epochs"] > 0
    code, _, error = meshpar("train", recipe, *options, "--set", 'data.sources={"web": 2, "code": 0.5}', "--steps", 2)
    assert code == 2
    assert "data.sources.web was 3.0 and is 2.0" in error
