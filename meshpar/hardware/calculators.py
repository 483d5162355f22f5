"""Calculators for memory, bubbles and messages, from closed formulas of the literature.

Symbols: Ψ parameters, N ranks, p stages, m microbatches, v chunks per stage, b batch size, s sequence length, d width,
k experts per token, L layers. Collectives are in `cost_breakdown.py`, and schedules in `Schedule.simulate`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.hardware.cost_breakdown import Sheet, breakdown
from meshpar.sharding.errors import check_choice, check_positive_int, near, problem
from meshpar.sharding.units import parse_count

Stage = Literal["ddp", "zero1", "zero2", "zero3"]
WEIGHT, GRADIENT, OPTIMIZER, MASTER = 2, 2, 8, 4
"""Bytes per parameter in mixed precision: bfloat16 weight and gradient, Adam's moments, and float32 master copy."""


def zero_bytes_per_param(stage: Stage, num_ranks: int) -> float:
    """Return the bytes of model state per parameter and rank with mixed-precision Adam.

    DDP needs 16 bytes. ZeRO-1 shards the 12 bytes of the optimizer over N ranks, ZeRO-2 also the gradient, and ZeRO-3
    (FSDP, or HSDP within a group) everything.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    check_positive_int("zero_bytes_per_param", "the number of ranks that share the state", num_ranks=num_ranks)
    check_choice("ZeRO calculator", "a ZeRO stage", get_args(Stage), stage=stage)
    sizes = (OPTIMIZER + MASTER, GRADIENT, WEIGHT)
    num_sharded = get_args(Stage).index(stage)
    return sum(size / num_ranks if i < num_sharded else size for i, size in enumerate(sizes))


def _counted(calculator: Callable[..., Sheet]) -> Callable[..., Sheet]:
    """Decorate a calculator: parse and check its numbers, which may be text such as `70B`."""

    @functools.wraps(calculator)
    def parse(*, cluster: str | Cluster | None = None, **numbers: str | float) -> Sheet:
        where, names = f"meshpar cost {calculator.__name__}", list(inspect.signature(calculator).parameters)
        for key in numbers:
            if key not in names:
                reason = f"its numbers are {', '.join(names)}"
                raise problem(where, f"use `{key}`", reason, near(key, names), code="unknown-name")
        parsed: dict[str, Any] = {key: parse_count(value, f"{where} {key}={value}") for key, value in numbers.items()}
        if cluster is not None and "cluster" not in names:
            requested, reason = f"use cluster `{parse_cluster(cluster).name}`", "this calculator computes no times"
            raise problem(where, requested, reason, "remove the cluster", code="unsupported-feature")
        return calculator(**parsed, **({} if cluster is None else {"cluster": parse_cluster(cluster)}))

    return parse


@_counted
def zero(*, params: int = 7 * 10**9, ranks: int = 64, cluster: Cluster | None = None) -> Sheet:
    """Bytes of model state on a rank for each ZeRO stage, and bytes and time of the communication per step."""
    rows = []
    forms = ("16 Ψ", "(4 + 12/N) Ψ", "(2 + 14/N) Ψ", "16/N Ψ; HSDP: N ranks of a group")
    for stage, form in zip(get_args(Stage), forms, strict=True):
        per_param = zero_bytes_per_param(stage, ranks)
        # ZeRO-3 gathers twice and reduce-scatters once.
        num_collectives, sent_form = (3, "3 (N−1)/N · 2Ψ") if stage == "zero3" else (2, "2 (N−1)/N · 2Ψ")
        sent = num_collectives * cost.bytes_sent("all-gather", WEIGHT * params, ranks)
        rows += [
            (stage, params * per_param, "B", form),
            (f"{stage} per parameter", per_param, "B", "of the state"),
            (f"{stage} sent", sent, "B", sent_form),
        ]
        if cluster is not None:
            time_s = num_collectives * breakdown("all-gather", WEIGHT * params, ranks, cluster).time_s
            rows.append((f"{stage} communication", time_s, "s", f"{num_collectives} ring passes: {cluster.name}"))
    return Sheet(title=f"{params:.4g} parameters on {ranks} ranks", rows=tuple(rows))


@_counted
def memory(*, params: int = 70 * 10**9, tensor: int = 1, stages: int = 1, ranks: int = 1) -> Sheet:
    """Bytes of weights, gradients and optimizer state on a GPU, with T tensor ranks, P stages and N data ranks."""
    local = params / tensor / stages
    rows = (
        ("parameters per stage", params / stages, "", "Ψ/P"),
        ("parameters per GPU", local, "", "Ψ/(T P)"),
        ("weights", WEIGHT * local, "B", "2 Ψ/(T P)"),
        ("gradients", GRADIENT * local, "B", "2 Ψ/(T P)"),
        ("Adam and master copy", (OPTIMIZER + MASTER) * local, "B", "12 Ψ/(T P)"),
        ("ZeRO-1 over N", local * zero_bytes_per_param("zero1", ranks), "B", "(4 + 12/N) Ψ/(T P)"),
        ("ZeRO-3 over N", local * zero_bytes_per_param("zero3", ranks), "B", "16/N Ψ/(T P)"),
    )
    return Sheet(title=f"{params:.4g} parameters, T={tensor:g}, P={stages:g}, N={ranks:g}", rows=rows)


@_counted
def bubble(*, stages: int = 4, microbatches: int = 8, chunks: int = 2) -> Sheet:
    """Bubble fractions in closed form for F = B = W. `meshpar schedule` simulates the tables."""
    p, m, v = stages, microbatches, chunks
    min_m, span = 2 * p - 1, "between a stage's first op and its last"
    zero_bubble = ("zb-h2, zb-v", 0.0, "", f"0 for m ≥ 2p−1, {span}")
    if m < min_m:
        zero_bubble = ("minimum m without bubble, zb-h2, zb-v", min_m, "", f"2p−1: no bubble {span}")
    rows = (
        ("gpipe, 1f1b", (p - 1) / (m + p - 1), "", "(p−1)/(m+p−1)"),
        ("interleaved-1f1b", (p - 1) / (v * m + p - 1), "", "(p−1)/(v m+p−1)"),
        ("zb-h1", (p - 1) / (3 * m + p - 1), "", "(p−1)(F+B−W) / ((p−1)(F+B−W) + m(F+B+W))"),
        zero_bubble,
    )
    return Sheet(title=f"bubbles of {p:g} stages, {m:g} microbatches, {v:g} chunks", rows=rows)


@_counted
def tp(
    *, examples: int = 1, seq: int = 4096, width: int = 4096, ranks: int = 8, cluster: Cluster | None = None
) -> Sheet:
    """Tensor parallelism: payload of each of a layer's four all-reduces, and FLOPs of a `[width, width]` matmul."""
    payload, flops = 2 * examples * seq * width, cost.matmul_flops(examples * seq, width, width)
    result = [
        ("payload", payload, "B", "2 b s d"),
        ("sent per layer", 4 * cost.bytes_sent("all-reduce", payload, ranks), "B", "4 · 2(N−1)/N · 2 b s d"),
        ("matmul", flops, "FLOP", "2 b s d²"),
    ]
    if cluster is not None:
        best = min(
            (breakdown(name, payload, ranks, cluster) for name in ("ring", "tree")), key=lambda each: each.time_s
        )
        where = "within a node" if ranks <= cluster.gpus_per_node else "between nodes"
        result += [
            ("all-reduce", best.time_s, "s", f"{best.algorithm.name} {where}: {cluster.name}, {cluster.links_from}"),
            ("matmul at peak", flops / cluster.gpu.bf16_flops_per_s, "s", "2 b s d² / peak of the data sheet"),
        ]
    return Sheet(title=f"tensor parallelism over {ranks:g} ranks", rows=tuple(result))


