"""Routing: which experts a token goes to, with what weight, and which places they have room for.

    logits [T, E] ─► scores (softmax or sigmoid) ─┬─► + bias, best groups, top k ─► experts [T, k] ─► kept: slot, kept
                                                  └─► gate of the chosen, without the bias ─► weights [T, k]

T tokens, E experts, k choices; T is what one device holds when called inside `jax.shard_map`.
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

from meshpar.collectives.kernel_checks import check_choice
from meshpar.moe.argument_checks import check_array, check_positive, check_whole
from meshpar.sharding.types import problem

Score = Literal["softmax", "sigmoid"]
Choice = Literal["token", "expert"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find their experts.

    Mixtral is `Routing(num_experts=8, top_k=2)`; DeepSeek-V3 is `Routing(num_experts=256, top_k=8, score="sigmoid",
    scale=2.5, groups=8, top_groups=4)` with a bias; Switch is `Routing(num_experts=64, top_k=1, normalize=False,
    capacity_factor=1.25)`.
    """

    num_experts: int
    """Experts to choose from, on all ranks together; shared experts, which every token visits, are not among them."""
    top_k: int
    """Experts of a token; with choice="expert", the mean of that number."""
    score: Score = "softmax"
    """From logit to score: "softmax" lets experts compete, "sigmoid" scores each by itself."""
    normalize: bool = True
    """Whether the weights of a token's chosen experts are made to add up to `scale`."""
    scale: float = 1.0
    """What every weight is multiplied by at last."""
    groups: int = 1
    """Equal runs of neighbouring experts, of which a token may visit only the best `top_groups` (choice="token")."""
    top_groups: int = 1
    """Groups a token may visit. A group's score is the sum of its two best biased scores."""
    choice: Choice = "token"
    """Who chooses: every token its `top_k` experts, or every expert its T·top_k/E tokens."""
    capacity_factor: float | None = None
    """Room at an expert, in multiples of what it gets when all get the same; None: as much as needed, nothing drops."""
    causal: bool = True
    """Whether the model predicts a token from those before it, as a language model does."""
    force: bool = False
    """Allows choice="expert" in a causal model all the same."""

    def __post_init__(self) -> None:
        for field, options in (("score", Score), ("choice", Choice)):
            check_choice("Routing", field, getattr(self, field), get_args(options))
        for field in ("num_experts", "top_k", "groups", "top_groups"):
            check_whole("Routing", field, getattr(self, field))
        for field in ("normalize", "causal", "force"):
            if not isinstance(getattr(self, field), bool):
                asked = f"be {getattr(self, field)!r}"
                raise problem(f"Routing({field}=...)", asked, "it is True or False", f"write {field}=True, or False")
        self._check_top_k()
        self._check_groups()
        check_positive("Routing", "scale", self.scale, "1.0")
        if self.capacity_factor is not None:
            check_positive("Routing", "capacity_factor", self.capacity_factor, "1.25, or None to drop nothing")
        if self.choice == "expert":
            self._check_expert_choice()

    def nodes_visited(self, nodes: int) -> int:
        """How many of so many equal runs of neighbouring experts the choices of a token lie in at the most."""
        most = min(nodes, self.top_k)
        if nodes % self.groups == 0 or self.groups % nodes == 0:
            most = min(most, self.top_groups * max(1, nodes // self.groups))
        return most

    def _check_top_k(self) -> None:
        reachable = self.num_experts // self.groups * self.top_groups
        if self.top_k > reachable:
            where = f"{self.num_experts} experts" + (f", {reachable} in {self.top_groups} groups" * (self.groups > 1))
            asked = f"send a token to {self.top_k} different experts"
            raise problem("Routing(top_k=...)", asked, f"it may choose among {where}", f"use at most {reachable}")
        if self.top_k == 1 and self.normalize and self.choice == "token":
            asked = "make the weights of one chosen expert add up to a constant"
            exists = "that weight is then the constant itself, and the router gets no gradient from the loss"
            raise problem("Routing(normalize=True)", asked, exists, "use normalize=False, or a top_k of at least 2")

    def _check_groups(self) -> None:
        if self.num_experts % self.groups or self.top_groups > self.groups:
            asked = f"cut {self.num_experts} experts into {self.groups} groups and visit {self.top_groups}"
            exists = "groups are equal, and there are no more to visit than there are"
            fix = f"use a divisor of {self.num_experts}, and top_groups up to it"
            raise problem("Routing(groups=..., top_groups=...)", asked, exists, fix)

    def _check_expert_choice(self) -> None:
        if self.causal and not self.force:
            raise problem(
                'Routing(choice="expert")',
                "let experts choose tokens in a causal model",
                "an expert compares all tokens it sees before it picks, so what happens to a token would depend on "
                "later ones: the training loss leaks the future, and no decoder can repeat it token by token",
                'use choice="token"; causal=False if the model sees whole sequences; force=True to do it anyway',
            )
        unused = {"groups": self.groups != 1, "capacity_factor": self.capacity_factor is not None}
        if any(unused.values()):
            field = next(name for name, given in unused.items() if given)
            raise problem(
                f'Routing(choice="expert", {field}={getattr(self, field)!r})',
                f"use {field}",
                f"it is for tokens that choose; an expert takes tokens·{self.top_k}/{self.num_experts} of them, always",
                f"leave {field} out",
            )
        if self.normalize:
            asked = "make the weights of a token's experts add up to a constant"
            exists = "which experts a token gets is up to them, it may be none"
            raise problem('Routing(choice="expert", normalize=True)', asked, exists, "use normalize=False")


class Routed(NamedTuple):
    """What a router decided. With choice="expert" there are k = E columns, one for each expert."""

    experts: Int32[Array, "T k"]
    """The chosen, from the best on; E, unassigned, where there is none (choice="expert" only)."""
    weights: Float[Array, "T k"]
    """What their outputs are multiplied by; 0 where unassigned."""
    scores: Float[Array, "T E"]
    """Of every expert, without the bias."""


def route(logits: Float[Array, "T E"], routing: Routing, *, bias: Float[Array, " E"] | None = None) -> Routed:
    """The experts of every token, and their weights, computed in float32 at least.

    Ties go to the lowest expert (with choice="expert", to the earliest token). Weights and scores are differentiable,
    the choice is not. Normalised weights are computed from the logits of the chosen alone, so they are exact however
    small the scores; none of the weights depends to the bit on the order in which the experts are numbered.

    Source: Shazeer et al. 2017 (top-k gating); Fedus et al. 2022, "Switch Transformers" (top 1); Zhou et al. 2022,
    "Mixture-of-Experts with Expert Choice Routing"; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2 (sigmoid scores,
    groups, and the bias).

    Args:
      logits: of the router, for the tokens at hand; nothing is sent, and experts choose among these tokens only.
      routing: how.
      bias: added to the scores for the choice alone; no gradient goes through it. See `balance.update_bias`.

    Raises:
      ValueError: logits that are not [tokens, num_experts] of floating numbers; a bias of another shape, or one for
        experts that choose, who are balanced already.
    """
    _check_arrays(logits, routing, bias)
    with jax.named_scope("route"):
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        scores = _softmax(logits) if routing.score == "softmax" else jax.nn.sigmoid(logits)
        if routing.choice == "expert":
            experts, gates = _chosen_by_experts(scores, routing)
        else:
            experts = _chosen_by_tokens(logits, scores, routing, bias)
            gates = _normalized(logits, experts, routing) if routing.normalize else _of(experts, scores)
        return Routed(experts, gates * routing.scale, scores)


def capacity(tokens: int, routing: Routing) -> int:
    """Tokens that an expert has room for, of `tokens` that one device routes: ⌈tokens · k / E · factor⌉.

    At most `tokens`, since a token visits an expert once: that is also the answer without a factor. With
    choice="expert", how many each expert takes.

    Source: Fedus et al. 2022, "Switch Transformers", section 2.2 (k = 1).

    Raises:
      ValueError: a number of tokens that is none.
    """
    check_whole("capacity", "tokens", tokens, least=0)
    if routing.capacity_factor is None and routing.choice == "token":
        return tokens
    # In floating point, 200 times 2.2 is above 440, and 55 places an expert would be rounded up to 56.
    factor = Fraction(str(routing.capacity_factor or 1))
    return min(tokens, math.ceil(tokens * routing.top_k * factor / routing.num_experts))


def kept(experts: Int[Array, "T k"], capacity: int, num_experts: int) -> tuple[Int32[Array, "T k"], Bool[Array, "T k"]]:
    """(slot, kept): each choice's number at its expert, counted from 0, and whether there is room for it.

    Room goes to the earliest token, and among one token's choices to the first: choices are numbered as they stand in
    `experts`, row by row. So what drops is the same in every run, and what is at the end of a batch drops first.
    A slot is counted on past the capacity; an unassigned choice (see `or_unassigned`) is never kept.

    No temporary is larger than a few times `experts`: choices are sorted, not compared with every expert.

    Raises:
      ValueError: experts that are no whole numbers; a capacity below 0; no expert at all.
    """
    check_array("kept", "experts", experts, "T k", "whole")
    check_whole("kept", "capacity", capacity, least=0)
    check_whole("kept", "num_experts", num_experts)
    experts = or_unassigned(experts, num_experts)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    by_expert = flat[order]
    chosen = count(flat, num_experts + 1)  # the unassigned among them
    first = jnp.cumsum(chosen, dtype=jnp.int32) - chosen
    number = jnp.arange(flat.size, dtype=jnp.int32) - first[by_expert]
    slot = jnp.zeros_like(number).at[order].set(number, unique_indices=True).reshape(experts.shape)
    return slot, (slot < capacity) & (experts < num_experts)


def count(experts: Int[Array, ...], num_experts: int) -> Int32[Array, " E"]:
    """How often each expert was chosen; unassigned choices are not counted.

    Raises:
      ValueError: experts that are no whole numbers; no expert at all.
    """
    check_array("count", "experts", experts, "...", "whole")
    check_whole("count", "num_experts", num_experts)
    flat = or_unassigned(experts, num_experts).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")


def entropy(scores: Float[Array, "T E"]) -> Float[Array, " T"]:
    """Of each token's scores, divided by their sum, in nats."""
    shares = scores / jnp.maximum(scores.sum(-1, keepdims=True), jnp.finfo(scores.dtype).tiny)
    return -jax.scipy.special.xlogy(shares, shares).sum(-1)


def or_unassigned(experts: Int[Array, "*dims"], num_experts: int) -> Int32[Array, "*dims"]:
    """Numbers from 0 to E - 1 as they are, and E, which means unassigned, for all others."""
    return jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).astype(jnp.int32)


# ---- Choosing --------------------------------------------------------------------------------------------------------


def _chosen_by_tokens(logits: jax.Array, scores: jax.Array, routing: Routing, bias: jax.Array | None) -> jax.Array:
    """`[T, E] -> [T, k]`: the best, from the best on.

    Where the scores are compared as they are, the logits do as well, and no rounding has made them equal: sigmoid
    scores of logits above 17 are all 1 in float32.
    """
    ranked = logits if bias is None and routing.groups == 1 else scores
    if bias is not None:
        ranked = ranked + bias.astype(ranked.dtype)
    ranked = lax.stop_gradient(ranked)
    if routing.groups > 1:
        ranked = _in_best_groups(ranked, routing)
    return lax.top_k(ranked, routing.top_k)[1].astype(jnp.int32)


def _in_best_groups(scores: jax.Array, routing: Routing) -> jax.Array:
    """The scores, those outside a token's best groups replaced by -inf."""
    in_groups = scores.reshape(len(scores), routing.groups, -1)
    two_best, _ = lax.top_k(in_groups, min(2, in_groups.shape[-1]))
    _, best = lax.top_k(two_best.sum(-1), routing.top_groups)
    allowed = jax.nn.one_hot(best, routing.groups, dtype=bool).any(1)
    return jnp.where(allowed[..., None], in_groups, -jnp.inf).reshape(scores.shape)


def _of(experts: jax.Array, of_all: jax.Array) -> jax.Array:
    """`[T, k], [T, E] -> [T, k]`."""
    return jnp.take_along_axis(of_all, experts, axis=-1)


def _normalized(logits: jax.Array, experts: jax.Array, routing: Routing) -> jax.Array:
    """`[T, E], [T, k] -> [T, k]`: scores of the chosen over their sum.

    Divided as they stand, they would be 0/0 where all of a token's chosen scores underflow.
    """
    log_scores = logits if routing.score == "softmax" else jax.nn.log_sigmoid(logits)
    return jax.nn.softmax(_of(experts, log_scores))


@jax.custom_jvp
def _softmax(logits: jax.Array) -> jax.Array:
    """A score has the same bits wherever its expert stands among the others."""
    powers = jnp.exp(logits - logits.max(-1, keepdims=True))
    return powers / _sum_in_any_order(powers)


@_softmax.defjvp
def _softmax_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    scores, (moved,) = _softmax(*primals), tangents
    return scores, scores * (moved - (scores * moved).sum(-1, keepdims=True))


def _sum_in_any_order(shares: jax.Array) -> jax.Array:
    """The sum over the last dim of numbers from 0 to 1, with the same bits in whatever order they stand.

    Each is cut into three parts of so few bits that parts add up without rounding. What is cut off behind them is less
    than the sum's own rounding, for up to 4096 numbers above a largest of 1.
    """
    bits = jnp.finfo(shares.dtype).nmant + 1 - (shares.shape[-1] - 1).bit_length()
    total, rest = jnp.zeros((*shares.shape[:-1], 1), shares.dtype), shares
    for level in (1, 2, 3):
        part = jnp.round(rest * 2.0 ** (bits * level)) * 2.0 ** (-bits * level)
        total += part.sum(-1, keepdims=True)
        rest -= part
    return total


def _chosen_by_experts(scores: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """`[T, E] -> [T, E], [T, E]`: column e is expert e with its score where it took the token, else E with 0."""
    tokens, num_experts = scores.shape
    _, taken = lax.top_k(lax.stop_gradient(scores).T, capacity(tokens, routing))
    takes = jnp.zeros((num_experts, tokens), bool).at[jnp.arange(num_experts)[:, None], taken].set(True).T
    experts = jnp.where(takes, jnp.arange(num_experts, dtype=jnp.int32), num_experts)
    return experts, jnp.where(takes, scores, 0.0)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_arrays(logits: jax.Array, routing: Routing, bias: jax.Array | None) -> None:
    num_experts = routing.num_experts
    if not hasattr(logits, "dtype"):
        check_array("route", "logits", logits, "T E")
    if logits.ndim != 2 or logits.shape[1] != num_experts or not jnp.issubdtype(logits.dtype, jnp.floating):
        exists = f"they are floating numbers [tokens, {num_experts}], one for each of the {num_experts} experts"
        fix = "merge batch and sequence into one dim of tokens, and check num_experts"
        raise problem("route", f"route by logits of shape {logits.shape} and dtype {logits.dtype}", exists, fix)
    if bias is None:
        return
    if routing.choice == "expert":
        exists = "every expert takes the same number of tokens anyway"
        raise problem("route", "balance experts that choose with a bias", exists, "leave the bias out")
    check_array("route", "bias", bias, "...")
    if bias.shape != (num_experts,):
        raise problem(
            "route", f"use a bias of shape {bias.shape}", f"there are {num_experts} experts", f"give ({num_experts},)"
        )
