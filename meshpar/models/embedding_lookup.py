"""Rows of an embedding table whose width is split over axes that split the batch too: the rows travel, not the table.

    tokens of the group ─► its part of every row ─► all-to-all ─► whole rows of own tokens

Gathering the table sends all of it to look up the few rows that a device's tokens name, and reduces a gradient of its
size. Here every device looks up the tokens of its whole group in the part of the width that it holds, and gets its own
tokens' rows in exchange. The gradient's rows go the other way and are added up where they belong, so nothing is left
to reduce over the group.

Shape suffixes: B rows of this device, G those of the group, T positions, V vocabulary of this device, E embedding
width, W the part of it that a device holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from meshpar.sharding.context import ambient, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.types import axis_sizes, spec_axes

SCOPE = "exchanged_rows"
"""Name of the kernels' scope, by which a traced step tells that they are in it."""
GATHERED = "gathered_table"
"""Name of the scope of lookups that could have gone by it."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """How a table and the tokens that choose its rows lie, each axis with more than one rank."""

    width: tuple[str, ...]
    """Axes that split the table's width, all of which split the batch too."""
    vocab: tuple[str, ...]
    """Axes that split its rows."""
    positions: tuple[str, ...]
    """Of `vocab`, those that split positions between blocks: the sum of rows is scattered over them."""
    summed: tuple[str, ...]
    """Axes whose ranks look up other tokens in the same rows: the gradient is summed over them."""
    table: PartitionSpec
    tokens: PartitionSpec
    rows: PartitionSpec
    num_rows: int


