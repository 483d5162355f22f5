"""Weight gradients of batch slices, summed per device before their reduction.

    slice a   x, dy ─► matmul ─► round ─┐                   a   matmul ─┐
                                        ├─ add    becomes               ├─ add ─► reduce over devices ─► round
    slice b   x, dy ─► matmul ─► round ─┘                   b   matmul ─┘

Autodiff rounds the gradient of a weight to its dtype at each use, and then adds. XLA reduces over devices directly
after each matmul. Each slice would therefore reduce a gradient, and XLA cannot merge reductions across a rounding. This
module rewrites the traced backward pass. Values that would be rounded stay in float32 until they are added. Matmuls
that contract the batch return a partial sum per rank, in an additional first dim.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    """The batch of a slice, as the first dim of activations, sharded equally over mesh axes."""

    mesh: AnyMesh
    axes: tuple[str, ...]
    count: int
    """Number of examples of a slice on all devices."""

    @property
    def ranks(self) -> int:
        """Return the number of shards of the batch."""
        return math.prod(axis_sizes(self.mesh)[axis] for axis in self.axes)

    def are_contracted(self, product: JaxprEqn) -> bool:
        """Return whether a matmul contracts the batch: dim 0 of both operands, possibly merged with other dims."""
        contracting, batch = product.params["dimension_numbers"]
        if (0, 0) not in zip(*contracting, strict=True) or batch[0]:
            return False
        size = _aval(product.invars[0]).shape[0]
        return size % self.count == 0 and size % self.ranks == 0

    def sum_by_rank(
        self, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], product: JaxprEqn, layouts: Sequence[JaxprEqn]
    ) -> jax.Array:
        """Return the sum of the matmuls `lhs[i] @ rhs[i]` on each rank, `[ranks, ...]`, after the `layouts` changes.

        The matmuls have the dimension numbers of `product`, which contract the batch.
        """
        contracting, _ = product.params["dimension_numbers"]
        numbers: Any = tuple(tuple(dim + 1 for dim in dims) for dims in contracting), ((0,), (0,))
        options = {name: product.params[name] for name in ("precision", "preferred_element_type")}

        def by_rank(x: jax.Array, contracted: Sequence[int]) -> jax.Array:
            # The other dims are unsharded before the reshape. The matmul of the input gradient needs the same
            # all-gather, so XLA merges the two.
            free = [None if dim in contracted else PartitionSpec.UNCONSTRAINED for dim in range(1, x.ndim)]
            x = self._constrain(x, *free)
            return self._constrain(x.reshape(self.ranks, -1, *x.shape[1:]), None, *free)

        pairs = [map(by_rank, pair, contracting) for pair in zip(lhs, rhs, strict=True)]
        products = [lax.dot_general(a, b, numbers, **options) for a, b in pairs]
        total = functools.reduce(lax.add, products)
        for layout in layouts:
            total = jax.vmap(functools.partial(layout.primitive.bind, **layout.params))(total)
        return self._constrain(total, *[PartitionSpec.UNCONSTRAINED] * (total.ndim - 1))

    def _constrain(self, x: jax.Array, *entries: Any) -> jax.Array:
        return with_layout(x, NamedSharding(self.mesh, PartitionSpec(self.axes, *entries)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A gradient before the reduction over ranks."""

    parts: jax.Array
    """`[ranks, ...]`: the gradient from the examples of each rank."""
    rows: SliceRows = dataclasses.field(metadata={"static": True})

    def reduced(self, spec: PartitionSpec) -> jax.Array:
        """Return the gradient, summed over ranks and sharded as `spec`.

        It is reduce-scattered over the mesh axes in `spec`, and then all-reduced over the other axes of the batch.
        """
        rows, scattered = self.rows, set(axes_of_spec(spec))
        sizes, remaining = axis_sizes(rows.mesh), list(rows.axes)
        x = self.parts.reshape(*(sizes[axis] for axis in remaining), *self.parts.shape[1:])
        for is_scattered in (True, False):
            axes = [axis for axis in remaining if (axis in scattered) is is_scattered]
            if axes:
                dims = tuple(remaining.index(axis) for axis in axes)
                remaining = [axis for axis in remaining if axis not in axes]
                # jnp.sum would reduce low-precision dtypes in float32.
                x = lax.reduce(x, np.zeros((), x.dtype), lax.add, dims)
                x = with_layout(x, NamedSharding(rows.mesh, PartitionSpec(*remaining, *spec)))
        return x


