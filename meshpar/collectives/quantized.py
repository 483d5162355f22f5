"""Collectives whose messages are quantized block by block: a byte an element instead of two or four.

N ranks, or K inside and M across; q is what `cost_model.quantized_bytes` says an array takes on the wire: one byte an
element, and a float32 scale a block.

    block of x ─► scale = max|block| / limit ─► x / scale, rounded to int8 or fp8 ─► bytes ‖ scales, one message

What is exchanged is XLA's to send (NCCL's own all-gather and all-to-all, in one piece each); what is added here is what
stands before and behind it. Sums are taken in float32, after the exchange, so that no partial sum is rounded twice.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (qwZ: the
gather of weights; qgZ: the scatter of gradients; hpZ: a second shard inside the node).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

from meshpar.collectives.kernel_checks import Axis, check_choice, checked_count, checked_dim, ranks_of, ranks_of_levels
from meshpar.collectives.wire import cut, flat_parts, join, unflat, varying
from meshpar.sharding.types import problem, spec_axes

_SMALLEST = 2.0**-126
"""The smallest normal float32: XLA computes with zero for what is below."""
BLOCK = 256
"""Elements that share a scale: its four bytes are 1.6 % of them."""


# ---- One block -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Format:
    """A number format of one byte."""

    dtype: Any
    limit: float
    """The largest number it has."""
    largest_gap: float
    """Between that and the one below."""


FORMATS: dict[str, _Format] = {
    "int8": _Format(jnp.int8, 127.0, 1.0),
    # Four bits of exponent are enough behind a scale for each block: numbers 2^15 times smaller than the largest still
    # have all three bits of fraction. e5m2's fifth bit would cost one of them, so gradients have no use for it either.
    "fp8": _Format(jnp.float8_e4m3fn, 448.0, 32.0),
}
"""What a block can be quantized to: int8 has one error for all of a block, fp8 (e4m3) a relative one."""


class Quantized(NamedTuple):
    """An array in blocks."""

    values: Num[Array, "blocks block"]
    """int8 or float8_e4m3fn."""
    scales: Float[Array, " blocks"]
    """float32: bfloat16 would save two bytes in 260 and add an error of its own to every element of the block."""


def error_bound(largest: Any, *, dtype: str = "int8", stochastic: bool = False) -> Any:
    """How far one quantization moves an element of a block whose largest absolute value is `largest`, at the most.

    Half a step of the format where it is coarsest, a whole one with stochastic rounding: `largest` / 254 or / 127 for
    int8, / 28 or / 14 for fp8. For fp8 that is for the largest elements; smaller ones of size a move a / 16 (a / 8) at
    the most, or `largest` / 2^18 (/ 2^17) where that is more. Arithmetic in float32 adds `largest` / 2^21, and 2^-126:
    no number below that, the smallest normal one, is kept.
    """
    check_choice("error_bound", "dtype", dtype, FORMATS)
    known = FORMATS[dtype]
    gap = known.largest_gap / known.limit
    return largest * ((gap if stochastic else gap / 2) + 2.0**-21) + _SMALLEST


def quantize(
    x: Float[Array, "*dims"], *, dtype: str = "int8", block: int = BLOCK, key: jax.Array | None = None
) -> Quantized:
    """Symmetric quantization, one scale for each run of at most `block` elements of the flattened array.

    The runs are as equal as can be, with zeros at the end of the last. A block of zeros stays zeros. A block that holds
    an infinity or a NaN becomes NaN throughout: nothing that is not finite is clipped to something that is. No scale is
    below 2^-126, the smallest normal float32, and nothing below that is kept: that is a block of largest element under
    127 · 2^-126 with int8, 448 · 2^-126 with fp8, in steps of 2^-126.

    Args:
      x: computed with in float32.
      dtype: "int8" or "fp8".
      block: the most elements that share a scale.
      key: rounds up or down at random, such that the mean is the element itself; None: to the nearest.

    Raises:
      ValueError: no such dtype; a block without elements; an array that holds no floating numbers.
    """
    known = _checked("quantize", x, dtype, block)
    values, scales = _quantized(_in_blocks(jnp.asarray(x).reshape(-1), block), known, key)
    return Quantized(values.astype(known.dtype), scales)


def dequantize(quantized: Quantized, *, shape: tuple[int, ...], dtype: Any = "float32") -> Float[Array, "*dims"]:
    """The array of this shape again, each element as near as `error_bound` says.

    Raises:
      ValueError: a shape of more elements than there are, or of so few that blocks would be left over.
    """
    size, room = math.prod(shape), quantized.values.size
    if not room - max(len(quantized.scales), 1) < size <= room:
        asked = f"make an array of shape {shape}, {size} elements"
        exists = f"there are {len(quantized.scales)} blocks of {quantized.values.shape[-1]}"
        raise problem("dequantize", asked, exists, "give the shape of the array that was quantized")
    return _restored(quantized.values, quantized.scales, dtype).reshape(-1)[:size].reshape(shape)


def _in_blocks(flat: jax.Array, block: int) -> jax.Array:
    """`[..., c] -> [..., blocks, at most block]`, zeros at the end."""
    num_blocks, width = _blocks(flat.shape[-1], block)
    room = [(0, 0)] * (flat.ndim - 1) + [(0, num_blocks * width - flat.shape[-1])]
    return jnp.pad(flat, room).reshape(*flat.shape[:-1], num_blocks, width)


def _blocks(size: int, block: int) -> tuple[int, int]:
    """(number of blocks, elements in each)."""
    num_blocks = -(-size // block)
    return num_blocks, -(-size // max(num_blocks, 1))


def _quantized(blocks: jax.Array, known: _Format, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    blocks = blocks.astype(jnp.float32)
    largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)
    # A smaller scale would be flushed to zero, and the block with it.
    scales = jnp.where(jnp.isfinite(largest), jnp.maximum(largest / known.limit, _SMALLEST), jnp.nan)
    wide = scales[..., None]
    in_steps = jnp.where(wide > 0, blocks / wide, 0.0)  # NaN is not above 0: those blocks are zeros times NaN
    step = _gap(in_steps) if known.dtype == jnp.float8_e4m3fn else 1.0
    steps = in_steps / step
    rounded = jnp.round(steps) if key is None else jnp.floor(steps + jax.random.uniform(key, steps.shape))
    return jnp.clip(rounded * step, -known.limit, known.limit), scales


def _gap(x: jax.Array) -> jax.Array:
    """The distance between the float8_e4m3 numbers around x: an eighth of its power of two, 2^-9 at the least.

    Rounding to it here makes the cast exact, whatever way a backend rounds when it casts.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32) / 8, 2.0**-9)


