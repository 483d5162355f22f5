"""Embedding lookup with an all-to-all of embeddings, for tables sharded over batch axes.

    tokens of the group ─► lookup in the local columns ─► all-to-all ─► full embeddings of the local tokens

An all-gather of the table communicates all rows, although a device needs only the rows of the local tokens, and the
gradient reduction has the same size. Instead, each device looks up the tokens of its group in its columns of the table,
and an all-to-all returns the full embeddings of the local tokens. The backward pass exchanges gradients in the opposite
direction, so no reduction over the group is needed.

Shape suffixes: B local batch, G batch of the group, T positions, V local vocabulary, E embedding dimension, W local
columns of the table.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from meshpar.sharding.context import ambient, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.types import axis_sizes, num_shards, spec_axes

SCOPE = "exchanged_rows"
"""Name scope of this lookup, for the inspection of traced steps."""
GATHERED = "gathered_table"
"""Name scope of lookups with an all-gather of the table."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Shardings of a table and its tokens, without axes of size 1."""

    width: tuple[str, ...]
    """Axes that shard both the width of the table and the batch."""
    vocab: tuple[str, ...]
    """Axes that shard the vocabulary."""
    positions: tuple[str, ...]
    """Subset of `vocab` that also shards `norm_seq`. The embeddings are reduce-scattered over these axes."""
    summed: tuple[str, ...]
    """Axes over which different tokens use the same rows. The gradient is all-reduced over these axes."""
    table: PartitionSpec
    tokens: PartitionSpec
    rows: PartitionSpec
    num_rows: int


def lookup_of(table_VE: Array, tokens_BT: Array) -> Lookup | None:
    """Return the shardings for `exchanged_rows`, or None if the table should be all-gathered or is not sharded."""
    context = ambient()
    if context is None or context.mesh.size == 1:
        return None
    sizes, outer = axis_sizes(context.mesh), outer_axes()

    def ranks(entry: object) -> tuple[str, ...]:
        return tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1 and axis not in outer)  # type: ignore[arg-type]

    vocab = ranks(spec_of(table_VE, "act_vocab", "act_embed")[0])
    table_spec = (*param_spec(table_VE, "vocab", "embed"), None, None)
    width = tuple(axis for axis in ranks(table_spec[1]) if axis not in vocab)
    x_BTE = jax.ShapeDtypeStruct((*tokens_BT.shape, table_VE.shape[1]), table_VE.dtype)
    batch, seq, _ = (ranks(entry) for entry in spec_of(x_BTE, "batch", "seq", "act_embed"))
    between = ranks(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[1])
    positions = tuple(axis for axis in between if axis not in seq)
    if not width or not set(width) <= set(batch) or between != (*seq, *positions) or not set(positions) <= set(vocab):
        return None
    tokens = tokens_BT.size // num_shards((*batch, *between), sizes)
    if not exchange_is_cheaper(tokens, table_VE.shape[0] // num_shards(vocab, sizes), table_VE.dtype):
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


def exchange_is_cheaper(tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Return whether exchanging embeddings and their gradients communicates less than all-gathering the table.

    Example:
      >>> exchange_is_cheaper(8192, 128256, "bfloat16"), exchange_is_cheaper(65536, 32000, "bfloat16")
      (True, False)
    """
    dtype_bytes, grad_bytes = jnp.dtype(dtype).itemsize, jnp.promote_types(dtype, jnp.float32).itemsize
    return 2 * tokens * dtype_bytes < vocab_size * (dtype_bytes + grad_bytes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged_rows(lookup: Lookup, table_VE: Array, tokens_BT: Array) -> Array:
    """Return `table[tokens]`, sharded as the residual stream. Embeddings of invalid tokens are NaN."""

    def kernel(table_VW: Array, tokens_BT: Array) -> Array:
        ids_GT, inside_GT = _local_ids(lookup, table_VW.shape[0], tokens_BT)
        rows_GTW = jnp.take(table_VW, ids_GT, axis=0, mode="clip")
        if lookup.vocab:
            rows_GTW = jnp.where(inside_GT[..., None], rows_GTW, 0)
            summed = tuple(axis for axis in lookup.vocab if axis not in lookup.positions)
            if lookup.positions:
                rows_GTW = lax.psum_scatter(rows_GTW, lookup.positions, scatter_dimension=1, tiled=True)
            rows_GTW = lax.psum(rows_GTW, summed) if summed else rows_GTW
        return lax.all_to_all(rows_GTW, lookup.width, split_axis=0, concat_axis=2, tiled=True)

    with jax.named_scope(SCOPE):
        x_BTE = per_device(kernel, (lookup.table, lookup.tokens), lookup.rows, all_axes=True)(table_VE, tokens_BT)
    unknown_BT = (tokens_BT < -lookup.num_rows) | (tokens_BT >= lookup.num_rows)
    return jnp.where(unknown_BT[..., None], jnp.nan, x_BTE)


def _backward(lookup: Lookup, tokens_BT: Array, g_BTE: Array) -> tuple[Array, None]:
    # A frequent token accumulates thousands of gradients, so they are summed in float32 or higher precision.
    dtype = jnp.promote_types(g_BTE.dtype, jnp.float32)
    sizes = axis_sizes(ambient().mesh)  # type: ignore[union-attr]
    num_rows = lookup.num_rows // num_shards(lookup.vocab, sizes)

    def kernel(tokens_BT: Array, g_BTE: Array) -> Array:
        g_GTW = lax.all_to_all(g_BTE, lookup.width, split_axis=2, concat_axis=0, tiled=True)
        if lookup.positions:
            g_GTW = lax.all_gather(g_GTW, lookup.positions, axis=1, tiled=True)
        ids_GT, _ = _local_ids(lookup, num_rows, tokens_BT)
        d_table_VW = jnp.zeros((num_rows, g_GTW.shape[-1]), dtype).at[ids_GT].add(g_GTW.astype(dtype), mode="drop")
        return lax.psum(d_table_VW, lookup.summed) if lookup.summed else d_table_VW

    with jax.named_scope(SCOPE):
        d_table_VE = per_device(kernel, (lookup.tokens, lookup.rows), lookup.table, all_axes=True)(tokens_BT, g_BTE)
    return d_table_VE.astype(g_BTE.dtype), None


exchanged_rows.defvjp(lambda lookup, table, tokens: (exchanged_rows(lookup, table, tokens), tokens), _backward)


def _local_ids(lookup: Lookup, num_rows: int, tokens_BT: Array) -> tuple[Array, Array]:
    """Return the local row of each token of the group and a mask of local rows. Rows of other shards are `num_rows`."""
    tokens_GT = lax.all_gather(tokens_BT, lookup.width, axis=0, tiled=True)
    first = lax.axis_index(lookup.vocab) * num_rows if lookup.vocab else 0
    ids_GT = jnp.where(tokens_GT < 0, tokens_GT + lookup.num_rows, tokens_GT) - first
    inside_GT = (ids_GT >= 0) & (ids_GT < num_rows)
    return jnp.where(inside_GT, ids_GT, num_rows), inside_GT
