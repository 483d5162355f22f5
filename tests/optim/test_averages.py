"""Exponential moving averages of parameters, compared with averages computed on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.loop.checkpoint_index import read_index, read_leaf
from meshpar.optim.averages import schedule_free_iterate, schedule_free_of
from tests.equal import mesh_of
from tests.errors import raises
from tests.training.test_optimizers import BATCH, MODEL, loss

DECAY = 0.75


def abstract(tx):
    return mp.abstract_state(MODEL, tx, mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(min_bytes=0))


def trained(tx, spec, strategy, steps=3, **options):
    """Return the step, the final state, and the parameters before and after each step, on the host."""
    state = mp.init_state(MODEL, tx, mesh=mesh_of(spec), strategy=strategy, key=0, **options)
    step, params = mp.train_step(loss), [jax.device_get(state.params)]
    for _ in range(steps):
        state, _ = step(state, BATCH)
        params.append(jax.device_get(state.params))
    return step, state, params


@pytest.mark.parametrize(
    ("wrapped", "strategy", "trainable"),
    [
        pytest.param(lambda tx: mp.ema(tx, DECAY), mp.fsdp(min_bytes=0), None, id="fsdp"),
        pytest.param(lambda tx: mp.ema(tx, DECAY), mp.zero1(min_bytes=0), "w|v", id="zero1, frozen",
                     marks=pytest.mark.matrix),
        pytest.param(lambda tx: mp.optim.offload_state(mp.ema(tx, DECAY)), mp.fsdp(min_bytes=0), None, id="on the host",
                     marks=pytest.mark.matrix),
        pytest.param(lambda tx: optax.chain(optax.clip(1.0), mp.ema(mp.optim.low_precision_moments(tx, "int8"), DECAY)),
                     mp.fsdp(min_bytes=0), None, id="in a chain", marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_ema_averages_the_parameters_of_all_steps(wrapped, strategy, trainable):
    step, state, params = trained(wrapped(optax.adam(1e-2)), mp.MeshSpec(fsdp=8), strategy, trainable=trainable)
    expected = params[0]
    for updated in params[1:]:
        expected = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, expected, updated)
    averaged = mp.ema_params(state)
    for path, x in averaged.params.items():
        np.testing.assert_allclose(x, expected[path], rtol=1e-6, err_msg=path)
        assert x.sharding.is_equivalent_to(state.params[path].sharding, x.ndim)
    averages = [decision for decision in state.table.optimizer if "average" in decision.path]
    assert len(averages) == (3 if trainable is None else 2)
    assert all(decision.shards == 8 for decision in averages)
    step(state, BATCH)
    assert not any(x.is_deleted() for x in averaged.params.values()), "the step does not donate the averages"


@pytest.mark.matrix
def test_ema_needs_no_communication():
    reports = [
        mp.explain(mp.train_step(loss), abstract(tx), BATCH) for tx in (optax.adam(0.1), mp.ema(optax.adam(0.1), 0.9))
    ]
    assert all(report.is_as_expected for report in reports)
    sent = [sum(found.collective.bytes_sent_per_step for found in report.collectives) for report in reports]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    ("wrapped", "trainable"),
    [
        (lambda tx: mp.ema(tx, DECAY), None),
        pytest.param(lambda tx: mp.optim.offload_state(mp.ema(tx, DECAY)), None, marks=pytest.mark.matrix),
        pytest.param(lambda tx: optax.chain(optax.clip(1.0), mp.ema(tx, DECAY)), "w|v", marks=pytest.mark.matrix),
        pytest.param(lambda tx: tx, None, marks=pytest.mark.matrix),
    ],
)
def test_averages_are_restored_as_parameters(wrapped, trainable, tmp_path):
    tx = wrapped(optax.adam(1e-2))
    _, state, _ = trained(tx, mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), trainable=trainable)
    setup = mp.init_state(MODEL, optax.identity(), mesh=mesh_of(mp.MeshSpec(data=2)), strategy=mp.ddp(), key=1).setup
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = {kind: checkpoints.restore(setup, weights_only=kind).state.params for kind in (True, "averaged")}
    has_averages = any("average" in decision.path for decision in state.table.optimizer)
    expected = {True: state, "averaged": mp.ema_params(state) if has_averages else state}
    for kind, params in restored.items():
        for path, x in params.items():
            np.testing.assert_array_equal(x, expected[kind].params[path], err_msg=path)


def schedule_free(learning_rate=0.1):
    return optax.contrib.schedule_free(optax.sgd(learning_rate), learning_rate, b1=0.9)


@pytest.mark.parametrize(
    ("wrapped", "trainable"),
    [
        (lambda tx: optax.chain(optax.clip(1.0), tx), "w|v"),
        pytest.param(lambda tx: tx, None, marks=pytest.mark.matrix),
        pytest.param(mp.optim.offload_state, None, marks=pytest.mark.matrix),
        pytest.param(lambda tx: optax.masked(tx, {"w": True, "v": False, "b": True}), None, marks=pytest.mark.matrix),
    ],
)
def test_schedule_free_evaluates_the_averaged_iterate(wrapped, trainable, tmp_path):
    """x is computed on the host: with a constant learning rate it is the mean of z over the steps."""
    tx, layout = wrapped(schedule_free()), (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0))
    step, state, _ = trained(tx, *layout, steps=1, trainable=trainable)
    iterates = [jax.device_get(schedule_free_of(state.opt_state)[0][1].z)]
    for _ in range(3):
        state, _ = step(state, BATCH)
        iterates.append(jax.device_get(schedule_free_of(state.opt_state)[0][1].z))
    evaluated = mp.eval_params(state)
    for path, x in evaluated.params.items():
        is_averaged = (trainable is None or path != "b") and not isinstance(iterates[0][path], optax.MaskedNode)
        expected = np.mean([z[path] for z in iterates], axis=0) if is_averaged else state.params[path]
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6, err_msg=path)
        assert x.sharding.is_equivalent_to(state.params[path].sharding, x.ndim)
    setup = mp.init_state(MODEL, optax.identity(), mesh=mesh_of(mp.MeshSpec(data=2)), strategy=mp.ddp(), key=1).setup
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(setup, weights_only="averaged").state.params
        index = read_index(tmp_path, 4)
    for path, x in evaluated.params.items():
        np.testing.assert_allclose(restored[path], x, rtol=1e-6, atol=1e-7, err_msg=path)
        np.testing.assert_allclose(read_leaf(tmp_path, index, f"params/{path}"), x, rtol=1e-6, atol=1e-7, err_msg=path)


def test_eval_params_of_other_optimizers():
    _, state, _ = trained(optax.sgd(0.1), mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), steps=1)
    assert mp.eval_params(state) is state
    _, state, _ = trained(mp.ema(schedule_free(), DECAY), mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), steps=2)
    for path, x in mp.eval_params(state).params.items():
        np.testing.assert_array_equal(x, mp.ema_params(state).params[path], err_msg=path)


def test_restored_averages_have_the_dtype_of_the_parameters(tmp_path):
    precision = mp.Precision(params="bfloat16")
    tx, layout = (
        mp.ema(mp.optim.stochastic_rounding(optax.sgd(0.1)), DECAY),
        (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0)),
    )
    _, state, _ = trained(tx, *layout, steps=1, precision=precision)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(state.setup, weights_only="averaged").state
    expected = mp.ema_params(state)
    for path, x in expected.params.items():
        assert restored.params[path].dtype == x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(restored.params[path], x, err_msg=path)
        assert (x != state.params[path]).any(), path


def test_averages_of_bfloat16_parameters_are_float32():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    tx = mp.ema(optax.sgd(1.0), 0.999)
    updates, state = tx.update({"w": jnp.ones((2, 2), jnp.bfloat16)}, tx.init(params), params)
    assert state.average["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.average["w"], 0.999, rtol=1e-6)
    assert updates["w"].dtype == jnp.bfloat16
    iterate = schedule_free_iterate(params["w"], jnp.full((2, 2), 0.75, jnp.bfloat16), 0.9)
    assert iterate.dtype == jnp.float32
    np.testing.assert_allclose(iterate, (1 - 0.1 * 0.75) / 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: mp.ema(optax.sgd(0.1), 1.0), "out-of-range"),
        (lambda: mp.ema(optax.sgd(0.1), False), "out-of-range"),
        (lambda: mp.ema(optax.sgd, 0.9), "wrong-type"),
        (lambda: (tx := mp.ema(optax.sgd(0.1), 0.9)).update({}, tx.init({})), "wrong-signature"),
        (lambda: mp.ema_params(abstract(optax.sgd(0.1))), "not-found"),
    ],
)
def test_invalid_arguments_are_refused(call, code):
    with raises(code, "ema"):
        call()


def test_ema_inside_another_optimizer_is_refused():
    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, x: "kernel" if "kernel" in str(path) else "other", params)

    parts = optax.partition({"kernel": mp.ema(optax.sgd(0.1), 0.9), "other": optax.sgd(0.1)}, labels)
    with raises("unsupported-feature", "mp.ema"):
        abstract(parts)
    abstract(mp.ema(optax.partition({"kernel": optax.sgd(0.1), "other": optax.adam(0.1)}, labels), 0.9))
