"""Compilation of the initialization and of the training step in threads."""

from __future__ import annotations

import contextlib
import io
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.data import ArrayData
from meshpar.runs import training_run
from meshpar.runs.background_compilation import BackgroundCompilation
from meshpar.runs.folder import run_folder
from meshpar.runs.screen import Screen
from meshpar.runs.training_run import TrainingRun
from tests.runs.test_training_run import recipe

COMPILATION = "/jax/core/compile/backend_compile_duration"


def test_a_run_compiles_each_program_once_in_a_thread(tmp_path):
    threads = []

    def record(event, seconds, fun_name=None, **_):
        if event == COMPILATION and fun_name in ("jit(make)", "jit(_step)"):
            threads.append((fun_name, threading.current_thread().name.partition("_")[0]))

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        mp.run(recipe(), out=tmp_path, stream=io.StringIO())
        assert sorted(threads) == [("jit(_step)", "meshpar-compile"), ("jit(make)", "meshpar-compile")]
        mp.run(recipe(), out=tmp_path, stream=io.StringIO())  # no step is left
        assert len(threads) == 2
        mp.run(recipe(steps=5), out=tmp_path, stream=io.StringIO())  # the state is restored
        assert sorted(name for name, _ in threads) == ["jit(_step)", "jit(_step)", "jit(make)"]
        mp.run(recipe(steps=5), out=tmp_path, fresh=True, stream=io.StringIO())
        assert len(threads) == 5
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


def test_errors_of_the_compilation_are_raised_by_wait():
    lowered = jax.jit(jnp.sin, compiler_options={"no_such_option": 1}).lower(1.0)
    compilation = BackgroundCompilation(lowered)
    with pytest.raises(Exception, match="no_such_option"):
        compilation.wait()
    assert compilation.compile_s is None


class Started:
    """A compilation of a step that ends with the last work during its wait."""

    def __init__(self):
        self.events, end = [], threading.Event()
        self.compilation = BackgroundCompilation(SimpleNamespace(compile=lambda: end.wait(60)))
        self.end = end.set
        self.run = SimpleNamespace(within=lambda _: contextlib.nullcontext())

    def program(self, compile_program=lambda: None):
        def compile_in_thread():
            self.events.append(threading.current_thread().name.partition("_")[0])
            compile_program()

        lower = lambda: self.events.append("lower") or SimpleNamespace(compile=compile_in_thread)  # noqa: E731
        return self.compilation.then(lower, lambda x: self.events.append("call") or x)

    def start(self):
        self.compilation.during_wait(self.end)
        self.compilation.on_start(self.run)


def test_further_programs_are_lowered_during_the_wait_and_compiled_after_the_step():
    started = Started()
    call = started.program()
    started.start()
    assert call(3) == 3
    assert started.events == ["lower", "meshpar-compile", "call"]


def test_further_programs_do_not_delay_a_step_that_is_compiled():
    started = Started()
    call = started.program()
    started.end()
    started.compilation.wait()
    started.start()
    assert call(3) == 3
    assert started.events == ["call"]


def test_errors_of_further_programs_are_raised_by_their_call():
    started = Started()
    call = started.program(lambda: 1 / 0)
    started.start()
    with pytest.raises(ZeroDivisionError):
        call(3)


def test_a_failed_run_compiles_no_further_programs():
    started = Started()
    started.program()
    started.compilation.during_wait(lambda: started.compilation.on_end(started.run, "error"))
    started.start()
    assert started.events == ["lower"]


def test_validation_batches_without_known_shapes(tmp_path, monkeypatch):
    opened = ArrayData.open

    def open_with_list(self, **options):
        source = opened(self, **options)
        batches = source.valid
        source.valid = lambda sharding=None: list(batches(sharding))
        return source

    expected = mp.run(recipe(steps=1), out=tmp_path / "batches", stream=io.StringIO())
    monkeypatch.setattr(ArrayData, "open", open_with_list)
    outcome = mp.run(recipe(steps=1), out=tmp_path / "list", stream=io.StringIO())
    assert outcome.summary["validation"] == expected.summary["validation"] != {}


def test_accelerators_are_idle_during_the_compilation(tmp_path, monkeypatch):
    """XLA measures kernels there, so neither a restore nor the initialization may run."""
    events = []
    monkeypatch.setattr(BackgroundCompilation, "wait", lambda self: events.append("wait"))
    monkeypatch.setattr(
        training_run, "restore_or_init", lambda *_, **__: events.append("restore") or SimpleNamespace(step=0)
    )
    with run_folder(tmp_path / "line", write=True) as folder:
        run = TrainingRun(recipe(), folder, Screen(io.StringIO()))
        with run.prepare():
            for platform, expected in (("cpu", ["restore"]), ("gpu", ["wait", "restore"])):
                run._platform = platform
                run.resume()
                assert events == expected
                events.clear()


@pytest.mark.parametrize(("pgle", "processes", "expected"), [(False, 1, True), (True, 1, False), (False, 2, False)])
def test_processes_of_a_pod_compile_in_the_same_order(monkeypatch, pgle, processes, expected):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    run = SimpleNamespace(recipe=SimpleNamespace(pgle=pgle))
    assert TrainingRun._compiles_in_threads.fget(run) is expected