def lookup_of(table_VE: Float[Array, "V E"], tokens_BT: Integer[Array, "B T"]) -> Lookup | None:
    """How to exchange rows; None where the table had better be gathered, or is whole, or a region is manual already."""
    here = ambient()
    if here is None or here.mesh.size == 1 or outer_axes():
        return None
    sizes = axis_sizes(here.mesh)

    def ranks(entry: object) -> tuple[str, ...]:
        return tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1)  # type: ignore[arg-type]

    vocab = ranks(spec_of(table_VE, "act_vocab", "act_embed")[0])
    width = tuple(axis for axis in ranks(_entry(param_spec(table_VE, "vocab", "embed"), 1)) if axis not in vocab)
    x_BTE = jax.ShapeDtypeStruct((*tokens_BT.shape, table_VE.shape[1]), table_VE.dtype)
    batch, seq, _ = (ranks(entry) for entry in spec_of(x_BTE, "batch", "seq", "act_embed"))
    between = ranks(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[1])
    positions = tuple(axis for axis in between if axis not in seq)
    if not width or not set(width) <= set(batch) or between != (*seq, *positions) or not set(positions) <= set(vocab):
        return None

    def ways(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    tokens = math.prod(tokens_BT.shape) // ways((*batch, *between))
    if not rows_travel(tokens, table_VE.shape[0] // ways(vocab), table_VE.dtype):
        return None
    return Lookup(
        width=width,
        vocab=vocab,
        positions=positions,
        summed=tuple(axis for axis in (*batch, *seq) if axis not in width),
        table=PartitionSpec(vocab, width),
        tokens=PartitionSpec(batch, seq),
        rows=PartitionSpec(batch, between, None),
        num_rows=table_VE.shape[0],
    )


def _entry(spec: PartitionSpec, dim: int) -> object:
    return spec[dim] if dim < len(spec) else None


def rows_travel(tokens: int, rows: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether exchanging rows, and their gradients, sends less than gathering the table and reducing its gradient.

    Args:
      tokens: that a device looks up.
      rows: of the table, that a device holds part of.
      dtype: of the rows on the wire. The table's gradient is reduced in float32 at the least.

    Example:
      >>> rows_travel(8192, 128256, "bfloat16"), rows_travel(65536, 32000, "bfloat16")
      (True, False)
    """
    narrow, wide = jnp.dtype(dtype).itemsize, jnp.promote_types(dtype, jnp.float32).itemsize
    return 2 * tokens * narrow < rows * (narrow + wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged_rows(
    how: Lookup, table_VE: Float[Array, "V E"], tokens_BT: Integer[Array, "B T"]
) -> Float[Array, "B T E"]:
    """`table[tokens]`, laid out as the residual stream; NaN for tokens that the table does not have.

    Args:
      how: from `lookup_of`.
      table_VE, tokens_BT: whole arrays, as XLA sees them; tokens of 32 bits or more, with a sign.
    """

    def kernel(table_VW: Array, tokens_BT: Array) -> Array:
        ids_GT, inside_GT = _own_ids(how, table_VW.shape[0], tokens_BT)
        rows_GTW = jnp.take(table_VW, ids_GT, axis=0, mode="clip")
        if how.vocab:
            rows_GTW = jnp.where(inside_GT[..., None], rows_GTW, 0)
            rest = tuple(axis for axis in how.vocab if axis not in how.positions)
            if how.positions:
                rows_GTW = lax.psum_scatter(rows_GTW, how.positions, scatter_dimension=1, tiled=True)
            rows_GTW = lax.psum(rows_GTW, rest) if rest else rows_GTW
        return lax.all_to_all(rows_GTW, how.width, split_axis=0, concat_axis=2, tiled=True)

    with jax.named_scope(SCOPE):
        x_BTE = per_device(kernel, (how.table, how.tokens), how.rows, all_axes=True)(table_VE, tokens_BT)
    unknown_BT = (tokens_BT < -how.num_rows) | (tokens_BT >= how.num_rows)
    return jnp.where(unknown_BT[..., None], jnp.nan, x_BTE)


def _forward(how: Lookup, table_VE: Array, tokens_BT: Array) -> tuple[Array, Array]:
    return exchanged_rows(how, table_VE, tokens_BT), tokens_BT


def _backward(how: Lookup, tokens_BT: Array, g_BTE: Array) -> tuple[Array, None]:
    # A frequent token adds thousands of rows into one: in float32 at the least, over tokens and then over devices.
    wide = jnp.promote_types(g_BTE.dtype, jnp.float32)
    sizes = axis_sizes(ambient().mesh)  # type: ignore[union-attr]
    num_rows = how.num_rows // math.prod(sizes[axis] for axis in how.vocab)

    def kernel(tokens_BT: Array, g_BTE: Array) -> Array:
        g_GTW = lax.all_to_all(g_BTE, how.width, split_axis=2, concat_axis=0, tiled=True)
        if how.positions:
            g_GTW = lax.all_gather(g_GTW, how.positions, axis=1, tiled=True)
        ids_GT, _ = _own_ids(how, num_rows, tokens_BT)
        d_table_VW = jnp.zeros((num_rows, g_GTW.shape[-1]), wide).at[ids_GT].add(g_GTW.astype(wide), mode="drop")
        return lax.psum(d_table_VW, how.summed) if how.summed else d_table_VW

    with jax.named_scope(SCOPE):
        d_table_VE = per_device(kernel, (how.tokens, how.rows), how.table, all_axes=True)(tokens_BT, g_BTE)
    return d_table_VE.astype(g_BTE.dtype), None


exchanged_rows.defvjp(_forward, _backward)


def _own_ids(how: Lookup, num_rows: int, tokens_BT: Array) -> tuple[Array, Array]:
    """The group's tokens as rows of this device's part of the table, `num_rows` where it lacks one; which it has."""
    tokens_GT = lax.all_gather(tokens_BT, how.width, axis=0, tiled=True)
    first = lax.axis_index(how.vocab) * num_rows if how.vocab else 0
    ids_GT = jnp.where(tokens_GT < 0, tokens_GT + how.num_rows, tokens_GT) - first
    inside_GT = (ids_GT >= 0) & (ids_GT < num_rows)
    return jnp.where(inside_GT, ids_GT, num_rows), inside_GT
