"""all_reduce: the reduction over all ranks, at all ranks, by the algorithm of one's choice."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Num

from meshpar.collectives import tree
from meshpar.collectives.auto import AUTO, XLA, picked
from meshpar.collectives.hierarchical import hierarchical_all_reduce
from meshpar.collectives.kernel_checks import Axis, check_choice, check_only, check_op, checked_count, ranks_of
from meshpar.collectives.ring import RINGS, ring_all_reduce, ring_strides, ring_sum
from meshpar.collectives.wire import Combine, reduced, varying, xla_reduced
from meshpar.hardware.clusters import Profile

ALGORITHMS = (*RINGS, *tree.ALGORITHMS, XLA)
"""What `all_reduce` knows."""


def all_reduce(
    x: Num[Array, "*dims"],
    *,
    axis: Axis,
    algorithm: str = "ring",
    op: str = "sum",
    channels: int = 1,
    num_servers: int = 1,
    cluster: str | Profile | None = None,
) -> Num[Array, "*dims"]:
    """Every rank gets the reduction over all ranks.

        [A] {partial over X} -> [A];  per device [A] -> [A], any shape

        algorithm           steps         bytes sent per rank (n the array, N ranks)
        ring                2(N-1)        2(N-1)/N n    bandwidth-optimal; a reduce-scatter, then an all-gather
        bidirectional       2(N-1)        2(N-1)/N n    two messages a step: half of it each way round
        recursive_doubling  log2 N        n log2 N      latency-optimal
        halving_doubling    2 log2 N      2(N-1)/N n
        tree                2 log2 N      n log2 N each way along the longest path
        root                2(N-1)        (N-1) n in and out of rank 0; for comparison only
        parameter_server    2(N-1)        (N-1) n/S in and out of each of S servers; for comparison only
        xla                               XLA's own collective
        auto                              XLA's own, unless a measured profile shows another to be quicker, see
                                          `choose`; over several axes also in two levels, the last axis inside:
                                          `hierarchical_all_reduce`

    When N is no power of two, recursive doubling and halving-doubling take two whole messages more, and log2 N is
    rounded down; the tree's is rounded up. All ranks get the same bits. Sums are taken in the array's own dtype.

    Source: Thakur, Rabenseifner, Gropp 2005; Patarasuk and Yuan 2009; for servers Li et al. 2014.

    Args:
      axis: mesh axis, or several as one.
      algorithm: one of the above.
      op: `sum`, `mean`, `max` or `min`.
      channels: for the rings: so many at once (pairs of them when bidirectional), over different links where N allows.
      num_servers: for the parameter server: S, the first ranks.
      cluster: for `auto`: what the ranks are linked by, as `h100:8x8` or a profile's file (see `auto.py`).

    Raises:
      ValueError: no such axis here, algorithm or op; an op the dtype has not; channels or servers of an algorithm
        that has none; `auto` with links unknown.
    """
    num_ranks = ranks_of("all_reduce", axis)
    check_choice("all_reduce", "algorithm", algorithm, (*ALGORITHMS, AUTO))
    check_only("all_reduce", algorithm, "channels", channels, RINGS)
    check_only("all_reduce", algorithm, "num_servers", num_servers, ("parameter_server",))
    checked_count("all_reduce", "num_servers", num_servers, most=num_ranks)
    x = varying(x, axis)
    check_op("all_reduce", op, x.dtype)
    algorithm = picked("all_reduce", algorithm, x.nbytes, axis, num_ranks, cluster)
    if algorithm == XLA:
        return reduced(lambda x, combine: xla_reduced(x, axis, combine), x, op, num_ranks)
    if algorithm == "hierarchical":
        return hierarchical_all_reduce(x, inner=axis[-1], outer=tuple(axis[:-1]), op=op)
    if algorithm in RINGS:
        return _by_rings(x, axis, op, ring_strides("all_reduce", algorithm, channels, num_ranks))
    run = tree.ALGORITHMS[algorithm]
    if algorithm == "parameter_server":
        run = functools.partial(run, num_servers=num_servers)
    return reduced(lambda x, combine: run(x, axis, combine, num_ranks), x, op, num_ranks)


def _by_rings(x: jax.Array, axis: Axis, op: str, strides: Sequence[int]) -> jax.Array:
    num_ranks = ranks_of("all_reduce", axis)

    def kernel(x: jax.Array, combine: Combine) -> jax.Array:
        return ring_all_reduce(x, axis, combine, num_ranks, strides)

    return reduced(kernel, x, op, num_ranks, linear=lambda x: ring_sum(x, axis, num_ranks, strides))
