"""Latencies for XLA's scheduler by the clock: compile, simulate, compile by what everything took, keep the quickest."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from meshpar.compiled.clock.timeline import Timeline
from meshpar.compiled.explain import explain, on_cluster
from meshpar.compiled.pod import PodProcess
from meshpar.compiled.report import Report
from meshpar.planner.hardware import Cluster
from meshpar.sharding.types import PyTree
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep
from meshpar.training.xla import LATENCIES, Options, save_latencies

ROUNDS = 3
"""Programs that are compiled by latencies: each schedule has queues of its own, by which the next one is made."""

What = TypeVar("What")


@dataclasses.dataclass(frozen=True)
class Round(Generic[What]):
    """A program that was compiled by latencies."""

    what: What
    timeline: Timeline
    latencies: str
    """What the file held."""


def rounds(
    compiled: Callable[[Path], tuple[What, Timeline]], before: Timeline | None = None
) -> tuple[Round[What], ...]:
    """Programs compiled by latencies, each by those of the one before.

    Args:
      compiled: what to compile by a file of latencies, and its simulation.
      before: of the same program without latencies; None: it is compiled with a file that names nothing.
    """
    found: list[Round[What]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latencies.pbtxt"
        if before is None:
            save_latencies(file, {"nothing": 0.0})
            _, before = compiled(file)
        held: dict[str, float] = {}
        for _ in range(ROUNDS):
            # The mean with what the file held: a queue moves with the schedule, and schedules would swing about.
            held = {name: (held.get(name, time_s) + time_s) / 2 for name, time_s in before.latencies.items()}
            save_latencies(file, held)
            what, before = compiled(file)
            found.append(Round(what, before, file.read_text(encoding="utf-8")))
    return tuple(found)


def quickest(found: tuple[Round[What], ...]) -> Round[What]:
    """The one whose step is shortest by the clock."""
    return min(found, key=lambda one: one.timeline.step_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Programs of one step that differ in their schedule."""

    own: Report
    """Compiled without latencies."""
    rounds: tuple[Round[Report], ...]

    @property
    def quickest(self) -> Round[Report]:
        """The one whose step is shortest by the clock, of those that fit where any does."""
        fit = tuple(one for one in self.rounds if one.what.memory.fits is not False)
        return quickest(fit or self.rounds)

    def named(self, path: str) -> Scheduled:
        """The same, each report with this file among its options: what it was compiled by lies there no more."""
        reports = [
            dataclasses.replace(one.what, compile_options={**one.what.compile_options, LATENCIES: path})
            for one in self.rounds
        ]
        named = (dataclasses.replace(one, what=report) for one, report in zip(self.rounds, reports, strict=True))
        return dataclasses.replace(self, rounds=tuple(named))

    @property
    def is_gain(self) -> bool:
        """Whether its step is shorter than without latencies, and it fits where that does."""
        assert self.own.timeline is not None
        fits = self.quickest.what.memory.fits is not False or self.own.memory.fits is False
        return fits and self.quickest.timeline.step_s < self.own.timeline.step_s


def schedule(
    step: TrainStep, state: TrainState, batch: PyTree, cluster: Cluster, *, pod: PodProcess | None = None
) -> Scheduled:
    """Compiles a step by latencies, and without.

    Args:
      step, state, batch, cluster, pod: as for `meshpar.explain`. A file of latencies that the step names is left out,
        and need not be there yet.

    Raises:
      ValueError: see `meshpar.explain`.
    """
    state = on_cluster(cluster, state)
    step = _compiled_with(step, {name: value for name, value in step.options.xla.items() if name != LATENCIES})
    own = explain(step, state, batch, cluster, pod=pod)
    apart = {LATENCIES: ""}

    def compiled(file: Path) -> tuple[Report, Timeline]:
        report = explain(by_latencies(step, file), state, batch, cluster, pod=pod, advise=False)
        assert report.timeline is not None
        return report, report.timeline

    # With latencies a step may have other options, and then its instructions have other names.
    is_same = {**by_latencies(step, Path()).compile_options(state.setup), **apart} == {**own.compile_options, **apart}
    return Scheduled(own=own, rounds=rounds(compiled, own.timeline if is_same else None))


def by_latencies(step: TrainStep, file: Path) -> TrainStep:
    """The step, compiled by a file of latencies."""
    return _compiled_with(step, {**step.options.xla, LATENCIES: str(file)})


def _compiled_with(step: TrainStep, xla: Options) -> TrainStep:
    return TrainStep(step.loss_fn, dataclasses.replace(step.options, xla=xla))
