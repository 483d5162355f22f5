"""Load balancing of experts: auxiliary losses of the router, and a bias without gradient.

    T  tokens of a device    E  experts    k  experts per token

The functions compute statistics of the local tokens, or of the global batch if `axis` names the mesh axes that shard
tokens. The result is then the same on all ranks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.moe.argument_checks import check_array, check_factor, check_mask, check_scores
from meshpar.moe.routing import count
from meshpar.sharding.errors import check_cases


def auxiliary_loss(
    scores: Float[Array, "T E"], experts: Int[Array, "T k"], *, alpha: float = 0.01, axis: Axis | None = None,
    mask: Bool[Array, " T"] | None = None,
) -> Float[Array, ""]:  # fmt: skip
    """Return alpha · E · Σ f_i P_i: alpha if the load is balanced, and at most alpha · E / k.

        f_i  fraction of all assignments that use expert i (no gradient)
        P_i  mean over tokens of the score of expert i, with each token's scores divided by their sum

    Other definitions count assignments per token, so that f_i is k/E in balance. Here it is 1/E, and alpha has the same
    meaning for all k. With `axis`, 2 E + 1 numbers are summed over the ranks, and the gradient is that of the loss of
    the global batch.

    Source: Fedus et al. 2022, "Switch Transformers", section 2.2; for k > 1 and sigmoid scores, DeepSeek-AI 2024,
    "DeepSeek-V3", equations 17 to 20 (there per sequence: use `jax.vmap` over sequences and take the mean).

    Args:
      scores: scores of all experts, from `route`.
      experts: experts of each token, from `route`.
      alpha: weight of the loss, at least 0. It may be an array from a schedule.
      axis: mesh axes that shard tokens, inside a `shard_map`.
      mask: False for padding, which does not count. None: all tokens count.

    Raises:
      ValueError: scores, experts and mask describe different tokens, or none; the axis does not exist; alpha is
        negative.
    """
    where = "auxiliary_loss"
    check_scores(where, scores, experts)
    check_mask(where, mask, len(scores))
    check_factor(where, alpha=alpha)
    with jax.named_scope(where):
        experts = experts if mask is None else jnp.where(mask[:, None], experts, -1)
        counts = _over_ranks(where, count(experts, scores.shape[1]), axis)
        total = _over_ranks(where, sum_of_scores(scores, mask), axis)
        return balance_loss(counts, total / _num_tokens(where, scores, mask, axis), alpha)


def sum_of_scores(scores: Float[Array, "T E"], mask: Bool[Array, " T"] | None) -> Float[Array, " E"]:
    """Sum the scores of each expert over tokens, with the scores of a token divided by their sum."""
    normalized = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-12)  # not 0/0
    return jnp.sum(normalized, axis=0, where=None if mask is None else mask[:, None])


def balance_loss(counts: Int[Array, " E"] | None, mean_scores: Float[Array, " E"], alpha: float) -> Float[Array, ""]:
    """Return alpha · E · Σ f_i P_i, given the assignments of each expert and its mean score P_i."""
    assert counts is not None
    counts = counts.astype(mean_scores.dtype)
    return alpha * len(mean_scores) * (counts / jnp.maximum(counts.sum(), 1) * mean_scores).sum()


def z_loss(
    logits: Float[Array, "T E"], *, weight: float = 1e-3, axis: Axis | None = None,
    mask: Bool[Array, " T"] | None = None,
) -> Float[Array, ""]:  # fmt: skip
    """Return weight · mean over tokens of (log Σ exp logits)², which keeps logits and their rounding errors small.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", equation 5.

    Args:
      logits: router logits.
      weight: weight of the loss, at least 0. It may be an array from a schedule.
      axis: mesh axes that shard tokens, inside a `shard_map`.
      mask: False for padding, which does not count. None: all tokens count.

    Raises:
      ValueError: logits are not [T, E] with T of at least 1, or the mask not [T]; the axis does not exist; the weight
        is negative.
    """
    check_array("z_loss", "logits", logits, "T E")
    check_mask("z_loss", mask, len(logits))
    check_factor("z_loss", weight=weight)
    case = not len(logits), "there are none", "pass at least one token"
    check_cases("z_loss", "take the mean over tokens", "wrong-shape", case)
    with jax.named_scope("z_loss"):
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        total = _over_ranks("z_loss", sum_of_squares(logits, mask), axis)
        return weight * total / _num_tokens("z_loss", logits, mask, axis)


def sum_of_squares(logits: Float[Array, "T E"], mask: Bool[Array, " T"] | None) -> Float[Array, ""]:
    """Sum (log Σ exp logits)² over tokens."""
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2, where=mask)


def update_bias(
    bias: Float[Array, "*layers E"], loads: Num[Array, "*layers E"], *, rate: float = 1e-3, axis: Axis | None = None
) -> Float[Array, "*layers E"]:
    """Lower the bias of experts above the mean load by `rate`, and raise it for experts below.

    Call it once per step, outside of the loss. Neither this update nor the bias in `route` has a gradient, so balancing
    does not change the gradient of the loss. The bias of experts with exactly the mean load does not change; integer
    counts are compared exactly.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts".

    Args:
      bias: bias of each expert. Leading dims are layers, which are updated independently.
      loads: assignments of each expert in this step, from `routing.count`; they are summed over `axis`.
      rate: γ in the paper, at least 0. It may be an array from a schedule.
      axis: mesh axes that shard tokens, inside a `shard_map`.

    Raises:
      ValueError: bias and loads have different shapes or are not numbers; the axis does not exist; the rate is
        negative.
    """
    check_array("update_bias", "bias", bias, "...")
    is_integer = jnp.issubdtype(getattr(loads, "dtype", jnp.float32), jnp.integer)
    check_array("update_bias", "loads", loads, "...", "integer" if is_integer else "floating")
    check_factor("update_bias", rate=rate)
    is_wrong, reason = bias.shape != loads.shape or not bias.ndim, f"the loads have shape {loads.shape}"
    case = is_wrong, reason, "pass a load for each bias"
    check_cases("update_bias", f"update a bias of shape {bias.shape}", "wrong-shape", case)
    with jax.named_scope("update_bias"):
        loads = _over_ranks("update_bias", lax.stop_gradient(loads), axis)
        return lax.stop_gradient(bias - rate * _sign_above_mean(loads).astype(bias.dtype))


def _sign_above_mean(loads: jax.Array) -> jax.Array:
    total, num_experts = loads.sum(-1, keepdims=True), loads.shape[-1]
    if jnp.issubdtype(loads.dtype, jnp.floating):
        return jnp.sign(loads - total / num_experts)
    # The mean is q + r/E. A load is above it if it exceeds q, and equal to it if it is q and r is 0.
    quotient, remainder = jnp.divmod(total, num_experts)
    return jnp.where(loads > quotient, 1, jnp.where((loads < quotient) | (remainder > 0), -1, 0))


def _over_ranks(where: str, x: jax.Array, axis: Axis | None) -> jax.Array:
    if axis is None:
        return x
    ranks_of(where, axis)
    return lax.psum(x, axis)


def _num_tokens(where: str, like: jax.Array, mask: jax.Array | None, axis: Axis | None) -> jax.Array:
    """Return the number of tokens of all ranks, at least 1, in the dtype of `like`."""
    if mask is None:
        return jnp.asarray(len(like) * (1 if axis is None else ranks_of(where, axis)), like.dtype)
    return jnp.maximum(_over_ranks(where, jnp.sum(mask, dtype=jnp.int32), axis), 1).astype(like.dtype)
