"""The watchdog: every process of a pod tells the others how far it is, and all end when one is lost.

    main thread   entered(step), busy("saves")          two assignments a step, no message
    talker        every two seconds: put(beat), read the verdict; process 0 reads all beats and gives the verdict
    guard         ends this process when process 0, where the service lives, does not answer any more
    on SIGABRT    the service's client aborts this process when process 0 is gone: name process 0 first, then end

A process is lost when its beats stop (it died, or was stopped by a signal), or when they go on while it stays behind
the others in a step for too long. What may take long and is no stall says so: `busy`.
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

from meshpar.loop.coordination import Pod

STALL_S = 40.0
"""Seconds without a beat, or in one step behind the others, after which a process is taken for lost."""
BUSY_S = 1800.0
"""Seconds that what is no step may take: compiling, saving, validating."""
READS, WAITS = "reads its data", "waits for others that read theirs"
"""What a process does that may take as long as `DATA_S`: text is tokenized once, in hours where there is much."""
DATA_S = 86_400.0
BEAT_S = 2.0
EXIT_CODE = 1
MISTAKE_CODE = 2
"""Of all processes, where one of them failed by an error of its own: starting again would meet it again."""
"""Exit code of a process that ended by its own mistake, as of commands elsewhere."""
_SLOWEST = 5.0  # a step may take so many times the longest before it
_OF_OTHERS = ("UNKNOWN: ", "UNAVAILABLE: ", "ABORTED: ", "CANCELLED: ", "DEADLINE_EXCEEDED: ")
"""How errors begin that jax raises, as a ValueError some, where a message to another process failed."""
_GRACE_S = 10.0  # for the others to read the verdict before the service ends with process 0
_LEAVE_S = 60.0  # for all to go the way on which jax has them wait for each other, once they have agreed to


class Judge:
    """Process 0's account of all: what each told last, and since when it tells the same.

    Clocks of hosts need not agree: times are taken here, where beats arrive.
    """

    def __init__(self, num_processes: int, *, stall_s: float = STALL_S, busy_s: float = BUSY_S) -> None:
        self.num_processes, self.stall_s, self.busy_s = num_processes, stall_s, busy_s
        self._beats: dict[int, tuple[Any, float]] = {}
        self._places: dict[int, tuple[Any, float]] = {}
        self._told: dict[int, Mapping[str, Any]] = {}
        self._failed_at: float | None = None
        self.code = EXIT_CODE
        """What all end with after a verdict."""

    def look(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> str | None:
        """Who is lost, by the beats read at `now` (seconds, any clock that only goes forward); None while all is well.

        Args:
          beats: by process: `count`, `host`, `step`, `busy` (what it does, None in a step), `slowest_s`, `failed`.
        """
        for number, beat in beats.items():
            self._told[number] = beat
            _since(self._beats, number, beat["count"], now)
            _since(self._places, number, (beat["step"], beat["busy"]), now)
        failed = [number for number, beat in self._told.items() if beat["failed"]]
        self._failed_at = now if failed and self._failed_at is None else self._failed_at
        # Where a message between devices failed, the process that died is named, not the one that noticed.
        limit_s = min(self.stall_s, _GRACE_S) if failed else self.stall_s
        live = [number for number, beat in self._told.items() if beat["busy"] != "done"]
        silent = [number for number in live if now - self._beats[number][1] > limit_s]
        if silent:
            return self._silent(silent[0], now)
        noticed = [number for number in failed if self._told[number]["failed"]["own"]]
        if noticed or (failed and now - (self._failed_at or now) > limit_s + BEAT_S):
            number = (noticed or failed)[0]
            self.code = MISTAKE_CODE if noticed else EXIT_CODE
            return f"{self._name(number)} ended: {self._told[number]['failed']['text']}"
        return self._stalled(live, now)

    def _silent(self, number: int, now: float) -> str:
        return (
            f"{self._name(number)} has not been heard of for {now - self._beats[number][1]:.0f} s, since it "
            f"{self._doing(number)}: it died, or it was stopped"
        )

    def _stalled(self, live: list[int], now: float) -> str | None:
        if not live:
            return None
        least = min(self._told[number]["step"] for number in live)
        behind = [number for number in live if self._told[number]["step"] == least]
        slowest = max(self._told[number]["slowest_s"] for number in live)
        for number in live:
            busy, since_s = self._told[number]["busy"], now - self._places[number][1]
            if busy is not None and since_s > (DATA_S if busy in (READS, WAITS) else self.busy_s):
                return f"{self._name(number)} {self._doing(number)} for {since_s:.0f} s"
        if any(self._told[number]["busy"] is not None for number in behind):
            return None
        since_s = min(now - self._places[number][1] for number in behind)
        if since_s <= max(self.stall_s, _SLOWEST * slowest):
            return None
        whom = "all processes stay" if len(behind) == len(live) else f"{self._name(behind[0])} stays"
        return f"{whom} in step {least + 1} for {since_s:.0f} s (the longest step took {slowest:.1f} s)"

    def _name(self, number: int) -> str:
        return f"process {number} of {self.num_processes} (on {self._told[number]['host']})"

    def _doing(self, number: int) -> str:
        beat = self._told[number]
        return f"was in step {beat['step'] + 1}" if beat["busy"] is None else f"{beat['busy']}"


def _since(kept: dict[int, tuple[Any, float]], number: int, value: Any, now: float) -> None:
    if number not in kept or kept[number][0] != value:
        kept[number] = (value, now)


class Watchdog:
    """This process's part. One for a process: `start`, then `entered`, `busy` and `failed` from anywhere.

    Args:
      pod: whose processes watch each other.
      stall_s: seconds after which a process is lost.
      leave: how this process ends; by default it says why, dumps stacks into `log` and exits.
    """

    log: Path | None = None
    """The file for stacks, in the run folder; None before there is one."""

    def __init__(self, pod: Pod, *, stall_s: float = STALL_S, leave: Callable[[str], None] | None = None) -> None:
        self._pod, self.stall_s, self._leave = pod, stall_s, leave or self._dump_and_exit
        self._stderr = os.dup(2)  # while jax compiles, what is written to 2 is caught
        self._place: tuple[int, str | None] = (0, "starts")
        self._slowest_s, self._count = 0.0, 0
        self._failed: dict[str, Any] | None = None
        self._heard_at = time.monotonic()
        self._judge = Judge(pod.num_processes, stall_s=stall_s) if pod.process_id == 0 else None
        self._code = EXIT_CODE
        self._agreed: int | None = None
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answers = True
        self._num_gone = 0
        self._leaving = threading.Lock()
        self._native: int | None = None
        self._native_seen = self._native_shown = 0
        self._on_abort: Any = None

    def start(self) -> None:
        """Begin to tell and to watch, in threads of their own."""
        faulthandler.enable(file=self._stderr)  # the service's own client aborts where process 0 is gone
        self._beat()
        for run in (self._talk, *(() if self._judge else (self._guard,))):
            self._threads.append(threading.Thread(target=run, name="meshpar-watchdog", daemon=True))
            self._threads[-1].start()

    def keep_native_text(self) -> None:
        """Show what C++ writes on standard error a few seconds late: an abort can be explained before its stack.

        Python's own text is not delayed.
        """
        sys.stderr.flush()
        with tempfile.TemporaryFile() as file:
            self._native = os.dup(file.fileno())
        os.dup2(self._native, 2)
        shown = os.dup(self._stderr)
        sys.stderr = open(shown, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")  # noqa: SIM115
        # A handler of Python's would run after the abort.
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborts)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

    def _aborts(self, number: int) -> None:
        deadline = time.monotonic() + BEAT_S  # a process that dies closes its sockets one after another
        while self._judge is None and time.monotonic() < deadline:
            if self._pod.is_coordinator_gone():
                self._go_without_coordinator()
            time.sleep(BEAT_S / 10)
        self.show_native_text()
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)

    def show_native_text(self, *, late: bool = False) -> None:
        """Show what C++ has written; `late`: only what it had written at the call before."""
        if self._native is not None:
            size = os.fstat(self._native).st_size
            end = self._native_seen if late else size
            with contextlib.suppress(OSError):
                os.write(self._stderr, os.pread(self._native, end - self._native_shown, self._native_shown))
            self._native_seen, self._native_shown = size, end

    def entered(self, step: int) -> None:
        """The main thread has dispatched so many steps."""
        self._place = (step, self._place[1])

    def took(self, seconds: float) -> None:
        """A step took so long; the next may take a few times that before it counts as a stall."""
        self._slowest_s = max(self._slowest_s, seconds)

    def set_busy(self, what: str | None) -> None:
        """What the process does that is no step and may take long, as "saves"; None: steps again."""
        self._place = (self._place[0], what)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A block that is no step."""
        before = self._place[1]
        self.set_busy(what)
        try:
            yield
        finally:
            self.set_busy(before)

    def failed(self, error: BaseException) -> None:
        """Tell the others that this process is about to end, and why. Only the first error counts.

        Where it is the runtime's, a message between devices may have failed: then another process may have died.
        """
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self._failed = self._failed or {"text": text, "own": is_own(error)}
        with contextlib.suppress(Exception):
            self._beat()

    def say(self, text: str) -> None:
        """On the standard error that the process began with."""
        with contextlib.suppress(OSError):  # a closed pipe, or a full disk
            os.write(self._stderr, f"\nmeshpar: {text}\n".encode())

    def wait_to_leave(self) -> None:
        """After `failed`: wait for the verdict, with which this process ends; returns when none comes."""
        self._ended.wait(self.stall_s + 3 * _GRACE_S)

    def interrupted(self, number: int) -> None:
        """Tell the others that a signal of this number ends this process before anything is trained: they end, too."""
        if self._agreed is not None:  # all are leaving: one that went before the others would have jax abort them
            time.sleep(_GRACE_S)
            return
        self._pod.put(f"interrupted/{self._pod.process_id}", number)
        self._see_all_leave()

    def done(self, code: int = 0) -> None:
        """The work is done, and all have agreed on the code they end with: beats that stop now mean nothing.

        From here on no thread of this one asks the store: Python ends threads as it finalizes, and where one is inside
        the service's client that aborts the process.
        """
        self._agreed = code
        self.set_busy("done")
        with contextlib.suppress(Exception):
            self._beat()
        self._ended.set()
        for thread in self._threads:
            thread.join(_GRACE_S)

    def leave_in_time(self, code: int) -> None:
        """After `done`: jax has all wait for each other at exit. Where one is lost on its way there, end without it."""
        late = threading.Timer(_LEAVE_S + (_GRACE_S if self._judge else 0.0), self._exit, (code,))  # process 0 last
        late.daemon = True
        late.start()

    def _beat(self) -> None:
        self._count += 1
        step, busy = self._place
        beat = {
            "count": self._count,
            "host": socket.gethostname(),
            "step": step,
            "busy": busy,
            "slowest_s": self._slowest_s,
            "failed": self._failed,
        }
        self._pod.put(f"beat/{self._pod.process_id}", beat)

    def _talk(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.show_native_text(late=True)
            try:
                self._beat()
                for who, number in self._pod.below("interrupted").items():
                    self._interrupt(who, number)
                verdict = self._read_verdict()
                self._heard_at = time.monotonic()
            except Exception:
                if self._place[1] == "done":
                    return
                if self._judge is None and self._pod.is_coordinator_gone():
                    self._go_without_coordinator()
                    return
                continue  # the guard counts the seconds
            if verdict is not None:
                self._go(verdict)
                return

    def _read_verdict(self) -> str | None:
        if self._judge is None:
            told = self._pod.below("verdict")
            self._code = told.get("code", EXIT_CODE)
            return told.get("text")
        beats = {int(number): beat for number, beat in self._pod.below("beat").items()}
        verdict = self._judge.look(beats, time.monotonic())
        if verdict is not None:
            self._code = self._judge.code
            self._pod.put("verdict/code", self._code)  # before the text, at which the others leave
            self._pod.put("verdict/text", verdict)
        return verdict

    def _guard(self) -> None:
        while not self._ended.wait(BEAT_S):
            silent_s = time.monotonic() - self._heard_at
            if self._place[1] == "done":
                return
            if silent_s > self.stall_s:
                name = f"process 0 of {self._pod.num_processes}, which coordinates,"
                self._answers = False  # nothing is told any more: a message to it would not return
                self._go(f"{name} has not answered for {silent_s:.0f} s: it died, or it was stopped")
                return

    def _interrupt(self, who: str, number: int) -> None:
        if int(who) == self._pod.process_id or self._place[1] == "done":
            return
        name = f"process {who} of {self._pod.num_processes}"
        self.say(f"interrupted ({signal.Signals(number).name} in {name})")
        self._see_all_leave()
        self._ended.set()
        os._exit(128 + number)

    def _see_all_leave(self) -> None:
        """Say that this process leaves; where the service lives, wait until all have said so."""
        with contextlib.suppress(Exception):
            self._pod.put(f"left/{self._pod.process_id}", True)
        if self._judge is not None:
            self._wait_for_the_others()

    def _go_without_coordinator(self) -> None:
        self._answers = False
        name = f"process 0 of {self._pod.num_processes}, the coordinator at {self._pod.coordinator},"
        self._go(f"{name} is gone: it died, or it was killed")

    def without(self, number: int, *, how: str) -> None:
        """End this process, because process `number` is known to be gone."""
        if number == 0:
            self._go_without_coordinator()
        else:
            self._num_gone = 1
            self._go(f"process {number} of {self._pod.num_processes} {how}")

    def _go(self, verdict: str) -> None:
        if not self._leaving.acquire(blocking=False):
            self._ended.wait()  # another thread ends this process
            return
        self._leave(f"{verdict}. All processes end; what was saved is whole, and the same command goes on from there.")
        self._ended.set()

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(Exception):
            num_live = self._pod.num_processes - self._num_gone
            while time.monotonic() < deadline and len(self._pod.below("left")) < num_live:
                time.sleep(BEAT_S / 10)
        time.sleep(BEAT_S / 10)  # the last has said so, and has yet to leave

    def _dump_and_exit(self, text: str) -> None:
        own = self._failed is not None and self._failed["own"]  # it has said so itself
        code = MISTAKE_CODE if own else self._code
        if self._agreed is not None:  # the one that is lost had agreed, too: a signal ended it on its way out
            code = self._agreed
        elif not own:
            with contextlib.suppress(OSError):
                self.say(text)
                if code != MISTAKE_CODE:  # which is told, and in none of this process's stacks
                    self._write_stacks()
        if self._answers:
            self._see_all_leave()  # when all is said: the client of one that is still here aborts it without process 0
        self._exit(code)

    def _write_stacks(self) -> None:
        """Write the local error, the stacks of all threads and the last C++ messages to a file, and report its name.

        If there is no run folder, the file is a temporary one.
        """
        try:
            path = str(self.log)
            to = os.open(self.log or "", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        except OSError:
            to, path = tempfile.mkstemp(prefix=f"meshpar-process-{self._pod.process_id}-", suffix=".log")
        if self._failed is not None:
            os.write(to, f"{self._failed['text']}\n\n".encode())
        faulthandler.dump_traceback(file=to, all_threads=True)
        if self._native is not None:
            size = os.fstat(self._native).st_size - self._native_shown
            os.write(to, os.pread(self._native, size, self._native_shown))
        os.close(to)
        os.write(self._stderr, f"meshpar: the stacks of process {self._pod.process_id} are in {path}\n".encode())

    def _exit(self, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def is_own(error: BaseException | None) -> bool:
    """Whether a process failed by itself: behind a save that failed, say, no message to another process did."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or str(error).startswith(_OF_OTHERS):
            return False
        error = error.__cause__ or error.__context__
    return True


_watchdog: Watchdog | None = None


def watch(pod: Pod | None, *, stall_s: float = STALL_S) -> Watchdog | None:
    """Start this process's watchdog, once; None for a process on its own."""
    global _watchdog
    if pod is not None and _watchdog is None:
        _watchdog = Watchdog(pod, stall_s=stall_s)
        _watchdog.start()
    return _watchdog


def current() -> Watchdog | None:
    """This process's watchdog; None where none was started."""
    return _watchdog


def busy(what: str) -> contextlib.AbstractContextManager[None]:
    """A block that is no step, as "saves"; nothing where no watchdog was started."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.busy(what)
