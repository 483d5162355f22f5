"""metrics.jsonl contains each step once, and is restored after restarts and damage."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil

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


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_lines_are_kept_until_the_disk_has_room(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer, replace_file = MetricsFile(path), metrics_file.replace_file

    class FullFile:
        """Writes a part of the line and raises."""

        def __init__(self, file):
            self.file = file

        def write(self, line):
            self.file.write(line[:5])
            no_room()

        def __getattr__(self, name):
            return getattr(self.file, name)

    class FillDisk(Hook):
        order = -1

        def on_record(self, run, record):
            if record.step == 2:
                writer._file = FullFile(writer._file)
            monkeypatch.setattr(metrics_file, "replace_file", no_room if record.step in (2, 3, 4) else replace_file)

    with pytest.warns(UserWarning, match="metrics.jsonl was removed") as warned:
        run(6, hooks=[FillDisk(), writer])
    assert ["No space left on device" in str(warning.message) for warning in warned] == [True, False]
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]


DAMAGES = {
    "removed": os.remove,
    "folder renamed": lambda path: path.parent.rename(path.parent.with_name("old")),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "cut": lambda path: os.truncate(path, 10),
    "replaced": lambda path: (path.with_name("x").write_text("unrelated"), path.with_name("x").replace(path)),
    "a link": lambda path: (path.unlink(), path.symlink_to("elsewhere")),
}


class Damage(Hook):
    """Damage the file after a step."""

    def __init__(self, path, how, step):
        self.path, self.how, self.step = path, how, step

    def on_record(self, run, record):
        if record.step == self.step:
            DAMAGES[self.how](self.path)


@pytest.mark.parametrize("step", [3, 6], ids=["during the run", "at the end"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file_is_restored(tmp_path, how, step):
    path = tmp_path / "run" / "m"
    run(2, hooks=[MetricsFile(path)])
    with pytest.warns(UserWarning, match=r"m was removed.*: it is restored"):
        run(6, hooks=[MetricsFile(path), Damage(path, how, step)], state=State(2))
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert not path.is_symlink()
    assert not (path.parent / "elsewhere").exists()


def test_lines_that_are_lost_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_LINES", 3)
    path = tmp_path / "m"
    with pytest.warns(UserWarning, match=r"it is restored; it lacks steps 1 to 5"):
        run(9, hooks=[MetricsFile(path), Damage(path, "cut", 7)])
    first, *others = lines(path)
    assert first == {"step": 5, "missing_from": 1}
    assert [line["step"] for line in others] == [6, 7, 8, 9]
    assert missing_steps(read_lines(path), 9) == [(1, 5)]


@pytest.mark.parametrize(
    ("steps", "missing"),
    [([], [(1, 6)]), ([1, 2, 3], [(4, 6)]), ([4, 5, 6], [(1, 3)]), ([1, 4, 6], [(2, 3), (5, 5)])],
)
def test_missing_lines_of_a_resumed_run_are_recorded(tmp_path, steps, missing):
    path = tmp_path / "m"
    path.write_text("".join(json_line({"step": step, "loss": 1.0}) for step in steps))
    for _ in range(2):  # the second run finds the recorded gap
        with pytest.warns(UserWarning, match="m: it lacks steps"):
            run(8, hooks=[MetricsFile(path)], state=State(6))
        written = lines(path)
        assert [(line["missing_from"], line["step"]) for line in written if "missing_from" in line] == missing
        assert [line["step"] for line in written if "loss" in line] == [*steps, 7, 8]
        assert [line["step"] for line in written] == sorted(line["step"] for line in written)
        assert missing_steps(read_lines(path), 8) == missing
