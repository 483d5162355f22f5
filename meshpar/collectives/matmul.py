"""Matmuls that talk while they compute: rows gathered on the way in, sums scattered on the way out.

N ranks in a ring that is used both ways at once: half of everybody's rows goes round one way, half the other. A block
of the product is computed from what is here while the next message is under way.

Each kernel is the other one's transpose. The derivatives are written out (`jax.custom_vjp`), so that the gradient of a
weight is one matmul over all rows: with one for each block, every sum over other mesh axes, which XLA puts right behind
the matmul, would be sent N times.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Num

from meshpar.collectives.kernel_checks import Axis, check_cut, ranks_of
from meshpar.collectives.wire import pass_on, varying_alike
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.types import is_whole, problem

Weight: TypeAlias = Num[Array, "E ..."]
"""A rank's part of a weight; its first dim is contracted."""


def all_gather_matmul(
    x: Num[Array, "*rows E"],
    weights: Weight | Sequence[Weight],
    *,
    axis: Axis,
    dim: int = -2,
    weight_grad_dtype: jax.typing.DTypeLike | None = None,
) -> Num[Array, "*all_rows *out"] | tuple[Num[Array, "*all_rows *out"], ...]:
    """The rows of all ranks, times this rank's columns of a weight; several weights share the one gather.

        [T_X, E] @ [E, M_X] -> [T, M_X]
        per device [t, E] @ [E, m] -> [N t, m]
        N-1 steps, (N-1)/N n bytes sent, n the gathered rows; half of it each way round

    Backward is `matmul_reduce_scatter` of the cotangents, and in the same steps the rows go round once more for the
    gradients of the weights: 2(N-1)/N n bytes sent, however many weights there are. Only the rank's own rows are kept
    in between, which is what splitting the sequence is for (Korthikanti et al. 2022, "Reducing Activation Recomputation
    in Large Transformer Models"). A block is one matmul over all of E, which bfloat16 operands sum in float32.

    Args:
      x: this rank's rows, with any dims before and after the one that is gathered; the last is contracted.
      weights: one, or a tuple of them, contracted over the first dim; any number of dims.
      axis: mesh axis, or several as one.
      dim: the dim of x that is gathered, not the last.
      weight_grad_dtype: dtype in which the gradient of a weight is formed, before it is cast to the weight's. None:
        the weight's own, and float32 at the least.

    Returns:
      a product for each weight, in a tuple if they came in one.

    Raises:
      ValueError: no such axis here, or dim; shapes or dtypes that do not go together.
    """
    kernel = "all_gather_matmul"
    num_ranks = ranks_of(kernel, axis)
    is_one = not isinstance(weights, tuple | list)
    x, *each = varying_alike(axis, x, *([weights] if is_one else weights))
    _check_operands(kernel, x, each, [(x.shape[-1:], w.shape[:1]) for w in each])
    plan = _MatmulPlan(axis, num_ranks, _checked_rows(kernel, dim, x.ndim), 1, weight_grad_dtype)
    with jax.named_scope(kernel):
        products = _gather_matmul(plan, x, tuple(each))
    return products[0] if is_one else products


def matmul_reduce_scatter(
    h: Num[Array, "*rows_and_inner"],
    weight: Num[Array, "*inner E"],
    *,
    axis: Axis,
    dim: int = -2,
    weight_grad_dtype: jax.typing.DTypeLike | None = None,
) -> Num[Array, "*own_rows E"]:
    """This rank's columns times its rows of a weight, summed over the ranks; every rank gets some rows of the sum.

        [T, M_X] @ [M_X, E] {partial over X} -> [T_X, E]
        per device [T, m] @ [m, E] -> [T/N, E]
        N-1 steps, (N-1)/N n bytes sent, n the sum before scattering; half of it each way round

    Backward is `all_gather_matmul` of the cotangent, with the same bytes; what it gathers serves the weight's gradient,
    too. Products and sums are taken in float32 at the least, and rounded to the operands' dtype for each message.

    Args:
      h: all rows; its last dims are contracted with all of the weight's but the last.
      weight: any number of dims.
      axis: mesh axis, or several as one.
      dim: the dim of the result that is scattered, not the last. It has to divide by N.
      weight_grad_dtype: as for `all_gather_matmul`.

    Raises:
      ValueError: no such axis here, or dim; a dim that does not divide by N; shapes or dtypes that do not go together.
    """
    kernel = "matmul_reduce_scatter"
    num_ranks = ranks_of(kernel, axis)
    h, weight = varying_alike(axis, h, weight)
    num_inner = max(weight.ndim - 1, 0)
    _check_operands(kernel, h, [weight], [(h.shape[max(h.ndim - num_inner, 0) :], weight.shape[:-1])])
    dim = _checked_rows(kernel, dim, h.ndim - num_inner + 1)
    check_cut(kernel, h.shape[dim], dim, num_ranks, tiled=True)
    plan = _MatmulPlan(axis, num_ranks, dim, num_inner, weight_grad_dtype)
    with jax.named_scope(kernel):
        return _matmul_scatter(plan, h, weight)


