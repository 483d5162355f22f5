"""FSDP that gathers the weights of the next layer while a layer computes, forward and backward.

    forward     carry (x, W_l)    iteration l: gather W_(l+1) ‖ y = layer(x, W_l)
    backward    carry (g, W_l)    iteration l: gather W_(l-1) ‖ recompute and differentiate layer l, scatter dW_l

Each gather is a sharding constraint. XLA inserts the all-gather, and no operation of the same iteration depends on it.
In a plain scan a layer depends on gathers of its own iteration, so the first gather is exposed. The last layer runs
outside the loops, with the same gathered weights in both passes. XLA partitions the rest of the step, as in `xla.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.hardware.compile_options import APART, OVERLAP_LIMIT, Value, pipelined
from meshpar.layers.losses import Loss, MicrobatchTotals
from meshpar.layers.precision import NUMERICS
from meshpar.layers.scan import (
    Aux,
    Layer,
    LayerRunner,
    PrefetchedWeight,
    check_alike,
    is_unrolled,
    leaf_at,
    on_slices,
    running,
    scanned,
    with_aux,
)
from meshpar.parallel.execution import Execution
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.errors import check_cases, problem
from meshpar.sharding.types import Decision, PyTree, axes_of_spec, num_shards, path_str, without_axes
from meshpar.training.execution import described
from meshpar.training.gradients import xla
from meshpar.training.gradients.engine import Feature, GradientEngine
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> MicrobatchTotals:
    """Return loss, metrics and gradients of a batch, summed over micro-steps; see `xla.gradients`."""
    context, strategy = NUMERICS.value, state.setup.strategy
    assert context is not None
    with running(PrefetchRunner(state.setup)):
        sums = xla.gradients(loss, options, state, batch, key)
    if not context.num_scans:
        reason = "the model marks no layer: it never calls meshpar.scan_layers"
        fix = "run its stacked layers with mp.scan_layers(layer, x, params), or remove prefetch"
        where, requested = f"strategy {strategy.label}", "gather weights one layer ahead"
        raise problem(where, requested, reason, fix, code="unsupported-feature")
    return sums


def compile_options(execution: Execution) -> dict[str, Value]:
    """Return the XLA options that overlap gathers with the layer and scatters with the next iteration.

    - The gathers of a layer are combined. Otherwise only the first gather overlaps with the layer.
    - The scatters of a layer are combined into three messages, by the size of their results. A single message would
      be sent after the last matmul of the layer, without overlap.
    - Mesh axes that shard the layers add collectives between the matmuls. Four collectives may then run concurrently,
      and the default size of combined scatters is kept.
    - Batch slices send separate messages, because a slice would wait for the others if their messages were combined.
      Gathers are combined up to the size of a layer's weights. If mesh axes shard the layers, scatters are combined up
      to the size of a layer's gradients times the number of slices. See `compile_options.APART`.
    """
    gathered_bytes, gradient_bytes = bytes_of_a_layer(execution)
    num_slices, batch_axes = execution.batch_slices, set(execution.batch_axes)
    combined_bytes = gathered_bytes if num_slices > 1 else max(gathered_bytes, 2**30)
    result: dict[str, Value] = {"xla_gpu_all_gather_combine_threshold_bytes": combined_bytes}
    if any(size > 1 for axis, size in execution.sizes.items() if axis not in batch_axes):
        result[OVERLAP_LIMIT] = 4
        if num_slices > 1:
            result |= {"xla_gpu_reduce_scatter_combine_threshold_bytes": gradient_bytes * num_slices, **APART}
    else:
        stacks = [weight.decision for weight in execution.weights if weight.leaf.num_layers > 1]
        remaining = set().union(*(axes_of_spec(_gathered_spec(stack, execution.batch_axes)) for stack in stacks))
        if remaining & batch_axes:  # they shard experts: tokens travel to these during the gathers
            result[OVERLAP_LIMIT] = 4
        result["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(gradient_bytes // 3, 1)
    return {**result, **pipelined("reduce_scatter"), **pipelined("all_reduce")}


def bytes_of_a_layer(execution: Execution) -> tuple[int, int]:
    """Return the bytes per device of a layer's gathered weights and of its gradient shards."""
    gathered_bytes, gradient_bytes = 0, 0
    for weight in execution.weights:
        decision, leaf = weight.decision, weight.leaf
        if leaf.num_layers <= 1:
            continue
        num_elements = leaf.size // leaf.num_layers
        remaining = num_shards(_gathered_spec(decision, execution.batch_axes), execution.sizes)
        gathered_bytes += num_elements // remaining * execution.compute_dtype(decision).itemsize
        if leaf.is_trained:
            shards = num_shards(decision.spec, execution.sizes)
            gradient_bytes += num_elements // shards * execution.reduce_dtype(decision).itemsize
    return gathered_bytes, gradient_bytes


