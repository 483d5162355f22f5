"""The progress bar shows plain lines without a terminal, and restores the cursor of a terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys

import pytest

from meshpar.loop.fit import Hook, Validator
from meshpar.loop.progress_bar import ProgressBar
from tests.errors import raises
from tests.loop.test_fit import FakeStep, run


def plain_lines(steps, *, every_s=0.0, **options) -> list[str]:
    stream = io.StringIO()
    hooks = [*options.pop("hooks", []), ProgressBar(stream=stream, every_s=every_s)]
    run(steps, hooks=hooks, **options)
    text = stream.getvalue()
    assert not any(ord(char) < 32 and char != "\n" for char in text), "control codes"
    return text.splitlines()


def test_plain_lines_without_a_terminal(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("meshpar.loop.progress_bar.time.monotonic", lambda: next(clock) / 1000)
    shown = plain_lines(4, tokens_per_step=10)
    assert [line.split("  ")[0] for line in shown] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert shown[1].split("  ")[1] == "loss 0.5"
    assert shown[1].split("  ")[2].endswith("tokens/s")
    assert shown[1].endswith("0:00 left")
    assert "left" not in shown[0] + shown[3]
    assert [line.split("  ")[0] for line in plain_lines(50, every_s=1000)] == ["step 1/50", "step 50/50"]


def test_validation_and_skipped_updates_are_shown():
    validator = Validator(lambda state, batch: {"loss": 0.25}, [1], every=2)
    shown = plain_lines(3, hooks=[validator], step=FakeStep(bad=[2], nonfinite="skip"))
    assert "val 0.25" in shown[-1]
    assert "1 skipped" in shown[-1]
    assert "skipped" not in shown[0]
    assert "loss nan" in shown[1]


def test_reason_of_a_stop_is_shown():
    class Stop(Hook):
        def on_dispatched(self, run):
            run.stop("interrupted")

    assert plain_lines(9, hooks=[Stop()])[-1] == "stopped at step 1 of 9: interrupted"


def test_also_adds_texts():
    out = io.StringIO()
    run(1, hooks=[ProgressBar(stream=out, also=lambda record: [f"twice the loss {2 * record.loss:.3g}"])])
    assert out.getvalue() == "step 1/1  loss 1  twice the loss 2\n"


def test_pipe_without_a_reader_does_not_end_the_run(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        result = run(3, hooks=[ProgressBar(every_s=0.0)])
        assert (result.reason, result.step) == ("done", 3)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [60, 120])
def test_bar_in_a_terminal(monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    validator = Validator(lambda state, batch: {"loss": 0.125}, [1], every=None)
    run(4, hooks=[validator, ProgressBar(stream=stream)], tokens_per_step=10)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert re.search(r"4/4 loss 0.25  val 0.125  [0-9.]+[kMG]? tokens/s", text)  # the bar is shortened
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is shown again


def test_cursor_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with raises("not-finite"):
        run(4, hooks=[ProgressBar(stream=stream)], step=FakeStep(bad=[2]))
    assert stream.getvalue().count("\x1b[?25h") == 1
