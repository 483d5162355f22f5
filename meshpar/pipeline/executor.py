"""One program for every schedule: a scan over the ticks of its table, the same on all stages.

    tick:   cell (F, B, W of some microbatch, or idle) ─► results ─► one message up, one down ─► inbox of the neighbours
             │ reads and writes stash and backlog            only where some cell of the tick has something to send

Manual over the stages and over the axes that split the batch, so gradients are summed where they are made and reduced
once, behind the loop. All other axes stay XLA's: what splits a stage's own work puts its collectives into the cells,
whose groups never leave a stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from meshpar.layers.losses import ONE_PART, LossTerms, MeanLoss, Normalizer, SumLoss
from meshpar.layers.scan import Aux
from meshpar.pipeline.jaxpr_slicing import Steps, flat_jaxpr, together
from meshpar.pipeline.split_backward import SplitVjp, split_vjp
from meshpar.schedules import Schedule, Slots
from meshpar.schedules.ops import B, F, W
from meshpar.schedules.slots import BUFFERS, SHIFTS, STAY
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import PyTree
from meshpar.training.accumulation import Sums

Buffers: TypeAlias = tuple[jax.Array, ...]

CELL, IF_FIRST, IF_LAST, SENDS = "cell", "if_first", "if_last", ("send_up", "send_down")
"""Scopes of the choices of a tick: which branch runs is in the schedule's table, not in the program."""


class Micro(NamedTuple):
    """What a stage may know of the microbatch before it."""

    rows: PyTree
    """This device's rows of the batch; every stage has them."""
    key: jax.Array
    """For random numbers: of this microbatch, of this part of the model and of this device's rows."""
    part: jax.Array
    """int32: which part of the model is run, from 0 on."""
    extra: PyTree = ()
    """What the model keeps beside parameters, as it was before the step."""


def micro_key(key: jax.Array, microbatch: jax.Array, part: jax.Array) -> jax.Array:
    """Return the random key of a microbatch in a part of the model."""
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), part)


