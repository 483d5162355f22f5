"""Measurement of the training steps of a recipe, next to the prediction of `explain`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.bench.timing import quartiles, seconds_of
from meshpar.bench.variants import Variant
from meshpar.hardware.clusters import peak_flops_per_s
from meshpar.inspect.model_flops import model_flops
from meshpar.pod.multihost import version_of
from meshpar.runs.recipe import Recipe
from meshpar.runs.recipe_file import load_recipe
from meshpar.sharding.errors import check_cases, check_positive_int
from meshpar.sharding.printing import Plain, Printed, human_mesh, table
from meshpar.sharding.types import axis_sizes
from meshpar.sharding.units import human_bytes, human_time, si
from meshpar.training.state import TrainState

WARMUP = 2
"""Number of steps after the first that are not measured."""
NOISE_ROUNDS = 3
"""Smallest number of rounds from which the noise of a ratio is known."""
MIN_ROUNDS, BLOCK_STEPS = 4, 4
"""With `against`: smallest number of rounds of alternate blocks, if there are enough steps, and steps of a block."""
READING = "the loss of a step is read while the next two steps run, as in `train`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio(Plain):
    """Ratio of the times of two configurations, from alternate blocks."""

    ratio: float
    """Median over rounds of the ratio of two consecutive blocks."""
    noise: float
    """Half of the 95 % interval of the median, `1.57 IQR / √rounds` with the interquartile range IQR of these ratios
    (McGill et al. 1978, "Variations of Box Plots")."""
    rounds: int
    derived = ("is_significant",)

    @staticmethod
    def of(blocks_s: Sequence[float], other_s: Sequence[float]) -> Ratio:
        """Return the ratio of the times `other_s` to the times `blocks_s` of the same rounds."""
        low, middle, high = quartiles([other / time_s for time_s, other in zip(blocks_s, other_s, strict=True)])
        return Ratio(ratio=middle, noise=1.57 * (high - low) / len(blocks_s) ** 0.5, rounds=len(blocks_s))

    @property
    def is_significant(self) -> bool:
        """Whether the difference exceeds the noise. The noise of fewer than `NOISE_ROUNDS` rounds is unknown."""
        return self.rounds >= NOISE_ROUNDS and abs(self.ratio - 1) > self.noise

    def __str__(self) -> str:
        if self.rounds < NOISE_ROUNDS:
            return (
                f"{self.ratio:.3f} × the time; the noise is unknown: it needs {NOISE_ROUNDS} rounds, not {self.rounds}"
            )
        verdict = "" if self.is_significant else ", no difference above the noise"
        return f"{self.ratio:.3f} × the time, noise {self.noise:.3f}, {self.rounds} rounds{verdict}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiming(Plain):
    """Measured training step of a configuration, next to its prediction. Bytes are per device."""

    label: str
    fingerprint: str
    """Hash of the program, as `train` and `explain` print it."""
    steps_s: tuple[float, ...]
    """Seconds of each measured step."""
    first_step_s: float
    """Seconds of the first step, including tracing and compilation."""
    peak_bytes: int | None
    """Largest peak memory of a device in this process so far; None if it is unknown."""
    num_devices: int
    tokens: int | None
    """Tokens of a step; None if the inputs are not tokens."""
    causal_flops: float
    """Model FLOPs of a step. Attention counts the positions up to the query: `6 L H D T` per token."""
    full_flops: float | None
    """Model FLOPs of a step. Attention counts all positions: `12 L H D T` per token, as in torchtitan."""
    peak_flops_per_s: float | None
    """Combined peak of the devices in the data sheet, for the dtype of the computation; None if it is unknown."""
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    """Reasons for missing values."""
    derived = ("median_s", "min_s", "tokens_per_s", "utilization", "full_utilization", "predicted_utilization")

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def min_s(self) -> float:
        return min(self.steps_s)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.median_s

    @property
    def utilization(self) -> float | None:
        """Model FLOP utilization of the median step, with causal attention."""
        return self._utilization(self.causal_flops, self.median_s)

    @property
    def full_utilization(self) -> float | None:
        """Model FLOP utilization of the median step, with full attention."""
        return self._utilization(self.full_flops, self.median_s)

    @property
    def predicted_utilization(self) -> float | None:
        """Model FLOP utilization of the predicted step, with causal attention."""
        return self._utilization(self.causal_flops, self.predicted_step_s)

    def _utilization(self, flops: float | None, step_s: float | None) -> float | None:
        known = flops is not None and step_s is not None and self.peak_flops_per_s is not None
        return flops / step_s / self.peak_flops_per_s if known else None  # type: ignore[operator]

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield quantity, measured value, predicted value and the relative error of the prediction."""
        predicted_s = self.predicted_step_s
        yield _row("step, median", human_time, self.median_s, predicted_s)
        yield _row("step, minimum", human_time, self.min_s)
        yield _row("first step, with compilation", human_time, self.first_step_s)
        if self.tokens is not None:
            yield _row("tokens/s", lambda x: f"{x:,.0f}", self.tokens_per_s, predicted_s and self.tokens / predicted_s)
        # Without the formula of a decoder, the FLOPs are counted in the program.
        words = (", causal attention", ", full attention") if self.full_flops is not None else ("", "")
        for suffix, flops in zip(words, (self.causal_flops, self.full_flops), strict=True):
            if flops is not None:
                rates = (step_s and flops / step_s / self.num_devices for step_s in (self.median_s, predicted_s))
                yield _row(f"FLOP/s per device{suffix}", lambda x: si(x, "FLOP/s"), *rates)
                uses = (self._utilization(flops, step_s) for step_s in (self.median_s, predicted_s))
                yield _row(f"utilization{suffix}", lambda x: f"{x:.1%}", *uses)
        yield _row("peak memory per device", human_bytes, self.peak_bytes, self.predicted_peak_bytes)


