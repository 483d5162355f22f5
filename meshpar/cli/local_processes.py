"""`--processes N`: the command as N local processes of one pod, to try multi-host runs."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from meshpar.cli import roll
from meshpar.loop import signals as interrupts
from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from meshpar.sharding.mesh import MeshSpec

PARENT = "MESHPAR_PARENT"
"""Set for a process that was started here: the id of the one that started it."""
NEWS = "MESHPAR_NEWS"
"""Set for a local process: the descriptor of an empty file. If a process fails, the parent writes there which one."""
BEGAN_WITH = "MESHPAR_BEGAN_WITH"
"""Set for it where a lost process takes its devices along: how many processes there were at first."""
GRACE_S = 20.0
"""Seconds the others have to end by themselves when one has failed; then they are killed, stopped ones too."""
RESTART_GRACE_S = 2.0
"""The same, where they are to start again: without the one that is lost they can save nothing."""
COMMAND = (sys.executable, "-m", "meshpar.cli.main")
_GIVEN_UP = 1  # what the watchdog of a process that lives exits with when another is lost; not when another has failed
_POLL_S = 0.1
_FOLLOW_S = 0.25


def run(args: Sequence[str], *, processes: int, restarts: int = 0, shrink: bool = False) -> int:
    """Start the command so often, wait for all, and kill what is left when one has failed.

    A signal is handed on to all; where this process dies, they end.

    Args:
      args: of the command, without the program's name.
      processes: how many. Host devices (`XLA_FLAGS`) are shared among them; each takes a GPU or its part of those seen.
      restarts: how often the others start again when one is lost: killed, or given up by the watchdog. They share all
        devices anew, so that the mesh is the same, and resume from the newest checkpoint.
      shrink: a process that is lost takes its devices along, as a host does: see `shrunk`.

    Returns:
      0, or the exit code of the first that failed; 128 and the signal's number after a signal.

    Raises:
      ValueError: host devices that do not divide, or a pod around that this process belongs to.
    """
    watch = interrupts.current()
    if watch is not None:
        watch.hold(lambda: True)
    began_with = processes
    while True:
        port, token = _free_port(), {roll.TOKEN: secrets.token_hex(16)}
        envs = [
            _environment(number, processes, port=port, began_with=began_with, shrink=shrink) | token
            for number in range(processes)
        ]
        code = _start(args, envs, watch, grace_s=RESTART_GRACE_S if restarts else GRACE_S)
        is_lost = code < 0 or (code == _GIVEN_UP and processes > 1)  # one alone has no watchdog: an error of its own
        if not is_lost or not restarts or (watch is not None and watch.received is not None):
            return code if code >= 0 else 128 - code
        restarts, processes = restarts - 1, _survivors(processes, began_with)
        text = f"{processes} of the processes start again, from the newest checkpoint; restarts left: {restarts}"
        print(f"meshpar: {text}", file=sys.stderr, flush=True)


def shrunk(mesh: MeshSpec) -> MeshSpec:
    """The mesh with as much less of `data` as there are fewer processes than at first; as it is without `--shrink`.

    Each process holds as much as before. Batches stay as they are, and so does the order of the data. A mesh in which
    an axis takes what is left (-1) is returned as it is.

    Raises:
      ValueError: a data axis that cannot be so much smaller; at the start, too, for the next that is lost.
    """
    began_with, now = int(os.environ.get(BEGAN_WITH, "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not began_with or -1 in mesh.values():
        return mesh
    for processes in (now, _survivors(now, began_with)):
        if mesh["data"] * processes % began_with:
            exists = f"the mesh's axis `data` is {mesh['data']}, which {began_with // processes} does not divide"
            fix = "give the mesh a larger data axis; or leave --shrink out: those that stay then share all devices"
            raise problem("--shrink", f"go on with {processes} of {began_with} processes", exists, fix)
    return mesh.replace(data=mesh["data"] * now // began_with)


def _start(
    args: Sequence[str], envs: Sequence[Mapping[str, str]], watch: interrupts.Watch | None, *, grace_s: float
) -> int:
    with tempfile.TemporaryFile(buffering=0) as news:
        # A session each: a terminal's Ctrl-C comes here alone, and is handed on once.
        options: dict[str, Any] = {"start_new_session": True, "pass_fds": [news.fileno()]}
        own = {NEWS: str(news.fileno())}
        started = [subprocess.Popen([*COMMAND, *args], env={**env, **own}, **options) for env in envs]
        try:
            return _wait(started, watch, grace_s, news)
        finally:
            for process in started:
                process.kill()
                process.wait()


def _survivors(processes: int, began_with: int) -> int:
    """As many fewer as can share out what those of the beginning had."""
    return next((number for number in range(processes - 1, 0, -1) if began_with % number == 0), 1)


def _host_devices(env: Mapping[str, str]) -> re.Match[str] | None:
    """The flag of XLA's that says how many host devices there are, its number as the second group."""
    flags = env.get("XLA_FLAGS", "") if env.get("JAX_PLATFORMS") == "cpu" else ""
    return re.search(r"(--xla_force_host\w+_count=)(\d+)", flags)


