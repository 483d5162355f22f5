"""Each engine that evaluates the loss on parts of a batch computes the loss of a single device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.layers.losses import LossTerms, Normalizer
from meshpar.loop.fit import Validator, fit
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.adapters.model import Model
from meshpar.training.state import TrainState
from tests.equal import token_batches
from tests.errors import raises
from tests.grid import cases

LAYERS, WIDTH, ROWS = 4, 8, 16
EXACT = {"weights": None, "gradients": None, "secondary": "fsdp"}
"""Use the kernels of quantizing strategies without rounding."""


class Engine(NamedTuple):
    """A mesh, a strategy and the options by which a step evaluates the loss on parts of a batch."""

    mesh: dict[str, int]
    strategy: Strategy
    options: Mapping[str, Any] = MappingProxyType({})


ONE_DEVICE = Engine({"fsdp": 1}, mp.fsdp())
TWO_LEVELS = mp.fsdp(axis=("data", "fsdp"), min_bytes=0, quantize=EXACT)
ENGINES = {
    "micro-steps": Engine({"fsdp": 4}, mp.fsdp(min_bytes=0), {"accumulate": 4}),
    "reduced once": Engine({"data": 2, "fsdp": 2}, mp.hsdp(), {"accumulate": 2, "reduce_gradients": "once"}),
    "quantized": Engine({"data": 2, "fsdp": 4}, TWO_LEVELS),
    "quantized, reduced once": Engine(
        {"data": 2, "fsdp": 4}, TWO_LEVELS, {"accumulate": 2, "reduce_gradients": "once"}
    ),
    "quantized micro-steps": Engine({"data": 2, "fsdp": 4}, TWO_LEVELS, {"accumulate": 2}),
    "1f1b": Engine({"data": 2, "stage": 2}, mp.pipeline_parallel(stages=2, microbatches=4) | mp.ddp()),
    "zb-v": Engine(
        {"fsdp": 2, "stage": 2}, mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-v") | mp.fsdp(min_bytes=0)
    ),
    "interleaved": Engine({"fsdp": 4}, mp.fsdp(min_bytes=0), {"accumulate": 2, "batch_slices": 2, "remat": "full"}),
    "prefetched": Engine({"fsdp": 4}, mp.fsdp(min_bytes=0, prefetch=1), {"accumulate": 2}),
}
WHOLE = {"sharded": Engine({"data": 2, "fsdp": 4}, mp.hsdp(min_bytes=0))}
"""Engines in which XLA sees the global batch."""
QUICK = ("micro-steps", "1f1b")


def model() -> Model:
    """Return a residual MLP with scanned layers."""

    def init(key):
        keys = jax.random.split(key)
        kernels = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4
        return {"layers": {"kernel": kernels}, "out": {"kernel": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 4}}

    def apply(params, x):
        x = mp.constrain(x, "batch", None)
        return mp.scan_layers(layer, x, params["layers"]) @ params["out"]["kernel"]

    def layer(x, params):
        return x + jnp.tanh(x @ params["kernel"])

    names = {"layers/kernel": ("layers", "embed", "mlp"), "out/kernel": ("embed", None)}
    return mp.from_functions(init, apply, names=names)


def batch_of(weights: Any) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    return {name: draw((ROWS, WIDTH)).astype(np.float32) for name in "xy"} | {"w": np.asarray(weights)}


# In each engine, some part of the batch (a device, a microbatch or a micro-step) has weight 0.
WEIGHTS = np.where(np.isin(np.arange(ROWS), [0, 1, 2, 3, 4, 8, 12]), 0, np.arange(ROWS) % 4 + 1).astype(np.int32)


def errors_of(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def weighted(model, batch, key):
    """Return a weighted mean. The metric `mean` is 0 / 0 for a part without weight."""
    errors, weights = errors_of(model, batch), batch["w"]
    total, weight = (errors * weights).sum(), weights.sum()
    return mp.MeanLoss(total, weight), {
        "mean": total / weight,
        "is_large": ((errors > 2) * weights).sum() / weight,
        "rows": (weights > 0).sum(),
    }


def summed(model, batch, key):
    errors = errors_of(model, batch)
    return mp.SumLoss((errors * batch["w"]).sum()), {"mean": errors.mean(), "rows": (batch["w"] > 0).sum()}


def scalar(model, batch, key):
    errors = errors_of(model, batch)
    return errors.mean(), {"largest": errors.max(), "rows": jnp.asarray(len(errors))}


class Step(NamedTuple):
    metrics: dict[str, np.ndarray]
    before: Any
    """Host copies of parameters, optimizer state and the number of skipped updates."""
    after: Any

    @property
    def grads(self) -> list[np.ndarray]:
        """Return the gradients, after an update by `optax.sgd(1.0)`."""
        return jax.tree.map(np.subtract, jax.tree.leaves(self.before[0]), jax.tree.leaves(self.after[0]))


def state_of(engine: Engine, tx: Any = None, built: Model | None = None) -> TrainState:
    mesh = mp.MeshSpec(**engine.mesh).build(jax.devices()[: math.prod(engine.mesh.values())])
    return mp.init_state(built or model(), tx or optax.sgd(1.0), mesh=mesh, strategy=engine.strategy, key=0)


def one_step(engine: Engine, loss: Any, batch: Any, tx: Any = None, built: Model | None = None, **options) -> Step:
    def on_host(state):
        return jax.device_get((state.params, state.opt_state, state.skipped))

    state = state_of(engine, tx, built)
    before = on_host(state)
    state, metrics = mp.train_step(loss, **{**engine.options, **options})(state, batch)
    return Step(jax.device_get(metrics), before, on_host(state))


def assert_equal(actual: Step, expected: Step) -> None:
    """Check that metrics and gradients agree up to the order of float32 sums."""
    assert actual.metrics.keys() == expected.metrics.keys()
    for name, x in expected.metrics.items():
        assert actual.metrics[name].dtype == x.dtype, name
        np.testing.assert_allclose(actual.metrics[name], x, rtol=2e-5, err_msg=name)
    for a, b in zip(actual.grads, expected.grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@functools.cache
def on_one_device(loss: Any, weights: str = "int32") -> Step:
    return one_step(ONE_DEVICE, loss, batch_of(WEIGHTS.astype(weights)))


# ---- Equality with a single device -----------------------------------------------------------------------------------

LOSSES = {"mean": weighted, "sum": summed}
EQUAL = list(itertools.product(LOSSES, {**ENGINES, **WHOLE}))


@pytest.mark.parametrize(("loss", "name"), cases(*zip(LOSSES, QUICK, strict=False), grid=EQUAL))
def test_parts_of_a_batch_combine_to_the_global_loss(loss, name):
    actual = one_step({**ENGINES, **WHOLE}[name], LOSSES[loss], batch_of(WEIGHTS))
    assert_equal(actual, on_one_device(LOSSES[loss]))


def test_metrics_on_a_single_device():
    metrics, batch = on_one_device(weighted).metrics, batch_of(WEIGHTS)
    errors = np.asarray(errors_of(functools.partial(applied, on_one_device(weighted).before[0]), batch))
    assert metrics["loss"] == pytest.approx(np.average(errors, weights=WEIGHTS), rel=1e-5)
    assert metrics["mean"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert 0 < metrics["is_large"] == pytest.approx(np.average(errors > 2, weights=WEIGHTS), rel=1e-6)
    assert (metrics["rows"], metrics["loss_weight"]) == ((WEIGHTS > 0).sum(), WEIGHTS.sum())
    assert metrics["loss_weight"].dtype == np.int32
    assert "loss_weight" not in on_one_device(summed).metrics


def applied(params, x):
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        return model().bind(params, {})(x)


@pytest.mark.parametrize("name", cases("1f1b", grid=ENGINES))
def test_weights_may_be_floats(name):
    actual = one_step(ENGINES[name], weighted, batch_of(WEIGHTS.astype(np.float32)))
    assert_equal(actual, on_one_device(weighted, "float32"))
    assert actual.metrics["loss_weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("name", "kind"),
    cases(
        ("micro-steps", np.int32),
        grid=itertools.product(ENGINES, [int, np.int32, np.float32, np.array]),
    ),
)
def test_constant_weights_are_summed(name, kind):
    def constant(model, batch, key):
        return mp.MeanLoss(errors_of(model, batch).sum(), kind(len(batch["x"]))), {}

    actual = one_step(ENGINES[name], constant, batch_of(WEIGHTS))
    assert_equal(actual, one_step(ONE_DEVICE, constant, batch_of(WEIGHTS)))
    assert actual.metrics["loss_weight"] == ROWS


# ---- Batches of weight 0 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonfinite", cases("ignore", grid=["raise", "ignore"]))
@pytest.mark.parametrize("name", cases(*QUICK, "sharded", grid={**ENGINES, **WHOLE}))
def test_zero_weight_leaves_the_state_unchanged(name, nonfinite):
    engine, batch = {**ENGINES, **WHOLE}[name], batch_of(np.zeros(ROWS, np.int32))
    step = one_step(engine, weighted, batch, optax.adamw(1e-2, weight_decay=0.1), nonfinite=nonfinite)
    assert step.metrics["loss"] == step.metrics["loss_weight"] == step.metrics["rows"] == 0
    assert all(np.isfinite(x) for x in step.metrics.values()), step.metrics
    assert step.metrics.get("finite", True)
    jax.tree.map(np.testing.assert_array_equal, step.after, step.before)


# ---- Losses that are refused for parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_scalar_losses_need_an_equal_weight(name):
    engine, batch = ENGINES[name], batch_of(WEIGHTS)
    with raises("ambiguous-loss") as error:
        mp.train_step(scalar, **engine.options).trace(state_of(engine).setup.abstract, batch)
    assert 'train_step(..., loss_is="mean_over_examples")' in error.value.fix


@pytest.mark.parametrize("name", cases(*QUICK, grid={**ENGINES, **WHOLE}))
def test_scalar_losses_with_mean_over_examples(name):
    actual = one_step({**ENGINES, **WHOLE}[name], scalar, batch_of(WEIGHTS), loss_is="mean_over_examples")
    expected = on_one_device(scalar)
    assert actual.metrics["rows"] == ROWS
    assert "loss_weight" not in actual.metrics
    # The metric averages the largest error of each part, so it differs from the largest error of the batch.
    actual, expected = (s._replace(metrics={**s.metrics, "largest": np.float32(0)}) for s in (actual, expected))
    assert_equal(actual, expected)


def by_outputs(model, batch, key):
    out = model(batch["x"])
    return mp.MeanLoss((out**2).sum(), (out > 0).sum()), {}


@pytest.mark.parametrize("name", ENGINES)
def test_weights_of_model_outputs_need_a_single_part(name):
    engine = ENGINES[name]
    with raises("unsupported-feature", "MeanLoss.weight"):
        mp.train_step(by_outputs, **engine.options).trace(state_of(engine).setup.abstract, batch_of(WEIGHTS))


def test_loss_weight_is_a_reserved_metric():
    def loss(model, batch, key):
        return weighted(model, batch, key)[0], {"loss_weight": jnp.ones(())}

    with raises("conflict", "loss_weight"):
        one_step(ONE_DEVICE, loss, batch_of(WEIGHTS))
    with raises("unknown-choice"):
        mp.train_step(loss, loss_is="mean")


# ---- Random weights --------------------------------------------------------------------------------------------------


def masked(model, batch, key):
    """Draw about half of the examples."""
    drawn = jax.random.bernoulli(key, 0.5, batch["w"].shape) * batch["w"]
    return mp.MeanLoss((errors_of(model, batch) * drawn).sum(), drawn.sum()), {}


def parts_of(name: str, count: int, key: jax.Array):
    """Yield example indices and the random key for each part of the batch."""
    rows, fold = np.arange(ROWS), jax.random.fold_in
    if name == "micro-steps":
        yield from ((rows.reshape(4, count, -1)[:, i].ravel(), fold(key, i)) for i in range(count))
        return
    devices = {"reduced once": 4, "quantized": 8, "1f1b": 2}[name]
    for device, i in itertools.product(range(devices), range(count)):
        own = fold(key, device) if count == 1 else fold(fold(key, device), i)
        yield rows.reshape(devices, count, -1)[device, i], fold(own, 1) if name == "1f1b" else own


@pytest.mark.parametrize(
    ("name", "count"),
    cases(
        ("quantized", 2), ("1f1b", 4),
        grid=[("micro-steps", 4), ("reduced once", 2), ("quantized", 1), ("quantized", 2), ("1f1b", 4)],
    ),
)  # fmt: skip
def test_weights_are_drawn_with_the_key_of_their_loss(name, count):
    """The weights are summed before the losses: with the key of another part, the sum would be of other examples."""
    engine, batch = ENGINES[name], batch_of(WEIGHTS)
    key = jax.random.fold_in(jax.random.wrap_key_data(state_of(engine).key), 0)
    step = one_step(engine, masked, batch, **({} if name == "1f1b" else {"accumulate": count}))
    model = functools.partial(applied, step.before[0])
    parts = parts_of(name, count, key)
    losses = [masked(model, {k: x[rows] for k, x in batch.items()}, own)[0] for rows, own in parts]
    weight = sum(int(loss.weight) for loss in losses)
    assert len({int(loss.weight) for loss in losses}) > 1
    assert step.metrics["loss_weight"] == weight > 0
    assert step.metrics["loss"] == pytest.approx(sum(float(loss.total) for loss in losses) / weight, rel=1e-5)


# ---- Tokens ----------------------------------------------------------------------------------------------------------

SEQ, VOCAB = 8, 32
CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
)


def tokens(counted: Any, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Draw tokens with `counted` counted targets at the end. Earlier targets are -100."""
    draw = np.random.default_rng(1).integers(0, VOCAB, (rows, SEQ + 1), dtype=np.int32)
    is_counted = np.arange(rows * SEQ).reshape(rows, SEQ) >= rows * SEQ - counted
    return {"inputs": draw[:, :-1], "targets": np.where(is_counted, draw[:, 1:], -100)}