First: TypeAlias = Callable[[PyTree, Micro], PyTree]
"""(ends, micro) -> the first part's input."""
Last: TypeAlias = Callable[[PyTree, PyTree, Micro], tuple[MeanLoss | SumLoss | jax.Array, dict[str, jax.Array]]]
"""(ends, the last part's output, micro) -> (loss, metrics)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Functions:
    """A model cut into parts; none of them may communicate over the stages."""

    first: First
    stage: Callable[[PyTree, PyTree, Micro], tuple[PyTree, Aux]]
    """(parameters of one part, x, micro) -> (y, aux); y is as x is."""
    last: Callable[[PyTree, PyTree, Micro], LossTerms]
    normalizer: Normalizer = ONE_PART
    """Of the losses of all microbatches and devices."""
    inside: Callable[[PyTree, PyTree, PyTree, Micro], PyTree] | None = None
    """(parameters of one part, ends, x, micro) -> y, where `stage` leaves out ends that it must not depend on."""
    trained: Params | None = None
    """A truth for each leaf of the parts and of the ends: whether it has a gradient. None: all have."""

    def of_trained(self, tree: PyTree, what: Literal["parts", "ends"]) -> PyTree:
        """Of a tree like the parts or the ends what has a gradient; None stands for the others."""
        if self.trained is None:
            return tree
        return jax.tree.map(lambda on, x: x if on else None, getattr(self.trained, what), tree)


class Params(NamedTuple):
    """The parameters of a model that is cut into parts, and likewise their gradients."""

    parts: PyTree
    """Each leaf `[part, ...]`, in the order of the model; split over the mesh axis of the stages."""
    ends: PyTree = None
    """Of what stands before the first part and behind the last: embedding, head. Whole on every stage. None: nothing
    does that has parameters."""


class StageTotals(NamedTuple):
    """What one device has added up over its microbatches."""

    sums: Sums
    """With gradients as `Params`: of this stage's parts, `[chunk, ...]`, and of the ends. All but these and auxiliary
    losses is zero but on the stages of the last part; gradients of ends also come from those of the first."""
    aux: dict[str, jax.Array]
    """`[chunk, ...]`, of this stage's parts; not weighed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Carry:
    stash: Buffers
    backlog: Buffers
    inbox: PyTree
    turn: PyTree
    """Outputs of the last part that wait for the loss."""
    totals: StageTotals
    below: jax.Array
    above: jax.Array
    """`late` of the stages before and behind this one, as far as it has come."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A schedule's table with its buffer slots, as arrays that a scan over ticks reads."""

    schedule: Schedule
    slots: Slots
    cells: tuple[tuple[bool, ...], ...]
    """What kinds of cells there are: (F, B, W, whether W follows its own B)."""
    columns: dict[str, np.ndarray]
    """`[tick, stage, ...]`, int32."""
    moves: np.ndarray
    """int32 `[tick, direction, lane]`: 1 where some stage sends."""

    @staticmethod
    def of(schedule: Schedule) -> Plan:
        slots = schedule.validate().slots()
        has = schedule.table[..., 0] >= 0
        own = has[..., B] & has[..., W] & (slots.backlog[..., W] < 0)
        keys = np.concatenate([has, own[..., None]], -1)
        cells, branch = np.unique(keys.reshape(-1, 4), axis=0, return_inverse=True)
        part = np.where(has, schedule.parts[np.arange(schedule.stages)[None, :, None], schedule.table[..., 1]], -1)
        columns = {
            "branch": branch.reshape(has.shape[:2]),
            "microbatch": schedule.table[..., 0],
            "chunk": schedule.table[..., 1],
            "part": part,
            **{name: getattr(slots, name) for name in (*BUFFERS, "sends", "arrives")},
        }
        return Plan(
            schedule=schedule,
            slots=slots,
            cells=tuple(tuple(bool(x) for x in cell) for cell in cells),
            columns={name: np.asarray(column, np.int32) for name, column in columns.items()},
            moves=np.any(slots.sends >= 0, axis=1).astype(np.int32),
        )

    def buffers(self) -> dict[str, int]:
        """Slots of each buffer on every device: those of the stage that needs most, for all run one program."""
        return {name: int(count.max(initial=0)) for name, count in self.slots.counts().items()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Executor:
    """Runs a plan on one device's view; call it inside a `shard_map` that is manual over `axis`."""

    plan: Plan
    functions: Functions
    axis: str
    grad_dtype: Callable[[Any], Any]
    """From a parameter's dtype to that in which its gradient is summed."""
    whole: Callable[[PyTree], PyTree] = lambda params: params
    """Makes a part's weights of what the loop is given, in every cell: for shards."""
    pin: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda params, ends: (params, ends)
    """Lays the sums of gradients out over the axes that are XLA's."""

    def __call__(self, columns: Mapping[str, jax.Array], params: PyTree, ends: PyTree, rows: PyTree, key: jax.Array,
                 late: jax.Array, extra: PyTree = ()) -> tuple[StageTotals, jax.Array]:  # fmt: skip
        """Sums over all microbatches; and over all stages, of `late`.

        Args:
          columns: `plan.columns`, of this stage: `[tick, ...]`.
          params: of this stage's parts, each leaf `[chunk, ...]`.
          ends: what `first` and `last` take, whole.
          rows: `[microbatch, rows, ...]`.
          key: of this device's rows.
          late: `[numbers]` that this stage brought from the step before.
          extra: what the model keeps beside parameters.
        """
        trace = _Trace(self, params, ends, rows, key, extra)
        carry = trace.zeros(late)

        def tick(carry: _Carry, xs: Any) -> tuple[_Carry, None]:
            at, moves = xs
            return trace.tick(carry, at, moves, late), None

        carry, _ = lax.scan(tick, carry, (dict(columns), jnp.asarray(self.plan.moves)))
        return carry.totals, carry.below + late + carry.above


class _Trace:
    """One trace of the loop: its arguments, and the shapes that follow from them."""

    def __init__(self, executor: Executor, params: PyTree, ends: PyTree, rows: PyTree, key: jax.Array,
                 extra: PyTree) -> None:  # fmt: skip
        self.executor, self.plan, self.axis = executor, executor.plan, executor.axis
        self.params, self.ends, self.rows, self.key, self.extra = params, ends, rows, key, extra
        self.chunks = self.plan.schedule.chunks
        self.functions = executor.functions
        self._trained = self.functions.of_trained
        zero = jnp.zeros((), jnp.int32)
        micro = self.micro(zero, zero)
        self.x = jax.eval_shape(self.functions.first, ends, micro)
        self.layout = layout_of(self.functions.first, ends, micro)
        one = jax.eval_shape(lambda params: executor.whole(self._chunk(params, zero)), params)
        self.part_params = one
        self.split = split_stage(self.functions, one, self.x, micro)
        (_, self.aux_loss), self.aux = jax.eval_shape(_stage(self.functions), one, (self.x, _data(micro)))
        self.of_last, _ = jax.eval_shape(self._last, ends, self.x, micro)

    # -- The model's parts --------------------------------------------------------------------------------------------

    def micro(self, microbatch: jax.Array, part: jax.Array) -> Micro:
        return Micro(read(self.rows, microbatch), micro_key(self.key, microbatch, part), part, self.extra)

    def _last(self, ends: PyTree, y: PyTree, micro: Micro) -> tuple[Sums, tuple[PyTree, PyTree]]:
        """Return loss and metrics of one microbatch, and the gradients of the ends and of y."""

        def last(trained: PyTree, y: PyTree) -> tuple[jax.Array, dict[str, jax.Array]]:
            with jax.named_scope("loss"):
                return self.functions.last(_with_frozen(trained, ends), y, micro).normalized(self.functions.normalizer)

        loss, vjp, metrics = jax.vjp(last, self._trained(ends, "ends"), y, has_aux=True)
        return Sums(loss, metrics, None, None), vjp(jnp.ones_like(loss))

    def _first(self, ends: PyTree, micro: Micro) -> PyTree:
        with jax.named_scope("first"):
            return self.functions.first(ends, micro)

    def _laid(self, x: PyTree) -> PyTree:
        """What goes from part to part, as the first part lays it out: XLA wants it alike at the end of all branches."""
        leaves, structure = jax.tree.flatten(x)
        laid = [x if spec is None else with_layout(x, spec) for x, spec in zip(leaves, self.layout, strict=True)]
        return jax.tree.unflatten(structure, laid)

    def _chunk(self, params: PyTree, chunk: jax.Array) -> PyTree:
        if self.chunks == 1:
            return jax.tree.map(lambda p: p[0], params)
        return read(params, chunk)

    def _weights_of(self, at: Mapping[str, jax.Array]) -> Callable[[int], PyTree]:
        """From the kind of an op in a cell to the weights of its part, gathered once for all ops of one part."""
        made: dict[int, PyTree] = {}

        def whole(kind: int) -> PyTree:
            key = 0 if self.chunks == 1 else kind
            if key not in made:
                made[key] = self.executor.whole(self._chunk(self.params, at["chunk"][kind]))
            return made[key]

        return whole

    @property
    def _handed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a B hands on, where some W is in another cell than its B."""
        return self.split.backlog if self.plan.buffers()["backlog"] else ()

    # -- Buffers ------------------------------------------------------------------------------------------------------

    def zeros(self, late: jax.Array) -> _Carry:
        counts = self.plan.buffers()

        def room(like: PyTree, count: int) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)

        def sums(like: PyTree, *lead: int) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), self.executor.grad_dtype(x.dtype)), like)

        parts, ends = self._trained(self.part_params, "parts"), self._trained(self.ends, "ends")
        grads = Params(*self.executor.pin(sums(parts, self.chunks), sums(ends)))
        wide = {k: jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32 for k, x in self.aux.items()}
        dtypes = {k: jnp.promote_types(x.dtype, wide[k]) for k, x in self.aux.items()}
        aux = {k: jnp.zeros((self.chunks, *x.shape), dtypes[k]) for k, x in self.aux.items()}
        return _Carry(
            stash=room(self.split.stash, counts["stash"]),
            backlog=room(self._handed, counts["backlog"]),
            # One part alone is sent nothing; what would read it is traced all the same.
            inbox=room(self.x, max(counts["inbox"], 1)),
            turn=room(self.x, counts["turn"]),
            totals=StageTotals(_zeros(self.of_last).replace(grads=grads), aux),
            below=jnp.zeros_like(late),
            above=jnp.zeros_like(late),
        )

    # -- One tick -----------------------------------------------------------------------------------------------------

    def tick(self, carry: _Carry, at: Mapping[str, jax.Array], moves: jax.Array, late: jax.Array) -> _Carry:
        branches = [self._cell(cell) for cell in self.plan.cells]
        with jax.named_scope(CELL):
            held = (carry.stash, carry.turn, carry.backlog)
            totals, (stash, turn, backlog), up, down = lax.switch(
                at["branch"], branches, carry.totals, held, carry.inbox, at
            )
        inbox = self._messages(carry.inbox, (up, down), at, moves)
        below, above = carry.below, carry.above
        if late.size:
            with jax.named_scope("late"):
                below, above = self._send(below + late, 1, False), self._send(above + late, -1, False)
        return _Carry(stash=stash, backlog=backlog, inbox=inbox, turn=turn, totals=totals, below=below, above=above)

    def _send(self, x: PyTree, by: int, ring: bool) -> PyTree:
        """To the stage `by` further; the ends of a line get zeros."""
        stages = self.plan.schedule.stages
        pairs = [(stage, (stage + by) % stages) for stage in range(stages) if ring or 0 <= stage + by < stages]
        return lax.ppermute(x, self.axis, pairs) if pairs else jax.tree.map(jnp.zeros_like, x)

    def _messages(self, inbox: PyTree, results: tuple[PyTree, PyTree], at: Any, moves: jax.Array) -> PyTree:
        """What the cells made goes where it is used; results are F's and B's, in a tick each is sent at most once."""
        lanes = self.plan.slots.sends.shape[3]
        for direction, by in enumerate(SHIFTS):
            for lane in range(lanes):
                if not self.plan.moves[:, direction, lane].any():
                    continue
                kind = at["sends"][direction, lane]
                out = jax.tree.map(lambda f, b, kind=kind: jnp.where(kind == B, b, f), *results)
                slot = at["arrives"][direction, lane]
                if direction == STAY:
                    inbox = write(inbox, slot, out)
                    continue
                ring = self._wraps(direction, lane)
                with jax.named_scope(f"{SENDS[direction]}_{lane}" if lane else SENDS[direction]):
                    if self.plan.moves[:, direction, lane].all():
                        inbox = write(inbox, slot, self._send(out, by, ring))
                    else:  # the same choice on all stages, so no stage waits for a message that is not sent
                        inbox = lax.cond(
                            moves[direction, lane] > 0,
                            lambda inbox, out, slot, by=by, ring=ring: write(inbox, slot, self._send(out, by, ring)),
                            lambda inbox, out, slot: inbox,
                            inbox, out, slot,
                        )  # fmt: skip
        return inbox

    def _wraps(self, direction: int, lane: int) -> bool:
        edge = -1 if SHIFTS[direction] > 0 else 0
        return bool((self.plan.slots.sends[:, edge, direction, lane] >= 0).any())

    # -- Cells --------------------------------------------------------------------------------------------------------

    def _cell(self, kinds: Sequence[bool]) -> Callable[..., Any]:
        has_f, has_b, has_w, own = kinds

        def run(totals: StageTotals, held: Any, inbox: PyTree, at: Mapping[str, jax.Array]) -> Any:
            stash, turn, backlog = held
            whole = self._weights_of(at)
            up, down = _zeros(self.x), _zeros(self.x)
            sums, aux = totals
            steps = {}
            if has_f:
                steps[F] = _scoped("forward", self._forward(whole(F), inbox, at))
            if has_b:
                run_b = self.split.at_once_steps if own else self.split.backward_steps
                steps[B] = _scoped(
                    "backward", self._backward(run_b, whole(B), read(stash, at["stash"][B]), inbox, turn, sums, at)
                )
            if has_w and not own:
                left = read(backlog, at["backlog"][W])
                shared = self.split.shared(whole(W))
                steps[W] = _scoped("weights", self.split.weights_steps(shared, read(stash, at["stash"][W]), left))
            out = dict(zip(steps, together(*steps.values()), strict=True))
            if has_b:
                down, handed, sums = out[B]
            if has_w:
                with jax.named_scope("weights"):
                    grads = self._trained(handed if own else out[W], "parts")
                    parts = _sum(sums.grads.parts, grads, None if self.chunks == 1 else at["chunk"][W])
                    sums = sums.replace(grads=sums.grads._replace(parts=parts))
            if has_f:
                up, left, aux_loss, more = out[F]
                # Every F has a B to keep something for; only the last part's hands its result to the loss.
                stash, turn = put(stash, at["stash"][F], left), write(turn, at["turn"][F], up)
                sums = sums.replace(loss=sums.loss + aux_loss.astype(sums.loss.dtype))
                aux = {k: x.at[at["chunk"][F]].add(more[k].astype(x.dtype)) for k, x in aux.items()}
            if has_b and not own and backlog:
                backlog = put(backlog, at["backlog"][B], handed)
            return StageTotals(sums, aux), (stash, turn, backlog), self._laid(up), self._laid(down)

        return run

    def _forward(self, weights: PyTree, inbox: PyTree, at: Any) -> Steps[tuple[PyTree, Buffers, jax.Array, Any]]:
        """(y, what is left for B and W, auxiliary loss, its metrics)."""
        micro = self.micro(at["microbatch"][F], at["part"][F])
        with jax.named_scope(IF_FIRST):
            x = lax.cond(
                at["part"][F] == 0,
                lambda: self._laid(self._first(self.ends, micro)),
                lambda: self._laid(read(inbox, at["inbox"][F])),
            )
        ((y, aux_loss), metrics), left = yield from self.split.forward_steps(weights, (x, _data(micro)))
        return y, left, aux_loss, metrics

    def _backward(
        self, run: Any, weights: PyTree, stash: Buffers, inbox: PyTree, turn: PyTree, sums: Sums, at: Any
    ) -> Steps[tuple[PyTree, Any, Sums]]:
        """(dx, what `run` gives beside it: the parameters' gradients, or what is handed to W; sums)."""
        part = at["part"][B]
        micro = self.micro(at["microbatch"][B], part)
        last = self.plan.schedule.num_parts - 1

        def from_loss(sums: Sums) -> tuple[PyTree, Sums]:
            one, (d_ends, dy) = self._last(self.ends, read(turn, at["turn"][B]), micro)
            added = jax.tree.map(jnp.add, sums.replace(grads=None), one)
            grads = sums.grads._replace(ends=_sum(sums.grads.ends, d_ends))
            return self._laid(_solid(dy, self.x)), added.replace(grads=grads)

        def from_next(sums: Sums) -> tuple[PyTree, Sums]:
            return self._laid(read(inbox, at["inbox"][B])), sums

        with jax.named_scope(IF_LAST):
            dy, sums = lax.cond(part == last, from_loss, from_next, sums)
        shared = self.split.shared(weights)
        # Auxiliary losses count equally for each microbatch.
        ones = jnp.ones(self.aux_loss.shape, self.aux_loss.dtype)
        (dx, _), handed = yield from run(shared, stash, ((dy, ones), _zeros(self.aux)))

        def into_first(ends: PyTree) -> PyTree:
            trained = self._trained(self.ends, "ends")
            (d_ends,) = jax.vjp(lambda e: self._first(_with_frozen(e, self.ends), micro), trained)[1](dx)
            return _sum(ends, d_ends)

        with jax.named_scope(IF_FIRST):
            ends = lax.cond(part == 0, into_first, lambda ends: ends, sums.grads.ends)
        return _solid(dx, self.x), handed, sums.replace(grads=sums.grads._replace(ends=ends))


def _scoped(name: str, steps: Steps[Any]) -> Steps[Any]:
    """The same program under a scope, which it leaves where it stops."""
    gave: list[Any] | None = None
    while True:
        try:
            with jax.named_scope(name):
                due = next(steps) if gave is None else steps.send(gave)
        except StopIteration as end:
            return end.value
        gave = yield due


def split_stage(functions: Functions, params: PyTree, x: PyTree, micro: Micro) -> SplitVjp:
    """F, B and W of a part, as the executor runs them: of `(params, (x, the microbatch))`."""
    trained = None if functions.trained is None else functions.trained.parts
    return split_vjp(_stage(functions), params, (x, _data(micro)), trained=trained)


def _with_frozen(trained: PyTree, tree: PyTree) -> PyTree:
    """The tree, with what is trained in its place."""
    return jax.tree.map(lambda x, y: y if x is None else x, trained, tree, is_leaf=lambda x: x is None)


def _stage(functions: Functions) -> Callable[[PyTree, tuple[PyTree, Any]], Any]:
    def stage(params: PyTree, given: tuple[PyTree, Any]) -> Any:
        x, data = given
        micro = _micro(lax.stop_gradient(data))
        with jax.named_scope("stage"):
            y, aux = functions.stage(params, x, micro)
        return (y, aux.loss), lax.stop_gradient(aux.metrics)

    return stage


def layout_of(first: Callable[[PyTree, Micro], PyTree], ends: PyTree, micro: Micro) -> list[PartitionSpec | None]:
    """How a function lays out each leaf of its result where it splits it over axes that are XLA's; else None."""
    closed, _ = flat_jaxpr(lambda ends, data: (first(ends, _micro(data)), ()), ends, _data(micro))
    made = {out: eqn for eqn in closed.jaxpr.eqns for out in eqn.outvars}

    def spec_of(out: Any) -> PartitionSpec | None:
        eqn = None if isinstance(out, core.Literal) else made.get(out)
        if eqn is None or eqn.primitive.name != "sharding_constraint":
            return None
        sharding = eqn.params["sharding"]
        return None if sharding.is_fully_replicated else sharding.spec

    return [spec_of(out) for out in closed.jaxpr.outvars]


def _data(micro: Micro) -> Any:
    """A microbatch with its key as plain numbers."""
    return micro._replace(key=jax.random.key_data(micro.key))


def _micro(data: Any) -> Micro:
    return data._replace(key=jax.random.wrap_key_data(data.key))


def _zeros(like: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _solid(grads: PyTree, like: PyTree) -> PyTree:
    """Gradients as they are sent: zeros where what goes from part to part is of whole numbers and has none."""
    return jax.tree.map(lambda g, x: jnp.zeros(x.shape, x.dtype) if g.dtype == jax.dtypes.float0 else g, grads, like)


def read(buffer: PyTree, slot: jax.Array) -> PyTree:
    """What a slot of the buffer holds."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def put(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """The buffer with a slot replaced."""
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x.astype(b.dtype), slot, 0), buffer, value)


def write(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """The buffer with a slot replaced; as it was where the slot is −1."""
    kept = read(buffer, slot)
    return put(buffer, slot, jax.tree.map(lambda old, x: jnp.where(slot >= 0, x.astype(old.dtype), old), kept, value))


def _sum(totals: PyTree, grads: PyTree, at: jax.Array | None = None) -> PyTree:
    """Gradients added to their sums, or at a place of these; what has none adds nothing."""

    def add(total: jax.Array, grad: Any) -> jax.Array:
        if grad.dtype == jax.dtypes.float0:
            return total
        if at is None:
            return total + lax.expand_dims(grad.astype(total.dtype), range(total.ndim - grad.ndim))
        return total.at[at].add(grad.astype(total.dtype))

    return jax.tree.map(add, totals, grads)
