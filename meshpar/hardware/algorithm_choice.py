"""Choice of the algorithm for a collective, among the kernels and XLA's own collective.

A profile has two measured links per mesh axis. One is for single messages, which the kernels send through a single port
per rank. The other is for XLA's collectives. Each candidate is timed with its link. Data sheets do not distinguish the
two links, so without a profile XLA's collective is chosen.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshpar.hardware.clusters import HOST_DEVICES, VARIABLE, Link, Profile, cluster_of, gpu_of_kind, parse_profile
from meshpar.hardware.cost_breakdown import CostBreakdown, breakdown, comparison
from meshpar.sharding.errors import check_choice, check_positive_int, problem
from meshpar.sharding.printing import Plain, Printed
from meshpar.sharding.types import MeshLike
from meshpar.sharding.units import si

XLA = "xla"
"""Name of XLA's collective."""

# Names in the kernel and in `cost_breakdown`. The first of equal times wins. XLA's collective has the cost of
# NCCL's ring, with which `meshpar bench collectives` fits its link.
KERNELS: Mapping[str, Mapping[str, str]] = {
    "all_reduce": {XLA: "ring"}
    | {name: name.replace("_", "-") for name in ("ring", "recursive_doubling", "halving_doubling", "tree")},
    "all_gather": {XLA: "all-gather", "ring": "all-gather", "recursive_doubling": "doubling-all-gather"},
    "reduce_scatter": {XLA: "reduce-scatter", "ring": "reduce-scatter", "recursive_halving": "halving-reduce-scatter"},
}
"""Kernel -> name of its algorithm -> name in `cost_breakdown`.

Bidirectional rings, root and parameter server are left out, because they are never the fastest in the model.
"""
POWERS_OF_TWO = ("doubling-all-gather", "halving-reduce-scatter")
"""Algorithms that require the number of ranks to be a power of two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Printed, Plain):
    """The chosen algorithm for a message, and the times of all candidates. Prints as a table."""

    kernel: str
    algorithm: str
    """Value for the `algorithm` argument of the kernel, or `hierarchical` for `hierarchical_all_reduce`."""
    time_s: float
    alternatives: Mapping[str, CostBreakdown]
    """All candidates, ordered by time."""
    why: str

    def __rich__(self) -> Any:
        table = comparison(self.alternatives.values()).__rich__()
        table.caption = self.why
        return table


def choose(
    kernel: str,
    payload_bytes: float,
    num_ranks: int,
    *,
    cluster: str | Profile | Link | None = None,
    axes: Sequence[str] = (),
    mesh: MeshLike | None = None,
) -> Choice:
    """Return the algorithm that `algorithm="auto"` uses.

    If a profile has measured both XLA's collectives and single messages along the axes (`meshpar bench collectives
    --save`), the result is the fastest algorithm in the alpha-beta model. Otherwise it is XLA's collective.

    Args:
      kernel: `all_reduce`, `all_gather` or `reduce_scatter`.
      payload_bytes: bytes of the gathered array for an all-gather, and of the input otherwise.
      num_ranks: number of ranks.
      cluster: `h100:8x8`, the path of a profile, a `Cluster`, measured `Links`, or a single `Link`. The default is
        `links_here`, and `why` states its source.
      axes: mesh axes of the group. With several axes, the candidates of an all-reduce include the hierarchical one,
        with the last axis as the inner axis.
      mesh: the mesh with these axes, in the order of the cluster's devices. Without it, the ranks are consecutive.

    Raises:
      MeshparError: the kernel or the cluster is unknown, the cluster is too small, the profile lacks an axis, or the
        links of the local devices are unknown.

    Example:
      >>> mp.collectives.choose("all_reduce", 25e6, 8, cluster="h100:1x8").algorithm
      'xla'
    """
    check_choice("choose", "a kernel with several algorithms", tuple(KERNELS), kernel=kernel)
    check_positive_int(f"kernel `{kernel}`", "the number of ranks", num_ranks=num_ranks)
    over = links_here(kernel) if cluster is None else cluster if isinstance(cluster, Link) else parse_profile(cluster)
    names = dict(KERNELS[kernel])
    if num_ranks & (num_ranks - 1):
        names = {name: priced for name, priced in names.items() if priced not in POWERS_OF_TWO}
    if kernel == "all_reduce" and len(axes) > 1 and mesh is not None:
        names["hierarchical"] = "hierarchical"
    breakdowns = {
        name: breakdown(priced, payload_bytes, num_ranks, over, by_messages=name != XLA, axes=axes, mesh=mesh)
        for name, priced in names.items()
    }
    xla = breakdowns[XLA]  # the ring that stands for XLA's collective
    breakdowns[XLA] = dataclasses.replace(xla, algorithm=xla.algorithm._replace(name=XLA))
    ranked = dict(sorted(breakdowns.items(), key=lambda item: item[1].time_s))
    is_measured = not isinstance(over, Link) and over.compares(axes or ("ranks",))
    first = next(iter(ranked)) if is_measured else XLA
    why = _why(first, ranked[first], [item for item in ranked.items() if item[0] != first], is_measured=is_measured)
    if cluster is None and not isinstance(over, Link):
        why += f"; links: {over.source or f'{over.name}, {over.links_from}'}"
    return Choice(kernel=kernel, algorithm=first, time_s=ranked[first].time_s, alternatives=ranked, why=why)


def links_here(kernel: str) -> Profile:
    """Return the links of the devices of the current mesh, or of this process.

    If `MESHPAR_CLUSTER` is set, return its profile or cluster. Otherwise use the data sheet for GPUs of the catalogue,
    and `HOST_DEVICES` for CPU devices.
    """
    if from_environment := os.environ.get(VARIABLE):
        return parse_profile(from_environment)
    mesh, kind = jax.sharding.get_abstract_mesh(), jax.devices()[0].device_kind
    if mesh.abstract_device is not None:
        kind = mesh.abstract_device.device_kind
    num_devices = jax.device_count() if mesh.empty else mesh.size
    gpu = gpu_of_kind(kind)
    # The nodes of a compile-only topology are unknown.
    if gpu is not None and jax.devices()[0].device_kind == kind:
        per_node = min(jax.local_device_count(), num_devices)
        return cluster_of(gpu, nodes=-(-num_devices // per_node), gpus_per_node=per_node)
    # An abstract mesh can represent any devices, and multiple processes communicate over a network.
    if kind == "cpu" and (mesh.empty or mesh.abstract_device is not None) and jax.process_count() == 1:
        return HOST_DEVICES
    reason = f"the links of the `{kind}` devices of this mesh are unknown"
    fix = (
        f'set cluster="h100:8x8" or {VARIABLE}=h100:8x8, or measure them with '
        'meshpar bench collectives --save my.json, and set cluster="my.json"'
    )
    raise problem(kernel, 'use algorithm="auto"', reason, fix, code="unknown-links")


def _why(first: str, best: CostBreakdown, rest: Sequence[tuple[str, CostBreakdown]], *, is_measured: bool) -> str:
    shown = f"{first}: {si(best.time_s, 's')}, {best.steps} steps, {si(best.bytes_sent, 'B')} sent per rank"
    second, other = rest[0]
    if not is_measured:
        return (
            f"{shown}; chosen because no profile has measures of both XLA's collectives and single messages (meshpar "
            f"bench collectives --save). The fastest kernel in the model is {second} with {si(other.time_s, 's')}"
        )
    if best.time_s == other.time_s:
        return f"{shown}; {second} takes the same time"
    mostly = "latency" if best.latency_s > best.bandwidth_s else "bandwidth"
    slower = f"{other.time_s / best.time_s:.2f} times that" if best.time_s else "longer"
    return f"{shown}, mostly {mostly}; next {second}: {slower}"
