"""What a run costs beside its steps: every part gives its figure, and each is a ratio of two sides in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from meshpar.bench import run
from tests.cli.test_main import write_recipe


@pytest.mark.matrix
def test_every_part_of_a_run_is_measured(meshpar, tmp_path):
    recipe = write_recipe(tmp_path)
    few = ("--pairs", 2, "--steps", 20, "--restored-bytes", "4MB", "--folder", tmp_path)
    code, out, err = meshpar("bench", "run", recipe, *few, "--json")
    assert code == 0, err
    found = {measure["name"].split(",")[0]: measure for measure in json.loads(out)["measures"]}
    assert len(found) == len(run.PARTS)
    assert all(measure["value"] > 0 and measure["limit"] for measure in found.values())
    assert found["restore"]["detail"].startswith("0.004 GB in ")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("text", "tiny.py")], "all is taken away again"


@pytest.mark.matrix
def test_the_watch_is_measured_on_two_processes(tmp_path):
    words = "-m meshpar.cli.main bench watch --pairs 1 --steps 10 --json"
    command = [sys.executable, *words.split()]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (measure,) = json.loads(ran.stdout)["measures"]
    assert measure["value"] > 0
    assert "mean of 10 steps of 2 processes" in measure["detail"]
