"""The reference decoder under every strategy, and a table of its sharding and communication.

strategy ─► abstract state ─► compiled for a pod ─► census ─► one layer's collectives ─► a row
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import per_array
from meshpar.inspect.explain import explain
from meshpar.inspect.matching import SMALL
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.report import Report
from meshpar.inspect.target import require_aot
from meshpar.layers.precision import Precision
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel import parse_strategy
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.units import human_bytes
from meshpar.training.state import TrainState, abstract_state
from meshpar.training.step import TrainStep, train_step

CLUSTER = "h100:1x8"
"""Where the table is made for by default."""
MODEL = TransformerConfig(
    vocab_size=80, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=768
)
"""Seven weight matrices and two norm scales in a layer."""
BATCH = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceCase:
    """A strategy on a mesh of eight devices."""

    strategy: str
    mesh: str
    split: str
    """What is split, in words."""

    def state(self) -> TrainState:
        """The reference decoder's state under it, without arrays."""
        mesh = MeshSpec.parse(self.mesh).abstract()
        return abstract_state(MODEL.build(), optax.adam(1e-3), mesh=mesh, strategy=parse_strategy(self.strategy))


CASES = (
    ReferenceCase(strategy="ddp()", mesh="data=8", split="the batch"),
    ReferenceCase(strategy="zero1()", mesh="fsdp=8", split="+ optimizer state"),
    ReferenceCase(strategy="zero2()", mesh="fsdp=8", split="+ gradients"),
    ReferenceCase(strategy="zero3()", mesh="fsdp=8", split="+ parameters"),
    ReferenceCase(strategy="hsdp()", mesh="data=2,fsdp=4", split="as zero3 in a group of 4; two groups side by side"),
    ReferenceCase(strategy="ddp() | tensor_parallel()", mesh="tensor=8", split="weight matrices inside a layer"),
    ReferenceCase(
        strategy="ddp() | tensor_parallel(sequence=True)", mesh="tensor=8", split="+ the sequence between them"
    ),
    ReferenceCase(strategy="fsdp() | tensor_parallel()", mesh="fsdp=4,tensor=2", split="every weight twice"),
    ReferenceCase(strategy="ddp() | context_parallel()", mesh="context=8", split="the sequence"),
    ReferenceCase(
        strategy="ddp() | context_parallel(kind='all-to-all')",
        mesh="context=8",
        split="the sequence; heads inside attention",
    ),
    ReferenceCase(strategy="fsdp(quantize='int8')", mesh="fsdp=8", split="as zero3, what travels in int8"),
)
"""The rows of the table."""


def step() -> TrainStep:
    """The training step of the table: bfloat16 compute on float32 parameters, gradients reduced in float32."""
    return train_step(next_token_loss, precision=Precision(compute="bfloat16"))


def report(case: ReferenceCase, pod: PodProcess, cluster: str = CLUSTER) -> Report:
    """What the compiled step of a case sends and holds."""
    return explain(step(), case.state(), BATCH, cluster, pod=pod)


# ---- The table -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """What each strategy splits and sends; `markdown` is what the README shows."""

    cluster: str
    cases: tuple[ReferenceCase, ...]
    reports: tuple[Report, ...]

    @property
    def markdown(self) -> str:
        """A table for Markdown, without a line break at its end."""
        heads = ("strategy", "mesh", "what is split", "each layer sends", "once a step", "bytes a step")
        rows = [_row(case, found) for case, found in zip(self.cases, self.reports, strict=True)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *rows))

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "strategy": case.strategy,
                "mesh": case.mesh,
                "split": case.split,
                "layer": _plain(_counts(found, in_layer=True)),
                "once": _plain(_counts(found, in_layer=False)),
                "totals": found.to_json()["totals"],
            }
            for case, found in zip(self.cases, self.reports, strict=True)
        ]
        return {"cluster": self.cluster, "rows": rows}


def strategy_table(cluster: str | None = None, *, pod: PodProcess | None = None) -> StrategyTable:
    """Compiles the reference decoder under every strategy.

    Raises:
      ValueError: another number of GPUs, no such cluster, or the `aot` extra is missing.
    """
    target = parse_cluster(cluster or CLUSTER)
    require_aot(target.name)
    with contextlib.nullcontext(pod) if pod is not None else PodProcess() as process:
        reports = tuple(report(case, process, target.name) for case in CASES)
    return StrategyTable(cluster=target.name, cases=CASES, reports=reports)


def _row(case: ReferenceCase, found: Report) -> tuple[str, ...]:
    sent = sum(one.collective.bytes_sent_per_step for one in found.collectives)
    strategy = " &#124; ".join(f"`mp.{part}`" for part in case.strategy.split(" | "))
    in_layer, once = (_words(_counts(found, in_layer=where)) for where in (True, False))
    return strategy, case.mesh.replace(",", ", "), case.split, in_layer, once, human_bytes(sent)


def _counts(found: Report, *, in_layer: bool) -> dict[tuple[str, str], int]:
    """Arrays that travel in one layer, or once a step, by (axes, kind); losses, metrics and norms left out."""
    counts: dict[tuple[str, str], int] = {}
    for one in (part for sent in found.collectives for part in per_array(sent.collective)):
        is_in_layer = any(loop.trip_count == MODEL.num_layers for loop in one.loops)
        if is_in_layer == in_layer and one.payload_bytes > SMALL * 4:
            key = (one.axes_label, one.logical_kind)
            counts[key] = counts.get(key, 0) + one.count_per_step // (MODEL.num_layers if in_layer else 1)
    return dict(sorted(counts.items(), key=lambda item: (_rank(found.mesh, item[0][0]), item[0][1])))


def _rank(mesh: Mapping[str, int], label: str) -> int:
    return min((list(mesh).index(axis) for axis in label.split("*") if axis in mesh), default=0)


def _words(counts: Mapping[tuple[str, str], int]) -> str:
    """`all-gather ×18, reduce-scatter ×9 over fsdp`."""
    over: dict[str, list[str]] = {}
    for (label, kind), count in counts.items():
        over.setdefault(label, []).append(f"{kind} ×{count}")
    return "; ".join(f"{', '.join(kinds)} over `{label}`" for label, kinds in over.items()) or "nothing"


def _plain(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (label, kind), count in counts.items():
        found.setdefault(label, {})[kind] = count
    return found
