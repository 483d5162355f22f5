"""Hook that reports the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.layers.losses import LOSS_WEIGHT
from meshpar.loop.fit import Hook, Record, Run


class LearningRate(Hook):
    """Hook that adds the learning rate of each step to `metrics.jsonl`.

    A schedule counts updates, so skipped updates do not advance it.

    Args:
      schedule: function from the number of earlier updates to the learning rate.
    """

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        self._schedule = schedule
        self._rates: np.ndarray = np.zeros(0)
        self._num_skipped, self._rate = 0, 0.0

    def on_start(self, run: Run) -> None:
        # All rates at once, because the device of a computation during the run may be busy with a step. jit makes this
        # a single program: otherwise each operation is compiled.
        rates = jax.jit(jax.vmap(lambda count: jnp.asarray(self._schedule(count))))
        self._rates = np.asarray(rates(np.arange(run.steps, dtype=np.int32)))
        self._num_skipped = run.skipped

    def on_record(self, run: Run, record: Record) -> None:
        self._rate = float(self._rates[record.step - 1 - self._num_skipped])
        is_applied = record.metrics.get("finite", True) and record.metrics.get(LOSS_WEIGHT, 1) > 0
        self._num_skipped += not is_applied

    def line(self, record: Record) -> dict[str, float]:
        """Return the values for the line of a step in `metrics.jsonl`."""
        return {"learning_rate": self._rate}
