"""Changes of stacked weights before `scan_layers`, for engines that distribute the stacks."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.parallel import parse_strategy
from tests.errors import raises
from tests.grid import cases
from tests.training.gradients.test_fsdp import ROWS, TWO_AXES, after_a_step, mean_square, stacks_model
from tests.training.gradients.test_weight_messages import EXACT

MESSAGES = {"data": 2, "fsdp": 2}, TWO_AXES.format(f", quantize={EXACT}")
STAGES = {"stage": 3}, "pipeline_parallel(stages=3, microbatches=2)"


def normed(w, dim):
    return w / jnp.linalg.norm(w, axis=dim, keepdims=True)


def in_a_loop(w):
    return jax.lax.scan(lambda total, _: (total + w, None), jnp.zeros_like(w), None, length=2)[0]


def model_of(change):
    """Return a model whose stack `[layers, embed, width]` is changed before the layers."""

    def apply(params, x):
        return mp.scan_layers(lambda x, w: x + jnp.tanh(x @ w["up"]), x, {"up": change(params["layers/up"])})

    return stacks_model({"layers/up": ((3, 8, 8), jnp.float32)}, apply)


def traced(model, mesh, strategy):
    state = mp.abstract_state(
        model, optax.sgd(1.0), mesh=mp.MeshSpec(**mesh).abstract(), strategy=parse_strategy(strategy)
    )
    mp.train_step(mean_square).trace(state, ROWS)


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (MESSAGES, lambda w: normed(w, 1)),
        (MESSAGES, lambda w: w.swapaxes(1, 2)),
        (MESSAGES, lambda w: w * jnp.arange(8.0)[:, None]),
        (MESSAGES, lambda w: jnp.concatenate([w[:, 4:], w[:, :4]], 1)),
        (MESSAGES, lambda w: w[:, ::-1]),
        (MESSAGES, in_a_loop),
        (MESSAGES, jax.checkpoint(lambda w: normed(w, 1))),
        (MESSAGES, lambda w: jax.lax.cond(True, lambda: w, lambda: normed(w, 1))),
        (STAGES, lambda w: w - w.mean(0)),
        (STAGES, lambda w: w[::-1]),
        (STAGES, lambda w: w * jnp.arange(3.0)[:, None, None]),
    ],
)
def test_changes_across_distributed_dims_are_refused(layout, change):
    """Each device would change its shard or its layers, without those of other devices."""
    with raises("unsupported-feature", "`layers/up`"):
        traced(model_of(change), *layout)


def test_weights_passed_under_the_path_of_others_are_refused():
    """Their sharded dims differ, and the layer would gather the wrong dim."""

    def apply(params, x):
        weights = {"up": params["layers/down"], "down": params["layers/up"]}
        return mp.scan_layers(lambda x, w: x + jnp.tanh(x @ w["up"]) @ w["down"], x, weights)

    names = {"layers/up": ("layers", "embed", None), "layers/down": ("layers", None, "embed")}
    model = mp.from_functions(
        lambda key: {name: jax.random.normal(key, (3, 8, 8)) for name in names}, apply, names=names
    )
    with raises("unsupported-feature", "`layers/up`") as error:
        traced(model, *MESSAGES)
    assert "with other dims" in str(error.value)


ACCEPTED = {
    "scale": lambda w: jnp.float32(1.5) * w,
    "width": lambda w: normed(w, 2),
    "column": lambda w: w * jnp.arange(8.0),
    "jit": jax.jit(lambda w: jnp.tanh(w)),
}
LAYOUTS = {"messages": MESSAGES, "stages": STAGES}
OF_A_LAYOUT = {
    ("messages", "layers"): lambda w: jnp.concatenate([w[::-1], w[:1]]) + w.mean(0),
    ("stages", "embed"): lambda w: normed(w, 1),
    ("stages", "transpose"): lambda w: w.swapaxes(1, 2),
}


@pytest.mark.parametrize(
    ("layout", "change"),
    cases(("messages", "layers"), ("stages", "embed"), grid=[*itertools.product(LAYOUTS, ACCEPTED), *OF_A_LAYOUT]),
)
def test_changes_along_other_dims_equal_one_device(layout, change):
    model = model_of(ACCEPTED.get(change) or OF_A_LAYOUT[layout, change])
    mesh, strategy = LAYOUTS[layout]
    actual = after_a_step(model, mean_square, strategy, mesh)
    expected = after_a_step(model, mean_square, "ddp()", {"data": 1})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_loops_may_pass_the_same_weights():
    def apply(params, x):
        def run(x, _):
            return mp.scan_layers(lambda x, w: jnp.tanh(x @ w["up"]), x, {"up": params["layers/up"]}), None

        return jax.lax.scan(run, x, None, length=2)[0]

    traced(stacks_model({"layers/up": ((3, 8, 8), jnp.float32)}, apply), *MESSAGES)
