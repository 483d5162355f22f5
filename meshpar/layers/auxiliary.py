"""What a model reports to the step beside its output: auxiliary losses and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.sharding.context import current, within
from meshpar.sharding.types import named, problem


@dataclasses.dataclass(eq=False)
class Reports:
    """What was reported while a loss was traced. Compared by identity: every trace is its own."""

    losses: list[jax.Array] = dataclasses.field(default_factory=list)
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> jax.Array | None:
        """The sum of the losses; None: there is none."""
        return sum(self.losses[1:], self.losses[0]) if self.losses else None


@contextlib.contextmanager
def collecting() -> Iterator[Reports]:
    """Put in force that what models report is kept."""
    reports = Reports()
    with within(reports=reports):
        yield reports


def is_listening() -> bool:
    """Whether reports are kept."""
    return current().reports is not None


def report(*, loss: jax.Array | None = None, metrics: Mapping[str, jax.Array] | None = None) -> None:
    """Report something to the step beside the model's output; outside of a step it is dropped.

    To be called by a model where its output is made, outside of its scan over layers: what stands inside a transformed
    function cannot leave it. `train_step` adds the losses to the loss, `eval_step` does not; both add the metrics to
    theirs. When a loss function runs its model several times, losses add up, and of a metric the last one counts.

    Args:
      loss: a scalar, a mean over the batch.
      metrics: arrays of any shape, means over the batch or, as whole numbers, counts; no gradient passes through them.

    Raises:
      ValueError: a loss that is not one number; metrics that are not numbers by name. Whether anybody listens or not.
    """
    if loss is not None:
        loss = _numbers("report(loss=...)", loss)
        if loss.shape:
            exists = f"it has shape {loss.shape}"
            raise problem("report(loss=...)", "be added to the loss", exists, "take its mean over the batch")
    if metrics is not None and not isinstance(metrics, Mapping):
        exists = "every metric has a name"
        raise problem("report(metrics=...)", f"be a {type(metrics).__name__}", exists, 'give {"my/metric": array}')
    found = {name: _numbers(f"report(metrics=...), `{name}`", x) for name, x in (metrics or {}).items()}
    here, boundaries = current().reports, current().boundaries
    if here is None:
        return
    for path in () if boundaries is None else sorted(boundaries.recomputed):
        exists = "what is traced in it is made again in the backward pass, and cannot leave it"
        raise problem(f"report(...) in `{path}`", "reach the step", exists, "narrow the remat rule of that module")
    if loss is not None:
        here.losses.append(loss)
    here.metrics.update({name: jax.lax.stop_gradient(x) for name, x in found.items()})


def _numbers(where: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):  # whichever of them jax has for the kind of thing
        raise problem(where, f"be {x!r}", "it is numbers", "give an array, or leave it out") from None


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def is_counted(metric: Any) -> bool:
    """Whether a metric is a count, to be summed over whatever the rows of a batch are cut into; else it is a mean."""
    return bool(jnp.issubdtype(jnp.result_type(metric), jnp.integer))


def check_numbers(metrics: Mapping[str, Any]) -> None:
    """What a loss function gives beside the loss is one number each.

    Raises:
      ValueError: something is none, or is several.
    """
    for name, value in metrics.items():
        dtype = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, bool | int | float) else None)
        if dtype is None or not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
            exists = f"it is a {type(value).__name__}" + (f" of dtype {dtype}" if dtype is not None else "")
            raise problem(f"metric `{name}`", "be one number", exists, "give a scalar, or leave it out")
        if jnp.shape(value):
            fix = "take its mean in the loss function, or as a whole number its sum"
            raise problem(f"metric `{name}`", "be one number", f"it is of shape {jnp.shape(value)}", fix)


def checked(out: Any, loss_fn: Any, *, trains: bool = True) -> tuple[Any, dict[str, Any]]:
    """What a loss function gave, as (loss, metrics).

    Raises:
      ValueError: it is something else; what is no number; to train, a loss that has no gradient.
    """
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        where = f"loss function `{named(loss_fn)}`"
        fix = "return a scalar and a dict of scalars, which may be empty"
        raise problem(where, "return (loss, metrics)", f"it returned {type(out).__name__}", fix)
    loss, metrics = out
    values = {field: getattr(loss, field) for field in ("total", "weight") if hasattr(loss, field)}
    check_numbers({**({f"loss.{field}": x for field, x in values.items()} or {"loss": loss}), **metrics})
    kind = jnp.result_type(values.get("total", loss))
    if trains and not jnp.issubdtype(kind, jnp.floating):
        exists = f"it is {kind.name}, which has no gradient"
        raise problem("loss function, its loss", "differentiate it", exists, "give a mean, in a floating dtype")
    return loss, metrics


def means(sums: dict[str, jax.Array], total: Any) -> dict[str, jax.Array]:
    """Of metrics over so many microbatches; whole numbers, which are counts, stay summed."""
    return {name: x if is_counted(x) else x / jnp.asarray(total, x.dtype) for name, x in sums.items()}
