"""Expected collectives of matmuls with sharded weights and activations, as with `tensor_parallel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, has_vocabulary, is_expert, parent
from meshpar.sharding.types import BESIDE, PAIR, Decision, axes_of_spec, spec_axes

VOCABULARY = "loss over a sharded vocabulary"
"""Role of the collectives of a loss with a sharded vocabulary."""


@dataclasses.dataclass
class _SplitWeights:
    """Weights of a module that are sharded over the same axis."""

    axis: str
    rows: list[Decision] = dataclasses.field(default_factory=list)
    """Row-parallel weights, contracted over the sharded dim."""
    columns: list[Decision] = dataclasses.field(default_factory=list)
    """Column-parallel weights, whose sharded dim is in the result."""
    narrow: list[Decision] = dataclasses.field(default_factory=list)
    """Replicated projections to a latent vector that weights in `of_narrow` take as input."""
    of_narrow: list[Decision] = dataclasses.field(default_factory=list)
    """Column-parallel weights whose input is a latent vector."""

    def part(self, leaves: Sequence[Decision], module: str) -> None:
        """Separate the column-parallel weights that take latent vectors."""
        if not self.rows or not self.columns:
            return
        stack = self.rows[0].leaf.num_layers
        self.narrow = [
            leaf for leaf in leaves if parent(leaf) == module and leaf.leaf.num_layers == stack and _is_narrow(leaf)
        ]
        widths = {leaf.leaf.shape[-1] for leaf in self.narrow} - {_width(self.rows[0])}
        self.of_narrow = [column for column in self.columns if _width(column) in widths]
        self.columns = [column for column in self.columns if column not in self.of_narrow]
        self.narrow = self.narrow if self.of_narrow else []


def contracted(step: StepSpec) -> Iterator[ExpectedCollective]:
    """Yield the collectives of matmuls whose weights are sharded over an axis that also shards activations.

        row-parallel weight                     all-reduce of the result, forward (Megatron's g)
        column-parallel weights, same input     all-reduce of the input's gradient, backward (Megatron's f)
        ... with sequence parallelism           reduce-scatter instead, and an all-gather of the sequence
        logits sharded over the vocabulary      all-reduce of max, sum and target, one element per token

    A weight is row-parallel if its sharded dim is before its `embed` dim, and column-parallel if it is after (without
    names: if it is the first or a later dim), as in Shoeybi et al. 2019, "Megatron-LM", section 3. In latent
    attention a replicated matrix computes a narrow vector, from which sharded matrices compute the heads. There the
    narrow vector is gathered and its gradient is reduced.
    """
    leaves = [weight.decision for weight in step.weights]
    blocks: dict[tuple[str, str, int, bool], _SplitWeights] = {}
    for decision in leaves:
        for axis in step.tensor_axes:
            if decision.path.rpartition("/")[2] in PAIR:
                if not is_expert(decision):  # the sums of the MoE layer include those of experts
                    yield from _of_pair(step, decision, axis)
                continue
            side = _side(decision, axis)
            if side is not None:
                key = parent(decision), axis, decision.leaf.num_layers, is_expert(decision)
                block = blocks.setdefault(key, _SplitWeights(axis))
                (block.rows if side == "row" else block.columns).append(decision)
    for (module, *_), block in blocks.items():
        block.part(leaves, module)
        yield from _of_block(step, block)
        yield from _of_narrow(step, block)
    axes = {axis for (_, axis, *_), block in blocks.items() if any(map(has_vocabulary, block.rows + block.columns))}
    for axis in step.ordered(axes) if step.tokens is not None else ():
        yield ExpectedCollective(
            role=VOCABULARY,
            kind="sum",
            axes=(axis,),
            elements=step.tokens or 0,
            dtype="f32",
            count=(0, 3 * step.accumulate),
            tensors=("max, sum and target logit of each token",),
            forward=True,
        )


def _side(decision: Decision, axis: str) -> str | None:
    """Return "row", "column", or None for a leaf that is not part of a matmul sharded over this axis."""
    names, spec = decision.leaf.names, decision.spec
    sharded = next((dim for dim, entry in enumerate(spec) if axis in spec_axes(entry)), None)
    dims = [dim for dim in range(len(decision.leaf.shape)) if names is None or names[dim] not in ("layers", "expert")]
    if sharded is None or sharded not in dims or len(dims) < 2:
        return None
    if names is None or all(name is None for dim, name in enumerate(names) if dim in dims and dim != sharded):
        return "row" if sharded == dims[0] else "column"
    if "embed" not in names or names[sharded] == "embed":
        return None
    return "row" if sharded < names.index("embed") else "column"


def _of_block(step: StepSpec, block: _SplitWeights) -> Iterator[ExpectedCollective]:
    some = (block.rows or block.columns)[0]
    stack, by_sequence = some.leaf.num_layers, block.axis in step.sequence_axes
    num_rows, num_lookups = len(block.rows), sum(map(has_vocabulary, block.rows))
    if step.exchanges_rows:
        num_rows, num_lookups = num_rows - num_lookups, 0
    is_tied = step.is_tied and any(map(has_vocabulary, block.rows))
    inputs = num_rows if num_rows and block.columns else 1 if block.columns or is_tied else 0
    recomputed = step.recomputed(stack)
    # XLA:CPU all-reduces the input gradient of every weight separately, except in a MoE layer.
    columns = [column for column in block.columns if not is_expert(column)]
    num_sums = max(1, _num_partial_sums(step, columns)) if step.on_cpu else 1
    # If the sequence is reordered before the head, XLA all-reduces the gradient and slices it afterwards. The same
    # holds for experts, whose sum is inside their layer.
    is_reordered = bool(step.context_axes) and any(map(has_vocabulary, block.columns))
    collective = _activation_collective(step, block.axis, _width(some), stack, some, (*block.rows, *block.columns))
    if num_rows > num_lookups:
        minimum = num_rows - num_lookups
        yield collective("partial sums, forward", "sum", minimum, minimum * recomputed)
    if num_lookups:  # XLA all-reduces the result of a lookup and then slices it
        yield collective("partial sums, forward", "sum", num_lookups, num_lookups, whole=True)
    if inputs:
        # The input of the first block may be the batch, which needs no gradient.
        whole = step.on_cpu or is_reordered or len(columns) < len(block.columns)
        minimum, maximum = inputs if stack > 1 else 0, inputs * num_sums
        yield collective("partial sums, backward", "sum", minimum, maximum, whole="only" if num_sums > 1 else whole)
    if by_sequence and inputs:
        yield collective("gather sequence, forward", "gather", inputs, inputs * (1 + recomputed))
    if by_sequence and num_rows:  # not for a frozen table
        frozen = sum(has_vocabulary(row) and not row.leaf.is_trained for row in block.rows)
        yield collective("gather sequence, backward", "gather", max(0, num_rows - frozen), num_rows)


def _num_partial_sums(step: StepSpec, columns: Sequence[Decision]) -> int:
    """Return the number of products whose input gradients are partial sums, including low-rank adapters."""
    if step.by_stages or step.is_by_device:
        return len(columns)
    paths = {weight.decision.path for weight in step.weights}
    adapters = [module for column in columns for module in (column.path.rpartition("/")[0], column.path + BESIDE)]
    return len(columns) + len(paths & {f"{module}/{PAIR[0]}" for module in adapters})


def _of_narrow(step: StepSpec, block: _SplitWeights) -> Iterator[ExpectedCollective]:
    """Yield the reductions of latent vectors' gradients, and with sequence parallelism their all-gathers."""
    for latent in block.narrow:
        stack, width = latent.leaf.num_layers, latent.leaf.shape[-1]
        columns = [column for column in block.of_narrow if _width(column) == width]
        num_sums = _num_partial_sums(step, columns) if step.on_cpu else 1
        collective = _activation_collective(step, block.axis, width, stack, latent, (latent,))
        yield collective("partial sums, backward", "sum", 1, max(1, num_sums), whole=True)
        if block.axis in step.sequence_axes:
            yield collective("gather sequence, forward", "gather", 1, 1 + step.recomputed(stack))


