"""Workload: FLOPs and saved activations of a training step, independent of the mesh.

The loss is traced for a single device with a few examples, once for each remat policy. The trace has the shape and
dtype of each array that is saved for the backward pass. The logical names of its dims follow from the sizes of the
model's named dims.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshpar.collectives import flash
from meshpar.hardware.clusters import Cluster
from meshpar.hardware.grouped_kernels import GroupedKernels, grouped_kernels
from meshpar.hardware.kernel_rates import AttentionSize
from meshpar.inspect.model_flops import activation_products, attention_flops, matmul_flops, wide_flops
from meshpar.inspect.target import traced_for
from meshpar.inspect.traced_collectives import vocab_chunks
from meshpar.layers.auxiliary import checked
from meshpar.layers.losses import LossTerms, ScalarLoss
from meshpar.layers.precision import Precision, cast_floating, numerics, products
from meshpar.layers.remat import REMAT_POLICIES
from meshpar.layers.scan import Layer, StageRunner, running, scanned
from meshpar.models.chunked_cross_entropy import SCOPE
from meshpar.models.embedding_lookup import GATHERED
from meshpar.moe.grouped import COUNTED, choose_grouped_matmul
from meshpar.parallel import ddp
from meshpar.parallel.batch import check_examples, shape_of
from meshpar.parallel.execution import examples_and_tokens, with_layers
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import tracing
from meshpar.sharding.jaxprs import equations, has_scope
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.rules import ACTIVATION_NAMES
from meshpar.sharding.types import Decision, Leaf, PyTree, leaf_of, tree_leaves_with_paths
from meshpar.training.independence import arrays_of, examined_trace, without_matmul
from meshpar.training.sharding_table import optimizer_decisions

Remat = str | None
POLICIES: tuple[Remat, ...] = (None, *reversed(REMAT_POLICIES))
"""Remat policies, from no recomputation to full recomputation."""


_PRIMES = [n for n in range(3, 1000, 2) if all(n % d for d in range(3, n, 2))]


class Activation(NamedTuple):
    """An activation that is saved for the backward pass, per example."""

    names: tuple[str | None, ...]
    """Logical names of its dims after the layer and batch dims."""
    shape: tuple[int, ...]
    itemsize: int
    layers: int
    """Number of layers that save it; 0 outside the layers."""
    is_routed: bool
    """Whether it has a row for each token-expert assignment."""

    @property
    def row_bytes(self) -> int:
        """Bytes per example, over all layers."""
        return math.prod(self.shape) * self.itemsize * max(self.layers, 1)


class Slot(NamedTuple):
    """An array of the optimizer state."""

    nbytes: int
    owner: int | None
    """Index of the parameter with the same sharding; None for replicated arrays."""
    dims: tuple[int, ...]
    """The dims of the parameter that the array has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """FLOPs, activations and state of a training step, independent of the mesh."""

    model: Model
    """The model, whose shapes and names are cached."""
    leaves: tuple[Leaf, ...]
    """Path, shape, dtype and names of each parameter."""
    slots: tuple[Slot, ...]
    """Arrays of the optimizer state."""
    replicated_bytes: int
    """Bytes of replicated state: counters, the PRNG key, and variables of the model."""
    tx: optax.GradientTransformation
    precision: Precision
    batch: PyTree
    """Shapes of the global batch."""
    is_divisible: bool
    """Whether the loss can be evaluated on a part of the batch, as micro-steps and stages do."""
    examples: int
    tokens: int | None
    """Number of tokens in the global batch, if any."""
    flops: Mapping[Remat, float]
    """FLOPs of matmuls per example and step, with recomputation."""
    attention: Mapping[Remat, float]
    """Part of `flops`: attention kernels of libraries in the forward pass, with recomputation."""
    uses_tokamax: bool
    """Whether these kernels are tokamax's. The others are cuDNN's."""
    grouped_kernels: GroupedKernels | None
    """tokamax's kernels for the matmuls of experts, or None for the blocked implementation."""
    wide_flops: Mapping[Remat, float]
    """Part of `flops`: matmuls with an operand wider than the compute dtype, such as gradients of float32 scores."""
    products_flops: float
    """FLOPs per example and step of matmuls of two activations, without recomputation by a remat policy."""
    products_bytes: Mapping[Remat, float]
    """Bytes per example and step of operands and results of matmuls of two activations, with recomputation. In
    attention without a library kernel, these are queries, keys, values and scores."""
    scores_bytes: float
    """Bytes per example of the largest result of such a matmul."""
    model_flops: float
    """FLOPs per example for the MFU: three forward passes, without recomputation."""
    narrow_share: Mapping[Remat, float]
    """Fraction of the FLOPs in 8-bit matmuls."""
    narrowed: float
    """Elements per example that are cast for 8-bit matmuls: inputs, and gradients of outputs."""
    activations: Mapping[Remat | Literal["stages"], tuple[Activation, ...]]
    """Saved activations by policy. The key `stages` is for layers that are run by pipeline stages, without a policy."""
    runs_layers: bool
    """Whether the model uses `scan_layers`, which rematerialization and batch slices require."""
    looks_up: bool
    """Whether the model uses `models.embedding_lookup`."""
    experts_per_token: int
    """Number of experts per token; 0 without experts."""
    bound_factor: float | None
    """Capacity for tokens between two ranks, as in `MoEConfig`; None if it suffices for any routing."""
    nodes_visited: Callable[[int], int] | None
    """As in `Execution`: the maximum number of nodes that a token is sent to. None without node-first dispatch."""
    row_bytes: Callable[[str, int], int | None] | None
    """As in `Execution`: bytes of an encoded token on its way to experts and back."""
    vocab_chunk: int | None
    """Size of a vocabulary chunk on a rank; None without chunks."""

    @property
    def policies(self) -> tuple[Remat, ...]:
        """Remat policies that the step was traced with."""
        return tuple(self.flops)

    @property
    def seq_len(self) -> int | None:
        """Tokens per example."""
        return None if self.tokens is None else self.tokens // self.examples

    @property
    def expert_flops(self) -> float:
        """FLOPs per example and step of the matmuls of experts, without recomputation."""
        size = sum(leaf.size for leaf in self.leaves if leaf.is_expert) / max(self.num_experts, 1)
        return 6 * (self.seq_len or 0) * self.experts_per_token * size

    @property
    def attention_size(self) -> AttentionSize:
        """Sizes of attention: of the longest head, over the length of an example."""
        head_dim = max((leaf.size_of("head_dim") for leaf in self.leaves if leaf.has("head_dim")), default=128)
        return AttentionSize(head_dim, self.seq_len or 1)

    @property
    def num_layers(self) -> int:
        return max((leaf.num_layers for leaf in self.leaves), default=1)

    @functools.cached_property
    def head_share(self) -> float:
        """FLOPs of the head, forward and backward, over the FLOPs of the layers' forward pass."""
        size = max((leaf.size for leaf in self.leaves if leaf.has("vocab")), default=0)
        forward = 2 * (self.seq_len or 1) * size
        return 3 * forward / max(self.model_flops / 3 - forward, 1.0)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the global batch."""
        return sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(self.batch))

    @property
    def compute_itemsize(self) -> int:
        return np.dtype(jnp.dtype(self.precision.compute or self.leaves[0].dtype)).itemsize

    @functools.cached_property
    def updates(self) -> dict[Any, Any]:
        """Cache of `optimizer_traffic`, by the shardings of the parameters."""
        return {}

    @functools.cached_property
    def vocab_size(self) -> int:
        return max((leaf.size_of("vocab") for leaf in self.leaves if leaf.has("vocab")), default=0)

    @functools.cached_property
    def num_experts(self) -> int:
        return max((leaf.shape[-1] for leaf in self.leaves if leaf.is_router), default=0)


def describe(
    model: Model,
    batch: PyTree,
    loss: Callable[..., Any],
    *,
    tx: optax.GradientTransformation,
    precision: Precision,
    loss_is: str | None = None,
    cluster: Cluster | None = None,
    bound_factor: float | None = None,
    nodes_visited: Callable[[int], int] | None = None,
    row_bytes: Callable[[str, int], int | None] | None = None,
    remat: Remat = None,
) -> Workload:
    """Trace a training step and return its `Workload`. Arguments as for `plan`. Errors of the model are not caught."""
    check_examples(batch, {}, 1, "examples", takes_scalars=True)
    batch = jax.tree.map(shape_of, batch)
    examples, tokens = examples_and_tokens(batch)
    with tracing(mesh := MeshSpec().abstract(1), ddp()):
        variables, names = model.abstract(), dict(model.names())
    params = jax.eval_shape(lambda params: cast_floating(params, precision.params), variables.params)
    plain = [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(params)]
    zeros = functools.partial(jax.tree.map, jnp.zeros_like, variables)
    described = dataclasses.replace(model, init=lambda key: zeros(), names=lambda: names)
    leaves = tuple(decision.leaf for decision in with_layers(list(map(_decision, plain))))
    # A prime that divides no other dim marks the batch dim.
    dims = {n for leaf in leaves for n in leaf.shape} | {n for x in jax.tree.leaves(batch) for n in x.shape[1:]}
    marker = next(n for n in _PRIMES if all(size % n for size in dims if size))
    seq_len = None if tokens is None else tokens // examples
    small_batch = batch_of(batch, marker)
    arrays = (params, variables.extra, small_batch, jax.ShapeDtypeStruct((2,), np.uint32))
    labelled = functools.partial(_labelled, leaves=leaves, examples=marker, seq_len=seq_len)
    with traced_for(cluster):
        dtype = jnp.dtype(precision.compute or leaves[0].dtype)
        has_experts = any(leaf.is_expert for leaf in leaves) and precision.matmul is None
        uses_kernels = has_experts and choose_grouped_matmul(dtype=dtype).implementation == "tokamax"
        grouped = grouped_kernels() if uses_kernels else None
    # Trace the CPU form of grouped matmuls, which counts the FLOPs of the actual tokens only.
    with traced_for(cluster), COUNTED.set(True), tracing(mesh, ddp()):
        terms = jax.eval_shape(terms_of(described, loss, precision, None), *arrays)
        plain_terms = terms_of(described, loss, without_matmul(precision), None)
        sums = jax.make_jaxpr(lambda *x: arrays_of(plain_terms(*x)))(*arrays)
        examination = examined_trace(sums, arrays[:2], small_batch)
        forward_jaxpr = jax.make_jaxpr(value_of(described, loss, precision, None))(*arrays).jaxpr
        experts_per_token, looks_up = _experts_per_token(forward_jaxpr, leaves), has_scope(forward_jaxpr, GATHERED)
        routed = _expert_flops(forward_jaxpr, leaves) * experts_per_token * (seq_len or 1)
        forward, vocab_chunk = matmul_flops(forward_jaxpr) / marker + routed, _vocab_chunk(forward_jaxpr, leaves)
        counted, activations, stacks = _by_policy(
            functools.partial(value_of, described, loss, precision),
            arrays,
            labelled,
            marker,
            jnp.dtype(precision.compute or leaves[0].dtype).itemsize,
            tuple(dict.fromkeys((*POLICIES, remat))),
        )
    flops, attention, wide, products_bytes = (
        {remat: getattr(counts, name) / marker for remat, counts in counted.items()}
        for name in ("flops", "attention", "wide", "products_bytes")
    )
    narrow_share = {remat: counts.narrow / (counts.flops or 1) for remat, counts in counted.items()}
    # Attention without a library kernel may compute its scores again in the backward pass.
    products = activation_products(forward_jaxpr, marker)
    recomputed_products = (counted[None].products - 3 * products.flops) / marker
    attention_forward = attention_flops(forward_jaxpr) / marker
    attention = {remat: attention_forward + count - attention[None] for remat, count in attention.items()}
    head_size = max((leaf.size for leaf in leaves if leaf.has("vocab")), default=0)
    recomputed_logits = 0 if vocab_chunk is None else 2 * (seq_len or 1) * head_size
    offset = 3 * forward + recomputed_logits + recomputed_products - flops[None]
    flops = {remat: offset + count + routed * (remat is not None) for remat, count in flops.items()}
    return Workload(
        model=described,
        is_divisible=loss_is is not None or not (examination.combined or isinstance(terms.loss, ScalarLoss)),
        leaves=leaves, slots=_slots(tx, params, leaves), tx=tx, precision=precision, batch=batch, examples=examples,
        tokens=tokens, flops=flops, attention=attention, uses_tokamax=has_scope(forward_jaxpr, flash.SCOPE),
        grouped_kernels=grouped,
        wide_flops=wide, products_flops=counted[None].products / marker, products_bytes=products_bytes,
        scores_bytes=products.largest_bytes / marker, model_flops=3 * forward,
        narrow_share=narrow_share, narrowed=sum(elements for _, elements in _narrow(forward_jaxpr)) / marker,
        activations=activations,
        runs_layers=bool(stacks),
        looks_up=looks_up, experts_per_token=experts_per_token, bound_factor=bound_factor,
        vocab_chunk=vocab_chunk, nodes_visited=nodes_visited, row_bytes=row_bytes,
        replicated_bytes=sum(leaf_of(*item).nbytes for item in tree_leaves_with_paths(variables.extra)) + 4 + 8 + 4,
    )  # fmt: skip


def batch_of(batch: PyTree, examples: int) -> PyTree:
    """Return the shapes of a batch with this number of examples. Scalars are unchanged."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]) if x.shape else (), x.dtype), batch)


