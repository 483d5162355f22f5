"""The loop never waits for what it has just dispatched, tells hooks everything once and in order, and ends cleanly."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
import types
from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.loop import fit as loop
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.fit import (
    STEPS_IN_FLIGHT,
    Checkpointer,
    Hook,
    JsonlWriter,
    Preemption,
    ProgressBar,
    Record,
    Validator,
    fit,
    json_line,
    restore_or_init,
)
from meshpar.loop.profiler import Profile, check_steps
from meshpar.sharding.types import MeshparError
from meshpar.training.state import make_setup
from tests.errors import raises
from tests.training_process import Sender

# ---------------------------------------------------------------------------------------------------------------------
# Steps without a device: what is read, and when
# ---------------------------------------------------------------------------------------------------------------------


class Scalar:
    """A device scalar that notes when it is waited for."""

    dtype = np.dtype(np.float32)

    def __init__(self, value, told):
        self.value, self.told = value, told

    def __array__(self, dtype=None, copy=None):
        self.told()
        return np.asarray(self.value, self.dtype)


class State:
    def __init__(self, step=0, skipped=0):
        self.step, self.skipped = step, skipped


class FakeStep:
    """Counts; the loss of step n is 1/n. `bad` steps are not finite."""

    def __init__(self, *, nonfinite="raise", bad=(), log=None):
        self.options = types.SimpleNamespace(nonfinite=nonfinite)
        self.bad, self.log = bad, [] if log is None else log

    def __call__(self, state, batch):
        step = state.step + 1
        self.log.append(f"dispatch {step}")
        loss = math.nan if step in self.bad else np.float32(1 / step)
        read = Scalar(loss, lambda: self.log.append(f"read {step}"))
        return State(step), {"loss": read, "finite": np.bool_(step not in self.bad), "grad_norm": np.float32(2)}


class Log(Hook):
    def __init__(self, log=None):
        self.log: list[str] = [] if log is None else log
        self.records: list[Record] = []

    def on_start(self, run):
        self.log.append(f"start {run.step}")

    def on_dispatched(self, run):
        self.log.append(f"dispatched {run.step}")

    def on_record(self, run, record):
        self.records.append(record)
        self.log.append(f"record {record.step}")

    def on_validation(self, run, validation):
        self.log.append(f"validation {validation.step}")

    def on_end(self, run, reason):
        self.log.append(f"end {reason}")


def forever() -> Iterator[int]:
    yield from iter(int, 1)


def run(steps=5, *, hooks=(), step=None, state=None, batches=None, **options):
    return fit(step or FakeStep(), state or State(), batches or forever(), steps=steps, hooks=hooks, **options)


@pytest.mark.parametrize("wrong", [(State(), FakeStep()), (None, State()), (FakeStep(), FakeStep()), (5, None)])
def test_swapped_arguments_of_fit_are_refused(wrong):
    with pytest.raises(MeshparError, match=r"fit: .*first argument is a .*mp.fit\(step, state, batches, steps=...\)"):
        fit(*wrong, [], steps=1)


def test_a_step_is_read_when_two_more_are_dispatched():
    assert STEPS_IN_FLIGHT == 2
    step = FakeStep()
    run(5, step=step)
    assert step.log == [
        "dispatch 1", "dispatch 2", "dispatch 3", "read 1", "dispatch 4", "read 2", "dispatch 5", "read 3", "read 4",
        "read 5",
    ]  # fmt: skip


def test_hooks_are_told_everything_once_and_in_order():
    log = Log()
    result = run(4, hooks=[log])
    assert log.log == [
        "start 0", "dispatched 1", "dispatched 2", "dispatched 3", "record 1", "dispatched 4", "record 2", "record 3",
        "record 4", "end done",
    ]  # fmt: skip
    assert [record.loss for record in log.records] == [np.float32(1 / n).item() for n in (1, 2, 3, 4)]
    assert (result.step, result.reason, result.last) == (4, "done", log.records[-1])
    assert result.state.step == 4


def test_waiting_for_data_is_no_step(monkeypatch):
    """Which a pod's watchdog is told: reading may take longer than a step may."""
    doing = []

    @contextlib.contextmanager
    def busy(what):
        doing.append(what)
        yield
        doing.append(None)

    monkeypatch.setattr("meshpar.loop.fit.watchdog.busy", busy)
    during = []
    fit(FakeStep(), State(), (during.append(doing[-1]) or {} for _ in range(2)), steps=2)
    assert during == ["waits for data"] * 2
    assert doing[-1] is None


