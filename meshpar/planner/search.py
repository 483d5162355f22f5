"""Search for the fastest layouts on a cluster.

    meshes ─► candidate strategies ─► placed ─► remat, micro-steps ─► fits in memory? ─► step time ─► the fastest

The search knows no particular parallelism. Parallelisms state their mesh axes and their candidates
(`Parallelism.axes`, `Parallelism.candidates`), their rules decide whether a layout is possible, and their expected
collectives determine its messages. Layouts are ordered by a coarse estimate, and the search stops when this estimate
exceeds the times found.
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
from meshpar.parallel.execution import Execution, owned_axes, split_axes
from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.parallel.pipeline import Pipeline
from meshpar.planner import memory_estimate as memory
from meshpar.planner.calibration import SEARCH, STEP
from meshpar.planner.layout import Layout, Placed, Placer, rules_key
from meshpar.planner.memory_estimate import MemoryEstimate
from meshpar.planner.time_estimate import (
    Clock,
    TimeEstimate,
    elements_per_expert,
    experts,
    hidden_of_weights,
    kernel_bytes,
    routed_bytes,
    schedule_timing,
)
from meshpar.planner.workload import Remat, Workload
from meshpar.sharding.errors import MeshparError, check_choice, problem
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.types import axes_of_spec
from meshpar.training.sharding_table import lay_out

SLICES = 2
"""Number of batch slices in layouts with `batch_slices`."""
MAX_EVALUATED = 120
"""Maximum number of strategies that fit and are evaluated in detail. Each phase of the search evaluates at most twice
as many strategies, fitting or not."""
PER_KIND = 8
"""Maximum number of strategies of a kind to evaluate until a layout fits. It is doubled for the fastest kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its estimates."""

    layout: Layout
    memory: MemoryEstimate
    time: TimeEstimate


class _ScheduleEstimate(NamedTuple):
    """Approximate times and memory of a pipeline schedule, extrapolated from a schedule with at most four stages."""

    moved_sums: float
    """How often a step moves the bytes of the gradient sums."""
    stretch: float
    """Makespan divided by the time of the ops of a stage."""
    saved: float
    """Fraction of the microbatches with saved activations on a stage, times its fraction of the layers."""
    deferred: float
    """Inputs of deferred weight gradients, in the unit of `saved`."""

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(pipeline: Pipeline) -> _ScheduleEstimate:
        stages, count = min(pipeline.stages, 4), pipeline.microbatches
        short = dataclasses.replace(pipeline, stages=stages, microbatches=4 * stages)
        timing, load = schedule_timing(short, 1.0, 0.0, 16 * stages), memory.stage_load(short)
        fill = 1 + (stages - 1) / short.microbatches
        return _ScheduleEstimate(
            # The compute dtype has half the bytes of the sums.
            timing.moved_bytes(0.5, 1.0) * (count + pipeline.stages) / (short.microbatches + stages)
            + count * STEP.copied_sums * (not timing.is_uniform),
            timing.stretch / fill * (1 + (pipeline.stages - 1) / count),
            min(load.microbatches / stages, count / pipeline.stages) / count,
            (load.deferred + load.chunk * (load.deferred > 0)) / pipeline.stages / count,
        )


@dataclasses.dataclass(frozen=True)
class _Start:
    """A strategy on a mesh with a coarse estimate of its step time."""

    step_s: float
    state_bytes: float
    sizes: dict[str, int]
    strategy: Strategy

    @property
    def kind(self) -> tuple[Any, ...]:
        """The sizes of axes other than `data` and `fsdp`, and the schedule: they determine the step time most."""
        pipeline = self.strategy.pipeline
        sizes = tuple(size for axis, size in self.sizes.items() if axis not in ("data", "fsdp"))
        return (*sizes, pipeline and pipeline.schedule)


class Search:
    """Searches the layouts of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster, *, fill: float = SEARCH.fill) -> None:
        self.workload, self.cluster = workload, cluster
        self.limit_bytes = int(cluster.gpu.memory_bytes * fill)
        self.placer, self.clock = Placer(workload), Clock(cluster)
        self.considered = 0
        self.smallest: tuple[Layout, MemoryEstimate] | None = None
        """The smallest of the layouts that do not fit."""
        distinct: dict[tuple[Remat, ...], Remat] = {}
        for remat in workload.policies:  # policies may save the same activations of a model
            distinct.setdefault((workload.activations[remat], workload.flops[remat]), remat)  # type: ignore[arg-type]
        self.policies = tuple(distinct.values())

    @property
    def rates(self) -> str:
        """Sources of the rates, and the errors of the estimates."""
        rates, work = self.clock.rates, self.workload
        attention = ""
        if work.attention[None]:
            attention = f", {rates.of_attention(self.clock.attention_kernel(work), work.attention_size)}"
        elif work.products_bytes[None]:
            attention = ", attention in XLA's matmuls by its memory traffic"
        return (
            f"estimates: {rates.of_products}{attention}, {self.cluster.links_from}; for most compiled programs, their "
            f"error is at most {SEARCH.memory_error:.0%} of the peak memory and {SEARCH.time_error:.0%} of the "
            "simulated step"
        )

    def best(self, top: int) -> list[Candidate]:
        """Return the fastest layouts that fit, each resolved as in training.

        The search evaluates the most promising layouts of each kind first, then other layouts of the best kinds, and
        then the rest. If there are few strategies, it evaluates all of them.
        """
        fastest: list[Candidate] = []
        starts = self.starts()
        fit = [start for start in starts if start.state_bytes <= self.limit_bytes]
        # If no state fits, the smallest is evaluated, for the error message.
        fit = fit or sorted(starts, key=lambda start: start.state_bytes)[:1]
        by_kind: dict[Any, list[_Start]] = defaultdict(list)
        for start in fit:
            by_kind[start.kind].append(start)

        def is_promising(start: _Start) -> bool:
            return len(fit) <= MAX_EVALUATED or len(fastest) < top or start.step_s <= fastest[-1].time.step_s

        times: dict[Any, float] = {}
        # The coarse estimates of pipelines are the least accurate, so pipelines are evaluated last.
        ordered = sorted(by_kind.items(), key=lambda item: item[1][0].strategy.pipeline is not None)
        evaluated: set[int] = set()
        for kind, start in ((kind, start) for kind, starts in ordered for start in starts[:PER_KIND]):
            if len(times) == MAX_EVALUATED * 2 // 3 or len(evaluated) == 2 * MAX_EVALUATED:
                break
            if kind not in times and is_promising(start):
                evaluated.add(id(start))
                if (time_s := self._evaluate(start, fastest, top)) is not None:
                    times[kind] = time_s
        fastest_kinds = sorted(times, key=times.__getitem__)
        remaining = [start for kind in fastest_kinds for start in by_kind[kind][: 2 * PER_KIND]]
        remaining = [start for start in remaining if id(start) not in evaluated]
        evaluated |= {id(start) for start in remaining}
        remaining += [start for start in fit if id(start) not in evaluated]
        budget = MAX_EVALUATED - len(times)
        for start in filter(is_promising, remaining[: 2 * MAX_EVALUATED]):
            if budget == 0:
                break
            budget -= self._evaluate(start, fastest, top) is not None
        return fastest

    def _evaluate(self, start: _Start, fastest: list[Candidate], top: int) -> float | None:
        """Evaluate the layouts of a strategy on a mesh and merge the fastest into `fastest`.

        Returns:
          The time of the fastest layout that fits, or None if none fits.
        """
        below_s = fastest[-1].time.step_s if len(fastest) == top else math.inf
        try:
            placed = self.placer.place(start.sizes, start.strategy)
            layouts = list(self.of(placed, below_s=below_s))
        except MeshparError:
            return None
        if better := [layout for layout in layouts if layout.time.step_s < below_s]:
            with contextlib.suppress(MeshparError):
                self.resolve(placed)
                fastest[:] = sorted([*fastest, *better], key=lambda layout: layout.time.step_s)[:top]
        return min((layout.time.step_s for layout in layouts), default=None)

    def starts(self) -> list[_Start]:
        """Return all strategies on all meshes, ordered by a coarse estimate of the step time.

        Strategies with equal rules have equal shardings if the same mesh axes are larger than 1. Such a group is placed
        once, and the times and bytes of its members are computed as arrays.
        """
        groups: dict[Any, list[tuple[dict[str, int], Strategy]]] = defaultdict(list)
        keys: dict[Strategy, Any] = {}
        for sizes in self.meshes():
            used_axes = tuple(size > 1 for size in sizes.values())
            for strategy in self.strategies(sizes):
                if (key := keys.get(strategy)) is None:
                    key = keys[strategy] = tuple(map(rules_key, strategy.components))
                groups[used_axes, key].append((sizes, strategy))
        starts = []
        for members in groups.values():
            estimates = np.full((2, len(members)), np.inf)
            members.sort(key=lambda member: max(member[0].values()))  # the most even mesh is the likeliest to be valid
            for index, first in enumerate(members):
                with contextlib.suppress(MeshparError):
                    estimates[:, index:] = self._coarse_estimate(self.placer.place(*first), members[index:])
                    break
            starts += [_Start(a, b, *member) for a, b, member in zip(*estimates.tolist(), members, strict=True)]
        self.considered = sum(map(len, groups.values()))
        return sorted(starts, key=lambda start: start.step_s)

    def _coarse_estimate(self, placed: Placed, members: Sequence[tuple[dict[str, int], Strategy]]) -> np.ndarray:
        """Return the step time and the bytes of the state, `[2, members]`.

        Args:
          placed: the first member.
          members: meshes and strategies with the same sharding.
        """
        of = {axis: np.array([sizes[axis] for sizes, _ in members], float) for axis in placed.sizes}
        work, state = self.workload, np.full(len(members), float(self.workload.replicated_bytes))

        cache: dict[frozenset[str], Any] = {}

        def shards(axes: Iterable[str]) -> Any:
            key = frozenset(axes)
            if key not in cache:
                cache[key] = math.prod((of[axis] for axis in key), start=np.ones(len(members)))
            return cache[key]

        fewest_flops = min(self.policies, key=work.flops.__getitem__)
        layout = Layout(mesh=_ANY, strategy=placed.strategy, remat=fewest_flops)
        step, sums = placed.execution(layout), np.zeros(len(members))
        weights_s, activations_s = np.zeros(len(members)), np.zeros(len(members))
        for weight in placed.weights:
            size, axes = weight.leaf.size, axes_of_spec(weight.spec)
            state += weight.leaf.nbytes / shards(axes)
            split = set(split_axes(step, weight.spec))
            over = step.ordered((split | set(split_axes(step, weight.update))) & {*step.batch_axes, *step.context_axes})
            sent = size / shards(split - set(over)) * (1 - 1 / shards(over))
            times = (2 if split & set(over) else 1) * work.compute_itemsize + 4
            weights_s += times * sent / self._max_bytes_per_s(over, of, shards)
            sums += 4 * size / shards(set(axes) - (set(step.batch_axes) - set(owned_axes(step, weight.decision))))
        for slot in work.slots:
            spec = () if slot.owner is None else tuple(placed.weights[slot.owner].update)
            state += slot.nbytes / shards(axes_of_spec(spec[dim] for dim in slot.dims if dim < len(spec)))
        cut = (*step.batch_axes, *step.context_axes)
        fraction = step.num_shards(cut) / shards(cut) / step.num_shards(step.ordered(["stage"]))
        for part in placed.strategy.components:
            for expected in (*part.expected_collectives(step), *part.kernels(step)):
                nbytes = expected.count[0] * expected.elements * 2 * fraction * (1 - 1 / shards(expected.axes))
                activations_s += nbytes / self._max_bytes_per_s(expected.axes, of, shards)
        pipelines = [strategy.pipeline for _, strategy in members]
        # A stage keeps its accumulated gradients and its gathered weights.
        unsharded = sums * (1 + work.compute_itemsize / 4) * (placed.strategy.pipeline is not None)
        compute_s: Any = self._matmuls_s(placed, pipelines, self.limit_bytes - state - unsharded, shards)
        moved = (
            STEP.passes
            * work.examples
            * sum(array.row_bytes for array in work.activations[None])
            / self.cluster.num_devices
        )
        compute_s = compute_s + moved / self.cluster.memory_bytes_per_s
        compute_s = compute_s + self._experts_s(placed, step, members, shards)
        if placed.strategy.pipeline is not None:
            moved_sums, fill, *_ = np.array([_ScheduleEstimate.of(each) for each in pipelines if each is not None]).T
            compute_s = (compute_s + moved_sums * sums / self.cluster.memory_bytes_per_s) * fill
        prefetched = [strategy.gathering.ahead > 0 for _, strategy in members]
        hidden = np.array([hidden_of_weights(step, is_ahead=is_ahead) for is_ahead in prefetched])
        cover = np.array([STEP.cover_prefetched if is_ahead else STEP.cover for is_ahead in prefetched])
        microbatches = np.array([1 if each is None else each.microbatches for each in pipelines])
        can_slice = work.runs_layers & (work.examples >= SLICES * microbatches * shards(step.batch_axes))
        hidden_s = weights_s * hidden + activations_s * np.where(can_slice, STEP.hidden["interleaved"], 0.0)
        return np.stack([compute_s + weights_s + activations_s - np.minimum(hidden_s, cover * compute_s), state])

    def _matmuls_s(
        self,
        placed: Placed,
        pipelines: Sequence[Pipeline | None],
        available_bytes: np.ndarray,
        shards: Callable[..., Any],
    ) -> Any:
        """Return the time of the matmuls with the fastest remat policy.

        For pipelines, only policies whose activations fit in memory are considered.
        """
        work, spec = self.workload, placed.execution(Layout(mesh=_ANY, strategy=placed.strategy))
        policies = sorted(self.policies, key=work.flops.__getitem__, reverse=True)
        bandwidth = self.cluster.memory_bytes_per_s
        floors = {
            remat: self.clock.floor_s(work, remat) + self.clock.products_bytes(work, remat) / bandwidth
            for remat in policies
        }
        if placed.strategy.pipeline is None:
            return min(floors.values())
        examples = work.examples / shards((*spec.batch_axes, *spec.context_axes, *spec.tensor_axes))
        schedules = [_ScheduleEstimate.of(pipeline) for pipeline in pipelines if pipeline is not None]
        saved, deferred = np.array([schedule[2:] for schedule in schedules]).T
        itemsize = work.compute_itemsize
        inputs = examples * deferred * sum(x.row_bytes for x in work.activations["stages"] if x.itemsize == itemsize)
        time_s: Any = np.inf
        for remat, floor_s in floors.items():
            row_bytes = sum(array.row_bytes for array in work.activations[remat])
            needed = examples * saved * row_bytes * SEARCH.stage_memory + inputs
            time_s = np.where(needed <= available_bytes, floor_s, np.minimum(time_s, floor_s * SEARCH.misfit_time))
        return time_s

    def _experts_s(
        self,
        placed: Placed,
        step: Execution,
        members: Sequence[tuple[dict[str, int], Strategy]],
        shards: Callable[..., Any],
    ) -> Any:
        """Return the time in which MoE layers move routed tokens and blocks of expert gradients."""
        decisions, work = experts(placed), self.workload
        if not decisions:
            return 0.0
        ranks, tokens = shards(owned_axes(step, decisions[0])), (work.tokens or 0) / shards(step.batch_axes)
        num_local = work.num_experts / ranks
        size = sum(elements_per_expert(step, decision, work.num_experts, shards) for decision in decisions)
        pipelines = [strategy.pipeline for _, strategy in members]
        microbatches = np.array([1 if pipeline is None else pipeline.microbatches for pipeline in pipelines])
        block_bytes = np.where(num_local > 1, STEP.block_bytes_of_several, STEP.block_bytes)
        max_rows = ranks * np.minimum(work.experts_per_token, num_local)
        if work.bound_factor is not None:
            max_rows = np.minimum(max_rows, work.bound_factor * work.experts_per_token)
        capacity = np.where(ranks > 1, max_rows, work.experts_per_token)
        if work.grouped_kernels is not None:
            rows, experts_run = tokens * work.experts_per_token, microbatches * num_local
            moved = kernel_bytes(placed, size, experts_run, rows, tokens * capacity)
        else:
            moved = microbatches * block_bytes * size * BLOCKS_A_GROUP * num_local
            moved = moved + routed_bytes(placed, tokens * capacity, STEP.routed_passes)
        return moved / shards(step.ordered(["stage"])) / self.cluster.memory_bytes_per_s

    def _max_bytes_per_s(self, axes: Sequence[str], of: Mapping[str, Any], shards: Callable[..., Any]) -> Any:
        """Return an upper bound of the bandwidth of a ring over `axes`. `of` has all axes in the order of the mesh."""
        inside, across = self.cluster.inside.bytes_per_s, self.cluster.across.bytes_per_s
        order = list(of)
        inner = shards(order[1 + max((order.index(axis) for axis in axes), default=0) :])
        ports = np.clip(self.cluster.gpus_per_node / inner, 1, shards(axes))
        return np.where(shards(axes) * inner <= self.cluster.gpus_per_node, inside, np.minimum(ports * across, inside))

    def meshes(self) -> Iterator[dict[str, int]]:
        """Yield the meshes that use all devices of the cluster and whose axes can shard the model."""
        num_devices, inside_node = self.cluster.num_devices, MeshSpec().inside_node
        meshes: list[dict[str, int]] = [{}]
        for axis in self._axes():
            max_size = self.cluster.gpus_per_node if axis in inside_node else num_devices
            sizes = [size for size in _divisors(num_devices) if max_size % size == 0]
            sizes = [size for size in sizes if size == 1 or self._can_split(axis, size)]
            meshes = [
                {**mesh, axis: size}
                for mesh in meshes
                for size in sizes
                if num_devices // math.prod(mesh.values()) % size == 0
            ]
        return (mesh for mesh in meshes if math.prod(mesh.values()) == num_devices)

    def strategies(self, sizes: Mapping[str, int]) -> Iterator[Strategy]:
        """Yield the strategies of a mesh under which the loss can be evaluated, and that the layers support."""
        work = self.workload
        space = SearchSpace(
            sizes=sizes, examples=work.examples, seq_len=work.seq_len, num_layers=work.num_layers,
            is_node_first=work.nodes_visited is not None,
        )  # fmt: skip
        for strategy in candidates(space):
            divides = strategy.pipeline is not None or strategy.gathering.formats is not None
            if work.is_divisible or not divides:
                yield strategy

    def of(self, placed: Placed, *, below_s: float = math.inf) -> Iterator[Candidate]:
        """Yield the layouts of a strategy on a mesh that fit in memory.

        Each remat policy has the fewest micro-steps that fit, or more if memory is too tight for overlap. Batch slices
        are tried if the step would be faster than `below_s` without exposed messages.
        """
        work, is_undivided = self.workload, placed.strategy.pipeline is not None or not self.workload.is_divisible
        counts = [1] if is_undivided else _divisors(work.examples // placed.batch_shards)
        spec = _spec(placed.sizes)
        for remat in self.policies:
            for count in counts:
                layout = Layout(mesh=spec, strategy=placed.strategy, remat=remat, accumulate=count)
                if (estimate := self.fits(placed, layout)) is None:
                    continue
                time = self.clock.estimate(placed, layout, estimate)
                yield Candidate(layout=layout, memory=estimate, time=time)
                num_parts = placed.batch_shards * layout.microbatches * SLICES
                can_slice = work.examples % num_parts == 0 and work.runs_layers
                least_s = time.step_s - sum(time.exposed_s.values())
                if can_slice and least_s < below_s and placed.sends_activations(layout):
                    sliced = dataclasses.replace(layout, batch_slices=SLICES)
                    sliced_time = self.clock.estimate(placed, sliced, estimate)
                    if sliced_time.step_s < time.step_s:
                        yield Candidate(layout=sliced, memory=estimate, time=sliced_time)
                if not self.clock.is_crowded(estimate):  # more micro-steps send more, but leave memory for overlap
                    break

    def fits(self, placed: Placed, layout: Layout) -> MemoryEstimate | None:
        """Return the memory of a layout, or None if it does not fit. Errors name the smallest such layout."""
        try:
            estimate = memory.estimate(placed, layout)
        except MeshparError:
            return None
        if estimate.peak_bytes <= self.limit_bytes:
            return estimate
        if self.smallest is None or estimate.peak_bytes < self.smallest[1].peak_bytes:
            self.smallest = layout, estimate
        return None

    def on_mesh(self, mesh: MeshSpec) -> Candidate:
        """Return the fastest candidate on a mesh, or the smallest if none fits. Raises like `estimate`."""
        sizes, candidates = mesh.resolve(self.cluster.num_devices), []
        last_error: MeshparError | None = None
        for strategy in self.strategies(sizes):
            try:
                placed = self.placer.place(sizes, strategy)
                is_undivided = strategy.pipeline is not None or not self.workload.is_divisible
                max_steps = 1 if is_undivided else max(1, self.workload.examples // placed.batch_shards)
                layout = Layout(mesh=_spec(sizes), strategy=strategy)
                candidates += [
                    self.estimate(dataclasses.replace(layout, remat=remat, accumulate=accumulate))
                    for remat in self.policies
                    for accumulate in {1, max_steps}
                ]
                candidates += self.of(placed)
            except MeshparError as error:
                last_error = error
        if not candidates:
            reason, fix = "no parallelism has a candidate for it", "use other axis sizes"
            raise last_error or problem(f"mesh {human_mesh(sizes)}", "train on it", reason, fix, code="does-not-fit")
        fits = [layout for layout in candidates if layout.memory.peak_bytes <= self.limit_bytes]
        smallest = min(candidates, key=lambda layout: layout.memory.peak_bytes)
        return min(fits, key=lambda layout: layout.time.step_s, default=smallest)

    def estimate(self, layout: Layout) -> Candidate:
        """Return the estimates of a layout, whether it fits or not."""
        check_choice("plan", "a traced remat policy", self.workload.policies, remat=layout.remat)
        if not self.workload.runs_layers and (layout.remat, layout.batch_slices) != (None, 1):
            requested = f"use remat={layout.remat!r}, batch_slices={layout.batch_slices}"
            reason, fix = "the model does not call meshpar.scan_layers", "remove them, or use scan_layers in the model"
            raise problem(layout.label, requested, reason, fix, code="unsupported-feature")
        sizes = layout.mesh.resolve(self.cluster.num_devices)
        placed = self.placer.place(sizes, layout.strategy)
        pieces = placed.batch_shards * layout.microbatches * layout.batch_slices
        if self.workload.examples % pieces:
            per_rank = layout.microbatches * layout.batch_slices
            raise problem(
                layout.label,
                f"divide a batch of {self.workload.examples} examples",
                f"{placed.batch_shards} ranks with {per_rank} micro-steps and slices each need a multiple of {pieces}",
                f"use a batch of {-(-self.workload.examples // pieces) * pieces}, or fewer micro-steps or slices",
                code="indivisible",
            )
        used = {axis for rules in layout.strategy.rules for axis in rules.axes}
        used |= {axis for part in layout.strategy.components for axis in part.axes}
        for axis, size in sizes.items():
            if size > 1 and axis not in used:
                reason = f"nothing is sharded over it, so its {size} ranks would repeat the same work"
                requested, fix = f"train with {layout.strategy.label}", f"use {', '.join(self._axes())}"
                raise problem(f"mesh axis `{axis}`", requested, reason, fix, code="unused-axis")
        self.resolve(placed)
        estimate = memory.estimate(placed, layout)
        return Candidate(layout=layout, memory=estimate, time=self.clock.estimate(placed, layout, estimate))

    def resolve(self, placed: Placed) -> None:
        """Resolve all leaves as in training. Raises like `shardings`."""
        spec, work = _spec(placed.sizes, min_size=1), self.workload
        mesh = spec.abstract(self.cluster.num_devices, devices_per_node=self.cluster.gpus_per_node)
        lay_out(work.model, mesh, placed.strategy, work.tx, work.precision)

    def _axes(self) -> list[str]:
        """Return the mesh axes of all parallelisms, in the order of a mesh."""
        named = {axis: 1 for state in (True, False) for kind in kinds(shards_state=state) for axis in kind.axes}
        return list(_spec(named, min_size=1))

    def _can_split(self, axis: str, size: int) -> bool:
        """Return whether a strategy can use an axis of this size, to shard a parameter or only the batch."""
        sizes = dict(_spec({axis: size}))
        for strategy in self.strategies(sizes):
            with contextlib.suppress(MeshparError):
                placed = self.placer.place(sizes, strategy)
                specs = (spec for weight in placed.weights for spec in (weight.spec, weight.grads, weight.update))
                used = {axis for spec in specs for axis in axes_of_spec(spec)}
                # A parallelism without rules for parameters shards the batch only.
                has_use = (used & set(part.axes) or not _shards_params(part) for part in strategy.components)
                if self.workload.examples % placed.batch_shards == 0 and all(has_use):
                    return True
        return False


_ANY = MeshSpec()


def _shards_params(part: Parallelism) -> bool:
    return any(list(rules.sources) for rules in part.rules()[:3])


def _spec(sizes: Mapping[str, int], *, min_size: int = 2) -> MeshSpec:
    arguments: dict[str, Any] = {axis: size for axis, size in sizes.items() if size >= min_size}
    return MeshSpec(**arguments)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
