"""Partial evaluation of jaxprs: a known and an unknown half."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from meshpar.sharding.types import PyTree

Variable = Any
"""A jaxpr variable."""
Value = Any
"""An array, a tracer, a `Stacked`, or None for an unused value."""

CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
    "remat": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
}  # fmt: skip
"""Primitives that only call a jaxpr, and the name of the parameter with that jaxpr."""
EXPENSIVE = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond", "shard_map", "pure_callback"}
)
"""Primitives that are never computed twice to avoid saving their results."""


# ---- Stacked values --------------------------------------------------------------------------------------------------


class Stacked(abc.ABC):
    """An array `[steps, ...]` whose rows are read or written one by one, so that the array itself is not needed."""

    @abc.abstractmethod
    def row(self, index: int) -> jax.Array:
        """Return a row."""

    @abc.abstractmethod
    def array(self) -> jax.Array:
        """Return all rows as one array."""


@dataclasses.dataclass(frozen=True, eq=False)
class StackedRows(Stacked):
    """Results of the steps of an unrolled loop."""

    rows: tuple[jax.Array, ...]

    def row(self, index: int) -> jax.Array:
        return self.rows[index]

    def array(self) -> jax.Array:
        return jnp.stack(self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class View(Stacked):
    """The slot `buffer[index]` of a buffer `[slot, ...]`. A row is read from the buffer by a single slice."""

    buffer: jax.Array
    index: jax.Array | int

    def row(self, index: int) -> jax.Array:
        shape = self.buffer.shape[2:]
        return lax.dynamic_slice(self.buffer, start(self.index, index, *[0] * len(shape)), (1, 1, *shape)).reshape(
            shape
        )

    def array(self) -> jax.Array:
        return lax.dynamic_index_in_dim(self.buffer, self.index, keepdims=False)


def start(*indices: jax.Array | int) -> tuple[jax.Array, ...]:
    """Return indices of the same dtype, as slices require."""
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)


def view(buffers: PyTree, slot: jax.Array | int) -> PyTree:
    """Return a `View` of each buffer."""
    return jax.tree.map(lambda buffer: View(buffer, slot), buffers)


def arrays(tree: PyTree) -> PyTree:
    """Return the tree with an array in place of each `Stacked`."""
    return jax.tree.map(lambda x: x.array() if isinstance(x, Stacked) else x, tree)


# ---- Tracing and evaluation ------------------------------------------------------------------------------------------


def flat_jaxpr(fn: Callable[..., Any], *args: PyTree) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of `fn(*args)` with all calls inlined, and the types of the results.

    The types are avals, because `ShapeDtypeStruct`s lose the varying axes of values inside a `shard_map`.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    types = jax.tree.unflatten(jax.tree.structure(shapes), [v.aval for v in closed.jaxpr.outvars])
    return jax.make_jaxpr(lambda *leaves: _run_flat(closed, leaves))(*jax.tree.leaves(args)), types


def _run_flat(closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
    """Evaluate a jaxpr with inlined calls, also in loop bodies."""
    env = _Env(closed, args)
    for eqn in closed.jaxpr.eqns:
        inner = _callee(eqn)
        if inner is not None:
            with _as_traced(eqn):
                env.write(eqn.outvars, _run_flat(inner, env.read(eqn.invars)))
        elif eqn.primitive.name == "scan":
            loop = _Loop(eqn)
            consts, carry, xs = loop.split(env.read(eqn.invars))

            def body(carry: list[Value], xs: list[Value], loop: _Loop = loop, consts: list[Value] = consts) -> Any:
                out = _run_flat(loop.body, [*consts, *carry, *xs])
                return out[: loop.num_carry], out[loop.num_carry :]

            env.write(eqn.outvars, loop.run(body, carry, xs))
        else:
            env.write(eqn.outvars, _evaluate(eqn, env.read(eqn.invars)))
    return env.read(closed.jaxpr.outvars)


def _callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls, or None if the equation is not a plain call."""
    name = CALLS.get(eqn.primitive.name)
    inner = eqn.params.get(name) if name else None
    if inner is None:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in shardings):
        return None
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _evaluate(eqn: JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
    """Evaluate an equation with its original source line and named scopes."""
    with _as_traced(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*arrays(list(values)), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _as_traced(eqn: JaxprEqn, names: Any = None) -> Any:
    """Attribute new equations to the source line of `eqn`, and to its scopes inside the current scopes."""
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names or _scopes(eqn))


def _scopes(eqn: JaxprEqn) -> Any:
    return source_info_util.current_name_stack() + eqn.source_info.name_stack


class _Env:
    """Values of variables during evaluation."""

    def __init__(self, closed: ClosedJaxpr, args: Sequence[Value]) -> None:
        self.values: dict[Variable, Value] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(self, variables: Iterable[Variable]) -> list[Value]:
        return [v.val if isinstance(v, Literal) else self.values.get(v) for v in variables]

    def results(self, variables: Sequence[Variable]) -> list[Value]:
        """Return the outputs of a jaxpr, with literals converted to arrays."""
        return [
            jax.numpy.asarray(x, jax.numpy.result_type(v.aval)) if isinstance(v, Literal) else x
            for v, x in zip(variables, self.read(variables), strict=True)
        ]

    def write(self, variables: Iterable[Variable], values: Iterable[Value]) -> None:
        self.values.update(zip(variables, values, strict=True))


class _Loop:
    """A `lax.scan` equation with its body and the numbers of constants and carried values."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.eqn = eqn
        inner = eqn.params["jaxpr"]
        self.body: ClosedJaxpr = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
        self.length, self.reverse = int(eqn.params["length"]), bool(eqn.params["reverse"])
        self.is_unrolled = 0 < self.length <= int(eqn.params["unroll"])
        # Stacked values have an additional dim outside the body. Equation parameters differ between jax versions.
        self.num_carry = _lead(eqn.outvars, self.body.jaxpr.outvars)
        self.num_consts = _lead(eqn.invars, self.body.jaxpr.invars) - self.num_carry

    def split(self, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split inputs into constants, carried values and stacked values."""
        end = self.num_consts + self.num_carry
        return list(items[: self.num_consts]), list(items[self.num_consts : end]), list(items[end:])

    def run(self, body: Callable[..., Any], carry: list[Value], xs: Any, names: Any = None) -> list[Value]:
        """Run a different body over the same steps, and return the final carry and the stacked outputs."""
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with _as_traced(self.eqn, names):
            carry, ys = lax.scan(body, carry, arrays(xs), **options)
        return [*carry, *ys]

    def run_unrolled(self, body: Callable[..., Any], carry: list[Value], xs: Any, names: Any) -> list[Value]:
        """Run the steps without a loop. Stacked inputs are read row by row, and stacked outputs are `StackedRows`."""
        ys: list[Any] = [None] * self.length
        for step in reversed(range(self.length)) if self.reverse else range(self.length):
            with _as_traced(self.eqn, names):
                rows = jax.tree.map(lambda x, i=step: x.row(i) if isinstance(x, Stacked) else x[i], xs)
                if self.reverse:
                    # Otherwise XLA may recompute the forward pass of many layers at once.
                    carry, rows = lax.optimization_barrier((carry, rows))
                carry, ys[step] = body(carry, rows)
        return [*carry, *map(StackedRows, zip(*ys, strict=True))]


class PendingLoop(NamedTuple):
    """The next loop of a paused program."""

    loop: _Loop
    body: Callable[..., Any]
    carry: list[Value]
    xs: PyTree
    names: Any
    """Named scopes of the loop."""


Result = TypeVar("Result")
Steps: TypeAlias = Generator[PendingLoop, list[Value], Result]
"""A program as a generator: it yields each `PendingLoop`, and resumes with the results of the loop.

No jax context may be active at a `yield`, because other programs run there."""


def run(steps: Steps[Result]) -> Result:
    """Run a single program to its end."""
    return run_interleaved(steps)[0]


def run_interleaved(*programs: Steps[Any]) -> list[Any]:
    """Run independent programs, and merge loops of equal length. A merged loop runs a step of each program.

    The compiler can then overlap communication in the first program with matmuls in the second.
    """
    results: list[Any] = [None] * len(programs)
    pending: dict[int, PendingLoop] = {}

    def advance(index: int, outputs: list[Value] | None) -> None:
        pending.pop(index, None)
        try:
            pending[index] = next(programs[index]) if outputs is None else programs[index].send(outputs)
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(programs)):
        advance(index, None)
    while pending:
        # Shortest first, so that the main stacks of layers meet after different leading or trailing layers.
        shortest = min(p.loop.length for p in pending.values())
        selected = [index for index, p in pending.items() if p.loop.length == shortest]
        for index, outputs in zip(selected, _run_loops([pending[index] for index in selected]), strict=True):
            advance(index, outputs)
    return results


