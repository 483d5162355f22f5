"""Kernels inside a model: `shard_map` regions over the mesh axes that the current rules use.

The surrounding code is traced on Auto axes, or in a region that is already manual over some axes (pipeline stages or
the batch axes). The region of a kernel is manual over further axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from meshpar.sharding.context import ambient, param_spec, spec_of
from meshpar.sharding.errors import problem
from meshpar.sharding.types import PyTree, axes_of_spec, axis_sizes, is_spec, spec_axes, without_axes


def outer_axes() -> tuple[str, ...]:
    """Return the manual axes of the surrounding code."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def weight_axes(
    weight: jax.Array | jax.ShapeDtypeStruct, *names: str | None, in_region: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that shard each dim of a weight, except axes of the batch or sequence.

    Args:
      weight: an array, or its shape and dtype.
      *names: logical name of each dim.
      in_region: whether to return axes if the surrounding code is manual. By default the result is empty there.

    Returns:
      For each dim, a tuple of axes larger than 1. All tuples are empty without names, outside of a step, or without a
      rule for the batch.
    """
    context, outer = ambient(), set(outer_axes())
    if not names or context is None or (outer and not in_region) or "batch" not in context.rules.names:
        return ((),) * weight.ndim
    sizes, dims = axis_sizes(context.mesh), ("batch", *(("seq",) if "seq" in context.rules.names else ()))
    like = jax.ShapeDtypeStruct((context.mesh.size,) * len(dims), weight.dtype)  # any mesh axis divides its dims
    excluded = outer | set(axes_of_spec(spec_of(like, *dims)))
    spec = (*param_spec(weight, *names), *(None for _ in names))[: len(names)]
    return tuple(tuple(a for a in spec_axes(entry) if sizes[a] > 1 and a not in excluded) for entry in spec)


def per_device(
    kernel: Callable[..., Any], specs: PyTree, out_specs: PyTree, *, check_vma: bool = True, all_axes: bool = False
) -> Callable[..., PyTree]:
    """Return a kernel under `shard_map`, manual over the axes in its specs that are larger than 1.

    Args:
      kernel: function of local arrays.
      specs: tuple with a pytree of PartitionSpecs for each argument.
      out_specs: specs of the results.
      check_vma: as in `jax.shard_map`. Use False for a kernel that communicates over `outer_axes()`, because the
        region does not know which values vary over them.
      all_axes: whether the region is manual over all mesh axes, for kernels that the compiler cannot partition.
    """
    context = ambient()
    assert context is not None
    sizes, outer = axis_sizes(context.mesh), outer_axes()
    # The result does not depend on axes of size 1, but the compiler checks their position among the manual axes.
    unused = [axis for axis, size in sizes.items() if size == 1]
    specs, out_specs = jax.tree.map(lambda spec: without_axes(spec, unused), (specs, out_specs), is_leaf=is_spec)
    axes = {axis for spec in jax.tree.leaves(specs, is_leaf=is_spec) for axis in axes_of_spec(spec)}
    # XLA in jax 0.12 requires the manual axes of nested regions in mesh order, and aborts otherwise.
    ordered = [axis for region in (outer, axes) for axis in sizes if axis in region]
    if outer and jax.__version_info__ >= (0, 12) and ordered != sorted(ordered, key=list(sizes).index):
        where = "a kernel of the model inside a shard_map (reduce_gradients='once' or quantize=...)"
        requested = f"run over {', '.join(sorted(axes))} inside {', '.join(sorted(outer))}"
        reason = f"the compiler of jax {jax.__version__} aborts if inner axes precede outer axes in {', '.join(sizes)}"
        fix = "put the batch axes first in the mesh, or use reduce_gradients='each_microbatch' without quantize"
        raise problem(where, requested, reason, fix, code="unsupported-feature")
    if all_axes:
        axes = set(sizes) - set(outer)
    # In an outer region the mesh is the context mesh, which has the manual axes.
    mesh = None if outer else context.mesh
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)
