"""Measurement of the kernel rates of a device for a cluster profile, within a time limit."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.bench import gpu_programs as programs
from meshpar.bench.gpu_programs import LARGE, SMALL, Measurement
from meshpar.bench.timing import seconds_of
from meshpar.hardware.clusters import Cluster, cluster_of, gpu_of_kind, parse_profile
from meshpar.runs.recipe import Recipe
from meshpar.sharding.errors import check_choice, check_number, check_positive_int, problem
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import si

SECONDS = 30.0
COMPILE_SHARE = 0.6
"""Part of the time limit after which the measurements begin, also if programs are still being compiled."""
TARGET_S = 0.05
"""Approximate seconds of a measured run, which calls its program repeatedly."""
MAX_CALLS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuRates(Printed, Plain):
    """Measured rates of a device. Prints as a table."""

    device: str
    """Name of the device in jax."""
    dtype: str
    matmuls: Mapping[int, float]
    """n -> median FLOP/s of `[n, n] @ [n, n]` in `dtype`."""
    bytes_per_s: float = 0.0
    """Bytes read and written per second in a copy of a large array; 0 if it was not measured."""
    launch_s: float = 0.0
    """Seconds between the starts of consecutive small kernels in a chain; 0 if it was not measured."""
    source: str
    matmuls_fp8: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """The same of e4m3 matmuls, on GPUs that have them."""
    shapes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """FLOP/s of the matmuls of a recipe, by `hardware.clusters.shape_key`."""
    attention: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    """FLOP/s of attention in bfloat16 by key and length (`hardware.kernel_rates`)."""
    grouped: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    """FLOP/s of grouped matmuls in bfloat16 by key and size."""
    seconds: float = 0.0
    """Seconds that the measurement took."""
    dropped: tuple[str, ...] = ()
    """Measurements for which there was no time, the most important first."""
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Measurement -> error of the compilation or the execution."""

    def profile(self, path: str | Path) -> Cluster:
        """Add the rates to the profile in the file. Without a file, start from a node of this GPU."""
        cluster = profile_of(self.device, path)
        measured: dict[str, Mapping[Any, Any]] = {
            "products": self.matmuls, "products_fp8": self.matmuls_fp8, "shapes": self.shapes,
            "attention": self.attention, "grouped": self.grouped,
        }  # fmt: skip
        fields: dict[str, Any] = {name: {**getattr(cluster, name), **rates} for name, rates in measured.items()}
        fields |= {"copy_bytes_per_s": self.bytes_per_s or cluster.copy_bytes_per_s}
        fields |= {"launch_s": self.launch_s or cluster.launch_s}
        source = "; ".join(filter(None, (cluster.source, self.source)))
        return dataclasses.replace(cluster, **fields, source=source)

    def __rich__(self) -> Any:
        gpu = gpu_of_kind(self.device)
        peaks = {bits: None if gpu is None else peak(gpu) for bits, peak in _PEAKS.items()}
        rows = [(f"{self.dtype} {n:,}³", rate, 16) for n, rate in self.matmuls.items()]
        rows += [(f"e4m3 {n:,}³", rate, 8) for n, rate in self.matmuls_fp8.items()]
        rows += [(key, rate, int(key.split()[0])) for key, rate in self.shapes.items()]
        for name, rates in (("attention", self.attention), ("grouped", self.grouped)):
            rows += [
                (f"{name} {key}, {size:,}", rate, 16)
                for key, by_size in rates.items()
                for size, rate in by_size.items()
            ]
        shown = [
            (name, si(rate, "FLOP/s"), "" if (peak := peaks[bits]) is None else f"{rate / peak:.0%}")
            for name, rate, bits in rows
        ]
        captions = [f"copies move {si(self.bytes_per_s, 'B/s')}"] * bool(self.bytes_per_s)
        captions += [f"a launch takes {si(self.launch_s, 's')}"] * bool(self.launch_s)
        captions += [f"no time for: {', '.join(self.dropped)}"] * bool(self.dropped)
        captions += [f"{name} failed: {error}" for name, error in self.failed.items()]
        caption = "\n".join([*captions, f"{self.source}; {self.seconds:.0f} s"])
        return table(f"{self.device}", ("kernel", "rate", "of the data sheet"), shown, caption=caption)


_PEAKS: Mapping[int, Callable[[Any], float]] = {
    16: lambda gpu: gpu.bf16_flops_per_s, 8: lambda gpu: gpu.fp8_flops_per_s
}  # fmt: skip


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


