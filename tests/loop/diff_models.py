"""Models with collectives written by hand, correct on any mesh. The planted faults of `diff_faults.py` change lines."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.moe import MoEConfig, Routing, Weights, moe_layer, report_layers
from meshpar.optim.orthogonalized import UPDATES

VOCAB, EMBED, HIDDEN, LAYERS, BATCH, SEQ = 16, 8, 16, 2, 8, 8
SEQUENCE, FEATURES = P(None, "tensor"), P(None, None, "tensor")


def by_device(function, in_specs, out_specs, axis="tensor", mesh=None):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False
    )  # fmt: skip


def embed(table, tokens):
    """Look up tokens in a table whose rows are sharded."""

    def local(table, tokens):
        rows = table.shape[0]
        index = tokens - lax.axis_index("tensor") * rows
        inside = (index >= 0) & (index < rows)
        found = table[jnp.where(inside, index, 0)]
        return lax.psum(jnp.where(inside[..., None], found, 0), "tensor")

    return by_device(local, (P("tensor"), P()), P())(table, tokens)


def shifted(x):
    """Return the activation of the position before, for sharded positions."""

    def local(x):
        count = lax.axis_size("tensor")
        before = lax.ppermute(x[:, -1:], "tensor", [(i, i + 1) for i in range(count - 1)])
        return jnp.concatenate([before, x[:, :-1]], axis=1)

    return by_device(local, SEQUENCE, SEQUENCE)(x)


def normalized(x):
    """Divide by the root mean square over sharded features."""

    def local(x):
        squares = lax.psum(jnp.sum(x**2, axis=-1, keepdims=True), "tensor")
        return x * lax.rsqrt(squares / (x.shape[-1] * lax.axis_size("tensor")) + 1e-6)

    return by_device(local, FEATURES, FEATURES)(x)


def up(x, w):
    """Gather positions, and multiply with a matrix whose columns are sharded."""

    def local(x, w):
        full = lax.all_gather(x, "tensor", axis=1, tiled=True)
        return jnp.tanh(full @ w)

    return by_device(local, (SEQUENCE, P(None, "tensor")), FEATURES)(x, w)


def down(h, w):
    """Multiply with a matrix whose rows are sharded, and shard the sum over positions."""

    def local(h, w):
        partial = h @ w
        return lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)

    return by_device(local, (FEATURES, P("tensor")), SEQUENCE)(h, w)


@jax.custom_vjp
def column(x, w):
    return x @ w


def column_bwd(residuals, dy):
    x, w = residuals

    def local(dy, w):
        return lax.psum(dy @ w.T, "tensor")

    dx = by_device(local, (FEATURES, P(None, "tensor")), P())(dy, w)
    return dx, jnp.einsum("bti,bto->io", x, dy)


column.defvjp(lambda x, w: (column(x, w), (x, w)), column_bwd)


def nats(logits, targets):
    """Return the cross-entropy for a sharded vocabulary."""

    def local(logits, targets):
        size = logits.shape[-1]
        largest = lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")
        total = lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "tensor")
        index = targets - lax.axis_index("tensor") * size
        inside = (index >= 0) & (index < size)
        score = jnp.take_along_axis(logits, jnp.where(inside, index, 0)[..., None], axis=-1)[..., 0]
        target = lax.psum(jnp.where(inside, score, 0), "tensor")
        return jnp.log(total) + largest - target

    return by_device(local, (FEATURES, P()), P())(logits, targets)


def dropped(x, key):
    """Drop activations by a mask that does not depend on the mesh."""

    def local(x, key):
        rank, rows = lax.axis_index("data"), x.shape[0]
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.wrap_key_data(key)))(
            rank * rows + jnp.arange(rows)
        )
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
        return jnp.where(mask, x / 0.8, 0)

    return by_device(local, (P("data"), P()), P("data"), axis="data")(x, jax.random.key_data(key))


def start(key):
    shapes = {
        "table": (VOCAB, EMBED), "up": (LAYERS, EMBED, HIDDEN), "down": (LAYERS, HIDDEN, EMBED), "head": (EMBED, VOCAB)
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    arrays = {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return {**{k: arrays[k] for k in ("table", "head")}, "layers": {k: arrays[k] for k in ("up", "down")}}


def apply(params, tokens, key):
    def layer(x, weights):
        return x + down(up(normalized(x) + shifted(x), weights["up"]), weights["down"])

    x = dropped(embed(params["table"], tokens), key)
    return column(mp.scan_layers(layer, x, params["layers"]), params["head"])


def sequence_model():
    names = {"layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed")}
    return mp.from_functions(start, apply, names={**names, "table": ("vocab", "embed"), "head": ("embed", "vocab")})


def sequence_loss(model, batch, key):
    losses = nats(model(batch["inputs"], key), batch["targets"]) * batch["weights"]
    return mp.MeanLoss(losses.sum(), batch["weights"].sum()), {}


def sequence_batch():
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
    weights = (np.arange(SEQ) < draw.integers(2, SEQ + 1, (BATCH, 1))).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def attended(x):
    """Attend to the positions before, for sharded positions."""

    def local(x):
        heads = x.reshape(*x.shape[:2], 2, -1)
        return mp.collectives.ring_attention(heads, heads, heads, axis="tensor", order="contiguous").reshape(x.shape)

    return by_device(local, SEQUENCE, SEQUENCE)(x)


def gathered(x, w):
    def local(x, w):
        return jnp.tanh(mp.collectives.all_gather(x, axis="tensor", dim=1, algorithm="ring") @ w)

    return by_device(local, (SEQUENCE, P(None, "tensor")), FEATURES)(x, w)


def scattered(h, w):
    def local(h, w):
        return mp.collectives.reduce_scatter(h @ w, axis="tensor", dim=1, algorithm="ring")

    return by_device(local, (FEATURES, P("tensor")), SEQUENCE)(h, w)


def kernel_apply(params, x):
    x = x + attended(x)
    return x + scattered(gathered(x, params["up"]), params["down"])


def kernel_start(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (EMBED, HIDDEN)) / 3, "down": jax.random.normal(down, (HIDDEN, EMBED)) / 3}


def kernel_model():
    return mp.from_functions(kernel_start, kernel_apply, names={"up": ("embed", "mlp"), "down": ("mlp", "embed")})


def kernel_loss(model, batch, key):
    errors = (model(batch["x"]) - 1) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


def kernel_batch():
    return {"x": np.random.default_rng(0).normal(size=(BATCH, SEQ, EMBED))}


# ---- An optimizer with collectives -----------------------------------------------------------------------------------


def clipped(limit):
    """Clip the gradients by the norm of all shards."""

    def update(grads, state, params=None):
        def local(grads):
            squares = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
            return jnp.sqrt(lax.psum(squares, "fsdp"))

        norm = by_device(local, P("fsdp"), P(), axis="fsdp", mesh=UPDATES.value.mesh)(grads)
        scale = jnp.minimum(1, limit / norm)
        return jax.tree.map(lambda g: g * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def averaged(decay):
    """Keep a moving average of the gradients of each shard."""

    def update(grads, state, params=None):
        def local(grads, state):
            return jax.tree.map(lambda g, m: decay * m + (1 - decay) * g, grads, state)

        run = by_device(local, (P("fsdp"), P("fsdp")), P("fsdp"), axis="fsdp", mesh=UPDATES.value.mesh)
        state = run(grads, state)
        return state, state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def optimizer():
    return optax.chain(clipped(0.1), averaged(0.9), optax.sgd(0.1))


# ---- Experts ---------------------------------------------------------------------------------------------------------


def routed_model(auxiliary_weight=0.1, scale=1.0):
    """Return two MoE layers, whose inputs are tokens and optionally a mask of padding."""
    config = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=4, auxiliary_weight=auxiliary_weight)
    shapes = {"router": (2, 4, 4), "gate": (2, 4, 4, 4), "up": (2, 4, 4, 4), "down": (2, 4, 4, 4)}
    stacked, names = ("layers", "expert"), {"table": (None, "embed"), "layers/router": ("layers", "embed", "expert")}
    names |= {f"layers/{name}": (*stacked, "embed", "mlp") for name in ("gate", "up")}
    names["layers/down"] = (*stacked, "mlp", "embed")

    def init(key):
        keys = jax.random.split(key, 5)
        layers = {name: jax.random.normal(k, shapes[name]) * scale for name, k in zip(shapes, keys, strict=False)}
        return {"table": jax.random.normal(keys[4], (8, 4)) * scale, "layers": layers}

    def layer(x, weights, mask=None):
        y, stats = moe_layer(x, Weights(**weights), config, mask=mask)
        return x + y, stats.aux

    def apply(params, tokens, mask=None):
        x, aux = mp.scan_layers(layer, params["table"][tokens], params["layers"], per_example=mask)
        report_layers(aux, config)
        return x

    return mp.from_functions(init, apply, names=names)


def routed_loss(model, batch, key):
    errors = (model(batch["inputs"]) - 1) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


def routed_batch():
    return {"inputs": np.random.default_rng(0).integers(0, 8, (8, 4)).astype(np.int32)}
