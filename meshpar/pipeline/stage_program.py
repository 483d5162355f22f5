"""The functions of a pipeline stage for a microbatch, and buffers for their results."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from meshpar.layers.losses import ONE_PART, LossTerms, MeanLoss, MicrobatchTotals, Normalizer, SumLoss
from meshpar.layers.scan import Aux
from meshpar.pipeline.jaxpr_slicing import StackedRows, Steps, arrays, flat_jaxpr, start, view
from meshpar.pipeline.split_backward import SplitVjp, split_vjp
from meshpar.schedules import Schedule
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import PyTree

Buffers: TypeAlias = tuple[jax.Array, ...]


class MicrobatchInputs(NamedTuple):
    """Inputs of a stage function other than activations and parameters."""

    examples: PyTree
    """Local examples of the microbatch. All stages receive them."""
    key: jax.Array
    """PRNG key, unique per microbatch, pipeline chunk and data-parallel rank."""
    chunk: jax.Array
    """int32 index of the pipeline chunk in the model, starting at 0."""
    extra: PyTree = ()
    """Variables of the model other than parameters, as they were before the step."""


def micro_key(key: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> jax.Array:
    """Return the PRNG key of a microbatch in a pipeline chunk."""
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), chunk)


First: TypeAlias = Callable[[PyTree, MicrobatchInputs], PyTree]
"""(embedding_and_head, inputs) -> input activations of the first chunk."""
Last: TypeAlias = Callable[
    [PyTree, PyTree, MicrobatchInputs], tuple[MeanLoss | SumLoss | jax.Array, dict[str, jax.Array]]
]
"""(embedding_and_head, output of the last chunk, inputs) -> (loss, metrics)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Functions:
    """A model as pipeline chunks. The functions must not communicate over the stages."""

    first: First
    stage: Callable[[PyTree, PyTree, MicrobatchInputs], tuple[PyTree, Aux]]
    """(parameters of a chunk, x, inputs) -> (y, aux); y has the shapes and dtypes of x."""
    last: Callable[[PyTree, PyTree, MicrobatchInputs], LossTerms]
    normalizer: Normalizer = ONE_PART
    """Normalizer for the losses of all microbatches and devices."""
    inside: Callable[[PyTree, PyTree, PyTree, MicrobatchInputs], PyTree] | None = None
    """(parameters of a chunk, embedding_and_head, x, inputs) -> y. Used to check that stages do not depend on
    `embedding_and_head`, which `stage` replaces by zeros."""
    trained: Params | None = None
    """Boolean pytrees, True for trainable leaves. None means that all leaves are trainable."""

    def of_trained(self, tree: PyTree, group: Literal["chunks", "embedding_and_head"]) -> PyTree:
        """Return a tree like the parameters of the group, with None for frozen leaves."""
        if self.trained is None:
            return tree
        return jax.tree.map(lambda trainable, x: x if trainable else None, getattr(self.trained, group), tree)


class Params(NamedTuple):
    """Parameters of a pipelined model, or their gradients."""

    chunks: PyTree
    """Parameters of the stacked layers. Leaves are `[chunk, ...]` in model order, sharded over the stage axis."""
    embedding_and_head: PyTree = None
    """Parameters used before the first chunk and after the last one, replicated over the stages."""


class StageTotals(NamedTuple):
    """Sums over the microbatches of a device."""

    sums: MicrobatchTotals
    """Loss, metrics and gradients. Gradients are `Params` with leaves `[chunk, ...]` of this stage. The loss and the
    metrics are nonzero only on stages with the last chunk. Gradients of the embedding also come from stages with the
    first chunk."""
    aux: dict[str, jax.Array]
    """Auxiliary metrics `[chunk, ...]` of this stage. All microbatches have the same weight."""


