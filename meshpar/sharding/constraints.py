"""How a layout is put down: by a constraint on Auto axes, by type on Explicit ones, not at all on Manual ones.

A step is traced on Auto axes whatever the mesh it was given: a matmul of rows and weights that the same axis splits
(FSDP) has no type, nor has the norm between them, and both stand in modules of Flax and in losses of users. So arrays
have the types of the given mesh outside of a step, and inside `without_types` none: both kinds of mesh run the same
program. A model that says its types itself (`mp.explicit`) is traced on Explicit axes inside.
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
    """x, laid out, over the axes that are the compiler's or types' where this is traced.

    Args:
      x: of any shape.
      layout: a bare spec where a `shard_map` is manual over axes, for the mesh it names is then that of the context.

    Raises:
      ValueError: of jax, an axis that the mesh has not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = layout.spec if isinstance(layout, NamedSharding) else layout
    if AxisType.Explicit not in mesh.axis_types:
        named = [entry for entry in spec if entry is not PartitionSpec.UNCONSTRAINED]
        is_free = isinstance(layout, NamedSharding) or AxisType.Auto in mesh.axis_types or axes_of_spec(named)
        return jax.lax.with_sharding_constraint(x, layout) if is_free else x
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    before = jax.typeof(x).sharding.spec
    padded = [*spec, *[None] * (x.ndim - len(spec))]
    entries = [old if new is PartitionSpec.UNCONSTRAINED else new for old, new in zip(before, padded, strict=True)]
    # An axis of one rank splits nothing, and in a type it would only be in the way.
    alone = [axis for axis, size in axis_sizes(mesh).items() if size == 1]
    typed = jax.sharding.reshard(x, without_axes(_only(entries, kinds, AxisType.Explicit), alone))
    constrained = _only(entries, kinds, AxisType.Auto)
    return jax.lax.with_sharding_constraint(typed, constrained) if axes_of_spec(constrained) else typed


def _only(entries: Iterable[Any], kinds: dict[str, AxisType], kind: AxisType) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in spec_axes(entry) if kinds[a] is kind) or None for entry in entries))


# ---- The types of a mesh ---------------------------------------------------------------------------------------------


def is_typed(mesh: AnyMesh) -> bool:
    """Whether arrays on this mesh have types that say how they lie."""
    return AxisType.Explicit in mesh.axis_types


def without_types(f: Callable[..., PyTree], mesh: AnyMesh) -> Callable[..., PyTree]:
    """A function that is traced on Auto axes, as one to jit that is given arrays of this mesh, types or none.

    What it gives gets its types by `out_shardings`. Nothing is constrained, so the program is that of Auto axes.
    """
    return functools.wraps(f)(lambda *args: f(*with_auto_types(args))) if is_typed(mesh) else f


def with_auto_types(tree: PyTree) -> PyTree:
    """Arrays as they lie, on Auto axes where they lay on Explicit ones; traced, abstract or there."""

    def auto(x: Any) -> Any:
        is_traced = isinstance(x, jax.core.Tracer)
        laid = jax.typeof(x).sharding if is_traced else getattr(x, "sharding", None)
        if not (isinstance(laid, NamedSharding) and is_typed(laid.mesh)):
            return x
        mesh = with_auto_axes("an array", laid.mesh)
        if is_traced:  # no constraint either: how it lies is the compiler's from here on
            with jax.sharding.use_abstract_mesh(abstract_of(mesh)):
                return jax.sharding.reshard(x, PartitionSpec())
        on = NamedSharding(mesh, laid.spec, memory_kind=laid.memory_kind)
        return (
            jax.device_put(x, on) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)
        )

    return jax.tree.map(auto, tree)


def abstract_of(mesh: AnyMesh) -> AbstractMesh:
    """The mesh, without its devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
