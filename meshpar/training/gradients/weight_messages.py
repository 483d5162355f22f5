"""ZeRO++: quantized all-gathers of parameters and quantized reduce-scatters of gradients.

    shard ─cast─► message (int8 or fp8, and scales) ─all-gather─► full weight ─► layer
                                                                                   │
    gradient shard ◄─sum in float32◄─ all-to-all ◄─ message ◄── full gradient ◄────┘

For strategies with `quantize`. The step runs in a `shard_map` over the batch axes, so XLA inserts no reductions of
gradients. Other mesh axes still shard the parameters, and each of their ranks quantizes its local values. Wang et al.
2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import quantized_all_reduce
from meshpar.collectives.quantized import decoded, encoded, gathered_bytes, scattered_sum
from meshpar.layers.precision import Precision
from meshpar.layers.scan import leaf_at
from meshpar.parallel import Quantize
from meshpar.parallel.execution import Execution
from meshpar.sharding.errors import problem
from meshpar.sharding.types import Leaf, PyTree, axes_of_spec, path_str, spec_axes
from meshpar.training.gradients.layer_loop import LayerLayout
from meshpar.training.state import Setup


@dataclasses.dataclass(frozen=True)
class MessageLeaf:
    """A parameter, as its messages need it."""

    path: str
    index: int
    shard: tuple[int, ...]
    """Shape of a shard over the batch axes."""
    batch: tuple[tuple[str, ...], ...]
    """For each dim, the batch axes over which it is gathered."""
    owned: tuple[tuple[str, ...], ...]
    """For each dim, the batch axes that shard it also in the layer, such as those that shard experts in stages."""
    others: tuple[tuple[str, ...], ...]
    """For each dim that is not gathered, the other mesh axes that shard it. In a gathered dim, their shards would not
    be contiguous after the gather, so every rank of these axes gathers the full dim."""
    per_layer: bool
    """True for a stack that is gathered one layer at a time."""
    exact: bool
    """True for vectors, which are not quantized: they have about 0.1 % of the bytes, and an error in a norm's scale
    affects all elements that it scales."""
    compute: Any
    """Dtype of the gathered weight."""
    reduce: Any
    """Dtype in which unquantized gradients are summed."""

    @staticmethod
    def of(
        leaf: Leaf, index: int, shape: tuple[int, ...], spec: PartitionSpec, owned: PartitionSpec, *, setup: Setup,
        precision: Precision,
    ) -> MessageLeaf:  # fmt: skip
        """Return a parameter of this shape and sharding. `owned` is the sharding that the layer keeps."""
        sizes, batch_axes = setup.sizes, setup.batch_axes
        kept = set(axes_of_spec(owned))
        padded = [*spec, *[None] * (len(shape) - len(spec))]
        by_dim = [[axis for axis in spec_axes(entry) if sizes[axis] > 1] for entry in padded]
        exact, compute = leaf.layer_ndim < 2, jnp.dtype(precision.compute or leaf.dtype)
        batch = tuple(tuple(axis for axis in dim if axis in batch_axes and axis not in kept) for dim in by_dim)
        return MessageLeaf(
            path=leaf.path,
            index=index,
            shard=tuple(
                size // math.prod(sizes[axis] for axis in dim if axis in batch_axes)
                for size, dim in zip(shape, by_dim, strict=True)
            ),
            batch=batch,
            owned=tuple(tuple(axis for axis in dim if axis in batch_axes and axis in kept) for dim in by_dim),
            others=tuple(
                tuple(axis for axis in dim if axis not in batch_axes and not gathered)
                for dim, gathered in zip(by_dim, batch, strict=True)
            ),
            per_layer=leaf.is_stacked and not batch[0] and any(batch) and not exact,
            exact=exact,
            compute=compute,
            reduce=precision.reduce_dtype(compute),
        )

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.batch for axis in dim)

    def spec(self, *, is_gathered: bool = False, all_axes: bool = False) -> PartitionSpec:
        """Return the spec of the shards or of the gathered weight, over the batch axes or over all axes."""
        parts = ((self.others if all_axes else ()), self.owned, (() if is_gathered else self.batch))
        dims = itertools.zip_longest(*(part or [()] * len(self.shard) for part in parts))
        return PartitionSpec(*(tuple(itertools.chain(*dim)) or None for dim in dims))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMessages:
    """Gathers weights and scatters gradients inside a `shard_map` over `batch_axes`."""

    formats: Quantize
    batch_axes: tuple[str, ...]
    deferred_axes: tuple[str, ...]
    """Batch axes over which gradients are reduced once, after the micro-steps, with `reduce_across`."""
    other_axes: tuple[str, ...]
    """Mesh axes that the `shard_map` leaves to XLA."""
    sizes: Mapping[str, int]
    leaves: Mapping[str, MessageLeaf]
    """Parameters by path."""
    specs: PyTree
    """Specs of the parameters and gradients over the batch axes."""

    def gather_all(self, params: PyTree, key: jax.Array) -> PyTree:
        """Return the full weights in the compute dtype. The gather cannot be differentiated; use `scatter_all`."""
        return self._map(lambda leaf, x: self._decode(leaf, self._encode(leaf, x, key)), params)

    def scatter_all(self, grads: PyTree, key: jax.Array) -> PyTree:
        """Sum full gradients over ranks and return the local shards."""
        return self._map(lambda leaf, g: self._scatter(leaf, g, key), grads)

    def gather_unstacked(self, params: PyTree, key: jax.Array) -> PyTree:
        """Gather the weights that are not gathered layer by layer. The backward pass scatters their gradients.

        Shards are float32 or a larger dtype, and so are gradients. The PRNG key is equal on all ranks.
        """
        return self._map(lambda leaf, x: x if leaf.per_layer else self._gather(leaf, x, key), params)

    def layout(self, key: jax.Array, stack_path: str) -> LayerLayout:
        """Return the communication of the weights of a layer.

        The paths of the stacked parameters are `stack_path` and the paths in the layer, after an arbitrary prefix.
        """

        def on_layer(f: Callable[[MessageLeaf, jax.Array], jax.Array]) -> Callable[[PyTree], PyTree]:
            return functools.partial(self._map_layer, stack_path, f)

        encode = on_layer(lambda leaf, x: self._encode(leaf, x, key))
        decode = on_layer(self._decode)
        is_saved = self.formats.secondary is not None
        return LayerLayout(
            gather=decode if is_saved else lambda shards: decode(encode(shards)),
            scatter=on_layer(lambda leaf, g: self._scatter(leaf, g, key)),
            message=encode if is_saved else None,
            weights=on_layer(lambda leaf, x: self._gather(leaf, x, key)),
        )

    def _map_layer(self, stack_path: str, f: Callable[[MessageLeaf, jax.Array], jax.Array], tree: PyTree) -> PyTree:
        def of_layer(path: Any, x: jax.Array) -> jax.Array:
            name = path_str(path)
            leaf = leaf_at(stack_path, name, self.leaves, lambda leaf: dataclasses.replace(leaf, path="", index=0))
            layer = dataclasses.replace(
                leaf, batch=leaf.batch[1:], owned=leaf.owned[1:], others=leaf.others[1:], shard=leaf.shard[1:]
            )
            return f(layer, x) if leaf.per_layer else x

        return jax.tree_util.tree_map_with_path(of_layer, tree)

    @property
    def stacks(self) -> list[str]:
        """Paths of the parameters that are gathered one layer at a time."""
        return [leaf.path for leaf in self.leaves.values() if leaf.per_layer]

    def _map(self, f: Callable[[MessageLeaf, jax.Array], jax.Array], tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: f(self.leaves[path_str(path)], x), tree)

    # -- A parameter --------------------------------------------------------------------------------------------------

    def _gather(self, leaf: MessageLeaf, x: jax.Array, key: jax.Array) -> jax.Array:
        """Return the full weight. The backward pass sums and scatters its gradient."""

        @jax.custom_vjp
        def gathered(x: jax.Array, key: jax.Array) -> jax.Array:
            return self._decode(leaf, self._encode(leaf, x, key))

        def forward(x: jax.Array, key: jax.Array) -> Any:
            return gathered(x, key), key

        def backward(key: jax.Array, g: jax.Array) -> Any:
            return self._scatter(leaf, g, key).astype(x.dtype), None

        gathered.defvjp(forward, backward)
        return gathered(x, key)

    def _encode(self, leaf: MessageLeaf, x: jax.Array, key: jax.Array) -> jax.Array:
        """Encode a shard as bytes, and all-gather them between nodes: `[ranks of other axes, nodes, bytes]`."""
        if not leaf.gathered_axes:
            return x.astype(leaf.compute)
        dtype, outer = self._dtypes(leaf)[0], self._levels(leaf)[1]

        def local(x: jax.Array, key: jax.Array) -> jax.Array:
            flat = x.astype(leaf.compute).reshape(-1)
            local_key = self._local_key(leaf, key, flat, leaf.gathered_axes)
            if dtype is None:
                message = lax.bitcast_convert_type(flat, jnp.uint8).reshape(-1)
            else:
                message = encoded(flat, dtype, self.formats.block, local_key)
            return (gathered_bytes(message, outer) if outer else message[None])[None]

        return self._manual(local, self._other_spec(leaf), PartitionSpec(self.other_axes or None), "quantize")(x, key)

    def _decode(self, leaf: MessageLeaf, message: jax.Array) -> jax.Array:
        """Gather messages within a node and return the full weight."""
        if not leaf.gathered_axes:
            return message
        dtype, (inner, outer) = self._dtypes(leaf)[0], self._levels(leaf)
        counts = [math.prod(self.sizes[axis] for axis in dim) for dim in leaf.others]
        local_shape = [size // count for size, count in zip(leaf.shard, counts, strict=True)]
        num_elements = math.prod(local_shape)

        def local(message: jax.Array, key: None) -> jax.Array:
            messages = gathered_bytes(message[0], inner) if inner else message
            if dtype is None:
                elements = messages.reshape(*messages.shape[:-1], -1, leaf.compute.itemsize)
                shards = lax.bitcast_convert_type(elements, leaf.compute)
            else:
                shards = decoded(messages, num_elements, dtype, self.formats.block, leaf.compute)
            return _joined(shards.reshape(self._sizes((*inner, *outer)) + local_shape), (*inner, *outer), leaf.batch)

        return self._manual(local, PartitionSpec(self.other_axes or None), self._other_spec(leaf), "gather")(
            message, None
        )

    def _scatter(self, leaf: MessageLeaf, g: jax.Array, key: jax.Array) -> jax.Array:
        """Sum a full gradient over ranks and return the local shard, in the reduction dtype or float32."""
        dtype, (inner, outer) = self._dtypes(leaf)[1], self._levels(leaf)
        kept_axes = {*leaf.gathered_axes, *axes_of_spec(leaf.spec(is_gathered=True)), *self.deferred_axes}
        replica_axes = tuple(axis for axis in self.batch_axes if axis not in kept_axes)

        def local(g: jax.Array, key: jax.Array) -> jax.Array:
            order = (*outer, *inner)
            shards, shape = _split(g, order, leaf.batch, self._sizes(order))
            local_key = self._local_key(leaf, key, g, self.batch_axes)
            keys = (None, None) if local_key is None else jax.random.split(local_key)
            if dtype is None:
                shards = shards.astype(leaf.reduce)
                total = lax.psum_scatter(shards, order) if order else shards[0]
            else:
                block = self.formats.block
                total = scattered_sum(shards, axis=inner, outer=outer or None, dtype=dtype, block=block, key=keys[0])
            return self._all_reduced(leaf, total, replica_axes, keys[1]).reshape(shape)

        return self._manual(local, self._other_spec(leaf), self._other_spec(leaf), "scatter")(g, key)

    def reduce_across(self, grads: PyTree, key: jax.Array) -> PyTree:
        """Sum gradient shards over `deferred_axes`."""

        def reduce(leaf: MessageLeaf, g: jax.Array) -> jax.Array:
            def local(g: jax.Array, key: jax.Array) -> jax.Array:
                local_key = self._local_key(leaf, key, g, self.batch_axes)
                return self._all_reduced(leaf, g.reshape(-1), self.deferred_axes, local_key).reshape(g.shape)

            return self._manual(local, self._other_spec(leaf), self._other_spec(leaf), "scatter")(g, key)

        return self._map(reduce, grads)

    def _all_reduced(self, leaf: MessageLeaf, x: jax.Array, axes: tuple[str, ...], key: jax.Array | None) -> jax.Array:
        """All-reduce a flat shard of a gradient. These axes have the slowest links, so messages are quantized."""
        if not axes or (dtype := self._dtypes(leaf)[1]) is None:
            return lax.psum(x, axes) if axes else x
        return quantized_all_reduce(x, axis=axes, key=key, dtype=dtype, block=self.formats.block)

    def _dtypes(self, leaf: MessageLeaf) -> tuple[str | None, str | None]:
        """Return the dtypes of messages of the weight and of the gradient. None: not quantized."""
        if leaf.exact or not leaf.gathered_axes:
            return None, None
        return self.formats.weights, self.formats.gradients

    def _levels(self, leaf: MessageLeaf) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the gathered axes in a node and across nodes. Without secondary shards, all are in the first tuple."""
        secondary = spec_axes(self.formats.secondary)
        inner = tuple(axis for axis in leaf.gathered_axes if axis in secondary)
        if not inner:
            return leaf.gathered_axes, ()
        return inner, tuple(axis for axis in leaf.gathered_axes if axis not in secondary)

    def _sizes(self, axes: tuple[str, ...]) -> list[int]:
        return [self.sizes[axis] for axis in axes]

    def _other_spec(self, leaf: MessageLeaf) -> PartitionSpec:
        return PartitionSpec(*(dim or None for dim in leaf.others))

    def _local_key(self, leaf: MessageLeaf, key: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array | None:
        """Return a PRNG key for a parameter and rank, or None if rounding is deterministic.

        The values of `x` are hashed into the key, because the layers of a scan and the micro-steps share `key`.
        """
        if not self.formats.stochastic or leaf.exact or not leaf.gathered_axes:
            return None
        bits = lax.bitcast_convert_type(jnp.sum(x.astype(jnp.float32)), jnp.uint32)
        # Odd constants (from the golden ratio and from MurmurHash3) spread small numbers over all bits.
        rank = lax.axis_index(axes).astype(jnp.uint32) * np.uint32(0x85EBCA6B)
        return jax.random.fold_in(key, bits ^ rank ^ np.uint32(leaf.index * 0x9E3779B1 % 2**32))

    def _manual(self, local: Callable[..., jax.Array], spec: PartitionSpec, out: PartitionSpec, scope: str) -> Any:
        """Return `local`, a function of (array, key), in a `shard_map` over the other mesh axes.

        Quantization blocks then consist of local values. The key is an argument, because a nested `shard_map` cannot
        close over arrays of the outer mesh.
        """
        local = jax.named_scope(f"unshard_{scope}")(local)
        if not self.other_axes:
            return local

        def run(x: jax.Array, key: jax.Array | None) -> jax.Array:
            def inside(x: jax.Array, key: jax.Array | None) -> jax.Array:
                return local(x, None if key is None else jax.random.wrap_key_data(key))

            # The check is off: `local` communicates over the axes of the outer shard_map, and JAX does not know here
            # which values vary over them.
            return jax.shard_map(
                inside,
                in_specs=(spec, PartitionSpec()),
                out_specs=out,
                axis_names=set(self.other_axes),
                check_vma=False,
            )(x, None if key is None else jax.random.key_data(key))

        return run


def make_messages(setup: Setup, precision: Precision, step: Execution) -> WeightMessages:
    """Return the messages of the parameters in a step whose strategy has formats."""
    options: dict[str, Any] = {"setup": setup, "precision": precision}
    leaves = [
        MessageLeaf.of(decision.leaf, index, decision.leaf.shape, decision.spec, PartitionSpec(), **options)
        for index, decision in enumerate(setup.table.params)
    ]
    return messages_of(jax.tree.unflatten(jax.tree.structure(setup.layout.variables.params), leaves), setup, step)


def messages_of(leaves: PyTree, setup: Setup, step: Execution, *, in_manual: bool = False) -> WeightMessages:
    """Return the messages of a pytree of `MessageLeaf`s. `in_manual`: for a `shard_map` over all axes."""
    by_path = {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(leaves)}
    batch_axes = step.batch_axes
    assert step.formats is not None
    if not any(leaf.gathered_axes for leaf in by_path.values()):
        reason = f"no parameter is sharded over a batch axis ({', '.join(f'`{axis}`' for axis in batch_axes)})"
        fix = "use a size above 1 for the mesh axis that shards the parameters, or remove `quantize`"
        where, requested = f"strategy {setup.strategy.label}", "quantize the communication of parameters"
        raise problem(where, requested, reason, fix, code="unused-axis")
    return WeightMessages(
        formats=step.formats,
        batch_axes=batch_axes,
        deferred_axes=step.deferred_axes,
        other_axes=() if in_manual else tuple(a for a, size in setup.sizes.items() if size > 1 and a not in batch_axes),
        sizes=setup.sizes,
        leaves=by_path,
        specs=jax.tree.map(lambda leaf: leaf.spec(), leaves),
    )


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def _joined(shards: jax.Array, axes: tuple[str, ...], by_dim: tuple[tuple[str, ...], ...]) -> jax.Array:
    """Concatenate shards, `[ranks of each axis..., shard...]`, along the dims that their axes shard."""
    order = [n for dim, names in enumerate(by_dim) for n in (*(axes.index(name) for name in names), len(axes) + dim)]
    shape = shards.shape
    sizes = [
        math.prod(shape[axes.index(name)] for name in names) * shape[len(axes) + dim]
        for dim, names in enumerate(by_dim)
    ]
    return shards.transpose(order).reshape(sizes)


def _split(
    full: jax.Array, axes: tuple[str, ...], by_dim: tuple[tuple[str, ...], ...], sizes: list[int]
) -> tuple[jax.Array, list[int]]:
    """Return the shards of an array as `[ranks of all axes, elements]`, and their shape; the inverse of `_joined`."""
    size_of = dict(zip(axes, sizes, strict=True))
    shard = [dim // math.prod(size_of[n] for n in names) for dim, names in zip(full.shape, by_dim, strict=True)]
    blocks = full.reshape(
        [n for names, size in zip(by_dim, shard, strict=True) for n in (*map(size_of.get, names), size)]
    )
    labels = [name for dim, names in enumerate(by_dim) for name in (*names, dim)]
    order = [labels.index(name) for name in (*axes, *range(len(shard)))]
    return blocks.transpose(order).reshape(math.prod(sizes), math.prod(shard)), shard
