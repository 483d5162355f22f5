"""Training with pipeline stages equals training on one device, for NNX and Linen and for all schedules."""

from __future__ import annotations

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import meshpar as mp
from meshpar.layers.auxiliary import report
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import VOCAB, assert_same, mesh_of, model_of, token_batches, train
from tests.errors import raises
from tests.grid import cases

SEQ, STEPS = 4, 2


def config(dtype: str = "float64", *, num_layers: int = 8, tied: bool = False) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCAB, num_layers=num_layers, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32,
        param_dtype=dtype, tied_embeddings=tied,
    )  # fmt: skip


@functools.cache
def on_one_device(framework, cfg, batch):
    return train(model_of(framework, cfg, batch, SEQ), token_batches(batch, SEQ, STEPS), mp.MeshSpec(), mp.ddp())


def check(framework, cfg, batch, spec, strategy, atol, **options):
    expected, batches = on_one_device(framework, cfg, batch), token_batches(batch, SEQ, STEPS)
    actual = train(model_of(framework, cfg, batch, SEQ), batches, spec, strategy, start=expected.start, **options)
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=atol), name
    assert_same(actual.params, expected.params, atol=atol * 100)


CASES = {
    "1f1b": (mp.MeshSpec(stage=4), {"stages": 4, "microbatches": 4}, mp.ddp()),
    "gpipe, one microbatch": (mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, mp.ddp()),
    "zb-h1 | fsdp": (
        mp.MeshSpec(stage=4, fsdp=2), {"stages": 4, "microbatches": 8, "schedule": "zb-h1"}, mp.fsdp()
    ),
    "zb-v | tensor": (
        mp.MeshSpec(stage=4, tensor=2), {"stages": 4, "microbatches": 8, "schedule": "zb-v"}, mp.tensor_parallel()
    ),
    "interleaved | fsdp | tensor": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2),
        {"stages": 2, "microbatches": 4, "schedule": "interleaved-1f1b"},
        mp.fsdp() | mp.tensor_parallel(),
    ),
    "dualpipe | data": (
        mp.MeshSpec(stage=4, data=2), {"stages": 4, "microbatches": 8, "schedule": "dualpipe"}, mp.ddp()
    ),
    "zb-h2 | expert": (
        mp.MeshSpec(stage=4, expert=2), {"stages": 4, "microbatches": 8, "schedule": "zb-h2"}, mp.ddp()
    ),
    "1f1b | fsdp per microbatch": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2),
        {"stages": 2, "microbatches": 2, "gather": "microbatch"},
        mp.fsdp() | mp.tensor_parallel(),
    ),
    "1f1b | zero1": (mp.MeshSpec(stage=2, fsdp=4), {"stages": 2, "microbatches": 2}, mp.zero1()),
    "zb-h1 | sequence": (
        mp.MeshSpec(stage=2, tensor=2), {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
        mp.tensor_parallel(sequence=True),
    ),
    "1f1b | sequence": (
        mp.MeshSpec(stage=2, tensor=2), {"stages": 2, "microbatches": 4}, mp.tensor_parallel(sequence=True)
    ),
    "1f1b | heads": (
        mp.MeshSpec(stage=2, context=2), {"stages": 2, "microbatches": 4}, mp.context_parallel(kind="all-to-all")
    ),
    "zb-v | fsdp | sequence": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2), {"stages": 2, "microbatches": 4, "schedule": "zb-v"},
        mp.fsdp() | mp.tensor_parallel(sequence=True),
    ),
}  # fmt: skip
QUICK = ("interleaved | fsdp | tensor",)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.matrix
@pytest.mark.parametrize("name", cases(*QUICK, grid=CASES))
def test_nnx_stages_match_one_device(name, x64):
    spec, options, strategy = CASES[name]
    check("nnx", config(), 16, spec, mp.pipeline_parallel(**options) | strategy, 1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["1f1b", "interleaved | fsdp | tensor"])
def test_linen_stages_match_one_device(name, x64):
    spec, options, strategy = CASES[name]
    check("linen", config(), 16, spec, mp.pipeline_parallel(**options) | strategy, 1e-12)


@pytest.mark.matrix
def test_tied_embeddings_with_remat_match_one_device(x64):
    strategy = mp.pipeline_parallel(stages=4, microbatches=4, schedule="zb-h1") | mp.tensor_parallel()
    check("nnx", config(tied=True), 8, mp.MeshSpec(stage=4, tensor=2), strategy, 1e-12, remat="full")


