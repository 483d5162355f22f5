"""Layers that run on slices of each device's rows beside each other: one's messages behind another's matmuls.

    rows of a device  [a a b b]     a: norm ─► gather ─► matmul ─► scatter ─► ...
                                    b:   norm ─► gather ─► matmul ─► scatter ─► ...

Nothing in one slice waits for the other, so the compiler's scheduler fills the time that one waits for its messages
with matmuls of the other: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (section 3.2.1), and Wang et al. 2024,
"Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layers.auxiliary import is_counted
from meshpar.sharding.activations import batch_divided
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import ambient, current, spec_of
from meshpar.sharding.types import MeshparError, PyTree, axes_of_spec, axis_sizes, problem


def slices(x: PyTree, count: int) -> tuple[PyTree, ...]:
    """A pytree whose leaves have the batch first, as `count` of them, each with every device's share of its rows.

    Raises:
      ValueError: a leaf whose rows do not go evenly into the slices of all devices.
    """
    leaves, structure = jax.tree.flatten(x)
    cut = [_cut(leaf, count) for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, [leaf[at] for leaf in cut]) for at in range(count))


def joined(parts: tuple[PyTree, ...]) -> PyTree:
    """`slices` undone."""
    return jax.tree.map(lambda *xs: _joined(xs), *parts)


def check_rows(x: PyTree, per_example: PyTree, count: int) -> None:
    """See that x has the batch first, and what stands beside it either that or one row.

    Raises:
      ValueError: it has not; or x is one row of it, under `jax.vmap`.
    """
    where, boundaries = f"train_step(interleave={count})", current().boundaries
    leaves, asked = jax.tree.leaves(x), f"run layers on {count} slices of the rows"
    if any(type(leaf).__name__ == "BatchTracer" for leaf in leaves):  # jax gives the class no public name
        exists = "the layers run under jax.vmap, which shows them one row"
        raise problem(where, asked, exists, "run scan_layers on the whole batch, or use interleave=1")
    rows = leaves[0].shape[0] if boundaries is None and leaves and jnp.ndim(leaves[0]) else 0
    rows = rows if boundaries is None else boundaries.num_examples
    for leaf in leaves:
        if jnp.shape(leaf)[:1] != (rows,):
            exists = f"x of scan_layers has shape {jnp.shape(leaf)}, and the batch {rows} rows"
            raise problem(where, asked, exists, "make the batch the first dim of every leaf of x, or use interleave=1")
    for leaf in jax.tree.leaves(per_example):
        if jnp.shape(leaf)[:1] not in ((rows,), (1,)):
            exists = f"`beside` of scan_layers has shape {jnp.shape(leaf)}, and x {rows} rows"
            raise problem(where, asked, exists, "give it a first dim of as many rows, or of one, x[None], for all")


def in_slices(layer: Callable[..., Any], per_example: PyTree, count: int) -> Callable[..., Any]:
    """The layer as one of a tuple of slices of x; weights, and what else it has of its own, are the same for all.

    Args:
      layer: (x, params, others..., beside where there is one) -> (x, Aux or None).
      beside: what layers read of each row; arrays with one row are for all.

    Returns:
      (tuple of x, params, others...) -> tuple of x, or (that, Aux). Of an `Aux` counts are sums over slices, and the
      loss and all else means. Typed random keys (`jax.random.key`) among the others are another for each slice; of
      keys of other kinds, and of those that a layer closes over, all slices draw the same numbers.
    """
    rows = max((jnp.shape(one)[0] for one in jax.tree.leaves(per_example)), default=1)
    own = [per_example] * count if rows == 1 else _per_example_slices(per_example, count)

    def each(xs: tuple[PyTree, ...], params: PyTree, *others: PyTree) -> Any:
        more = [() if per_example is None else (one,) for one in own]
        with batch_divided(count), _refusals_explained(count):
            given = [
                layer(x, params, *(_own_keys(other, at) for other in others), *more[at]) for at, x in enumerate(xs)
            ]
        aux = [one for _, one in given]
        ys = tuple(y for y, _ in given)
        return ys if aux[0] is None else (ys, jax.tree.map(_over_slices, *aux))

    return each


@contextlib.contextmanager
def _refusals_explained(count: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, MeshparError):
            raise
        exists = str(error).partition("\n")[0].rstrip(".")
        fix = "where layers close over rows, give these to scan_layers(per_example=...); or use interleave=1"
        raise problem(f"train_step(interleave={count})", "run a layer on a slice of the rows", exists, fix) from error


def _over_slices(*of_each: jax.Array) -> jax.Array:
    total = sum(of_each[1:], of_each[0])
    return total if is_counted(total) else total / len(of_each)


def _per_example_slices(per_example: PyTree, count: int) -> list[PyTree]:
    whole = [leaf for leaf in jax.tree.leaves(per_example) if leaf.shape[0] == 1]
    cut = slices([leaf for leaf in jax.tree.leaves(per_example) if leaf.shape[0] > 1], count)
    found = []
    for one in cut:
        rest, once = iter(one), iter(whole)
        found.append(jax.tree.map(lambda leaf, a=rest, b=once: next(a if leaf.shape[0] > 1 else b), per_example))
    return found


def _own_keys(tree: PyTree, at: int) -> PyTree:
    """Random keys made another for slice `at`; all else as it is."""

    def own(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return leaf
        return jax.vmap(lambda key: jax.random.fold_in(key, at))(leaf.reshape(-1)).reshape(leaf.shape)

    return jax.tree.map(own, tree)


def _of_batch(x: jax.Array) -> tuple[Any, int]:
    """What splits an array's rows, as an entry of a spec, and in how many shards."""
    here = ambient()
    if here is None or here.mesh.size == 1:
        return None, 1
    spec = spec_of(jax.ShapeDtypeStruct(x.shape[:1], x.dtype), "batch")
    axes = axes_of_spec(spec)
    return (axes or None), math.prod(axis_sizes(here.mesh)[axis] for axis in axes)


def _laid(x: jax.Array, *entries: Any) -> jax.Array:
    """The first dims by these entries of a spec, the others as the compiler likes."""
    if all(entry is None for entry in entries):
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(entries))
    return with_layout(x, PartitionSpec(*entries, *free))


def _cut(x: jax.Array, count: int) -> list[jax.Array]:
    if x.ndim == 0 or x.shape[0] % count:
        where, asked = f"train_step(interleave={count})", f"run layers on {count} slices of x of shape {x.shape}"
        exists = "its first dim is no multiple of that" if x.ndim else "it has no dim of rows"
        raise problem(where, asked, exists, "give scan_layers x with the batch as the first dim of every leaf")
    axes, shards = _of_batch(x)
    if x.shape[0] % (shards * count):
        asked = f"cut {x.shape[0]} rows, over {shards} devices, into {count} slices of each device's"
        fix = f"use a multiple of {shards * count} rows a micro-step, or interleave=1"
        raise problem(f"train_step(interleave={count})", asked, f"they are no multiple of {shards * count}", fix)
    by_device = _laid(x.reshape(shards, count, -1, *x.shape[1:]), axes, None, None)
    return [_laid(by_device[:, at].reshape(-1, *x.shape[1:]), axes) for at in range(count)]


def _joined(parts: tuple[jax.Array, ...]) -> jax.Array:
    axes, shards = _of_batch(parts[0])
    by_device = jnp.stack([part.reshape(shards, -1, *part.shape[1:]) for part in parts], axis=1)
    return _laid(_laid(by_device, axes, None, None).reshape(-1, *parts[0].shape[1:]), axes)
