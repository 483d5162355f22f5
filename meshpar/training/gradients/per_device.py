"""Gradients computed per device, or per group of devices, in a `shard_map` over batch axes.

There are three modes:

    "once"                      Parameters are gathered before the micro-steps. Each device accumulates full gradients
                                of its local batch, which are reduced once, after the last micro-step.
    "once_across_groups"        The region is manual only over the axes that shard no gradient. In each micro-step XLA
                                gathers weights and reduce-scatters gradients inside a group. The accumulated shards
                                are reduced across groups once.
    strategy with `quantize`    Parameters are sharded. Weights are gathered and gradients scattered in low precision,
                                by the kernels of `zeropp.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.hardware.compile_options import Options
from meshpar.layers.losses import Loss, MicrobatchTotals, at_least_float32
from meshpar.layers.precision import NUMERICS
from meshpar.layers.scan import running
from meshpar.parallel.batch import split_examples
from meshpar.parallel.execution import Execution
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.errors import problem
from meshpar.sharding.types import PyTree, axes_of_spec, is_spec, path_str, without_axes
from meshpar.training.accumulation import (
    MicroStep,
    accumulated,
    constrained,
    grad_specs,
    in_compute,
    micro_keys,
    micro_step,
)
from meshpar.training.execution import Sharded, described
from meshpar.training.gradients.engine import Feature, GradientEngine
from meshpar.training.gradients.fsdp_prefetch import PrefetchRunner, compile_options
from meshpar.training.gradients.zeropp import (
    QuantizedGather,
    QuantizedPrefetchRunner,
    QuantizedRunner,
    make_quantized_gather,
)
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> MicrobatchTotals:
    """Return loss, metrics and gradients of a batch, summed over micro-steps and devices; see `xla.gradients`."""
    quantized = make_quantized_gather(state.setup, options.precision)
    if quantized is None:
        return _reduced_once(loss, options, state, batch, key, state.setup.batch_axes)
    return _quantized(loss, options, state, batch, key, quantized)


def gradients_of_groups(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array
) -> MicrobatchTotals:
    """Return loss, metrics and gradients of a batch, reduced across groups once; see `xla.gradients`."""
    setup = state.setup
    axes = setup.strategy.group_axes(setup.batch_axes)
    quantized = make_quantized_gather(setup, options.precision, deferred_axes=axes)
    if quantized is not None:
        return _quantized(loss, options, state, batch, key, quantized)
    with running(PrefetchRunner(setup)) if setup.strategy.prefetched_axes else contextlib.nullcontext():
        return _reduced_once(loss, options, state, batch, key, axes)


def _reduced_once(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, axes: tuple[str, ...]
) -> MicrobatchTotals:
    """Accumulate the gradients of the local batch and reduce them over `axes` once.

    The parameters are replicated over these axes. XLA partitions the computation over the other mesh axes, and in each
    micro-step reduces the gradients over the other batch axes into shards.

    Explicit mesh axes could express the same: weights of type `reduced` over the batch axes have `unreduced` gradients.
    That sends the same bytes for gradients, and in addition the loss of each micro-step. JAX up to version 0.12 refuses
    such weights where they are added to or multiplied with activations, as biases and norm scales are.
    """
    setup = state.setup
    inner_axes = tuple(axis for axis in setup.batch_axes if axis not in axes)
    params = in_compute(setup, state.params, options.precision.compute)
    specs = jax.tree.map(lambda spec: without_axes(spec, axes), setup.layout.params, is_leaf=is_spec)
    params = constrained(params, setup.named(specs))
    grad_layouts = setup.trained(setup.layout.grads)

    def local(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
        def step(loss: Loss) -> MicroStep:
            def sharded(extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
                sums = micro_step(loss, options, setup, params, extra, examples, key)
                return sums.replace(grads=constrained(sums.grads, grad_layouts)) if inner_axes else sums

            return sharded

        sums = _local_sums(loss, _evaluate, step, options, setup, axes, params, extra, examples, key)
        sums = _reduce_all_but_gradients(sums, axes)
        # Gradients have a new dim for each axis, which is sharded over it.
        return sums.replace(grads=jax.tree.map(lambda g: g.reshape(*(1,) * len(axes), *g.shape), sums.grads))

    sums = _by_device(local, setup, axes, PartitionSpec(), PartitionSpec(*axes))(params, state.extra, batch, key)
    specs = setup.trained(setup.layout.grads)
    grads = jax.tree.map(lambda g, spec: _summed(g, axes, spec, setup), sums.grads, specs)
    return sums.replace(grads=grads, count=_num_parts(setup, options, axes))


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


def _quantized(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, quantized: QuantizedGather
) -> MicrobatchTotals:
    """Gather weights and scatter gradients in low precision.

    With reduce_gradients="each_microbatch", each micro-step gathers and scatters, layer by layer for stacked layers.
    With "once", all weights are gathered before the micro-steps, and all gradients are scattered after them. With
    "once_across_groups", each micro-step gathers and scatters in a group, and the sums are reduced across groups.
    """
    setup, axes = state.setup, quantized.batch_axes
    noise = jax.random.fold_in(key, options.accumulate)  # micro-steps fold in smaller integers

    def local(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array, noise: jax.Array) -> MicrobatchTotals:
        call = _evaluate if options.is_once else functools.partial(_with_gathered_weights, setup, quantized, noise)
        params = quantized.gather_all(params, noise) if options.is_once else params

        def step(loss: Loss) -> MicroStep:
            if options.is_once:
                return functools.partial(micro_step, loss, options, setup, params)
            return _sharded_step(functools.partial(call, loss), setup, params)

        sums = _local_sums(loss, call, step, options, setup, axes, params, extra, examples, key)
        if options.is_once:
            sums = sums.replace(grads=quantized.scatter_all(sums.grads, noise))
        if quantized.deferred_axes:
            sums = sums.replace(grads=quantized.reduce_across(sums.grads, noise))
        return _reduce_all_but_gradients(sums, axes)

    run = _by_device(local, setup, axes, quantized.specs, setup.trained(quantized.specs))
    sums = run(state.params, state.extra, batch, key, noise)
    grads = constrained(sums.grads, setup.named(setup.trained(grad_specs(setup, options))))
    return sums.replace(grads=grads, count=_num_parts(setup, options, axes))


def _evaluate(terms: Callable[..., Any], *args: Any) -> Any:
    return terms(*args)


def _num_parts(setup: Setup, options: StepOptions, axes: tuple[str, ...]) -> int:
    """Return the number of micro-steps of a step, summed over the devices or groups along `axes`."""
    return options.accumulate * math.prod(setup.sizes[axis] for axis in axes)


def _by_device(
    local: Callable[..., MicrobatchTotals], setup: Setup, axes: tuple[str, ...], param_specs: PyTree, grad_specs: PyTree
) -> Callable[..., MicrobatchTotals]:
    """Return `local`, a function of (params, extra, examples, *keys), in a `shard_map` over batch axes."""
    replicated = PartitionSpec()

    def run(params: PyTree, extra: PyTree, examples: PyTree, *keys: jax.Array) -> MicrobatchTotals:
        def inside(params: PyTree, extra: PyTree, examples: PyTree, *keys: jax.Array) -> MicrobatchTotals:
            return local(params, extra, examples, *map(jax.random.wrap_key_data, keys))

        return jax.shard_map(
            inside,
            mesh=setup.mesh,
            in_specs=(param_specs, replicated, PartitionSpec(axes), *[replicated] * len(keys)),
            out_specs=MicrobatchTotals(replicated, replicated, grad_specs, replicated),  # type: ignore[arg-type]
            axis_names=set(axes),
            # The check is not needed, because the loss is differentiated inside and its collectives define their own
            # derivatives. It would refuse ordinary models, whose scan carries start as constants.
            check_vma=False,
        )(params, extra, examples, *map(jax.random.key_data, keys))

    return run


def _with_gathered_weights(
    setup: Setup, quantized: QuantizedGather, noise: jax.Array, terms: Callable[..., Any], params: PyTree, *args: Any
) -> Any:
    """Evaluate a loss on sharded parameters. Stacked layers are gathered layer by layer, other weights in advance."""
    context, cause, out = NUMERICS.value, None, None
    assert context is not None
    context.num_scans = 0
    is_ahead = bool(setup.strategy.prefetched_axes)
    runner = QuantizedPrefetchRunner(setup, quantized, noise) if is_ahead else QuantizedRunner(quantized, noise)
    with running(runner):
        try:
            out = terms(quantized.gather_unstacked(params, noise), *args)
        except (TypeError, ValueError) as error:
            cause = error
        # Layers outside of `scan_layers` fail, because their weights are shards.
        if quantized.per_layer and not context.num_scans:
            where = f"`{quantized.per_layer[0]}` under the strategy {setup.strategy.label}"
            reason = "the model marks no layer: it never calls meshpar.scan_layers"
            fix = "run its stacked layers with mp.scan_layers(layer, x, params)"
            raise problem(where, "gather the weights of each layer", reason, fix, "unsupported-feature") from cause
        if cause is not None:
            raise cause
    return out


def _sharded_step(loss: Callable[..., Any], setup: Setup, params: PyTree) -> MicroStep:
    """Return a micro-step whose gradients are summed over devices and sharded."""

    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> MicrobatchTotals:
        def loss_of_trained(trained: PyTree) -> Any:
            return loss(setup.with_frozen(trained, params), extra, micro, key)

        masters = jax.tree.map(at_least_float32, setup.trained(params))
        (value, (metrics, after)), grads = jax.value_and_grad(loss_of_trained, has_aux=True)(masters)
        return MicrobatchTotals(value, metrics, grads, after)

    return micro_step


def _local_sums(
    loss: Loss, call: Callable[..., Any], step: Callable[[Loss], MicroStep], options: StepOptions, setup: Setup,
    axes: tuple[str, ...], params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array,
) -> MicrobatchTotals:  # fmt: skip
    """Sum the micro-steps of the local batch, with random keys that differ between devices.

    `call` is a function (terms, params, extra, examples, key) that evaluates the loss on a part of the batch. `step`
    returns the micro-step of a loss.
    """
    random_keys, count = setup.model.random_keys(), options.accumulate
    local_key = jax.random.fold_in(key, lax.axis_index(axes))
    local_extra = _local_keys(extra, random_keys, axes)
    micro_batches = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), examples)
    if inner_axes := tuple(axis for axis in setup.batch_axes if axis not in axes):
        layout = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(inner_axes))
        micro_batches = jax.tree.map(lambda x: split_examples(x, count, layout), examples)
    keys = local_key[None] if count == 1 else micro_keys(local_key, count)
    where = f"{setup.strategy.label}, train_step(accumulate={count}, reduce_gradients={options.reduce_gradients!r})"
    sizes = {axis: setup.sizes[axis] for axis in axes}

    def evaluate(terms: Callable[..., Any], args: tuple[PyTree, PyTree], *inputs: Any) -> Any:
        return call(terms, *args, *inputs)

    loss = loss.over_parts(where, evaluate, (params, local_extra), micro_batches, keys, axes=sizes)
    if count == 1:
        sums = step(loss)(local_extra, examples, local_key)
    else:
        sums = accumulated(step(loss), local_extra, micro_batches, keys)
    return sums.replace(extra=_common_keys(extra, local_extra, sums.extra, random_keys, axes))


def _local_keys(extra: PyTree, random_keys: Mapping[str, str], axes: tuple[str, ...]) -> PyTree:
    """Fold the rank into the PRNG keys of the model. With equal keys, all devices would drop the same units."""

    def fold(path: Any, x: jax.Array) -> jax.Array:
        if path_str(path) not in random_keys:
            return x
        keys = jax.random.wrap_key_data(x, impl=random_keys[path_str(path)]).reshape(-1)
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, lax.axis_index(axes))
        return jax.random.key_data(folded).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(fold, extra)


def _common_keys(
    before: PyTree, local: PyTree, after: PyTree, random_keys: Mapping[str, str], axes: tuple[str, ...]
) -> PyTree:
    """Replace the PRNG keys of the model by keys that are equal on all devices.

    An NNX stream only counts, so its key stays as it was before the step. If a module has replaced its key, all devices
    receive the new key of the first device.
    """

    def common(path: Any, old: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        if path_str(path) not in random_keys:
            return end
        new = jnp.where(jnp.all(end == start), old, end)
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, new, jnp.zeros_like(new)), axes)

    return jax.tree_util.tree_map_with_path(common, before, local, after)


def _reduce_all_but_gradients(sums: MicrobatchTotals, axes: tuple[str, ...]) -> MicrobatchTotals:
    """Sum loss and metrics over devices, and average the model's variables (maximum for integers)."""

    def reduce_extra(x: jax.Array) -> jax.Array:
        return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmax(x, axes)

    loss, metrics = lax.psum((sums.loss, sums.metrics), axes)
    return sums.replace(loss=loss, metrics=metrics, extra=jax.tree.map(reduce_extra, sums.extra))


