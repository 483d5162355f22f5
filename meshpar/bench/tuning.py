"""Search for faster options of a recipe by measurement, within a time limit.

options ─► lower, compile in threads ─► drop slow predictions ─► alternate blocks ─► confirm the fastest ─► Tuned
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshpar.bench.step_timing import NOISE_ROUNDS, Ratio
from meshpar.bench.variants import Variant
from meshpar.hardware.compile_target import GPUS
from meshpar.inspect.memory import limit_bytes
from meshpar.runs.compile_cache import cache_location, keeping_programs
from meshpar.runs.recipe import Recipe
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.tuned import MeasuredProgram, Tuned
from meshpar.sharding.errors import MeshparError, check_cases, check_number
from meshpar.sharding.host_resources import out_of_memory
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import human_bytes, human_time

COMPILE_SHARE = 0.5
"""Share of the remaining time for compilation. The compiled alternatives are measured, and then more are compiled."""
SLOWER = 1.3
"""Alternatives with a prediction of more than this multiple of the recipe's are not measured. Predictions of steps on
an H100 have errors of up to 8 % (docs/performance.md)."""
MIN_ROUNDS, ROUNDS, MAX_ROUNDS = NOISE_ROUNDS, 5, 15
"""Numbers of rounds of alternate blocks: the smallest for a decision, the usual, and the largest, for alternatives that
are faster by less than the noise."""
MIN_BLOCK_S, MIN_BLOCK_STEPS, MAX_BLOCK_STEPS = 0.3, 2, 100
"""Size of a block: the steps of this time, within these limits."""
CLEARLY_SLOWER = 1.1
"""An alternative is not measured further if it was slower by this factor in all of two rounds."""
MIN_GAIN = 0.005
"""Smallest share of the step time for which an option is changed."""
MAX_THREADS = 8
NOT_COMPILED = "not compiled: no time"


class Times(NamedTuple):
    """The recipe's value of a field times a factor."""

    factor: Fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Alternatives to a value of the recipe. At most one alternative is applied."""

    name: str
    alternatives: tuple[Mapping[str, Any], ...]
    """Path and value of each field that an alternative changes. Alternatives with fields that the recipe does not have
    are left out."""
    platforms: tuple[str, ...] = ("cpu", "gpu")


_POLICIES = ("none", "minimal", "all_dots", "dots", "full")
_HALF, _TWICE = Times(Fraction(1, 2)), Times(Fraction(2))
OPTIONS = (
    Option(
        name="attention",
        alternatives=({"model.attention": "cudnn"}, {"model.attention": "tokamax"}),
        platforms=("gpu",),
    ),
    Option(
        name="attention",
        alternatives=({"model.attention": "blockwise"}, {"model.attention": "xla"}),
        platforms=("cpu",),
    ),
    Option(
        name="matmuls of experts",
        alternatives=({"model.moe.grouped_matmul": "tokamax"}, {"model.moe.grouped_matmul": "blocked"}),
        platforms=("gpu",),
    ),
    Option(name="rematerialization", alternatives=tuple({"step.remat": policy} for policy in _POLICIES)),
    # The global batch stays the same: more micro-steps have smaller batches, which need less rematerialization.
    Option(
        name="micro-steps",
        alternatives=(
            {"step.accumulate": _HALF},
            {"step.accumulate": _TWICE},
            {"step.accumulate": _TWICE, "step.remat": "none"},
            {"step.accumulate": _HALF, "step.remat": "full"},
        ),
    ),
    Option(name="layers per iteration", alternatives=({"model.unroll": 2}, {"model.unroll": True})),
    Option(
        name="matmuls by Triton", alternatives=({"step.xla.xla_gpu_enable_triton_gemm": False},), platforms=("gpu",)
    ),
    Option(name="CUDA graphs", alternatives=({"step.xla.xla_gpu_enable_command_buffer": ""},), platforms=("gpu",)),
    Option(name="autotuning", alternatives=({"step.xla.xla_gpu_autotune_level": 0},), platforms=("gpu",)),
)
"""Options in the order of their usual effect. The first alternatives of all options are compiled first. If the time is
short, the last alternatives are not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative(Plain):
    """Result for an alternative."""

    option: str
    changes: tuple[str, ...]
    outcome: str
    """`measured`, `chosen`, or the reason why there is no measurement."""
    predicted: float | None
    """Predicted time relative to the recipe's prediction; None without a prediction."""
    peak_bytes: int | None
    """Peak memory of the compiled program; None if it was not compiled."""
    compile_s: float | None
    ratio: Ratio | None
    """Measured time relative to the recipe; None without a measurement."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning(Printed, Plain):
    """Results of `meshpar tune`. Prints as a table."""

    recipe: str
    subject: MeasuredProgram
    limit_s: float
    seconds: float
    """Time of the search."""
    step_s: float
    """Mean time of three steps of the recipe."""
    alternatives: tuple[Alternative, ...]
    settings: tuple[str, ...]
    """Fields to change, as `FIELD=VALUE`. Empty if no change was faster."""
    ratio: Ratio | None
    """Time of a step with `settings`, relative to the recipe."""

    def tuned(self) -> Tuned:
        """Return the settings for `meshpar train --tuned`."""
        ratio, noise = (None, None) if self.ratio is None else (self.ratio.ratio, self.ratio.noise)
        today = datetime.date.today().isoformat()
        options: dict[str, Any] = {"settings": self.settings, "ratio": ratio, "noise": noise, "date": today}
        return Tuned(recipe=self.recipe, subject=self.subject, **options)

    def __rich__(self) -> Any:
        from rich.console import Group

        rows = [
            (
                alternative.option,
                " ".join(alternative.changes),
                alternative.outcome,
                "" if alternative.predicted is None else f"{alternative.predicted:.3f}",
                "" if alternative.peak_bytes is None else human_bytes(alternative.peak_bytes),
                *(("", "") if (ratio := alternative.ratio) is None else (f"{ratio.ratio:.3f}", f"{ratio.noise:.3f}")),
            )
            for alternative in self.alternatives
        ]
        versions = ", ".join(f"{name} {version}" for name, version in self.subject.versions.items())
        columns = ("option", "change", "outcome", "predicted", "peak memory", "time", "noise")
        title = f"{self.recipe} on {self.subject.devices}: a step takes {human_time(self.step_s)}"
        caption = f"times relative to the recipe; {self.seconds:.0f} of {self.limit_s:.0f} s; {versions}"
        result = "no change is faster by more than the noise"
        if self.settings:
            result = f"use {' '.join(f'--set {text}' for text in self.settings)}: {self.ratio}"
        return Group(table(title, columns, rows, left=columns[:3], caption=caption), result)


def tune(
    recipe: Recipe | str | Path,
    *,
    seconds: float = 300.0,
    devices: Sequence[jax.Device] | None = None,
    options: Sequence[Option] = OPTIONS,
    compile_cache: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Tuning:
    """Search for faster options of a recipe by measurement on the local devices.

    Each alternative changes a single option of the recipe. Alternatives are compiled in threads. Programs that do not
    fit in memory, that equal the recipe's, or that `explain` predicts to be much slower are left out. All remaining
    programs run in alternate blocks with the recipe. The fastest alternatives of all options are then combined and
    measured again. A change is chosen only if its effect exceeds the noise. An alternative that fails is reported.

    Args:
      recipe: a recipe, a recipe file, or the name of an installed recipe.
      seconds: time limit. No compilation and no measurement starts that would exceed it.
      devices: devices of the mesh; by default all.
      options: the options to try, by default `OPTIONS`.
      compile_cache: folder or URL for compiled programs, as in `mp.run`. A run with the same cache loads the measured
        program, and its compiler does not measure kernels again.
      progress: receives a line about each phase.

    Raises:
      MeshparError: invalid arguments, or a recipe that does not run on its devices.

    Example:
      >>> tuning = mp.bench.tune("gpt_stdlib", seconds=60)  # doctest: +SKIP
      >>> tuning.tuned().save("tuned.json")  # doctest: +SKIP
    """
    check_number("tune", "300", seconds=seconds)
    several = jax.process_count() > 1
    reason = f"there are {jax.process_count()} processes, whose clocks would lead to different decisions"
    fix = "tune on the devices of one process, or compare two configurations: meshpar bench step RECIPE --against F=V"
    check_cases("tune", "search by measurement", "unsupported-feature", (several, reason, fix))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, devices=None if devices is None else len(devices))
    search = _Search(recipe, float(seconds), devices, progress)
    platform = search.main.devices.flat[0].platform
    with keeping_programs(cache_location(compile_cache, platform=platform, folder=None, warn=progress)):
        return search.run(options)


def alternatives(
    recipe: Recipe, platform: str, options: Sequence[Option] = OPTIONS
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of the option and the changed fields of each alternative for devices of a platform."""
    seen: set[tuple[str, ...]] = {()}
    for option in options:
        if ("gpu" if platform in GPUS else "cpu") not in option.platforms:
            continue
        for fields in option.alternatives:
            values = {path: _value(recipe, path, value) for path, value in fields.items()}
            changes = tuple(
                f"{path}={str(value).lower()}"
                for path, value in values.items()
                if str(value).lower() != str(_field(recipe, path)).lower()
            )
            if None not in values.values() and changes not in seen:
                seen.add(changes)
                yield option.name, changes