class LayerLayout(NamedTuple):
    """The communication of the weights of a layer."""

    gather: Callable[[PyTree], PyTree]
    """Gathers the weights that the layer computes with from its shards, or from its message."""
    scatter: Callable[[PyTree], PyTree]
    """Reduces gradients to the shards of the parameters."""
    is_trained: PyTree = None
    """Boolean pytree, True for trainable weights. `None` means that all weights are trainable."""
    message: Callable[[PyTree], PyTree] | None = None
    """First part of the gather: shards -> arrays that are saved for the backward pass. `None` saves nothing."""

    def gathered(self, shards: PyTree) -> tuple[PyTree, PyTree]:
        """Return the weights and the message, or None."""
        message = None if self.message is None else self.message(shards)
        return self.gather(shards if message is None else message), message

    def trained(self, tree: PyTree) -> PyTree:
        """Replace the leaves of frozen weights by None."""
        return tree if self.is_trained is None else jax.tree.map(lambda on, x: x if on else None, self.is_trained, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class PrefetchRunner(LayerRunner):
    """Gathers the weights of each layer while the previous layer computes."""

    setup: Setup
    regathers = True

    def run(self, stack_path: str, layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree, PyTree]) -> PyTree:
        params, extra, caches = inputs
        if caches is not None:  # decoding has no backward pass
            return super().run(stack_path, layer, x, inputs)
        reason = "each iteration gathers the weights of the next layer, which unrolled iterations would keep"
        case = is_unrolled(layer), reason, "use unroll=1, or remove prefetch from the strategy"
        check_cases("scan_layers(unroll=...)", "unroll layers with prefetched weights", "unsupported-feature", case)
        with jax.named_scope(stack_path):
            return on_slices(layer, x, lambda layer, x: self._run(stack_path, layer, x, (params, extra)))

    def _run(self, stack_path: str, layer: Layer, x: Any, inputs: tuple[PyTree, PyTree]) -> Any:
        if len({len(leaf) for leaf in jax.tree.leaves(inputs)}) != 1 or not jax.tree.leaves(inputs[0]):
            return scanned(layer, x, (*inputs, None))  # no weights, or inputs of unequal length, which the scan refuses
        decisions = {decision.path: decision for decision in self.setup.table.params}

        def is_trained(path: Any, weight: jax.Array) -> bool:
            return leaf_at(stack_path, path_str(path), decisions, lambda match: match.leaf.is_trained).leaf.is_trained

        trained = jax.tree_util.tree_map_with_path(is_trained, inputs[0])
        return prefetched(layer, x, inputs, self.layout(stack_path, trained))

    def layout(self, stack_path: str, is_trained: PyTree) -> LayerLayout:
        """Return the communication of the weights of a layer of these stacked layers."""
        setup = self.setup
        decisions = {decision.path: decision for decision in setup.table.params}

        def constrain(tree: PyTree, gathered_axes: tuple[str, ...]) -> PyTree:
            def constrain_leaf(path: Any, weight: jax.Array) -> jax.Array | PrefetchedWeight:
                decision = leaf_at(stack_path, path_str(path), decisions, lambda match: (match.spec, match.leaf.names))
                spec = _gathered_spec(decision, gathered_axes)
                # Inside a shard_map over groups, the constraint uses the mesh of the region.
                is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
                constrained = with_layout(weight, spec if is_manual else NamedSharding(setup.mesh, spec))
                # The shard_map of an MoE layer gathers expert weights and scatters their gradients. If it received only
                # the gathered weight, it would all-reduce the full gradient.
                is_expert_shard = decision.leaf.is_expert and spec != _gathered_spec(decision, ())
                return PrefetchedWeight(weight, constrained) if is_expert_shard else constrained

            return jax.tree_util.tree_map_with_path(constrain_leaf, tree)

        return LayerLayout(
            gather=functools.partial(constrain, gathered_axes=setup.strategy.prefetched_axes),
            scatter=functools.partial(constrain, gathered_axes=()),
            is_trained=is_trained,
        )


