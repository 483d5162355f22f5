"""Expected collectives of a strategy, and the properties of a training step that determine them.

A parallelism yields an `ExpectedCollective` per array size, for the collectives that XLA inserts because of its rules.
Its bytes are those of the cheapest lowering. These lowerings match as well:

    gather over several axes      axis by axis
    sum over several axes         axis by axis or at once; scattered first or last
    ... with `whole`              an all-reduce followed by a slice: at most twice the bytes over each axis
    stacked layers                layer by layer in a loop, or the full stack at once
    ring over one axis            N-1 permutes with the same bytes, as in `meshpar.collectives.all_gather_matmul`

Collectives of kernels are not declared: they are read from the traced step.
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
"""Bytes per element, by HLO dtype name."""

WEIGHTS, GRADIENTS, RENEWED = "weights before use", "gradients", "new parameters"
"""Roles of collectives for parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCollective:
    """Collectives for arrays of the same size, and their number per step."""

    role: str
    """Purpose: `weights before use`, `gradients`, `new parameters`, `partial sums, forward`, ..."""
    kind: Literal["gather", "sum", "exchange"]
    """All-gather; all-reduce or reduce-scatter; all-to-all."""
    axes: tuple[str, ...]
    """Mesh axes, in mesh order."""
    scattered: tuple[str, ...] = ()
    """For a sum: axes over which the result is scattered."""
    whole: bool | Literal["only"] = False
    """For a scattered sum: True if XLA may use an all-reduce and a slice, "only" if it always does."""
    elements: int
    """Elements of the array, unsharded over `axes`. With `multiple`, any multiple of this matches."""
    multiple: bool = False
    dtype: str
    """HLO dtype of the payload."""
    count: tuple[int, int]
    """Minimum and maximum number of arrays per step, for all tensors together."""
    counts: tuple[tuple[str, int, int], ...] = ()
    """Axes with another count: (axis, minimum, maximum)."""
    tensors: tuple[str, ...]
    stack: int = 1
    """Number of layers stacked in the array. Their collectives may be lowered as a single one."""
    of_leaf: bool = False
    """True for collectives of a parameter. Unstacked parameters have none in the loop over layers."""
    forward: bool = False
    """True for collectives of the forward pass only."""
    outside: bool = False
    """True for collectives outside all loops."""
    stacked: ExpectedCollective | None = None
    """For an unnamed parameter: the alternative if the program loops over its first dim, as over layers."""

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes over which the shards of a scattered sum are all-reduced."""
        return tuple(axis for axis in self.axes if axis not in self.scattered) if self.kind == "sum" else ()

    def count_over(self, axis: str) -> tuple[int, int]:
        """Return the minimum and maximum number of arrays per step over an axis."""
        return next(((least, most) for name, least, most in self.counts if name == axis), self.count)

    def forms(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Return the cheapest lowering, as (HLO kind, axes, elements of the payload) per collective."""
        if self.kind != "sum":
            return (({"gather": "all-gather", "exchange": "all-to-all"}[self.kind], self.axes, self.elements),)
        part = self.elements // math.prod(sizes[axis] for axis in self.scattered)
        scatter = (("reduce-scatter", self.scattered, self.elements),) if self.scattered else ()
        return (*scatter, *((("all-reduce", self.rest, part),) if self.rest else ()))


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, with the shardings of its gradient and its update."""

    decision: Decision
    grads: PartitionSpec
    update: PartitionSpec


class ParamUsage(NamedTuple):
    """Uses of a parameter in a model without activation constraints; see `meshpar.inspect.param_usage`."""

    whole: int
    """Number of uses of the full parameter."""
    slices: tuple[tuple[int, int], ...] = ()
    """(elements of a slice, number of uses)."""
    rows: int = 0
    """Total number of embedding lookups."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Properties of a training step that determine its collectives."""

    sizes: dict[str, int]
    """Size of every mesh axis, in mesh order."""
    accumulate: int = 1
    """Number of micro-steps."""
    is_once: bool = False
    """True if weights are gathered before all micro-steps, and gradients reduced after them."""
    is_remat: bool = False
    interleave: int = 1
    """Number of slices of the local batch that stacked layers process concurrently."""
    weights: tuple[Weight, ...] = ()
    batch_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    """Axes that shard activations in dims other than the batch."""
    sequence_axes: tuple[str, ...] = ()
    """Axes that shard the sequence of the residual stream between blocks only."""
    context_axes: tuple[str, ...] = ()
    """Axes that shard the sequence everywhere. Weights are replicated over them, as over batch axes."""
    rows: int = 0
    """Examples per device and micro-step."""
    tokens: int | None = None
    """Tokens per device and micro-step. None if the batch has no tokens."""
    uses: Mapping[str, ParamUsage] = dataclasses.field(default_factory=dict)
    """Uses of parameters by path, in a model without activation constraints."""
    unannotated_axes: tuple[str, ...] = ()
    """Axes that shard such parameters and not the batch, so that the sharding of activations is unknown."""
    choices: int = 0
    """Experts per token; set for estimates only."""
    nodes_visited: Callable[[int], int] | None = None
    """Map a number of nodes to the nodes that receive a token, if it is sent once per node. For estimates only."""
    row_bytes: Callable[[str, int], int | None] | None = None
    """Bytes of a quantized token by phase (`dispatch`, `combine`, `grad`) and number of elements.

    None if tokens are not quantized. For estimates only."""
    compute: str | None = None
    """Compute dtype of layers. None: the dtype of each parameter."""
    reduce: str | None = None
    """Dtype in which gradients are summed. None: at least float32."""
    narrow: frozenset[str] = frozenset()
    """Paths of parameters of fp8 matmuls."""
    by_row: frozenset[str] = frozenset()
    """Subset of `narrow` with rowwise scales."""
    computes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Compute dtype by parameter path, for modules that override `compute`."""
    quantize: Quantize | None = None
    """Quantization of the communication of sharded parameters by kernels. None: XLA communicates them."""
    is_prefetched: bool = False
    """True if the weights of a layer are gathered while the previous layer computes."""
    by_stages: bool = False
    """True for pipelined steps."""
    is_tied: bool = False
    """True if embedding and head share a parameter."""
    exchanges_rows: bool = False
    """True if a kernel communicates the looked-up embeddings and their gradients."""
    vocab_chunks: int = 1
    """Number of sequential chunks in which the head matrix is used."""
    on_cpu: bool = False
    """True for XLA:CPU, which sends 16-bit floats as float32 and lowers reduce-scatters to all-reduces."""

    @property
    def micro_steps(self) -> int:
        """Number of times per step that weights are gathered and gradients reduced."""
        return 1 if self.is_once else self.accumulate

    @property
    def is_by_device(self) -> bool:
        """True if each device computes its examples with unsharded weights, without sending tokens to experts."""
        return not self.by_stages and (self.is_once or self.quantize is not None)

    def wire(self, dtype: Any) -> str:
        """Return the HLO name of the dtype on the wire. XLA:CPU sends 16-bit floats as float32 and fp8 as float16."""
        name = _HLO_DTYPE.get(np.dtype(dtype).name, np.dtype(dtype).name)
        if self.on_cpu and name.startswith("f8"):
            return "f16"
        return "f32" if self.on_cpu and name in ("bf16", "f16") else name

    def compute_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which a parameter is used."""
        return np.dtype(jnp.dtype(self.computes.get(decision.path) or self.compute or decision.leaf.dtype))

    def gathered_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which a parameter is gathered: fp8 if XLA can cast it in its layer before the gather."""
        leaf, ahead = decision.leaf, self.is_prefetched or self.is_once or self.by_stages
        by_kernel = is_expert(decision)  # the kernel gathers the weights first and casts them afterwards
        if decision.path not in self.narrow or by_kernel or ahead or leaf.num_layers == 1 or leaf.layer_ndim < 2:
            return self.compute_dtype(decision)
        return np.dtype(jnp.float8_e4m3fn)

    def reduce_dtype(self, decision: Decision) -> np.dtype:
        """Return the dtype in which the gradient of a parameter is summed."""
        return np.dtype(jnp.dtype(self.reduce or jnp.promote_types(self.compute_dtype(decision), jnp.float32)))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of size greater than 1, in mesh order."""
        wanted = set(axes)
        return tuple([axis for axis, size in self.sizes.items() if axis in wanted and size > 1]) if wanted else ()

    def num_shards(self, axes: Iterable[str]) -> int:
        """Return the product of the sizes of the axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def recomputed(self, stack: int) -> int:
        """Return the number of forward passes of a layer."""
        return 2 if self.is_remat and stack > 1 else 1


def split_axes(step: StepSpec, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes of a spec with size greater than 1, in mesh order."""
    return step.ordered(axes_of_spec(spec))


