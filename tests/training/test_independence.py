"""A loss that combines examples is right on the global batch, and refused by engines that divide the batch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.training.independence import examined
from tests.errors import raises
from tests.grid import cases

KEYS = jax.random.split(jax.random.key(0), 4)
X, Y = np.asarray(jax.random.normal(KEYS[0], (2, 16, 8)))
BATCH = {"x": X, "y": Y}


def start(key):
    u, v = jax.random.normal(KEYS[1], (2, 8, 12))
    return {"u": u, "v": v}


def towers():
    def apply(params, x, y):
        return tuple(mp.constrain(z, "batch", None) for z in (x @ params["u"], y @ params["v"]))

    return mp.from_functions(start, apply)


def losses_of(u, v):
    return optax.softmax_cross_entropy_with_integer_labels(u @ v.T, jnp.arange(len(u)))


def contrastive(model, batch, key):
    losses = losses_of(*model(batch["x"], batch["y"]))
    return mp.MeanLoss(losses.sum(), losses.size), {}


def one_step(strategy, loss=contrastive, model=None, axes=None, **options):
    spec = mp.MeshSpec(**(axes or {"data": 2}))
    mesh = spec.build(jax.devices()[: math.prod(spec.values())])
    state = mp.init_state(model or towers(), optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
    return float(mp.train_step(loss, **options)(state, BATCH)[1]["loss"])


@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 8}], ids=str)
def test_contrastive_loss_of_the_global_batch(axes):
    params = start(None)
    expected = float(losses_of(X @ params["u"], Y @ params["v"]).mean())
    assert one_step(mp.fsdp(min_bytes=0), axes=axes) == pytest.approx(expected, rel=1e-5)


ENGINES = {
    "micro-steps": (mp.ddp(), {"data": 2}, {"accumulate": 2}),
    "once": (mp.ddp(), {"data": 2}, {"accumulate": 2, "reduce_gradients": "once"}),
    "groups": (mp.hsdp(min_bytes=0), {"data": 2, "fsdp": 2}, {"accumulate": 2}),
    "quantized": (mp.fsdp(min_bytes=0, quantize="int8"), {"fsdp": 2}, {}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_that_divide_the_batch_refuse_a_contrastive_loss(name):
    strategy, axes, options = ENGINES[name]
    with raises("dependent-examples", "test_independence.py"):
        one_step(strategy, axes=axes, **options)


def test_stages_refuse_a_contrastive_loss():
    def apply(params, x, y):
        return mp.scan_layers(lambda x, w: x + jnp.tanh(x @ w["w"]), x, params["layers"]), y

    def init(key):
        return {"layers": {"w": jax.random.normal(key, (2, 8, 8))}}

    model = mp.from_functions(init, apply, names={"layers/w": ("layers", None, None)})
    strategy = mp.ddp() | mp.pipeline_parallel(stages=2, microbatches=2)
    with raises("dependent-examples"):
        one_step(strategy, model=model, axes={"stage": 2})


def test_sum_over_parts_accepts_the_value_of_each_part():
    us, vs = (np.split(z @ w, 2) for z, w in zip((X, Y), start(None).values(), strict=True))
    halves = [float(losses_of(u, v).mean()) for u, v in zip(us, vs, strict=True)]
    actual = one_step(mp.ddp(), axes={"data": 1}, accumulate=2, loss_is="sum_over_parts")
    assert actual == pytest.approx(np.mean(halves), rel=1e-5)


def test_sum_over_examples_accepts_undecided_losses_only():
    def opaque(model, batch, key):
        u, _ = model(batch["x"], batch["y"])
        total, _ = jax.lax.scan(lambda total, row: (total + (row**2).sum(), None), 0.0, u)
        return mp.MeanLoss(total, len(u)), {}

    with raises("undecided-examples"):
        one_step(mp.ddp(), opaque, accumulate=2)
    right = one_step(mp.ddp(), opaque)
    assert one_step(mp.ddp(), opaque, accumulate=2, loss_is="sum_over_examples") == pytest.approx(right, rel=1e-5)
    with raises("dependent-examples"):
        one_step(mp.ddp(), accumulate=2, loss_is="sum_over_examples")


def test_sum_over_examples_gives_a_scalar_its_meaning():
    def total(model, batch, key):
        u, _ = model(batch["x"], batch["y"])
        return (u**2).sum(), {}

    right = one_step(mp.ddp(), total)
    assert one_step(mp.ddp(), total, accumulate=2, loss_is="sum_over_examples") == pytest.approx(right, rel=1e-5)


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.down = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.norm(x)))


def of_images(model, batch, key):
    return mp.MeanLoss((model(batch["x"]) ** 2).sum(), len(batch["x"])), {}


def test_batch_norm_is_refused_with_micro_steps():
    model = mp.from_nnx(Normalized)
    with raises("dependent-examples"):
        one_step(mp.ddp(), of_images, model, accumulate=2)
    assert np.isfinite(one_step(mp.ddp(), of_images, model, accumulate=2, loss_is="sum_over_parts"))


class Queue(nnx.Module):
    """Negatives from earlier steps, as in He et al. 2019, Momentum Contrast."""

    def __init__(self, rngs):
        self.down, self.negatives = nnx.Linear(8, 3, rngs=rngs), nnx.BatchStat(jnp.ones((4, 3)))
        self.seen, self.dropout = nnx.BatchStat(jnp.zeros(())), nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        self.seen[...] = self.seen[...] + len(x)
        return self.dropout(self.down(x))


def with_negatives(model, batch, key):
    u, negatives = model(batch["x"]), model.negatives[...]
    model.negatives[...] = jnp.concatenate([jax.lax.stop_gradient(u), negatives])[:4]
    return mp.MeanLoss(jax.nn.logsumexp(u @ negatives.T, axis=-1).sum(), len(u)), {}


def test_loss_that_reads_variables_of_earlier_micro_steps_is_refused():
    model = mp.from_nnx(Queue)
    assert np.isfinite(one_step(mp.ddp(), with_negatives, model))
    with raises("dependent-examples", "`negatives`"):
        one_step(mp.ddp(), with_negatives, model, accumulate=2)
    right = one_step(mp.ddp(), of_images, model, axes={"data": 1})
    assert one_step(mp.ddp(), of_images, model, accumulate=2) == pytest.approx(right, rel=1e-5)


def counting(variable, update):
    """Return a model with a variable that the forward pass updates."""

    def apply(params, state, x):
        x = mp.constrain(x, "batch", None)
        return x @ params["u"], {"variable": update(state["variable"], x)}

    return mp.from_functions(lambda key: (start(key), {"variable": jnp.zeros((), variable)}), apply, keeps_state=True)


def squares_of(model, batch, key):
    return mp.SumLoss((model(batch["x"]) ** 2).sum()), {}


BY_DEVICE = {
    "quantize": (mp.fsdp(quantize="int8", min_bytes=0), {"fsdp": 2}, {}),
    "once": (mp.ddp(), {"data": 2}, {"accumulate": 2, "reduce_gradients": "once"}),
    "groups": (mp.hsdp(min_bytes=0), {"data": 2, "fsdp": 2}, {"accumulate": 2}),
}


@pytest.mark.parametrize(
    ("dtype", "update"),
    [
        ("int32", lambda old, x: old + (x > 0).sum()),
        ("float32", lambda old, x: old + (x**2).sum()),
        ("float32", lambda old, x: 0.9 * old + 0.1 * x.var()),
        ("float32", lambda old, x: jnp.maximum(old, x.max())),
        ("int32", lambda old, x: old + x.shape[0]),
        ("float32", lambda old, x: old + jnp.ones_like(x[:, 0]).sum()),
    ],
)
@pytest.mark.parametrize("engine", cases("quantize", grid=BY_DEVICE))
def test_variables_that_are_not_means_over_examples_are_refused(engine, dtype, update):
    """The state would receive the mean of the devices' sums, or their largest count."""
    strategy, axes, options = BY_DEVICE[engine]
    mesh = mp.MeshSpec(**axes).abstract()
    state = mp.abstract_state(counting(dtype, update), optax.sgd(0.1), mesh=mesh, strategy=strategy)
    with raises("dependent-examples", "`variable` of the model"):
        mp.train_step(squares_of, **options).trace(state, BATCH)
    mp.train_step(squares_of, loss_is="sum_over_parts", **options).trace(state, BATCH)


