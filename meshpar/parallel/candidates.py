"""Candidate strategies for the planner: combinations of the candidates of each parallelism."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.parallel.strategy import Strategy


def kinds(*, shards_state: bool) -> tuple[type[Parallelism], ...]:
    """Return the classes of parallelism that have a default mesh axis and this value of `shards_state`."""
    return tuple(kind for kind in _subclasses(Parallelism) if kind.axes and kind.shards_state == shards_state)


def candidates(space: SearchSpace) -> Iterator[Strategy]:
    """Yield strategies: a candidate that shards the state, joined with a candidate of each other parallelism.

    Parallelisms whose mesh axes have a single rank are left out.
    """
    state = [part for kind in kinds(shards_state=True) for part in kind.candidates(space)]
    others = [list(kind.candidates(space)) for kind in kinds(shards_state=False) if space.num_shards(*kind.axes) > 1]
    return map(_strategy, itertools.product(state, *others))


@functools.lru_cache(maxsize=4096)
def _strategy(parts: tuple[Parallelism, ...]) -> Strategy:
    """Return a cached strategy, so that its rules are merged once for all meshes."""
    return Strategy(parts)


def _subclasses(kind: type[Parallelism]) -> Iterator[type[Parallelism]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
