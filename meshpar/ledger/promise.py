"""The promise: what a strategy says it will send, before any program is read.

What is promised follows from the rules, not from the program (a stacked leaf counts once a layer):

    a parameter split over batch axes       all-gather before use, forward and backward, in the compute dtype
    its gradient                            reduce-scatter over the axes that split its update,
                                            all-reduce over the other axes that split the batch
    a parameter not split as its update is  all-gather of the new value
    a weight contracted over a split dim    all-reduce of its result, forward            (row-parallel, Megatron's g)
    weights that share a whole input        all-reduce of its gradient, backward         (column-parallel, Megatron's f)
    ... with the sequence split between     reduce-scatter where the sum was, all-gather where the whole is needed again
    logits split over the vocabulary        all-reduce of max, sum and target, one number a token
    numbers or vectors over the batch       losses, metrics, norms, statistics of a batch: counted, not promised

A weight is row-parallel when its split dim stands before its `embed` dim, column-parallel when behind it (without
names: the first or a later dim), as in Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.ledger.census import bytes_sent
from meshpar.state import Setup
from meshpar.step import StepOptions, batch_sharding
from meshpar.strategies import MIN_SHARDED_BYTES
from meshpar.types import Decision, axis_sizes, spec_axes

_ITEMSIZE = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
_HLO_DTYPE = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Leg:
    """One collective of a promise."""

    kind: str
    axes: tuple[str, ...]
    elements: int
    """Numbers in its payload; with `multiple`, any multiple of it."""
    dtype: str
    group_size: int
    times: int = 1
    """How often, for once that the promise is kept."""
    multiple: bool = False
    forward: bool = False
    """Whether only the forward pass may send it."""
    serves: int = 1
    """Micro-steps that one run serves: it is sent outside every loop."""
    in_loop: bool = False
    """Whether it is sent inside a loop, as in every micro-step."""
    of_leaf: bool = False
    """Whether it is about one parameter: one that is not stacked sends nothing in the loop over layers."""

    @property
    def bytes_sent_per_device(self) -> float:
        """Each time it runs."""
        return bytes_sent(self.kind, self.elements * _ITEMSIZE.get(self.dtype, 4), self.group_size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promised:
    """What will be sent for some arrays of one size, and how often a step."""

    role: str
    """Why: `weights before use`, `gradients`, `new parameters`, `partial sums`, ..."""
    tensors: tuple[str, ...]
    count: tuple[int, int]
    """Fewest and most times a step, all its tensors together."""
    stack: int = 1
    """Layers stacked in one array: so many small collectives may come as one."""
    spellings: tuple[tuple[Leg, ...], ...]
    """Ways to do it; the first is what is promised, the others the compiler may choose."""
    vector: int = 0
    """Numbers along the longest dim of its tensors, all layers together."""
    stacked: Promised | None = None
    """For a leaf without names: the promise if its first dim turns out to be layers that a loop runs over."""


# ---------------------------------------------------------------------------------------------------------------------
# What is promised
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What every promise is made from."""

    setup: Setup
    options: StepOptions
    on_cpu: bool
    sizes: dict[str, int]
    batch_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    """Axes that split activations in other dims than the batch."""
    sequence_axes: tuple[str, ...]
    """Axes that split the residual stream's sequence between blocks."""
    rows: int
    """Of one device in one micro-step."""
    tokens: int | None
    """Of one device in one micro-step; None when the batch holds no tokens."""

    @property
    def micro_steps(self) -> int:
        return 1 if self.options.accumulate_mode == "once" else self.options.accumulate

    @property
    def passes(self) -> int:
        """How often weights are gathered in a micro-step: for the forward pass, and again for the backward."""
        return 1 if self.options.accumulate_mode == "once" and self.options.accumulate > 1 else 2

    def wire(self, dtype: Any) -> str:
        """A dtype as HLO names it; XLA:CPU sends float32 where less was asked."""
        name = _HLO_DTYPE.get(np.dtype(dtype).name, np.dtype(dtype).name)
        return "f32" if self.on_cpu and name in ("bf16", "f16") else name

    def compute(self, decision: Decision) -> Any:
        return np.dtype(jax.numpy.dtype(self.options.precision.compute or decision.leaf.dtype))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(axis for axis, size in self.sizes.items() if axis in wanted and size > 1)

    def ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def leg(self, kind: str, axes: Iterable[str], elements: int, dtype: str, **more: Any) -> Leg:
        over = self.ordered(axes)
        return Leg(kind, over, elements, dtype, self.ways(over), **more)


