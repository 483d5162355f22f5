"""`fit` reads metrics late, calls hooks once and in order, and ends cleanly after errors and signals."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import types
from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.fit import STEPS_IN_FLIGHT, Checkpointer, Hook, Preemption, Record, Validator, fit, restore_or_init
from meshpar.loop.profiler import Profile, check_steps
from meshpar.sharding.errors import MeshparError
from meshpar.training.state import make_setup
from tests.errors import raises
from tests.training_process import Sender

# ---- The loop, without a device --------------------------------------------------------------------------------------


class Scalar:
    """A device scalar that reports when it is read."""

    dtype = np.dtype(np.float32)

    def __init__(self, value, on_read):
        self.value, self.on_read = value, on_read

    def __array__(self, dtype=None, copy=None):
        self.on_read()
        return np.asarray(self.value, self.dtype)


class State:
    def __init__(self, step=0, skipped=0):
        self.step, self.skipped = step, skipped


class FakeStep:
    """A step whose loss is 1/n in step n, and nan in the `bad` steps."""

    def __init__(self, *, nonfinite="raise", bad=(), log=None):
        self.options = types.SimpleNamespace(nonfinite=nonfinite)
        self.bad, self.log = bad, [] if log is None else log

    def __call__(self, state, batch):
        step = state.step + 1
        self.log.append(f"dispatch {step}")
        loss = math.nan if step in self.bad else np.float32(1 / step)
        scalar = Scalar(loss, lambda: self.log.append(f"read {step}"))
        return State(step), {"loss": scalar, "finite": np.bool_(step not in self.bad), "grad_norm": np.float32(2)}


class Log(Hook):
    def __init__(self, log=None):
        self.log: list[str] = [] if log is None else log
        self.records: list[Record] = []

    def on_start(self, run):
        self.log.append(f"start {run.step}")

    def on_dispatched(self, run):
        self.log.append(f"dispatched {run.step}")

    def on_record(self, run, record):
        self.records.append(record)
        self.log.append(f"record {record.step}")

    def on_validation(self, run, validation):
        self.log.append(f"validation {validation.step}")

    def on_end(self, run, reason):
        self.log.append(f"end {reason}")


def forever() -> Iterator[int]:
    yield from iter(int, 1)


def run(steps=5, *, hooks=(), step=None, state=None, batches=None, **options):
    return fit(step or FakeStep(), state or State(), batches or forever(), steps=steps, hooks=hooks, **options)


@pytest.mark.parametrize("wrong", [(State(), FakeStep()), (None, State()), (FakeStep(), FakeStep()), (5, None)])
def test_fit_rejects_swapped_arguments(wrong):
    with raises("wrong-type", "fit"):
        fit(*wrong, [], steps=1)


def test_metrics_are_read_two_steps_late():
    assert STEPS_IN_FLIGHT == 2
    step = FakeStep()
    run(5, step=step)
    assert step.log == [
        "dispatch 1", "dispatch 2", "dispatch 3", "read 1", "dispatch 4", "read 2", "dispatch 5", "read 3", "read 4",
        "read 5",
    ]  # fmt: skip


def test_hooks_are_called_once_and_in_order():
    log = Log()
    result = run(4, hooks=[log])
    assert log.log == [
        "start 0", "dispatched 1", "dispatched 2", "dispatched 3", "record 1", "dispatched 4", "record 2", "record 3",
        "record 4", "end done",
    ]  # fmt: skip
    assert [record.loss for record in log.records] == [np.float32(1 / n).item() for n in (1, 2, 3, 4)]
    assert (result.step, result.reason, result.last) == (4, "done", log.records[-1])
    assert result.state.step == 4


def test_data_wait_is_a_phase_of_the_watchdog(monkeypatch):
    phases = []

    @contextlib.contextmanager
    def busy(phase):
        phases.append(phase)
        yield
        phases.append(None)

    monkeypatch.setattr("meshpar.loop.fit.watchdog.busy", busy)
    during = []
    fit(FakeStep(), State(), (during.append(phases[-1]) or {} for _ in range(2)), steps=2)
    assert during == ["waiting for data"] * 2
    assert phases[-1] is None


@pytest.mark.parametrize(("wait_s", "ready", "lost"), [(0.5, True, 2.0), (0.5, False, 0.5), (1e-5, True, 0.0)])
def test_time_is_lost_to_data_only_while_the_devices_are_idle(monkeypatch, wait_s, ready, lost):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr("meshpar.loop.fit.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(Scalar, "is_ready", lambda self: ready, raising=False)

    def batches():
        for _ in range(4):
            clock.now += wait_s
            yield {}

    class Account(Hook):
        def on_end(self, run, reason):
            assert run.lost_s == pytest.approx({"compile": 0, "data": lost, "save": 0, "validate": 0})

    run(4, batches=batches(), hooks=[Account()])


@pytest.mark.parametrize("is_watched", [True, False])
def test_only_watched_runs_measure_blocked_dispatches(monkeypatch, is_watched):
    clock = types.SimpleNamespace(now=0.0, cpu_reads=0)

    def thread_time():
        clock.cpu_reads += 1
        return clock.now / 4

    class Blocks(FakeStep):
        def __call__(self, state, batch):
            clock.now += 1
            return super().__call__(state, batch)

    class Watch(Hook):
        def on_start(self, run):
            run.is_watched = is_watched

        def on_end(self, run, reason):
            # The first step is in the phase "compile", which counts in full.
            assert run.waited_s == pytest.approx(1 + 3 * 0.75 + 0.75 if is_watched else 1)

    monkeypatch.setattr(
        "meshpar.loop.fit.time", types.SimpleNamespace(perf_counter=lambda: clock.now, thread_time=thread_time)
    )
    run(4, step=Blocks(), hooks=[Watch()])
    assert (clock.cpu_reads > 0) == is_watched


def test_only_methods_that_hooks_define_are_called():
    class Quiet(Hook):
        pass

    class Assigned(Hook):
        def __init__(self):
            self.steps = []
            self.on_record = lambda run, record: self.steps.append(record.step)

    class Count(Hook):
        def on_dispatched(self, run):
            assert len(run._on_dispatched) == 2  # with the hook for Ctrl-C
            assert len(run._on_record) == 1

    assigned = Assigned()
    run(3, hooks=[Quiet(), assigned, Count()])
    assert assigned.steps == [1, 2, 3]


def test_fit_continues_from_the_step_of_the_state():
    log = Log()
    assert run(5, hooks=[log], state=State(3)).step == 5
    assert [record.step for record in log.records] == [4, 5]
    log = Log()
    result = run(3, hooks=[log], state=State(3))
    assert log.log == ["start 3", "end done"]
    assert (result.reason, result.last, result.tokens_per_s) == ("done", None, None)


def test_rates_are_computed_from_the_step_time():
    log = Log()
    result = run(6, hooks=[log], tokens_per_step=100, flops_per_step=5e6, peak_flops_per_s=1e9)
    for record in log.records:
        assert record.tokens_per_s == pytest.approx(100 / record.seconds)
        assert record.mfu == pytest.approx(5e-3 / record.seconds)
        assert record.metrics == {"finite": True, "grad_norm": 2.0}
    assert result.tokens_per_s == pytest.approx(500 / sum(record.seconds for record in log.records[1:]))
    assert sum(record.seconds for record in log.records) <= result.seconds


def test_time_after_drain_is_not_counted(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr("meshpar.loop.fit.time.perf_counter", lambda: clock.now)

    class Slow(Hook):
        def on_dispatched(self, run):
            clock.now += 1
            if run.step == 3:
                run.drain()
                clock.now += 1000

    log = Log()
    run(6, hooks=[Slow(), log])
    assert sum(record.seconds for record in log.records) == pytest.approx(6)


def test_hook_can_stop_the_run():
    class Stop(Hook):
        def on_record(self, run, record):
            if record.step == 2:
                run.stop("good enough")
                run.stop("ignored")

    log = Log()
    result = run(100, hooks=[Stop(), log])
    assert (result.reason, result.step) == ("good enough", 4)
    assert [record.step for record in log.records] == [1, 2, 3, 4]
    assert log.log[-1] == "end good enough"


def test_too_few_batches_are_an_error_after_on_end():
    log = Log()
    with raises("exhausted", "batches") as error:
        run(10, hooks=[log], batches=[1, 2, 3])
    assert "steps=3" in error.value.fix
    assert log.log[-2:] == ["record 3", "end exhausted"]


def test_nonfinite_step_is_recorded_and_raised():
    log = Log()
    with raises("not-finite", "step 3") as error:
        run(10, hooks=[log], step=FakeStep(bad=[3]))
    assert "loss nan, grad_norm 2.0" in error.value.reason
    assert log.log[-2:] == ["record 3", "end nonfinite"]


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_nonfinite_steps_are_counted_with_skip(nonfinite):
    result = run(6, step=FakeStep(bad=[2, 3], nonfinite=nonfinite), state=State(0, skipped=4))
    assert (result.reason, result.skipped) == ("done", 6)


@pytest.mark.parametrize(
    ("bad", "steps", "fails_at"),
    [
        (range(3, 20), 20, 6),  # four in a row
        ([1, 2, 3, 5, 6, 7, 9, 10], 10, None),  # never more than three
        ([1, 2], 2, 2),  # all updates of a short run
        ([2], 2, None),
    ],
)
def test_too_many_consecutive_skips_are_an_error(bad, steps, fails_at):
    log, step = Log(), FakeStep(bad=bad, nonfinite="skip")
    with contextlib.nullcontext() if fails_at is None else raises("not-finite", f"step {fails_at}"):
        assert run(steps, hooks=[log], step=step, max_skipped=4).skipped == len(bad)
    assert log.log[-1] == ("end done" if fails_at is None else "end nonfinite")


def test_resumed_run_without_any_update_is_an_error():
    with raises("not-finite", "step 6"):
        run(6, step=FakeStep(bad=[5, 6], nonfinite="skip"), state=State(4))
    assert run(6, step=FakeStep(bad=[4, 6], nonfinite="skip"), state=State(3)).skipped == 2


def test_all_hooks_end_after_a_hook_failed():
    class Fails(Hook):
        def on_record(self, run, record):
            raise KeyError("first")

        def on_end(self, run, reason):
            raise OSError("second")

    log = Log()
    with pytest.raises(KeyError, match="first") as error:
        run(5, hooks=[Fails(), log])
    assert log.log[-1] == "end error"
    assert "second" in error.value.__notes__[0]
    log, fails = Log(), Fails()
    log.order, fails.on_record = -1, lambda run, record: None
    with pytest.raises(OSError, match="second"):
        run(2, hooks=[fails, log])
    assert log.log[-1] == "end done"


def test_signal_handlers_are_restored_after_ctrl_c_in_on_end():
    class Interrupted(Hook):
        def on_end(self, run, reason):
            raise KeyboardInterrupt

    before, log = signal.getsignal(signal.SIGINT), Log()
    log.order = 1
    with pytest.raises(KeyboardInterrupt):
        run(2, hooks=[Interrupted(), log, Preemption()])
    assert log.log[-1] == "end done"
    assert signal.getsignal(signal.SIGINT) is before


def test_two_hooks_for_signals_are_refused():
    with raises("conflict", "fit(hooks=...)"):
        run(2, hooks=[Preemption(), Preemption()])


def test_only_hooks_that_were_started_are_ended():
    class Fails(Hook):
        def on_start(self, run):
            raise OSError("cannot start")

    first, never = Log(), Log()
    with pytest.raises(OSError, match="cannot start"):
        run(2, hooks=[first, Fails(), never])
    assert first.log == ["start 0", "end error"]
    assert never.log == []


def test_reserved_metric_names_are_rejected():
    def step(state, batch):
        return State(1), {"loss": 1.0, "seconds": 2.0}

    with raises("conflict", "seconds"):
        run(1, step=step)


# ---- Profile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last", "done"), [(1, 99_999, 0), (4, 5, 0), (1, 2, 2), (2, 4, 0)])
def test_profile_steps_must_be_in_the_run(first, last, done):
    with raises("out-of-range", "--profile"):
        check_steps(first, last, done=done, steps=3)
    check_steps(1, 3, done=1, steps=3)  # a resumed run has already finished step 1


def test_profile_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, **__: None)  # then about.json has no folder
    with pytest.warns(UserWarning, match=r"no profile was written.*about\.json.*The run continues"):
        assert run(5, hooks=[Profile(tmp_path / "none", first=2, last=3)]).reason == "done"


@pytest.mark.parametrize(("first", "last", "profiled"), [(3, 4, [2, 3, 4]), (1, 2, [1, 2]), (5, 5, [4, 5])])
def test_profiled_steps_run_their_own_program(tmp_path, monkeypatch, first, last, profiled):
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, **__: None)
    (tmp_path / "profile").mkdir()
    profile, ran = Profile(tmp_path / "profile", first=first, last=last), []

    def variant(name):
        step = FakeStep()

        def call(state, batch):
            ran.append(name)
            return step(state, batch)

        return call

    run(5, step=profile.step(variant("usual"), variant("profiled")), hooks=[profile])
    assert [number for number, name in enumerate(ran, 1) if name == "profiled"] == profiled


# ---- Validator -------------------------------------------------------------------------------------------------------


def test_validator_runs_periodically_and_after_the_last_step():
    log = Log()
    run(5, hooks=[log, Validator(lambda state, batch: {"loss": batch}, [1.0, 3.0], every=2)])
    assert [entry for entry in log.log if entry.startswith(("record", "validation"))] == [
        "record 1", "record 2", "validation 2", "record 3", "record 4", "validation 4", "record 5", "validation 5",
    ]  # fmt: skip


def test_every_none_validates_and_saves_at_the_end():
    log: list[str] = []
    hooks = [Validator(lambda state, batch: {"loss": 1.0}, [1], every=None), Log(log)]
    run(4, hooks=[*hooks, Checkpointer(FakeCheckpoints(log), every=None)])
    assert [entry for entry in log if entry.startswith(("validation", "save"))] == ["validation 4", "save 4 None wait"]


def test_validator_transforms_the_state():
    steps = []
    validator = Validator(
        lambda step, batch: {"loss": steps.append(step) or 0.0}, [1], every=2, of=lambda state: state.step
    )
    run(3, hooks=[validator])
    assert steps == [2, 3]


def test_validator_keeps_two_batches_in_flight():
    log: list[str] = []

    def step(state, batch):
        log.append(f"dispatch {batch}")
        return {"loss": Scalar(batch, lambda: log.append(f"read {batch}"))}

    result = run(1, hooks=[Validator(step, [1, 2, 3, 4], every=1)])
    assert log == ["dispatch 1", "dispatch 2", "dispatch 3", "read 1", "dispatch 4", "read 2", "read 3", "read 4"]
    assert result.validation.metrics == {"loss": 2.5}


def test_validator_weights_means_and_sums_counts():
    batches = [(128, 2.0, 5), (3, 4.0, 1), (0, np.nan, 2)]  # weight, loss, count

    def step(state, batch):
        weight, loss, count = batch
        return {"loss": np.float32(loss), "loss_weight": np.int32(weight), "hits": np.int32(count), "bare": loss}

    metrics = run(1, hooks=[Validator(step, batches, every=1)]).validation.metrics
    assert list(metrics) == ["loss", "loss_weight", "hits", "bare"]
    assert metrics["loss"] == metrics["bare"] == pytest.approx((128 * 2 + 3 * 4) / 131)
    assert (metrics["loss_weight"], metrics["hits"]) == (131, 8)
    metrics = run(1, hooks=[Validator(step, batches[2:], every=1)]).validation.metrics
    assert (metrics["loss"], metrics["loss_weight"]) == (0, 0)


def test_validator_ignores_arrays():
    validator = Validator(lambda state, batch: {"loss": 2.0, "moe/load": np.ones((2, 3))}, [0, 1], every=1)
    result = run(1, hooks=[validator])
    assert result.validation.metrics == {"loss": 2.0}


def test_validator_rejects_iterators_and_empty_batches():
    with raises("wrong-type", "Validator"):
        Validator(None, iter([1]), every=1)
    with raises("exhausted", "Validator"):
        run(1, hooks=[Validator(None, [], every=1)])


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_must_be_a_positive_integer(tmp_path, every):
    with raises("not-an-int", "Validator"):
        Validator(None, [], every=every)
    with raises("not-an-int", "Checkpointer"):
        Checkpointer(Checkpoints(tmp_path), every=every)


# ---- Checkpointer ----------------------------------------------------------------------------------------------------


class FakeCheckpoints:
    def check_shared(self):
        pass

    def __init__(self, log):
        self.log = log

    def save(self, state, *, data_state=None, wait=False):
        self.log.append(f"save {state.step} {data_state}{' wait' if wait else ''}")


class CountingBatches:
    """Batches 1, 2, 3, ... with a position."""

    def __init__(self, length=1000):
        self.position, self.length = 0, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def test_steps_are_recorded_before_they_are_saved():
    log: list[str] = []
    run(5, hooks=[Checkpointer(FakeCheckpoints(log), every=2), Log(log)], batches=CountingBatches())
    events = [entry for entry in log if entry.startswith(("record", "save", "end"))]
    assert events == [
        "record 1", "record 2", "save 2 {'position': 2}", "record 3", "record 4", "save 4 {'position': 4}",
        "record 5", "end done", "save 5 {'position': 5} wait",
    ]  # fmt: skip


@pytest.mark.parametrize(("bad", "num_batches", "code", "saved"), [
    ([4], 1000, "not-finite", []), ([], 3, "exhausted", ["save 3 {'position': 3} wait"]),
])  # fmt: skip
def test_finite_state_is_saved_at_the_end(bad, num_batches, code, saved):
    log: list[str] = []
    hooks = [Checkpointer(FakeCheckpoints(log), every=4)]
    with raises(code):
        run(9, hooks=hooks, step=FakeStep(bad=bad), batches=CountingBatches(num_batches))
    assert log == saved


class FlakyCheckpoints:
    """Checkpoints whose second and later periodic saves fail."""

    def check_shared(self):
        pass

    def __init__(self):
        self.saved = []

    def save(self, state, *, data_state=None, wait=False):
        if not wait and len(self.saved) == 1:
            raise MeshparError("checkpoints", "save", "no space left on the disk", "make room")
        self.saved.append(state.step)

    def steps(self):
        return self.saved


def test_failed_periodic_save_is_a_warning():
    disk = FlakyCheckpoints()
    with pytest.warns(UserWarning, match="no space left.*The run continues; the newest checkpoint is step 2"):
        result = run(5, hooks=[Checkpointer(disk, every=2)])
    assert result.reason == "done"
    assert disk.saved == [2, 5]


class FailingCheckpoints(FlakyCheckpoints):
    """Checkpoints whose saves fail in the background. The second, fourth, ... call raises the error."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def save(self, state, *, data_state=None, wait=False):
        self.calls += 1
        if self.calls % 2 == 0:
            raise MeshparError("checkpoints", "save", "writing failed", "make room")


