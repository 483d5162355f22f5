"""dispatch as XLA's GPU compiler schedules it, seen without a GPU: what is ragged, and what runs meanwhile."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.moe import Payload, dispatch, grouped_matmul

pytestmark = pytest.mark.pod

TOKENS, K, EXPERTS, WIDTH, HIDDEN = 1024, 2, 16, 512, 1024
ROOM = 160
FORMS = {
    "dropless": {},
    "quantized": {"payload": Payload(dispatch="fp8")},
    "chunked": {"chunks": 2},
    "buffers": {"capacity": ROOM},
    "buffers, chunked": {"capacity": ROOM // 2, "chunks": 2},
    "two levels": {"axes": {"outer": 2, "inner": 4}, "capacity": ROOM},
    "in slices": {"slices": 2},
}


@pytest.fixture(scope="module")
def compiled(pod):
    """(mesh, program) of a layer's loss and all its gradients, each form compiled once."""
    return functools.cache(lambda form, cluster="h100:1x8": program(pod, cluster, **FORMS[form]))


def program(pod, cluster, axes=None, slices=1, **options):
    ranks = math.prod(int(number) for number in re.findall(r"\d+", cluster)[1:])
    axes = axes or {"expert": ranks}
    num_experts = max(EXPERTS, ranks)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    axis = tuple(axes) if len(axes) > 1 else next(iter(axes))

    def one_device(x, experts, weights, up, down):
        typical = TOKENS * K // options.get("chunks", 1)

        def experts_here(rows, sizes):
            h = jax.nn.gelu(grouped_matmul(rows, up, sizes, typical_rows=typical))
            return grouped_matmul(h, down, sizes, typical_rows=typical)

        given = zip(*(jnp.split(one, slices) for one in (x, experts, weights)), strict=True)
        how = {"axis": axis, "num_experts": num_experts, **options}
        return jnp.concatenate([dispatch(*one, experts_here, **how)[0] for one in given])

    rows = P(axis)
    view = jax.shard_map(one_device, mesh=mesh, in_specs=rows, out_specs=rows)

    def loss(x, weights, up, down, experts):
        return jnp.sum(jnp.sin(view(x, experts, weights, up, down).astype("float32")))

    tokens = ranks * TOKENS
    shapes = ((tokens, WIDTH), (tokens, K), (num_experts, WIDTH, HIDDEN), (num_experts, HIDDEN, WIDTH), (tokens, K))
    dtypes = "bfloat16", "float32", "bfloat16", "bfloat16", "int32"
    sharding = NamedSharding(mesh, rows)
    arrays = [jax.ShapeDtypeStruct(*one, sharding=sharding) for one in zip(shapes, dtypes, strict=True)]
    return mesh, pod.compile(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(*arrays), cluster)


def exchanges(found):
    mesh, program = found
    every = census(program.module, mesh)
    return [one for one in every if one.module.startswith(("dispatch", "combine")) and one.dtype != "s32"]


@pytest.mark.parametrize(("cluster", "ranks"), [("h100:1x8", 8), ("h100:8x8", 64)])
def test_dropless_is_ragged_on_gpus_though_traced_on_a_cpu(compiled, cluster, ranks):
    """Two ragged all-to-alls each way, none dense, and no byte more than b s k d / N (N-1)/N."""
    found = exchanges(compiled("dropless", cluster))
    assert [(one.kind, one.axes) for one in found] == [("ragged-all-to-all", ("expert",))] * 4
    assert [one.is_backward for one in found].count(True) == 2
    assert {one.bytes_sent_per_device for one in found} == {cost.moe_all_to_all(2 * WIDTH, TOKENS, K, ranks).bytes_sent}
    assert {one.dtype for one in found} == {"bf16"}
    counts = [one for one in census(compiled("dropless", cluster)[1].module, {"expert": ranks}) if one.dtype == "s32"]
    assert [(one.kind, one.module) for one in counts] == [("all-to-all", "dispatch/counts")]


@pytest.mark.matrix
def test_quantized_rows_are_ragged_bytes(compiled):
    found = exchanges(compiled("quantized"))
    assert sorted(one.dtype for one in found) == ["bf16"] * 3 + ["u8"]
    (in_bytes,) = (one for one in found if one.dtype == "u8")
    row_bytes = cost.quantized_bytes(WIDTH)
    assert in_bytes.bytes_sent_per_device == cost.moe_all_to_all(row_bytes, TOKENS, K, 8).bytes_sent


def test_buffers_travel_whole(compiled):
    found = exchanges(compiled("buffers"))
    assert [one.kind for one in found] == ["all-to-all"] * 4
    padding = EXPERTS * ROOM / (TOKENS * K)
    expected = cost.moe_all_to_all(2 * WIDTH, TOKENS, K, 8, padding=padding)
    assert {one.bytes_sent_per_device for one in found} == {expected.bytes_sent}


@pytest.mark.matrix
def test_two_levels_send_less_often_across(compiled):
    found = exchanges(compiled("two levels"))
    assert {one.kind for one in found} == {"collective-permute"}
    closed = cost.hierarchical_all_to_all(2 * WIDTH * EXPERTS * ROOM, 8, inner=4)
    for axis, level in (("inner", closed.inside), ("outer", closed.across)):
        assert sum(one.bytes_sent_per_device for one in found if one.axes == (axis,)) == 4 * level.bytes_sent


@pytest.mark.parametrize(("form", "work"), [("chunked", "while"), ("buffers, chunked", "gemm|dot|cublas")])
def test_chunks_travel_while_the_experts_of_another_compute(compiled, form, work):
    """All but what nothing is left to hide behind: the first to go and the last to come back, each way."""
    _, program = compiled(form)
    beside = []
    for computation in program.module.computations.values():
        under_way = {}
        for ins in computation:
            called = " ".join([ins.opcode, ins.name, *(name for _, name in ins.called)])
            if ins.opcode.endswith("-start") and "all-to-all" in called:
                under_way[ins.name] = 0
            elif ins.opcode.endswith("-done") and ins.operands[0] in under_way:
                beside.append(under_way.pop(ins.operands[0]))
            elif re.search(work, called + ins.metadata.op_name) and "grouped_matmul" in ins.metadata.op_name:
                under_way = {name: count + 1 for name, count in under_way.items()}
    assert len(exchanges(compiled(form))) == 8
    assert sum(count > 0 for count in beside) >= 4


def test_counts_of_slices_are_messages_of_their_own(compiled):
    """As one, which XLA makes of two all-gathers, a slice's rows would wait for the routing of the other."""
    mesh, program = compiled("in slices")
    counts = [one for one in census(program.module, mesh) if one.dtype == "s32"]
    assert len({(one.computation, one.name) for one in counts}) == len(counts) == 2
