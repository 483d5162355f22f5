"""Every device makes the gradients of its own rows: XLA sees no sum over devices inside the loop of micro-steps.

The step is manual over the axes that split the batch. Two ways, by what enters:

    whole weights                  gradients summed whole on every device, one reduction behind the last micro-step
                                   (`reduce_gradients="once"`)
    shards, strategy with quantize weights gathered and gradients scattered in few bits, by hand (`unshard.py`)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.layers.losses import Loss, MicrobatchTotals
from meshpar.layers.precision import Numerics
from meshpar.layers.scan import gathering
from meshpar.sharding.types import PyTree, is_spec, path_str, problem, without_axes
from meshpar.training.accumulation import (
    MicroStep,
    accumulated,
    constrained,
    grad_specs,
    in_compute,
    micro_keys,
    micro_step,
    wide,
)
from meshpar.training.gradients.engine import Feature, GradientEngine
from meshpar.training.gradients.zeropp import QuantizedGather, make_unshard
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> MicrobatchTotals:
    """Loss, metrics and gradients over a batch, summed over micro-steps and devices; arguments as for `plain`.

    Raises:
      ValueError: a strategy that quantizes, and no parameter that is split over an axis of the batch; a model that
        does not say where its layers begin.
    """
    unshard = make_unshard(state.setup, options.precision, state.setup.batch_axes)
    if unshard is None:
        return _reduced_once(loss, options, state, batch, key)
    return _quantized(loss, options, state, batch, key, unshard)


def _reduced_once(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array
) -> MicrobatchTotals:
    """Every device sums the gradients of its own rows; one reduction follows.

    Manual over the axes that split the batch, so that XLA sees no sum over devices inside the loop; other axes stay
    XLA's. Parameters enter replicated over those axes: gathered once.

    On Explicit axes types could say it: of weights that are `reduced` over the batch's axes, gradients are `unreduced`
    till they are laid out behind the loop. That sends the same bytes there, and each micro-step's loss besides, and jax
    up to 0.12 refuses such a weight beside rows where it is added or multiplied, as a bias or a norm's scale is.
    """
    setup = state.setup
    axes = setup.batch_axes
    params = in_compute(setup, state.params, options.precision.compute)
    whole = jax.tree.map(lambda spec: without_axes(spec, axes), setup.layout.params, is_leaf=is_spec)
    params = constrained(params, setup.named(whole))

    def local(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> MicrobatchTotals:
        def call(terms: Callable[..., Any], params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> Any:
            return terms(params, extra, rows, key)

        def step(loss: Loss) -> MicroStep:
            return functools.partial(micro_step, loss, options, setup, params)

        sums = _local_sums(loss, call, step, options, setup, axes, params, extra, rows, key)
        if not axes:
            return sums
        # Every device's own gradients behind a dim that the axes split.
        sums = _reduce_all_but_gradients(sums, axes)
        return sums.replace(grads=jax.tree.map(lambda g: g[None], sums.grads))

    if not axes:
        return local(params, state.extra, batch, key).replace(count=options.accumulate)
    sums = _by_device(local, setup, axes, PartitionSpec(), PartitionSpec(axes))(params, state.extra, batch, key)
    # Left to XLA, for a scatter written by hand would first gather what other axes split.
    # lax.reduce, for jnp.sum would widen a narrow reduction to float32.
    summed = jax.tree.map(lambda g: lax.reduce(g, np.zeros((), g.dtype), lax.add, (0,)), sums.grads)
    grads = constrained(summed, setup.named(setup.trained(setup.layout.grads)))
    return sums.replace(grads=grads, count=_num_parts(setup, options, axes))


def _quantized(
    loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, unshard: QuantizedGather
) -> MicrobatchTotals:
    """Weights gathered and gradients scattered in few bits, by hand: `meshpar.training.gradients.zeropp` says how.

    Manual over the axes that split the batch, as when gradients are reduced once; parameters enter as shards. In mode
    "each_microbatch" every micro-step gathers and scatters, stacked layers inside the loops over them; in mode "once"
    all weights are gathered before the micro-steps and all gradients scattered behind them.
    """
    setup, axes = state.setup, unshard.batch_axes
    noise = jax.random.fold_in(key, options.accumulate)  # micro-steps fold in the numbers below

    def local(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array, noise: jax.Array) -> MicrobatchTotals:
        if options.is_once:
            params = unshard.whole(params, noise)

        def call(terms: Callable[..., Any], params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> Any:
            if options.is_once:
                return terms(params, extra, rows, key)
            return _gathering(setup, unshard, noise, terms, params, extra, rows, key)

        def step(loss: Loss) -> MicroStep:
            if options.is_once:
                return functools.partial(micro_step, loss, options, setup, params)
            return _sharded_step(functools.partial(call, loss), setup, params)

        sums = _local_sums(loss, call, step, options, setup, axes, params, extra, rows, key)
        if options.is_once:
            sums = sums.replace(grads=unshard.scattered(sums.grads, noise))
        return _reduce_all_but_gradients(sums, axes)

    run = _by_device(local, setup, axes, unshard.specs, setup.trained(unshard.specs))
    sums = run(state.params, state.extra, batch, key, noise)
    grads = constrained(sums.grads, setup.named(setup.trained(grad_specs(setup, options))))
    return sums.replace(grads=grads, count=_num_parts(setup, options, axes))


def _num_parts(setup: Setup, options: StepOptions, axes: tuple[str, ...]) -> int:
    """Count the parts of the global batch: micro-steps times devices."""
    return options.accumulate * math.prod(setup.sizes[axis] for axis in axes)


def _by_device(
    local: Callable[..., MicrobatchTotals], setup: Setup, axes: tuple[str, ...], params: PyTree, grads: PyTree
) -> Callable[..., MicrobatchTotals]:
    """A function of (params, extra, rows, keys...) run by every device along the axes that split the batch."""
    whole = PartitionSpec()

    def run(held: PyTree, extra: PyTree, rows: PyTree, *keys: jax.Array) -> MicrobatchTotals:
        def inside(held: PyTree, extra: PyTree, rows: PyTree, *keys: jax.Array) -> MicrobatchTotals:
            return local(held, extra, rows, *map(jax.random.wrap_key_data, keys))

        return jax.shard_map(
            inside,
            mesh=setup.mesh,
            in_specs=(params, whole, PartitionSpec(axes), *[whole] * len(keys)),
            out_specs=MicrobatchTotals(whole, whole, grads, whole),  # type: ignore[arg-type]
            axis_names=set(axes),
            # The loss is differentiated inside, and its collectives have derivatives of their own: there is nothing for
            # the check to protect, and it would refuse ordinary models whose scan carries start as constants.
            check_vma=False,
        )(held, extra, rows, *map(jax.random.key_data, keys))

    return run


def _gathering(
    setup: Setup, unshard: QuantizedGather, noise: jax.Array, terms: Any, params: PyTree, extra: PyTree, rows: PyTree,
    key: jax.Array,
) -> Any:  # fmt: skip
    """Evaluate a loss of whole weights on shards: stacked layers are gathered one by one, everything else before."""

    def gather(at: str, layer: PyTree) -> PyTree:
        return unshard.layer(noise, at, layer)

    with gathering(gather) as context:
        context.num_scans = 0
        try:
            out = terms(unshard.entered(params, noise), extra, rows, key)
        except (TypeError, ValueError) as error:
            _check_layers_gathered(setup, unshard, context, error)
            raise
        _check_layers_gathered(setup, unshard, context, None)
    return out


def _sharded_step(loss: Callable[..., Any], setup: Setup, params: PyTree) -> MicroStep:
    """Return a micro-step whose gradients are shards of the sums over all devices."""

    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> MicrobatchTotals:
        def of_trained(trained: PyTree) -> Any:
            return loss(setup.with_frozen(trained, params), extra, micro, key)

        masters = jax.tree.map(wide, setup.trained(params))
        (value, (metrics, after)), grads = jax.value_and_grad(of_trained, has_aux=True)(masters)
        return MicrobatchTotals(value, metrics, grads, after)

    return micro_step


def _check_layers_gathered(setup: Setup, unshard: QuantizedGather, context: Numerics, cause: Exception | None) -> None:
    """A model that computes with a layer's shards fails by their shapes: this is why."""
    if unshard.per_layer and not context.num_scans:
        where = f"`{unshard.per_layer[0]}` under the strategy {setup.strategy.label}"
        exists = "the model scans its stacked layers and never calls meshpar.scan_layers"
        fix = "run them by mp.scan_layers(layer, x, params) in place of the scan"
        raise problem(where, "gather one layer at a time", exists, fix) from cause


