"""grouped_matmul: rows sorted by group, each times its own group's weight, and nothing else computed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.check import check_choice, checked_count
from meshpar.collectives.wire import varying_alike
from meshpar.moe.choice import GPUS
from meshpar.planner import cost
from meshpar.types import problem

KERNEL = "grouped_matmul"
IMPLEMENTATIONS = ("auto", "blocked", "tokamax")
_BLOCKS_A_GROUP = 16
"""A block is at most so small a part of a group of mean size: padding adds a 16th to the rows at the most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedChoice:
    """How a grouped matmul is computed, and the reason."""

    implementation: str
    why: str


def choose_grouped_matmul(platform: str | None = None, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> GroupedChoice:
    """What `implementation="auto"` takes for rows of a dtype on a platform (`cpu`, `gpu`, ...); None: jax's own."""
    platform = platform or jax.default_backend()
    if platform not in GPUS:
        return GroupedChoice(implementation="blocked", why=f"tokamax has kernels for GPUs, none for {platform}")
    if not _has_tokamax():
        return GroupedChoice(implementation="blocked", why="tokamax, whose kernel is for GPUs, is not installed")
    if jnp.dtype(dtype).itemsize > 2:
        why = f"products of {jnp.dtype(dtype)} are to be as exact as that; tokamax's kernels are made for 16 bits"
        return GroupedChoice(implementation="blocked", why=why)
    return GroupedChoice(implementation="tokamax", why="tokamax is installed, and its kernels are for GPUs")


def grouped_matmul(
    rows: Float[Array, "R d"],
    weights: Float[Array, "G d f"],
    group_sizes: Int[Array | np.ndarray, " G"],
    *,
    implementation: str = "auto",
    block: int | None = None,
    typical_rows: int | None = None,
) -> Float[Array, "R f"]:
    """Row r times the weight of its group: the first `group_sizes[0]` rows are group 0's, the next group 1's, ...

        [R, d] . [G, d, f] -> [R, f]

    Rows beyond the sum of `group_sizes` come out zero, whatever stands in them, and have no gradient. Nothing of the
    size of rows x groups is formed. Products are summed in float32 at the least, gradients of the weights over all of
    a group's rows too.

    The blocked form cuts each group into blocks and loops over them; a block slices one weight. It computes
    `planner.cost.grouped_rows(R, G, block)` rows at the most, that is fewer than R + G block, forward and for each of
    the two gradients. The loop ends with the last row there is: a compiler does not know its length. So many blocks as
    `typical_rows` take at the most are run in a loop of known length, which is what FLOPs are counted by.

    Group sizes that are NumPy's and all R / G (buffers of fixed capacity) make it one batched matmul.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (section 5).

    Args:
      rows: sorted by group.
      weights: one a group, of the rows' dtype.
      group_sizes: may sum to less than R, not to more.
      implementation: `blocked`, `tokamax` (its GPU kernel; an optional package), or `auto`: `choose_grouped_matmul`
        says which and why.
      block: rows of a block; None: a 16th of a group of mean size, a power of two from 8 to 512.
      typical_rows: what `group_sizes` sum to as a rule, where that is less than R; None: nothing is known.

    Raises:
      ValueError: shapes or dtypes that do not go together; no such implementation, or tokamax is not there.
    """
    check_choice(KERNEL, "implementation", implementation, IMPLEMENTATIONS)
    _check_operands(rows, weights, group_sizes)
    num_rows, num_groups = rows.shape[0], weights.shape[0]
    if block is not None:
        checked_count(KERNEL, "block", block)
    if typical_rows is not None:
        checked_count(KERNEL, "typical_rows", typical_rows)
    if num_rows == 0:
        return jnp.zeros((0, weights.shape[2]), rows.dtype)
    if implementation == "tokamax" and not _has_tokamax():
        raise problem(
            KERNEL,
            "use implementation='tokamax'",
            "the package tokamax is not installed",
            "install it (`pip install tokamax`), or take implementation='blocked'",
        )
    if implementation == "auto":
        implementation = choose_grouped_matmul(dtype=rows.dtype).implementation
    with jax.named_scope(KERNEL):
        if isinstance(group_sizes, np.ndarray) and (group_sizes * num_groups == num_rows).all():
            return _batched(rows, weights)
        rows, weights, sizes = varying_alike((), rows, weights, jnp.asarray(group_sizes, jnp.int32))
        if implementation == "tokamax":
            return _tokamax(rows, weights, sizes)
        typical = min(typical_rows or num_rows, num_rows)
        size = min(block or _default_block(typical, num_groups), num_rows)
        known = 0 if typical_rows is None else cost.grouped_rows(typical, num_groups, size) // size
        plan = _Plan(size, cost.grouped_rows(num_rows, num_groups, size) // size, known)
        return _blocked(plan, rows, weights, sizes)


def _default_block(num_rows: int, num_groups: int) -> int:
    wanted = max(num_rows // (_BLOCKS_A_GROUP * num_groups), 1)
    return min(max(1 << (wanted.bit_length() - 1), 8), 512)


def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _check_operands(rows: jax.Array, weights: jax.Array, group_sizes: Any) -> None:
    shapes = f"rows {rows.shape}, weights {weights.shape} and group_sizes {jnp.shape(group_sizes)}"
    fits = rows.ndim == 2 and weights.ndim == 3 and rows.shape[1] == weights.shape[1] and weights.shape[0] > 0
    if not fits or jnp.shape(group_sizes) != weights.shape[:1]:
        raise problem(
            KERNEL,
            f"multiply {shapes}",
            "they are [R, d], [G, d, f] and [G], with at least one group",
            "give rows and weights of one width d, and one size a group",
        )
    if rows.dtype != weights.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise problem(
            KERNEL,
            f"multiply rows of {rows.dtype} with weights of {weights.dtype}",
            "both are of one floating dtype",
            "cast one of them",
        )
    if not jnp.issubdtype(jnp.asarray(group_sizes).dtype, jnp.integer):
        raise problem(KERNEL, f"take group_sizes of {jnp.asarray(group_sizes).dtype}", "they count rows", "give int32")


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _batched(rows: jax.Array, weights: jax.Array) -> jax.Array:
    parts = rows.reshape(weights.shape[0], -1, rows.shape[1])
    products = jnp.einsum("gcd,gdf->gcf", parts, weights, preferred_element_type=_wide(rows.dtype))
    return products.astype(rows.dtype).reshape(rows.shape[0], weights.shape[2])


# ---------------------------------------------------------------------------------------------------------------------
# The blocked form
# ---------------------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How the rows are cut."""

    block: int
    most: int
    """Blocks there are for any group sizes."""
    known: int
    """Blocks that are run in a loop of known length."""


class _Block(NamedTuple):
    """Rows [start, end) of one group, within the `block` rows from `first` on."""

    group: jax.Array
    is_first: jax.Array
    """Of its group."""
    first: jax.Array
    mask: jax.Array
    """[block, 1]: which of the rows from `first` on it owns."""


def _loop(
    plan: _Plan, sizes: jax.Array, num_rows: int, step: Callable[[_Block, Any], Any], start: tuple[jax.Array, ...]
) -> Any:
    """Runs `step` on every block, in order."""
    ends = jnp.cumsum(sizes)
    blocks = -(-sizes // plan.block)
    ends_in_blocks = jnp.cumsum(blocks)
    used = ends_in_blocks[-1]

    def turn(at: jax.Array, carry: Any) -> Any:
        # Blocks behind the last one are the last group's, and hold no rows.
        group = jnp.minimum(jnp.sum(ends_in_blocks <= at, dtype=jnp.int32), len(sizes) - 1)
        turns_into = at - (ends_in_blocks[group] - blocks[group])
        begin = ends[group] - sizes[group] + turns_into * plan.block
        # The last rows may be fewer than a block: it then begins earlier, and leaves alone what it does not own.
        first = jnp.minimum(begin, num_rows - plan.block)
        row = first + jnp.arange(plan.block)
        mask = ((row >= begin) & (row < ends[group]))[:, None]
        return step(_Block(group, turns_into == 0, first, mask), carry)

    known = min(plan.known, plan.most)
    carry = lax.fori_loop(0, known, turn, tuple(varying_alike((), sizes, *start)[1:]))
    return carry if known == plan.most else lax.fori_loop(known, used, turn, carry)


def _rows_of(x: jax.Array, block: _Block) -> jax.Array:
    """Its rows, zeros where they are another block's."""
    rows = lax.dynamic_slice_in_dim(x, block.first, block.mask.shape[0])
    return jnp.where(block.mask, rows, jnp.zeros_like(rows))


def _products(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """Rows times the weights, contracted over their dim 1 (as they are) or 2 (transposed)."""

    def step(block: _Block, carry: tuple[jax.Array]) -> tuple[jax.Array]:
        (out,) = carry
        weight = lax.dynamic_index_in_dim(weights, block.group, keepdims=False)
        numbers = (((1,), (contracted - 1,)), ((), ()))
        product = lax.dot_general(
            _rows_of(rows, block), weight, numbers, preferred_element_type=_wide(rows.dtype)
        ).astype(rows.dtype)
        before = lax.dynamic_slice_in_dim(out, block.first, plan.block)
        return (lax.dynamic_update_slice_in_dim(out, jnp.where(block.mask, product, before), block.first, 0),)

    out = jnp.zeros((rows.shape[0], weights.shape[3 - contracted]), rows.dtype)
    out, *_ = varying_alike((), out, rows)
    return _loop(plan, sizes, rows.shape[0], step, (out,))[0]


def _weight_grads(plan: _Plan, rows: jax.Array, grads: jax.Array, num_groups: int, sizes: jax.Array) -> jax.Array:
    """[G, d, f]: for each group its rows, transposed, times their cotangents."""
    wide = _wide(rows.dtype)

    def step(block: _Block, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, out = carry
        numbers = (((0,), (0,)), ((), ()))
        term = lax.dot_general(_rows_of(rows, block), _rows_of(grads, block), numbers, preferred_element_type=wide)
        total = jnp.where(block.is_first, jnp.zeros_like(total), total) + term
        # The sum so far; a group's last block leaves the whole. Those behind the last one of all add nothing.
        return total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), block.group, 0)

    shape = (rows.shape[1], grads.shape[1])
    total, out = jnp.zeros(shape, wide), jnp.zeros((num_groups, *shape), rows.dtype)
    total, out, *_ = varying_alike((), total, out, rows)
    return _loop(plan, sizes, rows.shape[0], step, (total, out))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(plan, rows, weights, sizes, 1)


def _blocked_forward(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple:
    return _blocked(plan, rows, weights, sizes), (rows, weights, sizes)


def _blocked_backward(plan: _Plan, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved
    with jax.named_scope(KERNEL):
        d_weights = _weight_grads(plan, rows, grad, weights.shape[0], sizes)
        return _products(plan, grad, weights, sizes, 2), d_weights, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


# ---------------------------------------------------------------------------------------------------------------------
# tokamax's kernels
# ---------------------------------------------------------------------------------------------------------------------


def _ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    import tokamax  # type: ignore[import-not-found,unused-ignore]

    # Of these names the package takes the first that can do it; its own fallback to XLA's masked product is not there.
    return tokamax.ragged_dot(rows, weights, sizes, implementation=("mosaic", "triton"))


@jax.custom_vjp
def _tokamax(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _only_owned(_ragged_dot(rows, weights, sizes), sizes)


def _tokamax_backward(saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved
    with jax.named_scope(KERNEL):
        _, pull = jax.vjp(lambda r, w: _ragged_dot(r, w, sizes), _only_owned(rows, sizes), weights)
        d_rows, d_weights = pull(_only_owned(grad, sizes))
        # What a kernel does not visit it need not have filled: neither rows of nobody nor weights of empty groups.
        d_weights = jnp.where((sizes > 0)[:, None, None], d_weights, jnp.zeros_like(d_weights))
        return _only_owned(d_rows, sizes), d_weights, None


def _only_owned(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeros in the rows of no group."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.zeros_like(x))


_tokamax.defvjp(
    lambda rows, weights, sizes: (_tokamax(rows, weights, sizes), (rows, weights, sizes)), _tokamax_backward
)
