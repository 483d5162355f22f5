"""Averages of parameters over steps: those of one device by hand, in shards, under every way to make a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from tests.equal import mesh_of
from tests.training.test_optimizers import BATCH, MODEL, loss

DECAY = 0.75


def abstract(tx):
    return mp.abstract_state(MODEL, tx, mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(min_bytes=0))


def trained(tx, spec, strategy, steps=3, **options):
    """(step, state behind steps, parameters before, between and behind them on the host)."""
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
def test_averages_are_those_of_the_parameters_of_every_step(wrapped, strategy, trainable):
    step, state, params = trained(wrapped(optax.adam(1e-2)), mp.MeshSpec(fsdp=8), strategy, trainable=trainable)
    expected = params[0]
    for one in params[1:]:
        expected = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, expected, one)
    found = mp.ema_params(state)
    for path, x in found.params.items():
        np.testing.assert_allclose(x, expected[path], rtol=1e-6, err_msg=path)
        assert x.sharding.is_equivalent_to(state.params[path].sharding, x.ndim)
    kept = [one for one in state.table.optimizer if "average" in one.path]
    assert len(kept) == (3 if trainable is None else 2)
    assert all(one.shards == 8 for one in kept)
    step(state, BATCH)
    assert not any(x.is_deleted() for x in found.params.values()), "the step took nothing of it"


@pytest.mark.matrix
def test_nothing_is_sent_for_averages():
    reports = [
        mp.explain(mp.train_step(loss), abstract(tx), BATCH) for tx in (optax.adam(0.1), mp.ema(optax.adam(0.1), 0.9))
    ]
    assert all(report.is_as_promised for report in reports)
    sent = [sum(one.collective.bytes_sent_per_step for one in report.collectives) for report in reports]
    assert sent[0] == sent[1] > 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("wrapped", "trainable"),
    [
        (lambda tx: mp.ema(tx, DECAY), None),
        (lambda tx: mp.optim.offload_state(mp.ema(tx, DECAY)), None),
        (lambda tx: optax.chain(optax.clip(1.0), mp.ema(tx, DECAY)), "w|v"),
        (lambda tx: tx, None),
    ],
)
def test_a_checkpoints_averages_are_read_as_parameters(wrapped, trainable, tmp_path):
    tx = wrapped(optax.adam(1e-2))
    _, state, _ = trained(tx, mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), trainable=trainable)
    to = mp.init_state(MODEL, optax.identity(), mesh=mesh_of(mp.MeshSpec(data=2)), strategy=mp.ddp(), key=1)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        found = {kind: checkpoints.restore(to.setup, weights_only=kind).state.params for kind in (True, "averaged")}
    keeps = any("average" in one.path for one in state.table.optimizer)
    wanted = {True: state, "averaged": mp.ema_params(state) if keeps else state}
    for kind, params in found.items():
        for path, x in params.items():
            np.testing.assert_array_equal(x, wanted[kind].params[path], err_msg=path)


def test_averages_are_wider_than_narrow_parameters():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    tx = mp.ema(optax.sgd(1.0), 0.999)
    updates, state = tx.update({"w": jnp.ones((2, 2), jnp.bfloat16)}, tx.init(params), params)
    assert state.average["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.average["w"], 0.999, rtol=1e-6)
    assert updates["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: mp.ema(optax.sgd(0.1), 1.0), r"a decay is a number in \[0, 1\)"),
        (lambda: mp.ema(optax.sgd(0.1), False), r"a decay is a number in \[0, 1\)"),
        (lambda: mp.ema(optax.sgd, 0.9), "no init and update"),
        (lambda: (tx := mp.ema(optax.sgd(0.1), 0.9)).update({}, tx.init({})), "it is given none"),
        (lambda: mp.ema_params(abstract(optax.sgd(0.1))), "the optimizer keeps none"),
    ],
)
def test_mistakes(act, says):
    with pytest.raises(mp.MeshparError, match=says):
        act()


def test_averages_are_restored_as_the_parameters(tmp_path):
    _, state, params = trained(mp.ema(optax.adam(1e-2), DECAY), mp.MeshSpec(fsdp=2), mp.fsdp(min_bytes=0), steps=2)
    expected = jax.device_get(mp.ema_params(state).params)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        found = {kind: checkpoints.restore(state.setup, weights_only=kind).state.params for kind in (True, "averaged")}
    for path, x in expected.items():
        np.testing.assert_array_equal(found["averaged"][path], x)
        np.testing.assert_array_equal(found[True][path], params[-1][path])
        assert (x != params[-1][path]).any()
