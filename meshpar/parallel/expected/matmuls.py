"""Expected collectives of matmuls whose weights and activations share a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, has_vocabulary, is_expert, parent
from meshpar.sharding.types import BESIDE, PAIR, Decision, axes_of_spec, spec_axes

VOCABULARY = "loss over a split vocabulary"
"""A role of what is promised."""


@dataclasses.dataclass
class _SplitWeights:
    """Weights under one parent that are split over one axis."""

    axis: str
    rows: list[Decision] = dataclasses.field(default_factory=list)
    """Row-parallel: contracted over the split dim."""
    columns: list[Decision] = dataclasses.field(default_factory=list)
    """Column-parallel: the split dim is in the result."""
    narrow: list[Decision] = dataclasses.field(default_factory=list)
    """Not split: what they make is whole, and other columns, or all heads, take it in."""
    of_narrow: list[Decision] = dataclasses.field(default_factory=list)
    """Column-parallel, and what they take in is what a narrow one makes."""

    def part(self, leaves: Sequence[Decision], where: str) -> None:
        """Tell the columns that take in narrow vectors from the others."""
        if not self.rows or not self.columns:
            return
        stack = self.rows[0].leaf.num_layers
        self.narrow = [
            one for one in leaves if parent(one) == where and one.leaf.num_layers == stack and _is_narrow(one)
        ]
        widths = {one.leaf.shape[-1] for one in self.narrow}
        residual = _width(self.rows[0])
        self.of_narrow = [one for one in self.columns if _width(one) in widths and _width(one) != residual]
        self.columns = [one for one in self.columns if one not in self.of_narrow]
        self.narrow = self.narrow if self.of_narrow else []


def contracted(step: StepSpec) -> Iterator[ExpectedCollective]:
    """What matmuls send whose weights are split over an axis that splits activations too.

        a weight contracted over a split dim    all-reduce of its result, forward       (row-parallel, Megatron's g)
        weights that share a whole input        all-reduce of its gradient, backward    (column-parallel, Megatron's f)
        ... with the sequence split between     reduce-scatter where the sum was, all-gather where the whole is needed
        logits split over the vocabulary        all-reduce of max, sum and target, one number a token

    A weight is row-parallel when its split dim stands before its `embed` dim, column-parallel when behind it (without
    names: the first or a later dim), as in Shoeybi et al. 2019, "Megatron-LM", section 3. Where a matrix that is not
    split makes a narrow vector, out of which those that are make their heads (latent attention), it is the narrow
    vector that is gathered, and its gradient that is summed.
    """
    leaves = [one.decision for one in step.weights]
    blocks: dict[tuple[str, str, int, bool], _SplitWeights] = {}
    for decision in leaves:
        for axis in step.tensor_axes:
            if decision.path.rpartition("/")[2] in PAIR:
                if is_expert(decision):  # which are in the layer's own sums
                    continue
                yield from _of_pair(step, decision, axis)
                continue
            side = _side(decision, axis)
            if side is not None:
                key = parent(decision), axis, decision.leaf.num_layers, is_expert(decision)
                block = blocks.setdefault(key, _SplitWeights(axis))
                (block.rows if side == "row" else block.columns).append(decision)
    for (where, *_), block in blocks.items():
        block.part(leaves, where)
        yield from _of_block(step, block)
        yield from _of_narrow(step, block)
    split = {axis for (_, axis, *_), block in blocks.items() if any(map(has_vocabulary, block.rows + block.columns))}
    for axis in step.ordered(split) if step.tokens is not None else ():
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
    """`row` or `column`, or None for a leaf that no matmul contracts over this axis."""
    names, spec = decision.leaf.names, decision.spec
    at = next((dim for dim, entry in enumerate(spec) if axis in spec_axes(entry)), None)
    dims = [dim for dim in range(len(decision.leaf.shape)) if names is None or names[dim] not in ("layers", "expert")]
    if at is None or at not in dims or len(dims) < 2:
        return None
    if names is None or all(name is None for dim, name in enumerate(names) if dim in dims and dim != at):
        return "row" if at == dims[0] else "column"
    if "embed" not in names:
        return None
    embed = names.index("embed")
    return None if at == embed else "row" if at < embed else "column"


def _of_block(step: StepSpec, block: _SplitWeights) -> Iterator[ExpectedCollective]:
    some = (block.rows or block.columns)[0]
    stack, by_sequence = some.leaf.num_layers, block.axis in step.sequence_axes
    num_rows, num_lookups = len(block.rows), sum(map(has_vocabulary, block.rows))
    if step.exchanges_rows:
        num_rows, num_lookups = num_rows - num_lookups, 0
    is_tied = step.is_tied and any(map(has_vocabulary, block.rows))
    inputs = num_rows if num_rows and block.columns else 1 if block.columns or is_tied else 0
    recomputed = step.recomputed(stack)
    # XLA:CPU sums every weight's share of the input's gradient over devices by itself; a MoE layer does not.
    columns = [one for one in block.columns if not is_expert(one)]
    shares = max(1, _num_shares(step, columns)) if step.on_cpu else 1
    # Where the order of the sequence changes before the head, XLA sums the gradient whole and slices it after. So do
    # experts, for the sum is taken inside of their layer.
    is_reordered = bool(step.context_axes) and any(map(has_vocabulary, block.columns))
    expected_collectives = _promise_of(step, block.axis, _width(some), stack, some, (*block.rows, *block.columns))
    if num_rows > num_lookups:
        least = num_rows - num_lookups
        yield expected_collectives("partial sums, forward", "sum", least, least * recomputed)
    if num_lookups:  # XLA sums the result of a lookup whole, and slices it then
        yield expected_collectives("partial sums, forward", "sum", num_lookups, num_lookups, whole=True)
    if inputs:
        # The first block's input may be the batch itself, which needs no gradient.
        whole = step.on_cpu or is_reordered or len(columns) < len(block.columns)
        least, most = inputs if stack > 1 else 0, inputs * shares
        yield expected_collectives("partial sums, backward", "sum", least, most, whole="only" if shares > 1 else whole)
    if by_sequence and inputs:
        yield expected_collectives("sequence made whole, forward", "gather", inputs, inputs * (1 + recomputed))
    if by_sequence and num_rows:  # for the gradient of a table, where that is trained
        frozen = sum(has_vocabulary(one) and not one.leaf.is_trained for one in block.rows)
        yield expected_collectives("sequence made whole, backward", "gather", max(0, num_rows - frozen), num_rows)


def _num_shares(step: StepSpec, columns: Sequence[Decision]) -> int:
    """Products whose gradients of the input are partial sums: of columns, and of low-rank pairs beside them."""
    paths = {one.decision.path for one in step.weights}
    beside = [module for one in columns for module in (one.path.rpartition("/")[0], one.path + BESIDE)]
    pairs = 0 if step.by_stages or step.is_by_device else len(paths & {f"{module}/{PAIR[0]}" for module in beside})
    return len(columns) + pairs


def _of_narrow(step: StepSpec, block: _SplitWeights) -> Iterator[ExpectedCollective]:
    """What narrow vectors send: gathered where the sequence is split between blocks, and the sum of their gradient."""
    for one in block.narrow:
        stack, width = one.leaf.num_layers, one.leaf.shape[-1]
        takers = [column for column in block.of_narrow if _width(column) == width]
        shares = _num_shares(step, takers) if step.on_cpu else 1
        expected_collectives = _promise_of(step, block.axis, width, stack, one, (one,))
        yield expected_collectives("partial sums, backward", "sum", 1, max(1, shares), whole=True)
        if block.axis in step.sequence_axes:
            yield expected_collectives("sequence made whole, forward", "gather", 1, 1 + step.recomputed(stack))


def _of_pair(step: StepSpec, decision: Decision, axis: str) -> Iterator[ExpectedCollective]:
    """What the few numbers between a low-rank pair send: partial sums, of them where a split input makes them, and of
    their gradient where they make a split output, unless ranks make them each for itself (`leaves.outputs_of_pair`).
    Both are as narrow as the rank.
    """
    is_inward, stack = decision.path.endswith(PAIR[0]), decision.leaf.num_layers
    is_by_rank = not is_inward and not (step.by_stages or step.is_by_device)
    if axis not in axes_of_spec(decision.spec) or is_by_rank:
        return
    width = decision.leaf.shape[-1] if is_inward else decision.leaf.shape[stack > 1]
    expected_collectives = _promise_of(step, axis, width, stack, decision, (decision,))
    role, most = ("forward", step.recomputed(stack)) if is_inward else ("backward", 1)
    yield expected_collectives(f"partial sums, {role}", "sum", 1, most, whole=True)
    if is_inward and axis in step.sequence_axes:
        yield expected_collectives("sequence made whole, backward", "gather", 1, 1)


def _promise_of(
    step: StepSpec, axis: str, width: int, stack: int, some: Decision, tensors: Sequence[Decision]
) -> Callable[..., ExpectedCollective]:
    """A function of (role, kind, fewest, most), both a layer and micro-step, for activations of a width."""
    slices = step.interleave if stack > 1 else 1
    runs, by_sequence = stack * step.accumulate * slices, axis in step.sequence_axes

    def expected_collectives(
        role: str, kind: Literal["gather", "sum"], least: int, most: int, *, whole: bool | Literal["only"] = False
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
            count=(least * runs, most * runs),
            tensors=tuple(decision.path for decision in tensors),
        )

    return expected_collectives


def _is_narrow(decision: Decision) -> bool:
    """Whether a matrix takes in the residual stream, and what it makes has no name to be split by."""
    names = decision.leaf.names or ()
    return tuple(name for name in names if name != "layers") == ("embed", None)


def _width(decision: Decision) -> int:
    """Size of the residual stream, as a weight tells it."""
    names, shape = decision.leaf.names, decision.leaf.shape
    if names is not None and "embed" in names:
        return shape[names.index("embed")]
    split = next(dim for dim, entry in enumerate(decision.spec) if entry is not None)
    return shape[-1] if split != len(shape) - 1 else shape[-2]
