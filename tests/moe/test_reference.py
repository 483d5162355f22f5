"""Dense reference against NumPy code that loops over tokens and assignments."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import moe
from tests.grid import cases

WIDTH, HIDDEN = 6, 10


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def experts_of(num_experts, seed=0):
    rng = np.random.default_rng(seed)
    up, down = rng.normal(size=(num_experts, WIDTH, HIDDEN)), rng.normal(size=(num_experts, HIDDEN, WIDTH))
    return {"up": up.astype(np.float32), "down": down.astype(np.float32)}


def by_hand(x, experts, weights, params, *, capacity=None, token_ranks=1):
    """Return y and the number of tokens that each expert computed, in float64."""
    num_experts = len(params["up"])
    y, each = np.zeros(x.shape), len(x) // token_ranks
    computed = np.zeros(num_experts, int)
    for rank in range(token_ranks):
        num_seen = [0] * num_experts
        for token in range(rank * each, (rank + 1) * each):
            for expert, weight in zip(experts[token], weights[token], strict=True):
                if expert == num_experts:
                    continue
                num_seen[expert] += 1
                if capacity is None or num_seen[expert] <= capacity:
                    hidden = np.tanh(np.float64(x[token]) @ np.float64(params["up"][expert]))
                    y[token] += np.float64(weight) * (hidden @ np.float64(params["down"][expert]))
                    computed[expert] += 1
    return y, computed


@functools.partial(jax.jit, static_argnames=("capacity", "token_ranks"))
def dense(x, experts, weights, params, capacity=None, token_ranks=1):
    return moe.reference.moe(x, experts, weights, mlp, params, capacity=capacity, token_ranks=token_ranks)


def case(num_experts, top_k, tokens=24, kind="random"):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    if kind == "all to the same":
        experts[:] = np.arange(top_k)
    if kind == "unassigned":
        experts[rng.random(experts.shape) < 0.5] = num_experts
    return x, experts, rng.random(experts.shape).astype(np.float32), experts_of(num_experts)


@pytest.mark.parametrize("kind", ["random", "all to the same", "unassigned"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (4, 4), (16, 2), (64, 8)])
def test_reference_matches_numpy(num_experts, top_k, kind):
    x, experts, weights, params = case(num_experts, top_k, kind=kind)
    expected, _ = by_hand(x, experts, weights, params)
    if kind == "unassigned":
        minus_one = np.where(experts == num_experts, -1, experts)
        np.testing.assert_array_equal(dense(x, minus_one, weights, params), dense(x, experts, weights, params))
    np.testing.assert_allclose(dense(x, experts, weights, params), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capacity", "token_ranks"), cases((3, 2), (24, 1), grid=itertools.product((1, 3, 24), (1, 2, 4)))
)
def test_reference_with_capacity_matches_numpy(capacity, token_ranks):
    x, experts, weights, params = case(8, 3)
    expected, computed = by_hand(x, experts, weights, params, capacity=capacity, token_ranks=token_ranks)
    actual = dense(x, experts, weights, params, capacity, token_ranks)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert computed.max() <= capacity * token_ranks
    assert (computed.sum() == 24 * 3) == (capacity == 24)


def test_gradients_match_finite_differences():
    x, experts, weights, params = case(4, 2, tokens=6)
    with jax.enable_x64(True):
        x, weights, params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, weights, params))

        def loss(x, weights, params):
            return (dense(x, experts, weights, params, capacity=2) ** 2).sum()

        slopes = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, params)
        rng = np.random.default_rng(3)
        direction = jax.tree.map(lambda a: rng.normal(size=a.shape), (x, weights, params))

        def loss_at(step):
            x_, weights_, params_ = jax.tree.map(lambda a, d: np.asarray(a) + step * d, (x, weights, params), direction)
            return (by_hand(x_, experts, weights_, params_, capacity=2)[0] ** 2).sum()

        expected = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
        actual = sum((np.asarray(s) * d).sum() for s, d in zip(*map(jax.tree.leaves, (slopes, direction)), strict=True))
        # The rounding error of a central difference is about 1e-12 / 1e-6.
        assert actual == pytest.approx(expected, rel=1e-6)
    kept = np.asarray(moe.kept(experts, 2, 4)[1])
    assert ((np.asarray(slopes[1]) != 0) == kept).all()
    assert not kept.all()


def test_nan_weights_of_unassigned_elements_are_ignored():
    x, experts, weights, params = case(4, 2)
    experts = jnp.asarray(experts).at[0].set(-1)
    actual, expected = (dense(x, experts, jnp.asarray(weights).at[0].set(value), params) for value in (jnp.nan, 0.0))
    np.testing.assert_array_equal(actual, expected)
    assert (np.asarray(expected)[0] == 0).all()
