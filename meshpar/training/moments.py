"""Optimizer state in less memory of the device: in fewer bits, or in the memory of the host.

Both take any optax optimizer and give one, so that a layout, an account of memory and a plan learn it from there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.sharding.types import PyTree, near, problem

DTYPES = ("bfloat16", "int8")
"""In which moments can be kept. float16 ends where squares of gradients begin, at 6e-8."""
_LEVELS = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """State of an optimizer that lies in the host's memory between updates, also as a part of another's state."""

    state: Any


def offloaded(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with its state in pinned memory of the host between updates.

    The step brings it to the device when the gradients are made, and takes it back: twice its bytes travel over the
    link between the two in every step, so it pays where a step has many tokens. While gradients are made the device
    holds less by its bytes; during the update it holds all of it, beside the gradients, as without. Values are the
    same. Counters stay on the device.

    Args:
      tx: an optax optimizer; `offloaded(moments_in(tx, "bfloat16"))` halves what travels.

    Raises:
      ValueError: what is no optimizer.

    Source: Ren et al. 2021, "ZeRO-Offload" (there the update is computed on the host, too).
    """
    tx = optax.with_extra_args_support(_checked("offloaded", tx))

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


def _in_bytes(x: jax.Array) -> InBytes:
    """Rounded to one of the two nearest levels, so that the mean over many roundings is x.

    What is drawn is a hash of x's leading bits: nearly every number is rounded alike under every layout, though sums in
    another order differ in the last bits, and a moving average that moves by less than a level at a time moves yet.
    What is not zero does not become zero: Adam divides by the root of a moment.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1)
    share = jnp.abs(x) / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)[..., None]
    below = jnp.clip(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * _LEVELS), 0, _LEVELS - 1)
    low, high = (below / _LEVELS) ** 4, ((below + 1) / _LEVELS) ** 4
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 10
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    drawn = (bits >> 8).astype(jnp.float32) / 2**24
    k = jnp.maximum(below + (drawn * (high - low) < share - low), 1)
    return InBytes((jnp.sign(x) * k).astype(jnp.int8), scales)


def _from_bytes(x: InBytes, dtype: Any) -> jax.Array:
    k = x.levels.astype(jnp.float32) / _LEVELS
    return (jnp.sign(k) * k**4 * x.scales[..., None]).astype(dtype)


def moments_in(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """The optimizer, with what it keeps of every parameter in `dtype`; an update is computed as wide as it was.

    Counters and other scalars stay as they are. In bfloat16 arrays are rounded to nearest. A moving average
    `b m + (1 - b) x` moves by steps of `1 - b`, which must not round away: bfloat16 has 8 bits, so b is at most
    `1 - 2⁻⁸` (Adam's usual b2 of 0.999 is above, 0.95 is not).

    In int8 a number is a byte, and every row of the last dim has a scale in float32: `sign(k) (|k| / 127)⁴ · scale`, a
    range of 2.6e8 with steps of 3 % at its upper end. It is rounded up or down at random, so that b may be as large as
    one likes. Where the last dim is sharded, its largest number is that of all shards, one a row.

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
        raise problem(f"moments_in(dtype={dtype!r})", "keep moments in it", exists, near(dtype, DTYPES))
    tx = optax.with_extra_args_support(_checked("moments_in", tx))

    def is_moment(x: Any) -> bool:
        return np.ndim(x) > 0 and jnp.issubdtype(x.dtype, jnp.floating)

    def kept(state: PyTree) -> PyTree:
        in_dtype = _in_bytes if dtype == "int8" else lambda x: x.astype(dtype)
        return jax.tree.map(lambda x: in_dtype(x) if is_moment(x) else x, state)

    def widened(like: Any, x: Any) -> Any:
        if isinstance(x, InBytes):
            return _from_bytes(x, like.dtype)
        return x.astype(like.dtype) if is_moment(x) else x

    def init(params: PyTree) -> PyTree:
        return kept(tx.init(params))

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **more: Any) -> tuple[PyTree, PyTree]:
        like = jax.eval_shape(tx.init, grads if params is None else params)
        state = jax.tree.map(widened, like, state)
        updates, state = tx.update(grads, state, params, **more)
        return updates, kept(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(where: str, tx: Any) -> optax.GradientTransformation:
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        exists = "it has no init and update, as an optax optimizer does"
        raise problem(where, f"take {tx!r} as the optimizer", exists, "give it one, as optax.adamw(3e-4)")
    return tx  # type: ignore[no-any-return]
