"""FSDP that gathers the weights of the next layer while this one computes, forward and backward.

    forward     carry (x, W_l)    iteration l: gather W_(l+1) ‖ y = layer(x, W_l)
    backward    carry (g, W_l)    iteration l: gather W_(l-1) ‖ layer l recomputed and differentiated, dW_l scattered

A gather is a sharding constraint: XLA puts it in, and nothing in its iteration waits for it. Without this a layer's
gathers stand in the iteration that needs them, and the first of them have nothing to hide behind. The last layer stands
outside of the loops: it ends the forward pass and begins the backward pass, with the weights that it has. Otherwise
gradients are XLA's, as in `plain.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.hardware.compile_options import APART, OVERLAP_LIMIT, Value, pipelined
from meshpar.layers.losses import Loss
from meshpar.layers.scan import Ahead, Aux, Layer, check_alike, leaf_at, scanned, with_aux
from meshpar.layers.slice_gradients import Own, SliceRows, summed_first
from meshpar.parallel.expected.step_spec import is_expert, is_router
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import current, spec_of
from meshpar.sharding.types import Decision, PyTree, axes_of_spec, axis_sizes, path_str, problem, without_axes
from meshpar.training.accumulation import Sums
from meshpar.training.gradients import xla as plain
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> Sums:
    """Loss, metrics and gradients over a batch, summed over micro-steps; arguments as for `plain`.

    Raises:
      ValueError: a model that never calls `scan_layers`.
    """
    context, strategy = current().numerics, state.setup.strategy
    assert context is not None
    context.prefetch = functools.partial(_run, state.setup)
    sums = plain.gradients(loss, options, state, batch, key)
    if not context.num_scans:
        exists = "the model says nowhere what a layer is: it never calls meshpar.scan_layers"
        fix = "run its stacked layers by mp.scan_layers(layer, x, params), or leave prefetch out"
        raise problem(f"strategy {strategy.label}", "gather weights a layer ahead", exists, fix)
    return sums


def compile_options(setup: Setup, options: StepOptions) -> dict[str, Value]:
    """What makes XLA hide the messages: a layer's gathers are one, and its scatters run into the next iteration.

    Apart, the first gather would have all that hides behind the layer, and the others wait. Scatters are combined by
    the bytes they give: as one message a layer's would have no matmul of it left to hide behind, so there are three.
    With axes that split layers, whose collectives stand between, several are let run at a time, and scatters are one.
    Slices of the rows have messages of their own there, which combined would make one slice wait for the other: no more
    is combined then than the layer's weights, and than its gradients as often as there are slices.
    Slices keep kernels of their own there, too: see `APART`.
    """
    gathered, kept = bytes_of_a_layer(setup, options)
    combined = gathered if options.interleave > 1 else max(gathered, 2**30)
    thresholds: dict[str, Value] = {"xla_gpu_all_gather_combine_threshold_bytes": combined}
    others = [size for axis, size in axis_sizes(setup.mesh).items() if axis not in setup.batch_axes and size > 1]
    if others:
        thresholds[OVERLAP_LIMIT] = 4
        if options.interleave > 1:
            thresholds |= {"xla_gpu_reduce_scatter_combine_threshold_bytes": kept * options.interleave, **APART}
    else:
        if _ranks_own_experts(setup):  # tokens go to experts while weights come
            thresholds[OVERLAP_LIMIT] = 4
        thresholds["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(kept // 3, 1)
    return {**thresholds, **pipelined("reduce_scatter"), **pipelined("all_reduce")}


def _ranks_own_experts(setup: Setup) -> bool:
    """Whether axes of the batch split experts that nobody gathers."""
    stay = (axes_of_spec(_without(one, setup.batch_axes)) for one in setup.table.params if one.leaf.num_layers > 1)
    return any(set(axes) & set(setup.batch_axes) for axes in stay)


def bytes_of_a_layer(setup: Setup, options: StepOptions) -> tuple[int, int]:
    """Of a layer's weights, as a device holds them when they are gathered, and of its gradients, as it keeps them."""
    sizes, gathered, kept = axis_sizes(setup.mesh), 0, 0
    for one in (one for one in setup.table.params if one.leaf.num_layers > 1):
        axes = axes_of_spec(one.spec)
        elements = one.leaf.size // one.leaf.num_layers
        compute = jnp.dtype(options.precision.compute or one.leaf.dtype)
        stays = set(axes_of_spec(_without(one, setup.batch_axes)))
        others = math.prod(sizes[axis] for axis in axes if axis in stays)
        gathered += elements // others * compute.itemsize
        if not one.leaf.is_trained:
            continue
        kept += elements // math.prod(sizes[axis] for axis in axes) * options.precision.reduce_dtype(compute).itemsize
    return gathered, kept


