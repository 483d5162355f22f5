"""Decoders with experts: sharded equals single-device, state of balancing, and closed forms."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, generate, next_token_loss
from meshpar.models.token_loss import token_mask
from meshpar.moe import MoEConfig, Routing
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import VOCAB, assert_same, model_of, token_batches, train
from tests.grid import cases

ROWS, SEQ = 16, 8
LOSSES = {"auxiliary_weight": 1e-2, "z_weight": 1e-3}


def deepseek_like(**changes) -> TransformerConfig:
    """Return a config: a dense layer, then fine experts with grouped sigmoid scores, a shared expert, and a bias."""
    routing = Routing(num_experts=8, top_k=2, score="sigmoid", scale=2.5, groups=4, top_groups=2)
    experts = MoEConfig(routing=routing, mlp_dim=8, shared_experts=1, bias_rate=0.01, **changes.pop("losses", LOSSES))
    sizes = {"vocab_size": VOCAB, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(
        **{**sizes, "num_layers": 3, "num_dense_layers": 1, "mlp_dim": 24, "moe": experts, **changes}
    )


def mixtral_like(**changes) -> TransformerConfig:
    """Return a config with two of eight experts in each layer."""
    experts = MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=8, **changes.pop("losses", LOSSES))
    return deepseek_like(**{"num_layers": 2, "num_dense_layers": 0, "mlp_dim": 8, "moe": experts, **changes})


SHARDED = (mp.MeshSpec(fsdp=2, expert=2, tensor=2), mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel())
EXPERTS = (mp.MeshSpec(data=2, expert=4), mp.ddp() | mp.expert_parallel())
STAGES = (
    mp.MeshSpec(stage=2, expert=2, tensor=2),
    mp.expert_parallel() | mp.tensor_parallel() | mp.pipeline_parallel(stages=2, microbatches=2),
)
ONE = (mp.MeshSpec(), mp.ddp())


@functools.cache
def five_steps(cfg, framework, spec, strategy, start=None, **options):
    with jax.enable_x64(cfg.param_dtype == "float64"):
        model, batches = model_of(framework, cfg, ROWS, SEQ), token_batches(ROWS, SEQ, 5)
        return train(model, batches, spec, strategy, start=start, **options)


def check_equal(cfg, framework, case, **options):
    expected = five_steps(cfg, framework, *ONE)
    found = five_steps.__wrapped__(cfg, framework, *case, start=expected.start, **options)
    for metrics, wanted in zip(found.metrics, expected.metrics, strict=True):
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-9)
        np.testing.assert_allclose(metrics["moe/aux_loss"], wanted["moe/aux_loss"], rtol=1e-9)
        np.testing.assert_array_equal(metrics["moe/load"], wanted["moe/load"])
    assert_same(found.params, expected.params, atol=1e-9)
    assert_same(found.extra, expected.extra, atol=1e-9)
    return found.metrics


# ---- Sharded equals single-device ------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "framework", "case", "options"),
    [
        (mixtral_like, "nnx", SHARDED, {}),
        (mixtral_like, "linen", EXPERTS, {}),
        (deepseek_like, "nnx", SHARDED, {}),
        (deepseek_like, "linen", SHARDED, {}),
        # Layers are sharded over stages, and examples over `expert`. The bias uses the counts of all microbatches.
        (functools.partial(deepseek_like, losses={}), "nnx", STAGES, {}),
        (deepseek_like, "nnx", (SHARDED[0], SHARDED[1] | mp.tensor_parallel(sequence=True)), {"remat": "full"}),
        (deepseek_like, "nnx", SHARDED, {"remat": "dots"}),
    ],
)
def test_five_steps_match_one_device(make, framework, case, options):
    metrics = check_equal(make(param_dtype="float64"), framework, case, **options)[-1]
    load = metrics["moe/load"]
    # Two experts for each token. The end of a row without weight is padding.
    routed = 2 * int(token_mask(token_batches(ROWS, SEQ, 5)[-1]).sum())
    assert (load.shape, load.sum(1).tolist()) == ((2, 8), [routed] * 2)
    np.testing.assert_array_equal(metrics["moe/rank_load"], load.reshape(2, case[0]["expert"], -1).sum(-1))
    assert not metrics["moe/drop_rate"].any()
    assert (metrics["moe/router_entropy"] < math.log(8)).all()


@pytest.mark.matrix
def test_padding_is_reordered_over_context_and_tensor_axes():
    """XLA aborted if the mask was sharded before it was reordered, inside a shard_map over the batch."""
    cfg = mixtral_like(param_dtype="float64", losses={})
    strategy = mp.fsdp(min_bytes=0) | mp.context_parallel() | mp.tensor_parallel()
    case = mp.MeshSpec(fsdp=2, context=2, tensor=2), strategy
    found = five_steps.__wrapped__(cfg, "nnx", *case, accumulate=2, reduce_gradients="once")
    np.testing.assert_allclose(found.losses, five_steps(cfg, "nnx", *ONE).losses, rtol=1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["each_microbatch", "once"])
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_accumulated_steps_move_the_bias_once(framework, mode):
    """The bias moves by the sum of the counts. Auxiliary losses are computed per micro-step, so there are none here."""
    cfg = deepseek_like(param_dtype="float64", losses={})
    options = {"accumulate": 2, "reduce_gradients": mode}
    expected = five_steps(cfg, framework, *ONE)
    found = five_steps(cfg, framework, *SHARDED, **options)
    assert_same(found.extra, expected.extra, atol=0)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    np.testing.assert_array_equal(2 * found.metrics[-1]["moe/load"], expected.metrics[-1]["moe/load"])


# ---- Padding ---------------------------------------------------------------------------------------------------------

LENGTHS = (10, 0, 7, 3, 0, 9, 5, 2)
"""Number of tokens of the document in each row of 16 positions, 36 in total. Two rows are padding."""


def documents(padding: int | None) -> dict[str, np.ndarray]:
    """Return padded rows, or for None the same documents in a single row without padding."""
    rng, size = np.random.default_rng(0), (len(LENGTHS), 16)
    is_token = np.arange(size[1]) < np.array(LENGTHS)[:, None]
    tokens = rng.integers(0, VOCAB, (2, *size))
    index = np.arange(1, len(LENGTHS) + 1)[:, None] * is_token
    if padding is not None:
        inputs, targets = np.where(is_token, tokens, padding)
        return {"inputs": inputs, "targets": targets, "segments": (index > 0) * 1, "weights": is_token * 1}
    inputs, targets = tokens[:, is_token]
    return {"inputs": inputs[None], "targets": targets[None], "segments": index[is_token][None]}


PADDED = {
    "one": (ONE, {}),
    "experts": ((mp.MeshSpec(fsdp=2, expert=2), mp.fsdp() | mp.expert_parallel()), {}),
    "slices": ((mp.MeshSpec(expert=4), mp.expert_parallel()), {"batch_slices": 2}),
    "all": (SHARDED, {}),
    "context": ((mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel()), {}),
    "stages": ((mp.MeshSpec(stage=2), mp.pipeline_parallel(stages=2, microbatches=1, schedule="gpipe")), {}),
    "prefetch": ((mp.MeshSpec(fsdp=4), mp.fsdp(prefetch=1)), {}),
}


@pytest.mark.parametrize(
    ("case", "padding", "factor"),
    cases(
        ("prefetch", 0, None),
        grid=[(case, padding, factor) for case in PADDED for padding in (0, 7) for factor in (None, 7.0)],
    ),
)
def test_padding_does_not_change_loss_and_update(case, padding, factor):
    """A row of the documents without padding is the reference, with plain arrays of 36 tokens."""
    routing = Routing(num_experts=8, top_k=2, capacity_factor=factor if case != "slices" else None)
    moe = MoEConfig(routing=routing, mlp_dim=8, **LOSSES, bias_rate=0.01)
    cfg = mixtral_like(moe=moe, param_dtype="float64")
    with jax.enable_x64(True):
        model = model_of("nnx", cfg, ROWS, SEQ)
        expected = train(model, [documents(None)], *ONE, tx=optax.sgd(1.0))
        layout, options = PADDED[case]
        found = train(model, [documents(padding)], *layout, start=expected.start, tx=optax.sgd(1.0), **options)
    for name, x in expected.metrics[0].items():
        if name != "moe/rank_load":
            np.testing.assert_allclose(found.metrics[0][name], x, rtol=1e-9, err_msg=name)
    assert found.metrics[0]["moe/load"].sum(1).tolist() == [72, 72]
    assert_same(found.params, expected.params, atol=1e-9)
    assert_same(found.extra, expected.extra, atol=0)


# ---- State of balancing ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_evaluation_has_no_expert_loss_and_keeps_the_state():
    cfg = deepseek_like(param_dtype="float64")
    with jax.enable_x64(True):
        mesh = ONE[0].build(jax.devices()[:1])
        state = mp.init_state(cfg.build(), optax.adam(1e-2), mesh=mesh, strategy=ONE[1], key=0)
        before = jax.device_get(state.extra)
        evaluated = jax.device_get(mp.eval_step(next_token_loss)(state, token_batches(ROWS, SEQ, 1)[0]))
        copy = jax.tree.map(jnp.copy, state)
        after, trained = mp.train_step(next_token_loss)(copy, token_batches(ROWS, SEQ, 1)[0])
        after, trained = jax.device_get((after.extra, trained))
    assert evaluated["moe/aux_loss"] > 1e-3
    np.testing.assert_allclose(trained["loss"], evaluated["loss"] + evaluated["moe/aux_loss"], rtol=1e-12)
    for path, x in tree_leaves_with_paths(before):
        np.testing.assert_array_equal(x, dict(tree_leaves_with_paths(jax.device_get(state.extra)))[path])
    bias = after["layers"]["mlp"]["bias"]
    np.testing.assert_allclose(np.abs(bias - before["layers"]["mlp"]["bias"]).max(), 0.01, rtol=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_decoding_with_a_cache_equals_the_full_sequence(framework):
    """Greedy decoding with a cache equals full sequences without a capacity, which decoding ignores."""
    full = Routing(num_experts=8, top_k=2, capacity_factor=0.25)
    cfg = mixtral_like(moe=MoEConfig(routing=full, mlp_dim=8, **LOSSES))
    free = mixtral_like(moe=MoEConfig(routing=dataclasses.replace(full, capacity_factor=None), mlp_dim=8, **LOSSES))
    mesh, strategy = mp.MeshSpec(expert=2).build(jax.devices()[:2]), mp.expert_parallel()
    state = mp.init_state(model_of(framework, cfg, ROWS, SEQ), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=0)
    prompt = jnp.asarray(token_batches(ROWS, SEQ, 1)[0]["inputs"][:1, :3])

    def sample(state, prompt):
        with mp.use_rules(mesh, strategy):
            options = {"config": cfg, "num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
            return generate(state.bound(), prompt, **options)

    def greedy(params, extra, tokens):
        one = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        with mp.use_rules(one, mp.ddp()):
            return model_of(framework, free, ROWS, SEQ).bind(params, extra)(tokens).argmax(-1)

    tokens = np.asarray(jax.jit(sample)(state, prompt))
    whole = jax.jit(greedy)(*jax.device_get((state.params, state.extra)), tokens)
    assert tokens.shape == (1, 7)
    np.testing.assert_array_equal(tokens[:, 3:], np.asarray(whole)[:, 2:-1])


# ---- Closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("make", cases(deepseek_like, grid=[deepseek_like, mixtral_like]))
def test_num_params_counts_all_parameters(make):
    cfg = make()
    assert cfg.num_params == sum(leaf.size for leaf in cfg.build().leaves())
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        linen = model_of("linen", cfg, ROWS, SEQ).leaves()
    assert {(leaf.path, leaf.names, leaf.shape) for leaf in linen} == {
        (leaf.path, leaf.names, leaf.shape) for leaf in cfg.build().leaves()
    }


def test_flops_of_fine_experts():
    cfg = deepseek_like()
    attention, mlp = 2 * 16 * 4 * (4 + 2), 3 * 16 * 24
    experts = 16 * 8 + 3 * 16 * 8 * (2 + 1)
    assert cfg.num_moe_layers == 2
    assert cfg.flops_per_token(SEQ) == 6 * (3 * attention + mlp + 2 * experts + VOCAB * 16) + 12 * 3 * 4 * 4 * SEQ
