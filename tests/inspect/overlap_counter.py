"""Count the collectives of a scheduled program that overlap with a matmul, from its text only.

It does not import `meshpar.inspect`, so that tests can compare the simulated timeline with it.

    python -m tests.inspect.overlap_counter program.hlo
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast", "send", "recv")  # fmt: skip
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|branch_computations|(?:true|false)_computation)=(\{[^}]*\}|%?[\w.\-]+)")
_MATMUL = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn|gemm|matmul|attention)', re.IGNORECASE)
_NAME = re.compile(r"%([\w.\-]+)")


class Message(NamedTuple):
    """A collective of a computation."""

    computation: str
    name: str
    kind: str
    is_covered: bool
    """Whether there is a matmul between its start and done instructions."""


class _Line(NamedTuple):
    name: str
    opcode: str
    operands: list[str]
    called: list[str]
    text: str


def messages(text: str) -> list[Message]:
    """Return all collectives of the program, ordered by computation."""
    lines = _computations(text)

    def kinds(line: _Line) -> list[tuple[str, str, str]]:
        """Return (computation, name, kind) of the collective in an instruction or in its wrapped computation."""
        kind = line.opcode.removesuffix("-start")
        if kind in KINDS:
            return [("", line.name, kind)]
        wraps = line.called if line.opcode in ("async-start", "fusion") else []
        return [(at or name, *rest) for name in wraps for one in lines[name] for at, *rest in kinds(one)]

    def multiplies(line: _Line) -> bool:
        if line.opcode in ("dot", "convolution") or (line.opcode == "custom-call" and _MATMUL.search(line.text)):
            return True
        return any(multiplies(one) for name in line.called for one in lines[name])

    def ends(line: _Line, start: str, inside: dict[str, _Line]) -> bool:
        """Return whether a done instruction belongs to a start, following updates and tuples."""
        while line.operands and line.operands[0] in inside:
            line = inside[line.operands[0]]
            if line.name == start:
                return True
            if not line.opcode.endswith("-update") and line.opcode not in ("get-tuple-element", "bitcast"):
                return False
        return False

    wrapped = {name for inside in lines.values() for one in inside for name in one.called
               if one.opcode in ("async-start", "fusion")}  # fmt: skip
    found = []
    for computation, inside in lines.items():
        by_name = {line.name: line for line in inside}
        for at, line in enumerate([] if computation in wrapped else inside):
            sent = kinds(line)
            if not sent:
                continue
            is_async = line.opcode.endswith("-start") and '"is_sync":true' not in line.text
            last = next(
                (n for n, one in enumerate(inside) if one.opcode.endswith("-done") and ends(one, line.name, by_name)),
                len(inside),
            )
            covered = is_async and any(multiplies(one) for one in inside[at + 1 : last])
            found += [Message(where or computation, name, kind, covered) for where, name, kind in sent]
    return found


def per_loop(text: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return, for each computation and kind, the numbers of overlapped and of all collectives."""
    covered, every = Counter(), Counter()
    for one in messages(text):
        every[one.computation, one.kind] += 1
        covered[one.computation, one.kind] += one.is_covered
    loops = {computation for computation, _ in every}
    return {at: {kind: (covered[at, kind], n) for (of, kind), n in every.items() if of == at} for at in loops}


def _computations(text: str) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    inside: list[_Line] = []
    for text_line in text.splitlines():
        if head := _HEAD.match(text_line):
            inside = found[head.group(1)] = []
        elif line := _LINE.match(text_line):
            name, _, opcode, rest = line.groups()
            operands = _NAME.findall(rest.partition(")")[0])
            called = [one.strip(" %") for names in _CALLED.findall(rest) for one in names.strip("{}").split(",")]
            inside.append(_Line(name, opcode, operands, called, rest))
    return found


if __name__ == "__main__":
    for computation, kinds in per_loop(Path(sys.argv[1]).read_text()).items():
        print(computation, *(f"{kind} {covered}/{count}" for kind, (covered, count) in sorted(kinds.items())))
