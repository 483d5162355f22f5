"""Layouts that the planner evaluates, and the sharding of all parameters under a layout."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from meshpar.models.embedding_lookup import exchange_is_cheaper
from meshpar.parallel import Strategy, from_json
from meshpar.parallel.execution import Execution, Weight
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params as leaves
from meshpar.parallel.expected.collective import GRADIENTS, RENEWED, WEIGHTS, ExpectedCollective
from meshpar.parallel.parallelism import Parallelism
from meshpar.planner.workload import Activation, Remat, Workload
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import abbreviated, human_mesh, parsed
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import Decision, Leaf, axes_of_spec, num_shards, spec_axes
from meshpar.training.gradients.selection import engine_of
from meshpar.training.options import StepOptions
from meshpar.training.sharding_table import resolve_by_stage

Of = TypeVar("Of")
_DTYPE = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, a strategy, and the step options that the planner searches."""

    mesh: MeshSpec
    strategy: Strategy
    remat: str | None = None
    accumulate: int = 1
    batch_slices: int = 1
    """Number of slices of the local batch that layers process separately."""

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data for `from_json`."""
        return {
            "mesh": {axis: size for axis, size in self.mesh.items() if size > 1},
            "strategy": self.strategy.to_json(),
            "remat": self.remat,
            "accumulate": self.accumulate,
            "batch_slices": self.batch_slices,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_json` described."""
        where = "a plan's `layout`"
        try:
            fields = {"mesh": MeshSpec(**data["mesh"]), "strategy": from_json(data["strategy"])}
        except MeshparError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError):
            reason = 'it has no mesh {"fsdp": 8} and strategy {"parts": [{"part": "fsdp"}]}'
            raise problem(where, f"read {abbreviated(data)}", reason, FIX, code="damaged-file") from None
        # Files of earlier versions have no `batch_slices`.
        layout = parsed(Layout, {"batch_slices": 1, **data, **fields}, where, FIX)
        layout.options(StepOptions())  # checks the values
        return layout

    def options(self, step: StepOptions) -> StepOptions:
        """Return the options of a step, with the options of the layout in place of its own."""
        return dataclasses.replace(step, accumulate=self.accumulate, remat=self.remat, batch_slices=self.batch_slices)

    @property
    def microbatches(self) -> int:
        """Number of micro-steps or of microbatches per step."""
        pipeline = self.strategy.pipeline
        return self.accumulate if pipeline is None else pipeline.microbatches

    @property
    def label(self) -> str:
        options = [f"remat={self.remat}"] * bool(self.remat) + [f"accumulate={self.accumulate}"] * (self.accumulate > 1)
        options += [f"batch_slices={self.batch_slices}"] * (self.batch_slices > 1)
        return f"{human_mesh(self.mesh)} · " + ", ".join([self.strategy.label, *options])


FIX = "create the file with meshpar plan RECIPE --cluster h100:8x8 --save plan.json"
"""Fix in the error about an invalid file of plans."""


