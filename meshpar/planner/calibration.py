"""Constants of the planner's estimates, read from `calibration.toml` with origin and date."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

_SECTIONS = tomllib.loads(Path(__file__).with_name("calibration.toml").read_text(encoding="utf-8"))
MEMORY, STEP, SEARCH = (SimpleNamespace(**_SECTIONS[name]) for name in ("memory", "step", "search"))
