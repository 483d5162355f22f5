"""What `train_step` is given beside the loss."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshpar.hardware.compile_options import LATENCIES, Options, check_kind
from meshpar.layers.losses import MEAN_OVER_EXAMPLES
from meshpar.layers.precision import Precision, as_precision
from meshpar.layers.scan import check_remat
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a training step; see `train_step`."""

    accumulate: int = 1
    reduce_gradients: Literal["each", "once"] = "each"
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    interleave: int = 1
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    loss_is: Literal["mean_over_examples"] | None = None
    xla: Options = dataclasses.field(default_factory=dict, hash=False)
    latency_rounds: int = 0

    def __post_init__(self) -> None:
        for field, what, least in (
            ("accumulate", "run that many micro-steps", 1),
            ("interleave", "run that many slices of the rows beside each other", 1),
            ("latency_rounds", "compile that often by simulated latencies", 0),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                exists = "that is no positive integer" if least else "that is no whole number"
                raise problem(f"{field}={value!r}", what, exists, f"use {least} or more")
        for field, known in (
            ("reduce_gradients", ("each", "once")),
            ("nonfinite", ("raise", "skip", "ignore")),
            ("loss_is", (None, MEAN_OVER_EXAMPLES)),
        ):
            if getattr(self, field) not in known:
                raise problem(
                    f"{field}={getattr(self, field)!r}", "do that", "there is no such choice", f"use one of {known}"
                )
        as_precision(self.precision, "train_step")
        check_remat(self.remat)
        check_kind(self.xla)
        if self.latency_rounds and LATENCIES in self.xla:
            exists = f"xla={{{LATENCIES!r}: ...}} names measured ones, and XLA goes by one of the two"
            asked = "compile by simulated latencies"
            raise problem(f"latency_rounds={self.latency_rounds}", asked, exists, "leave out one of them")

    @property
    def is_once(self) -> bool:
        """Whether gradients of several micro-steps are summed on each device, and reduced once behind them."""
        return self.accumulate > 1 and self.reduce_gradients == "once"
