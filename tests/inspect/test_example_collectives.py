"""explain expects the collectives of a contrastive loss, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.inspect import example_collectives
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.training.independence import examined

ROWS, WIDTH = 128, 48


def init(key):
    image, text = jax.random.split(key)
    return {"image": jax.random.normal(image, (16, WIDTH)), "text": jax.random.normal(text, (16, WIDTH))}


def apply(params, images, texts):
    return images @ params["image"], texts @ params["text"]


def clip_loss(model, batch, key):
    """Contrastive loss of Radford et al. 2021, figure 3."""
    images, texts = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in model(batch["images"], batch["texts"]))
    logits = images @ texts.T
    nats = optax.softmax_cross_entropy_with_integer_labels
    labels = jnp.arange(len(logits))
    return (nats(logits, labels).mean() + nats(logits.T, labels).mean()) / 2, {}


NAMES = {"image": ("embed", "mlp"), "text": ("embed", "mlp")}
BATCH = {name: jax.ShapeDtypeStruct((ROWS, 16), np.float32) for name in ("images", "texts")}


def abstract(strategy, *, model=None, on_devices=True, **axes):
    spec = mp.MeshSpec(**axes)
    mesh = spec.build(jax.devices()[: int(np.prod(list(axes.values())))]) if on_devices else spec.abstract(8)
    return mp.abstract_state(
        model or mp.from_functions(init, apply, names=NAMES), optax.sgd(0.1), mesh=mesh, strategy=strategy
    )


def test_explain_contrastive_loss_has_no_unexpected_collectives():
    report = mp.explain(mp.train_step(clip_loss), abstract(mp.ddp(), data=8), BATCH)
    assert report.is_as_expected
    found = {line.kind: line.actual_count for line in report.matching.matched if line.role == example_collectives.ROLE}
    assert found["all-gather"] == 1


@pytest.mark.pod
@pytest.mark.parametrize(
    ("strategy", "axes"),
    [(mp.fsdp(min_bytes=0), {"fsdp": 8}), (mp.hsdp(min_bytes=0), {"data": 2, "fsdp": 4})],
    ids=["fsdp", "hsdp"],
)
def test_explain_contrastive_loss_on_h100(strategy, axes):
    state = abstract(strategy, on_devices=False, **axes)
    report = mp.explain(mp.train_step(clip_loss), state, BATCH, "h100:1x8")
    assert report.is_as_expected, report.matching.unexpected


def test_explain_reports_other_gathers_of_a_contrastive_model():
    def with_stray_gather(params, images, texts):
        replicated = mp.constrain(jnp.tanh(images), None, None)
        return images @ params["image"] + (replicated @ params["image"]).max(0), texts @ params["text"]

    state = abstract(mp.ddp(), model=mp.from_functions(init, with_stray_gather, names=NAMES), data=8)
    report = mp.explain(mp.train_step(clip_loss), state, BATCH)
    assert [one.kind for one in report.matching.unexpected] == ["all-gather"]


def test_attention_of_a_square_batch_combines_no_examples():
    """As many tokens as examples: the scores of attention have the sizes of a product of pairs."""
    config = TransformerConfig(
        vocab_size=32, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
    )
    state = abstract(mp.ddp(), model=config.build(), data=8)
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss)
    examination = examined(step.loss_fn, step.options, state, batch)
    assert examination.combined is None
    assert not list(example_collectives.expected(examination, 16, step.describe(state, batch)))


def test_equal_combinations_are_counted_separately():
    state, step = abstract(mp.ddp(), data=8), mp.train_step(two_towers)
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.float32) for name in BATCH}
    once = examined(step.loss_fn, step.options, state, batch)
    execution, counts = step.describe(state, batch), []
    for examination in (once, once._replace(combinations=once.combinations * 2)):
        expected = example_collectives.expected(examination, 16, execution)
        counts.append({(line.kind, line.elements): line.count[1] for line in expected})
    assert counts[0]["gather", 16] == 4
    assert counts[1] == {key: 2 * count for key, count in counts[0].items()}


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm, self.down = (
            nnx.Linear(16, 24, rngs=rngs),
            nnx.BatchNorm(24, rngs=rngs),
            nnx.Linear(24, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def two_towers(model, batch, key):
    images, texts = model(batch["images"], batch["texts"])
    scores = images @ texts.T
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores)))
    return mp.MeanLoss(losses.sum(), losses.size), {}


def of_batch_norm(model, batch, key):
    return mp.MeanLoss((model(batch["images"]) ** 2).sum(), len(batch["images"])), {}


def of_correlation(model, batch, key):
    """Redundancy reduction of Zbontar et al. 2021, Barlow Twins, section 2.1."""
    left, right = (x - x.mean(0) for x in model(batch["images"], batch["texts"]))
    return mp.SumLoss(((left.T @ right / len(left) - jnp.eye(left.shape[1])) ** 2).sum()), {}


@pytest.mark.parametrize("loss", [two_towers, of_batch_norm, of_correlation])
@pytest.mark.parametrize("strategy", [mp.ddp(), pytest.param(mp.fsdp(min_bytes=0), marks=pytest.mark.matrix)], ids=str)
def test_explain_expects_the_collectives_of_the_global_batch(loss, strategy):
    model = mp.from_nnx(Normalized) if loss is of_batch_norm else None
    state = abstract(strategy, model=model, **{"data" if strategy == mp.ddp() else "fsdp": 8})
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.float32) for name in BATCH}
    report = mp.explain(mp.train_step(loss), state, batch)
    assert report.is_as_expected, report.matching
    assert any(line.role == example_collectives.ROLE for line in report.matching.matched)
