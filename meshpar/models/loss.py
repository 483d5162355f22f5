"""The loss of a language model, with logits that stay split over the vocabulary.

Shape suffixes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from meshpar.models.unembed import TokenLosses, Unembedding, chunked_cross_entropy
from meshpar.sharding.types import problem


def next_token_loss(
    model: Callable[..., Any], batch: Mapping[str, Array], key: jax.Array, *, z_loss: float = 0.0
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean cross entropy of the next token, in nats: a loss function for `train_step` and `eval_step`.

    Args:
      model: from tokens `[B, T]` to logits `[B, T, V]`, or to an `Unembedding`, whose logits are made in chunks.
      batch: `inputs` and `targets`, both int32 `[B, T]`; target t is the token behind input t. Where rows hold several
        sequences, `segments` of the same shape, and `positions` if they are not to begin anew in each: the model is
        given both by these names. With `weights` of that shape, whole numbers, the mean is over targets by their
        weight: 0 for what is not to be learnt, a prompt or padding.
      key: not used; the decoder draws nothing.
      z_loss: adds so many times the mean of `log(Z)²`, Z the sum of a token's exponentials, which keeps logits near
        zero: 1e-4, in a `functools.partial` (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways").

    Returns:
      the loss, float32 at the least, and metrics: `accuracy`, the share of targets that no other token outscores; with
      `z_loss` also `nats`, the cross entropy alone; with `weights` also `learnt`, their sum, by which
      `train_step(weight="learnt")` weighs micro-steps.
    """
    del key
    _check_batch(batch)
    logits = model(batch["inputs"], **{name: batch[name] for name in ("positions", "segments") if name in batch})
    with jax.named_scope("loss"):
        whole_or_not = chunked_cross_entropy if isinstance(logits, Unembedding) else cross_entropy
        nats_BT, best_BT, log_z_BT = whole_or_not(logits, batch["targets"])
        weights_BT = batch.get("weights")
        counted = {} if weights_BT is None else {"learnt": weights_BT.sum()}

        def mean(x_BT: Array) -> Array:
            if weights_BT is None:
                return x_BT.mean(dtype=nats_BT.dtype)
            return (x_BT * weights_BT).sum(dtype=nats_BT.dtype) / jnp.maximum(counted["learnt"], 1)

        nats, metrics = mean(nats_BT), {"accuracy": mean(best_BT), **counted}
        if not z_loss:
            return nats, metrics
        return nats + z_loss * mean(jnp.square(log_z_BT)), {**metrics, "nats": nats}


def _check_batch(batch: object) -> None:
    """Raises `ValueError` for what holds no `inputs` and `targets`."""
    exists = f"it is a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        if "inputs" in batch and "targets" in batch:
            return
        exists = f"it has {', '.join(map(str, batch)) or 'nothing'}"
    fix = "give both, int32 [rows, positions] each, or a loss of your own: (model, batch, key) -> (loss, metrics)"
    raise problem("next_token_loss", "take `inputs` and `targets` of the batch", exists, fix)


def cross_entropy(logits_BTV: Float[Array, "B T V"], targets_BT: Integer[Array, "B T"]) -> TokenLosses:
    """Cross entropy with integer targets.

    Every step over the vocabulary is element-wise or a reduction, so split logits stay split and devices exchange three
    numbers a token. Picking the target's logit by its index would gather the vocabulary first.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    max_BT1 = jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
    below_BTV = logits_BTV - max_BT1
    is_target_BTV = targets_BT[..., None] == jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2)
    target_BT = jnp.where(is_target_BTV, below_BTV, 0).sum(-1)
    log_BT = jnp.log(jnp.exp(below_BTV).sum(-1))
    return TokenLosses(log_BT - target_BT, target_BT == 0, log_BT + max_BT1[..., 0])
