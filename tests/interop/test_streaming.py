"""Reading a model needs memory for its shards and little more: 3 GB over eight host devices of a process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="reads its files: pip install meshpar[hf]")
BYTES = 3_000_000_000


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["plain", "fp8"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not report the memory of a process")
def test_process_needs_its_shards_and_10_percent_more(form, tmp_path, child_env):
    folder = tmp_path / "model"
    folder.mkdir()

    def run(*args: str) -> str:
        command = [sys.executable, "-m", "tests.interop.streaming_process", *args]
        done = subprocess.run(command, env=child_env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    try:
        run(str(folder), str(BYTES), form)
        found = json.loads(run(str(folder)))
    finally:
        shutil.rmtree(folder)
    assert found["share"] > 0.9 * BYTES
    assert found["peak"] - found["before"] < 1.1 * found["share"], found
