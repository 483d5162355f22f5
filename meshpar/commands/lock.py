"""One run at a time in a folder: a lock that the kernel takes back from a process that dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshpar.sharding.types import problem

WAIT_S = 5.0
"""A run that is just ending has so long to let go."""
_NONE_HERE = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_POLL_S = 0.1


@contextlib.contextmanager
def held(folder: Path, *, tell: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the folder of a run against others; for one process of a pod.

    The lock is on a file beside the folder (`.NAME.lock`), which stays: it says nothing once nobody holds it, so what a
    killed process leaves is no obstacle.

    Args:
      folder: of the run.
      tell: called with a line where the file system has no locks.
      wait_s: for how long to try.

    Raises:
      ValueError: another process holds it; its host and number are told.
    """
    import fcntl

    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        why, fix = f"that failed ({error.strerror})", "name another folder by --out"
        raise problem(f"run {folder}", "write to it", why, fix) from error
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _taken(folder, path) from None
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in _NONE_HERE:
                    raise
                tell(f"{folder.parent} is on a file system without locks: two runs in one folder are not told apart")
                break
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its words are missing
            os.ftruncate(number, 0)
            os.pwrite(number, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        yield
    finally:
        os.close(number)


def _taken(folder: Path, path: Path) -> Exception:
    try:
        said = json.loads(path.read_bytes()[:1000])
        who = f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return problem(
        f"run {folder}",
        "write to it",
        f"{who} is training in this folder",
        "wait for it or stop it; or use --name for a run beside it",
    )
