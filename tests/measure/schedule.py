"""Every schedule on host devices whose stages sleep, over its simulation: `python -m tests.measure.schedule`.

Sleeping takes no core and every host device has a thread of its own, so the wall clock shows what a schedule and its
executor make of the time: bubbles, waiting, and the work around the stages. A step takes no less than its table allows,
but for one thing: in a simulation a whole backward hands on its result when both halves are done, and the executor
sends the gradient of the input as soon as it is there, so 1F1B may take a little less.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.bench.timing import quartiles
from meshpar.pipeline import SCHEDULES, Params, Schedule, make, value_and_grad
from tests.measure.report import Figures, Measure, in_turn, load

CASES = ((4, 8), (4, 16), (8, 16))
"""Stages and microbatches."""
WIDTH = 4
"""Of a microbatch's one row: as good as nothing to work on and to send."""


@functools.cache
def library() -> ctypes.CDLL:
    """The custom call that sleeps: a call into Python would cost milliseconds beside each sleep."""
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder, "nap.so"))
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-isystem", jax.ffi.include_dir()]
        subprocess.run(["c++", *flags, Path(__file__).with_name("nap.cc"), "-o", made], check=True)
        found = ctypes.CDLL(made)  # loaded for good: the file may go
    found.count.restype = ctypes.c_int64
    jax.ffi.register_ffi_target("nap", jax.ffi.pycapsule(found.nap), platform="cpu")
    return found


def naps(stages: int) -> list[list[int]]:
    """How often each stage has slept in F, B and W since this was last asked."""
    return [[library().count(stage, op) for op in range(3)] for stage in range(stages)]


def sleeping(op_s: float) -> Callable[..., jax.Array]:
    """`(weights [width], x [rows, width], micro) -> weights * x`, of which F, B and W sleep `op_s` each."""
    library()

    def nap(op: int, rank: jax.Array, after: jax.Array) -> jax.Array:
        """Zero, after a sleep that begins when `after` is there."""
        call = jax.ffi.ffi_call("nap", jax.ShapeDtypeStruct((), np.float32))
        return call(jnp.stack([rank, after.ravel()[0]]), op=np.int64(op), op_ns=np.int64(op_s * 1e9))

    @jax.custom_vjp
    def work(w: jax.Array, x: jax.Array, rank: jax.Array) -> jax.Array:
        return w * x + nap(0, rank, x)

    def backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        w, x, rank = kept
        return (x * dy).sum(0) + nap(2, rank, x * dy), w * dy + nap(1, rank, dy), jnp.zeros_like(rank)

    work.defvjp(lambda w, x, rank: (work(w, x, rank), (w, x, rank)), backward)
    return lambda w, x, micro: work(w, x, jax.lax.axis_index("stage").astype(x.dtype))


def program(schedule: Schedule, stage: Callable[..., jax.Array]) -> Callable[[], Any]:
    """A compiled step of the executor."""
    mesh = mp.MeshSpec(stage=schedule.stages).build(jax.devices()[: schedule.stages])
    weights = 1 + np.arange(schedule.num_parts * WIDTH, dtype=np.float32).reshape(-1, WIDTH) / 64
    rows = np.linspace(-1, 1, schedule.microbatches * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    params = Params(jax.device_put(weights, NamedSharding(mesh, P("stage"))))
    batch = {"inputs": jax.device_put(rows, NamedSharding(mesh, P()))}
    step = value_and_grad(stage, lambda ends, y, micro: (y.mean(), {}), schedule=schedule, mesh=mesh)
    run = jax.jit(step).lower(params, batch).compile()
    return lambda: jax.block_until_ready(run(params, batch))


def measured(names: Sequence[str], cases: Sequence[tuple[int, int]], op_s: float, repeats: int) -> Figures:
    """Time of a step over its simulated makespan, of every schedule; F, B and W of one stage sleep `op_s` each."""
    before, measures = load(), []
    for stages, microbatches in cases:
        made = {name: make(name, stages, microbatches) for name in names}
        # A part of a more finely cut model takes its share.
        sleep = {name: program(one, sleeping(op_s * one.stages / one.num_parts)) for name, one in made.items()}
        empty = {name: program(one, lambda w, x, micro: w * x) for name, one in made.items()}
        times, around = in_turn(sleep, repeats), in_turn(empty, repeats)
        for name, one in made.items():
            simulated = one.simulate(f=op_s, b=op_s, w=op_s)
            low, median, high = quartiles(times[name])
            tick_us = 1e6 * quartiles(around[name])[1] / one.ticks
            measures.append(
                Measure(
                    name=f"{name}, p={stages} m={microbatches}", unit="×", limit=1.1,
                    value=median / simulated.free.makespan, low=low / simulated.free.makespan,
                    high=high / simulated.free.makespan,
                    detail=f"{1e3 * median:.0f} ms of {1e3 * simulated.free.makespan:.0f} simulated, lockstep "
                    f"{1e3 * simulated.lockstep.makespan:.0f}; bubble {1 - 3 * microbatches * op_s / median:.1%} of "
                    f"{one.bubble_fraction:.1%}; an empty tick {tick_us:.0f} µs",
                )
            )  # fmt: skip
    title = f"step ÷ simulation, F = B = W = {1e3 * op_s:g} ms, {repeats} repeats; load {before:.1f} to {load():.1f}"
    return Figures(title=f"{title} on {os.cpu_count()} cores", measures=tuple(measures))


def main() -> None:
    from meshpar.cli.main import print_report

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*SCHEDULES], help="of schedules; default: all")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="time of F, of B, of W (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median is kept (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    print_report(measured(args.names, CASES, args.sleep_ms / 1e3, args.repeats), as_json=args.json)


if __name__ == "__main__":
    main()
