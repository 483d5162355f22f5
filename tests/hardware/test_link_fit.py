"""Links fitted to measured times: recovery of α and β, robustness to outliers, and verdicts."""

from __future__ import annotations

import dataclasses
import math

import pytest

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Link
from meshpar.hardware.link_fit import Point, fit_link

LINK = Link(alpha_s=3e-6, bytes_per_s=2e10)
FORMS = [
    form(10.0**power, ranks)
    for power in range(2, 8)
    for ranks in (4, 8)
    for form in (cost.ring_all_reduce, cost.tree_all_reduce, cost.all_to_all)
]


def points(scale=lambda at: 1.0):
    return [Point(f.steps, f.bytes_in_turn, f.time_s(LINK) * scale(at)) for at, f in enumerate(FORMS)]


def test_fit_link_recovers_the_link_from_exact_times():
    found = fit_link("data", "permutes", points())
    assert found.link.alpha_s == pytest.approx(3e-6)
    assert found.link.bytes_per_s == pytest.approx(2e10)
    assert found.verdict == "good"
    assert found.worst_error < 1e-6
    assert found.num_points == len(FORMS)
    assert found.time_s(2, 1e6) == pytest.approx(2 * 3e-6 + 1e6 / 2e10)


def test_fit_link_ignores_outliers():
    found = fit_link("data", "permutes", points(lambda at: 30.0 if at % 7 == 0 else 1.0))
    assert found.link.alpha_s == pytest.approx(3e-6, rel=0.02)
    assert found.link.bytes_per_s == pytest.approx(2e10, rel=0.02)
    assert found.verdict == "good"
    assert found.worst_error > 0.9


def test_fit_link_weights_short_and_long_messages_equally():
    """The fit uses relative errors: absolute errors would be dominated by the longest message."""
    found = fit_link("data", "permutes", points(lambda at: 1.2 if at % 2 else 1 / 1.2))
    assert found.link.alpha_s == pytest.approx(3e-6, rel=0.25)
    assert 0.05 < found.typical_error <= 0.45


def test_fit_link_finds_no_bandwidth_in_constant_times():
    found = fit_link("data", "axes", [Point(1, size, 1e-4) for size in (0, 0, 0)])
    assert found.link is None
    assert found.verdict == "none"
    assert found.time_s(1, 1) is None
    shrinking = fit_link("data", "axes", [Point(1, 10.0**power, 10.0**-power) for power in range(3, 6)])
    assert shrinking.link is None or shrinking.typical_error > 0.25


def test_fit_link_is_never_negative():
    """Times that grow faster than the bytes would otherwise give a negative latency."""
    found = fit_link("data", "axes", [Point(1, size, size**2) for size in (1.0, 2.0, 4.0, 8.0)])
    assert found.link.alpha_s == 0
    assert found.link.bytes_per_s > 0


@pytest.mark.parametrize(("typical_error", "verdict"), [(0.25, "good"), (0.26, "poor"), (1.0, "poor"), (1.01, "none")])
def test_fit_link_verdict_follows_the_typical_error(typical_error, verdict):
    found = fit_link("data", "axes", points())
    assert dataclasses.replace(found, typical_error=typical_error).verdict == verdict
    assert dataclasses.replace(found, link=None).verdict == "none"


def test_fit_link_errors_are_symmetric_ratios():
    once = fit_link("data", "axes", [Point(1, 1e3, 1e-3), Point(1, 1e3, 1e-3), Point(1, 1e3, 4e-3)])
    assert once.worst_error == pytest.approx(3.0, rel=1e-3)
    assert once.typical_error == pytest.approx(0, abs=1e-3)
    once = fit_link("data", "axes", [Point(1, 1e3, 4e-3), Point(1, 1e3, 4e-3), Point(1, 1e3, 1e-3)])
    assert once.worst_error == pytest.approx(3.0, rel=0.05)


def test_fit_link_without_points_has_no_link():
    found = fit_link("data", "axes", [])
    assert (found.link, found.verdict, found.typical_error) == (None, "none", math.inf)
