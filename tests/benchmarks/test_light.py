"""The benchmark measures all rows and prints a table; sizes are tiny, and no time is checked."""

from __future__ import annotations

import pytest

from tests.benchmarks import light


def names(rows):
    assert all(len(row.ours) == len(row.by_hand) > 0 for row in rows)
    assert all(wall_s > 0 and cpu_s >= 0 for row in rows for wall_s, cpu_s in (*row.ours, *row.by_hand))
    return [row.name for row in rows]


def test_table_has_medians_and_ratios(capsys):
    light.print_table(
        [light.Row(name="fit", ours=[(1, 4e-4), (3, 4e-4), (9, 5e-4)], by_hand=[(2, 2e-4)], goal=1.3)],
    )
    assert capsys.readouterr().out.splitlines()[2] == "| fit | 3.00 s; 400 µs | 2.00 s; 200 µs | 1.50; 2.00 | 1.3 |"


def test_checkpoints_are_measured():
    assert names(light.checkpoint_rows(rounds=1, nbytes=1e4)) == ["save of 6.1e-06 GB", "restore of 6.1e-06 GB"]


@pytest.mark.matrix
def test_loop_is_measured():
    rows = light.loop_rows(rounds=1, steps=2, seq_len=8)
    assert len(names(rows)) == 4


@pytest.mark.matrix
def test_commands_are_measured():
    assert len(names(light.command_rows(rounds=1))) == 3
