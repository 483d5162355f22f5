"""fit: steps, one after another, and the hooks that watch them; nothing is compiled here.

    batches ─► step ─► step ─► step (just dispatched)
                │                └─ on_dispatched: checkpoints, validation, a request to stop
                └─ read back two steps late ─► on_record: progress, metrics.jsonl

The loop never waits for the step it has just dispatched, nor for the one before it: devices always have work.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from meshpar.layers.auxiliary import is_counted
from meshpar.layers.losses import LOSS_WEIGHT
from meshpar.loop import heartbeat as watchdog
from meshpar.loop import signals as interrupts
from meshpar.loop.checkpoint import Checkpoints, NoRoomError
from meshpar.loop.coordination import Pod, StopAgreement, check_shared, this_pod
from meshpar.sharding.host_resources import check_file, open_no_link, replace_file
from meshpar.sharding.types import MeshparError, PyTree, check_positive_int, problem
from meshpar.sharding.units import human_count
from meshpar.training.state import Setup, TrainState

STEPS_IN_FLIGHT = 2
"""Steps that are dispatched and not waited for. Two hide the host's work. More would gain nothing, and on CPU host
devices the threads of several programs, each waiting for its own collectives, take the cores from each other."""

PHASES = {
    "compile": "compiling the first step",
    "data": "waiting for data",
    "save": "saving",
    "validate": "validating",
}
"""What `fit` does beside steps, by the name it has in goodput and in profiles."""

MOST_KEPT_BYTES = 16 << 20
"""Bytes of metrics.jsonl that are kept in memory, for the case that the file is cut."""
_RESERVED = ("step", "loss", "seconds", "tokens_per_s", "mfu", "goodput")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The numbers of one finished training step."""

    step: int
    """Steps taken when it had finished; the first is 1."""
    loss: float
    seconds: float
    """From the end of the step before to its own; the first one's holds the compilation."""
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOP utilisation: of what the devices can do at their best, the part that went into the model."""
    metrics: dict[str, float]
    """The step's other metrics."""
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Those of the step's metrics that are no scalars: what MoE layers report, see `meshpar.loop.expert_load`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The numbers of one pass over the validation batches."""

    step: int
    """Steps the parameters had been trained for."""
    metrics: dict[str, float]
    """Means over the batches; `loss` is among them."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a run ended."""

    state: TrainState
    step: int
    reason: str
    """"done", "interrupted", or what a hook gave to `Run.stop`."""
    last: Record | None
    """The last step's numbers; None when no step was taken."""
    validation: Validation | None
    """The last validation."""
    skipped: int
    """Skipped updates since step 0: those that were not finite."""
    tokens_per_s: float | None
    """Mean over all steps of this call but its first, which holds the compilation."""
    seconds: float
    """Wall-clock time of this call."""


