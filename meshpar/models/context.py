"""The decoders with their sequence split over devices: its order on the way in and out, and attention round the ring.

    tokens ─► zigzag order ─► layers, each position beside its own ─► final norm ─► natural order ─► logits, loss
                                └─ attention: keys and values round the ring

Tokens are whole over the axes that split the sequence, so they are put into zigzag order where they are; hidden states
go back in two messages a step. In between only attention looks across positions, and it is told which rank has which.

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from meshpar.collectives import from_zigzag, ring_attention, zigzag
from meshpar.sharding.context import ambient, constrain, spec_of
from meshpar.sharding.regions import outer_axes, per_device
from meshpar.sharding.types import axis_sizes, problem, spec_axes

TILE = 512
"""Positions in a tile of attention: scores of `B H 512²` are all that a device holds of them."""


def sequence_axes(x: Array) -> tuple[str, ...]:
    """Mesh axes of more than one rank over which the rules in force split the sequence of x `[B, T, ...]`."""
    here = ambient()
    if here is None or here.mesh.size == 1:
        return ()
    spec = spec_of(x, None, "seq", *[None] * (x.ndim - 2))
    return tuple(axis for axis in spec_axes(spec[1]) if axis_sizes(here.mesh)[axis] > 1)


def entered(
    tokens_BT: Integer[Array, "B T"], positions_BT: Int[Array, "B T"] | None
) -> tuple[Integer[Array, "B T"], Int[Array, "B T"] | None]:
    """Tokens and their positions in the order in which the layers take a whole sequence.

    Raises:
      ValueError: T is not a multiple of two chunks for every rank of the axes that split it.
    """
    axes = sequence_axes(tokens_BT)
    if not axes:
        return tokens_BT, positions_BT
    num_ranks = _check_length(tokens_BT, axes)
    if positions_BT is None:
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions_BT = constrain(zigzag(positions_1T, num_ranks), None, "seq")
    else:
        positions_BT = constrain(zigzag(positions_BT, num_ranks), "batch", "seq")
    return constrain(zigzag(tokens_BT, num_ranks), "batch", "seq"), positions_BT


def left(h_BTE: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Hidden states of a whole sequence, from the order of the layers back to the natural one."""
    axes = sequence_axes(h_BTE)
    if not axes:
        return h_BTE
    spec = spec_of(h_BTE, "batch", "seq", "act_embed")
    return per_device(functools.partial(from_zigzag, axis=axes, dim=1), (spec,), spec)(h_BTE)


def ring(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKD: Float[Array, "B T K D"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention over a sequence in zigzag order, split over `sequence_axes`; `scale` as in `ring_attention`.

    Per device where rows and heads are split too: both are apart from each other, so nothing is left to the compiler.
    Where rules split query heads and not key heads, heads stay the compiler's.
    """
    q = spec_of(q_BTHD, "batch", "seq", "act_heads", None)
    kv = spec_of(k_BTKD, "batch", "seq", "act_kv_heads", None)
    if q[2] != kv[2]:
        q = kv = PartitionSpec(*q[:2])
    kernel = functools.partial(ring_attention, axis=sequence_axes(q_BTHD), scale=scale, tile=TILE)
    return per_device(kernel, (q, kv, kv), q)(q_BTHD, k_BTKD, v_BTKD)


def check_lookup(table_VE: Float[Array, "V E"], tokens_BT: Integer[Array, "B T"]) -> None:
    """Raises `ValueError` for the lookup that XLA of jax 0.12 aborts on: split rows at split positions, when nested."""
    outer, axes = outer_axes(), sequence_axes(tokens_BT)
    if not outer or not axes or jax.__version_info__ < (0, 12):
        return
    rows = [axis for axis in spec_axes(spec_of(table_VE, "act_vocab", "act_embed")[0]) if _size_of(axis) > 1]
    if rows:
        raise problem(
            f"the embedding of shape {table_VE.shape} inside a shard_map (accumulate_mode='once' or quantize=...)",
            f"be split over {', '.join(rows)} and looked up at positions split over {', '.join(axes)}",
            f"the compiler of jax {jax.__version__} aborts on it",
            "use accumulate_mode='each' and no quantize, keep it whole with "
            "mp.Rules(vocab=None, act_vocab=None), or use jax 0.10",
        )


def _size_of(axis: str) -> int:
    here = ambient()
    assert here is not None
    return axis_sizes(here.mesh)[axis]


def _check_length(tokens_BT: Array, axes: tuple[str, ...]) -> int:
    here = ambient()
    assert here is not None
    num_ranks = math.prod(axis_sizes(here.mesh)[axis] for axis in axes)
    length, unit = tokens_BT.shape[1], 2 * num_ranks
    if length % unit:
        raise problem(
            f"tokens of shape {tokens_BT.shape} dim 1 (`seq`)",
            f"split over {' × '.join(f'`{axis}`' for axis in axes)} ({num_ranks}) in zigzag order, two chunks a rank",
            f"{length} positions are not a multiple of {unit}",
            f"use sequences of {-(-length // unit) * unit}",
        )
    return num_ranks