def summed_first(fn: Callable[..., Any], marks: PyTree, rows: SliceRows | None) -> Callable[..., Any]:
    """Return a backward pass whose weight gradients are summed before they are rounded and reduced.

    `marks` is a prefix tree of booleans, True for results that are gradients of weights. `rows` describes the batch of
    a slice. If it is not None, sums of matmuls over the batch are returned as `Unreduced`. Marked values that were
    rounded from float32, and sums of such values, are returned in float32. Other results do not change.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        marked = jax.tree.leaves(jax.tree.map(lambda mark, tree: jax.tree.map(lambda _: mark, tree), marks, shapes))
        new = _rewritten(closed.jaxpr, marked, rows)
        results = jaxpr_as_fun(ClosedJaxpr(new.jaxpr, closed.consts))(*jax.tree.leaves(args))
        leaves = [x if batch is None else Unreduced(x, batch) for x, batch in zip(results, new.rows, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return run


class _Rewritten(NamedTuple):
    jaxpr: Jaxpr
    is_new: list[bool]
    """For each result, whether it differs from the original."""
    rows: list[SliceRows | None]
    """The contracted batch of each result, if the result is a partial sum per rank, otherwise None."""


class _Term(NamedTuple):
    """A term of a sum: a matmul, followed by layout changes in program order."""

    product: JaxprEqn
    layouts: tuple[JaxprEqn, ...]

    @property
    def signature(self) -> str:
        """Return a string that identifies the function of the operands."""
        shapes = [(_aval(x).shape, _aval(x).dtype) for x in self.product.invars]
        return str((shapes, self.product.params, [(eqn.primitive.name, eqn.params) for eqn in self.layouts]))


def _rewritten(jaxpr: Jaxpr, marked: Sequence[bool], rows: SliceRows | None, *, is_called: bool = False) -> _Rewritten:
    program = _Program(jaxpr, rows, is_called)
    twins = [program.twin(out) if mark else None for out, mark in zip(jaxpr.outvars, marked, strict=True)]
    outvars = [old if new is None else new for old, new in zip(jaxpr.outvars, twins, strict=True)]
    eqns = _without_unused([new for eqn in jaxpr.eqns for new in program.replacement(eqn)], outvars)
    new = jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
    return _Rewritten(new, [twin is not None for twin in twins], [program.by_rank.get(out) for out in outvars])


class _Program:
    """The variables of a jaxpr and their twins: the same values, but unrounded or as partial sums per rank."""

    def __init__(self, jaxpr: Jaxpr, rows: SliceRows | None, is_called: bool) -> None:
        self.source = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self.rows = rows
        self.is_called = is_called
        """Whether a single matmul counts as a sum, because the caller may add the results of its calls."""
        self.by_rank: dict[Any, SliceRows | None] = {}
        """Twins that are partial sums per rank."""
        self._twins: dict[Var, Var | None] = {}
        self._added: dict[int, list[JaxprEqn]] = {}
        """Equations that compute twins, by the id of the equation that they follow."""
        self._calls: dict[int, _Rewritten] = {}
        """Rewritten jaxprs by the id of the call, with twins for all results."""

    def twin(self, x: Any) -> Any:
        """Return the variable with the unrounded value of x, or its partial sums per rank. None if there is none."""
        if isinstance(x, Literal) or x not in self.source or not jnp.issubdtype(x.aval.dtype, jnp.floating):
            return None
        if x not in self._twins:
            self._twins[x] = self._make_twin(x, self.source[x])
        return self._twins[x]

    def _make_twin(self, x: Any, eqn: JaxprEqn) -> Var | None:
        name = eqn.primitive.name
        if name in _CALLS:
            return self._call_twin(x, eqn)
        if (name in _SUMS or self.is_called) and (twin := self._sum_by_rank(x, eqn)) is not None:
            return twin
        if name in _SUMS and (twin := self._sum_of_twins(x, eqn)) is not None:
            return twin
        if x.aval.dtype.itemsize >= 4:
            return None
        if name == _ROUNDING:
            (unrounded,) = eqn.invars
            return unrounded if isinstance(unrounded, Var) and _aval(unrounded).dtype == jnp.float32 else None
        return self._in_float32(x, eqn) if name in _SUMS | _LAYOUTS else None

    def _in_float32(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """Add `eqn` with the float32 twins of its operands, and return the result, the twin of x.

        Return None if an operand lacks a float32 twin.
        """
        operands = [self.twin(operand) for operand in eqn.invars]
        if any(operand is None or operand in self.by_rank for operand in operands):
            return None
        twin = Var(x.aval.update(dtype=jnp.dtype(jnp.float32)))
        self._added.setdefault(id(eqn), []).append(eqn.replace(invars=operands, outvars=[twin]))
        return twin

    def _sum_by_rank(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """Return the partial sums per rank, if x is a sum of equal matmuls that contract the batch."""
        terms, rows = self._terms(x, ()), self.rows
        if rows is None or terms is None or len({term.signature for term in terms}) > 1:
            return None
        if not rows.are_contracted(terms[0].product):
            return None
        sides = [[term.product.invars[side] for term in terms] for side in (0, 1)]
        fn = functools.partial(rows.sum_by_rank, product=terms[0].product, layouts=terms[0].layouts)
        closed = jax.make_jaxpr(fn)(*([operand.aval for operand in side] for side in sides))
        names = dict(zip(closed.jaxpr.invars, [*sides[0], *sides[1]], strict=True))
        self._added.setdefault(id(eqn), []).extend(_renamed(closed.jaxpr, names, terms[0].product))
        (twin,) = closed.jaxpr.outvars
        self.by_rank[twin] = rows
        return twin

    def _sum_of_twins(self, x: Any, eqn: JaxprEqn) -> Var | None:
        """Add the partial sums per rank of all operands. Return None if one is missing, or if their shapes differ."""
        twins = [self.twin(operand) for operand in eqn.invars]
        if any(twin not in self.by_rank for twin in twins) or len({(t.aval.shape, t.aval.dtype) for t in twins}) > 1:
            return None
        total = Var(twins[0].aval)
        self._added.setdefault(id(eqn), []).append(eqn.replace(invars=twins, outvars=[total]))
        self.by_rank[total] = self.by_rank[twins[0]]
        return total

    def _terms(self, x: Any, layouts: tuple[JaxprEqn, ...]) -> list[_Term] | None:
        """Return the matmuls whose sum is x, or None if x has other terms."""
        eqn = None if isinstance(x, Literal) else self.source.get(x)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "dot_general":
            return [_Term(eqn, layouts)]
        if name in _SUMS:
            terms = [self._terms(operand, layouts) for operand in eqn.invars]
            return None if None in terms else [term for operand_terms in terms for term in operand_terms or ()]
        if name == _ROUNDING and _aval(eqn.invars[0]).dtype == jnp.float32:
            return self._terms(eqn.invars[0], layouts)
        return self._terms(eqn.invars[0], (eqn, *layouts)) if name in _LAYOUTS else None

    def _call_twin(self, x: Any, eqn: JaxprEqn) -> Var | None:
        if id(eqn) not in self._calls:
            self._calls[id(eqn)] = self._rewritten(eqn, [True] * len(eqn.outvars))
        inner, index = self._calls[id(eqn)], eqn.outvars.index(x)
        if not inner.is_new[index]:
            return None
        out: Any = inner.jaxpr.outvars[index]
        twin = Var(x.aval.update(dtype=out.aval.dtype) if inner.rows[index] is None else out.aval)
        if inner.rows[index] is not None:
            self.by_rank[twin] = inner.rows[index]
        return twin

    def _rewritten(self, call: JaxprEqn, marked: Sequence[bool]) -> _Rewritten:
        """Rewrite the jaxpr of a call.

        Partial sums per rank are impossible for a `jit` with output shardings. They are also impossible in a
        `shard_map`, which sees the local batch, and whose kernels reduce their results.
        """
        has_shardings = any(isinstance(sharding, Sharding) for sharding in call.params.get("out_shardings", ()))
        rows = None if has_shardings or call.primitive.name == "shard_map" else self.rows
        jaxpr = call.params["jaxpr"]
        inner = jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr
        return _rewritten(inner, marked, rows, is_called=True)

    def replacement(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Return the equations that replace an equation."""
        twins = [self._twins.get(out) for out in eqn.outvars]
        if eqn.primitive.name not in _CALLS or not any(twins):
            return [eqn, *self._added.get(id(eqn), [])]
        jaxpr = eqn.params["jaxpr"]
        inner = self._rewritten(eqn, [twin is not None for twin in twins]).jaxpr
        params = {**eqn.params, "jaxpr": ClosedJaxpr(inner, jaxpr.consts) if hasattr(jaxpr, "consts") else inner}
        outvars = [old if new is None else new for old, new in zip(eqn.outvars, twins, strict=True)]
        originals = [
            self._original(new, old, eqn) for old, new in zip(eqn.outvars, twins, strict=True) if new is not None
        ]
        return [eqn.replace(outvars=outvars, params=params), *itertools.chain(*originals)]

    def _original(self, twin: Var, x: Any, call: JaxprEqn) -> list[JaxprEqn]:
        """Return equations that compute x from its twin, for other equations that read x."""
        is_by_rank = twin in self.by_rank

        def original(value: jax.Array) -> jax.Array:
            total = lax.reduce(value, np.zeros((), value.dtype), lax.add, (0,)) if is_by_rank else value
            return total.astype(x.aval.dtype)

        with call.ctx.manager:
            closed = jax.make_jaxpr(original)(twin.aval)
        return _renamed(closed.jaxpr, {closed.jaxpr.invars[0]: twin, closed.jaxpr.outvars[0]: x}, call)


def _renamed(jaxpr: Jaxpr, names: dict[Var, Any], origin: JaxprEqn) -> list[JaxprEqn]:
    """Return the equations of a jaxpr with renamed variables and the source line of `origin`."""

    def renamed(x: Any) -> Any:
        return x if isinstance(x, Literal) else names.get(x, x)

    return [
        eqn.replace(
            invars=[renamed(x) for x in eqn.invars],
            outvars=[renamed(x) for x in eqn.outvars],
            source_info=origin.source_info,
        )
        for eqn in jaxpr.eqns
    ]


def _aval(x: Any) -> Any:
    return x.aval  # jax declares it without shape and dtype


def _without_unused(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """Remove the sums, matmuls, roundings and layout changes whose results are no longer used."""
    used, result = {id(out) for out in outvars}, []
    for eqn in reversed(eqns):
        is_removable = eqn.primitive.name in {*_SUMS, *_LAYOUTS, _ROUNDING, "dot_general", "reduce_sum"}
        if is_removable and id(eqn.outvars[0]) not in used:
            continue
        result.append(eqn)
        used |= {id(x) for x in eqn.invars}
    return result[::-1]