def test_variables_may_count_steps():
    model, mesh = counting("int32", lambda old, x: old + 1), mp.MeshSpec(fsdp=2).abstract()
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(quantize="int8", min_bytes=0))
    mp.train_step(squares_of).trace(state, BATCH)


def test_variables_that_are_means_over_examples_equal_the_global_batch():
    model = counting("float32", lambda old, x: 0.9 * old + 0.1 * (x**2).mean())
    mesh = mp.MeshSpec(fsdp=2).build(jax.devices()[:2])
    strategy = mp.fsdp(quantize="int8", min_bytes=0)
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
    state, _ = mp.train_step(squares_of)(state, BATCH)
    np.testing.assert_allclose(state.extra["variable"], 0.1 * (X**2).mean(), rtol=1e-6)


def test_weight_that_is_not_a_sum_is_refused():
    def bounded(model, batch, key):
        u, _ = model(batch["x"], batch["y"])
        return mp.MeanLoss((u**2).sum(), jnp.maximum((batch["x"] > 0).sum(), 1)), {}

    with raises("dependent-examples") as error:
        one_step(mp.ddp(), bounded, accumulate=2)
    assert "mask.sum()" in error.value.fix


MEANS = {
    "a mean with its size": lambda errors: mp.MeanLoss(errors.mean(), errors.size),
    "a mean with a sum of weights": lambda errors: mp.MeanLoss(errors.mean(), (errors >= 0).sum()),
    "a mean as a sum": lambda errors: mp.SumLoss(errors.mean()),
}
SUMS = {
    "half of a sum": lambda errors: mp.MeanLoss(errors.sum() / 2, errors.size),
    "a mean over features": lambda errors: mp.MeanLoss(errors.mean(-1).sum(), len(errors)),
    "a sum divided by its features": lambda errors: mp.MeanLoss(errors.sum() / 16, len(errors)),
}