# ---- The kernels with their derivatives ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _MatmulPlan:
    """A kernel's arguments."""

    axis: Axis
    num_ranks: int
    dim: int
    num_inner: int
    """Dims that are contracted: the first ones of a weight, the last ones of what it multiplies."""
    weight_grad_dtype: jax.typing.DTypeLike | None


# The forward rules call the kernel as it is called from outside, not what is in it: a remat policy that keeps results
# of matmuls would find the blocks otherwise, and N partial sums are N times what their sum takes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_matmul(plan: _MatmulPlan, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    whole = [_whole(w) for w in weights]
    (products,) = _turned(plan, _gathering(plan, x, lambda rows: [_times(plan, rows, w, x.dtype) for w in whole]))
    return tuple(products)


def _gather_matmul_backward(plan: _MatmulPlan, saved: tuple, grads: tuple[jax.Array, ...]) -> tuple:
    x, weights = saved
    wide, whole = _wide(x.dtype), [_whole(w) for w in weights]

    def term(grads: list[jax.Array]) -> jax.Array:
        pairs = zip(grads, whole, strict=True)
        return functools.reduce(lax.add, [_times_transposed(plan, g, w, wide) for g, w in pairs])

    with jax.named_scope("all_gather_matmul"):
        d_x, (all_x,) = _turned(plan, _scattering(plan, grads, term, x.dtype), _gathering(plan, x))
        return d_x, tuple(_weight_grad(plan, all_x, g, w) for g, w in zip(grads, weights, strict=True))


