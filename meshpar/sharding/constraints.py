"""Application of layouts: a constraint on Auto axes, a type on Explicit axes. Manual axes are ignored.

A step is traced on Auto axes even if the mesh has Explicit axes. On Explicit axes, a matmul is an error if examples and
weights are sharded over the same axis, as in FSDP, and Flax modules and user losses contain such matmuls. Outside a
step, arrays have the types of the mesh. `without_types` removes the types inside the step, so Auto and Explicit meshes
run the same program. Only a model that handles types itself (`mp.explicit`) is traced on Explicit axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.types import AnyMesh, PyTree, axes_of_spec, axis_sizes, spec_axes, without_axes


def with_layout(x: jax.Array, layout: PartitionSpec | NamedSharding) -> jax.Array:
    """Return x with a layout over the Auto and Explicit axes of the surrounding code.

    Args:
      x: an array of any shape.
      layout: the sharding of x. Inside a `shard_map`, pass a PartitionSpec, because the constraint must use the context
        mesh there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = layout.spec if isinstance(layout, NamedSharding) else layout
    if AxisType.Explicit not in mesh.axis_types:
        constrained = [entry for entry in spec if entry is not PartitionSpec.UNCONSTRAINED]
        has_auto = isinstance(layout, NamedSharding) or AxisType.Auto in mesh.axis_types or axes_of_spec(constrained)
        return jax.lax.with_sharding_constraint(x, layout) if has_auto else x
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    old_spec = jax.typeof(x).sharding.spec
    padded = [*spec, *[None] * (x.ndim - len(spec))]
    entries = [old if new is PartitionSpec.UNCONSTRAINED else new for old, new in zip(old_spec, padded, strict=True)]
    # An axis of size 1 would only complicate the type.
    unused = [axis for axis, size in axis_sizes(mesh).items() if size == 1]
    typed = jax.sharding.reshard(x, without_axes(_only(entries, types, AxisType.Explicit), unused))
    auto_spec = _only(entries, types, AxisType.Auto)
    return jax.lax.with_sharding_constraint(typed, auto_spec) if axes_of_spec(auto_spec) else typed


def _only(entries: Iterable[Any], types: dict[str, AxisType], axis_type: AxisType) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in spec_axes(entry) if types[a] is axis_type) or None for entry in entries))


# ---- The types of a mesh ---------------------------------------------------------------------------------------------


def is_typed(mesh: AnyMesh) -> bool:
    """Return whether the mesh has Explicit axes, so that arrays have shardings as types."""
    return AxisType.Explicit in mesh.axis_types


def without_types(f: Callable[..., PyTree], mesh: AnyMesh) -> Callable[..., PyTree]:
    """Wrap a function before `jax.jit`, so that its arguments are traced on Auto axes of this mesh.

    Results get their types from `out_shardings`. No constraint is added, so the program is the same as on an Auto mesh.
    """
    if not is_typed(mesh):
        return f

    @functools.wraps(f)
    def wrapped(*args: PyTree) -> PyTree:
        return f(*with_auto_types(args))

    # The name of the program, which a `functools.partial` does not have.
    wrapped.__name__ = getattr(f, "func", f).__name__
    return wrapped


def with_auto_types(tree: PyTree) -> PyTree:
    """Convert arrays on Explicit axes to the same axes with type Auto. Arrays may be traced, abstract or concrete."""

    def convert(x: Any) -> Any:
        is_traced = isinstance(x, jax.core.Tracer)
        sharding = jax.typeof(x).sharding if is_traced else getattr(x, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and is_typed(sharding.mesh)):
            return x
        mesh = with_auto_axes("an array", sharding.mesh)
        if is_traced:  # not constrained: the compiler propagates the sharding
            with jax.sharding.use_abstract_mesh(abstract_of(mesh)):
                return jax.sharding.reshard(x, PartitionSpec())
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        if isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(convert, tree)


def abstract_of(mesh: AnyMesh) -> AbstractMesh:
    """Return the mesh without its devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
