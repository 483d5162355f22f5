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


def end_on_callback_failures() -> None:
    """Filter the records of jax: end the process some seconds after a host callback failed."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_end_later)


def _end_later(record: logging.LogRecord) -> bool:
    """End the process in some seconds. The record, which has a traceback, is printed only with --traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or not record.getMessage().endswith("callback failed"):
        return True
    line = user_line(error)
    reason = f"{type(error).__name__} was raised ({error})" + (f" at {line}" if line else "")
    fix = "correct the callback; devices that wait for its result would never continue"
    shown = problem(f"`{record.getMessage().removesuffix(' failed')}`", "run", reason, fix)

    def end() -> None:
        print(f"meshpar: {shown}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()
    return "--traceback" in sys.argv
