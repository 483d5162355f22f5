"""Tests of train_step and eval_step: options, batches, accumulation, non-finite updates, compiled collectives."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import meshpar as mp
from meshpar.inspect import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from tests.errors import raises
from tests.grid import cases

EMBED, MLP, LAYERS, ROWS, SEQ = 16, 32, 3, 16, 4
NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "scale": ("layers", "embed")}


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (LAYERS, EMBED, MLP)) * 0.1,
        "down": jax.random.normal(down, (LAYERS, MLP, EMBED)) * 0.1,
        "scale": jnp.ones((LAYERS, EMBED)),
    }


def apply(params, x):
    """Run stacked residual MLPs with the activation constraints of a transformer."""
    x = mp.constrain(x, "batch", "norm_seq", "act_embed")

    def layer(x, p):
        h = mp.constrain(x * p["scale"], "batch", "seq", "act_embed")
        h = mp.constrain(jnp.tanh(h @ p["up"]), "batch", "seq", "act_mlp")
        return mp.constrain(x + h @ p["down"], "batch", "norm_seq", "act_embed"), None

    return jax.lax.scan(layer, x, params)[0]


def loss_fn(model, batch, key):
    out = model(batch["x"])
    loss = mp.MeanLoss(((out - batch["y"]) ** 2).sum(), out.size)
    return loss, {"mean_out": out.mean(), "noise": jax.random.uniform(key)}


def make_batch(seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(rows, SEQ, EMBED)).astype(np.float32) for name in ("x", "y")}


MODEL = mp.from_functions(init, apply, names=NAMES)
ADAM = optax.adam(1e-2)


def make_state(spec, strategy, tx=ADAM, model=MODEL, **kwargs):
    devices = jax.devices()[: int(np.prod(list(spec.values())))]
    return mp.init_state(model, tx, mesh=spec.build(devices), strategy=strategy, key=0, **kwargs)


def run(step, state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def collectives(step, state, batch):
    module = hlo.parse(step.lower(state, batch).compile().as_text())
    return census.census(module, state.setup.mesh)


# ---- Accumulation ----------------------------------------------------------------------------------------------------


def test_once_scatters_gradients_before_the_reduction_over_groups():
    """XLA would all-reduce full gradients over both axes, and keep a slice."""
    state = make_state(mp.MeshSpec(data=2, fsdp=4), mp.hsdp(min_bytes=0))
    step = mp.train_step(loss_fn, accumulate=2, reduce_gradients="once")
    sent = collections.Counter()
    for one in collectives(step, state, make_batch(0)):
        if max(x.size for x in one.arrays) > 64:
            sent[one.logical_kind, one.axes] += sum(x.size for x in one.arrays)
    # The scale has 48 elements, and XLA may combine it with the matrices.
    full = 2 * LAYERS * EMBED * MLP
    assert sent["reduce-scatter", ("fsdp",)] in (full, full + LAYERS * EMBED)
    assert sent["all-reduce", ("data",)] in (full // 4, (full + LAYERS * EMBED) // 4)
    assert {axes for _, axes in sent} == {("fsdp",), ("data",)}


def test_reduce_gradients_each_in_the_loop_once_after_it():
    spec, strategy = mp.MeshSpec(fsdp=8), mp.fsdp()
    state = make_state(spec, strategy)

    def in_micro_steps(mode):
        """Gradient reductions by how many loops they stand in; scalars (loss, norm) are not gradients."""
        step = mp.train_step(loss_fn, accumulate=4, reduce_gradients=mode)
        found = [c for c in collectives(step, state, make_batch(0, rows=32)) if c.payload_bytes > 64]
        return [(c.kind, c.count_per_step) for c in found]

    each = in_micro_steps("each_microbatch")
    # 4 micro-steps x 3 layers: weights gathered forward and backward, gradients reduced (as all-reduces on CPU).
    assert {count for kind, count in each if kind in ("all-reduce", "reduce-scatter")} == {4 * LAYERS}
    assert {count for kind, count in each if kind == "all-gather"} == {4 * LAYERS}
    once = in_micro_steps("once")
    assert {kind for kind, _ in once} == {"all-gather", "all-reduce"}
    assert {count for _, count in once} == {1}


def test_reduce_once_keeps_tensor_parallel_shards():
    state = make_state(mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel())
    step = mp.train_step(loss_fn, accumulate=2, reduce_gradients="once")
    found = [c for c in collectives(step, state, make_batch(0)) if c.payload_bytes > 64]
    assert not [c for c in found if c.axes == ("tensor",) and not c.in_loop]


def test_micro_batches_move_no_examples():
    """Each device divides its local batch, so devices communicate only gradients and scalars."""
    state = make_state(mp.MeshSpec(data=8), mp.ddp())
    step = mp.train_step(loss_fn, accumulate=2)
    kinds = {c.kind for c in collectives(step, state, make_batch(0, rows=32))}
    assert kinds == {"all-reduce"}


@pytest.mark.parametrize("dtype", cases("float16", grid=["float16", "bfloat16"]))
@pytest.mark.parametrize(
    ("accumulate", "mode"), cases((2, "once"), grid=[(1, "each_microbatch"), (2, "each_microbatch"), (2, "once")])
)
def test_large_weights_do_not_overflow_float16_reduction(accumulate, mode, dtype):
    """The gradient of a total over tokens overflows float16, the gradient of the mean does not."""

    def weighed(model, batch, key):
        tokens = 1_000_000 * (1 + batch["x"][:, 0, 0] ** 2)
        errors = ((model(batch["x"]) - batch["y"]) ** 2).mean((1, 2))
        return mp.MeanLoss((100 * errors * tokens).sum(), tokens.sum()), {}

    def trained(**options):
        state = make_state(mp.MeshSpec(fsdp=8), mp.zero1(), optax.sgd(1e-3))
        return mp.train_step(weighed, **options)(state, make_batch(0))

    wide, expected = trained()
    state, metrics = trained(accumulate=accumulate, reduce_gradients=mode, precision=mp.Precision(reduce=dtype))
    assert bool(metrics["finite"])
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    # Each of a few rounded additions is off by at most half a unit in the last place: 2^-11, or 2^-8.
    assert float(metrics["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=0.01)
    change = {"float16": 2e-5, "bfloat16": 2e-4}[dtype]
    np.testing.assert_allclose(state.params["up"], wide.params["up"], atol=change)


def test_weighted_reduction_uses_the_reduce_dtype():
    step = mp.train_step(masked_rows, accumulate=2, reduce_gradients="once", precision=mp.Precision(reduce="float16"))
    state = make_state(mp.MeshSpec(data=8), mp.ddp())
    text = step.lower(state, make_batch(0)).as_text()
    sums = [line for line in text.splitlines() if "stablehlo.reduce(" in line and "xf16>, tensor<f16>" in line]
    assert len(sums) == len(jax.tree.leaves(state.params))


def masked_rows(model, batch, key):
    return mp.MeanLoss(loss_fn(model, batch, key)[0].total, (batch["x"] > 0).sum()), {}


@pytest.mark.parametrize("accumulate", cases(2, grid=[1, 2]))
def test_metrics_accept_counts_and_flags(accumulate):
    def counting(model, batch, key):
        loss, _ = loss_fn(model, batch, key)
        return mp.MeanLoss(loss.total.astype(jnp.float16), loss.weight), {
            "rows": jnp.int32(40_000),
            "flag": loss.total > 0,
        }

    step = mp.train_step(counting, accumulate=accumulate)
    _, metrics = step(make_state(mp.MeshSpec(data=8), mp.ddp()), make_batch(0))
    assert float(metrics["rows"]) == 40_000 * accumulate
    assert float(metrics["flag"]) == 1
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("accumulate", cases(2, grid=[1, 2]))
def test_changed_structure_of_variables_is_an_error(accumulate):
    """NNX's `sow` creates an array that the model does not have at initialization."""
    growing = dataclasses.replace(MODEL, collect=lambda bound: {"sown": jnp.zeros(())})
    step = mp.train_step(loss_fn, accumulate=accumulate)
    with raises("wrong-shape", "`sown` of the model"):
        step(make_state(mp.MeshSpec(data=8), mp.ddp(), model=growing), make_batch(0))


