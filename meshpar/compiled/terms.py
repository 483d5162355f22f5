"""The terms of a promise: one collective of it, how often it is due, and the facts of a step that both follow from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.compiled.census import bytes_sent
from meshpar.sharding.rules import REFINES
from meshpar.sharding.types import Decision, axes_of_spec, axis_sizes, scores_experts, spec_axes
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup

ITEMSIZE = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "u8": 1}
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
    outside: bool = False
    """Whether it is sent outside of every loop, once a step."""
    of_leaf: bool = False
    """Whether it is about one parameter: one that is not stacked sends nothing in the loop over layers."""

    @property
    def bytes_sent_per_device(self) -> float:
        """Each time it runs."""
        return bytes_sent(self.kind, self.elements * ITEMSIZE.get(self.dtype, 4), self.group_size)


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
    scope: str = ""
    """A named scope whose kernels send what is promised and nothing else; empty: there is none."""
    stacked: Promised | None = None
    """For a leaf without names: the promise if its first dim turns out to be layers that a loop runs over."""


# ---------------------------------------------------------------------------------------------------------------------
# Facts
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Facts:
    """What every promise is made from."""

    setup: Setup
    leaves: tuple[Decision, ...]
    """The parameters in question."""
    options: StepOptions
    on_cpu: bool
    sizes: dict[str, int]
    batch_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    """Axes that split activations in other dims than the batch."""
    sequence_axes: tuple[str, ...]
    """Axes that split the residual stream's sequence between blocks only."""
    context_axes: tuple[str, ...]
    """Axes that split the sequence everywhere: weights are whole there, as over axes that split the batch."""
    has_ring: bool
    """Whether they split it inside attention too, where it goes round a ring; otherwise they split heads there."""
    rows: int
    """Of one device in one micro-step."""
    tokens: int | None
    """Of one device in one micro-step; None when the batch holds no tokens."""
    by_stages: bool = False
    """Whether stages run the step: weights are gathered before their microbatches, gradients reduced behind them."""

    @property
    def micro_steps(self) -> int:
        return 1 if self.options.accumulate_mode == "once" else self.options.accumulate

    @property
    def is_once(self) -> bool:
        """Whether weights are gathered before all micro-steps, and gradients reduced behind them."""
        return self.by_stages or (self.options.accumulate_mode == "once" and self.options.accumulate > 1)

    @property
    def is_by_device(self) -> bool:
        """Whether every device computes its own rows with whole weights: nothing travels to the ranks of experts."""
        return not self.by_stages and (self.is_once or self.setup.strategy.quantize is not None)

    @property
    def passes(self) -> int:
        """How often weights are gathered in a micro-step: for the forward pass, and again for the backward."""
        return 1 if self.is_once else 2

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


