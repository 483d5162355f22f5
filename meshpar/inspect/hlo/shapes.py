"""Shapes of HLO values: an array, a tuple of shapes, or a token."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import TypeAlias

from meshpar.inspect.hlo.text import split_top

_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 8, "u1": 8, "s2": 8, "u2": 8, "s4": 8, "u4": 8, "s8": 8, "u8": 8,
    "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f4e2m1fn": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d<=,]*)\](\{.*\})?")
_PACKED = re.compile(r"E\((\d+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayShape:
    """An array: element type as XLA writes it (`bf16`), dims, and the layout text if it was printed."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements. Dynamic dims have their maximum size."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Size in bytes. Elements below 8 bits take a byte unless the layout packs them."""
        packed = _PACKED.search(self.layout) if self.layout else None
        bits = int(packed.group(1)) if packed else dtype_bits(self.dtype)
        return -(-self.size * bits // 8)

    def leaves(self) -> Iterator[ArrayShape]:
        """Yield the arrays of this shape, here the array itself."""
        yield self

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class TupleShape:
    """A tuple of shapes, which may themselves be tuples."""

    elements: tuple[Shape, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves())

    def leaves(self) -> Iterator[ArrayShape]:
        for element in self.elements:
            yield from element.leaves()

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.elements))})"


Shape: TypeAlias = ArrayShape | TupleShape


def dtype_bits(dtype: str) -> int:
    """Return the bits of one element in memory, or raise `ValueError` for an unknown type."""
    bits = _BITS.get(dtype)
    if bits is None:
        if not re.fullmatch(r"f8[a-z0-9]+", dtype):
            raise ValueError(f"unknown HLO element type {dtype!r}")
        bits = 8
    return bits


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Parse a shape such as `bf16[4,8]{1,0}` or `(f32[], /*index=1*/(s32[2]))`."""
    if text.startswith("/*"):
        text = text.partition("*/")[2]
    if text.startswith("("):
        return TupleShape(tuple(map(parse_shape, split_top(text, 1)[0])))
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is not a shape")
    dtype, dims, layout = match.groups()
    dtype_bits(dtype)
    return ArrayShape(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size), layout or "")
