"""Sums over micro-steps: the result of every gradient engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layers.losses import Loss
from meshpar.layers.precision import cast_floating
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import PyTree, path_str
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup

MicroStep = Callable[[PyTree, PyTree, jax.Array], "Sums"]
"""(extra, rows, key) -> sums of one micro-step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the parts of a batch on which the loss was evaluated."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    """Means, to be divided by `count`, and counts, which are integers."""
    grads: PyTree
    extra: PyTree
    """The model's variables other than parameters, after the last part."""
    count: int = dataclasses.field(default=1, metadata={"static": True})
    """Number of parts."""

    def replace(self, **changes: Any) -> Sums:
        return dataclasses.replace(self, **changes)


def micro_step(loss: Loss, options: StepOptions, setup: Setup, params: PyTree, extra: PyTree, rows: PyTree,
               key: jax.Array) -> Sums:  # fmt: skip
    """Return loss and gradients of one part of the batch; frozen parameters have none."""

    def of_trained(trained: PyTree, overwritten: PyTree) -> Any:
        return loss(setup.with_frozen(trained, params), {**extra, **overwritten} if overwritten else extra, rows, key)

    slopes = jax.value_and_grad(of_trained, argnums=(0, 1), has_aux=True)
    (value, (metrics, after)), (grads, overwritten) = slopes(setup.trained(params), setup.overwritten(extra))
    grads = jax.tree.map(lambda g: g.astype(options.precision.reduce_dtype(g.dtype)), grads)
    return Sums(value, metrics, grads, {**after, **overwritten} if overwritten else after)


def accumulated(step: MicroStep, extra: PyTree, batches: PyTree, keys: jax.Array) -> Sums:
    """Sum micro-steps, `[count, ...]` batches and keys, in a scan: the program does not grow with their number."""

    def body(sums: Sums, xs: tuple[PyTree, jax.Array]) -> tuple[Sums, None]:
        new = step(sums.extra, *xs)
        added = jax.tree.map(jnp.add, sums.replace(extra=None), new.replace(extra=None))
        return added.replace(extra=new.extra), None

    first = jax.tree.map(lambda x: x[0], batches)
    like = jax.eval_shape(step, extra, first, keys[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.replace(extra=None))
    sums, _ = lax.scan(body, zeros.replace(extra=extra), (batches, keys))
    return sums


def micro_keys(key: jax.Array, count: int) -> jax.Array:
    """Return a random key for each of so many micro-steps, `[count]`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def grad_specs(setup: Setup, options: StepOptions) -> PyTree:
    """How gradients leave the backward pass.

    With one micro-step nothing keeps them before the update, which uses them as the optimizer state lies: going there
    straight makes ZeRO-1's reduction a scatter, half the bytes of the all-reduce that whole gradients would need.
    """
    return setup.layout.updates if options.accumulate == 1 else setup.layout.grads


def compute_params(setup: Setup, params: PyTree, dtype: str | None) -> PyTree:
    """Parameters in the compute dtype, still in their shards: the cast stands before the gather, not behind it."""
    if dtype is None:
        return params
    return constrained(in_compute(setup, params, dtype), setup.named(setup.layout.params))


def in_compute(setup: Setup, params: PyTree, dtype: str | None) -> PyTree:
    """Parameters in the compute dtype, those in modules of a precision rule in its."""
    rules = setup.strategy.activations
    if not rules.precision:
        return cast_floating(params, dtype)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: cast_floating(x, rules.dtype_in(path_str(path)) or dtype), params
    )


def constrained(tree: PyTree, shardings: PyTree) -> PyTree:
    """Every array laid out by its sharding."""
    return jax.tree.map(with_layout, tree, shardings)


def wide(x: jax.Array) -> jax.Array:
    """In float32 at the least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
