"""Precision: in which dtype parameters are kept, computed with and reduced, and what the backward pass recomputes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.sharding.context import current, within
from meshpar.sharding.types import PyTree, near, problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a training step, each a name such as "float32" or "bfloat16"."""

    params: str | None = None
    """Parameters between steps, and the optimizer's view of them. None: as the model makes them."""
    compute: str | None = None
    """Forward and backward pass; parameters are cast before they are gathered, so the wire carries this dtype. None:
    the parameters' own."""
    reduce: str | None = None
    """Sums of gradients over devices and micro-steps. None: the compute dtype, and float32 at the least. A lower
    dtype halves the bytes of a reduction and rounds at every hop."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if name is not None and name not in FLOATS:
                raise problem(
                    f"Precision({field.name}={name!r})", "use that dtype", "it is no floating dtype", near(name, FLOATS)
                )

    def reduce_dtype(self, compute: Any) -> jnp.dtype:
        """The dtype in which a gradient of dtype `compute` is summed."""
        return jnp.dtype(self.reduce) if self.reduce else jnp.promote_types(compute, jnp.float32)


FLOATS = ("float64", "float32", "bfloat16", "float16")


def cast_floating(tree: PyTree, dtype: str | None) -> PyTree:
    """The tree with its floating leaves in another dtype; None leaves it alone."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# ---------------------------------------------------------------------------------------------------------------------
# What the step tells the model's layers while it traces them
# ---------------------------------------------------------------------------------------------------------------------

MATMUL = "matmul"
"""Name, for `jax.checkpoint`, of the result of a matmul with a weight that policies cannot see for what it is."""

_NAMED = jax.checkpoint_policies.save_only_these_names(MATMUL)

REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _NAMED
    ),
    "all_dots": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, _NAMED),
}
"""What a rematerialised layer keeps: nothing but its input; results of matmuls with weights; of all matmuls."""


SECOND_SHARD = "second_shard"
"""Name, for `jax.checkpoint`, of what a quantizing strategy keeps inside the node from forward to backward."""

Gather = Callable[[str, PyTree], PyTree]
"""(path of the stacked layers, one layer's shards) -> its weights."""


@dataclasses.dataclass(eq=False)
class Numerics:
    """What a step wants of the layers it traces. Compared by identity: every trace is its own."""

    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    gather: Gather | None = None
    """In force while a model is traced whose layers hold shards."""
    num_layers_marked: int = 0
    num_layers_gathered: int = 0


def check_remat(remat: str | None) -> None:
    """See that a remat policy exists.

    Raises:
      ValueError: it does not.
    """
    if remat is not None and remat not in REMAT_POLICIES:
        raise problem(
            f"remat={remat!r}", "recompute by that policy", "there is no such policy", near(str(remat), REMAT_POLICIES)
        )


@contextlib.contextmanager
def numerics(precision: Precision, remat: str | None) -> Iterator[Numerics]:
    """Put a step's wishes in force for `remat_layer` and `dot_general`."""
    wishes = Numerics(precision, remat)
    with within(numerics=wishes):
        yield wishes


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[Numerics]:
    """Put in force, within `numerics`, how `layer_weights` makes whole weights of a layer's shards."""
    wishes = current().numerics
    assert wishes is not None
    before, wishes.gather = wishes.gather, gather
    try:
        yield wishes
    finally:
        wishes.gather = before


def gathers_layers() -> bool:
    """Whether layers hold shards that `layer_weights` has to make whole."""
    wishes = current().numerics
    return wishes is not None and wishes.gather is not None


def layer_weights(params: PyTree, *, at: str = "layers") -> PyTree:
    """One layer's parameters as the layer computes with them: call it on the slice that a scan over layers gets.

    They are as they were, unless the strategy quantizes what it gathers (`mp.fsdp(quantize=...)`): then they are shards
    here, gathered one layer at a time. Inside `remat_layer`, so that the backward pass gathers them again instead of
    keeping every layer's.

    Args:
      params: a tree of arrays without the dim of the layers, with the paths that they have in the model.
      at: the path of the stacked layers in the model, or its end.

    Raises:
      ValueError: a path that no parameter has.
    """
    wishes = current().numerics
    if wishes is None or wishes.gather is None:
        return params
    wishes.num_layers_gathered += 1
    return wishes.gather(at, params)


