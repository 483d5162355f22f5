"""Routing against NumPy code that loops over tokens and assignments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import moe
from meshpar.moe import Routing
from meshpar.moe import routing as routing_module
from tests.errors import raises
from tests.grid import cases

MIXTRAL = Routing(num_experts=8, top_k=2)
DEEPSEEK = Routing(num_experts=32, top_k=6, score="sigmoid", scale=2.5, groups=8, top_groups=4)
SWITCH = Routing(num_experts=16, top_k=1, normalize=False, capacity_factor=1.25)

SHAPES = [(4, 1), (4, 2), (8, 3), (8, 4), (16, 5), (32, 6), (64, 7), (64, 8)]
"""(num_experts, top_k)."""
NORMS = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sigmoid", True)]
GRID = [
    Routing(num_experts=num_experts, top_k=k, score=score, normalize=normalize, scale=1.5)
    for (num_experts, k), (score, normalize) in itertools.product(SHAPES, NORMS)
    if k > 1 or not normalize
]

compiled = jax.jit(moe.route, static_argnames="routing")
find_kept = jax.jit(moe.assign_slots, static_argnames="num_experts")


def logits_of(tokens, routing, seed=0, scale=2.0):
    return (scale * np.random.default_rng(seed).normal(size=(tokens, routing.num_experts))).astype(np.float32)


def by_hand(logits, routing, bias=None):
    """Return (experts, weights, scores) in float64, computed token by token."""
    logits = np.asarray(logits, np.float64)
    if routing.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
    experts, weights = [], []
    for token in scores:
        biased = token if bias is None else token + np.asarray(bias, np.float64)
        size = len(token) // routing.groups
        groups = [range(group * size, (group + 1) * size) for group in range(routing.groups)]
        ranked = sorted(groups, key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
        allowed = [expert for group in ranked[: routing.top_groups] for expert in group]
        best = sorted(allowed, key=lambda expert: (-biased[expert], expert))[: routing.top_k]
        gates = np.array([token[expert] for expert in best])
        experts.append(best)
        weights.append(routing.scale * gates / (gates.sum() if routing.normalize else 1))
    return np.array(experts), np.array(weights), scores


def check(routed, expected, rtol=2e-6):
    experts, weights, scores = expected
    np.testing.assert_array_equal(routed.experts, experts)
    # float32 against float64: a few roundings, of exp and of a sum.
    np.testing.assert_allclose(routed.weights, weights, rtol=rtol, atol=1e-9)
    np.testing.assert_allclose(routed.scores, scores, rtol=rtol, atol=1e-9)


IN_GROUPS = [
    dataclasses.replace(DEEPSEEK, groups=groups, top_groups=top_groups)
    for groups, top_groups in ((8, 4), (32, 6), (4, 3), (2, 2), (16, 3))
]


@pytest.mark.parametrize("with_bias", cases(True, grid=[False, True]))
@pytest.mark.parametrize("routing", cases(*GRID[::5], *IN_GROUPS[:2], grid=[*GRID, *IN_GROUPS]), ids=str)
def test_route_matches_numpy(routing, with_bias):
    logits = logits_of(33, routing)
    bias = np.linspace(-0.4, 0.4, routing.num_experts, dtype=np.float32) if with_bias else None
    routed = compiled(logits, routing=routing, bias=bias)
    check(routed, by_hand(logits, routing, bias))
    assert routed.experts.dtype == jnp.int32
    if routing.normalize:
        np.testing.assert_allclose(routed.weights.sum(1), routing.scale, rtol=1e-6)
    groups = np.asarray(routed.experts) // (routing.num_experts // routing.groups)
    assert max(len(set(token)) for token in groups) <= routing.top_groups


def test_group_score_is_the_sum_of_the_two_best_experts():
    routing = Routing(num_experts=8, top_k=2, score="sigmoid", groups=2, top_groups=1)
    logits = jnp.array([[3.0, -3, -3, -3, 2, 2, -3, -3]])
    assert moe.route(logits, routing).experts.tolist() == [[4, 5]]


def test_negative_biases_stay_within_the_best_groups():
    routing = Routing(num_experts=8, top_k=3, score="sigmoid", groups=2, top_groups=1)
    logits = jnp.array([[1.0, 0, -1, -2, -9, -9, -9, -9]])
    assert moe.route(logits, routing, bias=jnp.full(8, -5.0)).experts.tolist() == [[0, 1, 2]]


def test_bias_changes_experts_but_not_gate_weights():
    logits = jnp.asarray(logits_of(50, MIXTRAL))
    bias = jnp.zeros(8).at[5].set(10.0)
    routed = compiled(logits, routing=MIXTRAL, bias=bias)
    assert set(np.asarray(routed.experts[:, 0]).tolist()) == {5}
    check(routed, by_hand(logits, MIXTRAL, bias))
    np.testing.assert_array_equal(routed.scores, compiled(logits, routing=MIXTRAL).scores)


@pytest.mark.parametrize("routing", [MIXTRAL, dataclasses.replace(DEEPSEEK, groups=1, top_groups=1), SWITCH])
def test_ties_go_to_the_lowest_expert(routing):
    everyone = compiled(jnp.zeros((5, routing.num_experts)), routing=routing)
    assert everyone.experts.tolist() == [list(range(routing.top_k))] * 5
    two = np.zeros((5, routing.num_experts))
    two[:, [3, 6]] = 1.0
    assert compiled(two, routing=routing).experts[0].tolist()[:2] == [3, 6][: routing.top_k]


def test_ties_between_groups_go_to_the_lowest():
    assert compiled(jnp.zeros((1, 32)), routing=DEEPSEEK).experts.tolist() == [list(range(6))]


def test_logits_break_ties_of_rounded_scores():
    """A sigmoid of 20 and one of 30 are both 1 in float32."""
    routing = Routing(num_experts=8, top_k=2, score="sigmoid")
    assert compiled(jnp.full((1, 8), 20.0).at[0, 5].set(30.0), routing=routing).experts.tolist() == [[5, 0]]


@pytest.mark.parametrize(("score", "normalize"), cases(("softmax", False), ("sigmoid", True), grid=NORMS))
def test_weights_are_finite_when_scores_underflow(score, normalize):
    routing = Routing(num_experts=8, top_k=2, score=score, normalize=normalize)
    logits = np.full((6, 8), -300.0, np.float32)
    logits[:, 3] = -200.0
    routed = compiled(logits, routing=routing)
    assert routed.experts[:, 0].tolist() == [3] * 6
    gradient = jax.grad(lambda x: moe.route(x, routing).weights[:, 0].sum())(jnp.asarray(logits))
    assert np.isfinite(routed.weights).all()
    assert np.isfinite(gradient).all()
    if normalize:  # sigmoid scores included, which are all 0 in float32
        np.testing.assert_allclose(routed.weights, [[1.0, 0.0]] * 6, atol=1e-30)


@pytest.mark.parametrize("routing", [MIXTRAL, DEEPSEEK, dataclasses.replace(MIXTRAL, normalize=False)])
def test_gradients_match_finite_differences(routing):
    with jax.enable_x64(True):
        logits = jnp.asarray(logits_of(7, routing), jnp.float64)
        rng = np.random.default_rng(1)
        of_weights, of_scores = rng.normal(size=(7, routing.top_k)), rng.normal(size=(7, routing.num_experts))

        def loss(logits):
            _, weights, scores = moe.route(logits, routing)
            return (weights * of_weights).sum() + (scores * of_scores).sum()

        def loss_by_hand(logits):
            _, weights, scores = by_hand(logits, routing)
            return (weights * of_weights).sum() + (scores * of_scores).sum()

        actual, step = np.asarray(jax.jit(jax.grad(loss))(logits)), 1e-6
        for token, expert in itertools.product(range(0, 7, 3), range(0, routing.num_experts, 3)):
            moved = np.zeros(logits.shape)
            moved[token, expert] = step
            slope = (loss_by_hand(logits + moved) - loss_by_hand(logits - moved)) / (2 * step)
            # The rounding error of a central difference at 1e-6 is about 1e-10 / 1e-6.
            assert actual[token, expert] == pytest.approx(slope, rel=1e-5, abs=1e-8)
        assert np.abs(actual).max() > 0.01


def test_half_precision_logits_are_scored_in_float32():
    logits = jnp.asarray(logits_of(16, MIXTRAL), jnp.bfloat16)
    routed = moe.route(logits, MIXTRAL)
    assert routed.weights.dtype == routed.scores.dtype == jnp.float32
    check(routed, by_hand(np.asarray(logits, np.float32), MIXTRAL))


@pytest.mark.parametrize("with_bias", cases(True, grid=[False, True]))
@pytest.mark.parametrize(
    "routing",
    cases(MIXTRAL, DEEPSEEK, grid=[MIXTRAL, SWITCH, dataclasses.replace(DEEPSEEK, groups=1, top_groups=1), DEEPSEEK]),
    ids=str,
)
def test_renumbered_experts_give_the_same_bits(routing, with_bias):
    logits = logits_of(512, routing, seed=3, scale=4.0)
    rng = np.random.default_rng(0)
    by_group = np.arange(routing.num_experts).reshape(routing.groups, -1)
    order = rng.permuted(by_group, axis=1)[rng.permutation(routing.groups)].reshape(-1)
    bias = rng.normal(size=routing.num_experts).astype(np.float32) * 0.1 if with_bias else None
    before = compiled(logits, routing=routing, bias=bias)
    after = compiled(logits[:, order], routing=routing, bias=None if bias is None else bias[order])
    np.testing.assert_array_equal(order[after.experts], before.experts)
    np.testing.assert_array_equal(after.weights, before.weights)
    np.testing.assert_array_equal(after.scores, before.scores[:, order])


@pytest.mark.parametrize("num_experts", cases(5, 4096, grid=[1, 5, 256, 4096]))
@pytest.mark.parametrize("scale", cases(4.0, grid=[0.1, 4.0]))
def test_softmax_is_accurate_and_order_independent(num_experts, scale):
    routing = Routing(num_experts=num_experts, top_k=1, normalize=False)
    logits = logits_of(64, routing, scale=scale)
    order = np.random.default_rng(1).permutation(num_experts)
    scores, renumbered = (compiled(x, routing=routing).scores for x in (logits, logits[:, order]))
    np.testing.assert_array_equal(renumbered, scores[:, order])
    *_, expected = by_hand(logits, routing)
    # exp of a float32 difference of up to 30 has the rounding error of that difference, 1e-6.
    np.testing.assert_allclose(scores, expected, rtol=3e-6 if scale > 1 else 4e-7)


@pytest.mark.parametrize("num_experts", [6, 8, 31])
def test_sums_of_almost_equal_scores_do_not_depend_on_the_order(num_experts):
    """The largest sums: all terms are between 0.8 and 1, so a term with one more bit would be rounded."""
    values = np.random.default_rng(num_experts).uniform(0.8, 1, (64, num_experts)).astype(np.float32)
    values[:, 0] = 1
    total, backwards = (routing_module._order_independent_sum(jnp.asarray(x)) for x in (values, values[:, ::-1]))
    np.testing.assert_array_equal(total, backwards)
    np.testing.assert_allclose(total[:, 0], values.astype(np.float64).sum(1), rtol=2**-23)


# ---- Expert choice ---------------------------------------------------------------------------------------------------

ENCODER = Routing(num_experts=4, top_k=2, choice="expert", normalize=False, causal=False)


@pytest.mark.parametrize("score", cases("softmax", grid=["softmax", "sigmoid"]))
@pytest.mark.parametrize("tokens", cases(13, grid=[12, 13]))
def test_experts_choose_their_best_tokens(tokens, score):
    routing = dataclasses.replace(ENCODER, score=score)
    logits = logits_of(tokens, routing)
    routed = compiled(logits, routing=routing)
    *_, scores = by_hand(logits, dataclasses.replace(routing, choice="token", top_k=4))
    each = math.ceil(tokens * 2 / 4)
    assert moe.capacity(tokens, routing) == each
    for expert in range(4):
        chosen = sorted(sorted(range(tokens), key=lambda token: (-scores[token, expert], token))[:each])
        column = np.asarray(routed.experts[:, expert])
        assert np.flatnonzero(column == expert).tolist() == chosen
        assert set(column.tolist()) == {expert, 4}
        np.testing.assert_allclose(routed.weights[chosen, expert], scores[chosen, expert], rtol=2e-6)
    assert (np.asarray(routed.weights)[np.asarray(routed.experts) == 4] == 0).all()
    assert moe.count(routed.experts, 4).tolist() == [each] * 4
    slot, kept = find_kept(routed.experts, each, num_experts=4)
    np.testing.assert_array_equal(kept, np.asarray(routed.experts) < 4)
    assert sorted(np.asarray(slot)[np.asarray(kept)].tolist()) == sorted(list(range(each)) * 4)


def test_among_equal_tokens_experts_choose_the_earliest():
    routed = compiled(jnp.zeros((8, 4)), routing=ENCODER)
    assert (np.asarray(routed.experts) < 4).tolist() == [[True] * 4] * 4 + [[False] * 4] * 4


def test_expert_choice_in_a_causal_model_needs_force():
    with raises("conflict", 'Routing(choice="expert")'):
        Routing(num_experts=4, top_k=2, choice="expert", normalize=False)
    assert Routing(num_experts=4, top_k=2, choice="expert", normalize=False, force=True).causal
    # The reason: a later token replaces an earlier one.
    logits = jnp.asarray(logits_of(8, ENCODER))
    changed = logits.at[7].set(9.0)
    before, after = (np.asarray(compiled(x, routing=ENCODER).experts[:7]) for x in (logits, changed))
    assert (before != after).any()


# ---- Padding ---------------------------------------------------------------------------------------------------------

CHOSEN_BY_EXPERTS = Routing(num_experts=8, top_k=3, normalize=False, choice="expert", causal=False)


@pytest.mark.parametrize("routing", [DEEPSEEK, SWITCH, CHOSEN_BY_EXPERTS], ids=["groups", "top 1", "by experts"])
def test_padding_has_no_expert_and_no_influence(routing):
    """The other tokens have the experts and gate weights that they have without the padding."""
    logits, mask = logits_of(37, routing), np.random.default_rng(1).random(37) < 0.6
    logits[~mask] += 50  # experts would choose the padding first
    routed, alone = compiled(logits, routing=routing, mask=mask), compiled(logits[mask], routing=routing)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[mask], routed), alone)
    assert (routed.experts[~mask] == routing.num_experts).all()
    assert not routed.weights[~mask].any()
    everywhere = compiled(logits, routing=routing, mask=np.zeros(37, bool))
    assert moe.count(everywhere.experts, routing.num_experts).sum() == 0


# ---- Capacity --------------------------------------------------------------------------------------------------------


def kept_by_hand(experts, capacity, num_experts):
    seen = [0] * (num_experts + 1)
    slots = np.zeros(experts.shape, int)
    for token, assigned in enumerate(experts):
        for column, expert in enumerate(assigned):
            slots[token, column] = seen[expert]
            seen[expert] += 1
    return slots, (slots < capacity) & (experts < num_experts)


def random_experts(kind, tokens, num_experts, top_k):
    rng = np.random.default_rng(5)
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k]
    if kind == "all to the same":
        experts[:] = np.arange(top_k)
    if kind == "unassigned":
        experts[rng.random(experts.shape) < 0.5] = num_experts
    if kind == "balanced":
        experts[:] = (np.arange(tokens * top_k) % num_experts).reshape(tokens, top_k)
    return experts.astype(np.int32)


@pytest.mark.parametrize("kind", ["random", "all to the same", "balanced", "unassigned"])
@pytest.mark.parametrize(("num_experts", "top_k"), cases((8, 3), (64, 8), grid=SHAPES))
def test_kept_fills_slots_in_row_major_order(num_experts, top_k, kind):
    experts = random_experts(kind, 24, num_experts, top_k)
    fair = math.ceil(24 * top_k / num_experts)
    for capacity in (1, fair, 2 * fair, 24):
        slot, kept = find_kept(experts, capacity, num_experts=num_experts)
        expected_slot, expected = kept_by_hand(experts, capacity, num_experts)
        np.testing.assert_array_equal(slot, expected_slot)
        np.testing.assert_array_equal(kept, expected)
        assert np.bincount(experts[kept], minlength=num_experts).max() <= capacity
    assert kept.sum() == (experts < num_experts).sum()  # the capacity is the number of tokens
    if kind == "balanced":  # all experts exactly full
        assert find_kept(experts, fair, num_experts=num_experts)[1].all()
    if kind == "all to the same":
        _, kept = find_kept(experts, 5, num_experts=num_experts)
        np.testing.assert_array_equal(kept, np.arange(24)[:, None] < [5] * top_k)


def test_another_expert_of_a_token_changes_which_later_token_is_dropped():
    experts = np.array([[0], [0], [1], [0]], np.int32)
    assert find_kept(experts, 2, num_experts=2)[1][:, 0].tolist() == [True, True, True, False]
    experts[1] = 1
    assert find_kept(experts, 2, num_experts=2)[1].all()


@pytest.mark.parametrize("unassigned", [-1, -8, 8, 100])
def test_invalid_expert_indices_are_unassigned(unassigned):
    experts = np.array([[0, unassigned], [unassigned, 7], [0, 7]], np.int32)
    assert moe.count(experts, 8).tolist() == [2, 0, 0, 0, 0, 0, 0, 2]
    slot, kept = find_kept(experts, 1, num_experts=8)
    assert kept.tolist() == [[True, False], [False, True], [False, False]]
    assert np.asarray(slot)[[0, 1, 2, 2], [0, 1, 0, 1]].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "factor", "expected"),
    [(64, 1.0, 16), (64, 1.25, 20), (64, 2.0, 32), (100, 2.2, 55), (180, 2.2, 99), (65, 1.0, 17), (64, 100.0, 64),
     (64, None, 64), (1, 0.01, 1), (0, 1.0, 0)],
)  # fmt: skip
def test_capacity(tokens, factor, expected):
    assert moe.capacity(tokens, Routing(num_experts=8, top_k=2, capacity_factor=factor)) == expected


def test_kept_has_no_temporary_of_assignments_times_experts():
    tokens, num_experts, top_k = 2048, 256, 8
    experts = jax.ShapeDtypeStruct((tokens, top_k), "int32")
    compiled = (
        jax.jit(functools.partial(moe.assign_slots, capacity=64, num_experts=num_experts)).lower(experts).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 4 * tokens * top_k
