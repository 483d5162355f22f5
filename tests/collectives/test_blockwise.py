"""Attention tile by tile on one device: equal to attention with one mask, in memory that grows with the sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.inspect.model_flops import matmul_flops

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


def weighed(attention, weights, **options):
    """Gradients of a sum that weighs every number differently."""
    return jax.grad(lambda q, k, v: (attention(q, k, v, **options) * weights).sum(), (0, 1, 2))


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_the_dense_mask_s(case):
    """Single precision rounds at 6e-8, and sums over 23 positions are taken tile by tile."""
    *qkv, weights = arrays()
    options, dense = {"tile": 4, **CASES[case]}, reference.blockwise_attention
    plain = {name: value for name, value in options.items() if name != "tile"}

    @jax.jit
    def both():
        return (
            (mc.blockwise_attention(*qkv, **options), weighed(mc.blockwise_attention, weights, **options)(*qkv)),
            (dense(*qkv, **plain), weighed(dense, weights, **plain)(*qkv)),
        )

    found, expected = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6), found, expected)


def test_memory_grows_with_the_sequence_and_not_with_its_square():
    def temporaries(attention, length):
        *qkv, weights = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(length))
        jitted = jax.jit(lambda q, k, v, weights: weighed(attention, weights)(q, k, v))
        return jitted.lower(*qkv, weights).compile().memory_analysis().temp_size_in_bytes

    def tiled(q, k, v):
        return mc.blockwise_attention(q, k, v, tile=64)

    short, long = (temporaries(tiled, length) for length in (512, 1024))
    dense = temporaries(reference.blockwise_attention, 1024)
    assert long < 2.2 * short
    assert long < dense / 4


def test_a_window_leaves_tiles_out():
    """Of 16 tiles a row: the triangle, 136; with a window of a tile and one position two a row but for the first."""
    *qkv, _ = arrays(256)

    def tiles(**options):
        jaxpr = jax.make_jaxpr(lambda *x: mc.blockwise_attention(*x, tile=16, **options))(*qkv)
        return matmul_flops(jaxpr.jaxpr) / (4 * B * H * D * 16**2)

    assert tiles() == 136
    assert tiles(window=17) == 31


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"window": 0}, "window"),
        ({"window": -1}, "window"),
        ({"cap": 0.0}, "above 0"),
        ({"segments": jnp.zeros((2, 12), jnp.int32)}, r"whole numbers, \[2, 6\]"),
        ({"segments": jnp.zeros(6, jnp.int32)}, r"whole numbers, \[2, 6\]"),
        ({"segments": jnp.zeros((2, 6))}, r"whole numbers, \[2, 6\]"),
    ],
)
def test_limits_that_are_none_are_told(limits, said):
    q = jnp.ones((2, 6, 2, 4))
    with pytest.raises(ValueError, match=said):
        mc.blockwise_attention(q, q, q, **limits)


def test_shapes_that_do_not_go_together_are_told():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="blockwise_attention.*4 query heads are no multiple of 3"):
        mc.blockwise_attention(q, jnp.ones((B, T, 3, D)), jnp.ones((B, T, 3, D)))
    with pytest.raises(ValueError, match="tile"):
        mc.blockwise_attention(q, k, v, tile=0)
