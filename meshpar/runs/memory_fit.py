"""Search for changes of a recipe with which its step fits in memory.

ladders of changes ─► lower here, compile in child processes ─► peak, simulated step ─► combinations ─► MemoryFit
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.inspect.memory import COMFORTABLE, argument_bytes, memory_note
from meshpar.inspect.memory_timeline import LiveArray, MemoryTimeline, memory_timeline
from meshpar.inspect.pod import PodPool
from meshpar.inspect.render import MOST_ROWS, Cell, Section, Table, rich_of, short_source
from meshpar.inspect.report import Report
from meshpar.inspect.step_numbers import LoweredStep, StepNumbers, lower
from meshpar.runs.memory_changes import Change, ladders, layouts
from meshpar.runs.recipe import Recipe, batch_shapes, build_abstract
from meshpar.runs.recipe_file import load_recipe
from meshpar.sharding.errors import check_cases, check_positive_int
from meshpar.sharding.printing import Plain, Printed
from meshpar.sharding.units import human_bytes, human_time

USABLE = f"{COMFORTABLE:.0%} of the GPU's memory"
MAX_COMBINATIONS = 8
"""Maximum number of compiled combinations of two changes, and of three."""
MIN_SAVED = 0.005
"""Share of the peak memory that a change must save to be combined with others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChange(Plain):
    """A change of a recipe, with the numbers of the compiled step."""

    kind: str
    settings: tuple[str, ...]
    """Fields to change, as `FIELD=VALUE` for `--set` and `Recipe.override`."""
    command: str
    """Arguments of a command: `--set step.remat=full`."""
    python: str
    """An expression, for a variable `recipe` and `import dataclasses, meshpar as mp`."""
    fits: bool
    peak_bytes: int | None = None
    """Peak memory of a GPU; None if the step was not compiled."""
    saved_bytes: int | None = None
    """Peak memory of the recipe minus `peak_bytes`; negative if the change needs more memory."""
    step_s: float | None = None
    """Simulated time of the changed step."""
    slowdown: float | None = None
    """Simulated time relative to the recipe's, minus 1."""
    host_bytes: int = 0
    """Temporaries in host memory."""
    reason: str = ""
    """Reason why the step was not compiled, or empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFit(Printed, Plain):
    """Changes with which a step fits in memory. Prints as a table."""

    recipe: str
    cluster: str
    limit_bytes: int
    """Memory that a step may use: 90 % of the GPU's, as in the planner. The CUDA context, NCCL and fragmentation need
    the rest."""
    peak_bytes: int
    """Peak memory of the recipe's step."""
    step_s: float
    """Simulated time of the recipe's step."""
    changes: tuple[MemoryChange, ...]
    """The changes that fit, fastest first, then changes that do not fit, smallest first. Empty if the recipe fits."""

    largest: tuple[LiveArray, ...] = ()
    """The largest temporaries that are live at the peak of the recipe's step."""
    timeline: MemoryTimeline | None = dataclasses.field(default=None, repr=False)
    """Memory of the recipe's step over time, for `mp.plots.memory_timeline`."""

    derived = ("fits", "best", "note")

    @property
    def fits(self) -> bool:
        """Whether the recipe fits without changes."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def best(self) -> MemoryChange | None:
        """The change that fits and has the shortest simulated step; None if no change fits."""
        return next((change for change in self.changes if change.fits), None)

    @property
    def note(self) -> str:
        """The setting of XLA's allocator without which the best change does not fit; empty if none is needed."""
        peak = self.peak_bytes if self.fits else self.best.peak_bytes if self.best is not None else 0
        return memory_note(peak or 0, int(self.limit_bytes / COMFORTABLE))

    @property
    def section(self) -> Section:
        """The result as a section of a report."""
        used = f"{human_bytes(self.peak_bytes)} of {human_bytes(self.limit_bytes)}, {USABLE}"
        notes: list[Table | Cell] = [Cell(self.note, "warn")] if self.note else []
        if self.fits:
            return Section(title="Fit", verdict=Cell(f"it fits: {used}", "good"), parts=notes)
        rows = [
            (
                Cell("✔", "good") if change.fits else Cell("✘", "bad"),
                change.kind,
                *_numbers(change),
                Cell(change.command, "strong" if change is self.best else ""),
                Cell(change.reason, "faint"),
            )
            for change in self.changes
        ]
        columns = ("", "change", "saves>", "peak>", "step>", "slower>", "arguments", "why not compiled")
        parts: list[Table | Cell] = [Table(columns=columns, rows=rows, most=2 * MOST_ROWS)]
        if self.best is None:
            parts.append(Cell("no change and no combination fits: use more GPUs, or a smaller model or batch", "bad"))
        else:
            parts.append(Cell(f"the fastest change that fits: {self.best.command}", "good"))
            parts.append(Cell(f"in Python: recipe = {self.best.python}"))
            parts += notes
        if self.timeline is not None:
            parts.append(live_table(self.timeline))
        verdict = Cell(f"it does not fit: {used}; simulated step {human_time(self.step_s)}", "bad")
        return Section(title="Fit", verdict=verdict, parts=parts)

    def __rich__(self) -> Any:
        return rich_of([self.section], head=[Cell(f"{self.recipe} on {self.cluster}", "strong")])

    def _repr_html_(self) -> str:
        return self.section.html()


