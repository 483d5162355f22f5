"""Dtypes and rematerialisation: what the step asks for is what the layers do."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import meshpar as mp
from meshpar.layers.precision import dot_general, numerics
from meshpar.layers.scan import REMAT_POLICIES
from tests.grid import cases

PRODUCTS = {
    "dense": ((4, 5, 8), (8, 6), (((2,), (0,)), ((), ()))),
    "heads": ((4, 5, 8), (8, 2, 3), (((2,), (0,)), ((), ()))),
    "out": ((4, 5, 2, 3), (2, 3, 8), (((2, 3), (0, 1)), ((), ()))),
    "crossed": ((4, 2, 5, 3), (3, 8, 2), (((1, 3), (2, 0)), ((), ()))),
    "experts": ((4, 5, 8), (4, 8, 6), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_dot_general_is_laxs_in_value_and_gradient(product):
    lhs_shape, rhs_shape, dims = PRODUCTS[product]
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=lhs_shape), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=rhs_shape), jnp.bfloat16)

    def scalar(product):
        return lambda a, b: (product(a, b, dims).astype(jnp.float32) ** 2).sum()

    with numerics(mp.Precision(compute="bfloat16", reduce="float32"), None):
        ours = jax.jit(jax.value_and_grad(scalar(dot_general), argnums=(0, 1)))(lhs, rhs)
        assert "preferred_element_type=float32" in str(jax.make_jaxpr(jax.grad(scalar(dot_general), 1))(lhs, rhs))
    theirs = jax.jit(jax.value_and_grad(scalar(lax.dot_general), argnums=(0, 1)))(lhs, rhs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        # Both products accumulate in float32 and round once to bfloat16's 8 bits.
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-7)


def test_dot_general_is_plain_where_nothing_is_gained():
    lhs, rhs = jnp.ones((4, 8), jnp.float32), jnp.ones((8, 2), jnp.float32)
    dims = (((1,), (0,)), ((), ()))

    def product(a, b):
        return dot_general(a, b, dims)

    outside = str(jax.make_jaxpr(product)(lhs, rhs))
    with numerics(mp.Precision(reduce=None), None):
        assert str(jax.make_jaxpr(product)(lhs, rhs)) == outside
    assert "custom_vjp" not in outside


@pytest.mark.parametrize(
    ("precision", "compute", "expected"),
    [
        (mp.Precision(), "bfloat16", "float32"),
        (mp.Precision(), "float64", "float64"),
        (mp.Precision(reduce="bfloat16"), "bfloat16", "bfloat16"),
        (mp.Precision(reduce="float32"), "float64", "float32"),
    ],
)
def test_the_default_reduction_is_at_least_float32(precision, compute, expected):
    assert precision.reduce_dtype(jnp.dtype(compute)) == jnp.dtype(expected)


@pytest.mark.parametrize("field", ["params", "compute", "reduce"])
def test_a_dtype_that_does_not_exist(field):
    with pytest.raises(mp.MeshparError, match="`bfloat16`"):
        mp.Precision(**{field: "bflot16"})


# ---------------------------------------------------------------------------------------------------------------------
# Rematerialisation
# ---------------------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, ROWS = 32, 6, 64


def deep_model():
    def init(key):
        return {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5}

    def apply(params, x):
        def layer(x, w):
            return x + jnp.tanh(jnp.sin(dot_general(x, w, (((1,), (0,)), ((), ())))))

        return mp.scan_layers(layer, x, params["w"])

    return mp.from_functions(init, apply, names={"w": ("layers", "embed", None)})


def deep_loss(model, batch, key):
    return (model(batch) ** 2).mean(), {}


def deep_step(remat):
    state = mp.init_state(deep_model(), optax.sgd(0.1), mesh=mp.MeshSpec(data=8).build(), strategy=mp.ddp(), key=0)
    step = mp.train_step(deep_loss, remat=remat)
    batch = np.random.default_rng(0).normal(size=(ROWS * 8, WIDTH)).astype(np.float32)
    temporaries = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    state, metrics = step(state, batch)
    return jax.device_get((state.params["w"], metrics["loss"])), temporaries


def test_what_is_no_precision_is_told_at_once():
    model = mp.from_functions(lambda key: {"w": jnp.ones(8)}, lambda params, x: params["w"] * x)
    how = {"mesh": mp.MeshSpec().abstract(1), "strategy": mp.ddp()}
    for where, make in (
        ("train_step", lambda word: mp.train_step(mp.models.next_token_loss, precision=word)),
        ("eval_step", lambda word: mp.eval_step(mp.models.next_token_loss, precision=word)),
        ("init_state", lambda word: mp.abstract_state(model, optax.sgd(1e-3), precision=word, **how)),
    ):
        with pytest.raises(mp.MeshparError, match=f'{where}.* Write mp.Precision\\(compute="float32"\\)'):
            make("float32")
        with pytest.raises(mp.MeshparError, match="it is a dict, no Precision"):
            make({})


def test_every_policy_gives_the_same_step_and_full_keeps_least():
    (w, loss), plain_bytes = deep_step(None)
    kept = {}
    for policy in REMAT_POLICIES:
        (w_remat, loss_remat), kept[policy] = deep_step(policy)
        np.testing.assert_allclose(loss_remat, loss, rtol=1e-6)
        np.testing.assert_allclose(w_remat, w, atol=1e-6)
    one_activation = LAYERS * ROWS * WIDTH * 4
    assert kept["full"] + one_activation <= kept["dots"] <= plain_bytes


# ---------------------------------------------------------------------------------------------------------------------
# Mixed precision end to end
# ---------------------------------------------------------------------------------------------------------------------


def test_bfloat16_compute_keeps_float32_parameters_and_learns():
    state = mp.init_state(deep_model(), optax.adam(1e-2), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(), key=0)
    seen = []

    def loss_fn(model, batch, key):
        seen.extend(x.dtype for x in jax.tree.leaves(model.args))
        return deep_loss(model, batch.astype(jnp.bfloat16), key)

    step = mp.train_step(loss_fn, precision=mp.Precision(params="float32", compute="bfloat16"))
    batch = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert state.params["w"].dtype == jnp.float32
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------------------------------
# A model that computes wider than asked
# ---------------------------------------------------------------------------------------------------------------------

BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


class Net(nn.Module):
    dtype: str | None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, dtype=self.dtype)(nn.gelu(nn.Dense(64, dtype=self.dtype)(x)))


@pytest.mark.parametrize(
    ("dtype", "inputs", "told"),
    cases(
        ("float32", "bfloat16", True),
        ("bfloat16", "float32", False),
        grid=[
            ("float32", "bfloat16", True),
            (None, "float32", True),
            ("bfloat16", "float32", False),
            (None, "bfloat16", False),
        ],
    ),
)
def test_a_model_that_casts_back_is_told_before_the_first_step_and_in_explain(dtype, inputs, told):
    def loss_fn(model, batch, key):
        x = batch.astype(inputs)
        return ((model(x) - x).astype(jnp.float32) ** 2).mean(), {}

    mesh = mp.MeshSpec(data=8).build()
    model = mp.from_linen(Net(dtype), BATCH)
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    step = mp.train_step(loss_fn, precision=mp.Precision(compute="bfloat16"))
    findings = [one for one in mp.explain(step, state, BATCH).findings if one.rule == "wide-compute"]
    assert bool(findings) == told
    traces = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = step(state, BATCH)
            traces.append(len(caught))
    assert traces == [told, told], "once"
    if told:
        assert "100% of the matmul FLOPs are in float32" in str(caught[0].message)
        assert "Precision(compute=" not in findings[0].fix, "never the advice to set what is set"
        assert "build the model's modules with dtype=bfloat16" in str(caught[0].message)
