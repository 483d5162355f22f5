"""Search: the layouts of a cluster that can be run, the quickest first.

    meshes ─► strategies that parts try on them ─► placed ─► remat, pieces of rows ─► fits? ─► step time ─► the best

Nothing here names a parallelism: parts say which mesh axes they live on and which of their forms to try
(`Part.axes`, `Part.tried`), their rules say whether it can be, their promises what it sends. Branch and bound: layouts
come in the order of a time that they cannot beat, and the search ends where that is above what was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshpar.hardware.clusters import Cluster
from meshpar.hardware.cost_model import BLOCKS_A_GROUP
from meshpar.parallel import Strategy
from meshpar.parallel.candidates import candidates, kinds
from meshpar.parallel.expected.step_spec import StepSpec, owned_axes, split_axes
from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.parallel.pipeline import Pipeline
from meshpar.planner import memory_estimate as memory
from meshpar.planner.calibration import SEARCH, STEP
from meshpar.planner.layout import Layout, Placed, Placer, rules_key
from meshpar.planner.memory_estimate import MemoryEstimate
from meshpar.planner.time_estimate import (
    Clock,
    TimeEstimate,
    experts,
    hidden_of_weights,
    of_expert,
    rhythm,
    routed_bytes,
)
from meshpar.planner.workload import Remat, Workload
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.types import MeshparError, axes_of_spec, problem
from meshpar.sharding.units import human_bytes
from meshpar.training.sharding_table import lay_out

SLICES = 2
"""Of the rows, that layers may run beside each other."""
MOST_PLACED = 120
"""Strategies on meshes that fit and are looked at closely, the most promising first; of any, twice as many."""
OTHERS = 8
"""Of a kind so many are looked at until one fits, and twice as many where it has proved good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A layout with what is told of it."""

    layout: Layout
    memory: MemoryEstimate
    time: TimeEstimate


class _Beat(NamedTuple):
    """About what a schedule is, with remat: of a few stages simulated, whose ticks wait for each other as those of
    many do."""

    ticks: float
    stretch: float
    """How much longer than its work it takes."""
    held: float
    """Microbatches whose activations a stage holds, over all of them, times its share of the layers."""
    between: float
    """Likewise what waits between B and W, and stands beside it."""

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(pipelined: Pipeline) -> _Beat:
        stages, count = min(pipelined.stages, 4), pipelined.microbatches
        few = dataclasses.replace(pipelined, stages=stages, microbatches=4 * stages)
        beat, held = rhythm(few, 1.0, 0.0, 16 * stages), memory.holds(few)
        filling = 1 + (stages - 1) / few.microbatches
        return _Beat(
            beat.ticks * (count + pipelined.stages) / (few.microbatches + stages),
            beat.stretch / filling * (1 + (pipelined.stages - 1) / count),
            min(held.microbatches / stages, count / pipelined.stages) / count,
            (held.between + held.share * (held.between > 0)) / pipelined.stages / count,
        )


@dataclasses.dataclass(frozen=True)
class _Start:
    """A strategy on a mesh, and about how long its steps take."""

    about_s: float
    state_bytes: float
    sizes: dict[str, int]
    strategy: Strategy

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a layout's time hangs on most: axes that split a layer or its rows, and the schedule."""
        pipelined = self.strategy.pipeline
        inside = tuple(size for axis, size in self.sizes.items() if axis not in ("data", "fsdp"))
        return (*inside, pipelined and pipelined.schedule)


