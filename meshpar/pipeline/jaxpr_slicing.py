"""Traced programs cut in two by what their outputs need, loops inside their bodies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

# Names in the annotations: a variable is an input or a result of an equation; jaxpr is jax's word for a traced program.
Variable = Any
Value = Any

CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
    "remat": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
}  # fmt: skip
"""Primitives that only call a program, and under which name they hold it."""
DEAR = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond", "shard_map", "pure_callback"}
)
"""What is never computed a second time to spare a message."""


# ---- Tracing, and running what was traced ----------------------------------------------------------------------------


def flat_jaxpr(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of `fn(*args)` with every call in it opened up, and the types of its results.

    Types, not `ShapeDtypeStruct`s: those lose the mesh over whose axes a value varies inside a `shard_map`.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    types = jax.tree.unflatten(jax.tree.structure(shapes), [v.aval for v in closed.jaxpr.outvars])
    return jax.make_jaxpr(lambda *leaves: _run_flat(closed, leaves))(*jax.tree.leaves(args)), types


def _run_flat(closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
    """Run a program, calls replaced by what they call, in loops too."""
    env = _Env(closed, args)
    for eqn in closed.jaxpr.eqns:
        inner = _called(eqn)
        if inner is not None:
            with _as_traced(eqn):
                env.write(eqn.outvars, _run_flat(inner, env.read(eqn.invars)))
        elif eqn.primitive.name == "scan":
            loop = _Loop(eqn)
            consts, carry, xs = loop.parted(env.read(eqn.invars))

            def body(carry: list[Value], xs: list[Value], loop: _Loop = loop, consts: list[Value] = consts) -> Any:
                out = _run_flat(loop.body, [*consts, *carry, *xs])
                return out[: loop.num_carry], out[loop.num_carry :]

            env.write(eqn.outvars, loop.run(body, carry, xs))
        else:
            env.write(eqn.outvars, _evaluated(eqn, env.read(eqn.invars)))
    return env.read(closed.jaxpr.outvars)


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation calls, if it does nothing else."""
    name = CALLS.get(eqn.primitive.name)
    inner = eqn.params.get(name) if name else None
    if inner is None:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(one).__name__ != "UnspecifiedValue" for one in shardings):
        return None
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _evaluated(eqn: JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
    """One equation, as of the line and under the names it was traced at."""
    with _as_traced(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _as_traced(eqn: JaxprEqn, names: Any = None) -> Any:
    """What is bound inside comes from the line that made an equation, and from its scopes inside of ours."""
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names or _names(eqn))


def _names(eqn: JaxprEqn) -> Any:
    return source_info_util.current_name_stack() + eqn.source_info.name_stack


class _Env:
    """Values of variables while a program runs."""

    def __init__(self, closed: ClosedJaxpr, args: Sequence[Value]) -> None:
        self.values: dict[Variable, Value] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(self, variables: Iterable[Variable]) -> list[Value]:
        return [v.val if isinstance(v, Literal) else self.values.get(v) for v in variables]

    def results(self, variables: Sequence[Variable]) -> list[Value]:
        """What a program gives: constants among them as arrays."""
        return [
            jax.numpy.asarray(x, jax.numpy.result_type(v.aval)) if isinstance(v, Literal) else x
            for v, x in zip(variables, self.read(variables), strict=True)
        ]

    def write(self, variables: Iterable[Variable], values: Iterable[Value]) -> None:
        self.values.update(zip(variables, values, strict=True))


class _Loop:
    """A `lax.scan` equation: its body, and which of its inputs and outputs are constant, carried or stacked."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.eqn = eqn
        inner = eqn.params["jaxpr"]
        self.body: ClosedJaxpr = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
        # Stacked ones have one dim more outside than inside; how the equation itself counts them differs by version.
        self.num_carry = _lead(eqn.outvars, self.body.jaxpr.outvars)
        self.num_consts = _lead(eqn.invars, self.body.jaxpr.invars) - self.num_carry

    def parted(self, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Inputs as constants, carried, stacked."""
        at = self.num_consts + self.num_carry
        return list(items[: self.num_consts]), list(items[self.num_consts : at]), list(items[at:])

    def run(self, body: Callable[..., Any], carry: list[Value], xs: Any, names: Any = None) -> list[Value]:
        """Another body over the same steps; gives what is carried, then what is stacked."""
        params = self.eqn.params
        with _as_traced(self.eqn, names):
            carry, ys = lax.scan(
                body, carry, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
            )
        return [*carry, *ys]

    def due(self, body: Callable[..., Any], carry: list[Value], xs: Any) -> Due:
        """The same, to be run by whoever drives the program."""
        return Due(self, body, carry, xs, _names(self.eqn))


class Due(NamedTuple):
    """A loop that a program has come to."""

    loop: _Loop
    body: Callable[..., Any]
    carry: list[Value]
    xs: Any
    names: Any
    """Scopes it stands in."""

    @property
    def length(self) -> int:
        return int(self.loop.eqn.params["length"])

    @property
    def reverse(self) -> bool:
        return bool(self.loop.eqn.params["reverse"])


Result = TypeVar("Result")
Steps: TypeAlias = Generator[Due, list[Value], Result]
"""A program that stops at each of its loops, and goes on with what the loop gave. It is in no context of jax's where
it stops, for others run in between."""


def alone(steps: Steps[Result]) -> Result:
    """Run a program to its end."""
    return together(steps)[0]


def together(*programs: Steps[Any]) -> list[Any]:
    """Run programs that do not depend on each other; loops of as many steps become one, which runs a step of each.

    In one loop the compiler can schedule a message of one program behind the matmuls of another.
    """
    results: list[Any] = [None] * len(programs)
    due: dict[int, Due] = {}

    def advance(at: int, gave: list[Value] | None) -> None:
        due.pop(at, None)
        try:
            due[at] = next(programs[at]) if gave is None else programs[at].send(gave)
        except StopIteration as end:
            results[at] = end.value

    for at in range(len(programs)):
        advance(at, None)
    while due:
        # The shortest first: leading and trailing layers of another kind stand before or behind those that are many.
        shortest = min(one.length for one in due.values())
        now = [at for at, one in due.items() if one.length == shortest]
        for at, gave in zip(now, _run_loops([due[at] for at in now]), strict=True):
            advance(at, gave)
    return results


def _run_loops(loops: Sequence[Due]) -> list[list[Value]]:
    """What each of some loops of as many steps gives, run as one."""
    if len(loops) == 1:
        (one,) = loops
        return [one.loop.run(one.body, one.carry, one.xs, one.names)]
    length, outside = loops[0].length, source_info_util.current_name_stack()

    def step_of(one: Due, carry: list[Value], xs: Any) -> tuple[list[Value], list[Value]]:
        with _as_traced(one.loop.eqn, type(outside)(one.names.stack[len(outside.stack) :])):
            return one.body(carry, xs)

    def xs_at(one: Due, at: Value) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at, keepdims=False), one.xs)

    def room(one: Due) -> list[Value]:
        zero = jnp.zeros((), jnp.int32)
        made = jax.eval_shape(lambda: step_of(one, one.carry, xs_at(one, zero))[1])
        return [jnp.zeros((length, *y.shape), y.dtype) for y in made]

    def body(state: list[tuple[list[Value], list[Value]]], step: Value) -> Any:
        out = []
        for one, (carry, ys) in zip(loops, state, strict=True):
            at = length - 1 - step if one.reverse else step
            carry, more = step_of(one, carry, xs_at(one, at))
            ys = [lax.dynamic_update_index_in_dim(y, new, at, 0) for y, new in zip(ys, more, strict=True)]
            out.append((carry, ys))
        return out, None

    state, _ = lax.scan(body, [(one.carry, room(one)) for one in loops], jnp.arange(length, dtype=jnp.int32))
    return [[*carry, *ys] for carry, ys in state]