@dataclasses.dataclass(kw_only=True, eq=False)
class StageProgram(abc.ABC):
    """The functions of a stage in the per-device view, inside a `shard_map` that is manual over `axis`."""

    schedule: Schedule
    functions: Functions
    axis: str
    grad_dtype: Callable[[Any], Any]
    """Maps the dtype of a parameter to the dtype in which its gradient is accumulated."""
    gather_weights: Callable[[PyTree], PyTree] = lambda params: params
    """Gathers the sharded weights of a chunk in each tick that uses them."""
    constrain_grads: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda chunks, other: (chunks, other)
    """Applies the sharding constraints of accumulated gradients over the axes that are left to XLA."""
    params: PyTree
    """Parameters of the chunks of this stage, `[chunk, ...]`."""
    embedding_and_head: PyTree
    """Unsharded parameters of `first` and `last`."""
    examples: PyTree
    """`[microbatch, examples, ...]`"""
    key: jax.Array
    """PRNG key of this data-parallel rank."""
    extra: PyTree = ()
    """Variables of the model other than parameters."""

    @abc.abstractmethod
    def __call__(self, columns: Any) -> StageTotals:
        """Run the ticks of this stage, and return its sums over all microbatches.

        `columns` is the schedule of the stage, with leaves `[tick, ...]`.
        """

    def __post_init__(self) -> None:
        self.num_chunks, self.trained = self.schedule.chunks, self.functions.of_trained
        zero = jnp.zeros((), jnp.int32)
        inputs = self.inputs(zero, zero)
        self.x = jax.eval_shape(self.functions.first, self.embedding_and_head, inputs)
        self.x_specs = layout_of(self.functions.first, self.embedding_and_head, inputs)
        self.chunk_params = jax.eval_shape(lambda: arrays(self.weights(zero)))
        self.split = split_stage(self.functions, self.chunk_params, self.x, inputs)
        (_, self.aux_loss), self.aux = jax.eval_shape(
            _stage(self.functions), self.chunk_params, (self.x, _with_key_data(inputs))
        )
        self.loss_totals, _ = jax.eval_shape(self.last, self.embedding_and_head, self.x, inputs)

    # -- The model ----------------------------------------------------------------------------------------------------

    def inputs(self, microbatch: jax.Array, chunk: jax.Array) -> MicrobatchInputs:
        key = micro_key(self.key, microbatch, chunk)
        return MicrobatchInputs(read(self.examples, microbatch), key, chunk, self.extra)

    def weights(self, chunk: jax.Array) -> PyTree:
        """Return the weights of a chunk; `View`s of the parameters, unless they are gathered."""
        return self.gather_weights(view(self.params, 0 if self.num_chunks == 1 else chunk))

    def weights_of(self, chunk: Any) -> Callable[[int], PyTree]:
        """Return a function from op kind to weights. `chunk` has the chunk of each op of a tick.

        Stages with a single chunk gather once per tick.
        """
        gathered: dict[int, PyTree] = {}

        def weights_of(kind: int) -> PyTree:
            key = 0 if self.num_chunks == 1 else kind
            if key not in gathered:
                gathered[key] = self.weights(chunk[kind])
            return gathered[key]

        return weights_of

    def first(self, embedding_and_head: PyTree, inputs: MicrobatchInputs) -> PyTree:
        with jax.named_scope("first"):
            return self.functions.first(embedding_and_head, inputs)

    def first_grads(self, inputs: MicrobatchInputs, dx: PyTree) -> PyTree:
        """Return the gradients of `embedding_and_head` from the gradient of the first chunk's input."""
        trained = self.trained(self.embedding_and_head, "embedding_and_head")
        _, vjp = jax.vjp(lambda p: self.first(_with_frozen(p, self.embedding_and_head), inputs), trained)
        return vjp(dx)[0]

    def last(
        self, embedding_and_head: PyTree, y: PyTree, inputs: MicrobatchInputs
    ) -> tuple[MicrobatchTotals, tuple[PyTree, PyTree]]:
        """Return the loss and metrics of a microbatch, and the gradients of `embedding_and_head` and y."""

        def last(trained: PyTree, y: PyTree) -> tuple[jax.Array, dict[str, jax.Array]]:
            with jax.named_scope("loss"):
                terms = self.functions.last(_with_frozen(trained, embedding_and_head), y, inputs)
                return terms.normalized(self.functions.normalizer)

        trained = self.trained(embedding_and_head, "embedding_and_head")
        loss, vjp, metrics = jax.vjp(last, trained, y, has_aux=True)
        return MicrobatchTotals(loss, metrics, None, None), vjp(jnp.ones_like(loss))

    def forward(
        self, weights: PyTree, x: PyTree, inputs: MicrobatchInputs
    ) -> Steps[tuple[PyTree, Buffers, jax.Array, dict[str, jax.Array]]]:
        """Run F, and return y, the residuals for B and W, the auxiliary loss and its metrics."""
        ((y, aux_loss), metrics), residuals = yield from self.split.forward_steps(weights, (x, _with_key_data(inputs)))
        return y, residuals, aux_loss, metrics

    def backward(self, run: Callable[..., Steps[Any]], weights: PyTree, residuals: Buffers, dy: PyTree) -> Steps[Any]:
        """Run B with a method of `split`, and return the gradient of x and the second result of the method."""
        # Auxiliary losses have the same weight for each microbatch.
        ones = jnp.ones(self.aux_loss.shape, self.aux_loss.dtype)
        (dx, _), result = yield from run(self.split.stacked_shared(weights), residuals, ((dy, ones), zeros(self.aux)))
        return dx, result

    def constrain(self, x: PyTree, *, rows: bool = False) -> PyTree:
        """Constrain activations to the layout of the first chunk, because XLA needs the same layout in all branches.

        With `rows`, the leaves of x are stacked activations.
        """
        leaves, structure = jax.tree.flatten(x)
        lead = (None,) * rows
        constrained = [
            x if spec is None else with_layout(x, PartitionSpec(*lead, *spec))
            for x, spec in zip(leaves, self.x_specs, strict=True)
        ]
        return jax.tree.unflatten(structure, constrained)

    # -- Communication and sums ---------------------------------------------------------------------------------------

    def send(self, x: PyTree, shift: int, *, ring: bool) -> PyTree:
        """Send to stage + `shift`. Without a ring, the stage at the end of the line receives zeros."""
        stages = self.schedule.stages
        pairs = [(stage, (stage + shift) % stages) for stage in range(stages) if ring or 0 <= stage + shift < stages]
        return lax.ppermute(x, self.axis, pairs) if pairs else jax.tree.map(jnp.zeros_like, x)

    def zero_totals(self) -> StageTotals:
        def grad_sums(like: PyTree, *lead: int) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), self.grad_dtype(x.dtype)), like)

        def aux_sum(x: Any) -> jax.Array:
            dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32
            return jnp.zeros((self.num_chunks, *x.shape), jnp.promote_types(x.dtype, dtype))

        chunks = grad_sums(self.trained(self.chunk_params, "chunks"), self.num_chunks)
        embedding_and_head = grad_sums(self.trained(self.embedding_and_head, "embedding_and_head"))
        grads = Params(*self.constrain_grads(chunks, embedding_and_head))
        return StageTotals(zeros(self.loss_totals).replace(grads=grads), {k: aux_sum(x) for k, x in self.aux.items()})

    def with_loss(self, sums: MicrobatchTotals, totals: MicrobatchTotals, d_params: PyTree) -> MicrobatchTotals:
        """Add the loss and metrics of a microbatch, and the gradients of `embedding_and_head`."""
        added = jax.tree.map(jnp.add, sums.replace(grads=None), totals)
        grads = sums.grads._replace(embedding_and_head=add(sums.grads.embedding_and_head, d_params))
        return added.replace(grads=grads)

    def with_weight_grads(self, sums: MicrobatchTotals, grads: PyTree, chunk: jax.Array) -> MicrobatchTotals:
        """Add the gradients of the parameters of a chunk."""
        index = 0 if self.num_chunks == 1 else chunk
        chunks = add(sums.grads.chunks, self.trained(grads, "chunks"), index)
        return sums.replace(grads=sums.grads._replace(chunks=chunks))

    def with_aux(
        self, totals: StageTotals, loss: jax.Array, metrics: dict[str, jax.Array], chunk: jax.Array
    ) -> StageTotals:
        """Add the auxiliary loss and metrics of an F."""
        sums = totals.sums.replace(loss=totals.sums.loss + loss.astype(totals.sums.loss.dtype))
        aux = {k: x.at[chunk].add(metrics[k].astype(x.dtype)) for k, x in totals.aux.items()}
        return StageTotals(sums, aux)