_MISSING = object()


def _field(recipe: Any, path: str) -> Any:
    """Return the value of a field, None for an XLA option that is not set, or `_MISSING`."""
    value = recipe
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, _MISSING)
    return value


def _value(recipe: Recipe, path: str, value: Any) -> Any:
    """Return the value of a field in an alternative, or None if the recipe cannot have it."""
    current = _field(recipe, path)
    if current is _MISSING:
        return None
    if not isinstance(value, Times):
        return value
    product = current * value.factor
    return int(product) if product.denominator == 1 and product >= 1 else None


@dataclasses.dataclass(eq=False)
class _Trial:
    """An alternative during the search. The recipe itself is a trial without changes."""

    option: str
    changes: tuple[str, ...]
    variant: Variant | None = None
    outcome: str = ""
    step_s: float | None = None
    """Prediction."""
    peak_bytes: int | None = None
    compile_s: float | None = None
    blocks_s: list[float] = dataclasses.field(default_factory=list)
    """Median step of each block of the current measurement."""
    ratio: Ratio | None = None

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Turn an error of the block into the outcome."""
        try:
            yield
        except MeshparError as error:
            self.outcome = f"refused: {error.reason}"
        except Exception as error:  # the compiler, the device or the user's model may raise any error
            message = next(iter(str(error).strip().split("\n")), "")[:150]
            is_memory = isinstance(error, MemoryError) or out_of_memory(error) is not None
            self.outcome = "out of memory" if is_memory else f"failed: {type(error).__name__}: {message}"


class _Search:
    """The state of a search."""

    def __init__(
        self, recipe: Recipe, limit_s: float, devices: Sequence[jax.Device] | None, progress: Callable[[str], None]
    ) -> None:
        self.recipe, self.limit_s, self.given_devices, self.progress = recipe, limit_s, devices, progress
        self.started = time.perf_counter()
        self.main = Variant.of(recipe, (), devices)
        self.base = _Trial("", (), self.main)
        self.programs = {self.main.fingerprint: self.base}
        self.longest_compile_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def reserve_s(self) -> float:
        """Time of the last measurement: compile a combination, and measure it and its best part next to the recipe."""
        return 1.5 * self.longest_compile_s + 3 * (MIN_ROUNDS + 1) * self.block_s

    def fits(self, seconds: float, limit_s: float | None = None) -> bool:
        """Return whether an action of this duration ends within the limit, by default the limit of the search."""
        return self.elapsed_s + seconds <= (self.limit_s if limit_s is None else limit_s)

    def run(self, options: Sequence[Option]) -> Tuning:
        base = self.base
        self.progress("compiling and measuring the recipe")
        mesh = self.main.setup.given_mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        self._compile(base)
        self.batches, self.state = self.main.batches(), self.main.setup.init(self.recipe.seed)
        self._steps(self.main, 2)
        # The times between the losses of single steps may be short, because a loss is read while later steps run.
        base_s = statistics.mean(self._steps(self.main, 3))
        self.block_steps = min(max(math.ceil(MIN_BLOCK_S / base_s), MIN_BLOCK_STEPS), MAX_BLOCK_STEPS)
        self.block_s = self.block_steps * base_s
        platform = self.main.devices.flat[0].platform
        trials = [_Trial(*alternative) for alternative in alternatives(self.recipe, platform, options)]
        waiting = _by_turns(trials)
        while waiting:
            self._compile_all(waiting)
            compiled = [trial for trial in waiting if trial.outcome != NOT_COMPILED]
            self._measure(self._promising(compiled), self.reserve_s)
            waiting = [trial for trial in waiting if trial.outcome == NOT_COMPILED] if compiled else []
        chosen = self._confirmed(trials)
        if chosen is not None:
            for trial in trials:
                if set(trial.changes) <= set(chosen.changes):
                    trial.outcome = "chosen"
        return Tuning(
            recipe=self.recipe.name, subject=MeasuredProgram.of(self.recipe, mesh), limit_s=self.limit_s,
            seconds=self.elapsed_s, step_s=base_s, alternatives=tuple(map(self._result, trials)),
            settings=() if chosen is None else chosen.changes, ratio=None if chosen is None else chosen.ratio,
        )  # fmt: skip

    def _result(self, trial: _Trial) -> Alternative:
        known = trial.step_s is not None and self.base.step_s is not None
        return Alternative(
            option=trial.option, changes=trial.changes, outcome=trial.outcome,
            predicted=trial.step_s / self.base.step_s if known else None,  # type: ignore[operator]
            peak_bytes=trial.peak_bytes, compile_s=trial.compile_s, ratio=trial.ratio,
        )  # fmt: skip

    # ---- Compilation -------------------------------------------------------------------------------------------------

    def _compile(self, trial: _Trial) -> None:
        """Compile a lowered step, and predict its time if the devices are in the catalogue."""
        assert trial.variant is not None
        prediction = trial.variant.predicted()
        trial.step_s, trial.peak_bytes, trial.compile_s = prediction.step_s, prediction.peak_bytes, prediction.compile_s
        # The recipe's program may be in the cache, so its time is not an estimate for all programs.
        self.longest_compile_s = max(self.longest_compile_s, trial.compile_s)

    def _compile_all(self, trials: Sequence[_Trial]) -> None:
        """Lower the alternatives, and compile them in threads until the time limit."""
        self.progress(f"compiling {len(trials)} alternatives")
        limit_s = self.elapsed_s + COMPILE_SHARE * (self.limit_s - self.elapsed_s)

        def compile_in_time(trial: _Trial) -> None:
            if not self.fits(1.5 * self.longest_compile_s, limit_s):
                trial.outcome = NOT_COMPILED
                return
            with trial.reported():
                self._compile(trial)

        with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            for trial in trials:
                trial.outcome = "" if self.fits(1.5 * self.longest_compile_s, limit_s) else NOT_COMPILED
                if trial.outcome:
                    continue
                with trial.reported():
                    trial.variant = trial.variant or Variant.of(self.recipe, trial.changes, self.given_devices)
                    if not trial.variant.shares_state_of(self.main):
                        trial.outcome = "not compared: it has a different state"
                    elif self.programs.setdefault(trial.variant.fingerprint, trial) is not trial:
                        trial.outcome = "the same program"
                    else:
                        threads.submit(compile_in_time, trial)

    def _promising(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """Return the compiled alternatives to measure, in the order of the predictions."""
        limit = _memory_limit(self.main)
        for trial in trials:
            if trial.outcome:
                continue
            if limit is not None and trial.peak_bytes is not None and trial.peak_bytes > limit:
                trial.outcome = f"does not fit in {human_bytes(limit)}"
            elif trial.step_s is not None and self.base.step_s and trial.step_s > SLOWER * self.base.step_s:
                trial.outcome = "predicted to be much slower"
        left = [trial for trial in trials if not trial.outcome]
        return sorted(left, key=lambda trial: trial.step_s or 0)

    # ---- Measurement -------------------------------------------------------------------------------------------------

    def _steps(self, variant: Variant, count: int) -> list[float]:
        self.state, steps_s = variant.run(self.state, self.batches, count)
        return steps_s

    def _block(self, trial: _Trial, count: int) -> list[float]:
        """Run steps of a trial. After an error, which may have freed the donated arrays, create the state again."""
        with trial.reported():
            assert trial.variant is not None
            return self._steps(trial.variant, count)
        if any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            self.state = self.main.setup.init(self.recipe.seed)
        return []

    def _measure(self, trials: Sequence[_Trial], reserve_s: float) -> None:
        """Measure trials in alternation with the recipe, within the time limit."""
        base = self.base
        running: list[_Trial] = []
        base.blocks_s.clear()
        for trial in trials:
            self.progress(f"measuring {' '.join(trial.changes)}")
            trial.blocks_s.clear()
            # Its warm-up, and all rounds with it and the previous trials.
            rounds_s = MIN_ROUNDS * (len(running) + 2) * self.block_s
            if not self.fits(self.block_s + rounds_s + reserve_s):
                trial.outcome = trial.outcome or "not measured: no time"
            elif self._block(trial, MIN_BLOCK_STEPS):
                running.append(trial)
        for _ in range(MAX_ROUNDS):
            if not running or not self.fits((len(running) + 1) * self.block_s + reserve_s):
                break
            for trial in [base, *running]:
                steps_s = self._block(trial, self.block_steps)
                if steps_s:
                    trial.blocks_s.append(statistics.median(steps_s))
            running = [trial for trial in running if self._continues(trial)]
        for trial in trials:
            rounds = len(trial.blocks_s)
            if rounds:
                trial.ratio = Ratio.of(base.blocks_s[:rounds], trial.blocks_s)
                trial.outcome = trial.outcome or "measured"

    def _continues(self, trial: _Trial) -> bool:
        """Return whether another round of a trial may change the decision."""
        if len(trial.blocks_s) < len(self.base.blocks_s):  # the last block has failed
            return False
        ratios = [time_s / base_s for time_s, base_s in zip(trial.blocks_s, self.base.blocks_s, strict=True)]
        if len(ratios) < ROUNDS:
            return len(ratios) < 2 or min(ratios) < CLEARLY_SLOWER
        ratio = Ratio.of(self.base.blocks_s, trial.blocks_s)
        return ratio.ratio <= 1 - MIN_GAIN and not ratio.is_significant

    # ---- Decision ----------------------------------------------------------------------------------------------------

    def _confirmed(self, trials: Sequence[_Trial]) -> _Trial | None:
        """Return the fastest combination of faster alternatives, or None. Measure it again if there is time."""
        faster = sorted((trial for trial in trials if _is_faster(trial)), key=lambda trial: trial.ratio.ratio)  # type: ignore[union-attr]
        if not faster:
            return None
        best, changes = faster[0], faster[0].changes
        for trial in faster[1:]:
            if not _fields(trial.changes) & _fields(changes):
                changes += trial.changes
        candidates = [_Trial(best.option, best.changes, best.variant)]
        if changes != best.changes and self.fits(self.reserve_s):
            combined = _Trial("combination", changes)
            with combined.reported():
                combined.variant = Variant.of(self.recipe, changes, self.given_devices)
                self._compile(combined)
                candidates.append(combined)
        self._measure(candidates, 0)
        confirmed = [trial for trial in candidates if trial.ratio is not None]
        if not confirmed:  # no time: the first measurement decides
            return best
        return min(filter(_is_faster, confirmed), key=lambda trial: trial.ratio.ratio, default=None)  # type: ignore[union-attr]


def _by_turns(trials: Sequence[_Trial]) -> list[_Trial]:
    """Return the first alternatives of all options, then the second of all options, and so on."""
    turns = [sum(other.option == trial.option for other in trials[:number]) for number, trial in enumerate(trials)]
    return [trial for _, _, trial in sorted(zip(turns, range(len(trials)), trials, strict=True))]


def _is_faster(trial: _Trial) -> bool:
    """Return whether the effect of a trial is certain enough."""
    ratio = trial.ratio
    return ratio is not None and ratio.is_significant and ratio.ratio <= 1 - MIN_GAIN


def _fields(changes: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in changes}


def _memory_limit(variant: Variant) -> int | None:
    """Return the bytes that a program may use on a device, or None if they are unknown."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in variant.devices.flat]
    known = [limit for limit in limits if limit]
    return min(known) if known else limit_bytes(variant.setup.given_mesh, None)
