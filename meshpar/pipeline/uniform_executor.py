"""Executor of uniform schedules: a scan per segment, without conditionals.

In a uniform schedule, all stages run the same ops in a tick; see `meshpar.schedules.uniform`.

    embeddings of the first groups
    scan        F of all ticks before the first event                                  warm-up
    scan        event of a group, then a scan over ticks with F, B and W               steady
    event of the last group, then a scan over ticks with B and W                       cool-down
    gradients of the last embeddings

    tick:   receive dx  ─►  F  ─►  send y  ─►  B and W
            the gradient is sent during F, the activation during B

    event:  outputs of the group  ─► all-to-all ─►  head, loss and gradient of a microbatch  ─► all-gather ─►  B
            embedding of a microbatch of a later group  ─► all-gather ─►  F
            gradients of an earlier group  ─► all-to-all ─►  gradient of the embedding of a microbatch

A stage without an op in a tick computes with unused data: its results go to a scratch slot, the last of each buffer,
and its gradients are replaced by zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.pipeline.jaxpr_slicing import StackedRows, arrays, run, view
from meshpar.pipeline.stage_program import (
    Buffers,
    StageProgram,
    StageTotals,
    add,
    buffer,
    put,
    read,
    scoped,
    without_float0,
    zeros,
)
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import colored
from meshpar.schedules.uniform import Ops, TickSegment, Uniform, received, uniform
from meshpar.sharding.types import PyTree, axes_of_spec

EVENT, TICK = "event", "tick"
"""Named scopes of the work of a group, and of a tick."""
_Tree = TypeVar("_Tree")


class UniformColumns(NamedTuple):
    """The table of a schedule and its buffer slots, int32 arrays `[tick, stage, ...]`.

    Slots of stages without an op are scratch slots."""

    runs: np.ndarray
    """`[tick, stage, kind]`: 1 if the stage has an op of this kind."""
    microbatch: np.ndarray
    chunk: np.ndarray
    part: np.ndarray
    saved_activations: np.ndarray
    deferred_weight_grads: np.ndarray
    arrives: np.ndarray
    """`[tick, stage, kind]`: slot of the message that arrives: of this tick's F, and of the previous B."""
    reads: np.ndarray
    """`[tick, stage, kind]`: slot of the message that F or B reads."""
    of_group: np.ndarray
    """`[tick, stage, 4]`: slots of the embedding that F reads, the output that F writes, the gradient of the output
    that B reads, and the gradient of the embedding that B writes."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UniformPlan:
    """Segments, table and buffer slots of a schedule, as arrays that the scans read."""

    uniform: Uniform
    columns: UniformColumns
    slots: dict[str, int]
    """Number of slots of each buffer, with the scratch slot."""

    @staticmethod
    def of(schedule: Schedule) -> UniformPlan | None:
        """Return the plan of a schedule, or None if its stages run different ops in a tick."""
        segments = uniform(schedule.validate())
        if segments is None:
            return None
        slots, stages, table = schedule.slots(), schedule.stages, schedule.table
        has_op, microbatch, chunk = table[..., 0] >= 0, table[..., 0], table[..., 1]
        part = schedule.parts[np.arange(stages)[:, None], chunk]
        messages = [received(schedule, kind) for kind in (F, B)]
        backward_ticks = np.flatnonzero(has_op[..., B].any(1))
        late = np.full((schedule.ticks, stages), -1)
        late[backward_ticks[1:]] = messages[B].arrives[backward_ticks[:-1]]
        arrives, reads = np.stack([messages[F].arrives, late], -1), np.stack([m.reads for m in messages], -1)
        is_first, is_last = part == 0, part == schedule.num_parts - 1
        ahead, behind, held = (groups * stages for groups in (segments.ahead, segments.behind, segments.held))
        writes_output = np.where(has_op[..., F] & is_last[..., F], microbatch[..., F] % held, held)
        writes_dx = np.where(has_op[..., B] & is_first[..., B], microbatch[..., B] % behind, behind)
        of_group = np.stack([microbatch[..., F] % ahead, writes_output, microbatch[..., B] % stages, writes_dx], -1)
        saved, deferred = slots.saved_activations, _deferred_slots(schedule, segments)
        count = {
            "saved_activations": int(saved.max()) + 2,
            "deferred_weight_grads": int(deferred.max()) + 2 if deferred.max() >= 0 else 0,
            "from_previous": int(arrives[..., F].max(initial=-1)) + 2,
            "from_next": int(arrives[..., B].max(initial=-1)) + 2,
            "embeddings": ahead,
            "outputs": held + 1,
            "output_grads": stages,
            "embedding_grads": behind + 1,
        }
        scratch = np.array([count["from_previous"], count["from_next"]]) - 1
        columns = UniformColumns(
            runs=has_op, microbatch=np.maximum(microbatch, 0), chunk=np.maximum(chunk, 0),
            part=np.where(has_op, part, 1),
            saved_activations=np.where(saved < 0, count["saved_activations"] - 1, saved),
            deferred_weight_grads=np.where(deferred < 0, count["deferred_weight_grads"] - 1, deferred),
            arrives=np.where(arrives < 0, scratch, arrives), reads=np.where(reads < 0, scratch, reads),
            of_group=of_group,
        )  # fmt: skip
        columns = jax.tree.map(lambda column: np.asarray(column, np.int32), columns)
        return UniformPlan(uniform=segments, columns=columns, slots=count)


def _deferred_slots(schedule: Schedule, segments: Uniform) -> np.ndarray:
    """Return the slot in which B leaves the inputs of its W, int `[tick, stage, kind]`.

    Unlike in `Schedule.slots`, a B and a W in the same tick have a slot, too, because other stages need it.
    """
    done, stage, slots = schedule.done_in, schedule.done_on, np.full(schedule.table.shape[:3], -1)
    if any(segment.ops.backward and not segment.ops.is_full_backward for segment in segments.segments):
        slots[done[B], stage, B] = slots[done[W], stage, W] = colored(stage, done[B], done[W])
    return slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Carry:
    saved_activations: Buffers
    deferred_weight_grads: Buffers
    from_previous: PyTree
    """Received activations."""
    from_next: PyTree
    """Received gradients."""
    dx: PyTree
    """Result of the last B, which is sent in the next tick with B."""
    embeddings: PyTree
    outputs: PyTree
    output_grads: PyTree
    embedding_grads: PyTree
    totals: StageTotals


@dataclasses.dataclass(kw_only=True, eq=False)
class UniformExecutor(StageProgram):
    """Runs a plan, a scan per segment."""

    plan: UniformPlan

    def __call__(self, columns: UniformColumns) -> StageTotals:
        groups, ahead, behind = self.plan.uniform.groups, self.plan.uniform.ahead, self.plan.uniform.behind
        carry = self.start()
        for group in range(min(ahead, groups)):
            carry = self.embed(carry, group)
        for segment in self.plan.uniform.segments:
            end = segment.begin + segment.repeats * segment.ticks
            rows = jax.tree.map(lambda x, s=segment, end=end: x[s.begin : end], columns)
            rows = jax.tree.map(lambda x, s=segment: x.reshape(s.repeats, s.ticks, *x.shape[1:]), rows)

            def repetition(
                carry: _Carry, group: jax.Array | int, rows: UniformColumns, segment: TickSegment = segment
            ) -> tuple[_Carry, None]:
                if segment.first_event is not None:
                    carry = self.event(carry, group)
                return lax.scan(lambda carry, row: (self.tick(segment.ops, carry, row), None), carry, rows)

            first = segment.first_event or 0
            if segment.repeats == 1:
                carry, _ = repetition(carry, first, jax.tree.map(lambda x: x[0], rows))
            else:
                event_groups = first + jnp.arange(segment.repeats, dtype=jnp.int32)
                carry, _ = lax.scan(lambda carry, xs: repetition(carry, *xs), carry, (event_groups, rows))
        for group in range(max(0, groups - behind), groups):
            carry = self.embed_backward(carry, group)
        return carry.totals

    def start(self) -> _Carry:
        slots = self.plan.slots
        deferred = self.split.deferred_weight_grads if slots["deferred_weight_grads"] else ()
        like: dict[str, Any] = dict.fromkeys(slots, self.x)
        like |= {"saved_activations": self.split.saved_activations, "deferred_weight_grads": deferred}
        buffers = {name: buffer(like[name], count) for name, count in slots.items()}
        buffers |= {name: self.constrain(buffers[name], rows=True) for name in like if like[name] is self.x}
        return _Carry(**buffers, dx=self.constrain(zeros(self.x)), totals=self.zero_totals())

    # -- Groups -------------------------------------------------------------------------------------------------------

    def event(self, carry: _Carry, group: jax.Array | int) -> _Carry:
        """Compute the loss of a group, the embeddings of a later group, and embedding gradients of an earlier group.

        If `group` is an integer, groups that do not exist are left out.
        """
        groups, ahead, behind = self.plan.uniform.groups, self.plan.uniform.ahead, self.plan.uniform.behind
        with jax.named_scope(EVENT):
            carry = self.head(carry, group)
            if not isinstance(group, int) or group + ahead < groups:
                carry = self.embed(carry, group + ahead)
            if not isinstance(group, int) or group >= behind:
                carry = self.embed_backward(carry, group - behind)
        return carry

    def _microbatch(self, group: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Return the microbatch of this stage in a group, and whether it exists. It is clamped if it does not."""
        microbatch = group * self.schedule.stages + lax.axis_index(self.axis)
        last = self.schedule.microbatches - 1
        return jnp.clip(microbatch, 0, last), (microbatch >= 0) & (microbatch <= last)

    def embed(self, carry: _Carry, group: jax.Array | int) -> _Carry:
        microbatch, _ = self._microbatch(group)
        x = self.constrain(self.first(self.embedding_and_head, self.inputs(microbatch, jnp.int32(0))))
        slot = group % self.plan.uniform.ahead * self.schedule.stages
        rows = self._from_all_stages(x)
        embeddings = jax.tree.map(lambda b, x: lax.dynamic_update_slice_in_dim(b, x, slot, 0), carry.embeddings, rows)
        return dataclasses.replace(carry, embeddings=embeddings)

    def head(self, carry: _Carry, group: jax.Array | int) -> _Carry:
        stages = self.schedule.stages
        microbatch, exists = self._microbatch(group)
        y = self._from_stage(self._rows(carry.outputs, group, self.plan.uniform.held), stages - 1)
        inputs = self.inputs(microbatch, jnp.int32(self.schedule.num_parts - 1))
        totals, (d_params, dy) = self.last(self.embedding_and_head, y, inputs)
        sums = self.with_loss(carry.totals.sums, *_where(exists, (totals, d_params)))
        dy = self.constrain(without_float0(dy, self.x))
        return dataclasses.replace(
            carry, output_grads=self._from_all_stages(dy), totals=carry.totals._replace(sums=sums)
        )

    def embed_backward(self, carry: _Carry, group: jax.Array | int) -> _Carry:
        microbatch, exists = self._microbatch(group)
        dx = _with_float0(self._from_stage(self._rows(carry.embedding_grads, group, self.plan.uniform.behind), 0))
        grads = _where(exists, self.first_grads(self.inputs(microbatch, jnp.int32(0)), dx))
        sums = carry.totals.sums
        total = sums.grads._replace(embedding_and_head=add(sums.grads.embedding_and_head, grads))
        return dataclasses.replace(carry, totals=carry.totals._replace(sums=sums.replace(grads=total)))

    def _rows(self, buffers: PyTree, group: jax.Array | int, groups: int) -> PyTree:
        """Return the activations of a group in buffers of `groups` groups, `[stage, ...]`."""
        slot = group % groups * self.schedule.stages
        return jax.tree.map(lambda b: lax.dynamic_slice_in_dim(b, slot, self.schedule.stages), buffers)

    def _from_all_stages(self, x: PyTree) -> PyTree:
        """Return the activations of all stages, `[stage, ...]`."""
        return self._over_stages(lambda x: lax.all_gather(x, self.axis), x, rows=False)

    def _from_stage(self, rows: PyTree, stage: int) -> PyTree:
        """Return a row of the rows `[stage, ...]` of another stage: the row with the index of this stage."""
        received = self._over_stages(lambda x: lax.all_to_all(x, self.axis, 0, 0, tiled=True), rows, rows=True)
        return self.constrain(jax.tree.map(lambda x: x[stage], received))

    def _over_stages(self, collective: Callable[[jax.Array], jax.Array], x: PyTree, *, rows: bool) -> PyTree:
        """Apply a collective that returns rows. If `rows`, x has rows, too."""
        axes = {axis for spec in self.x_specs if spec is not None for axis in axes_of_spec(spec)}
        leaves, structure = jax.tree.flatten(self.constrain(x, rows=rows))
        if axes:
            # Without this shard_map, XLA would first gather the activations over the axes that are left to it. It is
            # not differentiated, so replication does not need to be checked.
            specs = [PartitionSpec() if spec is None else spec for spec in self.x_specs]
            stacked = [PartitionSpec(None, *spec) for spec in specs]
            leaves = jax.shard_map(
                lambda leaves: list(map(collective, leaves)), in_specs=(stacked if rows else specs,),
                out_specs=stacked, axis_names=axes, check_vma=False,
            )(leaves)  # fmt: skip
        else:
            leaves = list(map(collective, leaves))
        return jax.tree.unflatten(structure, leaves)

    # -- A tick -------------------------------------------------------------------------------------------------------

    def tick(self, ops: Ops, carry: _Carry, column: UniformColumns) -> _Carry:
        with jax.named_scope(TICK):
            saved, weights_of = carry.saved_activations, self.weights_of(column.chunk)
            dx = self.constrain(self.send(carry.dx, -1, ring=self.num_chunks > 1)) if ops.backward else None
            if ops.forward:
                carry, dx = self._forward(carry, weights_of(F), dx, column)
            if ops.backward:
                carry = dataclasses.replace(carry, from_next=put(carry.from_next, column.arrives[B], dx))
                carry = self._backward(carry, saved, weights_of(B), column, is_full=ops.is_full_backward)
            if ops.weights and not ops.is_full_backward:
                carry = self._weights(carry, saved, weights_of(W), column)
        return carry

    def _forward(self, carry: _Carry, weights: PyTree, dx: PyTree, column: UniformColumns) -> tuple[_Carry, PyTree]:
        """Run F. The received gradient `dx` is returned after the first layer, which hides its message."""
        read_embedding, write_output, *_ = column.of_group
        inputs = self.inputs(column.microbatch[F], column.part[F])
        received = read(carry.from_previous, column.reads[F])
        x = _select(column.part[F] == 0, read(carry.embeddings, read_embedding), received)
        steps = self.forward(weights, self.constrain(x), inputs)
        y, residuals, loss, metrics = run(scoped("forward", steps))
        loss, metrics = _where(column.runs[F] > 0, (loss, metrics))
        y = self.constrain(y)
        if dx is not None:
            rows = (x.rows for x in residuals if isinstance(x, StackedRows) and len(x.rows) > 1)
            dx, _ = lax.optimization_barrier((dx, next((layers[1] for layers in rows), y)))
        sent = self.constrain(self.send(y, 1, ring=self.num_chunks > 1))
        carry = dataclasses.replace(
            carry,
            saved_activations=put(carry.saved_activations, column.saved_activations[F], residuals),
            outputs=put(carry.outputs, write_output, y),
            from_previous=put(carry.from_previous, column.arrives[F], sent),
            totals=self.with_aux(carry.totals, loss, metrics, column.chunk[F]),
        )
        return carry, dx

    def _backward(
        self, carry: _Carry, saved: Buffers, weights: PyTree, column: UniformColumns, *, is_full: bool
    ) -> _Carry:
        *_, read_grad, write_dx = column.of_group
        is_last = column.part[B] == self.schedule.num_parts - 1
        dy = _select(is_last, read(carry.output_grads, read_grad), read(carry.from_next, column.reads[B]))
        steps = self.backward(
            self.split.at_once_steps if is_full else self.split.backward_steps,
            weights, view(saved, column.saved_activations[B]), self.constrain(dy),
        )  # fmt: skip
        dx, result = run(scoped("backward", steps))
        dx = self.constrain(without_float0(dx, self.x))
        carry = dataclasses.replace(carry, dx=dx, embedding_grads=put(carry.embedding_grads, write_dx, dx))
        if is_full:
            return self._with_grads(carry, result, column)
        deferred = put(carry.deferred_weight_grads, column.deferred_weight_grads[B], result)
        return dataclasses.replace(carry, deferred_weight_grads=deferred)

    def _weights(self, carry: _Carry, saved: Buffers, weights: PyTree, column: UniformColumns) -> _Carry:
        """Run a W whose B was in an earlier tick."""
        steps = self.split.weights_steps(
            self.split.stacked_shared(weights), view(saved, column.saved_activations[W]),
            view(carry.deferred_weight_grads, column.deferred_weight_grads[W]),
        )  # fmt: skip
        return self._with_grads(carry, run(scoped("weights", steps)), column)

    def _with_grads(self, carry: _Carry, grads: PyTree, column: UniformColumns) -> _Carry:
        with jax.named_scope("weights"):
            grads = _where(column.runs[W] > 0, grads)
            sums = self.with_weight_grads(carry.totals.sums, grads, column.chunk[W])
        return dataclasses.replace(carry, totals=carry.totals._replace(sums=sums))


def _select(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)


def _where(condition: jax.Array, tree: _Tree) -> _Tree:
    """Return the tree if the condition is true, and zeros otherwise."""

    def leaf(x: Any) -> Any:
        if isinstance(x, StackedRows):
            return StackedRows(tuple(map(leaf, x.rows)))
        x = arrays(x)
        return x if x.dtype == jax.dtypes.float0 else jnp.where(condition, x, jnp.zeros_like(x))

    return jax.tree.map(leaf, tree)


def _with_float0(grads: PyTree) -> PyTree:
    """Replace gradients of integer activations by float0 zeros, as `jax.vjp` requires."""
    return jax.tree.map(
        lambda g: g if jnp.issubdtype(g.dtype, jnp.inexact) else np.zeros(g.shape, jax.dtypes.float0), grads
    )
