"""Placement of pipeline chunks on the stages of a schedule.

Between steps, the chunks are sharded over the stages in order, like the layers of a model without a schedule. A
schedule may place them differently: distant chunks on the same stage, or two copies. In that case, weights are sent
to their stages before the first tick and gradients are sent back after the last, once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from meshpar.pipeline.stage_program import read, write
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
    """Conversion between chunks in model order, `[rows, ...]`, and chunks of the schedule, `[chunk, ...]`.

    Without copies of chunks, the conversion is in place: in each round, a stage sends a chunk and writes the received
    chunk in its place.
    """

    schedule: Schedule
    """The schedule, with the chunks of a stage numbered as `spread` orders them."""
    axis: str
    rows: int
    """Number of chunks per stage between steps."""
    rounds: tuple[MoveRound, ...]

    @staticmethod
    def of(schedule: Schedule, axis: str) -> WeightPlacement:
        """Return the placement for a schedule whose stages are on the mesh axis `axis`."""
        rows = schedule.num_parts // schedule.stages
        if rows != schedule.chunks:
            copying = tuple(_copying_rounds(schedule, rows))
            return WeightPlacement(schedule=schedule, axis=axis, rows=rows, rounds=copying)
        rounds, places = _rounds_in_place(schedule)
        return WeightPlacement(schedule=_renumbered(schedule, places), axis=axis, rows=rows, rounds=rounds)

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
        return self.moves > 0 and self.is_in_place

    @property
    def is_in_place(self) -> bool:
        return self.rows == self.schedule.chunks

    def spread(self, params: PyTree) -> PyTree:
        """Convert chunks in model order, `[rows, ...]`, to chunks of the schedule, `[chunk, ...]`."""
        with jax.named_scope("place_weights"):
            return self._moved(params, back=False)

    def collect(self, grads: PyTree) -> PyTree:
        """Convert chunks of the schedule, `[chunk, ...]`, to model order, `[rows, ...]`, and sum copies of a chunk."""
        with jax.named_scope(RETURNED):
            return self._moved(grads, back=True)

    def _moved(self, tree: PyTree, *, back: bool) -> PyTree:
        if self.moves == 0 and self.is_in_place:
            return tree
        stage = lax.axis_index(self.axis)

        def move(x: jax.Array) -> jax.Array:
            out = x
            if not self.is_in_place:
                out = jnp.zeros((self.rows if back else self.schedule.chunks, *x.shape[1:]), x.dtype)
            for r in self.rounds:
                row, chunk = jnp.asarray(r.row)[stage], jnp.asarray(r.chunk)[stage]
                source, target = (chunk, row) if back else (row, chunk)
                block = read(out if self.is_in_place else x, source)
                if r.pairs:
                    block = lax.ppermute(block, self.axis, [(b, a) if back else (a, b) for a, b in r.pairs])
                is_sum = back and not self.is_in_place
                out = write(out, target, read(out, target) + block if is_sum else block)
            return out

        return jax.tree.map(move, tree)


def _rounds_in_place(schedule: Schedule) -> tuple[tuple[MoveRound, ...], np.ndarray]:
    """Return rounds in which each stage sends and receives at most one chunk, and the place of each model part.

    The second result is int `[stage, part]`; −1 if the stage does not run the part. Stages that keep a chunk are the
    matched edges of a stage with itself. A regular bipartite graph, with an edge from the stage of a part between steps
    to its stage in the schedule, is the union of perfect matchings (König's theorem).
    """
    stages, rows = schedule.stages, schedule.chunks
    target = np.full(schedule.num_parts, -1)
    for stage, parts in enumerate(schedule.parts):
        target[parts] = stage
    remaining = {(stage, row) for stage in range(stages) for row in range(rows)}
    places = np.full((stages, schedule.num_parts), -1)
    rounds = []
    while remaining:
        edges = {(stage, int(target[stage * rows + row])): row for stage, row in sorted(remaining)}
        graph = csr_array((np.ones(len(edges)), np.array(list(edges)).T), shape=(stages, stages))
        matched = enumerate(maximum_bipartite_matching(graph, perm_type="column").tolist())
        sent = {stage: (edges[stage, to], to) for stage, to in matched}
        remaining -= {(stage, row) for stage, (row, _) in sent.items()}
        row_of = np.array([sent[stage][0] if sent[stage][1] != stage else -1 for stage in range(stages)], np.int32)
        for stage, (row, to) in sent.items():
            places[to, stage * rows + row] = sent[to][0]
        pairs = tuple((stage, to) for stage, (_, to) in sorted(sent.items()) if stage != to)
        if pairs:
            rounds.append(MoveRound(pairs=pairs, row=row_of, chunk=row_of))
    return tuple(rounds), places


def _renumbered(schedule: Schedule, places: np.ndarray) -> Schedule:
    """Return the schedule with the chunks of each stage in the order of their places."""
    stage = np.arange(schedule.stages)[:, None]
    number = places[stage, schedule.parts]  # [stage, chunk]
    parts, table = np.empty_like(schedule.parts), schedule.table.copy()
    parts[stage, number] = schedule.parts
    table[..., 1] = np.where(table[..., 1] < 0, -1, number[stage, table[..., 1]])
    return dataclasses.replace(schedule, parts=parts, table=table)


def _copying_rounds(schedule: Schedule, rows: int) -> Iterator[MoveRound]:
    """Yield rounds for chunks that are on several stages. Chunks that stay on their stage come first."""
    moves = [
        (part // rows, part % rows, stage, chunk)
        for stage, parts in enumerate(schedule.parts.tolist())
        for chunk, part in enumerate(parts)
    ]
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
        yield MoveRound(pairs=tuple(pairs), row=row, chunk=chunk)
