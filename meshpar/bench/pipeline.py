"""Schedules of the pipeline on the clock: stages that sleep, on host devices.

Sleeping takes no core and every host device has a thread of its own, so the wall clock shows what a schedule and its
executor make of the time: bubbles, waiting, and the work around the stages. No sleep is shortened for what waking up
costs beside it: that hangs on the machine's load from moment to moment, and a sleep shortened by too much would hide
what is to be measured. So a step takes no less than its table allows, and on a busy machine it takes more.

Two halves of a whole backward make one block in simulations, which hands its result on when both are done. The executor
sends the gradient of the input as soon as it is there, so 1F1B may take a little less than simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.bench.report import Figures, Measure, in_turn, load, paired_ratios, quartiles, seconds_of
from meshpar.bench.sleeper import OPS, Sleeper
from meshpar.pipeline import SCHEDULES, Micro, Params, Schedule, make, value_and_grad
from meshpar.sharding.types import PyTree, near, problem

NAMES = tuple(SCHEDULES)
CASES = ((4, 8), (4, 16), (8, 16))
"""Stages and microbatches."""
ORDER = ("zb-v", "zb-h1", "interleaved-1f1b", "1f1b")
"""Of a step alone, the quickest first; GPipe takes as long as the last."""
STEPS = 4
"""Run one after another where stages do not meet."""
WIDTH = 4
"""Of a microbatch's one row: as good as nothing to work on and to send."""
Program = Callable[[], Any]


def _mesh(stages: int) -> Mesh:
    return jax.make_mesh((stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages])


def _mean(ends: PyTree, y: jax.Array, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
    return y.mean(), {}


def _given(parts: int, microbatches: int, mesh: Mesh) -> tuple[Params, dict[str, jax.Array]]:
    """Parameters and a batch."""
    weights = 1 + np.arange(parts * WIDTH, dtype=np.float32).reshape(parts, WIDTH) / (parts * WIDTH)
    rows = np.linspace(-1, 1, microbatches * WIDTH, dtype=np.float32).reshape(microbatches, WIDTH)
    params = Params(jax.device_put(weights, NamedSharding(mesh, P("stage"))))
    return params, {"inputs": jax.device_put(rows, NamedSharding(mesh, P()))}


# ---------------------------------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------------------------------


def pipeline_program(
    schedule: Schedule,
    stage: Callable[..., jax.Array],
    steps: int | None = None,
    messages: Literal["permute", "pairs"] = "permute",
) -> Program:
    """A compiled step of the executor; or several without a meeting point, each on what the one before it made."""
    mesh = _mesh(schedule.stages)
    params, batch = _given(schedule.num_parts, schedule.microbatches, mesh)
    step = value_and_grad(stage, _mean, schedule=schedule, mesh=mesh, meet=steps is None, messages=messages)

    def several(params: Params, batch: PyTree) -> tuple[Params, jax.Array]:
        def one(params: Params, _: None) -> tuple[Params, jax.Array]:
            result, grads = step(params, batch)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), result.loss

        return lax.scan(one, params, None, length=steps)

    return _compiled(step if steps is None else several, params, batch)


