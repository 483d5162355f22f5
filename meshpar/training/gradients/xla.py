"""Gradients partitioned by XLA, which reduces them in each micro-step."""

from __future__ import annotations

from typing import Any

import jax

from meshpar.layers.losses import Evaluate, Loss, MicrobatchTotals
from meshpar.parallel.batch import StepBatch, split_examples
from meshpar.sharding.types import PyTree
from meshpar.training.accumulation import accumulated, compute_params, constrained, grad_specs, micro_keys, micro_step
from meshpar.training.gradients.engine import Feature, GradientEngine
from meshpar.training.options import StepOptions
from meshpar.training.state import TrainState


def gradients(
    loss: Loss, options: StepOptions, state: TrainState, batch: StepBatch, key: jax.Array
) -> MicrobatchTotals:
    """Return loss, metrics and gradients of a batch, summed over micro-steps."""
    setup = state.setup
    params = compute_params(setup, state.params, options.precision.compute)
    shardings = setup.named(setup.trained(grad_specs(setup, options)))

    def step(extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
        sums = micro_step(loss, options, setup, params, extra, examples, key)
        return sums.replace(grads=constrained(sums.grads, shardings))

    if options.accumulate == 1:
        return step(state.extra, batch, key)
    micro_batches = jax.tree.map(lambda x: split_examples(x, options.accumulate, setup.batch_sharding), batch.examples)
    keys = micro_keys(key, options.accumulate)

    def evaluate(terms: Evaluate, args: tuple[PyTree, PyTree], examples: PyTree, key: jax.Array) -> Any:
        return terms(*args, StepBatch(examples, batch.full), key)

    where = f"train_step(accumulate={options.accumulate})"
    loss = loss.over_parts(where, evaluate, (params, state.extra), micro_batches, keys, axes={})

    def step_of_examples(extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
        return step(extra, StepBatch(examples, batch.full), key)

    return accumulated(step_of_examples, state.extra, micro_batches, keys).replace(count=options.accumulate)


ENGINE = GradientEngine(gradients, supports=frozenset(Feature))
