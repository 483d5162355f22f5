"""Simulation of a scheduled program: when kernels and collectives run, and which overlap.

A GPU has two streams. The compute stream runs kernels in schedule order, with times from the roofline model
(`timeline/roofline.py`). The communication stream runs collectives in issue order, with times from the alpha-beta
model (`hardware/cost_model.py`) for the link that their groups need. If XLA may run collectives concurrently, those
inside a node do not delay those between nodes (with one GPU per node). Compute issues a collective at its start
instruction, and the collective runs as soon as the stream is free. At the done, compute blocks until the collective
has finished; a synchronous collective blocks immediately. Collectives are hidden while compute works, and exposed
while it is blocked.

Loop bodies are simulated once, with empty streams at their start and end, and their times are multiplied by the trip
count. Loops with collectives start when the communication stream is free, because XLA's scheduler does not move
collectives across them either. Conditionals use their longest branch. A choice of attention windows, which depends
on the layer, uses the mean of its branches.

The tick loop of a pipeline is simulated per stage: ticks run the slots of the schedule's table, and receivers block
until their message arrives. Times are then averages over stages, and the time that stages are blocked is the bubble.

Assumptions: devices are identical and start together; kernels and collectives do not slow each other down (on a GPU
they share memory bandwidth and some cores); links run collectives sequentially; asynchronous copies and fusions use
the compute stream, because they use the same memory, except copies between device and host memory, which run one after
the other at `Gpu.host_bytes_per_s` while kernels run; launches are free unless the cluster's profile has their time.
Kernels run at the planner's rates (`Cluster.rates`) by default. The simulation is deterministic on every machine.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from meshpar.collectives.attention import window_shares
from meshpar.hardware.clusters import Cluster, Rates
from meshpar.hardware.cost_model import KINDS, collective_link, collective_time_s
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import Collective
from meshpar.inspect.hlo.groups import Groups
from meshpar.inspect.hlo.parser import Computation, Instruction, Module
from meshpar.inspect.hlo.walk import MAX_HOPS, branches, runs, trip_count
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.roofline import Roofline

Stream = Literal["compute", "communication"]
Cover = Literal["matmul", "kernels", "nothing"]


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """A kernel, collective or loop on a stream. Times are in seconds from the start of its segment."""

    name: str
    stream: Stream
    start_s: float
    end_s: float
    """End of the op; for a loop, the end of the last iteration."""
    kind: str
    """`matmul`, `kernel`, `loop`, or the kind of collective."""
    label: str
    """Mesh axes of a collective: `data*fsdp`; empty for other ops."""
    module: str
    """Named scopes: `decoder/mlp`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The ops of one loop iteration, or of the program outside all loops."""

    name: str
    """Name of the while instruction; empty for the program."""
    module: str
    """Named scopes of the loop."""
    is_backward: bool
    trip_count: int | None
    """Iterations each time the loop runs; None if unknown, counted once."""
    duration_s: float
    """Duration per iteration."""
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A collective of the census with its times."""

    collective: Collective
    time_s: float
    """Communication time of all its runs in a step."""
    hidden_s: float
    """Part of `time_s` that is overlapped with compute."""
    cover: Cover
    """Compute between its start and its done: `matmul`, `kernels` (without a matmul) or `nothing`."""
    latency_s: float = 0.0
    """Part of `time_s` that would remain with infinite bandwidth."""

    @property
    def exposed_s(self) -> float:
        """Part of `time_s` that is not overlapped, because compute waits for the collective."""
        return self.time_s - self.hidden_s

    @property
    def lost_s(self) -> float:
        """Time by which the step would be shorter without the latency of the collective."""
        return min(self.latency_s, self.exposed_s)

    @property
    def hidden_fraction(self) -> float | None:
        """Hidden fraction of `time_s`; None if `time_s` is 0."""
        return self.hidden_s / self.time_s if self.time_s else None

    @property
    def has_nothing_to_hide_behind(self) -> bool:
        """True if most of its time is exposed and no matmul runs between its start and its done."""
        return self.cover != "matmul" and self.exposed_s > self.hidden_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """Simulated step of a program on a cluster. Times are in seconds, per device."""

    cluster: str
    peak_flops_per_s: float
    """Peak FLOP/s of the GPU for the dtype with most of the program's matmul FLOPs."""
    step_s: float
    """Step time: `compute_s + memory_s + launch_s + bubble_s` and the exposed time of every axis."""
    compute_s: float
    """Time of compute-bound kernels."""
    memory_s: float
    """Time of memory-bound kernels."""
    network_s: Mapping[str, float]
    """Communication time by mesh axes."""
    hidden_s: Mapping[str, float]
    """Part of `network_s` that is overlapped with compute."""
    collectives: tuple[Timed, ...]
    """The collectives with their times, in the order of the census."""
    segments: tuple[Segment, ...]
    """Segments of the program: first its top level, then its loops, outer loops first."""
    launch_s: float = 0.0
    """Time that short kernels take longer than their work, because of the launch; 0 if launches were not measured."""
    bubble_s: float = 0.0
    """Time that a pipeline stage waits for other stages, averaged over stages."""
    rates: str = ""
    """Text about the kernel rates of the simulation and their source."""
    notes: tuple[str, ...] = ()
    """Limitations of the simulated times."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Communication time that is not overlapped with compute, by mesh axes."""
        return {label: time_s - self.hidden_s[label] for label, time_s in self.network_s.items()}

    @property
    def bound(self) -> str:
        """The largest component of the step: `compute`, `memory`, `launches`, `bubble` or `network:<axes>`."""
        spent = {"compute": self.compute_s, "memory": self.memory_s, "launches": self.launch_s, "bubble": self.bubble_s}
        spent |= {f"network:{label}": time_s for label, time_s in self.exposed_s.items()}
        return max(spent, key=lambda component: spent[component])

    @property
    def loops(self) -> tuple[Segment, ...]:
        """The segments of the loops."""
        return self.segments[1:]