def test_random_keys_differ_between_steps_and_micro_steps():
    def noisy(model, batch, key):
        noise = jax.random.uniform(key)
        return loss_fn(model, batch, key)[0], {"noise": noise, "square": noise**2}

    step = mp.train_step(noisy, accumulate=2)
    state, first = step(make_state(mp.MeshSpec(data=8), mp.ddp()), make_batch(0))
    _, second = step(state, make_batch(0))
    assert float(first["noise"]) != float(second["noise"])
    assert float(first["square"]) > float(first["noise"]) ** 2 + 1e-6  # two numbers, and not one twice


class Dropping(nnx.Module):
    """A layer with an NNX random stream, and a key that the layer splits in each call."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(ROWS, EMBED, use_bias=False, rngs=rngs)
        self.noisy = nnx.Linear(ROWS, 1, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.moving = nnx.Variable(rngs.noise())

    def __call__(self, x):
        ours, following = jax.random.split(self.moving.get_value())
        self.moving.set_value(following)
        return self.dropout(self.linear(x)), self.noisy(x)[:, 0] * jax.random.uniform(ours, (len(x),))


@pytest.mark.parametrize("mode", cases("once", grid=["each_microbatch", "once"]))
@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        pytest.param(mp.MeshSpec(), mp.ddp(), marks=pytest.mark.matrix),
        pytest.param(mp.MeshSpec(data=8), mp.ddp(), marks=pytest.mark.matrix),
        (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0)),
    ],
    ids=str,
)
def test_nnx_random_streams_differ_by_example_and_stay_replicated(spec, strategy, mode):
    """Each example has a different mask, and all devices keep the same keys and counts."""

    def linear(model, batch, key):
        dropped, noisy = model(batch["row"])  # one-hot, so that a row's mask is its row of the gradient
        return dropped.sum() + noisy.sum(), {}

    model = mp.from_nnx(Dropping)
    assert model.random_keys().keys() >= {"dropout/rngs/key", "moving"}
    state = make_state(spec, strategy, tx=optax.sgd(1.0), model=model)
    step = mp.train_step(linear, accumulate=2, reduce_gradients=mode, loss_is="mean_over_examples")
    masks, noises = set(), set()
    for _ in range(2):
        before = jax.device_get((state.params, state.extra))
        state, _ = step(state, {"row": np.eye(ROWS, dtype=np.float32)})
        for x in jax.tree.leaves(state.extra):
            assert all(np.array_equal(shard.data, x) for shard in x.addressable_shards)
        params, extra = jax.device_get((state.params, state.extra))
        masks |= {row.tobytes() for row in before[0]["linear"]["kernel"] - params["linear"]["kernel"] > 0.1}
        noises |= set((before[0]["noisy"]["kernel"] - params["noisy"]["kernel"]).round(6).ravel().tolist())
        own = [tree["dropout"]["rngs"] for tree in (before[1], extra)]
        np.testing.assert_array_equal(own[0]["key"], own[1]["key"])
        assert own[1]["count"] == own[0]["count"] + 2  # one for each micro-step
        assert not np.array_equal(before[1]["moving"], extra["moving"])
    assert len(masks) == len(noises) == 2 * ROWS


class Normed(nnx.Module):
    """Stacked layers after a batch norm, with a running mean in a variable."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (2, EMBED, EMBED)) / 4
        self.layers = nnx.Dict(kernel=nnx.Param(kernel, out_sharding=("layers", "embed", None)))
        self.seen = nnx.Variable(jnp.zeros(EMBED))
        self.norm, self.dropout = nnx.BatchNorm(EMBED, momentum=0.0, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        self.seen.set_value(x.mean(0))
        layers = {"kernel": self.layers.kernel[...]}
        return self.dropout(mp.scan_layers(lambda x, layer: jnp.tanh(x @ layer["kernel"]), self.norm(x), layers))


class WithoutNorm(Normed):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)


