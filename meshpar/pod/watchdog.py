"""Watchdog: the processes of a pod send heartbeats to process 0, and all end if a process is lost.

    main thread   set_step(step), busy("saving")        two assignments per step, no messages
    beat thread   sends a heartbeat and reads the verdict each 2 s; process 0 derives the verdict from all heartbeats
    guard thread  ends this process if process 0, which runs the coordination service, does not respond
    on SIGABRT    the service's client aborts this process if process 0 is gone; the handler reports the loss

Heartbeats contain the host time of each process per step, and process 0 names slow processes (see `pace`).

A process is lost if its heartbeats stop because it died or a signal stopped it, or if it stays in a step for too long
while other processes wait for it. Phases that may take longer are marked with `busy`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshpar.pod.coordination import Pod
from meshpar.pod.pace import WINDOW_STEPS, HostTimes, Pace, compare
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import out_of_memory

STALL_S = 40.0
"""Seconds without a heartbeat, or in a step that other processes have finished, until a process counts as lost."""
BUSY_S = 1800.0
"""Maximum seconds of a phase other than steps, such as compilation, saving and validation."""
READS, WAITS = "reading data", "waiting for other processes to read data"
"""Phases that may take up to `DATA_S`: the first process tokenizes text, which can take hours."""
DATA_S = 86_400.0
BEAT_S = 2.0
EXIT_CODE = 1
MISTAKE_CODE = 2
"""Exit code of all processes if a process raised a local error, which a restart would not fix."""
_SLOW_FACTOR = 5.0  # a step may take this many times as long as the longest step so far
_RUNTIME_ERRORS = ("UNKNOWN: ", "UNAVAILABLE: ", "ABORTED: ", "CANCELLED: ", "DEADLINE_EXCEEDED: ")
"""Prefixes of the errors that jax raises, sometimes as `ValueError`, if communication between processes failed."""
_GRACE_S = 10.0  # for other processes to read the verdict before process 0 and its service end
_LEAVE_S = 60.0  # for jax's barrier at exit, once all processes have agreed to end

write_failure_callbacks: list[Callable[[MeshparError], None]] = []
"""Functions called in orbax's thread as soon as a background write fails. The other processes of a pod wait for this
process's files, so they must be informed before orbax raises the error in the next `save` or `wait`."""


