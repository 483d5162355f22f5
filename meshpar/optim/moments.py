"""Optimizer state that needs less device memory: low-precision moments, and state in host memory.

Both functions wrap an optax optimizer, so layouts, memory estimates and plans take the savings into account.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from meshpar.optim.rounding import ROUNDING, checked, in_bfloat16, random_bits
from meshpar.sharding.errors import near, problem
from meshpar.sharding.types import PyTree

DTYPES = ("bfloat16", "int8")
"""Dtypes of moments. float16 is not among them: its smallest number, 6e-8, is larger than many squared gradients."""
_LEVELS = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """Optimizer state in host memory between updates. It may be part of a larger state."""

    state: PyTree


def offload_state(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the state of an optimizer in pinned host memory between updates.

    A step copies the state to the device after the gradients are computed, and copies it back. This transfers twice its
    bytes per step between host and device, so it is useful for steps with many tokens. The device memory for the state
    is free while gradients are computed, but not during the update. Numerical results are the same. Counters stay on
    the device.

    Args:
      tx: an optax optimizer. `offload_state(low_precision_moments(tx, "bfloat16"))` halves the transfers.

    Returns:
      The optimizer with state on the host.

    Raises:
      ValueError: `tx` is not an optimizer.

    Source: Ren et al. 2021, "ZeRO-Offload", which computes the update on the host, too.

    Example:
      >>> tx = mp.optim.offload_state(optax.adam(1e-3))
    """
    tx = optax.with_extra_args_support(checked("offload_state", tx))

    def update(grads: PyTree, state: OnHost, params: PyTree = None, **kwargs: Any) -> tuple[PyTree, OnHost]:
        updates, inner = tx.update(grads, state.state, params, **kwargs)
        return updates, OnHost(inner)

    return optax.GradientTransformationExtraArgs(lambda params: OnHost(tx.init(params)), update)