_gather_matmul.defvjp(lambda *args: (_gather_matmul(*args), args[1:]), _gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_scatter(plan: _MatmulPlan, h: jax.Array, weight: jax.Array) -> jax.Array:
    wide, whole = _wide(h.dtype), _whole(weight)
    return _turned(plan, _scattering(plan, (h,), lambda rows: _times(plan, rows[0], whole, wide), h.dtype))[0]


def _matmul_scatter_backward(plan: _MatmulPlan, saved: tuple, grad: jax.Array) -> tuple:
    h, weight = saved
    whole = _whole(weight)

    def product(rows: jax.Array) -> list[jax.Array]:
        return [_times_transposed(plan, rows, whole, h.dtype), rows]

    with jax.named_scope("matmul_reduce_scatter"):
        ((d_h, all_grad),) = _turned(plan, _gathering(plan, grad, product))
        return d_h, _weight_grad(plan, h, all_grad, weight)


_matmul_scatter.defvjp(lambda *args: (_matmul_scatter(*args), args[1:]), _matmul_scatter_backward)


# ---------------------------------------------------------------------------------------------------------------------
# The rings. Rows go round in two lanes: the first half of each rank's from rank r to r + 1, the second half to r - 1.
# At step T a lane of stride s brings what has to do with rank r - s T.
#
# They are loops because XLA schedules each turn for itself: unrolled, all messages are sent first. Inside a turn, XLA's
# GPU scheduler has one message under way at a time by default, and hands all work it can to one of them. So
# the data depend on each other in such a way that there is a matmul for either.
# ---------------------------------------------------------------------------------------------------------------------

STRIDES = (1, -1)


class _MatmulRing(NamedTuple):
    """What goes round: before the first step, at step T from 1 to N-1, and what is made of it after the last."""

    held: Any
    step: Callable[[jax.Array, Any], Any]
    end: Callable[[Any], Any]


def _turned(plan: _MatmulPlan, *rings: _MatmulRing) -> list[Any]:
    """The rings' results, turned in one loop: loops of their own would run one after the other."""

    def step(T: jax.Array, held: list[Any]) -> list[Any]:
        return [ring.step(T, one) for ring, one in zip(rings, held, strict=True)]

    held = lax.fori_loop(1, plan.num_ranks, step, [ring.held for ring in rings])
    return [ring.end(one) for ring, one in zip(rings, held, strict=True)]


def _gathering(
    plan: _MatmulPlan, own: jax.Array, product: Callable[[jax.Array], list[jax.Array]] | None = None
) -> _MatmulRing:
    """The rows of all ranks in order, or products of them: each is made while the other lane's rows are under way."""
    rank, size = lax.axis_index(plan.axis), own.shape[plan.dim]
    offsets = _offsets(size)

    def made(rows: jax.Array) -> list[jax.Array]:
        return [rows] if product is None else product(rows)

    def room(block: jax.ShapeDtypeStruct) -> jax.Array:
        shape = (*block.shape[: plan.dim], plan.num_ranks * size, *block.shape[plan.dim + 1 :])
        return varying_alike(plan.axis, lax.empty(shape, block.dtype), own)[0]

    def put(whole: list[jax.Array], blocks: list[jax.Array], T: jax.Array | int, lane: int) -> list[jax.Array]:
        start = (rank - STRIDES[lane] * T) % plan.num_ranks * size + offsets[lane]
        return [
            lax.dynamic_update_slice_in_dim(all_rows, block, start, plan.dim)
            for all_rows, block in zip(whole, blocks, strict=True)
        ]

    def step(T: jax.Array, held: tuple[list[jax.Array], list[jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
        (first, *second), whole = held
        arrived = [pass_on(first, plan.axis, STRIDES[0], plan.num_ranks)]
        blocks: list[jax.Array] = []
        for rows in second:  # of the step before: computed while the first lane is under way
            blocks = made(rows)
            whole = put(whole, blocks, T - 1, 1)
            outgoing = rows if product is None else _held_back(plan, rows, blocks)
            arrived.append(pass_on(outgoing, plan.axis, STRIDES[1], plan.num_ranks))
        # While the second lane is under way.
        return arrived, put(whole, made(_after(arrived[0], blocks)), T, 0)

    def end(held: tuple[list[jax.Array], list[jax.Array]]) -> list[jax.Array]:
        (_, *second), whole = held
        return put(whole, made(second[0]), plan.num_ranks - 1, 1) if second else whole

    lanes = jnp.split(own, offsets[1:], axis=plan.dim)
    whole = [room(block) for block in jax.eval_shape(made, own)]
    return _MatmulRing((lanes, put(whole, made(lanes[0]), 0, 0)), step, end)


def _scattering(
    plan: _MatmulPlan,
    operands: Sequence[jax.Array],
    term: Callable[[list[jax.Array]], jax.Array],
    dtype: jax.typing.DTypeLike,
) -> _MatmulRing:
    """The sum over ranks of a term for each rank, made of that rank's rows of the operands; at that rank.

    Each rank computes its term while the sum of those before it is under way.
    """
    rank, size = lax.axis_index(plan.axis), operands[0].shape[plan.dim] // plan.num_ranks
    offsets = _offsets(size)
    ends = [*offsets[1:], size]

    def mine(T: jax.Array | int, lane: int, done: list[jax.Array]) -> jax.Array:
        start = _after((rank - STRIDES[lane] * T) % plan.num_ranks * size + offsets[lane], done)
        length = ends[lane] - offsets[lane]
        return term([lax.dynamic_slice_in_dim(one, start, length, plan.dim) for one in operands])

    def first() -> list[jax.Array]:
        sums: list[jax.Array] = []
        for lane in range(len(offsets)):
            sums.append(mine(1, lane, sums).astype(dtype))
        return sums

    def step(T: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        added: list[jax.Array] = []
        for lane, so_far in enumerate(sums):
            outgoing = _held_back(plan, so_far, added) if added else so_far
            arrived = pass_on(outgoing, plan.axis, STRIDES[lane], plan.num_ranks)
            here = mine(T + 1, lane, added)  # while the sum of those before is under way
            added.append((arrived.astype(here.dtype) + here).astype(dtype))
        return added

    return _MatmulRing(first(), step, lambda sums: jnp.concatenate(sums, axis=plan.dim))


def _offsets(size: int) -> list[int]:
    """Where lanes begin among so many rows; a single row has one lane."""
    return [0, -(-size // 2)] if size > 1 else [0]


def _after(x: jax.Array, done: list[jax.Array]) -> jax.Array:
    """`x`, but not before something is done, as far as optimizations go: XLA merges blocks that could run at once."""
    return lax.optimization_barrier((x, done))[0]


def _held_back(plan: _MatmulPlan, rows: jax.Array, blocks: list[jax.Array]) -> jax.Array:
    """The rows, but not before a product is there. XLA drops barriers before it schedules, and cannot see through this.

    Nothing is greater than infinity, NaN included. One column is looked at, and all dims of the rows but the one that
    goes round: XLA may have split them.
    """
    block = blocks[0]
    if not block.size or not jnp.issubdtype(block.dtype, jnp.floating):
        return rows
    lead = rows.ndim - 1
    limits = [1 if dim >= lead or dim == plan.dim else size for dim, size in enumerate(block.shape)]
    column = lax.slice(block, [0] * block.ndim, limits).reshape(*limits[:lead], 1)
    return jnp.where(column > jnp.asarray(jnp.inf, column.dtype), jnp.zeros_like(rows), rows)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _times(plan: _MatmulPlan, rows: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`[*rows, *inner] @ [*inner, *out]`."""
    inner = range(plan.num_inner)
    contracted = tuple(rows.ndim - plan.num_inner + dim for dim in inner), tuple(inner)
    return lax.dot_general(rows, weight, (contracted, ((), ())), preferred_element_type=dtype)


def _times_transposed(plan: _MatmulPlan, rows: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`[*rows, *out] @ [*inner, *out]ᵀ`."""
    outer = range(plan.num_inner, weight.ndim)
    contracted = tuple(rows.ndim - weight.ndim + dim for dim in outer), tuple(outer)
    return lax.dot_general(rows, weight, (contracted, ((), ())), preferred_element_type=dtype)


def _whole(weight: jax.Array) -> jax.Array:
    """The weight, gathered by XLA over axes that are still its own to split (FSDP's): once, and not at every turn.

    Not part of what is kept for the backward pass, which gathers it again.
    """
    return with_layout(weight, PartitionSpec(*[None] * weight.ndim))


def _weight_grad(plan: _MatmulPlan, rows: jax.Array, grads: jax.Array, weight: jax.Array) -> jax.Array:
    """`[*rows, *inner]ᵀ @ [*rows, *out]` in one matmul."""
    lead = tuple(range(rows.ndim - plan.num_inner))
    dtype = plan.weight_grad_dtype or _wide(weight.dtype)
    grad = lax.dot_general(rows, grads, ((lead, lead), ((), ())), preferred_element_type=dtype)
    return grad.astype(weight.dtype)


def _wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What sums are kept in: float32 for narrower floats."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else jnp.dtype(dtype)


def _checked_rows(kernel: str, dim: int, num_dims: int) -> int:
    if not is_whole(dim, -num_dims) or dim >= num_dims - 1 or dim == -1:
        exists = f"there are {num_dims} dims, and the last is no row" if num_dims else "it is a scalar"
        fix = f"give one of 0 to {num_dims - 2}" if num_dims > 1 else "give a matrix"
        raise problem(kernel, f"split the rows along dim {dim!r}", exists, fix)
    return dim % num_dims


def _check_operands(
    kernel: str, rows: jax.Array, weights: Sequence[jax.Array], contracted: Sequence[tuple[tuple, tuple]]
) -> None:
    if not weights:
        raise problem(kernel, "multiply with no weights", "there is nothing to compute", "give one or more")
    for weight, (dims, weight_dims) in zip(weights, contracted, strict=True):
        if dims != weight_dims or not weight_dims:
            exists = f"the dims that would be contracted are {dims} and {weight_dims}"
            fix = "give every rank its own part of both, cut along the same dims"
            raise problem(kernel, f"multiply {rows.shape} with a weight of {weight.shape}", exists, fix)
        if 0 in dims:
            fix = "leave it out: the product is zeros"
            raise problem(kernel, f"contract over dims of sizes {dims}", "there is nothing to sum", fix)
        if rows.dtype != weight.dtype:
            asked = f"multiply {rows.dtype} with a weight of {weight.dtype}"
            fix = f"cast the weight to {rows.dtype}, or the other to {weight.dtype}"
            raise problem(kernel, asked, "both travel and multiply in one dtype", fix)
