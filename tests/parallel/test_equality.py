"""Sharded equals single-device: five Adam steps of a decoder under every strategy, for NNX and for Linen.

Float64 shows that the mathematics is the same: losses and every parameter to 1e-9, though sums over devices are taken
in another order. Float32 is what people run: losses to 1e-5.
"""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import LinenTransformer, TransformerConfig, next_token_loss
from meshpar.sharding.types import tree_leaves_with_paths
from tests.grid import cases

ROWS, SEQ, VOCAB, STEPS = 16, 8, 32, 5

CASES = {
    "ddp": (mp.MeshSpec(data=8), mp.ddp(), {}),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(), {}),
    "zero2": (mp.MeshSpec(fsdp=8), mp.zero2(), {}),
    "zero3": (mp.MeshSpec(fsdp=8), mp.zero3(), {}),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), {}),
    "tensor": (mp.MeshSpec(data=4, tensor=2), mp.tensor_parallel(), {}),
    "tensor+sequence": (mp.MeshSpec(data=4, tensor=2), mp.tensor_parallel(sequence=True), {}),
    "fsdp|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {}),
    "fsdp|tensor+sequence": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    "hsdp|tensor": (mp.MeshSpec(data=2, fsdp=2, tensor=2), mp.hsdp() | mp.tensor_parallel(), {}),
    "zero1|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.zero1() | mp.tensor_parallel(), {}),
    "fsdp|tensor|accumulate": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {"accumulate": 2}),
    "fsdp|tensor|accumulate once": (
        mp.MeshSpec(fsdp=4, tensor=2),
        mp.fsdp() | mp.tensor_parallel(),
        {"accumulate": 2, "accumulate_mode": "once"},
    ),
    "zero2|accumulate": (mp.MeshSpec(fsdp=8), mp.zero2(), {"accumulate": 2}),
    # Keys have two heads, for four ranks.
    "fsdp|context by heads": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel(kind="all-to-all"), {}),
    "fsdp|remat": (mp.MeshSpec(fsdp=8), mp.fsdp(), {"remat": "full"}),
}


def make_model(framework: str, dtype: str) -> mp.Model:
    cfg = TransformerConfig(
        vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32,
        param_dtype=dtype,
    )  # fmt: skip
    if framework == "nnx":
        return cfg.build()
    return mp.from_linen(LinenTransformer(cfg), jax.ShapeDtypeStruct((ROWS, SEQ), np.int32))


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32) for _ in range(STEPS)]
    return [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


def five_steps(framework, dtype, spec, strategy, options):
    """Losses of the steps, and the parameters after them, on the host."""
    devices = jax.devices()[: int(np.prod(list(spec.values())))]
    # A tenth of Adam's usual epsilon would let it divide rounding noise by rounding noise where a gradient is zero.
    tx = optax.adam(1e-2, eps=1e-6)
    model = make_model(framework, dtype)
    state = mp.init_state(model, tx, mesh=spec.build(devices), strategy=strategy, key=0)
    step = mp.train_step(next_token_loss, **options)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, dict(tree_leaves_with_paths(jax.device_get(state.params)))


@functools.cache
def single_device(framework, dtype):
    return five_steps(framework, dtype, mp.MeshSpec(), mp.ddp(), {})


SPARED = [("linen", case) for case in ("zero2", "tensor", "tensor+sequence", "fsdp|tensor", "hsdp", "zero2|accumulate")]
"""What the others hold already: Linen's decoder differs from the other in its leaves, not in the step."""


@pytest.mark.parametrize(
    ("framework", "case"),
    cases(
        ("nnx", "fsdp|tensor|accumulate once"),
        grid=[one for one in itertools.product(("nnx", "linen"), CASES) if one not in SPARED],
    ),
)
def test_float64_losses_and_parameters(framework, case):
    with jax.enable_x64(True):
        losses, params = five_steps(framework, "float64", *CASES[case])
        expected_losses, expected = single_device(framework, "float64")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    assert params.keys() == expected.keys()
    for path, x in params.items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, expected[path], rtol=0, atol=1e-9, err_msg=path)


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_bfloat16_compute_follows_float32(framework):
    """The whole run in bfloat16 compute: 8 bits of mantissa, five steps; the losses agree to a percent."""
    precision = mp.Precision(params="float32", compute="bfloat16")
    spec, strategy, _ = CASES["fsdp|tensor+sequence"]
    losses, params = five_steps(framework, "float32", spec, strategy, {"precision": precision})
    np.testing.assert_allclose(losses, single_device(framework, "float32")[0], rtol=1e-2)
    assert {x.dtype for x in params.values()} == {np.dtype(np.float32)}
