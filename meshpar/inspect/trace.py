"""A recorded profile read back: what each operation of a step took, beside what `explain` predicts of it.

XProf's files (`*.xplane.pb`) are read by `jax.profiler.ProfileData`: planes hold lines, lines hold events. An operation
of a program is an event with `hlo_op`; on GPUs it stands in a plane of its device, on CPU host devices in threads of
the host, with `device_ordinal`.

    busy    some operation of the program is under way on the device
    idle    none is
    exposed a collective is under way and nothing else

Times are means over devices, a step. A collective's holds the wait for the others that take part.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.profiler import ProfileData

from meshpar.hardware.clusters import HOST_DEVICES, Links
from meshpar.hardware.cost_model import KINDS, collective_time_s
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import Collective
from meshpar.inspect.report import Report
from meshpar.loop.profiler import ABOUT
from meshpar.sharding.host_resources import check_file, read_json
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import problem
from meshpar.sharding.units import si

MOST_BYTES = 2 << 30
"""Of a file: it is read whole."""
STEP = "jit__step"
"""What jax calls the program of a `TrainStep`."""
_DEVICE = re.compile(r"/device:(?!CUSTOM)[A-Za-z]+:([0-9]+)")
_AROUND = re.compile(r"(while|conditional|call|async-start|async-done)(\.[0-9]+)?(\.clone.*)?\Z")
_KIND = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})(-start|-done)?(\.|\Z)")
_DERIVED = ("XLA Ops", "XLA Modules", "Steps", "Framework Name Scope", "Framework Ops", "Source code", "XLA TraceMe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One run of one operation on one device, in nanoseconds of the trace's clock."""

    device: int
    module: str
    run: int | None
    name: str
    """The instruction's; a kernel that names none goes by its own."""
    begin_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent(Plain):
    """What takes time of a step."""

    what: str
    time_s: float
    """A step, mean over devices; of a collective what is exposed."""
    share: float
    """Of the step."""
    where: str = ""
    """Module of the model, or line, where the program is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCollective(Plain):
    """One collective, measured and predicted, a step and a device."""

    name: str
    kind: str
    count: float
    measured_s: float
    exposed_s: float
    axes: tuple[str, ...] | None = None
    """Mesh axes; None where the program is not known."""
    payload_bytes: int | None = None
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None
    derived = ("ratio",)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Printed, Plain):
    """A profile of training steps. Prints as tables; times in seconds."""

    source: str
    program: str
    """Name of the program: the step's, else that which takes most of the time."""
    devices: int
    steps: int
    step_s: float
    """From the first operation to the last, over the steps."""
    busy_s: float
    idle_s: float
    predicted_step_s: float | None
    phases: Mapping[str, float]
    """Of devices, where the program is known: `forward`, `backward`, `optimizer`, `other`."""
    host: Mapping[str, float]
    """What the loop did beside steps, a step: `data`, `save` and so on."""
    collectives: tuple[MeasuredCollective, ...]
    """Longest first."""
    costs: tuple[Spent, ...]
    """What takes most, largest first: idle time, exposed collectives, operations."""
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Any:
        from rich.console import Group

        title = f"{self.source}: {self.steps} steps of {self.program} on {self.devices} devices"
        shown = [title, _facts(self)]
        if self.collectives:
            shown.append(_table(self.collectives))
        rows_of = [(one.what, si(one.time_s, "s"), f"{one.share:.0%}", one.where) for one in self.costs]
        shown.append(table("the largest costs", ("", "time", "of the step", "where"), rows_of, left=("", "where")))
        return Group(*shown, *(f"· {note}" for note in self.notes))


def find(path: str | Path) -> Path:
    """The newest trace in a folder (a run's, its `profile/`), or the file itself.

    Raises:
      ValueError: there is none, or it is no file that can be read.
    """
    here, fix = Path(path), "name a .xplane.pb, or the folder of a run trained with --profile 10:15"
    if here.is_dir():
        found = sorted(here.glob("**/*.xplane.pb"), key=lambda file: (file.parent.name, file.name))
        if not found:
            raise problem(f"trace `{path}`", "read it", "the folder holds no .xplane.pb", fix)
        newest = found[-1].parent
        here = next(file for file in found if file.parent == newest)  # of several hosts the first
    return check_file(here, f"trace `{path}`", fix, most_bytes=MOST_BYTES)


