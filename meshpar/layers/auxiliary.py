"""Auxiliary losses and metrics that a model reports to the step, in addition to its output."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.sharding.context import BOUNDARIES, TraceOption
from meshpar.sharding.errors import check_cases, named, problem
from meshpar.sharding.types import PyTree


@dataclasses.dataclass(eq=False)
class Reports:
    """Losses and metrics reported during a trace. Compared by identity, because each trace needs a new object."""

    losses: list[jax.Array] = dataclasses.field(default_factory=list)
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> jax.Array | None:
        """Return the sum of the reported losses, or None if there are none."""
        return sum(self.losses[1:], self.losses[0]) if self.losses else None


REPORTS = TraceOption[Reports]("reports")


@contextlib.contextmanager
def collecting() -> Iterator[Reports]:
    """Yield the `Reports` to which calls of `report` in this context are added."""
    reports = Reports()
    with REPORTS.set(reports):
        yield reports


def is_listening() -> bool:
    """Return whether reports are collected."""
    return REPORTS.value is not None


def report(*, loss: jax.Array | None = None, metrics: Mapping[str, jax.Array] | None = None) -> None:
    """Report an auxiliary loss or metrics to the step. Outside a step the call only checks its arguments.

    `train_step` adds the losses to the loss, `eval_step` does not. Both return the metrics. If a loss
    function calls its model several times, losses are added and the last value of a metric is used. Layers in a scan
    must return an `Aux` instead, because the values of a transformed function cannot leave it.

    Args:
      loss: scalar, a mean over the batch.
      metrics: arrays of any shape by name. Integers are counts, other dtypes are means over the batch. They have no
        gradient.

    Raises:
      MeshparError: the loss is not a scalar, the metrics are not a dict of arrays, or the call is in a module that a
        remat rule recomputes.

    Example:
      >>> with collecting() as reports:
      ...     report(loss=jnp.float32(0.5), metrics={"max_logit": jnp.float32(3.0)})
      >>> float(reports.loss), list(reports.metrics)
      (0.5, ['max_logit'])
    """
    if loss is not None:
        loss = _as_array("report(loss=...)", loss)
        case = loss.shape != (), f"it has shape {loss.shape}", "take its mean over the batch"
        check_cases("report(loss=...)", "add it to the loss", "wrong-shape", case)
    case = metrics is not None and not isinstance(metrics, Mapping), "it is not a dict", 'pass {"my/metric": array}'
    check_cases("report(metrics=...)", f"use a {type(metrics).__name__}", "wrong-type", case)
    arrays = {name: _as_array(f"report(metrics=...), `{name}`", x) for name, x in (metrics or {}).items()}
    reports, boundaries = REPORTS.value, BOUNDARIES.value
    if reports is None:
        return
    for path in () if boundaries is None else sorted(boundaries.recomputed):
        reason = "values of a module that is recomputed in the backward pass cannot leave it"
        fix = "let the remat rule match submodules that do not report"
        raise problem(f"report(...) in `{path}`", "pass values to the step", reason, fix, "unsupported-feature")
    if loss is not None:
        reports.losses.append(loss)
    reports.metrics.update({name: jax.lax.stop_gradient(x) for name, x in arrays.items()})


def _as_array(where: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):  # which one depends on the type
        raise problem(where, f"use {x!r}", "it is not an array of numbers", "pass an array", "wrong-type") from None


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def is_counted(metric: object) -> bool:
    """Return whether a metric is a count, which is summed over parts of the batch. Other metrics are averaged."""
    return bool(jnp.issubdtype(jnp.result_type(metric), jnp.integer))


def check_numbers(metrics: Mapping[str, Any]) -> None:
    """Check that the metrics of a loss function are scalars with names."""
    for name, value in metrics.items():
        dtype = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, bool | int | float) else None)
        is_number = dtype is not None and (dtype == np.bool_ or jnp.issubdtype(dtype, np.number))
        kind = f"{type(value).__name__} of dtype {dtype}" if dtype is not None else type(value).__name__
        for is_wrong, code, reason, fix in (
            (not isinstance(name, str), "wrong-type", f"its name is a {type(name).__name__}", "use strings"),
            (not is_number, "wrong-type", f"it is a {kind}", "return a number, or leave it out"),
            (is_number and jnp.shape(value), "wrong-shape", f"it is of shape {np.shape(value)}",
             "return its mean, or its sum if it is a count"),
        ):  # fmt: skip
            if is_wrong:
                raise problem(f"metric `{name}`", "use it as a scalar", reason, fix, code)


def checked(out: Any, loss_fn: Callable[..., Any], *, trains: bool = True) -> tuple[Any, dict[str, Any]]:
    """Return the output of a loss function as (loss, metrics), after checking it."""
    is_pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)
    reason, fix = f"it returned {type(out).__name__}", "return a scalar, and a dict of scalars that may be empty"
    check_cases(f"loss function `{named(loss_fn)}`", "return (loss, metrics)", "wrong-type", (not is_pair, reason, fix))
    loss, metrics = out
    values = {field: getattr(loss, field) for field in ("total", "weight") if hasattr(loss, field)}
    shapes = {field: np.shape(x) for field, x in (values or {"": loss}).items() if hasattr(x, "shape")}
    reason = f"it is an array of shape {next(filter(None, shapes.values()), ())}"
    fix = "return mp.MeanLoss(total.sum(), weight.sum())" if values else "return mp.MeanLoss(losses.sum(), losses.size)"
    case = any(shapes.values()), reason, fix
    check_cases(f"loss function `{named(loss_fn)}`", "use its loss as a scalar", "wrong-shape", case)
    check_numbers({**({f"loss.{field}": x for field, x in values.items()} or {"loss": loss}), **metrics})
    dtype = jnp.result_type(values.get("total", loss))
    is_exact = trains and not jnp.issubdtype(dtype, jnp.floating)
    case = is_exact, f"the loss is {dtype.name}, which has no gradient", "return a floating mean"
    check_cases(f"loss function `{named(loss_fn)}`", "differentiate its loss", "wrong-dtype", case)
    return loss, metrics


def means(sums: dict[str, jax.Array], total: PyTree) -> dict[str, jax.Array]:
    """Divide sums of metrics by `total`, the number of microbatches. Counts stay sums."""
    return {name: x if is_counted(x) else x / jnp.asarray(total, x.dtype) for name, x in sums.items()}