def promised(setup: Setup, options: StepOptions, batch: Any, *, on_cpu: bool = False) -> tuple[Promised, ...]:
    """What a training step promises to send.

    Args:
      setup: the state's: model, mesh, strategy and every leaf's decision.
      options: the step's.
      batch: the global batch, or its shapes.
      on_cpu: promise what XLA:CPU makes of it: float32 on the wire, and a sum of several all-reduces instead of one
        all-reduce of the sum.
    """
    facts = _facts(setup, options, batch, on_cpu)
    leaves = list(zip(setup.table.params, _specs(setup.layout.grads), _specs(setup.layout.updates), strict=True))
    found = []
    for make in (
        lambda d, g, u: _gathered(facts, d),
        lambda d, g, u: _reduced(facts, d, g, u),
        lambda d, g, u: _renewed(facts, d, u),
    ):
        for decision, grads, update in leaves:
            one = make(decision, grads, update)
            if one is not None:
                layered = _as_layers(decision)
                stacked = make(layered, grads, update) if layered is not None else None
                found.append(dataclasses.replace(_of_leaf(one), stacked=stacked and _of_leaf(stacked)))
    return _merged([*found, *_contracted(facts)])


def _as_layers(decision: Decision) -> Decision | None:
    """The decision about a leaf without names as if its first dim were layers; None when that cannot be."""
    leaf = decision.leaf
    if leaf.names is not None or len(leaf.shape) < 2 or leaf.shape[0] < 2:
        return None
    names = ("layers", *(None for _ in leaf.shape[1:]))
    return dataclasses.replace(decision, leaf=dataclasses.replace(leaf, names=names))


def _of_leaf(one: Promised) -> Promised:
    marked = (tuple(dataclasses.replace(leg, of_leaf=True) for leg in spelling) for spelling in one.spellings)
    return dataclasses.replace(one, spellings=tuple(marked))


