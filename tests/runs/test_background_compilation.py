"""Compilation of the training step in a thread."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.runs.background_compilation import BackgroundCompilation
from meshpar.runs.training_run import TrainingRun
from tests.runs.test_training_run import recipe

COMPILATION = "/jax/core/compile/backend_compile_duration"


def test_a_run_compiles_its_step_once_in_a_thread(tmp_path):
    threads = []

    def record(event, seconds, fun_name=None, **_):
        if event == COMPILATION and fun_name == "jit(_step)":
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        mp.run(recipe(), out=tmp_path, stream=io.StringIO())
        assert len(threads) == 1
        assert threads[0].startswith("meshpar-compile")
        mp.run(recipe(), out=tmp_path, stream=io.StringIO())  # no step is left
        assert len(threads) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


def test_errors_of_the_compilation_are_raised_by_wait():
    lowered = jax.jit(jnp.sin, compiler_options={"no_such_option": 1}).lower(1.0)
    compilation = BackgroundCompilation(lowered)
    with pytest.raises(Exception, match="no_such_option"):
        compilation.wait()
    assert compilation.compile_s is None


@pytest.mark.parametrize("steps, pgle, processes", [(4, False, 1), (5, True, 1), (5, False, 2)])
def test_no_thread_if_no_step_is_left_or_other_processes_compile_too(monkeypatch, steps, pgle, processes):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    run = SimpleNamespace(
        checkpoints=SimpleNamespace(steps=lambda: [2, 4]), recipe=SimpleNamespace(steps=steps, pgle=pgle), program=None
    )
    assert TrainingRun._compile_in_background(run) is None
