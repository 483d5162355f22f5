"""Schedules of kernels by XLA's GPU compiler, without a GPU: asynchronous messages, and overlapped matmuls."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc

pytestmark = pytest.mark.pod

CLUSTERS = {"h100:1x8": 8, "h100:2x8": 16}


def messages(program):
    """Yield (scope, is asynchronous, matmuls between start and done) for each permute."""
    for computation in program.module.computations.values():
        in_flight = {}
        for ins in computation:
            if ins.opcode == "collective-permute-start":
                is_sync = re.search(r'"is_sync":\s*true', line_of(program, ins)) is not None
                in_flight[ins.name] = (ins.metadata.op_name, not is_sync, [])
            elif ins.opcode == "collective-permute-done":
                yield in_flight.pop(ins.operands[0])
            elif re.search("gemm|dot|cublas", ins.name):
                for _, _, matmuls in in_flight.values():
                    matmuls.append(ins.name)


def line_of(program, ins):
    return next(line for line in program.text.splitlines() if f"%{ins.name} = " in line)


def compiled(pod, cluster, kernel, *shapes, dtype="float32"):
    mesh = AbstractMesh((CLUSTERS[cluster],), ("x",), axis_types=(AxisType.Auto,))
    view = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    sharding, count = NamedSharding(mesh, P("x")), CLUSTERS[cluster]
    arrays = [jax.ShapeDtypeStruct((count * size, *rest), dtype, sharding=sharding) for size, *rest in shapes]
    return pod.compile(jax.jit(view).trace(*arrays), cluster)


# ---- Overlapped matmuls ----------------------------------------------------------------------------------------------


def all_kernels(x, w, v, h, u):
    """Return values and gradients of the kernels, with dependences that prevent overlap between kernels."""
    results = []
    for name, kernel, operands in (
        ("gather", functools.partial(mc.all_gather_matmul, axis="x"), (x, w)),
        ("shared", lambda x, w, v: jnp.concatenate(mc.all_gather_matmul(x, (w, v), axis="x"), -1), (x, w, v)),
        ("scatter", functools.partial(mc.matmul_reduce_scatter, axis="x"), (h, u)),
    ):
        with jax.named_scope(f"case_{name}"):
            y, pull = jax.vjp(kernel, *operands)
            results.append((y, pull(jnp.sin(y))))
    return results


@pytest.fixture(scope="module")
def overlapped(pod):
    @functools.cache
    def get(cluster):
        ranks = CLUSTERS[cluster]
        shapes = (128, 512), (512, 256), (512, 64), (128 * ranks, 256), (256, 512)
        return list(messages(compiled(pod, cluster, all_kernels, *shapes, dtype="bfloat16")))

    return get


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_all_messages_overlap_with_a_matmul(overlapped, cluster):
    permutes = overlapped(cluster)
    assert {re.search(r"case_(\w+?)[/)]", scope)[1] for scope, _, _ in permutes} == {"gather", "shared", "scatter"}
    # Two lanes per loop. The two rings of a gather's backward pass may share messages.
    assert 12 <= len(permutes) <= 16
    for scope, is_async, matmuls in permutes:
        assert is_async, scope
        assert matmuls, scope


# ---- Kernels without matmuls -----------------------------------------------------------------------------------------

LOOPS = {
    "all_gather": functools.partial(mc.all_gather, axis="x"),
    "reduce_scatter": functools.partial(mc.reduce_scatter, axis="x"),
    "ring": functools.partial(mc.all_reduce, axis="x"),
    "both_ways": functools.partial(mc.all_reduce, axis="x", algorithm="bidirectional"),
    "two_channels": functools.partial(mc.all_reduce, axis="x", channels=2),
}
UNROLLED = {
    "doubling": functools.partial(mc.all_reduce, axis="x", algorithm="recursive_doubling"),
    "halving": functools.partial(mc.all_reduce, axis="x", algorithm="halving_doubling"),
    "tree": functools.partial(mc.all_reduce, axis="x", algorithm="tree"),
    "exchange": functools.partial(mc.all_to_all, axis="x"),
}
PARTLY_SYNCHRONOUS = {"ring"}
"""Kernels with messages that have no computation to overlap with, which XLA makes synchronous.

A single lane sends the sum of the chunk that it received in the previous step, so there is no independent work. This
happens in the reducing half of the ring all-reduce with jax 0.10, but not with jax 0.12. The gathering half and
`all_gather` store a chunk during a message, `reduce_scatter` slices one, and a second lane adds."""


@pytest.fixture(scope="module")
def sending(pod):
    """Return {kernel: [is asynchronous]} for loops, and for unrolled kernels next to independent matmuls."""

    @functools.cache
    def get(cluster):
        def all_of(x, a):
            results = []
            for name, kernel in LOOPS.items():
                with jax.named_scope(f"case_{name}"):
                    results.append(kernel(x))
            for name, kernel in UNROLLED.items():
                # The kernels run sequentially, each next to independent matmuls.
                x, a = jax.lax.optimization_barrier((x, a))
                with jax.named_scope(f"case_{name}"):
                    x = kernel(x)
                for _ in range(3 * CLUSTERS[cluster]):
                    a = jnp.sin(a @ a)
            return results, x, a

        is_async_by_kernel = {}
        shapes = (CLUSTERS[cluster] * 16384,), (1024, 1024)
        for scope, is_async, _ in messages(compiled(pod, cluster, all_of, *shapes)):
            is_async_by_kernel.setdefault(re.search(r"case_(\w+?)[/)]", scope)[1], []).append(is_async)
        return is_async_by_kernel

    return get


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_messages_with_independent_work_are_asynchronous(sending, cluster):
    is_async = sending(cluster)
    assert is_async.keys() == LOOPS.keys() | UNROLLED.keys()
    assert {name for name in LOOPS if not all(is_async[name])} <= PARTLY_SYNCHRONOUS
    assert any(is_async["ring"])
    # Unrolled messages overlap with the matmuls next to them. XLA assigns several matmuls to a message, so the last
    # messages may have none, and be synchronous.
    for name in UNROLLED:
        assert sum(is_async[name]) > len(is_async[name]) / 2, name
