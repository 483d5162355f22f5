"""`dispatch` as scheduled by XLA for GPUs, compiled without a GPU: messages and their overlap."""

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
CAPACITY = 160
OPTIONS = {
    "dropless": {},
    "quantized": {"payload": Payload(dispatch="fp8")},
    "chunked": {"chunks": 2},
    "buffers, chunked": {"capacity": CAPACITY // 2, "chunks": 2},
    "in slices": {"slices": 2},
}


@pytest.fixture(scope="module")
def compiled(pod):
    """Return a cached function from a name in `OPTIONS` to (mesh, program) of the loss and all gradients."""
    return functools.cache(lambda name, cluster="h100:1x8": program(pod, cluster, **OPTIONS[name]))


def program(pod, cluster, axes=None, slices=1, **options):
    ranks = math.prod(int(number) for number in re.findall(r"\d+", cluster)[1:])
    axes = axes or {"expert": ranks}
    num_experts = max(EXPERTS, ranks)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    axis = tuple(axes) if len(axes) > 1 else next(iter(axes))

    def one_device(x, experts, weights, up, down):
        typical = TOKENS * K // options.get("chunks", 1)

        def expert_fn(rows, sizes):
            h = jax.nn.gelu(grouped_matmul(rows, up, sizes, typical_rows=typical))
            return grouped_matmul(h, down, sizes, typical_rows=typical)

        inputs = zip(*(jnp.split(array, slices) for array in (x, experts, weights)), strict=True)
        run = functools.partial(dispatch, expert_fn=expert_fn, axis=axis, num_experts=num_experts, **options)
        return jnp.concatenate([run(*arrays)[0] for arrays in inputs])

    rows = P(axis)
    view = jax.shard_map(one_device, mesh=mesh, in_specs=rows, out_specs=rows)

    def loss(x, weights, up, down, experts):
        return jnp.sum(jnp.sin(view(x, experts, weights, up, down).astype("float32")))

    tokens = ranks * TOKENS
    shapes = ((tokens, WIDTH), (tokens, K), (num_experts, WIDTH, HIDDEN), (num_experts, HIDDEN, WIDTH), (tokens, K))
    dtypes = "bfloat16", "float32", "bfloat16", "bfloat16", "int32"
    sharding = NamedSharding(mesh, rows)
    arrays = [jax.ShapeDtypeStruct(*array, sharding=sharding) for array in zip(shapes, dtypes, strict=True)]
    return mesh, pod.compile(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(*arrays), cluster)


def row_exchanges(mesh, program):
    messages = census(program.module, mesh)
    return [m for m in messages if m.module.startswith(("dispatch", "combine")) and m.dtype != "s32"]


@pytest.mark.parametrize(("cluster", "ranks"), [("h100:1x8", 8), ("h100:8x8", 64)])
def test_dropless_is_ragged_on_gpus(compiled, cluster, ranks):
    """Two ragged all-to-alls in each direction, which send T k d (N-1)/N numbers."""
    messages = row_exchanges(*compiled("dropless", cluster))
    assert [(m.kind, m.axes) for m in messages] == [("ragged-all-to-all", ("expert",))] * 4
    assert [m.is_backward for m in messages].count(True) == 2
    expected = cost.moe_all_to_all(2 * WIDTH, TOKENS, K, ranks)
    assert {m.bytes_sent_per_device for m in messages} == {expected.bytes_sent}
    assert {m.dtype for m in messages} == {"bf16"}
    counts = [m for m in census(compiled("dropless", cluster)[1].module, {"expert": ranks}) if m.dtype == "s32"]
    assert [(m.kind, m.module) for m in counts] == [("all-to-all", "dispatch/counts")]


@pytest.mark.matrix
def test_quantized_rows_are_ragged_bytes(compiled):
    messages = row_exchanges(*compiled("quantized"))
    assert sorted(m.dtype for m in messages) == ["bf16"] * 3 + ["u8"]
    (in_bytes,) = (m for m in messages if m.dtype == "u8")
    row_bytes = cost.quantized_bytes(WIDTH)
    assert in_bytes.bytes_sent_per_device == cost.moe_all_to_all(row_bytes, TOKENS, K, 8).bytes_sent


@pytest.mark.parametrize(("name", "work"), [("chunked", "while"), ("buffers, chunked", "gemm|dot|cublas")])
def test_chunks_overlap_with_experts(compiled, name, work):
    """All exchanges overlap with matmuls, except the first and the last in each direction."""
    _, program = compiled(name)
    overlapped = []
    for computation in program.module.computations.values():
        pending = {}
        for ins in computation:
            called = " ".join([ins.opcode, ins.name, *(callee for _, callee in ins.called)])
            if ins.opcode.endswith("-start") and "all-to-all" in called:
                pending[ins.name] = 0
            elif ins.opcode.endswith("-done") and ins.operands[0] in pending:
                overlapped.append(pending.pop(ins.operands[0]))
            elif re.search(work, called + ins.metadata.op_name) and "grouped_matmul" in ins.metadata.op_name:
                pending = {start: count + 1 for start, count in pending.items()}
    assert len(row_exchanges(*compiled(name))) == 8
    assert sum(count > 0 for count in overlapped) >= 4


def test_counts_of_batch_slices_are_separate_messages(compiled):
    """XLA would combine all-gathers, and a slice would wait for the routing of the other."""
    mesh, program = compiled("in slices")
    counts = [m for m in census(program.module, mesh) if m.dtype == "s32"]
    assert len({(m.computation, m.name) for m in counts}) == len(counts) == 2
