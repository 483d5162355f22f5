"""Metric writers receive each metric once and never end a run. Goodput adds up over restarts."""

from __future__ import annotations

import importlib.util
import json
import time

import pytest

from meshpar.loop.fit import Checkpointer, Validator
from meshpar.loop.goodput import Goodput, words
from meshpar.loop.metric_writers import WRITERS, Writer, check_writers
from meshpar.loop.metrics_file import MetricsFile
from tests.errors import raises
from tests.loop import test_fit
from tests.loop.test_fit import FakeStep, State
from tests.loop.test_metrics_file import lines


class Step(FakeStep):
    """A step that compiles for 100 ms and runs for 10 ms. It fails in the `bad` steps."""

    def __call__(self, state, batch):
        time.sleep(0.01 if self.log else 0.1)
        if state.step + 1 in self.bad:
            raise RuntimeError("killed")
        return super().__call__(state, batch)


def run(steps, hooks, *, step=None, **options):
    return test_fit.run(steps, hooks=hooks, step=step or Step(), **options)


class MemoryWriter(Writer):
    name = "memory"

    def __init__(self, folder, *, breaks_at=None, also=None):
        super().__init__(folder, config={}, also=also)
        self.rows, self.failed, self.breaks_at = [], None, breaks_at

    def _open(self, first_step):
        return self

    def _log(self, step, values):
        if step == self.breaks_at:
            raise OSError("no route to the host")
        self.rows.append((step, values))

    def _close(self, *, failed):
        self.failed = failed


def test_writer_receives_each_metric_once(tmp_path):
    writer = MemoryWriter(tmp_path, also=lambda record: {"twice": 2 * record.loss, "layers": [1, 2]})
    run(3, [writer, Validator(lambda state, batch: {"loss": 0.5}, [1], every=2)])
    assert [(step, sorted(values)[0].split("/")[0]) for step, values in writer.rows] == [
        (1, "train"), (2, "train"), (2, "valid"), (3, "train"), (3, "valid"),
    ]  # fmt: skip
    first = writer.rows[0][1]
    assert first["train/loss"] == 1.0
    assert first["train/twice"] == 2.0
    assert not any("layers" in name or "mfu" in name for name in first), "only scalars are logged"
    assert writer.failed is False
    failed = MemoryWriter(tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        run(3, [failed], step=Step(bad=[2]))
    assert failed.failed is True


def test_writer_failure_is_one_warning(tmp_path):
    writer, path = MemoryWriter(tmp_path, breaks_at=2), tmp_path / "metrics.jsonl"
    match = r"memory could not write \(OSError: no route.*metrics.jsonl has all metrics"
    with pytest.warns(UserWarning, match=match) as warned:
        result = run(4, [writer, MetricsFile(path)])
    assert len(warned) == 1
    assert (result.reason, result.step) == ("done", 4)
    assert [step for step, _ in writer.rows] == [1]
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


def test_check_writers_names_the_missing_extra(monkeypatch):
    check_writers(())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises("missing-package", "tensorboard") as error:
        check_writers(["tensorboard"])
    assert "pip install 'meshpar[tensorboard]'" in error.value.fix
    with raises("unknown-choice"):
        check_writers(["tensorbord"])


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    writer = MemoryWriter(tmp_path)
    goodput = Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=time.time())
    run(2, [writer, goodput])
    assert (writer.rows, writer.failed, goodput.seconds) == ([], None, {})
    assert not list(tmp_path.iterdir())


def test_tensorboard_files_contain_the_metrics(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs pip install meshpar[tensorboard] tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(3, [WRITERS["tensorboard"](tmp_path, config={"steps": 3})])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3})


def test_wandb_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs pip install meshpar[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(2, [WRITERS["wandb"](tmp_path, config={"steps": 2})])
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert (tmp_path / "wandb.id").read_text().isalnum()


# goodput -------------------------------------------------------------------------------------------------------------


class SlowCheckpoints:
    """Checkpoints that take 50 ms to save."""

    def check_shared(self):
        pass

    def __init__(self):
        self.saved = []

    def save(self, state, *, data_state=None, wait=False):
        time.sleep(0.05)
        self.saved.append(state.step)

    def steps(self):
        return self.saved


def slow_batches(count):
    for _ in range(count):
        time.sleep(0.03)
        yield 0


def test_goodput_phases_add_up_to_the_wall_time(tmp_path):
    began_s = time.time() - 1.0  # as if imports had taken a second
    goodput = Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=began_s)
    more = [MetricsFile(tmp_path / "m", also=goodput.line), Checkpointer(SlowCheckpoints(), every=2)]
    run(6, [goodput, *more], batches=slow_batches(6))
    seconds = goodput.seconds
    assert sum(seconds.values()) == pytest.approx(time.time() - began_s, abs=0.1)
    # These are lower bounds because a sleep may take longer. A wait for data may overlap with a step, except for the
    # first batch and the batches after the two saves, when the devices are idle.
    assert seconds["start"] >= 1.0
    assert seconds["compile"] >= 0.1
    assert seconds["save"] >= 4 * 0.05
    assert seconds["data"] >= 3 * 0.03
    assert seconds["steps"] >= 5 * 0.01
    assert 0 < lines(tmp_path / "m")[-1]["goodput"] < 1
    assert words({"steps": 93.0, "compile": 5.0, "save": 2.0}) == "93% of 100 s in steps; compile 5%, save 2%"


def test_goodput_excludes_steps_lost_with_a_process(tmp_path):
    def goodput():
        return Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=time.time())

    first = goodput()
    run(6, [first, MetricsFile(tmp_path / "m")])
    account = json.loads((tmp_path / "goodput.json").read_text())
    assert (account["step"], account["reason"]) == (6, "done")
    # As if the process had been killed 100 s ago, after a last save at step 2.
    account |= {"reason": None, "seen_s": account["seen_s"] - 100}
    (tmp_path / "goodput.json").write_text(json.dumps(account))
    redone = sum(line["seconds"] for line in lines(tmp_path / "m") if line["step"] > 2)
    second = goodput()
    run(6, [second, MetricsFile(tmp_path / "m")], state=State(2))
    seconds = second.seconds
    assert seconds["restart"] >= 100
    assert seconds["redone"] == pytest.approx(redone, rel=1e-3)
    assert seconds["steps"] >= first.seconds["steps"] - redone + 3 * 0.01
    assert second.share < 0.05
    # Killed again without any checkpoint: all steps count as redone.
    third = goodput()
    run(1, [third, MetricsFile(tmp_path / "m")])
    assert third.seconds["restart"] >= 100
    assert third.seconds["redone"] == pytest.approx(seconds["redone"] + seconds["steps"], rel=0.05)


def test_goodput_does_not_count_the_time_after_a_finished_run(tmp_path):
    path, metrics = tmp_path / "goodput.json", tmp_path / "m"
    run(2, [Goodput(path, metrics=metrics, began_s=time.time()), MetricsFile(metrics)])
    account = json.loads(path.read_text())
    path.write_text(json.dumps(account | {"seen_s": account["seen_s"] - 100}))  # continued 100 s later
    longer = Goodput(path, metrics=metrics, began_s=time.time() - 1.0)
    run(4, [longer, MetricsFile(metrics)], state=State(2))
    assert "restart" not in longer.seconds
    assert longer.seconds["start"] >= 1.0
