"""The analysis of a loss distinguishes sums over independent examples from losses that combine examples."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from meshpar.layers.example_flow import examine
from meshpar.layers.example_values import per_example, varying

B, D = 6, 8
nats = optax.softmax_cross_entropy_with_integer_labels


def verdict(loss, *shapes):
    """Return the kind of a loss (w [D, D], x [B, D] or other shapes, y [B, D], labels [B])."""
    shapes = shapes or ((B, D),)
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((D, D), *shapes, (B, D))]
    args.append(jax.ShapeDtypeStruct((B,), np.int32))
    examination = examine(jax.make_jaxpr(loss)(*args), [varying((D, D)), *(per_example(arg.shape) for arg in args[1:])])
    return None if examination.combined is None else examination.combined.kind


def chosen_and_rejected(w, x, y, i):
    """The concatenated forward pass of Rafailov et al. 2023, Direct Preference Optimization."""
    rewards = (jnp.concatenate([x, y]) @ w).sum(-1)
    return jax.nn.log_sigmoid(rewards[:B] - rewards[B:]).sum()


def in_a_scope_of_experts(w, x, y, i):
    with jax.named_scope("moe"):
        return (x - x.mean(0)).sum()


def dropout(w, x, y, i):
    return (jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0) @ w).sum()


def recurrent(w, x, y, i):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0].sum()


def masked_at_random(w, x, y, i):
    """A total and its weight, as in masked language models."""
    mask = jax.random.bernoulli(jax.random.key(0), 0.15, (B,))
    return (nats(x @ w, i) * mask).sum(), mask.sum()


def mean_at_random(w, x, y, i):
    total, weight = masked_at_random(w, x, y, i)
    return total / weight


def class_token(w, x, y, i):
    return (jnp.concatenate([jnp.tile(w[:1], (B, 1, 1)), x[:, None]], axis=1) @ w).sum()


def loop_of_each_example(w, x, y, i):
    return jax.vmap(lambda x: lax.while_loop(lambda x: x.max() < 3, lambda x: 2 * x, x))(x).sum()


def unconditional(w, x, y, i):
    """Classifier-free guidance, Ho and Salimans 2022."""
    conditional, other = jnp.split(jnp.concatenate([x, jnp.zeros_like(x)]) @ w, 2)
    return ((2 * conditional - other - y) ** 2).sum()


def real_and_generated(w, x, y, i):
    logits = (jnp.concatenate([x, y]) @ w)[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, jnp.concatenate([jnp.ones(B), jnp.zeros(B)])).sum()


def with_backward(backward):
    """Return the identity with a backward pass of its own, as a loss."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, x), lambda x, g: (backward(g),))
    return lambda w, x, y, i: (identity(x @ w) * y).sum()


