"""Workload: what a training step asks of devices, whatever the mesh, told by tracing it once for each remat policy.

The loss is traced as one device by itself would compute it, a few rows of the batch at a time; nothing is compiled. Of
every array that the backward pass keeps, the trace tells shape and dtype; which of its dims a strategy splits follows
from the sizes of the model's named dims.
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

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.expected import rows_and_tokens
from meshpar.inspect.model_flops import attention_flops, matmul_flops
from meshpar.inspect.target import traced_for
from meshpar.inspect.traced_collectives import vocab_chunks
from meshpar.layers.auxiliary import checked
from meshpar.layers.losses import LossTerms, ScalarLoss
from meshpar.layers.precision import Precision, cast_floating, numerics, products
from meshpar.layers.scan import REMAT_POLICIES, running, scanned
from meshpar.models.chunked_cross_entropy import SCOPE
from meshpar.models.embedding_lookup import GATHERED
from meshpar.moe.transport_choice import compiled_for
from meshpar.parallel import ddp
from meshpar.parallel.batch import shape_of
from meshpar.parallel.expected.step_spec import has_vocabulary, is_expert, is_router, size_of, with_layers
from meshpar.sharding.adapters import Model, Variables
from meshpar.sharding.context import tracing
from meshpar.sharding.jaxprs import equations, has_scope
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.rules import ACTIVATION_NAMES
from meshpar.sharding.types import Decision, Leaf, PyTree, leaf_of, problem, tree_leaves_with_paths
from meshpar.training.sharding_table import optimizer_decisions

Remat = str | None
POLICIES: tuple[Remat, ...] = (None, *reversed(REMAT_POLICIES))
"""What may be recomputed: nothing, ..., all of a layer."""


class Held(NamedTuple):
    """An array that the backward pass keeps of each row of the batch."""

    names: tuple[str | None, ...]
    """Of its dims behind layers and rows, as activations are called."""
    shape: tuple[int, ...]
    itemsize: int
    layers: int
    """So many are kept: one for each layer; 0: it stands outside of the layers."""
    is_routed: bool
    """Whether it has a row for each choice of an expert."""

    @property
    def row_bytes(self) -> int:
        """Of one row, of all layers."""
        return math.prod(self.shape) * self.itemsize * max(self.layers, 1)


class Slot(NamedTuple):
    """An array of the optimizer's."""

    nbytes: int
    owner: int | None
    """The parameter that it is split as; None: it is whole everywhere."""
    dims: tuple[int, ...]
    """Of that parameter's dims, those that it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What a training step asks of devices, whatever the mesh."""

    model: Model
    """The model, described: nothing of it is traced again."""
    leaves: tuple[Leaf, ...]
    """Parameters."""
    slots: tuple[Slot, ...]
    """Optimizer state."""
    whole_bytes: int
    """What every device holds of the state: counters, the key, what the model keeps beside parameters."""
    tx: optax.GradientTransformation
    precision: Precision
    batch: PyTree
    """Shapes of the global batch."""
    is_divisible: bool
    """Whether the loss can be evaluated on parts of the batch, as micro-steps and stages do."""
    rows: int
    tokens: int | None
    """Of the global batch; None when it holds none."""
    flops: Mapping[Remat, float]
    """Of a training step's matrix products for one row, recomputation included."""
    attention: Mapping[Remat, float]
    """Of these, those of cuDNN's attention in the forward pass and what is recomputed of it."""
    model_flops: float
    """For one row: three forward passes."""
    narrow_share: Mapping[Remat, float]
    """Of the FLOPs, those of 8-bit products."""
    narrowed: float
    """Elements of one row that are made narrow for these: what they take in, and the gradients of what they give."""
    held: Mapping[Remat | Literal["stages"], tuple[Held, ...]]
    """By policy; `stages`: without one, as stages run the layers, which recompute nothing within them."""
    runs_layers: bool
    """Whether layers are run by `scan_layers`, which can recompute and slice them."""
    looks_up: bool
    """Whether tokens are looked up by `models.lookup`."""
    choices: int
    """Experts that a token visits; 0 without experts."""
    bound_factor: float | None
    """Room for rows from one rank of experts to another; None: for any routing."""
    nodes_visited: Callable[[int], int] | None
    """Of so many nodes, those that a token's experts lie on, where it goes once to each."""
    row_bytes: Callable[[str, int], int | None] | None
    """Of a row under way to experts and back, where it is coded, as `Facts` has it."""
    vocab_chunk: int | None
    """Tokens of the vocabulary on one rank whose logits are made at a time; None: of all."""

    @property
    def policies(self) -> tuple[Remat, ...]:
        """Recomputation policies that the step was traced with."""
        return tuple(self.flops)

    @property
    def seq_len(self) -> int | None:
        """Tokens of a row."""
        return None if self.tokens is None else self.tokens // self.rows

    @property
    def num_layers(self) -> int:
        return max((leaf.num_layers for leaf in self.leaves), default=1)

    @functools.cached_property
    def head_share(self) -> float:
        """FLOPs of the output layer, both ways, over those of what stands before it, forward."""
        size = max((leaf.size for leaf in self.leaves if _has_vocabulary(leaf)), default=0)
        forward = 2 * (self.seq_len or 1) * size
        return 3 * forward / max(self.model_flops / 3 - forward, 1.0)

    @property
    def batch_bytes(self) -> int:
        """Of the global batch, as jax takes it."""
        return sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(self.batch))

    @property
    def compute_itemsize(self) -> int:
        return np.dtype(jnp.dtype(self.precision.compute or self.leaves[0].dtype)).itemsize

    @functools.cached_property
    def updates(self) -> dict[Any, Any]:
        """What `planner.update` has traced, by how parameters lie."""
        return {}

    @functools.cached_property
    def vocab_size(self) -> int:
        return max((size_of(_whole(leaf), "vocab") for leaf in self.leaves if _has_vocabulary(leaf)), default=0)

    @functools.cached_property
    def num_experts(self) -> int:
        return max((leaf.shape[-1] for leaf in self.leaves if is_router(_whole(leaf))), default=0)


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
    """Trace a training step; errors are those of the model and the loss.

    Args:
      model: from an adapter.
      batch: the global batch, arrays or their shapes.
      loss: (model, batch, key) -> (loss, metrics).
      tx: the optimizer.
      precision: of the step.
      loss_is: as for `train_step`.
      cluster: for whose GPUs cuDNN's attention is traced.
      bound_factor, nodes_visited, row_bytes: of the MoE layers.
      remat: a policy to consider in addition to `POLICIES`, as `save:query,attention_out`.
    """
    batch = _shapes_of(batch)
    rows, tokens = rows_and_tokens(batch, 1)
    with tracing(one := MeshSpec().abstract(1), ddp()):
        variables, names = model.abstract(), dict(model.names())
    made = jax.eval_shape(lambda params: cast_floating(params, precision.params), variables.params)
    plain = [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(made)]
    known = dataclasses.replace(model, init=functools.partial(_zeros, variables), names=lambda: names)
    leaves = tuple(one.leaf for one in with_layers([_whole(leaf) for leaf in plain]))
    marker = _marker(leaves, batch)
    seq_len = None if tokens is None else tokens // rows
    few = batch_of(batch, marker)
    arrays = (made, variables.extra, few, jax.ShapeDtypeStruct((2,), np.uint32))
    how = functools.partial(_labelled, leaves=leaves, rows=marker, seq_len=seq_len)
    # Experts' matmuls as the form that counts rows there are, whatever kernel the pod takes for them.
    with traced_for(cluster), compiled_for("cpu"), tracing(one, ddp()):
        terms = jax.eval_shape(terms_of(known, loss, precision, None), *arrays)
        alone = jax.make_jaxpr(value_of(known, loss, precision, None))(*arrays).jaxpr
        choices, looks_up = _choices(alone, leaves), has_scope(alone, GATHERED)
        visited = _visited(alone, leaves) * choices * (seq_len or 1)
        forward, vocab_chunk = matmul_flops(alone) / marker + visited, _vocab_chunk(alone, leaves)
        counted, held, runs_layers = _by_policy(
            functools.partial(value_of, known, loss, precision), arrays, how, tuple(dict.fromkeys((*POLICIES, remat)))
        )
    flops, attention = ({remat: each[at] / marker for remat, each in counted.items()} for at in (0, 1))
    narrow_share = {remat: narrow / (every or 1) for remat, (every, _, narrow) in counted.items()}
    own = attention_flops(alone) / marker
    attention = {remat: own + count - attention[None] for remat, count in attention.items()}
    again = 0 if vocab_chunk is None else 2 * (seq_len or 1) * max(one.size for one in leaves if _has_vocabulary(one))
    least = 3 * forward + again - flops[None]
    flops = {remat: least + count + visited * (remat is not None) for remat, count in flops.items()}
    return Workload(
        model=known, is_divisible=loss_is is not None or not isinstance(terms.loss, ScalarLoss),
        leaves=leaves, slots=_slots(tx, made, leaves), tx=tx, precision=precision, batch=batch, rows=rows,
        tokens=tokens, flops=flops, attention=attention, model_flops=3 * forward,
        narrow_share=narrow_share, narrowed=sum(elements for _, elements in _narrow(alone)) / marker, held=held,
        runs_layers=runs_layers, looks_up=looks_up, choices=choices, bound_factor=bound_factor, vocab_chunk=vocab_chunk,
        nodes_visited=nodes_visited, row_bytes=row_bytes,
        whole_bytes=sum(leaf_of(*one).nbytes for one in tree_leaves_with_paths(variables.extra)) + 4 + 8 + 4,
    )  # fmt: skip


