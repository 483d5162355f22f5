"""Test the output, files and errors of `meshpar schedule`."""

from __future__ import annotations

import functools
import json

import jax
import pytest

from meshpar.cli import schedule_command as command
from meshpar.schedules import Schedule, make
from meshpar.sharding.errors import problem


@pytest.fixture
def schedule(meshpar):
    return functools.partial(meshpar, "schedule")


EIGHT = ("--stages", 4, "--microbatches", 8)


def test_text_shows_the_table_and_statistics(schedule):
    code, out, err = schedule("zb-h2", *EIGHT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    table = make("zb-h2", 4, 8)
    assert [line.split() for line in lines[:4]] == [line.split() for line in str(table).splitlines()]
    assert "zb-h2: 4 stages, 8 microbatches, 27 ticks, parameters 1x" in lines
    assert "makespan 27, with lockstep ticks 27; bubble fraction of a step 11.11%, of a stage span 0.00%" in lines
    assert "peak activations by stage: 7 7 7 7" in lines


def test_a_narrow_terminal_wraps_the_table():
    from rich.console import Console

    table = make("dualpipe", 4, 8)
    console = Console(width=60, force_terminal=True, color_system="truecolor", highlight=False)
    with console.capture() as shown:
        console.print(command.SimulatedSchedule(table, table.simulate()))
    assert "\x1b[" in shown.get()
    plain = Console(width=60, highlight=False)
    with plain.capture() as shown:
        plain.print(command.SimulatedSchedule(table, table.simulate()))
    lines = shown.get().split("\n\ndualpipe:")[0].splitlines()
    assert len(lines) > 4
    for stage, row in enumerate(str(table).splitlines()):
        bands = [line.removeprefix(f"stage {stage}") for line in lines if line.startswith(f"stage {stage}")]
        assert " ".join(bands).split() == row.removeprefix(f"stage {stage}").split()


def test_json_has_the_fields(schedule):
    code, out, _ = schedule("zb-h2", *EIGHT, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["name"] == "zb-h2"
    assert (data["stages"], data["microbatches"], data["ticks"], data["makespan"]) == (4, 8, 27, 27)
    assert data["bubble_fraction"] == pytest.approx(1 / 9)
    assert data["peak_activations"] == [7] * 4
    assert len(data["table"]) == 27
    assert data["table"][0] == [["F", 0, 0], None, None, None]


def test_costs_are_used(schedule):
    _, out, _ = schedule("1f1b", *EIGHT, "--f", 2, "--b", 3, "--w", 1.5, "--comm", 0.5, "--json")
    data = json.loads(out)
    times = make("1f1b", 4, 8).simulate(f=2, b=3, w=1.5, comm=0.5)
    assert data["makespan"] == times.free.makespan
    assert data["lockstep_makespan"] == times.lockstep.makespan
    assert data["bubble_fraction"] == times.free.bubble_fraction > 3 * 6.5 / (11 * 6.5)


def test_csv_and_json_files_round_trip(schedule, tmp_path):
    _, text, _ = schedule("dualpipe-v", *EIGHT, "--csv")
    (tmp_path / "mine.csv").write_text(text)
    assert Schedule.from_csv(tmp_path / "mine.csv", name="dualpipe-v") == make("dualpipe-v", 4, 8)
    _, out, _ = schedule(tmp_path / "mine.csv")
    assert "mine: 4 stages, 8 microbatches" in out
    _, text, _ = schedule(tmp_path / "mine.csv", "--json")
    (tmp_path / "mine.json").write_text(text)
    _, again, _ = schedule(tmp_path / "mine.json", "--json")
    assert json.loads(again) == json.loads(text)


def test_without_a_name_all_schedules_are_compared(schedule):
    code, out, _ = schedule(*EIGHT)
    assert code == 0
    rows = {cells[0]: cells[1:] for line in out.splitlines() if len(cells := line.strip("│ ").split("│")) == 7}
    found = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert found["gpipe"] == ["33", "33", "27.27%", "27.27%", "8 M", "1x"]
    assert found["interleaved-1f1b"] == ["28.5", "28.5", "15.79%", "15.79%", "5.5 M", "1x"]
    assert found["zb-v"] == ["25.5", "25.5", "5.88%", "0.00%", "4 M", "1x"]
    assert found["dualpipe"][-1] == "2x"
    code, out, _ = schedule(*EIGHT, "--b", 2)
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")][:3] for line in out.splitlines()]
    assert ["1f1b", "44", "59"] in rows
    assert ["eager-1f1b", "44", "44"] in rows
    _, out, _ = schedule("--stages", 3, "--json")
    assert [one["name"] for one in json.loads(out)] == [name for name in command.SCHEDULES if name != "dualpipe"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["zb-h3"], "Did you mean `zb-h2` or `zb-h1`"),
        (["dualpipe", "--stages", 3], "Use 2 or 4 stages"),
        (["gpipe", "--chunks", 2], "it has no options"),
        (["gpipe", "--f", -1], "`f` of schedule `gpipe`"),
        (["--csv"], "--csv requires a schedule NAME"),
        (["no/such.csv"], "there is no such file"),
        (["no/such.json"], "there is no such file"),
        (["gpipe", "--png", "no/such/folder.png"], "write to it"),
        (["gpipe", "--png", "zb.pdf"], "its name must end in .png. Name it zb.png"),
        (["gpipe", "--stages", 0], "0 is not in the range"),
        (["file.csv", "--stages", 4], "the file determines it"),
        (["--chunks", 2], "--chunks requires a schedule NAME"),
        (["gpipe", "--csv", "--json"], "--csv and --json cannot be combined"),
        (["gpipe", "--f", "nan"], "`f` of schedule `gpipe`"),
        (["file.csv", "--limit", 4], "Remove --limit"),
    ],
)
def test_errors_are_one_line(args, message, schedule):
    code, _, err = schedule(*args)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_error_while_tracing_is_one_line(schedule, monkeypatch):
    """jax adds a note about traceback filtering to the exception."""

    def traced(*args: object, **options: object) -> None:
        def wrong(x: object) -> None:
            raise problem("params/w", "be sharded", "it is a scalar", "replicate it")

        jax.jit(wrong)(1.0)

    monkeypatch.setattr(command, "make", traced)
    code, _, err = schedule("gpipe")
    assert code == 2
    assert err == "meshpar: params/w: cannot be sharded: it is a scalar. Replicate it.\n"


TABLE = {"table": [[["F", 0, 0]], [["B", 0, 0]], [["W", 0, 0]]]}


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2", "{}", "[]", '{"table": 3}', '{"table": [[["F", 0, 0]]], "joined": 4}',
        *(json.dumps(TABLE | {field: x}) for field in ("joined", "table", "parts") for x in ("x", [[]], ["x"])),
    ],
)  # fmt: skip
def test_an_invalid_schedule_file_is_refused(content, schedule, tmp_path):
    (tmp_path / "bad.json").write_text(content)
    code, _, err = schedule(tmp_path / "bad.json")
    assert code == 2
    assert "bad.json: cannot read a schedule" in err or "schedule `table`" in err
