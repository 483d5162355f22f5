"""Model FLOPs, counted before compilation and independent of mesh, padding and recomputation.

The forward pass counts the matmuls in the loss function's jaxpr. Training counts three times that, because the backward
pass has two matmuls for each forward matmul, for the gradients of input and weight (Chowdhery et al. 2022, "PaLM:
Scaling Language Modeling with Pathways", appendix B). Element-wise work is not counted.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from meshpar.collectives import flash
from meshpar.collectives.attention import window_shares
from meshpar.inspect.timeline.program_work import causal_share
from meshpar.inspect.traced_collectives import num_trips
from meshpar.layers.losses import scalar
from meshpar.moe import tokamax_kernels as kernels
from meshpar.parallel.batch import StepBatch, as_given
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.types import PyTree
from meshpar.training.gradients.selection import describe
from meshpar.training.independence import traced_alone
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep

TRAINING = 3
"""Ratio of training FLOPs to forward FLOPs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Model FLOPs per step, over the global batch."""

    forward: int
    """FLOPs of the matmuls of the forward pass."""
    step: int
    """FLOPs of the training step: three times the forward pass."""
    notes: tuple[str, ...] = ()
    """Operations that could not be counted, without duplicates."""


def model_flops(step: TrainStep, state: TrainState, batch: PyTree) -> ModelFlops:
    """Return the model FLOPs of a training step."""
    notes: dict[str, None] = {}
    micro_steps = describe(state.setup, step.options).micro_steps
    forward = micro_steps * matmul_flops(forward_of(step, state, batch), notes)
    return ModelFlops(forward=forward, step=TRAINING * forward, notes=tuple(notes))


def attention_flops(jaxpr: core.Jaxpr) -> int:
    """Return the FLOPs of library attention kernels in a jaxpr. Backward kernels count as much as forward kernels."""
    return matmul_flops(jaxpr, products={})


class ActivationProducts(NamedTuple):
    """Matmuls of two activations, such as queries and keys, outside library kernels."""

    flops: int
    nbytes: int
    """Bytes of operands and results."""
    largest_bytes: int
    """Bytes of the largest result."""


def activation_products(jaxpr: core.Jaxpr, num_examples: int) -> ActivationProducts:
    """Return the matmuls in whose operands the size of a batch dim is a multiple of `num_examples`."""

    def has_examples(dot: Any) -> bool:
        _, (batch_dims, _) = dot.params["dimension_numbers"]
        return any(dot.invars[0].aval.shape[dim] % num_examples == 0 for dim in batch_dims)

    def nbytes(*arrays: Any) -> int:
        return sum(x.aval.size * x.aval.dtype.itemsize for x in arrays)

    dots = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "dot_general")
    return ActivationProducts(
        flops=_dots(jaxpr, lambda dot: has_examples(dot) * _dot_flops(dot)),
        nbytes=_dots(jaxpr, lambda dot: has_examples(dot) * nbytes(*dot.invars, *dot.outvars)),
        largest_bytes=max((nbytes(*dot.outvars) for dot in dots if has_examples(dot)), default=0),
    )


def wide_flops(jaxpr: core.Jaxpr, itemsize: int) -> int:
    """Return the FLOPs of matmuls with an operand of more than `itemsize` bytes per element."""

    def is_wide(dot: Any) -> bool:
        return max(x.aval.dtype.itemsize for x in dot.invars) > itemsize

    return _dots(jaxpr, lambda dot: is_wide(dot) * _dot_flops(dot))


def _dots(jaxpr: core.Jaxpr, count: Callable[[Any], int]) -> int:
    """Return the sum of `count` over all matmuls, without library kernels."""
    return matmul_flops(jaxpr, products={"dot_general": count}) - attention_flops(jaxpr)


def matmul_flops(
    jaxpr: core.Jaxpr,
    notes: dict[str, None] | None = None,
    *,
    products: Mapping[str, Callable[[Any], int]] | None = None,
) -> int:
    """Return the FLOPs of the matmuls and convolutions of a jaxpr, including loops, branches and calls.

    Scans are multiplied by their length, and `while` loops by a constant trip count or 1. A `cond` that selects the
    attention window of a layer counts as the mean over layers. Only the most expensive branch of any other `cond`
    counts, and the body of a `shard_map` counts once for every device that it is manual over. `products` maps
    primitives to functions that return their FLOPs, by default all primitives with matmuls.
    """
    notes, products = {} if notes is None else notes, _PRODUCTS if products is None else products
    return sum(_equation_flops(equation, notes, products) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, notes: dict[str, None], products: Mapping[str, Callable[[Any], int]]) -> int:
    name, params = equation.primitive.name, equation.params
    count = products.get(name)
    if count is not None:
        return count(equation)
    if "dot_product_attention" in name:  # cuDNN's library call, whose matmuls are not in the jaxpr
        return _attention_flops(equation)
    if name in _RULES and (product := flash.product_flops(str(equation.source_info.name_stack))) is not None:
        return 2 * product  # tokamax's, whose kernels have no jaxpr
    inner = [matmul_flops(jaxpr, notes, products=products) for jaxpr in core.jaxprs_in_params(params)]
    if name == "cond":
        shares = window_shares(str(equation.source_info.name_stack))
        return max(inner, default=0) if shares is None else round(sum(map(operator.mul, shares, inner)))
    runs: int | None = 1
    if name == "while":
        runs = num_trips(equation)
    elif name == "scan":
        runs = int(params["length"])
    elif name == "shard_map":
        runs = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if runs is None and any(inner):
        notes["a `while` loop with matmuls is counted once, because its trip count is unknown"] = None
    if name == "pallas_call":
        return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int)) * sum(inner)
    if not inner and name in _OPAQUE:
        notes[f"`{name}` is opaque: its FLOPs are not counted"] = None
    return (1 if runs is None else runs) * sum(inner)


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * out.size * math.prod(lhs.shape[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> int:
    """Return the FLOPs of a convolution: an output element sums over the window and its group's input features."""
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    out_features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * out.size * kernel.size // max(out_features, 1)


