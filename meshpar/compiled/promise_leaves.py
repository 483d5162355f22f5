"""What parameters promise one by one: weights gathered before use, gradients reduced, new values gathered."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from meshpar.compiled.terms import (
    ITEMSIZE,
    Facts,
    Leg,
    Promised,
    is_looked_up,
    is_router,
    is_tied,
    layer_elements,
    owned_axes,
    split_axes,
)
from meshpar.parallel.part import MIN_SHARDED_BYTES
from meshpar.sharding.types import Decision


def gathered(facts: Facts, decision: Decision) -> Promised | None:
    """A parameter that is split over axes on which every device needs it whole."""
    axes = set(split_axes(facts, decision.spec)) - set(facts.tensor_axes) - set(owned_axes(facts, decision))
    if not axes:
        return None
    stack = decision.leaf.num_layers
    # Outside a loop over layers what was gathered for the forward pass is still there in the backward; inside, a layer
    # that is computed again may gather again.
    # A layer of experts gathers its router on the way in, and keeps it for its backward pass.
    passes = 1 if is_router(decision) else facts.passes
    fewest = passes * facts.micro_steps * stack if stack > 1 else 1
    most = (facts.passes + bool(facts.options.remat and stack > 1)) * facts.micro_steps * stack
    dtype = facts.wire(facts.compute(decision))
    spellings: list[tuple[Leg, ...]] = [(facts.leg("all-gather", axes, layer_elements(facts, decision, axes), dtype),)]
    of_experts = is_router(decision) or (facts.is_by_device and "expert" in (decision.leaf.names or ()))
    if of_experts and len(axes) == 2:  # split in two dims: one dim after the other
        spellings += [
            (
                facts.leg("all-gather", (first,), layer_elements(facts, decision, (first,)), dtype),
                facts.leg("all-gather", axes - {first}, layer_elements(facts, decision, axes), dtype),
            )
            for first in facts.ordered(axes)
        ]
        if facts.options.remat and stack > 1:  # of which a layer that is computed again may have kept the first
            spellings += [(leg,) for legs in tuple(spellings[1:]) for leg in legs]
    return Promised(
        role="weights before use", tensors=(decision.path,), count=(fewest, most), stack=stack,
        spellings=tuple(spellings),
    )  # fmt: skip


def reduced(facts: Facts, decision: Decision, grads: PartitionSpec, update: PartitionSpec) -> Promised | None:
    """A gradient: scattered over the axes that split its update, summed over the others that split the batch."""
    # Micro-steps keep their sums as the gradients' rules say; otherwise gradients go straight to the update's shards.
    keeps_sums = facts.options.accumulate > 1 and facts.options.accumulate_mode == "each"
    owned = set(owned_axes(facts, decision))
    split = split_axes(facts, grads if keeps_sums else update)
    of_all = set(facts.batch_axes) | set(facts.context_axes)
    partial = (of_all | set(facts.sequence_axes)) - owned - set(split_axes(facts, decision.spec))
    partial |= (set(split_axes(facts, decision.spec)) & of_all) - owned
    if is_router(decision):  # experts see the whole sequence, and so does what scores them
        partial -= set(facts.sequence_axes)
    scattered = facts.ordered(set(split) & partial)
    rest = facts.ordered(partial - set(scattered))
    by_sequence = facts.ordered(set(rest) & {*facts.sequence_axes, *facts.context_axes})
    if not scattered and not rest:
        return None
    dtype = facts.wire(facts.options.precision.reduce_dtype(facts.compute(decision)))
    once = facts.options.accumulate if facts.options.accumulate_mode == "once" else 1
    kept = set(split_axes(facts, decision.spec)) - partial
    elements = decision.leaf.size // decision.leaf.num_layers // facts.ways(kept)
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
    others = {axis for one in facts.leaves for axis in owned_axes(facts, one)} | set(facts.context_axes)
    is_scattered_in_two = bool(set(rest) & others) and is_looked_up(decision)
    # Experts' gradients leave the region of their layer as shards where they went in so, and whole where they did not,
    # as the router does.
    in_region = (bool(owned) or is_router(decision)) and not facts.is_once
    as_shards = in_region and bool(owned) and set(scattered) <= set(split_axes(facts, decision.spec))
    is_free = facts.on_cpu or is_small or is_scattered_in_two or in_region
    if scattered and is_free and not as_shards:
        spellings.append([*inner, facts.leg("all-reduce", (*scattered, *rest), elements, dtype)])
        if rest and not inner:
            summed = facts.leg("all-reduce", rest, elements, dtype)
            spellings.append([summed, facts.leg("reduce-scatter", scattered, elements, dtype)])
            spellings.append([summed, facts.leg("all-reduce", scattered, elements, dtype)])
        if by_sequence and len(rest) > len(by_sequence) and not inner:
            by_batch = facts.ordered(partial - set(by_sequence))
            spellings.append([facts.leg("all-reduce", over, elements, dtype) for over in (by_sequence, by_batch)])
        if len(scattered) > 1 and not inner:
            spellings.append([facts.leg("all-reduce", (axis,), elements, dtype) for axis in (*scattered, *rest)])
    if keeps_sums:
        spellings = [[dataclasses.replace(leg, in_loop=True) for leg in spelling] for spelling in spellings]
        if rest:  # a sum of sums: the compiler may reduce that of all micro-steps, after their loop
            later = facts.leg("all-reduce", rest, part, dtype, serves=facts.options.accumulate)
            spellings.insert(1, [*(dataclasses.replace(leg, in_loop=True) for leg in scatter), later])
    stack = decision.leaf.num_layers
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


def renewed(facts: Facts, decision: Decision, update: PartitionSpec) -> Promised | None:
    """A parameter whose update is split more than itself: the new value is gathered."""
    axes = set(split_axes(facts, update)) - set(split_axes(facts, decision.spec))
    if not axes:
        return None
    stack = decision.leaf.num_layers
    leg = facts.leg("all-gather", axes, layer_elements(facts, decision, ()), facts.wire(decision.leaf.dtype))
    return Promised(
        role="new parameters", tensors=(decision.path,), count=(stack, stack), stack=stack, spellings=((leg,),)
    )
