"""What parts try on a mesh: every strategy of one way to keep the state and a form of each other parallelism."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from meshpar.parallel.parallelism import Part, Trial
from meshpar.parallel.strategy import Strategy


def kinds(*, splits_state: bool) -> tuple[type[Part], ...]:
    """The parallelisms that live on a mesh axis: those that say how the state is kept, or the others."""
    return tuple(kind for kind in _below(Part) if kind.axes and kind.splits_state == splits_state)


def tried(trial: Trial) -> Iterator[Strategy]:
    """One way to keep the state, and a form of every other parallelism that lives on an axis above one."""
    state = [part for kind in kinds(splits_state=True) for part in kind.tried(trial)]
    others = [list(kind.tried(trial)) for kind in kinds(splits_state=False) if trial.ways(*kind.axes) > 1]
    return map(_strategy, itertools.product(state, *others))


@functools.lru_cache(maxsize=4096)
def _strategy(parts: tuple[Part, ...]) -> Strategy:
    """One for all meshes: its rules are joined once."""
    return Strategy(parts)


def _below(kind: type[Part]) -> Iterator[type[Part]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)
