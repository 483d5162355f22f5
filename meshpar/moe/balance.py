"""Balance between experts: two losses on what the router gives out, and a bias that needs no gradient.

All of them are statistics of the tokens at hand; `axis` names the mesh axes that the tokens are split over, and makes
them statistics of the global batch, the same at all ranks. E experts, T tokens at one device.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.moe.argument_checks import check_array, check_factor, check_scores
from meshpar.moe.routing import count
from meshpar.sharding.types import problem

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
      ValueError: scores and experts of different tokens, or of none; no such axis here; a negative alpha.
    """
    check_scores("auxiliary_loss", scores, experts)
    check_factor("auxiliary_loss", "alpha", alpha)
    num_experts = scores.shape[1]
    with jax.named_scope("auxiliary_loss"):
        counts = _over_ranks("auxiliary_loss", lax.psum, count(experts, num_experts), axis).astype(scores.dtype)
        share = counts / jnp.maximum(counts.sum(), 1)
        shares = scores / jnp.maximum(scores.sum(-1, keepdims=True), _LEAST_TOTAL)
        mean_score = _over_ranks("auxiliary_loss", lax.pmean, shares.mean(0), axis)
        return alpha * num_experts * (share * mean_score).sum()


def z_loss(logits: Float[Array, "T E"], *, weight: float = 1e-3, axis: Axis | None = None) -> Float[Array, ""]:
    """weight · mean over tokens of (log Σ exp logits)²: keeps logits small, where their rounding does no harm.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", equation 5.

    Raises:
      ValueError: logits that are not [T, E], or of no token; no such axis here; a negative weight.
    """
    check_array("z_loss", "logits", logits, "T E")
    check_factor("z_loss", "weight", weight)
    if not len(logits):
        exists = "there is no token to take it over"
        raise problem("z_loss", "take a mean over tokens", exists, "give logits of one token at the least")
    with jax.named_scope("z_loss"):
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return weight * _over_ranks("z_loss", lax.pmean, (jax.nn.logsumexp(logits, axis=-1) ** 2).mean(0), axis)


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
      ValueError: bias and loads of different shapes, or not of numbers; no such axis here; a negative rate.
    """
    check_array("update_bias", "bias", bias, "...")
    is_count = jnp.issubdtype(getattr(loads, "dtype", jnp.float32), jnp.integer)
    check_array("update_bias", "loads", loads, "...", "integer" if is_count else "floating")
    check_factor("update_bias", "rate", rate)
    if bias.shape != loads.shape or not bias.ndim:
        exists = f"the loads are {loads.shape}"
        raise problem("update_bias", f"update a bias of shape {bias.shape}", exists, "give one load for each bias")
    with jax.named_scope("update_bias"):
        loads = _over_ranks("update_bias", lax.psum, lax.stop_gradient(loads), axis)
        return lax.stop_gradient(bias - rate * _above_mean(loads).astype(bias.dtype))


def _above_mean(loads: jax.Array) -> jax.Array:
    """The sign of load - mean."""
    total, num_experts = loads.sum(-1, keepdims=True), loads.shape[-1]
    if jnp.issubdtype(loads.dtype, jnp.floating):
        return jnp.sign(loads - total / num_experts)
    # A mean of q + r/E: whole numbers are above it past q, at it when q and r = 0, and below it otherwise.
    whole, rest = jnp.divmod(total, num_experts)
    return jnp.where(loads > whole, 1, jnp.where((loads < whole) | (rest > 0), -1, 0))


def _over_ranks(kernel: str, collective: Callable[..., jax.Array], x: jax.Array, axis: Axis | None) -> jax.Array:
    if axis is None:
        return x
    ranks_of(kernel, axis)
    return collective(x, axis)