def _restored(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    # The largest float32 divided and multiplied by the limit may come out above itself: it is no infinity.
    most = float(jnp.finfo(jnp.float32).max)
    return jnp.clip(values.astype(jnp.float32) * scales[..., None], -most, most).astype(dtype)


# ---- On the wire -----------------------------------------------------------------------------------------------------


def encoded(parts: Float[Array, "... c"], dtype: str, block: int, key: jax.Array | None) -> UInt8[Array, "... q"]:
    """Every part quantized, its scales behind its bytes: one message, of a dtype that every backend sends as it is.

    XLA:CPU would widen fp8, and two messages would cost two latencies.
    """
    known = FORMATS[dtype]
    values, scales = _quantized(_in_blocks(parts, block), known, key)
    values = values.astype(known.dtype).reshape(*parts.shape[:-1], values.shape[-2] * values.shape[-1])
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    scales = scales.reshape(*parts.shape[:-1], scales.shape[-2] * scales.shape[-1])
    return jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint8), scales], axis=-1)


def decoded(
    message: UInt8[Array, "... q"], size: int, dtype: str, block: int, into: Any = "float32"
) -> Float[Array, "... c"]:
    """`encoded` undone; c is `size`."""
    num_blocks, width = _blocks(size, block)
    values, scales = message[..., : num_blocks * width], message[..., num_blocks * width :]
    values = lax.bitcast_convert_type(values, FORMATS[dtype].dtype).reshape(*message.shape[:-1], num_blocks, width)
    scales = lax.bitcast_convert_type(scales.reshape(*message.shape[:-1], num_blocks, 4), jnp.float32)
    restored = _restored(values, scales, into)
    return restored.reshape(*message.shape[:-1], num_blocks * width)[..., :size]


def gathered_bytes(message: UInt8[Array, "... q"], axis: Axis) -> UInt8[Array, "N ..."]:
    """The messages of all ranks."""
    if not message.size:
        return jnp.zeros((lax.axis_size(axis), *message.shape), jnp.uint8)
    return lax.all_gather(message, axis)


def scattered_sum(
    parts: Float[Array, "N c"], *, axis: Axis, outer: Axis | None, dtype: str, block: int, key: jax.Array | None
) -> Float[Array, " c"]:
    """This rank's part of the sum, in float32; parts count node by node where there are nodes."""
    if outer is None:
        return _sum_of_arrived(parts, axis, dtype, block, _own(key, axis))
    num_outer, size = lax.axis_size(outer), parts.shape[-1]
    # What goes to place i of any node is gathered on rank i inside; one message for each node leaves from there.
    by_place = jnp.swapaxes(parts.reshape(num_outer, lax.axis_size(axis), size), 0, 1)
    own = _own(key, _both(axis, outer))
    inside, across = (None, None) if own is None else jax.random.split(own)
    by_node = _sum_of_arrived(by_place, axis, dtype, block, inside)
    return _sum_of_arrived(by_node, outer, dtype, block, across)


