"""tokamax's flash attention: its kernels by one word, what they refuse told, their FLOPs named for who counts them."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator

import jax
from jaxtyping import Array, Float, Int

from meshpar.sharding.types import problem

KERNELS = ("mosaic", "triton")
"""Of these the package takes the first that can do it; its own fallbacks to XLA are not there."""
SCOPE = "tokamax_attention_"
"""Behind it the FLOPs of one product of a call: scores, or their product with the values."""
_NAMED = re.compile(rf"{SCOPE}(\d+)")


def flash_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTKD: Float[Array, "B T K D"],
    v_BTKD: Float[Array, "B T K D"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention by tokamax's kernels, of one device; arguments as in `meshpar.models.layers.causal_attention`.

    The package knows segments as a mask of `T T` bytes a row, which is made for every call. Its kernels do not say what
    varies over a mesh: in a `shard_map` they want `check_vma=False`.

    Raises:
      ValueError: the package is missing, or has no kernel for these arrays or this device.
    """
    num_keys = k_BTKD.shape[1]
    near = min(window or num_keys, num_keys)
    seen = near * (2 * num_keys - near) // 2  # as `causal_share`
    flops = 2 * q_BTHD.shape[0] * q_BTHD.shape[2] * q_BTHD.shape[3] * seen
    mask = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None]
    with _refusals_told(q_BTHD, k_BTKD, v_BTKD):
        import tokamax  # type: ignore[import-not-found,unused-ignore]

        with jax.named_scope(f"{SCOPE}{flops}"):
            return tokamax.dot_product_attention(
                q_BTHD, k_BTKD, v_BTKD, mask=mask, scale=scale, is_causal=True, logits_soft_cap=cap,
                local_window_size=None if window is None else (window - 1, 0), implementation=KERNELS,
            )  # fmt: skip


@contextlib.contextmanager
def _refusals_told(*arrays: Array) -> Iterator[None]:
    try:
        if importlib.util.find_spec("tokamax") is None:
            raise ValueError("the package tokamax is not installed")
        yield
    except (NotImplementedError, ExceptionGroup, ValueError) as error:
        shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
        parts = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        raise problem(
            'attention="tokamax"',
            f"attend with {shapes} on one device",
            "; ".join(str(one).partition("\n")[0].rstrip(".") for one in parts),
            "on Python 3.12 or newer, pip install 'meshpar[cuda12]' (or tokamax, to compile for GPUs without one); for "
            'what it does not take, --set model.attention=blockwise or TransformerConfig(attention="blockwise"), which '
            "runs anywhere",
        ) from error


def product_flops(scopes: str) -> int | None:
    """FLOPs of one product, by the scopes around a kernel; None where it is none of this attention's."""
    found = _NAMED.search(scopes)
    return int(found[1]) if found else None