DIVISIONS = {
    "none": (mp.MeshSpec(), mp.ddp(), {}),
    "micro-steps": (mp.MeshSpec(fsdp=2), mp.fsdp(), {"accumulate": 4}),
    "devices": (mp.MeshSpec(fsdp=2), mp.fsdp(), {"accumulate": 4, "reduce_gradients": "once"}),
    "stages": (mp.MeshSpec(stage=2, fsdp=2), mp.pipeline_parallel(stages=2, microbatches=4) | mp.fsdp(), {}),
}


@pytest.mark.parametrize("kind", cases("MeanLoss", grid=["MeanLoss", "SumLoss", "scalar"]))
def test_counts_are_summed_and_floats_averaged(kind):
    names = {"layers/w": ("layers", "embed", None)}
    model = mp.from_functions(lambda key: {"layers": {"w": jnp.full((2, 4, 4), 0.5)}}, run_layers, names=names)

    def loss(model, batch, key):
        y, ids = model(batch["x"]), batch["ids"]
        metrics = {"tokens": ids.sum(), "is_big": (y > 2).any()}
        if kind == "MeanLoss":
            weighted = [(x * ids[:, None]).sum() for x in (y**2, y > 2)]
            return mp.MeanLoss(weighted[0], ids.sum()), {**metrics, "big": weighted[1] / ids.sum()}
        loss = (y**2).mean() if kind == "scalar" else mp.SumLoss((y**2).sum())
        return loss, {**metrics, "big": (y > 2).mean()}

    loss_is = "mean_over_examples" if kind == "scalar" else None
    # The first microbatch has weight 0, so its metric is 0 / 0.
    ids = np.arange(16, dtype=np.int32) // 2
    batch = {"x": np.arange(64, dtype=np.float32).reshape(16, 4) / 16, "ids": ids}
    results = {}
    for name, (spec, strategy, options) in DIVISIONS.items():
        mesh = mesh_of(spec)
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
        _, metrics = mp.train_step(loss, loss_is=loss_is, **options)(state, batch)
        assert metrics["tokens"].dtype == jnp.int32
        results[name] = jax.tree.map(float, metrics)
    assert {metrics["tokens"] for metrics in results.values()} == {batch["ids"].sum()}
    assert {metrics.get("loss_weight") for metrics in results.values()} == {ids.sum() if kind == "MeanLoss" else None}
    for metrics in results.values():
        for name in ("loss", "big"):
            assert metrics[name] == pytest.approx(results["none"][name], rel=1e-6), name
    # A boolean is averaged over microbatches and devices.
    assert results["devices"]["is_big"] == pytest.approx(results["stages"]["is_big"], rel=1e-6)


def run_layers(params, x):
    return mp.pipeline.scan_layers(lambda x, weights: jnp.tanh(x @ weights["w"]) + x, x, params["layers"])


