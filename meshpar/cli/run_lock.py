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

from meshpar.sharding.host_resources import open_no_link
from meshpar.sharding.types import problem

WAIT_S = 5.0
"""A run that is just ending has so long to let go."""
_NONE_HERE = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_POLL_S = 0.1


@contextlib.contextmanager
def held(folder: Path, *, tell: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[Callable[[], None]]:
    """Hold the folder of a run against others; for one process of a pod.

    The lock is on a file beside the folder (`.NAME.lock`), which stays: it says nothing once nobody holds it, so what a
    killed process leaves is no obstacle. Who removes that file lets nobody in: the folder is locked as well.

    Yields:
      What is to be called when the folder has been made: locks it, where it was not there before.

    Raises:
      ValueError: another process holds it; its host and number are told.
    """
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        exists, fix = "it is a link that another user made", "remove it, or name another folder by --out"
        raise problem(f"run {folder}", "write to it", exists, fix)
    path = folder.with_name(f".{folder.name}.lock")
    deadline, mine = time.monotonic() + wait_s, set[int]()
    with contextlib.ExitStack() as until_end:

        def take(path: Path, number: int) -> int:
            until_end.callback(os.close, number)
            if not _locked(number, deadline):
                raise _taken(folder, path)
            mine.add(os.fstat(number).st_ino)
            return number

        def take_folder() -> None:
            with contextlib.suppress(OSError):  # not there yet; or of a file system that locks files alone
                if folder.stat().st_ino not in mine:
                    take(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            number = take(path, open_no_link(path, os.O_RDWR))
        except OSError as error:
            if error.errno not in _NONE_HERE:
                why, fix = f"that failed ({error.strerror})", "name another folder by --out"
                raise problem(f"run {folder}", "write to it", why, fix) from error
            tell(f"{folder.parent} is on a file system without locks: two runs in one folder are not told apart")
        else:
            take_folder()
            with contextlib.suppress(OSError):  # a full disk: the lock holds, only its words are missing
                os.ftruncate(number, 0)
                os.pwrite(number, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        yield take_folder


def _locked(number: int, deadline: float) -> bool:
    """Whether the lock on an open file was got in time."""
    import fcntl

    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def _taken(folder: Path, path: Path) -> Exception:
    try:
        said = json.loads(path.read_bytes()[:1000])
        who = f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    fix = "wait for it or stop it; or use --name for a run beside it"
    return problem(f"run {folder}", "write to it", f"{who} is training in this folder", fix)
