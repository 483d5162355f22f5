"""metrics.jsonl: a hook that writes a JSON line per step and per validation, and readers of the file."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.loop.fit import Hook, Record, Run, Validation
from meshpar.sharding.host_resources import check_file, open_no_link, replace_file


class MetricsFile(Hook):
    """Hook that writes metrics.jsonl, on process 0. A killed run leaves at most its last line incomplete.

    The line of a step has `step, loss, tokens_per_s, mfu, seconds` and its other metrics, and `"validation": true` if a
    validation follows. The line of a validation has `step`, each metric with the prefix `val_`, and `seconds`. JSON has
    no NaN: non-finite values are null, and `nonfinite` contains them as text by name. A resumed run removes the lines
    of the steps that it repeats, and warns if lines of earlier steps are missing.

    If the file is removed during the run, later lines are written to a new file. A line that cannot be written is lost,
    with a warning. `meshpar train` ends with an error that names the missing lines.

    Args:
      path: the file. Its folder is created if necessary.
      also: function from a record to additional values for the line of a step: numbers, or lists and dicts of numbers.

    Example:
      >>> metrics_file = mp.hooks.MetricsFile("run/metrics.jsonl", also=lambda record: {"epoch": record.step // 100})
    """

    def __init__(
        self, path: str | os.PathLike[str], *, also: Callable[[Record], Mapping[str, Any]] | None = None
    ) -> None:
        self._path, self._also = Path(path), also
        self._writes = self._is_cut = self._was_warned = False
        self._file: io.FileIO | None = None

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        content = b""
        if self._path.exists():
            check_file(self._path, str(self._path), "move it away: the run writes its own", max_bytes=None)
            content = self._path.read_bytes()
        lines = _valid_lines(content, last_step=run.first_step)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, b"".join(lines))
        self._writes = True
        if missing := describe_missing([json.loads(line) for line in lines], run.first_step):
            warnings.warn(f"{self._path}: it lacks {missing}, which the run has completed", stacklevel=2)

    def on_record(self, run: Run, record: Record) -> None:
        more = {} if self._also is None else self._also(record)
        mark = {"validation": True} if record.step == run.validates_after else {}
        self._write({"step": record.step, **record.scalars, **mark, **more})

    def on_validation(self, run: Run, validation: Validation) -> None:
        metrics = {f"val_{name}": value for name, value in validation.metrics.items()}
        self._write({"step": validation.step, **metrics, "seconds": validation.seconds})

    def _write(self, values: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            line = b"\n" * self._is_cut + json_line(values).encode()
            if self._open().write(line) < len(line):  # an unbuffered file writes the part that fits on the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_cut = False
        except OSError as error:
            self._is_cut = True
            if not self._was_warned:
                self._was_warned = True
                text = f"the line of step {values['step']} is lost ({error.strerror or error}). The run continues"
                warnings.warn(f"{self._path}: {text}", stacklevel=2)

    def _open(self) -> io.FileIO:
        """Return the open file. It is unbuffered, and opened again if it was removed, so that no later line is lost."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self._path)):
                    return self._file
            self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(open_no_link(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        return self._file

    def on_end(self, run: Run, reason: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_ENCODER = json.JSONEncoder(allow_nan=False)


def json_line(values: Mapping[str, Any]) -> str:
    """Format values as a line of strict JSON."""
    nonfinite = {name: str(x) for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
    line: dict[str, Any] = {name: None if name in nonfinite else x for name, x in values.items()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return _ENCODER.encode(line) + "\n"


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


def missing_validations(lines: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the steps that were followed by a validation without a line."""
    expected, written = set[int](), set[int]()
    for line in lines:
        if line.get("validation") is True:
            expected.add(line["step"])
        if any(name.startswith("val_") for name in line):
            written.add(line["step"])
    return sorted(expected - written)


def describe_missing(lines: Sequence[Mapping[str, Any]], last_step: int) -> str:
    """Return the missing lines of steps and validations as text, or an empty string."""
    validations = [(step, step) for step in missing_validations(lines)]
    texts = _describe("steps", missing_steps(lines, last_step)), _describe("validations after steps", validations)
    return " and ".join(filter(None, texts))


def _describe(name: str, ranges: Sequence[tuple[int, int]], limit: int = 4) -> str:
    numbers = [f"{first} to {last}" if first < last else f"{first}" for first, last in ranges]
    return f"{name} {', '.join([*numbers[:limit], *['…'] * (len(numbers) > limit)])}" if numbers else ""


def _valid_lines(content: bytes, *, last_step: float = math.inf) -> list[bytes]:
    """Return the complete lines of steps and validations up to a step."""

    def is_valid(line: bytes) -> bool:
        try:
            return json.loads(line)["step"] <= last_step
        except (ValueError, TypeError, KeyError, RecursionError):
            return False

    return [line + b"\n" for line in content.split(b"\n") if is_valid(line)]