class Search:
    """The layouts of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster, *, fill: float = SEARCH.fill) -> None:
        self.workload, self.cluster = workload, cluster
        self.limit_bytes = int(cluster.gpu.memory_bytes * fill)
        self.placer, self.clock = Placer(workload), Clock(cluster)
        self.considered = 0
        self.smallest: Found | None = None
        """Of what did not fit, what misses the limit by least."""
        seen: dict[tuple[Remat, ...], Remat] = {}
        for remat in workload.policies:  # policies that keep the same of this model are one
            seen.setdefault((workload.held[remat], workload.flops[remat]), remat)  # type: ignore[arg-type]
        self.policies = tuple(seen.values())

    @property
    def rates(self) -> str:
        """Which figures the times are made of, and how far off they were found to be."""
        return (
            f"estimates: {self.clock.rates}, {self.cluster.links_from}; of most compiled programs they "
            f"missed the peak memory by up to {SEARCH.memory_error:.0%}, and the simulated step by up to "
            f"{SEARCH.time_error:.0%}"
        )

    def best(self, top: int) -> list[Found]:
        """Return the fastest layouts that fit, each resolved as training resolves it.

        The search starts with the most promising layout of each kind, then takes others of the best kinds, then the
        rest. With few strategies it looks at all.
        """
        found: list[Found] = []
        starts = self.starts()
        fit = [one for one in starts if one.state_bytes <= self.limit_bytes]
        # Where no state fits, the smallest is looked at, to tell by how much it does not.
        fit = fit or sorted(starts, key=lambda one: one.state_bytes)[:1]
        kinds_of: dict[Any, list[_Start]] = defaultdict(list)
        for one in fit:
            kinds_of[one.kind].append(one)

        def may_serve(start: _Start) -> bool:
            return len(fit) <= MOST_PLACED or len(found) < top or start.about_s <= found[-1].time.step_s

        times: dict[Any, float] = {}
        # What is told of stages before they are placed is the roughest: the others do not wait behind them.
        in_turn = sorted(kinds_of.items(), key=lambda one: one[1][0].strategy.pipeline is not None)
        looked: set[int] = set()
        for kind, start in ((kind, one) for kind, each in in_turn for one in each[:OTHERS]):
            if len(times) == MOST_PLACED * 2 // 3 or len(looked) == 2 * MOST_PLACED:
                break
            if kind not in times and may_serve(start):
                looked.add(id(start))
                if (time_s := self._look(start, found, top)) is not None:
                    times[kind] = time_s
        others = [one for kind in sorted(times, key=times.__getitem__) for one in kinds_of[kind][: 2 * OTHERS]]
        others = [one for one in others if id(one) not in looked]
        looked |= {id(one) for one in others}
        others += [one for one in fit if id(one) not in looked]
        left = MOST_PLACED - len(times)
        for start in filter(may_serve, others[: 2 * MOST_PLACED]):
            if left == 0:
                break
            left -= self._look(start, found, top) is not None
        return found

    def _look(self, start: _Start, found: list[Found], top: int) -> float | None:
        """Place a strategy on a mesh and put into what was found those of its layouts that are better; the quickest's
        time, None where none fits."""
        below_s = found[-1].time.step_s if len(found) == top else math.inf
        try:
            placed = self.placer.place(start.sizes, start.strategy)
            each = list(self.of(placed, below_s=below_s))
            better = [one for one in each if one.time.step_s < below_s]
            if better and self._runs(placed):
                found[:] = sorted([*found, *better], key=lambda one: one.time.step_s)[:top]
        except MeshparError:
            return None
        return min((one.time.step_s for one in each), default=None)

    def starts(self) -> list[_Start]:
        """Every strategy on every mesh, by about how long its steps take.

        Strategies with the same rules lie alike on all meshes with the same axes above one: each such form is placed
        once, and bytes and times of its meshes are reckoned together.
        """
        forms: dict[Any, list[tuple[dict[str, int], Strategy]]] = defaultdict(list)
        looks: dict[Strategy, Any] = {}
        for sizes in self.meshes():
            above = tuple(size > 1 for size in sizes.values())
            for strategy in self.strategies(sizes):
                if (look_of := looks.get(strategy)) is None:
                    look_of = looks[strategy] = tuple(map(look, strategy.parts))
                forms[above, look_of].append((sizes, strategy))
        starts = []
        for members in forms.values():
            about = np.full((2, len(members)), np.inf)
            members.sort(key=lambda one: max(one[0].values()))  # the most even mesh is the likeliest to serve
            for at, first in enumerate(members):
                with contextlib.suppress(MeshparError):
                    about[:, at:] = self._about(self.placer.place(*first), members[at:])
                    break
            starts += [_Start(a, b, *one) for a, b, one in zip(*about.tolist(), members, strict=True)]
        self.considered = sum(map(len, forms.values()))
        return sorted(starts, key=lambda one: one.about_s)

    def _about(self, placed: Placed, members: Sequence[tuple[dict[str, int], Strategy]]) -> np.ndarray:
        """About how long a step takes, and bytes of the state, `[2, members]`.

        Args:
          placed: the first of them, on its mesh.
          members: strategies that lie alike, each with its mesh.
        """
        of = {axis: np.array([sizes[axis] for sizes, _ in members], float) for axis in placed.sizes}
        work, state = self.workload, np.full(len(members), float(self.workload.whole_bytes))

        known: dict[frozenset[str], Any] = {}

        def ways(axes: Iterable[str]) -> Any:
            key = frozenset(axes)
            if key not in known:
                known[key] = math.prod((of[axis] for axis in key), start=np.ones(len(members)))
            return known[key]

        quickest = min(self.policies, key=work.flops.__getitem__)
        layout = Layout(mesh=_ANY, strategy=placed.strategy, remat=quickest)
        step, sums = placed.step_spec(layout), np.zeros(len(members))
        wire_s, wait_s = np.zeros(len(members)), np.zeros(len(members))
        for one in placed.weights:
            size, own = one.decision.leaf.size, axes_of_spec(one.decision.spec)
            state += one.decision.leaf.nbytes / ways(own)
            split = set(split_axes(step, one.decision.spec))
            over = step.ordered((split | set(split_axes(step, one.update))) & {*step.batch_axes, *step.context_axes})
            held = size / ways(split - set(over)) * (1 - 1 / ways(over))
            times = (2 if split & set(over) else 1) * work.compute_itemsize + 4
            wire_s += times * held / self._most_bytes_per_s(over, of, ways)
            sums += 4 * size / ways(set(own) - (set(step.batch_axes) - set(owned_axes(step, one.decision))))
        for slot in work.slots:
            spec = () if slot.owner is None else tuple(placed.weights[slot.owner].update)
            state += slot.nbytes / ways(axes_of_spec(spec[dim] for dim in slot.dims if dim < len(spec)))
        cut = (*step.batch_axes, *step.context_axes)
        share = step.num_shards(cut) / ways(cut) / step.num_shards(step.ordered(["stage"]))
        for part in placed.strategy.parts:
            for sent in (*part.expected_collectives(step), *part.kernels(step)):
                nbytes = sent.count[0] * sent.elements * 2 * share * (1 - 1 / ways(sent.axes))
                wait_s += nbytes / self._most_bytes_per_s(sent.axes, of, ways)
        pipes = [strategy.pipeline for _, strategy in members]
        # A stage holds its gradients' sums and its weights, gathered.
        whole = sums * (1 + work.compute_itemsize / 4) * (placed.strategy.pipeline is not None)
        busy_s: Any = self._products_s(placed, pipes, self.limit_bytes - state - whole, ways)
        busy_s += STEP.passes * work.rows * sum(one.row_bytes for one in work.held[None]) / self._device_bytes_per_s
        busy_s = busy_s + self._of_experts_s(placed, step, members, ways)
        if placed.strategy.pipeline is not None:
            ticks, fill, *_ = np.array([_Beat.of(one) for one in pipes if one is not None]).T
            busy_s = (busy_s + STEP.tick_copies * ticks * sums / self.cluster.gpu.memory_bytes_per_s) * fill
        hidden = np.array([hidden_of_weights(step, is_ahead=bool(one.prefetched_axes)) for _, one in members])
        cover = np.array([STEP.cover_prefetched if one.prefetched_axes else STEP.cover for _, one in members])
        pieces = np.array([1 if one is None else one.microbatches for one in pipes])
        can_slice = work.runs_layers & (work.rows >= SLICES * pieces * ways(step.batch_axes))
        hidden_s = wire_s * hidden + wait_s * np.where(can_slice, STEP.hidden["interleaved"], 0.0)
        return np.stack([busy_s + wire_s + wait_s - np.minimum(hidden_s, cover * busy_s), state])

    def _products_s(
        self, placed: Placed, pipes: Sequence[Pipeline | None], left_bytes: np.ndarray, ways: Callable[..., Any]
    ) -> Any:
        """Of the quickest policy; in stages, which hold microbatches, of the quickest whose activations fit what the
        state leaves."""
        work, of_rows = self.workload, placed.step_spec(Layout(mesh=_ANY, strategy=placed.strategy))
        floors = {
            remat: self.clock.floor_s(placed, Layout(mesh=_ANY, strategy=placed.strategy, remat=remat))
            for remat in sorted(self.policies, key=work.flops.__getitem__, reverse=True)
        }
        if placed.strategy.pipeline is None:
            return min(floors.values())
        rows = work.rows / ways((*of_rows.batch_axes, *of_rows.context_axes, *of_rows.tensor_axes))
        held, between = np.array([_Beat.of(one)[2:] for one in pipes if one is not None]).T
        width = work.compute_itemsize
        waits = rows * between * sum(one.row_bytes for one in work.held["stages"] if one.itemsize == width)
        found: Any = np.inf
        for remat, floor_s in floors.items():
            kept = rows * held * sum(one.row_bytes for one in work.held[remat]) * SEARCH.stage_memory + waits
            found = np.where(kept <= left_bytes, floor_s, np.minimum(found, floor_s * SEARCH.misfit_time))
        return found

    def _of_experts_s(
        self,
        placed: Placed,
        step: StepSpec,
        members: Sequence[tuple[dict[str, int], Strategy]],
        ways: Callable[..., Any],
    ) -> Any:
        """What rows of experts move: in blocks, of which a device has at least so many between its own, and as many
        rows as there is room for."""
        each, work = experts(placed), self.workload
        if not each:
            return 0.0
        ranks, tokens = ways(owned_axes(step, each[0])), (work.tokens or 0) / ways(step.batch_axes)
        here = work.num_experts / ranks
        one_expert = sum(of_expert(step, one, work.num_experts, ways) for one in each)
        pieces = np.array([1 if one.pipeline is None else one.pipeline.microbatches for _, one in members])
        block_bytes = np.where(here > 1, STEP.block_bytes_of_several, STEP.block_bytes)
        most = ranks * np.minimum(work.choices, here)
        bound = most if work.bound_factor is None else np.minimum(most, work.bound_factor * work.choices)
        room = np.where(ranks > 1, bound, work.choices)
        moved = pieces * block_bytes * one_expert * BLOCKS_A_GROUP * here + routed_bytes(placed, tokens * room)
        return moved / ways(step.ordered(["stage"])) / self.cluster.gpu.memory_bytes_per_s

    @property
    def _device_bytes_per_s(self) -> float:
        return self.cluster.num_devices * self.cluster.gpu.memory_bytes_per_s

    def _most_bytes_per_s(self, axes: Sequence[str], of: Mapping[str, Any], ways: Callable[..., Any]) -> Any:
        """The most that a ring over some axes can have between its GPUs, whichever others stand between them."""
        inside, across = self.cluster.inside.bytes_per_s, self.cluster.across.bytes_per_s
        order = list(of)
        inner = ways(order[1 + max((order.index(axis) for axis in axes), default=0) :])
        ports = np.clip(self.cluster.gpus_per_node / inner, 1, ways(axes))
        return np.where(ways(axes) * inner <= self.cluster.gpus_per_node, inside, np.minimum(ports * across, inside))

    def meshes(self) -> Iterator[dict[str, int]]:
        """Sizes of axes, as many devices as the cluster has."""
        sizes = {axis: self._sizes_of(axis) for axis in self._axes()}
        return self._filled(dict.fromkeys(sizes, 1), sizes, self.cluster.num_devices)

    def strategies(self, sizes: Mapping[str, int]) -> Iterator[Strategy]:
        """Yield the strategies of a mesh under which the loss can be evaluated."""
        for strategy in candidates(self._search_space(sizes)):
            if self.workload.is_divisible or (strategy.pipeline is None and strategy.quantize is None):
                yield strategy

    def of(self, placed: Placed, *, below_s: float = math.inf) -> Iterator[Found]:
        """The layouts of a strategy on a mesh that fit: by remat policy, in the fewest micro-steps that do; in slices
        of the rows, too, where a step without its messages were quicker than that."""
        rows, pipelined = self.workload.rows // placed.batch_ways, placed.strategy.pipeline
        counts = [1] if pipelined is not None or not self.workload.is_divisible else _divisors(rows)
        spec = _spec(placed.sizes)
        for remat in self.policies:
            for count in counts:
                layout = Layout(mesh=spec, strategy=placed.strategy, remat=remat, accumulate=count)
                held = self.fits(placed, layout)
                if held is not None:
                    time = self.clock.estimate(placed, layout, held)
                    yield Found(layout=layout, memory=held, time=time)
                    if time.step_s - sum(time.exposed_s.values()) < below_s:
                        yield from self._sliced(placed, layout, held, time.step_s)
                    if not self.clock.is_crowded(held):  # more micro-steps send more, but leave room to hide it
                        break

    def _sliced(self, placed: Placed, layout: Layout, held: MemoryEstimate, whole_s: float) -> Iterator[Found]:
        """A layout in slices of the rows, where they divide and it is quicker than in whole rows."""
        work = self.workload
        if work.runs_layers and work.rows % (placed.batch_ways * layout.microbatches * SLICES) == 0:
            layout = dataclasses.replace(layout, interleave=SLICES)
            time = self.clock.estimate(placed, layout, held)
            if time.step_s < whole_s:
                yield Found(layout=layout, memory=held, time=time)

    def fits(self, placed: Placed, layout: Layout) -> MemoryEstimate | None:
        """What a layout holds, where it fits; else it is remembered if it missed by least."""
        try:
            held = memory.estimate(placed, layout)
        except MeshparError:
            return None
        if held.peak_bytes <= self.limit_bytes:
            return held
        if self.smallest is None or held.peak_bytes < self.smallest.memory.peak_bytes:
            nothing = TimeEstimate(
                compute_s=0, memory_s=0, copied_s=0, network_s={}, exposed_s={}, sent_bytes={}, bubble_s=0
            )  # fmt: skip
            self.smallest = Found(layout=layout, memory=held, time=nothing)
        return None

    def on_mesh(self, mesh: MeshSpec) -> Found:
        """The quickest that parts try on a mesh, or else the smallest; errors as for `estimate`."""
        sizes, found = mesh.resolve(self.cluster.num_devices), []
        why: MeshparError | None = None
        for strategy in self.strategies(sizes):
            try:
                placed = self.placer.place(sizes, strategy)
                is_undivided = strategy.pipeline is not None or not self.workload.is_divisible
                most = 1 if is_undivided else max(1, self.workload.rows // placed.batch_ways)
                cuts = [(remat, count) for remat in self.policies for count in {1, most}]
                layout = Layout(mesh=_spec(sizes), strategy=strategy)
                found += [self.estimate(dataclasses.replace(layout, remat=cut[0], accumulate=cut[1])) for cut in cuts]
                found += self.of(placed)
            except MeshparError as error:
                why = error
        if not found:
            exists = "no parallelism is tried on it"
            raise why or problem(f"mesh {human_mesh(sizes)}", "train on it", exists, "give its axes other sizes")
        fits = [one for one in found if one.memory.peak_bytes <= self.limit_bytes]
        if fits:
            return min(fits, key=lambda one: one.time.step_s)
        return min(found, key=lambda one: one.memory.peak_bytes)

    def estimate(self, layout: Layout) -> Found:
        """What is told of one layout, whether it fits or not.

        Raises:
          ValueError: it does not resolve, or the batch does not divide.
        """
        self._check_layers(layout)
        sizes = layout.mesh.resolve(self.cluster.num_devices)
        placed = self.placer.place(sizes, layout.strategy)
        pieces = placed.batch_ways * layout.microbatches * layout.interleave
        if self.workload.rows % pieces:
            raise problem(
                layout.label,
                f"cut a batch of {self.workload.rows} rows into {pieces}",
                f"{placed.batch_ways} ranks split the batch, and each {layout.microbatches * layout.interleave} times",
                f"use a batch of {-(-self.workload.rows // pieces) * pieces} rows, or fewer pieces",
            )
        self._check_axes(layout.strategy, sizes)
        self.resolve(placed)
        held = memory.estimate(placed, layout)
        return Found(layout=layout, memory=held, time=self.clock.estimate(placed, layout, held))

    def _check_layers(self, layout: Layout) -> None:
        """Raises `ValueError` for a policy that no estimate was made for, and for what only `scan_layers` does."""
        if layout.remat not in self.workload.policies:
            exists = f"estimates are made for {', '.join(map(str, self.workload.policies))}"
            raise problem(f"remat={layout.remat!r}", "tell what layers keep by it", exists, "take one of these")
        if not self.workload.runs_layers and (layout.remat, layout.interleave) != (None, 1):
            asked = f"run layers by remat={layout.remat!r}, interleave={layout.interleave}"
            exists, fix = (
                "the model never calls meshpar.scan_layers",
                "leave them out, or run layers by scan_layers",
            )
            raise problem(layout.label, asked, exists, fix)

    def _check_axes(self, strategy: Strategy, sizes: Mapping[str, int]) -> None:
        """Raises `ValueError` for an axis along which every rank would do the same."""
        used = {axis for rules in strategy.rules for axis in rules.axes}
        used |= {axis for part in strategy.parts for axis in part.axes}
        for axis, size in sizes.items():
            if size > 1 and axis not in used:
                exists = f"nothing is split over it: its {size} ranks would repeat the same rows"
                asked = f"train by {strategy.label}"
                raise problem(f"mesh axis `{axis}`", asked, exists, f"take one of {', '.join(self._axes())}")

    def resolve(self, placed: Placed) -> None:
        """Resolve every leaf as training does; errors as in `shardings`."""
        spec, work = _spec(placed.sizes, least=1), self.workload
        mesh = spec.abstract(self.cluster.num_devices, devices_per_node=self.cluster.gpus_per_node)
        lay_out(work.model, mesh, placed.strategy, work.tx, work.precision)

    def _runs(self, placed: Placed) -> bool:
        """Whether it resolves, as a whole, as training resolves it."""
        try:
            self.resolve(placed)
        except MeshparError:
            return False
        return True

    # -- Meshes -------------------------------------------------------------------------------------------------------

    def _axes(self) -> list[str]:
        """Axes that parts live on, in a mesh's order."""
        named = {axis: 1 for state in (True, False) for kind in kinds(shards_state=state) for axis in kind.axes}
        return list(_spec(named, least=1))

    def _sizes_of(self, axis: str) -> list[int]:
        """Sizes of an axis that the model can be split over, by itself."""
        inside = self.cluster.gpus_per_node if axis in MeshSpec().inside_node else self.cluster.num_devices
        sizes = [size for size in _divisors(self.cluster.num_devices) if inside % size == 0]
        return [size for size in sizes if size == 1 or self._can_split(axis, size)]

    def _can_split(self, axis: str, size: int) -> bool:
        sizes = dict(_spec({axis: size}))
        for strategy in self.strategies(sizes):
            try:
                placed = self.placer.place(sizes, strategy)
            except MeshparError:
                continue
            if self.workload.rows % placed.batch_ways == 0 and all(_is_used(placed, one) for one in strategy.parts):
                return True
        return False

    def _filled(self, so_far: dict[str, int], sizes: Mapping[str, list[int]], left: int) -> Iterator[dict[str, int]]:
        axis = next(iter(sizes))
        rest = {name: each for name, each in sizes.items() if name != axis}
        for size in sizes[axis]:
            if left % size == 0 and (rest or size == left):
                mesh = {**so_far, axis: size}
                yield from self._filled(mesh, rest, left // size) if rest else iter([mesh])

    def _search_space(self, sizes: Mapping[str, int]) -> SearchSpace:
        work = self.workload
        return SearchSpace(
            sizes=sizes, rows=work.rows, seq_len=work.seq_len, num_layers=work.num_layers,
            is_node_first=work.nodes_visited is not None,
        )  # fmt: skip


_ANY = MeshSpec()


def _is_used(placed: Placed, part: Parallelism) -> bool:
    """Whether a part is about some parameter, as far as it is about parameters at all."""
    if not any(list(rules.sources) for rules in part.rules()[:3]):
        return True
    specs = (spec for one in placed.weights for spec in (one.decision.spec, one.grads, one.update))
    return bool({axis for spec in specs for axis in axes_of_spec(spec)} & set(part.axes))


def _spec(sizes: Mapping[str, int], *, least: int = 2) -> MeshSpec:
    """The mesh with the axes of at least so many ranks."""
    arguments: dict[str, Any] = {axis: size for axis, size in sizes.items() if size >= least}
    return MeshSpec(**arguments)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def shortage(search: Search) -> str:
    """What is short where nothing fits, and by how much."""
    if search.smallest is None:
        return "no mesh of its GPUs splits this model and batch"
    held, limit = search.smallest.memory, search.limit_bytes
    return (
        f"the smallest layout found takes {human_bytes(held.peak_bytes)} of {human_bytes(limit)} a GPU, "
        f"{human_bytes(held.peak_bytes - limit)} too much ({human_bytes(held.state_bytes)} of it state): "
        f"{search.smallest.layout.label}"
    )
