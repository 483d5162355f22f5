"""A run in a bucket keeps all its files there, and resumes bit for bit after it was killed during a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.data import ArrayData
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.checkpoint_index import read_index
from meshpar.runs.training_run import run
from tests.errors import raises
from tests.grid import cases
from tests.pod import pods
from tests.pod.test_multihost import RECIPE


def tiny(**fields) -> mp.Recipe:
    rows = np.random.default_rng(0).normal(size=(160, 8)).astype(np.float32)
    model = mp.from_functions(lambda key: {"w": 0.1 * jax.random.normal(key, (8, 8))}, lambda p, x: x @ p["w"])
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(data=2), strategy=mp.ddp(), model=model,
        loss=lambda model, batch, key: (jnp.mean((model(batch["x"]) - 1.0) ** 2), {}),
        data=ArrayData(arrays=lambda: {"x": rows}), batch_size=8, **fields,
    )  # fmt: skip


def losses(folder) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def leaves(folder, step: int) -> dict:
    return read_index(folder / "checkpoints", step)["leaves"]


@pytest.mark.parametrize("store", cases("bucket", grid=["bucket", "gs_bucket"]))
def test_run_in_a_bucket_resumes_like_a_local_run(store, request, tmp_path, capsys, meshpar):
    bucket, runs = request.getfixturevalue(store), {}
    for out in (f"{bucket}/runs", tmp_path / "runs"):
        for steps in (4, 6):
            outcome = run(tiny(steps=steps, checkpoint_every=2, keep_checkpoints=2), out=out, devices=jax.devices()[:2])
            assert outcome.summary["steps_taken"] == (4 if steps == 4 else 2)
        runs[out] = outcome.folder
    there, here = runs.values()
    assert f"loss curve: {bucket}/runs/tiny/loss.png" in capsys.readouterr().out
    assert str(there) == f"{bucket}/runs/tiny"
    assert {path.name for path in there.iterdir()} == {path.name for path in here.iterdir()}
    assert Checkpoints(there / "checkpoints").steps() == Checkpoints(here / "checkpoints").steps() == [4, 6]
    assert losses(there) == losses(here)
    assert leaves(there, 6) == leaves(here, 6)
    code, out, _ = meshpar("checkpoint", "ls", there, "--json")
    assert (code, [row["step"] for row in json.loads(out)["rows"]]) == (0, [4, 6])
    with raises("unsupported-feature", "--fresh"):
        run(tiny(steps=6), out=f"{bucket}/runs", devices=jax.devices()[:2], fresh=True)


@pytest.mark.parametrize("out", ["az://bucket/runs", "s3://no-such-bucket/runs"])
def test_unusable_bucket_is_refused_before_the_data_is_read(bucket, out):
    def arrays():
        raise AssertionError("the data is read")

    recipe = tiny(steps=6).replace(data=ArrayData(arrays=arrays))
    with raises("unsupported-feature" if out.startswith("az") else "missing-file", f"run {out}/tiny"):
        run(recipe, out=out, devices=jax.devices()[:2])


KILL = """
import os, signal, sys
from meshpar.cli import main
from orbax.checkpoint._src.path import atomicity
from orbax.checkpoint import type_handlers

owner, name = {"arrays": (type_handlers.ArrayHandler, "serialize"),
               "commit": (atomicity.CommitFileTemporaryPath, "finalize")}[os.environ["MOMENT"]]
calls, function = 0, getattr(owner, name)

def kill(*args, **kwargs):
    global calls
    calls += 1
    if calls > int(os.environ["CALLS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)

setattr(owner, name, kill)
main.main(sys.argv[1:])
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("store", "moment", "calls"),
    [("bucket", "arrays", 1), ("bucket", "commit", 4), ("bucket", "commit", 5), ("gs_bucket", "commit", 5)],
)
def test_run_killed_during_a_save_resumes_exactly(store, request, child_env, tmp_path, moment, calls):
    """Kills the second save: before its arrays, before an item is complete, and before the checkpoint is complete."""
    bucket = request.getfixturevalue(store)
    (tmp_path / "recipe.py").write_text(RECIPE)
    args = ["train", "recipe.py", "--devices", "2", "--steps", "9"]

    def start(code: list[str], out: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **child_env, **env}
        command = [sys.executable, *code, *args, "--out", out]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    killed = start(["-c", KILL], f"{bucket}/runs", MOMENT=moment, CALLS=str(calls))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    there = mp.Checkpoints(f"{bucket}/runs/pod/checkpoints")
    assert there.steps() == [3]
    assert (there.folder / "6").exists() or moment == "arrays"
    resumed = start(["-m", "meshpar"], f"{bucket}/runs")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 3" in resumed.stdout
    assert there.steps() == [3, 6, 9]
    whole = start(["-m", "meshpar"], "runs")
    assert whole.returncode == 0, whole.stderr
    here = tmp_path / "runs" / "pod"
    assert losses(there.folder.parent) == losses(here)
    assert leaves(there.folder.parent, 9) == leaves(here, 9)


@pytest.mark.matrix
def test_processes_share_a_run_in_a_bucket(bucket, tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    args = ["--processes", "2", "--devices", "2", "--steps", "6", "--out"]
    for out in (f"{bucket}/runs", "runs"):
        process = pods.start(tmp_path, *args, out)
        assert process.wait(pods.PATIENCE_S) == 0, (tmp_path / "log").read_text()
    there, here = mp.Checkpoints(f"{bucket}/runs/pod/checkpoints").folder.parent, tmp_path / "runs" / "pod"
    assert losses(there) == losses(here)
    assert leaves(there, 6) == leaves(here, 6)
    assert Path(here, "summary.json").exists()