class LayerLayout(NamedTuple):
    """How the weights of one layer lie."""

    whole: Callable[[PyTree], PyTree]
    """While the layer computes: over some axes replicated."""
    shards: Callable[[PyTree], PyTree]
    """As the parameters lie."""
    is_trained: PyTree = None
    """A truth for each: whether it has a gradient. None: all have."""
    are_sliced: bool = False
    """Whether a layer runs on several slices of the rows: it uses each weight as often, and sums the gradients."""
    rows: SliceRows | None = None
    """Of a slice, where matmuls can leave a gradient as each device has it; `shards` then takes `Own`s, too."""

    def trained(self, tree: PyTree) -> PyTree:
        """Of a tree like the weights what has a gradient; None stands for the others."""
        return tree if self.is_trained is None else jax.tree.map(lambda on, x: x if on else None, self.is_trained, tree)


def _run(setup: Setup, at: str, layer: Layer, x: Any, rows: tuple[PyTree, PyTree]) -> Any:
    """What `scan_layers` gives, its weights gathered a layer ahead."""
    if len({len(leaf) for leaf in jax.tree.leaves(rows)}) != 1 or not jax.tree.leaves(rows[0]):
        return scanned(layer, x, (*rows, None))  # nothing to gather; or rows of unequal length, which a scan refuses
    decisions = {one.path: one for one in setup.table.params}

    def laid(tree: PyTree, without: tuple[str, ...]) -> PyTree:
        def one(path: Any, weight: jax.Array | Own) -> jax.Array | Ahead:
            found = leaf_at(at, path_str(path), decisions, lambda held: (held.spec, held.leaf.names))
            spec = _without(found, without)
            if isinstance(weight, Own):
                return weight.reduced(spec)
            laid = with_layout(weight, NamedSharding(setup.mesh, spec))
            # An MoE layer gathers its experts in a region by hand, and scatters their gradients there: given whole ones
            # alone, it would reduce gradients whole.
            of_expert = is_expert(found) and not is_router(found)
            return Ahead(weight, laid) if of_expert and spec != _without(found, ()) else laid

        return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda one: isinstance(one, Own))

    def is_trained(path: Any, weight: jax.Array) -> bool:
        return leaf_at(at, path_str(path), decisions, lambda held: held.leaf.is_trained).leaf.is_trained

    whole = functools.partial(laid, without=setup.strategy.prefetched_axes)
    trained = jax.tree_util.tree_map_with_path(is_trained, rows[0])
    context = current().numerics
    sliced = context is not None and context.interleave > 1
    layout = LayerLayout(
        whole, functools.partial(laid, without=()), trained, sliced, _rows(setup, x) if sliced else None
    )
    return prefetched(layer, x, rows, layout)


def _rows(setup: Setup, x: PyTree) -> SliceRows | None:
    """How a slice's rows lie; None: axes split the sequence, or types say how arrays lie."""
    like = max(jax.tree.leaves(x), key=jnp.ndim)
    spec = spec_of(jax.ShapeDtypeStruct(like.shape[:2], like.dtype), *("batch", "seq")[: like.ndim])
    axes, others = (axes_of_spec(PartitionSpec(*part)) for part in (spec[:1], spec[1:]))
    if others or not axes or AxisType.Explicit in setup.mesh.axis_types:
        return None
    return SliceRows(setup.mesh, tuple(axes), len(like))