@pytest.mark.parametrize("retries", [0, 2])
def test_run_stops_after_too_many_failed_saves(retries):
    disk = FailingCheckpoints()
    warned = pytest.warns(UserWarning, match="there is no checkpoint yet") if retries else contextlib.nullcontext()
    with pytest.raises(MeshparError, match="writing failed") as error, warned:
        run(20, hooks=[Checkpointer(disk, every=1, retries=retries)])
    assert disk.calls == 2 * (retries + 1)
    assert f"the run stops: {retries + 1} saves in a row failed" in error.value.__notes__


def test_new_checkpoint_resets_the_count_of_failed_saves():
    disk = FlakyCheckpoints()

    def save(state, *, data_state=None, wait=False):
        if state.step % 3:
            raise MeshparError("checkpoints", "save", "writing failed", "make room")
        disk.saved.append(state.step)

    disk.save = save
    with pytest.warns(UserWarning, match="The run continues") as warned:
        assert run(9, hooks=[Checkpointer(disk, every=1, retries=2)]).reason == "done"
    assert len(warned) == 6
    assert "the newest checkpoint is step 6" in str(warned[-1].message)


def test_unreachable_store_is_a_failed_save():
    disk, failures = FlakyCheckpoints(), [0, 0]

    def fail():
        raise MeshparError("checkpoints", "list them", "there is no network", "restore the network")

    def before_save():
        if failures:
            failures.pop()
            fail()

    disk.steps, disk.save = fail, lambda state, **_: disk.saved.append(state.step)
    with pytest.warns(UserWarning, match="there is no checkpoint yet") as warned:
        assert run(4, hooks=[Checkpointer(disk, every=1, before_save=before_save)]).reason == "done"
    assert len(warned) == 2
    assert disk.saved == [3, 4, 4]