@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_total_that_is_a_mean_is_refused(name):
    def loss(model, batch, key):
        u, _ = model(batch["x"], batch["y"])
        return {**MEANS, **SUMS}[name](u**2), {}

    if name in MEANS:
        with raises("ambiguous-loss"):
            one_step(mp.ddp(), loss, accumulate=2)
    else:
        assert one_step(mp.ddp(), loss, accumulate=2) == pytest.approx(one_step(mp.ddp(), loss), rel=1e-5)


def test_interleave_refuses_layers_that_combine_examples():
    def init(key):
        return {"layers": {"w": jax.random.normal(key, (2, 8, 8))}}

    def model_of(center):
        def layer(x, w):
            return x + jnp.tanh((x - x.mean(0) if center else x) @ w["w"])

        def apply(params, x, y):
            return mp.scan_layers(layer, x, params["layers"]), y

        return mp.from_functions(init, apply, names={"layers/w": ("layers", None, None)})

    with raises("dependent-examples", "batch_slices=2") as error:
        one_step(mp.ddp(), model=model_of(center=True), batch_slices=2)
    assert "batch_slices=1" in error.value.fix
    right = one_step(mp.ddp(), model=model_of(center=False))
    assert one_step(mp.ddp(), model=model_of(center=False), batch_slices=2) == pytest.approx(right, rel=1e-5)


TINY = {
    "vocab_size": 64,
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 24,
}
DECODERS = {
    "blockwise": {},
    "unfused": {"attention": "xla"},
    "window": {"attention_window": 4, "attention_cap": 5.0, "logits_cap": 5.0},
    "sinks": {"attention_sinks": True, "qk_norm": True},
    "vocabulary in chunks": {"vocab_chunk": 16, "tied_embeddings": True},
    "latent attention": {
        "num_kv_heads": 4,
        "latent": LatentAttention(q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8),
    },
    "dropless experts": {"moe": MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=24, auxiliary_weight=0.1)},
    "experts of fixed capacity": {
        "moe": MoEConfig(routing=Routing(num_experts=4, top_k=2, capacity_factor=1.25), mlp_dim=24, shared_experts=1)
    },
}


@pytest.mark.parametrize(
    "name", cases("sinks", "vocabulary in chunks", "latent attention", "experts of fixed capacity", grid=DECODERS)
)
def test_decoders_are_sums_over_examples(name):
    config = TransformerConfig(**{**TINY, **DECODERS[name]})
    mesh, strategy = mp.MeshSpec(data=8).abstract(), mp.ddp()
    state = mp.abstract_state(config.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets", "positions", "segments")}
    batch["weights"] = jax.ShapeDtypeStruct((16, 16), np.float32)
    step = mp.train_step(next_token_loss, accumulate=2)
    assert examined(step.loss_fn, step.options, state, batch).combined is None
