"""Training steps of decoders on a mesh and on a single device, from equal initial states."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.nnx import bridge

import meshpar as mp
from meshpar.layers.losses import scalar
from meshpar.models import Transformer, TransformerConfig, next_token_loss
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.state import TrainState, make_setup
from tests.linen_decoder import linen_model

VOCAB = 32
SIZES = {
    "vocab_size": VOCAB, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "mlp_dim": 32, "param_dtype": "float64",
}  # fmt: skip


class Trained(NamedTuple):
    """The result of a training run, on the host."""

    start: TrainState
    metrics: list[dict[str, np.ndarray]]
    params: dict[str, np.ndarray]
    extra: dict[str, np.ndarray]

    @property
    def losses(self) -> list[np.ndarray]:
        return [one["loss"] for one in self.metrics]


def mesh_of(spec: mp.MeshSpec) -> jax.sharding.Mesh:
    """Return the mesh on the first devices."""
    return spec.build(jax.devices()[: math.prod(spec.values())])


def linen_decoder(cfg: TransformerConfig) -> nn.Module:
    """Return the decoder as a Linen module."""
    return bridge.to_linen(Transformer, cfg)


def model_of(framework: str, cfg: TransformerConfig, rows: int, seq: int) -> Model:
    decoder = cfg.build()
    if framework == "nnx":
        return decoder
    if framework == "functions":
        return mp.from_functions(
            lambda key: decoder.init(jax.random.key_data(key)).params,
            lambda params, *args, **more: decoder.bind(params, {})(*args, **more),
            names=decoder.names(),
        )
    if framework == "linen modules":
        return linen_model(cfg, rows, seq)
    return mp.from_linen(linen_decoder(cfg), jax.ShapeDtypeStruct((rows, seq), np.int32))


def token_batches(rows: int, seq: int, steps: int, vocab: int = VOCAB) -> list[dict[str, np.ndarray]]:
    """Draw batches of random tokens whose targets have unequal weights."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab, (rows, seq + 1), dtype=np.int32) for _ in range(steps)]
    # Examples with different numbers of counted tokens, some with none, and tokens that count up to three times.
    counted = [np.arange(seq) < rng.integers(0, seq + 1, (rows, 1)) for _ in range(steps)]
    weights = [(rng.integers(1, 4, (rows, seq)) * where).astype(np.int32) for where in counted]
    return [{"inputs": t[:, :-1], "targets": t[:, 1:], "weights": w} for t, w in zip(tokens, weights, strict=True)]


def mean_loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean of `next_token_loss` as a scalar, and its metrics."""
    loss, metrics = next_token_loss(model, batch, jax.random.key(0))
    return scalar(loss), metrics


def train(
    model: Model, batches: list[dict[str, Any]], spec: mp.MeshSpec, strategy: Any,
    *, start: TrainState | None = None, params: Any = None, loss: Any = next_token_loss, tx: Any = None,
    trainable: Any = None, **options: Any,
) -> Trained:  # fmt: skip
    """Run a step of Adam (or `tx`) for each batch, from a state `start`, from `params`, or from random parameters."""
    # A tenth of Adam's usual epsilon would let it divide rounding noise by rounding noise where a gradient is zero.
    tx = tx or optax.adam(1e-2, eps=1e-6)
    setup = make_setup(model, tx, mesh=mesh_of(spec), strategy=strategy, trainable=trainable)
    state = setup.init(0) if start is None else jax.device_put(start.replace(setup=setup), setup.shardings)
    state = state if params is None else mp.load_params(state, params)
    start, step, metrics = jax.device_get(state), mp.train_step(loss, **options), []
    for batch in batches:
        state, found = step(state, batch)
        metrics.append(jax.tree.map(np.asarray, found))
    params, extra = (dict(tree_leaves_with_paths(jax.device_get(tree))) for tree in (state.params, state.extra))
    return Trained(start, metrics, params, extra)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, atol: float) -> None:
    """Check that paths and dtypes are equal, and values to `atol`."""
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert x.dtype == expected[path].dtype, path
        np.testing.assert_allclose(x, expected[path], rtol=0, atol=atol, err_msg=path)


ROWS, SEQ, STEPS = 16, 8, 2


@functools.cache
def _on_one_device(framework: str, fields: tuple[tuple[str, Any], ...], same: tuple[tuple[str, Any], ...]) -> Trained:
    model = model_of(framework, TransformerConfig(**{**SIZES, **dict(fields)}), ROWS, SEQ)
    return train(model, token_batches(ROWS, SEQ, STEPS), mp.MeshSpec(), mp.ddp(), **dict(same))


def equals_one_device(
    spec: mp.MeshSpec, strategy: Strategy, *, framework: str = "nnx", fields: Any = (), same: Any = (),
    atol: float = 1e-9, **options: Any,
) -> tuple[Trained, Trained]:  # fmt: skip
    """Compare metrics, parameters and variables of a decoder trained in float64 on a mesh and on a single device.

    Args:
      spec, strategy, options: of the run on the mesh.
      framework: "nnx", "linen" (NNX modules in a Linen module), "linen modules" or "functions".
      fields: of `TransformerConfig`, in addition to `SIZES`.
      same: options of both runs.
      atol: tolerance of parameters, and relative tolerance of metrics.

    Returns:
      The runs on the mesh and on one device.
    """
    fields, same = tuple(dict(fields).items()), tuple(dict(same).items())
    with jax.enable_x64(True):
        expected = _on_one_device(framework, fields, same)
        model = model_of(framework, TransformerConfig(**{**SIZES, **dict(fields)}), ROWS, SEQ)
        batches = token_batches(ROWS, SEQ, STEPS)
        actual = train(model, batches, spec, strategy, start=expected.start, **{**dict(same), **options})
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            # The shape of rank_load depends on the mesh. The entropy is a mean over microbatches, which have different
            # numbers of tokens without padding.
            if name != "moe/rank_load" and not (name == "moe/router_entropy" and strategy.pipeline is not None):
                np.testing.assert_allclose(metrics[name], value, rtol=atol, atol=1e-12, err_msg=name)
    assert_same(actual.params, expected.params, atol=atol)
    assert_same(actual.extra, expected.extra, atol=atol)
    return actual, expected
