"""tokamax's kernels for grouped matmuls and their gradients, by GPU generation."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from meshpar.hardware.clusters import VARIABLE, Cluster, parse_profile
from meshpar.hardware.compile_target import target, target_profile

OPERANDS = ("product", "rows", "weights")
"""The results of a grouped matmul: its product, and the gradients for rows and weights."""
KERNELS = ("mosaic", "triton")


class GroupedKernels(NamedTuple):
    """The kernel of each result of a grouped matmul: `mosaic` or `triton`."""

    product: str
    rows: str
    weights: str

    def __str__(self) -> str:
        return ", ".join(f"{operand}: {kernel}" for operand, kernel in self._asdict().items())


BY_GENERATION: Mapping[int, GroupedKernels] = {9: GroupedKernels(product="mosaic", rows="mosaic", weights="triton")}
"""Major compute capability -> kernels. tokamax has no kernel for weight gradients on other generations.

The evidence is measured: the times in tokamax 0.0.17's tuning files for an H100 (2026-07), which `kernel_rates.toml`
summarizes, for balanced groups and at least 4,096 rows. Triton computes weight gradients 2.5 to 6.6 times as fast
as Mosaic in all 22 shapes. Mosaic is the faster kernel in 16 of 21 shapes of the product (up to 6.9 times) and in 18 of
21 of the gradient of rows (up to 4.3 times). In the only shape with 8 groups, Triton computes the product 1.5 times as
fast. `meshpar bench gpu` measures both, and its profile replaces this table.
"""


def grouped_kernels() -> GroupedKernels | None:
    """Return the kernels for the GPU that a program is traced for, or None if tokamax lacks a kernel.

    The measured rates of a profile replace the table: the profile of `explain`, or of the variable `MESHPAR_CLUSTER`,
    if it is for a GPU of the same generation. Without the packages of Triton, Mosaic computes all results.
    """
    capability = target()[1] or (9, 0)
    table = BY_GENERATION.get(capability[0])
    if table is None:
        return None
    profile = target_profile()
    if profile is None and (path := os.environ.get(VARIABLE)):
        profile = parse_profile(path)
    is_for_target = isinstance(profile, Cluster) and profile.gpu.chip.compute_capability[0] == capability[0]
    measured = fastest(profile.grouped) if is_for_target else {}
    chosen = table._replace(**measured)
    return chosen if has_triton() else GroupedKernels(*("mosaic" for _ in chosen))


def fastest(rates: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Return operand -> kernel with the highest median rate of the sizes that were measured with all kernels.

    Example:
      >>> fastest({"mosaic rows": {1024: 3e14}, "triton rows": {1024: 4e14}, "triton weights": {1024: 6e14}})
      {'rows': 'triton'}
    """
    chosen = {}
    for operand in OPERANDS:
        tables = {kernel: rates.get(f"{kernel} {operand}", {}) for kernel in KERNELS}
        if sizes := set.intersection(*map(set, tables.values())):
            medians = {kernel: statistics.median(table[size] for size in sizes) for kernel, table in tables.items()}
            chosen[operand] = max(medians, key=medians.__getitem__)
    return chosen


def has_triton() -> bool:
    """Return whether the packages that compile tokamax's Triton kernels are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))
