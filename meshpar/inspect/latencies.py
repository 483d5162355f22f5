"""A step compiled in rounds by simulated latencies: simulate, compile by what everything took, keep the quickest.

    compiled ─► schedule ─► simulated ─► latencies by instruction ─► compiled by them ─► ... ─► the quickest of all

XLA's scheduler left to itself gives all collectives one latency. It takes a profile of what each was measured to take;
here the clock of `explain` stands in for the measurement, so it needs no device and comes out the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from meshpar.hardware.clusters import Cluster, cluster_here
from meshpar.hardware.compile_options import PROFILE, Options, overlap_limit, profile
from meshpar.inspect.census import Collective, census
from meshpar.inspect.memory import limit_bytes
from meshpar.inspect.program import Program, program_of
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.stage_partition import parts_of
from meshpar.inspect.timeline.simulator import Timeline, timeline
from meshpar.inspect.timeline.step_prediction import overlap
from meshpar.loop.coordination import this_pod
from meshpar.loop.heartbeat import BUSY_S
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import PyTree, axis_sizes, problem
from meshpar.sharding.units import si
from meshpar.training.state import Setup, TrainState
from meshpar.training.step import TrainStep

What = TypeVar("What")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Plain):
    """One program of a step by the clock."""

    step_s: float
    hidden_fraction: float | None
    """Of the time of its messages, while compute was at work."""
    peak_bytes: int
    """Of one device."""
    fits: bool | None = None

    def __str__(self) -> str:
        hidden = "" if self.hidden_fraction is None else f", {self.hidden_fraction:.0%} hidden"
        too_large = " (does not fit)" if self.fits is False else ""
        return f"{si(self.step_s, 's')} a step{hidden}, {si(self.peak_bytes, 'B')} a device{too_large}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Plain):
    """What rounds of latencies gave."""

    schedules: tuple[Round, ...] = ()
    """Without latencies first, then each round's."""
    kept: int = 0
    """Which of them runs; 0: no round was quicker."""
    reason: str = ""
    """Why there were no rounds; empty when there were."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Each program in words."""
        names = ["without latencies", *(f"round {number}" for number in range(1, len(self.schedules)))]
        kept = [", kept" * (number == self.kept) for number in range(len(names))]
        return tuple(f"{name}: {one}{more}" for name, one, more in zip(names, self.schedules, kept, strict=False))

    def __str__(self) -> str:
        return f"not compiled by latencies: {self.reason}" if self.reason else "; ".join(self.lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Generic[What]):
    """A program, its simulation, and what was compiled."""

    what: What
    program: Program
    collectives: tuple[Collective, ...]
    timeline: Timeline | None
    """None where no clock knows its devices."""


def in_rounds(
    compiled: Callable[[Options], Candidate[What]],
    rounds: int,
    *,
    limit_bytes: int | None = None,
    shared: Callable[[str, Any], Any] = lambda about, mine: mine,
) -> tuple[Candidate[What], Rounds]:
    """The quickest of the program without latencies and of those compiled by them, each by those of the ones before.

    Args:
      compiled: compiles with these options beside the step's own: none, or `PROFILE`.
      rounds: programs that are compiled by latencies.
      limit_bytes: of a device's memory: what does not fit is kept only where nothing does.
      shared: gives every process what one of them says under a name. Processes that went by texts of their own would
        send messages in an order of their own, and wait for each other forever.
    """
    found = [compiled({})]
    if not rounds or found[0].timeline is None:
        return found[0], Rounds(reason=f"no clock has times for `{found[0].program.target}`" * bool(rounds))
    held: dict[str, float] = {}
    for _ in range(rounds):
        before = found[-1].timeline
        assert before is not None
        # The mean with what it went by: a queue moves with the schedule, and schedules would swing about.
        held = {name: (held.get(name, time_s) + time_s) / 2 for name, time_s in before.latencies.items()}
        found.append(compiled({PROFILE: shared("latencies", profile(held)).encode()}))
    schedules = [_schedule(one, limit_bytes) for one in found]
    order = [(one.fits is False, one.step_s) for one in schedules]
    kept = shared("the quickest round", order.index(min(order)))
    return found[kept], Rounds(schedules=tuple(schedules), kept=kept)


