"""Profiles of training steps: measured times of operations, next to the predictions.

    busy    an operation of the program runs on the device
    idle    the device runs no operation
    exposed a collective runs without compute

Times are per step, averaged over devices. The time of a collective includes waiting for the other participants.

The trace contains the compiled program, so the predictions need neither the recipe nor a compilation. An operation is
joined to an instruction of the program by its name. Kernels of CUDA graphs have no instruction: XLA's profiler reports
the launch of the graph for all of them, and its option `gpu_enable_cupti_activity_graph_trace` merges them into an
event. XLA ignores `gpu_dump_graph_node_mapping` (jaxlib 0.10 and 0.12). Therefore `meshpar train --profile` runs the
profiled steps without CUDA graphs. In other traces, kernels of CUDA graphs are joined by the kernel's name, which XLA
derives from the instruction for its own kernels, but not for kernels of libraries.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.hardware.clusters import HOST_DEVICES, Cluster, Links, parse_cluster
from meshpar.hardware.cost_model import KINDS, collective_time_s
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import Collective, census
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.kernels import ProgramKernel, dtype_text, program_kernels
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline.program_work import Matmul
from meshpar.inspect.timeline.simulator import Timed, Timeline, timeline
from meshpar.inspect.trace_file import Event, TraceData, find, load
from meshpar.schedules import Schedule
from meshpar.sharding.errors import check_cases
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.units import si

STEP = "jit__step"
"""Name that jax gives to the compiled program of a `TrainStep`."""
CAUSES = ("matmul", "attention", "memory-bound", "communication", "idle")
WITHOUT_GRAPHS = "kernels outside CUDA graphs, joined by instruction"
IN_GRAPHS = "kernels of CUDA graphs, joined by the kernel's name"
MOST_ROWS = 20
"""Maximum number of rows in the table of kernels; the JSON data has all kernels."""
_COLLECTIVES = ("collective", "axes", "bytes", "runs", "measured", "predicted", "÷", "exposed", "pred. exposed")
_KERNELS = ("kind", "implementation", "dtypes", "where", "runs", "measured", "predicted", "÷")
_KIND = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})(-start|-done)?(\.|\Z)")
_LIBRARIES = (
    ("attention", re.compile(r"fmha|flash|sdpa|attention")),
    ("matmul", re.compile(r"gemm|nvjet|cutlass|xmma|cublas")),
)
"""Kinds of library kernels in CUDA graphs, by patterns of their names."""
_REFERENCE = "h100:1x1"
"""Cluster whose rates are used to list the kernels of other devices. Their kinds do not depend on the rates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent(Plain):
    """A part of the step time: idle time, an exposed collective, or an operation."""

    name: str
    time_s: float
    """Seconds per step, averaged over devices. For a collective, only its exposed time."""
    share: float
    """Fraction of the step."""
    where: str = ""
    """Path of the module in the model; empty if the trace has no program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCollective(Plain):
    """A measured collective and its prediction, per step and device."""

    name: str
    kind: str
    count: float
    measured_s: float
    exposed_s: float
    axes: tuple[str, ...] | None = None
    """Mesh axes; None if the program or the mesh is unknown."""
    payload_bytes: int | None = None
    group_size: int | None = None
    """Number of devices of a group."""
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None
    derived = ("ratio",)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredKernel(Plain):
    """A measured kernel and its prediction, per step and device."""

    name: str
    """Name of the instruction; the name of the kernel if it was not joined to an instruction."""
    kind: str
    """Kind as in `meshpar.inspect.kernels`."""
    implementation: str
    """Empty if the kernel was not joined."""
    dtypes: str
    module: str
    phase: str
    count: float
    measured_s: float
    predicted_s: float | None
    """None without a prediction for this GPU."""
    program_count: float = 0.0
    """Executions of the instruction in the program. A library may run more than a kernel per instruction."""
    flops: float = 0.0
    """Matmul FLOPs."""
    moved_bytes: float = 0.0
    """Bytes that the kernel reads and writes, as in the prediction."""
    product: Matmul | None = dataclasses.field(default=None, repr=False)
    """The matmul of the instruction. Not part of the JSON."""
    derived = ("ratio",)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s if self.predicted_s else None

    @property
    def cause(self) -> str:
        """The entry of `CAUSES` for this kind of kernel."""
        return {"grouped matmul": "matmul"}.get(self.kind, self.kind if self.kind in CAUSES else "memory-bound")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Printed, Plain):
    """A profile of training steps. Prints as tables; times in seconds."""

    source: str
    program: str
    """Name of the profiled program: the training step, or in its absence the program with the longest total time."""
    devices: int
    steps: int
    step_s: float
    """Time from the first to the last operation, divided by the number of steps."""
    busy_s: float
    idle_s: float
    predicted_step_s: float | None
    phases: Mapping[str, float]
    """Device time of `forward`, `backward`, `optimizer` and `other`; empty if the trace has no program."""
    causes: Mapping[str, float]
    """Time by cause (`CAUSES`): the time of kernels, and the exposed time of collectives."""
    method: str
    """How kernels of a GPU were joined to instructions: `WITHOUT_GRAPHS` or `IN_GRAPHS`; empty on other devices."""
    host: Mapping[str, float]
    """Host time per step of the training loop's phases outside the step, such as `data` and `save`."""
    collectives: tuple[MeasuredCollective, ...]
    """Longest first."""
    kernels: tuple[MeasuredKernel, ...]
    """Longest first; without collectives."""
    costs: tuple[Spent, ...]
    """Largest first: idle time, exposed collectives, operations."""
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Any:
        from rich.console import Group

        title = f"{self.source}: {self.steps} steps of {self.program} on {self.devices} devices"
        shown = [title, *filter(None, [self.method]), _facts(self)]
        if self.collectives:
            shown.append(_table("collectives", _COLLECTIVES, list(map(_cells, self.collectives))))
        if self.kernels:
            shown.append(_table("kernels", _KERNELS, list(_kernel_rows(self.kernels))[:MOST_ROWS]))
        costs = [(cost.name, si(cost.time_s, "s"), f"{cost.share:.0%}", cost.where) for cost in self.costs]
        shown.append(table("the largest costs", ("", "time", "of the step", "where"), costs, left=("", "where")))
        return Group(*shown, *(f"· {note}" for note in self.notes))