def read(path: str | Path, *, report: Report | None = None, links: Links | None = None, top: int = 3) -> Trace:
    """Reads a profile.

    Args:
      path: as for `find`.
      report: of the same step: what is predicted, phases and places.
      links: measured between these devices, for the times of collectives where the report has none; None: on CPU host
        devices `planner.hardware.HOST_DEVICES`.
      top: how many of the largest costs.

    Raises:
      ValueError: no such file, or one that holds no operations of a program.
    """
    file = find(path)
    data = _opened(file)
    with warnings.catch_warnings():  # the reader's types make Python 3.12 warn; as an error that would end the process
        warnings.simplefilter("ignore", DeprecationWarning)
        events, host, steps = _events(data.planes), *_host(data.planes)
    if not events:
        exists, fix = "it holds no operation of a program", "trace steps: meshpar train RECIPE --profile 10:15"
        raise problem(f"trace `{file}`", "read it", exists, fix)
    program = _program(events)
    mine = [one for one in events if one.module == program]
    runs = {one.run for one in mine} - {None}
    num_steps = len(steps) or len(runs) or 1
    by_device = {device: [one for one in mine if one.device == device] for device in {one.device for one in mine}}
    whole_s = np.mean([max(o.end_ns for o in some) - min(o.begin_ns for o in some) for some in by_device.values()])
    step_s = float(whole_s) / 1e9 / num_steps
    scale = 1e9 * num_steps * len(by_device)
    busy = [_union((o.begin_ns, o.end_ns) for o in some) for some in by_device.values()]
    busy_s = sum(end - begin for some in busy for begin, end in some) / scale
    times = _times(by_device.values(), scale)
    known = {} if report is None else {sent.collective.name: sent for sent in report.collectives}
    links = HOST_DEVICES if links is None and report is not None and report.target == "cpu" else links
    collectives = [_timed(name, one, known.get(name), links, num_steps * len(by_device)) for name, one in times.items()]
    timed = tuple(sorted((one for one in collectives if one is not None), key=lambda one: -one.measured_s))
    module = None if report is None or report.program is None else report.program.module
    computations = () if module is None else module.computations.values()
    places = {one.name: one.metadata.op_name for computation in computations for one in computation}
    idle_s = max(step_s - busy_s, 0.0)
    return Trace(
        source=str(file),
        program=program,
        devices=len(by_device),
        steps=num_steps,
        step_s=step_s,
        busy_s=busy_s,
        idle_s=idle_s,
        predicted_step_s=None if report is None else report.compute.predicted_step_s,
        phases=_phases(times, places) if places else {},
        host={name: seconds / num_steps for name, seconds in host.items()},
        collectives=timed,
        costs=tuple(_costs(times, timed, idle_s, step_s, places)[:top]),
        notes=tuple(_notes(file, timed, report, links)),
    )


# ---- The file --------------------------------------------------------------------------------------------------------


def _opened(file: Path) -> ProfileData:
    """To be kept while its planes are read: they are views of its memory."""
    try:
        return ProfileData.from_file(str(file))
    except Exception as error:  # the reader's own, of which none is documented
        why = f"that failed ({str(error)[:200]})"
        raise problem(f"trace `{file}`", "read it", why, "name a whole .xplane.pb; trace the steps again") from None


def _events(planes: Iterable[Any]) -> list[Event]:
    """Operations, without those that only run others."""
    found = [event for plane in planes for event in _of_plane(plane)]
    return [event for event in found if not _AROUND.match(event.name) and event.end_ns >= event.begin_ns]


