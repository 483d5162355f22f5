"""Shapes of HLO values: an array, a tuple of shapes, or a token."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import TypeAlias

from meshpar.inspect.hlo.cursor import MAX_DEPTH, HloSyntaxError, Scanner

_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 8, "u1": 8, "s2": 8, "u2": 8, "s4": 8, "u4": 8, "s8": 8, "u8": 8,
    "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f4e2m1fn": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]{0,15})\[([^\][(){}\n]*+)\](\{[^{}\n]*+\})?")
_MAX_SIZE = 1 << 62  # XLA counts elements in 64 bits
_PACKED = re.compile(r"E\((\d{1,2})\)")
_DIM = re.compile(r"(?:<=)?([0-9]{1,18})\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayShape:
    """An array: element type as XLA writes it (`bf16`), dims, and the layout text if it was printed."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements; a dynamic dim counts with its bound."""
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
    """A tuple of shapes, nested as in the text."""

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


def scan_shape(scanner: Scanner) -> Shape:
    """Read a shape such as `bf16[4,8]{1,0}` or `(f32[], (s32[2]))`."""
    match = scanner.match(_ARRAY)
    try:
        if match is not None:
            return _array(match.group())
        start = scanner.pos
        if not scanner.text.startswith("(", start):
            raise scanner.error("expected a shape")
        text = scanner.group()
        scanner.pos = start
        shape = _tuple(text)
        scanner.pos = start + len(text)
        return shape
    except HloSyntaxError as error:
        raise HloSyntaxError(error.message, scanner.line()) from None


@functools.lru_cache(maxsize=65536)
def _array(text: str) -> ArrayShape:
    match = _ARRAY.match(text)
    assert match is not None
    dtype, dims, layout = match.groups()
    try:
        dtype_bits(dtype)
    except ValueError as error:
        raise HloSyntaxError(str(error), 1) from None
    sizes = [_DIM.match(part.strip()) for part in dims.split(",")] if dims.strip() else []
    if not all(sizes):
        raise HloSyntaxError(f"bad dims in shape {text!r}", 1)
    shape = ArrayShape(dtype, tuple(int(size.group(1)) for size in sizes if size), layout or "")
    if shape.size > _MAX_SIZE:
        raise HloSyntaxError(f"no array has the shape {text!r}", 1)
    return shape


@functools.lru_cache(maxsize=8192)
def _tuple(text: str) -> TupleShape:
    return _tuple_at(Scanner(text), depth=0)


def _tuple_at(scanner: Scanner, depth: int) -> TupleShape:
    if depth > MAX_DEPTH // 4:  # tuples are read recursively, brackets are not
        raise scanner.error("tuple shapes nest too deeply")
    scanner.expect("(")
    elements: list[Shape] = []
    scanner.skip_space()
    while not scanner.take(")"):
        if elements:
            scanner.expect(",")
            scanner.skip_space()
        if scanner.text.startswith("(", scanner.pos):
            elements.append(_tuple_at(scanner, depth + 1))
        elif match := scanner.match(_ARRAY):
            elements.append(_array(match.group()))
        else:
            raise scanner.error("expected a shape")
        scanner.skip_space()
    return TupleShape(tuple(elements))