class Hook:
    """What `fit` calls on the way. Derive from it and override what is needed; each method does nothing by default."""

    order = 0
    """Hooks are called by this number, then as given. Saving (1) sees what all others have done; `Preemption` is 2."""

    def on_start(self, run: Run) -> None:
        """Before the first step; `run.step` is where it starts."""

    def on_dispatched(self, run: Run) -> None:
        """After a step was dispatched: `run.state` is its result, whose arrays the devices may still be computing.

        The next step takes the arrays' memory: keep none of them.
        """

    def on_record(self, run: Run, record: Record) -> None:
        """The numbers of a finished step: in order, each once, up to `STEPS_IN_FLIGHT` steps late."""

    def on_validation(self, run: Run, validation: Validation) -> None:
        """The numbers of a validation, after the records of all steps before it."""

    def on_end(self, run: Run, reason: str) -> None:
        """After the last record, however the run ends: "error" after an exception, "nonfinite" after bad numbers."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Run:
    """A run under way, as hooks see it."""

    state: TrainState
    """After the step dispatched last."""
    batches: Any
    """What has `get_state`, where anything has."""
    steps: int
    """Where it is to end."""
    hooks: Sequence[Hook]
    tokens_per_step: float | None
    flops_per_step: float | None
    peak_flops_per_s: float | None
    raise_nonfinite: bool
    max_skipped: int
    """Skipped updates in a row at which the run fails."""
    last: Record | None = None
    validation: Validation | None = None
    training_s: float = 0.0
    """Time of all recorded steps but the first."""
    reason: str | None = None
    """Why the run is to stop; None while it goes on."""
    steps_s: float = 0.0
    """Time of all recorded steps, without what `lost_s` holds."""
    lost_s: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds in which no step was computed, by phase."""
    phase: tuple[str, float] | None = None
    """Of `PHASES`, the one it is in and since when, by `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.step = self.first_step = int(self.state.step)
        """Steps dispatched since step 0, and where this run started."""
        self.skipped = int(self.state.skipped)
        """Skipped updates, as far as records have come."""
        self._skipped_in_a_row = 0
        self.iterator = iter(self.batches)
        self.batches = self.iterator if hasattr(self.iterator, "get_state") else self.batches
        self._in_flight: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._read_at = self._began_at = time.perf_counter()
        self._lost_at = self.lost_s.copy()

    def stop(self, reason: str) -> None:
        """Dispatch no further step; the first reason given is kept."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A block that is of one of `PHASES`: for the watchdog, the progress, goodput, and profiles."""
        before, began = self.phase, time.perf_counter()
        self.phase = (phase, began)
        try:
            with watchdog.busy(PHASES[phase]), jax.profiler.TraceAnnotation(f"meshpar:{phase}"):
                yield
        finally:
            self.phase = before
            # Steps that were dispatched before may go on behind a wait for data: then nothing is lost.
            if phase != "data" or self._is_idle():
                self.lost_s[phase] += time.perf_counter() - began

    def _is_idle(self) -> bool:
        """Whether the devices have done all that was dispatched."""
        is_ready = getattr(self._in_flight[-1][1].get("loss"), "is_ready", None) if self._in_flight else None
        return not self._in_flight or (is_ready is not None and bool(is_ready()))

    @property
    def tokens_per_s(self) -> float | None:
        """Mean over all recorded steps but the first, which holds the compilation."""
        steps = 0 if self.last is None else self.last.step - self.first_step - 1
        return None if self.tokens_per_step is None or steps < 1 else steps * self.tokens_per_step / self.training_s

    @property
    def elapsed_s(self) -> float:
        """Since the call of `fit`."""
        return time.perf_counter() - self._began_at

    def drain(self) -> None:
        """Wait for all that was dispatched, and call the hooks. What a hook does next counts as no step's time."""
        self._read(leave=0)

    def result(self) -> FitResult:
        """How it ended.

        Raises:
          ValueError: the batches ended too early.
        """
        assert self.reason is not None
        if self.reason == "exhausted":
            asked = f"give the batch of step {self.step + 1} of {self.steps}"
            fix = f"use batches that repeat, or steps={self.step}"
            raise problem("batches", asked, f"they ended after {self.step - self.first_step}", fix)
        return FitResult(
            state=self.state,
            step=self.step,
            reason=self.reason,
            last=self.last,
            validation=self.validation,
            skipped=self.skipped,
            tokens_per_s=self.tokens_per_s,
            seconds=self.elapsed_s,
        )

    def publish(self, validation: Validation) -> None:
        self.validation = validation
        for hook in self.hooks:
            hook.on_validation(self, validation)

    def data_state(self) -> dict[str, Any] | None:
        """Where the data stands, None when it cannot say."""
        get_state = getattr(self.batches, "get_state", None)
        return None if get_state is None else get_state()

    def advance(self, step: Any) -> None:
        """Dispatch one step, and read back the one that has left the window."""
        if not self._in_flight:  # the devices rest: what went before is no step's time
            self._read_at, self._lost_at = time.perf_counter(), self.lost_s.copy()
        try:
            with self.within("data"):
                batch = next(self.iterator)
        except StopIteration:
            self.stop("exhausted")
            return
        compiles = self.within("compile") if self.step == self.first_step else contextlib.nullcontext()
        with compiles, jax.profiler.StepTraceAnnotation("meshpar:step", step_num=self.step + 1):
            self.state, metrics = step(self.state, batch)
        self.step += 1
        if self.step == self.first_step + 1:
            _check_names(metrics)
        self._in_flight.append((self.step, metrics))
        for hook in self.hooks:
            hook.on_dispatched(self)
        self._read(leave=STEPS_IN_FLIGHT)

    def _read(self, *, leave: int) -> None:
        while len(self._in_flight) > leave:
            step, metrics = self._in_flight.popleft()
            self._tell(self._record(step, *_on_host(metrics)))

    def _record(self, step: int, scalars: dict[str, float], arrays: dict[str, np.ndarray]) -> Record:
        now = time.perf_counter()
        seconds, self._read_at = max(now - self._read_at, 1e-9), now
        lost, self._lost_at = sum(self.lost_s.values()) - sum(self._lost_at.values()), self.lost_s.copy()
        self.steps_s += max(seconds - lost, 0.0)
        tokens, flops, peak = self.tokens_per_step, self.flops_per_step, self.peak_flops_per_s
        return Record(
            step=step,
            loss=scalars.pop("loss"),
            seconds=seconds,
            tokens_per_s=None if tokens is None else tokens / seconds,
            mfu=None if flops is None or not peak else flops / (seconds * peak),
            metrics=scalars,
            arrays=arrays,
        )

    def _tell(self, record: Record) -> None:
        finite = record.metrics.get("finite", True)
        self.training_s += 0.0 if self.last is None else record.seconds
        self.last = record
        self.skipped += not finite
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        for hook in self.hooks:
            hook.on_record(self, record)
        if not finite and self.raise_nonfinite:
            self.reason = "nonfinite"
            exists = f"its loss is {record.loss}, its gradient norm {record.metrics.get('grad_norm')}: it was skipped"
            fix = "look at the batch, lower the learning rate or clip gradients; or train with nonfinite='skip'"
            raise problem(f"step {record.step}", "update the parameters", exists, fix)
        in_a_row, is_last = self._skipped_in_a_row, record.step == self.steps
        if in_a_row >= self.max_skipped or (is_last and in_a_row == record.step - self.first_step):
            self.reason = "nonfinite"
            norm = record.metrics.get("grad_norm")
            exists = f"{in_a_row} updates in a row were skipped: its loss is {record.loss}, its gradient norm {norm}"
            fix = "look at the data, lower the learning rate or clip gradients; a larger max_skipped waits longer"
            raise problem(f"step {record.step}", "update the parameters", exists, fix)