def test_it_goes_on_where_the_state_stands():
    log = Log()
    assert run(5, hooks=[log], state=State(3)).step == 5
    assert [record.step for record in log.records] == [4, 5]


def test_a_run_that_is_done_takes_no_step():
    log = Log()
    result = run(3, hooks=[log], state=State(3))
    assert log.log == ["start 3", "end done"]
    assert (result.reason, result.last, result.tokens_per_s) == ("done", None, None)


def test_rates_follow_from_the_time_of_a_step():
    log = Log()
    result = run(6, hooks=[log], tokens_per_step=100, flops_per_step=5e6, peak_flops_per_s=1e9)
    for record in log.records:
        assert record.tokens_per_s == pytest.approx(100 / record.seconds)
        assert record.mfu == pytest.approx(5e-3 / record.seconds)
        assert record.metrics == {"finite": True, "grad_norm": 2.0}
    assert result.tokens_per_s == pytest.approx(500 / sum(record.seconds for record in log.records[1:]))
    assert sum(record.seconds for record in log.records) <= result.seconds


def test_no_rates_without_what_they_are_made_of():
    for options in ({}, {"flops_per_step": 1.0}, {"peak_flops_per_s": 1.0}):
        assert run(2, **options).last.mfu is None
        assert run(2, **options).last.tokens_per_s is None


