"""Collectives with blockwise quantized messages: one byte per element instead of two or four.

N is the number of ranks, K the ranks in a node and M the number of nodes. q is the size of a quantized array
(`cost_model.quantized_bytes`): a byte per element and a float32 scale per block.

    block of x ─► scale = max|block| / limit ─► x / scale, rounded to int8 or fp8 ─► bytes and scales in a message

XLA's own all-gather and all-to-all send the messages. Sums are computed in float32 after the exchange, so partial sums
are not rounded. The references are the unquantized functions of the same name in `reference.py`.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (qwZ: the
gather of weights; qgZ: the scatter of gradients; hpZ: a second shard inside the node).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

from meshpar.collectives.kernel_checks import Axis, checked_dim, ranks_of, ranks_of_levels
from meshpar.collectives.wire import flat_parts, join_parts, split_parts, unflat, varying
from meshpar.sharding.errors import check_cases, check_choice, check_positive_int
from meshpar.sharding.types import spec_axes

_SMALLEST = 2.0**-126
"""The smallest normal float32. XLA flushes smaller numbers to zero."""
BLOCK = 256
"""Number of elements that share a scale. The four bytes of a scale add 1.6 %."""


# ---- Blocks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Format:
    """An 8-bit number format."""

    dtype: Any
    limit: float
    """Largest number."""
    largest_gap: float
    """Distance between the two largest numbers."""


FORMATS: dict[str, _Format] = {
    "int8": _Format(jnp.int8, 127.0, 1.0),
    # With a scale per block four exponent bits are enough, also for gradients: numbers 2^15 times smaller than the
    # largest still have three fraction bits. e5m2 would trade a fraction bit for a fifth exponent bit.
    "fp8": _Format(jnp.float8_e4m3fn, 448.0, 32.0),
}
"""Formats by name. int8 has an absolute error per block, fp8 (e4m3) a relative error per element."""


class Quantized(NamedTuple):
    """A quantized array."""

    values: Num[Array, "blocks block"]
    """int8 or float8_e4m3fn."""
    scales: Float[Array, " blocks"]
    """float32, because bfloat16 scales would save two bytes in 260 and add an error to all elements of the block."""


def error_bound(largest: jax.typing.ArrayLike, *, dtype: str = "int8", stochastic: bool = False) -> Any:
    """Return the maximum error of a quantization in a block whose largest absolute value is `largest`.

    The error is at most half a step of the format, or a full step with stochastic rounding. A full step is
    `largest` / 127 for int8 and `largest` / 14 for fp8. With fp8 smaller elements have smaller errors. Float32
    arithmetic adds `largest` / 2^21, and 2^-126, the smallest normal float32.
    """
    check_choice("error_bound", "the number format", tuple(FORMATS), dtype=dtype)
    number = FORMATS[dtype]
    gap = number.largest_gap / number.limit
    return largest * ((gap if stochastic else gap / 2) + 2.0**-21) + _SMALLEST


def quantize(
    x: Float[Array, "*dims"], *, dtype: str = "int8", block: int = BLOCK, key: jax.Array | None = None
) -> Quantized:
    """Quantize symmetrically, with a scale for each block of at most `block` elements of the flattened array.

    Blocks have the same size, and the last is padded with zeros. A block with an infinity or a NaN becomes all NaN.
    Scales are at least 2^-126, the smallest normal float32. Blocks whose largest element is below 127 · 2^-126 (int8)
    or 448 · 2^-126 (fp8) are therefore quantized in steps of 2^-126.

    Args:
      x: array of a floating dtype. It is cast to float32.
      dtype: "int8" or "fp8".
      block: maximum number of elements that share a scale.
      key: PRNG key for stochastic rounding, whose expected value is the element. None: round to nearest.

    Raises:
      MeshparError: the dtype is unknown, `block` is not positive, or x is not a floating array.
    """
    number = _checked_format("quantize", x, dtype, block)
    values, scales = _quantized(_in_blocks(jnp.asarray(x).reshape(-1), block), number, key)
    return Quantized(values.astype(number.dtype), scales)


def dequantize(
    quantized: Quantized, *, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = "float32"
) -> Float[Array, "*dims"]:
    """Return the array of this shape, within `error_bound` of the original.

    Args:
      quantized: result of `quantize`.
      shape: shape of the original array.
      dtype: dtype of the result.

    Raises:
      MeshparError: the number of elements of the shape does not match the quantized blocks.
    """
    size, capacity = math.prod(shape), quantized.values.size
    is_wrong = not capacity - max(len(quantized.scales), 1) < size <= capacity
    reason = f"there are {len(quantized.scales)} blocks of {quantized.values.shape[-1]}"
    case = is_wrong, reason, "pass the shape of the quantized array"
    check_cases("dequantize", f"return shape {shape} with {size} elements", "wrong-shape", case)
    return _restored(quantized.values, quantized.scales, dtype).reshape(-1)[:size].reshape(shape)


def _in_blocks(flat: jax.Array, block: int) -> jax.Array:
    """`[..., c] -> [..., blocks, <= block]`, padded with zeros."""
    num_blocks, width = _blocks(flat.shape[-1], block)
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, num_blocks * width - flat.shape[-1])]
    return jnp.pad(flat, padding).reshape(*flat.shape[:-1], num_blocks, width)


def _blocks(size: int, block: int) -> tuple[int, int]:
    """Return the number of blocks, and of elements per block."""
    num_blocks = -(-size // block)
    return num_blocks, -(-size // max(num_blocks, 1))


def _quantized(blocks: jax.Array, number: _Format, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return values, still in float32, and scales."""
    blocks = blocks.astype(jnp.float32)
    largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)
    # A smaller scale would be flushed to zero, and the block with it.
    scales = jnp.where(jnp.isfinite(largest), jnp.maximum(largest / number.limit, _SMALLEST), jnp.nan)
    scale = scales[..., None]
    scaled = jnp.where(scale > 0, blocks / scale, 0.0)  # blocks with a NaN scale become zeros, and NaN if dequantized
    step = _gap(scaled) if number.dtype == jnp.float8_e4m3fn else 1.0
    steps = scaled / step
    rounded = jnp.round(steps) if key is None else jnp.floor(steps + jax.random.uniform(key, steps.shape))
    return jnp.clip(rounded * step, -number.limit, number.limit), scales


