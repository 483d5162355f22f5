"""Option `--processes N`: run the command as N local processes of a pod, to try multi-host runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from meshpar.pod import signals as interrupts
from meshpar.sharding.errors import check_divides, problem

PARENT = "MESHPAR_PARENT"
"""Environment variable of a local process with the process id of the parent."""
GRACE_S = 10.0
"""Seconds that the other processes have to end after a process failed, before they are killed."""
RESTART_GRACE_S = 2.0
"""Value of `GRACE_S` before a restart. Waiting longer is useless: without the lost process, no process can save."""
COMMAND = (sys.executable, "-m", "meshpar")
_GIVEN_UP = 1  # exit code of the watchdog after the loss of a process
_POLL_S = 0.1
_FOLLOW_S = 0.25


def run(args: Sequence[str], *, processes: int, restarts: int = 0) -> int:
    """Run a command as `processes` processes and wait until they end. If a process fails, all are killed.

    The host devices of `XLA_FLAGS`, or the visible GPUs, are divided among the processes. Signals are passed on to all
    processes. If this process dies, all of them end.

    Args:
      args: arguments of the command, without the name of the program.
      processes: number of processes.
      restarts: maximum number of restarts. The command is restarted if a process was killed, or ended by the watchdog.
        It resumes from the newest checkpoint with fewer processes, which share all devices, so the mesh is the same.

    Returns:
      0, the exit code of the first process that failed, or 128 plus the number of the signal.
    """
    watch = interrupts.current()
    if watch is not None:
        watch.hold(lambda: True)
    began_with = processes
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        envs = [_environment(number, processes, port=port, began_with=began_with) for number in range(processes)]
        # Each process has its own session, so that only this process receives Ctrl-C, and passes it on once.
        started = [subprocess.Popen([*COMMAND, *args], env=env, start_new_session=True) for env in envs]
        try:
            code = _wait(started, watch, RESTART_GRACE_S if restarts else GRACE_S)
        finally:
            for process in started:
                process.kill()
                process.wait()
        # A single process has no watchdog, so its exit code 1 is an error.
        is_lost = code < 0 or (code == _GIVEN_UP and processes > 1)
        if not is_lost or not restarts or (watch is not None and watch.received is not None):
            return code if code >= 0 else 128 - code
        restarts, processes = restarts - 1, _survivors(processes, began_with)
        text = f"restarting with {processes} processes from the newest checkpoint; restarts left: {restarts}"
        print(f"meshpar: {text}", file=sys.stderr, flush=True)


def _survivors(processes: int, began_with: int) -> int:
    """Return the largest divisor of `began_with` below `processes`."""
    return next((number for number in range(processes - 1, 0, -1) if began_with % number == 0), 1)


def follow_parent() -> None:
    """Start a thread that ends this process when the parent process ends."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def follow() -> None:
        while os.getppid() == int(parent):
            time.sleep(_FOLLOW_S)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=follow, name="meshpar-parent", daemon=True).start()


def _wait(started: Sequence[subprocess.Popen[bytes]], watch: interrupts.Watch | None, grace_s: float) -> int:
    """Wait until all processes have ended. Return the exit code of the first that failed, or 0."""
    failed: int | None = None
    kill_at = float("inf")
    is_passed_on = False
    while any(process.poll() is None for process in started):
        if watch is not None and watch.received is not None and not is_passed_on:
            is_passed_on = True
            for process in started:
                process.send_signal(watch.received)
        if failed is None and (failed := _first_failed(started)) is not None:
            kill_at = time.monotonic() + grace_s
        if time.monotonic() > kill_at:
            for process in started:
                process.kill()
        time.sleep(_POLL_S)
    return _first_failed(started) or 0 if failed is None else failed


def _first_failed(started: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the exit code of a failed process, or None. Print the failure."""
    for number, process in enumerate(started):
        if code := process.poll():
            cause = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            print(f"meshpar: process {number} of {len(started)} ended with {cause}", file=sys.stderr, flush=True)
            return code
    return None


def _environment(number: int, processes: int, *, port: int, began_with: int) -> dict[str, str]:
    """Return the environment of local process `number`: variables as from a launcher, and its share of the devices."""
    env = dict(os.environ)
    if around := [name for name in ("RANK", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST") if env.get(name)]:
        reason, fix = f"a launcher started this process ({around[0]}={env[around[0]]})", f"unset {around[0]}"
        raise problem(f"--processes {processes}", "start local processes", reason, fix, code="conflict")
    flags = env.get("XLA_FLAGS", "") if env.get("JAX_PLATFORMS") == "cpu" else ""
    if match := re.search(r"(--xla_force_host\w+_count=)(\d+)", flags):
        count = int(match[2])
        fix = f"use --devices {-(-count // processes) * processes}"
        check_divides(f"--processes {processes}", f"share {count} host devices", count, processes, fix)
        env["XLA_FLAGS"] = flags.replace(match[0], f"{match[1]}{count // processes}")
    elif processes < began_with and "CUDA_VISIBLE_DEVICES" not in env:  # a GPU per process at the start
        share = began_with // processes
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(number * share, (number + 1) * share)))
    place: dict[str, object] = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, PARENT: os.getpid()}
    place |= {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}  # by default jax listens on all interfaces
    return env | {name: str(value) for name, value in place.items()}
