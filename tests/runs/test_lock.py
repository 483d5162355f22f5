"""Locks of run folders: a second run is rejected, and a killed process leaves no lock."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.runs.lock import lock_run_folder
from tests.errors import raises

HOLDER = """
import sys, time
from pathlib import Path
from meshpar.runs.lock import lock_run_folder
with lock_run_folder(Path(sys.argv[1]), warn=print):
    print("locked", flush=True)
    time.sleep(600)
"""


def lock(folder: Path):
    def warn(line: str) -> None:
        raise AssertionError(line)

    return lock_run_folder(folder, warn=warn, wait_s=0.0)


def test_lock_names_its_process_until_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "locked\n"
        with raises("conflict", f"run {folder}") as error, lock(folder):
            pass
        assert f"process {process.pid} on " in error.value.reason
        with lock(folder.with_name("two")):  # another run in the same parent folder
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lock(folder):
            pass
    finally:
        process.kill()
        process.wait()


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock(tmp_path / "run"):
            raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_lock_file_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("mine")
    path = tmp_path / ".run.lock"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / ("victim" if kind == "link" else "nowhere"))
    with raises("wrong-type", str(path)), lock(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_run_folder_linked_by_another_user_is_an_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with lock(tmp_path / "run"):  # a link of the user is allowed
        pass
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with raises("conflict", "run "), lock(tmp_path / "run"):
        pass


def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    warnings: list[str] = []
    with lock_run_folder(tmp_path / "run", warn=warnings.append, wait_s=0.0):
        assert "has no locks" in warnings[0]
