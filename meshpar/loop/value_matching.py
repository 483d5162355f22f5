"""Compare a value with its counterparts on the devices and in the loops of a different layout.

    values of the full batch          ─► elements must be equal
    parts of the batch or of a dim    ─► each row of the reference must occur in a part
    partial sums                      ─► their sum over devices or iterations must be the reference

The tolerance comes from runs of the reference with perturbed rounding, so it grows with the condition of the value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

FACTOR = 4.0
"""Allowed difference as a multiple of the measured rounding error. Layouts differ in the order of summation."""
_FLOOR_EPS = 4.0
"""Minimum of the allowed difference, in machine epsilons of the largest element."""
_NEIGHBORS = 4
"""Number of candidates for a row that are compared element by element."""
_MAX_ROWS = 2**20
"""Rows of a value that are compared. Larger values are split into fewer, larger rows."""


class CapturedValue(NamedTuple):
    """A captured value."""

    array: np.ndarray
    """[devices and iterations..., *shape]"""
    axes: tuple[str | None, ...] = ()
    """For each leading dim the mesh axis, or None for a loop."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on a device in an iteration."""
        return self.array.shape[len(self.axes) :]

    @property
    def parts(self) -> np.ndarray:
        """The values of all devices and iterations: [parts, *shape]."""
        return self.array.reshape(-1, *self.shape)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed difference of a value."""

    largest: float
    """Of an element."""
    rms: float
    """Root mean square over the elements."""
    share: float = 0.0
    """Share of integers that may differ, because rounding changes them in the reference, too."""

    def scaled(self, factor: float) -> Tolerance:
        """Return the tolerance of the value times a factor."""
        return Tolerance(self.largest * factor, self.rms * factor, self.share)

    @classmethod
    def of(cls, exact: np.ndarray, perturbed: Sequence[np.ndarray], *others: Any) -> Tolerance:
        """Return the tolerance from a reference and its runs with perturbed rounding.

        `others` are the dtypes in which other layouts compute the value.
        """
        if not jnp.issubdtype(exact.dtype, jnp.inexact):
            changed = [np.mean(x != exact) for x in perturbed if exact.size]
            return cls(0.0, 0.0, FACTOR * float(max(changed, default=0.0)))
        eps = max(float(jnp.finfo(dtype).eps) for dtype in (exact.dtype, *others) if jnp.issubdtype(dtype, jnp.inexact))
        reference = wide(exact)
        errors = [np.where(np.isfinite(error), error, 0.0) for error in (differences(reference, x) for x in perturbed)]
        size = np.abs(reference[np.isfinite(reference)])
        floor = _FLOOR_EPS * eps * float(size.max(initial=0.0))
        largest = max((float(error.max(initial=0.0)) for error in errors), default=0.0)
        rms = max((_rms(error) for error in errors), default=0.0)
        floor_rms = _FLOOR_EPS * eps * _rms(size)
        return cls(FACTOR * largest + floor, FACTOR * rms + floor_rms)


def wide(x: np.ndarray) -> np.ndarray:
    """Return an array in float64 or complex128."""
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def differences(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the absolute difference of each element: 0 for equal infinities or NaNs, inf for unequal ones."""
    with np.errstate(all="ignore"):
        a, b = wide(reference), wide(other)
        difference = np.abs(a - b)
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.where(np.isnan(difference), np.inf, difference))


class Match(NamedTuple):
    """The result of a comparison."""

    is_equal: bool
    wrong: np.ndarray
    """Whether each element of the reference has no counterpart: [parts, *shape]."""
    other: np.ndarray | None
    """The other value in the form of the reference, [parts, *shape], if the elements correspond to each other."""
    summed: tuple[str | None, ...] = ()
    """The axes (None: a loop) over which the partial sums of the layout were added."""


def compare(reference: CapturedValue, others: Sequence[CapturedValue], tolerance: Tolerance) -> Match | None:
    """Compare a value with the values of the same equation in a different layout.

    Args:
      reference: the value of the reference.
      others: the values of the other layout. Several, if the layout evaluates the equation several times.
      tolerance: the allowed difference.

    Returns:
      The match, or None if the shapes do not correspond.
    """
    parts, is_float = reference.parts, jnp.issubdtype(reference.array.dtype, jnp.inexact)
    on_devices = any(map(_devices, others))
    first = [_without_replicas(value) for value in others]
    result: Match | None = None
    for value in first:
        if value.parts.shape == parts.shape and not _devices(value):
            wrong = _wrong(parts, value.parts, tolerance)
            if not wrong.any():
                return Match(True, wrong, value.parts)
            result = Match(False, wrong, value.parts)
    if result is not None and len(first) == 1:
        # Indices and masks of a shard differ from the indices and masks of the full array.
        return None if on_devices and not is_float else result
    if parts.size > 1 and (parts == parts.flat[0]).all():
        return None  # any value could have a constant as a part
    for values, summed in _sums(first):
        candidates = [value.parts for value in values if len(value.shape) == len(reference.shape)]
        covered = _covered(parts, candidates, tolerance)
        if covered is None:
            continue
        match = Match(bool(covered.all()), ~covered, None, summed)
        if match.is_equal:
            return match
        if result is None or match.wrong.sum() < result.wrong.sum():
            result = match
    return result if is_float else None