def _run_loops(loops: Sequence[PendingLoop]) -> list[list[Value]]:
    """Run loops of equal length as a single loop, and return the results of each. Unrolled loops need no loop."""
    if len(loops) == 1 or any(p.loop.is_unrolled for p in loops):
        runs = [(p, p.loop.run_unrolled if p.loop.is_unrolled else p.loop.run) for p in loops]
        return [run(p.body, p.carry, p.xs, p.names) for p, run in runs]
    length, outside = loops[0].loop.length, source_info_util.current_name_stack()
    loops = [p._replace(xs=arrays(p.xs)) for p in loops]

    def run_step(p: PendingLoop, carry: list[Value], index: Value) -> tuple[list[Value], list[Value]]:
        xs = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), p.xs)
        with _as_traced(p.loop.eqn, type(outside)(p.names.stack[len(outside.stack) :])):
            return p.body(carry, xs)

    def zeros(p: PendingLoop) -> list[Value]:
        zero = jnp.zeros((), jnp.int32)
        ys = jax.eval_shape(lambda: run_step(p, p.carry, zero)[1])
        return [jnp.zeros((length, *y.shape), y.dtype) for y in ys]

    def body(state: list[tuple[list[Value], list[Value]]], step: Value) -> Any:
        out = []
        for p, (carry, ys) in zip(loops, state, strict=True):
            index = length - 1 - step if p.loop.reverse else step
            carry, updates = run_step(p, carry, index)
            ys = [lax.dynamic_update_index_in_dim(y, new, index, 0) for y, new in zip(ys, updates, strict=True)]
            out.append((carry, ys))
        return out, None

    unroll = max(p.loop.eqn.params["unroll"] for p in loops)
    state, _ = lax.scan(body, [(p.carry, zeros(p)) for p in loops], jnp.arange(length, dtype=jnp.int32), unroll=unroll)
    return [[*carry, *ys] for carry, ys in state]


