"""cuDNN's flash attention as jax has it: what it refuses told, and its tiles for a ring.

jax has the kernel with its log-sum-exp, but no way to run its backward pass by the log-sum-exp and output of more keys
than a tile's, so the primitives below `jax.nn.dot_product_attention` are called.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshpar.collectives.attention import TileKernel
from meshpar.sharding.types import problem


@contextlib.contextmanager
def refusals_told(*arrays: Array) -> Iterator[None]:
    """Raises `ValueError`, with what to do, where cuDNN is missing or does not take these arrays."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    try:
        if device is not None and device.platform == "cpu":
            raise RuntimeError("the mesh is of CPU devices")
        yield
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
        raise problem(
            'attention="cudnn"',
            f"attend with {shapes} on one device",
            str(error).partition("\n")[0].rstrip("."),
            "where cuDNN is missing, pip install 'meshpar[cuda12]' (or [cudnn], to compile for GPUs without one); for "
            'what it does not take, --set model.attention=blockwise or TransformerConfig(attention="blockwise"), which '
            "runs anywhere",
        ) from error


def tile_forward(
    q_BHsD: Float[Array, "B H s D"],
    k_BKsD: Float[Array, "B K s D"],
    v_BKsD: Float[Array, "B K s D"],
    *,
    scale: float,
    causal: bool,
) -> tuple[Float[Array, "B H s D"], Float[Array, "B H s"]]:
    """Attention within a tile, and the log-sum-exp of every query's scaled scores in float32.

    Raises:
      ValueError: cuDNN is missing or does not take these arrays.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    with refusals_told(q_BHsD, k_BKsD, v_BKsD):
        mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        how: dict[str, Any] = {"scale": scale, "mask_type": mask, "qkv_layout": "BNTH"}
        o_BHsD, lse_BHs = cudnn.dot_product_attention(q_BHsD, k_BKsD, v_BKsD, return_residual=True, **how)
    return o_BHsD, lse_BHs


def tile_backward(
    q_BHsD: Float[Array, "B H s D"],
    k_BKsD: Float[Array, "B K s D"],
    v_BKsD: Float[Array, "B K s D"],
    o_BHsD: Float[Array, "B H s D"],
    lse_BHs: Float[Array, "B H s"],
    do_BHsD: Float[Array, "B H s D"],
    *,
    scale: float,
    causal: bool,
) -> tuple[Float[Array, "B H s D"], Float[Array, "B K s D"], Float[Array, "B K s D"]]:
    """What a tile adds to the gradients of its queries, keys and values; o and lse are those of all keys."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    how: dict[str, Any] = {"scale": scale, "mask_type": mask, "layout": cudnn.AttentionLayout.BNTH.value}
    how |= {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "sliding_window_length": None}
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_rule).parameters:  # jax 0.12 has it
        how["score_mod"] = None
    absent = [jnp.zeros(0, q_BHsD.dtype)] * 7  # bias, lengths and offsets of queries and keys, tables of pages
    given = (q_BHsD, k_BKsD, v_BKsD, *absent, lse_BHs, o_BHsD, do_BHsD)
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_p_wrapper.bind(*given, **how)
    return dq, dk, dv


TILES = TileKernel(tile_forward, tile_backward)
"""cuDNN's attention as the tiles of `ring_attention`: bfloat16 or float16, on NVIDIA GPUs, in a region that is manual
over the whole mesh."""
