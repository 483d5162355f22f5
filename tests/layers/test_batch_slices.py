"""`batch_slices`: results equal those without slices; communication; errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.layers.batch_slices import join_batch, split_batch
from meshpar.layers.precision import Precision, numerics
from meshpar.layers.scan import Sums
from meshpar.models import TransformerConfig
from meshpar.moe import MoEConfig, Routing, Weights, moe_layer
from meshpar.parallel import parse_strategy
from meshpar.sharding.activations import constrain_module_outputs
from tests.equal import VOCAB, mesh_of, model_of, train
from tests.errors import raises
from tests.grid import cases
from tests.parallel import test_equality as dense

AHEAD = "fsdp(prefetch=1) | tensor_parallel(sequence=True)"


@pytest.mark.matrix
def test_quantized_fsdp_with_slices():
    spec, strategy = mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp(quantize="int8") | mp.tensor_parallel()
    full, sliced = (dense.five_steps("nnx", "float32", spec, strategy, {"batch_slices": count}) for count in (1, 2))
    np.testing.assert_allclose(sliced.losses, full.losses, rtol=1e-2)  # gradients have 8 bits


# ---- Inputs and outputs of layers ------------------------------------------------------------------------------------

CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=16
)


@pytest.mark.matrix
def test_segments_are_sliced_with_the_batch():
    def loss(model, batch, key):
        logits = model(batch["inputs"], segments=batch["segments"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return mp.MeanLoss((losses * batch["weights"]).sum(), batch["weights"].sum()), {}

    rng, rows, seq = np.random.default_rng(0), 8, 6
    tokens = rng.integers(0, VOCAB, (rows, seq + 1), dtype=np.int32)
    segments = (np.arange(seq)[None] >= rng.integers(1, seq, (rows, 1))).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": 1 - segments}
    full, model = train(model_of("nnx", CONFIG, rows, seq), [batch], mp.MeshSpec(), mp.ddp(), loss=loss), CONFIG.build()
    sliced = train(model, [batch], mp.MeshSpec(fsdp=4), mp.fsdp(), start=full.start, loss=loss, batch_slices=2)
    np.testing.assert_allclose(sliced.losses, full.losses, rtol=1e-6)


def run(layer: Any, x: Any, count: int, **inputs: Any) -> Any:
    """Run three layers as inside a step."""
    with numerics(Precision(), None, count):
        return mp.scan_layers(layer, x, {"w": jnp.ones(3)}, **inputs)


def test_aux_is_combined_over_slices():
    def layer(x, params):
        return x + params["w"], mp.Aux(jnp.mean(x), {"count": jnp.sum(x > 0), "mean": jnp.mean(x)})

    x = jnp.arange(8.0).reshape(4, 2) - 3
    full, sliced = (run(layer, x, count) for count in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sliced, full)
    assert sliced[1].metrics["count"].dtype == full[1].metrics["count"].dtype


def test_losses_of_sums_do_not_depend_on_slices():
    """A product of two means, as a router's loss."""

    def product(sums):
        means = sums / 4
        return mp.Aux(means[0] * means[1], {"first": means[0]})

    def layer(x, params):
        sums = jnp.stack([x.sum(), (x**2).sum()])
        return x + params["w"], product(sums)._replace(sums=Sums(sums, product))

    x = jnp.arange(4.0)[:, None]
    full, sliced = (run(layer, x, count) for count in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sliced, full)
    assert full[1].loss == (6 / 4) * (14 / 4) + (10 / 4) * (30 / 4) + (14 / 4) * (54 / 4)


def test_slices_refuse_routers_whose_sums_are_lost():
    x, weights = jnp.ones((4, 2, 2)), Weights(*(jnp.ones(shape) for shape in [(2, 4), (4, 2, 2), (4, 2, 2), (4, 2, 2)]))

    def layer(changes, x, params):
        routing = Routing(num_experts=4, top_k=2, **changes)
        y, stats = moe_layer(x, weights, MoEConfig(routing=routing, mlp_dim=2, auxiliary_weight=0.1))
        return y, mp.Aux(stats.loss, {})

    with raises("unsupported-feature", "batch_slices=2"):
        run(functools.partial(layer, {}), x, 2)
    with raises("unsupported-feature", "moe_layer"):
        run(functools.partial(layer, {"capacity_factor": 1.0}), x, 2)


def test_typed_keys_differ_between_slices():
    def layer(x, params, key):
        return x + jax.random.normal(key, x.shape)

    x = run(layer, jnp.zeros((4, 2)), 2, extra=jax.random.split(jax.random.key(0), 3))
    assert not np.allclose(x[:2], x[2:])


