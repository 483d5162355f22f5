"""Profile: a trace of some steps, with the phases of the loop by name, for XProf and `meshpar trace`."""

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

from meshpar.loop.fit import Hook, Run
from meshpar.sharding.host_resources import replace_file
from meshpar.sharding.types import problem

ABOUT = "about.json"
"""Beside the trace: which steps it has, and the program's fingerprint."""


def parse_steps(text: str) -> tuple[int, int]:
    """`10:15` as the first and the last step. Raises `ValueError`: something else, or no step between them."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        exists = "it is the first step, a colon and the last step, counted from 1"
        raise problem(f"--profile {text}", "trace these steps", exists, "write --profile 10:15")
    return first, last


def check_steps(first: int, last: int, *, done: int, steps: int) -> None:
    """Check that a run that has `done` of its `steps` takes those from `first` to `last`.

    A resumed run may have taken the first of them before.

    Raises:
      ValueError: the last one is not among the steps that it still takes.
    """
    if not done < last <= steps:
        exists, fix = f"this run takes steps {done + 1} to {steps}", "name steps among these"
        if done >= steps:
            exists, fix = f"the run has taken all its {steps}", "leave --profile out, or give it more --steps"
        raise problem(f"a profile of steps {first} to {last}", "trace them", exists, fix)


class Profile(Hook):
    """Traces steps by `jax.profiler`, on every process; each begins and ends with devices at rest.

    Several processes write one profile, with a trace each: `<host>_process_3.xplane.pb`.

    Host threads have `meshpar:step` around each dispatch and `meshpar:data`, `:compile`, `:save`, `:validate` around
    what else the loop does. On devices an operation has its scope: `gradients` (with `transpose(...)` in the backward
    pass) and `update`, the optimizer.
    """

    order = 3  # a save before the first step is not in it, one behind the last is

    def __init__(self, folder: str | Path, *, first: int, last: int, about: Mapping[str, Any] | None = None) -> None:
        self._folder, self._first, self._last, self._about = Path(folder), first, last, dict(about or {})
        self._is_on = False

    def on_start(self, run: Run) -> None:
        check_steps(self._first, self._last, done=run.first_step, steps=run.steps)
        self._begin(run)

    def on_dispatched(self, run: Run) -> None:
        if self._is_on and run.step >= self._last:
            self._end(run)
        self._begin(run)

    def on_end(self, run: Run, reason: str) -> None:
        if self._is_on:
            self._end(run)

    def _begin(self, run: Run) -> None:
        if self._is_on or run.step + 1 != max(self._first, run.first_step + 1):
            return
        run.drain()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be in it, and slow what is measured
        if jax.process_count() > 1:
            options.session_id = self._session = _now_of_process_0()
        self._is_on = self._tried(lambda: jax.profiler.start_trace(str(self._own), profiler_options=options))
        self._from = run.step + 1

    def _end(self, run: Run) -> None:
        self._is_on = False
        run.drain()
        if not self._tried(jax.profiler.stop_trace):
            return
        if self._own != self._folder:
            self._tried(self._bring_together)
        if jax.process_index() == 0:
            about = {**self._about, "first_step": self._from, "last_step": run.step}
            self._tried(lambda: replace_file(self._folder / ABOUT, json.dumps(about) + "\n"))

    @property
    def _own(self) -> Path:
        """Where this process writes: jax calls a trace by its host, and processes of one host would overwrite it."""
        return self._folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else self._folder

    def _bring_together(self) -> None:
        """Put this process's files beside the others', where XProf sees them as hosts of one profile."""
        within = Path("plugins", "profile", self._session)
        (self._folder / within).mkdir(parents=True, exist_ok=True)
        for file in (self._own / within).iterdir():
            host, dot, kind = file.name.partition(".")
            file.replace(self._folder / within / f"{host}_{self._own.name}{dot}{kind}")
        shutil.rmtree(self._own)

    def _tried(self, call: Any) -> bool:
        try:
            call()
            return True
        except (RuntimeError, OSError) as error:  # another profiler is at work, or the disk is full
            warnings.warn(f"no profile was written: {error}; the run goes on", stacklevel=3)
            return False


def _now_of_process_0() -> str:
    """The time as jax names a profile by it, the same on every process."""
    from jax.experimental import multihost_utils

    now = multihost_utils.broadcast_one_to_all(np.int32(time.time()))
    return time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(int(now)))
