"""Load metrics against NumPy, over sharded batches, and the advice."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import moe

measure = jax.jit(moe.measure, static_argnames="num_ranks")


def case(tokens=64, num_experts=8, top_k=2, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, num_experts)).astype(np.float32)
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    experts[: tokens // 2, 0] = 0
    return experts, scores, rng.random((tokens, top_k)) < 0.75


def check_load(actual, tokens):
    mean = sum(tokens) / len(tokens)
    assert np.asarray(actual.tokens).tolist() == tokens
    assert actual.max_over_mean == pytest.approx(max(tokens) / mean, rel=1e-6)
    assert actual.max_over_min == pytest.approx(max(tokens) / max(min(tokens), 1), rel=1e-6)
    variance = sum((count - mean) ** 2 for count in tokens) / len(tokens)
    assert actual.variation == pytest.approx(math.sqrt(variance) / mean, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_measure_matches_numpy(num_ranks):
    experts, scores, kept = case()
    loads = measure(experts, scores, num_ranks=num_ranks, is_kept=kept)
    tokens = [int((experts == expert).sum()) for expert in range(8)]
    check_load(loads.experts, tokens)
    each = 8 // num_ranks
    check_load(loads.ranks, [sum(tokens[rank * each : (rank + 1) * each]) for rank in range(num_ranks)])
    assert loads.drop_rate == pytest.approx((~kept).mean())
    shares = np.float64(scores) / np.float64(scores).sum(1, keepdims=True)
    assert loads.router_entropy == pytest.approx(-(shares * np.log(shares)).sum(1).mean(), rel=1e-5)


def test_entropy_of_equal_and_of_certain_scores():
    experts = np.zeros((4, 1), np.int32)
    assert measure(experts, jnp.full((4, 8), 0.3)).router_entropy == pytest.approx(math.log(8), rel=1e-6)
    assert measure(experts, jnp.eye(8)[:4]).router_entropy == 0


@pytest.mark.parametrize("unassigned", [2, -1])
def test_unassigned_elements_are_not_counted(unassigned):
    experts = np.array([[0, unassigned], [unassigned, 1], [0, unassigned], [unassigned, unassigned]], np.int32)
    kept = experts != unassigned
    loads = measure(experts, np.ones((4, 2), np.float32), is_kept=kept)
    assert loads.experts.tokens.tolist() == [2, 1]
    assert loads.drop_rate == 0


def test_measure_over_ranks_matches_the_global_batch(mesh8):
    experts, scores, kept = case()
    spec = P("fsdp")
    kernel = functools.partial(moe.measure, num_ranks=4, axis="fsdp")
    sharded = jax.shard_map(
        lambda experts, scores, kept: kernel(experts, scores, is_kept=kept), mesh=mesh8, in_specs=spec, out_specs=P()
    )
    actual, expected = jax.jit(sharded)(experts, scores, kept), measure(experts, scores, num_ranks=4, is_kept=kept)
    for x, exact in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, exact, rtol=1e-6)


def stacked(*tokens, num_ranks=4, drop_rates=None):
    """Return the loads of layers with these numbers of tokens per expert."""
    layers = []
    for row in tokens:
        experts = np.repeat(np.arange(len(row)), row)[:, None].astype(np.int32)
        layers.append(measure(experts, np.ones((len(experts), len(row)), np.float32), num_ranks=num_ranks))
    loads = jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
    return loads if drop_rates is None else loads._replace(drop_rate=jnp.asarray(drop_rates))


EVEN = [1000, 1100, 1050, 1000, 1100, 1000, 1050, 1000]


def test_scalars_are_of_the_worst_layer():
    loads = stacked(EVEN, [1000] * 7 + [3000], drop_rates=[0.02, 0.0])
    actual = moe.scalars(loads)
    assert all(jnp.ndim(value) == 0 for value in actual.values())
    values = {name: float(value) for name, value in actual.items()}
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


def test_loads_from_metrics_match_measure():
    experts, scores, kept = case()
    measured = jax.tree.map(lambda x: np.stack([x, x]), measure(experts, scores, num_ranks=4, is_kept=kept))
    metrics = {
        "moe/load": measured.experts.tokens,
        "moe/rank_load": measured.ranks.tokens,
        "moe/drop_rate": measured.drop_rate,
        "moe/router_entropy": measured.router_entropy,
    }
    for actual, expected in zip(jax.tree.leaves(moe.loads(metrics)), jax.tree.leaves(measured), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert moe.loads({"accuracy": 1.0}) is None


def test_no_advice_for_healthy_loads():
    assert moe.advice(stacked(EVEN, EVEN, drop_rates=[0.0, 0.01])) == []
    assert moe.advice(jax.tree.map(lambda x: x[0], stacked(EVEN))) == []


def test_advice_has_layers_numbers_and_a_remedy():
    uneven, imbalanced = [1000] * 7 + [1500], [1000] * 6 + [3000, 1500]
    loads = stacked(EVEN, uneven, imbalanced, drop_rates=[0.011, 0.0, 0.2])
    experts, ranks, drops = moe.advice(loads)
    assert (experts.kind, experts.layers) == ("experts", (2, 1))
    assert experts.text.startswith(
        "layer 2 (and 1 more of 3) is imbalanced: the busiest expert gets 3 times the tokens of the least busy (healthy"
    )
    assert "auxiliary loss or a balancing bias" in experts.text
    assert (ranks.kind, ranks.layers) == ("ranks", (2,))
    assert (
        "layer 2 is imbalanced over ranks: all ranks wait for the busiest, which gets 1.71 times the mean" in ranks.text
    )
    assert "`mp.rebalance_experts`" in ranks.text
    assert (drops.kind, drops.layers) == ("drops", (2, 0))
    assert "layer 2 (and 1 more of 3) drops 20.0% of the assignments" in drops.text
    assert "this load needs at least 2.29" in drops.text  # 3000 / 1312.5


def test_advice_for_one_layer_and_for_idle_experts():
    (experts,) = moe.advice(jax.tree.map(lambda x: x[0], stacked([1000] * 7 + [1500])))
    assert experts.text.startswith("the MoE layer is uneven: the busiest expert gets 1.5 times")
    first, *_ = moe.advice(stacked([1000] * 6 + [0, 0]))
    assert ", 2 get none (healthy up to 1.3)" in first.text


def test_uneven_experts_with_balanced_ranks():
    kinds = [advice.kind for advice in moe.advice(stacked([2000, 1000] * 4, num_ranks=4))]
    assert kinds == ["experts"]


def test_chance_imbalance_of_few_tokens_gives_no_advice():
    """With 40 tokens per expert, a perfect router has uneven loads by chance."""
    rng = np.random.default_rng(0)
    num_advised, ratios = 0, []
    for _ in range(50):
        row = np.bincount(rng.integers(0, 16, 16 * 40), minlength=16).tolist()
        loads = stacked(row)
        ratios.append(float(loads.experts.max_over_min[0]))
        num_advised += bool(moe.advice(loads))
    assert np.median(ratios) > 1.5
    assert num_advised <= 10
    assert moe.advice(stacked([40] * 15 + [160])) != []
