"""Gradients of weights that several slices of the rows use, summed on each device before they are reduced over devices.

    slice a   x, dy ─► matmul ─► rounded ─┐                   a   matmul ─┐
                                          ├─ add    becomes               ├─ add ─► over devices ─► rounded
    slice b   x, dy ─► matmul ─► rounded ─┘                   b   matmul ─┘

Autodiff rounds a weight's gradient to the weight's dtype at each of its uses, and adds then; XLA reduces over devices
right behind each matmul. So every slice would send a gradient of its own, and neither the compiler nor a sharding
constraint can join them behind a rounding. Here the traced backward pass is rewritten: what is rounded stays as it was
made until it has been summed, and matmuls that contract the rows keep the sum of each device's own in a dim more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import AnyMesh, PyTree, axes_of_spec, axis_sizes

_SUMS = frozenset({"add", "add_any"})
_LAYOUTS = frozenset({"copy", "reshape", "squeeze", "transpose"})
_ROUNDING = "convert_element_type"
_CALLS = frozenset({"checkpoint", "jit", "pjit", "remat", "remat2", "shard_map"})


@dataclasses.dataclass(frozen=True)
class SliceRows:
    """How the rows of a slice lie: in equal parts on the ranks of some axes, as the first dim of activations."""

    mesh: AnyMesh
    axes: tuple[str, ...]
    count: int
    """Of a slice, on all devices."""

    @property
    def ranks(self) -> int:
        """In how many parts."""
        return math.prod(axis_sizes(self.mesh)[axis] for axis in self.axes)

    def are_contracted(self, product: JaxprEqn) -> bool:
        """Whether a matmul contracts its operands' first dims, and these are rows, or rows and what follows in one."""
        contracting, batch = product.params["dimension_numbers"]
        if (0, 0) not in zip(*contracting, strict=True) or batch[0]:
            return False
        size = _type(product.invars[0]).shape[0]
        return size % self.count == 0 and size % self.ranks == 0

    def own_sum(
        self, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], product: JaxprEqn, layouts: Sequence[JaxprEqn]
    ) -> jax.Array:
        """The sum of matmuls like one that contracts rows, and then its layout: `[ranks, ...]`, each rank's own."""
        contracting, _ = product.params["dimension_numbers"]
        numbers: Any = tuple(tuple(dim + 1 for dim in dims) for dims in contracting), ((0,), (0,))
        kinds = {name: product.params[name] for name in ("precision", "preferred_element_type")}

        def by_rank(x: jax.Array, contracted: Sequence[int]) -> jax.Array:
            # Whole before it is reshaped, as the matmul for the input gradient has it: one gather serves both.
            free = [None if dim in contracted else PartitionSpec.UNCONSTRAINED for dim in range(1, x.ndim)]
            x = self._laid(x, *free)
            return self._laid(x.reshape(self.ranks, -1, *x.shape[1:]), None, *free)

        pairs = [map(by_rank, pair, contracting) for pair in zip(lhs, rhs, strict=True)]
        products = [lax.dot_general(a, b, numbers, **kinds) for a, b in pairs]
        own = functools.reduce(lax.add, products)
        for layout in layouts:
            own = jax.vmap(functools.partial(layout.primitive.bind, **layout.params))(own)
        return self._laid(own, *[PartitionSpec.UNCONSTRAINED] * (own.ndim - 1))

    def _laid(self, x: jax.Array, *entries: Any) -> jax.Array:
        return with_layout(x, NamedSharding(self.mesh, PartitionSpec(self.axes, *entries)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """A gradient that is not reduced yet."""

    parts: jax.Array
    """`[ranks, ...]`: what each rank's rows give."""
    rows: SliceRows = dataclasses.field(metadata={"static": True})

    def reduced(self, spec: PartitionSpec) -> jax.Array:
        """The sum over ranks, laid out like that: scattered first over the axes of which each rank keeps a part."""
        rows, keeps = self.rows, set(axes_of_spec(spec))
        sizes, left = axis_sizes(rows.mesh), list(rows.axes)
        x = self.parts.reshape(*(sizes[axis] for axis in left), *self.parts.shape[1:])
        for over in ([axis for axis in left if axis in keeps], [axis for axis in left if axis not in keeps]):
            if over:
                dims = tuple(left.index(axis) for axis in over)
                left = [axis for axis in left if axis not in over]
                # lax.reduce, for jnp.sum would widen a narrow reduction to float32.
                x = lax.reduce(x, np.zeros((), x.dtype), lax.add, dims)
                x = with_layout(x, NamedSharding(rows.mesh, PartitionSpec(*left, *spec)))
        return x


def summed_first(fn: Callable[..., Any], marks: PyTree, rows: SliceRows | None) -> Callable[..., Any]:
    """A backward pass, with what it gives for weights summed before it is rounded, or reduced.

    Args:
      fn: of arrays; gives a pytree.
      marks: a truth for each result, as a prefix of their tree: whether it is the gradient of a weight.
      rows: None: matmuls reduce for themselves.

    Returns:
      A function that gives the same, but for marked results: sums of matmuls over rows are `Own`, and what else was
      rounded from float32, or is a sum of such, comes in float32.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        marked = jax.tree.leaves(jax.tree.map(lambda mark, tree: jax.tree.map(lambda _: mark, tree), marks, shapes))
        new = _rewritten(closed.jaxpr, marked, rows)
        results = jaxpr_as_fun(ClosedJaxpr(new.jaxpr, closed.consts))(*jax.tree.leaves(args))
        given = [x if own is None else Own(x, own) for x, own in zip(results, new.rows, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), given)

    return run


class _New(NamedTuple):
    jaxpr: Jaxpr
    is_new: list[bool]
    """Of each result: whether it is another than before."""
    rows: list[SliceRows | None]
    """Of each result: where it is what ranks have of their own."""


class _Term(NamedTuple):
    """Of a sum: a matmul, and what is done to its layout, the first first."""

    product: JaxprEqn
    layouts: tuple[JaxprEqn, ...]

    @property
    def likeness(self) -> str:
        """The same for terms that one function of their operands can make."""
        shapes = [(_type(x).shape, _type(x).dtype) for x in self.product.invars]
        return str((shapes, self.product.params, [(one.primitive.name, one.params) for one in self.layouts]))


def _rewritten(jaxpr: Jaxpr, marked: Sequence[bool], rows: SliceRows | None, *, is_called: bool = False) -> _New:
    program = _Program(jaxpr, rows, is_called)
    twins = [program.twin(out) if mark else None for out, mark in zip(jaxpr.outvars, marked, strict=True)]
    outvars = [old if new is None else new for old, new in zip(jaxpr.outvars, twins, strict=True)]
    eqns = _read([new for eqn in jaxpr.eqns for new in program.instead_of(eqn)], outvars)
    new = jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
    return _New(new, [one is not None for one in twins], [program.own.get(out) for out in outvars])


class _Program:
    """Variables of a traced program and their twins: the same numbers before they are rounded, or each rank's own."""

    def __init__(self, jaxpr: Jaxpr, rows: SliceRows | None, is_called: bool) -> None:
        self.made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self.rows = rows
        self.is_called = is_called
        """Whether a matmul alone is a sum, too: the caller may add what another call makes."""
        self.own: dict[Any, SliceRows | None] = {}
        """Twins that are each rank's own."""
        self._twins: dict[Var, Var | None] = {}
        self._behind: dict[int, list[JaxprEqn]] = {}
        """By the identity of an equation: those that make twins of its results."""
        self._calls: dict[int, _New] = {}
        """By the identity of a call: what it calls, rewritten for all of its results."""

    def twin(self, x: Any) -> Any:
        """Of a variable; None: it has none."""
        if isinstance(x, Literal) or x not in self.made or not jnp.issubdtype(x.aval.dtype, jnp.floating):
            return None
        if x not in self._twins:
            self._twins[x] = self._twin(x, self.made[x])
        return self._twins[x]

    def _twin(self, x: Any, eqn: JaxprEqn) -> Var | None:
        name = eqn.primitive.name
        if name in _CALLS:
            return self._of_call(x, eqn)
        if (name in _SUMS or self.is_called) and (twin := self._own(x, eqn)) is not None:
            return twin
        if name in _SUMS and (twin := self._sum_of_own(x, eqn)) is not None:
            return twin
        if x.aval.dtype.itemsize >= 4:
            return None
        if name == _ROUNDING:
            (given,) = eqn.invars
            return given if isinstance(given, Var) and _type(given).dtype == jnp.float32 else None
        return self._wide(x, eqn) if name in _SUMS | _LAYOUTS else None

    def _wide(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """The same equation, of what its operands were rounded from."""
        given = [self.twin(one) for one in eqn.invars]
        if any(one is None or one in self.own for one in given):
            return None
        twin = Var(x.aval.update(dtype=jnp.dtype(jnp.float32)))
        self._behind.setdefault(id(eqn), []).append(eqn.replace(invars=given, outvars=[twin]))
        return twin

    def _own(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """A sum of matmuls alike that contract rows."""
        terms, rows = self._terms(x, ()), self.rows
        if rows is None or terms is None or len({one.likeness for one in terms}) > 1:
            return None
        if not rows.are_contracted(terms[0].product):
            return None
        sides = [[one.product.invars[side] for one in terms] for side in (0, 1)]
        made = functools.partial(rows.own_sum, product=terms[0].product, layouts=terms[0].layouts)
        closed = jax.make_jaxpr(made)(*([one.aval for one in side] for side in sides))
        names = dict(zip(closed.jaxpr.invars, [*sides[0], *sides[1]], strict=True))
        self._behind.setdefault(id(eqn), []).extend(_renamed(closed.jaxpr, names, terms[0].product))
        (twin,) = closed.jaxpr.outvars
        self.own[twin] = rows
        return twin

    def _sum_of_own(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """A sum of what calls give that is each rank's own."""
        given = [self.twin(one) for one in eqn.invars]
        if any(one not in self.own for one in given) or len({(one.aval.shape, one.aval.dtype) for one in given}) > 1:
            return None
        twin = Var(given[0].aval)
        self._behind.setdefault(id(eqn), []).append(eqn.replace(invars=given, outvars=[twin]))
        self.own[twin] = self.own[given[0]]
        return twin

    def _terms(self, x: Any, layouts: tuple[JaxprEqn, ...]) -> list[_Term] | None:
        """The matmuls that x is the sum of; None: it is of others, too."""
        eqn = None if isinstance(x, Literal) else self.made.get(x)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "dot_general":
            return [_Term(eqn, layouts)]
        if name in _SUMS:
            terms = [self._terms(one, layouts) for one in eqn.invars]
            return None if None in terms else [term for of_one in terms for term in of_one or ()]
        if name == _ROUNDING and _type(eqn.invars[0]).dtype == jnp.float32:
            return self._terms(eqn.invars[0], layouts)
        return self._terms(eqn.invars[0], (eqn, *layouts)) if name in _LAYOUTS else None

    def _of_call(self, x: Any, eqn: JaxprEqn) -> Var | None:
        if id(eqn) not in self._calls:
            self._calls[id(eqn)] = self._rewritten(eqn, [True] * len(eqn.outvars))
        inner, at = self._calls[id(eqn)], eqn.outvars.index(x)
        if not inner.is_new[at]:
            return None
        out = inner.jaxpr.outvars[at]
        twin = Var(x.aval.update(dtype=_type(out).dtype) if inner.rows[at] is None else out.aval)
        if inner.rows[at] is not None:
            self.own[twin] = inner.rows[at]
        return twin

    def _rewritten(self, call: JaxprEqn, marked: Sequence[bool]) -> _New:
        """What is called. In a `shard_map` rows are a device's already, and kernels reduce for themselves; where a
        `jit` says how its results lie, they keep their dims."""
        laid = any(isinstance(one, Sharding) for one in call.params.get("out_shardings", ()))
        rows = None if laid or call.primitive.name == "shard_map" else self.rows
        return _rewritten(_called(call), marked, rows, is_called=True)

    def instead_of(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """What stands in an equation's place."""
        twins = [self._twins.get(out) for out in eqn.outvars]
        if eqn.primitive.name not in _CALLS or not any(twins):
            return [eqn, *self._behind.get(id(eqn), [])]
        held = eqn.params["jaxpr"]
        inner = self._rewritten(eqn, [one is not None for one in twins]).jaxpr
        params = {**eqn.params, "jaxpr": ClosedJaxpr(inner, held.consts) if hasattr(held, "consts") else inner}
        outvars = [old if new is None else new for old, new in zip(eqn.outvars, twins, strict=True)]
        again = [self._undone(new, old, eqn) for old, new in zip(eqn.outvars, twins, strict=True) if new is not None]
        return [eqn.replace(outvars=outvars, params=params), *(one for of_each in again for one in of_each)]

    def _undone(self, twin: Var, x: Any, call: JaxprEqn) -> list[JaxprEqn]:
        """A result as it was, of its twin, for others that read it."""
        is_own = twin in self.own

        def undone(given: jax.Array) -> jax.Array:
            whole = lax.reduce(given, np.zeros((), given.dtype), lax.add, (0,)) if is_own else given
            return whole.astype(x.aval.dtype)

        with call.ctx.manager:
            closed = jax.make_jaxpr(undone)(twin.aval)
        return _renamed(closed.jaxpr, {closed.jaxpr.invars[0]: twin, closed.jaxpr.outvars[0]: x}, call)


def _renamed(jaxpr: Jaxpr, names: dict[Var, Any], of: JaxprEqn) -> list[JaxprEqn]:
    """The equations of another program, with variables of this one, as of the line of one here."""

    def renamed(x: Any) -> Any:
        return x if isinstance(x, Literal) else names.get(x, x)

    return [
        eqn.replace(
            invars=[renamed(x) for x in eqn.invars],
            outvars=[renamed(x) for x in eqn.outvars],
            source_info=of.source_info,
        )
        for eqn in jaxpr.eqns
    ]


def _type(x: Any) -> Any:
    """Of an array."""
    return x.aval


def _called(eqn: JaxprEqn) -> Jaxpr:
    held = eqn.params["jaxpr"]
    return held.jaxpr if hasattr(held, "consts") else held


def _read(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """Without the sums, matmuls, roundings and layouts that nobody reads any longer."""
    read, kept = {id(out) for out in outvars}, []
    for eqn in reversed(eqns):
        spared = eqn.primitive.name in {*_SUMS, *_LAYOUTS, _ROUNDING, "dot_general", "reduce_sum"}
        if spared and id(eqn.outvars[0]) not in read:
            continue
        kept.append(eqn)
        read |= {id(x) for x in eqn.invars}
    return kept[::-1]
