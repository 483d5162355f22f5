"""What a strategy promises to send: the terms, the facts of a step they follow from, and leaves as promises see them.

A part yields `Promised`, one for arrays of one size, for the collectives that XLA puts in because of its rules. XLA may
lower one in several forms; a promise names the cheapest and allows these:

    gather over several axes      one axis after the other
    sum over several axes         one axis after the other, or all at once; scattered first or last
    ... with `whole`              summed whole on every rank, and sliced: at most twice the bytes over each axis
    stacked layers                layer by layer in their loop, or the whole stack at once
    one axis, round a ring        N-1 permutes of the same bytes, as `meshpar.collectives.all_gather_matmul` sends

What kernels send is not promised: the traced step says it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.sharding.types import Decision, axes_of_spec, scores_experts, spec_axes, without_axes

if TYPE_CHECKING:
    from meshpar.parallel.quantization import Quantize

_HLO_DTYPE = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn"}

ITEMSIZE = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "u8": 1, "f8e4m3fn": 1}
"""Bytes of a number on the wire, by its name in HLO."""

WEIGHTS, GRADIENTS, RENEWED = "weights before use", "gradients", "new parameters"
"""Roles of what is promised for parameters, one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCollective:
    """What will be sent for some arrays of one size, and how often a step."""

    role: str
    """Why: `weights before use`, `gradients`, `new parameters`, `partial sums, forward`, ..."""
    kind: Literal["gather", "sum", "exchange"]
    """All-gather; all-reduce or reduce-scatter; all-to-all."""
    axes: tuple[str, ...]
    """Over which, in the mesh's order."""
    scattered: tuple[str, ...] = ()
    """Of a sum: axes whose ranks keep their part of it only."""
    whole: bool | Literal["only"] = False
    """Of a scattered sum: whether XLA may, or is sure to, sum all of it on every rank first."""
    elements: int
    """Numbers of one array replicated over its axes; with `multiple`, any multiple of it."""
    multiple: bool = False
    dtype: str
    """On the wire, as HLO names it."""
    count: tuple[int, int]
    """Fewest and most arrays a step, all tensors together."""
    counts: tuple[tuple[str, int, int], ...] = ()
    """Axes over which it is sent in other numbers: axis, fewest, most."""
    tensors: tuple[str, ...]
    stack: int = 1
    """Layers stacked in one array: so many small collectives may come as one."""
    of_leaf: bool = False
    """Whether it is about one parameter: one that is not stacked sends nothing in the loop over layers."""
    forward: bool = False
    """Whether only the forward pass sends it."""
    outside: bool = False
    """Whether it is sent outside of every loop."""
    stacked: ExpectedCollective | None = None
    """For a leaf without names: the promise if its first dim turns out to be layers that a loop runs over."""

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes over which what is left of a scattered sum is all-reduced."""
        return tuple(axis for axis in self.axes if axis not in self.scattered) if self.kind == "sum" else ()

    def count_over(self, axis: str) -> tuple[int, int]:
        """Fewest and most arrays a step over one of its axes."""
        return next(((least, most) for name, least, most in self.counts if name == axis), self.count)

    def forms(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """The cheapest form: (HLO kind, axes, numbers in the payload) of each collective of it."""
        if self.kind != "sum":
            return (({"gather": "all-gather", "exchange": "all-to-all"}[self.kind], self.axes, self.elements),)
        part = self.elements // math.prod(sizes[axis] for axis in self.scattered)
        scatter = (("reduce-scatter", self.scattered, self.elements),) if self.scattered else ()
        return (*scatter, *((("all-reduce", self.rest, part),) if self.rest else ()))


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, with how its gradient and its update lie."""

    decision: Decision
    grads: PartitionSpec
    update: PartitionSpec


