"""Sampling: the cache changes nothing, and draws come from where they should."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
import meshpar.models.sampling
from meshpar.models import RopeScaling, TransformerConfig, generate
from meshpar.models.sampling import empty_cache, sample_token
from meshpar.moe import MoEConfig, Routing
from tests.equal import linen_decoder
from tests.errors import raises
from tests.grid import cases

CONFIG = TransformerConfig(
    vocab_size=16, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
    rope_scaling=RopeScaling(original_seq_len=16),
)  # fmt: skip
PROMPT = np.random.default_rng(0).integers(0, 16, (3, 4), dtype=np.int32)


@functools.cache
def params():
    """Parameters large enough for the likeliest token to stand out and change."""
    made, _ = jax.jit(CONFIG.build().init)(jax.random.key(1))
    return jax.tree.map(lambda x: 3 * np.asarray(x), made)


def model(framework="nnx"):
    if framework == "nnx":
        return CONFIG.build()
    return mp.from_linen(linen_decoder(CONFIG), jax.ShapeDtypeStruct((8, 4), np.int32))


def one_device():
    return mp.MeshSpec().build(jax.devices()[:1])


@functools.cache
def greedy_by_hand(num_tokens):
    """Run the full forward pass for each token, on a sequence that is padded after the current token."""
    tokens = np.pad(PROMPT, ((0, 0), (0, num_tokens)))
    with mp.use_rules(one_device(), mp.ddp()):
        logits = functools.partial(jax.jit(lambda params, tokens: model().bind(params, {})(tokens)), params())
        for position in range(PROMPT.shape[1], tokens.shape[1]):
            tokens[:, position] = logits(tokens)[:, position - 1].argmax(-1)
    return tokens


@functools.cache
def sampler(framework, mesh, strategy, options):
    seen = model(framework)

    def sample(params, prompt, key):
        with mp.use_rules(mesh, strategy):
            return generate(seen.bind(params, {}), prompt, config=CONFIG, key=key, **dict(options))

    return jax.jit(sample)


def sampled(prompt, *, framework="nnx", mesh=None, strategy=None, key=0, **options):
    jitted = sampler(framework, mesh or one_device(), strategy or mp.ddp(), tuple(options.items()))
    return np.asarray(jitted(params(), prompt, jax.random.key(key)))


@pytest.mark.parametrize("framework", cases("nnx", grid=["nnx", "linen"]))
def test_greedy_with_a_cache_is_argmax_without(monkeypatch, framework):
    """The prompt is processed in one pass; in the other tests, token by token."""
    monkeypatch.setattr(meshpar.models.sampling, "SHORT_PROMPT", PROMPT.shape[1] - 1)
    sampler.cache_clear()
    expected = greedy_by_hand(6)
    found = sampled(PROMPT, framework=framework, num_tokens=6, temperature=0)
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found[:, 4:])) > 3  # not the same token for ever


@pytest.mark.parametrize("num_prompts", cases(3, grid=[1, 3, 8]))
def test_greedy_on_a_mesh_is_greedy_on_one_device(num_prompts):
    """The batch is sharded if it is divisible, and one position is never divisible among two devices."""
    mesh, prompts = mp.MeshSpec(fsdp=4, tensor=2).build(), np.resize(PROMPT, (num_prompts, 4))
    strategy = mp.fsdp() | mp.tensor_parallel(sequence=True)
    found = sampled(prompts, mesh=mesh, strategy=strategy, num_tokens=6, temperature=0)
    np.testing.assert_array_equal(found, np.resize(greedy_by_hand(6), (num_prompts, 10)))


def test_samples_depend_on_the_key():
    same = [sampled(PROMPT, num_tokens=8, key=3) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    np.testing.assert_array_equal(same[0][:, :4], PROMPT)
    assert (sampled(PROMPT, num_tokens=8, key=4) != same[0]).any()


@pytest.mark.matrix
def test_samples_do_not_depend_on_the_processing_of_the_prompt(monkeypatch):
    samples = []
    for longest in (PROMPT.shape[1], PROMPT.shape[1] - 1):
        monkeypatch.setattr(meshpar.models.sampling, "SHORT_PROMPT", longest)
        sampler.cache_clear()
        samples.append(sampled(PROMPT, num_tokens=8, key=3))
    np.testing.assert_array_equal(*samples)
    assert len(np.unique(samples[0])) > 3


def draws(temperature, top_k, logits, count=4000, top_p=None):
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    tokens = sample_token(rows, jax.random.key(0), temperature=temperature, top_k=top_k, top_p=top_p)
    return np.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, None), (0.5, 3), (1.0, 2)])
def test_draws_follow_the_distribution(temperature, top_k):
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5], np.float32)
    allowed = logits >= np.sort(logits)[-top_k] if top_k else np.ones(5, bool)
    expected = np.where(allowed, np.exp(logits / temperature), 0)
    shares = draws(temperature, top_k, logits)
    # Four standard deviations of a share of 4000 draws.
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=4 * 0.5 / 4000**0.5)
    assert not shares[~allowed].any()


@pytest.mark.parametrize(("top_p", "top_k", "num"), [(0.9, None, 3), (0.59, None, 1), (0.7, 2, 1), (1.0, None, 5)])
def test_nucleus_has_the_fewest_tokens_of_the_probability(top_p, top_k, num):
    """Of probabilities 0.6, 0.25, 0.1, 0.04, 0.01; among two, the first has 0.706."""
    shares = np.array([0.1, 0.6, 0.04, 0.25, 0.01])
    kept = np.sort(np.argsort(-shares)[:num])
    np.testing.assert_array_equal(np.flatnonzero(draws(1.0, top_k, np.log(shares), top_p=top_p)), kept)


def test_cache_is_sharded_by_heads():
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    with mp.use_rules(mesh, mp.fsdp() | mp.tensor_parallel()):
        cache = jax.jit(lambda: empty_cache(CONFIG, 8, 5, jnp.bfloat16))()
    assert cache.k_LBSKD.shape == (2, 8, 5, 2, 8)
    assert cache.k_LBSKD.dtype == jnp.bfloat16
    assert cache.v_LBSKW.addressable_shards[0].data.shape == (2, 2, 5, 1, 8)


@pytest.mark.parametrize(
    ("prompt", "options", "code", "where"),
    [
        (PROMPT[0], {}, "wrong-shape", "prompt"),
        (PROMPT[:, :0], {}, "wrong-shape", "prompt"),
        (PROMPT, {"num_tokens": 0}, "out-of-range", "num_tokens"),
        (PROMPT, {"temperature": -1.0}, "out-of-range", "temperature"),
        (PROMPT, {"top_k": 0}, "out-of-range", "top_k"),
        (PROMPT, {"top_k": 17}, "out-of-range", "top_k"),
        (PROMPT, {"top_p": 0.0}, "out-of-range", "top_p"),
    ],
)
def test_generate_rejects(prompt, options, code, where):
    with raises(code, f"generate({where}"):
        sampled(prompt, **{"num_tokens": 2, **options})


def test_generate_requires_a_mesh():
    with raises("not-found", "generate"):
        generate(lambda *_: None, PROMPT, config=CONFIG, num_tokens=1, key=jax.random.key(0))


@pytest.mark.matrix
def test_prompts_of_any_length_reach_experts_that_train_in_chunks():
    """Six tokens on a device, and then two at a time, are in no four chunks; nothing of it is training's to refuse."""
    experts = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=8, chunks=4, bound_factor=0.5)
    cfg = dataclasses.replace(CONFIG, mlp_dim=8, moe=experts)
    mesh, strategy = mp.MeshSpec(expert=4).build(jax.devices()[:4]), mp.expert_parallel()

    def sample(params, prompt):
        with mp.use_rules(mesh, strategy):
            bound = cfg.build().bind(params, {})
            return generate(bound, prompt, config=cfg, num_tokens=3, key=jax.random.key(0), temperature=0.0)

    params = cfg.build().abstract().params
    assert jax.eval_shape(sample, params, jax.ShapeDtypeStruct((8, 3), np.int32)).shape == (8, 6)