def scoped(name: str, steps: Steps[Any]) -> Steps[Any]:
    """Run steps under a named scope. The scope is not active at a `yield`, where other programs run."""
    outputs: list[Any] | None = None
    while True:
        try:
            with jax.named_scope(name):
                loop = next(steps) if outputs is None else steps.send(outputs)
        except StopIteration as end:
            return end.value
        outputs = yield loop


def split_stage(functions: Functions, params: PyTree, x: PyTree, inputs: MicrobatchInputs) -> SplitVjp:
    """Return F, B and W of a pipeline chunk, as functions of `(params, (x, inputs))`."""
    trained = None if functions.trained is None else functions.trained.chunks
    return split_vjp(_stage(functions), params, (x, _with_key_data(inputs)), trained=trained)


def _with_frozen(trained: PyTree, tree: PyTree) -> PyTree:
    """Replace the None leaves of `trained` by the leaves of `tree`."""
    return jax.tree.map(lambda x, y: y if x is None else x, trained, tree, is_leaf=lambda x: x is None)


def _stage(functions: Functions) -> Callable[[PyTree, tuple[PyTree, Any]], Any]:
    def stage(params: PyTree, x_and_data: tuple[PyTree, Any]) -> Any:
        x, data = x_and_data
        inputs = _with_typed_key(lax.stop_gradient(data))
        with jax.named_scope("stage"):
            y, aux = functions.stage(params, x, inputs)
        return (y, aux.loss), lax.stop_gradient(aux.metrics)

    return stage


