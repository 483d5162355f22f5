"""The zigzag order of a sequence, which gives every rank the same share of the work under a causal mask.

The sequence is cut into 2N chunks. In contiguous order rank i has chunks 2i and 2i + 1; in zigzag order it has chunk i
from the front and its counterpart 2N-1-i from the back: with N = 4,

    contiguous   [0 1] [2 3] [4 5] [6 7]
    zigzag       [0 7] [1 6] [2 5] [3 4]

Later queries see more keys, so in contiguous order the last rank works 2N-1 times as long as the first; in zigzag order
early and late chunks make up for each other.

Sources: Brandon et al. 2023, "Striped Attention: Faster Ring Attention for Causal Transformers", which names the
imbalance and interleaves tokens; the chunks from both ends are those of Grattafiori et al. 2024, "The Llama 3 Herd of
Models", section 3.3.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from meshpar.collectives.kernel_checks import Axis, checked_count, checked_dim, ranks_of
from meshpar.collectives.wire import send, varying
from meshpar.sharding.types import problem


def zigzag(x: Shaped[Array, "*dims"], num_ranks: int, *, dim: int = 1) -> Shaped[Array, "*dims"]:
    """A whole sequence from contiguous to zigzag order: global view, any shape.

    Args:
      x: the sequence runs along `dim`; once that is split over `num_ranks`, rank i has chunks i and 2N-1-i.
      num_ranks: N.
      dim: by default the second, behind the batch.

    Raises:
      ValueError: no such dim, or one that does not divide by 2N.
    """
    return _with_chunks("zigzag", x, num_ranks, dim, chunk_order(checked_count("zigzag", "num_ranks", num_ranks)))


def unzigzag(x: Shaped[Array, "*dims"], num_ranks: int, *, dim: int = 1) -> Shaped[Array, "*dims"]:
    """`zigzag` undone."""
    order = np.argsort(chunk_order(checked_count("unzigzag", "num_ranks", num_ranks)))
    return _with_chunks("unzigzag", x, num_ranks, dim, order)


def chunk_order(num_ranks: int) -> np.ndarray:
    """The chunk at each place of the zigzag order: `[0, 2N-1, 1, 2N-2, ...]`."""
    front = np.arange(num_ranks)
    return np.stack([front, 2 * num_ranks - 1 - front], axis=1).reshape(-1)


def to_zigzag(x: Shaped[Array, "*dims"], *, axis: Axis, dim: int = 1) -> Shaped[Array, "*dims"]:
    """The rank's part of a sequence from contiguous to zigzag order.

        [B, T_X] -> [B, T_X];  per device [B, t] -> [B, t]  (dim 1)
        2 steps, n bytes sent, n what one rank holds (of two ranks half of both: the other chunks are in place)

    Chunks 2i and 2i + 1 leave in a message each: the even chunks of all ranks go to different ranks, and so do the odd.

    Args:
      axis: mesh axis, or several as one.
      dim: along which the sequence runs, an even number of positions.

    Raises:
      ValueError: no such axis here or dim, or an odd number of positions.
    """
    num_ranks, dim, halves = _halves("to_zigzag", x, axis, dim)
    with jax.named_scope("to_zigzag"):
        even, odd = (
            send(half, axis, [(target, source) for source, target in pairs])
            for half, pairs in zip(halves, _moves(num_ranks), strict=True)
        )
        return _swapped_at_odd_ranks(axis, dim, even, odd)


def from_zigzag(x: Shaped[Array, "*dims"], *, axis: Axis, dim: int = 1) -> Shaped[Array, "*dims"]:
    """`to_zigzag` undone: the rank's part of a sequence from zigzag back to contiguous order.

        [B, T_X] -> [B, T_X];  per device [B, t] -> [B, t]  (dim 1)
        2 steps, n bytes sent, n what one rank holds (of two ranks half of both: the other chunks are in place)

    Args:
      axis, dim: as for `to_zigzag`.

    Raises:
      ValueError: no such axis here or dim, or an odd number of positions.
    """
    num_ranks, dim, halves = _halves("from_zigzag", x, axis, dim)
    with jax.named_scope("from_zigzag"):
        chunks = jnp.split(_swapped_at_odd_ranks(axis, dim, *halves), 2, axis=dim)
        return jnp.concatenate([send(*move) for move in zip(chunks, (axis, axis), _moves(num_ranks), strict=True)], dim)


def _moves(num_ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(rank in zigzag order, rank in contiguous order) of all even chunks, and of all odd ones.

    Rank i has chunks i and 2N-1-i, of which one is even: every rank is once a source and once a target in each list.
    """
    places = {chunk: place // 2 for place, chunk in enumerate(chunk_order(num_ranks).tolist())}
    even, odd = ([(places[chunk], chunk // 2) for chunk in range(first, 2 * num_ranks, 2)] for first in (0, 1))
    return even, odd


def _swapped_at_odd_ranks(axis: Axis, dim: int, a: jax.Array, b: jax.Array) -> jax.Array:
    """a before b at even ranks, whose front chunk is the even one; b before a at odd ones."""
    is_even = lax.axis_index(axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, a, b), jnp.where(is_even, b, a)], axis=dim)


def _halves(kernel: str, x: jax.Array, axis: Axis, dim: int) -> tuple[int, int, list[jax.Array]]:
    num_ranks = ranks_of(kernel, axis)
    x = varying(x, axis)
    dim = checked_dim(kernel, dim, x.ndim)
    check_two_chunks(kernel, x.shape[dim], dim)
    return num_ranks, dim, jnp.split(x, 2, axis=dim)


def check_two_chunks(kernel: str, size: int, dim: int) -> None:
    """Raises `ValueError` when a rank's positions are no two chunks of equal length."""
    if size % 2:
        asked = f"cut the {size} positions of a rank (dim {dim}) into two chunks, as the zigzag order does"
        raise problem(kernel, asked, f"{size} is odd", f"pad the sequence to {size + 1} positions a rank")


def _with_chunks(kernel: str, x: jax.Array, num_ranks: int, dim: int, order: np.ndarray) -> jax.Array:
    x = jnp.asarray(x)
    dim = checked_dim(kernel, dim, x.ndim)
    size, num_chunks = x.shape[dim], 2 * num_ranks
    if size % num_chunks:
        asked = f"cut dim {dim} of size {size} into {num_chunks} chunks, two for each of {num_ranks} ranks"
        exists = f"{size} is not a multiple of {num_chunks}"
        raise problem(kernel, asked, exists, f"pad it to {-(-size // num_chunks) * num_chunks}")
    chunks = x.reshape(*x.shape[:dim], num_chunks, size // num_chunks, *x.shape[dim + 1 :])
    return jnp.take(chunks, order, axis=dim, unique_indices=True).reshape(x.shape)
