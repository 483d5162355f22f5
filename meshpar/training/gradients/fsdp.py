"""Fully sharded data parallelism with explicit communication, in four independent settings.

    gather    XLA's all-gather, or messages in the compute dtype, int8 or fp8    fsdp(quantize=...)
    ahead     layers whose weights are gathered before they are used             fsdp(prefetch=...)
    keep      last layers whose gathered weights the backward pass uses again    fsdp(keep=...)
    reduce    in each micro-step, once across groups of devices, or once         train_step(reduce_gradients=...)

The loss is evaluated in a `shard_map` over some of the batch axes, on a part of the batch for each rank:

    setting                          axes of the region        in the region
    quantize                         all batch axes            messages gather weights and reduce gradients
    reduce once                      all batch axes            weights are gathered before, and gradients reduced after
    reduce once across groups        axes without shards       XLA gathers and reduces over the other batch axes
    otherwise                        none: the global batch    XLA gathers and reduces

`layer_loop` runs the stacked layers in all of them. Other mesh axes are left to XLA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.hardware.compile_options import APART, OVERLAP_LIMIT, Value, pipelined
from meshpar.layers.losses import Loss, MicrobatchTotals, at_least_float32
from meshpar.layers.precision import NUMERICS
from meshpar.layers.scan import PrefetchedWeight, leaf_at, running
from meshpar.parallel.execution import Execution, LayerGather, layer_elements, owned_axes
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.errors import problem
from meshpar.sharding.types import Decision, PyTree, axes_of_spec, is_spec, path_str, without_axes
from meshpar.training.accumulation import (
    MicroStep,
    constrained,
    grad_specs,
    in_compute,
    micro_step,
)
from meshpar.training.execution import Sharded, described
from meshpar.training.gradients import xla
from meshpar.training.gradients.batch_region import BatchRegion
from meshpar.training.gradients.engine import Feature, GradientEngine
from meshpar.training.gradients.layer_loop import LayerLayout, LoopRunner
from meshpar.training.gradients.stack_uses import check_stacks
from meshpar.training.gradients.weight_messages import WeightMessages, make_messages
from meshpar.training.options import ReduceGradients, StepOptions
from meshpar.training.state import Setup, TrainState


def describe(setup: Sharded, options: StepOptions, *, reduce: ReduceGradients | None) -> Execution:
    """Describe a step that reduces gradients at the times given by `reduce`."""
    gathering, is_once = setup.strategy.gathering, options.accumulate > 1 and reduce == "once"
    if is_once:  # all layers are gathered before the first micro-step, and kept
        gathering = LayerGather(formats=gathering.formats)
    groups = setup.strategy.group_axes(setup.batch_axes) if reduce == "once_across_groups" else ()
    return described(setup, options, gathers_once=is_once, deferred_axes=groups, gathering=gathering)


def gradients(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, *,
    reduce: ReduceGradients | None,
) -> MicrobatchTotals:  # fmt: skip
    """Return loss, metrics and gradients of a batch, summed over micro-steps and devices; see `xla.gradients`."""
    setup, step = state.setup, describe(state.setup, options, reduce=reduce)
    if step.formats is not None:
        messages = make_messages(setup, options.precision, step)
        return _by_messages(loss, options, state, batch, key, step, messages)
    with _in_layer_loop(setup, step.gathering, functools.partial(_constrained_layout, setup)):
        if step.divides_batch:
            return _by_xla(loss, options, state, batch, key, step)
        return xla.gradients(loss, options, state, batch, key)


def _by_xla(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, step: Execution
) -> MicrobatchTotals:
    """Accumulate the gradients of the local batch, and reduce them once over the axes of the region.

    The parameters are replicated over these axes. XLA partitions the computation over the other mesh axes, and in each
    micro-step reduces the gradients over the other batch axes into shards.

    Explicit mesh axes could express the same: weights of type `reduced` over the batch axes have `unreduced` gradients.
    That sends the same bytes for gradients, and in addition the loss of each micro-step. JAX up to version 0.12 refuses
    such weights where they are added to or multiplied with activations, as biases and norm scales are.
    """
    setup, axes = state.setup, step.deferred_axes or step.batch_axes
    region, is_divided = BatchRegion(setup, options, axes), set(axes) < set(step.batch_axes)
    params = in_compute(setup, state.params, options.precision.compute)
    specs = jax.tree.map(lambda spec: without_axes(spec, axes), setup.layout.params, is_leaf=is_spec)
    layouts = setup.trained(setup.layout.grads)

    def local(params: PyTree, *args: Any) -> MicrobatchTotals:
        def step_of(loss: Loss) -> MicroStep:
            def sharded(*inputs: Any) -> MicrobatchTotals:
                sums = micro_step(loss, options, setup, params, *inputs)
                return sums.replace(grads=constrained(sums.grads, layouts)) if is_divided else sums

            return sharded

        sums = region.sums(loss, step_of, params, *args)
        # Gradients have a new dim for each axis, which is sharded over it.
        return sums.replace(grads=jax.tree.map(lambda g: g.reshape(*(1,) * len(axes), *g.shape), sums.grads))

    params = constrained(params, setup.named(specs))
    replicated, by_rank = PartitionSpec(), PartitionSpec(*axes)
    sums = region.run(local, params, state, batch, key, specs=replicated, grad_specs=by_rank)
    return sums.replace(grads=jax.tree.map(lambda g, spec: _summed(g, axes, spec, setup), sums.grads, layouts))


def _summed(g: jax.Array, axes: tuple[str, ...], spec: PartitionSpec, setup: Setup) -> jax.Array:
    """Sum a gradient over its first dims, which are sharded over `axes`, and shard the sum by `spec`.

    Axes that shard the sum come first. XLA would otherwise all-reduce over all axes and keep a slice. XLA chooses the
    reduce-scatter: a psum_scatter would first gather the dims that other mesh axes shard.
    """
    zero, sharding_axes = np.zeros((), g.dtype), axes_of_spec(spec)
    scattered = [dim for dim, axis in enumerate(axes) if axis in sharding_axes]
    remaining = tuple(axis for axis in axes if axis not in sharding_axes)
    # jnp.sum would reduce low-precision dtypes in float32.
    if scattered:
        g = lax.reduce(g, zero, lax.add, scattered)
    if not remaining:
        return with_layout(g, NamedSharding(setup.mesh, spec))
    g = with_layout(g, NamedSharding(setup.mesh, PartitionSpec(*remaining, *spec)))
    g = lax.reduce(g, zero, lax.add, range(len(remaining)))
    return with_layout(g, NamedSharding(setup.mesh, spec))


def _by_messages(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, step: Execution,
    messages: WeightMessages,
) -> MicrobatchTotals:  # fmt: skip
    """Gather weights and scatter gradients with messages.

    With reduce_gradients="each_microbatch", each micro-step gathers and scatters, layer by layer for stacked layers.
    With "once", all weights are gathered before the micro-steps, and all gradients are scattered after them. With
    "once_across_groups", each micro-step gathers and scatters in a group, and the sums are reduced across groups.
    """
    setup, is_once = state.setup, step.gathers_once
    region = BatchRegion(setup, options, step.batch_axes)

    def local(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
        noise = jax.random.fold_in(key, options.accumulate)  # micro-steps fold in smaller integers

        def with_weights(terms: Callable[..., Any], params: PyTree, *args: Any) -> Any:
            layout = functools.partial(messages.layout, noise)
            with _in_layer_loop(setup, step.gathering, layout):
                return terms(messages.gather_unstacked(params, noise), *args)

        def step_of(loss: Loss) -> MicroStep:
            return _sharded_step(functools.partial(with_weights, loss), setup, params)

        if is_once:
            params = messages.gather_all(params, noise)

            def step_once(loss: Loss) -> MicroStep:
                return functools.partial(micro_step, loss, options, setup, params)

            sums = region.sums(loss, step_once, params, extra, examples, key)
            sums = sums.replace(grads=messages.scatter_all(sums.grads, noise))
        else:
            stacks = {path: (messages.leaves[path].compute, messages.leaves[path].batch) for path in messages.stacks}
            check_stacks(loss, setup, stacks, messages.gather_unstacked(params, noise), extra, examples, key)
            sums = region.sums(loss, step_of, params, extra, examples, key, call=with_weights)
        return sums.replace(grads=messages.reduce_across(sums.grads, noise)) if messages.deferred_axes else sums

    specs = messages.specs
    sums = region.run(local, state.params, state, batch, key, specs=specs, grad_specs=setup.trained(specs))
    return sums.replace(grads=constrained(sums.grads, setup.named(setup.trained(grad_specs(setup, options)))))


def _sharded_step(loss: Callable[..., Any], setup: Setup, params: PyTree) -> MicroStep:
    """Return a micro-step whose gradients are summed over devices and sharded."""

    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> MicrobatchTotals:
        def loss_of_trained(trained: PyTree) -> Any:
            return loss(setup.with_frozen(trained, params), extra, micro, key)

        masters = jax.tree.map(at_least_float32, setup.trained(params))
        (value, (metrics, after)), grads = jax.value_and_grad(loss_of_trained, has_aux=True)(masters)
        return MicrobatchTotals(value, metrics, grads, after)

    return micro_step


@contextlib.contextmanager
def _in_layer_loop(setup: Setup, gathering: LayerGather, layout: Callable[[str], LayerLayout]) -> Iterator[None]:
    """Run the stacked layers of the model in a `LayerLoop`, and check that there are any."""
    if gathering == LayerGather():
        yield
        return
    context = NUMERICS.value
    assert context is not None
    before = context.num_scans
    decisions = {decision.path: decision for decision in setup.table.params}
    with running(LoopRunner(layout, decisions, gathering)):
        yield
    if context.num_scans == before and (gathering.ahead or gathering.keep):
        reason = "the model marks no layer: it never calls meshpar.scan_layers"
        fix = "run its stacked layers with mp.scan_layers(layer, x, params), or remove prefetch and keep"
        requested = "gather the weights of each layer"
        raise problem(f"strategy {setup.strategy.label}", requested, reason, fix, "unsupported-feature")


def _constrained_layout(setup: Setup, stack_path: str) -> LayerLayout:
    """Return a layout of sharding constraints, from which XLA derives the gathers and reductions of a layer."""
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
        gather=functools.partial(constrain, gathered_axes=setup.strategy.gathered_axes),
        scatter=functools.partial(constrain, gathered_axes=()),
    )


def _gathered_spec(decision: Decision, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of a layer that is gathered over `axes`. Axes that shard experts remain."""
    expert_axes: set[str] = set()
    if decision.leaf.is_expert:
        dims = zip(decision.spec[1:], (decision.leaf.names or ())[1:], strict=False)
        expert_axes = set(axes_of_spec(PartitionSpec(*(entry if name == "expert" else None for entry, name in dims))))
    return without_axes(PartitionSpec(*decision.spec[1:]), [axis for axis in axes if axis not in expert_axes])


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
        axes = set(execution.batch_axes) - set(owned_axes(execution, decision))
        gathered_bytes += layer_elements(execution, decision, axes) * execution.compute_dtype(decision).itemsize
        if leaf.is_trained:
            gradient_bytes += layer_elements(execution, decision, ()) * execution.reduce_dtype(decision).itemsize
    return gathered_bytes, gradient_bytes


@functools.cache
def engine(reduce: ReduceGradients | None, is_local: bool) -> GradientEngine:
    """Return the engine that reduces gradients at these times. `is_local`: each rank evaluates a part of the batch."""
    return GradientEngine(
        functools.partial(gradients, reduce=reduce),
        supports=LOCAL if is_local else frozenset(Feature),
        describe=functools.partial(describe, reduce=reduce),
        compile_options=lambda step: compile_options(step) if step.gathering.ahead else {},
    )


LOCAL = frozenset({Feature.ACCUMULATION, Feature.HOST_OFFLOAD, Feature.LAYER_LOOP})
"""Features of a loss that is evaluated in parts."""
