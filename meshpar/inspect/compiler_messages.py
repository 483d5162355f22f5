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

from meshpar.inspect import source_scopes as scopes
from meshpar.pod import signals as interrupts

_WARNING = re.compile(
    r"^[WE][0-9]{4} [0-9:.]+ +[0-9]+ ([\w.\-/]+:[0-9]+)\] (.*)$|^[0-9\- :.]+: [WE] (\S+:[0-9]+)\] (.*)$"
)
_REMATERIALIZATION = re.compile(
    r"\[SPMD\] Involuntary full rematerialization.*? from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"(?:efficiently|without).*?for HLO operation:? (?P<operation>.*)",
    re.IGNORECASE,
)
_WAIT_FOR_PROCESS = "read -r ended || cat <&2"
"""Shell script that waits for a line from this process. If the process ends first, it prints the captured text."""
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
    """Text that `catch_stderr` captured. It is complete after the `with` block."""

    text: str = ""


@contextlib.contextmanager
def catch_stderr() -> Iterator[Caught]:
    """Redirect the process's standard error, including that of C++ code, and capture it.

    If the block raises, the captured text is written to standard error, because it may contain the reason. If the
    process ends within the block, as at an internal error of XLA, a waiting shell process writes the text.
    """
    caught, saved = Caught(), os.dup(2)
    sys.stderr.flush()
    # The two descriptors have separate positions, so that both this process and the shell read from the start.
    with tempfile.NamedTemporaryFile() as log, open(log.name, "rb") as reading:
        heir = subprocess.Popen(
            ["sh", "-c", _WAIT_FOR_PROCESS],
            stdin=subprocess.PIPE,
            stdout=interrupts.standard_error(),
            stderr=reading,
            process_group=0,  # Ctrl-C in a terminal does not reach it
        )
        interrupts.child_cleanups.add(heir.kill)
        os.dup2(log.fileno(), 2)
        has_failed = True
        try:
            yield caught
            has_failed = False
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            caught.text = reading.read().decode(errors="replace")
            if has_failed:
                os.write(2, caught.text.encode())
            with contextlib.suppress(BrokenPipeError):
                heir.communicate(b"\n")
            interrupts.child_cleanups.discard(heir.kill)


def warnings_in(text: str) -> tuple[str, ...]:
    """Return the warnings and errors in a compiler log, without duplicates, timestamps and thread ids."""
    matches = (_WARNING.match(line) for line in text.splitlines())
    return tuple(dict.fromkeys(f"{m.group(1) or m.group(3)}: {m.group(2) or m.group(4)}" for m in matches if m))


def rematerializations(warnings: tuple[str, ...]) -> tuple[Rematerialization, ...]:
    """Return the involuntary full rematerializations among the compiler's warnings."""
    matches = (_REMATERIALIZATION.search(warning) for warning in warnings)
    return tuple(_rematerialization(*match.group("before", "after", "operation")) for match in matches if match)


def _rematerialization(before: str, after: str, operation: str) -> Rematerialization:
    op_name, shape = _OP_NAME.search(operation), re.match(r"%?\S+ = (\S+)", operation)
    name = op_name.group(1) if op_name else ""
    return Rematerialization(
        op_name=name,
        module=scopes.module_path(name),
        shape=shape.group(1) if shape else "",
        before=before,
        after=after,
    )
