"""Executor of pipeline schedules: a scan over the ticks of a table, one program for all stages.

    tick:   F, B and W of this stage  ─►  results  ─►  messages up and down  ─►  receive buffers of the neighbors
             │ reads and writes saved activations         only if some stage sends in this tick
             │ and deferred weight gradients

F, B and W are the forward, input gradient and weight gradient of a chunk for a microbatch.

The program is manual over the stages and over the axes that shard the batch, so each device accumulates its gradients
locally and reduces them once, after the loop. All other axes are left to XLA: collectives of layers that are sharded
inside a stage run within a tick and never cross stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from meshpar.layers.losses import ONE_PART, LossTerms, MeanLoss, MicrobatchTotals, Normalizer, SumLoss
from meshpar.layers.scan import Aux
from meshpar.pipeline.jaxpr_slicing import Steps, flat_jaxpr, run_interleaved
from meshpar.pipeline.split_backward import SplitVjp, split_vjp
from meshpar.schedules import Schedule, Slots
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import BUFFERS, SHIFTS, STAY
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import PyTree

Buffers: TypeAlias = tuple[jax.Array, ...]

CELL, IF_FIRST, IF_LAST, SENDS = "cell", "if_first", "if_last", ("send_up", "send_down")
"""Named scopes of the conditionals in a tick. The schedule, not the program, determines which branch runs."""


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Carry:
    saved_activations: Buffers
    deferred_weight_grads: Buffers
    receive_buffer: PyTree
    pending_outputs: PyTree
    """Outputs of the last chunk whose loss has not been computed yet."""
    totals: StageTotals


class Columns(NamedTuple):
    """The table of a schedule and its buffer slots, int32 arrays `[tick, stage, ...]`; see `Slots` and `Schedule`."""

    arrives: np.ndarray
    deferred_weight_grads: np.ndarray
    branch: np.ndarray
    """Index in `TickPlan.op_sets` of the ops in a tick."""
    chunk: np.ndarray
    receive_buffer: np.ndarray
    microbatch: np.ndarray
    part: np.ndarray
    """Index of the model part of each op; −1 if there is no op."""
    sends: np.ndarray
    saved_activations: np.ndarray
    pending_outputs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TickPlan:
    """Table and buffer slots of a schedule, as arrays that a scan over ticks reads."""

    schedule: Schedule
    slots: Slots
    op_sets: tuple[tuple[bool, ...], ...]
    """Distinct combinations of ops in a tick: (F, B, W, whether B and W are computed together for one microbatch)."""
    columns: Columns
    moves: np.ndarray
    """int32 `[tick, direction, lane]`: 1 if any stage sends."""

    @staticmethod
    def of(schedule: Schedule) -> TickPlan:
        """Return the plan of a schedule, after validating it."""
        slots = schedule.validate().slots()
        has_op = schedule.table[..., 0] >= 0
        is_full_backward = has_op[..., B] & has_op[..., W] & (slots.deferred_weight_grads[..., W] < 0)
        keys = np.concatenate([has_op, is_full_backward[..., None]], -1)
        op_sets, branch = np.unique(keys.reshape(-1, 4), axis=0, return_inverse=True)
        stage = np.arange(schedule.stages)[None, :, None]
        columns = Columns(
            branch=branch.reshape(has_op.shape[:2]),
            microbatch=schedule.table[..., 0],
            chunk=schedule.table[..., 1],
            part=np.where(has_op, schedule.parts[stage, schedule.table[..., 1]], -1),
            **{name: getattr(slots, name) for name in (*BUFFERS, "sends", "arrives")},
        )
        return TickPlan(
            schedule=schedule,
            slots=slots,
            op_sets=tuple(tuple(bool(x) for x in op_set) for op_set in op_sets),
            columns=jax.tree.map(lambda column: np.asarray(column, np.int32), columns),
            moves=np.any(slots.sends >= 0, axis=1).astype(np.int32),
        )

    def buffers(self) -> dict[str, int]:
        """Return the number of slots of each buffer: the maximum over stages, because all stages run one program."""
        return {name: int(count.max(initial=0)) for name, count in self.slots.counts().items()}


@dataclasses.dataclass(kw_only=True, eq=False)
class Executor:
    """Runs a plan in the per-device view, inside a `shard_map` that is manual over `axis`."""

    plan: TickPlan
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

    def __post_init__(self) -> None:
        self.num_chunks, self._trained = self.plan.schedule.chunks, self.functions.of_trained
        zero = jnp.zeros((), jnp.int32)
        inputs = self.inputs(zero, zero)
        self.x = jax.eval_shape(self.functions.first, self.embedding_and_head, inputs)
        self.x_specs = layout_of(self.functions.first, self.embedding_and_head, inputs)
        self.chunk_params = jax.eval_shape(lambda params: self.gather_weights(self._chunk(params, zero)), self.params)
        self.split = split_stage(self.functions, self.chunk_params, self.x, inputs)
        (_, self.aux_loss), self.aux = jax.eval_shape(
            _stage(self.functions), self.chunk_params, (self.x, _with_key_data(inputs))
        )
        self.loss_totals, _ = jax.eval_shape(self._last, self.embedding_and_head, self.x, inputs)
        self.deferred = self.split.deferred_weight_grads if self.plan.buffers()["deferred_weight_grads"] else ()

    def __call__(self, columns: Columns) -> StageTotals:
        """Run the ticks of this stage, and return its sums over all microbatches.

        `columns` is the schedule of the stage, with leaves `[tick, ...]`.
        """

        def tick(carry: _Carry, xs: tuple[Columns, jax.Array]) -> tuple[_Carry, None]:
            return self.tick(carry, *xs), None

        carry, _ = lax.scan(tick, self.zeros(), (columns, jnp.asarray(self.plan.moves)))
        return carry.totals

    # -- The model ----------------------------------------------------------------------------------------------------

    def inputs(self, microbatch: jax.Array, chunk: jax.Array) -> MicrobatchInputs:
        key = micro_key(self.key, microbatch, chunk)
        return MicrobatchInputs(read(self.examples, microbatch), key, chunk, self.extra)

    def _last(
        self, embedding_and_head: PyTree, y: PyTree, inputs: MicrobatchInputs
    ) -> tuple[MicrobatchTotals, tuple[PyTree, PyTree]]:
        """Return the loss and metrics of a microbatch, and the gradients of `embedding_and_head` and y."""

        def last(trained: PyTree, y: PyTree) -> tuple[jax.Array, dict[str, jax.Array]]:
            with jax.named_scope("loss"):
                terms = self.functions.last(_with_frozen(trained, embedding_and_head), y, inputs)
                return terms.normalized(self.functions.normalizer)

        trained = self._trained(embedding_and_head, "embedding_and_head")
        loss, vjp, metrics = jax.vjp(last, trained, y, has_aux=True)
        return MicrobatchTotals(loss, metrics, None, None), vjp(jnp.ones_like(loss))

    def _first(self, embedding_and_head: PyTree, inputs: MicrobatchInputs) -> PyTree:
        with jax.named_scope("first"):
            return self.functions.first(embedding_and_head, inputs)

    def _constrain(self, x: PyTree) -> PyTree:
        """Constrain activations to the layout of the first chunk, because XLA needs the same layout in all branches."""
        leaves, structure = jax.tree.flatten(x)
        constrained = [
            x if spec is None else with_layout(x, spec) for x, spec in zip(leaves, self.x_specs, strict=True)
        ]
        return jax.tree.unflatten(structure, constrained)

    def _chunk(self, params: PyTree, chunk: jax.Array) -> PyTree:
        return jax.tree.map(lambda p: p[0], params) if self.num_chunks == 1 else read(params, chunk)

    # -- Buffers ------------------------------------------------------------------------------------------------------

    def zeros(self) -> _Carry:
        counts = self.plan.buffers()

        def buffer(like: PyTree, count: int) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)

        def grad_sums(like: PyTree, *lead: int) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), self.grad_dtype(x.dtype)), like)

        def aux_sum(x: Any) -> jax.Array:
            dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32
            return jnp.zeros((self.num_chunks, *x.shape), jnp.promote_types(x.dtype, dtype))

        chunks = grad_sums(self._trained(self.chunk_params, "chunks"), self.num_chunks)
        embedding_and_head = grad_sums(self._trained(self.embedding_and_head, "embedding_and_head"))
        grads = Params(*self.constrain_grads(chunks, embedding_and_head))
        aux = {k: aux_sum(x) for k, x in self.aux.items()}
        return _Carry(
            saved_activations=buffer(self.split.saved_activations, counts["saved_activations"]),
            deferred_weight_grads=buffer(self.deferred, counts["deferred_weight_grads"]),
            # A single chunk has no messages, but the branch that reads the buffer is traced anyway.
            receive_buffer=buffer(self.x, max(counts["receive_buffer"], 1)),
            pending_outputs=buffer(self.x, counts["pending_outputs"]),
            totals=StageTotals(_zeros(self.loss_totals).replace(grads=grads), aux),
        )

    # -- A tick -------------------------------------------------------------------------------------------------------

    def tick(self, carry: _Carry, column: Columns, moves: jax.Array) -> _Carry:
        branches = [self._op_set(op_set) for op_set in self.plan.op_sets]
        with jax.named_scope(CELL):
            buffers = (carry.saved_activations, carry.pending_outputs, carry.deferred_weight_grads)
            totals, (saved, pending, deferred), up, down = lax.switch(
                column.branch, branches, carry.totals, buffers, carry.receive_buffer, column
            )
        receive_buffer = self._messages(carry.receive_buffer, (up, down), column, moves)
        return _Carry(saved_activations=saved, deferred_weight_grads=deferred, receive_buffer=receive_buffer,
                      pending_outputs=pending, totals=totals)  # fmt: skip

    def _send(self, x: PyTree, shift: int, ring: bool) -> PyTree:
        """Send to stage + `shift`. Without a ring, the stage at the end of the line receives zeros."""
        stages = self.plan.schedule.stages
        pairs = [(stage, (stage + shift) % stages) for stage in range(stages) if ring or 0 <= stage + shift < stages]
        return lax.ppermute(x, self.axis, pairs) if pairs else jax.tree.map(jnp.zeros_like, x)

    def _messages(
        self, receive_buffer: PyTree, results: tuple[PyTree, PyTree], column: Columns, moves: jax.Array
    ) -> PyTree:
        """Send the results of F and B, each at most once, and write received messages to the receive buffer."""
        for direction, shift in enumerate(SHIFTS):
            for lane in range(self.plan.slots.sends.shape[3]):
                sends = self.plan.moves[:, direction, lane]
                if not sends.any():
                    continue
                kind = column.sends[direction, lane]
                out = jax.tree.map(lambda f, b, kind=kind: jnp.where(kind == B, b, f), *results)
                slot = column.arrives[direction, lane]
                if direction == STAY:
                    receive_buffer = write(receive_buffer, slot, out)
                    continue
                last_stage = -1 if shift > 0 else 0
                ring = bool((self.plan.slots.sends[:, last_stage, direction, lane] >= 0).any())

                def send(buffer: PyTree, out: PyTree, slot: jax.Array, shift: int = shift, ring: bool = ring) -> PyTree:
                    return write(buffer, slot, self._send(out, shift, ring))

                with jax.named_scope(f"{SENDS[direction]}_{lane}" if lane else SENDS[direction]):
                    args = receive_buffer, out, slot
                    if sends.all():
                        receive_buffer = send(*args)
                    else:  # The condition is the same on all stages, which excludes a deadlock.
                        receive_buffer = lax.cond(moves[direction, lane] > 0, send, lambda b, *_: b, *args)
        return receive_buffer

    # -- Ops ----------------------------------------------------------------------------------------------------------

    def _op_set(self, kinds: Sequence[bool]) -> Callable[..., Any]:
        """Return the function that runs a combination of ops from `plan.op_sets`."""
        has_f, has_b, has_w, is_full_backward = kinds

        def run(totals: StageTotals, buffers: Any, receive_buffer: PyTree, column: Columns) -> Any:
            saved, pending, deferred = buffers
            weights_of = self._weights_of(column)
            up, down = _zeros(self.x), _zeros(self.x)
            sums, aux = totals
            steps = {}
            if has_f:
                steps[F] = _scoped("forward", self._forward(weights_of(F), receive_buffer, column))
            if has_b:
                run_b = self.split.at_once_steps if is_full_backward else self.split.backward_steps
                weights, residuals = weights_of(B), read(saved, column.saved_activations[B])
                steps[B] = _scoped(
                    "backward", self._backward(run_b, weights, residuals, receive_buffer, pending, sums, column)
                )
            if has_w and not is_full_backward:
                from_b = read(deferred, column.deferred_weight_grads[W])
                shared = self.split.shared(weights_of(W))
                residuals = read(saved, column.saved_activations[W])
                steps[W] = _scoped("weights", self.split.weights_steps(shared, residuals, from_b))
            out = dict(zip(steps, run_interleaved(*steps.values()), strict=True))
            if has_b:
                down, from_b, sums = out[B]
            if has_w:
                with jax.named_scope("weights"):
                    grads = self._trained(from_b if is_full_backward else out[W], "chunks")
                    chunks = _sum(sums.grads.chunks, grads, None if self.num_chunks == 1 else column.chunk[W])
                    sums = sums.replace(grads=sums.grads._replace(chunks=chunks))
            if has_f:
                up, residuals, aux_loss, metrics = out[F]
                # Each F has a B, so residuals are always saved. Only the output of the last chunk is pending.
                saved = put(saved, column.saved_activations[F], residuals)
                pending = write(pending, column.pending_outputs[F], up)
                sums = sums.replace(loss=sums.loss + aux_loss.astype(sums.loss.dtype))
                aux = {k: x.at[column.chunk[F]].add(metrics[k].astype(x.dtype)) for k, x in aux.items()}
            if has_b and not is_full_backward and deferred:
                deferred = put(deferred, column.deferred_weight_grads[B], from_b)
            return StageTotals(sums, aux), (saved, pending, deferred), self._constrain(up), self._constrain(down)

        return run

    def _weights_of(self, column: Columns) -> Callable[[int], PyTree]:
        """Return a function from op kind to weights. Stages with a single chunk gather once per tick."""
        gathered: dict[int, PyTree] = {}

        def weights_of(kind: int) -> PyTree:
            key = 0 if self.num_chunks == 1 else kind
            if key not in gathered:
                gathered[key] = self.gather_weights(self._chunk(self.params, column.chunk[kind]))
            return gathered[key]

        return weights_of

    def _forward(
        self, weights: PyTree, receive_buffer: PyTree, column: Columns
    ) -> Steps[tuple[PyTree, Buffers, jax.Array, Any]]:
        """Return y, the residuals for B and W, the auxiliary loss and its metrics."""
        inputs = self.inputs(column.microbatch[F], column.part[F])
        with jax.named_scope(IF_FIRST):
            x = lax.cond(
                column.part[F] == 0,
                lambda: self._constrain(self._first(self.embedding_and_head, inputs)),
                lambda: self._constrain(read(receive_buffer, column.receive_buffer[F])),
            )
        ((y, aux_loss), metrics), residuals = yield from self.split.forward_steps(weights, (x, _with_key_data(inputs)))
        return y, residuals, aux_loss, metrics

    def _backward(
        self, run: Any, weights: PyTree, residuals: Buffers, receive_buffer: PyTree, pending: PyTree,
        sums: MicrobatchTotals, column: Columns,
    ) -> Steps[tuple[PyTree, Any, MicrobatchTotals]]:  # fmt: skip
        """Run B of a chunk, and return `(dx, result, sums)`.

        `run` computes dx and `result`: weight gradients, or inputs of W for schedules that compute them later.
        """
        part = column.part[B]
        inputs = self.inputs(column.microbatch[B], part)

        def from_loss(sums: MicrobatchTotals) -> tuple[PyTree, MicrobatchTotals]:
            totals, (d_params, dy) = self._last(
                self.embedding_and_head, read(pending, column.pending_outputs[B]), inputs
            )
            added = jax.tree.map(jnp.add, sums.replace(grads=None), totals)
            grads = sums.grads._replace(embedding_and_head=_sum(sums.grads.embedding_and_head, d_params))
            return self._constrain(_without_float0(dy, self.x)), added.replace(grads=grads)

        def from_next(sums: MicrobatchTotals) -> tuple[PyTree, MicrobatchTotals]:
            return self._constrain(read(receive_buffer, column.receive_buffer[B])), sums

        with jax.named_scope(IF_LAST):
            dy, sums = lax.cond(part == self.plan.schedule.num_parts - 1, from_loss, from_next, sums)
        shared = self.split.shared(weights)
        # Auxiliary losses have the same weight for each microbatch.
        ones = jnp.ones(self.aux_loss.shape, self.aux_loss.dtype)
        (dx, _), from_b = yield from run(shared, residuals, ((dy, ones), _zeros(self.aux)))

        def into_first(grads: PyTree) -> PyTree:
            trained = self._trained(self.embedding_and_head, "embedding_and_head")
            _, vjp = jax.vjp(lambda p: self._first(_with_frozen(p, self.embedding_and_head), inputs), trained)
            return _sum(grads, vjp(dx)[0])

        with jax.named_scope(IF_FIRST):
            grads = lax.cond(part == 0, into_first, lambda grads: grads, sums.grads.embedding_and_head)
        return _without_float0(dx, self.x), from_b, sums.replace(grads=sums.grads._replace(embedding_and_head=grads))


def _scoped(name: str, steps: Steps[Any]) -> Steps[Any]:
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


def _zeros(like: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _without_float0(grads: PyTree, like: PyTree) -> PyTree:
    """Replace float0 gradients of integer activations by zeros that can be sent."""
    return jax.tree.map(lambda g, x: jnp.zeros(x.shape, x.dtype) if g.dtype == jax.dtypes.float0 else g, grads, like)


def read(buffer: PyTree, slot: jax.Array) -> PyTree:
    """Return the content of a slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def put(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """Return the buffer with a new value in a slot."""
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x.astype(b.dtype), slot, 0), buffer, value)


def write(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """Return the buffer with a new value in a slot, or unchanged if the slot is −1."""
    old = read(buffer, slot)
    return put(buffer, slot, jax.tree.map(lambda old, x: jnp.where(slot >= 0, x.astype(old.dtype), old), old, value))


def _sum(totals: PyTree, grads: PyTree, index: jax.Array | None = None) -> PyTree:
    """Add gradients to their totals, optionally at an index; float0 gradients are ignored."""

    def add(total: jax.Array, grad: Any) -> jax.Array:
        if grad.dtype == jax.dtypes.float0:
            return total
        if index is None:
            return total + lax.expand_dims(grad.astype(total.dtype), range(total.ndim - grad.ndim))
        return total.at[index].add(grad.astype(total.dtype))

    return jax.tree.map(add, totals, grads)
