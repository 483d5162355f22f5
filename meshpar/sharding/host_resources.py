"""Checks of files and memory of the host before they are used, and safe file access."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.units import human_bytes

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
"""Errors of `flock` on file systems without locks."""
_LOCK_POLL_S = 0.1


def check_file(path: str | os.PathLike[str], where: str, fix: str, *, requested: str = "read it") -> Path:
    """Return a path after checking that it is a file, which is not opened."""
    file = Path(path)
    if not file.is_file():
        if file.exists():
            raise problem(where, requested, "it is not a file", fix, code="wrong-type")
        raise problem(where, requested, "there is no such file or folder", fix, code="missing-file")
    return file


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL. `Path` replaces the two slashes by one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def check_local(path: str | os.PathLike[str], where: str, fix: str) -> None:
    """Raise `ValueError` for a URL. As a path, it would be a folder with the name `gs:`."""
    if is_url(path):
        reason = "it is a URL, and only local files can be read and written"
        raise problem(where[:200], "use it", reason, fix, code="unsupported-feature")


def read_text(path: str | os.PathLike[str], where: str, fix: str, *, requested: str = "read it") -> str:
    """Return the text of a small UTF-8 file. Raises as `check_file` does, and for invalid UTF-8."""
    file = check_file(path, where, fix, requested=requested)
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _file_problem(where, requested, error, fix) from None


def read_json(path: str | os.PathLike[str], where: str, fix: str, *, requested: str = "read it") -> Any:
    """Return the value of a small JSON file. Raises as `read_text` does, and for invalid JSON."""
    text = read_text(path, where, fix, requested=requested)
    try:
        return json.loads(text)
    except ValueError as error:
        raise problem(where, requested, f"it is not valid JSON ({error!s:.200})", fix, code="bad-syntax") from None


def write_text(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Write a small UTF-8 file."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a file in a folder that exists"
        raise _file_problem(f"{where} `{path}`", "write it", error, fix) from None


def write_json(path: str | os.PathLike[str], data: object, where: str) -> None:
    """Write a JSON file. Raises as `write_text` does."""
    write_text(path, json.dumps(data, indent=2) + "\n", where)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: write a temporary file and rename it."""
    temporary = path.with_name(f"{path.name}.new")
    with naming(path):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)


class LockedError(Exception):
    """Another process has a lock. `holder` is `process 12 on host`, from the content of the lock file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = math.inf) -> Iterator[bool]:
    """Have the exclusive lock of a file during the block. Yield False if the file system has no locks.

    The lock ends with the process. The file is never removed: without a running process, it has no effect.

    Args:
      path: the lock file, which is created if necessary.
      wait_s: seconds to wait for the lock.

    Raises:
      LockedError: another process has the lock.
    """
    import fcntl

    with path.open("a+") as file:
        deadline, has_lock = time.monotonic() + wait_s, False
        while not has_lock:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise LockedError(file.read() or "another process") from None
                time.sleep(_LOCK_POLL_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        if has_lock:
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        yield has_lock


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an `OSError`. Errors from reading or writing an open file do not contain it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_inside(path: Path, folder: Path) -> None:
    """Raise `ValueError` for a link that leads out of a folder, so that its target is not published by accident.

    Folders in the Hugging Face cache link from `snapshots` to `blobs`, which is allowed.
    """
    target, base = path.resolve(), folder.resolve()
    hub = base.parent.parent / "blobs" if base.parent.name == "snapshots" else base
    if not target.is_relative_to(base) and not target.is_relative_to(hub):
        reason, fix = f"it is a link to {target}, outside of the folder", "replace the link by a copy of the file"
        raise problem(str(path), "copy it", reason, fix, code="unsupported-feature")


def free_memory_bytes() -> int | None:
    """Return the available host memory, including page cache that can be freed, or None if it is unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_memory(where: str, requested: str, needed_bytes: float, fix: str) -> None:
    """Raise `ValueError` if the host does not have enough free memory."""
    free = free_memory_bytes()
    if free is not None and needed_bytes > free:
        reason = f"that takes {human_bytes(needed_bytes)} here, and {human_bytes(free)} are free"
        raise problem(where, requested, reason, fix, code="out-of-memory")


def user_line(error: BaseException) -> str | None:
    """Return the last line of user code in a traceback, as `recipe.py:17`, or None."""
    paths = sysconfig.get_paths()
    libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = {Path(__file__).resolve().parents[1], *(Path(path).resolve() for path in libraries)}
    lines = [(Path(frame.f_code.co_filename).resolve(), line) for frame, line in walk_tb(error.__traceback__)]
    user_lines = [
        f"{file.name}:{line}" for file, line in lines if file.is_file() and installed.isdisjoint(file.parents)
    ]
    return user_lines[-1] if user_lines else None


def unexpected(error: BaseException, *, command: str) -> MeshparError:
    """Convert an exception that a command did not expect, such as an `OSError`, to a `MeshparError`."""
    where = f"`{command}`"
    if isinstance(error, OSError) and error.filename is not None:
        return _file_problem(str(error.filename)[:200], "use it", error, "name a different file, or make it usable")
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        reason, fix = "there is not enough memory", "use smaller sizes, or more devices"
        return problem(where, "run", reason, fix, code="out-of-memory")
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # of a host callback; its last line has the cause
        text = text.splitlines()[-1]
    message = " ".join(text.split())
    message = message[:300] + ("…" if len(message) > 300 else "")
    reason, line = f"{type(error).__name__} was raised" + (f" ({message})" if message else ""), user_line(error)
    reason += f" at {line}" if line else ""
    fix = f"correct {'that line' if line else 'the cause'}; --traceback shows how it was reached"
    return problem(where, "run", reason, fix, code="unexpected")


def _file_problem(where: str, requested: str, error: BaseException, fix: str) -> MeshparError:
    reason, code = f"that failed ({(isinstance(error, OSError) and error.strerror) or error})", "unusable-file"
    if isinstance(error, FileNotFoundError):
        reason, code = "there is no such file or folder", "missing-file"
    if isinstance(error, UnicodeDecodeError):
        reason, code = f"it is not UTF-8 ({error.reason} at byte {error.start})", "bad-syntax"
    return problem(where, requested, reason, fix, code=code)
