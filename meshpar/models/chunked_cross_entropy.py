"""Cross entropy of hidden states and an output matrix, a chunk of the vocabulary at a time: no logits of all tokens.

    hidden states [B T E] ─┐
    a chunk of the matrix  ├─► its logits [B T C] ─► running max, sum of exponentials, the target's logit [B T]
    ... one after the other┘                         backward: the same logits again, into gradients of both

A rank that holds a part of the vocabulary runs through its own part, so the chunks of all ranks stand side by side in
a dim R that the compiler keeps split; what ranks exchange is what plain logits make them exchange, once behind the
loop. Where the width of the matrix is sharded, each chunk is gathered while the one before it is used, and its gradient
scattered. The backward pass takes the chunks in reverse, from the last, which is still there.

Shape suffixes: B batch, T positions, E width, V vocabulary, R ranks that hold parts of it, N chunks of a part, C tokens
of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from meshpar.collectives.attention import capped
from meshpar.layers.precision import weight_grad_dtype
from meshpar.sharding.context import ambient, constrain, spec_of
from meshpar.sharding.types import axis_sizes, spec_axes

SCOPE = "vocabulary_chunks"
"""Of the loops over chunks: how a traced step shows that it has them, and how many."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedding:
    """Logits that nobody has made: hidden states, and the matrix that would make them."""

    h_BTE: Float[Array, "B T E"]
    matrix: Array
    """`[V, E]`, a table of embeddings, or `[E, V]`."""
    vocab_dim: int = dataclasses.field(metadata={"static": True})
    """Which of its dims is V."""
    chunk_size: int = dataclasses.field(metadata={"static": True})
    """Tokens of the vocabulary, on one rank, whose logits are made at a time; at the most."""
    cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    """Logits l are `cap tanh(l / cap)`; None: as the matrix makes them."""


class TokenLosses(NamedTuple):
    """Of every token."""

    nats_BT: Float[Array, "B T"]
    best_BT: Bool[Array, "B T"]
    """Whether no other token has a higher logit than the target."""
    log_z_BT: Float[Array, "B T"]
    """Logarithm of the sum of all exponentials."""

    def only_in_vocab(self, targets_BT: Integer[Array, "B T"], vocab_size: int) -> TokenLosses:
        """Return the losses with nan for targets outside the vocabulary, which are never the best."""
        in_vocab_BT = (targets_BT >= 0) & (targets_BT < vocab_size)
        nats_BT = jnp.where(in_vocab_BT, self.nats_BT, jnp.nan)
        return TokenLosses(nats_BT, self.best_BT & in_vocab_BT, self.log_z_BT)


