"""All-reduces in few steps: recursive doubling, halving-doubling, a binary tree; and two with a hot spot.

N ranks, P the largest power of two up to N. The recursive algorithms are for P ranks: the others hand their array to
one of the first N-P ranks before, and get the result from it after, which is two more messages.

The naive root and the parameter server are here for comparison only: one link carries what N-1 others send.

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.kernel_checks import Axis
from meshpar.collectives.point_to_point import tree_down, tree_up
from meshpar.collectives.wire import Combine, doublings, flat_parts, put, send, take, unflat


def recursive_doubling(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    """Ranks 1, 2, 4, ... apart swap all they have.

    log2 P steps (two more when N > P), n bytes each
    """
    with jax.named_scope("recursive_doubling"):
        return _folded(x, axis, combine, num_ranks, _doubling)


def _doubling(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    for apart in doublings(num_ranks):
        x = combine(_swapped(x, axis, apart, num_ranks), x)
    return x


def halving_doubling(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    """Ranks P/2, P/4, ... apart swap halves of what is left, till each holds a reduced chunk; then back.

    2 log2 P steps, 2(P-1)/P n bytes sent (two steps of n bytes each more when N > P)
    """

    def both(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
        return unflat(doubled(halved(flat_parts(x, num_ranks), axis, combine), axis, num_ranks), x)

    with jax.named_scope("halving_doubling"):
        return _folded(x, axis, combine, num_ranks, both)


def halved(parts: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
    """`[P, c] -> [c]`: this rank's chunk, reduced.

    log2 P steps, (P-1)/P n bytes sent
    """
    num_ranks, rank = len(parts), lax.axis_index(axis)
    with jax.named_scope("recursive_halving"):
        for apart in reversed(doublings(num_ranks)):
            lower, upper = jnp.split(parts, 2)
            is_upper = (rank & apart) != 0
            theirs, mine = jnp.where(is_upper, lower, upper), jnp.where(is_upper, upper, lower)
            parts = combine(_swapped(theirs, axis, apart, num_ranks), mine)
    return parts[0]


def doubled(mine: jax.Array, axis: Axis, num_ranks: int) -> jax.Array:
    """`[c] -> [P, c]`: the chunks of all ranks.

    log2 P steps, (P-1)/P n bytes sent
    """
    rank, parts = lax.axis_index(axis), mine[None]
    with jax.named_scope("recursive_doubling"):
        for apart in doublings(num_ranks):
            arrived = _swapped(parts, axis, apart, num_ranks)
            is_upper = (rank & apart) != 0
            parts = jnp.concatenate([jnp.where(is_upper, arrived, parts), jnp.where(is_upper, parts, arrived)])
    return parts


def binary_tree(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    """Up a binomial tree to rank 0, and down again.

    2 ceil(log2 N) steps, n bytes each
    """
    return tree_down(tree_up(x, axis, combine, num_ranks, 0), axis, num_ranks, 0)


def parameter_server(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, *, num_servers: int = 1) -> jax.Array:
    """Every rank sends a part to each server, which reduces it and sends it back. Servers are the first ranks.

        2(N-1) steps; a server's link carries (N-1) n/S bytes in, and as much out, with S servers

    For comparison only: with one server it is the naive root, with N the bytes of the ring.
    """
    parts, rank = flat_parts(x, num_servers), lax.axis_index(axis)
    is_server, own = rank < num_servers, jnp.minimum(rank, num_servers - 1)
    with jax.named_scope("parameter_server"):
        total = take(parts, own)
        for by in range(1, num_ranks):
            pairs = [(r, (r + by) % num_ranks) for r in range(num_ranks) if (r + by) % num_ranks < num_servers]
            to = jnp.minimum((rank + by) % num_ranks, num_servers - 1)
            total = jnp.where(is_server, combine(send(take(parts, to), axis, pairs), total), total)
        parts = jnp.where(is_server, put(parts, total, own), parts)
        for by in range(1, num_ranks):
            arrived = send(total, axis, [(server, (server + by) % num_ranks) for server in range(num_servers)])
            server = (rank - by) % num_ranks
            at = jnp.minimum(server, num_servers - 1)
            parts = put(parts, jnp.where(server < num_servers, arrived, take(parts, at)), at)
    return unflat(parts, x)


ALGORITHMS: dict[str, Callable[..., jax.Array]] = {
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "tree": binary_tree,
    "root": parameter_server,
    "parameter_server": parameter_server,
}
"""Every all-reduce of this file: (x, axis, combine, num_ranks) -> x reduced."""


def _folded(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, kernel: Callable[..., jax.Array]) -> jax.Array:
    """A kernel for a power of two of ranks, made to serve any number."""
    power = 2 ** (num_ranks.bit_length() - 1)
    rest, rank = range(num_ranks - power), lax.axis_index(axis)
    if rest:
        arrived = send(x, axis, [(power + r, r) for r in rest])
        x = jnp.where(rank < len(rest), combine(arrived, x), x)
    x = kernel(x, axis, combine, power)
    if rest:
        x = jnp.where(rank >= power, send(x, axis, [(r, power + r) for r in rest]), x)
    return x


def _swapped(x: jax.Array, axis: Axis, apart: int, num_ranks: int) -> jax.Array:
    return send(x, axis, [(rank, rank ^ apart) for rank in range(num_ranks)])
