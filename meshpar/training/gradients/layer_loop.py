"""The loop over stacked layers that gathers their weights and reduces their gradients.

    ahead = 1
    forward     carry x, W[l]    iteration l:  gather W[l+1]  ‖  x = layer l(x, W[l])
    backward    carry g, W[l]    iteration l:  gather W[l-1]  ‖  recompute layer l ─► g, dW[l] ─► reduce dW[l]

    layer       0 ─────────── L-keep ─────────── L-ahead ─────────── L-1
    weights       gathered in      gathered once,      gathered once,
                  both passes      in a loop           outside of the loops

The gather and the layer of an iteration are independent, so the compiler overlaps them. In a plain scan a layer depends
on gathers of its own iteration, so the first gather is exposed. The last `ahead` layers run outside of the loops, and
overlap with the gather of the head and the reduction of its gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layers.scan import (
    Aux,
    Layer,
    LayerRunner,
    PrefetchedWeight,
    check_alike,
    leaf_at,
    on_slices,
    scanned,
    unroll_of,
    with_aux,
)
from meshpar.parallel.execution import LayerGather
from meshpar.sharding.types import Decision, PyTree, path_str


class LayerLayout(NamedTuple):
    """The communication of the weights of a layer."""

    gather: Callable[[PyTree], PyTree]
    """Gathers the weights that the layer computes with from its shards, or from its message."""
    scatter: Callable[[PyTree], PyTree]
    """Reduces gradients to the shards of the parameters. Gradients of frozen weights are None."""
    message: Callable[[PyTree], PyTree] | None = None
    """First part of the gather: shards -> arrays that are saved for the backward pass. `None` saves nothing."""
    weights: Callable[[PyTree], PyTree] = lambda shards: shards
    """Differentiable gather, for layers that run in a plain scan. XLA gathers weights if it returns the shards."""

    def gathered(self, shards: PyTree) -> tuple[PyTree, PyTree]:
        """Return the weights and the message, or None."""
        message = None if self.message is None else self.message(shards)
        return self.gather(shards if message is None else message), message


@dataclasses.dataclass(frozen=True, eq=False)
class LoopRunner(LayerRunner):
    """Runs stacked layers in a `LayerLoop`."""

    layout: Callable[[str], LayerLayout]
    """Returns the layout of the stacked layers at a path."""
    decisions: Mapping[str, Decision]
    """Parameters by path."""
    gathering: LayerGather
    regathers = True

    def run(self, stack_path: str, layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree, PyTree]) -> PyTree:
        layout, (params, extra, caches) = self.layout(stack_path), inputs
        matches = self._matches(stack_path, params)
        weights = jax.tree.leaves(params, is_leaf=_is_ahead)
        if any(x.ndim < len(match.leaf.shape) for x, match in zip(weights, jax.tree.leaves(matches), strict=True)):
            # An outer layer contains the stack. Its weights were gathered with the weights of that layer.
            return super().run(stack_path, layer, x, inputs)

        def on_weights(x: Any, inputs: tuple[PyTree, PyTree, PyTree]) -> Any:
            return layer(x, (layout.weights(inputs[0]), *inputs[1:]))

        if caches is not None:  # decoding has no backward pass
            with jax.named_scope(stack_path):
                return scanned(on_weights, x, inputs, with_caches=True, unroll=unroll_of(layer))
        # A scan runs layers without weights, and refuses inputs of unequal length.
        is_plain = len({len(leaf) for leaf in jax.tree.leaves(inputs)}) != 1 or not jax.tree.leaves(params)

        def run(layer: Layer, x: Any) -> Any:
            if is_plain:
                return scanned(layer, x, inputs)
            is_trained = jax.tree.map(lambda _, match: match.leaf.is_trained, params, matches)
            return looped(layer, x, (params, extra), layout, self.gathering, is_trained)

        with jax.named_scope(stack_path):
            return on_slices(layer, x, run)

    def _matches(self, stack_path: str, params: PyTree) -> PyTree:
        """Return the decision of the parameter for each weight of a stack."""

        def match(path: Any, weight: jax.Array) -> Decision:
            return leaf_at(stack_path, path_str(path), self.decisions, lambda match: match.leaf.is_trained)

        return jax.tree_util.tree_map_with_path(match, params, is_leaf=_is_ahead)


def looped(
    layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree], layout: LayerLayout, gathering: LayerGather,
    is_trained: PyTree = None,
) -> PyTree:  # fmt: skip
    """Run stacked layers like `layers.scanned`, with gathers and reductions as in the module's picture.

    Args:
      layer: function (x, (weights, extra, None)) -> x, or -> (x, Aux). Its `jax.checkpoint` policy saves no weight for
        the backward pass.
      inputs: stacked parameters and extra inputs.
      layout: the communication of the weights of a layer.
      gathering: numbers of layers that are gathered ahead and kept.
      is_trained: boolean pytree, True for trainable weights. `None` means that all weights are trainable.
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
    num_layers = len(jax.tree.leaves(params)[0])
    ahead = min(gathering.ahead, num_layers)
    loop = LayerLoop(
        pure, layout, is_trained, num_layers=num_layers, ahead=ahead,
        keep=min(max(gathering.keep, ahead), num_layers),
        unroll=unroll_of(layer),
    )  # fmt: skip
    run = jax.custom_vjp(lambda *args: loop.forward(*args)[0])
    run.defvjp(loop.forward, loop.backward)
    y, losses, metrics = run(x, params, smooth, consts, fixed)
    return y if losses is None else (y, Aux(losses.sum(0), metrics))


