"""All-reduce with a choice of algorithms, for an array or for many small arrays in buckets."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from meshpar.collectives import tree
from meshpar.collectives.hierarchical import hierarchical_all_reduce
from meshpar.collectives.kernel_checks import Axis, check_index, check_only, check_op, ranks_of
from meshpar.collectives.ring import AUTO, RINGS, resolve_algorithm, ring_all_reduce, ring_strides, ring_sum
from meshpar.collectives.wire import reduce_by_op, varying, xla_reduced
from meshpar.hardware.algorithm_choice import XLA
from meshpar.hardware.clusters import Profile
from meshpar.sharding.errors import check_choice, check_number, check_positive_int
from meshpar.sharding.types import PyTree

ALGORITHMS = (*RINGS, *tree.ALGORITHMS, XLA)
"""Algorithms of `all_reduce`, without "auto"."""


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
    """Reduce an array over all ranks of `axis`, and return the result on every rank.

        [A] {unreduced over X} -> [A];  per device [A] -> [A], any shape

        algorithm           steps         bytes sent per rank (n the array, N ranks)
        ring                2(N-1)        2(N-1)/N n    bandwidth-optimal; a reduce-scatter, then an all-gather
        bidirectional       2(N-1)        2(N-1)/N n    two messages in each step, one in each direction
        recursive_doubling  log2 N        n log2 N      latency-optimal
        halving_doubling    2 log2 N      2(N-1)/N n
        tree                2 log2 N      n log2 N each way along the longest path
        root                2(N-1)        (N-1) n in and out of rank 0; for comparison only
        parameter_server    2(N-1)        (N-1) n/S in and out of each of S servers; for comparison only
        xla                               XLA's own collective
        auto                              the fastest in a measured profile, XLA's by default (`choose`);
                                          for several axes also `hierarchical_all_reduce`, with the last as `inner`

    If N is not a power of two, recursive doubling and halving-doubling send two more messages of n bytes, with log2 N
    rounded down. The tree rounds log2 N up. All ranks return bitwise equal results. Sums use the dtype of the array.

    Source: Thakur, Rabenseifner, Gropp 2005; Patarasuk and Yuan 2009; for servers Li et al. 2014.

    Args:
      x: the local array. All ranks have the same shape and dtype.
      axis: mesh axis, or a tuple of axes that are reduced as one.
      algorithm: an algorithm of the table.
      op: `sum`, `mean`, `max` or `min`.
      channels: number of concurrent rings, or of pairs for "bidirectional". They use different links if N allows.
      num_servers: number S of parameter servers, which are the first ranks.
      cluster: for "auto", the interconnect, such as `h100:8x8`, or the path of a profile.

    Returns:
      The reduced array, with the shape and dtype of `x`. It varies over `axis` for `shard_map`.

    Raises:
      MeshparError: the axis, algorithm or op is unknown, the dtype does not support the op, an argument does not apply
        to the algorithm, or the cluster for "auto" is unknown.

    Example:
      >>> def sums(x):
      ...     return mp.collectives.all_reduce(x, axis="fsdp", algorithm="ring")
      >>> f = jax.shard_map(sums, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
      >>> jax.jit(f)(jnp.arange(4.0))
      Array([6., 6., 6., 6.], dtype=float32)
    """
    num_ranks = ranks_of("all_reduce", axis)
    check_choice("all_reduce", "the algorithm", (*ALGORITHMS, AUTO), algorithm=algorithm)
    check_only("all_reduce", algorithm, "channels", channels, RINGS)
    check_only("all_reduce", algorithm, "num_servers", num_servers, ("parameter_server",))
    check_positive_int("all_reduce", "the number of servers", num_servers=num_servers)
    requested, reason = f"use num_servers={num_servers}", f"there are {num_ranks} ranks"
    check_index("all_reduce", requested, num_servers, range(1, num_ranks + 1), reason)
    x = varying(x, axis)
    check_op("all_reduce", op, x.dtype)
    algorithm = resolve_algorithm("all_reduce", algorithm, x.nbytes, axis, num_ranks, cluster)
    if algorithm == XLA:
        return reduce_by_op(lambda x, combine: xla_reduced(x, axis, combine), x, op, num_ranks)
    if algorithm == "hierarchical":
        return hierarchical_all_reduce(x, inner=axis[-1], outer=tuple(axis[:-1]), op=op)
    linear = None
    if algorithm in RINGS:
        strides = ring_strides("all_reduce", algorithm, channels, num_ranks)
        run: Callable[..., jax.Array] = functools.partial(ring_all_reduce, strides=strides)
        linear = functools.partial(ring_sum, axis=axis, num_ranks=num_ranks, strides=strides)
    elif algorithm == "parameter_server":
        run = functools.partial(tree.parameter_server, num_servers=num_servers)
    else:
        run = tree.ALGORITHMS[algorithm]
    return reduce_by_op(lambda x, combine: run(x, axis, combine, num_ranks), x, op, num_ranks, linear=linear)


def bucketed_all_reduce(
    tree: PyTree,
    *,
    axis: Axis,
    bucket_bytes: float = 25e6,
    op: str = "sum",
    algorithm: str = "ring",
    channels: int = 1,
    cluster: str | Profile | None = None,
) -> PyTree:
    """All-reduce the arrays of a pytree, one all-reduce per bucket, starting with the last arrays.

        {[A], [B], ...} {unreduced over X} -> {[A], [B], ...};  per device the same shapes
        steps and bytes of the algorithm for each bucket

    Backward passes compute the gradients of the last layers first. In reverse order the first bucket can be sent while
    the remaining gradients are computed. The reference of each array is `reference.all_reduce`.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".

    Args:
      tree: arrays of any shapes. Each dtype has separate buckets.
      bucket_bytes: maximum size of a bucket. A larger array has a bucket for itself.
      axis, op, algorithm, channels, cluster: see `all_reduce`. `auto` chooses an algorithm for each bucket by its size.

    Raises:
      MeshparError: `bucket_bytes` is not positive, or `all_reduce` raises an error.
    """
    check_number("bucketed_all_reduce", "25e6", bucket_bytes=bucket_bytes)
    ranks_of("bucketed_all_reduce", axis)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [varying(leaf, axis) for leaf in leaves]
    for bucket in buckets(leaves, bucket_bytes):
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in bucket])
        with jax.named_scope("bucket"):
            total = all_reduce(flat, axis=axis, op=op, algorithm=algorithm, channels=channels, cluster=cluster)
        ends = list(itertools.accumulate(leaves[i].size for i in bucket))
        for i, part in zip(bucket, jnp.split(total, ends[:-1]), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def buckets(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], bucket_bytes: float) -> list[list[int]]:
    """Return the indices of the arrays in each bucket, in the order in which the buckets fill up."""
    closed: list[list[int]] = []
    filling: dict[jnp.dtype, list[int]] = {}

    def size_bytes(i: int) -> int:
        return math.prod(leaves[i].shape) * leaves[i].dtype.itemsize

    for i in reversed(range(len(leaves))):
        bucket = filling.setdefault(leaves[i].dtype, [])
        if bucket and sum(map(size_bytes, bucket)) + size_bytes(i) > bucket_bytes:
            closed.append(bucket)
            bucket = filling[leaves[i].dtype] = []
        bucket.append(i)
    return closed + list(filling.values())
