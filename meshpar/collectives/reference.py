"""Plain global-view references of the kernels, in jax.numpy and without communication.

`parts[r]` is the input of rank r, and entry r of the result is its output, for N ranks. `tiled`, `dim`, `op` and `root`
have the same meaning as in the kernel of the same name.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, Shaped

from meshpar.collectives.zigzag_order import unzigzag, zigzag

_REDUCE: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}


def shift(parts: Shaped[Array, "N ..."], *, by: int = 1, wrap: bool = True) -> Shaped[Array, "N ..."]:
    """The output of rank r is `parts[r - by]`."""
    moved = jnp.roll(parts, by, axis=0)
    if wrap:
        return moved
    ranks = jnp.arange(len(parts)).reshape(-1, *(1,) * (parts.ndim - 1))
    return jnp.where((ranks - by >= 0) & (ranks - by < len(parts)), moved, jnp.zeros_like(moved))


def broadcast(parts: Shaped[Array, "N ..."], *, root: int = 0) -> Shaped[Array, "N ..."]:
    """The output of each rank is `parts[root]`."""
    return jnp.broadcast_to(parts[root], parts.shape)


def reduce(parts: Num[Array, "N ..."], *, op: str = "sum", root: int = 0) -> Num[Array, "N ..."]:
    """The output of rank `root` is the reduction over the first dim. Other outputs are zeros."""
    return _only(root, _total(parts, op), len(parts))


def scatter(
    parts: Shaped[Array, "N ..."], *, root: int = 0, dim: int = 0, tiled: bool = True
) -> Shaped[Array, "N ..."]:
    """The output of rank r is part r of `parts[root]`."""
    return _split(parts[root], len(parts), dim, tiled)


def gather(parts: Shaped[Array, "N ..."], *, root: int = 0, dim: int = 0, tiled: bool = True) -> Shaped[Array, "N ..."]:
    """The output of rank `root` is the concatenation (or stack) of all inputs. Other outputs are zeros."""
    return _only(root, _joined(parts, dim, tiled), len(parts))


def all_gather(parts: Shaped[Array, "N ..."], *, dim: int = 0, tiled: bool = True) -> Shaped[Array, "N ..."]:
    """The output of each rank is the concatenation (or stack) of all inputs."""
    return _everywhere(_joined(parts, dim, tiled), len(parts))


def reduce_scatter(
    parts: Num[Array, "N ..."], *, op: str = "sum", dim: int = 0, tiled: bool = True
) -> Num[Array, "N ..."]:
    """The output of rank r is part r of the reduction over the first dim."""
    return _split(_total(parts, op), len(parts), dim, tiled)


def all_reduce(parts: Num[Array, "N ..."], *, op: str = "sum") -> Num[Array, "N ..."]:
    """The output of each rank is the reduction over the first dim."""
    return _everywhere(_total(parts, op), len(parts))


def all_to_all(
    parts: Shaped[Array, "N ..."], *, split_dim: int = 0, concat_dim: int = 0, tiled: bool = True
) -> Shaped[Array, "N ..."]:
    """The output of rank r is the concatenation (or stack) of part r of each input, ordered by rank."""
    pieces = jax.vmap(lambda row: _split(row, len(parts), split_dim, tiled))(parts)  # [source, target, ...]
    return jax.vmap(lambda column: _joined(column, concat_dim, tiled), in_axes=1)(pieces)


def all_gather_matmul(
    parts: Num[Array, "N ..."], weights: Num[Array, "N E ..."], *, dim: int = -2
) -> Num[Array, "N ..."]:
    """The output of rank r is the concatenation of all inputs, multiplied by `weights[r]`."""
    return jax.vmap(lambda x, w: jnp.tensordot(x, w, 1))(all_gather(parts, dim=dim), weights)


def matmul_reduce_scatter(
    parts: Num[Array, "N ..."], weights: Num[Array, "N ... E"], *, dim: int = -2
) -> Num[Array, "N ..."]:
    """The output of rank r is part r of the sum of `parts[s] @ weights[s]` over ranks s."""
    products = jax.vmap(lambda h, w: jnp.tensordot(h, w, w.ndim - 1))(parts, weights)
    return reduce_scatter(products, dim=dim)


# Quantized kernels approximate these, within the error bounds in `quantized.py`.
quantized_all_gather, quantized_reduce_scatter, quantized_all_reduce = all_gather, reduce_scatter, all_reduce


def _total(parts: jax.Array, op: str) -> jax.Array:
    return _REDUCE[op](parts, axis=0).astype(parts.dtype)


def _everywhere(row: jax.Array, num_ranks: int) -> jax.Array:
    return jnp.broadcast_to(row, (num_ranks, *row.shape))


def _only(root: int, row: jax.Array, num_ranks: int) -> jax.Array:
    return jnp.zeros((num_ranks, *row.shape), row.dtype).at[root].set(row)


def _joined(parts: jax.Array, dim: int, tiled: bool) -> jax.Array:
    return jnp.concatenate(list(parts), axis=dim) if tiled else jnp.stack(list(parts), axis=dim)


def _split(row: jax.Array, num_ranks: int, dim: int, tiled: bool) -> jax.Array:
    if tiled:
        return jnp.stack(jnp.split(row, num_ranks, axis=dim))
    return jnp.moveaxis(row, dim, 0)


def ring_attention(
    q: Float[Array, "N B t H D"],
    k: Float[Array, "N B t K D"],
    v: Float[Array, "N B t K D"],
    *,
    causal: bool = True,
    order: str = "zigzag",
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    segments: Int[Array, "N B t"] | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "N B t H D"]:
    """Softmax attention over the full sequence, with the softmax in float32 or higher precision."""
    num_ranks = len(q)
    q, k, v = (_joined(x, 1, tiled=True) for x in (q, k, v))
    if order == "zigzag":
        q, k, v = (unzigzag(x, num_ranks) for x in (q, k, v))
    if segments is not None:
        segments = _joined(segments, 1, tiled=True)
        segments = unzigzag(segments, num_ranks) if order == "zigzag" else segments
    o = _attention(q, k, v, _mask(q.shape[1], causal, window, segments), scale, cap, sinks)
    return jnp.stack(jnp.split(zigzag(o, num_ranks) if order == "zigzag" else o, num_ranks, axis=1))


def blockwise_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    segments: Int[Array, "B T"] | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H D"]:
    """Causal softmax attention with a mask over the full sequence."""
    return _attention(q, k, v, _mask(q.shape[1], True, window, segments), scale, cap, sinks)


def _mask(length: int, causal: bool, window: int | None, segments: Array | None) -> Array:
    ahead = jnp.arange(length)[:, None] - jnp.arange(length)
    mask = ((ahead >= 0) | (not causal)) & (ahead < (length if window is None else window))
    return mask if segments is None else mask & (segments[:, None, :, None] == segments[:, None, None])


def _attention(
    q: Array, k: Array, v: Array, mask: Array, scale: float | None, cap: float | None, sinks: Array | None
) -> Array:
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k, preferred_element_type=dtype)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bhqs,bshd->bqhd", weights, v)


def to_zigzag(parts: Shaped[Array, "N ..."], *, dim: int = 1) -> Shaped[Array, "N ..."]:
    """Reorder the parts of a sequence from contiguous to zigzag order."""
    return _split(zigzag(_joined(parts, dim, tiled=True), len(parts), dim=dim), len(parts), dim, tiled=True)


def from_zigzag(parts: Shaped[Array, "N ..."], *, dim: int = 1) -> Shaped[Array, "N ..."]:
    """Reorder the parts of a sequence from zigzag to contiguous order."""
    return _split(unzigzag(_joined(parts, dim, tiled=True), len(parts), dim=dim), len(parts), dim, tiled=True)
