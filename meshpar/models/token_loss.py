"""Next-token cross entropy with logits sharded over the vocabulary.

Shape suffixes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from meshpar.layers.losses import MeanLoss
from meshpar.layers.token_mask import masking
from meshpar.models.chunked_cross_entropy import TokenLosses, Unembedding, chunked_cross_entropy
from meshpar.sharding.errors import problem

IGNORE_TARGET = -100
"""The target that the loss ignores, as in PyTorch and Transformers (`ignore_index`)."""


def next_token_loss(
    model: Callable[..., Any], batch: Mapping[str, Array], key: jax.Array, *, z_loss: float = 0.0
) -> tuple[MeanLoss, dict[str, Array]]:
    """Return the mean cross entropy of the next token, in nats. A loss function for `train_step` and `eval_step`.

    Args:
      model: from tokens `[B, T]` to logits `[B, T, V]`, or to an `Unembedding`, which makes logits in chunks.
      batch: `inputs` and `targets`, both integers `[B, T]`; target t is the token after input t. The loss ignores
        targets of `IGNORE_TARGET` (-100). Any other target outside the vocabulary makes the loss nan. Optional arrays
        of the same shape: `weights`, the weight of each target, 0 for a prompt or padding (MoE layers do not route the
        padding, see `token_mask`); `segments`, if a row
        contains several sequences; `positions`, if they do not restart with each segment. The model receives the last
        two by these names.
      key: not used; the decoder draws no random numbers.
      z_loss: coefficient of the mean of `log(Z)²`, where Z is the sum of a token's exponentials. It keeps logits near
        zero; 1e-4 is common (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways").

    Returns:
      The weighted `MeanLoss` over all targets, in float32 or higher precision, and metrics: `accuracy`, the fraction of
      targets with the largest logit; with `z_loss` also `nats`, the cross entropy without the z-loss.

    Example:
      >>> import functools
      >>> step = mp.train_step(functools.partial(mp.models.next_token_loss, z_loss=1e-4))
    """
    del key
    if not isinstance(batch, Mapping) or not {"inputs", "targets"} <= batch.keys():
        contents = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
        fix = "add both, int32 [batch, positions] each, or write a custom loss: (model, batch, key) -> (loss, metrics)"
        requested = "read `inputs` and `targets` from the batch"
        raise problem("next_token_loss", requested, f"the batch has {contents or 'no arrays'}", fix, code="not-found")
    with masking(token_mask(batch), is_declared=not batch.keys().isdisjoint(("segments", "weights"))):
        logits = model(batch["inputs"], **{name: batch[name] for name in ("positions", "segments") if name in batch})
    with jax.named_scope("loss"):
        losses_of = chunked_cross_entropy if isinstance(logits, Unembedding) else cross_entropy
        nats_BT, best_BT, log_z_BT = losses_of(logits, batch["targets"])
        counts_BT = _is_counted(batch["targets"])
        weights_BT = counts_BT.astype(jnp.int32)
        if "weights" in batch:
            weights_BT = weights_BT * batch["weights"]
        weight = weights_BT.sum()

        def total(x_BT: Array) -> Array:
            return (jnp.where(counts_BT, x_BT, 0) * weights_BT).sum(dtype=nats_BT.dtype)

        def mean(x_BT: Array) -> Array:
            return total(x_BT) / jnp.where(weight > 0, weight, 1)

        nats, metrics = total(nats_BT), {"accuracy": mean(best_BT)}
        if not z_loss:
            return MeanLoss(nats, weight), metrics
        return MeanLoss(nats + z_loss * total(jnp.square(log_z_BT)), weight), {**metrics, "nats": mean(nats_BT)}


def token_mask(batch: Mapping[str, Array]) -> Bool[Array, "B T"]:
    """Return False for padding: tokens that cannot affect the loss. For `moe.masking`, or the `mask` of a decoder.

    With `segments`, padding is segment 0 in rows where its targets have no weight, as in `data.chat`. Without, it is
    the tokens of a row after the last target with weight. A causal model does not use them for any other token.

    Args:
      batch: as for `next_token_loss`.
    """
    counts_BT = _is_counted(batch["targets"])
    if "weights" in batch:
        counts_BT = counts_BT & (batch["weights"] != 0)
    if "segments" not in batch:
        return jax.lax.cummax(counts_BT.astype(jnp.int32), axis=counts_BT.ndim - 1, reverse=True) > 0
    is_zero_BT = batch["segments"] == 0
    return ~is_zero_BT | jnp.any(counts_BT & is_zero_BT, axis=-1, keepdims=True)


def _is_counted(targets_BT: Array) -> Array:
    return targets_BT != IGNORE_TARGET


def cross_entropy(logits_BTV: Array, targets_BT: Array) -> TokenLosses:
    """Compute the cross entropy with integer targets.

    All operations over the vocabulary are element-wise or reductions, so logits stay sharded, and devices communicate
    three values per token. Indexing the target logits would all-gather the vocabulary.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    max_BT1 = jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
    below_BTV = logits_BTV - max_BT1
    is_target_BTV = targets_BT[..., None] == jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2)
    target_BT = jnp.where(is_target_BTV, below_BTV, 0).sum(-1)
    log_BT = jnp.log(jnp.exp(below_BTV).sum(-1))
    losses = TokenLosses(log_BT - target_BT, target_BT == 0, log_BT + max_BT1[..., 0])
    return losses.only_in_vocab(targets_BT, logits_BTV.shape[-1])
