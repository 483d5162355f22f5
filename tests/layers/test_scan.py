"""The hook of stacked layers beside what `test_unshard`, `test_precision` and `test_staged` hold of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.layers.precision import numerics
from meshpar.layers.scan import gathering, running

PARAMS = {"w": jnp.asarray([2.0, 3.0, 5.0])}
BIAS = jnp.asarray([1.0, 2.0, 3.0])
CACHES = jnp.arange(6.0).reshape(3, 2)


def layer(x, params, bias, cache):
    """x of the step, and the cache with it in it."""
    y = x * params["w"] + bias + cache.sum()
    return (y, cache.at[0].set(x)), mp.Aux(y, {"load": jnp.int32(1)})


def test_caches_come_back_and_an_aux_beside_them():
    (x, caches), aux = mp.scan_layers(layer, jnp.float32(1), PARAMS, extra=BIAS, caches=CACHES)
    seen, each = [1.0], []
    for w, bias, cache in zip(PARAMS["w"], BIAS, CACHES, strict=True):
        each.append(seen[-1] * float(w) + float(bias) + float(cache.sum()))
        seen.append(each[-1])
    assert float(x) == each[-1]
    assert float(aux.loss) == sum(each)
    np.testing.assert_array_equal(caches, np.stack([seen[:3], CACHES[:, 1]], axis=1))
    np.testing.assert_array_equal(aux.metrics["load"], [1, 1, 1])


@pytest.mark.parametrize("remat", [None, "full"])
def test_weights_are_gathered_one_layer_at_a_time_by_their_path(remat):
    """And nothing but parameters is."""
    given = []

    def gather(at, params):
        given.append((at, jax.tree.map(jnp.shape, params)))
        return jax.tree.map(lambda x: 10 * x, params)

    def run(params):
        return mp.scan_layers(lambda x, one, bias: x * one["w"] + bias, 1.0, params, extra=BIAS, at="decoder/layers")

    with numerics(mp.Precision(), remat), gathering(gather):
        value, grads = jax.value_and_grad(run)(PARAMS)
    expected = jax.value_and_grad(lambda w: ((w[0] + 1) * w[1] + 2) * w[2] + 3)(10 * PARAMS["w"])
    assert set(map(str, given)) == {str(("decoder/layers", {"w": ()}))}
    np.testing.assert_allclose((value, *grads["w"]), (expected[0], *10 * expected[1]), rtol=1e-6)


def test_a_cache_that_the_layer_keeps_for_itself():
    with pytest.raises(mp.MeshparError, match=r"gives back x alone.*Return \(x, cache\)"):
        mp.scan_layers(lambda x, one, cache: x * one["w"], 1.0, PARAMS, caches=CACHES)


def test_stages_take_what_they_share_and_no_caches():
    assert mp.pipeline.scan_layers is mp.scan_layers
    with running(lambda layer, x, rows: "by stage"):
        assert mp.scan_layers(lambda x, one: x * one["w"], 1.0, PARAMS) == "by stage"
        assert mp.scan_layers(lambda x, one: x * one["w"], 1.0, PARAMS, staged=False) == 30
        with pytest.raises(mp.MeshparError, match="Decode with a strategy without stages"):
            mp.scan_layers(layer, 1.0, PARAMS, extra=BIAS, caches=CACHES)
