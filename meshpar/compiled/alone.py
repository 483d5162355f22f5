"""The loss of one micro-step as one device by itself would compute it: traced, for what does not depend on the mesh."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.extend import core
from jax.sharding import AbstractMesh

from meshpar.moe.layer import MoESpec
from meshpar.sharding.context import use
from meshpar.sharding.types import PyTree
from meshpar.training.precision import cast_floating, numerics
from meshpar.training.reports import collecting
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep


def asked_of(step: TrainStep, state: TrainState, batch: PyTree) -> tuple[MoESpec, ...]:
    """What layers of experts are asked in one step, in all its micro-steps together; without any, nothing is traced.

    Arguments as for `traced_alone`.
    """
    if not any("expert" in (decision.leaf.names or ()) for decision in state.setup.table.params):
        return ()
    layers = (one for one in traced_alone(step, state, batch).layers if isinstance(one, MoESpec))
    return tuple(dict.fromkeys(one._replace(tokens=one.tokens * step.options.accumulate) for one in layers))


class Alone(NamedTuple):
    """A loss, traced."""

    jaxpr: core.Jaxpr
    layers: tuple[object, ...]
    """What layers said they were asked to do (`meshpar.training.reports.describe`)."""


def traced_alone(step: TrainStep, state: TrainState, batch: PyTree) -> Alone:
    """The forward pass of one micro-step.

    Kernels that split work over devices may leave some of it out, as ring attention does behind a causal mask; alone
    they cannot.

    Args:
      step: made by `train_step`.
      state: arrays or their abstract values.
      batch: the global batch, arrays or their abstract values; a micro-step has its share of the rows.
    """
    setup, options = state.setup, step.options
    one = AbstractMesh((1,) * len(setup.mesh.axis_names), setup.mesh.axis_names, axis_types=setup.mesh.axis_types)
    layers: list[object] = []

    def loss(params: PyTree, extra: PyTree, micro: PyTree, key_data: jax.Array) -> jax.Array:
        # Reports of their own make every function inside be traced anew, so that no layer is missed.
        with use(one, setup.strategy), numerics(options.precision, None), collecting() as reports:
            model = setup.model.bind(cast_floating(params, options.precision.compute), extra)
            out = step.loss_fn(model, micro, jax.random.wrap_key_data(key_data))[0]
        layers.extend(reports.layers)
        return out

    micro = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // options.accumulate, *x.shape[1:]), x.dtype), batch
    )
    params, extra, key = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, state.extra, state.key)
    )
    return Alone(jax.make_jaxpr(loss)(params, extra, micro, key).jaxpr, tuple(layers))
