"""`algorithm="auto"`: the quickest algorithm by the alpha-beta model, decided while the program is traced.

The links are those of `cluster=`, else of the profile or cluster that the environment variable MESHPAR_CLUSTER names,
else, on GPUs that the catalogue knows, those of its data sheets. Anything else is an error. There is no ambient context
for it: compiled programs are found again by their arguments, and would outlive such a context.
"""

from __future__ import annotations

import os

import jax

from meshpar.collectives.check import Axis
from meshpar.planner.choice import Choice, choose
from meshpar.planner.hardware import Profile, cluster_of, gpu_of_kind, parse_profile
from meshpar.sharding.types import axis_sizes, problem

__all__ = ["AUTO", "Choice", "choose", "picked"]

AUTO = "auto"
VARIABLE = "MESHPAR_CLUSTER"


def picked(
    kernel: str, algorithm: str, payload_bytes: float, axis: Axis, num_ranks: int, cluster: str | Profile | None
) -> str:
    """The algorithm to run: the one asked for, or the quickest.

    Raises:
      ValueError: nothing says what the links are, or a cluster is given to an algorithm that was named.
    """
    if algorithm != AUTO:
        if cluster is not None:
            raise problem(
                kernel,
                f"use a cluster with algorithm={algorithm!r}",
                "that one is named already, and looks at no links",
                f"leave the cluster out, or take algorithm={AUTO!r}",
            )
        return algorithm
    if num_ranks == 1:
        return "ring"  # whatever the links, there is nothing to send
    axes = (axis,) if isinstance(axis, str) else axis
    mesh = axis_sizes(jax.sharding.get_abstract_mesh())
    profile = parse_profile(cluster) if cluster is not None else _profile_here(kernel)
    return choose(kernel, payload_bytes, num_ranks, cluster=profile, axes=axes, mesh=mesh).algorithm


def _profile_here(kernel: str) -> Profile:
    named = os.environ.get(VARIABLE)
    if named:
        return parse_profile(named)
    mesh = jax.sharding.get_abstract_mesh()
    kind = mesh.abstract_device.device_kind if mesh.abstract_device is not None else jax.devices()[0].device_kind
    gpu = gpu_of_kind(kind)
    # Devices that are only compiled for do not tell how they stand in nodes.
    if gpu is None or jax.devices()[0].device_kind != kind:
        raise problem(
            kernel,
            f"use algorithm={AUTO!r}",
            f"nothing says how the `{kind}` devices of this mesh are linked",
            f'name their cluster, cluster="h100:8x8" or {VARIABLE}=h100:8x8; or measure them with '
            'meshpar bench collectives --save my.json, and give cluster="my.json"',
        )
    per_node = min(jax.local_device_count(), mesh.size)
    return cluster_of(gpu, nodes=-(-mesh.size // per_node), gpus_per_node=per_node)
