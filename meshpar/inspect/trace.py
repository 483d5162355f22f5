"""Profiles of training steps: measured times of each operation, next to the predictions of `explain`.

`jax.profiler.ProfileData` reads XProf's files (`*.xplane.pb`) as planes of lines of events. Operations of a program
are events with `hlo_op`. On GPUs they are in the plane of their device; for CPU host devices they are in a host thread
and have a `device_ordinal`.

    busy    an operation of the program runs on the device
    idle    no operation runs
    exposed a collective runs and nothing else

Times are per step, averaged over devices. The time of a collective includes waiting for the other participants.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData

from meshpar.hardware.clusters import HOST_DEVICES, Links
from meshpar.hardware.cost_model import KINDS, collective_time_s
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import Collective
from meshpar.inspect.report import Report
from meshpar.loop.profiler import ABOUT
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_file, read_json
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import si

STEP = "jit__step"
"""Name that jax gives to the compiled program of a `TrainStep`."""
_DEVICE = re.compile(r"/device:(?!CUSTOM)[A-Za-z]+:([0-9]+)")
_AROUND = re.compile(r"(while|conditional|call|async-start|async-done)(\.[0-9]+)?(\.clone.*)?\Z")
_KIND = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})(-start|-done)?(\.|\Z)")
_DERIVED = ("XLA Ops", "XLA Modules", "Steps", "Framework Name Scope", "Framework Ops", "Source code", "XLA TraceMe")


class Event(NamedTuple):
    """An operation on a device. Times are in nanoseconds of the trace's clock."""

    device: int
    module: str
    run: int | None
    name: str
    """Name of the instruction, or of the kernel if it has none."""
    begin_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent(Plain):
    """A part of the step time: idle time, an exposed collective, or an operation."""

    name: str
    time_s: float
    """Seconds per step, averaged over devices. For a collective, only its exposed time."""
    share: float
    """Fraction of the step."""
    where: str = ""
    """Path of the module in the model; empty without a report for the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCollective(Plain):
    """A measured collective and its prediction, per step and device."""

    name: str
    kind: str
    count: float
    measured_s: float
    exposed_s: float
    axes: tuple[str, ...] | None = None
    """Mesh axes; None without a report for the step."""
    payload_bytes: int | None = None
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None
    derived = ("ratio",)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Printed, Plain):
    """A profile of training steps. Prints as tables; times in seconds."""

    source: str
    program: str
    """Name of the profiled program: the training step, or without one, the program with the longest total time."""
    devices: int
    steps: int
    step_s: float
    """Time from the first to the last operation, divided by the number of steps."""
    busy_s: float
    idle_s: float
    predicted_step_s: float | None
    phases: Mapping[str, float]
    """Device time of `forward`, `backward`, `optimizer` and `other`; empty without a report for the step."""
    host: Mapping[str, float]
    """Host time per step of the training loop's phases outside the step, such as `data` and `save`."""
    collectives: tuple[MeasuredCollective, ...]
    """Longest first."""
    costs: tuple[Spent, ...]
    """Largest first: idle time, exposed collectives, operations."""
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Any:
        from rich.console import Group

        title = f"{self.source}: {self.steps} steps of {self.program} on {self.devices} devices"
        shown = [title, _facts(self)]
        if self.collectives:
            columns = ("collective", "axes", "bytes", "runs", "measured", "predicted", "÷", "exposed", "pred. exposed")
            by_column = zip(columns, *map(_cells, self.collectives), strict=True)
            heads, *rows = zip(*(cells for cells in by_column if any(cells[1:])), strict=True)
            shown.append(table("collectives, per step and device", heads, rows, left=("collective", "axes")))
        costs = [(cost.name, si(cost.time_s, "s"), f"{cost.share:.0%}", cost.where) for cost in self.costs]
        shown.append(table("the largest costs", ("", "time", "of the step", "where"), costs, left=("", "where")))
        return Group(*shown, *(f"· {note}" for note in self.notes))


def find(path: str | Path) -> Path:
    """Return the path of the newest trace in a run folder, or the path of a file unchanged."""
    file, fix = Path(path), "pass a .xplane.pb, or the folder of a run trained with --profile 10:15"
    if file.is_dir():
        files = sorted(file.glob("**/*.xplane.pb"), key=lambda file: (file.parent.name, file.name))
        if not files:
            raise problem(f"trace `{path}`", "read it", "the folder contains no .xplane.pb", fix, code="missing-file")
        file = next(f for f in files if f.parent == files[-1].parent)  # the first of several hosts
    return check_file(file, f"trace `{path}`", fix)


