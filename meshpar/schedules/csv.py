"""Schedules as files: the formats of torch.distributed.pipelining."""

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
"""Letters of the format, and the ops that each stands for: its B is the whole backward."""
_LETTERS = {kinds: letter for letter, kinds in _KINDS.items()}
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"([0-9]{1,9})(?:(?:WAIT_)?REDUCE_GRAD|UNSHARD|RESHARD|(?:(?:WAIT_)?SEND|RECV)_[FB]([0-9]{1,9}))")
"""What a table of torch's may say beside compute, and what a schedule implies here: gradients are summed behind the
loop, the strategy says when weights are gathered, and results go to the neighbours as soon as they are made."""


def read(path: str | PathLike[str], *, name: str | None) -> Schedule:
    """See `Schedule.from_csv`."""
    fix = "give a text file with a row for each rank, as `0F0,0B0`"
    try:
        # Spreadsheets put a byte order mark before the first cell.
        text = read_text(path, str(path), fix, asked="read a schedule")
        cells = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise unreadable(str(path), error, fix) from error
    if not any(map(any, cells)):
        raise problem(str(path), "read a schedule", "it has no cell", "write a row for each rank, as `0F0,0B0`")
    found = [
        [
            _actions(cell, f"{path}, row {r}, column {c}")
            for c, cell in enumerate(row)
            if cell and not _IMPLIED.fullmatch(cell)
        ]
        for r, row in enumerate(cells)
    ]
    parts = _parts(str(path), found)
    _check_implied(str(path), cells, found, parts)
    rows = [
        [
            tuple(StageOp(kind, i, held.index(part)) for part, letter, i in block for kind in _KINDS[letter])
            for block in row
        ]
        for row, held in zip(found, parts, strict=True)
    ]  # fmt: skip
    return Schedule.from_order(name or Path(path).stem, rows, parts=parts)


def _actions(cell: str, where: str) -> list[tuple[int, str, int]]:
    """The (global stage, letter, microbatch) of a cell."""
    pair = _PAIR.fullmatch(cell)
    matches = [_ACTION.fullmatch(action.strip()) for action in (pair[1].split(";") if pair else [cell])]
    found = [(int(match[1]), match[2], int(match[3])) for match in matches if match]
    letters = [letter for _, letter, _ in found]
    if len(found) < len(matches) or (pair and (letters[0] != "F" or letters[1:] not in (["B"], ["I"]))):
        raise problem(
            where,
            f"read `{cell}`",
            "a cell is global stage, op (F, B, I or W) and microbatch, an overlapped F and B or I, or what a schedule "
            "implies: SEND_F, RECV_B, UNSHARD and the like, as torch writes them",
            "write it as `3F1`, or `(5F9;5B5)OVERLAP_F_B`; leave it empty for an idle tick",
        )
    return found


def _parts(path: str, rows: Sequence[Sequence[list[tuple[int, str, int]]]]) -> list[list[int]]:
    """The global stages that each row names, lowest first."""
    held = [sorted({part for block in row for part, _, _ in block}) for row in rows]
    for rank, parts in enumerate(held):
        if len(parts) != len(held[0]) or not parts:
            exists = f"row 0 has {len(held[0])} of them; every rank holds equally many"
            fix = "give each rank a row, with the same number of global stages in each"
            raise problem(f"{path}, row {rank}", f"run global stages {parts} on that rank", exists, fix)
    return held


def _check_implied(
    path: str, cells: Sequence[Sequence[str]], rows: Sequence[Sequence[list[tuple[int, str, int]]]],
    parts: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    """What is implied is of a global stage of its row, and of a microbatch that the table runs."""
    microbatches = {i for row in rows for block in row for _, _, i in block}
    for r, (row, held) in enumerate(zip(cells, parts, strict=True)):
        for c, cell in enumerate(row):
            match = _IMPLIED.fullmatch(cell)
            if match and (int(match[1]) not in held or (match[2] and int(match[2]) not in microbatches)):
                raise problem(
                    f"{path}, row {r}, column {c}",
                    f"read `{cell}`",
                    f"that row computes for global stages {held}, and the table for {len(microbatches)} microbatches",
                    "name one of them, or leave the cell out: it is implied",
                )


def text(schedule: Schedule) -> str:
    """The file's content: a line for each stage, a column for each tick, blocks at their first."""
    rows = [[""] * schedule.ticks for _ in range(schedule.stages)]
    for stage, (row, blocks) in enumerate(zip(rows, schedule.order(), strict=True)):
        begins = np.flatnonzero(schedule.begins[:, stage]).tolist()
        for tick, block in zip(begins, blocks, strict=True):
            row[tick] = _cell(schedule, stage, tick, block)
    return "".join(",".join(row) + "\n" for row in rows)


def _cell(schedule: Schedule, stage: int, tick: int, block: Block) -> str:
    """A block in the format's words."""
    kinds: dict[tuple[int, int, bool], str] = {}
    for op in block:
        key = op.microbatch, int(schedule.parts[stage, op.chunk]), op.kind == "F"
        kinds[key] = kinds.get(key, "") + op.kind
    words = [f"{part}{_LETTERS[letters]}{microbatch}" for (microbatch, part, _), letters in kinds.items()]
    if len(words) == 1:
        return words[0]
    if len(words) == 2 and block[0].kind == "F" and block[1].kind == "B":
        return f"({';'.join(words)})OVERLAP_F_B"
    raise problem(
        f"schedule `{schedule.name}`, tick {tick}, stage {stage}",
        f"write {'&'.join(op.text() for op in block)} as one cell",
        "the format has single ops, whole backwards, and an F overlapped with a backward",
        "give the others ticks of their own, or save it as JSON",
    )
