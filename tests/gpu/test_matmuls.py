"""8-bit and grouped matmuls on a GPU: values, gradients, and the kernels in the programs. Collectives of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar as mp
from meshpar.layers.fp8_dot import fp8_dot_general, rowwise_fp8_dot_general
from meshpar.moe.grouped import grouped_matmul, grouped_swiglu
from tests.gpu.reference import (
    FP8_RTOL,
    assert_close_to_cpu,
    available,
    compiled_text,
    library_calls,
    normal,
    size,
    value_and_gradients,
)

FP8 = {"fp8": fp8_dot_general, "fp8-rowwise": rowwise_fp8_dot_general}
TOKENS, IN, OUT = size(512, 16), size(1024, 32), size(2048, 64)
ROWS, GROUPS, WIDTH, HIDDEN = size(4096, 64), 8, size(512, 16), size(1024, 32)


def product(kind, x, w):
    return FP8[kind](((2,), (0,)), ((), ()), jnp.float32, None, x, w)


def operands():
    x, w, cotangent = normal(3, (4, TOKENS, IN), (IN, OUT), (4, TOKENS, OUT))
    return x, w / IN**0.5, cotangent


@pytest.mark.parametrize("kind", FP8)
def test_8_bit_matmul_matches_float32(kind):
    x, w, cotangent = operands()
    assert_close_to_cpu(functools.partial(product, kind), jnp.matmul, (x, w), cotangent, rtol=FP8_RTOL)


@pytest.mark.parametrize(("kind", "num_calls"), [("fp8", 3), ("fp8-rowwise", 2)])
def test_program_calls_8_bit_kernels(gpu, kind, num_calls):
    """Output and input gradient, and for "fp8" the weight gradient. Triton could be faster for these sizes."""
    x, w, cotangent = (jnp.asarray(a, jnp.bfloat16) for a in operands())
    run = value_and_gradients(functools.partial(product, kind), cotangent)
    text = compiled_text(run, x, w, xla_gpu_enable_triton_gemm=False)
    assert library_calls(text).count("__cublas$lt$matmul$f8") == num_calls


def groups():
    """Return the rows of each group: uneven, one of them empty, with unassigned rows at the end."""
    sizes = np.random.default_rng(4).multinomial(ROWS - ROWS // 32, np.ones(GROUPS) / GROUPS).astype(np.int32)
    sizes[3] = 0
    return sizes


def masked(rows, *weights, sizes):
    """Multiply all rows by the weights of all groups, and select: the plain reference of a grouped matmul."""
    index = jnp.repeat(jnp.arange(GROUPS), sizes, total_repeat_length=ROWS)
    is_assigned = (jnp.arange(ROWS) < sizes.sum())[:, None]
    rows = jnp.where(is_assigned, rows, 0)

    def of_group(*weights):
        if len(weights) == 1:
            return rows @ weights[0]
        gate, up, down = weights
        return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

    outputs = jnp.stack([of_group(*(w[group] for w in weights)) for group in range(GROUPS)])
    return jnp.where(is_assigned, outputs[index, jnp.arange(ROWS)], 0)


@pytest.mark.parametrize("implementation", ["auto", "tokamax", "blocked"])
@pytest.mark.parametrize("kind", ["matmul", "swiglu"])
def test_grouped_matmul_matches_float32(implementation, kind):
    rows, gate, up, down, cotangent = normal(
        5, (ROWS, WIDTH), (GROUPS, WIDTH, HIDDEN), (GROUPS, WIDTH, HIDDEN), (GROUPS, HIDDEN, WIDTH), (ROWS, WIDTH)
    )
    gate, up, down, sizes = gate / WIDTH**0.5, up / WIDTH**0.5, down / HIDDEN**0.5, groups()
    weights, function = ((gate, up, down), grouped_swiglu) if kind == "swiglu" else ((gate,), grouped_matmul)
    cotangent = cotangent if kind == "swiglu" else normal(6, (ROWS, HIDDEN))[0]

    def grouped(rows, *weights):
        chosen = available(implementation, substitute="blocked")
        return function(rows, *weights, jnp.asarray(sizes), implementation=chosen)

    assert_close_to_cpu(grouped, functools.partial(masked, sizes=sizes), (rows, *weights), cotangent)


def test_program_has_grouped_kernels(gpu):
    available("tokamax")
    rows, weights, sizes = (
        jnp.ones((ROWS, WIDTH), jnp.bfloat16),
        jnp.ones((GROUPS, WIDTH, HIDDEN), jnp.bfloat16),
        groups(),
    )

    def loss(rows, weights):
        return grouped_matmul(rows, weights, jnp.asarray(sizes), implementation="tokamax").astype(jnp.float32).sum()

    text = compiled_text(jax.grad(loss, (0, 1)), rows, weights)
    assert len([name for name in library_calls(text) if "mosaic" in name or "triton" in name]) >= 3


@pytest.mark.parametrize("algorithm", ["ring", "bidirectional", "recursive_doubling", "tree"])
def test_all_reduce_of_one_device_is_the_identity(algorithm):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    reduce = functools.partial(mp.collectives.all_reduce, axis="data", algorithm=algorithm)
    spec = PartitionSpec("data")
    x = jnp.arange(32.0)
    np.testing.assert_array_equal(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec)(x), x)
