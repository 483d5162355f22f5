"""Losses that stay exact when a step evaluates them on parts of the batch.

    loss function ─► MeanLoss(total, weight) ─► LossTerms of a part ─► sum over parts of total / total weight

XLA sees the global batch in a plain step. Micro-steps, pipeline microbatches and engines that run per device evaluate
the loss function on a part of the batch. The mean of their means is the global mean only if all parts have the same
weight. Therefore the weights of all parts are summed first, and each part divides its total by that sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from meshpar.layers.auxiliary import is_counted
from meshpar.sharding.errors import problem
from meshpar.sharding.types import PyTree

LOSS_WEIGHT = "loss_weight"
"""Name of the metric with the total weight of a `MeanLoss`."""
MEAN_OVER_EXAMPLES, SUM_OVER_EXAMPLES, SUM_OVER_PARTS = "mean_over_examples", "sum_over_examples", "sum_over_parts"
LossIs: TypeAlias = Literal["mean_over_examples", "sum_over_examples", "sum_over_parts"]
"""Values of the option `loss_is` of a step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanLoss:
    """A weighted mean: the sum of `total` over the global batch, divided by the sum of `weight`.

    Return it from a loss function in place of a scalar. Then micro-steps, pipeline stages, quantized gradients and
    devices add totals and weights, and the result does not depend on how the batch is divided.

    Args:
      total: scalar, the weighted sum of the losses of examples or tokens.
      weight: scalar, at least 0, the sum of the weights of the examples in `total`. It follows from the batch and the
        random key, not from parameters, and has no gradient. For a constant divisor, use `SumLoss(total / constant)`.
        If the global weight is 0, the loss is 0 (apart from losses that the model reports), and the state does not
        change. A negative or infinite weight gives nan.

    Raises:
      MeshparError: in the step, if the batch is divided and `weight` depends on parameters.

    Example:
      >>> def loss_fn(model, batch, key):
      ...     error = (model(batch["x"]) - batch["y"]) ** 2 * batch["mask"]
      ...     return mp.MeanLoss(error.sum(), batch["mask"].sum()), {}
    """

    total: jax.Array
    weight: jax.Array | float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SumLoss:
    """A sum over the global batch.

    Example:
      >>> def loss_fn(model, batch, key):
      ...     return mp.SumLoss(((model(batch["x"]) - batch["y"]) ** 2).sum()), {}
    """

    total: jax.Array
    """Scalar: the sum of the losses of examples or tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EqualMean:
    """A mean loss of a part of the batch, where all parts have the same weight, known when the loss is traced."""

    value: jax.Array
    weight: float | None = dataclasses.field(metadata={"static": True})
    """Weight of a part; None if the loss function returned a scalar."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalarLoss:
    """A scalar loss without a rule for combining the losses of several parts of a batch."""

    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """Scale of the losses of the parts of a batch. The mean of the scaled losses is the loss of the global batch."""

    num_parts: int = 1
    total_weight: jax.Array | None = None
    """Sum of the weights of all parts; None for equal weights or a single part."""


