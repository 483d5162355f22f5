"""What the strategies' own kernels promise: collectives that are written out, and attention over a split sequence.

    quantized weights           all-gather of their bytes and scales, of stacked layers again backward; with a second
                                shard inside the node across nodes once, forward
    quantized gradients         all-to-all of theirs, with a second shard first inside the node and then across; over
                                axes that split the batch and not the weight another, and an all-gather
    ring attention, forward     N-1 permutes a layer: keys and values of one rank
    ring attention, backward    N-1 permutes a layer of the same, and N-1 of their gradients in float32
    hidden states, once a pass  2 permutes of half of them (1 of two ranks): from the ring's order to that of the text
    attention on whole          4 all-to-alls a layer: queries, keys and values from positions to heads, and the heads'
    sequences, forward          output back; keys and values as often as they are repeated
    ..., backward               4 of their gradients

Counts and sizes follow from the strategy, the batch and the leaves' names. A layer with weights of `kv_heads` is one
with attention. What is quantized goes leaf by leaf, a matrix of a layer at a time, vectors in their own dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from meshpar.compiled.terms import Facts, Leg, Promised, split_axes
from meshpar.parallel import Quantize
from meshpar.parallel.context import repeats
from meshpar.planner.cost import quantized_bytes
from meshpar.sharding.types import Decision, spec_axes

# ---------------------------------------------------------------------------------------------------------------------
# Quantized weights and gradients
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A parameter that is split over axes that split the batch, under a strategy that quantizes."""

    quantize: Quantize
    inner: tuple[str, ...]
    """Axes that split it, inside a node."""
    outer: tuple[str, ...]
    """Axes that split it, across nodes; none where there is no second shard."""
    rest: tuple[str, ...]
    """Axes that split the batch and not the parameter."""
    layers: int
    """Layers that travel one by one; 1 for what travels whole."""
    elements: int
    """Numbers of a layer's shard."""
    is_vector: bool

    def leg(self, facts: Facts, kind: str, axes: tuple[str, ...], nbytes: int) -> Leg:
        return facts.leg(kind, axes, nbytes, "u8", of_leaf=True)


def _shard(facts: Facts, decision: Decision) -> _Shard | None:
    quantize = facts.setup.strategy.quantize
    axes = split_axes(facts, decision.spec)
    split = tuple(axis for axis in axes if axis in facts.batch_axes)
    if quantize is None or not split:
        return None
    second = spec_axes(quantize.secondary)
    inner = tuple(axis for axis in split if axis in second)
    is_vector = decision.leaf.layer_ndim < 2
    by_layer = decision.leaf.is_stacked and not is_vector and not _splits_first(facts, decision) and not facts.is_once
    layers = decision.leaf.num_layers if by_layer else 1
    return _Shard(
        quantize=quantize,
        inner=inner or split,
        outer=tuple(axis for axis in split if axis not in second) if inner else (),
        rest=tuple(axis for axis in facts.batch_axes if axis not in split),
        layers=layers,
        elements=decision.leaf.size // layers // facts.ways(axes),
        is_vector=is_vector,
    )


def _splits_first(facts: Facts, decision: Decision) -> bool:
    return bool(decision.spec) and any(axis in facts.batch_axes for axis in spec_axes(decision.spec[0]))


def gathered_in_bytes(facts: Facts, decision: Decision) -> tuple[Promised, ...] | None:
    """How a quantizing strategy gathers a parameter; None: it does not."""
    shard = _shard(facts, decision)
    if shard is None:
        return None
    dtype = jnp.dtype(facts.compute(decision))
    is_quantized = shard.quantize.weights is not None and not shard.is_vector
    numbers, block = shard.elements, shard.quantize.block
    nbytes = quantized_bytes(numbers, block=block) if is_quantized else numbers * dtype.itemsize
    steps = 1 if facts.is_once else facts.options.accumulate
    again = shard.layers > 1
    fewest_steps = steps if again else 1  # what no layer gathers is the same for all micro-steps, and XLA sees that

    def promise(axes: tuple[str, ...], nbytes: int, least: int, most: int) -> Promised:
        leg = shard.leg(facts, "all-gather", axes, facts.ways(axes) * nbytes)
        return Promised(
            role="weights before use",
            tensors=(decision.path,),
            count=(least * fewest_steps * shard.layers, most * steps * shard.layers),
            stack=shard.layers,
            spellings=((leg,),),
        )

    most = 1 + again + bool(again and facts.options.remat)
    found = [promise(shard.inner, facts.ways(shard.outer) * nbytes, 1 + again, most)]
    if shard.outer:
        found.append(promise(shard.outer, nbytes, 1, 1))
    return tuple(found)


