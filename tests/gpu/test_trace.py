"""A trace of training steps on a GPU: the program is in the trace, and kernels are joined to its instructions."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import cluster_here
from meshpar.hardware.compile_options import NO_GRAPHS
from meshpar.inspect import trace
from meshpar.models import TransformerConfig, next_token_loss
from tests.gpu.reference import DEVICE, ON_GPU, available, size

SEQ = size(512, 16)


@pytest.mark.call_stacks
def test_traced_kernels_have_instructions_and_predictions(tmp_path):
    config = TransformerConfig(
        vocab_size=512, num_layers=2, embed_dim=size(512, 32), num_heads=4, num_kv_heads=4, head_dim=size(128, 8),
        mlp_dim=size(2048, 64), attention=available("cudnn"),
    )  # fmt: skip
    mesh = mp.MeshSpec(data=1).build([DEVICE])
    state = mp.init_state(config.build(), optax.adamw(1e-3), mesh=mesh, strategy=mp.ddp(), key=0)
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))
    tokens = np.random.default_rng(0).integers(0, 512, (4, SEQ + 1), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    profile = mp.hooks.Profile(tmp_path, first=4, last=6)
    profiled = profile.step(step, step.with_xla(NO_GRAPHS) if ON_GPU else step)
    mp.fit(profiled, state, [batch] * 6, steps=6, hooks=[profile])
    found = trace.read(tmp_path, mesh={"data": 1}, cluster=cluster_here([DEVICE]))
    assert (found.program, found.devices, found.steps) == ("jit__step", 1, 3)
    assert min(found.phases[phase] for phase in ("forward", "backward", "optimizer")) > 0
    measured_s = sum(kernel.measured_s for kernel in found.kernels)
    assert sum(kernel.measured_s for kernel in found.kernels if kernel.program_count) > 0.9 * measured_s
    assert found.causes["matmul"] > 0
    assert found.causes["attention"] > 0
    if ON_GPU:
        assert found.method == trace.WITHOUT_GRAPHS
        assert {kernel.implementation for kernel in found.kernels if kernel.kind == "attention"} == {"cuDNN"}
        assert found.predicted_step_s > 0
        assert all(kernel.predicted_s for kernel in found.kernels if kernel.program_count)
    assert jax.tree.leaves(found.to_json())