def remat_layer(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as one layer, which the step's `remat` policy recomputes in the backward pass.

    Args:
      layer: the function of one layer, as the body of a scan over layers.

    Returns:
      the layer, under `jax.checkpoint` when a policy is in force, else as it was.
    """
    policy = remat_policy()
    if policy is None:
        return layer
    # Inside a scan nothing outside the loop can be shared with the body, so the barrier against CSE is not needed.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def remat_policy() -> Callable[..., Any] | None:
    """The policy in force, for layers that have a lifted checkpoint of their own (`flax.linen.remat`); None: no remat.

    Asking for it marks a layer, as `remat_layer` does.
    """
    wishes = current().numerics
    if wishes is None or (wishes.remat is None and wishes.gather is None):
        return None
    wishes.num_layers_marked += 1
    policy = None if wishes.remat is None else REMAT_POLICIES[wishes.remat]
    return policy if wishes.gather is None else _regathering(policy)


_LAYOUT_ONLY = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy"})
"""What costs no arithmetic: a weight in another form must not be kept in its place."""


def _regathering(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """The policy, or with None to keep everything, but for gathered weights; second shards are kept.

    Weights come out of messages, which are bytes: whatever is made of bytes is made again.
    """

    def keeps(primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] == SECOND_SHARD:
            return True
        if any(getattr(operand, "dtype", None) == jnp.uint8 for operand in operands):
            return False
        if policy is None:
            return primitive.name not in _LAYOUT_ONLY
        return policy(primitive, *operands, **params)

    return keeps


def weight_grad_dtype(dtype: Any) -> jnp.dtype | None:
    """In which dtype the gradient of a weight of dtype `dtype` leaves its matmul, as in `dot_general`.

    None outside of a step.
    """
    wishes = current().numerics
    return None if wishes is None else wishes.precision.reduce_dtype(dtype)


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **kwargs: Any
) -> jax.Array:
    """`lax.dot_general` of activations (lhs) and a weight (rhs), whose weight gradient leaves in the reduction dtype.

    XLA places the reduction of a weight's gradient right behind the matmul that makes it, in the dtype of that
    matmul. So the sum over devices is as precise as `Precision.reduce` asks only where the layers use this function:
    pass it as `dot_general=` to Flax layers.
    """
    wishes = current().numerics

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, precision=precision, **kwargs)

    if wishes is None or not jnp.issubdtype(rhs.dtype, jnp.floating):
        return plain(lhs, rhs)
    reduce = wishes.precision.reduce_dtype(rhs.dtype)
    if reduce == rhs.dtype:
        return plain(lhs, rhs)
    contracting, batch = (tuple(map(tuple, dims)) for dims in dimension_numbers)
    return _dot(plain, contracting, batch, reduce, lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _dot(plain: Any, contracting: Any, batch: Any, reduce: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return plain(lhs, rhs)


def _dot_forward(plain: Any, contracting: Any, batch: Any, reduce: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
    return plain(lhs, rhs), (lhs, rhs)


def _dot_backward(plain: Any, contracting: Any, batch: Any, reduce: Any, saved: Any, g: jax.Array) -> Any:
    lhs, rhs = saved
    (d_lhs,) = jax.vjp(lambda x: plain(x, rhs), lhs)[1](g)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free = [d for d in range(lhs.ndim) if d not in lhs_contract and d not in lhs_batch]
    rhs_free = [d for d in range(rhs.ndim) if d not in rhs_contract and d not in rhs_batch]
    # g's dims are (batch, free of lhs, free of rhs): contract it with lhs over what is free in lhs.
    g_batch = tuple(range(len(lhs_batch)))
    g_free = tuple(range(len(lhs_batch), len(lhs_batch) + len(lhs_free)))
    d_rhs = lax.dot_general(
        lhs, g, ((tuple(lhs_free), g_free), (lhs_batch, g_batch)), preferred_element_type=reduce
    )  # (batch, what lhs contracts in lhs's order, free of rhs)
    came = [*rhs_batch, *(rhs_contract[lhs_contract.index(d)] for d in sorted(lhs_contract)), *rhs_free]
    d_rhs = jnp.transpose(d_rhs, [came.index(d) for d in range(rhs.ndim)])
    return d_lhs, d_rhs.astype(rhs.dtype)


_dot.defvjp(_dot_forward, _dot_backward)
