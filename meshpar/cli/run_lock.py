"""A lock on a run folder, so that a single run writes to it; it ends with the process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshpar.sharding.host_resources import open_no_link
from meshpar.sharding.types import problem

WAIT_S = 5.0
"""Seconds to wait for the end of a previous run."""
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
"""Errors of `flock` on file systems without locks."""
_POLL_S = 0.1


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
    import fcntl

    where, requested, fix = f"run {folder}", "write to it", "use --name for another run"
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        raise problem(where, requested, "it is a link that another user created", fix, code="conflict")
    folder.parent.mkdir(parents=True, exist_ok=True)
    path, deadline = folder.with_name(f".{folder.name}.lock"), time.monotonic() + wait_s
    with open(open_no_link(path, os.O_RDWR), encoding="utf-8", errors="replace") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason = f"{file.read(1000) or 'another process'} is training in this folder"
                    raise problem(
                        where, requested, reason, f"wait for it, stop it, or {fix}", code="conflict"
                    ) from None
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warn(f"the file system of {folder.parent} has no locks: a second run is not detected")
                break
        with contextlib.suppress(OSError):  # a full disk: the lock works without its description
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
