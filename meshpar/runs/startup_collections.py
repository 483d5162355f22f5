"""Python's garbage collections while a command starts."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from meshpar.loop.fit import Hook, Run
from meshpar.runs.background_compilation import BackgroundCompilation


class UsualCollections(Hook):
    """Hook that sets the thresholds of Python's garbage collector before the first step.

    Objects that exist then, mostly modules and traces, are not traversed by later collections.
    """

    order = BackgroundCompilation.order + 1

    def __init__(self, thresholds: Sequence[int]) -> None:
        self._thresholds = thresholds

    def on_start(self, run: Run) -> None:
        gc.freeze()
        gc.set_threshold(*self._thresholds)