# ---- Signals ---------------------------------------------------------------------------------------------------------


class Send(Hook):
    def __init__(self, number, at):
        self.number, self.at = number, at

    def on_dispatched(self, run):
        if run.step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_returns(number, capfd):
    log: list[str] = []
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    hooks = [Preemption(), Send(number, 3), Checkpointer(FakeCheckpoints(log), every=100), Log(log)]
    result = run(10_000, hooks=hooks)
    assert result.reason == "interrupted"
    assert 3 <= result.step < 10_000
    assert log[-2:] == ["end interrupted", f"save {result.step} None wait"]
    assert f"record {result.step}" in log
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert number.name in capfd.readouterr().err


class SendInFinalizer(Hook):
    """Sends Ctrl-C in a finalizer, where an exception from a signal handler would be printed and lost."""

    def __init__(self, at):
        self.at = at

    def on_dispatched(self, run):
        if run.step == self.at:
            Sender(signal.SIGINT)


@pytest.mark.parametrize("last", [9, 3], ids=["during the run", "after the last step"])
def test_ctrl_c_without_a_handler_saves_and_raises(capfd, last):
    log: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
            run(last, hooks=[SendInFinalizer(3), Checkpointer(FakeCheckpoints(log), every=100)])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["save 3 None wait"]
    assert "Exception ignored" not in capfd.readouterr().err


