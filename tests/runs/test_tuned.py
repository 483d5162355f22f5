"""Files of tuned options: round trip, use in a run, and refusal for other programs, devices and versions."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.runs.tuned import MeasuredProgram, Tuned
from tests.errors import raises


def loss(model, batch, key):
    outputs = model(batch["x"])
    return mp.MeanLoss(outputs.sum(), outputs.size), {}


def recipe(**fields) -> mp.Recipe:
    model = mp.from_functions(lambda key: {"w": np.ones((8, 4), np.float32)}, lambda params, x: x @ params["w"])
    data = mp.data.ArrayData(arrays={"x": np.zeros((128, 8), np.float32)})
    defaults = {"steps": 2, "batch_size": 4, "optimizer": mp.AdamW(lr=1e-3)}
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(data=1), strategy=mp.ddp(), model=model, loss=loss, data=data,
        **(defaults | fields),
    )  # fmt: skip


MESH = mp.MeshSpec(data=1).build(jax.devices()[:1])


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    subject = MeasuredProgram.of(recipe(), MESH)
    return Tuned(
        recipe="tiny", settings=("step.accumulate=2",), ratio=0.9, noise=0.01, date="2026-11-28", subject=subject
    )


def test_a_run_uses_the_settings_of_a_file(tuned, tmp_path) -> None:
    """The number of steps and the schedule may differ."""
    file, screen = tmp_path / "tuned.json", io.StringIO()
    tuned.save(file)
    assert Tuned.load(file) == tuned
    longer = recipe(steps=3, optimizer=mp.AdamW(lr=1e-3, schedule_steps=9))
    outcome = mp.run(longer, out=tmp_path, devices=jax.devices()[:1], tuned=file, stream=screen)
    assert json.loads((outcome.folder / "recipe.json").read_text())["step"]["accumulate"] == 2
    assert "step.accumulate=2 (0.900 × the time, 2026-11-28)" in screen.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"program": "0123456789ab"}, "program 0123456789ab was measured, and the program of the recipe is"),
        ({"devices": "1 × NVIDIA H100 80GB HBM3"}, "1 × NVIDIA H100 80GB HBM3 was measured, and the run has 1 × cpu"),
        ({"versions": {"jax": "0.1"}}, f"jax 0.1 was measured, and {jax.__version__} is installed"),
    ],
)
def test_other_subjects_are_refused(tuned, change, reason) -> None:
    other = dataclasses.replace(tuned, subject=dataclasses.replace(tuned.subject, **change))
    with raises("conflict") as caught:
        other.apply(recipe(), MESH)
    assert caught.value.reason.startswith(reason)


def test_a_changed_recipe_is_refused(tuned) -> None:
    with raises("conflict"):
        tuned.apply(recipe(batch_size=8), MESH)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[]", "damaged-file"),
        ("{", "bad-syntax"),
        ('{"settings": []}', "damaged-file"),
        ('{"subject": {"program": "a"}}', "damaged-file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, text, code) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with raises(code):
        Tuned.load(file)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": "step.remat=full"}, {"settings": [1]}, {"settings": None}, {"ratio": None}, {"noise": "0.1"},
        {"versions": {}}, {"versions": []}, {"versions": 3},
    ],
)  # fmt: skip
def test_damaged_values_are_refused(tuned, tmp_path, change) -> None:
    file, saved = tmp_path / "tuned.json", tuned.to_json()
    target = saved["subject"] if "versions" in change else saved
    target |= change
    file.write_text(json.dumps(saved))
    with raises("damaged-file"):
        Tuned.load(file)