class LinenNormed(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_logical_partitioning(linen.initializers.normal(), ("layers", "embed", None))
        kernel = self.param("kernel", init, (2, EMBED, EMBED))
        x = linen.BatchNorm(use_running_average=False, momentum=0.0)(x)
        return mp.scan_layers(lambda x, kernel: jnp.tanh(x @ kernel), x, kernel)


INPUTS = (np.random.default_rng(0).normal(size=(ROWS, EMBED)) + np.arange(ROWS)[:, None]).astype(np.float32)
LOCAL_ROWS = {
    "once": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), {"accumulate": 2, "reduce_gradients": "once"}),
    "quantize": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0, quantize="int8"), {}),
    "stages": (mp.MeshSpec(stage=2), mp.pipeline_parallel(stages=2, microbatches=2), {}),
}


@pytest.mark.parametrize("engine", LOCAL_ROWS)
@pytest.mark.parametrize("model", [mp.from_nnx(Normed), mp.from_linen(LinenNormed(), INPUTS)], ids=["nnx", "linen"])
def test_local_batch_engines_refuse_batch_statistics(model, engine):
    """The running variance would be the mean of the devices' variances."""

    def never(model, batch, key):
        raise AssertionError("the loss was traced")

    spec, strategy, options = LOCAL_ROWS[engine]
    mesh = spec.build(jax.devices()[: int(np.prod(list(spec.values())))])
    state = mp.abstract_state(model, ADAM, mesh=mesh, strategy=strategy)
    with pytest.raises(mp.MeshparError, match="batch statistics of the model with .*LayerNorm"):
        mp.train_step(never, **options).trace(state, INPUTS)


