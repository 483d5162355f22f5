"""Estimated and measured step times of ten layouts of small models: `python -m tests.measure.ranks`.

The eight host devices share the cores of the machine, which should be idle. Steps are also timed in processor seconds,
which other processes affect less: if all cores are busy, a step takes the processor seconds divided by the number of
cores. The planner uses a profile that is measured first: links along a mesh axis (`meshpar bench collectives`), matmuls
by size, and transposes of activations. The script prints estimated and measured step times and Kendall's τ between
their orders, for both clocks. The τ between even and odd rounds is an upper bound for any estimate.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
import rich
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.bench import collective_timing as kernels
from meshpar.bench import gpu
from meshpar.bench.timing import quartiles, seconds_of
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, cluster_of, gpu_by_name
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.parallel import parse_strategy
from meshpar.planner.layout import Layout
from meshpar.planner.search import Search
from meshpar.planner.time_estimate import TimeEstimate
from meshpar.planner.workload import describe
from meshpar.sharding.printing import table
from meshpar.training.state import TrainState

DEVICES = 8
Cut = tuple[str, str, str | None, int]
"""Mesh, strategy, remat and number of micro-steps."""
LAYOUTS: tuple[Cut, ...] = (
    ("data=8", "ddp()", None, 1),
    ("fsdp=8", "zero1()", None, 1),
    ("fsdp=8", "fsdp()", None, 1),
    ("fsdp=8", "fsdp()", "full", 1),
    ("fsdp=8", "fsdp()", None, 4),
    ("fsdp=4,tensor=2", "fsdp() | tensor_parallel()", None, 1),
    ("fsdp=2,tensor=4", "fsdp() | tensor_parallel()", None, 1),
    ("tensor=8", "ddp() | tensor_parallel(sequence=True)", None, 1),
    ("tensor=8", "ddp() | tensor_parallel(sequence=True)", "full", 4),
    ("data=2,stage=4", "pipeline_parallel(stages=4, microbatches=8) | ddp()", None, 1),
)
OF_EXPERTS: tuple[Cut, ...] = (
    *LAYOUTS[:4],
    ("fsdp=8", "fsdp()", None, 2),
    ("fsdp=4,tensor=2", "fsdp() | tensor_parallel()", None, 1),
    ("fsdp=4,expert=2", "fsdp() | expert_parallel()", None, 1),
    ("fsdp=2,expert=4", "fsdp() | expert_parallel()", None, 1),
    ("expert=8", "ddp() | expert_parallel()", None, 1),
    ("expert=8", "ddp() | expert_parallel()", "full", 2),
)


class Subject(NamedTuple):
    """Model, batch and layouts."""

    config: TransformerConfig
    rows: int
    length: int
    layouts: tuple[Cut, ...]


def _decoder(num_layers: int, embed_dim: int, mlp_dim: int, **more: Any) -> TransformerConfig:
    width = {"embed_dim": embed_dim, "num_heads": 8, "num_kv_heads": 8, "head_dim": embed_dim // 8, "mlp_dim": mlp_dim}
    return TransformerConfig(num_layers=num_layers, **{"vocab_size": 512, **width, **more})


SUBJECTS: Mapping[str, Subject] = {
    "small": Subject(_decoder(4, 320, 1120), 32, 72, LAYOUTS),
    "wide": Subject(
        _decoder(2, 560, 1680, vocab_size=2080), 16, 120,
        (*LAYOUTS[:4], ("fsdp=8", "fsdp()", None, 2), *LAYOUTS[5:8],
         ("tensor=8", LAYOUTS[8][1], "full", 2),
         ("data=4,stage=2", "pipeline_parallel(stages=2, microbatches=4) | ddp()", None, 1)),
    ),
    "deep": Subject(_decoder(8, 160, 480), 32, 120, LAYOUTS),
    "experts": Subject(
        _decoder(4, 160, 240, moe=MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=240)), 32, 72, OF_EXPERTS
    ),
}  # fmt: skip
"""Models whose widths are not powers of two.

