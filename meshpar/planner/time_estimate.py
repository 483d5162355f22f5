"""How long a training step takes under a layout, told before anything is compiled.

    step = products + other kernels + messages that are waited for + bubble + the optimizer's products and messages

Products run at a share of the peak; other kernels move what the backward pass keeps a few times; messages are those the
strategy promises and its kernels send, each by the alpha-beta model over the link of its axes. Of their time XLA hides
a share behind compute, which differs by what they are for: the shares are those that `explain` found in compiled
programs (`STEP.hidden`). A pipeline's bubble is its table's, simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, Rates
from meshpar.parallel.expected.step_spec import (
    GRADIENTS,
    ITEMSIZE,
    WEIGHTS,
    ExpectedCollective,
    StepSpec,
    is_expert,
    is_router,
    layer_elements,
    owned_axes,
    split_axes,
)
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.parallel.pipeline import Pipeline
from meshpar.pipeline.traffic import makespan, traffic
from meshpar.planner.calibration import STEP
from meshpar.planner.layout import Layout, Placed
from meshpar.planner.memory_estimate import MemoryEstimate, gather_axes, holds, residual_row_bytes
from meshpar.planner.optimizer_traffic import Update, update_of
from meshpar.planner.workload import Remat, Workload
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import Decision

PARTIAL_SUMS = "partial sums, backward"
"""Why tensor ranks sum gradients of a block's input: for CPUs XLA sums those of every product by themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate(Plain):
    """Seconds of a step, of one device."""

    compute_s: float
    """Products of matrices."""
    memory_s: float
    """Other kernels."""
    copied_s: float
    """Of these, what the ticks of a pipeline copy: our executor's, not the schedule's."""
    network_s: Mapping[str, float]
    """On the wire, by mesh axes, hidden or not."""
    exposed_s: Mapping[str, float]
    """Of that, while compute waits."""
    sent_bytes: Mapping[str, float]
    """By one device, by mesh axes."""
    bubble_s: float

    derived = ("step_s", "bound")

    @property
    def step_s(self) -> float:
        return self.compute_s + self.memory_s + self.bubble_s + sum(self.exposed_s.values())

    @property
    def bound(self) -> str:
        """What most of the step is spent on: `compute`, `memory`, `bubble` or `network:<axes>`."""
        spent = {"compute": self.compute_s, "memory": self.memory_s, "bubble": self.bubble_s}
        spent |= {f"network:{axes}": time_s for axes, time_s in self.exposed_s.items()}
        return max(spent, key=lambda what: spent[what])


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """A schedule simulated: how much longer than its work it takes, and in how many ticks."""

    stretch: float
    ticks: int
    hops: int
    """Permutes between stages in a step."""
    stages: int
    chunks: int
    rounds: int
    """Permutes that bring the weights of a part to its stage, and as many back."""


@functools.lru_cache(maxsize=256)
def rhythm(pipelined: Pipeline, recomputed: float, head: float, num_layers: int) -> Rhythm:
    """Of a schedule whose backward pass runs so much of the forward pass again, as the executor runs it.

    From three times as many microbatches as stages on, each more takes as long as the one before.

    Args:
      pipelined, num_layers: which layers are on which stage.
      recomputed: of the forward pass of the layers.
      head: what stands behind the layers, both ways, over the forward pass of all layers.
    """
    count, stages, costs = pipelined.microbatches, pipelined.stages, np.array([1.0, 1.0 + recomputed, 1.0])

    def table_of(microbatches: int) -> tuple[Schedule, float]:
        table = dataclasses.replace(pipelined, microbatches=microbatches).table()
        has, part = table.table[..., 0] >= 0, table.parts[np.arange(stages)[:, None], table.table[..., 1]]
        layers = np.array(pipelined.layers_of_parts(num_layers, table.num_parts)) * (stages / num_layers)
        lengths = (has * layers[part]) @ costs
        lengths += head * stages * (has & (part == table.num_parts - 1))[..., B]
        return table, makespan(table.slots(), lengths)

    is_long = count > 4 * stages and not pipelined.schedule.endswith(".csv")
    most = 3 * stages if is_long else count
    table, span = table_of(most)
    if is_long:
        longer, more_s = table_of(most + stages)
        span += (count - most) * (more_s - span) / stages
    lanes = traffic(table)
    hops, ticks = sum((*lanes.up, *lanes.down)), table.ticks
    if is_long:
        more = traffic(longer)
        hops += (count - most) * (sum((*more.up, *more.down)) - hops) // stages
        ticks += (count - most) * (longer.ticks - ticks) // stages
    stretch = float(span / (count * (costs.sum() + head)))  # a NumPy number would turn every time it meets into one
    return Rhythm(stretch, ticks, hops, stages=stages, chunks=table.chunks, rounds=lanes.rounds)


