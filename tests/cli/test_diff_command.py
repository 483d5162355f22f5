"""Test `meshpar diff`: exit code, report and JSON for a model with a missing reduction."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_verify_command import WRONG, command


@pytest.mark.matrix
def test_a_missing_reduction_is_named(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    done = command("diff wrong.py --case 'tensor=2; ddp() | tensor_parallel()' --json", tmp_path)
    assert done.returncode == 1, done.stderr
    origin = json.loads(done.stdout)["origin"]
    line = WRONG.splitlines().index("    part = lambda h, w: h @ w   # the all-reduce over `tensor` is missing") + 1
    assert origin["kind"] == "missing reduction"
    assert origin["lines"][0] == {
        "file": "wrong.py",
        "line": line,
        "function": "apply.<locals>.<lambda>",
    }


@pytest.mark.matrix
def test_correct_layouts_do_not_differ(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    done = command("diff wrong.py --case 'fsdp=4; fsdp(min_bytes=0)' --dtype bfloat16", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no difference beyond rounding")
