"""Checks of files and memory of the host before they are used, and safe file access."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

from meshpar.sharding.errors import MeshparError, check_cases, problem
from meshpar.sharding.units import human_bytes

MAX_BYTES = 1 << 28
"""Maximum size of a settings file (a plan, a profile, a recipe.json)."""
MAX_DIGITS = 100
"""Maximum number of digits of an integer in a settings file."""
_is_forked = False
"""Whether this process was forked after jax had started in its parent."""
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
"""Errors of `flock` on file systems without locks."""
_LOCK_POLL_S = 0.1
_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED: (?P<pool>(?:Out of memory|Failed to allocate request)[^\n]*)"
    r"|(?P<driver>[^\n]*(?:Underlying backend ran out of memory|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure 2)[^\n]*)"
)
"""Errors of XLA's memory pool (`stream_executor/integrations/tf_allocator_adapter.cc`, and PjRt for new arrays), and of
the CUDA driver (`command_buffer_thunk.cc`, `cuda_executor.cc`, NCCL), which allocates outside the pool."""
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe, which can block forever",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_file(
    path: str | os.PathLike[str], where: str, fix: str, *, requested: str = "read it", max_bytes: int | None = MAX_BYTES
) -> Path:
    """Return a path after checking that it is a regular file of limited size. The file is not opened."""
    file = Path(path)
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise _file_problem(where, requested, error, fix) from None
    check_cases(where, requested, "wrong-type", (not stat.S_ISREG(status.st_mode), _file_type(status.st_mode), fix))
    if max_bytes is not None and status.st_size > max_bytes:
        reason = f"it has {human_bytes(status.st_size)}, and the limit is {human_bytes(max_bytes)}"
        raise problem(where, requested, reason, fix, code="out-of-range")
    return file


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL. `Path` replaces the two slashes by one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def check_local(path: str | os.PathLike[str], where: str, fix: str) -> None:
    """Raise `ValueError` for a URL. As a path, it would be a folder with the name `gs:`."""
    if is_url(path):
        reason = "it is a URL, and only local files can be read and written"
        raise problem(where[:200], "use it", reason, fix, code="unsupported-feature")


def check_unicode(text: str, where: str) -> None:
    """Raise `ValueError` for a lone surrogate, which Python uses to represent arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"character {error.start + 1} is half of a surrogate pair, which cannot be encoded"
        raise problem(where, f"use {text!r:.100}", reason, "write it in UTF-8", code="bad-syntax") from None


def check_name(path: str | os.PathLike[str], where: str, fix: str) -> None:
    """Raise `ValueError` for a URL, a name that is too long, or a link to itself. The file need not exist."""
    check_local(path, where, fix)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise _file_problem(where[:200], "read it", error, fix) from None


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

    def parse_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:  # a conversion to float64 could overflow
            raise ValueError(f"a number has {len(digits):,} digits, and the limit is {MAX_DIGITS}")
        return int(digits)

    try:
        return json.loads(text, parse_int=parse_int)
    except (RecursionError, ValueError) as error:
        raise problem(where, requested, f"it is not valid JSON ({error!s:.200})", fix, code="bad-syntax") from None


