"""Small models without logical names, with the kinds of layers from which `propose_names` derives names."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import meshpar as mp

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 48, 16, 4, 2, 8, 40


class Attention(nnx.Module):
    """Attention with shared keys, whose projections have 2 dims."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q = linear(EMBED, HEADS * HEAD_DIM)
        self.kv = linear(EMBED, 2 * KV_HEADS * HEAD_DIM)
        self.out = linear(HEADS * HEAD_DIM, EMBED)

    def __call__(self, x):
        q = self.q(x).reshape(*x.shape[:2], KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        k, v = (part.reshape(*x.shape[:2], KV_HEADS, HEAD_DIM) for part in jnp.split(self.kv(x), 2, axis=-1))
        scores = jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", q, k))
        return self.out(jnp.einsum("bkgts,bskh->btkgh", scores, v).reshape(*x.shape[:2], -1))


class GatedMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate, self.up = (nnx.Linear(EMBED, MLP, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Decoder(nnx.Module):
    """Two layers, and a head that is separate from the embedding table."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 2):
        self.embed, self.positions = nnx.Embed(VOCAB, EMBED, rngs=rngs), nnx.Embed(32, EMBED, rngs=rngs)
        blocks = [nnx.List([nnx.RMSNorm(EMBED, rngs=rngs), Attention(rngs), GatedMlp(rngs)]) for _ in range(num_layers)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, ids, mask=None):
        x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]))
        x = x if mask is None else jnp.where(mask[..., None] > 0, x, 0)
        for norm, attention, mlp in self.blocks:
            x = x + attention(norm(x))
            x = x + mlp(norm(x))
        return self.head(x)


class ScannedExperts(nn.Module):
    """Scanned layers of experts whose matrices are stacked, with a router that weighs all experts."""

    num_layers: int = 3
    num_experts: int = 4

    @nn.compact
    def __call__(self, x):
        init, experts = nn.initializers.lecun_normal(), (self.num_layers, self.num_experts)
        params = {
            "router": self.param("router", init, (self.num_layers, EMBED, self.num_experts)),
            "up": self.param("up", init, (*experts, EMBED, MLP)),
            "down": self.param("down", init, (*experts, MLP, EMBED)),
        }

        def layer(x, params):
            weights = jax.nn.softmax(x @ params["router"])
            hidden = nn.gelu(jnp.einsum("bte,xem->xbtm", x, params["up"]))
            return x + jnp.einsum("xbtm,xme,btx->bte", hidden, params["down"], weights), None

        return jax.lax.scan(layer, x, params)[0]


class ConvNet(nn.Module):
    """A residual block of convolutions with a group norm inside."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(EMBED, (3, 3), name="stem")(x)
        hidden = nn.GroupNorm(num_groups=8, name="norm")(nn.Conv(MLP, (3, 3), name="up")(x))
        x = x + nn.Conv(EMBED, (3, 3), name="down")(nn.relu(hidden))
        return nn.Dense(10, name="logits")(x.mean((1, 2)))


class OtherNames(nn.Module):
    """An MLP with names that meshpar does not know."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "tp"))
        hidden = nn.relu(nn.Dense(MLP, kernel_init=init, name="up")(x))
        return x + nn.Dense(EMBED, kernel_init=init, name="down")(hidden)


def small_mlp(width: int = EMBED):
    """Return a model of plain functions, whose hidden dims meet in two matmuls."""

    def init(key):
        keys = jax.random.split(key, 3)
        return {name: jax.random.normal(k, (width, width)) / 8 for name, k in zip(("a", "b", "c"), keys, strict=True)}

    def apply(params, x):
        hidden = jnp.tanh(mp.constrain(x, "batch", None) @ params["a"])
        return mp.constrain(jnp.tanh(hidden @ params["b"]) @ params["c"], "batch", None)

    return mp.from_functions(init, apply)


def total():
    """Return a model without an output per example."""
    return mp.from_functions(lambda key: jnp.ones((4, 4)), lambda params, x: (x @ params).sum())


class Stacked(nnx.Module):
    """Scanned layers that pipeline stages can run."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 4):
        self.layers = nnx.split_rngs(splits=num_layers)(nnx.vmap(GatedMlp))(rngs)

    def __call__(self, x):
        graph, params = nnx.split(self.layers)
        return mp.scan_layers(lambda x, params: x + nnx.merge(graph, params)(x), x, params)
