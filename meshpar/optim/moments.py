"""Optimizer state in less memory of the device: in fewer bits, or in the memory of the host.

Both take any optax optimizer and give one, so that a layout, an account of memory and a plan learn it from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from meshpar.sharding.types import PyTree, near, problem

DTYPES = ("bfloat16", "int8")
"""In which moments can be kept. float16 ends where squares of gradients begin, at 6e-8."""
_LEVELS = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """State of an optimizer that lies in the host's memory between updates, also as a part of another's state."""

    state: Any


def offload_state(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with its state in pinned memory of the host between updates.

    The step brings it to the device when the gradients are made, and takes it back: twice its bytes travel over the
    link between the two in every step, so it pays where a step has many tokens. While gradients are made the device
    holds less by its bytes; during the update it holds all of it, beside the gradients, as without. Values are the
    same. Counters stay on the device.

    Args:
      tx: an optax optimizer; `offloaded(low_precision_moments(tx, "bfloat16"))` halves what travels.

    Raises:
      ValueError: what is no optimizer.

    Source: Ren et al. 2021, "ZeRO-Offload" (there the update is computed on the host, too).
    """
    tx = optax.with_extra_args_support(checked("offloaded", tx))

    def update(grads: PyTree, kept: OnHost, params: PyTree = None, **more: Any) -> tuple[PyTree, OnHost]:
        updates, state = tx.update(grads, kept.state, params, **more)
        return updates, OnHost(state)

    return optax.GradientTransformationExtraArgs(lambda params: OnHost(tx.init(params)), update)


