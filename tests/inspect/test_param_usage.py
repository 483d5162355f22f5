"""Models without logical names: parameter usage from their trace, and what `explain` cannot determine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import meshpar as mp
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.param_usage import uses
from meshpar.parallel.execution import ParamUsage
from meshpar.training.state import abstract_state

VOCAB, WIDTH, ROWS, SEQ = 64, 32, 16, 4
TOKENS = np.zeros((ROWS, SEQ), np.int32)


class Block(nn.Module):
    rolls: bool

    @nn.compact
    def __call__(self, x):
        if self.rolls:
            x = jnp.roll(x, 1, axis=0)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x)))


class Tied(nn.Module):
    """No logical names, a tied embedding table, convolution taps used separately, and an untrained bias."""

    rolls: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, name="table")
        taps = self.param("taps", nn.initializers.normal(), (2, WIDTH))
        frozen = self.param("frozen", nn.initializers.ones, (WIDTH,))
        x = table(tokens) + jax.lax.stop_gradient(frozen)
        x = x * taps[0] + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * taps[1]
        for at in range(2):
            x = Block(self.rolls, name=f"h_{at}")(x)
        return table.attend(x)


def _report(rolls=False, paths=None):
    mesh = (mp.MeshSpec(fsdp=4, tensor=2) if paths else mp.MeshSpec(fsdp=8)).build()
    strategy = mp.fsdp(min_bytes=0) | mp.Rules(paths=paths)
    state = abstract_state(mp.from_linen(Tied(rolls), TOKENS), optax.sgd(0.1), mesh=mesh, strategy=strategy)

    def loss(model, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch).mean(), {}

    return mp.explain(mp.train_step(loss), state, TOKENS)


def test_uses_counts_full_and_sliced_uses():
    def loss(params, tokens):
        x = jax.jit(lambda table: table.astype(jnp.bfloat16).astype(jnp.float32)[tokens])(params["table"])
        x = jax.lax.scan(lambda x, _: (x @ params["layer"] + params["table"][tokens], None), x, length=3)[0]
        x = x @ params["table"].T.astype(x.dtype)
        return (x * params["taps"][0] + x * params["taps"][1] + jax.lax.stop_gradient(params["bias"])).sum()

    like = {"bias": (8,), "layer": (4, 4), "table": (8, 4), "taps": (2, 8)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in like.items()}
    jaxpr = jax.make_jaxpr(loss)(params, np.zeros((2, 3), np.int32)).jaxpr
    assert uses(jaxpr, 4) == (ParamUsage(0), ParamUsage(3), ParamUsage(5, rows=4 * 6), ParamUsage(0, ((8, 2),)))


def test_model_without_names_has_no_unexpected_collectives():
    report = _report()
    assert report.is_as_expected, str(report)
    assert not report.matching.missing, str(report)
    assert not report.matching.unannotated_axes


def test_axes_named_by_paths_only_are_not_expected():
    report = _report(paths={r"h_.*/up/kernel": ("fsdp", "tensor"), r"h_.*/down/kernel": ("tensor", "fsdp")})
    assert report.is_as_expected, str(report)
    assert report.matching.unannotated_axes == ("tensor",)
    assert any("all-reduce" in line.kind and line.axes == ("tensor",) for line in report.matching.unjudged)
    assert "over `tensor` cannot be checked" in str(report)
    assert "add mp.tensor_parallel()" in str(report)


@pytest.mark.call_stacks
def test_equal_layers_share_a_line():
    found = _report(rolls=True).matching.unexpected
    rolled = [one for one in found if one.kind == "collective-permute"]
    assert {(one.module, one.layers) for one in rolled} == {("gradients/Tied/h_*", 2)}


def test_merge_layers_merges_paths():
    layers = ["transformer/h/0/attn/block_1", "transformer/h/1/attn/block_1"]
    assert {scopes.layerless(path) for path in layers} == {"transformer/h/*/attn/block_*"}
    assert scopes.merge_layers(layers) == "transformer/h/*/attn/block_1"
    assert scopes.layerless("fc1/conv2d") == "fc1/conv2d"
