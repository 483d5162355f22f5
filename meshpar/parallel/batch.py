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
from meshpar.sharding.constraints import is_typed, with_auto_types, with_layout
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import near_or, problem
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules, fewer_devices, replicated, resolve
from meshpar.sharding.types import AnyMesh, Leaf, PyTree, axes_of_spec, axis_sizes, path_str, tree_leaves_with_paths


def batch_sharding(mesh: AnyMesh, strategy: Strategy | Rules) -> NamedSharding:
    """Return the sharding of a batch: its first dim follows the strategy's rule for the name `batch`.

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


@clear_context_mesh()
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

    Example:
      >>> mp.shard_batch(batch, mesh, strategy)["x"].sharding.spec
      P(('data', 'fsdp', 'expert'),)
    """
    sharding, rules = batch_sharding(mesh, strategy), as_strategy(strategy).activations
    check_batch(batch, sharding, rules)
    sharded, full = NamedSharding(mesh, sharding.spec), NamedSharding(mesh, PartitionSpec())
    batch = with_auto_types(batch)

    def sharding_of(path: Any, x: Any) -> NamedSharding:
        return sharded if np.ndim(x) and rules.input_rule(path_str(path)) is not replicated else full

    return jax.device_put(batch, jax.tree_util.tree_map_with_path(sharding_of, batch))


# ---- The batch of a step ---------------------------------------------------------------------------------------------
#
#   user's arrays ─ StepBatch.of ─► step ─ engine: `split_examples` into micro-steps ─► as_given ─► loss function


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Repeated:
    """A scalar or PRNG key of a batch, repeated for each example so that it is sharded like the other leaves."""

    each: jax.Array | np.ndarray | jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A batch inside a step: two trees with the structure of the user's batch. Each leaf is None in one of them."""

    examples: PyTree
    """Leaves that are sharded over devices and micro-steps. Scalars and keys are `Repeated`."""
    full: PyTree
    """Leaves that all devices and micro-steps receive, because of `Rules(inputs={...: replicated})`."""

    @staticmethod
    def of(
        batch: PyTree, sharding: NamedSharding, rules: Rules, num_parts: int = 1, unit: str = "micro-steps"
    ) -> StepBatch:
        """Check a batch and return it in the layout that a step expects."""
        batch = as_given(batch)
        num_examples = check_batch(batch, sharding, rules, num_parts, unit)
        full = NamedSharding(sharding.mesh, PartitionSpec())

        def row(x: Any) -> Any:
            if np.ndim(x):
                return _placed(x, sharding)
            if isinstance(x, jax.ShapeDtypeStruct):
                return Repeated(jax.ShapeDtypeStruct((num_examples,), x.dtype))
            library = jnp if isinstance(x, jax.Array) else np
            return Repeated(_placed(library.broadcast_to(x, (num_examples,)), sharding))

        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        chosen = [(x, rules.input_rule(path_str(path)) is replicated) for path, x in leaves]
        return StepBatch(
            jax.tree.unflatten(structure, [None if is_full else row(x) for x, is_full in chosen]),
            jax.tree.unflatten(structure, [_placed(x, full) if is_full else None for x, is_full in chosen]),
        )


class StepBatches:
    """Converts the batches of a loop with `StepBatch.of`, and checks batches of the same kind only once.

    The kind is the tree structure with the shape, dtype and sharding of each leaf. Batches with a leaf that
    `StepBatch.of` converts (a scalar, a key, an array with a different sharding) are checked each time.
    """

    def __init__(self, sharding: NamedSharding, rules: Rules, num_parts: int, unit: str) -> None:
        self._args = sharding, rules, num_parts, unit
        self._checked: dict[Any, PyTree] = {}
        """The field `full` of checked kinds whose leaves are all sharded, so that it has no arrays."""

    def of(self, batch: PyTree) -> StepBatch:
        """Return `StepBatch.of(batch, ...)`."""
        leaves, structure = jax.tree.flatten(batch)
        kinds = tuple(map(_kind, leaves))
        if (structure, kinds) in self._checked:
            return StepBatch(batch, self._checked[structure, kinds])
        result = StepBatch.of(batch, *self._args)
        converted = jax.tree.leaves(result.examples)
        is_unchanged = len(converted) == len(leaves) and all(x is y for x, y in zip(converted, leaves, strict=True))
        if is_unchanged and None not in kinds and not isinstance(batch, StepBatch):
            self._checked[structure, kinds] = result.full
        return result


