"""The loss, against optax, and that the vocabulary stays split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.inspect.census import census
from meshpar.inspect.hlo.parser import parse
from meshpar.layers.token_mask import mask_for, masking
from meshpar.models import next_token_loss
from meshpar.models.token_loss import IGNORE_TARGET, cross_entropy, token_mask
from tests.equal import mean_loss
from tests.errors import raises

by_optax = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
loss_of = jax.jit(
    lambda logits, targets: next_token_loss(lambda _: logits, {"inputs": targets, "targets": targets}, None)
)


@pytest.fixture
def logits_and_targets():
    rng = np.random.default_rng(0)
    logits = 4 * rng.normal(size=(8, 6, 16)).astype(np.float32)
    # Every third is the likeliest.
    return logits, np.where(np.arange(6) % 3, rng.integers(0, 16, (8, 6)), logits.argmax(-1)).astype(np.int32)


def slope_by_hand(logits, targets):
    """Softmax less one-hot."""
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True) - np.eye(16)[targets]


def test_cross_entropy_is_optax_s(logits_and_targets):
    logits, targets = logits_and_targets
    nats, best, _ = jax.jit(cross_entropy)(logits, targets)
    np.testing.assert_allclose(nats, by_optax(logits, targets), rtol=1e-5)
    np.testing.assert_array_equal(best, logits.argmax(-1) == targets)
    assert best.any()
    assert not best.all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_loss_and_accuracy_are_float32(logits_and_targets, dtype):
    logits, targets = logits_and_targets
    logits = logits.astype(dtype)
    loss, metrics = loss_of(logits, targets)
    assert loss.total.dtype == metrics["accuracy"].dtype == jnp.float32
    np.testing.assert_allclose(loss.total, np.sum(by_optax(logits.astype(np.float32), targets)), rtol=1e-6)
    assert int(loss.weight) == targets.size
    is_best = np.take_along_axis(logits, targets[..., None], -1)[..., 0] == logits.max(-1)
    np.testing.assert_allclose(metrics["accuracy"], is_best.mean(), rtol=1e-6)


def test_large_logits_stay_finite():
    logits, targets = np.float32([[[1e30, 0.0, -1e30]]]), np.int32([[1]])
    nats, slope = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, targets)[0].sum()))(logits)
    np.testing.assert_allclose(nats, 1e30)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("weights", [None, np.int32, np.float32])
def test_loss_ignores_targets_of_minus_100(logits_and_targets, weights):
    logits, targets = logits_and_targets
    is_counted = np.arange(6) % 4 != 1
    ignored = {"inputs": targets, "targets": np.where(is_counted, targets, -100)}
    batch = {"inputs": targets, "targets": targets, "weights": np.broadcast_to(is_counted, targets.shape).astype(int)}
    if weights is not None:
        ignored["weights"] = (targets % 3).astype(weights)
        batch["weights"] = batch["weights"] * ignored["weights"]

    def loss(logits, batch):
        loss, metrics = next_token_loss(lambda _: logits, batch, None, z_loss=0.1)
        return loss.total / loss.weight, (loss.weight, metrics)

    (found, rest), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits, ignored)
    (wanted, wanted_rest), wanted_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (found, rest), (wanted, wanted_rest))
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-8)
    assert (np.asarray(gradient)[:, ~is_counted] == 0).all()
    assert rest[0].dtype == (np.float32 if weights is np.float32 else np.int32)


@pytest.mark.parametrize("target", [-1, 16, -101])
def test_loss_of_a_target_outside_the_vocabulary_is_nan(logits_and_targets, target):
    logits, targets = logits_and_targets
    targets = np.where(np.arange(48).reshape(8, 6) == 7, target, targets)
    loss, metrics = loss_of(logits, targets)
    assert np.isnan(loss.total)
    assert np.isfinite(metrics["accuracy"])


def test_loss_without_counted_targets_has_weight_zero(logits_and_targets):
    logits, targets = logits_and_targets
    loss, metrics = loss_of(logits, np.full_like(targets, -100))
    assert (float(loss.total), int(loss.weight), float(metrics["accuracy"])) == (0, 0, 0)


def test_devices_exchange_three_numbers_a_token(mesh8, logits_and_targets):
    logits, targets = logits_and_targets
    by_vocab = NamedSharding(mesh8, PartitionSpec("fsdp", None, "tensor"))
    by_row = NamedSharding(mesh8, PartitionSpec("fsdp"))

    def loss_and_gradient(logits, targets):
        def loss(logits):
            return mean_loss(lambda _: logits, {"inputs": targets, "targets": targets})

        return jax.value_and_grad(loss, has_aux=True)(logits)

    jitted = jax.jit(loss_and_gradient, in_shardings=(by_vocab, by_row), out_shardings=(None, by_vocab))
    compiled = jitted.lower(logits, targets).compile()
    found = [c for c in census(parse(compiled.as_text()), mesh8) if "tensor" in c.axes]
    tokens_per_device = 8 // 4 * 6
    assert {c.kind for c in found} == {"all-reduce"}
    # Maximum, sum of exponentials and the target's logit, in float32.
    assert sum(c.payload_bytes for c in found) == 3 * tokens_per_device * 4
    (loss, _), gradient = compiled(jax.device_put(logits, by_vocab), jax.device_put(targets, by_row))
    np.testing.assert_allclose(loss, np.mean(by_optax(logits, targets)), rtol=1e-6)
    np.testing.assert_allclose(gradient, slope_by_hand(logits, targets) / 48, atol=1e-7)


def test_token_mask():
    """Padding is segment 0 without weight, or the end of a row without weight."""
    targets, weights = np.full((3, 5), 4), np.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 2]])
    is_counted = [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert token_mask({"targets": targets, "weights": weights}).astype(int).tolist() == is_counted
    ignored = np.where(weights, targets, IGNORE_TARGET)
    assert token_mask({"targets": ignored}).astype(int).tolist() == is_counted
    assert token_mask({"targets": targets}).all()
    batch = {"targets": targets, "weights": weights, "segments": np.array([[1, 1, 2, 2, 0], [0] * 5, [0, 0, 1, 1, 1]])}
    # Prompts have no weight either, so only segment 0 can be padding. In the last row it has a target with weight.
    assert token_mask(batch).astype(int).tolist() == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_mask_of_other_tokens_is_refused():
    with masking(jnp.ones((2, 4), bool)):
        assert mask_for("layer", jnp.zeros((2, 4, 3))).shape == (2, 4)
        for shape in ((4, 2, 3), (1, 8, 3), (1, 4, 3)):
            with raises("wrong-shape", "layer"):
                mask_for("layer", jnp.zeros(shape))
    with masking(jnp.ones((2, 4), bool), is_declared=False):
        assert mask_for("layer", jnp.zeros((4, 2, 3))) is None