class ParamUsage(NamedTuple):
    """How a model that lays no activations out uses a parameter; see `meshpar.inspect.param_usage`."""

    whole: int
    """Times."""
    slices: tuple[tuple[int, int], ...] = ()
    """(numbers in a slice, times)."""
    rows: int = 0
    """Looked up in it, in all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What a part has to know of a training step."""

    sizes: dict[str, int]
    """Of every mesh axis, in the mesh's order."""
    accumulate: int = 1
    """Micro-steps."""
    is_once: bool = False
    """Whether weights are gathered before all micro-steps, and gradients reduced behind them."""
    is_remat: bool = False
    interleave: int = 1
    """Slices of a device's rows that stacked layers run beside each other."""
    weights: tuple[Weight, ...] = ()
    batch_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    """Axes that split activations in other dims than the batch."""
    sequence_axes: tuple[str, ...] = ()
    """Axes that split the residual stream's sequence between blocks only."""
    context_axes: tuple[str, ...] = ()
    """Axes that split the sequence everywhere: weights are replicated there, as over axes that split the batch."""
    rows: int = 0
    """Of one device in one micro-step."""
    tokens: int | None = None
    """Of one device in one micro-step; None when the batch holds no tokens."""
    uses: Mapping[str, ParamUsage] = dataclasses.field(default_factory=dict)
    """Of parameters by path, of a model that lays no activations out."""
    unannotated_axes: tuple[str, ...] = ()
    """Axes that split such parameters and not the batch: nothing says what activations send over them."""
    choices: int = 0
    """Experts that a token visits; told for estimates only."""
    nodes_visited: Callable[[int], int] | None = None
    """Of so many nodes, those that these lie on, where a token goes once to each; told for estimates only."""
    row_bytes: Callable[[str, int], int | None] | None = None
    """Of a row of so many numbers to experts, back, or of gradients (`dispatch`, `combine`, `grad`), where it is coded;
    None: none is. Told for estimates only."""
    compute: str | None = None
    """The dtype that layers compute in; None: each parameter's own."""
    reduce: str | None = None
    """The dtype that gradients are summed in; None: float32 at the least."""
    narrow: frozenset[str] = frozenset()
    """Paths of parameters in modules whose matmuls are in 8 bits."""
    by_row: frozenset[str] = frozenset()
    """Of these those with a scale for each row."""
    computes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of parameters by path, in modules that compute in another dtype."""
    quantize: Quantize | None = None
    """How kernels send weights and gradients of split parameters; None: as XLA sends them."""
    is_prefetched: bool = False
    """Whether the weights of a layer are gathered while the one before it computes."""
    by_stages: bool = False
    """Whether stages run the step."""
    is_tied: bool = False
    """Whether one table of the vocabulary is both embedding and head."""
    exchanges_rows: bool = False
    """Whether a kernel sends the rows that tokens look up, and all that the table's gradient needs."""
    vocab_chunks: int = 1
    """In how many parts, one after the other, the output layer's matrix is used."""
    on_cpu: bool = False
    """Whether XLA:CPU compiles it, which sends float32 for less, and sums before it adds and slices."""

    @property
    def micro_steps(self) -> int:
        """How often weights are gathered and gradients reduced."""
        return 1 if self.is_once else self.accumulate

    @property
    def is_by_device(self) -> bool:
        """Whether every device computes its own rows with whole weights: nothing travels to the ranks of experts."""
        return not self.by_stages and (self.is_once or self.quantize is not None)

    def wire(self, dtype: Any) -> str:
        """A dtype as HLO names it; XLA:CPU sends float32 where less was asked, and float16 for 8 bits."""
        name = _HLO_DTYPE.get(np.dtype(dtype).name, np.dtype(dtype).name)
        if self.on_cpu and name.startswith("f8"):
            return "f16"
        return "f32" if self.on_cpu and name in ("bf16", "f16") else name

    def compute_dtype(self, decision: Decision) -> np.dtype:
        """In which a parameter is used."""
        return np.dtype(jnp.dtype(self.computes.get(decision.path) or self.compute or decision.leaf.dtype))

    def gathered_dtype(self, decision: Decision) -> np.dtype:
        """In which a parameter is gathered: rounded before, where that is the layer's own and not done ahead of it."""
        leaf, ahead = decision.leaf, self.is_prefetched or self.is_once or self.by_stages
        by_kernel = is_expert(decision)  # which gathers them as they are, and rounds what it has
        if decision.path not in self.narrow or by_kernel or ahead or leaf.num_layers == 1 or leaf.layer_ndim < 2:
            return self.compute_dtype(decision)
        return np.dtype(jnp.float8_e4m3fn)

    def reduce_dtype(self, decision: Decision) -> np.dtype:
        """In which its gradient is summed."""
        return np.dtype(jnp.dtype(self.reduce or jnp.promote_types(self.compute_dtype(decision), jnp.float32)))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of more than one rank, in the mesh's order."""
        wanted = set(axes)
        return tuple([axis for axis, size in self.sizes.items() if axis in wanted and size > 1]) if wanted else ()

    def num_shards(self, axes: Iterable[str]) -> int:
        """Ranks along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def recomputed(self, stack: int) -> int:
        """How often a layer's forward pass runs."""
        return 2 if self.is_remat and stack > 1 else 1


