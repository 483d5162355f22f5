"""The description of a training step from which expected collectives and estimates follow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.sharding.types import Decision, Leaf, PyTree, axes_of_spec, spec_axes, without_axes

if TYPE_CHECKING:
    from meshpar.parallel.quantization import Quantize
    from meshpar.schedules import Schedule

_HLO_DTYPE = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn"}


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


class PipelineStages(Protocol):
    """Pipeline stages: the fields of `pipeline_parallel` that a description uses."""

    @property
    def axis(self) -> str: ...
    @property
    def stages(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def gather(self) -> str: ...
    def table(self) -> Schedule: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageUses:
    """Arrays that the stages of a pipeline read and send. The engine records them while the step is traced."""

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    """Local shapes of the arrays that a stage sends to the next stage for each microbatch."""
    first: frozenset[str]
    """Paths of the parameters that are used before the layers."""
    last: frozenset[str]
    """Paths of the parameters that are used after the layers; tied parameters are in both."""
    reads: Mapping[str, tuple[bool, bool, bool]]
    """For each layer parameter, whether the forward, input-gradient and weight-gradient ops (F, B, W) read it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGather:
    """How an engine gathers the weights of stacked layers (`fsdp`). By default, XLA gathers them."""

    formats: Quantize | None = None
    """Formats in which kernels of the engine send weights and gradients; None if XLA sends them."""
    ahead: int = 0
    """Number of layers whose weights are gathered in advance."""
    keep: int = 0
    """Number of last layers whose gathered weights are kept for the backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a gradient engine executes a step, with all options resolved.

    `GradientEngine.describe` creates it from a strategy on a mesh and the options. The batch, the traced step and the
    compiler determine the other fields; `for_batch` and `with_uses` set them.
    """

    sizes: dict[str, int]
    """Size of each mesh axis, in mesh order."""
    weights: tuple[Weight, ...] = dataclasses.field(default=(), repr=False)

    # Axes
    batch_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    """Axes that shard activation dims other than the batch."""
    sequence_axes: tuple[str, ...] = ()
    """Axes that shard the sequence of the residual stream between blocks (sequence parallelism)."""
    context_axes: tuple[str, ...] = ()
    """Axes that shard the sequence in all layers. Gradients are reduced over them, as over batch axes."""
    unannotated_axes: tuple[str, ...] = ()
    """Axes that shard the parameters in `uses` but not the batch. Activation collectives over them are unknown."""

    # Division of the batch
    micro_steps: int = 1
    """Number of micro-steps."""
    pipeline: PipelineStages | None = None
    """The `pipeline_parallel` component, if stages run the step."""
    batch_slices: int = 1
    """Number of slices of the local batch that stacked layers process independently."""
    examples: int = 0
    """Examples per device and microbatch."""
    tokens: int | None = None
    """Tokens per device and microbatch; None if the batch has no tokens."""

    # Communication of parameters and gradients
    gathers_once: bool = False
    """True if weights are gathered before the first microbatch and gradients are reduced after the last."""
    deferred_axes: tuple[str, ...] = ()
    """Axes over which gradients are reduced once, after the last micro-step. Each micro-step reduces them over the
    other batch axes."""
    gathering: LayerGather = LayerGather()
    """How the weights of stacked layers are gathered."""
    exchanges_rows: bool = False
    """True if a kernel sends the embedding rows of the tokens and reduces the gradient of the table."""

    # Saved activations
    remat: str | None = None
    """Policy for the activations that stacked layers save; None means all."""
    recomputes: bool = False
    """True if any layer recomputes activations."""
    vocab_chunks: int = 1
    """Number of vocabulary chunks in which the output layer is computed."""

    # Dtypes
    compute: str | None = None
    """Compute dtype of the layers; None means the dtype of each parameter."""
    reduce: str | None = None
    """Dtype of gradient reductions; None means at least float32."""
    low_precision: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    """Paths of parameters in modules with fp8 or int8 matmuls."""
    rowwise_fp8: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    """The subset of `low_precision` with one scale per row."""
    computes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Compute dtypes by parameter path, for modules that override `compute`."""
    on_cpu: bool = False
    """True if XLA:CPU compiles the step. It sends 16-bit floats as float32 and all-reduces before adding or slicing."""

    # Uses of parameters
    is_tied: bool = False
    """True if the embedding and the head share a table."""
    uses: Mapping[str, ParamUsage] = dataclasses.field(default_factory=dict, repr=False)
    """Uses of parameters by path, in a model without activation constraints."""
    stage_uses: StageUses | None = dataclasses.field(default=None, repr=False)
    """Uses of parameters by pipeline stages."""

    # Tokens of experts, for estimates only
    experts_per_token: int = 0
    """Number of experts that each token is sent to."""
    nodes_visited: Callable[[int], int] | None = None
    """Maps the number of nodes to the maximum number of nodes that a token is sent to, for dispatch that sends each
    token once per node."""
    row_bytes: Callable[[str, int], int | None] | None = None
    """Maps a direction (`dispatch`, `combine`, `grad`) and a width to the bytes of a quantized token sent to experts,
    or None if that direction is not quantized."""

    def for_batch(self, examples: PyTree) -> Execution:
        """Return the execution with the numbers of examples and tokens of a batch.

        `examples` are the leaves of the global batch that are sharded over devices, as arrays or shapes.
        """
        num_examples, tokens = examples_and_tokens(examples, self.num_shards(self.batch_axes) * self.microbatches)
        return self.with_examples(num_examples, tokens)

    def with_examples(self, num_examples: int, tokens: int | None) -> Execution:
        """Return the execution with numbers of examples and tokens, before the sequence is sharded."""
        tokens = None if tokens is None else tokens // self.num_shards(self.context_axes)
        return dataclasses.replace(self, examples=num_examples, tokens=tokens)

    def with_uses(self, uses: Mapping[str, ParamUsage]) -> Execution:
        """Return the execution of a model whose activations have no constraints.

        `uses` are the operations that read each parameter. The mesh axes of these parameters become tensor axes.
        """
        specs = (weight.spec for weight in self.weights if weight.leaf.names is None or weight.leaf.path in uses)
        unannotated = {axis for spec in specs for axis in axes_of_spec(spec, self.sizes)} - set(self.batch_axes)
        return dataclasses.replace(
            self, uses=uses, unannotated_axes=self.ordered(unannotated),
            tensor_axes=self.ordered({*self.tensor_axes, *unannotated}),
        )  # fmt: skip

    def __str__(self) -> str:
        """Return a line for each field that differs from its default."""
        default = Execution(sizes={})
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self) if field.repr)
        return "\n".join(f"{name}: {value}" for name, value in values if value != getattr(default, name))

    @property
    def formats(self) -> Quantize | None:
        """Formats in which kernels of the engine send weights and gradients; None if XLA sends them."""
        return self.gathering.formats

    @property
    def is_pipelined(self) -> bool:
        """True if pipeline stages run the step."""
        return self.pipeline is not None

    @property
    def microbatches(self) -> int:
        """Number of micro-steps, or of microbatches of a pipeline."""
        return self.micro_steps if self.pipeline is None else self.pipeline.microbatches

    @property
    def num_exchanges(self) -> int:
        """Number of times per step that weights are gathered and gradients are reduced."""
        return 1 if self.gathers_once else self.microbatches

    @functools.cached_property
    def stage_weights(self) -> tuple[Weight, ...]:
        """The parameters with the shapes and specs within a pipeline stage."""
        assert self.pipeline is not None
        return tuple(_of_stage(weight, self.pipeline.axis, self.pipeline.stages) for weight in self.weights)

    @property
    def is_by_device(self) -> bool:
        """True if each device applies full weights to its local batch, so that tokens stay on their device."""
        return not self.is_pipelined and (self.gathers_once or self.formats is not None)

    @property
    def divides_batch(self) -> bool:
        """True if the loss function receives parts of the batch, also without micro-steps."""
        return self.is_pipelined or self.is_by_device or bool(self.deferred_axes)

    def grad_spec(self, weight: Weight) -> PartitionSpec:
        """Return the sharding of a gradient after a micro-step: without accumulation, the sharding of its update."""
        return weight.update if self.micro_steps == 1 else weight.grads

    @property
    def tokens_or_examples(self) -> int:
        """Tokens per device and micro-step, or examples if the batch has no tokens."""
        return self.examples if self.tokens is None else self.tokens

    def wire(self, dtype: jax.typing.DTypeLike) -> str:
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
        leaf, ahead = decision.leaf, self.gathering.ahead or self.gathers_once or self.is_pipelined
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
        return 2 if self.recomputes and stack > 1 else 1

    def slices(self, stack: int) -> int:
        """Return the number of batch slices on which a stack of `stack` layers runs."""
        return self.batch_slices if stack > 1 else 1


def examples_and_tokens(examples: PyTree, num_parts: int = 1) -> tuple[int, int | None]:
    """Divide a batch, and return (examples, tokens) per part. Without tokens, the second is None."""
    shapes = [(np.shape(x), x.dtype) for x in jax.tree.leaves(examples)]
    num_examples = max((shape[0] for shape, _ in shapes if shape), default=0) // num_parts
    # Integer matrices are tokens if the batch has no floats or images. 8-bit integers are pixels.
    has_floats = any(len(shape) > 1 and dtype.kind not in "iub" for shape, dtype in shapes)
    has_images = any(len(shape) > 2 for shape, _ in shapes)
    ids = [shape for shape, dtype in shapes if len(shape) == 2 and dtype.kind in "iu" and dtype.itemsize > 1]
    tokens = [] if has_floats or has_images else [math.prod(shape) // num_parts for shape in ids]
    return num_examples, max(tokens, default=None)


def split_axes(step: Execution, spec: PartitionSpec) -> tuple[str, ...]:
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


def _of_stage(weight: Weight, axis: str, stages: int) -> Weight:
    """Return the shard of a parameter on one pipeline stage."""
    leaf = weight.leaf
    spec, grads, update = (without_axes(spec, (axis,)) for spec in (weight.spec, weight.grads, weight.update))
    if leaf.is_stacked:
        shape, names = (leaf.shape[0] // stages, *leaf.shape[1:]), (None, *(leaf.names or ())[1:])
        leaf = dataclasses.replace(leaf, shape=shape, names=names)
    return Weight(dataclasses.replace(weight.decision, leaf=leaf, spec=spec), grads, update)


def owned_axes(step: Execution, decision: Decision) -> tuple[str, ...]:
    """Return the axes that shard the expert dim. Expert weights are not gathered or reduced over them.

    A router is not sharded this way, although its last dim is `expert`: every rank scores all experts.
    """
    if not decision.leaf.is_expert or step.is_by_device:
        return ()
    pairs = zip(decision.spec, decision.leaf.names or (), strict=False)
    return step.ordered(axis for entry, name in pairs if name == "expert" for axis in spec_axes(entry))


def layer_elements(step: Execution, decision: Decision, gathered: Iterable[str]) -> int:
    """Return the local number of elements of a leaf, per layer, after gathering it over some axes."""
    remaining = set(split_axes(step, decision.spec)) - set(gathered)
    return decision.leaf.size // decision.leaf.num_layers // step.num_shards(remaining)


def parent(decision: Decision) -> str:
    """Return the path of the module that contains the leaf's module."""
    return "/".join(decision.path.split("/")[:-2])
