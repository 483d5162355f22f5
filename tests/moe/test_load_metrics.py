"""The load as counted by hand, of the global batch, and the advice that comes of it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import moe
from tests.grid import cases

measure = jax.jit(moe.measure, static_argnames="num_ranks")


def case(tokens=64, num_experts=8, top_k=2, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, num_experts)).astype(np.float32)
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    experts[: tokens // 2, 0] = 0
    return experts, scores, rng.random((tokens, top_k)) < 0.75


def check_load(found, tokens):
    mean = sum(tokens) / len(tokens)
    assert np.asarray(found.tokens).tolist() == tokens
    assert found.max_over_mean == pytest.approx(max(tokens) / mean, rel=1e-6)
    assert found.max_over_min == pytest.approx(max(tokens) / max(min(tokens), 1), rel=1e-6)
    variance = sum((one - mean) ** 2 for one in tokens) / len(tokens)
    assert found.variation == pytest.approx(math.sqrt(variance) / mean, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_loads_are_as_counted(num_ranks):
    experts, scores, kept = case()
    loads = measure(experts, scores, num_ranks=num_ranks, kept=kept)
    tokens = [int((experts == expert).sum()) for expert in range(8)]
    check_load(loads.experts, tokens)
    each = 8 // num_ranks
    check_load(loads.ranks, [sum(tokens[rank * each : (rank + 1) * each]) for rank in range(num_ranks)])
    assert loads.drop_rate == pytest.approx((~kept).mean())
    shares = np.float64(scores) / np.float64(scores).sum(1, keepdims=True)
    assert loads.router_entropy == pytest.approx(-(shares * np.log(shares)).sum(1).mean(), rel=1e-5)


def test_entropy_is_ln_e_without_and_0_with_conviction():
    experts = np.zeros((4, 1), np.int32)
    assert measure(experts, jnp.full((4, 8), 0.3)).router_entropy == pytest.approx(math.log(8), rel=1e-6)
    assert measure(experts, jnp.eye(8)[:4]).router_entropy == 0


@pytest.mark.parametrize("top_k", cases(2, grid=[1, 2, 4]))
def test_drop_rates_at_the_extremes_of_capacity(top_k):
    tokens, num_experts = 32, 8
    experts = (np.arange(tokens * top_k) % num_experts).reshape(tokens, top_k).astype(np.int32)
    all_to_one = np.broadcast_to(np.arange(top_k), (tokens, top_k)).astype(np.int32)
    scores = np.ones((tokens, num_experts), np.float32)

    def drop_rate(experts, capacity):
        _, kept = moe.kept(experts, capacity, num_experts)
        return float(measure(experts, scores, kept=kept).drop_rate)

    fair = tokens * top_k // num_experts
    assert drop_rate(experts, fair) == 0  # factor 1, exactly full
    assert drop_rate(experts, fair // 2) == 0.5
    assert drop_rate(all_to_one, tokens) == 0  # room for every token
    assert drop_rate(all_to_one, fair) == pytest.approx(1 - fair / tokens)
    assert drop_rate(all_to_one, 0) == 1


@pytest.mark.parametrize("unassigned", [2, -1])
def test_unassigned_choices_are_neither_load_nor_drops(unassigned):
    experts = np.array([[0, unassigned], [unassigned, 1], [0, unassigned], [unassigned, unassigned]], np.int32)
    kept = experts != unassigned
    loads = measure(experts, np.ones((4, 2), np.float32), kept=kept)
    assert loads.experts.tokens.tolist() == [2, 1]
    assert loads.drop_rate == 0


def test_over_ranks_the_global_batch_is_measured(mesh8):
    experts, scores, kept = case()
    spec = P("fsdp")
    kernel = functools.partial(moe.measure, num_ranks=4, axis="fsdp")
    sharded = jax.shard_map(
        lambda experts, scores, kept: kernel(experts, scores, kept=kept),
        mesh=mesh8,
        in_specs=spec,
        out_specs=P(),
    )
    found, expected = jax.jit(sharded)(experts, scores, kept), measure(experts, scores, num_ranks=4, kept=kept)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def stacked(*tokens, num_ranks=4, drop_rates=None):
    """The loads of layers that have these tokens at their experts."""
    layers = []
    for row in tokens:
        experts = np.repeat(np.arange(len(row)), row)[:, None].astype(np.int32)
        layers.append(measure(experts, np.ones((len(experts), len(row)), np.float32), num_ranks=num_ranks))
    loads = jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
    return loads if drop_rates is None else loads._replace(drop_rate=jnp.asarray(drop_rates))


EVEN = [1000, 1100, 1050, 1000, 1100, 1000, 1050, 1000]


def test_scalars_are_the_worst_layers():
    loads = stacked(EVEN, [1000] * 7 + [3000], drop_rates=[0.02, 0.0])
    found = moe.scalars(loads)
    assert all(jnp.ndim(value) == 0 for value in found.values())
    values = {name: float(value) for name, value in found.items()}
    assert values == pytest.approx(
        {
            "moe_expert_max_over_mean": 3000 / 1250,
            "moe_expert_max_over_min": 3.0,
            "moe_expert_variation": np.std([1000] * 7 + [3000]) / 1250,
            "moe_rank_max_over_mean": 4000 / 2500,
            "moe_rank_max_over_min": 2.0,
            "moe_rank_variation": np.std([2000] * 3 + [4000]) / 2500,
            "moe_drop_rate": 0.02,
            "moe_router_entropy": math.log(8),
        },
        rel=1e-5,
    )


def test_loads_out_of_the_metrics_of_a_step_are_those_that_were_measured():
    experts, scores, kept = case()
    told = jax.tree.map(lambda x: np.stack([x, x]), measure(experts, scores, num_ranks=4, kept=kept))
    metrics = {
        "moe/load": told.experts.tokens,
        "moe/rank_load": told.ranks.tokens,
        "moe/drop_rate": told.drop_rate,
        "moe/router_entropy": told.router_entropy,
    }
    for found, expected in zip(jax.tree.leaves(moe.loads(metrics)), jax.tree.leaves(told), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert moe.loads({"accuracy": 1.0}) is None


def test_no_advice_when_all_is_well():
    assert moe.advice(stacked(EVEN, EVEN, drop_rates=[0.0, 0.01])) == []
    assert moe.advice(jax.tree.map(lambda x: x[0], stacked(EVEN))) == []


def test_advice_names_the_layers_the_numbers_and_a_way_out():
    uneven, imbalanced = [1000] * 7 + [1500], [1000] * 6 + [3000, 1500]
    loads = stacked(EVEN, uneven, imbalanced, drop_rates=[0.011, 0.0, 0.2])
    experts, ranks, drops = moe.advice(loads)
    assert (experts.kind, experts.layers) == ("experts", (2, 1))
    assert experts.text.startswith(
        "layer 2 (and 1 more of 3) is imbalanced: the busiest expert gets 3 times the tokens of the least busy (healthy"
    )
    assert "auxiliary loss or a balancing bias" in experts.text
    assert (ranks.kind, ranks.layers) == ("ranks", (2,))
    assert "layer 2 is imbalanced over ranks: all wait for one that gets 1.71 times the mean" in ranks.text
    assert "`mp.rebalance_experts`" in ranks.text
    assert (drops.kind, drops.layers) == ("drops", (2, 0))
    assert "layer 2 (and 1 more of 3) drops 20.0% of its choices" in drops.text
    assert "this load needs 2.29 at least" in drops.text  # 3000 / 1312.5


def test_advice_on_one_layer_says_uneven_below_2_and_counts_the_idle():
    (experts,) = moe.advice(jax.tree.map(lambda x: x[0], stacked([1000] * 7 + [1500])))
    assert experts.text.startswith("the MoE layer is uneven: the busiest expert gets 1.5 times")
    first, *_ = moe.advice(stacked([1000] * 6 + [0, 0]))
    assert ", 2 of them get none (healthy up to 1.3)" in first.text


def test_uneven_experts_may_make_even_ranks():
    kinds = [one.kind for one in moe.advice(stacked([2000, 1000] * 4, num_ranks=4))]
    assert kinds == ["experts"]


def test_few_tokens_of_a_perfect_router_are_no_reason_for_advice():
    """Four tokens an expert: the busiest gets many times what the least busy does, by chance alone."""
    rng = np.random.default_rng(0)
    told, ratios = 0, []
    for _ in range(50):
        row = np.bincount(rng.integers(0, 16, 16 * 40), minlength=16).tolist()
        loads = stacked(row)
        ratios.append(float(loads.experts.max_over_min[0]))
        told += bool(moe.advice(loads))
    assert np.median(ratios) > 1.5
    assert told <= 10
    assert moe.advice(stacked([40] * 15 + [160])) != []
