"""Dense reference against NumPy code that loops over tokens and assignments."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import moe
from tests.grid import cases

WIDTH, HIDDEN, TOKENS = 6, 10, 24


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def by_hand(x, experts, weights, params, capacity, token_ranks):
    """Return y in float64."""
    num_experts = len(params["up"])
    y, each = np.zeros(x.shape), len(x) // token_ranks
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
    return y


SHAPES = [((num_experts, top_k), (None, 1)) for num_experts, top_k in ((4, 1), (4, 4), (16, 2), (64, 8))]
LIMITS = [((8, 3), limit) for limit in itertools.product((1, 3, 24), (1, 2, 4))]


@pytest.mark.parametrize("kind", ["random", "all to the same", "unassigned"])
@pytest.mark.parametrize(("shape", "limit"), cases(*SHAPES, ((8, 3), (3, 2)), grid=[*SHAPES, *LIMITS]))
def test_reference_matches_numpy(shape, limit, kind):
    """Weights of unassigned elements are ignored, even if they are NaN. -1 marks them, like E."""
    (num_experts, top_k), (capacity, token_ranks), rng = shape, limit, np.random.default_rng(7)
    experts = np.argsort(rng.random((TOKENS, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    if kind == "all to the same":
        experts[:] = np.arange(top_k)
    if kind == "unassigned":
        experts[rng.random(experts.shape) < 0.5] = num_experts
    shapes = {"up": (num_experts, WIDTH, HIDDEN), "down": (num_experts, HIDDEN, WIDTH)}
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()}
    x, weights = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32), rng.random(experts.shape).astype(np.float32)
    options = {"capacity": capacity, "token_ranks": token_ranks}
    is_assigned = experts < num_experts

    @jax.jit
    def dense(experts, weights):
        return moe.reference.moe(x, experts, weights, mlp, params, **options)

    actual = dense(experts, weights)
    np.testing.assert_allclose(actual, by_hand(x, experts, weights, params, **options), rtol=1e-4, atol=1e-5)
    same = dense(np.where(is_assigned, experts, -1), np.where(is_assigned, weights, np.float32(np.nan)))
    np.testing.assert_array_equal(same, actual)