def read(
    path: str | Path,
    *,
    mesh: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
    links: Links | None = None,
    schedule: Schedule | None = None,
    top: int = 3,
) -> Trace:
    """Read a profile and compare it with the predictions for the traced program.

    Args:
      path: a trace file, or the folder of a run with its newest trace.
      mesh: sizes of the mesh axes, for the axes of collectives.
      cluster: the GPUs of the trace, for predictions.
      links: measured links between other devices. The default for CPU host devices is
        `hardware.clusters.HOST_DEVICES`.
      schedule: the schedule of a pipelined step, for the number of executions of its branches.
      top: number of largest costs to return.

    Raises:
      MeshparError: the trace cannot be read, or there is a `cluster` and the trace has no operation of a GPU.
    """
    file = find(path)
    data = load(file)
    taken: dict[tuple[str, int | None], float] = defaultdict(float)
    for event in data.events:
        taken[event.module, event.program_id] += event.end_ns - event.begin_ns
    # The programs of validation may take longer.
    name, program_id = max(taken, key=lambda key: (key[0] == STEP, taken[key]))
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in data.events:
        if event.module == name and event.program_id in (program_id, None):
            by_device[event.device].append(event)
    reason, fix = "it has no operation of a GPU", "leave out the cluster, or pass links of these devices"
    requested, is_other = "predict it for GPUs", cluster is not None and not data.is_gpu
    check_cases(f"trace `{file}`", requested, "conflict", (is_other, reason, fix))
    links = HOST_DEVICES if links is None and not data.is_gpu else links
    module = data.program(name, program_id)
    program = _Program.of(module, mesh, cluster, links, schedule, data.is_gpu)
    return _summary(file, data, name, by_device, program, top)