def _kind(x: Any) -> tuple[Any, ...] | None:
    """Return the properties of a leaf that `StepBatch.of` reads, or None unless it is a concrete array."""
    if isinstance(x, np.ndarray):
        return type(x), x.shape, x.dtype
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return x.shape, x.dtype, x.sharding, x.committed
    return None


def as_given(batch: PyTree) -> PyTree:
    """Convert a `StepBatch`, or a part of it, back to the structure of the user's batch."""
    if not isinstance(batch, StepBatch):
        return batch

    def first(x: Any) -> Any:
        if not isinstance(x, Repeated):
            return x
        return jax.ShapeDtypeStruct((), x.each.dtype) if isinstance(x.each, jax.ShapeDtypeStruct) else x.each[0]

    examples = jax.tree.map(first, batch.examples, is_leaf=lambda x: isinstance(x, Repeated))
    return jax.tree.map(lambda x, y: y if x is None else x, examples, batch.full, is_leaf=lambda x: x is None)


def examples_of(batch: PyTree) -> PyTree:
    """Return the leaves of a batch that are sharded over devices."""
    return batch.examples if isinstance(batch, StepBatch) else batch


def _placed(x: Any, layout: NamedSharding) -> Any:
    """Move a committed array to a layout on Auto axes. Other arrays are unchanged, because jit moves them."""
    if isinstance(x, jax.core.Tracer):
        return with_auto_types(x)
    current = getattr(x, "sharding", None)
    if current is None or not getattr(x, "committed", True):
        return x
    has_types = isinstance(current, NamedSharding) and is_typed(current.mesh)
    if not has_types and current.is_equivalent_to(layout, np.ndim(x)):
        return x
    if isinstance(x, jax.Array):
        return jax.device_put(x, layout)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)


def split_by(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes larger than 1 that shard the batch."""
    return axes_of_spec(sharding.spec, axis_sizes(sharding.mesh))


def shape_of(x: jax.typing.ArrayLike) -> jax.ShapeDtypeStruct:
    """Return the shape and the canonical dtype of a leaf, an array or a number."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


def check_batch(
    batch: PyTree, sharding: NamedSharding, rules: Rules, num_parts: int = 1, unit: str = "micro-steps"
) -> int:
    """Check that a batch is numeric and divisible by devices x `num_parts`. `unit` names the parts.

    Leaves with an `inputs` rule "batch" are checked separately. All remaining leaves must have the same first dim.

    Returns:
      The number of examples.
    """
    leaves = dict(tree_leaves_with_paths(batch))
    if any(isinstance(x, int | float) for x in leaves.values()):
        _check_no_lists(batch)
    for rule in rules.inputs:
        if not any(map(rule.matches, leaves)):
            where, reason = f"inputs rule `{rule.key}`", f"it matches none of the batch's {len(leaves)} leaves"
            fix = near_or(rule.key, leaves, "write the full path of a leaf")
            raise problem(where, "select leaves of the batch", reason, fix, code="unknown-name")
    for path, x in leaves.items():
        _check_number(path, x)
    chosen = {path: rules.input_rule(path) for path in leaves}
    if leaves and all(rule is replicated for rule in chosen.values()):
        reason, fix = "inputs rules replicate all leaves", "replicate only leaves without a batch dim, or set 'batch'"
        raise problem("batch", "shard it over devices", reason, fix, code="conflict")
    sizes = axis_sizes(sharding.mesh)
    axes = {axis: sizes[axis] for axis in split_by(sharding)}
    separate = [path for path, rule in chosen.items() if rule == "batch"]
    for path in separate:
        check_examples({path: leaves[path]}, axes, num_parts, unit)
    common = {path: leaves[path] for path, rule in chosen.items() if rule is None}
    if common or not separate:
        check_examples(common, axes, num_parts, unit, takes_scalars=True)
    shapes = [np.shape(x) for x in (common or {path: leaves[path] for path in separate}).values()]
    return max((shape[0] for shape in shapes if shape), default=0)


def _check_no_lists(batch: PyTree) -> None:
    """Refuse lists of numbers, whose elements jax would treat as separate scalars."""

    def is_list(x: Any) -> bool:
        return isinstance(x, list) and bool(x) and (isinstance(x[0], int | float) or is_list(x[0]))

    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_list):
        if is_list(x):
            name = path_str(path)
            where, fix = f"batch entry `{name}`" if name else "batch", "convert it: np.asarray(...)"
            raise problem(
                where, "shard it", "it is a list of numbers, and JAX arrays are not lists", fix, code="wrong-type"
            )