class Clock:
    """Times of layouts on a cluster."""

    def __init__(self, cluster: Cluster, *, rates: Rates | None = None) -> None:
        """Price layouts on a cluster, at its expected rates unless others are given."""
        self.cluster, self.rates = cluster, rates or cluster.rates
        self._prices: dict[tuple[str, tuple[str, ...], tuple[int, ...]], _Price] = {}

    def floor_s(self, placed: Placed, layout: Layout) -> float:
        """Return a lower bound of the time of all layouts like this one: its products, without bubble or messages."""
        fastest = max(self.rates.products.values(), default=None)
        share = self.rates.efficiency if fastest is None else fastest / self.cluster.gpu.bf16_flops_per_s
        return self._products_s(placed.workload, layout.remat, share)

    def _products_s(self, work: Workload, remat: Remat, share: float) -> float:
        """Time of all products of a step, those outside of attention at a share of the data sheet's peak."""
        gpu, flops, forward = self.cluster.gpu, work.flops[remat], work.attention[remat]
        # Products in 8 bits count as the FLOPs that take as long in 16.
        flops -= work.narrow_share[remat] * flops * (1 - gpu.bf16_flops_per_s / gpu.fp8_flops_per_s)
        # The backward pass of attention has five products for the two forward.
        backward = STEP.attention_backward * work.attention[None]
        forward_rate, backward_rate = self.rates.attention_flops_per_s
        rate = share * self.rates.peak_flops_per_s(8 * work.compute_itemsize)
        outside = (flops - forward - 2 * work.attention[None]) / rate
        time_s = outside + forward / forward_rate + backward / backward_rate
        return time_s * work.rows / self.cluster.num_devices

    def _compute_s(self, placed: Placed, layout: Layout) -> float:
        """Time of all products of a step, at the rate of matrices as large as those of the layers."""
        if not self.rates.products:
            return self.floor_s(placed, layout)
        share = self.rates.share_of_peak(2 * product_size(placed, layout) ** 3)
        return self._products_s(placed.workload, layout.remat, share)

    def is_crowded(self, memory: MemoryEstimate) -> bool:
        """Whether a step holds so much that XLA's scheduler starts messages late, to hold no more."""
        return memory.peak_bytes > STEP.crowded * self.cluster.gpu.memory_bytes

    def estimate(self, placed: Placed, layout: Layout, memory: MemoryEstimate) -> TimeEstimate:
        """The time of a step under a layout that holds so much."""
        step, pipelined, update = placed.step_spec(layout), placed.strategy.pipeline, update_of(placed)
        step = dataclasses.replace(step, on_cpu=True) if self.cluster.is_shared else step
        network: dict[str, float] = defaultdict(float)
        hidden: dict[str, float] = defaultdict(float)
        sent: dict[str, float] = defaultdict(float)
        buffers = 0.0
        # XLA combines the gradients of a layer into one message, and with prefetch its weights.
        layers = {
            one.decision.leaf.path: one.decision.leaf for one in placed.weights if one.decision.leaf.num_layers > 1
        }
        stacked = sum(leaf.layer_ndim > 1 for leaf in layers.values())
        # Messages of one slice, and of a cell's forward, go behind the products of another and of its backward.
        beside = 1.0 if step.interleave > 1 else 0.0 if pipelined is None else holds(pipelined).together
        key = layout.microbatches, layout.interleave, step.is_remat, "sent"
        for one, share in placed.once(key, lambda: [*placed.sent(step)]):
            in_layers = not layers.keys().isdisjoint(one.tensors)
            for kind, axes, nbytes, count in _messages(step, one, layout.remat):
                label, price = "*".join(axes), self._price(kind, axes, step.sizes)
                together = stacked if one.role == GRADIENTS or step.is_prefetched else 1
                time_s = share * count * price.time_s(nbytes, together=together if one.stack > 1 else 1)
                sent[label] += share * count * nbytes * price.sent
                # For CPUs what is gathered along another dim than the first is laid out anew.
                is_laid_anew = kind == "all-gather" and set(axes) <= set(step.sequence_axes)
                buffers += share * count * nbytes * (2 if is_laid_anew else 1)
                network[label] += time_s
                hidden[label] += time_s * _hidden(step, one, beside=beside * in_layers)
        self._add_update(update, step.sizes, sent, network)
        compute_s, stretch, copied = self._compute_s(placed, layout), 1.0, 0.0
        if pipelined is not None:
            work = placed.workload
            recomputed = round(3 * work.flops[layout.remat] / work.model_flops - 3, 1)
            beat = rhythm(pipelined, recomputed, round(work.head_share, 2), work.num_layers)
            stretch = beat.stretch
            copied = STEP.tick_copies * beat.ticks * (memory.kept_bytes + memory.gradients_bytes + memory.layer_bytes)
            copied *= STEP.shared_copy_time if self.cluster.is_shared else 1.0
            price = self._price("collective-permute", (pipelined.axis,), step.sizes)
            for count, nbytes in self._between_stages(placed, layout, step, beat):
                sent[pipelined.axis] += count * nbytes
                network[pipelined.axis] += count * price.time_s(nbytes)
        moved = self._moved_bytes(placed, layout, memory) + copied
        moved += STEP.shared_sent_passes * buffers * self.cluster.is_shared
        memory_s = moved / self.cluster.gpu.memory_bytes_per_s
        # What is hidden is hidden behind compute, of which there may be less.
        cover_s = (STEP.cover_prefetched if step.is_prefetched else STEP.cover) * (compute_s + memory_s)
        covered = min(1.0, cover_s / max(sum(hidden.values()), 1e-12))
        covered *= 0.0 if self.cluster.is_shared else STEP.crowded_overlap if self.is_crowded(memory) else 1.0
        if self.cluster.is_shared:
            stretch = 1.0
        updating_s = update.narrow_flops / self.cluster.gpu.bf16_flops_per_s
        updating_s += update.wide_flops / self.cluster.gpu.fp32_flops_per_s
        return TimeEstimate(
            compute_s=compute_s + updating_s / self.rates.efficiency,
            memory_s=memory_s,
            copied_s=copied / self.cluster.gpu.memory_bytes_per_s,
            network_s=dict(network),
            exposed_s={label: time_s - covered * hidden[label] for label, time_s in network.items()},
            sent_bytes=dict(sent),
            bubble_s=(compute_s + memory_s) * (stretch - 1),
        )

    def _add_update(
        self, update: Update, sizes: Mapping[str, int], sent: dict[str, float], network: dict[str, float]
    ) -> None:
        """What the optimizer sends itself, of which nothing is hidden: its products wait for it."""
        for one in update.sent:
            price, nbytes = self._price(one.kind, one.axes, sizes), one.elements * jnp.dtype(one.dtype).itemsize
            sent["*".join(one.axes)] += one.count * nbytes * price.sent
            network["*".join(one.axes)] += one.count * price.time_s(nbytes)

    def _moved_bytes(self, placed: Placed, layout: Layout, memory: MemoryEstimate) -> float:
        """By kernels that are no dense products, in a step."""
        work, stages = placed.workload, _stages(placed)
        rows = work.rows // placed.batch_ways
        kept = rows * sum(placed.held_row_bytes["stages"]) / stages
        if work.vocab_chunk is not None:  # float32 logits are made twice
            kept += rows * 2 * 4 * placed.logits_per_row()
        passes, of_state = STEP.passes, STEP.state_passes
        if self.cluster.is_shared:
            passes, of_state = STEP.shared_passes, STEP.shared_state_passes
        moved = passes * kept + of_state * memory.state_bytes + memory.copies_bytes * (1 + layout.accumulate)
        saved = rows * sum(placed.held_row_bytes[layout.remat]) / stages
        moved += STEP.shared_saved_passes * saved * self.cluster.is_shared
        moved += STEP.cast_bytes * work.narrowed * work.rows / self.cluster.num_devices
        return moved + layout.microbatches * self._of_experts(placed, layout) / stages

    def _of_experts(self, placed: Placed, layout: Layout) -> float:
        """What rows of experts move in a micro-step beside what is kept: gradients of weights block by block of rows
        (`meshpar.moe.grouped`), and the rows that there is room for."""
        work, step = placed.workload, placed.step_spec(layout)
        each = experts(placed)
        if not each or not step.tokens:
            return 0.0
        ranks = step.num_shards(owned_axes(step, each[0]))
        here, one_expert = work.num_experts // ranks, sum(of_expert(step, one, work.num_experts) for one in each)
        routed, slices = step.tokens * work.choices // step.interleave, step.interleave
        blocks = slices * cost.grouped_rows(routed, here, size := cost.grouped_block(routed, here)) // size
        room = cost.dropless_rows(step.tokens, work.choices, work.num_experts, ranks, work.bound_factor)
        each_block = STEP.block_bytes if here == 1 else STEP.block_bytes_of_several
        return each_block * one_expert * blocks + routed_bytes(placed, room)

    def _between_stages(
        self, placed: Placed, layout: Layout, step: StepSpec, beat: Rhythm
    ) -> Iterator[tuple[int, float]]:
        """Messages over the stages as (number, bytes): what a microbatch hands on; gradients of the ends, which all
        stages keep; and parts of the layers that the schedule holds elsewhere, there and back."""
        rows = placed.workload.rows // (placed.batch_ways * layout.microbatches)
        yield beat.hops, rows * residual_row_bytes(placed) / step.num_shards(step.sequence_axes)
        rounds = math.ceil(math.log2(beat.stages))
        for weight in placed.weights:
            decision = weight.decision
            size = decision.leaf.size // decision.shards
            wide = step.reduce_dtype(decision).itemsize if decision.leaf.is_trained else 0
            if decision.leaf.num_layers == 1:
                yield rounds, size * wide
            elif beat.rounds:
                yield beat.rounds, size / beat.chunks * (step.compute_dtype(decision).itemsize + wide)

    def _price(self, kind: str, axes: tuple[str, ...], sizes: Mapping[str, int]) -> _Price:
        if self.cluster.is_shared and kind == "reduce-scatter":
            kind = "all-reduce"  # for CPUs XLA keeps it so, and takes a part of the sum
        key = kind, axes, tuple(sizes.values())
        if key not in self._prices:
            nodes, per_node = _layout_of(self.cluster, axes, sizes)
            link = cost.collective_link(kind, self.cluster, num_nodes=nodes, per_node=per_node, axes=axes)
            ranks = math.prod(sizes[axis] for axis in axes)
            forms = [cost.as_sent(kind, 1.0, ranks)]
            forms += [cost.tree_all_reduce(1.0, ranks)] * (kind == "all-reduce")
            lines = tuple((one.steps * link.alpha_s, one.bytes_in_turn * link.beta_s_per_byte) for one in forms)
            self._prices[key] = _Price(lines, forms[0].bytes_sent)
        return self._prices[key]