def _lead(outside: Sequence[Variable], inside: Sequence[Variable]) -> int:
    """Return how many leading variables of a loop are not stacked: they have as many dims outside as in the body."""
    same = [len(o.aval.shape) == len(i.aval.shape) for o, i in zip(outside, inside, strict=True)]
    return same.index(False) if False in same else len(same)


# ---- Dependencies ----------------------------------------------------------------------------------------------------


def depends(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of a flat jaxpr depend on the marked inputs."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.eqns:
        flags = _marks(eqn.invars, marked)
        out = _depends_loop(_Loop(eqn), flags) if eqn.primitive.name == "scan" else [any(flags)] * len(eqn.outvars)
        marked |= _selected(eqn.outvars, out)
    return _marks(jaxpr.outvars, marked)


def _depends_loop(loop: _Loop, flags: list[bool]) -> list[bool]:
    """Return `depends` of a loop: iterate until the marks of the carry do not change."""
    while True:
        out = depends(loop.body.jaxpr, flags)
        consts, carry, xs = loop.split(flags)
        more = [a or b for a, b in zip(carry, out, strict=False)]
        if more == carry:
            return [*carry, *out[loop.num_carry :]]
        flags = [*consts, *more, *xs]


def _variables(atoms: Iterable[Any]) -> list[Variable]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _marks(atoms: Sequence[Any], marked: set[Variable]) -> list[bool]:
    return [not isinstance(atom, Literal) and atom in marked for atom in atoms]


def _selected(atoms: Sequence[Any], mask: Sequence[bool]) -> set[Variable]:
    return {atom for atom, keep in zip(atoms, mask, strict=True) if keep and not isinstance(atom, Literal)}


# ---- Partial evaluation ----------------------------------------------------------------------------------------------


class PartialEval:
    """A flat jaxpr in a known and an unknown half, as in jax's partial evaluation.

    The known half runs first. It contains only the equations that its outputs depend on, and saves residuals: values
    that the unknown half reads.

    Args:
      closed: the jaxpr, from `flat_jaxpr`.
      known: mask of the outputs of the known half.
      unknown: mask of the outputs of the unknown half. Default: none.
      known_inputs: mask of the inputs that only the known half can read.
      shared: mask of the inputs that are the same in all calls. Values that depend only on them, and are cheap, are
        recomputed in the unknown half instead of saved.
      effects: whether the known half includes equations with side effects, such as `jax.debug.print`.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        *,
        known: Sequence[bool],
        unknown: Sequence[bool] | None = None,
        known_inputs: Sequence[bool] | None = None,
        shared: Sequence[bool] | None = None,
        effects: bool = False,
    ) -> None:
        jaxpr = closed.jaxpr
        none = [False] * len(jaxpr.invars)
        self.closed = closed
        self._effects = effects
        self.loops: dict[int, _PartialLoop] = {}
        self._in_known: set[int] = set()
        self._in_unknown: set[int] = set()
        self._known = _selected(jaxpr.invars, known_inputs or none)
        self._shared = self._recomputable(shared or none)
        read_by_known = self._plan_known(_selected(jaxpr.outvars, known))
        self.residuals: list[Variable] = []
        """Variables that the known half saves for the unknown half, excluding variables inside loops."""
        read_by_unknown = self._plan_unknown(_selected(jaxpr.outvars, unknown or [False] * len(jaxpr.outvars)))
        self.known_reads = _marks(jaxpr.invars, read_by_known)
        """Mask of the inputs that the known half reads."""
        self.unknown_reads = _marks(jaxpr.invars, read_by_unknown)
        """Mask of the inputs that the unknown half reads."""
        self.reads = [a or b for a, b in zip(self.known_reads, self.unknown_reads, strict=True)]
        """Mask of the inputs that either half reads."""

    # -- Planning -----------------------------------------------------------------------------------------------------

    def _recomputable(self, shared: Sequence[bool]) -> set[Variable]:
        """Return the variables that are cheap to compute from shared inputs and constants."""
        jaxpr = self.closed.jaxpr
        recomputable = _selected(jaxpr.invars, shared) | set(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            is_cheap = eqn.primitive.name not in EXPENSIVE and not eqn.effects
            if is_cheap and all(v in recomputable for v in _variables(eqn.invars)):
                recomputable.update(eqn.outvars)
        return recomputable

    def _plan_known(self, needed: set[Variable]) -> set[Variable]:
        for index, eqn in reversed(list(enumerate(self.closed.jaxpr.eqns))):
            wanted = [v in needed for v in eqn.outvars]
            if not any(wanted) and not (self._effects and eqn.effects):
                continue
            self._in_known.add(index)
            if eqn.primitive.name == "scan":
                self.loops[index] = loop = _PartialLoop(eqn, self._shared, wanted, effects=self._effects)
                needed |= _selected(eqn.invars, loop.inputs(loop.partial_eval.known_reads, loop.known))
                self._known |= _selected(eqn.outvars, loop.known)
            else:
                needed.update(_variables(eqn.invars))
                self._known.update(eqn.outvars)
        return needed

    def _plan_unknown(self, needed: set[Variable]) -> set[Variable]:
        residuals: set[Variable] = set()
        # Variables of the known half that the unknown half cannot recompute, so that they are residuals.
        known = self._known - self._shared
        for index, eqn in reversed(list(enumerate(self.closed.jaxpr.eqns))):
            residuals |= needed & known
            needed -= known
            wanted = [v in needed for v in eqn.outvars]
            if not any(wanted):
                continue
            self._in_unknown.add(index)
            if eqn.primitive.name == "scan":
                loop = self.loops.setdefault(index, _PartialLoop(eqn, self._shared, [False] * len(eqn.outvars)))
                loop.finish(wanted)
                needed |= _selected(eqn.invars, loop.inputs(loop.partial_eval.unknown_reads, loop.unknown))
            else:
                needed.update(_variables(eqn.invars))
        residuals |= needed & known
        variables = [*self.closed.jaxpr.invars, *(v for eqn in self.closed.jaxpr.eqns for v in eqn.outvars)]
        self.residuals = [v for v in variables if v in residuals]
        return needed - known

    # -- Running ------------------------------------------------------------------------------------------------------

    def run_known(self, args: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Run the known half, and return all outputs (None if the unknown half computes them) and the residuals."""
        return arrays(run(self.known_steps(args)))

    def known_steps(self, args: Sequence[Value]) -> Steps[tuple[list[Value], list[Value]]]:
        """Return `run_known` as steps."""
        env = _Env(self.closed, args)
        residuals: list[Value] = []
        for index, eqn in enumerate(self.closed.jaxpr.eqns):
            if index not in self._in_known:
                continue
            if index in self.loops:
                out, stacked = yield from self.loops[index].known_steps(env.read(eqn.invars))
                residuals += stacked
                env.write(eqn.outvars, out)
            else:
                env.write(eqn.outvars, _evaluate(eqn, env.read(eqn.invars)))
        return env.results(self.closed.jaxpr.outvars), [*env.read(self.residuals), *residuals]

    def unknown_steps(self, args: Sequence[Value], residuals: Sequence[Value]) -> Steps[list[Value]]:
        """Run the unknown half with the residuals, and return all outputs (None if the known half computes them)."""
        env = _Env(self.closed, args)
        env.write(self.residuals, residuals[: len(self.residuals)])
        remaining = list(residuals[len(self.residuals) :])
        for index, eqn in enumerate(self.closed.jaxpr.eqns):
            loop = self.loops.get(index)
            count = loop.num_residuals if loop is not None and index in self._in_known else 0
            stacked, remaining = remaining[:count], remaining[count:]
            if index not in self._in_unknown:
                continue
            if loop is not None:
                old = env.read(eqn.outvars)
                out = yield from loop.unknown_steps(env.read(eqn.invars), stacked)
                env.write(eqn.outvars, [y if x is None else x for x, y in zip(old, out, strict=True)])
            else:
                env.write(eqn.outvars, _evaluate(eqn, env.read(eqn.invars)))
        return env.results(self.closed.jaxpr.outvars)


class _PartialLoop:
    """A loop whose body is partially evaluated: the known half runs over all steps, then the unknown half does."""

    def __init__(self, eqn: JaxprEqn, shared: set[Variable], wanted: Sequence[bool], *, effects: bool = False) -> None:
        self.loop = _Loop(eqn)
        self.effects = effects
        self.shared = [isinstance(v, Literal) or v in shared for v in eqn.invars]
        for index in range(self.loop.num_consts, self.loop.num_consts + self.loop.num_carry):
            self.shared[index] = False  # Carried values differ between steps.
        self.known = list(wanted)
        """Mask of the outputs of the known half, including the carry that they depend on."""
        self.unknown = [False] * len(wanted)
        # Extend the carry of the known half until it includes all carried values that its body reads.
        while True:
            self.partial_eval = PartialEval(self.loop.body, known=self.known, shared=self.shared, effects=effects)
            carried = self.loop.split(self.partial_eval.known_reads)[1]
            if not any(need and not is_known for need, is_known in zip(carried, self.known, strict=False)):
                break
            self.known[: self.loop.num_carry] = [a or b for a, b in zip(carried, self.known, strict=False)]

    def finish(self, wanted: Sequence[bool]) -> None:
        """Plan the unknown half. `wanted` is the mask of the outputs that it computes."""
        self.unknown = list(wanted)
        n = self.loop.num_carry
        known_inputs = [False] * self.loop.num_consts + self.known[:n]
        known_inputs += [False] * (len(self.shared) - len(known_inputs))
        while True:
            self.partial_eval = PartialEval(
                self.loop.body,
                known=self.known,
                unknown=self.unknown,
                known_inputs=known_inputs,
                shared=self.shared,
                effects=self.effects,
            )
            carried = self.loop.split(self.partial_eval.unknown_reads)[1]
            more = [need and not is_known for need, is_known in zip(carried, self.known, strict=False)]
            if not any(need and not is_unknown for need, is_unknown in zip(more, self.unknown, strict=False)):
                break
            self.unknown[:n] = [a or b for a, b in zip(more, self.unknown, strict=False)]

    @property
    def num_residuals(self) -> int:
        """Number of stacked values that the known half saves for the unknown half."""
        return len(self.partial_eval.residuals) + sum(loop.num_residuals for loop in self.partial_eval.loops.values())

    def inputs(self, needs: Sequence[bool], outputs: Sequence[bool]) -> list[bool]:
        """Return the mask of the loop inputs that a half reads, given the masks of its body inputs and outputs."""
        consts, carry, xs = self.loop.split(needs)
        return [*consts, *(a or b for a, b in zip(carry, outputs, strict=False)), *xs]

    def known_steps(self, args: Sequence[Value]) -> Steps[tuple[list[Value], list[Value]]]:
        return (yield from self._half(args, self.known, self.partial_eval.known_reads, self.partial_eval.run_known, []))

    def unknown_steps(self, args: Sequence[Value], residuals: Sequence[Value]) -> Steps[list[Value]]:
        def body(full: list[Value], *stacked: Value) -> tuple[list[Value], list[Value]]:
            return arrays(run(self.partial_eval.unknown_steps(full, stacked))), []

        out, _ = yield from self._half(args, self.unknown, self.partial_eval.unknown_reads, body, residuals)
        return out

    def _half(
        self, args: Sequence[Value], outputs: Sequence[bool], needs: Sequence[bool],
        body: Callable[..., tuple[list[Value], list[Value]]], residuals: Sequence[Value],
    ) -> Steps[tuple[list[Value], list[Value]]]:  # fmt: skip
        """Run a half over all steps, with only the carried and stacked values that it uses."""
        count = sum(outputs[: self.loop.num_carry])
        consts, carry, xs = self.loop.split(args)
        consts, carry = arrays(consts), arrays(carry)
        reads = self.loop.split(needs)[2]
        used_carry = [value for value, keep in zip(carry, outputs, strict=False) if keep]
        used_xs = [value for value, use in zip(xs, reads, strict=True) if use]

        def step(carried: list[Value], stacked: tuple[list[Value], list[Value]]) -> Any:
            xs, residual_xs = stacked
            body_args = [*consts, *_spread(carried, outputs[: self.loop.num_carry]), *_spread(xs, reads)]
            out, residual_ys = body(body_args, *residual_xs)
            used = [value for value, keep in zip(out, outputs, strict=True) if keep]
            return used[:count], [*used[count:], *residual_ys]

        out = yield PendingLoop(self.loop, step, used_carry, (used_xs, list(residuals)), _scopes(self.loop.eqn))
        num_outputs = sum(outputs)
        return _spread(out[:num_outputs], outputs), out[num_outputs:]


def _spread(items: Sequence[Value], mask: Sequence[bool]) -> list[Value]:
    """Place the items where the mask is True, and None elsewhere."""
    remaining = iter(items)
    return [next(remaining) if keep else None for keep in mask]
