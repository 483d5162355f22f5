"""The decision guide with a model's own numbers: which parallelism its memory and its messages ask for."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.hardware.clusters import MATMUL_EFFICIENCY, Cluster
from meshpar.planner.workload import Workload
from meshpar.sharding.units import human_bytes, si

PART = 8
"""Of a GPU's memory, what one gathered layer may take: beside it are the next one, and gradients of both, wider."""
SLOW = 4
"""Links inside a node that are so much quicker than those between nodes make groups inside worth while."""


def advice(work: Workload, cluster: Cluster, limit_bytes: int) -> tuple[str, ...]:
    """Return the simplest strategy that fits and the parallelism to add, by rules of thumb.

    Plans are ranked by estimated time instead. Fits on one device: data parallelism. Only the optimizer's state
    does not: ZeRO-1. Else ZeRO-3; with slow links between nodes HSDP; a layer too large or a batch too small: tensor
    parallelism inside a node; links too slow even for that: a pipeline of at least four times as many microbatches as
    stages.

    Args:
      work: what a step asks of devices.
      cluster: of which GPUs.
      limit_bytes: that a plan may fill of one.
    """
    params = sum(leaf.nbytes for leaf in work.leaves)
    optimizer = sum(slot.nbytes for slot in work.slots)
    size, devices = sum(leaf.size for leaf in work.leaves), cluster.num_devices
    gradients = 4 * size
    whole, first = params + optimizer + gradients, params + gradients + optimizer // devices
    limit = human_bytes(limit_bytes)
    if whole <= limit_bytes:
        lines = [f"state and gradients, {human_bytes(whole)}, fit a GPU ({limit}): ddp() is the simplest strategy"]
    elif first <= limit_bytes:
        lines = [
            f"state and gradients, {human_bytes(whole)}, do not fit a GPU ({limit}), but without the optimizer's share "
            f"of {devices} GPUs they do ({human_bytes(first)}): zero1() is the simplest strategy"
        ]
    else:
        lines = [
            f"parameters and gradients alone take {human_bytes(params + gradients)} of {limit}: fsdp() is the simplest "
            f"strategy, with {human_bytes(whole / devices)} a GPU"
        ]
        ratio = cluster.inside.bytes_per_s / cluster.across.bytes_per_s
        group = next(
            (n for n in range(1, cluster.nodes + 1) if whole / (n * cluster.gpus_per_node) < limit_bytes / 2), 0
        )
        if cluster.nodes > 1 and ratio > SLOW and 0 < group < cluster.nodes:
            lines.append(
                f"links inside a node are {ratio:.3g} times as quick as between nodes, and {group} nodes hold the "
                "state: hsdp() keeps gathers inside a group"
            )
    if work.rows < devices:
        lines.append(
            f"{work.rows} rows do not go round {devices} GPUs: split rows too, with tensor_parallel(sequence=True) "
            "inside a node, context_parallel() or a pipeline"
        )
    layer = work.compute_itemsize * sum(leaf.size // leaf.num_layers for leaf in work.leaves if leaf.is_stacked)
    if layer > limit_bytes / PART:
        also = " and expert_parallel()" if work.choices else ""
        lines.append(
            f"one gathered layer takes {human_bytes(layer)}: split it, with tensor_parallel() over the "
            f"{cluster.gpus_per_node} GPUs of a node{also}"
        )
    return (*lines, *_by_stages(work, cluster, limit_bytes, layer))


def _by_stages(work: Workload, cluster: Cluster, limit_bytes: int, layer: int) -> Iterator[str]:
    """Whether stages are worth their bubble: of a layer too large for a node, of weights that travel too long."""
    remedy = "cut the layers over nodes, with pipeline_parallel(stages=p, microbatches=m), m at least 4 p"
    if layer > cluster.gpus_per_node * limit_bytes / PART:
        yield f"a layer of {human_bytes(layer)} is too large for a node of {cluster.gpus_per_node} GPUs: {remedy}"
    if cluster.nodes == 1:
        return
    # Two gathers and a scatter of all weights, through all ports of a node; products at the rate that plans assume.
    sent = (2 * work.compute_itemsize + 4) * sum(leaf.size for leaf in work.leaves if leaf.is_stacked)
    rate = min(cluster.gpus_per_node * cluster.across.bytes_per_s, cluster.inside.bytes_per_s)
    wire_s, busy_s = sent / rate, work.model_flops * work.rows / cluster.num_devices
    busy_s /= MATMUL_EFFICIENCY * cluster.gpu.bf16_flops_per_s
    if wire_s > busy_s:
        yield (
            f"weights and their gradients travel {si(wire_s, 's')} between nodes in a step that computes "
            f"{si(busy_s, 's')}: {remedy}"
        )
