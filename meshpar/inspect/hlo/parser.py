"""A parser of HLO text, scheduled or not.

Supported inputs are compiled programs (`compiled.as_text()`), lowered programs (`lowered.as_text("hlo")`) and XLA
dumps. Other text raises `HloSyntaxError` with the line number. In a parsed Module every operand and every called
computation exists, no computation calls itself, and there is a single entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshpar.inspect.hlo.cursor import HloSyntaxError, Scanner, split_top, unquote
from meshpar.inspect.hlo.groups import parse_groups, parse_lists
from meshpar.inspect.hlo.module import Computation, Frame, Instruction, Metadata, Module
from meshpar.inspect.hlo.shapes import ArrayShape, TupleShape, scan_shape

__all__ = [
    "ArrayShape",
    "Computation",
    "Frame",
    "HloSyntaxError",
    "Instruction",
    "Metadata",
    "Module",
    "TupleShape",
    "parse",
]


def parse(text: str) -> Module:
    """Parse an HLO module, or raise `HloSyntaxError` with the line number."""
    return _Parser(text).module()


_NAME = r"[A-Za-z_0-9][A-Za-z0-9_.\-]*+"
_HEADER = re.compile(r"HloModule[ \t]++([^\s,]++)")
_ATTRIBUTE = re.compile(r"([A-Za-z_][A-Za-z0-9_\-]*+)[ \t]*+=[ \t]*+")
_COMPUTATION = re.compile(r"(ENTRY\s++)?%?(" + _NAME + r")\s*+")
_INSTRUCTION = re.compile(r"(ROOT\s++)?%?(" + _NAME + r")\s*+=\s*+")
_OPCODE = re.compile(r"([a-z][a-z0-9\-]*+)(?=\()")
_PLAIN_OPERANDS = re.compile(r"(?:%?" + _NAME + r"(?:, )?)*+\Z")
_OPERAND = re.compile(r"%?(" + _NAME + r")\Z")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)[ \t]*+\r?$", re.MULTILINE)
_ROW = re.compile(r"\s*+([0-9]{1,9})[ \t]++(\"[^\"\\\n]*+(?:\\.[^\"\\\n]*+)*+\"|\{[^{}\n]*+\})")
_FIELD = re.compile(r"(?<![a-z_])([a-z_]++)=([0-9]{1,9})")
_META = re.compile(r"(?<![a-z_])([a-z_]++)=(\"[^\"\\]*+(?:\\.[^\"\\]*+)*+\"|[^\s\"{}]++|\{[^{}]*+\})", re.DOTALL)
_LITERALS = frozenset({"constant", "parameter", "iota", "rng-get-and-update-state", "partition-id", "replica-id"})
_NEEDS = {"while": ("body", "condition"), "fusion": ("calls",), "call": ("to_apply",), "conditional": ("branch",)}
_ROLES = {
    "to_apply": "to_apply", "body": "body", "condition": "condition", "calls": "calls",
    "true_computation": "branch", "false_computation": "branch", "branch_computations": "branch",
    "called_computations": "calls", "select": "to_apply", "scatter": "to_apply",
}  # fmt: skip


class _Parser:
    """A single pass over the text. The stack tables, which may be at either end, are read first."""

    def __init__(self, text: str) -> None:
        self.scan = Scanner(text)
        self.tables_end: dict[int, int] = {}
        self.frames = self._stack_tables()

    def module(self) -> Module:
        scan = self.scan
        scan.skip_space()
        header = scan.match(_HEADER)
        if header is None:
            raise scan.error("expected 'HloModule NAME'")
        attributes = self._attributes()
        computations: dict[str, Computation] = {}
        entry = None
        while True:
            scan.skip_space()
            if scan.at_end():
                break
            if scan.pos in self.tables_end:
                scan.pos = self.tables_end[scan.pos]
                continue
            is_entry, computation = self._computation(computations)
            computations[computation.name] = computation
            entry = computation if is_entry else entry
        if entry is None:
            raise scan.error("the module has no ENTRY computation")
        module = Module(unquote(header.group(1)), computations, entry, attributes, self.frames)
        _check_calls(module)
        return module

    def _computation(self, known_computations: Mapping[str, Computation]) -> tuple[bool, Computation]:
        scan = self.scan
        header = scan.match(_COMPUTATION)
        if header is None:
            raise scan.error("expected a computation")
        name = header.group(2)
        if name in known_computations:
            raise scan.error(f"computation {name!r} is defined twice")
        if scan.text.startswith("(", scan.pos):
            scan.group()
            scan.skip_space()
            scan.expect("->")
            scan.skip_space()
            scan_shape(scan)
            scan.skip_space()
        scan.expect("{")
        instructions = self._instructions()
        _check_operands(name, instructions, scan)
        return header.group(1) is not None, Computation(name, instructions, self._attributes())

    def _instructions(self) -> tuple[Instruction, ...]:
        scan = self.scan
        instructions: list[Instruction] = []
        while True:
            scan.skip_space()
            if scan.take("}"):
                return tuple(instructions)
            instructions.append(self._instruction())

    def _instruction(self) -> Instruction:
        scan = self.scan
        line = scan.line()
        head = scan.match(_INSTRUCTION)
        if head is None:
            raise scan.error("expected an instruction or '}'")
        shape = scan_shape(scan)
        scan.skip_space()
        opcode_match = scan.match(_OPCODE)
        if opcode_match is None:
            raise scan.error("expected an opcode and '('")
        opcode = opcode_match.group(1)
        inside = scan.group()[1:-1]
        attributes = self._attributes()
        groups, pairs = attributes.get("replica_groups"), attributes.get("source_target_pairs")
        is_literal = opcode in _LITERALS
        operands = () if is_literal else _operands(inside, line)
        called = _called(attributes, line)
        _check_form(opcode, operands, called, line)
        if opcode == "parameter" and not re.fullmatch(r"[0-9]{1,9}", inside):
            raise HloSyntaxError(f"expected the number of a parameter, found {inside[:40]!r}", line)
        return Instruction(
            name=head.group(2),
            opcode=opcode,
            shape=shape,
            operands=operands,
            payload=inside if is_literal else "",
            attributes=attributes,
            metadata=_metadata(attributes["metadata"], self.frames) if "metadata" in attributes else _NO_METADATA,
            called=called,
            replica_groups=None if groups is None else parse_groups(groups, line),
            source_target_pairs=None if pairs is None else parse_lists(pairs, line),
            is_root=head.group(1) is not None,
            line=line,
        )

    def _attributes(self) -> Mapping[str, str]:
        """Read repeated `, name=value`; a line may end after a comma."""
        scan = self.scan
        attributes: dict[str, str] = {}
        while True:
            mark = scan.pos
            scan.skip_space()
            if not scan.take(","):
                scan.pos = mark
                return attributes
            scan.skip_space()
            name = scan.match(_ATTRIBUTE)
            if name is None:
                raise scan.error("expected an attribute")
            if name.group(1) in attributes:
                raise scan.error(f"attribute {name.group(1)!r} is given twice")
            attributes[name.group(1)] = self._value()

    def _value(self) -> str:
        scan, start = self.scan, self.scan.pos
        value = scan.value()
        if value.startswith("mesh[") and scan.take(
            ", device_ids="
        ):  # the only value that contains a comma outside brackets
            scan.value()
            return scan.text[start : scan.pos].strip()
        if not value:
            raise scan.error("expected an attribute's value")
        return value

    def _stack_tables(self) -> Mapping[int, tuple[Frame, int]]:
        tables: dict[str, dict[int, str]] = {}
        scan = self.scan
        for match in _TABLE.finditer(scan.text):
            scan.pos = match.end()
            rows: dict[int, str] = {}
            while row := scan.match(_ROW):
                rows[int(row.group(1))] = row.group(2)
            tables[match.group(1)] = rows
            self.tables_end[match.start()] = scan.pos
        scan.pos = 0
        return _frames(tables)


def _operands(inside: str, line: int) -> tuple[str, ...]:
    if _PLAIN_OPERANDS.match(inside):
        return tuple(part.removeprefix("%") for part in inside.split(", ") if part)
    names = []
    for part in split_top(inside, line):
        match = _OPERAND.match(part.rsplit(None, 1)[-1])  # older dumps print the operand's shape before its name
        if match is None:
            raise HloSyntaxError(f"expected an operand, found {part[:40]!r}", line)
        names.append(match.group(1))
    return tuple(names)


def _called(attributes: Mapping[str, str], line: int) -> tuple[tuple[str, str], ...]:
    called: list[tuple[str, str]] = []
    for key, value in attributes.items():
        if key in _ROLES:
            names = split_top(value[1:-1], line) if value.startswith("{") else [value]
            called += [(_ROLES[key], name.strip().removeprefix("%")) for name in names]
    return tuple(called)


def _check_form(opcode: str, operands: tuple[str, ...], called: tuple[tuple[str, str], ...], line: int) -> None:
    """Check that an opcode names the computations it needs, and that a while has a single operand."""
    if opcode in _NEEDS:
        roles = {role for role, _ in called}
        missing = [role for role in _NEEDS[opcode] if role not in roles]
        if missing or (opcode == "while" and len(operands) != 1):
            raise HloSyntaxError(f"a {opcode} needs {' and '.join(missing) or 'one operand'}", line)


_NO_METADATA = Metadata()


def _metadata(text: str, frames: Mapping[int, tuple[Frame, int]]) -> Metadata:
    fields = dict(_META.findall(text))
    frame_id = _small_int(fields.get("stack_frame_id", ""))
    frame = frames[frame_id][0] if frame_id in frames else Frame("", 0)
    return Metadata(
        op_name=unquote(fields.get("op_name", "")),
        source_file=unquote(fields.get("source_file", "")) or frame.file,
        source_line=_small_int(fields.get("source_line", "")) or frame.line,
        stack_frame_id=frame_id,
    )


def _small_int(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Frame, int]]:
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    places = {key: dict(_FIELD.findall(row)) for key, row in tables.get("FileLocations", {}).items()}
    stack = {key: dict(_FIELD.findall(row)) for key, row in tables.get("StackFrames", {}).items()}
    # Some XLA versions number parents from 1, and then the first frame is its own parent.
    parents = {key: int(row.get("parent_frame_id", 0)) for key, row in stack.items()}
    shift = 1 if any(key == parent for key, parent in parents.items()) else 0
    frames = {}
    for key, row in stack.items():
        place = places.get(int(row.get("file_location_id", 0)), {})
        file = unquote(files.get(int(place.get("file_name_id", 0)), ""))
        function = unquote(functions.get(int(place.get("function_name_id", 0)), ""))
        frames[key] = (Frame(file, int(place.get("line", 0)), function), max(parents[key] - shift, 0))
    return frames


def _check_operands(name: str, instructions: tuple[Instruction, ...], scan: Scanner) -> None:
    if not instructions:
        raise scan.error(f"computation {name!r} is empty")
    names = {instruction.name for instruction in instructions}
    if len(names) != len(instructions):
        raise scan.error(f"computation {name!r} defines an instruction twice")
    for instruction in instructions:
        for operand in instruction.operands:
            if operand not in names:
                raise HloSyntaxError(f"{instruction.name} reads {operand!r}, which {name!r} lacks", instruction.line)


def _check_calls(module: Module) -> None:
    """Check that all called computations exist and that the call graph has no cycle."""
    edges: dict[str, dict[str, int]] = {}
    for computation in module:
        callees: dict[str, int] = {}
        edges[computation.name] = callees
        for instruction in computation:
            for _, callee in instruction.called:
                if callee not in module.computations:
                    raise HloSyntaxError(f"{instruction.name} calls {callee!r}, which does not exist", instruction.line)
                callees.setdefault(callee, instruction.line)
    done: set[str] = set()
    for start in edges:
        path, on_path = [(start, iter(edges[start].items()))], {start}
        while path:
            name, remaining = path[-1]
            step = next(((callee, line) for callee, line in remaining if callee not in done), None)
            if step is None:
                done.add(name)
                on_path.discard(name)
                path.pop()
            elif step[0] in on_path:
                raise HloSyntaxError(f"computation {step[0]!r} calls itself", step[1])
            else:
                on_path.add(step[0])
                path.append((step[0], iter(edges[step[0]].items())))