def _facts(setup: Setup, options: StepOptions, batch: Any, on_cpu: bool) -> _Facts:
    sizes = axis_sizes(setup.mesh)
    sharding = batch_sharding(setup.mesh, setup.strategy)
    batch_axes = tuple(axis for entry in sharding.spec for axis in spec_axes(entry) if sizes[axis] > 1)
    rules = setup.strategy.activations

    def axes_of(*wanted: str) -> set[str]:
        chosen = ((rules.name_rule(name), name) for name in wanted)
        found = {axis for rule, _ in chosen if rule is not None for axis in _axes_in(rule.value)}
        return {axis for axis in found if sizes.get(axis, 1) > 1}

    sequence = axes_of("norm_seq")
    others = axes_of(*(name for name in rules.names if name not in ("batch", "act_expert")))
    shapes = [(np.shape(x), x.dtype) for x in jax.tree.leaves(batch)]
    split = math.prod(sizes[axis] for axis in batch_axes) * options.accumulate
    rows = max((shape[0] for shape, _ in shapes if shape), default=0) // split
    # Rows of whole numbers are tokens where nothing else is in the batch; bytes are pixels.
    has_floats = any(dtype.kind not in "iub" and len(shape) > 1 for shape, dtype in shapes)
    rows_of_ids = [shape for shape, dtype in shapes if len(shape) == 2 and dtype.kind in "iu" and dtype.itemsize > 1]
    has_images = any(len(shape) > 2 for shape, _ in shapes)
    tokens = [] if has_floats or has_images else [math.prod(shape) // split for shape in rows_of_ids]
    return _Facts(
        setup=setup,
        options=options,
        on_cpu=on_cpu,
        sizes=sizes,
        batch_axes=batch_axes,
        tensor_axes=tuple(axis for axis in sizes if axis in others - set(batch_axes)),
        sequence_axes=tuple(axis for axis in sizes if axis in sequence),
        rows=rows,
        tokens=max(tokens, default=None),
    )


def _axes_in(rule: Any) -> Iterator[str]:
    """Every mesh axis that a rule for a name may use."""
    if isinstance(rule, str):
        yield rule
    elif isinstance(rule, tuple):
        for one in rule:
            yield from _axes_in(one)
    elif hasattr(rule, "alternatives"):
        yield from _axes_in(tuple(one for one in rule.alternatives if one is not None))


def _specs(tree: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _split_axes(facts: _Facts, spec: PartitionSpec) -> tuple[str, ...]:
    return facts.ordered(axis for entry in spec for axis in spec_axes(entry))


def _stack(decision: Decision) -> int:
    """Layers stacked in a leaf."""
    names = decision.leaf.names or ()
    return math.prod(size for size, name in zip(decision.leaf.shape, names, strict=False) if name == "layers")


def _owned_axes(facts: _Facts, decision: Decision) -> tuple[str, ...]:
    """Axes whose devices own whole experts: their weights are neither gathered nor reduced there."""
    names = decision.leaf.names or ()
    return facts.ordered(
        axis for entry, name in zip(decision.spec, names, strict=False) if name == "expert" for axis in spec_axes(entry)
    )


def _layer_elements(facts: _Facts, decision: Decision, gathered: Iterable[str]) -> int:
    """Numbers of one layer of a leaf that a device holds once the axes `gathered` are whole."""
    others = set(_split_axes(facts, decision.spec)) - set(gathered)
    return decision.leaf.size // _stack(decision) // facts.ways(others)


def _gathered(facts: _Facts, decision: Decision) -> Promised | None:
    """A parameter that is split over axes on which every device needs it whole."""
    axes = set(_split_axes(facts, decision.spec)) - set(facts.tensor_axes) - set(_owned_axes(facts, decision))
    if not axes:
        return None
    stack = _stack(decision)
    # Outside a loop over layers what was gathered for the forward pass is still there in the backward; inside, a layer
    # that is computed again may gather again.
    fewest = facts.passes * facts.micro_steps * stack if stack > 1 else 1
    most = (facts.passes + bool(facts.options.remat and stack > 1)) * facts.micro_steps * stack
    dtype = facts.wire(facts.compute(decision))
    leg = facts.leg("all-gather", axes, _layer_elements(facts, decision, axes), dtype)
    return Promised(
        role="weights before use", tensors=(decision.path,), count=(fewest, most), stack=stack, spellings=((leg,),)
    )


def _reduced(facts: _Facts, decision: Decision, grads: PartitionSpec, update: PartitionSpec) -> Promised | None:
    """A gradient: scattered over the axes that split its update, summed over the others that split the batch."""
    # Micro-steps keep their sums as the gradients' rules say; otherwise gradients go straight to the update's shards.
    keeps_sums = facts.options.accumulate > 1 and facts.options.accumulate_mode == "each"
    owned = set(_owned_axes(facts, decision))
    split = _split_axes(facts, grads if keeps_sums else update)
    partial = (set(facts.batch_axes) | set(facts.sequence_axes)) - owned - set(_split_axes(facts, decision.spec))
    partial |= (set(_split_axes(facts, decision.spec)) & set(facts.batch_axes)) - owned
    scattered = facts.ordered(set(split) & partial)
    rest = facts.ordered(partial - set(scattered))
    by_sequence = facts.ordered(set(rest) & set(facts.sequence_axes))
    if not scattered and not rest:
        return None
    dtype = facts.wire(facts.options.precision.reduce_dtype(facts.compute(decision)))
    once = facts.options.accumulate if facts.options.accumulate_mode == "once" else 1
    kept = set(_split_axes(facts, decision.spec)) - partial
    elements = decision.leaf.size // _stack(decision) // facts.ways(kept)
    part = elements // facts.ways(scattered)
    scatter = [facts.leg("reduce-scatter", scattered, elements, dtype)] if scattered else []
    # With one reduction after all micro-steps, the axes that split the sequence still reduce in each of them.
    inner = [facts.leg("all-reduce", by_sequence, elements, dtype, times=once)] if once > 1 and by_sequence else []
    if inner:
        rest = facts.ordered(set(rest) - set(by_sequence))
    spellings = [[*inner, *scatter, *([facts.leg("all-reduce", rest, part, dtype)] if rest else [])]]
    if keeps_sums:  # the compiler may scatter a micro-step's gradient although its sum is kept whole
        finer = facts.ordered(set(_split_axes(facts, update)) & partial)
        coarse = facts.ordered(partial - set(finer))
        if finer != scattered:
            legs = [facts.leg("reduce-scatter", finer, elements, dtype)]
            legs += [facts.leg("all-reduce", coarse, elements // facts.ways(finer), dtype)] if coarse else []
            spellings.append(legs)
    if len(rest) > 1 and not inner:
        spellings.append([*scatter, *(facts.leg("all-reduce", (axis,), part, dtype) for axis in rest)])
    # The compiler does not bother to scatter small arrays, and XLA:CPU not always to find the slice behind a sum.
    if scattered and (facts.on_cpu or elements * _ITEMSIZE.get(dtype, 4) <= MIN_SHARDED_BYTES):
        spellings.append([*inner, facts.leg("all-reduce", (*scattered, *rest), elements, dtype)])
        if rest and not inner:
            summed = facts.leg("all-reduce", rest, elements, dtype)
            spellings.append([summed, facts.leg("reduce-scatter", scattered, elements, dtype)])
            spellings.append([summed, facts.leg("all-reduce", scattered, elements, dtype)])
    if keeps_sums:
        spellings = [[dataclasses.replace(leg, in_loop=True) for leg in spelling] for spelling in spellings]
        if rest:  # a sum of sums: the compiler may reduce that of all micro-steps, after their loop
            later = facts.leg("all-reduce", rest, part, dtype, serves=facts.options.accumulate)
            spellings.insert(1, [*(dataclasses.replace(leg, in_loop=True) for leg in scatter), later])
    stack = _stack(decision)
    runs = stack * facts.micro_steps
    # A table that is looked up and multiplied by has two gradients, which are summed after their reduction.
    uses = 2 if _is_tied(facts, decision) else 1
    return Promised(
        role="gradients",
        tensors=(decision.path,),
        vector=stack * max(decision.leaf.shape, default=0),
        count=(runs, uses * runs),
        stack=stack,
        spellings=tuple(tuple(spelling) for spelling in spellings),
    )


def _is_tied(facts: _Facts, decision: Decision) -> bool:
    """Whether a leaf is the model's only one with the vocabulary, and so both its embedding and its head."""

    def has_vocabulary(one: Decision) -> bool:
        return "vocab" in (one.leaf.names or ())

    return has_vocabulary(decision) and sum(map(has_vocabulary, facts.setup.table.params)) == 1


def _renewed(facts: _Facts, decision: Decision, update: PartitionSpec) -> Promised | None:
    """A parameter whose update is split more than itself: the new value is gathered."""
    axes = set(_split_axes(facts, update)) - set(_split_axes(facts, decision.spec))
    if not axes:
        return None
    stack = _stack(decision)
    leg = facts.leg("all-gather", axes, _layer_elements(facts, decision, ()), facts.wire(decision.leaf.dtype))
    return Promised(
        role="new parameters", tensors=(decision.path,), count=(stack, stack), stack=stack, spellings=((leg,),)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Matmuls with split weights
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Block:
    """Weights under one parent that are split over one axis."""

    axis: str
    rows: list[Decision] = dataclasses.field(default_factory=list)
    """Row-parallel: contracted over the split dim."""
    columns: list[Decision] = dataclasses.field(default_factory=list)
    """Column-parallel: the split dim is in the result."""


def _contracted(facts: _Facts) -> Iterator[Promised]:
    blocks: dict[tuple[str, str, int], _Block] = {}
    for decision in facts.setup.table.params:
        for axis in facts.tensor_axes:
            side = _side(decision, axis)
            if side is not None:
                parent = "/".join(decision.path.split("/")[:-2])
                block = blocks.setdefault((parent, axis, _stack(decision)), _Block(axis))
                (block.rows if side == "row" else block.columns).append(decision)
    for block in blocks.values():
        yield from _block_promises(facts, block)
    vocabulary = {
        axis
        for block in blocks.values()
        for decision in (*block.rows, *block.columns)
        if "vocab" in (decision.leaf.names or ())
        for axis in [block.axis]
    }
    for axis in facts.ordered(vocabulary):
        if facts.tokens is not None:
            in_loop = facts.options.accumulate > 1
            leg = facts.leg("all-reduce", (axis,), facts.tokens, "f32", forward=True, in_loop=in_loop)
            most = 3 * facts.options.accumulate
            yield Promised(
                role="loss over a split vocabulary",
                tensors=("max, sum and target logit of each token",),
                count=(0, most),
                spellings=((leg,),),
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


def _block_promises(facts: _Facts, block: _Block) -> Iterator[Promised]:
    some = (block.rows or block.columns)[0]
    stack, width = _stack(some), _width(some)
    steps = facts.options.accumulate
    dtype = facts.wire(facts.compute(some))
    by_sequence = block.axis in facts.sequence_axes
    exact = facts.tokens is not None
    elements = width * (facts.tokens if facts.tokens is not None else max(1, facts.rows))
    recomputed = 2 if facts.options.remat and stack > 1 else 1
    tensors = tuple(decision.path for decision in (*block.rows, *block.columns))
    tied = any(_is_tied(facts, decision) for decision in block.rows)
    inputs = len(block.rows) if block.rows and block.columns else 1 if block.columns or tied else 0
    # The first block's input may be the batch itself, which needs no gradient.
    fewest_inputs = inputs if stack > 1 else 0

    def leg(kind: str, **more: Any) -> Leg:
        return facts.leg(kind, (block.axis,), elements, dtype, multiple=not exact, **more)

    def promise(role: str, count: tuple[int, int], *spellings: tuple[Leg, ...]) -> Promised:
        least, most = (number * stack * steps for number in count)
        return Promised(role=role, tensors=tensors, count=(least, most), stack=1, spellings=spellings)

    summed = leg("reduce-scatter") if by_sequence else leg("all-reduce")
    num_rows = len(block.rows)
    num_lookups = sum("vocab" in (decision.leaf.names or ()) for decision in block.rows)
    if num_rows - num_lookups:
        least = num_rows - num_lookups
        yield promise("partial sums, forward", (least, least * recomputed), (summed,))
    if num_lookups:  # XLA sums the result of a lookup whole, and slices it then
        spelled = ((leg("all-reduce"),), (summed,)) if by_sequence else ((summed,),)
        yield promise("partial sums, forward", (num_lookups, num_lookups), *spelled)
    if inputs:
        # XLA:CPU sums every weight's share of the input's gradient over devices by itself.
        shares = leg("all-reduce", times=max(1, len(block.columns)))
        on_cpu = ((summed,), (shares,)) if by_sequence and len(block.columns) < 2 else ((shares,),)
        yield promise("partial sums, backward", (fewest_inputs, inputs), *(on_cpu if facts.on_cpu else ((summed,),)))
    if by_sequence:
        whole = (leg("all-gather"),)
        if inputs:
            yield promise("sequence made whole, forward", (inputs, inputs * (1 + recomputed)), whole)
        if num_rows:
            yield promise("sequence made whole, backward", (num_rows, num_rows), whole)


def _width(decision: Decision) -> int:
    """Size of the residual stream, as a weight tells it."""
    names, shape = decision.leaf.names, decision.leaf.shape
    if names is not None and "embed" in names:
        return shape[names.index("embed")]
    split = next(dim for dim, entry in enumerate(decision.spec) if entry is not None)
    return shape[-1] if split != len(shape) - 1 else shape[-2]


def _merged(found: Sequence[Promised]) -> tuple[Promised, ...]:
    """Promises that differ in their tensors only, as one."""
    merged: dict[Any, Promised] = {}
    for one in found:
        key = (one.role, one.stack, one.spellings, one.stacked)
        if key in merged:
            so_far = merged[key]
            count = (so_far.count[0] + one.count[0], so_far.count[1] + one.count[1])
            vector = max(so_far.vector, one.vector)
            one = dataclasses.replace(so_far, tensors=so_far.tensors + one.tensors, count=count, vector=vector)
        merged[key] = one
    return tuple(merged.values())