def live_table(timeline: MemoryTimeline) -> Table:
    """Return the largest temporaries that are live at the peak as a table."""
    unit = human_time if timeline.is_timed else "{:.0%}".format
    rows = [
        (
            Cell(human_bytes(array.nbytes), share=array.nbytes / max(timeline.arrays[0].nbytes, 1)),
            array.module or "–",
            short_source(array.source),
            Cell(array.shape, "faint"),
            f"{unit(array.start_s)} to {unit(array.end_s)}",
        )
        for array in timeline.arrays
    ]
    title = f"Largest temporaries at the peak, {unit(timeline.times_s[timeline.peak])} after the start of the step"
    return Table(title=title, columns=("bytes>", "module", "source", "shape", "live"), rows=rows)


def _numbers(change: MemoryChange) -> tuple[str, str, str, str]:
    if change.peak_bytes is None or change.saved_bytes is None or change.step_s is None or change.slowdown is None:
        return ("–",) * 4
    saved = f"{'-' * (change.saved_bytes < 0)}{human_bytes(abs(change.saved_bytes))}"
    return saved, human_bytes(change.peak_bytes), human_time(change.step_s), f"{change.slowdown:+.1%}"


def fit_memory(
    recipe: Recipe | str | Path,
    cluster: str | Cluster,
    *,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    report: Report | None = None,
    num_processes: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> MemoryFit:
    """Return changes with which the training step of a recipe fits in the memory of a GPU, fastest first.

    Each change is compiled for the cluster without GPUs, in child processes. Its peak memory is the compiler's, and
    its time is simulated from the compiled program. The changes are more micro-steps or microbatches, other remat
    policies, marked activations that are recomputed or offloaded, chunks of the vocabulary, low-precision and offloaded
    moments, more sharded state, no prefetch, and other layouts on the same GPUs. For each kind, the search compiles
    stronger changes until a change fits. If no change fits, it compiles combinations of two, and then of three.

    Args:
      recipe: a recipe, a recipe file, or the name of an installed recipe.
      cluster: `h100:8x8`, the path of a profile, or a `Cluster`, with the number of GPUs of the mesh.
      batch: shapes of the global batch; by default from the recipe's data.
      report: the report of `explain` for the recipe on this cluster, whose step is then not compiled again.
      num_processes: number of compiling processes; by default the maximum for the cores and the free memory.
      progress: receives a line about each compiled change.

    Raises:
      MeshparError: the recipe is invalid, the `aot` extra is missing, or the step itself cannot be compiled.

    Example:
      >>> found = mp.fit_memory("llama3_8b", "h100:1x8")  # doctest: +SKIP
      >>> print(found)  # doctest: +SKIP
      >>> recipe = recipe.override(*found.best.settings)  # doctest: +SKIP
    """
    if num_processes is not None:
        check_positive_int("fit_memory", "the number of compiling processes", num_processes=num_processes)
    check_cases(
        "fit_memory", "compile the step", "wrong-type",
        (not isinstance(recipe, Recipe | str | Path), f"the recipe is a {type(recipe).__name__}",
         "pass an mp.Recipe, a file or the name of a recipe"),
        (not isinstance(batch, Mapping | None), f"the batch is a {type(batch).__name__}",
         "pass a dict from names to jax.ShapeDtypeStruct"),
    )  # fmt: skip
    cluster = parse_cluster(cluster)
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, devices=cluster.num_devices)
    batch = dict(batch or batch_shapes(recipe))
    with PodPool(num_processes) as pool:
        search = _Search(recipe, cluster, batch, pool, progress)
        return search.run(report)