def _sum_of_arrived(parts: jax.Array, axis: Axis, dtype: str, block: int, key: jax.Array | None) -> jax.Array:
    if len(parts) == 1:
        return parts[0].astype(jnp.float32)
    messages = encoded(parts, dtype, block, key)
    arrived = lax.all_to_all(messages, axis, 0, 0) if messages.size else messages
    return jnp.sum(decoded(arrived, parts.shape[-1], dtype, block), axis=0)


def _own(key: jax.Array | None, axis: Axis) -> jax.Array | None:
    """The key of this rank: with the same one everywhere, errors would add up instead of cancelling."""
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
    """Every rank gets the arrays of all ranks, quantized once: all get the same bits, their own part's too (qwZ).

        [A_X, B] -> [A, B]
        per device [A/N, B] -> [A, B]  (dim 0; [B] -> [N, B] with tiled=False)
        N-1 steps, (N-1) q bytes sent, q one rank's array on the wire
        with `outer`: M-1 steps, (M-1) q across; then K-1 steps, (K-1) M q inside

    An element is off by `error_bound` of its block: 1 quantization, with `outer` too, where the second gather sends on
    the bytes of the first. On one rank nothing is sent and nothing is quantized. The gradient is that of `all_gather`,
    a reduce-scatter of the cotangent: rounding counts as the identity (straight through).

    Args:
      axis: mesh axis, or several as one; the one inside nodes when there is an `outer`.
      outer: the axis across nodes: each of a node's ranks first gets the parts of its counterparts, which are a second
        shard inside the node (hpZ). Parts count node by node.
      dim, tiled: as for `all_gather`.
      dtype, block, key: as for `quantize`; every rank folds its place into the key.
      grad_dtype: quantizes the gradient's reduce-scatter, to nearest; None: in full.

    Raises:
      ValueError: no such axis here, dim or dtype; the same axis twice; a block without elements.
    """
    name = "quantized_all_gather"
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    dim = checked_dim(name, dim, x.ndim + (not tiled))
    if num_ranks == 1:
        return join(name, x[None], dim, tiled)

    @jax.custom_vjp
    def run(x: jax.Array, key: jax.Array | None) -> jax.Array:
        parts = _gathered(x.reshape(-1), axis, outer, dtype, block, _own(key, _both(axis, outer)))
        return join(name, parts.reshape(num_ranks, *x.shape), dim, tiled)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, None]:
        options: dict[str, Any] = {"axis": axis, "outer": outer, "dim": dim, "tiled": tiled}
        return _scatter(g, dtype=grad_dtype, block=block, **options).astype(x.dtype), None

    run.defvjp(lambda x, key: (run(x, key), None), backward)
    with jax.named_scope(name):
        return run(x, key)


