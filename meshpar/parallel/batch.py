"""Sharding of the batch, and its division into micro-steps."""

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
    """Return the sharding of a batch: its first dim follows the strategy's rule for `batch`."""
    mesh = with_auto_axes("mesh", mesh)
    leaf = Leaf(path="batch", shape=(mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    return NamedSharding(mesh, resolve(leaf, as_strategy(strategy).activations, mesh).spec)


@apart()
def shard_batch(batch: PyTree, mesh: jax.sharding.Mesh, strategy: Strategy | Rules) -> PyTree:
    """Transfer a host batch to the devices of the mesh, sharded over the batch axes.

    Args:
      batch: a pytree of arrays whose first dim is the global batch. Scalars and PRNG keys are replicated.
      mesh: the devices.
      strategy: its rule for `batch` shards the first dim.

    Returns:
      The batch as arrays on the devices.

    Raises:
      MeshparError: the first dim is not divisible by the number of shards.
    """
    sharding, rules = batch_sharding(mesh, strategy), as_strategy(strategy).activations
    check_batch(as_rows(batch, None, rules), sharding, accumulate=1, rules=rules)
    sharded, unsharded = NamedSharding(mesh, sharding.spec), NamedSharding(mesh, PartitionSpec())
    batch = with_auto_types(batch)

    def sharding_of(path: Any, x: Any) -> NamedSharding:
        return sharded if np.ndim(x) and rules.input_rule(path_str(path)) is not replicated else unsharded

    return jax.device_put(batch, jax.tree_util.tree_map_with_path(sharding_of, batch))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForAllRows:
    """A scalar or PRNG key of a batch, broadcast to all examples so that it is sharded like them."""

    each: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A leaf of a batch that is replicated, also over micro-steps: `Rules(inputs={...: replicated})`."""

    each: Any


def is_replicated(x: Any) -> bool:
    """Return whether a leaf is marked as replicated."""
    return isinstance(x, Whole)


def without_whole(batch: PyTree) -> PyTree:
    """Return the batch with None in place of replicated leaves."""
    return jax.tree.map(lambda x: None if is_replicated(x) else x, batch, is_leaf=is_replicated)


def with_whole(batch: PyTree, rows: PyTree) -> PyTree:
    """Return the examples with the replicated leaves of `batch`; the inverse of `without_whole`."""
    return jax.tree.map(lambda x, cut: x if is_replicated(x) else cut, batch, rows, is_leaf=is_replicated)


def lying(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Return the sharding of all leaves of a batch from `as_rows`, or a pytree of shardings if some are replicated."""
    if not any(map(is_replicated, jax.tree.leaves(batch, is_leaf=is_replicated))):
        return sharding
    whole = Whole(NamedSharding(sharding.mesh, PartitionSpec()))
    return jax.tree.map(lambda x: whole if is_replicated(x) else sharding, batch, is_leaf=is_replicated)


def resharded(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Reshard arrays whose sharding differs from the sharding that a step requires."""

    def put(x: Any, to: NamedSharding) -> Any:
        current = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        # jit moves arrays that are not committed to devices.
        if current is None or not getattr(x, "committed", True) or current.is_equivalent_to(to, np.ndim(x)):
            return x
        return (
            jax.device_put(x, to) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        )

    layout = lying(batch, sharding)
    return jax.tree.map(lambda x: put(x, layout), batch) if layout is sharding else jax.tree.map(put, batch, layout)


def as_rows(batch: PyTree, sharding: NamedSharding | None = None, rules: Rules = Rules()) -> PyTree:  # noqa: B008
    """Return the batch as a step is traced with it: scalars as `ForAllRows`, replicated leaves as `Whole`."""
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

    def broadcast(x: Any) -> Any:
        if is_replicated(x) or np.ndim(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return ForAllRows(jax.ShapeDtypeStruct((num_rows,), x.dtype))
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return ForAllRows((jnp if isinstance(x, jax.core.Tracer) else np).broadcast_to(x, (num_rows,)))
        rows = jnp.broadcast_to(x, (num_rows,))  # on the devices where the scalar is
        return ForAllRows(rows if sharding is None else jax.device_put(rows, sharding))

    return jax.tree.map(broadcast, batch, is_leaf=is_replicated)


def as_given(rows: PyTree) -> PyTree:
    """Return the batch as the user passed it; the inverse of `as_rows`."""
    return jax.tree.map(
        lambda x: x.each[0] if isinstance(x, ForAllRows) else x.each if is_replicated(x) else x,
        rows,
        is_leaf=_is_put_in,
    )


def split_by(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes of size greater than 1 that shard a batch."""
    return axes_of_spec(sharding.spec, axis_sizes(sharding.mesh))


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf of a batch, after canonicalization by jax."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


def check_batch(
    batch: PyTree,
    sharding: NamedSharding,
    accumulate: int,
    interleave: int = 1,
    rules: Rules = Rules(),  # noqa: B008
) -> None:
    """Check that a batch from `as_rows` is numeric, and divisible by devices, micro-steps and interleaved slices.

    Leaves with an input rule "batch" may have a first dim of another size.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_put_in)
    paths = [path_str(path) for path, _ in leaves]
    for rule in rules.inputs:
        if not any(map(rule.matches, paths)):
            where, exists = f"inputs rule `{rule.key}`", f"it matches none of the batch's {len(paths)} leaves"
            raise problem(
                where,
                "select leaves of the batch",
                exists,
                near_or(rule.key, paths, "write the full path"),
                code="not-found",
            )
    for path, (_, x) in zip(paths, leaves, strict=True):
        _check_number(path, x.each if is_replicated(x) else x)
    if paths and not jax.tree.leaves(without_whole(batch)):
        exists = "the inputs rules replicate all leaves"
        fix = "use rules for leaves without a batch dim only, or set 'batch'"
        raise problem("batch", "shard its examples", exists, fix, code="conflict")
    sizes = axis_sizes(sharding.mesh)
    over = {axis: sizes[axis] for axis in split_by(sharding)}
    what = "micro-steps" if interleave == 1 else f"slices (accumulate={accumulate}, interleave={interleave})"
    own = {path: x for path, x in tree_leaves_with_paths(without_whole(batch)) if rules.input_rule(path) == "batch"}
    for path, x in own.items():
        check_rows({path: x}, over, accumulate * interleave, what)
    if own and len(own) == len(jax.tree.leaves(without_whole(batch))):
        return
    others = jax.tree_util.tree_map_with_path(lambda path, x: None if path_str(path) in own else x, batch)
    check_rows(others, over, accumulate * interleave, what, takes_scalars=True)


def check_rows(batch: PyTree, over: Mapping[str, int], count: int, what: str, *, takes_scalars: bool = False) -> None:
    """Check a batch for mesh axes with the sizes `over`, and for `count` pieces per local batch, called `what`."""
    shards = math.prod(over.values())
    leaves = tree_leaves_with_paths(without_whole(batch))
    if not leaves:
        raise problem(
            "batch",
            "train on it",
            "it holds no arrays",
            "pass a pytree of arrays with a batch dim first",
            code="wrong-type",
        )
    shapes = {path: np.shape(x) for path, x in leaves}
    rows = max((shape[0] for shape in shapes.values() if shape), default=0)
    for path, x in leaves:
        _check_number(path, x)
    for path, shape in shapes.items():
        if shape[:1] != (rows,) and (shape or not takes_scalars):
            raise problem(
                f"batch leaf `{path}` of shape {shape}",
                "be split by rows",
                f"it has {shape[0] if shape else 'no'} rows and another leaf has {rows}",
                "give every leaf the same first dim, the global batch"
                + f", or say what it is: mp.Rules(inputs={{{path!r}: ...}}) with 'batch', split by its own rows, or "
                "mp.replicated" * takes_scalars,
                code="wrong-shape",
            )
    unit = shards * count
    if rows == 0 or rows % unit:
        axes = " × ".join(f"`{axis}`" for axis in over) or "one device"
        fewer = fewer_devices(rows // count if rows % count == 0 else 1, over)
        where = f"batch leaf `{leaves[0][0]}` of shape {shapes[leaves[0][0]]} dim 0 (`batch`)"
        asked = f"split over {axes} ({shards})" + (f" in {count} {what}" if count > 1 else "")
        fix = ", or ".join(filter(None, (f"use a batch of {max(1, -(-rows // unit)) * unit}", fewer)))
        raise problem(where, asked, f"{rows} rows are not a positive multiple of {unit}", fix, code="indivisible")


def _is_put_in(x: Any) -> bool:
    """Return whether a leaf was wrapped by `as_rows`."""
    return isinstance(x, ForAllRows | Whole)


def _check_number(path: str, x: Any) -> None:
    dtype = getattr(x, "dtype", None)
    if dtype is not None and not _is_number(dtype):
        where = f"batch leaf `{path}` of dtype {dtype}"
        fix = "leave it out of the batch, or turn it into numbers first (text: into tokens)"
        raise problem(where, "be laid on devices", "they hold numbers, and this holds none", fix, code="wrong-dtype")


def _is_number(dtype: Any) -> bool:
    """Return whether jax supports a dtype: numbers, bools and PRNG keys."""
    return (
        dtype == np.bool_
        or jax.dtypes.issubdtype(dtype, np.number)
        or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    )


def split_rows(x: jax.Array, count: int, sharding: NamedSharding) -> jax.Array:
    """Reshape [batch, ...] to [count, batch / count, ...] without moving examples between devices.

    A plain reshape would assign the i-th block of the batch, which is on a few devices, to micro-step i.
    """
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in split_by(sharding))
    rows = x.shape[0] // (shards * count)
    by_device = x.reshape(shards, count, rows, *x.shape[1:])
    split = jnp.moveaxis(by_device, 1, 0).reshape(count, shards * rows, *x.shape[1:])
    return with_layout(split, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))
