"""Cross entropy with logits computed in chunks of the vocabulary.

    hidden states [B T E]    ─┐
    a chunk of the matrix     ├─► its logits [B T C] ─► running max, sum of exponentials, target logit [B T]
    ... for all chunks       ─┘                         backward: recomputed logits, gradients of both inputs

If the vocabulary is sharded, each device iterates over its shard. The chunks of all shards form a sharded dim R, and
the communication is the same as with unchunked logits, after the loop. If the width of the matrix is sharded, each
chunk is all-gathered while the previous chunk is used, and its gradient is reduce-scattered. The backward pass iterates
in reverse order, because the last chunk is still in memory.

Shape suffixes: B batch, T positions, E embedding dimension, V vocabulary, R vocabulary shards, N chunks of a shard, C
tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meshpar.collectives.attention import capped
from meshpar.layers.precision import weight_grad_dtype
from meshpar.sharding.context import ambient, constrain, spec_of
from meshpar.sharding.types import num_shards

SCOPE = "vocabulary_chunks"
"""Name scope of the loops over chunks, for the inspection of traced steps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedding:
    """Logits that are not computed yet: hidden states and the matrix of the output layer."""

    h_BTE: Float[Array, "B T E"]
    matrix: Array
    """Embedding table `[V, E]`, or kernel of the output layer `[E, V]`."""
    vocab_dim: int = dataclasses.field(metadata={"static": True})
    """Index of the V dim of `matrix`."""
    chunk_size: int = dataclasses.field(metadata={"static": True})
    """Maximum number of tokens in a chunk of the local vocabulary."""
    cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    """Logits l become `cap tanh(l / cap)`. `None` means no cap."""


class TokenLosses(NamedTuple):
    """Loss and statistics of each token."""

    nats_BT: Float[Array, "B T"]
    best_BT: Bool[Array, "B T"]
    """Whether the target has the largest logit."""
    log_z_BT: Float[Array, "B T"]
    """Logarithm of the sum of the exponentials of the logits."""

    def only_in_vocab(self, targets_BT: Array, vocab_size: int) -> TokenLosses:
        """Set the losses of targets outside the vocabulary to nan, and their `best_BT` to False."""
        in_vocab_BT = (targets_BT >= 0) & (targets_BT < vocab_size)
        nats_BT = jnp.where(in_vocab_BT, self.nats_BT, jnp.nan)
        return TokenLosses(nats_BT, self.best_BT & in_vocab_BT, self.log_z_BT)


