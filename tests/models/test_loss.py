"""The loss, against optax, and that the vocabulary stays split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.compiled.census import census
from meshpar.compiled.hlo import parse
from meshpar.models import next_token_loss
from meshpar.models.loss import cross_entropy


@pytest.fixture
def logits_and_targets():
    logits = 4 * jax.random.normal(jax.random.key(0), (8, 6, 16))
    return logits, jax.random.randint(jax.random.key(1), (8, 6), 0, 16)


def test_cross_entropy_is_optax_s(logits_and_targets):
    logits, targets = logits_and_targets
    nats, best = cross_entropy(logits, targets)
    np.testing.assert_allclose(nats, optax.softmax_cross_entropy_with_integer_labels(logits, targets), rtol=1e-5)
    np.testing.assert_array_equal(best, logits.argmax(-1) == targets)
    assert best.any()
    assert not best.all()


def test_gradient_is_softmax_less_one_hot(logits_and_targets):
    logits, targets = logits_and_targets
    gradient = jax.grad(lambda logits: cross_entropy(logits, targets)[0].sum())(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - jax.nn.one_hot(targets, 16), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_loss_of_narrow_logits_is_float32(logits_and_targets, dtype):
    logits, targets = logits_and_targets
    narrow = logits.astype(dtype)
    loss, metrics = next_token_loss(lambda _: narrow, {"inputs": targets, "targets": targets}, jax.random.key(0))
    assert loss.dtype == metrics["accuracy"].dtype == jnp.float32
    exact = optax.softmax_cross_entropy_with_integer_labels(narrow.astype(jnp.float32), targets).mean()
    np.testing.assert_allclose(loss, exact, rtol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[[1e30, 0.0, -1e30]]])
    nats, _ = cross_entropy(logits, jnp.array([[1]]))
    np.testing.assert_allclose(nats, 1e30)
    assert np.isfinite(jax.grad(lambda x: cross_entropy(x, jnp.array([[1]]))[0].sum())(logits)).all()


def test_loss_and_accuracy_are_means(logits_and_targets):
    logits, targets = logits_and_targets
    batch = {"inputs": targets, "targets": targets}
    loss, metrics = next_token_loss(lambda _: logits, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, cross_entropy(logits, targets)[0].mean())
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(-1) == targets).mean())


def test_devices_exchange_three_numbers_a_token(mesh8, logits_and_targets):
    logits, targets = logits_and_targets
    by_vocab = NamedSharding(mesh8, PartitionSpec("fsdp", None, "tensor"))
    by_row = NamedSharding(mesh8, PartitionSpec("fsdp"))

    def loss_and_gradient(logits, targets):
        def loss(logits):
            return next_token_loss(lambda _: logits, {"inputs": targets, "targets": targets}, jax.random.key(0))

        return jax.value_and_grad(loss, has_aux=True)(logits)

    jitted = jax.jit(loss_and_gradient, in_shardings=(by_vocab, by_row), out_shardings=(None, by_vocab))
    compiled = jitted.lower(logits, targets).compile()
    found = [c for c in census(parse(compiled.as_text()), mesh8) if "tensor" in c.axes]
    tokens_per_device = 8 // 4 * 6
    assert {c.kind for c in found} == {"all-reduce"}
    # Maximum, sum of exponentials and the target's logit, in float32.
    assert sum(c.payload_bytes for c in found) == 3 * tokens_per_device * 4
    (loss, _), gradient = compiled(jax.device_put(logits, by_vocab), jax.device_put(targets, by_row))
    np.testing.assert_allclose(loss, cross_entropy(logits, targets)[0].mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, (jax.nn.softmax(logits) - jax.nn.one_hot(targets, 16)) / 48, atol=1e-7)
