"""Messages and FLOPs of an optimizer's kernels under a layout, from the trace of its update."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.inspect.traced_collectives import Message, messages
from meshpar.layers.precision import cast_floating, products
from meshpar.optim.orthogonalized import UPDATES, Updating
from meshpar.planner.layout import Placed
from meshpar.planner.workload import Workload
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.types import PyTree


@dataclasses.dataclass(frozen=True)
class Update:
    """Messages and FLOPs of an update on one device."""

    sent: tuple[Message, ...] = ()
    """Messages of kernels, such as Muon's exchange of matrices. Collectives that XLA inserts are not included."""
    narrow_flops: float = 0.0
    """FLOPs of matmuls with operands of at most two bytes per element."""
    wide_flops: float = 0.0
    """FLOPs of other matmuls."""


def update_of(placed: Placed) -> Update:
    """Return the update under a layout.

    It is empty for optimizers without matmuls, such as AdamW: they only move their state, which the layout accounts
    for.
    """
    work, cache = placed.workload, placed.workload.updates
    unsharded = cache.get(None)
    if unsharded is None:
        unsharded = cache[None] = _trace_update(work, None)
    if not unsharded.narrow_flops + unsharded.wide_flops:
        return unsharded
    specs = tuple(PartitionSpec(*weight.update) for weight in placed.weights)
    key = tuple(placed.sizes.items()), specs
    if key not in cache:
        paths = (leaf.path for leaf in work.leaves)
        sizes: dict[str, Any] = placed.sizes
        mesh = MeshSpec(**sizes).abstract()
        cache[key] = _trace_update(work, Updating(mesh, dict(zip(paths, specs, strict=True))))
    return cache[key]


def _trace_update(work: Workload, updating: Updating | None) -> Update:
    params: PyTree = jax.eval_shape(lambda x: cast_floating(x, work.precision.params), work.model.abstract().params)
    state = jax.eval_shape(work.tx.init, params)
    with UPDATES.set(updating):
        jaxpr = jax.make_jaxpr(work.tx.update)(params, state, params).jaxpr
    flops = {True: 0.0, False: 0.0}
    for count, eqn in products(jaxpr):
        flops[np.dtype(eqn.invars[0].aval.dtype).itemsize <= 2] += count
    return Update(messages(jaxpr), flops[True], flops[False])
