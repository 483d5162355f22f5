"""The promise of a pipeline: what each stage sends in a step, from its strategy, its schedule and its leaves alone.

    over the stages
      results, up and down      a permute for every lane and tick with a message, of what one microbatch hands on
      parts to where they run   permutes of weights before the first tick, where the schedule wants them elsewhere
      and gradients back        than in order, and of gradients after the last
      gradients of the ends     embedding and head: from the one stage that makes them, ceil(log2 stages) permutes;
                                where several do (tied embeddings, a part on two stages), an all-reduce
      numbers                   losses, metrics, norms: counted, not promised
    over axes that split the batch
      weights before use        an all-gather before the first tick, gather="step"; of a part's in every cell that
                                reads them, gather="microbatch": F and B do, few Ws
      gradients                 reduced once, after the last tick, outside of every loop
    over axes inside a stage
      gradients, the sequence   an all-reduce in every W of what every rank has whole, as norm scales
      split between layers
      what layers promise       without stages, for the stage's own layers, as often as it runs an F or a B; what stands
                                before the layers (behind them) on the stage of the first (last) part

Stages differ, so each has a promise of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.compiled.parts import Parts
from meshpar.compiled.promise_leaves import gathered, reduced, renewed
from meshpar.compiled.promise_matmul import VOCABULARY
from meshpar.compiled.terms import ITEMSIZE, Facts, Leg, Promised, facts_of, owned_axes, split_axes
from meshpar.parallel.pipeline import Pipeline as PipelinePart
from meshpar.pipeline.schedules.ops import F, W
from meshpar.pipeline.traffic import StageTraffic, gathers_in_cells, traffic
from meshpar.sharding.types import Decision, is_spec, without_axes
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def by_stage(
    setup: Setup,
    options: StepOptions,
    batch: Any,
    parts: Parts,
    layers: Sequence[Callable[[Facts], Iterable[Promised]]],
    *,
    on_cpu: bool,
) -> Iterator[list[Promised]]:
    """The promise of each stage.

    Args:
      setup, options, batch, on_cpu: as for `promise.promised`.
      parts: how stages cut the model.
      layers: what the layers' own work promises.
    """
    promise = _Promise.of(setup, options, batch, parts, on_cpu)
    everywhere = [*promise.weights(), *promise.results(), *promise.moved(), *promise.reduced(), *promise.told()]
    inside = [(side, one) for side in _SIDES for make in layers for one in make(promise.of_side(side))]
    for stage in range(parts.schedule.stages):
        own = [
            *promise.gathered_in_cells(stage),
            *promise.summed_in_cells(stage),
            *(promise.on_stage(side, one, stage) for side, one in inside),
        ]
        yield [one for one in (*everywhere, *own) if one.count[1]]


def gathers(
    setup: Setup, options: StepOptions, batch: Any, parts: Parts, *, on_cpu: bool
) -> Iterator[tuple[str, float, int]]:
    """Both choices of `gather`: its name, bytes of weights sent by each device in a step, and most held at once.

    None when no layer is split over axes that split the batch. Arguments as for `by_stage`.
    """
    promise, schedule = _Promise.of(setup, options, batch, parts, on_cpu), parts.schedule
    facts = promise.facts
    # An F and a B in one cell hold a part each.
    at_once = 1 if schedule.chunks == 1 else int((schedule.table[..., :W, 0] >= 0).sum(-1).max())
    sent, held = {"step": 0.0, "microbatch": 0.0}, {"step": 0, "microbatch": 0}
    in_cells = np.zeros(schedule.stages)
    is_split = False
    for leaf in promise.leaves:
        if not leaf.is_layer:
            continue
        kept, split = _axes(facts, leaf.decision, facts.batch_axes)
        is_split |= bool(split)
        ways = facts.ways(split)
        width = ITEMSIZE[facts.wire(facts.compute(leaf.decision))]
        part = promise.part_elements(leaf.decision) // facts.ways(kept) * width
        own = leaf.decision.leaf.size // facts.ways(kept) * width
        moved = promise.traffic.rounds * part
        sent["step"] += (1 - 1 / ways) * own + moved
        held["step"] += schedule.chunks * part
        sent["microbatch"] += moved / ways
        in_cells += (1 - 1 / ways) * part * promise.gathers_of(leaf.decision) if split else 0
        held["microbatch"] += schedule.chunks * part // ways + (at_once * part if split else 0)
    sent["microbatch"] += float(in_cells.max())
    if is_split:
        yield from ((name, sent[name], held[name]) for name in ("step", "microbatch"))


_Side = Literal["first", "layers", "last"]
_SIDES: tuple[_Side, ...] = ("first", "layers", "last")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter as one stage holds it: of stacked layers its share, with the stages taken for granted."""

    decision: Decision
    grads: PartitionSpec
    update: PartitionSpec
    is_layer: bool


