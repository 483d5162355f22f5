"""Expected collectives and the description of a training step that they are derived from.

Each `Parallelism` yields an `ExpectedCollective` per array size for the collectives that XLA inserts because of its
rules. It describes the cheapest form. XLA may also lower it as:

    gather over several axes      axis by axis
    sum over several axes         axis by axis, or over all axes; scattered first or last
    ... with `may_all_reduce`     all-reduced and then sliced: at most twice the bytes over each axis
    stacked layers                per layer inside their loop, or the full stack at once
    single axis, as a ring        N-1 permutes of the same bytes, like `meshpar.collectives.all_gather_matmul`

Collectives of kernels are not listed here: they are read from the traced step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.sharding.types import Decision, Leaf, axes_of_spec, spec_axes, without_axes

if TYPE_CHECKING:
    from meshpar.parallel.quantization import Quantize

_HLO_DTYPE = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn"}

ITEMSIZE = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "u8": 1, "f8e4m3fn": 1}
"""Bytes per element by HLO dtype."""

WEIGHTS, GRADIENTS, RENEWED = "weights before use", "gradients", "new parameters"
"""Roles of the collectives for parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCollective:
    """A collective that the program must contain, for arrays of the same size, with its count per step."""

    role: str
    """Purpose: `weights before use`, `gradients`, `new parameters`, `partial sums, forward`, ..."""
    kind: Literal["gather", "sum", "exchange"]
    """`gather` is an all-gather, `sum` an all-reduce or reduce-scatter, `exchange` an all-to-all."""
    axes: tuple[str, ...]
    """Mesh axes in the mesh's order."""
    scattered: tuple[str, ...] = ()
    """For a sum, the axes whose ranks keep only their shard of the result."""
    may_all_reduce: bool | Literal["always"] = False
    """For a scattered sum, whether XLA may all-reduce it and slice; `"always"` if it always does."""
    elements: int
    """Number of elements of the array if it is replicated over `axes`."""
    multiple: bool = False
    """Whether arrays with a multiple of `elements` match, too."""
    dtype: str
    """HLO dtype on the wire."""
    count: tuple[int, int]
    """Minimum and maximum number of arrays per step, over all tensors."""
    counts: tuple[tuple[str, int, int], ...] = ()
    """Axes with a different count, as (axis, minimum, maximum)."""
    tensors: tuple[str, ...]
    stack: int = 1
    """Layers stacked in one array; XLA may send them with one collective."""
    is_param: bool = False
    """True for collectives of parameters and gradients. In the loop over layers, only stacked parameters have them."""
    forward_only: bool = False
    """True if only the forward pass contains it."""
    outside_loops: bool = False
    """True if it is outside all loops."""
    as_stacked: ExpectedCollective | None = None
    """For a leaf without names, the alternative in case its first dim is a stack of layers that a loop runs over."""

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes of a sum that are all-reduced instead of scattered."""
        return tuple(axis for axis in self.axes if axis not in self.scattered) if self.kind == "sum" else ()

    def count_over(self, axis: str) -> tuple[int, int]:
        """Return the minimum and maximum count per step over an axis."""
        return next(((minimum, maximum) for name, minimum, maximum in self.counts if name == axis), self.count)

    def forms(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Return the collectives of the cheapest form as (HLO kind, axes, payload elements)."""
        if self.kind != "sum":
            return (({"gather": "all-gather", "exchange": "all-to-all"}[self.kind], self.axes, self.elements),)
        shard = self.elements // math.prod(sizes[axis] for axis in self.scattered)
        scatter = (("reduce-scatter", self.scattered, self.elements),) if self.scattered else ()
        return (*scatter, *((("all-reduce", self.rest, shard),) if self.rest else ()))


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter with the shardings of its gradient and update."""

    decision: Decision
    grads: PartitionSpec
    update: PartitionSpec

    @property
    def leaf(self) -> Leaf:
        return self.decision.leaf

    @property
    def spec(self) -> PartitionSpec:
        return self.decision.spec


class ParamUsage(NamedTuple):
    """Uses of a parameter in a model without activation constraints; see `meshpar.inspect.param_usage`."""

    full: int
    """Number of uses of the full parameter."""
    slices: tuple[tuple[int, int], ...] = ()
    """Pairs (number of elements of a slice, number of uses)."""
    rows: int = 0
    """Total number of rows that lookups read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Description of a training step: mesh, batch, parameters and options."""

    sizes: dict[str, int]
    """Size of every mesh axis, in the mesh's order."""
    accumulate: int = 1
    """Number of micro-steps."""
    is_once: bool = False
    """True if weights are gathered before the first micro-step and gradients are reduced after the last."""
    deferred_axes: tuple[str, ...] = ()
    """Axes over which gradients are reduced once, after the last micro-step. Each micro-step reduces them over the
    other batch axes."""
    is_remat: bool = False
    interleave: int = 1
    """Number of slices of the local batch that stacked layers interleave."""
    weights: tuple[Weight, ...] = ()
    batch_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    """Axes that shard activation dims other than the batch."""
    sequence_axes: tuple[str, ...] = ()
    """Axes that shard the sequence of the residual stream between blocks (sequence parallelism)."""
    context_axes: tuple[str, ...] = ()
    """Axes that shard the sequence in every layer. Gradients are reduced over them, as over batch axes."""
    rows: int = 0
    """Examples per device and micro-step."""
    tokens: int | None = None
    """Tokens per device and micro-step; None if the batch has no tokens."""
    uses: Mapping[str, ParamUsage] = dataclasses.field(default_factory=dict)
    """Uses of parameters by path, in a model without activation constraints."""
    unannotated_axes: tuple[str, ...] = ()
    """Axes that shard the parameters in `uses` but not the batch. Activation collectives over them are unknown."""
    experts_per_token: int = 0
    """Number of experts that each token is sent to. Set for estimates only."""
    nodes_visited: Callable[[int], int] | None = None
    """Maps the number of nodes to the maximum number of nodes that a token is sent to, for dispatch that sends each
    token once per node. Set for estimates only."""
    row_bytes: Callable[[str, int], int | None] | None = None
    """Maps a direction (`dispatch`, `combine`, `grad`) and a width to the bytes of a quantized token sent to experts,
    or None if that direction is not quantized. Set for estimates only."""
    compute: str | None = None
    """Compute dtype of the layers; None means the dtype of each parameter."""
    reduce: str | None = None
    """Dtype of gradient reductions; None means at least float32."""
    low_precision: frozenset[str] = frozenset()
    """Paths of parameters in modules with fp8 or int8 matmuls."""
    rowwise_fp8: frozenset[str] = frozenset()
    """The subset of `low_precision` with one scale per row."""
    computes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Compute dtypes by parameter path, for modules that override `compute`."""
    quantize: Quantize | None = None
    """Quantization of gathered weights and reduced gradients by kernels; None if XLA sends them."""
    is_prefetched: bool = False
    """True if the weights of a layer are gathered while the previous layer computes."""
    is_pipelined: bool = False
    """True if pipeline stages run the step."""
    is_tied: bool = False
    """True if the embedding and the head share a table."""
    exchanges_rows: bool = False
    """True if a kernel sends the embedding rows of the tokens and reduces the gradient of the table."""
    vocab_chunks: int = 1
    """Number of vocabulary chunks in which the output layer is computed."""
    on_cpu: bool = False
    """True if XLA:CPU compiles the step. It sends 16-bit floats as float32 and all-reduces before adding or slicing."""

    @property
    def micro_steps(self) -> int:
        """Number of times per step that weights are gathered and gradients are reduced."""
        return 1 if self.is_once else self.accumulate

    @property
    def is_by_device(self) -> bool:
        """True if each device applies full weights to its local batch, so that tokens stay on their device."""
        return not self.is_pipelined and (self.is_once or self.quantize is not None)

    @property
    def tokens_or_rows(self) -> int:
        """Tokens per device and micro-step, or examples if the batch has no tokens."""
        return self.rows if self.tokens is None else self.tokens

    def wire(self, dtype: Any) -> str:
        """Return the HLO dtype on the wire. XLA:CPU sends 16-bit floats as float32, and fp8 as float16."""
        name = _HLO_DTYPE.get(np.dtype(dtype).name, np.dtype(dtype).name)
        if self.on_cpu and name.startswith("f8"):
            return "f16"
        return "f32" if self.on_cpu and name in ("bf16", "f16") else name

    def compute_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which a parameter is used."""
        return np.dtype(jnp.dtype(self.computes.get(decision.path) or self.compute or decision.leaf.dtype))

    def gathered_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which a parameter is gathered: fp8 if the layer that uses it also gathers it."""
        leaf, ahead = decision.leaf, self.is_prefetched or self.is_once or self.is_pipelined
        by_kernel = decision.leaf.has("expert")  # the kernel rounds expert weights after gathering them
        if decision.path not in self.low_precision or by_kernel or ahead or leaf.num_layers == 1 or leaf.layer_ndim < 2:
            return self.compute_dtype(decision)
        return np.dtype(jnp.float8_e4m3fn)

    def reduce_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which the gradient of a parameter is reduced."""
        return np.dtype(jnp.dtype(self.reduce or jnp.promote_types(self.compute_dtype(decision), jnp.float32)))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes whose size is greater than 1, in the mesh's order."""
        wanted = set(axes)
        return tuple([axis for axis, size in self.sizes.items() if axis in wanted and size > 1]) if wanted else ()

    def num_shards(self, axes: Iterable[str]) -> int:
        """Return the product of the axis sizes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def recomputed(self, stack: int) -> int:
        """Return how often the forward pass runs per micro-step, for layers in a stack of `stack` layers."""
        return 2 if self.is_remat and stack > 1 else 1

    def slices(self, stack: int) -> int:
        """Return the number of batch slices on which a stack of `stack` layers runs."""
        return self.interleave if stack > 1 else 1


def split_axes(step: StepSpec, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes of a spec whose size is greater than 1, in the mesh's order."""
    return step.ordered(axes_of_spec(spec))