def gpu_rates(
    *,
    sizes: Sequence[int] = (),
    dtype: str = "bfloat16",
    repeats: int = 3,
    seconds: float = SECONDS,
    recipe: Recipe | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> GpuRates:
    """Measure matmuls, attention, grouped matmuls, a copy and a kernel launch on the first device.

    Programs are traced first and compiled in threads. Then they are measured in turn, in the order of their priority.
    Random operands are created on the device.

    Args:
      sizes: values of n. Then only square matmuls, copies and launches are measured. By default all kernels are,
        in sizes for a GPU or a CPU.
      dtype: `bfloat16`, `float16` or `float32`, for square matmuls. Other kernels compute in bfloat16 and e4m3.
      repeats: number of runs of a program. The median is reported.
      seconds: time limit. Programs that exceed it are not measured, and are listed in the result.
      recipe: a recipe whose matmuls are measured in addition.
      progress: called with a line of text before each measurement.

    Raises:
      MeshparError: a size or `repeats` is not a positive integer, or the dtype is unknown.
    """
    start = time.perf_counter()
    device = jax.devices()[0]
    for size in sizes:
        check_positive_int("bench gpu", "the size of the matrices", size=size)
    check_positive_int("bench gpu", "the number of runs", repeats=repeats)
    check_number("bench gpu", "30", seconds=seconds)
    check_choice("bench gpu", "the dtype", ("bfloat16", "float16", "float32"), dtype=dtype)
    usual = SMALL if device.platform == "cpu" else LARGE
    if sizes:
        usual = dataclasses.replace(usual, matmuls=tuple(sizes))
    jobs = programs.measurements(usual, dtype, device, recipe)
    if sizes:
        jobs = [job for job in jobs if job.kind in ("matmuls", "copy", "launch", "shapes")]
    progress("tracing and compiling")
    times_s, failed = _measure(jobs, repeats, start, seconds, progress)
    today = datetime.date.today().isoformat()
    return GpuRates(
        device=device.device_kind,
        dtype=dtype,
        **_rates(jobs, times_s),
        source=f"meshpar bench gpu, jax {jax.__version__}, {device.device_kind}, {today}",
        seconds=time.perf_counter() - start,
        dropped=tuple(job.name for job in jobs if job.name not in times_s and job.name not in failed),
        failed=failed,
    )


def _measure(
    jobs: Sequence[Measurement], repeats: int, start: float, seconds: float, progress: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return name -> seconds of a call, and name -> error."""
    times_s: dict[str, float] = {}
    failed: dict[str, str] = {}
    pool = ThreadPoolExecutor(max(os.cpu_count() or 2, 2))
    compiled = _compile(jobs, pool, start + COMPILE_SHARE * seconds, failed)
    try:
        for job, is_second in ((job, is_second) for is_second in (False, True) for job in jobs):
            now = time.perf_counter()
            if now > start + seconds:
                break
            if job.name not in compiled or job.name in times_s or job.name in failed:
                continue
            # Compilations in other threads disturb measurements. The second pass measures programs that are compiled
            # late.
            until = start + (1.0 if is_second or not times_s else COMPILE_SHARE) * seconds
            progress(f"measuring {job.name}")
            try:
                program, *makers = (each.result(max(until - now, 0.0)) for each in compiled[job.name])
                time_s = _time_s(program, [make() for make in makers], repeats, start + seconds)
            except TimeoutError:
                continue
            except Exception as error:
                failed[job.name] = _message(error)
                continue
            times_s[job.name] = time_s / job.calls - (times_s.get(job.minus, math.nan) if job.minus else 0.0)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return times_s, failed


def _compile(
    jobs: Sequence[Measurement], pool: ThreadPoolExecutor, deadline: float, failed: dict[str, str]
) -> dict[str, list[Future[Any]]]:
    """Trace programs until the deadline, and compile them in threads.

    Returns:
      Name -> the compiled program, and a program for each operand that creates it.
    """
    operands: dict[tuple[Any, ...], Future[Any]] = {}
    compiled: dict[str, list[Future[Any]]] = {}
    for job in jobs:
        if time.perf_counter() > deadline:
            break
        try:
            program = pool.submit(jax.jit(job.function).lower(*job.args).compile)
        except Exception as error:  # libraries raise many types
            failed[job.name] = _message(error)
            continue
        for like in job.args:
            if (like.shape, like.dtype) not in operands:
                lowered = jax.jit(functools.partial(_random, like)).lower()
                operands[like.shape, like.dtype] = pool.submit(lowered.compile)
        compiled[job.name] = [program, *(operands[like.shape, like.dtype] for like in job.args)]
    return compiled


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]


def _random(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random numbers with mean 0, by XLA's own generator, which is fast to compile.

    The standard deviation is 1, but smaller for matrices with more than 8 bits, so that a chain of matmuls is stable.
    """
    key = jax.random.key(0, impl="unsafe_rbg")
    scale = like.shape[0] ** -0.5 if len(like.shape) == 2 and like.dtype.itemsize > 1 else 1.0
    return (scale * 3**0.5 * jax.random.uniform(key, like.shape, jnp.float32, -1, 1)).astype(like.dtype)


def _time_s(program: Callable[..., Any], args: Sequence[jax.Array], repeats: int, deadline: float) -> float:
    """Return the median seconds of a call. Each run calls the program repeatedly."""

    def run(count: int) -> None:
        result = None
        for _ in range(count):
            result = program(*args)
        jax.block_until_ready(result)

    run(1)
    once_s = seconds_of(lambda: run(2)) / 2
    count = min(max(round(TARGET_S / max(once_s, 1e-7)), 1), MAX_CALLS)
    runs_s = [seconds_of(lambda: run(count))]
    while len(runs_s) < repeats and time.perf_counter() < deadline:
        runs_s.append(seconds_of(lambda: run(count)))
    return statistics.median(runs_s) / count


def _rates(jobs: Sequence[Measurement], times_s: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of `GpuRates` with the rates of the measured programs."""
    rates: dict[str, Any] = {"matmuls": {}, "matmuls_fp8": {}, "shapes": {}, "attention": {}, "grouped": {}}
    for job in jobs:
        time_s = times_s.get(job.name, math.nan)
        if not time_s > 0:
            continue
        rate = job.work / time_s
        if job.kind == "copy":
            rates["bytes_per_s"] = rate
        elif job.kind == "launch" and job.minus:
            rates["launch_s"] = 1 / rate
        elif job.kind == "shapes":
            rates["shapes"][job.key] = rate
        elif job.key:
            rates[job.kind].setdefault(job.key, {})[job.size] = rate
        elif job.kind != "launch":
            rates[job.kind][job.size] = rate
    return {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in rates.items()}
