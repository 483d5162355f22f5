"""The step of docs/performance.md on a GPU, next to its prediction. It needs most of the memory of an H100."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from tests.gpu.reference import ON_GPU, available, size

VOCAB, SEQ = size(32_768, 64), size(8192, 32)


def decoder() -> mp.Recipe:
    """Return the recipe of a decoder with the layer of Llama 3.1 8B."""
    model = TransformerConfig(
        vocab_size=VOCAB, num_layers=8, embed_dim=size(4096, 32), num_heads=size(32, 4), num_kv_heads=size(8, 2),
        head_dim=size(128, 8), mlp_dim=size(14_336, 64), rope_theta=500_000.0, attention=available("cudnn"),
    )  # fmt: skip
    tokens = np.zeros((4, SEQ), np.int32)  # `bench.steps` draws random tokens
    return mp.Recipe(
        name="decoder", mesh=mp.MeshSpec(data=1), strategy=mp.ddp(), model=model, loss=next_token_loss,
        data=mp.data.ArrayData(arrays={"inputs": tokens, "targets": tokens}), steps=100, batch_size=2,
        optimizer=mp.AdamW(lr=3e-4, weight_decay=0.1, clip_norm=1.0),
        step=mp.StepOptions(precision=mp.Precision(compute="bfloat16"), remat="minimal"),
    )  # fmt: skip


@pytest.mark.alone
def test_step_takes_the_predicted_time_and_memory():
    """Measured on an H100: 391.8 ms and 46.86 GB. The prediction: 421.2 ms and 46.34 GB."""
    timing = mp.bench.steps(decoder(), steps=12, devices=jax.devices()[:1]).timings[0]
    assert timing.tokens == 2 * SEQ
    assert len(timing.steps_s) == 12
    if not ON_GPU:
        return
    assert abs(timing.predicted_step_s / timing.median_s - 1) < 0.10
    assert abs(timing.predicted_peak_bytes / timing.peak_bytes - 1) < 0.02


@pytest.mark.alone
def test_kernels_are_measured_within_the_time_limit():
    """The most important programs are measured: large matmuls, a copy, launches, and attention with cuDNN."""
    rates = mp.bench.gpu_rates(seconds=30)
    assert rates.seconds < 35
    assert not rates.failed
    assert rates.bytes_per_s > 0

    if ON_GPU:
        assert rates.launch_s > 0
        assert {4096, 8192} <= set(rates.matmuls)
        assert {"cudnn forward causal 128", "cudnn backward causal 128"} <= set(rates.attention)
