"""Checks of the metrics of earlier steps, so that the host does not wait for the current step."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshpar.sharding.errors import check_cases, problem

STEPS_IN_FLIGHT = 2
"""Number of dispatched steps that the host does not wait for. Two are enough to hide the work of the host. With more,
the CPU backend gets slower: threads of different programs wait for their collectives and occupy the cores."""
MAX_LOOPS = 8
"""Number of states that a step checks if it trains them alternately."""
LOST_UPDATES = "lost_updates"
"""Metric of a step: the share of nonzero updates that rounding of 16-bit parameters loses."""
MIN_REPORTED_LOSS = 0.01
"""Share of lost updates below which there is no warning."""


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Check that the loss and the gradients of a step are finite. Waits for the step.

    With `nonfinite="raise"`, the training step raises the same error three calls later, without waiting for the
    devices. Call this function after the last step, or when a loop reads its metrics.

    Args:
      metrics: the metrics that a training step returned.

    Raises:
      ValueError: `finite` is False, or the metrics do not contain it.

    Example:
      >>> step = mp.train_step(loss_fn)
      >>> state, metrics = step(state, batch)
      >>> mp.check_finite(metrics)
    """
    reason, fix = "it contains no `finite`", 'pass the metrics of mp.train_step(loss_fn, nonfinite="raise")'
    check_cases("check_finite(metrics)", "check them", "missing-argument", ("finite" not in metrics, reason, fix))
    if not bool(_to_host(metrics["finite"])):
        values = ", ".join(f"{name} {float(_to_host(metrics[name]))}" for name in ("loss", "grad_norm"))
        reason = f"the gradients are not finite ({values}), so the update was skipped"
        fix = "check the batch, lower the learning rate or clip gradients; or use nonfinite='skip'"
        raise problem("the training step", "update the parameters", reason, fix, code="not-finite")


def to_host(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Wait for metrics and return them as NumPy arrays."""
    return {name: _to_host(x) for name, x in metrics.items()}


def _to_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and x.is_fully_replicated and _is_on_cpu(x.sharding):
        x = x.addressable_data(0)  # NumPy converts a single-device array in a tenth of the time
    return np.asarray(x)


def start_transfers(metrics: Mapping[str, Any]) -> None:
    """Start to transfer metrics from accelerators to the host, so that `to_host` finds them there."""
    for x in metrics.values():
        if isinstance(x, jax.Array) and not _is_on_cpu(x.sharding):
            x.copy_to_host_async()


@functools.lru_cache
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)  # type: ignore[attr-defined]


@dataclasses.dataclass
class _Loop:
    """The metrics of the last steps of a loop."""

    last: jax.Array
    """The counter in the last state."""
    metrics: collections.deque[dict[str, Any]] = dataclasses.field(default_factory=collections.deque)


class EarlierSteps:
    """The metrics of the last steps of each loop."""

    def __init__(self, *, raises: bool) -> None:
        self._raises, self._has_warned = raises, False
        self._loops: collections.deque[_Loop] = collections.deque(maxlen=MAX_LOOPS)

    def add(self, step: jax.Array, new_step: jax.Array, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step, and check a step that is no longer in flight.

        Args:
          step, new_step: the counter in the state before and after the step. If `step` is not the last `new_step` of
            a loop, a new loop begins, for example from a checkpoint.
          metrics: the metrics of the step.
        """
        if isinstance(new_step, jax.core.Tracer):
            return
        # Other threads may add loops during the iteration over a deque.
        loop = next((loop for loop in tuple(self._loops) if loop.last is step), None)
        if loop is None:
            self._loops.append(loop := _Loop(new_step))
        loop.last = new_step
        loop.metrics.append(dict(metrics))
        while len(loop.metrics) > STEPS_IN_FLIGHT + 1:
            self._check(loop.metrics.popleft())

    def replace(self, metrics: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Check the `values` of metrics that the caller has read, instead of reading them again."""
        for loop in tuple(self._loops):
            for earlier in tuple(loop.metrics):
                if earlier["loss"] is metrics["loss"]:
                    earlier.update(values)

    def _check(self, metrics: Mapping[str, Any]) -> None:
        if self._raises:
            check_finite(metrics)
        if not self._has_warned and LOST_UPDATES in metrics:
            share = float(_to_host(metrics[LOST_UPDATES]))
            if share >= MIN_REPORTED_LOSS:
                self._has_warned = True
                warnings.warn(
                    f"{share:.1%} of the updates are lost: the trained parameters have 16 bits, and rounding to "
                    "nearest discards updates below 1/512 of a bfloat16 parameter. Train in float32 "
                    "(mp.Precision(params='float32', compute='bfloat16')), or wrap the optimizer in "
                    "mp.optim.stochastic_rounding. The metric `lost_updates` has the share of each step.",
                    stacklevel=5,
                )