def _without(one: Decision, axes: tuple[str, ...]) -> PartitionSpec:
    """How one layer of a stacked leaf lies, no longer split over some axes, but for those whose ranks own experts."""
    names = (one.leaf.names or ())[1:]
    own = [entry if name == "expert" else None for entry, name in zip(one.spec[1:], names, strict=False)]
    kept = set(axes_of_spec(PartitionSpec(*own))) if is_expert(one) and not is_router(one) else set()
    return without_axes(PartitionSpec(*one.spec[1:]), [axis for axis in axes if axis not in kept])


def prefetched(layer: Layer, x: Any, rows: tuple[PyTree, PyTree], layout: LayerLayout) -> Any:
    """Stacked layers, one after the other, each layer's weights laid out `whole` while the one before it computes.

    Values and gradients are those of `layers.scanned`.

    Args:
      layer: (x, (weights, extra, None)) -> x, or -> (x, Aux); for `jax.checkpoint` to keep no weight for the backward
        pass, which gathers it again.
      x: what the first one takes.
      rows: parameters and extra, stacked.
      layout: of one layer's weights.
    """
    params, extra = rows
    leaves, structure = jax.tree.flatten(extra)
    is_smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    smooth, fixed = (
        [leaf for leaf, one in zip(leaves, is_smooth, strict=True) if one is kind] for kind in (True, False)
    )

    def body(x: Any, weights: PyTree, smooth: list[jax.Array], fixed: list[jax.Array]) -> Any:
        rows = {True: iter(smooth), False: iter(fixed)}
        extra = jax.tree.unflatten(structure, [next(rows[one]) for one in is_smooth])
        y, aux = with_aux(layer(x, (weights, extra, None)))
        check_alike("a layer", x, y)
        return (y, None if aux is None else aux.loss), None if aux is None else aux.metrics

    weights, *first = jax.tree.map(lambda leaf: leaf[0], (params, smooth, fixed))
    pure, consts = jax.closure_convert(body, x, layout.whole(weights), *first)
    stack = _Ahead(pure, layout)
    run = jax.custom_vjp(lambda *given: stack.forward(*given)[0])
    run.defvjp(stack.forward, stack.backward)
    y, losses, metrics = run(x, params, smooth, consts, fixed)
    return y if losses is None else (y, Aux(losses.sum(0), metrics))