def read(path: str | Path, *, report: Report | None = None, links: Links | None = None, top: int = 3) -> Trace:
    """Read a profile.

    Args:
      path: a trace file, or the folder of a run, of which the newest trace is read.
      report: report for the same step, with predictions, phases and module names.
      links: measured links between these devices, for collectives without a time in the report. The default
        for a report on CPU host devices is `hardware.clusters.HOST_DEVICES`.
      top: number of largest costs to return.
    """
    file = find(path)
    try:  # keep the data while its planes are in use, because they are views of its memory
        data = ProfileData.from_file(str(file))
    except Exception as error:  # the reader does not document its exceptions
        reason, fix = f"the reader failed ({str(error)[:200]})", "pass a complete .xplane.pb; trace the steps again"
        raise problem(f"trace `{file}`", "read it", reason, fix, code="damaged-file") from None
    with warnings.catch_warnings():  # the reader's types warn on Python 3.12, which aborts if warnings are errors
        warnings.simplefilter("ignore", DeprecationWarning)
        operations = (event for plane in data.planes for event in _of_plane(plane))
        events = [event for event in operations if not _AROUND.match(event.name) and event.end_ns >= event.begin_ns]
        host, steps = _host(data.planes)
    if not events:
        reason, fix = "it contains no operation of a program", "trace steps: meshpar train RECIPE --profile 10:15"
        raise problem(f"trace `{file}`", "read it", reason, fix, code="not-found")
    taken: dict[str, float] = defaultdict(float)
    for event in events:
        taken[event.module] += event.end_ns - event.begin_ns
    program = STEP if STEP in taken else max(taken, key=lambda module: taken[module])  # validation may take longer
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.module == program:
            by_device[event.device].append(event)
    runs = {event.run for device_events in by_device.values() for event in device_events} - {None}
    num_steps = len(steps) or len(runs) or 1
    span_ns = np.mean([max(e.end_ns for e in es) - min(e.begin_ns for e in es) for es in by_device.values()])
    step_s = float(span_ns) / 1e9 / num_steps
    scale = 1e9 * num_steps * len(by_device)
    busy = [_union((e.begin_ns, e.end_ns) for e in es) for es in by_device.values()]
    busy_s = sum(end - begin for intervals in busy for begin, end in intervals) / scale
    times = _times(by_device.values(), scale)
    predicted = {} if report is None else {sent.collective.name: sent for sent in report.collectives}
    links = HOST_DEVICES if links is None and report is not None and report.target == "cpu" else links
    runs_on_all = num_steps * len(by_device)
    collectives = (
        _timed(name, time.kind, time, predicted.get(name), links, runs_on_all)
        for name, time in times.items()
        if time.kind is not None
    )
    timed = tuple(sorted(collectives, key=lambda collective: -collective.measured_s))
    module = None if report is None or report.program is None else report.program.module
    computations = () if module is None else module.computations.values()
    op_names = {ins.name: ins.metadata.op_name for computation in computations for ins in computation}
    idle_s = max(step_s - busy_s, 0.0)
    phases: dict[str, float] = {}
    if op_names:
        phases = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
        for name, time in times.items():
            phases[scopes.phase(op_names.get(name, ""))] += time.time_s
    return Trace(
        source=str(file),
        program=program,
        devices=len(by_device),
        steps=num_steps,
        step_s=step_s,
        busy_s=busy_s,
        idle_s=idle_s,
        predicted_step_s=None if report is None else report.compute.predicted_step_s,
        phases=phases,
        host={name: seconds / num_steps for name, seconds in host.items()},
        collectives=timed,
        costs=tuple(_costs(times, timed, idle_s, step_s, op_names)[:top]),
        notes=tuple(_notes(file, timed, report, links)),
    )


def _of_plane(plane: Any) -> Iterator[Event]:
    device = _DEVICE.match(plane.name)
    if device is None and not plane.name.startswith("/host:"):
        return
    lines = list(plane.lines)
    streams = [line for line in lines if line.name not in _DERIVED] if device else lines
    # A TPU has no streams: its operations are in the line of this name.
    for line in streams or [line for line in lines if line.name == "XLA Ops"]:
        for event in line.events:
            if device is None and event.name.startswith("Threadpool"):  # most events of a host, all irrelevant
                continue
            stats = dict(event.stats)
            op = stats.get("hlo_op")
            if op is None and device is None:
                continue
            number = int(device.group(1)) if device else int(stats.get("device_ordinal", 0))
            module, name = str(stats.get("hlo_module", "")), str(event.name if op is None else op)
            yield Event(number, module, stats.get("run_id"), name, event.start_ns, event.start_ns + event.duration_ns)


def _host(planes: Iterable[Any]) -> tuple[dict[str, float], set[int]]:
    """Return the total seconds of each phase of the training loop on the host, and the step numbers in the trace."""
    phases: dict[str, float] = defaultdict(float)
    steps: set[int] = set()
    lines = (line for plane in planes if plane.name.startswith("/host:") for line in plane.lines)
    for event in (event for line in lines for event in line.events if event.name.startswith("meshpar:")):
        name = event.name.removeprefix("meshpar:")
        if name == "step":
            steps.add(int(dict(event.stats).get("step_num", len(steps))))
        else:
            phases[name] += event.duration_ns / 1e9
    return dict(phases), steps


