"""Calculators: the literature's closed forms of memory, bubbles and messages, with anybody's numbers.

Symbols: Ψ parameters, N ranks, p stages, m microbatches, v chunks a stage, b rows, s positions, d width, k choices,
L layers. What a collective costs is in `accounts.py`, what a schedule does to the tick in `Schedule.simulate`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster
from meshpar.hardware.cost_breakdown import account
from meshpar.sharding.errors import check_positive_int
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import near, problem
from meshpar.sharding.units import parse_count, si

Stage = Literal["ddp", "zero1", "zero2", "zero3"]
WEIGHT, GRADIENT, OPTIMIZER, MASTER = 2, 2, 8, 4
"""Bytes a parameter in mixed precision: bfloat16 weight and gradient, Adam's moments, float32 copy of the weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sheet(Printed, Plain):
    """Figures, each with its formula. Prints as a table."""

    title: str
    rows: tuple[tuple[str, float, str, str], ...]
    """(what, value, unit, formula)."""

    def __getitem__(self, what: str) -> float:
        return next(value for name, value, *_ in self.rows if name == what)

    def __rich__(self) -> Any:
        columns = ("figure", "value", "formula")
        shown = [(what, si(value, unit) if unit else f"{value:.6g}", form) for what, value, unit, form in self.rows]
        return table(self.title, columns, shown, left=columns)


def zero_bytes_per_param(stage: Stage, num_ranks: int, *, master: bool = True) -> float:
    """Bytes of model state a parameter on one rank, mixed-precision Adam: 16 under DDP, 12 without the master copy.

    ZeRO-1 splits the optimizer's 12 over the ranks, ZeRO-2 the gradient too, ZeRO-3 (FSDP; HSDP inside its group) all.
    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    check_positive_int("zero_bytes_per_param", "the number of ranks that share the state", num_ranks=num_ranks)
    _check_stage(stage)
    parts = (OPTIMIZER + MASTER * master, GRADIENT, WEIGHT)
    split = get_args(Stage).index(stage)
    return sum(part / num_ranks if at < split else part for at, part in enumerate(parts))


def zero_messages(stage: Stage) -> float:
    """What a stage sends over what data parallelism sends: ZeRO-3 gathers twice and scatters once, 1.5 times."""
    _check_stage(stage)
    return 1.5 if stage == "zero3" else 1.0


def _check_stage(stage: object) -> None:
    if stage not in get_args(Stage):
        exists = "stages are ddp, zero1, zero2, zero3"
        raise problem(f"ZeRO stage `{stage}`", "split state by it", exists, near(str(stage), get_args(Stage)))


def _counted(calculator: Callable[..., Sheet]) -> Callable[..., Sheet]:
    """The calculator, whose numbers are read and checked before it sees them, whoever calls it."""

    @functools.wraps(calculator)
    def made(*, cluster: Cluster | None = None, **numbers: str | float) -> Sheet:
        where, signature = f"meshpar cost {calculator.__name__}", inspect.signature(calculator).parameters
        known = [one for one in signature if one != "cluster"]
        for key in numbers:
            if key not in known:
                raise problem(where, f"take `{key}`", f"it takes {', '.join(known)}", near(key, known))
        read: dict[str, Any] = {key: parse_count(value, f"{where} {key}={value}") for key, value in numbers.items()}
        if cluster is None:
            return calculator(**read)
        if not isinstance(cluster, Cluster):
            exists, fix = (
                f"it is a {type(cluster).__name__}",
                'read it: meshpar.hardware.clusters.parse_cluster("h100:8x8")',
            )
            raise problem(f"{where} cluster={cluster!r}", "price messages over it", exists, fix)
        if "cluster" not in signature:
            raise problem(where, f"use the cluster {cluster.name}", "only tp has a message to price", "leave it out")
        return calculator(**read, cluster=cluster)

    return made


@_counted
def zero(*, params: int = 7 * 10**9, ranks: int = 64) -> Sheet:
    """State of every ZeRO stage on one of N ranks, and what is sent."""
    rows = []
    forms = {"ddp": "16 Ψ", "zero1": "(4 + 12/N) Ψ", "zero2": "(2 + 14/N) Ψ", "zero3": "16/N Ψ; HSDP: N of one group"}
    for stage in get_args(Stage):
        each = zero_bytes_per_param(stage, ranks)
        sent = f"sends {zero_messages(stage):g}× data parallelism's"
        rows += [(stage, params * each, "B", forms[stage]), (f"{stage} a parameter", each, "", sent)]
    return Sheet(title=f"{params:.4g} parameters on {ranks} ranks", rows=tuple(rows))


@_counted
def memory(*, params: int = 70 * 10**9, tensor: int = 1, stages: int = 1, ranks: int = 1) -> Sheet:
    """Weights, gradients, optimizer on a GPU of T × P × N, of which the N ranks of data parallelism are ZeRO-1."""
    mine = params / tensor / stages
    rows = (
        ("parameters of a stage", params / stages, "", "Ψ/P"),
        ("parameters of a GPU", mine, "", "Ψ/(T P)"),
        ("weights", WEIGHT * mine, "B", "2 Ψ/(T P)"),
        ("gradients", GRADIENT * mine, "B", "2 Ψ/(T P)"),
        ("Adam and master copy", (OPTIMIZER + MASTER) * mine, "B", "12 Ψ/(T P)"),
        ("ZeRO-1 over N", mine * zero_bytes_per_param("zero1", ranks), "B", "(4 + 12/N) Ψ/(T P)"),
        ("ZeRO-3 over N", mine * zero_bytes_per_param("zero3", ranks), "B", "16/N Ψ/(T P)"),
    )
    return Sheet(title=f"{params:.4g} parameters, T={tensor:g}, P={stages:g}, N={ranks:g}", rows=rows)


@_counted
def bubble(*, stages: int = 4, microbatches: int = 8, chunks: int = 2) -> Sheet:
    """Bubble fractions in closed form, F = B = W; `meshpar schedule` simulates the tables."""
    p, m, v = stages, microbatches, chunks
    least, between = 2 * p - 1, "between a stage's first op and its last"
    none = ("zb-h2, zb-v", 0.0, "", f"0 from m = 2p−1 on, {between}")
    if m < least:
        none = ("microbatches without, zb-h2, zb-v", least, "", f"2p−1: from there on no bubble {between}")
    rows = (
        ("gpipe, 1f1b", (p - 1) / (m + p - 1), "", "(p−1)/(m+p−1)"),
        ("interleaved-1f1b", (p - 1) / (v * m + p - 1), "", "(p−1)/(v m+p−1)"),
        ("zb-h1", (p - 1) / (3 * m + p - 1), "", "(p−1)(F+B−W) over itself and m(F+B+W)"),
        none,
    )
    return Sheet(title=f"bubbles of {p:g} stages, {m:g} microbatches, {v:g} chunks", rows=rows)


@_counted
def tp(*, rows: int = 1, seq: int = 4096, width: int = 4096, ranks: int = 8, cluster: Cluster | None = None) -> Sheet:
    """Tensor parallelism: the payload of one of a layer's four all-reduces, and a square matmul beside it."""
    payload, flops = 2 * rows * seq * width, cost.matmul_flops(rows * seq, width, width)
    found = [
        ("payload", payload, "B", "2 b s d"),
        ("sent a layer", 4 * cost.bytes_sent("all-reduce", payload, ranks), "B", "4 · 2(N−1)/N · 2 b s d"),
        ("matmul", flops, "FLOP", "2 b s d²"),
    ]
    if cluster is not None:
        best = min((account(name, payload, ranks, cluster) for name in ("ring", "tree")), key=lambda one: one.time_s)
        where = "inside a node" if ranks <= cluster.gpus_per_node else "between nodes"
        found += [
            ("all-reduce", best.time_s, "s", f"{best.algorithm.name} {where}: {cluster.name}, {cluster.links_from}"),
            ("matmul at peak", flops / cluster.gpu.bf16_flops_per_s, "s", "2 b s d² / peak of the data sheet"),
        ]
    return Sheet(title=f"tensor parallelism over {ranks:g} ranks", rows=tuple(found))


