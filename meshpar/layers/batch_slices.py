"""Layers on slices of the local batch, whose communication overlaps with the matmuls of other slices.

    local batch  [a a b b]     a: norm ─► gather ─► matmul ─► scatter ─► ...
                               b:   norm ─► gather ─► matmul ─► scatter ─► ...

The slices are independent, so the compiler can schedule the matmuls of a slice during the messages of the next.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (section 3.2.1); Wang et al. 2024, "Domino: Eliminating
Communication in LLM Training via Generic Tensor Slicing and Overlapping".
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layers.auxiliary import is_counted
from meshpar.sharding.activations import batch_divided
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import BOUNDARIES, TraceOption, ambient, spec_of
from meshpar.sharding.errors import MeshparError, check_cases, check_divides, problem
from meshpar.sharding.types import PyTree, axes_of_spec, axis_sizes


def split_batch(x: PyTree, count: int) -> tuple[PyTree, ...]:
    """Divide arrays `[batch, ...]` into `count` slices. Each slice has the same number of examples of every device."""
    leaves, structure = jax.tree.flatten(x)
    sliced = [_slice(leaf, count) for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, [leaf[i] for leaf in sliced]) for i in range(count))


def join_batch(parts: tuple[PyTree, ...]) -> PyTree:
    """Join the slices of `split_batch` into arrays `[batch, ...]`, in the original order of examples."""
    return jax.tree.map(lambda *xs: _join(xs), *parts)


def check_batch_dims(x: PyTree, per_example: PyTree, count: int) -> None:
    """Check that the first dim of x is the batch, and the first dim of `per_example` arrays is the batch or 1."""
    where, requested = f"train_step(batch_slices={count})", f"run layers on {count} slices of the batch"
    leaves, boundaries = jax.tree.leaves(x), BOUNDARIES.value
    is_mapped = any(type(leaf).__name__ == "BatchTracer" for leaf in leaves)  # the class is not public
    reason = "the layers run under jax.vmap on a single example"
    fix = "call scan_layers on the full batch, or use batch_slices=1"
    check_cases(where, requested, "unsupported-feature", (is_mapped, reason, fix))
    num_examples = leaves[0].shape[0] if leaves and jnp.ndim(leaves[0]) else 0
    num_examples = num_examples if boundaries is None else boundaries.num_examples
    for name, tree, sizes, fix in (
        ("x", x, (num_examples,), "make the batch the first dim of all leaves"),
        ("per_example", per_example, (num_examples, 1), "make the batch the first dim, or use x[None] for all"),
    ):
        for leaf in jax.tree.leaves(tree):
            is_wrong = jnp.shape(leaf)[:1] not in [(size,) for size in sizes]
            reason = f"`{name}` of scan_layers has shape {jnp.shape(leaf)}, and the batch has {num_examples} examples"
            check_cases(where, requested, "wrong-shape", (is_wrong, reason, f"{fix}, or use batch_slices=1"))


def layer_on_slices(layer: Callable[..., Any], per_example: PyTree, count: int) -> Callable[..., Any]:
    """Return a layer that runs on a tuple of slices of x, with the same weights for all slices.

    `layer` is a function `(x, params, *inputs, per_example) -> (x, Aux or None)`, without `per_example` if it is None.
    Arrays in `per_example` with a first dim of 1 are used for all slices, larger arrays are sliced. An `Aux` with
    `sums` is computed from the sums over all slices. Otherwise its counts are summed over slices, and its loss and
    floating metrics are averaged. Typed PRNG keys (`jax.random.key`) in the inputs
    are different for each slice. With other keys, and with keys in closures, all slices draw the same numbers.
    """
    leaves, structure = jax.tree.flatten(per_example)
    pieces = [[leaf] * count if jnp.shape(leaf)[0] == 1 else _slice(leaf, count) for leaf in leaves]
    sliced = [jax.tree.unflatten(structure, [piece[i] for piece in pieces]) for i in range(count)]

    def on_slices(xs: tuple[PyTree, ...], params: PyTree, *inputs: PyTree) -> Any:
        statistics = SliceStatistics()
        with batch_divided(count), SLICES.set(statistics), _explain_errors(count):
            outputs = [
                layer(x, params, *(_fold_in(tree, i) for tree in inputs), *(() if local is None else (local,)))
                for i, (x, local) in enumerate(zip(xs, sliced, strict=True))
            ]
        ys, aux = (tuple(values) for values in zip(*outputs, strict=True))
        statistics.check(count, sum(result is not None and result.sums is not None for result in aux))
        if aux[0] is None:
            return ys
        totals = jax.tree.map(lambda *values: sum(values[1:], values[0]), *aux)
        if totals.sums is not None:
            return ys, totals.sums.finish(totals.sums.values)._replace(sums=None)
        return ys, jax.tree.map(lambda total: total if is_counted(total) else total / count, totals)

    return on_slices


@dataclasses.dataclass(eq=False)
class SliceStatistics:
    """Counts the layers inside slices whose losses are not means over examples. Compared by identity, per trace."""

    num_layers: int = 0

    def check(self, count: int, num_sums: int) -> None:
        """Check that the sums of all these layers are returned, so that their losses do not depend on the slices."""
        reason = "the loss of a router is a product of means over tokens, so the mean over slices is a different loss"
        fix = (
            "return `stats.aux` of the layer's only MoE layer, use auxiliary_weight=0 and z_weight=0, or batch_slices=1"
        )
        is_lost = num_sums != self.num_layers and self.num_layers > 0, reason, fix
        check_cases(f"train_step(batch_slices={count})", "add up router statistics", "unsupported-feature", is_lost)


SLICES = TraceOption[SliceStatistics]("slices")


def is_sliced() -> bool:
    """Return whether a layer is traced on a slice of the batch."""
    return SLICES.value is not None


def note_statistics() -> None:
    """Register a layer whose loss is not a mean over examples. Layers on slices of a batch have to return its sums."""
    if (statistics := SLICES.value) is not None:
        statistics.num_layers += 1


@contextlib.contextmanager
def _explain_errors(count: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, MeshparError):
            raise
        where, reason = f"train_step(batch_slices={count})", str(error).partition("\n")[0].rstrip(".")
        fix = "pass arrays with a batch dim as scan_layers(per_example=...) instead of a closure, or use batch_slices=1"
        raise problem(where, "run a layer on a slice of the batch", reason, fix, "wrong-shape") from error


def _fold_in(tree: PyTree, index: int) -> PyTree:
    """Fold the index of a slice into the PRNG keys of a tree."""

    def fold(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return leaf
        return jax.vmap(lambda key: jax.random.fold_in(key, index))(leaf.reshape(-1)).reshape(leaf.shape)

    return jax.tree.map(fold, tree)


def _batch_axes(x: jax.Array) -> tuple[Any, int]:
    """Return the mesh axes that shard the batch, as an entry of a spec, and the number of shards."""
    context = ambient()
    if context is None or context.mesh.size == 1:
        return None, 1
    axes = axes_of_spec(spec_of(jax.ShapeDtypeStruct(x.shape[:1], x.dtype), "batch"))
    return (axes or None), math.prod(axis_sizes(context.mesh)[axis] for axis in axes)


def _constrain(x: jax.Array, *entries: Any) -> jax.Array:
    """Constrain the first dims of x to these entries of a PartitionSpec."""
    if all(entry is None for entry in entries):
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(entries))
    return with_layout(x, PartitionSpec(*entries, *free))


def _slice(x: jax.Array, count: int) -> list[jax.Array]:
    where, requested = f"train_step(batch_slices={count})", f"divide x of shape {x.shape} into slices of the batch"
    case = x.ndim == 0, "x has a scalar leaf", "make the batch the first dim of all leaves"
    check_cases(where, requested, "wrong-shape", case)
    axes, shards = _batch_axes(x)
    fix = f"use a multiple of {shards * count} examples per micro-step, or batch_slices=1"
    check_divides(where, f"{requested} on each of {shards} shards", x.shape[0], shards * count, fix)
    by_shard = _constrain(x.reshape(shards, count, -1, *x.shape[1:]), axes, None, None)
    return [_constrain(by_shard[:, i].reshape(-1, *x.shape[1:]), axes) for i in range(count)]


def _join(parts: tuple[jax.Array, ...]) -> jax.Array:
    axes, shards = _batch_axes(parts[0])
    by_shard = jnp.stack([part.reshape(shards, -1, *part.shape[1:]) for part in parts], axis=1)
    return _constrain(_constrain(by_shard, axes, None, None).reshape(-1, *parts[0].shape[1:]), axes)
