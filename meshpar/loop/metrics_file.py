"""metrics.jsonl: a hook that writes a JSON line per step and per validation, and readers of the file."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax

from meshpar.loop.fit import Hook, Record, Run, Validation
from meshpar.sharding.host_resources import check_file, open_no_link, replace_file

MAX_BUFFERED_BYTES = 16 << 20
"""Bytes of metrics.jsonl that are buffered in memory, to restore the file if it is truncated."""


class JsonlWriter(Hook):
    """Hook that writes metrics.jsonl, on process 0. A killed run leaves at most its last line incomplete.

    The line of a step has `step, loss, tokens_per_s, mfu, seconds` and its other metrics. The line of a validation has
    `step`, each metric with the prefix `val_`, and `seconds`. JSON has no NaN: non-finite values are null, and
    `nonfinite` contains them as text by name. A resumed run removes the lines of the steps that it repeats.

    If the file is removed, renamed, replaced or truncated during the run, the next write restores it, from memory and
    from the open file, with a warning. Steps whose lines are lost are recorded in a line `step, missing_from`.

    Args:
      path: the file. Its folder is created if necessary.
      also: function from a record to additional values for the line of a step: numbers, or lists and dicts of numbers.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, also: Callable[[Record], Mapping[str, Any]] | None = None
    ) -> None:
        self._path, self._also = Path(path), also
        self._file: IO[bytes] | None = None
        self._pending: list[bytes] = []
        self._buffer: collections.deque[bytes] = collections.deque()
        self._size = self._buffered_bytes = 0
        self._is_lost = False

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = b""
        if self._path.exists():
            check_file(self._path, str(self._path), "move it away: the run writes its own", max_bytes=None)
            content = self._path.read_bytes()
        lines, missing = _with_gaps(_valid_lines(content, last_step=run.first_step), run.first_step)
        self._open(lines, is_changed=b"".join(lines) != content)
        if missing:
            warnings.warn(f"{self._path}: {_describe(missing)}, which the run has completed", stacklevel=2)

    def on_record(self, run: Run, record: Record) -> None:
        self._write(
            {
                "step": record.step,
                "loss": record.loss,
                "tokens_per_s": record.tokens_per_s,
                "mfu": record.mfu,
                "seconds": record.seconds,
                **record.metrics,
                **({} if self._also is None else self._also(record)),
            }
        )

    def on_validation(self, run: Run, validation: Validation) -> None:
        metrics = {f"val_{name}": value for name, value in validation.metrics.items()}
        self._write({"step": validation.step, **metrics, "seconds": validation.seconds})

    def on_end(self, run: Run, reason: str) -> None:
        if self._file is not None:
            self._check()
            self._file.close()
            self._file = None
        if self._pending:
            warnings.warn(f"{self._path}: the last {len(self._pending)} lines could not be written", stacklevel=2)
            self._pending = []

    def _open(self, lines: Sequence[bytes], *, is_changed: bool) -> None:
        """Open the file for appending after these lines, which are written first if the file is changed."""
        if is_changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, b"".join(lines))
        descriptor = open_no_link(self._path, os.O_RDWR | os.O_APPEND)
        file = open(descriptor, "a+b", buffering=0)  # noqa: SIM115 - unbuffered, so that a killed process loses no line
        if self._file is not None:
            self._file.close()
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._buffer.clear()
        self._buffered_bytes = 0
        for line in lines:
            self._remember(line)

    def _remember(self, line: bytes) -> None:
        self._buffer.append(line)
        self._buffered_bytes += len(line)
        while self._buffered_bytes > MAX_BUFFERED_BYTES:
            self._buffered_bytes -= len(self._buffer.popleft())

    def _check(self) -> None:
        """Restore the file if the path no longer refers to the open file, or if the file was truncated."""
        assert self._file is not None
        opened, current = os.fstat(self._file.fileno()), None
        with contextlib.suppress(OSError):
            current = os.lstat(self._path)
        is_truncated = opened.st_size < self._size
        if current is not None and os.path.samestat(opened, current) and not is_truncated:
            return
        content = os.pread(self._file.fileno(), opened.st_size, 0)
        if is_truncated:  # the buffer has the end of the file
            content = content[: self._size - self._buffered_bytes]
            content = content[: content.rfind(b"\n") + 1] + b"".join(self._buffer)
        valid = _valid_lines(content)
        lines, missing = _with_gaps(valid, max((json.loads(line)["step"] for line in valid), default=0))
        change = "removed or renamed" if current is None else "truncated" if is_truncated else "replaced"
        try:
            self._open(lines, is_changed=True)
            action, self._is_lost = "it is restored", False
        except OSError as error:
            action = f"it cannot be restored ({error.strerror or error})"
            if self._is_lost:
                return  # already reported
            self._is_lost = True
        lost = f"; {_describe(missing)}" if missing else ""
        warnings.warn(f"{self._path} was {change} during the run: {action}{lost}", stacklevel=2)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._check()
            self._pending.append(json_line(values).encode())
            while self._pending and self._append(self._file, self._pending[0]):
                self._remember(self._pending.pop(0))
            self._size = os.fstat(self._file.fileno()).st_size

    def _append(self, file: IO[bytes], line: bytes) -> bool:
        """Append a line and return True. If the disk is full, remove a partial line and return False."""
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) == len(line):
                return True
        except OSError as error:
            if len(self._pending) == 1:
                message = f"{self._path}: {error.strerror}. The run continues, and the lines are written later"
                warnings.warn(message, stacklevel=2)
        file.truncate(size)
        return False


def json_line(values: Mapping[str, Any]) -> str:
    """Format values as a line of strict JSON."""
    nonfinite = {name: str(x) for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
    line: dict[str, Any] = {name: None if name in nonfinite else x for name, x in values.items()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl that have a step. Other lines, and a missing file, are ignored."""
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(line := json.loads(text), dict) and isinstance(line.get("step"), int):
                    yield line


def missing_steps(lines: Iterable[Mapping[str, Any]], last_step: int) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of the steps from 1 to `last_step` that have no line with a loss."""
    steps = sorted({line["step"] for line in lines if "loss" in line} & {*range(1, last_step + 1)})

    edges = [0, *steps, last_step + 1]
    return [(before + 1, after - 1) for before, after in itertools.pairwise(edges) if after - before > 1]


def _describe(missing: Sequence[tuple[int, int]], limit: int = 4) -> str:
    ranges = ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in missing[:limit])
    return f"it lacks steps {ranges}" + (", …" if len(missing) > limit else "")


def _valid_lines(content: bytes, *, last_step: float = math.inf) -> list[bytes]:
    """Return the complete lines of steps and validations up to a step, without recorded gaps."""

    def is_valid(line: bytes) -> bool:
        try:
            values = json.loads(line)
            return line.endswith(b"\n") and values["step"] <= last_step and "missing_from" not in values
        except (ValueError, TypeError, KeyError, RecursionError):
            return False

    return [line for line in content.splitlines(keepends=True) if is_valid(line)]


def _with_gaps(lines: Sequence[bytes], last_step: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Return the lines in order, with a line for each range of missing steps, and these ranges."""
    values = [json.loads(line) for line in lines]
    missing = missing_steps(values, last_step)
    if not missing:
        return list(lines), []
    gaps = [(first, json_line({"step": last, "missing_from": first}).encode()) for first, last in missing]
    numbered = [(value["step"], line) for value, line in zip(values, lines, strict=True)]
    return [line for _, line in sorted([*gaps, *numbered], key=lambda entry: entry[0])], missing
