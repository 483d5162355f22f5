"""Block-scaled FP8 weights, as in the releases of DeepSeek-V3 and Kimi-K2.

A float8_e4m3 matrix `x.weight` has float32 factors `x.weight_scale_inv`, one per block of 128 rows and 128 columns. The
last block of a dim may be smaller. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.interop import mxfp4
from meshpar.interop.fields import bad_value
from meshpar.sharding.errors import is_int

CONFIG_FIELD = "quantization_config"
FLOAT8 = "F8_E4M3"
"""The dtype's name in safetensors files."""
DEQUANTIZED_DTYPE = "bfloat16"
"""Default dtype of dequantized weights, as in DeepSeek's conversion script."""
SCALE = "_scale_inv"
"""Suffix of the name of a tensor's factors."""
_SUPPORTED: dict[str, tuple[Any, ...]]
_SUPPORTED = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None),
              "scale_fmt": ("ue8m0", "float", None)}  # fmt: skip
# The dtypes in the files show which tensors are quantized.
_IGNORED = {"weight_block_size", "modules_to_not_convert", "ignored_layers"}
_MAX_BLOCK_SIZE = 2**20

Block = tuple[int, int]
"""Number of rows and columns of a block."""


def read_block_shape(where: str, document: Mapping[str, Any]) -> Block | None:
    """Return the block shape in a `config.json`, or None if the weights are not quantized. It is `BLOCK` for MXFP4."""

    config = document.get(CONFIG_FIELD)
    if config is None:
        return None
    fields = config if isinstance(config, dict) else {}
    if fields.get("quant_method") == "mxfp4" and fields.keys() <= {"quant_method", "dequantize", *_IGNORED}:
        return mxfp4.BLOCK
    block: Any = fields.get("weight_block_size")
    unsupported = {
        name: fields.get(name)
        for name in [*_SUPPORTED, *fields]
        if fields.get(name) not in _SUPPORTED.get(name, ()) and name not in _IGNORED
    }
    if not isinstance(block, list) or len(block) != 2 or not all(is_int(n, 1) and n < _MAX_BLOCK_SIZE for n in block):
        unsupported["weight_block_size"] = block
    if unsupported:
        name, value = next(iter(unsupported.items()))
        reason = (
            "only block-scaled FP8 as in DeepSeek-V3 (fp8, e4m3, weight_block_size, dynamic) and mxfp4 are supported"
        )
        fix = "use the bfloat16 release, or dequantize the weights to bfloat16 first"
        raise bad_value(f"{where}, `{CONFIG_FIELD}`", name, value, reason, fix)
    return block[0], block[1]


@dataclasses.dataclass(frozen=True)
class Float8Tensor:
    """The location of a float8 tensor in a file.

    The data is memory-mapped here because `safetensors.numpy` does not support float8.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def read(self, slices: Sequence[slice]) -> np.ndarray:
        """Return a slice of the tensor as float32, without its scale."""
        mapped = np.memmap(self.path, np.uint8, "r", self.offset, self.shape)
        return np.array(mapped[tuple(slices)]).view(jnp.float8_e4m3fn).astype(np.float32)


def float8_tensors(path: Path) -> dict[str, Float8Tensor]:
    """Return the float8 tensors of a file by name."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    return {
        name: Float8Tensor(path, 8 + header_bytes + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == FLOAT8
    }


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the factors of a matrix."""
    return tuple(-(-size // block_size) for size, block_size in zip(shape, block, strict=True))


def scale_slices(slices: Sequence[slice], block: Block) -> tuple[slice, ...]:
    """Return the slices of the factors that a slice of the matrix needs."""
    return tuple(slice(s.start // size, -(-s.stop // size)) for s, size in zip(slices, block, strict=True))


def dequantize(part: np.ndarray, scale: np.ndarray, slices: Sequence[slice], block: Block) -> np.ndarray:
    """Multiply a slice of a matrix by the factors of its blocks, in float32."""
    rows, columns = (np.arange(s.start, s.stop) // n - s.start // n for s, n in zip(slices, block, strict=True))
    scale = scale.astype(np.float32)
    for row in range(len(scale)):  # a loop, because expanding all factors would take as much memory as the slice
        part[rows == row] *= scale[row, columns]
    return part