def with_layers(params: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the parameters with the first dim of other stacks named `layers`.

    Such a stack is a top-level module with at least two leaves, whose first dims all have the same size and the name
    `dense_layers` or no name.
    """
    modules: dict[str, list[Leaf]] = {}
    for decision in params:
        modules.setdefault(decision.path.partition("/")[0], []).append(decision.leaf)

    def named(decision: Decision) -> Decision:
        leaf, leaves = decision.leaf, modules[decision.path.partition("/")[0]]
        is_unnamed = all(
            len(other.shape) > 1 and (other.names or ("",))[0] in (None, "dense_layers") for other in leaves
        )
        is_same_size = len({other.shape[:1] for other in leaves}) == 1 < len(leaves)
        if not (is_unnamed and is_same_size and max(len(other.shape) for other in leaves) > 2):
            return decision
        return dataclasses.replace(decision, leaf=dataclasses.replace(leaf, names=("layers", *(leaf.names or ())[1:])))

    return tuple(map(named, params))


def of_stage(weight: Weight, axis: str, stages: int) -> Weight:
    """Return the shard of a parameter on one pipeline stage."""
    leaf = weight.leaf
    spec, grads, update = (without_axes(spec, (axis,)) for spec in (weight.spec, weight.grads, weight.update))
    if leaf.is_stacked:
        shape, names = (leaf.shape[0] // stages, *leaf.shape[1:]), (None, *(leaf.names or ())[1:])
        leaf = dataclasses.replace(leaf, shape=shape, names=names)
    return Weight(dataclasses.replace(weight.decision, leaf=leaf, spec=spec), grads, update)


def owned_axes(step: StepSpec, decision: Decision) -> tuple[str, ...]:
    """Return the axes that shard the expert dim. Expert weights are not gathered or reduced over them.

    A router is not sharded this way, although its last dim is `expert`: every rank scores all experts.
    """
    if not decision.leaf.is_expert or step.is_by_device:
        return ()
    pairs = zip(decision.spec, decision.leaf.names or (), strict=False)
    return step.ordered(axis for entry, name in pairs if name == "expert" for axis in spec_axes(entry))


def layer_elements(step: StepSpec, decision: Decision, gathered: Iterable[str]) -> int:
    """Return the local number of elements of a leaf, per layer, after gathering it over some axes."""
    remaining = set(split_axes(step, decision.spec)) - set(gathered)
    return decision.leaf.size // decision.leaf.num_layers // step.num_shards(remaining)


def parent(decision: Decision) -> str:
    """Return the path of the module that contains the leaf's module."""
    return "/".join(decision.path.split("/")[:-2])


def merged(collectives: Iterable[ExpectedCollective]) -> tuple[ExpectedCollective, ...]:
    """Merge collectives that differ only in tensors and counts. The counts are added."""
    result: dict[Any, ExpectedCollective] = {}
    for new in collectives:
        key = dataclasses.replace(new, tensors=(), count=(0, 0), counts=tuple((axis, 0, 0) for axis, *_ in new.counts))
        if (old := result.get(key)) is not None:
            new = dataclasses.replace(
                old,
                tensors=old.tensors + new.tensors,
                count=(old.count[0] + new.count[0], old.count[1] + new.count[1]),
                counts=tuple(
                    (axis, low + more_low, high + more_high)
                    for (axis, low, high), (_, more_low, more_high) in zip(old.counts, new.counts, strict=True)
                ),
            )
        result[key] = new
    return tuple(result.values())
