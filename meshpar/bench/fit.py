"""α and β of a link from measured times: the alpha-beta model fitted, and how far off it is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from meshpar.planner.hardware import Link

GOOD, USABLE = 0.25, 1.0
"""Typical errors up to which a fit is good, and up to which it is worth keeping: a factor of two either way."""


class Point(NamedTuple):
    """One measured time, and what the closed form says it is made of."""

    steps: float
    bytes_in_turn: float
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
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

    @property
    def verdict(self) -> str:
        """`good`, `poor`, or `none`: not worth keeping."""
        if self.link is None or self.typical_error > USABLE:
            return "none"
        return "good" if self.typical_error <= GOOD else "poor"

    def time_s(self, steps: float, bytes_in_turn: float) -> float | None:
        """What the fitted link predicts."""
        if self.link is None:
            return None
        return steps * self.link.alpha_s + bytes_in_turn * self.link.beta_s_per_byte


def fit_link(axis: str, of: str, points: Sequence[Point], *, rounds: int = 50) -> Fit:
    """The α and β, neither negative, with the least sum of |log(predicted / measured)|.

    Ratios, since times span orders of magnitude, and too little is as bad as too much; and not their squares, since a
    machine with other work on it makes outliers. Found by weighted least squares, the weights taken anew each round.
    """
    alpha_s = beta_s = 0.0
    weights = [1 / point.time_s**2 for point in points]
    for _ in range(rounds):
        alpha_s, beta_s = _least_squares(points, weights)
        weights = [_weight(_predicted(point, alpha_s, beta_s), point.time_s) for point in points]
    errors = [_off(_predicted(point, alpha_s, beta_s), point.time_s) for point in points]
    link = Link(alpha_s=alpha_s, bytes_per_s=1 / beta_s) if beta_s > 0 else None
    return Fit(
        axis=axis,
        of=of,
        link=link,
        typical_error=statistics.median(errors) if errors else math.inf,
        worst_error=max(errors, default=math.inf),
        num_points=len(points),
    )


def _predicted(point: Point, alpha_s: float, beta_s: float) -> float:
    return point.steps * alpha_s + point.bytes_in_turn * beta_s


def _off(predicted_s: float, time_s: float) -> float:
    return max(predicted_s / time_s, time_s / predicted_s) - 1 if predicted_s > 0 else math.inf


def _weight(predicted_s: float, time_s: float) -> float:
    """What makes a squared difference the size of the ratio's logarithm, kept finite where they agree."""
    ratio = math.log(max(predicted_s / time_s, 1e-9))
    return max(abs(ratio), 1e-3) / max(abs(predicted_s - time_s), 1e-3 * time_s) ** 2


def _least_squares(points: Sequence[Point], weights: Sequence[float]) -> tuple[float, float]:
    """Two unknowns, neither negative: the free solution, or else the better of the two with one of them zero."""
    ss, sb, bb, st, bt = (
        sum(w * getattr(p, a) * getattr(p, b) for w, p in zip(weights, points, strict=True))
        for a, b in (
            ("steps", "steps"), ("steps", "bytes_in_turn"), ("bytes_in_turn", "bytes_in_turn"),
            ("steps", "time_s"), ("bytes_in_turn", "time_s"),
        )
    )  # fmt: skip
    determinant = ss * bb - sb * sb
    if determinant > 1e-12 * ss * bb:
        alpha_s, beta_s = (bb * st - sb * bt) / determinant, (ss * bt - sb * st) / determinant
        if alpha_s >= 0 and beta_s >= 0:
            return alpha_s, beta_s
    only_alpha, only_beta = (st / ss if ss else 0.0, 0.0), (0.0, bt / bb if bb else 0.0)

    def loss(found: tuple[float, float]) -> float:
        return sum(w * (_predicted(p, *found) - p.time_s) ** 2 for w, p in zip(weights, points, strict=True))

    return min(only_alpha, only_beta, key=loss)
