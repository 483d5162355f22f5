"""An HLO program as frozen data: a module has computations, and a computation has instructions."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshpar.inspect.hlo.groups import Groups
from meshpar.inspect.hlo.shapes import Shape
from meshpar.inspect.hlo.text import split_top, unquote


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the Python stack of an instruction."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """The origin of an instruction in the user's program."""

    op_name: str = ""
    """Path of scopes and primitives, such as `jit(step)/jvp(decoder)/while/body/dot_general`."""
    source_file: str = ""
    source_line: int = 0
    stack_frame_id: int = 0
    """Row of the module's stack table, or 0 if there is none; `Module.stack` returns the frames."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """An HLO instruction. Attributes are text; properties parse the attributes that meshpar uses."""

    name: str
    opcode: str
    """As printed: asynchronous pairs keep `-start` and `-done`."""
    shape: Shape
    operands: tuple[str, ...]
    payload: str
    """Text inside the brackets of a constant, a parameter or an iota; empty for other opcodes."""
    attributes: Mapping[str, str]
    metadata: Metadata
    called: tuple[tuple[str, str], ...]
    """(role, computation) pairs: `body`, `condition`, `to_apply`, `calls`, `branch`, ..."""
    replica_groups: Groups | None
    """Groups of devices that communicate; None without the attribute, `()` for all devices."""
    source_target_pairs: Groups | None
    is_root: bool

    @property
    def channel_id(self) -> int | None:
        return _number(self.attributes.get("channel_id"))

    @property
    def tuple_index(self) -> int | None:
        return _number(self.attributes.get("index"))

    @property
    def frontend_attributes(self) -> dict[str, str]:
        """Attributes that the framework attached, unquoted."""
        pairs = (part.partition("=") for part in split_top(self.attributes.get("frontend_attributes", "{}"), 1)[0])
        return {key.strip(): unquote(value.strip()) for key, _, value in pairs}

    @property
    def backend_config(self) -> dict[str, Any]:
        """The backend's JSON; `{}` if it is missing or not a JSON object."""
        text = unquote(self.attributes.get("backend_config", ""))
        try:
            return json.loads(text) if text.startswith("{") else {}
        except ValueError:
            return {}

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a while loop, if XLA knows it."""
        return _number(self.backend_config.get("known_trip_count", {}).get("n"))

    def called_as(self, *roles: str) -> tuple[str, ...]:
        """Return the names of the computations called in any of these roles."""
        return tuple(name for role, name in self.called if role in roles)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in order of execution if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Name of an instruction -> the instructions of this computation that read its result."""
        users: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {name: tuple(readers) for name, readers in users.items()}

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(ins.payload): ins for ins in self.instructions if ins.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        """The instruction that computes the result."""
        return next((ins for ins in self.instructions if ins.is_root), self.instructions[-1])

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __getitem__(self, name: str) -> Instruction:
        return self.by_name[name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    name: str
    computations: Mapping[str, Computation]
    entry: Computation
    attributes: Mapping[str, str]
    """The attributes of the header, as text."""
    frames: Mapping[int, tuple[Frame, int]] = dataclasses.field(default_factory=dict)
    """Stack table: id -> (frame, id of the caller's frame or 0)."""

    @property
    def is_scheduled(self) -> bool:
        """True if the instructions are in order of execution."""
        return self.attributes.get("is_scheduled") == "true"

    @property
    def num_partitions(self) -> int:
        """Number of devices that the program is partitioned over."""
        return int(self.attributes.get("num_partitions", 1))

    @property
    def replica_count(self) -> int:
        """Number of copies of the partitioned program."""
        return int(self.attributes.get("replica_count", 1))

    def stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Return the Python frames of an instruction, innermost first; empty if the program has none."""
        frames: list[Frame] = []
        frame_id = instruction.metadata.stack_frame_id
        while frame_id in self.frames:
            frame, frame_id = self.frames[frame_id]
            frames.append(frame)
        if not frames and instruction.metadata.source_file:
            frames = [Frame(instruction.metadata.source_file, instruction.metadata.source_line)]
        return tuple(frames)

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