def fit(
    step: Any,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int,
    hooks: Sequence[Hook] = (),
    tokens_per_step: float | None = None,
    flops_per_step: float | None = None,
    peak_flops_per_s: float | None = None,
    max_skipped: int = 100,
) -> FitResult:
    """Train until `state.step` is `steps`; a restored state simply goes on.

    Args:
      step: from `train_step`.
      state: donated: use the one in the result.
      batches: gives a batch for each step. With `get_state` its position is saved in checkpoints.
      steps: where to end, counted from step 0.
      hooks: called on the way, ordered by `Hook.order`.
      tokens_per_step: tokens in a global batch, for tokens per second.
      flops_per_step: FLOPs the model needs for a global batch, for the utilisation.
      peak_flops_per_s: what all devices of the mesh can do together at their best, for the utilisation.
      max_skipped: how many updates in a row may be skipped by a step with nonfinite="skip".

    Raises:
      ValueError: batches that end too early (hooks have saved by then); a loss or gradients that are not finite, when
        the step was made with nonfinite="raise"; with "skip", `max_skipped` updates in a row, or all, were skipped.
      KeyboardInterrupt: after Ctrl-C, when the step in flight is finished and hooks have saved; not with `Preemption`.
    """
    if isinstance(step, TrainState) or not callable(step) or not hasattr(state, "step"):
        exists = f"its first argument is a {type(step).__name__}, and the second a {type(state).__name__}"
        raise problem("fit", "take steps from a state", exists, "write mp.fit(step, state, batches, steps=...)")
    options = getattr(step, "options", None)
    run = Run(
        state=state,
        batches=batches,
        steps=steps,
        hooks=sorted([*_Progress.if_watched(), *_CtrlC.unless_minded(hooks)], key=lambda hook: hook.order),
        tokens_per_step=tokens_per_step,
        flops_per_step=flops_per_step,
        peak_flops_per_s=peak_flops_per_s,
        raise_nonfinite=getattr(options, "nonfinite", None) == "raise",
        max_skipped=max_skipped,
    )
    del state  # its buffers are the run's: a reference kept here would be one to deleted arrays
    with _hooks_called(run):
        while run.step < run.steps and run.reason is None:
            run.advance(step)
        run.drain()
        run.stop("done")
    return run.result()


@contextlib.contextmanager
def _hooks_called(run: Run) -> Iterator[None]:
    """Start the hooks, and end each that was started however the block ends."""
    started: list[Hook] = []
    try:
        for hook in run.hooks:
            started.append(hook)
            hook.on_start(run)
        yield
    except BaseException as error:
        for late in _ended(started, run, "nonfinite" if run.reason == "nonfinite" else "error"):
            error.add_note(f"then, when hooks were ended: {late}")
        raise
    for late in _ended(started, run, run.reason or "done"):
        raise late


def _ended(hooks: Sequence[Hook], run: Run, reason: str) -> list[Exception]:
    """End every hook; the errors met, for one that fails must not keep others from closing their files."""
    errors = []
    for hook in hooks:
        try:
            hook.on_end(run, reason)
        except Exception as error:
            errors.append(error)
    return errors


