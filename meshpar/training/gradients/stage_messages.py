"""Quantized messages of pipeline stages: gathers before the first tick, reductions after the last.

Both run in a `shard_map` over all axes. Between them, the stages receive gathered weights and return a gradient
for each rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.layers.precision import Precision
from meshpar.parallel.execution import Execution
from meshpar.pipeline.stage_program import Params
from meshpar.sharding.types import Leaf, PyTree, is_spec, path_str
from meshpar.training.gradients.weight_messages import MessageLeaf, WeightMessages, messages_of
from meshpar.training.state import Setup


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageMessages:
    """Gathers `Params` of stages and reduces their gradients."""

    setup: Setup
    weights: WeightMessages
    grads: WeightMessages
    """Messages of gradients. Gradients of embedding and head have a first dim for the stage."""
    key: jax.Array
    """Random bits for stochastic rounding."""

    @staticmethod
    def of(
        leaves: Params, shapes: Params, specs: Params, owned: list[PartitionSpec], key: jax.Array, *, setup: Setup,
        precision: Precision, step: Execution,
    ) -> StageMessages:  # fmt: skip
        """Return the messages of lists of parameters.

        Args:
          leaves: the parameters of the model.
          shapes, specs: arrays of the stages, or their shapes, and their shardings.
          owned: shardings of the chunks over the batch axes that remain in the stages, as for experts.
          key: PRNG key, equal on all ranks.
        """
        assert step.pipeline is not None
        stages, axis = step.pipeline.stages, step.pipeline.axis
        options: dict[str, Any] = {"setup": setup, "precision": precision}

        def chunk(index: int, leaf: Leaf, x: Any, spec: PartitionSpec, kept: PartitionSpec) -> MessageLeaf:
            return MessageLeaf.of(leaf, index, x.shape, spec, kept, **options)

        def other(index: int, leaf: Leaf, x: Any, spec: PartitionSpec, *, by_stage: bool) -> MessageLeaf:
            shape, entries = ((stages, *x.shape), (axis, *spec)) if by_stage else (x.shape, spec)
            return MessageLeaf.of(leaf, -1 - index, shape, PartitionSpec(*entries), PartitionSpec(), **options)

        rows = list(zip(leaves.embedding_and_head, shapes.embedding_and_head, specs.embedding_and_head, strict=True))
        chunks = [
            chunk(i, *each)
            for i, each in enumerate(zip(leaves.chunks, shapes.chunks, specs.chunks, owned, strict=True))
        ]
        weights, grads = (
            [other(i, *each, by_stage=by_stage) for i, each in enumerate(rows)] for by_stage in (False, True)
        )
        messages = (messages_of(Params(chunks, others), setup, step, in_manual=True) for others in (weights, grads))
        return StageMessages(setup=setup, weights=next(messages), grads=next(messages), key=key)

    def gather(self, params: Params) -> Params:
        """Return weights that are replicated over the batch axes, except for experts."""

        def spec(leaf: MessageLeaf, *, is_gathered: bool) -> PartitionSpec:
            return leaf.spec(is_gathered=is_gathered, all_axes=True)

        before, after = (
            self._specs(self.weights, params, functools.partial(spec, is_gathered=mark)) for mark in (False, True)
        )
        return self._run(self.weights.gather_all, params, before, after)

    def reduce(self, grads: Params) -> Params:
        """Sum gradients over the batch axes and return their shards.

        Gradients of chunks are `[rank, chunk, ...]`, where experts have only the ranks that share them. Gradients of
        embedding and head are `[stage, rank, ...]`. The dim of the rank is removed.
        """
        axes = self.grads.batch_axes

        def by_rank(leaf: MessageLeaf) -> PartitionSpec:
            kept = {axis for dim in leaf.owned for axis in dim}
            ranks = tuple(axis for axis in axes if axis not in kept)
            return PartitionSpec(ranks, *leaf.spec(is_gathered=True, all_axes=True))

        def local(grads: Params, key: jax.Array) -> Params:
            chunks, other = grads
            one = Params(jax.tree.map(lambda g: g[0], chunks), jax.tree.map(lambda g: g[:, 0], other))
            return self.grads.scatter_all(one, key)

        def by_stage(spec: PartitionSpec) -> PartitionSpec:
            rank, stage, *dims = spec
            return PartitionSpec(stage, rank, *dims)

        before = self._specs(self.grads, grads, by_rank)
        other = jax.tree.map(by_stage, before.embedding_and_head, is_leaf=is_spec)
        after = self._specs(self.grads, grads, lambda leaf: leaf.spec(all_axes=True))
        return self._run(local, grads, Params(before.chunks, other), after)

    def _specs(self, messages: WeightMessages, tree: Params, of: Callable[[MessageLeaf], PartitionSpec]) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, _: of(messages.leaves[path_str(path)]), tree)

    def _run(self, f: Callable[[Any, jax.Array], Any], tree: Params, specs: PyTree, out: PyTree) -> Params:
        def inside(tree: Params, key: jax.Array) -> Params:
            return f(tree, jax.random.wrap_key_data(key))

        return jax.shard_map(
            inside, mesh=self.setup.mesh, in_specs=(specs, PartitionSpec()), out_specs=out, check_vma=False
        )(tree, jax.random.key_data(self.key))
