"""The algorithms of `dispatch`: send tokens to the ranks of their experts and combine the results.

    Capacity    a buffer of fixed size for each pair of rank and expert
    Dropless    rows sorted by expert, a variable number per rank
    NodeFirst   each token once per node, then to its experts with `Dropless`

`send(x, experts, weights)` returns `ReceivedTokens`, with rows sorted by local expert; `combine(outputs, arrived)`
returns y [T, d']. The plain reference is `meshpar.moe.reference.moe`.

    T  tokens of a chunk       k  assignments per token    E  experts      N  ranks
    P  rows per pair of ranks  A  rows sent by a rank      C  capacity     M  nodes
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.quantized import BLOCK, FORMATS
from meshpar.hardware import cost_model as cost
from meshpar.moe.assignment_order import (
    Order,
    by_expert,
    combine,
    expand,
    in_buffers,
    weighted_sum,
)
from meshpar.moe.routing import assign_slots, count
from meshpar.moe.token_exchange import FULL, SEND, SEND_BACK, Coding, RowCounts, RowLink, exchange
from meshpar.sharding.errors import check_cases, check_choice, check_positive_int


class Dispatched(NamedTuple):
    """Local counts of a dispatch, int32 without gradient."""

    chosen: jax.Array
    """[E]: assignments of the local tokens to each expert, including dropped ones."""
    received: jax.Array
    """[E/N]: rows from all ranks that each local expert computed."""
    dropped: jax.Array
    """[]: dropped assignments of the local tokens. With node-first, also those of tokens that this rank forwards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Payload:
    """Number formats of rows sent by `dispatch`: "int8", "fp8", or None for the dtype of the rows.

    Each row is quantized to nearest (`collectives.quantize`, with a scale per `block` numbers). Rounding has the
    gradient of the identity. DeepSeek-V3 (2024, section 3.3.2) dispatches in fp8 and combines in bf16.
    """

    dispatch: str | None = None
    """Format of tokens sent to their experts."""
    combine: str | None = None
    """Format of expert outputs sent back."""
    grad: str | None = None
    """Format of cotangents, in both directions."""
    block: int = BLOCK
    """Numbers per scale."""

    def __post_init__(self) -> None:
        for name in ("dispatch", "combine", "grad"):
            if getattr(self, name) is not None:
                check_choice("Payload", "a number format", tuple(FORMATS), **{name: getattr(self, name)})
        check_positive_int("Payload", "the number of values per scale", block=self.block)

    def coding(self, direction: str) -> Coding:
        return Coding(getattr(self, direction), self.grad, self.block)

    def row_bytes(self, way: str, width: int) -> int | None:
        """Return the bytes of a row of `width` numbers sent by `way`, the name of a field. None if not quantized."""
        return None if getattr(self, way) is None else cost.quantized_bytes(width, block=self.block)


def check_payload(where: str, payload: object) -> None:
    """Check that an argument is a `Payload` or None."""
    is_wrong, reason = not isinstance(payload, Payload | None), "it must be a Payload or None"
    fix = 'pass moe.Payload(dispatch="int8"), for example'
    check_cases(where, f"use payload={payload!r}", "wrong-type", (is_wrong, reason, fix))


class Shape(NamedTuple):
    """Static sizes of a dispatch, for a single chunk."""

    tokens: int
    k: int
    num_experts: int
    num_ranks: int
    axis: tuple[str, ...]
    implementation: str

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def link(self, pair_rows: int, send_rows: int) -> RowLink:
        return RowLink(self.axis, self.num_ranks, self.implementation, pair_rows, send_rows)

    def exchange_counts(self, counts: jax.Array) -> jax.Array:
        """int32 [N to, c] -> [N from, c]: send row r of the counts to rank r.

        XLA would combine all-gathers of different batch slices and chunks. Each would then wait for the counts of the
        others before sending rows. Therefore the counts are sent in an all-to-all.
        """
        with jax.named_scope("counts"):
            return counts if self.num_ranks == 1 else lax.all_to_all(counts, self.axis, 0, 0)


class ReceivedTokens(NamedTuple):
    """Rows that arrived for the local experts, with the data needed to send results back."""

    tokens: jax.Array
    sizes: jax.Array | np.ndarray
    """Rows per local expert."""
    order: Order
    """Order of the local tokens' assignments."""
    weights: jax.Array
    """[T, k]: gate weights of the local tokens."""
    counts: RowCounts | None
    stats: Dispatched
    across: ReceivedTokens | None = None
    """Node-first only: the rows that arrived from other nodes, before they were forwarded inside the node."""


