"""metrics.jsonl contains each step once, also after restarts, and lost lines are reported."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import types

import numpy as np
import pytest

from meshpar.loop import metrics_file
from meshpar.loop.fit import Hook, Validator
from meshpar.loop.metrics_file import MetricsFile, describe_missing, json_line, missing_steps, read_lines
from tests.loop.test_fit import FakeStep, Log, State, run


def lines(path) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_of_steps_and_validations(tmp_path):
    validator = Validator(lambda state, batch: {"loss": batch, "accuracy": 0.5}, [1.0, 2.0], every=2)
    log = Log()
    run(3, hooks=[MetricsFile(tmp_path / "runs" / "metrics.jsonl"), validator, log], tokens_per_step=10)
    written = lines(tmp_path / "runs" / "metrics.jsonl")
    assert [(line["step"], "val_loss" in line) for line in written] == [
        (1, False), (2, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip
    first = log.records[0]
    assert written[0] == {
        "step": 1, "loss": 1.0, "tokens_per_s": first.tokens_per_s, "mfu": None, "seconds": first.seconds,
        "finite": True, "grad_norm": 2.0,
    }  # fmt: skip
    assert {**written[2], "seconds": 0} == {"step": 2, "val_loss": 1.5, "val_accuracy": 0.5, "seconds": 0}


class LayerStep(FakeStep):
    """A step with array metrics, like MoE layers."""

    def __call__(self, state, batch):
        state, metrics = super().__call__(state, batch)
        per_layer = {"moe/load": np.array([[1.0, 3.0]]), "moe/drop_rate": np.array([0.25])}
        return state, {**metrics, **per_layer}


def test_arrays_are_written_by_also_only(tmp_path):
    log, path = Log(), tmp_path / "metrics.jsonl"

    def also(record):
        return {"load": record.arrays["moe/load"].tolist()} if record.step == 2 else {}

    run(2, step=LayerStep(), hooks=[log, MetricsFile(path, also=also)])
    assert log.records[0].arrays["moe/load"].tolist() == [[1, 3]]
    assert "moe/load" not in log.records[0].metrics
    first, last = map(json.loads, path.read_text().splitlines())
    assert "moe/load" not in first
    assert "load" not in first
    assert last["load"] == [[1, 3]]


def test_json_line_of_nonfinite_values():
    line = json_line({"step": 3, "loss": math.nan, "grad_norm": math.inf, "other": -math.inf, "mfu": None})
    assert json.loads(line) == {
        "step": 3, "loss": None, "grad_norm": None, "other": None, "mfu": None,
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "other": "-inf"},
    }  # fmt: skip
    assert line.endswith("}\n")


def test_lines_are_written_immediately(tmp_path):
    seen = []

    class Look(Hook):
        def on_record(self, run, record):
            seen.append(len(lines(tmp_path / "m")))

    run(3, hooks=[MetricsFile(tmp_path / "m"), Look()])
    assert seen == [1, 2, 3]


def test_resumed_run_removes_the_lines_it_repeats(tmp_path):
    path = tmp_path / "m"
    run(6, hooks=[MetricsFile(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)])
    expected = lines(path)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # from a killed process
    run(6, hooks=[MetricsFile(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)], state=State(3))
    assert [{**line, "seconds": 0} for line in lines(path)] == [{**line, "seconds": 0} for line in expected]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


JUNK = ("", "null\n", "[1]\n", '{"loss": 1}\n', '{"step": []}\n', "\x00\x00\n", "[" * 100_000 + "\n", '{"step": 1')


@pytest.mark.parametrize("junk", JUNK)
def test_invalid_lines_are_removed(tmp_path, junk):
    (tmp_path / "m").write_text(json_line({"step": 1, "loss": 1.0}) + junk)
    run(3, hooks=[MetricsFile(tmp_path / "m")], state=State(1))
    assert [line["step"] for line in lines(tmp_path / "m")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda text: text[:-9], "validations after steps 4"), (lambda text: text[: text.rindex('{"step')], None),
        (lambda text: "".join(line for line in text.splitlines(True) if "val_" not in line),
         "validations after steps 2, 4"),
        (lambda text: text[:-1], ""), (lambda text: text, ""),
    ],
    ids=["last line cut", "last line removed", "all validations", "newline removed", "intact"],
)  # fmt: skip
def test_lost_validations_of_a_resumed_run_are_reported(tmp_path, damage, lost):
    path, lost = tmp_path / "m", "validations after steps 4" if lost is None else lost
    validator = Validator(lambda state, batch: {"loss": 0.0, "acc": 1.0}, [1], every=2)
    run(4, hooks=[MetricsFile(path), validator])
    expected = lines(path)
    assert [line["step"] for line in expected if "validation" in line] == [2, 4]
    path.write_text(damage(path.read_text()))
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"m: it lacks {lost},") if lost else contextlib.nullcontext():
            run(4, hooks=[MetricsFile(path), validator], state=State(4))
        assert describe_missing(lines(path), 4) == lost
    assert lost or lines(path) == expected


def test_lines_that_cannot_be_written_are_lost_with_a_warning(tmp_path, monkeypatch):
    """The disk is full in steps 2 and 3, and has room for a part of the first of these lines."""
    path, now = tmp_path / "m", types.SimpleNamespace(step=0)

    class Disk(io.FileIO):
        def write(self, content):
            if now.step == 2:
                return super().write(content[:4])
            if now.step == 3:
                raise OSError(28, "No space left on device")
            return super().write(content)

    class FillDisk(Hook):
        order = -1

        def on_record(self, run, record):
            now.step = record.step

    monkeypatch.setattr(metrics_file, "io", types.SimpleNamespace(FileIO=Disk))
    with pytest.warns(UserWarning, match="the line of step 2 is lost .No space left on device") as warned:
        run(6, hooks=[FillDisk(), MetricsFile(path)])
    assert len(warned) == 1
    assert [line["step"] for line in read_lines(path)] == [1, 4, 5, 6]
    assert describe_missing([*read_lines(path)], 6) == "steps 2 to 3"


@pytest.mark.parametrize("removed", ["file", "folder"])
def test_lines_after_a_removal_are_written(tmp_path, removed):
    path = tmp_path / "run" / "m"

    class Remove(Hook):
        def on_record(self, run, record):
            if record.step == 2:
                path.unlink() if removed == "file" else shutil.rmtree(path.parent)

    run(4, hooks=[MetricsFile(path), Remove()])
    assert [line["step"] for line in lines(path)] == [3, 4]
    assert missing_steps(read_lines(path), 4) == [(1, 2)]


@pytest.mark.parametrize(
    ("steps", "missing"),
    [([], [(1, 6)]), ([1, 2, 3], [(4, 6)]), ([4, 5, 6], [(1, 3)]), ([1, 4, 6], [(2, 3), (5, 5)])],
)
def test_missing_lines_of_a_resumed_run_are_reported(tmp_path, steps, missing):
    path = tmp_path / "m"
    path.write_text("".join(json_line({"step": step, "loss": 1.0}) for step in steps))
    with pytest.warns(UserWarning, match="m: it lacks steps"):
        run(8, hooks=[MetricsFile(path)], state=State(6))
    assert [line["step"] for line in lines(path)] == [*steps, 7, 8]
    assert missing_steps(read_lines(path), 8) == missing
