"""All-reduce algorithms with few steps: recursive doubling, halving-doubling and a binomial tree.

N is the number of ranks and P the largest power of two up to N. The recursive algorithms run on P ranks. The remaining
ranks first send their array to the first N-P ranks, and receive the result afterwards: two more messages.

The naive root and the parameter server are for comparison only: a single link carries the data of all ranks.
The reference of all algorithms is `reference.all_reduce`.

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
    """Exchange the full array with the ranks at distances 1, 2, 4, ...

    [A] {unreduced over X} -> [A];  log2 P steps (two more if N > P), n bytes each
    """

    def kernel(x: jax.Array, num_ranks: int) -> jax.Array:
        for apart in doublings(num_ranks):
            x = combine(_exchange(x, axis, apart, num_ranks), x)
        return x

    with jax.named_scope("recursive_doubling"):
        return _folded(x, axis, combine, num_ranks, kernel)


def halving_doubling(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    [A] {unreduced over X} -> [A];  2 log2 P steps, 2(P-1)/P n bytes sent (two more steps of n bytes each if N > P)
    """

    def kernel(x: jax.Array, num_ranks: int) -> jax.Array:
        chunk = halving_reduce_scatter(flat_parts(x, num_ranks), axis, combine)
        return unflat(doubling_all_gather(chunk, axis, num_ranks), x)

    with jax.named_scope("halving_doubling"):
        return _folded(x, axis, combine, num_ranks, kernel)


def halving_reduce_scatter(parts: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
    """`[P, c] -> [c]`: reduce-scatter by exchanging halves with the ranks at distances P/2, P/4, ..., 1.

    log2 P steps, (P-1)/P n bytes sent
    """
    num_ranks, rank = len(parts), lax.axis_index(axis)
    with jax.named_scope("recursive_halving"):
        for apart in reversed(doublings(num_ranks)):
            lower, upper = jnp.split(parts, 2)
            is_upper = (rank & apart) != 0
            outgoing, local = jnp.where(is_upper, lower, upper), jnp.where(is_upper, upper, lower)
            parts = combine(_exchange(outgoing, axis, apart, num_ranks), local)
    return parts[0]


def doubling_all_gather(chunk: jax.Array, axis: Axis, num_ranks: int) -> jax.Array:
    """`[c] -> [P, c]`: all-gather by exchanging all chunks with the ranks at distances 1, 2, ..., P/2.

    log2 P steps, (P-1)/P n bytes sent
    """
    rank, parts = lax.axis_index(axis), chunk[None]
    with jax.named_scope("recursive_doubling"):
        for apart in doublings(num_ranks):
            arrived = _exchange(parts, axis, apart, num_ranks)
            is_upper = (rank & apart) != 0
            parts = jnp.concatenate([jnp.where(is_upper, arrived, parts), jnp.where(is_upper, parts, arrived)])
    return parts


def binomial_tree(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int) -> jax.Array:
    """Reduce to rank 0 along a binomial tree, then broadcast along the same tree. The root has log2 N children.

    [A] {unreduced over X} -> [A];  2 ceil(log2 N) steps, n bytes each
    """
    return tree_down(tree_up(x, axis, combine, num_ranks, 0), axis, num_ranks, 0)


def parameter_server(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, *, num_servers: int = 1) -> jax.Array:
    """Reduce part s of the array on server s and send it back to all ranks. The servers are the first S ranks.

        [A] {unreduced over X} -> [A];  2(N-1) steps; the link of a server carries (N-1) n/S bytes in each direction

    With a single server this is the naive root. With N servers it sends as many bytes as the ring.
    """
    parts, rank = flat_parts(x, num_servers), lax.axis_index(axis)
    is_server, local = rank < num_servers, jnp.minimum(rank, num_servers - 1)
    with jax.named_scope("parameter_server"):
        total = take(parts, local)
        for by in range(1, num_ranks):
            pairs = [(r, (r + by) % num_ranks) for r in range(num_ranks) if (r + by) % num_ranks < num_servers]
            target = jnp.minimum((rank + by) % num_ranks, num_servers - 1)
            total = jnp.where(is_server, combine(send(take(parts, target), axis, pairs), total), total)
        parts = jnp.where(is_server, put(parts, total, local), parts)
        for by in range(1, num_ranks):
            arrived = send(total, axis, [(server, (server + by) % num_ranks) for server in range(num_servers)])
            server = (rank - by) % num_ranks
            index = jnp.minimum(server, num_servers - 1)
            parts = put(parts, jnp.where(server < num_servers, arrived, take(parts, index)), index)
    return unflat(parts, x)


ALGORITHMS: dict[str, Callable[..., jax.Array]] = {
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "tree": binomial_tree,
    "root": parameter_server,
    "parameter_server": parameter_server,
}
"""Algorithms by name: (x, axis, combine, num_ranks) -> reduced x."""


def _folded(x: jax.Array, axis: Axis, combine: Combine, num_ranks: int, kernel: Callable[..., jax.Array]) -> jax.Array:
    """Run a kernel that needs a power of two of ranks on any number of ranks."""
    power = 2 ** (num_ranks.bit_length() - 1)
    num_extra, rank = num_ranks - power, lax.axis_index(axis)
    if num_extra:
        arrived = send(x, axis, [(power + r, r) for r in range(num_extra)])
        x = jnp.where(rank < num_extra, combine(arrived, x), x)
    x = kernel(x, power)
    if num_extra:
        x = jnp.where(rank >= power, send(x, axis, [(r, power + r) for r in range(num_extra)]), x)
    return x


def _exchange(x: jax.Array, axis: Axis, apart: int, num_ranks: int) -> jax.Array:
    return send(x, axis, [(rank, rank ^ apart) for rank in range(num_ranks)])
