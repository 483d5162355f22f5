"""README.md does what it says: its Python runs. Its commands are run by `test_commands.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_it_has_a_program() -> None:
    assert blocks("python")


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_python_block_runs_by_itself(number: int, child_env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", blocks("python")[number]],
        cwd=tmp_path,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
