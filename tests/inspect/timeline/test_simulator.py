"""Streams, waiting and hiding, worked out by hand on small programs and checked for sense on real ones.

On the cluster used here a kernel `copy` of 0.5 MB (read and written) and a permute of 1 MB take a millisecond each.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshpar as mp
from meshpar.hardware.catalogue import GPUS
from meshpar.hardware.clusters import MATMUL_EFFICIENCY, Cluster, Link, parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline.simulator import Timeline, timeline
from meshpar.models import TransformerConfig, next_token_loss

GPU = dataclasses.replace(
    GPUS["h100"],
    bf16_flops_per_s=1e9 / MATMUL_EFFICIENCY,  # so that products are expected to run at 1e9
    fp32_flops_per_s=1e8 / MATMUL_EFFICIENCY,
    memory_bytes_per_s=1e9,
    memory_efficiency=1.0,
)
SLOW = Cluster(
    gpu=GPU,
    nodes=1,
    gpus_per_node=8,
    inside=Link(alpha_s=0, bytes_per_s=1e9),
    across=Link(alpha_s=0, bytes_per_s=1e8),
)
MS = 1e-3
MESH = {"data": 2, "tensor": 4}
PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"
HALF_A_MS = "q = f32[62500] slice(h), slice={[0:62500]}"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'


def program(body: str, before: str = "", header: str = "is_scheduled=true, num_partitions=8"):
    """Return a module with parameters `x` of 1 MB, `h` of 0.5 MB, and `a` and `b` of 100 × 100 in bfloat16."""
    add = "add {\n  l = f32[] parameter(0)\n  r = f32[] parameter(1)\n  ROOT s = f32[] add(l, r)\n}\n"
    shapes = {"x": "f32[250000]", "h": "f32[125000]", "a": "bf16[100,100]", "b": "bf16[100,100]"}
    parameters = [f"{name} = {shape} parameter({at})" for at, (name, shape) in enumerate(shapes.items())]
    lines = textwrap.indent("\n".join([*parameters, textwrap.dedent(body).strip()]), "  ")
    return hlo.parse(f"HloModule m, {header}\n{add}{textwrap.dedent(before)}\nENTRY e {{\n{lines}\n}}\n")


def clock(body: str, before: str = "", cluster: Cluster = SLOW, mesh=None) -> Timeline:
    module = program(body, before)
    return timeline(module, census(module, mesh or MESH), cluster)


def start(name="s", of="x", more=""):
    return f"{name} = (f32[250000], f32[250000]) collective-permute-start({of}), {PAIRS}{more}"


def done(name="d", of="s"):
    return f"{name} = f32[250000] collective-permute-done({of})"


def work_(name="k", of="h"):
    return f"{name} = f32[125000] copy({of})"


def check(found: Timeline):
    """Check the invariants of every timeline."""
    exposed = found.exposed_s
    assert found.step_s == pytest.approx(found.compute_s + found.memory_s + found.launch_s + sum(exposed.values()))
    for label, time_s in found.network_s.items():
        assert -1e-12 <= found.hidden_s[label] <= time_s + 1e-12
    for one in found.collectives:
        assert 0 <= one.hidden_s <= one.time_s
        if one.cover == "nothing":
            assert one.hidden_s == 0
    longest = max(found.compute_s + found.memory_s, sum(found.network_s.values()))
    assert found.step_s >= longest * (1 - 1e-9)
    for segment in found.segments:
        for stream in ("compute", "communication"):
            ops = sorted((op for op in segment.ops if op.stream == stream), key=lambda op: (op.start_s, op.end_s))
            assert all(one.end_s <= two.start_s + 1e-12 for one, two in itertools.pairwise(ops))
            assert all(0 <= op.start_s <= op.end_s <= segment.duration_s + 1e-12 for op in ops)


DOT = "k = f32[100,100] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
"""A matmul of 2 ms: 2e6 FLOPs at 1e9 per second."""
UPDATE = "u = (f32[250000], f32[250000]) collective-permute-update(s)"
TWICE = [line.replace("250000", "500000").replace("(x)", "(y)") for line in (start(), done())]
HIDING = {
    "fully hidden": ([start(), work_("k1"), work_("k2", "k1"), done()], 2, 1, 1, "kernels"),
    "half hidden": (["y = f32[500000] parameter(4)", TWICE[0], work_(), TWICE[1]], 2, 2, 1, "kernels"),
    "exposed": ([work_("k1"), start(), done(), work_("k2", "k1")], 3, 1, 0, "nothing"),
    "synchronous": ([f"s = f32[250000] collective-permute(x), {PAIRS}", work_()], 2, 1, 0, "nothing"),
    "synchronous by its configuration": ([start(more=f", {SYNC}"), work_(), done()], 2, 1, 0, "nothing"),
    "behind a matmul": ([start(), DOT, done()], 2, 1, 1, "matmul"),
    "without a done": ([start(), HALF_A_MS], 1, 1, 0.5, "kernels"),
    "done of an update": ([start(), UPDATE, done(of="u"), work_()], 2, 1, 0, "nothing"),
}


@pytest.mark.parametrize(("body", "step", "time", "hidden", "cover"), HIDING.values(), ids=HIDING)
def test_collective_hides_behind_work_until_its_done(body, step, time, hidden, cover):
    found = clock("\n".join([*body[:-1], f"ROOT {body[-1]}"]))
    (one,) = found.collectives
    assert found.step_s == pytest.approx(step * MS)
    assert (one.time_s, one.hidden_s) == (pytest.approx(time * MS), pytest.approx(hidden * MS))
    assert one.exposed_s == found.exposed_s["tensor"] == pytest.approx((time - hidden) * MS)
    assert (one.cover, one.has_nothing_to_hide_behind) == (cover, hidden == 0)
    assert one.hidden_fraction == pytest.approx(hidden / time)
    check(found)
    # With the same time for 1 MB, half of it latency, the step loses the latency unless it is hidden.
    link = Link(alpha_s=0.5 * MS, bytes_per_s=2e9)
    (one,) = clock(
        "\n".join([*body[:-1], f"ROOT {body[-1]}"]), cluster=dataclasses.replace(SLOW, inside=link)
    ).collectives
    assert one.latency_s == pytest.approx(0.5 * MS)
    assert one.lost_s == pytest.approx(0.0 if hidden == time else 0.5 * MS, abs=1e-12)


def test_times_of_a_collective_are_means_over_stages():
    module = program("\n".join([start(), work_(), f"ROOT {done()}"]))
    (one,) = census(module, MESH)
    staged = dataclasses.replace(one, count_by_stage=(4, 0, 1, 1), count_per_step=4)
    (timed,) = timeline(module, [staged], SLOW).collectives
    assert (timed.time_s, timed.hidden_s) == (pytest.approx(1.5 * MS),) * 2


def test_ops_of_both_streams_are_in_order():
    found = clock("\n".join([work_("k1"), start(), DOT, f"ROOT {done()}"]))
    assert [
        (op.name, op.stream, op.kind, round(op.start_s / MS), round(op.end_s / MS)) for op in found.segments[0].ops
    ] == [
        ("k1", "compute", "kernel", 0, 1),
        ("s", "communication", "collective-permute", 1, 2),
        ("k", "compute", "matmul", 1, 3),
    ]
    assert (found.compute_s, found.memory_s, found.bound) == (pytest.approx(2 * MS), pytest.approx(MS), "compute")


def test_kernels_last_at_least_a_launch():
    dot = "k = f32[100,100] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"  # 2 ms
    body = "\n".join([work_("w"), dot, f"ROOT {work_('v')}"])  # 1 ms, 2 ms, 1 ms
    slow = dataclasses.replace(SLOW, launch_s=1.5 * MS)
    found = clock(body, cluster=slow)
    assert (found.step_s, found.launch_s) == (pytest.approx(5 * MS), pytest.approx(2 * 0.5 * MS))
    assert (found.compute_s, found.memory_s) == (pytest.approx(2 * MS), pytest.approx(2 * MS))
    assert clock(body).launch_s == 0
    check(found)
    longest = clock(body, cluster=dataclasses.replace(SLOW, launch_s=10 * MS))
    assert (longest.step_s, longest.bound) == (pytest.approx(30 * MS), "launches")


def test_two_collectives_queue():
    """The second collective waits for the stream, so compute overlaps with the first."""
    body = [start("s1"), start("s2", "x"), work_(), done("d1", "s1"), f"ROOT {done('d2', 's2')}"]
    found = clock("\n".join(body))
    first, second = found.collectives
    assert found.step_s == pytest.approx(2 * MS)
    assert (first.hidden_s, second.hidden_s) == (pytest.approx(MS), pytest.approx(0))
    assert (first.cover, second.cover) == ("kernels", "kernels")
    assert second.has_nothing_to_hide_behind
    check(found)


def test_queue_wait_is_charged_to_running_collective():
    tensor = "channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}"
    gather = "g = (f32[1000000], f32[4000000]) all-gather-start(y), " + tensor
    across = "s = (f32[250000], f32[250000]) collective-permute-start(x), " + (
        "channel_id=1, source_target_pairs={{0,4},{4,0}}"
    )
    body = [
        "y = f32[1000000] parameter(4)",
        gather,
        across,
        work_(),
        f"{done()}",
        "e = f32[4000000] all-gather-done(g)",
    ]
    found = clock("\n".join([*body, "ROOT r = f32[125000] copy(k)"]))
    # gather 3/4 of 16 MB: 0-12 ms, permute 12-13; compute 0-1, waits 1-13, copies 13-14
    assert found.step_s == pytest.approx(14 * MS)
    assert found.exposed_s == {"tensor": pytest.approx(11 * MS), "data": pytest.approx(1 * MS)}
    assert found.hidden_s == {"tensor": pytest.approx(1 * MS), "data": pytest.approx(0)}
    assert found.bound == "network:tensor"
    check(found)


COUNTED = 'backend_config={"known_trip_count":{"n":"%d"}}'


def loop(body: str, name: str = "body"):
    """Computations of a loop over `(x, h)`."""
    return f"""
{name}.cond {{
  t = (f32[250000], f32[125000]) parameter(0)
  ROOT go = pred[] constant(true)
}}
{name} {{
  t = (f32[250000], f32[125000]) parameter(0)
  x = f32[250000] get-tuple-element(t), index=0
  h = f32[125000] get-tuple-element(t), index=1
{textwrap.indent(textwrap.dedent(body).strip(), "  ")}
}}
"""


def call_loop(times: int | None = 3, name="body", result="w"):
    more = ", " + COUNTED % times if times is not None else ""
    carry = "(f32[250000], f32[125000])"
    more = f'metadata={{op_name="jit(f)/layers/while"}}{more}'
    return f"""t.{result} = {carry} tuple(x, h)
{result} = {carry} while(t.{result}), condition={name}.cond, body={name}, {more}"""


HALF_HIDDEN = "\n".join(
    [
        start(),
        HALF_A_MS,
        done(),
        f"{work_()}",
        "ROOT r = (f32[250000], f32[125000]) tuple(d, k)",
    ]
)


def test_loop_time_is_multiplied():
    found = clock(call_loop(3), loop(HALF_HIDDEN))
    (one,) = found.collectives
    assert found.step_s == pytest.approx(6 * MS)  # 1 ms of permute and 1 ms of copy, three times
    assert (one.time_s, one.hidden_s) == (pytest.approx(3 * MS), pytest.approx(1.5 * MS))
    whole, body = found.segments
    assert (body.name, body.module, body.trip_count) == ("w", "layers", 3)
    assert body.duration_s == pytest.approx(2 * MS)
    assert [(op.name, op.start_s, op.end_s) for op in body.ops] == [
        ("q", 0, pytest.approx(0.5 * MS)),
        ("s", 0, pytest.approx(MS)),
        ("k", pytest.approx(MS), pytest.approx(2 * MS)),
    ]
    assert [(op.kind, op.start_s, op.end_s) for op in whole.ops] == [("loop", 0, pytest.approx(6 * MS))]
    check(found)


def test_nested_loops_multiply():
    inner, outer = loop(HALF_HIDDEN), loop(call_loop(3).replace("\nw =", "\nROOT w ="), "outer")
    found = clock(call_loop(5, "outer", "o"), inner + outer)
    assert found.step_s == pytest.approx(30 * MS)
    assert found.network_s == {"tensor": pytest.approx(15 * MS)}
    assert found.collectives[0].time_s == pytest.approx(15 * MS)
    assert [segment.name for segment in found.segments] == ["", "o", "w"]
    check(found)


def test_loop_of_unknown_length_counts_once():
    found = clock(call_loop(None), loop(HALF_HIDDEN))
    assert found.step_s == pytest.approx(2 * MS)
    assert found.loops[0].trip_count is None
    assert len(found.notes) == 1
    assert "loop `w`" in found.notes[0]


def test_loop_with_zero_trips_takes_no_time():
    found = clock(call_loop(0), loop(HALF_HIDDEN))
    assert (found.step_s, found.collectives[0].time_s) == (0, 0)
    assert found.collectives[0].hidden_fraction is None


def test_loop_overlaps_with_collective():
    body = loop(f"{work_()}\nROOT r = (f32[250000], f32[125000]) tuple(x, k)")
    found = clock("\n".join([start(), call_loop(3), f"ROOT {done()}"]), body)
    assert found.step_s == pytest.approx(3 * MS)
    assert found.collectives[0].hidden_s == pytest.approx(MS)
    check(found)


def test_loop_with_collectives_waits_for_stream():
    found = clock("\n".join([start(), call_loop(3), f"ROOT {done()}"]), loop(HALF_HIDDEN))
    assert found.step_s == pytest.approx(7 * MS)
    assert found.collectives[0].hidden_s == 0
    check(found)


def test_longest_branch_is_taken():
    branches = f"""