@pytest.mark.parametrize("model", [mp.from_nnx(Normed), mp.from_linen(LinenNormed(), INPUTS)], ids=["nnx", "linen"])
def test_batch_statistics_use_the_global_batch(model):
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), model=model)
    state, _ = mp.train_step(lambda model, x, key: (model(x).mean(), {}))(state, INPUTS)
    stats = {path.rpartition("/")[2]: x for path, x in tree_leaves_with_paths(state.extra)}
    np.testing.assert_allclose(stats["mean"], INPUTS.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["var"], INPUTS.var(0), rtol=1e-4)


@pytest.mark.parametrize("engine", ["once", "quantize"])
def test_other_state_is_averaged_over_devices(engine):
    """Models with variables and random streams, but no batch statistics, train with these engines."""
    spec, strategy, options = LOCAL_ROWS[engine]
    state = make_state(spec, strategy, model=mp.from_nnx(WithoutNorm))
    state, _ = mp.train_step(lambda model, x, key: (mp.SumLoss(model(x).sum()), {}), **options)(state, INPUTS)
    by_micro_step = INPUTS.reshape(8, options.get("accumulate", 1), -1, EMBED)  # examples stay on their devices
    np.testing.assert_allclose(state.extra["seen"], by_micro_step[:, -1].mean((0, 1)), rtol=1e-5)


def masked_stack() -> Model:
    """Two identity layers, then a matrix."""

    def apply(params, x):
        x = mp.scan_layers(lambda x, one: x * one["kernel"], x, params["layers"])
        return x @ params["out"]

    def ones(key):
        return {"layers": {"kernel": jnp.ones((2, ROWS))}, "out": jnp.zeros((ROWS, 32))}

    return mp.from_functions(ones, apply, names={"layers/kernel": ("layers", "embed"), "out": ("embed", None)})


BY_ENGINE = {
    "plain": (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0), {"accumulate": 2}),
    "once": (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0), {"accumulate": 2, "reduce_gradients": "once"}),
    "quantize": (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0, quantize="int8"), {"accumulate": 2}),
    "stages": (
        mp.MeshSpec(stage=2, data=2, fsdp=2),
        mp.pipeline_parallel(stages=2, microbatches=2) | mp.fsdp(min_bytes=0),
        {},
    ),
}


@pytest.mark.parametrize("engine", cases("once", "quantize", "stages", grid=BY_ENGINE))
def test_random_key_of_loss_differs_by_micro_step_and_device(engine):
    """The batch is one-hot, so the gradient of a matrix row is the dropout mask of an example."""

    def dropped(model, batch, key):
        y = model(batch["row"])
        return mp.SumLoss((y * jax.random.bernoulli(key, 0.5, y.shape)).sum()), {}

    spec, strategy, options = BY_ENGINE[engine]
    state = make_state(spec, strategy, tx=optax.sgd(1.0), model=masked_stack())
    state, _ = mp.train_step(dropped, **options)(state, {"row": np.eye(ROWS, dtype=np.float32)})
    grads = -np.asarray(state.params["out"])
    masks = grads > grads.max() / 2
    np.testing.assert_allclose(grads, masks * grads.max(), atol=grads.max() / 64)  # int8 rounds by 1/254 of a block
    assert 0.3 < masks.mean() < 0.7
    assert len({row.tobytes() for row in masks}) == ROWS


