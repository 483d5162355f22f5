"""Training loop: `fit`, and the hooks for checkpoints, validation and signals.

    batches ─► step ─► step ─► step (just dispatched)
                │                └─ on_dispatched: checkpoints, validation, stop requests
                └─ read two steps later ─► on_record: progress, metrics.jsonl

The loop reads the metrics of a step after it has dispatched two more steps, so that the devices always have work.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from meshpar.layers.auxiliary import is_counted
from meshpar.layers.losses import LOSS_WEIGHT
from meshpar.loop.checkpoint import Checkpoints, NoRoomError
from meshpar.pod import signals as interrupts
from meshpar.pod import watchdog as watchdog
from meshpar.pod.coordination import StopAgreement, this_pod
from meshpar.sharding.errors import MeshparError, check_positive_int, problem
from meshpar.sharding.types import PyTree
from meshpar.training.earlier_steps import STEPS_IN_FLIGHT, start_transfers, to_host
from meshpar.training.state import Setup, TrainState
from meshpar.training.step import TrainStep

PHASES = {
    "compile": "compiling the first step",
    "data": "waiting for data",
    "save": "saving",
    "validate": "validating",
}
"""Phases of `fit` other than steps, by their names in goodput and profiles."""

Step: TypeAlias = Callable[[TrainState, PyTree], tuple[TrainState, Mapping[str, Any]]]
"""(state, batch) -> (state, metrics), such as a `TrainStep`."""

_PREFETCHED_S = 1e-4
"""A batch that arrives in this time was prefetched, so the devices have not waited for it."""
_NOTHING = contextlib.nullcontext()
_RESERVED = ("step", "loss", "seconds", "tokens_per_s", "mfu", "goodput")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The metrics of a finished training step."""

    step: int
    """Number of this step, starting at 1."""
    loss: float
    seconds: float
    """Time since the end of the previous step. For the first step, it includes the compilation."""
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOPs utilization: the model's FLOPs per second divided by the peak of all devices."""
    metrics: dict[str, float]
    """Other scalar metrics."""
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Metrics that are not scalars, such as the load of MoE layers; see `meshpar.loop.expert_load`."""

    @property
    def scalars(self) -> dict[str, float | None]:
        """All scalar values, by their names in metrics.jsonl."""
        rates = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu, "seconds": self.seconds}
        return {"loss": self.loss, **rates, **self.metrics}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The metrics of a pass over the validation batches."""

    step: int
    """Number of training steps before the validation."""
    metrics: dict[str, float]
    """Means over the batches, including `loss`."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of `fit`."""

    state: TrainState
    step: int
    reason: str
    """"done", "interrupted", or the argument of `Run.stop`."""
    last: Record | None
    """The record of the last step; None if there was no step."""
    validation: Validation | None
    """The last validation."""
    skipped: int
    """Number of updates since step 0 that were skipped because they were not finite."""
    tokens_per_s: float | None
    """Mean over all steps of this call except the first, which includes the compilation."""
    seconds: float
    """Wall-clock time of this call."""