def layout_of(first: First, embedding_and_head: PyTree, inputs: MicrobatchInputs) -> list[PartitionSpec | None]:
    """Return the PartitionSpec of each output of `first`, or None without a sharding constraint."""
    closed, _ = flat_jaxpr(
        lambda params, data: (first(params, _with_typed_key(data)), ()), embedding_and_head, _with_key_data(inputs)
    )
    producers = {out: eqn for eqn in closed.jaxpr.eqns for out in eqn.outvars}

    def spec_of(out: Any) -> PartitionSpec | None:
        eqn = None if isinstance(out, core.Literal) else producers.get(out)
        if eqn is None or eqn.primitive.name != "sharding_constraint":
            return None
        sharding = eqn.params["sharding"]
        return None if sharding.is_fully_replicated else sharding.spec

    return [spec_of(out) for out in closed.jaxpr.outvars]


def _with_key_data(inputs: MicrobatchInputs) -> Any:
    return inputs._replace(key=jax.random.key_data(inputs.key))


def _with_typed_key(data: Any) -> MicrobatchInputs:
    return data._replace(key=jax.random.wrap_key_data(data.key))


def zeros(like: PyTree) -> PyTree:
    """Return arrays of zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def without_float0(grads: PyTree, like: PyTree) -> PyTree:
    """Replace float0 gradients of integer activations by zeros that can be sent."""
    return jax.tree.map(lambda g, x: jnp.zeros(x.shape, x.dtype) if g.dtype == jax.dtypes.float0 else g, grads, like)


# ---- Buffers ---------------------------------------------------------------------------------------------------------


def buffer(like: PyTree, slots: int) -> PyTree:
    """Return buffers `[slot, ...]` of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), like)


def read(buffer: PyTree, slot: jax.Array) -> PyTree:
    """Return the content of a slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def put(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """Return the buffer with a new value in a slot. `StackedRows` are written one by one."""

    def put_leaf(buffer: jax.Array, x: Any) -> jax.Array:
        if not isinstance(x, StackedRows):
            return lax.dynamic_update_index_in_dim(buffer, arrays(x).astype(buffer.dtype), slot, 0)
        for index, row in enumerate(x.rows):
            at = start(slot, index, *[0] * row.ndim)
            buffer = lax.dynamic_update_slice(buffer, row.astype(buffer.dtype)[None, None], at)
        return buffer

    return jax.tree.map(put_leaf, buffer, value)


def write(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """Return the buffer with a new value in a slot, or unchanged if the slot is −1."""
    old = read(buffer, slot)
    return put(buffer, slot, jax.tree.map(lambda old, x: jnp.where(slot >= 0, x.astype(old.dtype), old), old, value))


def add(totals: PyTree, grads: PyTree, index: jax.Array | int | None = None) -> PyTree:
    """Add gradients to their totals, optionally at an index; float0 gradients are ignored.

    `StackedRows` are added one by one, in place: a kernel per row reads the gradient and updates the total.
    """

    def add_leaf(total: jax.Array, grad: Any) -> jax.Array:
        if isinstance(grad, StackedRows):
            for row, x in enumerate(grad.rows):
                total = total.at[index, row].add(x.astype(total.dtype), mode="promise_in_bounds")
            return total
        grad = arrays(grad)
        if grad.dtype == jax.dtypes.float0:
            return total
        if index is None:
            return total + grad.astype(total.dtype)
        return total.at[index].add(grad.astype(total.dtype), mode="promise_in_bounds")

    return jax.tree.map(add_leaf, totals, grads)
