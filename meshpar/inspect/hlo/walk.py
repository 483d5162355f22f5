"""What a program executes, and how often: computations reached from the entry, with the loops around them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module

MAX_VISITS = 200_000
"""Call sites followed before giving up: calls that fan out at every level would double without end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A while loop around an instruction."""

    name: str
    """Name of the while instruction."""
    body: str
    """Name of its body computation."""
    trip_count: int | None
    """None when neither XLA nor the loop's own counter tells."""
    op_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """One choice of a conditional around an instruction."""

    name: str
    """Name of the conditional."""
    index: int
    """Which choice: the number it is picked by; 1 of a truth that is true."""
    of: int
    """Choices there are."""
    depth: int
    """Loops around the conditional."""
    op_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One computation at one place of the call tree."""

    computation: Computation
    loops: tuple[Loop, ...] = ()
    """Loops around it, outermost first."""
    branches: tuple[Branch, ...] = ()
    """Conditionals that have to pick it, outermost first."""
    in_fusion: bool = False
    """Whether its instructions are parts of one kernel, so that their values need no memory of their own."""
    wrapper: Instruction | None = None
    """The `async-start` (or `fusion-start`) that runs it beside the caller, if any."""

    @property
    def in_branch(self) -> bool:
        """Whether it runs only when a conditional picks it."""
        return bool(self.branches)

    @property
    def times(self) -> int:
        """Executions per run of the program; an unknown loop counts once, and a conditional as if it picked it."""
        return math.prod(loop.trip_count if loop.trip_count is not None else 1 for loop in self.loops)

    @property
    def times_known(self) -> bool:
        """Whether every loop around it has a known trip count."""
        return all(loop.trip_count is not None for loop in self.loops)


def executed(module: Module) -> Iterator[Visit]:
    """Every computation the program runs, callers first; reducers and comparators (one scalar op) are left out.

    Raises:
      ValueError: the call tree has more than `MAX_VISITS` places.
    """
    stack, visits = [Visit(module.entry)], 0
    while stack:
        visit = stack.pop()
        visits += 1
        if visits > MAX_VISITS:
            raise ValueError(f"the program's call tree has more than {MAX_VISITS} places")
        yield visit
        inner = [callee for ins in visit.computation for callee in _callees(module, visit, ins)]
        stack.extend(reversed(inner))


def runs(ins: Instruction) -> tuple[str, ...]:
    """Computations an instruction runs once as a part of itself: not a loop's, not a branch's, not a reducer.

    `all-gather-start` and its like say themselves what a computation they wrap would say again: they run none.
    """
    kind, is_start = ins.opcode.removesuffix("-start"), ins.opcode.endswith("-start")
    if ins.opcode.endswith(("-done", "-update")) or (is_start and kind not in ("async", "call", "fusion")):
        return ()
    return ins.called_as("calls", "to_apply") if kind in ("async", "call") else ins.called_as("calls")


def branches(computation: Computation, ins: Instruction) -> tuple[str, ...]:
    """The computations a conditional chooses from, by the number that picks them; none for another instruction.

    HLO writes those of a truth the true one first.
    """
    found = ins.called_as("branch")
    picks = computation[ins.operands[0]].shape if found else None
    is_truth = isinstance(picks, ArrayShape) and picks.dtype == "pred"
    return found[::-1] if is_truth else found


def _callees(module: Module, visit: Visit, ins: Instruction) -> Iterator[Visit]:
    if not ins.called:
        return
    if ins.opcode == "while":
        for body in ins.called_as("body"):
            loop = Loop(ins.name, body, trip_count(module, visit.computation, ins), ins.metadata.op_name)
            yield _step(module, visit, body, loops=(*visit.loops, loop))
        return
    for number, branch in enumerate(choices := branches(visit.computation, ins)):
        choice = Branch(ins.name, number, len(choices), len(visit.loops), ins.metadata.op_name)
        yield _step(module, visit, branch, branches=(*visit.branches, choice))
    in_fusion = visit.in_fusion or ins.opcode in ("fusion", "fusion-start")
    wrapper = ins if ins.opcode.endswith("-start") else visit.wrapper
    for callee in runs(ins):
        yield _step(module, visit, callee, in_fusion=in_fusion, wrapper=wrapper)


def _step(module: Module, visit: Visit, name: str, **changes: object) -> Visit:
    return dataclasses.replace(visit, computation=module.computations[name], **changes)  # type: ignore[arg-type]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a while runs: as XLA notes it after optimizing, else from a counter that goes up by a constant."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition = module.computations[loop.called_as("condition")[0]]
    body = module.computations[loop.called_as("body")[0]]
    test = condition.root
    if test.opcode != "compare" or test.attributes.get("direction") != "LT" or len(test.operands) != 2:
        return None
    counter, bound = (condition[name] for name in test.operands)
    index, stop = counter.tuple_index, _constant(bound)
    initial = computation[loop.operands[0]]
    if index is None or stop is None or initial.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    start = _constant(computation[initial.operands[index]]) if index < len(initial.operands) else None
    step = _increment(body, index)
    return None if start is None or not step else max(0, -(-(stop - start) // step))


def _increment(body: Computation, index: int) -> int | None:
    """The constant that one run of the body adds to element `index` of its tuple."""
    add = body[body.root.operands[index]] if index < len(body.root.operands) else None
    if add is None or add.opcode != "add":
        return None
    parts = [body[name] for name in add.operands]
    steps = [_constant(part) for part in parts if part.tuple_index != index]
    return steps[0] if len(parts) == 2 and len(steps) == 1 else None


def _constant(ins: Instruction) -> int | None:
    is_number = ins.opcode == "constant" and re.fullmatch(r"-?[0-9]{1,18}", ins.payload)
    return int(ins.payload) if is_number else None
