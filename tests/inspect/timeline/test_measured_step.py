"""The prediction of a training step that was measured on an H100 (docs/performance.md), compiled without a GPU."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.models import TransformerConfig, next_token_loss

STEP_S = 391.8e-3
"""Median of 12 steps on one H100 80 GB HBM3, driver 580, CUDA 13, jax 0.11.2, 2026-11-27."""
PEAK_BYTES = 46.86e9
CONFIG = TransformerConfig(
    vocab_size=32_768, num_layers=8, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336,
    rope_theta=500_000.0, attention="cudnn",
)  # fmt: skip
H100 = parse_cluster("h100:1x1")


@pytest.mark.matrix
@pytest.mark.pod
def test_measured_step_is_between_the_predictions_with_two_matmul_rates(pod):
    """Matmuls at 65 % of the peak take longer, and at the rate of a single large matmul less time than in the step."""
    precision, tx = mp.Precision(compute="bfloat16"), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    mesh = mp.MeshSpec(data=1).abstract(1)
    state = mp.abstract_state(CONFIG.build(), tx, mesh=mesh, strategy=mp.ddp(), precision=precision)
    batch = {name: jax.ShapeDtypeStruct((2, 8192), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, precision=precision, remat="minimal")
    alone = dataclasses.replace(H100, products={8192: H100.gpu.matmul_rates[0]})
    slow, fast = (mp.explain(step, state, batch, cluster, pod=pod, advise=False) for cluster in (H100, alone))
    errors = [report.compute.predicted_step_s / STEP_S - 1 for report in (slow, fast)]
    assert errors[1] < 0 < errors[0]
    assert max(map(abs, errors)) < 0.08
    assert slow.memory.peak_bytes == pytest.approx(PEAK_BYTES, rel=0.02)
