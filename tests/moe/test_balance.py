"""Balancing losses and bias: values, gradients, sharded batches, and their effect on a skewed router."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import moe
from meshpar.moe import Routing
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.router_stats import RouterSums, StatsOf
from tests.grid import cases

TOP2 = Routing(num_experts=8, top_k=2)
SIGMOID = Routing(num_experts=16, top_k=4, score="sigmoid")

rng = np.random.default_rng(0)
route = jax.jit(moe.route, static_argnames="routing")
auxiliary_loss = jax.jit(moe.auxiliary_loss)


def loss_by_hand(scores, experts, alpha):
    """Return alpha E Σ f P in float64, computed expert by expert."""
    scores = np.asarray(scores, np.float64)
    num_experts = scores.shape[1]
    total = 0.0
    for expert in range(num_experts):
        share_of_assignments = np.mean(np.asarray(experts) == expert)
        share_of_scores = np.mean([token[expert] / token.sum() for token in scores])
        total += share_of_assignments * share_of_scores
    return alpha * num_experts * total


@pytest.mark.parametrize("routing", [TOP2, SIGMOID])
def test_auxiliary_loss(routing):
    routed = route(rng.normal(size=(48, routing.num_experts)), routing=routing)
    actual = auxiliary_loss(routed.scores, routed.experts, alpha=0.02)
    assert actual == pytest.approx(loss_by_hand(routed.scores, routed.experts, 0.02), rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_auxiliary_loss_bounds(top_k):
    experts = (np.arange(32 * top_k) % 8).reshape(32, top_k)
    even = jnp.full((32, 8), 1 / 8)
    assert auxiliary_loss(even, experts) == pytest.approx(0.01, rel=1e-6)
    first_experts = np.broadcast_to(np.arange(top_k), (32, top_k))
    certain = jnp.zeros((32, 8)).at[:, :top_k].set(1 / top_k)
    assert auxiliary_loss(certain, first_experts) == pytest.approx(0.01 * 8 / top_k, rel=1e-6)


def test_auxiliary_loss_of_unassigned_and_zero_scores():
    scores = jnp.asarray(rng.random((6, 4)), jnp.float32)
    experts = np.array([[0, 4], [1, 4], [2, 4], [3, 4], [4, 4], [4, 4]])
    assert auxiliary_loss(scores, experts, alpha=1.0) == pytest.approx(1.0, rel=1e-6)
    loss, slope = jax.jit(jax.value_and_grad(lambda x: moe.auxiliary_loss(x, experts)))(jnp.zeros((6, 4)))
    assert loss == 0
    assert np.isfinite(slope).all()


def test_z_loss():
    logits = 3 * rng.normal(size=(20, 8))
    expected = 0.5 * np.mean(np.log(np.exp(logits).sum(1)) ** 2)
    assert moe.z_loss(jnp.asarray(logits, jnp.float32), weight=0.5) == pytest.approx(expected, rel=1e-5)
    half = jnp.asarray(logits, jnp.bfloat16)
    assert moe.z_loss(half).dtype == jnp.float32


def test_padding_does_not_count():
    logits, mask = 3 * rng.normal(size=(24, 16)), np.arange(24) % 3 > 0

    @jax.jit
    def losses(logits, mask=None):
        routed = moe.route(logits, SIGMOID)
        loss = moe.auxiliary_loss(routed.scores, routed.experts, mask=mask)
        return loss, moe.z_loss(logits, mask=mask), moe.measure(routed.experts, routed.scores, mask=mask)

    expected = losses(logits[mask])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), losses(logits, mask), expected)
    none = losses(logits, np.zeros(24, bool))
    assert [float(x) for x in none[:2]] == [0, 0]
    assert none[2].router_entropy == 0


def test_statistics_of_a_layer_ignore_padding():
    logits, mask = jnp.asarray(3 * rng.normal(size=(24, 16)), jnp.float32), np.arange(24) % 3 > 0
    config = MoEConfig(routing=SIGMOID, mlp_dim=8, auxiliary_weight=0.1, z_weight=0.1)

    @jax.jit
    def stats(logits, mask=None):
        routed, none = moe.route(logits, SIGMOID, mask=mask), jnp.zeros((), jnp.int32)
        sums = RouterSums.of(logits, routed, none, config, mask, axes=(), count_axes=())
        result = StatsOf(config).stats(sums)
        return result.loss, result.load, result.router_entropy

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), stats(logits, mask), stats(logits[mask]))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_update_bias(dtype):
    loads = jnp.array([[10, 20, 30, 20], [7, 7, 7, 7]], dtype)
    bias = jnp.zeros((2, 4)).at[0, 0].set(0.5)
    actual = jax.jit(moe.update_bias)(bias, loads, rate=0.01)  # a traced rate, as from a schedule
    np.testing.assert_allclose(actual, [[0.51, 0, -0.01, 0], [0, 0, 0, 0]], rtol=1e-6)


def test_integer_loads_are_compared_exactly():
    """2^25 and 2^25 + 1 are equal in float32."""
    loads = jnp.array([2**25, 2**25 + 1, 2**25 + 1, 2**25 + 1])
    assert moe.update_bias(jnp.zeros(4), loads, rate=1.0).tolist() == [1, -1, -1, -1]
    below = jnp.array([2**25, 2**25, 2**25, 2**25 + 1])  # the mean is 2^25 + 1/4
    assert moe.update_bias(jnp.zeros(4), below, rate=1.0).tolist() == [1, 1, 1, -1]
    assert moe.update_bias(jnp.zeros(4), jnp.full(4, 2**25 + 1), rate=1.0).tolist() == [0, 0, 0, 0]


def test_bias_has_no_gradient():
    logits = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)

    def loss(logits, bias):
        routed = moe.route(logits, SIGMOID, bias=bias)
        updated = moe.update_bias(bias, moe.count(routed.experts, 16), rate=0.1)
        return (routed.weights**2).sum() + routed.scores.sum() + updated.sum()

    d_logits, d_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(logits, jnp.full(16, 0.3))
    assert not d_bias.any()
    assert d_logits.any()


# ---- Over ranks ------------------------------------------------------------------------------------------------------


def one_rank(logits, mask, axis):
    """Return the losses of the global batch, their gradient for the logits, and the updated bias."""

    def loss(logits):
        routed = moe.route(logits, TOP2)
        balance = moe.auxiliary_loss(routed.scores, routed.experts, axis=axis, mask=mask)
        return balance + moe.z_loss(logits, axis=axis, mask=mask)

    value, slope = jax.value_and_grad(loss)(logits)
    bias = moe.update_bias(jnp.zeros(8), moe.count(moe.route(logits, TOP2, mask=mask).experts, 8), axis=axis)
    return value, slope, bias


@pytest.mark.parametrize(
    ("axis", "num_padded"), cases(("fsdp", 5), grid=itertools.product(["fsdp", ("fsdp", "tensor")], [0, 5]))
)
def test_sharded_statistics_match_the_global_batch(mesh8, axis, num_padded):
    """All padding is on the first ranks."""
    spec, mask = P(axis), (np.arange(32) >= num_padded if num_padded else None)
    # The ranks have different distributions, so the mean of their local losses would differ.
    logits = jnp.asarray(rng.normal(size=(32, 8)) + 3 * np.eye(8).repeat(4, axis=0), jnp.float32)
    out = (P(), spec, P())
    kernel = jax.shard_map(
        functools.partial(one_rank, axis=axis), mesh=mesh8, in_specs=(spec, spec if num_padded else P()), out_specs=out
    )
    actual = jax.jit(kernel)(logits, mask)
    expected = jax.jit(functools.partial(one_rank, axis=None))(logits, mask)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(actual[2], expected[2])

    parts = logits.reshape(4, 8, 8), None if mask is None else mask.reshape(4, 8)
    local, *_ = jax.jit(jax.vmap(functools.partial(one_rank, axis=None)))(*parts)
    assert abs(local.mean() - expected[0]) > 1e-3


# ---- Effect on a skewed router ---------------------------------------------------------------------------------------

TOKENS, NUM_EXPERTS, WIDTH = 2048, 16, 8
SKEW = np.linspace(1.5, -1.5, NUM_EXPERTS, dtype=np.float32)
"""Offsets of the logits. The first expert is 20 times as likely as the last."""


def skewed(seed):
    """Return tokens [T, d] whose last feature is 1, and a router [d, E] whose last row is `SKEW`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    x[:, -1] = 1.0
    router = rng.normal(size=(WIDTH, NUM_EXPERTS)).astype(np.float32) / 3
    router[-1] = SKEW
    return jnp.asarray(x), jnp.asarray(router)


