"""ZeRO++: error bounds of a step, memory and bytes sent, options and errors."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import meshpar as mp
from meshpar.collectives.quantized import error_bound
from meshpar.hardware import cost_model as cost
from meshpar.inspect import census
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.parallel import Quantize, parse_strategy
from meshpar.runs.overrides import override
from meshpar.runs.recipe_file import load_recipe
from tests.errors import raises
from tests.grid import cases

LAYERS, WIDTH, HIDDEN, BATCH = 3, 16, 24, 16

EXACT = {"weights": None, "gradients": None, "secondary": "fsdp"}
"""Secondary shards without quantization: all communication of the engine, and no rounding."""


def stacked_model(scan=mp.scan_layers):
    """Return a residual MLP with stacked layers."""

    def init(key):
        up, down, out = (jax.random.normal(k, shape) / 4 for k, shape in zip(
            jax.random.split(key, 3), ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (WIDTH, 8)), strict=True
        ))  # fmt: skip
        layers = {"up": {"kernel": up}, "down": {"kernel": down}, "scale": jnp.ones((LAYERS, WIDTH))}
        return {"layers": layers, "out": {"kernel": out}, "bias": jnp.zeros(8)}

    def apply(params, x):
        def layer(x, weights):
            h = jnp.tanh((x * weights["scale"]) @ weights["up"]["kernel"])
            return x + h @ weights["down"]["kernel"]

        x = scan(layer, x, params["layers"])
        return x @ params["out"]["kernel"] + params["bias"]

    names = {
        "layers/up/kernel": ("layers", "embed", "mlp"),
        "layers/down/kernel": ("layers", "mlp", "embed"),
        "layers/scale": ("layers", "embed"),
        "out/kernel": ("embed", None),
        "bias": (None,),
    }
    return mp.from_functions(init, apply, names=names)


def squares(model, batch, key):
    """Return a weighted mean over examples. If all weights of a local batch are 0, its metric is 0 / 0."""
    squared_error = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    total, weight = (squared_error * batch["counts"]).sum(), batch["counts"].sum()
    return mp.MeanLoss(total, weight), {"mean": total / weight, "examples": jnp.asarray(len(squared_error))}


def examples(counts=None):
    draw = np.random.default_rng(0).standard_normal
    counts = np.arange(BATCH) % 5 if counts is None else np.asarray(counts)
    return {name: np.asarray(x, "float32") for name, x in
            (("x", draw((BATCH, WIDTH))), ("y", draw((BATCH, 8))), ("counts", counts))}  # fmt: skip


def linear_model():
    return mp.from_functions(
        lambda key: {"kernel": jax.random.normal(key, (WIDTH, 8))},
        lambda params, x: x @ params["kernel"],
        names={"kernel": ("embed", None)},
    )


def linear(model, batch, key):
    products = model(batch["x"]) * batch["y"]
    return mp.MeanLoss(products.sum(), products.size), {}


def experts():
    """Return a decoder with experts, whose loss is a mean over tokens."""
    moe = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=16, auxiliary_weight=0.0, z_weight=0.0)
    config = TransformerConfig(
        vocab_size=64, num_layers=LAYERS, embed_dim=WIDTH, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16, moe=moe
    )
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, 9)).astype(np.int32)
    return config.build(), next_token_loss, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


MODELS = {
    "experts": experts,
    "linear": lambda: (linear_model(), linear, examples()),
    "functions": lambda: (stacked_model(), squares, examples()),
}


def one_step(mesh, strategy, *, model="functions", batch=None, **options):
    """Return metrics, gradients and initial parameters of an SGD step with learning rate 1."""
    built, loss, default_batch = MODELS[model]()
    mesh = mp.MeshSpec(**mesh).build(jax.devices()[: math.prod(mesh.values())])
    state = mp.init_state(built, optax.sgd(1.0), mesh=mesh, strategy=strategy, key=0)
    before = jax.tree.map(np.asarray, state.params)
    batch = mp.shard_batch(default_batch if batch is None else batch, mesh, strategy)
    state, metrics = mp.train_step(loss, **options)(state, batch)
    grads = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return jax.tree.map(np.asarray, metrics), grads, before


@pytest.mark.parametrize(
    "entry", cases("data fsdp tensor", grid=map(" ".join, itertools.permutations(("data", "fsdp", "tensor"))))
)
def test_gathered_dim_may_be_sharded_over_other_axes(entry):
    wire = ", quantize={'weights': None, 'gradients': None, 'secondary': 'fsdp'}"
    strategy = parse_strategy(f"fsdp(axis=('data', 'fsdp'), min_bytes=0{wire})") | mp.Rules(embed=tuple(entry.split()))
    found, expected = one_step({"data": 2, "fsdp": 2, "tensor": 2}, strategy), one_step({"data": 1}, mp.ddp())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize(
    ("axis", "strategy"),
    [
        pytest.param("fsdp", mp.fsdp(min_bytes=0, quantize="int8"), marks=pytest.mark.matrix),
        ("fsdp", mp.fsdp(min_bytes=0, prefetch=1)),
        ("stage", mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-h1")),
    ],
    ids=str,
)
def test_stacked_layers_as_a_single_linen_param(axis, strategy):
    """`at` is the path of the parameter. Its shards differ in shape from the result of its initializer."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.normal(0.5), ("layers", "embed", None))
            stack = self.param("stack", init, (LAYERS, WIDTH, WIDTH))
            return mp.scan_layers(lambda x, weight: jnp.tanh(x @ weight) + x, x, stack, path="stack")

    def loss_fn(model, batch, key):
        square = model(batch["x"]) ** 2
        return mp.MeanLoss(square.sum(), square.size), {}

    losses = []
    for ranks, compared in ((1, mp.fsdp()), (2 if axis == "stage" else 8, strategy)):
        mesh = mp.MeshSpec(**{axis: ranks}).build(jax.devices()[:ranks])
        model = mp.from_linen(Stack(), examples()["x"])
        state = mp.init_state(model, optax.sgd(1.0), mesh=mesh, strategy=compared, key=0)
        state, first = mp.train_step(loss_fn)(state, examples())
        losses.append([float(first["loss"]), float(first["grad_norm"])])
    # int8 has 127 steps up to the largest absolute value of a block.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6 if strategy.gathering.formats is None else 1e-2)


