"""The mask of the tokens that are not padding, for statistics over tokens inside a model.

loss function ─► masking(mask) ─► model ─► current_mask ─► MoE layers
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
from jaxtyping import Array, Bool

from meshpar.sharding.context import TraceOption
from meshpar.sharding.errors import check_cases


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMask:
    """A mask in the trace context. Compared by identity, because each trace needs a new object."""

    tokens: Bool[Array, "B T"]
    is_declared: bool
    """Whether the batch has arrays that mark padding, so that layers must not ignore the mask."""


TOKEN_MASK = TraceOption[TokenMask]("token_mask")


def masking(mask: Bool[Array, "B T"], *, is_declared: bool = True) -> contextlib.AbstractContextManager[object]:
    """Return a context in which models exclude padding from statistics over tokens, such as a router loss.

    Args:
      mask: False for padding.
      is_declared: False if the batch has no arrays that mark padding. Layers on other shapes then ignore the mask.

    Example:
      def loss_fn(model, batch, key):
          with mp.moe.masking(batch["segments"] > 0):
              logits = model(batch["inputs"])
    """
    return TOKEN_MASK.set(TokenMask(mask, is_declared))


def current_mask() -> Bool[Array, "B T"] | None:
    """Return the mask of `masking`, or None if all tokens count."""
    mask = TOKEN_MASK.value
    return None if mask is None else mask.tokens


def mask_for(where: str, x: jax.Array) -> Bool[Array, "B T"] | None:
    """Return the mask of `masking` for a layer with the input `x [B, T, ...]`.

    Raises:
      ValueError: the mask describes other tokens, because the layer runs on a part or in a different order.
    """
    mask = TOKEN_MASK.value
    if mask is None or (mask.tokens.shape != x.shape[:2] and not mask.is_declared):
        return None
    reason = f"the mask of the batch has shape {mask.tokens.shape} and describes other tokens"
    fix = "pass `mask`, True for the tokens that count; under scan_layers, pass it on with `per_example`"
    case = mask.tokens.shape != x.shape[:2], reason, fix
    check_cases(where, f"use tokens of shape {x.shape[:2]} without a mask", "wrong-shape", case)
    return mask.tokens
