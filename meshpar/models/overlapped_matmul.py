"""Matmuls overlapped with sequence-parallel communication (`tensor_matmul="overlapped"`).

    norm ─► [T sharded] ═► query, key, value ─► attention ─► out ═► [T sharded]     ═► matmul with communication
    norm ─► [T sharded] ═► gate, up ──────────► swiglu ────► down ═► [T sharded]

With sequence parallelism, XLA emits an all-gather before and a reduce-scatter after these matmuls. Here each pair of
collective and matmul is a kernel that is manual over the tensor axis. XLA partitions the other axes.

Shape suffixes as in `meshpar.models.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from meshpar.collectives import all_gather_matmul, matmul_reduce_scatter
from meshpar.layers.precision import check_wide, weight_grad_dtype
from meshpar.layers.remat import MATMUL
from meshpar.models.architecture import Architecture
from meshpar.sharding.context import ambient, spec_of
from meshpar.sharding.errors import problem
from meshpar.sharding.manual_regions import per_device
from meshpar.sharding.types import axis_sizes, spec_axes


def overlaps(cfg: Architecture, x_BTE: Array, *, has_cache: bool) -> bool:
    """Return whether a layer uses overlapped matmuls.

    They are used if the config selects them and the sequence is sharded over more than one device. With a cache,
    ordinary matmuls are used, because a single position cannot be sharded.
    """
    if cfg.tensor_matmul == "xla" or has_cache:
        return False
    context = ambient()
    if context is not None and context.mesh.size == 1:
        return False
    check_wide('TransformerConfig(tensor_matmul="overlapped")', "overlapped matmuls", 'use tensor_matmul="xla"')
    axis = _axis(x_BTE)
    assert context is not None
    return axis_sizes(context.mesh)[axis] > 1


def gathered_matmul(h_BTE: Array, kernels: Sequence[Array], names: Sequence[str]) -> list[Array]:
    """Multiply h by each kernel `[E, ...]`, overlapped with the all-gather of h over its sequence."""
    axis = _axis(h_BTE)
    shared = jnp.result_type(h_BTE, *kernels)
    h_BTE, *kernels = (x.astype(shared) for x in (h_BTE, *kernels))
    for kernel, name in zip(kernels, names, strict=True):
        _check_split((*h_BTE.shape[:2], *kernel.shape[1:]), name, axis)

    def product(h_BTE: Array, kernels: list[Array]) -> tuple[Array, ...]:
        dtype = weight_grad_dtype(h_BTE.dtype)
        return tuple(all_gather_matmul(h_BTE, tuple(kernels), axis=axis, dim=1, weight_grad_dtype=dtype))

    split = per_device(product, (P(None, axis), [P(None, axis)] * len(kernels)), (P(None, None, axis),) * len(kernels))
    return [checkpoint_name(y, MATMUL) for y in split(h_BTE, list(kernels))]


def matmul_scattered(h_BT: Array, kernel: Array, name: str) -> Array:
    """Multiply h `[B, T, ...]` by a kernel `[..., E]`, overlapped with the reduce-scatter over the sequence."""
    shared = jnp.result_type(h_BT, kernel)
    h_BT, kernel = h_BT.astype(shared), kernel.astype(shared)
    axis = _axis(jax.ShapeDtypeStruct((*h_BT.shape[:2], kernel.shape[-1]), h_BT.dtype))
    _check_split(h_BT.shape, name, axis)
    product = functools.partial(
        matmul_reduce_scatter, axis=axis, dim=1, weight_grad_dtype=weight_grad_dtype(h_BT.dtype)
    )
    y_BTE = per_device(product, (P(None, None, axis), P(axis)), P(None, axis))(h_BT, kernel)
    return checkpoint_name(y_BTE, MATMUL)


def _axis(x_BTE: Array | jax.ShapeDtypeStruct) -> str:
    """Return the mesh axis that shards the sequence between blocks but not inside them."""
    between = spec_axes(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[1])
    inside = spec_axes(spec_of(x_BTE, "batch", "seq", "act_embed")[1])
    if inside or len(between) != 1:
        where = 'TransformerConfig(tensor_matmul="overlapped")'
        reason = f"the rules shard `norm_seq` over {between or 'no axis'} and `seq` over {inside or 'no axis'}"
        fix = 'use mp.tensor_parallel(sequence=True) without context_parallel(), or tensor_matmul="xla"'
        raise problem(where, "gather and scatter the sequence", reason, fix, code="conflict")
    return between[0]


def _check_split(shape: tuple[int, ...], name: str, axis: str) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    axes = spec_axes(spec_of(x, None, "seq", name, *[None] * (len(shape) - 3))[2])
    if axes != (axis,):
        reason = f"the current rules shard it over {' × '.join(f'`{a}`' for a in axes) or 'no axis'}"
        fix = f'map it to "{axis}" with a size that divides {shape[2]}, or use tensor_matmul="xla"'
        where, requested = f"`{name}` (size {shape[2]})", f"overlap its matmul with communication over `{axis}`"
        raise problem(where, requested, reason, fix, code="conflict")
