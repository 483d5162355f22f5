"""A block's matmuls with their messages hidden behind them: `TransformerConfig(tensor_matmul="overlapped")`.

    norm ─► [T split] ═► query, key, value ─► attention ─► out ═► [T split]       ═► rows travel while others multiply
    norm ─► [T split] ═► gate, up ──────────► swiglu ────► down ═► [T split]

What sequence parallelism leaves to the compiler as an all-gather before a matmul and a reduce-scatter behind one is
here one kernel each, per device over the axis that splits them. All other axes stay XLA's.

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from meshpar.collectives import all_gather_matmul, matmul_reduce_scatter
from meshpar.layers.precision import check_wide, weight_grad_dtype
from meshpar.layers.remat import MATMUL
from meshpar.models import layers
from meshpar.models.config import TransformerConfig
from meshpar.sharding.context import ambient, spec_of
from meshpar.sharding.manual_regions import per_device
from meshpar.sharding.types import axis_sizes, problem, spec_axes


def overlaps(cfg: TransformerConfig, x_BTE: Float[Array, "B T E"], *, has_cache: bool) -> bool:
    """Whether the matmuls of a block on x are this module's: where the config says so and there is anything to hide.

    On one device, or with one rank on the axis that splits the sequence between blocks, there is not. With a cache they
    are plain matmuls too: one new position cannot be split.

    Raises:
      ValueError: the rules in force do not split the sequence between blocks, or split it inside them, too.
    """
    if cfg.tensor_matmul == "xla" or has_cache:
        return False
    here = ambient()
    if here is not None and here.mesh.size == 1:
        return False
    check_wide('TransformerConfig(tensor_matmul="overlapped")', "matmuls with messages", 'use tensor_matmul="xla"')
    axis = _axis(x_BTE)
    assert here is not None
    return axis_sizes(here.mesh)[axis] > 1


def block_input(h_BTE: Float[Array, "B T E"], *, overlapped: bool) -> Float[Array, "B T E"]:
    """A norm's output as the block's first matmuls take it: still split where they gather it."""
    return layers.residual(h_BTE) if overlapped else layers.block_input(h_BTE)


def gathered_matmul(
    h_BTE: Float[Array, "B T E"], kernels: Sequence[Float[Array, "E ..."]], names: Sequence[str]
) -> list[Float[Array, "B T ..."]]:
    """h times each of the weights, whose second dim the axis splits, under these names of activations."""
    axis = _axis(h_BTE)
    h_BTE, *kernels = _one_dtype(h_BTE, *kernels)
    for kernel, name in zip(kernels, names, strict=True):
        _check_split((*h_BTE.shape[:2], *kernel.shape[1:]), name, axis)

    def product(h_BTE: Array, kernels: list[Array]) -> tuple[Array, ...]:
        dtype = weight_grad_dtype(h_BTE.dtype)
        return tuple(all_gather_matmul(h_BTE, tuple(kernels), axis=axis, dim=1, weight_grad_dtype=dtype))

    split = per_device(product, (P(None, axis), [P(None, axis)] * len(kernels)), (P(None, None, axis),) * len(kernels))
    return [checkpoint_name(y, MATMUL) for y in split(h_BTE, list(kernels))]


def matmul_scattered(h_BT: Float[Array, "B T ..."], kernel: Float[Array, "... E"], name: str) -> Float[Array, "B T E"]:
    """h times a weight, both split along the dim of this name, in the layout of the residual stream."""
    h_BT, kernel = _one_dtype(h_BT, kernel)
    axis = _axis(jax.ShapeDtypeStruct((*h_BT.shape[:2], kernel.shape[-1]), h_BT.dtype))
    _check_split(h_BT.shape, name, axis)
    product = functools.partial(
        matmul_reduce_scatter, axis=axis, dim=1, weight_grad_dtype=weight_grad_dtype(h_BT.dtype)
    )
    y_BTE = per_device(product, (P(None, None, axis), P(axis)), P(None, axis))(h_BT, kernel)
    return checkpoint_name(y_BTE, MATMUL)


def _axis(x_BTE: Array | jax.ShapeDtypeStruct) -> str:
    """The one mesh axis that splits the sequence between blocks and not inside them."""
    between = spec_axes(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[1])
    inside = spec_axes(spec_of(x_BTE, "batch", "seq", "act_embed")[1])
    if inside:
        raise problem(
            'TransformerConfig(tensor_matmul="overlapped")',
            f"gather a sequence that is split over {' × '.join(f'`{axis}`' for axis in inside)} inside the blocks, too",
            "it gathers whole sequences only",
            'use tensor_matmul="xla", or leave out context_parallel()',
        )
    if len(between) != 1:
        where = 'TransformerConfig(tensor_matmul="overlapped")'
        asked = "gather and scatter the sequence around the matmuls"
        exists = f"the rules in force split `norm_seq` over {' × '.join(f'`{axis}`' for axis in between) or 'nothing'}"
        raise problem(where, asked, exists, 'use mp.tensor_parallel(sequence=True), or tensor_matmul="xla"')
    return between[0]


def _check_split(shape: tuple[int, ...], name: str, axis: str) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = spec_of(x, None, "seq", name, *[None] * (len(shape) - 3))[2]
    if spec_axes(found) != (axis,):
        exists = f"the rules in force split it over {' × '.join(f'`{one}`' for one in spec_axes(found)) or 'nothing'}"
        fix = f'map it to "{axis}", with no more ranks than it divides by, or use tensor_matmul="xla"'
        raise problem(f"`{name}` (size {shape[2]})", f"overlap its matmul with messages over `{axis}`", exists, fix)


def _one_dtype(*arrays: Array) -> list[Array]:
    dtype = jnp.result_type(*arrays)
    return [x.astype(dtype) for x in arrays]
