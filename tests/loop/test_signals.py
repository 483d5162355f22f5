"""One Ctrl-C saves and ends, at whichever moment; a second ends at once.

Each signal is sent from a finalizer, the worst of places: what a handler raises there is printed and forgotten.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshpar.loop import signals as interrupts
from meshpar.loop.signals import Watch
from tests.cli.test_main import write_recipe
from tests.grid import cases
from tests.training_process import Runs, Sender

STEPS = 6
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("compiled"))
    yield runs
    runs.close()


def meshpar(runs: Runs, folder: Path, *more: str, signals=()) -> tuple[int, str]:
    """`meshpar train` on a tiny recipe; (exit code, all it printed)."""
    if not (folder / "tiny.py").exists():
        write_recipe(folder)
    args = ["train", "tiny.py", "--steps", str(STEPS), "--set", "sample=none", "--set", "checkpoint_every=2", *more]
    pid = runs.start(folder, args=args, signals=signals)
    code = runs.exit_of(pid)
    text = (folder / "log").read_text()
    (folder / "log").unlink()
    return code, text


def saved(folder: Path) -> list[int]:
    found = (folder / "runs" / "tiny" / "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdigit())


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", cases("jax._src.core", grid=["jax", "jax._src.core"]))
def test_a_command_that_imports_ends_with_a_plain_line(tmp_path, module):
    code = f"""
import signal, sys
from tests.training_process import Sender

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            Sender(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from meshpar.cli.main import main
main()
"""
    args = [sys.executable, "-c", code, "train", str(write_recipe(tmp_path)), "--out", str(tmp_path / "runs")]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # by which more would be shown
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(args, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (130, "meshpar: interrupted")
    assert not (tmp_path / "runs").exists()


COMPILES = ["jax._src.compiler:compile_or_get_cached", 1]
NOTHING_TO_SAVE = {
    "reading the recipe": [["meshpar.cli.recipe:load_recipe", 1]],
    "reading the data": [["meshpar.data.source:RowSource.__init__", 1]],
    "looking for a checkpoint": [["meshpar.loop.checkpoint:Checkpoints.restore", 1]],
    "compiling the first step": [["meshpar.loop.fit:Run.advance", 1], COMPILES],
}
SAVES = {  # and the first and last step that may have been the last
    "a step": ([["meshpar.loop.fit:Run.advance", 3]], 2, 3),
    "a callback of the loop": ([["meshpar.loop.metrics_file:JsonlWriter._write", 2]], 2, 4),
    "a save begins": ([["meshpar.loop.checkpoint:Checkpoints._write", 1]], 2, 2),
    "a save is renamed": ([["os:rename", 1]], 2, STEPS),  # in the background
    "compiling the validation": ([["meshpar.loop.fit:Validator._means", 1], COMPILES], 3, 3),
    "the last save": ([["meshpar.loop.fit:Checkpointer.on_end", 1]], STEPS, STEPS),
    "the report": ([["meshpar.cli.train_command:_report", 1]], STEPS, STEPS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("moment", NOTHING_TO_SAVE.values(), ids=NOTHING_TO_SAVE)
def test_a_command_with_nothing_to_save_ends(runs, tmp_path, moment):
    code, text = meshpar(runs, tmp_path, signals=[[INT, moment]])
    assert code == 130, text
    assert text.endswith("\nmeshpar: interrupted\n")
    assert "Traceback" not in text
    assert saved(tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize(("moment", "first", "last"), SAVES.values(), ids=SAVES)
def test_a_command_saves_and_ends(runs, tmp_path, moment, first, last):
    code, text = meshpar(runs, tmp_path, "--set", "validate_every=3", signals=[[INT, moment]])
    assert code == 130, text
    assert "interrupted" in text
    for word in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert word not in text
    assert first <= saved(tmp_path)[-1] <= last
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, saved(tmp_path)[-1] + 1))


@pytest.mark.matrix
def test_a_scheduler_that_ends_a_command_sees_that_it_was_not_done(runs, tmp_path):
    code, text = meshpar(runs, tmp_path, signals=[[TERM, SAVES["a save begins"][0]]])
    assert code == 128 + TERM, text
    assert saved(tmp_path) == [2]
    assert "interrupted at step 2 of " in text
    assert "The same command goes on from there." in text
    assert json.loads((tmp_path / "runs/tiny/summary.json").read_text())["reason"] == "interrupted"


# The watch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch():
    watch = Watch()
    watch.hold(lambda: True)
    yield watch
    if interrupts.current() is watch:
        watch.close()


def test_a_signal_is_noted_wherever_the_main_thread_is(watch, capfd):
    Sender(INT)
    assert watch.received == INT
    Sender(TERM)
    watch.close()
    assert watch.received == INT
    assert "Exception ignored" not in capfd.readouterr().err


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    watch = Watch()
    assert interrupts.current() is watch
    watch.close()
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert watch._thread not in threading.enumerate()


def test_what_is_half_written_goes_with_the_process(watch, monkeypatch, tmp_path):
    (tmp_path / "half/of").mkdir(parents=True)
    monkeypatch.setattr(interrupts, "scratch", {tmp_path / "half", tmp_path / "nowhere"})
    monkeypatch.setattr(interrupts.os, "_exit", lambda code: None)
    told = []
    watch.farewell = told.append
    watch._leave(INT, "interrupted")
    assert told == [INT]
    assert not (tmp_path / "half").exists()


def test_a_second_one_in_a_session_raises_and_leaves_the_session(watch, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    watch.hold(lambda: True, grace_s=0)
    signal.raise_signal(INT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)
    watch.close()  # while it still is a session


def test_a_forked_child_has_its_own_signals(watch):
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(TERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
    watch.close()
    assert watch.received is None
