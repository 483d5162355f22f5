"""The error bar of a predicted step: what it takes where all goes well and where nothing does, and by whose figures.

    low   products at the best rate known of them, every message hidden behind compute
    high  products at the rate expected of them, no message hidden

The rate of a product is that measured of square matrices with as many FLOPs, where a profile has some (`meshpar bench
gpu`): then both ends have it. Without, low is at the data sheet's peak and high at the planner's assumed share of it.
Both have a launch for every kernel, where the profile tells what it takes; kernels that slow each other down are in
neither.
"""

from __future__ import annotations

import dataclasses

from meshpar.compiled.clock import work
from meshpar.compiled.clock.timeline import Timeline
from meshpar.compiled.hlo import Module
from meshpar.planner.hardware import MATMUL_EFFICIENCY, Cluster
from meshpar.sharding.printing import Plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket(Plain):
    """Between which times a step is expected."""

    low_s: float
    high_s: float
    sources: tuple[str, ...]
    """Of the rates of products, and of every link that is used."""


def bracket(module: Module, timeline: Timeline, cluster: Cluster) -> Bracket:
    """The error bar of a simulated step."""
    measured = _share_measured(module, cluster)
    best, expected = (1.0, MATMUL_EFFICIENCY) if measured is None else (measured, measured)
    rest_s = timeline.memory_s + timeline.launch_s + timeline.bubble_s
    products = f"products at {cluster.gpu.name}'s data sheet peak at best, at an assumed {MATMUL_EFFICIENCY:.0%} of it"
    if measured is not None:
        products = f"products at {measured:.0%} of the data sheet's peak, measured by size ({cluster.source})"
    return Bracket(
        low_s=timeline.compute_s / best + rest_s,
        high_s=timeline.compute_s / expected + rest_s + sum(timeline.network_s.values()),
        sources=(products, *_launches(cluster), *_links(timeline, cluster)),
    )


def _share_measured(module: Module, cluster: Cluster) -> float | None:
    """Of the peak, what the program's products reach together by the rates measured of their sizes."""
    products = [one for one in work.matmuls(module) if one.flops_per_step]
    if not cluster.products or not products:
        return None
    flops = sum(one.flops_per_step for one in products)
    # n × n × n multiply-adds are 2 n³ FLOPs.
    time_s = sum(one.flops_per_step / cluster.product_flops_per_s((one.flops / 2) ** (1 / 3)) for one in products)
    return min(flops / time_s / cluster.gpu.bf16_flops_per_s, 1.0)


def _launches(cluster: Cluster) -> list[str]:
    return [f"launches of {cluster.launch_s * 1e6:.1f} µs, measured ({cluster.source})"] * bool(cluster.launch_s)


def _links(timeline: Timeline, cluster: Cluster) -> list[str]:
    used = sorted(label for label, time_s in timeline.network_s.items() if time_s)
    known = [label for label in used if cluster.measured(label.split("*")) is not None]
    rest = [label for label in used if label not in known]
    found = [f"links of {', '.join(known)} as measured ({cluster.source})"] if known else []
    return found + ([f"links of {', '.join(rest)} by data sheets and NCCL's latencies"] if rest else [])