@dataclasses.dataclass(frozen=True)
class _Promise:
    facts: Facts
    """With microbatches for micro-steps, gathered and reduced once."""
    parts: Parts
    pipelined: PipelinePart
    traffic: StageTraffic
    leaves: tuple[_Leaf, ...]

    @staticmethod
    def of(setup: Setup, options: StepOptions, batch: Any, parts: Parts, on_cpu: bool) -> _Promise:
        pipelined = setup.strategy.pipeline
        assert pipelined is not None
        asked = dataclasses.replace(options, accumulate=parts.schedule.microbatches, accumulate_mode="once")
        facts = dataclasses.replace(facts_of(setup, asked, batch, on_cpu), by_stages=True)
        grads, updates = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (setup.layout.grads, setup.layout.updates))
        leaves = (_leaf(*one, pipelined) for one in zip(setup.table.params, grads, updates, strict=True))
        return _Promise(facts, parts, pipelined, traffic(parts.schedule), tuple(leaves))

    # -- Weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[Promised]:
        """Gathered before the first tick, and of new values after the update."""
        for leaf in self.leaves:
            in_cells = leaf.is_layer and self.pipelined.gather == "microbatch"
            yield from () if in_cells else _some(gathered(self.facts, leaf.decision))
            yield from _some(renewed(self.facts, leaf.decision, leaf.update))

    def gathered_in_cells(self, stage: int) -> Iterator[Promised]:
        """Gathered by every cell that reads them: those with an F or a B, few with a W alone; dropped behind it."""
        if self.pipelined.gather != "microbatch":
            return
        facts = self.facts
        for leaf in self.leaves:
            decision = leaf.decision
            kept, split = _axes(facts, decision, facts.batch_axes)
            if not leaf.is_layer or not split:
                continue
            dtype = facts.wire(facts.compute(decision))
            count = int(self.gathers_of(decision)[stage])
            yield Promised(
                role="weights before use, in every cell",
                tensors=(decision.path,),
                count=(count, count),
                spellings=(
                    (self._in_tick("all-gather", split, self.part_elements(decision) // facts.ways(kept), dtype),),
                ),
            )

    def gathers_of(self, decision: Decision) -> np.ndarray:
        """How often each stage gathers a weight of the layers where every cell gathers for itself."""
        return gathers_in_cells(self.parts.schedule, self.parts.reads[decision.path])

    def moved(self) -> Iterator[Promised]:
        """Parts to the stages that the schedule wants them on, and their gradients back."""
        if not self.traffic.rounds:
            return
        facts = self.facts
        for leaf in self.leaves:
            if not leaf.is_layer:
                continue
            decision = leaf.decision
            kept, split = _axes(facts, decision, facts.batch_axes)
            whole = self.part_elements(decision) // facts.ways(kept)
            held = whole if self.pipelined.gather == "step" else whole // facts.ways(split)
            compute = facts.compute(decision)
            for role, elements, dtype in (
                ("parts to the stages that run them", held, compute),
                ("their gradients back", whole, facts.options.precision.reduce_dtype(compute)),
            ):
                leg = self._permute(elements, facts.wire(dtype), is_outside=True)
                yield self._once(role, decision, self.traffic.rounds, leg)

    # -- Between stages -----------------------------------------------------------------------------------------------

    def results(self) -> Iterator[Promised]:
        """What microbatches hand on, forward, and its gradients, backward."""
        ticks = self.traffic.ticks
        for where, lanes in (("next", self.traffic.up), ("one before", self.traffic.down)):
            for x in self.parts.handed_on:
                leg = self._permute(math.prod(x.shape), self.facts.wire(x.dtype), in_loop=True)
                told = f"{x.dtype}{list(x.shape)} of a microbatch, in {', '.join(map(str, lanes))} of {ticks} ticks"
                yield Promised(
                    role=f"results to the stage {'before' if where != 'next' else 'behind'}",
                    tensors=(told,),
                    count=(sum(lanes), sum(lanes)),
                    spellings=((leg,),),
                )

    # -- Gradients ----------------------------------------------------------------------------------------------------

    def reduced(self) -> Iterator[Promised]:
        """Over the axes that split the batch, then those of the ends over the stages: all after the last tick."""
        facts = dataclasses.replace(self.facts, sequence_axes=())
        for leaf in self.leaves:
            one = reduced(facts, leaf.decision, leaf.grads, leaf.update)
            owners = self._owners(leaf)
            legs = one.spellings if one is not None else ((),)
            if len(owners) > 1:
                yield from self._summed(leaf, legs)
                continue
            if one is not None:
                outside = (tuple(dataclasses.replace(leg, outside=True) for leg in legs) for legs in one.spellings)
                yield dataclasses.replace(one, count=(1, 1), spellings=tuple(outside))
            if owners:
                steps = math.ceil(math.log2(self.parts.schedule.stages))
                leg = self._permute(self._shard(leaf), self._grad_dtype(leaf), is_outside=True)
                yield self._once("gradients of the ends, from their stage", leaf.decision, steps, leg)

    def summed_in_cells(self, stage: int) -> Iterator[Promised]:
        """Gradients of what is whole over axes that split the sequence, norm scales say: summed over them in each W."""
        facts, count = self.facts, self.traffic
        for leaf in self.leaves:
            decision = leaf.decision
            split = split_axes(facts, decision.spec)
            axes = facts.ordered(set(facts.sequence_axes) - set(split) - set(owned_axes(facts, decision)))
            if not axes:
                continue
            layers = decision.leaf.shape[0] if leaf.is_layer else 1
            kept, _ = _axes(facts, decision, facts.batch_axes)
            path, elements = decision.path, decision.leaf.size // layers // facts.ways(kept)
            uses = (count.first[stage] * (path in self.parts.first), count.last[stage] * (path in self.parts.last))
            of_part = layers * self.parts.schedule.stages // self.parts.schedule.num_parts
            runs = count.ops[stage, W] * of_part if leaf.is_layer else sum(uses)
            yield Promised(
                role="gradients of a split sequence",
                tensors=(path,),
                count=(int(runs), int(runs)),
                spellings=((self._in_tick("all-reduce", axes, elements, self._grad_dtype(leaf)),),),
            )

    def _summed(self, leaf: _Leaf, before: Sequence[Sequence[Leg]]) -> Iterator[Promised]:
        """A gradient that several stages make: summed over them, by itself or with the axes that split the batch."""
        facts, axis = self.facts, self.pipelined.axis
        dtype, elements = self._grad_dtype(leaf), self._part_of_all(leaf)
        spellings: list[tuple[Leg, ...]] = []
        for legs in before:
            size = self._shard(leaf) if any(leg.kind == "reduce-scatter" for leg in legs) else elements
            spellings.append((*legs, facts.leg("all-reduce", (axis,), size, dtype)))
            spellings.append((facts.leg("all-reduce", (axis,), elements, dtype), *legs))
            if legs and legs[-1].kind == "all-reduce":
                *first, last = legs
                spellings.append((*first, facts.leg("all-reduce", (axis, *last.axes), last.elements, dtype)))
        ways = (tuple(dataclasses.replace(leg, outside=True) for leg in legs) for legs in spellings)
        yield Promised(
            role="gradients of the ends, summed over the stages",
            tensors=(leaf.decision.path,),
            count=(1, 1),
            spellings=tuple(dict.fromkeys(ways)),
        )

    def _owners(self, leaf: _Leaf) -> frozenset[int]:
        """Stages that make gradients of a parameter outside of the layers; none for one inside."""
        if leaf.is_layer:
            return frozenset()
        path = leaf.decision.path
        first = self.traffic.first_stages if path in self.parts.first else frozenset()
        return first | (self.traffic.last_stages if path in self.parts.last else frozenset())

    def told(self) -> Iterator[Promised]:
        """Metrics of the layers, summed over stages, microbatches and devices; what nobody uses is left out."""
        axes = (self.pipelined.axis, *self.facts.batch_axes)
        for name, x in self.parts.metrics.items():
            leg = self.facts.leg("all-reduce", axes, math.prod(x.shape), self.facts.wire(x.dtype), outside=True)
            yield Promised(role="metrics of the layers", tensors=(name,), count=(0, 1), spellings=((leg,),))

    # -- Inside a stage -----------------------------------------------------------------------------------------------

    def of_side(self, side: _Side) -> Facts:
        """The facts of the leaves before the layers, inside or behind them."""
        layers = {leaf.decision.path for leaf in self.leaves if leaf.is_layer}
        paths = {"first": self.parts.first, "layers": layers, "last": self.parts.last}[side]
        return dataclasses.replace(self.facts, leaves=tuple(one for one in self.facts.leaves if one.path in paths))

    def on_stage(self, side: _Side, one: Promised, stage: int) -> Promised:
        """What is promised for all layers and microbatches, as far as it is this stage's."""
        runs = {"first": self.traffic.first, "layers": self.traffic.ops[:, F], "last": self.traffic.last}[side]
        parts = self.parts.schedule.num_parts if side == "layers" else 1
        share = Fraction(int(runs[stage]), parts * self.parts.schedule.microbatches)
        is_backward, (least, most) = "backward" in one.role, one.count
        if side == "last" and is_backward:  # what stands behind the layers always has its input's gradient taken
            least = most
        # A table that is looked up and multiplied by stands on both sides, once for each.
        is_both = any(path in self.parts.first & self.parts.last for path in one.tensors)
        if (side == "first" and one.role == VOCABULARY) or (is_both and is_backward == (side == "first")):
            least = most = 0
        counts = [share * count for count in (least, most)]
        assert all(count.denominator == 1 for count in counts), (one, share)
        ways = (tuple(dataclasses.replace(leg, in_loop=True) for leg in legs) for legs in one.spellings)
        return dataclasses.replace(one, count=(int(counts[0]), int(counts[1])), spellings=tuple(ways))

    # -- Sizes --------------------------------------------------------------------------------------------------------

    def part_elements(self, decision: Decision) -> int:
        """Numbers of one part of the model, of a stage's share of a leaf, whole."""
        return decision.leaf.size * self.parts.schedule.stages // self.parts.schedule.num_parts

    def _part_of_all(self, leaf: _Leaf) -> int:
        """Numbers of a gradient on one device before it is reduced."""
        kept, _ = _axes(self.facts, leaf.decision, self.facts.batch_axes)
        return leaf.decision.leaf.size // self.facts.ways(kept)

    def _shard(self, leaf: _Leaf) -> int:
        """Numbers of a gradient on one device once it is reduced."""
        return leaf.decision.leaf.size // self.facts.ways(split_axes(self.facts, leaf.update))

    def _grad_dtype(self, leaf: _Leaf) -> str:
        facts = self.facts
        return facts.wire(facts.options.precision.reduce_dtype(facts.compute(leaf.decision)))

    # -- Terms --------------------------------------------------------------------------------------------------------

    def _permute(self, elements: int, dtype: str, *, in_loop: bool = False, is_outside: bool = False) -> Leg:
        over = (self.pipelined.axis,)
        return self.facts.leg("collective-permute", over, elements, dtype, in_loop=in_loop, outside=is_outside)

    def _in_tick(self, kind: str, axes: Iterable[str], elements: int, dtype: str) -> Leg:
        return self.facts.leg(kind, axes, elements, dtype, in_loop=True)

    def _once(self, role: str, decision: Decision, count: int, leg: Leg) -> Promised:
        return Promised(role=role, tensors=(decision.path,), count=(count, count), spellings=((leg,),))


def _leaf(decision: Decision, grads: PartitionSpec, update: PartitionSpec, pipelined: PipelinePart) -> _Leaf:
    leaf, stages = decision.leaf, pipelined.stages
    is_layer = leaf.is_stacked
    specs = (without_axes(spec, (pipelined.axis,)) for spec in (decision.spec, grads, update))
    own, grads, update = specs
    if is_layer:
        assert leaf.names is not None
        shape = (leaf.shape[0] // stages, *leaf.shape[1:])
        leaf = dataclasses.replace(leaf, shape=shape, names=(None, *leaf.names[1:]))
    return _Leaf(dataclasses.replace(decision, leaf=leaf, spec=own), grads, update, is_layer)


def _axes(facts: Facts, decision: Decision, batch_axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes that split a leaf for good, and those that split the batch, over which it is gathered."""
    split = split_axes(facts, decision.spec)
    over = set(batch_axes) - set(owned_axes(facts, decision))
    return tuple(a for a in split if a not in over), tuple(a for a in split if a in over)


def _some(one: Promised | None) -> Iterator[Promised]:
    if one is not None:
        yield one
