"""Stochastic rounding to bfloat16, and the measurement of updates that rounding to nearest loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.sharding.errors import check_cases, problem
from meshpar.sharding.types import PyTree, tree_leaves_with_paths

ROUNDING = "rounding"
"""Named scope of the conversion of moments to few bits."""
_FIRST_PARAM = 2**31
"""Number of the first parameter in `random_bits`. Moments have smaller numbers, so their bits are independent."""


def _mixed(bits: jax.Array) -> jax.Array:
    """Hash uint32 to uint32, bijectively."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits


def random_bits(shape: Sequence[int], count: jax.typing.ArrayLike, array: int) -> jax.Array:
    """Return 32 uniform bits for each element of an array, from the update number and the index of the element.

    They do not depend on the values, because a repeated value would then be rounded in the same direction in each
    update. The index is global, so the bits do not depend on the sharding.

    Args:
      shape: shape of the array.
      count: number of the update.
      array: number of the array.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * stride
    seed = _mixed(jnp.asarray(count, jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(array))
    return _mixed(_mixed(index) + seed)


def in_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round stochastically to an adjacent bfloat16 number, with expected value x."""
    x = x.astype(jnp.float32)
    sums = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    rounded = jax.lax.bitcast_convert_type((sums >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(rounded), rounded, x.astype(jnp.bfloat16))  # infinities and nan are kept


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`: the number of updates, and the state of the optimizer."""

    count: jax.Array  # type: ignore[assignment]
    inner: PyTree


def stochastic_rounding(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Round updated bfloat16 parameters stochastically, with the exact value as the mean.

    With rounding to nearest, a bfloat16 parameter does not change if its update is smaller than 1/512 of its value, and
    most updates of a fine-tuning run are. The optimizer computes in float32, with float32 moments; combine it with
    `low_precision_moments` to store them in fewer bits. Parameters and updates in float32 are not changed. The random
    bits depend on the update number, which is part of the state, and on the index of the element. They do not depend on
    the sharding or on restarts.

    A parameter takes 2 bytes, and with `low_precision_moments(optax.adamw(...), "bfloat16")` a further 4. The noise of
    the rounding remains: training in float32 is more accurate.

    Args:
      tx: an optax optimizer. In `optax.chain`, put it last. `mp.ema(stochastic_rounding(tx), 0.999)` averages the
        rounded parameters.

    Returns:
      The optimizer with rounded updates.

    Raises:
      ValueError: `tx` is not an optimizer, or a parameter is in float16.

    Source: Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4.

    Example:
      >>> tx = mp.optim.stochastic_rounding(optax.adamw(1e-5))
      >>> precision = mp.Precision(params="bfloat16")
      >>> state = mp.abstract_state(model, tx, mesh=mesh, strategy=strategy, precision=precision)
    """
    tx = optax.with_extra_args_support(checked("stochastic_rounding", tx))

    def init(params: PyTree) -> StochasticRoundingState:
        for path, x in tree_leaves_with_paths(params):
            is_float16 = getattr(x, "dtype", None) == jnp.float16
            where, reason = f"stochastic_rounding, parameter `{path}`", "it is in float16, and bfloat16 is supported"
            fix = 'create the state with mp.Precision(params="bfloat16")'
            check_cases(where, "round its updates", "wrong-dtype", (is_float16, reason, fix))
        return StochasticRoundingState(jnp.zeros((), jnp.int32), tx.init(_in_float32(params)))

    def update(
        grads: PyTree, state: StochasticRoundingState, params: PyTree = None, **kwargs: Any
    ) -> tuple[PyTree, StochasticRoundingState]:
        case = params is None, "`params` is None", "call tx.update(grads, state, params)"
        check_cases("stochastic_rounding, its update", "round parameters", "wrong-signature", case)
        exact = _in_float32(params)
        updates, inner = tx.update(_in_float32(grads), state.inner, exact, **kwargs)
        count = optax.safe_increment(state.count)

        def rounded(index: int, p: jax.Array, old: jax.Array, change: jax.Array) -> jax.Array:
            if p.dtype != jnp.bfloat16:
                return change
            new = in_bfloat16(old + change, random_bits(p.shape, count, _FIRST_PARAM + index))
            # The caller adds the difference to the parameter in float32, which results in `new`.
            return new.astype(jnp.float32) - old

        leaves, structure = jax.tree.flatten(params)
        changes = map(rounded, range(len(leaves)), leaves, jax.tree.leaves(exact), jax.tree.leaves(updates))
        return jax.tree.unflatten(structure, changes), StochasticRoundingState(count, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(tree: PyTree) -> PyTree:
    """Cast the bfloat16 leaves of a tree to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x, tree)


def lost_updates(params: PyTree, updates: PyTree) -> jax.Array | None:
    """Return the share of nonzero updates that do not change their parameter, or None without 16-bit parameters.

    Args:
      params: the parameters. Only those with fewer bits than float32 are counted.
      updates: their updates.

    Returns:
      A float32 scalar between 0 and 1.
    """

    def count(x: jax.Array) -> jax.Array:
        # A float32 sum of ones ends at 2^24, so each row is counted as an integer.
        return jnp.sum(jnp.atleast_1d(x), axis=-1, dtype=jnp.int32).astype(jnp.float32).sum()

    counts = []
    for p, change in zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
        if jnp.issubdtype(p.dtype, jnp.floating) and p.dtype.itemsize < 4:
            is_nonzero = jnp.broadcast_to(change, p.shape) != 0
            is_same = (p + change).astype(p.dtype) == p
            counts.append((count(is_nonzero & is_same), count(is_nonzero)))
    if not counts:
        return None
    num_lost, num_updates = (jnp.stack(column).sum() for column in zip(*counts, strict=True))
    return num_lost / jnp.maximum(num_updates, 1)


def checked(where: str, tx: object) -> optax.GradientTransformation:
    """Return `tx` if it is an optimizer, and raise `ValueError` otherwise."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        reason, fix = "it has no init and update, as an optax optimizer has", "pass optax.adamw(3e-4), for example"
        raise problem(where, f"use {tx!r} as the optimizer", reason, fix, code="wrong-type")
    return tx  # type: ignore[no-any-return]
