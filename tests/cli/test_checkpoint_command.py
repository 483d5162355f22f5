"""Test `meshpar checkpoint`: ls, inspect, verify and export."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.checkpoint_index import read_index, read_leaf
from tests.loop.test_checkpoint import DAMAGES, make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save checkpoints of steps 0 and 1 in the folder of a run. A test damages them."""
    folder = tmp_path_factory.mktemp("run")
    setup = make()
    state = setup.init(0)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, wait=True)
        later = jax.device_put(np.int32(1), state.step.sharding)
        checkpoints.save(state.replace(step=later), wait=True)
    return folder


def rows(out: str) -> list[dict]:
    return json.loads(out)["rows"]


def test_ls_and_inspect_show_steps_and_arrays(meshpar, saved):
    code, out, _ = meshpar("checkpoint", "ls", saved, "--json")
    assert code == 0
    assert [row["step"] for row in rows(out)] == [0, 1]
    code, out, _ = meshpar("checkpoint", "inspect", saved / "checkpoints", "--step", 0, "--json")
    assert code == 0
    shapes = {row["path"]: row["shape"] for row in rows(out)}
    assert shapes["params/up/kernel"] == [16, 64]
    _, out, _ = meshpar("checkpoint", "inspect", saved)
    assert "params/up/kernel" in out


def test_export_writes_parameters_as_safetensors(meshpar, saved, tmp_path):
    from meshpar.interop.files import Folder

    code, out, err = meshpar("checkpoint", "export", saved, tmp_path / "out", "--dtype", "bfloat16", "--max-bytes", 900)
    assert code == 0, err
    assert "of step 1" in out
    index = read_index(saved / "checkpoints", 1)
    params = {path.removeprefix("params/"): path for path in index["leaves"] if path.startswith("params/")}
    with Folder(tmp_path / "out") as folder:
        assert folder.entries.keys() == params.keys()
        assert len({entry.file for entry in folder.entries.values()}) > 1
        for name, path in params.items():
            value = read_leaf(saved / "checkpoints", index, path)
            assert np.array_equal(folder.read_full(name), value.astype("bfloat16"))
    code, _, err = meshpar("checkpoint", "export", saved, tmp_path / "out")
    assert code == 2
    assert "it exists already" in err


def test_verify_reports_damaged_checkpoints(meshpar, saved):
    code, out, err = meshpar("checkpoint", "verify", saved, "--json")
    assert (code, [row["is"] for row in rows(out)]) == (0, ["whole", "whole"]), err
    DAMAGES["run truncated"](saved / "checkpoints" / "1")
    code, out, _ = meshpar("checkpoint", "verify", saved, "--json")
    assert code == 1
    assert [row["is"].split(":")[0] for row in rows(out)] == ["whole", "damaged"]
    code, _, err = meshpar("checkpoint", "inspect", saved)
    assert code == 2
    assert "checkpoints/1: cannot read it, because it is damaged" in err
    DAMAGES["bits flipped"](saved / "checkpoints" / "0")
    code, out, _ = meshpar("checkpoint", "verify", saved, "--step", 0, "--json")
    assert (code, rows(out)[0]["is"].split(":")[0]) == (1, "damaged")
    code, _, err = meshpar("checkpoint", "export", saved, saved / "out", "--step", 0)
    assert (code, "it is damaged" in err, (saved / "out").exists()) == (2, True, False)


def test_missing_runs_and_steps_are_reported(meshpar, saved, tmp_path):
    for args, message in {
        ("ls", tmp_path / "none"): "the folder does not exist",
        ("ls", tmp_path): "has no checkpoints",
        ("inspect", saved, "--step", 7): "the saved steps are [0, 1]",
    }.items():
        code, _, err = meshpar("checkpoint", *args)
        assert code == 2
        assert message in err
