"""The first Ctrl-C saves and ends a command at any moment; a second one ends it immediately.

The signals are sent from a finalizer, where an exception from a signal handler would be printed and lost.
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

from meshpar.pod import signals as interrupts
from meshpar.pod.signals import Watch
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
    """Run `meshpar train` on a tiny recipe; return the exit code and the output."""
    if not (folder / "tiny.py").exists():
        write_recipe(folder)
    args = ["train", "tiny.py", "--steps", str(STEPS), "--set", "sample=none", "--set", "checkpoint_every=2", *more]
    pid = runs.start(folder, args=args, signals=signals)
    code = runs.exit_of(pid)
    text = (folder / "log").read_text()
    (folder / "log").unlink()
    return code, text


def saved(folder: Path) -> list[int]:
    paths = (folder / "runs" / "tiny" / "checkpoints").glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdigit())


# ---- Commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", cases("jax._src.core", grid=["jax", "jax._src.core"]))
def test_ctrl_c_during_an_import_prints_a_single_line(tmp_path, module):
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
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # XLA would print a warning
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(args, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (130, "meshpar: interrupted")
    assert not (tmp_path / "runs").exists()


COMPILES = ["jax._src.compiler:compile_or_get_cached", 1]
NOTHING_TO_SAVE = {
    "reading the recipe": [["meshpar.runs.recipe:load_recipe", 1]],
    "reading the data": [["meshpar.data.source:RowSource.__init__", 1]],
    "looking for a checkpoint": [["meshpar.loop.checkpoint:Checkpoints.restore", 1]],
    "compiling the first step": [["meshpar.runs.background_compilation:BackgroundCompilation.wait", 1]],
}
SAVES = {  # moment, and the first and last possible step of the last checkpoint
    "a step": ([["meshpar.loop.fit:Run.advance", 3]], 2, 3),
    "a callback of the loop": ([["meshpar.loop.metrics_file:MetricsFile._write", 2]], 2, 4),
    "a save begins": ([["meshpar.loop.checkpoint:Checkpoints._write", 1]], 2, 2),
    "a save is renamed": ([["os:rename", 1]], 2, STEPS),  # in the background
    "compiling the validation": ([["meshpar.loop.fit:Validator._means", 1], COMPILES], 3, 3),
    "the last save": ([["meshpar.loop.fit:Checkpointer.on_end", 1]], STEPS, STEPS),
    "the report": ([["meshpar.runs.training_run:report", 1]], STEPS, STEPS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("moment", NOTHING_TO_SAVE.values(), ids=NOTHING_TO_SAVE)
def test_ctrl_c_without_work_ends_the_command(runs, tmp_path, moment):
    code, text = meshpar(runs, tmp_path, signals=[[INT, moment]])
    assert code == 130, text
    assert text.endswith("\nmeshpar: interrupted\n")
    assert "Traceback" not in text
    assert saved(tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize(("moment", "first", "last"), SAVES.values(), ids=SAVES)
def test_ctrl_c_saves_and_ends_the_command(runs, tmp_path, moment, first, last):
    code, text = meshpar(runs, tmp_path, "--set", "validate_every=3", signals=[[INT, moment]])
    assert code == 130, text
    assert "interrupted" in text
    for word in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert word not in text
    assert first <= saved(tmp_path)[-1] <= last
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, saved(tmp_path)[-1] + 1))


@pytest.mark.matrix
def test_sigterm_saves_and_sets_the_exit_code(runs, tmp_path):
    code, text = meshpar(runs, tmp_path, signals=[[TERM, SAVES["a save begins"][0]]])
    assert code == 128 + TERM, text
    assert saved(tmp_path) == [2]
    assert "interrupted at step 2 of " in text
    assert "Repeat the command to resume." in text
    assert json.loads((tmp_path / "runs/tiny/summary.json").read_text())["reason"] == "interrupted"


# ---- Watch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch():
    watch = Watch()
    watch.hold(lambda: True)
    yield watch
    if interrupts.current() is watch:
        watch.close()


def test_watch_records_the_first_signal(watch, capfd):
    Sender(INT)
    assert watch.received == INT
    Sender(TERM)
    watch.close()
    assert watch.received == INT
    assert "Exception ignored" not in capfd.readouterr().err


def test_close_restores_the_handlers():
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    watch = Watch()
    assert interrupts.current() is watch
    watch.close()
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert watch._thread not in threading.enumerate()


def test_exit_removes_incomplete_folders(watch, monkeypatch, tmp_path):
    (tmp_path / "half/of").mkdir(parents=True)
    monkeypatch.setattr(interrupts, "scratch", {tmp_path / "half", tmp_path / "nowhere"})
    monkeypatch.setattr(interrupts.os, "_exit", lambda code: None)
    received = []
    watch.on_exit = received.append
    watch._exit(INT, "interrupted")
    assert received == [INT]
    assert not (tmp_path / "half").exists()


def test_second_ctrl_c_in_a_session_raises(watch, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    watch.hold(lambda: True, grace_s=0)
    signal.raise_signal(INT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)
    watch.close()  # before `ps1` is removed


def test_forked_child_has_default_handlers(watch):
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(TERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
    watch.close()
    assert watch.received is None