def experts(placed: Placed) -> list[Decision]:
    """Decisions about weights of experts."""
    return [one.decision for one in placed.weights if is_expert(one.decision) and not is_router(one.decision)]


def of_expert(step: StepSpec, decision: Decision, num_experts: int, ways: Callable[..., Any] | None = None) -> Any:
    """Elements of one expert's weight, in all layers, on a rank that multiplies with it: gathered, but for what tensor
    ranks share.

    Args:
      facts, decision: of the weight as it lies.
      num_experts: of a layer.
      ways: ranks along some axes, where those of `facts` are not meant.
    """
    own = set(owned_axes(step, decision))
    shared = step.ordered(set(split_axes(step, decision.spec)) & set(step.tensor_axes) - own)
    return decision.leaf.size / num_experts / (ways or step.num_shards)(shared)


def routed_bytes(placed: Placed, room: Any) -> Any:
    """What rows that there is room for, on a device, move in every MoE layer."""
    routers = [one.decision.leaf for one in placed.weights if is_router(one.decision)]
    width = sum(one.num_layers * one.shape[-2] for one in routers)
    return STEP.routed_passes * room * width * placed.workload.compute_itemsize


def product_size(placed: Placed, layout: Layout) -> float:
    """n of the square matrices whose product has as many FLOPs as that of the tokens that a layer runs at once with a
    weight of it, the mean weight by its FLOPs."""
    step = placed.step_spec(layout)
    weights = [one for one in step.weights if one.decision.leaf.is_stacked and one.decision.leaf.layer_ndim > 1]
    elements = [layer_elements(step, one.decision, gather_axes(step, one)) for one in weights]
    mean = sum(size * size for size in elements) / max(sum(elements), 1)
    at_once = (step.tokens or step.rows or 1) / step.interleave
    return max(at_once * max(mean, 1), 1) ** (1 / 3)


