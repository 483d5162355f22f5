"""Public names of the hooks of `mp.fit`: `mp.hooks.Checkpointer`, `mp.hooks.Validator`, ...

    hooks = [mp.hooks.ProgressBar(), mp.hooks.MetricsFile("metrics.jsonl"), mp.hooks.Preemption()]
    mp.fit(step, state, batches, steps=100, hooks=hooks)

A subclass of `Hook` is a new hook. Its methods receive the `Run`, a `Record` for each step and a `Validation`.
Imports are lazy.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.loop.expert_load import ExpertLoad
    from meshpar.loop.fit import (
        Checkpointer,
        FitResult,
        Hook,
        Preemption,
        Record,
        Run,
        Validation,
        Validator,
        restore_or_init,
    )
    from meshpar.loop.goodput import Goodput
    from meshpar.loop.learning_rate import LearningRate
    from meshpar.loop.metric_writers import TensorBoard, WandB
    from meshpar.loop.metrics_file import MetricsFile
    from meshpar.loop.profiler import Profile
    from meshpar.loop.progress_bar import ProgressBar

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Checkpointer", "ExpertLoad", "FitResult", "Goodput", "Hook", "LearningRate", "MetricsFile", "Preemption",
    "Profile", "ProgressBar", "Record", "Run", "TensorBoard", "Validation", "Validator", "WandB", "restore_or_init",
]  # fmt: skip
