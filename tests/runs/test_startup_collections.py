"""Thresholds of Python's garbage collector before and during the steps of a run."""

from __future__ import annotations

import gc
import io

import meshpar as mp
from meshpar.cli.train_command import COLLECTION_THRESHOLD
from meshpar.runs.startup_collections import UsualCollections
from tests.runs.test_training_run import recipe


class Thresholds(mp.hooks.Hook):
    def on_dispatched(self, run) -> None:
        self.seen = gc.get_threshold()


def test_steps_run_with_the_usual_thresholds(tmp_path):
    before, hook = gc.get_threshold(), Thresholds()
    try:
        gc.set_threshold(COLLECTION_THRESHOLD)
        mp.run(recipe(), out=tmp_path, hooks=[UsualCollections((701, 11, 12)), hook], stream=io.StringIO())
        assert hook.seen == (701, 11, 12)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_mp_run_does_not_change_the_collector_of_its_caller(tmp_path):
    before, frozen, hook = gc.get_threshold(), gc.get_freeze_count(), Thresholds()
    mp.run(recipe(), out=tmp_path, hooks=[hook], stream=io.StringIO())
    assert hook.seen == gc.get_threshold() == before
    assert gc.get_freeze_count() == frozen