def with_layers(params: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the parameters with the name `layers` for the unnamed first dim of stacked layers.

    Stacked layers are a top-level module with at least two leaves, whose first dims are unnamed and of equal size.
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
    """Return a parameter as a pipeline stage stores it."""
    decision, leaf = weight.decision, weight.decision.leaf
    own, grads, update = (without_axes(spec, (axis,)) for spec in (decision.spec, weight.grads, weight.update))
    if leaf.is_stacked:
        shape, names = (leaf.shape[0] // stages, *leaf.shape[1:]), (None, *(leaf.names or ())[1:])
        leaf = dataclasses.replace(leaf, shape=shape, names=names)
    return Weight(dataclasses.replace(decision, leaf=leaf, spec=own), grads, update)


def owned_axes(step: StepSpec, decision: Decision) -> tuple[str, ...]:
    """Return the axes that shard the expert dim. Expert weights are neither gathered nor reduced over them.

    A router also has an expert dim, but each rank scores all experts.
    """
    names = decision.leaf.names or ()
    if "expert" not in names or is_router(decision) or step.is_by_device:
        return ()
    return step.ordered(
        axis for entry, name in zip(decision.spec, names, strict=False) if name == "expert" for axis in spec_axes(entry)
    )


def is_router(decision: Decision) -> bool:
    """Return whether a parameter is a router."""
    return scores_experts(decision.leaf.names or ())


def is_expert(decision: Decision) -> bool:
    """Return whether a parameter has an expert dim. Routers have one."""
    return "expert" in (decision.leaf.names or ())


def has_vocabulary(decision: Decision) -> bool:
    """Return whether a parameter has a vocabulary dim."""
    return "vocab" in (decision.leaf.names or ())


def is_looked_up(decision: Decision) -> bool:
    """Return whether a parameter is an embedding table."""
    names = decision.leaf.names or ()
    return {"vocab", "embed"} <= set(names) and names.index("vocab") < names.index("embed")


def layer_elements(step: StepSpec, decision: Decision, whole: Iterable[str]) -> int:
    """Return the local elements of a layer of a parameter after it is gathered over the axes `whole`."""
    others = set(split_axes(step, decision.spec)) - set(whole)
    return decision.leaf.size // decision.leaf.num_layers // step.num_shards(others)


def parent(decision: Decision) -> str:
    """Return the path of the parent of a parameter's module."""
    return "/".join(decision.path.split("/")[:-2])


def size_of(decision: Decision, name: str) -> int:
    """Return the size of a named dim."""
    return decision.leaf.shape[(decision.leaf.names or ()).index(name)]


def merged(found: Iterable[ExpectedCollective]) -> tuple[ExpectedCollective, ...]:
    """Merge expected collectives that differ in their tensors and counts only."""
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
