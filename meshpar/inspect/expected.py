"""Expected collectives of a training step, from its strategy and options, without compiling it.

Each `Parallelism` of the strategy yields the collectives that XLA inserts for its rules. With pipeline
parallelism, each stage has expected collectives that follow from the schedule:

    over axes that split the batch
      weights before use        an all-gather before the first tick, gather="step"
      gradients                 reduced once, after the last tick, outside of every loop; those of embedding and head
                                over the stages, too, where several make them (tied embeddings, a part on two stages)
    over axes inside a stage
      gradients, the sequence   an all-reduce in every W of what every rank has whole, as norm scales
      split between layers
      what layers promise       without stages, for the stage's own layers, as often as it runs an F or a B; what stands
                                before the layers (behind them) on the stage of the first (last) part

Messages between stages, and weights gathered in a tick slot, are kernel messages, which are read from the traced step.
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
from meshpar.parallel.batch import without_whole
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params as leaves
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
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def promised(
    setup: Setup,
    options: StepOptions,
    batch: Any,
    *,
    on_cpu: bool = False,
    exchanges_rows: bool = False,
    vocab_chunks: int = 1,
    uses: Mapping[str, ParamUsage] | None = None,
) -> tuple[ExpectedCollective, ...]:
    """Return the expected collectives of a training step without pipeline stages.

    Args:
      setup: the state's: model, mesh, strategy and every leaf's decision.
      options: the step's.
      batch: the global batch, or its shapes.
      on_cpu: promise what XLA:CPU makes of it: float32 on the wire, and a sum of several all-reduces instead of one
        all-reduce of the sum.
      exchanges_rows: whether the traced step looks tokens up by `meshpar.models.embedding_lookup`.
      vocab_chunks: in how many the output layer is used; `traced.vocab_chunks` tells.
      uses: of parameters by path, for a model that lays no activations out; `uses.uses` tells.
    """
    step_spec = facts_of(setup, options, batch, on_cpu=on_cpu, uses=uses)
    step_spec = dataclasses.replace(step_spec, exchanges_rows=exchanges_rows, vocab_chunks=vocab_chunks)
    free = set(step_spec.unannotated_axes)
    expected = setup.strategy.expected_collectives(step_spec)
    return tuple(_not_due(one) if free & set(one.axes) else one for one in expected)


def _not_due(one: ExpectedCollective) -> ExpectedCollective:
    """Relax the counts for models without activation constraints, where XLA may choose another lowering."""
    of_leaf = one.role in (WEIGHTS, GRADIENTS, RENEWED)
    counts = tuple((axis, 0, most) for axis, _, most in one.counts)
    return one if of_leaf else dataclasses.replace(one, count=(0, one.count[1]), counts=counts)


def facts_of(
    setup: Setup,
    options: StepOptions,
    batch: Any,
    *,
    on_cpu: bool = False,
    uses: Mapping[str, ParamUsage] | None = None,
) -> StepSpec:
    """Return the properties of a training step; arguments as for `promised`."""
    sizes, batch_axes, rules = axis_sizes(setup.mesh), setup.batch_axes, setup.strategy.activations
    rows, tokens = rows_and_tokens(batch, math.prod(sizes[axis] for axis in batch_axes) * options.accumulate)
    grads, updates = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (setup.layout.grads, setup.layout.updates))
    specs = zip(with_layers(setup.table.params), grads, updates, strict=True)
    return setup.strategy.step_spec(
        sizes,
        weights=tuple(Weight(*one) for one in specs),
        batch_axes=batch_axes,
        rows=rows,
        tokens=tokens,
        accumulate=options.accumulate,
        is_once=options.is_once,
        is_remat=options.remat is not None or any(rule.value is not None for rule in rules.remat),
        interleave=options.interleave,
        compute=options.precision.compute,
        reduce=options.precision.reduce,
        narrow=options.precision.narrow(one.path for one in setup.table.params),
        by_row=options.precision.narrow((one.path for one in setup.table.params), BY_ROW),
        computes={one.path: dtype for one in setup.table.params if (dtype := rules.dtype_in(one.path))},
        on_cpu=on_cpu,
        uses=uses or {},
    )


def scopes_above(setup: Setup) -> int | None:
    """Named scopes above a model's own modules, where it lays nothing out itself, so that rules do by their paths.

    None: the model names its activations. Known once a step is traced.
    """
    if not setup.has_free_activations:
        return None
    return 2 if setup.model.kind == "linen" else 1  # Linen's outermost module has a scope, by its class


def rows_and_tokens(batch: Any, split: int) -> tuple[int, int | None]:
    """Of one of `split` parts of a batch: its rows, and how many tokens they hold; None when they hold none."""
    shapes = [(np.shape(x), x.dtype) for x in jax.tree.leaves(without_whole(batch))]
    rows = max((shape[0] for shape, _ in shapes if shape), default=0) // split
    # Rows of whole numbers are tokens where nothing else is in the batch; bytes are pixels.
    has_floats = any(len(shape) > 1 and dtype.kind not in "iub" for shape, dtype in shapes)
    has_images = any(len(shape) > 2 for shape, _ in shapes)
    ids = [shape for shape, dtype in shapes if len(shape) == 2 and dtype.kind in "iu" and dtype.itemsize > 1]
    tokens = [] if has_floats or has_images else [math.prod(shape) // split for shape in ids]
    return rows, max(tokens, default=None)


# ---- Stages ----------------------------------------------------------------------------------------------------------


def promised_by_stage(
    setup: Setup, options: StepOptions, batch: Any, parts: StagePartition, *, on_cpu: bool = False
) -> tuple[tuple[ExpectedCollective, ...], ...]:
    """Return the expected collectives of each stage of a pipelined training step.

    Args:
      setup, options, batch, on_cpu: as for `promised`.
      parts: how stages cut the model.
    """
    step = _Staged.of(setup, options, batch, parts, on_cpu)
    everywhere = list(step.everywhere())
    inside = [(side, one) for side in _SIDES for one in step.of_side(side)]
    found = []
    for stage in range(parts.schedule.stages):
        own = [*step.summed_in_cells(stage), *(step.on_stage(side, one, stage) for side, one in inside)]
        found.append(merged(one for one in (*everywhere, *own) if one.count[1]))
    return tuple(found)


_Side = Literal["first", "layers", "last"]
_SIDES: tuple[_Side, ...] = ("first", "layers", "last")


@dataclasses.dataclass(frozen=True)
class _Staged:
    setup: Setup
    step_spec: StepSpec
    """With microbatches for micro-steps, gathered and reduced once."""
    parts: StagePartition
    traffic: StageTraffic
    weights: tuple[Weight, ...]
    """Those of `facts` as one stage holds them: of stacked layers its share, with the stages taken for granted."""

    @staticmethod
    def of(setup: Setup, options: StepOptions, batch: Any, parts: StagePartition, on_cpu: bool) -> _Staged:
        asked = dataclasses.replace(options, accumulate=parts.schedule.microbatches, reduce_gradients="once")
        step_spec = facts_of(setup, asked, batch, on_cpu=on_cpu)
        step_spec = dataclasses.replace(step_spec, by_stages=True, is_once=True, quantize=None)
        axis = _stage_axis(setup)
        weights = tuple(of_stage(one, axis, parts.schedule.stages) for one in step_spec.weights)
        return _Staged(setup, step_spec, parts, traffic(parts.schedule), weights)

    def everywhere(self) -> Iterator[ExpectedCollective]:
        """Weights gathered before the first tick, gradients reduced after the last, new values after the update."""
        step_spec = dataclasses.replace(self.step_spec, weights=self.weights, sequence_axes=(), is_tied=False)
        pipelined = self.setup.strategy.pipeline
        assert pipelined is not None
        for weight, whole in zip(self.weights, self.step_spec.weights, strict=True):
            in_cells = whole.decision.leaf.is_stacked and pipelined.gather == "microbatch"
            gathered = None if in_cells else leaves.gathered(step_spec, weight)
            reduced = self._over_stages(weight, leaves.reduced(step_spec, weight))
            outside = None if reduced is None else dataclasses.replace(reduced, outside=True)
            yield from (one for one in (gathered, outside, leaves.renewed(step_spec, weight)) if one is not None)

    def _over_stages(self, weight: Weight, reduced: ExpectedCollective | None) -> ExpectedCollective | None:
        """The reduction of a gradient, over the stages too where several make it."""
        step_spec, path = self.step_spec, weight.decision.path
        stages = self.traffic.first_stages if path in self.parts.first else frozenset()
        stages |= self.traffic.last_stages if path in self.parts.last else frozenset()
        if len(stages) < 2:
            return reduced
        axis = _stage_axis(self.setup)
        kept, _ = split_for_good(self.step_spec, weight)
        return ExpectedCollective(
            role="gradients of the ends, summed over the stages",
            kind="sum",
            axes=step_spec.ordered({axis, *(reduced.axes if reduced else ())}),
            scattered=reduced.scattered if reduced else (),
            whole=True,
            elements=weight.decision.leaf.size // step_spec.num_shards(kept),
            dtype=step_spec.wire(step_spec.reduce_dtype(weight.decision)),
            count=(1, 1),
            tensors=(path,),
            of_leaf=True,
        )

    def summed_in_cells(self, stage: int) -> Iterator[ExpectedCollective]:
        """Gradients of what is replicated over the sequence's axes, norm scales say: summed over them in each W."""
        step_spec, count, parts = self.step_spec, self.traffic, self.parts
        for weight, whole in zip(self.weights, step_spec.weights, strict=True):
            decision, is_layer = weight.decision, whole.decision.leaf.is_stacked
            own = set(split_axes(step_spec, decision.spec)) | set(owned_axes(step_spec, decision))
            axes = step_spec.ordered(set(step_spec.sequence_axes) - own)
            if not axes:
                continue
            layers = decision.leaf.shape[0] if is_layer else 1
            kept, _ = split_for_good(self.step_spec, weight)
            path = decision.path
            uses = count.first[stage] * (path in parts.first) + count.last[stage] * (path in parts.last)
            of_part = layers * parts.schedule.stages // parts.schedule.num_parts
            runs = int(count.ops[stage, W] * of_part if is_layer else uses)
            slices = step_spec.interleave if is_layer else 1
            yield ExpectedCollective(
                role="gradients of a split sequence",
                kind="sum",
                axes=axes,
                elements=decision.leaf.size // layers // step_spec.num_shards(kept),
                dtype=step_spec.wire(step_spec.reduce_dtype(decision)),
                count=(runs, slices * runs),
                tensors=(path,),
            )

    def of_side(self, side: _Side) -> tuple[ExpectedCollective, ...]:
        """What the work before the layers, inside or behind them promises, in all microbatches together."""
        layers = frozenset(one.decision.path for one in self.step_spec.weights if one.decision.leaf.is_stacked)
        paths = {"first": self.parts.first, "layers": layers, "last": self.parts.last}[side]
        mine = tuple(one for one in self.step_spec.weights if one.decision.path in paths)
        step_spec = dataclasses.replace(self.step_spec, weights=mine)
        return (*scales.promised(step_spec), *self.setup.strategy.promise_of_layers(step_spec))

    def on_stage(self, side: _Side, one: ExpectedCollective, stage: int) -> ExpectedCollective:
        """What is promised for all layers and microbatches, as far as it is this stage's."""
        runs = {"first": self.traffic.first, "layers": self.traffic.ops[:, F], "last": self.traffic.last}[side]
        parts = self.parts.schedule.num_parts if side == "layers" else 1
        share = Fraction(int(runs[stage]), parts * self.parts.schedule.microbatches)
        is_backward, (least, most) = "backward" in one.role, one.count
        if side == "last" and is_backward:  # what stands behind the layers always has its input's gradient taken
            least = most if not self.step_spec.on_cpu else max(least, 1)
        # A table that is looked up and multiplied by stands on both sides, once for each.
        is_both = any(path in self.parts.first & self.parts.last for path in one.tensors)
        if (side == "first" and one.role == VOCABULARY) or (is_both and is_backward == (side == "first")):
            least = most = 0
        counts = [share * count for count in (least, most)]
        return dataclasses.replace(one, count=(math.floor(counts[0]), math.ceil(counts[1])))


def split_for_good(step_spec: StepSpec, weight: Weight) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes that split a leaf for good, and those that split the batch, over which it is gathered."""
    split = split_axes(step_spec, weight.decision.spec)
    over = set(step_spec.batch_axes) - set(owned_axes(step_spec, weight.decision))
    return tuple(axis for axis in split if axis not in over), tuple(axis for axis in split if axis in over)


def _stage_axis(setup: Setup) -> str:
    assert setup.strategy.pipeline is not None
    return setup.strategy.pipeline.axis
