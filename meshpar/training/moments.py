"""Optimizer state in less memory of the device: in fewer bits, or in the memory of the host.

Both take any optax optimizer and give one, so that a layout, an account of memory and a plan learn it from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def _drawn(x: jax.Array, without: int) -> jax.Array:
    """uint32, evenly spread: by it float32 x is rounded up or down, so that the mean over many roundings is x.

    It is a hash of x's bits but the last ones: nearly every number is rounded alike under every layout, though sums in
    another order differ in those, and a moving average that moves by less than a level at a time moves yet.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> without
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits


def _in_bfloat16(x: jax.Array) -> jax.Array:
    """Rounded to one of the two nearest numbers, at random by how near each is."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_drawn(x, 4) >> 16)
    found = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(found), found, x.astype(jnp.bfloat16))  # nor is what is no number made one


def _in_bytes(x: jax.Array) -> InBytes:
    """Rounded to one of the two nearest levels, at random by how near each is.

    What is not zero does not become zero: Adam divides by the root of a moment.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, initial=0)  # a row may be empty
    share = jnp.abs(x) / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)[..., None]
    below = jnp.clip(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * _LEVELS), 0, _LEVELS - 1)
    low, high = (below / _LEVELS) ** 4, ((below + 1) / _LEVELS) ** 4
    drawn = (_drawn(x, 10) >> 8).astype(jnp.float32) / 2**24
    k = jnp.maximum(below + (drawn * (high - low) < share - low), 1)
    return InBytes((jnp.sign(x) * k).astype(jnp.int8), scales)


def _from_bytes(x: InBytes, dtype: Any) -> jax.Array:
    k = x.levels.astype(jnp.float32) / _LEVELS
    return (jnp.sign(k) * k**4 * x.scales[..., None]).astype(dtype)


def moments_in(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """The optimizer, with what it keeps of every parameter in `dtype`; an update is computed as wide as it was.

    Counters and other scalars stay as they are, and so do weights that the optimizer keeps: what it begins as the
    parameters (`optax.contrib.schedule_free`). Both round up or down at random: a moving average `b m + (1 - b) x`
    moves by steps of `1 - b`, and to nearest they would be rounded away where they are less than a number's last bit,
    as with Adam's b2 of 0.999 in bfloat16.

    In int8 a number is a byte, and every row of the last dim has a scale in float32: `sign(k) (|k| / 127)⁴ · scale`, a
    range of 2.6e8 with steps of 3 % at its upper end. Where the last dim is sharded, its largest number is that of all
    shards, one a row.

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
    tx = optax.with_extra_args_support(checked("moments_in", tx))

    def each(f: Callable[[Any, Any], Any], state: PyTree, is_moment: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda x, is_one, as_was: f(x, as_was) if is_one else x, state, is_moment, like)

    def kept(state: PyTree, is_moment: PyTree) -> PyTree:
        in_dtype = _in_bytes if dtype == "int8" else _in_bfloat16
        return each(lambda x, _: in_dtype(x), state, is_moment, state)

    def widened(x: Any, as_was: Any) -> Any:
        return _from_bytes(x, as_was.dtype) if isinstance(x, InBytes) else x.astype(as_was.dtype)

    def init(params: PyTree) -> PyTree:
        # `optax.tree_utils.tree_map_params` initialises with what is no array, to see where parameters go.
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
            return tx.init(params)
        return kept(tx.init(params), _are_moments(tx, params)[0])

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **more: Any) -> tuple[PyTree, PyTree]:
        is_moment, like = _are_moments(tx, grads if params is None else params)
        # `like` first: what is kept in bytes is a tree of its own below a leaf.
        state = jax.tree.map(lambda as_was, is_one, x: widened(x, as_was) if is_one else x, like, is_moment, state)
        updates, state = tx.update(grads, state, params, **more)
        return updates, kept(state, is_moment)

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