class Memo:
    """Caches results by key. Errors are cached and raised again."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}

    def __call__(self, key: Any, make: Callable[[], Of]) -> Of:
        if key not in self._results:
            try:
                self._results[key] = make()
            except MeshparError as error:
                self._results[key] = error
        if isinstance(result := self._results[key], MeshparError):
            raise result
        return result


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A strategy on a mesh: the sharding of all parameters, gradients and updates."""

    workload: Workload
    sizes: dict[str, int]
    strategy: Strategy
    weights: tuple[Weight, ...]
    batch_axes: tuple[str, ...]
    resolved: Callable[..., Decision]
    once: Memo = dataclasses.field(default_factory=Memo)

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes per device of parameters, optimizer state and other state between steps. Not an estimate."""
        total = self.workload.replicated_bytes + sum(weight.decision.bytes_per_device for weight in self.weights)
        for slot in self.workload.slots:
            spec = () if slot.owner is None else tuple(self.weights[slot.owner].update)
            total += slot.nbytes // num_shards([spec[dim] for dim in slot.dims if dim < len(spec)], self.sizes)
        return total

    def row_bytes(self, activation: Activation) -> float:
        """Return the bytes of a saved activation per device and example of the local batch."""
        leaf = Leaf(path="activation", shape=activation.shape, dtype=_DTYPE, names=activation.names)
        return activation.row_bytes / self.resolved(leaf, self.strategy.activations, key=activation[:2]).shards

    @functools.cached_property
    def activation_row_bytes(self) -> Mapping[Remat | Literal["stages"], tuple[float, ...]]:
        """For each remat policy, `row_bytes` of the saved activations, in the order of the workload."""
        return {
            remat: tuple(map(self.row_bytes, activations)) for remat, activations in self.workload.activations.items()
        }

    @functools.cached_property
    def vocab_chunks(self) -> int:
        """Number of sequential chunks in which a rank computes its logits."""
        work = self.workload
        if work.vocab_chunk is None:
            return 1
        vocab = Leaf(path="activation", shape=(work.vocab_size,), dtype=_DTYPE, names=("act_vocab",))
        local_vocab = work.vocab_size // self.resolved(vocab, self.strategy.activations, key="vocab").shards
        return -(-local_vocab // work.vocab_chunk)

    def logits_per_row(self) -> float:
        """Return the number of logits per example on a device, over all vocabulary chunks."""
        work = self.workload
        return self.row_bytes(
            Activation(("seq", "act_vocab"), (work.seq_len or 1, work.vocab_size), 1, 0, is_routed=False)
        )

    def execution(self, layout: Layout) -> Execution:
        """Return the description of a step. With pipeline stages, it describes the average stage."""
        key = layout.accumulate, layout.batch_slices, layout.remat, "execution"
        return self.once(key, lambda: self._execution(layout))

    def _execution(self, layout: Layout) -> Execution:
        work, options = self.workload, layout.options(StepOptions(precision=self.workload.precision))
        step = engine_of(self.strategy, options, self.batch_axes).describe(self, options)
        examples = work.examples // (self.batch_shards * step.microbatches)
        step = dataclasses.replace(
            step.with_examples(examples, None if work.tokens is None else examples * (work.seq_len or 0)),
            weights=step.weights if step.pipeline is None else step.stage_weights,
            experts_per_token=work.experts_per_token, nodes_visited=work.nodes_visited, row_bytes=work.row_bytes,
            vocab_chunks=self.vocab_chunks,
        )  # fmt: skip
        return dataclasses.replace(step, exchanges_rows=work.looks_up and bool(looked_up(step)))

    def sent(self, step: Execution) -> Iterator[tuple[ExpectedCollective, float]]:
        """Yield the collectives of XLA and of kernels in a step, each with the fraction that runs on a stage."""
        fraction, strategy = 1.0, self.strategy
        for expected_collectives in (leaves.expected_collectives, scales.expected_collectives, _rows_sent):
            yield from ((expected, 1.0) for expected in expected_collectives(step))
        if strategy.pipeline is not None:  # activation collectives are expected for all layers; a stage has a fraction
            fraction, step = 1 / strategy.pipeline.stages, dataclasses.replace(step, weights=self.weights)
        for part in strategy.components:
            yield from ((expected, fraction) for expected in (*part.expected_collectives(step), *part.kernels(step)))

    def sends_activations(self, layout: Layout) -> bool:
        """Return whether the step sends activations, which batch slices can hide."""
        params = (WEIGHTS, GRADIENTS, RENEWED)
        return self.once("activations", lambda: any(x.role not in params for x, _ in self.sent(self.execution(layout))))


def looked_up(step: Execution) -> Weight | None:
    """Return the embedding table if `models.embedding_lookup` sends its rows to the tokens, otherwise None."""
    if step.is_pipelined or step.is_tied or step.is_by_device or not step.tokens:
        return None
    for weight in step.weights:
        if weight.leaf.is_table:
            vocab, width = _table_axes(step, weight)
            tokens = step.tokens // step.num_shards(step.sequence_axes)
            vocab_size = weight.leaf.size_of("vocab") // step.num_shards(vocab)
            is_possible = width and set(width) <= set(step.batch_axes) and set(step.sequence_axes) <= set(vocab)
            if is_possible and exchange_is_cheaper(tokens, vocab_size, step.compute_dtype(weight.decision)):
                return weight
    return None


def _table_axes(step: Execution, table: Weight) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes that shard the rows of an embedding table, and the axes that shard its width."""
    by_name = dict(zip(table.decision.leaf.names or (), table.decision.spec, strict=False))
    vocab = step.ordered(spec_axes(by_name.get("vocab")))
    return vocab, step.ordered(set(spec_axes(by_name.get("embed"))) - set(vocab))


