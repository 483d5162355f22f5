"""Matmuls of activations and a weight with 8-bit operands, or with weight gradients in a given dtype.

fp8_dot_general: x ─► scale = max|x| / limit of the format ─► x / scale, rounded ─► product ─► times both scales
rowwise_fp8_dot_general: the same, with a scale per row of x and per column of the weight
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
"""(dimension numbers) -> matmul of two given operands."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def dot_with_gradient_dtype(plain: Any, contracting: Any, batch: Any, reduce: Any, lhs: Array, rhs: Array) -> Array:
    """Return `plain(lhs, rhs)`, a `lax.dot_general`, whose weight gradient is computed in the dtype `reduce`."""
    return plain(lhs, rhs)


def _dot_backward(plain: Any, contracting: Any, batch: Any, reduce: Any, saved: Any, g: Array) -> tuple[Array, Array]:
    lhs, rhs = saved
    (d_lhs,) = jax.vjp(lambda x: plain(x, rhs), lhs)[1](g)

    def product(numbers: Any) -> Array:
        return lax.dot_general(lhs, g, numbers, preferred_element_type=reduce)

    return d_lhs, _weight_gradient(product, lhs, rhs, contracting, batch).astype(rhs.dtype)


dot_with_gradient_dtype.defvjp(lambda plain, _, __, ___, lhs, rhs: (plain(lhs, rhs), (lhs, rhs)), _dot_backward)


class WeightSharding(NamedTuple):
    """The sharding of a weight over axes that do not shard the batch, as in tensor parallelism."""

    mesh: AnyMesh
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes of each dim."""


class Scaled(NamedTuple):
    """An array, represented as `values * scale`."""

    values: Float[Array, ...]
    scale: Float[Array, ...]
    """float32: a scalar, or an array that broadcasts with the values."""


def scaled(
    x: Float[Array, ...],
    dtype: jax.typing.DTypeLike,
    scale: Float[Array, ...] | None = None,
    *,
    dims: tuple[int, ...] | None = None,
) -> Scaled:
    """Round an array to an 8-bit format, `FORWARD` or `GRADIENT`.

    Args:
      scale: the scale to use. None: the scale that maps the largest |x| to the largest number of the format.
      dims: the dims over which the largest |x| is computed. None: all dims, with a scalar scale.
    """
    if scale is None:
        largest = jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None).astype(jnp.float32)
        largest /= jnp.finfo(dtype).max.astype(jnp.float32)
        scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)  # avoids 0 / 0; NaN remains NaN
    return Scaled((x.astype(jnp.float32) / scale).astype(dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def fp8_dot_general(
    contracting: Any, batch: Any, reduce: Any, sharding: WeightSharding | None, lhs: Array, rhs: Array
) -> Array:
    """Return `lax.dot_general` of activations and a weight, both rounded to 8 bits, in the weight's dtype.

    Activations and weights are e4m3 and gradients e5m2. Each has a scalar scale, computed from its largest value when
    it is used ("current" or "dynamic" scaling). For a sharded operand XLA reduces the largest value over all shards, so
    the result does not depend on the layout. The backward pass needs the operands and two scales.

    Args:
      contracting, batch: the dimension numbers, as tuples of tuples.
      reduce: dtype of the matmul of the weight gradient.
      sharding: sharding of the weight, if known.
      lhs, rhs: bfloat16 or float32. Products can be as large as 448² times the contracted size.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    return _forward(contracting, batch, reduce, sharding, lhs, rhs)[0]


def _forward(contracting: Any, batch: Any, reduce: Any, sharding: Any, lhs: Array, rhs: Array) -> tuple[Array, Any]:
    x, w = scaled(lhs, FORWARD), scaled(rhs, FORWARD)
    out = _times(x.values, w.values, (contracting, batch), x.scale * w.scale, rhs.dtype, sharding)
    return out, (lhs, rhs, x.scale, w.scale)


