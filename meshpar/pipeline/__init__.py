"""Pipeline parallelism: schedules as data, and what runs them.

Names are imported when they are first used; schedules need no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.pipeline.executor import Micro as Micro
    from meshpar.pipeline.gradients import Params as Params
    from meshpar.pipeline.gradients import Result as Result
    from meshpar.pipeline.gradients import value_and_grad as value_and_grad
    from meshpar.pipeline.schedules import SCHEDULES as SCHEDULES
    from meshpar.pipeline.schedules import Op as Op
    from meshpar.pipeline.schedules import Schedule as Schedule
    from meshpar.pipeline.schedules import Simulation as Simulation
    from meshpar.pipeline.schedules import Slots as Slots
    from meshpar.pipeline.schedules import Timeline as Timeline
    from meshpar.pipeline.schedules import dualpipe as dualpipe
    from meshpar.pipeline.schedules import dualpipe_v as dualpipe_v
    from meshpar.pipeline.schedules import gpipe as gpipe
    from meshpar.pipeline.schedules import interleaved_1f1b as interleaved_1f1b
    from meshpar.pipeline.schedules import make as make
    from meshpar.pipeline.schedules import one_f_one_b as one_f_one_b
    from meshpar.pipeline.schedules import zb_h1 as zb_h1
    from meshpar.pipeline.schedules import zb_h2 as zb_h2
    from meshpar.pipeline.schedules import zb_v as zb_v
    from meshpar.pipeline.split_backward import SplitVjp as SplitVjp
    from meshpar.pipeline.split_backward import split_vjp as split_vjp
    from meshpar.training.layers import Aux as Aux
    from meshpar.training.layers import scan_layers as scan_layers

_HOMES = {
    "executor": ("Micro",),
    "gradients": ("Params", "Result", "value_and_grad"),
    "schedules": (
        "SCHEDULES", "Op", "Schedule", "Simulation", "Slots", "Timeline", "dualpipe", "dualpipe_v", "gpipe",
        "interleaved_1f1b", "make", "one_f_one_b", "zb_h1", "zb_h2", "zb_v",
    ),
    "split_backward": ("SplitVjp", "split_vjp"),
    ".training.layers": ("Aux", "scan_layers"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"meshpar.pipeline has no {name!r}; it has {', '.join(sorted(_HOME_OF))}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
