"""Which cases of a grid `make test` runs: a few that exercise most. `make test-all` runs the rest too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(*quick: Any, grid: Iterable[Any]) -> list[Any]:
    """The grid's values for `parametrize`, those that are not quick marked `matrix`; a tuple is several arguments."""
    grid = list(grid)
    assert all(one in grid for one in quick), f"{quick} are not all in {grid}"
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in quick else pytest.mark.matrix)
        for one in grid
    ]