def scattered_in_bytes(facts: Facts, decision: Decision) -> Promised | None:
    """How a quantizing strategy scatters a gradient; None: it does not."""
    shard = _shard(facts, decision)
    if shard is None or shard.is_vector or shard.quantize.gradients is None:
        return None
    block, outer, inner = shard.quantize.block, shard.outer, shard.inner
    nbytes = quantized_bytes(shard.elements, block=block)
    legs = [shard.leg(facts, "all-to-all", inner, facts.ways((*inner, *outer)) * nbytes)]
    if outer:
        legs.append(shard.leg(facts, "all-to-all", outer, facts.ways(outer) * nbytes))
    if shard.rest:
        ways = facts.ways(shard.rest)
        part = ways * quantized_bytes(-(-shard.elements // ways), block=block)
        legs += [shard.leg(facts, kind, shard.rest, part) for kind in ("all-to-all", "all-gather")]
    runs = shard.layers * (1 if facts.is_once else facts.options.accumulate)
    return Promised(
        role="gradients",
        tensors=(decision.path,),
        count=(runs, runs),
        stack=shard.layers,
        vector=decision.leaf.num_layers * max(decision.leaf.shape, default=0),
        spellings=(tuple(legs),),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Attention over a split sequence
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The weights under one parent."""

    weights: tuple[Decision, ...]
    """Of keys and values."""
    heads: tuple[Decision, ...]
    """Of queries, and of what takes in the heads' output."""

    @property
    def stack(self) -> int:
        return self.weights[0].leaf.num_layers

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return _size_of(self.weights[0], "embed")

    def numbers_a_token(self, facts: Facts) -> int:
        """Of keys and values together, on one device."""
        return sum(
            decision.leaf.size // self.stack // self.embed // facts.ways(_split_heads(facts, decision))
            for decision in self.weights
        )

    def scattered(self, facts: Facts) -> Iterator[int]:
        """Numbers a token, on one device, of queries, keys, the heads' output and values, as they travel."""
        num_heads, num_kv_heads = _size_of(self.heads[0], "heads"), _size_of(self.weights[0], "kv_heads")
        tensor = facts.ways(_split_heads(facts, self.heads[0]))
        times = repeats(num_heads, num_kv_heads, tensor * facts.ways(facts.context_axes))
        for decision in self.heads:  # a query is as wide as a key, a head's output as a value
            numbers = decision.leaf.size // self.stack // _size_of(decision, "embed") // tensor
            yield from (numbers, numbers * num_kv_heads * times // num_heads)


def attended(facts: Facts) -> Iterator[Promised]:
    """Attention over a sequence that is split in every layer."""
    if facts.context_axes and facts.tokens is not None:
        make = _round_the_ring if facts.has_ring else _heads_scattered
        yield from make(facts, list(_attentions(facts)), facts.tokens)


def _round_the_ring(facts: Facts, layers: Sequence[_Attention], tokens: int) -> Iterator[Promised]:
    axes, steps = facts.context_axes, facts.options.accumulate
    num_ranks = math.prod(facts.sizes[axis] for axis in axes)
    for one in layers:
        dtype = facts.wire(facts.compute(one.weights[0]))
        paths = tuple(decision.path for decision in one.weights)
        recomputed = 2 if facts.options.remat and one.stack > 1 else 1
        numbers = tokens * one.numbers_a_token(facts)

        def round_the_ring(dtype: str, numbers: int = numbers) -> Leg:
            return facts.leg("collective-permute", axes, numbers, dtype, times=num_ranks - 1)

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
        leg = facts.leg("collective-permute", axes, half, dtype, times=min(num_ranks - 1, 2))
        yield Promised(
            role="hidden states back in order",
            tensors=("the last layer's result, and its gradient",),
            count=(2 * steps, 2 * steps),
            spellings=((leg,),),
        )


def _heads_scattered(facts: Facts, layers: Sequence[_Attention], tokens: int) -> Iterator[Promised]:
    for one in layers:
        dtype = facts.wire(facts.compute(one.weights[0]))
        recomputed = 2 if facts.options.remat and one.stack > 1 else 1
        runs = one.stack * facts.options.accumulate
        for numbers in one.scattered(facts):
            leg = facts.leg("all-to-all", facts.context_axes, tokens * numbers, dtype)
            for direction, most in (("forward", recomputed), ("backward", 1)):
                yield Promised(
                    role=f"heads scattered for attention, {direction}",
                    tensors=tuple(decision.path for decision in one.weights + one.heads),
                    count=(runs, most * runs),
                    spellings=((leg,),),
                )


def _attentions(facts: Facts) -> Iterator[_Attention]:
    found: dict[tuple[str, int], dict[str, list[Decision]]] = {}
    for decision in facts.leaves:
        names = decision.leaf.names or ()
        for name in ("kv_heads", "heads"):
            if {name, "embed"} <= set(names):
                parent = "/".join(decision.path.split("/")[:-2])
                found.setdefault((parent, decision.leaf.num_layers), {}).setdefault(name, []).append(decision)
    for of in found.values():
        if "kv_heads" in of:
            yield _Attention(tuple(of["kv_heads"]), tuple(of.get("heads", ())))


def _split_heads(facts: Facts, decision: Decision) -> tuple[str, ...]:
    return tuple(axis for axis in split_axes(facts, decision.spec) if axis in facts.tensor_axes)


def _size_of(decision: Decision, name: str) -> int:
    return decision.leaf.shape[(decision.leaf.names or ()).index(name)]
