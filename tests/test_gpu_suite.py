"""`tests/gpu` on CPU devices, and its reason to skip without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "gpu"


def run(child_env: dict[str, str], **variables: str) -> str:
    """Run the suite in a process, check that it succeeds, and return the end of its report."""
    env = {name: value for name, value in child_env.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(SUITE)]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, cwd=SUITE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.matrix
def test_suite_runs_on_cpu_devices(child_env):
    """All tests run with small sizes, except those that read the kernels of a program for GPUs."""
    report = run(child_env, MESHPAR_TEST_GPU="cpu")
    reasons = set(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)", report, flags=re.MULTILINE))
    assert reasons == {"reads the kernels of a program for GPUs"}
    assert int(re.search(r"(\d+) passed", report)[1]) > 60


@pytest.mark.matrix
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_suite_is_skipped_without_a_gpu(child_env):
    report = run(child_env)
    assert "passed" not in report
    assert "needs a GPU, a driver and jax[cuda12] or jax[cuda13]" in report
