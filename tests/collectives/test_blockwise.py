"""`blockwise_attention` against its reference; its memory and FLOPs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.inspect.model_flops import matmul_flops
from tests.errors import raises
from tests.grid import cases

B, T, H, K, D = 2, 23, 4, 2, 6
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)), axis=1).astype(np.int32)
CASES = {
    "causal": {},
    "one tile": {"tile": 64},
    "window of one": {"window": 1},
    "window in tiles": {"window": 9},
    "cap": {"cap": 1.5, "scale": 0.7},
    "segments": {"segments": SEGMENTS},
    "all": {"window": 5, "cap": 2.0, "segments": SEGMENTS},
}


def arrays(length=T):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, length, heads, D)), jnp.float32) for heads in (H, K, K, H)]


def weighted_grad(attention, weights, **options):
    """Return the gradients of a weighted sum of the output."""
    return jax.grad(lambda q, k, v: (attention(q, k, v, **options) * weights).sum(), (0, 1, 2))


@pytest.mark.parametrize("case", cases("window in tiles", "all", grid=CASES))
def test_blockwise_attention_matches_reference(case):
    """float32 rounds at 6e-8, and sums over 23 positions are computed in another order."""
    *qkv, weights = arrays()
    options, dense = {"tile": 4, **CASES[case]}, reference.blockwise_attention
    plain = {name: value for name, value in options.items() if name != "tile"}

    @jax.jit
    def both():
        return (
            (mc.blockwise_attention(*qkv, **options), weighted_grad(mc.blockwise_attention, weights, **options)(*qkv)),
            (dense(*qkv, **plain), weighted_grad(dense, weights, **plain)(*qkv)),
        )

    actual, expected = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6), actual, expected)


@pytest.mark.parametrize("case", cases("all", grid=CASES))
def test_sinks_match_reference(case):
    """The weights of the first query, which sees few keys, are far from a sum of 1."""
    *qkv, weights = arrays()
    sinks = jnp.linspace(-1.0, 2.0, H)
    options = {"tile": 4, **CASES[case]}
    plain = {name: value for name, value in options.items() if name != "tile"}

    def with_gradients(attention, **options):
        o, pull = jax.vjp(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **options), *qkv, sinks)
        return o, *pull(weights)

    @jax.jit
    def both():
        return with_gradients(mc.blockwise_attention, **options), with_gradients(reference.blockwise_attention, **plain)

    actual, expected = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6), actual, expected)
    assert np.abs(expected[4]).min() > 1e-3


def test_memory_is_linear_in_the_sequence():
    def temporaries(attention, length):
        *qkv, weights = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(length))
        jitted = jax.jit(lambda q, k, v, weights: weighted_grad(attention, weights)(q, k, v))
        return jitted.lower(*qkv, weights).compile().memory_analysis().temp_size_in_bytes

    def tiled(q, k, v):
        return mc.blockwise_attention(q, k, v, tile=64)

    short, long = (temporaries(tiled, length) for length in (512, 1024))
    dense = temporaries(reference.blockwise_attention, 1024)
    assert long < 2.2 * short
    assert long < dense / 4


def test_tiles_outside_the_window_are_skipped():
    """16 rows have 136 tiles up to the diagonal. A window of 17 leaves two per row, and one in the first row."""
    *qkv, _ = arrays(256)

    def tiles(**options):
        jaxpr = jax.make_jaxpr(lambda *x: mc.blockwise_attention(*x, tile=16, **options))(*qkv)
        return matmul_flops(jaxpr.jaxpr) / (4 * B * H * D * 16**2)

    assert tiles() == 136
    assert tiles(window=17) == 31


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"window": 0}, "not-an-int"),
        ({"window": -1}, "not-an-int"),
        ({"cap": 0.0}, "out-of-range"),
        ({"segments": jnp.zeros((2, 12), jnp.int32)}, "wrong-shape"),
        ({"segments": jnp.zeros(6, jnp.int32)}, "wrong-shape"),
        ({"segments": jnp.zeros((2, 6))}, "wrong-dtype"),
        ({"tile": 0}, "not-an-int"),
        ({"sinks": jnp.zeros(3)}, "wrong-shape"),
        ({"k": jnp.ones((2, 6, 3, 4)), "v": jnp.ones((2, 6, 3, 4))}, "indivisible"),
    ],
)
def test_blockwise_attention_checks_its_arguments(options, code):
    with raises(code, "blockwise_attention"):
        mc.blockwise_attention(**{name: jnp.ones((2, 6, 2, 4)) for name in "qkv"} | options)
