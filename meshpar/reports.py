"""What a model tells the step beside its output: auxiliary losses, metrics, and what its layers were asked to do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(eq=False)
class Reports:
    """What was told while a loss was traced. Compared by identity: every trace is its own."""

    losses: list[jax.Array] = dataclasses.field(default_factory=list)
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    layers: list[Any] = dataclasses.field(default_factory=list)
    """What layers were asked to do."""

    @property
    def loss(self) -> jax.Array | None:
        """The sum of the losses; None: there is none."""
        return sum(self.losses[1:], self.losses[0]) if self.losses else None


_reports = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def collecting() -> Iterator[Reports]:
    """Put in force that what models tell is kept."""
    reports = Reports()
    with _reports(reports):
        yield reports


def is_listening() -> bool:
    """Whether anybody keeps what is told."""
    return _reports.value is not None


def report(*, loss: jax.Array | None = None, metrics: Mapping[str, jax.Array] | None = None) -> None:
    """Tell the step something beside the model's output; outside of a step nobody listens.

    To be called by a model where its output is made, outside of its scan over layers: what stands inside a transformed
    function cannot leave it. `train_step` adds the losses to the loss, `eval_step` does not; both add the metrics to
    theirs. When a loss function runs its model several times, losses add up, and of a metric the last one counts.

    Args:
      loss: a scalar, a mean over the batch.
      metrics: arrays of any shape, means over the batch or, as whole numbers, counts; no gradient passes through them.
    """
    here = _reports.value
    if here is None:
        return
    if loss is not None:
        here.losses.append(loss)
    here.metrics.update({name: jax.lax.stop_gradient(jnp.asarray(x)) for name, x in (metrics or {}).items()})


def describe(layer: Any) -> None:
    """Tell whoever listens what a layer was asked to do, so that it can be held to that.

    To be called anywhere, inside transformed functions too: `layer` is a plain value and holds no arrays.
    """
    if _reports.value is not None:
        _reports.value.layers.append(layer)