def test_time_that_a_hook_takes_after_draining_is_no_steps_time(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr("meshpar.loop.fit.time.perf_counter", lambda: clock.now)

    class Slow(Hook):
        def on_dispatched(self, run):
            clock.now += 1
            if run.step == 3:
                run.drain()
                clock.now += 1000

    log = Log()
    run(6, hooks=[Slow(), log])
    assert sum(record.seconds for record in log.records) == pytest.approx(6)


def test_a_hook_stops_the_run():
    class Stop(Hook):
        def on_record(self, run, record):
            if record.step == 2:
                run.stop("good enough")
                run.stop("too late to say")

    log = Log()
    result = run(100, hooks=[Stop(), log])
    assert (result.reason, result.step) == ("good enough", 4)
    assert [record.step for record in log.records] == [1, 2, 3, 4]  # what was dispatched is told
    assert log.log[-1] == "end good enough"


def test_hooks_are_called_by_their_order():
    log: list[str] = []
    last, first = Log(log), Log(log)
    last.order, first.on_end = 5, lambda run, reason: log.append("first ends")
    run(1, hooks=[last, first])
    assert log[-2:] == ["first ends", "end done"]


def test_batches_that_end_too_early_are_an_error_after_hooks_have_ended():
    log = Log()
    with pytest.raises(MeshparError, match=r"batch of step 4 of 10: they ended after 3.*steps=3"):
        run(10, hooks=[log], batches=[1, 2, 3])
    assert log.log[-2:] == ["record 3", "end exhausted"]


def test_a_step_that_is_not_finite_is_told_and_raised():
    log = Log()
    with pytest.raises(MeshparError, match=r"step 3: .*loss is nan, its gradient norm 2.0: it was skipped") as caught:
        run(10, hooks=[log], step=FakeStep(bad=[3]))
    assert "nonfinite='skip'" in str(caught.value)
    assert log.log[-2:] == ["record 3", "end nonfinite"]


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_a_step_that_is_not_finite_is_counted_when_it_may_be_left_out(nonfinite):
    result = run(6, step=FakeStep(bad=[2, 3], nonfinite=nonfinite), state=State(0, skipped=4))
    assert (result.reason, result.skipped) == ("done", 6)


@pytest.mark.parametrize(
    ("bad", "steps", "fails_at"),
    [
        (range(3, 20), 20, 6),  # four in a row
        ([1, 2, 3, 5, 6, 7, 9, 10], 10, None),  # never more than three
        ([1, 2], 2, 2),  # every one of a short run
        ([2], 2, None),
    ],
)
def test_a_run_that_skips_too_many_updates_in_a_row_fails(bad, steps, fails_at):
    log, step = Log(), FakeStep(bad=bad, nonfinite="skip")
    expected = contextlib.nullcontext()
    if fails_at is not None:
        expected = pytest.raises(MeshparError, match=f"step {fails_at}: .*in a row were skipped: its loss is nan")
    with expected:
        assert run(steps, hooks=[log], step=step, max_skipped=4).skipped == len(bad)
    assert log.log[-1] == ("end done" if fails_at is None else "end nonfinite")


@pytest.mark.parametrize(("first", "last", "done"), [(1, 99_999, 0), (4, 5, 0), (1, 2, 2), (2, 4, 0)])
def test_profile_steps_must_be_in_the_run(first, last, done):
    with raises("out-of-range", "--profile"):
        check_steps(first, last, done=done, steps=3)
    check_steps(1, 3, done=1, steps=3)  # a resumed run has already finished step 1


def test_every_hook_is_ended_when_one_fails():
    class Fails(Hook):
        def on_record(self, run, record):
            raise KeyError("mine")

        def on_end(self, run, reason):
            raise OSError("mine too")

    log = Log()
    with pytest.raises(KeyError, match="mine") as caught:
        run(5, hooks=[Fails(), log])
    assert log.log[-1] == "end error"
    assert "mine too" in caught.value.__notes__[0]


def test_a_hook_that_fails_at_the_end_of_a_good_run_is_told():
    class Fails(Hook):
        def on_end(self, run, reason):
            raise OSError("disk full")

    log = Log()
    with pytest.raises(OSError, match="disk full"):
        run(2, hooks=[Fails(), log])
    assert log.log[-1] == "end done"


def test_only_hooks_that_were_started_are_ended():
    class Fails(Hook):
        def on_start(self, run):
            raise OSError("cannot start")

    first, never = Log(), Log()
    with pytest.raises(OSError, match="cannot start"):
        run(2, hooks=[first, Fails(), never])
    assert first.log == ["start 0", "end error"]
    assert never.log == []


def test_a_metric_with_a_name_of_the_loops_own():
    def step(state, batch):
        return State(1), {"loss": 1.0, "seconds": 2.0}

    with pytest.raises(MeshparError, match="metric `seconds`"):
        run(1, step=step)


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl
# ---------------------------------------------------------------------------------------------------------------------


def lines(path) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_what_of_the_state_is_validated():
    found = []
    validator = Validator(
        lambda step, batch: {"loss": found.append(step) or 0.0}, [1], every=2, of=lambda one: one.step
    )
    run(3, hooks=[validator])
    assert found == [2, 3]


def test_a_line_a_step_and_a_line_a_validation(tmp_path):
    validator = Validator(lambda state, batch: {"loss": batch, "accuracy": 0.5}, [1.0, 2.0], every=2)
    log = Log()
    run(3, hooks=[JsonlWriter(tmp_path / "runs" / "metrics.jsonl"), validator, log], tokens_per_step=10)
    found = lines(tmp_path / "runs" / "metrics.jsonl")
    assert [(line["step"], "val_loss" in line) for line in found] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    first = log.records[0]
    assert found[0] == {
        "step": 1, "loss": 1.0, "tokens_per_s": first.tokens_per_s, "mfu": None, "seconds": first.seconds,
        "finite": True, "grad_norm": 2.0,
    }  # fmt: skip
    assert {**found[2], "seconds": 0} == {"step": 2, "val_loss": 1.5, "val_accuracy": 0.5, "seconds": 0}


class LayerStep(FakeStep):
    """Reports arrays, as MoE layers do."""

    def __call__(self, state, batch):
        state, metrics = super().__call__(state, batch)
        per_layer = {"moe/load": np.array([[1.0, 3.0]]), "moe/drop_rate": np.array([0.25])}
        return state, {**metrics, **per_layer}


def test_lines_wait_for_room_on_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    real = type(writer)._written

    class Full:
        """Takes half a line, then nothing."""

        def __init__(self, file):
            self.file = file

        def write(self, line):
            self.file.write(line[:5])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    class Breaks(Hook):
        order = -1

        def on_record(self, run, record):
            full = record.step in (2, 3)
            monkeypatch.setattr(
                JsonlWriter, "_written", lambda self, file, line: real(self, Full(file) if full else file, line)
            )

    with pytest.warns(UserWarning, match="No space left on device; the run goes on, and lines wait"):
        run(5, hooks=[Breaks(), writer])
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


class FullDisk:
    """Checkpoints of which those on the way fail."""

    def __init__(self):
        self.saved = []

    def save(self, state, *, data_state=None, wait=False):
        if not wait and len(self.saved) == 1:
            raise MeshparError("checkpoints", "save", "no space left on the disk", "make room")
        self.saved.append(state.step)

    def steps(self):
        return self.saved


def test_a_run_goes_on_when_a_save_on_the_way_fails_and_says_which_checkpoint_stays():
    disk = FullDisk()
    with pytest.warns(UserWarning, match=r"no space left.*The run goes on; step 2 is the last whole checkpoint"):
        result = run(5, hooks=[Checkpointer(disk, every=2)])
    assert result.reason == "done"
    assert disk.saved == [2, 5]


class NoDisk(FullDisk):
    """Checkpoints of which every save fails, half of them late: in the background, as orbax reports it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def save(self, state, *, data_state=None, wait=False):
        self.calls += 1
        if self.calls % 2 == 0:
            raise MeshparError("checkpoints", "save", "writing failed", "make room")


@pytest.mark.parametrize("retries", [0, 2])
def test_a_run_stops_when_more_saves_in_a_row_fail_than_are_retried(retries):
    disk = NoDisk()
    warned = pytest.warns(UserWarning, match="no whole checkpoint yet") if retries else contextlib.nullcontext()
    with pytest.raises(MeshparError, match="writing failed") as caught, warned:
        run(20, hooks=[Checkpointer(disk, every=1, retries=retries)])
    assert disk.calls == 2 * (retries + 1)
    assert f"the run stops: {retries + 1} saves in a row failed" in caught.value.__notes__


def test_a_whole_checkpoint_ends_a_row_of_failed_saves():
    disk = FullDisk()

    def save(state, *, data_state=None, wait=False):
        if state.step % 3:
            raise MeshparError("checkpoints", "save", "writing failed", "make room")
        disk.saved.append(state.step)

    disk.save = save
    with pytest.warns(UserWarning, match="The run goes on") as warned:
        assert run(9, hooks=[Checkpointer(disk, every=1, retries=2)]).reason == "done"
    assert len(warned) == 6
    assert "step 6 is the last whole checkpoint" in str(warned[-1].message)


def test_profile_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, **__: None)  # then about.json has no folder
    with pytest.warns(UserWarning, match=r"no profile was written.*about\.json.*The run continues"):
        assert run(5, hooks=[Profile(tmp_path / "none", first=2, last=3)]).reason == "done"


def test_arrays_are_apart_from_the_numbers(tmp_path):
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


def test_validation_keeps_scalars_only():
    validator = Validator(lambda state, batch: {"loss": 2.0, "moe/load": np.ones((2, 3))}, [0, 1], every=1)
    result = run(1, hooks=[validator])
    assert result.validation.metrics == {"loss": 2.0}


def test_more_may_be_said_in_the_live_line():
    out = io.StringIO()
    run(1, hooks=[ProgressBar(stream=out, also=lambda record: [f"twice the loss {2 * record.loss:.3g}"])])
    assert out.getvalue() == "step 1/1  loss 1  twice the loss 2\n"


def test_numbers_that_json_does_not_know():
    line = json_line({"step": 3, "loss": math.nan, "grad_norm": math.inf, "other": -math.inf, "mfu": None})
    assert json.loads(line) == {
        "step": 3, "loss": None, "grad_norm": None, "other": None, "mfu": None,
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "other": "-inf"},
    }  # fmt: skip
    assert line.endswith("}\n")


def test_a_loss_is_written_to_the_bit(tmp_path):
    run(50, hooks=[JsonlWriter(tmp_path / "m")])
    assert [np.float32(line["loss"]) for line in lines(tmp_path / "m")] == [np.float32(1 / n) for n in range(1, 51)]


def test_every_line_is_there_while_it_runs(tmp_path):
    seen = []

    class Look(Hook):
        def on_record(self, run, record):
            seen.append(len(lines(tmp_path / "m")))

    run(3, hooks=[JsonlWriter(tmp_path / "m"), Look()])
    assert seen == [1, 2, 3]


def test_a_resumed_run_drops_the_lines_it_will_write_again(tmp_path):
    path = tmp_path / "m"
    run(6, hooks=[JsonlWriter(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)])
    whole = lines(path)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a process killed while writing
    run(6, hooks=[JsonlWriter(path), Validator(lambda state, batch: {"loss": 0.0}, [1], every=2)], state=State(3))
    assert [{**line, "seconds": 0} for line in lines(path)] == [{**line, "seconds": 0} for line in whole]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("junk", ["", "null\n", "[1]\n", '{"loss": 1}\n', "\x00\x00\n", '{"step": 1}'])
def test_what_is_no_line_of_ours_is_dropped(tmp_path, junk):
    (tmp_path / "m").write_text(json_line({"step": 1, "loss": 1.0}) + junk)
    run(3, hooks=[JsonlWriter(tmp_path / "m")], state=State(1))
    assert [line["step"] for line in lines(tmp_path / "m")] == [1, 2, 3]


def damaged(path, how):
    """Damage a file as somebody else would."""
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
        path.with_name("other").write_text("somebody else's")
        path.with_name("other").replace(path)
    elif how == "a link":
        path.unlink()
        path.symlink_to("elsewhere")


HOW = ["removed", "renamed", "its folder renamed", "its folder removed", "cut", "emptied", "replaced", "a link"]


class Damages(Hook):
    """Damages the file after the record of a step."""

    def __init__(self, path, how, at):
        self.path, self.how, self.at = path, how, at

    def on_record(self, run, record):
        if record.step == self.at:
            damaged(self.path, self.how)


@pytest.mark.parametrize("at", [3, 6], ids=["on the way", "at the end"])
@pytest.mark.parametrize("how", HOW)
def test_a_file_that_is_damaged_while_the_run_goes_on_is_written_again(tmp_path, how, at):
    path = tmp_path / "run" / "m"
    run(2, hooks=[JsonlWriter(path)])
    with pytest.warns(
        UserWarning, match=r"m was (removed or renamed|cut|replaced) while the run goes on: it is written"
    ):
        run(6, hooks=[JsonlWriter(path), Damages(path, how, at)], state=State(2))
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert not path.is_symlink()
    assert not (path.parent / "elsewhere").exists()


def test_lines_that_memory_no_longer_has_are_recorded_as_a_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MOST_KEPT_BYTES", 300)
    path = tmp_path / "m"
    with pytest.warns(
        UserWarning, match=r"m was cut while the run goes on: it is written again; it lacks steps 1 to \d"
    ):
        run(9, hooks=[JsonlWriter(path), Damages(path, "emptied", 7)])
    first, *others = lines(path)
    assert first == {"step": others[0]["step"] - 1, "missing_from": 1}
    assert [line["step"] for line in others] == list(range(others[0]["step"], 10))
    assert loop.missing_steps(loop.read_lines(path), 9) == [(1, first["step"])]


def test_a_file_that_cannot_be_written_again_is_reported_once(tmp_path, monkeypatch):
    path = tmp_path / "run" / "m"

    def broken(path, content):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(loop, "replace_file", broken)
    with pytest.warns(UserWarning, match="it cannot be written again") as warned:
        run(9, hooks=[JsonlWriter(path), Damages(path, "removed", 3)])
    assert len(warned) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("kept", "missing"),
    [([], [(1, 6)]), ([1, 2, 3], [(4, 6)]), ([4, 5, 6], [(1, 3)]), ([1, 4, 6], [(2, 3), (5, 5)])],
)
def test_steps_whose_lines_are_missing_before_a_run_goes_on_are_recorded(tmp_path, kept, missing):
    path = tmp_path / "m"
    path.write_text("".join(json_line({"step": step, "loss": 1.0}) for step in kept))
    for _ in range(2):  # once recorded, a gap stays one line
        with pytest.warns(UserWarning, match="m: it lacks steps"):
            run(8, hooks=[JsonlWriter(path)], state=State(6))
        found = lines(path)
        assert [(line["missing_from"], line["step"]) for line in found if "missing_from" in line] == missing
        assert [line["step"] for line in found if "loss" in line] == [*kept, 7, 8]
        assert [line["step"] for line in found] == sorted(line["step"] for line in found)
        assert loop.missing_steps(loop.read_lines(path), 8) == missing


# ---------------------------------------------------------------------------------------------------------------------
# Progress
# ---------------------------------------------------------------------------------------------------------------------


def plain(steps, *, every_s=0.0, **options) -> list[str]:
    stream = io.StringIO()
    hooks = [*options.pop("hooks", []), ProgressBar(stream=stream, every_s=every_s)]
    run(steps, hooks=hooks, **options)
    text = stream.getvalue()
    assert not any(ord(char) < 32 and char != "\n" for char in text), "control codes"
    return text.splitlines()


def test_plain_lines_when_it_is_no_terminal(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("meshpar.loop.fit.time.monotonic", lambda: next(clock) / 1000)
    found = plain(4, tokens_per_step=10)
    assert [line.split("  ")[0] for line in found] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert found[1].split("  ")[1] == "loss 0.5"
    assert found[1].split("  ")[2].endswith("tokens/s")
    assert found[1].endswith("0:00 left")
    assert "left" not in found[0] + found[3]


def test_few_plain_lines_of_a_quick_run_but_the_first_and_the_last():
    assert [line.split("  ")[0] for line in plain(50, every_s=1000)] == ["step 1/50", "step 50/50"]


def test_validation_and_skipped_updates_are_shown():
    validator = Validator(lambda state, batch: {"loss": 0.25}, [1], every=2)
    found = plain(3, hooks=[validator], step=FakeStep(bad=[2], nonfinite="skip"))
    assert "val 0.25" in found[-1]
    assert "1 skipped" in found[-1]
    assert "skipped" not in found[0]
    assert "loss nan" in found[1]


def test_why_it_stopped_is_said():
    class Stop(Hook):
        def on_dispatched(self, run):
            run.stop("interrupted")

    assert plain(9, hooks=[Stop()])[-1] == "stopped at step 1 of 9: interrupted"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [60, 120])
def test_a_bar_in_a_terminal(monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    validator = Validator(lambda state, batch: {"loss": 0.125}, [1], every=None)
    run(4, hooks=[validator, ProgressBar(stream=stream)], tokens_per_step=10)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert re.search(r"4/4 loss 0.25  val 0.125  [0-9.]+[kMG]? tokens/s", text)  # the numbers fit, the bar gives way
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    run(2, hooks=[ProgressBar(stream=stream)])
    assert "\x1b" not in stream.getvalue()


def test_the_cursor_is_given_back_when_a_run_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(MeshparError):
        run(4, hooks=[ProgressBar(stream=stream)], step=FakeStep(bad=[2]))
    assert stream.getvalue().count("\x1b[?25h") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------------------------------------------------


def test_validation_every_so_many_steps_and_after_the_last_once():
    log = Log()
    run(5, hooks=[log, Validator(lambda state, batch: {"loss": batch}, [1.0, 3.0], every=2)])
    assert [entry for entry in log.log if entry.startswith(("record", "validation"))] == [
        "record 1", "record 2", "validation 2", "record 3", "record 4", "validation 4", "record 5", "validation 5",
    ]  # fmt: skip


def test_at_the_end_only():
    log: list[str] = []
    hooks = [Validator(lambda state, batch: {"loss": 1.0}, [1], every=None), Log(log)]
    run(4, hooks=[*hooks, Checkpointer(FakeCheckpoints(log), every=None)])
    assert [entry for entry in log if entry.startswith(("validation", "save"))] == ["validation 4", "save 4 None wait"]


def test_validation_keeps_few_batches_in_flight():
    log: list[str] = []

    def step(state, batch):
        log.append(f"dispatch {batch}")
        return {"loss": Scalar(batch, lambda: log.append(f"read {batch}"))}

    result = run(1, hooks=[Validator(step, [1, 2, 3, 4], every=1)])
    assert log == ["dispatch 1", "dispatch 2", "dispatch 3", "read 1", "dispatch 4", "read 2", "read 3", "read 4"]
    assert result.validation.metrics == {"loss": 2.5}


def test_validation_weights_the_means_of_batches_and_sums_counts():
    batches = [(128, 2.0, 5), (3, 4.0, 1), (0, np.nan, 2)]  # the weight, the loss and a count of each

    def step(state, batch):
        weight, loss, count = batch
        return {"loss": np.float32(loss), "loss_weight": np.int32(weight), "hits": np.int32(count), "bare": loss}

    metrics = run(1, hooks=[Validator(step, batches, every=1)]).validation.metrics
    assert list(metrics) == ["loss", "loss_weight", "hits", "bare"]
    assert metrics["loss"] == metrics["bare"] == pytest.approx((128 * 2 + 3 * 4) / 131)
    assert (metrics["loss_weight"], metrics["hits"]) == (131, 8)
    metrics = run(1, hooks=[Validator(step, batches[2:], every=1)]).validation.metrics
    assert (metrics["loss"], metrics["loss_weight"]) == (0, 0)


def test_validation_batches_must_be_there_each_time():
    with pytest.raises(MeshparError, match="an iterator is spent after one pass"):
        Validator(None, iter([1]), every=1)
    with pytest.raises(MeshparError, match="there are none"):
        run(1, hooks=[Validator(None, [], every=1)])


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_positive_integer(tmp_path, every):
    with pytest.raises(MeshparError, match="integer of at least 1"):
        Validator(None, [], every=every)
    with pytest.raises(MeshparError, match="integer of at least 1"):
        Checkpointer(Checkpoints(tmp_path), every=every)


# ---------------------------------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------------------------------


class FakeCheckpoints:
    def __init__(self, log):
        self.log = log

    def save(self, state, *, data_state=None, wait=False):
        self.log.append(f"save {state.step} {data_state}{' wait' if wait else ''}")


class Counted:
    """Batches that say where they stand."""

    def __init__(self, length=1000):
        self.at, self.length = 0, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_all_that_a_checkpoint_knows_is_recorded_before_it_is_written():
    log: list[str] = []
    run(5, hooks=[Checkpointer(FakeCheckpoints(log), every=2), Log(log)], batches=Counted())
    kept = [entry for entry in log if entry.startswith(("record", "save", "end"))]
    assert kept == [
        "record 1", "record 2", "save 2 {'at': 2}", "record 3", "record 4", "save 4 {'at': 4}", "record 5", "end done",
        "save 5 {'at': 5} wait",
    ]  # fmt: skip


def test_data_that_cannot_say_where_it_stands():
    log: list[str] = []
    run(1, hooks=[Checkpointer(FakeCheckpoints(log), every=9)])
    assert log == ["save 1 None wait"]


def test_bad_numbers_are_not_saved():
    log: list[str] = []
    with pytest.raises(MeshparError):
        run(9, hooks=[Checkpointer(FakeCheckpoints(log), every=4)], step=FakeStep(bad=[4]), batches=Counted())
    assert log == []


def test_what_was_trained_before_the_batches_ended_is_saved():
    log: list[str] = []
    with pytest.raises(MeshparError, match="they ended"):
        run(9, hooks=[Checkpointer(FakeCheckpoints(log), every=100)], batches=Counted(3))
    assert log == ["save 3 {'at': 3} wait"]


# ---------------------------------------------------------------------------------------------------------------------
# Signals
# ---------------------------------------------------------------------------------------------------------------------


class Send(Hook):
    def __init__(self, number, at):
        self.number, self.at = number, at

    def on_dispatched(self, run):
        if run.step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_returns(number, capfd):
    log: list[str] = []
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    hooks = [Preemption(), Send(number, 3), Checkpointer(FakeCheckpoints(log), every=100), Log(log)]
    result = run(10_000, hooks=hooks)
    assert result.reason == "interrupted"
    assert 3 <= result.step < 10_000
    assert log[-2:] == ["end interrupted", f"save {result.step} None wait"]
    assert f"record {result.step}" in log
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert number.name in capfd.readouterr().err


def test_signals_work_as_before_when_a_run_fails():
    # A process that a shell started in the background ignores Ctrl-C, and Python leaves that as it is.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(MeshparError):
            run(9, hooks=[Preemption()], step=FakeStep(bad=[2]))
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, outside)


class SendInFinalizer(Hook):
    """Ctrl-C where what a handler raises is printed and forgotten, and what jax calls back."""

    def __init__(self, at):
        self.at = at

    def on_dispatched(self, run):
        if run.step == self.at:
            Sender(signal.SIGINT)


@pytest.mark.parametrize("last", [9, 3], ids=["on the way", "after the last step"])
def test_ctrl_c_saves_and_raises_where_nobody_minds_it(capfd, last):
    log: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
            run(last, hooks=[SendInFinalizer(3), Checkpointer(FakeCheckpoints(log), every=100)])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["save 3 None wait"]
    assert "Exception ignored" not in capfd.readouterr().err


def test_ctrl_c_while_the_last_save_is_written_stops_the_caller():
    class Saves(FakeCheckpoints):
        def save(self, *args, **kwargs):
            Sender(signal.SIGINT)
            return super().save(*args, **kwargs)

    log: list[str] = []
    assert run(3, hooks=[Preemption(), Checkpointer(Saves(log), every=100)]).reason == "interrupted"
    assert log == ["save 3 None wait"]


def test_ctrl_c_in_a_callback_of_jax():
    def calls_back(state, batch):
        def body(x):
            if state.step == 2:
                Sender(signal.SIGINT)
            return x

        loss = jax.pure_callback(body, jax.ShapeDtypeStruct((), np.float32), np.float32(1))
        state, metrics = FakeStep()(state, batch)
        return state, {**metrics, "loss": jax.block_until_ready(loss)}

    log: list[str] = []
    result = run(9, hooks=[Preemption(), Checkpointer(FakeCheckpoints(log), every=100)], step=calls_back)
    assert (result.reason, result.step, log) == ("interrupted", 3, ["save 3 None wait"])


def test_ctrl_c_that_somebody_minds_is_theirs():
    log: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: log.append(number))
    try:
        assert run(5, hooks=[Send(signal.SIGINT, 3)]).reason == "done"
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == [signal.SIGINT]


def test_two_signals_at_once_are_one_wish():
    assert run(10_000, hooks=[Preemption(), Send(signal.SIGTERM, 3), Send(signal.SIGTERM, 3)]).reason == "interrupted"


def test_watching_for_signals_needs_the_main_thread():
    caught = []

    def work():
        try:
            run(1, hooks=[Preemption()])
        except MeshparError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread only" in caught[0]


# ---------------------------------------------------------------------------------------------------------------------
# With a true step
# ---------------------------------------------------------------------------------------------------------------------


def loss(model, batch, key):
    value = (model(batch) ** 2).mean()
    return value, {"twice": 2 * value}


@pytest.fixture(scope="module")
def setup():
    model = mp.from_functions(lambda key: {"w": jax.random.normal(key, (8, 8))}, lambda p, x: x @ p["w"])
    return make_setup(model, optax.sgd(1e-2), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.ddp())


def test_a_true_step_trains(setup):
    batch = np.ones((8, 8), np.float32)
    log = Log()
    validator = Validator(mp.eval_step(loss), [batch], every=100)
    result = fit(mp.train_step(loss), setup.init(0), itertools.repeat(batch), steps=20, hooks=[log, validator])
    assert int(result.state.step) == result.step == 20
    assert log.records[-1].loss < log.records[0].loss
    assert log.records[-1].metrics["twice"] == pytest.approx(2 * log.records[-1].loss)
    assert result.validation.metrics["loss"] < log.records[-1].loss


def test_the_true_step_says_that_numbers_are_not_finite(setup):
    batches = [np.full((8, 8), np.nan if n == 2 else 1, np.float32) for n in range(4)]
    with pytest.raises(MeshparError, match="step 3"):
        fit(mp.train_step(loss), setup.init(0), batches, steps=4)
    result = fit(mp.train_step(loss, nonfinite="skip"), setup.init(0), batches, steps=4)
    assert result.skipped == int(result.state.skipped) == 1


def test_a_new_state_and_then_the_restored_one_with_its_data(setup, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        data = Counted()
        state = restore_or_init(checkpoints, setup, key=0, batches=data)
        assert (int(state.step), data.at) == (0, 0)
        state, _ = mp.train_step(loss)(state, np.ones((8, 8), np.float32))
        checkpoints.save(state, data_state={"at": 7})
        restored = restore_or_init(checkpoints, setup, key=0, batches=data)
        assert (int(restored.step), data.at) == (1, 7)
        with pytest.raises(MeshparError, match="has no set_state"):
            restore_or_init(checkpoints, setup, key=0, batches=iter([]))


def test_a_checkpoint_that_does_not_say_where_the_data_stood(setup, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(setup.init(0))
        with pytest.raises(MeshparError, match="the checkpoint does not say where"):
            restore_or_init(checkpoints, setup, key=0, batches=Counted())
        assert int(restore_or_init(checkpoints, setup, key=0).step) == 0
