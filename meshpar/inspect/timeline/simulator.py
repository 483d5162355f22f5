"""The scheduled program simulated: when each kernel and each collective runs, and what hides what.

A GPU runs one step here as two streams. *Compute* runs the kernels in the order of the schedule, each as long as the
roofline says (`timeline/roofline.py`). *Communication* runs the collectives one after the other in the order they are
issued, each as long as the alpha-beta model says (`hardware/cost_model.py`) over the link its groups need; where XLA
is let run several at a time, one inside a node and one between nodes (of one GPU each) do not wait for each other. A
collective is issued when compute reaches its start and begins when the stream is free; compute goes on until it meets
the done, and waits there if the collective is still under way. A synchronous collective is waited for at once. What
compute does not wait for is hidden: for every moment that a collective runs, compute is either at work (hidden) or
waiting (exposed).

A loop's body is simulated once, on streams that are empty when it begins and again when it ends, and its times are
multiplied by the trip count. A loop with collectives begins when the communication stream is free: XLA's scheduler does
not let a collective run across such a loop either. Of a conditional the longest branch is taken.

A pipeline's loop over ticks is run stage by stage: in every tick each stage runs the cell that the table gives it, and
who gets a message waits until it is sent. Times are then the mean stage's, and what stages wait for each other is the
bubble.

Assumed, and so the limits: devices are alike and start together; kernels and collectives do not slow each other down
(on a GPU they share memory bandwidth and some cores); one collective at a time on a link; asynchronous copies and
fusions take their time on the compute stream, for they use the same memory; launches cost nothing, unless the cluster's
profile has what one takes. Kernels run at the rates that the planner assumes (`Cluster.rates`), unless others are
given. The prediction is made from the text alone and comes out the same on every machine.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from meshpar.hardware.clusters import Cluster, Rates
from meshpar.hardware.cost_model import KINDS, collective_link, collective_time_s
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import Collective
from meshpar.inspect.hlo.groups import Groups
from meshpar.inspect.hlo.parser import Computation, Instruction, Module
from meshpar.inspect.hlo.walk import branches, runs, trip_count
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.roofline import Roofline
from meshpar.sharding.types import problem

Stream = Literal["compute", "communication"]
Cover = Literal["matmul", "kernels", "nothing"]

_MAX_HOPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kernel, collective or loop on a stream. Times count from the start of the segment it stands in."""

    name: str
    stream: Stream
    start_s: float
    end_s: float
    """Of a loop, after its last iteration."""
    kind: str
    """`matmul`, `kernel`, `loop`, or the kind of collective."""
    label: str
    """Mesh axes of a collective: `data*fsdp`; empty for others."""
    module: str
    """Named scopes it stands in: `decoder/mlp`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What runs in one go: the program itself, or one iteration of a loop."""

    name: str
    """Name of the while instruction; empty for the program."""
    module: str
    """Named scopes of the loop."""
    is_backward: bool
    trip_count: int | None
    """Iterations each time the loop runs; None: not known, counted once."""
    duration_s: float
    """Of one iteration."""
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One collective of the census with its times."""

    collective: Collective
    time_s: float
    """On the wire, for all its runs in a step."""
    hidden_s: float
    """Of that, while compute was at work."""
    cover: Cover
    """What stands between its start and its done: a matrix product, other kernels only, or nothing (as when it is
    synchronous)."""

    @property
    def exposed_s(self) -> float:
        """Time a step that compute waits for it."""
        return self.time_s - self.hidden_s

    @property
    def hidden_fraction(self) -> float | None:
        """Share of its time that is hidden; None when it takes none."""
        return self.hidden_s / self.time_s if self.time_s else None

    @property
    def has_nothing_to_hide_behind(self) -> bool:
        """Whether compute waits for most of it and no matrix product stands between its start and its done."""
        return self.cover != "matmul" and self.exposed_s > self.hidden_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a program on a cluster. Times are those of one device, in seconds."""

    cluster: str
    peak_flops_per_s: float
    """Of the GPU, in the type that most of the program's matrix products are in."""
    step_s: float
    """From the first kernel to the last: `compute_s + memory_s + launch_s + bubble_s`, and what is exposed of every
    axis."""
    compute_s: float
    """Kernels that their FLOPs bound."""
    memory_s: float
    """Kernels that their bytes bound."""
    network_s: Mapping[str, float]
    """Time on the wire by mesh axes."""
    hidden_s: Mapping[str, float]
    """Of that, while compute was at work."""
    collectives: tuple[Timed, ...]
    """In the census' order."""
    segments: tuple[Segment, ...]
    """The program first, then its loops, outer ones first."""
    launch_s: float = 0.0
    """Of kernels shorter than a launch, what it takes beyond them; 0 where nobody measured launches."""
    bubble_s: float = 0.0
    """Stages waiting for each other, on the mean one."""
    rates: str = ""
    """Rates that kernels were simulated at."""
    notes: tuple[str, ...] = ()
    """What the times leave out."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Time that compute waits, by mesh axes."""
        return {label: time_s - self.hidden_s[label] for label, time_s in self.network_s.items()}

    @property
    def bound(self) -> str:
        """What most of the step is spent on: `compute`, `memory`, `launches`, waiting (`bubble`, `network:<axes>`)."""
        spent = {"compute": self.compute_s, "memory": self.memory_s, "launches": self.launch_s, "bubble": self.bubble_s}
        spent |= {f"network:{label}": time_s for label, time_s in self.exposed_s.items()}
        return max(spent, key=lambda what: spent[what])

    @property
    def loops(self) -> tuple[Segment, ...]:
        """The loops' segments."""
        return self.segments[1:]


