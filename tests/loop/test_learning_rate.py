"""Learning rates of steps, with skipped updates."""

from __future__ import annotations

import numpy as np
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


class WithoutWeight(FakeStep):
    """A step whose examples have weight 0 in step 2, which changes no parameters."""

    def __call__(self, state, batch):
        new, metrics = super().__call__(state, batch)
        return new, {**metrics, "loss_weight": np.float32(new.step != 2)}


def test_steps_without_weight_do_not_advance_the_schedule():
    hook = LearningRate(lambda count: 1 / (1 + count))
    rates = Rates(hook)
    run(4, step=WithoutWeight(), hooks=[hook, rates])
    assert rates.values == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])
