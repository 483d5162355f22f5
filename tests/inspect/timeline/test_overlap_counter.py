"""The clock and a counter that shares no code with it agree which collectives have a matmul between start and done."""

from __future__ import annotations

import pytest

from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.timeline.simulator import timeline
from tests.inspect import saved
from tests.inspect.overlap_counter import messages, per_loop


def by_clock(program, mesh):
    collectives = census(program.module, mesh)
    timed = timeline(program.module, collectives, parse_cluster(program.target)).collectives
    return {(one.collective.computation, one.collective.name): one.cover == "matmul" for one in timed}


def by_counter(program):
    return {(one.computation, one.name): one.is_covered for one in messages(program.text)}


def agreed(program, mesh):
    """What both say; the census leaves out groups of one device and transfers to the host."""
    clock, counter = by_clock(program, mesh), by_counter(program)
    assert clock
    assert clock.items() <= counter.items()
    return clock


@pytest.mark.parametrize("name", saved.NAMES)
def test_counters_agree_on_saved_programs(name, compiled):
    plant, program = compiled(name)
    agreed(program, plant.mesh)


@pytest.mark.pod
@pytest.mark.parametrize("name", ["hsdp", "fsdp_sequence", "heads_fsdp", "second_shard"])
def test_counters_agree_on_new_programs(name, compiled):
    plant, program = compiled(name, again=True)
    agreed(program, plant.mesh)


def test_saved_programs_have_covered_and_exposed(compiled):
    """Otherwise the comparison would not distinguish the two methods."""
    found = [covered for name in saved.NAMES for covered in agreed(compiled(name)[1], compiled(name)[0].mesh).values()]
    assert any(found)
    assert not all(found)


GATHER = """HloModule m, is_scheduled=true

%fused (p: bf16[4,4]) -> bf16[4,4] {{
  %p = bf16[4,4]{{1,0}} parameter(0)
  ROOT %dot.1 = bf16[4,4]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: bf16[4,4]) -> bf16[4,4] {{
  %x = bf16[4,4]{{1,0}} parameter(0)
  %s = (bf16[4,4]{{1,0}}, bf16[8,4]{{1,0}}) all-gather-start(%x), dimensions={{0}}{config}
  {between}
  %d = bf16[8,4]{{1,0}} all-gather-done(%s)
  ROOT %y = bf16[4,4]{{1,0}} fusion(%x), kind=kCustom, calls=%fused
}}
"""


@pytest.mark.parametrize(
    ("between", "config", "covered"),
    [
        ("%m = bf16[4,4]{1,0} fusion(%x), kind=kCustom, calls=%fused", "", 1),
        ('%m = bf16[4,4]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"', "", 1),
        ('%m = bf16[4,4]{1,0} custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax"', "", 1),
        ("%m = bf16[4,4]{1,0} copy(%x)", "", 0),
        ("%m = bf16[4,4]{1,0} fusion(%x), kind=kCustom, calls=%fused",
         ', backend_config={"collective_backend_config":{"is_sync":true}}', 0),
    ],
)  # fmt: skip
def test_work_that_covers_a_gather(between, config, covered):
    assert per_loop(GATHER.format(between=between, config=config)) == {"main": {"all-gather": (covered, 1)}}
