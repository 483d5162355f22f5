"""Measurement of a device for a cluster profile: square matmuls by size, copies and kernel launches."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.bench.timing import seconds_of
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, cluster_of, gpu_of_kind, parse_profile
from meshpar.sharding.errors import check_choice, check_positive_int, problem
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import si

SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
SMALL = (64, 128, 256, 512)
"""Values of n for `[n, n]` matmuls on CPUs."""
MIN_COPIED_BYTES = 64_000_000
"""Minimum size of the copied array, larger than the caches."""
CHAINED = 32
"""Number of kernels in a chain. A chain of twice the length has the same overhead, so the difference is kernel time."""
TARGET_S = 0.05
"""Approximate seconds of a measured run, which repeats its operation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products(Printed, Plain):
    """Measured rates of a device. Prints as a table."""

    device: str
    """Name of the device in jax."""
    dtype: str
    flops_per_s: dict[int, float]
    """n -> median FLOP/s of `[n, n] @ [n, n]`."""
    bytes_per_s: float
    """Bytes read and written per second in a copy of a large array."""
    source: str
    launch_s: float = 0.0
    """Seconds between the starts of consecutive small kernels in a chain."""

    def profile(self, path: str | Path) -> Cluster:
        """Add the rates to the profile in the file. Without a file, start from a node of this GPU."""
        cluster = profile_of(self.device, path)
        source = "; ".join(filter(None, (cluster.source, self.source)))
        return dataclasses.replace(cluster, products=self.flops_per_s, launch_s=self.launch_s, source=source)

    def __rich__(self) -> Any:
        gpu = gpu_of_kind(self.device)
        peak = None if gpu is None else gpu.bf16_flops_per_s
        rows = [
            (f"{n:,}", si(rate, "FLOP/s"), "" if peak is None else f"{rate / peak:.0%}")
            for n, rate in self.flops_per_s.items()
        ]
        caption = f"copies move {si(self.bytes_per_s, 'B/s')}; a launch takes {si(self.launch_s, 's')}; {self.source}"
        title, columns = f"{self.device}: {self.dtype} matmuls", ("n", "rate", "of the data sheet")
        return table(title, columns, rows, caption=caption)


def profile_of(device: str, path: str | Path) -> Cluster:
    """Return the profile in the file. Without a file, return a node of this GPU."""
    gpu = gpu_of_kind(device)
    if gpu is None:
        fix = "measure a GPU of the catalogue, or remove --save"
        raise problem(f"device `{device}`", "save its rates", "it is not in the catalogue", fix, "unknown-name")
    if not Path(path).exists():
        return cluster_of(gpu, nodes=1, gpus_per_node=jax.local_device_count())
    profile = parse_profile(str(path))
    if not isinstance(profile, Cluster) or profile.gpu.name != gpu.name:
        requested, reason = f"add rates of a {gpu.name}", f"it is for {profile.name}"
        raise problem(f"profile `{path}`", requested, reason, "use a different file", code="conflict")
    return profile


def products(*, sizes: Sequence[int] = (), dtype: str = "bfloat16", repeats: int = 5) -> Products:
    """Measure square matmuls, a copy and a kernel launch on the first device.

    Args:
      sizes: values of n, by default `SIZES`, or `SMALL` on CPUs.
      dtype: `bfloat16`, `float16` or `float32`.
      repeats: number of runs. The median is reported.

    Raises:
      MeshparError: a size or `repeats` is not a positive integer, or the dtype is unknown.
    """
    device = jax.devices()[0]
    sizes = sizes or (SMALL if device.platform == "cpu" else SIZES)
    for size in sizes:
        check_positive_int("bench gpu", "the size of the matrices", size=size)
    check_positive_int("bench gpu", "the number of runs", repeats=repeats)
    check_choice("bench gpu", "the dtype", ("bfloat16", "float16", "float32"), dtype=dtype)
    rates, numbers = {}, np.random.default_rng(0)
    for n in sorted(sizes):  # each matmul depends on the previous, so that the compiler removes none
        a, b = (jnp.asarray(numbers.normal(size=(n, n)) / n**0.5, dtype) for _ in range(2))
        rates[n] = cost.matmul_flops(n, n, n) / _time_s(functools.partial(jnp.matmul, b=b), a, repeats)
    x = jnp.ones((max(4 * max(sizes) ** 2, MIN_COPIED_BYTES // 4),), jnp.float32)
    copied_s = _time_s(lambda x: x + 1, x, repeats)
    today = datetime.date.today().isoformat()
    return Products(
        device=device.device_kind, dtype=dtype, flops_per_s=rates, bytes_per_s=2 * x.nbytes / copied_s,
        launch_s=_launch_s(repeats),
        source=f"meshpar bench gpu, jax {jax.__version__}, {device.device_kind}, {today}",
    )  # fmt: skip


def _launch_s(repeats: int) -> float:
    """Return the additional seconds per kernel in a chain of small dependent kernels."""
    counts = (CHAINED, 2 * CHAINED)
    short, long = (_time_s(functools.partial(_chain, count=count), jnp.ones(8), repeats) for count in counts)
    return max(long - short, 0.0) / CHAINED


def _chain(x: jax.Array, count: int) -> jax.Array:
    for _ in range(count):  # barriers keep XLA from fusing the kernels
        x = jax.lax.optimization_barrier(x + 1)
    return x


def _time_s(run: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    """Return the median seconds of `run`, applied to `x` and then repeatedly to the result."""
    program = jax.jit(lambda x, times: jax.lax.fori_loop(0, times, lambda _, x: run(x), x))
    jax.block_until_ready(program(x, 1))
    once_s = seconds_of(lambda: jax.block_until_ready(program(x, 2))) / 2
    times = max(1, round(TARGET_S / max(once_s, 1e-7)))
    runs_s = [seconds_of(lambda: jax.block_until_ready(program(x, times))) for _ in range(repeats)]
    return statistics.median(runs_s) / times