INDEPENDENT = {
    "cross entropy": lambda w, x, y, i: nats(x @ w, i).sum(),
    "one-hot labels": lambda w, x, y, i: (jax.nn.log_softmax(x @ w) * jax.nn.one_hot(i, D)).sum(),
    "indexed labels": lambda w, x, y, i: jax.nn.log_softmax(x @ w)[jnp.arange(B), i].sum(),
    "flat tokens": lambda w, x, y, i: jnp.square((x.reshape(-1) * 2).reshape(2 * B, -1).T).sum(),
    "pairs within an example": chosen_and_rejected,
    "dropout": dropout,
    "layer norm": lambda w, x, y, i: nnx.LayerNorm(D, rngs=nnx.Rngs(0))(x).sum(),
    "recurrence": recurrent,
    "loop": lambda w, x, y, i: lax.fori_loop(0, 3, lambda step, x: x @ w, x).sum(),
    "sum in a loop over features": lambda w, x, y, i: lax.scan(lambda c, a: (c + (a**2).sum(), None), 0.0, x.T)[0],
    "vmap over examples": lambda w, x, y, i: jax.vmap(lambda x, y: jnp.dot(x @ w, y))(x, y).sum(),
    "map over examples": lambda w, x, y, i: lax.map(lambda x: (x @ w).sum(), x).sum(),
    "map over groups of examples": lambda w, x, y, i: lax.map(lambda x: jnp.tanh(x @ w), x, batch_size=2).sum(),
    "contraction of the batch": lambda w, x, y, i: jnp.einsum("bd,de,be->", x, w, y),
    "counts of labels": lambda w, x, y, i: (jnp.zeros(D).at[i].add(1.0) * 2).sum(),
    "a term of 0": lambda w, x, y, i: (x @ w).sum() + 0.0 * (w**2).sum(),
    "checkpoint": lambda w, x, y, i: jax.checkpoint(lambda x: jnp.sin(x @ w))(x).sum(),
    "order statistics of an example": lambda w, x, y, i: (jnp.sort(x) - lax.top_k(x, 1)[0]).sum(),
    "repeated examples": lambda w, x, y, i: (jnp.tile(x, (3, 2)).reshape(3, B, -1).max(0) * jnp.tile(y, 2)).sum(),
    "class token": class_token,
    "examples and zeros": unconditional,
    "labels of concatenated examples": real_and_generated,
    "random mask and its sum": masked_at_random,
    "loop of each example": loop_of_each_example,
    "gradients limited per example": with_backward(lambda g: g / (1 + jnp.linalg.norm(g, axis=1, keepdims=True))),
    "unpacked arrays": lambda w, x, y, i: jnp.multiply(*jnp.stack([x @ w, y])).sum(),
    "one element written": lambda w, x, y, i: x.at[jnp.arange(B), i].set(-1e9).sum(),
}
DEPENDENT = {
    "contrastive": lambda w, x, y, i: nats(x @ w @ y.T, jnp.arange(B)).sum(),
    "distances of all pairs": lambda w, x, y, i: jnp.abs(x[:, None] - y[None]).sum(),
    "einsum of all pairs": lambda w, x, y, i: jnp.einsum("bd,cd->bc", x, y).sum(),
    "batch norm": lambda w, x, y, i: nnx.BatchNorm(D, rngs=nnx.Rngs(0))(x).sum(),
    "normalized advantages": lambda w, x, y, i: ((x - x.mean()) / x.std()).sum(),
    "square of a sum": lambda w, x, y, i: (x @ w).sum() ** 2,
    "correlation": lambda w, x, y, i: ((x.T @ y) ** 2).sum(),
    "each example with a sum": lambda w, x, y, i: (x @ y.sum(0)).sum(),
    "a sum with each example": lambda w, x, y, i: (y.sum(0) @ x.T).sum(),
    "divided by a sum": lambda w, x, y, i: (x @ w).sum() / i.sum(),
    "softmax over the batch": lambda w, x, y, i: jax.nn.logsumexp((x @ w).sum(1)),
    "largest example": lambda w, x, y, i: (x @ w).max(),
    "hardest examples": lambda w, x, y, i: lax.top_k(x.sum(1), 3)[0].sum(),
    "sorted examples": lambda w, x, y, i: (jnp.sort(x, axis=0) * y).sum(),
    "Fourier transform over the batch": lambda w, x, y, i: jnp.abs(jnp.fft.fft2(x)).sum(),
    "quantile": lambda w, x, y, i: jnp.quantile(x.sum(1), 0.5),
    "neighbours": lambda w, x, y, i: (jnp.roll(x, 1, 0) * y).sum(),
    "unpacked examples": lambda w, x, y, i: sum(a * b for a, b in itertools.pairwise(x)).sum(),
    "halves": lambda w, x, y, i: (x[: B // 2] - x[B // 2 :]).sum(),
    "mean of a group": lambda w, x, y, i: (x.reshape(2, -1, D) - x.reshape(2, -1, D).mean(1, keepdims=True)).sum(),
    "mixup": lambda w, x, y, i: ((x + x[jax.random.permutation(jax.random.key(0), B)]) @ w).sum(),
    "indexed by another example": lambda w, x, y, i: x[i].sum(),
    "segment sums": lambda w, x, y, i: (jax.ops.segment_sum(x, i, num_segments=3) ** 2).sum(),
    "loop until all have converged": lambda w, x, y, i: lax.while_loop(lambda x: x.max() < 3, lambda x: 2 * x, x).sum(),
    "a user's scope with the name of routed experts": in_a_scope_of_experts,
    "gradients divided by their norm": with_backward(lambda g: g / jnp.linalg.norm(g)),
    "centered gradients": with_backward(lambda g: g - g.mean(0)),
    "summed gradients": with_backward(lambda g: jnp.broadcast_to(g.sum(0), g.shape)),
    "a rounded sum": lambda w, x, y, i: (x @ w).sum().astype(jnp.int32),
    "a bound of the weight": lambda w, x, y, i: jnp.maximum(i.sum(), 1),
}
UNDECIDED = {
    "weight decay in the total": lambda w, x, y, i: (x @ w).sum() + (w**2).sum(),
    "weights by position": lambda w, x, y, i: (jnp.arange(B)[:, None] * x).sum(),
    "positions as weights": lambda w, x, y, i: (x * jnp.arange(B)[:, None]).sum(),
    "a sum in a loop over examples": lambda w, x, y, i: lax.scan(lambda c, x: (c + (x @ w).sum(), None), 0.0, x)[0],
    "divided by a random sum": mean_at_random,
    "padding to a number of examples": lambda w, x, y, i: (jnp.concatenate([x, jnp.zeros((4 * B, D))]) @ w).sum(),
    "a callback": lambda w, x, y, i: jax.pure_callback(np.sin, x, x).sum(),
    "no example": lambda w, x, y, i: (w**2).sum(),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_examples(name):
    assert verdict(INDEPENDENT[name]) is None


@pytest.mark.parametrize("name", DEPENDENT)
def test_combined_examples(name):
    assert verdict(DEPENDENT[name]) == "dependent"


@pytest.mark.parametrize("name", UNDECIDED)
def test_undecided_losses(name):
    assert verdict(UNDECIDED[name]) == "undecided"


def attend(w, x, y, i):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True).sum()


def convolve(w, x, y, i):
    return nnx.max_pool(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))(x), (2, 2)).sum()


