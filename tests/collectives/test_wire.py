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


def all_reduce(algorithm, **options):
    return functools.partial(mc.all_reduce, axis="x", algorithm=algorithm, **options)


DOUBLING = functools.partial(mc.all_gather, axis="x", algorithm="recursive_doubling")
HALVING = functools.partial(mc.reduce_scatter, axis="x", algorithm="recursive_halving")
SERVERS = functools.partial(cost.parameter_server_all_reduce, num_servers=2)
UNEQUAL = ("recursive_doubling", "halving_doubling", "tree", "root", "servers", "broadcast", "reduce")
"""Kernels whose ranks send different numbers of bytes."""
FORMS = {
    "ring": (all_reduce("ring"), cost.ring_all_reduce),
    "recursive_doubling": (all_reduce("recursive_doubling"), cost.tree_all_reduce),
    "halving_doubling": (all_reduce("halving_doubling"), cost.halving_doubling_all_reduce),
    "tree": (all_reduce("tree"), cost.binomial_tree_all_reduce),
    "root": (all_reduce("root"), cost.naive_root_all_reduce),
    "servers": (all_reduce("parameter_server", num_servers=2), SERVERS),
    "gather": (functools.partial(mc.all_gather, axis="x"), cost.ring_all_gather),
    "scatter": (functools.partial(mc.reduce_scatter, axis="x"), cost.ring_reduce_scatter),
    "exchange": (functools.partial(mc.all_to_all, axis="x"), cost.all_to_all),
    "gather by doubling": (DOUBLING, cost.doubling_all_gather),
    "scatter by halving": (HALVING, cost.halving_reduce_scatter),
}


def sizes(*counts):
    """Return all forms with their numbers of ranks. Recursive doubling and halving need a power of two."""
    return [(name, count) for name in FORMS for count in counts if " by " not in name or count & (count - 1) == 0]


@pytest.mark.parametrize(("name", "count"), cases(*sizes(3, 8), grid=sizes(2, 3, 4, 5, 8)))
def test_steps_and_bytes_match_closed_forms(ranks, name, count):
    kernel, form = FORMS[name]
    permutes = ranks(count).sent(kernel, (ELEMENTS // count if "gather" in name else ELEMENTS,))
    expected, sent = form(BYTES, count), sent_by(permutes).values()
    assert moved(permutes) == (expected.steps, expected.bytes_in_turn)
    assert max(sent) == expected.bytes_sent
    assert name in UNEQUAL or set(sent) == {expected.bytes_sent}


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
def test_kernels_with_a_root(ranks, count):
    """Trees need a step per doubling; scatter and gather send only from or to the root."""

    def permutes_of(name, elements=ELEMENTS, **options):
        return ranks(count).sent(functools.partial(getattr(mc, name), axis="x", **options), (elements,))

    doublings = {2: 1, 3: 2, 4: 2}.get(count, 3)
    assert moved(permutes_of("broadcast")) == moved(permutes_of("reduce")) == (doublings, doublings * BYTES)
    scatter, gather = permutes_of("scatter", root=1), permutes_of("gather", ELEMENTS // count, root=1)
    other_parts = BYTES * (count - 1) / count
    assert moved(scatter) == moved(gather) == (count - 1, other_parts)
    assert sent_by(scatter) == {1: other_parts}
    assert sent_by(gather) == {rank: BYTES / count for rank in range(count) if rank != 1}


@pytest.mark.parametrize(("outer", "inner"), cases((3, 2), grid=[(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]))
def test_hierarchical_kernels_match_closed_forms_on_both_levels(ranks, outer, inner):
    both = cost.hierarchical_all_reduce(BYTES, outer * inner, inner=inner)
    for kernel, inside, across in (
        (mc.hierarchical_all_reduce, both.inside, both.across),
        (mc.hierarchical_all_to_all, cost.all_to_all(BYTES, inner), cost.all_to_all(BYTES, outer)),
    ):
        permutes = ranks(outer=outer, inner=inner).sent(
            functools.partial(kernel, inner="inner", outer="outer"), (ELEMENTS,)
        )
        assert {p.axes for p in permutes} == {("inner",), ("outer",)}
        for axis, expected in (("inner", inside), ("outer", across)):
            assert moved([p for p in permutes if p.axes == (axis,)]) == (expected.steps, expected.bytes_sent)


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