def chunked_cross_entropy(logits: Unembedding, targets_BT: Integer[Array, "B T"]) -> TokenLosses:
    """What `cross_entropy` makes of whole logits.

    The largest array holds logits of one chunk, `[B, T, C]` in float32 at the least, forward and backward; the backward
    pass makes them again, which costs a third more FLOPs in the output layer. Softmax runs over chunks as in Milakov
    and Gimelshein 2018, "Online normalizer calculation for softmax".

    Args:
      logits: inside of `mp.use_rules`; its matrix as the parameter lies.
      targets_BT: integers below V; others give nan.
    """
    dtype = jnp.result_type(logits.h_BTE, logits.matrix)
    h_BTE, matrix = logits.h_BTE.astype(dtype), logits.matrix.astype(dtype)
    plan = _Plan.of(matrix, logits)
    losses = TokenLosses(*_cross_entropy(plan, h_BTE, matrix, targets_BT))
    return losses.only_in_vocab(targets_BT, matrix.shape[logits.vocab_dim])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a matrix is cut."""

    dim: int
    ranks: int
    per_rank: int
    """Tokens of a rank's part."""
    num: int
    """Chunks of a part."""
    cap: float | None

    @staticmethod
    def of(matrix: Array, logits: Unembedding) -> _Plan:
        vocab, here = matrix.shape[logits.vocab_dim], ambient()
        spec = spec_of(jax.ShapeDtypeStruct((vocab,), matrix.dtype), "act_vocab")
        assert here is not None
        ranks = math.prod(axis_sizes(here.mesh)[axis] for entry in spec for axis in spec_axes(entry))
        return _Plan(logits.vocab_dim, ranks, vocab // ranks, -(-vocab // ranks // logits.chunk_size), logits.cap)

    @property
    def size(self) -> int:
        """Tokens of a chunk; the last one may be filled up."""
        return -(-self.per_rank // self.num)

    def cut(self, matrix: Array) -> Array:
        """`[V, E]` -> `[R, N, C, E]`, or `[E, V]` -> `[E, R, N, C]`. No rank's part moves."""
        before, after = matrix.shape[: self.dim], matrix.shape[self.dim + 1 :]
        parts = matrix.reshape(*before, self.ranks, self.per_rank, *after)
        filled = [(0, 0)] * parts.ndim
        filled[self.dim + 1] = (0, self.num * self.size - self.per_rank)
        return jnp.pad(parts, filled).reshape(*before, self.ranks, self.num, self.size, *after)

    def joined(self, cut: Array) -> Array:
        """`cut` undone."""
        before, after = cut.shape[: self.dim], cut.shape[self.dim + 3 :]
        parts = cut.reshape(*before, self.ranks, self.num * self.size, *after)
        parts = lax.slice_in_dim(parts, 0, self.per_rank, axis=self.dim + 1)
        return parts.reshape(*before, self.ranks * self.per_rank, *after)

    def chunk(self, cut: Array, index: Array | int) -> Array:
        """`[R, C, E]` or `[E, R, C]`, gathered over the axes that shard its width."""
        one = lax.dynamic_index_in_dim(cut, index, self.dim + 1, keepdims=False)
        return constrain(one, *("act_embed",) * self.dim, "act_vocab", None, *("act_embed",) * (1 - self.dim))

    @property
    def letters(self) -> str:
        """Of a chunk's dims, for einsum."""
        return "ERC" if self.dim else "RCE"

    def logits(
        self, h_BTE: Array, chunk: Array, index: Array | int, targets_BT: Array
    ) -> tuple[Array, Array, Array | float]:
        """`[B, T, R, C]`: the logits of a chunk, where they are the target's, and the cap's derivative."""
        wide = jnp.promote_types(h_BTE.dtype, jnp.float32)
        l_BTRC = jnp.einsum(f"BTE,{self.letters}->BTRC", h_BTE, chunk, preferred_element_type=wide)
        l_BTRC = constrain(l_BTRC, "batch", "seq", "act_vocab", None)
        l_BTRC, slope_BTRC = capped(l_BTRC, self.cap)
        at_C = index * self.size + jnp.arange(self.size)
        if self.num * self.size != self.per_rank:
            l_BTRC = jnp.where(at_C < self.per_rank, l_BTRC, jnp.finfo(wide).min)
        first_R1 = self.per_rank * jnp.arange(self.ranks)[:, None]
        ids_RC = jnp.where(at_C < self.per_rank, first_R1 + at_C, jnp.iinfo(jnp.int32).min)
        return l_BTRC, targets_BT[..., None, None] == ids_RC, slope_BTRC


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(plan: _Plan, h_BTE: Array, matrix: Array, targets_BT: Array) -> tuple[Array, Array, Array]:
    return _forward(plan, h_BTE, matrix, targets_BT)[0]


def _forward(plan: _Plan, h_BTE: Array, matrix: Array, targets_BT: Array) -> tuple[tuple[Array, Array, Array], tuple]:
    cut = plan.cut(matrix)

    def used(sums: tuple[Array, Array, Array], chunk: Array, index: Array | int) -> tuple[Array, Array, Array]:
        max_BTR, sum_BTR, target_BTR = sums
        l_BTRC, is_target_BTRC, _ = plan.logits(h_BTE, chunk, index, targets_BT)
        above_BTR = jnp.maximum(max_BTR, l_BTRC.max(-1))
        sum_BTR = sum_BTR * jnp.exp(max_BTR - above_BTR) + jnp.exp(l_BTRC - above_BTR[..., None]).sum(-1)
        return above_BTR, sum_BTR, jnp.maximum(target_BTR, jnp.where(is_target_BTRC, l_BTRC, -jnp.inf).max(-1))

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        sums, chunk = carry
        ahead = plan.chunk(cut, index + 1)
        return (used(sums, chunk, index), ahead), None

    wide = jnp.promote_types(h_BTE.dtype, jnp.float32)
    zeros_BTR = constrain(jnp.zeros((*h_BTE.shape[:2], plan.ranks), wide), "batch", "seq", "act_vocab")
    nothing_BTR = jnp.full_like(zeros_BTR, -jnp.inf)
    start = (nothing_BTR, zeros_BTR, nothing_BTR)
    with jax.named_scope(SCOPE):
        (sums, last), _ = lax.scan(step, (start, plan.chunk(cut, 0)), jnp.arange(plan.num - 1))
        max_BTR, sum_BTR, target_BTR = used(sums, last, plan.num - 1)
    max_BT = max_BTR.max(-1)
    sum_BT = (sum_BTR * jnp.exp(max_BTR - max_BT[..., None])).sum(-1)
    target_BT = target_BTR.max(-1)
    # A finite number for targets outside the vocabulary: the caller replaces their loss.
    target_BT = jnp.where(jnp.isneginf(target_BT), max_BT, target_BT)
    log_BT = jnp.log(sum_BT)
    out = log_BT - (target_BT - max_BT), target_BT == max_BT, max_BT + log_BT
    return out, (h_BTE, matrix, targets_BT, max_BT, sum_BT, last)


def _backward(plan: _Plan, saved: tuple, slopes: tuple[Array, Array, Array]) -> tuple[Array, Array, None]:
    h_BTE, matrix, targets_BT, max_BT, sum_BT, last = saved
    d_nats_BT, _, d_log_z_BT = slopes
    cut, letters = plan.cut(matrix), plan.letters
    odds_BT11 = ((d_nats_BT + d_log_z_BT) / sum_BT)[..., None, None]
    reduce = weight_grad_dtype(matrix.dtype) or jnp.promote_types(matrix.dtype, jnp.float32)

    def used(d_h_RBTE: Array, chunk: Array, index: Array | int) -> tuple[Array, Array]:
        l_BTRC, is_target_BTRC, slope_BTRC = plan.logits(h_BTE, chunk, index, targets_BT)
        d_BTRC = jnp.exp(l_BTRC - max_BT[..., None, None]) * odds_BT11
        d_BTRC = slope_BTRC * (d_BTRC - jnp.where(is_target_BTRC, d_nats_BT[..., None, None], 0))
        d_BTRC = d_BTRC.astype(h_BTE.dtype)
        # Ranks keep their shares of the gradient apart until the last chunk: one sum, not one a chunk.
        share_RBTE = jnp.einsum(f"BTRC,{letters}->RBTE", d_BTRC, chunk, preferred_element_type=d_h_RBTE.dtype)
        d_h_RBTE = constrain(d_h_RBTE + share_RBTE, "act_vocab", "batch", "seq", "act_embed")
        d_chunk = jnp.einsum(f"BTRC,BTE->{letters}", d_BTRC, h_BTE, preferred_element_type=reduce)
        return d_h_RBTE, d_chunk.astype(cut.dtype)

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], Array]:
        d_h_RBTE, chunk = carry
        ahead = plan.chunk(cut, jnp.maximum(index - 1, 0))
        d_h_RBTE, d_chunk = used(d_h_RBTE, chunk, index)
        return (d_h_RBTE, ahead), d_chunk

    with jax.named_scope(SCOPE):
        ahead = plan.chunk(cut, max(plan.num - 2, 0))
        d_h_RBTE, d_last = used(jnp.zeros((plan.ranks, *h_BTE.shape), sum_BT.dtype), last, plan.num - 1)
        (d_h_RBTE, _), d_rest = lax.scan(step, (d_h_RBTE, ahead), jnp.arange(plan.num - 1), reverse=True)
    d_cut = jnp.moveaxis(jnp.concatenate([d_rest, d_last[None]]), 0, plan.dim + 1)
    # lax.reduce, for jnp.sum would send a narrow dtype as float32.
    d_h_RBTE = d_h_RBTE.astype(h_BTE.dtype)
    d_h_BTE = lax.reduce(d_h_RBTE, jnp.zeros((), h_BTE.dtype), lax.add, (0,))
    return d_h_BTE, plan.joined(d_cut), None


_cross_entropy.defvjp(_forward, _backward)
