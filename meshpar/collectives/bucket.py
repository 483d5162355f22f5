"""All-reduce of many small arrays in a few long messages (buckets)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.collectives.reduction import all_reduce
from meshpar.collectives.wire import varying
from meshpar.hardware.clusters import Profile
from meshpar.sharding.errors import check_number
from meshpar.sharding.types import PyTree


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