def _row(quantity: str, text: Any, measured: float | None, predicted: float | None = None) -> tuple[str, str, str, str]:
    error = f"{predicted / measured - 1:+.1%}" if measured and predicted else ""
    texts = ["" if value is None else text(value) for value in (measured, predicted)]
    return quantity, texts[0], texts[1], error


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimings(Printed, Plain):
    """Results of `meshpar bench step`. Prints as tables."""

    recipe: str
    device: str
    """Name of the devices in jax."""
    mesh: dict[str, int]
    versions: dict[str, str]
    timings: tuple[StepTiming, ...]
    """Timings of the recipe and of the second configuration."""
    ratio: Ratio | None = None
    """Time of the second configuration relative to the recipe."""
    reading: str = READING
    """When the loss is read."""

    def __rich__(self) -> Any:
        from rich.console import Group

        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        columns = ("", "measured", "predicted", "error")
        tables = [
            table(
                f"{timing.label}: {len(timing.steps_s)} steps, program {timing.fingerprint}",
                columns,
                timing.rows(),
                left=("",),
                caption="\n".join(timing.notes) or None,
            )
            for timing in self.timings
        ]
        lines = [f"{self.recipe} on {self.device}, {human_mesh(self.mesh)}, {versions}; {self.reading}"]
        ratio = [] if self.ratio is None else [f"{self.timings[1].label}: {self.ratio}"]
        return Group(*lines, *tables, *ratio)


