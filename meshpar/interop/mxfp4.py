"""MXFP4 weights, as in the releases of GPT-OSS.

A tensor `x` [E, inputs, outputs] is stored as `x_blocks` [E, outputs, inputs / 32, 16] and `x_scales` [E, outputs,
inputs / 32], both of bytes. A block has 32 values with 4 bits (e2m1), two per byte with the first in the low bits. They
share the factor `2 ** (scale - 127)`, and the scale 255 stands for NaN. Source: Open Compute Project 2023, "OCP
Microscaling Formats (MX) Specification", version 1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

BLOCK = (1, 32)
"""Number of outputs and inputs of a block."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two tensors."""
UINT8 = "U8"
"""The dtype's name in safetensors files."""
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
"""The two values of each byte."""


def shape_of(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor from the shape of its blocks."""
    num_experts, outputs, num_blocks, _ = blocks
    return num_experts, num_blocks * BLOCK[1], outputs


def read(
    blocks: Callable[[tuple[slice, ...]], np.ndarray], scales: Callable[[tuple[slice, ...]], np.ndarray],
    slices: Sequence[slice],
) -> np.ndarray:  # fmt: skip
    """Return a slice of a tensor in bfloat16, which represents all values. An expert at a time is in float32.

    `blocks` and `scales` read slices of the two tensors.
    """
    experts, inputs, outputs = slices
    first = inputs.start // BLOCK[1]
    stored = (outputs, slice(first, -(-inputs.stop // BLOCK[1])))
    shape = [part.stop - part.start for part in slices]
    out, begin = np.empty(shape, jnp.bfloat16), inputs.start - first * BLOCK[1]
    for number, expert in enumerate(range(experts.start, experts.stop)):
        index = (slice(expert, expert + 1), *stored)
        values = dequantize(blocks((*index, slice(0, 16)))[0], scales(index)[0])
        out[number] = values[:, begin : begin + shape[1]].T
    return out


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values in float32: `[..., n, 16], [..., n] -> [..., 32 n]`."""
    with np.errstate(over="ignore", invalid="ignore"):
        factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)  # infinite instead of NaN
        values = _PAIRS[blocks] * factors[..., None, None]
    return values.reshape(*blocks.shape[:-2], -1)
