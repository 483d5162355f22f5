"""The pure functions, each against a plain reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.models import attention, layers
from meshpar.models.architecture import RopeScaling, YarnScaling
from tests.grid import cases


@pytest.fixture(autouse=True)
def one_device():
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        yield


def normal(seed, *shape, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


causal_attention = jax.jit(attention.causal_attention, static_argnames="implementation")


# --- rotary embeddings


def test_rotate_turns_pairs_like_complex_numbers():
    x = normal(0, 2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 3, 3, 0]])
    frequencies = layers.rope_frequencies(8, 10_000.0)
    turned = jax.jit(lambda x, positions: layers.rotate(x, layers.rope(positions, frequencies, x.dtype)))(x, positions)
    pairs = np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)
    angles = positions[..., None] * 10_000.0 ** (-np.arange(4) / 4)
    expected = pairs * np.exp(1j * angles)[:, :, None]
    # Angles up to 100 rad in float32 are off by 100 * 2^-24.
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=2e-5)


def test_llama_scaling_stretches_long_wavelengths_only():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
    plain = layers.rope_frequencies(128, 500_000.0)
    expected = []
    for frequency in plain:  # the three cases, one frequency at a time
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    scaled = layers.rope_frequencies(128, 500_000.0, scaling)
    np.testing.assert_allclose(scaled, expected, rtol=1e-12)
    ratios = scaled / plain
    assert ratios[0] == 1
    assert ratios[-1] == 1 / 8
    assert ((ratios > 1 / 8) & (ratios < 1)).any()


YARN = [
    ((16, 1e4, 40.0, 4096, 32.0, 1.0), [1, 0.316228, 0.1, 0.0239147, 0.005125, 0.000849862, 2.5e-05, 7.90569e-06]),
    # The ramp begins before the first pair.
    ((8, 500.0, 4.0, 16, 32.0, 1.0), [1, 0.0528686, 0.0111803, 0.00236435]),
    # The ramp would end after the last pair, so it is clipped.
    ((12, 100.0, 8.0, 131_072, 1e4, 1.0), [1, 0.427237, 0.181168, 0.0761364, 0.0316472, 0.0129756]),
    # It begins and ends at the first pair.
    ((12, 1e4, 8.0, 6, 32.0, 1.0), [1, 0.0269304, 0.00580199, 0.00125, 0.000269304, 5.80199e-05]),
    # It ends before the first pair.
    ((12, 1e4, 8.0, 2, 32.0, 2.0), [1, 0.215443, 0.0464159, 0.01, 0.00215443, 0.000464159]),
]
"""(head_dim, theta, factor, original_seq_len, beta_fast, beta_slow), and the frequencies by transformers 5.24."""


@pytest.mark.parametrize(("given", "frequencies"), YARN)
def test_yarn_stretches_by_the_ramp_of_transformers(given, frequencies):
    head_dim, theta, factor, length, fast, slow = given
    scaling = YarnScaling(factor=factor, original_seq_len=length, beta_fast=fast, beta_slow=slow)
    np.testing.assert_allclose(layers.rope_frequencies(head_dim, theta, scaling), frequencies, rtol=1e-5)  # six digits


def test_angles_are_float32_for_bfloat16_and_keep_the_dtype_of_x():
    x = normal(0, 1, 3, 1, 4, dtype=jnp.bfloat16)
    angles = layers.rope(jnp.arange(3)[None] + 1000, layers.rope_frequencies(4, 10_000.0), x.dtype)
    assert angles.cos_BTF.dtype == jnp.float32
    assert layers.rotate(x, angles).dtype == jnp.bfloat16


# --- attention


def attention_by_hand(q, k, v):
    """Head by head and query by query, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    out = np.zeros_like(q)
    first = k.shape[1] - q.shape[1]  # the queries are the last positions
    for b, t, h in np.ndindex(q.shape[:3]):
        scores = k[b, : first + t + 1, h] @ q[b, t, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = (weights / weights.sum()) @ v[b, : first + t + 1, h]
    return out


@pytest.mark.parametrize("num_kv_heads", cases(2, grid=[1, 2, 6]))
def test_attention_is_softmax_with_repeated_heads(num_kv_heads):
    q, k, v = normal(0, 2, 7, 6, 4), normal(1, 2, 7, num_kv_heads, 4), normal(2, 2, 7, num_kv_heads, 4)
    np.testing.assert_allclose(causal_attention(q, k, v), attention_by_hand(q, k, v), atol=2e-6)


def test_attention_of_the_last_queries_only():
    q, k, v = normal(0, 2, 3, 4, 4), normal(1, 2, 9, 2, 4), normal(2, 2, 9, 2, 4)
    # What is not seen has weight zero, but must be finite.
    room = [np.pad(x, ((0, 0), (0, 5), (0, 0), (0, 0)), constant_values=1e6) for x in (k, v)]
    out = jax.jit(attention.cached_attention)(q, *room, first_position=6)
    np.testing.assert_allclose(out, attention_by_hand(q, k, v), atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_cudnn_computes_causal_attention(monkeypatch, window):
    """JAX's "xla" implementation, called with the arguments for cuDNN."""
    qkv = normal(0, 2, 7, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)
    jax_attention = jax.nn.dot_product_attention

    def without_a_gpu(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return jax_attention(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_a_gpu)
    found = attention.causal_attention(*qkv, implementation="cudnn", window=window)
    np.testing.assert_allclose(found, attention.causal_attention(*qkv, window=window), atol=2e-6)


def test_scores_of_bfloat16_are_float32():
    # Two keys whose scores differ by less than bfloat16 can tell at this size.
    q, k, v = (np.full((1, 2, 1, 64), 4.0, jnp.bfloat16) for _ in range(3))
    k[0, 1, 0, 0] = 4.125
    v[0, :, 0] = [[0], [1]]
    weight = float(np.asarray(causal_attention(q, k, v))[0, 1, 0, 0])
    assert weight == pytest.approx(1 / (1 + np.exp(-4 * 0.125 / 8)), abs=2e-3)
    assert weight > 0.505


# --- embedding


def test_embed_and_its_gradient_are_those_of_indexing():
    table, tokens, weights = normal(0, 11, 6), np.random.default_rng(1).integers(0, 11, (3, 5)), normal(2, 3, 5, 6)
    out, gradient = with_gradient(lambda table: layers.embed(table, tokens), table, weights)
    np.testing.assert_array_equal(out, table[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


def with_gradient(f, x, cotangent):
    @jax.jit
    def both(x):
        y, pull = jax.vjp(f, x)
        return y, pull(cotangent)[0]

    return both(x)


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    table, tokens = np.ones((3, 2), jnp.bfloat16), np.zeros((1, 1000), np.int32)
    _, gradient = with_gradient(lambda table: layers.embed(table, tokens), table, np.ones((1, 1000, 2), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    # A sum kept in bfloat16 stops at 256, where adding one no longer changes it.
    np.testing.assert_array_equal(gradient, [[1000, 1000], [0, 0], [0, 0]])


def test_token_outside_the_table_is_nan():
    assert np.isnan(layers.embed(jnp.ones((3, 2)), jnp.array([[3]]))).all()


# --- MLP


# --- the cache


def test_extend_writes_behind_what_is_there():
    cache = (jnp.zeros((1, 6, 2, 3)), jnp.zeros((1, 6, 2, 3)))
    k, v = normal(0, 1, 2, 2, 3), normal(1, 1, 2, 2, 3)
    k_cache, v_cache = jax.jit(attention.extend)(cache, jnp.int32(3), k, v)
    np.testing.assert_array_equal(k_cache[:, 3:5], k)
    np.testing.assert_array_equal(v_cache[:, 3:5], v)
    assert not k_cache[:, :3].any()
    assert not v_cache[:, 5:].any()
