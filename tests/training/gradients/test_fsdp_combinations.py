"""Combinations of prefetched, quantized and accumulated FSDP: values, gradients and collectives."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.parallel import parse_strategy
from tests.grid import cases
from tests.training.gradients.test_zeropp import one_step

MESHES = {
    "fsdp": ({"fsdp": 8}, "fsdp(min_bytes=0{})"),
    "hsdp": ({"data": 2, "fsdp": 4}, "hsdp(min_bytes=0{})"),
    "hsdp|tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, "hsdp(min_bytes=0{}) | tensor_parallel()"),
    "two axes": ({"data": 2, "fsdp": 4}, "zero3(axis=('data', 'fsdp'), min_bytes=0{})"),
}
FORMATS = {
    "plain": "",
    "int8": ", quantize='int8'",
    "fp8": ", quantize='fp8'",
    "secondary": ", quantize={'weights': None, 'gradients': None, 'secondary': 'fsdp'}",
    "int8, secondary": ", quantize={'secondary': 'fsdp'}",
}
REDUCTIONS = {
    "once per step": {},
    "each micro-step": {"accumulate": 2, "reduce_gradients": "each_microbatch"},
    "once across groups": {"accumulate": 2, "reduce_gradients": "once_across_groups"},
}
EXACT = ("plain", "secondary")
"""Formats without rounding."""


def is_valid(mesh: str, wire: str, reduction: str) -> bool:
    """Secondary shards need a second axis that shards the parameters, groups an axis that shards none."""
    return ("secondary" not in wire or mesh == "two axes") and (reduction != "once across groups" or "hsdp" in mesh)


GRID = [case for case in itertools.product(MESHES, FORMATS, REDUCTIONS) if is_valid(*case)]


def strategy_of(mesh: str, wire: str, prefetch: int) -> mp.Strategy:
    return parse_strategy(MESHES[mesh][1].format(f"{FORMATS[wire]}, prefetch={prefetch}"))


@functools.cache
def on_one_device():
    return one_step({"data": 1}, mp.ddp())


@pytest.mark.parametrize(
    ("mesh", "wire", "reduction"),
    cases(("hsdp|tensor", "int8", "once across groups"), ("two axes", "secondary", "each micro-step"), grid=GRID),
)
def test_weights_gathered_ahead_have_the_same_values(mesh, wire, reduction):
    (metrics, ahead, _), (_, plain, _) = (
        one_step(MESHES[mesh][0], strategy_of(mesh, wire, prefetch), **REDUCTIONS[reduction]) for prefetch in (1, 0)
    )
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, ahead, plain)
    if wire in EXACT:
        expected_metrics, expected, _ = on_one_device()
        jax.tree.map(compare, ahead, expected)
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)


DECODER = TransformerConfig(
    vocab_size=256, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
)  # fmt: skip
EXPERTS = TransformerConfig(
    vocab_size=256, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128,
    moe=MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=128),
)  # fmt: skip
BATCH = {name: jax.ShapeDtypeStruct((32, 32), np.int32) for name in ("inputs", "targets")}
PROGRAMS = {
    "hsdp": (DECODER, {"data": 2, "fsdp": 4}, "hsdp({})"),
    "hsdp|tensor": (DECODER, {"data": 2, "fsdp": 2, "tensor": 2}, "hsdp({}) | tensor_parallel()"),
    "hsdp|expert": (EXPERTS, {"data": 2, "fsdp": 2, "expert": 2}, "hsdp({}) | expert_parallel()"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize(
    ("name", "quantize", "prefetch"),
    [
        *itertools.product(PROGRAMS, ("int8",), (0, 1)),
        # XLA:CPU gathers the rows of a lookup over fsdp if tensor shards the table, too.
        *itertools.product(("hsdp", "hsdp|expert"), (None,), (0, 1)),
    ],
)
def test_combined_steps_send_only_expected_collectives(name, quantize, prefetch, remat):
    config, mesh, text = PROGRAMS[name]
    strategy = parse_strategy(text.format(f"min_bytes=0, prefetch={prefetch}, quantize={quantize!r}"))
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mp.MeshSpec(**mesh).build(), strategy=strategy)
    step = mp.train_step(next_token_loss, accumulate=2, remat=remat, reduce_gradients="once_across_groups")
    report = mp.explain(step, state, BATCH)
    assert not report.matching.unexpected, str(report)
    assert not report.matching.missing, str(report)
