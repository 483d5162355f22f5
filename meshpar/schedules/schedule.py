"""A pipeline schedule as a value: who does what in which tick, and whether that can be run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshpar.schedules import ticks as order
from meshpar.schedules.ops import KINDS, Block, F, StageOp, W
from meshpar.schedules.validation import check, check_rows
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import write_text

if TYPE_CHECKING:
    from meshpar.schedules.simulate import Costs, Simulation
    from meshpar.schedules.slots import Slots

Cell: TypeAlias = Sequence[Any] | None
"""`(op, microbatch, chunk)`, several of them, or None for an idle tick."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Who does what in which tick.

    A stage is a position on the mesh axis `stage`. It holds one or more parts of the model, its chunks. In a tick it
    runs a cell: at most one F (forward), one B (gradient of the input) and one W (gradient of the weights). What a cell
    makes can be used by the neighbours, and by the stage itself, from the next tick on. F and B in one cell are an
    overlapped pair: traced together, so that one's communication can hide behind the other's matmuls.
    """

    name: str
    microbatches: int
    table: np.ndarray
    """int32 `[tick, stage, kind, 2]`: microbatch and chunk of the F, B and W (kind 0, 1, 2) of each cell; −1: none."""
    parts: np.ndarray
    """int32 `[stage, chunk]`: which part of the model that is, from 0 (embedding) on. A part may live on two stages."""
    joined: np.ndarray
    """bool `[tick, stage]`: this cell and the stage's next are one block, as the two halves of a whole backward are.

    A block begins when everything in it can; what it makes counts as made when it ends. The executor need not know:
    a table that honours this is only stricter. `simulate` and the file format know."""

    def __post_init__(self) -> None:
        shapes = {"table": (np.int32, 4), "parts": (np.int32, 2), "joined": (np.bool_, 2)}
        for field, (dtype, dims) in shapes.items():
            array: np.ndarray = np.array(getattr(self, field), dtype)
            if array.ndim != dims:
                where = f"`{field}` of schedule `{self.name}`"
                fix = "give [tick, stage, kind, (microbatch, chunk)], [stage, chunk] and [tick, stage]"
                raise problem(where, f"hold it as an array of {dims} dims", f"its shape is {array.shape}", fix)
            array.setflags(write=False)
            object.__setattr__(self, field, array)
        if (
            self.table.shape[1:] != (len(self.parts), len(KINDS), 2)
            or self.joined.shape != self.table.shape[:2]
            or not self.parts.size
        ):
            raise problem(
                f"schedule `{self.name}`",
                f"run a table of shape {self.table.shape} on stages that hold parts {self.parts.tolist()}",
                f"they take a table [ticks, {len(self.parts)}, {len(KINDS)}, 2], `joined` [ticks, {len(self.parts)}]",
                "give one row of `parts` for each stage of the table",
            )

    # -- How one is made ----------------------------------------------------------------------------------------------

    @classmethod
    def from_order(
        cls, name: str, rows: Sequence[Sequence[Block]], *, parts: Sequence[Sequence[int]] | None = None,
        microbatches: int | None = None,
    ) -> Schedule:  # fmt: skip
        """The schedule in which every stage runs its blocks in this order, each as soon as it can.

        Ticks are those of ops of equal length and messages of none. F and B of an overlapped pair share a tick wherever
        that makes no stage wait.

        Args:
          name: of the schedule.
          rows: of each stage, the blocks in order.
          parts: `[stage][chunk]`; default: one part to a stage, in order.
          microbatches: default: as many as the rows name.

        Raises:
          ValueError: the order is a deadlock, or the schedule does not validate.
        """
        held = _held(name, parts, len(rows))
        check_rows(name, rows, held)
        count = 1 + max((op.microbatch for row in rows for block in row for op in block), default=-1)
        table, joined = order.placed(rows, order.starts(name, rows, held))
        table, joined = order.paired(table, joined)
        made = cls(
            name=name, microbatches=count if microbatches is None else microbatches, table=table, parts=held,
            joined=joined,
        )  # fmt: skip
        return made.validate()

    @classmethod
    def from_table(
        cls, cells: Sequence[Sequence[Cell]], *, parts: Sequence[Sequence[int]] | None = None,
        microbatches: int | None = None, name: str = "table",
    ) -> Schedule:  # fmt: skip
        """A table of your own, as `[tick][stage]`; validated.

        Args:
          cells: each `("F", microbatch, chunk)`, a list of such for an overlapped pair, or None.
          parts: `[stage][chunk]`; default: one part to a stage, in order.
          microbatches: default: as many as the table names.
          name: of the schedule.

        Raises:
          ValueError: a cell that cannot be read, or a schedule that does not validate.
        """
        stages = len(cells[0]) if cells else 0
        table = np.full((len(cells), stages, len(KINDS), 2), -1, np.int32)
        for tick, row in enumerate(cells):
            if len(row) != stages:
                where, exists = f"tick {tick} of schedule `{name}`", f"it has {len(row)}, tick 0 has {stages}"
                raise problem(where, "read its cells", exists, "give one cell to each stage, None where it idles")
            for stage, cell in enumerate(row):
                for op in _ops(cell, f"schedule `{name}`, tick {tick}, stage {stage}"):
                    if table[tick, stage, op.number, 0] >= 0:
                        where, fix = f"schedule `{name}`, tick {tick}, stage {stage}", "give each to a tick of its own"
                        raise problem(where, f"run {op.text()} there", f"the cell has another {op.kind} already", fix)
                    table[tick, stage, op.number] = op.microbatch, op.chunk
        held = _held(name, parts, stages)
        count = int(table[..., 0].max(initial=-1)) + 1 if microbatches is None else microbatches
        joined = np.zeros((len(cells), stages), bool)
        return cls(name=name, microbatches=count, table=table, parts=held, joined=joined).validate()

    @classmethod
    def from_csv(cls, path: str | PathLike[str], *, name: str | None = None) -> Schedule:
        """A schedule from a file in one of torch.distributed.pipelining's formats, compute_only or compute_comms.

        A row for each rank, cells in order: global stage, op, microbatch, as `3F1`. F forward, B whole backward, I
        gradient of the input, W of the weights; `(5F9;5B5)OVERLAP_F_B` an overlapped pair; empty: idle. The rows say
        what follows what; ticks are derived. What compute_comms adds is implied here, and only checked to name stages
        and microbatches of the table: `0SEND_F1`, `1RECV_F1`, `0WAIT_SEND_F1` (and `_B`), `0UNSHARD`, `0RESHARD`,
        `0REDUCE_GRAD`, `0WAIT_REDUCE_GRAD`.

        Raises:
          ValueError: a cell that cannot be read, or an order that cannot be run.
        """
        from meshpar.schedules.csv import read

        return read(path, name=name)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """What `to_json` gave; also with `name`, `table` and, for more than one chunk a stage, `parts` alone."""
        given = {field: data[field] for field in ("name", "microbatches", "parts") if field in data}
        found = cls.from_table(data["table"], **given)
        joined = np.zeros(found.joined.shape, bool)
        for tick, stage in data.get("joined", ()):
            if not (tick in range(found.ticks) and stage in range(found.stages)):
                raise problem(
                    f"`joined` of schedule `{found.name}`",
                    f"join tick {tick} of stage {stage} and the next into one block",
                    f"there are {found.ticks} ticks and {found.stages} stages",
                    "correct it, or leave `joined` out",
                )
            joined[tick, stage] = True
        return dataclasses.replace(found, joined=joined).validate()

    # -- What it is ---------------------------------------------------------------------------------------------------

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def stages(self) -> int:
        return len(self.parts)

    @property
    def chunks(self) -> int:
        return self.parts.shape[1]

    @cached_property
    def num_parts(self) -> int:
        """Different parts of the model: with two copies of each, half of stages times chunks."""
        return int(self.parts.max()) + 1

    @property
    def copies(self) -> float:
        """How often each parameter is held, over all stages: 2 for DualPipe."""
        return self.parts.size / self.num_parts

    def cell(self, tick: int, stage: int) -> Block:
        """The ops of one stage in one tick, F before B before W; empty when it idles."""
        cell = self.table[tick, stage]
        return tuple(StageOp(kind, int(i), int(chunk)) for kind, (i, chunk) in zip(KINDS, cell, strict=True) if i >= 0)

    def order(self) -> list[list[Block]]:
        """Of each stage, its blocks in order."""
        rows: list[list[Block]] = [[] for _ in range(self.stages)]
        for tick, stage in np.argwhere(self.busy).tolist():
            if self.begins[tick, stage]:
                rows[stage].append(())
            rows[stage][-1] += self.cell(tick, stage)
        return rows

    @cached_property
    def busy(self) -> np.ndarray:
        """bool `[tick, stage]`: whether the stage runs something."""
        return np.any(self.table[..., 0] >= 0, axis=2)

    @cached_property
    def begins(self) -> np.ndarray:
        """bool `[tick, stage]`: whether the stage begins a block."""
        after = np.vstack([np.zeros_like(self.joined[:1]), self.joined[:-1]])
        return self.busy & ~after

    @cached_property
    def done_in(self) -> np.ndarray:
        """int `[kind, microbatch, part]`: the tick in which that is done. Only of a schedule that validates."""
        return self._where()[0]

    @cached_property
    def done_on(self) -> np.ndarray:
        """int `[microbatch, part]`: the stage on which that is done. Only of a schedule that validates."""
        return self._where()[1]

    def _where(self) -> tuple[np.ndarray, np.ndarray]:
        tick, stage, kind = np.nonzero(self.table[..., 0] >= 0)
        microbatch, chunk = np.moveaxis(self.table[tick, stage, kind], -1, 0)
        part = self.parts[stage, chunk]
        ticks = np.full((len(KINDS), self.microbatches, self.num_parts), -1)
        stages = np.full((self.microbatches, self.num_parts), -1)
        ticks[kind, microbatch, part] = tick
        stages[microbatch, part] = stage
        return ticks, stages

    @cached_property
    def peak_activations(self) -> np.ndarray:
        """int `[stage]`: most chunks' activations held at once, each from the tick of its F through that of its W.

        A chunk is one of `num_parts` parts of the model: times `stages / num_parts` they are microbatches' activations
        of a stage's share.
        """
        done = (self.table[..., 0] >= 0).astype(int)
        begun, freed = done[:, :, F].cumsum(0), done[:, :, W].cumsum(0)
        return (begun - np.vstack([np.zeros_like(freed[:1]), freed[:-1]])).max(0, initial=0)

    @cached_property
    def _unit(self) -> Simulation:
        return self.simulate()

    @property
    def bubble_fraction(self) -> float:
        """Makespan bubble: the idle share of a step alone, all stages beginning and ending together; F = B = W."""
        return self._unit.free.bubble_fraction

    @property
    def span_bubble_fraction(self) -> float:
        """Span bubble: the idle share between a stage's first op and its last, of the worst stage; F = B = W.

        What a run of steps pays when no stage waits for the slowest at a step's end.
        """
        return self._unit.free.span_bubble_fraction

    # -- What it can do -----------------------------------------------------------------------------------------------

    def validate(self) -> Schedule:
        """The schedule itself, if it can be run.

        Every microbatch passes F, B and W exactly once on every part of the model, all three on one stage; parts that
        follow each other are on one stage or on neighbours of the ring; and nothing is used before the tick after the
        one that makes it.

        Raises:
          ValueError: it cannot; names the tick, the stage and the microbatch.
        """
        check(self)
        return self

    def simulate(
        self, *, f: Costs = 1.0, b: Costs = 1.0, w: Costs = 1.0, comm: Costs = 0.0, pair: Costs | None = None
    ) -> Simulation:
        """The step simulated with these costs, in any unit of time.

        Args:
          f: of the forward of one `stages`-th of the model; a number, or one for each stage. Of a model cut into more
            parts than there are stages, an op takes its share, `stages / num_parts`.
          b: of the gradient to the input.
          w: of the gradient to the weights.
          comm: of a message between neighbours. A stage does not wait for what it sends.
          pair: of an F and a whole backward overlapped; default `f + b + w`, nothing hidden.
        """
        from meshpar.schedules.simulate import simulate

        return simulate(self, f=f, b=b, w=w, comm=comm, pair=pair)

    def slots(self) -> Slots:
        """Where each stage keeps what: the buffers of an executor, each as small as the table allows."""
        from meshpar.schedules.slots import assign

        return assign(self)

    def repeated(self, steps: int) -> Schedule:
        """So many steps one after another with no synchronisation between them; microbatches are numbered on."""
        rows = [
            [
                tuple(op._replace(microbatch=op.microbatch + step * self.microbatches) for op in block)
                for step in range(steps)
                for block in row
            ]
            for row in self.order()
        ]
        return Schedule.from_order(
            f"{steps} x {self.name}", rows, parts=self.parts.tolist(), microbatches=steps * self.microbatches
        )  # fmt: skip

    def text(self, *, width: int | None = None) -> str:
        """The table as plain text, a line for each stage, a column for each tick."""
        from meshpar.schedules.rendering import picture

        return picture(self, width=width)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write it in torch.distributed.pipelining's compute_only format, blocks at their first tick.

        `from_csv` reads it, and so does torch, unless the schedule holds a part on two stages, as DualPipe does: there
        torch wants one rank for each. It says what follows what: a table whose cells hold three ops, as that of
        `eager-1f1b`, is read as one of more ticks; `to_json` keeps these.
        """
        from meshpar.schedules import csv

        write_text(path, csv.text(self), "schedule")

    def to_json(self, *, simulation: Simulation | None = None) -> dict[str, Any]:
        """As plain data.

        Args:
          simulation: for makespan and bubbles; default: with F = B = W = 1 and no time for messages.
        """
        times = simulation or self._unit
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
            "table": [[_plain(self.cell(tick, stage)) for stage in range(self.stages)] for tick in range(self.ticks)],
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        arrays = (self.table, self.parts, self.joined)
        return self.name, self.microbatches, *((array.shape, array.tobytes()) for array in arrays)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, stages={self.stages}, microbatches={self.microbatches}, ticks={self.ticks})"

    def __str__(self) -> str:
        return self.text()


