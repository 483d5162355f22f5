"""Numbers reach every writer once, a writer that breaks ends nothing, and goodput adds up over restarts."""

from __future__ import annotations

import importlib.util
import json
import time
import types

import numpy as np
import pytest

from meshpar.loop.fit import Checkpointer, JsonlWriter, Validator, fit
from meshpar.loop.goodput import Goodput, words
from meshpar.loop.metric_writers import WRITERS, Writer, check_writers
from meshpar.sharding.types import MeshparError


class Step:
    """Takes a tenth of a second to compile, and a hundredth a step."""

    options = types.SimpleNamespace(nonfinite="raise")

    def __init__(self, *, dies_at=None):
        self.calls, self.dies_at = 0, dies_at

    def __call__(self, state, batch):
        self.calls += 1
        time.sleep(0.1 if self.calls == 1 else 0.01)
        if state.step + 1 == self.dies_at:
            raise RuntimeError("killed")
        return types.SimpleNamespace(step=state.step + 1, skipped=0), {"loss": np.float32(state.step + 1)}


class Kept:
    """A library's writer in memory."""

    def __init__(self, *, breaks_at=None):
        self.rows, self.closed, self.breaks_at = [], None, breaks_at


class Memory(Writer):
    name = "memory"

    def __init__(self, kept, folder, **given):
        super().__init__(folder, **given)
        self.kept = kept

    def _open(self, first_step):
        self.kept.opened = first_step
        return self.kept

    def _log(self, step, values):
        if step == self.kept.breaks_at:
            raise OSError("no route to the host")
        self.kept.rows.append((step, values))

    def _close(self, *, failed):
        self.kept.closed = failed


def state(step=0):
    return types.SimpleNamespace(step=step, skipped=0)


def run(steps, hooks, *, begin=0, step=None, batches=None):
    return fit(step or Step(), state(begin), batches or [0] * steps, steps=steps, hooks=hooks)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_writer_has_every_number_once_and_knows_how_the_run_ended(tmp_path):
    kept = Kept()
    writer = Memory(kept, tmp_path, config={}, also=lambda record: {"twice": 2 * record.loss, "layers": [1, 2]})
    run(3, [writer, Validator(lambda state, batch: {"loss": 0.5}, [1], every=2)])
    assert [(step, sorted(values)[0].split("/")[0]) for step, values in kept.rows] == [
        (1, "train"), (2, "train"), (2, "valid"), (3, "train"), (3, "valid"),
    ]  # fmt: skip
    first = kept.rows[0][1]
    assert first["train/loss"] == 1.0
    assert first["train/twice"] == 2.0
    assert not any("layers" in name or "mfu" in name for name in first), "only what is one number"
    assert kept.closed is False
    broken = Kept()
    with pytest.raises(RuntimeError, match="killed"):
        run(3, [Memory(broken, tmp_path, config={})], step=Step(dies_at=2))
    assert broken.closed is True


def test_a_writer_that_breaks_is_told_once_and_the_run_and_metrics_go_on(tmp_path):
    kept, path = Kept(breaks_at=2), tmp_path / "metrics.jsonl"
    with pytest.warns(
        UserWarning, match=r"memory could not write \(OSError: no route.*metrics.jsonl has every"
    ) as told:
        result = run(4, [Memory(kept, tmp_path, config={}), JsonlWriter(path)])
    assert len(told) == 1
    assert (result.reason, result.step) == ("done", 4)
    assert [step for step, _ in kept.rows] == [1]
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


def test_a_writer_that_is_not_installed_is_an_error_that_names_the_extra(monkeypatch):
    check_writers(())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshparError, match=r"pip install 'meshpar\[tensorboard\]'"):
        check_writers(["tensorboard"])
    with pytest.raises(MeshparError, match="there are tensorboard, wandb"):
        check_writers(["tensorbord"])


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    kept = Kept()
    goodput = Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=time.time())
    run(2, [Memory(kept, tmp_path, config={}), goodput])
    assert (kept.rows, kept.closed, goodput.seconds) == ([], None, {})
    assert not list(tmp_path.iterdir())


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX", reason="writes by it: pip install meshpar[tensorboard] tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(3, [WRITERS["tensorboard"](tmp_path, config={"steps": 3})])
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_wandb_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="writes by it: pip install meshpar[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(2, [WRITERS["wandb"](tmp_path, config={"steps": 2})])
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert (tmp_path / "wandb.id").read_text().isalnum()


# goodput -------------------------------------------------------------------------------------------------------------


class Disk:
    """Checkpoints that take 50 ms."""

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


def test_goodput_adds_up_to_the_wall_time_and_knows_what_was_no_step(tmp_path):
    began_s = time.time() - 1.0  # a second of imports, say
    goodput = Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=began_s)
    more = [JsonlWriter(tmp_path / "m", also=goodput.line), Checkpointer(Disk(), every=2)]
    run(6, [goodput, *more], batches=slow_batches(6))
    seconds = goodput.seconds
    assert sum(seconds.values()) == pytest.approx(time.time() - began_s, abs=0.1)
    # Lower bounds only: sleeps may take longer, never less. Data is waited for while a step may be under way, but the
    # first batch and those behind the two saves were waited for by idle devices.
    assert seconds["start"] >= 1.0
    assert seconds["compile"] >= 0.1
    assert seconds["save"] >= 4 * 0.05
    assert seconds["data"] >= 3 * 0.03
    assert seconds["steps"] >= 5 * 0.01
    assert 0 < lines(tmp_path / "m")[-1]["goodput"] < 1
    assert words({"steps": 93.0, "compile": 5.0, "save": 2.0}) == "93% of 100 s in steps; compile 5%, save 2%"


def test_what_died_with_a_process_is_no_goodput(tmp_path):
    def goodput():
        return Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=time.time())

    first = goodput()
    run(6, [first, JsonlWriter(tmp_path / "m")])
    account = json.loads((tmp_path / "goodput.json").read_text())
    assert (account["step"], account["reason"]) == (6, "done")
    # As if it had been killed 100 s ago, and had saved step 2 last.
    account |= {"reason": None, "seen_s": account["seen_s"] - 100}
    (tmp_path / "goodput.json").write_text(json.dumps(account))
    redone = sum(line["seconds"] for line in lines(tmp_path / "m") if line["step"] > 2)
    second = goodput()
    run(6, [second, JsonlWriter(tmp_path / "m")], begin=2)
    seconds = second.seconds
    assert seconds["restart"] >= 100
    assert seconds["redone"] == pytest.approx(redone, rel=1e-3)
    kept = first.seconds["steps"] - redone
    assert seconds["steps"] >= kept + 3 * 0.01
    assert second.share < 0.05
    # Killed again, with no checkpoint left: all of it was in vain, and stays in the account.
    third = goodput()
    run(1, [third, JsonlWriter(tmp_path / "m")])
    assert third.seconds["restart"] >= 100
    assert third.seconds["redone"] == pytest.approx(seconds["redone"] + seconds["steps"], rel=0.05)


@pytest.mark.parametrize("junk", ["", "{", "[1]", '{"seconds": 3}', '{"seconds": {"steps": "x"}, "step": 1}'])
def test_a_damaged_account_begins_anew(tmp_path, junk):
    (tmp_path / "goodput.json").write_text(junk)
    goodput = Goodput(tmp_path / "goodput.json", metrics=tmp_path / "m", began_s=time.time())
    run(1, [goodput])
    assert json.loads((tmp_path / "goodput.json").read_text())["step"] == 1