def timeline(
    module: Module,
    collectives: Sequence[Collective],
    cluster: Cluster,
    schedule_counts: ScheduleCounts | None = None,
    *,
    overlap_limit: int = 1,
    rates: Rates | None = None,
) -> Timeline:
    """Simulate a scheduled program.

    Args:
      module: the program as the GPU compiler scheduled it.
      collectives: its census.
      cluster: the cluster it was compiled for; device i is in node `i // gpus_per_node`.
      cells: execution counts of a pipelined program. Its ticks are simulated as in the schedule's table.
      overlap_limit: number of collectives that XLA may run at a time (`hardware.compile_options.overlap_limit`).
      rates: kernel rates of the GPU; None means the expected rates, `cluster.rates`.
    """
    assert module.is_scheduled, "pass the compiled program instead of the lowered program"
    rates = rates or cluster.rates
    simulation = _Simulation(module, collectives, cluster, schedule_counts, overlap_limit, rates)
    block = simulation.block(module.entry)
    return Timeline(
        cluster=cluster.name,
        peak_flops_per_s=simulation.roofline.main_peak_flops_per_s,
        rates=str(rates),
        step_s=block.duration_s,
        compute_s=block.spent_s["compute"],
        memory_s=block.spent_s["memory"],
        network_s=dict(block.network_s),
        hidden_s={label: block.hidden_s[label] for label in block.network_s},
        collectives=tuple(simulation.timed(collective) for collective in collectives),
        segments=(_segment(block), *simulation.loops),
        launch_s=block.spent_s["launches"],
        bubble_s=block.spent_s["bubble"],
        notes=tuple(_notes(module, simulation)),
    )


@dataclasses.dataclass
class _Flight:
    """A single run of a collective in the simulation."""

    collective: Collective
    start_s: float
    end_s: float
    hidden_s: float = 0.0
    cover: Cover = "nothing"