def test_ctrl_c_during_the_last_save_is_an_interruption():
    class Saves(FakeCheckpoints):
        def save(self, *args, **kwargs):
            Sender(signal.SIGINT)
            return super().save(*args, **kwargs)

    log: list[str] = []
    assert run(3, hooks=[Preemption(), Checkpointer(Saves(log), every=100)]).reason == "interrupted"
    assert log == ["save 3 None wait"]


def test_ctrl_c_in_a_jax_callback():
    def calls_back(state, batch):
        def body(x):
            if state.step == 2:
                Sender(signal.SIGINT)
            return x

        loss = jax.pure_callback(body, jax.ShapeDtypeStruct((), np.float32), np.float32(1))
        state, metrics = FakeStep()(state, batch)
        return state, {**metrics, "loss": jax.block_until_ready(loss)}

    log: list[str] = []
    result = run(9, hooks=[Preemption(), Checkpointer(FakeCheckpoints(log), every=100)], step=calls_back)
    assert (result.reason, result.step, log) == ("interrupted", 3, ["save 3 None wait"])


def test_ctrl_c_with_a_user_handler_is_left_alone():
    log: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: log.append(number))
    try:
        assert run(5, hooks=[Send(signal.SIGINT, 3)]).reason == "done"
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == [signal.SIGINT]


