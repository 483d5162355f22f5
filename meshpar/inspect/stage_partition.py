"""Partition of a model into pipeline stages: stage outputs, embedding parameters and head parameters.

The partition follows from a trace of the loss function with a local batch and without the layers. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from meshpar.layers.losses import scalar
from meshpar.layers.precision import cast_floating, numerics
from meshpar.layers.scan import Layer, StageRunner, scanned, with_aux
from meshpar.parallel.batch import as_given
from meshpar.pipeline.jaxpr_slicing import Cut, flat_jaxpr
from meshpar.schedules import Schedule
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import tracing, within
from meshpar.sharding.types import PyTree, axes_of_spec, axis_sizes, num_shards, spec_axes, tree_leaves_with_paths
from meshpar.training.gradients.stages import reads_of_layers
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePartition:
    """Division of a model over the stages of a pipeline schedule."""

    schedule: Schedule
    stage_outputs: tuple[jax.ShapeDtypeStruct, ...]
    """Local shapes of the arrays that a stage sends to the next stage for each microbatch."""
    first: frozenset[str]
    """Paths of the parameters that are used before the layers."""
    last: frozenset[str]
    """Paths of the parameters that are used after the layers; tied parameters are in both."""
    reads: Mapping[str, tuple[bool, bool, bool]]
    """For each layer parameter, whether the forward, input-gradient and weight-gradient ops (F, B, W) read its values.
    Empty if no parameter is sharded over batch axes."""


def parts_of(step: TrainStep, state: TrainState, batch: PyTree) -> StagePartition:
    """Return the partition of a step whose strategy has stages."""
    setup = state.setup
    assert setup.strategy.pipeline is not None
    schedule = setup.strategy.pipeline.table()
    sharding = setup.batch_sharding
    batch_axes = set(axes_of_spec(sharding.spec))
    inside = {axis: size for axis, size in axis_sizes(setup.mesh).items() if axis not in batch_axes}
    shards = num_shards(sharding.spec, setup.mesh) * schedule.microbatches
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((np.shape(x)[0] // shards, *np.shape(x)[1:]), x.dtype), batch)
    # Trace for the local batch, but keep the axes inside a stage, because the model constrains its activations.
    inside[setup.strategy.pipeline.axis] = 1
    sizes = tuple(inside.get(axis, 1) for axis in setup.mesh.axis_names)
    stage_mesh = AbstractMesh(sizes, setup.mesh.axis_names, axis_types=setup.mesh.axis_types)
    layer_inputs: list[Any] = []

    def without_layers(layer: Layer, x: Any, params: PyTree) -> Any:
        layer_inputs[:] = [x]
        y, aux = jax.eval_shape(lambda: with_aux(scanned(layer, x, params)))
        # The outputs do not depend on the inputs. That separates embedding parameters from head parameters.
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), y if aux is None else (y, aux))

    def embedding_and_head(params: PyTree, extra: PyTree, micro: PyTree, key_data: jax.Array) -> tuple[Any, Any]:
        with (
            tracing(stage_mesh, setup.strategy),
            numerics(step.options.precision, None),
            within(runner=StageRunner(without_layers)),
        ):
            model = setup.model.bind(cast_floating(params, step.options.precision.compute), extra)
            loss = scalar(step.loss_fn(model, as_given(micro), jax.random.wrap_key_data(key_data))[0])
        return (layer_inputs[0], loss), ()

    params, extra, key = jax.eval_shape(lambda *x: x, *with_auto_types((state.params, state.extra, state.key)))
    closed, _ = flat_jaxpr(embedding_and_head, params, extra, micro, key)
    outputs = len(closed.jaxpr.outvars)
    paths = [path for path, _ in tree_leaves_with_paths(params)]

    def needs(*wanted: bool) -> frozenset[str]:
        used = Cut(closed, first=wanted).first_needs
        return frozenset(path for path, use in zip(paths, used, strict=False) if use)

    reads: dict[str, tuple[bool, bool, bool]] = {}
    if any(batch_axes & set(axes_of_spec(decision.spec)) for decision in setup.table.params):
        compute = jax.eval_shape(lambda params: cast_floating(params, step.options.precision.compute), params)
        with tracing(stage_mesh, setup.strategy), numerics(step.options.precision, step.options.remat):
            reads = reads_of_layers(step.loss_of(setup), setup, compute, extra, micro, key)
    return StagePartition(
        schedule=schedule,
        stage_outputs=tuple(_on_one_device(closed.jaxpr, x, inside) for x in closed.jaxpr.outvars[:-1]),
        first=needs(*[True] * (outputs - 1), False),
        last=needs(*[False] * (outputs - 1), True),
        reads=reads,
    )


def _on_one_device(jaxpr: Any, x: Any, inside: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """Return the shape of an array on one device: smaller than `x` only if a sharding constraint produced it."""
    producer = next((eqn for eqn in jaxpr.eqns if x in eqn.outvars), None)
    dims = list(x.aval.shape)
    if producer is not None and producer.primitive.name == "sharding_constraint":
        for dim, entry in enumerate(producer.params["sharding"].spec):
            dims[dim] //= math.prod(inside.get(axis, 1) for axis in spec_axes(entry))
    return jax.ShapeDtypeStruct(tuple(dims), x.aval.dtype)