def _shapes_of(batch: PyTree) -> PyTree:
    """Shapes and dtypes of a batch as jax takes it; raises `ValueError` for what is no number, or has other rows."""
    asked, leaves = "trace a training step on it", tree_leaves_with_paths(batch)
    fix = "give the global batch: arrays or jax.ShapeDtypeStruct, with as many rows each as their first dim"
    for path, x in leaves:
        kind = np.dtype(type(x)) if isinstance(x, bool | int | float) else getattr(x, "dtype", None)
        is_key = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
        if kind is None or not (kind == np.bool_ or is_key or jnp.issubdtype(kind, np.number)):
            exists = f"it is a {type(x).__name__}" + (f" of dtype {kind}" if kind is not None else "")
            raise problem(f"batch leaf `{path}`" if path else "batch", asked, exists, fix)
    shapes = [np.shape(x) for _, x in leaves]
    counts = {shape[0] for shape in shapes if shape}
    if len(counts) > 1 or not max(counts, default=0):
        exists = "its leaves differ in rows: " if len(counts) > 1 else "it has no rows: "
        raise problem("batch", asked, exists + (", ".join(map(str, shapes)) or "no array"), fix)
    return jax.tree.map(shape_of, batch)


def batch_of(batch: PyTree, rows: int) -> PyTree:
    """Shapes of so many rows; a scalar is of all of them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.shape else (), x.dtype), batch)


def _by_policy(
    value: Callable[[Remat], Any],
    arrays: PyTree,
    labelled: Callable[..., Iterator[Held]],
    policies: Sequence[Remat],
) -> tuple[dict[Remat, tuple[int, int, int]], dict[Remat | Literal["stages"], tuple[Held, ...]], bool]:
    """FLOPs of both passes, all, attention's and those in 8 bits, and what is kept between them, by policy; that by
    stages, too; and whether there are layers to do so with."""
    scans: list[Any] = []

    def run(layer: Any, x: Any, rows: Any) -> Any:
        scans.append(layer)
        return scanned(layer, x, rows)

    counted: dict[Remat, tuple[int, int, int]] = {}
    held: dict[Remat | Literal["stages"], tuple[Held, ...]] = {}
    for remat in policies:
        counted[remat], kept = _kept(value(remat), arrays)
        held[remat] = tuple(labelled(kept, is_all=remat is None))
    with running(run):
        _, kept = _kept(value(None), arrays)
    return counted, {**held, "stages": tuple(labelled(kept, is_all=True))}, bool(scans)


def _zeros(variables: Variables, key: Any) -> Variables:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)


def _whole(leaf: Leaf) -> Decision:
    return Decision(leaf=leaf, rule="", spec=PartitionSpec(), shards=1, replicated_on_purpose=True)


def _slots(tx: optax.GradientTransformation, params: PyTree, leaves: Sequence[Leaf]) -> tuple[Slot, ...]:
    """The optimizer's arrays on the device, each split as its owner: a spec of all dims says which dims it has."""
    axes = [tuple(f"{at}.{dim}" for dim in range(len(leaf.shape))) for at, leaf in enumerate(leaves)]
    mesh = {axis: 1 for each in axes for axis in each}
    marked = [
        dataclasses.replace(_whole(leaf), spec=PartitionSpec(*each)) for leaf, each in zip(leaves, axes, strict=True)
    ]
    found = optimizer_decisions(tx, jax.eval_shape(tx.init, params), marked, mesh)
    placed = [[tuple(map(int, entry.split("."))) for entry in one.spec if entry is not None] for one in found]
    return tuple(
        Slot(one.leaf.nbytes, at[0][0] if at else None, tuple(dim for _, dim in at))
        for one, at in zip(found, placed, strict=True)
        if not one.is_on_host
    )


