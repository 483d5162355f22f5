"""Two runs in one folder are told apart; what a killed one leaves is no obstacle."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.cli.run_lock import held
from meshpar.sharding.types import MeshparError

HOLDS = """
import sys, time
from pathlib import Path
from meshpar.cli.run_lock import held
with held(Path(sys.argv[1]), tell=print) as made:
    Path(sys.argv[1]).mkdir()
    made()
    print("held", flush=True)
    time.sleep(600)
"""


def silent(line: str) -> None:
    raise AssertionError(line)


def test_a_second_run_is_told_who_holds_the_folder_until_that_one_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "held\n"
        words = f"process {process.pid} on .* is training in this folder. To fix it: wait for it or stop it"
        with pytest.raises(MeshparError, match=words), held(folder, tell=silent, wait_s=0.0):
            pass
        with held(folder.with_name("two"), tell=silent, wait_s=0.0):  # beside it there is room
            pass
        (folder.parent / ".one.lock").unlink()  # which lets nobody in
        with pytest.raises(MeshparError, match="is training in this folder"), held(folder, tell=silent, wait_s=0.0):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with held(folder, tell=silent, wait_s=0.0):
            pass
    finally:
        process.kill()
        process.wait()


def test_a_run_lets_go_at_its_end_and_at_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), held(tmp_path / "run", tell=silent, wait_s=0.0) as made:  # noqa: PT012
            (tmp_path / "run").mkdir(exist_ok=True)
            made()  # the second time it is there, and held
            raise ZeroDivisionError


@pytest.mark.parametrize("to", ["victim", "nowhere"])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path, to: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".run.lock").symlink_to(tmp_path / to)
    with pytest.raises(MeshparError, match="it is a link to"), held(tmp_path / "run", tell=silent, wait_s=0.0):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".run.lock")
    with pytest.raises(MeshparError, match="it is a pipe"), held(tmp_path / "run", tell=silent, wait_s=0.0):
        pass


def test_a_run_folder_that_another_user_links_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with held(tmp_path / "run", tell=silent, wait_s=0.0):  # a link of one's own is fine
        pass
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(MeshparError, match="another user made"), held(tmp_path / "run", tell=silent, wait_s=0.0):
        pass


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch) -> None:
    def none(number: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    told: list[str] = []
    with held(tmp_path / "run", tell=told.append, wait_s=0.0):
        assert "without locks" in told[0]