Rows of 4 kB map to the same few cache lines. Transposes of such activations (256 x 1024) took 0.69 s in one program and
4.5 s in another, depending on the addresses of buffers, which no estimate can predict. The planner's constants for
shared cores come from a model with 4 layers of width 256, not from these models."""
FLOAT32 = mp.Precision()
FLOAT32_BYTES = 4
WHAT = "products and activations measured on all host devices at once"
OF_LINKS: dict[str, Any] = {"min_bytes": 4e4, "max_bytes": 4e6, "repeats": 3}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Numbers of options in malloc.h of glibc."""
CUTS = slice(None), slice(0, None, 2), slice(1, None, 2)
"""All rounds, even rounds and odd rounds."""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_s(run: Callable[[], object]) -> float:
    """Return the processor seconds of a call divided by the number of cores."""
    before = time.process_time()
    run()
    return (time.process_time() - before) / CORES


def turn_s(turn: Callable[[jax.Array, jax.Array], jax.Array], n: int, *, repeats: int = 5) -> float:
    """Return the time of a chain of n × n matmuls that runs on all devices at the same time."""
    mesh, rows = mp.MeshSpec(data=DEVICES).build(jax.devices()[:DEVICES]), P("data")

    def turns(x: jax.Array, times: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, y: turn(y, x), x)

    program = jax.jit(jax.shard_map(turns, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False))
    values = np.random.default_rng(0).normal(size=(DEVICES * n, n)).astype(np.float32) / n**0.5
    x = jax.device_put(values, jax.NamedSharding(mesh, rows))

    def took_s(times: int) -> float:
        return shared_s(lambda: jax.block_until_ready(program(x, times)))

    took_s(1)
    times = max(1, round(gpu.TARGET_S / max(took_s(4) / 4, 1e-7)))
    return float(np.median([took_s(times) for _ in range(repeats)])) / times


def profile() -> Cluster:
    """Return the host devices as a cluster, with measured links, matmuls and other kernels."""
    with mock.patch.object(kernels, "seconds_of", shared_s):
        links = kernels.collectives("data=8", names=("all_reduce", "all_gather"), algorithms=("ring",), **OF_LINKS)
    fit = links.fit("data", "axes")
    each = {n: cost.matmul_flops(n, n, n) / turn_s(jax.numpy.matmul, n) for n in sorted(gpu.SMALL.matmuls)}
    largest = max(gpu.SMALL.matmuls)
    # Kernels between matmuls transpose activations: they read two arrays and write one.
    moved = 3 * FLOAT32_BYTES * largest**2 / turn_s(lambda y, x: (jax.nn.silu(y) * x).T, largest)
    usual = cluster_of(gpu_by_name("h100"), nodes=1, gpus_per_node=DEVICES)
    device = dataclasses.replace(
        usual.gpu,
        fp32_flops_per_s=max(each.values()),
        memory_bytes_per_s=moved,
        memory_efficiency=1.0,
        memory_bytes=1e12,
    )
    link = fit.link if fit is not None and fit.link is not None else usual.inside
    return dataclasses.replace(usual, gpu=device, inside=link, products=each, source=WHAT, is_shared=True)


