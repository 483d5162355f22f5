"""Rows to the ranks of their experts, and back: each way one all-to-all, the transpose of the other.

N ranks, rank r owns experts [r E/N, (r+1) E/N). A rank has at most A rows to send, at most P of them to any one rank.

    fixed         [N, P, d] to and fro in one dense all-to-all: rows there are not travel as zeros
    ragged        `jax.lax.ragged_all_to_all`: only rows there are travel; XLA has it for GPUs
    hierarchical  [N, P, d] in two levels, inside the nodes and across (`collectives.hierarchical_all_to_all`)

All three leave the same bits at the same places: row p of rank s at [s, p]. Quantized, a row is encoded by itself, so
that it travels as bytes in any of the three.
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
from meshpar.moe.assignment_order import Runs, moved


class RowLink(NamedTuple):
    """Between whom, and how: known when the program is traced."""

    axis: tuple[str, ...]
    """Several axes count as one, the first varying slowest; (outer, inner) for the hierarchical form."""
    num_ranks: int
    how: str
    """`fixed`, `ragged`, `hierarchical`; `auto`: ragged where the program is compiled for GPUs, else fixed."""
    pair_rows: int
    """P; on one rank alone it is A."""
    send_rows: int
    """A."""


class RowCounts(NamedTuple):
    """How many rows go where: known when the program runs. int32 [N] each."""

    sent: jax.Array
    """Rows for rank r, at most P."""
    begins: jax.Array
    """Where they begin in what this rank has to send."""
    received: jax.Array
    """Rows from rank s."""
    begins_there: jax.Array
    """Where they begin in what rank s has to send."""


class Coding(NamedTuple):
    """Number formats on the wire; None: as the rows are."""

    forward: str | None = None
    backward: str | None = None
    block: int = BLOCK


def all_to_all(link: RowLink, parts: jax.Array) -> jax.Array:
    """[N, P, d] -> [N, P, d]: part r is for rank r before, from rank r after. Its own transpose."""
    if link.num_ranks == 1 or parts.size == 0:
        return parts
    if link.how == "hierarchical":
        outer, inner = link.axis
        return hierarchical_all_to_all(parts, inner=inner, outer=outer, tiled=False)
    return lax.all_to_all(parts, link.axis, 0, 0)


def swapped(link: RowLink, coding: Coding, parts: jax.Array) -> jax.Array:
    """`all_to_all`, coded."""
    return _coded(link, coding, "both", parts, None)


def sent_out(link: RowLink, coding: Coding, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    """[A, d] -> [N P, d]: rows sorted by rank, to their ranks; zeros where there is no row."""
    return _coded(link, coding, "out", rows, traffic)


def sent_back(link: RowLink, coding: Coding, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    """[N P, d] -> [A, d]: `sent_out` undone, and its transpose."""
    return _coded(link, coding, "back", rows, traffic)


# ---- Derivatives and coding ------------------------------------------------------------------------------------------

_OPPOSITE = {"both": "both", "out": "back", "back": "out"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _coded(link: RowLink, coding: Coding, way: str, rows: jax.Array, traffic: RowCounts | None) -> jax.Array:
    return _sent(link, coding.forward, coding.block, way, rows, traffic)


def _coded_backward(link: RowLink, coding: Coding, way: str, traffic: RowCounts | None, grad: jax.Array) -> tuple:
    # Rounding counts as the identity: the transpose is that of what travels in full.
    return _sent(link, coding.backward, coding.block, _OPPOSITE[way], grad, traffic), None


_coded.defvjp(lambda *args: (_coded(*args), args[-1]), _coded_backward)


def _sent(
    link: RowLink, dtype: str | None, block: int, way: str, rows: jax.Array, traffic: RowCounts | None
) -> jax.Array:
    if dtype is None or link.num_ranks == 1:
        return _on_wire(link, way, rows, traffic)
    message = _on_wire(link, way, encoded(rows, dtype, block, None), traffic)
    return decoded(message, rows.shape[-1], dtype, block, rows.dtype)


# ---- Rows on the wire ------------------------------------------------------------------------------------------------


def _on_wire(link: RowLink, way: str, rows: jax.Array, traffic: RowCounts | None) -> jax.Array:
    """Which form, decided as the program is lowered: one traced on a laptop is compiled for GPUs as it stands."""
    if traffic is None:
        return all_to_all(link, rows)
    if link.num_ranks == 1:
        return rows
    rows, *each = varying_alike(link.axis, rows, *traffic)
    ragged, fixed = (_out_ragged, _out_fixed) if way == "out" else (_back_ragged, _back_fixed)
    ragged, fixed, traffic = functools.partial(ragged, link), functools.partial(fixed, link), RowCounts(*each)
    if link.how == "auto":
        return lax.platform_dependent(rows, traffic, cuda=ragged, rocm=ragged, default=fixed)
    return ragged(rows, traffic) if link.how == "ragged" else fixed(rows, traffic)


def _out_fixed(link: RowLink, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    parts = moved(rows, _runs(link, traffic), link.num_ranks * link.pair_rows)
    return all_to_all(link, parts.reshape(link.num_ranks, link.pair_rows, rows.shape[1])).reshape(parts.shape)


def _back_fixed(link: RowLink, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    parts = all_to_all(link, rows.reshape(link.num_ranks, link.pair_rows, rows.shape[1]))
    return moved(parts.reshape(rows.shape), _runs(link, traffic).undone, link.send_rows)


def _runs(link: RowLink, traffic: RowCounts) -> Runs:
    """From what this rank has to send to the parts for each rank."""
    return Runs(traffic.begins, jnp.arange(link.num_ranks, dtype=jnp.int32) * link.pair_rows, traffic.sent)


def _out_ragged(link: RowLink, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    here = _like(traffic.sent, lax.axis_index(link.axis) * link.pair_rows)
    room = _room(link, link.num_ranks * link.pair_rows, rows)
    return lax.ragged_all_to_all(rows, room, traffic.begins, traffic.sent, here, traffic.received, axis_name=link.axis)


def _back_ragged(link: RowLink, rows: jax.Array, traffic: RowCounts) -> jax.Array:
    begins = _like(traffic.sent, jnp.arange(link.num_ranks, dtype=jnp.int32) * link.pair_rows)
    room = _room(link, link.send_rows, rows)
    return lax.ragged_all_to_all(
        rows, room, begins, traffic.received, traffic.begins_there, traffic.sent, axis_name=link.axis
    )


def _like(counts: jax.Array, numbers: jax.Array) -> jax.Array:
    """Numbers that vary as the counts do, mapped axes of `jax.vmap` included: jax maps all of a message or nothing."""
    return numbers + 0 * counts


def _room(link: RowLink, num_rows: int, like: jax.Array) -> jax.Array:
    """Zeros to be written into."""
    return varying_alike(link.axis, jnp.zeros((num_rows, *like.shape[1:]), like.dtype), like)[0]