class Capacity(NamedTuple):
    """A buffer of `capacity` rows for each pair of rank and expert. Buffers are sent in full.

    [T, d] -> [N, E/N, C, d] -> all-to-all -> [E/N, N, C, d]
    """

    shape: Shape
    payload: Payload
    capacity: int

    def send(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> ReceivedTokens:
        shape, capacity = self.shape, self.capacity
        order = in_buffers(experts, shape.num_experts, capacity)
        buffers = expand(x, order).reshape(shape.num_ranks, self._link.pair_rows, x.shape[1])
        buffers = exchange(self._link, self.payload.coding("dispatch"), FULL, buffers, None)
        tokens = self._transposed(buffers.reshape(shape.num_ranks, shape.local_experts, capacity, x.shape[1]))
        sizes = np.full(shape.local_experts, shape.num_ranks * capacity, np.int32)
        chosen = count(experts, shape.num_experts)
        fitting = jnp.minimum(chosen, capacity)
        received = shape.exchange_counts(fitting.reshape(shape.num_ranks, -1)).sum(0, dtype=jnp.int32)
        stats = Dispatched(chosen, received, jnp.sum(chosen - fitting, dtype=jnp.int32))
        return ReceivedTokens(tokens, sizes, order, weights, None, stats)

    def combine(self, outputs: jax.Array, arrived: ReceivedTokens) -> jax.Array:
        shape, width = self.shape, outputs.shape[1]
        tokens = self._transposed(outputs.reshape(shape.local_experts, shape.num_ranks, self.capacity, width))
        buffers = tokens.reshape(shape.num_ranks, self._link.pair_rows, width)
        buffers = exchange(self._link, self.payload.coding("combine"), FULL, buffers, None)
        return weighted_sum(buffers.reshape(-1, width), arrived.weights, arrived.order)

    @property
    def _link(self) -> RowLink:
        return self.shape.link(self.shape.local_experts * self.capacity, self.shape.tokens * self.shape.k)

    def _transposed(self, buffers: jax.Array) -> jax.Array:
        """[a, b, C, d] -> [b a C, d]."""
        return jnp.swapaxes(buffers, 0, 1).reshape(-1, buffers.shape[3])


class Dropless(NamedTuple):
    """Rows sorted by expert, a variable number per rank.

    [T, d] -> [A, d] sorted by expert -> all-to-all -> [N P, d] sorted by local expert
    """

    shape: Shape
    payload: Payload
    pair_rows: int
    """P, the limit of rows to the same rank."""
    send_rows: int
    """A, the limit of rows to all ranks."""

    @classmethod
    def of(cls, shape: Shape, payload: Payload, bound_factor: float | None) -> Dropless:
        """Return the path with row limits for any routing, or for `bound_factor` times a balanced load."""
        num_rows = cost.dropless_rows(shape.tokens, shape.k, shape.num_experts, shape.num_ranks, bound_factor)
        return cls(shape, payload, num_rows // shape.num_ranks, shape.tokens * shape.k)

    def send(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> ReceivedTokens:
        shape = self.shape
        order, chosen, sent = self._sort(experts)
        # A place in a receive buffer depends on the rows that all ranks send, so all ranks get all counts.
        by_all = shape.exchange_counts(jnp.broadcast_to(sent, (shape.num_ranks, *sent.shape)))
        rank = lax.axis_index(shape.axis) if shape.num_ranks > 1 else 0
        counts = RowCounts.of(by_all.reshape(shape.num_ranks, shape.num_ranks, -1), rank)
        received = counts.received.sum(0, dtype=jnp.int32)
        stats = Dispatched(chosen, received, jnp.sum(chosen - sent, dtype=jnp.int32))
        arrived = ReceivedTokens(x, received, order, weights, counts, stats)
        return arrived._replace(tokens=self.send_rows_of(x, arrived, self.payload.coding("dispatch")))

    def send_rows_of(self, x: jax.Array, arrived: ReceivedTokens, coding: Coding) -> jax.Array:
        """[T, d] -> [N P, d]: send rows of `x` to the ranks of their experts."""
        return exchange(self._link, coding, SEND, expand(x, arrived.order), arrived.counts)

    def combine(self, outputs: jax.Array, arrived: ReceivedTokens) -> jax.Array:
        return weighted_sum(self.send_back(outputs, arrived), arrived.weights, arrived.order)

    def send_back(self, outputs: jax.Array, arrived: ReceivedTokens) -> jax.Array:
        """[N P, d'] -> [A, d']: return rows to the order of the local tokens' assignments."""
        return exchange(self._link, self.payload.coding("combine"), SEND_BACK, outputs, arrived.counts)

    @property
    def _link(self) -> RowLink:
        return self.shape.link(self.pair_rows, self.send_rows)

    def _sort(self, experts: jax.Array) -> tuple[Order, jax.Array, jax.Array]:
        """Return (order of the rows sent, assignments of each expert, rows sent to each expert).

        Above the limit per rank, the last assignments are dropped. Above the limit of all rows, the rows of the last
        experts are dropped.
        """
        shape = self.shape
        chosen = sent = count(experts, shape.num_experts)
        if self.pair_rows < min(self.send_rows, shape.tokens * shape.k):
            _, fits = assign_slots(experts // shape.local_experts, self.pair_rows, shape.num_ranks)
            experts = jnp.where(fits, experts, shape.num_experts)
            sent = count(experts, shape.num_experts)
        order = by_expert(experts, shape.num_experts)
        if self.send_rows < shape.tokens * shape.k:
            sent = jnp.clip(self.send_rows - (jnp.cumsum(sent) - sent), 0, sent)
            positions = jnp.where(order.positions < self.send_rows, order.positions, -1)
            order = Order(positions, order.assignments[: self.send_rows])
        return order, chosen, sent


class NodeFirst(NamedTuple):
    """Two exchanges: across M nodes, then inside a node of K ranks.

    A token is sent once to each node with experts for it, to the rank with the same inner index, together with its
    experts and weights. That rank forwards it to the experts in the node and returns a weighted sum.
    """

    shape: Shape
    across: Dropless
    """Exchange across nodes, in which each node acts as an expert."""
    inside: Dropless

    @classmethod
    def of(
        cls, shape: Shape, payload: Payload, bound_factor: float | None, num_nodes: int, nodes_per_token: int
    ) -> NodeFirst:
        outer, inner = shape.axis
        tokens, k, num_ranks = shape.tokens, shape.k, shape.num_ranks // num_nodes
        across_shape = Shape(tokens, nodes_per_token, num_nodes, num_nodes, (outer,), "auto")
        across = Dropless.of(across_shape, payload, bound_factor)
        inside_shape = Shape(
            num_nodes * across.pair_rows, k, shape.num_experts // num_nodes, num_ranks, (inner,), "auto"
        )
        # The ranks with this inner index send at most all of their assignments to this rank.
        any_routing = min(inside_shape.tokens * min(k, inside_shape.num_experts), num_nodes * tokens * k)
        balanced = math.inf if bound_factor is None else max(1, math.ceil(round(bound_factor * tokens * k, 9)))
        send_rows = int(min(any_routing, balanced))
        pair_rows = min(send_rows, inside_shape.tokens * min(k, inside_shape.local_experts))
        if bound_factor is not None and num_ranks > 1:
            pair_rows = max(1, min(pair_rows, math.ceil(round(bound_factor * tokens * k / num_ranks, 9))))
        return cls(shape, across, Dropless(inside_shape, payload, pair_rows, send_rows))

    def send(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> ReceivedTokens:
        across, inside = self.across.shape, self.inside.shape
        node = experts // inside.num_experts  # M if unassigned
        # If a token has too many nodes, the nodes of the first assignments are kept.
        priority = jnp.arange(inside.k, 0, -1, dtype=jnp.int32)[:, None]
        priority = jnp.max(jnp.where(node[:, :, None] == jnp.arange(across.num_experts), priority, 0), axis=1)
        priority, nodes = lax.top_k(priority, across.k)
        nodes = jnp.where(priority > 0, nodes, across.num_experts).astype(jnp.int32)
        arrived = self.across.send(x, nodes, weights)
        # Experts are sent with weights, as floats that count from 1: missing rows are 0.
        dtype = jnp.promote_types(weights.dtype, jnp.float32)
        metadata = jnp.concatenate([(experts + 1).astype(dtype), weights.astype(dtype)], axis=1)
        metadata = self.across.send_rows_of(metadata, arrived, Coding())
        local = lax.stop_gradient(metadata[:, : inside.k]).astype(jnp.int32) - 1
        local = local - lax.axis_index(across.axis) * inside.num_experts
        local = jnp.where((local >= 0) & (local < inside.num_experts), local, inside.num_experts)
        forwarded = self.inside.send(arrived.tokens, local, metadata[:, inside.k :])
        has_node = (nodes[:, None] == node[:, :, None]) & (arrived.order.positions[:, None] >= 0)
        is_sent = jnp.any(has_node, axis=2)
        chosen = count(experts, self.shape.num_experts)
        not_sent = jnp.sum((experts < self.shape.num_experts) & ~is_sent, dtype=jnp.int32)
        stats = Dispatched(chosen, forwarded.stats.received, not_sent + forwarded.stats.dropped)
        return forwarded._replace(stats=stats, across=arrived)

    def combine(self, outputs: jax.Array, arrived: ReceivedTokens) -> jax.Array:
        assert arrived.across is not None
        sums = self.inside.combine(outputs, arrived)
        return combine(self.across.send_back(sums, arrived.across), arrived.across.order)


Path: TypeAlias = Capacity | Dropless | NodeFirst