def _summary(
    file: Path, data: TraceData, name: str, by_device: Mapping[int, list[Event]], program: _Program, top: int
) -> Trace:
    runs = {event.run for events in by_device.values() for event in events} - {None}
    num_steps = len(data.steps) or len(runs) or 1
    span_ns = np.mean([max(e.end_ns for e in es) - min(e.begin_ns for e in es) for es in by_device.values()])
    step_s = float(span_ns) / 1e9 / num_steps
    scale = 1e9 * num_steps * len(by_device)
    busy = [_union((e.begin_ns, e.end_ns) for e in es) for es in by_device.values()]
    busy_s = sum(end - begin for intervals in busy for begin, end in intervals) / scale
    idle_s = max(step_s - busy_s, 0.0)
    in_graphs = any(event.in_graph for events in by_device.values() for event in events)
    times = _times([[program.joined(event) for event in events] for events in by_device.values()], scale)
    runs_on_all = num_steps * len(by_device)
    collectives = [program.collective(op, time, runs_on_all) for op, time in times.items() if time.kind is not None]
    kernels = [program.kernel(op, time, runs_on_all) for op, time in times.items() if time.kind is None]
    causes = dict.fromkeys(CAUSES, 0.0)
    for kernel in kernels:
        causes[kernel.cause] += kernel.measured_s
    causes |= {"communication": sum(collective.exposed_s for collective in collectives), "idle": idle_s}
    phases: dict[str, float] = {}
    if program.op_names:
        phases = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
        for op, time in times.items():
            phases[scopes.phase(program.op_names.get(op, ""))] += time.time_s
    timed = tuple(sorted(collectives, key=lambda collective: -collective.measured_s))
    return Trace(
        source=str(file),
        program=name,
        devices=len(by_device),
        steps=num_steps,
        step_s=step_s,
        busy_s=busy_s,
        idle_s=idle_s,
        predicted_step_s=None if program.times is None else program.times.step_s,
        phases=phases,
        causes=causes,
        method="" if not data.is_gpu else IN_GRAPHS if in_graphs else WITHOUT_GRAPHS,
        host={phase: seconds / num_steps for phase, seconds in data.host_s.items()},
        collectives=timed,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.measured_s)),
        costs=tuple(_costs(times, timed, idle_s, step_s, program.op_names)[:top]),
        notes=tuple(_notes(program, data.is_gpu, in_graphs)),
    )


@dataclasses.dataclass
class _Time:
    kind: str | None
    count: int = 0
    time_s: float = 0.0
    exposed_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """The traced program with its predictions, by the names of instructions."""

    module: Module | None
    op_names: Mapping[str, str]
    sent: Mapping[str, Collective]
    """Collectives of the program; empty if the mesh is unknown."""
    kernels: Mapping[str, ProgramKernel]
    is_gpu: bool
    is_predicted: bool
    """Whether the times of `kernels` are for the traced GPU."""
    times: Timeline | None
    links: Links | None
    by_kernel_name: Mapping[str, str]
    """Name of XLA's kernel of an instruction -> name of the instruction."""

    @staticmethod
    def of(
        module: Module | None,
        mesh: Mapping[str, int] | None,
        cluster: Cluster | None,
        links: Links | None,
        schedule: Schedule | None,
        is_gpu: bool,
    ) -> _Program:
        counts = None if schedule is None else ScheduleCounts(schedule)
        instructions = [] if module is None else [ins for computation in module for ins in computation]
        sent = () if module is None or mesh is None else census(module, mesh, counts)
        times: Timeline | None = None
        kernels: tuple[ProgramKernel, ...] = ()
        if module is not None and cluster is not None and module.is_scheduled:
            times = timeline(module, sent, cluster, counts)
        if module is not None:
            kernels = program_kernels(module, cluster or parse_cluster(_REFERENCE), counts)
        return _Program(
            module=module,
            op_names={ins.name: ins.metadata.op_name for ins in instructions},
            sent={collective.name: collective for collective in sent},
            kernels={kernel.name: kernel for kernel in kernels},
            is_gpu=is_gpu,
            is_predicted=cluster is not None,
            times=times,
            links=links,
            by_kernel_name={re.sub(r"\W", "_", kernel.name): kernel.name for kernel in kernels},
        )

    def joined(self, event: Event) -> Event:
        """Return a kernel of a CUDA graph with the name of the instruction, and other events unchanged."""
        name = self.by_kernel_name.get(event.name) if event.in_graph else None
        return event if name is None else event._replace(name=name)

    def kernel(self, name: str, time: _Time, runs: int) -> MeasuredKernel:
        kernel = self.kernels.get(name)
        measured: dict[str, Any] = {"name": name, "count": time.count / runs, "measured_s": time.time_s}
        if kernel is None:
            op_name = self.op_names.get(name, "")
            kind = next((kind for kind, pattern in _LIBRARIES if pattern.search(name)), "other")
            return MeasuredKernel(
                kind=kind, implementation="", dtypes="", module=scopes.module_path(op_name), predicted_s=None,
                phase=scopes.phase(op_name), **measured,
            )  # fmt: skip
        return MeasuredKernel(
            kind=kernel.kind, implementation=kernel.implementation if self.is_gpu else "",
            dtypes=dtype_text(kernel.dtypes), module=kernel.module, phase=kernel.phase,
            predicted_s=kernel.time_s if self.is_predicted else None, program_count=kernel.count, flops=kernel.flops,
            moved_bytes=kernel.moved_bytes, product=kernel.product, **measured,
        )  # fmt: skip

    def collective(self, name: str, time: _Time, runs: int) -> MeasuredCollective:
        assert time.kind is not None
        sent, timed = self.sent.get(name), self._timed(name)
        predicted_s = None if timed is None else timed.time_s
        if sent is not None and predicted_s is None and self.links is not None:
            link = self.links.measured(sent.axes, permute=sent.kind == "collective-permute")
            if link is not None:
                run_s = collective_time_s(sent.kind, sent.payload_bytes, sent.group_size, link)
                predicted_s = sent.count_per_step * run_s
        return MeasuredCollective(
            name=name, kind=time.kind, count=time.count / runs, measured_s=time.time_s, exposed_s=time.exposed_s,
            axes=None if sent is None else sent.axes,
            payload_bytes=None if sent is None else sent.payload_bytes,
            group_size=None if sent is None else sent.group_size,
            predicted_s=predicted_s,
            predicted_exposed_s=None if timed is None else timed.exposed_s,
        )  # fmt: skip

    def _timed(self, name: str) -> Timed | None:
        collectives = () if self.times is None else self.times.collectives
        return next((timed for timed in collectives if timed.collective.name == name), None)


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


