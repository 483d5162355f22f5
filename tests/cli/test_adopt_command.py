"""`meshpar adopt` prints a report and writes a recipe that `meshpar train` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshpar.cli.adopt_command import adopt

ROOT = Path(__file__).parents[2]
MLP = ("tests.inspect.adopted_models:small_mlp", "--inputs", "x=float32[16,16]", "--layouts", "2")


def meshpar(*words: str, env: dict[str, str], cwd: Path) -> str:
    env = {**env, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "meshpar", *words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_inputs_are_required_and_the_output_is_checked_first(tmp_path: Path) -> None:
    assert "Missing option '--inputs'" in CliRunner().invoke(adopt, MLP[:1]).output
    (tmp_path / "edited.py").write_text("changes")
    for name, reason in {
        "recipe.txt": "its name must end in .py",
        "edited.py": "it exists already",
        "none/recipe.py": "there is no folder",
    }.items():
        error = CliRunner().invoke(adopt, ["no_module:Net", *MLP[1:], "--output", str(tmp_path / name)]).exception
        assert reason in str(error)
    assert (tmp_path / "edited.py").read_text() == "changes"


@pytest.mark.matrix
def test_report_and_recipe(tmp_path: Path, child_env) -> None:
    report = meshpar("adopt", *MLP, "--output", "adopted.py", env=child_env, cwd=tmp_path)
    assert "1 layouts match a single device" in report
    assert "wrote adopted.py" in report
    data = json.loads(meshpar("adopt", *MLP, "--no-verify", "--json", env=child_env, cwd=tmp_path))
    assert data["text"] == (tmp_path / "adopted.py").read_text()
    assert data["verified"] is None
    assert {leaf["path"] for leaf in data["names"]["leaves"]} <= {"a", "b", "c"}
    meshpar("explain", "adopted.py", "--check", env=child_env, cwd=tmp_path)
    meshpar("train", "adopted.py", "--steps", "2", "--set", "validate_every=none", env=child_env, cwd=tmp_path)