def _ragged_dot_flops(equation: Any) -> int:
    """Return the FLOPs of a ragged dot: rows `[M, K]` are multiplied by the `[K, N]` of their group only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, out, group_sizes = equation.invars[0].aval, equation.outvars[0].aval, equation.invars[2].aval
    # If the contracted dim is ragged, each group contracts its own rows, so the groups together contract all rows.
    products = group_sizes.shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else 1
    return 2 * out.size * math.prod(lhs.shape[dim] for dim in contracted) // products


def _attention_flops(equation: Any) -> int:
    """Return the FLOPs of an attention kernel: `4 B H T S D`, less for a causal mask or a window.

    B examples, H query heads, T queries, S keys, D elements per head. Scores and weighted values take half each.
    """
    query, key = (invar.aval.shape for invar in equation.invars[:2])
    is_BTHD = equation.params["layout"] == 0  # cuDNN's numbering: 0 is [B, T, H, D], 1 is [B, H, T, D]
    num_keys = key[1] if is_BTHD else key[2]
    flops, params = 4 * math.prod(query) * num_keys, equation.params
    is_causal = "CAUSAL" in str(params.get("mask_type"))
    return causal_share(flops, num_keys, params.get("sliding_window_length")) if is_causal else flops


def _grouped_flops(equation: Any) -> int:
    """Return the FLOPs of tokamax's grouped matmul, or of a gradient. Weights or their gradient are `[G, d, f]`."""
    arrays = (equation.invars[1].aval, equation.outvars[0].aval)
    _, d, f = next(x.shape for x in arrays if x.ndim == 3)
    return 2 * equation.params["typical_rows"] * d * f


_PRODUCTS: Mapping[str, Callable[[Any], int]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _convolution_flops,
    "ragged_dot_general": _ragged_dot_flops,
    kernels.GROUPED_MATMUL: _grouped_flops,
}
_RULES = ("custom_vjp_call", "remat_opt")
"""Primitives that call a function with a custom gradient, before and after differentiation."""
_OPAQUE = frozenset({"custom_call", "ffi_call", "triton_kernel_call", "pure_callback", "io_callback"})


def forward_of(step: TrainStep, state: TrainState, batch: PyTree) -> core.Jaxpr:
    """Return the forward pass of a micro-step, traced for a single device. `batch` is the global batch."""
    return traced_alone(step.loss_fn, step.options, state, micro_batch(step, state, batch), scalar).jaxpr


def micro_batch(step: TrainStep, state: TrainState, batch: PyTree) -> PyTree:
    """Return the shapes of the global batch of a micro-step."""
    setup, count = state.setup, describe(state.setup, step.options).micro_steps
    batch = StepBatch.of(batch, setup.batch_sharding, setup.strategy.activations)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype), batch.examples)
    return as_given(dataclasses.replace(batch, examples=shapes))
