"""What this host can give, judged before it is taken: files that can be read, memory that is free."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.units import human_bytes

MOST_BYTES = 1 << 28
"""A file of settings (a plan, a profile, a recipe.json) that is larger is none."""
MOST_DIGITS = 100
"""Digits of a whole number in a file of settings."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe, whose other end may never write",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_file(
    path: str | os.PathLike[str], where: str, fix: str, *, asked: str = "read it", most_bytes: int | None = MOST_BYTES
) -> Path:
    """A path that is a regular file which may be opened; nothing is read.

    Raises:
      ValueError: no such file, something else than a file, one that is too large, or a name the system does not take.
    """
    file = Path(path)
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise problem(where, asked, _why(error), fix) from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise problem(where, asked, f"it is {kind}", fix)
    if most_bytes is not None and found.st_size > most_bytes:
        size = f"it has {human_bytes(found.st_size)}, and {human_bytes(most_bytes)} are the most"
        raise problem(where, asked, size, fix)
    return file


def check_local(path: str | os.PathLike[str], where: str, fix: str) -> None:
    """Raise `ValueError` for a URL, which the file system would take for a folder called `gs:`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # `Path` makes one slash of two
        raise problem(where[:200], "use it", "it is a URL, and only local files can be read and written", fix)


def check_unicode(text: str, where: str) -> None:
    """Raise `ValueError` for half a surrogate pair, which Python makes of an argument that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        exists = f"character {error.start + 1} is half of a surrogate pair, which no file and no tokenizer takes"
        raise problem(where, f"use {text!r:.100}", exists, "write it in UTF-8") from None


def check_name(path: str | os.PathLike[str], where: str, fix: str) -> None:
    """Raise `ValueError` for a URL, a name that is too long, or a link to itself. The file may be missing."""
    check_local(path, where, fix)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise problem(where[:200], "read it", _why(error), fix) from None


def read_text(path: str | os.PathLike[str], where: str, fix: str, *, asked: str = "read it") -> str:
    """The text of a small file in UTF-8; errors as in `check_file`, and for what is not UTF-8."""
    file = check_file(path, where, fix, asked=asked)
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise problem(where, asked, _why(error), fix) from None


def read_json(path: str | os.PathLike[str], where: str, fix: str, *, asked: str = "read it") -> Any:
    """The JSON value of a small file; errors as in `read_text`, and for what is not JSON."""
    text = read_text(path, where, fix, asked=asked)
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise problem(where, asked, "its JSON is nested too deep", fix) from None
    except ValueError as error:
        raise problem(where, asked, f"it is no JSON ({str(error)[:200]})", fix) from None


def _whole_number(digits: str) -> int:
    """Return a number of a JSON file; a float64 holds it, so no conversion overflows later."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits, and {MOST_DIGITS} are the most")
    return int(digits)


def write_text(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Writes a small file in UTF-8.

    Raises:
      ValueError: what is no path, or a file that the system does not let be written.
    """
    fix = "name a file in a folder that exists"
    if not path or not isinstance(path, str | os.PathLike):
        raise problem(f"{where} {path!r}", "be written", "it is no path", fix)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = "its folder does not exist" if isinstance(error, FileNotFoundError) else _why(error)
        raise problem(f"{where} `{path}`", "be written", why, fix) from None


def write_json(path: str | os.PathLike[str], data: Any, where: str) -> None:
    """Writes plain data as `read_json` reads it; errors as in `write_text`."""
    write_text(path, json.dumps(data, indent=2) + "\n", where)


def open_no_link(path: Path, flags: int) -> int:
    """Open a file of a name that others can guess, and make it if it is missing; return the number of the open file.

    Raises:
      ValueError: a link, which may lead to any file of the user, or something that is no file.
      OSError: the system does not open it.
    """
    try:
        number = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.is_symlink():
            exists, fix = f"it is a link to {os.readlink(path)[:200]}", "remove the link"
        elif path.is_dir():
            exists, fix = "it is a folder", "move it away"
        else:
            raise
        raise problem(str(path), "write to it", exists, fix) from error
    if not stat.S_ISREG(kind := os.fstat(number).st_mode):
        os.close(number)
        exists = f"it is {_KINDS.get(stat.S_IFMT(kind), 'no file')}"
        raise problem(str(path), "write to it", exists, "move it away")
    return number


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file of a run under another name and rename it: a reader sees all of it or none, and no link is followed.

    Raises:
      OSError: the system does not let it be written. The error has the name of the file.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)  # of a process that was killed, or a link
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file to an `OSError`: the errors of an open file lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_inside(path: Path, folder: Path) -> None:
    """Raise `ValueError` for a link that leads out of a folder, so that nobody publishes what it points to.

    The folders of the Hugging Face hub's cache link to `blobs`, beside their `snapshots`.
    """
    real, base = path.resolve(), folder.resolve()
    hub = base.parent.parent / "blobs" if base.parent.name == "snapshots" else base
    if not real.is_relative_to(base) and not real.is_relative_to(hub):
        exists = f"it is a link to {real}, outside of the folder"
        raise problem(str(path), "copy it", exists, "remove the link, or put a copy of the file there")


def free_memory_bytes() -> int | None:
    """What the host has left, without what files in its cache take; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_memory(where: str, asked: str, needed_bytes: float, fix: str) -> None:
    """Raises `ValueError` for what does not fit into the memory that this host has left."""
    free = free_memory_bytes()
    if free is not None and needed_bytes > free:
        exists = f"that takes {human_bytes(needed_bytes)} here, and {human_bytes(free)} are free"
        raise problem(where, asked, exists, fix)


def user_line(error: BaseException) -> str | None:
    """Return the last line of the user's code that an error went through, as `recipe.py:17`; None if there is none."""
    paths = sysconfig.get_paths()
    libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = {Path(__file__).resolve().parents[1], *(Path(path).resolve() for path in libraries)}
    lines = [(Path(frame.f_code.co_filename).resolve(), line) for frame, line in walk_tb(error.__traceback__)]
    own = [f"{file.name}:{line}" for file, line in lines if file.is_file() and installed.isdisjoint(file.parents)]
    return own[-1] if own else None


def unexpected(error: BaseException, *, command: str) -> MeshparError:
    """An error that nobody wrote for a person, as one: what the system refused, or a mistake of a program."""
    where = f"`{command}`"
    if isinstance(error, OSError) and error.filename is not None:
        return problem(str(error.filename)[:200], "use it", _why(error), "name another, or make this one usable")
    if isinstance(error, MemoryError):
        return problem(where, "run", "there is not enough memory", "use smaller sizes, or more devices")
    said = " ".join(str(error).split())
    said = said[:300] + ("…" if len(said) > 300 else "")
    raised, line = f"{type(error).__name__} was raised" + (f" ({said})" if said else ""), user_line(error)
    if line is not None:
        return problem(where, "run", f"{raised} at {line}", "correct that line; --traceback shows how it got there")
    return problem(
        where, "run", raised, "correct what it is about, if it is yours; --traceback shows where it happened"
    )


def _why(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, OSError):
        return f"that failed ({error.strerror or error})"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 ({error.reason} at byte {error.start})"
    return f"that failed ({error})"