class FailureDetector:
    """The heartbeats of all processes as received by process 0, which decides whether a process is lost.

    Times are measured on process 0, when heartbeats arrive, so the clocks of the hosts may differ.
    """

    def __init__(self, num_processes: int, *, stall_s: float = STALL_S, busy_s: float = BUSY_S) -> None:
        self.num_processes, self.stall_s, self.busy_s = num_processes, stall_s, busy_s
        self._beats: dict[int, Mapping[str, Any]] = {}
        self._changes: dict[tuple[str, int], tuple[Any, float]] = {}
        self._failed_at: float | None = None
        self.code = EXIT_CODE
        """Exit code of all processes after a verdict."""

    def check(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> str | None:
        """Return which process is lost and why, or None, from the heartbeats that were read at the time `now`."""
        self._beats.update(beats)
        for number, beat in beats.items():
            for name, value in (("count", beat["count"]), ("phase", (beat["step"], beat["busy"]))):
                if self._changes.get((name, number), (None,))[0] != value:
                    self._changes[name, number] = (value, now)
        failed = [number for number, beat in self._beats.items() if beat["failed"]]
        self._failed_at = now if failed and self._failed_at is None else self._failed_at
        # After a failed message between devices, the process that died is reported, not the process that noticed.
        limit_s = min(self.stall_s, _GRACE_S) if failed else self.stall_s
        live = [number for number, beat in self._beats.items() if beat["busy"] != "done"]
        for number in live:
            silent_s = now - self._changes["count", number][1]
            if silent_s > limit_s:
                phase = self._beats[number]["busy"] or f"in step {self._beats[number]['step'] + 1}"
                silence = f"sent no heartbeat for {silent_s:.0f} s while {phase}"
                return f"{self._name(number)} {silence}: it died or was stopped"
        noticed = [number for number in failed if self._beats[number]["failed"]["own"]]
        if noticed or (failed and now - (self._failed_at or now) > limit_s + BEAT_S):
            number = (noticed or failed)[0]
            self.code = MISTAKE_CODE if noticed else EXIT_CODE
            return f"{self._name(number)} failed: {self._beats[number]['failed']['text']}"
        return self._stalled(live, now)

    def _stalled(self, live: list[int], now: float) -> str | None:
        if not live:
            return None
        phase_s = {number: now - self._changes["phase", number][1] for number in live}
        for number in live:
            busy = self._beats[number]["busy"]
            if busy is not None and phase_s[number] > (DATA_S if busy in (READS, WAITS) else self.busy_s):
                return f"{self._name(number)} has been {busy} for {phase_s[number]:.0f} s"
        last_step = min(self._beats[number]["step"] for number in live)
        slow = [number for number in live if self._beats[number]["step"] == last_step]
        slowest_s = max(self._beats[number]["slowest_s"] for number in live)
        since_s = min(phase_s[number] for number in slow)
        is_busy = any(self._beats[number]["busy"] is not None for number in slow)
        if is_busy or since_s <= max(self.stall_s, _SLOW_FACTOR * slowest_s):
            return None
        subject = "all processes have" if len(slow) == len(live) else f"{self._name(slow[0])} has"
        return f"{subject} been in step {last_step + 1} for {since_s:.0f} s (the longest step took {slowest_s:.1f} s)"

    def comparison(self) -> HostTimes | None:
        """Return the comparison of all processes in their newest common window, or None before the first."""
        beats = self._beats
        return compare({n: beats[n]["windows"] for n in beats}) if len(beats) == self.num_processes else None

    def slowness(self, number: int, comparison: HostTimes) -> str:
        """Return a description of process `number`, which is slow."""
        first_step, took = comparison.last_step - WINDOW_STEPS + 1, f"{comparison.slow[number]:.3g} s"
        return (
            f"{self._name(number)} slows down all processes: in steps {first_step} to {comparison.last_step}, its host "
            f"took {took} of the {comparison.step_s:.3g} s per step (median of all processes: "
            f"{comparison.median_host_s:.3g} s). Check its data loading, hooks and CPU load"
        )

    def _name(self, number: int) -> str:
        return f"process {number} of {self.num_processes} (on {self._beats[number]['host']})"


class Watchdog:
    """The watchdog of the local process. After `start`, all threads may call its methods.

    `leave` ends this process; by default it prints the verdict, writes stacks to `log` and exits.
    """

    log: Path | None = None
    """File for stack traces in the run's folder, or None if the folder does not exist yet."""

    def __init__(self, pod: Pod, *, stall_s: float = STALL_S, leave: Callable[[str], None] | None = None) -> None:
        self._pod, self.stall_s, self._leave = pod, stall_s, leave or self._dump_and_exit
        self._stderr = os.dup(2)  # file descriptor 2 is redirected while jax compiles
        self.step, self.slowest_s = 0, 0.0
        """Number of steps that the main thread has dispatched, and the longest time of a step."""
        self.phase: str | None = "starting"
        """The current phase, such as "saving", which may take longer than a step; None during steps."""
        self.pace = Pace()
        """Times of the steps of this process."""
        self.comparison: HostTimes | None = None
        """On process 0, the newest comparison of all processes."""
        self._count, self._code = 0, EXIT_CODE
        self._failed: dict[str, Any] | None = None
        self._agreed: int | None = None
        self._detector = FailureDetector(pod.num_processes, stall_s=stall_s) if pod.process_id == 0 else None
        self._response_at, self._coordinator_responds = time.monotonic(), True
        self._ended, self._leaving = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that send heartbeats and watch process 0."""
        faulthandler.enable(file=self._stderr)
        if self._detector is None and threading.current_thread() is threading.main_thread():
            # The service's client aborts if process 0 is gone. A Python signal handler would run after the abort.
            self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborts)
            ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)
        self._beat()
        for run in (self._run, *(() if self._detector else (self._guard,))):
            self._threads.append(threading.Thread(target=run, name="meshpar-watchdog", daemon=True))
            self._threads[-1].start()

    def _aborts(self, number: int) -> None:
        deadline = time.monotonic() + BEAT_S  # the sockets of a dying process do not close at the same time
        while time.monotonic() < deadline:
            if self._pod.is_coordinator_gone():
                self._end_without_coordinator()
            time.sleep(BEAT_S / 10)
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)

    @contextlib.contextmanager
    def busy(self, phase: str) -> Iterator[None]:
        """Set the phase within a block."""
        previous, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = previous

    def failed(self, error: BaseException) -> None:
        """Report that this process will end due to an error. Only the first error counts."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self._failed = self._failed or {"text": text, "own": is_own(error)}
        with contextlib.suppress(Exception):
            self._beat()

    def say(self, text: str) -> None:
        """Print a line on the original standard error."""
        with contextlib.suppress(OSError):  # a closed pipe, or a full disk
            os.write(self._stderr, f"\nmeshpar: {text}\n".encode())

    def wait_to_leave(self) -> None:
        """Block, after `failed`, until the verdict ends this process. Return after a timeout."""
        self._ended.wait(self.stall_s + 3 * _GRACE_S)

    def interrupted(self, number: int) -> None:
        """End all processes because a signal ends this process before training starts."""
        if self._agreed is not None:  # all processes are ending, and jax would abort the slower processes
            time.sleep(_GRACE_S)
            return
        self._pod.put(f"interrupted/{self._pod.process_id}", number)
        self._leave_pod()

    def done(self, code: int = 0) -> None:
        """Stop watching, after all processes have finished and agreed on an exit code.

        The threads end here. Python aborts if it finalizes while a thread is inside the service's client.
        """
        self._agreed, self.phase = code, "done"
        with contextlib.suppress(Exception):
            self._beat()
        self._ended.set()
        for thread in self._threads:
            thread.join(_GRACE_S)

    def leave_in_time(self, code: int) -> None:
        """Start a timer that ends the process if a lost process makes jax wait in its barrier at exit."""
        timer = threading.Timer(
            _LEAVE_S + (_GRACE_S if self._detector else 0.0), self._exit, (code,)
        )  # process 0 is last
        timer.daemon = True
        timer.start()

    def _beat(self) -> None:
        self._count += 1
        beat = {"count": self._count, "host": socket.gethostname(), "step": self.step, "busy": self.phase}
        beat |= {"slowest_s": self.slowest_s, "failed": self._failed, "windows": self.pace.windows}
        self._pod.put(f"beat/{self._pod.process_id}", beat)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._beat()
                for process, number in self._pod.children("interrupted").items():
                    self._interrupt(process, number)
                verdict = self._read_verdict()
                self._response_at = time.monotonic()
            except Exception:
                if self.phase == "done":
                    return
                if self._detector is None and self._pod.is_coordinator_gone():
                    self._end_without_coordinator()
                    return
                continue  # `_guard` ends the process if this persists
            if verdict is not None:
                self._end(verdict)
                return

    def _read_verdict(self) -> str | None:
        if self._detector is None:
            received = self._pod.children("verdict")
            self._code = received.get("code", EXIT_CODE)
            return received.get("text")
        beats = {int(number): beat for number, beat in self._pod.children("beat").items()}
        verdict = self._detector.check(beats, time.monotonic())
        if verdict is not None:
            self._code = self._detector.code
            self._pod.put("verdict/code", self._code)  # first, because the other processes end when they read the text
            self._pod.put("verdict/text", verdict)
        elif (new := self._detector.comparison()) is not None and new != self.comparison:
            previous, self.comparison = self.comparison, new
            for number in sorted(new.slow.keys() - (previous.slow.keys() if previous else set())):
                self.say(self._detector.slowness(number, new))
        return verdict

    def _guard(self) -> None:
        while not self._ended.wait(BEAT_S):
            silent_s = time.monotonic() - self._response_at
            if self.phase == "done":
                return
            if silent_s > self.stall_s:
                name = f"process 0 of {self._pod.num_processes}, the coordinator,"
                self._coordinator_responds = False  # further calls to the service would hang
                self._end(f"{name} has not responded for {silent_s:.0f} s: it died or was stopped")
                return

    def _interrupt(self, process: str, number: int) -> None:
        if int(process) == self._pod.process_id or self.phase == "done":
            return
        self.say(f"interrupted ({signal.Signals(number).name} in process {process} of {self._pod.num_processes})")
        self._leave_pod()
        self._ended.set()
        os._exit(128 + number)

    def _leave_pod(self) -> None:
        """Announce that this process ends. Process 0, which runs the service, ends after all announcements."""
        with contextlib.suppress(Exception):
            self._pod.put(f"left/{self._pod.process_id}", True)
        if self._detector is None:
            return
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and len(self._pod.children("left")) < self._pod.num_processes:
                time.sleep(BEAT_S / 10)
        time.sleep(BEAT_S / 10)  # the last process ends shortly after its announcement

    def _end_without_coordinator(self) -> None:
        self._coordinator_responds = False
        name = f"process 0 of {self._pod.num_processes}, the coordinator at {self._pod.coordinator},"
        self._end(f"{name} is gone: it died or was killed")

    def _end(self, verdict: str) -> None:
        if not self._leaving.acquire(blocking=False):
            self._ended.wait()  # a different thread ends this process
            return
        self._leave(f"{verdict}. All processes end. Saved checkpoints are intact; run the same command to continue.")
        self._ended.set()

    def _dump_and_exit(self, text: str) -> None:
        is_own = self._failed is not None and self._failed["own"]  # then the error has been printed
        code = MISTAKE_CODE if is_own else self._code
        if self._agreed is not None:  # all processes had finished, and a signal ended a process before its exit
            code = self._agreed
        elif not is_own:
            with contextlib.suppress(OSError):
                self.say(text)
                if code != MISTAKE_CODE:  # a mistake is explained by its message, not by the stacks of this process
                    self._write_stacks()
        if self._coordinator_responds:
            self._leave_pod()  # last, because the clients of remaining processes abort them when process 0 ends
        self._exit(code)

    def _write_stacks(self) -> None:
        """Write the error and the stacks of all threads to `log`, or to a temporary file."""
        try:
            path = str(self.log)
            file = os.open(self.log or "", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError:
            file, path = tempfile.mkstemp(prefix=f"meshpar-process-{self._pod.process_id}-", suffix=".log")
        if self._failed is not None:
            os.write(file, f"{self._failed['text']}\n\n".encode())
        faulthandler.dump_traceback(file=file, all_threads=True)
        os.close(file)
        os.write(self._stderr, f"meshpar: the stacks of process {self._pod.process_id} are in {path}\n".encode())

    def _exit(self, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def is_own(error: BaseException | None) -> bool:
    """Return whether an error was caused by this process, and not by failed communication between processes."""
    while error is not None:
        if out_of_memory(error) is not None:
            return True
        if isinstance(error, jax.errors.JaxRuntimeError) or str(error).startswith(_RUNTIME_ERRORS):
            return False
        error = error.__cause__ or error.__context__
    return True


_watchdog: Watchdog | None = None


def watch(pod: Pod | None, *, stall_s: float = STALL_S) -> Watchdog | None:
    """Start the watchdog of this process, if it is not running; return None for a single process."""
    global _watchdog
    if pod is not None and _watchdog is None:
        _watchdog = Watchdog(pod, stall_s=stall_s)
        _watchdog.start()
    return _watchdog


def current() -> Watchdog | None:
    """Return the watchdog of this process, or None."""
    return _watchdog


def slow_processes() -> dict[str, Any]:
    """Return values for a line of metrics.jsonl: the host times of slow processes, or nothing if there are none."""
    newest = None if _watchdog is None else _watchdog.comparison
    if newest is None or not newest.slow:
        return {}
    slow = {str(number): round(seconds, 6) for number, seconds in newest.slow.items()}
    return {"slow_processes": slow, "median_host_s": round(newest.median_host_s, 6)}


def busy(phase: str) -> contextlib.AbstractContextManager[None]:
    """Set the phase of the watchdog, such as "saving", within a block. Without a watchdog, it has no effect."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.busy(phase)
