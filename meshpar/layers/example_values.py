"""Static descriptions of arrays, for the analysis of the examples in a loss function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from meshpar.layers.dim_factors import UNIFORM, VARYING, Dim, Examples, Factor, MixedExamplesError, dim_of, examples_in

MAX_KNOWN = 2**16
"""Integer arrays with at most this many elements are computed, to recognise `x[jnp.arange(batch), labels]`."""


@dataclasses.dataclass(frozen=True)
class Combined:
    """An operation that combines examples, or that may do so."""

    kind: Literal["dependent", "undecided"]
    why: str
    where: str
    """Source line."""
    in_layers: bool = False
    """Whether `scan_layers` runs it."""


@dataclasses.dataclass(frozen=True)
class Value:
    """Static description of an array in the jaxpr."""

    dims: tuple[Dim, ...]
    is_sum: bool = False
    """True if the array is a sum over all examples, and linear in the terms of each."""
    is_zero: bool = False
    is_random: bool = False
    """True for random numbers that do not depend on the batch, and for functions of random numbers."""
    is_random_sum: bool = False
    """True for a sum of random numbers over all examples, and for its linear functions."""
    divisor: float = 1.0
    """Constant divisor of a sum over the examples; 1 if it is unknown."""
    known: np.ndarray | None = None
    """The value of a small constant array of integers, or of a constant scalar."""
    columns: tuple[np.ndarray | None, ...] = ()
    """Known parts of a concatenation along the last dim, each of size 1 in that dim."""
    is_routed: bool = False
    """True inside the scope of routed experts."""
    combined: Combined | None = None
    """The first operation that combined examples."""

    @property
    def examples(self) -> tuple[Factor, ...]:
        return examples_in(self.dims)

    @property
    def depends(self) -> bool:
        """Whether the array depends on the batch."""
        return bool(self.is_sum or self.is_routed or self.combined or self.examples)


def varying(shape: Sequence[int]) -> Value:
    """Return a value without examples."""
    return Value(tuple(dim_of(size, VARYING) for size in shape))


def per_example(shape: Sequence[int], num_examples: int | None = None) -> Value:
    """Return a leaf of the batch, `[B, ...]`, or `[B n, ...]` with n rows for each of B = `num_examples` examples."""
    count = num_examples if num_examples and shape[0] % num_examples == 0 else shape[0]
    examples, rows = dim_of(count, Examples(1, count)), dim_of(shape[0] // count, VARYING)
    return Value(((*examples, *rows), *(dim_of(size, VARYING) for size in shape[1:])))


def constant(x: Any) -> Value:
    """Describe a constant array."""
    shape, dtype = np.shape(x), getattr(x, "dtype", np.asarray(x).dtype)
    if not isinstance(x, np.ndarray | jax.Array | np.generic | float | int | bool) or np.size(x) > MAX_KNOWN:
        return varying(shape)
    if isinstance(x, jax.core.Tracer) or not (np.issubdtype(dtype, np.number) or dtype == np.bool_):
        return varying(shape)
    array = np.asarray(x)
    is_uniform = [size > 0 and bool((array == array.take([0], dim)).all()) for dim, size in enumerate(shape)]
    dims = (dim_of(size, UNIFORM if same else VARYING) for size, same in zip(shape, is_uniform, strict=True))
    return Value(tuple(dims), is_zero=not array.any(), known=array if is_exact(dtype) or not shape else None)


def is_exact(dtype: jax.typing.DTypeLike) -> bool:
    """Return whether a dtype is an integer or Boolean dtype."""
    return bool(jax.numpy.issubdtype(dtype, np.integer) or dtype == np.bool_)  # numpy does not know the dtype of keys


def check_distinct(value: Value) -> None:
    """Check that no two dims number the examples."""
    tags = [factor.tag for factor in value.examples]
    strides: dict[int, list[Factor]] = {}
    for factor in value.examples:
        strides.setdefault(factor.tag.batch, []).append(factor)  # type: ignore[union-attr]
    if len(set(tags)) < len(tags) or len(strides) > 1:
        raise MixedExamplesError("it combines all pairs of examples")
