"""CSV files of schedules in the formats of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
import re
from os import PathLike

import numpy as np

from meshpar.schedules.ops import Block, StageOp
from meshpar.schedules.table import ScheduleTable
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import read_text

_KINDS = {"F": "F", "B": "BW", "I": "B", "W": "W"}
"""The ops that each letter of the format stands for. The letter B is a full backward pass, B and W of this package."""
_LETTERS = {kinds: letter for letter, kinds in _KINDS.items()}
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"[0-9]{1,9}(?:(?:WAIT_)?REDUCE_GRAD|UNSHARD|RESHARD|(?:(?:WAIT_)?SEND|RECV)_[FB][0-9]{1,9})")
"""Communication actions of the format. A `Schedule` implies them: gradients are reduced after the last tick, the
strategy decides when weights are gathered, and results are sent to the neighbors immediately."""


def read(path: str | PathLike[str]) -> tuple[list[list[Block]], list[list[int]]]:
    """Return the ordered blocks and the model parts of each stage from a CSV file; see `Schedule.from_csv`."""
    fix = "write a row for each rank, with equal numbers of global stages, such as `0F0,0B0`"
    content = read_text(path, str(path), fix, requested="read a schedule")
    try:
        cells = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(content, newline="")) if row]
        reason = "the file is empty"
    except csv.Error as error:
        cells, reason = [], f"its content is invalid ({error})"
    if not any(map(any, cells)):
        raise problem(str(path), "read a schedule", reason, fix, code="damaged-file")
    rows = [
        [
            _actions(cell, f"{path}, row {r}, column {c}")
            for c, cell in enumerate(row)
            if cell and not _IMPLIED.fullmatch(cell)
        ]
        for r, row in enumerate(cells)
    ]
    parts = [sorted({part for actions in row for part, _, _ in actions}) for row in rows]
    for rank, row_parts in enumerate(parts):
        if len(row_parts) != len(parts[0]) or not row_parts:
            where, reason = f"{path}, row {rank}", f"row 0 has {len(parts[0])}, and all ranks must have equally many"
            raise problem(where, f"run {len(row_parts)} global stages", reason, fix, code="wrong-shape")
    blocks: list[list[Block]] = [
        [
            tuple(StageOp(kind, i, row_parts.index(part)) for part, letter, i in actions for kind in _KINDS[letter])
            for actions in row
        ]
        for row, row_parts in zip(rows, parts, strict=True)
    ]
    return blocks, parts


def _actions(cell: str, where: str) -> list[tuple[int, str, int]]:
    """Return the (global stage, letter, microbatch) of each action in a cell."""
    pair = _PAIR.fullmatch(cell)
    matches = [_ACTION.fullmatch(action.strip()) for action in (pair[1].split(";") if pair else [cell])]
    actions = [(int(match[1]), match[2], int(match[3])) for match in matches if match]
    letters = [letter for _, letter, _ in actions]
    if len(actions) < len(matches) or (pair and (letters[0] != "F" or letters[1:] not in (["B"], ["I"]))):
        reason = (
            "a cell contains a global stage, an op (F, B, I or W) and a microbatch, an overlapped F with B or I, or a "
            "communication action of torch such as SEND_F, RECV_B or UNSHARD"
        )
        fix = "write the cell as `3F1` or `(5F9;5B5)OVERLAP_F_B`, or leave it empty for an idle tick"
        raise problem(where, f"read `{cell}`", reason, fix, code="bad-syntax")
    return actions


def text(schedule: ScheduleTable) -> str:
    """Return a schedule as CSV: a line per stage, a column per tick, each block in its first tick."""
    rows = [[""] * schedule.ticks for _ in range(schedule.stages)]
    for stage, (row, blocks) in enumerate(zip(rows, schedule.order(), strict=True)):
        first_ticks = np.flatnonzero(schedule.begins[:, stage]).tolist()
        for tick, block in zip(first_ticks, blocks, strict=True):
            row[tick] = _cell(schedule, stage, tick, block)
    return "".join(",".join(row) + "\n" for row in rows)


def _cell(schedule: ScheduleTable, stage: int, tick: int, block: Block) -> str:
    kinds: dict[tuple[int, int, bool], str] = {}
    for op in block:
        key = op.microbatch, int(schedule.parts[stage, op.chunk]), op.kind == "F"
        kinds[key] = kinds.get(key, "") + op.kind
    actions = [f"{part}{_LETTERS[letters]}{microbatch}" for (microbatch, part, _), letters in kinds.items()]
    if len(actions) == 1:
        return actions[0]
    if len(actions) == 2 and block[0].kind == "F" and block[1].kind == "B":
        return f"({';'.join(actions)})OVERLAP_F_B"
    where = f"schedule `{schedule.name}`, tick {tick}, stage {stage}"
    reason = "the format supports single ops, full backward passes, and an F overlapped with a backward pass"
    fix = "move the other ops to separate ticks, or save the schedule as JSON"
    requested = f"write {'&'.join(op.text() for op in block)} as a single cell"
    raise problem(where, requested, reason, fix, code="unsupported-feature")