def counting(model, batch, key):
    loss, metrics = next_token_loss(model, batch, key)
    return loss, {**metrics, "tokens": (batch["targets"] >= 0).sum()}


def test_validation_averages_over_all_tokens():
    batches = [tokens(counted) for counted in (128, 3, 2, 0)]
    state, evaluate = state_of(Engine({"fsdp": 4}, mp.fsdp()), built=CONFIG.build()), mp.eval_step(counting)
    validator = Validator(evaluate, batches, every=1)
    result = fit(mp.train_step(counting), state, itertools.repeat(batches[0]), steps=1, hooks=[validator])
    assert result.validation is not None
    actual = result.validation.metrics
    at_once = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    expected = jax.tree.map(float, jax.device_get(evaluate(result.state, at_once)))
    assert actual["tokens"] == actual["loss_weight"] == expected["loss_weight"] == 133
    assert actual == pytest.approx(expected, rel=1e-5)


CHUNKED = {"whole": CONFIG, "chunked": dataclasses.replace(CONFIG, vocab_chunk=12)}
FSDP = Engine({"fsdp": 4}, mp.fsdp(min_bytes=0))


@pytest.mark.parametrize("logits", cases("chunked", grid=CHUNKED))
@pytest.mark.parametrize("accumulate", cases(2, grid=[1, 2]))
def test_ignored_targets_do_not_count(logits, accumulate):
    batch, built = tokens(75), CHUNKED[logits].build()
    actual = one_step(FSDP, next_token_loss, batch, built=built, accumulate=accumulate)
    weights = (batch["targets"] >= 0).astype(np.int32)
    by_weights = {"inputs": batch["inputs"], "targets": np.maximum(batch["targets"], 0), "weights": weights}
    assert_equal(actual, one_step(ONE_DEVICE, next_token_loss, by_weights, built=built))
    assert actual.metrics["loss_weight"] == 75
    assert actual.metrics["finite"]


