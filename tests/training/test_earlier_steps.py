"""Non-finite steps of a user's loop: the step raises later, and check_finite raises at once."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.training import earlier_steps
from meshpar.training.earlier_steps import STEPS_IN_FLIGHT, EarlierSteps, to_host
from tests.equal import mesh_of
from tests.errors import raises
from tests.training.test_optimizers import BATCH, MODEL, loss

BAD = {**BATCH, "y": BATCH["y"] * np.nan}


def new_state():
    return mp.init_state(MODEL, optax.sgd(1e-3), mesh=mesh_of(mp.MeshSpec(fsdp=8)), strategy=mp.fsdp(), key=0)


@pytest.fixture(scope="module")
def step():
    return mp.train_step(loss)


def test_step_raises_three_calls_after_a_nonfinite_step(step):
    state, _ = step(new_state(), BATCH)
    state, metrics = step(state, BAD)
    for _ in range(STEPS_IN_FLIGHT):
        state, _ = step(state, BATCH)
    with raises("not-finite", "the training step"):
        step(state, BATCH)
    with raises("not-finite", "the training step"):
        mp.check_finite(metrics)


def test_step_raises_in_a_mesh_context(step):
    state = new_state()
    with jax.set_mesh(state.setup.mesh), raises("not-finite", "the training step"):
        for _ in range(STEPS_IN_FLIGHT + 2):
            state, _ = step(state, BAD)


def test_step_raises_for_states_that_are_trained_alternately(step):
    good = new_state()
    bad = good.setup.init(1)
    with raises("not-finite", "the training step"):
        for _ in range(STEPS_IN_FLIGHT + 2):
            good, _ = step(good, BATCH)
            bad, _ = step(bad, BAD)


def test_check_finite_raises_after_the_last_step(step):
    state = new_state()
    for _ in range(2):
        state, metrics = step(state, BAD)
    assert int(state.skipped) == 2
    with raises("not-finite", "the training step"):
        mp.check_finite(metrics)
    state, metrics = step(state, BATCH)
    mp.check_finite(metrics)
    mp.check_finite(jax.device_get(metrics))


def test_infinite_loss_with_finite_gradients_is_skipped():
    def shifted(model, batch, key):
        return mp.SumLoss((model(batch["x"]) + batch["y"]).sum()), {}

    model = mp.from_functions(lambda key: {"w": jax.numpy.ones(4)}, lambda params, x: x @ params["w"])
    mesh = mesh_of(mp.MeshSpec())
    state = mp.init_state(model, optax.sgd(1e-3), mesh=mesh, strategy=mp.ddp(), key=0)
    batch = {"x": np.ones((2, 4), np.float32), "y": np.array([0, np.inf], np.float32)}
    state, metrics = mp.train_step(shifted, nonfinite="skip")(state, batch)
    assert np.isfinite(metrics["grad_norm"])
    assert not metrics["finite"]
    assert int(state.skipped) == 1


def test_other_states_and_options_do_not_raise(step):
    state, _ = step(new_state(), BAD)
    state = new_state()  # for example from a checkpoint
    for _ in range(STEPS_IN_FLIGHT + 2):
        state, _ = step(state, BATCH)
    skipping = mp.train_step(loss, nonfinite="skip")
    for _ in range(STEPS_IN_FLIGHT + 2):
        state, _ = skipping(state, BAD)
    with raises("missing-argument", "check_finite"):
        mp.check_finite({"loss": 1.0})


def test_steps_in_flight_are_not_read():
    class Unread:
        def __array__(self, dtype=None, copy=None):
            raise AssertionError("waited for a step in flight")

    steps = EarlierSteps(raises=True)
    for index in range(STEPS_IN_FLIGHT + 1):
        steps.add(index, index + 1, {"finite": Unread()})
    with pytest.raises(AssertionError):
        steps.add(STEPS_IN_FLIGHT + 1, STEPS_IN_FLIGHT + 2, {"finite": Unread()})


def test_metrics_that_the_caller_has_read_are_not_read_again():
    class ReadOnce:
        def __init__(self, value):
            self.value, self.count = value, 0

        def __array__(self, dtype=None, copy=None):
            self.count += 1
            assert self.count == 1
            return np.asarray(self.value)

    steps = EarlierSteps(raises=True)
    metrics = [
        {"loss": ReadOnce(1.0), "finite": ReadOnce(index != 1), "grad_norm": ReadOnce(2.0)} for index in range(5)
    ]
    for index in range(4):
        steps.add(index, index + 1, metrics[index])
        steps.replace(metrics[index], to_host(metrics[index]))
    with raises("not-finite", "the training step"):
        steps.add(4, 5, metrics[4])


def test_fit_reads_the_metrics_of_a_step_once(monkeypatch):
    read = []
    monkeypatch.setattr(earlier_steps, "_to_host", lambda x: read.append(x) or np.asarray(x))
    step, num_steps = mp.train_step(loss), 6
    result = mp.fit(step, new_state(), [BATCH] * num_steps, steps=num_steps)
    step(result.state, BATCH)
    names = 4  # loss, loss_weight, grad_norm, finite
    assert len([x for x in read if not isinstance(x, np.ndarray)]) == num_steps * names


def test_metrics_on_accelerators_are_transferred_when_the_step_is_dispatched(monkeypatch):
    events, copy = [], type(jax.numpy.zeros(())).copy_to_host_async
    metrics = {"loss": jax.numpy.float32(1.5), "finite": np.bool_(True)}
    monkeypatch.setattr(earlier_steps, "_is_on_cpu", lambda sharding: False)
    monkeypatch.setattr(type(metrics["loss"]), "copy_to_host_async", lambda x: events.append(x) or copy(x))
    earlier_steps.start_transfers(metrics)
    assert len(events) == 1
    assert events[0] is metrics["loss"]
    assert to_host(metrics) == {"loss": 1.5, "finite": True}