def chunked_cross_entropy(logits: Unembedding, targets_BT: Array) -> TokenLosses:
    """Compute the results of `cross_entropy` without the full logits.

    The largest array has the logits of a chunk, `[B, T, C]` in float32 or higher precision. The backward pass
    recomputes them, which adds a third to the FLOPs of the output layer. The softmax over chunks is that of Milakov and
    Gimelshein 2018, "Online normalizer calculation for softmax". Call this function inside `mp.use_rules`.
    """
    dtype = jnp.result_type(logits.h_BTE, logits.matrix)
    h_BTE, matrix = logits.h_BTE.astype(dtype), logits.matrix.astype(dtype)
    plan = _Plan.of(matrix, logits)
    losses = TokenLosses(*_cross_entropy(plan, h_BTE, matrix, targets_BT))
    return losses.only_in_vocab(targets_BT, matrix.shape[logits.vocab_dim])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Partition of the vocabulary into shards and chunks."""

    dim: int
    """Index of the vocabulary dim of the matrix."""
    ranks: int
    """Number of shards."""
    per_rank: int
    """Tokens of a shard."""
    num: int
    """Chunks of a shard."""
    cap: float | None

    @staticmethod
    def of(matrix: Array, logits: Unembedding) -> _Plan:
        vocab, context = matrix.shape[logits.vocab_dim], ambient()
        spec = spec_of(jax.ShapeDtypeStruct((vocab,), matrix.dtype), "act_vocab")
        assert context is not None
        ranks = num_shards(spec, context.mesh)
        return _Plan(logits.vocab_dim, ranks, vocab // ranks, -(-vocab // ranks // logits.chunk_size), logits.cap)

    @property
    def size(self) -> int:
        """Tokens of a chunk. The last chunk of a shard may be padded."""
        return -(-self.per_rank // self.num)

    def cut(self, matrix: Array) -> Array:
        """Reshape `[V, E]` to `[R, N, C, E]`, or `[E, V]` to `[E, R, N, C]`, without communication."""
        before, after = matrix.shape[: self.dim], matrix.shape[self.dim + 1 :]
        shards = matrix.reshape(*before, self.ranks, self.per_rank, *after)
        padding = [(0, 0)] * shards.ndim
        padding[self.dim + 1] = (0, self.num * self.size - self.per_rank)
        return jnp.pad(shards, padding).reshape(*before, self.ranks, self.num, self.size, *after)

    def joined(self, cut: Array) -> Array:
        """Reshape `[R, N, C, E]` to `[V, E]`, or `[E, R, N, C]` to `[E, V]`, and remove the padding."""
        before, after = cut.shape[: self.dim], cut.shape[self.dim + 3 :]
        shards = cut.reshape(*before, self.ranks, self.num * self.size, *after)
        shards = lax.slice_in_dim(shards, 0, self.per_rank, axis=self.dim + 1)
        return shards.reshape(*before, self.ranks * self.per_rank, *after)

    def chunk(self, cut: Array, index: Array | int) -> Array:
        """Return the chunk `[R, C, E]` or `[E, R, C]`, all-gathered over the axes that shard its width."""
        chunk = lax.dynamic_index_in_dim(cut, index, self.dim + 1, keepdims=False)
        return constrain(chunk, *("act_embed",) * self.dim, "act_vocab", None, *("act_embed",) * (1 - self.dim))

    @property
    def letters(self) -> str:
        """Letters of the dims of a chunk, for einsum."""
        return "ERC" if self.dim else "RCE"

    def logits(
        self, h_BTE: Array, chunk: Array, index: Array | int, targets_BT: Array
    ) -> tuple[Array, Array, Array | float]:
        """Return `[B, T, R, C]` arrays: logits of a chunk, a mask of the targets, and the derivative of the cap."""
        dtype = jnp.promote_types(h_BTE.dtype, jnp.float32)
        l_BTRC = jnp.einsum(f"BTE,{self.letters}->BTRC", h_BTE, chunk, preferred_element_type=dtype)
        l_BTRC = constrain(l_BTRC, "batch", "seq", "act_vocab", None)
        l_BTRC, slope_BTRC = capped(l_BTRC, self.cap)
        offset_C = index * self.size + jnp.arange(self.size)
        if self.num * self.size != self.per_rank:
            l_BTRC = jnp.where(offset_C < self.per_rank, l_BTRC, jnp.finfo(dtype).min)
        first_R1 = self.per_rank * jnp.arange(self.ranks)[:, None]
        ids_RC = jnp.where(offset_C < self.per_rank, first_R1 + offset_C, jnp.iinfo(jnp.int32).min)
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

    dtype = jnp.promote_types(h_BTE.dtype, jnp.float32)
    zeros_BTR = constrain(jnp.zeros((*h_BTE.shape[:2], plan.ranks), dtype), "batch", "seq", "act_vocab")
    minus_inf_BTR = jnp.full_like(zeros_BTR, -jnp.inf)
    start = (minus_inf_BTR, zeros_BTR, minus_inf_BTR)
    with jax.named_scope(SCOPE):
        (sums, last), _ = lax.scan(step, (start, plan.chunk(cut, 0)), jnp.arange(plan.num - 1))
        max_BTR, sum_BTR, target_BTR = used(sums, last, plan.num - 1)
    max_BT = max_BTR.max(-1)
    sum_BT = (sum_BTR * jnp.exp(max_BTR - max_BT[..., None])).sum(-1)
    target_BT = target_BTR.max(-1)
    # Use a finite value for targets outside the vocabulary. The caller replaces their loss.
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
        # Each shard accumulates its share of the gradient over all chunks, so that there is a single reduction.
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
    # jnp.sum would communicate a low-precision gradient in float32.
    d_h_RBTE = d_h_RBTE.astype(h_BTE.dtype)
    d_h_BTE = lax.reduce(d_h_RBTE, jnp.zeros((), h_BTE.dtype), lax.add, (0,))
    return d_h_BTE, plan.joined(d_cut), None


_cross_entropy.defvjp(_forward, _backward)
