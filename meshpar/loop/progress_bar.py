"""Hook that shows the progress of a run: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import jax

from meshpar.loop.fit import PHASES, Hook, Record, Run, Validation
from meshpar.sharding.units import human_count

_REFRESH_S = 0.1
"""Minimum time between two updates of the bar. A thread of rich draws it every 0.25 s."""


class ProgressBar(Hook):
    """Hook that shows the step, the loss, tokens per second and the remaining time, on process 0.

    Args:
      stream: the output stream; standard output by default.
      every_s: seconds between two plain lines.
      also: function from the last record to additional texts.

    Example:
      >>> progress_bar = mp.hooks.ProgressBar(every_s=60)
    """

    def __init__(
        self, *, stream: IO[str] | None = None, every_s: float = 10.0,
        also: Callable[[Record], Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self._stream, self._every_s, self._also = stream, every_s, also
        self._bar: Any = None
        self._task: Any = None
        self._out: IO[str] | None = None
        self._shown_at, self._shown_step = -math.inf, -1
        self._first: tuple[int, float] | None = None
        self._mean_step_s: float | None = None

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._out = self._stream or sys.stdout
        if self._out is None or self._out.closed:
            self._out = None
        elif self._out.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _rich_bar(self._out, run)
            self._task = self._bar.add_task("train", total=run.steps, completed=run.step, numbers="")
            self._bar.start()

    def on_record(self, run: Run, record: Record) -> None:
        now = time.monotonic()
        self._first = self._first or (record.step, now)
        # A moving average over about ten steps, without the first step, which includes the compilation.
        if record.step > self._first[0]:
            mean_s = self._mean_step_s
            self._mean_step_s = record.seconds if mean_s is None else 0.9 * mean_s + 0.1 * record.seconds
        if now - self._shown_at >= (self._every_s if self._bar is None else _REFRESH_S):
            self._show(run)

    def on_validation(self, run: Run, validation: Validation) -> None:
        self._show(run)

    def on_end(self, run: Run, reason: str) -> None:
        if run.last is not None and run.last.step != self._shown_step:
            self._show(run)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if reason != "done" and self._out is not None:
            self._print(f"stopped at step {run.step} of {run.steps}: {reason}")
        self._out = None

    def _show(self, run: Run) -> None:
        if self._out is None or run.last is None:
            return
        self._shown_at, self._shown_step = time.monotonic(), run.last.step
        numbers = "  ".join(self._numbers(run, run.last))
        if self._bar is not None:
            self._bar.update(self._task, completed=run.last.step, numbers=numbers)
        else:
            self._print(f"step {run.last.step}/{run.steps}  {numbers}")

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._out, flush=True)
        except (OSError, ValueError):  # the reader of a pipe has ended, or the stream was closed: training goes on
            self._out = None

    def _numbers(self, run: Run, last: Record) -> Iterator[str]:
        yield f"loss {last.loss:.4g}"
        if run.validation is not None and "loss" in run.validation.metrics:
            yield f"val {run.validation.metrics['loss']:.4g}"
        if last.tokens_per_s is not None:
            tokens = last.tokens_per_s * last.seconds
            yield f"{human_count(tokens / (self._mean_step_s or last.seconds))} tokens/s"
        if self._also is not None:
            yield from self._also(last)
        if run.skipped:
            yield f"{run.skipped} skipped"
        # The wall time since the first step includes validations and saves, and excludes the compilation.
        if self._first is not None and self._first[0] < last.step < run.steps:
            step_s = (time.monotonic() - self._first[1]) / (last.step - self._first[0])
            yield f"{datetime.timedelta(seconds=round(step_s * (run.steps - last.step)))} left"


def _rich_bar(stream: IO[str], run: Run) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Status(ProgressColumn):
        """The current phase and the metrics. A thread of rich renders it, even during a compilation."""

        def render(self, task: Task) -> Text:
            phase = run.phase
            since_s = 0.0 if phase is None else time.perf_counter() - phase[1]
            status = f"{PHASES[phase[0]]}, {since_s:.0f} s  " if phase is not None and since_s > 0.2 else ""
            return Text(status + task.fields["numbers"])

    status = Status(table_column=Column(no_wrap=True))
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), status
    return Progress(*columns, console=Console(file=stream, force_terminal=True), refresh_per_second=4, expand=True)
