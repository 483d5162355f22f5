"""What layers of experts promise: tokens to the ranks of their experts and back, whatever the routing.

    payload, forward            2 all-to-alls a layer: rows to their experts, and what those made of them back
    payload, backward           2 all-to-alls a layer: their cotangents the other way, both
    counts of choices           an all-gather of E whole numbers of every rank, forward, where nothing bounds the rows
    gradients of weights        of the weights that choices are summed by: an all-reduce of k numbers a token, backward

All but the last go over the axes that split the dim `expert` of the experts' weights, which have to split the batch
too; the last goes over those that split their width. A stacked layer counts once a layer, as often as it cuts its
tokens into chunks, and forward once more where it is computed again for the backward pass. In two levels each
all-to-all is two over one axis each: N-1 permutes of an N-th of the payload.

How many rows a payload has follows from what the layer was asked, with T tokens of one device, k choices of each, E
experts on N ranks:

    buffers of capacity C     E C rows
    dropless, parts alike     `planner.cost.dropless_rows`, for any routing
    dropless, ragged          T k rows at most, of which (N-1)/N leave the rank where routing is even

and what a row is on the wire from its width and the number format of the payload. A layer that says nothing of itself
(`meshpar.training.reports.describe`), one of a model's own, sends any whole number of rows.

Weights that `fsdp` splits are gathered inside the layer, forward and backward, and their gradients reduce-scattered:
`promise_leaves` promises both as for any weight.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from meshpar.compiled.terms import Facts, Leg, Promised, is_router, owned_axes
from meshpar.moe.choice import choose_dispatch
from meshpar.moe.dispatch_combine import Payload
from meshpar.moe.layer import MoESpec
from meshpar.moe.routing import capacity
from meshpar.planner.cost import dropless_rows, quantized_bytes
from meshpar.sharding.types import Decision, spec_axes

SCOPE = "moe"
"""The named scope in which a layer of experts sends what is promised here, and nothing else."""
THERE = "tokens to their experts and back, forward"
BACK = "their gradients, backward"
COUNTS = "counts of choices, forward"
CHOSEN = "gradients of the weights of choices"


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The weights of the experts of one layer, or of a stack of them."""

    weights: tuple[Decision, ...]

    @property
    def stack(self) -> int:
        return self.weights[0].leaf.num_layers

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(decision.path for decision in self.weights)

    def size_of(self, name: str) -> int:
        leaf = self.weights[0].leaf
        return leaf.shape[(leaf.names or ()).index(name)]

    def axes_of(self, facts: Facts, name: str) -> tuple[str, ...]:
        """That split a dim, of those that split no tokens."""
        leaf, spec = self.weights[0].leaf, self.weights[0].spec
        entries = [entry for entry, own in zip(spec, leaf.names or (), strict=False) if own == name]
        return facts.ordered({axis for entry in entries for axis in spec_axes(entry)} & set(facts.tensor_axes))

    def is_of(self, asked: MoESpec) -> bool:
        """Whether a layer that was asked so may have these weights."""
        return (asked.config.routing.num_experts, asked.width) == (self.size_of("expert"), self.size_of("embed"))


def routed(facts: Facts, asked: Sequence[MoESpec] = ()) -> Iterator[Promised]:
    """Tokens of every layer of experts over the axes that split these.

    Args:
      facts: of the step.
      asked: what layers said they were asked, of the tokens of one whole step.
    """
    for layer in _layers(facts):
        axes = owned_axes(facts, layer.weights[0])
        if not axes or not set(axes) <= set(facts.batch_axes):
            continue
        known = {one for one in asked if layer.is_of(one)}
        if len(known) == 1:
            yield from _known(facts, layer, axes, *known)
        else:  # none, or layers of one size that were asked differently
            yield from _unknown(facts, layer, axes)


def _layers(facts: Facts) -> Iterator[_Layer]:
    """Experts' weights under one parent: matrices of every expert, the router aside."""
    found: dict[tuple[str, int], list[Decision]] = {}
    for decision in facts.leaves:
        if {"expert", "embed"} <= set(decision.leaf.names or ()) and not is_router(decision):
            found.setdefault((decision.path.rpartition("/")[0], decision.leaf.num_layers), []).append(decision)
    for weights in found.values():
        yield _Layer(tuple(weights))


