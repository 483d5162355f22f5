"""A lock on a run folder, so that a single run writes to it; it ends with the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import LockedError, locked

WAIT_S = 5.0
"""Seconds to wait for the end of a previous run."""


@contextlib.contextmanager
def lock_run_folder(folder: Path, *, warn: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[None]:
    """Lock a run folder, which may not exist yet. Process 0 of a run calls this.

    The lock is on the file `.NAME.lock` next to the folder. The file is never removed: without a running process,
    the file has no effect.

    Args:
      folder: the run folder.
      warn: receives a message if the file system has no locks.
      wait_s: seconds to wait for the lock.

    Raises:
      ValueError: if a different process has the lock. The message names its host and process id.
    """
    where, requested, fix = f"run {folder}", "write to it", "use --name for another run"
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        raise problem(where, requested, "it is a link that another user created", fix, code="conflict")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            has_lock = stack.enter_context(locked(folder.with_name(f".{folder.name}.lock"), wait_s=wait_s))
        except LockedError as error:
            reason, fix = f"{error.holder} is training in this folder", f"wait for it, stop it, or {fix}"
            raise problem(where, requested, reason, fix, code="conflict") from None
        if not has_lock:
            warn(f"the file system of {folder.parent} has no locks: a second run is not detected")
        yield
