"""Training by stages equals training on one device: Adam steps of the decoders, NNX and Linen, every schedule."""

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
from tests.grid import cases

SEQ, STEPS = 4, 2


def config(dtype: str = "float64", *, num_layers: int = 8, tied: bool = False) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCAB, num_layers=num_layers, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32,
        param_dtype=dtype, tied_embeddings=tied,
    )  # fmt: skip


@functools.cache
def alone(framework, cfg, rows):
    return train(model_of(framework, cfg, rows, SEQ), token_batches(rows, SEQ, STEPS), mp.MeshSpec(), mp.ddp())


def check(framework, cfg, rows, spec, strategy, atol, **options):
    wanted, batches = alone(framework, cfg, rows), token_batches(rows, SEQ, STEPS)
    found = train(model_of(framework, cfg, rows, SEQ), batches, spec, strategy, start=wanted.start, **options)
    for ours, theirs in zip(found.metrics, wanted.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=atol), name
    assert_same(found.params, wanted.params, atol=atol * 100)


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
    "1f1b | fsdp in every microbatch": (
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
def test_nnx_as_on_one_device(name, x64):
    spec, asked, inside = CASES[name]
    check("nnx", config(), 16, spec, mp.pipeline_parallel(**asked) | inside, 1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["1f1b", "interleaved | fsdp | tensor"])
def test_linen_as_on_one_device(name, x64):
    spec, asked, inside = CASES[name]
    check("linen", config(), 16, spec, mp.pipeline_parallel(**asked) | inside, 1e-12)


@pytest.mark.matrix
def test_tied_embeddings_and_recomputation(x64):
    strategy = mp.pipeline_parallel(stages=4, microbatches=4, schedule="zb-h1") | mp.tensor_parallel()
    check("nnx", config(tied=True), 8, mp.MeshSpec(stage=4, tensor=2), strategy, 1e-12, remat="full")


CUTS = {
    "whole": (mp.MeshSpec(), mp.ddp(), {}),
    "micro-steps": (mp.MeshSpec(fsdp=2), mp.fsdp(), {"accumulate": 4}),
    "each device by itself": (mp.MeshSpec(fsdp=2), mp.fsdp(), {"accumulate": 4, "reduce_gradients": "once"}),
    "stages": (mp.MeshSpec(stage=2, fsdp=2), mp.pipeline_parallel(stages=2, microbatches=4) | mp.fsdp(), {}),
}


@pytest.mark.parametrize("kind", cases("MeanLoss", grid=["MeanLoss", "SumLoss", "scalar"]))
def test_counts_are_summed_and_all_else_averaged_however_a_batch_is_cut(kind):
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
    # The first part of the batch has no weight: its metric is 0 / 0.
    ids = np.arange(16, dtype=np.int32) // 2
    batch = {"x": np.arange(64, dtype=np.float32).reshape(16, 4) / 16, "ids": ids}
    told = {}
    for name, (spec, strategy, options) in CUTS.items():
        mesh = mesh_of(spec)
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
        _, metrics = mp.train_step(loss, loss_is=loss_is, **options)(state, batch)
        assert metrics["tokens"].dtype == jnp.int32
        told[name] = jax.tree.map(float, metrics)
    assert {one["tokens"] for one in told.values()} == {batch["ids"].sum()}
    assert {one.get("loss_weight") for one in told.values()} == {ids.sum() if kind == "MeanLoss" else None}
    for one in told.values():
        for name in ("loss", "big"):
            assert one[name] == pytest.approx(told["whole"][name], rel=1e-6), name
    # The mean of the flags of microbatches, or of devices' shares of them.
    assert told["each device by itself"]["is_big"] == pytest.approx(told["stages"]["is_big"], rel=1e-6)


def run_layers(params, x):
    return mp.pipeline.scan_layers(lambda x, one: jnp.tanh(x @ one["w"]) + x, x, params["layers"])


@pytest.mark.parametrize("strategy", [mp.ddp(), mp.pipeline_parallel(stages=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("metric", [None, "big", np.ones(2)], ids=str)
def test_a_metric_is_one_number(strategy, metric):
    spec = mp.MeshSpec() if strategy.pipeline is None else mp.MeshSpec(stage=2)
    names = {"layers/w": ("layers", "embed", None)}
    model = mp.from_functions(lambda key: {"layers": {"w": jnp.ones((2, 4, 4))}}, run_layers, names=names)
    mesh = spec.build(jax.devices()[: spec["stage"]])
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {"odd": metric}))
    with pytest.raises(mp.MeshparError, match="metric `odd`: cannot use it as a scalar.*(a NoneType|a str|of shape)"):
        step.lower(state, {"x": np.ones((4, 4), np.float32)})


@pytest.mark.parametrize(
    ("num_layers", "parts", "fewer", "counts"),
    [
        (10, 4, (0, 0), (2, 3, 3, 2)), (11, 4, (0, 0), (3, 3, 3, 2)), (9, 4, (0, 0), (2, 3, 2, 2)),
        (8, 4, (0, 0), (2, 2, 2, 2)), (10, 4, (1, 1), (2, 3, 3, 2)), (126, 16, (1, 1), (7, *[8] * 14, 7)),
        (61, 16, (0, 1), (3, *[4] * 14, 2)), (5, 2, (0, 0), (3, 2)), (5, 2, (1, 0), (2, 3)), (3, 1, (0, 1), (3,)),
    ],
)  # fmt: skip
def test_layers_are_cut_as_even_as_they_go(num_layers, parts, fewer, counts):
    pipelined = mp.pipeline_parallel(stages=parts, microbatches=1, stage_layer_offset=fewer).pipeline
    assert pipelined.layers_of_parts(num_layers, parts) == counts


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("num_layers", "stages", "asked"),
    [
        (5, 2, {"schedule": "zb-v"}),
        *(
            pytest.param(*rare, marks=pytest.mark.matrix)
            for rare in (
                (5, 4, {}), (4, 2, {"stage_layer_offset": (0, 2)}),
                (6, 4, {"schedule": "zb-h2"}), (3, 2, {"schedule": "zb-h1"}), (5, 2, {"schedule": "dualpipe-v"}),
                (7, 2, {"schedule": "interleaved-1f1b", "chunks": 3}),
                (9, 4, {"schedule": "dualpipe", "stage_layer_offset": (1, 1)}),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_unequal_parts_of_any_model(num_layers, stages, asked, x64):
    names = {"layers/w": ("layers", "embed", None), "layers/odd": ("layers", None)}

    def start(key):
        return {"layers": {"w": 0.4 * jax.random.normal(key, (num_layers, 4, 4)), "odd": jnp.ones((num_layers, 3))}}

    def model(params, x):
        def layer(x, one):
            return jnp.tanh(x @ one["w"]) * one["odd"].prod() + x

        return mp.pipeline.scan_layers(layer, x, params["layers"])

    batch = {"x": np.random.default_rng(0).normal(size=(8, 4))}
    kept = []
    for spec, strategy in (
        (mp.MeshSpec(), mp.ddp()),
        (mp.MeshSpec(stage=stages), mp.pipeline_parallel(stages=stages, microbatches=4, **asked) | mp.ddp()),
    ):
        mesh = spec.build(jax.devices()[: spec["stage"]])
        state = mp.init_state(
            mp.from_functions(start, model, names=names), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=0
        )  # fmt: skip
        step = mp.train_step(lambda model, batch, key: (mp.SumLoss((model(batch["x"]) ** 2).sum()), {}))
        state, metrics = step(state, batch)
        kept.append((float(metrics["loss"]), jax.device_get((state.params, state.opt_state))))
    assert kept[1][0] == pytest.approx(kept[0][0], rel=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), kept[0][1], kept[1][1])
    # Split between steps, where a dim divides.
    assert state.table["layers/w"].shards == stages
    assert state.table["layers/odd"].shards == 1
    assert "replicated over the stages" in state.table["layers/odd"].rule


class ParamStack(nn.Module):
    """Stacked layers made with `self.param`: one array, and a tree of two."""

    depth: int

    @nn.compact
    def __call__(self, x):
        def normal(key, *shape):
            return nn.with_logical_partitioning(nn.initializers.normal(0.5), ("layers", "embed", None))(key, shape)

        def biases(key):
            return {"in": normal(key, self.depth, 1, 8), "out": normal(key, self.depth, 1, 8)}

        stack = self.param("stack", normal, self.depth, 8, 8), self.param("biases", biases)
        return mp.scan_layers(lambda x, one: jnp.tanh((x + one[1]["in"]) @ one[0]) + one[1]["out"], x, stack)


class AroundParamStack(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, param_dtype="float64", name="out")(ParamStack(self.depth, name="layers")(x))


@pytest.mark.parametrize(
    ("depth", "stages", "schedule"),
    cases((3, 2, "zb-h1"), grid=[(4, 2, "1f1b"), (3, 2, "zb-h1"), (4, 2, "zb-v")]),
)
def test_a_linen_stack_made_with_param(depth, stages, schedule, x64):
    """Flax compares a parameter's shape with its initializer's, and a stage has only some of the layers."""
    x = {"x": np.random.default_rng(0).normal(size=(8, 8))}
    model = mp.from_linen(AroundParamStack(depth), x["x"])

    def loss(model, batch, key):
        square = model(batch["x"]) ** 2
        return mp.MeanLoss(square.sum(), square.size), {}

    wanted = train(model, [x], mp.MeshSpec(), mp.ddp(), loss=loss)
    strategy = mp.pipeline_parallel(stages=stages, microbatches=4, schedule=schedule)
    found = train(model, [x], mp.MeshSpec(stage=stages), strategy, loss=loss, start=wanted.start)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-12)
    assert_same(found.params, wanted.params, atol=1e-12)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        model.bind(jax.tree.map(lambda leaf: leaf[..., :4], wanted.start.params), {})(x["x"])


@pytest.mark.parametrize("fewer", [(0, -1), (1,), [0, 1], (0, 0.5), 1])
def test_lighter_ends_are_two_whole_numbers(fewer):
    with pytest.raises(mp.MeshparError, match="two nonnegative integers.*Write stage_layer_offset"):
        mp.pipeline_parallel(stages=2, microbatches=2, stage_layer_offset=fewer)


def test_explain_tells_that_it_cannot_count_unequal_parts():
    strategy = mp.pipeline_parallel(stages=4, microbatches=4) | mp.ddp()
    state = mp.abstract_state(
        config("float32", num_layers=10).build(), optax.adam(1e-2), strategy=strategy,
        mesh=mp.MeshSpec(stage=4).build(jax.devices()[:4]),
    )  # fmt: skip
    with pytest.raises(mp.MeshparError, match=r"2\+3\+3\+2 layers.*chosen at run time.*with 8 or 12 layers"):
        mp.explain(mp.train_step(next_token_loss), state, token_batches(16, SEQ, 1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Layers that give an Aux, and variables beside parameters
# ---------------------------------------------------------------------------------------------------------------------

WIDTH, EXPERTS, DEPTH = 8, 4, 4


class Chosen(nnx.Module):
    """A layer whose tokens choose one of several gates, with a bias on the choice that no gradient reaches."""

    def __init__(self, rngs):
        def weight(*shape):
            return nnx.Param(nnx.with_partitioning(nnx.initializers.normal(0.5), (None, None))(rngs.params(), shape))

        self.up, self.router = weight(WIDTH, WIDTH), weight(WIDTH, EXPERTS)
        self.bias = nnx.Variable(jnp.zeros(EXPERTS))

    def __call__(self, x):
        scores = jax.nn.sigmoid(x @ self.router[...])
        chosen = jax.nn.one_hot(jnp.argmax(scores + self.bias[...], -1), EXPERTS, dtype=jnp.int32)
        y = x + (scores * chosen).sum(-1, keepdims=True) * jnp.tanh(x @ self.up[...])
        return y, mp.pipeline.Aux((scores**2).mean(), {"load": chosen.sum(0, dtype=jnp.int32), "score": scores.mean()})


class Balanced(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(Chosen, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = nnx.split_rngs(splits=DEPTH)(make)(rngs)
        self.load = nnx.Variable(jnp.zeros((DEPTH, EXPERTS), jnp.int32))
        self.losses = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, aux = mp.pipeline.scan_layers(lambda x, one: nnx.merge(graph, one)(x), x, state)
        self.load[...], self.losses[...] = aux.metrics["load"], aux.loss
        above = jnp.sign(aux.metrics["load"] - 4)
        self.layers.bias[...] = self.layers.bias[...] - 0.05 * above
        return x, aux


def balanced_loss(model, batch, key):
    """A scalar with the auxiliary loss in it."""
    y, aux = model(batch["x"])
    error = ((y - batch["t"]) ** 2).mean()
    told = {"error": error, "busiest": model.load[...].max() / 4, "score": aux.metrics["score"].mean()}
    return error + 0.5 * model.losses[...], told


def weighted_loss(model, batch, key):
    """A weighted mean, to which the step adds the auxiliary loss."""
    y, aux = model(batch["x"])
    error, weight = ((y - batch["t"]) ** 2).mean(-1) @ batch["w"], batch["w"].sum()
    told = {"error": error / weight, "busiest": model.load[...].max() / 4, "score": aux.metrics["score"].mean()}
    report(loss=0.5 * model.losses[...])
    return mp.MeanLoss(error, weight), told


def balanced_batches():
    rng = np.random.default_rng(0)
    batches = [{name: rng.normal(size=(16, WIDTH)) for name in "xt"} for _ in range(STEPS)]
    return [{**batch, "w": rng.integers(0, 4, 16) * (np.arange(16) >= 4)} for batch in batches]


@pytest.mark.parametrize(
    "loss", cases(weighted_loss, grid=[balanced_loss, weighted_loss]), ids=lambda loss: loss.__name__
)
@pytest.mark.parametrize(
    ("spec", "schedule", "fewer"),
    [
        pytest.param(mp.MeshSpec(stage=2, fsdp=2), "zb-v", (0, 0), marks=pytest.mark.matrix),
        (mp.MeshSpec(stage=2), "zb-h1", (0, 2)),
        pytest.param(mp.MeshSpec(stage=4), "1f1b", (0, 0), marks=pytest.mark.matrix),
        pytest.param(mp.MeshSpec(stage=2, data=2), "dualpipe", (0, 0), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_what_layers_give_beside_their_output(spec, schedule, fewer, loss, x64):
    asked = {"stages": spec["stage"], "microbatches": 4, "schedule": schedule, "stage_layer_offset": fewer}
    model, batches = mp.from_nnx(lambda rngs: Balanced(rngs)), balanced_batches()
    wanted = train(model, batches, mp.MeshSpec(), mp.ddp(), loss=loss)
    strategy, loss_is = mp.pipeline_parallel(**asked), None if loss is weighted_loss else "mean_over_examples"
    found = train(model, batches, spec, strategy, loss=loss, start=wanted.start, loss_is=loss_is)
    for ours, theirs in zip(found.metrics, wanted.metrics, strict=True):
        assert jax.tree.map(float, ours) == pytest.approx(jax.tree.map(float, theirs), rel=1e-12)
    assert_same(found.params, wanted.params, atol=1e-12)
    assert_same(found.extra, wanted.extra, atol=1e-12)
    # It did move, and differs by layer.
    assert len(np.unique(found.extra["layers/bias"], axis=0)) > 1
    assert (found.extra["load"].sum(-1) == 16).all()


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


MIXED = {
    "a slope of the loss": (loss_of_aux(lambda error, aux: (error * aux.loss, {})), Balanced, {}, "is no constant"),
    "a loss of metrics": (
        loss_of_aux(lambda error, aux: (error + aux.metrics["score"].mean(), {})), Balanced, {}, "to Aux.loss",
    ),
    "a metric of both": (
        loss_of_aux(lambda error, aux: (error, {"both": aux.loss + error})), Balanced, {}, "metric `both`",
    ),
    "a variable of rows": (balanced_loss, Sums, {}, "`losses` of the model"),
    "a stream of its own": (balanced_loss, Drops, {}, "`drop/rngs/key` of the model"),
    "a weighted slope": (
        lambda model, batch, key: (mp.MeanLoss(model(batch["x"])[1].loss, batch["w"].sum()), {}), Balanced, {},
        r"`MeanLoss` divides its total .* call `meshpar.layers.auxiliary.report\(loss=aux.loss\)` instead",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases("a metric of both", "a variable of rows", "a weighted slope", grid=MIXED))
def test_what_no_stage_has_in_time_is_told(name):
    loss, build, options, told = MIXED[name]
    model, strategy = mp.from_nnx(lambda rngs: build(rngs)), mp.pipeline_parallel(stages=2, microbatches=4)
    mesh = mesh_of(mp.MeshSpec(stage=2))
    state = mp.abstract_state(model, optax.adam(1e-2), mesh=mesh, strategy=strategy)
    with pytest.raises(mp.MeshparError, match=told):
        mp.train_step(loss, **options).lower(state, balanced_batches()[0])


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes, checkpoints, and what explain says
# ---------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "mesh": (mp.MeshSpec(stage=4), {"stages": 2, "microbatches": 4}, mp.ddp(), {}, "run 2 stages over mesh axis"),
    "layers": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 4, "schedule": "zb-v"}, mp.ddp(), {},
        "3 stacked layers .*create 4 chunks: every chunk .* Use at least 4 layers, fewer stages",
    ),
    "lighter": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 4, "stage_layer_offset": (0, 4)}, mp.ddp(), {},
        r"2 parts with stage_layer_offset=\(0, 4\): .* Use 6 layers or more, .*or leave stage_layer_offset out",
    ),
    "rows": (mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 7}, mp.ddp(), {}, "Use a batch of 21"),
    "axis": (mp.MeshSpec(data=2), {"stages": 2, "microbatches": 2, "axis": "data"}, mp.ddp(), {}, "splits the batch"),
    "no file": (
        mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 2, "schedule": "no.csv"}, mp.ddp(), {}, "no such file",
    ),
    "accumulate": (mp.MeshSpec(stage=2), {"stages": 2, "microbatches": 2}, mp.ddp(), {"accumulate": 2}, "microbatches"),
    "ring": (
        mp.MeshSpec(stage=2, context=2), {"stages": 2, "microbatches": 2}, mp.context_parallel(), {},
        "`ppermute` over `context` inside a stage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases("mesh", "layers", "rows", "ring", grid=MISTAKES))
def test_mistakes_are_told_before_anything_is_traced(name):
    spec, asked, inside, options, told = MISTAKES[name]
    cfg = config("float32", num_layers=3 if name == "layers" else 4)
    mesh = mesh_of(spec)

    def lowered():
        strategy = mp.pipeline_parallel(**asked) | inside
        state = mp.abstract_state(cfg.build(), optax.adam(1e-2), mesh=mesh, strategy=strategy)
        return mp.train_step(next_token_loss, **options).lower(state, token_batches(16, SEQ, 1)[0])

    with pytest.raises(mp.MeshparError, match=told):
        lowered()


def test_no_such_schedule():
    with pytest.raises(mp.MeshparError, match="zb-h1"):
        mp.pipeline_parallel(stages=2, microbatches=2, schedule="zb-h")
    with pytest.raises(mp.MeshparError, match="integer of at least 1"):
        mp.pipeline_parallel(stages=0, microbatches=2)
    with pytest.raises(mp.MeshparError, match="Remove chunks"):
        mp.pipeline_parallel(stages=2, microbatches=2, schedule="file.csv", chunks=2)


def test_a_file_of_other_microbatches(tmp_path):
    path = str(tmp_path / "four.csv")
    mp.pipeline.make("1f1b", 2, 4).to_csv(path)
    state = mp.abstract_state(
        config("float32", num_layers=4).build(), optax.adam(1e-2), mesh=mesh_of(mp.MeshSpec(stage=2)),
        strategy=mp.pipeline_parallel(stages=2, microbatches=2, schedule=path),
    )  # fmt: skip
    with pytest.raises(mp.MeshparError, match="cannot cut the batch into 2 microbatches: schedule .* runs 4"):
        mp.train_step(next_token_loss).lower(state, token_batches(16, SEQ, 1)[0])


@pytest.mark.parametrize("change", [lambda x: x.astype(jnp.bfloat16), lambda x: x[:, :2], lambda x: (x, 1)])
def test_layers_that_give_something_else(change):
    with pytest.raises(mp.MeshparError, match="a layer: cannot pass its output"):
        mp.pipeline.scan_layers(lambda x, w: change(x * w), jnp.ones((2, 4)), jnp.ones((3, 4)))
    assert mp.pipeline.scan_layers(lambda x, w: x + w, 0, jnp.ones(3)) == 3


class Block(nnx.Module):
    """Without names, of arrays of every rank."""

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
def test_one_rule_names_the_layers_of_a_stack_without_names(framework, num_layers):
    def loss(model, batch, key):
        logits = model(batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return mp.MeanLoss((losses * batch["weights"]).sum(), batch["weights"].sum()), {}

    batches = token_batches(16, SEQ, STEPS)
    if framework == "nnx":
        model = mp.from_nnx(lambda rngs: Stack(rngs, num_layers))
    else:
        model = mp.from_linen(LinenStack(num_layers), jax.ShapeDtypeStruct((16, SEQ), np.int32))
    # Not Adam: biases of keys have no gradient but rounding noise.
    trained = functools.partial(train, model, batches, loss=loss, tx=optax.sgd(0.1))
    wanted = trained(mp.MeshSpec(), mp.ddp())
    staged = mp.pipeline_parallel(stages=2, microbatches=2) | mp.Rules(paths={r"blocks/.*": mp.names("layers", ...)})
    for spec, strategy in (
        (mp.MeshSpec(stage=2), staged),
        (mp.MeshSpec(stage=2, fsdp=4), staged | mp.fsdp(min_bytes=0)),
    ):
        found = trained(spec, strategy, start=wanted.start)
        assert_same(found.params, wanted.params, atol=1e-6)  # float32, sums over devices in another order
    table = mp.shardings(model, mesh_of(spec), strategy)
    assert all(one.shards == 8 for one in table.params if one.path.startswith("blocks/") and num_layers == 4)


def test_layers_that_use_outer_parameters_are_refused():
    def init(key):
        return {"layers": {"w": jnp.ones((2, 4, 4))}, "outer": jnp.ones((4, 4))}

    def apply(params, x):
        return mp.pipeline.scan_layers(lambda x, one: x @ one["w"] @ params["outer"], x, params["layers"])

    model = mp.from_functions(init, apply, names={"layers/w": ("layers", None, None), "outer": (None, None)})
    state = mp.abstract_state(
        model, optax.sgd(0.1), mesh=mp.MeshSpec(stage=2).build(jax.devices()[:2]),
        strategy=mp.pipeline_parallel(stages=2, microbatches=2),
    )  # fmt: skip
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    with pytest.raises(mp.MeshparError, match="is not part of the stacked layers"):
        step.lower(state, {"x": np.ones((4, 4), np.float32)})


def test_split_activations_are_to_be_told_before_the_layers():
    def init(key):
        return {"layers": {"up": jnp.ones((2, 4, 8)), "down": jnp.ones((2, 8, 4))}}

    def apply(params, x):
        return mp.pipeline.scan_layers(lambda x, one: x @ one["up"] @ one["down"], x, params["layers"])

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
def test_a_checkpoint_moves_to_a_mesh_without_stages_and_back(num_layers, tmp_path):
    def state_of(spec, strategy, key):
        mesh = mesh_of(spec)
        return mp.init_state(
            config("float32", num_layers=num_layers).build(), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=key
        )

    staged = state_of(mp.MeshSpec(stage=2, fsdp=2), mp.pipeline_parallel(stages=2, microbatches=2) | mp.fsdp(), 0)
    step = mp.train_step(next_token_loss)
    staged, _ = step(staged, token_batches(8, SEQ, 2)[0])
    wanted = dict(tree_leaves_with_paths(jax.device_get(staged.params)))
    plain = state_of(mp.MeshSpec(fsdp=4), mp.fsdp(), 1)
    with mp.Checkpoints(tmp_path / "a") as there, mp.Checkpoints(tmp_path / "b") as back:
        there.save(staged, wait=True)
        moved = there.restore(plain).state
        back.save(moved, wait=True)
        again = back.restore(staged).state
    for state in (moved, again):
        for path, x in tree_leaves_with_paths(jax.device_get(state.params)):
            np.testing.assert_array_equal(x, wanted[path], err_msg=path)
    one, other = (step(state, token_batches(8, SEQ, 2)[1])[1] for state in (moved, again))
    assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
