"""Kernels inside a model: run per device by `shard_map`, over the axes that the rules in force split arrays over.

A model is traced where all axes are the compiler's, or inside a region that is manual over some of them already:
stages, or the axes of the batch. A kernel's region takes the others that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from meshpar.sharding.context import ambient, param_spec, spec_of
from meshpar.sharding.types import axes_of_spec, axis_sizes, is_spec, problem, spec_axes, without_axes


def outer_axes() -> tuple[str, ...]:
    """Mesh axes over which the code being traced is per device already."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def weight_axes(
    weight: jax.Array | jax.ShapeDtypeStruct, *names: str | None, within: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of more than one rank that split each dim of a weight, and no rows: those of tensor parallelism.

    Empty where nothing is known: without names, in no step, where nothing lays rows out. Inside of a region it is, too,
    unless asked for `within` one, as those axes that are the compiler's there.
    """
    here, outer = ambient(), set(outer_axes())
    if not names or here is None or (outer and not within) or "batch" not in here.rules.names:
        return ((),) * weight.ndim
    sizes, rows = axis_sizes(here.mesh), ("batch", *(("seq",) if "seq" in here.rules.names else ()))
    size = here.mesh.size
    of_rows = outer | set(axes_of_spec(spec_of(jax.ShapeDtypeStruct((size,) * len(rows), weight.dtype), *rows)))
    spec = (*param_spec(weight, *names), *(None for _ in names))[: len(names)]
    return tuple(tuple(one for one in spec_axes(e) if sizes[one] > 1 and one not in of_rows) for e in spec)


def per_device(kernel: Callable[..., Any], specs: Any, out: Any, *, check_vma: bool = True, whole: bool = False) -> Any:
    """A kernel under `shard_map`, manual over the axes of more than one rank that its specs name and no others.

    Args:
      kernel: per-device arrays in, per-device arrays out.
      specs: of its arguments, a tuple with a tree of PartitionSpecs for each.
      out: of its results.
      whole: manual over every axis of the mesh, also those that the specs do not name: for what the compiler cannot
        split, such as calls into a library.
      check_vma: as in `jax.shard_map`. A kernel that communicates over `outer_axes()` needs it off: what varies over
        them is not known inside.

    Raises:
      ValueError: inside another `shard_map` whose axes stand behind these in the mesh, which jax 0.12 cannot compile.
    """
    here = ambient()
    assert here is not None
    sizes = axis_sizes(here.mesh)
    # Naming axes of one rank changes nothing, but their place among the manual ones counts.
    alone = [axis for axis, size in sizes.items() if size == 1]
    specs, out = jax.tree.map(lambda spec: without_axes(spec, alone), (specs, out), is_leaf=is_spec)
    axes = {axis for spec in jax.tree.leaves(specs, is_leaf=is_spec) for entry in spec for axis in spec_axes(entry)}
    outer = outer_axes()
    _check_order(outer, axes, list(sizes))
    if whole:
        axes = set(sizes) - set(outer)
    # Inside another shard_map the mesh is that of the context, some of whose axes are manual already.
    mesh = None if outer else here.mesh
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=out, axis_names=axes, check_vma=check_vma)


def _check_order(outer: Sequence[str], inner: Collection[str], mesh_axes: Sequence[str]) -> None:
    """XLA of jax 0.12 aborts the process when manual axes of nested regions, one after the other, are out of order."""
    ordered = [*sorted(outer, key=mesh_axes.index), *sorted(inner, key=mesh_axes.index)]
    if not outer or ordered == sorted(ordered, key=mesh_axes.index) or jax.__version_info__ < (0, 12):
        return
    raise problem(
        "a kernel of the model inside another shard_map (reduce_gradients='once' or quantize=...)",
        f"run over {', '.join(sorted(inner))} inside {', '.join(sorted(outer))}",
        f"the mesh has its axes in the order {', '.join(mesh_axes)}, and the compiler of jax {jax.__version__} aborts "
        "when inner ones stand before outer ones",
        "let the axes that split the batch stand first, or use reduce_gradients='each_microbatch' and no quantize",
    )
