"""`scan_layers` with caches, auxiliary outputs, gathered weights and stages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.layers.precision import numerics
from meshpar.layers.scan import StageRunner, running
from tests.errors import raises

PARAMS = {"w": jnp.asarray([2.0, 3.0, 5.0])}
BIAS = jnp.asarray([1.0, 2.0, 3.0])
CACHES = jnp.arange(6.0).reshape(3, 2)


def layer(x, params, bias, cache):
    """Return an output that reads the cache, and the cache with x as its first entry."""
    y = x * params["w"] + bias + cache.sum()
    return (y, cache.at[0].set(x)), mp.Aux(y, {"load": jnp.int32(1)})


def test_scan_layers_returns_caches_and_aux():
    (x, caches), aux = mp.scan_layers(layer, jnp.float32(1), PARAMS, extra=BIAS, caches=CACHES)
    values = [1.0]
    for w, bias, cache in zip(PARAMS["w"], BIAS, CACHES, strict=True):
        values.append(values[-1] * float(w) + float(bias) + float(cache.sum()))
    assert float(x) == values[-1]
    assert float(aux.loss) == sum(values[1:])
    np.testing.assert_array_equal(caches, np.stack([values[:3], CACHES[:, 1]], axis=1))
    np.testing.assert_array_equal(aux.metrics["load"], [1, 1, 1])


def test_scan_layers_requires_layers_to_return_caches():
    with raises("wrong-signature", "scan_layers"):
        mp.scan_layers(lambda x, params, cache: x * params["w"], 1.0, PARAMS, caches=CACHES)


def test_stages_run_shared_layers_without_caches():
    assert mp.pipeline.scan_layers is mp.scan_layers
    with running(StageRunner(lambda layer, x, inputs: "in stages")):
        assert mp.scan_layers(lambda x, params: x * params["w"], 1.0, PARAMS) == "in stages"
        assert mp.scan_layers(lambda x, params: x * params["w"], 1.0, PARAMS, staged=False) == 30
        with raises("unsupported-feature", "scan_layers"):
            mp.scan_layers(layer, 1.0, PARAMS, extra=BIAS, caches=CACHES)


def mixed(x, params, bias):
    y = jnp.tanh(x @ params["w"] + bias)
    return y, mp.Aux(jnp.square(y).mean(), {"load": jnp.int32(1)})


@pytest.mark.parametrize("unroll", [2, 5, 7, True])
@pytest.mark.parametrize("remat", [None, "full"])
def test_unrolled_layers_have_equal_values_and_gradients(unroll, remat):
    """5 layers: with a remainder, all in one iteration, and fewer than requested. Fusions change float32 rounding."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (5, 4, 4))}
    bias, x = jax.random.normal(keys[1], (5, 4)), jax.random.normal(keys[2], (2, 4))

    def run(params, x, unroll):
        y, aux = mp.scan_layers(mixed, x, params, extra=bias, unroll=unroll)
        return y.sum() + aux.loss, aux.metrics

    with numerics(mp.Precision(), remat):
        expected, actual = (jax.value_and_grad(run, (0, 1), has_aux=True)(params, x, unroll) for unroll in (1, unroll))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize(("unroll", "products"), [(1, 1), (2, 2), (4, 4), (5, 4), (True, 4)])
def test_unroll_is_the_number_of_layers_in_an_iteration(unroll, products):
    """The program contains the layers of an iteration, and no loop if it contains all 4 layers.

    XLA counts the FLOPs of a loop's body once.
    """
    run = jax.jit(lambda x, w: mp.scan_layers(lambda x, w: x @ w, x, w, unroll=unroll))
    lowered = run.lower(jnp.ones((8, 16)), jnp.ones((4, 16, 16)))
    assert round(lowered.compile().cost_analysis()["flops"] / (2 * 8 * 16 * 16)) == products
    assert ("stablehlo.while" in lowered.as_text()) == (products < 4)


def test_unrolled_layers_keep_caches():
    expected = mp.scan_layers(layer, jnp.float32(1), PARAMS, extra=BIAS, caches=CACHES)
    actual = mp.scan_layers(layer, jnp.float32(1), PARAMS, extra=BIAS, caches=CACHES, unroll=2)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(("unroll", "is_outside"), [(1, False), (2, False), (3, True), (4, True), (True, True)])
def test_recomputation_has_a_barrier_where_no_loop_separates_the_passes(unroll, is_outside):
    def run(w):
        return mp.scan_layers(lambda x, w: jnp.sin(x * w), jnp.ones(()), w, unroll=unroll)

    with numerics(mp.Precision(), "full"):
        jaxpr = str(jax.make_jaxpr(run)(jnp.ones(4)))
    assert f"prevent_cse={is_outside}" in jaxpr


@pytest.mark.parametrize("unroll", [0, -1, 1.5, "all", False])
def test_unroll_is_a_positive_integer_or_true(unroll):
    with raises("not-an-int", "scan_layers"):
        mp.scan_layers(lambda x, w: x * w, 1.0, jnp.ones(3), unroll=unroll)