def test_two_simultaneous_signals_count_once():
    assert run(10_000, hooks=[Preemption(), Send(signal.SIGTERM, 3), Send(signal.SIGTERM, 3)]).reason == "interrupted"


# ---- Real training steps ---------------------------------------------------------------------------------------------


def loss(model, batch, key):
    value = (model(batch) ** 2).mean()
    return value, {"twice": 2 * value}


@pytest.fixture(scope="module")
def setup():
    model = mp.from_functions(lambda key: {"w": jax.random.normal(key, (8, 8))}, lambda p, x: x @ p["w"])
    return make_setup(model, optax.sgd(1e-2), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.ddp())


def test_fit_trains_a_model(setup):
    batch = np.ones((8, 8), np.float32)
    log = Log()
    validator = Validator(mp.eval_step(loss), [batch], every=100)
    result = fit(mp.train_step(loss), setup.init(0), itertools.repeat(batch), steps=20, hooks=[log, validator])
    assert int(result.state.step) == result.step == 20
    assert log.records[-1].loss < log.records[0].loss
    assert log.records[-1].metrics["twice"] == pytest.approx(2 * log.records[-1].loss)
    assert result.validation.metrics["loss"] < log.records[-1].loss


def test_fit_detects_nonfinite_gradients_of_a_model(setup):
    batches = [np.full((8, 8), np.nan if n == 2 else 1, np.float32) for n in range(4)]
    with raises("not-finite", "step 3"):
        fit(mp.train_step(loss), setup.init(0), batches, steps=4)
    result = fit(mp.train_step(loss, nonfinite="skip"), setup.init(0), batches, steps=4)
    assert result.skipped == int(result.state.skipped) == 1


def test_restore_or_init_restores_state_and_data(setup, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        data = CountingBatches()
        state = restore_or_init(checkpoints, setup, key=0, batches=data)
        assert (int(state.step), data.position) == (0, 0)
        state, _ = mp.train_step(loss)(state, np.ones((8, 8), np.float32))
        checkpoints.save(state, data_state={"position": 7})
        restored = restore_or_init(checkpoints, setup, key=0, batches=data)
        assert (int(restored.step), data.position) == (1, 7)
        with raises("not-found"):
            restore_or_init(checkpoints, setup, key=0, batches=iter([]))
        assert int(restore_or_init(checkpoints, setup, key=0).step) == 1
    with Checkpoints(tmp_path / "without position") as checkpoints:
        checkpoints.save(setup.init(0))
        with raises("not-found"):
            restore_or_init(checkpoints, setup, key=0, batches=data)


def test_all_hooks_are_importable_from_one_module():
    hooks = [getattr(mp.hooks, name) for name in mp.hooks.__all__]
    names = {hook.__name__ for hook in hooks if isinstance(hook, type) and issubclass(hook, Hook)}
    assert names >= {"Checkpointer", "Validator", "ProgressBar", "MetricsFile", "Preemption", "Hook"}
