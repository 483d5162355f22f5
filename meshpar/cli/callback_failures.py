"""Ends a command if a host callback of the user's program raises an exception.

If a callback (`jax.debug.callback`, `jax.pure_callback`, `jax.io_callback`) raises, the program on its device fails.
Other devices then wait for this device in their next collective, and the process hangs. jax logs the exception first.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import user_line

LOGGERS = ("jax._src.callback", "jax._src.debugging")
"""jax has no public hook for a failed callback. These loggers get a record with the exception."""
GRACE_S = 5.0
"""Time in which the process may end by itself, with its own message."""


class CallbackFailures(logging.Handler):
    """Logging handler that ends the process some seconds after a host callback failed."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not record.getMessage().endswith("callback failed"):
            return
        timer = threading.Timer(GRACE_S, _end, (record.getMessage().removesuffix(" failed"), error))
        timer.daemon = True
        timer.start()


def end_on_callback_failures(*, show_traceback: bool = False) -> None:
    """Install the handler. Without `show_traceback`, jax's own record with the traceback is not printed."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, CallbackFailures) for handler in logger.handlers):
            logger.addHandler(CallbackFailures())
            logger.propagate = show_traceback


def _end(callback: str, error: BaseException) -> None:
    line = user_line(error)
    reason = f"{type(error).__name__} was raised ({error})" + (f" at {line}" if line else "")
    fix = "correct the callback; devices that wait for its result would never continue"
    print(f"meshpar: {problem(f'`{callback}`', 'run', reason, fix)}", file=sys.stderr, flush=True)
    os._exit(2)
