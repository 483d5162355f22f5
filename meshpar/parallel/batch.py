"""Sharding of batches over devices and micro-steps."""

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
from meshpar.sharding.constraints import with_auto_types, with_layout
from meshpar.sharding.context import apart
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules, fewer_devices, replicated, resolve
from meshpar.sharding.types import (
    AnyMesh,
    Leaf,
    PyTree,
    axes_of_spec,
    axis_sizes,
    near_or,
    path_str,
    problem,
    tree_leaves_with_paths,
)


def batch_sharding(mesh: AnyMesh, strategy: Strategy | Rules) -> NamedSharding:
    """Return the sharding of a batch: its first dim follows the strategy's rule for the logical axis `batch`.

    Args:
      mesh: the device mesh, concrete or abstract.
      strategy: a strategy, or its rules.

    Example:
      >>> import meshpar as mp
      >>> batch_sharding(mp.MeshSpec(data=2, fsdp=4).abstract(), mp.fsdp()).spec[0]
      ('data', 'fsdp', 'expert')
    """
    mesh = with_auto_axes("mesh", mesh)
    leaf = Leaf(path="batch", shape=(mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    return NamedSharding(mesh, resolve(leaf, as_strategy(strategy).activations, mesh).spec)


@apart()
def shard_batch(batch: PyTree, mesh: jax.sharding.Mesh, strategy: Strategy | Rules) -> PyTree:
    """Put a host batch on the devices of a mesh.

    Args:
      batch: a pytree of arrays [global batch, ...]. Scalars and PRNG keys are replicated.
      mesh: the device mesh.
      strategy: its rule for `batch` shards the first dim; leaves matched by
        `Rules(inputs={...: replicated})` are replicated.

    Returns:
      The batch as sharded `jax.Array`s.

    Raises:
      MeshparError: if the first dim of a leaf is not divisible by the number of batch shards.
    """
    sharding, rules = batch_sharding(mesh, strategy), as_strategy(strategy).activations
    check_batch(as_rows(batch, None, rules), sharding, accumulate=1, rules=rules)
    sharded, full = NamedSharding(mesh, sharding.spec), NamedSharding(mesh, PartitionSpec())
    batch = with_auto_types(batch)

    def sharding_of(path: Any, x: Any) -> NamedSharding:
        return sharded if np.ndim(x) and rules.input_rule(path_str(path)) is not replicated else full

    return jax.device_put(batch, jax.tree_util.tree_map_with_path(sharding_of, batch))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForAllRows:
    """A scalar or PRNG key of a batch, repeated for every example so that it is sharded like the other leaves."""

    each: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A leaf that all devices and micro-steps receive in full, because of `Rules(inputs={...: replicated})`."""

    each: Any


def is_replicated(x: Any) -> bool:
    """Return whether a leaf of a batch from `as_rows` is replicated."""
    return isinstance(x, Whole)


def without_whole(batch: PyTree) -> PyTree:
    """Return the batch with None in place of replicated leaves."""
    return jax.tree.map(lambda x: None if is_replicated(x) else x, batch, is_leaf=is_replicated)


def with_whole(batch: PyTree, rows: PyTree) -> PyTree:
    """Return `rows` with the replicated leaves of `batch`; the inverse of `without_whole`."""
    return jax.tree.map(lambda x, row: x if is_replicated(x) else row, batch, rows, is_leaf=is_replicated)


def lying(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Return the sharding of each leaf of a batch from `as_rows`, or a single one if no leaf is replicated."""
    if not any(map(is_replicated, jax.tree.leaves(batch, is_leaf=is_replicated))):
        return sharding
    full = Whole(NamedSharding(sharding.mesh, PartitionSpec()))
    return jax.tree.map(lambda x: full if is_replicated(x) else sharding, batch, is_leaf=is_replicated)


def resharded(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Return the batch with committed arrays resharded to the layout that the step expects."""

    def put(x: Any, target: NamedSharding) -> Any:
        current = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        # jit moves an uncommitted array itself.
        if current is None or not getattr(x, "committed", True) or current.is_equivalent_to(target, np.ndim(x)):
            return x
        if isinstance(x, jax.Array):
            return jax.device_put(x, target)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)

    layout = lying(batch, sharding)
    return jax.tree.map(lambda x: put(x, layout), batch) if layout is sharding else jax.tree.map(put, batch, layout)


def as_rows(batch: PyTree, sharding: NamedSharding | None = None, rules: Rules = Rules()) -> PyTree:  # noqa: B008
    """Return the batch as the step is traced with: scalars and keys as `ForAllRows`, replicated leaves as `Whole`."""
    if rules.inputs:
        batch = jax.tree_util.tree_map_with_path(
            lambda path, x: Whole(x) if not is_replicated(x) and rules.input_rule(path_str(path)) is replicated else x,
            batch,
            is_leaf=is_replicated,
        )
    leaves = tree_leaves_with_paths(without_whole(batch))
    if all(np.ndim(x) for _, x in leaves):
        return batch
    counts = {path: np.shape(x)[0] for path, x in leaves if np.ndim(x)}
    num_rows = max((n for path, n in counts.items() if rules.input_rule(path) is None), default=0)
    num_rows = num_rows or max(counts.values(), default=0)

    def repeated(x: Any) -> Any:
        if is_replicated(x) or np.ndim(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return ForAllRows(jax.ShapeDtypeStruct((num_rows,), x.dtype))
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return ForAllRows((jnp if isinstance(x, jax.core.Tracer) else np).broadcast_to(x, (num_rows,)))
        rows = jnp.broadcast_to(x, (num_rows,))  # on the devices of the scalar
        return ForAllRows(rows if sharding is None else jax.device_put(rows, sharding))

    return jax.tree.map(repeated, batch, is_leaf=is_replicated)


def as_given(rows: PyTree) -> PyTree:
    """Return a batch from `as_rows` as the user's function expects it; the inverse of `as_rows`."""
    return jax.tree.map(
        lambda x: x.each[0] if isinstance(x, ForAllRows) else x.each if is_replicated(x) else x,
        rows,
        is_leaf=lambda x: isinstance(x, ForAllRows | Whole),
    )


def split_by(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes with more than one device that shard the batch."""
    return axes_of_spec(sharding.spec, axis_sizes(sharding.mesh))


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and the canonical dtype of a leaf, an array or a number."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


def check_batch(
    batch: PyTree,
    sharding: NamedSharding,
    accumulate: int,
    interleave: int = 1,
    rules: Rules = Rules(),  # noqa: B008
) -> None:
    """Check that a batch from `as_rows` is numeric and divisible by devices x micro-steps x interleaved slices.

    Leaves with an `inputs` rule "batch" are checked by themselves. All others must have the same first dim.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, ForAllRows | Whole))
    paths = [path_str(path) for path, _ in leaves]
    for rule in rules.inputs:
        if not any(map(rule.matches, paths)):
            where, reason = f"inputs rule `{rule.key}`", f"it matches none of the batch's {len(paths)} leaves"
            fix = near_or(rule.key, paths, "write the full path of a leaf")
            raise problem(where, "select leaves of the batch", reason, fix, code="unknown-name")
    for path, (_, x) in zip(paths, leaves, strict=True):
        _check_number(path, x.each if is_replicated(x) else x)
    if paths and not jax.tree.leaves(without_whole(batch)):
        reason, fix = "inputs rules replicate all leaves", "replicate only leaves without a batch dim, or set 'batch'"
        raise problem("batch", "shard it over devices", reason, fix, code="conflict")
    sizes = axis_sizes(sharding.mesh)
    axes = {axis: sizes[axis] for axis in split_by(sharding)}
    what = "micro-steps" if interleave == 1 else f"slices (accumulate={accumulate}, interleave={interleave})"
    rows = tree_leaves_with_paths(without_whole(batch))
    separate = {path: x for path, x in rows if rules.input_rule(path) == "batch"}
    for path, x in separate.items():
        check_rows({path: x}, axes, accumulate * interleave, what)
    if separate and len(separate) == len(rows):
        return
    common = jax.tree_util.tree_map_with_path(lambda path, x: None if path_str(path) in separate else x, batch)
    check_rows(common, axes, accumulate * interleave, what, takes_scalars=True)


def check_rows(batch: PyTree, over: Mapping[str, int], count: int, what: str, *, takes_scalars: bool = False) -> None:
    """Check that all leaves have the same first dim, divisible by the number of shards times `count`.

    Args:
      batch: a pytree of arrays or shapes.
      over: the mesh axes that shard the batch, with their sizes.
      count: number of pieces of the local batch.
      what: name of the pieces for the error, such as "micro-steps".
      takes_scalars: True to allow scalars.
    """
    leaves = tree_leaves_with_paths(without_whole(batch))
    if not leaves:
        fix = "pass a pytree of arrays whose first dim is the batch"
        raise problem("batch", "train on it", "it has no arrays", fix, code="wrong-shape")
    shapes = {path: np.shape(x) for path, x in leaves}
    rows = max((shape[0] for shape in shapes.values() if shape), default=0)
    for path, x in leaves:
        _check_number(path, x)
    for path, shape in shapes.items():
        if shape[:1] != (rows,) and (shape or not takes_scalars):
            size = f"first dim is {shape[0]}" if shape else "shape is ()"
            fix = "use the same first dim, the global batch size, for all leaves"
            if takes_scalars:
                fix += f", or write mp.Rules(inputs={{{path!r}: ...}}) with 'batch' (a separate size) or mp.replicated"
            reason = f"its {size} and another leaf has {rows}"
            raise problem(f"batch leaf `{path}` of shape {shape}", "shard it", reason, fix, code="wrong-shape")
    shards = math.prod(over.values())
    unit = shards * count
    if rows == 0 or rows % unit:
        axes = " × ".join(f"`{axis}`" for axis in over) or "one device"
        fewer = fewer_devices(rows // count if rows % count == 0 else 1, over)
        where = f"batch leaf `{leaves[0][0]}` of shape {shapes[leaves[0][0]]} dim 0 (`batch`)"
        requested = f"shard it over {axes} ({shards})" + (f" in {count} {what}" if count > 1 else "")
        fix = ", or ".join(filter(None, (f"use a batch of {max(1, -(-rows // unit)) * unit}", fewer)))
        raise problem(where, requested, f"{rows} is not a positive multiple of {unit}", fix, code="indivisible")


def _check_number(path: str, x: Any) -> None:
    dtype = getattr(x, "dtype", None)
    is_number = (
        dtype is None
        or dtype == np.bool_
        or jax.dtypes.issubdtype(dtype, np.number)
        or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)  # PRNG keys
    )
    if not is_number:
        fix = "leave it out of the batch, or convert it to numbers (text: to tokens)"
        where, reason = f"batch leaf `{path}` of dtype {dtype}", "JAX arrays hold numbers"
        raise problem(where, "put it on devices", reason, fix, code="wrong-dtype")


def split_rows(x: jax.Array, count: int, sharding: NamedSharding) -> jax.Array:
    """Reshape [batch, ...] to [count, batch / count, ...] without moving examples between devices.

    A plain reshape would take micro-step i from the i-th block of the batch, which is on a few devices only.
    """
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in split_by(sharding))
    rows = x.shape[0] // (shards * count)
    by_device = x.reshape(shards, count, rows, *x.shape[1:])
    split = jnp.moveaxis(by_device, 1, 0).reshape(count, shards * rows, *x.shape[1:])
    return with_layout(split, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))