def steps(
    recipe: Recipe | str | Path,
    *,
    steps: int = 12,
    against: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> StepTimings:
    """Measure the training steps of a recipe on synthetic tokens, without checkpoints.

    Models that are not decoders train on batches of the recipe's data.

    Args:
      recipe: a recipe, a recipe file, or the name of an installed recipe.
      steps: number of measured steps of each configuration, after the first step and two more.
      against: changed fields of a second configuration, as `FIELD=VALUE`. The two configurations run in alternate
        blocks, and share the state if their arrays and shardings are equal.
      devices: devices of the mesh; by default all.

    Raises:
      MeshparError: invalid arguments, or a recipe that does not fit its devices.

    Example:
      >>> timings = mp.bench.steps("gpt_stdlib", against=["step.remat=minimal"])  # doctest: +SKIP
      >>> timings.timings[0].median_s, timings.ratio.ratio  # doctest: +SKIP
    """
    check_positive_int("bench step", "the number of measured steps", steps=steps)
    case = isinstance(against, str), "it is a text", "pass a list of assignments: against=['step.remat=full']"
    check_cases("bench step", f"use against={against!r}", "wrong-type", case)
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, devices=None if devices is None else len(devices))
    variants = [Variant.of(recipe, changes, devices) for changes in ([], against)[: 1 + bool(against)]]
    runs: list[_Run] = []
    for variant in variants:
        runs.append(_Run(variant, next((run for run in runs if variant.shares_state_of(run.variant)), None)))
    num_rounds = 1 if len(runs) == 1 else min(max(steps // BLOCK_STEPS, MIN_ROUNDS), steps)
    for block in range(num_rounds):
        for run in runs:
            run.measure((steps * (block + 1)) // num_rounds - (steps * block) // num_rounds)
    return StepTimings(
        recipe=recipe.name,
        device=variants[0].devices.flat[0].device_kind,
        mesh=dict(axis_sizes(variants[0].setup.mesh)),
        versions={name: version_of(name) for name in ("meshpar", "jax", "jaxlib")},
        timings=tuple(run.timing() for run in runs),
        ratio=None if len(runs) == 1 else Ratio.of(runs[0].blocks_s, runs[1].blocks_s),
    )


class _Run:
    """A configuration whose first steps have run."""

    def __init__(self, variant: Variant, like: _Run | None) -> None:
        """Create a state, or share the state of `like`, and run the first steps."""
        self.variant, self.batches = variant, variant.batches()
        self.held: _Held = _Held(variant.setup.init(variant.recipe.seed)) if like is None else like.held
        jax.block_until_ready(self.held.state)
        peak_before = _peak_bytes(variant)
        self.first_step_s = seconds_of(lambda: self._run(1))
        self._run(WARMUP)
        self.peak_bytes, self.notes = _peak_bytes(variant), []
        # The counter of a device never falls, so it may still be the peak of an earlier program.
        if self.peak_bytes is None:
            self.notes.append("the devices do not report their peak memory")
        elif like is not None and self.peak_bytes == peak_before:
            self.notes.append(f"its peak memory is at most {human_bytes(peak_before)}, the peak of the first program")
            self.peak_bytes = None
        self.steps_s: list[float] = []
        self.blocks_s: list[float] = []

    def _run(self, count: int) -> list[float]:
        self.held.state, steps_s = self.variant.run(self.held.state, self.batches, count)
        return steps_s

    def measure(self, count: int) -> None:
        """Run a block of steps."""
        steps_s = self._run(count)
        self.steps_s += steps_s
        self.blocks_s.append(statistics.median(steps_s))

    def timing(self) -> StepTiming:
        """Return the measured values, and the prediction of `explain`."""
        variant, notes = self.variant, self.notes
        recipe, setup, shape = variant.recipe, variant.setup, variant.tokens_shape
        flops_per_token = getattr(recipe.model, "flops_per_token", None)
        full_flops = None
        if shape is not None and flops_per_token is not None:
            causal_flops = math.prod(shape) * flops_per_token(shape[1], causal=True)
            full_flops = math.prod(shape) * flops_per_token(shape[1])
        else:
            causal_flops = model_flops(variant.step, setup.abstract, variant.batch).step
        prediction = variant.predicted()
        if prediction.reason:
            notes.append(f"no predicted time: {prediction.reason}")
        precision, devices = recipe.step.precision, variant.devices
        peak = peak_flops_per_s(devices.flat[0].device_kind, precision.compute or precision.params or "float32")
        if peak is None:
            notes.append(f"no utilization: the peak FLOP/s of {devices.flat[0].device_kind} is unknown")
        return StepTiming(
            label=variant.label,
            fingerprint=variant.fingerprint,
            steps_s=tuple(self.steps_s),
            first_step_s=self.first_step_s,
            peak_bytes=self.peak_bytes,
            num_devices=devices.size,
            tokens=None if shape is None else math.prod(shape),
            causal_flops=causal_flops,
            full_flops=full_flops,
            peak_flops_per_s=None if peak is None else peak * devices.size,
            predicted_step_s=prediction.step_s,
            predicted_peak_bytes=prediction.peak_bytes,
            notes=tuple(notes),
        )


@dataclasses.dataclass
class _Held:
    """The state, which alternate configurations share."""

    state: TrainState


def _peak_bytes(variant: Variant) -> int | None:
    """Return the largest peak memory of the local devices, or None if they do not report it."""
    local = [device for device in variant.devices.flat if device.process_index == jax.process_index()]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
    return None if None in peaks else max(peak for peak in peaks if peak is not None)
