"""Exchange of rows between token ranks and expert ranks.

Each direction is an all-to-all, and the transpose of the other direction. Rank r of N owns experts [r E/N, (r+1) E/N).
A rank sends at most A rows, and at most P rows to the same rank.

    fixed         [N, P, d] -> [N, P, d] in a dense all-to-all; missing rows are sent as zeros
    ragged        `jax.lax.ragged_all_to_all` sends existing rows only; XLA supports it on GPUs
    hierarchical  [N, P, d] -> [N, P, d] inside a node and across nodes (`collectives.hierarchical_all_to_all`)

The results are bitwise equal: row p from rank s is at [s, p]. Quantized rows are encoded separately and sent as bytes.
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
from meshpar.moe.assignment_order import Permutation, move


class RowLink(NamedTuple):
    """Static description of an exchange."""

    axis: tuple[str, ...]
    """Mesh axes, the first varying slowest; (outer, inner) if hierarchical."""
    num_ranks: int
    """N."""
    implementation: str
    """`fixed`, `ragged`, `hierarchical`, or `auto`: ragged if the program is compiled for GPUs, otherwise fixed."""
    pair_rows: int
    """P. It is A if N is 1."""
    send_rows: int
    """A."""


class RowCounts(NamedTuple):
    """Numbers of rows per rank, as int32 [N] arrays."""

    sent: jax.Array
    """Rows to rank r, at most P."""
    begins: jax.Array
    """Index of the first row to rank r in the local send buffer."""
    received: jax.Array
    """Rows from rank s."""
    remote_begins: jax.Array
    """Index of the first row to this rank in the send buffer of rank s."""


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


def exchange(link: RowLink, coding: Coding, buffers: jax.Array) -> jax.Array:
    """Exchange full buffers, like `all_to_all`."""
    return _coded(link, coding, "exchange", buffers, None)


def send(link: RowLink, coding: Coding, rows: jax.Array, counts: RowCounts) -> jax.Array:
    """[A, d] -> [N P, d]: send rows, sorted by rank, to their ranks. Missing rows are zeros."""
    return _coded(link, coding, "send", rows, counts)


def send_back(link: RowLink, coding: Coding, rows: jax.Array, counts: RowCounts) -> jax.Array:
    """[N P, d] -> [A, d]: the inverse and the transpose of `send`."""
    return _coded(link, coding, "send_back", rows, counts)


# ---- Derivatives and number formats ----------------------------------------------------------------------------------

_TRANSPOSE = {"exchange": "exchange", "send": "send_back", "send_back": "send"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _coded(link: RowLink, coding: Coding, direction: str, rows: jax.Array, counts: RowCounts | None) -> jax.Array:
    return _encode_and_send(link, coding.forward, coding.block, direction, rows, counts)


def _coded_backward(link: RowLink, coding: Coding, direction: str, counts: RowCounts | None, grad: jax.Array) -> tuple:
    # Rounding has the gradient of the identity.
    return _encode_and_send(link, coding.backward, coding.block, _TRANSPOSE[direction], grad, counts), None


_coded.defvjp(lambda *args: (_coded(*args), args[-1]), _coded_backward)


def _encode_and_send(
    link: RowLink, dtype: str | None, block: int, direction: str, rows: jax.Array, counts: RowCounts | None
) -> jax.Array:
    if dtype is None or link.num_ranks == 1:
        return _send(link, direction, rows, counts)
    message = _send(link, direction, encoded(rows, dtype, block, None), counts)
    return decoded(message, rows.shape[-1], dtype, block, rows.dtype)


# ---- Implementations -------------------------------------------------------------------------------------------------


def _send(link: RowLink, direction: str, rows: jax.Array, counts: RowCounts | None) -> jax.Array:
    if counts is None:
        return all_to_all(link, rows)
    if link.num_ranks == 1:
        return rows
    rows, *arrays = varying_alike(link.axis, rows, *counts)
    ragged, fixed = (_send_ragged, _send_fixed) if direction == "send" else (_send_back_ragged, _send_back_fixed)
    ragged, fixed, counts = functools.partial(ragged, link), functools.partial(fixed, link), RowCounts(*arrays)
    if link.implementation == "auto":  # chosen at lowering: a program traced on a laptop may be compiled for GPUs
        return lax.platform_dependent(rows, counts, cuda=ragged, rocm=ragged, default=fixed)
    return ragged(rows, counts) if link.implementation == "ragged" else fixed(rows, counts)


def _send_fixed(link: RowLink, rows: jax.Array, counts: RowCounts) -> jax.Array:
    buffers = move(rows, _to_buffers(link, counts))
    return all_to_all(link, buffers.reshape(link.num_ranks, link.pair_rows, rows.shape[1])).reshape(buffers.shape)


def _send_back_fixed(link: RowLink, rows: jax.Array, counts: RowCounts) -> jax.Array:
    buffers = all_to_all(link, rows.reshape(link.num_ranks, link.pair_rows, rows.shape[1]))
    return move(buffers.reshape(rows.shape), _to_buffers(link, counts).inverse)


def _to_buffers(link: RowLink, counts: RowCounts) -> Permutation:
    """Return the movement of sorted rows into a buffer per rank."""
    index = jnp.arange(link.pair_rows, dtype=jnp.int32)
    sources = jnp.where(index < counts.sent[:, None], counts.begins[:, None] + index, -1)
    return Permutation.of(sources.reshape(-1), link.send_rows)


def _send_ragged(link: RowLink, rows: jax.Array, counts: RowCounts) -> jax.Array:
    begins = _batched_like(counts.sent, lax.axis_index(link.axis) * link.pair_rows)
    zeros = _zeros(link, link.num_ranks * link.pair_rows, rows)
    return lax.ragged_all_to_all(rows, zeros, counts.begins, counts.sent, begins, counts.received, axis_name=link.axis)


def _send_back_ragged(link: RowLink, rows: jax.Array, counts: RowCounts) -> jax.Array:
    begins = _batched_like(counts.sent, jnp.arange(link.num_ranks, dtype=jnp.int32) * link.pair_rows)
    zeros = _zeros(link, link.send_rows, rows)
    return lax.ragged_all_to_all(
        rows, zeros, begins, counts.received, counts.remote_begins, counts.sent, axis_name=link.axis
    )


def _batched_like(counts: jax.Array, offsets: jax.Array) -> jax.Array:
    """Broadcast offsets to the varying and `vmap` axes of the counts, because JAX batches all operands or none."""
    return offsets + 0 * counts


def _zeros(link: RowLink, num_rows: int, like: jax.Array) -> jax.Array:
    return varying_alike(link.axis, jnp.zeros((num_rows, *like.shape[1:]), like.dtype), like)[0]