# ---- Updates that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonfinite", cases("skip", grid=["skip", "raise"]))
def test_nonfinite_update_is_skipped_and_counted(nonfinite):
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    before = jax.device_get(state.params)
    step = mp.train_step(loss_fn, nonfinite=nonfinite)
    bad = make_batch(0)
    bad["y"][3, 0, 0] = np.nan
    state, metrics = step(state, bad)
    assert not bool(metrics["finite"])
    assert int(state.skipped) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    state, metrics = step(state, make_batch(1))
    assert bool(metrics["finite"])
    assert int(state.skipped) == 1
    assert not np.array_equal(state.params["up"], before["up"])


def test_float16_compute_is_an_error():
    for precision in ({"compute": "float16"}, {"params": "float16"}):
        with raises("unsupported-feature", "train_step"):
            mp.train_step(masked_rows, precision=mp.Precision(**precision))
    model = mp.from_functions(lambda key: {"w": jnp.ones((EMBED,), jnp.float16)}, lambda p, x: x * p["w"])
    state = mp.abstract_state(model, optax.sgd(1e-4), mesh=mp.MeshSpec(data=8).build(), strategy=mp.ddp())
    with raises("unsupported-feature", "parameter `w`"):
        mp.train_step(masked_rows).trace(state, make_batch(0))


def test_grad_norm_is_computed_in_float32():
    """The largest float16 is 65,504, so squares of gradients above 256 overflow."""

    def steep(model, batch, key):
        return (model(batch["x"]).astype(jnp.float32) * 300).sum(), {}

    model = mp.from_functions(lambda key: {"w": jnp.ones((EMBED,))}, lambda p, x: x * p["w"], names={"w": ("embed",)})
    precision = mp.Precision(reduce="float16")
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp(), optax.sgd(1e-4), model, precision=precision)
    state, metrics = mp.train_step(steep, precision=precision)(state, {"x": np.eye(EMBED, dtype=np.float32)})
    assert metrics["grad_norm"].dtype == jnp.float32
    assert float(metrics["grad_norm"]) == 300 * EMBED**0.5
    assert bool(metrics["finite"])
    np.testing.assert_allclose(state.params["w"], 0.97, rtol=1e-3)  # float16 has 11 bits


def test_nonfinite_ignore_applies_the_update():
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    bad = make_batch(0)
    bad["y"][0] = np.inf
    state, metrics = mp.train_step(loss_fn, nonfinite="ignore")(state, bad)
    assert "finite" not in metrics
    assert not np.isfinite(state.params["up"]).all()


# ---- State, batches, options -----------------------------------------------------------------------------------------


def test_input_state_is_donated():
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    mp.train_step(loss_fn)(state, make_batch(0))
    assert state.params["up"].is_deleted()


def called_twice(step, state):
    step(state.setup.init(0), make_batch(0))
    return step(state, make_batch(0))


@pytest.mark.parametrize("again", ["step", "second call", "evaluate", "bound", "load_params"])
def test_donated_state_is_an_error(again):
    """The CPU client of jax would abort the process."""
    used, new = make_state(mp.MeshSpec(fsdp=8), mp.fsdp()), make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    used.params["up"].delete()
    calls = {
        "step": lambda state: mp.train_step(loss_fn)(state, make_batch(0)),
        "second call": lambda state: called_twice(mp.train_step(loss_fn), state),
        "evaluate": lambda state: mp.eval_step(loss_fn)(state, make_batch(0)),
        "bound": lambda state: state.bound(),
        "load_params": lambda state: mp.load_params(state, new.params),
    }
    for state in (used, new.replace(params=used.params)):  # the second shares only the parameters
        with pytest.raises(mp.MeshparError, match=r"deleted or donated.*`state, metrics = step\(state, batch\)`"):
            calls[again](state)