def _gathered(
    x: Float[Array, " c"], axis: Axis, outer: Axis | None, dtype: str, block: int, key: jax.Array | None
) -> Float[Array, "N c"]:
    """The arrays of all ranks, node by node where there are nodes."""
    messages = encoded(x, dtype, block, key)
    if outer is not None:
        messages = gathered_bytes(messages, outer)  # [M, q], the second shard
    messages = gathered_bytes(messages, axis)
    if outer is not None:
        messages = jnp.swapaxes(messages, 0, 1)
    num_ranks = math.prod(messages.shape[:-1])
    return decoded(messages.reshape(num_ranks, messages.shape[-1]), x.size, dtype, block, x.dtype)


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
    """Every rank gets its part of the sum: parts go quantized to their owners, who add them up in float32 (qgZ).

        [A, B] {partial over X} -> [A_X, B]
        per device [A, B] -> [A/N, B]  (dim 0; [N, B] -> [B] with tiled=False)
        N-1 steps, (N-1) q bytes sent, q one part on the wire
        with `outer`: K-1 steps, (K-1) M q inside; then M-1 steps, (M-1) q across

    An all-to-all, so that an element is quantized once; round a ring it would be at each of N-1 hops. Off by the sum of
    `error_bound` over the N blocks that are added (1 quantization); with `outer` the sums of each node are quantized
    again: M more terms, of the sums' own blocks (2 quantizations). The mean: a N-th. The gradient is that of
    `reduce_scatter`, an all-gather of the cotangent (straight through).

    Args:
      axis: mesh axis, or several as one; the one inside nodes when there is an `outer`.
      outer: the axis across nodes: sums are taken inside first, so that a K-th of the bytes goes across. Parts count
        node by node, as over (outer, axis).
      dim, tiled: as for `reduce_scatter`.
      op: `sum` or `mean`.
      dtype, block, key: as for `quantize`; every rank folds its place into the key.
      grad_dtype: quantizes the gradient's all-gather, to nearest; None: in full.

    Raises:
      ValueError: no such axis here, dim, op or dtype; the same axis twice; a dim that does not divide by N.
    """
    name = "quantized_reduce_scatter"
    check_choice(name, "op", op, ("sum", "mean"))
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    cut(name, x, dim, num_ranks, tiled)  # said here, where the caller sees it
    options: dict[str, Any] = {"axis": axis, "outer": outer, "dim": dim % x.ndim, "tiled": tiled}

    @jax.custom_vjp
    def run(x: jax.Array, key: jax.Array | None) -> jax.Array:
        return _scatter(x, dtype=dtype, block=block, key=key, **options)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, None]:
        if grad_dtype is None:
            return lax.all_gather(g, _both(axis, outer), axis=dim % x.ndim, tiled=tiled), None
        return quantized_all_gather(g, dtype=grad_dtype, block=block, **options), None

    run.defvjp(lambda x, key: (run(x, key), None), backward)
    with jax.named_scope(name):
        y = run(x, key)
        return y / num_ranks if op == "mean" else y


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
    """A quantized reduce-scatter, then a quantized all-gather of the sums; all ranks get the same bits.

        [A] {partial over X} -> [A];  per device [A] -> [A], any shape
        2(N-1) steps, 2 (N-1) q bytes sent, q a N-th of the array on the wire
        with `outer`: 2(K-1) steps, 2 (K-1) M q inside;  2(M-1) steps, 2 (M-1) q across

    Off as `quantized_reduce_scatter` is, and by `error_bound` of a block of the result (2 quantizations, 3 with
    `outer`). The gradient is that of `all_reduce`: the sum of the cotangents (straight through).

    Args:
      axis, outer, op, dtype, block, key: as for `quantized_reduce_scatter`.
      grad_dtype: quantizes the gradient's all-reduce, to nearest; None: in full.

    Raises:
      ValueError: no such axis here, op or dtype; the same axis twice; a block without elements.
    """
    name = "quantized_all_reduce"
    check_choice(name, "op", op, ("sum", "mean"))
    x, num_ranks = _prepared(name, x, axis, outer, dtype, block, grad_dtype)
    options: dict[str, Any] = {"axis": axis, "outer": outer, "tiled": False}

    @jax.custom_vjp
    def run(x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        mine = _scatter(flat_parts(x, num_ranks), dtype=dtype, block=block, key=keys[0], dim=0, **options)
        return unflat(quantized_all_gather(mine, dtype=dtype, block=block, key=keys[1], **options), x)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, None]:
        if grad_dtype is None:
            return varying(lax.psum(g, _both(axis, outer)), _both(axis, outer)), None
        return quantized_all_reduce(g, axis=axis, outer=outer, dtype=grad_dtype, block=block), None

    run.defvjp(lambda x, key: (run(x, key), None), backward)
    with jax.named_scope(name):
        y = run(x, key)
        return y / num_ranks if op == "mean" else y


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
    """This rank's part of the sum; dtype None: by XLA's own reduce-scatter."""
    axes = _both(axis, outer)
    if dtype is None:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)
    parts = cut("quantized_reduce_scatter", x, dim, lax.axis_size(axes), tiled)
    flat = parts.reshape(len(parts), math.prod(parts.shape[1:]))
    mine = scattered_sum(flat, axis=axis, outer=outer, dtype=dtype, block=block, key=key)
    return mine.astype(x.dtype).reshape(parts.shape[1:])


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked(kernel: str, x: jax.Array, dtype: str, block: int) -> _Format:
    checked_count(kernel, "block", block)
    held = jnp.asarray(x).dtype
    if not jnp.issubdtype(held, jnp.floating):
        raise problem(
            kernel, f"quantize {held}", "blocks are scaled floating numbers", "send it as it is, or cast it first"
        )
    check_choice(kernel, "dtype", dtype, FORMATS)
    return FORMATS[dtype]


def _prepared(
    kernel: str, x: jax.Array, axis: Axis, outer: Axis | None, dtype: str, block: int, grad_dtype: str | None
) -> tuple[jax.Array, int]:
    """The array as one that varies over the ranks, and their number; the arguments checked."""
    _checked(kernel, x, dtype, block)
    if grad_dtype is not None:
        check_choice(kernel, "grad_dtype", grad_dtype, FORMATS)
    num_ranks = ranks_of(kernel, axis) if outer is None else math.prod(ranks_of_levels(kernel, axis, outer))
    return varying(x, _both(axis, outer)), num_ranks


def _both(axis: Axis, outer: Axis | None) -> tuple[str, ...]:
    return (*spec_axes(outer), *spec_axes(axis))