def _backward(
    contracting: Any, batch: Any, reduce: Any, sharding: WeightSharding | None, saved: Any, g: Array
) -> tuple[Array, Array]:
    lhs, rhs, x_scale, w_scale = saved
    x, w, dy = scaled(lhs, FORWARD, x_scale), scaled(rhs, FORWARD, w_scale), scaled(g, GRADIENT)

    def of_input(numbers: Any) -> Array:
        return _times(dy.values, w.values, numbers, dy.scale * w.scale, lhs.dtype, sharding)

    def of_weight(numbers: Any) -> Array:
        return _times(x.values, dy.values, numbers, x.scale * dy.scale, reduce, None)

    dims = lhs, rhs, contracting, batch
    return _input_gradient(of_input, *dims), _weight_gradient(of_weight, *dims).astype(rhs.dtype)


fp8_dot_general.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def rowwise_fp8_dot_general(
    contracting: Any, batch: Any, reduce: Any, sharding: WeightSharding | None, lhs: Array, rhs: Array
) -> Array:
    """Return `fp8_dot_general` with a scale per row of the activations and per column of the weight.

        out[t, n] = a_t b_n sum_k x[t, k] w[k, n]          x, w in e4m3; a_t = max_k|x| / 448, b_n = max_k|w| / 448
        dx[t, k] = c_t sum_n g[t, n] w[k, n]               g: b_n dy[t, n] in e4m3; c_t = max_n|b_n dy| / 448
        dw[k, n] = sum_t x[t, k] dy[t, n]                  in the original dtypes

    A large value in a row does not affect the precision of other rows. The scales are outside the sums, so both passes
    use the same rounded weight. For dx, the scales b_n of the weight are applied to dy before dy is rounded. It is
    rounded to e4m3 because the range within a row is small. The weight gradient sums over rows. In 8 bits it would need
    scales over the tokens of all devices. It is also the most sensitive to rounding, so it is computed in high
    precision. If the contracted dim is sharded, XLA reduces the largest value of each row or column over its axes
    (`meshpar.parallel.expected.fp8_scales`).

    Source: pytorch/ao, torchao/float8, recipe "rowwise_with_gw_hp", 2025 (whose backward has a scale per weight).
    """
    return _rows_forward(contracting, batch, reduce, sharding, lhs, rhs)[0]


def _rows_forward(
    contracting: Any, batch: Any, reduce: Any, sharding: Any, lhs: Array, rhs: Array
) -> tuple[Array, Any]:
    x, w = scaled(lhs, FORWARD, dims=contracting[0]), scaled(rhs, FORWARD, dims=contracting[1])
    x_free, w_free = _free(lhs, contracting[0], batch[0]), _free(rhs, contracting[1], batch[1])
    rows = jnp.transpose(x.scale, [*batch[0], *x_free, *contracting[0]])
    rows = rows.reshape(*rows.shape[: len(batch[0]) + len(x_free)], *(1 for _ in w_free))
    scale = rows * _columns(w.scale, lhs, contracting, batch)
    return _times(x.values, w.values, (contracting, batch), scale, rhs.dtype, sharding), (lhs, rhs, w.scale)


def _columns(scale: Array, lhs: Array, contracting: Any, batch: Any) -> Array:
    """Arrange the scales of a weight's columns like the output: (batch, free dims of lhs, free dims of rhs)."""
    free, num_batch = _free(scale, contracting[1], batch[1]), len(batch[1])
    scale = jnp.transpose(scale, [*batch[1], *contracting[1], *free])
    ones = (1,) * len(_free(lhs, contracting[0], batch[0]))
    return scale.reshape(*scale.shape[:num_batch], *ones, *scale.shape[num_batch + len(contracting[1]) :])


def _rows_backward(
    contracting: Any, batch: Any, reduce: Any, sharding: WeightSharding | None, saved: Any, g: Array
) -> tuple[Array, Array]:
    lhs, rhs, w_scale = saved
    dims = lhs, rhs, contracting, batch
    num_rows = lhs.ndim - len(contracting[0])  # output dims that are not dims of the weight
    columns = _columns(w_scale, lhs, contracting, batch)
    dy = scaled(g.astype(jnp.float32) * columns, FORWARD, dims=tuple(range(num_rows, g.ndim)))
    w = scaled(rhs, FORWARD, w_scale)

    def fp8_product(numbers: Any) -> Array:
        rows = dy.scale.reshape(*dy.scale.shape[:num_rows], *(1 for _ in contracting[0]))
        return _times(dy.values, w.values, numbers, rows, lhs.dtype, sharding)

    def full_product(numbers: Any) -> Array:
        return lax.dot_general(lhs, g, numbers, preferred_element_type=reduce)

    return _input_gradient(fp8_product, *dims), _weight_gradient(full_product, *dims).astype(rhs.dtype)


