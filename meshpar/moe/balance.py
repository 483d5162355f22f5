"""Balance between experts: two losses on what the router gives out, and a bias that needs no gradient.

All of them are statistics of the tokens at hand; `axis` names the mesh axes that the tokens are split over, and makes
them statistics of the global batch, the same at all ranks. E experts, T tokens at one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from meshpar.collectives.check import Axis, ranks_of
from meshpar.moe.routing import count
from meshpar.types import problem

_LEAST_TOTAL = 1e-12
"""Of one token's scores: below it, their shares are understated instead of divided by nothing."""


def auxiliary_loss(
    scores: Float[Array, "T E"], experts: Int[Array, "T k"], *, alpha: float = 0.01, axis: Axis | None = None
) -> Float[Array, ""]:
    """alpha · E · Σ f_i P_i: alpha when all experts get the same share of choices, alpha · E / k at most.

        f_i  share of all choices that fell on expert i (no gradient)
        P_i  mean over tokens of expert i's score, each token's scores divided by their sum

    What is f_i = k/E for every i elsewhere (choices per token) is 1/E here, so alpha means the same for every k. With
    `axis`, E + E + 2 numbers are summed over the ranks; the gradient is that of the global batch's loss, taken once.

    Source: Fedus et al. 2022, "Switch Transformers", section 2.2; for k > 1 and sigmoid scores, DeepSeek-AI 2024,
    "DeepSeek-V3", equations 17 to 20 (there for each sequence by itself: `jax.vmap` over sequences, then the mean).

    Raises:
      ValueError: scores and experts of different tokens; no such axis here.
    """
    num_experts = _checked_experts("auxiliary_loss", scores, experts)
    with jax.named_scope("auxiliary_loss"):
        counts = _summed("auxiliary_loss", count(experts, num_experts), axis).astype(scores.dtype)
        share = counts / jnp.maximum(counts.sum(), 1)
        mean_score = _mean("auxiliary_loss", _shares(scores), axis)
        return alpha * num_experts * (share * mean_score).sum()


def z_loss(logits: Float[Array, "T E"], *, weight: float = 1e-3, axis: Axis | None = None) -> Float[Array, ""]:
    """weight · mean over tokens of (log Σ exp logits)²: keeps logits small, where their rounding does no harm.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", equation 5.

    Raises:
      ValueError: no such axis here.
    """
    with jax.named_scope("z_loss"):
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return weight * _mean("z_loss", jax.nn.logsumexp(logits, axis=-1) ** 2, axis)


def update_bias(
    bias: Float[Array, "*layers E"], loads: Num[Array, "*layers E"], *, rate: float = 1e-3, axis: Axis | None = None
) -> Float[Array, "*layers E"]:
    """The bias after a step: `rate` less where an expert got more than the mean load, `rate` more where it got less.

    To be done once a step, outside of the loss. No gradient goes through it, nor through the bias in `route`, so the
    loss and its gradient know nothing of balancing. At exactly the mean nothing moves; counts are compared exactly.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts".

    Args:
      bias: of every expert; with layers in front, each layer by itself.
      loads: choices that fell on each expert in this step, as `routing.count` gives them; summed over `axis`.
      rate: the paper's γ.
      axis: mesh axes that the tokens are split over, when called inside `shard_map`.

    Raises:
      ValueError: bias and loads of different shapes; no such axis here.
    """
    if bias.shape != loads.shape:
        exists = f"the loads are {loads.shape}"
        raise problem("update_bias", f"update a bias of shape {bias.shape}", exists, "give one load for each bias")
    with jax.named_scope("update_bias"):
        loads = _summed("update_bias", lax.stop_gradient(loads), axis)
        return lax.stop_gradient(bias - rate * _above_mean(loads).astype(bias.dtype))


def _above_mean(loads: jax.Array) -> jax.Array:
    """The sign of load - mean."""
    total, num_experts = loads.sum(-1, keepdims=True), loads.shape[-1]
    if jnp.issubdtype(loads.dtype, jnp.floating):
        return jnp.sign(loads - total / num_experts)
    # A mean of q + r/E: whole numbers are above it past q, at it when q and r = 0, and below it otherwise.
    whole, rest = jnp.divmod(total, num_experts)
    return jnp.where(loads > whole, 1, jnp.where((loads < whole) | (rest > 0), -1, 0))


def _shares(scores: jax.Array) -> jax.Array:
    return scores / jnp.maximum(scores.sum(-1, keepdims=True), _LEAST_TOTAL)


def _mean(kernel: str, per_token: jax.Array, axis: Axis | None) -> jax.Array:
    """Over the tokens of all ranks, each of which has as many."""
    mean = per_token.mean(0)
    if axis is None:
        return mean
    ranks_of(kernel, axis)
    return lax.pmean(mean, axis)


def _summed(kernel: str, x: jax.Array, axis: Axis | None) -> jax.Array:
    if axis is None:
        return x
    ranks_of(kernel, axis)
    return lax.psum(x, axis)


def _checked_experts(kernel: str, scores: jax.Array, experts: jax.Array) -> int:
    if scores.ndim != 2 or experts.ndim != 2 or len(scores) != len(experts):
        raise problem(
            kernel,
            f"take scores of shape {scores.shape} with experts of shape {experts.shape}",
            "they are [tokens, num_experts] and [tokens, k], of the same tokens",
            "give `scores` and `experts` of one `Routed`",
        )
    return scores.shape[1]
