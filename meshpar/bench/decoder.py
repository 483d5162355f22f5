"""Whole training steps of a decoder on one device: how much of it they use, what they spend, what was predicted.

model FLOPs   6 for each token and matrix parameter, the output layer among them, and for attention the causal half
              of `12 L H D T`; recomputation is not counted
utilisation   model FLOPs over time, against the data sheet's peak for bfloat16 (for 8 bits, too) and against the
              best product of square matrices measured in the same run
predicted     the same step as `explain` simulates it, products at the rates that were measured by size
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
import numpy as np
import optax

from meshpar.bench import plain
from meshpar.bench.figures import quartiles, seconds_of
from meshpar.hardware.clusters import Cluster, gpu_of_kind
from meshpar.inspect import trace
from meshpar.inspect.explain import explain
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.hlo.walk import runs
from meshpar.inspect.report import Report
from meshpar.inspect.timeline.program_work import matmuls
from meshpar.inspect.timeline.simulator import timeline
from meshpar.layers.precision import BY_ROW, Precision
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel import fsdp
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import si
from meshpar.training.state import Setup, make_setup
from meshpar.training.step import TrainStep, train_step

_Of = TypeVar("_Of")

LIMIT_S = 420.0
"""Nothing is begun behind it, so that all stays under eight minutes."""
TINY = TransformerConfig(
    vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, vocab_chunk=128
)
"""On CPUs."""
_OF_80_GB = TransformerConfig(
    vocab_size=32_768, num_layers=24, embed_dim=2048, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=8192,
    rope_theta=500_000.0, vocab_chunk=8192, attention="cudnn",
)  # fmt: skip
_BY_MEMORY = ((100e9, 24, 8), (55e9, 24, 4), (28e9, 16, 2), (16e9, 8, 1), (0, 4, 1))
"""Bytes that jax may use on a device, from which on a decoder has so many layers, a batch so many rows."""
_REMAT = "minimal"
_UNGRAPHED = {"xla_gpu_enable_command_buffer": ""}
"""For the profile: kernels that XLA launches as one graph have no names in it."""
_PRODUCT = re.compile(r"(wrapped_)?dot|convolution|.*(gemm|matmul|nvjet|cutlass|cublas)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSize(Plain):
    """What is trained."""

    config: TransformerConfig
    rows: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.seq_len

    @property
    def flops(self) -> int:
        """Model FLOPs of a step. A token sees half of the sequence on average: the causal half of attention."""
        return self.tokens * self.config.flops_per_token(self.seq_len // 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime(Plain):
    """One way to run the step."""

    name: str
    rows: int
    step_s: float
    """Median."""
    low_s: float
    high_s: float
    tokens_per_s: float
    flops_per_s: float
    """Of the model."""
    of_peak: float | None
    """Utilisation of the data sheet's peak in bfloat16; None: the catalogue does not know the device."""
    of_ceiling: float
    """Of the best product measured in the same run."""
    loss: float
    """Of the last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTime(Plain):
    """What takes time of the profiled step."""

    name: str
    kind: str
    """`matmul`, `attention` (a library's), `idle` or `other`."""
    time_s: float
    share: float
    where: str
    """Module of the model and phase, where known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(Printed, Plain):
    """Whole steps as measured. Prints as tables."""

    size: DecoderSize
    num_params: int
    remat: str
    ceiling_flops_per_s: float
    peak_flops_per_s: float | None
    times: tuple[StepTime, ...]
    """In bfloat16, in plain Flax under `jax.jit`, and in 8 bits by a scale a tensor and by one a row."""
    predicted_s: float | None
    """The bfloat16 step, simulated."""
    kernels: tuple[KernelTime, ...]
    """Of the profiled bfloat16 step, largest first."""
    notes: tuple[str, ...]
    """What did not run, and why."""
    derived = ("ratio", "largest")

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        first = next((one.step_s for one in self.times if one.name == BFLOAT16 and one.rows == self.size.rows), None)
        return None if first is None or not self.predicted_s else first / self.predicted_s

    @property
    def largest(self) -> tuple[KernelTime, ...]:
        """The three largest costs that are no matmul."""
        return tuple(one for one in self.kernels if one.kind != "matmul")[:3]

    def __rich__(self) -> Any:
        from rich.console import Group

        cfg, size = self.config, self.size
        title = f"a decoder of {self.num_params:,} parameters, {cfg.num_layers} layers, {size.seq_len:,} tokens"
        title += f" a row, attention={cfg.attention}, remat={self.remat}"
        columns = (
            "step",
            "rows",
            "time",
            "quartiles",
            "tokens/s",
            "model FLOP/s",
            "of the data sheet",
            "of the best product",
            "loss",
        )
        shown = [table(title, columns, map(_cells, self.times), left=("step",), caption=_CONVENTION)]
        if self.predicted_s is not None:
            off = "" if self.ratio is None else f"; measured over predicted {self.ratio:.3g}"
            shown.append(f"simulated: {si(self.predicted_s, 's')}{off}")
        if self.kernels:
            rows = [(one.name, one.kind, si(one.time_s, "s"), f"{one.share:.1%}", one.where) for one in self.kernels]
            left = ("kernel", "kind", "where")
            shown.append(
                table("kernels of a step", ("kernel", "kind", "time", "of the step", "where"), rows, left=left)
            )
            shown.append(
                "largest that are no matmul: " + ", ".join(f"{one.name} {one.share:.1%}" for one in self.largest)
            )
        return Group(*shown, *(f"· {note}" for note in self.notes))

    @property
    def config(self) -> TransformerConfig:
        """Of the decoder."""
        return self.size.config


BFLOAT16, FP8, FP8_ROWS, PLAIN = "bfloat16", "fp8", BY_ROW, "plain Flax, bfloat16"
_CONVENTION = "model FLOPs: 6 a token and matrix parameter, attention's causal half, no recomputation; peak: bfloat16's"


def size_for(platform: str, memory_bytes: float) -> DecoderSize:
    """The decoder that is measured on a device."""
    if platform == "cpu":
        return DecoderSize(config=TINY, rows=2, seq_len=64)
    layers, rows = next((layers, rows) for least, layers, rows in _BY_MEMORY if memory_bytes >= least)
    return DecoderSize(config=dataclasses.replace(_OF_80_GB, num_layers=layers), rows=rows, seq_len=4096)


def steps(
    size: DecoderSize,
    *,
    ceiling_flops_per_s: float,
    cluster: Cluster | None = None,
    repeats: int = 10,
    folder: str | Path | None = None,
    began_s: float | None = None,
    top: int = 12,
    progress: Callable[[str], None] = lambda line: None,
) -> Steps:
    """Measure whole steps of a decoder on the first device: forward, backward, AdamW.

    What the device cannot run is a note, and the rest goes on; a batch that does not fit is halved, and told.

    Args:
      size: from `size_for`.
      ceiling_flops_per_s: the best product measured on the device.
      cluster: of this one device, with the products measured, for the prediction; None: there is none.
      repeats: steps of each kind, of which the median is kept; two more come before.
      folder: where the profile stays; None: it does not.
      began_s: when the run began, by `time.perf_counter`: `LIMIT_S` counts from there; None: now.
      top: rows of the kernel table.
      progress: is told what is being measured.
    """
    run = _Parts(time.perf_counter() if began_s is None else began_s, progress)
    gpu = gpu_of_kind(jax.devices()[0].device_kind)
    peak = None if gpu is None else gpu.bf16_flops_per_s
    ways = {BFLOAT16: _ours(None), PLAIN: _plain, FP8: _ours(FP8), FP8_ROWS: _ours(FP8_ROWS)}
    report, kernels, times = None, None, []
    for name, way in ways.items():
        found = run.tried(name, functools.partial(_fitting, name, way, size, repeats, run.notes))
        if found is None:
            continue
        times.append(timed(name, *found, peak, ceiling_flops_per_s))
        if name == BFLOAT16:
            size = found[0]
            report = run.tried("the prediction", functools.partial(_explained, size))
            kernels = run.tried("the profile", functools.partial(_profiled, size, report, folder, top))
    predicted = None if report is None else predicted_s(report, cluster)
    if report is not None and predicted is None:
        run.notes.append(f"no step is predicted: {report.overlap.reason or 'the catalogue does not know the device'}")
    return Steps(
        size=size, num_params=size.config.num_params, remat=_REMAT, ceiling_flops_per_s=ceiling_flops_per_s,
        peak_flops_per_s=peak, times=tuple(times), predicted_s=predicted, kernels=kernels or (), notes=tuple(run.notes),
    )  # fmt: skip


class _Parts:
    """Parts of a measurement, none of which ends the others."""

    def __init__(self, began_s: float, progress: Callable[[str], None]) -> None:
        self.notes: list[str] = []
        self._began_s, self._progress = began_s, progress

    def tried(self, what: str, run: Callable[[], _Of]) -> _Of | None:
        """What a part gives; None and a note where it does not run, or time is up."""
        if time.perf_counter() - self._began_s > LIMIT_S:
            self.notes.append(f"{what} was left out: {LIMIT_S:.0f} s had passed")
            return None
        self._progress(f"measuring {what}")
        try:
            return run()
        except (ValueError, RuntimeError, OSError) as error:
            self.notes.append(f"{what} did not run: {(str(error) or type(error).__name__).splitlines()[0][:300]}")
            return None


# ---- Arithmetic ------------------------------------------------------------------------------------------------------


def timed(
    name: str, size: DecoderSize, took_s: list[float], loss: float, peak: float | None, ceiling: float
) -> StepTime:
    """What times of a step say of the device."""
    low, median, high = quartiles(took_s)
    rate = size.flops / median
    return StepTime(
        name=name, rows=size.rows, step_s=median, low_s=low, high_s=high, tokens_per_s=size.tokens / median,
        flops_per_s=rate, of_peak=None if peak is None else rate / peak, of_ceiling=rate / ceiling, loss=loss,
    )  # fmt: skip


def predicted_s(report: Report, cluster: Cluster | None) -> float | None:
    """Simulate the step at the rates that the cluster has measured; None without a timeline."""
    if report.timeline is None or report.program is None or cluster is None:
        return None
    return timeline(report.program.module, (), cluster).step_s  # one device sends nothing


def kernels_of(found: trace.Trace, module: Module | None) -> tuple[KernelTime, ...]:
    """The costs of a profile by kind, largest first.

    Args:
      found: read with as many costs as are wanted.
      module: the program, which says what is in a fusion; None: names alone tell.
    """
    kinds = {} if module is None else _kinds(module)

    def kind(name: str) -> str:
        if name == "idle":
            return "idle"
        return kinds.get(name) or ("attention" if "fmha" in name else "matmul" if _PRODUCT.match(name) else "other")

    return tuple(
        KernelTime(name=one.what, kind=kind(one.what), time_s=one.time_s, share=one.share, where=one.where)
        for one in found.costs
    )


def _kinds(module: Module) -> Mapping[str, str]:
    """Of each instruction, by whether it is a product or calls a computation with one."""
    products = {(one.computation, one.name) for one in matmuls(module)}

    @functools.cache
    def multiplies(computation: str) -> bool:
        body = module.computations[computation]
        return any((computation, ins.name) in products or any(map(multiplies, runs(ins))) for ins in body)

    def kind(computation: str, ins: Any) -> str:
        if (computation, ins.name) in products or any(map(multiplies, runs(ins))):
            return "attention" if "fmha" in ins.attributes.get("custom_call_target", "") else "matmul"
        return "other"

    return {ins.name: kind(name, ins) for name, body in module.computations.items() for ins in body}


# ---- What is run -----------------------------------------------------------------------------------------------------

Way = Callable[[DecoderSize], Iterator[jax.Array]]
"""Steps, one after the other: each gives its loss, at which the device may still be at work."""


def _ours(matmul: str | None) -> Way:
    def run(size: DecoderSize) -> Iterator[jax.Array]:
        setup, step = _prepared(size, matmul)
        state, batch = setup.init(0), jax.device_put(_batch(size), setup.batch_sharding)
        while True:
            state, metrics = step(state, batch)
            yield jax.block_until_ready((state, metrics))[1]["loss"]

    return run


def _plain(size: DecoderSize) -> Iterator[jax.Array]:
    step, params, opt_state = plain.begin(size.config, _optimizer(), "bfloat16")
    batch = jax.device_put(_batch(size), jax.devices()[0])
    while True:
        params, opt_state, loss = jax.block_until_ready(step(params, opt_state, batch))
        yield loss


@functools.lru_cache(maxsize=1)
def _prepared(size: DecoderSize, matmul: str | None) -> tuple[Setup, TrainStep]:
    """Once for what is timed, explained and profiled: it compiles once."""
    precision, mesh = _precision(matmul), MeshSpec(fsdp=1).build(jax.devices()[:1])
    setup = make_setup(size.config.build(), _optimizer(), mesh=mesh, strategy=fsdp(), precision=precision)
    return setup, train_step(next_token_loss, precision=precision, remat=_REMAT)


def _precision(matmul: str | None) -> Precision:
    return Precision(compute="bfloat16", matmul=matmul)


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(3e-4)


def _batch(size: DecoderSize) -> dict[str, np.ndarray]:
    shape = (size.rows, size.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, size.config.vocab_size, shape, dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _fitting(
    name: str, way: Way, size: DecoderSize, repeats: int, notes: list[str]
) -> tuple[DecoderSize, list[float], float]:
    """The size that fits, seconds of each step and the last loss."""
    while True:
        try:
            return size, *_run(way(size), repeats)
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or size.rows == 1:
                raise
            notes.append(f"{name}: {size.rows} rows do not fit, so it was measured with {size.rows // 2}")
            size = dataclasses.replace(size, rows=size.rows // 2)


def _run(running: Iterator[jax.Array], repeats: int) -> tuple[list[float], float]:
    for _ in range(2):  # the first compiles; the second runs as all others do
        next(running)
    took_s = [seconds_of(lambda: next(running)) for _ in range(repeats)]
    return took_s, float(next(running))


def _profile_step(size: DecoderSize) -> tuple[Setup, TrainStep]:
    setup, step = _prepared(size, None)
    if jax.default_backend() == "cpu":
        return setup, step
    return setup, train_step(next_token_loss, precision=_precision(None), remat=_REMAT, xla=_UNGRAPHED)


def _explained(size: DecoderSize) -> Report:
    setup, step = _profile_step(size)
    return explain(step, setup.abstract, _batch(size), advise=False)


def _profiled(size: DecoderSize, report: Report | None, folder: str | Path | None, top: int) -> tuple[KernelTime, ...]:
    setup, step = _profile_step(size)
    batch = jax.device_put(_batch(size), setup.batch_sharding)
    state = jax.block_until_ready(step(setup.init(0), batch))[0]
    with TemporaryDirectory() as scratch:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        traced = jax.profiler.trace(str(folder or scratch), profiler_options=options)
        with traced, jax.profiler.StepTraceAnnotation("meshpar:step", step_num=1):
            jax.block_until_ready(step(state, batch))
        found = trace.read(folder or scratch, report=report, top=top)
    return kernels_of(found, None if report is None or report.program is None else report.program.module)


def _cells(one: StepTime) -> tuple[str, ...]:
    return (
        one.name,
        str(one.rows),
        si(one.step_s, "s", digits=3),
        f"{si(one.low_s, 's', digits=3)} – {si(one.high_s, 's', digits=3)}",
        f"{one.tokens_per_s:,.0f}",
        si(one.flops_per_s, "FLOP/s", digits=3),
        "" if one.of_peak is None else f"{one.of_peak:.1%}",
        f"{one.of_ceiling:.1%}",
        f"{one.loss:.3f}",
    )
