"""`dispatch` as scheduled by XLA for GPUs, compiled without a GPU: messages and their overlap."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.inspect.census import census
from meshpar.moe import dispatch, grouped_matmul

pytestmark = pytest.mark.pod

TOKENS, K, EXPERTS, WIDTH, HIDDEN, RANKS = 1024, 2, 16, 512, 1024, 8
OPTIONS = {"chunked": {"chunks": 2}, "buffers, chunked": {"capacity": 80, "chunks": 2}, "in slices": {"slices": 2}}


@pytest.fixture(scope="module")
def compiled(pod):
    """Return a cached function from a name in `OPTIONS` to (census, program) of the loss and all gradients."""
    return functools.cache(lambda name: program(pod, **OPTIONS[name]))


def program(pod, slices=1, **options):
    mesh = AbstractMesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))

    def one_device(x, experts, weights, up, down):
        typical = TOKENS * K // options.get("chunks", 1)

        def expert_fn(rows, sizes):
            h = jax.nn.gelu(grouped_matmul(rows, up, sizes, typical_rows=typical))
            return grouped_matmul(h, down, sizes, typical_rows=typical)

        inputs = zip(*(jnp.split(array, slices) for array in (x, experts, weights)), strict=True)
        run = functools.partial(dispatch, expert_fn=expert_fn, axis="expert", num_experts=EXPERTS, **options)
        return jnp.concatenate([run(*arrays)[0] for arrays in inputs])

    rows = P("expert")
    view = jax.shard_map(one_device, mesh=mesh, in_specs=rows, out_specs=rows)

    def loss(x, weights, up, down, experts):
        return jnp.sum(jnp.sin(view(x, experts, weights, up, down).astype("float32")))

    tokens = RANKS * TOKENS
    shapes = ((tokens, WIDTH), (tokens, K), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (tokens, K))
    dtypes = "bfloat16", "float32", "bfloat16", "bfloat16", "int32"
    sharding = NamedSharding(mesh, rows)
    arrays = [jax.ShapeDtypeStruct(*array, sharding=sharding) for array in zip(shapes, dtypes, strict=True)]
    compiled = pod.compile(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(*arrays), "h100:1x8")
    return census(compiled.module, mesh), compiled


@pytest.mark.parametrize(("name", "work"), [("chunked", "while"), ("buffers, chunked", "gemm|dot|cublas")])
def test_chunks_overlap_with_experts(compiled, name, work):
    """All exchanges overlap with matmuls, except the first and the last in each direction."""
    messages, program = compiled(name)
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
    rows = [m for m in messages if m.module.startswith(("dispatch", "combine")) and m.dtype != "s32"]
    assert len(rows) == 8
    assert sum(count > 0 for count in overlapped) >= 4


def test_counts_of_batch_slices_are_separate_messages(compiled):
    """XLA would combine all-gathers, and a slice would wait for the routing of the other."""
    counts = [m for m in compiled("in slices")[0] if m.dtype == "s32"]
    assert len({(m.computation, m.name) for m in counts}) == len(counts) == 2
