"""Tests of complex parameters: gradients match the same problem in pairs of real numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.layers.precision import check_narrow
from tests.equal import mesh_of
from tests.errors import raises
from tests.grid import cases

DIM, LAYERS, STEPS = 8, 4, 3
DRAW = np.random.default_rng(0)
BATCH = {name: DRAW.normal(size=(16, DIM)).astype(np.float32) for name in ("x", "y")}
ONE = mp.MeshSpec()


def normal(*shape):
    return (DRAW.normal(size=shape) + 1j * DRAW.normal(size=shape)).astype(np.complex64)


PARAMS = {"first": normal(DIM, DIM), "layers": {"w": 0.3 * normal(LAYERS, DIM, DIM)}, "last": normal(DIM, DIM)}


def pairs_of(params):
    return jax.tree.map(lambda x: {"re": x.real, "im": x.imag}, params)


def joined(pairs):
    """The same in complex numbers; complex ones stay."""
    return jax.tree.map(
        lambda x: x["re"] + 1j * x["im"] if isinstance(x, dict) else x,
        pairs,
        is_leaf=lambda x: isinstance(x, dict) and "re" in x,
    )


def layer(x, params):
    h = x @ joined(params)["w"]
    return x + jnp.tanh(h.real) + 1j * jnp.tanh(h.imag)


def apply(params, x):
    x = mp.constrain(x, "batch", None) @ joined(params["first"])
    return mp.scan_layers(layer, x, params["layers"]) @ joined(params["last"])


def model_of(params):
    ends = ("/re", "/im") if isinstance(params["first"], dict) else ("",)
    names = {f"layers/w{end}": ("layers", None, None) for end in ends}
    return mp.from_functions(lambda key: jax.tree.map(jnp.asarray, params), apply, names=names)


def loss_fn(model, batch, key):
    error = jnp.abs(model(batch["x"]) - batch["y"]) ** 2
    return mp.MeanLoss(error.sum(), error.size), {}


SGD = optax.sgd(0.05, momentum=0.9)


def trained(params, tx=SGD, spec=ONE, strategy=None, **options):
    state = mp.init_state(model_of(params), tx, mesh=mesh_of(spec), strategy=strategy or mp.ddp(), key=0)
    step, metrics = mp.train_step(loss_fn, **options), []
    for _ in range(STEPS):
        state, found = step(state, BATCH)
        metrics.append((float(found["loss"]), float(found["grad_norm"])))
    return metrics, jax.device_get(state.params)


@pytest.fixture(scope="module")
def in_pairs():
    return trained(pairs_of(PARAMS))


STAGES = {"stages": 2, "microbatches": 4}
RUNS = {
    "one device": (ONE, mp.ddp(), {}),
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), {"precision": mp.Precision(reduce="bfloat16")}),
    "accumulated": (mp.MeshSpec(fsdp=4), mp.zero1(min_bytes=0), {"accumulate": 2}),
    "once": (mp.MeshSpec(data=4), mp.ddp(), {"accumulate": 2, "reduce_gradients": "once"}),
    "prefetch": (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0, prefetch=1), {}),
    "slices": (mp.MeshSpec(fsdp=4), mp.fsdp(min_bytes=0), {"batch_slices": 2}),
    "1f1b": (mp.MeshSpec(stage=2, data=2), mp.pipeline_parallel(**STAGES) | mp.ddp(), {}),
    "zb-h1": (
        mp.MeshSpec(stage=2, fsdp=2),
        mp.pipeline_parallel(**STAGES, schedule="zb-h1") | mp.fsdp(min_bytes=0),
        {"precision": mp.Precision(reduce="bfloat16")},
    ),
}


@pytest.mark.parametrize("name", cases("zb-h1", next(iter(RUNS)), grid=RUNS))
def test_complex_parameters_train_like_pairs_of_reals(name, in_pairs):
    spec, strategy, options = RUNS[name]
    metrics, params = trained(PARAMS, spec=spec, strategy=strategy, **options)
    np.testing.assert_allclose(metrics, in_pairs[0], rtol=2e-5)  # float32, and losses from 229 to 30
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, joined(in_pairs[1]))
    assert in_pairs[0][-1][0] < in_pairs[0][0][0] / 5


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tx", "of_pairs"),
    [
        # Adam's second moment of a complex number is one real number, that of a pair two.
        (optax.contrib.split_real_and_imaginary(optax.adam(1e-2)), optax.adam(1e-2)),
        (optax.lbfgs(), optax.lbfgs()),
    ],
    ids=["adam", "lbfgs"],
)
def test_other_optimizers_train_as_with_pairs_of_real_numbers(tx, of_pairs):
    metrics, params = trained(PARAMS, tx)
    expected, pairs = trained(pairs_of(PARAMS), of_pairs)
    np.testing.assert_allclose(metrics, expected, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, joined(pairs))


def test_adam_decreases_the_loss():
    metrics, _ = trained(PARAMS, optax.adam(1e-2))
    losses = [loss for loss, _ in metrics]
    assert losses == sorted(losses, reverse=True)


def test_complex_parameters_are_loaded_saved_and_restored(tmp_path):
    arguments = {"mesh": mesh_of(mp.MeshSpec(fsdp=8)), "strategy": mp.fsdp(min_bytes=0)}
    tx = optax.adam(1e-2)
    state = mp.init_state(model_of(PARAMS), tx, key=0, **arguments)
    weights = jax.tree.map(lambda x: 2 * x.astype(np.complex128) / 3, PARAMS)
    state = mp.load_params(state, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.device_get(state.params), weights)
    with raises("not-finite", "load_params"):
        mp.load_params(state, {**weights, "last": weights["last"] + 1j * np.inf})
    with raises("wrong-shape", "load_params"):
        mp.load_params(state, {**weights, "last": weights["last"].real.astype(np.float32)})
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(mp.abstract_state(model_of(PARAMS), tx, **arguments)).state
    jax.tree.map(np.testing.assert_array_equal, restored, state.replace(setup=restored.setup))


def test_quantization_refuses_complex_parameters():
    with raises("wrong-dtype", "parameter `first`"):
        trained(PARAMS, spec=mp.MeshSpec(fsdp=8), strategy=mp.fsdp(min_bytes=0, quantize="int8"))
    with pytest.raises(mp.MeshparError, match="multiply by a weight in complex64"):
        check_narrow("fp8", jnp.complex64)