def _by_policy(
    value: Callable[[Remat], Any],
    arrays: PyTree,
    labelled: Callable[..., Iterator[Activation]],
    examples: int,
    itemsize: int,
    policies: Sequence[Remat],
) -> tuple[dict[Remat, _Counts], dict[Remat | Literal["stages"], tuple[Activation, ...]], list[Layer]]:
    """Return FLOPs and saved activations by policy, and the layers of each call of `scan_layers`.

    `value` returns the loss function for a policy, `arrays` are its arguments, `labelled` converts saved arrays to
    activations. `examples` is the number of examples, and `itemsize` the size of the compute dtype.
    """
    stacks: list[Layer] = []

    def run(layer: Layer, x: Any, examples: Any) -> Any:
        stacks.append(layer)
        return scanned(layer, x, examples)

    counted: dict[Remat, _Counts] = {}
    activations: dict[Remat | Literal["stages"], tuple[Activation, ...]] = {}
    for remat in policies:
        counted[remat], saved = _saved(value(remat), arrays, examples, itemsize)
        activations[remat] = tuple(labelled(saved, is_all=remat is None))
    with running(StageRunner(run)):
        _, saved = _saved(value(None), arrays, examples, itemsize)
    return counted, {**activations, "stages": tuple(labelled(saved, is_all=True))}, stacks


