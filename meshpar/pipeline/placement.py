"""The weight placement of a schedule: which stage holds which part of the model.

Between steps the parts lie over the stages in order, as the layers of a model without a schedule do. A schedule may
hold them elsewhere: several apart on one stage, or two copies. Then weights go to their places before the first tick
and gradients come back after the last, from stage to stage, once a step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.pipeline.schedules import Schedule
from meshpar.sharding.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Round:
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
    rounds: tuple[Round, ...]

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
            rounds.append(Round(pairs=tuple(pairs), row=row, chunk=chunk))
        return WeightPlacement(axis=axis, rows=rows, chunks=schedule.chunks, rounds=tuple(rounds))

    @property
    def moves(self) -> int:
        """Parts that leave their stage."""
        return sum(len(one.pairs) for one in self.rounds)

    def spread(self, params: PyTree) -> PyTree:
        """`[rows, ...] -> [chunk, ...]`, inside a `shard_map` over the stages."""
        if self._is_in_order:
            return params
        with jax.named_scope("parts_to_stages"):
            return jax.tree.map(self._spread, params)

    def collect(self, grads: PyTree) -> PyTree:
        """`[chunk, ...] -> [rows, ...]`, copies of a part summed."""
        if self._is_in_order:
            return grads
        with jax.named_scope("gradients_from_stages"):
            return jax.tree.map(self._collect, grads)

    @property
    def _is_in_order(self) -> bool:
        return self.moves == 0 and self.rows == self.chunks

    def _spread(self, x: jax.Array) -> jax.Array:
        out = jnp.zeros((self.chunks, *x.shape[1:]), x.dtype)
        for one in self.rounds:
            row, chunk = self._here(one)
            block = lax.dynamic_index_in_dim(x, row, keepdims=False)
            block = lax.ppermute(block, self.axis, one.pairs) if one.pairs else block
            out = _put(out, chunk, block, add=False)
        return out

    def _collect(self, x: jax.Array) -> jax.Array:
        out = jnp.zeros((self.rows, *x.shape[1:]), x.dtype)
        for one in self.rounds:
            row, chunk = self._here(one)
            block = lax.dynamic_index_in_dim(x, chunk, keepdims=False)
            block = lax.ppermute(block, self.axis, [(b, a) for a, b in one.pairs]) if one.pairs else block
            out = _put(out, row, block, add=True)
        return out

    def _here(self, one: Round) -> tuple[jax.Array, jax.Array]:
        stage = lax.axis_index(self.axis)
        return jnp.asarray(one.row)[stage], jnp.asarray(one.chunk)[stage]


def _put(out: jax.Array, at: jax.Array, block: Any, *, add: bool) -> jax.Array:
    """The array with a block put, or added, at a place; as it was where that is −1."""
    old = lax.dynamic_index_in_dim(out, at, keepdims=False)
    new = jnp.where(at >= 0, old + block if add else block, old)
    return lax.dynamic_update_index_in_dim(out, new, at, 0)
