"""Schedules of the learning rate in runs that are resumed with another number of steps."""

from __future__ import annotations

import io
import json

import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.runs.folder import run_folder
from meshpar.runs.resuming import breaks_resuming, with_schedule
from meshpar.runs.screen import Screen
from tests.cli.test_main import write_recipe
from tests.runs.test_recipe import small


def resumed(tmp_path, optimizer, *, steps, saved_steps=20, **saved):
    """Return the optimizer of a run that continues for `steps` steps, and the printed text."""
    recipe = small(optimizer=optimizer, steps=steps)
    document = {**recipe.to_json(), "steps": saved_steps}
    document["optimizer"] |= saved
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(document))
    text = io.StringIO()
    with run_folder(tmp_path / "run", write=True, warn=print) as folder:
        return with_schedule(recipe, folder, Screen(text)).optimizer, text.getvalue()


@pytest.mark.parametrize(
    ("optimizer", "saved", "expected"),
    [
        (mp.AdamW(warmup_steps=2), {}, 20),
        (mp.Muon(schedule="linear"), {}, 20),
        (mp.AdamW(), {"schedule_steps": 10}, 10),  # the second continuation
        (mp.Optax(make=lambda steps: optax.sgd(1 / steps)), {}, 20),
        (mp.AdamW(schedule_steps=40), {}, 40),  # set by the user
        (mp.AdamW(schedule="constant"), {}, None),
        (mp.AdamW(warmup_steps=30), {}, None),  # the first part ended during the warm-up
    ],
)
def test_a_longer_run_keeps_the_schedule(optimizer, saved, expected, tmp_path):
    found, text = resumed(tmp_path, optimizer, steps=40, **saved)
    assert found.schedule_steps == expected
    is_kept = optimizer.schedule_steps is None and expected is not None
    assert (f"keeps its {expected} steps, and the run has 40" in text) == is_kept
    assert not breaks_resuming("optimizer.schedule_steps")


def test_learning_rate_does_not_jump(tmp_path):
    optimizer = mp.AdamW(lr=1.0)
    found, _ = resumed(tmp_path, optimizer, steps=40)
    before, after = optimizer.learning_rate(20), found.learning_rate(40)
    for step in range(40):
        assert float(after(step)) == float(before(step))
    assert float(after(20)) == pytest.approx(0.1)
    assert float(optimizer.learning_rate(40)(20)) > 0.5


@pytest.mark.matrix
def test_metrics_of_a_longer_run_have_the_kept_learning_rate(meshpar, tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "runs"
    options = ("--out", out, "--set", "optimizer.schedule=linear", "--set", "sample=none")
    assert meshpar("train", recipe, *options)[0] == 0
    code, text, _ = meshpar("train", recipe, *options, "--steps", 6)
    assert code == 0
    assert "keeps its 3 steps, and the run has 6" in text
    assert "skipping the comparison" not in text
    lines = map(json.loads, (out / "tiny" / "metrics.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    np.testing.assert_allclose(rates, 3e-4 * np.array([1, 0.7, 0.4, 0.1, 0.1, 0.1]), rtol=1e-5)
    assert meshpar("train", recipe, *options, "--steps", 8)[0] == 0
    code, text, _ = meshpar("train", recipe, *options, "--steps", 9, "--set", "optimizer.schedule_steps=9")
    assert code == 0
    assert "optimizer.schedule_steps was 3 and is 9" in text
