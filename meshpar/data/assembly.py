"""Assembly: rows put together as one global batch, of which each process reads and fills its own part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int64

from meshpar.data.rows import Rows
from meshpar.sharding.types import axis_sizes, near, problem, spec_axes

Batch: TypeAlias = dict[str, Any]
"""Name to array, all of the same first dim: global `jax.Array`s where a sharding was given, else NumPy arrays."""
Sharding: TypeAlias = NamedSharding | Mapping[str, NamedSharding] | None
"""How a batch is laid out: one sharding for every array, one per name, or None for NumPy arrays on the host."""


class Assembly:
    """Makes batches from row numbers.

    Raises:
      ValueError: a batch larger than the rows, or one that the sharding cannot split.
    """

    def __init__(self, rows: Rows, batch_size: int, sharding: Sharding, *, what: str) -> None:
        check_batch_size(batch_size, len(rows), what)
        self._rows = rows
        self._batch_size = batch_size
        self._x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        empty = rows.read(np.array([], dtype=np.int64))
        shardings = _per_name(sharding, empty)
        self.spec: dict[str, jax.ShapeDtypeStruct] = {
            name: _spec(name, (batch_size, *array.shape[1:]), array.dtype, shardings[name])
            for name, array in empty.items()
        }

    def batch(self, row_numbers: Callable[[int, int], Int64[np.ndarray, " rows"]]) -> Batch:
        """The batch whose rows `start` to `stop` have the numbers `row_numbers(start, stop)`."""
        read: dict[tuple[int, int], dict[str, np.ndarray]] = {}

        def part(name: str, index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._batch_size)
            # Devices that hold the same rows, and the arrays of one batch, share one read.
            if (start, stop) not in read:
                read[start, stop] = self._rows.read(row_numbers(start, stop))
            return read[start, stop][name][:, *index[1:]]

        # jax's settings by context belong to a thread, and this may be another one than the spec was made in.
        with jax.enable_x64(self._x64):
            return {name: _array(spec, functools.partial(part, name)) for name, spec in self.spec.items()}


def _array(spec: jax.ShapeDtypeStruct, part: Callable[[Any], np.ndarray]) -> Any:
    if spec.sharding is None:
        return part((slice(None),) * len(spec.shape))
    return jax.make_array_from_callback(spec.shape, spec.sharding, part, dtype=spec.dtype)


def check_batch_size(batch_size: int, num_rows: int, what: str) -> None:
    """Raises ValueError unless a batch of different rows can be made of `what`, which has `num_rows`."""
    asked = f"make batches of {batch_size} rows"
    if batch_size < 1:
        raise problem("`batch_size`", asked, "a batch has at least one row", "choose 1 or more")
    if batch_size > num_rows:
        fix = f"set batch_size to {num_rows} or less, or enlarge the {what}: more data, shorter rows, another split"
        raise problem("`batch_size`", asked, f"the {what} has {num_rows} rows in all", fix)


def _per_name(sharding: Sharding, names: Mapping[str, Any]) -> dict[str, NamedSharding | None]:
    if sharding is None or isinstance(sharding, NamedSharding):
        return dict.fromkeys(names, sharding)
    for name in sharding:
        if name not in names:
            exists = f"a batch has {', '.join(map(repr, names))}"
            raise problem("`sharding`", f"lay out `{name}`", exists, near(name, names))
    for name in names:
        if name not in sharding:
            exists = f"there are shardings only for {', '.join(map(repr, sharding))}"
            raise problem("`sharding`", f"lay out `{name}`", exists, f"add one for `{name}`")
    return dict(sharding)


def _spec(name: str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    if sharding is not None:
        _check_splits(name, shape, sharding)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _check_splits(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    """Raises ValueError unless the sharding cuts the array into equal parts."""
    asked = f"lay it out as {sharding.spec}"
    if len(sharding.spec) > len(shape):
        fix = "give `sharding` as a dict with one sharding per name"
        raise problem(f"`{name}` of shape {shape}", asked, f"it has {len(shape)} dims", fix)
    sizes = axis_sizes(sharding.mesh)
    for dim, entry in enumerate(sharding.spec):
        shards = int(np.prod([sizes[axis] for axis in spec_axes(entry)], dtype=np.int64))
        if shape[dim] % shards:
            where = f"`{name}` dim {dim} ({'batch_size' if dim == 0 else 'size'} {shape[dim]})"
            exists = f"{shape[dim]} is not a multiple of {shards}, the size of {entry!r}"
            fix = f"make it {-(-shape[dim] // shards) * shards}, or split it over fewer devices"
            raise problem(where, asked, exists, fix)
