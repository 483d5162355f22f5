"""Expected collectives of the stages of a pipelined step, derived from its schedule.

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
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

from meshpar.parallel.execution import Execution, PipelineStages, StageUses, Weight, owned_axes, split_axes
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params
from meshpar.parallel.expected.collective import ExpectedCollective, merged
from meshpar.parallel.expected.matmuls import VOCABULARY
from meshpar.parallel.strategy import Strategy
from meshpar.pipeline.traffic import StageTraffic, traffic
from meshpar.schedules import Schedule
from meshpar.schedules.ops import F, W
from meshpar.schedules.uniform import uniform
from meshpar.training.state import Setup


def scopes_above(setup: Setup) -> int | None:
    """Return how many named scopes enclose the model; None if the model constrains its activations.

    `source_scopes.rule_for` removes these scopes from module paths. Trace a step before the call, because tracing
    detects the constraints.
    """
    return num_outer_scopes(setup) if setup.has_free_activations else None


def num_outer_scopes(setup: Setup) -> int:
    """Return how many named scopes enclose the model. Linen's outermost module adds a scope named after its class."""
    return 2 if setup.model.kind == "linen" else 1


# ---- Stages ----------------------------------------------------------------------------------------------------------


def expected_by_stage(strategy: Strategy, execution: Execution) -> tuple[tuple[ExpectedCollective, ...], ...]:
    """Return the expected collectives of each stage of a pipelined training step."""
    assert execution.pipeline is not None
    assert execution.stage_uses is not None
    schedule = execution.pipeline.table()
    step = _Staged(strategy, execution, execution.pipeline, execution.stage_uses, schedule, traffic(schedule))
    common = list(step.everywhere())
    layers = [(side, collective) for side in _SIDES for collective in step.of_side(side)]
    result = []
    for stage in range(schedule.stages):
        local = [*step.summed_in_cells(stage), *(step.on_stage(side, each, stage) for side, each in layers)]
        result.append(merged(collective for collective in (*common, *local) if collective.count[1]))
    return tuple(result)


_Side = Literal["first", "layers", "last"]
_SIDES: tuple[_Side, ...] = ("first", "layers", "last")


