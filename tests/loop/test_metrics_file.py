"""metrics.jsonl contains each step once, and is restored after restarts and damage."""

from __future__ import annotations

import json
import math
import os
import shutil

import numpy as np
import pytest

from meshpar.loop import metrics_file
from meshpar.loop.fit import Hook, Validator
from meshpar.loop.metrics_file import JsonlWriter, json_line, missing_steps, read_lines
from tests.loop.test_fit import FakeStep, Log, State, run


def lines(path) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_of_steps_and_validations(tmp_path):
    validator = Validator(lambda state, batch: {"loss": batch, "accuracy": 0.5}, [1.0, 2.0], every=2)
    log = Log()
    run(3, hooks=[JsonlWriter(tmp_path / "runs" / "metrics.jsonl"), validator, log], tokens_per_step=10)
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
    """A step with array metrics, like those of MoE layers."""

    def __call__(self, state, batch):
        state, metrics = super().__call__(state, batch)
        per_layer = {"moe/load": np.array([[1.0, 3.0]]), "moe/drop_rate": np.array([0.25])}
        return state, {**metrics, **per_layer}


def test_arrays_are_written_by_also_only(tmp_path):
    log, path = Log(), tmp_path / "metrics.jsonl"

    def also(record):
        return {"load": record.arrays["moe/load"].tolist()} if record.step == 2 else {}

    run(2, step=LayerStep(), hooks=[log, JsonlWriter(path, also=also)])
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


def test_loss_is_written_exactly(tmp_path):
    run(50, hooks=[JsonlWriter(tmp_path / "m")])
    assert [np.float32(line["loss"]) for line in lines(tmp_path / "m")] == [np.float32(1 / n) for n in range(1, 51)]


def test_lines_are_written_immediately(tmp_path):
    seen = []

    class Look(Hook):
        def on_record(self, run, record):
            seen.append(len(lines(tmp_path / "m")))

    run(3, hooks=[JsonlWriter(tmp_path / "m"), Look()])
    assert seen == [1, 2, 3]


def test_resumed_run_removes_the_lines_it_repeats(tmp_path):
    path = tmp_path / "m"
    run(6, hooks=[JsonlWriter(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)])
    expected = lines(path)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # from a killed process
    run(6, hooks=[JsonlWriter(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)], state=State(3))
    assert [{**line, "seconds": 0} for line in lines(path)] == [{**line, "seconds": 0} for line in expected]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("junk", ["", "null\n", "[1]\n", '{"loss": 1}\n', "\x00\x00\n", '{"step": 1}'])
def test_invalid_lines_are_removed(tmp_path, junk):
    (tmp_path / "m").write_text(json_line({"step": 1, "loss": 1.0}) + junk)
    run(3, hooks=[JsonlWriter(tmp_path / "m")], state=State(1))
    assert [line["step"] for line in lines(tmp_path / "m")] == [1, 2, 3]


def test_lines_are_kept_until_the_disk_has_room(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    append = JsonlWriter._append

    class FullFile:
        """Writes a part of the line and raises."""

        def __init__(self, file):
            self.file = file

        def write(self, line):
            self.file.write(line[:5])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    class FillDisk(Hook):
        order = -1

        def on_record(self, run, record):
            full = record.step in (2, 3)
            open_file = FullFile if full else lambda file: file
            monkeypatch.setattr(JsonlWriter, "_append", lambda self, file, line: append(self, open_file(file), line))

    with pytest.warns(UserWarning, match="No space left on device. The run continues, and the lines"):
        run(5, hooks=[FillDisk(), writer])
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


def damage(path, how):
    """Damage the file in a way that happens in practice."""
    if how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name("old"))
    elif how == "its folder renamed":
        path.parent.rename(path.parent.with_name("old"))
    elif how == "its folder removed":
        shutil.rmtree(path.parent)
    elif how == "cut":
        os.truncate(path, 10)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "replaced":
        path.with_name("other").write_text("unrelated")
        path.with_name("other").replace(path)
    elif how == "a link":
        path.unlink()
        path.symlink_to("elsewhere")


DAMAGES = ["removed", "renamed", "its folder renamed", "its folder removed", "cut", "emptied", "replaced", "a link"]


class Damage(Hook):
    """Damage the file after a step."""

    def __init__(self, path, how, step):
        self.path, self.how, self.step = path, how, step

    def on_record(self, run, record):
        if record.step == self.step:
            damage(self.path, self.how)


@pytest.mark.parametrize("step", [3, 6], ids=["during the run", "at the end"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file_is_restored(tmp_path, how, step):
    path = tmp_path / "run" / "m"
    run(2, hooks=[JsonlWriter(path)])
    warning = r"m was (removed or renamed|truncated|replaced) during the run: it is restored"
    with pytest.warns(UserWarning, match=warning):
        run(6, hooks=[JsonlWriter(path), Damage(path, how, step)], state=State(2))
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert not path.is_symlink()
    assert not (path.parent / "elsewhere").exists()


def test_lines_missing_from_the_buffer_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_BUFFERED_BYTES", 300)
    path = tmp_path / "m"
    warning = r"m was truncated during the run: it is restored; it lacks steps 1 to \d"
    with pytest.warns(UserWarning, match=warning):
        run(9, hooks=[JsonlWriter(path), Damage(path, "emptied", 7)])
    first, *others = lines(path)
    assert first == {"step": others[0]["step"] - 1, "missing_from": 1}
    assert [line["step"] for line in others] == list(range(others[0]["step"], 10))
    assert missing_steps(read_lines(path), 9) == [(1, first["step"])]


def test_file_that_cannot_be_restored_is_reported_once(tmp_path, monkeypatch):
    path = tmp_path / "run" / "m"

    def broken(path, content):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(metrics_file, "replace_file", broken)
    with pytest.warns(UserWarning, match="it cannot be restored") as warned:
        run(9, hooks=[JsonlWriter(path), Damage(path, "removed", 3)])
    assert len(warned) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("steps", "missing"),
    [([], [(1, 6)]), ([1, 2, 3], [(4, 6)]), ([4, 5, 6], [(1, 3)]), ([1, 4, 6], [(2, 3), (5, 5)])],
)
def test_missing_lines_of_a_resumed_run_are_recorded(tmp_path, steps, missing):
    path = tmp_path / "m"
    path.write_text("".join(json_line({"step": step, "loss": 1.0}) for step in steps))
    for _ in range(2):  # the second run finds the recorded gap
        with pytest.warns(UserWarning, match="m: it lacks steps"):
            run(8, hooks=[JsonlWriter(path)], state=State(6))
        written = lines(path)
        assert [(line["missing_from"], line["step"]) for line in written if "missing_from" in line] == missing
        assert [line["step"] for line in written if "loss" in line] == [*steps, 7, 8]
        assert [line["step"] for line in written] == sorted(line["step"] for line in written)
        assert missing_steps(read_lines(path), 8) == missing