# ---- The trace -------------------------------------------------------------------------------------------------------


def _marker(leaves: Sequence[Leaf], batch: PyTree) -> int:
    """Rows to trace: a prime that divides no other dim, so that it is found again."""
    dims = {size for leaf in leaves for size in leaf.shape} | {n for x in jax.tree.leaves(batch) for n in x.shape[1:]}
    primes = (n for n in range(3, 1000, 2) if all(n % d for d in range(3, n, 2)))
    return next(n for n in primes if all(size % n for size in dims if size))


def value_of(
    model: Model, loss: Callable[..., Any], precision: Precision, remat: Remat, interleave: int = 1
) -> Callable[..., jax.Array]:
    """The loss as a function of parameters, what else the model keeps, rows and a key."""

    def value(*args: Any) -> jax.Array:
        return terms_of(model, loss, precision, remat, interleave)(*args).normalized()[0]

    return value


def terms_of(
    model: Model, loss: Callable[..., Any], precision: Precision, remat: Remat, interleave: int = 1
) -> Callable[..., LossTerms]:
    """Return the terms of the loss as a function of parameters, variables, batch and key."""

    def terms(params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array) -> LossTerms:
        with numerics(precision, remat, interleave):
            bound = model.bind(cast_floating(params, precision.compute), extra)
            return LossTerms.of(*checked(loss(bound, batch, jax.random.wrap_key_data(key)), loss))

    return terms


