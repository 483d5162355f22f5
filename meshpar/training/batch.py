"""The batch: how it lies on the mesh, and its rows cut into micro-steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.parallel import Strategy, as_strategy
from meshpar.sharding.context import apart
from meshpar.sharding.lay import lay, with_auto_types
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules, fewer_devices, resolve
from meshpar.sharding.types import AnyMesh, Leaf, PyTree, axes_of_spec, axis_sizes, problem, tree_leaves_with_paths


def batch_sharding(mesh: AnyMesh, strategy: Strategy | Rules) -> NamedSharding:
    """How a batch lies on the mesh: its first dim by the strategy's rule for `batch`."""
    mesh = with_auto_axes("mesh", mesh)
    leaf = Leaf(path="batch", shape=(mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    return NamedSharding(mesh, resolve(leaf, as_strategy(strategy).activations, mesh).spec)


@apart()
def shard_batch(batch: PyTree, mesh: jax.sharding.Mesh, strategy: Strategy | Rules) -> PyTree:
    """Lay a host batch on the mesh.

    Args:
      batch: a pytree of arrays whose first dim is the global batch; scalars and random keys go to every device.
      mesh: the devices.
      strategy: whose rule for `batch` shards it.

    Raises:
      ValueError: a first dim that the mesh does not divide.
    """
    sharding = batch_sharding(mesh, strategy)
    check_batch(batch, sharding, accumulate=1)
    split, whole = NamedSharding(mesh, sharding.spec), NamedSharding(mesh, PartitionSpec())
    batch = with_auto_types(batch)
    return jax.device_put(batch, jax.tree.map(lambda x: split if np.ndim(x) else whole, batch))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForAllRows:
    """A scalar or a random key of a batch, once for every row, so that it is cut as the rows are."""

    each: Any


def as_rows(batch: PyTree, sharding: NamedSharding | None = None) -> PyTree:
    """The batch, its scalars and keys as `ForAllRows`; what a step is traced with."""
    leaves = jax.tree.leaves(batch)
    if all(np.ndim(x) for x in leaves):
        return batch
    num_rows = max((np.shape(x)[0] for x in leaves if np.ndim(x)), default=0)

    def whole(x: Any) -> Any:
        if np.ndim(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return ForAllRows(jax.ShapeDtypeStruct((num_rows,), x.dtype))
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return ForAllRows((jnp if isinstance(x, jax.core.Tracer) else np).broadcast_to(x, (num_rows,)))
        rows = jnp.broadcast_to(x, (num_rows,))  # on the devices where the scalar is
        return ForAllRows(rows if sharding is None else jax.device_put(rows, sharding))

    return jax.tree.map(whole, batch)


def as_given(rows: PyTree) -> PyTree:
    """The same as the user's function takes it, scalars again."""
    return jax.tree.map(
        lambda x: x.each[0] if isinstance(x, ForAllRows) else x, rows, is_leaf=lambda x: isinstance(x, ForAllRows)
    )


def split_by(sharding: NamedSharding) -> tuple[str, ...]:
    """Mesh axes of more than one rank over which a batch lies."""
    return axes_of_spec(sharding.spec, axis_sizes(sharding.mesh))


def check_batch(batch: PyTree, sharding: NamedSharding, accumulate: int, interleave: int = 1) -> None:
    """Raises ValueError where rows do not go evenly over the devices, micro-steps and slices, or are no numbers."""
    sizes = axis_sizes(sharding.mesh)
    over = {axis: sizes[axis] for axis in split_by(sharding)}
    what = "micro-steps" if interleave == 1 else f"slices (accumulate={accumulate}, interleave={interleave})"
    check_rows(batch, over, accumulate * interleave, what, takes_scalars=True)


def check_rows(batch: PyTree, over: Mapping[str, int], count: int, what: str, *, takes_scalars: bool = False) -> None:
    """The same for these mesh axes and their sizes, and so many pieces of each device's rows, called `what`."""
    shards = math.prod(over.values())
    leaves = tree_leaves_with_paths(batch)
    if not leaves:
        raise problem("batch", "train on it", "it holds no arrays", "pass a pytree of arrays with a batch dim first")
    shapes = {path: np.shape(x) for path, x in leaves}
    rows = max((shape[0] for shape in shapes.values() if shape), default=0)
    for path, x in leaves:
        dtype = getattr(x, "dtype", None)
        if dtype is not None and not _is_number(dtype):
            raise problem(
                f"batch leaf `{path}` of dtype {dtype}",
                "be laid on devices",
                "they hold numbers, and this holds none",
                "leave it out of the batch, or turn it into numbers first (text: into tokens)",
            )
    for path, shape in shapes.items():
        if shape[:1] != (rows,) and (shape or not takes_scalars):
            raise problem(
                f"batch leaf `{path}` of shape {shape}",
                "be split by rows",
                f"it has {shape[0] if shape else 'no'} rows and another leaf has {rows}",
                "give every leaf the same first dim, the global batch",
            )
    unit = shards * count
    if rows == 0 or rows % unit:
        axes = " × ".join(f"`{axis}`" for axis in over) or "one device"
        fewer = fewer_devices(rows // count if rows % count == 0 else 1, over)
        raise problem(
            f"batch leaf `{leaves[0][0]}` of shape {shapes[leaves[0][0]]} dim 0 (`batch`)",
            f"split over {axes} ({shards})" + (f" in {count} {what}" if count > 1 else ""),
            f"{rows} rows are not a positive multiple of {unit}",
            ", or ".join(filter(None, (f"use a batch of {max(1, -(-rows // unit)) * unit}", fewer))),
        )


def _is_number(dtype: Any) -> bool:
    """Whether jax can hold it: numbers, truths, random keys; not strings, objects, times or records."""
    return (
        dtype == np.bool_
        or jax.dtypes.issubdtype(dtype, np.number)
        or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    )


def split_rows(x: jax.Array, count: int, sharding: NamedSharding) -> jax.Array:
    """[batch, ...] -> [count, batch / count, ...] such that every device keeps its own rows.

    A plain reshape would give micro-step i the i-th block of the batch, which lies on a few devices.
    """
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in split_by(sharding))
    rows = x.shape[0] // (shards * count)
    by_device = x.reshape(shards, count, rows, *x.shape[1:])
    split = jnp.moveaxis(by_device, 1, 0).reshape(count, shards * rows, *x.shape[1:])
    return lay(split, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))
