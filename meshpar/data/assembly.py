"""Global batches from examples. Each process reads the examples for its devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int64

from meshpar.data.rows import Rows
from meshpar.sharding.errors import check_divides, check_positive_int, near, problem
from meshpar.sharding.types import axis_sizes, spec_axes

Batch: TypeAlias = dict[str, Any]
"""Arrays by name with the same first dim: global `jax.Array`s, or NumPy arrays without a sharding."""
Sharding: TypeAlias = NamedSharding | Mapping[str, NamedSharding] | None
"""Sharding of a batch: a sharding for all arrays, shardings by name, or None for NumPy arrays on the host."""


class Assembly:
    """Builds batches from indices of examples.

    Raises:
      MeshparError: there are fewer examples than `batch_size`, or the sharding does not divide the batch.
    """

    def __init__(self, rows: Rows, batch_size: int, sharding: Sharding, *, dataset: str) -> None:
        check_batch_size(batch_size, len(rows), dataset)
        self._rows = rows
        self._batch_size = batch_size
        self._x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        self.spec: dict[str, jax.ShapeDtypeStruct] = {}
        empty = rows.read(np.array([], dtype=np.int64))
        shardings = _per_name(sharding, empty)
        for name, array in empty.items():
            shape = batch_size, *array.shape[1:]
            _check_divides(name, shape, shardings[name])
            self.spec[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=shardings[name])

    def batch(self, row_numbers: Callable[[int, int], Int64[np.ndarray, " rows"]]) -> Batch:
        """Return the batch whose examples `start` to `stop` have the indices `row_numbers(start, stop)`."""
        cache: dict[tuple[int, int], dict[str, np.ndarray]] = {}

        def shard(name: str, index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._batch_size)
            # Read once for all arrays of a batch and for all devices with the same examples.
            if (start, stop) not in cache:
                cache[start, stop] = self._rows.read(row_numbers(start, stop))
            return cache[start, stop][name][:, *index[1:]]

        def array(name: str, spec: jax.ShapeDtypeStruct) -> Any:
            if spec.sharding is None:
                return shard(name, (slice(None),) * len(spec.shape))
            read = functools.partial(shard, name)
            return jax.make_array_from_callback(spec.shape, spec.sharding, read, dtype=spec.dtype)

        # The setting is local to a thread, and a prefetch thread may run this.
        with jax.enable_x64(self._x64):
            return {name: array(name, spec) for name, spec in self.spec.items()}


def check_batch_size(batch_size: int, num_rows: int, dataset: str) -> None:
    """Check that a data set with `num_rows` examples has enough for a batch."""
    check_positive_int("`batch_size`", "the number of examples in a global batch", batch_size=batch_size)
    if batch_size > num_rows:
        requested, reason = f"create batches of {batch_size} examples", f"the {dataset} has {num_rows} examples"
        fix = f"set batch_size to {num_rows} or less, or enlarge the {dataset}: add data, or reduce seq_len"
        raise problem("`batch_size`", requested, reason, fix, "out-of-range")


def _per_name(sharding: Sharding, names: Mapping[str, Any]) -> dict[str, NamedSharding | None]:
    if sharding is None or isinstance(sharding, NamedSharding):
        return dict.fromkeys(names, sharding)
    for name in sharding:
        if name not in names:
            reason = f"a batch has {', '.join(map(repr, names))}"
            raise problem("`sharding`", f"shard `{name}`", reason, near(name, names), "unknown-name")
    for name in names:
        if name not in sharding:
            reason = f"the mapping has shardings only for {', '.join(map(repr, sharding))}"
            raise problem("`sharding`", f"shard `{name}`", reason, f"add a sharding for `{name}`", "unknown-name")
    return dict(sharding)


def _check_divides(name: str, shape: tuple[int, ...], sharding: NamedSharding | None) -> None:
    if sharding is None:
        return
    requested = f"shard it as {sharding.spec}"
    if len(sharding.spec) > len(shape):
        fix = "pass `sharding` as a dict of shardings by name"
        raise problem(f"`{name}` of shape {shape}", requested, f"it has {len(shape)} dims", fix, "wrong-shape")
    sizes = axis_sizes(sharding.mesh)
    for dim, entry in enumerate(sharding.spec):
        shards = math.prod(sizes[axis] for axis in spec_axes(entry))
        where = f"`{name}` dim {dim} ({'batch_size' if dim == 0 else 'size'} {shape[dim]})"
        fix = f"use {-(-shape[dim] // shards) * shards}, or fewer shards than the {shards} of {entry!r}"
        check_divides(where, requested, shape[dim], shards, fix)