def _decision(leaf: Leaf, spec: PartitionSpec = PartitionSpec()) -> Decision:  # noqa: B008
    return Decision(leaf=leaf, rule="", spec=spec, shards=1, replicated_on_purpose=True)


def _slots(tx: optax.GradientTransformation, params: PyTree, leaves: Sequence[Leaf]) -> tuple[Slot, ...]:
    """Return the optimizer's arrays on the device.

    Each parameter dim is sharded over a dummy axis of its own, so the spec of an optimizer array shows its parameter
    and dims.
    """
    axes = [tuple(f"{index}.{dim}" for dim in range(len(leaf.shape))) for index, leaf in enumerate(leaves)]
    mesh = {axis: 1 for names in axes for axis in names}
    marked = [_decision(leaf, PartitionSpec(*names)) for leaf, names in zip(leaves, axes, strict=True)]
    decisions = optimizer_decisions(tx, jax.eval_shape(tx.init, params), marked, mesh)
    slots = []
    for decision in decisions:
        if not decision.is_on_host:
            dims = [tuple(map(int, entry.split("."))) for entry in decision.spec if entry is not None]
            slots.append(Slot(decision.leaf.nbytes, dims[0][0] if dims else None, tuple(dim for _, dim in dims)))
    return tuple(slots)


