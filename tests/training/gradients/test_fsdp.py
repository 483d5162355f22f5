"""Combinations of prefetched, quantized and accumulated FSDP: values, gradients and collectives."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.parallel import parse_strategy
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases
from tests.training.gradients.test_weight_messages import EXACT as EXACT_MESSAGES
from tests.training.gradients.test_weight_messages import one_step

MESHES = {
    "fsdp": ({"fsdp": 8}, "fsdp(min_bytes=0{})"),
    "hsdp": ({"data": 2, "fsdp": 4}, "hsdp(min_bytes=0{})"),
    "hsdp|tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, "hsdp(min_bytes=0{}) | tensor_parallel()"),
    "hsdp|expert": ({"data": 2, "fsdp": 2, "expert": 2}, "hsdp(min_bytes=0{}) | expert_parallel()"),
    "two axes": ({"data": 2, "fsdp": 4}, "zero3(axis=('data', 'fsdp'), min_bytes=0{})"),
}
FORMATS = {
    "plain": "",
    "int8": ", quantize='int8'",
    "fp8": ", quantize='fp8'",
    "secondary": ", quantize={'weights': None, 'gradients': None, 'secondary': 'fsdp'}",
    "int8, secondary": ", quantize={'secondary': 'fsdp'}",
}
LOOPS = {
    "at use": "",
    "ahead": ", prefetch=1",
    "two ahead": ", prefetch=2",
    "kept": ", keep=2",
    "ahead, kept": ", prefetch=1, keep=2",
    "all ahead": ", prefetch=9",
}
REDUCTIONS = {
    "once per step": {},
    "each micro-step": {"accumulate": 2, "reduce_gradients": "each_microbatch"},
    "once across groups": {"accumulate": 2, "reduce_gradients": "once_across_groups"},
    "once": {"accumulate": 2, "reduce_gradients": "once"},
}
EXACT = ("plain", "secondary")
"""Formats without rounding."""


def is_valid(mesh: str, wire: str, loop: str, reduction: str) -> bool:
    """Secondary shards need a second axis that shards the parameters, groups an axis that shards none."""
    has_axes = ("secondary" not in wire or mesh == "two axes") and (reduction != "once across groups" or "hsdp" in mesh)
    return has_axes and (loop != "at use" or wire in EXACT)


GRID = [case for case in itertools.product(MESHES, FORMATS, LOOPS, REDUCTIONS) if is_valid(*case)]


@functools.cache
def gradients_of(mesh: str, wire: str, loop: str, reduction: str):
    """Return loss and gradients of a step."""
    axes, text = MESHES[mesh]
    model = "experts" if "expert" in mesh else "functions"
    strategy = parse_strategy(text.format(FORMATS[wire] + LOOPS[loop]))
    metrics, grads, _ = one_step(axes, strategy, model=model, **REDUCTIONS[reduction])
    jax.clear_caches()  # hundreds of programs
    return metrics["loss"], grads


@functools.cache
def on_one_device(model):
    metrics, grads, _ = one_step({"data": 1}, mp.ddp(), model=model)
    return metrics["loss"], grads


@pytest.mark.parametrize(
    ("mesh", "wire", "loop", "reduction"),
    cases(
        ("hsdp|tensor", "int8", "ahead, kept", "once across groups"),
        grid=GRID,
    ),
)  # fmt: skip
def test_all_settings_have_the_same_gradients(mesh, wire, loop, reduction):
    """Exact formats equal one device. Other formats equal the same format without layers ahead."""
    actual = gradients_of(mesh, wire, loop, reduction)
    if wire in EXACT:
        expected = on_one_device("experts" if "expert" in mesh else "functions")
    else:
        expected = gradients_of(mesh, wire, "at use", reduction)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


# ---- Stacks of layers ------------------------------------------------------------------------------------------------

TWO_AXES = "fsdp(axis=('data', 'fsdp'), min_bytes=0{})"
ROWS = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def stacks_model(shapes, apply):
    """Return a model with a float32 or bfloat16 weight `[layers, ..., embed, width]` for each path."""

    def init(key):
        return {
            path: jax.random.normal(jax.random.fold_in(key, index), shape, dtype) / 4
            for index, (path, (shape, dtype)) in enumerate(shapes.items())
        }

    names = {
        path: ("layers", *(None,) * (len(shape) - 3), "embed", None) for path, (shape, _) in shapes.items()
    }  # fmt: skip
    return mp.from_functions(init, apply, names=names)


def after_a_step(model, loss, strategy, mesh=None, **options):
    spec = {"data": 1} if strategy == "ddp()" else {"data": 2, "fsdp": 2}
    mesh, parsed = mesh_of(mp.MeshSpec(**(mesh or spec))), parse_strategy(strategy)
    state = mp.init_state(model, optax.sgd(1.0), mesh=mesh, strategy=parsed, key=0)
    state, metrics = mp.train_step(loss, **options)(state, mp.shard_batch(ROWS, mesh, parsed))
    return jax.device_get((state.params, metrics))


def mean_square(model, batch, key):
    squared = model(batch) ** 2
    return mp.MeanLoss(squared.sum(), float(squared.size)), {}


WITH_MESSAGES = f", quantize={EXACT_MESSAGES}"


@pytest.mark.parametrize("settings", cases(WITH_MESSAGES, grid=[WITH_MESSAGES, ", prefetch=1, keep=2"]))
def test_layers_that_contain_a_stack_have_the_same_gradients(settings):
    def apply(params, x):
        def layer(x, weights):
            x = x + jnp.tanh(x @ weights["up"])
            return mp.scan_layers(
                lambda x, w: x + jnp.tanh(x @ w), x, weights["inner"], path="layers/inner", staged=False
            )

        return mp.scan_layers(layer, x, {name: params[f"layers/{name}"] for name in ("up", "inner")})

    shapes = {"layers/up": (3, 8, 8), "layers/inner": (3, 2, 8, 8)}
    model = stacks_model({path: (shape, jnp.float32) for path, shape in shapes.items()}, apply)
    actual, expected = (after_a_step(model, mean_square, strategy) for strategy in (TWO_AXES.format(settings), "ddp()"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ({"data": 2, "fsdp": 2}, TWO_AXES.format(", quantize='int8'")),
        ({"stage": 3}, "pipeline_parallel(stages=3, microbatches=2)"),
    ],
)
def test_penalty_on_weights_of_layers_is_refused_outside_of_them(mesh, strategy):
    """Each device would add the penalty on its shard or on its layers."""

    def penalized(model, batch, key):
        y, penalty = model(batch)
        return (y**2).mean() + penalty, {}

    def apply(params, x):
        return mp.scan_layers(lambda x, w: x @ w, x, params["up"], path="up"), (params["up"] ** 2).sum()

    model = stacks_model({"up": ((3, 8, 8), jnp.float32)}, apply)
    with raises("unsupported-feature", "`up`"):
        after_a_step(model, penalized, strategy, mesh, loss_is="mean_over_examples")


@pytest.mark.parametrize("other", [((2, 16, 16), jnp.float32), ((2, 8, 8), jnp.bfloat16)], ids=["shape", "dtype"])
def test_equal_ends_of_paths_need_equal_shapes_and_dtypes(other):
    def apply(params, x):
        def layer(x, w):
            return x + x @ w.astype(x.dtype)

        x = mp.scan_layers(layer, x, params["a/layers"], path="layers")
        return mp.scan_layers(layer, jnp.tile(x, other[0][-1] // 8), params["b/layers"], path="layers")

    model = stacks_model({"a/layers": ((3, 8, 8), jnp.float32), "b/layers": other}, apply)
    with raises("conflict", "layers"):
        after_a_step(model, mean_square, TWO_AXES.format(", quantize='int8'"))


# ---- Collectives -----------------------------------------------------------------------------------------------------

DECODER = TransformerConfig(
    vocab_size=256, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
)  # fmt: skip
EXPERTS = TransformerConfig(
    vocab_size=256, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128,
    moe=MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=128),
)  # fmt: skip
BATCH = {name: jax.ShapeDtypeStruct((32, 32), np.int32) for name in ("inputs", "targets")}
PROGRAMS = {
    "hsdp": (DECODER, {"data": 2, "fsdp": 4}, "hsdp({})"),
    "hsdp|tensor": (DECODER, {"data": 2, "fsdp": 2, "tensor": 2}, "hsdp({}) | tensor_parallel()"),
    "hsdp|expert": (EXPERTS, {"data": 2, "fsdp": 2, "expert": 2}, "hsdp({}) | expert_parallel()"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("loop", ["at use", "ahead", "two ahead", "kept", "ahead, kept"])
@pytest.mark.parametrize(
    ("name", "wire"),
    # XLA:CPU gathers the rows of a lookup over fsdp if tensor shards the table, too.
    [*itertools.product(PROGRAMS, ["int8"]), ("hsdp", "plain"), ("hsdp|expert", "plain")],
)
def test_combined_steps_send_only_expected_collectives(name, wire, loop, remat):
    config, mesh, text = PROGRAMS[name]
    strategy = parse_strategy(text.format("min_bytes=0" + FORMATS[wire] + LOOPS[loop]))
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mp.MeshSpec(**mesh).build(), strategy=strategy)
    step = mp.train_step(next_token_loss, accumulate=2, remat=remat, reduce_gradients="once_across_groups")
    report = mp.explain(step, state, BATCH)
    assert not report.matching.unexpected, str(report)
    assert not report.matching.missing, str(report)
