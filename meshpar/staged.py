"""A training step's loss run by stages: the user's loss function, cut where the model runs its stacked layers.

    loss_fn(model, batch, key):   embedding ─► scan_layers ─► head, loss
                                  first part │  each stage  │ last part

The loss function is traced three times. Before the layers and behind them it is traced as it is, with the layers left
out; inside, with the layers of one part. Nobody has to write a model in pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.pipeline.executor import Aux, Functions, Micro
from meshpar.pipeline.gradients import Params, Pipeline
from meshpar.pipeline.layers import Layer, Run, running, scanned
from meshpar.pipeline.schedules import Schedule, make
from meshpar.precision import Precision
from meshpar.rules import resolve
from meshpar.state import Setup, TrainState
from meshpar.strategies import Pipelined
from meshpar.types import Leaf, PyTree, axis_sizes, problem, spec_axes, tree_leaves_with_paths

Loss = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]]
"""(params, extra, batch, key) -> (loss, (metrics, extra))."""


def schedule_of(pipelined: Pipelined) -> Schedule:
    """The table that a strategy names."""
    if pipelined.schedule.endswith(".csv"):
        return Schedule.from_csv(pipelined.schedule)
    options = {} if pipelined.chunks is None else {"chunks": pipelined.chunks}
    return make(pipelined.schedule, pipelined.stages, pipelined.microbatches, **options)


def staged_gradients(
    loss: Loss,
    state: TrainState,
    batch: PyTree,
    key: jax.Array,
    *,
    params: PyTree,
    grad_specs: PyTree,
    batch_axes: tuple[str, ...],
    precision: Precision,
    weight: str | None,
) -> tuple[jax.Array, dict[str, jax.Array], PyTree]:
    """Means over all rows: loss, metrics, and gradients by parameter.

    Args:
      loss: of whole models.
      state: whose strategy has stages.
      batch, key: as a step gets them.
      params: in the compute dtype, laid out as the state's are.
      grad_specs: how gradients come out.
      batch_axes: mesh axes of more than one rank that split the batch.
      precision: of the step.
      weight: metric by which microbatches are weighed.

    Raises:
      ValueError: a model whose layers are not stacked, or not run by `meshpar.pipeline.scan_layers`; layers that the
        schedule's parts do not divide; rows that the microbatches do not.
    """
    setup, pipelined = state.setup, state.setup.strategy.pipeline
    assert pipelined is not None
    schedule = schedule_of(pipelined)
    _check(setup, schedule, pipelined)
    cut = _Cut.of(setup, schedule, pipelined)
    _check_rows(batch, schedule, batch_axes, axis_sizes(setup.mesh))
    pipe = Pipeline(
        functions=cut.functions(loss, params, weight),
        schedule=schedule,
        mesh=setup.mesh,
        axis=pipelined.axis,
        batch_axes=batch_axes,
        gather=pipelined.gather,
        grad_dtype=precision.reduce_dtype,
    )
    specs, out = cut.specs(setup.layout.params), cut.specs(grad_specs)
    late = jnp.zeros((schedule.stages, 0), jnp.float32)
    sums, grads = pipe.sums(cut.parted(params), specs, out, batch, key, late)
    shards = math.prod(axis_sizes(setup.mesh)[axis] for axis in batch_axes)
    total = sums.weight if weight is not None else jnp.asarray(schedule.microbatches * shards, sums.weight.dtype)
    mean = jax.tree.map(lambda x: x / total.astype(x.dtype), (sums.loss, sums.metrics, grads))
    return mean[0], mean[1], cut.joined(mean[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A model's parameters as those of stacked layers, by part, and the others."""

    structure: Any
    is_layer: tuple[bool, ...]
    """Of each leaf."""
    num_layers: int
    num_parts: int
    axis: str

    @staticmethod
    def of(setup: Setup, schedule: Schedule, pipelined: Pipelined) -> _Cut:
        leaves = [decision.leaf for decision in setup.table.params]
        is_layer = tuple((leaf.names or ())[:1] == ("layers",) for leaf in leaves)
        stacked = [leaf for leaf, stack in zip(leaves, is_layer, strict=True) if stack]
        counts = {leaf.shape[0] for leaf in stacked}
        where = f"strategy {setup.strategy.label}"
        if len(counts) != 1:
            raise problem(
                where,
                f"give layers to {schedule.stages} stages",
                f"there are stacks of {sorted(counts)} layers" if counts else "no parameter has a dim named `layers`",
                "stack the layers' parameters along a first dim named `layers` and run them by "
                "meshpar.pipeline.scan_layers",
            )
        num_layers, parts = counts.pop(), schedule.num_parts
        if num_layers % parts:
            near = [n for n in (num_layers // parts * parts, -(-num_layers // parts) * parts) if n]
            raise problem(
                f"{where}, `{stacked[0].path}` dim 0 (`layers`, size {num_layers})",
                f"be cut into {parts} equal parts by schedule `{schedule.name}`",
                f"{num_layers} is not a multiple of {parts}",
                f"use {' or '.join(str(n) for n in near)} layers, or stages (times chunks) that divide {num_layers}",
            )
        return _Cut(
            structure=jax.tree.structure(setup.layout.variables.params),
            is_layer=is_layer,
            num_layers=num_layers,
            num_parts=parts,
            axis=pipelined.axis,
        )

    # -- Trees --------------------------------------------------------------------------------------------------------

    def parted(self, params: PyTree) -> Params:
        """Lists of leaves; stacks as `[part, layers of a part, ...]`."""
        stacks, ends = self._sorted(jax.tree.leaves(params))
        return Params([x.reshape(self.num_parts, -1, *x.shape[1:]) for x in stacks], ends)

    def joined(self, params: Params) -> PyTree:
        """`parted` undone."""
        return self._tree([x.reshape(self.num_layers, *x.shape[2:]) for x in params.parts], params.ends)

    def specs(self, specs: PyTree) -> Params:
        """Of the same lists."""
        stacks, ends = self._sorted(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)))
        return Params([PartitionSpec(self.axis, None, *spec[1:]) for spec in stacks], ends)

    def _sorted(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        both = list(zip(leaves, self.is_layer, strict=True))
        return [x for x, stack in both if stack], [x for x, stack in both if not stack]

    def _tree(self, stacks: list[Any], ends: list[Any]) -> PyTree:
        of = {True: iter(stacks), False: iter(ends)}
        return jax.tree.unflatten(self.structure, [next(of[stack]) for stack in self.is_layer])

    # -- Functions ----------------------------------------------------------------------------------------------------

    def functions(self, loss: Loss, params: PyTree, weight: str | None) -> Functions:
        """The parts of a loss. Parameters for which a part has no use are zeros in it, which nothing computes with."""
        like = jax.eval_shape(self.parted, params)
        no_parts = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in like.parts]

        def traced(parts: list[Any], ends: list[Any], micro: Micro, run: Run) -> Any:
            calls: list[Any] = []

            def counted(layer: Layer, x: Any, params: PyTree) -> Any:
                calls.append(x)
                return run(layer, x, params)

            with running(counted):
                value, (metrics, _) = loss(self._tree(parts, ends), {}, micro.rows, micro.key)
            _check_once(len(calls))
            return value, metrics

        def first(ends: list[Any], micro: Micro) -> PyTree:
            got: list[Any] = []

            def run(layer: Layer, x: Any, params: PyTree) -> Any:
                got.append(x)
                return x

            traced(_zeros(no_parts), ends, micro, run)
            return got[0]

        def inside(parts: list[Any], ends: list[Any], x: PyTree, micro: Micro) -> PyTree:
            got: list[Any] = []

            def run(layer: Layer, before: Any, params: PyTree) -> Any:
                got.append(scanned(layer, x, params))
                return got[0]

            traced(parts, ends, micro, run)
            return got[0]

        def stage(parts: list[Any], x: PyTree, micro: Micro) -> tuple[PyTree, Aux]:
            return inside(parts, _zeros(like.ends), x, micro), Aux(jnp.zeros((), jnp.float32), {})

        def last(ends: list[Any], y: PyTree, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
            return traced(_zeros(no_parts), ends, micro, lambda layer, x, params: y)

        return Functions(first=first, stage=stage, last=last, weight=weight, inside=inside)


def _zeros(like: list[Any]) -> list[Any]:
    return [jnp.zeros(x.shape, x.dtype) for x in like]


def _check_once(calls: int) -> None:
    if calls != 1:
        raise problem(
            "the model under pipeline_parallel",
            "be cut where it runs its stacked layers",
            f"it calls meshpar.pipeline.scan_layers {calls or 'no'} times",
            "run the layers that stages are to share by one call of it",
        )


def _check(setup: Setup, schedule: Schedule, pipelined: Pipelined) -> None:
    where, sizes = f"strategy {setup.strategy.label}", axis_sizes(setup.mesh)
    if sizes.get(pipelined.axis) != schedule.stages:
        raise problem(
            where,
            f"run {schedule.stages} stages over mesh axis `{pipelined.axis}`",
            f"the mesh has {', '.join(f'{k}={v}' for k, v in sizes.items())}",
            f"write MeshSpec({pipelined.axis}={schedule.stages}, ...), or pipeline_parallel(stages=...) of its size",
        )
    for names in (("batch", "norm_seq", "act_embed"), ("batch", "seq", "act_embed")):
        like = Leaf(path="activations", shape=(setup.mesh.size,) * 3, dtype=np.dtype(np.float32), names=names)
        for name, entry in zip(names[1:], resolve(like, setup.strategy.activations, setup.mesh).spec[1:], strict=False):
            if split := [axis for axis in spec_axes(entry) if sizes[axis] > 1]:
                raise problem(
                    f"{where}, activations dim `{name}`",
                    f"be split over {', '.join(split)} where they go from stage to stage",
                    "stages hand on activations that are split over the batch only",
                    "leave out context_parallel() and tensor_parallel(sequence=True); tensor_parallel() works",
                )
    if jax.tree.leaves(setup.layout.variables.extra):
        paths = [path for path, _ in tree_leaves_with_paths(setup.layout.variables.extra)]
        raise problem(
            f"`{paths[0]}` of the model under {where}",
            "be carried from microbatch to microbatch",
            "stages run microbatches in an order of their own, and none sees them all in time",
            "keep no state beside parameters: draw random numbers from the key the loss function is given",
        )


def _check_rows(batch: PyTree, schedule: Schedule, batch_axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    shards = math.prod(sizes[axis] for axis in batch_axes)
    unit = shards * schedule.microbatches
    path, x = tree_leaves_with_paths(batch)[0]
    if x.shape[0] % unit:
        over = " × ".join(f"`{axis}`" for axis in batch_axes) or "one device"
        raise problem(
            f"batch leaf `{path}` of shape {x.shape} dim 0 (`batch`)",
            f"be split over {over} ({shards}) in {schedule.microbatches} microbatches",
            f"{x.shape[0]} rows are not a multiple of {unit}",
            f"use a batch of {-(-x.shape[0] // unit) * unit}",
        )