@dataclasses.dataclass(eq=False)
class _Trial:
    change: Change
    numbers: StepNumbers | None = None
    reason: str = ""


class _Search:
    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        pool: PodPool,
        progress: Callable[[str], None],
    ) -> None:
        self.recipe, self.cluster, self.batch, self.pool, self.progress = recipe, cluster, batch, pool, progress
        self.limit = int(COMFORTABLE * cluster.gpu.memory_bytes)
        self.trials: list[_Trial] = []

    def run(self, report: Report | None) -> MemoryFit:
        """Search. The step of the recipe is compiled if `report` is None."""
        step, state = self._built(self.recipe)
        lowered, traced = lower(step, state, self.batch, self.cluster)
        if report is not None and report.compute.predicted_step_s is not None and report.program is not None:
            self.base = StepNumbers(report.memory.peak_bytes, report.compute.predicted_step_s)
            live = memory_timeline(report.program, report.timeline)
        else:
            self.progress("compiling the recipe")
            self.base, live = self.pool.submit(LoweredStep.profile, lowered).result()
        if self.base.peak_bytes > self.limit:
            found = ladders(self.recipe, state.setup, step.describe(state, self.batch), traced.jaxpr)
            self._climb(itertools.chain(found, self._layouts()))
            for size in (2, 3):
                if not any(map(self._fits, self.trials)):
                    self._combine(size)
        return MemoryFit(
            recipe=self.recipe.name, cluster=self.cluster.name, limit_bytes=self.limit,
            peak_bytes=self.base.peak_bytes, step_s=self.base.step_s,
            changes=tuple(map(self._result, sorted(self.trials, key=self._order))), largest=live.arrays, timeline=live,
        )  # fmt: skip

    # ---- Compilation -------------------------------------------------------------------------------------------------

    def _built(self, recipe: Recipe) -> Any:
        return build_abstract(recipe, recipe.mesh.abstract(self.cluster.num_devices))

    def _start(self, change: Change) -> tuple[_Trial, concurrent.futures.Future[StepNumbers] | None]:
        """Lower a change and start to compile it. A change that is invalid or cannot fit is not compiled."""
        trial = _Trial(change)
        self.trials.append(trial)
        self.progress(f"compiling {change.command}")
        try:
            changed = self.recipe.override(*change.settings)
            step, state = self._built(changed)
            needed = argument_bytes(state.setup, self.batch)
            if needed > self.limit:
                trial.reason = f"state and batch need {human_bytes(needed)}"
                return trial, None
            lowered, _ = lower(step, state, self.batch, self.cluster)
        except Exception as error:  # the user's model may raise any error for a different batch or policy
            trial.reason = _first_line(error)
            return trial, None
        return trial, self.pool.submit(LoweredStep.compile, lowered)

    def _finish(self, trial: _Trial, future: concurrent.futures.Future[StepNumbers]) -> None:
        try:
            trial.numbers = future.result()
        except Exception as error:  # the compiler may refuse a program
            lines = [line for line in str(error).splitlines() if line.strip()]
            trial.reason = lines[-1] if lines else type(error).__name__

    def _climb(self, ladders: Iterable[tuple[Change, ...]]) -> None:
        """Compile the changes of each ladder until a change fits. Other ladders are compiled at the same time."""
        source, waiting = iter(ladders), list[tuple[tuple[Change, ...], int]]()
        running: dict[concurrent.futures.Future[StepNumbers], tuple[tuple[Change, ...], int, _Trial]] = {}
        while True:
            # One more step than processes is lowered, so that no process waits.
            while len(running) <= self.pool.num_processes:
                if not waiting:
                    waiting += [(ladder, 0) for ladder in itertools.islice(source, 1)]
                if not waiting:
                    break
                ladder, index = waiting.pop(0)
                trial, future = self._start(ladder[index])
                if future is not None:
                    running[future] = ladder, index, trial
                elif index + 1 < len(ladder):
                    waiting.append((ladder, index + 1))
            if not running:
                return
            for future in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                ladder, index, trial = running.pop(future)
                self._finish(trial, future)
                if not self._fits(trial) and index + 1 < len(ladder):
                    waiting.append((ladder, self._next(ladder, index, trial)))

    def _next(self, ladder: tuple[Change, ...], index: int, trial: _Trial) -> int:
        """Return the next change to compile: the first that fits if the peak is linear in the remaining bytes."""
        remaining = ladder[index].remaining
        if remaining is None or trial.numbers is None or trial.numbers.peak_bytes >= self.base.peak_bytes:
            return index + 1
        per_share = (self.base.peak_bytes - trial.numbers.peak_bytes) / (1 - remaining)
        limit = 1 - (self.base.peak_bytes - self.limit) / per_share
        fitting = (i for i in range(index + 1, len(ladder)) if (ladder[i].remaining or 0) <= limit)
        return next(fitting, len(ladder) - 1)

    def _layouts(self) -> Iterator[tuple[Change, ...]]:
        """Yield the planner's layouts, each as a ladder. The search for them runs while other changes are compiled."""
        try:
            yield from [(change,) for change in layouts(self.recipe, self.batch, self.cluster) if change.fields]
        except Exception as error:  # the planner traces the user's model with other policies
            self.trials.append(_Trial(Change(kind="layout", fields={}), reason=_first_line(error)))

    def _combine(self, size: int) -> None:
        """Compile the combinations that fit if the savings add up, fastest first. If none does, the smallest."""
        usable = [
            t for t in self.trials if " + " not in t.change.kind and self._saved(t) > MIN_SAVED * self.base.peak_bytes
        ]
        groups = [group for group in itertools.combinations(usable, size) if _is_consistent(group)]
        predicted = [(*self._predicted(group), index) for index, group in enumerate(groups)]
        fitting = sorted((time, peak, index) for peak, time, index in predicted if peak <= self.limit)
        smallest = sorted((peak, time, index) for peak, time, index in predicted if peak > self.limit)
        chosen = [groups[index] for *_, index in (*fitting, *smallest)[:MAX_COMBINATIONS]]
        changes = [sum((t.change for t in group[1:]), start=group[0].change) for group in chosen]
        self._climb([(change,) for change in changes])

    def _predicted(self, group: Iterable[_Trial]) -> tuple[float, float]:
        numbers = [trial.numbers for trial in group if trial.numbers is not None]
        peak = self.base.peak_bytes + sum(n.peak_bytes - self.base.peak_bytes for n in numbers)
        return peak, self.base.step_s + sum(n.step_s - self.base.step_s for n in numbers)

    # ---- Result ------------------------------------------------------------------------------------------------------

    def _fits(self, trial: _Trial) -> bool:
        return trial.numbers is not None and trial.numbers.peak_bytes <= self.limit

    def _saved(self, trial: _Trial) -> float:
        return 0.0 if trial.numbers is None else self.base.peak_bytes - trial.numbers.peak_bytes

    def _order(self, trial: _Trial) -> tuple[bool, bool, float]:
        if trial.numbers is None:
            return True, True, 0.0
        fits = self._fits(trial)
        return not fits, False, trial.numbers.step_s if fits else trial.numbers.peak_bytes

    def _result(self, trial: _Trial) -> MemoryChange:
        change, numbers = trial.change, trial.numbers
        result = MemoryChange(
            kind=change.kind, settings=change.settings, command=change.command, python=change.python,
            fits=self._fits(trial), reason=trial.reason,
        )  # fmt: skip
        if numbers is None:
            return result
        return dataclasses.replace(
            result,
            peak_bytes=numbers.peak_bytes,
            saved_bytes=self.base.peak_bytes - numbers.peak_bytes,
            step_s=numbers.step_s,
            slowdown=numbers.step_s / self.base.step_s - 1,
            host_bytes=numbers.host_bytes,
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _is_consistent(group: Sequence[_Trial]) -> bool:
    return not any(a.change.conflicts_with(b.change) for a, b in itertools.combinations(group, 2))
