"""What the compiler says on standard error while it works: caught, and its warnings told apart."""

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
_TOLD_AT_ITS_END = "read -r ended || cat <&2"
"""Of a shell whose input is a pipe from the process: a line when it goes on, nothing when it has ended."""
_OP_NAME = re.compile(r"op_name=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """The partitioner gave up on a resharding: it gathers the whole tensor on every device and slices it again."""

    op_name: str
    module: str
    """Named scopes of the operation: `decoder/mlp`."""
    shape: str
    """The tensor's shape on one device, as XLA prints it; empty when the message does not hold it."""
    before: str
    """Sharding it had, as XLA writes it."""
    after: str
    """Sharding it was to have."""


class Caught:
    """What `catch_stderr` caught: `text` is complete once the block has ended."""

    text: str = ""


@contextlib.contextmanager
def catch_stderr() -> Iterator[Caught]:
    """Takes over the process's standard error, C++ included, and keeps what is written to it.

    If the block raises, what was caught is written out after all: it may hold the reason. So it is where the process
    itself ends within the block, as XLA ends it at an internal error; then a shell that waits for its end does it.
    """
    caught = Caught()
    sys.stderr.flush()
    saved = os.dup(2)
    writing, reading = _unnamed_file()
    heir = _heir(reading)
    try:
        os.dup2(writing, 2)
        yield caught
    except BaseException:
        caught.text = _given_back(saved, reading)
        os.write(2, caught.text.encode())
        raise
    else:
        caught.text = _given_back(saved, reading)
    finally:
        for number in (saved, writing, reading):
            os.close(number)
        if heir is not None:
            with contextlib.suppress(BrokenPipeError):
                heir.communicate(b"\n")
            interrupts.heirs.discard(heir.kill)


def _unnamed_file() -> tuple[int, int]:
    """A file that ends with who has it open: to write, and to read from its start. In memory where that can be.

    No folder needs to be writable, or to have room.
    """
    if hasattr(os, "memfd_create"):
        writing = os.memfd_create("stderr")
        return writing, os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    writing, path = tempfile.mkstemp()
    reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.unlink(path)
    return writing, reading


def _heir(reading: int) -> subprocess.Popen[bytes] | None:
    """The shell; None where there is none, or no process may be started: then what is caught ends with this one."""
    try:
        # In a group of its own: a terminal's Ctrl-C is not for it.
        how: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": interrupts.standard_error(),
            "stderr": reading,
            "process_group": 0,
        }
        heir = subprocess.Popen(["sh", "-c", _TOLD_AT_ITS_END], **how)
    except OSError:
        return None
    interrupts.heirs.add(heir.kill)
    return heir


def _given_back(saved: int, reading: int) -> str:
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os.dup2(saved, 2)
    return os.pread(reading, os.fstat(reading).st_size, 0).decode(errors="replace")


def warnings_in(text: str) -> tuple[str, ...]:
    """The compiler's warnings and errors in its log, each once, without time and thread."""
    found = (_WARNING.match(line) for line in text.splitlines())
    return tuple(dict.fromkeys(f"{m.group(1) or m.group(3)}: {m.group(2) or m.group(4)}" for m in found if m))


def rematerializations(warnings: tuple[str, ...]) -> tuple[Rematerialization, ...]:
    """The involuntary full rematerializations among the compiler's warnings."""
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
