"""Tests of low-rank adapters: trained parameters, collectives, numerics and errors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import matrix_of, tree_leaves_with_paths
from meshpar.training.lora import merged_params, of_pair
from tests.equal import mean_loss
from tests.errors import raises
from tests.grid import cases
from tests.linen_decoder import linen_model

CONFIG = TransformerConfig(
    vocab_size=32, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
)
ALL = r".*/(query|key|value|out|(shared_)?(gate|up|down))"
ROWS = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
BATCH = {"inputs": ROWS[:, :-1], "targets": ROWS[:, 1:], "weights": (ROWS[:, 1:] % 3).astype(np.int32)}


def decoder(kind: str, config: TransformerConfig = CONFIG) -> Model:
    if kind == "nnx":
        return config.build()
    return linen_model(config, 8, 8)


def with_random_pairs(state):
    """Return the state with random values in place of the zeros of B."""
    params = {
        path: 0.1 * jax.random.normal(jax.random.key(i), x.shape) if path.endswith("lora_b") else x
        for i, (path, x) in enumerate(tree_leaves_with_paths(state.params))
    }
    return state.replace(params=jax.tree.unflatten(jax.tree.structure(state.params), list(params.values())))


MOE = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=16, auxiliary_weight=0.0, shared_experts=1)
EXACT = {"weights": None, "gradients": None, "secondary": "fsdp"}
"""The communication of strategies that quantize, without quantization."""


def staged(schedule: str, **options) -> Strategy:
    return mp.pipeline_parallel(**{"stages": 2, "microbatches": 2, "schedule": schedule, **options})


GRID = [
    ("nnx", "fsdp=4,tensor=2", mp.fsdp() | mp.tensor_parallel(), {}),
    ("linen", "fsdp=8", mp.fsdp(), {}),
    ("nnx", "data=2,fsdp=4", mp.hsdp(), {"accumulate": 2, "remat": "minimal"}),
    ("linen", "fsdp=4,tensor=2", mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    ("nnx", "fsdp=4,context=2", mp.fsdp() | mp.context_parallel(), {"accumulate": 1}),
    ("nnx", "fsdp=8", mp.fsdp(prefetch=1), {"layers": 3, "remat": "full"}),
    ("linen", "fsdp=8", mp.fsdp(prefetch=1), {"layers": 2, "accumulate": 2}),
    ("nnx", "fsdp=4,tensor=2", mp.fsdp() | mp.tensor_parallel(), {"accumulate": 2, "reduce_gradients": "once"}),
    ("nnx", "data=2,fsdp=4", mp.zero3(axis=("data", "fsdp"), quantize=EXACT), {"layers": 2}),
    ("nnx", "fsdp=8", mp.fsdp(prefetch=1), {"layers": 2, "batch_slices": 2, "remat": "full"}),
    ("linen", "fsdp=4,tensor=2", mp.fsdp() | mp.tensor_parallel(sequence=True), {"layers": 2, "batch_slices": 2}),
]
EXPERTS = [
    ("nnx", "fsdp=4,expert=2", mp.fsdp() | mp.expert_parallel(), {"moe": MOE}),
    ("nnx", "fsdp=2,expert=2,tensor=2", mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel(), {"moe": MOE}),
    ("nnx", "data=2,fsdp=2,tensor=2", mp.hsdp() | mp.tensor_parallel(sequence=True), {"moe": MOE, "remat": "full"}),
    ("nnx", "fsdp=2,expert=2,tensor=2", mp.fsdp(prefetch=1) | mp.expert_parallel() | mp.tensor_parallel(),
     {"moe": MOE, "layers": 2}),
    ("nnx", "fsdp=4,expert=2", mp.fsdp() | mp.expert_parallel(), {"moe": MOE, "layers": 2, "accumulate": 2}),
    ("nnx", "fsdp=2,expert=2,tensor=2", mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel(),
     {"moe": MOE, "accumulate": 2, "reduce_gradients": "once"}),
]  # fmt: skip
STAGES = [
    ("nnx", "stage=2,fsdp=2,expert=2", mp.fsdp() | mp.expert_parallel() | staged("1f1b"), {"layers": 2, "moe": MOE}),
    ("nnx", "stage=2,fsdp=4", mp.fsdp() | staged("1f1b"), {"layers": 2, "remat": "full"}),
    ("linen", "stage=2,fsdp=2,tensor=2", mp.fsdp() | mp.tensor_parallel() | staged("zb-h1"), {"layers": 2}),
    ("nnx", "stage=2,fsdp=4", mp.fsdp() | staged("zb-v"), {"layers": 4}),
    ("nnx", "stage=2,fsdp=4", mp.fsdp() | staged("dualpipe", microbatches=4, gather="microbatch"), {"layers": 2}),
    ("nnx", "stage=2,fsdp=4", mp.fsdp() | staged("gpipe"), {"layers": 3}),
]


@pytest.mark.parametrize(("kind", "mesh", "strategy", "options"), cases(GRID[0], grid=[*GRID, *EXPERTS]))
def test_gradients_only_of_adapters(kind, mesh, strategy, options):
    check_gradients(kind, mesh, strategy, options)


@pytest.mark.call_stacks  # their scopes distinguish the branches of a tick
@pytest.mark.parametrize(("kind", "mesh", "strategy", "options"), cases(grid=STAGES))
def test_gradients_only_of_adapters_in_stages(kind, mesh, strategy, options):
    check_gradients(kind, mesh, strategy, options)


def check_gradients(kind: str, mesh: str, strategy: Strategy, options: dict[str, Any]) -> None:
    """Compare a step on a mesh with the chain rule for the merged model on one device, and check its collectives."""
    options = dict(options)
    layers = options.pop("layers", 1)
    config = dataclasses.replace(CONFIG, num_layers=layers, moe=options.pop("moe", None))
    model = mp.lora(rank=2, alpha=4, modules=ALL)(decoder(kind, config))
    mesh, tx = mp.MeshSpec.parse(mesh).build(), optax.sgd(1.0)
    state = with_random_pairs(mp.init_state(model, tx, mesh=mesh, strategy=strategy, key=0))
    step = mp.train_step(next_token_loss, **options)
    if layers != 3 or strategy.pipeline is None:  # explain does not support uneven chunks
        report = mp.explain(step, state, BATCH)
        assert report.is_as_expected, str(report)
        sent = {path for line in report.matching.matched if line.role == "gradients" for path in line.tensors}
        assert sent or strategy.gathering.formats is not None
        assert all(map(of_pair, sent))
    assert {d.path for d in state.table.grads} == {d.path for d in state.table.params if of_pair(d.path)}
    before, merged = jax.tree.map(np.asarray, state.params), jax.tree.map(np.asarray, merged_params(state))
    state, _ = step(state, BATCH)

    # The chain rule from the gradient of the merged model, on one device: dA = s dW Bᵀ, dB = s Aᵀ dW.
    plain = decoder(kind, config)
    reference = mp.init_state(plain, tx, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp(), key=0)
    with mp.use_rules(reference.setup.mesh, mp.ddp()):
        grads = jax.jit(jax.grad(lambda p: mean_loss(plain.bind(p, reference.extra), BATCH)[0]))(merged)
    gradients = dict(tree_leaves_with_paths(grads))
    after, start = dict(tree_leaves_with_paths(state.params)), dict(tree_leaves_with_paths(before))
    for path, value in start.items():
        if not of_pair(path):
            np.testing.assert_array_equal(after[path], value)
        elif path.endswith("lora_a"):
            module = path.rpartition("/")[0]
            pair, d_kernel = (value, start[f"{module}/lora_b"]), np.asarray(gradients[matrix_of(module)])
            stack = math.prod(d_kernel.shape[: value.ndim + pair[1].ndim - 2 - d_kernel.ndim])
            flat = [pair[0].reshape(stack, -1, 2), pair[1].reshape(stack, 2, -1)]
            d_kernel = d_kernel.reshape(stack, flat[0].shape[1], -1)
            chained = 2 * d_kernel @ flat[1].swapaxes(1, 2), 2 * flat[0].swapaxes(1, 2) @ d_kernel
            for name, initial, expected in zip(("lora_a", "lora_b"), pair, chained, strict=True):
                grad = initial - np.asarray(after[f"{module}/{name}"])
                # float32, sums over 128 tokens
                np.testing.assert_allclose(grad, expected.reshape(initial.shape), atol=1e-6)


WIDE = dataclasses.replace(
    CONFIG, num_layers=2, embed_dim=256, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=512, vocab_size=512
)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", [True, False])
def test_expected_collectives_of_pairs_with_fewer_shards(sequence):
    mesh, strategy = mp.MeshSpec(fsdp=2, tensor=4).build(), mp.fsdp() | mp.tensor_parallel(sequence=sequence)
    model = mp.lora(rank=8, modules=ALL)(decoder("nnx", WIDE))
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((8, 128), np.int32) for name in BATCH}
    report = mp.explain(mp.train_step(next_token_loss), state, batch)
    assert report.is_as_expected, str(report)


@pytest.mark.pod
@pytest.mark.parametrize(
    ("moe", "mesh", "strategy"),
    [
        (dataclasses.replace(MOE, mlp_dim=512), "fsdp=2,expert=2,tensor=2",
         mp.fsdp() | mp.expert_parallel() | mp.tensor_parallel()),
        (None, "fsdp=2,tensor=4", mp.fsdp() | mp.tensor_parallel(sequence=True)),
    ],
    ids=["experts", "dense"],
)  # fmt: skip
def test_expected_collectives_of_pairs_on_gpus(moe, mesh, strategy):
    """Matrices and pairs of a block share an all-reduce, and frozen experts have no gradients."""
    model = mp.lora(modules=ALL)(dataclasses.replace(WIDE, moe=moe).build())
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mp.MeshSpec.parse(mesh).abstract(), strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((64, 512), np.int32) for name in BATCH}
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))
    report = mp.explain(step, state, batch, "h100:1x8")
    assert report.is_as_expected, str(report)
    assert not report.matching.missing, "the full experts of all layers would be saved for the backward pass"
    assert all(of_pair(path) for one in report.matching.matched if one.role == "gradients" for path in one.tensors)


def test_path_rules_and_bfloat16_matrices():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=rngs)
            self.second = nnx.LinearGeneral(16, (2, 4), rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="second")(linen.Dense(16, name="first")(x))

    rules = mp.Rules(batch="data", paths={r"first/.*a": (None, None), r"first/kernel": (None, "data"),
                                           r"first/lora_b": (None, "data")})  # fmt: skip
    x = np.ones((8, 8), np.float32)
    for model in (mp.from_nnx(Net), mp.from_linen(Dense(), x)):
        adapted = mp.lora(rank=2, modules="first")(model)
        state = mp.init_state(adapted, optax.adam(0.1), mesh=mp.MeshSpec(data=8).build(), strategy=rules, key=0)
        assert state.params["first"]["lora_b"].sharding.spec == state.params["first"]["kernel"].sharding.spec
        assert state.params["first"]["lora_a"].dtype == jnp.float32
        assert {x.shape for x in jax.tree.leaves(state.opt_state)} == {(), (8, 2), (2, 16)}
        step = mp.train_step(lambda model, x, key: (((model(x) - 1) ** 2).mean(), {}))
        losses = []
        for _ in range(3):
            state, metrics = step(state, x)
            losses.append(float(metrics["loss"]))
        assert losses[2] < losses[0]
        bound, plain = state.bound(), model.bind(merged_params(state), state.extra)
        np.testing.assert_allclose(bound(x), plain(x), atol=1e-2)  # the merged matrix is bfloat16


def test_range_of_initial_values_follows_from_all_input_dims():
    plain = mp.from_nnx(lambda rngs: nnx.LinearGeneral((16, 4), 32, axis=(-2, -1), rngs=rngs))
    params, _ = mp.lora(modules="")(plain).init(jax.random.key_data(jax.random.key(0)))
    assert 0.95 / 8 < np.abs(params["lora_a"]).max() <= 1 / 8
    assert not np.any(params["lora_b"])


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_product_of_a_pair_is_rounded_once(kind):
    """With bfloat16 compute and float32 pairs, the output is `y + bfloat16(scale * x A B)`, and x A is float32."""
    plain = mp.from_nnx(lambda rngs: nnx.Linear(64, 32, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs))
    if kind == "linen":
        module = linen.Dense(32, use_bias=False, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        plain = mp.from_linen(module, np.ones((4, 64), np.float32))
    lora = mp.lora(rank=3, alpha=10, modules="")
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = with_random_pairs(mp.init_state(lora(plain), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0))
    kernel, a, b = (np.asarray(state.params[name], np.float32) for name in ("kernel", "lora_a", "lora_b"))
    x = jax.random.normal(jax.random.key(1), (256, 64)).astype(jnp.bfloat16)
    y = jnp.dot(x, state.params["kernel"])
    product = (10 / 3 * (np.asarray(x, np.float32) @ a @ b)).astype(jnp.bfloat16)
    actual = state.bound()(x)
    assert (actual.dtype, merged_params(state)["kernel"].dtype) == (jnp.bfloat16, jnp.bfloat16)
    # Another order of sums changes the rounding of few values. A bfloat16 factor would change a third.
    assert (actual == y + product).mean() > 0.97
    merged = np.asarray(merged_params(state)["kernel"], np.float32)
    assert (merged == (kernel + 10 / 3 * a @ b).astype(jnp.bfloat16).astype(np.float32)).mean() > 0.97


def test_unsupported_adapters_are_errors():
    moe = mp.moe.MoEConfig(routing=mp.moe.Routing(num_experts=2, top_k=1, normalize=False), mlp_dim=16)
    experts = dataclasses.replace(CONFIG, moe=moe)
    mesh = mp.MeshSpec(fsdp=8).build()
    functions = mp.from_functions(lambda key: {"w": jnp.ones((4, 4))}, lambda p, x: x @ p["w"])
    adapted = mp.lora()(CONFIG.build())
    for make, code in (
        (lambda: mp.lora(rank=0), "not-an-int"),
        (lambda: mp.lora(alpha=float("nan")), "out-of-range"),
        (lambda: mp.lora(alpha=True), "out-of-range"),
        (lambda: mp.lora(modules="("), "bad-syntax"),
        (lambda: mp.lora()(CONFIG), "wrong-type"),
        (lambda: mp.lora()(mp.explicit(CONFIG.build())), "unsupported-feature"),
        (lambda: mp.lora(modules="embed|.*/query")(CONFIG.build()).abstract(), "unsupported-feature"),
        (lambda: mp.lora()(functions), "unsupported-feature"),
        (lambda: mp.lora()(adapted), "unsupported-feature"),
        (lambda: mp.lora(modules="layers/attention/querry")(CONFIG.build()).abstract(), "unknown-name"),
        (lambda: mp.lora(modules=".*/router")(experts.build()).abstract(), "unsupported-feature"),
    ):
        with raises(code, "lora"), mp.use_rules(mesh, mp.fsdp()):
            make()
    with pytest.raises(mp.MeshparError, match="jax rounds 64-bit"):
        mp.lora(dtype="float64")(CONFIG.build())
    with pytest.raises(mp.MeshparError, match="adapters"):
        mp.explicit(adapted)
    single = mp.lora(rank=2, modules="")(mp.from_linen(linen.Dense(4), np.ones((8, 8), np.float32)))
    assert set(single.abstract().params) == {"bias", "kernel", "lora_a", "lora_b"}


def test_matrix_multiplied_outside_its_layer_is_an_error():
    mesh = mp.MeshSpec(fsdp=8).build()
    adapted = mp.lora(modules="head")(CONFIG.build())
    state = mp.abstract_state(adapted, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp())
    with pytest.raises(mp.MeshparError, match="lora.*use the kernel without its adapters.*Exclude the layer"):
        mp.train_step(next_token_loss).trace(state, BATCH)


@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.matrix)])
def test_adapters_of_experts_match_merged_matrices(kind):
    """The products are scaled by `alpha / rank`."""
    config, mesh = dataclasses.replace(CONFIG, moe=MOE), mp.MeshSpec().build(jax.devices()[:1])
    model = mp.lora(rank=2, alpha=10, modules=r".*/(shared_)?(gate|up|down)")(decoder(kind, config))
    state = with_random_pairs(mp.init_state(model, optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0))
    with mp.use_rules(mesh, mp.ddp()):
        merged = decoder(kind, config).bind(merged_params(state), state.extra)
        actual, expected = jax.jit(lambda tokens: (state.bound()(tokens), merged(tokens)))(BATCH["inputs"][:2])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alphas", [(4, 8), (8, 4)])
def test_checkpoint_refuses_adapters_with_other_alpha(tmp_path, alphas):
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    model = mp.from_nnx(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
    saved, other = (
        mp.init_state(mp.lora(rank=2, alpha=a, modules="")(model), optax.sgd(1.0), mesh=mesh, strategy=mp.ddp(), key=0)
        for a in alphas
    )
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, wait=True)
        assert checkpoints.restore(saved.setup) is not None
        for weights_only in (False, True):
            with pytest.raises(mp.MeshparError, match=f"trained with alpha={alphas[0]}"):
                checkpoints.restore(other.setup, weights_only=weights_only)
