"""`algorithm="auto"`: chooses the algorithm of a collective during tracing from a measured profile.

The interconnect is that of the argument `cluster`, or else of the profile or cluster in the environment variable
MESHPAR_CLUSTER. Without both, GPUs in the catalogue use their data sheets and CPU devices a measured default; other
devices are an error. An ambient context cannot set it, because jax's cache of compiled programs would ignore it.
"""

from __future__ import annotations

import jax

from meshpar.collectives.kernel_checks import Axis, axis_names
from meshpar.hardware.algorithm_choice import XLA, Choice, choose
from meshpar.hardware.clusters import Profile
from meshpar.sharding.types import axis_sizes, problem

__all__ = ["AUTO", "XLA", "Choice", "choose", "resolve_algorithm"]

AUTO = "auto"


def resolve_algorithm(
    kernel: str, algorithm: str, payload_bytes: float, axis: Axis, num_ranks: int, cluster: str | Profile | None
) -> str:
    """Return `algorithm`, or for "auto" the algorithm that `choose` returns."""
    if algorithm != AUTO:
        if cluster is not None:
            requested, fix = f"use cluster with algorithm={algorithm!r}", "leave out cluster, or use algorithm='auto'"
            raise problem(kernel, requested, "only the choice of 'auto' depends on the cluster", fix, "conflict")
        return algorithm
    if num_ranks == 1:
        return "ring"  # nothing is sent
    mesh = axis_sizes(jax.sharding.get_abstract_mesh())
    return choose(kernel, payload_bytes, num_ranks, cluster=cluster, axes=axis_names(axis), mesh=mesh).algorithm
