"""Attention on a GPU: values and gradients of each implementation, and the kernels in the programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import meshpar as mp
from meshpar.collectives import cudnn, ring_attention
from meshpar.models.attention import causal_attention
from tests.gpu.reference import (
    BFLOAT16_RTOL,
    ON_GPU,
    TF32_RTOL,
    assert_close_to_cpu,
    available,
    compiled_text,
    library_calls,
    normal,
    size,
)

SEQ = size(1024, 64)
ODD = {"seq": size(1000, 62), "head_dim": 64, "num_kv_heads": 8}
WINDOW = {"window": size(200, 12)}


def arrays(seq=SEQ, head_dim=128, num_heads=8, num_kv_heads=2):
    """Return queries, keys, values and the cotangent of the output."""
    shapes = ((2, seq, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads))
    return normal(1, *shapes)


def packed(seq=SEQ):
    """Return the segment ids of about three documents in a row."""
    return np.cumsum(np.random.default_rng(2).random((2, seq)) < 3 / seq, axis=1).astype(np.int32)


def check(implementation, *, sizes=None, dtype=jnp.bfloat16, rtol=BFLOAT16_RTOL, segments=None, **options):
    *args, cotangent = arrays(**(sizes or {}))

    def attend(*args, implementation):
        ids = None if segments is None else jnp.asarray(segments)
        return causal_attention(*args, ids, implementation=implementation, **options)

    function = functools.partial(attend, implementation=available(implementation))
    reference = functools.partial(attend, implementation="xla")
    assert_close_to_cpu(function, reference, args, cotangent, dtype=dtype, rtol=rtol)


@pytest.mark.parametrize("implementation", ["auto", "cudnn", "tokamax", "blockwise", "xla"])
@pytest.mark.parametrize(
    ("sizes", "options"), [({}, {}), (ODD, {}), ({}, WINDOW)], ids=["1,024 positions", "1,000 positions", "window"]
)
def test_matches_float32(implementation, sizes, options):
    check(implementation, sizes=sizes, **options)


@pytest.mark.parametrize("implementation", ["auto", "cudnn", "tokamax", "blockwise"])
def test_packed_sequences_match_float32(implementation):
    check(implementation, segments=packed())


@pytest.mark.parametrize("implementation", ["auto", "tokamax", "blockwise"])
def test_cap_matches_float32(implementation):
    check(implementation, cap=20.0)


def test_sinks_match_float32():
    check("blockwise", sinks_H=normal(3, (8,))[0])


@pytest.mark.parametrize("head_dim", [192, 256])
def test_large_heads_match_float32(head_dim):
    check("cudnn", sizes={"head_dim": head_dim, "num_heads": 4})


@pytest.mark.parametrize("implementation", ["blockwise", "xla"])
def test_float32_matches_the_cpu(implementation):
    check(implementation, dtype=jnp.float32, rtol=TF32_RTOL)


def test_ring_attention_on_one_device_matches_float32():
    *args, cotangent = arrays()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("context",))
    spec = PartitionSpec(None, "context")
    kernel = {"kernel": cudnn.TILES} if ON_GPU else {}
    ring = functools.partial(ring_attention, axis="context", **kernel)
    function = jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert_close_to_cpu(function, causal_attention, args, cotangent)


@pytest.mark.parametrize("implementation", ["cudnn", "tokamax"])
def test_program_has_fused_kernels(gpu, implementation):
    *args, cotangent = (jnp.asarray(x, jnp.bfloat16) for x in arrays())

    def loss(*args):
        return (causal_attention(*args, implementation=available(implementation)) * cotangent).sum()

    text = compiled_text(jax.grad(loss, (0, 1, 2)), *args)
    calls = library_calls(text)
    if implementation == "cudnn":
        assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= set(calls)
    else:
        assert len([name for name in calls if "mosaic" in name or "triton" in name]) >= 2
    # An unfused implementation stores scores of [positions, positions] or loops over blocks of them.
    assert " while(" not in text
    assert f"{SEQ},{SEQ}]" not in text


def test_auto_is_cudnn_in_bfloat16(gpu):
    config = mp.models.TransformerConfig(
        vocab_size=64, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=256
    )
    mesh = jax.sharding.Mesh(np.array([gpu]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = mp.init_state(config.build(), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {name: np.zeros((2, 128), np.int32) for name in ("inputs", "targets")}
    text = step.lower(state, batch).compile().as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in library_calls(text)
