"""What an optimizer's own kernels send and multiply under a layout, read from the trace of its update."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.inspect.traced_collectives import Message, messages
from meshpar.layers.precision import cast_floating, products
from meshpar.optim.orthogonalized import Updating
from meshpar.planner.layout import Placed
from meshpar.planner.workload import Workload
from meshpar.sharding.context import within
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.types import PyTree


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of the parameters on one device."""

    sent: tuple[Message, ...] = ()
    """By kernels, as Muon's exchange of matrices; what other optimizers make XLA send, nobody promises."""
    narrow_flops: float = 0.0
    """Of products of operands of two bytes at the most."""
    wide_flops: float = 0.0
    """Of products of wider ones."""


def update_of(placed: Placed) -> Update:
    """The update under a layout; nothing, and nothing is traced, where the optimizer multiplies no matrices.

    AdamW and others that work number by number move their state alone, which is in the layout's bytes.
    """
    work, known = placed.workload, placed.workload.updates
    alone = known.get(None)
    if alone is None:
        alone = known[None] = _counted(work, None)
    if not alone.narrow_flops + alone.wide_flops:
        return alone
    specs = tuple(PartitionSpec(*one.update) for one in placed.weights)
    key = tuple(placed.sizes.items()), specs
    if key not in known:
        paths = (leaf.path for leaf in work.leaves)
        sizes: dict[str, Any] = placed.sizes
        mesh = MeshSpec(**sizes).abstract()
        known[key] = _counted(work, Updating(mesh, dict(zip(paths, specs, strict=True))))
    return known[key]


def _counted(work: Workload, updating: Updating | None) -> Update:
    params: PyTree = jax.eval_shape(lambda x: cast_floating(x, work.precision.params), work.model.abstract().params)
    state = jax.eval_shape(work.tx.init, params)
    with within(updates=updating):
        jaxpr = jax.make_jaxpr(work.tx.update)(params, state, params).jaxpr
    flops = {True: 0.0, False: 0.0}
    for count, eqn in products(jaxpr):
        flops[np.dtype(eqn.invars[0].aval.dtype).itemsize <= 2] += count
    return Update(messages(jaxpr), flops[True], flops[False])