def restore_or_init(
    checkpoints: Checkpoints,
    setup: Setup,
    *,
    key: jax.Array | int,
    batches: Any = None,
    init: Callable[[Setup, Any], TrainState] = Setup.init,
) -> TrainState:
    """The state to go on with: the newest sound checkpoint's, with the data moved to where it stood; else a new one.

    Args:
      checkpoints: where to look.
      setup: what the state is made of, from `meshpar.training.state.make_setup`.
      key: for a new state, as in `init_state`.
      batches: the data; moved with `set_state` when the checkpoint says where it stood.
      init: makes a new state of the setup and the key.

    Raises:
      ValueError: as in `Checkpoints.restore`; or the data cannot be moved to where it stood.
    """
    restored = checkpoints.restore(setup)
    if restored is None:
        return init(setup, key)
    if batches is not None:
        move_data(batches, restored.data_state, restored.step)
    return restored.state


def move_data(batches: Any, data_state: Mapping[str, Any] | None, step: int) -> None:
    """Move batches to where a checkpoint's data stood.

    Raises:
      ValueError: the checkpoint does not say where, or the batches cannot be moved.
    """
    if data_state is None or not hasattr(batches, "set_state"):
        raise problem(
            f"data of the run restored at step {step}",
            "go on where it stood",
            "the checkpoint does not say where" if data_state is None else f"{type(batches).__name__} has no set_state",
            "use batches with get_state and set_state, or pass batches=None and move them yourself",
        )
    batches.set_state(data_state)


def _check_names(metrics: Mapping[str, Any]) -> None:
    for name in metrics:
        if name in _RESERVED and name != "loss":
            exists = f"the loop's own numbers have the names {', '.join(_RESERVED)}"
            raise problem(f"metric `{name}`", "be recorded", exists, "give it another name in the loss function")


