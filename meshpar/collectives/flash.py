"""tokamax's flash attention. The named scope of each call contains its FLOPs.

Shape suffixes: B batch, T positions, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import importlib.util
import re

import jax
from jaxtyping import Array

from meshpar.collectives.kernel_checks import attention_errors

KERNELS = ("mosaic", "triton")
"""Implementations that tokamax may use. Its fallback to XLA is excluded."""
SCOPE = "tokamax_attention_"
"""Prefix of the named scope of a call, followed by the FLOPs of each of the two equally large matmuls."""
_SCOPE = re.compile(rf"{SCOPE}(\d+)")


def flash_attention(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    segments_BT: Array | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Array:
    """Compute causal attention on one device with tokamax.

    See `meshpar.models.attention.causal_attention` for the arguments. Segments become a mask of T² bytes per example,
    which is created in each call. Inside a `shard_map` the kernels need `check_vma=False`.

    Raises:
      MeshparError: tokamax is missing, or has no kernel for these arrays or this device.
    """
    num_keys = k_BTKD.shape[1]
    window_size = min(window or num_keys, num_keys)
    num_scores = window_size * (2 * num_keys - window_size) // 2  # within the causal mask and the window
    flops = 2 * q_BTHD.shape[0] * q_BTHD.shape[2] * q_BTHD.shape[3] * num_scores
    mask = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None]
    install = "on Python 3.12 or newer, pip install 'meshpar[cuda12]' (or tokamax, to compile for GPUs without one)"
    with attention_errors("tokamax", install, q_BTHD, k_BTKD, v_BTKD):
        if importlib.util.find_spec("tokamax") is None:
            raise ValueError("the package tokamax is not installed")
        import tokamax  # type: ignore[import-not-found,unused-ignore]

        with jax.named_scope(f"{SCOPE}{flops}"):
            return tokamax.dot_product_attention(
                q_BTHD, k_BTKD, v_BTKD, mask=mask, scale=scale, is_causal=True, logits_soft_cap=cap,
                local_window_size=None if window is None else (window - 1, 0), implementation=KERNELS,
            )  # fmt: skip


def product_flops(scopes: str) -> int | None:
    """Return the FLOPs of an attention matmul, parsed from the scopes of an operation, or None for other operations."""
    match = _SCOPE.search(scopes)
    return int(match[1]) if match else None
