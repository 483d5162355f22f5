"""Options of a training step."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from meshpar.hardware.compile_options import Options, check_kind
from meshpar.layers.losses import MEAN_OVER_EXAMPLES
from meshpar.layers.precision import Precision, as_precision
from meshpar.layers.remat import check_remat
from meshpar.sharding.types import check_choice, check_positive_int, problem

ReduceGradients: TypeAlias = Literal["each_microbatch", "once_across_groups", "once"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a training step; see `train_step`."""

    accumulate: int = 1
    reduce_gradients: ReduceGradients | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    interleave: int = 1
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    loss_is: Literal["mean_over_examples"] | None = None
    xla: Options = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_positive_int("train_step", "the number of micro-steps per update", accumulate=self.accumulate)
        check_positive_int("train_step", "the number of batch slices", interleave=self.interleave)
        modes = ("each_microbatch", "once_across_groups", "once", None)
        check_choice("train_step", "the time of the gradient reduction", modes, reduce_gradients=self.reduce_gradients)
        reactions = ("raise", "skip", "ignore")
        check_choice("train_step", "the reaction to a non-finite loss or gradient", reactions, nonfinite=self.nonfinite)
        check_choice("train_step", "the meaning of a scalar loss", (None, MEAN_OVER_EXAMPLES), loss_is=self.loss_is)
        precision = as_precision(self.precision, "train_step")
        check_not_float16("train_step", precision.compute or precision.params)
        check_remat(self.remat)
        check_kind(self.xla)

    @property
    def is_once(self) -> bool:
        """Whether gradients are accumulated on each device and reduced once, after the last micro-step."""
        return self.accumulate > 1 and self.reduce_gradients == "once"


def check_not_float16(where: str, dtype: object) -> None:
    """Check that a step does not compute in float16."""
    if str(dtype) == "float16":
        reason = "gradients below 6e-8 would become zero, and meshpar does not scale the loss"
        fix = 'use Precision(compute="bfloat16"), which has the range of float32'
        raise problem(where, "compute in float16", reason, fix, code="unsupported-feature")
