"""`meshpar checkpoint` lists, shows and verifies what a run has saved, and changes nothing."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from meshpar.loop.checkpoint import Checkpoints, read_index, read_leaf
from tests.loop.test_checkpoint import DAMAGES, make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder with checkpoints of steps 0 and 1; the newer is for tests to damage."""
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


def test_what_lies_there_is_listed_and_shown(meshpar, saved):
    code, out, _ = meshpar("checkpoint", "ls", saved, "--json")
    assert code == 0
    assert [row["step"] for row in rows(out)] == [0, 1]
    code, out, _ = meshpar("checkpoint", "inspect", saved / "checkpoints", "--step", 0, "--json")
    assert code == 0
    shapes = {row["path"]: row["shape"] for row in rows(out)}
    assert shapes["params/up/kernel"] == [16, 64]
    _, out, _ = meshpar("checkpoint", "inspect", saved)
    assert "params/up/kernel" in out


def test_parameters_of_any_model_are_exported_as_safetensors(meshpar, saved, tmp_path):
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


def test_a_damaged_one_is_named_and_the_others_are_whole(meshpar, saved):
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


def test_where_nothing_lies_is_told(meshpar, saved, tmp_path):
    for args, words in {
        ("ls", tmp_path / "none"): "there is no such folder",
        ("ls", tmp_path): "holds none",
        ("inspect", saved, "--step", 7): "there are steps [0, 1]",
    }.items():
        code, _, err = meshpar("checkpoint", *args)
        assert code == 2
        assert words in err
