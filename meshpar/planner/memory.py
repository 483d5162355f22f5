"""What one device holds of a training step, told before anything is compiled.

    peak = state + batch + kept + gradients + copies + the larger of what the head and what one layer holds beside

State is exact. What the backward pass keeps of every layer follows from the trace, by remat policy. The rest is how
XLA was seen to schedule such steps: of the loss it holds two arrays of logits in the compute dtype, or one and the
float32 gradient of the head; of a layer that is computed again everything that its backward pass reads; gradients of
micro-steps beside their sum. Of stages it holds what waits between a microbatch's B and W, and one and a half of it
more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshpar.parallel.pipeline import Pipeline
from meshpar.parallel.promise import (
    Facts,
    Weight,
    has_vocabulary,
    is_router,
    layer_elements,
    owned_axes,
    split_axes,
)
from meshpar.pipeline.schedules.ops import B, W
from meshpar.planner.cost import dropless_bytes
from meshpar.planner.layout import Layout, Placed
from meshpar.planner.workload import Held, Remat
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import num_shards, without_axes

ERROR = 0.2
"""How far below the compiled peak an estimate may lie, of programs as the tests have them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Plain):
    """Bytes of one device."""

    state_bytes: int
    batch_bytes: int
    kept_bytes: int
    """Activations for the backward pass; under stages those of as many microbatches as the schedule holds."""
    gradients_bytes: int
    """Sums over micro-steps or microbatches; without such 0, for they are among what a layer holds."""
    copies_bytes: int
    """Parameters in the compute dtype; gathered once a step, those of a stage."""
    head_bytes: int
    """Logits and what their loss holds beside."""
    layer_bytes: int
    """Of one layer's backward pass: what it computes again, gathered weights, gradients, rows of experts."""

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
    work, facts = placed.workload, placed.facts(layout)
    rows = work.rows // (placed.batch_ways * layout.microbatches)
    kept = int(rows * sum(each for each, one in _held(placed, layout.remat) if one.layers))
    inside = [(each / one.layers, one) for each, one in _held(placed, None) if one.layers]
    again = int(rows * sum(each for each, one in inside if not one.is_routed))
    whole = placed.once((layout.accumulate > 1, facts.is_prefetched), lambda: _of_weights(placed, layout, facts))
    layer = whole.layer + max(again - kept // work.num_layers, 0) + _routed_bytes(placed, facts, rows)
    if placed.strategy.pipeline is not None:
        kept, layer = _staged(placed, kept, rows), 2 * _ends_bytes(placed)
    return MemoryEstimate(
        state_bytes=placed.state_bytes,
        batch_bytes=work.batch_bytes // placed.batch_ways,
        kept_bytes=kept,
        gradients_bytes=whole.sums,
        copies_bytes=whole.copies,
        head_bytes=max(2 * (logits := _logits_bytes(placed, rows)), logits + whole.head),
        layer_bytes=layer,
    )


class _OfWeights(NamedTuple):
    """Bytes that do not depend on the rows of a micro-step."""

    sums: int
    copies: int
    layer: int
    """Gathered weights of a layer, and gradients that are made beside their sums."""
    head: int
    """The gradient of the head, before it is scattered."""


def _of_weights(placed: Placed, layout: Layout, facts: Facts) -> _OfWeights:
    sums, current = _gradients(placed, layout)
    heads = [one for one in placed.weights if has_vocabulary(one.decision) and not one.decision.leaf.is_stacked]
    elements = max((layer_elements(facts, one.decision, _gather_axes(facts, one)) for one in heads), default=0)
    return _OfWeights(
        sums=sums,
        copies=_copies(placed, facts),
        # While one layer's weights are used, the scheduler has the next under way.
        layer=current + _layer_weights(placed, facts, 2 + facts.is_prefetched),
        head=_reduce_itemsize(placed) * elements,
    )


def _staged(placed: Placed, kept: int, rows: int) -> int:
    """Activations of the microbatches that the busiest stage holds, and what waits between their B and W."""
    work, pipelined = placed.workload, placed.strategy.pipeline
    assert pipelined is not None
    held = holds(pipelined)
    inside = (each for each, one in _held(placed, None) if one.layers and one.itemsize == work.compute_itemsize)
    handed = rows * sum(inside)
    return int((kept * held.microbatches + handed * (held.between + 1.5)) / pipelined.stages)


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


@functools.lru_cache(maxsize=256)
def holds(pipelined: Pipeline) -> Holds:
    """Of as many microbatches as fill it: from three times as many as stages on, more are held by GPipe alone."""
    count = pipelined.microbatches
    is_long = count > 3 * pipelined.stages and pipelined.schedule not in ("gpipe",) and "." not in pipelined.schedule
    schedule = dataclasses.replace(pipelined, microbatches=3 * pipelined.stages if is_long else count).table()
    share = schedule.stages / schedule.num_parts
    done = (schedule.table[..., 0] >= 0).astype(int).cumsum(0)
    behind = np.vstack([np.zeros_like(done[:1]), done[:-1]])
    waiting = (done[:, :, B] - behind[:, :, W]).max()
    return Holds(schedule.peak_activations.max() * share, waiting * share, schedule.copies)


def _held(placed: Placed, remat: Remat) -> Iterator[tuple[float, Held]]:
    """What is kept for the backward pass, each with its bytes of a row on one device."""
    return zip(placed.held_row_bytes[remat], placed.workload.held[remat], strict=True)


def _gradients(placed: Placed, layout: Layout) -> tuple[int, int]:
    """Bytes of the sums over micro-steps, and of gradients of layers that are made beside them."""
    pipelined = placed.strategy.pipeline
    copies = 1.0 if pipelined is None else holds(pipelined).copies
    whole_over = () if pipelined is None else placed.batch_axes
    width = _reduce_itemsize(placed)
    all_bytes = layers = 0
    for one in placed.weights:
        spec = one.grads if layout.accumulate > 1 else one.update
        leaf = one.decision.leaf
        nbytes = width * leaf.size // num_shards(without_axes(spec, whole_over), placed.sizes)
        all_bytes += int(nbytes * copies) if leaf.is_stacked else nbytes
        # Scattered gradients are new arrays; what is whole is added where the sum stands.
        fresh = layout.accumulate == 1 or num_shards(one.grads, placed.sizes) > 1
        layers += nbytes * leaf.is_stacked * fresh
    is_summed = layout.accumulate > 1 or pipelined is not None
    return (all_bytes, layers * (layout.accumulate > 1)) if is_summed else (0, layers)


def _reduce_itemsize(placed: Placed) -> int:
    work = placed.workload
    return np.dtype(work.precision.reduce_dtype(work.precision.compute or work.leaves[0].dtype)).itemsize


def _gather_axes(facts: Facts, one: Weight) -> set[str]:
    """Axes over which a parameter is gathered before use."""
    split, decision = set(split_axes(facts, one.decision.spec)), one.decision
    return split - set(facts.tensor_axes) - set(owned_axes(facts, decision))


def _copies(placed: Placed, facts: Facts) -> int:
    """Parameters in the compute dtype: cast before they are gathered; those of a stage are gathered once a step."""
    found, width = 0, placed.workload.compute_itemsize
    for one in facts.weights:
        axes = _gather_axes(facts, one) if facts.by_stages else set()
        if width != one.decision.leaf.dtype.itemsize or axes:
            found += width * one.decision.leaf.size // num_shards(without_axes(one.decision.spec, axes), placed.sizes)
    return found


def _layer_weights(placed: Placed, facts: Facts, layers: int) -> int:
    """Gathered weights of so many layers, and the whole gradient of one layer's widest matrix."""
    width, reduce = placed.workload.compute_itemsize, _reduce_itemsize(placed)
    gathered = widest = 0
    for one in placed.weights:
        if one.decision.leaf.is_stacked and (axes := _gather_axes(facts, one)):
            elements = layer_elements(facts, one.decision, axes)
            gathered, widest = gathered + width * elements, max(widest, reduce * elements)
    return layers * gathered + widest


def _logits_bytes(placed: Placed, rows: int) -> int:
    outside = (each / one.itemsize for each, one in _held(placed, None) if not one.layers and _is_logits(one))
    return int(rows * placed.workload.compute_itemsize * max(outside, default=0))


def _is_logits(held: Held) -> bool:
    return held.names[-1:] == ("act_vocab",)


def _routed_bytes(placed: Placed, facts: Facts, rows: int) -> int:
    """Rows of experts in one layer: what dispatch and combine hold, and what the experts compute of them."""
    work, tokens = placed.workload, facts.tokens
    if not work.choices or not tokens:
        return 0
    ranks = facts.ways(facts.ordered({axis for one in placed.weights for axis in owned_axes(facts, one.decision)}))
    # Room is made for any routing; what experts compute comes in blocks of the rows that there are.
    computed = rows * sum(each / one.layers for each, one in _held(placed, None) if one.layers and one.is_routed)
    width = max(one.decision.leaf.shape[-2] for one in placed.weights if is_router(one.decision))
    held = dropless_bytes(
        width * work.compute_itemsize, tokens, work.choices, work.num_experts, ranks, bound_factor=work.bound_factor
    )
    return int(computed + held)
