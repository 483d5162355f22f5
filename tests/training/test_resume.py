"""Interrupted, killed and moved runs continue with bitwise equal losses."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.training_process import SAVE_EVERY, STEPS, Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("compiled"))
    yield runs
    runs.close()


def metrics(folder: Path) -> list[dict]:
    """Return the metrics without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("seconds", "tokens_per_s", "mfu")} for line in lines]


def result(folder: Path, process: int = 0) -> dict:
    return json.loads((folder / f"result-{process}.json").read_text())


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory) -> list[dict]:
    """Return the metrics of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    pid = runs.start(folder, pause_s=0)
    assert runs.exit_of(pid) == 0, (folder / "log").read_text()
    found = metrics(folder)
    assert [line["step"] for line in found if "loss" in line] == list(range(1, STEPS + 1))
    assert len({line["loss"] for line in found if "loss" in line}) > 0.9 * STEPS
    return found


def finish(runs: Runs, folder: Path) -> list[dict]:
    pid = runs.start(folder, pause_s=0)
    assert runs.exit_of(pid) == 0, (folder / "log").read_text()
    return metrics(folder)


STEP, SAVE = "meshpar.loop.fit:Run.advance", "meshpar.loop.checkpoint:Checkpoints._write"
RENAME = "os:rename"  # completes a checkpoint
MOMENTS = {
    "starts": [["meshpar.loop.fit:restore_or_init", 1]],
    "before anything is saved": [[STEP, SAVE_EVERY]],
    "the first save begins": [[SAVE, 1]],
    "files of the first save are written": [[SAVE, 1], ["asyncio:to_thread", 3]],
    "the first save is to be renamed": [[RENAME, 1]],
    "the first save is renamed": [[RENAME, 1], [STEP, 1]],
    "the step after a save": [[SAVE, 2], [STEP, 2]],
    "restores": [["meshpar.loop.checkpoint_index:_read_arrays", 1]],
    "compiles": [[STEP, 1], ["jax._src.compiler:compile_or_get_cached", 1]],
    "validates": [["meshpar.loop.fit:Validator._means", 1]],
    "a line of metrics": [[SAVE, 1], ["meshpar.loop.metrics_file:MetricsFile._write", 3]],
    "old checkpoints are removed": [[SAVE, 4]],
    "the last save": [["meshpar.loop.fit:Checkpointer.on_end", 1]],
}


@pytest.mark.matrix
def test_killed_again_and_again(runs, whole, tmp_path):
    for name, moment in MOMENTS.items():
        pid = runs.start(tmp_path, pause_s=0, signals=[[signal.SIGKILL, moment]])
        assert runs.exit_of(pid) == -signal.SIGKILL, (name, (tmp_path / "log").read_text())
    assert (tmp_path / "checkpoints").exists()
    assert finish(runs, tmp_path) == whole


@pytest.mark.matrix
def test_ctrl_c_in_a_terminal(runs, whole, tmp_path):
    ours, theirs = pty.openpty()
    pid = runs.start(tmp_path, terminal=os.ttyname(theirs))
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = b""

    def read() -> bytes:
        try:
            return os.read(ours, 65536)
        except (BlockingIOError, OSError):  # no output yet, or the process has ended
            return b""

    runs.wait_for_steps(pid, tmp_path, SAVE_EVERY + 2)
    os.write(ours, b"\x03")
    while not runs.ended(pid):
        shown += read()
    shown += read()
    os.close(ours)
    text = shown.decode()
    assert result(tmp_path)["reason"] == "interrupted", text
    assert f"/{STEPS}" in text
    assert "loss" in text
    assert "SIGINT: stopping after this step" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert "Traceback" not in text
    assert finish(runs, tmp_path) == whole


@pytest.mark.matrix
def test_second_ctrl_c_exits_during_native_code(runs, tmp_path):
    pid = runs.start(tmp_path, hang_at=SAVE_EVERY + 1, grace_s=0)

    def wait_for(text: str) -> None:
        while text not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert not runs.ended(pid)
            time.sleep(0.01)

    wait_for("stuck")
    os.kill(pid, signal.SIGINT)
    wait_for("SIGINT: stopping after this step")  # it is stuck, and saves as announced
    os.kill(pid, signal.SIGINT)
    assert runs.exit_of(pid) == 128 + signal.SIGINT
    assert "SIGINT: exiting at once" in (tmp_path / "log").read_text()


def start_two(runs: Runs, folder: Path, **request) -> list[int]:
    """Start two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pod = {"coordinator_address": f"127.0.0.1:{free.getsockname()[1]}", "num_processes": 2}
    return [
        runs.start(folder, num_devices=4, compiled=None, pod={**pod, "process_id": number}, **request)
        for number in (0, 1)
    ]


@pytest.mark.matrix
def test_two_processes_stop_and_skip_damage_together(runs, whole, tmp_path):
    pids = start_two(runs, tmp_path)
    runs.wait_for_steps(pids[0], tmp_path, SAVE_EVERY + 2)
    os.kill(pids[1], signal.SIGTERM)  # both processes stop
    assert [runs.exit_of(pid) for pid in pids] == [0, 0], (tmp_path / "log").read_text()
    assert result(tmp_path, 0) == result(tmp_path, 1)
    step = result(tmp_path)["step"]
    assert result(tmp_path)["reason"] == "interrupted"
    assert SAVE_EVERY < step < STEPS
    assert max(line["step"] for line in metrics(tmp_path)) == step

    (tmp_path / "checkpoints" / str(step) / "run" / "metadata").write_text("{}")
    pids = start_two(runs, tmp_path, steps=step, pause_s=0)
    assert [runs.exit_of(pid) for pid in pids] == [0, 0], (tmp_path / "log").read_text()
    assert f"checkpoints/{step} is damaged and skipped" in (tmp_path / "log").read_text()
    assert (tmp_path / "checkpoints" / "set_aside" / str(step)).is_dir()
    assert result(tmp_path, 0) == result(tmp_path, 1) == {"step": step, "reason": "done"}

    found, expected = ([line["loss"] for line in lines if "loss" in line] for lines in (finish(runs, tmp_path), whole))
    # Two processes add in a different order.
    assert found == pytest.approx(expected, rel=1e-4)
