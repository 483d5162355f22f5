"""Flow of dims through a traced function.

The result lists the matmuls, lookups and reductions with the dims that take part. `propose_names` derives logical names
from it. Operations without a rule keep the dims of operands of the same rank and size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import jaxprs_in_params

from meshpar.inspect.dim_classes import Dim, DimClasses


class DimValue(NamedTuple):
    """Dims of an array, and its origin."""

    dims: tuple[Dim, ...]
    param: int | None = None
    """Index of the parameter, for a parameter and its casts, transposes, reshapes and slices."""
    inputs: frozenset[int] = frozenset()
    """Indices of the inputs from which an integer or boolean array of the same range was computed."""


class DimMatmul(NamedTuple):
    """A matmul or convolution."""

    params: tuple[int | None, int | None]
    """Index of the parameter of each operand."""
    batch: tuple[Dim, ...]
    contracted: tuple[Dim, ...]
    free: tuple[tuple[Dim, ...], tuple[Dim, ...]]
    """Other dims of each operand."""
    operands: tuple[Any, Any]
    """Variables of the jaxpr, to recognize matmuls of the same activation."""
    sizes: tuple[int, int]
    """Elements of each operand, over all runs of enclosing scans."""
    flops: int
    out_size: int


class DimLookup(NamedTuple):
    """Rows of an array, selected by integer indices."""

    param: int | None
    rows: Dim
    inputs: frozenset[int]
    """Inputs from which the indices were computed."""
    out_size: int


class DimReduction(NamedTuple):
    """A reduction over dims, or an operation that needs all elements along them."""

    dims: tuple[Dim, ...]
    out_size: int


@dataclasses.dataclass
class DimFlow:
    """Dims of a traced function, and the operations in which they meet."""

    classes: DimClasses = dataclasses.field(default_factory=DimClasses)
    params: list[tuple[Dim, ...]] = dataclasses.field(default_factory=list)
    inputs: list[tuple[Dim, ...]] = dataclasses.field(default_factory=list)
    outputs: list[DimValue] = dataclasses.field(default_factory=list)
    matmuls: list[DimMatmul] = dataclasses.field(default_factory=list)
    lookups: list[DimLookup] = dataclasses.field(default_factory=list)
    reductions: list[DimReduction] = dataclasses.field(default_factory=list)
    scanned: list[Dim] = dataclasses.field(default_factory=list)
    """Leading dims of parameters that a scan runs over."""
    grouped: list[Dim] = dataclasses.field(default_factory=list)
    """Dims of groups in matmuls of a stack of matrices with sorted rows, such as `ragged_dot`."""
    pieces: list[Dim] = dataclasses.field(default_factory=list)
    """Dims that number the equal pieces of a sliced or concatenated dim."""
    cut: list[Dim] = dataclasses.field(default_factory=list)
    """Dims that are sliced into unequal pieces, and these pieces. Sharding them moves elements between devices."""
    runs: int = 1
    """Number of runs of the current jaxpr."""

    def run(self, jaxpr: core.Jaxpr, args: Sequence[DimValue]) -> list[DimValue]:
        """Return the values of the outputs of a jaxpr."""
        values: dict[Any, DimValue] = {x: self._new(x) for x in jaxpr.constvars}
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> DimValue:
            return self._new(atom) if isinstance(atom, core.Literal) else values[atom]

        eqn: Any
        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            out = RULES.get(eqn.primitive.name, _default)(self, eqn, operands)
            sources = () if eqn.primitive.name in _NEW_NUMBERS else operands
            origin = frozenset[int]().union(*(x.inputs for x in sources))
            for x, value in zip(eqn.outvars, out, strict=True):
                shape = getattr(x.aval, "shape", ())
                assert tuple(map(self.classes.size, value.dims)) == shape, (eqn.primitive.name, value, shape)
                dtype = getattr(x.aval, "dtype", None)
                is_exact = dtype is not None and (
                    jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
                )
                values[x] = value._replace(inputs=origin if is_exact else frozenset())
        atoms: Any = jaxpr.outvars
        return [read(x) for x in atoms]

    def _new(self, x: Any) -> DimValue:
        return DimValue(self.classes.new_dims(getattr(x.aval, "shape", ())))

    def repeated(self, runs: int, jaxpr: core.Jaxpr, args: Sequence[DimValue]) -> list[DimValue]:
        """Return the outputs of a jaxpr that runs `runs` times."""
        self.runs *= runs
        try:
            return self.run(jaxpr, args)
        finally:
            self.runs //= runs

    def add_matmul(
        self,
        eqn: Any,
        operands: Sequence[DimValue],
        *,
        batch: tuple[Dim, ...] = (),
        contracted: tuple[Dim, ...],
        free: tuple[tuple[Dim, ...], tuple[Dim, ...]],
        products: int | None = None,
    ) -> None:
        """Record a matmul. `products` is the number of products per element of the result."""
        (a, b), out = eqn.invars[:2], eqn.outvars[0].aval.size * self.runs
        count = math.prod(map(self.classes.size, contracted)) if products is None else products
        params = operands[0].param, operands[1].param
        sizes = a.aval.size * self.runs, b.aval.size * self.runs
        self.matmuls.append(DimMatmul(params, batch, contracted, free, (a, b), sizes, 2 * out * count, out))

    def unify(self, a: DimValue, b: DimValue) -> None:
        """Record that the dims of two arrays of equal shape have the same sharding."""
        for x, y in zip(a.dims, b.dims, strict=True):
            self.classes.unify(x, y)


def dim_flow(jaxpr: core.ClosedJaxpr, num_params: int, num_inputs: int) -> DimFlow:
    """Follow the dims of a traced function.

    Args:
      jaxpr: the function. Its first arguments are the parameters, the next the inputs. Others are state of the model.
      num_params: number of parameters.
      num_inputs: number of inputs.
    """
    flow = DimFlow()
    dims = [flow.classes.new_dims(getattr(x.aval, "shape", ())) for x in jaxpr.jaxpr.invars]
    flow.params, flow.inputs = dims[:num_params], dims[num_params : num_params + num_inputs]
    args = [
        *(DimValue(x, param=index) for index, x in enumerate(flow.params)),
        *(DimValue(x, inputs=frozenset({index})) for index, x in enumerate(flow.inputs)),
        *map(DimValue, dims[num_params + num_inputs :]),
    ]
    flow.outputs = flow.run(jaxpr.jaxpr, args)
    return flow


# ---- Rules by the name of a primitive --------------------------------------------------------------------------------

Rule: TypeAlias = Callable[[DimFlow, Any, Sequence[DimValue]], list[DimValue]]
RULES: dict[str, Rule] = {}
_NEW_NUMBERS = frozenset({"cumsum", "reduce_sum", "argmax", "argmin", "argsort", "sort", "top_k", "dot_general"})
"""Operations whose results are in another range than their operands."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _param_of(operands: Sequence[DimValue]) -> int | None:
    """Return the parameter of an operation's result, if it has a parameter and no activation as operands."""
    arrays = [x for x in operands if x.dims]
    return arrays[0].param if len(arrays) == 1 else None


