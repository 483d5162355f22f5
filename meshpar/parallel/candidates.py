"""What parts try on a mesh: every strategy of one way to keep the state and a form of each other parallelism."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.parallel.strategy import Strategy


def kinds(*, shards_state: bool) -> tuple[type[Parallelism], ...]:
    """The parallelisms that live on a mesh axis: those that say how the state is kept, or the others."""
    return tuple(kind for kind in _below(Parallelism) if kind.axes and kind.shards_state == shards_state)


def candidates(space: SearchSpace) -> Iterator[Strategy]:
    """One way to keep the state, and a form of every other parallelism that lives on an axis above one."""
    state = [part for kind in kinds(shards_state=True) for part in kind.candidates(space)]
    others = [list(kind.candidates(space)) for kind in kinds(shards_state=False) if space.num_shards(*kind.axes) > 1]
    return map(_strategy, itertools.product(state, *others))


@functools.lru_cache(maxsize=4096)
def _strategy(parts: tuple[Parallelism, ...]) -> Strategy:
    """One for all meshes: its rules are joined once."""
    return Strategy(parts)


def _below(kind: type[Parallelism]) -> Iterator[type[Parallelism]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)
