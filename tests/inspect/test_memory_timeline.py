"""Live arrays over time, worked out by hand on small programs, and compared with the compiler's temporaries."""

from __future__ import annotations

import textwrap

import pytest

from meshpar import plots
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.memory_timeline import MemoryTimeline, group_of, memory_timeline
from meshpar.inspect.program import Program
from meshpar.inspect.timeline.simulator import timeline
from tests.grid import cases
from tests.inspect.saved import NAMES, load

KB = "f32[250]"


def live(body: str, before: str = "", header: str = "") -> MemoryTimeline:
    """Return the memory of a program with a parameter `x` of 1 kB."""
    lines = textwrap.indent(f"x = {KB} parameter(0)\n{textwrap.dedent(body).strip()}", "  ")
    text = f"HloModule m, is_scheduled=true{header}\n{textwrap.dedent(before)}\nENTRY e {{\n{lines}\n}}\n"
    sizes = {"argument_bytes": 1000, "output_bytes": 0, "alias_bytes": 0, "temporary_bytes": 0}
    return memory_timeline(Program(target="cpu", text=text, compile_s=0.0, **sizes))


def scoped(name: str) -> str:
    return f'metadata={{op_name="jit(step)/{name}/mul"}}'


def test_a_buffer_is_live_until_its_last_use():
    found = live(f"""
        a = {KB} copy(x), {scoped("a")}
        b = {KB} copy(a), {scoped("b")}
        c = {KB} copy(b), {scoped("c")}
        ROOT d = {KB} copy(c), {scoped("d")}
    """)
    assert found.totals.tolist() == [0, 1000, 2000, 2000]  # without the sample of `c`, which has the same total
    assert found.live_bytes["a"] == (0, 1000, 1000, 0)
    assert found.live_bytes["d"] == (0, 0, 0, 1000)
    assert (found.times_s[-1], found.is_timed, found.argument_bytes) == (1.0, False, 1000)


def test_views_share_a_buffer_and_keep_it_live():
    found = live(f"""
        a = {KB} copy(x)
        t = ({KB}, {KB}) tuple(a, x)
        g = {KB} get-tuple-element(t), index=0
        v = f32[125,2] bitcast(g)
        b = {KB} copy(x)
        ROOT c = f32[125,2] copy(v)
    """)
    assert found.totals.tolist() == [0, 1000, 2000, 2000]


def test_elementwise_kernels_overwrite_an_operand_that_is_not_read_again():
    fused = f"f {{\n  p = {KB} parameter(0)\n  ROOT n = {KB} negate(p)\n}}\n"
    kernel = f"{KB} fusion(a), kind=kLoop, calls=f"
    assert live(f"a = {KB} copy(x)\nROOT b = {kernel}", fused).totals.tolist() == [0, 1000, 1000]
    read_again = f"a = {KB} copy(x)\nb = {kernel}\nROOT c = {KB} add(a, b)"
    assert live(read_again, fused).totals.tolist() == [0, 1000, 2000, 3000]


def test_donated_arguments_hold_the_results():
    body = f"a = {KB} copy(x)\nROOT b = {KB} copy(a)"
    assert live(body).totals.tolist() == [0, 1000, 2000]
    assert live(body, header=", input_output_alias={ {}: (0, {}, may-alias) }").totals.tolist() == [0, 1000, 1000]


LOOP = f"""
condition {{
  s = (s32[], f32[4,250], {KB}) parameter(0)
  ROOT t = pred[] constant(true)
}}
body {{
  s = (s32[], f32[4,250], {KB}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  saved = f32[4,250] get-tuple-element(s), index=1
  h = {KB} get-tuple-element(s), index=2
  one = s32[] constant(1)
  zero = s32[] constant(0)
  k = {KB} negate(h), {scoped("layers/mlp")}
  row = f32[1,250] bitcast(k)
  update = f32[4,250] dynamic-update-slice(saved, row, i, zero), {scoped("layers")}
  j = s32[] add(i, one)
  ROOT r = (s32[], f32[4,250], {KB}) tuple(j, update, k)
}}
"""


def test_a_loop_updates_its_state_in_place():
    found = live(
        f"""
        zero = s32[] constant(0)
        i = s32[] copy(zero)
        buffer = f32[4,250] custom-call(), custom_call_target="AllocateBuffer"
        h = {KB} copy(x)
        s = (s32[], f32[4,250], {KB}) tuple(i, buffer, h)
        w = (s32[], f32[4,250], {KB}) while(s), condition=condition, body=body
        ROOT out = f32[4,250] get-tuple-element(w), index=1
        """,
        LOOP,
    )
    assert found.totals.max() == 4000 + 1000 + 4
    # The module is that of the collected values, not of the loop or of the update.
    assert (found.arrays[0].nbytes, found.arrays[0].module, found.arrays[0].shape) == (4000, "layers/mlp", "f32[4,250]")


def test_arrays_in_host_memory_are_left_out():
    found = live(f"""
        c = ({KB}{{0:S(5)}}, {KB}, u32[]) copy-start(x)
        d = {KB}{{0:S(5)}} copy-done(c)
        ROOT e = {KB} copy(d)
    """)
    assert found.totals.max() == 1000 + 4  # the context of the copy


def test_branches_follow_each_other():
    branch = "{name} {{\n  p = f32[250] parameter(0)\n  a = {shape} broadcast(p)\n  ROOT b = f32[250] slice(a)\n}}\n"
    branches = branch.format(name="one", shape="f32[500]") + branch.format(name="two", shape="f32[750]")
    found = live(f"i = s32[] copy(x)\nROOT c = {KB} conditional(i, x, x), branch_computations={{one, two}}", branches)
    assert found.totals.max() == 3000 + 1000 + 4


@pytest.mark.parametrize("name", cases("fsdp_tensor", "zero1", "wrong_name", grid=NAMES))
def test_the_peak_is_near_the_compilers(name):
    """XLA shares more buffers, and leaves gaps for alignment: both are below 6 % in these programs."""
    program = load(name)
    found = memory_timeline(program)
    assert found.totals.max() == pytest.approx(program.temporary_bytes, rel=0.06)


def test_times_are_those_of_the_simulation():
    program, cluster = load("fsdp_tensor"), parse_cluster("h100:1x8")
    times = timeline(program.module, census(program.module, {"fsdp": 4, "tensor": 2}), cluster)
    found = memory_timeline(program, times)
    assert found.is_timed
    assert list(found.times_s) == sorted(found.times_s)
    assert 0.9 * times.step_s < found.times_s[-1] <= times.step_s
    peak_s = found.times_s[found.peak]
    assert all(array.start_s <= peak_s <= array.end_s for array in found.arrays)
    assert [array.nbytes for array in found.arrays] == sorted((a.nbytes for a in found.arrays), reverse=True)
    assert next(iter(found.live_bytes)) in ("layers/attention", "layers/mlp")
    figure = plots.memory_timeline(found, limit_bytes=10**8)
    assert "peak" in figure.axes[0].texts[0].get_text()
    assert figure.axes[0].get_ylim()[1] > 10**8
    assert plots.memory_timeline(found, limit_bytes=10**10).axes[0].get_ylim()[1] < 10**8  # too far away


def test_modules_are_grouped():
    assert group_of("gradients/micro_steps/layers/3/mlp/up") == "layers/*"
    assert group_of("gradients/layers/mlp/up") == "layers/mlp"
    assert (group_of("update/adam"), group_of("")) == ("update", "other")