def _of_pair(step: StepSpec, decision: Decision, axis: str) -> Iterator[ExpectedCollective]:
    """Yield the reductions of the activations between the matrices of a low-rank pair.

    With a sharded input the activations are partial sums. With a sharded output their gradients are, unless each rank
    computes them separately (`params.outputs_of_pair`). Their width is the rank of the pair.
    """
    is_inward, stack = decision.path.endswith(PAIR[0]), decision.leaf.num_layers
    is_by_rank = not is_inward and not (step.by_stages or step.is_by_device)
    if axis not in axes_of_spec(decision.spec) or is_by_rank:
        return
    width = decision.leaf.shape[-1] if is_inward else decision.leaf.shape[stack > 1]
    collective = _activation_collective(step, axis, width, stack, decision, (decision,))
    role, maximum = ("forward", step.recomputed(stack)) if is_inward else ("backward", 1)
    yield collective(f"partial sums, {role}", "sum", 1, maximum, whole=True)
    if is_inward and axis in step.sequence_axes:
        yield collective("gather sequence, backward", "gather", 1, 1)


def _activation_collective(
    step: StepSpec, axis: str, width: int, stack: int, some: Decision, tensors: Sequence[Decision]
) -> Callable[..., ExpectedCollective]:
    """Return a constructor for collectives of activations of a width.

    Its arguments are role, kind, and the minimum and maximum count per layer and micro-step.
    """
    slices = step.interleave if stack > 1 else 1
    runs, by_sequence = stack * step.accumulate * slices, axis in step.sequence_axes

    def collective(
        role: str, kind: Literal["gather", "sum"], minimum: int, maximum: int, *, whole: bool | Literal["only"] = False
    ) -> ExpectedCollective:
        return ExpectedCollective(
            role=role,
            kind=kind,
            axes=(axis,),
            scattered=(axis,) if kind == "sum" and by_sequence else (),
            whole=whole if by_sequence else False,
            elements=width * (max(1, step.rows // slices) if step.tokens is None else step.tokens // slices),
            multiple=step.tokens is None,
            dtype=step.wire(step.compute_dtype(some)),
            count=(minimum * runs, maximum * runs),
            tensors=tuple(decision.path for decision in tensors),
        )

    return collective


def _is_narrow(decision: Decision) -> bool:
    """Return whether a matrix projects the residual stream to a dim without a name, which is not sharded."""
    names = decision.leaf.names or ()
    return tuple(name for name in names if name != "layers") == ("embed", None)


def _width(decision: Decision) -> int:
    """Return the width of the residual stream from the shape of a weight."""
    names, shape = decision.leaf.names, decision.leaf.shape
    if names is not None and "embed" in names:
        return shape[names.index("embed")]
    sharded = next(dim for dim, entry in enumerate(decision.spec) if entry is not None)
    return shape[-1] if sharded != len(shape) - 1 else shape[-2]
