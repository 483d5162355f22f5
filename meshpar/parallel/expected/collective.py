"""A collective that a compiled training step should contain.

Each `Parallelism` yields an `ExpectedCollective` per array size for the collectives that XLA inserts because of its
rules. It describes the cheapest form. XLA may also lower it as:

    gather over two axes          axis by axis
    sum over two axes             axis by axis, or over both; scattered first or last
    ... with `may_all_reduce`     all-reduced and then sliced: at most twice the bytes over each axis
    stacked layers                per layer inside their loop, or as a full stack
    a single axis                 N-1 permutes of the same bytes, like `meshpar.collectives.all_gather_matmul`

Collectives of kernels are not expected: they are read from the traced step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

ITEMSIZE = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "u8": 1, "f8e4m3fn": 1}
"""Bytes per element by HLO dtype."""

WEIGHTS, GRADIENTS, RENEWED = "weights before use", "gradients", "new parameters"
"""Roles of the collectives for parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCollective:
    """A collective that the program must contain, for arrays of the same size, with its count per step."""

    role: str
    """Purpose: `weights before use`, `gradients`, `new parameters`, `partial sums, forward`, ..."""
    kind: Literal["gather", "sum", "exchange"]
    """`gather` is an all-gather, `sum` an all-reduce or reduce-scatter, `exchange` an all-to-all."""
    axes: tuple[str, ...]
    """Mesh axes in the mesh's order."""
    scattered: tuple[str, ...] = ()
    """For a sum, the axes whose ranks keep only their shard of the result."""
    may_all_reduce: bool | Literal["always"] = False
    """For a scattered sum, whether XLA may all-reduce it and slice; `"always"` if it always does."""
    elements: int
    """Number of elements of the array if it is replicated over `axes`."""
    multiple: bool = False
    """Whether arrays with a multiple of `elements` match, too."""
    dtype: str
    """HLO dtype on the wire."""
    count: tuple[int, int]
    """Minimum and maximum number of arrays per step, over all tensors."""
    counts: tuple[tuple[str, int, int], ...] = ()
    """Axes with a different count, as (axis, minimum, maximum)."""
    tensors: tuple[str, ...]
    stack: int = 1
    """Number of layers stacked in the array. XLA may send them with a single collective."""
    is_param: bool = False
    """True for collectives of parameters and gradients. In the loop over layers, only stacked parameters have them."""
    forward_only: bool = False
    """True if only the forward pass contains it."""
    outside_loops: bool = False
    """True if it is outside all loops."""
    as_stacked: ExpectedCollective | None = None
    """For a leaf without names, the alternative in case its first dim is a stack of layers that a loop runs over."""

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes of a sum that are all-reduced instead of scattered."""
        return tuple(axis for axis in self.axes if axis not in self.scattered) if self.kind == "sum" else ()

    def count_over(self, axis: str) -> tuple[int, int]:
        """Return the minimum and maximum count per step over an axis."""
        return next(((minimum, maximum) for name, minimum, maximum in self.counts if name == axis), self.count)

    def forms(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Return the collectives of the cheapest form as (HLO kind, axes, payload elements)."""
        if self.kind != "sum":
            return (({"gather": "all-gather", "exchange": "all-to-all"}[self.kind], self.axes, self.elements),)
        shard = self.elements // math.prod(sizes[axis] for axis in self.scattered)
        scatter = (("reduce-scatter", self.scattered, self.elements),) if self.scattered else ()
        return (*scatter, *((("all-reduce", self.rest, shard),) if self.rest else ()))


def merged(collectives: Iterable[ExpectedCollective]) -> tuple[ExpectedCollective, ...]:
    """Merge collectives that differ only in tensors and counts. The counts are added."""
    result: dict[Any, ExpectedCollective] = {}
    for new in collectives:
        key = dataclasses.replace(new, tensors=(), count=(0, 0), counts=tuple((axis, 0, 0) for axis, *_ in new.counts))
        if (old := result.get(key)) is not None:
            new = dataclasses.replace(
                old,
                tensors=old.tensors + new.tensors,
                count=(old.count[0] + new.count[0], old.count[1] + new.count[1]),
                counts=tuple(
                    (axis, low + more_low, high + more_high)
                    for (axis, low, high), (_, more_low, more_high) in zip(old.counts, new.counts, strict=True)
                ),
            )
        result[key] = new
    return tuple(result.values())