# ---- The trace -------------------------------------------------------------------------------------------------------


def value_of(
    model: Model, loss: Callable[..., Any], precision: Precision, remat: Remat, batch_slices: int = 1
) -> Callable[..., jax.Array]:
    """Return the loss as a function of parameters, variables, batch and key."""
    terms = terms_of(model, loss, precision, remat, batch_slices)
    return lambda *args: terms(*args).normalized()[0]


def terms_of(
    model: Model, loss: Callable[..., Any], precision: Precision, remat: Remat, batch_slices: int = 1
) -> Callable[..., LossTerms]:
    """Return the terms of the loss as a function of parameters, variables, batch and key."""

    def terms(params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array) -> LossTerms:
        with numerics(precision, remat, batch_slices):
            bound = model.bind(cast_floating(params, precision.compute), extra)
            return LossTerms.of(*checked(loss(bound, batch, jax.random.wrap_key_data(key)), loss))

    return terms


class _Counts(NamedTuple):
    """Work of the forward and the backward pass."""

    flops: int
    """FLOPs of all matmuls."""
    attention: int
    """FLOPs of attention kernels of libraries."""
    narrow: float
    """FLOPs of 8-bit matmuls."""
    wide: int
    """FLOPs of matmuls with an operand wider than the compute dtype."""
    products: int
    """FLOPs of matmuls of two activations."""
    products_bytes: int
    """Bytes of their operands and results."""


def _saved(
    value: Callable[..., jax.Array], arrays: tuple[Any, ...], examples: int, itemsize: int
) -> tuple[_Counts, list[Any]]:
    """Return the work of loss and gradients, and the saved arrays."""

    def both(params: PyTree, *args: Any) -> Any:
        out, pullback = jax.vjp(lambda params: value(params, *args), params)
        return pullback(jnp.ones_like(out)), jax.tree.leaves(pullback)

    jaxpr, (_, saved) = jax.make_jaxpr(both, return_shape=True)(*arrays)
    narrow = sum(flops for flops, _ in _narrow(jaxpr.jaxpr))
    products = activation_products(jaxpr.jaxpr, examples)
    wide = wide_flops(jaxpr.jaxpr, itemsize)
    return _Counts(
        matmul_flops(jaxpr.jaxpr), attention_flops(jaxpr.jaxpr), narrow, wide, products.flops, products.nbytes
    ), saved


