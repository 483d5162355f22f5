"""Training steps on a GPU: losses equal those of float32 on the CPU, two runs are equal, and two starts are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.runs.compile_cache import keeping_programs
from tests.gpu.reference import CPU, DEVICE, available, size

STEPS, BATCH, SEQ = 4, 4, size(64, 16)
SIZES = {
    "vocab_size": 256, "num_layers": 3, "embed_dim": size(128, 32), "num_heads": 8, "num_kv_heads": 2,
    "head_dim": size(32, 8), "mlp_dim": size(256, 64),
}  # fmt: skip
MLP_DIM = size(128, 32)
EXPERTS = {
    "mlp_dim": MLP_DIM,
    "moe": MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=MLP_DIM, auxiliary_weight=1e-3),
}
CAPACITY = {
    "mlp_dim": MLP_DIM,
    "moe": MoEConfig(
        routing=Routing(num_experts=8, top_k=2, capacity_factor=1.25), mlp_dim=MLP_DIM, auxiliary_weight=1e-3
    ),
}
LATENT = LatentAttention(q_rank=size(64, 16), kv_rank=size(32, 8), nope_dim=16, rope_dim=16, v_dim=16)
BFLOAT16 = mp.Precision(compute="bfloat16")

ADAM = "adam"
OPTIMIZERS = {
    ADAM: lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2),
    "muon": lambda: mp.muon(1e-2),
    "bfloat16 moments": lambda: mp.optim.low_precision_moments(optax.adamw(1e-2), "bfloat16"),
    "int8 moments": lambda: mp.optim.low_precision_moments(optax.adamw(1e-2), "int8"),
    "offloaded state": lambda: mp.optim.offload_state(optax.adamw(1e-2)),
}


def batch(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, 256, (BATCH, SEQ + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(
    device: jax.Device,
    fields: dict[str, Any],
    optimizer: str = ADAM,
    strategy: mp.parallel.Strategy | None = None,
    **options: Any,
) -> tuple[np.ndarray, Any]:
    """Return the losses and the last state of a few steps on a device. Matmuls of float32 arrays are exact."""
    mesh = jax.sharding.Mesh(np.array([device]), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    strategy = strategy or mp.fsdp(min_bytes=0)
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        model = TransformerConfig(**{**SIZES, **fields}).build()
        state = mp.init_state(model, OPTIMIZERS[optimizer](), mesh=mesh, strategy=strategy, key=0)
        step, losses = mp.train_step(next_token_loss, **options), []
        for index in range(STEPS):
            state, metrics = step(state, batch(index))
            losses.append(float(metrics["loss"]))
    return np.array(losses), state


@functools.cache
def cpu_losses(fields: tuple[tuple[str, Any], ...], optimizer: str) -> np.ndarray:
    return train(CPU, dict(fields), optimizer)[0]


def assert_losses_match_the_cpu(
    fields: dict[str, Any], atol: float, optimizer: str = ADAM, cpu_optimizer: str | None = None, **options: Any
) -> None:
    """Compare with the same model on the CPU, without the options and fields that select an implementation."""
    attention = {"attention": available(fields.get("attention", "blockwise"))}
    actual, _ = train(DEVICE, {**fields, **attention}, optimizer, **options)
    plain = {name: value for name, value in fields.items() if name not in ("vocab_chunk", "unroll")}
    expected = cpu_losses(tuple({**plain, "attention": "xla"}.items()), cpu_optimizer or optimizer)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    assert expected[-1] != expected[0]


FLOAT32 = {
    "dense": ({}, {}),
    "chunked vocabulary": ({"vocab_chunk": 64}, {}),
    "accumulation, remat=full": ({}, {"accumulate": 2, "remat": "full"}),
    "remat=minimal": ({}, {"remat": "minimal"}),
    "offloaded queries": ({}, {"remat": "full+offload:query,key,value"}),
    "offloaded gates": ({}, {"remat": "minimal+offload:gate,up"}),
    "dropless experts": (EXPERTS, {}),
    "latent attention": ({"latent": LATENT, "num_kv_heads": 8, "head_dim": 32}, {}),
    "unrolled layers": ({"unroll": True}, {"remat": "minimal"}),
    "batch slices": ({}, {"batch_slices": 2}),
    "prefetch": ({}, {"strategy": mp.fsdp(min_bytes=0, prefetch=1)}),
}
"""Model fields and step options. Rounding in another order changes the losses of four steps of Adam. Measured on
an H100: by at most 3.0e-4."""


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_step_matches_the_cpu(name):
    fields, options = FLOAT32[name]
    assert_losses_match_the_cpu(fields, atol=6e-4, **options)


@pytest.mark.parametrize("optimizer", ["muon", "bfloat16 moments", "int8 moments", "offloaded state"])
def test_optimizer_matches_the_cpu(optimizer):
    """Rounding of moments to 8 or 16 bits amplifies differences of float32 rounding."""
    plain = ADAM if optimizer == "offloaded state" else None
    assert_losses_match_the_cpu({}, atol=2e-3, optimizer=optimizer, cpu_optimizer=plain)


def test_offloaded_state_is_in_host_memory(gpu):
    _, state = train(gpu, {}, "offloaded state")
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert "pinned_host" in kinds


@pytest.mark.parametrize(("optimizer", "atol"), [("sgd", 6e-4), (ADAM, 2e-2)])
def test_experts_of_fixed_capacity_match_the_cpu(optimizer, atol):
    """With Adam a difference of 1.0e-2 was measured on an H100, whose cause is not known."""
    assert_losses_match_the_cpu(CAPACITY, atol=atol, optimizer=optimizer)


BFLOAT16_STEPS = {
    "cudnn": ({"attention": "cudnn"}, {}, 3e-2),
    "tokamax": ({"attention": "tokamax"}, {}, 3e-2),
    "blockwise": ({"attention": "blockwise"}, {}, 3e-2),
    "experts": ({"attention": "cudnn", **EXPERTS}, {}, 5e-2),
    "fp8": ({"attention": "cudnn"}, {"precision": mp.Precision(compute="bfloat16", matmul="fp8")}, 7e-2),
    "fp8-rowwise": (
        {"attention": "cudnn"}, {"precision": mp.Precision(compute="bfloat16", matmul="fp8-rowwise")}, 1.8e-1,
    ),
    "prefetch": ({"attention": "cudnn"}, {"remat": "minimal", "strategy": mp.fsdp(min_bytes=0, prefetch=1)}, 3e-2),
    "quantized gathers": ({"attention": "cudnn"}, {"strategy": mp.fsdp(min_bytes=0, quantize="int8")}, 1e-1),
    "batch slices": ({"attention": "cudnn"}, {"batch_slices": 2}, 3e-2),
    "unrolled layers": ({"attention": "cudnn", "unroll": True}, {"remat": "minimal"}, 3e-2),
}  # fmt: skip
"""Model fields, step options, and about twice the difference that was measured on an H100, if it was."""


@pytest.mark.parametrize("name", BFLOAT16_STEPS)
def test_low_precision_step_matches_float32(name):
    fields, options, atol = BFLOAT16_STEPS[name]
    assert_losses_match_the_cpu(fields, atol=atol, **{"precision": BFLOAT16, **options})


@pytest.mark.parametrize("options", [{}, EXPERTS], ids=["dense", "experts"])
def test_two_runs_are_equal_bit_for_bit(options):
    runs = [train(DEVICE, {"attention": available("cudnn"), **options}, precision=BFLOAT16) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(state.params) for _, state in runs))


def test_second_start_loads_its_programs_and_is_equal_bit_for_bit(tmp_path):
    """XLA may choose other kernels in each compilation. The compilation cache keeps the programs of the first start."""
    events = []

    def listener(event: str, **_: Any) -> None:
        events.append(event.removeprefix("/jax/compilation_cache/"))

    def start() -> np.ndarray:
        jax.clear_caches()
        events.clear()
        with keeping_programs(str(tmp_path)):
            return train(DEVICE, {"attention": available("cudnn")}, precision=BFLOAT16)[0]

    jax.monitoring.register_event_listener(listener)
    try:
        first, second = start(), start()
    finally:
        jax.monitoring.unregister_event_listener(listener)
    np.testing.assert_array_equal(first, second)
    assert events.count("cache_hits") == events.count("compile_requests_use_cache") > 0
