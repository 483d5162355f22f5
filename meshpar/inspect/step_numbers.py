"""Peak memory and simulated time of a step, compiled for a cluster in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from meshpar.hardware.clusters import Cluster
from meshpar.hardware.compile_options import overlap_limit
from meshpar.inspect.census import census
from meshpar.inspect.explain import check_equal_parts, on_target
from meshpar.inspect.memory_timeline import MemoryTimeline, memory_timeline
from meshpar.inspect.program import Program
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.target import compile_stablehlo, stablehlo_of, traced_for
from meshpar.inspect.timeline.simulator import Timeline, timeline
from meshpar.schedules import Schedule
from meshpar.sharding.types import PyTree, axis_sizes
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep


class StepNumbers(NamedTuple):
    """Numbers of a compiled step, per device."""

    peak_bytes: int
    step_s: float
    """Simulated time, as in `explain`."""
    host_bytes: int = 0
    """Temporaries in host memory."""


class LoweredStep(NamedTuple):
    """A step that a child process can compile: pickled data and no Python functions."""

    module: bytes
    """StableHLO bytecode."""
    cluster: Cluster
    options: Mapping[str, Any]
    sizes: Mapping[str, int]
    """Sizes of the mesh axes."""
    schedule: Schedule | None
    """The pipeline schedule, or None."""

    def compile(self) -> StepNumbers:
        """Compile the step in this process. Returns its numbers."""
        return self.numbers(compile_stablehlo(self.module, self.cluster, options=self.options))

    def numbers(self, program: Program) -> StepNumbers:
        """Return the numbers of the compiled step."""
        return StepNumbers(program.peak_bytes, self._timeline(program).step_s, program.host_temporary_bytes)

    def profile(self) -> tuple[StepNumbers, MemoryTimeline]:
        """Compile the step in this process. Returns its numbers and its memory over time."""
        program = compile_stablehlo(self.module, self.cluster, options=self.options)
        return self.numbers(program), memory_timeline(program, self._timeline(program))

    def _timeline(self, program: Program) -> Timeline:
        counts = None if self.schedule is None else ScheduleCounts(self.schedule)
        collectives = census(program.module, self.sizes, counts)
        limit = overlap_limit(self.options)
        return timeline(program.module, collectives, self.cluster, counts, overlap_limit=limit)


def lower(step: TrainStep, state: TrainState, batch: PyTree, cluster: Cluster) -> tuple[LoweredStep, jax.stages.Traced]:
    """Trace a step for a cluster. Returns it lowered, and the trace.

    Raises:
      MeshparError: as `explain`. Errors of the model and the loss are not caught.
    """
    check_equal_parts(state)
    state = on_target(state, cluster)
    with traced_for(cluster):
        traced = step.trace(state, batch)
        module = stablehlo_of(traced, cluster)
    pipeline = state.setup.strategy.pipeline
    schedule = None if pipeline is None else pipeline.table()
    sizes, options = axis_sizes(state.setup.mesh), step.compile_options(state.setup)
    return LoweredStep(module, cluster, options, sizes, schedule), traced
