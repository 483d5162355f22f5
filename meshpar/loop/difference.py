"""The report of `diff`: the first wrong value with its source line, kind and usual cause."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshpar.loop.intermediate_values import Node
from meshpar.loop.value_matching import (
    CapturedValue,
    Match,
    Tolerance,
    differences,
    is_replicated,
    matching,
    wide,
)
from meshpar.sharding.printing import Plain

CAUSES = {
    "not finite": "a division by zero, an overflow, or a fully masked row of a softmax",
    "missing reduction": "a psum is missing, or a partial sum leaves a shard_map as if it were replicated",
    "factor": "a sum in place of a mean, a mean in place of a sum, or two reductions over the axis",
    "rows": "rows or the mask of a different shard, or a dropped or repeated microbatch",
    "order": "a gather in a different order of mesh axes, or a permutation without its inverse",
    "stale": "a read before the write of a buffer, or an index that is off by one",
    "not updated": "the update is not applied or not returned",
    "random": "a random key is not folded with the same index, or depends on the device",
    "zero": "a mask, an index out of bounds, or a buffer that is not written",
    "values": "an error in the equation, or in the lines listed above",
}
"""The usual cause of each kind of difference."""


class Line(NamedTuple):
    """A line of source code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = Path(self.file)
        for folder in (Path.cwd(), Path(__file__).parents[2]):
            if file.is_relative_to(folder):
                file = file.relative_to(folder)
        return f"{file}:{self.line} ({self.function.rpartition('.')[2]})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin(Plain):
    """The first value that differs."""

    module: str
    """Named scopes: the path of the module in the model."""
    phase: str
    """"forward", "backward" or "update"."""
    equation: str
    """The primitive."""
    source: Line
    """The line that traced the equation."""
    callers: tuple[Line, ...]
    """The callers of that line, innermost first."""
    user: Line | None
    """The innermost caller in the user's code."""
    between: tuple[tuple[Line, ...], ...]
    """Lines that only the other layout runs, after the last equal values. Each line has its callers."""
    operands: tuple[Line, ...]
    """The lines that compute the operands of the equation."""
    unreduced: tuple[Line, ...]
    """For a missing reduction, the line that computes the partial sums, and its callers."""
    shape: tuple[int, ...]
    dtype: str
    iteration: tuple[int, ...]
    """The first iteration with wrong elements, for each enclosing loop."""
    devices: tuple[str, ...]
    """Mesh coordinates of devices with wrong elements. Empty for all devices and for values inside a `shard_map`."""
    wrong: float
    """Share of the elements that are wrong."""
    rows: str
    """The indices of wrong elements along the dims where only a part is wrong: "dim 0: 2-3"."""
    largest: float | None
    """Largest absolute difference. None for values that are not finite and for rows without a counterpart."""
    tolerance: float
    kind: str
    detail: str
    cause: str
    derived = ("lines",)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines to look at."""
        chains = itertools.chain.from_iterable(itertools.zip_longest(*self.between))
        first = (*self.unreduced, *(line for line in chains if line is not None))
        others = (self.source, *self.operands, *self.callers)
        return tuple(dict.fromkeys((*first, *others)))


class Deviation(NamedTuple):
    """The largest difference of a compared value."""

    phase: str
    module: str
    equation: str
    ratio: float
    """In units of the tolerance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueDifference(Plain):
    """The result of `diff`."""

    compared: Mapping[str, int]
    """Number of compared results by kind: loss, gradient, parameter, ..."""
    results: tuple[str, ...] = ()
    """Results of the step that differ, most important first."""
    is_finite: bool = True
    """Whether the loss of the reference is finite. NaNs at the same places are equal."""
    origin: Origin | None = None
    """The first value that differs. None if all results are equal, and with `find_origin=False`."""
    deviations: tuple[Deviation, ...] = ()
    """The values that were compared element by element, in the order of the program."""
    derived = ("is_equal",)

    @property
    def is_equal(self) -> bool:
        """Whether all results are equal up to rounding."""
        return not self.results

    def __bool__(self) -> bool:
        return bool(self.results)

    def __str__(self) -> str:
        if not self.results:
            counts = ", ".join(f"{count} x {kind}" for kind, count in self.compared.items())
            return f"no difference beyond rounding ({counts})" + "; the loss is not finite" * (not self.is_finite)
        more = f" and {len(self.results) - 3} more" if len(self.results) > 3 else ""
        lines = [f"different: {', '.join(self.results[:3])}{more}"]
        origin = self.origin
        if origin is None:
            return lines[0]
        where = f" of module `{origin.module}`" if origin.module else ""
        chain = _chain(origin.source, *origin.callers)
        lines.append(f"first different value: {origin.phase}{where}, `{origin.equation}` at {chain}")
        if origin.user is not None and origin.user not in (origin.source, *origin.callers):
            lines.append(f"  in your code: {origin.user}")
        shape = "x".join(map(str, origin.shape)) or "scalar"
        extent = f", {origin.rows}" if origin.rows else ""
        lines.append(f"  {origin.dtype}[{shape}], {origin.wrong:.0%} of the elements{extent}")
        if origin.iteration:
            lines.append(f"  first in iteration {', '.join(map(str, origin.iteration))} of the enclosing loops")
        if origin.devices:
            lines.append(f"  on devices {'; '.join(origin.devices)}")
        if origin.largest is not None:
            lines.append(f"  largest difference {origin.largest:.2g}; rounding explains {origin.tolerance:.2g}")
        lines.append(f"  kind: {origin.detail or origin.kind}")
        if origin.operands:
            lines.append(f"  operands from {', '.join(map(str, origin.operands))}")
        if origin.between:
            lines += ["  lines that only one layout runs before it:", *(f"    {_chain(*x)}" for x in origin.between)]
        if origin.unreduced:
            lines.append(f"  the partial sums come from {_chain(*origin.unreduced)}")
        lines.append(f"  usual cause: {origin.cause}")
        return "\n".join(lines)

    __rich__ = __str__


