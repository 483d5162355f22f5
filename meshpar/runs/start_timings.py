"""Duration of each phase of a run, until its first step has finished."""

from __future__ import annotations

import time

import jax

from meshpar.loop.fit import Hook, Run
from meshpar.runs.background_compilation import BackgroundCompilation
from meshpar.runs.screen import Screen


class Phases:
    """Durations of consecutive phases. There are no gaps, so their sum is the elapsed time.

    Args:
      start_s: start of the first phase by `time.perf_counter`; by default now.

    Attributes:
      seconds: duration of each phase, in the order of their first ends. A repeated phase is summed.
    """

    def __init__(self, start_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._start_s = time.perf_counter() if start_s is None else start_s

    def end(self, phase: str) -> None:
        """End a phase that started at the end of the previous phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._start_s
        self._start_s = now


class StartTimings(Hook):
    """Hook that blocks until the first step has finished and prints the durations of all phases.

    Args:
      phases: the phases until the call of `fit`.
      screen: output of the run.
      compilation: compilation of the step in a thread; None if the first step compiles it.
    """

    order = BackgroundCompilation.order + 1

    def __init__(self, phases: Phases, screen: Screen, compilation: BackgroundCompilation | None) -> None:
        self._phases, self._screen, self._compilation = phases, screen, compilation

    def on_start(self, run: Run) -> None:
        self._phases.end("compile")

    def on_dispatched(self, run: Run) -> None:
        if run.step != run.first_step + 1:
            return
        jax.block_until_ready(run.state.step)
        self._phases.end("first step")
        seconds = {**self._phases.seconds, "until the first step": sum(self._phases.seconds.values())}
        if self._compilation is not None and self._compilation.compile_s is not None:
            seconds["compilation of the step in a thread"] = self._compilation.compile_s
        self._screen.fields("timings", {name: f"{duration:.2f} s" for name, duration in seconds.items()})
