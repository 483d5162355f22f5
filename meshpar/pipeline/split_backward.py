"""The backward pass of any JAX function in two: what its input needs, and what its parameters need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from meshpar.pipeline.jaxpr_slicing import Cut, Steps, alone, depends, flat_jaxpr
from meshpar.sharding.types import PyTree

Values: TypeAlias = tuple[jax.Array, ...]
Item = TypeVar("Item")


def split_vjp(
    stage_fn: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree, *, trained: PyTree = None
) -> SplitVjp:
    """Cut the backward pass of a function into the gradient of its input (B) and of its parameters (W).

    The backward pass is traced and sliced: the equations on the way to the input's gradient are B, the rest are W.
    Together they are the plain backward pass, nothing is computed twice. Calls (`jit`, `checkpoint`, custom rules) are
    opened up. A loop over layers (`lax.scan`) is cut inside its body: B runs over the layers in reverse, then W does.
    `lax.cond`, `lax.while_loop` and `shard_map` stay whole, in B if the input's gradient needs any of their results.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, has the two halves; here any function has them.

    Args:
      stage_fn: `(params, x) -> y`, pytrees of arrays. What it closes over counts as constant.
      params: arrays, tracers or `ShapeDtypeStruct`s.
      x: as well.
      trained: a truth for each of the parameters, whether it has a gradient; W gives float0 zeros for the others. None:
        all have.

    Returns:
      F, B and W for arguments of these shapes.
    """
    pullback: dict[str, Any] = {}

    def forward(params: PyTree, x: PyTree) -> tuple[PyTree, list[jax.Array]]:
        y, vjp = jax.vjp(stage_fn, params, x)
        residuals, pullback["tree"] = jax.tree.flatten(vjp)
        return y, residuals

    fwd, (y, residuals) = flat_jaxpr(forward, params, x)
    ends = _Ends(params=_TreeLeaves(params, trained), x=_TreeLeaves(x), y=_TreeLeaves(y))

    def backward(residuals: list[jax.Array], dy: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        dparams, dx = jax.tree.unflatten(pullback["tree"], residuals)(ends.y.tree(dy))
        return ends.params.smooth(dparams), ends.x.smooth(dx)

    bwd, _ = flat_jaxpr(backward, residuals, ends.y.smooth(y))
    return _cut(fwd, bwd, residuals, ends)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitVjp:
    """F, B and W of one function, pure, for use while a program is traced.

    shared = split.shared(params)                        once per step
    y, stash = split.forward(params, x)                  F, for each microbatch
    dx, backlog = split.backward(shared, stash, dy)      B
    dparams = split.weights(shared, stash, backlog)      W
    dx, dparams = split.at_once(shared, stash, dy)       B with its W, where nothing comes between the two
    """

    stash: tuple[jax.ShapeDtypeStruct, ...]
    """What F leaves of one microbatch: what depends on x, each array once. No parameters, no constants."""
    backlog: tuple[jax.ShapeDtypeStruct, ...]
    """What B leaves of one microbatch for W: what B has worked out and W needs."""
    _ends: _Ends
    _kept: _Kept
    _forward: Cut
    _shared: Cut
    _backward: Cut
    _at_once: Cut

    def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, Values]:
        """F: `(y, stash)`."""
        return alone(self.forward_steps(params, x))

    def forward_steps(self, params: PyTree, x: PyTree) -> Steps[tuple[PyTree, Values]]:
        """`forward`, to be run beside others by `slicing.together`; so are the others of this name."""
        out, _ = yield from self._forward.first(jax.tree.leaves((params, x)))
        y, residuals = out[: self._ends.y.count], out[self._ends.y.count :]
        return jax.tree.unflatten(self._ends.y.structure, y), tuple(residuals[at] for at in self._kept.stashed)

    def shared(self, params: PyTree) -> Values:
        """What B and W need of parameters and constants, the same for all microbatches."""
        out, _ = self._shared.run_first([*jax.tree.leaves(params), *[None] * self._ends.x.count])
        residuals = out[self._ends.y.count :]
        return tuple(residuals[at] for at in self._kept.shared)

    def backward(self, shared: Values, stash: Values, dy: PyTree) -> tuple[PyTree, Values]:
        """B: `(dx, backlog)`.

        `dy` has y's structure; where y is of integers it is not looked at. Where x is, `dx` has float0 zeros, as
        `jax.vjp` gives.
        """
        return alone(self.backward_steps(shared, stash, dy))

    def backward_steps(self, shared: Values, stash: Values, dy: PyTree) -> Steps[tuple[PyTree, Values]]:
        given = [*self._kept.residuals(shared, stash), *self._ends.y.smooth(dy)]
        out, backlog = yield from self._backward.first(given)
        return self._ends.x.tree(out[self._ends.params.num_smooth :]), tuple(backlog)

    def weights(self, shared: Values, stash: Values, backlog: Values) -> PyTree:
        """W: gradients of the parameters; float0 zeros where those are integers, or not trained."""
        return alone(self.weights_steps(shared, stash, backlog))

    def weights_steps(self, shared: Values, stash: Values, backlog: Values) -> Steps[PyTree]:
        given = [*self._kept.residuals(shared, stash), *[None] * self._ends.y.num_smooth]
        out = yield from self._backward.second(given, backlog)
        return self._ends.params.tree(out[: self._ends.params.num_smooth])

    def at_once(self, shared: Values, stash: Values, dy: PyTree) -> tuple[PyTree, PyTree]:
        """B and W: `(dx, dparams)`. A loop over layers runs once, so no layer's values are kept for a second one."""
        return alone(self.at_once_steps(shared, stash, dy))

    def at_once_steps(self, shared: Values, stash: Values, dy: PyTree) -> Steps[tuple[PyTree, PyTree]]:
        out, _ = yield from self._at_once.first([*self._kept.residuals(shared, stash), *self._ends.y.smooth(dy)])
        dparams, dx = out[: self._ends.params.num_smooth], out[self._ends.params.num_smooth :]
        return self._ends.x.tree(dx), self._ends.params.tree(dparams)

    @property
    def reads(self) -> tuple[tuple[bool, bool, bool], ...]:
        """For each leaf of the parameters, whether F, B and W read its values; few Ws do."""
        count, kept = self._ends.params.count, self._kept

        def behind(needs: Sequence[bool]) -> list[bool]:
            read = {kept.same[at] for at, need in zip(range(len(kept.same)), needs, strict=False) if need}
            wanted = [at in read and at in kept.shared for at in range(len(kept.same))]
            return Cut(self._forward.closed, first=[False] * self._ends.y.count + wanted).first_needs[:count]

        in_b, in_w = behind(self._backward.first_needs), behind(self._backward.second_needs)
        return tuple(zip(self._forward.first_needs[:count], in_b, in_w, strict=True))


