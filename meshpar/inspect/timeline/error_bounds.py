"""The error bar of a predicted step.

    low   kernels at the fastest rates that the catalogue or the profile supports, all communication overlapped
    high  kernels at their expected rates, no communication overlapped

If a profile has measured matmul rates (`meshpar bench gpu`), both bounds use them. Otherwise `low` uses the data
sheet's peak and `high` the planner's assumed share of it. Fused attention has the catalogue's rates in both. Both
include launches if the profile has their time. Neither models kernels that slow each other down.
"""

from __future__ import annotations

import dataclasses

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline.simulator import Timeline, timeline
from meshpar.sharding.printing import Plain
from meshpar.sharding.units import human_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket(Plain):
    """The range in which the step time is expected."""

    low_s: float
    high_s: float
    sources: tuple[str, ...]
    """Sources of the kernel rates and of every link that is used."""


def bracket(module: Module, expected: Timeline, cluster: Cluster, cells: ScheduleCounts | None = None) -> Bracket:
    """Return the error bar of a step simulated at the cluster's expected rates."""
    sources = [f"{cluster.rates}"]
    if cluster.best_rates != cluster.rates:
        sources[0] += f"; at best, {cluster.best_rates.of_products}"
    if cluster.launch_s:
        sources.append(f"launches of {human_time(cluster.launch_s)}, measured ({cluster.source})")
    used = sorted(label for label, time_s in expected.network_s.items() if time_s)
    measured = [label for label in used if cluster.measured(label.split("*")) is not None]
    if measured:
        sources.append(f"links of {', '.join(measured)} as measured ({cluster.source})")
    if others := [label for label in used if label not in measured]:
        sources.append(f"links of {', '.join(others)} by data sheets and NCCL's latencies")
    return Bracket(
        low_s=timeline(module, (), cluster, cells, rates=cluster.best_rates).step_s,
        high_s=expected.step_s + sum(expected.hidden_s.values()),
        sources=tuple(sources),
    )
