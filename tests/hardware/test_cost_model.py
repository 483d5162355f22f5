"""The closed forms of collective costs, against the literature's numbers and against each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Link, parse_cluster
from meshpar.hardware.cost_model import Cost
from tests.errors import raises

LINK = Link(alpha_s=1e-6, bytes_per_s=100e9)
ALPHA, BETA = 1e-6, 1e-11
POD = parse_cluster("h100:8x8")
SIZES = st.integers(min_value=1, max_value=4096)
PAYLOADS = st.floats(min_value=0, max_value=1e13)


def test_message_time_is_alpha_plus_bytes_over_bandwidth():
    assert cost.message(5e5) == Cost(steps=1, bytes_sent=5e5, bytes_in_turn=5e5)
    assert cost.message(5e5).time_s(LINK) == pytest.approx(ALPHA + 5e5 * BETA)
    assert cost.message(0).time_s(LINK) == ALPHA


@pytest.mark.parametrize(
    ("algorithm", "steps", "sent", "in_turn"),
    [
        (cost.ring_all_reduce, 14, 14 / 8, 14 / 8),
        (cost.ring_all_gather, 7, 7 / 8, 7 / 8),
        (cost.ring_reduce_scatter, 7, 7 / 8, 7 / 8),
        (cost.tree_all_reduce, 3, 3, 3),
        (cost.halving_doubling_all_reduce, 6, 14 / 8, 14 / 8),
        (cost.naive_root_all_reduce, 14, 7, 14),
        (cost.parameter_server_all_reduce, 14, 7, 14),
        (cost.all_to_all, 7, 7 / 8, 7 / 8),
        (cost.ring_broadcast, 7, 1, 1),
    ],
)
def test_steps_and_bytes_for_eight_ranks(algorithm, steps, sent, in_turn):
    """FACTS 2."""
    found = algorithm(8e6, 8)
    assert found.steps == steps
    assert (found.bytes_sent, found.bytes_in_turn) == pytest.approx((sent * 8e6, in_turn * 8e6))


@given(PAYLOADS, SIZES)
def test_all_reduce_equals_reduce_scatter_plus_all_gather(payload, ranks):
    both = cost.ring_reduce_scatter(payload, ranks) + cost.ring_all_gather(payload, ranks)
    whole = cost.ring_all_reduce(payload, ranks)
    assert both.steps == whole.steps
    assert both.bytes_sent == pytest.approx(whole.bytes_sent)
    assert both.time_s(LINK) == pytest.approx(whole.time_s(LINK))


@given(PAYLOADS, SIZES)
def test_all_reduce_bytes_respect_the_lower_bound(payload, ranks):
    bound = cost.all_reduce_lower_bound_bytes(payload, ranks) * (1 - 1e-12)
    for algorithm in (
        cost.ring_all_reduce,
        cost.tree_all_reduce,
        cost.halving_doubling_all_reduce,
        cost.naive_root_all_reduce,
    ):
        assert algorithm(payload, ranks).bytes_in_turn >= bound


@given(PAYLOADS, st.integers(0, 12))
def test_halving_doubling_reaches_the_bound_for_powers_of_two(payload, doublings):
    found = cost.halving_doubling_all_reduce(payload, 2**doublings)
    assert found.bytes_sent == cost.all_reduce_lower_bound_bytes(payload, 2**doublings)
    assert found.steps == 2 * doublings


def test_halving_doubling_adds_two_messages_for_other_counts():
    assert cost.tree_all_reduce(10, 6) == Cost(steps=4, bytes_sent=30, bytes_in_turn=40, bytes_reduced=30)
    assert cost.halving_doubling_all_reduce(10, 6).bytes_sent == 2 * 3 / 4 * 10 + 10
    assert cost.halving_doubling_all_reduce(10, 6).bytes_in_turn == 2 * 3 / 4 * 10 + 20
    assert cost.halving_doubling_all_reduce(10, 6).steps == 6


@pytest.mark.parametrize(("algorithm", "ranks", "reduced"), [
    (cost.ring_all_reduce, 8, 7 / 8),
    (cost.ring_reduce_scatter, 8, 7 / 8),
    (cost.halving_reduce_scatter, 8, 7 / 8),
    (cost.halving_doubling_all_reduce, 8, 7 / 8),
    (cost.halving_doubling_all_reduce, 6, 3 / 4 + 1),
    (cost.tree_all_reduce, 8, 3),
    (cost.tree_all_reduce, 6, 3),
    (cost.binomial_tree_all_reduce, 6, 3),
    (cost.naive_root_all_reduce, 8, 7),
    (functools.partial(cost.parameter_server_all_reduce, num_servers=8), 8, 7 / 8),
    (cost.ring_all_gather, 8, 0),
    (cost.all_to_all, 8, 0),
    (cost.ring_broadcast, 8, 0),
])  # fmt: skip
def test_reduced_bytes_take_gamma(algorithm, ranks, reduced):
    """Thakur, Rabenseifner, Gropp 2005, sections 4.3 to 4.5."""
    found, gamma = algorithm(8e6, ranks), 3e-12
    assert found.bytes_reduced == pytest.approx(reduced * 8e6)
    assert found.time_s(LINK, gamma_s_per_byte=gamma) == pytest.approx(found.time_s(LINK) + reduced * 8e6 * gamma)
    both = cost.hierarchical_all_reduce(8e6, 8 * ranks, inner=8)
    assert both.inside.bytes_reduced == pytest.approx(7 / 8 * 8e6)
    assert both.across.bytes_reduced == pytest.approx((ranks - 1) / ranks * 1e6)


def test_one_rank_sends_nothing():
    for kind in set(cost.KINDS) - {"collective-permute", "send", "recv"}:
        assert cost.collective_time_s(kind, 1e9, 1, LINK) == cost.bytes_sent(kind, 1e9, 1) == 0
    assert cost.tree_all_reduce(1e9, 1).time_s(LINK) == cost.naive_root_all_reduce(1e9, 1).time_s(LINK) == 0


def test_hierarchical_all_reduce_sends_its_shard_across_nodes():
    found = cost.hierarchical_all_reduce(8e6, 64, inner=8)
    assert found.inside.steps == 14
    assert found.inside.bytes_sent == pytest.approx(2 * 7 / 8 * 8e6)
    assert found.across.steps == 14
    assert found.across.bytes_sent == pytest.approx(2 * 7 / 8 * 1e6)


@given(st.integers(0, 5), st.integers(0, 5), PAYLOADS)
def test_a_hierarchy_sends_the_bytes_of_one_ring(inner, outer, payload):
    inner, outer = 2**inner, 2**outer
    found = cost.hierarchical_all_reduce(payload, inner * outer, inner=inner)
    assert found.inside.bytes_sent + found.across.bytes_sent == pytest.approx(
        cost.ring_all_reduce(payload, inner * outer).bytes_sent
    )


def test_parameter_servers_on_every_rank_equal_a_ring():
    spread = cost.parameter_server_all_reduce(8e6, 8, num_servers=8)
    assert spread == cost.ring_all_reduce(8e6, 8)


@given(st.integers(min_value=3, max_value=4096))
def test_ring_and_tree_take_equally_long_at_the_crossover(ranks):
    at = cost.ring_tree_crossover_bytes(ranks, LINK)

    def times(payload):
        return cost.ring_all_reduce(payload, ranks).time_s(LINK), cost.tree_all_reduce(payload, ranks).time_s(LINK)

    ring, tree = times(at)
    assert ring == pytest.approx(tree)
    ring, tree = times(at / 2)
    assert tree < ring
    ring, tree = times(at * 2)
    assert ring < tree


def test_crossover_may_not_exist():
    assert cost.ring_tree_crossover_bytes(1, LINK) is None
    assert cost.ring_tree_crossover_bytes(2, LINK) is None
    assert cost.ring_tree_crossover_bytes(8, Link(alpha_s=0, bytes_per_s=1e9)) == 0


@pytest.mark.parametrize(
    ("kind", "steps", "share"),
    [
        ("all-reduce", 14, 14 / 8),
        ("all-gather", 7, 7 / 8),
        ("reduce-scatter", 7, 7 / 8),
        ("all-to-all", 7, 7 / 8),
        ("ragged-all-to-all", 7, 7 / 8),
        ("collective-broadcast", 7, 1),
        ("collective-permute", 1, 1),
        ("send", 1, 1),
        ("recv", 1, 1),
    ],
)
def test_time_of_each_kind(kind, steps, share):
    assert cost.collective_time_s(kind, 1e9, 8, LINK) == pytest.approx(steps * ALPHA + share * 1e9 * BETA)
    assert cost.bytes_sent(kind, 1e9, 8) == (0 if kind == "recv" else share * 1e9)


def test_small_all_reduce_uses_the_tree():
    assert cost.collective_time_s("all-reduce", 4, 512, LINK) == pytest.approx(9 * (ALPHA + 4 * BETA))


def test_rings_between_nodes_use_all_network_ports():
    cluster = POD
    assert cost.collective_link("all-gather", cluster, num_nodes=1, per_node=8) == cluster.inside
    ring = cost.collective_link("all-gather", cluster, num_nodes=8, per_node=8)
    assert ring.bytes_per_s == 8 * 50e9
    assert ring.alpha_s == pytest.approx((7 * 4.0e-6 + 56 * 1.9e-6) / 63)
    assert cost.collective_link("all-reduce", cluster, num_nodes=8, per_node=1) == cluster.across
    for kind in ("all-to-all", "collective-permute"):
        assert cost.collective_link(kind, cluster, num_nodes=8, per_node=8) == cluster.across


def test_ring_is_not_faster_between_nodes_than_inside():
    cluster = parse_cluster("l40s:4x8")
    assert cost.collective_link("all-gather", cluster, num_nodes=4, per_node=8).bytes_per_s == 32e9


def test_algorithms_reject_invalid_sizes():
    algorithms = (
        cost.ring_all_gather, cost.ring_broadcast, cost.ring_all_reduce, cost.tree_all_reduce,
        cost.halving_doubling_all_reduce, cost.naive_root_all_reduce, cost.all_to_all,
    )  # fmt: skip
    sizes = ((1e6, 0), (1e6, -1), (-1, 8), (math.nan, 8))
    for algorithm, size in itertools.product(algorithms, sizes):
        with raises("out-of-range"):
            algorithm(*size)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *((functools.partial(cost.bytes_sent, kind, -1, 8), "out-of-range") for kind in cost.KINDS),
        (lambda: cost.hierarchical_all_reduce(1, 12, inner=5), "indivisible"),
        (lambda: cost.hierarchical_all_to_all(8, 8, inner=3), "indivisible"),
        (lambda: cost.parameter_server_all_reduce(8e6, 8, num_servers=9), "out-of-range"),
        (lambda: cost.collective_time_s("all_gather", 1, 8, LINK), "unknown-choice"),
        (lambda: cost.collective_link("all-reduce", POD, num_nodes=0, per_node=1), "not-an-int"),
        (lambda: cost.dropless_rows(64, 2, 6, 4), "indivisible"),
        (lambda: cost.dropless_rows(0, 2, 8, 4), "indivisible"),
    ],
)
def test_costs_reject_invalid_arguments(call, code):
    with raises(code):
        call()


def test_measured_axis_link_takes_precedence():
    ring, message = Link(alpha_s=3e-5, bytes_per_s=2e9), Link(alpha_s=1e-5, bytes_per_s=1e9)
    cluster = dataclasses.replace(parse_cluster("h100:8x8"), axes={"data": ring}, permutes={"data": message})
    where = {"num_nodes": 8, "per_node": 8}
    assert cost.collective_link("all-reduce", cluster, axes=("data",), **where) == ring
    assert cost.collective_link("all-to-all", cluster, axes=("data",), **where) == ring
    assert cost.collective_link("collective-permute", cluster, axes=("data",), **where) == message
    for axes in (("fsdp",), ("data", "fsdp"), ("unknown",), ()):
        usual = cost.collective_link("all-reduce", parse_cluster("h100:8x8"), **where)
        assert cost.collective_link("all-reduce", cluster, axes=axes, **where) == usual


def test_all_to_alls_of_deepseek_v3_over_64_ranks():
    """FACTS 6: s = 4096, k = 8, d = 7168, a byte each: 3.67 M a rank and direction, 425.7 M in 58 layers, both ways."""
    one = cost.moe_all_to_all(7168, 4096 // 64, 8, 64)
    payload = one.bytes_sent * 64 / 63
    assert payload == pytest.approx(3.67e6, rel=1e-3)
    assert 2 * 58 * payload == pytest.approx(425.7e6, rel=1e-4)
    assert one.steps == 63
    assert cost.moe_all_to_all(7168, 64, 8, 64, padding=1.25).bytes_sent == 1.25 * one.bytes_sent


def test_dropless_buffer_is_independent_of_num_experts():
    """A rank with fewer experts than k is sent no more rows of a token than it has experts."""
    assert [cost.dropless_rows(64, 8, num_experts, 8) for num_experts in (8, 32, 64, 256)] == [512, 2048, 4096, 4096]
    assert cost.dropless_rows(64, 8, 8, 1) == cost.dropless_rows(64, 8, 256, 1) == 512
    assert cost.dropless_rows(64, 8, 256, 8, 1.5) == 1.5 * 64 * 8
    assert cost.dropless_rows(10, 1, 8, 1, 1.1) == 10
    assert cost.dropless_rows(20, 4, 8, 8, 1.1) == 8 * 11  # 1.1 * 10 is above 11 in floating point
    assert cost.dropless_bytes(100, 64, 8, 256, 8) == (5 * 4096 + 2 * 512) * 116
    assert cost.dropless_bytes(100, 64, 8, 256, 8, chunks=4) == (5 * 4096 + 2 * 512) * 116
    # A bound of 1.3 times 2 rows is rounded up to 3 rows for each of 4 chunks.
    assert cost.dropless_bytes(100, 8, 8, 256, 8, bound_factor=1.3, chunks=4) == (5 * 4 * 8 * 3 + 2 * 64) * 116


def test_two_level_all_to_all_trades_bytes_for_messages():
    two = cost.hierarchical_all_to_all(64e6, 64, inner=8)
    assert (two.inside.steps, two.across.steps) == (7, 7)
    assert two.inside.bytes_sent == two.across.bytes_sent == 7 / 8 * 64e6
    assert cost.all_to_all(64e6, 64).steps == 63


def test_blocks_of_a_grouped_matmul():
    assert cost.grouped_rows(8192, 16, 32) == 8192 + 15 * 32
    assert cost.grouped_rows(3, 16, 32) == 3 * 32  # no more blocks than rows
    assert cost.grouped_rows(8192, 16, 1) == 8192