def _kept(value: Callable[..., jax.Array], arrays: tuple[Any, ...]) -> tuple[tuple[int, int, int], list[Any]]:
    """FLOPs of loss and gradients, all, of attention and in 8 bits, and the arrays kept between them."""

    def both(params: PyTree, *others: Any) -> Any:
        out, pull = jax.vjp(lambda params: value(params, *others), params)
        return pull(jnp.ones_like(out)), jax.tree.leaves(pull)

    jaxpr, (_, kept) = jax.make_jaxpr(both, return_shape=True)(*arrays)
    narrow = sum(flops for flops, _ in _narrow(jaxpr.jaxpr))
    return (matmul_flops(jaxpr.jaxpr), attention_flops(jaxpr.jaxpr), narrow), kept


def _visited(jaxpr: Any, leaves: Sequence[Leaf]) -> int:
    """FLOPs of a token at an expert, where products with experts' weights run in loops whose length the routing tells:
    these are counted once; of all others 0."""
    notes: dict[str, None] = {}
    matmul_flops(jaxpr, notes)
    return 2 * bool(notes) * sum(leaf.size // leaf.shape[_expert_dim(leaf)] for leaf in leaves if _expert_dim(leaf))


def _narrow(jaxpr: Any) -> Iterator[tuple[int, float]]:
    """(FLOPs, elements taken in and given) of every 8-bit product."""
    for flops, eqn in products(jaxpr):
        lhs, rhs, out = (x.aval for x in (*eqn.invars[:2], *eqn.outvars))
        if lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
            contracted = math.prod(lhs.shape[dim] for dim in eqn.params["dimension_numbers"][0][0])
            yield flops, flops / (2 * out.size * contracted) * (lhs.size + out.size)


def _expert_dim(leaf: Leaf) -> int:
    """Which dim of an expert's weight is that of the experts, behind the layers; 0: it is none."""
    return (leaf.names or ()).index("expert") if is_expert(_whole(leaf)) and not is_router(_whole(leaf)) else 0


def _labelled(
    kept: Sequence[Any], leaves: Sequence[Leaf], rows: int, seq_len: int | None, *, is_all: bool
) -> Iterator[Held]:
    """What is kept of rows, with the names of its dims; weights and tables are left out."""
    stacks = {leaf.num_layers for leaf in leaves} - {1}
    for array in kept:
        at = next((dim for dim, size in enumerate(array.shape) if size and size % rows == 0), None)
        if at is None:
            continue
        times, rest = array.shape[at] // rows, tuple(array.shape[at + 1 :])
        is_routed = times > 1 and (seq_len is None or times != seq_len)
        if times == 1 and seq_len is not None and rest[:1] == (seq_len,):
            times, rest = seq_len, rest[1:]
        named = _names_of(rest, leaves)
        layers = array.shape[0] if at and array.shape[0] in stacks else 0
        # Between blocks the residual stream may be split where the work inside them is not: float32, as norms have it,
        # or what a policy keeps instead of a block's input.
        between = set(named) <= {None, "act_embed"} and not (is_all and layers and array.dtype.itemsize < 4)
        seq = None if times != seq_len else "norm_seq" if between else "seq"
        yield Held((seq, *named), (times, *rest), np.dtype(array.dtype).itemsize, layers, is_routed)


def _names_of(shape: tuple[int, ...], leaves: Sequence[Leaf]) -> tuple[str | None, ...]:
    """Names of activations' dims, by the weights that have such dims one after the other."""
    for leaf in leaves:
        for first in range(len(leaf.shape) - len(shape) + 1):
            span = slice(first, first + len(shape))
            if shape and leaf.names is not None and leaf.shape[span] == shape and "layers" not in leaf.names[span]:
                return tuple(map(_activation, leaf.names[span]))
    by_size = {n: name for leaf in leaves for n, name in zip(leaf.shape, leaf.names or (), strict=False)}
    found = [_activation(by_size.get(size)) for size in shape]
    # Of dims of one size the first has the name: a head's group may be as large as there are groups.
    return tuple(None if name in found[:at] else name for at, name in enumerate(found))


def _activation(name: str | None) -> str | None:
    return f"act_{name}" if f"act_{name}" in ACTIVATION_NAMES and name != "expert" else None


def _has_vocabulary(leaf: Leaf) -> bool:
    return has_vocabulary(_whole(leaf))


def _vocab_chunk(jaxpr: Any, leaves: Sequence[Leaf]) -> int | None:
    """Tokens in a chunk of the vocabulary, where `chunked_cross_entropy` makes logits of one at a time."""
    sizes = [size_of(_whole(leaf), "vocab") for leaf in leaves if _has_vocabulary(leaf)]
    return -(-max(sizes) // vocab_chunks(jaxpr)) if sizes and has_scope(jaxpr, SCOPE) else None


def _choices(jaxpr: Any, leaves: Sequence[Leaf]) -> int:
    """Experts that a token visits: what `top_k` takes out of all of them."""
    experts = {leaf.shape[-1] for leaf in leaves if is_router(_whole(leaf))}
    found = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "top_k")
    return max((int(eqn.params["k"]) for eqn in found if eqn.invars[0].aval.shape[-1] in experts), default=0)