def _times() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclasses.dataclass
class _ComputationRun:
    """State of the simulation of a computation: the clocks of both streams, and totals of time."""

    duration_s: float = 0.0
    """Clock of the compute stream; at the end, the duration of the computation."""
    free_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Time at which each link is free."""
    spent_s: defaultdict[str, float] = dataclasses.field(default_factory=_times)
    """Time of the compute stream by component, as in `Timeline.bound`."""
    network_s: defaultdict[str, float] = dataclasses.field(default_factory=_times)
    hidden_s: defaultdict[str, float] = dataclasses.field(default_factory=_times)
    cover: Cover = "nothing"
    """Compute that the computation contains: `matmul`, `kernels` (without a matmul) or `nothing`."""
    ops: list[Op] = dataclasses.field(default_factory=list)
    waits: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    flights: list[_Flight] = dataclasses.field(default_factory=list)
    host_copies: dict[str, float] = dataclasses.field(default_factory=dict)
    """End times of copies between device and host, by the name of their start instruction."""
    pending: dict[str, list[_Flight]] = dataclasses.field(default_factory=dict)
    """Runs of asynchronous collectives that are not finished, by the name of their start instruction."""

    def wait(self, until_s: float) -> None:
        if until_s > self.duration_s:
            self.waits.append((self.duration_s, until_s))
            self.duration_s = until_s

    def finish(self, flights: Iterable[_Flight]) -> None:
        self.wait(max((flight.end_s for flight in flights), default=0.0))

    def finish_copy(self, end_s: float) -> None:
        """Wait for a copy between device and host. The time counts as memory time."""
        waited_s = max(end_s - self.duration_s, 0.0)
        self.duration_s += waited_s
        self.spent_s["memory"] += waited_s

    def add(self, inner: _ComputationRun, times: float) -> None:
        """Add the totals of `times` runs of a different computation."""
        for totals in ("spent_s", "network_s", "hidden_s"):
            for label, time_s in getattr(inner, totals).items():
                getattr(self, totals)[label] += times * time_s

    def computed(self, ins: Instruction, kind: str, start_s: float) -> None:
        """Record an op of the compute stream, from `start_s` to the current time."""
        module = scopes.module_path(ins.metadata.op_name)
        self.ops.append(Op(ins.name, "compute", start_s, self.duration_s, kind, "", module))

    def works(self, cover: Cover) -> None:
        """Record that pending collectives overlap with an op of the compute stream."""
        for flight in (flight for flights in self.pending.values() for flight in flights):
            flight.cover = _better(flight.cover, cover)
        self.cover = _better(self.cover, cover)


class _Simulation:
    def __init__(
        self,
        module: Module,
        collectives: Sequence[Collective],
        cluster: Cluster,
        schedule_counts: ScheduleCounts | None,
        overlap_limit: int,
        rates: Rates,
    ) -> None:
        self._module, self._cluster, self._overlap_limit = module, cluster, overlap_limit
        self.schedule_counts = schedule_counts
        # Branches of the conditionals in the simulated tick; other conditionals take the longest branch.
        self._choice: dict[str, int] = {}
        self.roofline = Roofline(module, rates, cluster.launch_s)
        self._collectives = {(c.computation, c.name): c for c in collectives}
        self._blocks: dict[str, _ComputationRun] = {}
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._layouts: dict[Groups, set[tuple[int, int]]] = {}
        self._loops: dict[str, Segment | None] = {}

    def block(self, computation: Computation) -> _ComputationRun:
        """Simulate a computation on empty streams. Each computation is simulated only once."""
        block = self._blocks.get(computation.name)
        if block is None:
            block = self._blocks[computation.name] = _ComputationRun()
            for ins in computation:
                self._step(block, computation, ins)
            for flights in block.pending.values():  # without a done, a collective ends with the computation
                block.finish(flights)
            block.finish_copy(max(block.host_copies.values(), default=0.0))
            self._settle(block)
        return block

    def timed(self, collective: Collective) -> Timed:
        """Return the communication time and hidden time of a collective, summed over all its runs in a step."""
        # If its branch was not simulated, nothing overlaps with it.
        flight = self._flights.get((collective.computation, collective.name))
        flight = flight or _Flight(collective, 0.0, self._time_s(collective))
        counts = collective.count_by_stage
        times = sum(counts) / len(counts) if counts else float(collective.count_per_step)
        time_s, hidden_s = (flight.end_s - flight.start_s) * times, flight.hidden_s * times
        latency_s = (self._time_s(collective) - self._time_s(collective, with_latency=False)) * times
        return Timed(collective=collective, time_s=time_s, hidden_s=hidden_s, cover=flight.cover, latency_s=latency_s)

    @property
    def loops(self) -> tuple[Segment, ...]:
        """Loops in program order, outer loops first."""
        return tuple(loop for loop in self._loops.values() if loop is not None)

    def _step(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        if ins.opcode == "while":
            self._loop(block, computation, ins)
        elif ins.opcode == "conditional":
            names = branches(computation, ins)
            names = names[self._choice[ins.name] :][:1] if ins.name in self._choice else names
            blocks = [self.block(self._module.computations[name]) for name in names] or [_ComputationRun()]
            shares = window_shares(ins.metadata.op_name)
            if shares is not None and len(shares) == len(blocks):
                mean = _mean(blocks, shares)
                block.computed(ins, "matmul" if mean.cover == "matmul" else "kernel", self._repeat(block, mean, 1))
            else:
                self._inline(block, max(blocks, key=lambda branch: branch.duration_s))
        elif ins.opcode.endswith("-done"):
            started = _started_by(computation, ins)
            block.finish_copy(block.host_copies.pop(started, 0.0))
            block.finish(block.pending.pop(started, []))
        elif collectives := list(self._communicates(computation, ins, MAX_HOPS)):
            self._issue(block, ins, [collective for collective in collectives if collective is not None])
        elif ins.opcode == "call":
            for name in runs(ins):
                self._inline(block, self.block(self._module.computations[name]))
        elif ins.opcode.endswith("-start") and _uses_host_memory(computation, ins):
            self._copy_host(block, computation, ins)
        elif (kernel := self.roofline.kernel(computation, ins)) is not None and kernel.time_s:
            start_s = block.duration_s
            block.duration_s += kernel.time_s
            block.spent_s["compute" if kernel.is_compute_bound else "memory"] += kernel.time_s - kernel.launch_s
            block.spent_s["launches"] += kernel.launch_s
            block.works("matmul" if kernel.flops else "kernels")
            block.computed(ins, "matmul" if kernel.flops else "kernel", start_s)

    def _copy_host(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        """Start a copy between device and host memory, which kernels and collectives overlap with."""
        kernel = self.roofline.kernel(computation, ins)
        nbytes = 0 if kernel is None else kernel.moved_bytes / 2  # read and written
        start_s = max(block.duration_s, block.free_s.get("host", 0.0))
        block.free_s["host"] = block.host_copies[ins.name] = start_s + nbytes / self._cluster.gpu.host_bytes_per_s

    def _communicates(self, computation: Computation, ins: Instruction, hops: int) -> Iterator[Collective | None]:
        """Yield the collectives that an instruction starts, and None for each collective without communication."""
        if ins.opcode.removesuffix("-start") in KINDS:
            yield self._collectives.get((computation.name, ins.name))
        elif hops and (ins.opcode.endswith("-start") or hops < MAX_HOPS):
            for callee in runs(ins):
                inner = self._module.computations[callee]
                for inner_ins in inner:
                    yield from self._communicates(inner, inner_ins, hops - 1)

    def _issue(self, block: _ComputationRun, ins: Instruction, collectives: Iterable[Collective]) -> None:
        flights = []
        for collective in collectives:
            links = self._links(collective)
            start_s = max(block.duration_s, *(block.free_s.get(link, 0.0) for link in links))
            end_s = start_s + self._time_s(collective)
            block.free_s |= dict.fromkeys(links, end_s)
            flights.append(_Flight(collective, start_s, end_s))
        block.flights += flights
        if any(flight.collective.is_async for flight in flights):
            block.pending[ins.name] = flights
        else:
            block.finish(flights)

    def _settle(self, block: _ComputationRun) -> None:
        """Compute the hidden time of each collective, after all waits of the computation are recorded."""
        for flight in block.flights:
            c, time_s = flight.collective, flight.end_s - flight.start_s
            waited_s = sum(max(0.0, min(end, flight.end_s) - max(start, flight.start_s)) for start, end in block.waits)
            flight.hidden_s = min(max(time_s - waited_s, 0.0), time_s)
            self._flights[c.computation, c.name] = flight
            block.network_s[c.axes_label] += time_s
            block.hidden_s[c.axes_label] += flight.hidden_s
            op = Op(c.name, "communication", flight.start_s, flight.end_s, c.kind, c.axes_label, c.module)
            block.ops.append(op)
        block.ops.sort(key=lambda op: (op.start_s, op.end_s))

    def _loop(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        times = trip_count(ins)
        self._loops.setdefault(ins.name, None)  # reserve a position before the loops in its body
        computation = self._module.computations[ins.called_as("body")[0]]
        choices = self.schedule_counts.choices(self._module, ins.name) if self.schedule_counts is not None else None
        if choices is not None:
            shown, total = self._ticks(computation, choices)
            start_s = self._repeat(block, total, 1)
        else:
            shown = self.block(computation)
            start_s = self._repeat(block, shown, 1 if times is None else times)
        self._loops[ins.name] = _segment(shown, ins, times)
        if block.duration_s > start_s:
            block.computed(ins, "loop", start_s)

    def _ticks(self, body: Computation, choices: Mapping[str, np.ndarray]) -> tuple[_ComputationRun, _ComputationRun]:
        """Simulate the tick loop of a pipeline. Return its longest tick, and all ticks averaged over stages."""
        assert self.schedule_counts is not None
        names, picks = list(choices), np.stack(list(choices.values()), -1)  # [tick, stage, conditional]
        slots, slot_index = np.unique(picks.reshape(-1, len(names)), axis=0, return_inverse=True)
        affected = _leading_to(self._module, set(names))
        blocks = []
        for slot in slots.tolist():
            self._choice = {name: pick for name, pick in zip(names, slot, strict=True) if pick >= 0}
            for name in affected:
                self._blocks.pop(name, None)
            blocks.append(self.block(body))
        self._choice = {}
        slot_index = slot_index.reshape(picks.shape[:2])
        runs = np.bincount(slot_index.ravel(), minlength=len(slots)) / picks.shape[1]  # on the mean stage
        length_s = self.schedule_counts.makespan(np.array([tick.duration_s for tick in blocks])[slot_index])
        total = _ComputationRun(duration_s=length_s)
        total.spent_s["bubble"] = length_s
        for tick, times in zip(blocks, runs.tolist(), strict=True):
            total.add(tick, times)
            total.spent_s["bubble"] -= times * tick.duration_s
            total.cover = _better(total.cover, tick.cover)
        return max(blocks, key=lambda tick: tick.duration_s), total

    def _inline(self, block: _ComputationRun, inner: _ComputationRun) -> None:
        start_s = self._repeat(block, inner, 1)
        for op in inner.ops:
            block.ops.append(dataclasses.replace(op, start_s=start_s + op.start_s, end_s=start_s + op.end_s))

    def _repeat(self, block: _ComputationRun, inner: _ComputationRun, times: int) -> float:
        """Add `times` consecutive runs of `inner` to `block`. Return the start time of the first run."""
        if inner.network_s:
            block.wait(max(block.free_s.values(), default=0.0))
        start_s = block.duration_s
        block.duration_s += times * inner.duration_s
        block.add(inner, times)
        if times and inner.duration_s:
            block.works(inner.cover)
        return start_s

    def _time_s(self, collective: Collective, *, with_latency: bool = True) -> float:
        """Return the duration of a collective in its slowest device group."""
        links = (
            collective_link(collective.kind, self._cluster, num_nodes=nodes, per_node=per_node, axes=collective.axes)
            for nodes, per_node in self._layout(collective.groups)
        )
        links = (link if with_latency else dataclasses.replace(link, alpha_s=0.0) for link in links)
        kind, nbytes, size = collective.kind, collective.payload_bytes, collective.group_size
        return max(collective_time_s(kind, nbytes, size, link) for link in links)

    def _links(self, collective: Collective) -> tuple[str, ...]:
        """Return the links that a collective uses: within nodes (`inside`), between nodes (`across`), or both."""
        if self._overlap_limit == 1:
            return ("inside", "across")
        layouts = self._layout(collective.groups)
        across = any(nodes > 1 for nodes, _ in layouts)
        return ("across",) * across + ("inside",) * (any(per_node > 1 for _, per_node in layouts) or not across)

    def _layout(self, groups: Groups) -> set[tuple[int, int]]:
        """Return (number of nodes, fewest devices per node) for all groups."""
        if groups not in self._layouts:
            members = (Counter(device // self._cluster.gpus_per_node for device in group) for group in groups)
            self._layouts[groups] = {(len(nodes), min(nodes.values())) for nodes in members}
        return self._layouts[groups]


def _uses_host_memory(computation: Computation, ins: Instruction) -> bool:
    """Return whether an instruction reads or writes an array in host memory, which XLA marks as memory space 5."""
    shapes = (ins.shape, *(computation[name].shape for name in ins.operands))
    return any("S(5)" in leaf.layout for shape in shapes for leaf in shape.leaves())


def _mean(blocks: Sequence[_ComputationRun], shares: Sequence[Fraction]) -> _ComputationRun:
    """Return the mean of branches that are taken in these shares of the layers."""
    mean = _ComputationRun(cover=_better(*(block.cover for block in blocks)))
    for block, share in zip(blocks, map(float, shares), strict=True):
        mean.duration_s += share * block.duration_s
        mean.add(block, share)
    return mean


def _leading_to(module: Module, names: set[str]) -> set[str]:
    """Return the names of the computations that contain any of these instructions, directly or through calls."""
    reached = {computation.name for computation in module if any(ins.name in names for ins in computation)}
    while True:
        called = {computation.name: {name for ins in computation for _, name in ins.called} for computation in module}
        callers = {name for name, callees in called.items() if callees & reached}
        if callers <= reached:
            return reached
        reached |= callers


def _segment(block: _ComputationRun, loop: Instruction | None = None, times: int | None = 1) -> Segment:
    op_name = loop.metadata.op_name if loop is not None else ""
    return Segment(
        name=loop.name if loop is not None else "",
        module=scopes.module_path(op_name),
        is_backward=scopes.is_backward(op_name),
        trip_count=times,
        duration_s=block.duration_s,
        ops=tuple(block.ops),
    )


def _better(*covers: Cover) -> Cover:
    return max(covers, key=("nothing", "kernels", "matmul").index)


def _started_by(computation: Computation, done: Instruction) -> str:
    """Return the name of the `-start` instruction of a `-done`, possibly through `-update` instructions."""
    for _ in range(MAX_HOPS):
        if not done.operands:
            break
        done = computation[done.operands[0]]
        if not done.opcode.endswith("-update") and done.opcode not in ("get-tuple-element", "bitcast"):
            break
    return done.name


def _notes(module: Module, simulation: _Simulation) -> Iterator[str]:
    for target, times in sorted(work.custom_calls(module, simulation.schedule_counts).items()):
        if target != "AllocateBuffer":
            yield (
                f"`{target}` ({times} calls per step) is opaque: its time covers the bytes it reads and writes, "
                "but not its FLOPs"
            )
    for loop in simulation.loops:
        if loop.trip_count is None:
            yield f"the trip count of loop `{loop.name}` is unknown: it is counted once"
