"""Hook that profiles a range of steps with `jax.profiler`, for XProf and `meshpar trace`."""

from __future__ import annotations

import json
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.loop.fit import Hook, Run, Step
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import replace_file
from meshpar.sharding.types import PyTree
from meshpar.training.state import TrainState

ABOUT = "about.json"
"""File next to the trace, with the profiled steps and the program's fingerprint."""


def parse_steps(text: str) -> tuple[int, int]:
    """Parse `10:15` into the first and last step to profile; raise `ValueError` for other texts."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        reason = "expected the first step, a colon and the last step, counted from 1"
        raise problem(f"--profile {text}", "profile these steps", reason, "write --profile 10:15", code="bad-syntax")
    return first, last


def check_steps(first: int, last: int, *, done: int, steps: int) -> None:
    """Check that step `last` is ahead for a run of `steps` steps that has finished `done` steps.

    A resumed run may already have finished some of the profiled steps.
    """
    if not done < last <= steps:
        reason = f"steps {done + 1} to {steps} are left" if done < steps else f"all {steps} steps are finished"
        fix = "choose remaining steps, or increase --steps"
        raise problem("--profile", f"profile steps {first} to {last}", reason, fix, code="out-of-range")


class Profile(Hook):
    """Hook that traces steps `first` to `last`, counted from 1, and saves the values `about` in about.json.

    All processes write to the same profile. The trace of process 3 is `<host>_process_3.xplane.pb`. Devices are idle
    when the trace starts and ends.

    Host threads have an event `meshpar:step` for each dispatch, and `meshpar:data`, `:compile`, `:save` and
    `:validate` for the other phases of the loop. Device operations carry their scope: `gradients` (with
    `transpose(...)` in the backward pass) and `update` (the optimizer).
    """

    order = 3  # after `Checkpointer`, so that a save after the last step is traced and a save before the first is not

    def __init__(self, folder: str | Path, *, first: int, last: int, about: Mapping[str, Any] | None = None) -> None:
        self._folder, self._first, self._last, self._about = Path(folder), first, last, dict(about or {})
        self._is_tracing = False
        self._next_step = 0

    def step(self, step: Step, profiled: Step) -> Step:
        """Return a step that runs `profiled` for the traced steps, and otherwise `step`.

        The step before the first traced step also runs `profiled`, so that its compilation is not traced.
        """

        def run(state: TrainState, batch: PyTree) -> tuple[TrainState, Mapping[str, Any]]:
            return (profiled if self._first - 1 <= self._next_step <= self._last else step)(state, batch)

        return run

    def on_start(self, run: Run) -> None:
        check_steps(self._first, self._last, done=run.first_step, steps=run.steps)
        self._next_step = run.first_step + 1
        # jax names a trace after the host, so processes on the same host need separate folders.
        several = jax.process_count() > 1
        self._process_folder = self._folder / f"process_{jax.process_index()}" if several else self._folder
        self._begin(run)

    def on_dispatched(self, run: Run) -> None:
        self._next_step = run.step + 1
        if self._is_tracing and run.step >= self._last:
            self._end(run)
        self._begin(run)

    def on_end(self, run: Run, reason: str) -> None:
        if self._is_tracing:
            self._end(run)

    def _begin(self, run: Run) -> None:
        if self._is_tracing or run.step + 1 != max(self._first, run.first_step + 1):
            return
        run.drain()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python calls would slow down the steps
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            # jax names a profile after the start time. All processes use the time of process 0.
            now = multihost_utils.broadcast_one_to_all(np.int32(time.time()))
            self._session = time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(int(now)))
            options.session_id = self._session
        folder = str(self._process_folder)
        self._is_tracing = self._attempt(lambda: jax.profiler.start_trace(folder, profiler_options=options))
        self._from_step = run.step + 1

    def _end(self, run: Run) -> None:
        self._is_tracing = False
        run.drain()
        if not self._attempt(jax.profiler.stop_trace):
            return
        if self._process_folder != self._folder:
            self._attempt(self._merge)
        if jax.process_index() == 0:
            about = {**self._about, "first_step": self._from_step, "last_step": run.step}
            self._attempt(lambda: replace_file(self._folder / ABOUT, json.dumps(about) + "\n"))

    def _merge(self) -> None:
        """Move this process's files into the shared profile, where XProf shows each process as a host."""
        session = Path("plugins", "profile", self._session)
        (self._folder / session).mkdir(parents=True, exist_ok=True)
        for file in (self._process_folder / session).iterdir():
            host, dot, extension = file.name.partition(".")
            file.replace(self._folder / session / f"{host}_{self._process_folder.name}{dot}{extension}")
        shutil.rmtree(self._process_folder)

    def _attempt(self, call: Any) -> bool:
        try:
            call()
            return True
        except (RuntimeError, OSError) as error:  # a profiler is already active, or the disk is full
            warnings.warn(f"no profile was written: {error}. The run continues.", stacklevel=3)
            return False