ONE_PART = Normalizer()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The result of a loss function on a part of the batch."""

    loss: MeanLoss | SumLoss | EqualMean | ScalarLoss
    added: jax.Array | float = 0.0
    """Losses that the model reports, such as a router's. All parts of the batch have equal weight."""
    metrics: dict[str, jax.Array]
    """Metrics that the loss function returned. Integers are counts, other dtypes are means with the loss's weight."""
    reported: dict[str, jax.Array]
    """Metrics that the model reported. Integers are counts, other dtypes are means over parts of equal weight."""

    @staticmethod
    def of(loss: Any, metrics: Mapping[str, Any], loss_is: str | None = None, **fields: Any) -> LossTerms:
        """Convert the result of a loss function; `loss_is` is the option of `train_step`."""
        if isinstance(loss, MeanLoss):
            constant = None if isinstance(loss.weight, jax.Array) else np.asarray(loss.weight).item()
            if constant is not None and constant > 0:
                loss = EqualMean(at_least_float32(loss.total) / constant, constant)
            else:
                loss = MeanLoss(at_least_float32(loss.total), lax.stop_gradient(jnp.asarray(loss.weight)))
        elif isinstance(loss, SumLoss):
            loss = SumLoss(at_least_float32(loss.total))
        else:
            value = at_least_float32(loss)
            loss = EqualMean(value, None) if loss_is == MEAN_OVER_EXAMPLES else ScalarLoss(value)
            loss = SumLoss(value) if loss_is in (SUM_OVER_EXAMPLES, SUM_OVER_PARTS) else loss
        if LOSS_WEIGHT in metrics and isinstance(loss, MeanLoss | EqualMean):
            reason, fix = "MeanLoss adds a metric of that name", "rename the metric"
            raise problem(f"metric `{LOSS_WEIGHT}`", "return it from the loss function", reason, fix, "conflict")
        fields = {"reported": {}, **fields}
        return LossTerms(loss=loss, metrics={name: jnp.asarray(x) for name, x in metrics.items()}, **fields)

    def normalized(self, normalizer: Normalizer = ONE_PART) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (value, metrics), scaled so that the mean over all parts is the loss of the global batch.

        Values and means are float32 at the least. Integer metrics are counts, to be summed over parts.
        """
        loss, num_parts, metrics = self.loss, normalizer.num_parts, self.metrics
        weight: Any = None
        if isinstance(loss, MeanLoss):
            weight = loss.weight
            everywhere = weight if normalizer.total_weight is None else normalizer.total_weight
            is_valid = (everywhere > 0) & jnp.isfinite(everywhere)
            divisor = jnp.where(is_valid, everywhere, 1).astype(loss.total.dtype)
            value = jnp.where(is_valid, loss.total * num_parts / divisor, jnp.where(everywhere == 0, 0, jnp.nan))
            share = weight.astype(divisor.dtype) * num_parts / divisor
            # The mean over a part or a batch without weight may be 0 / 0.
            metrics = {name: x if is_counted(x) else jnp.where(weight > 0, x * share, 0) for name, x in metrics.items()}
        elif isinstance(loss, SumLoss):
            value = loss.total * num_parts
        else:
            value, weight = loss.value, getattr(loss, "weight", None)
        if weight is not None:
            weight = jnp.asarray(weight)
            # Floating metrics become means over parts, which makes this the sum of the weights.
            metrics = {**metrics, LOSS_WEIGHT: weight if is_counted(weight) else at_least_float32(weight) * num_parts}
        value = value + jnp.asarray(self.added).astype(value.dtype)
        metrics = {**self.reported, **metrics}
        return value, {
            name: x.astype(jnp.promote_types(x.dtype, jnp.int32)) if is_counted(x) else at_least_float32(x)
            for name, x in metrics.items()
        }


def scalar(loss: MeanLoss | SumLoss | jax.Array) -> jax.Array:
    """Return the loss that a loss function returned for a batch, as a scalar."""
    return LossTerms.of(loss, {}).normalized()[0]


def at_least_float32(x: jax.typing.ArrayLike) -> jax.Array:
    """Convert to float32, unless the dtype has more bits."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