@pytest.mark.parametrize(("logits", "target"), cases(("chunked", VOCAB), grid=itertools.product(CHUNKED, [VOCAB, -1])))
def test_targets_outside_the_vocabulary_give_nan(logits, target):
    batch = tokens(75)
    batch["targets"][-1, -1] = target
    step = one_step(FSDP, next_token_loss, batch, built=CHUNKED[logits].build(), nonfinite="skip")
    assert np.isnan(step.metrics["loss"])
    assert not step.metrics["finite"]
    assert step.after[2] == 1
    jax.tree.map(np.testing.assert_array_equal, step.after[0], step.before[0])


@pytest.mark.matrix
def test_moe_losses_with_pipeline_stages():
    """Routers see microbatches, so the reference runs the same microbatches on a single device."""
    moe = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=16, auxiliary_weight=0.1)
    config, batch = dataclasses.replace(CONFIG, moe=moe, mlp_dim=16), token_batches(ROWS, SEQ, 1, VOCAB)[0]
    staged = Engine({"stage": 2}, mp.pipeline_parallel(stages=2, microbatches=4) | mp.ddp())
    actual = one_step(staged, next_token_loss, batch, built=config.build())
    accumulated = one_step(ONE_DEVICE, next_token_loss, batch, built=config.build(), accumulate=4)
    # Loads are sums over microbatches.
    loads = {name: x / 4 if name.endswith("load") else x for name, x in actual.metrics.items()}
    assert_equal(actual._replace(metrics=loads), accumulated)

    state, evaluate, parts = state_of(ONE_DEVICE, built=config.build()), mp.eval_step(next_token_loss), []
    for i in range(4):
        rows = jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch)
        parts.append(jax.device_get(evaluate(state, rows)))
    losses, weights, added = (np.array([part[k] for part in parts]) for k in ("loss", "loss_weight", "moe/aux_loss"))
    assert len(set(weights)) > 1
    assert added.min() > 0.01
    expected = np.average(losses, weights=weights) + added.mean()
    assert actual.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert actual.metrics["loss"] != pytest.approx(losses.mean() + added.mean(), rel=1e-5)
    assert actual.metrics["moe/aux_loss"] == pytest.approx(added.mean(), rel=1e-5)


@pytest.mark.parametrize("weight", [-1.0, np.inf, np.nan])
def test_weight_that_is_not_valid_gives_nan(weight):
    loss = mp.MeanLoss(jnp.float32(2), jnp.float32(weight))
    value, metrics = LossTerms.of(loss, {}).normalized(Normalizer(2, jnp.float32(weight)))
    assert np.isnan(value)
    assert set(metrics) == {"loss_weight"}
