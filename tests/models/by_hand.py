"""The decoder in NumPy, in float64, one row at a time."""

from __future__ import annotations

import jax
import numpy as np


def random_params(cfg, seed=0):
    """Parameters with no special values in them: norm scales are not one."""
    leaves, tree = jax.tree.flatten(cfg.build().abstract().params)
    rng = np.random.default_rng(seed)
    made = [rng.normal(size=x.shape) * (x.shape[-2] if x.ndim > 1 else 1) ** -0.5 for x in leaves]
    return jax.tree.unflatten(tree, [np.asarray(x, leaf.dtype) for x, leaf in zip(made, leaves, strict=True)])


def norm(cfg, x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale


def rotated(cfg, x):
    """Pairs of numbers turned like complex ones, by their row's position."""
    half = x.shape[1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * cfg.rope_theta ** (-np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def softmax_of_the_past(scores):
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def decoder(cfg, params, tokens, attention):
    """Logits; `attention` takes the config, a layer's weights and its normed input."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embed"]["embedding"][tokens]
    for i in range(cfg.num_layers):
        w = jax.tree.map(lambda x, i=i: x[i], p["layers"])
        x = x + attention(cfg, w["attention"], norm(cfg, x, w["attention_norm"]["scale"]))
        h, mlp = norm(cfg, x, w["mlp_norm"]["scale"]), w["mlp"]
        gate = h @ mlp["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]
    head = p["embed"]["embedding"].T if cfg.tied_embeddings else p["head"]["kernel"]
    return norm(cfg, x, p["final_norm"]["scale"]) @ head
