"""Handling of exceptions in host callbacks: they end the command.

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
"""Loggers of jax that receive the exception of a failed callback. jax has no public hook for it."""
GRACE_S = 5.0
"""Seconds in which the process may still end by itself, with its own message."""


def end_on_callback_failures() -> None:
    """Add a filter to the loggers of jax that ends the process `GRACE_S` seconds after a host callback failed."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_end_later)


def _end_later(record: logging.LogRecord) -> bool:
    """Schedule the end of the process if the record reports a failed callback. Return whether to print the record."""
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