def on_host(state: PyTree) -> PyTree:
    """Of every leaf of an optimizer's state, whether it lies on the host."""
    return jax.tree.map(
        lambda x: jax.tree.map(lambda _: isinstance(x, OnHost), x), state, is_leaf=lambda x: isinstance(x, OnHost)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InBytes:
    """An array in a byte a number: row by row of its last dim `sign(k) (|k| / 127)⁴ · scale`."""

    levels: Any
    """k, int8; as the array lies."""
    scales: Any
    """The largest magnitude of each row, float32, of the array's other dims."""


class RoundedState(NamedTuple):
    """State of `low_precision_moments`: the number of updates so far, and the optimizer's state with its moments in fewer bits.

    A moment is right on average, and a single one is within about a level of the exact value. Measured for Adam's v
    under a constant gradient after 6,000 updates, as the standard deviation and the range of v / exact v, by the share
    of v in the row's maximum (b2 of 0.95, 0.99 and 0.999 give the same within 10 %):

        bfloat16                       0.4 %   0.97 to 1.01
        int8       1/10 to 1           2 %     0.95 to 1.05
                   1/100 to 1/10       3 %     0.9 to 1.1
                   1/1,000 to 1/100    6 %     0.8 to 1.2
                   1/10,000 to 1/1,000 10 %    0.75 to 1.35
                   1e-6 to 1/10,000    18 %    0.55 to 2

    While v decays to 5 % without gradients, nothing pulls it back to the exact value: bfloat16 is then off by 5 % at a
    b2 of 0.95 and by 14 % at 0.99. In int8 such a row decays by its scale, which is exact.
    """

    count: Any  # type: ignore[assignment]
    inner: PyTree


def _mixed(bits: jax.Array) -> jax.Array:
    """Hash uint32 to uint32, one to one."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits


def _draws(shape: Sequence[int], count: Any, array: int) -> jax.Array:
    """Return 32 uniform bits for each element of an array, from the update's number and the element's index.

    They do not depend on the values: a value that repeats would else be rounded the same way in every update. The index
    is that in the global array, so every sharding draws the same bits.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * stride
    seed = _mixed(jnp.asarray(count, jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(array))
    return _mixed(_mixed(index) + seed)


def _in_bfloat16(x: jax.Array, draws: jax.Array) -> jax.Array:
    """Round to one of the two nearest numbers, at random, so that the expected value is x."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (draws >> 16)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(rounded), rounded, x.astype(jnp.bfloat16))  # infinities and nan are kept


def _in_bytes(x: jax.Array, draws: jax.Array) -> InBytes:
    """Round to one of the two nearest levels, at random, so that the expected value is x.

    A number other than zero does not become zero, because Adam divides by the root of a moment.
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
    in_dtype = _in_bytes if dtype == "int8" else _in_bfloat16
    leaves, structure = jax.tree.flatten(inner)
    found = [
        in_dtype(x, _draws(x.shape, count, array)) if is_one else x
        for array, (x, is_one) in enumerate(zip(leaves, jax.tree.leaves(is_moment), strict=True))
    ]
    return RoundedState(count, jax.tree.unflatten(structure, found))


def low_precision_moments(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """Keep an optimizer's moments in `dtype`; its updates are computed in the dtype of the parameters as before.

    Counters and other scalars stay as they are. So do weights that the optimizer keeps, which are the arrays that begin
    as the parameters (`optax.contrib.schedule_free`), and complex moments.

    Rounding is stochastic: up or down at random, with the exact value as its mean. To nearest, a moving average
    `b m + (1 - b) x` would stand still where its step `1 - b` is below half of the last bit, as with Adam's b2 of 0.999
    in bfloat16. The random bits come from the number of the update, which is part of the state, and from the element's
    index. So they are the same for every sharding and after a restart.

    In int8 a number is a byte, and every row of the last dim has a scale in float32: `sign(k) (|k| / 127)⁴ · scale`, a
    range of 2.6e8. If the last dim is sharded, the scale is the maximum over all shards. Adjacent levels differ by 3 %
    at the row's maximum, by 10 % at 1/100 of it, by 34 % at 1/10,000 and by a factor of 2.4 at 1/1,000,000.

    The docstring of `meshpar.optim.moments.RoundedState` has the measured accuracy.

    Args:
      tx: an optax optimizer whose state belongs to its parameters, array by array.
      dtype: "bfloat16" or "int8".

    Raises:
      ValueError: what is no optimizer, or no such dtype.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.3: both moments of AdamW in bfloat16. Dettmers
    et al. 2022, "8-bit Optimizers via Block-wise Quantization": levels that are denser near zero, scales by block.
    """
    if dtype not in DTYPES:
        exists = f"there is {', '.join(DTYPES)}"
        raise problem(f"low_precision_moments(dtype={dtype!r})", "keep moments in it", exists, near(dtype, DTYPES))
    tx = optax.with_extra_args_support(checked("low_precision_moments", tx))

    def widened(x: Any, as_was: Any) -> Any:
        return _from_bytes(x, as_was.dtype) if isinstance(x, InBytes) else x.astype(as_was.dtype)

    def init(params: PyTree) -> RoundedState:
        # `optax.tree_utils.tree_map_params` initialises with what is no array, to see where parameters go.
        count = jnp.zeros((), jnp.int32)
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
            return RoundedState(count, tx.init(params))
        return _rounded(tx.init(params), _are_moments(tx, params)[0], count, dtype)

    def update(grads: PyTree, kept: RoundedState, params: PyTree = None, **more: Any) -> tuple[PyTree, RoundedState]:
        is_moment, like = _are_moments(tx, grads if params is None else params)
        # `like` first: what is kept in bytes is a tree of its own below a leaf.
        inner = jax.tree.map(lambda as_was, is_one, x: widened(x, as_was) if is_one else x, like, is_moment, kept.inner)
        updates, inner = tx.update(grads, inner, params, **more)
        return updates, _rounded(inner, is_moment, optax.safe_increment(kept.count), dtype)

    return optax.GradientTransformationExtraArgs(init, update)


_COPIES = ("copy", "copy_p", "convert_element_type", "optimization_barrier", "sharding_constraint")


def _are_moments(tx: optax.GradientTransformation, params: PyTree) -> tuple[PyTree, PyTree]:
    """Of every leaf of the optimizer's state, whether it is a moment; and its shape and dtype.

    What begins as the parameters goes on as weights, which 8 bits would not let move: schedule-free's z, slow weights.
    Constants are no moments either (coefficients of Muon's iteration).
    """
    jaxpr, like = jax.make_jaxpr(tx.init, return_shape=True)(params)
    is_copy = _copied(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.invars))
    leaves, structure = jax.tree.flatten(like)
    found = [
        x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating) and not copy
        for x, copy in zip(leaves, is_copy, strict=True)
    ]
    return jax.tree.unflatten(structure, found), like


def _copied(jaxpr: core.Jaxpr, of_inputs: Sequence[bool]) -> list[bool]:
    """Of every result of a traced function, whether it is an input as it came, in whatever dtype, or a constant."""
    copies = {*jaxpr.constvars, *(x for x, is_copy in zip(jaxpr.invars, of_inputs, strict=True) if is_copy)}

    def are(atoms: Sequence[Any]) -> list[bool]:
        return [isinstance(x, core.Literal) or x in copies for x in atoms]

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        found = are(eqn.invars) if eqn.primitive.name in _COPIES else []
        found = found if inner is None else _copied(inner.jaxpr, are(eqn.invars))
        copies |= {x for x, is_copy in zip(eqn.outvars, found, strict=False) if is_copy}
    return are(jaxpr.outvars)


def checked(where: str, tx: Any) -> optax.GradientTransformation:
    """The optimizer as given; raises `ValueError` where it is none."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        exists = "it has no init and update, as an optax optimizer does"
        raise problem(where, f"take {tx!r} as the optimizer", exists, "give it one, as optax.adamw(3e-4)")
    return tx  # type: ignore[no-any-return]
