"""`Schedule`, an immutable table of the ops that each pipeline stage runs in each tick."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from meshpar.schedules import csv
from meshpar.schedules import ticks as order
from meshpar.schedules.ops import KINDS, Block, StageOp
from meshpar.schedules.rendering import grid
from meshpar.schedules.simulate import Costs, Simulation, simulate
from meshpar.schedules.slots import Slots, assign
from meshpar.schedules.table import ScheduleTable
from meshpar.schedules.validation import check
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import write_text

Cell: TypeAlias = Sequence[Any] | None
"""`(kind, microbatch, chunk)`, a list of such tuples, or None for an idle tick."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Schedule(ScheduleTable):
    """A pipeline schedule: a table of ops, with constructors, checks and simulation.

    A stage is a position on the mesh axis `stage`. The model is divided into `num_parts` parts (pipeline chunks), and a
    stage runs at least one part. In a tick slot, a stage runs at most an F (forward), a B (gradient of the input) and
    a W (gradient of the weights). Results are available to all stages from the next tick on. F and B in the same slot
    are an overlapped pair: they are traced together, so that communication of F can overlap with matmuls of B and vice
    versa.

    Example:
      >>> schedule = mp.pipeline.Schedule.from_table([[("F", 0)], [[("B", 0), ("W", 0)]]], name="mine")
      >>> print(schedule)
      stage 0  F0 B0W0
    """

    # -- Constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def from_order(
        cls, name: str, rows: Sequence[Sequence[Block]], *, parts: Sequence[Sequence[int]] | None = None,
        microbatches: int | None = None,
    ) -> Schedule:  # fmt: skip
        """Return the schedule in which all stages run their blocks in order and as soon as possible.

        Ticks assume ops of equal duration and messages without latency. F and B of an overlapped pair share a tick
        wherever that delays no stage.

        Args:
          name: name of the schedule.
          rows: the ordered blocks of each stage.
          parts: `[stage][chunk]`, model part of each chunk. Default: a part per stage, in order.
          microbatches: number of microbatches. Default: the number that occurs in the rows.

        Raises:
          MeshparError: the order is a deadlock, or the schedule is invalid.
        """
        stage_parts = _stage_parts(name, parts, len(rows))
        chunks = stage_parts.shape[1]
        for stage, row in enumerate(rows):
            for number, block in enumerate(row):
                for op in block:
                    if op.kind not in tuple(KINDS) or op.microbatch < 0 or not 0 <= op.chunk < chunks:
                        where = f"schedule `{name}`, stage {stage}, block {number}"
                        reason = f"an op is F, B or W of a microbatch (at least 0) and a chunk from 0 to {chunks - 1}"
                        fix = "correct the op, or pass `parts` with a column for each chunk"
                        raise problem(where, f"run {op.text()}", reason, fix, code="bad-op")
        if microbatches is None:
            microbatches = 1 + max((op.microbatch for row in rows for block in row for op in block), default=-1)
        table, joined = order.paired(*order.placed(rows, order.starts(name, rows, stage_parts)))
        return cls(name=name, microbatches=microbatches, table=table, parts=stage_parts, joined=joined).validate()

    @classmethod
    def from_table(
        cls, cells: Sequence[Sequence[Cell]], *, parts: Sequence[Sequence[int]] | None = None,
        microbatches: int | None = None, name: str = "table",
    ) -> Schedule:  # fmt: skip
        """Return the schedule with a given table.

        Args:
          cells: `[tick][stage]`; each `("F", microbatch, chunk)`, a list of such tuples, or None for an idle tick.
          parts: `[stage][chunk]`, model part of each chunk. Default: a part per stage, in order.
          microbatches: number of microbatches. Default: the number that occurs in the table.
          name: name of the schedule.

        Raises:
          MeshparError: an op has an invalid form, or the schedule is invalid.
        """
        stages = len(cells[0]) if cells else 0
        table = np.full((len(cells), stages, len(KINDS), 2), -1, np.int32)
        for tick, row in enumerate(cells):
            if len(row) != stages:
                where, reason = f"tick {tick} of schedule `{name}`", f"it has {len(row)} entries, tick 0 has {stages}"
                fix = "write an entry for each stage, None if it is idle"
                raise problem(where, "read its ops", reason, fix, code="wrong-shape")
            for stage, cell in enumerate(row):
                where = f"schedule `{name}`, tick {tick}, stage {stage}"
                for op in _ops(cell, where):
                    if table[tick, stage, op.number, 0] >= 0:
                        reason = f"the stage already runs an {op.kind} in this tick"
                        raise problem(where, f"run {op.text()}", reason, "move it to another tick", code="duplicate-op")
                    table[tick, stage, op.number] = op.microbatch, op.chunk
        count = int(table[..., 0].max(initial=-1)) + 1 if microbatches is None else microbatches
        stage_parts, joined = _stage_parts(name, parts, stages), np.zeros((len(cells), stages), bool)
        return cls(name=name, microbatches=count, table=table, parts=stage_parts, joined=joined).validate()

    @classmethod
    def from_csv(cls, path: str | PathLike[str], *, name: str | None = None) -> Schedule:
        """Read a schedule in the compute_only or compute_comms format of torch.distributed.pipelining.

        The file has a row per rank. A cell is a global stage, an op and a microbatch, such as `3F1`: F is the forward,
        B the full backward, I the gradient of the input, W the gradient of the weights. `(5F9;5B5)OVERLAP_F_B` is an
        overlapped pair, and an empty cell is an idle tick. Only the order of the cells in a row is used; ticks are
        derived from it. The communication actions of compute_comms (`0SEND_F1`, `1RECV_F1`, `0WAIT_SEND_F1`, the same
        with `_B`, `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`, `0WAIT_REDUCE_GRAD`) are ignored, because a schedule implies
        them. By default, the schedule has the name of the file.

        Raises:
          MeshparError: the file is missing, a cell has an invalid form, or the order is invalid.
        """
        blocks, parts = csv.read(path)
        return cls.from_order(name or Path(path).stem, blocks, parts=parts)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """Return the schedule that `to_json` wrote. Only the key `table` is required."""
        schedule = cls.from_table(
            data["table"], **{field: data[field] for field in ("name", "microbatches", "parts") if field in data}
        )
        joined = np.zeros(schedule.joined.shape, bool)
        for tick, stage in data.get("joined", ()):
            if tick not in range(schedule.ticks) or stage not in range(schedule.stages):
                where, requested = f"`joined` of schedule `{schedule.name}`", f"join tick {tick} of stage {stage}"
                reason = f"the schedule has {schedule.ticks} ticks and {schedule.stages} stages"
                raise problem(where, requested, reason, "correct `joined`, or remove it", code="out-of-range")
            joined[tick, stage] = True
        return dataclasses.replace(schedule, joined=joined).validate()

    # -- Properties -------------------------------------------------------------------------------------------------

    @cached_property
    def _unit_simulation(self) -> Simulation:
        return self.simulate()

    @property
    def bubble_fraction(self) -> float:
        """Makespan bubble with F = B = W: idle fraction of a single step, averaged over stages."""
        return self._unit_simulation.free.bubble_fraction

    @property
    def span_bubble_fraction(self) -> float:
        """Span bubble with F = B = W: largest idle fraction between the first and the last op of a stage.

        This is the cost per step if consecutive steps are not synchronized.
        """
        return self._unit_simulation.free.span_bubble_fraction

    # -- Operations -------------------------------------------------------------------------------------------------

    def validate(self) -> Schedule:
        """Check that the schedule can be run, and return it.

        Each microbatch needs a single F, B and W for each model part, all on the same stage. Consecutive
        parts must be on the same stage or on neighbors of the ring. A result can be used from the next tick on.

        Raises:
          MeshparError: names the tick, the stage and the microbatch of the first violation.
        """
        check(self)
        return self

    def simulate(
        self, *, f: Costs = 1.0, b: Costs = 1.0, w: Costs = 1.0, comm: Costs = 0.0, pair: Costs | None = None
    ) -> Simulation:
        """Return the simulation of a step. Costs are in any unit of time, as a number or a number per stage.

        Args:
          f: duration of the forward of 1/`stages` of the model. A model part takes the fraction `stages / num_parts`.
          b: duration of the gradient of the input.
          w: duration of the gradient of the weights.
          comm: latency of a message between neighbors. The sender does not wait for it.
          pair: duration of an overlapped F and full backward. Default: `f + b + w`, no speedup.

        Raises:
          MeshparError: a cost is negative or has the wrong shape.
        """
        return simulate(self, f=f, b=b, w=w, comm=comm, pair=pair)

    def slots(self) -> Slots:
        """Return the smallest assignment of buffer slots with which an executor can run the schedule."""
        return assign(self)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the schedule in the compute_only format of torch.distributed.pipelining.

        `from_csv` and torch can read the file. Exception: torch cannot read DualPipe, because its parts are on two
        stages each. The format stores only the order of ops. A tick with three ops per stage, as in `eager-1f1b`,
        becomes multiple ticks when the file is read; `to_json` keeps it.
        """
        write_text(path, csv.text(self), "schedule")

    def to_json(self, *, simulation: Simulation | None = None) -> dict[str, Any]:
        """Return the schedule as plain data, by default with makespan and bubbles for F = B = W = 1 without latency."""
        times = simulation or self._unit_simulation
        cells = ([list(map(list, self.cell(tick, s))) for s in range(self.stages)] for tick in range(self.ticks))
        return {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "ticks": self.ticks,
            "bubble_fraction": times.free.bubble_fraction,
            "span_bubble_fraction": times.free.span_bubble_fraction,
            "peak_activations": self.peak_activations.tolist(),
            "makespan": times.free.makespan,
            "lockstep_makespan": times.lockstep.makespan,
            "parts": self.parts.tolist(),
            "joined": np.argwhere(self.joined).tolist(),
            "table": [[ops[0] if len(ops) == 1 else ops or None for ops in row] for row in cells],
        }

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, stages={self.stages}, microbatches={self.microbatches}, ticks={self.ticks})"

    def __str__(self) -> str:
        """Return the table as plain text, with a line per stage and a column per tick."""
        cells = grid(self)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        label_width = len(f"stage {self.stages - 1}")
        return "\n".join(
            f"{f'stage {stage}'.ljust(label_width)}  {' '.join(map(str.ljust, row, widths)).rstrip()}"
            for stage, row in enumerate(cells)
        )


_INDEX_LIMIT = 10**9
"""Upper limit of microbatch and part indices, which are stored as int32."""


def _stage_parts(name: str, parts: Sequence[Sequence[int]] | None, stages: int) -> np.ndarray:
    """Return `parts` as an array `[stage, chunk]`. Default: a part per stage, in order."""
    rows = [[stage] for stage in range(stages)] if parts is None else [list(row) for row in parts]
    is_index = all(isinstance(part, int | np.integer) and abs(part) < _INDEX_LIMIT for row in rows for part in row)
    if not rows or len(rows) != stages or len({len(row) for row in rows}) > 1 or not is_index:
        where, fix = f"`parts` of schedule `{name}`", "write [[0], [1]] for two stages with a part each"
        reason = f"it must be [stage][chunk], integers, with the same number of chunks for each of {stages} stages"
        raise problem(where, f"use {rows}", reason, fix, code="wrong-shape")
    return np.array(rows, np.int32)


def _ops(cell: Cell, where: str) -> Iterable[StageOp]:
    for op in [cell] if cell and isinstance(cell[0], str) else cell or ():
        is_index = all(isinstance(number, int | np.integer) and 0 <= number < _INDEX_LIMIT for number in op[1:])
        if len(op) not in (2, 3) or not is_index or op[0] not in tuple(KINDS):
            requested, fix = f"run {json.dumps(op, default=str)}", 'write it as ("F", 3, 0), or None for an idle tick'
            reason = "an op is F, B or W with the indices of a microbatch and optionally a chunk"
            raise problem(where, requested, reason, fix, code="bad-op")
        yield StageOp(*op)