def _gap(x: jax.Array) -> jax.Array:
    """Return the distance between the two float8_e4m3 numbers around x: `max(2^floor(log2 |x|) / 8, 2^-9)`.

    If x is first rounded to a multiple of this distance, the cast is exact and does not depend on the backend.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32) / 8, 2.0**-9)


def _restored(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    # The largest float32, divided and multiplied by the limit, could round to infinity.
    limit = float(jnp.finfo(jnp.float32).max)
    return jnp.clip(values.astype(jnp.float32) * scales[..., None], -limit, limit).astype(dtype)


# ---- Messages --------------------------------------------------------------------------------------------------------


def encoded(parts: Float[Array, "... c"], dtype: str, block: int, key: jax.Array | None) -> UInt8[Array, "... q"]:
    """Quantize each part to bytes: first the values, then the scales.

    The message has dtype uint8, because XLA:CPU does not send bytes in a wider dtype.
    """
    number = FORMATS[dtype]
    values, scales = _quantized(_in_blocks(parts, block), number, key)
    values = values.astype(number.dtype).reshape(*parts.shape[:-1], values.shape[-2] * values.shape[-1])
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    scales = scales.reshape(*parts.shape[:-1], scales.shape[-2] * scales.shape[-1])
    return jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint8), scales], axis=-1)


def decoded(
    message: UInt8[Array, "... q"], size: int, dtype: str, block: int, into: Any = "float32"
) -> Float[Array, "... c"]:
    """Return the parts of `size` elements that `encoded` quantized, in the dtype `into`."""
    num_blocks, width = _blocks(size, block)
    values, scales = message[..., : num_blocks * width], message[..., num_blocks * width :]
    values = lax.bitcast_convert_type(values, FORMATS[dtype].dtype).reshape(*message.shape[:-1], num_blocks, width)
    scales = lax.bitcast_convert_type(scales.reshape(*message.shape[:-1], num_blocks, 4), jnp.float32)
    restored = _restored(values, scales, into)
    return restored.reshape(*message.shape[:-1], num_blocks * width)[..., :size]


def gathered_bytes(message: UInt8[Array, "... q"], axis: Axis) -> UInt8[Array, "N ..."]:
    """Gather the messages of all ranks."""
    if not message.size:
        return jnp.zeros((lax.axis_size(axis), *message.shape), jnp.uint8)
    return lax.all_gather(message, axis)


def scattered_sum(
    parts: Float[Array, "N c"], *, axis: Axis, outer: Axis | None, dtype: str, block: int, key: jax.Array | None
) -> Float[Array, " c"]:
    """`[N, c] -> [c]`: reduce-scatter quantized parts with sums in float32. With `outer`, parts are ordered by node."""
    if outer is None:
        return _exchange_and_sum(parts, axis, dtype, block, _rank_key(key, axis))
    num_outer, size = lax.axis_size(outer), parts.shape[-1]
    # Parts for rank i of any node are first summed on rank i of the local node, which then sends a message per node.
    by_rank = jnp.swapaxes(parts.reshape(num_outer, lax.axis_size(axis), size), 0, 1)
    rank_key = _rank_key(key, _both(axis, outer))
    inner_key, outer_key = (None, None) if rank_key is None else jax.random.split(rank_key)
    by_node = _exchange_and_sum(by_rank, axis, dtype, block, inner_key)
    return _exchange_and_sum(by_node, outer, dtype, block, outer_key)


def _exchange_and_sum(parts: jax.Array, axis: Axis, dtype: str, block: int, key: jax.Array | None) -> jax.Array:
    if len(parts) == 1:
        return parts[0].astype(jnp.float32)
    messages = encoded(parts, dtype, block, key)
    arrived = lax.all_to_all(messages, axis, 0, 0) if messages.size else messages
    return jnp.sum(decoded(arrived, parts.shape[-1], dtype, block), axis=0)


def _rank_key(key: jax.Array | None, axis: Axis) -> jax.Array | None:
    """Return a different key for each rank, so that rounding errors of a sum cancel instead of adding up."""
    return None if key is None else jax.random.fold_in(key, lax.axis_index(axis))


# ---- The kernels -----------------------------------------------------------------------------------------------------


def quantized_all_gather(
    x: Float[Array, "*dims"],
    *,
    axis: Axis,
    outer: Axis | None = None,
    dim: int = 0,
    tiled: bool = True,
    dtype: str = "int8",
    block: int = BLOCK,
    key: jax.Array | None = None,
    grad_dtype: str | None = None,
) -> Float[Array, "*dims"]:
    """All-gather quantized arrays (qwZ). The result is bitwise equal on all ranks.

        [A_X, B] -> [A, B]
        per device [A/N, B] -> [A, B]  (dim 0; [B] -> [N, B] with tiled=False)
        N-1 steps, (N-1) q bytes sent, q for the local array
        with `outer`: M-1 steps, (M-1) q across nodes; then K-1 steps, (K-1) M q in a node

    The error of an element is at most `error_bound` of its block; with `outer` the second gather does not round again.
    A single rank returns the exact array. The gradient is a reduce-scatter of the cotangent, as in `all_gather`:
    rounding is differentiated as the identity (straight through).

    Args:
      axis: mesh axis, or a tuple of axes that act as a single axis. With `outer`, the axis within nodes.
      outer: the axis across nodes. The first gather is over `outer`, after which each node has all arrays, sharded over
        `axis` (the second shard of hpZ). The second gather is over `axis`. Arrays are ordered by node.
      dim, tiled: see `all_gather`.
      dtype, block, key: see `quantize`. Each rank folds its index into the key.
      grad_dtype: format of the reduce-scatter of the gradient, which rounds to nearest. None: not quantized.

    Raises:
      MeshparError: an axis, the dim or a dtype is unknown, an axis is used twice, or `block` is not positive.
    """
    name = "quantized_all_gather"
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    dim = checked_dim(name, dim, x.ndim + (not tiled))
    if num_ranks == 1:
        return join_parts(name, x[None], dim, tiled)

    def forward(x: jax.Array, key: jax.Array | None) -> jax.Array:
        messages = encoded(x.reshape(-1), dtype, block, _rank_key(key, _both(axis, outer)))
        if outer is not None:
            messages = gathered_bytes(messages, outer)  # [M, q], the second shard
        messages = gathered_bytes(messages, axis)
        if outer is not None:
            messages = jnp.swapaxes(messages, 0, 1)
        parts = decoded(messages.reshape(num_ranks, messages.shape[-1]), x.size, dtype, block, x.dtype)
        return join_parts(name, parts.reshape(num_ranks, *x.shape), dim, tiled)

    def backward(g: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"axis": axis, "outer": outer, "dim": dim, "tiled": tiled}
        return _scatter(g, dtype=grad_dtype, block=block, **options).astype(x.dtype)

    return _straight_through(name, forward, backward, x, key)


def quantized_reduce_scatter(
    x: Float[Array, "*dims"],
    *,
    axis: Axis,
    outer: Axis | None = None,
    dim: int = 0,
    tiled: bool = True,
    op: str = "sum",
    dtype: str = "int8",
    block: int = BLOCK,
    key: jax.Array | None = None,
    grad_dtype: str | None = None,
) -> Float[Array, "*dims"]:
    """Reduce-scatter quantized arrays, with sums in float32 (qgZ).

        [A, B] {unreduced over X} -> [A_X, B]
        per device [A, B] -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps, (N-1) q bytes sent, q for a part
        with `outer`: K-1 steps, (K-1) M q in a node; then M-1 steps, (M-1) q across nodes

    It is an all-to-all, in which elements are quantized once; a ring would quantize them in each of its N-1 steps. The
    error is at most the sum of `error_bound` over the N blocks that are added. With `outer` the sums of each node are
    quantized again, which adds the bounds of M blocks of these sums. The error of the mean is 1/N of that. The gradient
    is an all-gather of the cotangent, as in `reduce_scatter` (straight through).

    Args:
      axis: see `quantized_all_gather`.
      outer: the axis across nodes. Sums are first computed within nodes, so 1/K of the bytes is sent across nodes. The
        parts are ordered by node, as over (outer, axis).
      dim, tiled: see `reduce_scatter`.
      op: `sum` or `mean`.
      dtype, block, key: see `quantize`. Each rank folds its index into the key.
      grad_dtype: format of the all-gather of the gradient, which rounds to nearest. None: not quantized.

    Raises:
      MeshparError: an axis, the dim, the op or a dtype is unknown, an axis is used twice, or the dim is indivisible.
    """
    name = "quantized_reduce_scatter"
    check_choice(name, "the reduction", ("sum", "mean"), op=op)
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    split_parts(name, x, dim, num_ranks, tiled)  # checks the dim before tracing
    options: dict[str, Any] = {"axis": axis, "outer": outer, "dim": dim % x.ndim, "tiled": tiled}

    def forward(x: jax.Array, key: jax.Array | None) -> jax.Array:
        return _scatter(x, dtype=dtype, block=block, key=key, **options)

    def backward(g: jax.Array) -> jax.Array:
        if grad_dtype is None:
            return lax.all_gather(g, _both(axis, outer), axis=dim % x.ndim, tiled=tiled)
        return quantized_all_gather(g, dtype=grad_dtype, block=block, **options)

    return _straight_through(name, forward, backward, x, key, num_ranks if op == "mean" else None)


def quantized_all_reduce(
    x: Float[Array, "*dims"],
    *,
    axis: Axis,
    outer: Axis | None = None,
    op: str = "sum",
    dtype: str = "int8",
    block: int = BLOCK,
    key: jax.Array | None = None,
    grad_dtype: str | None = None,
) -> Float[Array, "*dims"]:
    """All-reduce as a quantized reduce-scatter and all-gather. The result is bitwise equal on all ranks.

        [A] {unreduced over X} -> [A];  per device [A] -> [A], any shape
        2(N-1) steps, 2 (N-1) q bytes sent, q for 1/N of the array
        with `outer`: 2(K-1) steps, 2 (K-1) M q in a node;  2(M-1) steps, 2 (M-1) q across nodes

    The error is at most that of `quantized_reduce_scatter`, plus `error_bound` of a block of the result. The gradient
    is the sum of the cotangents, as in `all_reduce` (straight through).

    Args:
      axis, outer, op, dtype, block, key: see `quantized_reduce_scatter`.
      grad_dtype: format of the all-reduce of the gradient, which rounds to nearest. None: not quantized.

    Raises:
      MeshparError: an axis, the op or a dtype is unknown, an axis is used twice, or `block` is not positive.
    """
    name = "quantized_all_reduce"
    check_choice(name, "the reduction", ("sum", "mean"), op=op)
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    options: dict[str, Any] = {"axis": axis, "outer": outer, "tiled": False}

    def forward(x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        part = _scatter(flat_parts(x, num_ranks), dtype=dtype, block=block, key=keys[0], dim=0, **options)
        return unflat(quantized_all_gather(part, dtype=dtype, block=block, key=keys[1], **options), x)

    def backward(g: jax.Array) -> jax.Array:
        if grad_dtype is None:
            return varying(lax.psum(g, _both(axis, outer)), _both(axis, outer))
        return quantized_all_reduce(g, axis=axis, outer=outer, dtype=grad_dtype, block=block)

    return _straight_through(name, forward, backward, x, key, num_ranks if op == "mean" else None)


def _straight_through(
    name: str,
    forward: Callable[[jax.Array, jax.Array | None], jax.Array],
    backward: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    key: jax.Array | None,
    divisor: int | None = None,
) -> jax.Array:
    """Return `forward(x, key)`, divided by `divisor`, with the gradient `backward(cotangent)`."""
    run = jax.custom_vjp(forward)
    run.defvjp(lambda x, key: (forward(x, key), None), lambda _, g: (backward(g), None))
    with jax.named_scope(name):
        return run(x, key) if divisor is None else run(x, key) / divisor


def _scatter(
    x: jax.Array,
    *,
    axis: Axis,
    outer: Axis | None,
    dim: int,
    tiled: bool,
    dtype: str | None,
    block: int,
    key: jax.Array | None = None,
) -> jax.Array:
    """Reduce-scatter quantized parts. With dtype None, use XLA's own reduce-scatter."""
    axes = _both(axis, outer)
    if dtype is None:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)
    parts = split_parts("quantized_reduce_scatter", x, dim, lax.axis_size(axes), tiled)
    flat = parts.reshape(len(parts), math.prod(parts.shape[1:]))
    part = scattered_sum(flat, axis=axis, outer=outer, dtype=dtype, block=block, key=key)
    return part.astype(x.dtype).reshape(parts.shape[1:])


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked_format(kernel: str, x: jax.Array, dtype: str, block: int) -> _Format:
    check_positive_int(kernel, "the number of elements of a block", block=block)
    x_dtype, fix = jnp.asarray(x).dtype, "use an unquantized collective, or cast the array first"
    case = not jnp.issubdtype(x_dtype, jnp.floating), "only floating dtypes can be quantized", fix
    check_cases(kernel, f"quantize {x_dtype}", "wrong-dtype", case)
    check_choice(kernel, "the number format", tuple(FORMATS), dtype=dtype)
    return FORMATS[dtype]


def _prepared(
    kernel: str, x: jax.Array, axis: Axis, outer: Axis | None, dtype: str, block: int, grad_dtype: str | None
) -> tuple[jax.Array, int]:
    """Check the arguments. Return the array, marked as varying over the axes, and the number of ranks."""
    _checked_format(kernel, x, dtype, block)
    if grad_dtype is not None:
        check_choice(kernel, "the number format", tuple(FORMATS), grad_dtype=grad_dtype)
    num_ranks = ranks_of(kernel, axis) if outer is None else math.prod(ranks_of_levels(kernel, axis, outer))
    return varying(x, _both(axis, outer)), num_ranks


def _both(axis: Axis, outer: Axis | None) -> tuple[str, ...]:
    return (*spec_axes(outer), *spec_axes(axis))