class Hook:
    """Base class of the hooks of `fit`. The methods do nothing by default.

    Example:
      >>> class PrintLoss(mp.hooks.Hook):
      ...     def on_record(self, run, record):
      ...         print(f"step {record.step}: {record.loss:.2f}")
      >>> result = mp.fit(mp.train_step(loss_fn), state, [batch] * 2, steps=2, hooks=[PrintLoss()])
      step 1: ...
      step 2: ...
    """

    order = 0
    """Hooks are called in this order, then in the order of the list. `Checkpointer` has 1 and `Preemption` 2."""

    def on_start(self, run: Run) -> None:
        """Called before the first step. `run.step` is the number of steps already taken."""

    def on_dispatched(self, run: Run) -> None:
        """Called after a step was dispatched. The devices may still be computing the arrays of `run.state`.

        The next step donates these arrays, so hooks must not keep references to them.
        """

    def on_record(self, run: Run, record: Record) -> None:
        """Called once for each finished step, in order, up to `STEPS_IN_FLIGHT` steps after its dispatch."""

    def on_validation(self, run: Run, validation: Validation) -> None:
        """Called after a validation, when the records of all previous steps have been handled."""

    def on_end(self, run: Run, reason: str) -> None:
        """Called after the last record; `reason` is "error" after an exception and "nonfinite" if training diverged."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Run:
    """A training run in progress, as passed to hooks."""

    state: TrainState
    """The state after the last dispatched step."""
    batches: Any
    """The object whose `get_state` returns the data position: the batches, or an iterator of them."""
    steps: int
    """The step at which the run ends."""
    hooks: Sequence[Hook]
    tokens_per_step: float | None
    flops_per_step: float | None
    peak_flops_per_s: float | None
    raise_nonfinite: bool
    max_skipped: int
    """Number of consecutive skipped updates at which the run fails."""
    read: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]]
    """Waits for the metrics of a step, and returns their values."""
    on_accelerator: bool
    """Whether to transfer metrics to the host as soon as their step is dispatched."""
    last: Record | None = None
    validation: Validation | None = None
    training_s: float = 0.0
    """Time of all recorded steps except the first."""
    reason: str | None = None
    """Why the run stops; None while it continues."""
    validates_after: int | None = None
    """The step after which the last validation has started or will start."""
    steps_s: float = 0.0
    """Time of all recorded steps, without `lost_s`."""
    lost_s: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds without a running step, by phase."""
    phase: tuple[str, float] | None = None
    """The current phase, a key of `PHASES`, and its start by `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.step = self.first_step = int(self.state.step)
        """Number of dispatched steps, and its value at the start of this run."""
        self.skipped = int(self.state.skipped)
        """Number of skipped updates in the recorded steps."""
        self._consecutive_skipped = 0
        self.iterator = iter(self.batches)
        self.batches = self.iterator if hasattr(self.iterator, "get_state") else self.batches
        self.waited_s = 0.0
        """Time in which this process has waited for its devices, or was in a phase other than "data"."""
        self.is_watched = False
        """Whether `waited_s` includes the time in which devices block a dispatch. The clock of a thread is slow."""
        self._in_flight: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._read_at = self._began_at = time.perf_counter()
        self._lost_at = 0.0
        self._on_dispatched = _overriding(self.hooks, "on_dispatched")
        self._on_record = _overriding(self.hooks, "on_record")

    def stop(self, reason: str) -> None:
        """Stop after the steps that are already dispatched. Later calls do not change the reason."""
        self.reason = self.reason or reason

    def within(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Mark a block as a phase of `PHASES`, for the watchdog, the progress bar, goodput and profiles."""
        return _Phase(self, phase)

    def is_idle(self) -> bool:
        """Return whether the devices have computed all dispatched steps."""
        last_loss: Any = self._in_flight[-1][1].get("loss") if self._in_flight else None
        return not self._in_flight or (hasattr(last_loss, "is_ready") and last_loss.is_ready())

    @property
    def tokens_per_s(self) -> float | None:
        """Mean over all recorded steps except the first, which includes the compilation."""
        steps = 0 if self.last is None else self.last.step - self.first_step - 1
        return None if self.tokens_per_step is None or steps < 1 else steps * self.tokens_per_step / self.training_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call of `fit`."""
        return time.perf_counter() - self._began_at

    def drain(self, *, leave: int = 0) -> None:
        """Wait for all dispatched steps except the last `leave`, and handle their records.

        Time that a hook spends after `drain()` is not counted.
        """
        while len(self._in_flight) > leave:
            step, metrics = self._in_flight.popleft()
            began = time.perf_counter()
            values = self.read(metrics)
            self.waited_s += time.perf_counter() - began
            self._handle(self._record(step, values))

    def result(self) -> FitResult:
        """Return the result, or raise `ValueError` if there were too few batches."""
        assert self.reason is not None
        if self.reason == "exhausted":
            requested = f"read the batch of step {self.step + 1} of {self.steps}"
            count = self.step - self.first_step
            reason = f"the batches ended after {count} step{'s' * (count != 1)}"
            fix = f"use batches that repeat, or steps={self.step}"
            raise problem("batches", requested, reason, fix, code="exhausted")
        return FitResult(
            state=self.state, step=self.step, reason=self.reason, last=self.last, validation=self.validation,
            skipped=self.skipped, tokens_per_s=self.tokens_per_s, seconds=self.elapsed_s,
        )  # fmt: skip

    def data_state(self) -> dict[str, Any] | None:
        """Return the data position, or None if the batches have no `get_state`."""
        get_state = getattr(self.batches, "get_state", None)
        return None if get_state is None else get_state()

    def advance(self, step: Step) -> None:
        """Dispatch a step, and handle the record of the step `STEPS_IN_FLIGHT` before it."""
        if not self._in_flight:  # the devices are idle, so the time until now belongs to no step
            self._read_at, self._lost_at = time.perf_counter(), sum(self.lost_s.values())
        try:
            with self.within("data"):
                batch = next(self.iterator)
        except StopIteration:
            self.stop("exhausted")
            return
        is_first = self.step == self.first_step
        annotation = jax.profiler.StepTraceAnnotation("meshpar:step", step_num=self.step + 1)
        compiling = self.within("compile") if is_first else _NOTHING
        with compiling, annotation, _Blocked(self) if self.is_watched else _NOTHING:
            self.state, metrics = step(self.state, batch)
        self.step += 1
        if is_first and (names := metrics.keys() & {*_RESERVED} - {"loss"}):
            reason, fix = f"the loop reserves the names {', '.join(_RESERVED)}", "rename it in the loss function"
            raise problem(f"metric `{min(names)}`", "record it", reason, fix, code="conflict")
        if self.on_accelerator:
            start_transfers(metrics)
        self._in_flight.append((self.step, metrics))
        for on_dispatched in self._on_dispatched:
            on_dispatched(self)
        self.drain(leave=STEPS_IN_FLIGHT)

    def _record(self, step: int, values: Mapping[str, np.ndarray]) -> Record:
        now, lost_s = time.perf_counter(), sum(self.lost_s.values())
        seconds, self._read_at = max(now - self._read_at, 1e-9), now
        self.steps_s += max(seconds - (lost_s - self._lost_at), 0.0)
        self._lost_at = lost_s
        tokens, flops, peak = self.tokens_per_step, self.flops_per_step, self.peak_flops_per_s
        tokens_per_s = None if tokens is None else tokens / seconds
        mfu = None if flops is None or not peak else flops / (seconds * peak)
        scalars = {name: value.item() for name, value in values.items() if not value.ndim}
        arrays = {} if len(scalars) == len(values) else {name: value for name, value in values.items() if value.ndim}
        return Record(
            step=step, loss=scalars.pop("loss"), seconds=seconds, tokens_per_s=tokens_per_s, mfu=mfu, metrics=scalars,
            arrays=arrays,
        )  # fmt: skip

    def _handle(self, record: Record) -> None:
        finite = record.metrics.get("finite", True)
        self.training_s += 0.0 if self.last is None else record.seconds
        self.last = record
        self.skipped += not finite
        self._consecutive_skipped = 0 if finite else self._consecutive_skipped + 1
        for on_record in self._on_record:
            on_record(self, record)
        if finite:
            return
        skipped, values = self._consecutive_skipped, f"loss {record.loss}, grad_norm {record.metrics.get('grad_norm')}"
        all_skipped = record.step == self.steps and skipped == record.step - self.first_step
        if self.raise_nonfinite:
            reason = f"the gradients are not finite ({values}), so the update was skipped"
            fix = "check the batch, lower the learning rate or clip gradients; or use nonfinite='skip'"
        elif skipped >= self.max_skipped or all_skipped:
            reason = f"{skipped} consecutive updates were skipped because they were not finite ({values})"
            fix = "check the data, lower the learning rate or clip gradients; or increase max_skipped"
        else:
            return
        self.reason = "nonfinite"
        raise problem(f"step {record.step}", "update the parameters", reason, fix, code="not-finite")


class _Phase:
    """The context manager of `Run.within`. A generator would take several times as long, in each step."""

    def __init__(self, run: Run, phase: str) -> None:
        self._run, self._phase = run, phase

    def __enter__(self) -> None:
        self._previous, self._began = self._run.phase, time.perf_counter()
        self._run.phase = (self._phase, self._began)
        self._busy = watchdog.busy(PHASES[self._phase])
        self._busy.__enter__()
        self._annotation = jax.profiler.TraceAnnotation(f"meshpar:{self._phase}")
        self._annotation.__enter__()

    def __exit__(self, *error: Any) -> None:
        run, phase = self._run, self._phase
        self._annotation.__exit__(*error)
        self._busy.__exit__(*error)
        run.phase = self._previous
        seconds = time.perf_counter() - self._began
        if phase != "data":
            run.waited_s += seconds
            run.lost_s[phase] += seconds
        # No time is lost to waiting for data while the devices are still computing earlier steps.
        elif seconds > _PREFETCHED_S and run.is_idle():
            run.lost_s[phase] += seconds


class _Blocked:
    """A block in which devices may block the thread. The CPU time of the thread is the work of the host."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._began, self._began_cpu = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: Any) -> None:
        blocked_s = time.perf_counter() - self._began - (time.thread_time() - self._began_cpu)
        self._run.waited_s += max(blocked_s, 0.0)


