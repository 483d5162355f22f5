"""Grouped matmuls: rows sorted by group, each group times its own weight.

R  rows    G  groups    d  input size    f  output or hidden size    e  output size of SwiGLU
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshpar.collectives.wire import varying_alike
from meshpar.hardware import cost_model as cost
from meshpar.hardware.compile_target import GPUS, KernelChoice, target
from meshpar.hardware.grouped_kernels import GroupedKernels, grouped_kernels, has_triton
from meshpar.layers.fp8_dot import FORWARD, GRADIENT, Scaled, scaled
from meshpar.layers.precision import BY_ROW, check_narrow, check_wide, matmul_here
from meshpar.layers.remat import MATMUL
from meshpar.layers.scan import LoraWeight
from meshpar.moe import tokamax_kernels as kernels
from meshpar.moe.argument_checks import check_array
from meshpar.moe.assignment_order import late_zeros
from meshpar.sharding.context import TraceOption
from meshpar.sharding.errors import check_cases, check_choice, check_positive_int

KERNEL = "grouped_matmul"
SWIGLU = "grouped_swiglu"
IMPLEMENTATIONS = ("auto", "blocked", "tokamax")
PAST_TYPICAL = "past_typical_rows"
"""Named scope of loops over rows past `typical_rows`. Predictions assume that they have no iterations."""
COUNTED = TraceOption[bool]("counted_grouped_matmuls")
"""True if FLOPs are counted in the trace: "auto" is then `blocked`, whose FLOPs are those of the actual rows."""


def swiglu(gate: Array, up: Array) -> Array:
    """Return `silu(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer")."""
    return jax.nn.silu(gate) * up


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """Return `(up + 1) * gate * sigmoid(1.702 gate)` with gate at most 7 and up from -7 to 7 (GPT-OSS, OpenAI 2025)."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}
"""Functions of the products with gate and up, by name."""
Biases: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Biases of gate and up, `[G, f]`, and of down, `[G, e]`."""


def choose_grouped_matmul(platform: str | None = None, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> KernelChoice:
    """Return the implementation that `implementation="auto"` uses for rows of a dtype.

    Args:
      platform: `cpu`, `gpu`, ...; None for the platform that the program is traced for (the cluster of `explain`, or
        JAX's default backend).
      dtype: dtype of rows and weights.
    """
    # Checked first: `target` initializes JAX's backends, which needs 300 MB of memory, also in a planner.
    if COUNTED.value:
        why = "the FLOPs of this trace are counted"
    elif not has_tokamax():
        why = "tokamax, which has a GPU kernel, is not installed"
    elif (platform := platform or target()[0]) not in GPUS:
        why = f"tokamax has kernels for GPUs, and not for {platform}"
    elif jnp.dtype(dtype).itemsize > 2:
        why = f"tokamax's kernels compute 16-bit products, which are not exact enough for {jnp.dtype(dtype)}"
    elif (chosen := grouped_kernels()) is None:
        generation = ".".join(map(str, target()[1] or ()))
        why = f"tokamax has kernels for all gradients on Hopper, and not for compute capability {generation}"
    else:
        why = f"tokamax is installed and has kernels for this GPU; {chosen}"
        if not has_triton():
            why += "; without the packages triton and jax-triton, the gradient of weights has a slower kernel"
        return KernelChoice(implementation="tokamax", why=why)
    return KernelChoice(implementation="blocked", why=why)


def grouped_matmul(
    rows: Float[Array, "R d"],
    weights: Float[Array, "G d f"],
    group_sizes: Int[Array | np.ndarray, " G"],
    *,
    implementation: str = "auto",
    block: int | None = None,
    typical_rows: int | None = None,
) -> Float[Array, "R f"]:
    """Multiply each row by the weight of the row's group.

        [R, d] . [G, d, f] -> [R, f];  group 0 is the first `group_sizes[0]` rows, then group 1, ...

    The plain reference is `jax.lax.ragged_dot`, which needs arrays of the size rows x groups on CPUs.

    Rows past the sum of `group_sizes` may have any value. Their results are zero, and they have no gradient. Products
    and the gradients of weights are summed in float32 or wider.

    The blocked implementation divides each group into blocks of rows and loops over them. It computes at most
    `cost_model.grouped_rows(R, G, block)` < R + G block rows, for the result and for each of the two gradients. The
    number of blocks is only known at run time. A first loop therefore has a static length, the largest number of blocks
    of `typical_rows` rows, so that its FLOPs can be counted. A second loop computes the remaining blocks.

    If `group_sizes` is a NumPy array whose elements are all R / G (buffers of fixed capacity), the result
    is a single batched matmul.

    With 8-bit matmuls (`Precision.matmul`), the blocked implementation uses rows in e4m3 and cotangents in e5m2 with a
    scale per row, and weights in e4m3 with a scale per group. Scales follow from the local maximum, which differs
    between the shards of a sharded width. Gradients of weights, which sum over rows, are not quantized, so results do
    not depend on the order of rows. "fp8-rowwise" uses a scale per column of a weight and cotangents in e4m3, like
    `meshpar.layers.fp8_dot.rowwise_fp8_dot_general`.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (section 5). For
    8 bits: pytorch/ao, torchao/float8, recipe "rowwise_with_gw_hp", 2025.

    Args:
      rows: sorted by group.
      weights: a matrix per group, in the dtype of the rows.
      group_sizes: rows per group. Their sum is at most R.
      implementation: `blocked`, `tokamax` (GPU kernel of an optional package), or `auto`, as chosen by
        `choose_grouped_matmul`.
      block: rows per block. None for a quarter of the mean group size, as a power of two from 8 to 4096.
      typical_rows: usual sum of `group_sizes`, if it is less than R.

    Raises:
      ValueError: shapes or dtypes do not fit together; the implementation does not exist or tokamax is not installed.

    Example:
      >>> rows, weights = jnp.ones((5, 2)), jnp.stack([jnp.ones((2, 3)), 2 * jnp.ones((2, 3))])
      >>> mp.moe.grouped_matmul(rows, weights, jnp.array([2, 3]))[:, 0].tolist()
      [2.0, 2.0, 4.0, 4.0, 4.0]
    """
    _check_operands(rows, weights, group_sizes)
    return _multiply(rows, weights, group_sizes, _Options.of(rows, implementation, block, typical_rows))


class _Options(NamedTuple):
    """Checked options of a grouped matmul."""

    implementation: str
    fp8_recipe: str | None
    """Value of `Precision.matmul`."""
    block: int | None
    typical_rows: int | None
    activation: str

    @staticmethod
    def of(
        rows: jax.Array, implementation: str, block: int | None, typical_rows: int | None, activation: str = "swiglu"
    ) -> _Options:
        check_choice(KERNEL, "the implementation of the matmul", IMPLEMENTATIONS, implementation=implementation)
        check_choice(SWIGLU, "the function of the products with gate and up", [*ACTIVATIONS], activation=activation)
        numbers = {"block": block, "typical_rows": typical_rows}
        check_positive_int(KERNEL, "a number of rows", **{k: v for k, v in numbers.items() if v is not None})
        if implementation == "tokamax":
            fix = "run `pip install tokamax`, or use implementation='blocked'"
            case = not has_tokamax(), "the package tokamax is not installed", fix
            check_cases(KERNEL, "use implementation='tokamax'", "missing-package", case)
            check_wide(KERNEL, "matmuls of experts", "use implementation='blocked'")
        if (fp8_recipe := matmul_here()) is not None:
            check_narrow(fp8_recipe, rows.dtype)
            implementation = "blocked"
        elif implementation == "auto":
            implementation = choose_grouped_matmul(dtype=rows.dtype).implementation
        return _Options(implementation, fp8_recipe, block, typical_rows, activation)


def _multiply(rows: jax.Array, weights: jax.Array, sizes: Any, options: _Options) -> jax.Array:
    num_rows, num_groups = rows.shape[0], weights.shape[0]
    if num_rows == 0:
        return jnp.zeros((0, weights.shape[2]), rows.dtype)
    with jax.named_scope(KERNEL):
        if _is_even(sizes, num_rows) and options.fp8_recipe is None:
            rows, weights = varying_alike((), rows, weights)
            return _even(rows.reshape(num_groups, -1, rows.shape[1]), weights).reshape(num_rows, weights.shape[2])
        rows, weights, sizes = varying_alike((), rows, weights, jnp.asarray(sizes, jnp.int32))
        if options.implementation == "tokamax":
            chosen = grouped_kernels()
            case = chosen is None, "tokamax has no kernel for weight gradients on this GPU", kernels.REFUSED[2]
            check_cases(kernels.REFUSED[0], "multiply on this GPU", "unsupported-feature", case)
            assert chosen is not None
            return _tokamax(chosen, options.typical_rows or num_rows, rows, weights, sizes)
        return _blocked(_Plan.of(num_rows, num_groups, options), rows, weights, sizes)


def grouped_swiglu(
    rows: Float[Array, "R d"],
    gate: Float[Array, "G d f"],
    up: Float[Array, "G d f"],
    down: Float[Array, "G f e"],
    group_sizes: Int[Array | np.ndarray, " G"],
    *,
    biases: Biases | None = None,
    activation: str = "swiglu",
    implementation: str = "auto",
    block: int | None = None,
    typical_rows: int | None = None,
) -> Float[Array, "R e"]:
    """Apply SwiGLU to each row with the weights of the row's group. The reference is three calls of `grouped_matmul`.

        (silu(x . gate) * (x . up)) . down:   [R, d] -> [R, f] twice -> [R, e]

    The blocked implementation is a single loop over blocks, so the hidden activations of only one block exist at a
    time. For the backward pass the first loop of `grouped_matmul` saves the products with gate and up, and its second
    loop recomputes them. Without `typical_rows` all are saved. Forward and backward take nine matmuls per saved row and
    eleven per recomputed row. With tokamax, windows of 5/4 of `typical_rows` rows replace the blocks: the first window
    is saved, and a loop computes further windows if they have rows. Each window rounds its gradient of the weights.

    For `jax.checkpoint`, the saved products have the name `meshpar.layers.remat.MATMUL`.

    Args:
      rows: sorted by group.
      gate, up, down: a matrix per group, in the dtype of the rows, or a low-rank pair (`LoraWeight`).
      biases: biases of gate, up and down, added to the products of the rows of a group.
      activation: "swiglu", or "clamped_swiglu" for `clamped_swiglu` instead of `silu(gate) * up`.
      group_sizes, implementation, block, typical_rows: see `grouped_matmul`.

    Raises:
      ValueError: as in `grouped_matmul`.
    """
    num_rows = rows.shape[0]
    hidden = jax.ShapeDtypeStruct((num_rows, up.shape[2]), up.dtype)
    for operand, weight in ((rows, gate), (rows, up), (hidden, down)):
        _check_operands(operand, weight, group_sizes)
    case = gate.shape != up.shape, "the products with both are multiplied elementwise", "use the same shape for both"
    check_cases(SWIGLU, f"use gate {gate.shape} with up {up.shape}", "wrong-shape", case)
    options = _Options.of(rows, implementation, block, typical_rows, activation)
    shapes = [up.shape[:3:2]] * 2 + [down.shape[:3:2]]
    case = biases is not None and [x.shape for x in biases] != shapes, f"shapes must be {shapes}", "pass such arrays"
    check_cases(SWIGLU, f"use biases {[x.shape for x in biases or ()]}", "wrong-shape", case)
    is_even = _is_even(group_sizes, num_rows) and options.fp8_recipe is None
    is_adapted = any(isinstance(weight, LoraWeight) for weight in (gate, up, down))
    weights: tuple[_Linear, ...] = tuple(zip((gate, up, down), biases or [None] * 3, strict=True))
    window = _window_rows(num_rows, typical_rows)
    is_windowed = options.implementation == "tokamax" and window < num_rows and not is_even
    if not is_windowed and (options.implementation == "tokamax" or num_rows == 0 or is_even or is_adapted):
        gate_and_up = _named(_hidden_of(options, rows, weights[:2], group_sizes))
        return _output_of(options, gate_and_up, weights[2], group_sizes)
    leaves, tree = jax.tree.flatten(weights)
    rows, sizes, *leaves = varying_alike((), rows, jnp.asarray(group_sizes, jnp.int32), *leaves)
    weights = jax.tree.unflatten(tree, leaves)
    if is_windowed:
        return _windowed_swiglu(_Windows(window, options), rows, weights, sizes)
    with jax.named_scope(SWIGLU):
        return _blocked_swiglu(_Plan.of(num_rows, gate.shape[0], options), rows, weights, sizes)


def _linear_of(options: _Options, rows: jax.Array, weight: _Linear, sizes: Any) -> jax.Array:
    """Multiply rows by the matrix or low-rank pair of their group, and add its bias."""
    matrix, bias = weight
    if isinstance(matrix, LoraWeight):
        y, unquantized = _multiply(rows, matrix.weight, sizes, options), options._replace(fp8_recipe=None)
        low_rank = _multiply(_multiply(rows, matrix.a, sizes, unquantized), matrix.b, sizes, unquantized)
        y = y + (matrix.scale * low_rank).astype(rows.dtype)
    else:
        y = _multiply(rows, matrix, sizes, options)
    return y if bias is None else y + _bias_of_rows(bias, sizes, y)


def _hidden_of(options: _Options, rows: jax.Array, weights: tuple[_Linear, ...], sizes: Any) -> tuple[jax.Array, ...]:
    """Return the products with gate and up."""
    return tuple(_linear_of(options, rows, weight, sizes) for weight in weights)


def _output_of(options: _Options, hidden: tuple[jax.Array, ...], down: _Linear, sizes: Any) -> jax.Array:
    return _linear_of(options, ACTIVATIONS[options.activation](*hidden), down, sizes)


def _named(products: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # Policies of `jax.checkpoint` recognize plain matmuls only, and not kernels or loops.
    return tuple(checkpoint_name(x, MATMUL) for x in products)


def _is_even(group_sizes: Any, num_rows: int) -> bool:
    """Return whether all groups are statically known to have the same size and to cover all rows."""
    return isinstance(group_sizes, np.ndarray) and bool((group_sizes * len(group_sizes) == num_rows).all())


def _bias_of_rows(bias: jax.Array, sizes: Any, like: jax.Array) -> jax.Array:
    """Return the bias of each row's group, in the dtype of `like`, and 0 for unassigned rows."""
    groups = jnp.searchsorted(jnp.cumsum(jnp.asarray(sizes, jnp.int32)), jnp.arange(len(like)), side="right")
    wide = bias.astype(_sum_dtype(bias))  # the gradient is the sum over the rows of a group
    return wide.at[groups].get(mode="fill", fill_value=0).astype(like.dtype)


def has_tokamax() -> bool:
    """Return whether tokamax is installed."""
    return importlib.util.find_spec("tokamax") is not None


def _check_operands(rows: jax.Array | jax.ShapeDtypeStruct, weights: jax.Array, group_sizes: Any) -> None:
    check_array(KERNEL, "rows", rows, "R d")
    check_array(KERNEL, "weights", weights, "G d f")
    shape, dtype = jnp.shape(group_sizes), jnp.asarray(group_sizes).dtype
    is_wrong = rows.shape[1] != weights.shape[1] or 0 in weights.shape or shape != weights.shape[:1]
    requested = f"multiply {rows.dtype}{rows.shape} rows, {weights.dtype}{weights.shape} weights and {shape} sizes"
    reason, fix = "they must be [R, d], [G, d, f] and [G], with d, f and G of at least 1", "pass such arrays"
    check_cases(KERNEL, requested, "wrong-shape", (is_wrong, reason, fix))
    is_integer, same_dtype = jnp.issubdtype(dtype, jnp.integer), "rows and weights must have the same dtype"
    check_cases(
        KERNEL, requested, "wrong-dtype",
        (rows.dtype != weights.dtype, same_dtype, "cast the rows or the weights"),
        (not is_integer, f"group_sizes are numbers of rows, and not {dtype}", "pass int32"),
    )  # fmt: skip
    if isinstance(group_sizes, np.ndarray):
        is_wrong = group_sizes.sum() > rows.shape[0] or (group_sizes < 0).any()
        case = is_wrong, f"there are {rows.shape[0]} rows", "pass non-negative sizes with a smaller sum"
        check_cases(KERNEL, f"use groups of {group_sizes.tolist()} rows", "out-of-range", case)


def _sum_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


@jax.custom_vjp
def _even(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply groups of equal size: [G, c, d] . [G, d, f] -> [G, c, f].

    jax's gradient of a sum in float32 would multiply in float32, without tensor cores.
    """
    return jnp.einsum("gcd,gdf->gcf", rows, weights, preferred_element_type=_sum_dtype(rows)).astype(rows.dtype)


def _even_backward(saved: tuple[jax.Array, jax.Array], grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, weights = saved
    d_rows = jnp.einsum("gcf,gdf->gcd", grads, weights, preferred_element_type=_sum_dtype(rows))
    d_weights = jnp.einsum("gcd,gcf->gdf", rows, grads, preferred_element_type=_sum_dtype(weights))
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype)


_even.defvjp(lambda rows, weights: (_even(rows, weights), (rows, weights)), _even_backward)


# ---- Blocked implementation ------------------------------------------------------------------------------------------


_Weights: TypeAlias = tuple[jax.Array | Scaled, ...]
"""Weights of all groups, `[G, d, f]` each."""


class _Plan(NamedTuple):
    """Static description of the loop over blocks."""

    block: int
    max_blocks: int
    """Largest number of blocks for any group sizes."""
    static_blocks: int
    """Blocks in the loop of static length, whose activations are saved for the backward pass. If 0, all are saved."""
    fp8_recipe: str | None
    activation: str

    @staticmethod
    def of(num_rows: int, num_groups: int, options: _Options) -> _Plan:
        typical = min(options.typical_rows or num_rows, num_rows)
        size = min(options.block or cost.grouped_block(typical, num_groups), num_rows)
        max_blocks, typical_blocks = (cost.grouped_rows(rows, num_groups, size) // size for rows in (num_rows, typical))
        static_blocks = 0 if options.typical_rows is None else min(typical_blocks, max_blocks)
        return _Plan(size, max_blocks, static_blocks, options.fp8_recipe, options.activation)

    def quantize(self, *weights: jax.Array) -> _Weights:
        """Return the weights in the number format of the matmuls."""
        if self.fp8_recipe is None:
            return weights
        dims = (1,) if self.fp8_recipe == BY_ROW else (1, 2)
        return tuple(scaled(weight, FORWARD, dims=dims) for weight in weights)


class _Block(NamedTuple):
    """The rows of one group among the `block` rows that start at `first`."""

    group: jax.Array
    is_first: jax.Array
    """True for the first block of the group."""
    first: jax.Array
    mask: jax.Array
    """[block, 1]: True for rows that belong to the block."""


_Step: TypeAlias = Callable[[_Block, Any], Any]


def _loop(
    plan: _Plan, sizes: jax.Array, num_rows: int, step: _Step, init: tuple[jax.Array, ...],
    unsaved_step: _Step | None = None,
) -> Any:  # fmt: skip
    """Return the carry after `step` has run on all blocks in order.

    `unsaved_step` replaces `step` for blocks beyond `plan.static_blocks`, whose activations are not saved.
    """
    ends = jnp.cumsum(sizes)
    num_blocks = -(-sizes // plan.block)
    block_ends = jnp.cumsum(num_blocks)

    def run(step: _Step, index: jax.Array, carry: Any) -> Any:
        # Blocks past the end belong to the last group and begin at or after its end.
        group = jnp.minimum(jnp.sum(block_ends <= index, dtype=jnp.int32), len(sizes) - 1)
        offset = (index - (block_ends[group] - num_blocks[group])) * plan.block
        begin = ends[group] - sizes[group] + offset
        # A block at the end starts earlier and masks the rows before `begin`.
        first = jnp.minimum(begin, num_rows - plan.block)
        row = first + jnp.arange(plan.block)
        mask = ((row >= begin) & (row < ends[group]))[:, None]
        return step(_Block(group, offset == 0, first, mask), carry)

    def repeat(begin: int, end: int | jax.Array, step: _Step, carry: Any) -> Any:
        # `fori_loop` with static bounds is a scan, and `jax.checkpoint` would save its carry after each iteration.
        body = functools.partial(run, step)
        return lax.while_loop(lambda x: x[0] < end, lambda x: (x[0] + 1, body(*x)), (jnp.int32(begin), carry))[1]

    carry = repeat(0, plan.static_blocks, step, tuple(varying_alike((), sizes, *init)[1:]))
    if plan.static_blocks == plan.max_blocks:
        return carry
    if not plan.static_blocks:
        return repeat(0, block_ends[-1], step, carry)
    with jax.named_scope(PAST_TYPICAL):
        return repeat(plan.static_blocks, block_ends[-1], unsaved_step or step, carry)


def _read(x: jax.Array, block: _Block) -> jax.Array:
    rows = lax.dynamic_slice_in_dim(x, block.first, block.mask.shape[0])
    return jnp.where(block.mask, rows, jnp.zeros_like(rows))


def _write(x: jax.Array, block: _Block, new: jax.Array) -> jax.Array:
    old = lax.dynamic_slice_in_dim(x, block.first, block.mask.shape[0])
    return lax.dynamic_update_slice_in_dim(x, jnp.where(block.mask, new.astype(x.dtype), old), block.first, 0)


def _dot(x: jax.Array, y: jax.Array | Scaled, contracted: tuple[int, int]) -> jax.Array:
    """Contract a dim of each operand, in float32 or wider."""
    dims, dtype = (((contracted[0],), (contracted[1],)), ((), ())), _sum_dtype(x)
    if not isinstance(y, Scaled):
        return lax.dot_general(x, y, dims, preferred_element_type=dtype)
    # The forward pass contracts dim 0 of a weight, and the gradient of the rows dim 1.
    is_by_column, is_backward = y.scale.shape[1] > 1, bool(contracted[1])
    if is_by_column and is_backward:
        x, y = x.astype(jnp.float32) * y.scale, Scaled(y.values, jnp.ones_like(y.scale[:, :1]))
    rows = scaled(x, GRADIENT if is_backward and not is_by_column else FORWARD, dims=(contracted[0],))
    product = lax.dot_general(rows.values, y.values, dims, preferred_element_type=dtype)
    return product * (rows.scale * y.scale)


def _weights_of(weights: Any, block: _Block) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, block.group, keepdims=False), weights)


def _accumulate(total: jax.Array, out: jax.Array, block: _Block, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add a term to the sum of a group and write the sum to `out`. The last block of a group writes the full sum."""
    total = jnp.where(block.is_first, jnp.zeros_like(total), total) + term
    return total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), block.group, 0)


def _products(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """Multiply rows by weights, contracting dim 1 or dim 2 (the transpose) of the weights."""
    quantized = plan.quantize(weights)

    def step(block: _Block, carry: tuple[jax.Array]) -> tuple[jax.Array]:
        (weight,) = _weights_of(quantized, block)
        return (_write(carry[0], block, _dot(_read(rows, block), weight, (1, contracted - 1))),)

    out = late_zeros((rows.shape[0], weights.shape[3 - contracted]), rows, sizes)
    return _loop(plan, sizes, rows.shape[0], step, (out,))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(plan: _Plan, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(plan, rows, weights, sizes, 1)


def _blocked_backward(plan: _Plan, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved

    def step(block: _Block, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _accumulate(*carry, block, _dot(_read(rows, block), _read(grad, block), (0, 0)))

    with jax.named_scope(KERNEL):
        total, out = jnp.zeros(weights.shape[1:], _sum_dtype(rows)), jnp.zeros(weights.shape, rows.dtype)
        total, out, *_ = varying_alike((), total, out, rows)
        d_weights = _loop(plan, sizes, rows.shape[0], step, (total, out))[1]
        return _products(plan, grad, weights, sizes, 2), d_weights, None


_blocked.defvjp(lambda *args: (_blocked(*args), args[1:]), _blocked_backward)


# ---- Blocked SwiGLU --------------------------------------------------------------------------------------------------


_Linear: TypeAlias = tuple[Any, jax.Array | None]
"""Matrix and optional bias."""


def _linear(x: jax.Array, weight: _Linear) -> jax.Array:
    product = _dot(x, weight[0], (1, 0))
    return product if weight[1] is None else product + weight[1]


def _hidden(x: jax.Array, gate: _Linear, up: _Linear) -> tuple[jax.Array, jax.Array]:
    return _linear(x, gate).astype(x.dtype), _linear(x, up).astype(x.dtype)


def _quantized(plan: _Plan, weights: tuple[_Linear, ...]) -> tuple[_Linear, ...]:
    matrices, biases = zip(*weights, strict=True)
    return tuple(zip(plan.quantize(*matrices), biases, strict=True))


def _swiglu(
    plan: _Plan, rows: jax.Array, weights: tuple[_Linear, ...], sizes: jax.Array, *, saves: bool
) -> tuple[jax.Array, ...]:
    """Return the output and, if `saves`, the products with gate and up of the saved blocks."""
    quantized, activation = _quantized(plan, weights), ACTIVATIONS[plan.activation]

    def step(block: _Block, carry: tuple[jax.Array, ...], *, saves: bool) -> tuple[jax.Array, ...]:
        gate, up, down = _weights_of(quantized, block)
        hidden = _hidden(_read(rows, block), gate, up)
        saved = (_write(x, block, y) if saves else x for x, y in zip(carry[1:], hidden, strict=False))
        return _write(carry[0], block, _linear(activation(*hidden), down)), *saved

    (gate, _), _, (down, _) = weights
    out = late_zeros((rows.shape[0], down.shape[2]), rows, sizes)
    saving_step, plain_step = (functools.partial(step, saves=saves) for saves in (True, False))
    if not saves:
        return _loop(plan, sizes, rows.shape[0], plain_step, (out,))
    num_saved = (plan.static_blocks or plan.max_blocks) * plan.block
    shape = (min(num_saved, rows.shape[0]), gate.shape[2])
    init = (out, *(late_zeros(shape, rows, sizes) for _ in range(2)))
    return _loop(plan, sizes, rows.shape[0], saving_step, init, unsaved_step=plain_step)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_swiglu(plan: _Plan, rows: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
    return _swiglu(plan, rows, weights, sizes, saves=False)[0]


def _blocked_swiglu_forward(plan: _Plan, rows: jax.Array, weights: Any, sizes: jax.Array) -> tuple:
    out, *hidden = _swiglu(plan, rows, weights, sizes, saves=True)
    return out, (rows, weights, sizes, _named(tuple(hidden)))


def _blocked_swiglu_backward(plan: _Plan, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes, saved_hidden = saved
    quantized, flat = _quantized(plan, weights), jax.tree.leaves(weights)

    def gradients(x: jax.Array, dy: jax.Array, weight: _Linear) -> _Linear:
        return _dot(x, dy, (0, 0)), None if weight[1] is None else jnp.sum(dy, 0, dtype=_sum_dtype(dy))

    def step(block: _Block, carry: Any, *, is_saved: bool) -> Any:
        d_rows, totals, grads = carry[0], carry[1 : len(flat) + 1], carry[len(flat) + 1 :]
        (gate, up, down), x, dy = _weights_of(quantized, block), _read(rows, block), _read(grad, block)
        hidden = tuple(_read(h, block) for h in saved_hidden) if is_saved else _hidden(x, gate, up)
        active, pull = jax.vjp(ACTIVATIONS[plan.activation], *hidden)
        d_gate, d_up = pull(_dot(dy, down[0], (1, 1)).astype(active.dtype))
        d_rows = _write(d_rows, block, _dot(d_gate, gate[0], (1, 1)) + _dot(d_up, up[0], (1, 1)))
        terms = jax.tree.leaves((gradients(x, d_gate, gate), gradients(x, d_up, up), gradients(active, dy, down)))
        pairs = [_accumulate(total, out, block, term) for total, out, term in zip(totals, grads, terms, strict=True)]
        return d_rows, *(total for total, _ in pairs), *(out for _, out in pairs)

    with jax.named_scope(SWIGLU):
        init = (
            late_zeros(rows.shape, rows, sizes),
            *(jnp.zeros(weight.shape[1:], _sum_dtype(rows)) for weight in flat),
            *(jnp.zeros(weight.shape, rows.dtype) for weight in flat),
        )
        init = tuple(varying_alike((), *init, rows)[:-1])
        saved_step, unsaved_step = (functools.partial(step, is_saved=is_saved) for is_saved in (True, False))
        d_rows, *sums = _loop(plan, sizes, rows.shape[0], saved_step, init, unsaved_step=unsaved_step)
        return d_rows, jax.tree.unflatten(jax.tree.structure(weights), sums[len(flat) :]), None


_blocked_swiglu.defvjp(_blocked_swiglu_forward, _blocked_swiglu_backward)


# ---- SwiGLU in windows -----------------------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """Static description of windows of consecutive rows. The last window overlaps the window before it."""

    size: int
    options: _Options

    def hidden(self, rows: jax.Array, weights: tuple[_Linear, ...], sizes: jax.Array) -> tuple[jax.Array, ...]:
        return _hidden_of(self.options, rows, weights, sizes)

    def output(self, hidden: tuple[jax.Array, ...], down: _Linear, sizes: jax.Array) -> jax.Array:
        return _output_of(self.options, hidden, down, sizes)

    def group_sizes(self, sizes: jax.Array, begin: jax.Array | int) -> jax.Array:
        """Return the rows of each group in the window of rows that starts at `begin`."""
        ends = jnp.clip(jnp.cumsum(sizes) - begin, 0, self.size)
        return jnp.diff(ends, prepend=0)

    def loop(
        self, sizes: jax.Array, num_rows: int, step: Callable[[jax.Array, jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Run `step(begin, first_new, carry)` for all windows with rows except the first.

        The first `first_new` rows of a window belong to the window before it.
        """

        def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            index, carry = state
            begin = jnp.minimum(index * self.size, num_rows - self.size)
            return index + 1, step(begin, index * self.size - begin, carry)

        total = jnp.sum(sizes, dtype=jnp.int32)
        first, *leaves = varying_alike((), jnp.int32(1), *jax.tree.leaves(carry), total)[:-1]
        carry = jax.tree.unflatten(jax.tree.structure(carry), leaves)
        with jax.named_scope(PAST_TYPICAL):
            return lax.while_loop(lambda state: state[0] * self.size < total, body, (first, carry))[1]


def _window_rows(num_rows: int, typical_rows: int | None) -> int:
    """Return the number of rows of a window. Ranks rarely have a higher load."""
    return num_rows if typical_rows is None else min(math.ceil(cost.WINDOW_LOAD * typical_rows), num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _windowed_swiglu(windows: _Windows, rows: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
    return _windowed_swiglu_forward(windows, rows, weights, sizes)[0]


def _windowed_swiglu_forward(windows: _Windows, rows: jax.Array, weights: Any, sizes: jax.Array) -> tuple:
    def hidden_of(begin: jax.Array | int) -> tuple[jax.Array, ...]:
        x = lax.dynamic_slice_in_dim(rows, begin, windows.size)
        return windows.hidden(x, weights[:2], windows.group_sizes(sizes, begin))

    def write(begin: jax.Array | int, hidden: tuple[jax.Array, ...], out: jax.Array) -> jax.Array:
        y = windows.output(hidden, weights[2], windows.group_sizes(sizes, begin))
        return lax.dynamic_update_slice_in_dim(out, y, begin, 0)

    hidden = hidden_of(0)
    out = write(0, hidden, late_zeros((len(rows), weights[2][0].shape[2]), rows, sizes))
    out = windows.loop(sizes, len(rows), lambda begin, _, out: write(begin, hidden_of(begin), out), out)
    return out, (rows, weights, sizes, _named(hidden))


def _windowed_swiglu_backward(windows: _Windows, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes, saved_hidden = saved

    def gradients(begin: jax.Array | int, dy: jax.Array, hidden: tuple[jax.Array, ...] | None) -> tuple[Any, Any]:
        x, local = lax.dynamic_slice_in_dim(rows, begin, windows.size), windows.group_sizes(sizes, begin)
        # Products that are not used are not computed: XLA deletes them.
        computed, pull_hidden = jax.vjp(lambda x, weights: windows.hidden(x, weights, local), x, weights[:2])
        _, pull_output = jax.vjp(lambda h, down: windows.output(h, down, local), hidden or computed, weights[2])
        d_hidden, d_down = pull_output(dy)
        dx, d_inward = pull_hidden(d_hidden)
        return dx, (*d_inward, d_down)

    def step(begin: jax.Array, first_new: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        d_rows, d_weights = carry
        is_new = (jnp.arange(windows.size) >= first_new)[:, None]
        dy = lax.dynamic_slice_in_dim(grad, begin, windows.size)
        dx, more = gradients(begin, jnp.where(is_new, dy, jnp.zeros_like(dy)), None)
        dx = jnp.where(is_new, dx, lax.dynamic_slice_in_dim(d_rows, begin, windows.size))
        d_rows = lax.dynamic_update_slice_in_dim(d_rows, dx, begin, 0)
        return d_rows, jax.tree.map(jnp.add, d_weights, more)

    dx, d_weights = gradients(0, grad[: windows.size], saved_hidden)
    d_rows = lax.dynamic_update_slice_in_dim(late_zeros(rows.shape, rows, sizes), dx, 0, 0)
    return *windows.loop(sizes, len(rows), step, (d_rows, d_weights)), None


_windowed_swiglu.defvjp(_windowed_swiglu_forward, _windowed_swiglu_backward)


# ---- tokamax ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tokamax(chosen: GroupedKernels, typical_rows: int, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Array:
    y = kernels.product(rows, weights, sizes, kernel=chosen.product, typical_rows=typical_rows)
    return kernels.zero_unassigned(y, sizes)


def _tokamax_backward(chosen: GroupedKernels, typical_rows: int, saved: tuple, grad: jax.Array) -> tuple:
    rows, weights, sizes = saved
    with jax.named_scope(KERNEL):
        d_rows = kernels.rows_gradient(grad, weights, sizes, kernel=chosen.rows, typical_rows=typical_rows)
        d_weights = kernels.weights_gradient(rows, grad, sizes, kernel=chosen.weights, typical_rows=typical_rows)
        return kernels.zero_unassigned(d_rows, sizes), d_weights, None


_tokamax.defvjp(lambda *args: (_tokamax(*args), args[2:]), _tokamax_backward)