def describe(setup: Sharded, options: StepOptions) -> Execution:
    """Describe a step that computes gradients per device."""
    layers_ahead = int(bool(setup.strategy.prefetched_axes) and not options.is_once)
    formats = setup.strategy.quantize
    return described(setup, options, gathers_once=options.is_once, formats=formats, layers_ahead=layers_ahead)


def describe_groups(setup: Sharded, options: StepOptions) -> Execution:
    """Describe a step that reduces gradients across groups once."""
    strategy, axes = setup.strategy, setup.strategy.group_axes(setup.batch_axes)
    layers_ahead = int(bool(strategy.prefetched_axes))
    return described(setup, options, deferred_axes=axes, formats=strategy.quantize, layers_ahead=layers_ahead)


def _compile_options(execution: Execution) -> Options:
    return compile_options(execution) if execution.layers_ahead else {}


SUPPORTED = frozenset({Feature.ACCUMULATION, Feature.QUANTIZE, Feature.HOST_OFFLOAD, Feature.PREFETCH})
ENGINE = GradientEngine(gradients, SUPPORTED, describe, _compile_options)
ONCE = dataclasses.replace(ENGINE, supports=SUPPORTED - {Feature.PREFETCH})
"""The engine with reduce_gradients="once": all weights are gathered before the layers run."""
ACROSS_GROUPS = GradientEngine(gradients_of_groups, SUPPORTED, describe_groups, _compile_options)