def max_over_mean(loads):
    loads = np.asarray(loads, float)
    return loads.max() / loads.mean()


# Softmax scores of 16 experts are about 1/16 and sigmoid scores about 1/2, so the rates differ.
@pytest.mark.parametrize(
    ("score", "rate", "updates"), cases(("sigmoid", 4e-3, 100), grid=[("sigmoid", 4e-3, 100), ("softmax", 5e-4, 400)])
)
def test_bias_balances_within_its_updates(score, rate, updates):
    routing = Routing(num_experts=NUM_EXPERTS, top_k=2, score=score)
    x, router = skewed(seed=1)

    @jax.jit
    def run(logits):
        def step(bias, _):
            loads = moe.count(moe.route(logits, routing, bias=bias).experts, NUM_EXPERTS)
            return moe.update_bias(bias, loads, rate=rate), loads

        return jax.lax.scan(step, jnp.zeros(NUM_EXPERTS), length=updates + 20)[1]

    history = run(x @ router)
    assert max_over_mean(history[0]) > 4.0
    assert max(map(max_over_mean, history[updates:])) < 1.2


def test_auxiliary_loss_balances_within_150_steps():
    routing = Routing(num_experts=NUM_EXPERTS, top_k=2)
    x, router = skewed(seed=2)

    @jax.jit
    def run(x, router):
        def loss(router):
            routed = moe.route(x @ router, routing)
            return moe.auxiliary_loss(routed.scores, routed.experts), moe.count(routed.experts, NUM_EXPERTS)

        def step(router, _):
            (_, loads), slope = jax.value_and_grad(loss, has_aux=True)(router)
            return router - 20.0 * slope, loads

        return jax.lax.scan(step, router, length=170)

    _, history = run(x, router)
    assert max_over_mean(history[0]) > 4.0
    assert max(map(max_over_mean, history[150:])) < 1.2