def timeline(
    module: Module,
    collectives: Sequence[Collective],
    cluster: Cluster,
    cells: ScheduleCounts | None = None,
    *,
    overlap_limit: int = 1,
    rates: Rates | None = None,
) -> Timeline:
    """Simulates a scheduled program.

    Args:
      module: as the GPU compiler scheduled it.
      collectives: its census.
      cluster: the one it was compiled for; device i stands in node `i // gpus_per_node`.
      cells: of a pipelined program, to run its ticks as the table says.
      overlap_limit: collectives that XLA was let run at a time (`training.xla.overlap_limit`).
      rates: of the GPU's kernels; None: the cluster's expected ones, `cluster.rates`.

    Raises:
      ValueError: the program is not scheduled, or has more devices than the cluster.
    """
    _check(module, cluster)
    rates = rates or cluster.rates
    simulation = _Simulation(module, collectives, cluster, cells, overlap_limit, rates)
    block = simulation.block(module.entry)
    return Timeline(
        cluster=cluster.name,
        peak_flops_per_s=simulation.roofline.main_peak_flops_per_s,
        rates=str(rates),
        step_s=block.duration_s,
        compute_s=block.compute_s,
        memory_s=block.memory_s,
        network_s=dict(block.network_s),
        hidden_s={label: block.hidden_s[label] for label in block.network_s},
        collectives=tuple(simulation.timed(one) for one in collectives),
        segments=(_segment(block), *simulation.loops),
        launch_s=block.launch_s,
        bubble_s=block.bubble_s,
        notes=tuple(_notes(module, simulation)),
    )


# ---- Simulation ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class _Flight:
    """A collective under way, or over."""

    collective: Collective
    start_s: float
    end_s: float
    cover: Cover = "nothing"


