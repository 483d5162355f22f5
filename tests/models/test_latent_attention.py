"""Multi-head latent attention: its formula by hand, split over devices, with its cache, and its numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.models import LatentAttention, TransformerConfig, YarnScaling
from meshpar.models.sampling import empty_cache
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import linen_decoder, mean_loss, mesh_of
from tests.grid import cases
from tests.models import by_hand
from tests.models.by_hand import random_params

LATENT = LatentAttention(q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, v_dim=14)
CONFIG = functools.partial(
    TransformerConfig, vocab_size=24, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=4, head_dim=10, mlp_dim=20,
    latent=LATENT,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 24, (4, 8), dtype=np.int32)
BATCH = {"inputs": TOKENS, "targets": np.roll(TOKENS, -1, 1)}
NAMES = {
    "query_down/kernel": ("layers", "embed", None),
    "query_norm/scale": ("layers", "embed"),
    "query_up/kernel": ("layers", "embed", "heads", "head_dim"),
    "latent_down/kernel": ("layers", "embed", None),
    "latent_norm/scale": ("layers", "embed"),
    "key_rope/kernel": ("layers", "embed", None),
    "key_up/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "value_up/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "out/kernel": ("layers", "heads", "head_dim", "embed"),
}


@pytest.fixture
def one_device():
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        yield


def models(cfg):
    shape = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    return {"nnx": cfg.build(), "linen": mp.from_linen(linen_decoder(cfg), shape)}


def loss_and_gradient(model, params, mesh, strategy, batch=BATCH):
    """Of parameters and a batch that lie on the mesh as the strategy says."""
    with mp.use_rules(mesh, strategy):
        table = mp.shardings(model, mesh, strategy)
    shardings = {decision.path: jax.NamedSharding(mesh, decision.spec) for decision in table.params}
    placed = jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), shardings.values()))

    def run(params, batch):
        with mp.use_rules(mesh, strategy):
            return jax.value_and_grad(lambda p: mean_loss(model.bind(p, {}), batch)[0])(params)

    return jax.jit(run)(placed, mp.shard_batch(batch, mesh, strategy))


def attention_by_hand(cfg, w, h):
    """One row of multi-head latent attention, one head at a time: equations 37 to 47 of the paper."""
    latent = cfg.latent
    if latent.q_rank is None:
        of_query, queries = h, w["query"]["kernel"]
    else:
        of_query = by_hand.norm(cfg, h @ w["query_down"]["kernel"], w["query_norm"]["scale"])
        queries = w["query_up"]["kernel"]
    c = by_hand.norm(cfg, h @ w["latent_down"]["kernel"], w["latent_norm"]["scale"])
    shared = by_hand.rotated(cfg, h @ w["key_rope"]["kernel"])
    out = 0
    for head in range(cfg.num_heads):
        q = of_query @ queries[:, head]
        content = q[:, : latent.nope_dim] @ (c @ w["key_up"]["kernel"][:, head]).T
        position = by_hand.rotated(cfg, q[:, latent.nope_dim :]) @ shared.T
        weights = by_hand.softmax_of_the_past((content + position) / np.sqrt(latent.nope_dim + latent.rope_dim))
        out = out + weights @ (c @ w["value_up"]["kernel"][:, head]) @ w["out"]["kernel"][head]
    return out


# --- values


@pytest.mark.parametrize(
    ("framework", "q_rank"), cases(("nnx", 12), ("linen", None), grid=itertools.product(("nnx", "linen"), (12, None)))
)
def test_latent_attention_matches_the_formula_in_float64(one_device, framework, q_rank):
    with jax.enable_x64(True):
        cfg = CONFIG(param_dtype="float64", latent=dataclasses.replace(LATENT, q_rank=q_rank))
        params = random_params(cfg)
        model = models(cfg)[framework]
        logits = jax.jit(lambda params, tokens: model.bind(params, {})(tokens))(params, TOKENS)
        expected = np.stack([by_hand.decoder(cfg, params, row, attention_by_hand) for row in TOKENS])
    assert logits.dtype == jnp.float64
    # Anything that passes through float32 on the way is off by 1e-7.
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def alone():
    """Loss and gradients on one device, in float64."""
    with jax.enable_x64(True):
        cfg = CONFIG(param_dtype="float64")
        params = random_params(cfg)
        mesh = mp.MeshSpec().build(jax.devices()[:1])

        @functools.cache
        def found(framework):
            with jax.enable_x64(True):
                return jax.tree.map(np.asarray, loss_and_gradient(models(cfg)[framework], params, mesh, mp.ddp()))

        return params, found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("framework", "spec", "strategy"),
    [
        ("nnx", mp.MeshSpec(fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel()),
        ("linen", mp.MeshSpec(fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel()),
        ("nnx", mp.MeshSpec(fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True)),
        ("nnx", mp.MeshSpec(tensor=2, context=2), mp.tensor_parallel() | mp.context_parallel()),
        ("linen", mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel()),
        ("nnx", mp.MeshSpec(tensor=2, context=2), mp.tensor_parallel() | mp.context_parallel(kind="all-to-all")),
    ],
    ids=str,
)
def test_sharded_latent_attention_equals_a_single_device(alone, framework, spec, strategy):
    params, found = alone
    with jax.enable_x64(True):
        mesh = mesh_of(spec)
        split = loss_and_gradient(models(CONFIG(param_dtype="float64"))[framework], params, mesh, strategy)
    for (path, a), (_, b) in zip(*map(tree_leaves_with_paths, (split, found(framework))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=path)


def test_decoding_with_latents_equals_the_full_sequence(one_device):
    with jax.enable_x64(True):
        cfg = CONFIG(param_dtype="float64")
        params, model = random_params(cfg), models(cfg)["linen"]
        cache = empty_cache(cfg, 4, 8, jnp.float64)

        @jax.jit
        def both(params, tokens):
            bound, logits, here = model.bind(params, {}), [], cache
            for cut in (slice(0, 3), slice(3, 4), slice(4, 8)):
                some, here = bound(tokens[:, cut], cache=here)
                logits.append(some)
            return bound(tokens), jnp.concatenate(logits, 1)

        whole, piece_by_piece = both(params, TOKENS)
    np.testing.assert_allclose(piece_by_piece, whole, rtol=1e-12, atol=1e-12)


def test_cache_has_latents_instead_of_heads(one_device):
    cache = empty_cache(CONFIG(), 3, 5, jnp.float32)
    assert cache.k_LBSKD.shape == (2, 3, 5, 1, 4)
    assert cache.v_LBSKW.shape == (2, 3, 5, 1, 8)


# --- layout and numbers


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_all_latent_parameters_have_names(one_device, framework):
    found = {leaf.path: leaf.names for leaf in models(CONFIG())[framework].leaves() if "/attention/" in leaf.path}
    assert found == {f"layers/attention/{path}": names for path, names in NAMES.items()}


def test_tensor_parallelism_shards_latent_heads():
    mesh = mp.MeshSpec(fsdp=2, tensor=2).abstract()
    table = mp.shardings(CONFIG().build(), mesh, mp.fsdp() | mp.tensor_parallel())
    specs = {d.path.removeprefix("layers/attention/"): tuple(d.spec) for d in table.params if "/attention/" in d.path}
    padded = {path: spec + (None,) * (len(NAMES[path]) - len(spec)) for path, spec in specs.items()}
    axes = {"heads": "tensor", "kv_heads": "tensor", "embed": "fsdp"}
    assert padded == {path: tuple(axes.get(name) for name in names) for path, names in NAMES.items()}


@pytest.mark.parametrize("q_rank", [12, None])
def test_parameters_in_closed_form(q_rank):
    cfg = CONFIG(latent=dataclasses.replace(LATENT, q_rank=q_rank))
    counted = sum(x.size for x in jax.tree.leaves(cfg.build().abstract().params))
    query = 16 * 4 * 10 if q_rank is None else 16 * 12 + 12 + 12 * 4 * 10
    attention = query + 16 * 8 + 8 + 16 * 4 + 8 * 4 * (6 + 14) + 4 * 14 * 16
    assert counted == cfg.num_params == 2 * 24 * 16 + 16 + 2 * (attention + 3 * 16 * 20 + 2 * 16)


def test_model_flops_count_latent_matmuls():
    cfg = CONFIG()
    norms = 16 * 5 + 2 * (12 + 8)
    matmuls = cfg.num_params - norms - 24 * 16
    # Scores of width 10 and sums of width 14, forward and twice that backward, a multiply and an add each.
    assert cfg.flops_per_token(8) == 6 * matmuls + 3 * 2 * 2 * 4 * (10 + 14) * 8


def test_yarn_scales_the_scores(one_device):
    """Queries that are as many times as large give the same scores, over a sequence and with a cache."""
    yarn = YarnScaling(factor=4.0, original_seq_len=4, score_factor=1.75)
    plain = CONFIG(rope_yarn=dataclasses.replace(yarn, score_factor=1.0))
    params = random_params(plain)
    larger = jax.tree.map(np.copy, params)
    larger["layers"]["attention"]["query_up"]["kernel"] *= np.float32(1.75)

    def logits(cfg, params):
        bound = cfg.build().bind(params, {})
        cached, _ = bound(TOKENS[:1], cache=empty_cache(cfg, 1, 8, jnp.float32))
        return bound(TOKENS[:1]), cached

    found, expected = jax.jit(lambda: (logits(CONFIG(rope_yarn=yarn), params), logits(plain, larger)))()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)