@pytest.mark.parametrize("strategy", [mp.ddp(), mp.pipeline_parallel(stages=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("metric", [None, "big", np.ones(2)], ids=str)
def test_step_refuses_metrics_that_are_not_scalars(strategy, metric):
    spec = mp.MeshSpec() if strategy.pipeline is None else mp.MeshSpec(stage=2)
    names = {"layers/w": ("layers", "embed", None)}
    model = mp.from_functions(lambda key: {"layers": {"w": jnp.ones((2, 4, 4))}}, run_layers, names=names)
    mesh = spec.build(jax.devices()[: spec["stage"]])
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {"odd": metric}))
    with pytest.raises(mp.MeshparError, match="metric `odd`: cannot use it as a scalar.*(a NoneType|a str|of shape)"):
        step.lower(state, {"x": np.ones((4, 4), np.float32)})


@pytest.mark.parametrize(
    ("num_layers", "chunks", "offset", "counts"),
    [
        (10, 4, (0, 0), (2, 3, 3, 2)), (11, 4, (0, 0), (3, 3, 3, 2)), (9, 4, (0, 0), (2, 3, 2, 2)),
        (8, 4, (0, 0), (2, 2, 2, 2)), (10, 4, (1, 1), (2, 3, 3, 2)), (126, 16, (1, 1), (7, *[8] * 14, 7)),
        (61, 16, (0, 1), (3, *[4] * 14, 2)), (5, 2, (0, 0), (3, 2)), (5, 2, (1, 0), (2, 3)), (3, 1, (0, 1), (3,)),
    ],
)  # fmt: skip
def test_layers_of_parts_are_balanced(num_layers, chunks, offset, counts):
    pipeline = mp.pipeline_parallel(stages=chunks, microbatches=1, stage_layer_offset=offset).pipeline
    assert pipeline.layers_of_parts(num_layers, chunks) == counts


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("num_layers", "stages", "options"),
    [
        (5, 2, {"schedule": "zb-v"}),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                (5, 4, {}), (4, 2, {"stage_layer_offset": (0, 2)}),
                (6, 4, {"schedule": "zb-h2"}), (3, 2, {"schedule": "zb-h1"}), (5, 2, {"schedule": "dualpipe-v"}),
                (7, 2, {"schedule": "interleaved-1f1b", "chunks": 3}),
                (9, 4, {"schedule": "dualpipe", "stage_layer_offset": (1, 1)}),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_uneven_chunks_match_one_device(num_layers, stages, options, x64):
    names = {"layers/w": ("layers", "embed", None), "layers/odd": ("layers", None)}

    def start(key):
        return {"layers": {"w": 0.4 * jax.random.normal(key, (num_layers, 4, 4)), "odd": jnp.ones((num_layers, 3))}}

    def model(params, x):
        def layer(x, weights):
            return jnp.tanh(x @ weights["w"]) * weights["odd"].prod() + x

        return mp.pipeline.scan_layers(layer, x, params["layers"])

    batch = {"x": np.random.default_rng(0).normal(size=(8, 4))}
    results = []
    for spec, strategy in (
        (mp.MeshSpec(), mp.ddp()),
        (mp.MeshSpec(stage=stages), mp.pipeline_parallel(stages=stages, microbatches=4, **options) | mp.ddp()),
    ):
        mesh = spec.build(jax.devices()[: spec["stage"]])
        state = mp.init_state(
            mp.from_functions(start, model, names=names), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=0
        )  # fmt: skip
        step = mp.train_step(lambda model, batch, key: (mp.SumLoss((model(batch["x"]) ** 2).sum()), {}))
        state, metrics = step(state, batch)
        results.append((float(metrics["loss"]), jax.device_get((state.params, state.opt_state))))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), results[0][1], results[1][1])
    # Between steps a divisible dim is sharded.
    assert state.table["layers/w"].shards == stages
    assert state.table["layers/odd"].shards == 1
    assert "replicated over the stages" in state.table["layers/odd"].rule


class ParamStack(nn.Module):
    """Stacked layers from `self.param`: an array, and a dict of two arrays."""

    depth: int

    @nn.compact
    def __call__(self, x):
        def normal(key, *shape):
            return nn.with_logical_partitioning(nn.initializers.normal(0.5), ("layers", "embed", None))(key, shape)

        def biases(key):
            return {"in": normal(key, self.depth, 1, 8), "out": normal(key, self.depth, 1, 8)}

        stack = self.param("stack", normal, self.depth, 8, 8), self.param("biases", biases)

        def layer(x, weights):
            kernel, biases = weights
            return jnp.tanh((x + biases["in"]) @ kernel) + biases["out"]

        return mp.scan_layers(layer, x, stack)


class AroundParamStack(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, param_dtype="float64", name="out")(ParamStack(self.depth, name="layers")(x))


@pytest.mark.parametrize(
    ("depth", "stages", "schedule"),
    cases((3, 2, "zb-h1"), grid=[(4, 2, "1f1b"), (3, 2, "zb-h1"), (4, 2, "zb-v")]),
)
def test_linen_stack_from_param(depth, stages, schedule, x64):
    """Flax compares the shape of a parameter with its initializer, and a stage has fewer layers."""
    x = {"x": np.random.default_rng(0).normal(size=(8, 8))}
    model = mp.from_linen(AroundParamStack(depth), x["x"])

    def loss(model, batch, key):
        square = model(batch["x"]) ** 2
        return mp.MeanLoss(square.sum(), square.size), {}

    expected = train(model, [x], mp.MeshSpec(), mp.ddp(), loss=loss)
    strategy = mp.pipeline_parallel(stages=stages, microbatches=4, schedule=schedule)
    actual = train(model, [x], mp.MeshSpec(stage=stages), strategy, loss=loss, start=expected.start)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-12)
    assert_same(actual.params, expected.params, atol=1e-12)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        model.bind(jax.tree.map(lambda leaf: leaf[..., :4], expected.start.params), {})(x["x"])


