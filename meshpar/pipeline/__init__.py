"""Pipeline parallelism: schedules as data, and what runs them.

Schedules need no jax; what runs them is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshpar.pipeline.schedules import SCHEDULES as SCHEDULES
from meshpar.pipeline.schedules import Schedule as Schedule
from meshpar.pipeline.schedules import ScheduleTimeline as ScheduleTimeline
from meshpar.pipeline.schedules import Simulation as Simulation
from meshpar.pipeline.schedules import Slots as Slots
from meshpar.pipeline.schedules import StageOp as StageOp
from meshpar.pipeline.schedules import dualpipe as dualpipe
from meshpar.pipeline.schedules import dualpipe_v as dualpipe_v
from meshpar.pipeline.schedules import gpipe as gpipe
from meshpar.pipeline.schedules import interleaved_1f1b as interleaved_1f1b
from meshpar.pipeline.schedules import make as make
from meshpar.pipeline.schedules import one_f_one_b as one_f_one_b
from meshpar.pipeline.schedules import zb_h1 as zb_h1
from meshpar.pipeline.schedules import zb_h2 as zb_h2
from meshpar.pipeline.schedules import zb_v as zb_v

if TYPE_CHECKING:
    from meshpar.pipeline.executor import Micro as Micro
    from meshpar.pipeline.executor import Params as Params
    from meshpar.pipeline.gradients import Result as Result
    from meshpar.pipeline.gradients import value_and_grad as value_and_grad
    from meshpar.pipeline.split_backward import SplitVjp as SplitVjp
    from meshpar.pipeline.split_backward import split_vjp as split_vjp
    from meshpar.training.layers import Aux as Aux
    from meshpar.training.layers import scan_layers as scan_layers

_HOMES = {
    "Micro": "executor", "Params": "executor", "Result": "gradients", "value_and_grad": "gradients",
    "Aux": ".training.layers", "scan_layers": ".training.layers", "SplitVjp": "split_backward",
    "split_vjp": "split_backward",
}  # fmt: skip
__all__ = [
    *_HOMES, "SCHEDULES", "Schedule", "ScheduleTimeline", "Simulation", "Slots", "StageOp", "dualpipe", "dualpipe_v",
    "gpipe", "interleaved_1f1b", "make", "one_f_one_b", "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"meshpar.pipeline has no {name!r}; it has {', '.join(__dir__())}")
    home = _HOMES[name]
    module = importlib.import_module(f"meshpar{home}" if home.startswith(".") else f"meshpar.pipeline.{home}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
