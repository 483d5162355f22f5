"""What one device holds of a training step, told before anything is compiled.

    peak = state + batch + kept + gradients + copies + the larger of what the head and what one layer holds beside

State is exact. What the backward pass keeps of every layer follows from the trace, by remat policy. The rest is what
the buffers of compiled programs hold at their peak, which is in the backward pass of the head or of a layer:

    of the head     the gradient of the logits, the head's gradient, whole and in the dtype of its reduction, the head
                    itself where it was gathered; with prefetch what the last layer, which stands behind the loop, keeps
    of a layer      what is computed again, gathered weights of this layer and the next, the widest whole gradient. With
                    prefetch two layers are under way: the last, which stands behind the loop, and the one before it,
                    which XLA peels off the loop. What both compute again is there at once (without remat activations
                    alone, each where it is used), this layer's weights, and all whole gradients of both. Where nothing
                    gathers the head, its gradient is made behind the layers, and that of the logits waits for it.
                    Of slices one of each such layer, but whole gradients by every slice, until they are summed.
                    Where tensor ranks share a layer, the gradients of one input by as many products, each whole until
                    they are summed; where they split the sequence between blocks, input and gradient gathered, too.
                    Of products too small to fill a GPU sums of parts, as XLA cuts what they contract.
                    Slices of prefetched layers, of which XLA starts early what hides messages, are computed again
                    during the head's, with what tensor ranks gather and sum for it.
    of both         sums over micro-steps, laid out as the update; a stack of the layers' gradients in the compute
                    dtype; the whole gradient of a table that is looked up, unless rows are exchanged

Of stages a device holds what waits between a microbatch's B and W, among it gradients of experts, and part of it more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from meshpar.hardware.cost_model import dropless_bytes
from meshpar.parallel.expected.step_spec import (
    StepSpec,
    Weight,
    has_vocabulary,
    is_expert,
    is_looked_up,
    is_router,
    layer_elements,
    owned_axes,
    split_axes,
)
from meshpar.parallel.pipeline import Pipeline
from meshpar.planner.calibration import MEMORY
from meshpar.planner.layout import Layout, Placed
from meshpar.planner.workload import Held, Remat
from meshpar.schedules.ops import B, F, W
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import num_shards, without_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Plain):
    """Bytes of one device."""

    state_bytes: int
    batch_bytes: int
    kept_bytes: int
    """Activations for the backward pass; under stages those of as many microbatches as the schedule holds."""
    gradients_bytes: int
    """Sums over micro-steps or microbatches, and beside them the layers' gradients of one micro-step."""
    copies_bytes: int
    """Parameters in the compute dtype; gathered once a step, those of a stage."""
    head_bytes: int
    """Of the head's backward pass: gradients of the logits, of the head and of the table, gathered weights."""
    layer_bytes: int
    """Of one layer's backward pass: what it computes again, gathered weights, whole gradients, rows of experts."""

    derived = ("peak_bytes",)

    @property
    def parts(self) -> dict[str, int]:
        """What counts at the peak."""
        parts = dataclasses.asdict(self)
        del parts[min(("head_bytes", "layer_bytes"), key=lambda part: parts[part])]
        return parts

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def estimate(placed: Placed, layout: Layout) -> MemoryEstimate:
    """The memory of one device under a layout."""
    work, step = placed.workload, placed.step_spec(layout)
    rows = work.rows // (placed.batch_ways * layout.microbatches)
    kept = int(rows * sum(each for each, one in _held(placed, layout.remat) if one.layers))
    # Without remat a layer whose weights are gathered ahead makes again what its MLP would, before its backward pass.
    of_layer = "stages" if step.is_prefetched and layout.remat is None else None
    inside = [(each / one.layers, one) for each, one in _held(placed, of_layer) if one.layers]
    again = int(rows * sum(each for each, one in inside if not one.is_routed))
    # Whether rows are exchanged follows from the tokens of a micro-step.
    key = layout.accumulate > 1, step.is_prefetched, step.exchanges_rows, step.interleave
    whole = placed.once(key, lambda: _of_weights(placed, layout, step))
    logits, fresh = _logits_bytes(placed, rows), max(again - kept // work.num_layers, 0)
    is_twice = step.is_prefetched and layout.remat is not None
    under_way = 2 * fresh // step.interleave if is_twice else fresh
    head = logits + whole.head + whole.table + fresh * step.is_prefetched
    layer = whole.layer + whole.table + under_way + logits * (not whole.gathers_head)
    layer += _routed_bytes(placed, step, rows)
    between = rows * placed.once("between", lambda: residual_row_bytes(placed))
    if step.tensor_axes:
        layer += int(between * (MEMORY.partial_sums + MEMORY.gathered * bool(step.sequence_axes)))
    if step.sequence_axes and step.is_prefetched and step.interleave > 1:
        head += int(MEMORY.recomputed * between * 2 / step.interleave)
    small = between / work.compute_itemsize
    parts = 8 * MEMORY.split_parts * int(max(whole.small, small if small <= MEMORY.most_split else 0))
    if placed.strategy.pipeline is not None:
        kept = _staged(placed, kept, rows) + _of_waiting_experts(placed, step)
        # A cell that runs forward and backward together has a layer of each at a time.
        layer = _routed_bytes(placed, step, rows) * (2 if holds(placed.strategy.pipeline).together else 1)
        layer += _ends_bytes(placed)
        head = max(2 * logits, logits + whole.head)
    return MemoryEstimate(
        state_bytes=placed.state_bytes,
        batch_bytes=work.batch_bytes // placed.batch_ways,
        kept_bytes=kept,
        gradients_bytes=whole.sums,
        copies_bytes=whole.copies,
        head_bytes=head,
        layer_bytes=layer + parts,
    )


def residual_row_bytes(placed: Placed) -> float:
    """Of one row of what a layer hands on to the next, where no axis splits it but the whole sequence's."""
    work = placed.workload
    between = [one for one in work.held["full"] if one.layers] or [one for one in work.held[None] if one.layers]
    whole = (one._replace(names=("seq", *(None for _ in one.names[1:]))) for one in between)
    return max((placed.row_bytes(one) / one.layers for one in whole), default=0.0)


class _OfWeights(NamedTuple):
    """Bytes that do not depend on the rows of a micro-step."""

    sums: int
    copies: int
    layer: int
    """Gathered weights of a layer and its gradients, before they are scattered."""
    head: int
    """The gradient of the head, before it is scattered, and the head where it was gathered."""
    table: int
    """The gradient of a table that is looked up whole."""
    gathers_head: bool
    small: int
    """Numbers of the largest gradient of a layer's weight whose product fills no GPU."""


def _of_weights(placed: Placed, layout: Layout, step: StepSpec) -> _OfWeights:
    of_vocabulary = [one for one in placed.weights if has_vocabulary(one.decision)]
    tables = [one for one in of_vocabulary if is_looked_up(one.decision)]
    heads = [one for one in of_vocabulary if one not in tables] or tables
    wide, width = _reduce_itemsize(placed), placed.workload.compute_itemsize

    def elements(weights: Sequence[Weight]) -> int:
        return max((layer_elements(step, one.decision, gather_axes(step, one)) for one in weights), default=0)

    gathered = [one for one in heads if gather_axes(step, one)]
    # Where ranks have a part of the head each, the gradient of its input is made first, which they sum.
    held = 0 if step.tensor_axes else width * elements(gathered)
    head = wide * elements(heads) + held
    if placed.workload.vocab_chunk is not None:  # beside a chunk the next is gathered, and gradients of all are kept
        specs = ((one, num_shards(one.update, placed.sizes)) for one in heads)
        stacked = max(width * one.decision.leaf.size // shards for one, shards in specs)
        head = (wide * elements(heads) + 2 * width * elements(gathered)) // step.vocab_chunks + stacked
    is_full = step.exchanges_rows or step.by_stages or heads == tables
    return _OfWeights(
        sums=_sums(placed, layout, step),
        copies=_copies(placed, step),
        layer=_layer_weights(placed, step),
        head=head,
        table=0 if is_full else wide * elements(tables),
        gathers_head=bool(gathered),
        small=max((size for size in _layer_sizes(placed, step) if size <= MEMORY.most_split), default=0),
    )


def _layer_sizes(placed: Placed, step: StepSpec) -> Iterator[int]:
    """Numbers of one layer of every stacked weight, as products take it in."""
    for one in placed.weights:
        if one.decision.leaf.is_stacked:
            yield layer_elements(step, one.decision, gather_axes(step, one))


def _staged(placed: Placed, kept: int, rows: int) -> int:
    """Activations of the microbatches that the busiest stage holds, and what waits between their B and W."""
    work, pipelined = placed.workload, placed.strategy.pipeline
    assert pipelined is not None
    held = holds(pipelined)
    # Rows that went to experts do not wait: B makes these experts' gradients (`_of_waiting_experts`). What a router
    # reads does, in float32.
    width, embed = work.compute_itemsize, residual_row_bytes(placed) * work.num_layers
    inside = (e for e, one in _held(placed, "stages") if one.layers and one.itemsize == width and not one.is_routed)
    handed = rows * (sum(inside) + embed * 4 / width * bool(work.choices))
    # A slot alone is written where it is; of several, what goes there is made beside them. Where no W waits, a layer's
    # is there while it runs.
    copies = MEMORY.handed_twice + (held.between > held.share)
    beside = held.share * copies if held.between else pipelined.stages / work.num_layers
    return int((kept * held.microbatches + handed * (held.between + beside)) / pipelined.stages)


def _of_waiting_experts(placed: Placed, step: StepSpec) -> int:
    """Gradients of a stage's experts that wait for their W: B makes them, with those of their rows, and holds what it
    makes beside, stacked once more where a stage has several layers."""
    pipelined, width = placed.strategy.pipeline, placed.workload.compute_itemsize
    assert pipelined is not None
    held, found = holds(pipelined), 0
    beside = held.share * (1 + (placed.workload.num_layers > pipelined.stages))
    for one in step.weights:
        if is_expert(one.decision) and not is_router(one.decision):
            spec = without_axes(one.decision.spec, gather_axes(step, one))
            found += width * one.decision.leaf.size // num_shards(spec, placed.sizes)
    return int(found * (held.between + beside))


def _ends_bytes(placed: Placed) -> int:
    """Gradients of what stands outside of the layers, whole on every stage."""
    whole = [one for one in placed.weights if not one.decision.leaf.is_stacked]
    specs = (without_axes(one.grads, placed.batch_axes) for one in whole)
    sizes = (one.decision.leaf.size // num_shards(spec, placed.sizes) for one, spec in zip(whole, specs, strict=True))
    return _reduce_itemsize(placed) * sum(sizes)


@dataclasses.dataclass(frozen=True)
class Holds:
    """What the busiest stage of a schedule holds at once."""

    microbatches: float
    """Activations of so many, of a stage's share of the layers."""
    between: float
    """Waiting between B and W."""
    copies: float
    """How often each parameter is held, over all stages."""
    share: float
    """Of a stage's layers, those that run at a time: a chunk."""
    together: float
    """Share of the forwards that run in a cell with a backward, layer beside layer."""


@functools.lru_cache(maxsize=256)
def holds(pipelined: Pipeline) -> Holds:
    """Of as many microbatches as fill it: from three times as many as stages on, more are held by GPipe alone."""
    count = pipelined.microbatches
    is_long = count > 3 * pipelined.stages and pipelined.schedule not in ("gpipe",) and "." not in pipelined.schedule
    schedule = dataclasses.replace(pipelined, microbatches=3 * pipelined.stages if is_long else count).table()
    share = schedule.stages / schedule.num_parts
    done = (schedule.table[..., 0] >= 0).astype(int).cumsum(0)
    behind = np.vstack([np.zeros_like(done[:1]), done[:-1]])
    # A W in its B's own cell runs in the same loop over layers: nothing waits for it.
    has = schedule.table[..., 0] >= 0
    apart = has[..., W] & ~(has[..., B] & np.all(schedule.table[..., B, :] == schedule.table[..., W, :], -1))
    waiting = (done[:, :, B] - behind[:, :, W]).max() if apart.any() else 0
    together = (has[..., F] & has[..., B]).sum() / has[..., F].sum()
    return Holds(schedule.peak_activations.max() * share, waiting * share, schedule.copies, share, float(together))


def _held(placed: Placed, remat: Remat | Literal["stages"]) -> Iterator[tuple[float, Held]]:
    """What is kept for the backward pass, each with its bytes of a row on one device."""
    return zip(placed.held_row_bytes[remat], placed.workload.held[remat], strict=True)


def _sums(placed: Placed, layout: Layout, step: StepSpec) -> int:
    """Bytes of sums over micro-steps or microbatches, and of the layers' gradients of one micro-step."""
    pipelined, work = placed.strategy.pipeline, placed.workload
    copies = 1.0 if pipelined is None else holds(pipelined).copies
    whole_over = set() if pipelined is None else set(placed.batch_axes)
    width, is_summed, found = _reduce_itemsize(placed), layout.accumulate > 1 or pipelined is not None, 0
    for one in placed.weights:
        leaf = one.decision.leaf
        if is_summed:
            nbytes = (
                width
                * leaf.size
                // num_shards(without_axes(one.update, whole_over - set(owned_axes(step, one.decision))), placed.sizes)
            )
            found += int(nbytes * copies) if leaf.is_stacked else nbytes
        if leaf.is_stacked and pipelined is None:
            spec = one.grads if layout.accumulate > 1 else one.update
            found += work.compute_itemsize * leaf.size // num_shards(spec, placed.sizes)
    return found


def _reduce_itemsize(placed: Placed) -> int:
    work = placed.workload
    return np.dtype(work.precision.reduce_dtype(work.precision.compute or work.leaves[0].dtype)).itemsize


def gather_axes(step: StepSpec, one: Weight) -> set[str]:
    """Axes over which a parameter is gathered before use."""
    split, decision = set(split_axes(step, one.decision.spec)), one.decision
    return split - set(step.tensor_axes) - set(owned_axes(step, decision))


def _copies(placed: Placed, step: StepSpec) -> int:
    """Parameters in the compute dtype: cast before they are gathered; those of a stage are gathered once a step."""
    found, width = 0, placed.workload.compute_itemsize
    for one in step.weights:
        axes = gather_axes(step, one) if step.by_stages else set()
        if width != one.decision.leaf.dtype.itemsize or axes:
            found += width * one.decision.leaf.size // num_shards(without_axes(one.decision.spec, axes), placed.sizes)
    return found


def _layer_weights(placed: Placed, step: StepSpec) -> int:
    """Gathered weights and whole gradients of a layer; see above for which of them are there at once."""
    width, reduce = placed.workload.compute_itemsize, _reduce_itemsize(placed)
    gathered = gradients = widest = 0
    for one in placed.weights:
        if one.decision.leaf.is_stacked and (axes := gather_axes(step, one)):
            elements = layer_elements(step, one.decision, axes)
            gathered, gradients = gathered + width * elements, gradients + reduce * elements
            widest = max(widest, reduce * elements)
    slices = step.interleave
    return gathered + (1 + slices) * gradients if step.is_prefetched else 2 * gathered + slices * widest


def _logits_bytes(placed: Placed, rows: int) -> int:
    """Gradients of logits; of a chunk of the vocabulary its float32 logits, too, and its input's gradient."""
    work = placed.workload
    if work.vocab_chunk is not None:
        width = max(one.decision.leaf.size for one in placed.weights if has_vocabulary(one.decision)) // work.vocab_size
        summed = placed.row_bytes(Held(("seq", "act_embed"), (work.seq_len or 1, width), 4, 0, is_routed=False))
        each = placed.logits_per_row() / placed.vocab_chunks * (4 + work.compute_itemsize)
        return int(rows * (each + summed))
    outside = (each / one.itemsize for each, one in _held(placed, None) if not one.layers and _is_logits(one))
    return int(rows * placed.workload.compute_itemsize * max(outside, default=0))


def _is_logits(held: Held) -> bool:
    return held.names[-1:] == ("act_vocab",)


def _routed_bytes(placed: Placed, step: StepSpec, rows: int) -> int:
    """Rows of experts in one layer: what dispatch and combine hold, and what the experts compute of them."""
    work, tokens = placed.workload, step.tokens
    if not work.choices or not tokens:
        return 0
    ranks = step.num_shards(step.ordered({axis for one in placed.weights for axis in owned_axes(step, one.decision)}))
    # Room is made for any routing; what experts compute comes in blocks of the rows that there are.
    computed = rows * sum(each / one.layers for each, one in _held(placed, "stages") if one.layers and one.is_routed)
    width = max(one.decision.leaf.shape[-2] for one in placed.weights if is_router(one.decision))
    held = dropless_bytes(
        width * work.compute_itemsize, tokens, work.choices, work.num_experts, ranks, bound_factor=work.bound_factor
    )
    return int(computed + held)