_MOST = 10**9
"""Microbatches and parts are numbered below that: tables hold int32."""


def _held(name: str, parts: Sequence[Sequence[int]] | None, stages: int) -> np.ndarray:
    """`parts` as an array `[stage, chunk]`; default: one part to a stage, in order."""
    if parts is None:
        return np.arange(stages, dtype=np.int32)[:, None]
    rows = [list(row) for row in parts]
    alike = len({len(row) for row in rows}) < 2
    if not alike or not all(isinstance(part, int | np.integer) and abs(part) < _MOST for row in rows for part in row):
        where, fix = f"`parts` of schedule `{name}`", "write [[0], [1]] for two stages with one part each"
        raise problem(where, f"hold {rows}", "it is [stage][chunk], whole numbers, equally many for every stage", fix)
    return np.array(rows, np.int32)


def _ops(cell: Cell, where: str) -> Iterable[StageOp]:
    """The ops of a cell as a person writes it."""
    if cell is None or len(cell) == 0:
        return
    for op in [cell] if isinstance(cell[0], str) else cell:
        whole = len(op) in (2, 3) and all(
            isinstance(number, int | np.integer) and 0 <= number < _MOST for number in op[1:]
        )
        if not whole or op[0] not in tuple(KINDS):
            asked, fix = f"run {json.dumps(op, default=str)}", 'write it as ("F", 3, 0), and None for an idle tick'
            raise problem(where, asked, "an op is one of F, B, W with the numbers of its microbatch and its chunk", fix)
        yield StageOp(*op)


def _plain(cell: Block) -> list[Any] | None:
    if not cell:
        return None
    return list(cell[0]) if len(cell) == 1 else [list(op) for op in cell]