def _notes(program: _Program, is_gpu: bool, in_graphs: bool) -> Iterator[str]:
    if program.module is None:
        yield "the trace does not contain the program, so it has no modules, phases and predictions"
    elif not program.sent and any(ins.opcode.removesuffix("-start") in KINDS for c in program.module for ins in c):
        yield "the mesh is unknown: for axes and bytes of collectives, pass --mesh fsdp=4,tensor=2"
    if is_gpu and not program.is_predicted:
        yield "the GPU is unknown: for predictions, pass --cluster h100:1x8 or a profile, my.json"
    elif not is_gpu and program.links is not None and program.sent:
        yield f"predicted from links only, without overlap: {program.links.source or program.links.name}"
    if in_graphs:
        yield f"{IN_GRAPHS}: equal kernels of different modules are merged; meshpar train --profile avoids CUDA graphs"


def _kernel_rows(kernels: Iterable[MeasuredKernel]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each group of kernels with equal kind, implementation, dtypes and place, longest first."""
    groups: dict[tuple[str, str, str, str], list[MeasuredKernel]] = {}
    for kernel in kernels:
        where = ", ".join(filter(None, (scopes.layerless(kernel.module), kernel.phase)))
        key = (kernel.kind, kernel.implementation, kernel.dtypes, where or kernel.name)
        groups.setdefault(key, []).append(kernel)
    longest_first = sorted(groups.items(), key=lambda item: -sum(kernel.measured_s for kernel in item[1]))
    for key, members in longest_first:
        measured_s = sum(kernel.measured_s for kernel in members)
        predictions = [kernel.predicted_s for kernel in members if kernel.predicted_s is not None]
        predicted_s = sum(predictions) if len(predictions) == len(members) else None
        ratio = f"{measured_s / predicted_s:.2g}" if predicted_s else ""
        count = f"{sum(kernel.count for kernel in members):,.4g}"
        yield (*key, count, si(measured_s, "s"), _time(predicted_s), ratio)


def _table(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Return a table of measurements, without empty columns."""
    by_column = zip(columns, *rows, strict=True)
    heads, *shown = zip(*(cells for cells in by_column if any(cells[1:])), strict=True)
    texts = ("collective", "axes", "kind", "implementation", "dtypes", "where")
    return table(f"{name}, per step and device", heads, shown, left=texts)


def _facts(trace: Trace) -> Any:
    rows = [("measured", si(trace.step_s, "s")), ("predicted", _time(trace.predicted_step_s))]
    for name, seconds in (("busy", trace.busy_s), ("idle", trace.idle_s)):
        share = f"  {seconds / trace.step_s:.0%}" if trace.step_s else ""  # 0 if the clock is too coarse
        rows.append((name, si(seconds, "s") + share))
    rows += [(f"  {name}", si(seconds, "s")) for name, seconds in trace.causes.items() if seconds and name != "idle"]
    rows += [(f"phase: {name}", si(seconds, "s")) for name, seconds in trace.phases.items() if seconds]
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