@_counted
def moe(*, rows: int = 1, seq: int = 4096, k: int = 8, width: int = 7168, ranks: int = 64, layers: int = 58) -> Sheet:
    """Expert parallelism: elements of one all-to-all of a rank, and of all layers there and back."""
    each = rows * seq * k * width / ranks
    found = (
        ("elements a rank and direction", each, "", "b s k d / N"),
        ("of all layers, there and back", 2 * layers * each, "", "2 L b s k d / N"),
        ("that leave the rank", (ranks - 1) / ranks * each, "", "(N−1)/N · b s k d / N"),
    )
    return Sheet(title=f"all-to-alls over {ranks:g} ranks of experts", rows=found)


@_counted
def remat(*, layers: int = 64) -> Sheet:
    """Activation checkpointing: layers' inputs held, and compute (Chen et al. 2016, "Sublinear Memory Cost")."""
    found = (
        ("held without", layers, "", "L"),
        ("held at the optimum", 2 * math.sqrt(layers), "", "√L checkpoints and √L layers between two"),
        ("compute", 4 / 3, "", "a forward pass more to 3: a third"),
    )
    return Sheet(title=f"checkpointing of {layers:g} layers", rows=found)


@_counted
def accumulate(*, params: int = 7 * 10**9, ranks: int = 64, steps: int = 8) -> Sheet:
    """Gradient accumulation under ZeRO: reduced in every micro-step into shards, or summed whole and reduced once."""
    sent = cost.bytes_sent("reduce-scatter", GRADIENT * params, ranks)
    found = (
        ("each: held", GRADIENT * params / ranks, "B", "2Ψ/N"),
        ("each: sent", steps * sent, "B", "steps · (N−1)/N · 2Ψ"),
        ("once: held", GRADIENT * params, "B", "2Ψ"),
        ("once: sent", sent, "B", "(N−1)/N · 2Ψ"),
    )
    return Sheet(title=f"gradients of {steps:g} micro-steps on {ranks:g} ranks", rows=found)


CALCULATORS: Mapping[str, Callable[..., Sheet]] = {
    one.__name__: one for one in (zero, memory, bubble, tp, moe, remat, accumulate)
}


def calculate(name: str, numbers: Mapping[str, str | float], cluster: Cluster | None = None) -> Sheet:
    """A calculator by its name.

    Args:
      name: of `CALCULATORS`.
      numbers: by name, each whole and at least 1; as text `70e9`, `70B`, `8k`, too.
      cluster: whose links `tp` goes over.

    Raises:
      ValueError: a number that it does not take, or is none; a cluster for another calculator, or one too small.
    """
    if name not in CALCULATORS:
        raise problem(f"calculator `{name}`", "calculate", "there is no such one", near(str(name), CALCULATORS))
    if not isinstance(numbers, Mapping):
        exists, fix = f"it is a {type(numbers).__name__}", 'write {"params": "70B", "ranks": 64}'
        raise problem(f"calculator `{name}`", f"take {numbers!r}", exists, fix)
    return CALCULATORS[name](**numbers, **({} if cluster is None else {"cluster": cluster}))
