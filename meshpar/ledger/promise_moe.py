"""What layers of experts promise: tokens to the ranks of their experts and back, whatever the routing.

    payload, forward            2 all-to-alls a layer: rows to their experts, and what those made of them back
    payload, backward           2 all-to-alls a layer: their cotangents the other way, both
    counts of choices           an all-gather of E whole numbers of every rank, forward, where nothing bounds the rows

Weights that `fsdp` splits are gathered inside the layer, forward and backward, and their gradients reduce-scattered:
`promise_leaves` promises both as for any weight.

Over the axes that split the dim `expert` of the experts' weights, which have to split the batch too; a stacked layer
counts once a layer, and once more where it is computed again for the backward pass. Rows travel ragged, in parts of one
size or in buffers, and as bytes where the layer quantizes: a payload is a whole number of rows. How many is the
routing's to say, of which no rule knows: `planner.cost.moe_all_to_all` has the closed form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshpar.ledger.terms import Facts, Leg, Promised, is_router, owned_axes, stack_of
from meshpar.planner.cost import quantized_bytes
from meshpar.types import Decision


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The weights of the experts of one layer, or of a stack of them."""

    weights: tuple[Decision, ...]

    @property
    def stack(self) -> int:
        return stack_of(self.weights[0])

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(decision.path for decision in self.weights)

    def size_of(self, name: str) -> int:
        leaf = self.weights[0].leaf
        return leaf.shape[(leaf.names or ()).index(name)]


def routed(facts: Facts) -> Iterator[Promised]:
    """Tokens of every layer of experts over the axes that split these."""
    for layer in _layers(facts):
        axes = owned_axes(facts, layer.weights[0])
        if not axes or not set(axes) <= set(facts.batch_axes):
            continue
        yield from _travelling(facts, layer, axes)


def _travelling(facts: Facts, layer: _Layer, axes: tuple[str, ...]) -> Iterator[Promised]:
    steps = facts.options.accumulate
    recomputed = 2 if facts.options.remat and layer.stack > 1 else 1
    width, ranks = layer.size_of("embed"), facts.ways(axes)
    dtype = facts.wire(facts.compute(layer.weights[0]))

    def rows(kind: str, **more: Any) -> tuple[tuple[Leg, ...], ...]:
        plain = facts.leg(kind, axes, width, dtype, multiple=True, **more)
        in_bytes = facts.leg(kind, axes, quantized_bytes(width), "u8", multiple=True, **more)
        return (plain,), (in_bytes,)

    ways = (*rows("all-to-all"), *rows("ragged-all-to-all"))
    if not facts.on_cpu:
        ways = (*rows("ragged-all-to-all"), *rows("all-to-all"))
    runs = 2 * layer.stack * steps
    yield Promised(
        role="tokens to their experts and back, forward",
        tensors=layer.paths,
        count=(runs, runs * recomputed),
        spellings=tuple(tuple(dataclasses.replace(leg, forward=recomputed == 1) for leg in legs) for legs in ways),
    )
    yield Promised(
        role="their gradients, backward",
        tensors=layer.paths,
        count=(runs, runs),
        spellings=ways,
    )
    counts = facts.leg("all-gather", axes, ranks * layer.size_of("expert"), "s32")
    yield Promised(
        role="counts of choices, forward",
        tensors=layer.paths,
        count=(0, layer.stack * steps * recomputed),
        spellings=((counts,),),
    )


def _layers(facts: Facts) -> Iterator[_Layer]:
    """Experts' weights under one parent: matrices of every expert, the router aside."""
    found: dict[tuple[str, int], list[Decision]] = {}
    for decision in facts.leaves:
        if {"expert", "embed"} <= set(decision.leaf.names or ()) and not is_router(decision):
            found.setdefault((decision.path.rpartition("/")[0], stack_of(decision)), []).append(decision)
    for weights in found.values():
        yield _Layer(tuple(weights))
