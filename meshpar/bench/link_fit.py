"""α and β of a link from measured times: the alpha-beta model fitted, and how far off it is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from meshpar.hardware.clusters import Link
from meshpar.sharding.printing import Plain

GOOD, USABLE = 0.25, 1.0
"""Typical errors up to which a fit is good, and up to which it is worth keeping: a factor of two either way."""


class Point(NamedTuple):
    """One measured time, and what the closed form says it is made of."""

    steps: float
    bytes_in_turn: float
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(Plain):
    """A link that explains measured times, and how well it does."""

    axis: str
    of: str
    """`permutes`: the kernels here, made of single messages; `axes`: XLA's own collectives."""
    link: Link | None
    """None when the times do not grow with the bytes, so that there is no bandwidth."""
    typical_error: float
    """Median of predicted / measured, or of its inverse where that is larger, less 1: 0.25 is a quarter too much, or a
    fifth too little."""
    worst_error: float
    num_points: int
    derived = ("verdict",)

    @property
    def verdict(self) -> str:
        """`good`, `poor`, or `none`: not worth keeping."""
        if self.link is None or self.typical_error > USABLE:
            return "none"
        return "good" if self.typical_error <= GOOD else "poor"

    def time_s(self, steps: float, bytes_in_turn: float) -> float | None:
        if self.link is None:
            return None
        return steps * self.link.alpha_s + bytes_in_turn * self.link.beta_s_per_byte


def fit_link(axis: str, of: str, points: Sequence[Point], *, rounds: int = 50) -> Fit:
    """The α and β, neither negative, with the least sum of |log(predicted / measured)|.

    Ratios, since times span orders of magnitude, and too little is as bad as too much; and not their squares, since a
    machine with other work on it makes outliers. Found by weighted least squares, the weights taken anew each round.
    """
    parts = np.array([(point.steps, point.bytes_in_turn) for point in points], float).reshape(-1, 2)
    times_s = np.array([point.time_s for point in points], float)
    scale = np.maximum(parts.max(axis=0, initial=0.0), 1e-300)  # columns of one size: nnls judges by an absolute bound
    weights, found = 1 / times_s, np.zeros(2)
    for _ in range(rounds if points else 0):
        found = optimize.nnls(parts / scale * weights[:, None], times_s * weights)[0] / scale
        weights = np.sqrt(_weights(parts @ found, times_s))
    alpha_s, beta_s = map(float, found)
    errors = [_off(predicted_s, time_s) for predicted_s, time_s in zip(parts @ found, times_s, strict=True)]
    link = Link(alpha_s=alpha_s, bytes_per_s=1 / beta_s) if beta_s > 0 else None
    return Fit(
        axis=axis,
        of=of,
        link=link,
        typical_error=statistics.median(errors) if errors else math.inf,
        worst_error=max(errors, default=math.inf),
        num_points=len(points),
    )


def _off(predicted_s: float, time_s: float) -> float:
    return float(max(predicted_s / time_s, time_s / predicted_s)) - 1 if predicted_s > 0 else math.inf


def _weights(predicted_s: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """What makes squared differences the size of the ratios' logarithms, kept finite where they agree."""
    ratios = np.log(np.maximum(predicted_s / times_s, 1e-9))
    return np.maximum(abs(ratios), 1e-3) / np.maximum(abs(predicted_s - times_s), 1e-3 * times_s) ** 2
