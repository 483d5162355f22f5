"""cuDNN's flash attention as the tile kernel of `ring_attention`.

The backward pass of a tile needs the log-sum-exp and the output over all keys, not only the keys of the tile. The
public `jax.nn.dot_product_attention` cannot take them, so this module calls the primitives below it.

Shape suffixes: B batch, H query heads, K key/value heads, s positions of a tile, D head width.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshpar.collectives.attention import TileKernel
from meshpar.collectives.kernel_checks import attention_errors


@functools.cache
def missing_cudnn() -> str:
    """Return why cuDNN cannot be used on this machine, also to compile for GPUs elsewhere; empty if it can."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    try:
        cudnn.check_cudnn_version()
    except RuntimeError:
        return "cuDNN is not installed: pip install 'meshpar[cuda12]', or [cudnn] to compile for GPUs without one"
    return ""


@contextlib.contextmanager
def cudnn_errors(*arrays: Array) -> Iterator[None]:
    """Raise a `MeshparError` if cuDNN is not installed or does not support these arrays."""
    install = "if cuDNN is missing, pip install 'meshpar[cuda12]' (or [cudnn], to compile for GPUs without one)"
    device = jax.sharding.get_abstract_mesh().abstract_device
    with attention_errors("cudnn", install, *arrays):
        if device is not None and device.platform == "cpu":
            raise RuntimeError("the mesh has CPU devices")
        yield


def tile_forward(q_BHsD: Array, k_BKsD: Array, v_BKsD: Array, *, scale: float, causal: bool) -> tuple[Array, Array]:
    """Compute attention within a tile `[B, H, s, D]`, and the log-sum-exp of the scaled scores, `[B, H, s]` in float32.

    The reference is the plain tile in `attention.py`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    with cudnn_errors(q_BHsD, k_BKsD, v_BKsD):
        mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        options: dict[str, Any] = {"scale": scale, "mask_type": mask, "qkv_layout": "BNTH"}
        o_BHsD, lse_BHs = cudnn.dot_product_attention(q_BHsD, k_BKsD, v_BKsD, return_residual=True, **options)
    return o_BHsD, lse_BHs


def tile_backward(
    q_BHsD: Array,
    k_BKsD: Array,
    v_BKsD: Array,
    o_BHsD: Array,
    lse_BHs: Array,
    do_BHsD: Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Return the contribution of a tile to the gradients of q, k and v. `o` and `lse` are computed over all keys."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    options: dict[str, Any] = {"scale": scale, "mask_type": mask, "layout": cudnn.AttentionLayout.BNTH.value}
    options |= {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "sliding_window_length": None}
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_rule).parameters:  # jax 0.12 has it
        options["score_mod"] = None
    unused = [jnp.zeros(0, q_BHsD.dtype)] * 7  # bias, lengths and offsets of queries and keys, page tables
    args = (q_BHsD, k_BKsD, v_BKsD, *unused, lse_BHs, o_BHsD, do_BHsD)
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_p_wrapper.bind(*args, **options)
    return dq, dk, dv


TILES = TileKernel(tile_forward, tile_backward)
"""cuDNN's attention as a kernel for `ring_attention`. It needs bfloat16 or float16, an NVIDIA GPU, and a `shard_map`
that is manual over all axes of the mesh."""
