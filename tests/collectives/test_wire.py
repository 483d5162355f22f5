"""Steps and bytes of the compiled program against the closed forms, for every number of ranks; and its memory."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import pytest

from meshpar import collectives as mc
from meshpar.hardware import cost_model as cost
from tests.grid import cases

COUNTS = cases(3, grid=[2, 3, 5, 8])
ELEMENTS = 840
"""Divides by all numbers of ranks from 1 to 8, so that no padding is sent."""
BYTES = 4 * ELEMENTS


def moved(found):
    """(permutes, bytes of all of them one after the other), a permute counted once however many pairs it has."""
    assert {one.kind for one in found} <= {"collective-permute"}
    return sum(one.count_per_step for one in found), sum(one.bytes_sent_per_step for one in found)


def sent_by(found):
    """Bytes that each rank sends, from the (source, target) pairs."""
    by: Counter[int] = Counter()
    for one in found:
        for source, _ in one.groups:
            by[source] += one.payload_bytes * one.count_per_step
    return by


ALL_REDUCES = {
    "ring": cost.ring_all_reduce,
    "recursive_doubling": cost.tree_all_reduce,
    "halving_doubling": cost.halving_doubling_all_reduce,
    "tree": cost.binomial_tree_all_reduce,
    "root": cost.naive_root_all_reduce,
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_an_all_reduce_sends_what_its_closed_form_says(ranks, algorithm, count):
    found = ranks(count).sent(functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), (ELEMENTS,))
    expected = ALL_REDUCES[algorithm](BYTES, count)
    assert moved(found) == (expected.steps, expected.bytes_in_turn)
    assert max(sent_by(found).values()) == expected.bytes_sent


@pytest.mark.parametrize("servers", [2, 5])
def test_servers_share_the_load(ranks, servers):
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm="parameter_server", num_servers=servers)
    found = ranks(5).sent(kernel, (ELEMENTS,))
    expected = cost.parameter_server_all_reduce(BYTES, 5, num_servers=servers)
    assert moved(found) == (expected.steps, expected.bytes_in_turn)
    assert max(sent_by(found).values()) == expected.bytes_sent


@pytest.mark.parametrize("count", COUNTS)
def test_a_ring_gather_and_a_ring_scatter_are_half_an_all_reduce_each(ranks, count):
    gather = ranks(count).sent(functools.partial(mc.all_gather, axis="x"), (ELEMENTS // count,))
    scatter = ranks(count).sent(functools.partial(mc.reduce_scatter, axis="x"), (ELEMENTS,))
    for found, expected in (
        (gather, cost.ring_all_gather(BYTES, count)),
        (scatter, cost.ring_reduce_scatter(BYTES, count)),
    ):
        assert moved(found) == (expected.steps, expected.bytes_sent)
        assert set(sent_by(found).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_halving_and_doubling_send_the_rings_bytes_in_fewer_steps(ranks, count):
    gather = functools.partial(mc.all_gather, axis="x", algorithm="recursive_doubling")
    scatter = functools.partial(mc.reduce_scatter, axis="x", algorithm="recursive_halving")
    for found, expected in (
        (ranks(count).sent(gather, (ELEMENTS // count,)), cost.doubling_all_gather(BYTES, count)),
        (ranks(count).sent(scatter, (ELEMENTS,)), cost.halving_reduce_scatter(BYTES, count)),
    ):
        assert moved(found) == (expected.steps, expected.bytes_in_turn)
        assert set(sent_by(found).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", COUNTS)
def test_an_exchange_sends_every_part_but_its_own(ranks, count):
    found = ranks(count).sent(functools.partial(mc.all_to_all, axis="x"), (ELEMENTS,))
    expected = cost.all_to_all(BYTES, count)
    assert moved(found) == (expected.steps, expected.bytes_sent)
    assert set(sent_by(found).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize(("algorithm", "channels", "rings"), [("ring", 3, 3), ("bidirectional", 1, 2)])
def test_several_rings_share_the_bytes_of_one(ranks, algorithm, channels, rings, count):
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm=algorithm, channels=channels)
    found = ranks(count).sent(kernel, (ELEMENTS,))
    expected = cost.ring_all_reduce(BYTES, count)
    assert moved(found) == (rings * expected.steps, expected.bytes_sent)


@pytest.mark.parametrize(("name", "loops"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_several_rings_turn_at_the_same_time(ranks, name, loops):
    kernel = functools.partial(getattr(mc, name), axis="x", algorithm="bidirectional", channels=2)
    found = ranks(8).sent(kernel, (ELEMENTS,))
    assert len(found) == 4 * loops
    assert len({one.computation for one in found}) == loops  # a loop of its own would wait for the others


def test_rings_use_different_links_where_there_are_any(ranks):
    kernel = functools.partial(mc.all_gather, axis="x", algorithm="bidirectional", channels=2)
    links = [pair for one in ranks(8).sent(kernel, (ELEMENTS,)) for pair in one.groups]
    assert len(links) == len(set(links)) == 4 * 8


@pytest.mark.parametrize("count", COUNTS)
def test_a_tree_takes_a_step_for_each_doubling(ranks, count):
    def of(name, **options):
        return moved(ranks(count).sent(functools.partial(getattr(mc, name), axis="x", **options), (ELEMENTS,)))

    doublings = {2: 1, 3: 2, 4: 2}.get(count, 3)
    assert of("broadcast") == (doublings, doublings * cost.message(BYTES).bytes_sent)
    assert of("reduce") == (doublings, doublings * BYTES)
    assert of("all_reduce", algorithm="tree") == (2 * doublings, 2 * doublings * BYTES)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_a_root_sends_or_gets_all_parts_but_its_own(ranks, count):
    scatter = ranks(count).sent(functools.partial(mc.scatter, axis="x", root=1), (ELEMENTS,))
    gather = ranks(count).sent(functools.partial(mc.gather, axis="x", root=1), (ELEMENTS // count,))
    all_but_own = BYTES * (count - 1) / count
    assert moved(scatter) == moved(gather) == (count - 1, all_but_own)
    assert sent_by(scatter) == {1: all_but_own}
    assert sent_by(gather) == {rank: BYTES / count for rank in range(count) if rank != 1}


def test_a_shift_is_one_message_and_none_when_nothing_moves(ranks):
    assert moved(ranks(5).sent(functools.partial(mc.shift, axis="x", by=7), (ELEMENTS,))) == (1, BYTES)
    assert moved(ranks(5).sent(functools.partial(mc.shift, axis="x", by=5), (ELEMENTS,))) == (0, 0)


@pytest.mark.parametrize("algorithm", ["ring", "bidirectional"])
def test_the_gradient_of_a_ring_sends_what_the_ring_sends(ranks, algorithm):
    def pulled(x):
        return jax.vjp(functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), x)[1](x)[0]

    assert moved(ranks(5).sent(pulled, (ELEMENTS,)))[1] == cost.ring_all_reduce(BYTES, 5).bytes_sent


@pytest.mark.parametrize(
    ("algorithm", "count", "most"),
    [
        ("ring", 8, 3 / 8),  # the buffer is the result itself; a chunk leaves, one arrives, one is summed
        ("ring", 3, 2),  # does not divide: padded before, cut after
        ("bidirectional", 8, 2),
        ("bidirectional", 3, 2),
    ],
)
def test_a_ring_all_reduce_works_in_one_buffer(ranks, algorithm, count, most):
    kernel, elements = functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), 1 << 20
    memory = ranks(count).compiled(kernel, (elements,)).memory_analysis()
    assert memory.temp_size_in_bytes < most * 4 * elements + 4096
