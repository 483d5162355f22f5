"""`scan_layers` with caches, auxiliary outputs, gathered weights and stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.layers.precision import numerics
from meshpar.layers.scan import LayerRunner, StageRunner, running
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


@pytest.mark.parametrize("remat", [None, "full"])
def test_scan_layers_gathers_the_parameters_of_each_layer(remat):
    calls = []

    class Gathering(LayerRunner):
        regathers = True

        def weights(self, at, shards):
            calls.append((at, jax.tree.map(jnp.shape, shards)))
            return jax.tree.map(lambda x: 10 * x, shards)

    def run(params):
        return mp.scan_layers(lambda x, p, bias: x * p["w"] + bias, 1.0, params, extra=BIAS, path="decoder/layers")

    with numerics(mp.Precision(), remat), running(Gathering()):
        value, grads = jax.value_and_grad(run)(PARAMS)
    expected = jax.value_and_grad(lambda w: ((w[0] + 1) * w[1] + 2) * w[2] + 3)(10 * PARAMS["w"])
    assert set(map(str, calls)) == {str(("decoder/layers", {"w": ()}))}
    np.testing.assert_allclose((value, *grads["w"]), (expected[0], *10 * expected[1]), rtol=1e-6)


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