def _on_host(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics off their devices, as (scalars, arrays); waits for them."""
    read = {name: np.asarray(value) for name, value in metrics.items()}
    scalars = {name: value.item() for name, value in read.items() if value.ndim == 0}
    return scalars, {name: value for name, value in read.items() if value.ndim}


# ---- Checkpoints and validation --------------------------------------------------------------------------------------


class Checkpointer(Hook):
    """Saves every so many steps and at the end, unless the run fails.

    All numbers up to the step that is saved are handed out first: what a checkpoint knows, metrics.jsonl holds too.
    A save that fails before the end, on a full disk for example, is a warning, and the next interval tries again. One
    failure more than `retries` in a row stops the run with an error, and so does a failure at the end. In a pod only a
    full disk is a warning: any other failed write stops all processes, because they wait for each other's part.

    Args:
      checkpoints: where to; stays open.
      every: steps between two saves; None saves at the end only.
      retries: failed saves in a row after which the run goes on.
    """

    order = 1

    def __init__(self, checkpoints: Checkpoints, *, every: int | None, retries: int = 3) -> None:
        self._checkpoints, self._every = checkpoints, _positive("Checkpointer", every)
        self._retries, self._failures, self._newest = retries, 0, -1

    def on_start(self, run: Run) -> None:
        pod = this_pod()
        if pod is not None and "://" not in str(self._checkpoints.folder):
            check_shared(pod, Path(self._checkpoints.folder))

    def on_dispatched(self, run: Run) -> None:
        if self._every is not None and run.step % self._every == 0:
            run.drain()
            with run.within("save"):
                self._save(run)

    def _save(self, run: Run) -> None:
        try:
            self._checkpoints.save(run.state, data_state=run.data_state())
        except MeshparError as error:  # of this save, or of the one before, which was written in the background
            whole = self._checkpoints.steps()
            if jax.process_count() > 1 and not isinstance(error, NoRoomError):
                raise
            # A save that returned may fail later: only a new checkpoint ends the row of failures.
            newest = max(whole, default=-1)
            self._failures = self._failures + 1 if newest == self._newest else 1
            self._newest = newest
            if self._failures > self._retries:
                error.add_note(f"the run stops: {self._failures} saves in a row failed")
                raise
            kept = f"step {whole[-1]} is the last whole checkpoint" if whole else "there is no whole checkpoint yet"
            warnings.warn(f"{error} The run goes on; {kept}.", stacklevel=2)

    def on_end(self, run: Run, reason: str) -> None:
        if reason not in ("error", "nonfinite"):
            with run.within("save"):
                self._checkpoints.save(run.state, data_state=run.data_state(), wait=True)


class Validator(Hook):
    """Metrics of an evaluation step over all validation batches, every so many steps and after the last.

    Means of batches are weighted by their `loss_weight`: the number of counted tokens, or of examples. Integers are
    counts and are summed.

    Args:
      step: from `eval_step`.
      batches: a list, or what can be iterated again and again and gives the same batches each time.
      every: steps between two validations; None validates after the last step only.
      of: from the state to the one that is evaluated, as `mp.ema_params`; None: itself.

    Raises:
      ValueError: an iterator, which would be empty the second time.
    """

    def __init__(
        self,
        step: Any,
        batches: Iterable[PyTree],
        *,
        every: int | None,
        of: Callable[[TrainState], TrainState] | None = None,
    ) -> None:
        if iter(batches) is batches:
            where, fix = "Validator(batches=...)", "give a list, or an object whose __iter__ starts anew"
            raise problem(where, "validate again and again", "an iterator is spent after one pass", fix)
        self._step, self._batches, self._every = step, batches, _positive("Validator", every)
        self._of = of

    def on_dispatched(self, run: Run) -> None:
        if run.step == run.steps or (self._every is not None and run.step % self._every == 0):
            run.drain()
            began = time.perf_counter()
            with run.within("validate"):
                metrics = self._means(run.state if self._of is None else self._of(run.state))
            run.publish(Validation(step=run.step, metrics=metrics, seconds=time.perf_counter() - began))

    def _means(self, state: TrainState) -> dict[str, float]:
        """Combine the scalar metrics of all batches."""
        found: list[dict[str, float]] = []
        counts: set[str] = set()
        in_flight: collections.deque[Mapping[str, Any]] = collections.deque()
        for batch in self._batches:
            in_flight.append(self._step(state, batch))
            counts = {name for name, x in in_flight[-1].items() if is_counted(x)}
            if len(in_flight) > STEPS_IN_FLIGHT:
                found.append(_on_host(in_flight.popleft())[0])
        found += [_on_host(metrics)[0] for metrics in in_flight]
        if not found:
            raise problem("Validator", "take the mean over batches", "there are none", "give at least one batch")
        weights = [metrics.get(LOSS_WEIGHT, 1.0) for metrics in found]
        total = {name: math.fsum(m[name] for m in found) for name in counts & found[0].keys()}
        means = {
            # A batch without weight may have nan as its means, and does not count.
            name: math.fsum(m[name] * w for m, w in zip(found, weights, strict=True) if w) / (math.fsum(weights) or 1)
            for name in found[0].keys() - counts - {LOSS_WEIGHT}
        }
        values = {**total, **means, LOSS_WEIGHT: math.fsum(weights)}
        return {name: values[name] for name in found[0]}


def _positive(what: str, every: int | None) -> int | None:
    if every is not None:
        check_positive_int(what, "the number of steps between two calls", every=every)
    return every


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


class JsonlWriter(Hook):
    """One JSON line a step, and one a validation, in a file that a killed run leaves whole but for its last line.

    A step: `step, loss, tokens_per_s, mfu, seconds` and its other metrics. A validation: `step`, each metric with
    `val_` before it, `seconds`. JSON knows no NaN: such a number is null, and `nonfinite` says by name what it was.
    When a run starts at a step, the lines of later steps, which it will write again, are dropped. Process 0 writes.

    If the file was removed, renamed, replaced or cut, it is written again with the next line, from memory and from what
    is still open, with a warning. Steps whose lines are lost are recorded in a line `step, missing_from`.

    Args:
      path: the file; its folder is made when it is not there.
      also: record -> more for the line of a step, by name: numbers, or lists and dicts of them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, also: Callable[[Record], Mapping[str, Any]] | None = None
    ) -> None:
        self._path, self._also = Path(path), also
        self._file: IO[bytes] | None = None
        self._waiting: list[bytes] = []
        self._kept: collections.deque[bytes] = collections.deque()
        self._size = self._kept_bytes = 0
        self._is_lost = False

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = b""
        if self._path.exists():
            check_file(self._path, str(self._path), "move it away: the run writes its own", most_bytes=None)
            content = self._path.read_bytes()
        lines, missing = _with_gaps(_own_lines(content, last_step=run.first_step), run.first_step)
        self._open(lines, is_changed=b"".join(lines) != content)
        if missing:
            warnings.warn(f"{self._path}: {_missing_words(missing)}, which the run has taken", stacklevel=2)

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
        named = {f"val_{name}": value for name, value in validation.metrics.items()}
        self._write({"step": validation.step, **named, "seconds": validation.seconds})

    def on_end(self, run: Run, reason: str) -> None:
        if self._file is not None:
            self._check()
            self._file.close()
            self._file = None
        if self._waiting:
            warnings.warn(f"{self._path}: the last {len(self._waiting)} lines could not be written", stacklevel=2)
            self._waiting = []

    def _open(self, lines: Iterable[bytes], *, is_changed: bool) -> None:
        """Open the file to add lines to these, which it holds or is to hold."""
        lines = list(lines)
        if is_changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, b"".join(lines))
        number = open_no_link(self._path, os.O_RDWR | os.O_APPEND)
        file = open(number, "a+b", buffering=0)  # noqa: SIM115 - the kernel has a line at once: a killed process loses none
        if self._file is not None:
            self._file.close()
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._kept.clear()
        self._kept_bytes = 0
        for line in lines:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        self._kept.append(line)
        self._kept_bytes += len(line)
        while self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def _check(self) -> None:
        """Write the file again if it is no longer the one that was written."""
        assert self._file is not None
        mine, there = os.fstat(self._file.fileno()), None
        with contextlib.suppress(OSError):
            there = os.lstat(self._path)
        is_cut = mine.st_size < self._size
        if there is not None and os.path.samestat(mine, there) and not is_cut:
            return
        content = os.pread(self._file.fileno(), mine.st_size, 0)
        if is_cut:  # memory has the end: all of it, where it is not longer than `MOST_KEPT_BYTES`
            content = content[: self._size - self._kept_bytes]
            content = content[: content.rfind(b"\n") + 1] + b"".join(self._kept)
        own = _own_lines(content)
        lines, missing = _with_gaps(own, max((json.loads(line)["step"] for line in own), default=0))
        what = "was removed or renamed" if there is None else "was cut" if is_cut else "was replaced"
        try:
            self._open(lines, is_changed=True)
        except OSError as error:
            again = f"it cannot be written again ({error.strerror or error})"
            if self._is_lost:
                return  # said before
            self._is_lost = True
        else:
            again, self._is_lost = "it is written again", False
        lost = f"; {_missing_words(missing)}" if missing else ""
        warnings.warn(f"{self._path} {what} while the run goes on: {again}{lost}", stacklevel=2)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._check()
            self._waiting.append(json_line(values).encode())
            while self._waiting and self._written(self._file, self._waiting[0]):
                self._keep(self._waiting.pop(0))
            self._size = os.fstat(self._file.fileno()).st_size

    def _written(self, file: IO[bytes], line: bytes) -> bool:
        """Whether the disk had room for a line; what it took of one is taken back, and the line waits."""
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) == len(line):
                return True
        except OSError as error:
            if len(self._waiting) == 1:
                warnings.warn(f"{self._path}: {error.strerror}; the run goes on, and lines wait for room", stacklevel=2)
        file.truncate(size)
        return False