def _gathered_spec(decision: Decision, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of a layer that is gathered over `axes`. Axes that shard experts remain."""
    expert_axes: set[str] = set()
    if decision.leaf.is_expert:
        dims = zip(decision.spec[1:], (decision.leaf.names or ())[1:], strict=False)
        expert_axes = set(axes_of_spec(PartitionSpec(*(entry if name == "expert" else None for entry, name in dims))))
    return without_axes(PartitionSpec(*decision.spec[1:]), [axis for axis in axes if axis not in expert_axes])


def prefetched(layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree], layout: LayerLayout) -> PyTree:
    """Run stacked layers like `layers.scanned`, and gather the weights of each layer while the previous layer computes.

    `layer` is a function (x, (weights, extra, None)) -> x, or -> (x, Aux). Its `jax.checkpoint` policy saves no weight
    for the backward pass, which gathers the weights again. `inputs` are stacked parameters and extra inputs.
    """
    params, extra = inputs
    leaves, structure = jax.tree.flatten(extra)
    is_smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    smooth, fixed = (
        [leaf for leaf, mark in zip(leaves, is_smooth, strict=True) if mark is kind] for kind in (True, False)
    )

    def body(x: Any, weights: PyTree, smooth: list[jax.Array], fixed: list[jax.Array]) -> Any:
        remaining = {True: iter(smooth), False: iter(fixed)}
        extra = jax.tree.unflatten(structure, [next(remaining[mark]) for mark in is_smooth])
        y, aux = with_aux(layer(x, (weights, extra, None)))
        check_alike("a layer", x, y)
        return (y, None if aux is None else aux.loss), None if aux is None else aux.metrics

    weights, *first = jax.tree.map(lambda leaf: leaf[0], (params, smooth, fixed))
    pure, consts = jax.closure_convert(body, x, layout.gathered(weights)[0], *first)
    stack = _PrefetchedStack(pure, layout)
    run = jax.custom_vjp(lambda *args: stack.forward(*args)[0])
    run.defvjp(stack.forward, stack.backward)
    y, losses, metrics = run(x, params, smooth, consts, fixed)
    return y if losses is None else (y, Aux(losses.sum(0), metrics))


@dataclasses.dataclass(eq=False)
class _PrefetchedStack:
    """Forward and backward pass of stacked layers. All layers but the last run in a loop.

    The last layer runs outside the loop, and overlaps with the gather of the head and the reduction of its gradient.
    """

    body: Callable[..., Any]
    """(x, weights, smooth, fixed, *consts) -> ((y, loss), metrics). `smooth` and `fixed` are the floating-point and the
    integer extra inputs of the layer."""
    layout: LayerLayout
    vjps: dict[str, tuple[Any, list[int | None]]] = dataclasses.field(default_factory=dict)
    """For "loop" and "last": the structure of the backward function, and an index for each residual. A residual that
    equals an argument of `_layer`, such as a weight, is not saved: its index is that of the argument. Else None."""

    def _gathered(self, params: PyTree, index: jax.Array | int) -> tuple[PyTree, PyTree]:
        return self.layout.gathered(_layer_of(params, index))

    def _gathered_again(self, params: PyTree, messages: PyTree, index: jax.Array | int) -> PyTree:
        if messages is None:
            return self._gathered(params, index)[0]
        return self.layout.gather(_layer_of(messages, index))

    def _layer(self, name: str, x: Any, weights: PyTree, smooth: PyTree, fixed: PyTree, consts: PyTree) -> Any:
        def layer(x: Any, shards: PyTree, smooth: PyTree, consts: PyTree) -> Any:
            merged = jax.tree.map(_with_shard, weights, shards, is_leaf=_is_ahead)
            return self.body(x, merged, smooth, fixed, *consts)

        shards = jax.tree.map(_shard_of, weights, is_leaf=_is_ahead)
        (y, loss), vjp, metrics = jax.vjp(layer, x, self.layout.trained(shards), smooth, consts, has_aux=True)
        residuals, tree = jax.tree.flatten(vjp)
        index_of = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves((weights, smooth, fixed, consts)))}
        indices = [index_of.get(id(leaf)) for leaf in residuals]
        self.vjps[name] = tree, indices
        return y, (loss, metrics, [leaf for leaf, index in zip(residuals, indices, strict=True) if index is None])

    def _gradients(
        self, name: str, cotangents: Any, saved: list[Any], params: PyTree, weights: PyTree, smooth: PyTree,
        fixed: PyTree, consts: PyTree,
    ) -> Any:  # fmt: skip
        tree, indices = self.vjps[name]
        args, remaining = jax.tree.leaves((weights, smooth, fixed, consts)), iter(saved)
        residuals = [next(remaining) if index is None else args[index] for index in indices]
        dx, dweights, dsmooth, dconsts = jax.tree.unflatten(tree, residuals)(cotangents)
        scattered = self.layout.scatter(dweights)
        dparams = jax.tree.map(lambda g, w: g.astype(w.dtype), scattered, self.layout.trained(params))
        return dx, dparams, dsmooth, dconsts

    def forward(self, x: Any, params: PyTree, smooth: PyTree, consts: PyTree, fixed: PyTree) -> Any:
        def step(carry: Any, layer_inputs: Any) -> Any:
            (x, (weights, message)), (index, smooth, fixed) = carry, layer_inputs
            gathered = self._gathered(params, index + 1)
            y, out = self._layer("loop", x, weights, smooth, fixed, consts)
            return (y, gathered), (out, message)

        num_layers = len(jax.tree.leaves(params)[0])
        stacked, (_, last_smooth, last_fixed) = _split_last((jnp.arange(num_layers), smooth, fixed))
        (x, (last_weights, _)), ((losses, metrics, saved), messages) = lax.scan(
            step, (x, self._gathered(params, 0)), stacked
        )
        y, (loss, metric, last_saved) = self._layer("last", x, last_weights, last_smooth, last_fixed, consts)
        losses, metrics = jax.tree.map(_appended, (losses, metrics), (loss, metric))
        return (y, losses, metrics), (params, smooth, consts, fixed, saved, messages, last_saved, last_weights)

    def backward(self, residuals: Any, cotangents: Any) -> Any:
        params, smooth, consts, fixed, saved, messages, last_saved, last_weights = residuals
        dy, dlosses, _ = cotangents
        num_layers = len(jax.tree.leaves(params)[0])
        messages = messages if num_layers > 1 else None

        def step(carry: Any, layer_inputs: Any) -> Any:
            (dy, weights, dconsts), (index, dloss, smooth, fixed, saved) = carry, layer_inputs
            next_weights = self._gathered_again(params, messages, jnp.maximum(index - 1, 0))
            dx, *grads, more = self._gradients("loop", (dy, dloss), saved, params, weights, smooth, fixed, consts)
            return (dx, next_weights, jax.tree.map(jnp.add, dconsts, more)), tuple(grads)

        stacked, (_, dloss, last_smooth, last_fixed) = _split_last((jnp.arange(num_layers), dlosses, smooth, fixed))
        next_weights = self._gathered_again(params, messages, max(num_layers - 2, 0))
        dy, *last_grads, dconsts = self._gradients(
            "last", (dy, dloss), last_saved, params, last_weights, last_smooth, last_fixed, consts
        )
        (dx, _, dconsts), grads = lax.scan(step, (dy, next_weights, dconsts), (*stacked, saved), reverse=True)
        dparams, dsmooth = jax.tree.map(_appended, grads, tuple(last_grads))
        return dx, dparams, dsmooth, dconsts, None


def _layer_of(stacked: PyTree, index: jax.Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)


def _is_ahead(x: Any) -> bool:
    return isinstance(x, PrefetchedWeight)


def _shard_of(weight: jax.Array | PrefetchedWeight) -> jax.Array:
    return weight.shard if isinstance(weight, PrefetchedWeight) else weight


def _with_shard(weight: jax.Array | PrefetchedWeight, shard: jax.Array | None) -> jax.Array | PrefetchedWeight:
    if shard is None:  # a frozen weight
        return weight
    return PrefetchedWeight(shard, weight.gathered) if isinstance(weight, PrefetchedWeight) else shard


def _split_last(stacked: PyTree) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda x: x[:-1], stacked), jax.tree.map(lambda x: x[-1], stacked)


def _appended(stacked: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([stacked, last[None]])


ENGINE = GradientEngine(
    gradients,
    supports=frozenset({Feature.ACCUMULATION, Feature.PREFETCH, Feature.HOST_OFFLOAD, Feature.BATCH_STATISTICS}),
    describe=functools.partial(described, layers_ahead=1),
    compile_options=compile_options,
)