def _default(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    """Follow nested functions. Otherwise keep the dims of operands that have the rank and the size of the result's."""
    body = next((x for x in jaxprs_in_params(eqn.params) if len(x.invars) == len(eqn.invars)), None)
    if body is not None and len(body.outvars) == len(eqn.outvars):
        return flow.run(body, operands)
    out = []
    for x in eqn.outvars:
        shape = getattr(x.aval, "shape", ())
        value = DimValue(flow.classes.new_dims(shape), _param_of(operands))
        for operand in operands:
            if len(operand.dims) == len(shape):
                flow.unify(value, operand)
        out.append(value)
    return out


@_rule("transpose")
def _transpose(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    (x,) = operands
    return [x._replace(dims=tuple(x.dims[dim] for dim in eqn.params["permutation"]))]


@_rule("broadcast_in_dim")
def _broadcast(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x = operands[0]
    dims = list(flow.classes.new_dims(eqn.params["shape"]))
    for dim, to in zip(x.dims, eqn.params["broadcast_dimensions"], strict=True):
        dims[to] = dim if flow.classes.size(dim) == eqn.params["shape"][to] else dims[to]
    return [x._replace(dims=tuple(dims))]


@_rule("reshape", "squeeze", "expand_dims")
def _reshape(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    return [operands[0]._replace(dims=flow.classes.reshaped(operands[0].dims, eqn.outvars[0].aval.shape))]


@_rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
       "argmin")  # fmt: skip
def _reduce(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, axes = operands[0], eqn.params["axes"]
    if x.param is None:
        size = eqn.outvars[0].aval.size * flow.runs
        flow.reductions.append(DimReduction(tuple(x.dims[dim] for dim in axes), size))
    return [DimValue(tuple(dim for index, dim in enumerate(x.dims) if index not in axes))]


def _piece(flow: DimFlow, dim: Dim, start: int, size: int) -> Dim:
    """Return the dim of a slice. Equal pieces are the minor factor of a dim."""
    full = flow.classes.size(dim)
    if size in (0, 1, full):
        return dim if size == full else flow.classes.new(size)
    parts = flow.classes.divide(dim, size) if full % size == 0 and start % size == 0 else None
    if parts is None:
        flow.cut += (dim, flow.classes.new(size))
        return flow.cut[-1]
    flow.pieces.append(parts[0])
    return parts[1]


@_rule("slice")
def _slice(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, params = operands[0], eqn.params
    strides = params["strides"] or (1,) * len(x.dims)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    shape = eqn.outvars[0].aval.shape
    dims = tuple(
        _piece(flow, dim, start, size) if stride == 1 else flow.classes.new(size)
        for dim, (start, _, stride), size in zip(x.dims, bounds, shape, strict=True)
    )
    return [x._replace(dims=dims)]


@_rule("split")
def _split(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, axis, start, out = operands[0], eqn.params["axis"], 0, []
    sizes = list(map(int, eqn.params["sizes"]))
    is_equal = len({*sizes}) == 1
    for size in sizes:
        piece = _piece(flow, x.dims[axis], start, size) if is_equal else flow.classes.new(size)
        flow.cut += () if is_equal else (x.dims[axis], piece)
        out.append(x._replace(dims=(*x.dims[:axis], piece, *x.dims[axis + 1 :])))
        start += size
    return out


@_rule("unstack")
def _unstack(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, axis = operands[0], eqn.params["axis"]
    flow.pieces.append(x.dims[axis])
    return [x._replace(dims=(*x.dims[:axis], *x.dims[axis + 1 :])) for _ in eqn.outvars]


@_rule("stack")
def _stack(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    axis, first = eqn.params["axis"], operands[0]
    for x in operands[1:]:
        flow.unify(first, x)
    number = flow.classes.new(len(operands))
    flow.pieces.append(number)
    return [DimValue((*first.dims[:axis], number, *first.dims[axis:]))]


@_rule("tile")
def _tile(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    pairs = zip(eqn.params["reps"], operands[0].dims, strict=True)
    return [operands[0]._replace(dims=tuple((*flow.classes.new(count), *dim) for count, dim in pairs))]


@_rule("concatenate")
def _concatenate(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    out = DimValue(flow.classes.new_dims(shape))
    sizes = {flow.classes.size(x.dims[axis]) for x in operands}
    parts = flow.classes.divide(out.dims[axis], sizes.pop()) if len(sizes) == 1 else None
    if parts is not None:
        flow.pieces.append(parts[0])
    for x in operands:
        for dim, (a, b) in enumerate(zip(out.dims, x.dims, strict=True)):
            if dim != axis:
                flow.classes.unify(a, b)
            elif parts is not None:
                flow.classes.unify(parts[1], b)
            elif b:
                flow.cut.append(b)
    return [out]


@_rule("gather")
def _gather(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, indices = operands
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    batching = getattr(numbers, "operand_batching_dims", ())
    removed = {*numbers.collapsed_slice_dims, *batching}
    for dim in numbers.start_index_map:
        if sizes[dim] == 1 and dim not in batching and x.dims[dim]:
            flow.lookups.append(DimLookup(x.param, x.dims[dim], indices.inputs, eqn.outvars[0].aval.size * flow.runs))
    kept = iter(dim for dim in range(len(x.dims)) if dim not in removed)
    positions = iter(indices.dims[:-1])
    dims: list[Dim] = []
    for index, size in enumerate(shape):
        if index in numbers.offset_dims:
            dim = next(kept)
            dims.append(x.dims[dim] if sizes[dim] == flow.classes.size(x.dims[dim]) else flow.classes.new(size))
        else:
            dims.append(next(positions))
    return [DimValue(tuple(dims))]


@_rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, _, updates = operands
    numbers = eqn.params["dimension_numbers"]
    inserted = {*numbers.inserted_window_dims, *getattr(numbers, "operand_batching_dims", ())}
    windows = (dim for dim in range(len(x.dims)) if dim not in inserted)
    for dim, update in zip(windows, numbers.update_window_dims, strict=True):
        flow.classes.unify(x.dims[dim], updates.dims[update])
    return [DimValue(x.dims)]


@_rule("top_k", "sort", "cumsum", "cumprod", "cummax", "cumlogsumexp")
def _along_dim(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    axis = eqn.params.get("dimension", eqn.params.get("axis", -1))
    dim = operands[0].dims[axis]
    flow.reductions.append(DimReduction((dim,), eqn.invars[0].aval.size * flow.runs))
    return [DimValue(x.dims) for x in _default(flow, eqn, operands)]


@_rule("dot_general")
def _dot(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    a, b = operands
    (contracted_a, contracted_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    pairs = [*zip(contracted_a, contracted_b, strict=True), *zip(batch_a, batch_b, strict=True)]
    for i, j in pairs:
        flow.classes.unify(a.dims[i], b.dims[j])
    batch = tuple(a.dims[dim] for dim in batch_a)
    contracted = tuple(a.dims[dim] for dim in contracted_a)
    free_a = tuple(dim for i, dim in enumerate(a.dims) if i not in (*contracted_a, *batch_a))
    free_b = tuple(dim for i, dim in enumerate(b.dims) if i not in (*contracted_b, *batch_b))
    flow.add_matmul(eqn, operands, batch=batch, contracted=contracted, free=(free_a, free_b))
    return [DimValue((*batch, *free_a, *free_b))]


@_rule("ragged_dot_general")
def _ragged_dot(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    a, b, _ = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted_a, contracted_b), (batch_a, _) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if batch_a or len(groups) != 1 or set(numbers.lhs_ragged_dimensions) & {*contracted_a}:
        return _default(flow, eqn, operands)
    for i, j in zip(contracted_a, contracted_b, strict=True):
        flow.classes.unify(a.dims[i], b.dims[j])
    contracted = tuple(a.dims[dim] for dim in contracted_a)
    free_a = tuple(dim for i, dim in enumerate(a.dims) if i not in contracted_a)
    free_b = tuple(dim for i, dim in enumerate(b.dims) if i not in (*contracted_b, *groups))
    flow.grouped.append(b.dims[groups[0]])
    flow.add_matmul(eqn, operands, contracted=contracted, free=(free_a, free_b))
    return [DimValue((*free_a, *free_b))]


@_rule("conv_general_dilated")
def _conv(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    x, kernel = operands
    numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    features, inputs, outputs = numbers.lhs_spec[1], numbers.rhs_spec[1], numbers.rhs_spec[0]
    is_depthwise = eqn.params["feature_group_count"] > 1
    contracted: tuple[Dim, ...] = ()
    if not is_depthwise:
        flow.classes.unify(x.dims[features], kernel.dims[inputs])
        contracted = (kernel.dims[inputs],)
    elif shape[numbers.out_spec[1]] == flow.classes.size(x.dims[features]):
        flow.classes.unify(x.dims[features], kernel.dims[outputs])
    dims = list(flow.classes.new_dims(shape))
    dims[numbers.out_spec[0]] = x.dims[numbers.lhs_spec[0]]
    dims[numbers.out_spec[1]] = kernel.dims[outputs]
    taps = math.prod(flow.classes.size(dim) for i, dim in enumerate(kernel.dims) if i != outputs)
    free = (x.dims[numbers.lhs_spec[0]],), (kernel.dims[outputs],)
    flow.add_matmul(eqn, operands, contracted=contracted, free=free, products=taps)
    return [DimValue(tuple(dims))]


@_rule("scan")
def _scan(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    # Stacked inputs and outputs have an extra leading dim outside the loop. jax versions differ in the scan's params.
    num_carry, num_before = (
        sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.outvars, body.outvars), (eqn.invars, body.invars))
    )
    consts, carry = operands[: num_before - num_carry], operands[num_before - num_carry : num_before]
    stacked = operands[num_before:]
    length = flow.classes.new(eqn.params["length"])
    for x in stacked:
        flow.classes.unify(length, x.dims[0])
        if x.param is not None:
            flow.scanned.append(x.dims[0])
    slices = [x._replace(dims=x.dims[1:]) for x in stacked]
    carry = [DimValue(x.dims, None, x.inputs) for x in carry]
    out = flow.repeated(eqn.params["length"], body, [*consts, *carry, *slices])
    for before, after in zip(carry, out[:num_carry], strict=True):
        flow.unify(before, after)
    return [*out[:num_carry], *(DimValue((length, *x.dims)) for x in out[num_carry:])]


@_rule("while")
def _while(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = [DimValue(x.dims, None, x.inputs) for x in operands[num_cond + num_body :]]
    consts = operands[num_cond : num_cond + num_body]
    body = eqn.params["body_jaxpr"]
    out = flow.run(getattr(body, "jaxpr", body), [*consts, *carry])
    for before, after in zip(carry, out, strict=True):
        flow.unify(before, after)
    return out


@_rule("cond")
def _cond(flow: DimFlow, eqn: Any, operands: Sequence[DimValue]) -> list[DimValue]:
    branches = (getattr(branch, "jaxpr", branch) for branch in eqn.params["branches"])
    first, *others = (flow.run(branch, operands[1:]) for branch in branches)
    for other in others:
        for a, b in zip(first, other, strict=True):
            flow.unify(a, b)
    return first