def scan_program(stages: int, microbatches: int, stage: Callable[..., jax.Array]) -> Program:
    """GPipe as one writes it without a framework: a scan over ticks with a permute, differentiated by jax."""
    mesh = _mesh(stages)
    params, batch = _given(stages, microbatches, mesh)
    up = [(rank, rank + 1) for rank in range(stages - 1)]

    def loss_of(w: jax.Array, rows: jax.Array) -> jax.Array:
        """This stage's share of the loss: all of it on the last one."""
        rank = lax.axis_index("stage")

        def tick(x: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = lax.dynamic_slice_in_dim(rows, jnp.clip(at, 0, microbatches - 1), 1)
            y = stage(w[0], jnp.where(rank == 0, row, x), None)
            return lax.ppermute(y, "stage", up), jnp.where((rank == stages - 1) & (at >= stages - 1), y.mean(), 0.0)

        _, losses = lax.scan(tick, jnp.zeros((1, WIDTH)), jnp.arange(microbatches + stages - 1))
        return losses.sum() / microbatches

    def local(w: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(w, rows)
        return lax.psum(loss, "stage"), grads

    # Differentiated inside, where the permute's transpose is all that crosses stages: nothing has to vary alike.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=(P(), P("stage")), check_vma=False)
    return _compiled(lambda params, batch: mapped(params.parts, batch["inputs"]), params, batch)


def _compiled(step: Callable[..., Any], params: Params, batch: PyTree) -> Program:
    program = jax.jit(step).lower(params, batch).compile()
    return lambda: jax.block_until_ready(program(params, batch))


# ---------------------------------------------------------------------------------------------------------------------
# What was found
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule, a step alone."""

    schedule: str
    stages: int
    microbatches: int
    ticks: int
    time_s: float
    """Median of the repeats."""
    low_s: float
    """Quartiles."""
    high_s: float
    free_s: float
    """Simulated makespan: every stage runs a block as soon as it can."""
    lockstep_s: float
    """Simulated makespan: all stages begin a tick together."""
    busy_s: float
    """What a stage sleeps."""
    naps: dict[str, int]
    """Of all devices in one step, by op."""

    @property
    def ratio(self) -> float:
        """Measured over simulated time, stages free."""
        return self.time_s / self.free_s if self.free_s else float("nan")

    @property
    def bubble_fraction(self) -> float:
        """Measured: the share of the step that a stage does not sleep, overhead included."""
        return 1 - self.busy_s / self.time_s

    @property
    def bubble_in_theory(self) -> float:
        return 1 - self.busy_s / self.free_s if self.free_s else float("nan")

    def to_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("ratio", "bubble_fraction", "bubble_in_theory")}
        return {**dataclasses.asdict(self), **{name: x if x == x else None for name, x in told.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedules:
    """Measured schedules. Prints as tables."""

    op_s: float
    """How long F, B and W of one stage are to take."""
    repeats: int
    load: tuple[float, float]
    """The machine's, over a minute, before and after."""
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    sleeps: str
    """What sleeps, and why where it is not what measures best."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        report = Figures(title="schedules", measures=self.measures).to_json()
        return {
            "op_s": self.op_s,
            "repeats": self.repeats,
            "load": list(self.load),
            "cores": os.cpu_count(),
            "sleeps": self.sleeps,
            "rows": [row.to_json() for row in self.rows],
            "measures": report["measures"],
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=f"a step alone, F = B = W = {self.op_s * 1e3:g} ms, {self.repeats} repeats")
        for at, column in enumerate(
            ("schedule", "p", "m", "ticks", "ms", "quartiles", "simulated", "lockstep", "÷", "bubble", "in theory")
        ):
            table.add_column(column, justify="right" if at else "left")
        for row, following in itertools.zip_longest(self.rows, self.rows[1:]):
            another = following is not None and _case(following) != _case(row)
            table.add_row(
                row.schedule, str(row.stages), str(row.microbatches), str(row.ticks), f"{row.time_s * 1e3:.0f}",
                f"{row.low_s * 1e3:.0f} – {row.high_s * 1e3:.0f}", f"{row.free_s * 1e3:.0f}",
                f"{row.lockstep_s * 1e3:.0f}", f"{row.ratio:.3f}", f"{row.bubble_fraction:.1%}",
                f"{row.bubble_in_theory:.1%}", end_section=another,
            )  # fmt: skip
        before, after = self.load
        load = f"load of the machine {before:.1f} before, {after:.1f} after, {os.cpu_count()} cores"
        return Group(table, Figures(title="executor", measures=self.measures), f"sleeps: {self.sleeps}", load)


def _case(row: Row) -> tuple[int, int]:
    return row.stages, row.microbatches


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def schedules(
    *,
    names: Sequence[str] = NAMES,
    cases: Sequence[tuple[int, int]] = CASES,
    op_s: float = 0.02,
    repeats: int = 3,
    alone: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Schedules:
    """Measure every schedule with stages that sleep, against its own simulation.

    Args:
      names: of schedules.
      cases: stages and microbatches. The first one's are those of the measures beside a step alone.
      op_s: what F, B and W of one stage take; a part of a more finely cut model takes its share.
      repeats: rounds, in each of which all programs run once.
      alone: measure nothing but a step alone of each schedule.
      tell: is given a line of progress.

    Raises:
      ValueError: fewer devices than stages; an unknown schedule; times that are not from 0 on.
    """
    _check(names, cases, op_s, repeats)
    before, sleeper = load(), Sleeper(op_s)
    rows = [row for case in cases for row in _alone(sleeper, names, *case, repeats, tell)]
    measures = [_worst(rows), *_orders(names, rows)] if op_s else []
    if not alone:
        measures += _more(sleeper, names, cases, repeats, tell)
    return Schedules(
        op_s=op_s, repeats=repeats, load=(before, load()), rows=tuple(rows), measures=tuple(measures),
        sleeps=_sleeps(sleeper),
    )  # fmt: skip


def _more(
    sleeper: Sleeper, names: Sequence[str], cases: Sequence[tuple[int, int]], repeats: int, tell: Callable[[str], None]
) -> Iterator[Measure]:
    """What is measured beside steps alone."""
    stages, microbatches = cases[0]
    tell("consecutive steps")
    yield from _consecutive(sleeper, stages, microbatches, repeats)
    tell("GPipe by autodiff")
    yield _against_scan(sleeper, stages, microbatches, repeats)
    yield from (_sleeping_op(sleeper, most) for most in sorted({stages for stages, _ in cases}))
    tell("empty stages")
    yield from (_overhead(name, stages, microbatches) for name in names)
    tell("compile time")
    yield from _compile_times(stages, microbatches, max(1, min(repeats, 3)))


def _check(names: Sequence[str], cases: Sequence[tuple[int, int]], op_s: float, repeats: int) -> None:
    most, there = max(stages for stages, _ in cases), len(jax.devices())
    if most > there:
        raise problem(
            "bench schedule", f"measure {most} stages", f"there are {there} devices", f"run it with --devices {most}"
        )
    for name in names:
        if name not in SCHEDULES:
            raise problem("bench schedule", f"measure `{name}`", "there is no such schedule", near(name, SCHEDULES))
    if not 0 <= op_s < 60 or repeats < 1:
        raise problem(
            "bench schedule", f"sleep {op_s:g} s, {repeats} times", "it sleeps from 0 to 60 s, at least once",
            "write --sleep-ms 20 --repeats 3",
        )  # fmt: skip


def _sleeps(sleeper: Sleeper) -> str:
    if sleeper.why_python is None:
        return "native, a custom call of XLA's"
    return f"Python's, each with milliseconds of a call beside it, for {sleeper.why_python}"


def _alone(
    sleeper: Sleeper, names: Sequence[str], stages: int, microbatches: int, repeats: int, tell: Callable[[str], None]
) -> list[Row]:
    made = {name: make(name, stages, microbatches) for name in names}
    programs = {}
    for name, schedule in made.items():
        tell(f"{name}, {stages} stages, {microbatches} microbatches")
        programs[name] = pipeline_program(schedule, sleeper.stage(_share(schedule)))
    times = in_turn(programs, repeats)
    rows = []
    for name, schedule in made.items():
        low, median, high = quartiles(times[name])
        simulated = schedule.simulate(f=sleeper.op_s, b=sleeper.op_s, w=sleeper.op_s)
        rows.append(
            Row(
                schedule=name, stages=stages, microbatches=microbatches, ticks=schedule.ticks, time_s=median,
                low_s=low, high_s=high, free_s=simulated.free.makespan, lockstep_s=simulated.lockstep.makespan,
                busy_s=3 * microbatches * sleeper.op_s, naps=_naps(sleeper, programs[name]),
            )
        )  # fmt: skip
    return rows


def _share(schedule: Schedule) -> float:
    """What one part is of a `stages`-th of the model."""
    return schedule.stages / schedule.num_parts


def _naps(sleeper: Sleeper, program: Program) -> dict[str, int]:
    """How often a step sleeps in each op; counted without the sleep, which is measured elsewhere."""
    op_s, sleeper.op_s = sleeper.op_s, 0.0
    sleeper.forget()
    program()
    sleeper.op_s = op_s
    return {op: sum(nap.op == op for nap in sleeper.naps) for op in OPS}


def _worst(rows: Sequence[Row]) -> Measure:
    worst = max(rows, key=lambda row: row.ratio)
    close = sum(row.ratio <= 1.1 for row in rows)
    return Measure(
        name="measured ÷ simulated, the worst", value=worst.ratio, unit="×", limit=1.1,
        detail=f"{worst.schedule}, p={worst.stages} m={worst.microbatches}; {close} of {len(rows)} are within 1.1",
    )  # fmt: skip


def _orders(names: Sequence[str], rows: Sequence[Row]) -> Iterator[Measure]:
    """How a schedule fares against the one that theory has behind it: below one where they are in that order."""
    at = {(row.schedule, *_case(row)): row for row in rows}
    for case in dict.fromkeys(map(_case, rows)):
        there = [name for name in ORDER if name in names]
        for quicker, slower in itertools.pairwise(there):
            yield _order(at[quicker, *case], at[slower, *case], limit=1.0)
        if {"gpipe", "1f1b"} <= set(names):
            yield _order(at["gpipe", *case], at["1f1b", *case], limit=1.1)


def _order(one: Row, other: Row, limit: float) -> Measure:
    return Measure(
        name=f"{one.schedule} ÷ {other.schedule}, p={one.stages} m={one.microbatches}",
        value=one.time_s / other.time_s, unit="×", limit=limit,
        detail=f"a step alone; in theory {one.free_s / other.free_s:.3f}",
    )  # fmt: skip


def _consecutive(sleeper: Sleeper, stages: int, microbatches: int, repeats: int) -> Iterator[Measure]:
    """Steps with no meeting point, over what a stage has to do in one."""
    made = {name: make(name, stages, microbatches) for name in ("zb-h2", "1f1b")}
    stage = sleeper.stage(1.0)
    # An accelerator's stages wait for their neighbours alone. Host devices do where messages go by pairs, for which the
    # number of stages has to be even; in a permute they all wait for each other.
    ways: tuple[Literal["pairs", "permute"], ...] = ("permute",) if stages % 2 else ("pairs", "permute")
    programs = {
        (name, way): pipeline_program(schedule, stage, STEPS, way) for name, schedule in made.items() for way in ways
    }
    times = in_turn(programs, repeats)
    # Where nothing sleeps, against what the quicker one takes.
    busy_s = STEPS * 3 * microbatches * sleeper.op_s or statistics.median(times["zb-h2", ways[0]])
    for name, way in programs:
        low, median, high = (x / busy_s for x in quartiles(times[name, way]))
        theory = made[name].repeated(STEPS).simulate().free.makespan / (STEPS * 3 * microbatches)
        yield Measure(
            name=f"{name}, {STEPS} steps without a meeting point, by {way}", value=median, unit="×", low=low, high=high,
            limit=1.1 if (name, way) == ("zb-h2", "pairs") and sleeper.op_s else None,
            detail=f"time ÷ {STEPS} · 3m ops; simulated {theory:.3f}; p={stages} m={microbatches}",
        )  # fmt: skip


def _against_scan(sleeper: Sleeper, stages: int, microbatches: int, repeats: int) -> Measure:
    stage = sleeper.stage(1.0)
    ours = pipeline_program(make("gpipe", stages, microbatches), stage)
    ratios = paired_ratios(ours, scan_program(stages, microbatches, stage), repeats)
    low, median, high = quartiles(ratios)
    return Measure(
        name="our gpipe ÷ GPipe by autodiff of a scan", value=median, unit="×", low=low, high=high,
        detail=f"in turn; p={stages} m={microbatches}",
    )  # fmt: skip


def _sleeping_op(sleeper: Sleeper, stages: int) -> Measure:
    return Measure(
        name=f"a sleeping op with no pipeline around it, {stages} devices",
        value=1e3 * _bare_s(sleeper, stages), unit="ms",
        detail=f"it sleeps {sleeper.op_s * 1e3:g} ms; the rest is waking up, and the call",
    )  # fmt: skip


def _bare_s(sleeper: Sleeper, devices: int, ops: int = 20) -> float:
    """Time of an op on so many devices at once, with no pipeline around it."""
    mesh = _mesh(devices)

    def local(x: jax.Array) -> jax.Array:
        rank = lax.axis_index("stage").astype(x.dtype)
        return lax.fori_loop(0, ops, lambda _, x: x + sleeper.nap("F", 1.0, rank, x), x)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=False))
    x = jax.device_put(np.zeros(devices, np.float32), NamedSharding(mesh, P("stage")))
    jax.block_until_ready(run(x))
    return statistics.median(seconds_of(lambda: jax.block_until_ready(run(x))) for _ in range(3)) / ops


def _overhead(name: str, stages: int, microbatches: int, runs: int = 30) -> Measure:
    """Time of a tick whose stages do next to nothing."""
    schedule = make(name, stages, microbatches)
    program = pipeline_program(schedule, lambda w, x, micro: w * x)
    times = in_turn({name: program}, runs)[name]
    low, median, high = (1e6 * x / schedule.ticks for x in quartiles(times))
    return Measure(
        name=f"a tick with empty stages, {name}", value=median, unit="µs", limit=300, low=low, high=high,
        detail=f"{runs} steps of {schedule.ticks} ticks, p={stages} m={microbatches}",
    )  # fmt: skip


def _compile_times(stages: int, few: int, pairs: int) -> Iterator[Measure]:
    many = 4 * few
    for name in ("1f1b", "zb-h1"):
        found: dict[int, list[float]] = {few: [], many: []}

        def compile_with(microbatches: int, name: str = name, found: dict[int, list[float]] = found) -> None:
            # A new function each time: a compiled program of an earlier pair must not be found again.
            def stage(w: jax.Array, x: jax.Array, micro: Micro) -> jax.Array:
                return w * x

            schedule = make(name, stages, microbatches)
            found[microbatches].append(seconds_of(lambda: pipeline_program(schedule, stage)))

        ratios = paired_ratios(lambda: compile_with(many), lambda: compile_with(few), pairs)
        seconds = [statistics.median(found[m]) for m in (few, many)]
        yield Measure(
            name=f"compile time of {name}, m={many} over m={few}", value=statistics.median(ratios), unit="×",
            limit=1.3, low=min(ratios), high=max(ratios),
            detail=f"trace, lower and compile, {pairs} pairs in turn: {seconds[0]:.2f} s, {seconds[1]:.2f} s",
        )  # fmt: skip
