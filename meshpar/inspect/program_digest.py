"""Hashes of a compiled program and of its modules without names and source lines."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshpar.inspect.hlo.module import Computation, Instruction, Module
from meshpar.inspect.hlo.parser import ROLES
from meshpar.inspect.hlo.text import split_top
from meshpar.inspect.source_scopes import module_path

_HEADER = ("input_output_alias", "entry_computation_layout", "num_partitions", "replica_count")
_NOT_COMPARED = {"backend_config", "channel_id", "control-predecessors", "frontend_attributes", "metadata", *ROLES}
"""Attributes with names, source lines or channel numbers. Those with names are compared by position."""
_THREADS = "outer_dimension_partitions"
"""Backend option that XLA:CPU derives from the number of processor cores."""
_PLUMBING = frozenset({"bitcast", "constant", "get-tuple-element", "parameter", "tuple"})
"""Opcodes that compute nothing."""


def digest(module: Module) -> str:
    """Return twelve hexadecimal digits that are equal for programs with equal instructions in equal order.

    Ignored are names, source lines, the number of threads, and the code of custom kernels, which has source lines.
    """
    sha = hashlib.sha256(repr([module.attributes.get(name) for name in _HEADER]).encode())
    numbers = {name: number for number, name in enumerate(module.computations)}
    for computation in module.computations.values():
        for fields in _compared(computation, numbers):
            sha.update(repr(fields).encode())
        sha.update(f"end {computation is module.entry}".encode())
    return sha.hexdigest()[:12]


def _compared(computation: Computation, numbers: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the compared fields of each instruction, with numbers instead of names."""
    positions = {ins.name: position for position, ins in enumerate(computation)}
    for ins in computation:
        earlier = split_top(ins.attributes.get("control-predecessors", "").strip("{}"))[0]
        yield (
            _fields(ins),
            [positions.get(name) for name in ins.operands],
            sorted(positions.get(name.removeprefix("%"), -1) for name in earlier),
            [(role, numbers.get(name)) for role, name in ins.called],
            ins.is_root,
        )


def _fields(ins: Instruction) -> tuple[Any, ...]:
    """Return the compared fields that do not refer to other instructions."""
    attributes = [(name, text) for name, text in ins.attributes.items() if name not in _NOT_COMPARED]
    config = {name: value for name, value in ins.backend_config.items() if name != _THREADS}
    return ins.opcode, ins.shape, ins.payload, attributes, json.dumps(config, sort_keys=True)


def opcode_counts(module: Module) -> dict[str, int]:
    """Return the number of instructions in a program's text by opcode, without parameters, constants and tuples."""
    opcodes = (ins.opcode for computation in module.computations.values() for ins in computation)
    return dict(sorted(collections.Counter(opcode for opcode in opcodes if opcode not in _PLUMBING).items()))


def module_digests(module: Module) -> dict[str, list[Any]]:
    """Return the number of instructions by module, and a hash of their fields. Constants belong to the first reader."""
    fields: dict[str, list[str]] = {}
    for computation in module.computations.values():
        for ins in computation:
            readers = (ins, *computation.users[ins.name]) if ins.opcode == "constant" else (ins,)
            op_name = next((one.metadata.op_name for one in readers if one.metadata.op_name), "")
            if ins.opcode == "constant" or ins.opcode not in _PLUMBING:
                fields.setdefault(module_path(op_name), []).append(repr(_fields(ins)))
    return {
        path: [len(texts), hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()[:6]]
        for path, texts in sorted(fields.items())
    }