@_counted
def moe(
    *, examples: int = 1, seq: int = 4096, k: int = 8, width: int = 7168, ranks: int = 64, layers: int = 58,
    cluster: Cluster | None = None,
) -> Sheet:  # fmt: skip
    """Expert parallelism: elements of an all-to-all per rank, and of dispatch and combine in all layers.

    With a cluster, also the time of an all-to-all in bfloat16, and the tokens from which bandwidth dominates latency.
    """
    elements = examples * seq * k * width / ranks
    result = [
        ("elements per rank and direction", elements, "", "b s k d / N"),
        ("dispatch and combine of all layers", 2 * layers * elements, "", "2 L b s k d / N"),
        ("sent to other ranks", (ranks - 1) / ranks * elements, "", "(N−1)/N · b s k d / N"),
    ]
    if cluster is not None:
        single_s, double_s = (breakdown("all-to-all", WEIGHT * n * elements, ranks, cluster).time_s for n in (1, 2))
        latency_s = 2 * single_s - double_s  # the time is linear in the bytes
        crossover = examples * seq * latency_s / (single_s - latency_s) if ranks > 1 else 0.0
        result += [
            ("all-to-all", single_s, "s", f"(N−1)(α + n/N · β): {cluster.name}"),
            ("crossover, tokens", crossover, "", "b s with (N−1) α = (N−1)/N · nβ"),
        ]
    return Sheet(title=f"all-to-alls over {ranks:g} expert ranks", rows=tuple(result))


@_counted
def remat(*, layers: int = 64) -> Sheet:
    """Activation checkpointing: number of saved layer inputs and relative compute (Chen et al. 2016)."""
    result = (
        ("saved without", layers, "", "L"),
        ("saved at the optimum", 2 * math.sqrt(layers), "", "√L checkpoints and √L layers between two"),
        ("compute", 4 / 3, "", "four forward passes instead of three"),
    )
    return Sheet(title=f"checkpointing of {layers:g} layers", rows=result)


