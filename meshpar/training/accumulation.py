"""Gradient accumulation over micro-steps, shared by the gradient engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layers.losses import Loss, MicrobatchTotals
from meshpar.layers.precision import cast_floating
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import PyTree, path_str
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup

MicroStep = Callable[[PyTree, PyTree, jax.Array], "MicrobatchTotals"]
"""A function (extra, examples, key) -> loss, metrics, gradients and new variables of a micro-step."""


def micro_step(loss: Loss, options: StepOptions, setup: Setup, params: PyTree, extra: PyTree, examples: PyTree,
               key: jax.Array) -> MicrobatchTotals:  # fmt: skip
    """Return loss, metrics, gradients and new variables of a micro-step. Frozen parameters have no gradient."""

    def loss_of_trained(trained: PyTree, overwritten: PyTree) -> Any:
        variables = {**extra, **overwritten} if overwritten else extra
        return loss(setup.with_frozen(trained, params), variables, examples, key)

    value_and_grad = jax.value_and_grad(loss_of_trained, argnums=(0, 1), has_aux=True)
    (value, (metrics, after)), (grads, overwritten) = value_and_grad(setup.trained(params), setup.overwritten(extra))
    grads = jax.tree.map(lambda g: g.astype(options.precision.reduce_dtype(g.dtype)), grads)
    return MicrobatchTotals(value, metrics, grads, {**after, **overwritten} if overwritten else after)


def accumulated(step: MicroStep, extra: PyTree, batches: PyTree, keys: jax.Array) -> MicrobatchTotals:
    """Run micro-steps in a scan and add their totals. The first dim of `batches` and `keys` is the micro-step."""

    def body(sums: MicrobatchTotals, xs: tuple[PyTree, jax.Array]) -> tuple[MicrobatchTotals, None]:
        new = step(sums.extra, *xs)
        added = jax.tree.map(jnp.add, sums.replace(extra=None), new.replace(extra=None))
        return added.replace(extra=new.extra), None

    first = jax.tree.map(lambda x: x[0], batches)
    like = jax.eval_shape(step, extra, first, keys[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.replace(extra=None))
    sums, _ = lax.scan(body, zeros.replace(extra=extra), (batches, keys))
    return sums


def micro_keys(key: jax.Array, count: int) -> jax.Array:
    """Return a PRNG key for each of `count` micro-steps."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def grad_specs(setup: Setup, options: StepOptions) -> PyTree:
    """Return the specs of gradients after the backward pass.

    Without accumulation, these are the specs of the optimizer state. ZeRO-1 then uses a reduce-scatter, which sends
    half the bytes of an all-reduce.
    """
    return setup.layout.updates if options.accumulate == 1 else setup.layout.grads


def compute_params(setup: Setup, params: PyTree, dtype: str | None) -> PyTree:
    """Cast parameters to the compute dtype while they are sharded, so that the all-gather sends fewer bytes."""
    return params if dtype is None else constrained(in_compute(setup, params, dtype), setup.named(setup.layout.params))


def in_compute(setup: Setup, params: PyTree, dtype: str | None) -> PyTree:
    """Return parameters in the compute dtype, or in the dtype of the precision rule of their module."""
    rules = setup.strategy.activations
    if not rules.precision:
        return cast_floating(params, dtype)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: cast_floating(x, rules.dtype_in(path_str(path)) or dtype), params
    )


def constrained(tree: PyTree, shardings: PyTree) -> PyTree:
    """Constrain each array to its sharding."""
    return jax.tree.map(with_layout, tree, shardings)
