"""What kernels send, read from the traced step: the collectives that stand in its jaxpr.

Whoever writes a `shard_map` kernel says there what it sends (`psum`, `ppermute`, `all_to_all`, `all_gather`, ...), over
which axes and how often. So no strategy has to promise it: the compiled program is held to the trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.extend import core

from meshpar.inspect.hlo.walk import Branch, Loop, Visit
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.models.chunked_cross_entropy import SCOPE
from meshpar.sharding.jaxprs import equations, in_scope

_KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One collective of a kernel."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes of more than one rank, in the mesh's order."""
    elements: int
    """Numbers in its payload, counted as `census.Collective` does. Axes that the kernel leaves to XLA may shard it."""
    dtype: str
    """As numpy names it."""
    count: float
    """A step; of a pipeline, on the stage that sends most. Infinite in a loop of unknown length."""
    count_by_stage: tuple[int, ...] = ()
    """The same on each stage, where the schedule's table tells; empty: the same on all devices."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an equation stands."""

    visit: Visit
    sizes: Mapping[str, int]
    scope: str

    def inside(self, eqn: Any) -> Iterator[tuple[Any, _Place]]:
        """Every jaxpr that an equation runs, with its place."""
        scope = "/".join(part for part in (self.scope, str(eqn.source_info.name_stack)) if part)
        sizes = dict(eqn.params["mesh"].shape) if eqn.primitive.name == "shard_map" else self.sizes
        visit, name = self.visit, eqn.primitive.name
        if name in ("scan", "while"):
            trips = eqn.params["length"] if name == "scan" else num_trips(eqn)
            visit = dataclasses.replace(visit, loops=(*visit.loops, Loop(name, name, trips, scope)))
        for index, jaxpr in enumerate(core.jaxprs_in_params(eqn.params)):
            inner = visit
            if name == "cond":
                branch = Branch(name, index, len(eqn.params["branches"]), len(visit.loops), f"{scope}/cond")
                inner = dataclasses.replace(visit, branches=(*visit.branches, branch))
            yield jaxpr, _Place(inner, sizes, scope)


def messages(jaxpr: Any, cells: ScheduleCounts | None = None) -> tuple[Message, ...]:
    """Every collective that a function asks for by itself, those in loops counted.

    Args:
      jaxpr: of a traced step, `step.trace(state, batch).jaxpr`.
      cells: of a pipelined step, to count what its stages pick. What any other branch sends counts as if it were
        picked.
    """
    return tuple(_sent(getattr(jaxpr, "jaxpr", jaxpr), _Place(Visit(None), {}, ""), cells))  # type: ignore[arg-type]


def enters(jaxpr: Any, scope: str) -> bool:
    """Whether a traced function runs a `shard_map` within a named scope."""
    return any(eqn.primitive.name == "shard_map" and in_scope(eqn, scope) for eqn, _ in equations(jaxpr))


def vocab_chunks(jaxpr: Any) -> int:
    """In how many chunks the loss uses the head's matrix; the last stands outside of `models.unembed`'s loop."""
    scans = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "scan" and in_scope(eqn, SCOPE))
    return max((int(eqn.params["length"]) + 1 for eqn in scans), default=1)


def by_stage(sent: Iterable[Message], stage: int) -> tuple[Message, ...]:
    """The messages as one stage of a pipeline sends them."""
    return tuple(
        dataclasses.replace(one, count=one.count_by_stage[stage]) if one.count_by_stage else one for one in sent
    )


def _sent(jaxpr: Any, place: _Place, cells: ScheduleCounts | None) -> Iterator[Message]:
    for eqn in jaxpr.eqns:
        # Without what jax puts around a primitive's name for its types.
        base = eqn.primitive.name.removeprefix("unreduced_").removesuffix("_reduced").removesuffix("_invariant")
        kind = _KINDS.get(base.rstrip("2"))
        if kind is not None:
            yield from _messages(kind, eqn, place, cells)
            continue
        for inner, where in place.inside(eqn):
            yield from _sent(inner, where, cells)


def _messages(kind: str, eqn: Any, place: _Place, cells: ScheduleCounts | None) -> Iterator[Message]:
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list) else (named,)
    axes = tuple(axis for axis, size in place.sizes.items() if axis in named and size > 1)
    if not axes:
        return
    visit = place.visit
    by_stage = None if cells is None else cells.counts(visit)
    count = max(by_stage) if by_stage else visit.times if visit.times_known else math.inf
    sizes = [math.prod(x.aval.shape) for x in eqn.invars]
    if kind == "ragged-all-to-all":  # a send and a receive buffer, then offsets and sizes
        sizes = [min(sizes[:2])]
    elif kind == "all-gather":
        sizes = [size * math.prod(place.sizes[axis] for axis in axes) for size in sizes]
    for x, size in zip(eqn.invars, sizes, strict=False):
        if not size:
            continue
        yield Message(
            kind=kind, axes=axes, elements=size, dtype=str(x.aval.dtype), count=count, count_by_stage=by_stage or ()
        )


def num_trips(loop: Any) -> int | None:
    """Runs of a while that counts up by one between two known numbers, as `lax.fori_loop` writes it; else None."""
    condition, consts = loop.params["cond_jaxpr"].jaxpr, loop.params["cond_nconsts"]
    test = condition.eqns[-1] if condition.eqns else None
    if test is None or test.primitive.name != "lt":
        return None
    entered = [*loop.invars[:consts], *loop.invars[consts + loop.params["body_nconsts"] :]]
    initial = dict(zip(condition.invars, entered, strict=True))
    start, stop = (x if isinstance(x, core.Literal) else initial.get(x) for x in test.invars)
    known = isinstance(start, core.Literal) and isinstance(stop, core.Literal)
    return max(0, int(stop.val) - int(start.val)) if known else None  # type: ignore[union-attr]
