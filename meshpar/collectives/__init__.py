"""Collective kernels as short loops of messages between neighbours, for use inside `jax.shard_map`.

    kernel_checks.py   checks of arguments
    wire.py            send, split, join
    point_to_point.py  shift, broadcast, reduce, scatter, gather, all_to_all
    ring.py, tree.py   all_gather, reduce_scatter, and the algorithms of all_reduce
    reduction.py       all_reduce, bucketed_all_reduce
    hierarchical.py    kernels in two levels, inside nodes and across nodes
    matmul.py          all_gather_matmul, matmul_reduce_scatter
    quantized.py       8-bit messages: encode ─► XLA's collective ─► decode, sum
    attention.py       blockwise_attention and ring_attention
    zigzag_order.py    the balanced order of positions for ring_attention: zigzag, to_zigzag, ...
    cudnn.py           cuDNN's attention as the tile kernel of ring_attention
    flash.py           tokamax's attention on a device
    reference.py       plain global-view references in jax.numpy

A kernel maps the local array of a rank to its local result. For `shard_map` all results vary over the axis, even if
they are equal on all ranks, so `out_specs` must name the axis unless `check_vma=False`.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.collectives import cudnn, flash, reference
    from meshpar.collectives.attention import TileKernel, blockwise_attention, ring_attention
    from meshpar.collectives.hierarchical import hierarchical_all_reduce, hierarchical_all_to_all
    from meshpar.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
    from meshpar.collectives.point_to_point import all_to_all, broadcast, gather, reduce, scatter, shift
    from meshpar.collectives.quantized import (
        dequantize,
        quantize,
        quantized_all_gather,
        quantized_all_reduce,
        quantized_reduce_scatter,
    )
    from meshpar.collectives.reduction import all_reduce, bucketed_all_reduce
    from meshpar.collectives.ring import all_gather, reduce_scatter
    from meshpar.collectives.zigzag_order import from_zigzag, to_zigzag, unzigzag, zigzag
    from meshpar.hardware.algorithm_choice import Choice, choose

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Choice", "TileKernel", "all_gather", "all_gather_matmul", "all_reduce", "all_to_all", "blockwise_attention",
    "broadcast", "bucketed_all_reduce", "choose", "cudnn", "dequantize", "flash",
    "from_zigzag", "gather", "hierarchical_all_reduce", "hierarchical_all_to_all",
    "matmul_reduce_scatter", "quantize", "quantized_all_gather", "quantized_all_reduce", "quantized_reduce_scatter",
    "reduce", "reduce_scatter", "reference", "ring_attention", "scatter", "shift", "to_zigzag", "unzigzag", "zigzag",
]  # fmt: skip
