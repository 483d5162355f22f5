"""Rounds of latencies: each program is compiled by the schedule before it, queues on a shared link counted."""

from __future__ import annotations

import re

import pytest

from meshpar.compiled.clock.timeline import Op, Segment, Timeline
from meshpar.compiled.latencies import ROUNDS, quickest, rounds


def program(time_s: float, step_s: float) -> Timeline:
    gather = Op(
        name="gather", stream="communication", start_s=2.0, end_s=2.0 + time_s, kind="all-gather", label="fsdp",
        module="", queued_s=1.0,
    )  # fmt: skip
    whole = Segment(name="", module="", is_backward=False, trip_count=1, duration_s=step_s, ops=(gather,))
    return Timeline(
        cluster="h100:1x8", peak_flops_per_s=1.0, step_s=step_s, compute_s=0.0, memory_s=0.0, network_s={}, hidden_s={},
        collectives=(), segments=(whole,),
    )  # fmt: skip


@pytest.mark.parametrize("before", [None, program(3.0, 9.0)])
def test_each_round_is_compiled_by_the_mean_of_those_before(before):
    programs = [program(3.0, 9.0)] * (before is None) + [program(7.0, 5.0), program(1.0, 8.0), program(2.0, 6.0)]
    files = []

    def compiled(file):
        files.append(re.findall(r'name: "(\w+)" cost_us: ([\d.]+)', file.read_text()))
        return len(files), programs[len(files) - 1]

    found = rounds(compiled, before)
    assert len(found) == ROUNDS
    assert files[: len(files) - ROUNDS] == ([[("nothing", "0.000")]] if before is None else [])
    # A time on the wire of 3 s behind a queue of 1 s; then halfway to 7 + 1, and halfway from there to 1 + 1.
    assert files[-ROUNDS:] == [[("gather", f"{time_s}000000.000")] for time_s in (4, 6, 4)]
    assert quickest(found) is found[0]
    assert "6000000" in found[1].latencies