quick {{
  x = f32[250000] parameter(0)
  ROOT r = f32[250000] bitcast(x)
}}
slow {{
  x = f32[250000] parameter(0)
  ROOT s = f32[250000] collective-permute(x), {PAIRS}
}}
"""
    body = "c = s32[] constant(0)\n"
    body += "ROOT r = f32[250000] conditional(c, x, x), branch_computations={quick, slow}"
    found = clock(body, branches)
    assert found.step_s == pytest.approx(MS)
    assert [op.name for op in found.segments[0].ops] == ["s"]
    check(found)


def test_choice_of_windows_takes_the_mean_of_its_branches():
    branches = f"""
near {{
  x = f32[125000] parameter(0)
  ROOT {work_()}
}}
far {{
  x = f32[125000] parameter(0)
  ROOT r = f32[125000] bitcast(x)
}}
""".replace("(h)", "(x)")
    body = "c = s32[] constant(0)\nROOT r = f32[125000] conditional(c, h, h), branch_computations={near, far}"
    longest = clock(body, branches)
    mean = clock(body + ', metadata={op_name="layers/windows_1_3/cond"}', branches)
    assert longest.step_s > 0
    assert mean.step_s == pytest.approx(longest.step_s / 4)
    check(mean)


def test_call_runs_inline():
    called = f"inner {{\n  h = f32[125000] parameter(0)\n  ROOT {work_()}\n}}"
    found = clock("\n".join([start(), "c = f32[125000] call(h), to_apply=inner", f"ROOT {done()}"]), called)
    assert found.step_s == pytest.approx(MS)
    assert found.collectives[0].hidden_s == pytest.approx(MS)
    assert [(op.name, op.start_s) for op in found.segments[0].ops] == [("k", 0), ("s", 0)]
    check(found)


def test_wrapped_collective_is_async():
    scatter = """