def _rows_sent(step: Execution) -> Iterator[ExpectedCollective]:
    """Yield the messages of an embedding lookup: row indices, rows, and their gradients."""
    table = looked_up(step) if step.exchanges_rows else None
    if table is None or step.tokens is None:
        return
    (vocab, width), embed = _table_axes(step, table), table.decision.leaf.size_of("embed")
    dtype, steps = step.wire(step.compute_dtype(table.decision)), step.microbatches
    between, rest = step.sequence_axes, tuple(axis for axis in vocab if axis not in step.sequence_axes)
    summed = tuple(axis for axis in (*step.batch_axes, *step.context_axes) if axis not in width)
    all_rows = step.tokens * embed
    shard = table.leaf.size // step.num_shards((*vocab, *width))
    local_rows = all_rows // step.num_shards(between)
    for kind, axes, elements, sent_dtype, count in (
        ("gather", width, step.tokens * step.num_shards(width), "s32", (steps, steps)),
        ("exchange", width, local_rows, dtype, (2 * steps, 2 * steps)),
        ("sum", between, all_rows, dtype, (steps, steps)),
        ("gather", between, all_rows, dtype, (steps, steps)),
        ("sum", rest, local_rows, dtype, (steps, steps)),
        # XLA may accumulate the micro-steps before it reduces them.
        ("sum", step.ordered(summed), shard, "f32", (1, steps)),
    ):
        if axes:
            yield ExpectedCollective(
                role="rows of the table",
                kind=kind,  # type: ignore[arg-type]
                axes=axes,
                scattered=between if kind == "sum" and axes == between else (),
                elements=elements,
                dtype=sent_dtype,
                count=count,
                tensors=(table.decision.path,),
                outside_loops=True,
            )


@functools.lru_cache(maxsize=1024)
def rules_key(part: Parallelism) -> tuple[str, ...]:
    """Return a key. Parallelisms with the same rules have equal keys."""
    return tuple(map(repr, part.rules()))


class Placer:
    """Applies strategies to meshes. Meshes with the same decision for a parameter share it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._numbers: dict[Any, int] = {}
        self._once = Memo()

    def place(self, sizes: Mapping[str, int], strategy: Strategy) -> Placed:
        """Return the sharding of all parameters by a strategy on a mesh."""
        sizes = dict(sizes)
        if math.prod(sizes.values()) > 1:
            strategy.check_axes(sizes)
        # Strategies with the same rules and stages have the same sharding. They are identified by a number, because
        # comparing rules would dominate the time of the search.
        pipeline = strategy.pipeline
        stages = pipeline and (pipeline.stages, pipeline.stage_layer_offset, pipeline.shortened().num_parts)
        number = self._numbers.setdefault((tuple(map(rules_key, strategy.components)), stages), len(self._numbers))

        def resolved(leaf: Leaf, rules: Rules, *, key: Any) -> Any:
            return self._once((number, key, tuple(sizes.values())), lambda: resolve(leaf, rules, sizes))

        decisions = [self._decisions(sizes, strategy, stages, index) for index in range(3)]
        weights = tuple(Weight(param, grad.spec, update.spec) for param, grad, update in zip(*decisions, strict=True))
        rows = Leaf(path="batch", shape=(math.prod(sizes.values()),), dtype=_DTYPE, names=("batch",))
        spec = resolved(rows, strategy.activations, key="batch").spec
        return Placed(
            workload=self.workload, sizes=sizes, strategy=strategy, weights=weights,
            batch_axes=axes_of_spec(spec, sizes), resolved=resolved,
        )  # fmt: skip

    def _decisions(self, sizes: dict[str, int], strategy: Strategy, stages: Any, index: int) -> Sequence[Decision]:
        """Return the decisions of the rule set with this index. Equal rule sets share them."""
        rules = strategy.rules[index]
        key = self._numbers.setdefault(
            (tuple(rules_key(part)[index] for part in strategy.components), stages), len(self._numbers)
        )
        axes = self._once((key, "axes"), lambda: sorted(rules.axes))

        def decide() -> Sequence[Decision]:
            return [resolve_by_stage(leaf, rules, sizes, strategy) for leaf in self.workload.leaves]

        return self._once((key, tuple(sizes.get(axis) for axis in axes)), decide)
