"""Figures of runs, programs, plans, schedules and measurements, drawn with matplotlib."""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.plots.figures import (
        axes_bytes,
        collectives,
        expert_load,
        growth,
        loss_curve,
        memory,
        memory_timeline,
        schedule,
        schedule_times,
        timeline,
    )

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "axes_bytes",
    "collectives",
    "expert_load",
    "growth",
    "loss_curve",
    "memory",
    "memory_timeline",
    "schedule",
    "schedule_times",
    "timeline",
]
