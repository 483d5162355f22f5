"""A `shard_map` over batch axes, in which each rank evaluates the loss on its part of the batch.

Random keys differ between ranks. Metrics and losses are summed over ranks, and variables of the model are averaged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layers.losses import Loss, MicrobatchTotals
from meshpar.parallel.batch import split_examples
from meshpar.sharding.types import PyTree, path_str
from meshpar.training.accumulation import MicroStep, accumulated, micro_keys
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState

Local = Callable[..., MicrobatchTotals]
"""A function (params, extra, examples, key) -> totals of the local batch."""


@dataclasses.dataclass(frozen=True)
class BatchRegion:
    """A region of a step that is manual over `axes`, which shard the batch."""

    setup: Setup
    options: StepOptions
    axes: tuple[str, ...]

    def run(
        self, local: Local, params: PyTree, state: TrainState, batch: PyTree, key: jax.Array, *, specs: PyTree,
        grad_specs: PyTree,
    ) -> MicrobatchTotals:  # fmt: skip
        """Run `local` on each rank.

        Args:
          local: function (params, extra, examples, key) -> totals of the local batch. Its gradients are returned as
            they are, and its other values are reduced over ranks.
          params: parameters, with these `specs` in the region.
          state, batch, key: the arguments of a gradient engine.
          grad_specs: specs of the local gradients.
        """
        replicated = PartitionSpec()

        def inside(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array) -> MicrobatchTotals:
            return self._reduced(local(params, extra, examples, jax.random.wrap_key_data(key)))

        sums = jax.shard_map(
            inside,
            mesh=self.setup.mesh,
            in_specs=(specs, replicated, PartitionSpec(self.axes), replicated),
            out_specs=MicrobatchTotals(replicated, replicated, grad_specs, replicated),  # type: ignore[arg-type]
            axis_names=set(self.axes),
            # The check is not needed, because the loss is differentiated inside and its collectives define their own
            # derivatives. It would refuse ordinary models, whose scan carries start as constants.
            check_vma=False,
        )(params, state.extra, batch, jax.random.key_data(key))
        return sums.replace(count=self.options.accumulate * math.prod(self.setup.sizes[axis] for axis in self.axes))

    def sums(
        self, loss: Loss, step: Callable[[Loss], MicroStep], params: PyTree, extra: PyTree, examples: PyTree,
        key: jax.Array, *, call: Callable[..., Any] = lambda terms, *args: terms(*args),
    ) -> MicrobatchTotals:  # fmt: skip
        """Sum the micro-steps of the local batch, inside the region.

        Args:
          loss: the loss function of the step.
          step: returns the micro-step of a loss.
          params, extra, examples, key: the arguments of `local` in `run`.
          call: function (terms, params, extra, examples, key) that evaluates the loss on a part of the batch.
        """
        setup, axes, count = self.setup, self.axes, self.options.accumulate
        local_key = jax.random.fold_in(key, lax.axis_index(axes))
        local_extra = self._local_keys(extra)
        micro_batches = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), examples)
        if inner_axes := tuple(axis for axis in setup.batch_axes if axis not in axes):
            layout = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(inner_axes))
            micro_batches = jax.tree.map(lambda x: split_examples(x, count, layout), examples)
        keys = local_key[None] if count == 1 else micro_keys(local_key, count)
        mode = self.options.reduce_gradients
        where = f"{setup.strategy.label}, train_step(accumulate={count}, reduce_gradients={mode!r})"
        sizes = {axis: setup.sizes[axis] for axis in axes}

        def evaluate(terms: Callable[..., Any], args: tuple[PyTree, PyTree], *inputs: Any) -> Any:
            return call(terms, *args, *inputs)

        loss = loss.over_parts(where, evaluate, (params, local_extra), micro_batches, keys, axes=sizes)
        if count == 1:
            sums = step(loss)(local_extra, examples, local_key)
        else:
            sums = accumulated(step(loss), local_extra, micro_batches, keys)
        return sums.replace(extra=self._common_keys(extra, local_extra, sums.extra))

    def _local_keys(self, extra: PyTree) -> PyTree:
        """Fold the rank into the PRNG keys of the model. With equal keys, all devices would drop the same units."""
        random_keys = self.setup.model.random_keys()

        def fold(path: Any, x: jax.Array) -> jax.Array:
            if path_str(path) not in random_keys:
                return x
            keys = jax.random.wrap_key_data(x, impl=random_keys[path_str(path)]).reshape(-1)
            folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, lax.axis_index(self.axes))
            return jax.random.key_data(folded).reshape(x.shape)

        return jax.tree_util.tree_map_with_path(fold, extra)

    def _common_keys(self, before: PyTree, local: PyTree, after: PyTree) -> PyTree:
        """Replace the PRNG keys of the model by keys that are equal on all devices.

        An NNX stream only counts, so its key stays as it was before the step. If a module has replaced its key, all
        devices receive the new key of the first device.
        """
        random_keys = self.setup.model.random_keys()

        def common(path: Any, old: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
            if path_str(path) not in random_keys:
                return end
            new = jnp.where(jnp.all(end == start), old, end)
            return lax.psum(jnp.where(lax.axis_index(self.axes) == 0, new, jnp.zeros_like(new)), self.axes)

        return jax.tree_util.tree_map_with_path(common, before, local, after)

    def _reduced(self, sums: MicrobatchTotals) -> MicrobatchTotals:
        """Sum loss and metrics over devices, and average the model's variables (maximum for integers)."""

        def reduce_extra(x: jax.Array) -> jax.Array:
            return lax.pmean(x, self.axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmax(x, self.axes)

        loss, metrics = lax.psum((sums.loss, sums.metrics), self.axes)
        return sums.replace(loss=loss, metrics=metrics, extra=jax.tree.map(reduce_extra, sums.extra))