# ---------------------------------------------------------------------------------------------------------------------
# Layers that say what they were asked
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """One chunk of one layer's tokens on one device."""

    facts: Facts
    asked: MoESpec
    axes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        facts = self.facts
        split = facts.options.accumulate * facts.ways((*facts.batch_axes, *facts.context_axes))
        return self.asked.tokens // split // self.asked.config.chunks

    @property
    def num_choices(self) -> int:
        """Of a token: where experts choose, any of them may have."""
        routing = self.asked.config.routing
        return routing.num_experts if routing.choice == "expert" else routing.top_k

    @property
    def is_dropless(self) -> bool:
        routing = self.asked.config.routing
        return routing.choice == "token" and (routing.capacity_factor is None or not self.asked.drops)

    @property
    def how(self) -> str:
        """How rows travel."""
        chosen = self.asked.config.implementation
        if chosen != "auto":
            return chosen
        platform = "cpu" if self.facts.on_cpu else "gpu"
        return choose_dispatch(platform, dropless=self.is_dropless, two_levels=len(self.axes) == 2).implementation

    @property
    def rows(self) -> int:
        """Of one all-to-all."""
        config = self.asked.config
        routing, num_ranks = config.routing, self.facts.ways(self.axes)
        if not self.is_dropless:
            return routing.num_experts * capacity(self.tokens, routing)
        bound = dropless_rows(self.tokens, routing.top_k, routing.num_experts, num_ranks, config.bound_factor)
        return min(bound, self.tokens * routing.top_k) if self.how == "ragged" else bound

    def legs(self, coded: str | None, payload: Payload, *, forward: bool) -> tuple[Leg, ...]:
        """One all-to-all.

        Args:
          coded: the number format of its rows.
          payload: the layer's, for the blocks of numbers that share a scale.
          forward: whether only the forward pass sends it.
        """
        width, dtype = self.asked.width, self.facts.wire(self.asked.dtype)
        if coded is not None:
            width, dtype = quantized_bytes(width, block=payload.block), "u8"
        facts, numbers = self.facts, self.rows * width
        if self.how != "hierarchical":
            kind = "ragged-all-to-all" if self.how == "ragged" else "all-to-all"
            return (facts.leg(kind, self.axes, numbers, dtype, forward=forward),)
        return tuple(
            facts.leg("collective-permute", (axis,), numbers // size, dtype, times=size - 1, forward=forward)
            for axis, size in ((axis, facts.sizes[axis]) for axis in reversed(self.axes))
        )


def _known(facts: Facts, layer: _Layer, axes: tuple[str, ...], asked: MoESpec) -> Iterator[Promised]:
    """Exact in number and in bytes: whatever else a layer sends is not promised."""
    exchange, payload, recomputed = (
        _Exchange(facts, asked, axes),
        asked.config.payload or Payload(),
        _recomputed(facts, layer),
    )
    runs = layer.stack * facts.options.accumulate * asked.config.chunks
    forward = [exchange.legs(coded, payload, forward=recomputed == 1) for coded in (payload.dispatch, payload.combine)]
    backward = [exchange.legs(payload.grad, payload, forward=False)] * 2
    for role, sent, most in ((THERE, forward, recomputed), (BACK, backward, 1)):
        for legs, times in collections.Counter(sent).items():
            count = (times * runs * (1 if facts.by_stages else most), times * runs * most)
            yield Promised(role=role, tensors=layer.paths, count=count, spellings=(legs,), scope=SCOPE)
    if exchange.is_dropless:
        yield _counts(facts, layer, axes, asked.config.chunks, least=1)
    hidden = layer.axes_of(facts, "mlp")
    if hidden:
        yield _scored(exchange, layer, hidden)


def _scored(exchange: _Exchange, layer: _Layer, hidden: tuple[str, ...]) -> Promised:
    """What the parts of the experts' width make of the gradient of the scores, summed over them.

    By choice; where the layer stands in a region of stages, which sums nothing before its end, as the router's own.
    """
    facts, asked = exchange.facts, exchange.asked
    numbers, role = exchange.tokens * asked.config.chunks * exchange.num_choices, CHOSEN
    if facts.by_stages:
        numbers, role = asked.width * asked.config.routing.num_experts, "gradients of the router, backward"
    leg = facts.leg("all-reduce", hidden, numbers, facts.wire(jnp.promote_types(asked.dtype, jnp.float32)))
    runs = layer.stack * facts.options.accumulate
    return Promised(role=role, tensors=layer.paths, count=(runs, runs), spellings=((leg,),), scope=SCOPE)


def _recomputed(facts: Facts, layer: _Layer) -> int:
    """How often the forward pass runs."""
    return 2 if facts.options.remat and layer.stack > 1 else 1


def _counts(facts: Facts, layer: _Layer, axes: tuple[str, ...], chunks: int, *, least: int) -> Promised:
    leg = facts.leg("all-gather", axes, facts.ways(axes) * layer.size_of("expert"), "s32")
    runs = layer.stack * facts.options.accumulate * chunks
    count = (least * runs, _recomputed(facts, layer) * runs)
    return Promised(role=COUNTS, tensors=layer.paths, count=count, spellings=((leg,),))


# ---------------------------------------------------------------------------------------------------------------------
# Layers that do not
# ---------------------------------------------------------------------------------------------------------------------


def _unknown(facts: Facts, layer: _Layer, axes: tuple[str, ...]) -> Iterator[Promised]:
    """Whole rows, as they are or as bytes, ragged or in parts of one size."""
    width, dtype = layer.size_of("embed"), facts.wire(facts.compute(layer.weights[0]))
    recomputed = _recomputed(facts, layer)
    kinds = ("all-to-all", "ragged-all-to-all") if facts.on_cpu else ("ragged-all-to-all", "all-to-all")
    legs = [
        facts.leg(kind, axes, numbers, wire, multiple=True)
        for kind in kinds
        for numbers, wire in ((width, dtype), (quantized_bytes(width), "u8"))
    ]
    runs = 2 * layer.stack * facts.options.accumulate
    forward = tuple((dataclasses.replace(leg, forward=recomputed == 1),) for leg in legs)
    yield Promised(role=THERE, tensors=layer.paths, count=(runs, runs * recomputed), spellings=forward)
    yield Promised(role=BACK, tensors=layer.paths, count=(runs, runs), spellings=tuple((leg,) for leg in legs))
    yield _counts(facts, layer, axes, 1, least=0)