def json_line(values: Mapping[str, Any]) -> str:
    """Numbers as one line of strict JSON, ended by a newline."""
    odd = {name: str(x) for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
    line: dict[str, Any] = {name: None if name in odd else x for name, x in values.items()}
    if odd:
        line["nonfinite"] = odd
    return json.dumps(line, allow_nan=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, each with its `step`; what is no such line was someone else's. No file: none."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict) and isinstance(found.get("step"), int):
                    yield found


def missing_steps(lines: Iterable[Mapping[str, Any]], last_step: int) -> list[tuple[int, int]]:
    """Return the ranges of steps, first and last, from 1 to `last_step` that have no line with a loss."""
    found = {line["step"] for line in lines if "loss" in line}
    missing: list[tuple[int, int]] = []
    for step in range(1, last_step + 1):
        if step in found:
            continue
        if missing and missing[-1][1] == step - 1:
            missing[-1] = (missing[-1][0], step)
        else:
            missing.append((step, step))
    return missing


def _missing_words(missing: Sequence[tuple[int, int]], most: int = 4) -> str:
    shown = ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in missing[:most])
    return f"it lacks steps {shown}" + (", …" if len(missing) > most else "")


def _own_lines(content: bytes, *, last_step: float = math.inf) -> list[bytes]:
    """Return the lines of steps and validations up to a step, without recorded gaps."""
    return [line for line in content.splitlines(keepends=True) if _is_up_to(line, last_step)]


def _is_up_to(line: bytes, last_step: float) -> bool:
    try:
        found = json.loads(line)
        return line.endswith(b"\n") and found["step"] <= last_step and "missing_from" not in found
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _with_gaps(lines: Sequence[bytes], last_step: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Return the lines with one more for each range of missing steps, and these ranges."""
    found = [(json.loads(line), line) for line in lines]
    missing = missing_steps((values for values, _ in found), last_step)
    gaps = [json_line({"step": last, "missing_from": first}).encode() for first, last in missing]
    if not gaps:
        return list(lines), []
    of_gaps = [(first, gap) for (first, _), gap in zip(missing, gaps, strict=True)]
    in_order = sorted([*of_gaps, *((values["step"], line) for values, line in found)], key=lambda one: one[0])
    return [line for _, line in in_order], missing


# ---- Progress --------------------------------------------------------------------------------------------------------


class ProgressBar(Hook):
    """How far it is: a bar in a terminal, plain lines elsewhere. Process 0 shows it.

    Args:
      stream: where to; standard output by default.
      every_s: seconds between two plain lines.
      also: the last record -> more to say about it.
    """

    def __init__(
        self,
        *,
        stream: IO[str] | None = None,
        every_s: float = 10.0,
        also: Callable[[Record], Sequence[str]] | None = None,
    ) -> None:
        self._stream, self._every_s, self._also = stream, every_s, also
        self._bar: Any = None
        self._task: Any = None
        self._out: IO[str] | None = None
        self._shown_at, self._shown_step = -math.inf, -1
        self._first: tuple[int, float] | None = None
        self._pace_s: float | None = None

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._out = self._stream or sys.stdout
        if _is_terminal(self._out):
            self._bar = _rich_bar(self._out, run)
            self._task = self._bar.add_task("train", total=run.steps, completed=run.step, numbers="")
            self._bar.start()

    def on_record(self, run: Run, record: Record) -> None:
        now = time.monotonic()
        self._first = self._first or (record.step, now)
        # Paces differ from step to step; the mean of about the last ten is steady and still follows.
        if record.step > self._first[0]:
            self._pace_s = record.seconds if self._pace_s is None else 0.9 * self._pace_s + 0.1 * record.seconds
        if self._bar is not None or now - self._shown_at >= self._every_s:
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
            print(f"stopped at step {run.step} of {run.steps}: {reason}", file=self._out, flush=True)
        self._out = None

    def _show(self, run: Run) -> None:
        if self._out is None or run.last is None:
            return
        self._shown_at, self._shown_step = time.monotonic(), run.last.step
        numbers = self._numbers(run, run.last)
        if self._bar is not None:
            self._bar.update(self._task, completed=run.last.step, numbers=numbers)
        else:
            print(f"step {run.last.step}/{run.steps}  {numbers}", file=self._out, flush=True)

    def _numbers(self, run: Run, last: Record) -> str:
        parts = [f"loss {last.loss:.4g}"]
        if run.validation is not None:
            parts += [f"val {run.validation.metrics['loss']:.4g}"] if "loss" in run.validation.metrics else []
        if last.tokens_per_s is not None:
            pace = self._pace_s or last.seconds
            parts.append(f"{human_count(last.tokens_per_s * last.seconds / pace)} tokens/s")
        parts += [] if self._also is None else self._also(last)
        if run.skipped:
            parts.append(f"{run.skipped} skipped")
        left = self._left_s(run, last)
        return "  ".join([*parts, *([] if left is None else [f"{datetime.timedelta(seconds=round(left))} left"])])

    def _left_s(self, run: Run, last: Record) -> float | None:
        """From the wall clock since the first step, so that validations and saves are counted, and compiling is not."""
        if self._first is None or last.step <= self._first[0] or last.step >= run.steps:
            return None
        per_step = (time.monotonic() - self._first[1]) / (last.step - self._first[0])
        return per_step * (run.steps - last.step)


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _rich_bar(stream: IO[str], run: Run) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Doing(ProgressColumn):
        """Drawn four times a second by a thread of its own: it moves while the run compiles, too."""

        def render(self, task: Task) -> Text:
            phase = run.phase
            since_s = 0.0 if phase is None else time.perf_counter() - phase[1]
            told = f"{PHASES[phase[0]]}, {since_s:.0f} s  " if phase is not None and since_s > 0.2 else ""
            return Text(told + task.fields["numbers"])

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        Doing(table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=Console(file=stream, force_terminal=True), refresh_per_second=4, expand=True)


class _Progress(Hook):
    """What `fit` adds in a pod: how far this process is, for the watchdog."""

    order = -1  # at the end the others are told first: what comes then may wait for them

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self._watch = watch

    @classmethod
    def if_watched(cls) -> list[Hook]:
        watch = watchdog.current()
        return [] if watch is None else [cls(watch)]

    def on_start(self, run: Run) -> None:
        self._watch.set_busy(PHASES["compile"])

    def on_dispatched(self, run: Run) -> None:
        self._watch.set_step(run.step)

    def on_record(self, run: Run, record: Record) -> None:
        if record.step > run.first_step + 1:  # the first holds the compilation, here or in another process
            self._watch.add_step_time(record.seconds)
            self._watch.set_busy(None)

    def on_end(self, run: Run, reason: str) -> None:
        error = sys.exc_info()[1]
        if reason == "error" and error is not None:
            self._watch.failed(error)
        self._watch.set_busy("finishing")


class Watched(Hook):
    """What a pod's process does in every step beside training, to be measured: beats, and agreement on signals.

    Args:
      watch: started.
      pod: this process's.
    """

    def __init__(self, watch: watchdog.Watchdog, pod: Pod) -> None:
        self._progress, self._agreement = _Progress(watch), StopAgreement(pod, lambda: None)

    def on_start(self, run: Run) -> None:
        self._progress.on_start(run)

    def on_dispatched(self, run: Run) -> None:
        self._progress.on_dispatched(run)
        self._agreement.is_over(run.step)

    def on_record(self, run: Run, record: Record) -> None:
        self._progress.on_record(run, record)

    def on_end(self, run: Run, reason: str) -> None:
        self._agreement.close()


# ---- Preemption ------------------------------------------------------------------------------------------------------


class Preemption(Hook):
    """SIGINT (Ctrl-C) or SIGTERM: the step in flight is finished, `Checkpointer` saves, `fit` returns "interrupted".

    A second signal ends the process at once, also while it compiles or waits for a device; one within `grace_s` of the
    first is taken for the same request, as schedulers often send two. On several processes, whichever receives it, all
    stop at the same step. Handlers are put back at the end. Only where `fit` runs in the main thread, as Python asks.

    Without it `fit` still obeys Ctrl-C, where no other hook does: it stops and saves as here, then raises
    KeyboardInterrupt.

    Args:
      grace_s: seconds after the first signal in which another counts as the same.
    """

    order = 2  # saving is still under its protection
    _signals: Sequence[signal.Signals] = interrupts.SIGNALS

    def __init__(self, *, grace_s: float = interrupts.GRACE_S) -> None:
        self._grace_s = grace_s
        self._watch: interrupts.Watch | None = None
        self._agreement: StopAgreement | None = None
        self._stopped = False

    def on_start(self, run: Run) -> None:
        if threading.current_thread() is not threading.main_thread():
            exists = "Python allows it in the main thread only"
            raise problem("Preemption", "watch for signals", exists, "call fit there, or leave the hook out")
        if jax.process_count() > 1:
            pod = this_pod()
            assert pod is not None, "jax has several processes, and they a service"
            self._agreement = StopAgreement(pod, lambda: None if self._watch is None else self._watch.received)
        watch = interrupts.current()
        self._watch = watch if watch is not None and watch.command else interrupts.Watch(signals=self._signals)
        # A command that compiles its first step may end at once; in a pod the others would wait for it.
        self._watch.hold(lambda: self._agreement is not None or run.step > run.first_step, grace_s=self._grace_s)

    def on_dispatched(self, run: Run) -> None:
        assert self._watch is not None
        received = self._watch.received is not None
        if received if self._agreement is None else self._agreement.is_over(run.step):
            self._stopped = True
            run.stop("interrupted")

    def on_end(self, run: Run, reason: str) -> None:
        agreement, self._agreement = self._agreement, None
        if agreement is not None and reason in ("error", "nonfinite"):
            agreement.close()
        elif agreement is not None and self._watch is not None:
            self._watch.received = agreement.end()  # whichever received it, all end with its code
        if self._watch is not None:
            self._watch.release()
            if self._watch.received is not None:  # also after the last step: whoever calls is to stop, too
                self._stopped, run.reason = True, "interrupted"
            self._watch = None


class _CtrlC(Preemption):
    """What `fit` adds where no other hook minds Ctrl-C."""

    order = 3
    _signals = (signal.SIGINT,)

    @classmethod
    def unless_minded(cls, hooks: Sequence[Hook]) -> list[Hook]:
        """The hooks, and this one where Python's own handler would raise wherever the program happens to be."""
        minded = any(isinstance(hook, Preemption) for hook in hooks) or (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        )
        return [*hooks] if minded else [*hooks, cls()]

    def on_end(self, run: Run, reason: str) -> None:
        super().on_end(run, reason)
        if self._stopped and reason not in ("error", "nonfinite"):
            raise KeyboardInterrupt(f"stopped after step {run.step} of {run.steps}")