def _of_plane(plane: Any) -> Iterator[Event]:
    device = _DEVICE.match(plane.name)
    if device is None and not plane.name.startswith("/host:"):
        return
    lines = list(plane.lines)
    streams = [line for line in lines if line.name not in _DERIVED] if device else lines
    # A TPU has no streams: its operations stand in the line of this name.
    for line in streams or [line for line in lines if line.name == "XLA Ops"]:
        for event in line.events:
            if device is None and event.name.startswith("Threadpool"):  # most events of a host: not worth reading
                continue
            stats = dict(event.stats)
            op = stats.get("hlo_op")
            if op is None and device is None:
                continue
            number = int(device.group(1)) if device else int(stats.get("device_ordinal", 0))
            yield Event(
                device=number,
                module=str(stats.get("hlo_module", "")),
                run=stats.get("run_id"),
                name=str(op if op is not None else event.name),
                begin_ns=event.start_ns,
                end_ns=event.start_ns + event.duration_ns,
            )


def _host(planes: Iterable[Any]) -> tuple[dict[str, float], set[int]]:
    """Seconds of each phase of the loop, and the numbers of the steps that were dispatched."""
    phases: dict[str, float] = defaultdict(float)
    steps: set[int] = set()
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/host:") else ():
            for event in line.events:
                name = event.name.removeprefix("meshpar:")
                if name == event.name:
                    continue
                if name == "step":
                    steps.add(int(dict(event.stats).get("step_num", len(steps))))
                else:
                    phases[name] += event.duration_ns / 1e9
    return dict(phases), steps


# ---- Times -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Time:
    """Of one operation over all devices and steps, as shares of one device's step."""

    kind: str | None
    count: int = 0
    time_s: float = 0.0
    exposed_s: float = 0.0


def _program(events: Sequence[Event]) -> str:
    """The training step's, where there is one (a validation may take longer), else what takes most of the time."""
    taken: dict[str, float] = defaultdict(float)
    for one in events:
        taken[one.module] += one.end_ns - one.begin_ns
    return STEP if STEP in taken else max(taken, key=lambda module: taken[module])


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, none touching another."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _covered(begin: float, end: float, by: np.ndarray) -> float:
    """How much of an interval sorted intervals `by` [n, 2] cover."""
    first, last = np.searchsorted(by[:, 1], begin), np.searchsorted(by[:, 0], end)
    some = np.clip(by[first:last], begin, end)
    return float((some[:, 1] - some[:, 0]).sum())


def _times(devices: Iterable[Sequence[Event]], scale: float) -> dict[str, _Time]:
    found: dict[str, _Time] = {}
    for events in devices:
        compute = _union((o.begin_ns, o.end_ns) for o in events if _KIND.match(o.name) is None)
        by = np.array(compute, float).reshape(-1, 2)
        for one in events:
            match = _KIND.match(one.name)
            name = one.name if match is None else one.name.replace("-done", "-start")
            time = found.setdefault(name, _Time(None if match is None else match.group(1)))
            spent = one.end_ns - one.begin_ns
            time.count += match is None or match.group(2) != "-done"
            time.time_s += spent / scale
            if match is not None:
                time.exposed_s += (spent - _covered(one.begin_ns, one.end_ns, by)) / scale
    return found


def _timed(name: str, time: _Time, sent: Any, links: Links | None, runs: int) -> MeasuredCollective | None:
    if time.kind is None:
        return None
    own: Collective | None = None if sent is None else sent.collective
    predicted_s = None if sent is None else sent.time_s
    hidden = None if sent is None else sent.hidden_fraction
    if own is not None and predicted_s is None and links is not None:
        predicted_s = _by_links(own, links)
    return MeasuredCollective(
        name=name,
        kind=time.kind,
        count=time.count / runs,
        measured_s=time.time_s,
        exposed_s=time.exposed_s,
        axes=None if own is None else own.axes,
        payload_bytes=None if own is None else own.payload_bytes,
        predicted_s=predicted_s,
        predicted_exposed_s=None if predicted_s is None or hidden is None else predicted_s * (1 - hidden),
    )


def _by_links(own: Collective, links: Links) -> float | None:
    link = links.measured(own.axes, permute=own.kind == "collective-permute")
    if link is None:
        return None
    return own.count_per_step * collective_time_s(own.kind, own.payload_bytes, own.group_size, link)


