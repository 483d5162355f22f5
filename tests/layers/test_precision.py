"""`Precision`, rematerialization, and reports of matmuls in a higher precision."""

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
from meshpar.layers.precision import dot_general, high_precision_ops, numerics, products
from meshpar.layers.remat import REMAT_POLICIES
from tests.errors import raises
from tests.grid import cases

PRODUCTS = {
    "dense": ((4, 5, 8), (8, 6), (((2,), (0,)), ((), ()))),
    "heads": ((4, 5, 8), (8, 2, 3), (((2,), (0,)), ((), ()))),
    "out": ((4, 5, 2, 3), (2, 3, 8), (((2, 3), (0, 1)), ((), ()))),
    "crossed": ((4, 2, 5, 3), (3, 8, 2), (((1, 3), (2, 0)), ((), ()))),
    "experts": ((4, 5, 8), (4, 8, 6), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_dot_general_matches_lax(product):
    lhs_shape, rhs_shape, dims = PRODUCTS[product]
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=lhs_shape), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=rhs_shape), jnp.bfloat16)

    def scalar(product):
        return lambda a, b: (product(a, b, dims).astype(jnp.float32) ** 2).sum()

    with numerics(mp.Precision(compute="bfloat16", reduce="float32"), None):
        actual = jax.jit(jax.value_and_grad(scalar(dot_general), argnums=(0, 1)))(lhs, rhs)
        assert "preferred_element_type=float32" in str(jax.make_jaxpr(jax.grad(scalar(dot_general), 1))(lhs, rhs))
    expected = jax.jit(jax.value_and_grad(scalar(lax.dot_general), argnums=(0, 1)))(lhs, rhs)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        # Both products accumulate in float32 and round once to bfloat16's 8 bits.
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-7)


def test_dot_general_is_plain_if_dtypes_agree():
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
def test_default_reduction_is_at_least_float32(precision, compute, expected):
    assert precision.reduce_dtype(jnp.dtype(compute)) == jnp.dtype(expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_of_a_convolution(groups):
    def convolve(x, kernel):
        dims = "NHWC", "HWIO", "NHWC"
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups)

    shapes = (2, 8, 8, 4), (3, 3, 4 // groups, 6)
    ((flops, _),) = products(jax.make_jaxpr(convolve)(*map(jnp.zeros, shapes)))
    assert flops == 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4 // groups)


@pytest.mark.parametrize("field", ["params", "compute", "reduce"])
def test_unknown_dtypes(field):
    with raises("unknown-choice", "Precision"):
        mp.Precision(**{field: "bflot16"})


# ---- Rematerialization -----------------------------------------------------------------------------------------------

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


def test_only_dtypes_of_precision_rules_are_meant():
    x = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(jnp.matmul)(x, x).jaxpr
    assert [high_precision_ops(jaxpr, "bfloat16", meant) is None for meant in ((), ("float64",), ("float32",))] == [
        False, False, True,
    ]  # fmt: skip


def test_precision_must_be_a_precision():
    model = mp.from_functions(lambda key: {"w": jnp.ones(8)}, lambda params, x: params["w"] * x)
    options = {"mesh": mp.MeshSpec().abstract(1), "strategy": mp.ddp()}
    for where, make in (
        ("train_step", lambda value: mp.train_step(mp.models.next_token_loss, precision=value)),
        ("eval_step", lambda value: mp.eval_step(mp.models.next_token_loss, precision=value)),
        ("init_state", lambda value: mp.abstract_state(model, optax.sgd(1e-3), precision=value, **options)),
    ):
        with raises("wrong-type", where) as error:
            make("float32")
        assert error.value.fix == 'write mp.Precision(compute="float32")'
        with raises("wrong-type", where):
            make({})


def test_remat_policies_change_memory_but_not_the_step():
    (w, loss), plain_bytes = deep_step(None)
    saved_bytes = {}
    for policy in REMAT_POLICIES:
        (w_remat, loss_remat), saved_bytes[policy] = deep_step(policy)
        np.testing.assert_allclose(loss_remat, loss, rtol=1e-6)
        np.testing.assert_allclose(w_remat, w, atol=1e-6)
    activation_bytes = LAYERS * ROWS * WIDTH * 4
    assert saved_bytes["full"] + activation_bytes <= saved_bytes["dots"] <= plain_bytes


# ---- Models that compute in a higher precision -----------------------------------------------------------------------

BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


class Net(nn.Module):
    dtype: str | None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, dtype=self.dtype)(nn.gelu(nn.Dense(64, dtype=self.dtype)(x)))


@pytest.mark.parametrize(
    ("dtype", "inputs", "is_reported"),
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
def test_casts_to_float32_are_reported(dtype, inputs, is_reported):
    def loss_fn(model, batch, key):
        x = batch.astype(inputs)
        return ((model(x) - x).astype(jnp.float32) ** 2).mean(), {}

    mesh = mp.MeshSpec(data=8).build()
    model = mp.from_linen(Net(dtype), BATCH)
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    step = mp.train_step(loss_fn, precision=mp.Precision(compute="bfloat16"))
    findings = [f for f in mp.explain(step, state, BATCH).findings if f.rule == "wide-compute"]
    assert bool(findings) == is_reported
    num_warnings = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = step(state, BATCH)
            num_warnings.append(len(caught))
    assert num_warnings == [is_reported, is_reported]  # only in the first step
    if is_reported:
        assert "100% of the matmul FLOPs are in float32" in str(caught[0].message)
        assert "Precision(compute=" not in findings[0].fix
        assert "build the model's modules with dtype=bfloat16" in str(caught[0].message)
