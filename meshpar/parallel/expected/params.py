"""What parameters promise one by one: weights gathered before use, gradients reduced, new values gathered.

It follows from how a leaf, its gradient and its update lie, whichever part's rules said so:

    a parameter split over batch axes       all-gather before use, forward and backward, in the compute dtype
    its gradient                            reduce-scatter over the axes that split its update,
                                            all-reduce over the other axes that split the batch
    a parameter not split as its update is  all-gather of the new value

A stacked leaf counts once a layer, an output layer that is used in chunks of the vocabulary once a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from meshpar.parallel.expected.step_spec import (
    GRADIENTS,
    RENEWED,
    WEIGHTS,
    ExpectedCollective,
    StepSpec,
    Weight,
    has_vocabulary,
    is_expert,
    is_looked_up,
    is_router,
    layer_elements,
    owned_axes,
    size_of,
    split_axes,
)
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.sharding.types import PAIR, Decision, Leaf, axes_of_spec


def promised(step: StepSpec) -> Iterator[ExpectedCollective]:
    """Of every parameter, its gradient and its new value."""
    for make in (gathered, reduced, renewed):
        for whole in step.weights:
            for of, weight in _by_use(step, whole) if make is not renewed else ((step, whole),):
                one = make(of, weight)
                if one is not None:
                    layered = _as_layers(weight)
                    stacked = make(of, layered) if layered is not None else None
                    if make is renewed:
                        yield dataclasses.replace(one, stacked=stacked)
                    else:
                        yield from _as_used(step, weight, dataclasses.replace(one, stacked=stacked))
    for weight in step.weights:
        yield from _rows_gathered(step, weight)


def _by_use(step: StepSpec, weight: Weight) -> tuple[tuple[StepSpec, Weight], ...]:
    """A parameter as the step uses it: an output layer in chunks of the vocabulary is like a stack of layers.

    A table that is looked up, too, is used whole for that, and has a gradient of its own from there; gathered once for
    all micro-steps, it is there for both.
    """
    is_shared = step.is_once and step.is_tied
    if step.vocab_chunks == 1 or is_shared or not has_vocabulary(weight.decision):
        return ((step, weight),)
    is_head = step.is_tied or not is_looked_up(weight.decision)
    step = dataclasses.replace(step, is_tied=False, interleave=1)  # the loss is of whole rows
    lookup, head = (step, weight), (dataclasses.replace(step, is_prefetched=True), _as_chunks(step, weight))
    return (lookup, head) if is_looked_up(weight.decision) and is_head else (head,) if is_head else (lookup,)


def _as_used(step: StepSpec, weight: Weight, one: ExpectedCollective) -> Iterator[ExpectedCollective]:
    """What is promised of a parameter, as often as the trace of a model that lays nothing out uses it.

    Where nothing that has a gradient uses it, nothing is due. Where slices of it are used, XLA may send these instead,
    and rows that are looked up in place of a table whose width is split. Axes of which no promise is made may share
    the work on a small one, and on any gradient: then a part of it is sent.
    """
    leaf, use = weight.decision.leaf, step.uses.get(weight.decision.path)
    if use is None:
        yield one
        return
    # A table itself, or the gradient of its rows where that alone is split.
    width = {*axes_of_spec(weight.decision.spec[1:]), *axes_of_spec(weight.update[1:])}
    is_wide = bool(use.rows) and bool(width & set(one.axes))
    may_share = bool(step.unannotated_axes) and (one.kind == "sum" or leaf.nbytes <= MIN_SHARDED_BYTES)
    is_due = bool(use.whole) and not (use.slices or is_wide or may_share)
    times = max(use.whole, 1)

    def as_often(one: ExpectedCollective, times: int, *, is_due: bool) -> ExpectedCollective:
        counts = tuple((axis, low if is_due else 0, times * high) for axis, low, high in one.counts)
        return dataclasses.replace(one, count=(one.count[0] if is_due else 0, times * one.count[1]), counts=counts)

    yield as_often(one, times, is_due=is_due)
    parts = [*use.slices, *([(leaf.size // step.num_shards(step.unannotated_axes), times)] if may_share else [])]
    for size, runs in parts:
        if elements := one.elements * size // leaf.size:
            yield as_often(dataclasses.replace(one, elements=elements, stacked=None), runs, is_due=False)
    if is_wide:
        yield from _rows_exchanged(step, one, leaf, use.rows)


def _rows_exchanged(step: StepSpec, one: ExpectedCollective, leaf: Leaf, num_rows: int) -> Iterator[ExpectedCollective]:
    """Rows that each device looks up in its part of every row of a table, sent to those whose tokens they are."""
    whole = num_rows // step.num_shards(step.batch_axes) * math.prod(leaf.shape[1:])
    most = 2 * step.micro_steps
    free: dict[str, Any] = {"count": (0, most), "counts": (), "scattered": (), "whole": False, "stacked": None}
    yield dataclasses.replace(one, kind="exchange", elements=whole, **free)
    yield dataclasses.replace(one, kind="gather", elements=num_rows, dtype="s32", **free)
    # Over the axes of the batch that do not split the table, the rows themselves may be gathered first.
    yield dataclasses.replace(one, kind="gather", elements=num_rows * math.prod(leaf.shape[1:]), **free)


def _as_chunks(step: StepSpec, weight: Weight) -> Weight:
    """A matrix as a stack of chunks of its vocabulary, each of so many rows of every rank's part."""
    leaf, num = weight.decision.leaf, step.vocab_chunks
    assert leaf.names is not None
    dim = leaf.names.index("vocab")
    ranks = step.num_shards(split_axes(step, PartitionSpec(*weight.decision.spec[dim : dim + 1])))
    size = ranks * -(-leaf.shape[dim] // ranks // num)
    shape = (num, *leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
    specs = [PartitionSpec(None, *spec) for spec in (weight.decision.spec, weight.grads, weight.update)]
    leaf = dataclasses.replace(leaf, shape=shape, names=("layers", *leaf.names))
    return Weight(dataclasses.replace(weight.decision, leaf=leaf, spec=specs[0]), *specs[1:])


def _as_layers(weight: Weight) -> Weight | None:
    """A leaf without names as if its first dim were layers; None when that cannot be."""
    leaf = weight.decision.leaf
    if leaf.names is not None or len(leaf.shape) < 2 or leaf.shape[0] < 2:
        return None
    leaf = dataclasses.replace(leaf, names=("layers", *(None for _ in leaf.shape[1:])))
    return dataclasses.replace(weight, decision=dataclasses.replace(weight.decision, leaf=leaf))


def gathered(step: StepSpec, weight: Weight) -> ExpectedCollective | None:
    """A parameter that is split over axes on which every device needs it whole."""
    decision = weight.decision
    if step.exchanges_rows and is_looked_up(decision):
        return None
    axes = set(split_axes(step, decision.spec)) - set(step.tensor_axes) - set(owned_axes(step, decision))
    if not axes or (step.quantize is not None and axes & set(step.batch_axes)):  # by a kernel of the engine's
        return None
    stack = decision.leaf.num_layers
    # Outside a loop over layers what was gathered for the forward pass is still there in the backward; inside, a layer
    # that is computed again may gather again. MoE layers gather their router on the way in, and keep it; so may XLA
    # the few numbers of a low-rank pair.
    passes = 1 if step.is_once else 2
    is_kept = is_router(decision) or decision.path.rpartition("/")[2] in PAIR
    fewest = (1 if is_kept else passes) * step.micro_steps * stack if stack > 1 else 1
    # XLA unrolls a loop over one layer, and may gather again for what it computes again all the same.
    most = (passes + (step.is_remat and decision.leaf.is_stacked)) * step.micro_steps * stack
    if step.is_prefetched and stack > 1:
        # The backward pass has the last layer's; the last iteration of its loop has no layer to gather for.
        fewest, most = max(1, fewest - step.micro_steps), max(most, fewest)
    return ExpectedCollective(
        role=WEIGHTS,
        kind="gather",
        axes=step.ordered(axes),
        elements=layer_elements(step, decision, axes),
        dtype=step.wire(step.gathered_dtype(decision)),
        count=(fewest, most),
        tensors=(decision.path,),
        stack=stack,
        of_leaf=True,
    )


def reduced(step: StepSpec, weight: Weight) -> ExpectedCollective | None:
    """A gradient: scattered over the axes that split its update, summed over the others that split the batch."""
    decision, leaf = weight.decision, weight.decision.leaf
    if not leaf.is_trained or (step.exchanges_rows and is_looked_up(decision)):
        return None
    in_bytes = step.quantize is not None and step.quantize.gradients is not None and leaf.layer_ndim > 1
    if in_bytes and set(split_axes(step, decision.spec)) & set(step.batch_axes):  # by a kernel of the engine's
        return None
    owned, split = set(owned_axes(step, decision)), set(split_axes(step, decision.spec))
    of_all = set(step.batch_axes) | set(step.context_axes)
    partial = ((of_all | set(step.sequence_axes)) - owned - split) | ((split & of_all) - owned)
    if is_router(decision):  # it takes in the whole sequence, as what is split over its axes
        partial -= set(step.sequence_axes)
    if made_over := outputs_of_pair(step, decision):  # so does the first of a pair, each rank for itself
        partial -= set(step.sequence_axes)
        partial |= set() if step.by_stages or step.is_by_device else made_over
    if not partial:
        return None
    scattered = set(split_axes(step, weight.update)) & partial
    stack, elements = leaf.num_layers, leaf.size // leaf.num_layers // step.num_shards(split - partial)
    runs = stack * step.micro_steps
    # A table that is looked up and multiplied by has two gradients, which are summed after their reduction, as a layer
    # may have one of every slice of the rows, where `training.slice_sums` finds no sum of matmuls.
    is_shared = step.is_tied and has_vocabulary(decision) and decision.path not in step.uses
    uses = 2 if is_shared else step.interleave if stack > 1 else 1
    counts: dict[str, tuple[int, int]] = {}
    # Micro-steps keep their sums as the gradients' rules say. XLA may add up what these leave whole before it sends.
    keeps_sums = step.accumulate > 1 and not step.is_once
    kept = scattered & set(split_axes(step, weight.grads)) if keeps_sums else scattered
    if keeps_sums:
        counts |= dict.fromkeys(partial - kept, (stack, uses * runs))
    # With one reduction behind all micro-steps, the axes that split the sequence still reduce in each of them. XLA may
    # add up what stands behind the layers before it sends.
    if step.is_once and not step.by_stages:
        each = stack * step.accumulate
        least = each if leaf.is_stacked else stack
        counts |= dict.fromkeys(partial & {*step.sequence_axes, *step.context_axes}, (least, uses * each))
        if is_looked_up(decision):  # see `_rows_gathered`
            counts |= dict.fromkeys(partial & set(step.context_axes), (0, uses * each))
    return ExpectedCollective(
        role=GRADIENTS,
        kind="sum",
        axes=step.ordered(partial),
        scattered=step.ordered(scattered),
        whole=kept != scattered or _may_come_whole(step, weight, elements, partial - scattered),
        elements=elements,
        dtype=step.wire(step.reduce_dtype(decision)),
        count=(runs, uses * runs),
        counts=tuple((axis, *counts[axis]) for axis in step.ordered(counts)),
        tensors=(decision.path,),
        stack=stack,
        of_leaf=True,
    )


def outputs_of_pair(step: StepSpec, decision: Decision) -> set[str]:
    """Of the first of a low-rank pair, the axes that split what the pair makes, as a column-parallel matrix does.

    Of the second of an expert's those that split what the first takes in: between the two are partial sums there.
    """
    module, _, name = decision.path.rpartition("/")
    beside = {PAIR[0]: PAIR[1], **({PAIR[1]: PAIR[0]} if is_expert(decision) else {})}.get(name)
    other = next((one.decision for one in step.weights if one.decision.path == f"{module}/{beside}"), None)
    return set() if beside is None or other is None else set(split_axes(step, other.spec)) & set(step.tensor_axes)


def _rows_gathered(step: StepSpec, weight: Weight) -> Iterator[ExpectedCollective]:
    """Of a lookup whose gradient each micro-step reduces over the sequence: its rows and their numbers, gathered.

    That sends less than the sum over the ranks of a whole table, and XLA may do it instead.
    """
    decision = weight.decision
    if not (step.is_once and step.context_axes and step.tokens and is_looked_up(decision)) or step.by_stages:
        return
    tokens = step.tokens * step.num_shards(step.context_axes)
    wide = step.wire(step.reduce_dtype(decision)), step.wire(step.compute_dtype(decision))
    for dtype, elements in (
        *((one, tokens * size_of(decision, "embed")) for one in dict.fromkeys(wide)),
        ("s32", tokens),
    ):
        yield ExpectedCollective(
            role=GRADIENTS,
            kind="gather",
            axes=step.context_axes,
            elements=elements,
            dtype=dtype,
            count=(0, step.accumulate),
            tensors=(decision.path,),
        )


def _may_come_whole(step: StepSpec, weight: Weight, elements: int, rest: set[str]) -> bool:
    """Whether XLA may sum a gradient whole, where its ranks keep a part each.

    It does not bother to scatter small arrays, and XLA:CPU not always finds the slice behind a sum. A lookup's gradient
    whose rows are split in both dims is summed over the axes of both at once. Experts' gradients leave the region of
    their layer as shards where they went in so, and whole where they did not, as the router does.
    """
    decision, owned = weight.decision, owned_axes(step, weight.decision)
    in_region = (bool(owned) or is_router(decision)) and not step.is_once
    update, spec = (set(split_axes(step, one)) for one in (weight.update, decision.spec))
    if in_region and owned and update <= spec:
        return False
    is_small = elements * step.reduce_dtype(decision).itemsize <= MIN_SHARDED_BYTES
    others = {axis for one in step.weights for axis in owned_axes(step, one.decision)} | set(step.context_axes)
    return step.on_cpu or is_small or in_region or (bool(rest & others) and is_looked_up(decision))


def renewed(step: StepSpec, weight: Weight) -> ExpectedCollective | None:
    """A parameter whose update is split more than itself: the new value is gathered."""
    decision = weight.decision
    axes = step.ordered(set(split_axes(step, weight.update)) - set(split_axes(step, decision.spec)))
    if not axes or not decision.leaf.is_trained:
        return None
    stack = decision.leaf.num_layers
    return ExpectedCollective(
        role=RENEWED,
        kind="gather",
        axes=axes,
        elements=layer_elements(step, decision, ()),
        dtype=step.wire(decision.leaf.dtype),
        count=(stack, stack),
        tensors=(decision.path,),
        stack=stack,
        of_leaf=True,
    )
