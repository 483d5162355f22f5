"""The choice of the gradient engine for a step, and the check that it supports the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.layers.remat import offloads
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.errors import problem
from meshpar.sharding.rules import replicated
from meshpar.training.gradients.engine import Feature, GradientEngine, unsupported
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def deferred_axes(
    strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...], needed: Iterable[Feature] = ()
) -> tuple[str, ...]:
    """Return the axes over which gradients are reduced once, after the micro-steps ("once_across_groups").

    Each micro-step reduces gradients over the other batch axes. The result is empty in other modes.

    Args:
      strategy, options: strategy and options of the step.
      batch_axes: mesh axes that shard the batch.
      needed: features that the model needs. By default, `hsdp` uses "once_across_groups" if that engine supports them.
    """
    group_axes = strategy.group_axes(batch_axes)
    if not group_axes or options.accumulate == 1 or strategy.pipeline is not None:
        return ()
    if options.reduce_gradients is None and strategy.is_hybrid:
        from meshpar.training.gradients import per_device

        features = {*_requested_by(strategy, options), *needed}
        return group_axes if features <= per_device.ACROSS_GROUPS.supports else ()
    return group_axes if options.reduce_gradients == "once_across_groups" else ()


def deferred_axes_of(setup: Setup, options: StepOptions) -> tuple[str, ...]:
    """Return the `deferred_axes` of a step with this setup."""
    return deferred_axes(setup.strategy, options, setup.batch_axes, _needed_by(setup))


def engine_of(
    strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...], needed: Iterable[Feature] = ()
) -> GradientEngine:
    """Return the engine that computes the gradients of a step; arguments as for `deferred_axes`."""
    # Local imports: `xla` needs neither the kernels nor the pipeline package.
    if strategy.pipeline is not None:
        from meshpar.training.gradients import stages

        return stages.ENGINE
    if deferred_axes(strategy, options, batch_axes, needed):
        from meshpar.training.gradients import per_device

        return per_device.ACROSS_GROUPS
    if batch_axes and (strategy.quantize is not None or options.is_once):
        from meshpar.training.gradients import per_device

        return per_device.ENGINE
    if batch_axes and strategy.prefetched_axes:
        from meshpar.training.gradients import fsdp_prefetch

        return fsdp_prefetch.ENGINE
    from meshpar.training.gradients import xla

    return xla.ENGINE


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
    if strategy.prefetched_axes:
        yield Feature.PREFETCH
    if strategy.quantize is not None:
        yield Feature.QUANTIZE
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
