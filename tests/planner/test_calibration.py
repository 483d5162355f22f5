"""Calibration constants of the planner: each has a dated comment and is used."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PLANNER = Path(__file__).parents[2] / "meshpar" / "planner"
TEXT = (PLANNER / "calibration.toml").read_text()
SECTIONS = tomllib.loads(TEXT)
HIDDEN = SECTIONS["step"].pop("hidden")
SOURCE = "".join(path.read_text() for path in PLANNER.glob("*.py"))


@pytest.mark.parametrize("section", SECTIONS)
def test_calibration_constants_are_all_used(section):
    assert set(SECTIONS[section]) == set(re.findall(rf"\b{section.upper()}\.(\w+)", SOURCE)) - {"hidden"}


def test_calibration_hidden_shares_are_all_used():
    assert all(f'"{name}"' in SOURCE for name in HIDDEN)


def test_calibration_constants_have_dated_comments():
    _, *blocks = re.split(r"^(?=# 2\d{3}-\d\d-\d\d\. )", TEXT, flags=re.M)
    constants = [line for line in TEXT.splitlines() if re.match(r"\w+ = ", line)]
    dated = [line for block in blocks for line in block.splitlines() if re.match(r"\w+ = ", line)]
    assert dated == constants
    assert len(constants) == sum(map(len, SECTIONS.values())) + len(HIDDEN)


def test_calibration_scripts_exist():
    scripts = re.findall(r"python -m (tests[\w.]+)", TEXT)
    assert len(scripts) == 2
    assert all((PLANNER.parents[1] / f"{name.replace('.', '/')}.py").is_file() for name in scripts)
