"""Layout: a mesh, a strategy and how a step is cut, as a value; placed, it is what every parameter becomes under it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from meshpar.layers.precision import BY_ROW
from meshpar.models.embedding_lookup import rows_travel
from meshpar.parallel import Strategy, from_json
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params as leaves
from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, Weight, is_looked_up, of_stage, size_of
from meshpar.parallel.parallelism import Parallelism
from meshpar.planner.workload import Held, Remat, Workload
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import Decision, Leaf, MeshparError, axes_of_spec, is_whole, num_shards, problem, spec_axes
from meshpar.training.options import StepOptions
from meshpar.training.sharding_table import ByStage

Of = TypeVar("Of")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, a strategy, and how a step is cut."""

    mesh: MeshSpec
    strategy: Strategy
    remat: Remat = None
    accumulate: int = 1
    interleave: int = 1
    """Slices of a device's rows that layers run beside each other."""

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data; `from_json` reads it back."""
        return {
            "mesh": {axis: size for axis, size in self.mesh.items() if size > 1},
            "strategy": self.strategy.to_json(),
            "remat": self.remat,
            "accumulate": self.accumulate,
            "interleave": self.interleave,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """Reads what `to_json` gave.

        Raises:
          ValueError: a field is missing, or of the wrong kind.
        """
        where, fix = "a plan's `layout`", "write the file anew: meshpar plan RECIPE --cluster h100:8x8 --save plan.json"
        fields = {one.name: one for one in dataclasses.fields(Layout)}
        if isinstance(data, Mapping):  # plans were of whole rows before they said so
            data = {"interleave": 1, **data}
        if not isinstance(data, Mapping) or data.keys() != fields.keys():
            exists = f"it is {some(data)}, and no object with exactly {', '.join(fields)}"
            raise problem(where, "read it", exists, fix)
        for field, is_right, rule in (
            ("mesh", isinstance(data["mesh"], Mapping), 'sizes by axis: {"fsdp": 8}'),
            ("strategy", isinstance(data["strategy"], Mapping), 'an object: {"parts": [{"part": "fsdp"}]}'),
            ("remat", data["remat"] is None or isinstance(data["remat"], str), 'null, or what layers keep: "dots"'),
            ("accumulate", is_whole(data["accumulate"], 1), "a whole number of at least 1"),
            ("interleave", is_whole(data["interleave"], 1), "a whole number of at least 1"),
        ):
            if not is_right:
                raise problem(f"{where}, `{field}`", f"read {some(data[field])}", f"it is {rule}", fix)
        options = StepOptions(accumulate=data["accumulate"], remat=data["remat"], interleave=data["interleave"])
        try:
            strategy = from_json(data["strategy"])
        except MeshparError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError):
            exists = "its parts are objects with the name and arguments of each: " + '{"parts": [{"part": "fsdp"}]}'
            raise problem(f"{where}, `strategy`", f"read {some(data['strategy'])}", exists, fix) from None
        return Layout(
            mesh=MeshSpec(**data["mesh"]), strategy=strategy, remat=options.remat, accumulate=options.accumulate,
            interleave=options.interleave,
        )  # fmt: skip

    @property
    def microbatches(self) -> int:
        """Pieces of a device's rows that are computed one after the other."""
        pipelined = self.strategy.pipeline
        return self.accumulate if pipelined is None else pipelined.microbatches

    @property
    def label(self) -> str:
        more = [f"remat={self.remat}"] * bool(self.remat) + [f"accumulate={self.accumulate}"] * (self.accumulate > 1)
        more += [f"interleave={self.interleave}"] * (self.interleave > 1)
        return f"{human_mesh(self.mesh)} · " + ", ".join([self.strategy.label, *more])