# ---- Leaves ----------------------------------------------------------------------------------------------------------


def split_axes(step: StepSpec, spec: PartitionSpec) -> tuple[str, ...]:
    """Axes of more than one rank that a spec names, in the mesh's order."""
    return step.ordered(axes_of_spec(spec))


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


def of_stage(weight: Weight, axis: str, stages: int) -> Weight:
    """A parameter as one stage holds it."""
    decision, leaf = weight.decision, weight.decision.leaf
    own, grads, update = (without_axes(spec, (axis,)) for spec in (decision.spec, weight.grads, weight.update))
    if leaf.is_stacked:
        shape, names = (leaf.shape[0] // stages, *leaf.shape[1:]), (None, *(leaf.names or ())[1:])
        leaf = dataclasses.replace(leaf, shape=shape, names=names)
    return Weight(dataclasses.replace(decision, leaf=leaf, spec=own), grads, update)


def owned_axes(step: StepSpec, decision: Decision) -> tuple[str, ...]:
    """Axes whose ranks own whole experts: their weights are neither gathered nor reduced there.

    A router, whose last dim is that of the experts, is no expert's: every rank scores all of them.
    """
    names = decision.leaf.names or ()
    if "expert" not in names or is_router(decision) or step.is_by_device:
        return ()
    return step.ordered(
        axis for entry, name in zip(decision.spec, names, strict=False) if name == "expert" for axis in spec_axes(entry)
    )


def is_router(decision: Decision) -> bool:
    """Whether a leaf scores experts."""
    return scores_experts(decision.leaf.names or ())


def is_expert(decision: Decision) -> bool:
    """Whether a leaf has a dim of experts, a router's among them."""
    return "expert" in (decision.leaf.names or ())


def has_vocabulary(decision: Decision) -> bool:
    """Whether a leaf has a dim of the vocabulary."""
    return "vocab" in (decision.leaf.names or ())


def is_looked_up(decision: Decision) -> bool:
    """Whether tokens choose rows of a leaf: a table of the vocabulary."""
    names = decision.leaf.names or ()
    return {"vocab", "embed"} <= set(names) and names.index("vocab") < names.index("embed")


def layer_elements(step: StepSpec, decision: Decision, whole: Iterable[str]) -> int:
    """Numbers of one layer of a leaf that a rank holds once the axes `whole` no longer split it."""
    others = set(split_axes(step, decision.spec)) - set(whole)
    return decision.leaf.size // decision.leaf.num_layers // step.num_shards(others)


def parent(decision: Decision) -> str:
    """Path of the module that a leaf's own module stands in."""
    return "/".join(decision.path.split("/")[:-2])


def size_of(decision: Decision, name: str) -> int:
    """Size of the dim with a name."""
    return decision.leaf.shape[(decision.leaf.names or ()).index(name)]


def merged(found: Iterable[ExpectedCollective]) -> tuple[ExpectedCollective, ...]:
    """Promises that differ in their tensors only, as one."""
    joined: dict[Any, ExpectedCollective] = {}
    for one in found:
        key = dataclasses.replace(one, tensors=(), count=(0, 0), counts=tuple((axis, 0, 0) for axis, *_ in one.counts))
        if key in joined:
            so_far = joined[key]
            one = dataclasses.replace(
                so_far,
                tensors=so_far.tensors + one.tensors,
                count=_added(so_far.count, one.count),
                counts=tuple(
                    (axis, *_added(mine, theirs))
                    for (axis, *mine), (_, *theirs) in zip(so_far.counts, one.counts, strict=True)
                ),
            )
        joined[key] = one
    return tuple(joined.values())


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]
