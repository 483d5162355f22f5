"""Latencies for XLA's scheduler by the clock: compile, simulate, compile by what everything took, keep the quickest."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from meshpar.compiled.explain import explain, on_cluster
from meshpar.compiled.pod import PodProcess
from meshpar.compiled.report import Report
from meshpar.planner.hardware import Cluster
from meshpar.sharding.types import PyTree
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep
from meshpar.training.xla import LATENCIES, save_latencies

ROUNDS = 3
"""Programs that are compiled by latencies. Each schedule has queues of its own, so the next round's are others; by the
third nothing more is gained on the shipped recipes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Programs of one step that differ in their schedule."""

    own: Report
    """Compiled without latencies."""
    rounds: tuple[Report, ...]
    """Compiled by latencies, each by those of the one before."""

    @property
    def quickest(self) -> Report:
        """Of the rounds, the one whose step is shortest by the clock, of those that fit where any does."""
        fit = [one for one in self.rounds if one.memory.fits is not False]
        return min(fit or self.rounds, key=_step_s)

    @property
    def is_gain(self) -> bool:
        """Whether its step is shorter than without latencies, and no less fits."""
        fits = self.quickest.memory.fits is not False or self.own.memory.fits is False
        return fits and _step_s(self.quickest) < _step_s(self.own)


def schedule(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    cluster: Cluster,
    path: str | Path,
    *,
    pod: PodProcess | None = None,
) -> Scheduled:
    """Compiles a step by latencies and writes those of the quickest program to a file.

    Args:
      step, state, batch, cluster, pod: as for `meshpar.explain`.
      path: of the file, `*.pbtxt`, for `--xla xla_gpu_pgle_profile_file_or_directory_path=FILE`.

    Raises:
      ValueError: see `meshpar.explain`.
    """
    state = on_cluster(cluster, state)
    own = explain(step, state, batch, cluster, pod=pod)
    rounds: list[Report] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latencies.pbtxt"
        timed = _by(step, file)
        save_latencies(file, {"nothing": 0.0})
        before = own
        if _without_file(timed, state) != own.compile_options:  # other options, other instructions
            before = explain(timed, state, batch, cluster, pod=pod, advise=False)
        written: dict[int, str] = {}
        for _ in range(ROUNDS):
            assert before.timeline is not None
            save_latencies(file, before.timeline.latencies)
            before = explain(timed, state, batch, cluster, pod=pod, advise=False)
            rounds.append(before)
            written[id(before)] = file.read_text(encoding="utf-8")
    found = Scheduled(own=own, rounds=tuple(rounds))
    Path(path).write_text(written[id(found.quickest)], encoding="utf-8")
    return found


def _by(step: TrainStep, file: Path) -> TrainStep:
    """The step, compiled by a file of latencies."""
    options = dataclasses.replace(step.options, xla={**step.options.xla, LATENCIES: str(file)})
    return TrainStep(step.loss_fn, options)


def _without_file(step: TrainStep, state: TrainState) -> dict[str, object]:
    return {name: value for name, value in step.compile_options(state.setup).items() if name != LATENCIES}


def _step_s(report: Report) -> float:
    assert report.timeline is not None
    return report.timeline.step_s
