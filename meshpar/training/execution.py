"""The description of a step that all gradient engines share."""

from __future__ import annotations

from typing import Any, Protocol

from meshpar.layers.precision import BY_ROW
from meshpar.parallel.execution import Execution, Weight
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.rules import REFINES, axes_in
from meshpar.training.options import StepOptions


class Sharded(Protocol):
    """A strategy on a mesh: a `Setup`, or a layout of the planner."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis, in the mesh's order."""

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one rank that shard the batch."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The parameters with the shardings of their gradients and updates."""


def described(setup: Sharded, options: StepOptions, **engine: Any) -> Execution:
    """Resolve the options of a step on a mesh. The activation rules determine the tensor and context axes.

    Args:
      setup: strategy, mesh and parameters.
      options: the options of the step.
      **engine: fields of `Execution` that depend on the gradient engine.
    """
    sizes, rules, precision, batch_axes = setup.sizes, setup.strategy.activations, options.precision, setup.batch_axes

    def axes_for(*names: str) -> set[str]:
        matches = (rules.name_rule(name) for name in names)
        axes = {axis for rule in matches if rule is not None for axis in axes_in(rule.value)}
        return {axis for axis in axes if sizes.get(axis, 1) > 1}

    width = axes_for(*(name for name in rules.names if name not in ("batch", "act_expert", "seq", *REFINES)))
    context = axes_for("seq") - width - set(batch_axes)
    sequence = axes_for("norm_seq") - context
    paths = [weight.decision.path for weight in setup.weights]
    execution = Execution(
        sizes=sizes,
        weights=setup.weights,
        batch_axes=batch_axes,
        tensor_axes=tuple(axis for axis in sizes if axis in (width | sequence) - set(batch_axes)),
        sequence_axes=tuple(axis for axis in sizes if axis in sequence),
        context_axes=tuple(axis for axis in sizes if axis in context),
        micro_steps=options.accumulate,
        batch_slices=options.batch_slices,
        remat=options.remat,
        recomputes=options.remat is not None or any(rule.value is not None for rule in rules.remat),
        compute=precision.compute,
        reduce=precision.reduce,
        low_precision=precision.narrow(paths),
        rowwise_fp8=precision.narrow(paths, BY_ROW),
        computes={path: dtype for path in paths if (dtype := rules.dtype_in(path))},
        is_tied=sum(weight.leaf.has("vocab") for weight in setup.weights) == 1,
        **engine,
    )
    return execution.with_uses({})