@dataclasses.dataclass(eq=False)
class _Ahead:
    """A stack of layers, forward and backward; the last stands outside of the loops, which all others run in.

    So what comes behind the layers, the head's gather and its gradient's reduction, has that layer to hide behind.
    """

    body: Callable[..., Any]
    """(x, weights, smooth, fixed, *consts) -> ((y, loss), metrics)."""
    layout: LayerLayout
    vjps: dict[str, tuple[Any, list[int | None]]] = dataclasses.field(default_factory=dict)
    """Of the layers in the loop and of the last: the tree of the backward function, and which of its residuals are at
    hand again in the backward pass, a layer's weights before all: they are not stacked."""

    def _weights_of(self, params: PyTree, at: jax.Array | int) -> PyTree:
        return self.layout.whole(jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), params))

    def _layer(self, where: str, x: Any, weights: PyTree, smooth: PyTree, fixed: PyTree, consts: PyTree) -> Any:
        def layer(x: Any, shards: PyTree, smooth: PyTree, consts: PyTree) -> Any:
            given = jax.tree.map(_in_place_of, weights, shards, is_leaf=_is_ahead)
            return self.body(x, given, smooth, fixed, *consts)

        shards = jax.tree.map(_shard_of, weights, is_leaf=_is_ahead)
        (y, loss), vjp, metrics = jax.vjp(layer, x, self.layout.trained(shards), smooth, consts, has_aux=True)
        residuals, tree = jax.tree.flatten(vjp)
        at_hand = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((weights, smooth, fixed, consts)))}
        places = [at_hand.get(id(leaf)) for leaf in residuals]
        self.vjps[where] = tree, places
        return y, (loss, metrics, [leaf for leaf, place in zip(residuals, places, strict=True) if place is None])

    def _gradients(
        self, where: str, given: Any, kept: list[Any], weights: PyTree, smooth: PyTree, fixed: PyTree, consts: PyTree
    ) -> Any:
        tree, places = self.vjps[where]
        at_hand, left = jax.tree.leaves((weights, smooth, fixed, consts)), iter(kept)
        residuals = [next(left) if place is None else at_hand[place] for place in places]

        def back(residuals: list[Any], given: Any) -> Any:
            return jax.tree.unflatten(tree, residuals)(given)

        if self.layout.are_sliced:
            back = summed_first(back, (False, True, False, False), self.layout.rows)
        dx, dweights, dsmooth, dconsts = back(residuals, given)
        shards = self.layout.shards(dweights)
        like = self.layout.trained(jax.tree.map(_shard_of, weights, is_leaf=_is_ahead))
        return dx, jax.tree.map(lambda g, w: g.astype(w.dtype), shards, like), dsmooth, dconsts

    def forward(self, x: Any, params: PyTree, smooth: PyTree, consts: PyTree, fixed: PyTree) -> Any:
        def step(carry: Any, row: Any) -> Any:
            (x, weights), (at, smooth, fixed) = carry, row
            ahead = self._weights_of(params, at + 1)
            y, out = self._layer("loop", x, weights, smooth, fixed, consts)
            return (y, ahead), out

        rows, (_, *of_last) = _but_last((jnp.arange(len(jax.tree.leaves(params)[0])), smooth, fixed))
        (x, last), (losses, metrics, kept) = lax.scan(step, (x, self._weights_of(params, 0)), rows)
        y, (loss, metric, kept_last) = self._layer("last", x, last, of_last[0], of_last[1], consts)
        losses, metrics = jax.tree.map(_appended, (losses, metrics), (loss, metric))
        return (y, losses, metrics), (params, smooth, consts, fixed, kept, kept_last, last)

    def backward(self, saved: Any, given: Any) -> Any:
        (params, smooth, consts, fixed, kept, kept_last, last), (dy, dlosses, _) = saved, given
        count = len(jax.tree.leaves(params)[0])

        def step(carry: Any, row: Any) -> Any:
            (dy, weights, dconsts), (at, dloss, smooth, fixed, kept) = carry, row
            ahead = self._weights_of(params, jnp.maximum(at - 1, 0))
            dx, *out, more = self._gradients("loop", (dy, dloss), kept, weights, smooth, fixed, consts)
            return (dx, ahead, jax.tree.map(jnp.add, dconsts, more)), tuple(out)

        rows, (_, dloss, *rest) = _but_last((jnp.arange(count), dlosses, smooth, fixed))
        ahead = self._weights_of(params, max(count - 2, 0))
        dy, *of_last, dconsts = self._gradients("last", (dy, dloss), kept_last, last, rest[0], rest[1], consts)
        (dx, _, dconsts), of_rest = lax.scan(step, (dy, ahead, dconsts), (*rows, kept), reverse=True)
        dparams, dsmooth = jax.tree.map(_appended, of_rest, tuple(of_last))
        return dx, dparams, dsmooth, dconsts, None


def _is_ahead(x: Any) -> bool:
    return isinstance(x, Ahead)


def _shard_of(weight: jax.Array | Ahead) -> jax.Array:
    return weight.shard if isinstance(weight, Ahead) else weight


def _in_place_of(weight: jax.Array | Ahead, shard: jax.Array | None) -> jax.Array | Ahead:
    if shard is None:  # it has no gradient
        return weight
    return Ahead(shard, weight.whole) if isinstance(weight, Ahead) else shard


def _but_last(rows: PyTree) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda x: x[:-1], rows), jax.tree.map(lambda x: x[-1], rows)


def _appended(stacked: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([stacked, last[None]])
