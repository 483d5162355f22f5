"""Capture of the compiler's standard error, and parsing of its warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from meshpar.inspect import source_scopes as scopes
from meshpar.loop import signals as interrupts

_WARNING = re.compile(
    r"^[WE][0-9]{4} [0-9:.]+ +[0-9]+ ([\w.\-/]+:[0-9]+)\] (.*)$|^[0-9\- :.]+: [WE] (\S+:[0-9]+)\] (.*)$"
)
_REMATERIALIZATION = re.compile(
    r"\[SPMD\] Involuntary full rematerialization.*? from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"(?:efficiently|without).*?for HLO operation:? (?P<operation>.*)",
    re.IGNORECASE,
)
_WAIT_FOR_PROCESS = "read -r ended || cat <&2"
"""Shell script that reads a line when the process continues, and end of file when the process has ended."""
_OP_NAME = re.compile(r"op_name=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """A resharding that the partitioner could only do by replicating the full tensor and slicing it again."""

    op_name: str
    module: str
    """Named scopes of the operation: `decoder/mlp`."""
    shape: str
    """The tensor's shape on one device, as XLA prints it; empty if the message does not contain it."""
    before: str
    """Original sharding, as XLA prints it."""
    after: str
    """Requested sharding."""


class Caught:
    """The text that `catch_stderr` captured; complete after the block."""

    text: str = ""


@contextlib.contextmanager
def catch_stderr() -> Iterator[Caught]:
    """Redirect the process's standard error, including that of C++ code, and capture it.

    If the block raises, the captured text is written to standard error, because it may contain the reason. If the
    process itself ends within the block, as XLA does at an internal error, a shell that waits for its end writes it.
    """
    caught = Caught()
    sys.stderr.flush()
    saved = os.dup(2)
    writing, reading = _unnamed_file()
    heir = _start_heir(reading)
    try:
        os.dup2(writing, 2)
        yield caught
    except BaseException:
        caught.text = _restore_stderr(saved, reading)
        os.write(2, caught.text.encode())
        raise
    else:
        caught.text = _restore_stderr(saved, reading)
    finally:
        for number in (saved, writing, reading):
            os.close(number)
        if heir is not None:
            with contextlib.suppress(BrokenPipeError):
                heir.communicate(b"\n")
            interrupts.heirs.discard(heir.kill)


def _unnamed_file() -> tuple[int, int]:
    """Open a file without a name, for writing and for reading from its start; in memory if possible.

    No directory has to be writable or have free space.
    """
    if hasattr(os, "memfd_create"):
        writing = os.memfd_create("stderr")
        return writing, os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    writing, path = tempfile.mkstemp()
    reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.unlink(path)
    return writing, reading


def _start_heir(reading: int) -> subprocess.Popen[bytes] | None:
    """Start the shell. Returns None if that fails; then the captured text is lost if the process ends."""
    try:
        # A separate process group, so that Ctrl-C in a terminal does not reach it.
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": interrupts.standard_error(),
            "stderr": reading,
            "process_group": 0,
        }
        heir = subprocess.Popen(["sh", "-c", _WAIT_FOR_PROCESS], **options)
    except OSError:
        return None
    interrupts.heirs.add(heir.kill)
    return heir


def _restore_stderr(saved: int, reading: int) -> str:
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os.dup2(saved, 2)
    return os.pread(reading, os.fstat(reading).st_size, 0).decode(errors="replace")


def warnings_in(text: str) -> tuple[str, ...]:
    """Return the compiler's warnings and errors in its log, without duplicates, time and thread."""
    matches = (_WARNING.match(line) for line in text.splitlines())
    return tuple(dict.fromkeys(f"{m.group(1) or m.group(3)}: {m.group(2) or m.group(4)}" for m in matches if m))


def rematerializations(warnings: tuple[str, ...]) -> tuple[Rematerialization, ...]:
    """Return the involuntary full rematerializations among the compiler's warnings."""
    return tuple(found for warning in warnings if (found := _rematerialization(warning)) is not None)


def _rematerialization(warning: str) -> Rematerialization | None:
    match = _REMATERIALIZATION.search(warning)
    if match is None:
        return None
    operation = match.group("operation")
    op_name = _OP_NAME.search(operation)
    shape = re.match(r"%?\S+ = (\S+)", operation)
    name = op_name.group(1) if op_name else ""
    return Rematerialization(
        op_name=name,
        module=scopes.module_path(name),
        shape=shape.group(1) if shape else "",
        before=match.group("before"),
        after=match.group("after"),
    )
