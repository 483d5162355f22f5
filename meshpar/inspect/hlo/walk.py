"""The computations that a program executes, with their enclosing loops and conditionals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from meshpar.collectives.attention import window_shares
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module
from meshpar.moe.grouped import PAST_TYPICAL

VIEWS = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
"""Opcodes that return the elements of their operand, possibly with another shape, dtype or layout."""

MAX_HOPS = 64
"""Maximum number of instructions to follow from a value to its source or its readers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A while loop around an instruction."""

    name: str
    """Name of the while instruction."""
    body: str
    """Name of the body computation."""
    trip_count: int | None
    """Number of iterations; None if XLA does not know it."""
    op_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a conditional around an instruction."""

    name: str
    """Name of the conditional."""
    index: int
    """Index of the branch; 1 is the true branch of a predicate."""
    of: int
    """Number of branches."""
    depth: int
    """Number of loops around the conditional."""
    op_name: str = ""

    @property
    def share(self) -> Fraction | None:
        """Fraction of layers that take this branch, if it selects a layer's attention window; otherwise None."""
        shares = window_shares(self.op_name)
        return None if shares is None or len(shares) != self.of else shares[self.index]


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """A computation at a position of the call tree."""

    computation: Computation
    loops: tuple[Loop, ...] = ()
    """Enclosing loops, outermost first."""
    branches: tuple[Branch, ...] = ()
    """Enclosing branches, outermost first."""
    in_fusion: bool = False
    """True for the body of a fusion. Its instructions form one kernel, so intermediate values need no memory."""
    wrapper: Instruction | None = None
    """The `async-start` or `fusion-start` that runs the computation asynchronously, or None."""

    @property
    def in_branch(self) -> bool:
        """True if the computation is in a branch and it is unknown how often the branch is taken."""
        return any(branch.share is None for branch in self.branches)

    @property
    def times(self) -> int:
        """Executions per run of the program. A loop of unknown length counts once, an unknown branch as taken."""
        trips = math.prod(loop.trip_count if loop.trip_count is not None else 1 for loop in self.loops)
        return round(trips * self.share)

    @property
    def share(self) -> Fraction:
        """Product of the known shares of the enclosing branches."""
        return math.prod((branch.share or Fraction(1) for branch in self.branches), start=Fraction(1))

    @property
    def times_known(self) -> bool:
        """True if all enclosing loops have known trip counts."""
        return all(loop.trip_count is not None for loop in self.loops)


def executed(module: Module) -> Iterator[Visit]:
    """Yield all computations that the program runs, callers first. Functions of reduce and sort ops are left out."""
    stack = [Visit(module.entry)]
    while stack:
        yield (visit := stack.pop())
        inner = [callee for ins in visit.computation for callee in _callees(module, visit, ins)]
        stack.extend(reversed(inner))


def runs(ins: Instruction) -> tuple[str, ...]:
    """Return the computations of a call, fusion or async wrapper; empty for loops, conditionals and reductions.

    A wrapped computation of `all-gather-start` and similar opcodes repeats the instruction and is not returned.
    """
    kind, is_start = ins.opcode.removesuffix("-start"), ins.opcode.endswith("-start")
    if ins.opcode.endswith(("-done", "-update")) or (is_start and kind not in ("async", "call", "fusion")):
        return ()
    return ins.called_as("calls", "to_apply") if kind in ("async", "call") else ins.called_as("calls")


def trip_count(ins: Instruction) -> int | None:
    """Return the number of iterations of a while loop, or None if it is unknown.

    Loops over rows past the typical number of rows of experts have none.
    """
    return 0 if PAST_TYPICAL in ins.metadata.op_name else ins.trip_count


def skip_views(computation: Computation, ins: Instruction) -> Instruction:
    """Return the instruction whose array `ins` is a view of, possibly through several views."""
    for _ in range(MAX_HOPS):
        if ins.opcode not in VIEWS or not ins.operands:
            break
        ins = computation[ins.operands[0]]
    return ins


def branches(computation: Computation, ins: Instruction) -> tuple[str, ...]:
    """Return the branches of a conditional by index; empty for other instructions.

    HLO lists the true branch of a predicate first.
    """
    names = ins.called_as("branch")
    selector = computation[ins.operands[0]].shape if names else None
    is_predicate = isinstance(selector, ArrayShape) and selector.dtype == "pred"
    return names[::-1] if is_predicate else names


def _callees(module: Module, visit: Visit, ins: Instruction) -> Iterator[Visit]:
    def inner(name: str, **changes: Any) -> Visit:
        return dataclasses.replace(visit, computation=module.computations[name], **changes)

    if ins.opcode == "while":
        for body in ins.called_as("body"):
            loop = Loop(ins.name, body, trip_count(ins), ins.metadata.op_name)
            yield inner(body, loops=(*visit.loops, loop))
        return
    for index, name in enumerate(names := branches(visit.computation, ins)):
        branch = Branch(ins.name, index, len(names), len(visit.loops), ins.metadata.op_name)
        yield inner(name, branches=(*visit.branches, branch))
    in_fusion = visit.in_fusion or ins.opcode in ("fusion", "fusion-start")
    wrapper = ins if ins.opcode.endswith("-start") else visit.wrapper
    for callee in runs(ins):
        yield inner(callee, in_fusion=in_fusion, wrapper=wrapper)
