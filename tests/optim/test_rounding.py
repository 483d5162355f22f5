"""Stochastic rounding of parameters, and the measured share of updates that rounding to nearest loses."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.optim.rounding import lost_updates
from tests.equal import mesh_of
from tests.errors import raises
from tests.training.test_optimizers import BATCH, MODEL, loss

LR = 1e-4
BFLOAT16 = mp.Precision(params="bfloat16")


def trained(tx, num_steps=20, precision=BFLOAT16, spec=None, strategy=None):
    """Return the parameters before and after training, and the metrics of the last step."""
    mesh = mesh_of(spec or mp.MeshSpec(fsdp=8))
    strategy = strategy or mp.fsdp(min_bytes=0)
    state = mp.init_state(MODEL, tx, mesh=mesh, strategy=strategy, key=0, precision=precision)
    before, step = jax.device_get(state.params), mp.train_step(loss, precision=precision)
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    return before, jax.device_get(state.params), metrics


def share_changed(before, after):
    changed = [np.asarray(before[path] != after[path]).ravel() for path in before]
    return np.concatenate(changed).mean()


@pytest.fixture(scope="module")
def exact():
    return trained(optax.adamw(LR), precision=mp.Precision())


def test_float32_parameters_lose_no_updates(exact):
    before, after, metrics = exact
    assert share_changed(before, after) > 0.99
    assert "lost_updates" not in metrics


def test_bfloat16_parameters_lose_most_updates_and_a_warning_reports_the_share():
    with pytest.warns(UserWarning, match=r"\d\d\.\d% of the updates are lost") as caught:
        before, after, metrics = trained(optax.adamw(LR))
    assert [warning.filename for warning in caught] == [__file__]  # once, at the call of the step
    assert share_changed(before, after) < 0.5  # 20 updates of 1e-4
    assert 0.5 < float(metrics["lost_updates"]) < 1


def test_lost_updates_are_reported_if_some_parameters_are_rounded_stochastically():
    def labels(params):
        return {name: "stochastic" if name == min(params) else "nearest" for name in params}

    rules = {"stochastic": mp.optim.stochastic_rounding(optax.adamw(LR)), "nearest": optax.adamw(LR)}
    with pytest.warns(UserWarning, match="of the updates are lost"):
        _, _, metrics = trained(optax.partition(rules, labels), num_steps=4)
    assert 0.5 < float(metrics["lost_updates"]) < 1


def test_stochastic_rounding_follows_float32(exact):
    before, after, metrics = trained(mp.optim.stochastic_rounding(optax.adamw(LR)))
    assert float(metrics["lost_updates"]) == 0
    assert all(x.dtype == jnp.bfloat16 for x in after.values())
    moved, expected = (
        np.concatenate(
            [(np.asarray(new[path], np.float32) - np.asarray(old[path], np.float32)).ravel() for path in new]
        )
        for old, new in ((before, after), exact[:2])
    )
    # The distance in the direction of the exact updates. Its deviation is 1,040 ** -0.5 of about 1e-3 per element.
    assert np.mean(moved * np.sign(expected)) == pytest.approx(np.mean(np.abs(expected)), abs=1e-4)
    assert np.mean(np.abs(expected)) > 1e-3


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_rounding_does_not_depend_on_the_sharding(dtype):
    def tx():
        return mp.optim.stochastic_rounding(
            optax.sgd(1e-2) if dtype is None else mp.optim.low_precision_moments(optax.adam(1e-3), dtype)
        )

    layouts = [(mp.MeshSpec(data=1), mp.ddp()), (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0))]
    one, sharded = (trained(tx(), 1, spec=spec, strategy=strategy)[1] for spec, strategy in layouts)
    for path, x in one.items():
        # Gradients differ in the last bit, which changes the direction of few elements.
        assert np.mean(x != sharded[path]) < 0.01, path


def test_updates_in_chains_are_the_rounded_ones():
    params = {"w": jnp.linspace(0.5, 2, 4096, dtype=jnp.bfloat16), "v": jnp.ones((4,), jnp.float32)}
    tx = mp.ema(mp.optim.stochastic_rounding(optax.sgd(1.0)), 0.0)
    grads = {"w": jnp.full((4096,), 1e-3, jnp.bfloat16), "v": jnp.full((4,), 1e-3)}
    updates, state = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(state.average["w"], new["w"].astype(jnp.float32))
    np.testing.assert_array_equal(new["v"], params["v"] - 1e-3)
    steps = np.asarray(new["w"], np.float32) - np.asarray(params["w"], np.float32)
    np.testing.assert_allclose(steps.mean(), -1e-3, rtol=0.1)
    assert set(np.unique(steps)) <= {0, -(2**-9), -(2**-8), -(2**-7)}  # adjacent numbers only


def test_lost_updates_counts_nonzero_updates_of_16_bit_parameters():
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones((4,), jnp.float32), "c": jnp.ones((), jnp.bfloat16)}
    updates = {"a": jnp.array([[0, 1e-3, 1e-3], [0.5, 1e-3, 0]]), "b": jnp.full((4,), 1e-9), "c": jnp.float32(0.25)}
    assert float(lost_updates(params, updates)) == pytest.approx(3 / 5)
    assert lost_updates({"b": params["b"]}, {"b": updates["b"]}) is None


def test_stochastic_rounding_has_no_unexpected_collectives():
    tx = mp.optim.stochastic_rounding(optax.adamw(LR))
    for optimizer in (tx, optax.adamw(LR)):
        state = mp.abstract_state(
            MODEL, optimizer, mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(min_bytes=0), precision=BFLOAT16
        )
        assert mp.explain(mp.train_step(loss, precision=BFLOAT16), state, BATCH).is_as_expected


def test_invalid_arguments_are_refused():
    for call, code in (
        (lambda: mp.optim.stochastic_rounding(optax.sgd), "wrong-type"),
        (lambda: mp.optim.stochastic_rounding(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)}), "wrong-dtype"),
        (lambda: (tx := mp.optim.stochastic_rounding(optax.sgd(1.0))).update({}, tx.init({})), "wrong-signature"),
    ):
        with raises(code, "stochastic_rounding"), warnings.catch_warnings():
            call()
