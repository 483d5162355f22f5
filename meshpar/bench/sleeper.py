"""Stage functions that sleep: what a pipeline runs where only its schedule is to be seen.

A call into Python costs milliseconds beside a sleep of 20, more on a busy machine, so sleeping is a custom call in C++,
compiled once a process by the compiler that the machine has. Where it has none, Python sleeps.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.pipeline.schedules import Schedule, Timeline
from meshpar.sharding.types import problem

OPS = "FBW"
SOURCE = Path(__file__).with_name("nap.cc")
COMPILERS = ("c++", "g++", "clang++")
TARGET = "meshpar_nap"
"""Under which XLA knows the custom call."""


class Nap(NamedTuple):
    """One sleep, on a clock that only differences of are to be read from."""

    device: int
    op: str
    asked_s: float
    """How long it was to be; it is no shorter."""
    start_s: float
    end_s: float


class Sleeper:
    """Stage functions whose F, B and W sleep, and when they did.

    Ops of one device sleep one after another, as a device that has one thing at hand works, even where the host runs
    them at once. None sleeps less than it is to, and none begins before its operand is there.
    """

    def __init__(self, op_s: float, *, native: bool = True) -> None:
        """A sleeper of its own, with its own naps.

        Args:
          op_s: how long one op of one `stages`-th of the model sleeps.
          native: False: Python sleeps, also where there is a compiler.
        """
        found = _compiled() if native else "asked for"
        self.bed: _Bed = _PythonBed() if isinstance(found, str) else _NativeBed(found)
        self.why_python = found if isinstance(found, str) else None
        """Why sleeps are Python's; None where they are native."""
        self.op_s = op_s

    @property
    def op_s(self) -> float:
        """How long one op sleeps; programs that are there already follow it."""
        return self._op_s

    @op_s.setter
    def op_s(self, op_s: float) -> None:
        self._op_s = op_s
        self.bed.set(op_s)

    @property
    def naps(self) -> list[Nap]:
        """All since the last `forget`, in the order of their ends."""
        return self.bed.naps()

    def counts(self) -> Counter[tuple[int, str]]:
        """How many naps, by device and op."""
        return Counter((nap.device, nap.op) for nap in self.naps)

    def forget(self) -> None:
        """Begin a new list of naps."""
        self.bed.forget()

    def stage(self, share: float, axis: str = "stage") -> Callable[..., jax.Array]:
        """`(weights [width], x [rows, width], micro) -> y`: y is their product.

        Args:
          share: of a stage's part of the model, for a model that is cut into more parts.
          axis: the mesh axis whose rank names the device.
        """

        @jax.custom_vjp
        def work(w: jax.Array, x: jax.Array, rank: jax.Array) -> jax.Array:
            return w * x + self.nap("F", share, rank, x)

        def forward(w: jax.Array, x: jax.Array, rank: jax.Array) -> tuple[jax.Array, Any]:
            return work(w, x, rank), (w, x, rank)

        def backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            w, x, rank = kept
            dx = w * dy + self.nap("B", share, rank, dy)
            dw = (x * dy).sum(0) + self.nap("W", share, rank, x * dy)
            return dw, dx, jnp.zeros_like(rank)

        work.defvjp(forward, backward)
        return lambda w, x, micro: work(w, x, lax.axis_index(axis).astype(x.dtype))

    def nap(self, op: str, share: float, rank: jax.Array, after: jax.Array) -> jax.Array:
        """Zero, after a sleep that begins when `after` is there."""
        # One small operand: a callback copies each that it takes.
        return self.bed.nap(op, share, jnp.stack([rank, after.ravel()[0]]))