def write_text(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Write a small UTF-8 file."""
    where, fix = f"{where} `{path}`", "name a file in a folder that exists"
    is_path = bool(path) and isinstance(path, str | os.PathLike)
    check_cases(where, "write it", "wrong-type", (not is_path, "it is not a path", fix))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _file_problem(where, "write it", error, fix) from None


def write_json(path: str | os.PathLike[str], data: object, where: str) -> None:
    """Write a JSON file. Raises as `write_text` does."""
    write_text(path, json.dumps(data, indent=2) + "\n", where)


def open_no_link(path: Path, flags: int) -> int:
    """Open a file with a predictable name, and create it if necessary. Return the file descriptor.

    A link is an error, because it could lead to any file of the user.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError:
        if not path.is_symlink() and not path.is_dir():
            raise
        mode = path.lstat().st_mode
    reason = _file_type(mode) + (f" to {os.readlink(path)[:200]}" if path.is_symlink() else "")
    raise problem(str(path), "write to it", reason, "move it away", code="wrong-type")


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: write a temporary file and rename it. Links are not followed."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


class LockedError(Exception):
    """Another process has a lock. `holder` is `process 12 on host`, from the content of the lock file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float, beat_s: float | None = None) -> Iterator[bool]:
    """Have the exclusive lock of a file during the block. Yield False if the file system has no locks.

    The lock ends with the process. The file is never removed: without a running process, it has no effect.

    Args:
      path: the lock file, which is created if necessary.
      wait_s: seconds to wait for the lock. With `beat_s`, the time starts again whenever the holder is seen alive.
      beat_s: seconds between two changes of the file's time by the holder. They show that the holder is not stopped.

    Raises:
      LockedError: another process has the lock.
    """
    import fcntl

    with open(open_no_link(path, os.O_RDWR), "r+b", buffering=0) as file, contextlib.ExitStack() as stack:
        deadline, seen, has_lock = time.monotonic() + wait_s, os.fstat(file.fileno()).st_mtime_ns, False
        while not has_lock:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                before, seen = seen, os.fstat(file.fileno()).st_mtime_ns
                if beat_s is not None and seen != before:
                    deadline = time.monotonic() + wait_s
                if time.monotonic() > deadline:
                    holder = os.pread(file.fileno(), 1000, 0).decode(errors="replace")
                    raise LockedError(holder or "another process") from None
                time.sleep(_LOCK_POLL_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        if has_lock:
            with contextlib.suppress(OSError):  # a full disk: the lock works without its description
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            if beat_s is not None:
                stack.enter_context(_beating(file.fileno(), beat_s))
        yield has_lock


@contextlib.contextmanager
def _beating(descriptor: int, beat_s: float) -> Iterator[None]:
    """Set the time of a file periodically, in a thread."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(beat_s):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="meshpar-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


def out_of_memory(error: BaseException) -> tuple[str, bool] | None:
    """Return the line of an error that reports too little device memory, and whether the driver has none.

    Otherwise XLA's pool has none. Return None for other errors, and for kernels with too much shared memory and large
    messages of gRPC, which have the status RESOURCE_EXHAUSTED, too.
    """
    found = _OUT_OF_MEMORY.search(str(error))
    if found is None:
        return None
    line = re.sub(r" ?\[tf-allocator.*", "", found[0].replace("RESOURCE_EXHAUSTED: ", "")).strip()[:300].rstrip(". ")
    return line, found["driver"] is not None


def _mark_forked() -> None:
    global _is_forked
    # jax has no public function that returns whether it has started without starting it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    _is_forked = _is_forked or (bridge is not None and bridge.backends_are_initialized())


os.register_at_fork(after_in_child=_mark_forked)


def check_not_forked(where: str, requested: str) -> None:
    """Raise `ValueError` in a child that was forked after jax had started: jax's threads do not exist there."""
    if _is_forked:
        reason = "this process was forked after jax had started, so the computation would wait forever"
        fix = 'start it with multiprocessing.get_context("spawn"), or fork before jax is used'
        raise problem(where, requested, reason, fix, code="conflict")


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
    if isinstance(error, MemoryError) or out_of_memory(error) is not None:
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


def _file_type(mode: int) -> str:
    return f"it is {_FILE_TYPES.get(stat.S_IFMT(mode), 'not a file')}"


def _file_problem(where: str, requested: str, error: BaseException, fix: str) -> MeshparError:
    reason, code = f"that failed ({(isinstance(error, OSError) and error.strerror) or error})", "unusable-file"
    if isinstance(error, FileNotFoundError):
        reason, code = "there is no such file or folder", "missing-file"
    if isinstance(error, UnicodeDecodeError):
        reason, code = f"it is not UTF-8 ({error.reason} at byte {error.start})", "bad-syntax"
    return problem(where, requested, reason, fix, code=code)