def keep_memory() -> None:
    """Configure glibc's allocator to keep freed memory. Call it before XLA's threads start.

    By default, glibc returns large arrays to the system, so each step clears their pages again (58,000 page faults in a
    step of `ddp`, 10% of its time).
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(setting, 2**31 - 1)


def layouts(chosen: Sequence[Cut] = LAYOUTS) -> list[Layout]:
    return [
        Layout(mesh=mp.MeshSpec.parse(mesh), strategy=parse_strategy(strategy), remat=remat, accumulate=count)
        for mesh, strategy, remat, count in chosen
    ]


def told(cluster: Cluster, subject: Subject) -> list[TimeEstimate]:
    """Return the step times that the planner estimates."""
    batch = {name: jax.ShapeDtypeStruct((subject.rows, subject.length), np.int32) for name in ("inputs", "targets")}
    work = describe(subject.config.build(), batch, next_token_loss, tx=optax.adamw(1e-3), precision=FLOAT32)
    search = Search(work, cluster)
    return [search.estimate(layout).time for layout in layouts(subject.layouts)]


class Took(NamedTuple):
    """Times of a step in seconds."""

    wall_s: float
    processor_s: float
    """Processor seconds of all threads."""


def measured(subject: Subject, *, repeats: int) -> list[list[Took]]:
    """Return the times of all rounds for each layout. Layouts run in turn, because machines are shared and noisy."""
    tokens = np.random.default_rng(0).integers(0, subject.config.vocab_size, (subject.rows, subject.length))
    batch = dict.fromkeys(("inputs", "targets"), tokens.astype(np.int32))
    runs = []
    for layout in layouts(subject.layouts):
        mesh = layout.mesh.build(jax.devices()[:DEVICES])
        options = {"mesh": mesh, "strategy": layout.strategy, "key": jax.random.key(0)}
        state = mp.init_state(subject.config.build(), optax.adamw(1e-3), **options)
        step = mp.train_step(next_token_loss, accumulate=layout.accumulate, remat=layout.remat, precision=FLOAT32)
        runs.append(_stepper(step, state, batch))
    for run in runs:
        run()
    return [list(times) for times in zip(*([run() for run in runs] for _ in range(repeats)), strict=True)]


def _stepper(step: mp.TrainStep, state: TrainState, batch: dict[str, np.ndarray]) -> Callable[[], Took]:
    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))

    def took() -> Took:
        before = time.process_time()
        wall_s = seconds_of(run)
        return Took(wall_s, time.process_time() - before)

    return took


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's τ: concordant minus discordant pairs, divided by all pairs."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    return float(sum(np.sign((first[a] - first[b]) * (second[a] - second[b])) for a, b in pairs)) / len(pairs)


def ranked(subject: Subject, cluster: Cluster, *, repeats: int = 7) -> tuple[str, list[tuple[str, ...]]]:
    """Return Kendall's τ of estimated and measured step times as a title, and a table row for each layout."""
    times, estimates = measured(subject, repeats=repeats), told(cluster, subject)
    rows, agree = [], []
    for layout, estimate, steps in zip(layouts(subject.layouts), estimates, times, strict=True):
        low, middle, high = (f"{1e3 * took_s:.4g}" for took_s in quartiles([step.processor_s for step in steps]))
        parts_s = (estimate.step_s, estimate.compute_s, estimate.memory_s)
        wall = f"{1e3 * np.median([step.wall_s for step in steps]):.0f}"
        rows.append((layout.label, middle, f"{low} – {high}", wall, *(f"{1e3 * s * CORES:.0f}" for s in parts_s)))
    for at, clock in enumerate(Took._fields):
        cuts = CUTS if repeats > 1 else CUTS[:1]
        full, *halves = ([float(np.median([step[at] for step in steps[cut]])) for steps in times] for cut in cuts)
        agree.append(f"{clock} {kendall([estimate.step_s for estimate in estimates], full):.2f}")
        agree[-1] += f" of at most {kendall(*halves):.2f}" if halves else ""
    return f"step times in ms, Kendall's τ: {', '.join(agree)}", rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(SUBJECTS), metavar="MODEL", help=", ".join(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=7, help="rounds; the median is kept")
    asked = parser.parse_args()
    keep_memory()
    cluster = profile()
    for name in asked.models:
        title, rows = ranked(SUBJECTS[name], cluster, repeats=asked.repeats)
        columns = (name, "processor", "quartiles", "wall", "estimate", "its matmuls", "its kernels")
        rich.print(table(title, columns, rows, left=(name,)))


if __name__ == "__main__":
    main()
