"""Decision guide: the parallelisms that the memory and the messages of a model require."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.hardware.clusters import MATMUL_EFFICIENCY, Cluster
from meshpar.planner.calibration import STEP
from meshpar.planner.workload import Workload
from meshpar.sharding.units import human_bytes, si

MAX_LAYER_FRACTION = 1 / 8
"""Maximum fraction of a GPU's memory for a gathered layer. The next layer and gradients need memory, too."""
MIN_LINK_RATIO = 4
"""HSDP is suggested if links within a node are this many times as fast as links between nodes."""


def advice(work: Workload, cluster: Cluster, limit_bytes: int) -> tuple[str, ...]:
    """Return the simplest strategy that fits and the parallelism to add, by rules of thumb.

    If the state fits on a device, this is data parallelism. If only the optimizer state does not fit, it is ZeRO-1,
    otherwise ZeRO-3, and HSDP if links between nodes are slow. For large layers or small batches, tensor parallelism
    within a node is added. If links are too slow for that, a pipeline is added, with at least four microbatches per
    stage. The ranking of plans does not use these rules, but estimated times.
    """
    params = sum(leaf.nbytes for leaf in work.leaves)
    optimizer = sum(slot.nbytes for slot in work.slots)
    size, devices = sum(leaf.size for leaf in work.leaves), cluster.num_devices
    gradients = 4 * size
    unsharded, zero1 = params + optimizer + gradients, params + gradients + optimizer // devices
    limit = human_bytes(limit_bytes)
    if unsharded <= limit_bytes:
        lines = [
            f"state and gradients ({human_bytes(unsharded)}) fit on a GPU ({limit}): ddp() is the simplest strategy"
        ]
    elif zero1 <= limit_bytes:
        lines = [
            f"state and gradients ({human_bytes(unsharded)}) do not fit on a GPU ({limit}), but they do if "
            f"{devices} GPUs share the optimizer state ({human_bytes(zero1)}): zero1() is the simplest strategy"
        ]
    else:
        lines = [
            f"parameters and gradients alone need {human_bytes(params + gradients)} of {limit}: fsdp() is the simplest "
            f"strategy, with {human_bytes(unsharded / devices)} per GPU"
        ]
        ratio = cluster.inside.bytes_per_s / cluster.across.bytes_per_s
        group = next(
            (n for n in range(1, cluster.nodes + 1) if unsharded / (n * cluster.gpus_per_node) < limit_bytes / 2), 0
        )
        if cluster.nodes > 1 and ratio > MIN_LINK_RATIO and 0 < group < cluster.nodes:
            lines.append(
                f"links within a node are {ratio:.3g} times as fast as links between nodes, and the state fits on "
                f"{group} nodes: hsdp() gathers weights within a group"
            )
    if work.examples < devices:
        lines.append(
            f"a batch of {work.examples} is too small for {devices} GPUs: add tensor_parallel(sequence=True) within a "
            "node, context_parallel() or a pipeline"
        )
    layer = work.compute_itemsize * sum(leaf.size // leaf.num_layers for leaf in work.leaves if leaf.is_stacked)
    if layer > limit_bytes * MAX_LAYER_FRACTION:
        experts = " and expert_parallel()" if work.experts_per_token else ""
        lines.append(
            f"a gathered layer needs {human_bytes(layer)}: shard it with tensor_parallel() over the "
            f"{cluster.gpus_per_node} GPUs of a node{experts}"
        )
    return (*lines, *_attention_advice(work, cluster), *_pipeline_advice(work, cluster, limit_bytes, layer))


def _attention_advice(work: Workload, cluster: Cluster) -> Iterator[str]:
    """Yield advice if attention without a library kernel takes a tenth of the compute at the rate measured for it."""
    rate, share = STEP.loop_share * cluster.gpu.bf16_flops_per_s, work.examples / cluster.num_devices
    attention_s = work.products_flops * share / rate
    compute_s = work.model_flops * share / (MATMUL_EFFICIENCY * cluster.gpu.bf16_flops_per_s)
    if attention_s > compute_s / 10:
        fix = 'use a kernel, such as TransformerConfig(attention="cudnn")'
        if work.compute_itemsize > 2:
            fix = 'compute in bfloat16, in which TransformerConfig(attention="auto") uses a kernel'
        yield (
            "attention has no library kernel, and the estimates assume that its scores move at the full bandwidth of "
            f"the memory; loops of matmuls were measured at {STEP.loop_share:.1%} of the peak of an H100, which is "
            f"{si(attention_s, 's')} in a step: {fix}"
        )


def _pipeline_advice(work: Workload, cluster: Cluster, limit_bytes: int, layer: int) -> Iterator[str]:
    """Yield advice for a pipeline: if a layer is too large for a node, or messages take longer than compute."""
    remedy = "distribute the layers over nodes with pipeline_parallel(stages=p, microbatches=m), m at least 4 p"
    if layer > cluster.gpus_per_node * limit_bytes * MAX_LAYER_FRACTION:
        yield f"a layer of {human_bytes(layer)} is too large for a node of {cluster.gpus_per_node} GPUs: {remedy}"
    if cluster.nodes == 1:
        return
    # Two gathers and a reduce-scatter of all weights over all links of a node, and matmuls at the assumed rate.
    sent = (2 * work.compute_itemsize + 4) * sum(leaf.size for leaf in work.leaves if leaf.is_stacked)
    rate = min(cluster.gpus_per_node * cluster.across.bytes_per_s, cluster.inside.bytes_per_s)
    network_s, compute_s = sent / rate, work.model_flops * work.examples / cluster.num_devices
    compute_s /= MATMUL_EFFICIENCY * cluster.gpu.bf16_flops_per_s
    if network_s > compute_s:
        yield (
            f"messages of weights and gradients between nodes need {si(network_s, 's')} in a step with "
            f"{si(compute_s, 's')} of compute: {remedy}"
        )