def _experts_per_token(jaxpr: Any, leaves: Sequence[Leaf]) -> int:
    """Return k of the `top_k` with which a router selects experts, or 0 without experts."""
    experts = {leaf.shape[-1] for leaf in leaves if leaf.is_router}
    top_ks = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "top_k")
    return max((int(eqn.params["k"]) for eqn in top_ks if eqn.invars[0].aval.shape[-1] in experts), default=0)


def _expert_flops(jaxpr: Any, leaves: Sequence[Leaf]) -> int:
    """Return the FLOPs of a token in an expert if `matmul_flops` cannot count them, and 0 otherwise.

    If the routing determines how often a loop runs, `matmul_flops` counts the body of the loop once.
    """
    notes: dict[str, None] = {}
    matmul_flops(jaxpr, notes)
    return 2 * bool(notes) * sum(leaf.size // leaf.size_of("expert") for leaf in leaves if leaf.is_expert)


def _narrow(jaxpr: Any) -> Iterator[tuple[int, float]]:
    """Yield the FLOPs of each 8-bit matmul, and the elements of its input and output."""
    for flops, eqn in products(jaxpr):
        lhs, rhs, out = (x.aval for x in (*eqn.invars[:2], *eqn.outvars))
        if lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
            contracted = math.prod(lhs.shape[dim] for dim in eqn.params["dimension_numbers"][0][0])
            yield flops, flops / (2 * out.size * contracted) * (lhs.size + out.size)


def _labelled(
    saved: Sequence[Any], leaves: Sequence[Leaf], examples: int, seq_len: int | None, *, is_all: bool
) -> Iterator[Activation]:
    """Yield the saved activations with their logical names. Weights and tables are skipped.

    `is_all`: no remat policy selected the saved arrays.
    """
    stacks = {leaf.num_layers for leaf in leaves} - {1}
    for array in saved:
        batch_dim = next((dim for dim, size in enumerate(array.shape) if size and size % examples == 0), None)
        if batch_dim is None:
            continue
        times, shape = array.shape[batch_dim] // examples, tuple(array.shape[batch_dim + 1 :])
        is_routed = times > 1 and (seq_len is None or times != seq_len)
        if times == 1 and seq_len is not None and shape[:1] == (seq_len,):
            times, shape = seq_len, shape[1:]
        names = _names_of(shape, leaves)
        layers = array.shape[0] if batch_dim and array.shape[0] in stacks else 0
        # With sequence sharding only the residual stream is sharded. It is saved in float32 by norms, or by a policy in
        # place of a block's input.
        is_residual = set(names) <= {None, "act_embed"} and not (is_all and layers and array.dtype.itemsize < 4)
        seq = None if times != seq_len else "norm_seq" if is_residual else "seq"
        yield Activation((seq, *names), (times, *shape), np.dtype(array.dtype).itemsize, layers, is_routed)


def _names_of(shape: tuple[int, ...], leaves: Sequence[Leaf]) -> tuple[str | None, ...]:
    """Return the logical names of an activation's dims, from weights with the same sequence of sizes."""
    for leaf in leaves:
        for first in range(len(leaf.shape) - len(shape) + 1):
            span = slice(first, first + len(shape))
            if shape and leaf.names is not None and leaf.shape[span] == shape and "layers" not in leaf.names[span]:
                return tuple(map(_activation, leaf.names[span]))
    by_size = {n: name for leaf in leaves for n, name in zip(leaf.shape, leaf.names or (), strict=False)}
    names = [_activation(by_size.get(size)) for size in shape]
    # If dims have equal sizes, the first has the name: the number of heads per group may equal the number of groups.
    return tuple(None if name in names[:i] else name for i, name in enumerate(names))


def _activation(name: str | None) -> str | None:
    return f"act_{name}" if f"act_{name}" in ACTIVATION_NAMES and name != "expert" else None


def _vocab_chunk(jaxpr: Any, leaves: Sequence[Leaf]) -> int | None:
    """Return the size of a vocabulary chunk if the model uses `chunked_cross_entropy`."""
    sizes = [leaf.size_of("vocab") for leaf in leaves if leaf.has("vocab")]
    return -(-max(sizes) // vocab_chunks(jaxpr)) if sizes and has_scope(jaxpr, SCOPE) else None
