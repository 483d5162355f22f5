"""Immediate handling of Ctrl-C and SIGTERM, at any moment.

    nothing to save    the first signal ends the command
    after `hold`       the first signal is recorded, and the caller saves and stops; a second signal ends the process

The handlers raise no exception. Python runs a handler between two bytecodes of the main thread, so it would be delayed
by a compilation, and an exception in a callback or finalizer would be printed and lost. Instead, a thread reads the
numbers of the signals from the wakeup file descriptor, to which Python writes them immediately.
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
"""Maximum seconds for the call of `Watch.on_exit`."""
GRACE_S = 0.5
"""Seconds after the first signal in which a second signal is ignored, because schedulers often send it twice."""
scratch: set[Path] = set()
"""Incomplete folders, which are removed if a signal ends the process."""
child_cleanups: set[Callable[[], object]] = set()
"""Functions that end child processes. They are called if a signal ends the process, so that no child prints later."""


class Watch:
    """Signal handlers and a thread that reads the signals. Create it in the main thread.

    If the process is a command (`command=True`), a signal ends it immediately unless there is work to save.
    """

    def __init__(self, *, signals: Sequence[signal.Signals] = SIGNALS, command: bool = False) -> None:
        self.received: int | None = None
        """The first signal received, or None."""
        self.command = command
        self.on_exit: Callable[[int], object] | None = None
        """Called with the signal's number before a command ends immediately, to inform the processes of a pod."""
        self._has_work: Callable[[], bool] | None = None
        self._grace_s = GRACE_S
        # File descriptor 2 is redirected while jax starts or compiles.
        self._stderr = os.dup(2) if command else 2
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in signals}
        self._thread = threading.Thread(target=self._listen, name="meshpar-signals", daemon=True)
        self._thread.start()

    def hold(self, has_work: Callable[[], bool], *, grace_s: float = GRACE_S) -> None:
        """Record the first signal in `received`, where the caller checks for it, saves and stops.

        A second signal ends the process immediately. In an interactive session, whose variables would be lost, it
        raises KeyboardInterrupt instead. If `has_work()` is False, the first signal ends a command.
        """
        for number in self._previous:  # libraries such as jax.distributed may have replaced the handlers
            signal.signal(number, self._handle)
        self._grace_s, self._has_work = grace_s, has_work

    def release(self) -> None:
        """Stop holding signals back, after the save. If no command of meshpar runs, restore the previous handlers."""
        if self.command:
            self._has_work = None
        else:
            self.close()

    def close(self) -> None:
        """Restore the previous handlers. `received` includes all signals until then."""
        self._restore()
        os.close(self._write_fd)
        self._thread.join()  # it reads the remaining signals first
        os.close(self._read_fd)
        if self.command:
            os.close(self._stderr)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None and _is_interactive() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

    def _listen(self) -> None:
        first_at = None
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number not in self._previous:
                    continue
                has_work = self._has_work
                if self.command and (has_work is None or not has_work()):
                    self._exit(number, "interrupted")
                elif first_at is None:
                    first_at = time.monotonic()
                    name = signal.Signals(number).name
                    self._print(f"{name}: stopping after this step; send it again to exit immediately")
                elif time.monotonic() - first_at > self._grace_s and not _is_interactive():
                    self._exit(number, f"{signal.Signals(number).name}: exiting at once")

    def _exit(self, number: int, text: str) -> None:
        self._print(text)
        for folder in list(scratch):
            shutil.rmtree(folder, ignore_errors=True)
        for end in list(child_cleanups):
            end()
        if self.on_exit is not None:
            thread = threading.Thread(target=self.on_exit, args=(number,), daemon=True)
            thread.start()
            thread.join(FAREWELL_S)
        os._exit(128 + number)

    def _print(self, text: str) -> None:
        # A progress bar may have hidden the cursor.
        show_cursor = "\x1b[?25h" if os.isatty(self._stderr) else ""
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{show_cursor}\nmeshpar: {text}\n".encode())


def current() -> Watch | None:
    """Return the watch whose handler of Ctrl-C is installed, or None."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return owner if isinstance(owner, Watch) else None


def standard_error() -> int:
    """Return the file descriptor of the original standard error of a command; 2 outside commands."""
    watch = current()
    return 2 if watch is None else watch._stderr


def exit_code() -> int:
    """Return 128 plus the number of the signal that ends a command, in this or a different process of the pod."""
    watch = current()
    return 128 + ((watch and watch.received) or signal.SIGINT)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")


def _restore_in_child() -> None:
    # A forked child does not have the thread, and must not write to the pipe of its parent.
    if watch := current():
        watch._restore()


os.register_at_fork(after_in_child=_restore_in_child)
