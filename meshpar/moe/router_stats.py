"""Statistics of a router, from sums over tokens that can be added over devices and batch slices.

    logits, assignments of a device ─► RouterSums ─► sum over devices and slices ─► RouterStats: losses, metrics

T tokens of a device, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from meshpar.layers.scan import Aux, Sums
from meshpar.moe.balance import balance_loss, sum_of_scores, sum_of_squares
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routed, count, entropy


class RouterStats(NamedTuple):
    """Router statistics of an MoE layer over all input tokens that are not masked."""

    loss: Float[Array, ""]
    """Sum of the weighted auxiliary losses, to be added to the loss."""
    load: Int32[Array, " E"]
    """Assignments of each expert, including dropped ones."""
    dropped: Int32[Array, ""]
    """Assignments dropped over capacity."""
    router_entropy: Float[Array, ""]
    """Mean entropy of a token's scores, in nats."""
    sums: Sums | None = None
    """Sums over tokens, to be added over slices of a batch."""

    @property
    def aux(self) -> Aux:
        """Return the statistics in the form that `meshpar.scan_layers` stacks."""
        metrics = {"load": self.load, "dropped": self.dropped, "router_entropy": self.router_entropy}
        return Aux(self.loss, metrics, self.sums)


class RouterSums(NamedTuple):
    """Sums over tokens. A sum that the config does not need is None."""

    load: Int32[Array, " E"]
    """Assignments of each expert. Pipeline stages sum `load` and `dropped` over the batch axes later."""
    dropped: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    entropy: Float[Array, ""]
    assigned: Int32[Array, " E"] | None
    """As `load`, over all devices."""
    scores: Float[Array, " E"] | None
    """Scores of each expert, with the scores of a token divided by their sum."""
    squares: Float[Array, ""] | None
    """Squares of log Σ exp logits."""

    @staticmethod
    def of(
        logits: Float[Array, "T E"], routed: Routed, dropped: Int32[Array, ""], config: MoEConfig,
        mask: Bool[Array, " T"] | None, *, axes: tuple[str, ...], count_axes: tuple[str, ...],
    ) -> RouterSums:  # fmt: skip
        """Sum over the tokens of the devices along `axes`, and counts for the metrics over `count_axes`."""
        load, scores = count(routed.experts, config.routing.num_experts), routed.scores
        sums = {
            "entropy": jnp.sum(entropy(lax.stop_gradient(scores)), where=mask),
            "assigned": load if config.auxiliary_weight else None,
            "scores": sum_of_scores(scores, mask) if config.auxiliary_weight else None,
            "squares": sum_of_squares(logits, mask) if config.z_weight else None,
        }
        num_tokens = jnp.asarray(len(logits) * math.prod(lax.axis_size(axis) for axis in axes), jnp.int32)
        if mask is not None:
            sums["num_tokens"] = jnp.sum(mask, dtype=jnp.int32)
        load, dropped = lax.psum((load, dropped), count_axes) if count_axes else (load, dropped)
        sums = lax.psum(sums, axes) if axes else sums
        return RouterSums(load, dropped, **{"num_tokens": num_tokens, **sums})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class StatsOf:
    """Computes the statistics of an MoE layer from its `RouterSums`."""

    config: MoEConfig

    def __call__(self, sums: RouterSums) -> Aux:
        return self.stats(sums).aux

    def stats(self, sums: RouterSums) -> RouterStats:
        """Return the statistics. Without any token, losses and entropy are 0."""
        num_tokens = jnp.maximum(sums.num_tokens, 1).astype(sums.entropy.dtype)
        loss = jnp.zeros((), sums.entropy.dtype)
        if sums.scores is not None:
            loss += balance_loss(sums.assigned, sums.scores / num_tokens, self.config.auxiliary_weight)
        if sums.squares is not None:
            loss += self.config.z_weight * sums.squares / num_tokens
        return RouterStats(loss, sums.load, sums.dropped, sums.entropy / num_tokens, Sums(sums, self))