def _schedule(one: Candidate[Any], limit_bytes: int | None) -> Round:
    assert one.timeline is not None
    peak = one.program.peak_bytes
    return Round(
        step_s=one.timeline.step_s,
        hidden_fraction=overlap(one.timeline).hidden_fraction,
        peak_bytes=peak,
        fits=None if limit_bytes is None else peak <= limit_bytes,
    )


def simulated(
    what: What,
    program: Program,
    setup: Setup,
    cluster: Cluster | None,
    options: Options,
    cells: ScheduleCounts | None = None,
) -> Candidate[What]:
    """A program of a step with its simulation.

    Args:
      what: goes along with it.
      program: compiled for the setup's mesh.
      setup: of the step's state.
      cluster: whose clock it is; None: none.
      options: by which it was compiled.
      cells: of a pipelined step.
    """
    collectives = census(program.module, axis_sizes(setup.mesh), cells)
    times = None
    if cluster is not None:
        times = timeline(program.module, collectives, cluster, cells, overlap_limit=overlap_limit(options))
    return Candidate(what=what, program=program, collectives=collectives, timeline=times)


def at_hand(step: TrainStep, jitted: Callable[[Options], Any], state: TrainState, batch: PyTree) -> tuple[Any, Rounds]:
    """A step compiled in rounds for the GPUs at hand: the jitted function to call, and what rounds gave.

    Args:
      step: with `latency_rounds`.
      jitted: the step's function, jitted with these options beside its own; what is compiled of it, its call finds.
      state, batch: as the step is called with them.

    Raises:
      ValueError: jax's own profiles are on, too; or in a pod, the process that speaks for all did not.
    """
    setup, rounds = state.setup, step.options.latency_rounds
    devices: Sequence[Any] = list(setup.mesh.devices.flat)
    if jax.config.jax_enable_pgle:  # type: ignore[attr-defined]
        exists = "jax_enable_pgle is on, and jax would take the simulated ones for those that it measures"
        fix = "leave out latency_rounds, or turn jax_enable_pgle off"
        raise problem(f"latency_rounds={rounds}", "compile the step by simulated latencies", exists, fix)
    cluster = cluster_here(devices)
    if cluster is None:
        kind = getattr(devices[0], "device_kind", "?")
        found = Rounds(reason=f"the clock does not know GPU `{kind}`")
        warnings.warn(f"latency_rounds={rounds}: {found.reason}; the step is compiled once, without", stacklevel=2)
        return jitted({}), found
    cells = None
    if setup.strategy.pipeline is not None:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.result_type(x)), batch)
        cells = ScheduleCounts(parts_of(step, setup.abstract, rows).schedule)
    options = step.compile_options(setup)

    def compiled(more: Options) -> Candidate[Any]:
        function = jitted(more)
        return simulated(function, program_of(function.lower(state, batch)), setup, cluster, options, cells)

    best, found = in_rounds(compiled, rounds, limit_bytes=limit_bytes(setup, cluster), shared=_shared_among(devices))
    if not found.kept:
        said = f"latency_rounds={rounds} is no gain and may be left out: {found}"
        warnings.warn(said, stacklevel=2)
    return best.what, found


def _shared_among(devices: Sequence[Any]) -> Callable[[str, Any], Any]:
    """What gives all processes with some of these devices what the first of them says."""
    pod = this_pod()
    if pod is None:
        return lambda about, mine: mine
    first = min(device.process_index for device in devices)
    return functools.partial(pod.of_first, first=first, timeout_s=BUSY_S)
