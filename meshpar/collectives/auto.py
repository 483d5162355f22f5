"""`algorithm="auto"`: XLA's own collective or a quicker algorithm by a measured profile, decided during tracing.

The links are those of `cluster=`, else of the profile or cluster that the environment variable MESHPAR_CLUSTER names,
else, on GPUs that the catalogue knows, those of its data sheets, and on CPU host devices a measured default. Anything
else is an error. There is no ambient context for it: compiled programs are found again by their arguments, and would
outlive such a context.
"""

from __future__ import annotations

import jax

from meshpar.collectives.kernel_checks import Axis
from meshpar.hardware.algorithm_choice import XLA, Choice, choose
from meshpar.hardware.clusters import Profile
from meshpar.sharding.types import axis_sizes, problem

__all__ = ["AUTO", "XLA", "Choice", "choose", "picked"]

AUTO = "auto"


def picked(
    kernel: str, algorithm: str, payload_bytes: float, axis: Axis, num_ranks: int, cluster: str | Profile | None
) -> str:
    """Return the algorithm to run: the one given, or that of `choose`.

    Raises:
      ValueError: nothing says what the links are, or a cluster is given to an algorithm that was named.
    """
    if algorithm != AUTO:
        if cluster is not None:
            exists = "that one is named already, and looks at no links"
            fix = f"leave the cluster out, or take algorithm={AUTO!r}"
            raise problem(kernel, f"use a cluster with algorithm={algorithm!r}", exists, fix)
        return algorithm
    if num_ranks == 1:
        return "ring"  # whatever the links, there is nothing to send
    axes = (axis,) if isinstance(axis, str) else axis
    mesh = axis_sizes(jax.sharding.get_abstract_mesh())
    return choose(kernel, payload_bytes, num_ranks, cluster=cluster, axes=axes, mesh=mesh).algorithm