def test_later_batches_are_checked():
    step, state = mp.train_step(loss_fn), make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    for _ in range(2):
        state, _ = step(state, make_batch(0))
    for code, batch in {
        "indivisible": make_batch(0, 12),
        "wrong-dtype": {**make_batch(0), "x": np.full((ROWS, 8), "text")},
        "wrong-shape": {**make_batch(0), "x": np.zeros((ROWS // 2, 8), np.float32)},
    }.items():
        with raises(code, "batch leaf"):
            step(state, batch)
    with raises("wrong-type", "step(state, batch)"):
        step(state.params, make_batch(0))
    assert int(step(state, make_batch(0))[0].step) == 3


def test_step_accepts_several_setups_and_batch_sizes():
    step = mp.train_step(loss_fn)
    losses = [
        float(step(make_state(spec, strategy), make_batch(0, rows))[1]["loss"])
        for spec, strategy in [(mp.MeshSpec(fsdp=8), mp.fsdp()), (mp.MeshSpec(data=8), mp.ddp())]
        for rows in (8, 16)
    ]
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    assert losses[1] == pytest.approx(losses[3], rel=1e-6)
    assert losses[0] != losses[1]


def test_batch_dtypes_are_checked_in_every_call():
    def looks(model, batch, key):
        return loss_fn(model, batch, key)[0], {"some": batch["narrow"].astype(jnp.float32).sum()}

    more = {
        "narrow": jnp.ones(ROWS, jnp.bfloat16), "flag": np.ones(ROWS, bool), "tiny": np.ones(ROWS, np.int8),
        "keys": jax.random.split(jax.random.key(0), ROWS),
    }  # fmt: skip
    step = mp.train_step(looks)
    state, metrics = step(make_state(mp.MeshSpec(fsdp=8), mp.fsdp()), make_batch(0) | more)
    assert float(metrics["some"]) == ROWS
    with pytest.raises(mp.MeshparError, match="batch leaf `tiny` of dtype object"):
        step(state, make_batch(0) | more | {"tiny": np.array([None] * ROWS)})


def test_help_shows_the_meaning_of_each_option():
    for cls in (mp.StepOptions, mp.Precision, mp.Recipe):
        text = inspect.getdoc(cls)
        assert all(re.search(rf"^  {field.name}: \w", text, re.MULTILINE) for field in dataclasses.fields(cls)), cls


def test_missing_batch_key_is_an_error_that_lists_the_keys():
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    with raises("unknown-name", "loss function") as error:
        mp.train_step(lambda m, b, k: (m(b["pixels"]).mean(), {})).lower(state, make_batch(0))
    assert "read 'pixels' at test_step.py:" in error.value.requested
    assert error.value.reason == f"the batch has the keys {', '.join(f'`{name}`' for name in make_batch(0))}"
    with pytest.raises(KeyError, match="pixels"):  # raised by a function that does not have the batch
        mp.train_step(lambda m, b, k: (lambda: {}["pixels"])()).lower(state, make_batch(0))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda m, b, k: m(b["x"]).mean(), "return (loss, metrics)"),
        (lambda m, b, k: (m(b["x"]), {}), "mp.MeanLoss(losses.sum(), losses.size)"),
        (lambda m, b, k: (m(b["x"]).mean(), {"out": m(b["x"])}), "metric `out`"),
    ],
)
def test_wrong_loss_results_are_errors(loss, says):
    with pytest.raises(mp.MeshparError) as error:
        mp.train_step(loss)(make_state(mp.MeshSpec(fsdp=8), mp.fsdp()), make_batch(0))
    assert says in str(error.value)


def test_remat_without_scan_layers_is_an_error():
    with raises("unsupported-feature", "remat='full'"):
        mp.train_step(loss_fn, remat="full")(make_state(mp.MeshSpec(fsdp=8), mp.fsdp()), make_batch(0))


def test_eval_step_returns_the_loss_and_keeps_the_state():
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    evaluate = mp.eval_step(loss_fn)
    metrics = evaluate(state, make_batch(0))
    again = evaluate(state, make_batch(0))
    _, trained = mp.train_step(loss_fn)(state, make_batch(0))
    assert float(metrics["loss"]) == pytest.approx(float(trained["loss"]), rel=1e-6)
    assert float(again["loss"]) == float(metrics["loss"])


