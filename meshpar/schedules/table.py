"""The data of a pipeline schedule: arrays of ops and model parts, and properties derived from them."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from meshpar.schedules.ops import KINDS, Block, F, StageOp, W
from meshpar.sharding.errors import problem


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTable:
    """The ops that each stage runs in each tick; see `Schedule`."""

    name: str
    microbatches: int
    table: np.ndarray
    """int32 `[tick, stage, kind, 2]`: microbatch and chunk of F, B and W (kind 0, 1, 2); −1 if there is no op."""
    parts: np.ndarray
    """int32 `[stage, chunk]`: index of the model part, starting at 0. A part may be on two stages."""
    joined: np.ndarray
    """bool `[tick, stage]`: True if this tick and the next belong to the same block, such as a full backward.

    A block starts when all its inputs are available, and its results are available when it ends. The executor ignores
    blocks, because they only add constraints. `simulate` and the file format use them."""

    def __post_init__(self) -> None:
        for field, dtype in (("table", np.int32), ("parts", np.int32), ("joined", np.bool_)):
            array: np.ndarray = np.array(getattr(self, field), dtype)
            array.setflags(write=False)
            object.__setattr__(self, field, array)
        shape = (*self.table.shape[:1], *self.parts.shape[:1], len(KINDS), 2)
        if self.parts.ndim != 2 or not self.parts.size or self.table.shape != shape or self.joined.shape != shape[:2]:
            shapes = f"table {self.table.shape}, parts {self.parts.shape} and joined {self.joined.shape}"
            reason = f"the shapes must be [tick, stage, {len(KINDS)}, 2], [stage, chunk] and [tick, stage]"
            fix = "pass a row of `parts` for each stage of the table"
            raise problem(f"schedule `{self.name}`", f"use {shapes}", reason, fix, code="wrong-shape")

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
        """Number of distinct model parts: `stages * chunks / copies`."""
        return int(self.parts.max()) + 1

    @property
    def copies(self) -> float:
        """Number of copies of each parameter over all stages: 2 for DualPipe, else 1."""
        return self.parts.size / self.num_parts

    def cell(self, tick: int, stage: int) -> Block:
        """Return the ops of a stage in a tick, in the order F, B, W; empty if it is idle."""
        ops = zip(KINDS, self.table[tick, stage], strict=True)
        return tuple(StageOp(kind, int(i), int(chunk)) for kind, (i, chunk) in ops if i >= 0)

    def order(self) -> list[list[Block]]:
        """Return the ordered blocks of each stage."""
        rows: list[list[Block]] = [[] for _ in range(self.stages)]
        for tick, stage in np.argwhere(self.busy).tolist():
            if self.begins[tick, stage]:
                rows[stage].append(())
            rows[stage][-1] += self.cell(tick, stage)
        return rows

    @cached_property
    def busy(self) -> np.ndarray:
        """bool `[tick, stage]`: True if the stage runs an op."""
        return np.any(self.table[..., 0] >= 0, axis=2)

    @cached_property
    def begins(self) -> np.ndarray:
        """bool `[tick, stage]`: True if the stage starts a block."""
        continues = np.vstack([np.zeros_like(self.joined[:1]), self.joined[:-1]])
        return self.busy & ~continues

    @property
    def done_in(self) -> np.ndarray:
        """int `[kind, microbatch, part]`: the tick of each op. Requires a valid schedule."""
        return self._done[0]

    @property
    def done_on(self) -> np.ndarray:
        """int `[microbatch, part]`: the stage that runs the ops. Requires a valid schedule."""
        return self._done[1]

    @cached_property
    def _done(self) -> tuple[np.ndarray, np.ndarray]:
        tick, stage, kind = np.nonzero(self.table[..., 0] >= 0)
        microbatch, chunk = self.table[tick, stage, kind].T
        part = self.parts[stage, chunk]
        ticks = np.full((len(KINDS), self.microbatches, self.num_parts), -1)
        stages = np.full((self.microbatches, self.num_parts), -1)
        ticks[kind, microbatch, part], stages[microbatch, part] = tick, stage
        return ticks, stages

    @cached_property
    def peak_activations(self) -> np.ndarray:
        """int `[stage]`: maximum number of chunk activations that are saved at a time, each from F through W.

        Multiply by `stages / num_parts` to convert to activations of a microbatch on 1/`stages` of the model.
        """
        has_op = (self.table[..., 0] >= 0).astype(int)
        saved, freed = has_op[:, :, F].cumsum(0), has_op[:, :, W].cumsum(0)
        return (saved - np.vstack([np.zeros_like(freed[:1]), freed[:-1]])).max(0, initial=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScheduleTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        arrays = (self.table, self.parts, self.joined)
        return self.name, self.microbatches, *((array.shape, array.tobytes()) for array in arrays)
