"""Dims of arrays as products of factors, which shows where the examples of a batch are after reshapes.

A dim of size 6 that was reshaped from [2 examples, 3 positions] has the factors `(2, examples)` and `(3, varying)`.
Factors are ordered from major to minor and have sizes above 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Examples(NamedTuple):
    """Tag of a factor that numbers examples: its index times `stride` is added to the number of the example."""

    stride: int = 1
    batch: int = 0
    """Number of examples of the batch dim. Leaves of the batch may have different batch dims."""


Tag: TypeAlias = Examples | str
VARYING, UNIFORM = "varying", "uniform"
"""Tags of factors without examples. Along a uniform factor all values are equal."""


class Factor(NamedTuple):
    """A factor of a dim."""

    size: int
    tag: Tag


Dim: TypeAlias = tuple[Factor, ...]


class MixedExamplesError(Exception):
    """An operation combines examples, as the message states."""


class UndecidedError(Exception):
    """The analysis cannot decide whether an operation combines examples; the message is the reason."""


def dim_of(size: int, tag: Tag) -> Dim:
    """Return a dim with a single factor."""
    return (Factor(size, tag),) if size != 1 else ()


def size_of(dim: Dim) -> int:
    """Return the number of elements along a dim."""
    return math.prod(factor.size for factor in dim)


def examples_in(dims: Iterable[Dim]) -> tuple[Factor, ...]:
    """Return the factors that number examples."""
    return tuple(factor for dim in dims for factor in dim if isinstance(factor.tag, Examples))


def _split(factor: Factor, minor: int) -> tuple[Factor, Factor]:
    """Split a factor into a major and a minor factor, where `minor` is the size of the second."""
    size, tag = factor
    if not isinstance(tag, Examples):
        return Factor(size // minor, tag), Factor(minor, tag)
    return Factor(size // minor, tag._replace(stride=tag.stride * minor)), Factor(minor, tag)


def merged(factors: Iterable[Factor]) -> Dim:
    """Merge adjacent factors where possible.

    >>> merged([Factor(2, Examples(4)), Factor(4, Examples(1)), Factor(3, VARYING), Factor(1, UNIFORM)])
    (Factor(size=8, tag=Examples(stride=1, batch=0)), Factor(size=3, tag='varying'))
    """
    out: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        if out:
            (size, tag), last = factor, out[-1]
            is_chain = isinstance(tag, Examples) and last.tag == tag._replace(stride=tag.stride * size)
            if is_chain or (not isinstance(tag, Examples) and last.tag == tag):
                out[-1] = Factor(last.size * size, tag)
                continue
        out.append(factor)
    return tuple(out)


def reshaped(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the factors of a row-major reshape.

    >>> two_by_six = reshaped([dim_of(4, Examples()), dim_of(3, VARYING)], (2, 6))
    >>> two_by_six[0]
    (Factor(size=2, tag=Examples(stride=2, batch=0)),)
    >>> reshaped(two_by_six, (12,))
    ((Factor(size=4, tag=Examples(stride=1, batch=0)), Factor(size=3, tag='varying')),)
    """
    rest = [factor for dim in dims for factor in dim]
    new: list[Dim] = []
    for size in reversed(shape):
        taken: list[Factor] = []
        while size > 1:
            factor = rest.pop()
            if size % factor.size == 0:
                taken.insert(0, factor)
                size //= factor.size
            elif factor.size % size == 0:
                major, minor = _split(factor, size)
                rest.append(major)
                taken.insert(0, minor)
                size = 1
            elif examples_in(dims):
                raise UndecidedError("a reshape divides the examples unevenly")
            else:
                return tuple(dim_of(length, VARYING) for length in shape)
        new.insert(0, merged(taken))
    return tuple(new)


def joined(a: Dim, b: Dim) -> Dim:
    """Return the factors of an element-wise operation on two dims of equal size.

    >>> joined(dim_of(6, UNIFORM), (Factor(2, Examples()), Factor(3, VARYING)))
    (Factor(size=2, tag=Examples(stride=1, batch=0)), Factor(size=3, tag='varying'))
    """
    if a == b:
        return a
    left, right = list(a), list(b)
    out: list[Factor] = []
    while left and right:
        x, y = left.pop(), right.pop()
        size = min(x.size, y.size)
        if x.size % size or y.size % size:
            if examples_in([a, b]):
                raise UndecidedError("examples are combined with an array of other factors")
            return dim_of(size_of(a), VARYING)
        if x.size > size:
            major, x = _split(x, size)
            left.append(major)
        if y.size > size:
            major, y = _split(y, size)
            right.append(major)
        out.insert(0, Factor(size, _joined_tag(x.tag, y.tag)))
    return merged(out)


def _joined_tag(a: Tag, b: Tag) -> Tag:
    if a == b or b == UNIFORM:
        return a
    if a == UNIFORM:
        return b
    if isinstance(a, Examples) and isinstance(b, Examples):
        raise MixedExamplesError("it combines different examples")
    raise UndecidedError("it depends on the position of an example in the batch")