def test_eval_step_computes_in_the_dtype_of_its_precision():
    state = make_state(mp.MeshSpec(), mp.ddp())
    rounded = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), state.params))
    loss, expected = (
        float(mp.eval_step(loss_fn, precision=precision)(of, make_batch(0))["loss"])
        for of, precision in ((state, mp.Precision(compute="bfloat16")), (rounded, None))
    )
    assert loss == pytest.approx(expected, rel=1e-7)


MICRO_STEPS = [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_gradients": "once"}]


@pytest.mark.parametrize("options", cases(MICRO_STEPS[1], grid=MICRO_STEPS), ids=str)
def test_batch_scalars_and_keys_apply_to_all_examples(options):
    mesh = mp.MeshSpec(data=8).build()
    model = mp.from_functions(lambda key: {"w": jnp.ones((4, 4))}, lambda params, x: x @ params["w"])

    def loss_fn(model, batch, key):
        assert batch["scale"].shape == batch["key"].shape == ()
        noise = jax.random.normal(batch["key"], (4,))
        error = model(batch["x"] + noise) ** 2 * batch["scale"]
        return mp.MeanLoss(error.sum(), error.size), {}

    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    batch = {"x": x, "scale": np.float32(3), "key": jax.random.key(5)}
    step = mp.train_step(loss_fn, **options)
    found = []
    for given in (batch, mp.shard_batch(batch, mesh, mp.ddp())):
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
        found.append(float(step(state, given)[1]["loss"]))
    want = 3 * (((x + jax.random.normal(jax.random.key(5), (4,))) @ np.ones((4, 4))) ** 2).mean()
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert mp.explain(step, state.setup.abstract, batch).devices == 8


# ---- Frozen parameters -----------------------------------------------------------------------------------------------


def _adapted() -> Model:
    def init(key):
        first, second = jax.random.split(key)
        return {"base": jax.random.normal(first, (16, 16)), "lora": {"a": jax.random.normal(second, (16, 4)) / 4,
                "b": jnp.zeros((4, 16))}}  # fmt: skip

    def apply(params, x):
        x = mp.constrain(x, "batch", "act_embed")
        return x @ params["base"] + x @ params["lora"]["a"] @ params["lora"]["b"]

    return mp.from_functions(init, apply, names={"base": ("embed", "mlp"), "lora/a": ("embed", None)})


@pytest.mark.parametrize("options", cases({"accumulate": 2}, grid=[{}, {"accumulate": 2}]), ids=str)
def test_frozen_parameters_have_no_gradient_or_optimizer_state(options):
    mesh, tx = mp.MeshSpec(fsdp=8).build(), optax.adamw(1e-1)
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def loss_fn(model, batch, key):
        error = (model(batch) - 1) ** 2
        return mp.MeanLoss(error.sum(), error.size), {}

    step, first = mp.train_step(loss_fn, **options), None
    for trainable in (r"lora/.*", lambda path: path.startswith("lora")):
        state = mp.init_state(_adapted(), tx, mesh=mesh, strategy=mp.fsdp(), key=0, trainable=trainable)
        assert {"frozen" in line for line in str(state.table).splitlines() if " base " in line} == {True}
        before = jax.tree.map(np.asarray, state.params)
        report = mp.explain(step, state, x)
        assert report.is_as_expected, str(report)
        assert "base" not in {
            path for line in report.matching.matched if line.role == "gradients" for path in line.tensors
        }
        state, metrics = step(state, x)
        np.testing.assert_array_equal(state.params["base"], before["base"])
        assert {x.shape for x in jax.tree.leaves(state.opt_state)} == {(), (16, 4), (4, 16)}
        assert state.table.totals.grads_bytes == (16 * 4 / 8 + 4 * 16) * 4
        first = first or metrics
        assert first["grad_norm"] == metrics["grad_norm"]

    def alone(lora):
        loss, _ = loss_fn(lambda x: x @ before["base"] + x @ lora["a"] @ lora["b"], x, None)
        return loss.total / loss.weight

    grads = jax.grad(alone)(before["lora"])
    updates, _ = tx.update(grads, tx.init(before["lora"]), before["lora"])
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    for path, found in state.params["lora"].items():
        np.testing.assert_allclose(found, optax.apply_updates(before["lora"], updates)[path], rtol=1e-4, atol=1e-5)


def test_invalid_trainable_is_an_error():
    mesh = mp.MeshSpec(fsdp=8).build()
    for trainable in ("lora", "(", ["base"], lambda path: "yes"):
        with pytest.raises(mp.MeshparError, match="trainable"):
            mp.init_state(_adapted(), optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(), key=0, trainable=trainable)
    counts = mp.from_functions(lambda key: {"w": jnp.ones((16, 8)), "n": jnp.ones((16, 8), jnp.int8)}, jnp.add)
    for trainable, is_valid in ((None, False), ("w", True)):
        state = mp.abstract_state(counts, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), trainable=trainable)
        step = mp.train_step(lambda model, x, key: (model.args[0]["w"].sum(), {}))
        with contextlib.nullcontext() if is_valid else raises("wrong-dtype", "parameter `n`"):
            step.trace(state, np.ones((8, 2), np.float32))
    with pytest.raises(mp.MeshparError, match="cannot differentiate its loss: the loss is int32"):
        mp.train_step(lambda model, x, key: (jnp.int32(1), {})).trace(state, np.ones((8, 2), np.float32))