def factorize(w, x, y, i):
    return jnp.linalg.cholesky(x @ x.transpose(0, 2, 1)).sum() + jnp.linalg.solve(x, x).sum()


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (attend, (B, 4, 2, D)),
        (convolve, (B, 8, 8, 3)),
        (factorize, (B, 5, 5)),
        (lambda w, x, y, i: jnp.abs(jnp.fft.rfft(x)).sum(), (B, 8)),
        (lambda w, x, y, i: nnx.RNN(nnx.LSTMCell(D, D, rngs=nnx.Rngs(0)))(x).sum(), (B, 5, D)),
        (lambda w, x, y, i: nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(x).sum(), (B, 3, 4)),
        (lambda w, x, y, i: x[jnp.arange(B)[:, None], jnp.arange(4)[None], i[:, None]].sum(), (B, 4, D)),
    ],
    ids=["attention", "convolution", "factorization", "transform", "recurrence", "group norm", "three indices"],
)
def test_independent_examples_of_other_ranks(loss, shape):
    assert verdict(loss, shape) is None


def test_source_line_of_the_first_combination():
    def loss(w, x, y, i):
        scores = x @ w @ y.T  # the line
        return jax.nn.relu(scores).sum()

    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((D, D), (B, D), (B, D))]
    inputs = [varying((D, D)), per_example((B, D)), per_example((B, D))]
    combined = examine(jax.make_jaxpr(lambda *args: loss(*args, None))(*args), inputs).combined
    assert combined.where.partition(":")[2].startswith(f"{loss.__code__.co_firstlineno + 1}:")
