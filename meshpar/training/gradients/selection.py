"""The choice of the gradient engine for a step, and the check that it supports the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.layers.remat import offloads
from meshpar.parallel.batch import examples_of
from meshpar.parallel.execution import Execution, LayerGather
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.errors import problem
from meshpar.sharding.rules import replicated
from meshpar.sharding.types import PyTree
from meshpar.training.gradients.engine import Feature, GradientEngine, unsupported
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def engine_of(
    strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...], needed: Iterable[Feature] = ()
) -> GradientEngine:
    """Return the engine that computes the gradients of a step.

    Args:
      strategy, options: strategy and options of the step.
      batch_axes: mesh axes that shard the batch.
      needed: features that the model needs. By default, `hsdp` uses "once_across_groups" if that engine supports them.
    """
    # Local imports: `xla` needs neither the kernels nor the pipeline package.
    if strategy.pipeline is not None:
        from meshpar.training.gradients import stages

        return stages.ENGINE
    from meshpar.training.gradients import fsdp, xla

    groups, reduce = strategy.group_axes(batch_axes), options.reduce_gradients if options.accumulate > 1 else None
    if reduce is None and groups and strategy.is_hybrid and options.accumulate > 1:
        features = {*_requested_by(strategy, options), *needed}
        reduce = "once_across_groups" if features <= fsdp.LOCAL else None
    if reduce == "each_microbatch" or (reduce == "once_across_groups" and not groups):
        reduce = None
    is_local = reduce is not None or strategy.gathering.formats is not None
    if not batch_axes or not (is_local or strategy.gathering != LayerGather()):
        return xla.ENGINE
    return fsdp.engine(reduce, is_local)


def check_options(strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...]) -> None:
    """Check that the engine of a strategy supports the options of a step."""
    _check_groups(strategy, options, batch_axes)
    _check(engine_of(strategy, options, batch_axes), _requested_by(strategy, options), strategy, options)


def check_setup(setup: Setup, options: StepOptions) -> None:
    """Check that the engine of a step supports its model and its options."""
    _check_groups(setup.strategy, options, setup.batch_axes)
    features = [*_requested_by(setup.strategy, options), *_needed_by(setup)]
    _check(engine_of_setup(setup, options), features, setup.strategy, options)
    if setup.model.is_explicit and Feature.REPLICATED_INPUTS in features:
        raise unsupported(Feature.REPLICATED_INPUTS, "mp.explicit(model)")


def describe(setup: Setup, options: StepOptions, batch: PyTree = ()) -> Execution:
    """Return how the engine of a step executes it, on a global batch of arrays or shapes."""
    return engine_of_setup(setup, options).describe(setup, options).for_batch(examples_of(batch))


def engine_of_setup(setup: Setup, options: StepOptions) -> GradientEngine:
    """Return the engine of a step with this setup."""
    return engine_of(setup.strategy, options, setup.batch_axes, tuple(_needed_by(setup)))


def _check(engine: GradientEngine, features: Iterable[Feature], strategy: Strategy, options: StepOptions) -> None:
    for feature in features:
        if feature not in engine.supports:
            mode = options.reduce_gradients
            once = f" and reduce_gradients={mode!r}" if mode not in (None, "each_microbatch") else ""
            raise unsupported(feature, f"{strategy.label}{once}")


def _check_groups(strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...]) -> None:
    is_requested = options.accumulate > 1 and options.reduce_gradients == "once_across_groups"
    if is_requested and batch_axes and strategy.group_axes(batch_axes) == batch_axes:
        where = f'train_step(reduce_gradients="once_across_groups") with {strategy.label}'
        reason = f"the strategy shards no parameter over {' or '.join(f'`{axis}`' for axis in batch_axes)}"
        fix = 'use reduce_gradients="once", or hsdp()'
        raise problem(where, "divide the devices into groups", reason, fix, code="conflict")


def _requested_by(strategy: Strategy, options: StepOptions) -> Iterator[Feature]:
    if strategy.gathering.ahead or strategy.gathering.keep:
        yield Feature.LAYER_LOOP
    if options.accumulate > 1:
        yield Feature.ACCUMULATION
    if offloads(options.remat) or any(offloads(rule.value) for rule in strategy.activations.remat):
        yield Feature.HOST_OFFLOAD


def _needed_by(setup: Setup) -> Iterator[Feature]:
    variables = setup.layout.variables.extra
    if setup.model.is_explicit:
        yield Feature.EXPLICIT_AXES
    if setup.overwritten(variables):
        yield Feature.DELAYED_SCALING
    if setup.model.batch_stats(variables):
        yield Feature.BATCH_STATISTICS
    if any(rule.value is replicated for rule in setup.strategy.activations.inputs):
        yield Feature.REPLICATED_INPUTS