def _overriding(hooks: Sequence[Hook], method: str) -> list[Callable[..., None]]:
    """Return a method of the hooks that define it."""
    methods = [getattr(hook, method) for hook in hooks]
    return [bound for bound in methods if getattr(bound, "__func__", None) is not getattr(Hook, method)]


def fit(
    step: Step,
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
    """Train until `state.step` equals `steps`.

    Args:
      step: the training step, from `train_step`.
      state: the initial or restored state. It is donated; use the state of the result.
      batches: an iterable with a batch for each step. If it has `get_state`, checkpoints contain its position.
      steps: the total number of steps, including those before a restored state.
      hooks: objects that are called during training, sorted by `Hook.order`.
      tokens_per_step: tokens in a global batch, to report tokens per second.
      flops_per_step: model FLOPs for a global batch, to report the utilization.
      peak_flops_per_s: combined peak of all devices of the mesh, to report the utilization.
      max_skipped: number of consecutive skipped updates at which the run fails, for a step with nonfinite="skip".

    Returns:
      The final state, its step, and the last metrics.

    Raises:
      ValueError: there are too few batches (after hooks have saved); or the loss or gradients are not finite and the
        step has nonfinite="raise"; or, with "skip", `max_skipped` consecutive updates or all updates were skipped.
      KeyboardInterrupt: Ctrl-C was pressed. The current step is finished first, and hooks save. The hook `Preemption`
        returns a result instead.

    Example:
      >>> validator = mp.hooks.Validator(mp.eval_step(loss_fn), [batch], every=2)
      >>> result = mp.fit(mp.train_step(loss_fn), state, [batch] * 3, steps=3, hooks=[validator])
      >>> result.step
      3
    """
    if isinstance(step, TrainState) or not callable(step) or not hasattr(state, "step"):
        reason = f"the first argument is a {type(step).__name__}, the second a {type(state).__name__}"
        raise problem("fit", "train", reason, "write mp.fit(step, state, batches, steps=...)", code="wrong-type")
    watch = watchdog.current()
    all_hooks = [*([] if watch is None else [_WatchdogHook(watch)]), *hooks]
    num_preemption = sum(isinstance(hook, Preemption) for hook in all_hooks)
    if num_preemption > 1:
        reason, fix = "each replaces the signal handlers of the other", "pass a single one; mp.run adds it"
        raise problem("fit(hooks=...)", f"use {num_preemption} hooks Preemption", reason, fix, code="conflict")
    # Python's default handler would raise KeyboardInterrupt at an arbitrary position of the main thread.
    if (
        not num_preemption
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        all_hooks.append(_CtrlC())
    run = Run(
        state=state, batches=batches, steps=steps, hooks=sorted(all_hooks, key=lambda hook: hook.order),
        tokens_per_step=tokens_per_step, flops_per_step=flops_per_step, peak_flops_per_s=peak_flops_per_s,
        raise_nonfinite=getattr(getattr(step, "options", None), "nonfinite", None) == "raise", max_skipped=max_skipped,
        read=step.read if isinstance(step, TrainStep) else to_host, on_accelerator=jax.default_backend() != "cpu",
    )  # fmt: skip
    del state  # the first step donates it
    with _started_hooks(run):
        while run.step < run.steps and run.reason is None:
            run.advance(step)
        run.drain()
        run.stop("done")
    return run.result()


@contextlib.contextmanager
def _started_hooks(run: Run) -> Iterator[None]:
    """Start the hooks, and end all started hooks after the block, even if it or a hook fails."""
    started: list[Hook] = []

    def end(reason: str) -> list[BaseException]:
        errors = []
        for hook in started:
            try:
                hook.on_end(run, reason)
            except BaseException as error:  # also after Ctrl-C: Preemption restores the signal handlers
                errors.append(error)
        return errors

    try:
        for hook in run.hooks:
            started.append(hook)
            hook.on_start(run)
        yield
    except BaseException as error:
        for end_error in end("nonfinite" if run.reason == "nonfinite" else "error"):
            error.add_note(f"then a hook failed in on_end: {end_error!r}")
        raise
    for end_error in end(run.reason or "done"):
        raise end_error


def restore_or_init(
    checkpoints: Checkpoints, setup: Setup, *, key: jax.Array | int, batches: Any = None,
    init: Callable[[Setup, Any], TrainState] = Setup.init,
) -> TrainState:  # fmt: skip
    """Restore the newest intact checkpoint and the position of the batches, or return `init(setup, key)`."""
    restored = checkpoints.restore(setup)
    if restored is None:
        return init(setup, key)
    if batches is not None:
        if restored.data_state is None or not hasattr(batches, "set_state"):
            reason = "the checkpoint does not contain it, or the batches have no set_state"
            fix = "use batches with get_state and set_state, or pass batches=None and set the position yourself"
            raise problem(f"step {restored.step}", "restore the data position", reason, fix, code="not-found")
        batches.set_state(restored.data_state)
    return restored.state


# ---- Checkpoints and validation --------------------------------------------------------------------------------------


class Checkpointer(Hook):
    """Hook that saves checkpoints periodically and at the end, unless the run fails.

    The records of all steps up to a checkpoint are handled before the save, so metrics.jsonl contains them.
    If a save fails, for example on a full disk, a warning is printed and the next interval tries again. More than
    `retries` consecutive failures stop the run, and so does a failure at the end. With multiple processes, only a full
    disk is a warning. Other failures stop all processes, because they wait for each other's files.

    Args:
      checkpoints: the checkpoints to save to. They are not closed.
      every: steps between two saves; None saves at the end only.
      retries: number of consecutive failed saves that do not stop the run.
      before_save: function to call before each save, when the records up to the checkpoint have been handled.

    Example:
      >>> checkpointer = mp.hooks.Checkpointer(mp.Checkpoints("run/checkpoints", keep=3), every=100)
    """

    order = 1

    def __init__(
        self, checkpoints: Checkpoints, *, every: int | None, retries: int = 3,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._checkpoints, self._every = checkpoints, _check_every("Checkpointer", every)
        self._before_save = before_save
        self._retries, self._failures, self._newest = retries, 0, -1

    def on_start(self, run: Run) -> None:
        self._checkpoints.check_shared()

    def on_dispatched(self, run: Run) -> None:
        if self._every is None or run.step % self._every:
            return
        run.drain()
        try:
            with run.within("save"):
                self._before_save()
                self._checkpoints.save(run.state, data_state=run.data_state())
        except MeshparError as error:  # of this save, or of the previous background save
            if jax.process_count() > 1 and not isinstance(error, NoRoomError):
                raise
            # A background save may fail after `save` has returned, so only a new checkpoint resets the count.
            newest = self._newest
            with contextlib.suppress(MeshparError):  # if a bucket is unreachable, its checkpoints cannot be listed
                newest = max(self._checkpoints.steps(), default=-1)
            self._failures = self._failures + 1 if newest == self._newest else 1
            self._newest = newest
            if self._failures > self._retries:
                error.add_note(f"the run stops: {self._failures} saves in a row failed")
                raise
            available = f"the newest checkpoint is step {newest}" if newest >= 0 else "there is no checkpoint yet"
            warnings.warn(f"{error} The run continues; {available}.", stacklevel=2)

    def on_end(self, run: Run, reason: str) -> None:
        if reason not in ("error", "nonfinite"):
            with run.within("save"):
                self._before_save()
                self._checkpoints.save(run.state, data_state=run.data_state(), wait=True)


class Validator(Hook):
    """Hook that runs an evaluation step over all validation batches, periodically and after the last step.

    Metrics are averaged over the batches, weighted by `loss_weight`, the number of counted tokens or examples. Integer
    metrics are counts, which are summed.

    Args:
      step: the evaluation step, from `eval_step`.
      batches: a list, or an object that yields the same batches in each iteration; or a mapping of names to these. With
        a mapping, the metrics of an entry `web` have names such as `loss/web`, and `loss` is the weighted mean.
      every: steps between two validations; None validates after the last step only.
      of: function from the training state to the state to evaluate, such as `mp.eval_params`.
      weights: weights of the entries of a mapping, with the sum 1.

    Example:
      >>> validator = mp.hooks.Validator(
      ...     mp.eval_step(loss_fn), {"web": [batch], "code": [batch]}, every=100, weights={"web": 0.7, "code": 0.3}
      ... )
    """

    def __init__(
        self, step: Callable[[TrainState, PyTree], Mapping[str, Any]],
        batches: Iterable[PyTree] | Mapping[str, Iterable[PyTree]], *, every: int | None,
        of: Callable[[TrainState], TrainState] | None = None, weights: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        if iter(batches) is batches:
            reason, fix = "an iterator is exhausted after one pass", "use a list, or a re-iterable object"
            raise problem("Validator(batches=...)", "validate repeatedly", reason, fix, code="wrong-type")
        if (weights or {}).keys() != (batches if isinstance(batches, Mapping) else {}).keys():
            reason, fix = "a mapping of batches needs a weight for each name", "pass both with the same names"
            raise problem("Validator(weights=...)", "average over batches", reason, fix, code="conflict")
        self._step, self._batches, self._every, self._of = step, batches, _check_every("Validator", every), of
        self._weights = weights

    def on_dispatched(self, run: Run) -> None:
        if run.step == run.steps or (self._every is not None and run.step % self._every == 0):
            run.validates_after = run.step
            run.drain()
            began = time.perf_counter()
            with run.within("validate"):
                metrics = self._metrics(run.state if self._of is None else self._of(run.state))
            run.validation = Validation(step=run.step, metrics=metrics, seconds=time.perf_counter() - began)
            for hook in run.hooks:
                hook.on_validation(run, run.validation)

    def _metrics(self, state: TrainState) -> dict[str, float]:
        if self._weights is None or not isinstance(self._batches, Mapping):
            return self._means(state, self._batches)
        by_name = {name: self._means(state, self._batches[name]) for name in self._weights}
        means: collections.Counter[str] = collections.Counter()
        for name, weight in self._weights.items():
            means.update({metric: weight * value for metric, value in by_name[name].items()})
        return {**means, **{f"{metric}/{name}": x for name, values in by_name.items() for metric, x in values.items()}}

    def _means(self, state: TrainState, batches: Iterable[PyTree]) -> dict[str, float]:
        results: list[dict[str, float]] = []
        counts: set[str] = set()
        in_flight: collections.deque[Mapping[str, Any]] = collections.deque()
        for batch in batches:
            in_flight.append(self._step(state, batch))
            counts = {name for name, x in in_flight[-1].items() if is_counted(x)}
            if len(in_flight) > STEPS_IN_FLIGHT:
                results.append(_scalars(in_flight.popleft()))
        results += map(_scalars, in_flight)
        if not results:
            raise problem("Validator", "average over batches", "there are none", "pass at least one batch", "exhausted")
        weights = [metrics.get(LOSS_WEIGHT, 1.0) for metrics in results]
        total = {name: math.fsum(m[name] for m in results) for name in counts & results[0].keys()}
        means = {
            # The means of a batch without weight may be nan, and are ignored.
            name: math.fsum(m[name] * w for m, w in zip(results, weights, strict=True) if w) / (math.fsum(weights) or 1)
            for name in results[0].keys() - counts - {LOSS_WEIGHT}
        }
        values = {**total, **means, LOSS_WEIGHT: math.fsum(weights)}
        return {name: values[name] for name in results[0]}


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value.item() for name, value in to_host(metrics).items() if not value.ndim}


def _check_every(where: str, every: int | None) -> int | None:
    if every is not None:
        check_positive_int(where, "the number of steps between two calls", every=every)
    return every


# ---- Watchdog and signals --------------------------------------------------------------------------------------------


class _WatchdogHook(Hook):
    order = -1  # first, because the other hooks may block in `on_end`

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self._watch = watch
        self._previous: tuple[float, float] | None = None

    def on_start(self, run: Run) -> None:
        self._watch.phase = PHASES["compile"]
        run.is_watched = True

    def on_dispatched(self, run: Run) -> None:
        self._watch.step = run.step
        now, waited_s = time.perf_counter(), run.waited_s
        if self._previous is not None:
            step_s = now - self._previous[0]
            self._watch.pace.add(run.step, host_s=step_s - (waited_s - self._previous[1]), step_s=step_s)
        self._previous = now, waited_s

    def on_record(self, run: Run, record: Record) -> None:
        if record.step > run.first_step + 1:  # the first step includes the compilation, here or on another process
            self._watch.slowest_s = max(self._watch.slowest_s, record.seconds)
            self._watch.phase = None

    def on_end(self, run: Run, reason: str) -> None:
        error = sys.exc_info()[1]
        if reason == "error" and error is not None:
            self._watch.failed(error)
        self._watch.phase = "finishing"


class Preemption(Hook):
    """Hook that handles SIGINT (Ctrl-C) and SIGTERM: the run saves, and `fit` returns with reason "interrupted".

    The current step is finished first. A second signal ends the process immediately, even during a compilation.
    Schedulers often send a signal twice, so a second signal within `grace_s` is ignored. With multiple processes, all
    stop at the same step. The previous signal handlers are restored at the end. Python supports signal handlers in the
    main thread only, so `fit` must run there.

    Without this hook, Ctrl-C also stops and saves, unless a different handler is installed, but `fit` then raises
    KeyboardInterrupt.
    """

    order = 2  # after `Checkpointer`, so that a save at the end is still protected
    _signals: Sequence[signal.Signals] = interrupts.SIGNALS

    def __init__(self, *, grace_s: float = interrupts.GRACE_S) -> None:
        self._grace_s = grace_s
        self._watch: interrupts.Watch | None = None
        self._agreement: StopAgreement | None = None
        self._stopped = False

    def on_start(self, run: Run) -> None:
        if (pod := this_pod()) is not None:
            self._agreement = StopAgreement(pod, lambda: None if self._watch is None else self._watch.received)
        watch = interrupts.current()
        self._watch = watch if watch is not None and watch.command else interrupts.Watch(signals=self._signals)
        # A single process may end immediately before its first step. In a pod, the other processes would wait for it.
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
            self._watch.received = agreement.end()  # all processes end with the same exit code
        if self._watch is not None:
            self._watch.release()
            if self._watch.received is not None:  # possibly after the last step: the caller must stop as well
                self._stopped, run.reason = True, "interrupted"
            self._watch = None


class _CtrlC(Preemption):
    """Hook that `fit` adds if Ctrl-C has no other handler; it raises KeyboardInterrupt after the save."""

    order = 3
    _signals = (signal.SIGINT,)

    def on_end(self, run: Run, reason: str) -> None:
        super().on_end(run, reason)
        if self._stopped and reason not in ("error", "nonfinite"):
            raise KeyboardInterrupt(f"stopped after step {run.step} of {run.steps}")
