"""Descriptions of steps: the values that engines resolve from strategies and options."""

from __future__ import annotations

import dataclasses

import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel.execution import LayerGather

CONFIG = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
)
BATCH = {name: np.zeros((32, 16), np.int32) for name in ("inputs", "targets")}


def described(strategy, options, **axes):
    mesh = mp.MeshSpec(**axes).abstract()
    state = mp.abstract_state(CONFIG.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy)
    return mp.train_step(next_token_loss, **options).describe(state, BATCH)


@pytest.mark.parametrize(
    ("strategy", "axes", "options", "expected"),
    [
        (mp.fsdp(), {"fsdp": 4}, {}, {"examples": 8, "tokens": 128, "num_exchanges": 1}),
        (mp.fsdp(), {"fsdp": 4}, {"accumulate": 2}, {"examples": 4, "num_exchanges": 2, "gathers_once": False}),
        (mp.fsdp(), {"fsdp": 4}, {"accumulate": 2, "reduce_gradients": "once"},
         {"num_exchanges": 1, "gathers_once": True, "divides_batch": True}),
        (mp.hsdp(), {"data": 2, "fsdp": 4}, {"accumulate": 2}, {"deferred_axes": ("data",), "is_by_device": False}),
        (mp.hsdp(), {"data": 2, "fsdp": 4}, {"accumulate": 2, "reduce_gradients": "each_microbatch"},
         {"deferred_axes": (), "divides_batch": False}),
        (mp.fsdp(prefetch=1), {"fsdp": 4}, {"batch_slices": 2}, {"gathering": LayerGather(ahead=1), "batch_slices": 2}),
        (mp.fsdp(quantize="int8"), {"fsdp": 4}, {}, {"gathers_once": False, "is_by_device": True}),
        (mp.fsdp() | mp.tensor_parallel(sequence=True), {"fsdp": 2, "tensor": 2}, {"remat": "dots"},
         {"tensor_axes": ("tensor",), "sequence_axes": ("tensor",), "remat": "dots", "recomputes": True}),
        (mp.fsdp() | mp.context_parallel(), {"fsdp": 2, "context": 2}, {},
         {"context_axes": ("context",), "tokens": 128}),
        (mp.fsdp(), {"fsdp": 4}, {"precision": mp.Precision(compute="bfloat16", reduce="bfloat16")},
         {"compute": "bfloat16", "reduce": "bfloat16"}),
    ],
)  # fmt: skip
def test_engines_resolve_options(strategy, axes, options, expected):
    execution = described(strategy, options, **axes)
    assert {name: getattr(execution, name) for name in expected} == expected


def test_a_pipeline_records_the_uses_of_its_stages():
    execution = described(mp.pipeline_parallel(stages=2, microbatches=4) | mp.fsdp(), {}, stage=2, fsdp=2)
    assert (execution.microbatches, execution.examples, execution.gathers_once) == (4, 4, True)
    uses = execution.stage_uses
    assert uses.first == {"embed/embedding"}
    assert uses.last == {"final_norm/scale", "head/kernel"}
    assert {path.partition("/")[0] for path in uses.reads} == {"layers"}
    assert [x.shape for x in uses.outputs] == [(4, 16, 16)]


def test_a_description_is_a_short_comparable_value():
    execution = described(mp.fsdp(), {"accumulate": 2}, fsdp=4)
    assert "micro_steps=2" in repr(execution)
    assert len(repr(execution)) < 1000
    assert str(execution).splitlines()[1:] == ["batch_axes: ('fsdp',)", "micro_steps: 2", "examples: 4", "tokens: 64"]
    assert dataclasses.replace(execution) == execution != described(mp.fsdp(), {}, fsdp=4)