def timeline(schedule: Schedule, naps: Sequence[Nap], *, unit_s: float = 1.0) -> Timeline:
    """When which op of a step was, from the first one's start: as `Schedule.simulate` has it, but measured.

    Args:
      schedule: that ran.
      naps: of one step, `sleeper.naps`.
      unit_s: of the times: 1e-3 gives milliseconds.

    Raises:
      ValueError: these are not the naps of one step of it.
    """
    slept = defaultdict(list)
    for nap in sorted(naps, key=lambda nap: nap.start_s):
        slept[nap.device, nap.op].append(nap)
    ops = schedule.table[..., 0] >= 0
    times = np.full((2, *ops.shape), np.nan)
    for stage, kind in np.ndindex(ops.shape[1:]):
        ticks, own = np.flatnonzero(ops[:, stage, kind]), slept[stage, OPS[kind]]
        if len(ticks) != len(own):
            raise problem(
                f"timeline of schedule `{schedule.name}`, stage {stage}",
                f"find its {len(ticks)} {OPS[kind]}s",
                f"there are {len(own)} naps of that kind",
                "call forget() on the sleeper, run one step, and give its naps",
            )
        times[:, ticks, stage, kind] = np.transpose([(nap.start_s, nap.end_s) for nap in own])
    start, end = (times - np.nanmin(times)) / unit_s
    return Timeline(start=start, end=end, busy=np.nansum(end - start, axis=(0, 2)))


class _Bed(Protocol):
    def set(self, op_s: float) -> None: ...

    def nap(self, op: str, share: float, told: jax.Array) -> jax.Array:
        """Zero, after a sleep on the device whose rank `told` begins with."""
        ...

    def naps(self) -> list[Nap]: ...

    def forget(self) -> None: ...


_ZERO = jax.ShapeDtypeStruct((), np.float32)


class _NativeBed:
    """Sleeps in C++, on the device's own thread."""

    _numbers = itertools.count()

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.number = library, next(self._numbers)

    def set(self, op_s: float) -> None:
        self.library.meshpar_set(self.number, round(op_s * 1e9))

    def nap(self, op: str, share: float, told: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(TARGET, _ZERO)
        return call(told, sleeper=np.int64(self.number), op=np.int64(OPS.index(op)), share=np.float64(share))

    def naps(self) -> list[Nap]:
        count = self.library.meshpar_naps(self.number, None, 0)
        found = np.zeros((count, 5), np.int64)
        self.library.meshpar_naps(self.number, found.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)), count)
        return [Nap(device, OPS[op], *(ns / 1e9 for ns in times)) for device, op, *times in found.tolist()]

    def forget(self) -> None:
        self.library.meshpar_forget(self.number)


class _PythonBed:
    """Sleeps in a callback."""

    def __init__(self) -> None:
        self.op_s = 0.0
        self._naps: list[Nap] = []
        self._beds: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def set(self, op_s: float) -> None:
        self.op_s = op_s

    def nap(self, op: str, share: float, told: jax.Array) -> jax.Array:
        def sleep(told: jax.Array) -> np.ndarray:
            device = int(np.asarray(told)[0])
            with self._beds[device]:
                asked, start = share * self.op_s, time.perf_counter()
                time.sleep(asked)
                self._naps.append(Nap(device, op, asked, start, time.perf_counter()))
            return np.zeros((), np.float32)

        return jax.pure_callback(sleep, _ZERO, told)

    def naps(self) -> list[Nap]:
        return list(self._naps)

    def forget(self) -> None:
        self._naps = []


@functools.cache
def _compiled() -> ctypes.CDLL | str:
    """The custom call, compiled and known to XLA; or why there is none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"there is no C++ compiler ({', '.join(COMPILERS)})"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "nap.so")
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-isystem", jax.ffi.include_dir()]
        done = subprocess.run([compiler, *flags, SOURCE, "-o", made], capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            return f"{Path(compiler).name} failed and said: {next((x for x in said if 'error' in x), said[-1])}"
        library = ctypes.CDLL(str(made))  # loaded for good: the file may go
    number, numbers = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    library.meshpar_set.argtypes = [number, number]
    library.meshpar_naps.argtypes, library.meshpar_naps.restype = [number, numbers, number], number
    library.meshpar_forget.argtypes = [number]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.meshpar_nap), platform="cpu")
    return library
