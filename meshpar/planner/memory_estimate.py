"""Estimate of the peak memory of a training step on one device.

    peak = state + batch + saved activations + gradients + copies + max(head, layer)

The state is exact. Saved activations follow from the trace of the step, for each remat policy. The other terms model
the buffers of compiled programs at their peak, which is in the backward pass of the head or of a layer:

- Head: the gradient of the logits, the full gradient of the head in the dtype of its reduction, and the gathered head.
  With prefetch, also the saved activations of the last layer, which runs outside the loop.
- Layer: recomputed activations, gathered weights of this layer and the next, and the largest full gradient. With
  prefetch, XLA peels the last two layers off the loop: recomputed activations and full gradients of both then coexist.
  If the head is not gathered, its gradient is computed after the layers, and the gradient of the logits exists until
  then.
  With batch slices, activations of a single slice exist, but full gradients of all slices until they are summed.
  Scores of attention without a library kernel exist once more than those that are saved or recomputed.
  With tensor parallelism, the gradients of an input by several matmuls exist until they are all-reduced; with sequence
  sharding, also the gathered input and its gradient. XLA splits small matmuls into float32 partial sums.
- Both: accumulated gradients with the sharding of the update; the stacked gradients of the layers in the compute dtype;
  the full gradient of an embedding table, unless rows are exchanged.

With pipeline stages, a device also stores the inputs of deferred weight gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from meshpar.hardware.cost_model import dropless_bytes
from meshpar.parallel.execution import Execution, Weight, layer_elements, owned_axes, split_axes
from meshpar.parallel.pipeline import Pipeline
from meshpar.planner.calibration import MEMORY
from meshpar.planner.layout import Layout, Placed
from meshpar.planner.workload import Activation, Remat
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.uniform import uniform
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import num_shards, without_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Plain):
    """Terms of the peak memory of a training step, in bytes per device."""

    state_bytes: int
    batch_bytes: int
    kept_bytes: int
    """Saved activations, with stages of all microbatches in flight, and gathered weights of further layers."""
    gradients_bytes: int
    """Gradients accumulated over micro-steps or microbatches, and the layers' gradients of a micro-step."""
    copies_bytes: int
    """Parameters in the compute dtype. A stage gathers its parameters once per step."""
    head_bytes: int
    """Backward pass of the head: gradients of logits, head and table, and gathered weights."""
    layer_bytes: int
    """Backward pass of a layer: recomputed activations, gathered weights, full gradients and routed tokens."""

    derived = ("peak_bytes",)

    @property
    def parts(self) -> dict[str, int]:
        """The fields whose sum is the peak: all except the smaller of `head_bytes` and `layer_bytes`."""
        parts = dataclasses.asdict(self)
        del parts[min(("head_bytes", "layer_bytes"), key=lambda part: parts[part])]
        return parts

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def estimate(placed: Placed, layout: Layout) -> MemoryEstimate:
    """Return the memory per device under a layout."""
    work, step = placed.workload, placed.execution(layout)
    examples = step.examples
    saved = int(examples * sum(nbytes for nbytes, array in _saved(placed, step.remat) if array.layers))
    # Without remat, a layer with prefetched weights recomputes the activations of its MLP.
    policy = "stages" if step.gathering.ahead and step.remat is None else None
    per_layer = [(nbytes / array.layers, array) for nbytes, array in _saved(placed, policy) if array.layers]
    recomputed = int(examples * sum(nbytes for nbytes, array in per_layer if not array.is_routed))
    # The number of tokens per micro-step decides whether rows of the table are exchanged.
    key = step.micro_steps > 1, step.gathering, step.exchanges_rows, step.batch_slices
    weights = placed.once(key, lambda: _weight_bytes(placed, step))
    logits, fresh = _logits_bytes(placed, examples), max(recomputed - saved // work.num_layers, 0)
    is_twice = step.gathering.ahead and step.remat is not None
    live = 2 * fresh // step.batch_slices if is_twice else fresh
    head = logits + weights.head + weights.table + fresh * bool(step.gathering.ahead)
    layer = weights.layer + weights.table + live + logits * (not weights.gathers_head)
    layer += _routed_bytes(placed, step, examples)
    layer += int(examples * work.scores_bytes) // step.num_shards({*step.tensor_axes, *step.context_axes})
    residual = examples * placed.once("residual", lambda: residual_row_bytes(placed))
    if step.tensor_axes:
        layer += int(residual * (MEMORY.partial_sums + MEMORY.gathered * bool(step.sequence_axes)))
    if step.sequence_axes and step.gathering.ahead and step.batch_slices > 1:
        head += int(MEMORY.recomputed * residual * 2 / step.batch_slices)
    small = residual / work.compute_itemsize
    partial_sums = 8 * MEMORY.split_parts * int(max(weights.small, small if small <= MEMORY.most_split else 0))
    if placed.strategy.pipeline is not None:
        saved = _staged(placed, step, saved) + _deferred_expert_grads(placed, step)
        # A tick slot with a forward and a backward pass runs a layer of each at a time.
        layer = _routed_bytes(placed, step, examples) * (2 if stage_load(placed.strategy.pipeline).together else 1)
        # Gradients of a chunk's weights, before they are added to their sums.
        layer += int(weights.copies * stage_load(placed.strategy.pipeline).chunk)
        # Gradients of parameters outside the layers, which are full on each stage.
        for weight in placed.weights:
            if not weight.leaf.is_stacked:
                shards = num_shards(without_axes(weight.grads, placed.batch_axes), placed.sizes)
                layer += _reduce_itemsize(placed) * (weight.leaf.size // shards)
        head = max(2 * logits, logits + weights.head)
    return MemoryEstimate(
        state_bytes=placed.state_bytes, batch_bytes=work.batch_bytes // placed.batch_shards,
        kept_bytes=saved + weights.kept,
        gradients_bytes=weights.sums, copies_bytes=weights.copies, head_bytes=head, layer_bytes=layer + partial_sums,
    )  # fmt: skip


def residual_row_bytes(placed: Placed) -> float:
    """Return the bytes per device and example of the residual stream, of which only the sequence may be sharded."""
    work = placed.workload
    residuals = [array for array in work.activations["full"] if array.layers] or [
        array for array in work.activations[None] if array.layers
    ]
    unsharded = (array._replace(names=("seq", *(None for _ in array.names[1:]))) for array in residuals)
    return max((placed.row_bytes(array) / array.layers for array in unsharded), default=0.0)


class _WeightBytes(NamedTuple):
    """Bytes of weights and gradients on a device. They do not depend on the number of examples of a micro-step."""

    sums: int
    """Accumulated gradients, and the layers' gradients of a micro-step."""
    copies: int
    """Parameters in the compute dtype. A stage gathers its parameters once per step."""
    layer: int
    """Gathered weights of a layer, and its gradients before the reduce-scatter."""
    head: int
    """Gradient of the head before the reduce-scatter, and the gathered head."""
    kept: int
    """Gathered weights of further layers, which are gathered ahead or kept."""
    table: int
    """Full gradient of the embedding table."""
    gathers_head: bool
    small: int
    """Number of elements of the largest weight gradient that is small enough for XLA to compute in parts."""


def _weight_bytes(placed: Placed, step: Execution) -> _WeightBytes:
    with_vocabulary = [weight for weight in placed.weights if weight.leaf.has("vocab")]
    tables = [weight for weight in with_vocabulary if weight.leaf.is_table]
    heads = [weight for weight in with_vocabulary if weight not in tables] or tables
    reduce_itemsize, itemsize = _reduce_itemsize(placed), placed.workload.compute_itemsize

    def elements(weights: Sequence[Weight]) -> int:
        sizes = (layer_elements(step, weight.decision, gather_axes(step, weight)) for weight in weights)
        return max(sizes, default=0)

    gathered = [weight for weight in heads if gather_axes(step, weight)]
    # With tensor parallelism the gradient of the head's input is computed and all-reduced first.
    gathered_bytes = 0 if step.tensor_axes else itemsize * elements(gathered)
    head = reduce_itemsize * elements(heads) + gathered_bytes
    if placed.workload.vocab_chunk is not None:  # the next chunk is gathered early, and all gradients are kept
        shards = ((weight, num_shards(weight.update, placed.sizes)) for weight in heads)
        stacked = max(itemsize * weight.leaf.size // count for weight, count in shards)
        head = (reduce_itemsize * elements(heads) + 2 * itemsize * elements(gathered)) // step.vocab_chunks + stacked
    has_no_table = step.exchanges_rows or step.is_pipelined or heads == tables
    copies = 0
    for weight in step.weights:
        axes = gather_axes(step, weight) if step.is_pipelined else set()
        if itemsize != weight.leaf.dtype.itemsize or axes:
            copies += itemsize * weight.leaf.size // num_shards(without_axes(weight.spec, axes), placed.sizes)
    layers = [weight for weight in placed.weights if weight.leaf.is_stacked]
    sizes = [layer_elements(step, weight.decision, gather_axes(step, weight)) for weight in layers]
    # Gathered weights and full gradients that exist at once; see the module's docstring.
    gathered_sizes = [size for size, weight in zip(sizes, layers, strict=True) if gather_axes(step, weight)]
    if step.gathering.ahead:
        layer = (itemsize + (1 + step.batch_slices) * reduce_itemsize) * sum(gathered_sizes)
    else:
        largest = max(gathered_sizes, default=0)
        layer = 2 * itemsize * sum(gathered_sizes) + step.batch_slices * reduce_itemsize * largest
    ahead, keep = step.gathering.ahead, step.gathering.keep
    # The backward pass gathers its first layers while the last layers are kept.
    num_kept = min(max(ahead, keep), placed.workload.num_layers) - min(ahead, 1) + 2 * (ahead > 1)
    kept = num_kept * itemsize * sum(gathered_sizes)
    return _WeightBytes(
        sums=_sums(placed, step), copies=copies, layer=layer, kept=kept, head=head,
        table=0 if has_no_table else reduce_itemsize * elements(tables), gathers_head=bool(gathered),
        small=max((size for size in sizes if size <= MEMORY.most_split), default=0),
    )  # fmt: skip


def _staged(placed: Placed, step: Execution, saved: int) -> int:
    """Return the bytes of saved activations on the busiest stage, and of the inputs of deferred weight gradients."""
    work, pipeline = placed.workload, placed.strategy.pipeline
    assert pipeline is not None
    load = stage_load(pipeline)
    deferred = _deferred_inputs(placed, step.examples)
    # A single buffer slot is written in place. With several slots, the new value exists outside the slot first. If no W
    # is deferred, the inputs of one layer exist while it runs.
    copies = MEMORY.handed_twice + (load.deferred > load.chunk)
    extra = load.chunk * copies if load.deferred else pipeline.stages / work.num_layers
    held = saved * load.microbatches + deferred * (load.deferred + extra)
    # Activations of groups of microbatches: embeddings, outputs and their gradients.
    residual = step.examples * residual_row_bytes(placed) / step.num_shards(step.sequence_axes)
    shared = residual * load.group_buffers * pipeline.stages
    return int(held / pipeline.stages + shared)


def deferred_bytes(placed: Placed, examples: int) -> tuple[float, float]:
    """Return the bytes of the inputs of deferred weight gradients: of all slots of the busiest stage, and of a slot."""
    pipeline = placed.strategy.pipeline
    assert pipeline is not None
    load = stage_load(pipeline)
    slots = _deferred_inputs(placed, examples) * load.deferred / pipeline.stages
    return slots, slots * load.chunk / load.deferred if load.deferred else 0.0


def _deferred_inputs(placed: Placed, examples: int) -> float:
    """Return the bytes of the inputs of the weight gradients of all layers, for a microbatch."""
    work = placed.workload
    # Routed tokens are not saved for W, because B computes the gradients of experts (`_deferred_expert_grads`). The
    # inputs of a router are, in float32.
    itemsize, residual = work.compute_itemsize, residual_row_bytes(placed) * work.num_layers
    inputs = (
        nbytes
        for nbytes, array in _saved(placed, "stages")
        if array.layers and array.itemsize == itemsize and not array.is_routed
    )
    return examples * (sum(inputs) + residual * 4 / itemsize * bool(work.experts_per_token))


def _deferred_expert_grads(placed: Placed, step: Execution) -> int:
    """Return the bytes of expert gradients that are stored until the deferred weight-gradient op (W) of a microbatch.

    The input-gradient op (B) computes them together with the gradients of routed tokens. While B runs, there is an
    additional copy, or two if a stage stacks the gradients of several layers.
    """
    pipeline, itemsize = placed.strategy.pipeline, placed.workload.compute_itemsize
    assert pipeline is not None
    load, total = stage_load(pipeline), 0
    extra = load.chunk * (1 + (placed.workload.num_layers > pipeline.stages))
    for weight in step.weights:
        if weight.leaf.is_expert:
            spec = without_axes(weight.spec, gather_axes(step, weight))
            total += itemsize * weight.leaf.size // num_shards(spec, placed.sizes)
    return int(total * (load.deferred + extra))


@dataclasses.dataclass(frozen=True)
class StageLoad:
    """Maximum number of live buffers on the busiest stage of a schedule."""

    microbatches: float
    """Saved activations, as a number of microbatches in all layers of a stage."""
    deferred: float
    """Inputs of deferred weight gradients, in the unit of `microbatches`."""
    copies: float
    """Number of copies of each parameter, over all stages."""
    chunk: float
    """Fraction of a stage's layers in a chunk."""
    together: float
    """Fraction of the forward passes that share a tick slot with a backward pass."""
    group_buffers: int
    """Number of groups with embeddings, outputs or gradients of these, if the stages share embedding and head."""


@functools.lru_cache(maxsize=256)
def stage_load(pipeline: Pipeline) -> StageLoad:
    """Return the number of live buffers on the busiest stage of a schedule.

    Beyond `3 * stages` microbatches, only GPipe needs more buffers. The other schedules are therefore computed for at
    most this number.
    """
    count = pipeline.microbatches
    is_long = count > 3 * pipeline.stages and pipeline.schedule != "gpipe" and "." not in pipeline.schedule
    schedule = dataclasses.replace(pipeline, microbatches=3 * pipeline.stages if is_long else count).table()
    chunk = schedule.stages / schedule.num_parts
    has_op = schedule.table[..., 0] >= 0
    done = has_op.astype(int).cumsum(0)
    done_before = np.vstack([np.zeros_like(done[:1]), done[:-1]])
    # A W in the tick slot of its B runs in the same loop over layers, so it is not deferred.
    is_deferred = has_op[..., W] & ~(
        has_op[..., B] & np.all(schedule.table[..., B, :] == schedule.table[..., W, :], -1)
    )
    deferred = (done[:, :, B] - done_before[:, :, W]).max() if is_deferred.any() else 0
    together = (has_op[..., F] & has_op[..., B]).sum() / has_op[..., F].sum()
    segments = uniform(schedule)
    saved = int(schedule.peak_activations.max()) + (segments is not None)  # and a scratch slot
    # Each group has a slot for the gradients of outputs, too.
    buffers = 0 if segments is None else segments.ahead + segments.behind + segments.held + 1
    return StageLoad(saved * chunk, float(deferred * chunk), schedule.copies, chunk, float(together), buffers)


def _saved(placed: Placed, remat: Remat | Literal["stages"]) -> Iterator[tuple[float, Activation]]:
    """Yield the saved activations of a remat policy, each with its bytes per example on a device."""
    return zip(placed.activation_row_bytes[remat], placed.workload.activations[remat], strict=True)


def _sums(placed: Placed, step: Execution) -> int:
    """Return the bytes of accumulated gradients, and of the layers' gradients of a micro-step."""
    pipeline, work = placed.strategy.pipeline, placed.workload
    copies = 1.0 if pipeline is None else stage_load(pipeline).copies
    unsharded_axes = set() if pipeline is None else set(placed.batch_axes)
    itemsize, is_accumulated, total = _reduce_itemsize(placed), step.micro_steps > 1 or pipeline is not None, 0
    for weight in placed.weights:
        leaf = weight.leaf
        if is_accumulated:
            spec = without_axes(weight.update, unsharded_axes - set(owned_axes(step, weight.decision)))
            nbytes = itemsize * leaf.size // num_shards(spec, placed.sizes)
            total += int(nbytes * copies) if leaf.is_stacked else nbytes
        if leaf.is_stacked and pipeline is None:
            total += work.compute_itemsize * leaf.size // num_shards(step.grad_spec(weight), placed.sizes)
    return total


def _reduce_itemsize(placed: Placed) -> int:
    work = placed.workload
    return np.dtype(work.precision.reduce_dtype(work.precision.compute or work.leaves[0].dtype)).itemsize


def gather_axes(step: Execution, weight: Weight) -> set[str]:
    """Return the axes over which a parameter is gathered before use."""
    sharded = set(split_axes(step, weight.spec))
    return sharded - set(step.tensor_axes) - set(owned_axes(step, weight.decision))


def _logits_bytes(placed: Placed, examples: int) -> int:
    """Return the bytes of the logits' gradient; with vocabulary chunks, also of the logits and the input gradient."""
    work = placed.workload
    if work.vocab_chunk is not None:
        sizes = (weight.leaf.size for weight in placed.weights if weight.leaf.has("vocab"))
        width = max(sizes) // work.vocab_size
        input_grad = placed.row_bytes(
            Activation(("seq", "act_embed"), (work.seq_len or 1, width), 4, 0, is_routed=False)
        )
        logits = placed.logits_per_row() / placed.vocab_chunks * (4 + work.compute_itemsize)
        return int(examples * (logits + input_grad))
    outside = (
        nbytes / array.itemsize
        for nbytes, array in _saved(placed, None)
        if not array.layers and array.names[-1:] == ("act_vocab",)
    )
    return int(examples * work.compute_itemsize * max(outside, default=0))


def _routed_bytes(placed: Placed, step: Execution, examples: int) -> int:
    """Return the bytes of routed tokens in one layer: the buffers of dispatch and combine, and expert activations."""
    work, tokens = placed.workload, step.tokens
    if not work.experts_per_token or not tokens:
        return 0
    expert_axes = {axis for weight in placed.weights for axis in owned_axes(step, weight.decision)}
    ranks = step.num_shards(step.ordered(expert_axes))
    # The buffers fit any routing. Expert activations need memory for the actual tokens only.
    routed = [(nbytes, array) for nbytes, array in _saved(placed, "stages") if array.layers and array.is_routed]
    activations = examples * sum(nbytes / array.layers for nbytes, array in routed)
    routers = [weight.leaf for weight in placed.weights if weight.leaf.is_router and weight.leaf.has("embed")]
    width = max(leaf.size_of("embed") for leaf in routers)
    buffers = dropless_bytes(
        width * work.compute_itemsize,
        tokens,
        work.experts_per_token,
        work.num_experts,
        ranks,
        bound_factor=work.bound_factor,
    )
    return int(activations + buffers)