Evaluate: TypeAlias = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[LossTerms, PyTree]]
"""Loss as an engine calls it: (params, other variables, examples, key) -> (LossTerms, updated variables)."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """The user's loss as a function of parameters: `(params, extra, rows, key) -> (value, (metrics, extra))`.

    `extra` are the model's other variables and `examples` examples. `value` and metrics are scaled by the normalizer.
    """

    terms: Evaluate
    normalizer: Normalizer = ONE_PART

    def __call__(
        self, params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]:
        terms, after = self.terms(params, extra, examples, key)
        value, metrics = terms.normalized(self.normalizer)
        return value, (metrics, after)

    def over_parts(
        self, where: str, call: Callable[..., Any], args: PyTree, examples: PyTree, keys: jax.Array, *,
        axes: Mapping[str, int],
    ) -> Loss:  # fmt: skip
        """Return the loss with the normalizer of all parts of a batch.

        Args:
          where: the options that divide the batch, for error messages.
          call: `(terms, args, rows, key) -> (LossTerms, extra)`, calls `terms` on a part as the engine does.
          args: parameters and other values that weights must not depend on.
          rows, keys: `[part, ...]`, inside a `shard_map` the local parts.
          axes: sizes of the mesh axes over which the parts differ, inside a `shard_map`.
        """

        def terms(args: PyTree, examples: PyTree, key: jax.Array) -> LossTerms:
            return call(self.terms, args, examples, key)[0]

        return dataclasses.replace(self, normalizer=normalizer_of(where, terms, args, examples, keys, axes=axes))


def normalizer_of(
    where: str, terms: Callable[[PyTree, PyTree, jax.Array], LossTerms], args: PyTree, examples: PyTree,
    keys: jax.Array, *, axes: Mapping[str, int],
) -> Normalizer:  # fmt: skip
    """Sum the weights of all parts of a batch. `Loss.over_parts` documents the arguments.

    The loss function is traced on the first part. Only the equations that the weight needs are evaluated.
    """
    num_parts = len(keys) * int(np.prod(list(axes.values()), dtype=int))
    if num_parts == 1:
        return ONE_PART
    part = jax.tree.map(lambda x: x[0], examples)

    def traced(args: PyTree, examples: PyTree, key: jax.Array) -> tuple[Any, LossTerms]:
        out = terms(args, examples, key)
        return out.loss.weight if isinstance(out.loss, MeanLoss) else None, out

    closed, (_, out) = jax.make_jaxpr(traced, return_shape=True)(args, part, keys[0])
    if isinstance(out.loss, ScalarLoss):
        requested = f"evaluate the loss function on {num_parts} parts of the batch"
        reason = "the loss is a scalar, and the mean of the means of unequal parts is not the mean of the batch"
        fix = (
            "return `mp.MeanLoss((losses * weights).sum(), weights.sum()), metrics` (or mp.SumLoss(losses.sum())); or, "
            f'for a mean over examples that count the same, write `train_step(..., loss_is="{MEAN_OVER_EXAMPLES}")`'
        )
        raise problem(where, requested, reason, fix, "ambiguous-loss")
    if not isinstance(out.loss, MeanLoss):
        # The weights of parts add up only if a constant weight is a multiple of the number of examples.
        constant = getattr(out.loss, "weight", None)
        num_examples = max((np.shape(x)[0] for x in jax.tree.leaves(part) if np.ndim(x)), default=1)
        if constant is not None and constant % num_examples:
            requested = f"add up the weights of {num_parts} parts of {num_examples} examples"
            reason = "a constant is counted once for each part"
            fix = f"return mp.SumLoss(total / {constant}), or a weight that sums over examples"
            raise problem(f"MeanLoss(weight={constant}), under {where}", requested, reason, fix, "ambiguous-loss")
        return Normalizer(num_parts)
    weight, reads = _first_output(closed)
    num_args = len(jax.tree.leaves(args))
    if any(reads[:num_args]):
        requested = "sum the weights of all parts before their losses are computed"
        reason = "the weight depends on the model's parameters, variables or outputs"
        fix = "compute the weight from the batch and the key only, or add it to the batch"
        raise problem(f"MeanLoss.weight, under {where}", requested, reason, fix, "unsupported-feature")

    def weight_of(examples: PyTree, key: jax.Array) -> jax.Array:
        return weight(*[None] * num_args, *jax.tree.leaves(examples), key)

    total = jax.vmap(weight_of)(examples, keys).sum()
    return Normalizer(num_parts, lax.psum(total, tuple(axes)) if axes else total)


def _first_output(closed: core.ClosedJaxpr) -> tuple[Callable[..., jax.Array], list[bool]]:
    """Return a function that computes the first output of a traced program, and a flag for each input that it reads.

    The caller may pass None for other inputs. `dce_jaxpr` handles calls and loops, but keeps equations with effects,
    such as `jax.debug.print`. These are removed at the top level.
    """
    outputs = [index == 0 for index in range(len(closed.jaxpr.outvars))]
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, outputs, instantiate=True)
    needed, eqns = _variables(jaxpr.outvars), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed |= _variables(eqn.invars)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr.replace(eqns=eqns[::-1], effects=frozenset()), closed.consts))
    return lambda *args: run(*args)[0], [v in needed for v in jaxpr.invars]


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicrobatchTotals:
    """Loss, metrics and gradients, summed over the parts of a batch on which the loss was evaluated."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    """Sums over the parts. Floating metrics are means, to be divided by `count`. Integers are counts."""
    grads: PyTree
    extra: PyTree
    """The model's variables other than parameters, after the last part."""
    count: int = dataclasses.field(default=1, metadata={"static": True})
    """Number of parts."""

    def replace(self, **changes: Any) -> MicrobatchTotals:
        return dataclasses.replace(self, **changes)
