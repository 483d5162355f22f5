"""Measurements on the local devices: links, GPUs, and training steps of recipes.

    collective_timing.py   collectives: each algorithm against XLA's
    gpu.py                 kernel rates of a device, and their profile; gpu_programs.py: the measured programs
    step_timing.py         training steps of a recipe, next to the prediction of `explain`
    trace_profile.py       profiles with the rates of a traced step
    tuning.py              search for faster options of a recipe
    variants.py            steps of a recipe with changed fields, on synthetic batches
    timing.py              wall times and quartiles

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.bench.collective_timing import collectives
    from meshpar.bench.gpu import gpu_rates
    from meshpar.bench.step_timing import steps
    from meshpar.bench.tuning import tune

__getattr__, __dir__ = lazy(__name__)

__all__ = ["collectives", "gpu_rates", "steps", "tune"]
