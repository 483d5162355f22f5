"""The zigzag order of a sequence, which balances causal attention over ranks.

The sequence is divided into 2N chunks. In contiguous order rank i has chunks 2i and 2i + 1. In zigzag order it has
chunks i and 2N-1-i. With N = 4:

    contiguous   [0 1] [2 3] [4 5] [6 7]
    zigzag       [0 7] [1 6] [2 5] [3 4]

Later queries see more keys, so in contiguous order the last rank needs 2N-1 times as long as the first. In zigzag
order all ranks have the same work.

Sources: Brandon et al. 2023, "Striped Attention: Faster Ring Attention for Causal Transformers", which describes the
imbalance and interleaves tokens; Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, which assigns
chunks from both ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from meshpar.collectives.kernel_checks import Axis, checked_dim, ranks_of
from meshpar.collectives.wire import send, varying
from meshpar.sharding.errors import check_divides, check_positive_int


def zigzag(x: Shaped[Array, "*dims"], num_ranks: int, *, dim: int = 1) -> Shaped[Array, "*dims"]:
    """Reorder a global sequence from contiguous to zigzag order.

    Args:
      x: array of any shape. If `dim` of the result is sharded over `num_ranks`, rank i has chunks i and 2N-1-i.
      num_ranks: number of ranks N.
      dim: the sequence dim, by default the one after the batch.

    Raises:
      MeshparError: the dim is unknown, or its size is not divisible by 2N.
    """
    return _with_chunks("zigzag", x, num_ranks, dim, chunk_order)


def unzigzag(x: Shaped[Array, "*dims"], num_ranks: int, *, dim: int = 1) -> Shaped[Array, "*dims"]:
    """Reorder a global sequence from zigzag to contiguous order. The arguments are as in `zigzag`."""
    return _with_chunks("unzigzag", x, num_ranks, dim, lambda num_ranks: np.argsort(chunk_order(num_ranks)))


def chunk_order(num_ranks: int) -> np.ndarray:
    """Return the chunk indices in zigzag order: `[0, 2N-1, 1, 2N-2, ...]`."""
    front = np.arange(num_ranks)
    return np.stack([front, 2 * num_ranks - 1 - front], axis=1).reshape(-1)


def to_zigzag(x: Shaped[Array, "*dims"], *, axis: Axis, dim: int = 1) -> Shaped[Array, "*dims"]:
    """Reorder a sharded sequence from contiguous to zigzag order; the reference is `reference.to_zigzag`.

        [B, T_X] -> [B, T_X];  per device [B, t] -> [B, t]  (dim 1)
        2 steps, n bytes sent, n the local array (half as much with two ranks, where one chunk of each stays)

    Chunks 2i and 2i + 1 are sent in one message each. The even chunks of all ranks go to different ranks, and so do the
    odd chunks.

    Args:
      x: the local part of the sequence.
      axis: see `shift`.
      dim: the sequence dim, of even local size.

    Raises:
      MeshparError: the axis or dim is unknown, or the number of local positions is odd.
    """
    num_ranks, dim, halves = _halves("to_zigzag", x, axis, dim)
    with jax.named_scope("to_zigzag"):
        even, odd = (
            send(half, axis, [(target, source) for source, target in pairs])
            for half, pairs in zip(halves, _moves(num_ranks), strict=True)
        )
        return _swapped_at_odd_ranks(axis, dim, even, odd)


def from_zigzag(x: Shaped[Array, "*dims"], *, axis: Axis, dim: int = 1) -> Shaped[Array, "*dims"]:
    """Reorder a sharded sequence from zigzag to contiguous order; the reference is `reference.from_zigzag`.

    Arguments, errors and bytes are as in `to_zigzag`.
    """
    num_ranks, dim, halves = _halves("from_zigzag", x, axis, dim)
    with jax.named_scope("from_zigzag"):
        chunks = jnp.split(_swapped_at_odd_ranks(axis, dim, *halves), 2, axis=dim)
        return jnp.concatenate([send(*move) for move in zip(chunks, (axis, axis), _moves(num_ranks), strict=True)], dim)


def _moves(num_ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (rank in zigzag order, rank in contiguous order) of each even chunk, and the same for odd chunks.

    In zigzag order rank i has chunks i and 2N-1-i, one even and one odd. So each list is a permutation of the ranks.
    """
    ranks = {chunk: place // 2 for place, chunk in enumerate(chunk_order(num_ranks).tolist())}
    even, odd = ([(ranks[chunk], chunk // 2) for chunk in range(first, 2 * num_ranks, 2)] for first in (0, 1))
    return even, odd


def _swapped_at_odd_ranks(axis: Axis, dim: int, a: jax.Array, b: jax.Array) -> jax.Array:
    """Concatenate a and b on even ranks, whose first zigzag chunk is even, and b and a on odd ranks."""
    is_even = lax.axis_index(axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, a, b), jnp.where(is_even, b, a)], axis=dim)


def _halves(kernel: str, x: jax.Array, axis: Axis, dim: int) -> tuple[int, int, list[jax.Array]]:
    num_ranks = ranks_of(kernel, axis)
    x = varying(x, axis)
    dim = checked_dim(kernel, dim, x.ndim)
    check_two_chunks(kernel, x.shape[dim], dim)
    return num_ranks, dim, jnp.split(x, 2, axis=dim)


def check_two_chunks(kernel: str, size: int, dim: int) -> None:
    """Check that the local positions are two chunks of equal length."""
    requested = f"divide the {size} local positions (dim {dim}) into the two chunks of the zigzag order"
    check_divides(kernel, requested, size, 2, f"pad the sequence to {size + 1} positions per rank")


def _with_chunks(kernel: str, x: jax.Array, num_ranks: int, dim: int, order: Callable[[int], np.ndarray]) -> jax.Array:
    check_positive_int(kernel, "the number of ranks", num_ranks=num_ranks)
    x = jnp.asarray(x)
    dim = checked_dim(kernel, dim, x.ndim)
    size, num_chunks = x.shape[dim], 2 * num_ranks
    check_divides(kernel, f"divide dim {dim} into {num_chunks} chunks, two for each rank", size, num_chunks)
    chunks = x.reshape(*x.shape[:dim], num_chunks, size // num_chunks, *x.shape[dim + 1 :])
    return jnp.take(chunks, order(num_ranks), axis=dim, unique_indices=True).reshape(x.shape)