def _chain(*lines: Line) -> str:
    return " < ".join(map(str, lines))


class WrongValue(NamedTuple):
    """The first different value, with the arrays that explain it."""

    node: Node
    """Of the reference."""
    reference: CapturedValue
    others: Sequence[CapturedValue]
    """The corresponding values of the layout."""
    inside: Sequence[CapturedValue]
    """Values of each device that the layout combines to the value, at the end of a `shard_map`."""
    match: Match
    tolerance: Tolerance
    sizes: Mapping[str, int]
    """Sizes of the mesh axes of the layout."""
    scales: tuple[float, ...]
    """Factors of the layout's values of parts of the batch, including 1."""
    is_random: bool
    """Whether the value depends on random numbers that differ."""
    iteration: int
    """The first part of the reference with wrong elements."""
    old: np.ndarray | None
    """The value before the step, for a parameter or an array of optimizer state."""


def classify(candidate: WrongValue) -> tuple[str, str]:
    """Return the kind of a difference and a sentence with details."""
    for kind, test in _TESTS:
        if (detail := test(candidate)) is not None:
            return kind, detail
    return "values", "different values"


def _not_finite(candidate: WrongValue) -> str | None:
    if not jnp.issubdtype(candidate.reference.array.dtype, jnp.inexact):
        return None
    bad = [value for value in candidate.others if not np.isfinite(wide(value.array)).all()]
    if not bad or not np.isfinite(wide(candidate.reference.array)).all():
        return None
    array = wide(bad[0].array)
    return f"{'NaN' if np.isnan(array).any() else 'infinite'} in {np.mean(~np.isfinite(array)):.0%} of the elements"


def unreduced(candidate: WrongValue) -> tuple[int, str] | None:
    """Return the number of a value inside the `shard_map` whose sum is the reference, and the axes of the sum."""
    reference = candidate.reference.parts
    for number, value in enumerate(candidate.inside):
        dims = [dim for dim, axis in enumerate(value.axes) if axis is not None and value.array.shape[dim] > 1]
        dims = [dim for dim in dims if not is_replicated(value.array, dim)]
        for count in range(1, len(dims) + 1):
            for subset in itertools.combinations(dims, count):
                total = wide(value.array).sum(axis=subset)
                if total.size >= reference.size and any(
                    _equal(reference * scale, total, candidate.tolerance.scaled(scale)) for scale in candidate.scales
                ):
                    axes = ", ".join(f"`{value.axes[dim]}`" for dim in subset)
                    return number, axes
    return None


def _missing_reduction(candidate: WrongValue) -> str | None:
    match = unreduced(candidate)
    return None if match is None else f"one shard's part of a sum: the reduction over {match[1]} is missing"


def _equal(reference: np.ndarray, total: np.ndarray, tolerance: Tolerance) -> bool:
    flat = total.reshape(-1, *reference.shape[1:]) if total.size % max(reference[0].size, 1) == 0 else None
    return flat is not None and bool((matching(_flat(reference), _flat(flat), tolerance.largest) >= 0).all())


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _factor(candidate: WrongValue) -> str | None:
    """Recognize a constant factor other than 0 and 1."""
    if not jnp.issubdtype(candidate.reference.array.dtype, jnp.inexact):
        return None
    reference = wide(candidate.reference.parts[candidate.iteration :][:1])
    for other in _aligned(candidate):
        norm = float(np.vdot(reference, reference).real)
        if norm == 0 or other.shape != reference.shape or not np.isfinite(other).all():
            continue
        factor = float(np.vdot(reference, other).real) / norm
        rest = np.abs(other - factor * reference).max(initial=0.0)
        if abs(factor) < 1e-6 or abs(factor - 1) < 1e-6 or rest > 2 * max(abs(factor), 1) * candidate.tolerance.largest:
            continue
        return f"constant factor {factor:.6g}{_named_factor(factor, candidate)}"
    return None


def _aligned(candidate: WrongValue) -> Iterator[np.ndarray]:
    """Yield values of the layout for the first wrong part of the reference."""
    if candidate.match.other is not None:
        yield wide(candidate.match.other[candidate.iteration :][:1])
    for value in candidate.others:
        if value.shape == candidate.reference.shape:
            parts = wide(value.parts)
            yield parts[:1]
            yield parts.sum(axis=0, keepdims=True)


