"""Table of the collectives of each strategy, from compiled programs of a small decoder.

strategy ─► abstract state ─► compiled for a pod ─► census ─► collectives of a layer ─► row
"""

from __future__ import annotations

import contextlib
import dataclasses
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
"""Default cluster of the table."""
MODEL = TransformerConfig(
    vocab_size=80, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=768
)
"""A decoder with seven weight matrices and two norm scales per layer."""
BATCH = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}


@dataclasses.dataclass(frozen=True)
class ReferenceCase:
    """A strategy on a mesh of eight devices."""

    strategy: str
    mesh: str
    split: str
    """The sharded arrays, as text."""

    def state(self) -> TrainState:
        """Return the abstract state of the decoder with this strategy."""
        mesh = MeshSpec.parse(self.mesh).abstract()
        return abstract_state(MODEL.build(), optax.adam(1e-3), mesh=mesh, strategy=parse_strategy(self.strategy))


CASES = (
    ReferenceCase("ddp()", "data=8", "batch"),
    ReferenceCase("zero1()", "fsdp=8", "+ optimizer state"),
    ReferenceCase("zero2()", "fsdp=8", "+ gradients"),
    ReferenceCase("zero3()", "fsdp=8", "+ parameters"),
    ReferenceCase("hsdp()", "data=2,fsdp=4", "as zero3 within groups of 4; replicated over two groups"),
    ReferenceCase("ddp() | tensor_parallel()", "tensor=8", "weight matrices within a layer"),
    ReferenceCase("ddp() | tensor_parallel(sequence=True)", "tensor=8", "+ sequence between layers' matmuls"),
    ReferenceCase("fsdp() | tensor_parallel()", "fsdp=4,tensor=2", "weights over both axes"),
    ReferenceCase("ddp() | context_parallel()", "context=8", "sequence"),
    ReferenceCase("ddp() | context_parallel(kind='all-to-all')", "context=8", "sequence; heads inside attention"),
    ReferenceCase("fsdp(quantize='int8')", "fsdp=8", "as zero3, sent in int8"),
)
"""Strategies of the table, in the order of its rows."""


def step() -> TrainStep:
    """Return the training step: bfloat16 compute on float32 parameters, gradients reduced in float32."""
    return train_step(next_token_loss, precision=Precision(compute="bfloat16"))


def report(case: ReferenceCase, pod: PodProcess, cluster: str = CLUSTER) -> Report:
    """Compile the step of a case and return its report."""
    return explain(step(), case.state(), BATCH, cluster, pod=pod)


# ---- The table -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """Sharding and collectives of each strategy. The README contains its `markdown`."""

    cluster: str
    cases: tuple[ReferenceCase, ...]
    reports: tuple[Report, ...]

    @property
    def markdown(self) -> str:
        """The table in Markdown, without a final line break."""
        heads = ("strategy", "mesh", "sharded", "collectives per layer", "once per step", "bytes per step")
        rows = [_row(case, report) for case, report in zip(self.cases, self.reports, strict=True)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *rows))

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **dataclasses.asdict(case),
                "layer": _counts(report, in_layer=True),
                "once": _counts(report, in_layer=False),
                "totals": report.to_json()["totals"],
            }
            for case, report in zip(self.cases, self.reports, strict=True)
        ]
        return {"cluster": self.cluster, "rows": rows}


def strategy_table(cluster: str | None = None, *, pod: PodProcess | None = None) -> StrategyTable:
    """Compile the decoder with every strategy and return the table."""
    target = parse_cluster(cluster or CLUSTER)
    require_aot(target.name)
    with contextlib.nullcontext(pod) if pod is not None else PodProcess() as process:
        reports = tuple(report(case, process, target.name) for case in CASES)
    return StrategyTable(cluster=target.name, cases=CASES, reports=reports)


def _row(case: ReferenceCase, report: Report) -> tuple[str, ...]:
    sent = sum(item.collective.bytes_sent_per_step for item in report.collectives)
    strategy = " &#124; ".join(f"`mp.{part}`" for part in case.strategy.split(" | "))
    in_layer, once = (
        "; ".join(
            f"{', '.join(f'{kind} ×{count}' for kind, count in kinds.items())} over `{axes}`"
            for axes, kinds in _counts(report, in_layer=in_layer).items()
        )
        or "nothing"
        for in_layer in (True, False)
    )
    return strategy, case.mesh.replace(",", ", "), case.split, in_layer, once, human_bytes(sent)


def _counts(report: Report, *, in_layer: bool) -> dict[str, dict[str, int]]:
    """Return axes -> kind -> number of arrays, sent per layer or once per step. Small arrays are left out."""
    counts: dict[tuple[str, str], int] = {}
    for array in (array for item in report.collectives for array in per_array(item.collective)):
        is_in_layer = any(loop.trip_count == MODEL.num_layers for loop in array.loops)
        if is_in_layer == in_layer and array.payload_bytes > SMALL * 4:
            key = (array.axes_label, array.logical_kind)
            counts[key] = counts.get(key, 0) + array.count_per_step // (MODEL.num_layers if in_layer else 1)
    order = list(report.mesh)

    def rank(key: tuple[str, str]) -> tuple[int, str]:
        return min((order.index(axis) for axis in key[0].split("*") if axis in order), default=0), key[1]

    by_axes: dict[str, dict[str, int]] = {}
    for label, kind in sorted(counts, key=rank):
        by_axes.setdefault(label, {})[kind] = counts[label, kind]
    return by_axes
