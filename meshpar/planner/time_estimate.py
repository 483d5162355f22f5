"""Estimate of the time of a training step under a layout.

    step = matmuls + other kernels + exposed messages + bubble + the optimizer's matmuls and messages

Matmuls run at a fraction of the peak. Other kernels move the saved activations repeatedly. Messages are the
expected collectives and the messages of kernels. Their time follows from the alpha-beta model of the link. A fraction
overlaps with compute, which depends on the purpose of the message (`STEP.hidden`, from the schedules of compiled
programs). The bubble of a pipeline follows from its simulated table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshpar.hardware import cost_model as cost
from meshpar.hardware.catalogue import AttentionKernel
from meshpar.hardware.clusters import Cluster, Rates
from meshpar.parallel.execution import Execution, layer_elements, owned_axes, split_axes
from meshpar.parallel.expected.collective import GRADIENTS, ITEMSIZE, WEIGHTS, ExpectedCollective
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.parallel.pipeline import Pipeline
from meshpar.pipeline.traffic import makespan, traffic
from meshpar.planner.calibration import STEP
from meshpar.planner.layout import Layout, Placed
from meshpar.planner.memory_estimate import MemoryEstimate, deferred_bytes, gather_axes, residual_row_bytes, stage_load
from meshpar.planner.optimizer_traffic import update_of
from meshpar.planner.workload import Remat, Workload
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B
from meshpar.schedules.uniform import uniform
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import Decision

PARTIAL_SUMS = "partial sums, backward"
"""Role of the all-reduce of a block's input gradient. XLA:CPU reduces the gradient of each matmul separately."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate(Plain):
    """Terms of the step time of a device, and the bytes that it sends."""

    compute_s: float
    """Time of matmuls."""
    memory_s: float
    """Time of other kernels, which move saved activations."""
    copied_s: float
    """Part of `memory_s`: copies of buffers by the pipeline executor, slices of weights and additions of gradients."""
    network_s: Mapping[str, float]
    """Time of messages by mesh axes."""
    exposed_s: Mapping[str, float]
    """Part of `network_s` that does not overlap with compute."""
    sent_bytes: Mapping[str, float]
    """Bytes sent by mesh axes."""
    bubble_s: float

    derived = ("step_s", "bound")

    @property
    def step_s(self) -> float:
        return self.compute_s + self.memory_s + self.bubble_s + sum(self.exposed_s.values())

    @property
    def bound(self) -> str:
        """The largest term: `compute`, `memory`, `bubble` or `network:<axes>`."""
        spent = {"compute": self.compute_s, "memory": self.memory_s, "bubble": self.bubble_s}
        spent |= {f"network:{axes}": time_s for axes, time_s in self.exposed_s.items()}
        return max(spent, key=lambda term: spent[term])


@dataclasses.dataclass(frozen=True)
class ScheduleTiming:
    """A simulated pipeline schedule."""

    stretch: float
    """Makespan divided by the time of the ops of a stage."""
    ticks: int
    hops: int
    """Number of collective-permutes between stages per step."""
    stages: int
    chunks: int
    rounds: int
    """Number of collective-permutes that send weights to their stages. The same number returns the gradients."""
    visits: int
    """Number of forward passes of a chunk that a stage computes per step; the same number of backward passes."""
    exchanges: int
    """Number of all-gathers and all-to-alls of a group's activations, in uniform schedules."""
    is_uniform: bool
    """Whether all stages run the same ops in a tick."""

    def moved_bytes(self, weights: float, sums: float) -> float:
        """Return the bytes that slices of weights and additions of gradients move, without copies.

        `weights` and `sums` are the bytes of weights and gradient sums of a stage. With several chunks, F and B
        slice the weights of a layer. Each gradient is read once, and added to its sum in place.
        """
        sliced = 4 * weights * (self.chunks > 1)
        return self.visits / self.chunks * (sliced + weights + 2 * sums)