def _named_factor(factor: float, candidate: WrongValue) -> str:
    sizes = {f"`{axis}`": size for axis, size in candidate.sizes.items() if size > 1}
    loops = [dim.size for dim in candidate.node.dims if dim.axis is None and dim.size > 1]
    sizes |= {f"loop {number}": size for number, size in enumerate(loops)}
    subsets = [names for count in range(1, len(sizes) + 1) for names in itertools.combinations(sizes, count)]
    for text, value in (("", abs(factor)), ("1 / ", 1 / abs(factor))):
        equal = [
            names for names in subsets if math.isclose(value, math.prod(map(sizes.__getitem__, names)), rel_tol=1e-3)
        ]
        if equal:
            return f": {text}the size of {' or of '.join(' x '.join(names) for names in equal)}"
    return ""


def _not_updated(candidate: WrongValue) -> str | None:
    if candidate.old is None or candidate.match.other is None:
        return None
    is_old = differences(candidate.old, candidate.match.other[0]).max(initial=0.0) == 0
    return "the value before the step" if is_old else None


def _order(candidate: WrongValue) -> str | None:
    """Recognize rows that are equal in a different order."""
    other, reference = candidate.match.other, candidate.reference.parts
    if other is None:
        return None
    for dim in range(reference.ndim):
        if reference.shape[dim] == 1:
            continue
        rows, candidates = (_flat(np.moveaxis(x, dim, 0)) for x in (reference, other))
        if rows.shape[1] < 2 and rows.shape[0] < 4:
            continue
        found = matching(rows, candidates, candidate.tolerance.largest)
        if (found >= 0).all() and len(set(found)) > len(rows) // 2 and np.ptp(rows, axis=0).max() > 0:
            return f"the same rows in a different order along {'the loop' if dim == 0 else f'dim {dim - 1}'}"
    return None


def _random(candidate: WrongValue) -> str | None:
    return "different random numbers" if candidate.is_random else None


def _zero(candidate: WrongValue) -> str | None:
    other, wrong = candidate.match.other, candidate.match.wrong
    if other is None or not wrong.any() or (other[wrong] != 0).any():
        return None
    return "zeros"


def _stale(candidate: WrongValue) -> str | None:
    """Recognize the value of a different iteration or device."""
    other, reference, wrong = candidate.match.other, candidate.reference.parts, candidate.match.wrong
    if other is None or len(reference) == 1 or reference[0].size < 2:
        return None
    bad = wrong.reshape(len(wrong), -1).any(axis=1)
    found = matching(_flat(other[bad]), _flat(reference), candidate.tolerance.largest)
    return "the value of a different iteration" if (found >= 0).all() else None


def _rows(candidate: WrongValue) -> str | None:
    wrong = candidate.match.wrong
    if candidate.match.other is None:  # rows of the reference that no device or iteration computes
        return f"{wrong.mean():.0%} of the reference is computed by no device or iteration" if not wrong.all() else None
    share = wrong.mean()
    return "a part of the elements" if 0 < share < 0.9 else None


_TESTS = (
    ("not finite", _not_finite), ("not updated", _not_updated), ("random", _random),
    ("missing reduction", _missing_reduction), ("factor", _factor), ("zero", _zero), ("order", _order),
    ("stale", _stale), ("rows", _rows),
)  # fmt: skip


def extent_of(wrong: np.ndarray) -> str:
    """Return the indices of wrong elements along dims of which only a part is wrong: `dim 0: 2-3`."""
    texts = []
    for dim in range(1, wrong.ndim):
        rest = tuple(other for other in range(wrong.ndim) if other != dim)
        indices = np.flatnonzero(wrong.any(axis=rest))
        if 0 < len(indices) < wrong.shape[dim]:
            spans = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
            names = [f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans[:4]]
            texts.append(f"dim {dim - 1}: {', '.join(names)}{', ...' if len(spans) > 4 else ''}")
    return "; ".join(texts)


def devices_of(array: Any, wrong: np.ndarray) -> tuple[str, ...]:
    """Return the mesh coordinates of the devices whose shards have wrong elements; empty if all have."""
    sharding = array.sharding
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or wrong.shape != array.shape:
        return ()
    coordinates = {device: index for index, device in np.ndenumerate(mesh.devices)}
    shards = sharding.devices_indices_map(array.shape)
    bad = [device for device, index in shards.items() if wrong[index].any()]
    if len(bad) == len(shards):
        return ()
    positions = [dict(zip(mesh.axis_names, coordinates[device], strict=True)) for device in bad]
    names = [human_mesh_coordinates(position, mesh.shape) for position in positions]
    return tuple(sorted(set(names)))


def human_mesh_coordinates(position: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return `fsdp=0, tensor=1`, without axes of size 1."""
    return ", ".join(f"{axis}={index}" for axis, index in position.items() if sizes[axis] > 1)
