"""What `train_step` is given beside the loss."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshpar.hardware.compile_options import Options, check_kind
from meshpar.layers.losses import MEAN_OVER_EXAMPLES
from meshpar.layers.precision import Precision, as_precision
from meshpar.layers.scan import check_remat
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a training step; see `train_step`."""

    accumulate: int = 1
    reduce_gradients: Literal["each_microbatch", "once"] = "each_microbatch"
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    interleave: int = 1
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    loss_is: Literal["mean_over_examples"] | None = None
    xla: Options = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for field, what in (
            ("accumulate", "run that many micro-steps"),
            ("interleave", "run that many slices of the rows beside each other"),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise problem(f"{field}={value!r}", what, "that is no positive integer", "use 1 or more")
        for field, known in (
            ("reduce_gradients", ("each_microbatch", "once")),
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

    @property
    def is_once(self) -> bool:
        """Whether gradients of several micro-steps are summed on each device, and reduced once behind them."""
        return self.accumulate > 1 and self.reduce_gradients == "once"
