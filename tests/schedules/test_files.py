"""CSV, JSON and text formats of schedules."""

from __future__ import annotations

import json
import re

import pytest

from meshpar.schedules import SCHEDULES, Schedule, StageOp, make
from meshpar.sharding.errors import MeshparError
from tests.errors import raises
from tests.pipeline.replay import replay

NAMES = [*SCHEDULES]

# A V schedule of two ranks and four stages in the compute_only format of torch.distributed.pipelining.
TWO_RANKS = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
,1F0,2F0,1F1,2F1,1F2,2I0,2W0,2F2,1I0,1W0,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3, 1W3
"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 5), (6, 16)])
def test_csv_round_trips(name, p, m, tmp_path):
    schedule = make(name, p, m)
    schedule.to_csv(tmp_path / "schedule.csv")
    loaded = Schedule.from_csv(tmp_path / "schedule.csv", name=name)
    if name == "eager-1f1b":  # The file contains the order of ops only, not that three ops share a tick.
        assert loaded.order() == schedule.order()
    else:
        assert loaded == schedule


def test_to_csv_writes_the_torch_format(tmp_path):
    make("1f1b", 2, 2).to_csv(tmp_path / "1f1b.csv")
    assert (tmp_path / "1f1b.csv").read_text() == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,,,\n"
    make("zb-h1", 2, 2).to_csv(tmp_path / "zb.csv")
    assert (tmp_path / "zb.csv").read_text() == "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
    make("dualpipe-v", 2, 4).to_csv(tmp_path / "dual.csv")
    rows = [row.split(",") for row in (tmp_path / "dual.csv").read_text().splitlines()]
    cells = " ".join(cell for cell in rows[0] if cell)
    assert cells.startswith("0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B ")


def test_from_csv_reads_a_torch_file(tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text(TWO_RANKS)
    schedule = Schedule.from_csv(path)
    assert (schedule.name, schedule.stages, schedule.microbatches) == ("torch", 2, 4)
    assert schedule.parts.tolist() == [[0, 3], [1, 2]]
    first = schedule.order()[0]
    assert first[4:6] == [(StageOp("B", 0, 1),), (StageOp("W", 0, 1),)]
    assert first[7] == (StageOp("F", 3, 0), StageOp("B", 1, 1), StageOp("W", 1, 1))
    replay(schedule)


# 1F1B as torch writes it, and a compute_comms table of a zero-bubble schedule.
REDUCED = """\
0F0,0F1,0B0,0F2,0B1,0B2,0REDUCE_GRAD,0WAIT_REDUCE_GRAD
1F0,1B0,1F1,1B1,1F2,1B2,1REDUCE_GRAD
"""
WITH_MESSAGES = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0WAIT_SEND_F0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0
"""


def test_from_csv_ignores_communication_actions(tmp_path):
    (tmp_path / "1f1b.csv").write_text(REDUCED)
    assert Schedule.from_csv(tmp_path / "1f1b.csv") == make("1f1b", 2, 3)
    (tmp_path / "zb-h1.csv").write_text(WITH_MESSAGES)
    compute = re.compile(r"[0-9]+[FBIW][0-9]+")
    rows = [[cell for cell in row.split(",") if compute.fullmatch(cell)] for row in WITH_MESSAGES.splitlines()]
    (tmp_path / "compute.csv").write_text("\n".join(map(",".join, rows)))
    loaded = Schedule.from_csv(tmp_path / "zb-h1.csv", name="compute")
    assert loaded == Schedule.from_csv(tmp_path / "compute.csv")
    assert " ".join(op.text(chunked=False) for block in loaded.order()[1] for op in block) == "F0 B0 F1 B1 W0 W1"


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("0F0,0X0\n", "bad-syntax", "row 0, column 1"),
        ("0UNSHARD,0RESHARD\n", "wrong-shape", "row 0"),
        ("0F0,0UNSHARD0\n", "bad-syntax", "row 0, column 1"),
        ("0F0,0SEND_F\n", "bad-syntax", "row 0, column 1"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", "bad-syntax", "row 0, column 1"),
        ("0F0,(0F1)OVERLAP_F_B\n", "bad-syntax", "row 0, column 1"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "wrong-shape", "row 1"),
        ("0F0,0I0\n", "missing-op", "stage 0, microbatch 0"),
        ("0F0,0B0\n1F0\n", "missing-op", "stage 0, block 1 (B0.0&W0.0)"),
        # Torch 2.15 prints the last rank of 1F1B with forwards counted from 1.
        ("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F1,1B0,1F2,1B1,1REDUCE_GRAD\n", "missing-op", "stage 1, block 1"),
        ("", "damaged-file", "bad.csv"),
        (",,\n", "damaged-file", "bad.csv"),
        ("0F99999999999,0B99999999999\n", "bad-syntax", "row 0, column 0"),
        ("0F\u0663,0B\u0663\n", "bad-syntax", "row 0, column 0"),
    ],
)
def test_from_csv_rejects_invalid_content(text, code, where, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with raises(code, where):
        Schedule.from_csv(path)


def test_from_csv_rejects_unreadable_files(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    (tmp_path / "folder.csv").mkdir()
    for name in ("bytes", "folder", "missing"):
        with pytest.raises(MeshparError, match=f"{name}.csv: cannot read a schedule"):
            Schedule.from_csv(tmp_path / f"{name}.csv")


def test_from_csv_skips_a_byte_order_mark(tmp_path):
    (tmp_path / "sheet.csv").write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert Schedule.from_csv(tmp_path / "sheet.csv").microbatches == 1


def test_from_json_rejects_invalid_joined():
    data = make("1f1b", 2, 2).to_json()
    for joined in ([99, 0], [-1, 0], [0, 2]):
        with raises("out-of-range", "`joined` of schedule `1f1b`"):
            Schedule.from_json({**data, "joined": [joined]})


def test_to_csv_rejects_unsupported_blocks(tmp_path):
    schedule = Schedule.from_table([[("F", 0)], [("B", 0)], [("F", 1)], [[("B", 1), ("W", 0)]], [("W", 1)]])
    with raises("unsupported-feature", "tick 3, stage 0"):
        schedule.to_csv(tmp_path / "odd.csv")


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trips(name):
    schedule = make(name, 4, 8)
    data = json.loads(json.dumps(schedule.to_json()))
    assert Schedule.from_json(data) == schedule
    assert data["name"] == name
    assert (data["stages"], data["microbatches"], data["ticks"]) == (4, 8, schedule.ticks)
    assert data["bubble_fraction"] == schedule.bubble_fraction
    assert data["peak_activations"] == schedule.peak_activations.tolist()
    assert data["makespan"] == schedule.simulate().free.makespan
    assert data["table"][0][0] == ["F", 0, 0]
    assert data["table"][0][1] is None


def test_text_has_a_line_for_each_stage():
    assert str(make("zb-h1", 2, 2)) == "stage 0  F0 F1 ·  B0 W0 B1 W1\nstage 1  ·  F0 B0 F1 B1 W0 W1"
    assert str(make("zb-v", 1, 1)) == "stage 0  F0.0 F0.1 B0.1 B0.0 W0.1 W0.0"