@pytest.mark.parametrize("offset", [(0, -1), (1,), [0, 1], (0, 0.5), 1])
def test_pipeline_parallel_refuses_invalid_layer_offset(offset):
    with pytest.raises(mp.MeshparError, match="two nonnegative integers.*Write stage_layer_offset"):
        mp.pipeline_parallel(stages=2, microbatches=2, stage_layer_offset=offset)


def test_explain_refuses_uneven_chunks():
    strategy = mp.pipeline_parallel(stages=4, microbatches=4) | mp.ddp()
    state = mp.abstract_state(
        config("float32", num_layers=10).build(), optax.adam(1e-2), strategy=strategy,
        mesh=mp.MeshSpec(stage=4).build(jax.devices()[:4]),
    )  # fmt: skip
    with pytest.raises(mp.MeshparError, match=r"2\+3\+3\+2 layers.*chosen at run time.*with 8 or 12 layers"):
        mp.explain(mp.train_step(next_token_loss), state, token_batches(16, SEQ, 1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Layers with an Aux, and variables of the model
# ---------------------------------------------------------------------------------------------------------------------

WIDTH, EXPERTS, DEPTH = 8, 4, 4


class TopOneLayer(nnx.Module):
    """A layer that routes each token to a gate. The routing bias has no gradient."""

    def __init__(self, rngs):
        def weight(*shape):
            return nnx.Param(nnx.with_partitioning(nnx.initializers.normal(0.5), (None, None))(rngs.params(), shape))

        self.up, self.router = weight(WIDTH, WIDTH), weight(WIDTH, EXPERTS)
        self.bias = nnx.Variable(jnp.zeros(EXPERTS))

    def __call__(self, x):
        scores = jax.nn.sigmoid(x @ self.router[...])
        assignment = jax.nn.one_hot(jnp.argmax(scores + self.bias[...], -1), EXPERTS, dtype=jnp.int32)
        y = x + (scores * assignment).sum(-1, keepdims=True) * jnp.tanh(x @ self.up[...])
        return y, mp.pipeline.Aux(
            (scores**2).mean(), {"load": assignment.sum(0, dtype=jnp.int32), "score": scores.mean()}
        )


class Balanced(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(TopOneLayer, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = nnx.split_rngs(splits=DEPTH)(make)(rngs)
        self.load = nnx.Variable(jnp.zeros((DEPTH, EXPERTS), jnp.int32))
        self.losses = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, aux = mp.pipeline.scan_layers(lambda x, layer: nnx.merge(graph, layer)(x), x, state)
        self.load[...], self.losses[...] = aux.metrics["load"], aux.loss
        above = jnp.sign(aux.metrics["load"] - 4)
        self.layers.bias[...] = self.layers.bias[...] - 0.05 * above
        return x, aux


def balanced_loss(model, batch, key):
    """Return a scalar that includes the auxiliary loss."""
    y, aux = model(batch["x"])
    error = ((y - batch["t"]) ** 2).mean()
    metrics = {"error": error, "busiest": model.load[...].max() / 4, "score": aux.metrics["score"].mean()}
    return error + 0.5 * model.losses[...], metrics


def weighted_loss(model, batch, key):
    """Return a weighted mean. The step adds the reported auxiliary loss."""
    y, aux = model(batch["x"])
    error, weight = ((y - batch["t"]) ** 2).mean(-1) @ batch["w"], batch["w"].sum()
    metrics = {"error": error / weight, "busiest": model.load[...].max() / 4, "score": aux.metrics["score"].mean()}
    report(loss=0.5 * model.losses[...])
    return mp.MeanLoss(error, weight), metrics


def balanced_batches():
    rng = np.random.default_rng(0)
    batches = [{name: rng.normal(size=(16, WIDTH)) for name in "xt"} for _ in range(STEPS)]
    return [{**batch, "w": rng.integers(0, 4, 16) * (np.arange(16) >= 4)} for batch in batches]


@pytest.mark.parametrize(
    "loss", cases(weighted_loss, grid=[balanced_loss, weighted_loss]), ids=lambda loss: loss.__name__
)
@pytest.mark.parametrize(
    ("spec", "schedule", "offset"),
    [
        pytest.param(mp.MeshSpec(stage=2, fsdp=2), "zb-v", (0, 0), marks=pytest.mark.matrix),
        (mp.MeshSpec(stage=2), "zb-h1", (0, 2)),
        pytest.param(mp.MeshSpec(stage=4), "1f1b", (0, 0), marks=pytest.mark.matrix),
        pytest.param(mp.MeshSpec(stage=2, data=2), "dualpipe", (0, 0), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_aux_and_variables_match_one_device(spec, schedule, offset, loss, x64):
    strategy = mp.pipeline_parallel(stages=spec["stage"], microbatches=4, schedule=schedule, stage_layer_offset=offset)
    model, batches = mp.from_nnx(lambda rngs: Balanced(rngs)), balanced_batches()
    expected = train(model, batches, mp.MeshSpec(), mp.ddp(), loss=loss)
    loss_is = None if loss is weighted_loss else "mean_over_examples"
    actual = train(model, batches, spec, strategy, loss=loss, start=expected.start, loss_is=loss_is)
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        assert jax.tree.map(float, metrics) == pytest.approx(jax.tree.map(float, expected_metrics), rel=1e-12)
    assert_same(actual.params, expected.params, atol=1e-12)
    assert_same(actual.extra, expected.extra, atol=1e-12)
    # The bias changes, differently in each layer.
    assert len(np.unique(actual.extra["layers/bias"], axis=0)) > 1
    assert (actual.extra["load"].sum(-1) == 16).all()


class Drops(Balanced):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


class Sums(Balanced):
    def __call__(self, x):
        y, aux = super().__call__(x)
        self.losses[...] = x.mean()
        return y, aux


def loss_of_aux(change):
    def loss(model, batch, key):
        y, aux = model(batch["x"])
        return change((y**2).mean(), aux)

    return loss


UNSUPPORTED = {
    "slope of the loss": (loss_of_aux(lambda error, aux: (error * aux.loss, {})), Balanced, "the loss"),
    "loss of metrics": (
        loss_of_aux(lambda error, aux: (error + aux.metrics["score"].mean(), {})), Balanced, "the loss",
    ),
    "metric of both": (
        loss_of_aux(lambda error, aux: (error, {"both": aux.loss + error})), Balanced, "metric `both`",
    ),
    "variable of examples": (balanced_loss, Sums, "`losses` of the model"),
    "random stream": (balanced_loss, Drops, "`drop/rngs/key` of the model"),
    "weighted slope": (
        lambda model, batch, key: (mp.MeanLoss(model(batch["x"])[1].loss, batch["w"].sum()), {}), Balanced, "the loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases("metric of both", "variable of examples", "weighted slope", grid=UNSUPPORTED))
def test_stages_refuse_early_uses_of_aux(name):
    loss, build, where = UNSUPPORTED[name]
    model, strategy = mp.from_nnx(lambda rngs: build(rngs)), mp.pipeline_parallel(stages=2, microbatches=4)
    mesh = mesh_of(mp.MeshSpec(stage=2))
    state = mp.abstract_state(model, optax.adam(1e-2), mesh=mesh, strategy=strategy)
    with raises("unsupported-feature", where):
        mp.train_step(loss).lower(state, balanced_batches()[0])


# ---------------------------------------------------------------------------------------------------------------------
# Errors, models without names, and checkpoints
# ---------------------------------------------------------------------------------------------------------------------

INVALID = {
    "mesh": (mp.MeshSpec(stage=4), {"stages": 2, "microbatches": 4}, mp.ddp(), {}, "MeshSpec(stage=2, ...)"),
    "layers": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 4, "schedule": "zb-v"}, mp.ddp(), {}, "at least 4 layers",
    ),
    "offset": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 4, "stage_layer_offset": (0, 4)}, mp.ddp(), {},
        "at least 6 layers",
    ),
    "batch": (mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 7}, mp.ddp(), {}, "a batch of 21"),
    "axis": (mp.MeshSpec(data=2), {"stages": 2, "microbatches": 2, "axis": "data"}, mp.ddp(), {}, "a separate mesh"),
    "no file": (mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 2, "schedule": "no.csv"}, mp.ddp(), {}, "0F0,0B0"),
    "accumulate": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 2}, mp.ddp(), {"accumulate": 2}, "accumulate=1",
    ),
    "ring": (
        mp.MeshSpec(stage=2, context=2), {"stages": 2, "microbatches": 2}, mp.context_parallel(), {},
        "ring communication",
    ),
}  # fmt: skip
"""Each with a part of the fix, because most of them name a computed value."""


@pytest.mark.parametrize("name", cases("mesh", "layers", "batch", "ring", grid=INVALID))
def test_invalid_pipelines_raise_before_tracing(name):
    spec, pipeline, strategy, options, fix = INVALID[name]
    cfg = config("float32", num_layers=3 if name == "layers" else 4)
    mesh = mesh_of(spec)

    def lower():
        strategies = mp.pipeline_parallel(**pipeline) | strategy
        state = mp.abstract_state(cfg.build(), optax.adam(1e-2), mesh=mesh, strategy=strategies)
        mp.train_step(next_token_loss, **options).lower(state, token_batches(16, SEQ, 1)[0])

    with pytest.raises(mp.MeshparError) as error:
        lower()
    assert fix in error.value.fix


def test_pipeline_parallel_refuses_invalid_schedules():
    with raises("unknown-name") as error:
        mp.pipeline_parallel(stages=2, microbatches=2, schedule="zb-h")
    assert "zb-h1" in error.value.fix
    with raises("not-an-int"):
        mp.pipeline_parallel(stages=0, microbatches=2)
    with raises("conflict"):
        mp.pipeline_parallel(stages=2, microbatches=2, schedule="file.csv", chunks=2)


def test_schedule_file_with_other_microbatches(tmp_path):
    path = str(tmp_path / "four.csv")
    mp.pipeline.make("1f1b", 2, 4).to_csv(path)
    state = mp.abstract_state(
        config("float32", num_layers=4).build(), optax.adam(1e-2), mesh=mesh_of(mp.MeshSpec(stage=2)),
        strategy=mp.pipeline_parallel(stages=2, microbatches=2, schedule=path),
    )  # fmt: skip
    with raises("conflict", "strategy"):
        mp.train_step(next_token_loss).lower(state, token_batches(16, SEQ, 1)[0])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x: x.astype(jnp.bfloat16), "wrong-dtype"),
        (lambda x: x[:, :2], "wrong-shape"),
        (lambda x: (x, 1), "wrong-shape"),
    ],
)
def test_scan_layers_refuses_changed_output(change, code):
    with raises(code, "a layer"):
        mp.pipeline.scan_layers(lambda x, w: change(x * w), jnp.ones((2, 4)), jnp.ones((3, 4)))
    assert mp.pipeline.scan_layers(lambda x, w: x + w, 0, jnp.ones(3)) == 3