def _local_sums(
    loss: Loss,
    call: Callable[..., Any],
    step: Callable[[Loss], MicroStep],
    options: StepOptions,
    setup: Setup,
    axes: tuple[str, ...],
    params: PyTree,
    extra: PyTree,
    rows: PyTree,
    key: jax.Array,
) -> MicrobatchTotals:
    """Sum the micro-steps of this device's examples, with random keys that no other device has.

    `call(terms, params, extra, rows, key)` evaluates a loss on a part of the batch; `step` makes its gradients.
    """
    random_keys = setup.model.random_keys()
    here = jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
    own = _own_keys(extra, random_keys, axes)
    count = options.accumulate
    micro_batches = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)
    keys = here[None] if count == 1 else micro_keys(here, count)
    where = f"{setup.strategy.label}, train_step(accumulate={count}, reduce_gradients={options.reduce_gradients!r})"
    over = {axis: setup.sizes[axis] for axis in axes}
    loss = loss.over_parts(
        where, lambda terms, args, *of: call(terms, *args, *of), (params, own), micro_batches, keys, axes=over
    )
    sums = step(loss)(own, rows, here) if count == 1 else accumulated(step(loss), own, micro_batches, keys)
    extra = _common_keys(extra, own, sums.extra, random_keys, axes)
    return sums.replace(extra=extra)


