"""Expected collectives of a training step, derived from its strategy without a compiled program.

Each component of the strategy yields the collectives that XLA inserts for its rules
(`Parallelism.expected_collectives`). With a pipeline they differ by stage and follow from the schedule:

    over batch axes
      weights                 all-gathered before the first tick (gather="step")
      gradients               reduced once after the last tick, outside all loops. Gradients of embedding and head are
                              also reduced over the stages if they are computed on more than one stage (tied
                              embeddings, or a chunk on two stages).
    over axes within a stage
      replicated parameters   with sequence parallelism, gradients (of norm scales, for example) are all-reduced
                              in each weight-gradient op
      layers                  as without a pipeline, for the layers of the stage, once per forward or backward op;
                              collectives before (after) the layers belong to the stage of the first (last) chunk

Messages between stages and weights gathered per microbatch are sent by kernels, and are read from the traced step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

import jax
import numpy as np

from meshpar.inspect.stage_partition import StagePartition
from meshpar.layers.precision import BY_ROW
from meshpar.parallel.batch import rows_of
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params
from meshpar.parallel.expected.matmuls import VOCABULARY
from meshpar.parallel.expected.step_spec import (
    GRADIENTS,
    RENEWED,
    WEIGHTS,
    ExpectedCollective,
    ParamUsage,
    StepSpec,
    Weight,
    merged,
    of_stage,
    owned_axes,
    split_axes,
    with_layers,
)
from meshpar.pipeline.traffic import StageTraffic, traffic
from meshpar.schedules.ops import F, W
from meshpar.sharding.types import axis_sizes, is_spec
from meshpar.training.gradients.selection import deferred_axes_of
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def expected_collectives(
    setup: Setup, options: StepOptions, batch: Any, **program: Any
) -> tuple[ExpectedCollective, ...]:
    """Return the expected collectives of a training step without pipeline stages.

    Args:
      setup: model, mesh, strategy and sharding decisions of the state.
      options: the options of the step.
      batch: the global batch, as arrays or shapes.
      **program: fields of `StepSpec` that follow from the compiler and the traced step: `on_cpu`, `exchanges_rows`,
        `vocab_chunks` and `uses`.
    """
    step_spec = step_spec_of(setup, options, batch, **program)
    unannotated = set(step_spec.unannotated_axes)

    def optional(collective: ExpectedCollective) -> ExpectedCollective:
        # The sharding of activations over an unannotated axis is unknown, so XLA may use another form.
        if not unannotated & set(collective.axes) or collective.role in (WEIGHTS, GRADIENTS, RENEWED):
            return collective
        counts = tuple((axis, 0, maximum) for axis, _, maximum in collective.counts)
        return dataclasses.replace(collective, count=(0, collective.count[1]), counts=counts)

    return tuple(map(optional, setup.strategy.expected_collectives(step_spec)))


def step_spec_of(
    setup: Setup, options: StepOptions, batch: Any, *, uses: Mapping[str, ParamUsage] | None = None, **program: Any
) -> StepSpec:
    """Describe a step for the strategy components. The arguments are those of `expected_collectives`."""
    sizes, batch_axes, rules = axis_sizes(setup.mesh), setup.batch_axes, setup.strategy.activations
    rows, tokens = rows_and_tokens(batch, math.prod(sizes[axis] for axis in batch_axes) * options.accumulate)
    grads, updates = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (setup.layout.grads, setup.layout.updates))
    weights = map(Weight, with_layers(setup.table.params), grads, updates)
    paths = [decision.path for decision in setup.table.params]
    return setup.strategy.step_spec(
        sizes,
        weights=tuple(weights),
        batch_axes=batch_axes,
        rows=rows,
        tokens=tokens,
        accumulate=options.accumulate,
        is_once=options.is_once,
        deferred_axes=deferred_axes_of(setup, options),
        is_remat=options.remat is not None or any(rule.value is not None for rule in rules.remat),
        interleave=options.interleave,
        compute=options.precision.compute,
        reduce=options.precision.reduce,
        low_precision=options.precision.narrow(paths),
        rowwise_fp8=options.precision.narrow(paths, BY_ROW),
        computes={path: dtype for path in paths if (dtype := rules.dtype_in(path))},
        uses=uses or {},
        **program,
    )


def scopes_above(setup: Setup) -> int | None:
    """Return how many named scopes enclose the model; None if the model constrains its activations.

    `source_scopes.rule_for` removes these scopes from module paths. Trace a step before the call, because tracing
    detects the constraints.
    """
    if not setup.has_free_activations:
        return None
    return 2 if setup.model.kind == "linen" else 1  # Linen's outermost module adds a scope named after its class


def rows_and_tokens(batch: Any, split: int) -> tuple[int, int | None]:
    """Return (examples, tokens) per shard of a batch with `split` shards. Without tokens, the second is None."""
    shapes = [(np.shape(x), x.dtype) for x in jax.tree.leaves(rows_of(batch))]
    rows = max((shape[0] for shape, _ in shapes if shape), default=0) // split
    # Integer matrices are tokens if the batch has no floats or images. 8-bit integers are pixels.
    has_floats = any(len(shape) > 1 and dtype.kind not in "iub" for shape, dtype in shapes)
    has_images = any(len(shape) > 2 for shape, _ in shapes)
    ids = [shape for shape, dtype in shapes if len(shape) == 2 and dtype.kind in "iu" and dtype.itemsize > 1]
    tokens = [] if has_floats or has_images else [math.prod(shape) // split for shape in ids]
    return rows, max(tokens, default=None)


# ---- Stages ----------------------------------------------------------------------------------------------------------


def expected_by_stage(
    setup: Setup, options: StepOptions, batch: Any, parts: StagePartition, *, on_cpu: bool = False
) -> tuple[tuple[ExpectedCollective, ...], ...]:
    """Return the expected collectives of each stage of a pipelined training step."""
    step = _Staged.of(setup, options, batch, parts, on_cpu)
    common = list(step.everywhere())
    layers = [(side, collective) for side in _SIDES for collective in step.of_side(side)]
    result = []
    for stage in range(parts.schedule.stages):
        local = [*step.summed_in_cells(stage), *(step.on_stage(side, each, stage) for side, each in layers)]
        result.append(merged(collective for collective in (*common, *local) if collective.count[1]))
    return tuple(result)


_Side = Literal["first", "layers", "last"]
_SIDES: tuple[_Side, ...] = ("first", "layers", "last")


@dataclasses.dataclass(frozen=True)
class _Staged:
    setup: Setup
    step_spec: StepSpec
    """The step as if microbatches were micro-steps, with weights gathered once and gradients reduced once."""
    parts: StagePartition
    traffic: StageTraffic
    weights: tuple[Weight, ...]
    """`step_spec.weights` with the shapes and specs within a single stage."""

    @staticmethod
    def of(setup: Setup, options: StepOptions, batch: Any, parts: StagePartition, on_cpu: bool) -> _Staged:
        options = dataclasses.replace(options, accumulate=parts.schedule.microbatches, reduce_gradients="once")
        step_spec = step_spec_of(setup, options, batch, on_cpu=on_cpu)
        step_spec = dataclasses.replace(step_spec, is_pipelined=True, is_once=True, quantize=None)
        axis = _stage_axis(setup)
        weights = tuple(of_stage(weight, axis, parts.schedule.stages) for weight in step_spec.weights)
        return _Staged(setup, step_spec, parts, traffic(parts.schedule), weights)

    def everywhere(self) -> Iterator[ExpectedCollective]:
        """Yield the collectives outside the tick loop: gathered weights, reduced gradients, gathered new parameters."""
        step_spec = dataclasses.replace(self.step_spec, weights=self.weights, sequence_axes=(), is_tied=False)
        pipelined = self.setup.strategy.pipeline
        assert pipelined is not None
        for weight, full in zip(self.weights, self.step_spec.weights, strict=True):
            per_microbatch = full.decision.leaf.is_stacked and pipelined.gather == "microbatch"
            gathered = None if per_microbatch else params.gathered(step_spec, weight)
            reduced = self._over_stages(weight, params.reduced(step_spec, weight))
            outside = None if reduced is None else dataclasses.replace(reduced, outside_loops=True)
            yield from filter(None, (gathered, outside, params.renewed(step_spec, weight)))

    def _over_stages(self, weight: Weight, reduced: ExpectedCollective | None) -> ExpectedCollective | None:
        """Add the stage axis to the reduction of a gradient if several stages compute parts of the gradient."""
        step_spec, path = self.step_spec, weight.decision.path
        stages = self.traffic.first_stages if path in self.parts.first else frozenset()
        stages |= self.traffic.last_stages if path in self.parts.last else frozenset()
        if len(stages) < 2:
            return reduced
        axis = _stage_axis(self.setup)
        model_axes, _ = kept_and_gathered_axes(self.step_spec, weight)
        return ExpectedCollective(
            role="gradients of embedding and head, over the stages",
            kind="sum",
            axes=step_spec.ordered({axis, *(reduced.axes if reduced else ())}),
            scattered=reduced.scattered if reduced else (),
            may_all_reduce=True,
            elements=weight.decision.leaf.size // step_spec.num_shards(model_axes),
            dtype=step_spec.wire(step_spec.reduce_dtype(weight.decision)),
            count=(1, 1),
            tensors=(path,),
            is_param=True,
        )

    def summed_in_cells(self, stage: int) -> Iterator[ExpectedCollective]:
        """Yield gradient all-reduces in the W ops of a stage, for parameters replicated over sequence axes."""
        step_spec, count, parts = self.step_spec, self.traffic, self.parts
        for weight, full in zip(self.weights, step_spec.weights, strict=True):
            decision, is_layer = weight.decision, full.decision.leaf.is_stacked
            sharded = set(split_axes(step_spec, decision.spec)) | set(owned_axes(step_spec, decision))
            axes = step_spec.ordered(set(step_spec.sequence_axes) - sharded)
            if not axes:
                continue
            layers = decision.leaf.shape[0] if is_layer else 1
            model_axes, _ = kept_and_gathered_axes(self.step_spec, weight)
            path = decision.path
            uses = count.first[stage] * (path in parts.first) + count.last[stage] * (path in parts.last)
            layers_per_chunk = layers * parts.schedule.stages // parts.schedule.num_parts
            runs = int(count.ops[stage, W] * layers_per_chunk if is_layer else uses)
            slices = step_spec.interleave if is_layer else 1
            yield ExpectedCollective(
                role="gradients with sequence parallelism",
                kind="sum",
                axes=axes,
                elements=decision.leaf.size // layers // step_spec.num_shards(model_axes),
                dtype=step_spec.wire(step_spec.reduce_dtype(decision)),
                count=(runs, slices * runs),
                tensors=(path,),
            )

    def of_side(self, side: _Side) -> tuple[ExpectedCollective, ...]:
        """Return the collectives of embedding, layers or head, counted over all layers and microbatches."""
        layers = frozenset(w.decision.path for w in self.step_spec.weights if w.decision.leaf.is_stacked)
        paths = {"first": self.parts.first, "layers": layers, "last": self.parts.last}[side]
        weights = tuple(weight for weight in self.step_spec.weights if weight.decision.path in paths)
        step_spec = dataclasses.replace(self.step_spec, weights=weights)
        return (*scales.expected_collectives(step_spec), *self.setup.strategy.activation_collectives(step_spec))

    def on_stage(self, side: _Side, collective: ExpectedCollective, stage: int) -> ExpectedCollective:
        """Return a collective of embedding, layers or head with its counts on a single stage."""
        runs = {"first": self.traffic.first, "layers": self.traffic.ops[:, F], "last": self.traffic.last}[side]
        parts = self.parts.schedule.num_parts if side == "layers" else 1
        share = Fraction(int(runs[stage]), parts * self.parts.schedule.microbatches)
        is_backward, (minimum, maximum) = "backward" in collective.role, collective.count
        if side == "last" and is_backward:  # the input of the head always needs a gradient
            minimum = maximum if not self.step_spec.on_cpu else max(minimum, 1)
        # A tied table is on both sides: its forward sum belongs to the lookup, its backward sum to the head.
        is_tied = any(path in self.parts.first & self.parts.last for path in collective.tensors)
        if (side == "first" and collective.role == VOCABULARY) or (is_tied and is_backward == (side == "first")):
            minimum = maximum = 0
        return dataclasses.replace(collective, count=(math.floor(share * minimum), math.ceil(share * maximum)))


def kept_and_gathered_axes(step_spec: StepSpec, weight: Weight) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes over which a parameter stays sharded, and the batch axes over which it is gathered before use."""
    axes = split_axes(step_spec, weight.decision.spec)
    gathered = set(step_spec.batch_axes) - set(owned_axes(step_spec, weight.decision))
    return tuple(axis for axis in axes if axis not in gathered), tuple(axis for axis in axes if axis in gathered)


def _stage_axis(setup: Setup) -> str:
    assert setup.strategy.pipeline is not None
    return setup.strategy.pipeline.axis