def check_examples(
    batch: PyTree, over: Mapping[str, int], count: int, pieces: str, *, takes_scalars: bool = False
) -> None:
    """Check that all leaves have the same first dim, divisible by the number of shards times `count`.

    Args:
      batch: a pytree of arrays or shapes.
      over: the mesh axes that shard the batch, with their sizes.
      count: number of pieces of the local batch.
      pieces: name of the pieces for the error, such as "micro-steps".
      takes_scalars: True to allow scalars.
    """
    leaves = tree_leaves_with_paths(batch)
    if not leaves:
        fix = "pass a pytree of arrays whose first dim is the batch"
        raise problem("batch", "train on it", "it has no arrays", fix, code="wrong-shape")
    shapes = {path: np.shape(x) for path, x in leaves}
    examples = max((shape[0] for shape in shapes.values() if shape), default=0)
    for path, x in leaves:
        _check_number(path, x)
    for path, shape in shapes.items():
        if shape[:1] != (examples,) and (shape or not takes_scalars):
            size = f"first dim is {shape[0]}" if shape else "shape is ()"
            fix = "use the same first dim, the global batch size, for all leaves"
            if takes_scalars:
                fix += f", or write mp.Rules(inputs={{{path!r}: ...}}) with 'batch' (a separate size) or mp.replicated"
            reason = f"its {size} and another leaf has {examples}"
            raise problem(f"batch leaf `{path}` of shape {shape}", "shard it", reason, fix, code="wrong-shape")
    shards = math.prod(over.values())
    unit = shards * count
    if examples == 0 or examples % unit:
        axes = " × ".join(f"`{axis}`" for axis in over) or "one device"
        fewer = fewer_devices(examples // count if examples % count == 0 else 1, over)
        where = f"batch leaf `{leaves[0][0]}` of shape {shapes[leaves[0][0]]} dim 0 (`batch`)"
        requested = f"shard it over {axes} ({shards})" + (f" in {count} {pieces}" if count > 1 else "")
        fix = ", or ".join(filter(None, (f"use a batch of {max(1, -(-examples // unit)) * unit}", fewer)))
        raise problem(where, requested, f"{examples} is not a positive multiple of {unit}", fix, code="indivisible")


def _check_number(path: str, x: Any) -> None:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    kinds = np.bool_, np.number, jax.dtypes.extended  # PRNG keys are extended
    if not any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds):
        fix = "leave it out of the batch, or convert it to numbers (text: to tokens)"
        where, reason = f"batch leaf `{path}` of dtype {dtype}", "JAX arrays hold numbers"
        raise problem(where, "put it on devices", reason, fix, code="wrong-dtype")


def split_examples(x: jax.Array, count: int, sharding: NamedSharding) -> jax.Array:
    """Reshape [batch, ...] to [count, batch / count, ...] without moving examples between devices.

    A plain reshape would take micro-step i from the i-th block of the batch, which is on a few devices only.
    """
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in split_by(sharding))
    examples = x.shape[0] // (shards * count)
    by_device = x.reshape(shards, count, examples, *x.shape[1:])
    split = jnp.moveaxis(by_device, 1, 0).reshape(count, shards * examples, *x.shape[1:])
    return with_layout(split, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))
