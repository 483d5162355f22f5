"""Quantized messages of pipeline stages: gradients, expected collectives and bytes sent."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.parallel import parse_strategy
from tests.errors import raises
from tests.grid import cases
from tests.training.gradients.test_fsdp import on_one_device
from tests.training.gradients.test_weight_messages import one_step

STAGES = "pipeline_parallel(stages={}, microbatches=2, schedule='{}') | "
MESHES = {
    "fsdp": ({"stage": 3, "fsdp": 2}, "fsdp(min_bytes=0{})"),
    "uneven": ({"stage": 2, "fsdp": 4}, "fsdp(min_bytes=0{})"),
    "hsdp": ({"stage": 2, "data": 2, "fsdp": 2}, "hsdp(min_bytes=0{})"),
    "tensor": ({"stage": 2, "fsdp": 2, "tensor": 2}, "fsdp(min_bytes=0{}) | tensor_parallel()"),
    "two axes": ({"stage": 2, "data": 2, "fsdp": 2}, "fsdp(axis=('data', 'fsdp'), min_bytes=0{})"),
    "experts": ({"stage": 2, "fsdp": 2, "expert": 2}, "fsdp(min_bytes=0{}) | expert_parallel()"),
}
FORMATS = {
    "int8": (", quantize='int8'", 0.04),
    "fp8": (", quantize='fp8'", 0.12),
    "gradients": (", quantize={'weights': None}", 0.04),
    "secondary": (", quantize={'weights': None, 'gradients': None, 'secondary': 'fsdp'}", 1e-6),
    "stochastic": (", quantize={'secondary': 'fsdp', 'stochastic': True}", 0.06),
}
"""Argument and largest relative error of the gradient, as a norm."""
GRID = [
    (mesh, wire, schedule)
    for mesh, wire, schedule in itertools.product(MESHES, FORMATS, ("1f1b", "zb-h1", "eager-1f1b"))
    if ("secondary" not in FORMATS[wire][0] or mesh == "two axes") and (mesh != "experts" or wire == "gradients")
]  # fmt: skip
"""Rounded weights may change the experts of a token, so weights of experts are not rounded."""


@pytest.mark.parametrize(
    ("mesh", "wire", "schedule"), cases(("tensor", "int8", "1f1b"), ("two axes", "secondary", "zb-h1"), grid=GRID)
)
def test_gradients_of_stages_equal_one_device(mesh, wire, schedule):
    axes, text = MESHES[mesh]
    argument, bound = FORMATS[wire]
    model = "experts" if mesh == "experts" else "functions"
    strategy = parse_strategy(STAGES.format(axes["stage"], schedule) + text.format(argument))
    metrics, grads, _ = one_step(axes, strategy, model=model)
    loss, expected = on_one_device(model)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=max(bound, 1e-5))
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted) + 1e-6


CONFIG = TransformerConfig(
    vocab_size=256, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
)
EXPERTS = TransformerConfig(
    vocab_size=256, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128,
    moe=MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=128),
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["hsdp", "tensor", "two axes", "experts"])
def test_stages_send_a_byte_per_element(mesh):
    axes, text = MESHES[mesh]
    sent, unexpected = [], []
    for argument in ("", ", quantize='int8'"):
        strategy = parse_strategy(STAGES.format(axes["stage"], "1f1b") + text.format(argument))
        model = (EXPERTS if mesh == "experts" else CONFIG).build()
        state = mp.abstract_state(model, optax.adam(1e-3), mesh=mp.MeshSpec(**axes).build(), strategy=strategy)
        batch = {name: jax.ShapeDtypeStruct((16, 32), np.int32) for name in ("inputs", "targets")}
        report = mp.explain(mp.train_step(next_token_loss), state, batch)
        assert not report.matching.missing, str(report)
        unexpected.append({(entry.kind, entry.axes) for entry in report.matching.unexpected})
        batch_axes = set(axes) & {"data", "fsdp"}
        sent.append(math.fsum(
            total.bytes_sent_per_device for names, kinds in report.totals.items() if set(names.split("*")) & batch_axes
            for total in kinds.values()
        ))  # fmt: skip
    # Without XLA's optimizations, messages between stages and to experts lose their source lines.
    assert unexpected[1] <= unexpected[0]
    assert sent[1] < 0.5 * sent[0]


def test_stages_that_gather_in_each_microbatch_refuse_quantized_messages():
    strategy = mp.fsdp(quantize="int8") | mp.pipeline_parallel(stages=2, microbatches=2, gather="microbatch")
    state = mp.abstract_state(
        CONFIG.build(), optax.adam(1e-3), mesh=mp.MeshSpec(stage=2, fsdp=4).abstract(), strategy=strategy
    )
    batch = {name: jax.ShapeDtypeStruct((16, 32), np.int32) for name in ("inputs", "targets")}
    with raises("conflict", "strategy"):
        mp.train_step(next_token_loss).trace(state, batch)
