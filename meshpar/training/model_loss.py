"""The user's loss as a function of parameters, with the losses that the model reports."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.layers.auxiliary import checked, collecting
from meshpar.layers.losses import (
    Evaluate,
    Loss,
    LossTerms,
    MeanLoss,
    SumLoss,
)
from meshpar.layers.precision import NUMERICS, dot_general
from meshpar.layers.remat import remat_policy
from meshpar.parallel.batch import as_given, examples_of
from meshpar.sharding.activations import constrain_module_outputs
from meshpar.sharding.context import Boundaries
from meshpar.sharding.errors import named, near_or, problem
from meshpar.sharding.host_resources import user_line
from meshpar.sharding.types import PyTree
from meshpar.training.checks import check_constraints, check_variables
from meshpar.training.state import Setup

LossFn = Callable[[Any, PyTree, jax.Array], tuple[MeanLoss | SumLoss | jax.Array, dict[str, jax.Array]]]
"""(model, batch, key) -> (loss, metrics): a `MeanLoss`, a `SumLoss` or a scalar, and a dict of scalars.

Losses and metrics that the model reports (`meshpar.layers.auxiliary`) are added."""


def loss_of(
    loss_fn: LossFn, setup: Setup, traced: list[Boundaries] | None = None, *, trains: bool = True,
    loss_is: str | None = None,
) -> Loss:  # fmt: skip
    """Return the user's loss as a function of parameters. In training, losses that the model reports are added.

    Each trace of the loss function appends its `Boundaries` to `traced`.
    """

    def terms(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array) -> tuple[LossTerms, PyTree]:
        with _constraining_modules(setup, examples, trains) as boundaries, collecting() as reports:
            model = setup.model.bind(params, extra)
            out = _call(loss_fn, model, examples, key)
        if traced is not None:
            traced.append(boundaries)
        if trains:
            check_constraints(setup, boundaries)
        loss, metrics = checked(out, loss_fn, trains=trains)
        after = setup.model.collect(model)
        check_variables(extra, after)
        reported = {name: jnp.asarray(x) for name, x in reports.metrics.items() if name not in metrics}
        added = reports.loss if trains and reports.loss is not None else 0.0
        return LossTerms.of(loss, metrics, loss_is, reported=reported, added=added), after

    if not setup.model.is_explicit:
        return Loss(terms)
    return Loss(_refusing_other_axes(setup.on_explicit_axes(terms), setup))


def _call(loss_fn: LossFn, model: Any, examples: PyTree, key: jax.Array) -> Any:
    """Call the user's loss function, and explain an unbound axis name."""
    batch = as_given(examples)
    try:
        return loss_fn(model, batch, key)
    except KeyError as error:
        if not isinstance(batch, Mapping) or not error.args or error.args[0] in batch or not _reads(error, batch):
            raise
        names, line = ", ".join(f"`{name}`" for name in batch), user_line(error)
        where, reason = f"loss function `{named(loss_fn)}`", f"the batch has the keys {names}"
        requested = f"read {error.args[0]!r}" + (f" at {line}" if line else "")
        fix = near_or(str(error.args[0]), batch, "add the key to the batch, or read one of these", list_known=False)
        raise problem(where, requested, reason, fix, code="unknown-name") from error
    except NameError as error:
        axis = re.search(r"unbound axis name: (\w+)", str(error))
        if axis is None:
            raise
        reason = "the loss function receives the global batch, so means and sums are global without a collective"
        where, requested = f"axis name `{axis[1]}` in the model", "reduce over it, as BatchNorm(axis_name=...) does"
        fix = f"remove axis_name={axis[1]!r}"
        raise problem(where, requested, reason, fix, code="unsupported-feature") from error


def _reads(error: BaseException, batch: PyTree) -> bool:
    """Return whether the function that raised an error has the batch as a local variable."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(value is batch for value in frame.f_locals.values())


def _refusing_other_axes(loss: Evaluate, setup: Setup) -> Evaluate:
    """Return a loss in which jax refuses collectives over mesh axes that no rule of the strategy names.

    The error then names a line of the user's code. jax 0.10 lacks `jax.sharding.no_collectives`. There, `explain` finds
    such collectives in the compiled program.
    """
    used = frozenset[str]().union(*(rules.axes for rules in setup.strategy.rules))
    unused = frozenset(axis for axis, size in setup.sizes.items() if size > 1 and axis not in used)
    no_collectives = getattr(jax.sharding, "no_collectives", None)
    if no_collectives is None or not unused:
        return loss

    def evaluate(*args: Any) -> Any:
        try:
            with no_collectives(unused):
                return loss(*args)
        except Exception as error:
            if type(error).__name__ != "ForbiddenCollectiveError":
                raise
            where, reason = f"mp.explicit(model) and {setup.strategy.label}", " ".join(str(error).split())
            requested = f"communicate over {', '.join(f'`{axis}`' for axis in sorted(unused))}, which no rule names"
            fix = "keep the sharding of arrays over that axis, or add a strategy that shards over it"
            raise problem(where, requested, reason, fix, code="unknown-axis") from error

    return evaluate


def _constraining_modules(
    setup: Setup, examples: PyTree, trains: bool
) -> contextlib.AbstractContextManager[Boundaries]:
    """Apply activation rules to module outputs. If the model has no constraints, shard outputs along the batch."""
    sizes, is_explicit, context = batch_sizes(examples), setup.model.is_explicit, NUMERICS.value
    return constrain_module_outputs(
        max(sizes, default=0),
        shard_batch=setup.has_free_activations and not is_explicit,
        other_batch_sizes=frozenset(sizes),
        sharded_modules=setup.splitting_modules,
        dot_general=None if is_explicit else functools.partial(dot_general, low_precision=False),
        compute=None if context is None else context.precision.compute,
        policy=(lambda remat: remat_policy(remat, context.names)) if trains and context is not None else None,
    )


def batch_sizes(batch: PyTree) -> set[int]:
    """Return the sizes of the first dims of the arrays of a batch."""
    return {np.shape(x)[0] for x in jax.tree.leaves(examples_of(batch)) if np.ndim(x)}