@dataclasses.dataclass
class _Time:
    kind: str | None
    count: int = 0
    time_s: float = 0.0
    exposed_s: float = 0.0


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _times(devices: Iterable[Sequence[Event]], scale: float) -> dict[str, _Time]:
    times: dict[str, _Time] = {}
    for events in devices:
        compute = _union((o.begin_ns, o.end_ns) for o in events if _KIND.match(o.name) is None)
        by = np.array(compute, float).reshape(-1, 2)
        for event in events:
            match = _KIND.match(event.name)
            name = event.name if match is None else event.name.replace("-done", "-start")
            time = times.setdefault(name, _Time(None if match is None else match.group(1)))
            spent = event.end_ns - event.begin_ns
            time.count += match is None or match.group(2) != "-done"
            time.time_s += spent / scale
            if match is not None:
                first, last = np.searchsorted(by[:, 1], event.begin_ns), np.searchsorted(by[:, 0], event.end_ns)
                covered = np.clip(by[first:last], event.begin_ns, event.end_ns)
                time.exposed_s += (spent - float((covered[:, 1] - covered[:, 0]).sum())) / scale
    return times


def _timed(name: str, kind: str, time: _Time, sent: Any, links: Links | None, runs: int) -> MeasuredCollective:
    collective: Collective | None = None if sent is None else sent.collective
    predicted_s = None if sent is None else sent.time_s
    hidden = None if sent is None else sent.hidden_fraction
    if collective is not None and predicted_s is None and links is not None:
        link = links.measured(collective.axes, permute=collective.kind == "collective-permute")
        if link is not None:
            run_s = collective_time_s(collective.kind, collective.payload_bytes, collective.group_size, link)
            predicted_s = collective.count_per_step * run_s
    return MeasuredCollective(
        name=name,
        kind=kind,
        count=time.count / runs,
        measured_s=time.time_s,
        exposed_s=time.exposed_s,
        axes=None if collective is None else collective.axes,
        payload_bytes=None if collective is None else collective.payload_bytes,
        predicted_s=predicted_s,
        predicted_exposed_s=None if predicted_s is None or hidden is None else predicted_s * (1 - hidden),
    )


def _costs(
    times: Mapping[str, _Time],
    timed: Sequence[MeasuredCollective],
    idle_s: float,
    step_s: float,
    op_names: Mapping[str, str],
) -> list[Spent]:
    costs = [("idle", idle_s, "")]
    costs += [(f"{c.name} (exposed)", c.exposed_s, _place(c.name, op_names)) for c in timed]
    costs += [(name, time.time_s, _place(name, op_names)) for name, time in times.items() if time.kind is None]
    spent = (
        Spent(name=w, time_s=s, share=s / step_s if step_s else 0.0, where=module) for w, s, module in costs if s > 0
    )
    return sorted(spent, key=lambda cost: -cost.time_s)


def _place(name: str, op_names: Mapping[str, str]) -> str:
    op_name = op_names.get(name, "")
    return ", ".join(filter(None, (scopes.module_path(op_name), scopes.phase(op_name)))) if op_name else ""


def _notes(
    file: Path, timed: Sequence[MeasuredCollective], report: Report | None, links: Links | None
) -> Iterator[str]:
    if report is None:
        yield "pass the recipe for axes, bytes, phases and predictions: meshpar trace FILE RECIPE"
        return
    about = next((folder / ABOUT for folder in file.parents if (folder / ABOUT).is_file()), None)
    run_info = None if about is None else read_json(about, str(about), "remove it")
    program = str(run_info.get("program", "")) if isinstance(run_info, dict) else ""
    unknown = any(collective.axes is None for collective in timed)
    if (program and report.fingerprint not in program) or unknown:
        yield "the recipe does not compile to the traced program: use the --set, --mesh and jax version of the run"
    if report.timeline is None and links is not None:
        yield f"predicted from links only, without overlap: {links.source or links.name}"
    elif report.timeline is None:
        yield f"compiled for `{report.target}`, whose links are unknown: pass a profile with --cluster my.json"


def _facts(trace: Trace) -> Any:
    rows = [("measured", si(trace.step_s, "s")), ("predicted", _time(trace.predicted_step_s))]
    for name, seconds in (("busy", trace.busy_s), ("idle", trace.idle_s)):
        share = f"  {seconds / trace.step_s:.0%}" if trace.step_s else ""  # 0 if the clock is too coarse
        rows.append((name, si(seconds, "s") + share))
    rows += [(name, si(seconds, "s")) for name, seconds in trace.phases.items() if seconds]
    rows += [(f"loop: {name}", si(seconds, "s")) for name, seconds in trace.host.items()]
    return table("a step", ("", "mean"), [row for row in rows if row[1]], left=("",))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else si(seconds, "s")


def _cells(collective: MeasuredCollective) -> tuple[str, ...]:
    return (
        collective.name,
        "" if collective.axes is None else "*".join(collective.axes),
        "" if collective.payload_bytes is None else si(collective.payload_bytes, "B"),
        f"{collective.count:g}",
        si(collective.measured_s, "s"),
        _time(collective.predicted_s),
        "" if collective.ratio is None else f"{collective.ratio:.2g}",
        si(collective.exposed_s, "s"),
        _time(collective.predicted_exposed_s),
    )