def counting(model, batch, key):
    return mp.MeanLoss(model(batch).sum(), batch.size), {}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_skipped_update_left_out_of_variables_and_optimizer(options):
    """Otherwise a bad batch would affect all later steps."""
    model = mp.from_functions(
        lambda key: ({"w": jnp.ones(())}, {"seen": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)}),
        lambda params, state, x: (x * params["w"], {"seen": state["seen"] + x.sum(), "calls": state["calls"] + 1}),
        keeps_state=True,
    )
    state = make_state(mp.MeshSpec(data=2), mp.ddp(), model=model)
    step = mp.train_step(counting, nonfinite="skip", **options)
    state, _ = step(state, np.ones(4, np.float32))
    before = jax.device_get((state.extra, state.opt_state))
    state, metrics = step(state, np.array([1, np.nan, 1, 1], np.float32))
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.extra, state.opt_state)), before)
    state, _ = step(state, np.ones(4, np.float32))
    assert (float(state.extra["seen"]), int(state.extra["calls"])) == (8, 2 * options.get("accumulate", 1))


@pytest.mark.parametrize("rows", [8, 16])
def test_evaluated_scalar_weighs_by_its_examples(rows):
    """A smaller last batch then has the correct weight in the mean over batches."""
    state = make_state(mp.MeshSpec(fsdp=8), mp.fsdp())
    batch = {**make_batch(0, rows), "rate": np.float32(0.5)}
    losses = [
        lambda model, batch, key: (((model(batch["x"]) - batch["y"]) ** 2).mean() * batch["rate"], {}),
        lambda model, batch, key: (mp.SumLoss((model(batch["x"]) ** 2).sum()), {}),
    ]
    assert [int(mp.eval_step(loss)(state, batch)["loss_weight"]) for loss in losses] == [rows, rows]


@pytest.mark.parametrize("engine", ["once", "quantize"])
def test_whole_numbers_in_state_use_the_maximum_over_devices(engine):
    def init(key):
        return {"w": jnp.ones((EMBED, EMBED))}, {"most": jnp.zeros((), jnp.int32)}

    def apply(params, state, x):
        return x @ params["w"], {"most": jnp.maximum(state["most"], x.max().astype(jnp.int32))}

    spec, strategy, options = LOCAL_ROWS[engine]
    model = mp.from_functions(init, apply, names={"w": ("embed", None)}, keeps_state=True)
    state = make_state(spec, strategy, model=model)
    rows = np.repeat(np.arange(len(INPUTS), dtype=np.float32)[:, None], EMBED, 1)
    state, _ = mp.train_step(lambda model, x, key: (mp.SumLoss(model(x).sum()), {}), **options)(state, rows)
    assert int(state.extra["most"]) == len(INPUTS) - 1
