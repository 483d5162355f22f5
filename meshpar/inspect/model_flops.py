"""FLOPs a model asks for, counted before anything is compiled: whatever the mesh, the padding and the recomputation.

They are those of the matrix products of the forward pass, read from the loss function's jaxpr, and three times that
for training: the backward pass has two products for each one forward, for the input's gradient and for the weight's
(Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B). Element-wise work is not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh

from meshpar.collectives import flash
from meshpar.inspect.timeline.program_work import causal_share
from meshpar.inspect.traced_collectives import num_trips
from meshpar.layers.losses import scalar
from meshpar.layers.precision import cast_floating, numerics
from meshpar.moe import tokamax_kernels as kernels
from meshpar.parallel.batch import as_given, is_replicated
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import tracing
from meshpar.sharding.types import PyTree
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep

TRAINING = 3
"""Products of a training step for each one of the forward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What one step asks for, over the global batch."""

    forward: int
    """Of the matrix products of the forward pass."""
    step: int
    """Of the training step: three times the forward pass."""
    notes: tuple[str, ...] = ()
    """What could not be counted, each once."""


def model_flops(step: TrainStep, state: TrainState, batch: PyTree) -> ModelFlops:
    """The model FLOPs of a training step.

    Args:
      step: made by `train_step`.
      state: arrays or their abstract values.
      batch: the global batch, arrays or their abstract values. With accumulation the loss is counted on the rows of
        one micro-step, as often as there are micro-steps.
    """
    notes: dict[str, None] = {}
    forward = step.options.accumulate * matmul_flops(traced_alone(step, state, batch), notes)
    return ModelFlops(forward=forward, step=TRAINING * forward, notes=tuple(notes))


def attention_flops(jaxpr: core.Jaxpr) -> int:
    """Of `matmul_flops`, those of libraries' kernels for attention, forward and backward alike as of a forward pass."""
    return matmul_flops(jaxpr, products={})


def matmul_flops(
    jaxpr: core.Jaxpr,
    notes: dict[str, None] | None = None,
    *,
    products: Mapping[str, Callable[[Any], int]] | None = None,
) -> int:
    """FLOPs of the matrix products and convolutions of a jaxpr, those in loops, branches and calls included.

    A scan counts as often as it is long, and so does a `while` that counts up to a known number, others once; of a
    `cond` the costliest branch, and the body of a `shard_map` on every device it is manual over.

    Args:
      jaxpr: to count.
      notes: gets a key for everything that cannot be counted rightly.
      products: what is counted beside libraries' kernels for attention, by primitive; None: all that there are.
    """
    notes, products = {} if notes is None else notes, _PRODUCTS if products is None else products
    return sum(_equation_flops(equation, notes, products) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, notes: dict[str, None], products: Mapping[str, Callable[[Any], int]]) -> int:
    name, params = equation.primitive.name, equation.params
    count = products.get(name)
    if count is not None:
        return count(equation)
    if "dot_product_attention" in name:  # cuDNN's: a call into a library, with nothing of it in the jaxpr
        return _attention_flops(equation)
    if name in _RULES and (product := flash.product_flops(str(equation.source_info.name_stack))) is not None:
        return 2 * product  # tokamax's, which has kernels of no jaxpr in there
    inner = [matmul_flops(one, notes, products=products) for one in core.jaxprs_in_params(params)]
    if name == "cond":
        return max(inner, default=0)
    runs = num_trips(equation) if name == "while" else _times(name, params)
    if runs is None and any(inner):
        notes["a `while` with matrix products in it is counted once: nothing tells how often it runs"] = None
    if name == "pallas_call":
        return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int)) * sum(inner)
    if not inner and name in _OPAQUE:
        notes[f"`{name}` cannot be seen into: its FLOPs are missing"] = None
    return (1 if runs is None else runs) * sum(inner)


def _times(name: str, params: Mapping[str, Any]) -> int:
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        sizes = dict(params["mesh"].shape)
        return math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    return 1


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * out.size * math.prod(lhs.shape[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> int:
    """Each output element sums over the kernel's window and input features (a group's share of them)."""
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    out_features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * out.size * kernel.size // max(out_features, 1)


def _ragged_dot_flops(equation: Any) -> int:
    """Rows `[M, K]`, each with the `[K, N]` of its group: a row meets the weights of one group only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, out, group_sizes = equation.invars[0].aval, equation.outvars[0].aval, equation.invars[2].aval
    # Where the contracted dim is ragged there is a product for each group, over its own rows: together over all rows.
    products = group_sizes.shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else 1
    return 2 * out.size * math.prod(lhs.shape[dim] for dim in contracted) // products


def _attention_flops(equation: Any) -> int:
    """Scores and their product with the values: `4 B H T S D`, and of it what a causal mask and a window leave."""
    query, key = (invar.aval.shape for invar in equation.invars[:2])
    is_BTHD = equation.params["layout"] == 0  # cuDNN's numbering: 0 is [B, T, H, D], 1 is [B, H, T, D]
    num_keys = key[1] if is_BTHD else key[2]
    whole, params = 4 * math.prod(query) * num_keys, equation.params
    is_causal = "CAUSAL" in str(params.get("mask_type"))
    return causal_share(whole, num_keys, params.get("sliding_window_length")) if is_causal else whole


def _grouped_flops(equation: Any) -> int:
    """tokamax's: rows there are with weights `[G, d, f]`, once forward and twice for the gradients of both."""
    _, d, f = equation.invars[1].aval.shape
    return 2 * equation.params["typical_rows"] * d * f * (2 if equation.primitive.name == kernels.GRADIENTS else 1)


_PRODUCTS: Mapping[str, Callable[[Any], int]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _convolution_flops,
    "ragged_dot_general": _ragged_dot_flops,
    kernels.PRODUCT: _grouped_flops,
    kernels.GRADIENTS: _grouped_flops,
}
_RULES = ("custom_vjp_call", "remat_opt")
"""What a function with a gradient of its own is, before and after it is differentiated."""
_OPAQUE = frozenset({"custom_call", "ffi_call", "triton_kernel_call", "pure_callback", "io_callback"})


def traced_alone(step: TrainStep, state: TrainState, batch: PyTree) -> core.Jaxpr:
    """The forward pass of one micro-step as one device by itself would compute it.

    Kernels that split work over devices may leave some of it out, as ring attention does behind a causal mask; alone
    they cannot.

    Args:
      step: made by `train_step`.
      state: arrays or their abstract values.
      batch: the global batch, arrays or their abstract values; a micro-step has its share of the rows.
    """
    setup, options = state.setup, step.options
    one = AbstractMesh((1,) * len(setup.mesh.axis_names), setup.mesh.axis_names, axis_types=setup.mesh.axis_types)

    def loss(params: PyTree, extra: PyTree, micro: PyTree, key_data: jax.Array) -> jax.Array:
        with tracing(one, setup.strategy), numerics(options.precision, None):
            model = setup.model.bind(cast_floating(params, options.precision.compute), extra)
            return scalar(step.loss_fn(model, as_given(micro), jax.random.wrap_key_data(key_data))[0])

    micro = jax.tree.map(
        lambda x: x if is_replicated(x) else jax.ShapeDtypeStruct((x.shape[0] // options.accumulate, *x.shape[1:]), x.dtype),
        batch,
        is_leaf=is_replicated,
    )
    params, extra, key = jax.eval_shape(lambda *x: x, *with_auto_types((state.params, state.extra, state.key)))
    return jax.make_jaxpr(loss)(params, extra, micro, key).jaxpr
