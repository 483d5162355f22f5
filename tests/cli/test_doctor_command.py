"""Test `meshpar doctor` and the launch files in recipes/launch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from meshpar.cli import doctor_command as doctor
from meshpar.planner.calibration import SEARCH
from meshpar.pod import launch

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"
HEALTHY = doctor.MachineFacts(
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"},
    devices={}, links={}, host={}, environment={}, platform="gpu", shm_bytes=int(16e9), disk_bytes=int(1e12),
    open_files=65536, nvidia=True,
)  # fmt: skip


def test_findings_are_empty_without_problems() -> None:
    assert doctor.findings(HEALTHY) == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"versions": {"jax": "0.12.0", "jaxlib": "0.10.2"}}, "jax has version 0.12.0, but jaxlib has version 0.10.2"),
        ({"has_cuda_runtime": False}, "the CUDA runtime is not installed"),
        ({"platform": "cpu"}, "the machine has an NVIDIA GPU, but jax uses the CPU"),
        ({"environment": {"XLA_FLAGS": "--xla_a=1 --xla_dump_to=x"}}, "XLA_FLAGS sets --xla_a=1, which"),
        ({"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "False"}}, "memory fragmentation"),
        ({"environment": {"RANK": "0", "WORLD_SIZE": "2"}}, "MASTER_ADDR is not set"),
        (
            {"environment": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "https_proxy": "b"}},
            "https_proxy can block connections",
        ),
        ({"shm_bytes": int(64e6)}, "/dev/shm has only 64 MB"),
        ({"disk_bytes": int(1e9)}, "the disk of the runs has only 1 GB"),
        ({"open_files": 1024}, "the limit of 1024 open files"),
    ],
)
def test_findings_report_problems_with_a_fix(changed: dict, message: str) -> None:
    (finding,) = doctor.findings(dataclasses.replace(HEALTHY, **changed))
    assert message in finding.problem
    assert finding.fix


def test_doctor_command_shows_the_machine(meshpar, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    code, out, _ = meshpar("doctor", "--check", "--json", "--out", tmp_path / "runs")
    report = json.loads(out)
    assert code == 1
    assert "memory fragmentation" in json.dumps(report["findings"])
    assert report["facts"]["versions"]["jax"]
    assert report["facts"]["devices"]["here"].startswith("8 × cpu")
    assert report["facts"]["environment"]["NCCL_DEBUG"] == "WARN"
    code, out, _ = meshpar("doctor", "--out", tmp_path)
    assert code == 0
    assert re.search(r"^versions\n.*^devices\n.*^problems\n", out, flags=re.MULTILINE | re.DOTALL)


def test_launch_files_set_the_variables_that_launch_reads() -> None:
    yaml = pytest.importorskip("yaml", reason="parses a Kubernetes manifest, which needs `pip install pyyaml`")
    job = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    env = {one["name"]: one["value"] for one in spec["template"]["spec"]["containers"][0]["env"]}
    found = launch.detect({**env, "JOB_COMPLETION_INDEX": "3"})
    name = f"{job['metadata']['name']}-{job['spec']['replicatedJobs'][0]['name']}-0-0.{job['metadata']['name']}"
    assert found == launch.Launch(
        source="kubernetes", num_processes=spec["completions"], process_id=3, coordinator=f"{name}:8476"
    )
    assert env["XLA_CLIENT_MEM_FRACTION"] == f"{SEARCH.fill:.2f}"
    for script in ("train.sbatch", "mpirun.sh"):
        text = (LAUNCH / script).read_text()
        subprocess.run(["bash", "-n", LAUNCH / script], check=True)
        assert f"XLA_CLIENT_MEM_FRACTION={SEARCH.fill:.2f}" in text
        assert not re.search(r"^(export|.*-x) XLA_FLAGS", text, flags=re.MULTILINE)


def test_mpirun_names_the_first_host(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTS": "a1,b2"}
    done = subprocess.run(
        [LAUNCH / "mpirun.sh", "r.py", "--steps", "5"], env=env, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    assert "JAX_COORDINATOR_ADDRESS=a1:8476" in words
    assert words[-5:] == ["meshpar", "train", "r.py", "--steps", "5"]
