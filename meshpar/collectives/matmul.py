"""Matmuls that overlap with their communication, for sequence-sharded tensor parallelism.

N ranks form a ring that is used in both directions: the first half of each rank's rows is passed one way, the second
half the other way. Each half is a lane. A block of the product is computed from the rows received last while the next
rows are sent.

The two kernels are transposes of each other. Their derivatives are written out (`jax.custom_vjp`) to compute the
gradient of a weight in a single matmul over all rows. With a matmul per block, XLA would place an all-reduce over other
mesh axes after each block, and send the gradient N times.

"Rows" are the dims of an operand that are not contracted; T is all rows along the sharded dim and t = T/N the local
ones. E and M are the dims of a weight, m = M/N. The references are the functions of the same name in `reference.py`.

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

from meshpar.collectives.kernel_checks import Axis, check_index, check_parts, ranks_of
from meshpar.collectives.wire import send_on_ring, varying_alike
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.errors import check_cases

Weight: TypeAlias = Num[Array, "E ..."]
"""The local part of a weight, whose first dim is contracted."""


def all_gather_matmul(
    x: Num[Array, "*rows E"],
    weights: Weight | Sequence[Weight],
    *,
    axis: Axis,
    dim: int = -2,
    weight_grad_dtype: jax.typing.DTypeLike | None = None,
) -> Num[Array, "*all_rows *out"] | tuple[Num[Array, "*all_rows *out"], ...]:
    """Multiply the rows of all ranks with the local columns of weights; the reference is `reference.all_gather_matmul`.

        [T_X, E] @ [E, M_X] -> [T, M_X]
        per device [t, E] @ [E, m] -> [T, m]
        N-1 steps, (N-1)/N n bytes sent, n the gathered rows; half in each direction

    All weights share the all-gather. The backward pass is `matmul_reduce_scatter` of the cotangents. In the same
    steps the rows are gathered again for the weight gradients: 2(N-1)/N n bytes sent, for any number of weights. Only
    the local rows are saved, which is the purpose of sharding the sequence (Korthikanti et al. 2022, "Reducing
    Activation Recomputation in Large Transformer Models"). Each block is a matmul over E, summed in float32 for
    bfloat16 operands.

    Args:
      x: local rows. The last dim is contracted.
      weights: a weight, or a tuple of weights, with any number of output dims.
      axis: see `shift`.
      dim: the dim of x that is gathered, not the last.
      weight_grad_dtype: dtype of the matmul of a weight gradient, before the cast to the dtype of the weight. The
        default is the dtype of the weight, but at least float32.

    Returns:
      The product, or a tuple of products if `weights` is a tuple.

    Raises:
      MeshparError: the axis or dim is unknown, or shapes or dtypes do not match.
    """
    kernel = "all_gather_matmul"
    num_ranks = ranks_of(kernel, axis)
    is_single = not isinstance(weights, tuple | list)
    x, *operands = varying_alike(axis, x, *([weights] if is_single else weights))
    _check_operands(kernel, x, operands, [(x.shape[-1:], w.shape[:1]) for w in operands])
    _check_row_dim(kernel, dim, x.ndim)
    plan = _MatmulPlan(axis, num_ranks, dim % x.ndim, 1, weight_grad_dtype)
    with jax.named_scope(kernel):
        products = _gather_matmul(plan, x, tuple(operands))
    return products[0] if is_single else products


def matmul_reduce_scatter(
    h: Num[Array, "*rows_and_inner"],
    weight: Num[Array, "*inner E"],
    *,
    axis: Axis,
    dim: int = -2,
    weight_grad_dtype: jax.typing.DTypeLike | None = None,
) -> Num[Array, "*own_rows E"]:
    """Multiply and reduce-scatter the rows of the product; the reference is `reference.matmul_reduce_scatter`.

        [T, M_X] @ [M_X, E] -> [T_X, E]
        per device [T, m] @ [m, E] -> [t, E]
        N-1 steps, (N-1)/N n bytes sent, n the unreduced product; half in each direction

    The backward pass is `all_gather_matmul` of the cotangent, with the same bytes. The gathered cotangent is also used
    for the weight gradient. Products and sums are at least float32, and rounded to the dtype of h for each message.

    Args:
      h: all rows. The last dims are contracted with all dims of the weight but the last.
      weight: local part of the weight, with any number of contracted dims.
      axis, weight_grad_dtype: see `all_gather_matmul`.
      dim: the dim of the result that is scattered, not the last. Its size must be divisible by N.

    Raises:
      MeshparError: the axis or dim is unknown, the dim is not divisible by N, or shapes or dtypes do not match.
    """
    kernel = "matmul_reduce_scatter"
    num_ranks = ranks_of(kernel, axis)
    h, weight = varying_alike(axis, h, weight)
    num_inner = max(weight.ndim - 1, 0)
    _check_operands(kernel, h, [weight], [(h.shape[max(h.ndim - num_inner, 0) :], weight.shape[:-1])])
    num_dims = h.ndim - num_inner + 1
    _check_row_dim(kernel, dim, num_dims)
    dim %= num_dims
    check_parts(kernel, h.shape[dim], dim, num_ranks, tiled=True)
    plan = _MatmulPlan(axis, num_ranks, dim, num_inner, weight_grad_dtype)
    with jax.named_scope(kernel):
        return _matmul_scatter(plan, h, weight)


# ---- The kernels with their derivatives ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _MatmulPlan:
    """Static arguments of the kernels."""

    axis: Axis
    num_ranks: int
    dim: int
    num_inner: int
    """Number of contracted dims: the first dims of a weight, and the last dims of the other operand."""
    weight_grad_dtype: jax.typing.DTypeLike | None


# The forward rules call the custom_vjp functions and not their bodies. Otherwise a remat policy that saves matmuls
# would save the N partial sums of the blocks, which need N times the memory of their sum.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_matmul(plan: _MatmulPlan, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    full = [_unsharded(w) for w in weights]
    (products,) = _run(plan, _gather_ring(plan, x, lambda rows: [_times(plan, rows, w, x.dtype) for w in full]))
    return tuple(products)


def _gather_matmul_backward(plan: _MatmulPlan, saved: tuple, grads: tuple[jax.Array, ...]) -> tuple:
    x, weights = saved
    dtype, full = _accumulation_dtype(x.dtype), [_unsharded(w) for w in weights]

    def term(grads: list[jax.Array]) -> jax.Array:
        pairs = zip(grads, full, strict=True)
        return functools.reduce(lax.add, [_times(plan, g, w, dtype, transposed=True) for g, w in pairs])

    with jax.named_scope("all_gather_matmul"):
        d_x, (all_x,) = _run(plan, _scatter_ring(plan, grads, term, x.dtype), _gather_ring(plan, x))
        return d_x, tuple(_weight_grad(plan, all_x, g, w) for g, w in zip(grads, weights, strict=True))


_gather_matmul.defvjp(lambda *args: (_gather_matmul(*args), args[1:]), _gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_scatter(plan: _MatmulPlan, h: jax.Array, weight: jax.Array) -> jax.Array:
    dtype, full = _accumulation_dtype(h.dtype), _unsharded(weight)
    return _run(plan, _scatter_ring(plan, (h,), lambda rows: _times(plan, rows[0], full, dtype), h.dtype))[0]


def _matmul_scatter_backward(plan: _MatmulPlan, saved: tuple, grad: jax.Array) -> tuple:
    h, weight = saved
    full = _unsharded(weight)

    def product(rows: jax.Array) -> list[jax.Array]:
        return [_times(plan, rows, full, h.dtype, transposed=True), rows]

    with jax.named_scope("matmul_reduce_scatter"):
        ((d_h, all_grad),) = _run(plan, _gather_ring(plan, grad, product))
        return d_h, _weight_grad(plan, h, all_grad, weight)


_matmul_scatter.defvjp(lambda *args: (_matmul_scatter(*args), args[1:]), _matmul_scatter_backward)


# ---------------------------------------------------------------------------------------------------------------------
# The rings. Rows are sent in two lanes: the first half of the rows of rank r to rank r + 1, the second half to r - 1.
# In step T a lane of stride s receives data of, or for, rank r - s T.
#
# The steps form a loop because XLA schedules each iteration of a loop separately. If they were unrolled, all messages
# would be sent first. Within an iteration XLA's GPU scheduler by default sends a single message at a time, and may
# overlap all work with the same message. The data dependences below leave a matmul for each of the two messages.
# ---------------------------------------------------------------------------------------------------------------------

STRIDES = (1, -1)


class _MatmulRing(NamedTuple):
    """A ring algorithm as the parts of a loop over steps 1 to N-1."""

    init: Any
    """Carry before step 1."""
    step: Callable[[jax.Array, Any], Any]
    """(step, carry) -> next carry."""
    end: Callable[[Any], Any]
    """Last carry -> result."""


def _run(plan: _MatmulPlan, *rings: _MatmulRing) -> list[Any]:
    """Run rings in a common loop and return their results. Separate loops would run sequentially."""

    def step(T: jax.Array, carries: list[Any]) -> list[Any]:
        return [ring.step(T, carry) for ring, carry in zip(rings, carries, strict=True)]

    carries = lax.fori_loop(1, plan.num_ranks, step, [ring.init for ring in rings])
    return [ring.end(carry) for ring, carry in zip(rings, carries, strict=True)]


def _gather_ring(
    plan: _MatmulPlan, local: jax.Array, product: Callable[[jax.Array], list[jax.Array]] | None = None
) -> _MatmulRing:
    """Return a ring that gathers rows, or `product(rows)`, in the order of the ranks.

    Each half of the rows (a lane) is multiplied while the other half is sent.
    """
    rank, size = lax.axis_index(plan.axis), local.shape[plan.dim]
    offsets = _lane_offsets(size)

    def compute(rows: jax.Array) -> list[jax.Array]:
        return [rows] if product is None else product(rows)

    def empty(block: jax.ShapeDtypeStruct) -> jax.Array:
        shape = (*block.shape[: plan.dim], plan.num_ranks * size, *block.shape[plan.dim + 1 :])
        return varying_alike(plan.axis, lax.empty(shape, block.dtype), local)[0]

    def put(outputs: list[jax.Array], blocks: list[jax.Array], T: jax.Array | int, lane: int) -> list[jax.Array]:
        start = (rank - STRIDES[lane] * T) % plan.num_ranks * size + offsets[lane]
        return [
            lax.dynamic_update_slice_in_dim(output, block, start, plan.dim)
            for output, block in zip(outputs, blocks, strict=True)
        ]

    def step(T: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
        (first, *second), outputs = carry
        arrived = [send_on_ring(first, plan.axis, STRIDES[0], plan.num_ranks)]
        blocks: list[jax.Array] = []
        for rows in second:
            # The second lane's product of the previous step overlaps with the message of the first lane.
            blocks = compute(rows)
            outputs = put(outputs, blocks, T - 1, 1)
            outgoing = rows if product is None else _send_after(plan, rows, blocks)
            arrived.append(send_on_ring(outgoing, plan.axis, STRIDES[1], plan.num_ranks))
        # The first lane's product overlaps with the message of the second lane.
        return arrived, put(outputs, compute(_after(arrived[0], blocks)), T, 0)

    def end(carry: tuple[list[jax.Array], list[jax.Array]]) -> list[jax.Array]:
        (_, *second), outputs = carry
        return put(outputs, compute(second[0]), plan.num_ranks - 1, 1) if second else outputs

    lanes = jnp.split(local, offsets[1:], axis=plan.dim)
    outputs = [empty(block) for block in jax.eval_shape(compute, local)]
    return _MatmulRing((lanes, put(outputs, compute(lanes[0]), 0, 0)), step, end)


def _scatter_ring(
    plan: _MatmulPlan,
    operands: Sequence[jax.Array],
    term: Callable[[list[jax.Array]], jax.Array],
    dtype: jax.typing.DTypeLike,
) -> _MatmulRing:
    """Return a ring that reduce-scatters `term(rows of the operands)` over the ranks.

    Each rank computes its term while it receives the partial sum of the ranks before it.
    """
    rank, size = lax.axis_index(plan.axis), operands[0].shape[plan.dim] // plan.num_ranks
    offsets = _lane_offsets(size)
    ends = [*offsets[1:], size]

    def local_term(T: jax.Array | int, lane: int, previous: list[jax.Array]) -> jax.Array:
        start = _after((rank - STRIDES[lane] * T) % plan.num_ranks * size + offsets[lane], previous)
        length = ends[lane] - offsets[lane]
        return term([lax.dynamic_slice_in_dim(x, start, length, plan.dim) for x in operands])

    def init() -> list[jax.Array]:
        sums: list[jax.Array] = []
        for lane in range(len(offsets)):
            sums.append(local_term(1, lane, sums).astype(dtype))
        return sums

    def step(T: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        new_sums: list[jax.Array] = []
        for lane, partial in enumerate(sums):
            outgoing = _send_after(plan, partial, new_sums) if new_sums else partial
            arrived = send_on_ring(outgoing, plan.axis, STRIDES[lane], plan.num_ranks)
            local = local_term(T + 1, lane, new_sums)  # overlaps with the message
            new_sums.append((arrived.astype(local.dtype) + local).astype(dtype))
        return new_sums

    return _MatmulRing(init(), step, lambda sums: jnp.concatenate(sums, axis=plan.dim))


def _lane_offsets(size: int) -> list[int]:
    """Return the index of the first row of each half of the rows. A single row is not halved."""
    return [0, -(-size // 2)] if size > 1 else [0]


def _after(x: jax.Array, previous: list[jax.Array]) -> jax.Array:
    """Make `x` depend on other arrays during optimization, so that XLA does not merge independent blocks."""
    return lax.optimization_barrier((x, previous))[0]


def _send_after(plan: _MatmulPlan, rows: jax.Array, blocks: list[jax.Array]) -> jax.Array:
    """Make `rows` depend on a matmul's output, so that XLA schedules the message with the rows after the matmul.

    XLA removes optimization barriers before scheduling. The dependence is therefore a `where` with the condition
    "output > infinity". It is never true, but XLA cannot prove that. Only one column of the output is compared. The
    column keeps all row dims except `plan.dim`, because XLA may have sharded them.
    """
    block = blocks[0]
    if not block.size or not jnp.issubdtype(block.dtype, jnp.floating):
        return rows
    lead = rows.ndim - 1
    limits = [1 if dim >= lead or dim == plan.dim else size for dim, size in enumerate(block.shape)]
    column = lax.slice(block, [0] * block.ndim, limits).reshape(*limits[:lead], 1)
    return jnp.where(column > jnp.asarray(jnp.inf, column.dtype), jnp.zeros_like(rows), rows)


# ---- Matmuls and checks ----------------------------------------------------------------------------------------------


def _times(
    plan: _MatmulPlan, rows: jax.Array, weight: jax.Array, dtype: jnp.dtype, *, transposed: bool = False
) -> jax.Array:
    """`[*rows, *inner] @ [*inner, *out]`, or transposed `[*rows, *out] @ [*inner, *out]ᵀ`."""
    dims = range(plan.num_inner, weight.ndim) if transposed else range(plan.num_inner)
    contracted = tuple(range(rows.ndim - len(dims), rows.ndim)), tuple(dims)
    return lax.dot_general(rows, weight, (contracted, ((), ())), preferred_element_type=dtype)


def _unsharded(weight: jax.Array) -> jax.Array:
    """Gather a weight over the axes that XLA controls, such as FSDP's, before the loop and not in each step.

    The gathered weight is not saved, so the backward pass gathers it again.
    """
    return with_layout(weight, PartitionSpec(*[None] * weight.ndim))


def _weight_grad(plan: _MatmulPlan, rows: jax.Array, grads: jax.Array, weight: jax.Array) -> jax.Array:
    """`[*rows, *inner]ᵀ @ [*rows, *out]`."""
    lead = tuple(range(rows.ndim - plan.num_inner))
    dtype = plan.weight_grad_dtype or _accumulation_dtype(weight.dtype)
    grad = lax.dot_general(rows, grads, ((lead, lead), ((), ())), preferred_element_type=dtype)
    return grad.astype(weight.dtype)


def _accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return float32 for lower-precision floats, otherwise the dtype itself."""
    is_low = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_low else jnp.dtype(dtype)


def _check_row_dim(kernel: str, dim: int, num_dims: int) -> None:
    rows = [*range(-num_dims, -1), *range(num_dims - 1)]
    reason = f"there are {num_dims} dims, and the last one does not contain rows"
    check_index(kernel, f"shard the rows along dim {dim!r}", dim, rows, reason)


def _check_operands(
    kernel: str, rows: jax.Array, weights: Sequence[jax.Array], contracted: Sequence[tuple[tuple, tuple]]
) -> None:
    check_cases(kernel, "multiply", "wrong-shape", (not weights, "the tuple of weights is empty", "pass a weight"))
    for weight, (dims, weight_dims) in zip(weights, contracted, strict=True):
        requested = f"multiply {rows.dtype}{list(rows.shape)} with a weight {weight.dtype}{list(weight.shape)}"
        is_wrong, reason = dims != weight_dims or not all(dims or [0]), f"{dims} and {weight_dims} are contracted"
        fix = "use equal, nonempty dims: each rank needs the matching parts of both operands"
        check_cases(kernel, requested, "wrong-shape", (is_wrong, reason, fix))
        fix = f"cast the weight to {rows.dtype}, or the other operand to {weight.dtype}"
        is_wrong, reason = rows.dtype != weight.dtype, "both operands must have the same dtype"
        check_cases(kernel, requested, "wrong-dtype", (is_wrong, reason, fix))