@pytest.fixture(scope="module")
def plain():
    """Return a cached function, model -> reference step on one device."""
    return functools.cache(lambda model: one_step({"fsdp": 1}, mp.fsdp(), model=model))


def assert_close(actual, expected, *, rtol):
    """Compare metrics, and gradients relative to the largest element of each."""
    assert actual[0].keys() == expected[0].keys()
    for name in ("loss_weight", "examples"):
        assert actual[0].get(name) == expected[0].get(name), name
    for name in {"loss", "grad_norm", "mean"} & actual[0].keys():
        np.testing.assert_allclose(actual[0][name], expected[0][name], rtol=rtol)
    for x, y in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max() + 1e-7)


TWO_LEVELS = {"data": 2, "fsdp": 4}
ONCE = {"accumulate": 2, "reduce_gradients": "once"}


# ---- Communication without quantization ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "quantize", "rtol"),
    cases(
        ({}, EXACT, 2e-5), (ONCE, "int8", 0.05),
        grid=[({}, EXACT, 2e-5), (ONCE, EXACT, 2e-5), ({}, "int8", 0.05), (ONCE, "int8", 0.05)],
    ),
    ids=str,
)  # fmt: skip
def test_devices_with_zero_weight_do_not_spread_nan(mode, quantize, rtol):
    """The metric is 0 / 0 on half of the devices."""
    batch = examples(np.repeat([0.0, 1.0, 0.0, 3.0], BATCH // 4))
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize=quantize)
    actual = one_step(TWO_LEVELS, strategy, batch=batch, **mode)
    assert actual[0]["finite"]
    assert_close(actual, one_step({"fsdp": 1}, mp.fsdp(), batch=batch), rtol=rtol)


# ---- Quantized communication -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "strategy", "options"),
    [
        pytest.param({"fsdp": 2}, mp.fsdp(quantize="int8"), {}, marks=pytest.mark.matrix),
        pytest.param({"fsdp": 8}, mp.zero3(quantize="fp8"), {}, marks=pytest.mark.matrix),
        pytest.param({"fsdp": 8}, mp.zero3(quantize="int8"), ONCE, marks=pytest.mark.matrix),
        pytest.param(TWO_LEVELS, mp.hsdp(quantize="int8"), {}, marks=pytest.mark.matrix),
        pytest.param(
            TWO_LEVELS, mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"}), {}, marks=pytest.mark.matrix
        ),
        (
            TWO_LEVELS,
            mp.fsdp(axis=("data", "fsdp"), quantize={"stochastic": True, "block": 3, "secondary": "fsdp"}),
            ONCE,
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_are_within_the_bound(mesh, strategy, options):
    """The loss is linear in the weights, so that errors of weights do not change the gradients."""
    wire, batch, num_devices = strategy.gathering.formats, examples(), math.prod(mesh.values())
    metrics, grads, before = one_step(mesh, strategy, model="linear", **options)
    kernel, x, y = before["kernel"], batch["x"], batch["y"]
    slopes = np.einsum("ri,ro->rio", x, y) / 8  # gradient of the loss of each example
    by_device = np.abs(slopes.reshape(num_devices, -1, *slopes.shape[1:]).mean(1)).max()
    bound = functools.partial(error_bound, dtype=wire.gradients, stochastic=wire.stochastic)
    # A mean of terms, each quantized once. Across nodes the sums are quantized up to two more times.
    max_error = bound(by_device)
    if "data" in mesh:
        max_error += 2 * bound(by_device + 2 * max_error)
    assert 1e-6 < np.abs(grads["kernel"] - slopes.mean(0)).max() <= max_error
    weights = error_bound(np.abs(kernel).max(), dtype=wire.weights, stochastic=wire.stochastic)
    error = np.abs(metrics["loss"] - ((x @ kernel) * y).mean())
    assert 1e-6 < error <= weights * np.abs(slopes.mean(0)).sum()


@pytest.mark.matrix
def test_tensor_parallel_shards_are_quantized_locally(plain):
    strategy = mp.fsdp(quantize={"stochastic": True}) | mp.tensor_parallel()
    actual = one_step({"fsdp": 2, "tensor": 2}, strategy)
    assert_close(actual, plain("functions"), rtol=0.1)  # as below, and stochastic rounding doubles the error
    with pytest.raises(AssertionError):
        assert_close(actual, plain("functions"), rtol=1e-4)


@pytest.mark.parametrize("side", cases("gradients", grid=["weights", "gradients"]))
def test_weights_or_gradients_alone(plain, side):
    other = {"weights": "gradients", "gradients": "weights"}[side]
    actual, exact = one_step({"fsdp": 4}, mp.fsdp(quantize={other: None})), plain("functions")
    same_loss = abs(actual[0]["loss"] / exact[0]["loss"] - 1) < 1e-6
    assert same_loss == (side == "gradients")  # quantized gradients do not change the forward pass
    with pytest.raises(AssertionError):
        assert_close(actual, exact, rtol=1e-4)
    assert_close(actual, exact, rtol=0.05)  # weights have an error of 1/254 of the largest, in 3 layers


@pytest.mark.filterwarnings("ignore:.*of the matmul FLOPs are in float32")  # the inputs are float32
def test_bfloat16_weights_are_cast_before_quantization():
    precision = mp.Precision(compute="bfloat16")
    actual = one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), precision=precision)
    assert_close(actual, one_step({"fsdp": 4}, mp.fsdp(), precision=precision), rtol=0.05)


def test_nonfinite_gradient_skips_the_update():
    batch = examples()
    batch["y"][3, 2] = np.inf
    metrics, grads, _ = one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), batch=batch)
    assert not metrics["finite"]
    assert all((g == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.matrix
def test_stochastic_rounding_depends_on_the_step():
    strategy = mp.fsdp(quantize={"stochastic": True})
    mesh = mp.MeshSpec(fsdp=4).build(jax.devices()[:4])
    state = mp.init_state(stacked_model(), optax.sgd(0.0), mesh=mesh, strategy=strategy, key=0)
    step, batch = mp.train_step(squares), mp.shard_batch(examples(), mesh, strategy)
    losses = []
    for number in (0, 0, 1):  # learning rate 0 keeps the parameters
        state, metrics = step(state.replace(step=jnp.full_like(state.step, number)), batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1] != losses[2]


# ---- Loss curve ------------------------------------------------------------------------------------------------------


# ---- Memory and bytes sent -------------------------------------------------------------------------------------------


def arrays_in(jaxpr):
    """Yield all arrays of a program, including loops and calls."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays_in(inner)


@pytest.mark.parametrize(
    ("quantize", "remat"),
    cases((EXACT, "full"), grid=itertools.product(("int8", EXACT), (None, "full", "all_dots"))),
    ids=str,
)
def test_full_weights_are_not_saved_for_backward(quantize, remat):
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize=quantize)
    state = mp.abstract_state(
        stacked_model(), optax.sgd(1.0), mesh=mp.MeshSpec(**TWO_LEVELS).abstract(), strategy=strategy
    )
    traced = mp.train_step(squares, remat=remat).trace(state, examples())
    body = next(e for e in traced.jaxpr.jaxpr.eqns if "shard_map" in e.primitive.name).params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    avals = list(arrays_in(body))
    stacks = {aval.shape for aval in avals if aval.ndim == 3 and aval.shape[0] == LAYERS}
    assert (LAYERS, WIDTH, HIDDEN) not in stacks
    assert (LAYERS, HIDDEN, WIDTH) not in stacks
    assert (LAYERS, WIDTH // 8, HIDDEN) in stacks  # gradient shards
    saved = {math.prod(a.shape[1:]) for a in avals if a.dtype == jnp.uint8 and a.shape[:1] == (LAYERS,)}
    if quantize is EXACT:  # the secondary shard of each layer: a quarter, with four bytes per element
        assert saved == {4 * WIDTH * HIDDEN // 4}
    else:  # at most the message of the rank
        assert sum(saved) <= (cost.quantized_bytes(WIDTH * HIDDEN // 8) if remat is None else 0)


POD = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512
)
MATRICES = {  # number of elements in a layer
    "query": 256 * 256, "key": 256 * 128, "value": 256 * 128, "out": 256 * 256,
    "gate": 256 * 512, "up": 256 * 512, "down": 256 * 512,
}  # fmt: skip
TABLES = 2 * 512 * 256
VECTORS = 4 * 256 * 2 + 256
"""Elements of the norm scales of four layers and of the final norm."""


def sent_on_pod(pod, cluster, mesh, strategy):
    """Return the collectives of a bfloat16 step, and the bytes that a device sends by (kind, axes, in_loop)."""
    mesh = mp.MeshSpec(**mesh).abstract()
    state = mp.abstract_state(POD.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {n: jax.ShapeDtypeStruct((16, 64), np.int32) for n in ("inputs", "targets")}
    collectives = census.census(pod.compile(step.trace(state, batch), cluster).module, mesh)
    sent = collections.Counter()
    for collective in collectives:
        sent[collective.kind, collective.axes, collective.in_loop] += collective.bytes_sent_per_step
    return collectives, sent


def matrix_dtypes(collectives):
    """Return the dtypes of the arrays that are larger than all vectors together."""
    return {array.dtype for c in collectives for array in c.arrays if math.prod(array.dims) > VECTORS}


@pytest.mark.pod
@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_node_sends_one_byte_per_element(pod, dtype):
    collectives, sent = sent_on_pod(pod, "h100:1x8", {"fsdp": 8}, mp.fsdp(quantize=dtype))
    assert matrix_dtypes(collectives) == {"u8"}
    layer = sum(cost.quantized_all_gather(size, 8).inside.bytes_sent for size in MATRICES.values())
    assert sent["all-gather", ("fsdp",), True] == 2 * 4 * layer  # forward and backward
    assert sent["all-to-all", ("fsdp",), True] == 4 * layer
    tables = 2 * cost.quantized_all_gather(TABLES // 2, 8).inside.bytes_sent
    assert sent["all-gather", ("fsdp",), False] == tables + 2 * VECTORS * 7 / 8
    assert sent["all-to-all", ("fsdp",), False] == tables
    in_bfloat16 = 2 * 7 / 8 * sum(MATRICES.values())
    assert layer / in_bfloat16 == pytest.approx(0.5 * (1 + 4 / 256))


@pytest.mark.pod
def test_secondary_shards_gather_once_across_nodes(pod):
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"})
    collectives, sent = sent_on_pod(pod, "h100:2x8", {"data": 2, "fsdp": 8}, strategy)
    assert matrix_dtypes(collectives) == {"u8"}
    gathers = [cost.quantized_all_gather(size, 16, inner=8) for size in MATRICES.values()]
    scatters = [cost.quantized_reduce_scatter(size, 16, inner=8) for size in MATRICES.values()]
    assert sent["all-gather", ("data",), True] == 4 * sum(c.across.bytes_sent for c in gathers)  # forward only
    assert sent["all-gather", ("fsdp",), True] == 2 * 4 * sum(c.inside.bytes_sent for c in gathers)
    assert sent["all-to-all", ("data",), True] == 4 * sum(c.across.bytes_sent for c in scatters)
    assert sent["all-to-all", ("fsdp",), True] == 4 * sum(c.inside.bytes_sent for c in scatters)


# ---- Options and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        mp.fsdp(quantize="int8"),
        mp.zero3(quantize="fp8", min_bytes=0),
        mp.fsdp(quantize={"weights": None, "gradients": "fp8", "block": 64}),
        mp.fsdp(axis=("data", "fsdp"), quantize=EXACT | {"stochastic": True}) | mp.tensor_parallel(),
        mp.hsdp(quantize=Quantize(weights="fp8")) | mp.Rules(embed=None),
    ],
    ids=str,
)
def test_label_parses_to_the_same_strategy(strategy):
    assert strategy.gathering.formats is not None
    text = strategy.label.partition(" | Rules")[0]
    parsed = parse_strategy(text)
    assert parsed.gathering.formats == strategy.gathering.formats
    assert parsed.label == text


def test_later_quantize_overrides():
    assert (mp.fsdp(quantize="int8") | mp.fsdp(quantize="fp8")).gathering.formats == Quantize(
        weights="fp8", gradients="fp8"
    )
    assert (mp.fsdp() | mp.tensor_parallel()).gathering.formats is None


def test_recipe_override_sets_quantize():
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / "gpt_stdlib.py")
    changed = override(recipe, ['strategy=fsdp(quantize="int8") | tensor_parallel()'])
    assert changed.strategy.gathering.formats == Quantize()
    assert changed.to_json()["strategy"] == "fsdp(quantize='int8') | tensor_parallel()"


@pytest.mark.parametrize(
    ("quantize", "code"),
    [
        ("int4", "unknown-choice"),
        ({"weight": "int8"}, "unknown-name"),
        ({"gradients": "f8"}, "unknown-choice"),
        ({"block": 0}, "not-an-int"),
        ({"stochastic": 1}, "not-a-bool"),
        ({"weights": None, "gradients": None}, "conflict"),
        (3, "unknown-choice"),
        ({"secondary": "fsdp"}, "conflict"),
        ({"secondary": "tensor"}, "conflict"),
    ],
    ids=str,
)
def test_strategy_refuses_invalid_quantize(quantize, code):
    with raises(code):
        mp.fsdp(quantize=quantize)


def test_step_refuses_quantize_without_sharded_parameters():
    with raises("unused-axis", "strategy"):
        one_step({"data": 4}, mp.fsdp(quantize="int8"))


def test_step_refuses_layers_in_a_plain_scan():
    def scan(layer, x, params):
        return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0]

    MODELS["plain scan"] = lambda: (stacked_model(scan), squares, examples())
    with raises("unsupported-feature", "layers/"):
        one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), model="plain scan")


def test_step_refuses_unknown_path_of_layers():
    MODELS["blocks"] = lambda: (stacked_model(functools.partial(mp.scan_layers, path="blocks")), squares, examples())
    with raises("not-found", "blocks"):
        one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), model="blocks")


def test_bfloat16_parameters_sum_gradients_in_float32():
    """With 512 micro-steps, a bfloat16 sum of fours would stop at 1,024, half of the total."""
    model = mp.from_functions(
        lambda key: {"w": jnp.zeros((4, 2))}, lambda params, x: x @ params["w"], names={"w": ("embed", None)}
    )
    mesh, precision = mp.MeshSpec(data=2, fsdp=2).build(jax.devices()[:4]), mp.Precision(params="bfloat16")
    strategy = mp.fsdp(axis=("data", "fsdp"), min_bytes=0, quantize=EXACT)
    state = mp.init_state(model, optax.sgd(1.0), mesh=mesh, strategy=strategy, key=0, precision=precision)

    def total(model, batch, key):
        return mp.MeanLoss(model(batch).astype(jnp.float32).sum(), len(batch)), {}

    step = mp.train_step(total, accumulate=512, precision=precision)
    state, _ = step(state, np.ones((2048, 4), np.float32))
    np.testing.assert_array_equal(np.asarray(state.params["w"], np.float32), -1)
