"""Measurements for cluster profiles, which `plan` and `explain` read.

    kernels.py    collectives: each algorithm against XLA's own, in the style of nccl-tests
    fit.py        latency and bandwidth of a link, fitted to the times
    found.py      the measured rows and links, and the profile that they make
    gpu.py        gpu: matrix products by size, copies and kernel launches, and their profile
    timing.py     wall times and quartiles

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.bench.collective_timing import collectives
    from meshpar.bench.gpu import products

__getattr__, __dir__ = lazy(__name__)

__all__ = ["collectives", "products"]