def facts_of(setup: Setup, options: StepOptions, batch: Any, on_cpu: bool) -> Facts:
    """The facts of a training step; arguments as for `promise.promised`."""
    sizes = axis_sizes(setup.mesh)
    batch_axes = setup.batch_axes
    rules = setup.strategy.activations

    def axes_of(*wanted: str) -> set[str]:
        chosen = ((rules.name_rule(name), name) for name in wanted)
        found = {axis for rule, _ in chosen if rule is not None for axis in _axes_in(rule.value)}
        return {axis for axis in found if sizes.get(axis, 1) > 1}

    width = axes_of(*(name for name in rules.names if name not in ("batch", "act_expert", "seq", *REFINES)))
    context = axes_of("seq") - width - set(batch_axes)
    inside = rules.name_rule("attn_seq")
    sequence = axes_of("norm_seq") - context
    shapes = [(np.shape(x), x.dtype) for x in jax.tree.leaves(batch)]
    split = math.prod(sizes[axis] for axis in batch_axes) * options.accumulate
    rows = max((shape[0] for shape, _ in shapes if shape), default=0) // split
    split *= math.prod(sizes[axis] for axis in context)
    # Rows of whole numbers are tokens where nothing else is in the batch; bytes are pixels.
    has_floats = any(dtype.kind not in "iub" and len(shape) > 1 for shape, dtype in shapes)
    rows_of_ids = [shape for shape, dtype in shapes if len(shape) == 2 and dtype.kind in "iu" and dtype.itemsize > 1]
    has_images = any(len(shape) > 2 for shape, _ in shapes)
    tokens = [] if has_floats or has_images else [math.prod(shape) // split for shape in rows_of_ids]
    return Facts(
        setup=setup,
        leaves=with_layers(setup.table.params),
        options=options,
        on_cpu=on_cpu,
        sizes=sizes,
        batch_axes=batch_axes,
        tensor_axes=tuple(axis for axis in sizes if axis in (width | sequence) - set(batch_axes)),
        sequence_axes=tuple(axis for axis in sizes if axis in sequence),
        context_axes=tuple(axis for axis in sizes if axis in context),
        has_ring=bool(context) and (inside is None or inside.value is not None),
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


# ---------------------------------------------------------------------------------------------------------------------
# Leaves
# ---------------------------------------------------------------------------------------------------------------------


def split_axes(facts: Facts, spec: PartitionSpec) -> tuple[str, ...]:
    """Axes of more than one device that a spec names, in the mesh's order."""
    return facts.ordered(axes_of_spec(spec))


def with_layers(params: Sequence[Decision]) -> tuple[Decision, ...]:
    """The parameters, with the first dim named `layers` where a stack leaves it unnamed, for stages do not share it.

    A stack is a part of the model, two leaves at the least, all of which begin with an unnamed dim of one size.
    """
    parts: dict[str, list[Decision]] = {}
    for decision in params:
        parts.setdefault(decision.path.partition("/")[0], []).append(decision)

    def is_stack(part: Sequence[Decision]) -> bool:
        sizes = {one.leaf.shape[:1] for one in part}
        unnamed = all(len(one.leaf.shape) > 1 and (one.leaf.names or ("",))[0] is None for one in part)
        return unnamed and len(part) > 1 and len(sizes) == 1 and max(len(one.leaf.shape) for one in part) > 2

    stacks = {name for name, part in parts.items() if is_stack(part)}

    def named(one: Decision) -> Decision:
        if one.path.partition("/")[0] not in stacks:
            return one
        names = ("layers", *(one.leaf.names or ())[1:])
        return dataclasses.replace(one, leaf=dataclasses.replace(one.leaf, names=names))

    return tuple(map(named, params))


def owned_axes(facts: Facts, decision: Decision) -> tuple[str, ...]:
    """Axes whose devices own whole experts: their weights are neither gathered nor reduced there.

    A router, whose last dim is that of the experts, is no expert's: every device scores all of them.
    """
    names = decision.leaf.names or ()
    if is_router(decision) or facts.is_by_device:
        return ()
    return facts.ordered(
        axis for entry, name in zip(decision.spec, names, strict=False) if name == "expert" for axis in spec_axes(entry)
    )


def is_router(decision: Decision) -> bool:
    """Whether a leaf scores experts."""
    return scores_experts(decision.leaf.names or ())


def layer_elements(facts: Facts, decision: Decision, gathered: Iterable[str]) -> int:
    """Numbers of one layer of a leaf that a device holds once the axes `gathered` are whole."""
    others = set(split_axes(facts, decision.spec)) - set(gathered)
    return decision.leaf.size // decision.leaf.num_layers // facts.ways(others)


def is_looked_up(decision: Decision) -> bool:
    """Whether tokens choose rows of a leaf: a table of the vocabulary."""
    names = decision.leaf.names or ()
    return {"vocab", "embed"} <= set(names) and names.index("vocab") < names.index("embed")


def is_tied(facts: Facts, decision: Decision) -> bool:
    """Whether a leaf is the model's only one with the vocabulary, and so both its embedding and its head."""

    def has_vocabulary(one: Decision) -> bool:
        return "vocab" in (one.leaf.names or ())

    return has_vocabulary(decision) and sum(map(has_vocabulary, facts.setup.table.params)) == 1