wrapped {
  v = f32[1000000] parameter(0)
  ROOT s = f32[250000] reduce-scatter(v), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=add
}
"""  # noqa: E501
    body = """
      y = f32[1000000] parameter(4)
      s.start = ((f32[1000000]), f32[250000], u32[]) async-start(y), calls=wrapped
      k = f32[125000] copy(h)
      ROOT d = f32[250000] async-done(s.start), calls=wrapped
    """
    found = clock(body, scatter)
    (one,) = found.collectives
    assert one.collective.kind == "reduce-scatter"
    assert (one.time_s, one.hidden_s) == (pytest.approx(3 * MS), pytest.approx(MS))
    assert found.step_s == pytest.approx(3 * MS)
    check(found)


def test_async_fusion_runs_on_compute_stream():
    fused = "inner {\n  h = f32[125000] parameter(0)\n  ROOT n = f32[125000] negate(h)\n}"
    body = """
      f = ((f32[125000]), f32[125000], u32[]) fusion-start(h), kind=kLoop, calls=inner
      k = f32[125000] copy(h)
      ROOT d = f32[125000] fusion-done(f)
    """
    found = clock(body, fused)
    assert found.step_s == pytest.approx(2 * MS)
    assert found.network_s == {}
    check(found)


HOST_COPY = "c = (f32[250000]{0:S(5)}, f32[250000]{0}, u32[]) copy-start(x)"
HOST_DONE = "f = f32[250000]{0:S(5)} copy-done(c)"


@pytest.mark.parametrize(
    ("body", "step"),
    [
        ([HOST_COPY, HOST_DONE, work_()], 2 + 1),
        ([HOST_COPY, work_(), HOST_DONE], 2),
        ([HOST_COPY, work_("k1"), work_("k2", "k1"), work_("k3", "k2"), HOST_DONE], 3),
        ([HOST_COPY, start(), work_(), done(), HOST_DONE], 2),
        ([HOST_COPY, HOST_COPY.replace("c =", "e ="), work_()], 4),
    ],
    ids=["exposed", "half hidden", "hidden", "next to a collective", "queued, without a done"],
)
def test_copies_to_host_memory_overlap_with_kernels(body, step):
    """A megabyte takes 2 ms on this link to the host."""
    cluster = dataclasses.replace(SLOW, gpu=dataclasses.replace(GPU, host_bytes_per_s=5e8))
    found = clock("\n".join(body), cluster=cluster)
    assert found.step_s == pytest.approx(step * MS)
    check(found)


def test_single_device_collectives_are_free():
    alone = "channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, use_global_device_ids=true, to_apply=add"
    found = clock(f"s = f32[250000] all-reduce-start(x), {alone}\n{work_()}\nROOT d = f32[250000] all-reduce-done(s)")
    assert (found.step_s, found.collectives) == (pytest.approx(MS), ())
    check(found)


def test_opaque_kernels_are_reported():
    body = 'ROOT k = f32[125000] custom-call(h), custom_call_target="__triton$kernel"'
    found = clock(body)
    assert found.step_s == pytest.approx(MS)
    assert ["__triton$kernel" in note for note in found.notes] == [True]


GATHER = """
y = f32[1000000] parameter(4)
ROOT g = f32[%d] all-gather(y), channel_id=1, replica_groups=%s, use_global_device_ids=true, dimensions={0}
"""


@pytest.mark.parametrize(
    ("groups", "size", "seconds"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, 12 * MS),  # 3/4 of 16 MB inside a node
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, 40 * MS),  # half of 8 MB between nodes, by one port
        ("{{0,1,2,3,4,5,6,7}}", 8, 28e6 / 4e8),  # 7/8 of 32 MB between nodes, by all four ports of each
    ],
)
def test_groups_across_nodes_use_network(groups, size, seconds):
    nodes = dataclasses.replace(SLOW, nodes=2, gpus_per_node=4)
    found = clock(GATHER % (size * 1000000, groups), cluster=nodes)
    assert found.step_s == pytest.approx(seconds)


def test_measured_link_of_axis_has_priority():
    ring = dataclasses.replace(SLOW, axes={"tensor": Link(alpha_s=0, bytes_per_s=2e9)})
    assert clock(GATHER % (4000000, "{{0,1,2,3},{4,5,6,7}}"), cluster=ring).step_s == pytest.approx(6 * MS)
    other = dataclasses.replace(SLOW, axes={"data": Link(alpha_s=0, bytes_per_s=2e9)})
    assert clock(GATHER % (4000000, "{{0,1,2,3},{4,5,6,7}}"), cluster=other).step_s == pytest.approx(12 * MS)


def test_slowest_group_determines_time():
    """Nodes have five devices and groups have four, so the second group spans both nodes."""
    nodes = dataclasses.replace(SLOW, nodes=2, gpus_per_node=5)
    found = clock(GATHER % (4000000, "{{0,1,2,3},{4,5,6,7}}"), cluster=nodes)
    assert found.step_s == pytest.approx(12e6 / 1e8)


CLUSTERS = {
    "one node": dataclasses.replace(SLOW, inside=Link(alpha_s=1e-6, bytes_per_s=450e9)),
    "two nodes": dataclasses.replace(SLOW, nodes=2, gpus_per_node=4, across=Link(alpha_s=4e-6, bytes_per_s=50e9)),
}


def real(saved, programs, cluster):
    for (name, platform, version), module in saved.items():
        if platform == "cuda":
            yield (name, version), module, census(module, programs.MESHES[name]), cluster


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_saved_programs_satisfy_invariants(saved, programs, cluster):
    seen = set()
    for key, module, found, on in real(saved, programs, cluster):
        times = timeline(module, found, on)
        check(times)
        assert [one.collective for one in times.collectives] == list(found)
        assert all(one.time_s > 0 for one in times.collectives)
        assert set(times.network_s) == {one.axes_label for one in found}
        assert times == timeline(dataclasses.replace(module), found, on)
        seen.add(key[0])
    assert seen == set(programs.PROGRAMS)


def test_collectives_in_branches_and_loops_add_up(saved, programs):
    """`kernels` has a reduction in each branch of a conditional, and a permute in a loop of five."""
    for (name, _), module, found, on in real(saved, programs, CLUSTERS["one node"]):
        if name != "kernels":
            continue
        times = timeline(module, found, on)
        listed = sum(one.time_s for one in times.collectives)
        branches = [one.time_s for one in times.collectives if one.collective.in_branch]
        assert len(branches) == 2
        assert sum(times.network_s.values()) == pytest.approx(listed - min(branches))
        assert [loop.trip_count for loop in times.loops] == [5]


@settings(max_examples=8)
@given(factor=st.floats(min_value=1, max_value=100), which=st.sampled_from(["inside", "across"]))
def test_faster_links_never_lengthen_a_step(saved, programs, factor, which):
    for _, module, found, on in real(saved, programs, CLUSTERS["two nodes"]):
        link = getattr(on, which)
        faster = dataclasses.replace(on, **{which: dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor)})
        assert timeline(module, found, faster).step_s <= timeline(module, found, on).step_s * (1 + 1e-9)


STEPS = st.lists(st.sampled_from(["kernel", "product", "start", "done", "sync", "loop"]), min_size=1, max_size=12)


def random_program(steps):
    lines, started = [], []
    for number, step in enumerate(steps):
        if step == "kernel":
            lines.append(work_(f"k{number}"))
        elif step == "product":
            lines.append(f"m{number} = f32[100,100] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}")
        elif step == "start":
            lines.append(start(f"s{number}"))
            started.append(f"s{number}")
        elif step == "sync":
            lines.append(f"c{number} = f32[250000] collective-permute(x), {PAIRS}")
        elif step == "loop":
            lines.append(call_loop(2, "body", f"w{number}"))
        elif started:
            lines.append(done(f"d{number}", started.pop(0)))
    return "\n".join([*lines, "ROOT r = f32[125000] bitcast(h)"])


@settings(max_examples=25)
@given(steps=STEPS, factor=st.floats(min_value=1, max_value=50))
def test_random_schedules_add_up_and_gain_from_faster_links(steps, factor):
    text, body = random_program(steps), loop(HALF_HIDDEN)
    found = clock(text, body)
    check(found)
    faster = dataclasses.replace(SLOW, inside=Link(alpha_s=0, bytes_per_s=1e9 * factor))
    quicker = clock(text, body, faster)
    check(quicker)
    assert quicker.step_s <= found.step_s * (1 + 1e-9)


@pytest.mark.pod
def test_plain_scan_gathers_are_exposed(pod):
    """A layer's weights are gathered in the iteration that uses them, so its first matmul waits for them."""
    config = TransformerConfig(
        vocab_size=8192, num_layers=4, embed_dim=2048, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=6144,
        attention="xla",  # without loops of its own
    )  # fmt: skip
    mesh = mp.MeshSpec(fsdp=8).abstract()
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp())
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {name: jax.ShapeDtypeStruct((16, 1024), np.int32) for name in ("inputs", "targets")}
    found = pod.compile(step.trace(state, batch), "h100:1x8")
    decoder = timeline(found.module, census(found.module, mesh), parse_cluster("h100:1x8"))
    check(decoder)
    layers = [one for one in decoder.collectives if one.collective.in_loop and one.collective.kind == "all-gather"]
    forward = [one for one in layers if not one.collective.is_backward]
    first = [one for one in forward if one.has_nothing_to_hide_behind]
    assert first
    assert all(one.collective.count_per_step == 4 for one in layers)
    assert sum(one.exposed_s for one in forward) > 0
    assert [loop.trip_count for loop in decoder.loops] == [4, 4]
    assert [loop.is_backward for loop in decoder.loops] == [False, True]
