"""Which algorithm `meshpar.collectives` should run for a message, XLA's own collective included, and why.

The kernels send single messages, with one port a rank. They are priced over the link that a profile measured for single
messages, and XLA's own collective over the link measured for that. Data sheets do not tell the two apart, so without
such a profile XLA's own is taken.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshpar.hardware.clusters import HOST_DEVICES, Link, Profile, cluster_of, gpu_of_kind, parse_profile
from meshpar.hardware.cost_breakdown import Account, Accounts, account
from meshpar.sharding.printing import Plain, Printed
from meshpar.sharding.types import MeshLike, is_int, near, problem
from meshpar.sharding.units import si

VARIABLE = "MESHPAR_CLUSTER"
"""The environment variable that names a cluster, or a profile's file."""

XLA = "xla"
"""XLA's own collective."""

# The kernel's name for it, and the account's. Ties go to the first. XLA's own is priced as NCCL's ring, by which
# `meshpar bench collectives` fits its link.
KERNELS: Mapping[str, Mapping[str, str]] = {
    "all_reduce": {
        XLA: "ring",
        "ring": "ring",
        "recursive_doubling": "recursive-doubling",
        "halving_doubling": "halving-doubling",
        "tree": "tree",
    },
    "all_gather": {XLA: "all-gather", "ring": "all-gather", "recursive_doubling": "doubling-all-gather"},
    "reduce_scatter": {XLA: "reduce-scatter", "ring": "reduce-scatter", "recursive_halving": "halving-reduce-scatter"},
}
"""Algorithms to choose from, by kernel. Bidirectional rings, root and server are never quickest by the model."""
POWERS_OF_TWO = ("doubling-all-gather", "halving-reduce-scatter")
"""What runs on a power of two of ranks only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Printed, Plain):
    """The algorithm to run for a message, and the times of all. Prints as a table."""

    kernel: str
    algorithm: str
    """As the kernel's `algorithm=` names it; `hierarchical` is `hierarchical_all_reduce`."""
    time_s: float
    alternatives: Mapping[str, Account]
    """Every algorithm that was looked at, the quickest first."""
    why: str

    def __rich__(self) -> Any:
        table = Accounts(accounts=tuple(self.alternatives.values())).__rich__()
        table.caption = f"{self.why}\n{table.caption}"
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
    """Return the algorithm that `algorithm="auto"` takes.

    If a profile has measured both XLA's own collectives and single messages along the axes (`meshpar bench collectives
    --save`), that is the quickest by the alpha-beta model. Otherwise it is XLA's own.

        print(choose("all_reduce", 25e6, 8, cluster="h100:1x8"))

    Args:
      kernel: `all_reduce`, `all_gather` or `reduce_scatter`.
      payload_bytes: of an all-gather the gathered array, else the array before.
      num_ranks: ranks that take part together.
      cluster: `h100:8x8`, a profile's file, a `Cluster`, measured `Links`, or a single `Link`. None: `links_here`, of
        the devices here, and `why` says which.
      axes: the mesh axes that the ranks differ along. Of several, all but the last may be taken across groups and the
        last inside: an all-reduce is then priced in two levels, too.
      mesh: the mesh that has these axes, in the order of the cluster's devices; without it the ranks stand one after
        the other.

    Raises:
      ValueError: no such kernel; no such cluster, or one that is too small; a profile that has not measured the axes;
        no cluster, and devices of unknown links.
    """
    if not isinstance(kernel, str) or kernel not in KERNELS:
        exists = "no algorithm is chosen for it"
        raise problem(f"kernel `{kernel}`", "choose an algorithm", exists, near(str(kernel), KERNELS))
    if not is_int(num_ranks):
        raise problem(f"kernel `{kernel}`", f"run on {num_ranks!r} ranks", "it is a whole number", "give 1 or more")
    over = links_here(kernel) if cluster is None else cluster if isinstance(cluster, Link) else parse_profile(cluster)
    names = dict(KERNELS[kernel])
    if num_ranks & (num_ranks - 1):
        names = {name: priced for name, priced in names.items() if priced not in POWERS_OF_TWO}
    if kernel == "all_reduce" and len(axes) > 1 and mesh is not None:
        names["hierarchical"] = "hierarchical"
    how: dict[str, Any] = {"axes": axes, "mesh": mesh}
    accounts = {
        name: _named(name, account(priced, payload_bytes, num_ranks, over, by_messages=name != XLA, **how))
        for name, priced in names.items()
    }
    ranked = dict(sorted(accounts.items(), key=lambda item: item[1].time_s))
    is_measured = not isinstance(over, Link) and over.compares(axes or ("ranks",))
    first = next(iter(ranked)) if is_measured else XLA
    why = _why(first, ranked[first], [item for item in ranked.items() if item[0] != first], is_measured=is_measured)
    if cluster is None and not isinstance(over, Link):
        why += f"; links: {over.source or f'{over.name}, {over.links_from}'}"
    return Choice(kernel=kernel, algorithm=first, time_s=ranked[first].time_s, alternatives=ranked, why=why)


def links_here(kernel: str) -> Profile:
    """What links the devices of the mesh in force, or else of this process.

    The profile or cluster that MESHPAR_CLUSTER names; else, of GPUs that the catalogue knows, their data sheets, and of
    CPU host devices `HOST_DEVICES`.

    Raises:
      ValueError: the links are unknown.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return parse_profile(named)
    mesh, kind = jax.sharding.get_abstract_mesh(), jax.devices()[0].device_kind
    if mesh.abstract_device is not None:
        kind = mesh.abstract_device.device_kind
    num_devices = jax.device_count() if mesh.empty else mesh.size
    gpu = gpu_of_kind(kind)
    # Devices that are only compiled for do not say how they stand in nodes.
    if gpu is not None and jax.devices()[0].device_kind == kind:
        per_node = min(jax.local_device_count(), num_devices)
        return cluster_of(gpu, nodes=-(-num_devices // per_node), gpus_per_node=per_node)
    # A mesh without devices may be of anything, and several processes talk over a network.
    if kind == "cpu" and (mesh.empty or mesh.abstract_device is not None) and jax.process_count() == 1:
        return HOST_DEVICES
    raise problem(
        kernel,
        'use algorithm="auto"',
        f"nothing says how the `{kind}` devices of this mesh are linked",
        f'name their cluster, cluster="h100:8x8" or {VARIABLE}=h100:8x8; or measure them with '
        'meshpar bench collectives --save my.json, and give cluster="my.json"',
    )


def _named(name: str, found: Account) -> Account:
    """The account of XLA's own collective under that name; others keep theirs."""
    if name != XLA:
        return found
    return dataclasses.replace(found, algorithm=dataclasses.replace(found.algorithm, name=XLA))


def _why(first: str, best: Account, rest: Sequence[tuple[str, Account]], *, is_measured: bool) -> str:
    shown = f"{first}: {si(best.time_s, 's')}, {best.steps} steps, {si(best.bytes_sent, 'B')} sent per rank"
    second, other = rest[0]
    if not is_measured:
        return (
            f"{shown}; XLA's own is taken, for no profile has measured both it and single messages here (meshpar bench "
            f"collectives --save). The model's quickest kernel: {second}, {si(other.time_s, 's')}"
        )
    if best.time_s == other.time_s:
        return f"{shown}; {second} takes as long"
    mostly = "latency" if best.latency_s > best.bandwidth_s else "bandwidth"
    slower = f"{other.time_s / best.time_s:.2f} times that" if best.time_s else "longer"
    return f"{shown}, mostly {mostly}; next {second}: {slower}"
