"""Exchange of rows between token ranks and expert ranks.

Each direction is an all-to-all, and the transpose of the other direction. Rank r of N owns experts [r E/N, (r+1) E/N).
A rank sends at most A rows, and at most P rows to the same rank. Rows are sorted by expert before they are sent, and
by local expert and then by rank after they arrive.

    fixed         [N, P, d] -> [N, P, d] in a dense all-to-all; missing rows are sent as zeros, and rows are sorted
                  when they arrive
    ragged        `jax.lax.ragged_all_to_all` sends existing rows only, to their place in the sorted buffer; XLA
                  supports it on GPUs
    hierarchical  as fixed, inside a node and across nodes (`collectives.hierarchical_all_to_all`)

The results are bitwise equal. Quantized rows are encoded separately and sent as bytes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.hierarchical import hierarchical_all_to_all
from meshpar.collectives.quantized import BLOCK, decoded, encoded
from meshpar.collectives.wire import varying_alike
from meshpar.moe.assignment_order import Permutation, late_zeros, move, segment_of


class RowLink(NamedTuple):
    """Static description of an exchange."""

    axis: tuple[str, ...]
    """Mesh axes, the first varying slowest; (outer, inner) if hierarchical."""
    num_ranks: int
    """Number of ranks N."""
    implementation: str
    """`fixed`, `ragged`, `hierarchical`, or `auto`: ragged if the program is compiled for GPUs, otherwise fixed."""
    pair_rows: int
    """P, the limit of rows to the same rank. It is A if N is 1."""
    send_rows: int
    """A, the limit of rows to all ranks."""


class RowCounts(NamedTuple):
    """Numbers of rows per rank and local expert, as int32 [N, E/N] arrays, and the position of the first of them."""

    sent: jax.Array
    """Rows to an expert of rank r. Their sum over the experts of a rank is at most P."""
    begins: jax.Array
    """Position in the local send buffer."""
    remote_places: jax.Array
    """Position in the receive buffer of rank r."""
    received: jax.Array
    """Rows from rank s for a local expert."""
    places: jax.Array
    """Position in the local receive buffer."""
    remote_begins: jax.Array
    """Position in the send buffer of rank s."""

    @staticmethod
    def of(sent: jax.Array, rank: jax.Array | int) -> RowCounts:
        """Return the counts of a rank, given those of all ranks: int32 [N from, N to, E/N]."""
        num_ranks = len(sent)
        to_experts = sent.reshape(num_ranks, -1)
        begins = (jnp.cumsum(to_experts, axis=1) - to_experts).reshape(sent.shape)
        by_expert = jnp.moveaxis(sent, 0, -1).reshape(num_ranks, -1)  # [to, expert, from]
        places = (jnp.cumsum(by_expert, axis=1) - by_expert).reshape(num_ranks, -1, num_ranks)
        places = jnp.moveaxis(places, -1, 0)
        return RowCounts(sent[rank], begins[rank], places[rank], sent[:, rank], places[:, rank], begins[:, rank])


class Coding(NamedTuple):
    """Number formats of the rows sent. None keeps their dtype."""

    forward: str | None = None
    backward: str | None = None
    block: int = BLOCK


def all_to_all(link: RowLink, buffers: jax.Array) -> jax.Array:
    """[N, P, d] -> [N, P, d]: send buffer r to rank r and receive buffer s from rank s. It is its own transpose."""
    if link.num_ranks == 1 or buffers.size == 0:
        return buffers
    if link.implementation == "hierarchical":
        outer, inner = link.axis
        return hierarchical_all_to_all(buffers, inner=inner, outer=outer, tiled=False)
    return lax.all_to_all(buffers, link.axis, 0, 0)


# ---- Derivatives and number formats ----------------------------------------------------------------------------------

SEND_BACK, FULL, SEND = -1, 0, 1
"""Directions of `exchange`. The transpose of a direction is its negative.

    SEND       [A, d] -> [N P, d]      rows, sorted by expert, to their ranks; missing rows are zeros
    SEND_BACK  [N P, d] -> [A, d]      the inverse of `SEND`
    FULL       [N, P, d] -> [N, P, d]  full buffers, like `all_to_all`, without counts
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(link: RowLink, coding: Coding, direction: int, rows: jax.Array, counts: RowCounts | None) -> jax.Array:
    """Send rows in a direction: `SEND`, `SEND_BACK` or `FULL`."""
    if coding.forward is None or link.num_ranks == 1:
        return _send(link, direction, rows, counts)
    message = _send(link, direction, encoded(rows, coding.forward, coding.block, None), counts)
    return decoded(message, rows.shape[-1], coding.forward, coding.block, rows.dtype)


