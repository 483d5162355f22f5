"""Recipes whose data, optimizer, sample or file does not do what meshpar expects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.cli import main as cli
from meshpar.data import ArrayData
from meshpar.runs.recipe import open_data
from meshpar.sharding.host_resources import unexpected
from tests.errors import raises


class Data:
    """Data whose `open` returns an object that is not a source."""

    def open(self, *, batch_size, seed):
        return [1, 2]


def loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2), {}


def linear():
    return mp.from_functions(lambda key: {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, lambda p, x: x @ p["w"] + p["b"])


def recipe(**fields):
    values = {"data": ArrayData(arrays={"x": np.ones((16, 4), np.float32)}), "model": linear(), "loss": loss}
    return mp.Recipe(name="x", mesh=mp.MeshSpec(fsdp=2), steps=2, batch_size=4, **values | fields)


def test_data_that_opens_no_source_is_refused():
    with raises("wrong-type", "Data.open"):
        open_data(recipe(data=Data()))


@pytest.mark.parametrize(
    "updates",
    [
        lambda g: {"w": g["w"][:2], "b": g["b"]},
        lambda g: {"w": g["w"]},
        lambda g: {"w": jnp.zeros(4), "b": g["b"]},
        lambda g: {"w": g["w"], "b": None},
    ],
    ids=["shape", "structure", "broadcast", "none"],
)
def test_updates_must_have_the_shapes_of_parameters(updates):
    tx = optax.GradientTransformation(lambda params: (), lambda grads, state, params: (updates(grads), state))
    state = mp.init_state(linear(), tx, mp.MeshSpec(fsdp=2).build(jax.devices()[:2]), mp.ddp(), key=0)
    with raises("unsupported-feature", "the optimizer's update"):
        mp.train_step(loss)(state, {"x": jnp.ones((4, 4))})


def test_a_folder_in_place_of_a_file_exits_with_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli.cli, "main", lambda *args, **kwargs: tmp_path.read_bytes())
    with pytest.raises(SystemExit) as exit:
        cli.main(["shard", "recipe.py"])
    assert exit.value.code == 2
    assert f"{tmp_path}: cannot use it: that failed (Is a directory)" in capsys.readouterr().err


def test_exhausted_device_memory_has_its_own_code():
    error = unexpected(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 34 bytes"), command="meshpar train")
    assert error.code == "out-of-memory"


def test_xla_flags_must_start_with_dashes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "xla_dump_to=/tmp/x")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with raises("bad-syntax", "XLA_FLAGS"):
        cli.prepare_devices(2, start="nothing")
