"""A lock on a run folder, so that a single run writes to it; it ends with the process."""

from __future__ import annotations

import contextlib
import errno
import json
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
def lock_run_folder(
    folder: Path, *, warn: Callable[[str], None], wait_s: float = WAIT_S
) -> Iterator[Callable[[], None]]:
    """Lock a run folder. Process 0 of a run calls this.

    The lock is on the file `.NAME.lock` next to the folder. The file is never removed: without a running process,
    the file has no effect. The folder itself is locked as well, so removing the file does not admit a second run.

    Args:
      folder: the run folder, which may not exist yet.
      warn: receives a message if the file system has no locks.
      wait_s: seconds to wait for the lock.

    Yields:
      A function that locks the folder itself, to be called after the folder was created.

    Raises:
      ValueError: if a different process has the lock. The message names its host and process id.
    """
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        reason, fix = "it is a link that another user created", "remove it, or name another folder with --out"
        raise problem(f"run {folder}", "write to it", reason, fix, code="conflict")
    path = folder.with_name(f".{folder.name}.lock")
    deadline, locked_inodes = time.monotonic() + wait_s, set[int]()
    with contextlib.ExitStack() as stack:

        def lock(path: Path, descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            if not _flock(descriptor, deadline):
                raise _already_locked(folder, path)
            locked_inodes.add(os.fstat(descriptor).st_ino)
            return descriptor

        def lock_folder() -> None:
            # Some file systems lock files only, and the folder may not exist yet.
            with contextlib.suppress(OSError):
                if folder.stat().st_ino not in locked_inodes:
                    lock(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock(path, open_no_link(path, os.O_RDWR))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                reason, fix = f"that failed ({error.strerror})", "name another folder with --out"
                raise problem(f"run {folder}", "write to it", reason, fix, code="not-writable") from error
            warn(f"the file system of {folder.parent} has no locks: a second run in the same folder is not detected")
        else:
            lock_folder()
            with contextlib.suppress(OSError):  # a full disk: the lock works without its description
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        yield lock_folder


def _flock(descriptor: int, deadline: float) -> bool:
    """Lock an open file, and return whether that succeeded before the deadline."""
    import fcntl

    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def _already_locked(folder: Path, path: Path) -> Exception:
    try:
        holder = json.loads(path.read_bytes()[:1000])
        process = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        process = "another process"
    fix = "wait for it, stop it, or use --name to start another run"
    return problem(f"run {folder}", "write to it", f"{process} is training in this folder", fix, code="conflict")