@dataclasses.dataclass
class _ComputationRun:
    """One run of a computation: the clocks of both streams while it is simulated, and the sums over all it runs."""

    duration_s: float = 0.0
    """Clock of the compute stream."""
    free_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """When a link is free."""
    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    bubble_s: float = 0.0
    network_s: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    hidden_s: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    cover: Cover = "nothing"
    """What kind of work it holds."""
    ops: list[Op] = dataclasses.field(default_factory=list)
    waits: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    flights: list[_Flight] = dataclasses.field(default_factory=list)
    pending: dict[str, list[_Flight]] = dataclasses.field(default_factory=dict)
    """Flights by the instruction that started them."""

    def wait(self, until_s: float) -> None:
        if until_s > self.duration_s:
            self.waits.append((self.duration_s, until_s))
            self.duration_s = until_s

    def add(self, inner: _ComputationRun, times: float) -> None:
        """The sums of so many runs of another."""
        self.compute_s += times * inner.compute_s
        self.memory_s += times * inner.memory_s
        self.launch_s += times * inner.launch_s
        self.bubble_s += times * inner.bubble_s
        for label, time_s in inner.network_s.items():
            self.network_s[label] += times * time_s
            self.hidden_s[label] += times * inner.hidden_s[label]

    def computed(self, ins: Instruction, kind: str, start_s: float) -> None:
        """Notes what has run on the compute stream until now."""
        self.ops.append(
            Op(
                name=ins.name,
                stream="compute",
                start_s=start_s,
                end_s=self.duration_s,
                kind=kind,
                label="",
                module=scopes.module_path(ins.metadata.op_name),
            )
        )

    def works(self, cover: Cover) -> None:
        """Notes that compute works while the pending flights are under way."""
        for flight in (flight for flights in self.pending.values() for flight in flights):
            flight.cover = _better(flight.cover, cover)
        self.cover = _better(self.cover, cover)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of a collective."""

    time_s: float
    hidden_s: float
    cover: Cover


class _Simulation:
    def __init__(
        self,
        module: Module,
        collectives: Sequence[Collective],
        cluster: Cluster,
        cells: ScheduleCounts | None,
        overlap_limit: int,
        rates: Rates,
    ) -> None:
        self._module, self._cluster, self.cells, self._overlap_limit = module, cluster, cells, overlap_limit
        self._choice: dict[str, int] = {}
        """What conditionals pick in the tick that is simulated; of others the longest branch is taken."""
        self.roofline = Roofline(module, rates, cluster.launch_s)
        self._collectives = {(one.computation, one.name): one for one in collectives}
        self._blocks: dict[str, _ComputationRun] = {}
        self._runs: dict[tuple[str, str], _Run] = {}
        self._layouts: dict[Groups, set[tuple[int, int]]] = {}
        self._loops: dict[str, Segment | None] = {}

    def block(self, computation: Computation) -> _ComputationRun:
        """One run of a computation on empty streams."""
        known = self._blocks.get(computation.name)
        if known is None:
            known = self._blocks[computation.name] = self._simulate(computation)
        return known

    def timed(self, collective: Collective) -> Timed:
        """All runs of a collective in a step."""
        run = self._runs.get((collective.computation, collective.name))
        if run is None:  # in a branch that another one outlasts it still has a time, and nothing is known to hide it
            run = _Run(self._time_s(collective), 0.0, "nothing")
        counts = collective.count_by_stage
        times = sum(counts) / len(counts) if counts else float(collective.count_per_step)
        return Timed(collective=collective, time_s=run.time_s * times, hidden_s=run.hidden_s * times, cover=run.cover)

    @property
    def loops(self) -> tuple[Segment, ...]:
        """Loops in the order the program reaches them, outer ones first."""
        return tuple(loop for loop in self._loops.values() if loop is not None)

    def _simulate(self, computation: Computation) -> _ComputationRun:
        block = _ComputationRun()
        for ins in computation:
            self._step(block, computation, ins)
        for flights in block.pending.values():  # started and never waited for: over when the computation is
            self._finish(block, flights)
        self._settle(block)
        return block

    def _step(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        if ins.opcode == "while":
            self._loop(block, computation, ins)
        elif ins.opcode == "conditional":
            names = branches(computation, ins)
            names = names[self._choice[ins.name] :][:1] if ins.name in self._choice else names
            blocks = [self.block(self._module.computations[name]) for name in names] or [_ComputationRun()]
            self._inline(block, max(blocks, key=lambda branch: branch.duration_s))
        elif ins.opcode.endswith("-done"):
            self._finish(block, block.pending.pop(_started_by(computation, ins), []))
        elif found := list(self._communicates(computation, ins, _MAX_HOPS)):
            self._issue(block, ins, [one for one in found if one is not None])
        elif ins.opcode == "call":
            for name in runs(ins):
                self._inline(block, self.block(self._module.computations[name]))
        else:
            self._kernel(block, computation, ins)

    def _kernel(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        kernel = self.roofline.kernel(computation, ins)
        if kernel is None or not kernel.time_s:
            return
        start_s = block.duration_s
        block.duration_s += kernel.time_s
        works_s = kernel.time_s - kernel.launch_s
        block.compute_s += works_s * kernel.is_compute_bound
        block.memory_s += works_s * (not kernel.is_compute_bound)
        block.launch_s += kernel.launch_s
        block.works("matmul" if kernel.flops else "kernels")
        block.computed(ins, "matmul" if kernel.flops else "kernel", start_s)

    def _communicates(self, computation: Computation, ins: Instruction, hops: int) -> Iterator[Collective | None]:
        """The collectives an instruction runs on the communication stream; None for one that sends nothing."""
        if ins.opcode.removesuffix("-start") in KINDS:
            yield self._collectives.get((computation.name, ins.name))
        elif hops and (ins.opcode.endswith("-start") or hops < _MAX_HOPS):
            for callee in runs(ins):
                inner = self._module.computations[callee]
                for one in inner:
                    yield from self._communicates(inner, one, hops - 1)

    def _issue(self, block: _ComputationRun, ins: Instruction, collectives: Iterable[Collective]) -> None:
        flights = []
        for one in collectives:
            links = self._links(one)
            start_s = max(block.duration_s, *(block.free_s.get(link, 0.0) for link in links))
            end_s = start_s + self._time_s(one)
            block.free_s |= dict.fromkeys(links, end_s)
            flights.append(_Flight(collective=one, start_s=start_s, end_s=end_s))
        block.flights += flights
        if any(flight.collective.is_async for flight in flights):
            block.pending[ins.name] = flights
        else:
            self._finish(block, flights)

    def _finish(self, block: _ComputationRun, flights: Iterable[_Flight]) -> None:
        block.wait(max((flight.end_s for flight in flights), default=0.0))

    def _settle(self, block: _ComputationRun) -> None:
        """What of each flight was hidden, now that all waiting is known."""
        for flight in block.flights:
            one, time_s = flight.collective, flight.end_s - flight.start_s
            waited_s = sum(max(0.0, min(end, flight.end_s) - max(start, flight.start_s)) for start, end in block.waits)
            hidden_s = min(max(time_s - waited_s, 0.0), time_s)
            self._runs[one.computation, one.name] = _Run(time_s, hidden_s, flight.cover)
            block.network_s[one.axes_label] += time_s
            block.hidden_s[one.axes_label] += hidden_s
            block.ops.append(
                Op(
                    name=one.name,
                    stream="communication",
                    start_s=flight.start_s,
                    end_s=flight.end_s,
                    kind=one.kind,
                    label=one.axes_label,
                    module=one.module,
                )
            )
        block.ops.sort(key=lambda op: (op.start_s, op.end_s))

    def _loop(self, block: _ComputationRun, computation: Computation, ins: Instruction) -> None:
        times = trip_count(self._module, computation, ins)
        self._loops.setdefault(ins.name, None)  # an outer loop's place is before those in its body
        computation = self._module.computations[ins.called_as("body")[0]]
        choices = self.cells.choices(self._module, ins.name) if self.cells is not None else None
        if choices is not None:
            tick, whole = self._ticks(computation, choices)
            self._loops[ins.name] = _segment(tick, ins, times)
            start_s = self._repeat(block, whole, 1)
        else:
            body = self.block(computation)
            self._loops[ins.name] = _segment(body, ins, times)
            start_s = self._repeat(block, body, 1 if times is None else times)
        if block.duration_s > start_s:
            block.computed(ins, "loop", start_s)

    def _ticks(self, body: Computation, choices: Mapping[str, np.ndarray]) -> tuple[_ComputationRun, _ComputationRun]:
        """The longest tick of a pipeline's loop, and all its ticks for the mean stage."""
        assert self.cells is not None
        names, picks = list(choices), np.stack(list(choices.values()), -1)  # [tick, stage, conditional]
        kinds, which = np.unique(picks.reshape(-1, len(names)), axis=0, return_inverse=True)
        varied = _leading_to(self._module, set(names))
        blocks = []
        for kind in kinds.tolist():
            self._choice = {name: pick for name, pick in zip(names, kind, strict=True) if pick >= 0}
            for name in varied:
                self._blocks.pop(name, None)
            blocks.append(self.block(body))
        self._choice = {}
        which = which.reshape(picks.shape[:2])
        runs = np.bincount(which.ravel(), minlength=len(kinds)) / picks.shape[1]  # of each kind, on the mean stage
        length_s = self.cells.makespan(np.array([one.duration_s for one in blocks])[which])
        whole = _ComputationRun(duration_s=length_s, bubble_s=length_s)
        for one, times in zip(blocks, runs.tolist(), strict=True):
            whole.add(one, times)
            whole.bubble_s -= times * one.duration_s
            whole.cover = _better(whole.cover, one.cover)
        return max(blocks, key=lambda one: one.duration_s), whole

    def _inline(self, block: _ComputationRun, inner: _ComputationRun) -> None:
        start_s = self._repeat(block, inner, 1)
        for op in inner.ops:
            block.ops.append(dataclasses.replace(op, start_s=start_s + op.start_s, end_s=start_s + op.end_s))

    def _repeat(self, block: _ComputationRun, inner: _ComputationRun, times: int) -> float:
        """Runs an inner block so often; gives the time at which its first run began."""
        if inner.network_s:
            block.wait(max(block.free_s.values(), default=0.0))
        start_s = block.duration_s
        block.duration_s += times * inner.duration_s
        block.add(inner, times)
        if times and inner.duration_s:
            block.works(inner.cover)
        return start_s

    def _time_s(self, one: Collective) -> float:
        """Of one run: as long as the slowest of its groups takes."""
        return max(
            collective_time_s(
                one.kind,
                one.payload_bytes,
                one.group_size,
                collective_link(one.kind, self._cluster, num_nodes=nodes, per_node=per_node, axes=one.axes),
            )
            for nodes, per_node in self._layout(one.groups)
        )

    def _links(self, one: Collective) -> tuple[str, ...]:
        """What it keeps others from while it runs: a ring through several GPUs of several nodes uses both links."""
        if self._overlap_limit == 1:
            return ("inside", "across")
        layouts = self._layout(one.groups)
        across = any(nodes > 1 for nodes, _ in layouts)
        return ("across",) * across + ("inside",) * (any(per_node > 1 for _, per_node in layouts) or not across)

    def _layout(self, groups: Groups) -> set[tuple[int, int]]:
        """(nodes, fewest devices in one of them) of every group."""
        if groups not in self._layouts:
            found = set()
            for group in groups:
                members = Counter(device // self._cluster.gpus_per_node for device in group)
                found.add((len(members), min(members.values())))
            self._layouts[groups] = found
        return self._layouts[groups]


def _leading_to(module: Module, names: set[str]) -> set[str]:
    """Computations that hold one of these instructions, or call one that does."""
    found = {computation.name for computation in module if any(ins.name in names for ins in computation)}
    while True:
        callers = {
            computation.name
            for computation in module
            if any(callee in found for ins in computation for _, callee in ins.called)
        }
        if callers <= found:
            return found
        found |= callers


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


def _better(one: Cover, other: Cover) -> Cover:
    order: tuple[Cover, ...] = ("nothing", "kernels", "matmul")
    return max(one, other, key=order.index)


def _started_by(computation: Computation, done: Instruction) -> str:
    """The name of the start that a done ends, updates between them looked through."""
    for _ in range(_MAX_HOPS):
        if not done.operands:
            break
        done = computation[done.operands[0]]
        if not done.opcode.endswith("-update") and done.opcode not in ("get-tuple-element", "bitcast"):
            break
    return done.name


def _notes(module: Module, simulation: _Simulation) -> Iterator[str]:
    for target, times in sorted(work.custom_calls(module, simulation.cells).items()):
        if target != "AllocateBuffer":
            yield (
                f"`{target}`, {times} a step, cannot be seen into: it is charged the bytes it reads and writes, "
                "and the FLOPs in it are missing"
            )
    for loop in simulation.loops:
        if loop.trip_count is None:
            yield f"nothing tells how often loop `{loop.name}` runs: it is counted once"


def _check(module: Module, cluster: Cluster) -> None:
    if not module.is_scheduled:
        where, fix = f"program `{module.name}`", "give the compiled program, not the lowered one"
        raise problem(where, "be simulated", "its instructions do not stand in the order they run in", fix)
    devices = module.num_partitions * module.replica_count
    if devices > cluster.num_devices:
        asked, exists = f"be simulated for `{cluster.name}` of {cluster.num_devices} GPUs", f"it runs on {devices}"
        raise problem(f"program `{module.name}`", asked, exists, "name the cluster it was compiled for")