class _Part(NamedTuple):
    """Consecutive layers of a stack: a loop, or a single layer outside of the loops."""

    layers: slice
    is_loop: bool
    keeps: bool
    """Whether the weights gathered in the forward pass are kept for the backward pass."""

    def of(self, stacked: PyTree) -> PyTree:
        """Return the inputs of these layers."""
        return jax.tree.map(lambda x: x[self.layers if self.is_loop else self.layers.start], stacked)

    def run(self, step: Callable[[Any, Any], Any], carry: Any, inputs: Any, **options: Any) -> Any:
        """Run `step` as in `lax.scan`. The second of its two outputs has no dim for the layer outside of the loops."""
        if self.is_loop:
            return lax.scan(step, carry, inputs, **options)
        carry, (out, saved) = step(carry, inputs)
        return carry, (jax.tree.map(lambda x: x[None], out), saved)


@dataclasses.dataclass(eq=False)
class LayerLoop:
    """Forward and backward pass of stacked layers."""

    body: Callable[..., Any]
    """(x, weights, smooth, fixed, *consts) -> ((y, loss), metrics). `smooth` and `fixed` are the floating-point and the
    integer extra inputs of the layer."""
    layout: LayerLayout
    is_trained: PyTree
    num_layers: int
    ahead: int
    keep: int
    """At least `ahead`."""
    unroll: int
    vjps: dict[int, tuple[Any, list[int | None]]] = dataclasses.field(default_factory=dict)
    """For each part, by its first layer: the structure of the backward function, and an index for each residual. A
    residual that equals an argument of `_layer`, such as a weight, is not saved: its index is that of the argument.
    Else None."""

    @property
    def _parts(self) -> list[_Part]:
        kept, outside = self.num_layers - self.keep, self.num_layers - self.ahead
        parts = [_Part(slice(0, kept), True, keeps=False), _Part(slice(kept, outside), True, keeps=True)]
        parts += [_Part(slice(layer, layer + 1), False, keeps=True) for layer in range(outside, self.num_layers)]
        return [part for part in parts if part.layers.stop > part.layers.start]

    def forward(self, x: Any, params: PyTree, smooth: PyTree, consts: PyTree, fixed: PyTree) -> Any:
        queue, outs, saved = [self._gathered(params, layer) for layer in range(self.ahead)], [], []

        for part in self._parts:

            def step(carry: Any, inputs: Any, part: _Part = part) -> Any:
                (x, queue), (layer, smooth, fixed) = carry, inputs
                if part.is_loop:
                    queue = [*queue, self._gathered(params, layer + self.ahead)]
                (weights, message), *queue = queue
                y, out, residuals = self._layer(part, x, weights, smooth, fixed, consts)
                return (y, queue), (out, (residuals, *((weights, None) if part.keeps else (None, message))))

            inputs = part.of((jnp.arange(self.num_layers), smooth, fixed))
            (x, queue), (out, more) = part.run(step, (x, queue), inputs, unroll=self.unroll)
            outs.append(out)
            saved.append(more)
        losses, metrics = _joined(outs)
        return (x, losses, metrics), (params, smooth, consts, fixed, saved)

    def backward(self, residuals: Any, cotangents: Any) -> Any:
        params, smooth, consts, fixed, saved = residuals
        dy, dlosses, _ = cotangents
        messages, kept, grads = saved[0][2], self.num_layers - self.keep, []
        queue = [self._gathered_again(params, messages, max(kept - 1 - i, 0)) for i in range(self.ahead if kept else 0)]
        carry = dy, queue, jax.tree.map(jnp.zeros_like, consts)

        for part, (residuals, weights, _) in zip(reversed(self._parts), reversed(saved), strict=True):

            def step(carry: Any, inputs: Any, part: _Part = part) -> Any:
                (dy, queue, dconsts), (layer, dloss, smooth, fixed, residuals, weights) = carry, inputs
                if not part.keeps:
                    queue = [*queue, self._gathered_again(params, messages, jnp.maximum(layer - self.ahead, 0))]
                    weights, *queue = queue
                dx, dparams, dsmooth, more = self._gradients(
                    part, (dy, dloss), residuals, params, weights, smooth, fixed, consts
                )
                return (dx, queue, jax.tree.map(jnp.add, dconsts, more)), ((dparams, dsmooth), None)

            inputs = part.of((jnp.arange(self.num_layers), dlosses, smooth, fixed))
            carry, (grad, _) = part.run(step, carry, (*inputs, residuals, weights), reverse=True, unroll=self.unroll)
            grads.append(grad)
        dx, _, dconsts = carry
        return (dx, *_joined(grads[::-1]), dconsts, None)

    def _gathered(self, params: PyTree, layer: jax.Array | int) -> tuple[PyTree, PyTree]:
        return self.layout.gathered(_at(params, layer))

    def _gathered_again(self, params: PyTree, messages: PyTree, layer: jax.Array | int) -> PyTree:
        return self._gathered(params, layer)[0] if messages is None else self.layout.gather(_at(messages, layer))

    def _layer(self, part: _Part, x: Any, weights: PyTree, smooth: PyTree, fixed: PyTree, consts: PyTree) -> Any:
        def layer(x: Any, shards: PyTree, smooth: PyTree, consts: PyTree) -> Any:
            merged = jax.tree.map(_with_shard, weights, shards, is_leaf=_is_ahead)
            return self.body(x, merged, smooth, fixed, *consts)

        shards = jax.tree.map(_shard_of, weights, is_leaf=_is_ahead)
        (y, loss), vjp, metrics = jax.vjp(layer, x, self._trained(shards), smooth, consts, has_aux=True)
        residuals, tree = jax.tree.flatten(vjp)
        index_of = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves((weights, smooth, fixed, consts)))}
        indices = [index_of.get(id(leaf)) for leaf in residuals]
        self.vjps[part.layers.start] = tree, indices
        return y, (loss, metrics), [leaf for leaf, index in zip(residuals, indices, strict=True) if index is None]

    def _gradients(
        self, part: _Part, cotangents: Any, saved: list[Any], params: PyTree, weights: PyTree, smooth: PyTree,
        fixed: PyTree, consts: PyTree,
    ) -> Any:  # fmt: skip
        tree, indices = self.vjps[part.layers.start]
        args, remaining = jax.tree.leaves((weights, smooth, fixed, consts)), iter(saved)
        residuals = [next(remaining) if index is None else args[index] for index in indices]
        dx, dweights, dsmooth, dconsts = jax.tree.unflatten(tree, residuals)(cotangents)
        scattered = self.layout.scatter(dweights)
        dparams = jax.tree.map(lambda g, w: g.astype(w.dtype), scattered, self._trained(params))
        return dx, dparams, dsmooth, dconsts

    def _trained(self, tree: PyTree) -> PyTree:
        """Replace the leaves of frozen weights by None."""
        return tree if self.is_trained is None else jax.tree.map(lambda on, x: x if on else None, self.is_trained, tree)


def _at(stacked: PyTree, layer: jax.Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stacked)


def _is_ahead(x: Any) -> bool:
    return isinstance(x, PrefetchedWeight)


def _shard_of(weight: jax.Array | PrefetchedWeight) -> jax.Array:
    return weight.shard if isinstance(weight, PrefetchedWeight) else weight


def _with_shard(weight: jax.Array | PrefetchedWeight, shard: jax.Array | None) -> jax.Array | PrefetchedWeight:
    if shard is None:  # a frozen weight
        return weight
    return PrefetchedWeight(shard, weight.gathered) if isinstance(weight, PrefetchedWeight) else shard


def _joined(parts: list[PyTree]) -> PyTree:
    """Concatenate the outputs of all parts."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
