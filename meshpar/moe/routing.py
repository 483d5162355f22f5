"""Routing: experts and gate weights of each token, and the assignments within the capacity.

    logits [T, E] ─► scores (softmax or sigmoid) ─┬─► + bias, best groups, top k ─► experts [T, k] ─► kept: slot, kept
                                                  └─► gates of these experts, without the bias ─► weights [T, k]

T tokens, E experts, k experts per token. Inside `jax.shard_map`, T counts the tokens of one device. An element of
`experts` is called an assignment; E means unassigned.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from meshpar.moe.argument_checks import check_array, check_mask
from meshpar.sharding.errors import (
    check_bool,
    check_cases,
    check_choice,
    check_divides,
    check_int,
    check_number,
    check_positive_int,
)

Score = Literal["softmax", "sigmoid"]
Choice = Literal["token", "expert"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens are assigned to experts.

    Mixtral is `Routing(num_experts=8, top_k=2)`; DeepSeek-V3 is `Routing(num_experts=256, top_k=8, score="sigmoid",
    scale=2.5, groups=8, top_groups=4)` with a bias; Switch is `Routing(num_experts=64, top_k=1, normalize=False,
    capacity_factor=1.25)`.

    Example:
      >>> mixtral = mp.moe.Routing(num_experts=8, top_k=2)
      >>> switch = mp.moe.Routing(num_experts=64, top_k=1, normalize=False, capacity_factor=1.25)
    """

    num_experts: int
    """Number of routed experts on all ranks together. Shared experts do not count."""
    top_k: int
    """Number of experts per token. With choice="expert", the mean number."""
    score: Score = "softmax"
    """Function from logits to scores: "softmax" over the experts, or "sigmoid" of each logit."""
    normalize: bool = True
    """True if the gate weights of a token sum to `scale`."""
    scale: float = 1.0
    """Factor of all gate weights."""
    groups: int = 1
    """Number of groups of consecutive experts. A token uses the best `top_groups` groups (choice="token")."""
    top_groups: int = 1
    """Number of groups per token. The score of a group is the sum of the two highest biased scores in it."""
    choice: Choice = "token"
    """With "token", each token chooses `top_k` experts; with "expert", each expert chooses T·top_k/E tokens."""
    capacity_factor: float | None = None
    """Capacity of an expert, as a multiple of its load when routing is balanced. None means unlimited."""
    causal: bool = True
    """True if the model predicts each token from the tokens before it, as language models do."""
    force: bool = False
    """Allow choice="expert" in a causal model."""

    def __post_init__(self) -> None:
        num_experts, k, groups = self.num_experts, self.top_k, self.groups
        check_choice("Routing", "the function from logits to scores", get_args(Score), score=self.score)
        check_choice("Routing", "the side that chooses", get_args(Choice), choice=self.choice)
        counts = {"num_experts": num_experts, "top_k": k, "groups": groups, "top_groups": self.top_groups}
        check_positive_int("Routing", "a number of experts or groups", **counts)
        flags = {"normalize": self.normalize, "causal": self.causal, "force": self.force}
        check_bool("Routing", "the option is on", **flags)
        check_divides("Routing", f"divide {num_experts} experts into groups", num_experts, groups, "use a divisor")
        reachable = num_experts // groups * self.top_groups
        reason = f"a token can use {reachable} experts" + f" in {self.top_groups} of {groups} groups" * (groups > 1)
        check_cases(
            f"Routing(top_k={k}, groups={groups}, top_groups={self.top_groups})", "choose experts", "out-of-range",
            (k > reachable, reason, f"use top_k of at most {reachable}"),
            (self.top_groups > groups, f"there are {groups} groups", f"use top_groups={groups}"),
        )  # fmt: skip
        check_number("Routing", "1.0", scale=self.scale)
        if self.capacity_factor is not None:
            check_number("Routing", "1.25, or None for no limit", capacity_factor=self.capacity_factor)
        no_gradient = "the weight is then constant, and the router gets no gradient from the loss"
        leak = (
            "an expert compares all tokens, so the choice for a token depends on later tokens: the training loss leaks "
            "future tokens, and decoding token by token gives other results"
        )
        no_leak = 'use choice="token", causal=False if the model sees full sequences, or force=True to allow the leak'
        each_chooses, by_token = f"each expert chooses tokens·{k}/{num_experts} tokens", self.choice == "token"
        check_cases(
            f'Routing(choice="{self.choice}")', f"use top_k={k} with normalize={self.normalize}", "conflict",
            (by_token and k == 1 and self.normalize, no_gradient, "use normalize=False, or top_k of at least 2"),
            (not by_token and self.causal and not self.force, leak, no_leak),
            (not by_token and groups != 1, each_chooses, "leave groups out"),
            (not by_token and self.capacity_factor is not None, each_chooses, "leave capacity_factor out"),
            (not by_token and self.normalize, "a token may have no expert", "use normalize=False"),
        )  # fmt: skip

    def nodes_visited(self, nodes: int) -> int:
        """Return how many nodes a token reaches at most, if each node owns consecutive experts."""
        most = min(nodes, self.top_k)
        if nodes % self.groups == 0 or self.groups % nodes == 0:
            most = min(most, self.top_groups * max(1, nodes // self.groups))
        return most


class Routed(NamedTuple):
    """Result of a router. With choice="expert" k is E, and column e belongs to expert e."""

    experts: Int32[Array, "T k"]
    """Experts of each token, in order of decreasing score. E means unassigned (padding, and choice="expert")."""
    weights: Float[Array, "T k"]
    """Gate weights of these experts, 0 where unassigned."""
    scores: Float[Array, "T E"]
    """Scores of all experts, without the bias."""


def route(
    logits: Float[Array, "T E"], routing: Routing, *, bias: Float[Array, " E"] | None = None,
    mask: Bool[Array, " T"] | None = None,
) -> Routed:  # fmt: skip
    """Return the experts of each token and their gate weights, computed in float32 or wider.

    Ties go to the expert with the lowest index (with choice="expert", to the earliest token). Weights and scores are
    differentiable, the assignment is not. Normalized weights are computed from the logits of the assigned experts, so
    they stay exact when scores underflow. All weights are bitwise independent of the numbering of the experts.

    Source: Shazeer et al. 2017 (top-k gating); Fedus et al. 2022, "Switch Transformers" (top 1); Zhou et al. 2022,
    "Mixture-of-Experts with Expert Choice Routing"; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2 (sigmoid scores,
    groups, and the bias).

    Args:
      logits: router logits of the local tokens. Nothing is communicated: experts choose among these tokens.
      routing: the routing algorithm.
      bias: added to the scores for the assignment only, without a gradient. See `balance.update_bias`.
      mask: False for padding, which is assigned to no expert. With choice="expert", each expert chooses n·top_k/E of
        the n other tokens. None: all tokens count.

    Raises:
      ValueError: logits are not floating-point numbers [T, E], or the mask not booleans [T]; the bias is not [E], or is
        used with choice="expert".

    Example:
      >>> routed = mp.moe.route(jnp.array([[1.0, 3.0, 2.0]]), mp.moe.Routing(num_experts=3, top_k=2))
      >>> routed.experts.tolist()
      [[1, 2]]
    """
    num_experts = routing.num_experts
    check_array("route", "logits", logits, "...")
    requested = f"use logits of shape {logits.shape}"
    fix = "merge batch and sequence into one dim of tokens, and check num_experts"
    is_wrong = logits.ndim != 2 or logits.shape[1] != num_experts
    check_cases("route", requested, "wrong-shape", (is_wrong, f"they must be [T, {num_experts}] for this routing", fix))
    check_mask("route", mask, len(logits))
    if bias is not None:
        case = routing.choice == "expert", "each expert chooses the same number of tokens", "leave the bias out"
        check_cases("route", 'use a bias with choice="expert"', "conflict", case)
        check_array("route", "bias", bias, "E")
        case = bias.shape != (num_experts,), f"there are {num_experts} experts", f"pass ({num_experts},)"
        check_cases("route", f"use a bias of shape {bias.shape}", "wrong-shape", case)
    with jax.named_scope("route"):
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        scores = _softmax(logits) if routing.score == "softmax" else jax.nn.sigmoid(logits)
        if routing.choice == "expert":
            # Column e has e and its score for the tokens that e chose, else E and 0.
            is_chosen = _experts_choose(scores, routing, mask)
            experts = jnp.where(is_chosen, jnp.arange(num_experts, dtype=jnp.int32), num_experts)
            gates = jnp.where(is_chosen, scores, 0.0)
        else:
            experts = _tokens_choose(logits, scores, routing, bias)
            if routing.normalize:
                # Softmax of log scores: dividing the scores by their sum would be 0/0 when they underflow.
                log_scores = logits if routing.score == "softmax" else jax.nn.log_sigmoid(logits)
                gates = jax.nn.softmax(jnp.take_along_axis(log_scores, experts, axis=-1))
            else:
                gates = jnp.take_along_axis(scores, experts, axis=-1)
            if mask is not None:
                experts = jnp.where(mask[:, None], experts, num_experts)
                gates = jnp.where(mask[:, None], gates, 0)
        return Routed(experts, gates * routing.scale, scores)


def capacity(tokens: int, routing: Routing) -> int:
    """Return how many tokens of a device an expert accepts: min(tokens, ⌈tokens · k / E · factor⌉).

    The limit `tokens` is also the result without a capacity factor. With choice="expert", the result is the number of
    tokens that each expert chooses.

    Source: Fedus et al. 2022, "Switch Transformers", section 2.2 (k = 1).

    Args:
      tokens: number of tokens of the device.
      routing: number of experts, k and capacity factor.

    Raises:
      ValueError: `tokens` is not an integer of at least 0.

    Example:
      >>> mp.moe.capacity(64, mp.moe.Routing(num_experts=8, top_k=2, capacity_factor=1.25))
      20
    """
    check_int("capacity", "the number of tokens of a device", tokens=tokens)
    if routing.capacity_factor is None and routing.choice == "token":
        return tokens
    # Exact arithmetic: in floating point 200 * 2.2 is above 440, and a capacity of 55 would be rounded up to 56.
    factor = Fraction(str(routing.capacity_factor or 1))
    return min(tokens, math.ceil(tokens * routing.top_k * factor / routing.num_experts))


def assign_slots(
    experts: Int[Array, "T k"], capacity: int, num_experts: int
) -> tuple[Int32[Array, "T k"], Bool[Array, "T k"]]:
    """Return the slot of each assignment at its expert, and whether the slot is within the capacity.

    Slots count from 0 in row-major order of `experts`, and continue past the capacity. The last tokens of a batch are
    therefore dropped first, deterministically. Unassigned elements are never kept. Assignments are sorted, so no
    temporary is larger than a few times `experts`.

    Args:
      experts: experts of each token [T, k].
      capacity: number of slots of each expert.
      num_experts: number of experts E.

    Raises:
      ValueError: `experts` are not integers, or `capacity` or `num_experts` is out of range.

    Example:
      >>> slot, is_kept = mp.moe.assign_slots(jnp.array([[0, 1], [0, 2], [0, 1]]), capacity=2, num_experts=4)
      >>> slot.tolist(), is_kept.tolist()
      ([[0, 0], [1, 0], [2, 1]], [[True, True], [True, True], [False, True]])
    """
    check_array("assign_slots", "experts", experts, "T k", "integer")
    if not isinstance(capacity, jax.core.Tracer):
        check_int("assign_slots", "the capacity of an expert", capacity=capacity)
    check_positive_int("assign_slots", "the number of experts", num_experts=num_experts)
    experts = or_unassigned(experts, num_experts)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sorted_experts = flat[order]
    counts = count(flat, num_experts + 1)  # includes the unassigned elements
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    sorted_slots = jnp.arange(flat.size, dtype=jnp.int32) - first[sorted_experts]
    slot = jnp.zeros_like(sorted_slots).at[order].set(sorted_slots, unique_indices=True).reshape(experts.shape)
    return slot, (slot < capacity) & (experts < num_experts)


def count(experts: Int[Array, ...], num_experts: int) -> Int32[Array, " E"]:
    """Return the number of assignments of each expert. Unassigned elements do not count.

    Args:
      experts: expert of each assignment, of any shape; `num_experts` if unassigned.
      num_experts: number of experts E.

    Raises:
      ValueError: `experts` are not integers, or `num_experts` is not positive.

    Example:
      >>> mp.moe.count(jnp.array([[0, 2], [2, 1]]), 4).tolist()
      [1, 1, 2, 0]
    """
    check_array("count", "experts", experts, "...", "integer")
    check_positive_int("count", "the number of experts", num_experts=num_experts)
    flat = or_unassigned(experts, num_experts).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")


def entropy(scores: Float[Array, "T E"]) -> Float[Array, " T"]:
    """Return the entropy of each token's scores, normalized to a sum of 1, in nats."""
    shares = scores / jnp.maximum(scores.sum(-1, keepdims=True), jnp.finfo(scores.dtype).tiny)
    return -jax.scipy.special.xlogy(shares, shares).sum(-1)


def or_unassigned(experts: Int[Array, "*dims"], num_experts: int) -> Int32[Array, "*dims"]:
    """Replace values outside [0, E) by E, the index for "unassigned"."""
    return jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).astype(jnp.int32)


# ---- Assignment ------------------------------------------------------------------------------------------------------


def _tokens_choose(logits: jax.Array, scores: jax.Array, routing: Routing, bias: jax.Array | None) -> jax.Array:
    """Return the best k experts of each token, `[T, k]`, in order of decreasing score.

    Without bias and groups, logits are compared instead of scores. Rounding makes scores equal that differ as logits:
    in float32 the sigmoid of all logits above 17 is 1.
    """
    ranked = logits if bias is None and routing.groups == 1 else scores
    if bias is not None:
        ranked = ranked + bias.astype(ranked.dtype)
    ranked = lax.stop_gradient(ranked)
    if routing.groups > 1:
        in_groups = ranked.reshape(len(ranked), routing.groups, -1)
        two_best, _ = lax.top_k(in_groups, min(2, in_groups.shape[-1]))
        _, best = lax.top_k(two_best.sum(-1), routing.top_groups)
        allowed = jax.nn.one_hot(best, routing.groups, dtype=bool).any(1)
        ranked = jnp.where(allowed[..., None], in_groups, -jnp.inf).reshape(ranked.shape)
    return lax.top_k(ranked, routing.top_k)[1].astype(jnp.int32)


def _experts_choose(scores: jax.Array, routing: Routing, mask: jax.Array | None) -> jax.Array:
    """Return which experts chose which tokens, bool `[T, E]`. Experts do not choose masked tokens."""
    num_experts, scores = routing.num_experts, lax.stop_gradient(scores).T
    if mask is not None:
        scores = jnp.where(mask, scores, -1)
    _, chosen = lax.top_k(scores, capacity(scores.shape[1], routing))
    is_chosen = jnp.zeros(scores.shape, bool)
    if mask is None:
        return is_chosen.at[jnp.arange(num_experts)[:, None], chosen].set(True).T
    num_tokens = mask.sum(dtype=jnp.int32)
    num_chosen = jnp.minimum(num_tokens, -(-num_tokens * routing.top_k // num_experts))  # as `capacity`
    within_capacity = jnp.arange(chosen.shape[1]) < num_chosen
    return is_chosen.at[jnp.arange(num_experts)[:, None], chosen].set(within_capacity).T


@jax.custom_jvp
def _softmax(logits: jax.Array) -> jax.Array:
    """Return the softmax, bitwise independent of the order of the experts."""
    powers = jnp.exp(logits - logits.max(-1, keepdims=True))
    return powers / _order_independent_sum(powers)


@_softmax.defjvp
def _softmax_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    scores, (tangent,) = _softmax(*primals), tangents
    return scores, scores * (tangent - (scores * tangent).sum(-1, keepdims=True))


def _order_independent_sum(values: jax.Array) -> jax.Array:
    """Sum numbers from 0 to 1 over the last dim, with the same bits for every order of the numbers.

    Numbers are split into three terms, short enough to be added without rounding. The remainder is smaller than the
    rounding error of the sum for up to 4096 numbers, if the largest is 1.
    """
    bits = jnp.finfo(values.dtype).nmant + 1 - (values.shape[-1] - 1).bit_length()
    total, remainder = jnp.zeros((*values.shape[:-1], 1), values.dtype), values
    for level in (1, 2, 3):
        term = jnp.round(remainder * 2.0 ** (bits * level)) * 2.0 ** (-bits * level)
        total += term.sum(-1, keepdims=True)
        remainder -= term
    return total
