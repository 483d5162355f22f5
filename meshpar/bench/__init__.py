"""Measurements for cluster profiles, which `plan` and `explain` read.

    collective_timing.py   collectives: each algorithm against XLA's
    link_fit.py            latency and bandwidth of a link, fitted to the times
    found.py               results: measured times, fitted links, and the profile that they form
    gpu.py                 matmuls by size, copies and kernel launches, and their profile
    timing.py              wall times and quartiles

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.bench.collective_timing import collectives
    from meshpar.bench.gpu import products

__getattr__, __dir__ = lazy(__name__)

__all__ = ["collectives", "products"]
