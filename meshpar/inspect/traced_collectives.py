"""The collectives of `shard_map` kernels, read from the jaxpr of the traced step.

The author of a kernel writes its collectives (`psum`, `ppermute`, `all_to_all`, `all_gather`, ...), their axes and
their counts. Strategies therefore do not declare them, and the compiled program is checked against the trace.
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
    """A collective that a kernel calls, such as `psum`."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes of size greater than 1, in the mesh's order."""
    elements: int
    """Number of elements of the payload, as in `census`. XLA may shard the payload over axes that are not manual."""
    dtype: str
    """NumPy name of the element type."""
    count: float
    """Runs per step; for a pipeline, on the stage with most runs. Infinite in a loop of unknown length."""
    count_by_stage: tuple[int, ...] = ()
    """Count on each stage, if the schedule's table determines it; empty if all devices have the same count."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """The position of a jaxpr in the program: enclosing loops and branches, axis sizes and named scopes."""

    visit: Visit
    sizes: Mapping[str, int]
    scope: str

    def inside(self, eqn: Any) -> Iterator[tuple[Any, _Place]]:
        """Yield (jaxpr, position) for every jaxpr that an equation at this position runs."""
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


def messages(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, schedule_counts: ScheduleCounts | None = None
) -> tuple[Message, ...]:
    """Return the collectives that a function calls explicitly, with their counts per run of the function."""
    return tuple(_sent(getattr(jaxpr, "jaxpr", jaxpr), _Place(Visit(None), {}, ""), schedule_counts))  # type: ignore[arg-type]


def enters(jaxpr: core.Jaxpr | core.ClosedJaxpr, scope: str) -> bool:
    """Return whether a traced function runs a `shard_map` within a named scope."""
    return any(eqn.primitive.name == "shard_map" and in_scope(eqn, scope) for eqn, _ in equations(jaxpr))


def vocab_chunks(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> int:
    """Return the number of vocabulary chunks in the loss. The last chunk is computed after the loop."""
    scans = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "scan" and in_scope(eqn, SCOPE))
    return max((int(eqn.params["length"]) + 1 for eqn in scans), default=1)


def by_stage(sent: Iterable[Message], stage: int) -> tuple[Message, ...]:
    """Return the messages with their counts on a pipeline stage."""
    return tuple(dataclasses.replace(m, count=m.count_by_stage[stage]) if m.count_by_stage else m for m in sent)


def _sent(jaxpr: Any, place: _Place, schedule_counts: ScheduleCounts | None) -> Iterator[Message]:
    for eqn in jaxpr.eqns:
        # Strip the prefixes and suffixes that jax adds for array types.
        base = eqn.primitive.name.removeprefix("unreduced_").removesuffix("_reduced").removesuffix("_invariant")
        kind = _KINDS.get(base.rstrip("2"))
        if kind is not None:
            yield from _messages(kind, eqn, place, schedule_counts)
            continue
        for inner, where in place.inside(eqn):
            yield from _sent(inner, where, schedule_counts)


def _messages(kind: str, eqn: Any, place: _Place, schedule_counts: ScheduleCounts | None) -> Iterator[Message]:
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list) else (named,)
    axes = tuple(axis for axis, size in place.sizes.items() if axis in named and size > 1)
    if not axes:
        return
    visit = place.visit
    by_stage = None if schedule_counts is None else schedule_counts.counts(visit)
    count = max(by_stage) if by_stage else visit.times if visit.times_known else math.inf
    sizes = [math.prod(x.aval.shape) for x in eqn.invars]
    if kind == "ragged-all-to-all":  # operands: a send buffer, a receive buffer, offsets and sizes
        sizes = [min(sizes[:2])]
    elif kind == "all-gather":
        sizes = [size * math.prod(place.sizes[axis] for axis in axes) for size in sizes]
    for x, size in zip(eqn.invars, sizes, strict=False):
        if not size:
            continue
        yield Message(
            kind=kind, axes=axes, elements=size, dtype=str(x.aval.dtype), count=count, count_by_stage=by_stage or ()
        )


def num_trips(loop: core.JaxprEqn) -> int | None:
    """Return the trip count of a `while` written like `lax.fori_loop` with constant bounds, else None."""
    condition, consts = loop.params["cond_jaxpr"].jaxpr, loop.params["cond_nconsts"]
    test = condition.eqns[-1] if condition.eqns else None
    if test is None or test.primitive.name != "lt":
        return None
    entered = [*loop.invars[:consts], *loop.invars[consts + loop.params["body_nconsts"] :]]
    initial = dict(zip(condition.invars, entered, strict=True))
    start, stop = (x if isinstance(x, core.Literal) else initial.get(x) for x in test.invars)
    is_constant = isinstance(start, core.Literal) and isinstance(stop, core.Literal)
    return max(0, int(stop.val) - int(start.val)) if is_constant else None  # type: ignore[union-attr]