def _cut(fwd: ClosedJaxpr, bwd: ClosedJaxpr, residuals: Sequence[Any], ends: _Ends) -> SplitVjp:
    """The parts that F, B and W are of a forward pass (to y and residuals) and a backward one (of residuals and dy)."""
    own = depends(fwd.jaxpr, [False] * ends.params.count + [True] * ends.x.count)[ends.y.count :]
    no_dy, is_dy = [False] * len(residuals), [True] * ends.y.num_smooth
    to_params, to_x = [True] * ends.params.num_smooth, [True] * ends.x.num_smooth
    backward = Cut(
        bwd,
        first=[not one for one in to_params] + to_x,
        second=to_params + [not one for one in to_x],
        only_first=no_dy + is_dy,
        shared=[not mine for mine in own] + [not one for one in is_dy],
        effects=True,
    )
    kept = _Kept(fwd.jaxpr.outvars[ends.y.count :], own, backward.needs[: len(residuals)])
    places = range(len(residuals))
    split = SplitVjp(
        stash=_shapes(residuals[at] for at in kept.stashed),
        backlog=(),
        _ends=ends,
        _kept=kept,
        _forward=Cut(fwd, first=[True] * ends.y.count + [at in kept.stashed for at in places], effects=True),
        _shared=Cut(fwd, first=[False] * ends.y.count + [at in kept.shared for at in places]),
        _backward=backward,
        _at_once=Cut(bwd, first=[True] * len(bwd.jaxpr.outvars), effects=True),
    )
    shared = tuple(residuals[at] for at in kept.shared)
    stash = tuple(residuals[at] for at in kept.stashed)
    backlog = jax.eval_shape(lambda *args: split.backward(*args)[1], shared, stash, ends.y.like)
    return dataclasses.replace(split, backlog=_shapes(backlog))


class _TreeLeaves:
    """The leaves of a pytree, of which only the real and complex ones have gradients, and of these all or some."""

    def __init__(self, like: PyTree, chosen: PyTree = None) -> None:
        self.like = like
        self.structure: Any
        leaves, self.structure = jax.tree.flatten(like)
        self.count = len(leaves)
        wanted = [True] * self.count if chosen is None else jax.tree.leaves(chosen)
        of = zip(leaves, wanted, strict=True)
        self.is_smooth = [one and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf, one in of]
        self.num_smooth = sum(self.is_smooth)
        self.shapes = [leaf.shape for leaf in leaves]

    def smooth(self, tree: PyTree) -> list[Any]:
        """Those of a tree of the same structure that have gradients."""
        leaves = self.structure.flatten_up_to(tree)
        return [leaf for leaf, smooth in zip(leaves, self.is_smooth, strict=True) if smooth]

    def tree(self, smooth: Sequence[Any]) -> PyTree:
        """The tree of these gradients, float0 zeros where there is none."""
        rest = iter(smooth)
        leaves = [
            next(rest) if one else np.zeros(shape, jax.dtypes.float0)
            for one, shape in zip(self.is_smooth, self.shapes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ends:
    """What goes into a function and what comes out."""

    params: _TreeLeaves
    x: _TreeLeaves
    y: _TreeLeaves


class _Kept:
    """Where each residual is kept: in its microbatch's stash, or shared by all; equal ones once, unread ones never."""

    def __init__(self, variables: Sequence[Any], own: Sequence[bool], read: Sequence[bool]) -> None:
        first: dict[Any, int] = {}
        # Literals are equal though they are different ones: each is kept by itself.
        self.same = [first.setdefault(at if isinstance(v, Literal) else v, at) for at, v in enumerate(variables)]
        kept = sorted({self.same[at] for at, used in enumerate(read) if used})
        self.stashed = [at for at in kept if own[at]]
        self.shared = [at for at in kept if not own[at]]

    def residuals(self, shared: Values, stash: Values) -> list[Any]:
        """All residuals, None for those that are not read."""
        at_hand = dict(zip([*self.shared, *self.stashed], [*shared, *stash], strict=True))
        return [at_hand.get(at) for at in self.same]


def _shapes(leaves: Iterable[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
