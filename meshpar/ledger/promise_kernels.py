"""What the strategies' own kernels promise: collectives that are written out, not left to the compiler.

    ring attention, forward     N-1 permutes a layer: keys and values of one rank
    ring attention, backward    N-1 permutes a layer of the same, and N-1 of their gradients in float32
    hidden states, once a pass  2 permutes of half of them (1 of two ranks): from the ring's order to that of the text

Counts and sizes follow from the strategy, the batch and the leaves' names. A layer with weights of `kv_heads` is one
with attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from meshpar.ledger.terms import Facts, Leg, Promised, split_axes, stack_of
from meshpar.types import Decision


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The weights of keys and values under one parent."""

    weights: tuple[Decision, ...]

    @property
    def stack(self) -> int:
        return stack_of(self.weights[0])

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        leaf = self.weights[0].leaf
        return leaf.shape[(leaf.names or ()).index("embed")]

    def numbers_a_token(self, facts: Facts) -> int:
        """Of keys and values together, on one device."""
        return sum(
            decision.leaf.size // self.stack // self.embed // facts.ways(self.split_heads(facts, decision))
            for decision in self.weights
        )

    def split_heads(self, facts: Facts, decision: Decision) -> tuple[str, ...]:
        return tuple(axis for axis in split_axes(facts, decision.spec) if axis in facts.tensor_axes)


def attended(facts: Facts) -> Iterator[Promised]:
    """Attention over a sequence that is split in every layer."""
    axes, tokens = facts.context_axes, facts.tokens
    if not axes or tokens is None:
        return
    layers = list(_attentions(facts))
    steps = facts.options.accumulate
    num_ranks = math.prod(facts.sizes[axis] for axis in axes)
    for one in layers:
        dtype = facts.wire(facts.compute(one.weights[0]))
        paths = tuple(decision.path for decision in one.weights)
        recomputed = 2 if facts.options.remat and one.stack > 1 else 1
        numbers = tokens * one.numbers_a_token(facts)

        def round_the_ring(dtype: str, numbers: int = numbers) -> Leg:
            return facts.leg("collective-permute", axes, numbers, dtype, times=num_ranks - 1, by_kernel=True)

        yield Promised(
            role="keys and values round the ring, forward",
            tensors=paths,
            count=(one.stack * steps, recomputed * one.stack * steps),
            spellings=((round_the_ring(dtype),),),
        )
        yield Promised(
            role="keys, values and their gradients, backward",
            tensors=paths,
            count=(one.stack * steps, one.stack * steps),
            spellings=((round_the_ring(dtype), round_the_ring("f64" if dtype == "f64" else "f32")),),
        )
    if layers:
        half = tokens * layers[0].embed // 2
        dtype = facts.wire(facts.compute(layers[0].weights[0]))
        leg = facts.leg("collective-permute", axes, half, dtype, times=min(num_ranks - 1, 2), by_kernel=True)
        yield Promised(
            role="hidden states back in order",
            tensors=("the last layer's result, and its gradient",),
            count=(2 * steps, 2 * steps),
            spellings=((leg,),),
        )


def _attentions(facts: Facts) -> Iterator[_Attention]:
    found: dict[tuple[str, int], list[Decision]] = {}
    for decision in facts.setup.table.params:
        if {"kv_heads", "embed"} <= set(decision.leaf.names or ()):
            parent = "/".join(decision.path.split("/")[:-2])
            found.setdefault((parent, stack_of(decision)), []).append(decision)
    for weights in found.values():
        yield _Attention(tuple(weights))
