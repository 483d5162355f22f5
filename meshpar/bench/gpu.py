"""Measure a device for a cluster profile: square matrix products by size, copies and kernel launches."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.bench.timing import seconds_of
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, cluster_of, gpu_of_kind, parse_profile
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import is_int, near, problem
from meshpar.sharding.units import si

SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
SMALL = (64, 128, 256, 512)
"""On CPUs."""
LEAST_COPIED_BYTES = 64_000_000
"""More than caches hold."""
CHAINED = 32
"""Kernels more in the longer chain, of twice as many: the loop around takes the same in both."""
TARGET_S = 0.05
"""A measured run is about so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products(Printed, Plain):
    """What was measured on one device. Prints as a table."""

    device: str
    """As jax calls its kind."""
    dtype: str
    flops_per_s: dict[int, float]
    """By n of `[n, n] @ [n, n]`: medians."""
    bytes_per_s: float
    """What a copy of a large array reads and writes in a second."""
    source: str
    launch_s: float = 0.0
    """From one kernel to the next where neither does much."""

    def profile(self, path: str | Path) -> Cluster:
        """Add these products to the cluster profile in the file, or to one node of this GPU if there is no file.

        Raises:
          ValueError: a device that the catalogue does not know, or a file of other devices.
        """
        known = profile_of(self.device, path)
        source = "; ".join(filter(None, (known.source, self.source)))
        return dataclasses.replace(known, products=self.flops_per_s, launch_s=self.launch_s, source=source)

    def __rich__(self) -> Any:
        gpu = gpu_of_kind(self.device)
        peak = None if gpu is None else gpu.bf16_flops_per_s
        rows = [
            (f"{n:,}", si(rate, "FLOP/s"), "" if peak is None else f"{rate / peak:.0%}")
            for n, rate in self.flops_per_s.items()
        ]
        caption = f"copies move {si(self.bytes_per_s, 'B/s')}; a launch takes {si(self.launch_s, 's')}; {self.source}"
        title, columns = f"{self.device}: {self.dtype} products", ("n", "rate", "of the data sheet")
        return table(title, columns, rows, caption=caption)


def profile_of(device: str, path: str | Path) -> Cluster:
    """The profile that a device's products can stand in: the one that a file holds, else one node of this GPU.

    Raises:
      ValueError: a device that the catalogue does not know, or a file of other devices.
    """
    gpu = gpu_of_kind(device)
    if gpu is None:
        exists = "the catalogue does not know it: there is nothing to plan for"
        raise problem(f"the profile of a `{device}`", "hold its products", exists, "measure on a GPU it knows")
    known = parse_profile(str(path)) if Path(path).exists() else None
    if known is None:
        known = cluster_of(gpu, nodes=1, gpus_per_node=jax.local_device_count())
    if not isinstance(known, Cluster) or known.gpu.name != gpu.name:
        exists = f"it holds {known.name}"
        raise problem(f"profile `{path}`", f"add products of a {gpu.name} to it", exists, "name another file")
    return known


def products(*, sizes: Sequence[int] = (), dtype: str = "bfloat16", repeats: int = 5) -> Products:
    """Measure products of square matrices, a copy and a launch on the first device.

    Args:
      sizes: n of each; none: `SIZES`, on CPUs `SMALL`.
      dtype: `bfloat16`, `float16` or `float32`.
      repeats: runs of each, of which the median is kept.

    Raises:
      ValueError: sizes or repeats that are no whole numbers from 1 on, or another dtype.
    """
    device = jax.devices()[0]
    sizes = sizes or (SMALL if device.platform == "cpu" else SIZES)
    if not all(is_int(n, 1) for n in (*sizes, repeats)):
        exists = "sizes and repeats are whole numbers from 1 on"
        raise problem("bench gpu", f"measure {tuple(sizes)} {repeats} times", exists, "give 1024, say")
    if dtype not in (known := ("bfloat16", "float16", "float32")):
        raise problem("bench gpu", f"multiply in {dtype}", f"it is one of {', '.join(known)}", near(dtype, known))
    rates = {n: cost.matmul_flops(n, n, n) / _product_s(n, dtype, repeats) for n in sorted(sizes)}
    x = jnp.ones((max(4 * max(sizes) ** 2, LEAST_COPIED_BYTES // 4),), jnp.float32)
    copied_s = _time_s(lambda x, times: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x), x, repeats)
    today = datetime.date.today().isoformat()
    return Products(
        device=device.device_kind, dtype=dtype, flops_per_s=rates, bytes_per_s=2 * x.nbytes / copied_s,
        launch_s=_launch_s(repeats),
        source=f"meshpar bench gpu, jax {jax.__version__}, {device.device_kind}, {today}",
    )  # fmt: skip


def _product_s(n: int, dtype: str, repeats: int) -> float:
    """Of one product: each is of the one before, so that none is left out."""
    numbers = np.random.default_rng(0)
    a, b = (jnp.asarray(numbers.normal(size=(n, n)) / n**0.5, dtype) for _ in range(2))
    return _time_s(lambda x, times: jax.lax.fori_loop(0, times, lambda _, x: x @ b, x), a, repeats)


def _launch_s(repeats: int) -> float:
    """What a kernel more takes in a chain of them, each of eight numbers and of the one before."""
    short, long = (
        _time_s(lambda x, times, many=many: jax.lax.fori_loop(0, times, lambda _, x: _chain(x, many), x), x, repeats)
        for x, many in ((jnp.ones(8), CHAINED), (jnp.ones(8), 2 * CHAINED))
    )
    return max(long - short, 0.0) / CHAINED


def _chain(x: jax.Array, many: int) -> jax.Array:
    for _ in range(many):  # a barrier between two keeps XLA from making one kernel of them
        x = jax.lax.optimization_barrier(x + 1)
    return x


def _time_s(run: Any, x: jax.Array, repeats: int) -> float:
    program = jax.jit(run)
    jax.block_until_ready(program(x, 1))
    once_s = seconds_of(lambda: jax.block_until_ready(program(x, 2))) / 2
    times = max(1, round(TARGET_S / max(once_s, 1e-7)))
    took_s = [seconds_of(lambda: jax.block_until_ready(program(x, times))) for _ in range(repeats)]
    return statistics.median(took_s) / times