def _wrong(reference: np.ndarray, other: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Return which elements differ. Integers may differ in the share of elements that rounding changes."""
    difference = differences(reference, other)
    if not jnp.issubdtype(reference.dtype, jnp.inexact):
        wrong = difference > 0
        return wrong & (wrong.mean() > tolerance.share)
    wrong = difference > tolerance.largest
    if not wrong.any() and _rms(difference) > tolerance.rms:
        wrong = difference > tolerance.rms
    return wrong


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _devices(value: CapturedValue) -> bool:
    return any(axis is not None for axis in value.axes)


def _without_replicas(value: CapturedValue) -> CapturedValue:
    """Remove the dims of mesh axes along which the value is replicated."""
    array, axes = value
    for dim, axis in reversed(list(enumerate(axes))):
        if axis is not None and (array.shape[dim] == 1 or is_replicated(array, dim)):
            array, axes = array.take(0, dim), (*axes[:dim], *axes[dim + 1 :])
    return CapturedValue(array, axes)


def is_replicated(array: np.ndarray, dim: int) -> bool:
    """Return whether all slices of an array along a dim are equal."""
    first = array.take([0], dim)
    return bool(np.array_equal(np.broadcast_to(first, array.shape), array, equal_nan=array.dtype.kind in "fc"))


def _sums(values: Sequence[CapturedValue]) -> Iterator[tuple[list[CapturedValue], tuple[str | None, ...]]]:
    """Yield the values, then their sums over subsets of their leading dims, without dims of equal terms."""
    yield list(values), ()
    for value in values:
        if jnp.issubdtype(value.array.dtype, jnp.number):
            yield from _sums_of(value)


def _sums_of(value: CapturedValue) -> Iterator[tuple[list[CapturedValue], tuple[str | None, ...]]]:
    dims = [dim for dim in range(len(value.axes)) if value.array.shape[dim] > 1 and not is_replicated(value.array, dim)]
    for count in range(1, len(dims) + 1):
        for subset in itertools.combinations(dims, count):
            with np.errstate(all="ignore"):
                total = wide(value.array).sum(axis=subset)
            axes = tuple(axis for dim, axis in enumerate(value.axes) if dim not in subset)
            yield [_without_replicas(CapturedValue(total, axes))], tuple(value.axes[dim] for dim in subset)


def _covered(reference: np.ndarray, others: Sequence[np.ndarray], tolerance: Tolerance) -> np.ndarray | None:
    """Return a mask [parts, *shape] of the elements of the reference whose rows occur in any candidate."""
    covered = np.zeros(reference.shape, bool)
    is_comparable = False
    for other in others:
        unit = unit_of(reference.shape[1:], other.shape[1:])
        if unit is None or other.shape[0] == 0:
            continue
        is_comparable = True
        rows, candidates = rows_of(reference, unit), rows_of(other, unit)
        found = matching(rows, candidates, tolerance.largest) >= 0
        covered |= from_rows(np.broadcast_to(found[:, None], rows.shape), reference.shape, unit)
        if other.shape[1:] == reference.shape[1:] and len(reference) == 1:  # each element is right on some device
            covered |= (differences(reference, other) <= tolerance.largest).any(axis=0, keepdims=True)
    return covered if is_comparable else None


def unit_of(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """Return the largest shape of a row in both shapes, or None if the shapes do not correspond.

    The first dim that differs is the batch, and each example is a row. Further dims that differ are sharded.
    """
    unit, has_batch = [], False
    for a, b in zip(shape, other, strict=True):
        if a == b:
            unit.append(a)
        elif a % b and b % a:
            return None
        else:
            unit.append(min(a, b) if has_batch else 1)
            has_batch = True
    return tuple(unit)


def rows_of(array: np.ndarray, unit: Sequence[int]) -> np.ndarray:
    """Split an array [parts, *shape] into blocks of shape `unit`: [rows, elements]."""
    split = [array.shape[0]]
    for size, step in zip(array.shape[1:], unit, strict=True):
        split += [size // step, step]
    order = [0, *range(1, len(split), 2), *range(2, len(split), 2)]
    return array.reshape(split).transpose(order).reshape(-1, math.prod(unit))


def from_rows(rows: np.ndarray, shape: Sequence[int], unit: Sequence[int]) -> np.ndarray:
    """Undo `rows_of`."""
    counts = [size // step for size, step in zip(shape[1:], unit, strict=True)]
    blocks = rows.reshape(shape[0], *counts, *unit)
    order = [0, *itertools.chain(*((1 + dim, 1 + len(unit) + dim) for dim in range(len(unit))))]
    return blocks.transpose(order).reshape(shape)


def matching(rows: np.ndarray, candidates: np.ndarray, largest: float) -> np.ndarray:
    """Return the index of an equal candidate for each row, or -1.

    A random projection of the rows limits the search to the nearest candidates.
    """
    rows, candidates = wide(rows), wide(candidates)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, rows.shape[1])
    keys, candidate_keys = (np.nan_to_num(x, posinf=1e30, neginf=-1e30).real @ weights for x in (rows, candidates))
    order = np.argsort(candidate_keys)
    position = np.searchsorted(candidate_keys[order], keys)
    result = np.full(len(rows), -1)
    for offset in range(-_NEIGHBORS, _NEIGHBORS):
        index = order[np.clip(position + offset, 0, len(order) - 1)]
        is_equal = differences(rows, candidates[index]).max(axis=1, initial=0.0) <= largest
        result = np.where((result < 0) & is_equal, index, result)
    return result