def follow_parent() -> None:
    """End this process if its parent is gone or says that another local process is lost. Else do nothing."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    news = int(os.environ[NEWS])

    def follow() -> None:
        is_told = False
        while os.getppid() == int(parent):
            if not is_told and (text := os.pread(news, 100, 0)):
                is_told = True
                _end_without(**json.loads(text))
            time.sleep(_FOLLOW_S)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=follow, name="meshpar-parent", daemon=True).start()


def _end_without(*, process: int, code: int) -> None:
    """End this process, because another one has ended with a code.

    The parent has reported it. A process that waits for others to join can only end. After that the watchdog reports
    errors of other processes, but notices a killed process late.
    """
    from meshpar.loop import heartbeat as watchdog

    watch = watchdog.current()
    if watch is None:
        os._exit(watchdog.EXIT_CODE)
    if code < 0:
        watch.without(process, how=f"was killed ({signal.Signals(-code).name})")


def _wait(
    started: Sequence[subprocess.Popen[bytes]], watch: interrupts.Watch | None, grace_s: float, news: IO[bytes]
) -> int:
    failed: int | None = None
    kill_at = float("inf")
    handed_on = False
    while any(process.poll() is None for process in started):
        if watch is not None and watch.received is not None and not handed_on:
            handed_on = True
            for process in started:
                process.send_signal(watch.received)
        if failed is None and (failed := _first_failed(started, news)) is not None:
            kill_at = time.monotonic() + grace_s
        if time.monotonic() > kill_at:
            for process in started:
                process.kill()
        time.sleep(_POLL_S)
    return _first_failed(started, news) or 0 if failed is None else failed


def _first_failed(started: Sequence[subprocess.Popen[bytes]], news: IO[bytes]) -> int | None:
    """Return the exit code of a process that has failed, after reporting it to the user and the others; else None."""
    for number, process in enumerate(started):
        if process.poll():
            how = f"exit code {process.returncode}"
            if process.returncode < 0:
                how = f"{signal.Signals(-process.returncode).name}"
            print(f"meshpar: process {number} of {len(started)} ended with {how}", file=sys.stderr, flush=True)
            news.write(json.dumps({"process": number, "code": process.returncode}).encode())
            return process.returncode
    return None


def _environment(number: int, processes: int, *, port: int, began_with: int, shrink: bool = False) -> dict[str, str]:
    """Of one process: a launcher's variables, and its part of the devices."""
    env, parts = dict(os.environ), began_with if shrink else processes
    if around := [name for name in ("RANK", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST") if env.get(name)]:
        asked, exists = "start local processes", f"a launcher started this one ({around[0]}={env[around[0]]})"
        raise problem(f"--processes {processes}", asked, exists, f"leave --processes out, or unset {around[0]}")
    if (found := _host_devices(env)) is not None:
        count = int(found[2])
        if count % parts:
            asked, fix = f"share {count} host devices", f"say --devices {-(-count // parts) * parts}"
            raise problem(f"--processes {parts}", asked, f"{count} is not a multiple of {parts}", fix)
        env["XLA_FLAGS"] = env["XLA_FLAGS"].replace(found[0], f"{found[1]}{count // parts}")
    elif parts < began_with and "CUDA_VISIBLE_DEVICES" not in env:  # each had one GPU
        share = began_with // parts
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(number * share, (number + 1) * share)))
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": parts}
    return {
        **env,
        **({BEGAN_WITH: str(began_with)} if shrink else {}),
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
