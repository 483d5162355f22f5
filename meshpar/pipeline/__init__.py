"""Pipeline parallelism: schedules, the executor that runs them, and split backward passes.

Schedules do not need jax. The executor is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.schedules import (
    SCHEDULES,
    Schedule,
    ScheduleTimeline,
    Simulation,
    Slots,
    StageOp,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    make,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.layers.scan import Aux, scan_layers
    from meshpar.pipeline.gradients import Result, value_and_grad
    from meshpar.pipeline.split_backward import SplitVjp, split_vjp
    from meshpar.pipeline.stage_program import MicrobatchInputs, Params

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "SCHEDULES", "Aux", "MicrobatchInputs", "Params", "Result", "Schedule", "ScheduleTimeline", "Simulation", "Slots",
    "SplitVjp", "StageOp", "dualpipe", "dualpipe_v", "eager_1f1b", "gpipe", "interleaved_1f1b", "make", "one_f_one_b",
    "scan_layers", "split_vjp", "value_and_grad", "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip
