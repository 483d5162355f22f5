"""The ways of `dispatch`: rows to the ranks of their experts, and home as every token's weighted sum.

    Capacity    buffers of one size for every pair of rank and expert
    Dropless    rows sorted by expert, as many to each rank as there are
    NodeFirst   a token once to every node that it visits, and there to its experts as by `Dropless`

`out(x, experts, weights)` gives what `Arrived`, rows sorted by local expert; `back(made, arrived)` gives y [T, d'].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.kernel_checks import check_choice, checked_count
from meshpar.collectives.quantized import BLOCK, FORMATS
from meshpar.hardware import cost_model as cost
from meshpar.moe import token_exchange as exchange
from meshpar.moe import transport_choice as choice
from meshpar.moe.assignment_order import (
    Order,
    Places,
    Runs,
    by_expert,
    in_buffers,
    moved,
    part_of,
    spread,
    summed,
    weighted_sum,
)
from meshpar.moe.routing import count, kept
from meshpar.moe.token_exchange import Coding, RowCounts, RowLink


class Dispatched(NamedTuple):
    """What was sent where, as one rank sees it: int32, no gradient."""

    chosen: jax.Array
    """[E]: choices of this rank's tokens for each expert, dropped ones included."""
    received: jax.Array
    """[E/N]: rows that this rank's experts computed for the tokens of all ranks."""
    dropped: jax.Array
    """[]: choices that no expert computed: of this rank's tokens, and node-first those that it had to hand on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Payload:
    """How rows travel: each number format "int8", "fp8" or None, as they are.

    Rows are quantized one by one, to nearest (`collectives.quantize`: a scale for each run of at most `block` numbers),
    and rounding counts as the identity in the gradient. DeepSeek-V3 (2024, section 3.3.2) dispatches in fp8 and
    combines in bf16.
    """

    dispatch: str | None = None
    """Tokens to their experts."""
    combine: str | None = None
    """What the experts made of them, back."""
    grad: str | None = None
    """The cotangents, both ways."""
    block: int = BLOCK

    def __post_init__(self) -> None:
        for name in ("dispatch", "combine", "grad"):
            if getattr(self, name) is not None:
                check_choice("Payload", name, getattr(self, name), FORMATS)
        checked_count("Payload", "block", self.block)

    def coding(self, way: str) -> Coding:
        return Coding(getattr(self, way), self.grad, self.block)

    def row_bytes(self, way: str, width: int) -> int | None:
        """Of a row of so many numbers under way (`dispatch`, `combine`, `grad`), with its scales; None: as it is."""
        return None if getattr(self, way) is None else cost.quantized_bytes(width, block=self.block)


class Shape(NamedTuple):
    """What is known when the program is traced, of one chunk."""

    tokens: int
    k: int
    num_experts: int
    num_ranks: int
    axis: tuple[str, ...]
    how: str

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def link(self, pair_rows: int, send_rows: int) -> RowLink:
        return RowLink(self.axis, self.num_ranks, self.how, pair_rows, send_rows)

    def told(self, counts: jax.Array) -> jax.Array:
        """int32 [N to, c] -> [N from, c]: what every rank is told by each.

        By an all-to-all: XLA makes one of all-gathers that do not wait for each other, and then slices of the rows
        (`interleave`) and chunks would wait for each other's counts before any row travels.
        """
        with jax.named_scope("counts"):
            return counts if self.num_ranks == 1 else lax.all_to_all(counts, self.axis, 0, 0)

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)


class Arrived(NamedTuple):
    """Rows of this rank's experts, and what takes them back."""

    rows: jax.Array
    sizes: Any
    order: Order
    """Of this rank's own choices."""
    weights: jax.Array
    """[T, k]: theirs."""
    traffic: RowCounts | None
    runs: Runs | Places | None
    """From where rows came in to where they stand."""
    stats: Dispatched
    before: Arrived | None = None
    """Node-first: what came in over the nodes, of which these are the rows handed on."""


