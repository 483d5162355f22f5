"""Fingerprints of the arrays of a checkpoint.

A fingerprint is the sum of the words of an array, each multiplied by an odd number that depends on its position, modulo
2^32. Odd factors are invertible, so a change of a single word always changes the sum. Integer sums are independent of
the order of summation, and therefore of the sharding and of the processes.

Accelerators run a compiled program. On CPU devices, NumPy reads the buffers of the arrays block by block in threads.
XLA's program for CPUs would compute each replica again, and its loops are not vectorized.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_FACTOR = np.uint32(2654435761)
_BLOCK = 1 << 16
"""Words per block on CPU devices. The arrays of a block stay in the cache of a core."""
_SHORT_ROW = 1 << 10
"""Words per row from which a matrix is divided into its rows: the factors of a row are used again for the next row."""


def fingerprints_of(leaves: Mapping[str, jax.Array], mesh: Mesh) -> list[int]:
    """Return a 32-bit fingerprint per array. It is independent of the sharding and equal on all processes."""
    arrays = list(leaves.values())
    if mesh.devices.flat[0].platform == "cpu":
        return _host_fingerprints(arrays)
    return np.asarray(_fingerprint_program(mesh)(arrays)).tolist()


# ---- Accelerators ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _fingerprint_program(mesh: Mesh) -> Any:
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda arrays: jnp.stack([_fingerprint(x) for x in arrays]), out_shardings=replicated)


def _fingerprint(x: jax.Array) -> jax.Array:
    words = _words(jax.device_put(x, jax.memory.Space.Device))  # offloaded optimizer state is in host memory
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[dim + 1 :]) % 2**32)
        position += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * stride
    factor = (position * _FACTOR) | np.uint32(1)
    return jnp.sum(words * factor, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; an 8-byte element becomes two words in a new last dim."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    if (num_bits := jax.dtypes.itemsize_bits(x.dtype)) < 8:  # packed on accelerators, a byte per element on the host
        return lax.bitcast_convert_type(x, {2: jnp.uint2, 4: jnp.uint4}[num_bits]).astype(jnp.uint32)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, bits).astype(jnp.uint32)


# ---- CPU devices -----------------------------------------------------------------------------------------------------


def _host_fingerprints(arrays: Sequence[jax.Array]) -> list[int]:
    jax.block_until_ready(arrays)
    shards = [(number, shard) for number, x in enumerate(arrays) for shard in x.addressable_shards]
    shards = [(number, shard) for number, shard in shards if shard.replica_id == 0]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        sums = executor.map(lambda item: _host_fingerprint(arrays[item[0]].shape, item[1]), shards)
        totals = [0] * len(arrays)
        for (number, _), value in zip(shards, sums, strict=True):
            totals[number] = (totals[number] + value) % 2**32
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        by_process = multihost_utils.process_allgather(np.array(totals, np.uint32))
        totals = by_process.sum(axis=0, dtype=np.uint32).tolist()
    return totals


def _host_fingerprint(shape: Sequence[int], shard: jax.Shard) -> int:
    """Return the sum over the words of a shard of an array."""
    if not shard.data.size:
        return 0
    first = [part.indices(size)[0] for part, size in zip(shard.index, shape, strict=True)]
    parts = _host_words(np.asarray(shard.data), first, shape)  # the buffer of the device, not a copy
    return sum(_weighted_sum(words, first, shape) for words, first, shape in parts)


def _host_words(
    data: np.ndarray, first: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[np.ndarray, list[int], list[int]]]:
    """Return the words of a shard as `_words` does, their first index in each dim, and the global shape."""
    if np.iscomplexobj(data):
        for number, part in enumerate((data.real, data.imag)):
            for words, rest_first, rest_shape in _host_words(part, first, shape):
                yield words[None], [number, *rest_first], [2, *rest_shape]
        return
    bits = {1: np.uint8, 2: np.uint16}.get(data.dtype.itemsize, np.uint32)
    words = np.asarray(data, order="C")[..., None].view(bits)  # the last dim has two words for 8-byte elements
    yield words, [*first, 0], [*shape, words.shape[-1]]


def _weighted_sum(words: np.ndarray, first: Sequence[int], shape: Sequence[int]) -> int:
    """Return the sum of the products of words and factors, for a block at index `first` of an array."""
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    # Positions are consecutive in the last sharded dim and the dims after it, which form a row.
    split = max((dim for dim in range(words.ndim) if words.shape[dim] != shape[dim]), default=0)
    while split < words.ndim - 1 and math.prod(words.shape[split + 1 :]) >= _SHORT_ROW:
        split += 1
    starts = np.array([first[split] * strides[split] % 2**32], np.uint32)
    for dim in reversed(range(split)):
        indices = np.arange(first[dim], first[dim] + words.shape[dim], dtype=np.uint64) * np.uint64(strides[dim])
        starts = np.add.outer(indices.astype(np.uint32), starts).reshape(-1)
    rows, parities = words.reshape(len(starts), -1), starts % 2
    width = min(max(rows.shape[1], 1), _BLOCK)
    height, index = max(_BLOCK // width, 1), np.arange(width, dtype=np.uint32)
    # (position * _FACTOR) | 1 is a part of the column, which depends on the parity of the row's start, plus a part of
    # the row. Blocks have an even width, or contain a full row.
    by_parity = np.stack([(index * _FACTOR) | np.uint32(1), index * _FACTOR + index % 2])
    factors = by_parity[parities[0]] if (parities == parities[0]).all() else None
    row_sums, products, total = np.empty(len(rows), np.uint32), np.empty(len(rows), np.uint32), 0
    for column in range(0, rows.shape[1], width):
        for row in range(0, len(rows), height):
            part = slice(row, row + height)
            block = rows[part, column : column + width].astype(np.uint32, copy=False)
            np.add.reduce(block, axis=1, out=row_sums[part])
            # `einsum` writes no array of products, so it is faster than a product and a sum.
            if factors is None:
                np.einsum("ij,ij->i", block, by_parity[parities[part], : block.shape[1]], out=products[part])
            else:
                np.einsum("ij,j->i", block, factors[: block.shape[1]], out=products[part])
        row_factors = (starts + np.uint32(column % 2**32)) * _FACTOR
        total += int((row_sums * row_factors).sum(dtype=np.uint32)) + int(products.sum(dtype=np.uint32))
    return total