def _lead(outside: Sequence[Variable], inside: Sequence[Variable]) -> int:
    """How many variables at the front have the same number of dims on both sides."""
    same = [len(o.aval.shape) == len(i.aval.shape) for o, i in zip(outside, inside, strict=True)]
    return same.index(False) if False in same else len(same)


# ---- What depends on what --------------------------------------------------------------------------------------------


def depends(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs of a flat program depend on the inputs that are marked."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.eqns:
        flags = _marks(eqn.invars, marked)
        out = _carried(_Loop(eqn), flags) if eqn.primitive.name == "scan" else [any(flags)] * len(eqn.outvars)
        marked |= _kept(eqn.outvars, out)
    return _marks(jaxpr.outvars, marked)


def _carried(loop: _Loop, flags: list[bool]) -> list[bool]:
    """`depends` for a loop: what one step marks of the carry is marked in the next."""
    while True:
        out = depends(loop.body.jaxpr, flags)
        consts, carry, xs = loop.parted(flags)
        more = [a or b for a, b in zip(carry, out, strict=False)]
        if more == carry:
            return [*carry, *out[loop.num_carry :]]
        flags = [*consts, *more, *xs]


def _variables(atoms: Iterable[Any]) -> list[Variable]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _marks(atoms: Sequence[Any], marked: set[Variable]) -> list[bool]:
    return [not isinstance(atom, Literal) and atom in marked for atom in atoms]


def _kept(atoms: Sequence[Any], mask: Sequence[bool]) -> set[Variable]:
    """The variables where the mask says so."""
    return {atom for atom, keep in zip(atoms, mask, strict=True) if keep and not isinstance(atom, Literal)}


# ---- The cut ---------------------------------------------------------------------------------------------------------


class Cut:
    """A flat program in two halves that run one after the other: the first alone works out what its outputs need.

    Args:
      closed: the program; from `flat_jaxpr`.
      first: which of its outputs the first half gives.
      second: which the second half gives; default: none.
      only_first: inputs that the second half will not be given.
      shared: inputs that do not change from call to call: what cheaply follows from them alone is worked out again in
        the second half, where the first would have to hand it on.
      effects: whether the first half also does what has an effect and no result, like `jax.debug.print`.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        *,
        first: Sequence[bool],
        second: Sequence[bool] | None = None,
        only_first: Sequence[bool] | None = None,
        shared: Sequence[bool] | None = None,
        effects: bool = False,
    ) -> None:
        jaxpr = closed.jaxpr
        nothing = [False] * len(jaxpr.invars)
        self.closed = closed
        self._effects = effects
        self.loops: dict[int, _CutLoop] = {}
        self._in_first: set[int] = set()
        self._in_second: set[int] = set()
        self._from_first = _kept(jaxpr.invars, only_first or nothing)
        self._shared = self._follows(shared or nothing)
        needed_first = self._first_half(_kept(jaxpr.outvars, first))
        self.crossing: list[Variable] = []
        """Variables that the first half hands to the second, beside those of loops."""
        needed_second = self._second_half(_kept(jaxpr.outvars, second or [False] * len(jaxpr.outvars)))
        self.first_needs = _marks(jaxpr.invars, needed_first)
        """Which inputs the first half reads."""
        self.second_needs = _marks(jaxpr.invars, needed_second)
        """Which inputs the second half reads."""
        self.needs = [a or b for a, b in zip(self.first_needs, self.second_needs, strict=True)]
        """Which inputs either half reads."""

    # -- Planning -----------------------------------------------------------------------------------------------------

    def _follows(self, shared: Sequence[bool]) -> set[Variable]:
        """Variables that cheaply follow from shared inputs and constants alone."""
        jaxpr = self.closed.jaxpr
        found = _kept(jaxpr.invars, shared) | set(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name not in DEAR and not eqn.effects and all(v in found for v in _variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _first_half(self, needed: set[Variable]) -> set[Variable]:
        for at, eqn in reversed(list(enumerate(self.closed.jaxpr.eqns))):
            wanted = [v in needed for v in eqn.outvars]
            if not any(wanted) and not (self._effects and eqn.effects):
                continue
            self._in_first.add(at)
            if eqn.primitive.name == "scan":
                self.loops[at] = loop = _CutLoop(eqn, self._shared, wanted, effects=self._effects)
                needed |= _kept(eqn.invars, loop.inputs(loop.cut.first_needs, loop.first))
                self._from_first |= _kept(eqn.outvars, loop.first)
            else:
                needed.update(_variables(eqn.invars))
                self._from_first.update(eqn.outvars)
        return needed

    def _second_half(self, needed: set[Variable]) -> set[Variable]:
        crossing: set[Variable] = set()
        has = self._from_first - self._shared
        """What the first half has and the second cannot easily have: it is handed on."""
        for at, eqn in reversed(list(enumerate(self.closed.jaxpr.eqns))):
            crossing |= needed & has
            needed -= has
            wanted = [v in needed for v in eqn.outvars]
            if not any(wanted):
                continue
            self._in_second.add(at)
            if eqn.primitive.name == "scan":
                loop = self.loops.setdefault(at, _CutLoop(eqn, self._shared, [False] * len(eqn.outvars)))
                loop.finish(wanted)
                needed |= _kept(eqn.invars, loop.inputs(loop.cut.second_needs, loop.second))
            else:
                needed.update(_variables(eqn.invars))
        crossing |= needed & has
        made = [*self.closed.jaxpr.invars, *(v for eqn in self.closed.jaxpr.eqns for v in eqn.outvars)]
        self.crossing = [v for v in made if v in crossing]
        return needed - has

    # -- Running ------------------------------------------------------------------------------------------------------

    def run_first(self, args: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """The first half: all outputs (those not its own are None), and what the second half is to be given."""
        return alone(self.first(args))

    def run_second(self, args: Sequence[Value], handed: Sequence[Value]) -> list[Value]:
        """The second half: all outputs, those not its own are None."""
        return alone(self.second(args, handed))

    def first(self, args: Sequence[Value]) -> Steps[tuple[list[Value], list[Value]]]:
        """`run_first`, a loop at a time."""
        env = _Env(self.closed, args)
        handed: list[Value] = []
        for at, eqn in enumerate(self.closed.jaxpr.eqns):
            if at not in self._in_first:
                continue
            if at in self.loops:
                out, stacked = yield from self.loops[at].first_half(env.read(eqn.invars))
                handed += stacked
                env.write(eqn.outvars, out)
            else:
                env.write(eqn.outvars, _evaluated(eqn, env.read(eqn.invars)))
        return env.results(self.closed.jaxpr.outvars), [*env.read(self.crossing), *handed]

    def second(self, args: Sequence[Value], handed: Sequence[Value]) -> Steps[list[Value]]:
        """`run_second`, a loop at a time."""
        env = _Env(self.closed, args)
        env.write(self.crossing, handed[: len(self.crossing)])
        rest = list(handed[len(self.crossing) :])
        for at, eqn in enumerate(self.closed.jaxpr.eqns):
            loop = self.loops.get(at)
            count = loop.num_handed if loop is not None and at in self._in_first else 0
            stacked, rest = rest[:count], rest[count:]
            if at not in self._in_second:
                continue
            if loop is not None:
                known = env.read(eqn.outvars)
                out = yield from loop.second_half(env.read(eqn.invars), stacked)
                env.write(eqn.outvars, [new if had is None else had for new, had in zip(out, known, strict=True)])
            else:
                env.write(eqn.outvars, _evaluated(eqn, env.read(eqn.invars)))
        return env.results(self.closed.jaxpr.outvars)


class _CutLoop:
    """A loop cut inside its body: the first half runs over all steps, then the second does."""

    def __init__(self, eqn: JaxprEqn, shared: set[Variable], wanted: Sequence[bool], *, effects: bool = False) -> None:
        self.loop = _Loop(eqn)
        self.effects = effects
        self.shared = [isinstance(v, Literal) or v in shared for v in eqn.invars]
        for at in range(self.loop.num_consts, self.loop.num_consts + self.loop.num_carry):
            self.shared[at] = False  # what is carried changes from step to step
        self.first = list(wanted)
        """Which outputs the first half gives, with all of the carry that those need."""
        self.second = [False] * len(wanted)
        # What the first half's body needs of the carry it must carry itself.
        while True:
            self.cut = Cut(self.loop.body, first=self.first, shared=self.shared, effects=effects)
            carried = self.loop.parted(self.cut.first_needs)[1]
            if not any(need and not have for need, have in zip(carried, self.first, strict=False)):
                break
            self.first[: self.loop.num_carry] = [a or b for a, b in zip(carried, self.first, strict=False)]

    def finish(self, wanted: Sequence[bool]) -> None:
        """Plan the second half, which gives these outputs."""
        self.second = list(wanted)
        n = self.loop.num_carry
        own = [False] * self.loop.num_consts + self.first[:n]
        only_first = own + [False] * (len(self.shared) - len(own))
        while True:
            self.cut = Cut(
                self.loop.body,
                first=self.first,
                second=self.second,
                only_first=only_first,
                shared=self.shared,
                effects=self.effects,
            )
            carried = self.loop.parted(self.cut.second_needs)[1]
            more = [need and not mine for need, mine in zip(carried, self.first, strict=False)]
            if not any(need and not have for need, have in zip(more, self.second, strict=False)):
                break
            self.second[:n] = [a or b for a, b in zip(more, self.second, strict=False)]

    @property
    def num_handed(self) -> int:
        """Stacked values that the first half hands to the second."""
        return len(self.cut.crossing) + sum(loop.num_handed for loop in self.cut.loops.values())

    def inputs(self, needs: Sequence[bool], outputs: Sequence[bool]) -> list[bool]:
        """Which inputs of the loop a half reads, of what its body does and the outputs it gives."""
        consts, carry, xs = self.loop.parted(needs)
        return [*consts, *(a or b for a, b in zip(carry, outputs, strict=False)), *xs]

    def first_half(self, args: Sequence[Value]) -> Steps[tuple[list[Value], list[Value]]]:
        return (yield from self._half(args, self.first, self.cut.first_needs, self.cut.run_first, []))

    def second_half(self, args: Sequence[Value], handed: Sequence[Value]) -> Steps[list[Value]]:
        def body(full: list[Value], *stacked: Value) -> tuple[list[Value], list[Value]]:
            return self.cut.run_second(full, stacked), []

        out, _ = yield from self._half(args, self.second, self.cut.second_needs, body, handed)
        return out

    def _half(
        self, args: Sequence[Value], outputs: Sequence[bool], needs: Sequence[bool],
        body: Callable[..., tuple[list[Value], list[Value]]], handed: Sequence[Value],
    ) -> Steps[tuple[list[Value], list[Value]]]:  # fmt: skip
        """One half over all steps: with only what it carries and reads, gives only what it is to give."""
        count = sum(outputs[: self.loop.num_carry])
        consts, carry, xs = self.loop.parted(args)
        reads = self.loop.parted(needs)[2]
        kept = [value for value, keep in zip(carry, outputs, strict=False) if keep]
        read = [value for value, use in zip(xs, reads, strict=True) if use]

        def step(carried: list[Value], stacked: tuple[list[Value], list[Value]]) -> Any:
            given, more = stacked
            out, extra = body(
                [*consts, *_spread(carried, outputs[: self.loop.num_carry]), *_spread(given, reads)], *more
            )
            mine = [value for value, keep in zip(out, outputs, strict=True) if keep]
            return mine[:count], [*mine[count:], *extra]

        out = yield self.loop.due(step, kept, (read, list(handed)))
        own = sum(outputs)
        return _spread(out[:own], outputs), out[own:]


def _spread(items: Sequence[Value], mask: Sequence[bool]) -> list[Value]:
    """The items where the mask says so, None elsewhere."""
    rest = iter(items)
    return [next(rest) if keep else None for keep in mask]