rowwise_fp8_dot_general.defvjp(_rows_forward, _rows_backward)


def _times(lhs: Array, rhs: Array, numbers: Any, scale: Array, dtype: Any, sharding: WeightSharding | None) -> Array:
    """Return `lax.dot_general` of 8-bit values times `scale`, which broadcasts with the output.

    If the contracted dim is sharded, it is split into a dim of ranks and a local dim. Each rank scales its partial sum,
    and the partial sums are added afterwards. Otherwise XLA would sum over ranks directly after the matmul, before the
    scaling. It could then neither add several partial sums before the reduction (the gradients of a layer's input from
    several weights), nor reduce-scatter them for a sharded sequence.
    """
    sharded_dims = ((a, b) for a, b in zip(*numbers[0], strict=True) if sharding is not None and sharding.axes[b])
    split_dims = next(sharded_dims, None)
    if sharding is None or split_dims is None:
        return (lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype) * scale).astype(dtype)
    axes = sharding.axes[split_dims[1]]
    num_ranks = math.prod(axis_sizes(sharding.mesh)[axis] for axis in axes)
    operands: list[Array] = []
    contracted: Any = []
    batch: Any = []
    for x, dim, contracted_dims, batch_dims in zip((lhs, rhs), split_dims, *numbers, strict=True):
        x = x.reshape(*x.shape[:dim], num_ranks, x.shape[dim] // num_ranks, *x.shape[dim + 1 :])
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[dim], spec[dim + 1] = axes, None
        operands.append(lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(*spec))))
        contracted.append([d + (d >= dim) for d in contracted_dims])
        batch.append([dim, *(d + (d > dim) for d in batch_dims)])
    products = lax.dot_general(operands[0], operands[1], (contracted, batch), preferred_element_type=dtype)
    products = (products * (scale[None] if scale.ndim else scale)).astype(dtype)
    # jnp.sum would reduce a low-precision dtype in float32, and send it in float32.
    return lax.reduce(products, jnp.zeros((), dtype), lax.add, (0,))


def _input_gradient(product: Product, lhs: Array, rhs: Array, contracting: Any, batch: Any) -> Array:
    """Return the gradient of lhs, where `product` multiplies the gradient of the output with rhs."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free, rhs_free = _free(lhs, lhs_contract, lhs_batch), _free(rhs, rhs_contract, rhs_batch)
    # The gradient has the dims (batch, free of lhs, free of rhs). Contract the free dims of rhs.
    first = len(lhs_batch) + len(lhs_free)
    d_lhs = product(((range(first, first + len(rhs_free)), rhs_free), (range(len(lhs_batch)), rhs_batch)))
    # The result has the dims (batch, free of lhs, contracted in the order of rhs).
    dims = [*lhs_batch, *lhs_free, *(lhs_contract[rhs_contract.index(d)] for d in sorted(rhs_contract))]
    return jnp.transpose(d_lhs, [dims.index(d) for d in range(lhs.ndim)])


def _weight_gradient(product: Product, lhs: Array, rhs: Array, contracting: Any, batch: Any) -> Array:
    """Return the gradient of rhs, where `product` multiplies lhs with the gradient of the output."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free, rhs_free = _free(lhs, lhs_contract, lhs_batch), _free(rhs, rhs_contract, rhs_batch)
    num_batch = len(lhs_batch)
    d_rhs = product(((lhs_free, range(num_batch, num_batch + len(lhs_free))), (lhs_batch, range(num_batch))))
    # The result has the dims (batch, contracted in the order of lhs, free of rhs).
    dims = [*rhs_batch, *(rhs_contract[lhs_contract.index(d)] for d in sorted(lhs_contract)), *rhs_free]
    return jnp.transpose(d_rhs, [dims.index(d) for d in range(rhs.ndim)])


def _free(x: Array, contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    return [d for d in range(x.ndim) if d not in contracted and d not in batch]
