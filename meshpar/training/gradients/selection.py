"""The choice of the gradient engine for a step, and the check that it supports what the step needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax

from meshpar.layers.remat import offloads
from meshpar.parallel.batch import StepBatch
from meshpar.parallel.strategy import Strategy
from meshpar.training.gradients.engine import Feature, GradientEngine, unsupported
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


def engine_of(strategy: Strategy, options: StepOptions, batch_axes: tuple[str, ...]) -> GradientEngine:
    """Return the engine that computes the gradients of a step, whose batch is sharded over `batch_axes`."""
    # Local imports: `xla` needs neither the kernels nor the pipeline package.
    if strategy.pipeline is not None:
        from meshpar.training.gradients import stages

        return stages.ENGINE
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
    _check(engine_of(strategy, options, batch_axes), _requested_by(strategy, options), strategy, options)


def check_setup(setup: Setup, options: StepOptions) -> None:
    """Check that the engine of a step supports its model and its options."""
    features = [*_requested_by(setup.strategy, options), *_needed_by(setup)]
    _check(engine_of(setup.strategy, options, setup.batch_axes), features, setup.strategy, options)


def check_batch_supported(setup: Setup, options: StepOptions, batch: StepBatch) -> None:
    """Check that the engine of a step supports the replicated leaves of a batch, if it has any."""
    if jax.tree.leaves(batch.full):
        engine = engine_of(setup.strategy, options, setup.batch_axes)
        _check(engine, [Feature.REPLICATED_INPUTS], setup.strategy, options)
        if setup.model.is_explicit:
            raise unsupported(Feature.REPLICATED_INPUTS, "mp.explicit(model)")


def _check(engine: GradientEngine, features: Iterable[Feature], strategy: Strategy, options: StepOptions) -> None:
    for feature in features:
        if feature not in engine.supports:
            once = ' and reduce_gradients="once"' if options.is_once else ""
            raise unsupported(feature, f"{strategy.label}{once}")


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
