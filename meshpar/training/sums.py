"""Sums: what the micro-steps of a step add up to, the one record that every engine of gradients gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.sharding.lay import lay
from meshpar.sharding.types import PyTree, path_str, problem
from meshpar.training.options import StepOptions
from meshpar.training.precision import cast_floating
from meshpar.training.reports import is_counted
from meshpar.training.state import Setup

Loss = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]]
"""(params, extra, rows, key) -> (loss, (metrics, extra))."""
MicroStep = Callable[[PyTree, PyTree, jax.Array], "Sums"]
"""(extra, rows, key) -> sums of one micro-step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What a number of micro-steps add up to, each weighed."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    """Whole numbers, which are counts, are not weighed."""
    grads: PyTree
    weight: jax.Array
    extra: PyTree
    """What the model keeps beside parameters, after them."""

    def replace(self, **changes: Any) -> Sums:
        return dataclasses.replace(self, **changes)


def micro_step(loss: Loss, options: StepOptions, setup: Setup, params: PyTree, extra: PyTree, rows: PyTree,
               key: jax.Array) -> Sums:  # fmt: skip
    """Loss and gradients of one micro-step, times its weight; none of parameters that are frozen."""

    def of_trained(trained: PyTree, overwritten: PyTree) -> Any:
        return loss(setup.with_frozen(trained, params), {**extra, **overwritten} if overwritten else extra, rows, key)

    slopes = jax.value_and_grad(of_trained, argnums=(0, 1), has_aux=True)
    (value, (metrics, after)), (grads, overwritten) = slopes(setup.trained(params), setup.overwritten(extra))
    grads = jax.tree.map(lambda g: g.astype(options.precision.reduce_dtype(g.dtype)), grads)
    return weighed(options, value, metrics, grads, {**after, **overwritten} if overwritten else after)


def weight_of(options: StepOptions, metrics: dict[str, jax.Array]) -> jax.Array | None:
    """The metric by which micro-steps are weighed; None: they are not."""
    if options.weight is None:
        return None
    if options.weight not in metrics:
        asked, exists = "weigh micro-steps by that metric", f"the loss function returned {sorted(metrics)}"
        raise problem(f"train_step(weight={options.weight!r})", asked, exists, "add it to the metrics")
    return metrics[options.weight]


def weighed(options: StepOptions, loss: jax.Array, metrics: dict[str, jax.Array], grads: PyTree, extra: PyTree) -> Sums:
    """A micro-step times its weight: loss and metrics in float32 at the least."""
    return weighed_by(weight_of(options, metrics), loss, metrics, grads, extra)


def weighed_by(given: jax.Array | None, loss: jax.Array, metrics: dict[str, jax.Array], grads: PyTree = None,
               extra: PyTree = None) -> Sums:  # fmt: skip
    """The same by a weight at hand; None: by one."""
    weight = jnp.ones((), loss.dtype) if given is None else given
    # Means are taken in float32 at the least: counts and float16 losses would not survive a weight or a division.
    counts = {name: x.astype(jnp.promote_types(x.dtype, jnp.int32)) for name, x in metrics.items() if is_counted(x)}
    others = {name: x for name, x in metrics.items() if name not in counts}
    loss, others, weight = jax.tree.map(wide, (loss, others, weight))
    if given is not None:
        # Gradients times a number of tokens are beyond float16, and that number is not in bfloat16. A micro-step of
        # weight zero has no mean: 0/0 in the loss must not spoil the others.
        grads = jax.tree.map(wide, grads)
        loss, others, grads = jax.tree.map(
            lambda x: jnp.where(weight > 0, x * weight.astype(x.dtype), 0), (loss, others, grads)
        )
    return Sums(loss, {**others, **counts}, grads, weight, extra)


def accumulated(step: MicroStep, extra: PyTree, batches: PyTree, key: jax.Array, count: int) -> Sums:
    """Sum micro-steps in a scan: the program does not grow with their number."""

    def body(sums: Sums, xs: tuple[PyTree, jax.Array]) -> tuple[Sums, None]:
        micro, index = xs
        new = step(sums.extra, micro, jax.random.fold_in(key, index))
        added = jax.tree.map(jnp.add, sums.replace(extra=None), new.replace(extra=None))
        return added.replace(extra=new.extra), None

    first = jax.tree.map(lambda x: x[0], batches)
    like = jax.eval_shape(step, extra, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.replace(extra=None))
    sums, _ = lax.scan(body, zeros.replace(extra=extra), (batches, jnp.arange(count)))
    return sums


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
    return jax.tree.map(lay, tree, shardings)


def wide(x: jax.Array) -> jax.Array:
    """In float32 at the least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