class Capacity(NamedTuple):
    """A buffer of `room` rows for every pair of rank and expert; all of them travel."""

    shape: Shape
    payload: Payload
    room: int

    def out(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> Arrived:
        shape, room = self.shape, self.room
        order = in_buffers(experts, shape.num_experts, room)
        parts = spread(x, order).reshape(shape.num_ranks, self._link.pair_rows, x.shape[1])
        parts = exchange.swapped(self._link, self.payload.coding("dispatch"), parts)
        rows = self._turned(parts.reshape(shape.num_ranks, shape.local_experts, room, x.shape[1]))
        sizes = np.full(shape.local_experts, shape.num_ranks * room, np.int32)
        return Arrived(rows, sizes, order, weights, None, None, self._stats(experts))

    def back(self, made: jax.Array, arrived: Arrived) -> jax.Array:
        shape, width = self.shape, made.shape[1]
        parts = self._turned(made.reshape(shape.local_experts, shape.num_ranks, self.room, width))
        parts = parts.reshape(shape.num_ranks, self._link.pair_rows, width)
        parts = exchange.swapped(self._link, self.payload.coding("combine"), parts)
        return weighted_sum(parts.reshape(-1, width), arrived.weights, arrived.order)

    @property
    def _link(self) -> RowLink:
        return self.shape.link(self.shape.local_experts * self.room, self.shape.tokens * self.shape.k)

    def _turned(self, parts: jax.Array) -> jax.Array:
        """[N, E/N, C, d] <-> [E/N, N, C, d], as rows."""
        return jnp.swapaxes(parts, 0, 1).reshape(-1, parts.shape[3])

    def _stats(self, experts: jax.Array) -> Dispatched:
        chosen = count(experts, self.shape.num_experts)
        fitting = jnp.minimum(chosen, self.room)
        received = self.shape.told(fitting.reshape(self.shape.num_ranks, -1)).sum(0, dtype=jnp.int32)
        return Dispatched(chosen, received, jnp.sum(chosen - fitting, dtype=jnp.int32))


class Dropless(NamedTuple):
    """Rows sorted by expert, as many to each rank as there are."""

    shape: Shape
    payload: Payload
    pair_rows: int
    """The most to any one rank."""
    send_rows: int
    """The most to all."""

    @classmethod
    def of(cls, shape: Shape, payload: Payload, bound_factor: float | None) -> Dropless:
        """Room for any routing, or for so many times an even load."""
        rows = cost.dropless_rows(shape.tokens, shape.k, shape.num_experts, shape.num_ranks, bound_factor)
        return cls(shape, payload, rows // shape.num_ranks, shape.tokens * shape.k)

    def out(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> Arrived:
        shape = self.shape
        order, chosen, sent = self._sorted(experts)
        traffic, mine = self._traffic(sent.reshape(shape.num_ranks, -1))
        stats = Dispatched(chosen, mine.sum(0, dtype=jnp.int32), jnp.sum(chosen - sent, dtype=jnp.int32))
        # Runs spare a CPU the rows that are not there. On GPUs, where all are read either way, places leave XLA the
        # freedom to let chunks travel while experts work: with runs it hid two exchanges of eight, with places four.
        on_cpu = choice.platform_of_mesh() == "cpu"
        runs = _runs_by_expert(mine, self.pair_rows) if on_cpu else _places_by_expert(mine, self.pair_rows)
        arrived = Arrived(x, stats.received, order, weights, traffic, runs, stats)
        return arrived._replace(rows=self.carried(x, arrived, self.payload.coding("dispatch")))

    def carried(self, x: jax.Array, arrived: Arrived, coding: Coding) -> jax.Array:
        """[T, d] -> [N P, d]: what belongs to the tokens, to where their rows stand."""
        assert arrived.traffic is not None
        came_in = exchange.sent_out(self._link, coding, spread(x, arrived.order), arrived.traffic)
        return came_in if arrived.runs is None else moved(came_in, arrived.runs, len(came_in))

    def back(self, made: jax.Array, arrived: Arrived) -> jax.Array:
        return weighted_sum(self.returned(made, arrived), arrived.weights, arrived.order)

    def returned(self, made: jax.Array, arrived: Arrived) -> jax.Array:
        """[A, d']: rows in the order of this rank's own choices."""
        assert arrived.traffic is not None
        rows = made if arrived.runs is None else moved(made, arrived.runs.undone, len(made))
        return exchange.sent_back(self._link, self.payload.coding("combine"), rows, arrived.traffic)

    @property
    def _link(self) -> RowLink:
        return self.shape.link(self.pair_rows, self.send_rows)

    def _sorted(self, experts: jax.Array) -> tuple[Order, jax.Array, jax.Array]:
        """(order, choices of each expert, those of them that travel): who comes late where there is no room is dropped.

        Room at a rank goes to the earliest choices, room to send to those of the first experts.
        """
        shape = self.shape
        chosen = sent = count(experts, shape.num_experts)
        if self.pair_rows < min(self.send_rows, shape.tokens * shape.k):
            _, fits = kept(experts // shape.local_experts, self.pair_rows, shape.num_ranks)
            experts = jnp.where(fits, experts, shape.num_experts)
            sent = count(experts, shape.num_experts)
        order = by_expert(experts, shape.num_experts)
        if self.send_rows < shape.tokens * shape.k:
            sent = jnp.clip(self.send_rows - (jnp.cumsum(sent) - sent), 0, sent)
            order = Order(jnp.where(order.places < self.send_rows, order.places, -1), order.choices[: self.send_rows])
        return order, chosen, sent

    def _traffic(self, sent: jax.Array) -> tuple[RowCounts, jax.Array]:
        """Of rows [N to, E/N] that this rank sends: what travels, and rows [N from, E/N] that it gets."""
        sums = sent.sum(1, dtype=jnp.int32)
        begins = jnp.cumsum(sums) - sums
        told = self.shape.told(jnp.concatenate([sent, begins[:, None]], axis=1))
        mine = told[:, :-1]
        return RowCounts(sums, begins, mine.sum(1, dtype=jnp.int32), told[:, -1]), mine


class NodeFirst(NamedTuple):
    """M nodes of K ranks. A token goes once to every node that it visits, to the rank of its own place there, with its
    choices and their weights; that rank hands it on to its experts in the node and sends back one weighted sum.

    Across the nodes a row travels for each token and node instead of one for each choice, and weights are done with
    when the sums go home: recomputing a layer for its gradient repeats the way out, and not the way back.
    """

    shape: Shape
    across: Dropless
    """Its experts are the nodes."""
    inside: Dropless

    @classmethod
    def of(cls, shape: Shape, payload: Payload, bound_factor: float | None, nodes: int, visited: int) -> NodeFirst:
        """For tokens that visit at most so many of the nodes."""
        outer, inner = shape.axis
        tokens, k, num_ranks = shape.tokens, shape.k, shape.num_ranks // nodes
        across = Shape(tokens, visited, nodes, nodes, (outer,), "auto")
        first = Dropless.of(across, payload, bound_factor)
        handed = Shape(nodes * first.pair_rows, k, shape.num_experts // nodes, num_ranks, (inner,), "auto")
        # All ranks of this place send to this one, together no more choices than they have.
        any_routing = min(handed.tokens * min(k, handed.num_experts), nodes * tokens * k)
        even = math.inf if bound_factor is None else max(1, math.ceil(round(bound_factor * tokens * k, 9)))
        send_rows = int(min(any_routing, even))
        pair_rows = min(send_rows, handed.tokens * min(k, handed.local_experts))
        if bound_factor is not None and num_ranks > 1:
            pair_rows = max(1, min(pair_rows, math.ceil(round(bound_factor * tokens * k / num_ranks, 9))))
        return cls(shape, first, Dropless(handed, payload, pair_rows, send_rows))

    def out(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> Arrived:
        nodes, here = self.across.shape, self.inside.shape
        node = experts // here.num_experts  # M where there is none
        # Where a token has more nodes than there is room for, those of its first choices.
        before = jnp.arange(here.k, 0, -1, dtype=jnp.int32)[:, None]
        early = jnp.max(jnp.where(node[:, :, None] == jnp.arange(nodes.num_experts), before, 0), axis=1)
        early, visited = lax.top_k(early, nodes.k)
        visited = jnp.where(early > 0, visited, nodes.num_experts).astype(jnp.int32)
        came = self.across.out(x, visited, weights)
        # Numbers of experts count from 1: 0 is what stands where no row came in.
        wide = jnp.promote_types(weights.dtype, jnp.float32)
        along = jnp.concatenate([(experts + 1).astype(wide), weights.astype(wide)], axis=1)
        along = self.across.carried(along, came, Coding())
        whom = lax.stop_gradient(along[:, : here.k]).astype(jnp.int32) - 1 - nodes.rank() * here.num_experts
        whom = jnp.where((whom >= 0) & (whom < here.num_experts), whom, here.num_experts)
        handed = self.inside.out(came.rows, whom, along[:, here.k :])
        travels = jnp.any((visited[:, None] == node[:, :, None]) & (came.order.places[:, None] >= 0), axis=2)
        chosen = count(experts, self.shape.num_experts)
        stayed = jnp.sum((experts < self.shape.num_experts) & ~travels, dtype=jnp.int32)
        stats = Dispatched(chosen, handed.stats.received, stayed + handed.stats.dropped)
        return handed._replace(stats=stats, before=came)

    def back(self, made: jax.Array, arrived: Arrived) -> jax.Array:
        assert arrived.before is not None
        return summed(self.across.returned(self.inside.back(made, arrived), arrived.before), arrived.before.order)


Path: TypeAlias = Capacity | Dropless | NodeFirst


def _begins(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each rank's rows for each expert begin: among that rank's, and among all in the order of the experts."""
    of_experts = counts.sum(0, dtype=jnp.int32)
    before = (jnp.cumsum(of_experts) - of_experts) + (jnp.cumsum(counts, axis=0) - counts)
    return jnp.cumsum(counts, axis=1) - counts, before


def _runs_by_expert(counts: jax.Array, pair_rows: int) -> Runs | None:
    """Rows [N P] came in rank by rank, each rank's by expert, and are to stand in the order of the experts.

    Returns:
      A run for each expert and rank; None for one rank's, which stand so.
    """
    if len(counts) == 1:
        return None
    within, before = _begins(counts)
    begins = jnp.arange(len(counts), dtype=jnp.int32)[:, None] * pair_rows + within
    return Runs(begins.T.reshape(-1), before.T.reshape(-1), counts.T.reshape(-1))


def _places_by_expert(counts: jax.Array, pair_rows: int) -> Places:
    """The same motion, row by row."""
    num_ranks = len(counts)
    within, before = _begins(counts)
    at = jnp.arange(pair_rows, dtype=jnp.int32)
    shift = jnp.take_along_axis(before - within, part_of(within, pair_rows), axis=1)
    size = num_ranks * pair_rows
    back = jnp.where(at < counts.sum(1, dtype=jnp.int32)[:, None], at + shift, -1).reshape(size)
    to = jnp.full_like(back, -1).at[jnp.where(back < 0, size, back)].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return Places(to, back)
