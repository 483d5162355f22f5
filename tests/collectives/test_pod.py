"""Kernels as XLA's GPU compiler schedules them, seen without a GPU: asynchronous messages, and what runs meanwhile."""

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
    """Of each permute: (its scope, is it asynchronous, the matmuls between its start and its done)."""
    for computation in program.module.computations.values():
        under_way = {}
        for ins in computation:
            if ins.opcode == "collective-permute-start":
                is_sync = re.search(r'"is_sync":\s*true', line_of(program, ins)) is not None
                under_way[ins.name] = (ins.metadata.op_name, not is_sync, [])
            elif ins.opcode == "collective-permute-done":
                yield under_way.pop(ins.operands[0])
            elif re.search("gemm|dot|cublas", ins.name):
                for _, _, between in under_way.values():
                    between.append(ins.name)


def line_of(program, ins):
    return next(line for line in program.text.splitlines() if f"%{ins.name} = " in line)


def compiled(pod, cluster, kernel, *shapes, dtype="float32"):
    mesh = AbstractMesh((CLUSTERS[cluster],), ("x",), axis_types=(AxisType.Auto,))
    view = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    rows = NamedSharding(mesh, P("x"))
    whole = [jax.ShapeDtypeStruct((CLUSTERS[cluster] * shape[0], *shape[1:]), dtype, sharding=rows) for shape in shapes]
    return pod.compile(jax.jit(view).trace(*whole), cluster)


# ---------------------------------------------------------------------------------------------------------------------
# Overlapped matmuls
# ---------------------------------------------------------------------------------------------------------------------


def both_ways(x, w, v, h, u):
    """Values and gradients of both kernels, apart from each other: no one's matmuls are at hand for the other."""
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
        return list(messages(compiled(pod, cluster, both_ways, *shapes, dtype="bfloat16")))

    return get


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_matmul_stands_between_start_and_done_of_every_message(overlapped, cluster):
    """Of every one, the last included: the loops are whole turns, with the block that is left behind them."""
    found = overlapped(cluster)
    assert {re.search(r"case_(\w+?)[/)]", scope)[1] for scope, _, _ in found} == {"gather", "shared", "scatter"}
    # Two lanes a loop; the gathers' two rings of the backward pass share their messages.
    assert 12 <= len(found) <= 16
    for scope, is_async, matmuls in found:
        assert is_async, scope
        assert matmuls, scope


# ---------------------------------------------------------------------------------------------------------------------
# Kernels that only send
# ---------------------------------------------------------------------------------------------------------------------

LOOPS = {
    "all_gather": functools.partial(mc.all_gather, axis="x"),
    "reduce_scatter": functools.partial(mc.reduce_scatter, axis="x"),
    "ring": functools.partial(mc.all_reduce, axis="x"),
    "both_ways": functools.partial(mc.all_reduce, axis="x", algorithm="bidirectional"),
    "two_channels": functools.partial(mc.all_reduce, axis="x", channels=2),
}
STRAIGHT = {
    "doubling": functools.partial(mc.all_reduce, axis="x", algorithm="recursive_doubling"),
    "halving": functools.partial(mc.all_reduce, axis="x", algorithm="halving_doubling"),
    "tree": functools.partial(mc.all_reduce, axis="x", algorithm="tree"),
    "exchange": functools.partial(mc.all_to_all, axis="x"),
}
NOTHING_TO_DO = {"ring"}
"""What it sends at one step it has put together of what arrived at the step before: while a message is under way, one
lane has nothing to compute, and XLA makes a message with nothing behind it a synchronous one. So does that of jax 0.10
with the reducing half of the ring all-reduce (that of jax 0.12 does not); the half that gathers, as `all_gather`, puts
a chunk away meanwhile, and `reduce_scatter` cuts one out. With a second lane one adds while the other travels."""


@pytest.fixture(scope="module")
def sending(pod):
    """{kernel: is each of its messages asynchronous}, of loops alone, and of straight kernels beside a matmul."""

    @functools.cache
    def get(cluster):
        def all_of(x, a):
            results = []
            for name, kernel in LOOPS.items():
                with jax.named_scope(f"case_{name}"):
                    results.append(kernel(x))
            for name, kernel in STRAIGHT.items():
                # One after the other, each beside matmuls that do not wait for it.
                x, a = jax.lax.optimization_barrier((x, a))
                with jax.named_scope(f"case_{name}"):
                    x = kernel(x)
                for _ in range(3 * CLUSTERS[cluster]):
                    a = jnp.sin(a @ a)
            return results, x, a

        found = {}
        shapes = (CLUSTERS[cluster] * 16384,), (1024, 1024)
        for scope, is_async, _ in messages(compiled(pod, cluster, all_of, *shapes)):
            found.setdefault(re.search(r"case_(\w+?)[/)]", scope)[1], []).append(is_async)
        return found

    return get


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_messages_are_asynchronous_where_there_is_anything_to_do_meanwhile(sending, cluster):
    found = sending(cluster)
    assert found.keys() == LOOPS.keys() | STRAIGHT.keys()
    assert {name for name in LOOPS if not all(found[name])} <= NOTHING_TO_DO
    assert any(found["ring"])
    # Messages that stand one behind the other take what else there is to compute. XLA hands out several matmuls to one
    # message, so that it may run out of them; alone, they are synchronous.
    for name in STRAIGHT:
        assert sum(found[name]) > len(found[name]) / 2, name
