"""CSV files of schedules in the formats of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from meshpar.schedules.ops import Block, StageOp, unreadable
from meshpar.schedules.schedule import Schedule
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import read_text

_KINDS = {"F": "F", "B": "BW", "I": "B", "W": "W"}
"""Ops of each letter of the format. Its B is the full backward pass."""
_LETTERS = {kinds: letter for letter, kinds in _KINDS.items()}
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"([0-9]{1,9})(?:(?:WAIT_)?REDUCE_GRAD|UNSHARD|RESHARD|(?:(?:WAIT_)?SEND|RECV)_[FB]([0-9]{1,9}))")
"""Communication actions of the format. A `Schedule` implies them: gradients are reduced after the last tick, the
strategy decides when weights are gathered, and results are sent to the neighbors immediately."""
_Actions = list[tuple[int, str, int]]
"""(global stage, letter, microbatch) of each action in a cell."""


def read(path: str | PathLike[str], *, name: str | None) -> Schedule:
    """Read a schedule; see `Schedule.from_csv`."""
    fix = "write a row for each rank, such as `0F0,0B0`"
    try:
        content = read_text(path, str(path), fix, requested="read a schedule")
        cells = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(content, newline="")) if row]
    except csv.Error as error:
        raise unreadable(str(path), error, fix) from error
    if not any(map(any, cells)):
        raise problem(str(path), "read a schedule", "the file is empty", fix, code="damaged-file")
    rows = [
        [
            _actions(cell, f"{path}, row {r}, column {c}")
            for c, cell in enumerate(row)
            if cell and not _IMPLIED.fullmatch(cell)
        ]
        for r, row in enumerate(cells)
    ]
    parts = _parts(str(path), rows)
    _check_implied(str(path), cells, rows, parts)
    blocks = [
        [
            tuple(StageOp(kind, i, row_parts.index(part)) for part, letter, i in actions for kind in _KINDS[letter])
            for actions in row
        ]
        for row, row_parts in zip(rows, parts, strict=True)
    ]
    return Schedule.from_order(name or Path(path).stem, blocks, parts=parts)


def _actions(cell: str, where: str) -> _Actions:
    """Parse a cell."""
    pair = _PAIR.fullmatch(cell)
    matches = [_ACTION.fullmatch(action.strip()) for action in (pair[1].split(";") if pair else [cell])]
    actions = [(int(match[1]), match[2], int(match[3])) for match in matches if match]
    letters = [letter for _, letter, _ in actions]
    if len(actions) < len(matches) or (pair and (letters[0] != "F" or letters[1:] not in (["B"], ["I"]))):
        raise problem(
            where,
            f"read `{cell}`",
            "a cell contains a global stage, an op (F, B, I or W) and a microbatch, an overlapped F with B or I, or a "
            "communication action of torch such as SEND_F, RECV_B or UNSHARD",
            "write it as `3F1` or `(5F9;5B5)OVERLAP_F_B`, or leave it empty for an idle tick",
            code="bad-syntax",
        )
    return actions


def _parts(path: str, rows: Sequence[Sequence[_Actions]]) -> list[list[int]]:
    """Return the sorted global stages of each row, and check that their number is equal in all rows."""
    parts = [sorted({part for actions in row for part, _, _ in actions}) for row in rows]
    for rank, row_parts in enumerate(parts):
        if len(row_parts) != len(parts[0]) or not row_parts:
            reason = f"row 0 has {len(parts[0])} global stages, and all ranks must have equally many"
            fix = "write a row for each rank, with equal numbers of global stages"
            raise problem(f"{path}, row {rank}", f"run global stages {row_parts}", reason, fix, code="wrong-shape")
    return parts


def _check_implied(
    path: str, cells: Sequence[Sequence[str]], rows: Sequence[Sequence[_Actions]], parts: Sequence[Sequence[int]]
) -> None:
    """Check that communication actions name a global stage of their row and a microbatch of the table."""
    microbatches = {i for row in rows for actions in row for _, _, i in actions}
    for r, (row, row_parts) in enumerate(zip(cells, parts, strict=True)):
        for c, cell in enumerate(row):
            match = _IMPLIED.fullmatch(cell)
            if match and (int(match[1]) not in row_parts or (match[2] and int(match[2]) not in microbatches)):
                raise problem(
                    f"{path}, row {r}, column {c}",
                    f"read `{cell}`",
                    f"that row runs global stages {row_parts}, and the table has {len(microbatches)} microbatches",
                    "correct the cell, or delete it, because communication is implied",
                    code="out-of-range",
                )


def text(schedule: Schedule) -> str:
    """Return the content of the file: a line per stage, a column per tick, each block in its first tick."""
    rows = [[""] * schedule.ticks for _ in range(schedule.stages)]
    for stage, (row, blocks) in enumerate(zip(rows, schedule.order(), strict=True)):
        first_ticks = np.flatnonzero(schedule.begins[:, stage]).tolist()
        for tick, block in zip(first_ticks, blocks, strict=True):
            row[tick] = _cell(schedule, stage, tick, block)
    return "".join(",".join(row) + "\n" for row in rows)


def _cell(schedule: Schedule, stage: int, tick: int, block: Block) -> str:
    kinds: dict[tuple[int, int, bool], str] = {}
    for op in block:
        key = op.microbatch, int(schedule.parts[stage, op.chunk]), op.kind == "F"
        kinds[key] = kinds.get(key, "") + op.kind
    actions = [f"{part}{_LETTERS[letters]}{microbatch}" for (microbatch, part, _), letters in kinds.items()]
    if len(actions) == 1:
        return actions[0]
    if len(actions) == 2 and block[0].kind == "F" and block[1].kind == "B":
        return f"({';'.join(actions)})OVERLAP_F_B"
    raise problem(
        f"schedule `{schedule.name}`, tick {tick}, stage {stage}",
        f"write {'&'.join(op.text() for op in block)} as a single cell",
        "the format supports single ops, full backward passes, and an F overlapped with a backward pass",
        "move the other ops to separate ticks, or save the schedule as JSON",
        code="unsupported-feature",
    )
