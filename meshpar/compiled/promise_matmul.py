"""What matmuls promise whose weights are split over an axis that splits activations too.

A gather or scatter of the sequence may be spelled as a ring of permutes between which blocks are multiplied
(`meshpar.collectives.all_gather_matmul`, `matmul_reduce_scatter`). That is an option of the model, and no strategy
knows of it; nor need it, for the promise is the same: the same bytes over the same axis, in 2(N-1) messages of half a
rank's rows, and which way it was kept is for the program to say. So it holds for any model that uses these kernels, and
for a compiler that takes to such rings by itself.

Where a matrix that is not split makes a narrow vector, out of which those that are make their heads (latent attention),
it is the narrow vector that is gathered, and its gradient that is summed, in place of the residual stream and its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.compiled.terms import Facts, Leg, Promised, is_tied
from meshpar.sharding.types import Decision, spec_axes

VOCABULARY = "loss over a split vocabulary"
"""A role."""


@dataclasses.dataclass
class _Block:
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

    def part(self, leaves: Sequence[Decision], parent: str) -> None:
        """Tell the columns that take in narrow vectors from the others."""
        if not self.rows or not self.columns:
            return
        stack = self.rows[0].leaf.num_layers
        self.narrow = [
            one for one in leaves if _parent(one) == parent and one.leaf.num_layers == stack and _is_narrow(one)
        ]
        widths = {one.leaf.shape[-1] for one in self.narrow}
        residual = _width(self.rows[0])
        self.of_narrow = [one for one in self.columns if _width(one) in widths and _width(one) != residual]
        self.columns = [one for one in self.columns if one not in self.of_narrow]
        self.narrow = self.narrow if self.of_narrow else []


def contracted(facts: Facts) -> Iterator[Promised]:
    """Partial sums of every block of weights, the sequence made whole for it, and the loss over a split vocabulary."""
    blocks: dict[tuple[str, str, int, bool], _Block] = {}
    for decision in facts.leaves:
        for axis in facts.tensor_axes:
            side = _side(decision, axis)
            if side is not None:
                key = _parent(decision), axis, decision.leaf.num_layers, _is_of_experts(decision)
                block = blocks.setdefault(key, _Block(axis))
                (block.rows if side == "row" else block.columns).append(decision)
    for (parent, *_), block in blocks.items():
        block.part(facts.leaves, parent)
        yield from _block_promises(facts, block)
        yield from _narrow_promises(facts, block)
    vocabulary = {
        axis
        for block in blocks.values()
        for decision in (*block.rows, *block.columns)
        if _has_vocabulary(decision)
        for axis in [block.axis]
    }
    for axis in facts.ordered(vocabulary):
        if facts.tokens is not None:
            in_loop = facts.options.accumulate > 1
            leg = facts.leg("all-reduce", (axis,), facts.tokens, "f32", forward=True, in_loop=in_loop)
            most = 3 * facts.options.accumulate
            yield Promised(
                role=VOCABULARY,
                tensors=("max, sum and target logit of each token",),
                count=(0, most),
                spellings=((leg,),),
            )


def _round_the_ring(facts: Facts, axis: str, width: int, dtype: str) -> tuple[Leg, ...]:
    """A gather or scatter of the sequence in N-1 steps, half of a rank's rows each way in each."""
    assert facts.tokens is not None
    steps, rows = facts.sizes[axis] - 1, max(1, facts.rows)
    positions = facts.tokens // rows // facts.sizes[axis]
    lanes = [lane for lane in (-(-positions // 2), positions // 2) if lane]
    times = {lane: steps * lanes.count(lane) for lane in lanes}
    return tuple(
        facts.leg("collective-permute", (axis,), rows * lane * width, dtype, times=times[lane]) for lane in times
    )


def _is_of_experts(decision: Decision) -> bool:
    return "expert" in (decision.leaf.names or ())


def _has_vocabulary(decision: Decision) -> bool:
    return "vocab" in (decision.leaf.names or ())


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


def _block_promises(facts: Facts, block: _Block) -> Iterator[Promised]:
    some = (block.rows or block.columns)[0]
    stack, width = some.leaf.num_layers, _width(some)
    steps = facts.options.accumulate
    dtype = facts.wire(facts.compute(some))
    by_sequence = block.axis in facts.sequence_axes
    exact = facts.tokens is not None
    elements = width * (facts.tokens if facts.tokens is not None else max(1, facts.rows))
    recomputed = 2 if facts.options.remat and stack > 1 else 1
    tensors = tuple(decision.path for decision in (*block.rows, *block.columns))
    tied = any(is_tied(facts, decision) for decision in block.rows)
    inputs = len(block.rows) if block.rows and block.columns else 1 if block.columns or tied else 0
    # The first block's input may be the batch itself, which needs no gradient.
    fewest_inputs = inputs if stack > 1 else 0

    def leg(kind: str, **more: Any) -> Leg:
        return facts.leg(kind, (block.axis,), elements, dtype, multiple=not exact, **more)

    def promise(role: str, count: tuple[int, int], *spellings: tuple[Leg, ...]) -> Promised:
        least, most = (number * stack * steps for number in count)
        return Promised(role=role, tensors=tensors, count=(least, most), stack=1, spellings=spellings)

    summed = leg("reduce-scatter") if by_sequence else leg("all-reduce")
    overlapped = [_round_the_ring(facts, block.axis, width, dtype)] if by_sequence and exact else []
    num_rows = len(block.rows)
    num_lookups = sum(map(_has_vocabulary, block.rows))
    if num_rows - num_lookups:
        least = num_rows - num_lookups
        yield promise("partial sums, forward", (least, least * recomputed), (summed,), *overlapped)
    if num_lookups:  # XLA sums the result of a lookup whole, and slices it then
        spelled = ((leg("all-reduce"),), (summed,)) if by_sequence else ((summed,),)
        yield promise("partial sums, forward", (num_lookups, num_lookups), *spelled)
    if inputs:
        # XLA:CPU sums every weight's share of the input's gradient over devices by itself; a layer of experts does not.
        columns = [one for one in block.columns if not _is_of_experts(one)]
        shares = leg("all-reduce", times=max(1, len(columns)))
        on_cpu = ((summed,), (shares,)) if by_sequence and len(columns) < 2 else ((shares,),)
        # Where the order of the sequence changes before the head, XLA sums the gradient whole and slices it after.
        # So do experts, for the sum is taken inside of their layer.
        is_reordered = by_sequence and facts.context_axes and any(map(_has_vocabulary, block.columns))
        is_whole = is_reordered or (by_sequence and len(columns) < len(block.columns))
        on_gpu = ((summed,), (leg("all-reduce"),)) if is_whole else ((summed,),)
        ways = (*(on_cpu if facts.on_cpu else on_gpu), *overlapped)
        yield promise("partial sums, backward", (fewest_inputs, inputs), *ways)
    if by_sequence:
        ways = ((leg("all-gather"),), *overlapped)
        if inputs:
            yield promise("sequence made whole, forward", (inputs, inputs * (1 + recomputed)), *ways)
        if num_rows:
            yield promise("sequence made whole, backward", (num_rows, num_rows), *ways)


def _narrow_promises(facts: Facts, block: _Block) -> Iterator[Promised]:
    """What narrow vectors send: gathered where the sequence is split between blocks, and the sum of their gradient."""
    for one in block.narrow:
        width, stack = one.leaf.shape[-1], one.leaf.num_layers
        takers = sum(_width(column) == width for column in block.of_narrow)
        elements, dtype = width * (facts.tokens or max(1, facts.rows)), facts.wire(facts.compute(one))
        by_sequence = block.axis in facts.sequence_axes
        runs = stack * facts.options.accumulate
        recomputed = 2 if facts.options.remat and stack > 1 else 1
        leg = functools.partial(
            facts.leg, axes=(block.axis,), elements=elements, dtype=dtype, multiple=facts.tokens is None
        )

        def promise(role: str, most: int, *spellings: Leg, path: str = one.path, runs: int = runs) -> Promised:
            each = tuple((spelling,) for spelling in spellings)
            return Promised(role=role, tensors=(path,), count=(runs, most * runs), stack=1, spellings=each)

        shares = leg("all-reduce", times=max(1, takers) if facts.on_cpu else 1)
        summed = (leg("reduce-scatter"), shares) if by_sequence else (shares,)
        yield promise("partial sums, backward", 1, *summed)
        if by_sequence:
            yield promise("sequence made whole, forward", 1 + recomputed, leg("all-gather"))


def _parent(decision: Decision) -> str:
    return "/".join(decision.path.split("/")[:-2])


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