def _own_keys(extra: PyTree, random_keys: Mapping[str, str], axes: tuple[str, ...]) -> PyTree:
    """The model's own random keys, another on every device: with the same, all would drop the same units."""

    def own(path: Any, x: jax.Array) -> jax.Array:
        if not axes or path_str(path) not in random_keys:
            return x
        keys = jax.random.wrap_key_data(x, impl=random_keys[path_str(path)]).reshape(-1)
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, lax.axis_index(axes))
        return jax.random.key_data(folded).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(own, extra)


def _common_keys(
    before: PyTree, own: PyTree, after: PyTree, random_keys: Mapping[str, str], axes: tuple[str, ...]
) -> PyTree:
    """The model's extras with the keys that all devices keep: as they were, or the first device's where they moved.

    A stream of NNX counts and leaves its key; a module may also replace a key of its own.
    """

    def kept(path: Any, old: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        if not axes or path_str(path) not in random_keys:
            return end
        mine = jnp.where(jnp.all(end == start), old, end)
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, mine, jnp.zeros_like(mine)), axes)

    return jax.tree_util.tree_map_with_path(kept, before, own, after)


def _reduce_all_but_gradients(sums: MicrobatchTotals, axes: tuple[str, ...]) -> MicrobatchTotals:
    """Sum over devices, model extras averaged; gradients as they are."""

    def reduce_extra(x: jax.Array) -> jax.Array:
        return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmax(x, axes)

    loss, metrics = lax.psum((sums.loss, sums.metrics), axes)
    return sums.replace(loss=loss, metrics=metrics, extra=jax.tree.map(reduce_extra, sums.extra))


ENGINE = GradientEngine(
    gradients, supports=frozenset({Feature.ACCUMULATION, Feature.QUANTIZE, Feature.HOST_OFFLOAD}), uses_local_batch=True
)