def test_slicing_needs_no_communication():
    mesh, x = mp.MeshSpec(fsdp=4).build(jax.devices()[:4]), np.arange(16).reshape(16, 1)

    @jax.jit
    def slice_and_join(x):
        with mp.use_rules(mesh, mp.fsdp()):
            parts = split_batch({"x": x}, 2)
            return parts, join_batch(parts)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        parts, back = slice_and_join(jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp"))))
        text = slice_and_join.lower(jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))).compile().as_text()
    np.testing.assert_array_equal(parts[0]["x"][:, 0], [0, 1, 4, 5, 8, 9, 12, 13])
    np.testing.assert_array_equal(back["x"], x)
    assert not any(kind in text for kind in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    cases(
        grid=[
            (mp.MeshSpec(fsdp=4, tensor=2), AHEAD),
            (mp.MeshSpec(fsdp=2, context=2), 'fsdp() | context_parallel(kind="all-to-all")'),
            (mp.MeshSpec(fsdp=2, context=2), "fsdp() | context_parallel()"),
            (mp.MeshSpec(data=2, tensor=2), "ddp() | tensor_parallel()"),
        ]
    ),
)
def test_collectives_are_as_expected(mesh, strategy):
    model = CONFIG.build()
    state = mp.init_state(model, optax.adam(1e-2), mesh=mesh_of(mesh), strategy=parse_strategy(strategy), key=0)
    step = mp.train_step(mp.models.next_token_loss, batch_slices=2, remat="full")
    batch = {name: np.zeros((8, 8), np.int32) for name in ("inputs", "targets")}
    assert mp.explain(step, state, batch).is_as_expected


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2"])
def test_interleave_must_be_a_positive_integer(count):
    with raises("not-an-int", "train_step"):
        mp.train_step(lambda *_: None, batch_slices=count)


@pytest.mark.parametrize(
    ("mesh", "strategy", "num_rows", "options", "multiple"),
    [
        (mp.MeshSpec(fsdp=8), mp.fsdp(), 8, "accumulate=1", 16),
        pytest.param(
            mp.MeshSpec(stage=2), mp.pipeline_parallel(stages=2, microbatches=2), 6, "microbatches=2", 8,
            marks=pytest.mark.matrix,
        ),
    ],
)  # fmt: skip
def test_batch_must_be_divisible(mesh, strategy, num_rows, options, multiple):
    batch = {name: np.zeros((num_rows, 4), np.int32) for name in ("inputs", "targets")}
    state = mp.init_state(CONFIG.build(), optax.adam(1e-2), mesh=mesh_of(mesh), strategy=strategy, key=0)
    with pytest.raises(mp.MeshparError, match=f"{options}, batch_slices=2") as error:
        mp.train_step(mp.models.next_token_loss, batch_slices=2)(state, batch)
    assert f"batch of {multiple}" in error.value.fix


def test_model_must_call_scan_layers():
    model = mp.from_functions(lambda key: {"w": jnp.ones((4, 4))}, lambda params, x: x @ params["w"])
    state = mp.init_state(model, optax.sgd(1.0), mesh=mesh_of(mp.MeshSpec(data=2)), strategy=mp.ddp(), key=0)

    def loss(model, batch, key):
        return jnp.mean(model(batch)), {}

    with pytest.raises(mp.MeshparError, match="batch_slices=2.*never calls meshpar.scan_layers"):
        mp.train_step(loss, batch_slices=2)(state, np.ones((8, 4), np.float32))


def test_first_dim_of_x_must_be_the_batch():
    """Slices of a sequence dim would lose the attention between them."""

    def layer(x, params):
        return x * params["w"]

    with constrain_module_outputs(4, shard_batch=False), raises("wrong-shape", "batch_slices"):
        run(layer, jnp.ones((6, 2)), 2)
    with raises("unsupported-feature", "batch_slices"):
        jax.vmap(lambda x: run(layer, x, 2))(jnp.ones((4, 6, 2)))


@pytest.mark.parametrize("per_example", [jnp.float32(2), jnp.ones((2, 1)), (jnp.ones((4, 1)), 3)])
def test_per_example_needs_the_batch_or_size_1(per_example):
    with raises("wrong-shape", "batch_slices"):
        run(lambda x, params, per_example: x, jnp.ones((4, 2)), 2, per_example=per_example)


def test_closures_over_the_batch_are_explained():
    batch = jnp.ones((4, 2))
    with raises("wrong-shape", "batch_slices") as error:
        run(lambda x, params: x * batch, batch, 2)
    assert "scan_layers(per_example=...)" in error.value.fix


@pytest.mark.parametrize(("x", "code"), [(jnp.ones((3, 2)), "indivisible"), (jnp.ones(()), "wrong-shape")])
def test_x_must_be_divisible(x, code):
    with raises(code, "batch_slices"):
        run(lambda x, params: x * params["w"], x, 2)
