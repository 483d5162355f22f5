"""A parser of HLO text as XLA prints it, with an instruction per line (`compiled.as_text()`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshpar.inspect.hlo.groups import parse_groups, parse_lists
from meshpar.inspect.hlo.module import Computation, Frame, Instruction, Metadata, Module
from meshpar.inspect.hlo.shapes import ArrayShape, TupleShape, parse_shape
from meshpar.inspect.hlo.text import HloSyntaxError, split_top, unquote

__all__ = ["ArrayShape", "Computation", "HloSyntaxError", "Instruction", "Module", "TupleShape", "parse"]

_HEADER = re.compile(r"\s*HloModule ([^\s,]+)")
_COMPUTATION = re.compile(r"\s*(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\(")
_TABLE = re.compile(r"^\s*(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:[ \t]*\d+ .*\n?)*)", re.MULTILINE)
_ROW = re.compile(r"^\s*(\d+) (.*)$", re.MULTILINE)
_FIELD = re.compile(r"(\w+)=(\d+)")
_META = re.compile(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|[^\s\"{}]+|\{[^{}]*\})")
_LITERALS = frozenset({"constant", "parameter", "iota", "rng-get-and-update-state", "partition-id", "replica-id"})
ROLES = {
    "to_apply": "to_apply", "body": "body", "condition": "condition", "calls": "calls",
    "true_computation": "branch", "false_computation": "branch", "branch_computations": "branch",
    "called_computations": "calls", "select": "to_apply", "scatter": "to_apply",
}  # fmt: skip
"""Attribute with names of computations -> role of these computations."""
_NO_METADATA = Metadata()


def parse(text: str) -> Module:
    """Parse an HLO module, or raise `HloSyntaxError` with the line number."""
    frames, computations = _frames(text), {}
    header, entry, computation = None, None, None
    instructions: list[Instruction] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if computation is not None and (match := _INSTRUCTION.match(line)):
                instructions.append(_instruction(match, line, frames))
            elif match := _COMPUTATION.match(line):
                computation, instructions = match, []
            elif computation is not None and line.lstrip().startswith("}"):
                name = computation[2]
                computations[name] = Computation(name, tuple(instructions))
                entry, computation = computations[name] if computation[1] else entry, None
            elif match := _HEADER.match(line):
                header = unquote(match[1]), _attributes(line, match.end())
            elif computation is not None and line.strip():
                raise ValueError("expected an instruction")
        except ValueError as error:
            raise HloSyntaxError(f"HLO text, line {number}: {error}, in {line.strip()[:80]!r}") from error
    if header is None or entry is None:
        raise HloSyntaxError("HLO text: expected 'HloModule NAME' and an ENTRY computation")
    return Module(header[0], computations, entry, header[1], frames)


def _instruction(match: re.Match[str], line: str, frames: Mapping[int, tuple[Frame, int]]) -> Instruction:
    root, name, shape, opcode = match.groups()
    operands, end = split_top(line, match.end())
    attributes = _attributes(line, end + 1)
    groups, pairs = attributes.get("replica_groups"), attributes.get("source_target_pairs")
    if groups is not None and "device_ids" in attributes:  # `mesh['a'=8], device_ids=(...) {'a'}` contains a comma
        groups = f"{groups}, device_ids={attributes.pop('device_ids')}"
        attributes["replica_groups"] = groups
    is_literal = opcode in _LITERALS
    return Instruction(
        name=name,
        opcode=opcode,
        shape=parse_shape(shape),
        operands=() if is_literal else tuple(map(_operand, operands)),
        payload=line[match.end() : end] if is_literal else "",
        attributes=attributes,
        metadata=_metadata(attributes["metadata"], frames) if "metadata" in attributes else _NO_METADATA,
        called=tuple(
            (ROLES[key], callee.strip().removeprefix("%"))
            for key, value in attributes.items()
            if key in ROLES
            for callee in value.strip("{}").split(",")
            if callee
        ),
        replica_groups=None if groups is None else parse_groups(groups),
        source_target_pairs=None if pairs is None else parse_lists(pairs),
        is_root=root is not None,
    )


def _attributes(line: str, start: int) -> dict[str, str]:
    pairs = (part.partition("=") for part in split_top(line, start)[0])
    return {key.strip(): value.strip() for key, _, value in pairs}


def _operand(text: str) -> str:
    """Return the name of an operand, which may follow a comment and a shape."""
    return text.rsplit(None, 1)[-1].rpartition("/")[2].removeprefix("%")


def _metadata(text: str, frames: Mapping[int, tuple[Frame, int]]) -> Metadata:
    fields = dict(_META.findall(text))
    frame_id = int(fields.get("stack_frame_id", 0))
    frame = frames[frame_id][0] if frame_id in frames else Frame("", 0)
    return Metadata(
        op_name=unquote(fields.get("op_name", "")),
        source_file=unquote(fields.get("source_file", "")) or frame.file,
        source_line=int(fields.get("source_line", 0)) or frame.line,
        stack_frame_id=frame_id,
    )


def _frames(text: str) -> dict[int, tuple[Frame, int]]:
    """Parse the stack tables into frame id -> (frame, id of the caller's frame or 0)."""
    tables = {name: dict(_ROW.findall(rows)) for name, rows in _TABLE.findall(text)}
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    places = {key: dict(_FIELD.findall(row)) for key, row in tables.get("FileLocations", {}).items()}
    stack = {key: dict(_FIELD.findall(row)) for key, row in tables.get("StackFrames", {}).items()}
    parents = {key: row.get("parent_frame_id", "0") for key, row in stack.items()}
    # Some XLA versions number parents from 1, and then the first frame is its own parent.
    shift = 1 if any(key == parent for key, parent in parents.items()) else 0
    frames = {}
    for key, row in stack.items():
        place = places.get(row.get("file_location_id", ""), {})
        file, function = (
            unquote(names.get(place.get(field, ""), ""))
            for names, field in ((files, "file_name_id"), (functions, "function_name_id"))
        )
        frames[int(key)] = (Frame(file, int(place.get("line", 0)), function), max(int(parents[key]) - shift, 0))
    return frames
