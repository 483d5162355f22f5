"""Split backward passes: gradients of inputs and of parameters as separate functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from meshpar.pipeline.jaxpr_slicing import PartialEval, Steps, arrays, depends, flat_jaxpr, run
from meshpar.sharding.types import PyTree

Values: TypeAlias = tuple[jax.Array, ...]


def split_vjp(
    stage_fn: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree, *, trained: PyTree = None
) -> SplitVjp:
    """Split the backward pass of a function into the input gradient (B) and the parameter gradient (W).

    The backward pass is traced and divided by partial evaluation: equations that the input gradient depends on are B,
    and the remaining equations are W. No op is computed twice. Calls (`jit`, `checkpoint`, custom rules) are inlined.
    The body of a loop over layers (`lax.scan`) is split: B runs over the layers in reverse, then W does. `lax.cond`,
    `lax.while_loop` and `shard_map` are not split; they are part of B if the input gradient needs any of their results.

    B and W are from Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241; this function applies to any JAX
    function.

    Args:
      stage_fn: `(params, x) -> y`, pytrees of arrays. Closed-over arrays are constants.
      params: arrays, tracers or `ShapeDtypeStruct`s.
      x: arrays, tracers or `ShapeDtypeStruct`s.
      trained: boolean pytree like `params`, True for trainable leaves. W returns float0 zeros for the others. None: all
        leaves are trainable.

    Returns:
      F, B and W for arguments of these shapes.

    Raises:
      TypeError: `stage_fn` cannot be differentiated by `jax.vjp`.

    Example:
      >>> import jax.numpy as jnp
      >>> split = mp.pipeline.split_vjp(lambda w, x: x @ w, jnp.ones((3, 2)), jnp.ones((4, 3)))
      >>> shared = split.shared(jnp.ones((3, 2)))
      >>> y, saved = split.forward(jnp.ones((3, 2)), jnp.ones((4, 3)))
      >>> dx, deferred = split.backward(shared, saved, jnp.ones_like(y))
      >>> split.weights(shared, saved, deferred).tolist()
      [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]
    """
    pullback: dict[str, Any] = {}

    def forward(params: PyTree, x: PyTree) -> tuple[PyTree, list[jax.Array]]:
        y, vjp = jax.vjp(stage_fn, params, x)
        residuals, pullback["tree"] = jax.tree.flatten(vjp)
        return y, residuals

    forward_jaxpr, (y, residuals) = flat_jaxpr(forward, params, x)
    of_params, of_x, of_y = _TreeLeaves(params, trained), _TreeLeaves(x), _TreeLeaves(y)

    def backward(residuals: list[jax.Array], dy: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        dparams, dx = jax.tree.unflatten(pullback["tree"], residuals)(of_y.tree(dy))
        return of_params.smooth(dparams), of_x.smooth(dx)

    backward_jaxpr, _ = flat_jaxpr(backward, residuals, of_y.smooth(y))
    depends_on_x = depends(forward_jaxpr.jaxpr, [False] * of_params.count + [True] * of_x.count)[of_y.count :]
    is_dparams = [True] * of_params.num_smooth + [False] * of_x.num_smooth
    partial_backward = PartialEval(
        backward_jaxpr,
        known=[not flag for flag in is_dparams],
        unknown=is_dparams,
        known_inputs=[False] * len(residuals) + [True] * of_y.num_smooth,
        shared=[not flag for flag in depends_on_x] + [False] * of_y.num_smooth,
        effects=True,
    )
    variables = forward_jaxpr.jaxpr.outvars[of_y.count :]
    places = _Residuals(variables, depends_on_x, partial_backward.reads[: len(residuals)])
    indices = range(len(residuals))
    saved, shared = (tuple(residuals[i] for i in group) for group in (places.saved, places.shared))
    split = SplitVjp(
        saved_activations=_shapes(saved),
        deferred_weight_grads=(),
        _params=of_params,
        _x=of_x,
        _y=of_y,
        _residuals=places,
        _forward=PartialEval(
            forward_jaxpr, known=[True] * of_y.count + [i in places.saved for i in indices], effects=True
        ),
        _shared=PartialEval(forward_jaxpr, known=[False] * of_y.count + [i in places.shared for i in indices]),
        _backward=partial_backward,
        _at_once=PartialEval(backward_jaxpr, known=[True] * len(is_dparams), effects=True),
    )
    deferred = jax.eval_shape(lambda *args: split.backward(*args)[1], shared, saved, y)
    return dataclasses.replace(split, deferred_weight_grads=_shapes(deferred))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitVjp:
    """F, B and W of a function, as pure functions.

    shared = split.shared(params)                        once per step
    y, saved = split.forward(params, x)                  F, for each microbatch
    dx, deferred = split.backward(shared, saved, dy)     B
    dparams = split.weights(shared, saved, deferred)     W
    """

    saved_activations: tuple[jax.ShapeDtypeStruct, ...]
    """Residuals that F saves per microbatch: arrays that depend on x, without duplicates, parameters and constants."""
    deferred_weight_grads: tuple[jax.ShapeDtypeStruct, ...]
    """Intermediate values that B saves per microbatch for W."""
    _params: _TreeLeaves
    _x: _TreeLeaves
    _y: _TreeLeaves
    _residuals: _Residuals
    _forward: PartialEval
    _shared: PartialEval
    _backward: PartialEval
    _at_once: PartialEval

    def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, Values]:
        """Run F, and return `(y, saved_activations)`."""
        return arrays(run(self.forward_steps(params, x)))

    def forward_steps(self, params: PyTree, x: PyTree) -> Steps[tuple[PyTree, Values]]:
        """Run `forward` as a generator that pauses at each loop, for `jaxpr_slicing.run_interleaved`.

        The other methods whose names end in `_steps` are generators, too. Their saved activations, deferred values and
        parameter gradients may be `Stacked`, and so may their arguments.
        """
        out, _ = yield from self._forward.known_steps(jax.tree.leaves((params, x)))
        y, residuals = out[: self._y.count], out[self._y.count :]
        return jax.tree.unflatten(self._y.structure, arrays(y)), tuple(residuals[i] for i in self._residuals.saved)

    def shared(self, params: PyTree) -> Values:
        """Return the residuals that depend on parameters and constants only. They are the same for all microbatches."""
        return arrays(self.stacked_shared(params))

    def stacked_shared(self, params: PyTree) -> Values:
        """Return `shared`, with a `Stacked` in place of the results of unrolled loops."""
        out, _ = run(self._shared.known_steps([*jax.tree.leaves(params), *[None] * self._x.count]))
        residuals = out[self._y.count :]
        return tuple(residuals[i] for i in self._residuals.shared)

    def backward(self, shared: Values, saved: Values, dy: PyTree) -> tuple[PyTree, Values]:
        """Run B, and return `(dx, deferred_weight_grads)`.

        `dy` has the structure of y; integer leaves are ignored. Integer leaves of x have float0 gradients, as in
        `jax.vjp`.
        """
        return arrays(run(self.backward_steps(shared, saved, dy)))

    def backward_steps(self, shared: Values, saved: Values, dy: PyTree) -> Steps[tuple[PyTree, Values]]:
        args = [*self._residuals.all(shared, saved), *self._y.smooth(dy)]
        out, deferred = yield from self._backward.known_steps(args)
        return self._x.tree(arrays(out[self._params.num_smooth :])), tuple(deferred)

    def weights(self, shared: Values, saved: Values, deferred: Values) -> PyTree:
        """Run W, and return the gradients of the parameters; float0 zeros for integer and frozen leaves."""
        return arrays(run(self.weights_steps(shared, saved, deferred)))

    def weights_steps(self, shared: Values, saved: Values, deferred: Values) -> Steps[PyTree]:
        args = [*self._residuals.all(shared, saved), *[None] * self._y.num_smooth]
        out = yield from self._backward.unknown_steps(args, deferred)
        return self._params.tree(out[: self._params.num_smooth])

    def at_once_steps(self, shared: Values, saved: Values, dy: PyTree) -> Steps[tuple[PyTree, PyTree]]:
        """Run B and W together, and return `(dx, dparams)`. They share the loop over layers: no values are deferred."""
        args = [*self._residuals.all(shared, saved), *self._y.smooth(dy)]
        out, _ = yield from self._at_once.known_steps(args)
        count = self._params.num_smooth
        return self._x.tree(arrays(out[count:])), self._params.tree(out[:count])

    @property
    def reads(self) -> tuple[tuple[bool, bool, bool], ...]:
        """For each leaf of the parameters, whether F, B and W read its values. W rarely does."""
        count, residuals = self._params.count, self._residuals

        def params_read(needs: Sequence[bool]) -> list[bool]:
            read = {index for index, need in zip(residuals.unique, needs, strict=False) if need}
            wanted = [i in read and i in residuals.shared for i in range(len(residuals.unique))]
            return PartialEval(self._forward.closed, known=[False] * self._y.count + wanted).known_reads[:count]

        in_b, in_w = params_read(self._backward.known_reads), params_read(self._backward.unknown_reads)
        return tuple(zip(self._forward.known_reads[:count], in_b, in_w, strict=True))


class _TreeLeaves:
    """The leaves of a pytree. Smooth leaves have gradients: they are real or complex, and trainable."""

    def __init__(self, like: PyTree, trainable: PyTree = None) -> None:
        self.structure: Any
        leaves, self.structure = jax.tree.flatten(like)
        self.count = len(leaves)
        flags = [True] * self.count if trainable is None else jax.tree.leaves(trainable)
        pairs = zip(leaves, flags, strict=True)
        self.is_smooth = [flag and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf, flag in pairs]
        self.num_smooth = sum(self.is_smooth)
        self.shapes = [leaf.shape for leaf in leaves]

    def smooth(self, tree: PyTree) -> list[Any]:
        """Return the smooth leaves of a tree of the same structure."""
        leaves = self.structure.flatten_up_to(tree)
        return [leaf for leaf, smooth in zip(leaves, self.is_smooth, strict=True) if smooth]

    def tree(self, smooth: Sequence[Any]) -> PyTree:
        """Return the tree with these smooth leaves, and float0 zeros for the remaining leaves."""
        remaining = iter(smooth)
        leaves = [
            next(remaining) if is_smooth else np.zeros(shape, jax.dtypes.float0)
            for is_smooth, shape in zip(self.is_smooth, self.shapes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


class _Residuals:
    """Indices of the saved residuals, for each microbatch or shared. Duplicates and unused residuals are left out."""

    def __init__(self, variables: Sequence[Any], depends_on_x: Sequence[bool], is_read: Sequence[bool]) -> None:
        first: dict[Any, int] = {}
        # Equal literals may be different constants, so each is kept separately.
        self.unique = [first.setdefault(i if isinstance(v, Literal) else v, i) for i, v in enumerate(variables)]
        used = sorted({self.unique[i] for i, read in enumerate(is_read) if read})
        self.saved = [i for i in used if depends_on_x[i]]
        self.shared = [i for i in used if not depends_on_x[i]]

    def all(self, shared: Values, saved: Values) -> list[Any]:
        """Return all residuals; None for unused ones."""
        values = dict(zip([*self.shared, *self.saved], [*shared, *saved], strict=True))
        return [values.get(i) for i in self.unique]


def _shapes(leaves: Iterable[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
