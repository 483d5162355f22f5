"""Validation of schedules: invalid tables raise errors that name the tick, the stage and the microbatch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshpar.schedules import SCHEDULES, Schedule, StageOp, make
from tests.errors import raises
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
def test_validate_finds_a_missing_op(name, kind):
    schedule = make(name, 4, 8)
    for tick, stage in cells(schedule, kind)[::5]:

        def drop(table, at=(tick, stage, kind)):
            table[at] = -1

        broken = dataclasses.replace(changed(schedule, drop), joined=np.zeros_like(schedule.joined))
        with raises("missing-op", f"microbatch {schedule.table[tick, stage, kind, 0]}") as error:
            broken.validate()
        assert f"its {'FBW'[kind]} " in error.value.reason
        assert str(stage) in error.value.where


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_validate_finds_swapped_ops(name, seed):
    """Swapped ops raise an error exactly if they break a dependency."""
    schedule = make(name, 4, 8)
    rng = np.random.default_rng(seed)
    stage = rng.integers(4)
    first, second = rng.choice(np.flatnonzero(schedule.busy[:, stage]), 2, replace=False)

    def swap(table):
        table[[first, second], stage] = table[[second, first], stage]

    broken = dataclasses.replace(changed(schedule, swap), joined=np.zeros_like(schedule.joined))
    wrong = broken_dependencies(broken)
    if wrong:
        with raises("wrong-order", "tick "):
            broken.validate()
    else:
        broken.validate()


def broken_dependencies(schedule: Schedule) -> int:
    """Count the violated dependencies of a schedule, op by op."""
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


def one_stage(*cells) -> Schedule:
    return Schedule.from_table([[cell] for cell in cells])


def test_from_table_of_a_custom_schedule():
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
    simulation = schedule.simulate()
    assert simulation.free.busy.tolist() == [6, 6]
    assert simulation.lockstep.makespan == 1 + 1 + 2 + 2 + 2 + 1
    replay(schedule)


def test_full_backward_in_one_tick_defers_nothing():
    schedule = one_stage(("F", 0, 0), [("B", 0, 0), ("W", 0, 0)])
    assert schedule.slots().counts()["deferred_weight_grads"].tolist() == [0]
    replay(schedule)


def from_order(kind, *op, **options):
    return Schedule.from_order("odd", [[(StageOp(kind, *op),)]], **options)


@pytest.mark.parametrize(
    ("build", "code", "where"),
    [
        (lambda: one_stage(("F", 0), ("B", 0), ("W", 0), ("F", 0)), "duplicate-op", "tick 3, stage 0: F of"),
        (lambda: one_stage(("F", 0), ("W", 0), ("B", 0)), "wrong-order", "tick 1, stage 0: W of microbatch 0"),
        (lambda: one_stage([("F", 0), ("B", 0)], ("W", 0)), "wrong-order", "tick 0, stage 0: B of microbatch 0"),
        (lambda: one_stage(("F", 0), ("X", 0)), "bad-op", "tick 1, stage 0"),
        (lambda: one_stage(("F",)), "bad-op", "tick 0, stage 0"),
        (lambda: one_stage(("F", 0, -1)), "bad-op", "tick 0, stage 0"),
        (lambda: one_stage(("F", 0.5)), "bad-op", "tick 0, stage 0"),
        (lambda: one_stage(("F", 10**12)), "bad-op", "tick 0, stage 0"),
        (lambda: one_stage([("F", 0), ("F", 1)]), "duplicate-op", "tick 0, stage 0"),
        (lambda: one_stage(("F", 0, 1), ("B", 0, 1), ("W", 0, 1)), "out-of-range", "tick 0, stage 0"),
        (lambda: Schedule.from_table([[None, None], [None]]), "wrong-shape", "tick 1"),
        (lambda: Schedule.from_table([[(kind, 0)] * 2 for kind in "FBW"]), "wrong-order", "tick 0, stage 1"),
        (lambda: Schedule.from_table([[("F", 0)]], microbatches=2), "missing-op", "stage 0, microbatch 1"),
        (lambda: Schedule.from_table([[None]], parts=[[1]]), "out-of-range", "`parts`"),
        (lambda: Schedule.from_table([[None]], parts=[[0, 0]]), "conflict", "`parts`"),
        (lambda: Schedule.from_table([[None]], parts=[[0], [1]]), "wrong-shape", "schedule `table`"),
        (lambda: Schedule.from_table([]), "wrong-shape", "schedule `table`"),
        (lambda: Schedule.from_table([[None]], parts=[[0], [1, 2]]), "wrong-shape", "`parts`"),
        (lambda: Schedule.from_table([[None]], parts=[["a"]]), "wrong-shape", "`parts`"),
        (lambda: Schedule.from_table([[("F", 0)]], microbatches=10**12), "out-of-range", "schedule `table`"),
        (lambda: Schedule.from_table([[("F", 0)]], microbatches=1.5), "out-of-range", "schedule `table`"),
        (lambda: Schedule.from_table([[None]]), "out-of-range", "schedule `table`"),
        (lambda: from_order("F", -1), "bad-op", "stage 0, block 0"),
        (lambda: from_order("F", 0, 2), "bad-op", "stage 0, block 0"),
        (lambda: from_order("I", 0), "bad-op", "stage 0, block 0"),
        (lambda: from_order("F", 0, parts=[[0], [1]]), "wrong-shape", "schedule `odd`"),
    ],
)  # fmt: skip
def test_schedule_rejects_invalid_tables(build, code, where):
    with raises(code, where):
        build()


def test_validate_requires_b_on_the_stage_of_f():
    """Two stages have both parts, and B must run where F saved its residuals."""
    table = [[(kind, 0, chunk), None] for kind, chunk in (("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 0), ("W", 1))]
    table[2].reverse()
    with raises("wrong-stage", "tick 2, stage 1: B of microbatch 0, chunk 1"):
        Schedule.from_table(table, parts=[[0, 1], [0, 1]])


def test_validate_requires_neighbors_for_consecutive_parts():
    with raises("wrong-stage", "stage 2"):
        Schedule.from_order("far", [ops("F0 B0 W0")] * 4, parts=[[0], [2], [1], [3]])


def test_from_order_names_both_sides_of_a_deadlock():
    with raises("deadlock", "stage 1, block 0 (F1.0)") as error:
        Schedule.from_order("stuck", [ops("F0 B0 W0 F1 B1 W1"), ops("F1 F0 B0 W0 B1 W1")])
    assert "stage 0, which runs it" in error.value.reason
    # Stage 0 depends on the cycle but is not part of it, so the error does not name it.
    middle = [ops("F0 F1 B0 W0 B1 W1"), ops("F0 B0 W0 F1 B1 W1"), ops("F1 F0 B0 W0 B1 W1")]
    with raises("deadlock") as error:
        Schedule.from_order("stuck", middle)
    assert "stage 0" not in error.value.where


def ops(text: str) -> list:
    return [(StageOp(op[0], int(op[1:])),) for op in text.split()]


@pytest.mark.parametrize(
    ("rows", "code", "where"),
    [
        (["F0 B0 W0", "B0 W0"], "missing-op", "stage 1, block 0 (B0.0)"),
        (["B0 W0", "F0 B0 W0"], "missing-op", "stage 1, block 0 (F0.0)"),
        (["F0 B0 W0", "F0 W0"], "missing-op", "block 1 "),
        (["F0 W0 B0", "F0 B0 W0"], "wrong-order", "stage 0, block 1 (W0.0)"),
        (["B0 F0 W0", "F0 B0 W0"], "wrong-order", "stage 0, block 0 (B0.0)"),
        (["F0 B0 W0", "B0 F0 W0"], "wrong-order", "stage 1, block 0 (B0.0)"),
        (["F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 W1 B1"], "wrong-order", "stage 1, block 4"),
    ],
)
def test_from_order_distinguishes_missing_and_late_ops(rows, code, where):
    with raises(code, where):
        Schedule.from_order("odd", [ops(row) for row in rows])


def test_validate_applies_block_boundaries():
    """The gradient of a full backward is available only when the block ends."""
    F, B, W = ((kind, 0) for kind in "FBW")
    split = Schedule.from_table([[F, None], [None, F], [None, B], [B, W], [W, None]])
    joined = split.joined.copy()
    joined[2, 1] = True
    with raises("wrong-order", "tick 3, stage 0: B of microbatch 0"):
        dataclasses.replace(split, joined=joined).validate()
    joined[2, 1], joined[3, 1] = False, True
    with raises("conflict", "tick 3, stage 1"):
        dataclasses.replace(split, joined=joined).validate()
