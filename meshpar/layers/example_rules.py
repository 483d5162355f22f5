"""Rules for the examples in the results of jax's primitives, by the name of the primitive.

A rule is a function (flow, equation, operands) -> results, as descriptions of the arrays. It raises
`MixedExamplesError` if the operation combines examples, and `UndecidedError` if it may do so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.extend import core

from meshpar.layers.dim_factors import (
    UNIFORM,
    VARYING,
    Dim,
    Examples,
    Factor,
    MixedExamplesError,
    UndecidedError,
    dim_of,
    examples_in,
    joined,
    merged,
    reshaped,
    size_of,
)
from meshpar.layers.example_values import MAX_KNOWN, Value, check_distinct, is_exact, varying


class Flow(Protocol):
    """The analysis that applies the rules."""

    runs: int
    """How often enclosing loops run the current jaxpr."""
    batch_sizes: frozenset[int]
    """Numbers of examples of the leaves of the batch."""
    checks_backward: bool
    """Whether the backward pass of a `jax.custom_vjp` is examined."""

    def inner(self, closed: core.Jaxpr | core.ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Return the outputs of an inner jaxpr."""

    def backward(self) -> Flow:
        """Return an analysis of a backward pass. Its findings are separate from the findings of the forward pass."""


Rule: TypeAlias = Callable[[Flow, Any, Sequence[Value]], Value | list[Value]]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# ---- Element-wise operations -----------------------------------------------------------------------------------------

_LINEAR = (
    "neg", "convert_element_type", "copy", "copy_p", "real", "imag", "reduce_precision", "sharding_constraint",
    "optimization_barrier", "stop_gradient", "name", "pvary", "pcast", "reshard", "mesh_cast", "device_put",
)  # fmt: skip
"""Element-wise operations on each operand that keep sums over examples."""
_ELEMENTWISE = (
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "cos", "cosh", "digamma", "eq",
    "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max",
    "min", "ne", "nextafter", "not", "or", "polygamma", "population_count", "pow", "random_gamma_grad",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor", "zeta",
)  # fmt: skip


def _join(operands: Sequence[Value]) -> tuple[Dim, ...]:
    """Return the dims of an element-wise operation. Scalars and dims of size 1 are broadcast."""
    rank = max(len(x.dims) for x in operands)
    dims: list[Dim] = []
    for index in range(rank):
        dim: Dim = ()
        for x in operands:
            other = x.dims[index] if x.dims else ()
            if not dim or not other:
                size, single = size_of(dim or other), dim or other
                dim = joined(single, dim_of(size, UNIFORM)) if size > 1 else ()
            else:
                dim = joined(dim, other)
        dims.append(dim)
    value = Value(tuple(dims))
    check_distinct(value)
    return value.dims


def _check_no_sum(eqn: Any, operands: Sequence[Value]) -> None:
    if any(x.is_sum for x in operands):
        kind = (
            "a sum over the examples" if not any(x.examples for x in operands) else "each example with a sum over all"
        )
        raise MixedExamplesError(f"`{eqn.primitive.name}` is applied to {kind}")