def _backward(link: RowLink, coding: Coding, direction: int, counts: RowCounts | None, grad: jax.Array) -> tuple:
    # Rounding has the gradient of the identity.
    return exchange(link, coding._replace(forward=coding.backward), -direction, grad, counts), None


exchange.defvjp(lambda *args: (exchange(*args), args[-1]), _backward)


# ---- Implementations -------------------------------------------------------------------------------------------------


def _send(link: RowLink, direction: int, rows: jax.Array, counts: RowCounts | None) -> jax.Array:
    if counts is None:
        return all_to_all(link, rows)
    if link.num_ranks == 1:
        return rows
    rows, *arrays = varying_alike(link.axis, rows, *counts)
    ragged, fixed = (functools.partial(f, link, direction == SEND_BACK) for f in (_send_ragged, _send_fixed))
    counts = RowCounts(*arrays)
    if link.implementation == "auto":  # chosen at lowering: a program traced on a laptop may be compiled for GPUs
        return lax.platform_dependent(rows, counts, cuda=ragged, rocm=ragged, default=fixed)
    return ragged(rows, counts) if link.implementation == "ragged" else fixed(rows, counts)


def _send_fixed(link: RowLink, is_back: bool, rows: jax.Array, counts: RowCounts) -> jax.Array:
    index = jnp.arange(link.pair_rows, dtype=jnp.int32)
    sent = counts.sent.sum(1, keepdims=True, dtype=jnp.int32)
    sources = jnp.where(index < sent, counts.begins[:, :1] + index, -1)
    to_buffers = Permutation.of(sources.reshape(-1), link.send_rows)
    sort = to_expert_order(counts.received, link.pair_rows)
    buffers = move(rows, sort.inverse if is_back else to_buffers)
    buffers = all_to_all(link, buffers.reshape(link.num_ranks, -1, rows.shape[1])).reshape(buffers.shape)
    return move(buffers, to_buffers.inverse if is_back else sort)


def _send_ragged(link: RowLink, is_back: bool, rows: jax.Array, counts: RowCounts) -> jax.Array:
    if is_back:
        outgoing, num_rows = (counts.places, counts.received, counts.remote_begins, counts.sent), link.send_rows
    else:
        outgoing = counts.begins, counts.sent, counts.remote_places, counts.received
        num_rows = link.num_ranks * link.pair_rows
    zeros = late_zeros((num_rows, *rows.shape[1:]), rows, counts.sent)
    return lax.ragged_all_to_all(rows, zeros, *(x.reshape(-1) for x in outgoing), axis_name=link.axis)


def to_expert_order(counts: jax.Array, pair_rows: int) -> Permutation:
    """Return the movement of rows [N P], sorted by (rank, expert), to the order of experts.

    `counts` are the received rows, int32 [N, E/N].
    """
    per_expert = counts.sum(0, dtype=jnp.int32)
    expert_begins = (jnp.cumsum(per_expert) - per_expert) + (jnp.cumsum(counts, axis=0) - counts)
    rank_begins = jnp.cumsum(counts, axis=1) - counts
    index = jnp.arange(pair_rows, dtype=jnp.int32)
    shift = jnp.take_along_axis(expert_begins - rank_begins, segment_of(rank_begins, pair_rows), axis=1)
    targets = jnp.where(index < counts.sum(1, dtype=jnp.int32)[:, None], index + shift, -1).reshape(-1)
    return Permutation.of(targets, len(targets)).inverse
