"""The weight placement of a schedule: which stage holds which part of the model.

Between steps the parts lie over the stages in order, as the layers of a model without a schedule do. A schedule may
hold them elsewhere: several apart on one stage, or two copies. Then weights go to their places before the first tick
and gradients come back after the last, from stage to stage, once a step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.pipeline.executor import read, write
from meshpar.schedules import Schedule
from meshpar.sharding.types import PyTree

RETURNED = "return_gradients"
"""Scope of gradients that go from where a schedule holds their part to where it lies between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MoveRound:
    """Parts that move at the same time, at most one from each stage and one to each."""

    pairs: tuple[tuple[int, int], ...]
    """(from, to) stages; empty: every part is in its place."""
    row: np.ndarray
    """int32 `[stage]`: which of the parts that it holds between steps a stage sends; −1: none."""
    chunk: np.ndarray
    """int32 `[stage]`: where it puts the part it receives; −1: none."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightPlacement:
    """From parts between steps, `[parts / stages, ...]` on each stage, to the schedule's, `[chunk, ...]`, and back."""

    axis: str
    rows: int
    """Parts a stage holds between steps."""
    chunks: int
    rounds: tuple[MoveRound, ...]

    @staticmethod
    def of(schedule: Schedule, axis: str) -> WeightPlacement:
        rows = schedule.num_parts // schedule.stages
        moves = [
            (part // rows, part % rows, stage, chunk)
            for stage, parts in enumerate(schedule.parts.tolist())
            for chunk, part in enumerate(parts)
        ]
        rounds = []
        while moves:
            # Greedy: of those in place one for each stage, else the first ones whose stages are free.
            in_place = any(source == goal for source, _, goal, _ in moves)
            sending, receiving = set[int](), set[int]()
            row, chunk = (np.full(schedule.stages, -1, np.int32) for _ in range(2))
            pairs, left = [], []
            for move in moves:
                source, of_row, goal, to_chunk = move
                if (source == goal) != in_place or source in sending or goal in receiving:
                    left.append(move)
                    continue
                sending.add(source)
                receiving.add(goal)
                row[source], chunk[goal] = of_row, to_chunk
                pairs += [] if in_place else [(source, goal)]
            moves = left
            rounds.append(MoveRound(pairs=tuple(pairs), row=row, chunk=chunk))
        return WeightPlacement(axis=axis, rows=rows, chunks=schedule.chunks, rounds=tuple(rounds))

    @property
    def moves(self) -> int:
        """Parts that leave their stage."""
        return sum(len(one.pairs) for one in self.rounds)

    @property
    def moves_shards(self) -> bool:
        """Whether parts change stages as they lie between steps, before weights are gathered and after gradients are
        reduced. Copies are made of whole weights, and summed before that, or each would be gathered and reduced."""
        return self.moves > 0 and self.rows == self.chunks

    def spread(self, params: PyTree) -> PyTree:
        """`[rows, ...] -> [chunk, ...]`, inside a `shard_map` over the stages."""
        with jax.named_scope("place_weights"):
            return self._moved(params, back=False)

    def collect(self, grads: PyTree) -> PyTree:
        """`[chunk, ...] -> [rows, ...]`, copies of a part summed."""
        with jax.named_scope(RETURNED):
            return self._moved(grads, back=True)

    def _moved(self, tree: PyTree, *, back: bool) -> PyTree:
        if self.moves == 0 and self.rows == self.chunks:
            return tree
        stage = lax.axis_index(self.axis)

        def moved(x: jax.Array) -> jax.Array:
            out = jnp.zeros((self.rows if back else self.chunks, *x.shape[1:]), x.dtype)
            for one in self.rounds:
                row, chunk = jnp.asarray(one.row)[stage], jnp.asarray(one.chunk)[stage]
                source, goal = (chunk, row) if back else (row, chunk)
                block = read(x, source)
                if one.pairs:
                    block = lax.ppermute(block, self.axis, [(b, a) if back else (a, b) for a, b in one.pairs])
                out = write(out, goal, read(out, goal) + block if back else block)
            return out

        return jax.tree.map(moved, tree)
