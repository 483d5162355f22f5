"""Expected collectives for parameters: gathered weights, reduced gradients and gathered new values.

They follow from the shardings of a parameter, its gradient and its update:

    parameter sharded over batch axes          all-gather before use, forward and backward, in the compute dtype
    gradient                                   reduce-scatter over the axes that shard the update,
                                               all-reduce over the other batch axes
    update sharded over additional axes        all-gather of the new value

A stacked leaf counts once per layer, and an output layer computed in vocabulary chunks counts once per chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jax.sharding import PartitionSpec

from meshpar.parallel.execution import Execution, LayerGather, Weight, layer_elements, owned_axes, split_axes
from meshpar.parallel.expected.collective import GRADIENTS, RENEWED, WEIGHTS, ExpectedCollective
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.sharding.types import PAIR, Decision, Leaf, axes_of_spec


def expected_collectives(step: Execution) -> Iterator[ExpectedCollective]:
    """Yield the expected collectives of every parameter, its gradient and its new value."""
    for make in (gathered, reduced, renewed):
        for param in step.weights:
            for context, weight in _by_use(step, param) if make is not renewed else ((step, param),):
                collective = make(context, weight)
                if collective is None:
                    continue
                leaf = weight.leaf
                if leaf.names is None and len(leaf.shape) > 1 and leaf.shape[0] > 1:
                    leaf = dataclasses.replace(leaf, names=("layers", *(None for _ in leaf.shape[1:])))
                    layers = dataclasses.replace(weight, decision=dataclasses.replace(weight.decision, leaf=leaf))
                    collective = dataclasses.replace(collective, as_stacked=make(context, layers))
                yield from (collective,) if make is renewed else _as_used(step, weight, collective)
    for weight in step.weights:
        yield from _rows_gathered(step, weight)


def _by_use(step: Execution, weight: Weight) -> tuple[tuple[Execution, Weight], ...]:
    """Return the uses of a parameter. An output layer in vocabulary chunks is treated as a stack of layers.

    A tied table is also used unsharded by the lookup, which has a separate gradient. If it is gathered once for
    all micro-steps, both uses share the gathered table.
    """
    is_shared = step.gathers_once and step.is_tied
    if step.vocab_chunks == 1 or is_shared or not weight.leaf.has("vocab"):
        return ((step, weight),)
    is_head = step.is_tied or not weight.leaf.is_table
    step = dataclasses.replace(step, is_tied=False, batch_slices=1)  # the loss is not computed in slices
    ahead = dataclasses.replace(step, gathering=LayerGather(formats=step.formats, ahead=1))
    lookup, head = (step, weight), (ahead, _as_chunks(step, weight))
    return (*[lookup] * weight.leaf.is_table, *[head] * is_head)


def _as_used(step: Execution, weight: Weight, collective: ExpectedCollective) -> Iterator[ExpectedCollective]:
    """Yield a parameter's collective with counts that follow from the uses of the parameter (`step.uses`).

    The collective is required only if the model uses the full parameter. XLA may send slices if the model uses slices,
    and rows if the width of a table is sharded. Over `unannotated_axes`, XLA may
    divide the work on gradients and small parameters among the ranks; each rank then sends only a shard.
    """
    leaf, use = weight.leaf, step.uses.get(weight.decision.path)
    if use is None:
        yield collective
        return
    # The width of the table is sharded, or only the width of its gradient.
    width_axes = {*axes_of_spec(weight.spec[1:]), *axes_of_spec(weight.update[1:])}
    sends_rows = bool(use.rows) and bool(width_axes & set(collective.axes))
    may_share = bool(step.unannotated_axes) and (collective.kind == "sum" or leaf.nbytes <= MIN_SHARDED_BYTES)
    required = bool(use.full) and not (use.slices or sends_rows or may_share)
    times = max(use.full, 1)

    def repeated(collective: ExpectedCollective, times: int, *, required: bool) -> ExpectedCollective:
        counts = tuple((axis, low if required else 0, times * high) for axis, low, high in collective.counts)
        count = (collective.count[0] if required else 0, times * collective.count[1])
        return dataclasses.replace(collective, count=count, counts=counts)

    yield repeated(collective, times, required=required)
    shared = [(leaf.size // step.num_shards(step.unannotated_axes), times)] if may_share else []
    for size, runs in (*use.slices, *shared):
        if elements := collective.elements * size // leaf.size:
            yield repeated(dataclasses.replace(collective, elements=elements, as_stacked=None), runs, required=False)
    if sends_rows:
        yield from _rows_exchanged(step, collective, leaf, use.rows)


def _rows_exchanged(
    step: Execution, collective: ExpectedCollective, leaf: Leaf, num_rows: int
) -> Iterator[ExpectedCollective]:
    """Yield the collectives of a lookup in a table whose width is sharded, which sends slices of the rows."""
    width = math.prod(leaf.shape[1:])
    rows = dataclasses.replace(
        collective, kind="gather", elements=num_rows, count=(0, 2 * step.num_exchanges), counts=(), scattered=(),
        may_all_reduce=False, as_stacked=None,
    )  # fmt: skip
    yield dataclasses.replace(rows, kind="exchange", elements=num_rows // step.num_shards(step.batch_axes) * width)
    yield dataclasses.replace(rows, dtype="s32")
    # XLA may first gather the rows over the batch axes that do not shard the table.
    yield dataclasses.replace(rows, elements=num_rows * width)


def _as_chunks(step: Execution, weight: Weight) -> Weight:
    """Return a matrix as a stack of vocabulary chunks. Each chunk takes the same number of rows from each shard."""
    leaf, num = weight.leaf, step.vocab_chunks
    assert leaf.names is not None
    dim = leaf.names.index("vocab")
    ranks = step.num_shards(split_axes(step, PartitionSpec(*weight.spec[dim : dim + 1])))
    size = ranks * -(-leaf.shape[dim] // ranks // num)
    shape = (num, *leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
    specs = [PartitionSpec(None, *spec) for spec in (weight.spec, weight.grads, weight.update)]
    leaf = dataclasses.replace(leaf, shape=shape, names=("layers", *leaf.names))
    return Weight(dataclasses.replace(weight.decision, leaf=leaf, spec=specs[0]), *specs[1:])


def gathered(step: Execution, weight: Weight) -> ExpectedCollective | None:
    """Return the all-gather of a parameter over the axes where every device needs the full parameter."""
    decision = weight.decision
    if step.exchanges_rows and decision.leaf.is_table:
        return None
    axes = set(split_axes(step, decision.spec)) - set(step.tensor_axes) - set(owned_axes(step, decision))
    if not axes or (step.formats is not None and axes & set(step.batch_axes)):  # a kernel of the engine gathers it
        return None
    stack = decision.leaf.num_layers
    # Outside a loop over layers the backward pass reuses the array that the forward pass gathered. Inside, a
    # rematerialized layer may gather again. MoE layers gather their router once and save it. XLA may also save the
    # small matrices of a low-rank pair. The backward pass does not use biases.
    passes = 1 if step.gathers_once else 2
    is_saved = decision.leaf.is_router or decision.path.rpartition("/")[2] in (*PAIR, "bias")
    times = 1 if is_saved else passes
    minimum = times * step.num_exchanges * stack if stack > 1 else 1
    # XLA unrolls a loop over a single layer, but may still gather again for rematerialization.
    maximum = (passes + (step.recomputes and decision.leaf.is_stacked)) * step.num_exchanges * stack
    ahead, keep = (min(number, stack) for number in (step.gathering.ahead, step.gathering.keep))
    if stack > 1 and (ahead or keep):
        # Layers in the loop that gathers again, and in the loop that keeps its weights. XLA removes loops over a single
        # layer, and may share gathers outside of these loops between both passes and between micro-steps.
        again, kept = (size if size > 1 else 0 for size in (stack - max(ahead, keep), keep - ahead))
        minimum = step.num_exchanges * (times * again + kept) + stack - again - kept
        if keep > ahead and not decision.leaf.is_router:  # the layer gathers its router over the axes of experts
            maximum = (passes * stack - keep + ahead) * step.num_exchanges
    return ExpectedCollective(
        role=WEIGHTS, kind="gather", axes=step.ordered(axes), elements=layer_elements(step, decision, axes),
        dtype=step.wire(step.gathered_dtype(decision)), count=(minimum, maximum), tensors=(decision.path,),
        stack=stack, is_param=True,
    )  # fmt: skip


def reduced(step: Execution, weight: Weight) -> ExpectedCollective | None:
    """Return the reduction of a gradient: scattered over the axes of its update, all-reduced over other batch axes."""
    decision, leaf = weight.decision, weight.leaf
    deferred = set(step.deferred_axes)
    is_exchanged = step.exchanges_rows and decision.leaf.is_table  # a kernel reduces it in each micro-step
    if not leaf.is_trained or (is_exchanged and not deferred):
        return None
    is_quantized = step.formats is not None and step.formats.gradients is not None and leaf.layer_ndim > 1
    owned, sharded = set(owned_axes(step, decision)), set(split_axes(step, decision.spec))
    if is_quantized and sharded & set(step.batch_axes):  # a kernel of the engine reduces it
        return None
    data_axes = set(step.batch_axes) | set(step.context_axes)
    partial = ((data_axes | set(step.sequence_axes)) - owned - sharded) | ((sharded & data_axes) - owned)
    # The input of these weights has the full sequence, and attention sums the gradients of replicated key heads.
    if decision.leaf.is_router or (leaf.has("kv_heads") and not sharded & set(step.sequence_axes)):
        partial -= set(step.sequence_axes)
    if pair_axes := outputs_of_pair(step, decision):  # the first matrix of a pair also has the full sequence
        partial -= set(step.sequence_axes)
        partial |= set() if step.is_pipelined or step.is_by_device else pair_axes
    if is_exchanged:
        partial &= deferred
    if not partial:
        return None
    scattered = set(split_axes(step, weight.update)) & partial
    stack, elements = leaf.num_layers, leaf.size // leaf.num_layers // step.num_shards(sharded - partial)
    runs = stack * step.num_exchanges
    # A tied table has two gradients, of the lookup and of the head, which are added after their reductions. A layer
    # has a gradient per batch slice, which XLA may add before it reduces them.
    is_shared = step.is_tied and decision.leaf.has("vocab") and decision.path not in step.uses
    uses = 2 if is_shared else step.slices(stack)
    counts: dict[str, tuple[int, int]] = {}
    # The accumulated gradients have the sharding of the gradient rules. Over the other axes XLA may accumulate first
    # and reduce once.
    accumulates = step.num_exchanges > 1
    always_scattered = scattered & set(split_axes(step, weight.grads)) if accumulates else scattered
    if accumulates:
        counts |= dict.fromkeys(partial - always_scattered, (stack, uses * runs))
    counts |= dict.fromkeys(partial & deferred, (stack, stack))
    # If gradients are reduced once, after all micro-steps, each micro-step still reduces over the sequence axes.
    # Outside the layers XLA may accumulate first.
    if step.gathers_once and not step.is_pipelined:
        num_reductions = stack * step.microbatches
        minimum = num_reductions if leaf.is_stacked else stack
        sequence_axes = {*step.sequence_axes, *step.context_axes}
        counts |= dict.fromkeys(partial & sequence_axes, (minimum, uses * num_reductions))
        if decision.leaf.is_table:  # see `_rows_gathered`
            counts |= dict.fromkeys(partial & set(step.context_axes), (0, uses * num_reductions))
    return ExpectedCollective(
        role=GRADIENTS, kind="sum", axes=step.ordered(partial), scattered=step.ordered(scattered),
        may_all_reduce=always_scattered != scattered or _may_all_reduce(step, weight, elements, partial - scattered),
        elements=elements, dtype=step.wire(step.reduce_dtype(decision)), count=(runs, uses * runs),
        counts=tuple((axis, *counts[axis]) for axis in step.ordered(counts)), tensors=(decision.path,), stack=stack,
        is_param=True,
    )  # fmt: skip


def outputs_of_pair(step: Execution, decision: Decision) -> set[str]:
    """Return the tensor axes over which the gradient of a low-rank matrix is a partial sum.

    For the first matrix of a pair, these are the axes that shard the second, as in a column-parallel layer. For the
    second matrix of an expert, they are the axes that shard the first.
    """
    module, _, name = decision.path.rpartition("/")
    partner = {PAIR[0]: PAIR[1], **({PAIR[1]: PAIR[0]} if decision.leaf.has("expert") else {})}.get(name)
    if partner is None:
        return set()
    specs = (weight.spec for weight in step.weights if weight.decision.path == f"{module}/{partner}")
    return set(split_axes(step, next(specs, PartitionSpec()))) & set(step.tensor_axes)


def _rows_gathered(step: Execution, weight: Weight) -> Iterator[ExpectedCollective]:
    """Yield all-gathers of the rows and indices of a lookup, for its gradient over a sharded sequence.

    In each micro-step, XLA may use them instead of all-reducing the full table, because they send fewer bytes.
    """
    decision = weight.decision
    if not (step.gathers_once and step.context_axes and step.tokens and decision.leaf.is_table) or step.is_pipelined:
        return
    tokens = step.tokens * step.num_shards(step.context_axes)
    dtypes = dict.fromkeys((step.wire(step.reduce_dtype(decision)), step.wire(step.compute_dtype(decision))))
    elements_of = dict.fromkeys(dtypes, tokens * decision.leaf.size_of("embed")) | {"s32": tokens}
    for dtype, elements in elements_of.items():
        yield ExpectedCollective(
            role=GRADIENTS, kind="gather", axes=step.context_axes, elements=elements, dtype=dtype,
            count=(0, step.microbatches), tensors=(decision.path,),
        )  # fmt: skip


def _may_all_reduce(step: Execution, weight: Weight, elements: int, reduced_axes: set[str]) -> bool:
    """Return whether XLA may all-reduce a gradient although each rank keeps only a shard.

    XLA does so for small arrays, and XLA:CPU does not always merge an all-reduce with the slice after it. The gradient
    of a lookup sharded in both dims is reduced over all axes together. Gradients of experts leave the
    `shard_map` of their layer with the sharding of the parameters, and so does the router's.
    """
    decision, owned = weight.decision, owned_axes(step, weight.decision)
    in_region = (bool(owned) or decision.leaf.is_router) and not step.gathers_once
    if in_region and owned and set(split_axes(step, weight.update)) <= set(split_axes(step, decision.spec)):
        return False
    is_small = elements * step.reduce_dtype(decision).itemsize <= MIN_SHARDED_BYTES
    expert_axes = {axis for other in step.weights for axis in owned_axes(step, other.decision)}
    is_joint = bool(reduced_axes & (expert_axes | set(step.context_axes))) and decision.leaf.is_table
    return step.on_cpu or is_small or in_region or is_joint


def renewed(step: Execution, weight: Weight) -> ExpectedCollective | None:
    """Return the all-gather of the new parameter value, if the update is sharded over additional axes."""
    decision = weight.decision
    axes = step.ordered(set(split_axes(step, weight.update)) - set(split_axes(step, decision.spec)))
    if not axes or not decision.leaf.is_trained:
        return None
    stack = decision.leaf.num_layers
    return ExpectedCollective(
        role=RENEWED, kind="gather", axes=axes, elements=layer_elements(step, decision, ()),
        dtype=step.wire(decision.leaf.dtype), count=(stack, stack), tensors=(decision.path,), stack=stack,
        is_param=True,
    )  # fmt: skip