@_counted
def accumulate(
    *, params: int = 7 * 10**9, ranks: int = 64, steps: int = 8, arrays: int = 300, cluster: Cluster | None = None
) -> Sheet:
    """Gradient accumulation with ZeRO: memory and bytes sent, if gradients are reduced per micro-step or once.

    With a cluster, also the latency of the reduce-scatters of `arrays` separate gradients.
    """
    sent = cost.bytes_sent("reduce-scatter", GRADIENT * params, ranks)
    result = [
        ("each micro-step: stored", GRADIENT * params / ranks, "B", "2Ψ/N"),
        ("each micro-step: sent", steps * sent, "B", "steps · (N−1)/N · 2Ψ"),
        ("once: stored", GRADIENT * params, "B", "2Ψ"),
        ("once: sent", sent, "B", "(N−1)/N · 2Ψ"),
    ]
    if cluster is not None:
        latency_s = arrays * breakdown("reduce-scatter", 0, ranks, cluster).time_s
        result += [
            ("each micro-step: latency", steps * latency_s, "s", f"steps · arrays · (N−1) α: {cluster.name}"),
            ("once: latency", latency_s, "s", "arrays · (N−1) α"),
        ]
    return Sheet(title=f"gradients of {steps:g} micro-steps on {ranks:g} ranks", rows=tuple(result))


@_counted
def bucket(
    *, params: int = 7 * 10**9, ranks: int = 64, size: int = 25 * 10**6, cluster: Cluster | None = None
) -> Sheet:
    """DDP buckets of `size` bytes: each is one ring all-reduce, which sends chunks of size/N.

    With a cluster, also the times, and the size from which bandwidth dominates latency.
    """
    total, count = GRADIENT * params, -(-GRADIENT * params // size)
    result = [
        ("buckets", count, "", "⌈2Ψ / size⌉"),
        ("chunk of a ring step", size / ranks, "B", "size / N"),
        ("ring steps per bucket", 2 * (ranks - 1), "", "2(N−1)"),
        ("sent per bucket", cost.bytes_sent("all-reduce", size, ranks), "B", "2(N−1)/N · size"),
        ("sent in total", cost.bytes_sent("all-reduce", total, ranks), "B", "2(N−1)/N · 2Ψ"),
    ]
    if cluster is not None:
        latency_s, bucket_s, total_s = (breakdown("ring", n, ranks, cluster).time_s for n in (0, size, total))
        crossover = size * latency_s / (bucket_s - latency_s) if ranks > 1 else 0.0
        result += [
            ("a bucket", bucket_s, "s", f"2(N−1)α + 2(N−1)/N · size · β: {cluster.name}"),
            ("all buckets", count * latency_s + total_s - latency_s, "s", "one after the other, without overlap"),
            ("a single message", total_s, "s", "cannot overlap with the backward pass"),
            ("crossover", crossover, "B", "size with α = size/N · β"),
        ]
    return Sheet(title=f"gradients of {params:.4g} parameters in buckets, on {ranks:g} ranks", rows=tuple(result))


@_counted
def train(
    *, params: int = 70 * 10**9, tokens: int = 15 * 10**12, mfu: int = 40, cluster: Cluster | None = None
) -> Sheet:
    """Training time from the model FLOPs: 6 per parameter and token (Kaplan et al. 2020), at `mfu` percent of the peak.

    For MoE models `params` is the number of active parameters. `meshpar plan --tokens` predicts the speed instead.
    """
    cluster = parse_cluster("h100:8x8") if cluster is None else cluster
    if mfu > 100:
        reason, fix = "it is a percentage of the peak", "write mfu=40"
        raise problem("meshpar cost train", f"use mfu={mfu}", reason, fix, code="out-of-range")
    flops, num_gpus = 6 * params * tokens, cluster.num_devices
    per_gpu = cluster.gpu.bf16_flops_per_s * mfu / 100
    gpu_hours = flops / per_gpu / 3600
    result = (
        ("model FLOPs", flops, "FLOP", "6 Ψ D"),
        ("tokens per second and GPU", per_gpu / (6 * params), "", f"MFU · peak / 6Ψ: {cluster.gpu.name}"),
        ("GPU-hours", gpu_hours, "", "6 Ψ D / (MFU · peak)"),
        ("days", gpu_hours / num_gpus / 24, "", f"on {num_gpus:,} GPUs: {cluster.name}"),
    )
    return Sheet(title=f"{params:.4g} parameters on {tokens:.4g} tokens at {mfu:g} % MFU", rows=result)


CALCULATORS: Mapping[str, Callable[..., Sheet]] = {
    calculator.__name__: calculator for calculator in (zero, memory, bubble, tp, moe, remat, accumulate, bucket, train)
}


def calculate(name: str, numbers: Mapping[str, str | float], cluster: Cluster | None = None) -> Sheet:
    """Run a calculator.

    Args:
      name: a key of `CALCULATORS`.
      numbers: positive integers by name, also as text: `70e9`, `70B`, `8k`.
      cluster: the cluster whose links determine the times.
    """
    check_choice("meshpar cost", "a calculator", tuple(CALCULATORS), name=name)
    return CALCULATORS[name](**numbers, cluster=cluster)
