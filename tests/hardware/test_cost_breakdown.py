"""Itemised breakdowns: the literature's numbers, links by place, and figures as people write them."""

from __future__ import annotations

import dataclasses

import pytest

from meshpar.hardware import cost_model as cost
from meshpar.hardware.catalogue import GPUS
from meshpar.hardware.clusters import Link, Links, parse_cluster
from meshpar.hardware.cost_breakdown import ALGORITHMS, ALL_REDUCES, breakdown, comparison
from meshpar.sharding.units import si
from tests.errors import raises

LINK = Link(alpha_s=2e-6, bytes_per_s=100e9)
POD = parse_cluster("h100:8x8")


@pytest.mark.parametrize(("ranks", "sent"), [(8, 24.5e9), (64, 27.5625e9)])
def test_breakdown_of_7b_gradients(ranks, sent):
    """14 GB of bfloat16 gradients, and what each rank of a ring sends of them."""
    found = breakdown("ring", 14e9, ranks, POD)
    assert found.bytes_sent == found.lower_bound_bytes == sent
    assert si(found.bytes_sent, "B") == {8: "24.5 GB", 64: "27.56 GB"}[ranks]
    assert found.steps == 2 * (ranks - 1)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "hierarchical"])
def test_breakdowns_match_closed_forms(name):
    found, expected = breakdown(name, 8e6, 8, LINK), ALGORITHMS[name].cost(8e6, 8)
    assert (found.steps, found.bytes_sent) == (expected.steps, expected.bytes_sent)
    assert found.time_s == pytest.approx(expected.time_s(LINK))
    assert found.time_s == found.latency_s + found.bandwidth_s
    assert found.latency_s == pytest.approx(expected.steps * 2e-6)
    assert found.algorithm_bytes_per_s == pytest.approx(8e6 / found.time_s)
    assert found.bus_bytes_per_s == pytest.approx(found.lower_bound_bytes / found.time_s)
    assert found.bytes_sent >= found.lower_bound_bytes
    assert found.sheet["time"] == found.time_s
    assert ALGORITHMS[name].forms.time in str(found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gamma_adds_the_time_of_the_reduction(name):
    options = {"inner": 2} if name == "hierarchical" else {}
    gamma = GPUS["h100"].reduction_s_per_byte
    plain, found = (breakdown(name, 8e6, 8, LINK, **options, gamma_s_per_byte=x) for x in (0.0, gamma))
    assert plain.reduction_s == 0
    assert found.time_s == pytest.approx(plain.time_s + found.reduction_s)
    assert bool(found.reduction_s) == (found.algorithm.kind in ("all-reduce", "reduce-scatter"))
    assert ("reduction" in str(found), "γ" in str(plain)) == (found.reduction_s > 0, False)
    assert gamma == 3 / 3.35e12


def test_gamma_moves_the_crossover_and_is_checked():
    gamma = 5e-12
    at = breakdown("ring", 1.0, 8, LINK, gamma_s_per_byte=gamma).crossover_bytes
    ring, tree = (breakdown(name, at, 8, LINK, gamma_s_per_byte=gamma) for name in ("ring", "recursive-doubling"))
    assert ring.time_s == pytest.approx(tree.time_s)
    assert at < breakdown("ring", 1.0, 8, LINK).crossover_bytes
    for wrong in (-1.0, float("nan")):
        with raises("out-of-range", "`ring`"):
            breakdown("ring", 1.0, 8, LINK, gamma_s_per_byte=wrong)


def test_servers_and_two_levels():
    assert breakdown("parameter_server", 8e6, 8, LINK, servers=4).bytes_sent == pytest.approx(8e6 / 4 * (8 + 4 - 2))
    found = breakdown("hierarchical", 8e6, 64, LINK, inner=8)
    expected = cost.hierarchical_all_reduce(8e6, 64, inner=8)
    assert [phase.cost for phase in found.phases] == [expected.inside, expected.across]
    assert found.time_s == pytest.approx((expected.inside + expected.across).time_s(LINK))
    assert (found.sheet["K"], found.sheet["M"]) == (8, 8)


def test_ranks_that_fit_a_node_use_its_links():
    (inside,) = breakdown("ring", 1e6, 8, POD).phases
    assert inside.link == POD.inside
    (ring,) = breakdown("ring", 1e6, 64, POD).phases
    assert ring.link == cost.collective_link("all-reduce", POD, num_nodes=8, per_node=8)
    assert ring.where == "between 8 nodes, 8 ports per node"
    assert breakdown("ring", 1e6, 64, POD, by_messages=True).phases[0].link == POD.across
    assert breakdown("tree", 1e6, 9, POD).phases[0].link == POD.across
    inside, across = breakdown("hierarchical", 1e6, 64, POD).phases
    assert (inside.link, across.link) == (POD.inside, POD.across)


def test_breakdown_uses_measured_axis_links():
    mine = Links(devices="cpu", axes={"data": LINK})
    found = breakdown("all-gather", 1e6, 8, mine, axes=("data",), mesh={"data": 8})
    assert found.phases[0].link == LINK
    assert found.phases[0].where == "measured along `data`"
    pod = dataclasses.replace(POD, axes={"data": LINK})
    assert breakdown("ring", 1e6, 8, pod, axes=("data",), mesh={"data": 8}).phases[0].link == LINK
    assert breakdown("ring", 1e6, 8, pod).phases[0].link == POD.inside


def test_crossover_has_equal_times():
    for ranks in (6, 8, 64):
        at = breakdown("ring", 1.0, ranks, POD).crossover_bytes
        ring, tree = breakdown("ring", at, ranks, POD), breakdown("recursive-doubling", at, ranks, POD)
        assert ring.time_s == pytest.approx(tree.time_s)
    assert breakdown("ring", 1e6, 2, POD).crossover_bytes is None
    assert breakdown("all-gather", 1e6, 8, POD).crossover_bytes is None


def test_side_by_side_the_quickest_comes_first():
    found = comparison(breakdown(name, 14e9, 64, POD) for name in ALL_REDUCES)
    *rows, crossover = found.rows
    times = [time_s for _, time_s, *_ in rows]
    assert times == sorted(times)
    assert [name for name, *_ in rows][:2] == ["ring", "hierarchical"]
    assert all(name in str(found) for name in ALL_REDUCES)
    assert crossover[0] == "crossover"


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        (("rings", 1, 2, LINK), {}, "unknown-choice"),
        ((3, 1, 2, LINK), {}, "unknown-choice"),
        (("ring", 1, 0, LINK), {}, "not-an-int"),
        (("ring", 1, 2.0, LINK), {}, "not-an-int"),
        (("ring", 1, 10**30, LINK), {}, "not-an-int"),
        (("ring", -1, 2, LINK), {}, "out-of-range"),
        (("ring", float("nan"), 2, LINK), {}, "out-of-range"),
        (("ring", 1, 2, 8), {}, "wrong-type"),
        (("hierarchical", 1, 12, LINK), {"inner": 5}, "indivisible"),
        (("hierarchical", 1, 12, LINK), {}, "missing-argument"),
        (("parameter-server", 1, 4, LINK), {"servers": 5}, "out-of-range"),
        (("doubling-all-gather", 1, 6, LINK), {}, "indivisible"),
        (("ring", 1, 65, POD), {}, "out-of-range"),
        (("ring", 1, 2, Links(devices="cpu", axes={"data": LINK})), {}, "unknown-axis"),
    ],
)
def test_breakdown_rejects_invalid_arguments(arguments, options, code):
    with raises(code):
        breakdown(*arguments, **options)
