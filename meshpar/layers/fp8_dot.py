"""Matmuls of activations and a weight whose operands, or gradients, are in dtypes of their own.

`float8_dot`: x ─► scale = max|x| / largest of the format ─► x / scale, rounded ─► product ─► times both scales
`float8_rows_dot`: the same, with a scale for each row of x and each column of the weight
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from meshpar.sharding.types import AnyMesh, axis_sizes

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
Product = Callable[[Any], Array]
"""Dimension numbers -> the product."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def wide_gradient_dot(plain: Any, contracting: Any, batch: Any, reduce: Any, lhs: Array, rhs: Array) -> Array:
    """`plain(lhs, rhs)`, a `lax.dot_general` of these numbers; the weight's gradient leaves its matmul in `reduce`."""
    return plain(lhs, rhs)


def _wide_backward(plain: Any, contracting: Any, batch: Any, reduce: Any, saved: Any, g: Array) -> tuple[Array, Array]:
    lhs, rhs = saved
    (d_lhs,) = jax.vjp(lambda x: plain(x, rhs), lhs)[1](g)

    def product(numbers: Any) -> Array:
        return lax.dot_general(lhs, g, numbers, preferred_element_type=reduce)

    return d_lhs, _weight_gradient(product, lhs, rhs, contracting, batch).astype(rhs.dtype)


wide_gradient_dot.defvjp(lambda plain, _, __, ___, lhs, rhs: (plain(lhs, rhs), (lhs, rhs)), _wide_backward)


class Split(NamedTuple):
    """How a weight is split by axes that split no rows: those of tensor parallelism."""

    mesh: AnyMesh
    axes: tuple[tuple[str, ...], ...]
    """Of each of its dims."""


class Scaled(NamedTuple):
    """An array as `values * scale`."""

    values: Float[Array, ...]
    scale: Float[Array, ...]
    """float32; one number, or such that it goes with the values."""