def on_host(state: PyTree) -> PyTree:
    """Return a pytree of bools: whether a leaf of the optimizer state is in host memory."""
    return jax.tree.map(
        lambda x: jax.tree.map(lambda _: isinstance(x, OnHost), x), state, is_leaf=lambda x: isinstance(x, OnHost)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InBytes:
    """An array with one byte per element: `sign(k) (|k| / 127)⁴ · scale`, with a scale for each row of the last dim."""

    levels: jax.Array
    """k, int8, with the shape and sharding of the array."""
    scales: jax.Array
    """The largest magnitude of each row, float32, with the shape of the array without its last dim."""


class RoundedState(NamedTuple):
    """State of `low_precision_moments`: the number of updates, and the optimizer's state with quantized moments.

    Moments are unbiased, and each is within about one level of the exact value. The table shows v / exact v for Adam's
    v after 6,000 updates with a constant gradient: standard deviation and range. Its rows are ratios of v to the
    maximum of the row of the array. Values of 0.95, 0.99 and 0.999 for b2 agree within 10 %.

        bfloat16                       0.4 %   0.97 to 1.01
        int8       1/10 to 1           2 %     0.95 to 1.05
                   1/100 to 1/10       3 %     0.9 to 1.1
                   1/1,000 to 1/100    6 %     0.8 to 1.2
                   1/10,000 to 1/1,000 10 %    0.75 to 1.35
                   1e-6 to 1/10,000    18 %    0.55 to 2

    Rounding errors accumulate while v decays without gradients: at 5 % of its initial value, bfloat16 is off by 5 % for
    b2 = 0.95 and by 14 % for b2 = 0.99. In int8 only the scale of such a row decays, which is exact.
    """

    count: jax.Array  # type: ignore[assignment]
    inner: PyTree


def _in_bytes(x: jax.Array, draws: jax.Array) -> InBytes:
    """Round stochastically to an adjacent level, with expected value x.

    A nonzero number does not become zero, because Adam divides by the square root of a moment.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, initial=0)  # a row may be empty
    share = jnp.abs(x) / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)[..., None]
    below = jnp.clip(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * _LEVELS), 0, _LEVELS - 1)
    low, high = (below / _LEVELS) ** 4, ((below + 1) / _LEVELS) ** 4
    uniform = (draws >> 8).astype(jnp.float32) / 2**24
    k = jnp.maximum(below + (uniform * (high - low) < share - low), 1)
    return InBytes((jnp.sign(x) * k).astype(jnp.int8), scales)


def _from_bytes(x: InBytes, dtype: Any) -> jax.Array:
    k = x.levels.astype(jnp.float32) / _LEVELS
    return (jnp.sign(k) * k**4 * x.scales[..., None]).astype(dtype)


def _rounded(inner: PyTree, is_moment: PyTree, count: Any, dtype: str) -> RoundedState:
    round_to = _in_bytes if dtype == "int8" else in_bfloat16
    leaves, structure = jax.tree.flatten(inner)
    with jax.named_scope(ROUNDING):
        rounded = [
            round_to(x, random_bits(x.shape, count, index)) if rounds else x
            for index, (x, rounds) in enumerate(zip(leaves, jax.tree.leaves(is_moment), strict=True))
        ]
    return RoundedState(count, jax.tree.unflatten(structure, rounded))


def low_precision_moments(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """Store the moments of an optimizer in `dtype`. Updates are computed in the dtype of the parameters.

    Counters, other scalars and complex moments keep their dtype. So do copies of the parameters in the optimizer state,
    recognized by their initial values (`optax.contrib.schedule_free`).

    Rounding is stochastic, with the exact value as the mean. With rounding to nearest, a moving average
    `b m + (1 - b) x` would not change if its step `1 - b` is less than half of the last bit, as for b2 = 0.999 in
    bfloat16. The random bits depend on the update number, which is part of the state, and on the index of the element.
    They do not depend on the sharding or on restarts.

    An int8 element is one byte, and each row of the last dim has a float32 scale: `sign(k) (|k| / 127)⁴ · scale`, a
    range of 2.6e8. If the last dim is sharded, the scale is the maximum over all shards. Adjacent levels differ by 3 %
    at the maximum of the row, by 10 % at 1/100 of it, by 34 % at 1/10,000 and by a factor of 2.4 at 1/1,000,000.

    The docstring of `meshpar.optim.moments.RoundedState` has the measured accuracy.

    Args:
      tx: an optax optimizer whose state has arrays with the shapes of the parameters.
      dtype: "bfloat16" or "int8".

    Returns:
      The optimizer with low-precision moments.

    Raises:
      ValueError: `tx` is not an optimizer, or `dtype` is not supported.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.3: both moments of AdamW in bfloat16. Dettmers
    et al. 2022, "8-bit Optimizers via Block-wise Quantization": levels that are denser near zero, scales by block.

    Example:
      >>> tx = mp.optim.low_precision_moments(optax.adam(1e-3), "bfloat16")
      >>> state = mp.abstract_state(model, tx, mesh=mesh, strategy=strategy)
      >>> sorted({x.dtype.name for x in jax.tree.leaves(state.opt_state)})
      ['bfloat16', 'int32']
    """
    if dtype not in DTYPES:
        where, reason = f"low_precision_moments(dtype={dtype!r})", f"the dtypes are {', '.join(DTYPES)}"
        raise problem(where, "store moments", reason, near(dtype, DTYPES), code="unknown-choice")
    tx = optax.with_extra_args_support(checked("low_precision_moments", tx))

    def restored(x: Any, like: Any) -> Any:
        return _from_bytes(x, like.dtype) if isinstance(x, InBytes) else x.astype(like.dtype)

    def init(params: PyTree) -> RoundedState:
        # `optax.tree_utils.tree_map_params` passes placeholders that are not arrays.
        count = jnp.zeros((), jnp.int32)
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
            return RoundedState(count, tx.init(params))
        return _rounded(tx.init(params), _are_moments(tx, params)[0], count, dtype)

    def update(grads: PyTree, state: RoundedState, params: PyTree = None, **kwargs: Any) -> tuple[PyTree, RoundedState]:
        is_moment, like = _are_moments(tx, grads if params is None else params)
        # `like` is first, because an `InBytes` is a subtree in place of a leaf.
        inner = jax.tree.map(lambda x, rounds, low: restored(low, x) if rounds else low, like, is_moment, state.inner)
        updates, inner = tx.update(grads, inner, params, **kwargs)
        return updates, _rounded(inner, is_moment, optax.safe_increment(state.count), dtype)

    return optax.GradientTransformationExtraArgs(init, update)


_COPIES = ("copy", "copy_p", "convert_element_type", "optimization_barrier", "sharding_constraint")


def _are_moments(tx: optax.GradientTransformation, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return whether each leaf of the optimizer state is a moment, and the shapes and dtypes of the state.

    Leaves that start as copies of the parameters are weights (schedule-free's z, slow weights). 8 bits are not enough
    for their updates. Constants are not moments, either (coefficients of Muon's iteration).
    """
    jaxpr, like = jax.make_jaxpr(tx.init, return_shape=True)(params)
    is_copy = _copied(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.invars))
    leaves, structure = jax.tree.flatten(like)
    is_moment = [
        x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating) and not copy
        for x, copy in zip(leaves, is_copy, strict=True)
    ]
    return jax.tree.unflatten(structure, is_moment), like


def _copied(jaxpr: core.Jaxpr, inputs_are_copies: Sequence[bool]) -> list[bool]:
    """Return whether each output of a jaxpr is an unchanged input, in any dtype, or a constant."""
    copies = {*jaxpr.constvars, *(x for x, is_copy in zip(jaxpr.invars, inputs_are_copies, strict=True) if is_copy)}

    def are_copies(atoms: Sequence[Any]) -> list[bool]:
        return [isinstance(x, core.Literal) or x in copies for x in atoms]

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        outputs = are_copies(eqn.invars) if eqn.primitive.name in _COPIES else []
        outputs = outputs if inner is None else _copied(inner.jaxpr, are_copies(eqn.invars))
        copies |= {x for x, is_copy in zip(eqn.outvars, outputs, strict=False) if is_copy}
    return are_copies(jaxpr.outvars)
