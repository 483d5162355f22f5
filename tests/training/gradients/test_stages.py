"""Training with pipeline stages equals training on one device, for NNX and Linen and for all schedules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.layers.auxiliary import report
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import VOCAB, assert_same, mesh_of, token_batches, train
from tests.errors import raises
from tests.grid import cases

SEQ, STEPS = 4, 2


def config(dtype: str = "float64", *, num_layers: int = 8, tied: bool = False) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCAB, num_layers=num_layers, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32,
        param_dtype=dtype, tied_embeddings=tied,
    )  # fmt: skip


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def run_layers(params, x):
    return mp.pipeline.scan_layers(lambda x, weights: jnp.tanh(x @ weights["w"]) + x, x, params["layers"])


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


# ---- Layers with an Aux, and variables of the model ------------------------------------------------------------------

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
    with raises("unsupported-feature", where):
        lower(
            mp.from_nnx(lambda rngs: build(rngs)), {"microbatches": 4}, loss=loss, batch=balanced_batches()[0],
            loss_is="sum_over_parts",
        )  # fmt: skip


# ---- Errors, models without names, and checkpoints -------------------------------------------------------------------


def lower(model, pipeline, inside=None, spec=None, *, loss=next_token_loss, batch=None, **options):
    """Lower a step with stages, by default two with two microbatches."""
    strategy = mp.pipeline_parallel(**{"stages": 2, "microbatches": 2, **pipeline}) | (inside or mp.ddp())
    mesh = mesh_of(mp.MeshSpec(**(spec or {"stage": 2})))
    state = mp.abstract_state(model, optax.adam(1e-2), mesh=mesh, strategy=strategy)
    mp.train_step(loss, **options).lower(state, token_batches(16, SEQ, 1)[0] if batch is None else batch)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        *(({"stage_layer_offset": offset}, "not-an-int") for offset in ((0, -1), (1,), [0, 1], (0, 0.5), 1)),
        ({"schedule": "zb-h"}, "unknown-name"),
        ({"stages": 0}, "not-an-int"),
        ({"schedule": "file.csv", "chunks": 2}, "conflict"),
    ],
    ids=str,
)
def test_pipeline_parallel_refuses_invalid_options(options, code):
    with raises(code):
        mp.pipeline_parallel(**{"stages": 2, "microbatches": 2, **options})


@pytest.mark.parametrize(
    ("pipeline", "strategy", "spec", "options", "fix"),
    cases(
        ({"microbatches": 4}, mp.ddp(), {"stage": 4}, {}, "MeshSpec(stage=2, ...)"),
        ({"microbatches": 7}, mp.ddp(), {"stage": 2}, {}, "a batch of 21"),
        grid=[
            ({"microbatches": 4}, mp.ddp(), {"stage": 4}, {}, "MeshSpec(stage=2, ...)"),
            ({"microbatches": 4, "stages": 4, "schedule": "zb-v"}, mp.ddp(), {"stage": 4}, {}, "at least 8 layers"),
            ({"microbatches": 4, "stage_layer_offset": (0, 4)}, mp.ddp(), {"stage": 2}, {}, "at least 6 layers"),
            ({"microbatches": 7}, mp.ddp(), {"stage": 2}, {}, "a batch of 21"),
            ({"axis": "data"}, mp.ddp(), {"data": 2}, {}, "a separate mesh"),
            ({"schedule": "no.csv"}, mp.ddp(), {"stage": 2}, {}, "0F0,0B0"),
            ({}, mp.ddp(), {"stage": 2}, {"accumulate": 2}, "accumulate=1"),
            ({}, mp.context_parallel(), {"stage": 2, "context": 2}, {}, "ring communication"),
        ],
    ),
    ids=str,
)
def test_invalid_pipelines_raise_before_tracing(pipeline, strategy, spec, options, fix):
    """Most errors name a computed value in their fix."""
    with pytest.raises(mp.MeshparError) as error:
        lower(config("float32", num_layers=4).build(), pipeline, strategy, spec, **options)
    assert fix in error.value.fix


@pytest.mark.matrix
@pytest.mark.parametrize("num_layers", [4, 5])
def test_path_rule_names_the_layers_of_a_stack(num_layers):
    def loss(model, batch, key):
        logits = model(batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return mp.MeanLoss((losses * batch["weights"]).sum(), batch["weights"].sum()), {}

    model = mp.from_nnx(lambda rngs: Stack(rngs, num_layers))
    # Adam would amplify rounding errors: the exact gradient of the key biases is zero.
    trained = functools.partial(train, model, token_batches(16, SEQ, STEPS), loss=loss, tx=optax.sgd(0.1))
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


def test_uneven_stacks_are_sharded_along_another_dim_between_steps():
    names = {"layers/w": ("layers", "embed", None), "layers/odd": ("layers", None)}
    params = {"layers": {"w": jnp.zeros((5, 4, 4)), "odd": jnp.ones((5, 3))}}
    model = mp.from_functions(lambda key: params, run_layers, names=names)
    table = mp.shardings(model, mp.MeshSpec(stage=2).abstract(), mp.pipeline_parallel(stages=2, microbatches=4))
    assert table["layers/w"].shards == 2
    assert table["layers/odd"].shards == 1
    assert "replicated over the stages" in table["layers/odd"].rule


def test_schedule_file_with_other_microbatches(tmp_path):
    path = str(tmp_path / "four.csv")
    mp.pipeline.make("1f1b", 2, 4).to_csv(path)
    with raises("conflict", "strategy"):
        lower(config("float32", num_layers=4).build(), {"schedule": path})


def test_stages_refuse_layers_they_cannot_divide():
    """Layers with parameters outside of the stack, and activations without constraints under sequence parallelism."""

    def outer(params, x):
        return mp.scan_layers(lambda x, weights: x @ weights["w"] @ params["outer"], x, params["layers"])

    def unconstrained(params, x):
        return mp.scan_layers(lambda x, weights: x @ weights["up"] @ weights["down"], x, params["layers"])

    def loss(model, batch, key):
        return mp.SumLoss((model(batch["x"]) ** 2).sum()), {}

    for apply, layers, strategy, spec, match in (
        (outer, {"w": (2, 4, 4)}, mp.ddp(), {}, "is not part of the stacked layers"),
        (unconstrained, {"up": (2, 4, 8), "down": (2, 8, 4)}, mp.tensor_parallel(sequence=True), {"tensor": 2},
         'suitable meshpar.constrain(.|\n)*"norm_seq"'),
    ):  # fmt: skip
        params = {"layers": {name: jnp.ones(shape) for name, shape in layers.items()}, "outer": jnp.ones((4, 4))}
        names = {"layers/w": ("layers", None, None), "layers/up": ("layers", "embed", "mlp"),
                 "layers/down": ("layers", "mlp", "embed"), "outer": (None, None)}  # fmt: skip
        named = {path: names[path] for path, _ in tree_leaves_with_paths(params)}
        model = mp.from_functions(lambda key, params=params: params, apply, names=named)
        with pytest.raises(mp.MeshparError, match=match):
            lower(model, {}, strategy, {"stage": 2, **spec}, loss=loss, batch={"x": np.ones((4, 4, 4), np.float32)})


@pytest.mark.parametrize("strategy", [mp.ddp(), mp.pipeline_parallel(stages=2, microbatches=2)], ids=str)
@pytest.mark.parametrize(("metric", "code"), [(None, "wrong-type"), ("big", "wrong-type"), (np.ones(2), "wrong-shape")])
def test_step_refuses_metrics_that_are_not_scalars(strategy, metric, code):
    spec = mp.MeshSpec() if strategy.pipeline is None else mp.MeshSpec(stage=2)
    names = {"layers/w": ("layers", "embed", None)}
    model = mp.from_functions(lambda key: {"layers": {"w": jnp.ones((2, 4, 4))}}, run_layers, names=names)
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh_of(spec), strategy=strategy)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {"odd": metric}))
    with raises(code, "metric `odd`"):
        step.lower(state, {"x": np.ones((4, 4), np.float32)})


def test_explain_refuses_uneven_chunks():
    strategy = mp.pipeline_parallel(stages=4, microbatches=4) | mp.ddp()
    state = mp.abstract_state(
        config("float32", num_layers=10).build(), optax.adam(1e-2), strategy=strategy,
        mesh=mesh_of(mp.MeshSpec(stage=4)),
    )  # fmt: skip
    with pytest.raises(mp.MeshparError, match=r"2\+3\+3\+2 layers.*Use 8 or 12 layers"):
        mp.explain(mp.train_step(next_token_loss), state, token_batches(16, SEQ, 1)[0])


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

        return self.head(mp.scan_layers(run, self.embed(ids), params, extra=rest, path="blocks"))


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
