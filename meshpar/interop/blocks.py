"""Weights in 8-bit floats, a factor for each block: what a release says of them, and the numbers they stand for.

DeepSeek-V3's own form, in which Kimi-K2 and others are published, too (DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 3.3.2): beside `x.weight`, float8_e4m3, lies `x.weight_scale_inv`, a factor for each block of 128 rows
and 128 columns; at the ends blocks are cut.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.sharding.types import is_int, problem

CONFIG_FIELD = "quantization_config"
FLOAT8 = "F8_E4M3"
"""As safetensors names it."""
STANDS_FOR = "bfloat16"
"""What such weights count as where no dtype is asked for: as DeepSeek's own script writes them."""
SCALE = "_scale_inv"
"""Behind the name of a tensor: its factors."""
_PLAIN = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None),
          "scale_fmt": ("ue8m0", "float", None)}  # fmt: skip
_NO_MATTER = {"weight_block_size", "modules_to_not_convert", "ignored_layers"}
"""The files say themselves which tensors are quantized."""
_MOST = 2**20

Block = tuple[int, int]


def read_block(where: str, document: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a block by `quantization_config`; None: weights are plain.

    Raises:
      ValueError: weights that are quantized in another way.
    """
    given = document.get(CONFIG_FIELD)
    if given is None:
        return None
    exists = "read are 8-bit floats by blocks, as DeepSeek-V3's: fp8, e4m3, weight_block_size, dynamic"
    fix = "take the release in bfloat16, or dequantize it to that first"
    at = f"{where}, `{CONFIG_FIELD}`"
    if not isinstance(given, Mapping):
        raise problem(at, "read quantized weights", exists, fix)
    for name in [*_PLAIN, *given]:
        value, only = given.get(name), _PLAIN.get(name)
        if (only is None and name not in _NO_MATTER) or (only is not None and value not in only):
            shown = repr(value)[:60]
            raise problem(f"{at}, `{str(name)[:60]}`", f"read weights quantized by {shown}", exists, fix)
    size = given.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(is_int(n, 1) and n < _MOST for n in size):
        raise problem(f"{at}, `weight_block_size`", f"be {repr(size)[:60]}", exists, fix)
    return size[0], size[1]


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Where a tensor of bytes stands in a file. The library's numpy has no 8-bit floats, so they are mapped here."""

    path: Path
    offset: int
    shape: tuple[int, ...]

    def read(self, slices: Sequence[slice]) -> np.ndarray:
        """A part of it, as float32."""
        mapped = np.memmap(self.path, np.uint8, "r", self.offset, self.shape)
        return np.array(mapped[tuple(slices)]).view(jnp.float8_e4m3fn).astype(np.float32)


def bytes_of(path: Path) -> dict[str, Bytes]:
    """Tensors of 8-bit floats in a file whose header the library has found sound."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: Bytes(path, 8 + size + one["data_offsets"][0], tuple(one["shape"]))
        for name, one in header.items()
        if name != "__metadata__" and one["dtype"] == FLOAT8
    }


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Of the factors of a matrix; the last block of a dim may be cut."""
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def scale_slices(slices: Sequence[slice], block: Block) -> tuple[slice, ...]:
    """The part of the factors that a part of the matrix needs."""
    return tuple(slice(one.start // of, -(-one.stop // of)) for one, of in zip(slices, block, strict=True))


def dequantized(part: np.ndarray, scale: np.ndarray, slices: Sequence[slice], block: Block) -> np.ndarray:
    """The numbers that a part of a matrix stands for: `part * scale`, each block by its own, in float32.

    Args:
      part: float32, which is multiplied where it stands.
      scale: of the blocks that the part touches.
      slices: where the part stands in the matrix.
      block: rows and columns of a block.
    """
    rows, columns = (
        np.arange(one.start, one.stop) // of - one.start // of for one, of in zip(slices, block, strict=True)
    )
    scale = scale.astype(np.float32)
    for row in range(len(scale)):  # so that no second matrix of factors is made
        part[rows == row] *= scale[row, columns]
    return part