def some(data: Any) -> str:
    """Plain data in at most 80 characters."""
    text = json.dumps(data, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A strategy on a mesh: how every parameter, its gradient and its update lie."""

    workload: Workload
    sizes: dict[str, int]
    strategy: Strategy
    weights: tuple[Weight, ...]
    batch_axes: tuple[str, ...]
    resolved: Callable[..., Decision]

    @property
    def batch_ways(self) -> int:
        """Over how many ranks the batch is split."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @functools.cached_property
    def params_bytes(self) -> int:
        return sum(one.decision.bytes_per_device for one in self.weights)

    @functools.cached_property
    def optimizer_bytes(self) -> int:
        found = 0
        for slot in self.workload.slots:
            spec = () if slot.owner is None else tuple(self.weights[slot.owner].update)
            found += slot.nbytes // num_shards([spec[dim] for dim in slot.dims if dim < len(spec)], self.sizes)
        return found

    @property
    def state_bytes(self) -> int:
        """What stays between steps, to the byte."""
        return self.params_bytes + self.optimizer_bytes + self.workload.whole_bytes

    def row_bytes(self, held: Held) -> float:
        """Of one row of what the backward pass keeps, what a device of those that share it holds."""
        leaf = Leaf(path="activation", shape=held.shape, dtype=_DTYPE, names=held.names)
        return held.row_bytes / self.resolved(leaf, self.strategy.activations, key=held[:2]).shards

    @functools.cached_property
    def held_row_bytes(self) -> Mapping[Remat | Literal["stages"], tuple[float, ...]]:
        """`row_bytes` of everything that is kept, in the workload's order."""
        return {remat: tuple(map(self.row_bytes, held)) for remat, held in self.workload.held.items()}

    @functools.cached_property
    def vocab_chunks(self) -> int:
        """In how many parts, one after the other, a rank makes its logits."""
        work = self.workload
        if work.vocab_chunk is None:
            return 1
        vocab = Leaf(path="activation", shape=(work.vocab_size,), dtype=_DTYPE, names=("act_vocab",))
        here = work.vocab_size // self.resolved(vocab, self.strategy.activations, key="vocab").shards
        return -(-here // work.vocab_chunk)

    def logits_per_row(self) -> float:
        """Numbers of one row that a device has, of all chunks together."""
        work = self.workload
        return self.row_bytes(Held(("seq", "act_vocab"), (work.seq_len or 1, work.vocab_size), 1, 0, is_routed=False))

    def step(self, layout: Layout) -> StepSpec:
        """The facts of a step; of stages, those of the mean stage."""
        key = layout.microbatches, layout.interleave, layout.remat is None, "facts"
        return self.once(key, lambda: self._facts_of(layout))

    def once(self, key: Any, make: Callable[[], Of]) -> Of:
        """What was made for a key before."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @functools.cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def _facts_of(self, layout: Layout) -> StepSpec:
        work, pipelined = self.workload, self.strategy.pipeline
        rows = work.rows // (self.batch_ways * layout.microbatches)
        weights = self.weights
        if pipelined is not None:
            weights = tuple(of_stage(one, pipelined.axis, pipelined.stages) for one in weights)
        step = self.strategy.step_spec(
            self.sizes,
            weights=weights,
            batch_axes=self.batch_axes,
            rows=rows,
            tokens=None if work.tokens is None else rows * (work.seq_len or 0),
            accumulate=layout.microbatches,
            interleave=layout.interleave,
            is_once=pipelined is not None,
            is_remat=layout.remat is not None,
            by_stages=pipelined is not None,
            choices=work.choices,
            nodes_visited=work.nodes_visited,
            row_bytes=work.row_bytes,
            vocab_chunks=self.vocab_chunks,
            compute=work.precision.compute,
            reduce=work.precision.reduce,
            narrow=work.precision.narrow(one.decision.path for one in weights),
            by_row=work.precision.narrow((one.decision.path for one in weights), BY_ROW),
        )
        return dataclasses.replace(step, exchanges_rows=work.looks_up and bool(looked_up(step)))

    def sent(self, step: StepSpec) -> Iterator[tuple[ExpectedCollective, float]]:
        """What a step sends, by XLA and by kernels, each with the share of it that a device sends."""
        share, strategy = 1.0, self.strategy
        yield from ((one, 1.0) for one in (*leaves.promised(step), *scales.promised(step), *_rows_sent(step)))
        if strategy.pipeline is not None:  # layers are promised for the whole model: a stage has its share
            share, step = 1 / strategy.pipeline.stages, dataclasses.replace(step, weights=self.weights)
        for part in strategy.parts:
            yield from ((one, share) for one in (*part.promise(step), *part.kernels(step)))


def looked_up(step: StepSpec) -> Weight | None:
    """The table whose rows travel to the tokens that name them, as `models.lookup.lookup_of` decides; else None."""
    if step.by_stages or step.is_tied or step.is_by_device or not step.tokens:
        return None
    for one in step.weights:
        if is_looked_up(one.decision):
            vocab, width = _of_table(step, one)
            tokens = step.tokens // step.num_shards(step.sequence_axes)
            rows = size_of(one.decision, "vocab") // step.num_shards(vocab)
            can_be = width and set(width) <= set(step.batch_axes) and set(step.sequence_axes) <= set(vocab)
            if can_be and rows_travel(tokens, rows, step.compute_dtype(one.decision)):
                return one
    return None


def _of_table(step: StepSpec, one: Weight) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes that split a table's rows, and its width."""
    by_name = dict(zip(one.decision.leaf.names or (), one.decision.spec, strict=False))
    vocab = step.ordered(spec_axes(by_name.get("vocab")))
    return vocab, step.ordered(set(spec_axes(by_name.get("embed"))) - set(vocab))


def _rows_sent(step: StepSpec) -> Iterator[ExpectedCollective]:
    """What `models.lookup` sends: numbers of rows, rows to their tokens, their gradients back."""
    one = looked_up(step) if step.exchanges_rows else None
    if one is None or step.tokens is None:
        return
    (vocab, width), embed = _of_table(step, one), size_of(one.decision, "embed")
    dtype, steps = step.wire(step.compute_dtype(one.decision)), step.accumulate
    between, rest = step.sequence_axes, tuple(axis for axis in vocab if axis not in step.sequence_axes)
    summed = tuple(axis for axis in (*step.batch_axes, *step.context_axes) if axis not in width)
    all_rows = step.tokens * embed
    send = functools.partial(ExpectedCollective, role="rows of the table", tensors=(one.decision.path,), outside=True)
    own = all_rows // step.num_shards(between)
    yield send(
        kind="gather", axes=width, elements=step.tokens * step.num_shards(width), dtype="s32", count=(steps, steps)
    )
    yield send(kind="exchange", axes=width, elements=own, dtype=dtype, count=(2 * steps, 2 * steps))
    if between:
        yield send(kind="sum", axes=between, scattered=between, elements=all_rows, dtype=dtype, count=(steps, steps))
        yield send(kind="gather", axes=between, elements=all_rows, dtype=dtype, count=(steps, steps))
    if rest:
        yield send(kind="sum", axes=rest, elements=own, dtype=dtype, count=(steps, steps))
    if summed:
        part = one.decision.leaf.size // step.num_shards((*vocab, *width))
        # XLA may add the micro-steps' up before it sends them.
        yield send(kind="sum", axes=step.ordered(summed), elements=part, dtype="f32", count=(1, steps))


@functools.lru_cache(maxsize=1024)
def look(part: Parallelism) -> tuple[str, ...]:
    """What tells whether two parts lay everything alike."""
    return tuple(map(repr, part.rules()))


class Placer:
    """Places strategies on meshes; what does not depend on a mesh's other axes is resolved once."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._numbers: dict[Any, int] = {}
        self._known: dict[Any, Any] = {}

    def place(self, sizes: Mapping[str, int], strategy: Strategy) -> Placed:
        """A strategy on a mesh.

        Args:
          sizes: of every mesh axis, in the mesh's order.
          strategy: the strategy.

        Raises:
          ValueError: a rule that does not fit, or an axis that the strategy needs and the mesh lacks.
        """
        sizes = dict(sizes)
        if math.prod(sizes.values()) > 1:
            strategy.check_axes(sizes)
        # Strategies are told apart by number: comparing rules takes longer than all else here. Those with the same
        # rules and stages lie alike.
        pipelined = strategy.pipeline
        stages = pipelined and (pipelined.stages, pipelined.stage_layer_offset, pipelined.shortened().num_parts)
        number = self._numbers.setdefault((tuple(map(look, strategy.parts)), stages), len(self._numbers))

        def resolved(leaf: Leaf, rules: Rules, *, key: Any) -> Any:
            return self._once((number, key, tuple(sizes.values())), lambda: resolve(leaf, rules, sizes))

        decided = [self._decisions(sizes, strategy, stages, at) for at in range(3)]
        weights = tuple(Weight(own, grad.spec, update.spec) for own, grad, update in zip(*decided, strict=True))
        rows = Leaf(path="batch", shape=(math.prod(sizes.values()),), dtype=_DTYPE, names=("batch",))
        spec = resolved(rows, strategy.activations, key="batch").spec
        return Placed(
            workload=self.workload, sizes=sizes, strategy=strategy, weights=weights,
            batch_axes=axes_of_spec(spec, sizes), resolved=resolved,
        )  # fmt: skip

    def _decisions(self, sizes: dict[str, int], strategy: Strategy, stages: Any, at: int) -> Sequence[Decision]:
        """By the rules of one set. Strategies that differ elsewhere share them, and gradients those of parameters."""
        rules = strategy.rules[at]
        key = self._numbers.setdefault((tuple(look(part)[at] for part in strategy.parts), stages), len(self._numbers))
        axes = self._once((key, "axes"), lambda: sorted(rules.axes))

        def decided() -> Sequence[Decision]:
            by_stage = ByStage.of(strategy, sizes)
            return [by_stage.resolve(leaf, rules) for leaf in self.workload.leaves]

        return self._once((key, tuple(sizes.get(axis) for axis in axes)), decided)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made before, or raised."""
        if key not in self._known:
            try:
                self._known[key] = make()
            except MeshparError as error:
                self._known[key] = error
        if isinstance(found := self._known[key], MeshparError):
            raise found
        return found


_DTYPE = np.dtype(np.float32)