def scaled(
    x: Float[Array, ...], dtype: Any, scale: Float[Array, ...] | None = None, *, dims: tuple[int, ...] | None = None
) -> Scaled:
    """x in a format of 8 bits.

    Args:
      x: of any shape.
      dtype: `FORWARD` or `GRADIENT`.
      scale: where it is known. None: the one by which the largest |x| becomes the format's largest number.
      dims: over which the largest is taken; None: all, and the scale is one number.
    """
    if scale is None:
        largest = jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None).astype(jnp.float32)
        largest /= jnp.finfo(dtype).max.astype(jnp.float32)
        scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)  # zeros stay zeros, and what is no number stays none
    return Scaled((x.astype(jnp.float32) / scale).astype(dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def fp8_dot_general(
    contracting: Any, batch: Any, reduce: Any, split: Split | None, lhs: Float[Array, ...], rhs: Float[Array, ...]
) -> Float[Array, ...]:
    """`lax.dot_general` of activations and a weight in 8-bit floats, in the weight's dtype.

    Activations and weights are e4m3 and gradients e5m2, each over one scale, by its largest number where it is used
    ("current" or "dynamic" scaling). Of a sharded operand it is that of all shards, for which XLA reduces one number:
    values do not depend on the layout. The backward pass is kept what a plain product keeps, and two scales.

    Args:
      contracting, batch: the dimension numbers, tuples of tuples.
      reduce: dtype in which the weight's gradient leaves its matmul.
      split: of the weight; None: nothing is known.
      lhs, rhs: bfloat16 or wider; the largest product is 448² times the contracted size.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    return _forward(contracting, batch, reduce, split, lhs, rhs)[0]


def _forward(contracting: Any, batch: Any, reduce: Any, split: Any, lhs: Array, rhs: Array) -> tuple[Array, Any]:
    x, w = scaled(lhs, FORWARD), scaled(rhs, FORWARD)
    out = _times(x.values, w.values, (contracting, batch), x.scale * w.scale, rhs.dtype, split)
    return out, (lhs, rhs, x.scale, w.scale)


def _backward(
    contracting: Any, batch: Any, reduce: Any, split: Split | None, saved: Any, g: Array
) -> tuple[Array, Array]:
    lhs, rhs, x_scale, w_scale = saved
    x, w, dy = scaled(lhs, FORWARD, x_scale), scaled(rhs, FORWARD, w_scale), scaled(g, GRADIENT)

    def of_input(numbers: Any) -> Array:
        return _times(dy.values, w.values, numbers, dy.scale * w.scale, lhs.dtype, split)

    def of_weight(numbers: Any) -> Array:
        return _times(x.values, dy.values, numbers, x.scale * dy.scale, reduce, None)

    dims = lhs, rhs, contracting, batch
    return _input_gradient(of_input, *dims), _weight_gradient(of_weight, *dims).astype(rhs.dtype)


fp8_dot_general.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def rowwise_fp8_dot_general(
    contracting: Any, batch: Any, reduce: Any, split: Split | None, lhs: Float[Array, ...], rhs: Float[Array, ...]
) -> Float[Array, ...]:
    """`float8_dot` with one scale for each row of the activations and one for each column of the weight.

        out[t, n] = a_t b_n sum_k x[t, k] w[k, n]          x, w: e4m3; a_t = max_k|.| / 448, b_n likewise
        dx[t, k] = c_t sum_n g[t, n] w[k, n]               g: e4m3, of b_n dy[t, n]; c_t = max_n|.| / 448
        dw[k, n] = sum_t x[t, k] dy[t, n]                  as wide as they came

    So no number of a row costs another row bits, every scale stands outside of its sum, and the weight is rounded once
    for both passes: its scales go over to the output's gradient before that is rounded, which is of e4m3, too, for one
    row needs no wider range. The weight's gradient sums over rows; in 8 bits it would want scales over all tokens of
    all devices, and is what suffers first: it stays wide. Where the contracted dim is split XLA reduces the largest of
    every row, or column, over its axes (`meshpar.parallel.expected.fp8_scales`).

    Source: pytorch/ao, torchao/float8, recipe "rowwise_with_gw_hp", 2025 (its backward has one scale a weight).
    """
    return _rows_forward(contracting, batch, reduce, split, lhs, rhs)[0]


def _rows_forward(contracting: Any, batch: Any, reduce: Any, split: Any, lhs: Array, rhs: Array) -> tuple[Array, Any]:
    x, w = scaled(lhs, FORWARD, dims=contracting[0]), scaled(rhs, FORWARD, dims=contracting[1])
    x_free, w_free = _free(lhs, contracting[0], batch[0]), _free(rhs, contracting[1], batch[1])
    rows = jnp.transpose(x.scale, [*batch[0], *x_free, *contracting[0]])
    rows = rows.reshape(*rows.shape[: len(batch[0]) + len(x_free)], *(1 for _ in w_free))
    scale = rows * _columns(w.scale, lhs, contracting, batch)
    return _times(x.values, w.values, (contracting, batch), scale, rhs.dtype, split), (lhs, rhs, w.scale)


def _columns(scale: Array, lhs: Array, contracting: Any, batch: Any) -> Array:
    """Scales of a weight's columns, laid as the output's dims: (batch, free of lhs, free of rhs)."""
    free, num_batch = _free(scale, contracting[1], batch[1]), len(batch[1])
    scale = jnp.transpose(scale, [*batch[1], *contracting[1], *free])
    ones = (1,) * len(_free(lhs, contracting[0], batch[0]))
    return scale.reshape(*scale.shape[:num_batch], *ones, *scale.shape[num_batch + len(contracting[1]) :])


def _rows_backward(
    contracting: Any, batch: Any, reduce: Any, split: Split | None, saved: Any, g: Array
) -> tuple[Array, Array]:
    lhs, rhs, w_scale = saved
    dims = lhs, rhs, contracting, batch
    num_rows = lhs.ndim - len(contracting[0])  # dims of the output before the weight's own
    columns = _columns(w_scale, lhs, contracting, batch)
    dy = scaled(g.astype(jnp.float32) * columns, FORWARD, dims=tuple(range(num_rows, g.ndim)))
    w = scaled(rhs, FORWARD, w_scale)

    def narrow(numbers: Any) -> Array:
        rows = dy.scale.reshape(*dy.scale.shape[:num_rows], *(1 for _ in contracting[0]))
        return _times(dy.values, w.values, numbers, rows, lhs.dtype, split)

    def wide(numbers: Any) -> Array:
        return lax.dot_general(lhs, g, numbers, preferred_element_type=reduce)

    return _input_gradient(narrow, *dims), _weight_gradient(wide, *dims).astype(rhs.dtype)


rowwise_fp8_dot_general.defvjp(_rows_forward, _rows_backward)


def _times(lhs: Array, rhs: Array, numbers: Any, scale: Array, dtype: Any, split: Split | None) -> Array:
    """`lax.dot_general` of 8-bit values, times their scales, which are laid as it is; `split` is of rhs.

    Where ranks split what is contracted each multiplies its own part of the sum by the scales, and parts are added then
    (the contracted dim becomes one of ranks and one of what each has). XLA sums over ranks right behind a product, and
    of what it has summed nothing is added, or kept as a shard, before it is sent: so a layer's input would have a sum
    of its gradient for each matrix that takes it in, and the sequence split between blocks would be summed whole.
    """
    over = next(((a, b) for a, b in zip(*numbers[0], strict=True) if split is not None and split.axes[b]), None)
    if split is None or over is None:
        return (lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype) * scale).astype(dtype)
    axes = split.axes[over[1]]
    operands: list[Array] = []
    contracted: Any = []
    batch: Any = []
    for x, dim, dims, along in zip((lhs, rhs), over, *numbers, strict=True):
        ranks = math.prod(axis_sizes(split.mesh)[axis] for axis in axes)
        parts = x.reshape(*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :])
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * parts.ndim
        spec[dim], spec[dim + 1] = axes, None
        operands.append(lax.with_sharding_constraint(parts, NamedSharding(split.mesh, PartitionSpec(*spec))))
        contracted.append([d + (d >= dim) for d in dims])
        batch.append([dim, *(d + (d > dim) for d in along)])
    products = lax.dot_general(operands[0], operands[1], (contracted, batch), preferred_element_type=dtype)
    products = (products * (scale[None] if scale.ndim else scale)).astype(dtype)
    # lax.reduce, for jnp.sum would send a narrow dtype as float32.
    return lax.reduce(products, jnp.zeros((), dtype), lax.add, (0,))


def _input_gradient(product: Product, lhs: Array, rhs: Array, contracting: Any, batch: Any) -> Array:
    """Of lhs, by the product of the output's gradient and rhs."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free, rhs_free = _free(lhs, lhs_contract, lhs_batch), _free(rhs, rhs_contract, rhs_batch)
    # The gradient's dims are (batch, free of lhs, free of rhs): contract it with rhs over what is free in rhs.
    first = len(lhs_batch) + len(lhs_free)
    d_lhs = product(((range(first, first + len(rhs_free)), rhs_free), (range(len(lhs_batch)), rhs_batch)))
    # (batch, free of lhs, what rhs contracts in rhs's order)
    came = [*lhs_batch, *lhs_free, *(lhs_contract[rhs_contract.index(d)] for d in sorted(rhs_contract))]
    return jnp.transpose(d_lhs, [came.index(d) for d in range(lhs.ndim)])


def _weight_gradient(product: Product, lhs: Array, rhs: Array, contracting: Any, batch: Any) -> Array:
    """Of rhs, by the product of lhs and the output's gradient."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free, rhs_free = _free(lhs, lhs_contract, lhs_batch), _free(rhs, rhs_contract, rhs_batch)
    num_batch = len(lhs_batch)
    d_rhs = product(((lhs_free, range(num_batch, num_batch + len(lhs_free))), (lhs_batch, range(num_batch))))
    # (batch, what lhs contracts in lhs's order, free of rhs)
    came = [*rhs_batch, *(rhs_contract[lhs_contract.index(d)] for d in sorted(lhs_contract)), *rhs_free]
    return jnp.transpose(d_rhs, [came.index(d) for d in range(rhs.ndim)])


def _free(x: Array, contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    return [d for d in range(x.ndim) if d not in contracted and d not in batch]