def _phases(times: Mapping[str, _Time], places: Mapping[str, str]) -> dict[str, float]:
    found = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    for name, time in times.items():
        found[_phase(places.get(name, ""))] += time.time_s
    return found


def _phase(op_name: str) -> str:
    parts = scopes.components(op_name)
    if "update" in parts:
        return "optimizer"
    if not any("gradients" in part for part in parts):
        return "other"
    return "backward" if scopes.is_backward(op_name) else "forward"


def _costs(
    times: Mapping[str, _Time],
    timed: Sequence[MeasuredCollective],
    idle_s: float,
    step_s: float,
    places: Mapping[str, str],
) -> list[Spent]:
    found = [("idle", idle_s, "")]
    found += [(f"{one.name} (exposed)", one.exposed_s, _place(one.name, places)) for one in timed]
    found += [(name, one.time_s, _place(name, places)) for name, one in times.items() if one.kind is None]
    costs = [
        Spent(what=what, time_s=s, share=s / step_s if step_s else 0.0, where=at) for what, s, at in found if s > 0
    ]
    return sorted(costs, key=lambda one: -one.time_s)


def _place(name: str, places: Mapping[str, str]) -> str:
    op_name = places.get(name, "")
    return ", ".join(filter(None, (scopes.module_path(op_name), _phase(op_name)))) if op_name else ""


def _notes(
    file: Path, timed: Sequence[MeasuredCollective], report: Report | None, links: Links | None
) -> Iterator[str]:
    if report is None:
        yield "name the recipe for axes, bytes, phases and what is predicted: meshpar trace FILE RECIPE"
        return
    about = next((folder / ABOUT for folder in file.parents if (folder / ABOUT).is_file()), None)
    told = None if about is None else read_json(about, str(about), "remove it")
    program = str(told.get("program", "")) if isinstance(told, dict) else ""
    lost = [one.name for one in timed if one.axes is None]
    if (program and report.fingerprint not in program) or lost:
        yield "another program was traced than this recipe compiles to: give it the --set, --mesh and jax of the run"
    if report.timeline is None and links is not None:
        yield f"predicted by links alone, with nothing hidden: {links.source or links.name}"
    elif report.timeline is None:
        yield f"compiled for `{report.target}`, whose links are not known: name a profile by --cluster my.json"


def _facts(trace: Trace) -> Any:
    rows = [("measured", si(trace.step_s, "s")), ("predicted", _time(trace.predicted_step_s))]
    for name, seconds in (("busy", trace.busy_s), ("idle", trace.idle_s)):
        # A clock too coarse for a short program gives a step of no length.
        rows.append((name, si(seconds, "s") + (f"  {seconds / trace.step_s:.0%}" if trace.step_s else "")))
    rows += [(name, si(seconds, "s")) for name, seconds in trace.phases.items() if seconds]
    rows += [(f"loop: {name}", si(seconds, "s")) for name, seconds in trace.host.items()]
    return table("a step", ("", "mean"), [row for row in rows if row[1]], left=("",))


def _table(collectives: Sequence[MeasuredCollective]) -> Any:
    columns = ("collective", "axes", "bytes", "runs", "measured", "predicted", "÷", "exposed", "pred. exposed")
    rows = [_cells(one) for one in collectives]
    kept = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
    title, names = "collectives, a step and a device", [columns[at] for at in kept]
    return table(title, names, [[row[at] for at in kept] for row in rows], left=("collective", "axes"))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else si(seconds, "s")


def _cells(one: MeasuredCollective) -> tuple[str, ...]:
    return (
        one.name,
        "" if one.axes is None else "*".join(one.axes),
        "" if one.payload_bytes is None else si(one.payload_bytes, "B"),
        f"{one.count:g}",
        si(one.measured_s, "s"),
        _time(one.predicted_s),
        "" if one.ratio is None else f"{one.ratio:.2g}",
        si(one.exposed_s, "s"),
        _time(one.predicted_exposed_s),
    )
