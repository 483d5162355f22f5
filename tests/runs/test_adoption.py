"""Adopted models: recipes as code, layouts, and gradients equal to a single device."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar.inspect.proposed_names import propose_names
from meshpar.runs.adoption import _proposed, _verified, adopt, candidate_layouts, with_layout
from meshpar.runs.model_target import parse_inputs
from meshpar.runs.recipe_file import load_recipe
from tests.errors import raises
from tests.inspect.adopted_models import Decoder, small_mlp

MODELS = "tests.inspect.adopted_models"
CASES = {
    "Decoder": "ids=int32[16,6],mask=int32[16,6]",
    "ScannedExperts": "x=float32[16,6,16]",
    "ConvNet": "x=float32[16,8,8,3]",
    "Stacked": "x=float32[16,6,16]",
    "small_mlp": "x=float32[16,16]",
    "OtherNames": "x=float32[16,16]",
}
"""Class or function, and inputs."""


class WithoutWeights(nnx.Module):
    def __init__(self, rngs):
        raise RuntimeError("no weights")


def proposed(name: str, loss=None):
    return _proposed(f"{MODELS}:{name}", parse_inputs(CASES[name]), (), loss)


@pytest.mark.parametrize(("name", "loss"), [("Decoder", "cross-entropy"), ("small_mlp", "squared-error")])
def test_the_file_is_a_recipe(name, loss, tmp_path: Path) -> None:
    code, names, _ = proposed(name)
    layout = next(candidate_layouts(names, num_devices=8, per_node=8, batch_size=16))
    (tmp_path / "adopted.py").write_text(with_layout(code, names, layout).text())
    recipe = load_recipe(tmp_path / "adopted.py")
    assert recipe.mesh["fsdp"] == -1
    assert code.output.loss == loss
    assert max(map(len, (tmp_path / "adopted.py").read_text().split("\n"))) <= 120
    batch = recipe.data.arrays(8)

    def evaluated(variables, batch):
        loss, _ = recipe.loss(recipe.model.bind(*variables), batch, None)
        assert loss.weight == batch["targets"].size
        return loss.total

    with mp.use_rules(mp.MeshSpec().abstract(1), mp.ddp()):
        assert jax.eval_shape(evaluated, recipe.model.abstract(), batch).shape == ()


def test_random_inputs_are_in_range() -> None:
    """Token ids are rows of the table. A mask, which selects no rows, has ones."""
    code, *_ = proposed("Decoder")
    assert code.bounds == {"ids": 48}
    batch = code.module().examples(64)
    assert batch["ids"].max() < 48 <= len(np.unique(batch["ids"])) + 1
    assert (batch["mask"] == 1).all()
    assert batch["targets"].shape == (64, 6)


def test_a_loss_is_chosen_or_set() -> None:
    assert proposed("ConvNet")[0].output.loss == "squared-error"
    code, *_ = proposed("ConvNet", loss="cross-entropy")
    assert code.module().examples(4)["targets"].shape == (4,)


def test_targets_of_the_loss_do_not_replace_an_input() -> None:
    code, *_ = _proposed(f"{MODELS}:small_mlp", parse_inputs(CASES["small_mlp"]), (), None)
    inputs = parse_inputs("targets=float32[16,16]")
    batch = dataclasses.replace(code, inputs=inputs).module().examples(4)
    assert {name: x.shape for name, x in batch.items()} == {"targets": (4, 16), "loss_targets": (4, 16)}
    assert 'outputs - batch["loss_targets"]' in dataclasses.replace(code, inputs=inputs).text()


@pytest.mark.matrix
def test_a_model_without_divisible_dims_has_data_parallelism() -> None:
    adoption = adopt(f"{MODELS}:small_mlp", "x=float32[16,5]", settings=["width=5"], num_layouts=1, verified=False)
    assert (adoption.best.strategy, adoption.best.refused) == ("mp.ddp()", "")
    assert adoption.recipe().mesh == mp.MeshSpec(data=8)


def test_names_of_another_package_are_dropped() -> None:
    code, names, _ = proposed("OtherNames")
    assert code.module().build().names() == {}
    assert {leaf.path: leaf.names for leaf in names.leaves}["down/kernel"] == ("mlp", "embed")
    (layout, *_) = candidate_layouts(names, num_devices=8, per_node=8, batch_size=16)
    recipe = with_layout(code, names, layout).module().recipe()
    assert mp.shardings(recipe.model, mp.MeshSpec(fsdp=8).abstract(8), recipe.strategy)["up/kernel"].shards == 8


def test_layouts_divide_heads_nodes_and_batch() -> None:
    names = propose_names(mp.from_nnx(Decoder), jax.ShapeDtypeStruct((16, 6), np.int32))
    layouts = list(candidate_layouts(names, num_devices=16, per_node=8, batch_size=16))
    assert all(np.prod(list(layout.mesh.values())) == 16 for layout in layouts)
    sizes = {layout.mesh["tensor"] for layout in layouts if not layout.without}
    assert sizes == {2}  # two heads of keys
    assert {layout.mesh["tensor"] for layout in layouts if layout.without == ("vocab", "heads", "kv_heads")} == {
        2,
        4,
        8,
    }
    assert {layout.strategy for layout in layouts if layout.mesh["data"] > 1} == {
        "mp.hsdp()", "mp.hsdp() | mp.tensor_parallel()"
    }  # fmt: skip
    fewer = list(candidate_layouts(names, num_devices=16, per_node=8, batch_size=4))
    assert {layout.mesh["tensor"] for layout in fewer} == {4, 8}


@pytest.mark.parametrize(
    ("target", "inputs", "settings", "code"),
    [
        ("small_mlp", "x=float32[3,6]", ["width=6"], "indivisible"),
        ("small_mlp", "x=float32[16,6]", ["width=7"], "error-in-model"),
        ("small_mlp", "x=float32[16,16384]", ["width=16384"], "out-of-range"),
        ("Decoder", "tokens=int32[16,6]", [], "error-in-model"),
        ("total", "x=float32[16,4]", [], "not-found"),
    ],
)
def test_errors(target, inputs, settings, code) -> None:
    with raises(code):
        adopt(f"{MODELS}:{target}", inputs, settings=settings)


def test_an_error_of_the_constructor_names_its_line() -> None:
    with raises("error-in-model", "WithoutWeights") as error:
        adopt(WithoutWeights, "x=float32[16,4]")
    assert "test_adoption.py:" in error.value.reason
    with raises("error-in-model") as error:
        adopt("flax.nnx:Linear", "inputs=float32[16,4]", settings=["width=4"])
    assert error.value.requested == "create the model"


@pytest.mark.parametrize(("num_local", "num_host", "fix"), [(1, 1, "cluster"), (8, 1, "verified=False")])
def test_a_single_device_has_no_layouts(monkeypatch, num_local, num_host, fix) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform=None: [None] * (num_host if platform else num_local))
    with raises("unsupported-feature") as error:
        adopt(f"{MODELS}:small_mlp", CASES["small_mlp"])
    assert fix in error.value.fix


def test_an_object_is_not_a_target() -> None:
    with raises("wrong-type"):
        adopt(small_mlp(), "x=float32[16,16]")  # its arguments would be lost


def test_a_class_of_a_notebook_is_adopted_but_not_saved(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    sys.modules["__main__"].net = small_mlp  # type: ignore[attr-defined]
    monkeypatch.setattr(small_mlp, "__module__", "__main__")
    monkeypatch.setattr(small_mlp, "__qualname__", "net")
    adoption = adopt(small_mlp, CASES["small_mlp"], num_layouts=1, verified=False)
    assert adoption.target == "__main__:net"
    assert not adoption.best.refused
    with raises("unsupported-feature"):
        adoption.save(tmp_path / "adopted.py")


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "axis"), [("Stacked", "stage"), ("ScannedExperts", "expert")])
def test_stages_and_experts(name, axis) -> None:
    code, names, _ = proposed(name)
    layouts = candidate_layouts(names, num_devices=8, per_node=8, batch_size=16)
    layout = next(layout for layout in layouts if layout.mesh.get(axis) == 2)
    assert _verified(with_layout(code, names, layout)).ok


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_a_single_device(name, tmp_path: Path) -> None:
    adoption = adopt(f"{MODELS}:{name}", CASES[name], num_layouts=4)
    assert adoption.verified is not None
    assert adoption.verified.ok
    (deviation,) = re.findall(r"largest deviation (\S+)", adoption.verified.outcomes[0].words)
    assert float(deviation) < 1e-5
    assert adoption.to_json()["layouts"][0]["mesh"] == dict(adoption.best.mesh)
    adoption.save(tmp_path / "adopted.py")
    assert load_recipe(tmp_path / "adopted.py").strategy == adoption.recipe().strategy
    assert f"{MODELS}:{name}" in str(adoption)


@pytest.mark.pod
def test_layouts_of_a_cluster_are_ranked_by_their_simulated_steps() -> None:
    adoption = adopt(f"{MODELS}:small_mlp", CASES["small_mlp"], cluster="h100:1x8", num_layouts=3, verified=False)
    steps_s = [layout.step_s for layout in adoption.layouts]
    assert all(step_s is not None for step_s in steps_s)
    assert steps_s == sorted(steps_s)
    assert {layout.strategy for layout in adoption.layouts} > {"mp.ddp()", "mp.fsdp()"}
    assert adoption.recipe().step.precision.compute == "bfloat16"
    assert adoption.cluster == "h100:1x8"
