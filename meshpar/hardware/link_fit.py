"""Fit of latency and bandwidth (α and β) of a link to measured times."""

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
"""Maximum `Fit.typical_error` of a good and of a usable fit. An error of 1 is a factor of two."""


class Point(NamedTuple):
    """A measured time, with the steps and the consecutive bytes of its algorithm as in `cost_model.Cost`."""

    steps: float
    bytes_in_turn: float
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(Plain):
    """A fitted link with its errors."""

    axis: str
    of: str
    """`permutes` for kernels with single messages, or `axes` for XLA's collectives."""
    link: Link | None
    """None if the times do not grow with the bytes."""
    typical_error: float
    """Median of max(predicted / measured, measured / predicted) - 1."""
    worst_error: float
    num_points: int
    derived = ("verdict",)

    @property
    def verdict(self) -> str:
        """`good`, `poor`, or `none` if the fit is not usable."""
        if self.link is None or self.typical_error > USABLE:
            return "none"
        return "good" if self.typical_error <= GOOD else "poor"

    def time_s(self, steps: float, bytes_in_turn: float) -> float | None:
        if self.link is None:
            return None
        return steps * self.link.alpha_s + bytes_in_turn * self.link.beta_s_per_byte


def fit_link(axis: str, of: str, points: Sequence[Point], *, rounds: int = 50) -> Fit:
    """Return the non-negative α and β that minimize the sum of |log(predicted / measured)|.

    Ratios weight short and long times equally, and absolute values are robust against outliers of a busy machine. The
    minimum is computed by iteratively reweighted least squares.
    """
    features = np.array([(point.steps, point.bytes_in_turn) for point in points], float).reshape(-1, 2)
    times_s = np.array([point.time_s for point in points], float)
    scale = np.maximum(features.max(axis=0, initial=0.0), 1e-300)  # nnls has an absolute tolerance
    weights, solution = 1 / times_s, np.zeros(2)
    for _ in range(rounds if points else 0):
        solution = optimize.nnls(features / scale * weights[:, None], times_s * weights)[0] / scale
        weights = np.sqrt(_weights(features @ solution, times_s))
    alpha_s, beta_s = map(float, solution)
    with np.errstate(divide="ignore"):
        ratios = features @ solution / times_s
        errors = np.where(ratios > 0, np.maximum(ratios, 1 / ratios) - 1, math.inf).tolist()
    link = Link(alpha_s=alpha_s, bytes_per_s=1 / beta_s) if beta_s > 0 else None
    return Fit(
        axis=axis,
        of=of,
        link=link,
        typical_error=statistics.median(errors) if errors else math.inf,
        worst_error=max(errors, default=math.inf),
        num_points=len(points),
    )


def _weights(predicted_s: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """Return weights w such that `w (predicted - measured)^2 = |log(predicted / measured)|`.

    The weights are bounded where prediction and measurement agree.
    """
    ratios = np.log(np.maximum(predicted_s / times_s, 1e-9))
    return np.maximum(abs(ratios), 1e-3) / np.maximum(abs(predicted_s - times_s), 1e-3 * times_s) ** 2
