"""Grouped matmuls: rows sorted by group, each times its own group's weights, and nothing else computed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import check_choice, checked_count
from meshpar.collectives.wire import varying_alike
from meshpar.hardware import cost_model as cost
from meshpar.layers.fp8_dot import FORWARD, GRADIENT, Scaled, scaled
from meshpar.layers.precision import BY_ROW, check_narrow, check_wide, matmul_here
from meshpar.layers.scan import Adapted
from meshpar.moe import tokamax_kernels as kernels
from meshpar.moe.argument_checks import check_array
from meshpar.moe.assignment_order import blocks_of, late_zeros
from meshpar.moe.transport_choice import GPUS, KernelChoice, target
from meshpar.sharding.types import problem

KERNEL = "grouped_matmul"
SWIGLU = "grouped_swiglu"
IMPLEMENTATIONS = ("auto", "blocked", "tokamax")
HOPPER = 9
"""Compute capability."""


def choose_grouped_matmul(platform: str | None = None, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> KernelChoice:
    """What `implementation="auto"` takes for rows of a dtype.

    Args:
      platform: `cpu`, `gpu`, ...; None: the one that the program is traced for (`explain`'s cluster), else jax's own.
      dtype: of rows and weights.
    """
    if not has_tokamax():  # asked first: whoever plans asks jax for no device, which loads its plugins, 300 MB
        return KernelChoice(implementation="blocked", why="tokamax, whose kernel is for GPUs, is not installed")
    platform = platform or target()[0]
    if platform not in GPUS:
        return KernelChoice(implementation="blocked", why=f"tokamax has kernels for GPUs, none for {platform}")
    if jnp.dtype(dtype).itemsize > 2:
        why = f"products of {jnp.dtype(dtype)} are to be as exact as that; tokamax's kernels are made for 16 bits"
        return KernelChoice(implementation="blocked", why=why)
    if not has_kernels():
        generation = ".".join(map(str, target()[1] or ()))
        why = f"tokamax has a kernel for every gradient on Hopper, not for compute capability {generation}"
        return KernelChoice(implementation="blocked", why=why)
    return KernelChoice(implementation="tokamax", why="tokamax is installed, and its kernels are for GPUs")


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
    `cost_model.grouped_rows(R, G, block)` rows at the most, that is fewer than R + G block, forward and for each of
    the two gradients. The loop ends with the last row there is: a compiler does not know its length. So many blocks as
    `typical_rows` take at the most are run in a loop of known length, which is what FLOPs are counted by.

    Group sizes that are NumPy's and all R / G (buffers of fixed capacity) make it one batched matmul.

    Where the step asks for it (`Precision.matmul`) the blocked form's operands are 8-bit floats: rows e4m3 and their
    cotangents e5m2 over one scale a row, weights e4m3 over one scale a group, each by its largest number here: a rank
    that holds a part of the width takes that of its part. The weights' gradients, which sum over rows, stay as wide as
    they are: so nothing depends on how rows lie. "fp8-rowwise" gives each column of a weight a scale, and cotangents
    e4m3, as `meshpar.layers.fp8_dot.float8_rows_dot` does.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (section 5). Of
    8 bits: pytorch/ao, torchao/float8, recipe "rowwise_with_gw_hp", 2025.

    Args:
      rows: sorted by group.
      weights: one a group, of the rows' dtype.
      group_sizes: may sum to less than R, not to more.
      implementation: `blocked`, `tokamax` (its GPU kernel; an optional package), or `auto`: `choose_grouped_matmul`
        says which and why.
      block: rows of a block; None: a quarter of a group of mean size, a power of two from 8 to 4096.
      typical_rows: what `group_sizes` sum to as a rule, where that is less than R; None: nothing is known.

    Raises:
      ValueError: shapes or dtypes that do not go together; no such implementation, or tokamax is not there.
    """
    _check_operands(rows, weights, group_sizes)
    how = _checked_how(implementation, block, typical_rows, rows)
    return _multiplied(rows, weights, sizes=group_sizes, how=how, block=block, typical=typical_rows)


def _multiplied(
    rows: jax.Array, weights: jax.Array, *, sizes: Any, how: tuple[str, str | None], block: int | None,
    typical: int | None,
) -> jax.Array:  # fmt: skip
    """`grouped_matmul` by an implementation, and how in 8 bits."""
    num_rows, num_groups = rows.shape[0], weights.shape[0]
    implementation, narrow = how
    if num_rows == 0:
        return jnp.zeros((0, weights.shape[2]), rows.dtype)
    with jax.named_scope(KERNEL):
        if _is_even(sizes, num_rows) and narrow is None:
            return _batched(rows, weights)
        rows, weights, sizes = varying_alike((), rows, weights, jnp.asarray(sizes, jnp.int32))
        if implementation == "tokamax":
            return _tokamax(typical or num_rows, rows, weights, sizes)
        return _blocked(_Plan.of(num_rows, num_groups, block, typical, narrow), rows, weights, sizes)


def grouped_swiglu(
    rows: Float[Array, "R d"],
    gate: Float[Array, "G d f"],
    up: Float[Array, "G d f"],
    down: Float[Array, "G f e"],
    group_sizes: Int[Array | np.ndarray, " G"],
    *,
    implementation: str = "auto",
    block: int | None = None,
    typical_rows: int | None = None,
) -> Float[Array, "R e"]:
    """SwiGLU of every row with its group's weights: three times `grouped_matmul`, and equal to that.

        silu(x . gate) * (x . up) . down:   [R, d] -> [R, f] twice -> [R, e]

    The blocked form does all of it in one loop over blocks, so that nothing is as wide as `f` but a block: neither made
    nor filled with zeros for rows that are not there. For the gradient it keeps gate's and up's products of as many
    blocks as `typical_rows` take at the most (without them: of all), and makes those of the blocks beyond again: nine
    matmuls a row, forward and backward, and eleven for the latter.

    Args:
      rows: sorted by group.
      gate: one a group, of the rows' dtype, or with low-rank pairs (`Adapted`), which are multiplied by themselves; so
        are `up` and `down`.
      up: likewise.
      down: likewise.
      group_sizes: see `grouped_matmul`; so are all others.

    Raises:
      ValueError: see `grouped_matmul`.
    """
    hidden = jax.ShapeDtypeStruct((rows.shape[0], up.shape[2]), up.dtype)
    for given, one in ((rows, gate), (rows, up), (hidden, down)):
        _check_operands(given, one, group_sizes)
    if gate.shape != up.shape:
        exists = "their products are multiplied, number by number"
        raise problem(SWIGLU, f"use gate {gate.shape} with up {up.shape}", exists, "give both the same shape")
    how, narrow = _checked_how(implementation, block, typical_rows, rows)
    is_apart = how == "tokamax" or rows.shape[0] == 0 or (_is_even(group_sizes, rows.shape[0]) and narrow is None)
    if is_apart or any(isinstance(one, Adapted) for one in (gate, up, down)):

        def matmul(rows: jax.Array, one: jax.Array | Adapted) -> jax.Array:
            plain, of_pair = (
                functools.partial(_multiplied, sizes=group_sizes, how=(how, word), block=block, typical=typical_rows)
                for word in (narrow, None)
            )
            if not isinstance(one, Adapted):
                return plain(rows, one)
            return plain(rows, one.weight) + (one.scale * of_pair(of_pair(rows, one.a), one.b)).astype(rows.dtype)

        return matmul(_activated(matmul(rows, gate), matmul(rows, up)), down)
    with jax.named_scope(SWIGLU):
        sizes = jnp.asarray(group_sizes, jnp.int32)
        rows, gate, up, down, sizes = varying_alike((), rows, gate, up, down, sizes)
        plan = _Plan.of(rows.shape[0], gate.shape[0], block, typical_rows, narrow)
        return _blocked_swiglu(plan, rows, (gate, up, down), sizes)


def _checked_how(
    implementation: str, block: int | None, typical_rows: int | None, rows: jax.Array
) -> tuple[str, str | None]:
    """`blocked` or `tokamax`; and how in 8 bits: a word of `Precision.matmul`."""
    check_choice(KERNEL, "implementation", implementation, IMPLEMENTATIONS)
    if block is not None:
        checked_count(KERNEL, "block", block)
    if typical_rows is not None:
        checked_count(KERNEL, "typical_rows", typical_rows)
    if implementation == "tokamax" and not has_tokamax():
        fix = "install it (`pip install tokamax`), or take implementation='blocked'"
        raise problem(KERNEL, "use implementation='tokamax'", "the package tokamax is not installed", fix)
    if implementation == "tokamax":
        check_wide(KERNEL, "matmuls of experts", "take implementation='blocked'")
    if (word := matmul_here()) is not None:
        check_narrow(word, rows.dtype)
        return "blocked", word
    how = choose_grouped_matmul(dtype=rows.dtype).implementation if implementation == "auto" else implementation
    return how, None


def _is_even(group_sizes: Any, num_rows: int) -> bool:
    """Whether it is known that all groups are of one size, and together all rows."""
    return isinstance(group_sizes, np.ndarray) and bool((group_sizes * len(group_sizes) == num_rows).all())


def _activated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def has_tokamax() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("tokamax") is not None


def has_kernels() -> bool:
    """Whether the package, 0.0.17, has all kernels for what is traced for. Of weights' gradients Blackwell has none."""
    capability = target()[1]
    return capability is None or capability[0] == HOPPER


def _check_operands(rows: jax.Array | jax.ShapeDtypeStruct, weights: jax.Array, group_sizes: Any) -> None:
    for name, array, dims in (("rows", rows, "R d"), ("weights", weights, "G d f")):
        if not hasattr(array, "dtype"):
            check_array(KERNEL, name, array, dims)
    shapes = f"rows {rows.shape}, weights {weights.shape} and group_sizes {jnp.shape(group_sizes)}"
    fits = rows.ndim == 2 and weights.ndim == 3 and rows.shape[1] == weights.shape[1] and 0 not in weights.shape
    if not fits or jnp.shape(group_sizes) != weights.shape[:1]:
        asked, fix = f"multiply {shapes}", "give rows and weights of one width d, and one size a group"
        raise problem(KERNEL, asked, "they are [R, d], [G, d, f] and [G], with at least one group, of some width", fix)
    if rows.dtype != weights.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        asked = f"multiply rows of {rows.dtype} with weights of {weights.dtype}"
        raise problem(KERNEL, asked, "both are of one floating dtype", "cast one of them")
    if not jnp.issubdtype(jnp.asarray(group_sizes).dtype, jnp.integer):
        raise problem(KERNEL, f"take group_sizes of {jnp.asarray(group_sizes).dtype}", "they count rows", "give int32")
    if isinstance(group_sizes, np.ndarray) and (group_sizes.sum() > rows.shape[0] or (group_sizes < 0).any()):
        exists = f"there are {rows.shape[0]} rows, each of one group at the most"
        raise problem(KERNEL, f"have groups of {group_sizes.tolist()} rows", exists, "give sizes that sum to no more")


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _batched(rows: jax.Array, weights: jax.Array) -> jax.Array:
    parts = rows.reshape(weights.shape[0], -1, rows.shape[1])
    products = jnp.einsum("gcd,gdf->gcf", parts, weights, preferred_element_type=_wide(rows.dtype))
    return products.astype(rows.dtype).reshape(rows.shape[0], weights.shape[2])


# ---- The blocked form ------------------------------------------------------------------------------------------------


_Weights: TypeAlias = tuple[jax.Array | Scaled, ...]
"""[G, d, f] each; of SwiGLU gate, up and down."""


class _Plan(NamedTuple):
    """How the rows are cut, and what their products are of."""

    block: int
    most: int
    """Blocks there are for any group sizes."""
    known: int
    """Blocks that are run in a loop of known length."""
    kept: int
    """Blocks of which a backward pass is left what it needs."""
    narrow: str | None
    """How products with weights are of 8-bit floats: a word of `Precision.matmul`."""

    @staticmethod
    def of(num_rows: int, num_groups: int, block: int | None, typical_rows: int | None, narrow: str | None) -> _Plan:
        typical = min(typical_rows or num_rows, num_rows)
        size = min(block or cost.grouped_block(typical, num_groups), num_rows)
        most, taken = (cost.grouped_rows(rows, num_groups, size) // size for rows in (num_rows, typical))
        known = 0 if typical_rows is None else min(taken, most)
        return _Plan(size, most, known, known or most, narrow)

    def rounded(self, *weights: jax.Array) -> _Weights:
        """The weights as products take them."""
        if self.narrow is None:
            return weights
        return tuple(scaled(one, FORWARD, dims=(1,) if self.narrow == BY_ROW else (1, 2)) for one in weights)


class _Block(NamedTuple):
    """Rows [start, end) of one group, within the `block` rows from `first` on."""

    group: jax.Array
    is_first: jax.Array
    """Of its group."""
    first: jax.Array
    mask: jax.Array
    """[block, 1]: which of the rows from `first` on it owns."""


_Step: TypeAlias = Callable[[_Block, Any], Any]


def _loop(
    plan: _Plan, sizes: jax.Array, num_rows: int, step: _Step, start: tuple[jax.Array, ...], beyond: _Step | None = None
) -> Any:
    """Runs `step` on every block, in order; on those beyond the ones that are kept `beyond`, where it is another."""
    ends = jnp.cumsum(sizes)
    used, block_at = blocks_of(sizes, plan.block)

    def turn(step: _Step, at: jax.Array, carry: Any) -> Any:
        group, into = block_at(at)
        begin = ends[group] - sizes[group] + into
        # The last rows may be fewer than a block: it then begins earlier, and leaves alone what it does not own.
        first = jnp.minimum(begin, num_rows - plan.block)
        row = first + jnp.arange(plan.block)
        mask = ((row >= begin) & (row < ends[group]))[:, None]
        return step(_Block(group, into == 0, first, mask), carry)

    carry = tuple(varying_alike((), sizes, *start)[1:])
    carry = _repeated(0, plan.known, functools.partial(turn, step), carry)
    if plan.known == plan.most:
        return carry
    beyond = step if beyond is None or plan.known != plan.kept else beyond
    return _repeated(plan.known, used, functools.partial(turn, beyond), carry)


def _repeated(begin: int, end: int | jax.Array, turn: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop`, but never a scan: of that one `jax.checkpoint` would keep its carry after every turn."""
    return lax.while_loop(lambda x: x[0] < end, lambda x: (x[0] + 1, turn(*x)), (jnp.int32(begin), carry))[1]


def _rows_of(x: jax.Array, block: _Block) -> jax.Array:
    """Its rows, zeros where they are another block's."""
    rows = lax.dynamic_slice_in_dim(x, block.first, block.mask.shape[0])
    return jnp.where(block.mask, rows, jnp.zeros_like(rows))


def _dot(x: jax.Array, y: jax.Array | Scaled, over: tuple[int, int]) -> jax.Array:
    """Contracted over a dim of each, in float32 at the least."""
    numbers, wide = (((over[0],), (over[1],)), ((), ())), _wide(x.dtype)
    if not isinstance(y, Scaled):
        return lax.dot_general(x, y, numbers, preferred_element_type=wide)
    # With a weight as it lies rows are multiplied, with its transpose their cotangents.
    is_by_column, is_backward = y.scale.shape[1] > 1, bool(over[1])
    if is_by_column and is_backward:
        x, y = x.astype(jnp.float32) * y.scale, Scaled(y.values, jnp.ones_like(y.scale[:, :1]))
    rows = scaled(x, GRADIENT if is_backward and not is_by_column else FORWARD, dims=(over[0],))
    product = lax.dot_general(rows.values, y.values, numbers, preferred_element_type=wide)
    return product * (rows.scale * y.scale)


def _written(x: jax.Array, block: _Block, new: jax.Array) -> jax.Array:
    """`x` with the rows that the block owns."""
    before = lax.dynamic_slice_in_dim(x, block.first, block.mask.shape[0])
    return lax.dynamic_update_slice_in_dim(x, jnp.where(block.mask, new.astype(x.dtype), before), block.first, 0)


def _of_group(weights: _Weights, block: _Block) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, block.group, keepdims=False), weights)


def _summed(total: jax.Array, out: jax.Array, block: _Block, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A group's sum so far, and `out` with it: a group's last block leaves the whole, those behind the last one of all
    add nothing."""
    total = jnp.where(block.is_first, jnp.zeros_like(total), total) + term
    return total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), block.group, 0)


def _products(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """Rows times the weights, contracted over their dim 1 (as they are) or 2 (transposed)."""

    used = plan.rounded(weights)

    def step(block: _Block, carry: tuple[jax.Array]) -> tuple[jax.Array]:
        (weight,) = _of_group(used, block)
        return (_written(carry[0], block, _dot(_rows_of(rows, block), weight, (1, contracted - 1))),)

    out = late_zeros((rows.shape[0], weights.shape[3 - contracted]), rows, sizes)
    return _loop(plan, sizes, rows.shape[0], step, (out,))[0]


def _weight_grads(plan: _Plan, rows: jax.Array, grads: jax.Array, num_groups: int, sizes: jax.Array) -> jax.Array:
    """[G, d, f]: for each group its rows, transposed, times their cotangents."""

    def step(block: _Block, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _summed(*carry, block, _dot(_rows_of(rows, block), _rows_of(grads, block), (0, 0)))

    shape = (rows.shape[1], grads.shape[1])
    total, out = jnp.zeros(shape, _wide(rows.dtype)), jnp.zeros((num_groups, *shape), rows.dtype)
    total, out, *_ = varying_alike((), total, out, rows)
    return _loop(plan, sizes, rows.shape[0], step, (total, out))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(plan, rows, weights, sizes, 1)


def _blocked_backward(plan: _Plan, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved
    with jax.named_scope(KERNEL):
        d_weights = _weight_grads(plan, rows, grad, weights.shape[0], sizes)
        return _products(plan, grad, weights, sizes, 2), d_weights, None


_blocked.defvjp(lambda *args: (_blocked(*args), args[1:]), _blocked_backward)


# ---- SwiGLU, block by block ------------------------------------------------------------------------------------------


def _hidden(x: jax.Array, gate: jax.Array | Scaled, up: jax.Array | Scaled) -> tuple[jax.Array, jax.Array]:
    return _dot(x, gate, (1, 0)).astype(x.dtype), _dot(x, up, (1, 0)).astype(x.dtype)


def _swiglu(plan: _Plan, rows: jax.Array, weights: Any, sizes: jax.Array, *, keeps: bool) -> tuple[jax.Array, ...]:
    """(what comes out, and where it `keeps` them rows of gate's products and of up's, as many as kept blocks have)."""
    used = plan.rounded(*weights)

    def step(block: _Block, carry: tuple[jax.Array, ...], *, keeps: bool) -> tuple[jax.Array, ...]:
        gate, up, down = _of_group(used, block)
        hidden = _hidden(_rows_of(rows, block), gate, up)
        kept = (_written(x, block, y) if keeps else x for x, y in zip(carry[1:], hidden, strict=False))
        return _written(carry[0], block, _dot(_activated(*hidden), down, (1, 0))), *kept

    out = late_zeros((rows.shape[0], weights[2].shape[2]), rows, sizes)
    keeping, plain = (functools.partial(step, keeps=keeps) for keeps in (True, False))
    if not keeps:
        return _loop(plan, sizes, rows.shape[0], plain, (out,))
    room = (min(plan.kept * plan.block, rows.shape[0]), weights[0].shape[2])
    start = (out, *(late_zeros(room, rows, sizes) for _ in range(2)))
    return _loop(plan, sizes, rows.shape[0], keeping, start, beyond=plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_swiglu(plan: _Plan, rows: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
    return _swiglu(plan, rows, weights, sizes, keeps=False)[0]


def _blocked_swiglu_forward(plan: _Plan, rows: jax.Array, weights: Any, sizes: jax.Array) -> tuple:
    out, *kept = _swiglu(plan, rows, weights, sizes, keeps=True)
    # `jax.checkpoint` never asks its policy about what a loop makes, but runs it again; about what has a name it asks.
    rows, *kept = (checkpoint_name(one, SWIGLU) for one in (rows, *kept))
    return out, (rows, weights, sizes, kept)


def _blocked_swiglu_backward(plan: _Plan, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes, kept = saved
    used = plan.rounded(*weights)

    def step(block: _Block, carry: Any, *, is_kept: bool) -> Any:
        d_rows, totals, grads = carry[0], carry[1:4], carry[4:]
        (gate, up, down), x, dy = _of_group(used, block), _rows_of(rows, block), _rows_of(grad, block)
        if is_kept:
            hidden = tuple(_rows_of(one, block) for one in kept)
        else:
            hidden = _hidden(x, gate, up)
        active, pull = jax.vjp(_activated, *hidden)
        d_gate, d_up = pull(_dot(dy, down, (1, 1)).astype(active.dtype))
        d_rows = _written(d_rows, block, _dot(d_gate, gate, (1, 1)) + _dot(d_up, up, (1, 1)))
        terms = _dot(x, d_gate, (0, 0)), _dot(x, d_up, (0, 0)), _dot(active, dy, (0, 0))
        both = [_summed(total, out, block, term) for total, out, term in zip(totals, grads, terms, strict=True)]
        return d_rows, *(total for total, _ in both), *(out for _, out in both)

    with jax.named_scope(SWIGLU):
        wide = _wide(rows.dtype)
        start = (
            late_zeros(rows.shape, rows, sizes),
            *(jnp.zeros(weight.shape[1:], wide) for weight in weights),
            *(jnp.zeros(weight.shape, rows.dtype) for weight in weights),
        )
        start = tuple(varying_alike((), *start, rows)[:-1])
        with_kept, without = (functools.partial(step, is_kept=is_kept) for is_kept in (True, False))
        found = _loop(plan, sizes, rows.shape[0], with_kept, start, beyond=without)
        return found[0], tuple(found[4:]), None


_blocked_swiglu.defvjp(_blocked_swiglu_forward, _blocked_swiglu_backward)


# ---- tokamax's kernels -----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokamax(typical: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _only_owned(kernels.product(rows, weights, sizes, typical_rows=typical), sizes)


def _tokamax_forward(typical: int, *given: jax.Array) -> tuple[jax.Array, tuple]:
    return _tokamax(typical, *given), given


def _tokamax_backward(typical: int, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved
    with jax.named_scope(KERNEL):
        given = _only_owned(rows, sizes), weights, sizes, _only_owned(grad, sizes)
        d_rows, d_weights = kernels.gradients(*given, typical_rows=typical)
        # What a kernel does not visit it need not have filled: neither unassigned rows nor weights of empty groups.
        d_weights = jnp.where((sizes > 0)[:, None, None], d_weights, jnp.zeros_like(d_weights))
        return _only_owned(d_rows, sizes), d_weights, None


def _only_owned(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeros in the rows of no group."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.zeros_like(x))


_tokamax.defvjp(_tokamax_forward, _tokamax_backward)