class _Price(NamedTuple):
    """Of one collective over some axes, every cost being linear in its bytes."""

    lines: tuple[tuple[float, float], ...]
    """(latency, time of a byte) of each algorithm; the quickest is taken."""
    sent: float
    """Bytes that a device sends of each byte of the payload."""

    def time_s(self, nbytes: float, *, together: int = 1) -> float:
        """Of one of so many that go as one message."""
        return min(latency_s / together + nbytes * s_per_byte for latency_s, s_per_byte in self.lines)


def _stages(placed: Placed) -> int:
    return 1 if placed.strategy.pipeline is None else placed.strategy.pipeline.stages


def _messages(
    step: StepSpec, one: ExpectedCollective, remat: Remat
) -> Iterator[tuple[str, tuple[str, ...], float, float]]:
    """(kind, axes, bytes, how often) of what is promised, in the form and number that compiled programs had."""
    itemsize, (least, most), times_over = ITEMSIZE.get(one.dtype, 4), one.count, 1
    if one.role == GRADIENTS and one.stack > 1:  # of every slice's, unless they are summed before
        times_over = step.interleave if step.is_prefetched else 1
        least = most if step.interleave > times_over else least
    if one.role == WEIGHTS:
        # Outside of the layers a micro-step gathers once for both directions.
        least = max(least, most // 2) if one.stack == 1 else least
    elif step.on_cpu and one.role == PARTIAL_SUMS:
        least = most
    elif most > least and one.role != GRADIENTS and remat is not None:
        # A recomputed layer sends again, except what its remat policy saves and what nothing after it needs.
        is_kept = one.kind == "sum" and remat != "full"
        share = STEP.resent_exchanges if one.kind == "exchange" else STEP.resent
        share = STEP.resent_by_stages if step.by_stages else share
        least = least if is_kept else least + int(share * (most - least))
    each = {axis for axis, *_ in one.counts}
    if each:  # sums over micro-steps that stay whole are reduced in each, but what stands outside of the layers behind
        scattered = tuple(axis for axis in one.scattered if axis not in each)
        nbytes = one.elements * itemsize / step.num_shards(scattered)
        times = max(count for _, _, count in one.counts) if one.stack > 1 or each & set(one.scattered) else least
        yield "all-reduce", step.ordered(each), nbytes, float(times // times_over)
        axes = tuple(axis for axis in one.axes if axis not in each)
        if not axes:
            return
        one = dataclasses.replace(one, axes=axes, scattered=scattered, counts=())
    if one.kind == "sum" and one.whole and one.elements * itemsize <= MIN_SHARDED_BYTES:
        yield "all-reduce", one.axes, float(one.elements * itemsize), float(least)
        return
    for kind, axes, elements in one.forms(step.sizes):
        yield kind, axes, float(elements * itemsize), float(least)


def _hidden(step: StepSpec, one: ExpectedCollective, *, beside: float) -> float:
    """The share of a message's time that compute can hide, of which so much stands beside independent compute."""
    if one.role in (WEIGHTS, GRADIENTS) and (one.scattered or one.kind == "gather"):
        return hidden_of_weights(step, is_ahead=step.is_prefetched and one.stack > 1 and one.role == WEIGHTS)
    alone = STEP.hidden["exchange" if one.kind == "exchange" else "other"]
    return alone if one.role in (WEIGHTS, GRADIENTS) else alone + beside * (STEP.hidden["interleaved"] - alone)


def hidden_of_weights(step: StepSpec, *, is_ahead: bool) -> float:
    """The share of gathers and scatters of weights that compute hides."""
    return STEP.hidden["context" if step.context_axes else "prefetched" if is_ahead else "weights"]


def _layout_of(cluster: Cluster, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """As `Cluster.layout`, from the group of the first device alone: on a mesh that nodes cut evenly all are alike."""
    stride, offsets, is_even = 1, np.zeros(1, int), True
    for axis, size in reversed(list(sizes.items())):
        is_even &= cluster.gpus_per_node % stride == 0 or stride % cluster.gpus_per_node == 0
        if axis in axes:
            offsets = (offsets[:, None] + stride * np.arange(size)).reshape(-1)
        stride *= size
    if not is_even:
        return cluster.layout(axes, sizes)
    counts = np.unique(offsets // cluster.gpus_per_node, return_counts=True)[1]
    return len(counts), int(counts.min())
