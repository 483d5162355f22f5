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

from meshpar.cli.run_lock import lock_run_folder
from meshpar.sharding.errors import MeshparError
from tests.errors import raises

HOLDER = """
import sys, time
from pathlib import Path
from meshpar.cli.run_lock import lock_run_folder
with lock_run_folder(Path(sys.argv[1]), warn=print) as lock_folder:
    Path(sys.argv[1]).mkdir()
    lock_folder()
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
        (folder.parent / ".one.lock").unlink()  # the folder itself stays locked
        with raises("conflict", f"run {folder}"), lock(folder):
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
        with pytest.raises(ZeroDivisionError), lock(tmp_path / "run") as lock_folder:  # noqa: PT012
            (tmp_path / "run").mkdir(exist_ok=True)
            lock_folder()  # in the second iteration the folder exists and is already locked
            raise ZeroDivisionError


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_lock_file_that_is_a_link_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".run.lock").symlink_to(tmp_path / target)
    with pytest.raises(MeshparError) as error, lock(tmp_path / "run"):
        pass
    assert error.value.where == str(tmp_path / ".run.lock")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_lock_file_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".run.lock")
    with pytest.raises(MeshparError) as error, lock(tmp_path / "run"):
        pass
    assert error.value.where == str(tmp_path / ".run.lock")


def test_run_folder_linked_by_another_user_is_an_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with lock(tmp_path / "run"):  # the user's own link is allowed
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