@functools.lru_cache(maxsize=256)
def schedule_timing(pipeline: Pipeline, recomputed: float, head: float, num_layers: int) -> ScheduleTiming:
    """Simulate a schedule as the executor runs it.

    Long schedules are extrapolated: from `3 * stages` microbatches on, the time is linear in their number.

    Args:
      pipeline: the schedule.
      recomputed: fraction of the forward pass that the backward pass recomputes.
      head: time of the head, forward and backward, over that of the forward pass of all layers.
      num_layers: number of layers of the model.
    """
    count, stages, costs = pipeline.microbatches, pipeline.stages, np.array([1.0, 1.0 + recomputed, 1.0])

    def table_of(microbatches: int) -> tuple[Schedule, float]:
        table = dataclasses.replace(pipeline, microbatches=microbatches).table()
        has_op, chunk = table.table[..., 0] >= 0, table.parts[np.arange(stages)[:, None], table.table[..., 1]]
        layers = np.array(pipeline.layers_of_parts(num_layers, table.num_parts)) * (stages / num_layers)
        lengths = (has_op * layers[chunk]) @ costs
        segments = uniform(table)
        if segments is not None:
            return table, makespan(table, lengths) + head * stages * segments.groups
        lengths += head * stages * (has_op & (chunk == table.num_parts - 1))[..., B]
        return table, makespan(table, lengths)

    is_long = count > 4 * stages and not pipeline.schedule.endswith(".csv")
    simulated = 3 * stages if is_long else count
    table, span = table_of(simulated)
    if is_long:
        longer, longer_span = table_of(simulated + stages)
        span += (count - simulated) * (longer_span - span) / stages
    lanes = traffic(table)
    hops, ticks = sum((*lanes.up, *lanes.down)), table.ticks
    if is_long:
        more = traffic(longer)
        hops += (count - simulated) * (sum((*more.up, *more.down)) - hops) // stages
        ticks += (count - simulated) * (longer.ticks - ticks) // stages
    stretch = float(span / (count * (costs.sum() + head)))  # a NumPy scalar would spread to all times
    segments = uniform(table)
    is_uniform = segments is not None
    # Outputs and embeddings of a group, and the gradients of both.
    exchanges = (
        0 if segments is None else 2 * (count // stages + min(segments.ahead, segments.groups) + count // stages)
    )
    return ScheduleTiming(
        stretch, ticks, hops, stages=stages, chunks=table.chunks, rounds=lanes.rounds, is_uniform=is_uniform,
        exchanges=exchanges,
        visits=int(hops) // 2 if is_uniform else count * table.chunks,
    )  # fmt: skip


GROUPED_PASSES = 5
"""Reads and writes of the weights of experts by tokamax's kernels."""
TYPICAL_GROUP = 2048
"""Size n of a group whose rate grouped matmuls have in estimates."""


class Clock:
    """Estimates step times of layouts on a cluster."""

    def __init__(self, cluster: Cluster, *, rates: Rates | None = None) -> None:
        """Create the estimator, with the expected rates of the cluster by default."""
        self.cluster, self.rates = cluster, rates or cluster.rates
        self._prices: dict[tuple[str, tuple[str, ...], tuple[int, ...]], _Price] = {}

    def floor_s(self, work: Workload, remat: Remat, matmul_flops: float | None = None) -> float:
        """Return a lower bound of the step time: the matmuls, without bubble or messages.

        Matmuls outside attention run at a fraction of the data sheet's peak. A measured fraction depends on the size of
        a matmul, `matmul_flops`; by default it is the highest of all sizes.
        """
        if not self.rates.products:
            efficiency = self.rates.efficiency
        elif matmul_flops is None:
            efficiency = max(self.rates.products.values()) / self.cluster.gpu.bf16_flops_per_s
        else:
            efficiency = self.rates.share_of_peak(matmul_flops)
        flops, forward = work.flops[remat], work.attention[remat]
        # FLOPs in 8 bits are converted to the FLOPs in 16 bits that take as long.
        size = matmul_flops or 2.0 * max(self.rates.products, default=1) ** 3
        rate_16, rate_8 = (self.rates.product_flops_per_s(bits, size) for bits in (16, 8))
        flops -= work.narrow_share[remat] * flops * (1 - rate_16 / rate_8)
        # The backward pass of attention has five matmuls, the forward pass two.
        backward = STEP.attention_backward * work.attention[None]
        forward_rate, backward_rate = self.rates.attention_flops_per_s(self.attention_kernel(work), work.attention_size)
        rate, wide_rate = (efficiency * self.rates.peak_flops_per_s(bits) for bits in (8 * work.compute_itemsize, 32))
        outside = (flops - forward - 2 * work.attention[None]) / rate
        outside += work.wide_flops[remat] * (1 / wide_rate - 1 / rate)
        if work.grouped_kernels is not None:
            experts = work.expert_flops * work.flops[remat] / work.flops[None]
            pairs = work.grouped_kernels._asdict().items()
            rates = (self.rates.grouped_flops_per_s(kernel, operand, TYPICAL_GROUP) for operand, kernel in pairs)
            outside += experts * (statistics.mean(1 / each for each in rates) - 1 / rate)
        time_s = outside + forward / forward_rate + backward / backward_rate
        return time_s * work.examples / self.cluster.num_devices

    def attention_kernel(self, work: Workload) -> AttentionKernel:
        """Return the library kernel of attention. tokamax selects its Mosaic kernels from Hopper on."""
        if not work.uses_tokamax:
            return "cudnn"
        return "mosaic" if self.cluster.gpu.chip.compute_capability >= (9, 0) else "triton"

    def products_bytes(self, work: Workload, remat: Remat) -> float:
        """Return the bytes that a device moves for matmuls of two activations, such as queries and keys."""
        return STEP.product_passes * work.products_bytes[remat] * work.examples / self.cluster.num_devices

    def is_crowded(self, memory: MemoryEstimate) -> bool:
        """Return whether a step needs so much memory that XLA's scheduler starts messages late."""
        return memory.peak_bytes > STEP.crowded * self.cluster.gpu.memory_bytes

    def estimate(self, placed: Placed, layout: Layout, memory: MemoryEstimate) -> TimeEstimate:
        """Return the step time of a layout with this memory."""
        step, pipeline, update = placed.execution(layout), placed.strategy.pipeline, update_of(placed)
        step = dataclasses.replace(step, on_cpu=True) if self.cluster.is_shared else step
        network: dict[str, float] = defaultdict(float)
        hidden: dict[str, float] = defaultdict(float)
        sent: dict[str, float] = defaultdict(float)
        buffers = 0.0

        def send(kind: str, axes: tuple[str, ...], nbytes: float, count: float, combined: int = 1) -> float:
            label, price = "*".join(axes), self._price(kind, axes, step.sizes)
            time_s = count * price.time_s(nbytes, combined=combined)
            sent[label] += count * nbytes * price.sent
            network[label] += time_s
            return time_s

        # XLA combines the gradients of a layer into a single message, and with prefetch also its weights.
        leaves = (weight.leaf for weight in placed.weights)
        layers = {leaf.path: leaf for leaf in leaves if leaf.num_layers > 1}
        stacked = sum(leaf.layer_ndim > 1 for leaf in layers.values())
        # Messages of a batch slice overlap with matmuls of the other slices, and messages of a forward pass with
        # matmuls of a backward pass in the same tick slot.
        independent = 1.0 if step.batch_slices > 1 else 0.0 if pipeline is None else stage_load(pipeline).together
        key = step.microbatches, step.batch_slices, step.recomputes, "sent"
        timing, work, ran, is_uniform = None, placed.workload, 1.0, False
        if pipeline is not None:
            recomputed = round(3 * work.flops[step.remat] / work.model_flops - 3, 1)
            timing = schedule_timing(pipeline, recomputed, round(work.head_share, 2), work.num_layers)
            is_uniform = timing.is_uniform
            ran = timing.visits / (pipeline.microbatches * timing.chunks)  # stages without a microbatch send, too
        for expected, fraction in placed.once(key, lambda: [*placed.sent(step)]):
            in_layers = not layers.keys().isdisjoint(expected.tensors)
            fraction = fraction * ran if in_layers and not expected.is_param else fraction
            for kind, axes, nbytes, count in _messages(step, expected):
                is_combined = expected.stack > 1 and (expected.role == GRADIENTS or step.gathering.ahead)
                if pipeline is not None and is_uniform and expected.role == GRADIENTS and not in_layers:
                    # All stages compute gradients of the embedding and the head.
                    kind, axes = "all-reduce", step.ordered({*axes, pipeline.axis})
                time_s = send(kind, axes, nbytes, fraction * count, stacked if is_combined else 1)
                hidden["*".join(axes)] += time_s * _hidden(step, expected, independent=independent * in_layers)
                # XLA:CPU transposes the result of a gather, unless the gather is along the first dim.
                is_transposed = kind == "all-gather" and set(axes) <= set(step.sequence_axes)
                buffers += fraction * count * nbytes * (2 if is_transposed else 1)
        for message in update.sent:  # exposed, because the optimizer's matmuls wait for its messages
            nbytes = message.elements * jnp.dtype(message.dtype).itemsize
            send(message.kind, message.axes, nbytes, message.count)
        compute_s = self.floor_s(placed.workload, step.remat, 2 * matmul_size(step) ** 3)
        stretch, copied = 1.0, 0.0
        if pipeline is not None:
            assert timing is not None
            stretch = 1.0 if self.cluster.is_shared else timing.stretch
            copied = timing.moved_bytes(memory.copies_bytes, memory.gradients_bytes)
            if self.cluster.is_shared:  # XLA:CPU copies what a stage holds in each tick
                held = memory.kept_bytes + memory.gradients_bytes + memory.layer_bytes
                copied = STEP.shared_copy_time * timing.ticks * held
            elif not timing.is_uniform:
                copied += pipeline.microbatches * STEP.copied_sums * memory.gradients_bytes
                copied += 2 * timing.visits * sum(deferred_bytes(placed, step.examples))
            for count, nbytes in self._between_stages(placed, step, timing):
                send("collective-permute", (pipeline.axis,), nbytes, count)
        moved = self._moved_bytes(placed, step, memory) + copied
        moved += STEP.shared_sent_passes * buffers * self.cluster.is_shared
        memory_s = moved / self.cluster.memory_bytes_per_s
        # Messages can only overlap with as much compute as there is.
        cover_s = (STEP.cover_prefetched if step.gathering.ahead else STEP.cover) * (compute_s + memory_s)
        covered = min(1.0, cover_s / max(sum(hidden.values()), 1e-12))
        covered *= 0.0 if self.cluster.is_shared else STEP.crowded_overlap if self.is_crowded(memory) else 1.0
        updating_s = update.narrow_flops / self.cluster.gpu.bf16_flops_per_s
        updating_s += update.wide_flops / self.cluster.gpu.fp32_flops_per_s
        return TimeEstimate(
            compute_s=compute_s + updating_s / self.rates.efficiency, memory_s=memory_s,
            copied_s=copied / self.cluster.memory_bytes_per_s, network_s=dict(network),
            exposed_s={label: time_s - covered * hidden[label] for label, time_s in network.items()},
            sent_bytes=dict(sent), bubble_s=(compute_s + memory_s) * (stretch - 1),
        )  # fmt: skip

    def _moved_bytes(self, placed: Placed, step: Execution, memory: MemoryEstimate) -> float:
        """Return the bytes that kernels other than dense matmuls move per step."""
        work, stages = placed.workload, step.pipeline.stages if step.pipeline else 1
        examples = work.examples // placed.batch_shards
        activations = examples * sum(placed.activation_row_bytes["stages"]) / stages
        if work.vocab_chunk is not None:  # float32 logits are computed twice
            activations += examples * 2 * 4 * placed.logits_per_row()
        passes, state_passes = STEP.passes, STEP.state_passes
        if self.cluster.is_shared:
            passes, state_passes = STEP.shared_passes, STEP.shared_state_passes
        moved = passes * activations + state_passes * memory.state_bytes + memory.copies_bytes * (1 + step.micro_steps)
        saved = examples * sum(placed.activation_row_bytes[step.remat]) / stages
        moved += STEP.shared_saved_passes * saved * self.cluster.is_shared
        moved += self.products_bytes(work, step.remat)
        moved += STEP.cast_bytes * work.narrowed * work.examples / self.cluster.num_devices
        return moved + step.microbatches * self._expert_bytes(placed, step) / stages

    def _expert_bytes(self, placed: Placed, step: Execution) -> float:
        """Return the bytes that MoE layers move per micro-step, in addition to saved activations.

        The blocked implementation computes weight gradients block by block of tokens (`meshpar.moe.grouped`). Buffers
        of tokens are large enough for any routing.
        """
        work = placed.workload
        decisions = experts(placed)
        if not decisions or not step.tokens:
            return 0.0
        ranks = step.num_shards(owned_axes(step, decisions[0]))
        num_local = work.num_experts // ranks
        expert_size = sum(elements_per_expert(step, decision, work.num_experts) for decision in decisions)
        routed, slices = step.tokens * work.experts_per_token // step.batch_slices, step.batch_slices
        blocks = slices * cost.grouped_rows(routed, num_local, size := cost.grouped_block(routed, num_local)) // size
        capacity = cost.dropless_rows(step.tokens, work.experts_per_token, work.num_experts, ranks, work.bound_factor)
        if work.grouped_kernels is not None:
            tokens = float(step.tokens * work.experts_per_token)
            return float(kernel_bytes(placed, expert_size, slices * num_local, tokens, capacity))
        block_bytes = STEP.block_bytes if num_local == 1 else STEP.block_bytes_of_several
        return block_bytes * expert_size * blocks + routed_bytes(placed, capacity, STEP.routed_passes)

    def _between_stages(self, placed: Placed, step: Execution, timing: ScheduleTiming) -> Iterator[tuple[float, float]]:
        """Yield the messages over the stages as (number, bytes).

        These are the activations of microbatches; gradients of embedding and head, which are replicated over stages;
        and weights of chunks that the schedule places on other stages, with their gradients.
        """
        activations = step.examples * residual_row_bytes(placed) / step.num_shards(step.sequence_axes)
        yield timing.hops + timing.exchanges * (timing.stages - 1), activations
        rounds = math.ceil(math.log2(timing.stages))
        for weight in placed.weights:
            decision = weight.decision
            size = decision.leaf.size // decision.shards
            grad_itemsize = step.reduce_dtype(decision).itemsize if decision.leaf.is_trained else 0
            if decision.leaf.num_layers == 1:
                yield rounds * (not timing.is_uniform), size * grad_itemsize
            elif timing.rounds:
                yield timing.rounds, size / timing.chunks * (step.compute_dtype(decision).itemsize + grad_itemsize)

    def _price(self, kind: str, axes: tuple[str, ...], sizes: Mapping[str, int]) -> _Price:
        if self.cluster.is_shared and kind == "reduce-scatter":
            kind = "all-reduce"  # XLA:CPU lowers a reduce-scatter to an all-reduce and a slice
        key = kind, axes, tuple(sizes.values())
        if key not in self._prices:
            nodes, per_node = _nodes_of(self.cluster, axes, sizes)
            link = cost.collective_link(kind, self.cluster, num_nodes=nodes, per_node=per_node, axes=axes)
            ranks = math.prod(sizes[axis] for axis in axes)
            algorithms = [cost.as_sent(kind, 1.0, ranks)]
            algorithms += [cost.tree_all_reduce(1.0, ranks)] * (kind == "all-reduce")
            lines = tuple((a.steps * link.alpha_s, a.bytes_in_turn * link.beta_s_per_byte) for a in algorithms)
            self._prices[key] = _Price(lines, algorithms[0].bytes_sent)
        return self._prices[key]


def experts(placed: Placed) -> list[Decision]:
    """Return the sharding decisions of the expert weights."""
    decisions = (weight.decision for weight in placed.weights)
    return [decision for decision in decisions if decision.leaf.is_expert]


def elements_per_expert(
    step: Execution, decision: Decision, num_experts: int, num_shards: Callable[..., Any] | None = None
) -> float | np.ndarray:
    """Return the number of elements of one expert's gathered weight on a rank, over all layers."""
    owned = set(owned_axes(step, decision))
    tensor_axes = step.ordered(set(split_axes(step, decision.spec)) & set(step.tensor_axes) - owned)
    return decision.leaf.size / num_experts / (num_shards or step.num_shards)(tensor_axes)


def routed_bytes(placed: Placed, capacity: float | np.ndarray, passes: float) -> float | np.ndarray:
    """Return the bytes that MoE layers move in `passes` over token buffers with `capacity` rows, on one device."""
    routers = [weight.leaf for weight in placed.weights if weight.leaf.is_router and weight.leaf.has("embed")]
    width = sum(leaf.num_layers * leaf.size_of("embed") for leaf in routers)
    return passes * capacity * width * placed.workload.compute_itemsize


def kernel_bytes(
    placed: Placed,
    expert_size: float | np.ndarray,
    num_local: float | np.ndarray,
    tokens: float | np.ndarray,
    capacity: float | np.ndarray,
) -> float | np.ndarray:
    """Return the bytes that MoE layers with tokamax's kernels move on one device.

    Kernels read the weights for the product, transpose and read them for the gradient of rows, and write their gradient
    once. Hidden activations have the rows of a window (`meshpar.moe.grouped`).

    Args:
      placed: the placed parameters.
      expert_size: elements of an expert, over all layers.
      num_local: number of local experts, times the number of times that they run.
      tokens: rows of a balanced load.
      capacity: rows of the buffers of tokens.
    """
    embed = max(weight.leaf.size_of("embed") for weight in placed.weights if weight.leaf.is_expert)
    hidden = STEP.hidden_passes * cost.WINDOW_LOAD * tokens * expert_size / (3 * embed)
    itemsize = placed.workload.compute_itemsize
    weights_and_hidden = (GROUPED_PASSES * num_local * expert_size + hidden) * itemsize
    return weights_and_hidden + routed_bytes(placed, capacity, STEP.kernel_passes)


def matmul_size(step: Execution) -> float:
    """Return n for which an n×n×n matmul has the FLOPs of the average matmul of a layer, weighted by FLOPs."""
    leaves = ((weight, weight.leaf) for weight in step.weights)
    weights = [weight for weight, leaf in leaves if leaf.is_stacked and leaf.layer_ndim > 1]
    elements = [layer_elements(step, weight.decision, gather_axes(step, weight)) for weight in weights]
    mean = sum(size * size for size in elements) / max(sum(elements), 1)
    tokens = (step.tokens or step.examples or 1) / step.batch_slices
    return max(tokens * max(mean, 1), 1) ** (1 / 3)


class _Price(NamedTuple):
    """Cost of a collective over some axes, linear in its bytes."""

    lines: tuple[tuple[float, float], ...]
    """(latency in s, time per byte in s) of each algorithm; the fastest is used."""
    sent: float
    """Bytes that a device sends per byte of the payload."""

    def time_s(self, nbytes: float, *, combined: int = 1) -> float:
        """Return the time of a message. If XLA combines several messages, each has a part of the latency."""
        return min(latency_s / combined + nbytes * s_per_byte for latency_s, s_per_byte in self.lines)


def _messages(step: Execution, expected: ExpectedCollective) -> Iterator[tuple[str, tuple[str, ...], float, float]]:
    """Yield (kind, axes, bytes, count) of an expected collective, in the form that compiled programs have."""
    itemsize, (count, max_count) = ITEMSIZE.get(expected.dtype, 4), expected.count
    is_stacked = expected.stack > 1
    if expected.role == GRADIENTS and is_stacked and step.batch_slices > 1:  # each batch slice reduces its gradients
        count = max_count
    if expected.role == WEIGHTS:
        # Weights outside the layers are gathered once per micro-step for both directions.
        count = count if is_stacked else max(count, max_count // 2)
    elif step.on_cpu and expected.role == PARTIAL_SUMS:
        count = max_count
    elif max_count > count and expected.role != GRADIENTS and step.remat is not None:
        # A recomputed layer repeats its messages, unless the remat policy saves the result or nothing needs it.
        is_saved = expected.kind == "sum" and step.remat != "full"
        fraction = STEP.resent_exchanges if expected.kind == "exchange" else STEP.resent
        fraction = STEP.resent_by_stages if step.is_pipelined else fraction
        count = count if is_saved else count + int(fraction * (max_count - count))
    each_step = {axis for axis, *_ in expected.counts}
    if each_step:  # replicated sums over micro-steps are reduced in each, but outside the layers after the last
        scattered = tuple(axis for axis in expected.scattered if axis not in each_step)
        nbytes = expected.elements * itemsize / step.num_shards(scattered)
        is_repeated = is_stacked or each_step & set(expected.scattered)
        times = max(times for _, _, times in expected.counts) if is_repeated else count
        yield "all-reduce", step.ordered(each_step), nbytes, float(times)
        axes = tuple(axis for axis in expected.axes if axis not in each_step)
        if not axes:
            return
        expected = dataclasses.replace(expected, axes=axes, scattered=scattered, counts=())
    if expected.kind == "sum" and expected.may_all_reduce and expected.elements * itemsize <= MIN_SHARDED_BYTES:
        yield "all-reduce", expected.axes, float(expected.elements * itemsize), float(count)
        return
    for kind, axes, elements in expected.forms(step.sizes):
        yield kind, axes, float(elements * itemsize), float(count)


def _hidden(step: Execution, expected: ExpectedCollective, *, independent: float) -> float:
    """Return the fraction of a message's time that can overlap.

    `independent` is the fraction of the message that runs next to independent compute.
    """
    if expected.role in (WEIGHTS, GRADIENTS) and (expected.scattered or expected.kind == "gather"):
        # Gradients of a batch slice are reduced while the next slice computes.
        is_overlapped = expected.role == WEIGHTS or step.batch_slices > 1
        return hidden_of_weights(step, is_ahead=step.gathering.ahead > 0 and expected.stack > 1 and is_overlapped)
    base = STEP.hidden["exchange" if expected.kind == "exchange" else "other"]
    return base if expected.role in (WEIGHTS, GRADIENTS) else base + independent * (STEP.hidden["interleaved"] - base)


def hidden_of_weights(step: Execution, *, is_ahead: bool) -> float:
    """Return the fraction of the gathers and reduce-scatters of weights that overlaps with compute.

    `is_ahead`: the weights of a layer are gathered while the previous layer computes.
    """
    return STEP.hidden["context" if step.context_axes else "prefetched" if is_ahead else "weights"]


def _nodes_of(cluster: Cluster, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return (number of nodes, devices per node) of groups along `axes`, as `Cluster.layout` does, but faster."""
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