@_rule(*_ELEMENTWISE)
def _elementwise(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    _check_no_sum(eqn, operands)
    return Value(_join(operands), known=_folded(eqn, operands))


@_rule(*_LINEAR)
def _linear(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    if is_exact(eqn.outvars[0].aval.dtype) and not is_exact(eqn.invars[0].aval.dtype):
        _check_no_sum(eqn, operands)  # a conversion to integers rounds
    keeps = len(eqn.outvars) == 1
    return [dataclasses.replace(x, known=_folded(eqn, operands) if keeps else x.known, columns=()) for x in operands]


@_rule("add", "sub", "add_any")
def _add(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    is_zero, dims = all(x.is_zero for x in operands), _join(operands)
    if any(x.is_sum for x in operands):
        if any(x.examples for x in operands):
            _check_no_sum(eqn, operands)
        if not all(x.is_sum or x.is_zero or x.is_random_sum for x in operands):
            raise UndecidedError("a term that does not depend on the batch is added, which each part would add again")
        divisors = {x.divisor if x.is_sum else 1.0 for x in operands if not x.is_zero}
        return Value(dims, is_sum=True, divisor=divisors.pop() if len(divisors) == 1 else 1.0)
    is_random_sum = all(x.is_random_sum or x.is_zero for x in operands) and not is_zero
    return Value(dims, is_zero=is_zero, known=_folded(eqn, operands), is_random_sum=is_random_sum)


@_rule("mul", "div")
def _multiply(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    first, second = operands
    dims = _join(operands)
    if first.is_zero or (second.is_zero and eqn.primitive.name == "mul"):
        return Value(varying(()).dims + tuple(dim_of(size_of(dim), UNIFORM) for dim in dims), is_zero=True)
    if (first.is_random_sum and second.depends) or (second.is_random_sum and first.depends):
        raise UndecidedError("the factor is a sum of random numbers for all examples")
    if first.is_sum or second.is_sum:
        is_scaled = first.is_sum != second.is_sum and (first.is_sum or eqn.primitive.name == "mul")
        if not is_scaled or any(x.examples for x in operands):
            _check_no_sum(eqn, operands)
        total, factor = (first, second) if first.is_sum else (second, first)
        constant = 1.0 if factor.known is None or np.ndim(factor.known) else float(factor.known)
        divisor = total.divisor * (constant if eqn.primitive.name == "div" else 1 / (constant or 1.0))
        return Value(dims, is_sum=True, divisor=divisor)
    is_random_sum = first.is_random_sum and not second.is_random
    is_random_sum = is_random_sum or (second.is_random_sum and not first.is_random and eqn.primitive.name == "mul")
    return Value(dims, known=_folded(eqn, operands), is_random_sum=is_random_sum)


@_rule("select_n")
def _select(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    which, *cases = operands
    if which.known is not None and (which.known == which.known.flat[0]).all():
        return cases[int(which.known.flat[0])]
    dims = _join(operands)
    if any(x.is_sum for x in cases) and all(x.is_sum or x.is_zero for x in cases) and not which.depends:
        return Value(dims, is_sum=True)
    _check_no_sum(eqn, operands)
    return Value(dims, is_zero=all(x.is_zero for x in cases), known=_folded(eqn, operands))


def _folded(eqn: Any, operands: Sequence[Value]) -> np.ndarray | None:
    """Return the result of an operation on known integers, or None."""
    aval = eqn.outvars[0].aval
    if not operands or any(x.known is None for x in operands) or not is_exact(aval.dtype) or aval.size > MAX_KNOWN:
        return None
    with jax.ensure_compile_time_eval():
        dtypes = [x.aval.dtype for x in eqn.invars]
        arrays = [np.asarray(x.known, dtype) for x, dtype in zip(operands, dtypes, strict=True)]
        out = eqn.primitive.bind(*map(jax.numpy.asarray, arrays), **eqn.params)
        return np.asarray(out[0] if eqn.primitive.multiple_results else out)


# ---- Shapes ----------------------------------------------------------------------------------------------------------


@_rule("broadcast_in_dim")
def _broadcast(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, dims = operands[0], [dim_of(size, UNIFORM) for size in eqn.params["shape"]]
    for dim, to in zip(x.dims, eqn.params["broadcast_dimensions"], strict=True):
        dims[to] = dim if size_of(dim) == size_of(dims[to]) else dims[to]
    return dataclasses.replace(x, dims=tuple(dims), known=_folded(eqn, operands), columns=())


@_rule("tile")
def _tile(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x = operands[0]
    dims = (merged([Factor(count, UNIFORM), *dim]) for count, dim in zip(eqn.params["reps"], x.dims, strict=True))
    return dataclasses.replace(x, dims=tuple(dims), known=_folded(eqn, operands), columns=())


@_rule("reshape", "squeeze", "expand_dims")
def _reshape(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        raise UndecidedError("a reshape permutes dims")
    dims = reshaped(operands[0].dims, eqn.outvars[0].aval.shape)
    return dataclasses.replace(operands[0], dims=dims, known=_folded(eqn, operands), columns=())


@_rule("transpose")
def _transpose(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    dims = tuple(operands[0].dims[dim] for dim in eqn.params["permutation"])
    return dataclasses.replace(operands[0], dims=dims, known=_folded(eqn, operands), columns=())


def _piece(dim: Dim, start: int, limit: int, stride: int = 1) -> Dim:
    """Return the factors of the elements `start:limit:stride` of a dim."""
    size, count = size_of(dim), len(range(start, limit, stride))
    if count == size:
        return dim
    if not examples_in([dim]):
        return dim_of(count, UNIFORM if all(factor.tag == UNIFORM for factor in dim) else VARYING)
    # With factors [copies, examples, ...], a slice may select copies.
    outer, inner = (dim[0], dim[1:]) if not isinstance(dim[0].tag, Examples) else (Factor(1, VARYING), dim)
    block = size_of(inner)
    if stride != 1 or start % block or limit % block:
        raise MixedExamplesError("it selects examples by their position in the batch")
    return merged([Factor(count // block, outer.tag), *inner])


@_rule("slice")
def _slice(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, params = operands[0], eqn.params
    strides = params["strides"] or [1] * len(x.dims)
    pieces = zip(x.dims, params["start_indices"], params["limit_indices"], strides, strict=True)
    return dataclasses.replace(
        x, dims=tuple(_piece(*piece) for piece in pieces), known=_folded(eqn, operands), columns=()
    )


@_rule("split")
def _split(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    x, axis, start, out = operands[0], eqn.params["axis"], 0, []
    for size in map(int, eqn.params["sizes"]):
        dims = (*x.dims[:axis], _piece(x.dims[axis], start, start + size), *x.dims[axis + 1 :])
        out.append(dataclasses.replace(x, dims=dims, known=None, columns=()))
        start += size
    return out


@_rule("unstack")
def _unstack(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    x, axis = operands[0], eqn.params["axis"]
    if len(eqn.outvars) > 1:
        _check_local(x, [axis], "it selects examples by their position in the batch")
    dims = (*x.dims[:axis], *x.dims[axis + 1 :])
    values = [None if x.known is None else np.take(x.known, index, axis) for index in range(len(eqn.outvars))]
    return [dataclasses.replace(x, dims=dims, known=known, columns=()) for known in values]


@_rule("rev")
def _reverse(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x = operands[0]
    _check_local(x, eqn.params["dimensions"], "it reverses the order of examples")
    return dataclasses.replace(x, known=_folded(eqn, operands), columns=())


def _check_local(x: Value, dims: Sequence[int], message: str) -> None:
    """Check that dims have no examples."""
    if examples_in(x.dims[dim] for dim in dims):
        raise MixedExamplesError(message)


def _common(operands: Sequence[Value]) -> Value:
    """Return the flags of an array that is joined from other arrays."""
    if any(x.is_sum for x in operands):
        if not all(x.is_sum or x.is_zero for x in operands):
            raise UndecidedError("it joins a sum over the examples with other values")
        return Value((), is_sum=True)
    return Value((), is_zero=all(x.is_zero for x in operands))


def _is_uniform(dim: Dim) -> bool:
    return all(factor.tag == UNIFORM for factor in dim)


@_rule("concatenate")
def concatenate(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    """Copies of the examples, or columns of an index array."""
    axis, rank = eqn.params["dimension"], len(operands[0].dims)
    operands = [x for x, atom in zip(operands, eqn.invars, strict=True) if 0 not in atom.aval.shape]
    columns: tuple[np.ndarray | None, ...] = ()
    is_of_columns = axis == rank - 1 and all(size_of(x.dims[axis]) == 1 for x in operands)
    if is_of_columns and any(x.known is not None for x in operands):
        columns = tuple(x.known for x in operands)

    def others(x: Value) -> Value:  # `columns` describes known operands, whose values may differ between examples
        dims = [dim_of(size_of(dim), UNIFORM) for dim in x.dims] if columns and x.known is not None else list(x.dims)
        return Value((*dims[:axis], (), *dims[axis + 1 :]))

    rest = _join(list(map(others, operands)))
    parts = [x.dims[axis] for x in operands]
    if examples_in(parts):
        blocks = [part[1:] if part and not isinstance(part[0].tag, Examples) else part for part in parts]
        example_block = next(block for block in blocks if examples_in([block]))
        for index, part in enumerate(parts):  # equal values for all examples, such as zeros
            if _is_uniform(part) and size_of(part) == size_of(example_block):
                blocks[index] = example_block
        if len(set(blocks)) > 1:
            raise UndecidedError("examples are concatenated with other values")
        joint: Dim = merged([Factor(sum(map(size_of, parts)) // size_of(blocks[0]), VARYING), *blocks[0]])
    else:
        uniform = math.gcd(*map(size_of, parts)) if all(map(_is_uniform, parts)) else 1
        total = sum(map(size_of, parts))
        joint = merged([Factor(total // uniform, VARYING if len(parts) > 1 else UNIFORM), Factor(uniform, UNIFORM)])
    dims = (*rest[:axis], joint, *rest[axis + 1 :])
    known = _folded(eqn, operands) if len(operands) == len(eqn.invars) else None
    return dataclasses.replace(_common(operands), dims=dims, known=known, columns=columns)


@_rule("stack")
def _stack(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    dims, axis = list(_join(operands)), eqn.params["axis"]
    dims.insert(axis, dim_of(len(operands), VARYING))
    return dataclasses.replace(_common(operands), dims=tuple(dims))


@_rule("pad")
def _pad(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, fill = operands
    dims = []
    for dim, size, config in zip(x.dims, eqn.outvars[0].aval.shape, eqn.params["padding_config"], strict=True):
        if any(config) and examples_in([dim]):
            raise UndecidedError("it pads or crops the dim of the examples")
        dims.append(dim_of(size, VARYING) if any(config) else dim)
    if fill.depends:
        raise UndecidedError("the padding depends on the batch")
    return dataclasses.replace(_common(operands), dims=tuple(dims))


@_rule("dynamic_slice")
def _dynamic_slice(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, *starts = operands
    if any(start.depends for start in starts):
        raise UndecidedError("the position of a slice depends on the batch")
    dims = []
    for dim, size in zip(x.dims, eqn.params["slice_sizes"], strict=True):
        if size_of(dim) != size and examples_in([dim]):
            raise MixedExamplesError("it selects examples by their position in the batch")
        dims.append(dim if size_of(dim) == size else _piece(dim, 0, size))
    return dataclasses.replace(x, dims=tuple(dims), known=None, columns=())


@_rule("dynamic_update_slice")
def _dynamic_update_slice(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, update, *starts = operands
    if any(start.depends for start in starts):
        raise UndecidedError("the position of a slice depends on the batch")
    dims = []
    for old, new in zip(x.dims, update.dims, strict=True):
        is_full = size_of(old) == size_of(new)
        if not is_full and examples_in([old, new]):
            raise MixedExamplesError("it overwrites examples by their position in the batch")
        dims.append(joined(old, new) if is_full else dim_of(size_of(old), VARYING))
    return dataclasses.replace(_common([x, update]), dims=tuple(dims))


# ---- Reductions ------------------------------------------------------------------------------------------------------


@_rule("reduce_sum")
def _sum(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, axes = operands[0], eqn.params["axes"]
    remaining = tuple(dim for index, dim in enumerate(x.dims) if index not in axes)
    summed = examples_in(x.dims[index] for index in axes)
    if not summed:
        size = math.prod(size_of(x.dims[index]) for index in axes)
        is_random_sum = x.is_random and any(
            size % count == 0 and all(size_of(dim) % count for dim in remaining) for count in flow.batch_sizes
        )
        is_random_sum = x.is_random_sum or is_random_sum
        return dataclasses.replace(x, dims=remaining, known=None, columns=(), is_random_sum=is_random_sum)
    if examples_in(remaining):
        raise MixedExamplesError("it sums over groups of examples")
    return Value(remaining, is_sum=True)


@_rule("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "reduce_prod", "argmax", "argmin")
def _reduce(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, axes = operands[0], eqn.params["axes"]
    _check_no_sum(eqn, operands)
    _check_local(x, axes, f"`{eqn.primitive.name}` reduces over the examples")
    return Value(tuple(dim for index, dim in enumerate(x.dims) if index not in axes))


@_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, axis = operands[0], eqn.params["axis"]
    _check_local(x, [axis], f"`{eqn.primitive.name}` runs over the examples")
    if eqn.primitive.name != "cumsum":
        _check_no_sum(eqn, operands)
    dims = (*x.dims[:axis], dim_of(size_of(x.dims[axis]), VARYING), *x.dims[axis + 1 :])
    return Value(dims, is_sum=x.is_sum, is_zero=x.is_zero)


@_rule("sort", "top_k", "approx_top_k")
def _sort(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    dim = eqn.params.get("dimension", eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)))
    dim %= len(operands[0].dims)
    _check_no_sum(eqn, operands)
    dims = list(_join(operands))
    _check_local(Value(tuple(dims)), [dim], f"`{eqn.primitive.name}` orders the examples")
    dims[dim] = dim_of(eqn.outvars[0].aval.shape[dim], VARYING)
    return [Value(tuple(dims)) for _ in eqn.outvars]


@_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, shape = operands[0], eqn.outvars[0].aval.shape
    if not eqn.primitive.name.endswith("sum"):
        _check_no_sum(eqn, operands)
    whole = [size == 1 and after == size_of(dim) for size, after, dim in
             zip(eqn.params["window_dimensions"], shape, x.dims, strict=True)]  # fmt: skip
    _check_local(x, [index for index, is_whole in enumerate(whole) if not is_whole], "a window covers several examples")
    dims = (dim if is_full else dim_of(size, VARYING) for dim, size, is_full in zip(x.dims, shape, whole, strict=True))
    return Value(tuple(dims), is_sum=x.is_sum)


# ---- Products --------------------------------------------------------------------------------------------------------


@_rule("dot_general")
def _dot(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    a, b = operands
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    batch = [joined(a.dims[i], b.dims[j]) for i, j in zip(batch_a, batch_b, strict=True)]
    contracted = [joined(a.dims[i], b.dims[j]) for i, j in zip(contract_a, contract_b, strict=True)]
    free = [dim for x, used in ((a, (*contract_a, *batch_a)), (b, (*contract_b, *batch_b)))
            for index, dim in enumerate(x.dims) if index not in used]  # fmt: skip
    dims = (*batch, *free)
    if a.is_zero or b.is_zero:
        return Value(tuple(dim_of(size_of(dim), UNIFORM) for dim in dims), is_zero=True)
    if (a.is_sum and b.depends) or (b.is_sum and a.depends):
        _check_no_sum(eqn, operands)
    check_distinct(Value((*dims, *contracted)))
    if examples_in(contracted):
        if examples_in(dims):
            raise MixedExamplesError("it sums over groups of examples")
        return Value(dims, is_sum=True)
    return Value(dims, is_sum=a.is_sum or b.is_sum)


@_rule("conv_general_dilated")
def _convolve(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    (image, kernel), numbers = operands, eqn.params["dimension_numbers"]
    shape, batch_dim = eqn.outvars[0].aval.shape, numbers.lhs_spec[0]
    others = [dim for index, dim in enumerate(image.dims) if index != batch_dim]
    if kernel.depends or image.is_sum or eqn.params["batch_group_count"] != 1 or examples_in(others):
        raise UndecidedError("a convolution has examples in other operands or dims than the batch dim of its input")
    dims = [dim_of(size, VARYING) for size in shape]
    dims[numbers.out_spec[0]] = image.dims[batch_dim]
    return Value(tuple(dims))


# ---- Indexing --------------------------------------------------------------------------------------------------------


@_rule("gather")
def gather(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    """x[..., indices, ...], where the last dim of `indices` has one entry per indexed dim of x."""
    x, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.outvars[0].aval.shape
    _check_no_sum(eqn, [indices])
    if x.is_sum and indices.depends:
        _check_no_sum(eqn, operands)
    if examples_in(indices.dims[-1:]):
        raise MixedExamplesError("examples are used as the components of an index")
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    index_dims = list(indices.dims[:-1])
    for index, to in paired.items():
        index_dims[to] = joined(x.dims[index], index_dims[to])
    for index, dim in enumerate(x.dims):
        if index in paired or not examples_in([dim]) or sizes[index] == size_of(dim):
            continue
        to = _numbered_by_example(x, index, indices, numbers.start_index_map)
        if to is None:
            raise MixedExamplesError("it selects examples by an index")
        index_dims[to] = dim
    offsets = iter(
        dim if sizes[index] == size_of(dim) else dim_of(sizes[index], VARYING)
        for index, dim in enumerate(x.dims)
        if index not in (*numbers.collapsed_slice_dims, *paired)
    )
    batch = iter(index_dims)
    dims = tuple(next(offsets) if index in numbers.offset_dims else next(batch) for index in range(len(shape)))
    return Value(dims, is_sum=x.is_sum, is_zero=x.is_zero)


def _numbered_by_example(x: Value, index: int, indices: Value, index_map: Sequence[int]) -> int | None:
    """Return the dim of `indices` along which the index into dimension `index` of x is 0, 1, 2, ..., or None."""
    (factor,) = x.dims[index] if len(x.dims[index]) == 1 else (None,)
    columns = indices.columns
    if not columns and indices.known is not None:
        columns = tuple(indices.known[..., i : i + 1] for i in range(indices.known.shape[-1]))
    if factor is None or index not in index_map or not columns:
        return None
    column = columns[tuple(index_map).index(index)]
    for to, dim in enumerate(indices.dims[:-1]):
        if column is not None and size_of(dim) == factor.size and column.shape[to] == factor.size:
            moved = np.moveaxis(column, to, -1)
            if (moved == np.arange(factor.size)).all():
                return to
    return None


@_rule("scatter", "scatter-add", "scatter_add", "scatter_sub", "scatter-sub", "scatter_mul", "scatter-mul",
       "scatter_min", "scatter-min", "scatter_max", "scatter-max")  # fmt: skip
def scatter(flow: Flow, eqn: core.JaxprEqn, operands: Sequence[Value]) -> Value:
    """x.at[..., indices, ...].set(updates), with the dims of `indices` as in `gather`."""
    x, indices, updates = operands
    numbers, adds = eqn.params["dimension_numbers"], eqn.primitive.name in ("scatter-add", "scatter_add")
    _check_no_sum(eqn, [indices])
    window = [updates.dims[index] for index in numbers.update_window_dims]
    others = [dim for index, dim in enumerate(updates.dims) if index not in numbers.update_window_dims]
    sources = [joined(a, b) for a, b in zip(indices.dims[:-1], others, strict=True)]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    dims, used = [], set()
    for index, dim in enumerate(x.dims):
        to = batching.get(index)
        if to is None and index in numbers.inserted_window_dims:
            to = _numbered_by_example(x, index, indices, numbers.scatter_dims_to_operand_dims)
            new = dim_of(size_of(dim), VARYING)
        elif to is None:
            new = window.pop(0)
        if to is not None:
            used.add(to)
            new = sources[to]
        is_full = size_of(new) == size_of(dim) and not (to is None and index in numbers.inserted_window_dims)
        if not is_full and examples_in([dim, new]):
            raise MixedExamplesError("it overwrites examples by an index")
        dims.append(joined(dim, new) if is_full else dim_of(size_of(dim), VARYING))
    if examples_in(dim for index, dim in enumerate(sources) if index not in used):
        if examples_in(dims) or not adds or not (x.is_zero or x.is_sum) or updates.is_sum:
            raise MixedExamplesError("different examples write to the same array")
        return Value(tuple(dims), is_sum=True)
    return dataclasses.replace(_common([x, updates]), dims=tuple(dims))


# ---- Linear algebra, transforms, kernels -----------------------------------------------------------------------------


def _matrices(*names: str, dims: int = 2) -> None:
    """Register operations on the last dims of stacks of arrays."""

    def rule(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        _check_no_sum(eqn, operands)
        stacks = []
        for x in operands:
            keep = len(x.dims) - dims
            _check_local(x, range(max(keep, 0), len(x.dims)), f"`{eqn.primitive.name}` combines examples")
            stacks.append(Value(x.dims[: max(keep, 0)]))
        rank = max(len(x.dims) for x in stacks)
        lead = _join([x for x in stacks if len(x.dims) == rank])
        return [
            Value((*lead, *(dim_of(size, VARYING) for size in out.aval.shape[rank:]))) for out in eqn.outvars
        ]  # fmt: skip

    _rule(*names)(rule)


_matrices("cholesky", "lu", "qr", "householder_product", "eigh", "eig", "svd", "schur", "triangular_solve",
          "geqrf", "geqp3")  # fmt: skip
_matrices("lu_pivots_to_permutation", dims=1)


def attention(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """A library's attention kernel, whose arrays with examples are `[B, ...]`."""
    _check_no_sum(eqn, operands)
    first = [x.dims[0] for x in operands if x.examples]
    if any(examples_in(x.dims[1:]) for x in operands) or len(set(first)) != 1:
        raise UndecidedError("attention has examples in other dims than the first")
    shapes = [x.aval.shape for x in eqn.outvars]
    return [
        Value((first[0], *varying(shape[1:]).dims)) if shape[:1] == (size_of(first[0]),) else varying(shape)
        for shape in shapes
    ]


@_rule("fft")
def _fft(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    x, count = operands[0], len(eqn.params["fft_lengths"])
    _check_local(x, range(len(x.dims) - count, len(x.dims)), "a Fourier transform combines examples")
    sizes = eqn.outvars[0].aval.shape[-count:]
    return dataclasses.replace(x, dims=(*x.dims[:-count], *(dim_of(size, VARYING) for size in sizes)))


@_rule("iota")
def _iota(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    dims = tuple(dim_of(size, VARYING if index == dim else UNIFORM) for index, size in enumerate(shape))
    known = None
    if math.prod(shape) <= MAX_KNOWN and is_exact(eqn.params["dtype"]):
        along = [-1 if index == dim else 1 for index in range(len(shape))]
        known = np.broadcast_to(np.arange(shape[dim], dtype=eqn.params["dtype"]).reshape(along), shape)
    return Value(dims, known=known)


@_rule("random_bits", "random_split", "random_fold_in", "random_seed", "random_wrap", "random_unwrap", "threefry2x32",
       "random_gamma", "rng_bit_generator", "rng_uniform", "random_clone")  # fmt: skip
def _random(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Random numbers count as uniform, because examples may receive them in any order."""
    if any(x.depends for x in operands):
        raise UndecidedError("a random key depends on the batch")
    return [Value(tuple(dim_of(size, UNIFORM) for size in x.aval.shape), is_random=True) for x in eqn.outvars]


# ---- Calls and loops -------------------------------------------------------------------------------------------------


def call(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """A call of an inner jaxpr."""
    inner = list(core.jaxprs_in_params(eqn.params))
    bodies = [x for x in eqn.params.values() if hasattr(x, "consts") and hasattr(x, "jaxpr")] or inner
    if not bodies or len(getattr(bodies[0], "jaxpr", bodies[0]).invars) != len(operands):
        raise UndecidedError(f"the operation `{eqn.primitive.name}` is not known to the analysis")
    out = flow.inner(bodies[0], operands)
    if len(out) != len(eqn.outvars):
        raise UndecidedError(f"the operation `{eqn.primitive.name}` is not known to the analysis")
    return out


for _name in ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_lin",
              "remat", "named_call"):  # fmt: skip
    RULES[_name] = call


@_rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def custom_vjp(flow: Flow, eqn: core.JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """A function with a backward pass of its own, which may combine examples as well."""
    out = call(flow, eqn, operands)
    if flow.checks_backward and not any(x.combined for x in out):
        _check_backward(flow, eqn, operands, out)
    return out


def _check_backward(flow: Flow, eqn: Any, operands: Sequence[Value], out: Sequence[Value]) -> None:
    """Check that the backward pass of a `jax.custom_vjp` does not combine examples."""
    args, results = ([jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in xs] for xs in (eqn.invars, eqn.outvars))
    ins, outs = ([i for i, x in enumerate(xs) if jax.numpy.issubdtype(x.dtype, np.inexact)] for xs in (args, results))

    def grads(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def function(*floats: Any) -> Any:
            all_args = list(args)
            for i, x in zip(ins, floats, strict=True):
                all_args[i] = x
            values = eqn.primitive.bind(*all_args, **params)
            return [values[i] for i in outs]

        return jax.vjp(function, *(args[i] for i in ins))[1](list(cotangents))

    try:
        params = eqn.primitive.get_bind_params(eqn.params)
        jaxpr = jax.make_jaxpr(grads)(args, [results[i] for i in outs])
    except Exception:  # some functions can be differentiated in the trace of the loss only
        return
    after = flow.backward().inner(jaxpr, [*operands, *(Value(out[i].dims) for i in outs)])
    for i, grad in zip(ins, after, strict=True):
        if grad.combined is not None and grad.combined.kind == "dependent":
            raise MixedExamplesError(f"in the backward pass of a custom_vjp, {grad.combined.why}")
        if grad.is_sum and operands[i].examples:
            raise MixedExamplesError("in the backward pass of a custom_vjp, each example receives a sum over all")


@_rule("shard_map")
def _shard_map(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    mesh = eqn.params["mesh"]
    if any(mesh.shape[axis] > 1 for axis in eqn.params.get("manual_axes", mesh.axis_names)):
        raise UndecidedError("a shard_map may communicate between examples")
    return call(flow, eqn, operands)


@_rule("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all",
       "ppermute", "psum2", "pbroadcast")  # fmt: skip
def _collective(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Collectives over axes of size 1, because larger axes are refused at the `shard_map`."""
    shapes = [x.aval.shape for x in eqn.outvars]
    return [dataclasses.replace(x, dims=reshaped(x.dims, shape)) for x, shape in zip(operands, shapes, strict=True)]


@_rule("axis_index")
def _axis_index(flow: Flow, eqn: Any, operands: Sequence[Value]) -> Value:
    return varying(())


@_rule("cond")
def _branches(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    index, *args = operands
    if index.depends:
        raise MixedExamplesError("a conditional depends on the examples")
    results = [flow.inner(branch, args) for branch in eqn.params["branches"]]
    return [_either(values) for values in zip(*results, strict=True)]


def _either(values: Sequence[Value]) -> Value:
    """Return a description that is valid for all values."""
    combined = next((x.combined for x in values if x.combined is not None), None)
    if combined is not None:
        return Value(varying([size_of(dim) for dim in values[0].dims]).dims, combined=combined)
    dims = tuple(ft for ft in (_both(list(pair)) for pair in zip(*(x.dims for x in values), strict=True)))
    return dataclasses.replace(_common(values), dims=dims)


def _both(dims: list[Dim]) -> Dim:
    first = dims[0]
    for dim in dims[1:]:
        first = joined(first, dim)
    return first


@_rule("custom_linear_solve")
def _linear_solve(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    counts, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    before = counts.matvec + counts.vecmat
    consts, num_consts = operands[before : before + counts.solve], sum(counts)
    return flow.inner(solve, [*consts, *operands[num_consts:]])


@_rule("scan")
def _scan(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    body = closed.jaxpr
    # Stacked inputs and outputs have an extra leading dim outside the loop. jax versions differ in the scan's params.
    num_carry, num_before = (
        sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.outvars, body.outvars), (eqn.invars, body.invars))
    )
    num_consts = num_before - num_carry
    consts, carry, stacked = operands[:num_consts], operands[num_consts:num_before], operands[num_before:]
    if any(examples_in(x.dims[:1]) for x in stacked):
        if num_carry:
            raise UndecidedError("a scan runs over the examples")
        # Without a carry, as in `lax.map`, the loop is a vmap.
        in_axes = [None] * num_consts + [0] * len(stacked)
        body_fn = jax.vmap(core.jaxpr_as_fun(closed), in_axes=in_axes, axis_size=length)
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
        return flow.inner(jax.make_jaxpr(body_fn)(*shapes), operands)
    xs = [dataclasses.replace(x, dims=x.dims[1:], known=None, columns=()) for x in stacked]
    flow.runs *= max(length, 1)
    carry, out = _fixed_point(carry, lambda carry: flow.inner(closed, [*consts, *carry, *xs]))
    flow.runs //= max(length, 1)
    ys = [dataclasses.replace(y, dims=(dim_of(length, VARYING), *y.dims), known=None) for y in out[num_carry:]]
    return [*carry, *ys]


@_rule("while")
def _while(flow: Flow, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    params = eqn.params
    count, more = params["cond_nconsts"], params["body_nconsts"]
    condition, body, carry = operands[:count], operands[count : count + more], operands[count + more :]
    carry, _ = _fixed_point(carry, lambda carry: flow.inner(params["body_jaxpr"], [*body, *carry]))
    (goes_on,) = flow.inner(params["cond_jaxpr"], [*condition, *carry])
    # A loop under `vmap` has a condition per example.
    if goes_on.depends and (not goes_on.dims or goes_on.combined or goes_on.is_sum):
        raise MixedExamplesError("the number of iterations of a loop depends on the examples")
    return list(carry)


def _fixed_point(
    carry: Sequence[Value], run: Callable[[Sequence[Value]], list[Value]]
) -> tuple[list[Value], list[Value]]:
    """Return values of a loop's carry that are valid in all iterations, and the results of the body."""
    carry = [dataclasses.replace(x, known=None, columns=()) for x in carry]
    for _ in range(8):  # each value can change a few times only
        out = run(carry)
        after = [_loop_value(old, new) for old, new in zip(carry, out, strict=False)]
        if after == carry:
            return after, out
        carry = after
    raise UndecidedError("the carry of a loop changes its form in each iteration")


def _loop_value(old: Value, new: Value) -> Value:
    if old.combined is not None:
        return old
    return dataclasses.replace(_either([old, new]), known=None, columns=())
