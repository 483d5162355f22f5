"""metrics.jsonl contains each step once, also after restarts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshpar.loop.fit import Hook, Validator
from meshpar.loop.metrics_file import MetricsFile, json_line, read_lines
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


JUNK = ("", "null\n", "[1]\n", '{"loss": 1}\n', '{"step": []}\n', "\x00\x00\n", '{"step": 1')


@pytest.mark.parametrize("junk", JUNK)
def test_invalid_lines_are_removed(tmp_path, junk):
    (tmp_path / "m").write_text(json_line({"step": 1, "loss": 1.0}) + junk)
    run(3, hooks=[MetricsFile(tmp_path / "m")], state=State(1))
    assert [line["step"] for line in lines(tmp_path / "m")] == [1, 2, 3]


def test_lines_that_cannot_be_written_are_lost_with_a_warning(tmp_path, monkeypatch):
    """The disk is full in steps 2 and 3, and has room for a part of the first of these lines."""
    path, real_open = tmp_path / "m", Path.open

    class FillDisk(Hook):
        order = -1

        def on_record(self, run, record):
            def opened(path, *args, **options):
                if record.step in (2, 3):
                    with real_open(path, "ab") as file:
                        file.write(b'{"st' * (record.step == 2))
                    raise OSError(28, "No space left on device")
                return real_open(path, *args, **options)

            monkeypatch.setattr(Path, "open", opened)

    with pytest.warns(UserWarning, match="the line of step 2 is lost .No space left on device") as warned:
        run(6, hooks=[FillDisk(), MetricsFile(path)])
    assert len(warned) == 1
    assert [line["step"] for line in read_lines(path)] == [1, 4, 5, 6]
