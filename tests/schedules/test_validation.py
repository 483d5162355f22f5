"""A table that cannot be run is refused, with the tick, the stage and the microbatch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshpar.schedules import SCHEDULES, Schedule, StageOp, make
from meshpar.sharding.types import MeshparError
from tests.pipeline.replay import replay

NAMES = [*SCHEDULES]


def changed(schedule: Schedule, change) -> Schedule:
    table = schedule.table.copy()
    change(table)
    return dataclasses.replace(schedule, table=table)


def cells(schedule: Schedule, kind: int) -> np.ndarray:
    return np.argwhere(schedule.table[:, :, kind, 0] >= 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", range(3))
def test_a_dropped_op_is_missed(name, kind):
    schedule = make(name, 4, 8)
    for tick, stage in cells(schedule, kind)[::5]:

        def drop(table, at=(tick, stage, kind)):
            table[at] = -1

        broken = dataclasses.replace(changed(schedule, drop), joined=np.zeros_like(schedule.joined))
        microbatch = schedule.table[tick, stage, kind, 0]
        with pytest.raises(MeshparError, match=f"stage .*{stage}.*microbatch {microbatch}.*no tick runs {'FBW'[kind]}"):
            broken.validate()


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_microbatch_is_missed(name):
    schedule = make(name, 4, 8)
    for dropped in (0, 7):
        broken = changed(schedule, lambda table, i=dropped: np.copyto(table, -1, where=table[..., :1] == i))
        broken = dataclasses.replace(broken, joined=np.zeros_like(schedule.joined))
        with pytest.raises(MeshparError, match=f"microbatch {dropped}: cannot train part 0"):
            broken.validate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_two_swapped_ops_of_a_stage_are_caught_or_harmless(name, seed):
    """Swapped: everything that depends on it is done in time still, or an error says what is not."""
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(seed)
    stage = rng.integers(4)
    first, second = rng.choice(np.flatnonzero(schedule.busy[:, stage]), 2, replace=False)

    def swap(table):
        table[[first, second], stage] = table[[second, first], stage]

    broken = dataclasses.replace(changed(schedule, swap), joined=np.zeros_like(schedule.joined))
    wrong = broken_dependencies(broken)
    if wrong:
        with pytest.raises(MeshparError, match=r"tick \d+, stage \d: [FBW] of microbatch \d.*next tick on"):
            broken.validate()
    else:
        broken.validate()


def broken_dependencies(schedule: Schedule) -> int:
    """Counted the slow way."""
    when = {}
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            for op in schedule.cell(tick, stage):
                when[op.kind, op.microbatch, int(schedule.parts[stage, op.chunk])] = tick
    wrong = 0
    for (kind, i, part), tick in when.items():
        if kind == "F":
            wrong += part > 0 and when["F", i, part - 1] >= tick
        elif kind == "B":
            wrong += when["F", i, part] >= tick
            wrong += part < schedule.num_parts - 1 and when["B", i, part + 1] >= tick
        else:
            wrong += when["B", i, part] > tick
    return wrong


def test_most_swaps_are_caught():
    """So that the test above is about something."""
    schedule = make("1f1b", 4, 8)
    caught = 0
    for tick in range(schedule.ticks - 1):

        def swap(table, at=tick):
            table[[at, at + 1], 1] = table[[at + 1, at], 1]

        broken = dataclasses.replace(changed(schedule, swap), joined=np.zeros_like(schedule.joined))
        caught += broken_dependencies(broken) > 0
    assert caught >= 20


def one_stage(*cells) -> Schedule:
    return Schedule.from_table([[cell] for cell in cells])


def test_a_table_of_ones_own():
    schedule = Schedule.from_table(
        [
            [("F", 0), None],
            [("F", 1), ("F", 0)],
            [None, [("F", 1), ("B", 0)]],
            [("B", 0), [("B", 1), ("W", 0)]],
            [[("B", 1), ("W", 0)], ("W", 1)],
            [("W", 1), None],
        ],
        name="mine",
    )
    assert (schedule.name, schedule.stages, schedule.chunks, schedule.microbatches) == ("mine", 2, 1, 2)
    assert schedule.peak_activations.tolist() == [2, 2]
    assert schedule.cell(2, 1) == (StageOp("F", 1, 0), StageOp("B", 0, 0))
    one = schedule.simulate()
    assert one.free.busy.tolist() == [6, 6]
    assert one.lockstep.makespan == 1 + 1 + 2 + 2 + 2 + 1
    replay(schedule)


def test_a_whole_backward_in_one_cell():
    schedule = one_stage(("F", 0, 0), [("B", 0, 0), ("W", 0, 0)])
    assert schedule.slots().counts()["deferred_weight_grads"].tolist() == [0]
    replay(schedule)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: one_stage(("F", 0), ("B", 0), ("W", 0), ("F", 0)), "tick 3, stage 0: F of microbatch 0.*in tick 0"),
        (lambda: one_stage(("F", 0), ("W", 0), ("B", 0)), "tick 1, stage 0: W of microbatch 0.*made in tick 2"),
        (lambda: one_stage([("F", 0), ("B", 0)], ("W", 0)), "tick 0, stage 0: B of microbatch 0.*behind tick 0"),
        (lambda: one_stage(("F", 0), ("X", 0)), r'tick 1, stage 0: cannot run \["X", 0\]'),
        (lambda: one_stage(("F",)), "an op is one of F, B, W"),
        (lambda: one_stage(("F", 0, -1)), "an op is one of F, B, W"),
        (lambda: one_stage(("F", 0.5)), "an op is one of F, B, W"),
        (lambda: one_stage([("F", 0), ("F", 1)]), "the cell has another F already"),
        (lambda: one_stage(("F", 0, 1), ("B", 0, 1), ("W", 0, 1)), "chunks 0 to 0"),
        (lambda: Schedule.from_table([[None, None], [None]]), "tick 1 .* it has 1, tick 0 has 2"),
        (
            lambda: Schedule.from_table(
                [[("F", 0), ("F", 0)], [None, ("B", 0)], [("B", 0), ("W", 0)], [("W", 0), None]]
            ),
            "tick 0, stage 1: F of microbatch 0: cannot use what F of microbatch 0 on part 0",
        ),
        (
            lambda: Schedule.from_table([[("F", 0)], [("B", 0)], [("W", 0)]], microbatches=2),
            "stage 0, microbatch 1: cannot train part 0 of the model",
        ),
        (lambda: Schedule.from_table([[None]], parts=[[1]]), "they are not numbered from 0"),
        (lambda: Schedule.from_table([[None]], parts=[[0, 0]]), "one of them stands there twice"),
        (lambda: Schedule.from_table([[None]], parts=[[0], [1]]), "one row of `parts` for each stage"),
        (lambda: Schedule.from_table([]), "one row of `parts` for each stage"),
        (lambda: Schedule.from_table([[None]], parts=[[0], [1, 2]]), "equally many for every stage"),
        (lambda: Schedule.from_table([[None]], parts=[["a"]]), "whole numbers"),
        (lambda: one_stage(("F", 10**12)), "an op is one of F, B, W"),
        (lambda: Schedule.from_table([[("F", 0)]], microbatches=10**12), "train on 1000000000000 microbatches"),
        (lambda: Schedule.from_table([[("F", 0)]], microbatches=1.5), "train on 1.5 microbatches"),
        (lambda: Schedule.from_table([[None]]), "train on 0 microbatches"),
        (lambda: Schedule.from_order("odd", [[(StageOp("F", -1),)]]), "stage 0, block 0: cannot run F-1.0"),
        (lambda: Schedule.from_order("odd", [[(StageOp("F", 0, 2),)]]), "stage 0, block 0: cannot run F0.2"),
        (lambda: Schedule.from_order("odd", [[(StageOp("I", 0),)]]), "stage 0, block 0: cannot run I0.0"),
        (lambda: Schedule.from_order("odd", [[(StageOp("F", 0),)]], parts=[[0], [1]]), "2 rows of `parts`"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_says_why(build, message):
    with pytest.raises(MeshparError, match=message):
        build()


def test_backward_stays_where_forward_was():
    """Two stages hold both parts: B must be where F left its residuals."""

    def row(kind, first, second):
        return [(kind, 0, first), None] if second is None else [None, (kind, 0, second)]

    seats = [("F", 0, None), ("F", 1, None), ("B", None, 1), ("B", 0, None), ("W", 0, None), ("W", 1, None)]
    table = [row(*seat) for seat in seats]
    with pytest.raises(MeshparError, match="tick 2, stage 1: B of microbatch 0, chunk 1.*its F left lies on stage 0"):
        Schedule.from_table(table, parts=[[0, 1], [0, 1]])


def test_only_neighbours_send():
    rows = [
        [(StageOp(kind, 0),) for kind in kinds] for kinds in ("FBW", "FBW", "FBW", "FBW")
    ]  # fmt: skip
    with pytest.raises(MeshparError, match="stage 2 is no neighbour of it on a ring of 4"):
        Schedule.from_order("far", rows, parts=[[0], [2], [1], [3]])


def test_a_deadlock_names_both_sides():
    message = r"stage 1, block 0 \(F1.0\): cannot wait for F .* of microbatch 1 on part 0 .*stage 0, .* a deadlock"
    with pytest.raises(MeshparError, match=message):
        Schedule.from_order("stuck", [ops("F0 B0 W0 F1 B1 W1"), ops("F1 F0 B0 W0 B1 W1")])
    # A stage that only waits for a cycle of others is not blamed.
    middle = [ops("F0 F1 B0 W0 B1 W1"), ops("F0 B0 W0 F1 B1 W1"), ops("F1 F0 B0 W0 B1 W1")]
    with pytest.raises(MeshparError, match=r"stage [12], block .*a deadlock"):
        Schedule.from_order("stuck", middle)


def ops(text: str) -> list:
    return [(StageOp(one[0], int(one[1:])),) for one in text.split()]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["F0 B0 W0", "B0 W0"],
            r"stage 1, block 0 \(B0.0\): cannot use what F \(forward\) of microbatch 0 on part 1 of the model makes: "
            r"no stage runs that op. Add F of microbatch 0 to the row of the stage that holds part 1",
        ),
        (["B0 W0", "F0 B0 W0"], r"stage 1, block 0 \(F0.0\): cannot use what F .* microbatch 0 on part 0 .*no stage"),
        (["F0 B0 W0", "F0 W0"], r"stage [01], block 1 .*: cannot use what B .* microbatch 0 on part 1 .*no stage"),
        (
            ["F0 W0 B0", "F0 B0 W0"],
            r"stage 0, block 1 \(W0.0\): cannot run W \(weight gradient\) of microbatch 0 on part 0 .* before "
            r"B \(input gradient\) .*W uses what B .* block 2 .* Move B of microbatch 0 in front of its W",
        ),
        (["B0 F0 W0", "F0 B0 W0"], r"stage 0, block 0 \(B0.0\): cannot run B .* before F .* Move F of"),
        (["F0 B0 W0", "B0 F0 W0"], r"stage 1, block 0 \(B0.0\): cannot run B .* before F .* Move F of"),
        (["F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 W1 B1"], "stage 1, block 4 .* cannot run W .* microbatch 1 .* before B"),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_early_is_no_deadlock(rows, message):
    with pytest.raises(MeshparError, match=message) as caught:
        Schedule.from_order("odd", [ops(row) for row in rows])
    assert "deadlock" not in str(caught.value)


def test_blocks_begin_and_end_as_one():
    """A gradient that leaves with the end of a whole backward cannot be used in the tick between."""
    table = [
        [("F", 0), None],
        [None, ("F", 0)],
        [None, ("B", 0)],
        [("B", 0), ("W", 0)],
        [("W", 0), None],
    ]
    split = Schedule.from_table(table)
    joined = split.joined.copy()
    joined[2, 1] = True
    with pytest.raises(MeshparError, match=r"tick 3, stage 0: B of microbatch 0.*a block uses what it needs"):
        dataclasses.replace(split, joined=joined).validate()
    joined[2, 1], joined[3, 1] = False, True
    with pytest.raises(MeshparError, match="tick 3, stage 1: cannot join.*one of the two is idle"):
        dataclasses.replace(split, joined=joined).validate()
