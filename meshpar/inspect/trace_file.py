"""Reader of profiler traces: operations on devices, phases of the host, and the traced programs.

`jax.profiler.ProfileData` reads XProf's files (`*.xplane.pb`) as planes of lines of events. Operations of a program
are events with `hlo_op`. On GPUs they are in the plane of their device; for CPU host devices they are in a host thread
and have a `device_ordinal`. The plane `/host:metadata` contains the compiled programs. They have no events, so
`ProfileData` does not show them, and this module reads them from the serialized `XSpace`
(openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from meshpar.inspect.hlo import parser as hlo
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_file

_DEVICE = re.compile(r"/device:(?!CUSTOM)[A-Za-z]+:([0-9]+)")
_AROUND = re.compile(r"(while|conditional|call|async-start|async-done)(\.[0-9]+)?(\.clone.*)?\Z")
_GRAPH = re.compile(r"command_buffer|cuda_graph")
_DERIVED = ("XLA Ops", "XLA Modules", "Steps", "Framework Name Scope", "Framework Ops", "Source code", "XLA TraceMe")
_PROGRAM = re.compile(r"(.*)\(([0-9]+)\)\Z", re.DOTALL)
_WIRE = "the trace is not a serialized XSpace"


class Event(NamedTuple):
    """An operation on a device. Times are in nanoseconds of the trace's clock."""

    device: int
    module: str
    program_id: int | None
    """Number of the compiled program; None if it is unknown."""
    run: int | None
    name: str
    """Name of the instruction; the name of the kernel if its instruction is unknown."""
    begin_ns: float
    end_ns: float
    in_graph: bool = False
    """True for a kernel of a CUDA graph, whose instruction the trace does not contain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceData:
    """Content of a trace file."""

    events: tuple[Event, ...]
    is_gpu: bool
    """Whether operations ran on devices other than the host's."""
    host_s: Mapping[str, float]
    """Seconds of each phase of the training loop on the host."""
    steps: frozenset[int]
    """Numbers of the traced steps."""
    programs: Mapping[tuple[str, int], bytes]
    """(name, number) of each compiled program -> serialized `HloModuleProto`."""

    def program(self, name: str, program_id: int | None) -> hlo.Module | None:
        """Return a compiled program, or None if the trace does not contain it. Without a number, return the latest."""
        numbers = [number for other, number in self.programs if other == name]
        number = program_id if program_id in numbers else max(numbers, default=-1)
        proto = self.programs.get((name, number))
        return None if proto is None else hlo.parse(_text(proto))


def find(path: str | Path) -> Path:
    """Return the path of the newest trace in a run folder, or the path of a file unchanged."""
    file, fix = Path(path), "pass a .xplane.pb, or the folder of a run trained with --profile 10:15"
    if file.is_dir():
        files = sorted(file.glob("**/*.xplane.pb"), key=lambda file: (file.parent.name, file.name))
        if not files:
            raise problem(f"trace `{path}`", "read it", "the folder contains no .xplane.pb", fix, code="missing-file")
        file = next(f for f in files if f.parent == files[-1].parent)  # the first of several hosts
    return check_file(file, f"trace `{path}`", fix)


def load(file: Path) -> TraceData:
    """Read a trace file. Raise `MeshparError` if it is damaged or contains no operation of a program."""
    try:  # keep the data while its planes are in use, because they are views of its memory
        serialized = file.read_bytes()
        data = ProfileData.from_serialized_xspace(serialized)
        programs = dict(_programs(serialized))
    except Exception as error:  # the reader does not document its exceptions
        reason, fix = f"the reader failed ({str(error)[:200]})", "pass a complete .xplane.pb; trace the steps again"
        raise problem(f"trace `{file}`", "read it", reason, fix, code="damaged-file") from None
    with warnings.catch_warnings():  # the reader's types warn on Python 3.12, which aborts if warnings are errors
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(data.planes)
        is_gpu = any(_DEVICE.match(plane.name) for plane in planes)
        operations = (event for plane in planes for event in _of_plane(plane))
        events = [event for event in operations if not _AROUND.match(event.name) and event.end_ns >= event.begin_ns]
        host_s, steps = _host(planes)
    if not events:
        reason, fix = "it contains no operation of a program", "trace steps: meshpar train RECIPE --profile 10:15"
        raise problem(f"trace `{file}`", "read it", reason, fix, code="not-found")
    return TraceData(events=tuple(events), is_gpu=is_gpu, host_s=host_s, steps=frozenset(steps), programs=programs)


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
            # All kernels of a CUDA graph have the name of the launch as their operation.
            in_graph = op is not None and _GRAPH.match(str(op)) is not None
            yield Event(
                device=int(device.group(1)) if device else int(stats.get("device_ordinal", 0)),
                module=str(stats.get("hlo_module", "")),
                program_id=stats.get("program_id"),
                run=stats.get("run_id"),
                name=str(event.name if op is None or in_graph else op),
                begin_ns=event.start_ns,
                end_ns=event.start_ns + event.duration_ns,
                in_graph=in_graph,
            )


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


# ---- Programs --------------------------------------------------------------------------------------------------------


def _programs(xspace: bytes) -> Iterator[tuple[tuple[str, int], bytes]]:
    """Yield ((name, number), HloModuleProto) of each program in the planes `/host:metadata`.

    XSpace.planes = 1; XPlane.name = 2, .event_metadata = 4; XEventMetadata.name = 2, .stats = 5; XStat.bytes_value = 6;
    HloProto.hlo_module = 1. Map entries have the value in field 2.
    """
    for plane in _messages(xspace, 1):
        if b"/host:metadata" not in _messages(plane, 2):
            continue
        for metadata in (value for entry in _messages(plane, 4) for value in _messages(entry, 2)):
            name = _PROGRAM.match(b"".join(_messages(metadata, 2)).decode())
            protos = [value for stat in _messages(metadata, 5) for value in _messages(stat, 6)]
            for module in (module for proto in protos for module in _messages(proto, 1)):
                if name is not None:
                    yield (name[1], int(name[2])), module


def _messages(data: bytes, field: int) -> list[bytes]:
    """Return the length-delimited values of a field in a serialized protobuf message."""
    values, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            size, at = _varint(data, at)
            if tag >> 3 == field:
                values.append(data[at : at + size])
            at += size
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError(_WIRE)
    if at != len(data):
        raise ValueError(_WIRE)
    return values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _text(module: bytes) -> str:
    """Return the HLO text of a serialized `HloModuleProto`."""
    from jaxlib import _hlo  # type: ignore[attr-defined]  # jax.extend has no decoder of HLO

    return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
