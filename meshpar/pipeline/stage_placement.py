"""Placement of pipeline chunks on the stages of a schedule.

Between steps, the chunks are sharded over the stages in order, like the layers of a model without a schedule. A
schedule may place them differently: distant chunks on the same stage, or two copies. In that case, weights are sent
to their stages before the first tick and gradients are sent back after the last, once per step.
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
"""Named scope of the permutes that send gradients back."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MoveRound:
    """Chunks that move at the same time, with at most a single chunk sent and received per stage."""

    pairs: tuple[tuple[int, int], ...]
    """(source, target) stages; empty if all chunks stay on their stage."""
    row: np.ndarray
    """int32 `[stage]`: index of the chunk that a stage sends, in the order between steps; −1 if it sends none."""
    chunk: np.ndarray
    """int32 `[stage]`: index of the received chunk on its new stage; −1 if it receives none."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightPlacement:
    """Conversion between chunks in model order, `[rows, ...]`, and chunks of the schedule, `[chunk, ...]`."""

    axis: str
    rows: int
    """Number of chunks per stage between steps."""
    chunks: int
    rounds: tuple[MoveRound, ...]

    @staticmethod
    def of(schedule: Schedule, axis: str) -> WeightPlacement:
        """Return the placement for a schedule whose stages are on the mesh axis `axis`."""
        rows = schedule.num_parts // schedule.stages
        moves = [
            (part // rows, part % rows, stage, chunk)
            for stage, parts in enumerate(schedule.parts.tolist())
            for chunk, part in enumerate(parts)
        ]
        rounds = []
        while moves:
            # Greedy: first chunks that stay on their stage, then chunks whose stages are both free.
            in_place = any(source == target for source, _, target, _ in moves)
            sending, receiving = set[int](), set[int]()
            row, chunk = (np.full(schedule.stages, -1, np.int32) for _ in range(2))
            pairs, remaining = [], []
            for move in moves:
                source, from_row, target, to_chunk = move
                if (source == target) != in_place or source in sending or target in receiving:
                    remaining.append(move)
                    continue
                sending.add(source)
                receiving.add(target)
                row[source], chunk[target] = from_row, to_chunk
                pairs += [] if in_place else [(source, target)]
            moves = remaining
            rounds.append(MoveRound(pairs=tuple(pairs), row=row, chunk=chunk))
        return WeightPlacement(axis=axis, rows=rows, chunks=schedule.chunks, rounds=tuple(rounds))

    @property
    def moves(self) -> int:
        """Number of chunks that change their stage."""
        return sum(len(r.pairs) for r in self.rounds)

    @property
    def moves_shards(self) -> bool:
        """True if chunks are moved as shards, before weights are gathered and after gradients are reduced.

        Copies are created from gathered weights and summed before the reduction. Otherwise each copy would be gathered
        and reduced separately.
        """
        return self.moves > 0 and self.rows == self.chunks

    def spread(self, params: PyTree) -> PyTree:
        """Convert chunks in model order, `[rows, ...]`, to chunks of the schedule, `[chunk, ...]`."""
        with jax.named_scope("place_weights"):
            return self._moved(params, back=False)

    def collect(self, grads: PyTree) -> PyTree:
        """Convert chunks of the schedule, `[chunk, ...]`, to model order, `[rows, ...]`, and sum copies of a chunk."""
        with jax.named_scope(RETURNED):
            return self._moved(grads, back=True)

    def _moved(self, tree: PyTree, *, back: bool) -> PyTree:
        if self.moves == 0 and self.rows == self.chunks:
            return tree
        stage = lax.axis_index(self.axis)

        def move(x: jax.Array) -> jax.Array:
            out = jnp.zeros((self.rows if back else self.chunks, *x.shape[1:]), x.dtype)
            for r in self.rounds:
                row, chunk = jnp.asarray(r.row)[stage], jnp.asarray(r.chunk)[stage]
                source, target = (chunk, row) if back else (row, chunk)
                block = read(x, source)
                if r.pairs:
                    block = lax.ppermute(block, self.axis, [(b, a) if back else (a, b) for a, b in r.pairs])
                out = write(out, target, read(out, target) + block if back else block)
            return out

        return jax.tree.map(move, tree)
