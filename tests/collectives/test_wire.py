"""Steps, bytes and memory of compiled kernels against closed forms."""

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
"""Divisible by 1 to 8 ranks, so that no padding is sent."""
BYTES = 4 * ELEMENTS


def moved(permutes):
    """Return the number of permutes and the sum of their bytes."""
    assert {p.kind for p in permutes} <= {"collective-permute"}
    return sum(p.count_per_step for p in permutes), sum(p.bytes_sent_per_step for p in permutes)


def sent_by(permutes):
    """Return the bytes that each rank sends, from the (source, target) pairs."""
    num_bytes: Counter[int] = Counter()
    for permute in permutes:
        for source, _ in permute.groups:
            num_bytes[source] += permute.payload_bytes * permute.count_per_step
    return num_bytes


ALL_REDUCES = {
    "ring": cost.ring_all_reduce,
    "recursive_doubling": cost.tree_all_reduce,
    "halving_doubling": cost.halving_doubling_all_reduce,
    "tree": cost.binomial_tree_all_reduce,
    "root": cost.naive_root_all_reduce,
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_all_reduce_algorithms(ranks, algorithm, count):
    permutes = ranks(count).sent(functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), (ELEMENTS,))
    expected = ALL_REDUCES[algorithm](BYTES, count)
    assert moved(permutes) == (expected.steps, expected.bytes_in_turn)
    assert max(sent_by(permutes).values()) == expected.bytes_sent


@pytest.mark.parametrize("servers", [2, 5])
def test_parameter_servers(ranks, servers):
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm="parameter_server", num_servers=servers)
    permutes = ranks(5).sent(kernel, (ELEMENTS,))
    expected = cost.parameter_server_all_reduce(BYTES, 5, num_servers=servers)
    assert moved(permutes) == (expected.steps, expected.bytes_in_turn)
    assert max(sent_by(permutes).values()) == expected.bytes_sent


@pytest.mark.parametrize("count", COUNTS)
def test_ring_all_gather_and_reduce_scatter(ranks, count):
    gather = ranks(count).sent(functools.partial(mc.all_gather, axis="x"), (ELEMENTS // count,))
    scatter = ranks(count).sent(functools.partial(mc.reduce_scatter, axis="x"), (ELEMENTS,))
    for permutes, expected in (
        (gather, cost.ring_all_gather(BYTES, count)),
        (scatter, cost.ring_reduce_scatter(BYTES, count)),
    ):
        assert moved(permutes) == (expected.steps, expected.bytes_sent)
        assert set(sent_by(permutes).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_recursive_doubling_and_halving(ranks, count):
    gather = functools.partial(mc.all_gather, axis="x", algorithm="recursive_doubling")
    scatter = functools.partial(mc.reduce_scatter, axis="x", algorithm="recursive_halving")
    for permutes, expected in (
        (ranks(count).sent(gather, (ELEMENTS // count,)), cost.doubling_all_gather(BYTES, count)),
        (ranks(count).sent(scatter, (ELEMENTS,)), cost.halving_reduce_scatter(BYTES, count)),
    ):
        assert moved(permutes) == (expected.steps, expected.bytes_in_turn)
        assert set(sent_by(permutes).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all(ranks, count):
    permutes = ranks(count).sent(functools.partial(mc.all_to_all, axis="x"), (ELEMENTS,))
    expected = cost.all_to_all(BYTES, count)
    assert moved(permutes) == (expected.steps, expected.bytes_sent)
    assert set(sent_by(permutes).values()) == {expected.bytes_sent}


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize(("algorithm", "channels", "rings"), [("ring", 3, 3), ("bidirectional", 1, 2)])
def test_concurrent_rings_share_the_bytes(ranks, algorithm, channels, rings, count):
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm=algorithm, channels=channels)
    permutes = ranks(count).sent(kernel, (ELEMENTS,))
    expected = cost.ring_all_reduce(BYTES, count)
    assert moved(permutes) == (rings * expected.steps, expected.bytes_sent)


@pytest.mark.parametrize(("name", "loops"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_concurrent_rings_share_a_loop(ranks, name, loops):
    kernel = functools.partial(getattr(mc, name), axis="x", algorithm="bidirectional", channels=2)
    permutes = ranks(8).sent(kernel, (ELEMENTS,))
    assert len(permutes) == 4 * loops
    assert len({p.computation for p in permutes}) == loops  # separate loops would run sequentially


def test_concurrent_rings_use_different_links(ranks):
    kernel = functools.partial(mc.all_gather, axis="x", algorithm="bidirectional", channels=2)
    links = [pair for permute in ranks(8).sent(kernel, (ELEMENTS,)) for pair in permute.groups]
    assert len(links) == len(set(links)) == 4 * 8


@pytest.mark.parametrize("count", COUNTS)
def test_tree_needs_a_step_per_doubling(ranks, count):
    def cost_of(name, **options):
        return moved(ranks(count).sent(functools.partial(getattr(mc, name), axis="x", **options), (ELEMENTS,)))

    doublings = {2: 1, 3: 2, 4: 2}.get(count, 3)
    assert cost_of("broadcast") == (doublings, doublings * cost.message(BYTES).bytes_sent)
    assert cost_of("reduce") == (doublings, doublings * BYTES)
    assert cost_of("all_reduce", algorithm="tree") == (2 * doublings, 2 * doublings * BYTES)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_scatter_and_gather(ranks, count):
    scatter = ranks(count).sent(functools.partial(mc.scatter, axis="x", root=1), (ELEMENTS,))
    gather = ranks(count).sent(functools.partial(mc.gather, axis="x", root=1), (ELEMENTS // count,))
    other_parts = BYTES * (count - 1) / count
    assert moved(scatter) == moved(gather) == (count - 1, other_parts)
    assert sent_by(scatter) == {1: other_parts}
    assert sent_by(gather) == {rank: BYTES / count for rank in range(count) if rank != 1}


def test_shift_by_a_multiple_of_the_ranks_sends_nothing(ranks):
    assert moved(ranks(5).sent(functools.partial(mc.shift, axis="x", by=7), (ELEMENTS,))) == (1, BYTES)
    assert moved(ranks(5).sent(functools.partial(mc.shift, axis="x", by=5), (ELEMENTS,))) == (0, 0)


@pytest.mark.parametrize("algorithm", ["ring", "bidirectional"])
def test_gradient_of_a_ring_sends_the_same_bytes(ranks, algorithm):
    def pulled(x):
        return jax.vjp(functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), x)[1](x)[0]

    assert moved(ranks(5).sent(pulled, (ELEMENTS,)))[1] == cost.ring_all_reduce(BYTES, 5).bytes_sent


@pytest.mark.parametrize(
    ("algorithm", "count", "max_ratio"),
    [
        ("ring", 8, 3 / 8),  # the result is the buffer; temporaries are three chunks: sent, received, summed
        ("ring", 3, 2),  # indivisible: padded before, sliced after
        ("bidirectional", 8, 2),
        ("bidirectional", 3, 2),
    ],
)
def test_ring_all_reduce_memory(ranks, algorithm, count, max_ratio):
    kernel, elements = functools.partial(mc.all_reduce, axis="x", algorithm=algorithm), 1 << 20
    memory = ranks(count).compiled(kernel, (elements,)).memory_analysis()
    assert memory.temp_size_in_bytes < max_ratio * 4 * elements + 4096
