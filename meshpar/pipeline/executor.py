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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.layers.losses import MicrobatchTotals
from meshpar.pipeline.jaxpr_slicing import Steps, run_interleaved, view
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
    write,
    zeros,
)
from meshpar.schedules import Schedule, Slots
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import BUFFERS, SHIFTS, STAY
from meshpar.sharding.types import PyTree

CELL, IF_FIRST, IF_LAST, SENDS = "cell", "if_first", "if_last", ("send_up", "send_down")
"""Named scopes of the conditionals in a tick. The schedule, not the program, determines which branch runs."""


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
class Executor(StageProgram):
    """Runs a plan. A conditional selects the ops of a stage in each tick."""

    plan: TickPlan

    def __call__(self, columns: Columns) -> StageTotals:
        def tick(carry: _Carry, xs: tuple[Columns, jax.Array]) -> tuple[_Carry, None]:
            return self.tick(carry, *xs), None

        carry, _ = lax.scan(tick, self.start(), (columns, jnp.asarray(self.plan.moves)))
        return carry.totals

    def start(self) -> _Carry:
        counts = self.plan.buffers()
        deferred = self.split.deferred_weight_grads if counts["deferred_weight_grads"] else ()
        return _Carry(
            saved_activations=buffer(self.split.saved_activations, counts["saved_activations"]),
            deferred_weight_grads=buffer(deferred, counts["deferred_weight_grads"]),
            # A single chunk has no messages, but the branch that reads the buffer is traced anyway.
            receive_buffer=buffer(self.x, max(counts["receive_buffer"], 1)),
            pending_outputs=buffer(self.x, counts["pending_outputs"]),
            totals=self.zero_totals(),
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
                    return write(buffer, slot, self.send(out, shift, ring=ring))

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
            weights_of = self.weights_of(column.chunk)
            up, down = zeros(self.x), zeros(self.x)
            steps = {}
            if has_f:
                steps[F] = scoped("forward", self._forward(weights_of(F), receive_buffer, column))
            if has_b:
                run_b = self.split.at_once_steps if is_full_backward else self.split.backward_steps
                weights, residuals = weights_of(B), view(saved, column.saved_activations[B])
                steps[B] = scoped(
                    "backward", self._backward(run_b, weights, residuals, receive_buffer, pending, totals.sums, column)
                )
            if has_w and not is_full_backward:
                from_b = view(deferred, column.deferred_weight_grads[W])
                shared = self.split.stacked_shared(weights_of(W))
                residuals = view(saved, column.saved_activations[W])
                steps[W] = scoped("weights", self.split.weights_steps(shared, residuals, from_b))
            out = dict(zip(steps, run_interleaved(*steps.values()), strict=True))
            if has_b:
                down, from_b, sums = out[B]
                totals = totals._replace(sums=sums)
            if has_w:
                with jax.named_scope("weights"):
                    grads = from_b if is_full_backward else out[W]
                    totals = totals._replace(sums=self.with_weight_grads(totals.sums, grads, column.chunk[W]))
            if has_f:
                up, residuals, aux_loss, metrics = out[F]
                # Each F has a B, so residuals are always saved. Only the output of the last chunk is pending.
                saved = put(saved, column.saved_activations[F], residuals)
                pending = write(pending, column.pending_outputs[F], up)
                totals = self.with_aux(totals, aux_loss, metrics, column.chunk[F])
            if has_b and not is_full_backward and deferred:
                deferred = put(deferred, column.deferred_weight_grads[B], from_b)
            return totals, (saved, pending, deferred), self.constrain(up), self.constrain(down)

        return run

    def _forward(self, weights: PyTree, receive_buffer: PyTree, column: Columns) -> Steps[Any]:
        """Run F; see `StageProgram.forward`."""
        inputs = self.inputs(column.microbatch[F], column.part[F])
        with jax.named_scope(IF_FIRST):
            x = lax.cond(
                column.part[F] == 0,
                lambda: self.constrain(self.first(self.embedding_and_head, inputs)),
                lambda: self.constrain(read(receive_buffer, column.receive_buffer[F])),
            )
        return (yield from self.forward(weights, x, inputs))

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
            y = read(pending, column.pending_outputs[B])
            totals, (d_params, dy) = self.last(self.embedding_and_head, y, inputs)
            return self.constrain(without_float0(dy, self.x)), self.with_loss(sums, totals, d_params)

        def from_next(sums: MicrobatchTotals) -> tuple[PyTree, MicrobatchTotals]:
            return self.constrain(read(receive_buffer, column.receive_buffer[B])), sums

        with jax.named_scope(IF_LAST):
            dy, sums = lax.cond(part == self.schedule.num_parts - 1, from_loss, from_next, sums)
        dx, from_b = yield from self.backward(run, weights, residuals, dy)

        def into_first(grads: PyTree) -> PyTree:
            return add(grads, self.first_grads(inputs, dx))

        with jax.named_scope(IF_FIRST):
            grads = lax.cond(part == 0, into_first, lambda grads: grads, sums.grads.embedding_and_head)
        return without_float0(dx, self.x), from_b, sums.replace(grads=sums.grads._replace(embedding_and_head=grads))