@dataclasses.dataclass(frozen=True)
class _Staged:
    strategy: Strategy
    execution: Execution
    pipeline: PipelineStages
    uses: StageUses
    schedule: Schedule
    traffic: StageTraffic

    def everywhere(self) -> Iterator[ExpectedCollective]:
        """Yield the collectives outside the tick loop: gathered weights, reduced gradients, gathered new parameters."""
        weights = self.execution.stage_weights
        execution = dataclasses.replace(self.execution, weights=weights, sequence_axes=(), is_tied=False)
        for weight, full in zip(weights, self.execution.weights, strict=True):
            per_microbatch = full.decision.leaf.is_stacked and self.pipeline.gather == "microbatch"
            gathered = None if per_microbatch else params.gathered(execution, weight)
            reduced = self._over_stages(weight, params.reduced(execution, weight))
            outside = None if reduced is None else dataclasses.replace(reduced, outside_loops=True)
            yield from filter(None, (gathered, outside, params.renewed(execution, weight)))

    def _over_stages(self, weight: Weight, reduced: ExpectedCollective | None) -> ExpectedCollective | None:
        """Add the stage axis to the reduction of a gradient if several stages compute parts of the gradient."""
        execution, path = self.execution, weight.decision.path
        stages = self.traffic.first_stages if path in self.uses.first else frozenset()
        stages |= self.traffic.last_stages if path in self.uses.last else frozenset()
        if len(stages) < 2:
            return reduced
        axis = self.pipeline.axis
        model_axes, _ = kept_and_gathered_axes(self.execution, weight)
        return ExpectedCollective(
            role="gradients of embedding and head, over the stages",
            kind="sum",
            axes=execution.ordered({axis, *(reduced.axes if reduced else ())}),
            scattered=reduced.scattered if reduced else (),
            may_all_reduce=True,
            elements=weight.decision.leaf.size // execution.num_shards(model_axes),
            dtype=execution.wire(execution.reduce_dtype(weight.decision)),
            count=(1, 1),
            tensors=(path,),
            is_param=True,
        )

    def summed_in_cells(self, stage: int) -> Iterator[ExpectedCollective]:
        """Yield gradient all-reduces in the W ops of a stage, for parameters replicated over sequence axes."""
        execution, count, used = self.execution, self.traffic, self.uses
        for weight, full in zip(execution.stage_weights, execution.weights, strict=True):
            decision, is_layer = weight.decision, full.decision.leaf.is_stacked
            sharded = set(split_axes(execution, decision.spec)) | set(owned_axes(execution, decision))
            axes = execution.ordered(set(execution.sequence_axes) - sharded)
            if not axes:
                continue
            layers = decision.leaf.shape[0] if is_layer else 1
            model_axes, _ = kept_and_gathered_axes(self.execution, weight)
            path = decision.path
            uses = count.first[stage] * (path in used.first) + count.last[stage] * (path in used.last)
            layers_per_chunk = layers * self.schedule.stages // self.schedule.num_parts
            runs = int(count.ops[stage, W] * layers_per_chunk if is_layer else uses)
            slices = execution.batch_slices if is_layer else 1
            # XLA may reduce once after a loop over groups, whose events add these gradients.
            may_defer = not is_layer and uniform(self.schedule) is not None
            yield ExpectedCollective(
                role="gradients with sequence parallelism",
                kind="sum",
                axes=axes,
                elements=decision.leaf.size // layers // execution.num_shards(model_axes),
                dtype=execution.wire(execution.reduce_dtype(decision)),
                count=(min(runs, 1) if may_defer else runs, slices * runs),
                tensors=(path,),
            )

    def of_side(self, side: _Side) -> tuple[ExpectedCollective, ...]:
        """Return the collectives of embedding, layers or head, counted over all layers and microbatches."""
        layers = frozenset(w.decision.path for w in self.execution.weights if w.decision.leaf.is_stacked)
        paths = {"first": self.uses.first, "layers": layers, "last": self.uses.last}[side]
        weights = tuple(weight for weight in self.execution.weights if weight.decision.path in paths)
        execution = dataclasses.replace(self.execution, weights=weights)
        return (*scales.expected_collectives(execution), *self.strategy.activation_collectives(execution))

    def on_stage(self, side: _Side, collective: ExpectedCollective, stage: int) -> ExpectedCollective:
        """Return a collective of embedding, layers or head with its counts on a single stage."""
        runs = {"first": self.traffic.first, "layers": self.traffic.ops[:, F], "last": self.traffic.last}[side]
        parts = self.schedule.num_parts if side == "layers" else 1
        share = Fraction(int(runs[stage]), parts * self.schedule.microbatches)
        is_backward, (minimum, maximum) = "backward" in collective.role, collective.count
        if collective.role == scales.SCALES and collective.stack > 1 and uniform(self.schedule) is not None:
            # If a stage has a single chunk, XLA may move computations with its weights out of the loop over ticks.
            minimum = collective.stack if self.schedule.chunks == 1 else minimum
        if side == "last" and is_backward:  # the input of the head always needs a gradient
            minimum = maximum if not self.execution.on_cpu else max(minimum, 1)
        # A tied table is on both sides: its forward sum belongs to the lookup, its backward sum to the head.
        is_tied = any(path in self.uses.first & self.uses.last for path in collective.tensors)
        if (side == "first" and collective.role == VOCABULARY) or (is_tied and is_backward == (side == "first")):
            minimum = maximum = 0
        return dataclasses.replace(collective, count=(math.floor(share * minimum), math.ceil(share * maximum)))


def kept_and_gathered_axes(execution: Execution, weight: Weight) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes over which a parameter stays sharded, and the batch axes over which it is gathered before use."""
    axes = split_axes(execution, weight.decision.spec)
    gathered = set(execution.batch_axes) - set(owned_axes(execution, weight.decision))
    return tuple(axis for axis in axes if axis not in gathered), tuple(axis for axis in axes if axis in gathered)
