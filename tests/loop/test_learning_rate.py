"""Learning rates of steps, with skipped updates."""

from __future__ import annotations

import pytest

from meshpar.loop.fit import Hook
from meshpar.loop.learning_rate import LearningRate
from tests.loop.test_fit import FakeStep, State, run


class Rates(Hook):
    def __init__(self, learning_rate):
        self.learning_rate, self.values = learning_rate, []

    def on_record(self, run, record):
        self.values.append(self.learning_rate.line(record)["learning_rate"])


def test_rates_count_updates():
    """Steps 3 and 5 are skipped, and one of the first two."""
    hook = LearningRate(lambda count: 1 / (1 + count))
    rates = Rates(hook)
    run(6, step=FakeStep(bad=[3, 5], nonfinite="skip"), state=State(2, skipped=1), hooks=[hook, rates])
    assert rates.values == pytest.approx([1 / 2, 1 / 2, 1 / 3, 1 / 3])
