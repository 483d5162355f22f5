"""Ctrl-C and SIGTERM, obeyed at any moment.

    nothing to save    a command ends at the first signal
    after `hold`       the first is noted, and whoever holds saves and stops; a second ends the process at once

Nothing is raised. Python runs a signal's handler between two bytecodes of the main thread: never while that is inside a
compilation; and what the handler raises inside a callback or a finalizer is printed and lost. The number of the signal,
however, is written to the wakeup descriptor at once, and a thread reads it there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAREWELL_S = 15.0
"""Seconds that telling others may take."""
GRACE_S = 0.5
"""Seconds after the first signal in which another counts as the same: schedulers often send two."""
scratch: set[Path] = set()
"""Folders that are worth nothing before they are whole: removed where a signal ends the process."""
heirs: set[Callable[[], object]] = set()
"""Each ends a process that would speak after this one's end: called where a signal ends this one, as was asked."""


class Watch:
    """Listens for signals from now on, in a thread of its own; to be made in the main thread."""

    def __init__(self, *, signals: Sequence[signal.Signals] = SIGNALS, command: bool = False) -> None:
        self.received: int | None = None
        """The first signal that arrived, None before."""
        self.command = command
        self.farewell: Callable[[int], object] | None = None
        """Called with the signal's number before a command ends at once: what tells the others of a pod."""
        self._has_work: Callable[[], bool] | None = None
        self._grace_s = GRACE_S
        # A command's own standard error: while jax starts or compiles, what is written to 2 is caught.
        self._stderr = os.dup(2) if command else 2
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in signals}
        self._thread = threading.Thread(target=self._listen, name="meshpar-signals", daemon=True)
        self._thread.start()

    def hold(self, has_work: Callable[[], bool], *, grace_s: float = GRACE_S) -> None:
        """From now on the first signal is only noted, in `received`: the caller looks there, saves and stops.

        A second one ends the process at once. In a session of Python or IPython, whose variables would be lost, it
        raises KeyboardInterrupt.

        Args:
          has_work: whether there is anything to save; a command without ends at the first signal nevertheless.
          grace_s: seconds after the first signal in which another counts as the same.
        """
        for number in self._before:  # others may have put theirs in its place meanwhile, jax.distributed for one
            signal.signal(number, self._note)
        self._grace_s, self._has_work = grace_s, has_work

    def release(self) -> None:
        """All is saved. A command is watched further; elsewhere handlers are as they were before."""
        if self.command:
            self._has_work = None
        else:
            self.close()

    def close(self) -> None:
        """Put the handlers back; what has arrived until then is in `received`."""
        self._disarm()
        os.close(self._write_fd)
        self._thread.join()  # when it has read all there was
        os.close(self._read_fd)
        if self.command:
            os.close(self._stderr)

    def _disarm(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None and _is_session() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

    def _listen(self) -> None:
        first_at = None
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number not in self._before:
                    continue
                has_work = self._has_work
                if self.command and (has_work is None or not has_work()):
                    self._leave(number, "interrupted")
                elif first_at is None:
                    first_at = time.monotonic()
                    self._say(f"{signal.Signals(number).name}: stopping after this step; once more to exit at once")
                elif time.monotonic() - first_at > self._grace_s and not _is_session():
                    self._leave(number, f"{signal.Signals(number).name}: exiting at once")

    def _leave(self, number: int, text: str) -> None:
        self._say(text)
        for folder in list(scratch):
            shutil.rmtree(folder, ignore_errors=True)
        for end in list(heirs):
            end()
        if self.farewell is not None:
            telling = threading.Thread(target=self.farewell, args=(number,), daemon=True)
            telling.start()
            telling.join(FAREWELL_S)
        os._exit(128 + number)

    def _say(self, text: str) -> None:
        """One line on standard error, past Python's buffers; a progress bar may have hidden the cursor."""
        show_cursor = "\x1b[?25h" if os.isatty(self._stderr) else ""
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{show_cursor}\nmeshpar: {text}\n".encode())


def current() -> Watch | None:
    """The watch whose handler for Ctrl-C is in place."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return owner if isinstance(owner, Watch) else None


def standard_error() -> int:
    """Return the file number of the standard error that a command began with; 2 elsewhere."""
    watch = current()
    return 2 if watch is None else watch._stderr


def exit_code() -> int:
    """Of a command that a signal has ended, its own or another process's of the pod: 128 and the signal's number."""
    watch = current()
    return 128 + ((watch and watch.received) or signal.SIGINT)


def _is_session() -> bool:
    return hasattr(sys, "ps1")


def _forget() -> None:
    """A forked child has no thread that listens, and must not write into its parent's pipe."""
    if watch := current():
        watch._disarm()


os.register_at_fork(after_in_child=_forget)
