"""Start `meshpar train recipe.py` as processes of a pod on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S = 600
METRICS = Path("runs", "pod", "metrics.jsonl")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start(folder: Path, *args: str, log: str = "log", cwd: Path | None = None, **env: str) -> subprocess.Popen:
    """Start one process with additional environment variables. It writes to a log in the folder."""
    command = [sys.executable, "-m", "meshpar.cli.main", "train", "recipe.py", *args]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu", **env}
    with (folder / log).open("w") as file:
        return subprocess.Popen(command, cwd=cwd or folder, env=env, stdout=file, stderr=file)


def run_together(code: str, envs: Sequence[Mapping[str, str]], *args: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in several processes at the same time, each with additional environment variables."""
    command, pipe = [sys.executable, "-c", code, *args], subprocess.PIPE
    started = [subprocess.Popen(command, env=os.environ | env, stdout=pipe, stderr=pipe, text=True) for env in envs]
    try:
        outputs = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    """Wait while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def losses(path: Path) -> list[float]:
    """Return the losses of all complete lines of a metrics file, which may not exist yet."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line["loss"] for line in lines if "loss" in line]


def errors_of(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("meshpar: ") and "warning" not in line]
