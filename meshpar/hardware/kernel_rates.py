"""Tables of measured FLOP/s of attention kernels and grouped matmuls by size.

A table maps a key to FLOP/s by size. Keys of attention are `KERNEL DIRECTION MASK HEAD_DIM`, such as
`cudnn forward causal 128`, and sizes are sequence lengths. Keys of grouped matmuls are `KERNEL RESULT`, such as
`triton weights`, and a size is the equivalent size n of a group: `2 n³` are its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

RateTable: TypeAlias = Mapping[str, Mapping[int, float]]


class AttentionSize(NamedTuple):
    """Sizes of a call of attention that its rate depends on."""

    head_dim: int = 128
    seq_len: int = 8192
    is_causal: bool = True

    def __str__(self) -> str:
        return f"{self.seq_len:,} positions, head size {self.head_dim}{', causal' if self.is_causal else ''}"


TYPICAL = AttentionSize()


def interpolated(rates: Mapping[int, float], size: float) -> float:
    """Return the rate at a size, linear in the logarithm of the size and constant beyond the measured sizes.

    Example:
      >>> round(interpolated({1024: 200.0, 4096: 400.0}, 2048), 3)
      300.0
    """
    sizes = sorted(rates)
    return float(np.interp(math.log(max(size, 1)), [math.log(each) for each in sizes], [rates[each] for each in sizes]))


def attention_rate(
    table: RateTable, kernel: str, direction: str, size: AttentionSize, reference: RateTable
) -> float | None:
    """Return the FLOP/s of attention, or None if the table does not have the kernel in this direction.

    The result is for the measured head size that is nearest to the requested size. If only calls with the other mask
    were measured, it is corrected by the ratio of Mosaic's rates with both masks in `reference`.
    """
    masks = ("causal", "full") if size.is_causal else ("full", "causal")
    rate, other = (_nearest(table, f"{kernel} {direction} {mask}", size) for mask in masks)
    if rate is not None or other is None:
        return rate
    known, known_other = (_nearest(reference, f"mosaic {direction} {mask}", size) for mask in masks)
    return other if known is None or known_other is None else other * known / known_other


def _nearest(table: RateTable, prefix: str, size: AttentionSize) -> float | None:
    measured = {int(key.rsplit(" ", 1)[1]): rates for key, rates in table.items() if key.startswith(f"{prefix} ")}
    if not measured:
        return None
    head_dim = min(measured, key=lambda each: abs(math.log(each / size.head_dim)))
    return interpolated(measured[head_dim], size.seq_len)