class Block(nnx.Module):
    """A block without logical names. Its arrays differ in rank."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.attention = nnx.LayerNorm(16, rngs=rngs), nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        return x + self.attention(y) + self.down(jax.nn.gelu(self.up(y)))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, num_layers: int) -> None:
        self.embed, self.head = nnx.Embed(VOCAB, 16, rngs=rngs), nnx.Linear(16, VOCAB, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(num_layers))

    def __call__(self, ids):
        graph, params, rest = nnx.split(self.blocks, nnx.Param, ...)

        def run(x, params, rest):
            return nnx.merge(graph, params, rest)(x)

        return self.head(mp.scan_layers(run, self.embed(ids), params, extra=rest, at="blocks"))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(4)(y) + nn.Dense(16)(nn.gelu(nn.Dense(32)(y))), None


class LinenStack(nn.Module):
    num_layers: int

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, 16)(ids)
        if self.is_initializing():
            stacked = nn.scan(
                LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers
            )
            x, _ = stacked(name="blocks")(x, None)
        else:

            def run(x, params):
                return LinenBlock(parent=None).apply({"params": params}, x)[0]

            x = mp.scan_layers(run, x, self.variables["params"]["blocks"], at="blocks")
        return nn.Dense(VOCAB)(x)


@pytest.mark.matrix
@pytest.mark.parametrize("num_layers", [4, 5])
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_path_rule_names_the_layers_of_a_stack(framework, num_layers):
    def loss(model, batch, key):
        logits = model(batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return mp.MeanLoss((losses * batch["weights"]).sum(), batch["weights"].sum()), {}

    batches = token_batches(16, SEQ, STEPS)
    if framework == "nnx":
        model = mp.from_nnx(lambda rngs: Stack(rngs, num_layers))
    else:
        model = mp.from_linen(LinenStack(num_layers), jax.ShapeDtypeStruct((16, SEQ), np.int32))
    # Adam would amplify rounding errors: the exact gradient of the key biases is zero.
    trained = functools.partial(train, model, batches, loss=loss, tx=optax.sgd(0.1))
    expected = trained(mp.MeshSpec(), mp.ddp())
    staged = mp.pipeline_parallel(stages=2, microbatches=2) | mp.Rules(paths={r"blocks/.*": mp.names("layers", ...)})
    for spec, strategy in (
        (mp.MeshSpec(stage=2), staged),
        (mp.MeshSpec(stage=2, fsdp=4), staged | mp.fsdp(min_bytes=0)),
    ):
        actual = trained(spec, strategy, start=expected.start)
        assert_same(actual.params, expected.params, atol=1e-6)  # float32 sums in a different order
    table = mp.shardings(model, mesh_of(spec), strategy)
    assert all(param.shards == 8 for param in table.params if param.path.startswith("blocks/") and num_layers == 4)


def test_stages_refuse_layers_that_use_outer_parameters():
    def init(key):
        return {"layers": {"w": jnp.ones((2, 4, 4))}, "outer": jnp.ones((4, 4))}

    def apply(params, x):
        return mp.pipeline.scan_layers(lambda x, weights: x @ weights["w"] @ params["outer"], x, params["layers"])

    model = mp.from_functions(init, apply, names={"layers/w": ("layers", None, None), "outer": (None, None)})
    state = mp.abstract_state(
        model, optax.sgd(0.1), mesh=mp.MeshSpec(stage=2).build(jax.devices()[:2]),
        strategy=mp.pipeline_parallel(stages=2, microbatches=2),
    )  # fmt: skip
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    with pytest.raises(mp.MeshparError, match="is not part of the stacked layers"):
        step.lower(state, {"x": np.ones((4, 4), np.float32)})


def test_stages_require_constrained_activations():
    def init(key):
        return {"layers": {"up": jnp.ones((2, 4, 8)), "down": jnp.ones((2, 8, 4))}}

    def apply(params, x):
        return mp.pipeline.scan_layers(lambda x, weights: x @ weights["up"] @ weights["down"], x, params["layers"])

    names = {"layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed")}
    state = mp.abstract_state(
        mp.from_functions(init, apply, names=names), optax.sgd(0.1),
        mesh=mp.MeshSpec(stage=2, tensor=2).build(jax.devices()[:4]),
        strategy=mp.pipeline_parallel(stages=2, microbatches=2) | mp.tensor_parallel(sequence=True),
    )  # fmt: skip
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    with pytest.raises(mp.MeshparError, match='suitable meshpar.constrain(.|\n)*"norm_seq"'):
        step.lower(state, {"x": np.ones((4, 4, 4), np.float32)})


@pytest.mark.matrix
@pytest.mark.parametrize("num_layers", [4, 3])
def test_checkpoint_moves_between_meshes_with_and_without_stages(num_layers, tmp_path):
    def state_of(spec, strategy, key):
        mesh = mesh_of(spec)
        return mp.init_state(
            config("float32", num_layers=num_layers).build(), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=key
        )

    staged = state_of(mp.MeshSpec(stage=2, fsdp=2), mp.pipeline_parallel(stages=2, microbatches=2) | mp.fsdp(), 0)
    step = mp.train_step(next_token_loss)
    staged, _ = step(staged, token_batches(8, SEQ, 2)[0])
    expected = dict(tree_leaves_with_paths(jax.device_get(staged.params)))
    plain = state_of(mp.MeshSpec(fsdp=4), mp.fsdp(), 1)
    with mp.Checkpoints(tmp_path / "plain") as to_plain, mp.Checkpoints(tmp_path / "staged") as to_staged:
        to_plain.save(staged, wait=True)
        restored_plain = to_plain.restore(plain).state
        to_staged.save(restored_plain, wait=True)
        restored_staged = to_staged.restore(staged).state
    for state in (restored_plain, restored_staged):
        for path, x in tree_leaves_with_paths(jax.device_get(state.params)):
            np.testing.assert_array_equal(x, expected[path], err_msg=path)
    batch = token_batches(8, SEQ, 2)[1]
    losses = [float(step(state, batch)[1]["loss"]) for state in (restored_plain, restored_staged)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
