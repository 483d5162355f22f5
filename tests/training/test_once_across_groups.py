"""HSDP with gradient accumulation: gradient shards are reduced across groups once per update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect.pod import PodProcess
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from tests.errors import raises

ACCUMULATE = 4
RNG = np.random.default_rng(0)
BATCH = {name: RNG.integers(0, 64, (32, 16)).astype(np.int32) for name in ("inputs", "targets")}
BATCH["weights"] = (RNG.random((32, 16)) < RNG.random((32, 1))).astype(np.float32)  # micro-steps differ in weight
SHAPES = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "mlp_dim": 64}
DENSE = TransformerConfig(vocab_size=64, **SHAPES)
MOE = TransformerConfig(vocab_size=64, moe=MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=64), **SHAPES)
HSDP = mp.hsdp(min_bytes=0)


class MLP:
    """A model that compiles quickly, with the interface of a decoder's config."""

    @staticmethod
    def build():
        def init(key):
            table, up, down = jax.random.split(key, 3)

            def scaled(key, *shape):
                return jax.random.normal(key, shape) / 8

            return {"table": scaled(table, 64, 32), "up": scaled(up, 32, 256), "down": scaled(down, 256, 64)}

        def apply(params, tokens):
            x = mp.constrain(jax.nn.one_hot(tokens, 64) @ params["table"], "batch", "seq", "act_embed")
            hidden = mp.constrain(jnp.tanh(x @ params["up"]), "batch", "seq", "act_mlp")
            return mp.constrain(hidden @ params["down"], "batch", "seq", "act_vocab")

        names = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
        return mp.from_functions(init, apply, names=names)


def trained(config, axes, strategy, **options):
    """Return loss, gradient norm and parameters after three steps, with the report of the step."""
    mesh = mp.MeshSpec(**axes).build(jax.devices()[: int(np.prod(list(axes.values()), dtype=int))])
    state = mp.init_state(config.build(), optax.adam(1e-2), mesh=mesh, strategy=strategy, key=0)
    step = mp.train_step(next_token_loss, **options)
    report = mp.explain(step, state, BATCH)
    for _ in range(3):
        state, metrics = step(state, BATCH)
    return float(metrics["loss"]), float(metrics["grad_norm"]), jax.device_get(state.params), report


def bytes_over(report, axis):
    return sum(sent.collective.bytes_sent_per_step for sent in report.collectives if axis in sent.collective.axes)


CASES = {
    "mlp": (MLP, {"data": 2, "fsdp": 4}, HSDP),
    "decoder": (DENSE, {"data": 2, "fsdp": 4}, HSDP),
    "four groups": (DENSE, {"data": 4, "fsdp": 2}, HSDP),
    "tensor": (DENSE, {"data": 2, "fsdp": 2, "tensor": 2}, HSDP | mp.tensor_parallel(sequence=True)),
    "experts": (MOE, {"data": 2, "fsdp": 2, "expert": 2}, HSDP | mp.expert_parallel()),
    "context": (DENSE, {"data": 2, "fsdp": 2, "context": 2}, HSDP | mp.context_parallel()),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n != "mlp")) for n in CASES])
def test_once_across_groups_equals_one_device(name):
    config, axes, strategy = CASES[name]
    loss, norm, params, report = trained(
        config, axes, strategy, accumulate=ACCUMULATE, reduce_gradients="once_across_groups"
    )
    expected_loss, expected_norm, expected_params, _ = trained(config, {}, mp.ddp(), accumulate=ACCUMULATE)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    # Adam divides gradients by their size, which amplifies differences of single elements.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4), params, expected_params)
    assert report.is_as_expected
    assert not report.matching.missing


def test_once_across_groups_sends_shards_once():
    each, default = (
        trained(MLP, {"data": 2, "fsdp": 4}, HSDP, accumulate=ACCUMULATE, reduce_gradients=mode)[-1]
        for mode in ("each_microbatch", None)
    )
    num_params = sum(x.size for x in jax.tree.leaves(MLP.build().abstract().params))
    # A ring of two groups sends each element of the float32 shards once, and a few scalars for the metrics.
    assert bytes_over(default, "data") == pytest.approx(4 * num_params / 4, rel=0.02)
    assert bytes_over(each, "data") == pytest.approx(ACCUMULATE * bytes_over(default, "data"), rel=0.05)
    assert default.memory.temporaries_bytes < 1.1 * each.memory.temporaries_bytes
    assert any("once_across_groups" in note for note in each.notes)
    assert not any("once_across_groups" in note for note in default.notes)


def quadratic(model, batch, key):
    errors = (model(batch["x"]) - batch["x"]) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


def test_once_across_groups_requires_sharded_parameters():
    for strategy in (mp.ddp(), mp.zero2(min_bytes=0)):
        mesh = mp.MeshSpec(data=2, fsdp=4).build()
        state = mp.abstract_state(DENSE.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy)
        step = mp.train_step(next_token_loss, accumulate=2, reduce_gradients="once_across_groups")
        with raises("conflict", strategy.label):
            step.trace(state, BATCH)


def test_hsdp_with_batch_statistics_reduces_in_each_microbatch():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    mesh, model = mp.MeshSpec(data=2, fsdp=4).build(), mp.from_nnx(lambda rngs: Model(rngs))
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=HSDP, key=0)
    batch = {"x": RNG.normal(size=(16, 8)).astype(np.float32)}
    _, metrics = mp.train_step(quadratic, accumulate=2, loss_is="sum_over_parts")(state, batch)
    assert np.isfinite(metrics["loss"])
    step = mp.train_step(quadratic, accumulate=2, reduce_gradients="once_across_groups")
    with raises("unsupported-feature", "batch statistics"):
        step.trace(state.setup.abstract, batch)


@pytest.mark.pod
def test_once_across_groups_on_h100():
    mesh = mp.MeshSpec(data=2, fsdp=8).abstract()
    config = TransformerConfig(
        vocab_size=8192, num_layers=4, embed_dim=1024, num_heads=8, num_kv_heads=8, head_dim=128, mlp_dim=2048
    )
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.hsdp())
    batch = {name: jax.ShapeDtypeStruct((64, 512), np.int32) for name in ("inputs", "targets")}
    reports = {}
    with PodProcess() as pod:
        for mode in ("each_microbatch", None, "once"):
            precision = mp.Precision(compute="bfloat16")
            step = mp.train_step(next_token_loss, accumulate=4, reduce_gradients=mode, precision=precision)
            report = mp.explain(step, state, batch, "h100:2x8", pod=pod)
            reports[mode] = report
    for mode in ("each_microbatch", None):
        assert reports[mode].is_as_expected
        assert not reports[mode].matching.missing
    assert bytes_over(reports[None], "data") == pytest.approx(4 * state.num_params / 8, rel=0.02)
    temporaries = {mode: report.memory.temporaries_bytes for mode, report in reports.items()}
    assert temporaries[None] < 1.1 * temporaries["each_microbatch"]
    assert temporaries["once"] > temporaries[None] + 4 * state.num_params / 2  # unsharded gradients
    assert bytes_over(reports["each_microbatch"], "data") > 3.5 * bytes_over(reports[None], "data")
