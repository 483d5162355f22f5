"""Parameters that enter a step as shards: gathered in few bits where they are used, their gradients scattered likewise.

    shard ─cast─► message (int8 or fp8, and scales) ─gather─► whole weight ─► layer
                                                                                │
    shard's gradient ◄─sum in float32◄─ exchange ◄─ message ◄── whole gradient ◄┘

For a strategy with `quantize`. The step is manual over the axes that split the batch, so XLA never sees gradients
to reduce; what other axes split stays split, each of their ranks quantizing what it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.collectives import quantized_all_reduce
from meshpar.collectives.quantized import decoded, encoded, gathered_bytes, scattered_sum
from meshpar.layers.precision import Precision
from meshpar.layers.remat import SECOND_SHARD
from meshpar.layers.scan import leaf_at
from meshpar.parallel import Quantize
from meshpar.sharding.types import Decision, PyTree, axis_sizes, path_str, problem, spec_axes
from meshpar.training.state import Setup


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """How one parameter lies, and what becomes of it."""

    path: str
    index: int
    batch: tuple[tuple[str, ...], ...]
    """Of each dim, the axes that split it and the batch too."""
    others: tuple[tuple[str, ...], ...]
    """Of each dim, the axes that split it and not the batch."""
    per_layer: bool
    """Whether it is a stack that is gathered one layer at a time."""
    exact: bool
    """Vectors are sent as they are: a thousandth of the bytes, and a norm's error is in every element it scales."""
    compute: Any
    reduce: Any
    """Dtypes."""

    @property
    def split(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.batch for axis in dim)

    def of_layer(self) -> _Leaf:
        return dataclasses.replace(self, batch=self.batch[1:], others=self.others[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedGather:
    """Makes whole weights of shards, and shards of whole gradients, inside a `shard_map` over `batch_axes`."""

    quantize: Quantize
    batch_axes: tuple[str, ...]
    other_axes: tuple[str, ...]
    """Those the `shard_map` leaves to XLA."""
    sizes: Mapping[str, int]
    leaves: Mapping[str, _Leaf]
    """By path."""
    specs: PyTree
    """How parameters enter the `shard_map`, and how gradients leave it."""

    def whole(self, params: PyTree, key: jax.Array) -> PyTree:
        """All weights, whole, in the compute dtype."""
        return self._map(lambda leaf, x: self._arrived(leaf, self._message(leaf, x, key), x.shape), params)

    def scattered(self, grads: PyTree, key: jax.Array) -> PyTree:
        """Of the whole gradients of every rank, this one's shards of the sums."""
        return self._map(lambda leaf, g: self._scattered(leaf, g, key), grads)

    def entered(self, params: PyTree, key: jax.Array) -> PyTree:
        """Weights, whole but for the stacks that `layer` gathers; gradients by `params` are shards of the sums.

        Args:
          params: in float32 at the least, so that their gradients are.
          key: for stochastic rounding; the same on all ranks.
        """

        def enter(leaf: _Leaf, x: jax.Array) -> jax.Array:
            return x if leaf.per_layer else self._unsharded(leaf, x, key)

        return self._map(enter, params)

    def layer(self, key: jax.Array, at: str, params: PyTree) -> PyTree:
        """The weights of one layer, whole.

        Args:
          key: as for `entered`.
          at: how the paths of the model's stacked layers end, before the paths inside a layer.
          params: the layer's shards.

        Raises:
          ValueError: a path that no parameter has, or several that are split in different ways.
        """

        def gather(path: Any, x: jax.Array) -> jax.Array:
            leaf = self._found(at, path_str(path))
            return self._unsharded(leaf.of_layer(), x, key) if leaf.per_layer else x

        return jax.tree_util.tree_map_with_path(gather, params)

    @property
    def per_layer(self) -> list[str]:
        """Paths of the parameters that wait for `layer`."""
        return [leaf.path for leaf in self.leaves.values() if leaf.per_layer]

    def _map(self, f: Callable[[_Leaf, jax.Array], jax.Array], tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: f(self.leaves[path_str(path)], x), tree)

    def _found(self, at: str, path: str) -> _Leaf:
        return leaf_at(at, path, self.leaves, lambda leaf: (leaf.batch, leaf.others, leaf.per_layer))

    # -- One leaf -----------------------------------------------------------------------------------------------------

    def _unsharded(self, leaf: _Leaf, x: jax.Array, key: jax.Array) -> jax.Array:
        """The whole weight, by way of a message; its gradient comes back as the shard of the sum."""

        @jax.custom_vjp
        def arrived(x: jax.Array, message: jax.Array, key: jax.Array) -> jax.Array:
            return self._arrived(leaf, message, x.shape)

        def forward(x: jax.Array, message: jax.Array, key: jax.Array) -> Any:
            return arrived(x, message, key), key

        def backward(key: jax.Array, g: jax.Array) -> Any:
            return self._scattered(leaf, g, key).astype(x.dtype), None, None

        arrived.defvjp(forward, backward)
        message = self._message(leaf, lax.stop_gradient(x), key)
        if self._levels(leaf)[1]:
            message = checkpoint_name(message, SECOND_SHARD)
        return arrived(x, message, key)

    def _message(self, leaf: _Leaf, x: jax.Array, key: jax.Array) -> jax.Array:
        """`[ranks of other axes, nodes, bytes]`: what is sent inside a node; gathered across nodes, where there are."""
        if not leaf.split:
            return x.astype(leaf.compute)
        dtype, outer = self._dtypes(leaf)[0], self._levels(leaf)[1]

        def local(x: jax.Array, key: jax.Array) -> jax.Array:
            flat = x.astype(leaf.compute).reshape(-1)
            own = self._noise(leaf, key, flat, leaf.split)
            if dtype is None:
                message = lax.bitcast_convert_type(flat, jnp.uint8).reshape(-1)
            else:
                message = encoded(flat, dtype, self.quantize.block, own)
            return (gathered_bytes(message, outer) if outer else message[None])[None]

        return self._manual(local, self._other_spec(leaf), PartitionSpec(self.other_axes or None), "quantize")(x, key)

    def _arrived(self, leaf: _Leaf, message: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The whole weight from the messages of a node; `shape` is the shard's."""
        if not leaf.split:
            return message
        dtype, (inner, outer) = self._dtypes(leaf)[0], self._levels(leaf)
        counts = [math.prod(self.sizes[axis] for axis in dim) for dim in leaf.others]
        local_shape = [size // count for size, count in zip(shape, counts, strict=True)]
        num_elements = math.prod(local_shape)

        def local(message: jax.Array, key: None) -> jax.Array:
            messages = gathered_bytes(message[0], inner) if inner else message
            if dtype is None:
                each = messages.reshape(*messages.shape[:-1], -1, leaf.compute.itemsize)
                parts = lax.bitcast_convert_type(each, leaf.compute)
            else:
                parts = decoded(messages, num_elements, dtype, self.quantize.block, leaf.compute)
            return _joined(parts.reshape(self._counts((*inner, *outer)) + local_shape), (*inner, *outer), leaf.batch)

        return self._manual(local, PartitionSpec(self.other_axes or None), self._other_spec(leaf), "gather")(
            message, None
        )

    def _scattered(self, leaf: _Leaf, g: jax.Array, key: jax.Array) -> jax.Array:
        """This rank's shard of the sum of a whole gradient, in the reduction dtype or float32."""
        dtype, (inner, outer) = self._dtypes(leaf)[1], self._levels(leaf)
        rest = tuple(axis for axis in self.batch_axes if axis not in leaf.split)
        block = self.quantize.block

        def local(g: jax.Array, key: jax.Array) -> jax.Array:
            order = (*outer, *inner)
            parts, shape = _parted(g, order, leaf.batch, self._counts(order))
            if dtype is None:
                parts = parts.astype(leaf.reduce)
                mine = lax.psum_scatter(parts, order) if order else parts[0]
                return (lax.psum(mine, rest) if rest else mine).reshape(shape)
            own = self._noise(leaf, key, g, self.batch_axes)
            keys = (None, None) if own is None else jax.random.split(own)
            options: dict[str, Any] = {"dtype": dtype, "block": block}
            mine = scattered_sum(parts, axis=inner, outer=outer or None, key=keys[0], **options)
            if rest:  # replicas of the shard: their links are the slowest, so what goes over them is quantized too
                mine = quantized_all_reduce(mine, axis=rest, key=keys[1], **options)
            return mine.reshape(shape)

        return self._manual(local, self._other_spec(leaf), self._other_spec(leaf), "scatter")(g, key)

    def _dtypes(self, leaf: _Leaf) -> tuple[str | None, str | None]:
        """Of the weight and of the gradient on the wire; None: their own."""
        sent = leaf.split and not leaf.exact
        return (self.quantize.weights, self.quantize.gradients) if sent else (None, None)

    def _levels(self, leaf: _Leaf) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(axes inside a node, axes across nodes) that split a leaf; all are inside where there is no second shard."""
        second = spec_axes(self.quantize.secondary)
        inner = tuple(axis for axis in leaf.split if axis in second)
        return (inner, tuple(axis for axis in leaf.split if axis not in second)) if inner else (leaf.split, ())

    def _counts(self, axes: tuple[str, ...]) -> list[int]:
        return [self.sizes[axis] for axis in axes]

    def _other_spec(self, leaf: _Leaf) -> PartitionSpec:
        return PartitionSpec(*(dim or None for dim in leaf.others))

    def _noise(self, leaf: _Leaf, key: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array | None:
        """A key of this leaf's own; layers and micro-steps, which share a program, differ by the bits they hold."""
        if not self.quantize.stochastic or leaf.exact or not leaf.split:
            return None
        bits = lax.bitcast_convert_type(jnp.sum(x.astype(jnp.float32)), jnp.uint32)
        # Odd constants (the golden ratio's, and MurmurHash3's) spread small numbers over all bits.
        here = lax.axis_index(axes).astype(jnp.uint32) * np.uint32(0x85EBCA6B)
        return jax.random.fold_in(key, bits ^ here ^ np.uint32(leaf.index * 0x9E3779B1 % 2**32))

    def _manual(self, local: Callable[..., jax.Array], spec: PartitionSpec, out: PartitionSpec, scope: str) -> Any:
        """A function of (array, key) per device of the other axes too.

        Blocks are made of what is here, and nothing else moves. The key is an argument: what a nested `shard_map`
        closes over belongs to the mesh outside of it.
        """
        local = jax.named_scope(f"unshard_{scope}")(local)
        if not self.other_axes:
            return local

        def run(x: jax.Array, key: jax.Array | None) -> jax.Array:
            def inside(x: jax.Array, key: jax.Array | None) -> jax.Array:
                return local(x, None if key is None else jax.random.wrap_key_data(key))

            whole = PartitionSpec()
            # It sends over the axes of the engine's region around it, and what varies over those is not known inside.
            return jax.shard_map(
                inside, in_specs=(spec, whole), out_specs=out, axis_names=set(self.other_axes), check_vma=False
            )(x, None if key is None else jax.random.key_data(key))

        return run


def make_unshard(setup: Setup, precision: Precision, batch_axes: tuple[str, ...]) -> QuantizedGather | None:
    """For a setup whose strategy quantizes; None where it does not, or where one device holds the whole batch.

    Raises:
      ValueError: no parameter is split over an axis that splits the batch.
    """
    quantize = setup.strategy.quantize
    if quantize is None or not batch_axes:
        return None
    sizes = axis_sizes(setup.mesh)
    leaves = {
        decision.path: _leaf(index, decision, precision, batch_axes, sizes)
        for index, decision in enumerate(setup.table.params)
    }
    if not any(leaf.split for leaf in leaves.values()):
        exists = f"no parameter is split over an axis that splits the batch ({', '.join(f'`{a}`' for a in batch_axes)})"
        fix = "give the axis that splits parameters a size above 1, or leave `quantize` out"
        raise problem(f"strategy {setup.strategy.label}", "quantize what is gathered and scattered", exists, fix)
    specs = [PartitionSpec(*(dim or None for dim in leaf.batch)) for leaf in leaves.values()]
    return QuantizedGather(
        quantize=quantize,
        batch_axes=batch_axes,
        other_axes=tuple(axis for axis, size in sizes.items() if size > 1 and axis not in batch_axes),
        sizes=sizes,
        leaves=leaves,
        specs=jax.tree.unflatten(jax.tree.structure(setup.layout.variables.params), specs),
    )


def _leaf(
    index: int, decision: Decision, precision: Precision, batch_axes: tuple[str, ...], sizes: Mapping[str, int]
) -> _Leaf:
    leaf = decision.leaf
    by_dim = [tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1) for entry in decision.spec]
    batch = tuple(tuple(axis for axis in dim if axis in batch_axes) for dim in by_dim)
    others = tuple(tuple(axis for axis in dim if axis not in batch_axes) for dim in by_dim)
    exact = leaf.layer_ndim < 2
    compute = jnp.dtype(precision.compute or leaf.dtype)
    return _Leaf(
        path=decision.path,
        index=index,
        batch=batch,
        others=others,
        per_layer=leaf.is_stacked and not batch[0] and any(batch) and not exact,
        exact=exact,
        compute=compute,
        reduce=precision.reduce_dtype(compute),
    )


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def _joined(parts: jax.Array, axes: tuple[str, ...], by_dim: tuple[tuple[str, ...], ...]) -> jax.Array:
    """`[a rank of each axis..., shard...] -> whole`: the parts laid end to end along the dims that their axes split."""
    order = [n for dim, names in enumerate(by_dim) for n in (*(axes.index(name) for name in names), len(axes) + dim)]
    shape = parts.shape
    sizes = [
        math.prod(shape[axes.index(name)] for name in names) * shape[len(axes) + dim]
        for dim, names in enumerate(by_dim)
    ]
    return parts.transpose(order).reshape(sizes)


def _parted(
    whole: jax.Array, axes: tuple[str, ...], by_dim: tuple[tuple[str, ...], ...], counts: list[int]
) -> tuple[jax.Array, list[int]]:
    """`whole -> ([ranks of all axes, elements of a shard], shape of a shard)`: `_joined` undone."""
    count_of = dict(zip(axes, counts, strict=True))
    shard = [size // math.prod(count_of[n] for n in names) for size, names in zip(whole.shape, by_dim, strict=True)]
    cut = whole.reshape(
        [n for names, size in zip(by_dim, shard, strict=True) for n in (*map(count_of.get, names), size)]
    )
    places = [name for dim, names in enumerate(by_dim) for name in (*names, dim)]
    order = [places.index(name) for name in (*axes, *range(len(shard)))]
    return cut.transpose(order).reshape(math.prod(counts), math.prod(shard)), shard
