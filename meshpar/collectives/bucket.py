"""Gradients in buckets: many small arrays reduced as a few long messages."""

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
from meshpar.sharding.types import PyTree, problem


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
    """All-reduce of every array of a tree: one all-reduce a bucket, last arrays first.

        per device {[A], [B], ...} -> {[A], [B], ...}
        steps and bytes of the algorithm, for each bucket with its own n

    Backward passes make the last layers' gradients first, so reverse order lets the first bucket go while the rest is
    still being computed. A bucket is one whole all-reduce; a ring cuts it into N chunks in turn.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".

    Args:
      tree: arrays of any shapes; each dtype has its own buckets.
      bucket_bytes: a bucket is closed before it would grow beyond this. An array that is larger has one to itself.
      axis, op, algorithm, channels, cluster: as for `all_reduce`; `auto` chooses for each bucket by its size.

    Raises:
      ValueError: `bucket_bytes` is not positive, or what `all_reduce` raises.
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int | float) or not bucket_bytes > 0:
        asked = f"fill buckets of {bucket_bytes!r} bytes"
        raise problem("bucketed_all_reduce", asked, "a bucket holds something", "use a positive size, 25e6 say")
    ranks_of("bucketed_all_reduce", axis)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [varying(leaf, axis) for leaf in leaves]
    for bucket in buckets(leaves, bucket_bytes):
        flat = jnp.concatenate([leaves[at].reshape(-1) for at in bucket])
        with jax.named_scope("bucket"):
            total = all_reduce(flat, axis=axis, op=op, algorithm=algorithm, channels=channels, cluster=cluster)
        ends = list(itertools.accumulate(leaves[at].size for at in bucket))
        for at, part in zip(bucket, jnp.split(total, ends[:-1]), strict=True):
            leaves[at] = part.reshape(leaves[at].shape)
    return jax.tree.unflatten(structure, leaves)


def buckets(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], bucket_bytes: float) -> list[list[int]]:
    """Which arrays share a bucket, as positions: buckets in the order they are closed, last arrays first."""
    closed: list[list[int]] = []
    filling: dict[jnp.dtype, list[int]] = {}

    def size_bytes(at: int) -> int:
        return math.prod(leaves[at].shape) * leaves[at].dtype.itemsize

    for at in reversed(range(len(leaves))):
        bucket = filling.setdefault(leaves[at].dtype, [])
        if bucket and sum(map(size_bytes, bucket)) + size_bytes(at) > bucket_bytes:
            closed.append(bucket)
            bucket = filling[leaves[at].dtype] = []
        bucket.append(at)
    return closed + list(filling.values())
