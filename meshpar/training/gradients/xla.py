"""XLA makes the gradients: every micro-step's are reduced by it into shards, and summed there."""

from __future__ import annotations

from typing import Any

import jax

from meshpar.layers.losses import Evaluate, Loss
from meshpar.parallel.batch import split_rows, with_whole, without_whole
from meshpar.sharding.types import PyTree
from meshpar.training.accumulation import (
    Sums,
    accumulated,
    compute_params,
    constrained,
    grad_specs,
    micro_keys,
    micro_step,
)
from meshpar.training.options import StepOptions
from meshpar.training.state import TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> Sums:
    """Loss, metrics and gradients over a batch, summed over micro-steps."""
    setup = state.setup
    params = compute_params(setup, state.params, options.precision.compute)
    shardings = setup.named(setup.trained(grad_specs(setup, options)))

    def step(extra: PyTree, rows: PyTree, key: jax.Array) -> Sums:
        sums = micro_step(loss, options, setup, params, extra, rows, key)
        return sums.replace(grads=constrained(sums.grads, shardings))

    if options.accumulate == 1:
        return step(state.extra, batch, key)
    rows = jax.tree.map(lambda x: split_rows(x, options.accumulate, setup.batch_sharding), without_whole(batch))
    keys = micro_keys(key, options.accumulate)

    def terms(terms: Evaluate, args: tuple[PyTree, PyTree], rows: PyTree, key: jax.Array) -> Any:
        return terms(*args, with_whole(batch, rows), key)

    where = f"train_step(accumulate={options.accumulate})"
    loss = loss.over_parts(where, terms, (params, state.extra), rows, keys, axes={})

    def of_rows(extra: PyTree, rows: PyTree, key: jax.Array) -> Sums:
        return step(extra, with_whole(batch, rows), key)

    return accumulated(of_rows, state.extra, rows, keys).replace(count=options.accumulate)
