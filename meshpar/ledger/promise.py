"""The promise: what a strategy says it will send, before any program is read.

What is promised follows from the rules, not from the program (a stacked leaf counts once a layer):

    a parameter split over batch axes       all-gather before use, forward and backward, in the compute dtype
    its gradient                            reduce-scatter over the axes that split its update,
                                            all-reduce over the other axes that split the batch
    ... both, where the strategy quantizes  all-gather of bytes, all-to-all of bytes
    a parameter not split as its update is  all-gather of the new value
    a weight contracted over a split dim    all-reduce of its result, forward            (row-parallel, Megatron's g)
    weights that share a whole input        all-reduce of its gradient, backward         (column-parallel, Megatron's f)
    ... with the sequence split between     reduce-scatter where the sum was, all-gather where the whole is needed again
    logits split over the vocabulary        all-reduce of max, sum and target, one number a token
    attention, the sequence split           permutes of keys and values round a ring, and backward of their gradients
    numbers or vectors over the batch       losses, metrics, norms, statistics of a batch: counted, not promised

A weight is row-parallel when its split dim stands before its `embed` dim, column-parallel when behind it (without
names: the first or a later dim), as in Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.ledger.promise_kernels import attended, gathered_in_bytes, scattered_in_bytes
from meshpar.ledger.promise_matmul import contracted
from meshpar.ledger.terms import (
    ITEMSIZE,
    Facts,
    Promised,
    facts_of,
    is_looked_up,
    is_tied,
    layer_elements,
    owned_axes,
    split_axes,
    stack_of,
)
from meshpar.state import Setup
from meshpar.step import StepOptions
from meshpar.strategies import MIN_SHARDED_BYTES
from meshpar.types import Decision


def promised(setup: Setup, options: StepOptions, batch: Any, *, on_cpu: bool = False) -> tuple[Promised, ...]:
    """What a training step promises to send.

    Args:
      setup: the state's: model, mesh, strategy and every leaf's decision.
      options: the step's.
      batch: the global batch, or its shapes.
      on_cpu: promise what XLA:CPU makes of it: float32 on the wire, and a sum of several all-reduces instead of one
        all-reduce of the sum.
    """
    facts = facts_of(setup, options, batch, on_cpu)
    leaves = list(zip(setup.table.params, _specs(setup.layout.grads), _specs(setup.layout.updates), strict=True))
    found: list[Promised] = []
    in_bytes = {decision.path: gathered_in_bytes(facts, decision) for decision, _, _ in leaves}
    for parts in in_bytes.values():
        found += parts or ()
    for make in (
        lambda d, g, u: None if in_bytes[d.path] is not None else _gathered(facts, d),
        lambda d, g, u: scattered_in_bytes(facts, d) or _reduced(facts, d, g, u),
        lambda d, g, u: _renewed(facts, d, u),
    ):
        for decision, grads, update in leaves:
            one = make(decision, grads, update)
            if one is not None:
                layered = _as_layers(decision)
                stacked = make(layered, grads, update) if layered is not None else None
                found.append(dataclasses.replace(_of_leaf(one), stacked=stacked and _of_leaf(stacked)))
    return _merged([*found, *contracted(facts), *attended(facts)])


def _as_layers(decision: Decision) -> Decision | None:
    """The decision about a leaf without names as if its first dim were layers; None when that cannot be."""
    leaf = decision.leaf
    if leaf.names is not None or len(leaf.shape) < 2 or leaf.shape[0] < 2:
        return None
    names = ("layers", *(None for _ in leaf.shape[1:]))
    return dataclasses.replace(decision, leaf=dataclasses.replace(leaf, names=names))


def _of_leaf(one: Promised) -> Promised:
    marked = (tuple(dataclasses.replace(leg, of_leaf=True) for leg in spelling) for spelling in one.spellings)
    return dataclasses.replace(one, spellings=tuple(marked))


def _specs(tree: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _gathered(facts: Facts, decision: Decision) -> Promised | None:
    """A parameter that is split over axes on which every device needs it whole."""
    axes = set(split_axes(facts, decision.spec)) - set(facts.tensor_axes) - set(owned_axes(facts, decision))
    if not axes:
        return None
    stack = stack_of(decision)
    # Outside a loop over layers what was gathered for the forward pass is still there in the backward; inside, a layer
    # that is computed again may gather again.
    fewest = facts.passes * facts.micro_steps * stack if stack > 1 else 1
    most = (facts.passes + bool(facts.options.remat and stack > 1)) * facts.micro_steps * stack
    dtype = facts.wire(facts.compute(decision))
    leg = facts.leg("all-gather", axes, layer_elements(facts, decision, axes), dtype)
    return Promised(
        role="weights before use", tensors=(decision.path,), count=(fewest, most), stack=stack, spellings=((leg,),)
    )


def _reduced(facts: Facts, decision: Decision, grads: PartitionSpec, update: PartitionSpec) -> Promised | None:
    """A gradient: scattered over the axes that split its update, summed over the others that split the batch."""
    # Micro-steps keep their sums as the gradients' rules say; otherwise gradients go straight to the update's shards.
    keeps_sums = facts.options.accumulate > 1 and facts.options.accumulate_mode == "each"
    owned = set(owned_axes(facts, decision))
    split = split_axes(facts, grads if keeps_sums else update)
    of_all = set(facts.batch_axes) | set(facts.context_axes)
    partial = (of_all | set(facts.sequence_axes)) - owned - set(split_axes(facts, decision.spec))
    partial |= (set(split_axes(facts, decision.spec)) & of_all) - owned
    scattered = facts.ordered(set(split) & partial)
    rest = facts.ordered(partial - set(scattered))
    by_sequence = facts.ordered(set(rest) & {*facts.sequence_axes, *facts.context_axes})
    if not scattered and not rest:
        return None
    dtype = facts.wire(facts.options.precision.reduce_dtype(facts.compute(decision)))
    once = facts.options.accumulate if facts.options.accumulate_mode == "once" else 1
    kept = set(split_axes(facts, decision.spec)) - partial
    elements = decision.leaf.size // stack_of(decision) // facts.ways(kept)
    part = elements // facts.ways(scattered)
    scatter = [facts.leg("reduce-scatter", scattered, elements, dtype)] if scattered else []
    # With one reduction after all micro-steps, the axes that split the sequence still reduce in each of them.
    inner = [facts.leg("all-reduce", by_sequence, elements, dtype, times=once)] if once > 1 and by_sequence else []
    if inner:
        rest = facts.ordered(set(rest) - set(by_sequence))
    spellings = [[*inner, *scatter, *([facts.leg("all-reduce", rest, part, dtype)] if rest else [])]]
    if keeps_sums:  # the compiler may scatter a micro-step's gradient although its sum is kept whole
        finer = facts.ordered(set(split_axes(facts, update)) & partial)
        coarse = facts.ordered(partial - set(finer))
        if finer != scattered:
            legs = [facts.leg("reduce-scatter", finer, elements, dtype)]
            legs += [facts.leg("all-reduce", coarse, elements // facts.ways(finer), dtype)] if coarse else []
            spellings.append(legs)
    if len(rest) > 1 and not inner:
        spellings.append([*scatter, *(facts.leg("all-reduce", (axis,), part, dtype) for axis in rest)])
    # The compiler does not bother to scatter small arrays, and XLA:CPU not always to find the slice behind a sum. A
    # lookup's gradient whose rows are split in both dims is summed over the axes of both at once.
    is_small = elements * ITEMSIZE.get(dtype, 4) <= MIN_SHARDED_BYTES
    is_scattered_in_two = bool(set(rest) & set(facts.context_axes)) and is_looked_up(decision)
    if scattered and (facts.on_cpu or is_small or is_scattered_in_two):
        spellings.append([*inner, facts.leg("all-reduce", (*scattered, *rest), elements, dtype)])
        if rest and not inner:
            summed = facts.leg("all-reduce", rest, elements, dtype)
            spellings.append([summed, facts.leg("reduce-scatter", scattered, elements, dtype)])
            spellings.append([summed, facts.leg("all-reduce", scattered, elements, dtype)])
        if len(scattered) > 1 and not inner:
            spellings.append([facts.leg("all-reduce", (axis,), elements, dtype) for axis in (*scattered, *rest)])
    if keeps_sums:
        spellings = [[dataclasses.replace(leg, in_loop=True) for leg in spelling] for spelling in spellings]
        if rest:  # a sum of sums: the compiler may reduce that of all micro-steps, after their loop
            later = facts.leg("all-reduce", rest, part, dtype, serves=facts.options.accumulate)
            spellings.insert(1, [*(dataclasses.replace(leg, in_loop=True) for leg in scatter), later])
    stack = stack_of(decision)
    runs = stack * facts.micro_steps
    # A table that is looked up and multiplied by has two gradients, which are summed after their reduction.
    uses = 2 if is_tied(facts, decision) else 1
    return Promised(
        role="gradients",
        tensors=(decision.path,),
        vector=stack * max(decision.leaf.shape, default=0),
        count=(runs, uses * runs),
        stack=stack,
        spellings=tuple(tuple(spelling) for spelling in spellings),
    )


def _renewed(facts: Facts, decision: Decision, update: PartitionSpec) -> Promised | None:
    """A parameter whose update is split more than itself: the new value is gathered."""
    axes = set(split_axes(facts, update)) - set(split_axes(facts, decision.spec))
    if not axes:
        return None
    stack = stack_of(decision)
    leg = facts.leg("all-gather", axes, layer_elements(facts, decision, ()), facts.wire(decision.leaf.dtype))
    return Promised(
        role="new parameters", tensors=(decision.path,), count=(stack, stack), stack=stack, spellings=((leg,),)
    )


def _merged(found: Sequence[Promised]) -> tuple[Promised, ...]:
    """Promises that differ in their tensors only, as one."""
    merged: dict[Any, Promised] = {}
    for one in found:
        key = (one.role, one.stack, one.spellings, one.stacked)
        if key in merged:
            so_far = merged[key]
            count = (so_far.count[0] + one.count[0], so_far.count[1] + one.count[1])
            vector = max(so_far.vector, one.vector)
            one = dataclasses.replace(so_far, tensors=so_far.tensors + one.tensors, count=count, vector=vector)
        merged[key] = one
    return tuple(merged.values())
