"""The census of saved programs, hand-written collectives, mesh axes from replica groups, and bytes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.collectives.attention import WINDOWS
from meshpar.inspect import census as compiled
from meshpar.inspect.census import Total, axes_of, bytes_sent, census, on_stage, per_array, totals
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.groups import parse_groups
from meshpar.inspect.program import compile_here
from tests.errors import raises

VERSIONS = ("jax0.10", "jax0.12")
MESH = {"data": 2, "tensor": 4}
BY_TENSOR, BY_DATA = "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups=[4,2]<=[2,4]T(1,0)"
MERGED = 'metadata={op_name="jit(f)/step/(mlp/mul:jit(g)/norm/reduce_sum)"}'
OFFSETS = "i = s64[4] constant({0, 2, 4, 6})"
ON_TENSOR = f"channel_id=1, {BY_TENSOR}, use_global_device_ids=true"


def module_of(body: str, before: str = "", header: str = "HloModule m, num_partitions=8"):
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    add = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
    return hlo.parse(
        f"{header}\n{add}{textwrap.dedent(before)}\nENTRY e {{\n  p = f32[8,4] parameter(0)\n{lines}\n}}\n"
    )


def only(body: str, mesh=MESH, **kwargs):
    (found,) = census(module_of(body, **kwargs), mesh)
    return found


def summary(found):
    """Return a summary of each collective, as a multiset."""
    return Counter((c.kind, c.axes, c.dtype, c.payload_bytes, c.bytes_sent_per_device, c.count_per_step) for c in found)


# Saved programs. In `scan` an all-gather combines both weights of a layer, with local shapes [8,32] and [32,8].


@pytest.mark.parametrize("version", VERSIONS)
def test_fsdp_and_tensor_parallelism_on_cuda(saved, programs, version):
    found = census(saved["scan", "cuda", version], programs.MESHES["scan"])
    layers, weights, activation = programs.LAYERS, 2 * 32 * 32 * 2, 16 * 32 * 2
    gathers = ("all-gather", ("fsdp",), "bf16", weights, weights * 3 / 4, layers)
    assert summary(found) == Counter(
        {
            gathers: 2,  # forward and backward
            ("reduce-scatter", ("fsdp",), "bf16", weights, weights * 3 / 4, layers): 1,
            ("all-reduce", ("tensor",), "bf16", activation, float(activation), layers): 2,
            ("all-reduce", ("fsdp",), "f32", 4, 6.0, 1): 1,  # the loss
        }
    )
    assert all(c.origin == "partitioner" for c in found)
    assert all(c.in_loop == (c.count_per_step == layers) for c in found)
    by_pass = Counter((c.kind, c.is_backward) for c in found if c.in_loop)
    assert by_pass["all-gather", True] == by_pass["all-gather", False] == 1
    assert by_pass["reduce-scatter", True] == 1
    assert any(c.is_async for c in found)
    assert not any(c.reduce_scatter_as_all_reduce or c.is_promoted for c in found)


@pytest.mark.parametrize("version", VERSIONS)
def test_cpu_lowers_reduce_scatter_as_all_reduce(saved, programs, version):
    found = census(saved["scan", "cpu", version], programs.MESHES["scan"])
    (scatter,) = [c for c in found if c.reduce_scatter_as_all_reduce]
    assert (scatter.kind, scatter.logical_kind, scatter.axes) == ("all-reduce", "reduce-scatter", ("fsdp",))
    assert (scatter.count_per_step, scatter.is_backward) == (programs.LAYERS, True)
    assert [array.dims for array in scatter.arrays] == [(32, 32), (32, 32)]
    assert Counter((c.logical_kind, c.axes, c.count_per_step) for one in found for c in per_array(one)) == Counter(
        {
            ("all-gather", ("fsdp",), 4): 4,
            ("reduce-scatter", ("fsdp",), 4): 2,
            ("all-reduce", ("tensor",), 4): 2,
            ("all-reduce", ("fsdp",), 1): 1,
        }
    )
    assert not any(c.is_async for c in found)
    # XLA:CPU sums bfloat16 as float32: the wire's type is not the program's, and the record says so.
    assert {c.dtype for c in found} == {"f32"}
    assert {c.axes for c in found if c.is_promoted} == {("tensor",), ("fsdp",)}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("version", VERSIONS)
def test_explicit_collectives(saved, platform, version):
    found = census(saved["kernels", platform, version], MESH)
    n = 32 * 16 * 4
    expected = {
        ("all-reduce", ("tensor",), "f32", n, 2 * 3 / 4 * n, 1): 1,
        ("all-gather", ("tensor",), "f32", 4 * n, 3.0 * n, 1): 1,
        ("reduce-scatter", ("data",), "f32", n, n / 2, 1): 1,
        ("all-to-all", ("tensor",), "f32", n, 3 / 4 * n, 1): 1,
        ("collective-permute", ("tensor",), "f32", n, float(n), 1): 1,
        ("all-reduce", ("data", "tensor"), "f32", n, 2 * 7 / 8 * n, 1): 1,
        ("collective-permute", ("data",), "f32", n, float(n), 5): 1,
        ("all-reduce", ("data",), "f32", n, float(n), 1): 2,
    }
    if platform != "cpu":
        # It receives into half as many rows as it has to send.
        expected[("ragged-all-to-all", ("tensor",), "f32", n // 2, 3 / 8 * n, 1)] = 1
        expected[("collective-broadcast", ("tensor",), "f32", n, float(n), 1)] = 1
    assert summary(found) == Counter(expected)
    assert {c.origin for c in found} == {"kernel"}
    assert [c.in_branch for c in found].count(True) == 2
    assert {len(c.loops) for c in found if c.count_per_step == 5} == {1}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_have_scope_and_source(saved, programs, platform, version):
    for program, scopes in (("scan", {"", "decoder", "decoder/mlp"}), ("kernels", {"", "hand"})):
        found = census(saved[program, platform, version], programs.MESHES[program])
        assert {c.module for c in found} <= scopes
        named = [c for c in found if c.module]
        assert len(named) >= len(found) - 2
        assert all("/programs.py:" in c.source for c in named)


def test_totals_per_axis_and_kind(saved, programs):
    found = census(saved["scan", "cuda", "jax0.12"], programs.MESHES["scan"])
    assert totals(found) == {
        "fsdp": {
            "all-gather": Total(8, 8 * 3072.0),
            "reduce-scatter": Total(4, 4 * 3072.0),
            "all-reduce": Total(1, 6.0),
        },
        "tensor": {"all-reduce": Total(8, 8 * 1024.0)},
    }
    assert list(totals(census(saved["kernels", "cpu", "jax0.12"], MESH))) == ["tensor", "data*tensor", "data"]


# Forms planted by hand


@pytest.mark.parametrize(
    ("body", "kind", "payload", "sent"),
    [
        (f"r = f32[8,4] all-reduce(p), {ON_TENSOR}, to_apply=add", "all-reduce", 128, 192.0),
        (f"r = f32[32,4] all-gather(p), {ON_TENSOR}, dimensions={{0}}", "all-gather", 512, 384.0),
        (f"r = f32[2,4] reduce-scatter(p), {ON_TENSOR}, dimensions={{0}}, to_apply=add", "reduce-scatter", 128, 96.0),
        (f"r = f32[8,4] all-to-all(p), channel_id=1, {BY_TENSOR}, dimensions={{0}}", "all-to-all", 128, 96.0),
        (f"r = f32[8,4] collective-broadcast(p), channel_id=1, {BY_TENSOR}", "collective-broadcast", 128, 128.0),
        ("r = f32[8,4] collective-permute(p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
         "collective-permute", 128, 128.0),
        (f"{OFFSETS}\nr = f32[8,4] ragged-all-to-all(p, p, i, i, i, i), channel_id=1, {BY_TENSOR}",
         "ragged-all-to-all", 128, 96.0),
        (f"{OFFSETS}\nq = f32[2,4] slice(p), slice={{[0:2], [0:4]}}\n"
         f"r = f32[2,4] ragged-all-to-all(p, q, i, i, i, i), channel_id=1, {BY_TENSOR}",
         "ragged-all-to-all", 32, 24.0),
    ],
)  # fmt: skip
def test_plain_forms(body, kind, payload, sent):
    found = only(body)
    assert (found.kind, found.axes, found.group_size) == (kind, ("tensor",), 4)
    assert (found.payload_bytes, found.bytes_sent_per_device) == (payload, sent)
    assert not found.is_async


@pytest.mark.parametrize(
    "shape", ["f32[8,4]", "((f32[8,4]), f32[8,4])", "(f32[8,4], f32[8,4])"], ids=["bare", "nested", "pair"]
)
@pytest.mark.parametrize("is_sync", [False, True])
def test_start_shapes_count_once(shape, is_sync):
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    found = only(f"""
        s = {shape} all-reduce-start(p), {ON_TENSOR}, to_apply=add, {config}
        d = f32[8,4] all-reduce-done(s)
    """)
    assert (found.kind, found.payload_bytes, found.name) == ("all-reduce", 128, "s")
    assert found.is_async is not is_sync


@pytest.mark.parametrize(
    ("body", "name", "computation"),
    [
        ("s = ((f32[8,4]), f32[2,4], u32[]) async-start(p), calls=wrapped, metadata={op_name=\"jit(f)/mlp/add\"}\n"
         "u = ((f32[8,4]), f32[2,4], u32[]) async-update(s), calls=wrapped\n"
         "d = f32[2,4] async-done(u), calls=wrapped", "r", "wrapped"),
        (f"s = ((f32[8,4]), f32[2,4]) reduce-scatter-start(p), {ON_TENSOR}, dimensions={{0}}, to_apply=add, "
         "calls=wrapped, metadata={op_name=\"jit(f)/mlp/add\"}\nd = f32[2,4] reduce-scatter-done(s)", "s", "e"),
    ],
)  # fmt: skip
def test_async_start_with_computation_counts_once(body, name, computation):
    found = only(
        body,
        before=f"""
        wrapped {{
          q = f32[8,4] parameter(0)
          ROOT r = f32[2,4] reduce-scatter(q), {ON_TENSOR}, dimensions={{0}}, to_apply=add
        }}
        """,
    )
    assert (found.kind, found.is_async, found.module) == ("reduce-scatter", True, "mlp")
    assert (found.name, found.computation) == (name, computation)


def test_combined_collectives_can_be_split():
    found = only(f"""
        q = bf16[8] parameter(1)
        r = (f32[32,4], bf16[32]) all-gather(p, q), {ON_TENSOR}, dimensions={{0}}
    """)
    assert (found.dtype, found.payload_bytes, found.bytes_sent_per_device) == ("f32+bf16", 576, 432.0)
    parts = per_array(found)
    assert [(part.dtype, part.payload_bytes, part.bytes_sent_per_device) for part in parts] == [
        ("f32", 512, 384.0),
        ("bf16", 64, 48.0),
    ]
    assert parts[0].groups == found.groups
    assert per_array(parts[0]) == (parts[0],)


def test_totals_of_a_pipeline_are_those_of_the_busiest_stage():
    """The stage with the most collectives need not send the most bytes."""
    body = f"""
        q = f32[80,4] parameter(1)
        r = f32[8,4] all-reduce(p), {ON_TENSOR}, to_apply=add
        t = f32[80,4] all-reduce(q), {ON_TENSOR}, to_apply=add
    """
    small, large = census(module_of(body), MESH)
    counted = [
        dataclasses.replace(small, count_by_stage=(9, 1, 0), count_per_step=9),
        dataclasses.replace(large, count_by_stage=(0, 3, 1), count_per_step=3),
    ]
    ((total,),) = (kinds.values() for kinds in totals(counted).values())
    assert total.count_per_step == 9
    assert total.bytes_sent_per_device == small.bytes_sent_per_device + 3 * large.bytes_sent_per_device
    assert [len(on_stage(counted, stage)) for stage in range(3)] == [1, 2, 1]


def test_all_to_all_of_many_operands_is_one_array():
    found = only(f"""
        q = f32[2,4] slice(p), slice={{[0:2], [0:4]}}
        r = (f32[2,4], f32[2,4], f32[2,4], f32[2,4]) all-to-all(q, q, q, q), channel_id=1, {BY_TENSOR}
    """)
    assert (found.payload_bytes, found.bytes_sent_per_device) == (128, 96.0)
    assert per_array(found) == (found,)


def test_send_and_receive():
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5}}}"
    found = census(
        module_of(f"""
            t = token[] after-all()
            s = (f32[8,4], u32[], token[]) send(p, t), channel_id=3, {pairs}
            r = (f32[8,4], u32[], token[]) recv(t), channel_id=3, {pairs}
            sd = token[] send-done(s), channel_id=3
            rd = (f32[8,4], token[]) recv-done(r), channel_id=3
        """),
        MESH,
    )
    assert [(c.kind, c.axes, c.group_size, c.payload_bytes, c.bytes_sent_per_device) for c in found] == [
        ("send", ("data",), 4, 128, 128.0),
        ("recv", ("data",), 4, 128, 0.0),
    ]


def test_host_transfers_are_not_collectives():
    body = "t = token[] after-all()\ns = (f32[8,4], u32[], token[]) send(p, t), channel_id=3, is_host_transfer=true"
    assert census(module_of(body), MESH) == ()


def test_collectives_without_communication_are_left_out():
    for line in (
        "all-reduce(p), channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true, to_apply=add",
        "collective-permute(p), channel_id=1, source_target_pairs={}",
        "collective-permute(p), channel_id=1, source_target_pairs={{0,0},{1,1}}",
        "all-reduce(p), replica_groups={}, to_apply=add",  # over replicas, and there is a single replica
    ):
        assert census(module_of(f"r = f32[8,4] {line}"), MESH) == (), line


@pytest.mark.parametrize(
    ("attributes", "header"),
    [
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", "HloModule m, num_partitions=8"),
        ("channel_id=1, replica_groups={{0}}", "HloModule m, num_partitions=8"),
        ("channel_id=1, replica_groups={}", "HloModule m, num_partitions=8"),
        ("replica_groups={}", "HloModule m, replica_count=8"),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", "HloModule m, replica_count=8"),
    ],
)
def test_formats_of_all_devices(attributes, header):
    for result in (
        "f32[8,4] all-reduce(p), to_apply=add", "f32[1,4] reduce-scatter(p), to_apply=add, dimensions={0}",
        "f32[64,4] all-gather(p), dimensions={0}",
    ):  # fmt: skip
        found = only(f"r = {result}, {attributes}", header=header)
        assert (found.axes, found.group_size) == (("data", "tensor"), 8)


def test_all_to_all_groups_are_partitions():
    assert only(f"r = f32[8,4] all-to-all(p), channel_id=1, {BY_DATA}, dimensions={{0}}").axes == ("data",)


def test_partitioner_annotation_overrides_primitive_name():
    line = f'r = f32[8,4] all-reduce(p), {ON_TENSOR}, to_apply=add, metadata={{op_name="jit(f)/shard_map/psum"}}'
    assert only(line).origin == "kernel"
    assert only(line + ', frontend_attributes={is_spmd_generated="true"}').origin == "partitioner"
    assert only(line.replace("shard_map/psum", "mlp/dot_general")).origin == "partitioner"


def test_unnamed_collective_takes_name_of_input():
    metadata = 'metadata={op_name="jit(f)/transpose(jvp(mlp))/mul" source_file="a.py" source_line=7}'
    found = only(f"""
        m = f32[8,4] multiply(p, p), {metadata}
        v = f32[8,4] bitcast(m)
        r = f32[2,4] reduce-scatter(v), {ON_TENSOR}, dimensions={{0}}, to_apply=add
    """)
    assert (found.module, found.source, found.is_backward, found.origin) == ("mlp", "a.py:7", True, "partitioner")


# Loops and branches

LOOP = f"""
inner {{
  s = (s32[], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[8,4] get-tuple-element(s), index=1
  c = s32[] constant(1)
  n = s32[] add(i, c)
  r = f32[8,4] all-reduce(x), {ON_TENSOR}, to_apply=add
  ROOT t = (s32[], f32[8,4]) tuple(n, r)
}}
test {{
  s = (s32[], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  c = s32[] constant(10)
  ROOT b = pred[] compare(i, c), direction=LT
}}
outer {{
  s = (s32[], f32[8,4]) parameter(0)
  w = (s32[], f32[8,4]) while(s), condition=test, body=inner, backend_config={{"known_trip_count":{{"n":"6"}}}}
  i = s32[] get-tuple-element(s), index=0
  c = s32[] constant(1)
  n = s32[] add(i, c)
  x = f32[8,4] get-tuple-element(w), index=1
  ROOT t = (s32[], f32[8,4]) tuple(n, x)
}}
"""


def looped(body):
    return only("z = s32[] constant(0)\nt = (s32[], f32[8,4]) tuple(z, p)\n" + body, before=LOOP)


def test_trip_counts_of_nested_loops_multiply():
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    found = looped(f"w = (s32[], f32[8,4]) while(t), condition=test, body=outer, {known}")
    assert (found.count_per_step, found.count_known, found.in_loop) == (30, True, True)
    assert [(loop.name, loop.body, loop.trip_count) for loop in found.loops] == [("w", "outer", 5), ("w", "inner", 6)]
    assert found.bytes_sent_per_step == 30 * 192.0


def test_unknown_loop_length_counts_once():
    found = looped("w = (s32[], f32[8,4]) while(t), condition=test, body=inner")
    assert (found.count_per_step, found.count_known, found.loops[0].trip_count) == (1, False, None)


def test_calls_branches_and_fusions_are_entered():
    before = f"""
    side {{
      q = f32[8,4] parameter(0)
      ROOT r = f32[8,4] all-reduce(q), {ON_TENSOR}, to_apply=add
    }}
    """
    assert only("c = f32[8,4] call(p), to_apply=side", before=before).in_branch is False
    assert only("c = f32[8,4] fusion(p), kind=kCustom, calls=side", before=before).computation == "side"
    body = "i = pred[] parameter(1)\nc = f32[8,4] conditional(i, p, p), true_computation=side, false_computation=side"
    assert [c.in_branch for c in census(module_of(body, before=before), MESH)] == [True, True]


@pytest.mark.parametrize(
    ("selector", "branches"),
    [
        ("s32[] add(i, c)", "branch_computations={over_tensor, over_data}"),
        # The false branch of a predicate has the index 0, and HLO lists it last.
        ("pred[] compare(i, c), direction=LT", "true_computation=over_data, false_computation=over_tensor"),
    ],
)
def test_branches_of_windows_run_for_their_share_of_the_layers(selector, branches):
    chosen = f"""
    over_tensor {{
      q = f32[8,4] parameter(0)
      ROOT r = f32[8,4] all-reduce(q), {ON_TENSOR}, to_apply=add
    }}
    over_data {{
      q = f32[8,4] parameter(0)
      ROOT r = f32[8,4] all-reduce(q), channel_id=1, {BY_DATA}, use_global_device_ids=true, to_apply=add
    }}
    layers {{
      s = (s32[], f32[8,4]) parameter(0)
      i = s32[] get-tuple-element(s), index=0
      x = f32[8,4] get-tuple-element(s), index=1
      c = s32[] constant(1)
      n = s32[] add(i, c)
      k = {selector}
      r = f32[8,4] conditional(k, x, x), {branches}, metadata={{op_name="jit(f)/{WINDOWS}3_1/cond"}}
      ROOT t = (s32[], f32[8,4]) tuple(n, r)
    }}
    """
    body = """
        z = s32[] constant(0)
        t = (s32[], f32[8,4]) tuple(z, p)
        w = (s32[], f32[8,4]) while(t), condition=test, body=layers, backend_config={"known_trip_count":{"n":"8"}}
    """
    found = census(module_of(body, before=LOOP + textwrap.dedent(chosen)), MESH)
    assert {c.axes: c.count_per_step for c in found} == {("tensor",): 6, ("data",): 2}
    assert not any(c.in_branch for c in found)


# An all-reduce of which only slices are kept

SLICE = "r = f32[8,4] all-reduce(p), {on}, to_apply=add\n"
HALF = """
part {
  q = f32[8,4] parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  c = f32[8,4] convert(q)
  ROOT d = f32[2,4] dynamic-slice(c, i, z), dynamic_slice_sizes={2,4}
}
view {
  q = f32[8,4] parameter(0)
  ROOT c = f32[8,4] copy(q)
}
"""


@pytest.mark.parametrize(
    ("uses", "is_sliced"),
    [
        ("d = f32[2,4] dynamic-slice(r, i, i), dynamic_slice_sizes={2,4}", True),
        ("b = f32[32] bitcast(r)\nd = f32[8] dynamic-slice(b, i), dynamic_slice_sizes={8}", True),
        ("d = f32[2,4] fusion(r, i), kind=kLoop, calls=part", True),
        (
            "v = f32[8,4] fusion(r), kind=kLoop, calls=view\n"
            "d = f32[2,4] dynamic-slice(v, i, i), dynamic_slice_sizes={2,4}",
            True,
        ),
        ("d = f32[4,4] dynamic-slice(r, i, i), dynamic_slice_sizes={4,4}", False),  # half of it: no part in four
        ("d = f32[2,4] dynamic-slice(r, i, i), dynamic_slice_sizes={2,4}\nn = f32[8,4] negate(r)", False),
        ("v = f32[8,4] fusion(r), kind=kLoop, calls=view\nn = f32[8,4] negate(v)", False),
        ("d = f32[2,4] dynamic-slice(r, i, i), dynamic_slice_sizes={2,4}\nROOT t = (f32[8,4]) tuple(r)", False),
        ("ROOT n = f32[8,4] copy(r)", False),
        ("", False),
    ],
)
def test_sliced_all_reduce(uses, is_sliced):
    found = only("i = s32[] parameter(1)\n" + SLICE.format(on=ON_TENSOR) + uses, before=HALF)
    assert found.reduce_scatter_as_all_reduce is is_sliced
    assert found.logical_kind == ("reduce-scatter" if is_sliced else "all-reduce")


def test_combined_all_reduce_slices_per_array():
    found = only(f"""
        i = s32[] parameter(1)
        r = (f32[8,4], f32[8,4]) all-reduce(p, p), {ON_TENSOR}, to_apply=add
        x = f32[8,4] get-tuple-element(r), index=0
        y = f32[8,4] get-tuple-element(r), index=1
        d = f32[2,4] dynamic-slice(y, i, i), dynamic_slice_sizes={{2,4}}
        n = f32[8,4] negate(x)
    """)
    assert found.sliced == (False, True)
    assert not found.reduce_scatter_as_all_reduce
    assert [part.logical_kind for part in per_array(found)] == ["all-reduce", "reduce-scatter"]


def test_array_read_twice_is_sliced_if_both_reads_are():
    body = f"""
        i = s32[] parameter(1)
        r = (f32[8,4], f32[8,4]) all-reduce(p, p), {ON_TENSOR}, to_apply=add
        x = f32[8,4] get-tuple-element(r), index=0
        y = f32[8,4] get-tuple-element(r), index=0
        d = f32[2,4] dynamic-slice(y, i, i), dynamic_slice_sizes={{2,4}}
        e = f32[2,4] %s(x, i, i), dynamic_slice_sizes={{2,4}}
    """
    assert only(body % "dynamic-slice").sliced == (True, False)
    assert only(body % "custom-call").sliced == (False, False)


def test_async_all_reduce_slices_after_done():
    found = only(f"""
        i = s32[] parameter(1)
        s = f32[8,4] all-reduce-start(p), {ON_TENSOR}, to_apply=add
        r = f32[8,4] all-reduce-done(s)
        d = f32[2,4] dynamic-slice(r, i, i), dynamic_slice_sizes={{2,4}}
    """)
    assert found.reduce_scatter_as_all_reduce


# Axes from groups


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    chosen=st.lists(st.booleans(), min_size=5, max_size=5),
    shuffle=st.randoms(use_true_random=False),
)
def test_axes_of_any_product_of_axes(sizes, chosen, shuffle):
    axes = {f"a{at}": size for at, size in enumerate(sizes)}
    picked = [name for name, pick in zip(axes, chosen, strict=False) if pick]
    mesh = ",".join(f"'{name}'={size}" for name, size in axes.items())
    over = ",".join(f"'{name}'" for name in picked)
    groups = [list(group) for group in parse_groups(f"mesh[{mesh}] {{{over}}}")]
    for group in groups:
        shuffle.shuffle(group)
    shuffle.shuffle(groups)
    assert axes_of(tuple(map(tuple, groups)), axes) == tuple(name for name in picked if axes[name] > 1)


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3), (4, 5), (6, 7)),  # half of `tensor`
        ((0, 5), (1, 4), (2, 7), (3, 6)),  # a diagonal
        ((0, 1, 2, 3), (4, 5, 6)),
        ((0, 1, 2, 3),),  # not all devices
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (4, 5, 6, 8)),
        (),
    ],
)
def test_axes_of_other_groups_are_unknown(groups):
    assert axes_of(groups, MESH) == ("unknown",)


def test_axes_of_pairs():
    assert axes_of(((0, 1), (1, 0)), MESH, pairwise=True) == ("tensor",)
    assert axes_of(((0, 4),), MESH, pairwise=True) == ("data",)
    assert axes_of(((0, 5), (5, 0)), MESH, pairwise=True) == ("data", "tensor")
    assert axes_of(((2, 2),), MESH, pairwise=True) == ()


@pytest.mark.parametrize("kind", compiled.KINDS)
def test_ring_formulas(kind):
    expected = {"all-reduce": 2 * 7 / 8, "collective-broadcast": 1, "collective-permute": 1, "send": 1, "recv": 0}
    assert bytes_sent(kind, 14_000_000_000, 8) == expected.get(kind, 7 / 8) * 14e9


def test_mesh_of_another_size_raises():
    with raises("conflict", "program"):
        census(module_of("r = f32[8,4] copy(p)"), {"data": 4})


def test_new_program(mesh8):
    """Compile with the installed jax: a matmul over a sharded contracted dim, and a gather."""
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh8, P("fsdp", "tensor")))
    w = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh8, P("tensor", None)))
    out = NamedSharding(mesh8, P(None, None))
    found = census(compile_here(jax.jit(lambda x, w: x @ w, out_shardings=out).trace(x, w)).module, mesh8)
    assert Counter((c.kind, c.axes, c.payload_bytes) for c in found) == Counter(
        {("all-reduce", ("tensor",), 2 * 4 * 4): 1, ("all-gather", ("fsdp",), 8 * 4 * 4): 1}
    )
    assert all(c.source.startswith(__file__) and c.origin == "partitioner" for c in found)


def test_concatenated_arrays_are_split():
    """XLA's GPU compiler reduces many gradients as one flat array."""
    before = """
    lay (a: f32[32], b: f32[6]) -> f32[38] {
      a = f32[32] parameter(0)
      b = f32[6] parameter(1)
      ROOT c = f32[38] concatenate(a, b), dimensions={0}
    }
    """
    found = only(
        f"""
        x = f32[32] bitcast(p), metadata={{op_name="jit(f)/mlp/dot_general"}}
        z = f32[6] constant(0), metadata={{op_name="jit(f)/head/dot_general"}}
        j = f32[38] fusion(x, z), kind=kLoop, calls=lay
        r = f32[38] all-reduce(j), {ON_TENSOR}, to_apply=add
    """,
        before=before,
    )
    assert found.payload_bytes == 4 * 38
    assert [(one.module, one.payload_bytes) for one in per_array(found)] == [("mlp", 128), ("head", 24)]


def test_merged_name_is_split_per_array():
    found = only(f"""
        q = f32[2] constant(0)
        r = (f32[8,4], f32[2]) all-reduce(p, q), {ON_TENSOR}, to_apply=add, {MERGED}
    """)
    assert [one.op_name for one in per_array(found)] == ["jit(f)/step/mlp/mul", "jit(f)/step/jit(g)/norm/reduce_sum"]
